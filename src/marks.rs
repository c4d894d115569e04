//! Which rows are delivered and not yet marked so, between the watermark and the confirmation. No I/O: the pump notes what
//! was read, a publisher says what it parked, the follower says how far all have come, and the marker writes.
//!
//! ```text
//!   note ──▶ [ chunk │ chunk │ chunk ] ──passed──▶ [ chunk │ chunk ] ──written──▶ its end may be confirmed
//!              read, under way           watermark   delivered, due
//! ```
//!
//! The ids of a chunk's rows are kept in one buffer until they are written, and a chunk without rows costs nothing but its
//! end. What is kept is bounded: beyond the bound reading waits. A generation that ends forgets all of it, since what was not
//! confirmed is read again; only what was parked is remembered, because a publisher that has passed an event does not look
//! at it again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::event::Chunk;
use crate::position::Position;

/// Rows that one statement marks, at the most.
pub const MOST_AT_ONCE: usize = 1000;

/// How long the first delivered row waits for others, so that a statement is not spent on it alone.
const COMPANY: Duration = Duration::from_millis(100);

/// Stands for no table, in a run of rows.
const NO_ROW: u32 = u32::MAX;

/// The rows of one chunk.
#[derive(Debug, Default)]
pub struct Noted {
    first_row: u64,
    ids: Vec<u8>,
    /// Where the id of each row ends.
    ends: Vec<u32>,
    /// Up to which row they are of a table.
    runs: Vec<(u32, u32)>,
    parked: Vec<Parked>,
    transactions: Vec<u32>,
    end: Option<Position>,
}

/// A row whose event is in the dead-letter place.
#[derive(Clone, Debug)]
struct Parked {
    at: u32,
    publisher: usize,
    why: String,
}

/// A row, for the marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkedRow<'a> {
    pub table: u32,
    pub id: &'a [u8],
    /// Why it was parked, if it was.
    pub parked: Option<&'a str>,
}

impl Noted {
    fn of(chunk: &Chunk, slot: usize, tables: u32, first_row: u64) -> Self {
        let mut noted = Noted {
            first_row,
            end: chunk.end.as_ref().map(|end| end.position.clone()),
            transactions: chunk.transaction_ids.clone(),
            ends: Vec::with_capacity(chunk.events().len()),
            ..Noted::default()
        };
        for event in chunk.events() {
            // A logical message is of no table, and a row that could not be decoded may have lost its id.
            let id = chunk.field(event, slot).filter(|_| event.table < tables);
            noted.ids.extend_from_slice(id.unwrap_or_default());
            noted.ends.push(noted.ids.len() as u32);
            let table = if id.is_some() { event.table } else { NO_ROW };
            match noted.runs.last_mut() {
                Some((of, until)) if *of == table => *until = noted.ends.len() as u32,
                _ => noted.runs.push((table, noted.ends.len() as u32)),
            }
        }
        noted
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The transactions that made its rows, where they are known.
    pub fn transactions(&self) -> &[u32] {
        &self.transactions
    }

    fn id(&self, at: usize) -> &[u8] {
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        &self.ids[start..self.ends[at] as usize]
    }

    fn table(&self, at: usize) -> u32 {
        let run = self.runs.partition_point(|(_, until)| *until as usize <= at);
        self.runs.get(run).map_or(NO_ROW, |(table, _)| *table)
    }

    /// Its rows, without those that cannot be found again.
    pub fn rows(&self) -> impl Iterator<Item = MarkedRow<'_>> {
        let rows = (0..self.len()).map(|at| {
            let parked = self.parked.iter().find(|parked| parked.at as usize == at);
            MarkedRow { table: self.table(at), id: self.id(at), parked: parked.map(|parked| parked.why.as_str()) }
        });
        rows.filter(|row| row.table != NO_ROW)
    }
}

#[derive(Default)]
struct Inner {
    /// Chunks of this generation that were noted, and rows of them.
    chunks: usize,
    rows: u64,
    /// Those that are not behind the watermark.
    under_way: VecDeque<Noted>,
    /// Those that are and are to be written.
    due: VecDeque<Arc<Noted>>,
    due_rows: usize,
    kept: usize,
    /// The end of the last commit whose rows are all written, until it is asked for.
    confirmed: Option<Position>,
    /// Nothing more is read: what is due is not to wait for company.
    hurried: bool,
    /// Rows that earlier generations parked: who, and why.
    reasons: HashMap<(u32, Box<[u8]>), (usize, String)>,
    progress: Arc<Notify>,
}

impl Inner {
    /// Lets chunks go of which nothing is to be written.
    fn settle(&mut self) {
        while self.due.front().is_some_and(|noted| noted.is_empty()) {
            if let Some(end) = self.due.pop_front().and_then(|noted| noted.end.clone()) {
                self.confirmed = Some(end);
            }
        }
    }
}

/// How far the watermark is from what was noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Passed {
    /// Up to here it may be confirmed; `None` when that has not moved.
    Upto(Option<Position>),
    /// It has passed chunks that were not noted: they must be read again.
    Unnoted,
}

pub struct Marks {
    slot: usize,
    /// Tables have lower numbers than whatever else events come from.
    tables: u32,
    /// Rows that may be kept.
    most: usize,
    /// Publishers, as reasons name them; empty where there is only one.
    publishers: Vec<String>,
    inner: Mutex<Inner>,
    /// Rung when rows are due; for the marker.
    due: Notify,
    /// Rung when rows were written; for the one task that reads.
    room: Notify,
}

impl Marks {
    pub fn new(slot: usize, tables: usize, most: usize, publishers: Vec<String>) -> Self {
        let (inner, due, room) = (Mutex::default(), Notify::new(), Notify::new());
        Marks { slot, tables: tables as u32, most, publishers, inner, due, room }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new generation, whose follower is woken by `progress`.
    pub fn begin_anew(&self, progress: &Arc<Notify>) {
        let mut inner = self.inner();
        let reasons = std::mem::take(&mut inner.reasons);
        *inner = Inner { reasons, progress: progress.clone(), ..Inner::default() };
    }

    /// The generation is over; `finished` tells how many chunks each publisher has behind it.
    pub fn end(&self, finished: impl Fn(usize) -> usize) {
        let mut inner = self.inner();
        let Inner { under_way, due, reasons, chunks, .. } = &mut *inner;
        let first = *chunks - under_way.len();
        let waiting = under_way.iter().enumerate().map(|(at, noted)| (first + at, noted));
        let all = due.iter().map(|noted| (0, &**noted)).chain(waiting);
        for (chunk, noted) in all {
            // What was not acknowledged is tried again, and may fare better.
            for parked in noted.parked.iter().filter(|parked| chunk < finished(parked.publisher)) {
                let (table, id) = (noted.table(parked.at as usize), noted.id(parked.at as usize));
                reasons.insert((table, id.into()), (parked.publisher, parked.why.clone()));
            }
        }
    }

    /// Notes a chunk that was read, and gives its rows their numbers.
    pub fn note(&self, chunk: &mut Chunk) {
        let mut inner = self.inner();
        let mut noted = Noted::of(chunk, self.slot, self.tables, inner.rows);
        chunk.first_row = Some(inner.rows);
        if !inner.reasons.is_empty() {
            for at in 0..noted.len() {
                if let Some((publisher, why)) = inner.reasons.get(&(noted.table(at), noted.id(at).into())) {
                    noted.parked.push(Parked { at: at as u32, publisher: *publisher, why: why.clone() });
                }
            }
        }
        inner.rows += noted.len() as u64;
        inner.kept += noted.len();
        inner.chunks += 1;
        inner.under_way.push_back(noted);
    }

    /// Waits until so few rows are kept that more may be read.
    pub async fn until_room(&self) {
        while self.inner().kept >= self.most {
            self.room.notified().await;
        }
    }

    /// A row's event was parked.
    pub fn parked(&self, row: u64, publisher: usize, why: &str) {
        let mut inner = self.inner();
        let after = inner.under_way.partition_point(|noted| noted.first_row <= row);
        // Chunks without rows have the number of the next one that has some.
        let noted = inner.under_way.iter_mut().take(after).rev().find(|noted| !noted.is_empty());
        if let Some(noted) = noted.filter(|noted| row - noted.first_row < noted.len() as u64) {
            let at = (row - noted.first_row) as u32;
            noted.parked.retain(|parked| parked.at != at);
            let why = match self.publishers.get(publisher) {
                Some(name) => format!("{name}: {why}"),
                None => why.to_owned(),
            };
            noted.parked.push(Parked { at, publisher, why });
        }
    }

    /// So many chunks are behind the watermark of every publisher that counts.
    pub fn passed(&self, finished: usize) -> Passed {
        let mut inner = self.inner();
        if finished > inner.chunks {
            return Passed::Unnoted;
        }
        let before = inner.due_rows;
        while inner.chunks - inner.under_way.len() < finished {
            let Some(noted) = inner.under_way.pop_front() else { break };
            inner.due_rows += noted.len();
            inner.due.push_back(Arc::new(noted));
        }
        inner.settle();
        if inner.due_rows > before {
            self.due.notify_one();
        }
        Passed::Upto(inner.confirmed.take())
    }

    /// Waits until rows are due, and enough of them or long enough for a statement; gives the oldest of them.
    pub async fn next(&self) -> Vec<Arc<Noted>> {
        while self.inner().due_rows == 0 {
            self.due.notified().await;
        }
        let company = tokio::time::sleep(COMPANY);
        tokio::pin!(company);
        loop {
            {
                let inner = self.inner();
                if inner.due_rows >= MOST_AT_ONCE || inner.hurried {
                    break;
                }
            }
            tokio::select! {
                () = self.due.notified() => {}
                () = &mut company => break,
            }
        }
        let inner = self.inner();
        let (mut chosen, mut rows) = (Vec::new(), 0);
        for noted in &inner.due {
            if rows > 0 && rows + noted.len() > MOST_AT_ONCE {
                break;
            }
            rows += noted.len();
            chosen.push(noted.clone());
        }
        chosen
    }

    /// So many of the oldest chunks were written.
    pub fn written(&self, chunks: usize) {
        let mut inner = self.inner();
        for _ in 0..chunks {
            let Some(noted) = inner.due.pop_front() else { break };
            inner.due_rows -= noted.len();
            inner.kept -= noted.len();
            if let Some(end) = &noted.end {
                inner.confirmed = Some(end.clone());
            }
            for parked in &noted.parked {
                let row = (noted.table(parked.at as usize), noted.id(parked.at as usize).into());
                inner.reasons.remove(&row);
            }
        }
        inner.settle();
        inner.progress.notify_one();
        self.room.notify_one();
    }

    /// What is due is written at once from now on.
    pub fn hurry(&self) {
        self.inner().hurried = true;
        self.due.notify_one();
    }

    /// Rows that are delivered and not yet marked.
    pub fn due(&self) -> usize {
        self.inner().due_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Commit, CommitEnd, CommitId, Micros};
    use crate::position::Lsn;

    const TABLES: usize = 2;

    fn marks() -> Marks {
        Marks::new(0, TABLES, 3, Vec::new())
    }

    fn chunk(rows: &[(u32, &str)], end: Option<u64>) -> Chunk {
        let mut chunk = Chunk::default();
        chunk.reset(1);
        chunk.begin_commit(Commit { id: CommitId::Snapshot, committed_at: Micros(0) });
        for (table, id) in rows {
            chunk.push_event(*table);
            chunk.render_field(0, |out| out.extend_from_slice(id.as_bytes()));
        }
        chunk.end = end.map(|lsn| CommitEnd { position: Position::Postgres(Lsn(lsn)), committed_at: Micros(0) });
        chunk
    }

    fn upto(lsn: u64) -> Passed {
        Passed::Upto(Some(Position::Postgres(Lsn(lsn))))
    }

    async fn rows(marks: &Marks) -> (usize, Vec<(u32, String, Option<String>)>) {
        let due = marks.next().await;
        let row = |row: MarkedRow<'_>| {
            (row.table, String::from_utf8(row.id.to_vec()).unwrap(), row.parked.map(str::to_owned))
        };
        (due.len(), due.iter().flat_map(|noted| noted.rows().map(row).collect::<Vec<_>>()).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn a_position_is_confirmed_when_all_rows_before_it_are_written() {
        let marks = marks();
        marks.note(&mut chunk(&[], Some(1)));
        marks.note(&mut chunk(&[(0, "a"), (1, "b")], Some(2)));
        marks.note(&mut chunk(&[], Some(3)));
        assert_eq!(marks.passed(1), upto(1), "nothing is to be written before it");
        assert_eq!(marks.passed(3), Passed::Upto(None));
        let (chunks, due) = rows(&marks).await;
        assert_eq!(due, [(0, "a".to_owned(), None), (1, "b".to_owned(), None)]);
        marks.written(chunks);
        assert_eq!(marks.passed(3), upto(3));
        assert_eq!(marks.passed(3), Passed::Upto(None), "it is told once");
        assert_eq!(marks.passed(4), Passed::Unnoted);
    }

    #[tokio::test(start_paused = true)]
    async fn what_failed_to_be_written_is_due_again_and_reading_waits_for_it() {
        let marks = Arc::new(marks());
        marks.note(&mut chunk(&[(0, "a"), (0, "b"), (0, "c")], Some(1)));
        marks.passed(1);
        assert_eq!(rows(&marks).await, rows(&marks).await);
        let waiting = tokio::spawn({
            let marks = marks.clone();
            async move { marks.until_room().await }
        });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!waiting.is_finished());
        marks.written(1);
        waiting.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_row_waits_for_company_unless_nothing_more_is_read() {
        let marks = marks();
        marks.note(&mut chunk(&[(0, "a")], Some(1)));
        marks.passed(1);
        let begin = tokio::time::Instant::now();
        rows(&marks).await;
        assert_eq!(begin.elapsed(), COMPANY);
        marks.hurry();
        let begin = tokio::time::Instant::now();
        rows(&marks).await;
        assert_eq!(begin.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn rows_that_cannot_be_found_again_are_left_out() {
        let marks = marks();
        let mut mixed = chunk(&[(0, "a"), (7, "message"), (1, "b")], Some(1));
        mixed.push_event(0);
        marks.note(&mut mixed);
        marks.passed(1);
        let (_, due) = rows(&marks).await;
        assert_eq!(due, [(0, "a".to_owned(), None), (1, "b".to_owned(), None)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_parked_row_keeps_its_reason_also_when_it_is_read_again() {
        let marks = marks();
        marks.note(&mut chunk(&[(0, "x")], None));
        marks.note(&mut chunk(&[], None));
        let mut read = chunk(&[(0, "a"), (0, "b")], Some(1));
        marks.note(&mut read);
        let row = read.row(&read.events()[1]).unwrap();
        marks.parked(row, 0, "too large");
        marks.passed(3);
        let told = |due: Vec<(u32, String, Option<String>)>| due.last().cloned();
        assert_eq!(told(rows(&marks).await.1), Some((0, "b".to_owned(), Some("too large".to_owned()))));
        // Not written before the generation ended: of what its publisher has passed the reason is remembered.
        marks.end(|_| 3);
        marks.begin_anew(&Arc::default());
        marks.note(&mut chunk(&[(0, "a"), (0, "b")], Some(1)));
        marks.passed(1);
        let (chunks, due) = rows(&marks).await;
        assert_eq!(told(due), Some((0, "b".to_owned(), Some("too large".to_owned()))));
        marks.written(chunks);
        marks.end(|_| 1);
        marks.begin_anew(&Arc::default());
        marks.note(&mut chunk(&[(0, "b")], Some(1)));
        marks.passed(1);
        assert_eq!(told(rows(&marks).await.1), Some((0, "b".to_owned(), None)), "and forgotten when it is written");
    }
}
