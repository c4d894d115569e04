//! Where records go. A sink takes records in order, never drops a receipt, and resolves each one in the ack window
//! when the place has answered.

mod http;
mod json;
pub mod kafka;
pub mod lanes;
mod office;
mod rabbitmq;
mod statistics;
mod stdout;

use std::sync::Arc;

use thiserror::Error;
use tokio::time::Instant;

use crate::ack_window::{AckWindow, Receipt};
use crate::config::{Brokers, DeadLetter, Delivery, PublisherSettings, SinkSettings};
use crate::failpoints::Injected;
use crate::marks::Marks;
use crate::milestone::Milestone;
use crate::preflight::{Finding, Report};
use crate::route::{Plan, Record};
use crate::source::poll::ledger::Ledger;
use crate::status::PublisherStatus;
use http::{HttpCourier, HttpMemory};
use kafka::transactions::{Identity, Reached};
use lanes::{Lanes, Parcel};
use office::Office;
use rabbitmq::{Link, RabbitCourier, RabbitMemory};

/// Trouble on the broker's side that is not about one record.
#[derive(Clone, Debug, Error)]
pub enum SinkFailure {
    /// Broker down, time-out: it passes.
    #[error("{what}")]
    Transient { what: String },
    /// The producer must be made anew and the source read again from the confirmed position.
    #[error("{what}")]
    Restart { what: String },
    /// Authentication, authorisation, a missing topic at start.
    #[error("{what}")]
    NotReady { what: String, remedy: String },
    /// A record that can neither be delivered nor parked.
    #[error("{what}")]
    Undeliverable { what: String, remedy: String },
}

impl From<Injected> for SinkFailure {
    fn from(injected: Injected) -> Self {
        SinkFailure::Transient { what: injected.to_string() }
    }
}

/// What became of a record that was handed to a sink.
#[derive(Debug)]
pub enum Enqueued {
    Queued,
    /// The sink's own queue is full: try again in a moment.
    Full,
    /// The sink must first find out about the record's topic.
    Unprepared,
    /// It was in a batch that the broker refused: send it alone.
    Suspect,
    /// It can never be delivered there, and why.
    Refused(String),
}

/// What a sink remembers between generations.
#[derive(Default)]
pub struct Memory {
    kafka: Arc<kafka::KafkaMemory>,
    http: Arc<HttpMemory>,
    rabbit: Arc<RabbitMemory>,
}

/// Whose sink it is.
pub struct Owner<'a> {
    pub pipeline: &'a str,
    pub status: &'a Arc<PublisherStatus>,
    /// Where its rows are, if a poller claimed them.
    pub ledger: Option<&'a Arc<Ledger>>,
    /// Where rows are noted that were read from the log and are to be marked, and its number there.
    pub marks: Option<(&'a Arc<Marks>, usize)>,
}

/// Enum dispatch over the few sinks there are.
enum Kind {
    Kafka(Box<kafka::KafkaSink>),
    Lanes(Lanes),
    RabbitMq(Arc<Link>, Lanes),
    Stdout(stdout::StdoutSink),
    Statistics(statistics::StatisticsSink),
}

pub struct Sink {
    kind: Kind,
    /// Takes what cannot be delivered, unless Kafka takes it to a topic itself.
    office: Arc<Office>,
    window: Arc<AckWindow>,
}

impl Sink {
    /// Makes the sink; returns before anybody has answered.
    pub fn create(
        settings: &PublisherSettings,
        memory: &Memory,
        window: &Arc<AckWindow>,
        owner: &Owner<'_>,
    ) -> Result<Self, SinkFailure> {
        let office = match (&settings.sink, &settings.dead_letter) {
            // Its producer takes them, in their turn.
            (SinkSettings::Kafka, DeadLetter::Topic(_)) => Office::closed(),
            _ => Office::open(settings, owner)?,
        };
        Self::with_office(office, settings, memory, window, owner)
    }

    /// Makes a sink for dead letters that are sent again: what it refuses fails the window with the reason.
    pub fn for_replay(
        settings: &PublisherSettings,
        memory: &Memory,
        window: &Arc<AckWindow>,
        owner: &Owner<'_>,
    ) -> Result<Self, SinkFailure> {
        // Whoever replays is not the pipeline's leader, and must not fence it off.
        let settings = PublisherSettings { delivery: Delivery::AtLeastOnce, ..settings.clone() };
        Self::with_office(Office::returning(), &settings, memory, window, owner)
    }

    fn with_office(
        office: Office,
        settings: &PublisherSettings,
        memory: &Memory,
        window: &Arc<AckWindow>,
        owner: &Owner<'_>,
    ) -> Result<Self, SinkFailure> {
        let office = Arc::new(office);
        let kind = match &settings.sink {
            SinkSettings::Kafka => {
                let exactly_once = (settings.delivery == Delivery::ExactlyOnce).then(|| {
                    let publisher = (settings.name != owner.pipeline).then(|| settings.name.clone());
                    (Identity { pipeline: owner.pipeline.to_owned(), publisher }, settings.window)
                });
                let (kafka_settings, status) = (&settings.kafka, Some(owner.status));
                Kind::Kafka(Box::new(kafka::KafkaSink::create(
                    kafka_settings,
                    &memory.kafka,
                    window,
                    status,
                    exactly_once,
                )?))
            }
            SinkSettings::Http(http) => {
                let courier = HttpCourier::new(http, &memory.http)?;
                Kind::Lanes(Lanes::start(courier, http.lanes, &office, window, owner.status, owner.ledger))
            }
            SinkSettings::RabbitMq(rabbit) => {
                let link = Arc::new(Link::new(rabbit, &memory.rabbit));
                let courier = RabbitCourier::new(rabbit, &link, &memory.rabbit);
                Kind::RabbitMq(link, Lanes::start(courier, rabbit.lanes, &office, window, owner.status, owner.ledger))
            }
            SinkSettings::Stdout => Kind::Stdout(stdout::StdoutSink::create(window)?),
            SinkSettings::Statistics => Kind::Statistics(statistics::StatisticsSink::create(window)),
        };
        Ok(Sink { kind, office, window: window.clone() })
    }

    /// Waits for the broker and makes sure of the topics that are known beforehand.
    pub async fn ready(&mut self, topics: &[&str]) -> Result<(), SinkFailure> {
        match &mut self.kind {
            Kind::Kafka(sink) => {
                self.office.ready().await?;
                sink.ready(topics).await
            }
            Kind::RabbitMq(link, _) => {
                self.office.ready().await?;
                link.ready().await
            }
            // Whether they take anything is known with the first record.
            Kind::Lanes(_) | Kind::Stdout(_) | Kind::Statistics(_) => self.office.ready().await,
        }
    }

    /// Whether records become visible by transactions, which have to be committed.
    pub fn transacts(&self) -> bool {
        matches!(&self.kind, Kind::Kafka(sink) if sink.transacts())
    }

    /// Keeps earlier instances from delivering anything more, and tells how far they came, where that is kept beside the
    /// records. To be called when the source is held.
    pub async fn enter(&mut self, lineage: &str) -> Result<Option<Reached>, SinkFailure> {
        match &mut self.kind {
            Kind::Kafka(sink) => sink.enter(lineage).await,
            _ => Ok(None),
        }
    }

    /// When what was enqueued is to be committed.
    pub fn due(&self) -> Option<Instant> {
        match &self.kind {
            Kind::Kafka(sink) => sink.due(),
            _ => None,
        }
    }

    /// Whether it is to be committed after a chunk.
    pub fn is_due(&mut self, catching_up: bool) -> bool {
        match &mut self.kind {
            Kind::Kafka(sink) => sink.is_due(catching_up),
            _ => false,
        }
    }

    /// Commits what was enqueued; the milestone lies behind all of it. May be cancelled and called again.
    pub async fn commit(&mut self, milestone: &Milestone) -> Result<(), SinkFailure> {
        match &mut self.kind {
            Kind::Kafka(sink) => sink.commit(&self.window, milestone).await,
            _ => Ok(()),
        }
    }

    /// Takes a record, or says why not. Its receipt is resolved in the window when it was acknowledged.
    pub fn enqueue(&mut self, record: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
        match &mut self.kind {
            Kind::Kafka(sink) => sink.enqueue(record, receipt),
            Kind::Lanes(lanes) | Kind::RabbitMq(_, lanes) => Ok(lanes.enqueue(record, receipt)),
            Kind::Stdout(sink) => Ok(sink.enqueue(record, receipt)),
            Kind::Statistics(sink) => {
                sink.enqueue(record, receipt);
                Ok(Enqueued::Queued)
            }
        }
    }

    /// Takes a dead letter, as [`enqueue`](Self::enqueue) takes a record.
    pub async fn park(&mut self, letter: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
        if let Kind::Kafka(sink) = &mut self.kind
            && !self.office.has_table()
        {
            return sink.enqueue(letter, receipt);
        }
        self.office.take(&Parcel::of(letter, receipt)).await?;
        self.window.resolve(receipt);
        Ok(Enqueued::Queued)
    }

    /// Whether it may refuse a record after it took it, with others of its key behind it.
    pub fn has_lanes(&self) -> bool {
        matches!(self.kind, Kind::Lanes(_) | Kind::RabbitMq(..))
    }

    /// Says that nothing more is at hand, so that waiting for fuller batches would only cost time.
    pub fn hurry(&self) {
        if let Kind::Kafka(sink) = &self.kind {
            sink.hurry();
        }
    }

    /// Finds out about a topic that [`Enqueued::Unprepared`] was said of.
    pub async fn prepare(&mut self, topic: &str) -> Result<Enqueued, SinkFailure> {
        match &mut self.kind {
            Kind::Kafka(sink) => sink.prepare(topic).await,
            _ => Ok(Enqueued::Queued),
        }
    }

    /// Sends a record with nothing else in flight.
    pub async fn send_alone(&mut self, record: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
        match &mut self.kind {
            Kind::Kafka(sink) => sink.send_alone(record, receipt).await,
            _ => self.enqueue(record, receipt),
        }
    }

    /// Waits for what is in flight, until the deadline.
    pub async fn drain(&mut self, deadline: Instant) {
        match &mut self.kind {
            Kind::Kafka(sink) => sink.drain(deadline).await,
            Kind::Lanes(lanes) | Kind::RabbitMq(_, lanes) => lanes.drain(deadline).await,
            Kind::Stdout(sink) => sink.drain(deadline).await,
            Kind::Statistics(_) => {}
        }
    }

    /// Gives up what is still queued.
    pub async fn abandon(self) {
        match self.kind {
            Kind::Kafka(sink) => sink.abandon().await,
            Kind::Stdout(sink) => sink.abandon().await,
            Kind::Lanes(lanes) | Kind::RabbitMq(_, lanes) => lanes.abandon().await,
            Kind::Statistics(_) => {}
        }
    }
}

fn place(subject: &str, seen: &str) -> Vec<Finding> {
    let mut report = Report::about(subject);
    report.ok("sink", seen);
    report.into_findings()
}

fn embedded() -> Vec<Finding> {
    let mut report = Report::about("embedded broker");
    let seen = "it is started with the run, and what it holds ends with it";
    report.warn("brokers", seen, "name your Kafka with --brokers HOST:PORT");
    report.into_findings()
}

/// Looks at everything that a run needs of the sink, and changes nothing.
pub async fn preflight(settings: &PublisherSettings, plan: &Plan) -> Vec<Finding> {
    let kafka = &settings.kafka;
    let mut findings = match &settings.sink {
        SinkSettings::Kafka => {
            return match kafka.brokers {
                Brokers::Servers(_) => {
                    kafka::preflight::preflight(kafka, plan.fixed_topic(), &settings.dead_letter).await
                }
                Brokers::None | Brokers::Embedded => embedded(),
            };
        }
        SinkSettings::Http(http) => http::preflight(http, plan.fixed_topic()).await,
        SinkSettings::RabbitMq(rabbit) => rabbitmq::preflight(rabbit).await,
        SinkSettings::Stdout => place("stdout", "one JSON object a line"),
        SinkSettings::Statistics => place("statistics", "events are counted and go nowhere"),
    };
    if let (DeadLetter::Topic(topic), Brokers::Servers(_)) = (&settings.dead_letter, &kafka.brokers) {
        findings.extend(kafka::preflight::preflight(kafka, Some(topic), &DeadLetter::None).await);
    }
    findings
}
