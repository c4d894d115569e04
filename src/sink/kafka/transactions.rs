//! Exactly-once: records, and the milestone behind them, in one Kafka transaction.
//!
//! ```text
//!   begin ─▶ record record record … ─▶ milestone ─▶ commit ─▶ receipts resolved ─▶ source confirmed
//! ```
//!
//! A transaction is committed at the end of a chunk, after a while or when it has grown large; only then are its receipts
//! resolved, so that the source is confirmed behind it. Whatever happens before the commit leaves nothing that a consumer
//! with `read_committed` sees; whatever happens after it is found out by reading the milestone back. The milestone has a
//! topic of its own, of one partition, so that no other pipeline's open transaction can hide it. Whoever enters fences
//! off all earlier producers of the pipeline first: one that slept can commit nothing any more.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::context::ReceiptContext;
use crate::ack_window::{AckWindow, Receipt};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::compacted::CompactedTopic;
use crate::config::WindowSettings;
use crate::failpoints;
use crate::milestone::{Milestone, Within};
use crate::sink::SinkFailure;

/// The document's form.
const FORMAT: u32 = 1;

/// After so long the broker ends a transaction itself; a producer that is gone without a word holds consumers up no longer.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// How old a transaction may become when there is nothing more at hand.
const STEADY: Duration = Duration::from_millis(50);
/// How old in a backlog, where it is mostly its size that ends it.
const CATCHING_UP: Duration = Duration::from_millis(500);

/// How long one call of librdkafka may take before we look around.
const STEP: Duration = Duration::from_secs(3);
const INIT_PATIENCE: Duration = Duration::from_secs(30);
const ABORT_PATIENCE: Duration = Duration::from_secs(2);

type Client = Arc<ThreadedProducer<ReceiptContext>>;

/// Whose transactions they are.
#[derive(Clone, Debug)]
pub struct Identity {
    pub pipeline: String,
    /// `None`: the pipeline itself.
    pub publisher: Option<String>,
}

impl Identity {
    fn key(&self) -> String {
        match &self.publisher {
            Some(publisher) => format!("{}/{publisher}", self.pipeline),
            None => self.pipeline.clone(),
        }
    }

    /// What the broker tells the instances of a pipeline by.
    pub fn transactional_id(&self) -> String {
        format!("outboxd:{}", self.key())
    }

    /// Where the milestone is kept.
    pub fn topic(&self) -> String {
        let legal = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_' | '-');
        let name: String = self.key().chars().map(|letter| if legal(letter) { letter } else { '.' }).collect();
        format!("outboxd_position_{name}")
    }
}

/// What was read back: as far as all records are in Kafka, and nothing behind it.
#[derive(Clone, Debug)]
pub struct Reached {
    /// The history that the position is of.
    pub lineage: String,
    pub position: String,
    pub within: Option<Within>,
}

/// The milestone as it is kept. The form comes first: an older outboxd must know that it does not know a newer one.
#[derive(Serialize, Deserialize)]
struct Document {
    format: u32,
    pipeline: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    publisher: Option<String>,
    lineage: String,
    position: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    within: Option<Within>,
}

struct Open {
    since: Instant,
    records: usize,
    bytes: usize,
    receipts: Vec<(Receipt, u32)>,
}

struct Committing {
    receipts: Vec<(Receipt, u32)>,
    call: JoinHandle<Result<(), SinkFailure>>,
}

pub struct Transactions {
    identity: Identity,
    topic: CompactedTopic,
    /// Of the positions that are put into milestones.
    lineage: String,
    limits: WindowSettings,
    /// Whether the last chunk was of a backlog.
    catching_up: bool,
    open: Option<Open>,
    committing: Option<Committing>,
}

impl Transactions {
    /// `config` is what every client of the cluster needs.
    pub fn new(identity: Identity, config: ClientConfig, limits: WindowSettings) -> Self {
        let topic = CompactedTopic { config, name: identity.topic() };
        let (lineage, catching_up) = (String::new(), false);
        Transactions { identity, topic, lineage, limits, catching_up, open: None, committing: None }
    }

    /// Fences off whoever wrote before, and tells how far that came. To be called when the source is held, and by nobody else.
    pub async fn enter(&mut self, producer: &Client, lineage: &str) -> Result<Option<Reached>, SinkFailure> {
        self.lineage = lineage.to_owned();
        self.topic.create().await?;
        let fencing = producer.clone();
        super::blocking(move || init(&fencing)).await??;
        let Some(json) = self.topic.last_of(&self.identity.key()).await? else { return Ok(None) };
        self.read(&json).map(Some)
    }

    fn read(&self, json: &[u8]) -> Result<Reached, SinkFailure> {
        #[derive(Deserialize)]
        struct Form {
            format: u32,
        }
        let topic = &self.topic.name;
        let malformed = |error: serde_json::Error| SinkFailure::NotReady {
            what: format!("the position in topic {topic} cannot be read: {error}"),
            remedy: "find out who writes there; without that topic the pipeline goes on where the source stands"
                .to_owned(),
        };
        let Form { format } = serde_json::from_slice(json).map_err(malformed)?;
        if format != FORMAT {
            return Err(SinkFailure::NotReady {
                what: format!("the position in topic {topic} has format {format}; this outboxd knows {FORMAT}"),
                remedy: "run the outboxd that wrote it, or a newer one".to_owned(),
            });
        }
        let Document { lineage, position, within, .. } = serde_json::from_slice(json).map_err(malformed)?;
        Ok(Reached { lineage, position, within })
    }

    /// Makes sure that a transaction is open.
    pub fn begin(&mut self, producer: &Client) -> Result<(), SinkFailure> {
        if self.open.is_none() {
            producer.begin_transaction().map_err(|error| failed("begun", &error))?;
            self.open = Some(Open { since: Instant::now(), records: 0, bytes: 0, receipts: Vec::new() });
        }
        Ok(())
    }

    /// A record has become part of the open transaction.
    pub fn took(&mut self, receipt: Receipt, bytes: usize) {
        let Some(open) = &mut self.open else { return };
        open.records += 1;
        open.bytes += bytes;
        match open.receipts.last_mut() {
            Some((last, records)) if *last == receipt => *records += 1,
            _ => open.receipts.push((receipt, 1)),
        }
    }

    /// When the open transaction is to be committed.
    pub fn due(&self) -> Option<Instant> {
        let open = self.open.as_ref()?;
        Some(open.since + if self.catching_up { CATCHING_UP } else { STEADY })
    }

    /// Whether to commit after a chunk. Half of the window, so that the other half is read meanwhile.
    pub fn is_due(&mut self, catching_up: bool) -> bool {
        self.catching_up = catching_up;
        let full = |open: &Open| open.records * 2 >= self.limits.max_events || open.bytes * 2 >= self.limits.max_bytes;
        self.open.as_ref().is_some_and(full) || self.due().is_some_and(|due| due <= Instant::now())
    }

    /// Commits what is open, with the milestone behind it, and resolves its receipts. May be cancelled and called again.
    pub async fn commit(
        &mut self,
        producer: &Client,
        window: &AckWindow,
        milestone: &Milestone,
    ) -> Result<(), SinkFailure> {
        self.settle(window).await?;
        let Some(Open { receipts, .. }) = self.open.take() else { return Ok(()) };
        let json = serde_json::to_vec(&Document {
            format: FORMAT,
            pipeline: self.identity.pipeline.clone(),
            publisher: self.identity.publisher.clone(),
            lineage: self.lineage.clone(),
            position: milestone.position.to_string(),
            within: milestone.within.clone(),
        });
        let json = json.map_err(|error| SinkFailure::Restart { what: format!("the position has no form: {error}") })?;
        let key = self.identity.key();
        // No chunk has this receipt, and nothing is done with it.
        let record = BaseRecord::with_opaque_to(&self.topic.name, usize::MAX).key(&key).payload(&json).partition(0);
        producer.send(record).map_err(|(error, _)| failed("ended", &error))?;
        let client = producer.clone();
        let call = tokio::task::spawn_blocking(move || commit(&client));
        self.committing = Some(Committing { receipts, call });
        self.settle(window).await
    }

    /// Waits for a commit that is under way.
    async fn settle(&mut self, window: &AckWindow) -> Result<(), SinkFailure> {
        let Some(committing) = &mut self.committing else { return Ok(()) };
        let outcome = (&mut committing.call).await;
        let receipts = self.committing.take().map(|committing| committing.receipts).unwrap_or_default();
        outcome.unwrap_or_else(|died| {
            Err(SinkFailure::Restart { what: format!("the commit of a transaction died: {died}") })
        })?;
        for (receipt, records) in receipts {
            window.resolve_several(receipt, records);
        }
        Ok(())
    }

    /// Takes back what is open. Blocks.
    pub fn abort(self, producer: &Client) {
        // A commit that is under way need not be waited for: whoever enters next finds out what became of it.
        producer.context().give_up();
        if self.open.is_some() && self.committing.is_none() {
            // Else the broker does it, or whoever enters next.
            if let Err(error) = producer.abort_transaction(ABORT_PATIENCE) {
                tracing::debug!("a transaction was not aborted: {error}");
            }
        }
    }
}

fn init(producer: &Client) -> Result<(), SinkFailure> {
    match producer.init_transactions(INIT_PATIENCE) {
        Ok(()) => Ok(()),
        Err(KafkaError::Transaction(error))
            if matches!(
                error.code(),
                RDKafkaErrorCode::TransactionalIdAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed
            ) =>
        {
            Err(SinkFailure::NotReady {
                what: format!("Kafka forbids transactions: {error}"),
                remedy: "grant Write and Describe on the transactional id `outboxd:…` to outboxd's user".to_owned(),
            })
        }
        Err(error) => Err(SinkFailure::Transient { what: format!("Kafka does not open transactions: {error}") }),
    }
}

fn commit(producer: &Client) -> Result<(), SinkFailure> {
    failpoints::reach("committing")?;
    let deadline = std::time::Instant::now() + TIMEOUT;
    loop {
        let error = match producer.commit_transaction(STEP) {
            Ok(()) => return Ok(failpoints::reach("committed")?),
            Err(error) => error,
        };
        let again = match &error {
            KafkaError::Transaction(error) => error.is_retriable(),
            // What is queued was not all acknowledged in that time.
            KafkaError::Flush(code) => *code == RDKafkaErrorCode::OperationTimedOut,
            _ => false,
        };
        if again && std::time::Instant::now() < deadline && !producer.context().has_failed() {
            continue;
        }
        if matches!(&error, KafkaError::Transaction(error) if error.txn_requires_abort()) {
            let _ = producer.abort_transaction(ABORT_PATIENCE);
        }
        return Err(failed("committed", &error));
    }
}

/// Whether it came through is found out by reading the milestone back.
fn failed(what: &str, error: &KafkaError) -> SinkFailure {
    SinkFailure::Restart { what: format!("a Kafka transaction could not be {what}: {error}") }
}

impl From<CheckpointError> for SinkFailure {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Transient(what) => SinkFailure::Transient { what },
            CheckpointError::Refused { what, remedy } => SinkFailure::NotReady { what, remedy },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transactions(publisher: Option<&str>) -> Transactions {
        let identity = Identity { pipeline: "orders of today".to_owned(), publisher: publisher.map(str::to_owned) };
        let limits = WindowSettings { max_events: 10, max_bytes: 1000 };
        Transactions::new(identity, ClientConfig::new(), limits)
    }

    #[test]
    fn each_publisher_has_its_own_id_and_topic() {
        let (lone, one) = (transactions(None).identity, transactions(Some("audit")).identity);
        assert_eq!(lone.transactional_id(), "outboxd:orders of today");
        assert_eq!(lone.topic(), "outboxd_position_orders.of.today");
        assert_eq!(one.transactional_id(), "outboxd:orders of today/audit");
        assert_eq!(one.topic(), "outboxd_position_orders.of.today.audit");
    }

    #[test]
    fn the_first_form_is_read_for_good_and_a_newer_one_is_refused() {
        let first = br#"{"format": 1, "pipeline": "orders", "lineage": "7/1", "position": "0/16B3748",
                         "within": {"commit": "0/16B3800", "events": 70000}}"#;
        let reached = transactions(None).read(first).unwrap();
        assert_eq!((reached.lineage.as_str(), reached.position.as_str()), ("7/1", "0/16B3748"));
        assert_eq!(reached.within.map(|within| within.events), Some(70_000));
        let newer = transactions(None).read(br#"{"format": 2, "what": "else"}"#).unwrap_err().to_string();
        assert!(newer.contains("format 2") && newer.contains("knows 1"), "{newer}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_transaction_ends_when_it_is_old_or_fills_half_of_the_window() {
        let mut transactions = transactions(None);
        assert!(!transactions.is_due(false));
        let open = || Some(Open { since: Instant::now(), records: 0, bytes: 0, receipts: Vec::new() });
        transactions.open = open();
        (0..4).for_each(|_| transactions.took(Receipt(1), 10));
        assert!(!transactions.is_due(true));
        transactions.took(Receipt(2), 10);
        assert!(transactions.is_due(true));
        assert_eq!(
            transactions.open.as_ref().map(|open| open.receipts.clone()),
            Some(vec![(Receipt(1), 4), (Receipt(2), 1)])
        );
        transactions.open = open();
        tokio::time::advance(STEADY).await;
        assert!(!transactions.is_due(true));
        assert!(transactions.is_due(false));
    }
}
