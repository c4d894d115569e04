//! Letters in a Kafka topic. A record cannot be marked, so what counts as replayed is what lies before the committed
//! offsets of a consumer group: `outboxd-dlq-PIPELINE`, with `-PUBLISHER` behind it where there are several.
//!
//! A letter's id is its place, `PARTITION:OFFSET`. A topic may hold letters of several pipelines: those of others are
//! passed over, and never deleted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::Uuid;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{CommitMode, Consumer as _, StreamConsumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};

use super::letter::{Kept, Letter, rfc3339};
use super::{Chosen, Page, Whose};
use crate::config::KafkaSettings;
use crate::event::Micros;
use crate::route::Headers;
use crate::sink::{SinkFailure, kafka};

const PATIENCE: Duration = Duration::from_secs(30);

/// The offsets of a partition.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub low: i64,
    pub high: i64,
    /// Up to here all letters were replayed.
    pub replayed: i64,
}

pub struct TopicLetters {
    consumer: Arc<StreamConsumer>,
    settings: KafkaSettings,
    topic: String,
    whose: Whose,
    pub group: String,
    /// Who we are among those that replay: it is committed with the offsets.
    token: String,
    /// By partition.
    pub spans: BTreeMap<i32, Span>,
}

/// A letter, and whether it is one of ours.
pub struct Found {
    pub partition: i32,
    pub offset: i64,
    pub millis: i64,
    pub ours: bool,
    pub kept: Kept,
}

impl Found {
    /// Its place among all letters, oldest first.
    fn order(&self) -> (i64, i32, i64) {
        (self.millis, self.partition, self.offset)
    }
}

fn trouble(error: &KafkaError, doing: &str, topic: &str) -> SinkFailure {
    SinkFailure::Transient { what: format!("{doing} the dead-letter topic `{topic}`: {error}") }
}

impl TopicLetters {
    pub async fn open(settings: &KafkaSettings, topic: &str, whose: &Whose) -> Result<Self, SinkFailure> {
        let group = match whose.pipeline == whose.publisher {
            true => format!("outboxd-dlq-{}", whose.pipeline),
            false => format!("outboxd-dlq-{}-{}", whose.pipeline, whose.publisher),
        };
        let mut config = kafka::client_config(settings)?;
        config.set("group.id", &group).set("enable.auto.commit", "false").set("enable.auto.offset.store", "false");
        config.set("auto.offset.reset", "earliest").set("enable.partition.eof", "true");
        config.set("allow.auto.create.topics", "false").set_log_level(rdkafka::config::RDKafkaLogLevel::Emerg);
        let consumer: StreamConsumer = config.create().map_err(|error| SinkFailure::NotReady {
            what: format!("no Kafka client for dead letters: {error}"),
            remedy: "correct the --kafka option it names".to_owned(),
        })?;
        let consumer = Arc::new(consumer);
        let spans = spans(&consumer, topic).await?;
        let (settings, topic, whose) = (settings.clone(), topic.to_owned(), whose.clone());
        let token = format!("outboxd {}", Uuid::new());
        Ok(TopicLetters { consumer, settings, topic, whose, group, token, spans })
    }

    /// Begins to read these partitions at these offsets.
    fn assign(&self, starts: impl IntoIterator<Item = (i32, i64)>) -> Result<(), SinkFailure> {
        let mut list = TopicPartitionList::new();
        for (partition, offset) in starts {
            let added = list.add_partition_offset(&self.topic, partition, Offset::Offset(offset));
            added.map_err(|error| trouble(&error, "reading", &self.topic))?;
        }
        self.consumer.assign(&list).map_err(|error| trouble(&error, "reading", &self.topic))
    }

    /// The letters of these partitions from these offsets up to others.
    pub fn read(&self, ranges: BTreeMap<i32, (i64, i64)>) -> Result<Reading<'_>, SinkFailure> {
        let left: BTreeMap<i32, i64> =
            ranges.iter().filter(|(_, (from, to))| from < to).map(|(partition, (_, to))| (*partition, *to)).collect();
        self.assign(left.keys().map(|partition| (*partition, ranges[partition].0)))?;
        Ok(Reading { of: self, left })
    }

    /// All that the topic holds now.
    pub fn read_all(&self) -> Result<Reading<'_>, SinkFailure> {
        self.read(self.spans.iter().map(|(partition, span)| (*partition, (span.low, span.high))).collect())
    }

    /// The last letters, newest last.
    pub async fn list(&self, page: &Page<'_>) -> Result<Vec<Kept>, SinkFailure> {
        let limit = page.limit as usize;
        let end = match page.before {
            Some(id) => self.at(id).await?.map(|found| found.order()),
            None => Some((i64::MAX, i32::MAX, i64::MAX)),
        };
        let Some(end) = end else { return Ok(Vec::new()) };
        let mut reading = self.read_all()?;
        let mut found: Vec<Found> = Vec::new();
        let newest_last = |found: &mut Vec<Found>| {
            found.sort_by_key(Found::order);
            found.drain(..found.len().saturating_sub(limit));
        };
        while let Some(mut one) = reading.next().await? {
            if one.ours && one.order() < end && !(page.waiting && one.kept.replayed) {
                (one.kept.letter.value, one.kept.letter.headers) = (None, Headers::default());
                found.push(one);
            }
            if found.len() > 1024.max(2 * limit) {
                newest_last(&mut found);
            }
        }
        newest_last(&mut found);
        Ok(found.into_iter().map(|one| one.kept).collect())
    }

    pub async fn find(&self, id: &str) -> Result<Option<Kept>, SinkFailure> {
        Ok(self.at(id).await?.map(|found| found.kept))
    }

    /// How many lie behind what was replayed, whosever they are.
    pub fn waiting(&self) -> u64 {
        self.spans.values().map(|span| (span.high - span.replayed).max(0).cast_unsigned()).sum()
    }

    /// The letter of ours with this id.
    async fn at(&self, id: &str) -> Result<Option<Found>, SinkFailure> {
        let place =
            id.split_once(':').and_then(|(partition, offset)| Some((partition.parse().ok()?, offset.parse().ok()?)));
        let Some((partition, offset)) = place else { return Ok(None) };
        let within = |span: &Span| (span.low..span.high).contains(&offset);
        if !self.spans.get(&partition).is_some_and(within) {
            return Ok(None);
        }
        let found = self.read(BTreeMap::from([(partition, (offset, offset + 1))]))?.next().await?;
        Ok(found.filter(|found| found.ours && found.offset == offset))
    }

    /// Says that all letters of the partition before this offset were dealt with.
    pub async fn commit(&self, partition: i32, offset: i64) -> Result<(), SinkFailure> {
        let mut list = TopicPartitionList::new();
        let failed = |error: KafkaError| trouble(&error, &format!("committing as {}", self.group), &self.topic);
        list.add_partition_offset(&self.topic, partition, Offset::Offset(offset)).map_err(failed)?;
        for mut element in list.elements() {
            element.set_metadata(&self.token);
        }
        let consumer = self.consumer.clone();
        kafka::blocking(move || consumer.commit(&list, CommitMode::Sync)).await?.map_err(failed)
    }

    /// Whether we were the last to commit an offset of the partition. Asked between a letter and its commit, which begins
    /// with one of where it starts: of two that replay at once only the one that committed last goes on, and the other has
    /// sent one letter in vain.
    pub async fn is_ours(&self, partition: i32) -> Result<bool, SinkFailure> {
        let mut list = TopicPartitionList::new();
        list.add_partition(&self.topic, partition);
        let (consumer, token) = (self.consumer.clone(), self.token.clone());
        let asked = kafka::blocking(move || {
            let committed = consumer.committed_offsets(list, PATIENCE)?;
            Ok(committed.elements().iter().all(|element| element.metadata() == token))
        });
        asked.await?.map_err(|error| trouble(&error, &format!("reading offsets of {} of", self.group), &self.topic))
    }

    /// How many letters are chosen to be discarded, and up to which offset of each partition. Kafka deletes only from the
    /// beginning: it ends at the first record that must stay.
    pub async fn count(&self, chosen: &Chosen) -> Result<(u64, BTreeMap<i32, i64>), SinkFailure> {
        let ends = self.spans.iter().map(|(partition, span)| {
            let end = if chosen.all { span.high } else { span.replayed };
            (*partition, (span.low, end))
        });
        let ranges: BTreeMap<_, _> = ends.collect();
        let mut upto: BTreeMap<i32, i64> =
            ranges.iter().filter(|(_, (from, to))| from < to).map(|(partition, (_, to))| (*partition, *to)).collect();
        let age = i64::try_from(chosen.older_than.as_millis()).unwrap_or(i64::MAX);
        let oldest = Micros::now().as_millis().saturating_sub(age);
        let mut reading = self.read(ranges)?;
        let mut letters: BTreeMap<i32, Vec<i64>> = BTreeMap::new();
        while let Some(found) = reading.next().await? {
            let end = upto.entry(found.partition).or_insert(found.offset);
            if !found.ours || found.millis > oldest {
                *end = (*end).min(found.offset);
            }
            letters.entry(found.partition).or_default().push(found.offset);
        }
        upto.retain(|partition, end| self.spans.get(partition).is_some_and(|span| *end > span.low));
        let within = |(partition, offsets): (&i32, &Vec<i64>)| {
            let end = upto.get(partition).copied().unwrap_or(0);
            offsets.iter().filter(|offset| **offset < end).count() as u64
        };
        let letters = letters.iter().map(within).sum();
        Ok((letters, upto))
    }

    /// Deletes what lies before these offsets.
    pub async fn discard(&self, upto: &BTreeMap<i32, i64>) -> Result<(), SinkFailure> {
        let failed = |error: KafkaError| SinkFailure::NotReady {
            what: format!("the records of the dead-letter topic `{}` cannot be deleted: {error}", self.topic),
            remedy: "grant Delete on the topic (its cleanup.policy must be `delete`), or leave it to retention.ms"
                .to_owned(),
        };
        let mut list = TopicPartitionList::new();
        for (partition, offset) in upto {
            list.add_partition_offset(&self.topic, *partition, Offset::Offset(*offset)).map_err(failed)?;
        }
        let admin: AdminClient<DefaultClientContext> =
            kafka::client_config(&self.settings)?.create().map_err(failed)?;
        let options = AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE));
        let deleted = admin.delete_records(&list, &options).await.map_err(failed)?;
        deleted.elements().iter().try_for_each(|partition| partition.error()).map_err(failed)
    }

    fn found(&self, message: &BorrowedMessage<'_>) -> Found {
        let mut marked = Headers::default();
        for header in message.headers().into_iter().flat_map(|headers| headers.iter()) {
            marked.push(header.key, header.value);
        }
        let letter = Letter {
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            ..Letter::from_marked(&marked)
        };
        // Letters of before there were several publishers name none.
        let ours = letter.pipeline == self.whose.pipeline
            && (letter.publisher.is_empty() || letter.publisher == self.whose.publisher);
        let (partition, offset) = (message.partition(), message.offset());
        let millis = message.timestamp().to_millis().unwrap_or(0);
        let replayed = self.spans.get(&partition).is_some_and(|span| offset < span.replayed);
        let kept = Kept {
            id: format!("{partition}:{offset}"),
            failed_at: rfc3339(Micros(millis.saturating_mul(1000))),
            replayed,
            replayed_at: None,
            letter,
        };
        Found { partition, offset, millis, ours, kept }
    }
}

/// Letters one by one.
pub struct Reading<'a> {
    of: &'a TopicLetters,
    /// Where each partition ends that is not read to its end.
    left: BTreeMap<i32, i64>,
}

impl Reading<'_> {
    pub async fn next(&mut self) -> Result<Option<Found>, SinkFailure> {
        while !self.left.is_empty() {
            let silent = |_| SinkFailure::Transient {
                what: format!("nothing comes of the dead-letter topic `{}` for {PATIENCE:?}", self.of.topic),
            };
            let message = match tokio::time::timeout(PATIENCE, self.of.consumer.recv()).await.map_err(silent)? {
                // Behind the last record there may be places without one.
                Err(KafkaError::PartitionEOF(partition)) => {
                    self.left.remove(&partition);
                    continue;
                }
                Err(error) => return Err(trouble(&error, "reading", &self.of.topic)),
                Ok(message) => message,
            };
            let Some(end) = self.left.get(&message.partition()).copied() else { continue };
            if message.offset() + 1 >= end {
                self.left.remove(&message.partition());
            }
            if message.offset() < end {
                return Ok(Some(self.of.found(&message)));
            }
        }
        Ok(None)
    }
}

/// The partitions and their offsets.
async fn spans(consumer: &Arc<StreamConsumer>, topic: &str) -> Result<BTreeMap<i32, Span>, SinkFailure> {
    let (asked, name) = (consumer.clone(), topic.to_owned());
    let told = kafka::blocking(move || {
        let metadata = asked.fetch_metadata(Some(&name), PATIENCE)?;
        let partitions = metadata.topics().first().map(|topic| topic.partitions()).unwrap_or_default();
        let mut spans = BTreeMap::new();
        let mut list = TopicPartitionList::new();
        for partition in partitions.iter().map(|partition| partition.id()) {
            let (low, high) = asked.fetch_watermarks(&name, partition, PATIENCE)?;
            spans.insert(partition, Span { low, high, replayed: low });
            list.add_partition(&name, partition);
        }
        if !spans.is_empty() {
            for element in asked.committed_offsets(list, PATIENCE)?.elements() {
                if let (Offset::Offset(offset), Some(span)) = (element.offset(), spans.get_mut(&element.partition())) {
                    // Of a topic that was made anew, or whose records retention has deleted.
                    span.replayed = offset.clamp(span.low, span.high);
                }
            }
        }
        Ok::<_, KafkaError>(spans)
    });
    let spans = told.await?.map_err(|error| trouble(&error, "looking at", topic))?;
    if spans.is_empty() {
        return Err(SinkFailure::NotReady {
            what: format!("the dead-letter topic `{topic}` does not exist, or outboxd may not see it"),
            remedy: "correct --dead-letter and --brokers, or grant Describe and Read on it".to_owned(),
        });
    }
    Ok(spans)
}
