//! The broker is away for longer than anything waits by itself, under load. What PostgreSQL's walsender makes of it is
//! in `../broker_outage.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{MIB, Outbox, PATIENCE, PrivateKafka, Source, Topic};

const OUTAGE: Duration = Duration::from_secs(30);

/// What the relay may hold, in bytes.
const LARGEST: u64 = 100 * MIB;

promised!(broker_away_under_load_costs_neither_memory_nor_an_event to mysql, mariadb);

async fn broker_away_under_load_costs_neither_memory_nor_an_event(source: Source) {
    let mut kafka = PrivateKafka::start(1).await;
    let outbox = Outbox::create(source).await;
    let topic = Topic::create_at(&kafka.brokers(), 4, &[]).await;
    let mut relay = outbox.streaming(&topic, &[]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (outbox.writer().await, stop.clone());
    let load = tokio::spawn(async move {
        let mut first = 0;
        while !stopped.load(Ordering::Relaxed) {
            writer.run(&insert(source, "key-", first, 100, 200)).await;
            first += 100;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    topic.reader().take(1000).await;

    kafka.kill(1);
    // Far more than memory may hold, read as fast as it can be.
    outbox.execute(&insert(source, "large-", 0, 120_000, 1000)).await;
    let begin = Instant::now();
    println!("at most {} MiB when all was written", relay.peak_memory() / MIB);
    while begin.elapsed() < OUTAGE {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let peak = relay.peak_memory();
        assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
        assert!(relay.is_running(), "the relay ended");
    }
    let peak = relay.peak_memory();
    println!("at most {} MiB until the broker came back", peak / MIB);
    assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
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

/// One transaction of so many events of twenty keys, numbered from `first`.
fn insert(source: Source, prefix: &str, first: usize, count: usize, padding: usize) -> String {
    let numbers = source.numbers(count);
    format!(
        "INSERT INTO outbox (partition_key, payload, seq)
         SELECT CONCAT('{prefix}', n % 20), JSON_OBJECT('seq', {first} + n, 'pad', REPEAT('x', {padding})), {first} + n
         FROM {numbers} ORDER BY n"
    )
}
