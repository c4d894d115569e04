//! What every source yields: chunks of committed outbox rows.
//!
//! A chunk holds what one read of the log gave: several small commits, one commit, or a piece of a huge one. All of
//! its rows lie in two buffers and one list of fields, so that a row costs no allocation:
//!
//! ```text
//!   raw       bytes of the log as they came            ◀─┐ spans
//!   rendered  values the source had to write anew      ◀─┤ (a binary uuid as text, say)
//!   fields    [ e0.f0  e0.f1  e0.f2 | e1.f0  e1.f1 … ] ──┘ one per column of the projection
//!   events    [ e0, e1, … ]  commits [ c0, … ]  end
//! ```

use bytes::Bytes;

use crate::position::{EventPosition, Lsn, Position};
use crate::source::mongodb::token::ClusterTime;
use crate::source::mysql::gtid::{MariaId, Uuid};

/// Microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Micros(pub i64);

impl Micros {
    pub fn now() -> Self {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Micros(i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX))
    }

    pub fn as_millis(self) -> i64 {
        self.0.div_euclid(1000)
    }

    /// Seconds from this moment to `later`; a clock that differs from the database's never makes it negative.
    pub fn seconds_until(self, later: Micros) -> f64 {
        (later.0.saturating_sub(self.0)).max(0) as f64 / 1e6
    }
}

/// How a column is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Want {
    /// As the server prints it; a binary column as its bytes.
    Text,
    /// A moment, as eight big-endian bytes of [`Micros`].
    Time,
    /// What finds the row again: a document's id with its type, elsewhere as the server prints it.
    Key,
}

/// The columns that routing needs of every row, in the order of a row's fields.
#[derive(Clone, Debug, Default)]
pub struct Projection {
    columns: Vec<(String, Want)>,
    required: Vec<bool>,
}

impl Projection {
    /// The slot of a column, added when it is new.
    pub fn slot(&mut self, column: &str, want: Want, required: bool) -> usize {
        if let Some(slot) = self.columns.iter().position(|(name, kind)| name == column && *kind == want) {
            self.required[slot] |= required;
            return slot;
        }
        self.columns.push((column.to_owned(), want));
        self.required.push(required);
        self.columns.len() - 1
    }

    pub fn width(&self) -> usize {
        self.columns.len()
    }

    pub fn columns(&self) -> impl Iterator<Item = (usize, &str, Want)> {
        self.columns.iter().enumerate().map(|(slot, (name, want))| (slot, name.as_str(), *want))
    }

    /// Columns that a table must have.
    pub fn required(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().zip(&self.required).filter(|(_, required)| **required).map(|((name, _), _)| name.as_str())
    }
}

/// One column's value in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Null,
    /// The table has no such column.
    Absent,
    Raw {
        start: u32,
        len: u32,
    },
    Rendered {
        start: u32,
        len: u32,
    },
}

impl Field {
    /// Where in the buffer these bytes of it lie.
    pub fn span(bytes: &[u8], buffer: &[u8]) -> Field {
        let start = bytes.as_ptr() as usize - buffer.as_ptr() as usize;
        Field::Raw { start: start as u32, len: bytes.len() as u32 }
    }
}

/// Names a commit in messages and dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommitId {
    Postgres(Lsn),
    MySql {
        uuid: Uuid,
        number: u64,
        /// It has a tag, which is not told here.
        tagged: bool,
    },
    MariaDb(MariaId),
    /// A binary log without GTIDs: the number of its file, and where in it the commit ends.
    Binlog {
        file: u64,
        offset: u64,
    },
    Mongo(ClusterTime),
    /// A row that was in the table before the log was entered.
    Snapshot,
    Event(EventPosition),
    /// A row that the poller claimed, by the number of the claim.
    Polled(u64),
}

impl std::fmt::Display for CommitId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CommitId::Postgres(lsn) => lsn.fmt(f),
            CommitId::MySql { uuid, number, .. } => write!(f, "{uuid}:{number}"),
            CommitId::MariaDb(id) => write!(f, "{}-{}-{}", id.domain, id.server_id, id.sequence),
            CommitId::Binlog { file, offset } => write!(f, "{file:06}:{offset}"),
            CommitId::Mongo(time) => time.fmt(f),
            CommitId::Snapshot => f.write_str("snapshot"),
            CommitId::Event(event) => event.fmt(f),
            CommitId::Polled(number) => write!(f, "batch {number}"),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Commit {
    pub id: CommitId,
    pub committed_at: Micros,
}

/// One outbox row. Its fields are read through its chunk.
#[derive(Clone, Copy, Debug)]
pub struct OutboxEvent {
    /// Which of the pipeline's tables (or message prefixes) it came from.
    pub table: u32,
    first_field: u32,
    commit: u32,
    defective: bool,
}

/// Why an event could not be decoded, and what there was of it.
#[derive(Debug)]
struct Defect {
    first_field: u32,
    why: String,
    content: Field,
}

/// The last commit that is whole in a chunk.
#[derive(Clone, Debug)]
pub struct CommitEnd {
    pub position: Position,
    pub committed_at: Micros,
}

#[derive(Default)]
pub struct Chunk {
    raw: Bytes,
    rendered: Vec<u8>,
    /// Bytes of the raw fields.
    raw_weight: usize,
    fields: Vec<Field>,
    width: usize,
    events: Vec<OutboxEvent>,
    commits: Vec<Commit>,
    defects: Vec<Defect>,
    /// How many commits end in this chunk.
    pub transactions: u32,
    /// Whether these rows are old already and more are at hand: they may wait a moment to be sent together.
    pub catching_up: bool,
    /// What the first of these rows is called by the poller, or by whoever marks them; the others follow.
    pub first_row: Option<u64>,
    /// The server's numbers of these transactions, where rows are marked that may not be visible yet.
    pub transaction_ids: Vec<u32>,
    pub end: Option<CommitEnd>,
}

impl Chunk {
    /// Empties the chunk for rows of `width` fields, keeping its memory.
    pub fn reset(&mut self, width: usize) {
        self.raw = Bytes::new();
        self.rendered.clear();
        self.raw_weight = 0;
        self.fields.clear();
        self.width = width;
        self.events.clear();
        self.commits.clear();
        self.defects.clear();
        self.transactions = 0;
        self.catching_up = false;
        self.first_row = None;
        self.transaction_ids.clear();
        self.end = None;
    }

    pub fn is_empty(&self) -> bool {
        self.events.is_empty() && self.end.is_none()
    }

    /// Bytes that the source has written anew.
    pub fn rendered_len(&self) -> usize {
        self.rendered.len()
    }

    pub fn events(&self) -> &[OutboxEvent] {
        &self.events
    }

    pub fn commit(&self, event: &OutboxEvent) -> Commit {
        self.commits[event.commit as usize]
    }

    /// The bytes this chunk keeps in flight, near enough to bound memory by.
    pub fn weight(&self) -> usize {
        self.rendered.len() + self.raw_weight
    }

    /// The field's bytes; `None` when it is null or the table has no such column.
    pub fn field(&self, event: &OutboxEvent, slot: usize) -> Option<&[u8]> {
        self.bytes(self.fields[event.first_field as usize + slot])
    }

    fn bytes(&self, field: Field) -> Option<&[u8]> {
        match field {
            Field::Null | Field::Absent => None,
            Field::Raw { start, len } => Some(&self.raw[start as usize..(start + len) as usize]),
            Field::Rendered { start, len } => Some(&self.rendered[start as usize..(start + len) as usize]),
        }
    }

    /// Why the event could not be decoded, and what there was of it; `None` for a sound one.
    pub fn defect(&self, event: &OutboxEvent) -> Option<(&str, Option<&[u8]>)> {
        if !event.defective {
            return None;
        }
        let defect = self.defects.iter().find(|defect| defect.first_field == event.first_field)?;
        Some((&defect.why, self.bytes(defect.content)))
    }

    /// Says that the newest event cannot be decoded; it is never skipped, but parked or a reason to halt.
    pub fn mark_defective(&mut self, why: String, content: Field) {
        if let Some(event) = self.events.last_mut() {
            event.defective = true;
            self.defects.push(Defect { first_field: event.first_field, why, content });
        }
    }

    /// What the row of this event is called by the poller, or by whoever marks it.
    pub fn row(&self, event: &OutboxEvent) -> Option<u64> {
        Some(self.first_row? + u64::from(event.first_field) / self.width.max(1) as u64)
    }

    /// Says when the latest commit was made, where that is known only by its rows.
    pub fn set_commit_time(&mut self, committed_at: Micros) {
        if let Some(commit) = self.commits.last_mut() {
            commit.committed_at = committed_at;
        }
    }

    pub fn begin_commit(&mut self, commit: Commit) {
        self.commits.push(commit);
    }

    /// Opens the next event of the latest commit; every field starts out absent.
    pub fn push_event(&mut self, table: u32) {
        let first_field = self.fields.len() as u32;
        self.fields.resize(self.fields.len() + self.width, Field::Absent);
        let commit = (self.commits.len() - 1) as u32;
        self.events.push(OutboxEvent { table, first_field, commit, defective: false });
    }

    /// Sets a field of the newest event.
    pub fn set_field(&mut self, slot: usize, field: Field) {
        if let Field::Raw { len, .. } = field {
            self.raw_weight += len as usize;
        }
        let row = self.fields.len() - self.width;
        self.fields[row + slot] = field;
    }

    /// Appends what `write` renders and makes it the newest event's field.
    pub fn render_field(&mut self, slot: usize, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.rendered.len();
        write(&mut self.rendered);
        let len = (self.rendered.len() - start) as u32;
        self.set_field(slot, Field::Rendered { start: start as u32, len });
    }

    /// Gives the chunk the log bytes its raw fields point into.
    pub fn attach_raw(&mut self, raw: Bytes) {
        self.raw = raw;
    }
}
