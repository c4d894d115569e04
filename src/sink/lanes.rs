//! Lanes: how order is kept where the place itself keeps none.
//!
//! ```text
//!   enqueue ──hash of the key──▶ lane 0  [ parcel parcel … ] ── one batch at a time ──▶ Courier::send
//!                                lane 1  [ parcel … ]        ──         "           ──▶
//!                                …
//! ```
//!
//! All records of a key are in one lane, and a lane has one batch under way: so a key's records arrive in order, and
//! while one of them is tried again the others of its lane wait. Records without a key are one lane. While a batch is
//! under way the next one gathers, so batches grow with the load and nothing waits for company.
//!
//! A batch that the place refuses is tried by halves until the culprit stands alone. Only the culprit is parked.

use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::office::Office;
use super::{Enqueued, SinkFailure};
use crate::ack_window::{AckWindow, Receipt};
use crate::event::CommitId;
use crate::route::{Headers, Record};
use crate::source::poll::ledger::{Ledger, Verdict};
use crate::status::PublisherStatus;

/// A record on its way, with what it needs to outlive its chunk.
#[derive(Clone, Debug)]
pub struct Parcel {
    pub receipt: Receipt,
    pub topic: Box<str>,
    pub key: Option<Box<[u8]>>,
    pub value: Option<Box<[u8]>>,
    pub headers: Headers,
    pub timestamp_millis: i64,
    pub commit: CommitId,
    /// The table it came from, where there are several.
    pub table: Option<Box<str>>,
    /// What the poller calls its row.
    pub row: Option<u64>,
}

impl Parcel {
    pub fn of(record: &Record<'_>, receipt: Receipt) -> Self {
        Parcel {
            receipt,
            topic: record.topic.into(),
            key: record.key.map(Into::into),
            value: record.value.map(Into::into),
            headers: record.headers.clone(),
            timestamp_millis: record.timestamp_millis,
            commit: record.commit,
            table: record.table.map(Into::into),
            row: record.row,
        }
    }
}

/// Why a batch was not taken.
#[derive(Debug)]
pub enum Refusal {
    /// It passes: no connection, or the place asks for patience. Never counts as an attempt.
    Later { why: String, after: Option<Duration> },
    /// The place does not want these records.
    Refused { why: String },
    /// Of the first `tried` records all were taken but these, by their places; the rest was not sent.
    Partly { tried: usize, refused: Vec<usize>, why: String },
    /// Nothing but a person can help.
    Halt(SinkFailure),
}

/// Brings batches to a place.
pub trait Courier: Send + Sync + 'static {
    /// Whether two records that follow each other may be in one batch.
    fn together(&self, one: &Parcel, next: &Parcel) -> bool;

    /// Delivers all of the batch, or nothing that counts.
    fn send(&self, batch: &[Parcel]) -> impl Future<Output = Result<(), Refusal>> + Send;
}

#[derive(Clone, Copy, Debug)]
pub struct LaneSettings {
    pub lanes: usize,
    /// Records in a batch at the most.
    pub batch: usize,
    /// How often a record that stands alone is tried again.
    pub retries: u32,
    /// The pause before the first of these; it doubles with each.
    pub backoff: Duration,
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

struct Lane {
    queue: Mutex<Queue>,
    filled: Notify,
}

#[derive(Default)]
struct Queue {
    parcels: VecDeque<Parcel>,
    /// Nobody works on it any more.
    closed: bool,
}

impl Lane {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Lanes {
    lanes: Vec<Arc<Lane>>,
    under_way: Arc<UnderWay>,
    tasks: JoinSet<()>,
}

#[derive(Default)]
struct UnderWay {
    parcels: AtomicUsize,
    none: Notify,
}

impl UnderWay {
    fn less(&self, parcels: usize) {
        if self.parcels.fetch_sub(parcels, Ordering::AcqRel) == parcels {
            self.none.notify_waiters();
        }
    }
}

impl Lanes {
    pub fn start<C: Courier>(
        courier: C,
        settings: LaneSettings,
        office: &Arc<Office>,
        window: &Arc<AckWindow>,
        status: &Arc<PublisherStatus>,
        ledger: Option<&Arc<Ledger>>,
    ) -> Self {
        // A poller's rows are tried again by the poller, which knows how often they were.
        let settings = LaneSettings { retries: if ledger.is_some() { 0 } else { settings.retries }, ..settings };
        let courier = Arc::new(courier);
        let under_way = Arc::<UnderWay>::default();
        let mut tasks = JoinSet::new();
        let lanes: Vec<_> = (0..settings.lanes.max(1))
            .map(|_| Arc::new(Lane { queue: Mutex::default(), filled: Notify::new() }))
            .collect();
        for lane in &lanes {
            let worker = Worker {
                lane: lane.clone(),
                courier: courier.clone(),
                settings,
                office: office.clone(),
                window: window.clone(),
                under_way: under_way.clone(),
                status: status.clone(),
                ledger: ledger.cloned(),
                left: AtomicUsize::new(0),
            };
            tasks.spawn(worker.run());
        }
        Lanes { lanes, under_way, tasks }
    }

    /// Puts a record into its lane. The window bounds what is in flight, so a lane is never full.
    pub fn enqueue(&self, record: &Record<'_>, receipt: Receipt) -> Enqueued {
        let lane = match record.key {
            None => 0,
            Some(key) => {
                let mut hasher = DefaultHasher::new();
                key.hash(&mut hasher);
                (hasher.finish() % self.lanes.len() as u64) as usize
            }
        };
        let lane = &self.lanes[lane];
        let mut queue = lane.queue();
        // A lane that has ended has failed the window, and what comes is read again by the next generation.
        if !queue.closed {
            self.under_way.parcels.fetch_add(1, Ordering::AcqRel);
            queue.parcels.push_back(Parcel::of(record, receipt));
            lane.filled.notify_one();
        }
        Enqueued::Queued
    }

    /// Ends the lanes; when it returns, nothing more is sent.
    pub async fn abandon(mut self) {
        self.tasks.shutdown().await;
    }

    /// Waits for what is under way, until the deadline.
    pub async fn drain(&self, deadline: Instant) {
        loop {
            let none = self.under_way.none.notified();
            if self.under_way.parcels.load(Ordering::Acquire) == 0 {
                return;
            }
            if tokio::time::timeout_at(deadline, none).await.is_err() {
                return;
            }
        }
    }
}

/// What became of a part of a batch.
enum Sent {
    All,
    /// For good, and why.
    Refused(String),
    /// See [`Refusal::Partly`].
    Partly {
        tried: usize,
        refused: Vec<usize>,
    },
}

struct Worker<C> {
    lane: Arc<Lane>,
    courier: Arc<C>,
    settings: LaneSettings,
    office: Arc<Office>,
    window: Arc<AckWindow>,
    under_way: Arc<UnderWay>,
    status: Arc<PublisherStatus>,
    /// Where rows are that a poller claimed.
    ledger: Option<Arc<Ledger>>,
    /// Of the batch under way, what has not arrived.
    left: AtomicUsize,
}

impl<C: Courier> Worker<C> {
    async fn run(self) {
        loop {
            let batch = self.gather();
            if batch.is_empty() {
                self.lane.filled.notified().await;
                continue;
            }
            self.left.store(batch.len(), Ordering::Relaxed);
            if let Err(failure) = self.deliver(batch).await {
                // What is left is read again by the next generation.
                self.window.fail(failure);
                let mut queue = self.lane.queue();
                queue.closed = true;
                self.under_way.less(self.left.load(Ordering::Relaxed) + queue.parcels.len());
                queue.parcels.clear();
                return;
            }
        }
    }

    /// What waits at the head of the lane, as far as it may go together.
    fn gather(&self) -> Vec<Parcel> {
        let queue = &mut self.lane.queue().parcels;
        let mut count = usize::from(!queue.is_empty());
        while count < queue.len().min(self.settings.batch) && self.courier.together(&queue[count - 1], &queue[count]) {
            count += 1;
        }
        queue.drain(..count).collect()
    }

    async fn deliver(&self, batch: Vec<Parcel>) -> Result<(), SinkFailure> {
        // Parts that are still to be sent; the next one is the last.
        let mut left = Vec::from([batch]);
        while let Some(part) = left.pop() {
            let mut part = self.without_waiting(part);
            if part.is_empty() {
                continue;
            }
            match self.send(&part).await? {
                Sent::All => self.arrived(&part),
                Sent::Refused(why) if part.len() == 1 => self.park(&part[0], &why).await?,
                Sent::Refused(_) => {
                    let second = part.split_off(part.len() / 2);
                    left.push(second);
                    left.push(part);
                }
                Sent::Partly { tried, refused } => {
                    let unsent = part.split_off(tried.min(part.len()));
                    if !unsent.is_empty() {
                        left.push(unsent);
                    }
                    let mut alone = Vec::new();
                    for (at, parcel) in part.into_iter().enumerate() {
                        match refused.contains(&at) {
                            true => alone.push(vec![parcel]),
                            false => self.arrived(std::slice::from_ref(&parcel)),
                        }
                    }
                    left.extend(alone.into_iter().rev());
                }
            }
        }
        Ok(())
    }

    /// What may be sent: rows behind one of their key that is to be tried again are given back to the poller.
    fn without_waiting(&self, part: Vec<Parcel>) -> Vec<Parcel> {
        let Some(ledger) = &self.ledger else { return part };
        let waits = |parcel: &Parcel| parcel.row.is_some_and(|row| ledger.must_wait(row, parcel.key.as_deref()));
        let (waiting, rest): (Vec<_>, Vec<_>) = part.into_iter().partition(waits);
        for parcel in &waiting {
            self.settled(parcel);
        }
        rest
    }

    /// Sends until it is taken or refused for good.
    async fn send(&self, part: &[Parcel]) -> Result<Sent, SinkFailure> {
        let (mut tries, mut pause) = (0, FIRST_PAUSE);
        loop {
            let refusal = match self.courier.send(part).await {
                Ok(()) => return Ok(Sent::All),
                Err(Refusal::Partly { why, .. }) if part.len() == 1 => Refusal::Refused { why },
                Err(refusal) => refusal,
            };
            match refusal {
                Refusal::Halt(failure) => return Err(failure),
                Refusal::Partly { tried, refused, why } => {
                    tracing::info!(records = part.len(), refused = refused.len(), "sent in part: {why}");
                    return Ok(Sent::Partly { tried, refused });
                }
                Refusal::Later { why, after } => {
                    tracing::warn!(records = part.len(), "to be sent again: {why}");
                    self.status.sink_is_away(&why);
                    tokio::time::sleep(after.unwrap_or_default().max(pause)).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                // One of several is to blame, and patience does not tell which.
                Refusal::Refused { why } if part.len() > 1 => return Ok(Sent::Refused(why)),
                Refusal::Refused { why } if tries >= self.settings.retries => return Ok(Sent::Refused(why)),
                Refusal::Refused { why } => {
                    tracing::info!(tries = tries + 1, "a record was refused and is tried again: {why}");
                    let backoff = self.settings.backoff.saturating_mul(2_u32.saturating_pow(tries));
                    tokio::time::sleep(backoff.min(LONGEST_BACKOFF)).await;
                    tries += 1;
                }
            }
        }
    }

    fn arrived(&self, part: &[Parcel]) {
        self.status.sink_is_back();
        for parcel in part {
            self.window.resolve(parcel.receipt);
        }
        self.left.fetch_sub(part.len(), Ordering::Relaxed);
        self.under_way.less(part.len());
    }

    async fn park(&self, parcel: &Parcel, why: &str) -> Result<(), SinkFailure> {
        let verdict = match (&self.ledger, parcel.row) {
            (Some(ledger), Some(row)) => {
                self.status.metrics.refusals.inc();
                Some(ledger.refuse(row, parcel.key.as_deref(), why, false))
            }
            _ => None,
        };
        match verdict {
            Some(Verdict::Again) => tracing::info!("a row was refused and is tried again: {why}"),
            Some(Verdict::Failed) if !self.office.is_open() => {
                tracing::warn!(commit = %parcel.commit, "a row has failed for good: {why}");
            }
            _ => self.office.take_refused(parcel, why).await?,
        }
        self.settled(parcel);
        Ok(())
    }

    fn settled(&self, parcel: &Parcel) {
        self.window.resolve(parcel.receipt);
        self.left.fetch_sub(1, Ordering::Relaxed);
        self.under_way.less(1);
    }
}
