//! `--delivery exactly-once`, where a commit is larger than a transaction, a leader sleeps, and a broker dies. (Kills under
//! load are in `killed_relay.rs`.) Consumers read what is committed.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::support::{Outbox, PATIENCE, PrivateKafka, Record, Relay, Source, Topic, eventually};

const EXACTLY_ONCE: [&str; 2] = ["--delivery", "exactly-once"];

promised!(commit_larger_than_a_transaction_is_delivered_exactly_once_through_kills to postgres, mysql, mariadb);

async fn commit_larger_than_a_transaction_is_delivered_exactly_once_through_kills(source: Source) {
    const ROWS: usize = 200_000;
    const KEYS: usize = 10;
    let outbox = Outbox::of_columns(source, "id BIGINT, partition_key VARCHAR(20), payload TEXT").await;
    let topic = Topic::create(2).await;
    // Transactions of at most a thousand records.
    let flags = [&EXACTLY_ONCE[..], &["--max-in-flight", "2000"]].concat();
    let mut relay = outbox.streaming(&topic, &flags).await;
    outbox
        .execute(&format!(
            "INSERT INTO outbox SELECT n, CONCAT('key-', MOD(n, {KEYS})), 'x' FROM {} ORDER BY n",
            source.numbers(ROWS)
        ))
        .await;
    let end = outbox.end_of_log().await;
    let mut reader = topic.reader();
    let mut records = Vec::new();
    for kill in 1..=6 {
        // In the middle of the commit each time.
        let enough = kill * ROWS / 8 - records.len();
        records.extend(reader.until(PATIENCE, "a part of the commit", |part| part.len() >= enough).await);
        relay.kill();
        relay = outbox.relay(&topic, &flags);
    }
    let left = ROWS - records.len();
    records.extend(reader.until(PATIENCE, "the rest of the commit", |part| part.len() >= left).await);
    outbox.until_confirmed(&end, PATIENCE).await;
    relay.stop().await;
    records.extend(reader.rest().await);
    let ids: HashSet<&str> = records.iter().map(Record::id).collect();
    assert_eq!((ids.len(), records.len()), (ROWS, ROWS), "events are missing or came twice");
    for key in 0..KEYS {
        let key = format!("key-{key}");
        let of_key = records.iter().filter(|record| record.key.as_deref() == Some(&key));
        let numbers: Vec<usize> = of_key.map(|record| record.id().parse().expect("a number")).collect();
        assert!(numbers.is_sorted(), "the events of {key} are out of order");
    }
}

promised!(frozen_leader_that_wakes_commits_nothing_that_its_successor_delivers to postgres, mongodb);

async fn frozen_leader_that_wakes_commits_nothing_that_its_successor_delivers(source: Source) {
    let outbox = Outbox::create(source).await;
    outbox.drop_silent_readers().await;
    let topic = Topic::create(3).await;
    let mut leader = outbox.streaming(&topic, &EXACTLY_ONCE).await;
    let enough = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (outbox.writer().await, enough.clone());
    let load = tokio::spawn(async move {
        while !stopped.load(Ordering::Relaxed) {
            writer.commit(&["a", "b", "c", "d", "e"]).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    let mut standby = outbox.relay(&topic, &EXACTLY_ONCE);
    standby.until_state("standing-by").await;
    for _ in 0..3 {
        topic.reader().take(100).await;
        // Most of the time it has a transaction open.
        leader.signal(Signal::SIGSTOP);
        standby.until_state("streaming").await;
        let delivered = topic.reader().take(1).await.len();
        assert_eq!(delivered, 1);
        leader.signal(Signal::SIGCONT);
        leader.until_state("standing-by").await;
        std::mem::swap(&mut leader, &mut standby);
    }
    enough.store(true, Ordering::Relaxed);
    load.await.expect("the load was written");
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    assert!(delivered.events > 300, "{delivered:?}");
    assert_eq!(delivered.duplicates, 0, "a leader that slept has delivered what its successor did");
    leader.stop().await;
    standby.until_state("streaming").await;
    standby.stop().await;
}

promised!(broker_that_dies_in_the_middle_of_transactions_costs_no_event_and_makes_none_twice to postgres, mysql);

async fn broker_that_dies_in_the_middle_of_transactions_costs_no_event_and_makes_none_twice(source: Source) {
    let mut kafka = PrivateKafka::start(1).await;
    let outbox = Outbox::create(source).await;
    let topic = Topic::create_at(&kafka.brokers(), 3, &[]).await;
    let relay = outbox.streaming(&topic, &EXACTLY_ONCE).await;
    let enough = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (outbox.writer().await, enough.clone());
    let load = tokio::spawn(async move {
        while !stopped.load(Ordering::Relaxed) {
            writer.commit(&["a", "b", "c"]).await;
        }
    });
    for _ in 0..2 {
        topic.reader().take(100).await;
        let before = delivered(&relay).await;
        kafka.kill(1);
        kafka.restart(1).await;
        eventually(PATIENCE, "more is delivered", async || (delivered(&relay).await > before + 100).then_some(()))
            .await;
    }
    enough.store(true, Ordering::Relaxed);
    load.await.expect("the load was written");
    let found = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    assert_eq!(found.duplicates, 0, "events came twice");
    relay.stop().await;
}

/// Events that were confirmed.
async fn delivered(relay: &Relay) -> u64 {
    relay.status().await["events"].as_u64().expect("the status counts events")
}
