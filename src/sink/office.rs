//! The dead-letter office of sinks that are not Kafka: what they cannot deliver goes to a Kafka topic, or ends the
//! pipeline. (Kafka's own dead letters go through its producer, in their turn.)

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

use super::lanes::Parcel;
use super::{Owner, SinkFailure, kafka};
use crate::ack_window::{AckWindow, Bells, Limits};
use crate::config::{DeadLetter, KafkaSettings, PublisherSettings};

/// How long librdkafka tries before we look again.
const PATIENCE: Duration = Duration::from_secs(30);

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

pub struct Office {
    pipeline: String,
    place: Place,
    taken: Counter,
}

enum Place {
    Nowhere,
    Topic { name: String, producer: FutureProducer, settings: Box<KafkaSettings> },
}

impl Office {
    /// One that takes nothing.
    pub fn closed() -> Self {
        Office { pipeline: String::new(), place: Place::Nowhere, taken: Counter::default() }
    }

    /// Whether there is a place for letters.
    pub fn is_open(&self) -> bool {
        !matches!(self.place, Place::Nowhere)
    }

    pub fn open(settings: &PublisherSettings, owner: &Owner<'_>) -> Result<Self, SinkFailure> {
        let place = match &settings.dead_letter {
            DeadLetter::None => Place::Nowhere,
            DeadLetter::Topic(name) => {
                let mut config = kafka::client_config(&settings.kafka)?;
                config.set("acks", "all").set("enable.idempotence", "true").set("linger.ms", "0");
                config.set("message.timeout.ms", PATIENCE.as_millis().to_string());
                let producer = config.create().map_err(|error| SinkFailure::NotReady {
                    what: format!("no Kafka client for dead letters: {error}"),
                    remedy: "correct the --kafka option it names".to_owned(),
                })?;
                Place::Topic { name: name.clone(), producer, settings: Box::new(settings.kafka.clone()) }
            }
        };
        let taken = owner.status.metrics.dead_letters.clone();
        Ok(Office { pipeline: owner.pipeline.to_owned(), place, taken })
    }

    /// Makes sure of the topic, so that a missing one is known before the first letter. A broker that is away is not
    /// waited for: most events need no letter.
    pub async fn ready(&self) -> Result<(), SinkFailure> {
        let Place::Topic { name, settings, .. } = &self.place else { return Ok(()) };
        let window = Arc::new(AckWindow::new(Limits { events: 1, bytes: 1 }, Bells::default()));
        let mut sink = kafka::KafkaSink::create(settings, &Arc::default(), &window)?;
        let topics = [name.as_str()];
        let ready = tokio::select! {
            ready = sink.ready(&topics) => ready,
            failure = window.failed() => Err(failure),
        };
        sink.abandon().await;
        match ready {
            Err(SinkFailure::Transient { what }) => {
                tracing::warn!(topic = name, "the dead-letter topic cannot be looked at: {what}");
                Ok(())
            }
            ready => ready,
        }
    }

    /// Takes a record that the sink refused.
    pub async fn take_refused(&self, parcel: &Parcel, why: &str) -> Result<(), SinkFailure> {
        let mut letter = parcel.clone();
        letter.headers.push("outboxd.topic", Some(parcel.topic.as_bytes()));
        letter.headers.push("outboxd.position", Some(parcel.commit.to_string().as_bytes()));
        letter.headers.push("outboxd.reason", Some(why.as_bytes()));
        letter.headers.push("outboxd.pipeline", Some(self.pipeline.as_bytes()));
        match &self.place {
            Place::Nowhere => Err(SinkFailure::Undeliverable {
                what: format!("an event of the commit at {} cannot be delivered: {why}", parcel.commit),
                remedy: "remove the cause, or set --dead-letter topic:NAME and --brokers".to_owned(),
            }),
            Place::Topic { name, .. } => {
                self.take(&letter).await?;
                self.taken.inc();
                tracing::warn!(commit = %parcel.commit, topic = name, "an event was put into the dead-letter topic: {why}");
                Ok(())
            }
        }
    }

    /// Takes a letter as it is.
    pub async fn take(&self, letter: &Parcel) -> Result<(), SinkFailure> {
        let Place::Topic { name, producer, .. } = &self.place else {
            return Err(SinkFailure::Undeliverable {
                what: "an event cannot be delivered, and there is no dead-letter place".to_owned(),
                remedy: "set --dead-letter topic:NAME and --brokers".to_owned(),
            });
        };
        let mut headers = OwnedHeaders::new_with_capacity(letter.headers.len());
        for (key, value) in letter.headers.iter() {
            headers = headers.insert(Header { key, value });
        }
        let (key, value) = (letter.key.as_deref(), letter.value.as_deref());
        let mut pause = FIRST_PAUSE;
        loop {
            let mut record: FutureRecord<'_, [u8], [u8]> =
                FutureRecord::to(name).headers(headers.clone()).timestamp(letter.timestamp_millis);
            record.key = key;
            record.payload = value;
            let Err((error, _)) = producer.send(record, PATIENCE).await else { return Ok(()) };
            use RDKafkaErrorCode as Code;
            match error.rdkafka_error_code() {
                Some(
                    Code::MessageSizeTooLarge
                    | Code::UnknownTopicOrPartition
                    | Code::UnknownTopic
                    | Code::TopicAuthorizationFailed
                    | Code::InvalidRecord,
                ) => {
                    return Err(SinkFailure::Undeliverable {
                        what: format!(
                            "an event of the commit at {} can neither be delivered nor parked: {error}",
                            letter.commit
                        ),
                        remedy: format!("make the dead-letter topic `{name}` writable, and large enough"),
                    });
                }
                // This producer will never write again.
                Some(Code::Fatal | Code::ClusterAuthorizationFailed) => {
                    return Err(SinkFailure::Restart { what: format!("no dead letter can be written: {error}") });
                }
                _ => {
                    tracing::warn!(topic = name, "a dead letter could not be written yet: {error}");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}
