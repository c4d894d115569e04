//! The task beside the stream: it renews the lease, and keeps the checkpoint.
//!
//! With the checkpoint in the source both are one write, which has to be made anyway: so an idle stream's position moves
//! without a write of its own. Elsewhere it is stored when something was delivered, or after a while.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::Memory;
use super::checkpoint::Place;
use super::lease::{Lease, RENEWAL, Renewed};
use super::token::StreamPosition;
use crate::checkpoint::{Checkpoint, CheckpointError, SnapshotState};
use crate::failpoints;
use crate::source::{SourceFailure, SourceStats};

/// How often a place outside of the source learns of progress without events.
const IDLE_CHECKPOINT: Duration = Duration::from_secs(60);

pub struct Keeper {
    pub lease: Lease,
    pub place: Place,
    pub checkpoint: Checkpoint,
    pub confirmed: watch::Receiver<StreamPosition>,
    /// Where the snapshot ends, while it is being delivered.
    pub snapshot_end: Option<StreamPosition>,
    pub interval: Duration,
    /// What is stored.
    pub stored: StreamPosition,
    pub stored_at: Instant,
    pub memory: Arc<Memory>,
    pub stats: Arc<SourceStats>,
}

/// A checkpoint on its way to a place outside of the source.
type Saving = Pin<Box<dyn Future<Output = (StreamPosition, Result<(), CheckpointError>)> + Send>>;

impl Keeper {
    /// Runs until asked to finish (then stores the position once more and lets the lease go), or until the lease is lost.
    pub async fn run(mut self, mut finish: oneshot::Receiver<()>) -> Result<(), SourceFailure> {
        let mut renew = ticks(RENEWAL);
        let mut write = ticks(self.interval.max(Duration::from_millis(10)));
        let validity = self.lease.validity.clone();
        // A broker that does not answer must not keep the lease from being renewed.
        let mut saving: Option<Saving> = None;
        let mut trouble = String::new();
        loop {
            let end = tokio::time::sleep_until(validity.deadline().into());
            let step = async {
                tokio::select! {
                    _ = renew.tick() => self.renew().await,
                    _ = write.tick() => match self.place {
                        Place::Document => self.write(false).await,
                        Place::Elsewhere(_) => {
                            if saving.is_none() {
                                saving = self.save(false);
                            }
                            Ok(Renewed::Held)
                        }
                    },
                    (position, saved) = under_way(&mut saving) => {
                        saving = None;
                        saved?;
                        self.stored(position);
                        Ok(Renewed::Held)
                    }
                }
            };
            let step = tokio::select! {
                biased;
                _ = &mut finish => break,
                () = end => {
                    let lost = "the pipeline's lease could not be renewed in time";
                    let why = if trouble.is_empty() { String::new() } else { format!(": {trouble}") };
                    return Err(SourceFailure::transient(format!("{lost}{why}")));
                }
                step = step => step,
            };
            match step {
                Ok(Renewed::Held) => trouble.clear(),
                Ok(Renewed::Lost) => return Err(self.lease.lost()),
                // An election takes a moment; the lease's end is the deadline.
                Err(SourceFailure::Transient { what }) => trouble = what,
                Err(failure) => return Err(passing(failure)),
            }
        }
        if let Some(saving) = saving {
            let (position, saved) = saving.await;
            saved?;
            self.stored(position);
        }
        match self.place {
            Place::Document => {
                self.write(true).await?;
            }
            Place::Elsewhere(_) => {
                if let Some(saving) = self.save(true) {
                    saving.await.1?;
                }
            }
        }
        self.lease.release().await?;
        Ok(())
    }

    /// Notes what was confirmed in the checkpoint; `None` while there is nothing to store.
    fn note(&mut self) -> Option<StreamPosition> {
        let confirmed = self.confirmed.borrow().clone();
        if let Some(end) = &self.snapshot_end {
            if !confirmed.covers(end) {
                return None;
            }
            self.checkpoint.snapshot = SnapshotState::Done;
            self.snapshot_end = None;
        }
        let token = confirmed.token.as_ref()?;
        self.checkpoint.position = token.to_string();
        Some(confirmed)
    }

    async fn renew(&mut self) -> Result<Renewed, SourceFailure> {
        let noted = match self.place {
            Place::Document => self.note(),
            Place::Elsewhere(_) => None,
        };
        let renewed = self.lease.renew(noted.is_some().then_some(&self.checkpoint)).await?;
        if let (Renewed::Held, Some(position)) = (&renewed, noted) {
            self.stored(position);
        }
        Ok(renewed)
    }

    /// The position, if it is to be stored now.
    fn due(&mut self, last: bool) -> Option<StreamPosition> {
        let snapshot = self.snapshot_end.is_some();
        let position = self.note()?;
        let eventful = position.eventful > self.stored.eventful;
        let moved = position.token != self.stored.token;
        let idle = moved && (last || self.stored_at.elapsed() >= IDLE_CHECKPOINT);
        (eventful || snapshot || idle).then_some(position)
    }

    async fn write(&mut self, last: bool) -> Result<Renewed, SourceFailure> {
        let Some(position) = self.due(last) else { return Ok(Renewed::Held) };
        failpoints::reach("storing")?;
        let renewed = self.lease.renew(Some(&self.checkpoint)).await?;
        failpoints::reach("stored")?;
        if let Renewed::Held = renewed {
            self.stored(position);
        }
        Ok(renewed)
    }

    /// Begins to store what is due outside of the source.
    fn save(&mut self, last: bool) -> Option<Saving> {
        // Whoever slept through the lease stores nothing.
        if matches!(self.place, Place::Document) || !self.lease.validity.holds() {
            return None;
        }
        let position = self.due(last)?;
        let Place::Elsewhere(store) = &self.place else { return None };
        let (store, checkpoint) = (store.clone(), self.checkpoint.clone());
        Some(Box::pin(async move {
            let saved = store.save(&checkpoint).await;
            (position, saved)
        }))
    }

    fn stored(&mut self, position: StreamPosition) {
        if self.checkpoint.snapshot == SnapshotState::Done {
            self.stats.gap.end();
        }
        self.memory.remembered().stored = Some(position.clone());
        self.stored = position;
        self.stored_at = Instant::now();
    }
}

/// It could be written a moment ago; whether it can no longer is found out when the source is opened again.
fn passing(failure: SourceFailure) -> SourceFailure {
    match failure {
        SourceFailure::NotReady { what, .. } => SourceFailure::Transient { what },
        other => other,
    }
}

/// Never, when nothing is under way.
async fn under_way(saving: &mut Option<Saving>) -> (StreamPosition, Result<(), CheckpointError>) {
    match saving {
        Some(saving) => saving.await,
        None => std::future::pending().await,
    }
}

fn ticks(period: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
