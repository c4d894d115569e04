//! Where records go. A sink takes records in order, never drops a receipt, and resolves each one in the ack window
//! when the broker has answered.

pub mod kafka;

use std::sync::Arc;

use thiserror::Error;
use tokio::time::Instant;

use crate::ack_window::{AckWindow, Receipt};
use crate::config::PipelineSettings;
use crate::route::Record;

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
}

/// Enum dispatch over the few sinks there are.
pub enum Sink {
    Kafka(kafka::KafkaSink),
}

impl Sink {
    /// Makes the sink; returns before the broker has answered.
    pub fn create(settings: &PipelineSettings, memory: &Memory, window: &Arc<AckWindow>) -> Result<Self, SinkFailure> {
        kafka::KafkaSink::create(&settings.kafka, &memory.kafka, window).map(Sink::Kafka)
    }

    /// Waits for the broker and makes sure of the topics that are known beforehand.
    pub async fn ready(&mut self, topics: &[&str]) -> Result<(), SinkFailure> {
        match self {
            Sink::Kafka(sink) => sink.ready(topics).await,
        }
    }

    /// Takes a record, or says why not. Its receipt is resolved in the window when it was acknowledged.
    pub fn enqueue(&mut self, record: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
        match self {
            Sink::Kafka(sink) => sink.enqueue(record, receipt),
        }
    }

    /// Says that nothing more is at hand, so that waiting for fuller batches would only cost time.
    pub fn hurry(&self) {
        match self {
            Sink::Kafka(sink) => sink.hurry(),
        }
    }

    /// Finds out about a topic that [`Enqueued::Unprepared`] was said of.
    pub async fn prepare(&mut self, topic: &str) -> Result<Enqueued, SinkFailure> {
        match self {
            Sink::Kafka(sink) => sink.prepare(topic).await,
        }
    }

    /// Sends a record with nothing else in flight.
    pub async fn send_alone(&mut self, record: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
        match self {
            Sink::Kafka(sink) => sink.send_alone(record, receipt).await,
        }
    }

    /// Waits for what is in flight, until the deadline.
    pub async fn drain(&mut self, deadline: Instant) {
        match self {
            Sink::Kafka(sink) => sink.drain(deadline).await,
        }
    }

    /// Gives up what is still queued.
    pub async fn abandon(self) {
        match self {
            Sink::Kafka(sink) => sink.abandon().await,
        }
    }
}
