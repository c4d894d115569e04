//! Receipts: a row says that its record came out of Kafka again, and when.
//!
//! ```text
//!   relay ──▶ topic ──▶ consumer ──gather──▶ Batch ──one UPDATE──▶ received_at of up to 1000 rows
//!               ▲                                                        │
//!               └──────────────── commit offsets ◀───────────────────────┘
//! ```
//!
//! A confirmer is a consumer of the relay's topics in a group of its own. It gathers the ids of records until there are
//! enough, or the first has waited long enough, and sets `received_at` of all their rows in one statement; only then are
//! the offsets committed. So a crash at any moment repeats some records and loses no receipt, and rows that have theirs
//! stay as they are. Instances of one group share the partitions.
//!
//! librdkafka calls back on the thread that polls, and a rebalance must be able to write before partitions are let go. So
//! one thread does everything of a *generation* (one connection to the database, one consumer), in turn. Whatever goes wrong
//! ends the generation; the next one opens the database first and joins the group only when it could write, so that an
//! instance without a database leaves its partitions to others.

pub mod admin;
mod batch;
pub mod consumer;
mod desk;
pub mod id;
mod mysql;
mod postgres;
mod receipts;
mod settings;
pub mod status;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::consumer::{CommitMode, Consumer as _};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::failure::{ExitCode, Failure, Halt};
use crate::pipeline::Stop;
use crate::status::State;
use batch::Place;
use consumer::Consumer;
use desk::Desk;
use receipts::Receipts;
pub use settings::ConfirmSettings;
use status::Status;

const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// How long a poll lasts at the most: a stop is noticed within it.
const TICK: Duration = Duration::from_millis(100);

/// How often the group is asked whether it has caught up.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// How long leaving the group may take; a broker that is away is not waited for.
const LEAVE_PATIENCE: Duration = Duration::from_secs(5);

/// Runs a confirmer until it is stopped, has caught up, or cannot go on.
pub async fn run(settings: &Arc<ConfirmSettings>, status: &Arc<Status>, stop: &Stop) -> Result<(), Halt> {
    let ended = generations(settings, status, stop).await;
    match &ended {
        Ok(()) => status.enter(State::Stopped),
        Err(halt) => {
            status.enter(State::Failed);
            status.failed(&halt.to_string());
        }
    }
    ended
}

async fn generations(settings: &Arc<ConfirmSettings>, status: &Arc<Status>, stop: &Stop) -> Result<(), Halt> {
    let memory = Arc::<Memory>::default();
    let mut backoff = FIRST_BACKOFF;
    loop {
        status.enter(State::Starting);
        let records_before = status.metrics.records.get();
        let parts = Parts {
            settings: settings.clone(),
            status: status.clone(),
            stop: stop.clone(),
            runtime: Handle::current(),
            memory: memory.clone(),
        };
        let failure = match generation(parts).await {
            Ok(()) => return Ok(()),
            Err(Failure::Halt(halt)) => return Err(halt),
            Err(Failure::Retry { what } | Failure::StandBy { what } | Failure::Again { what }) => what,
        };
        if status.metrics.records.get() > records_before {
            backoff = FIRST_BACKOFF;
        }
        status.enter(State::Retrying);
        status.failed(&failure);
        status.metrics.retries.inc();
        tracing::warn!(confirmer = settings.name, retry_in_ms = backoff.as_millis() as u64, "{failure}");
        tokio::select! {
            () = tokio::time::sleep(backoff) => {}
            () = stop.requested() => return Ok(()),
        }
        backoff = (backoff * 2).min(LONGEST_BACKOFF);
    }
}

/// What outlives a generation.
#[derive(Default)]
struct Memory(Mutex<Remembered>);

#[derive(Default)]
struct Remembered {
    /// The cluster has answered: after that, trouble with it is taken to pass.
    contacted: bool,
    /// Where partitions ended when the process started.
    ends: Option<Vec<(Place, i64)>>,
}

/// Runs one generation on a thread of its own, and waits for its end as long as a stop allows.
async fn generation(parts: Parts) -> Result<(), Failure> {
    let (name, stop, patience) = (parts.settings.name.clone(), parts.stop.clone(), parts.settings.shutdown_timeout);
    let (tell, told) = oneshot::channel();
    let (leave, left) = oneshot::channel::<()>();
    let work = move || {
        match parts.open() {
            Err(failure) => drop(tell.send(Err(failure))),
            Ok(None) => drop(tell.send(Ok(()))),
            Ok(Some(consumer)) => {
                let ended = parts.read(&consumer);
                consumer.context().desk().close();
                let _ = tell.send(ended);
                // Leaves the group, which takes a broker.
                drop(consumer);
            }
        }
        drop(leave);
    };
    // Not one of the runtime's threads: those are waited for when the process ends, whatever a broker does.
    let thread = std::thread::Builder::new().name(format!("confirm {name}")).spawn(work);
    thread.map_err(|error| {
        let what = format!("cannot start a thread: {error}");
        Failure::Halt(Halt { code: ExitCode::Unexpected, what, remedy: String::new() })
    })?;
    let deadline = async {
        stop.requested().await;
        tokio::time::sleep(patience + TICK).await;
    };
    let ended = tokio::select! {
        ended = told => ended.unwrap_or_else(|_| Err(Failure::Retry { what: "the confirmer's thread died".to_owned() })),
        () = deadline => {
            tracing::warn!(confirmer = name, "not everything was written or committed before the deadline: it is read again");
            return Ok(());
        }
    };
    let _ = tokio::time::timeout(LEAVE_PATIENCE, left).await;
    ended
}

/// What a generation is made of.
struct Parts {
    settings: Arc<ConfirmSettings>,
    status: Arc<Status>,
    stop: Stop,
    runtime: Handle,
    memory: Arc<Memory>,
}

impl Parts {
    /// Opens the database, then the consumer; `None` when a stop came first.
    fn open(&self) -> Result<Option<Consumer>, Failure> {
        let settings = &self.settings;
        let opened = self.runtime.block_on(async {
            tokio::select! {
                opened = Receipts::open(settings) => Some(opened),
                () = self.stop.requested() => None,
            }
        });
        let Some(receipts) = opened.transpose()? else { return Ok(None) };
        let what = receipts.describe();
        let desk = Desk::new(settings, &self.status, &self.stop, &self.runtime, receipts);
        let consumer = consumer::create(settings, desk, &self.status)?;
        {
            let mut remembered = self.memory.0.lock().unwrap_or_else(PoisonError::into_inner);
            let partitions = consumer::look(&consumer, settings, &mut remembered.contacted)?;
            if settings.until_caught_up && remembered.ends.is_none() {
                remembered.ends = Some(consumer::ends(&consumer, settings, &partitions)?);
            }
        }
        let topics: Vec<&str> = settings.topics.iter().map(String::as_str).collect();
        let subscribed = consumer.subscribe(&topics);
        subscribed
            .map_err(|error| Failure::Retry { what: format!("subscribing to {}: {error}", topics.join(", ")) })?;
        tracing::info!(
            confirmer = settings.name,
            group = settings.group,
            topics = topics.join(", "),
            table = what,
            id_from = %settings.id_from,
            "confirming receipts"
        );
        Ok(Some(consumer))
    }

    /// Gathers and writes until told to stop, or caught up.
    fn read(&self, consumer: &Consumer) -> Result<(), Failure> {
        let context = consumer.context();
        let ends = self.memory.0.lock().unwrap_or_else(PoisonError::into_inner).ends.clone();
        let mut asked_at = Instant::now();
        loop {
            if self.stop.is_requested() {
                return context.desk().write(consumer, CommitMode::Sync);
            }
            let due = context.desk().due();
            let wait = due.map_or(TICK, |due| due.saturating_duration_since(Instant::now()).min(TICK));
            match consumer.poll(wait) {
                None => {}
                Some(Ok(record)) => context.desk().gather(&record),
                Some(Err(error)) => {
                    consumer::judge(&error, &self.settings, true)?;
                    tracing::debug!(confirmer = self.settings.name, "Kafka: {error}");
                    self.status.kafka_failed(&format!("Kafka: {error}"));
                }
            }
            let mut desk = context.desk();
            if let Some(failure) = desk.failure() {
                return Err(failure);
            }
            match desk.due() {
                Some(due) if due <= Instant::now() => desk.write(consumer, CommitMode::Async)?,
                Some(_) => {}
                None => desk.beat()?,
            }
            let Some(ends) = &ends else { continue };
            if desk.is_empty() && asked_at.elapsed() >= ASK_AGAIN {
                if consumer::has_reached(consumer, &self.settings, ends) {
                    return Ok(());
                }
                asked_at = Instant::now();
            }
        }
    }
}
