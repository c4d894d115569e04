//! `outboxd position` by file and offset, with and without GTIDs, and where the log does not reach.

use crate::support::MySqlFlavor::MySql;
use crate::support::{Numbers, PrivateMySql, on_both, outboxd};

/// The end of the log, as a file and an offset.
async fn place(numbers: &Numbers) -> String {
    let statement = match numbers.database.flavor() {
        MySql => "SHOW BINARY LOG STATUS",
        _ => "SHOW MASTER STATUS",
    };
    let rows = numbers.database.rows(statement).await;
    let row = rows.first().expect("the log has an end");
    format!("{}:{}", row.string(0), row.string(1))
}

async fn set(numbers: &Numbers, position: &str) -> (i32, String) {
    let url = numbers.database.url();
    let ended = outboxd(&["position", "set", position, &url, "--reason", "why", "--yes"]).await;
    (ended.code, format!("{}{}", ended.stdout, ended.stderr))
}

async fn catch_up(numbers: &Numbers) {
    numbers.start(&["--until-caught-up"]).exits_with(0).await;
}

#[tokio::test]
async fn without_gtids_a_file_and_an_offset_are_set_ahead_and_back() {
    let server = PrivateMySql::start(MySql, &["--gtid-mode=OFF", "--enforce-gtid-consistency=OFF"]).await;
    let mut numbers = Numbers::at(&server.url()).await;
    catch_up(&numbers).await;
    numbers.add(1).await;
    catch_up(&numbers).await;
    let first = place(&numbers).await;
    numbers.add(2).await;
    numbers.database.execute("FLUSH BINARY LOGS").await;
    numbers.add(3).await;
    let third = place(&numbers).await;
    numbers.add(4).await;
    let (code, told) = set(&numbers, &third).await;
    assert!(code == 0 && told.contains("2 events, which will never be delivered"), "{code}: {told}");
    catch_up(&numbers).await;
    numbers.arrive(&[1, 4]).await;
    numbers.nothing_more().await;
    let (code, told) = set(&numbers, &first).await;
    assert!(code == 0 && told.contains("3 events, which will be delivered once more"), "{code}: {told}");
    catch_up(&numbers).await;
    numbers.arrive(&[2, 3, 4]).await;
    numbers.nothing_more().await;

    // Inside of a transaction, beyond the end, and where the log no longer reaches.
    let (file, offset) = third.split_once(':').expect("a place");
    let inside = offset.parse::<u64>().expect("an offset") + 100;
    let stored = numbers.database.checkpoint().await;
    for (position, code, words) in [
        (format!("{file}:{inside}"), 2, "cannot be read from"),
        (format!("{file}:99999999"), 2, "lies beyond"),
        ("binlog.000099:4".to_owned(), 4, "no longer has"),
        ("3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5".to_owned(), 2, "is not a position of this server"),
    ] {
        let told = set(&numbers, &position).await;
        assert!(told.0 == code && told.1.contains(words), "{position}: {told:?}");
    }
    assert_eq!(numbers.database.checkpoint().await, stored, "nothing was changed");
}

#[tokio::test]
async fn with_gtids_a_file_and_an_offset_are_those_of_all_that_lies_before() {
    on_both(async |flavor| {
        let server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        catch_up(&numbers).await;
        numbers.add(1).await;
        numbers.add(2).await;
        let (second, gtids) = (place(&numbers).await, numbers.end_of_log().await);
        numbers.add(3).await;
        let (code, told) = set(&numbers, &second).await;
        assert!(code == 0 && told.contains("2 events, which will never be delivered"), "{code}: {told}");
        assert_eq!(numbers.database.checkpoint().await, Some(gtids));
        catch_up(&numbers).await;
        numbers.arrive(&[3]).await;
        numbers.nothing_more().await;

        // What was purged cannot be delivered again.
        numbers.database.execute("FLUSH BINARY LOGS").await;
        let end = place(&numbers).await;
        let (file, _) = end.split_once(':').expect("a place");
        numbers.database.execute(&format!("PURGE BINARY LOGS TO '{file}'")).await;
        let (code, told) = set(&numbers, &second).await;
        assert!(code == 4 && told.contains("does not have this file"), "{code}: {told}");
        let (code, told) = set(&numbers, "earliest").await;
        assert_eq!(code, 0, "{told}");
        catch_up(&numbers).await;
        numbers.nothing_more().await;
    })
    .await;
}
