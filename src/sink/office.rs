//! The dead-letter office of sinks that are not Kafka: what they cannot deliver goes to a Kafka topic, or ends the
//! pipeline. (Kafka's own dead letters go through its producer, in their turn.)

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

use super::lanes::Parcel;
use super::{Letters, SinkFailure, kafka};
use crate::config::{DeadLetter, PublisherSettings};

/// How long librdkafka tries before we look again.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Office {
    pipeline: String,
    place: Place,
    taken: Counter,
}

enum Place {
    Nowhere,
    Topic { name: String, producer: FutureProducer },
}

impl Office {
    /// One that takes nothing.
    pub fn closed() -> Self {
        Office { pipeline: String::new(), place: Place::Nowhere, taken: Counter::default() }
    }

    pub fn open(settings: &PublisherSettings, letters: &Letters<'_>) -> Result<Self, SinkFailure> {
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
                Place::Topic { name: name.clone(), producer }
            }
        };
        Ok(Office { pipeline: letters.pipeline.to_owned(), place, taken: letters.counter.clone() })
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
        let Place::Topic { name, producer } = &self.place else {
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
                _ => tracing::warn!(topic = name, "a dead letter could not be written yet: {error}"),
            }
        }
    }
}
