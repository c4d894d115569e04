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
use crate::config::{Brokers, DeadLetter, PublisherSettings, SinkSettings};
use crate::preflight::Finding;
use crate::route::{Plan, Record};
use crate::source::poll::ledger::Ledger;
use crate::status::PublisherStatus;
use http::{HttpCourier, HttpMemory};
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

impl Memory {
    /// The id of the Kafka cluster, once it has answered.
    pub fn kafka_cluster(&self) -> Option<String> {
        self.kafka.cluster()
    }
}

/// Whose sink it is.
pub struct Owner<'a> {
    pub pipeline: &'a str,
    pub status: &'a Arc<PublisherStatus>,
    /// Where its rows are, if a poller claimed them.
    pub ledger: Option<&'a Arc<Ledger>>,
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
        Self::with_office(Office::returning(), settings, memory, window, owner)
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
                Kind::Kafka(Box::new(kafka::KafkaSink::create(&settings.kafka, &memory.kafka, window)?))
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

/// Looks at everything that a run needs of the sink, and changes nothing.
pub async fn preflight(settings: &PublisherSettings, plan: &Plan) -> Vec<Finding> {
    let kafka = &settings.kafka;
    let mut findings = match &settings.sink {
        SinkSettings::Kafka => {
            return match kafka.brokers {
                Brokers::Servers(_) => {
                    kafka::preflight::preflight(kafka, plan.fixed_topic(), &settings.dead_letter).await
                }
                Brokers::None | Brokers::Embedded => Vec::new(),
            };
        }
        SinkSettings::Http(http) => http::preflight(http).await,
        SinkSettings::RabbitMq(rabbit) => rabbitmq::preflight(rabbit).await,
        SinkSettings::Stdout | SinkSettings::Statistics => Vec::new(),
    };
    if let (DeadLetter::Topic(topic), Brokers::Servers(_)) = (&settings.dead_letter, &kafka.brokers) {
        findings.extend(kafka::preflight::preflight(kafka, Some(topic), &DeadLetter::None).await);
    }
    findings
}
