//! One transaction that no memory should hold.

use std::time::Duration;

use crate::support::{Database, MIB, PATIENCE, Relay, Server, Topic};

const ROWS: usize = 1_000_000;

#[tokio::test(flavor = "multi_thread")]
async fn million_row_transaction_is_delivered_in_a_hundred_mebibytes() {
    let database = Database::create(Server::Newest).await;
    database.execute("CREATE TABLE outbox (id bigint, partition_key text, payload text)").await;
    let topic = Topic::create(4).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    database
        .execute(&format!(
            "INSERT INTO outbox SELECT n, 'key-' || n % 100, repeat('0123456789', 20)
             FROM generate_series(0, {ROWS} - 1) n"
        ))
        .await;
    let end = database.wal_position().await;

    let mut reader = topic.reader();
    let mut last = vec![None; 100];
    for count in 0..ROWS {
        let record = reader.next(PATIENCE).await.unwrap_or_else(|| panic!("only {count} events arrived"));
        let number: usize = record.id().parse().expect("the id is a number");
        // Each key's numbers are its own, a hundred apart: complete and in order together.
        let expected = last[number % 100].map_or(number % 100, |last: usize| last + 100);
        assert_eq!(number, expected, "the events of a key are in order and all there");
        assert_eq!(record.value.map(|value| value.len()), Some(200));
        last[number % 100] = Some(number);
    }
    assert_eq!(reader.rest().await.len(), 0, "nothing came twice");
    database.until_confirmed(end, Duration::from_secs(30)).await;
    let peak = relay.peak_memory();
    println!("at most {} MiB", peak / MIB);
    assert!(peak <= 100 * MIB, "the relay held {} MiB", peak / MIB);
    relay.stop().await;
}
