//! The way back to the walsender: standby status updates on a task of their own.
//!
//! ```text
//!   d len  r  written:u64  flushed:u64  applied:u64  clock:i64  reply:u8
//! ```
//!
//! `flushed` is the confirmed position: the server may recycle the log before it. The task speaks at least every
//! second, whatever the reader is waiting for, so that a blocked sink never times the walsender out; at once when the
//! server asks; and soon after the confirmed position moves. It asks for an answer only when the server has been
//! silent for a whole beat: asking in every message would make the two sides ping-pong.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior};

use super::pgoutput::server_time_now;
use crate::position::Lsn;

/// Confirmations are gathered for this long.
const GATHER: Duration = Duration::from_millis(100);

/// What reader, confirmer and feedback share.
#[derive(Default)]
pub struct Progress {
    /// The latest commit end or keepalive that was read.
    pub received: AtomicU64,
    pub confirmed: AtomicU64,
    /// The latest commit end with an outbox event in it.
    pub eventful: AtomicU64,
    /// Frames read, to tell silence.
    pub frames: AtomicU64,
    pub asked: Notify,
    pub moved: Notify,
    pub finish: Notify,
}

impl Progress {
    pub fn confirmed(&self) -> Lsn {
        Lsn(self.confirmed.load(Ordering::Acquire))
    }

    pub fn confirm(&self, lsn: Lsn) {
        if self.confirmed.fetch_max(lsn.0, Ordering::AcqRel) < lsn.0 {
            self.moved.notify_one();
        }
    }
}

/// Runs until told to finish, or until the connection breaks (which the reader notices by itself).
pub async fn run(mut writer: impl AsyncWrite + Unpin, progress: Arc<Progress>, beat: Duration) {
    let mut ticks = tokio::time::interval(beat);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first message asks too, so that an idle server tells its position at once.
    let mut frames_at_tick = 0;
    let mut last_sent = Instant::now();
    loop {
        let mut ask = false;
        let mut finish = false;
        tokio::select! {
            _ = ticks.tick() => {
                let frames = progress.frames.load(Ordering::Relaxed);
                ask = frames == frames_at_tick;
                frames_at_tick = frames;
            }
            () = progress.asked.notified() => {}
            () = gathered(&progress, last_sent) => {}
            () = progress.finish.notified() => finish = true,
        }
        let mut frames = BytesMut::with_capacity(64);
        put_status(&mut frames, &progress, ask);
        if finish {
            // CopyDone: the server ends the stream and answers with its own.
            frames.extend_from_slice(b"c\0\0\0\x04");
        }
        last_sent = Instant::now();
        if writer.write_all(&frames).await.is_err() || writer.flush().await.is_err() || finish {
            return;
        }
    }
}

async fn gathered(progress: &Progress, last_sent: Instant) {
    progress.moved.notified().await;
    tokio::time::sleep_until(last_sent + GATHER).await;
}

fn put_status(frames: &mut BytesMut, progress: &Progress, ask: bool) {
    let confirmed = progress.confirmed();
    let received = progress.received.load(Ordering::Acquire).max(confirmed.0);
    frames.put_u8(b'd');
    frames.put_u32(4 + 1 + 3 * 8 + 8 + 1);
    frames.put_u8(b'r');
    frames.put_u64(received);
    frames.put_u64(confirmed.0);
    frames.put_u64(confirmed.0);
    frames.put_i64(server_time_now());
    frames.put_u8(u8::from(ask));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    const STATUS: usize = 39;

    async fn next(stream: &mut (impl AsyncReadExt + Unpin)) -> (u64, u64, bool) {
        let mut frame = [0; STATUS];
        stream.read_exact(&mut frame).await.unwrap();
        assert_eq!(&frame[..6], b"d\0\0\0\x26r");
        let number = |at: usize| u64::from_be_bytes(frame[at..at + 8].try_into().unwrap());
        (number(6), number(14), frame[38] == 1)
    }

    #[tokio::test(start_paused = true)]
    async fn the_server_hears_every_beat_at_once_when_it_asks_and_when_the_position_moves() {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let progress = Arc::new(Progress::default());
        progress.received.store(70, Ordering::Release);
        let task = tokio::spawn(run(ours, progress.clone(), Duration::from_secs(1)));
        assert_eq!(next(&mut theirs).await, (70, 0, true), "the first one asks");
        progress.frames.fetch_add(1, Ordering::Relaxed);
        assert_eq!(next(&mut theirs).await, (70, 0, false), "the server was not silent");
        assert_eq!(next(&mut theirs).await, (70, 0, true), "it was");

        let before = Instant::now();
        progress.asked.notify_one();
        next(&mut theirs).await;
        assert!(before.elapsed() < Duration::from_millis(10));

        progress.confirm(Lsn(60));
        assert_eq!(next(&mut theirs).await, (70, 60, false));
        assert!(before.elapsed() < Duration::from_millis(300));
        progress.confirm(Lsn(50));
        assert_eq!(progress.confirmed(), Lsn(60), "a position never moves back");

        progress.confirm(Lsn(65));
        progress.finish.notify_one();
        let mut last = (0, 0, false);
        while !task.is_finished() {
            last = next(&mut theirs).await;
            tokio::task::yield_now().await;
        }
        assert_eq!(last.1, 65);
        let mut done = [0; 5];
        theirs.read_exact(&mut done).await.unwrap();
        assert_eq!(&done, b"c\0\0\0\x04");
    }
}
