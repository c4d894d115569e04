//! What must be known of a topic before a record is enqueued to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{Producer, ThreadedProducer};

use super::context::ReceiptContext;
use super::{apply, blocking, not_creatable};
use crate::config::{KafkaSettings, TopicCreation};
use crate::sink::SinkFailure;

/// Kafka's own default for `max.message.bytes`, taken when the broker does not tell.
const DEFAULT_MAX_BYTES: usize = 1_048_588;

/// A refused topic is asked about again after this long.
const REFUSAL_LASTS: Duration = Duration::from_secs(15);

/// A topic that another broker has not heard of yet is given this long to appear.
const APPEARS_WITHIN: Duration = Duration::from_secs(3);

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Default)]
pub struct TopicLimits {
    pub max_bytes: usize,
    pub partitions: i32,
}

#[derive(Clone, Debug)]
pub enum TopicState {
    Ready(TopicLimits),
    Refused { why: String, since: Instant },
}

impl TopicState {
    pub fn refused(why: String) -> Self {
        TopicState::Refused { why, since: Instant::now() }
    }

    /// Whether it is time to ask again about a refused topic.
    pub fn is_stale(&self) -> bool {
        matches!(self, TopicState::Refused { since, .. } if since.elapsed() > REFUSAL_LASTS)
    }
}

/// Looks the topic up, creates it when that is wanted, and asks for its record limit.
pub async fn find_out(
    producer: &Arc<ThreadedProducer<ReceiptContext>>,
    settings: &KafkaSettings,
    topic: &str,
) -> Result<TopicState, SinkFailure> {
    let mut known = look(producer, settings, topic, Duration::ZERO).await?;
    if matches!(known, Known::Missing) {
        if let Some(wanted) = &settings.create_topics
            && let Some(why) = create(settings, topic, wanted).await?
        {
            return Ok(TopicState::refused(why));
        }
        known = look(producer, settings, topic, APPEARS_WITHIN).await?;
    }
    Ok(match known {
        Known::Ready(limits) => TopicState::Ready(limits),
        Known::Refused(why) => TopicState::refused(why),
        Known::Missing => TopicState::refused("it does not exist".to_owned()),
    })
}

/// What there is to know of a topic without touching it.
pub enum Known {
    Ready(TopicLimits),
    Missing,
    Refused(String),
}

/// Looks the topic up and nothing else, waiting this long for one that is missing to appear.
pub async fn look(
    producer: &Arc<ThreadedProducer<ReceiptContext>>,
    settings: &KafkaSettings,
    topic: &str,
    patience: Duration,
) -> Result<Known, SinkFailure> {
    Ok(match partitions(producer, topic, patience).await? {
        Lookup::Missing => Known::Missing,
        Lookup::Refused(why) => Known::Refused(why),
        Lookup::Found(partitions) => {
            let max_bytes = if is_embedded(producer) { DEFAULT_MAX_BYTES } else { max_bytes(settings, topic).await? };
            Known::Ready(TopicLimits { max_bytes, partitions })
        }
    })
}

/// Whether this is librdkafka's in-process broker, by the name it gives its cluster. It knows no question for a topic's
/// limits, and lets it time out. The name is known from the first contact: nothing is waited for.
fn is_embedded(producer: &ThreadedProducer<ReceiptContext>) -> bool {
    producer.client().fetch_cluster_id(Duration::ZERO).is_some_and(|id| id.starts_with("mockCluster"))
}

enum Lookup {
    Found(i32),
    Missing,
    Refused(String),
}

/// How many partitions the topic has, waiting for it to appear and for its leaders to be elected.
async fn partitions(
    producer: &Arc<ThreadedProducer<ReceiptContext>>,
    topic: &str,
    patience: Duration,
) -> Result<Lookup, SinkFailure> {
    let started = Instant::now();
    loop {
        let (asked, name) = (producer.clone(), topic.to_owned());
        let answer = blocking(move || {
            let metadata = asked.client().fetch_metadata(Some(&name), REQUEST_TIMEOUT)?;
            let found = metadata.topics().first();
            let error = found.and_then(|topic| topic.error()).map(RDKafkaErrorCode::from);
            Ok::<_, KafkaError>((found.map_or(0, |topic| topic.partitions().len() as i32), error))
        });
        match answer.await? {
            Ok((count, None)) if count > 0 => return Ok(Lookup::Found(count)),
            Ok((_, Some(RDKafkaErrorCode::TopicAuthorizationFailed))) => {
                return Ok(Lookup::Refused("outboxd may not describe it (TOPIC_AUTHORIZATION_FAILED)".to_owned()));
            }
            Ok((_, Some(RDKafkaErrorCode::InvalidTopic))) => {
                return Ok(Lookup::Refused("its name is not one that Kafka takes".to_owned()));
            }
            Ok((_, Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic) | None))
                if started.elapsed() >= patience =>
            {
                return Ok(Lookup::Missing);
            }
            Ok(_) if started.elapsed() < REQUEST_TIMEOUT => tokio::time::sleep(Duration::from_millis(100)).await,
            Ok((_, error)) => {
                let error = error.map_or_else(|| "no partitions".to_owned(), |code| code.to_string());
                return Err(SinkFailure::Transient {
                    what: format!("Kafka topic `{topic}` is not available: {error}"),
                });
            }
            Err(error) => {
                return Err(SinkFailure::Transient { what: format!("Kafka does not answer about `{topic}`: {error}") });
            }
        }
    }
}

pub(super) fn admin(settings: &KafkaSettings) -> Result<AdminClient<DefaultClientContext>, SinkFailure> {
    let mut config = ClientConfig::new();
    apply(settings, &mut config)?;
    // Options that only a producer knows would be warned about.
    config.set("client.id", "outboxd-admin");
    config.create().map_err(not_creatable)
}

pub(super) fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT)).operation_timeout(Some(REQUEST_TIMEOUT))
}

/// Creates the topic; why it could not be, if it could not.
async fn create(settings: &KafkaSettings, topic: &str, wanted: &TopicCreation) -> Result<Option<String>, SinkFailure> {
    let why = request_creation(settings, topic, wanted, options()).await?;
    if why.is_none() {
        tracing::info!(topic, "created the Kafka topic");
    }
    Ok(why)
}

/// Has the cluster judge a creation without carrying it out; why it would refuse, if it would.
pub async fn could_be_created(settings: &KafkaSettings, topic: &str) -> Result<Option<String>, SinkFailure> {
    let wanted = settings.create_topics.unwrap_or_default();
    request_creation(settings, topic, &wanted, options().validate_only(true)).await
}

async fn request_creation(
    settings: &KafkaSettings,
    topic: &str,
    wanted: &TopicCreation,
    options: AdminOptions,
) -> Result<Option<String>, SinkFailure> {
    let partitions = wanted.partitions.unwrap_or(-1);
    let replication = i32::from(wanted.replication.unwrap_or(-1));
    let new = NewTopic::new(topic, partitions, TopicReplication::Fixed(replication));
    let admin = admin(settings)?;
    let created = admin.create_topics([&new], &options).await;
    match created.map(|mut results| results.pop()) {
        Ok(Some(Ok(_)) | None) => Ok(None),
        Ok(Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists)))) => Ok(None),
        Ok(Some(Err((_, code)))) => Ok(Some(format!("it does not exist and cannot be created: {code}"))),
        Err(error) => {
            // librdkafka's in-process broker creates topics when they are asked about and knows no such request.
            tracing::debug!(topic, %error, "the broker cannot create topics");
            Ok(None)
        }
    }
}

async fn max_bytes(settings: &KafkaSettings, topic: &str) -> Result<usize, SinkFailure> {
    let admin = admin(settings)?;
    let described = admin.describe_configs([&ResourceSpecifier::Topic(topic)], &options()).await;
    let limit = match described.map(|mut results| results.pop()) {
        Ok(Some(Ok(config))) => config.get("max.message.bytes").and_then(|entry| entry.value.clone()),
        Ok(Some(Err(code))) => {
            tracing::debug!(topic, %code, "the topic's limits are not told");
            None
        }
        Ok(None) => None,
        Err(error) => {
            tracing::debug!(topic, %error, "the topic's limits are not told");
            None
        }
    };
    Ok(limit.and_then(|limit| limit.parse().ok()).unwrap_or(DEFAULT_MAX_BYTES))
}
