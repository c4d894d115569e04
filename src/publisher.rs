//! A publisher: the way of an event from the relay's loop to one sink. It selects, routes, and has a window of its own.
//!
//! ```text
//!                        ┌ pick ─▶ window.admit ─▶ router.route ─▶ sink.enqueue ─▶ window.seal   publisher a
//!   chunk of the log ────┼ pick ─▶ …                                                             publisher b
//!                        └ …                       every window counts the same chunks
//! ```
//!
//! One that is stopped (paused, failed, or waiting to be tried again) goes on through chunks of which it wants nothing.
//! At the first that it does want it stays behind for the rest of the generation, and so does the position that the
//! source is told; the others go on. Going on again takes a new generation, which reads from where it stayed, and the
//! others skip what they have.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::ack_window::{AckWindow, Advanced, Bells, Receipt};
use crate::config::{DeadLetter, PublisherSettings};
use crate::dead_letters::letter;
use crate::event::{Chunk, OutboxEvent};
use crate::failpoints;
use crate::failure::{ExitCode, Failure, Halt};
use crate::marks::Marks;
use crate::milestone::{Milestone, Within};
use crate::position::Position;
use crate::route::selection::Selection;
use crate::route::{Record, Router};
use crate::sink::{Enqueued, Sink};
use crate::source::poll::ledger::{Ledger, Verdict};
use crate::status::PublisherStatus;

/// What the relay's tasks share of a publisher.
pub struct Account {
    pub name: String,
    pub window: Arc<AckWindow>,
    pub status: Arc<PublisherStatus>,
    bells: Bells,
    stopped: AtomicBool,
    stop: Notify,
    /// Its position no longer counts.
    let_go: AtomicBool,
    failure: Mutex<Option<Failure>>,
    passed: Mutex<Passed>,
}

/// How far a publisher has come.
#[derive(Clone, Debug, Default)]
pub struct Passed {
    /// Chunks of this generation that are finished.
    pub finished: usize,
    /// The last commit among them.
    pub end: Option<Position>,
    /// What it had before this generation.
    pub known: Option<Position>,
    /// Events that were acknowledged in this generation.
    pub events: usize,
}

impl Passed {
    /// The furthest position up to which everything was acknowledged.
    pub fn position(&self) -> Option<&Position> {
        match (&self.end, &self.known) {
            (Some(end), Some(known)) if known.covers(end) => Some(known),
            (Some(end), _) => Some(end),
            (None, known) => known.as_ref(),
        }
    }
}

impl Account {
    pub fn new(
        name: &str,
        window: Arc<AckWindow>,
        bells: Bells,
        status: Arc<PublisherStatus>,
        known: Option<Position>,
    ) -> Self {
        Account {
            name: name.to_owned(),
            window,
            status,
            bells,
            stopped: AtomicBool::new(false),
            stop: Notify::new(),
            let_go: AtomicBool::new(false),
            failure: Mutex::default(),
            passed: Mutex::new(Passed { known, ..Passed::default() }),
        }
    }

    /// Takes it out of this generation.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.stop.notify_one();
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    pub async fn until_stopped(&self) {
        while !self.is_stopped() {
            self.stop.notified().await;
        }
    }

    /// Stops it, and lets the source forget what it has not had.
    pub fn let_go(&self) {
        self.let_go.store(true, Ordering::Release);
        self.stop();
        // The minimum may move now.
        self.bells.progress.notify_one();
    }

    pub fn is_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire)
    }

    /// Stops it with a failure, which the warden takes up.
    pub fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.stop();
        self.bells.trouble.notify_one();
    }

    /// A failure that nobody has taken up yet.
    pub fn take_failure(&self) -> Option<Failure> {
        let own = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        own.or_else(|| self.window.failure().map(Failure::from))
    }

    fn passed_mut(&self) -> MutexGuard<'_, Passed> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chunks of this generation that are finished.
    pub fn finished(&self) -> usize {
        self.passed_mut().finished
    }

    /// The last commit among them.
    pub fn end(&self) -> Option<Position> {
        self.passed_mut().end.clone()
    }

    pub fn passed(&self) -> Passed {
        self.passed_mut().clone()
    }

    /// Moves on past what has finished.
    pub fn advance(&self) -> Option<Advanced> {
        let advanced = self.window.advance()?;
        let mut passed = self.passed_mut();
        passed.finished = advanced.finished;
        passed.events += advanced.events;
        if let Some(end) = &advanced.end {
            passed.end = Some(end.position.clone());
        }
        Some(advanced)
    }
}

/// Which events of a chunk are wanted.
enum Picked {
    All,
    /// Those in the list.
    Some,
}

/// One publisher's parts in a generation.
pub struct Publisher<'a> {
    pub settings: &'a PublisherSettings,
    pub pipeline: &'a str,
    pub router: &'a mut Router,
    pub selection: Option<&'a Selection>,
    /// `None`: it does not take part in this generation.
    pub sink: Option<Sink>,
    pub account: Arc<Account>,
    /// What it had before this generation, until the log is past it.
    pub known: Option<Position>,
    pub picked: Vec<u32>,
    /// Where its rows are, if a poller claimed them.
    pub ledger: Option<&'a Ledger>,
    /// Where rows are noted that were read from the log and are to be marked, and its number there.
    pub marks: Option<(&'a Marks, usize)>,
    /// It stays behind.
    pub gone: bool,
    /// How far it has come, to the event; `None` where nothing is committed by transactions.
    pub milestone: Option<Milestone>,
    /// What it had of a commit before this generation.
    pub within: Option<Within>,
    /// A chunk is enqueued in part, so that no milestone lies behind what was enqueued.
    pub torn: bool,
}

impl Publisher<'_> {
    /// Takes what it wants of the chunk, waiting until its window has room. Notes in `matched` what that is.
    pub async fn take(&mut self, chunk: &Chunk, matched: &mut [bool]) -> Result<(), Failure> {
        let picked = self.pick(chunk, matched);
        let count = match picked {
            Picked::All => chunk.events().len(),
            Picked::Some => self.picked.len(),
        };
        if count > 0 && self.account.is_stopped() {
            self.gone = true;
            return Ok(());
        }
        let weight = match picked {
            Picked::All => chunk.weight(),
            Picked::Some => chunk.weight() * count / chunk.events().len().max(1),
        };
        self.account.status.took(chunk, count);
        let Some(receipt) = self.admit(count, weight).await? else {
            self.gone = true;
            return Ok(());
        };
        self.torn = true;
        failpoints::reach("admitted")?;
        match picked {
            Picked::All => {
                for event in chunk.events() {
                    if !self.enqueue(chunk, event, receipt)? && !self.deliver(chunk, event, receipt).await? {
                        return Ok(());
                    }
                }
            }
            Picked::Some => {
                for at in 0..self.picked.len() {
                    let event = chunk.events()[self.picked[at] as usize];
                    if !self.enqueue(chunk, &event, receipt)? && !self.deliver(chunk, &event, receipt).await? {
                        return Ok(());
                    }
                }
            }
        }
        failpoints::reach("enqueued")?;
        self.account.window.seal(receipt, 0, chunk.end.clone());
        self.torn = false;
        if let Some(milestone) = &mut self.milestone {
            milestone.pass(chunk);
            if self.sink.as_mut().is_some_and(|sink| sink.is_due(chunk.catching_up)) {
                self.commit().await?;
            }
        }
        if !chunk.catching_up
            && count > 0
            && let Some(sink) = &self.sink
        {
            sink.hurry();
        }
        Ok(())
    }

    /// When it wants to commit.
    pub fn due(&self) -> Option<Instant> {
        self.sink.as_ref().filter(|_| !self.torn)?.due()
    }

    /// Makes visible what was enqueued, where that takes a transaction. May be cancelled and called again.
    pub async fn commit(&mut self) -> Result<(), Failure> {
        if let (Some(sink), Some(milestone), false) = (&mut self.sink, &self.milestone, self.torn) {
            sink.commit(milestone).await?;
        }
        Ok(())
    }

    /// Sees through what is in flight, until the deadline.
    pub async fn drain(&mut self, deadline: Instant) {
        match tokio::time::timeout_at(deadline, self.commit()).await {
            Ok(Err(failure)) => tracing::warn!("what was enqueued last is not committed and comes again: {failure:?}"),
            Err(_) => {}
            Ok(Ok(())) => {
                // What is torn is taken back, and need not be waited for.
                if let Some(sink) = self.sink.as_mut().filter(|sink| !sink.transacts()) {
                    sink.drain(deadline).await;
                }
            }
        }
    }

    fn pick(&mut self, chunk: &Chunk, matched: &mut [bool]) -> Picked {
        if self.selection.is_none() && self.known.is_none() && self.within.is_none() {
            matched.fill(true);
            return Picked::All;
        }
        self.picked.clear();
        let known = self.known.as_ref();
        for (index, event) in chunk.events().iter().enumerate() {
            // Counted before it is selected, as it was when it was delivered.
            let had = self.within.as_mut().is_some_and(|within| within.has(&chunk.commit(event).id));
            if !self.selection.is_none_or(|selection| selection.wants(chunk, event)) {
                continue;
            }
            if let Some(matched) = matched.get_mut(index) {
                *matched = true;
            }
            let commit = chunk.commit(event).id;
            if !had && !known.is_some_and(|known| known.has(&commit)) {
                self.picked.push(index as u32);
            }
        }
        let beyond = |known: &Position| chunk.end.as_ref().is_some_and(|end| !known.covers(&end.position));
        if known.is_some_and(beyond) {
            self.known = None;
        }
        // The piece is of the first commit that comes; another one is beyond it.
        let last = chunk.events().last().map(|event| chunk.commit(event).id);
        self.within.take_if(|within| within.events == 0 || last.is_some_and(|last| !within.is_of(&last)));
        Picked::Some
    }

    /// `None` when it was stopped while the window was full.
    async fn admit(&mut self, count: usize, weight: usize) -> Result<Option<Receipt>, Failure> {
        if let Some(receipt) = self.account.window.try_admit(count, weight) {
            return Ok(Some(receipt));
        }
        // What is in an open transaction gives no room before it is committed.
        self.commit().await?;
        let status = &self.account.status;
        status.holds_back(true);
        let admitted = tokio::select! {
            receipt = self.account.window.admit(count, weight) => Some(receipt),
            () = self.account.until_stopped() => None,
        };
        status.holds_back(false);
        Ok(admitted)
    }

    /// The usual way, which costs neither a future nor an await; says whether it was open.
    fn enqueue(&mut self, chunk: &Chunk, event: &OutboxEvent, receipt: Receipt) -> Result<bool, Failure> {
        let Some(sink) = &mut self.sink else { return Ok(true) };
        Ok(match self.router.route(chunk, event) {
            Ok(record) => {
                if self.ledger.is_some_and(|ledger| waits(ledger, sink, &record)) {
                    self.account.window.resolve(receipt);
                    return Ok(true);
                }
                matches!(sink.enqueue(&record, receipt)?, Enqueued::Queued)
            }
            Err(_) => false,
        })
    }

    /// Delivers one event that could not simply be enqueued. Whether it was: a publisher that is stopped meanwhile stays
    /// behind, and the others need not wait for its broker.
    async fn deliver(&mut self, chunk: &Chunk, event: &OutboxEvent, receipt: Receipt) -> Result<bool, Failure> {
        let account = self.account.clone();
        account.status.holds_back(true);
        let delivered = tokio::select! {
            delivered = self.deliver_or_park(chunk, event, receipt) => delivered.map(|()| true),
            () = account.until_stopped() => Ok(false),
        };
        account.status.holds_back(false);
        self.gone |= matches!(delivered, Ok(false));
        delivered
    }

    async fn deliver_or_park(&mut self, chunk: &Chunk, event: &OutboxEvent, receipt: Receipt) -> Result<(), Failure> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        loop {
            let ledger = self.ledger.zip(chunk.row(event));
            let (refused, verdict) = match self.router.route(chunk, event) {
                Err(unroutable) => {
                    let why = unroutable.to_string();
                    let key = self.router.key_column(chunk, event);
                    let verdict = ledger.map(|(ledger, row)| ledger.refuse(row, key, &why, true));
                    (why, verdict)
                }
                Ok(record) => {
                    let why = match sink.enqueue(&record, receipt)? {
                        Enqueued::Queued => return Ok(()),
                        Enqueued::Full => {
                            tokio::time::sleep(Duration::from_millis(2)).await;
                            continue;
                        }
                        Enqueued::Suspect => match sink.send_alone(&record, receipt).await? {
                            Enqueued::Queued => return Ok(()),
                            Enqueued::Refused(why) => why,
                            _ => continue,
                        },
                        Enqueued::Unprepared => match sink.prepare(record.topic).await? {
                            Enqueued::Refused(why) => format!("topic `{}`: {why}", record.topic),
                            _ => continue,
                        },
                        Enqueued::Refused(why) => format!("topic `{}`: {why}", record.topic),
                    };
                    let verdict = ledger.map(|(ledger, row)| ledger.refuse(row, record.key, &why, false));
                    (why, verdict)
                }
            };
            if let Some(verdict) = verdict {
                self.account.status.metrics.refusals.inc();
                let parks = self.settings.dead_letter != DeadLetter::None;
                match verdict {
                    Verdict::Again => tracing::info!("a row was refused and is tried again: {refused}"),
                    Verdict::Failed if parks => {}
                    Verdict::Failed => {
                        let id = self.router.describe(chunk, event);
                        tracing::warn!("the row {id} has failed for good: {refused}");
                    }
                }
                if verdict == Verdict::Again || !parks {
                    self.account.window.resolve(receipt);
                    return Ok(());
                }
            }
            return self.park(chunk, event, receipt, &refused).await;
        }
    }

    /// Puts an undeliverable event into the dead-letter place, in its turn, or halts.
    async fn park(&mut self, chunk: &Chunk, event: &OutboxEvent, receipt: Receipt, why: &str) -> Result<(), Failure> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        let commit = chunk.commit(event).id;
        let halt = |what: String, remedy: &str| {
            Failure::Halt(Halt { code: ExitCode::Undeliverable, what, remedy: remedy.to_owned() })
        };
        let place = &self.settings.dead_letter;
        let topic = match place {
            DeadLetter::Topic(topic) => topic,
            DeadLetter::Table(table) => &table.name,
            DeadLetter::None => {
                let id = self.router.describe(chunk, event);
                return Err(halt(
                    format!("the event {id} of the commit at {commit} cannot be delivered: {why}"),
                    "remove the cause (create the topic, raise max.message.bytes …), or set --dead-letter table:NAME or \
                     topic:NAME",
                ));
            }
        };
        let letter_headers =
            [(letter::REASON, why), (letter::PIPELINE, self.pipeline), (letter::PUBLISHER, &self.settings.name)];
        loop {
            let record = self.router.dead_letter(chunk, event, topic, &letter_headers);
            match sink.park(&record, receipt).await? {
                Enqueued::Queued => break,
                Enqueued::Full => tokio::time::sleep(Duration::from_millis(2)).await,
                Enqueued::Suspect => {
                    if matches!(sink.send_alone(&record, receipt).await?, Enqueued::Queued) {
                        break;
                    }
                }
                Enqueued::Unprepared => {
                    if let Enqueued::Refused(second) = sink.prepare(topic).await? {
                        let what = format!("an event of the commit at {commit} cannot be delivered ({why}) nor parked");
                        return Err(halt(format!("{what}: {second}"), "make the dead-letter topic writable"));
                    }
                }
                Enqueued::Refused(second) => {
                    let what = format!("an event of the commit at {commit} cannot be delivered ({why}) nor parked");
                    return Err(halt(format!("{what}: {second}"), "raise the dead-letter topic's max.message.bytes"));
                }
            }
        }
        if let (Some((marks, number)), Some(row)) = (self.marks, chunk.row(event)) {
            marks.parked(row, number, why);
        }
        self.account.status.parked();
        tracing::warn!(commit = %commit, "an event was put into the dead-letter {}: {why}", place.describe());
        Ok(())
    }
}

/// Whether a row must wait for another of its key, which was refused. Lanes find that out themselves, in their order.
fn waits(ledger: &Ledger, sink: &Sink, record: &Record<'_>) -> bool {
    !sink.has_lanes() && record.row.is_some_and(|row| ledger.must_wait(row, record.key))
}
