//! What operators see of a pipeline and its publishers, and what they tell it to do. Written by the relay per chunk, read
//! at any time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use crate::ack_window::Advanced;
use crate::event::{Chunk, Micros};
use crate::metrics::{PipelineMetrics, PublisherMetrics};
use crate::position::Position;
use crate::recent::{Minute, Recent};
use crate::source::SourceStats;

/// What a pipeline or a publisher is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Starting,
    Streaming,
    /// By a person, until a person resumes it.
    Paused,
    /// Another instance holds it.
    StandingBy,
    /// Waiting before the next attempt.
    Retrying,
    Stopped,
    /// Ended for good.
    Failed,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Streaming => "streaming",
            State::Paused => "paused",
            State::StandingBy => "standing-by",
            State::Retrying => "retrying",
            State::Stopped => "stopped",
            State::Failed => "failed",
        }
    }
}

/// What a person tells a running pipeline; `None` means all of its publishers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    Pause(Option<String>),
    Resume(Option<String>),
    /// Begin anew from the confirmed position; who has failed is tried again.
    Restart(Option<String>),
}

type Asked = (Order, oneshot::Sender<Result<(), String>>);

/// How long an order may take.
const ORDER_PATIENCE: Duration = Duration::from_secs(15);
/// How often it is looked meanwhile whether there is still somebody to obey.
const OBEDIENCE_LOOKS: Duration = Duration::from_millis(50);

/// How many errors are remembered.
const ERRORS: usize = 8;

/// Something that went wrong, and how often in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastError {
    /// The last time.
    pub at: Micros,
    pub what: String,
    pub times: u32,
}

/// What is told of a pipeline and of a publisher alike.
struct Told {
    state: State,
    since: Instant,
    position: Option<Position>,
    last_error: Option<String>,
    /// Last time that something was read, acknowledged or confirmed, or that nothing was in flight.
    last_progress: Instant,
    /// The newest last.
    errors: VecDeque<PastError>,
}

impl Told {
    fn new() -> Mutex<Self> {
        let now = Instant::now();
        Mutex::new(Told {
            state: State::Starting,
            since: now,
            position: None,
            last_error: None,
            last_progress: now,
            errors: VecDeque::new(),
        })
    }

    fn of(told: &Mutex<Self>) -> MutexGuard<'_, Self> {
        told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&mut self, state: State) {
        if self.state != state {
            (self.state, self.since) = (state, Instant::now());
        }
        if state == State::Streaming {
            self.last_error = None;
        }
    }

    fn failed(&mut self, what: &str) {
        self.last_error = Some(what.to_owned());
        let at = Micros::now();
        if let Some(last) = self.errors.back_mut().filter(|last| last.what == what) {
            (last.at, last.times) = (at, last.times.saturating_add(1));
            return;
        }
        if self.errors.len() == ERRORS {
            self.errors.pop_front();
        }
        self.errors.push_back(PastError { at, what: what.to_owned(), times: 1 });
    }
}

/// What operators see of a publisher.
pub struct PublisherStatus {
    name: String,
    pub metrics: PublisherMetrics,
    in_flight: AtomicUsize,
    /// Commit time of the oldest event read and not yet known to be delivered, 0 when there is none.
    oldest_unconfirmed: AtomicU64,
    /// The reading of the log waits for it.
    holds_back: AtomicBool,
    /// Its sink does not answer, or asks for patience.
    sink_away: AtomicBool,
    recent: Mutex<Recent>,
    /// The id of the Kafka cluster that it writes to.
    kafka_cluster: OnceLock<String>,
    told: Mutex<Told>,
}

/// A copy of what is told of a publisher.
#[derive(Clone, Debug)]
pub struct PublisherSnapshot {
    pub name: String,
    pub state: State,
    pub position: Option<String>,
    pub last_error: Option<String>,
    pub in_flight: usize,
    pub lag_seconds: f64,
    pub holds_back: bool,
    pub sink_away: bool,
    pub events: u64,
    pub dead_letters: u64,
    pub idle_for: Duration,
    pub in_state_for: Duration,
    pub minute: Minute,
    /// The newest last.
    pub errors: Vec<PastError>,
}

impl PublisherStatus {
    fn new(name: &str, metrics: PublisherMetrics) -> Self {
        PublisherStatus {
            name: name.to_owned(),
            metrics,
            in_flight: AtomicUsize::new(0),
            oldest_unconfirmed: AtomicU64::new(0),
            holds_back: AtomicBool::new(false),
            sink_away: AtomicBool::new(false),
            recent: Mutex::default(),
            kafka_cluster: OnceLock::new(),
            told: Told::new(),
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        Told::of(&self.told)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn state(&self) -> State {
        self.told().state
    }

    pub fn enter(&self, state: State) {
        let mut told = self.told();
        told.enter(state);
        if state != State::Streaming {
            // What was in flight is read again, or was delivered.
            self.in_flight.store(0, Ordering::Relaxed);
            self.oldest_unconfirmed.store(0, Ordering::Relaxed);
            self.holds_back.store(false, Ordering::Relaxed);
        }
        self.sink_away.store(false, Ordering::Relaxed);
    }

    /// Records are sent again until the sink takes them.
    pub fn sink_is_away(&self, why: &str) {
        self.sink_away.store(true, Ordering::Relaxed);
        self.failed(why);
    }

    /// The sink has taken something.
    pub fn sink_is_back(&self) {
        if self.sink_away.swap(false, Ordering::Relaxed) {
            self.told().last_error = None;
        }
    }

    pub fn failed(&self, what: &str) {
        self.told().failed(what);
    }

    /// It was handed events of the chunk.
    pub fn took(&self, chunk: &Chunk, events: usize) {
        if events == 0 {
            return;
        }
        if self.in_flight.fetch_add(events, Ordering::Relaxed) == 0 {
            self.told().last_progress = Instant::now();
        }
        if let Some(first) = chunk.events().first() {
            let committed = chunk.commit(first).committed_at.0.max(1) as u64;
            let _ = self.oldest_unconfirmed.compare_exchange(0, committed, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    pub fn holds_back(&self, holds: bool) {
        self.holds_back.store(holds, Ordering::Relaxed);
    }

    /// Chunks have finished.
    fn advanced(&self, advanced: &Advanced) {
        let before = self.in_flight.load(Ordering::Relaxed);
        self.in_flight.store(before.saturating_sub(advanced.events), Ordering::Relaxed);
        self.metrics.events.inc_by(advanced.events as u64);
        self.metrics.bytes.inc_by(advanced.bytes as u64);
        let took = advanced.end.as_ref().map(|end| end.committed_at.seconds_until(Micros::now()));
        if advanced.events > 0 {
            self.recent().acknowledged(advanced.events, took);
        }
        if let Some(end) = &advanced.end {
            if let Some(took) = took.filter(|_| advanced.events > 0) {
                self.metrics.delivery.observe(took);
            }
            let left = if before > advanced.events { end.committed_at.0.max(1) as u64 } else { 0 };
            self.oldest_unconfirmed.store(left, Ordering::Relaxed);
        }
        let mut told = self.told();
        told.last_progress = Instant::now();
        if let Some(end) = &advanced.end {
            told.position = Some(end.position.clone());
        }
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which Kafka cluster it writes to.
    pub fn writes_to_cluster(&self, id: &str) {
        self.kafka_cluster.get_or_init(|| id.to_owned());
    }

    pub fn kafka_cluster(&self) -> Option<&str> {
        self.kafka_cluster.get().map(String::as_str)
    }

    pub fn parked(&self) {
        self.metrics.dead_letters.inc();
    }

    pub fn snapshot(&self) -> PublisherSnapshot {
        let told = self.told();
        let oldest = self.oldest_unconfirmed.load(Ordering::Relaxed);
        PublisherSnapshot {
            name: self.name.clone(),
            state: told.state,
            position: told.position.as_ref().map(Position::to_string),
            last_error: told.last_error.clone(),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            lag_seconds: if oldest == 0 { 0.0 } else { Micros(oldest as i64).seconds_until(Micros::now()) },
            holds_back: self.holds_back.load(Ordering::Relaxed),
            sink_away: self.sink_away.load(Ordering::Relaxed),
            events: self.metrics.events.get(),
            dead_letters: self.metrics.dead_letters.get(),
            idle_for: told.last_progress.elapsed(),
            in_state_for: told.since.elapsed(),
            minute: self.recent().minute(),
            errors: told.errors.iter().cloned().collect(),
        }
    }
}

/// What operators see of a pipeline.
pub struct PipelineStatus {
    name: String,
    pub source: Arc<SourceStats>,
    pub metrics: PipelineMetrics,
    pub publishers: Vec<Arc<PublisherStatus>>,
    confirmed: AtomicU64,
    told: Mutex<Told>,
    ask: mpsc::Sender<Asked>,
    asked: tokio::sync::Mutex<mpsc::Receiver<Asked>>,
    /// Rung when a pipeline that waits is told to begin at once.
    again: Notify,
}

/// A copy of what is told, for the admin address.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub name: String,
    pub state: State,
    pub position: Option<String>,
    pub last_error: Option<String>,
    pub in_flight: usize,
    pub confirmed: u64,
    /// `None` where the log is not counted in bytes.
    pub lag_bytes: Option<u64>,
    pub lag_seconds: f64,
    pub retained_bytes: u64,
    /// Rows that are pending, where a table is polled.
    pub depth: Option<u64>,
    /// Who keeps committed rows from being read, where that can be.
    pub held_back_by: Option<String>,
    pub events: u64,
    pub unmatched: u64,
    pub dead_letters: u64,
    pub leader: bool,
    pub source_connected: bool,
    pub sink_connected: bool,
    pub idle_for: Duration,
    pub in_state_for: Duration,
    /// Of all publishers.
    pub minute: Minute,
    /// The newest last; of a lone publisher's too.
    pub errors: Vec<PastError>,
    /// Those that have names of their own.
    pub publishers: Vec<PublisherSnapshot>,
}

impl PipelineStatus {
    pub fn new(name: &str, metrics: PipelineMetrics, publishers: Vec<(&str, PublisherMetrics)>) -> Self {
        let (ask, asked) = mpsc::channel(1);
        PipelineStatus {
            name: name.to_owned(),
            source: Arc::default(),
            metrics,
            publishers: publishers
                .into_iter()
                .map(|(name, metrics)| Arc::new(PublisherStatus::new(name, metrics)))
                .collect(),
            confirmed: AtomicU64::new(0),
            told: Told::new(),
            ask,
            asked: tokio::sync::Mutex::new(asked),
            again: Notify::new(),
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        Told::of(&self.told)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn state(&self) -> State {
        self.told().state
    }

    /// Enters a state with all publishers.
    pub fn enter(&self, state: State) {
        self.enter_alone(state);
        for publisher in &self.publishers {
            publisher.enter(state);
        }
    }

    /// Enters a state and leaves the publishers in theirs.
    pub fn enter_alone(&self, state: State) {
        self.told().enter(state);
        self.metrics.entered(state);
    }

    pub fn failed(&self, what: &str) {
        self.told().failed(what);
    }

    /// A chunk was read.
    pub fn read(&self, chunk: &Chunk) {
        self.metrics.transactions.inc_by(u64::from(chunk.transactions));
    }

    /// Chunks have finished for one of the publishers.
    pub fn advanced(&self, publisher: &PublisherStatus, advanced: &Advanced) {
        publisher.advanced(advanced);
        self.told().last_progress = Instant::now();
    }

    pub fn confirmed(&self, position: &Position) {
        self.confirmed.store(position.as_gauge(), Ordering::Relaxed);
        self.told().position = Some(position.clone());
    }

    /// Events that were acknowledged, by all publishers.
    pub fn events(&self) -> u64 {
        self.publishers.iter().map(|publisher| publisher.metrics.events.get()).sum()
    }

    /// Tells the running pipeline to do something, and waits until it has.
    pub async fn order(&self, order: Order) -> Result<(), String> {
        let state = self.state();
        if matches!(order, Order::Restart(_)) && matches!(state, State::Starting | State::Retrying) {
            self.again.notify_waiters();
            return Ok(());
        }
        let (reply, answer) = oneshot::channel();
        let told = async {
            self.ask.send((order, reply)).await.map_err(|_| "the pipeline has ended".to_owned())?;
            answer.await.map_err(|_| "the pipeline began anew meanwhile: try again".to_owned())?
        };
        let late = |_| Err("no answer in time: try again".to_owned());
        tokio::select! {
            biased;
            refusal = self.cannot_obey() => Err(refusal),
            done = tokio::time::timeout(ORDER_PATIENCE, told) => done.unwrap_or_else(late),
        }
    }

    /// Resolves once nobody is there to obey; one that is starting will be in a moment.
    async fn cannot_obey(&self) -> String {
        loop {
            match self.state() {
                State::Starting | State::Streaming | State::Paused => tokio::time::sleep(OBEDIENCE_LOOKS).await,
                State::StandingBy => return "this instance stands by: ask the one that leads".to_owned(),
                other => return format!("the pipeline is {}: try again when it streams", other.as_str()),
            }
        }
    }

    /// The next order. For the one task that obeys.
    pub async fn next_order(&self) -> Asked {
        loop {
            match self.asked.lock().await.recv().await {
                // Whoever asked has gone, and was told that it did not happen.
                Some((_, reply)) if reply.is_closed() => {}
                Some(asked) => return asked,
                // We hold a sender ourselves.
                None => return std::future::pending().await,
            }
        }
    }

    /// Resolves when a person wants a pipeline that waits to begin at once.
    pub async fn told_again(&self) {
        self.again.notified().await;
    }

    pub fn snapshot(&self) -> Snapshot {
        let publishers: Vec<_> = self.publishers.iter().map(|publisher| publisher.snapshot()).collect();
        let told = self.told();
        let server = self.source.server_position.load(Ordering::Relaxed);
        let confirmed = self.confirmed.load(Ordering::Relaxed);
        let lone = publishers.len() == 1 && publishers[0].name == self.name;
        let leads = matches!(told.state, State::Streaming | State::Paused);
        let mut minute = Minute::default();
        publishers.iter().for_each(|one| minute.add(&one.minute));
        let mut errors: Vec<_> = told.errors.iter().cloned().collect();
        if lone {
            errors.extend(publishers[0].errors.iter().cloned());
            errors.sort_by_key(|error| error.at);
            errors.drain(..errors.len().saturating_sub(ERRORS));
        }
        Snapshot {
            name: self.name.clone(),
            state: told.state,
            position: told.position.as_ref().map(Position::to_string),
            // Of several publishers each tells its own.
            last_error: told.last_error.clone().or_else(|| publishers[0].last_error.clone().filter(|_| lone)),
            in_flight: publishers.iter().map(|one| one.in_flight).sum(),
            confirmed,
            lag_bytes: self.source.lag_bytes(server.saturating_sub(confirmed)),
            lag_seconds: publishers.iter().map(|one| one.lag_seconds).fold(0.0, f64::max),
            retained_bytes: self.source.retained_bytes.load(Ordering::Relaxed),
            depth: self.source.depth(),
            held_back_by: self.source.held_back_by(),
            events: publishers.iter().map(|one| one.events).sum(),
            unmatched: self.metrics.unmatched.get(),
            dead_letters: publishers.iter().map(|one| one.dead_letters).sum(),
            leader: leads,
            source_connected: leads,
            sink_connected: leads && !publishers.iter().any(|one| one.sink_away),
            idle_for: told.last_progress.elapsed(),
            in_state_for: told.since.elapsed(),
            minute,
            errors,
            publishers: if lone { Vec::new() } else { publishers },
        }
    }
}
