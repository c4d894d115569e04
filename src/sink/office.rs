//! The dead-letter office: what a sink cannot deliver goes to a table of the source's database or to a Kafka topic, or
//! ends the pipeline. (From a Kafka sink to a topic, dead letters go through its producer, in their turn.)

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

use super::lanes::Parcel;
use super::{Owner, SinkFailure, kafka};
use crate::ack_window::{AckWindow, Bells, Limits};
use crate::config::{DeadLetter, KafkaSettings, PublisherSettings, SinkSettings, SourceSettings};
use crate::dead_letters::letter::{self, Letter};
use crate::dead_letters::writer::LetterWriter;
use crate::event::{CommitId, Micros};
use crate::marks::Marks;

/// How long librdkafka tries before we look again.
const PATIENCE: Duration = Duration::from_secs(30);

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

pub struct Office {
    pipeline: String,
    publisher: String,
    /// The tables that events come from, as records know them.
    tables: Vec<String>,
    /// How often a record is tried before it comes here.
    attempts: u32,
    place: Place,
    taken: Counter,
    /// Where it is noted what was taken, and the publisher's number there.
    marks: Option<(Arc<Marks>, usize)>,
}

enum Place {
    Nowhere,
    /// To whoever replays dead letters: they stay where they are.
    Back,
    Topic {
        name: String,
        producer: FutureProducer,
        settings: Box<KafkaSettings>,
    },
    Table(LetterWriter),
}

impl Office {
    /// One that takes nothing.
    pub fn closed() -> Self {
        Self::at(Place::Nowhere)
    }

    /// One that gives back what is refused, with the reason and nothing else.
    pub fn returning() -> Self {
        Self::at(Place::Back)
    }

    fn at(place: Place) -> Self {
        let (pipeline, publisher, tables) = Default::default();
        Office { pipeline, publisher, tables, attempts: 1, place, taken: Counter::default(), marks: None }
    }

    /// Whether letters go to a table.
    pub fn has_table(&self) -> bool {
        matches!(self.place, Place::Table(_))
    }

    /// Whether there is a place for letters.
    pub fn is_open(&self) -> bool {
        !matches!(self.place, Place::Nowhere)
    }

    pub fn open(settings: &PublisherSettings, owner: &Owner<'_>) -> Result<Self, SinkFailure> {
        let place = match &settings.dead_letter {
            DeadLetter::None => Place::Nowhere,
            DeadLetter::Table(table) => Place::Table(LetterWriter::new(&settings.source, table, owner.status)),
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
        let retries = match &settings.sink {
            SinkSettings::Http(http) => http.lanes.retries,
            SinkSettings::RabbitMq(rabbit) => rabbit.lanes.retries,
            SinkSettings::Kafka | SinkSettings::Stdout | SinkSettings::Statistics => 0,
        };
        Ok(Office {
            pipeline: owner.pipeline.to_owned(),
            publisher: settings.name.clone(),
            tables: tables(&settings.source),
            attempts: retries.saturating_add(1),
            place,
            taken: owner.status.metrics.dead_letters.clone(),
            marks: owner.marks.map(|(marks, number)| (marks.clone(), number)),
        })
    }

    /// Makes sure of the place, so that a missing one is known before the first letter. A broker that is away is not
    /// waited for: most events need no letter.
    pub async fn ready(&self) -> Result<(), SinkFailure> {
        let (name, settings) = match &self.place {
            Place::Topic { name, settings, .. } => (name, settings),
            Place::Table(writer) => return writer.ready().await,
            Place::Nowhere | Place::Back => return Ok(()),
        };
        let window = Arc::new(AckWindow::new(Limits { events: 1, bytes: 1 }, Bells::default()));
        let mut sink = kafka::KafkaSink::create(settings, &Arc::default(), &window, None, None)?;
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
        letter.headers.push(letter::TOPIC, Some(parcel.topic.as_bytes()));
        letter.headers.push(letter::POSITION, Some(parcel.commit.to_string().as_bytes()));
        letter.headers.push(letter::REASON, Some(why.as_bytes()));
        letter.headers.push(letter::PIPELINE, Some(self.pipeline.as_bytes()));
        letter.headers.push(letter::PUBLISHER, Some(self.publisher.as_bytes()));
        let place = match &self.place {
            Place::Nowhere => {
                return Err(SinkFailure::Undeliverable {
                    what: format!("an event of the commit at {} cannot be delivered: {why}", parcel.commit),
                    remedy: "remove the cause, or set --dead-letter table:NAME, or topic:NAME and --brokers".to_owned(),
                });
            }
            Place::Back => return Err(SinkFailure::Undeliverable { what: why.to_owned(), remedy: String::new() }),
            Place::Topic { name, .. } => format!("topic {name}"),
            Place::Table(writer) => format!("table {}", writer.table()),
        };
        self.take(&letter).await?;
        if let (Some((marks, number)), Some(row)) = (&self.marks, parcel.row) {
            marks.parked(row, *number, why);
        }
        self.taken.inc();
        tracing::warn!(commit = %parcel.commit, "an event was put into the dead-letter {place}: {why}");
        Ok(())
    }

    /// The letter as a table has it.
    fn letter(&self, parcel: &Parcel) -> Letter {
        // Records know it only where there are several, and all collections of a database are not told apart.
        let mut named = self.tables.iter().filter(|name| parcel.table.as_deref().is_none_or(|table| *name == table));
        let table = match (named.next(), named.next()) {
            (Some(name), None) if name != "*" && !name.ends_with(".*") => name.as_str(),
            _ => "",
        };
        let mut letter = Letter {
            key: parcel.key.as_deref().map(<[u8]>::to_vec),
            value: parcel.value.as_deref().map(<[u8]>::to_vec),
            source_table: table.to_owned(),
            attempts: self.attempts,
            ..Letter::from_marked(&parcel.headers)
        };
        // A poller counts its batches anew in each life: whoever sets a failed row back gets a letter of its next failure.
        if let CommitId::Polled(_) = parcel.commit {
            letter.position = format!("{} at {}", letter.position, letter::rfc3339(Micros::now()));
        }
        letter
    }

    /// Takes a letter as it is.
    pub async fn take(&self, letter: &Parcel) -> Result<(), SinkFailure> {
        let (name, producer) = match &self.place {
            Place::Topic { name, producer, .. } => (name, producer),
            Place::Table(writer) => return writer.write(&self.letter(letter)).await,
            Place::Nowhere | Place::Back => {
                return Err(SinkFailure::Undeliverable {
                    what: "an event cannot be delivered, and there is no dead-letter place".to_owned(),
                    remedy: "set --dead-letter table:NAME, or topic:NAME and --brokers".to_owned(),
                });
            }
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

/// The tables of the source, with one that has no name for messages that are in none.
fn tables(source: &SourceSettings) -> Vec<String> {
    let named = source.tables().iter().map(ToString::to_string);
    let messages = matches!(source, SourceSettings::Postgres(postgres) if !postgres.message_prefixes.is_empty());
    named.chain(messages.then(String::new)).collect()
}
