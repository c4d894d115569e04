//! The loop: source → window → route → sink → watermark → confirm.
//!
//! ```text
//!   pump    reader.next ─▶ each publisher: pick ─▶ window.admit ─▶ router.route ─▶ sink.enqueue ─▶ window.seal
//!   follow  lowest watermark of all publishers ─▶ confirmer.confirm
//!                                              └▶ marker, where rows are marked ─▶ confirmer.confirm
//!   warden  failures of publishers, orders of people, notes on how far each has come
//! ```
//!
//! One generation: it runs until it is told to stop, until it has caught up, or until something fails. Whatever
//! fails, the confirmed position is where the next generation goes on, so nothing here has to be undone.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::event::Chunk;
use crate::failpoints;
use crate::failure::{ExitCode, Failure, Halt};
use crate::marks::{Marks, Passed};
use crate::pipeline::Stop;
use crate::position::Position;
use crate::publisher::{Account, Publisher};
use crate::sink::Sink;
use crate::source::mark::Marker;
use crate::source::poll::Room;
use crate::source::{Confirmer, Opened, Reader, SourceFailure};
use crate::status::{PipelineStatus, State};
use crate::warden::Warden;

/// Why a generation ended without failing.
#[derive(Clone, Debug)]
pub enum Ended {
    Stopped,
    CaughtUp,
    /// A publisher takes part again: begin anew, at once.
    Anew,
    /// Every publisher's position was let go; this is the gap report.
    LetGo(String),
    /// The log no longer has what follows, and the table may make up for it.
    Lost(Halt),
}

/// How long the others are drained for when a publisher takes part again.
const ANEW_PATIENCE: Duration = Duration::from_secs(3);
/// How long the last marks may take, however long the sinks took.
const MARK_PATIENCE: Duration = Duration::from_secs(3);

/// One generation's parts.
pub struct Relay<'a> {
    pub source: Opened,
    pub publishers: Vec<Publisher<'a>>,
    /// Who marks delivered rows, if they are marked.
    pub marking: Option<(Arc<Marks>, Marker)>,
    pub warden: Warden<'a>,
    /// Rung by every window.
    pub progress: Arc<Notify>,
    pub status: &'a PipelineStatus,
    pub until_caught_up: bool,
    pub shutdown_timeout: Duration,
}

impl Relay<'_> {
    pub async fn run(self, stop: &Stop) -> Result<Ended, Failure> {
        let Relay { source, mut publishers, marking, mut warden, progress, status, until_caught_up, shutdown_timeout } =
            self;
        let Opened { mut reader, confirmer, start, caught_up_at, table_first, mut alarm, .. } = source;
        let accounts: Vec<_> = publishers.iter().map(|publisher| publisher.account.clone()).collect();
        let (marks, mut marker) = marking.map(|(marks, marker)| (marks, AtWork::start(marker))).unzip();
        let marks = marks.as_deref();
        let follower = Follower { accounts: &accounts, confirmer: &confirmer, marks, table_first, status };
        let target = until_caught_up.then_some(&caught_up_at);
        let ended = {
            let mut pump = Pump { publishers: &mut publishers, matched: Vec::new(), marks, status };
            tokio::select! {
                failure = pump.run(&mut reader) => Err(failure),
                ended = follower.run(start, target, &progress) => Ok(ended),
                failure = until_ended(&mut marker) => Err(failure),
                ended = warden.run() => ended,
                raised = &mut alarm => match raised {
                    // What the source's watch has seen wants a new beginning.
                    Ok(Ok(())) => Ok(Ended::Anew),
                    raised => Err(alarm_failure(raised)),
                },
                () = stop.requested() => Ok(Ended::Stopped),
            }
        };
        // An event that cannot be delivered ends the pipeline, and so does a log that no longer has what follows; but what
        // was read before is still seen through.
        let orderly = match &ended {
            Ok(_) => true,
            Err(Failure::Halt(halt)) => matches!(halt.code, ExitCode::Undeliverable | ExitCode::PositionLost),
            Err(_) => false,
        };
        // One that takes part again must not keep the others waiting for a slow one.
        let patience =
            if matches!(ended, Ok(Ended::Anew)) { shutdown_timeout.min(ANEW_PATIENCE) } else { shutdown_timeout };
        let deadline = Instant::now() + patience;
        if orderly && !matches!(ended, Ok(Ended::CaughtUp)) {
            drain(&mut publishers, deadline).await;
            follower.advance();
            let left: usize = accounts.iter().map(|account| account.window.in_flight()).sum();
            if left > 0 {
                tracing::warn!(events = left, "not acknowledged before the deadline: they will be delivered again");
            }
        } else {
            // What was acknowledged meanwhile need not be repeated.
            follower.advance();
        }
        if !orderly {
            // Unasked, the server must not wait for our goodbye: it may be shutting down.
            alarm.abort();
        }
        // Before another instance is let in: what is still queued must not come after what it delivers.
        abandon(publishers).await;
        follower.advance();
        if let Some(marks) = marks {
            if orderly {
                follower.finish(marks, deadline.max(Instant::now() + MARK_PATIENCE), &progress).await;
            }
            marks.end(|publisher| accounts.get(publisher).map_or(0, |account| account.finished()));
        }
        drop(marker);
        warden.remember();
        if orderly {
            warden.finish().await;
            if !alarm.is_finished() {
                confirmer.finish(reader, alarm).await;
            }
        }
        match ended {
            // All that could be delivered was; what could not is told by the code.
            Ok(Ended::CaughtUp) => warden.any_failed().map_or(Ok(Ended::CaughtUp), |halt| Err(Failure::Halt(halt))),
            ended => ended,
        }
    }
}

fn alarm_failure(raised: Result<Result<(), SourceFailure>, tokio::task::JoinError>) -> Failure {
    match raised {
        Ok(Err(failure)) => failure.into(),
        Ok(Ok(())) => Failure::Retry { what: "the source's watch ended".to_owned() },
        Err(died) => Failure::Retry { what: format!("the source's watch died: {died}") },
    }
}

/// The marker's task, which ends with the generation.
struct AtWork(tokio::task::JoinHandle<SourceFailure>);

impl AtWork {
    fn start(marker: Marker) -> Self {
        AtWork(tokio::spawn(marker.run()))
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Why marking has ended; never, where nothing is marked.
async fn until_ended(marker: &mut Option<AtWork>) -> Failure {
    match marker {
        None => std::future::pending().await,
        Some(AtWork(task)) => match task.await {
            Ok(failure) => failure.into(),
            Err(died) => Failure::Retry { what: format!("marking delivered rows died: {died}") },
        },
    }
}

/// Waits for what is in flight until the deadline; what is unacknowledged then is not confirmed and comes again.
async fn drain(publishers: &mut [Publisher<'_>], deadline: Instant) {
    let taking_part = publishers.iter_mut().filter(|publisher| !publisher.account.is_stopped());
    join_all(taking_part.map(|publisher| publisher.drain(deadline))).await;
}

/// Gives up what is still queued.
async fn abandon(publishers: Vec<Publisher<'_>>) {
    join_all(publishers.into_iter().filter_map(|publisher| publisher.sink).map(Sink::abandon)).await;
}

/// Never, where there is no such moment.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Confirms to the source what all publishers have passed, and what is marked, where rows are.
struct Follower<'a> {
    accounts: &'a [Arc<Account>],
    confirmer: &'a Confirmer,
    marks: Option<&'a Marks>,
    /// Nothing is reached before rows of the table are delivered, wherever the log is.
    table_first: bool,
    status: &'a PipelineStatus,
}

impl Follower<'_> {
    /// Runs until the target is reached, or until something must be read again.
    async fn run(&self, start: Position, target: Option<&Position>, progress: &Notify) -> Ended {
        let reached = |position: &Position| target.is_some_and(|target| position.covers(target));
        self.status.confirmed(&start);
        // Whoever is paused does not keep the others from having caught up; whoever is to be tried again does.
        let counts = |account: &Account| !matches!(account.status.state(), State::Paused | State::Failed);
        let nobody = !self.accounts.iter().any(|account| counts(account));
        if (reached(&start) && !self.table_first) || (nobody && target.is_some()) {
            return Ended::CaughtUp;
        }
        loop {
            let moved = self.advance();
            // Also when nobody has moved: one that held the others back may have been let go, and rows were marked.
            if !moved && !self.confirm() {
                return Ended::Anew;
            }
            let marked = || self.marks.is_none_or(|marks| marks.due() == 0);
            if target.is_some() && self.lowest(counts).is_some_and(|position| reached(&position)) && marked() {
                return Ended::CaughtUp;
            }
            if !moved {
                progress.notified().await;
            }
        }
    }

    /// Moves every watermark, and confirms the lowest; says whether any has moved.
    fn advance(&self) -> bool {
        let mut moved = false;
        for account in self.accounts {
            if let Some(advanced) = account.advance() {
                self.status.advanced(&account.status, &advanced);
                moved = true;
            }
        }
        if moved {
            self.confirm();
        }
        moved
    }

    /// Says whether all that was passed had been noted; if not, it must be read again to be marked.
    fn confirm(&self) -> bool {
        let lowest = self.lowest_account(|account| !account.is_let_go());
        let position = match (lowest, self.marks) {
            (None, _) => None,
            (Some(lowest), None) => lowest.end(),
            (Some(lowest), Some(marks)) => match marks.passed(lowest.finished()) {
                Passed::Upto(position) => {
                    self.status.source.marking.set_waiting(marks.due());
                    position
                }
                Passed::Unnoted => return false,
            },
        };
        if let Some(position) = position {
            // One that was not told is told with the next.
            if failpoints::reach("confirming").is_err() {
                return true;
            }
            self.status.confirmed(&position);
            self.confirmer.confirm(&position);
            let _ = failpoints::reach("confirmed");
        }
        true
    }

    /// Waits for the last marks, until the deadline.
    async fn finish(&self, marks: &Marks, deadline: Instant, progress: &Notify) {
        marks.hurry();
        while self.confirm() && marks.due() > 0 {
            if tokio::time::timeout_at(deadline, progress.notified()).await.is_err() {
                tracing::warn!(rows = marks.due(), "not marked before the deadline: they will be delivered again");
                return;
            }
        }
    }

    fn lowest_account(&self, counts: impl Fn(&Account) -> bool) -> Option<&Arc<Account>> {
        self.accounts.iter().filter(|account| counts(account)).min_by_key(|account| account.finished())
    }

    /// The last commit that all of these have passed. Every window counts the same chunks, so that of two watermarks
    /// the one with fewer chunks is the lower.
    fn lowest(&self, counts: impl Fn(&Account) -> bool) -> Option<Position> {
        self.lowest_account(counts).and_then(|account| account.end())
    }
}

/// Reads, and hands out.
struct Pump<'a, 'p> {
    publishers: &'a mut [Publisher<'p>],
    /// Which events of the chunk somebody wants.
    matched: Vec<bool>,
    /// Where rows are noted that are to be marked.
    marks: Option<&'a Marks>,
    status: &'a PipelineStatus,
}

impl Pump<'_, '_> {
    /// Reads and enqueues until something fails.
    async fn run(&mut self, reader: &mut Reader) -> Failure {
        let mut chunk = Chunk::default();
        loop {
            if let Err(failure) = self.step(reader, &mut chunk).await {
                return failure;
            }
        }
    }

    /// What may be claimed; nothing when all are stopped. A log is read whatever it brings, and the windows wait with it.
    async fn room(&mut self, batch: usize) -> Option<Room> {
        let mut room = None;
        for publisher in self.publishers.iter_mut() {
            let account = &publisher.account;
            let (events, bytes) = tokio::select! {
                room = account.window.until_room(batch) => room,
                () = account.until_stopped() => continue,
            };
            let before: Room = room.unwrap_or(Room::ENDLESS);
            room = Some(Room { events: before.events.min(events), bytes: before.bytes.min(bytes) });
        }
        room
    }

    /// When the next transaction of a publisher is to be committed.
    fn due(&self) -> Option<Instant> {
        self.publishers.iter().filter(|publisher| !publisher.account.is_stopped()).filter_map(Publisher::due).min()
    }

    /// Commits the transactions whose time has come.
    async fn commit(&mut self) -> Result<(), Failure> {
        let lone = self.publishers.len() == 1;
        let now = Instant::now();
        for publisher in self.publishers.iter_mut().filter(|publisher| publisher.due().is_some_and(|due| due <= now)) {
            match publisher.commit().await {
                Ok(()) => {}
                Err(failure) if lone => return Err(failure),
                Err(failure) => {
                    publisher.gone = true;
                    publisher.account.fail(failure);
                }
            }
        }
        Ok(())
    }

    async fn step(&mut self, reader: &mut Reader, chunk: &mut Chunk) -> Result<(), Failure> {
        if self.publishers.iter().all(|publisher| publisher.gone) {
            // Nothing of what follows is wanted in this generation.
            return std::future::pending().await;
        }
        let room = match reader.claims() {
            None => Room::ENDLESS,
            Some(batch) => match self.room(batch).await {
                Some(room) => room,
                // Nobody takes what would be claimed.
                None => return std::future::pending().await,
            },
        };
        // What one that stays behind has not had is never behind the watermark of this generation, and is read again.
        self.marks = self.marks.filter(|_| !self.publishers.iter().any(|one| one.gone && !one.account.is_let_go()));
        if let Some(marks) = self.marks {
            let mut room = std::pin::pin!(marks.until_room());
            loop {
                tokio::select! {
                    () = &mut room => break,
                    // Only what is committed is marked.
                    () = until(self.due()) => self.commit().await?,
                }
            }
        }
        {
            let mut next = std::pin::pin!(reader.next(chunk, room));
            loop {
                tokio::select! {
                    read = &mut next => break read?,
                    () = until(self.due()) => self.commit().await?,
                }
            }
        }
        if let Some(marks) = self.marks {
            marks.note(chunk);
        }
        failpoints::reach("decoded")?;
        self.status.read(chunk);
        let lone = self.publishers.len() == 1;
        let selective = self.publishers.iter().all(|publisher| publisher.selection.is_some() && !publisher.gone);
        self.matched.clear();
        if selective {
            self.matched.resize(chunk.events().len(), false);
        }
        for publisher in self.publishers.iter_mut().filter(|publisher| !publisher.gone) {
            match publisher.take(chunk, &mut self.matched).await {
                Ok(()) => {}
                Err(failure) if lone => return Err(failure),
                Err(failure) => {
                    publisher.gone = true;
                    publisher.account.fail(failure);
                }
            }
        }
        let unmatched = self.matched.iter().filter(|matched| !**matched).count();
        self.status.metrics.unmatched.inc_by(unmatched as u64);
        Ok(())
    }
}
