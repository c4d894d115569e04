//! A checkpoint in Kafka: the last record of the pipeline's key in a compacted topic of one partition.
//!
//! For sources where outboxd may not write. The topic is created when it is missing; compaction keeps the last record
//! of each pipeline.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;
use rdkafka::producer::{FutureProducer, FutureRecord};

use super::compacted::{CompactedTopic, no_client};
use super::{Checkpoint, CheckpointError};

pub const TOPIC: &str = "outboxd_checkpoint";

const PATIENCE: Duration = Duration::from_secs(20);

pub struct KafkaStore {
    topic: CompactedTopic,
    producer: FutureProducer,
}

impl KafkaStore {
    /// `config` is what every client of this cluster needs.
    pub fn new(config: ClientConfig) -> Result<Self, CheckpointError> {
        let mut producing = config.clone();
        producing.set("acks", "all").set("enable.idempotence", "true").set("linger.ms", "0");
        // Whoever stores a position holds a lock meanwhile, and must know soon that it cannot.
        producing.set("message.timeout.ms", "8000");
        let producer = producing.create().map_err(|error| no_client(&error))?;
        Ok(KafkaStore { topic: CompactedTopic { config, name: TOPIC.to_owned() }, producer })
    }

    pub async fn load(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        self.topic.create().await?;
        self.read(pipeline).await
    }

    /// As [`load`](Self::load), and makes no topic. Only for a look: a broker that has not heard of the topic yet says that
    /// there is none.
    pub async fn peek(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        match self.topic.exists().await? {
            true => self.read(pipeline).await,
            false => Ok(None),
        }
    }

    async fn read(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        let read = self.topic.last_of(pipeline).await?;
        read.map(|json| Checkpoint::from_json(pipeline, &json, &format!("topic {TOPIC}"))).transpose()
    }

    pub async fn save(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let json = checkpoint.to_json();
        let record = FutureRecord::to(TOPIC).key(&checkpoint.pipeline).payload(&json).partition(0);
        match self.producer.send(record, PATIENCE).await {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(transient(&error)),
        }
    }
}

fn transient(error: &KafkaError) -> CheckpointError {
    CheckpointError::Transient(format!("writing the topic {TOPIC}: {error}"))
}
