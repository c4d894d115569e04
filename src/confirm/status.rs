//! What operators see of a confirmer.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use super::settings::ConfirmSettings;
use crate::event::Micros;
use crate::status::State;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Label {
    pipeline: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SideLabel {
    pipeline: String,
    side: &'static str,
}

type Times = Family<Label, Histogram, fn() -> Histogram>;
type FloatGauge = Gauge<f64, AtomicU64>;

/// All metrics of a process that confirms.
pub struct Metrics {
    registry: Registry,
    receipts: Family<Label, Counter>,
    statements: Family<Label, Counter>,
    records: Family<Label, Counter>,
    unmatched: Family<Label, Counter>,
    foreign: Family<Label, Counter>,
    conflicts: Family<Label, Counter>,
    retries: Family<Label, Counter>,
    failures: Family<Label, Counter>,
    times: Times,
    lag: Family<Label, Gauge>,
    lag_seconds: Family<Label, FloatGauge>,
    in_flight: Family<Label, Gauge>,
    partitions: Family<Label, Gauge>,
    connected: Family<SideLabel, Gauge>,
}

/// One confirmer's share of the metrics.
pub struct Counters {
    pub receipts: Counter,
    pub statements: Counter,
    pub records: Counter,
    pub unmatched: Counter,
    pub foreign: Counter,
    pub conflicts: Counter,
    pub retries: Counter,
    pub failures: Counter,
    times: Histogram,
}

fn times() -> Histogram {
    Histogram::new([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0])
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("outboxd");
        let times: Times = Family::new_with_constructor(times as fn() -> Histogram);
        let metrics = Metrics {
            receipts: Family::default(),
            statements: Family::default(),
            records: Family::default(),
            unmatched: Family::default(),
            foreign: Family::default(),
            conflicts: Family::default(),
            retries: Family::default(),
            failures: Family::default(),
            times: times.clone(),
            lag: Family::default(),
            lag_seconds: Family::default(),
            in_flight: Family::default(),
            partitions: Family::default(),
            connected: Family::default(),
            registry: Registry::default(),
        };
        let counters = [
            ("confirmed_receipts", "Rows whose receipt was written", &metrics.receipts),
            ("confirm_statements", "Statements that wrote receipts", &metrics.statements),
            ("confirm_records", "Records read", &metrics.records),
            (
                "confirm_unmatched",
                "Ids of which no row was without a receipt: confirmed before, or of another table",
                &metrics.unmatched,
            ),
            ("confirm_foreign_records", "Records without an id that the table could have", &metrics.foreign),
            ("confirm_lock_conflicts", "Statements that gave way to others' locks", &metrics.conflicts),
            ("retries", "Times the confirmer began again after passing trouble", &metrics.retries),
            ("failures", "Times the confirmer ended for good", &metrics.failures),
        ];
        for (name, help, family) in counters {
            registry.register(name, help, family.clone());
        }
        registry.register_with_unit(
            "confirm_statement",
            "Time of a statement that wrote receipts",
            Unit::Seconds,
            times,
        );
        let gauges = [
            ("confirm_lag_records", "Records of our partitions that were not read yet", &metrics.lag),
            ("in_flight", "Records read whose receipts are not written yet", &metrics.in_flight),
            ("confirm_partitions", "Partitions that this instance reads", &metrics.partitions),
        ];
        for (name, help, family) in gauges {
            registry.register(name, help, family.clone());
        }
        let lag = "Age of the newest record whose receipt was written, while there are more";
        registry.register("confirm_lag_seconds", lag, metrics.lag_seconds.clone());
        registry.register("connected", "1 when the side is connected", metrics.connected.clone());
        registry.register("build", "The program", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        Metrics { registry, ..metrics }
    }
}

impl Metrics {
    /// The status of a confirmer that is about to run.
    pub fn status(&self, settings: &ConfirmSettings) -> Status {
        let label = Label { pipeline: settings.name.clone() };
        let metrics = Counters {
            receipts: self.receipts.get_or_create_owned(&label),
            statements: self.statements.get_or_create_owned(&label),
            records: self.records.get_or_create_owned(&label),
            unmatched: self.unmatched.get_or_create_owned(&label),
            foreign: self.foreign.get_or_create_owned(&label),
            conflicts: self.conflicts.get_or_create_owned(&label),
            retries: self.retries.get_or_create_owned(&label),
            failures: self.failures.get_or_create_owned(&label),
            times: self.times.get_or_create_owned(&label),
        };
        Status::new(settings, metrics)
    }

    /// The metrics as Prometheus reads them.
    pub fn encode(&self, confirmers: &[Arc<Status>]) -> Result<String, std::fmt::Error> {
        for status in confirmers {
            let snapshot = status.snapshot();
            let label = Label { pipeline: snapshot.name.clone() };
            self.lag.get_or_create(&label).set(i64::try_from(snapshot.lag_records).unwrap_or(i64::MAX));
            self.lag_seconds.get_or_create(&label).set(snapshot.lag_seconds);
            self.in_flight.get_or_create(&label).set(snapshot.in_flight as i64);
            self.partitions.get_or_create(&label).set(snapshot.partitions as i64);
            for (side, up) in [("source", snapshot.source_connected), ("kafka", snapshot.kafka_connected)] {
                let label = SideLabel { pipeline: snapshot.name.clone(), side };
                self.connected.get_or_create(&label).set(i64::from(up));
            }
        }
        let mut page = String::new();
        text::encode(&mut page, &self.registry)?;
        Ok(page)
    }
}

struct Told {
    state: State,
    since: Instant,
    last_error: Option<String>,
    /// Of the brokers, until one of them answers.
    kafka_error: Option<String>,
    /// Last time that receipts were written, or that there were none to write.
    last_progress: Instant,
}

pub struct Status {
    name: String,
    group: String,
    topics: Vec<String>,
    pub metrics: Counters,
    told: Mutex<Told>,
    in_flight: AtomicUsize,
    partitions: AtomicUsize,
    lag: AtomicU64,
    /// When the newest record was made whose receipt was written, in milliseconds since 1970.
    made_at: AtomicI64,
    kafka_up: AtomicBool,
}

/// A copy of what is told.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub name: String,
    pub group: String,
    pub topics: Vec<String>,
    pub state: State,
    pub in_state_for: Duration,
    pub idle_for: Duration,
    pub last_error: Option<String>,
    pub in_flight: usize,
    pub partitions: usize,
    pub lag_records: u64,
    pub lag_seconds: f64,
    pub receipts: u64,
    pub statements: u64,
    pub records: u64,
    pub unmatched: u64,
    pub foreign: u64,
    pub source_connected: bool,
    pub kafka_connected: bool,
}

impl Status {
    fn new(settings: &ConfirmSettings, metrics: Counters) -> Self {
        let now = Instant::now();
        Status {
            name: settings.name.clone(),
            group: settings.group.clone(),
            topics: settings.topics.clone(),
            metrics,
            told: Mutex::new(Told {
                state: State::Starting,
                since: now,
                last_error: None,
                kafka_error: None,
                last_progress: now,
            }),
            in_flight: AtomicUsize::new(0),
            partitions: AtomicUsize::new(0),
            lag: AtomicU64::new(0),
            made_at: AtomicI64::new(0),
            kafka_up: AtomicBool::new(false),
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn enter(&self, state: State) {
        let mut told = self.told();
        if told.state != state {
            (told.state, told.since) = (state, Instant::now());
        }
        match state {
            State::Streaming | State::StandingBy => {
                told.last_error = None;
                self.kafka_up.store(true, Ordering::Relaxed);
            }
            State::Failed => {
                self.metrics.failures.inc();
            }
            _ => {}
        }
        if !matches!(state, State::Streaming | State::StandingBy) {
            self.in_flight.store(0, Ordering::Relaxed);
            self.partitions.store(0, Ordering::Relaxed);
        }
    }

    pub fn failed(&self, what: &str) {
        self.told().last_error = Some(what.to_owned());
    }

    /// librdkafka goes on trying.
    pub fn kafka_failed(&self, what: &str) {
        self.told().kafka_error = Some(what.to_owned());
    }

    pub fn assigned(&self, partitions: usize) {
        self.partitions.store(partitions, Ordering::Relaxed);
    }

    pub fn in_flight(&self, records: usize) {
        if self.in_flight.swap(records, Ordering::Relaxed) == 0 {
            self.told().last_progress = Instant::now();
        }
    }

    pub fn lags(&self, records: u64) {
        self.lag.store(records, Ordering::Relaxed);
    }

    /// Whether a broker is connected.
    pub fn kafka_is(&self, up: bool) {
        self.kafka_up.store(up, Ordering::Relaxed);
        if up {
            self.told().kafka_error = None;
        }
    }

    /// Receipts were written for so many of the ids.
    pub fn written(&self, ids: u64, rows: u64, took: Duration) {
        self.metrics.statements.inc();
        self.metrics.receipts.inc_by(rows);
        self.metrics.unmatched.inc_by(ids.saturating_sub(rows));
        self.metrics.times.observe(took.as_secs_f64());
    }

    /// A batch is done with, whose last record was made then.
    pub fn progressed(&self, made_at: i64) {
        self.made_at.fetch_max(made_at, Ordering::Relaxed);
        let mut told = self.told();
        told.last_progress = Instant::now();
        told.last_error = None;
    }

    pub fn snapshot(&self) -> Snapshot {
        let told = self.told();
        let running = matches!(told.state, State::Streaming | State::StandingBy);
        let lag_records = self.lag.load(Ordering::Relaxed);
        let made_at = Micros(self.made_at.load(Ordering::Relaxed).saturating_mul(1000));
        let behind = running && lag_records > 0 && made_at.0 > 0;
        Snapshot {
            name: self.name.clone(),
            group: self.group.clone(),
            topics: self.topics.clone(),
            state: told.state,
            in_state_for: told.since.elapsed(),
            idle_for: told.last_progress.elapsed(),
            last_error: told.last_error.clone().or_else(|| told.kafka_error.clone()),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            partitions: self.partitions.load(Ordering::Relaxed),
            lag_records,
            lag_seconds: if behind { made_at.seconds_until(Micros::now()) } else { 0.0 },
            receipts: self.metrics.receipts.get(),
            statements: self.metrics.statements.get(),
            records: self.metrics.records.get(),
            unmatched: self.metrics.unmatched.get(),
            foreign: self.metrics.foreign.get(),
            source_connected: running,
            kafka_connected: running && self.kafka_up.load(Ordering::Relaxed),
        }
    }
}
