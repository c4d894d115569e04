//! A compacted Kafka topic of one partition, of which the last record of a key is what counts.

use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::CheckpointError;

const PATIENCE: Duration = Duration::from_secs(20);

/// The last record of a key that was written lately is among so many; else all are read.
const TAIL: i64 = 1000;

#[derive(Clone)]
pub struct CompactedTopic {
    /// What every client of the cluster needs.
    pub config: ClientConfig,
    pub name: String,
}

impl CompactedTopic {
    /// Makes the topic, or looks whether one that is there will do.
    pub async fn create(&self) -> Result<(), CheckpointError> {
        let name = &self.name;
        let admin: AdminClient<DefaultClientContext> = self.config.create().map_err(|error| no_client(&error))?;
        let topic = NewTopic::new(name, 1, TopicReplication::Fixed(-1)).set("cleanup.policy", "compact");
        let options = AdminOptions::new().request_timeout(Some(PATIENCE));
        let made = admin.create_topics(&[topic], &options).await.map_err(|error| self.transient("creating", &error))?;
        match made.into_iter().next() {
            Some(Ok(_)) | None => Ok(()),
            Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => self.check_policy(&admin, &options).await,
            // Whoever may not create it may still be allowed to use the one that is there.
            Some(Err((
                _,
                RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed,
            ))) => Ok(()),
            Some(Err((_, code))) => Err(CheckpointError::Refused {
                what: format!("the topic {name} cannot be created: {code}"),
                remedy: format!("create it with one partition and cleanup.policy=compact, or grant Create on {name}"),
            }),
        }
    }

    /// A topic that deletes old records would make a pipeline that was away forget its position, and start anew.
    async fn check_policy(
        &self,
        admin: &AdminClient<DefaultClientContext>,
        options: &AdminOptions,
    ) -> Result<(), CheckpointError> {
        let name = &self.name;
        let asked = admin.describe_configs(&[ResourceSpecifier::Topic(name)], options).await;
        let answers = asked.map_err(|error| self.transient("looking at", &error))?;
        // Whoever may not look must take it as it is.
        let Some(Ok(resource)) = answers.into_iter().next() else { return Ok(()) };
        match resource.get("cleanup.policy").and_then(|entry| entry.value.as_deref()) {
            None | Some("compact") => Ok(()),
            Some(policy) => Err(CheckpointError::Refused {
                what: format!("the topic {name} has cleanup.policy={policy}: it would forget positions"),
                remedy: format!("set cleanup.policy=compact on {name}"),
            }),
        }
    }

    /// Whether there is such a topic, as far as the broker has heard.
    pub async fn exists(&self) -> Result<bool, CheckpointError> {
        let consumer: BaseConsumer = self.config.create().map_err(|error| no_client(&error))?;
        let name = self.name.clone();
        let asked = tokio::task::spawn_blocking(move || consumer.fetch_watermarks(&name, 0, PATIENCE)).await;
        let died = |died| CheckpointError::Transient(format!("reading {} died: {died}", self.name));
        match asked.map_err(died)? {
            Err(KafkaError::MetadataFetch(
                RDKafkaErrorCode::UnknownTopicOrPartition
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownPartition,
            )) => Ok(false),
            Err(error) => Err(self.transient("reading", &error)),
            Ok(_) => Ok(true),
        }
    }

    /// The value of the key's last record that is committed.
    pub async fn last_of(&self, key: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        let (topic, key) = (self.clone(), key.to_owned());
        let read = tokio::task::spawn_blocking(move || topic.find_last(key.as_bytes())).await;
        read.map_err(|died| CheckpointError::Transient(format!("reading {} died: {died}", self.name)))?
    }

    fn find_last(&self, key: &[u8]) -> Result<Option<Vec<u8>>, CheckpointError> {
        let name = &self.name;
        let mut config = self.config.clone();
        config.set("group.id", "outboxd-checkpoint").set("enable.auto.commit", "false");
        config.set("isolation.level", "read_committed").set("enable.partition.eof", "true");
        let consumer: BaseConsumer = config.create().map_err(|error| no_client(&error))?;
        let watermarks = consumer.fetch_watermarks(name, 0, PATIENCE);
        let (first, end) = watermarks.map_err(|error| self.transient("reading", &error))?;
        if first == end && end > 0 {
            return Err(CheckpointError::Refused {
                what: format!("the topic {name} has lost all its {end} records, and with them every position"),
                remedy: "find out where the pipeline stood and go on there under another --name with --start"
                    .to_owned(),
            });
        }
        if end - TAIL > first {
            let late = self.last_from(&consumer, key, Offset::Offset(end - TAIL))?;
            if late.is_some() {
                return Ok(late);
            }
        }
        self.last_from(&consumer, key, Offset::Beginning)
    }

    fn last_from(&self, consumer: &BaseConsumer, key: &[u8], from: Offset) -> Result<Option<Vec<u8>>, CheckpointError> {
        let mut partition = TopicPartitionList::new();
        partition.add_partition_offset(&self.name, 0, from).map_err(|error| no_client(&error))?;
        consumer.assign(&partition).map_err(|error| no_client(&error))?;
        let mut found = None;
        let mut deadline = Instant::now() + 3 * PATIENCE;
        loop {
            match consumer.poll(Duration::from_millis(200)) {
                Some(Ok(message)) => {
                    deadline = Instant::now() + 3 * PATIENCE;
                    if message.key() == Some(key) {
                        found = message.payload().map(<[u8]>::to_vec);
                    }
                }
                // Compaction and the marks of transactions leave holes, so that the last record may lie before the end.
                Some(Err(KafkaError::PartitionEOF(_))) => return Ok(found),
                Some(Err(error)) => return Err(self.transient("reading", &error)),
                None if Instant::now() > deadline => {
                    let what = format!("the topic {} could not be read to its end", self.name);
                    return Err(CheckpointError::Transient(what));
                }
                None => {}
            }
        }
    }

    fn transient(&self, doing: &str, error: &KafkaError) -> CheckpointError {
        CheckpointError::Transient(format!("{doing} the topic {}: {error}", self.name))
    }
}

pub(super) fn no_client(error: &KafkaError) -> CheckpointError {
    CheckpointError::Refused {
        what: format!("no Kafka client for the checkpoint: {error}"),
        remedy: "correct the --kafka option it names".to_owned(),
    }
}
