//! The ordinary connection beside the stream: it holds the pipeline's lock, keeps the checkpoint, and looks at the log.
//!
//! The lock is a `GET_LOCK` of this connection: whoever's connection dies has lost it, and whoever waits for it is woken
//! by the server at once. So a failure of this connection is the alarm that ends the generation.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::Memory;
use super::checkpoint::Place;
use super::position::BinlogPosition;
use super::server::Server;
use super::session::{Session, literal};
use crate::checkpoint::{Checkpoint, SnapshotState};
use crate::failpoints;
use crate::source::{SourceFailure, SourceStats};

/// How often the log's files are looked at.
const LOOK: Duration = Duration::from_secs(5);

/// Transactions without outbox rows move the checkpoint too, but with less hurry.
const IDLE_CHECKPOINT: Duration = Duration::from_secs(5);

/// How often the lock's connection is asked whether it lives.
const BEAT: Duration = Duration::from_secs(1);
/// A server that does not answer the beat for this long is as good as gone.
const BEAT_TIMEOUT: Duration = Duration::from_secs(10);

/// After so long without a word the server lets a leader go that is cut off, in seconds. Longer than [`BEAT_TIMEOUT`], so
/// that the leader knows of it before anybody else leads.
const SILENT_LEADER: u64 = 15;

pub struct Keeper {
    pub session: Session,
    pub server: Server,
    pub place: Place,
    pub checkpoint: Checkpoint,
    pub confirmed: watch::Receiver<BinlogPosition>,
    /// Where the snapshot ends, while it is being delivered.
    pub snapshot_end: Option<BinlogPosition>,
    pub stats: Arc<SourceStats>,
    pub interval: Duration,
    /// What the stored checkpoint had seen.
    pub stored: BinlogPosition,
    pub stored_at: Instant,
    pub memory: Arc<Memory>,
    pub warned: bool,
}

impl Keeper {
    /// Runs until asked to finish (then stores the position once more) or until the connection fails.
    pub async fn run(mut self, mut finish: oneshot::Receiver<()>) -> Result<(), SourceFailure> {
        let mut look = ticks(LOOK);
        let mut beat = ticks(BEAT);
        let mut write = ticks(self.interval.max(Duration::from_millis(10)));
        let mut snapshot = ticks(Duration::from_millis(200));
        loop {
            tokio::select! {
                _ = &mut finish => {
                    self.write(true).await?;
                    self.session.close().await;
                    return Ok(());
                }
                _ = look.tick() => answered(self.look()).await?,
                _ = beat.tick() => answered(self.session.execute("SELECT 1")).await?,
                _ = write.tick() => answered(self.write(false)).await?,
                _ = snapshot.tick(), if self.snapshot_end.is_some() => answered(self.write(false)).await?,
            }
        }
    }

    async fn look(&mut self) -> Result<(), SourceFailure> {
        let reach = self.server.reach(&mut self.session).await?;
        let confirmed = self.confirmed.borrow().clone();
        let behind = reach.bytes_after(&confirmed.file);
        self.stats.server_position.store(reach.end.as_gauge(), Ordering::Relaxed);
        self.stats.set_lag_bytes(behind);
        self.stats.retained_bytes.store(behind, Ordering::Relaxed);
        // The server deletes files by its own calendar, whoever still reads them.
        let oldest = reach.files.first().is_some_and(|(file, _)| *file == confirmed.file.file);
        let danger = oldest && reach.files.len() > 2 && self.server.expires > 0;
        if danger && !self.warned {
            tracing::warn!(
                file = confirmed.file.file,
                "reading is in the oldest log file that the server still has: it may delete it before it is read"
            );
        }
        self.warned = danger;
        Ok(())
    }

    async fn write(&mut self, last: bool) -> Result<(), SourceFailure> {
        let confirmed = self.confirmed.borrow().clone();
        // A log that was just begun anew ends at nothing, which is covered from the start: it must have been confirmed.
        let anything = self.confirmed.has_changed().unwrap_or(true);
        let snapshot_done = anything && self.snapshot_end.as_ref().is_some_and(|end| confirmed.covers(end));
        if self.snapshot_end.is_some() && !snapshot_done {
            return Ok(());
        }
        let eventful = confirmed.seen.eventful > self.stored.seen.eventful;
        // A checkpoint's own transaction is none of the others, so it is never a reason for the next one.
        let others = confirmed.seen.others > self.stored.seen.others;
        let due = eventful || others && (last || self.stored_at.elapsed() >= IDLE_CHECKPOINT) || snapshot_done;
        if !due {
            return Ok(());
        }
        if snapshot_done {
            self.checkpoint.snapshot = SnapshotState::Done;
            self.snapshot_end = None;
        }
        self.checkpoint.position = confirmed.to_string();
        self.checkpoint.file = confirmed.file.to_string();
        failpoints::reach("storing")?;
        self.place.save(&mut self.session, &self.checkpoint).await.map_err(|failure| match failure {
            // It could be written a moment ago; whether it can no longer is found out when the source is opened again.
            SourceFailure::NotReady { what, .. } => SourceFailure::Transient { what },
            other => other,
        })?;
        if snapshot_done {
            self.stats.gap.end();
        }
        failpoints::reach("stored")?;
        self.memory.remembered().stored = Some(confirmed.clone());
        self.stored = confirmed;
        self.stored_at = Instant::now();
        Ok(())
    }
}

/// Whoever waits longer may have lost the lock without knowing.
async fn answered(work: impl Future<Output = Result<(), SourceFailure>>) -> Result<(), SourceFailure> {
    let late = "the server, or the place of the checkpoint, does not answer while the pipeline's lock is held";
    tokio::time::timeout(BEAT_TIMEOUT, work).await.unwrap_or_else(|_| Err(SourceFailure::transient(late)))
}

fn ticks(period: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// The lock's name: at most 64 characters, and one for each database's pipelines.
pub fn lock_name(database: &str, pipeline: &str) -> String {
    let name = format!("outboxd:{database}:{pipeline}");
    if name.chars().count() <= 64 {
        return name;
    }
    let digest = ring::digest::digest(&ring::digest::SHA256, name.as_bytes());
    let hex: String = digest.as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("outboxd:{hex}")
}

/// Takes the pipeline's lock on this connection, or says who has it.
pub async fn take_lock(session: &mut Session, database: &str, pipeline: &str) -> Result<(), SourceFailure> {
    let name = literal(&lock_name(database, pipeline));
    if session.query_one(&format!("SELECT GET_LOCK({name}, 0)")).await?.number(0) == 1 {
        // By itself the server would wait for hours for a connection of which nobody told it that it is gone.
        return session.execute(&format!("SET SESSION wait_timeout = {SILENT_LEADER}")).await;
    }
    let holder = session.query_one(&format!("SELECT IS_USED_LOCK({name})")).await?.string(0);
    Err(SourceFailure::Held {
        what: format!("another instance runs pipeline `{pipeline}` (connection {holder} of {})", session.describe()),
    })
}

/// Waits until nobody holds the pipeline's lock. It is taken and let go again: whoever opens the source takes it anew.
pub async fn wait_for_lock(session: &mut Session, database: &str, pipeline: &str) -> Result<(), SourceFailure> {
    let name = literal(&lock_name(database, pipeline));
    // The server wakes us; now and then we look whether it is still there.
    while session.query_one(&format!("SELECT GET_LOCK({name}, 5)")).await?.number(0) != 1 {}
    session.execute(&format!("DO RELEASE_LOCK({name})")).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_a_name_that_the_server_takes() {
        assert_eq!(lock_name("shop", "orders"), "outboxd:shop:orders");
        let long = "x".repeat(100);
        let (one, other) = (lock_name("shop", &long), lock_name("shop", &format!("{long}y")));
        assert!(one.len() <= 64 && one != other, "{one} {other}");
    }
}
