//! The broker is away for longer than anything waits by itself, under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::support::{Database, Expected, MIB, PATIENCE, PrivateKafka, Relay, Server, Topic};

const OUTAGE: Duration = Duration::from_secs(60);

/// What the relay may hold, in bytes.
const LARGEST: u64 = 100 * MIB;

/// Commits a hundred events at a time until told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Load {
    async fn begin(database: &Database, pause: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (sql, stopped) = (database.connect().await, stop.clone());
        let task = tokio::spawn(async move {
            let insert = sql
                .prepare(
                    "INSERT INTO outbox (partition_key, payload, seq)
                     SELECT 'key-' || n % 20, jsonb_build_object('seq', n, 'pad', repeat('x', 200)), n
                     FROM generate_series($1::bigint, $1 + 99) n",
                )
                .await
                .expect("the insert is prepared");
            let mut first = 0i64;
            while !stopped.load(Ordering::Relaxed) {
                sql.execute(&insert, &[&first]).await.expect("a hundred events are committed");
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

#[tokio::test(flavor = "multi_thread")]
async fn broker_away_for_a_minute_costs_neither_the_walsender_nor_memory_nor_an_event() {
    let mut kafka = PrivateKafka::start(1).await;
    let database = Database::with_outbox(Server::Newest).await;
    // A relay that forgets to speak while it cannot deliver would be dropped ten times over.
    database.execute(&format!("ALTER DATABASE {} SET wal_sender_timeout = '5s'", database.name())).await;
    let topic = Topic::create_at(&kafka.brokers(), 4, &[]).await;
    let mut relay = Relay::start(&database, &topic, &[]);
    let walsender = relay.until_streaming(&database).await;
    let load = Load::begin(&database, Duration::from_millis(200)).await;
    topic.reader().take(1000).await;

    kafka.kill(1);
    let begin = Instant::now();
    // Far more than memory may hold, read as fast as it can be.
    database
        .execute(
            "INSERT INTO outbox (partition_key, payload, seq)
             SELECT 'large-' || n % 20, jsonb_build_object('seq', n, 'pad', repeat('x', 1000)), n
             FROM generate_series(1, 120000) n",
        )
        .await;
    let mut peak = 0;
    while begin.elapsed() < OUTAGE {
        tokio::time::sleep(Duration::from_secs(1)).await;
        peak = peak.max(relay.memory());
        assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
        assert!(relay.is_running(), "the relay ended");
        assert_eq!(database.walsender().await, Some(walsender), "the walsender of the beginning is the one of now");
    }
    println!("at most {} MiB while the broker was away", peak / MIB);
    kafka.restart(1).await;
    load.end().await;
    let end = database.wal_position().await;
    let expected = Expected::of(&database).await;
    let delivered = expected.arrive_in(&mut topic.reader(), PATIENCE).await;
    database.until_confirmed(end, PATIENCE).await;
    assert_eq!(database.walsender().await, Some(walsender), "the walsender of the beginning is the one of now");
    let peak = peak.max(relay.peak_memory());
    println!("{delivered:?}, at most {} MiB", peak / MIB);
    assert!(peak <= LARGEST, "the relay held {} MiB", peak / MIB);
    relay.stop().await;
}

/// A frozen broker, not a dead one: requests that the client has given up may still be carried out when it wakes up.
#[tokio::test(flavor = "multi_thread")]
async fn client_timeout_shorter_than_the_outage_loses_and_reorders_nothing() {
    let kafka = PrivateKafka::start(1).await;
    let timeouts: [&[&str]; 2] = [
        &["--kafka", "socket.timeout.ms=1000", "--kafka", "request.timeout.ms=1000"],
        &["--unsafe", "--kafka", "message.timeout.ms=5000"],
    ];
    let mut relays = Vec::new();
    for flags in timeouts {
        let database = Database::with_outbox(Server::Newest).await;
        let topic = Topic::create_at(&kafka.brokers(), 4, &[]).await;
        let relay = Relay::streaming(&database, &topic, flags).await;
        let load = Load::begin(&database, Duration::from_millis(100)).await;
        topic.reader().take(300).await;
        relays.push((relay, database, topic, load));
    }
    for _ in 0..2 {
        kafka.freeze(1);
        tokio::time::sleep(Duration::from_secs(13)).await;
        kafka.thaw(1);
        // Until the next freeze, in the middle of what is caught up.
        relays[0].2.reader().take(2000).await;
    }
    for (relay, database, topic, load) in relays {
        load.end().await;
        let end = database.wal_position().await;
        let delivered = Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
        println!("{delivered:?}");
        database.until_confirmed(end, PATIENCE).await;
        relay.stop().await;
    }
}
