//! Commits single rows at a steady rate and times each until a consumer has it.
//!
//! Writers, consumer and clock are in one process, so the times of a row are kept here under its number, and the
//! payload carries only the number. Two times are counted from: just before the INSERT is sent (`from_send`, which
//! holds the commit itself) and when the server's answer to it is there (`from_commit`, which may come out low or even
//! negative where the record overtakes the answer).
//!
//! `--direct` is the control: the same writers hand the same records to a producer instead, which shows what harness
//! and broker take by themselves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rdkafka::config::ClientConfig;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use rdkafka::{Message as _, Offset};
use serde_json::{Value, json};

use crate::backlog::{Numbered, Relay};
use crate::database::Database;
use crate::process::{cpu_seconds, load_average, peak_mib};
use crate::topic::Topic;

const PRIMING: i64 = -1;

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    relay: Relay,
    /// Rows, hence commits, a second
    #[arg(long, default_value_t = 1000)]
    rate: u64,
    /// Connections that share the rate
    #[arg(long, default_value_t = 4)]
    writers: u64,
    /// Seconds that are not counted
    #[arg(long, default_value_t = 5)]
    warm: u64,
    /// Seconds that are
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Bytes of each payload
    #[arg(long, default_value_t = 200)]
    payload: usize,
    /// Produce to the topic without database and relay
    #[arg(long)]
    direct: bool,
    /// The control's linger.ms
    #[arg(long, default_value = "0")]
    linger: String,
}

/// When each row was sent, committed and received, in nanoseconds since the start; 0 is never.
struct Times {
    start: Instant,
    sent: Vec<AtomicU64>,
    committed: Vec<AtomicU64>,
    received: Vec<AtomicU64>,
}

impl Times {
    fn new(rows: usize) -> Self {
        let never = || (0..rows).map(|_| AtomicU64::new(0)).collect();
        Times { start: Instant::now(), sent: never(), committed: never(), received: never() }
    }

    fn note(&self, when: &[AtomicU64], n: usize) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // A row that comes twice counts from its first coming.
        let _ = when[n].compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Milliseconds between two times of each counted row, ascending.
    fn between(&self, from: &[AtomicU64], to: &[AtomicU64], counted_from: usize) -> Vec<f64> {
        let mut spans: Vec<f64> = from[counted_from..]
            .iter()
            .zip(&to[counted_from..])
            .map(|(from, to)| (from.load(Ordering::Relaxed), to.load(Ordering::Relaxed)))
            .filter(|(from, to)| *from != 0 && *to != 0)
            .map(|(from, to)| (to as f64 - from as f64) / 1e6)
            .collect();
        spans.sort_by(f64::total_cmp);
        spans
    }
}

fn percentiles(spans: &[f64]) -> Value {
    let at = |share: f64| {
        let place = (spans.len() as f64 * share) as usize;
        spans.get(place.min(spans.len().saturating_sub(1)))
    };
    json!({"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)})
}

pub fn run(options: &Options) -> anyhow::Result<Value> {
    let relay = &options.relay;
    let topic = crate::block_on(Topic::create(&relay.brokers, &relay.topic, relay.partitions))?;
    let mut running = None;
    if !options.direct {
        let mut started = relay.start()?;
        crate::block_on(prime(options, &topic, &mut started))?;
        running = Some(started);
    }
    topic.assign(Offset::Beginning)?;
    let foreign = await_assignment(&topic)?;

    let rows = usize::try_from(options.rate * (options.warm + options.seconds))?;
    let counted_from = usize::try_from(options.rate * options.warm)?;
    let times = Times::new(rows);
    let producer = producer(options)?;
    let consumed = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..options.writers)
            .map(|writer| {
                let (times, producer) = (&times, &producer);
                scope.spawn(move || match options.direct {
                    true => produce(options, writer, times, producer),
                    false => crate::block_on(commit(options, writer, times)),
                })
            })
            .collect();
        let consumed = consume(options, &topic, &times, running.as_ref().map(|relay| relay.pid()));
        for writer in writers {
            writer.join().map_err(|_| anyhow::anyhow!("a writer died"))??;
        }
        consumed
    })?;
    let peak = running.as_ref().and_then(|relay| peak_mib(relay.pid()));
    if let Some(running) = &mut running {
        running.terminate()?;
        running.wait()?;
    }
    let late = times.between(&scheduled(options, rows), &times.sent, counted_from);
    Ok(json!({
        "rate": options.rate,
        "writers": options.writers,
        "counted": rows - counted_from,
        "missing": consumed.missing,
        "duplicates": consumed.duplicates,
        "foreign": foreign,
        "from_send_ms": percentiles(&times.between(&times.sent, &times.received, counted_from)),
        "from_commit_ms": percentiles(&times.between(&times.committed, &times.received, counted_from)),
        "commit_ms": percentiles(&times.between(&times.sent, &times.committed, counted_from)),
        "late_ms": percentiles(&late),
        "cpu_cores": consumed.cpu_cores,
        "peak_rss_mib": peak,
        "load_average": load_average(),
    }))
}

/// Commits rows that do not count until one has come through: then the relay runs.
async fn prime(options: &Options, topic: &Topic, relay: &mut crate::backlog::Running) -> anyhow::Result<()> {
    let mut database = Database::connect(&options.relay.source).await?;
    let deadline = Instant::now() + Duration::from_secs(90);
    while topic.records()? == 0 {
        if let Some(status) = relay.ended()? {
            bail!("the relay ended ({status}) before a record came through");
        }
        if Instant::now() > deadline {
            bail!("no record came through within 90 s");
        }
        database.insert("priming", &payload(PRIMING, options.payload)).await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}

/// Reads what is there already, so that the consumer is at the end of every partition; returns how many there were.
fn await_assignment(topic: &Topic) -> anyhow::Result<u64> {
    let mut read = 0;
    let mut quiet = 0;
    while read < topic.records()? || quiet < 5 {
        match topic.consumer.poll(Duration::from_millis(200)) {
            Some(message) => {
                message?;
                read += 1;
            }
            None => quiet += 1,
        }
    }
    Ok(read)
}

/// A payload of this many bytes with this number in it.
pub fn payload(n: i64, bytes: usize) -> String {
    let mut text = format!(r#"{{"n": {n}, "note": ""#);
    // Digits that compress about as well as a real payload's.
    let mut state = n as u64 ^ 0x9e37_79b9_7f4a_7c15;
    while text.len() + 2 < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let hex = format!("{:08x}", state >> 32);
        text.push_str(&hex[..hex.len().min(bytes - 2 - text.len())]);
    }
    text.push_str("\"}");
    text
}

/// When each row is due, in the form of the other times.
fn scheduled(options: &Options, rows: usize) -> Vec<AtomicU64> {
    let due = |n: usize| (due_after(options, n as u64).as_nanos() as u64).max(1);
    (0..rows).map(|n| AtomicU64::new(due(n))).collect()
}

/// The first row is due a second after the start, when all writers are connected.
fn due_after(options: &Options, n: u64) -> Duration {
    Duration::from_secs(1) + Duration::from_nanos(n * 1_000_000_000 / options.rate)
}

fn rows_of(options: &Options, writer: u64) -> impl Iterator<Item = u64> {
    (writer..options.rate * (options.warm + options.seconds)).step_by(options.writers as usize)
}

fn sleep_until(when: Instant) {
    std::thread::sleep(when.saturating_duration_since(Instant::now()));
}

async fn commit(options: &Options, writer: u64, times: &Times) -> anyhow::Result<()> {
    let mut database = Database::connect(&options.relay.source).await?;
    for n in rows_of(options, writer) {
        let (key, payload) = ((n % 10_000).to_string(), payload(n as i64, options.payload));
        // Blocks the thread, which has nothing else to do, because the runtime's own sleep counts in milliseconds.
        sleep_until(times.start + due_after(options, n));
        times.note(&times.sent, n as usize);
        database.insert(&key, &payload).await?;
        times.note(&times.committed, n as usize);
    }
    Ok(())
}

fn producer(options: &Options) -> anyhow::Result<ThreadedProducer<DefaultProducerContext>> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", &options.relay.brokers).set("linger.ms", &options.linger);
    // As outboxd's sink has them.
    config.set("enable.idempotence", "true").set("compression.type", "lz4").set("partitioner", "murmur2_random");
    Ok(config.create()?)
}

fn produce(
    options: &Options,
    writer: u64,
    times: &Times,
    producer: &ThreadedProducer<DefaultProducerContext>,
) -> anyhow::Result<()> {
    for n in rows_of(options, writer) {
        let (key, payload) = ((n % 10_000).to_string(), payload(n as i64, options.payload));
        sleep_until(times.start + due_after(options, n));
        times.note(&times.sent, n as usize);
        let record = BaseRecord::to(&options.relay.topic).key(&key).payload(&payload);
        producer.send(record).map_err(|(error, _)| error)?;
    }
    producer.flush(Duration::from_secs(20)).context("the control's records")
}

struct Consumed {
    missing: u64,
    duplicates: u64,
    /// What the relay used of one core in the counted time.
    cpu_cores: Option<f64>,
}

fn consume(options: &Options, topic: &Topic, times: &Times, relay: Option<u32>) -> anyhow::Result<Consumed> {
    let mut left = times.received.len() as u64;
    let mut duplicates = 0;
    let counted_from = times.start + due_after(options, options.rate * options.warm);
    let end = times.start + due_after(options, left);
    let mut cpu_from = None;
    let mut cpu_to = None;
    let cpu = || relay.and_then(cpu_seconds).map(|cpu| (Instant::now(), cpu));
    while Instant::now() < end + Duration::from_secs(20) && (left > 0 || Instant::now() < end) {
        if cpu_from.is_none() && Instant::now() >= counted_from {
            cpu_from = cpu();
        }
        if cpu_to.is_none() && Instant::now() >= end {
            cpu_to = cpu();
        }
        let Some(message) = topic.consumer.poll(Duration::from_millis(50)) else { continue };
        let message = message?;
        let Numbered { n } = serde_json::from_slice(message.payload().unwrap_or_default())?;
        let Some(received) = usize::try_from(n).ok().filter(|n| *n < times.received.len()) else { continue };
        if times.received[received].load(Ordering::Relaxed) == 0 {
            times.note(&times.received, received);
            left -= 1;
        } else {
            duplicates += 1;
        }
    }
    let cpu_to = cpu_to.or_else(cpu);
    let cpu_cores =
        cpu_from.zip(cpu_to).map(|((from, before), (to, after))| (after - before) / (to - from).as_secs_f64());
    Ok(Consumed { missing: left, duplicates, cpu_cores })
}
