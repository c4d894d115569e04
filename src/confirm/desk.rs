//! Where records become receipts: gathered, written in one statement, and only then committed to Kafka.
//!
//! ```text
//!   gather ─▶ batch ──full, due, revoked or stopped──▶ write ──rows are updated──▶ commit offsets
//!                                                        │
//!                                                        └─ lock conflict: again, with nothing written
//! ```
//!
//! Whatever fails, the offsets are where they were: the records are read again, and rows that have their receipt stay as
//! they are.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::CommitMode;
use rdkafka::message::{BorrowedMessage, Message as _};
use tokio::runtime::Handle;

use super::batch::{Batch, Place};
use super::consumer::{self, Consumer};
use super::id::Foreign;
use super::receipts::{NotWritten, Receipts};
use super::settings::ConfirmSettings;
use super::status::Status;
use crate::failure::Failure;
use crate::pipeline::Stop;
use crate::source::SourceFailure;

/// Pauses before a batch is tried again whose rows were locked.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How often an idle desk makes sure of its database.
const BEAT: Duration = Duration::from_secs(5);

/// How often records of others are told of.
const WARN_AGAIN: Duration = Duration::from_secs(60);

pub struct Desk {
    settings: Arc<ConfirmSettings>,
    status: Arc<Status>,
    stop: Stop,
    runtime: Handle,
    receipts: Receipts,
    batch: Batch,
    /// What was committed of each partition, or is on its way to be.
    committed: HashMap<Place, i64>,
    /// When the database last answered.
    heard_at: Instant,
    warned_at: Option<Instant>,
    /// Why a rebalance could not write; told to whoever polls.
    failure: Option<Failure>,
    /// Nothing more is written.
    closed: bool,
}

impl Desk {
    pub fn new(
        settings: &Arc<ConfirmSettings>,
        status: &Arc<Status>,
        stop: &Stop,
        runtime: &Handle,
        receipts: Receipts,
    ) -> Self {
        Desk {
            settings: settings.clone(),
            status: status.clone(),
            stop: stop.clone(),
            runtime: runtime.clone(),
            receipts,
            batch: Batch::default(),
            committed: HashMap::new(),
            heard_at: Instant::now(),
            warned_at: None,
            failure: None,
            closed: false,
        }
    }

    pub fn gather(&mut self, record: &BorrowedMessage<'_>) {
        let Some(topic) = self.settings.topics.iter().position(|topic| topic == record.topic()) else { return };
        let id = match self.settings.id_from.find(record, self.receipts.kind()) {
            Ok(id) => Some(id),
            Err(foreign) => {
                self.pass(record, &foreign);
                None
            }
        };
        let place = (topic, record.partition());
        self.batch.add(place, record.offset(), id, record.timestamp().to_millis(), Instant::now());
        self.status.metrics.records.inc();
        self.status.in_flight(self.batch.records());
    }

    /// A record that is not of this table: others may deliver to the topic too.
    fn pass(&mut self, record: &BorrowedMessage<'_>, foreign: &Foreign) {
        self.status.metrics.foreign.inc();
        if self.warned_at.is_some_and(|at| at.elapsed() < WARN_AGAIN) {
            return;
        }
        self.warned_at = Some(Instant::now());
        tracing::warn!(
            confirmer = self.settings.name,
            topic = record.topic(),
            partition = record.partition(),
            offset = record.offset(),
            so_far = self.status.metrics.foreign.get(),
            "passed over a record that is not of this table: {}",
            foreign.describe(&self.settings.id_from, self.receipts.kind())
        );
    }

    /// A partition was read up to here, with or without a record right before it.
    pub fn reached(&mut self, place: Place, next: i64) {
        if !self.closed && self.read_upto(place).is_none_or(|known| known < next) {
            self.batch.reached(place, next, Instant::now());
        }
    }

    /// How far a partition was read.
    pub fn read_upto(&self, place: Place) -> Option<i64> {
        self.batch.next_of(place).or_else(|| self.committed.get(&place).copied())
    }

    pub fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    /// When the batch must be written.
    pub fn due(&self) -> Option<Instant> {
        self.batch.due(self.settings.batch, self.settings.interval)
    }

    pub fn failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    /// Forgets what was not written: it is read again.
    pub fn close(&mut self) {
        self.closed = true;
        self.batch = Batch::default();
        self.status.in_flight(0);
    }

    /// Partitions are taken from us. What was gathered is written first, unless they are gone already.
    pub fn give_up(&mut self, consumer: &Consumer, places: &[Place], lost: bool) {
        if lost {
            self.batch = Batch::default();
            self.status.in_flight(0);
        } else if !self.closed
            && let Err(failure) = self.write(consumer, CommitMode::Sync)
        {
            self.failure = Some(failure);
            self.close();
        }
        self.committed.retain(|place, _| !places.contains(place));
    }

    /// Writes the receipts of what was gathered, then commits its offsets.
    pub fn write(&mut self, consumer: &Consumer, mode: CommitMode) -> Result<(), Failure> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let mut batch = std::mem::take(&mut self.batch);
        let ids = batch.sorted_ids();
        if !ids.is_empty() {
            let (rows, took) = self.runtime.clone().block_on(self.update(ids))?;
            self.status.written(ids.len() as u64, rows, took);
            tracing::debug!(
                confirmer = self.settings.name,
                ids = ids.len(),
                rows,
                micros = took.as_micros() as u64,
                "receipts written"
            );
        }
        self.status.progressed(batch.made_at());
        self.status.in_flight(0);
        self.heard_at = Instant::now();
        let committed = consumer::commit(consumer, batch.upto().iter(), mode);
        if let Err(error) = committed {
            // What is not committed is read again, and its receipts are there.
            tracing::warn!(confirmer = self.settings.name, "offsets were not committed: {error}");
        }
        self.committed.extend(batch.upto());
        Ok(())
    }

    /// One statement, tried again while its rows are locked; how many rows it changed, and how long the last try took.
    async fn update(&mut self, ids: &[super::id::Id]) -> Result<(u64, Duration), Failure> {
        let (stop, shutdown_timeout) = (self.stop.clone(), self.settings.shutdown_timeout);
        let stall_timeout = self.settings.stall_timeout;
        let late = async {
            let stopped = async {
                stop.requested().await;
                tokio::time::sleep(shutdown_timeout).await;
            };
            tokio::select! {
                () = tokio::time::sleep(stall_timeout) => {}
                () = stopped => {}
            }
        };
        let tries = async {
            let mut pause = FIRST_PAUSE;
            loop {
                let began = Instant::now();
                match self.receipts.write(ids).await {
                    Ok(rows) => return Ok((rows, began.elapsed())),
                    Err(NotWritten::Conflict(what)) => {
                        self.status.metrics.conflicts.inc();
                        self.status.failed(&what);
                        tracing::debug!(confirmer = self.settings.name, "trying again: {what}");
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                    Err(NotWritten::Failed(failure)) => return Err(passing(failure)),
                }
            }
        };
        tokio::select! {
            tried = tries => tried,
            () = late => {
                let what = format!("receipts could not be written within {stall_timeout:?}: rows are locked, or the server is silent");
                Err(Failure::Retry { what })
            }
        }
    }

    /// Makes sure of the database when there is nothing to write, so that its absence shows.
    pub fn beat(&mut self) -> Result<(), Failure> {
        if self.heard_at.elapsed() < BEAT {
            return Ok(());
        }
        let stall_timeout = self.settings.stall_timeout;
        let silent = |_| Err(SourceFailure::transient(format!("the database is silent for {stall_timeout:?}")));
        let asked = async { tokio::time::timeout(stall_timeout, self.receipts.beat()).await.unwrap_or_else(silent) };
        self.runtime.clone().block_on(asked).map_err(passing)?;
        self.heard_at = Instant::now();
        Ok(())
    }
}

/// It worked a moment ago. Whether only a person can help is found out by whoever begins anew.
fn passing(failure: SourceFailure) -> Failure {
    Failure::Retry { what: failure.to_string() }
}
