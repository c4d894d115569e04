//! The Kafka sink: one idempotent librdkafka producer per generation.
//!
//! What keeps order per key and loses nothing:
//! - the producer is idempotent, waits for all in-sync replicas, and never times a record out, so librdkafka retries
//!   in order for as long as the broker is away;
//! - with the gapless guarantee a batch that the broker refuses for good stops the producer, so nothing overtakes it;
//! - whatever can be known beforehand (topic missing or forbidden, record too large) is told apart before a record
//!   is enqueued, so that such a record never spoils a batch;
//! - what only the broker knows (a null key in a compacted topic, say) fails a whole batch: its records become
//!   *suspects*, the source is read again, and each suspect is sent alone until the culprit stands by itself.

mod context;
mod flusher;
pub mod preflight;
mod produce;
mod topics;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{Producer, ThreadedProducer};
use tokio::time::Instant;

use crate::ack_window::{AckWindow, Receipt};
use crate::config::{Brokers, KafkaOption, KafkaSettings};
use crate::route::Record;
use crate::sink::{Enqueued, SinkFailure};
use context::{Fingerprint, ReceiptContext};
use flusher::Flusher;
use produce::Topic;
use topics::{TopicLimits, TopicState};

/// Largest batch, unless a topic takes less.
const BATCH_BYTES: usize = 1_000_000;

/// How long a record waits for company while the source has more at hand; otherwise [`Flusher`] sends it at once.
const LINGER_MS: &str = "25";

/// What outlives a producer: learnt from the broker, needed by the next generation.
#[derive(Default)]
pub struct KafkaMemory {
    inner: Mutex<Learnt>,
    /// Whether there are suspects or refused records to look out for.
    watchful: AtomicBool,
}

#[derive(Default)]
struct Learnt {
    topics: HashMap<String, TopicState>,
    batch_bytes: Option<usize>,
    /// Records of a batch that was refused: to be sent alone.
    suspects: HashMap<Fingerprint, String>,
    /// Records that were refused when they were alone.
    refused: HashMap<Fingerprint, String>,
    /// Whether the cluster has ever answered: after that, trouble with it is taken to pass.
    contacted: bool,
    /// The cluster's id.
    cluster: Option<String>,
}

impl KafkaMemory {
    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn cluster(&self) -> Option<String> {
        self.learnt().cluster.clone()
    }

    /// Forgets what is known of topics, for they may have changed.
    fn forget_topics(&self) {
        self.learnt().topics.clear();
    }
}

pub struct KafkaSink {
    producer: Arc<ThreadedProducer<ReceiptContext>>,
    flusher: Flusher,
    /// Unless the user has chosen how long records wait.
    hurries: bool,
    settings: KafkaSettings,
    memory: Arc<KafkaMemory>,
    /// The last topic enqueued to, so that a run of one topic costs no look-up.
    current: Option<CurrentTopic>,
    batch_bytes: usize,
}

struct CurrentTopic {
    name: String,
    limits: TopicLimits,
    handle: Topic,
}

impl KafkaSink {
    /// Makes the producer; returns before any broker has answered, so that the producer id is fetched meanwhile.
    pub fn create(
        settings: &KafkaSettings,
        memory: &Arc<KafkaMemory>,
        window: &Arc<AckWindow>,
    ) -> Result<Self, SinkFailure> {
        let batch_bytes = memory.learnt().batch_bytes.unwrap_or(BATCH_BYTES);
        let mut config = ClientConfig::new();
        // Under the names that the user's settings are translated to: librdkafka gets them in no particular order,
        // so that of two names for one setting either might win.
        config
            .set("client.id", "outboxd")
            .set("enable.idempotence", "true")
            .set("enable.gapless.guarantee", "true")
            .set("request.required.acks", "all")
            .set("message.timeout.ms", "0")
            .set("partitioner", "murmur2_random")
            .set("compression.type", "lz4")
            .set("queue.buffering.max.ms", LINGER_MS)
            .set("batch.size", batch_bytes.to_string())
            .set("batch.num.messages", "20000")
            // Our own check per topic is the one that counts.
            .set("message.max.bytes", "1000000000")
            // The window is the bound; the queue must never be the narrower one.
            .set("queue.buffering.max.messages", "0")
            .set("queue.buffering.max.kbytes", "2147483647")
            .set("reconnect.backoff.max.ms", "2000")
            .set("socket.keepalive.enable", "true")
            .set_log_level(RDKafkaLogLevel::Warning);
        apply(settings, &mut config)?;
        let context = ReceiptContext::new(window.clone(), memory.clone());
        let producer = ThreadedProducer::from_config_and_context(&config, context).map_err(not_creatable)?;
        let producer = Arc::new(producer);
        let chosen = settings.options.iter().any(|option| option.key == "queue.buffering.max.ms");
        let flusher = Flusher::start(producer.clone())?;
        Ok(KafkaSink {
            producer,
            flusher,
            hurries: !chosen,
            settings: settings.clone(),
            memory: memory.clone(),
            current: None,
            batch_bytes,
        })
    }

    /// Waits for the cluster to answer and makes sure of the topics that are known beforehand.
    pub async fn ready(&mut self, topics: &[&str]) -> Result<(), SinkFailure> {
        self.first_contact().await?;
        for topic in topics {
            if let Enqueued::Refused(why) = self.prepare(topic).await? {
                return Err(SinkFailure::NotReady {
                    what: format!("Kafka topic `{topic}` cannot be written to: {why}"),
                    remedy: "create the topic, grant Write on it, or run with --create-topics".to_owned(),
                });
            }
        }
        Ok(())
    }

    async fn first_contact(&self) -> Result<(), SinkFailure> {
        let producer = self.producer.clone();
        let asked = move || {
            let timeout = Duration::from_secs(10);
            producer.client().fetch_cluster_id(timeout)
        };
        match blocking(asked).await? {
            Some(cluster) => {
                let mut learnt = self.memory.learnt();
                (learnt.contacted, learnt.cluster) = (true, Some(cluster));
                Ok(())
            }
            // The context has told the window already when the cluster refused our credentials.
            None => {
                let brokers = brokers(&self.settings);
                Err(SinkFailure::Transient { what: format!("no Kafka broker of {brokers} answers") })
            }
        }
    }

    /// Enqueues a record, or says why it cannot be. The receipt is resolved in the window when it was acknowledged.
    pub fn enqueue(&mut self, record: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
        if self.current.as_ref().is_none_or(|current| current.name != record.topic) {
            match self.memory.learnt().topics.get(record.topic) {
                Some(TopicState::Ready(limits)) => {
                    let Some(handle) = Topic::new(&self.producer, record.topic) else {
                        return Ok(Enqueued::Refused("librdkafka does not take its name".to_owned()));
                    };
                    self.current = Some(CurrentTopic { name: record.topic.to_owned(), limits: *limits, handle });
                }
                Some(state @ TopicState::Refused { why, .. }) if !state.is_stale() => {
                    return Ok(Enqueued::Refused(why.clone()));
                }
                _ => return Ok(Enqueued::Unprepared),
            }
        }
        let Some(CurrentTopic { limits, handle, .. }) = &self.current else { return Ok(Enqueued::Unprepared) };
        let size = wire_size(record);
        if size > limits.max_bytes {
            let takes = limits.max_bytes;
            return Ok(Enqueued::Refused(format!("it has {size} bytes and topic `{}` takes {takes}", record.topic)));
        }
        if record.partition.is_some_and(|partition| partition >= limits.partitions) {
            let there = limits.partitions;
            return Ok(Enqueued::Refused(format!("topic `{}` has only {there} partitions", record.topic)));
        }
        if self.memory.watchful.load(Ordering::Acquire) {
            let fingerprint = Fingerprint::of_record(record);
            let learnt = self.memory.learnt();
            if let Some(why) = learnt.refused.get(&fingerprint) {
                return Ok(Enqueued::Refused(why.clone()));
            }
            if learnt.suspects.contains_key(&fingerprint) {
                return Ok(Enqueued::Suspect);
            }
        }
        send(handle, record, receipt)
    }

    pub fn hurry(&self) {
        if self.hurries {
            self.flusher.flush();
        }
    }

    /// Sends a suspect with nothing else in flight. When it is refused the window fails and the next generation
    /// knows it for the culprit.
    pub async fn send_alone(&mut self, record: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
        self.drained().await;
        self.producer.context().set_alone(true);
        let sent = match &self.current {
            Some(CurrentTopic { name, handle, .. }) if name == record.topic => send(handle, record, receipt),
            // It was found suspect only after its topic had become the current one.
            _ => Ok(Enqueued::Unprepared),
        };
        self.drained().await;
        self.producer.context().set_alone(false);
        if matches!(sent, Ok(Enqueued::Queued)) {
            self.memory.learnt().suspects.remove(&Fingerprint::of_record(record));
        }
        sent
    }

    /// Finds out about a topic: it exists (or is created), may be written to, and how large its records may be.
    pub async fn prepare(&mut self, topic: &str) -> Result<Enqueued, SinkFailure> {
        let state = topics::find_out(&self.producer, &self.settings, topic).await?;
        let answer = match &state {
            TopicState::Refused { why, .. } => Enqueued::Refused(why.clone()),
            TopicState::Ready(limits) if limits.max_bytes < self.batch_bytes => {
                let mut learnt = self.memory.learnt();
                learnt.batch_bytes = Some(limits.max_bytes);
                learnt.topics.insert(topic.to_owned(), state.clone());
                let takes = limits.max_bytes;
                let what = format!("topic `{topic}` takes batches of at most {takes} bytes: making smaller ones");
                return Err(SinkFailure::Restart { what });
            }
            TopicState::Ready(_) => Enqueued::Queued,
        };
        self.memory.learnt().topics.insert(topic.to_owned(), state);
        Ok(answer)
    }

    /// Waits until librdkafka holds nothing; the window says whether all of it was acknowledged. Records need not wait for
    /// others now, however long the user lets them.
    async fn drained(&self) {
        while self.producer.in_flight_count() > 0 && !self.producer.context().has_failed() {
            self.flusher.flush();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits for what is in flight, until the deadline.
    pub async fn drain(&mut self, deadline: Instant) {
        let _ = tokio::time::timeout_at(deadline, self.drained()).await;
    }

    /// Gives up what is still queued, so that a late record cannot be appended after another instance's.
    pub async fn abandon(self) {
        // Dropping the producer purges its queue and waits for its threads.
        let _ = tokio::task::spawn_blocking(move || drop(self)).await;
    }
}

fn send(topic: &Topic, record: &Record<'_>, receipt: Receipt) -> Result<Enqueued, SinkFailure> {
    match topic.produce(record, receipt) {
        Ok(()) => Ok(Enqueued::Queued),
        Err(RDKafkaErrorCode::QueueFull) => Ok(Enqueued::Full),
        Err(RDKafkaErrorCode::MessageSizeTooLarge) => {
            Ok(Enqueued::Refused("it is larger than the producer's message.max.bytes".to_owned()))
        }
        Err(error) => Err(SinkFailure::Restart { what: format!("the Kafka producer stopped: {error}") }),
    }
}

/// Puts the user's settings over ours; secrets are read now, so that a rotated one is used by the next producer.
fn apply(settings: &KafkaSettings, config: &mut ClientConfig) -> Result<(), SinkFailure> {
    config.set("bootstrap.servers", brokers(settings));
    for KafkaOption { key, value } in &settings.options {
        let revealed = value.reveal().map_err(|error| SinkFailure::NotReady {
            what: format!("the Kafka option {key} cannot be read: {error}"),
            remedy: "make the file or variable it names readable for outboxd".to_owned(),
        })?;
        config.set(key, revealed);
    }
    Ok(())
}

/// What every client of the cluster needs, for those that are not the sink's producer.
pub fn client_config(settings: &KafkaSettings) -> Result<ClientConfig, SinkFailure> {
    const OF_CLIENTS: [&str; 8] =
        ["security.", "sasl.", "ssl.", "enable.ssl", "client.", "broker.", "socket.", "bootstrap."];
    let mut config = ClientConfig::new();
    let of_clients =
        settings.options.iter().filter(|option| OF_CLIENTS.iter().any(|kind| option.key.starts_with(kind)));
    let settings = KafkaSettings { options: of_clients.cloned().collect(), ..settings.clone() };
    apply(&settings, &mut config)?;
    Ok(config)
}

/// The addresses; an embedded broker's are put in before a pipeline starts.
fn brokers(settings: &KafkaSettings) -> &str {
    match &settings.brokers {
        Brokers::Servers(servers) => servers,
        Brokers::Embedded | Brokers::None => "",
    }
}

fn not_creatable(error: KafkaError) -> SinkFailure {
    SinkFailure::NotReady {
        what: format!("the Kafka producer cannot be made: {error}"),
        remedy: "correct the --kafka option it names".to_owned(),
    }
}

/// At most what the record takes in a batch of its own, uncompressed, as the broker counts.
fn wire_size(record: &Record<'_>) -> usize {
    const BATCH_HEADER: usize = 61;
    const RECORD_OVERHEAD: usize = 36;
    const HEADER_OVERHEAD: usize = 10;
    let body = record.key.map_or(0, <[u8]>::len) + record.value.map_or(0, <[u8]>::len);
    BATCH_HEADER + RECORD_OVERHEAD + body + record.headers.weight() + HEADER_OVERHEAD * record.headers.len()
}

pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, SinkFailure> {
    let failed = |error: tokio::task::JoinError| SinkFailure::Transient { what: format!("a Kafka call died: {error}") };
    tokio::task::spawn_blocking(work).await.map_err(failed)
}
