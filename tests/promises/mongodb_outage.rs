//! The broker is away for longer than anything waits by itself, while documents are written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mongodb::bson::{Document, doc};

use crate::support::{MIB, Outbox, PATIENCE, PrivateKafka, Source, Topic};

const OUTAGE: Duration = Duration::from_secs(30);

/// What the relay may hold, in bytes.
const LARGEST: u64 = 100 * MIB;

/// So many events of twenty keys, numbered from `first`.
fn documents(prefix: &str, first: usize, count: usize, padding: usize) -> impl Iterator<Item = Document> {
    let pad = "x".repeat(padding);
    (first..first + count).map(move |number| {
        let key = format!("{prefix}{}", number % 20);
        doc! { "partition_key": key, "payload": { "seq": number as i64, "pad": &pad }, "seq": number as i64 }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn broker_away_under_load_costs_neither_memory_nor_an_event() {
    let mut kafka = PrivateKafka::start(1).await;
    let outbox = Outbox::create(Source::MongoDb).await;
    let topic = Topic::create_at(&kafka.brokers(), 4, &[]).await;
    let mut relay = outbox.streaming(&topic, &[]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (collection, stopped) = (outbox.mongodb().collection("outbox"), stop.clone());
    let load = tokio::spawn(async move {
        let mut first = 0;
        while !stopped.load(Ordering::Relaxed) {
            collection.insert_many(documents("key-", first, 100, 200)).await.expect("documents are added");
            first += 100;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    topic.reader().take(1000).await;

    kafka.kill(1);
    // Far more than memory may hold, read as fast as it can be.
    for first in (0..120_000).step_by(10_000) {
        outbox.mongodb().insert_many(documents("large-", first, 10_000, 1000)).await;
    }
    let begin = Instant::now();
    while begin.elapsed() < OUTAGE {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let peak = relay.peak_memory();
        assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
        assert!(relay.is_running(), "the relay ended");
    }
    kafka.restart(1).await;
    stop.store(true, Ordering::Relaxed);
    load.await.expect("the load was written");
    let end = outbox.end_of_log().await;
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_confirmed(&end, PATIENCE).await;
    let peak = relay.peak_memory();
    println!("{delivered:?}, at most {} MiB", peak / MIB);
    assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
    relay.stop().await;
}
