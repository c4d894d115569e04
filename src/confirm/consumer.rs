//! The Kafka side: a consumer of the relay's topics, in a group of its own.
//!
//! librdkafka fetches ahead and keeps the membership alive by itself; messages, errors, statistics and the group's
//! rebalances are all served by whoever polls, one after the other. So the context may look at the desk from its callbacks,
//! on the very thread that gathers and writes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::config::{FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::statistics::Statistics;
use rdkafka::util::Timeout;
use rdkafka::{ClientConfig, ClientContext, Offset, TopicPartitionList};

use super::batch::Place;
use super::desk::Desk;
use super::settings::ConfirmSettings;
use super::status::Status;
use crate::config::{Brokers, KafkaOption, KafkaSettings, OptionValue};
use crate::failure::{ExitCode, Failure, Halt};
use crate::sink::kafka;
use crate::status::State;

pub type Consumer = BaseConsumer<Context>;

/// What is set for every client is the relay's business as well; these are a consumer's own.
const OF_CONSUMERS: [&str; 17] = [
    "fetch.",
    "queued.",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
    "max.partition.fetch.bytes",
    "group.instance.id",
    "group.protocol",
    "group.remote.assignor",
    "partition.assignment.strategy",
    "check.crcs",
    "receive.message.max.bytes",
    "reconnect.",
    "retry.",
    "topic.metadata.",
    "metadata.",
    "connections.max.idle.ms",
];

/// Settings that would make a receipt lie or get lost; not even --unsafe makes them work.
pub fn refusals(kafka: &KafkaSettings) -> Vec<(String, String)> {
    let refused = |option: &KafkaOption| {
        let OptionValue::Plain(value) = &option.value else { return None };
        let truthy = matches!(value.to_ascii_lowercase().as_str(), "true" | "t" | "1" | "yes");
        let why = match option.key.as_str() {
            "enable.auto.commit" | "auto.commit.enable" | "enable.auto.offset.store" if truthy => {
                "offsets are committed only after their receipts are written: leave this out"
            }
            "auto.offset.reset" if !matches!(value.as_str(), "earliest" | "smallest" | "beginning") => {
                "a new group begins with the first record, or rows before it would never have a receipt; to pass over \
                 them, move the group with kafka-consumer-groups.sh --reset-offsets"
            }
            "isolation.level" if value != "read_committed" => {
                "a record of a transaction that was rolled back was not received by anybody: leave this out"
            }
            "group.id" => "say it with --group",
            _ => return None,
        };
        Some((option.key.clone(), why.to_owned()))
    };
    kafka.options.iter().filter_map(refused).collect()
}

fn client_config(settings: &ConfirmSettings) -> Result<ClientConfig, Failure> {
    let mut config = kafka::client_config(&settings.kafka)?;
    let statistics = if settings.until_caught_up { "500" } else { "1000" };
    config
        .set("group.id", &settings.group)
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("auto.offset.reset", "earliest")
        .set("isolation.level", "read_committed")
        .set("allow.auto.create.topics", "false")
        .set("statistics.interval.ms", statistics)
        // The partitions of an instance that died go to others after this.
        .set("session.timeout.ms", "10000")
        // What is fetched ahead; the payloads are of no use here, and are thrown away at once.
        .set("queued.max.messages.kbytes", "16384")
        .set("reconnect.backoff.max.ms", "2000")
        .set("socket.keepalive.enable", "true")
        .set_log_level(RDKafkaLogLevel::Warning);
    if config.get("client.id").is_none() {
        config.set("client.id", "outboxd-confirm");
    }
    for KafkaOption { key, value } in &settings.kafka.options {
        // Java's name for it.
        let known = if key == "fetch.max.wait.ms" { "fetch.wait.max.ms" } else { key };
        if OF_CONSUMERS.iter().any(|own| known.starts_with(own))
            && let OptionValue::Plain(value) = value
        {
            config.set(known, value);
        }
    }
    Ok(config)
}

/// Makes the consumer; returns before any broker has answered.
pub fn create(settings: &ConfirmSettings, desk: Desk, status: &Arc<Status>) -> Result<Consumer, Failure> {
    let config = client_config(settings)?;
    let context = Context { desk: Mutex::new(desk), status: status.clone(), topics: settings.topics.clone() };
    BaseConsumer::from_config_and_context(&config, context).map_err(|error| {
        not_ready(
            format!("the Kafka consumer cannot be made: {error}"),
            "correct the --kafka option it names".to_owned(),
        )
    })
}

fn not_ready(what: String, remedy: String) -> Failure {
    Failure::Halt(Halt { code: ExitCode::SinkNotReady, what, remedy })
}

fn brokers(settings: &ConfirmSettings) -> &str {
    match &settings.kafka.brokers {
        Brokers::Servers(servers) => servers,
        Brokers::Embedded | Brokers::None => "",
    }
}

fn acl_command(settings: &ConfirmSettings) -> String {
    let topics: Vec<_> = settings.topics.iter().map(|topic| format!(" --topic {topic}")).collect();
    format!(
        "kafka-acls.sh --bootstrap-server {} --add --allow-principal User:NAME --consumer --group {}{}",
        brokers(settings),
        settings.group,
        topics.concat()
    )
}

/// What an error means, as far as it does not pass by itself; librdkafka goes on trying with most of them.
pub fn judge(error: &KafkaError, settings: &ConfirmSettings, contacted: bool) -> Result<(), Failure> {
    let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
    let retry = |what: String| Err(Failure::Retry { what });
    match code {
        Code::Authentication | Code::SaslAuthenticationFailed if contacted => {
            // A new consumer reads its secrets anew.
            retry(format!("Kafka no longer takes our credentials: {error}"))
        }
        Code::Authentication | Code::SaslAuthenticationFailed => Err(not_ready(
            format!("Kafka refuses our credentials: {error}"),
            "check sasl.username, sasl.password and sasl.mechanism in --kafka".to_owned(),
        )),
        Code::SSL if !contacted => Err(not_ready(
            format!("no TLS connection to Kafka: {error}"),
            "check security.protocol, ssl.ca.location and the certificate's names".to_owned(),
        )),
        Code::TopicAuthorizationFailed | Code::GroupAuthorizationFailed | Code::ClusterAuthorizationFailed => {
            let what = format!("Kafka forbids reading {} as {}: {code}", settings.topics.join(", "), settings.group);
            Err(not_ready(what, acl_command(settings)))
        }
        Code::AllBrokersDown
        | Code::BrokerTransportFailure
        | Code::Resolve
        | Code::SSL
        | Code::OperationTimedOut
        | Code::TimedOutQueue
        | Code::RequestTimedOut
        | Code::NetworkException
        | Code::BrokerNotAvailable
        | Code::LeaderNotAvailable
        | Code::NotLeaderForPartition
        | Code::WaitingForCoordinator
        | Code::CoordinatorNotAvailable
        | Code::CoordinatorLoadInProgress
        | Code::NotCoordinator
        | Code::RebalanceInProgress
        | Code::IllegalGeneration
        | Code::UnknownMemberId
        // The partitions were given to others while we were busy; the next poll asks for some again.
        | Code::PollExceeded
        | Code::AssignmentLost => Ok(()),
        // A topic that was deleted, a fatal error: whoever begins anew finds out.
        _ => retry(format!("Kafka: {error}")),
    }
}

/// How long a single question may take, and how long the cluster is given to answer at all.
const QUESTION: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(200);

/// Waits for the cluster, and makes sure of the topics; how many partitions each has.
pub fn look(consumer: &Consumer, settings: &ConfirmSettings, contacted: &mut bool) -> Result<Vec<i32>, Failure> {
    let began = Instant::now();
    let mut partitions = Vec::new();
    for topic in &settings.topics {
        loop {
            let asked = consumer.fetch_metadata(Some(topic), QUESTION);
            let trouble = match asked {
                Err(error) => format!("Kafka at {} does not answer: {error}", brokers(settings)),
                Ok(metadata) => {
                    let found = metadata.topics().first();
                    let error = found.and_then(|topic| topic.error()).map(Code::from);
                    let count = found.map_or(0, |topic| topic.partitions().len() as i32);
                    *contacted = true;
                    match error {
                        None if count > 0 => {
                            partitions.push(count);
                            break;
                        }
                        Some(Code::TopicAuthorizationFailed) => {
                            let what = format!(
                                "topic `{topic}` cannot be read: outboxd may not describe it (TOPIC_AUTHORIZATION_FAILED)"
                            );
                            return Err(not_ready(what, acl_command(settings)));
                        }
                        None | Some(Code::UnknownTopicOrPartition | Code::UnknownTopic) => {
                            if settings.kafka.create_topics.is_some() {
                                let what = format!("topic `{topic}` does not exist yet: the relay creates it");
                                return Err(Failure::Retry { what });
                            }
                            format!("topic `{topic}` does not exist")
                        }
                        Some(code) => format!("topic `{topic}` is not available: {code}"),
                    }
                }
            };
            let missing = trouble.ends_with("does not exist");
            // Another broker may not have heard of it yet.
            if missing && began.elapsed() >= QUESTION {
                let create =
                    format!("kafka-topics.sh --bootstrap-server {} --create --topic {topic}", brokers(settings));
                return Err(not_ready(trouble, format!("{create}; or correct --topic")));
            }
            if began.elapsed() >= PATIENCE {
                return Err(Failure::Retry { what: trouble });
            }
            // Why it does not answer comes as an event.
            let again = Instant::now() + PAUSE;
            while let Some(left) = again.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                if let Some(Err(error)) = consumer.poll(left) {
                    judge(&error, settings, *contacted)?;
                }
            }
        }
    }
    Ok(partitions)
}

/// The ends of all partitions as they are now, where there is anything to read.
pub fn ends(consumer: &Consumer, settings: &ConfirmSettings, partitions: &[i32]) -> Result<Vec<(Place, i64)>, Failure> {
    let mut ends = Vec::new();
    for (topic, count) in partitions.iter().enumerate() {
        for partition in 0..*count {
            let marks = consumer.fetch_watermarks(&settings.topics[topic], partition, PATIENCE);
            let (low, high) = marks.map_err(|error| Failure::Retry {
                what: format!("the end of partition {partition} of topic `{}`: {error}", settings.topics[topic]),
            })?;
            if low < high {
                ends.push(((topic, partition), high));
            }
        }
    }
    Ok(ends)
}

/// Whether the group, whoever is in it, has committed up to these ends.
pub fn has_reached(consumer: &Consumer, settings: &ConfirmSettings, ends: &[(Place, i64)]) -> bool {
    let mut asked = TopicPartitionList::new();
    for ((topic, partition), _) in ends {
        asked.add_partition(&settings.topics[*topic], *partition);
    }
    if ends.is_empty() {
        return true;
    }
    // No answer is answered by asking again.
    let Ok(committed) = consumer.committed_offsets(asked, QUESTION) else { return false };
    ends.iter().all(|((topic, partition), end)| {
        let found = committed.find_partition(&settings.topics[*topic], *partition).map(|element| element.offset());
        matches!(found, Some(Offset::Offset(offset)) if offset >= *end)
    })
}

pub struct Context {
    desk: Mutex<Desk>,
    status: Arc<Status>,
    topics: Vec<String>,
}

impl Context {
    pub fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, topic: &str, partition: i32) -> Option<Place> {
        self.topics.iter().position(|known| known == topic).map(|topic| (topic, partition))
    }

    fn places(&self, list: &TopicPartitionList) -> Vec<Place> {
        list.elements().iter().filter_map(|element| self.place(element.topic(), element.partition())).collect()
    }
}

impl ConsumerContext for Context {
    /// Partitions go to somebody else, who reads on from what is committed.
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if let Rebalance::Revoke(list) = rebalance {
            let lost = consumer.assignment_lost();
            self.desk().give_up(consumer, &self.places(list), lost);
        }
    }

    fn post_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        let count = consumer.assignment().map_or(0, |list| list.count());
        self.status.assigned(count);
        match rebalance {
            Rebalance::Assign(_) => {
                // With more instances than partitions some have none, and wait.
                self.status.enter(if count > 0 { State::Streaming } else { State::StandingBy });
                tracing::info!(confirmer = self.status.name(), partitions = count, "reading");
            }
            Rebalance::Revoke(_) => {}
            Rebalance::Error(error) => self.status.kafka_failed(&format!("Kafka: {error}")),
        }
    }

    fn commit_callback(&self, result: Result<(), KafkaError>, _: &TopicPartitionList) {
        if let Err(error) = result {
            // The next one covers it; until then a restart would read a little again.
            tracing::warn!(confirmer = self.status.name(), "offsets were not committed: {error}");
        }
    }

    fn main_queue_min_poll_interval(&self) -> Timeout {
        Timeout::After(Duration::from_millis(200))
    }
}

impl ClientContext for Context {
    fn stats(&self, statistics: Statistics) {
        let up = statistics.brokers.values().any(|broker| broker.state == "UP");
        self.status.kafka_is(up);
        let mut lag = 0;
        let mut desk = self.desk();
        for topic in statistics.topics.values() {
            let ours = topic.partitions.values().filter(|partition| partition.fetch_state == "active");
            for partition in ours {
                let Some(place) = self.place(&topic.topic, partition.partition) else { continue };
                // The end was fetched, and all before it was handed over.
                if partition.fetchq_cnt == 0 && partition.eof_offset >= 0 {
                    desk.reached(place, partition.eof_offset);
                }
                let end = partition.ls_offset.max(0);
                let read = desk.read_upto(place).unwrap_or(partition.committed_offset.max(partition.lo_offset).max(0));
                lag += u64::try_from(end - read).unwrap_or(0);
            }
        }
        self.status.lags(lag);
    }

    /// Whoever polls gets them too, and deals with them.
    fn error(&self, _: KafkaError, _: &str) {}

    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical | RDKafkaLogLevel::Error => {
                tracing::warn!(facility, "librdkafka: {message}");
            }
            _ => tracing::debug!(facility, "librdkafka: {message}"),
        }
    }
}

/// Commits offsets.
pub fn commit<'a>(
    consumer: &Consumer,
    upto: impl Iterator<Item = (&'a Place, &'a i64)>,
    mode: CommitMode,
) -> Result<(), KafkaError> {
    let mut list = TopicPartitionList::new();
    for ((topic, partition), offset) in upto {
        list.add_partition_offset(&consumer.context().topics[*topic], *partition, Offset::Offset(*offset))?;
    }
    consumer.commit(&list, mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_would_lose_receipts_are_refused() {
        let refused = |key: &str, value: &str| {
            let option = KafkaOption { key: key.to_owned(), value: OptionValue::Plain(value.to_owned()) };
            let kafka = KafkaSettings { brokers: Brokers::None, options: vec![option], create_topics: None };
            !refusals(&kafka).is_empty()
        };
        assert!(refused("enable.auto.commit", "true") && !refused("enable.auto.commit", "false"));
        assert!(refused("auto.offset.reset", "latest") && !refused("auto.offset.reset", "earliest"));
        assert!(refused("isolation.level", "read_uncommitted") && !refused("isolation.level", "read_committed"));
        assert!(refused("group.id", "mine"));
        assert!(!refused("fetch.min.bytes", "100") && !refused("queue.buffering.max.ms", "5"));
    }
}
