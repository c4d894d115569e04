//! Where a log is entered that no position is stored for.

use crate::support::MySqlFlavor::{MariaDb, MySql};
use crate::support::{Numbers, PrivateMySql, Relay, Topic, ends, on_both, outboxd, texts, values};

#[tokio::test]
async fn a_first_start_enters_the_log_where_it_is_told() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        numbers.add(1).await;
        let between = numbers.end_of_log().await;
        numbers.add(2).await;
        for (name, start, expected) in [("a", "earliest", &[1, 2, 3][..]), ("b", &between, &[2, 3]), ("c", "now", &[3])]
        {
            let relay = numbers.reading(&["--name", name, "--start", start]).await;
            if start == "now" {
                numbers.add(3).await;
            }
            let upto = if start == "now" { expected.len() } else { expected.len() - 1 };
            numbers.arrive(&expected[..upto]).await;
            relay.stop().await;
        }
        // Where a position is stored, --start says nothing any more.
        let relay = numbers.reading(&["--name", "c", "--start", "earliest"]).await;
        numbers.add(4).await;
        numbers.arrive(&[4]).await;
        relay.stop().await;
        let of_the_other = match flavor {
            MySql => "0-1-23",
            MariaDb => "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23",
        };
        let of_another_kind = numbers.start(&["--name", "d", "--start", of_the_other]);
        ends(of_another_kind, 2, &["is not a position of this server", "it stands at"]).await;
        numbers.nothing_more().await;
    })
    .await;
}

/// An event of a log file: its name and where it begins.
async fn events(numbers: &Numbers, file: &str) -> Vec<(String, u64)> {
    let rows = numbers.database.rows(&format!("SHOW BINLOG EVENTS IN '{file}'")).await;
    rows.iter().map(|row| (row.string(2), row.number(1))).collect()
}

async fn place(numbers: &Numbers) -> (String, u64) {
    let statement = match numbers.database.flavor() {
        MySql => "SHOW BINARY LOG STATUS",
        MariaDb => "SHOW MASTER STATUS",
    };
    let status = numbers.database.rows(statement).await;
    (status[0].string(0), status[0].number(1))
}

#[tokio::test]
async fn a_log_with_gtids_is_entered_by_file_and_offset_and_gone_on_with_by_gtid() {
    on_both(async |flavor| {
        // Whose log nobody else writes to.
        let server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        numbers.database.execute("FLUSH BINARY LOGS").await;
        numbers.add(1).await;
        numbers.add(2).await;
        let (file, offset) = place(&numbers).await;
        let (here, gtids) = (format!("{file}:{offset}"), numbers.end_of_log().await);
        numbers.add(3).await;
        numbers.database.execute("FLUSH BINARY LOGS").await;
        let (next, begin) = place(&numbers).await;
        numbers.add(4).await;
        let (last, end) = place(&numbers).await;
        assert_eq!(last, next);

        let relay = numbers.reading(&["--start", &here, "--checkpoint-interval", "50ms"]).await;
        // What lies before the place, and nothing else, is left out.
        assert!(relay.log().contains(&format!("from={gtids} ")), "{}", relay.log());
        numbers.arrive(&[3, 4]).await;
        let stored = numbers.until_stored_after(&gtids).await;
        assert!(!stored.contains(&file), "{stored} is a set of GTIDs");
        relay.stop().await;
        numbers.add(5).await;
        let relay = numbers.reading(&[]).await;
        numbers.arrive(&[5]).await;
        relay.stop().await;
        numbers.nothing_more().await;

        // At the head of a file, inside its head, at a file's end, and at the end of the log as it was.
        let size = events(&numbers, &file).await.last().expect("an event").1;
        for (name, start, expected) in [
            ("head", format!("{file}:4"), &[1, 2, 3, 4, 5][..]),
            ("second", format!("{next}:4"), &[4, 5]),
            ("after-head", format!("{next}:{begin}"), &[4, 5]),
            ("file-end", format!("{file}:{size}"), &[4, 5]),
            ("end", format!("{last}:{end}"), &[5]),
        ] {
            let topic = Topic::create(1).await;
            let flags = ["--name", name, "--start", &start, "--until-caught-up"];
            Relay::start_at(&numbers.database.url(), &topic, &flags).exits_with(0).await;
            let records = topic.reader().rest().await;
            assert_eq!(values(&records), texts(expected), "--start {start}");
        }
        // What `init` stores is the same.
        let ended = outboxd(&["init", &numbers.database.url(), "--name", "init", "--start", &here]).await;
        assert!(ended.code == 0 && ended.stdout.contains("starting position of pipeline init"), "{ended:?}");
        let stored = numbers.database.text("SELECT position FROM outboxd_checkpoint WHERE pipeline = 'init'").await;
        assert_eq!(stored, Some(gtids));
    })
    .await;
}

#[tokio::test]
async fn a_place_that_no_gtids_stand_for_is_refused() {
    on_both(async |flavor| {
        let server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        let first = place(&numbers).await.0;
        numbers.database.execute("FLUSH BINARY LOGS").await;
        numbers.add(1).await;
        let (file, begin) = place(&numbers).await;
        numbers.add(2).await;
        numbers.add(3).await;
        let refused = async |start: String, code: i32, words: &str| {
            ends(numbers.start(&["--start", &start]), code, &[words]).await;
        };
        let after: Vec<_> = events(&numbers, &file).await.into_iter().filter(|(_, at)| *at > begin).collect();
        let second = after.iter().position(|(kind, _)| kind.to_ascii_lowercase().contains("gtid")).expect("a GTID");
        assert!(second >= 3, "a transaction has rows: {after:?}");
        let inside = format!("lies inside the transaction that begins at {begin}");
        for (_, at) in &after[..second] {
            refused(format!("{file}:{at}"), 2, &inside).await;
        }
        refused(format!("{file}:{}", begin + 1), 2, &inside).await;
        refused(format!("{file}:5"), 2, "lies inside an event").await;
        refused(format!("{file}:99999999"), 2, "beyond the end of the file").await;
        numbers.database.execute(&format!("PURGE BINARY LOGS TO '{file}'")).await;
        refused(format!("{first}:4"), 4, "does not have this file").await;
        // Nothing was stored meanwhile: the first start is still to come.
        let relay = numbers.reading(&["--start", &format!("{file}:{}", after[second].1)]).await;
        numbers.arrive(&[3]).await;
        relay.stop().await;
        numbers.nothing_more().await;
    })
    .await;
}

/// Asked by GTID, the server would begin in the first file that has some.
#[tokio::test]
async fn a_place_before_transactions_without_gtids_is_refused() {
    let server = PrivateMySql::start(MySql, &["--gtid-mode=OFF", "--enforce-gtid-consistency=ON"]).await;
    let mut numbers = Numbers::at(&server.url()).await;
    let (first, begin) = place(&numbers).await;
    numbers.add(1).await;
    numbers.database.execute("FLUSH BINARY LOGS").await;
    let (empty, head) = place(&numbers).await;
    numbers.database.execute("FLUSH BINARY LOGS").await;
    numbers.add(2).await;
    for mode in ["OFF_PERMISSIVE", "ON_PERMISSIVE", "ON"] {
        numbers.database.execute(&format!("SET GLOBAL gtid_mode = {mode}")).await;
    }
    let (file, offset) = place(&numbers).await;
    numbers.add(3).await;
    // In the file of the first, and in one of its own before the second.
    for start in [format!("{first}:{begin}"), format!("{empty}:{head}"), "earliest".to_owned()] {
        ends(numbers.start(&["--start", &start]), 2, &["nonymous"]).await;
    }
    let relay = numbers.reading(&["--start", &format!("{file}:{offset}")]).await;
    numbers.arrive(&[3]).await;
    relay.stop().await;
    numbers.nothing_more().await;
}
