//! `check` on Kafka's side: the cluster answers, takes our credentials, and has the topics that are known beforehand.
//! The producer is the one a run would make; nothing is sent or created.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::ResourceSpecifier;
use rdkafka::error::KafkaError;
use rdkafka::producer::Producer as _;

use super::topics::{self, Known};
use super::{KafkaMemory, KafkaSink, blocking, brokers};
use crate::ack_window::{AckWindow, Bells, Limits};
use crate::config::{DeadLetter, KafkaOption, KafkaSettings, OptionValue};
use crate::preflight::{Finding, Protection, Report, is_local};
use crate::sink::SinkFailure;

const PATIENCE: Duration = Duration::from_secs(10);

/// Looks at everything that a run needs of the cluster.
pub async fn preflight(settings: &KafkaSettings, topic: Option<&str>, dead_letter: &DeadLetter) -> Vec<Finding> {
    let mut report = Report::about(brokers(settings));
    // A broker that makes topics when they are asked about must not do so for a look.
    let mut settings = settings.clone();
    let value = OptionValue::Plain("false".to_owned());
    settings.options.push(KafkaOption { key: "allow.auto.create.topics".to_owned(), value });
    let settings = &settings;
    let window = Arc::new(AckWindow::new(Limits { events: 1, bytes: 1 }, Bells::default()));
    let memory = Arc::new(KafkaMemory::default());
    let sink = match KafkaSink::create(settings, &memory, &window, None, None) {
        Ok(sink) => sink,
        Err(failure) => {
            refused(&mut report, "brokers", failure);
            return report.into_findings();
        }
    };
    // What the cluster refuses comes by way of the window, as in a run.
    let contact = tokio::select! {
        contact = sink.first_contact() => contact,
        failure = window.failed() => Err(failure),
    };
    match contact {
        Err(failure) => refused(&mut report, "brokers", failure),
        Ok(()) => {
            let cluster = cluster(&sink, topic).await;
            let members = match cluster.brokers {
                0 => String::new(),
                1 => ": one broker".to_owned(),
                several => format!(": {several} brokers"),
            };
            report.ok("brokers", format!("Kafka answers{members}{}", cluster.named()));
            protection(&mut report, settings);
            let limit = match topic {
                Some(topic) => topic_findings(&mut report, "topic", &sink, settings, topic).await,
                None => {
                    report.ok("topic", "each row names its own: which ones cannot be known beforehand");
                    None
                }
            };
            if let DeadLetter::Topic(place) = dead_letter {
                let dead_limit = topic_findings(&mut report, "dead-letter", &sink, settings, place).await;
                if let (Some(limit), Some(dead_limit)) = (limit, dead_limit)
                    && dead_limit < limit
                    && let Some(topic) = topic
                {
                    narrow(&mut report, settings, (topic, limit), (place, dead_limit));
                }
            }
        }
    }
    sink.abandon().await;
    report.into_findings()
}

/// What Kafka says of itself and of one topic.
#[derive(Default)]
struct Cluster {
    brokers: usize,
    id: Option<String>,
    /// The least that a partition of the topic has: replicas, and those in sync.
    replicas: usize,
    in_sync: usize,
}

impl Cluster {
    fn named(&self) -> String {
        self.id.as_ref().map(|id| format!(", cluster {id}")).unwrap_or_default()
    }
}

async fn cluster(sink: &KafkaSink, topic: Option<&str>) -> Cluster {
    let (producer, topic) = (sink.producer.clone(), topic.map(str::to_owned));
    let asked = blocking(move || {
        let metadata = producer.client().fetch_metadata(topic.as_deref(), PATIENCE)?;
        let partitions =
            metadata.topics().first().filter(|_| topic.is_some()).map_or(&[][..], |topic| topic.partitions());
        Ok::<_, KafkaError>(Cluster {
            brokers: metadata.brokers().len(),
            id: producer.client().fetch_cluster_id(PATIENCE),
            replicas: partitions.iter().map(|partition| partition.replicas().len()).min().unwrap_or(0),
            in_sync: partitions.iter().map(|partition| partition.isr().len()).min().unwrap_or(0),
        })
    });
    // It has answered a moment ago; what it does not tell is left out.
    asked.await.ok().and_then(Result::ok).unwrap_or_default()
}

fn protection(report: &mut Report, settings: &KafkaSettings) {
    let option = |key: &str| {
        let found = settings.options.iter().rev().find(|option| option.key == key);
        found.and_then(|option| match &option.value {
            OptionValue::Plain(value) => Some(value.to_ascii_lowercase()),
            OptionValue::Secret(_) | OptionValue::JaasPassword(_) => None,
        })
    };
    let host = |server: &str| {
        let address = server.rsplit_once("://").map_or(server, |(_, address)| address);
        is_local(address.rsplit_once(':').map_or(address, |(host, _)| host))
    };
    let local = brokers(settings).split(',').map(str::trim).all(host);
    let protocol = option("security.protocol").unwrap_or_else(|| "plaintext".to_owned());
    let setting = format!("security.protocol={protocol}");
    let seen = match protocol.as_str() {
        "ssl" | "sasl_ssl" if option("enable.ssl.certificate.verification").as_deref() == Some("false") => {
            Protection::Unverified("enable.ssl.certificate.verification=false")
        }
        "ssl" | "sasl_ssl" if option("ssl.endpoint.identification.algorithm").as_deref() == Some("none") => {
            Protection::Unverified("ssl.endpoint.identification.algorithm=none")
        }
        "ssl" | "sasl_ssl" => Protection::Verified(&setting),
        _ => Protection::Plain(&setting),
    };
    report.tls(
        seen,
        local,
        "--kafka security.protocol=SSL (or SASL_SSL) --kafka ssl.ca.location=/path/to/ca.pem, and no weakening of it",
    );
}

fn refused(report: &mut Report, check: &'static str, failure: SinkFailure) {
    match failure {
        SinkFailure::NotReady { what, remedy } | SinkFailure::Undeliverable { what, remedy } => {
            report.fail(check, what, remedy);
        }
        SinkFailure::Transient { what } | SinkFailure::Restart { what } => report.fail(
            check,
            what,
            "make sure that the brokers run, that --brokers and security.protocol are right, and that the brokers' \
             advertised.listeners can be reached from here",
        ),
    }
}

/// Looks at a topic; how large its records may be, if it is there.
async fn topic_findings(
    report: &mut Report,
    check: &'static str,
    sink: &KafkaSink,
    settings: &KafkaSettings,
    topic: &str,
) -> Option<usize> {
    report.on(format!("topic {topic}"));
    match topics::look(&sink.producer, settings, topic, Duration::ZERO).await {
        Ok(Known::Ready(limits)) => {
            let cluster = cluster(sink, Some(topic)).await;
            let rules = Rules::ask(settings, topic).await;
            let (partitions, takes) = (limits.partitions, limits.max_bytes);
            let mut seen = format!("{partitions} partition{}", if partitions == 1 { "" } else { "s" });
            if cluster.replicas > 0 {
                seen.push_str(&format!(
                    ", {} replica{}",
                    cluster.replicas,
                    if cluster.replicas == 1 { "" } else { "s" }
                ));
            }
            if let Some(least) = rules.min_in_sync {
                seen.push_str(&format!(", min.insync.replicas {least}"));
            }
            report.ok(check, format!("{seen}, max.message.bytes {takes}"));
            durability(report, settings, topic, &cluster, &rules);
            return Some(takes);
        }
        Ok(Known::Missing) if settings.create_topics.is_some() => {
            match topics::could_be_created(settings, topic).await {
                Ok(None) => report.ok(check, format!("topic `{topic}` does not exist yet; a run creates it")),
                Ok(Some(why)) => report.fail(check, format!("topic `{topic}`: {why}"), create_command(settings, topic)),
                Err(failure) => refused(report, check, failure),
            }
        }
        Ok(Known::Missing) => report.fail(
            check,
            format!("topic `{topic}` does not exist"),
            format!("{}; or run with --create-topics", create_command(settings, topic)),
        ),
        Ok(Known::Refused(why)) => report.fail(
            check,
            format!("topic `{topic}` cannot be written to: {why}"),
            format!(
                "kafka-acls.sh --bootstrap-server {} --add --allow-principal User:NAME --producer --topic {topic}",
                brokers(settings)
            ),
        ),
        Err(failure) => refused(report, check, failure),
    }
    None
}

/// Settings of a topic that decide how long an event stays; none where they are not told.
#[derive(Default)]
struct Rules {
    min_in_sync: Option<usize>,
    cleanup: Option<String>,
}

impl Rules {
    async fn ask(settings: &KafkaSettings, topic: &str) -> Self {
        let Ok(admin) = topics::admin(settings) else { return Rules::default() };
        let described = admin.describe_configs([&ResourceSpecifier::Topic(topic)], &topics::options()).await;
        let Ok(Some(Ok(config))) = described.map(|mut results| results.pop()) else { return Rules::default() };
        let value = |name: &str| config.get(name).and_then(|entry| entry.value.clone());
        Rules {
            min_in_sync: value("min.insync.replicas").and_then(|text| text.parse().ok()),
            cleanup: value("cleanup.policy"),
        }
    }
}

/// Whether what is acknowledged stays.
fn durability(report: &mut Report, settings: &KafkaSettings, topic: &str, cluster: &Cluster, rules: &Rules) {
    const CHECK: &str = "durability";
    let alter = |setting: &str| {
        let (servers, topics) = (brokers(settings), "--alter --entity-type topics");
        format!("kafka-configs.sh --bootstrap-server {servers} {topics} --entity-name {topic} --add-config {setting}")
    };
    let Cluster { brokers: members, replicas, in_sync, .. } = cluster;
    let least = rules.min_in_sync.unwrap_or(1);
    match (*replicas, *in_sync) {
        (0, _) => {}
        (replicas, _) if least > replicas => report.fail(
            CHECK,
            format!("min.insync.replicas is {least} and there are {replicas}: Kafka takes nothing for this topic"),
            alter(&format!("min.insync.replicas={replicas}")),
        ),
        (replicas, in_sync) if in_sync < least => report.warn(
            CHECK,
            format!(
                "of {replicas} replicas {in_sync} are in sync, and {least} must be: Kafka takes nothing until they are"
            ),
            "look at the brokers that are away: kafka-topics.sh --describe --under-min-isr-partitions",
        ),
        (1, _) if *members > 1 => report.warn(
            CHECK,
            format!("one replica on one of {members} brokers: events that were acknowledged are lost with that broker"),
            "kafka-reassign-partitions.sh, to three replicas; and for new topics --create-topics PARTITIONS:3",
        ),
        (1, _) => report.ok(CHECK, "one replica, on the cluster's only broker"),
        (replicas, _) if least == 1 => report.warn(
            CHECK,
            format!("min.insync.replicas is 1 of {replicas}: an acknowledgement may be of one copy alone"),
            alter("min.insync.replicas=2"),
        ),
        (replicas, in_sync) => report.ok(CHECK, format!("{in_sync} of {replicas} replicas are in sync")),
    }
    if rules.cleanup.as_deref().is_some_and(|policy| policy.contains("compact")) {
        report.warn(
            "retention",
            "cleanup.policy is compact: of the events of a key only the last one stays",
            alter("cleanup.policy=delete"),
        );
    }
}

fn create_command(settings: &KafkaSettings, topic: &str) -> String {
    let wanted = settings.create_topics.unwrap_or_default();
    let mut command = format!("kafka-topics.sh --bootstrap-server {} --create --topic {topic}", brokers(settings));
    if let Some(partitions) = wanted.partitions {
        command.push_str(&format!(" --partitions {partitions}"));
    }
    command
}

/// A record that is too large for its topic must fit where it is to be parked.
fn narrow(report: &mut Report, settings: &KafkaSettings, topic: (&str, usize), dead: (&str, usize)) {
    let ((topic, limit), (place, dead_limit)) = (topic, dead);
    report.warn(
        "dead-letter",
        format!(
            "dead-letter topic `{place}` takes records of {dead_limit} bytes and topic `{topic}` of {limit}: a record \
             in between can be neither delivered nor parked"
        ),
        format!(
            "kafka-configs.sh --bootstrap-server {} --alter --entity-type topics --entity-name {place} --add-config \
             max.message.bytes={limit}",
            brokers(settings)
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Brokers;
    use crate::preflight::Verdict;

    fn judged(members: usize, replicas: usize, in_sync: usize, least: usize, cleanup: &str) -> Vec<(Verdict, String)> {
        let brokers = Brokers::Servers("k:9092".to_owned());
        let settings = KafkaSettings { brokers, options: Vec::new(), create_topics: None };
        let cluster = Cluster { brokers: members, id: None, replicas, in_sync };
        let rules = Rules { min_in_sync: Some(least), cleanup: Some(cleanup.to_owned()) };
        let mut report = Report::about("topic t");
        durability(&mut report, &settings, "t", &cluster, &rules);
        report.into_findings().into_iter().map(|found| (found.verdict, found.remedy)).collect()
    }

    #[test]
    fn a_topic_whose_acknowledgements_mean_little_is_told() {
        let verdicts = |members, replicas, in_sync, least| judged(members, replicas, in_sync, least, "delete")[0].0;
        assert_eq!(verdicts(3, 3, 3, 2), Verdict::Ok);
        assert_eq!(verdicts(1, 1, 1, 1), Verdict::Ok, "there is no other broker");
        assert_eq!(verdicts(3, 1, 1, 1), Verdict::Warn);
        assert_eq!(verdicts(3, 3, 3, 1), Verdict::Warn);
        assert_eq!(verdicts(3, 3, 1, 2), Verdict::Warn, "it passes");
        assert_eq!(verdicts(3, 2, 2, 3), Verdict::Fail);
        let compacted = judged(3, 3, 3, 2, "compact,delete");
        assert!(compacted[1].0 == Verdict::Warn && compacted[1].1.ends_with("cleanup.policy=delete"), "{compacted:?}");
    }
}
