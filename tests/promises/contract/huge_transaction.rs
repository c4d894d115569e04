//! One transaction that no memory should hold.

use std::time::Duration;

use mongodb::bson::doc;

use crate::support::{
    LogPosition, MIB, Outbox, PATIENCE, PrivateMongo, PrivateMySql, Record, Relay, Source, Topic, TopicReader,
};

/// What the relay may hold, in bytes.
const LARGEST: u64 = 100 * MIB;
const KEYS: usize = 100;

promised!(million_row_transaction_is_delivered_in_a_hundred_mebibytes to postgres, mysql, mariadb);

async fn million_row_transaction_is_delivered_in_a_hundred_mebibytes(source: Source) {
    const ROWS: usize = 1_000_000;
    let outbox = Outbox::of_columns(source, "id BIGINT, partition_key VARCHAR(20), payload TEXT").await;
    let topic = Topic::create(4).await;
    let relay = outbox.streaming(&topic, &[]).await;
    outbox.execute(&insert(source, ROWS, "REPEAT('0123456789', 20)")).await;
    let end = outbox.end_of_log().await;
    let right = |record: &Record| record.value.as_ref().is_some_and(|value| value.len() == 200);
    arrive_in(&mut topic.reader(), ROWS, right).await;
    outbox.until_confirmed(&end, Duration::from_secs(30)).await;
    within_bounds(relay).await;
}

promised!(large_transaction_and_backlog_of_documents_are_delivered_in_a_hundred_mebibytes to mongodb);

/// MongoDB keeps a transaction in its cache until it is committed, so there is none of a million documents. After it comes
/// what was committed by itself while nobody read.
async fn large_transaction_and_backlog_of_documents_are_delivered_in_a_hundred_mebibytes(source: Source) {
    const TOGETHER: usize = 50_000;
    const ALL: usize = 250_000;
    let server = PrivateMongo::start(1, &["--setParameter=transactionLifetimeLimitSeconds=600"]).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    let topic = Topic::create(4).await;
    outbox.streaming(&topic, &[]).await.stop().await;
    let payload = "0123456789".repeat(20);
    let document = |number: usize| {
        doc! { "_id": number as i64, "partition_key": format!("key-{}", number % KEYS), "payload": &payload }
    };
    outbox.mongodb().insert_together((0..TOGETHER).map(document)).await;
    for first in (TOGETHER..ALL).step_by(10_000) {
        outbox.mongodb().insert_many((first..first + 10_000).map(document)).await;
    }
    let end = outbox.end_of_log().await;
    let relay = outbox.relay(&topic, &[]);
    arrive_in(&mut topic.reader(), ALL, |record| record.value.as_ref() == Some(&payload)).await;
    outbox.until_confirmed(&end, Duration::from_secs(30)).await;
    within_bounds(relay).await;
}

promised!(compressed_transaction_is_delivered_in_a_hundred_mebibytes to mysql);

/// The server compresses a transaction as a whole: it must be held, but not what it expands to.
async fn compressed_transaction_is_delivered_in_a_hundred_mebibytes(source: Source) {
    // One that compression cannot make smaller, not far from the bound of 32 MiB; and one that expands to more than may be
    // held.
    let server = PrivateMySql::start(source.flavor(), &[]).await;
    for (rows, payload) in [(30_000, "RANDOM_BYTES(1000)"), (60_000, "REPEAT('0123456789', 200)")] {
        let outbox = compressing(source, &server).await;
        let topic = Topic::create(4).await;
        let relay = outbox.streaming(&topic, &[]).await;
        let before = compressed_transactions(&outbox).await;
        outbox.execute(&insert(source, rows, payload)).await;
        assert!(compressed_transactions(&outbox).await > before, "the server has compressed it");
        let end = outbox.end_of_log().await;
        arrive_in(&mut topic.reader(), rows, |record| record.value.is_some()).await;
        outbox.until_confirmed(&end, Duration::from_secs(30)).await;
        within_bounds(relay).await;
    }
}

promised!(compressed_transaction_beyond_the_bound_halts_before_it to mysql);

async fn compressed_transaction_beyond_the_bound_halts_before_it(source: Source) {
    let server = PrivateMySql::start(source.flavor(), &[]).await;
    let outbox = compressing(source, &server).await;
    let topic = Topic::create(1).await;
    let mut relay = outbox.streaming(&topic, &[]).await;
    outbox.execute(&insert(source, 1, "'before'")).await;
    topic.reader().take(1).await;
    outbox.until_confirmed(&outbox.end_of_log().await, PATIENCE).await;

    outbox.execute(&insert(source, 36_000, "RANDOM_BYTES(1000)")).await;
    let too_large = outbox.end_of_log().await;
    outbox.execute(&insert(source, 1, "'after'")).await;
    relay.exits_with(6).await;
    tells_and_has_not_passed(&relay, &outbox, &too_large).await;
    // Nor does it get past when it is started again.
    let mut relay = outbox.relay(&topic, &[]);
    relay.exits_with(6).await;
    tells_and_has_not_passed(&relay, &outbox, &too_large).await;
    let records = topic.reader().rest().await;
    assert!(records.iter().all(|record| record.value.as_deref() == Some("before")), "nothing overtook it: {records:?}");
}

async fn tells_and_has_not_passed(relay: &Relay, outbox: &Outbox, too_large: &LogPosition) {
    let log = relay.log();
    assert!(log.contains("a compressed transaction has") && log.contains("nothing was skipped"), "{log}");
    assert!(log.contains("binlog_transaction_compression = OFF"), "{log}");
    let stored = outbox.stored().await.expect("a position is stored");
    assert!(!stored.covers(too_large), "the stored position {stored} has passed {too_large}");
}

/// An outbox whose own connection compresses what it writes, on a server of its own: whoever reads a log must hold or
/// refuse what is compressed in it, whatever table it is about.
async fn compressing(source: Source, server: &PrivateMySql) -> Outbox {
    let outbox = Outbox::create_at(source, &server.url()).await;
    outbox.make_table("id BIGINT, partition_key VARCHAR(20), payload LONGBLOB").await;
    outbox.execute("SET SESSION binlog_transaction_compression = ON").await;
    outbox
}

/// How many the server has compressed so far.
async fn compressed_transactions(outbox: &Outbox) -> i64 {
    let count = "SELECT CAST(SUM(transaction_counter) AS SIGNED)
                 FROM performance_schema.binary_log_transaction_compression_stats
                 WHERE log_type = 'BINARY' AND compression_type = 'ZSTD'";
    outbox.text(count).await.map_or(0, |number| number.parse().expect("a number"))
}

fn insert(source: Source, rows: usize, payload: &str) -> String {
    let numbers = source.numbers(rows);
    format!("INSERT INTO outbox SELECT n, CONCAT('key-', n % {KEYS}), {payload} FROM {numbers} ORDER BY n")
}

/// All arrive once, those of each key in order.
async fn arrive_in(reader: &mut TopicReader, rows: usize, right: impl Fn(&Record) -> bool) {
    let mut last = vec![None; KEYS];
    for count in 0..rows {
        let record = reader.next(PATIENCE).await.unwrap_or_else(|| panic!("only {count} events arrived"));
        let number: usize = record.id().parse().expect("the id is a number");
        // Each key's numbers are its own, a hundred apart: complete and in order together.
        let expected = last[number % KEYS].map_or(number % KEYS, |last: usize| last + KEYS);
        assert_eq!(number, expected, "the events of a key are in order and all there");
        assert!(right(&record), "{record:?}");
        last[number % KEYS] = Some(number);
    }
    assert_eq!(reader.rest().await.len(), 0, "nothing came twice");
}

async fn within_bounds(relay: Relay) {
    let peak = relay.peak_memory();
    println!("at most {} MiB", peak / MIB);
    assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
    relay.stop().await;
}
