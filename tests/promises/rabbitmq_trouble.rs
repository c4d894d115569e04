//! The RabbitMQ sink while the server restarts, crashes, runs out of memory, or will not take more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lapin::types::AMQPValue;
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;

use super::rabbitmq_sink::{add, assert_in_order, database, distinct, relay};
use crate::support::{Database, Exchange, MIB, PATIENCE, PrivateRabbit, Queue, eventually};

const KEYS: usize = 23;
/// Whoever waits for a server that starts anew and for all that was committed meanwhile.
const LONG: Duration = Duration::from_secs(240);

/// Events of a burst: more than are published in a moment.
const BURST: usize = 3000;

/// Commits events until it is told to end.
struct Load {
    ended: Arc<AtomicBool>,
    burst: Arc<AtomicUsize>,
    count: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Load {
    fn begin(database: &Arc<Database>) -> Self {
        let ended = Arc::<AtomicBool>::default();
        let (burst, count) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (database, end, more, committed) = (database.clone(), ended.clone(), burst.clone(), count.clone());
        let task = tokio::spawn(async move {
            let mut next = 0;
            while !end.load(Ordering::Relaxed) {
                let rows = 20 + more.swap(0, Ordering::Relaxed);
                add(&database, next, next + rows, KEYS, 100).await;
                next += rows;
                committed.store(next, Ordering::Relaxed);
                // A few hundred events a second: load, and not more than can be read back one by one.
                tokio::time::sleep(Duration::from_millis(40)).await;
            }
        });
        Load { ended, burst, count, task }
    }

    /// Commits many events at once, so that what comes next happens in the midst of their delivery.
    async fn burst(&self) {
        let before = self.count.load(Ordering::Relaxed);
        self.burst.store(BURST, Ordering::Relaxed);
        let committed = async || (self.count.load(Ordering::Relaxed) >= before + BURST).then_some(());
        eventually(PATIENCE, "a burst is committed", committed).await;
    }

    /// The number of events.
    async fn end(self) -> usize {
        self.ended.store(true, Ordering::Relaxed);
        self.task.await.expect("all events are committed");
        self.count.load(Ordering::Relaxed)
    }
}

async fn depth(server: &PrivateRabbit, queue: &Queue) -> usize {
    let listed = server.control(&["list_queues", "--no-table-headers", "name", "messages"]).await;
    let line = listed.lines().find(|line| line.starts_with(&queue.name));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

async fn until_depth(server: &PrivateRabbit, queue: &Queue, more_than: usize) {
    let what = format!("the queue holds more than {more_than}");
    eventually(PATIENCE, &what, async || (depth(server, queue).await > more_than).then_some(())).await;
}

async fn all_arrive(queue: &mut Queue, count: usize) {
    let messages = queue.until(LONG, "all arrive", |messages| distinct(messages) >= count).await;
    assert_eq!(distinct(messages), count, "and nothing else");
    assert_in_order(messages, KEYS as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_rabbitmq_under_load_loses_nothing_and_keeps_the_order_of_each_key() {
    let mut server = PrivateRabbit::start(&[]).await;
    let database = Arc::new(database().await);
    let exchange = Exchange::declare(&server.url()).await;
    let mut queue = exchange.queue("#").await;
    let relay = relay(&database, &exchange, &[]).await;
    let load = Load::begin(&database);
    until_depth(&server, &queue, 0).await;
    load.burst().await;
    server.restart().await;
    let before = depth(&server, &queue).await;
    until_depth(&server, &queue, before).await;
    let count = load.end().await;
    all_arrive(&mut queue, count).await;
    assert!(relay.log().contains("connected to RabbitMQ again"), "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_rabbitmq_under_load_loses_nothing_and_keeps_the_order_of_each_key() {
    let mut server = PrivateRabbit::start(&[]).await;
    let database = Arc::new(database().await);
    let exchange = Exchange::declare(&server.url()).await;
    let mut classic = exchange.queue("#").await;
    let mut quorum = exchange.queue_with("#", &[("x-queue-type", AMQPValue::LongString("quorum".into()))]).await;
    let relay = relay(&database, &exchange, &[]).await;
    let load = Load::begin(&database);
    for _ in 0..2 {
        let before = depth(&server, &classic).await;
        until_depth(&server, &classic, before).await;
        load.burst().await;
        server.crash().await;
        server.resume().await;
    }
    let before = depth(&server, &classic).await;
    until_depth(&server, &classic, before).await;
    let count = load.end().await;
    all_arrive(&mut classic, count).await;
    all_arrive(&mut quorum, count).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_memory_alarm_is_waited_out_with_bounded_memory_and_holds_the_position() {
    let server = PrivateRabbit::start(&[]).await;
    let database = Arc::new(database().await);
    let mut exchange = Exchange::declare(&server.url()).await;
    let mut queue = exchange.queue("#").await;
    exchange.url = format!("{}?heartbeat=1", exchange.url);
    let flags = ["--max-in-flight-bytes", "4MiB", "--shutdown-timeout", "2s"];
    let stopped = relay(&database, &exchange, &flags).await;
    add(&database, 0, 100, KEYS, 100).await;
    until_depth(&server, &queue, 99).await;
    let memory = stopped.memory();
    server.raise_memory_alarm().await;
    // 40 MB, of which a tenth fits the window.
    add(&database, 100, 600, KEYS, 20_000).await;
    let first = database.wal_position().await;
    for part in 1..4 {
        add(&database, 100 + part * 500, 600 + part * 500, KEYS, 20_000).await;
    }
    eventually(PATIENCE, "the relay says that it is blocked", async || {
        stopped.log().contains("RabbitMQ has blocked the connection").then_some(())
    })
    .await;
    eventually(PATIENCE, "the window is full", async || {
        let in_flight = stopped.status().await["in_flight"].as_u64()?;
        (in_flight > 100).then_some(())
    })
    .await;
    assert!(database.confirmed().await.is_some_and(|confirmed| confirmed < first), "nothing is confirmed");
    // Longer than either side waits for the other's heartbeats: two seconds.
    let blocked = Instant::now();
    eventually(PATIENCE, "heartbeats have passed", async || {
        assert!(!stopped.log().contains("to be sent again"), "no time-out breaks it: {}", stopped.log());
        (blocked.elapsed() > Duration::from_secs(6)).then_some(())
    })
    .await;
    let grown = stopped.peak_memory().saturating_sub(memory);
    assert!(grown < 60 * MIB, "{} MiB more than before", grown / MIB);
    assert_eq!(stopped.log().matches("RabbitMQ has blocked the connection").count(), 1, "{}", stopped.log());

    // A stop waits no longer than it may.
    let begin = Instant::now();
    stopped.stop().await;
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());

    // Nor does a start need RabbitMQ to have memory.
    let relay = relay(&database, &exchange, &flags).await;
    eventually(PATIENCE, "the relay is blocked too", async || {
        relay.log().contains("RabbitMQ has blocked the connection").then_some(())
    })
    .await;
    server.clear_memory_alarm().await;
    all_arrive(&mut queue, 2100).await;
    assert!(relay.log().contains("takes messages again"), "{}", relay.log());
    assert!(!relay.log().contains("to be sent again"), "no time-out broke it: {}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_full_holds_the_relay_back_until_there_is_room() {
    let server = PrivateRabbit::start(&[]).await;
    let database = database().await;
    let exchange = Exchange::declare(&server.url()).await;
    let full =
        [("x-max-length", AMQPValue::LongInt(50)), ("x-overflow", AMQPValue::LongString("reject-publish".into()))];
    let mut queue = exchange.queue_with("#", &full).await;
    // One at a time, so that no later record finds the room that an earlier one did not.
    let relay = relay(&database, &exchange, &["--amqp-batch", "1", "--max-retries", "0"]).await;
    add(&database, 0, 300, KEYS, 0).await;
    eventually(PATIENCE, "records are not taken", async || relay.log().contains("nack").then_some(())).await;
    all_arrive(&mut queue, 300).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_silent_is_left_and_found_again() {
    let server = PrivateRabbit::start(&[]).await;
    let database = database().await;
    let mut exchange = Exchange::declare(&server.url()).await;
    let mut queue = exchange.queue("#").await;
    exchange.url = format!("{}?heartbeat=1", exchange.url);
    let relay = relay(&database, &exchange, &[]).await;
    add(&database, 0, 10, KEYS, 0).await;
    until_depth(&server, &queue, 9).await;
    server.freeze();
    add(&database, 10, 20, KEYS, 0).await;
    eventually(PATIENCE, "the relay has lost it", async || relay.log().contains("no heartbeat received").then_some(()))
        .await;
    server.thaw();
    all_arrive(&mut queue, 20).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_was_changed_is_read_anew_at_the_next_connect() {
    let mut server = PrivateRabbit::start(&[]).await;
    server.control(&["add_user", "relay", "old-s3cret"]).await;
    server.control(&["set_permissions", "relay", ".*", ".*", ".*"]).await;
    let database = database().await;
    let exchange = Exchange::declare(&server.url()).await;
    let mut queue = exchange.queue("#").await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("url");
    let url = |password: &str| server.url().replace("guest:guest", &format!("relay:{password}"));
    let (old, new) = (url("old-s3cret"), url("new-s3cret"));
    std::fs::write(&file, old).expect("the URL is written");
    let by_file = Exchange { url: format!("file:{}", file.display()), name: exchange.name.clone() };
    let mut relay = relay(&database, &by_file, &[]).await;
    add(&database, 0, 10, KEYS, 0).await;
    until_depth(&server, &queue, 9).await;
    server.control(&["change_password", "relay", "new-s3cret"]).await;
    server.restart().await;
    add(&database, 10, 20, KEYS, 0).await;
    eventually(PATIENCE, "the old one is refused", async || relay.log().contains("ACCESS_REFUSED").then_some(())).await;
    assert!(relay.is_running(), "it has worked before");
    std::fs::write(&file, new).expect("the URL is written");
    all_arrive(&mut queue, 20).await;
    assert!(!relay.log().contains("s3cret"), "{}", relay.log());
    relay.signal(Signal::SIGTERM);
    relay.exits_with(0).await;
}
