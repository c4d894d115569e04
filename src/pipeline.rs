//! A pipeline from start to end: one generation after the other, each from the confirmed position.
//!
//! Passing trouble is retried with back-off for ever and shown in the status; only what a person must mend ends the
//! pipeline.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::ack_window::{AckWindow, Advanced, Limits};
use crate::config::{DeadLetter, PipelineSettings};
use crate::event::{Chunk, Micros};
use crate::failure::{ExitCode, Failure, Halt};
use crate::metrics::PipelineMetrics;
use crate::position::Position;
use crate::relay::{Ended, Relay};
use crate::route::{Plan, Router};
use crate::sink::{self, Sink};
use crate::source::{self, SourceStats};

/// Tells every pipeline to stop.
#[derive(Clone)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Stop(receiver))
    }

    /// Resolves when stopping was asked for, or nobody is left to ask.
    pub async fn requested(&self) {
        let _ = self.0.clone().wait_for(|stop| *stop).await;
    }
}

/// What a pipeline is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Starting,
    Streaming,
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
            State::StandingBy => "standing-by",
            State::Retrying => "retrying",
            State::Stopped => "stopped",
            State::Failed => "failed",
        }
    }
}

/// What operators see of a pipeline; written by the relay per chunk, read at any time.
pub struct PipelineStatus {
    name: String,
    pub source: Arc<SourceStats>,
    pub metrics: PipelineMetrics,
    in_flight: AtomicUsize,
    /// Commit time of the oldest event read and not yet known to be delivered, 0 when there is none.
    oldest_unconfirmed: AtomicU64,
    confirmed: AtomicU64,
    told: Mutex<Told>,
}

struct Told {
    state: State,
    since: Instant,
    position: Option<Position>,
    last_error: Option<String>,
    /// Last time that something was read or confirmed.
    last_progress: Instant,
    source_connected: bool,
    sink_connected: bool,
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
    pub events: u64,
    pub dead_letters: u64,
    pub leader: bool,
    pub source_connected: bool,
    pub sink_connected: bool,
    pub idle_for: Duration,
    pub in_state_for: Duration,
}

impl PipelineStatus {
    pub fn new(name: &str, metrics: PipelineMetrics) -> Self {
        let now = Instant::now();
        PipelineStatus {
            name: name.to_owned(),
            source: Arc::default(),
            metrics,
            in_flight: AtomicUsize::new(0),
            oldest_unconfirmed: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
            told: Mutex::new(Told {
                state: State::Starting,
                since: now,
                position: None,
                last_error: None,
                last_progress: now,
                source_connected: false,
                sink_connected: false,
            }),
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn enter(&self, state: State) {
        let mut told = self.told();
        if told.state != state {
            (told.state, told.since) = (state, Instant::now());
        }
        let streaming = state == State::Streaming;
        (told.source_connected, told.sink_connected) = (streaming, streaming);
        if streaming {
            told.last_error = None;
        } else {
            // What was in flight is read again, or was delivered.
            self.in_flight.store(0, Ordering::Relaxed);
            self.oldest_unconfirmed.store(0, Ordering::Relaxed);
        }
        self.metrics.entered(state);
    }

    fn failed(&self, what: &str) {
        self.told().last_error = Some(what.to_owned());
    }

    /// A chunk was read.
    pub fn read(&self, chunk: &Chunk) {
        let events = chunk.events();
        self.in_flight.fetch_add(events.len(), Ordering::Relaxed);
        self.metrics.transactions.inc_by(u64::from(chunk.transactions));
        if let Some(first) = events.first() {
            let committed = chunk.commit(first).committed_at.0.max(1) as u64;
            let _ = self.oldest_unconfirmed.compare_exchange(0, committed, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Chunks have finished.
    pub fn advanced(&self, advanced: &Advanced) {
        let before = self.in_flight.fetch_sub(advanced.events, Ordering::Relaxed);
        self.metrics.events.inc_by(advanced.events as u64);
        self.metrics.bytes.inc_by(advanced.bytes as u64);
        if let Some(end) = &advanced.end {
            self.confirmed(&end.position);
            if advanced.events > 0 {
                self.metrics.delivery.observe(end.committed_at.seconds_until(Micros::now()));
            }
            let left = if before > advanced.events { end.committed_at.0.max(1) as u64 } else { 0 };
            self.oldest_unconfirmed.store(left, Ordering::Relaxed);
        }
        self.told().last_progress = Instant::now();
    }

    pub fn confirmed(&self, position: &Position) {
        self.confirmed.store(position.as_gauge(), Ordering::Relaxed);
        self.told().position = Some(position.clone());
    }

    pub fn parked(&self) {
        self.metrics.dead_letters.inc();
    }

    pub fn snapshot(&self) -> Snapshot {
        let told = self.told();
        let server = self.source.server_position.load(Ordering::Relaxed);
        let oldest = self.oldest_unconfirmed.load(Ordering::Relaxed);
        Snapshot {
            name: self.name.clone(),
            state: told.state,
            position: told.position.as_ref().map(Position::to_string),
            last_error: told.last_error.clone(),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            confirmed: self.confirmed.load(Ordering::Relaxed),
            lag_bytes: self.source.lag_bytes(server.saturating_sub(self.confirmed.load(Ordering::Relaxed))),
            lag_seconds: if oldest == 0 { 0.0 } else { Micros(oldest as i64).seconds_until(Micros::now()) },
            retained_bytes: self.source.retained_bytes.load(Ordering::Relaxed),
            events: self.metrics.events.get(),
            dead_letters: self.metrics.dead_letters.get(),
            leader: told.state == State::Streaming,
            source_connected: told.source_connected,
            sink_connected: told.sink_connected,
            idle_for: told.last_progress.elapsed(),
            in_state_for: told.since.elapsed(),
        }
    }
}

const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// Runs a pipeline until it is stopped, has caught up, or cannot go on.
pub async fn run(settings: &PipelineSettings, status: &PipelineStatus, stop: &Stop) -> Result<(), Halt> {
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

async fn generations(settings: &PipelineSettings, status: &PipelineStatus, stop: &Stop) -> Result<(), Halt> {
    let plan = Plan::compile(&settings.route).map_err(|error| Halt {
        code: ExitCode::Usage,
        what: format!("pipeline `{}`: {error}", settings.name),
        remedy: String::new(),
    })?;
    let mut router = Router::new(plan);
    let sink_memory = sink::Memory::default();
    let source_memory = source::Memory::new(&settings.source);
    let mut backoff = FIRST_BACKOFF;
    let mut again = 0u32;
    loop {
        status.enter(State::Starting);
        let events_before = status.metrics.events.get();
        let generation = generation(settings, status, stop, &mut router, &sink_memory, &source_memory);
        let failure = match generation.await {
            Ok(_) => return Ok(()),
            Err(failure) => failure,
        };
        if status.metrics.events.get() > events_before {
            (backoff, again) = (FIRST_BACKOFF, 0);
        }
        let pause = match failure {
            Failure::Halt(halt) => return Err(halt),
            Failure::StandBy { what } if settings.no_standby => {
                return Err(Halt {
                    code: ExitCode::HeldElsewhere,
                    what,
                    remedy: "run without --no-standby to wait for it".to_owned(),
                });
            }
            Failure::StandBy { what } => {
                stand_by(settings, status, stop, &what).await;
                Duration::ZERO
            }
            Failure::Again { what } => {
                status.failed(&what);
                status.metrics.retries.inc();
                tracing::info!(pipeline = settings.name, "reading again from the confirmed position: {what}");
                again += 1;
                // Learning something takes a few turns; more of them is trouble like any other.
                if again <= 5 { Duration::ZERO } else { FIRST_BACKOFF * 2u32.pow((again - 5).min(5)) }
            }
            Failure::Retry { what } => {
                status.enter(State::Retrying);
                status.failed(&what);
                status.metrics.retries.inc();
                let pause = backoff;
                tracing::warn!(pipeline = settings.name, retry_in_ms = pause.as_millis() as u64, "{what}");
                backoff = (backoff * 2).min(LONGEST_BACKOFF);
                pause
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.requested() => return Ok(()),
        }
    }
}

async fn stand_by(settings: &PipelineSettings, status: &PipelineStatus, stop: &Stop, what: &str) {
    if status.told().state != State::StandingBy {
        tracing::info!(pipeline = settings.name, "standing by: {what}");
    }
    status.enter(State::StandingBy);
    tokio::select! {
        waited = source::stand_by(settings) => if let Err(failure) = waited {
            status.failed(&failure.to_string());
            tokio::time::sleep(FIRST_BACKOFF).await;
        },
        () = stop.requested() => {}
    }
}

/// One connection to the source, one producer, one window.
async fn generation(
    settings: &PipelineSettings,
    status: &PipelineStatus,
    stop: &Stop,
    router: &mut Router,
    sink_memory: &sink::Memory,
    source_memory: &source::Memory,
) -> Result<Ended, Failure> {
    let limits = Limits { events: settings.window.max_events, bytes: settings.window.max_bytes };
    let window = Arc::new(AckWindow::new(limits));
    // First, so that the producer fetches its id while the source is being opened.
    let mut sink = Sink::create(settings, sink_memory, &window, &status.metrics.dead_letters)?;
    let mut known_topics: Vec<&str> = router.plan().fixed_topic().into_iter().collect();
    if let DeadLetter::Topic(topic) = &settings.dead_letter {
        known_topics.push(topic);
    }
    let opened = tokio::select! {
        opened = async {
            sink.ready(&known_topics).await.map_err(Failure::from)?;
            source::open(settings, router.plan().projection(), source_memory, &status.source).await.map_err(Failure::from)
        } => opened,
        failure = window.failed() => Err(failure.into()),
        () = stop.requested() => return Ok(Ended::Stopped),
    };
    let source = match opened {
        Ok(source) => source,
        Err(failure) => {
            sink.abandon().await;
            return Err(failure);
        }
    };
    status.enter(State::Streaming);
    let relay = Relay {
        source,
        sink,
        window,
        router,
        dead_letter: &settings.dead_letter,
        status,
        until_caught_up: settings.until_caught_up,
        shutdown_timeout: settings.shutdown_timeout,
    };
    relay.run(stop).await
}
