//! The ordinary connection beside the stream: keeps the checkpoint row, watches the slot, and notices a shutdown.
//!
//! A fast shutdown of the server waits until every walsender's client has confirmed all that was sent; with a broker
//! that does not answer it would wait for ever. This connection is ended first (57P01), and that raises the alarm
//! which makes the relay drop the stream at once; what was unconfirmed comes again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::checkpoint::{self, Checkpoint, SnapshotState};
use super::feedback::Progress;
use super::slot;
use super::sql::SqlSession;
use crate::failpoints;
use crate::position::Lsn;
use crate::source::{SourceFailure, SourceStats};

/// How often the slot is looked at.
const LOOK: Duration = Duration::from_secs(5);

/// Without events the row follows the log only in strides, so that its own write is never a reason to write again.
const STRIDE: u64 = 64 << 20;

pub struct Keeper {
    pub session: Arc<SqlSession>,
    pub pipeline: String,
    pub slot: String,
    pub version: u32,
    pub checkpoint: Checkpoint,
    /// Where the snapshot ends, while it is being delivered.
    pub snapshot_end: Option<Lsn>,
    pub progress: Arc<Progress>,
    pub stats: Arc<SourceStats>,
    /// The row is written at most this often while events flow. A crash replays from the slot, not from the row.
    pub interval: Duration,
    /// Whether the last look found the slot in danger: said once, not at every look.
    pub warned: bool,
}

impl Keeper {
    /// Runs until asked to finish (then writes the row once more) or until the connection fails, which is the alarm.
    pub async fn run(mut self, mut finish: oneshot::Receiver<()>) -> Result<(), SourceFailure> {
        let session = self.session.clone();
        let mut look = tokio::time::interval(LOOK);
        let mut write = tokio::time::interval_at(tokio::time::Instant::now() + self.interval, self.interval);
        let mut snapshot = tokio::time::interval(Duration::from_millis(200));
        loop {
            tokio::select! {
                failure = session.closed() => return Err(failure),
                _ = &mut finish => {
                    self.write_if_due(1).await?;
                    return Ok(());
                }
                _ = look.tick() => self.look().await?,
                _ = write.tick() => self.write_if_due(STRIDE).await?,
                _ = snapshot.tick(), if self.snapshot_end.is_some() => self.write_if_due(STRIDE).await?,
            }
        }
    }

    async fn look(&mut self) -> Result<(), SourceFailure> {
        let Some(state) = slot::state(&self.session, &self.slot, self.version).await? else { return Ok(()) };
        self.stats.retained_bytes.store(state.retained_bytes(), Ordering::Relaxed);
        self.stats.server_position.fetch_max(state.current.0, Ordering::Relaxed);
        let narrow = state.narrow();
        if let Some(room) = narrow.filter(|_| !self.warned) {
            tracing::warn!(
                slot = self.slot,
                room_bytes = room,
                "the slot is close to max_slot_wal_keep_size: when the room is used up the server drops the log it needs"
            );
        }
        self.warned = narrow.is_some();
        Ok(())
    }

    async fn write_if_due(&mut self, stride: u64) -> Result<(), SourceFailure> {
        let confirmed = self.progress.confirmed();
        let snapshot_done = self.snapshot_end.is_some_and(|end| confirmed >= end);
        let eventful = Lsn(self.progress.eventful.load(Ordering::Acquire).min(confirmed.0));
        let due = eventful > self.checkpoint.position || confirmed.bytes_since(self.checkpoint.position) >= stride;
        if !due && !snapshot_done {
            return Ok(());
        }
        if snapshot_done {
            self.checkpoint.snapshot = SnapshotState::Done;
            self.snapshot_end = None;
        }
        self.checkpoint.position = confirmed.max(self.checkpoint.position);
        failpoints::reach("storing")?;
        checkpoint::store(&self.session, &self.pipeline, &self.checkpoint).await?;
        if snapshot_done {
            self.stats.gap.end();
        }
        Ok(failpoints::reach("stored")?)
    }
}
