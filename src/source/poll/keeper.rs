//! The task beside the reader: it claims when it is asked to, and marks what was confirmed.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::ledger::Ledger;
use super::{Ask, Store};
use crate::config::PollSettings;
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Micros};
use crate::position::Position;
use crate::source::{SourceFailure, SourceStats};

/// How often the lead is made sure of.
const BEAT: Duration = Duration::from_secs(1);
/// A server that does not answer for so long may have let another lead.
pub(super) const BEAT_PATIENCE: Duration = Duration::from_secs(10);
/// After so long without a word the server lets a leader go that is cut off; later than the leader knows it itself.
pub(super) const SILENT_LEADER: Duration = Duration::from_secs(15);
/// How often the pending rows are counted, and how far.
const LOOK: Duration = Duration::from_secs(5);
const MOST_COUNTED: u64 = 100_000;

/// A claim that is wanted.
pub struct Request {
    pub limit: usize,
}

/// What a claim brought.
pub struct Brought {
    pub chunk: Chunk,
    /// There may be more at once.
    pub full: bool,
}

pub struct Keeper {
    pub claims: Store,
    pub marks: Store,
    pub ledger: Arc<Ledger>,
    pub settings: PollSettings,
    pub width: usize,
    /// Where a row has the moment that it was made.
    pub time_slot: Option<usize>,
    pub stats: Arc<SourceStats>,
    pub asked: mpsc::Receiver<Request>,
    pub brought: mpsc::Sender<Brought>,
    pub confirmed: watch::Receiver<u64>,
}

impl Keeper {
    /// Runs until asked to finish, or until the lead is lost or the database is away.
    pub async fn run(self, finish: oneshot::Receiver<()>) -> Result<(), SourceFailure> {
        let Keeper { claims, marks, ledger, settings, width, time_slot, stats, asked, brought, confirmed } = self;
        let tables = claims.tables();
        let (close, closing) = watch::channel(false);
        let mut claiming = Claiming {
            store: claims,
            ledger: ledger.clone(),
            settings: settings.clone(),
            width,
            time_slot,
            table: 0,
            with_failed: vec![true; tables],
            failed_at: Instant::now(),
            stats: stats.clone(),
        };
        let mut marking = Marking { store: marks, ledger, settings, stats };
        {
            let claims = claiming.run(asked, brought, closing);
            tokio::pin!(claims);
            {
                let marks = marking.run(confirmed);
                tokio::select! {
                    ended = &mut claims => return ended,
                    failure = marks => return Err(failure),
                    _ = finish => {}
                }
            }
            // A claim that is under way is seen through, so that its rows can be given back.
            let _ = close.send(true);
            claims.await?;
        }
        marking.finish().await?;
        claiming.store.release_lead().await;
        Ok(())
    }
}

struct Claiming {
    store: Store,
    ledger: Arc<Ledger>,
    settings: PollSettings,
    width: usize,
    time_slot: Option<usize>,
    /// The table whose turn it is.
    table: u32,
    /// In which tables rows are looked for that have failed and may be tried again.
    with_failed: Vec<bool>,
    /// When that was last begun.
    failed_at: Instant,
    stats: Arc<SourceStats>,
}

impl Claiming {
    async fn run(
        &mut self,
        mut asked: mpsc::Receiver<Request>,
        brought: mpsc::Sender<Brought>,
        closing: watch::Receiver<bool>,
    ) -> Result<(), SourceFailure> {
        let mut beat = ticks(BEAT);
        loop {
            tokio::select! {
                biased;
                () = closed(closing.clone()) => return Ok(()),
                _ = beat.tick() => {
                    let late = || Err(SourceFailure::transient("the server does not answer while its lock is held"));
                    tokio::time::timeout(BEAT_PATIENCE, self.store.beat()).await.unwrap_or_else(|_| late())?;
                }
                request = asked.recv() => match request {
                    Some(request) => {
                        let found = self.claim(request.limit.min(self.settings.batch)).await?;
                        // A reader that is gone has ended; what it was brought is given back.
                        let _ = brought.send(found).await;
                    }
                    None => {
                        closed(closing.clone()).await;
                        return Ok(());
                    }
                },
            }
        }
    }

    /// Claims from the first table that has something, beginning with the one whose turn it is.
    async fn claim(&mut self, limit: usize) -> Result<Brought, SourceFailure> {
        let lapsed = self.ledger.lapse();
        if lapsed {
            // What waited lies before the place where a paged table was left.
            self.store.begin_again();
        }
        let again = self.settings.scheme.failed_again.is_some();
        if again && (lapsed || self.failed_at.elapsed() >= self.settings.interval) {
            self.with_failed.fill(true);
            self.failed_at = Instant::now();
        }
        let tables = self.store.tables();
        for _ in 0..tables {
            let table = self.table as usize % tables;
            // Those first: they come before the others of their groups.
            if again && self.with_failed[table] {
                let found = self.claim_from(table as u32, limit, true).await?;
                if found.full || !found.chunk.events().is_empty() {
                    return Ok(found);
                }
                self.with_failed[table] = false;
            }
            let found = self.claim_from(table as u32, limit, false).await?;
            // The next table has its turn.
            self.table = self.table.wrapping_add(1);
            if found.full || !found.chunk.events().is_empty() {
                return Ok(Brought { full: found.full || tables > 1, ..found });
            }
        }
        Ok(Brought { chunk: Chunk::default(), full: false })
    }

    async fn claim_from(&mut self, table: u32, limit: usize, failed: bool) -> Result<Brought, SourceFailure> {
        let (number, excluded) = self.ledger.begin_claim(table);
        let mut chunk = Chunk::default();
        chunk.reset(self.width);
        chunk.begin_commit(Commit { id: CommitId::Polled(number), committed_at: Micros::now() });
        let ask = Ask { table, limit, failed, ledger: &self.ledger };
        let rows = self.store.claim(&ask, &excluded, &mut chunk).await?;
        self.stats.polled();
        let (count, claims) = (rows.len(), self.settings.scheme.claims());
        let full = if claims { count >= limit } else { self.store.has_more(table) };
        chunk.first_row = Some(self.ledger.claimed(number, table, rows, !claims));
        if count > 0 {
            let made = self.time_slot.and_then(|slot| chunk.field(chunk.events().first()?, slot));
            let made = made.and_then(|bytes| bytes.try_into().ok()).map(|bytes| Micros(i64::from_be_bytes(bytes)));
            let committed_at = made.unwrap_or_else(Micros::now);
            chunk.set_commit_time(committed_at);
            chunk.transactions = 1;
            chunk.catching_up = full;
            chunk.end = Some(CommitEnd { position: Position::Poll(number), committed_at });
        }
        Ok(Brought { chunk, full })
    }
}

struct Marking {
    store: Store,
    ledger: Arc<Ledger>,
    settings: PollSettings,
    stats: Arc<SourceStats>,
}

impl Marking {
    async fn run(&mut self, mut confirmed: watch::Receiver<u64>) -> SourceFailure {
        let third = (self.settings.lease / 3).max(Duration::from_millis(100));
        let (mut renew, mut recover) = (ticks(third), ticks(third.min(Duration::from_secs(60))));
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let step = tokio::select! {
                changed = confirmed.changed() => match changed {
                    Ok(()) => self.mark().await,
                    Err(_) => std::future::pending().await,
                },
                _ = renew.tick() => self.renew().await,
                _ = recover.tick() => self.store.recover(false).await.map(|recovered| {
                    if recovered > 0 {
                        tracing::warn!(rows = recovered, "rows whose lease had ended are pending again");
                    }
                }),
                _ = look.tick() => self.store.look(MOST_COUNTED, &self.stats).await,
            };
            if let Err(failure) = step {
                return failure;
            }
        }
    }

    async fn mark(&mut self) -> Result<(), SourceFailure> {
        while let Some(batch) = self.ledger.unmarked() {
            self.store.mark(&batch).await?;
            self.ledger.marked();
        }
        Ok(())
    }

    /// A broker that is slow must not make our rows look abandoned.
    async fn renew(&mut self) -> Result<(), SourceFailure> {
        if self.settings.scheme.renew.is_empty() {
            return Ok(());
        }
        for (table, ids) in self.ledger.on_their_way() {
            for some in ids.chunks(5000) {
                self.store.renew(table, some).await?;
            }
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), SourceFailure> {
        self.mark().await?;
        for (table, ids) in self.ledger.on_their_way() {
            for some in ids.chunks(5000) {
                self.store.give_back(table, some).await?;
            }
        }
        self.ledger.begin_anew();
        Ok(())
    }
}

/// Resolves when no more is to be claimed.
async fn closed(mut closing: watch::Receiver<bool>) {
    let _ = closing.wait_for(|closing| *closing).await;
}

fn ticks(period: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
