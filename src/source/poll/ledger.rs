//! Which rows are on their way, and what became of them. No I/O: the claiming side adds batches, the publisher's side says
//! what was refused, and the marking side takes what is confirmed.
//!
//! ```text
//!   claim ──▶ [ batch 7 │ batch 8 │ batch 9 ] ──confirmed──▶ unmarked ──marked──▶ gone
//!                  │ refused: the row is marked for another try, its group waits
//! ```
//!
//! A group is the rows of one key in one table. When one of them is refused and may be tried again, those behind it must
//! wait: what is already on its way is given back, and the group is not claimed until all of that is written to the table
//! and the pause is over. So the refused row is the first of its group again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// A claimed row, as the table has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    pub id: Box<str>,
    /// How often it has failed.
    pub attempts: u32,
    /// How often it may; `None`: as often as any other.
    pub most: Option<u32>,
}

/// What is written of a row that was not delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It was refused, and is tried again after the pause.
    Retry { why: String, pause: Duration },
    /// It was refused for good.
    Fail { why: String },
    /// Another of its group has to go first.
    Release,
}

/// What becomes of a row that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is tried again; its group waits.
    Again,
    /// It has failed for good: it goes to the dead-letter place, if there is one.
    Failed,
}

/// One claim's rows.
#[derive(Clone, Debug)]
pub struct Batch {
    pub number: u64,
    pub table: u32,
    first_row: u64,
    rows: Vec<Claimed>,
    marks: Vec<(u32, Mark)>,
}

impl Batch {
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.rows.iter().map(|row| &*row.id)
    }

    /// Rows that were delivered.
    pub fn done(&self) -> Vec<&str> {
        let marked: HashSet<u32> = self.marks.iter().map(|(at, _)| *at).collect();
        self.rows
            .iter()
            .enumerate()
            .filter(|(at, _)| marked.is_empty() || !marked.contains(&(*at as u32)))
            .map(|(_, row)| &*row.id)
            .collect()
    }

    /// Rows that were not, and what is written of them.
    pub fn marks(&self) -> impl Iterator<Item = (&Claimed, &Mark)> {
        self.marks.iter().map(|(at, mark)| (&self.rows[*at as usize], mark))
    }

    /// Rows that are given back as they are.
    pub fn released(&self) -> Vec<&str> {
        self.marks().filter(|(_, mark)| **mark == Mark::Release).map(|(row, _)| &*row.id).collect()
    }

    /// Rows that were refused and are tried again.
    pub fn retried(&self) -> Vec<Refused<'_>> {
        let retried = self.marks().filter_map(|(row, mark)| match mark {
            Mark::Retry { why, pause } => Some(Refused { id: &row.id, attempts: row.attempts, why, pause: *pause }),
            _ => None,
        });
        retried.collect()
    }

    /// Rows that were refused for good.
    pub fn failed(&self) -> Vec<Refused<'_>> {
        let failed = self.marks().filter_map(|(row, mark)| match mark {
            Mark::Fail { why } => Some(Refused { id: &row.id, attempts: row.attempts, why, pause: Duration::ZERO }),
            _ => None,
        });
        failed.collect()
    }
}

/// A row that was refused.
#[derive(Clone, Copy, Debug)]
pub struct Refused<'a> {
    pub id: &'a str,
    /// How often it had failed before: what is written once must not be counted twice.
    pub attempts: u32,
    pub why: &'a str,
    pub pause: Duration,
}

/// How failures are counted.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub most: u32,
    pub counts_last: bool,
    /// A row that can never be delivered is not tried again.
    pub fails_at_once: bool,
    pub first_backoff: Duration,
    pub longest_backoff: Duration,
}

impl Patience {
    fn allows_another(&self, row: &Claimed) -> bool {
        row.attempts.saturating_add(u32::from(self.counts_last)) < row.most.unwrap_or(self.most)
    }

    fn pause(&self, attempts: u32) -> Duration {
        self.first_backoff.saturating_mul(2_u32.saturating_pow(attempts)).min(self.longest_backoff)
    }
}

/// Rows of one key in one table.
type Group = (u32, Option<Box<[u8]>>);

struct Waiting {
    /// Batches up to this one may hold rows of the group.
    until: u64,
    due: Instant,
}

#[derive(Default)]
struct Inner {
    /// Claims that were begun.
    claims: u64,
    /// One of them is under way.
    claiming: bool,
    next_row: u64,
    batches: VecDeque<Batch>,
    unmarked: VecDeque<Arc<Batch>>,
    unmarked_rows: usize,
    waiting: HashMap<Group, Waiting>,
    /// Rows on their way, where the table does not say so.
    under_way: HashSet<(u32, Box<str>)>,
    /// Those of them that were written while a claim was under way, which may have read them before.
    lately: HashSet<(u32, Box<str>)>,
}

impl Inner {
    fn batch_of(&mut self, row: u64) -> Option<&mut Batch> {
        let after = self.batches.partition_point(|batch| batch.first_row <= row);
        let batch = self.batches.get_mut(after.checked_sub(1)?)?;
        (row - batch.first_row < batch.rows.len() as u64).then_some(batch)
    }

    /// Every batch up to this one is written to the table.
    fn written_through(&self) -> u64 {
        let oldest = self.unmarked.front().map(|batch| batch.number).or(self.batches.front().map(|batch| batch.number));
        match (oldest, self.claiming) {
            (Some(number), _) => number - 1,
            (None, true) => self.claims - 1,
            (None, false) => self.claims,
        }
    }
}

/// What must not be claimed of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusion {
    /// Keys of groups that wait; `None` is the group of rows without a key.
    pub keys: Vec<Option<Box<[u8]>>>,
}

pub struct Ledger {
    patience: Patience,
    inner: Mutex<Inner>,
    waiting: AtomicUsize,
    /// Rung when a group may be claimed again sooner than was thought, or rows were written.
    pub changed: Notify,
    /// Rung when rows were written; for the one task that reads.
    written: Notify,
}

impl Ledger {
    pub fn new(patience: Patience) -> Self {
        Ledger {
            patience,
            inner: Mutex::default(),
            waiting: AtomicUsize::new(0),
            changed: Notify::new(),
            written: Notify::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new generation: what was on its way is claimed anew, what was confirmed is still to be written.
    pub fn begin_anew(&self) {
        let mut inner = self.inner();
        inner.batches.clear();
        inner.under_way.clear();
        inner.claiming = false;
        let unmarked: Vec<_> = inner.unmarked.iter().cloned().collect();
        for batch in unmarked {
            inner.under_way.extend(batch.ids().map(|id| (batch.table, id.into())));
        }
    }

    /// A group whose first row waits, as the table says when a leader begins.
    pub fn wait_for(&self, table: u32, key: Option<&[u8]>, pause: Duration) {
        let mut inner = self.inner();
        let waiting = Waiting { until: 0, due: Instant::now() + pause };
        inner.waiting.entry((table, key.map(Into::into))).or_insert(waiting);
        self.waiting.store(inner.waiting.len(), Ordering::Release);
    }

    /// Lets go of groups that need not wait any longer; says whether there were any. What comes first of them must then be
    /// claimed before anything else of them is.
    pub fn lapse(&self) -> bool {
        let mut inner = self.inner();
        let (through, now) = (inner.written_through(), Instant::now());
        let before = inner.waiting.len();
        inner.waiting.retain(|_, waiting| waiting.until > through || waiting.due > now);
        self.waiting.store(inner.waiting.len(), Ordering::Release);
        inner.waiting.len() < before
    }

    /// Begins a claim, and says which groups must be left out.
    pub fn begin_claim(&self, table: u32) -> (u64, Exclusion) {
        let mut inner = self.inner();
        inner.claims += 1;
        inner.claiming = true;
        let keys = inner.waiting.keys().filter(|(of, _)| *of == table).map(|(_, key)| key.clone()).collect();
        (inner.claims, Exclusion { keys })
    }

    /// Ends a claim: its rows are on their way. Returns the number of the first.
    pub fn claimed(&self, number: u64, table: u32, rows: Vec<Claimed>, remember: bool) -> u64 {
        let mut inner = self.inner();
        inner.claiming = false;
        inner.lately.clear();
        let first_row = inner.next_row;
        if rows.is_empty() {
            return first_row;
        }
        inner.next_row += rows.len() as u64;
        if remember {
            inner.under_way.extend(rows.iter().map(|row| (table, row.id.clone())));
        }
        inner.batches.push_back(Batch { number, table, first_row, rows, marks: Vec::new() });
        first_row
    }

    pub fn is_under_way(&self, table: u32, id: &str) -> bool {
        let (inner, row) = (self.inner(), (table, Box::from(id)));
        inner.under_way.contains(&row) || inner.lately.contains(&row)
    }

    /// Whether the row must wait for another of its group; if so, it is given back.
    pub fn must_wait(&self, row: u64, key: Option<&[u8]>) -> bool {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut inner = self.inner();
        let Some(batch) = inner.batch_of(row) else { return false };
        let (table, at) = (batch.table, (row - batch.first_row) as u32);
        if !inner.waiting.contains_key(&(table, key.map(Into::into))) {
            return false;
        }
        if let Some(batch) = inner.batch_of(row) {
            batch.marks.push((at, Mark::Release));
        }
        true
    }

    /// Notes that a row was refused. One that can never be delivered is not tried again.
    pub fn refuse(&self, row: u64, key: Option<&[u8]>, why: &str, hopeless: bool) -> Verdict {
        let mut inner = self.inner();
        let until = inner.claims;
        let Some(batch) = inner.batch_of(row) else { return Verdict::Failed };
        let (table, at) = (batch.table, (row - batch.first_row) as usize);
        let refused = &batch.rows[at];
        if (hopeless && self.patience.fails_at_once) || !self.patience.allows_another(refused) {
            batch.marks.push((at as u32, Mark::Fail { why: why.to_owned() }));
            return Verdict::Failed;
        }
        let pause = self.patience.pause(refused.attempts);
        batch.marks.push((at as u32, Mark::Retry { why: why.to_owned(), pause }));
        inner.waiting.insert((table, key.map(Into::into)), Waiting { until, due: Instant::now() + pause });
        self.waiting.store(inner.waiting.len(), Ordering::Release);
        self.changed.notify_one();
        Verdict::Again
    }

    /// Everything up to this batch is delivered or has a mark.
    pub fn confirm(&self, number: u64) {
        let mut inner = self.inner();
        while inner.batches.front().is_some_and(|batch| batch.number <= number) {
            if let Some(batch) = inner.batches.pop_front() {
                inner.unmarked_rows += batch.rows.len();
                inner.unmarked.push_back(Arc::new(batch));
            }
        }
    }

    /// The oldest batch that is to be written to the table.
    pub fn unmarked(&self) -> Option<Arc<Batch>> {
        self.inner().unmarked.front().cloned()
    }

    /// The oldest of them was written.
    pub fn marked(&self) {
        let mut inner = self.inner();
        if let Some(batch) = inner.unmarked.pop_front() {
            if !inner.under_way.is_empty() {
                let claiming = inner.claiming;
                for id in batch.ids() {
                    let row = (batch.table, Box::from(id));
                    inner.under_way.remove(&row);
                    if claiming {
                        inner.lately.insert(row);
                    }
                }
            }
            inner.unmarked_rows -= batch.rows.len();
            self.written.notify_one();
            if !inner.waiting.is_empty() {
                self.changed.notify_one();
            }
        }
    }

    /// Waits until no more than so many rows are delivered and not yet written: they would all be repeated after a crash,
    /// and a table whose claims cost nothing would be read faster than it can be marked.
    pub async fn until_written(&self, most: usize) {
        while self.inner().unmarked_rows > most {
            self.written.notified().await;
        }
    }

    /// Rows that nobody has finished with, by table; for renewing and giving back.
    pub fn on_their_way(&self) -> Vec<(u32, Vec<Box<str>>)> {
        let inner = self.inner();
        let mut by_table: HashMap<u32, Vec<Box<str>>> = HashMap::new();
        for batch in &inner.batches {
            by_table.entry(batch.table).or_default().extend(batch.rows.iter().map(|row| row.id.clone()));
        }
        by_table.into_iter().collect()
    }

    /// When the next group may be claimed again; `None` when none waits.
    pub fn next_due(&self) -> Option<Instant> {
        let inner = self.inner();
        let through = inner.written_through();
        inner.waiting.values().filter(|waiting| waiting.until <= through).map(|waiting| waiting.due).min()
    }

    /// Whether rows are on their way, wait, or are still to be written.
    pub fn is_busy(&self) -> bool {
        let inner = self.inner();
        !inner.batches.is_empty() || !inner.unmarked.is_empty() || !inner.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience {
        most: 3,
        counts_last: true,
        fails_at_once: true,
        first_backoff: Duration::from_secs(1),
        longest_backoff: Duration::from_secs(60),
    };

    fn rows(ids: &[&str]) -> Vec<Claimed> {
        ids.iter().map(|id| Claimed { id: (*id).into(), attempts: 0, most: None }).collect()
    }

    fn claim(ledger: &Ledger, ids: &[&str]) -> (u64, u64) {
        let (number, _) = ledger.begin_claim(0);
        (number, ledger.claimed(number, 0, rows(ids), false))
    }

    fn excluded(ledger: &Ledger) -> usize {
        ledger.lapse();
        let (number, exclusion) = ledger.begin_claim(0);
        ledger.claimed(number, 0, Vec::new(), false);
        exclusion.keys.len()
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_row_holds_its_group_until_everything_of_it_is_written_and_the_pause_is_over() {
        let ledger = Ledger::new(PATIENCE);
        let (first, a) = claim(&ledger, &["a1", "b1", "a2"]);
        let (second, b) = claim(&ledger, &["a3", "b2"]);
        assert_eq!(ledger.refuse(a, Some(b"a"), "no", false), Verdict::Again);
        assert!(ledger.must_wait(a + 2, Some(b"a")), "one behind it in the batch");
        assert!(!ledger.must_wait(a + 1, Some(b"b")), "another key");
        assert!(ledger.must_wait(b, Some(b"a")), "one behind it in the next batch");
        ledger.confirm(first);
        let written = ledger.unmarked().unwrap();
        assert_eq!(written.done(), ["b1"]);
        assert_eq!(written.marks().count(), 2);
        ledger.marked();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(excluded(&ledger), 1, "the second batch has a row of it that is not written yet");
        ledger.confirm(second);
        assert_eq!(ledger.unmarked().unwrap().done(), ["b2"]);
        ledger.marked();
        assert_eq!(excluded(&ledger), 0);
        assert!(!ledger.is_busy());
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_is_waited_out() {
        let ledger = Ledger::new(PATIENCE);
        let (number, row) = claim(&ledger, &["a1"]);
        ledger.refuse(row, None, "no", false);
        ledger.confirm(number);
        ledger.marked();
        assert_eq!(excluded(&ledger), 1);
        tokio::time::advance(Duration::from_millis(1001)).await;
        assert_eq!(excluded(&ledger), 0);
    }

    #[test]
    fn the_last_try_and_a_hopeless_row_fail_for_good() {
        let ledger = Ledger::new(PATIENCE);
        let (number, _) = ledger.begin_claim(0);
        let tried = |attempts, most| Claimed { id: "x".into(), attempts, most };
        let row = ledger.claimed(number, 0, vec![tried(2, None), tried(2, Some(9)), tried(0, None)], false);
        assert_eq!(ledger.refuse(row, Some(b"a"), "no", false), Verdict::Failed);
        assert_eq!(ledger.refuse(row + 1, Some(b"b"), "no", false), Verdict::Again);
        assert_eq!(ledger.refuse(row + 2, Some(b"c"), "no", true), Verdict::Failed);
    }

    #[test]
    fn what_was_confirmed_outlives_a_generation_and_what_was_not_is_forgotten() {
        let ledger = Ledger::new(PATIENCE);
        let (first, _) = claim(&ledger, &["a"]);
        claim(&ledger, &["b"]);
        ledger.confirm(first);
        ledger.begin_anew();
        assert_eq!(ledger.unmarked().unwrap().done(), ["a"]);
        assert!(ledger.on_their_way().is_empty());
    }

    #[test]
    fn rows_that_only_memory_knows_of_are_under_way_until_they_are_written() {
        let ledger = Ledger::new(PATIENCE);
        let (number, _) = ledger.begin_claim(0);
        ledger.claimed(number, 0, rows(&["a"]), true);
        ledger.confirm(number);
        assert!(ledger.is_under_way(0, "a") && !ledger.is_under_way(1, "a"));
        // A claim that began before it was written may have seen it pending.
        let (number, _) = ledger.begin_claim(0);
        ledger.marked();
        assert!(ledger.is_under_way(0, "a"));
        ledger.claimed(number, 0, Vec::new(), true);
        assert!(!ledger.is_under_way(0, "a"));
    }
}
