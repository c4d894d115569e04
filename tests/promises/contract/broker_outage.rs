//! The broker is away for longer than anything waits by itself, under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::support::{MIB, Outbox, PATIENCE, PrivateKafka, Source, Topic};

/// Longer than the minute after which MySQL hangs up on whoever does not read.
const OUTAGE: Duration = Duration::from_secs(70);

/// What the relay may hold, in bytes.
const LARGEST: u64 = 100 * MIB;

/// Commits a hundred events at a time until told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Load {
    async fn begin(outbox: &Outbox, pause: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (source, writer, stopped) = (outbox.source, outbox.writer().await, stop.clone());
        let task = tokio::spawn(async move {
            let mut first = 0;
            while !stopped.load(Ordering::Relaxed) {
                writer.run(&insert(source, "key-", first, 100, 200)).await;
                first += 100;
                tokio::time::sleep(pause).await;
            }
        });
        Load { stop, task }
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.expect("the load was written");
    }
}

/// One transaction of so many events of twenty keys, numbered from `first`.
fn insert(source: Source, prefix: &str, first: usize, count: usize, padding: usize) -> String {
    let payload = source.json_object(&format!("'seq', {first} + n, 'pad', REPEAT('x', {padding})"));
    let numbers = source.numbers(count);
    format!(
        "INSERT INTO outbox (partition_key, payload, seq)
         SELECT CONCAT('{prefix}', n % 20), {payload}, {first} + n FROM {numbers} ORDER BY n"
    )
}

promised!(broker_away_for_a_minute_costs_neither_the_connection_nor_memory_nor_an_event to postgres, mysql, mariadb);

async fn broker_away_for_a_minute_costs_neither_the_connection_nor_memory_nor_an_event(source: Source) {
    let mut kafka = PrivateKafka::start(1).await;
    let outbox = Outbox::create(source).await;
    // A relay that forgets to speak while it cannot deliver would be dropped ten times over.
    outbox.drop_silent_readers().await;
    let topic = Topic::create_at(&kafka.brokers(), 4, &[]).await;
    let mut relay = outbox.streaming(&topic, &[]).await;
    let load = Load::begin(&outbox, Duration::from_millis(200)).await;
    topic.reader().take(1000).await;

    kafka.kill(1);
    // Far more than memory may hold, read as fast as it can be.
    outbox.execute(&insert(source, "large-", 0, 120_000, 1000)).await;
    let begin = Instant::now();
    while begin.elapsed() < OUTAGE {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let peak = relay.peak_memory();
        assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
        assert!(relay.is_running(), "the relay ended");
    }
    println!("at most {} MiB while the broker was away", relay.peak_memory() / MIB);
    kafka.restart(1).await;
    load.end().await;
    let end = outbox.end_of_log().await;
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_confirmed(&end, PATIENCE).await;
    let peak = relay.peak_memory();
    println!("{delivered:?}, at most {} MiB", peak / MIB);
    assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
    let opened = relay.log().matches("reading the log").count();
    assert_eq!(opened, 1, "the connection of the beginning is the one of the end");
    relay.stop().await;
}

promised!(client_timeout_shorter_than_the_outage_loses_and_reorders_nothing to postgres);

/// A frozen broker, not a dead one: requests that the client has given up may still be carried out when it wakes up.
/// It is the client's doing alone, so one source is enough.
async fn client_timeout_shorter_than_the_outage_loses_and_reorders_nothing(source: Source) {
    let kafka = PrivateKafka::start(1).await;
    let timeouts: [&[&str]; 2] = [
        &["--kafka", "socket.timeout.ms=1000", "--kafka", "request.timeout.ms=1000"],
        &["--unsafe", "--kafka", "message.timeout.ms=5000"],
    ];
    let mut relays = Vec::new();
    for flags in timeouts {
        let outbox = Outbox::create(source).await;
        let topic = Topic::create_at(&kafka.brokers(), 4, &[]).await;
        let relay = outbox.streaming(&topic, flags).await;
        let load = Load::begin(&outbox, Duration::from_millis(100)).await;
        topic.reader().take(300).await;
        relays.push((relay, outbox, topic, load));
    }
    for _ in 0..2 {
        kafka.freeze(1);
        tokio::time::sleep(Duration::from_secs(13)).await;
        kafka.thaw(1);
        // Until the next freeze, in the middle of what is caught up.
        relays[0].2.reader().take(2000).await;
    }
    for (relay, outbox, topic, load) in relays {
        load.end().await;
        let end = outbox.end_of_log().await;
        let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
        println!("{delivered:?}");
        outbox.until_confirmed(&end, PATIENCE).await;
        relay.stop().await;
    }
}
