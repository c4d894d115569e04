//! What librdkafka calls back with: delivery reports go to the ack window, errors that matter end the generation.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers as _, Message};
use rdkafka::producer::{DeliveryResult, ProducerContext};

use super::KafkaMemory;
use crate::ack_window::{AckWindow, Receipt};
use crate::failpoints;
use crate::route::Record;
use crate::sink::SinkFailure;
use crate::status::PublisherStatus;

/// Recognises a record when the source is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    pub fn of_record(record: &Record<'_>) -> Self {
        Self::of(record.topic, record.key, record.value, record.headers.iter())
    }

    fn of_message(message: &BorrowedMessage<'_>) -> Self {
        let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
        let headers = headers.map(|header| (header.key, header.value));
        Self::of(message.topic(), message.key(), message.payload(), headers)
    }

    fn of<'a>(
        topic: &str,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
        headers: impl Iterator<Item = (&'a str, Option<&'a [u8]>)>,
    ) -> Self {
        // librdkafka gives an empty key or value back as a null one.
        let present = |bytes: Option<&'a [u8]>| bytes.filter(|bytes| !bytes.is_empty());
        let mut hasher = DefaultHasher::new();
        topic.hash(&mut hasher);
        key.filter(|bytes| !bytes.is_empty()).hash(&mut hasher);
        value.filter(|bytes| !bytes.is_empty()).hash(&mut hasher);
        for (name, value) in headers {
            (name, present(value)).hash(&mut hasher);
        }
        Fingerprint(hasher.finish())
    }
}

pub struct ReceiptContext {
    window: Arc<AckWindow>,
    memory: Arc<KafkaMemory>,
    /// Whether the one record in flight is a suspect on trial.
    alone: AtomicBool,
    /// Receipts wait for the commit of their transaction.
    transactional: bool,
    failed: AtomicBool,
    /// Who is told that no broker is connected, and that one is again.
    status: Option<Arc<PublisherStatus>>,
    /// Whether it was told so.
    away: AtomicBool,
}

impl ReceiptContext {
    pub fn new(
        window: Arc<AckWindow>,
        memory: Arc<KafkaMemory>,
        status: Option<Arc<PublisherStatus>>,
        transactional: bool,
    ) -> Self {
        let [alone, failed, away] = [false; 3].map(AtomicBool::new);
        ReceiptContext { window, memory, alone, transactional, failed, status, away }
    }

    pub fn set_alone(&self, alone: bool) {
        self.alone.store(alone, Ordering::Release);
    }

    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Nobody waits for this producer any more.
    pub fn give_up(&self) {
        self.failed.store(true, Ordering::Release);
    }

    fn fail(&self, failure: SinkFailure) {
        self.failed.store(true, Ordering::Release);
        self.window.fail(failure);
    }

    fn undelivered(&self, error: &KafkaError, message: &BorrowedMessage<'_>) {
        use RDKafkaErrorCode as Code;
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        let topic = message.topic();
        match code {
            // We gave it up ourselves; it is read again.
            Code::PurgeQueue | Code::PurgeInflight => return,
            Code::MessageSizeTooLarge
            | Code::InvalidRecord
            | Code::InvalidMessage
            | Code::InvalidTimestamp
            | Code::InvalidMessageSize
            | Code::UnsupportedForMessageFormat
            | Code::PolicyViolation => {
                let fingerprint = Fingerprint::of_message(message);
                let why = format!("the broker refuses it: {code}");
                let mut learnt = self.memory.learnt();
                if self.alone.load(Ordering::Acquire) {
                    learnt.refused.insert(fingerprint, why);
                } else {
                    learnt.suspects.insert(fingerprint, why);
                }
                self.memory.watchful.store(true, Ordering::Release);
            }
            Code::TopicAuthorizationFailed => {
                let why = "outboxd may not write to it (TOPIC_AUTHORIZATION_FAILED)".to_owned();
                self.memory.learnt().topics.insert(topic.to_owned(), super::TopicState::refused(why));
                let what = format!("Kafka refused a record for topic `{topic}`: {code}");
                return self.fail(SinkFailure::Restart { what });
            }
            _ => {}
        }
        // Whatever else it was, the topics may have changed: deleted, or their limits lowered.
        self.memory.forget_topics();
        self.fail(SinkFailure::Restart { what: format!("Kafka refused a record for topic `{topic}`: {code}") });
    }
}

impl ProducerContext for ReceiptContext {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, receipt: usize) {
        if let Err(injected) = failpoints::reach("acknowledged") {
            return self.fail(injected.into());
        }
        match result {
            Ok(_) if self.transactional => {}
            Ok(_) => self.window.resolve(Receipt(receipt)),
            Err((error, message)) => self.undelivered(error, message),
        }
    }
}

impl ClientContext for ReceiptContext {
    fn error(&self, error: KafkaError, reason: &str) {
        use RDKafkaErrorCode as Code;
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        let contacted = self.memory.learnt().contacted;
        match code {
            // The delivery reports of the batch tell which records it was.
            Code::GaplessGuarantee => {
                tracing::info!("Kafka refused a batch for good; the producer is made anew: {reason}");
            }
            Code::Fatal => {
                self.fail(SinkFailure::Restart { what: format!("the Kafka producer met a fatal error: {reason}") });
            }
            // A new producer reads its secrets anew, so a rotated password heals; a wrong one does not.
            Code::Authentication | Code::SaslAuthenticationFailed if contacted => {
                self.memory.learnt().contacted = false;
                self.fail(SinkFailure::Transient { what: format!("Kafka no longer takes our credentials: {reason}") });
            }
            Code::Authentication | Code::SaslAuthenticationFailed => self.fail(SinkFailure::NotReady {
                what: format!("Kafka refuses our credentials: {reason}"),
                remedy: "check sasl.username, sasl.password and sasl.mechanism in --kafka".to_owned(),
            }),
            Code::SSL if !contacted => self.fail(SinkFailure::NotReady {
                what: format!("no TLS connection to Kafka: {reason}"),
                remedy: "check security.protocol, ssl.ca.location and the certificate's names".to_owned(),
            }),
            Code::ClusterAuthorizationFailed => self.fail(SinkFailure::NotReady {
                what: format!("Kafka forbids an idempotent producer: {reason}"),
                remedy: "grant IdempotentWrite on the cluster to outboxd's user".to_owned(),
            }),
            _ => tracing::warn!(%code, "Kafka: {reason}"),
        }
    }

    /// librdkafka keeps one connection at the least, also when there is nothing to send, and tells in its statistics how
    /// each stands; that a broker is back it tells nowhere else. They are not parsed: of a producer, brokers alone have a
    /// state, and a topic of many partitions makes them large.
    fn stats_raw(&self, statistics: &[u8]) {
        const CONNECTED: &[u8] = br#""state":"UP""#;
        let Some(status) = &self.status else { return };
        let connected = statistics.windows(CONNECTED.len()).any(|part| part == CONNECTED);
        // Dead letters have troubles of their own to tell, which are not over because Kafka answers.
        let was_away = self.away.swap(!connected, Ordering::Relaxed);
        if connected && was_away {
            status.sink_is_back();
        } else if !connected {
            status.sink_is_away("no Kafka broker is connected: the log says what was tried");
        }
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            // Also reported as an error, which is where it is dealt with.
            _ if facility == "FATAL" => tracing::debug!(facility, "librdkafka: {message}"),
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical | RDKafkaLogLevel::Error => {
                tracing::warn!(facility, "librdkafka: {message}");
            }
            _ => tracing::debug!(facility, "librdkafka: {message}"),
        }
    }
}
