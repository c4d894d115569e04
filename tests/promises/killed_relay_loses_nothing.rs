//! `kill -9` again and again, under writers whose transactions overlap, commit late, and roll back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{Database, Dice, Expected, PATIENCE, Relay, Server, Topic, Writer};

const KEYS: [&str; 7] = ["a", "b", "c", "d", "e", "f", "g"];
const WRITERS: u64 = 4;
const KILLS: u64 = 11;

#[tokio::test(flavor = "multi_thread")]
async fn killed_relay_loses_nothing_and_keeps_the_order_of_each_key() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(4).await;
    let mut relay = Relay::streaming(&database, &topic, &[]).await;

    let done = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for number in 0..WRITERS {
        let (writer, done) = (Writer::connect(&database).await, done.clone());
        writers.push(tokio::spawn(async move {
            let mut dice = Dice::seeded(7 + number);
            while !done.load(Ordering::Relaxed) {
                transaction(&writer, &mut dice).await;
            }
        }));
    }
    let mut dice = Dice::seeded(3);
    for kill in 0..KILLS {
        // Some die while they start, some in full flow.
        if kill % 3 != 0 {
            relay.until_streaming(&database).await;
        }
        // Longer than it takes to tell the server a position, sooner than records that linger are sent.
        let least = if kill % 3 == 1 { 1200 } else { 0 };
        tokio::time::sleep(Duration::from_millis(least + dice.roll(1500))).await;
        relay.kill();
        // Every third one dies with all that it has read unacknowledged: whoever confirms what was received would confirm
        // what is lost then.
        let flags: &[&str] = if kill % 3 == 0 { &["--kafka", "linger.ms=60000"] } else { &[] };
        relay = Relay::start(&database, &topic, flags);
    }
    done.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.expect("a writer wrote");
    }
    let end = database.wal_position().await;
    let expected = Expected::of(&database).await;
    assert!(expected.count() > 500, "only {} events were written", expected.count());
    let delivered = expected.arrive_in(&mut topic.reader(), PATIENCE).await;
    println!("{delivered:?}");
    database.until_confirmed(end, PATIENCE).await;
    relay.stop().await;
}

/// One to twenty events of some keys; one in five is rolled back, in another one a part.
async fn transaction(writer: &Writer, dice: &mut Dice) {
    let rolled_back = dice.roll(5) == 0;
    let with_savepoint = dice.roll(5) == 0;
    writer.run("BEGIN").await;
    for key in KEYS {
        for _ in 0..dice.roll(4) {
            writer.add(key).await;
        }
        if with_savepoint && dice.roll(3) == 0 {
            writer.run("SAVEPOINT part").await;
            writer.add(key).await;
            writer.run(if dice.roll(3) == 0 { "RELEASE SAVEPOINT part" } else { "ROLLBACK TO SAVEPOINT part" }).await;
        }
    }
    writer.run(if rolled_back { "ROLLBACK" } else { "COMMIT" }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolled_back_rows_never_appear() {
    let database = Database::with_outbox(Server::Oldest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let insert = |id: u32| {
        format!(
            "INSERT INTO outbox (id, partition_key, payload, seq)
             VALUES ('00000000-0000-0000-0000-{id:012}', 'key', 'true', {id})"
        )
    };
    let statements = [
        "BEGIN".to_owned(),
        insert(1),
        "ROLLBACK; BEGIN".to_owned(),
        insert(2),
        "SAVEPOINT outer_part".to_owned(),
        insert(3),
        "SAVEPOINT inner_part".to_owned(),
        insert(4),
        "RELEASE SAVEPOINT inner_part; ROLLBACK TO SAVEPOINT outer_part".to_owned(),
        insert(5),
        "SAVEPOINT kept_part".to_owned(),
        insert(6),
        "RELEASE SAVEPOINT kept_part; COMMIT; BEGIN".to_owned(),
        insert(7),
        // Deleted in its own transaction, as outboxes that keep nothing do: it is an event all the same.
        "DELETE FROM outbox WHERE seq = 7; COMMIT".to_owned(),
        insert(8),
    ];
    database.execute(&statements.join("; ")).await;
    let mut reader = topic.reader();
    let last = "00000000-0000-0000-0000-000000000008";
    let mut records = reader
        .until(PATIENCE, "the last one arrives", |records| records.iter().any(|record| record.id() == last))
        .await;
    records.extend(reader.rest().await);
    let numbers: Vec<u32> = records.iter().map(|record| record.id()[24..].parse().expect("a number")).collect();
    assert_eq!(numbers, [2, 5, 6, 7, 8]);
    relay.stop().await;
}
