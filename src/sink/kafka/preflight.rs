//! `check` on Kafka's side: the cluster answers, takes our credentials, and has the topics that are known beforehand.
//! The producer is the one a run would make; nothing is sent or created.

use std::sync::Arc;
use std::time::Duration;

use super::topics::{self, Known};
use super::{KafkaMemory, KafkaSink, brokers};
use crate::ack_window::{AckWindow, Bells, Limits};
use crate::config::{DeadLetter, KafkaOption, KafkaSettings, OptionValue};
use crate::preflight::{Finding, Report};
use crate::sink::SinkFailure;

/// Looks at everything that a run needs of the cluster.
pub async fn preflight(settings: &KafkaSettings, topic: Option<&str>, dead_letter: &DeadLetter) -> Vec<Finding> {
    let mut report = Report::default();
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
            report.ok("brokers", format!("Kafka at {} answers", brokers(settings)));
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
    match topics::look(&sink.producer, settings, topic, Duration::ZERO).await {
        Ok(Known::Ready(limits)) => {
            let (partitions, takes) = (limits.partitions, limits.max_bytes);
            report.ok(check, format!("topic `{topic}` has {partitions} partitions and takes records of {takes} bytes"));
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
