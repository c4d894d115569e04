//! Topics of their own, and reading them whole.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::{PATIENCE, eventually, unique, variable};

pub fn shared_kafka() -> String {
    variable("OUTBOXD_TEST_KAFKA")
}

pub struct Topic {
    pub name: String,
    pub brokers: String,
    pub partitions: i32,
}

impl Topic {
    /// On the shared broker.
    pub async fn create(partitions: i32) -> Self {
        Self::create_at(&shared_kafka(), partitions, &[]).await
    }

    pub async fn create_at(brokers: &str, partitions: i32, config: &[(&str, &str)]) -> Self {
        Self::place(brokers, partitions, TopicReplication::Fixed(1), config).await
    }

    /// With the brokers that hold each partition, the leader first.
    pub async fn assigned(brokers: &str, replicas: &[&[i32]]) -> Self {
        Self::place(brokers, replicas.len() as i32, TopicReplication::Variable(replicas), &[]).await
    }

    async fn place(brokers: &str, partitions: i32, replication: TopicReplication<'_>, config: &[(&str, &str)]) -> Self {
        let name = unique("promise");
        let admin: AdminClient<DefaultClientContext> =
            ClientConfig::new().set("bootstrap.servers", brokers).create().expect("an admin client is made");
        let mut new = NewTopic::new(&name, partitions, replication);
        for (key, value) in config {
            new = new.set(key, value);
        }
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        let created = admin.create_topics([&new], &options).await.expect("the broker answers");
        created.into_iter().for_each(|topic| drop(topic.expect("the topic is created")));
        let topic = Topic { name, brokers: brokers.to_owned(), partitions };
        topic.until_led().await;
        topic
    }

    async fn until_led(&self) {
        let probe = self.reader();
        eventually(PATIENCE, "every partition has a leader", async || {
            let metadata = probe.consumer.fetch_metadata(Some(&self.name), Duration::from_secs(5)).ok()?;
            let topic = metadata.topics().first()?;
            let led = topic.partitions().iter().filter(|partition| partition.leader() >= 0).count();
            (led as i32 == self.partitions).then_some(())
        })
        .await;
    }

    /// Reads all partitions from their beginning.
    pub fn reader(&self) -> TopicReader {
        let consumer = self.consumer(&HashMap::new());
        let topic = Topic { name: self.name.clone(), brokers: self.brokers.clone(), partitions: self.partitions };
        TopicReader { consumer, topic, next: HashMap::new() }
    }

    /// Reads what is committed of all partitions from these offsets, or from their beginning, and tells their ends.
    fn consumer(&self, from: &HashMap<i32, i64>) -> StreamConsumer {
        let consumer: StreamConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", &self.name)
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("isolation.level", "read_committed")
            .set("auto.offset.reset", "earliest")
            .set("fetch.wait.max.ms", "50")
            .set("reconnect.backoff.max.ms", "500")
            .set_log_level(rdkafka::config::RDKafkaLogLevel::Emerg)
            .create()
            .expect("a consumer is made");
        let mut all = TopicPartitionList::new();
        for partition in 0..self.partitions {
            let offset = from.get(&partition).map_or(Offset::Beginning, |offset| Offset::Offset(*offset));
            all.add_partition_offset(&self.name, partition, offset).expect("it is an offset");
        }
        consumer.assign(&all).expect("partitions are assigned");
        consumer
    }
}

#[derive(Clone, Debug)]
pub struct Record {
    pub key: Option<String>,
    pub value: Option<String>,
    pub headers: Vec<(String, String)>,
    pub partition: i32,
    pub offset: i64,
    /// Milliseconds since 1970.
    pub timestamp: i64,
}

impl Record {
    fn of(message: &BorrowedMessage<'_>) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
        Record {
            key: message.key().map(text),
            value: message.payload().map(text),
            headers: headers
                .map(|header| (header.key.to_owned(), header.value.map_or_else(String::new, text)))
                .collect(),
            partition: message.partition(),
            offset: message.offset(),
            timestamp: message.timestamp().to_millis().unwrap_or(-1),
        }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }

    /// The event's id, which the native layout puts into a header.
    pub fn id(&self) -> &str {
        self.header("id").unwrap_or_else(|| panic!("a record without an id: {self:?}"))
    }
}

/// An ordinary consumer of the whole topic.
pub struct TopicReader {
    consumer: StreamConsumer,
    topic: Topic,
    /// The offset after the last record read, by partition.
    next: HashMap<i32, i64>,
}

impl TopicReader {
    /// The next record, or nothing when none comes in time. Errors of a broker that is away are waited out.
    pub async fn next(&mut self, within: Duration) -> Option<Record> {
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let Ok(message) = tokio::time::timeout_at(deadline, self.consumer.recv()).await.ok()? else { continue };
            self.next.insert(message.partition(), message.offset() + 1);
            return Some(Record::of(&message));
        }
    }

    /// Reads until the condition holds of all that was read.
    pub async fn until(
        &mut self,
        within: Duration,
        what: &str,
        mut holds: impl FnMut(&[Record]) -> bool,
    ) -> Vec<Record> {
        let begin = Instant::now();
        let mut records = Vec::new();
        while !holds(&records) {
            let left = within.checked_sub(begin.elapsed());
            let left = left.unwrap_or_else(|| panic!("not within {within:?}, with {} records: {what}", records.len()));
            records.extend(self.next(left.min(Duration::from_secs(1))).await);
        }
        records
    }

    pub async fn take(&mut self, count: usize) -> Vec<Record> {
        self.until(PATIENCE, &format!("{count} records of {}", self.topic.name), |records| records.len() >= count).await
    }

    /// What is left up to the ends that the partitions have now. Marks of transactions have offsets too, so that the last
    /// record may lie before the end: it is reached when a consumer that begins now says so.
    pub async fn rest(&mut self) -> Vec<Record> {
        let consumer = self.topic.consumer(&self.next);
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let (mut records, mut ended) = (Vec::new(), HashSet::new());
        while (ended.len() as i32) < self.topic.partitions {
            let next = tokio::time::timeout_at(deadline, consumer.recv()).await;
            match next.unwrap_or_else(|_| panic!("{} was not read to its end", self.topic.name)) {
                Ok(message) => {
                    self.next.insert(message.partition(), message.offset() + 1);
                    records.push(Record::of(&message));
                }
                Err(KafkaError::PartitionEOF(partition)) => drop(ended.insert(partition)),
                Err(_) => {}
            }
        }
        self.consumer = self.topic.consumer(&self.next);
        records
    }
}
