//! What is in flight, in order: admitted chunk by chunk, resolved record by record in any order, finished
//! contiguously.
//!
//! ```text
//!            watermark                                     next
//!               ▼                                           ▼
//!   … done done │ 3 left │ done │ 1 left, unsealed │ … free …
//!               └ head: the position of the last finished chunk before it is what may be confirmed
//! ```
//!
//! A chunk takes one slot of a ring; a record carries only its chunk's sequence number as its receipt. Resolving a
//! record is one atomic decrement, from any thread. The window is the only place of the data's path that waits:
//! when it is full the source is not read, so TCP slows the server, and memory stays bounded whatever the database
//! does. It does no I/O and knows neither databases nor brokers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::Notify;

use crate::event::CommitEnd;
use crate::sink::SinkFailure;

/// How much may be in flight. A chunk larger than the whole window is let in when the window is empty.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub events: usize,
    pub bytes: usize,
}

/// Stands for a chunk in every one of its records; fits an rdkafka opaque, so nothing is allocated per record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt(pub usize);

/// Chunks in flight at the most. With one event a chunk and 10 ms to an acknowledgement this is 400,000 events/s.
const SLOTS: usize = 4096;

struct Slot {
    /// Records not yet acknowledged, plus one until the chunk is sealed.
    pending: AtomicU32,
    events: AtomicUsize,
    bytes: AtomicUsize,
}

/// The order of chunks: one entry for each slot in use, oldest first.
#[derive(Default)]
struct Ring {
    head: usize,
    ends: VecDeque<Option<CommitEnd>>,
}

/// What has finished since the last look.
#[derive(Debug, Default)]
pub struct Advanced {
    /// The last commit that is finished, with everything before it.
    pub end: Option<CommitEnd>,
    pub events: usize,
    pub bytes: usize,
    /// How many chunks have finished since the window was made.
    pub finished: usize,
}

/// Who is woken by what happens in a window; several windows may wake the same tasks.
#[derive(Clone, Debug, Default)]
pub struct Bells {
    /// Rung when chunks have finished; for one task.
    pub progress: Arc<Notify>,
    /// Rung when the sink has failed; for one task.
    pub trouble: Arc<Notify>,
}

pub struct AckWindow {
    limits: Limits,
    slots: Box<[Slot]>,
    ring: Mutex<Ring>,
    events: AtomicUsize,
    bytes: AtomicUsize,
    /// Wakes the one task that admits.
    room: Notify,
    bells: Bells,
    failure: OnceLock<SinkFailure>,
    failed: Notify,
}

impl AckWindow {
    pub fn new(limits: Limits, bells: Bells) -> Self {
        let slot = || Slot { pending: AtomicU32::new(0), events: AtomicUsize::new(0), bytes: AtomicUsize::new(0) };
        AckWindow {
            limits,
            slots: (0..SLOTS).map(|_| slot()).collect(),
            ring: Mutex::default(),
            events: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            room: Notify::new(),
            bells,
            failure: OnceLock::new(),
            failed: Notify::new(),
        }
    }

    /// Waits until the chunk fits, then gives it the next place in order. For one task only; may be cancelled.
    pub async fn admit(&self, events: usize, bytes: usize) -> Receipt {
        loop {
            // The permit of `notify_one` is kept when it comes between the check and the wait.
            if let Some(receipt) = self.try_admit(events, bytes) {
                return receipt;
            }
            self.room.notified().await;
        }
    }

    /// How many events and bytes fit now.
    pub fn room(&self) -> (usize, usize) {
        let slots = SLOTS - self.ring().ends.len();
        let events = self.limits.events.saturating_sub(self.events.load(Ordering::Acquire));
        let bytes = self.limits.bytes.saturating_sub(self.bytes.load(Ordering::Acquire));
        if slots == 0 { (0, 0) } else { (events, bytes) }
    }

    /// Waits until so many events fit, or a good part of what ever could: many small claims would cost more than they bring.
    /// For the one task that admits; may be cancelled.
    pub async fn until_room(&self, wanted: usize) -> (usize, usize) {
        let least = wanted.min(self.limits.events / 4).max(1);
        loop {
            let (events, bytes) = self.room();
            if events >= least && bytes > self.limits.bytes / 4 {
                return (events, bytes);
            }
            self.room.notified().await;
        }
    }

    /// Gives the chunk the next place in order, if it fits. For one task only.
    pub fn try_admit(&self, events: usize, bytes: usize) -> Option<Receipt> {
        let mut ring = self.ring();
        if ring.ends.len() == SLOTS {
            return None;
        }
        let (held_events, held_bytes) = (self.events.load(Ordering::Acquire), self.bytes.load(Ordering::Acquire));
        let fits = held_events + events <= self.limits.events && held_bytes + bytes <= self.limits.bytes;
        if !fits && held_events > 0 {
            return None;
        }
        let sequence = ring.head + ring.ends.len();
        let slot = &self.slots[sequence % SLOTS];
        slot.events.store(events, Ordering::Relaxed);
        slot.bytes.store(bytes, Ordering::Relaxed);
        slot.pending.store(1 + events as u32, Ordering::Release);
        self.events.fetch_add(events, Ordering::AcqRel);
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
        ring.ends.push_back(None);
        Some(Receipt(sequence))
    }

    /// Says that all of the chunk's records are enqueued, `unsent` of its events having needed none. Until then the
    /// chunk cannot finish, however quickly its records are acknowledged.
    pub fn seal(&self, receipt: Receipt, unsent: usize, end: Option<CommitEnd>) {
        {
            let mut ring = self.ring();
            let place = receipt.0 - ring.head;
            ring.ends[place] = end;
        }
        self.settle(receipt, 1 + unsent as u32);
    }

    /// One record of the chunk is acknowledged. Any thread, any order.
    pub fn resolve(&self, receipt: Receipt) {
        self.settle(receipt, 1);
    }

    /// So many records of the chunk are acknowledged at once.
    pub fn resolve_several(&self, receipt: Receipt, records: u32) {
        self.settle(receipt, records);
    }

    fn settle(&self, receipt: Receipt, records: u32) {
        let slot = &self.slots[receipt.0 % SLOTS];
        // The slot may be reused as soon as it reaches zero and the watermark has passed it, so its size is read first.
        let (events, bytes) = (slot.events.load(Ordering::Relaxed), slot.bytes.load(Ordering::Relaxed));
        let before = slot.pending.fetch_sub(records, Ordering::AcqRel);
        debug_assert!(before >= records, "a receipt was resolved more often than it was given out");
        if before == records {
            self.events.fetch_sub(events, Ordering::AcqRel);
            self.bytes.fetch_sub(bytes, Ordering::AcqRel);
            self.bells.progress.notify_one();
            self.room.notify_one();
        }
    }

    /// The sink can take no more from this window: what is unresolved stays unconfirmed and is read again.
    pub fn fail(&self, failure: SinkFailure) {
        if self.failure.set(failure).is_ok() {
            self.failed.notify_one();
            self.bells.trouble.notify_one();
        }
    }

    /// Why the sink has failed, if it has.
    pub fn failure(&self) -> Option<SinkFailure> {
        self.failure.get().cloned()
    }

    /// Resolves when the sink has failed. For one task.
    pub async fn failed(&self) -> SinkFailure {
        loop {
            if let Some(failure) = self.failure() {
                return failure;
            }
            self.failed.notified().await;
        }
    }

    /// Waits until chunks have finished contiguously, and returns what they were. For one task only; may be cancelled.
    pub async fn watermark(&self) -> Advanced {
        loop {
            if let Some(advanced) = self.advance() {
                return advanced;
            }
            self.bells.progress.notified().await;
        }
    }

    /// Moves past every finished chunk at the head.
    pub fn advance(&self) -> Option<Advanced> {
        let mut advanced = None;
        let mut ring = self.ring();
        while !ring.ends.is_empty() {
            let slot = &self.slots[ring.head % SLOTS];
            if slot.pending.load(Ordering::Acquire) != 0 {
                break;
            }
            let sum: &mut Advanced = advanced.get_or_insert_default();
            sum.events += slot.events.load(Ordering::Relaxed);
            sum.bytes += slot.bytes.load(Ordering::Relaxed);
            ring.head += 1;
            if let Some(end) = ring.ends.pop_front().flatten() {
                sum.end = Some(end);
            }
        }
        if let Some(sum) = &mut advanced {
            sum.finished = ring.head;
            // Freed slots make room as well as freed bytes.
            self.room.notify_one();
        }
        advanced
    }

    /// Events admitted and not yet acknowledged.
    pub fn in_flight(&self) -> usize {
        self.events.load(Ordering::Acquire)
    }

    /// Whether everything admitted has finished and the watermark has passed it.
    pub fn is_empty(&self) -> bool {
        self.ring().ends.is_empty()
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        // No code that holds the lock can leave the ring half changed.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Micros;
    use crate::position::{Lsn, Position};
    use proptest::prelude::*;

    fn window(events: usize, bytes: usize) -> AckWindow {
        AckWindow::new(Limits { events, bytes }, Bells::default())
    }

    fn end(lsn: u64) -> Option<CommitEnd> {
        Some(CommitEnd { position: Position::Postgres(Lsn(lsn)), committed_at: Micros(0) })
    }

    fn lsn(advanced: Option<Advanced>) -> Option<u64> {
        advanced.and_then(|advanced| advanced.end).map(|end| end.position.as_gauge())
    }

    #[test]
    fn the_watermark_waits_for_the_oldest_chunk() {
        let window = window(100, 100);
        let first = window.try_admit(1, 1).unwrap();
        let second = window.try_admit(1, 1).unwrap();
        window.seal(first, 0, end(1));
        window.seal(second, 0, end(2));
        window.resolve(second);
        assert_eq!(lsn(window.advance()), None);
        window.resolve(first);
        assert_eq!(lsn(window.advance()), Some(2));
        assert!(window.is_empty());
    }

    #[test]
    fn a_chunk_cannot_finish_before_it_is_sealed() {
        let window = window(100, 100);
        let receipt = window.try_admit(2, 1).unwrap();
        window.resolve(receipt);
        window.resolve(receipt);
        assert_eq!(lsn(window.advance()), None);
        window.seal(receipt, 0, end(7));
        assert_eq!(lsn(window.advance()), Some(7));
    }

    #[test]
    fn pieces_of_a_huge_commit_move_nothing_until_its_end() {
        let window = window(100, 100);
        for _ in 0..3 {
            let piece = window.try_admit(1, 1).unwrap();
            window.seal(piece, 0, None);
            window.resolve(piece);
            assert_eq!(lsn(window.advance()), None);
        }
        let last = window.try_admit(0, 0).unwrap();
        window.seal(last, 0, end(9));
        assert_eq!(lsn(window.advance()), Some(9));
    }

    #[test]
    fn a_full_window_admits_nothing_and_an_empty_one_anything() {
        let window = window(10, 1000);
        let large = window.try_admit(50, 9999).unwrap();
        assert!(window.try_admit(1, 1).is_none());
        window.seal(large, 50, None);
        window.advance();
        let receipt = window.try_admit(10, 1000).unwrap();
        assert!(window.try_admit(1, 0).is_none());
        window.seal(receipt, 10, None);
        assert!(window.try_admit(1, 0).is_some());
    }

    #[tokio::test]
    async fn a_waiting_admission_is_woken_by_the_last_acknowledgement() {
        let window = Arc::new(window(1, 100));
        let receipt = window.admit(1, 1).await;
        window.seal(receipt, 0, end(1));
        let waiting = tokio::spawn({
            let window = window.clone();
            async move { window.admit(1, 1).await }
        });
        tokio::task::yield_now().await;
        window.resolve(receipt);
        assert_ne!(waiting.await.unwrap(), receipt);
    }

    proptest! {
        /// Whatever the order of acknowledgements, the watermark is exactly the end of the longest finished prefix.
        #[test]
        fn the_watermark_is_the_longest_finished_prefix(sizes in prop::collection::vec(0usize..4, 1..40), order: u64) {
            let window = window(1000, 1000);
            let mut owed: Vec<(usize, Receipt)> = Vec::new();
            for (index, size) in sizes.iter().enumerate() {
                let receipt = window.try_admit(*size, *size).unwrap();
                window.seal(receipt, 0, end(index as u64 + 1));
                owed.extend(std::iter::repeat_n((index, receipt), *size));
            }
            let mut left = sizes;
            let mut random = order | 1;
            let mut seen = lsn(window.advance()).unwrap_or(0);
            while !owed.is_empty() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let (index, receipt) = owed.swap_remove((random >> 33) as usize % owed.len());
                window.resolve(receipt);
                left[index] -= 1;
                seen = lsn(window.advance()).unwrap_or(seen);
                let finished = left.iter().take_while(|left| **left == 0).count() as u64;
                prop_assert_eq!(seen, finished);
            }
            prop_assert_eq!(window.in_flight(), 0);
        }
    }
}
