//! Prometheus metrics. Counters are held by each pipeline and moved per chunk; gauges are set when they are scraped.
//! docs/metrics.md tells of each; a test compares it with what a running outboxd shows.

mod exposition;
mod process;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::config::PipelineSettings;
use crate::source::Ignored;
use crate::status::{PipelineStatus, Snapshot, State};
pub use exposition::Exposition;
use process::ProcessMetrics;

/// A pipeline, and one of its publishers where they have names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PipelineLabel {
    pipeline: String,
    publisher: Option<String>,
}

impl EncodeLabelSet for PipelineLabel {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel as _;
        ("pipeline", self.pipeline.as_str()).encode(encoder.encode_label())?;
        match &self.publisher {
            Some(publisher) => ("publisher", publisher.as_str()).encode(encoder.encode_label()),
            None => Ok(()),
        }
    }
}

/// One of several things that are told of a pipeline or a publisher: a side, a state, an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OneOf {
    of: PipelineLabel,
    name: &'static str,
    value: &'static str,
}

impl EncodeLabelSet for OneOf {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel as _;
        self.of.encode(encoder)?;
        (self.name, self.value).encode(encoder.encode_label())
    }
}

type FloatGauge = Gauge<f64, AtomicU64>;
type Latencies = Family<PipelineLabel, Histogram, fn() -> Histogram>;

/// One pipeline's share of the metrics.
#[derive(Clone)]
pub struct PipelineMetrics {
    pub transactions: Counter,
    pub unmatched: Counter,
    pub retries: Counter,
    pub failures: Counter,
    pub pruned_rows: Counter,
    pub pruned_partitions: Counter,
}

/// One publisher's share of the metrics.
#[derive(Clone)]
pub struct PublisherMetrics {
    pub events: Counter,
    pub bytes: Counter,
    pub delivery: Histogram,
    pub retries: Counter,
    pub failures: Counter,
    pub dead_letters: Counter,
    /// Rows of a poller that the sink refused, each time.
    pub refusals: Counter,
}

impl PipelineMetrics {
    /// A pipeline that ends for good is a failure.
    pub fn entered(&self, state: State) {
        if state == State::Failed {
            self.failures.inc();
        }
    }
}

/// All metrics of the process.
pub struct Metrics {
    registry: Registry,
    /// What is told of the process, which has names without our prefix.
    process: Registry,
    events: Family<PipelineLabel, Counter>,
    transactions: Family<PipelineLabel, Counter>,
    bytes: Family<PipelineLabel, Counter>,
    delivery: Latencies,
    retries: Family<PipelineLabel, Counter>,
    failures: Family<PipelineLabel, Counter>,
    dead_letters: Family<PipelineLabel, Counter>,
    refusals: Family<PipelineLabel, Counter>,
    polls: Family<PipelineLabel, Counter>,
    depth: Family<PipelineLabel, Gauge>,
    letters: Family<PipelineLabel, Gauge>,
    marked: Family<PipelineLabel, Counter>,
    mark_statements: Family<PipelineLabel, Counter>,
    mark_failures: Family<PipelineLabel, Counter>,
    unmarked: Family<PipelineLabel, Gauge>,
    backfilled: Family<PipelineLabel, Counter>,
    unmatched: Family<PipelineLabel, Counter>,
    pruned_rows: Family<PipelineLabel, Counter>,
    pruned_partitions: Family<PipelineLabel, Counter>,
    ignored: Family<OneOf, Counter>,
    lag_bytes: Family<PipelineLabel, Gauge>,
    lag_seconds: Family<PipelineLabel, FloatGauge>,
    in_flight: Family<PipelineLabel, Gauge>,
    confirmed: Family<PipelineLabel, Gauge>,
    connected: Family<OneOf, Gauge>,
    leader: Family<PipelineLabel, Gauge>,
    states: Family<OneOf, Gauge>,
    retained: Family<PipelineLabel, Gauge>,
}

/// From a millisecond to a minute and more: 1, 2, 5 of every decade.
fn latencies() -> Histogram {
    Histogram::new([
        0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
    ])
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("outboxd");
        let delivery: Latencies = Family::new_with_constructor(latencies as fn() -> Histogram);
        let metrics = Metrics {
            events: Family::default(),
            transactions: Family::default(),
            bytes: Family::default(),
            delivery: delivery.clone(),
            retries: Family::default(),
            failures: Family::default(),
            dead_letters: Family::default(),
            refusals: Family::default(),
            polls: Family::default(),
            depth: Family::default(),
            letters: Family::default(),
            marked: Family::default(),
            mark_statements: Family::default(),
            mark_failures: Family::default(),
            unmarked: Family::default(),
            backfilled: Family::default(),
            unmatched: Family::default(),
            pruned_rows: Family::default(),
            pruned_partitions: Family::default(),
            ignored: Family::default(),
            lag_bytes: Family::default(),
            lag_seconds: Family::default(),
            in_flight: Family::default(),
            confirmed: Family::default(),
            connected: Family::default(),
            leader: Family::default(),
            states: Family::default(),
            retained: Family::default(),
            registry: Registry::default(),
            process: Registry::default(),
        };
        let counters = [
            ("events", "Events acknowledged by the sink", &metrics.events),
            ("transactions", "Source transactions with outbox events that were read", &metrics.transactions),
            ("bytes", "Bytes of events acknowledged by the sink", &metrics.bytes),
            ("retries", "Times the pipeline began again after passing trouble", &metrics.retries),
            ("failures", "Times the pipeline ended for good", &metrics.failures),
            ("dead_letters", "Events put into the dead-letter place", &metrics.dead_letters),
            ("refused_rows", "Polled rows that the sink refused, each time they were tried", &metrics.refusals),
            ("polls", "Times a polled table was asked for rows", &metrics.polls),
            ("marked_rows", "Rows that were marked as delivered, or as failed, behind the watermark", &metrics.marked),
            ("mark_statements", "Statements that this took", &metrics.mark_statements),
            ("mark_failures", "Times that rows could not be marked yet", &metrics.mark_failures),
            ("backfilled_rows", "Rows delivered from the table after a lost position", &metrics.backfilled),
            ("unmatched_events", "Events that no publisher of the pipeline wants", &metrics.unmatched),
            ("pruned_rows", "Rows that retention has deleted", &metrics.pruned_rows),
            ("pruned_partitions", "Partitions that retention has dropped", &metrics.pruned_partitions),
        ];
        for (name, help, family) in counters {
            registry.register(name, help, family.clone());
        }
        registry.register("ignored_changes", "Changes of outbox tables that are no events", metrics.ignored.clone());
        registry.register_with_unit(
            "delivery",
            "From the commit to the acknowledgement of everything up to it, once a batch of commits",
            Unit::Seconds,
            delivery,
        );
        let gauges = [
            (
                "source_lag_bytes",
                "Bytes of log between the server's end and the confirmed position",
                &metrics.lag_bytes,
            ),
            ("in_flight", "Events read and not yet acknowledged", &metrics.in_flight),
            ("confirmed_position", "The confirmed position (PostgreSQL: the LSN as an integer)", &metrics.confirmed),
            ("outbox_depth", "Rows of polled tables that are pending, counted up to 100,000 a table", &metrics.depth),
            (
                "dead_letters_waiting",
                "Dead letters that were not replayed, counted every minute and up to 100,000",
                &metrics.letters,
            ),
            ("unmarked_events", "Events that are delivered and whose rows are not yet marked", &metrics.unmarked),
            ("leader", "1 when this instance reads the pipeline", &metrics.leader),
            ("slot_retained_bytes", "Bytes of log that the server keeps for the slot", &metrics.retained),
        ];
        for (name, help, family) in gauges {
            registry.register(name, help, family.clone());
        }
        let lag = "Age of the oldest event that was read and is not confirmed";
        registry.register("source_lag_seconds", lag, metrics.lag_seconds.clone());
        registry.register("connected", "1 when the side is connected", metrics.connected.clone());
        registry.register("state", "1 for the state that it is in, 0 for the others", metrics.states.clone());
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The program", build);
        let mut process = Registry::default();
        process.register_collector(Box::new(ProcessMetrics::since_now()));
        Metrics { registry, process, ..metrics }
    }
}

impl Metrics {
    /// The status of a pipeline that is about to run.
    pub fn status(&self, settings: &PipelineSettings) -> PipelineStatus {
        let label = PipelineLabel { pipeline: settings.name.clone(), publisher: None };
        let metrics = PipelineMetrics {
            transactions: self.transactions.get_or_create_owned(&label),
            unmatched: self.unmatched.get_or_create_owned(&label),
            retries: self.retries.get_or_create_owned(&label),
            failures: self.failures.get_or_create_owned(&label),
            pruned_rows: self.pruned_rows.get_or_create_owned(&label),
            pruned_partitions: self.pruned_partitions.get_or_create_owned(&label),
        };
        let publisher = |name: &String| {
            let publisher = (!settings.is_lone()).then(|| name.clone());
            let label = PipelineLabel { publisher, ..label.clone() };
            PublisherMetrics {
                events: self.events.get_or_create_owned(&label),
                bytes: self.bytes.get_or_create_owned(&label),
                delivery: self.delivery.get_or_create_owned(&label),
                retries: self.retries.get_or_create_owned(&label),
                failures: self.failures.get_or_create_owned(&label),
                dead_letters: self.dead_letters.get_or_create_owned(&label),
                refusals: self.refusals.get_or_create_owned(&label),
            }
        };
        let publishers = settings.publishers.iter().map(|one| (one.name.as_str(), publisher(&one.name))).collect();
        PipelineStatus::new(&settings.name, metrics, publishers)
    }

    /// The metrics as Prometheus reads them.
    pub fn encode(&self, pipelines: &[Arc<PipelineStatus>], how: Exposition) -> Result<String, std::fmt::Error> {
        for status in pipelines {
            self.refresh(status);
        }
        let mut page = String::new();
        text::encode_registry(&mut page, &self.registry)?;
        text::encode_registry(&mut page, &self.process)?;
        text::encode_eof(&mut page)?;
        Ok(how.of(page))
    }

    fn refresh(&self, status: &PipelineStatus) {
        let snapshot = status.snapshot();
        let label = PipelineLabel { pipeline: snapshot.name.clone(), publisher: None };
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        if let Some(bytes) = snapshot.lag_bytes {
            self.lag_bytes.get_or_create(&label).set(whole(bytes));
        }
        self.refresh_publishers(&snapshot, &label);
        self.confirmed.get_or_create(&label).set(whole(snapshot.confirmed));
        self.leader.get_or_create(&label).set(i64::from(snapshot.leader));
        self.retained.get_or_create(&label).set(whole(snapshot.retained_bytes));
        self.tell_connected(&label, "source", snapshot.source_connected);
        self.tell_state(&label, snapshot.state);
        if let Some(depth) = status.source.depth() {
            self.depth.get_or_create(&label).set(whole(depth));
            let polls = self.polls.get_or_create(&label);
            polls.inc_by(status.source.polls().saturating_sub(polls.get()));
        }
        let backfilled = self.backfilled.get_or_create(&label);
        backfilled.inc_by(status.source.gap.rows().saturating_sub(backfilled.get()));
        if let Some(marking) = &snapshot.marking {
            let counters = [
                (&self.marked, marking.rows),
                (&self.mark_statements, marking.statements),
                (&self.mark_failures, marking.failures),
            ];
            for (family, count) in counters {
                let counter = family.get_or_create(&label);
                counter.inc_by(count.saturating_sub(counter.get()));
            }
            self.unmarked.get_or_create(&label).set(whole(marking.waiting));
        }
        for (change, op) in Ignored::ALL {
            let counter = self.ignored.get_or_create(&OneOf { of: label.clone(), name: "op", value: op });
            counter.inc_by(status.source.ignored(change).saturating_sub(counter.get()));
        }
    }

    /// What each publisher has of its own; the only one has it under the pipeline's name alone.
    fn refresh_publishers(&self, snapshot: &Snapshot, pipeline: &PipelineLabel) {
        if snapshot.publishers.is_empty() {
            self.lag_seconds.get_or_create(pipeline).set(snapshot.lag_seconds);
            self.in_flight.get_or_create(pipeline).set(snapshot.in_flight as i64);
            self.tell_letters(pipeline, snapshot.letters_waiting);
            self.tell_connected(pipeline, "sink", snapshot.sink_connected);
        }
        for publisher in &snapshot.publishers {
            let label = PipelineLabel { publisher: Some(publisher.name.clone()), ..pipeline.clone() };
            self.lag_seconds.get_or_create(&label).set(publisher.lag_seconds);
            self.in_flight.get_or_create(&label).set(publisher.in_flight as i64);
            self.tell_letters(&label, publisher.letters_waiting);
            let takes_part = matches!(publisher.state, State::Streaming | State::Paused);
            self.tell_connected(&label, "sink", takes_part && !publisher.sink_away);
            self.tell_state(&label, publisher.state);
        }
    }

    fn tell_letters(&self, of: &PipelineLabel, waiting: Option<u64>) {
        match waiting {
            Some(letters) => {
                self.letters.get_or_create(of).set(i64::try_from(letters).unwrap_or(i64::MAX));
            }
            None => {
                self.letters.remove(of);
            }
        }
    }

    fn tell_connected(&self, of: &PipelineLabel, side: &'static str, connected: bool) {
        let label = OneOf { of: of.clone(), name: "side", value: side };
        self.connected.get_or_create(&label).set(i64::from(connected));
    }

    fn tell_state(&self, of: &PipelineLabel, state: State) {
        for one in State::ALL {
            let label = OneOf { of: of.clone(), name: "state", value: one.as_str() };
            self.states.get_or_create(&label).set(i64::from(one == state));
        }
    }
}
