//! A checkpoint in Kafka: the last record of the pipeline's key in a compacted topic of one partition.
//!
//! For sources where outboxd may not write. The topic is created when it is missing; compaction keeps the last record
//! of each pipeline. Loading reads the partition from its beginning to its end.

use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::{Checkpoint, CheckpointError};

pub const TOPIC: &str = "outboxd_checkpoint";

const PATIENCE: Duration = Duration::from_secs(20);

pub struct KafkaStore {
    /// Addresses and the user's security settings.
    config: ClientConfig,
    producer: FutureProducer,
}

impl KafkaStore {
    /// `config` is what every client of this cluster needs.
    pub fn new(config: ClientConfig) -> Result<Self, CheckpointError> {
        let mut producing = config.clone();
        producing.set("acks", "all").set("enable.idempotence", "true").set("linger.ms", "0");
        // Whoever stores a position holds a lock meanwhile, and must know soon that it cannot.
        producing.set("message.timeout.ms", "8000");
        let producer = producing.create().map_err(|error| refused(&error))?;
        Ok(KafkaStore { config, producer })
    }

    pub async fn load(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        self.create_topic().await?;
        self.read(pipeline).await
    }

    /// As [`load`](Self::load), and makes no topic. Only for a look: a broker that has not heard of the topic yet says that
    /// there is none.
    pub async fn peek(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        let consumer: BaseConsumer = self.config.create().map_err(|error| refused(&error))?;
        let asked = tokio::task::spawn_blocking(move || consumer.fetch_watermarks(TOPIC, 0, PATIENCE)).await;
        let asked = asked.map_err(|died| CheckpointError::Transient(format!("reading {TOPIC} died: {died}")))?;
        match asked {
            Err(KafkaError::MetadataFetch(
                RDKafkaErrorCode::UnknownTopicOrPartition
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownPartition,
            )) => Ok(None),
            Err(error) => Err(transient("reading", &error)),
            Ok(_) => self.read(pipeline).await,
        }
    }

    async fn read(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        let (config, key) = (self.config.clone(), pipeline.to_owned());
        let read = tokio::task::spawn_blocking(move || last_of(&config, &key)).await;
        let read = read.map_err(|died| CheckpointError::Transient(format!("reading {TOPIC} died: {died}")))??;
        read.map(|json| Checkpoint::from_json(pipeline, &json, &format!("topic {TOPIC}"))).transpose()
    }

    pub async fn save(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let json = checkpoint.to_json();
        let record = FutureRecord::to(TOPIC).key(&checkpoint.pipeline).payload(&json).partition(0);
        match self.producer.send(record, PATIENCE).await {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(transient("writing", &error)),
        }
    }

    async fn create_topic(&self) -> Result<(), CheckpointError> {
        let admin: AdminClient<DefaultClientContext> = self.config.create().map_err(|error| refused(&error))?;
        let topic = NewTopic::new(TOPIC, 1, TopicReplication::Fixed(-1)).set("cleanup.policy", "compact");
        let options = AdminOptions::new().request_timeout(Some(PATIENCE));
        let made = admin.create_topics(&[topic], &options).await.map_err(|error| transient("creating", &error))?;
        match made.into_iter().next() {
            Some(Ok(_)) | None => Ok(()),
            Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => self.check_policy(&admin, &options).await,
            // Whoever may not create it may still be allowed to use the one that is there.
            Some(Err((
                _,
                RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed,
            ))) => Ok(()),
            Some(Err((_, code))) => Err(CheckpointError::Refused {
                what: format!("the topic {TOPIC} cannot be created: {code}"),
                remedy: format!("create it with one partition and cleanup.policy=compact, or grant Create on {TOPIC}"),
            }),
        }
    }
}

impl KafkaStore {
    /// A topic that deletes old records would make a pipeline that was away forget its position, and start anew.
    async fn check_policy(
        &self,
        admin: &AdminClient<DefaultClientContext>,
        options: &AdminOptions,
    ) -> Result<(), CheckpointError> {
        let asked = admin.describe_configs(&[ResourceSpecifier::Topic(TOPIC)], options).await;
        let answers = asked.map_err(|error| transient("looking at", &error))?;
        // Whoever may not look must take it as it is.
        let Some(Ok(resource)) = answers.into_iter().next() else { return Ok(()) };
        match resource.get("cleanup.policy").and_then(|entry| entry.value.as_deref()) {
            None | Some("compact") => Ok(()),
            Some(policy) => Err(CheckpointError::Refused {
                what: format!("the topic {TOPIC} has cleanup.policy={policy}: it would forget positions"),
                remedy: format!("set cleanup.policy=compact on {TOPIC}"),
            }),
        }
    }
}

/// The value of the key's last record.
fn last_of(config: &ClientConfig, key: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
    let mut config = config.clone();
    config.set("group.id", "outboxd-checkpoint").set("enable.auto.commit", "false");
    let consumer: BaseConsumer = config.create().map_err(|error| refused(&error))?;
    let (first, end) = consumer.fetch_watermarks(TOPIC, 0, PATIENCE).map_err(|error| transient("reading", &error))?;
    if first == end && end > 0 {
        return Err(CheckpointError::Refused {
            what: format!("the topic {TOPIC} has lost all its {end} records, and with them every position"),
            remedy: "find out where the pipeline stood and go on there under another --name with --start".to_owned(),
        });
    }
    let mut partition = TopicPartitionList::new();
    partition.add_partition_offset(TOPIC, 0, Offset::Beginning).map_err(|error| refused(&error))?;
    consumer.assign(&partition).map_err(|error| refused(&error))?;
    let mut found = None;
    let deadline = Instant::now() + 3 * PATIENCE;
    loop {
        // Compaction and transactions leave holes, so that the last record may lie before the end.
        let position = consumer.position().map_err(|error| transient("reading", &error))?;
        if let Some(Offset::Offset(next)) = position.find_partition(TOPIC, 0).map(|element| element.offset())
            && next >= end
        {
            return Ok(found);
        }
        if end == 0 {
            return Ok(None);
        }
        match consumer.poll(Duration::from_millis(200)) {
            Some(Ok(message)) if message.key() == Some(key.as_bytes()) => {
                found = message.payload().map(<[u8]>::to_vec);
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(transient("reading", &error)),
            None if Instant::now() > deadline => {
                return Err(CheckpointError::Transient(format!("the topic {TOPIC} could not be read to its end")));
            }
            None => {}
        }
    }
}

fn transient(doing: &str, error: &KafkaError) -> CheckpointError {
    CheckpointError::Transient(format!("{doing} the topic {TOPIC}: {error}"))
}

fn refused(error: &KafkaError) -> CheckpointError {
    CheckpointError::Refused {
        what: format!("no Kafka client for the checkpoint: {error}"),
        remedy: "correct the --kafka option it names".to_owned(),
    }
}
