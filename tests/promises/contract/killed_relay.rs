//! `kill -9` again and again, under writers whose transactions overlap, commit late, and roll back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{Delivered, Dice, MongoWriter, Outbox, OutboxWriter, PATIENCE, Source, Topic};

const KEYS: [&str; 7] = ["a", "b", "c", "d", "e", "f", "g"];
const WRITERS: u64 = 4;

promised!(killed_relay_loses_nothing_and_keeps_the_order_of_each_key to postgres, mysql, mariadb, mongodb);

async fn killed_relay_loses_nothing_and_keeps_the_order_of_each_key(source: Source) {
    survives(source, 11, &[]).await;
}

promised!(killed_relay_delivers_exactly_once to postgres, mysql, mariadb, mongodb);

async fn killed_relay_delivers_exactly_once(source: Source) {
    let delivered = survives(source, 25, &["--delivery", "exactly-once"]).await;
    assert_eq!(delivered.duplicates, 0, "events came twice");
}

/// Kills relays with these flags under load; nothing may be lost or out of order.
async fn survives(source: Source, kills: u64, flags: &[&str]) -> Delivered {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(4).await;
    let mut relay = outbox.streaming(&topic, flags).await;
    // Every counter has its row before writers meet in it.
    outbox.writer().await.commit(&KEYS).await;

    let done = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for number in 0..WRITERS {
        let (writer, done) = (outbox.writer().await, done.clone());
        writers.push(tokio::spawn(async move {
            let mut dice = Dice::seeded(7 + number);
            while !done.load(Ordering::Relaxed) {
                transaction(&writer, &mut dice).await;
            }
        }));
    }
    let mut dice = Dice::seeded(3);
    for kill in 0..kills {
        // Some die while they start, some in full flow.
        if kill % 3 != 0 {
            relay.until_state("streaming").await;
        }
        // Longer than it takes to store a position, sooner than records that linger are sent.
        let least = if kill % 3 == 1 { 1200 } else { 0 };
        tokio::time::sleep(Duration::from_millis(least + dice.roll(1500))).await;
        relay.kill();
        // Every third one dies with all that it has read unacknowledged: whoever confirms what was received would confirm
        // what is lost then.
        let lingering: &[&str] = if kill % 3 == 0 { &["--kafka", "linger.ms=50000"] } else { &[] };
        relay = outbox.relay(&topic, &[flags, lingering].concat());
    }
    done.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.expect("a writer wrote");
    }
    let end = outbox.end_of_log().await;
    let expected = outbox.expected().await;
    assert!(expected.count() > 500, "only {} events were written", expected.count());
    let delivered = expected.arrive_in(&mut topic.reader(), PATIENCE).await;
    println!("{delivered:?}");
    outbox.until_confirmed(&end, PATIENCE).await;
    relay.stop().await;
    delivered
}

/// One to twenty events of some keys; one in five is rolled back, in another one a part.
async fn transaction(writer: &OutboxWriter, dice: &mut Dice) {
    if let OutboxWriter::MongoDb(writer) = writer {
        return transaction_without_parts(writer, dice).await;
    }
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

async fn transaction_without_parts(writer: &MongoWriter, dice: &mut Dice) {
    let rolled_back = dice.roll(5) == 0;
    let keys: Vec<&str> = KEYS.into_iter().flat_map(|key| vec![key; dice.roll(4) as usize]).collect();
    match rolled_back {
        true => writer.roll_back(&keys).await,
        false => writer.commit(&keys).await,
    }
}
