//! `--snapshot existing`: what is in the table when the log is first entered, then the log, with no seam between.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{Database, Expected, PATIENCE, Record, Relay, Server, Topic, Writer, eventually};

const EXISTING: [&str; 2] = ["--snapshot", "existing"];

async fn until_snapshot_is(database: &Database, state: &str) {
    eventually(PATIENCE, &format!("the checkpoint's snapshot is {state}"), async || {
        let stored = database.text("SELECT snapshot FROM outboxd_checkpoint").await;
        (stored.as_deref() == Some(state)).then_some(())
    })
    .await;
}

async fn rows_committed_around_the_start_arrive_once(server: Server) {
    let database = Database::with_outbox(server).await;
    let topic = Topic::create(3).await;
    let writer = Writer::connect(&database).await;
    for _ in 0..150 {
        writer.commit(&["a", "b", "c"]).await;
    }
    let enough = Arc::new(AtomicBool::new(false));
    let writing = tokio::spawn({
        let enough = enough.clone();
        async move {
            while !enough.load(Ordering::Relaxed) {
                writer.commit(&["b", "c"]).await;
            }
            writer
        }
    });
    let relay = Relay::streaming(&database, &topic, &EXISTING).await;
    // Some of the log comes after the snapshot for sure.
    let position = database.wal_position().await;
    database.until_confirmed(position, PATIENCE).await;
    enough.store(true, Ordering::Relaxed);
    let writer = writing.await.expect("the writer ends");
    writer.commit(&["a"]).await;
    let mut reader = topic.reader();
    let delivered = Expected::of(&database).await.arrive_in(&mut reader, PATIENCE).await;
    assert_eq!(delivered.duplicates, 0, "no row is both in the snapshot and in the log: {delivered:?}");
    until_snapshot_is(&database, "done").await;
    relay.stop().await;

    let relay = Relay::streaming(&database, &topic, &EXISTING).await;
    writer.commit(&["a"]).await;
    let records = reader.take(1).await;
    assert_eq!(records.len() + reader.rest().await.len(), 1, "a second start delivers only what is new");
    relay.stop().await;
}

#[tokio::test]
async fn existing_rows_and_concurrent_ones_arrive_exactly_once() {
    rows_committed_around_the_start_arrive_once(Server::Newest).await;
}

#[tokio::test]
async fn existing_rows_of_the_oldest_server_arrive_exactly_once() {
    rows_committed_around_the_start_arrive_once(Server::Oldest).await;
}

#[tokio::test]
async fn without_being_asked_existing_rows_stay_where_they_are() {
    let database = Database::with_outbox(Server::Newest).await;
    database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('a', '1')").await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('a', '2')").await;
    assert_eq!(topic.reader().take(1).await[0].value.as_deref(), Some("2"));
    relay.stop().await;
}

const FLEETING: &str = "WITH made AS (INSERT INTO outbox (partition_key, payload)
    SELECT 'fleeting', '0' FROM generate_series(1, 10) RETURNING id) SELECT string_agg(id::text, ' ') FROM made";

/// Rows that come and go: only the log has them.
async fn add_fleeting(database: &Database, ids: &mut HashSet<String>) {
    let made = database.text(FLEETING).await.expect("rows are made");
    ids.extend(made.split(' ').map(str::to_owned));
    database.execute("DELETE FROM outbox WHERE partition_key = 'fleeting'").await;
}

#[tokio::test]
async fn a_snapshot_that_was_killed_is_redone_and_loses_nothing() {
    const ROWS: usize = 100_000;
    let database = Database::with_outbox(Server::Newest).await;
    database
        .execute(&format!(
            "INSERT INTO outbox (partition_key, payload) SELECT 'k' || i % 50, to_jsonb(i) FROM generate_series(1, {ROWS}) i"
        ))
        .await;
    let topic = Topic::create(2).await;
    let mut reader = topic.reader();
    let flags = [&EXISTING[..], &["--max-in-flight", "1000"]].concat();

    let relay = Relay::streaming(&database, &topic, &flags).await;
    let mut ids = HashSet::new();
    add_fleeting(&database, &mut ids).await;
    let mut records = reader.until(PATIENCE, "some rows arrive", |records| records.len() >= 2000).await;
    relay.kill();
    records.extend(reader.rest().await);
    assert!(records.len() < ROWS, "the snapshot was over before the kill");
    until_snapshot_is(&database, "pending").await;
    add_fleeting(&database, &mut ids).await;
    let all = database.sql.query("SELECT id::text FROM outbox", &[]).await.expect("the table is read");
    ids.extend(all.iter().map(|row| row.get(0)));

    let relay = Relay::streaming(&database, &topic, &flags).await;
    let mut missing: HashSet<&str> = ids.iter().map(String::as_str).collect();
    for record in &records {
        missing.remove(record.id());
    }
    let mut looked_at = 0;
    let all_there = |records: &[Record]| {
        for record in &records[looked_at..] {
            missing.remove(record.id());
        }
        looked_at = records.len();
        missing.is_empty()
    };
    records.extend(reader.until(Duration::from_secs(300), "all rows arrive", all_there).await);
    until_snapshot_is(&database, "done").await;
    relay.stop().await;
    records.extend(reader.rest().await);
    let arrived: HashSet<&str> = records.iter().map(Record::id).collect();
    assert_eq!(arrived.len(), ids.len(), "nothing arrives that was not committed");
}

/// The snapshot is read over an ordinary connection, whose settings the database may have its own idea of.
#[tokio::test]
async fn a_row_of_the_snapshot_is_the_same_record_as_one_of_the_log() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::create(server).await;
        let name = database.name();
        database
            .execute(&format!(
                "ALTER DATABASE {name} SET bytea_output = 'escape'; ALTER DATABASE {name} SET DateStyle = 'German, DMY';
                 ALTER DATABASE {name} SET TimeZone = 'Asia/Kolkata'; ALTER DATABASE {name} SET extra_float_digits = -5;
                 CREATE TABLE outbox (id int PRIMARY KEY, partition_key text, payload bytea, rate float8,
                                      seen timestamptz, flag bool, created_at timestamptz) PARTITION BY RANGE (id);
                 CREATE TABLE outbox_low PARTITION OF outbox FOR VALUES FROM (0) TO (100)"
            ))
            .await;
        let insert = async |id: i32| {
            let row = format!(
                r"INSERT INTO outbox VALUES ({id}, 'ü', '\x00ff5c41', 0.1234567890123456, '2024-07-01 12:00:00.5+00', true,
                  '2024-03-05 06:07:08.91+00')"
            );
            database.execute(&row).await;
        };
        for text_stream in [false, true] {
            let topic = Topic::create(1).await;
            let mut flags = vec!["--header", "seen=seen", "--header", "flag=flag"];
            flags.extend(EXISTING);
            if text_stream {
                // float8 is read as text.
                flags.extend(["--header", "rate=rate", "--slot", "second", "--name", "second"]);
            }
            database.execute("TRUNCATE outbox").await;
            insert(1).await;
            let relay = Relay::start(&database, &topic, &flags);
            let mut reader = topic.reader();
            let mut records = reader.take(1).await;
            eventually(PATIENCE, "the snapshot is over", async || {
                let pending = "SELECT count(*) FROM outboxd_checkpoint WHERE snapshot = 'pending'";
                (database.number(pending).await == 0).then_some(())
            })
            .await;
            insert(2).await;
            records.extend(reader.take(1).await);
            let same = |record: &Record| {
                let headers: Vec<_> = record.headers.iter().filter(|(name, _)| name != "id").cloned().collect();
                (record.key.clone(), record.value.clone(), headers, record.timestamp)
            };
            assert_eq!(same(&records[0]), same(&records[1]), "{server:?}, text stream {text_stream}");
            assert_eq!(records[0].timestamp, 1_709_618_828_910);
            assert_eq!(records[0].header("seen"), Some("2024-07-01 12:00:00.5+00"));
            relay.stop().await;
        }
    }
}
