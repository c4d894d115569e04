//! The reading half: frames of the replication stream become chunks.
//!
//! ```text
//!   d len  w  start:u64 end:u64 clock:i64  pgoutput message
//!   d len  k  end:u64 clock:i64 reply:u8
//!   E len  error     N len  notice     c len  the server ends the stream
//! ```
//!
//! One read of the socket is decoded to its end (or until the chunk is full) before anything is yielded, so a chunk
//! holds many small commits, or a piece of a large one. A keepalive outside a transaction says that everything
//! before it was sent: it is a commit end without events, and an idle outbox advances by the same rule as a busy one.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::AsyncReadExt;
use tokio::time::Instant;

use super::feedback::Progress;
use super::pgoutput::{self, Begin, Message, Relation, Tuple, Value};
use super::server_error;
use super::snapshot::SnapshotReader;
use super::tables::{Bound, Column, Tables};
use super::values::{Rendered, render_binary, render_text};
use super::{Memory, messages};
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Field, Micros, Projection, Want};
use crate::failpoints;
use crate::position::{Lsn, Position};
use crate::source::transport::ReadHalf;
use crate::source::{Ignored, SourceFailure, SourceStats};

/// A chunk is yielded when it has this many events or bytes, though more may have been read.
const CHUNK_EVENTS: usize = 1000;
const CHUNK_BYTES: usize = 256 * 1024;

/// Room for one read. A frame larger than this makes the buffer grow for it alone.
const READ_BYTES: usize = 256 * 1024;

/// This much within [`BURST_PAUSE`], in bytes or in reads, means that more is on its way.
const BACKLOG_BYTES: usize = 8 * 1024;
const BACKLOG_READS: u32 = 4;

/// In a backlog the socket is left to fill for this long: a walsender pays a system call per message to a client
/// that reads eagerly, and about half the CPU to one that reads in bursts. So does the client.
const BURST_PAUSE: Duration = Duration::from_millis(1);

/// A commit this old does not mind [`LONG_PAUSE`], nor fuller batches on the sink's side.
const OLD: Duration = Duration::from_millis(250);
const LONG_PAUSE: Duration = Duration::from_millis(8);

/// A frame larger than this is not one that the server sends: a row has at most 1 GiB.
const MAX_FRAME: usize = (1 << 30) + (64 << 20);

pub struct Reader {
    stream: ReadHalf,
    buffer: BytesMut,
    /// Bytes of the buffer that are decoded already.
    consumed: usize,
    pace: Pace,
    /// Whether the socket's low-water mark is raised.
    gathering: bool,
    /// Whether the last read took all that it had room for.
    brimful: bool,
    /// Whether the commit being read was old when the server sent it.
    catching_up: bool,
    scratch: Vec<u8>,
    projection: Projection,
    tables: Tables,
    relations: HashMap<u32, Option<Arc<Bound>>>,
    /// Relations that are gone from the catalog, and why their rows could not be read. A partition is described even where its
    /// rows come under its table's name, so it is no trouble before a row of its own comes.
    gone: HashMap<u32, (String, String)>,
    /// The relation of the last row.
    current: Option<(u32, Option<Arc<Bound>>)>,
    prefixes: Vec<String>,
    binary: bool,
    transaction: Option<Transaction>,
    snapshot: Option<SnapshotReader>,
    progress: Arc<Progress>,
    stats: Arc<SourceStats>,
    memory: Arc<Memory>,
    stall_timeout: Duration,
    address: String,
    /// Whether rows are marked, for which their transactions must be known.
    marking: bool,
}

/// Tells a backlog from single commits by what the last moment brought. Reads count as well as bytes: a reader that
/// keeps up with the walsender gets every message by itself.
#[derive(Default)]
struct Pace {
    since: Option<Instant>,
    bytes: usize,
    reads: u32,
}

impl Pace {
    fn read(&mut self, count: usize) {
        let now = Instant::now();
        match self.since {
            Some(since) if now - since < BURST_PAUSE => {
                self.bytes += count;
                self.reads += 1;
            }
            _ => (self.since, self.bytes, self.reads) = (Some(now), count, 1),
        }
    }

    fn is_backlog(&self) -> bool {
        self.bytes >= BACKLOG_BYTES || self.reads >= BACKLOG_READS
    }
}

/// What is counted over many frames.
#[derive(Default)]
struct Seen {
    frames: u64,
    server_end: u64,
}

/// The transaction that is being read.
struct Transaction {
    begin: Begin,
    /// Whether the current chunk knows its commit.
    listed: bool,
    eventful: bool,
}

/// Everything a reader is made of.
pub struct Parts {
    pub stream: ReadHalf,
    pub buffered: BytesMut,
    pub projection: Projection,
    pub tables: Tables,
    pub prefixes: Vec<String>,
    pub binary: bool,
    pub snapshot: Option<SnapshotReader>,
    pub progress: Arc<Progress>,
    pub stats: Arc<SourceStats>,
    pub memory: Arc<Memory>,
    pub stall_timeout: Duration,
    pub address: String,
    pub marking: bool,
}

/// Why decoding stopped.
enum Pause {
    /// No whole frame is left.
    NeedBytes,
    ChunkFull,
    /// The catalog must be asked about a relation before its rows can be read.
    UnknownRelation(Relation),
}

impl Reader {
    pub fn new(parts: Parts) -> Self {
        Reader {
            stream: parts.stream,
            buffer: parts.buffered,
            consumed: 0,
            pace: Pace::default(),
            gathering: false,
            brimful: false,
            catching_up: false,
            scratch: Vec::new(),
            projection: parts.projection,
            tables: parts.tables,
            relations: HashMap::new(),
            gone: HashMap::new(),
            current: None,
            prefixes: parts.prefixes,
            binary: parts.binary,
            transaction: None,
            snapshot: parts.snapshot,
            progress: parts.progress,
            stats: parts.stats,
            memory: parts.memory,
            stall_timeout: parts.stall_timeout,
            address: parts.address,
            marking: parts.marking,
        }
    }

    /// Fills the chunk with what comes next. May be cancelled: it waits only before anything is decoded.
    pub async fn next(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        if let Some(snapshot) = &mut self.snapshot {
            if snapshot.next(chunk, &self.projection).await? {
                self.snapshot = None;
            }
            return Ok(());
        }
        loop {
            chunk.reset(self.projection.width());
            if let Some(transaction) = &mut self.transaction {
                transaction.listed = false;
            }
            let pause = self.decode(chunk)?;
            let decoded = self.buffer.split_to(self.consumed).freeze();
            self.consumed = 0;
            if !chunk.is_empty() {
                chunk.attach_raw(decoded);
                chunk.catching_up = self.catching_up;
                return Ok(());
            }
            match pause {
                Pause::UnknownRelation(relation) => self.learn(relation).await?,
                Pause::NeedBytes => self.fill().await?,
                // Only a chunk with something in it is ever full.
                Pause::ChunkFull => {}
            }
        }
    }

    async fn learn(&mut self, relation: Relation) -> Result<(), SourceFailure> {
        let bound = self.tables.bind(&relation, &self.projection, self.binary).await;
        if matches!(bound, Err(SourceFailure::Restart { .. })) {
            self.memory.text_only.store(true, Ordering::Release);
        }
        self.current = None;
        let bound = match bound {
            Err(SourceFailure::Undecodable { what, remedy }) => {
                self.gone.insert(relation.oid, (what, remedy));
                return Ok(());
            }
            bound => bound?.map(Arc::new),
        };
        self.relations.insert(relation.oid, bound);
        Ok(())
    }

    async fn fill(&mut self) -> Result<(), SourceFailure> {
        if self.pace.is_backlog() {
            self.gather(true);
            if !self.brimful {
                tokio::time::sleep(if self.catching_up { LONG_PAUSE } else { BURST_PAUSE }).await;
            }
            if self.gathered()? {
                return Ok(());
            }
        }
        self.gather(false);
        let patience = self.stall_timeout;
        match tokio::time::timeout(patience, self.read_some()).await {
            Ok(read) => {
                failpoints::reach("received")?;
                self.after_read(read)
            }
            Err(_) => {
                let (address, silent) = (&self.address, patience.as_secs());
                let what = format!("no word from {address} for {silent} s, not even to our questions");
                Err(SourceFailure::transient(what))
            }
        }
    }

    /// Lets the socket fill without waking us at every message, or not.
    fn gather(&mut self, gather: bool) {
        if gather != self.gathering {
            let bytes = if gather { READ_BYTES as i32 } else { 1 };
            self.gathering = self.stream.set_low_water(bytes) && gather;
        }
    }

    /// Reads what the pause has brought; false when that was nothing, or when the socket cannot gather.
    fn gathered(&mut self) -> Result<bool, SourceFailure> {
        if !self.gathering {
            return Ok(false);
        }
        self.scratch.resize(READ_BYTES, 0);
        match self.stream.read_now(&mut self.scratch) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            read => {
                if let Ok(count) = read {
                    self.buffer.extend_from_slice(&self.scratch[..count]);
                }
                self.after_read(read).map(|()| true)
            }
        }
    }

    fn after_read(&mut self, read: std::io::Result<usize>) -> Result<(), SourceFailure> {
        let address = &self.address;
        match read {
            Ok(0) => Err(SourceFailure::transient(format!("{address} closed the replication connection"))),
            Ok(count) => {
                self.brimful = count == READ_BYTES;
                self.pace.read(count);
                Ok(())
            }
            Err(error) => {
                Err(SourceFailure::transient(format!("the replication connection to {address} broke: {error}")))
            }
        }
    }

    async fn read_some(&mut self) -> std::io::Result<usize> {
        self.buffer.reserve(READ_BYTES);
        self.stream.read_buf(&mut self.buffer).await
    }

    /// Decodes whole frames until there is a reason to stop.
    fn decode(&mut self, chunk: &mut Chunk) -> Result<Pause, SourceFailure> {
        // Taken out so that frames can be borrowed while the reader changes.
        let buffer = std::mem::take(&mut self.buffer);
        let paused = self.decode_frames(&buffer, chunk);
        self.buffer = buffer;
        paused
    }

    fn decode_frames(&mut self, buffer: &[u8], chunk: &mut Chunk) -> Result<Pause, SourceFailure> {
        let mut seen = Seen::default();
        let paused = self.decode_each(buffer, chunk, &mut seen);
        // Once for all frames: the counters are shared with other threads.
        self.progress.frames.fetch_add(seen.frames, Ordering::Relaxed);
        self.stats.server_position.fetch_max(seen.server_end, Ordering::Relaxed);
        paused
    }

    fn decode_each(&mut self, buffer: &[u8], chunk: &mut Chunk, seen: &mut Seen) -> Result<Pause, SourceFailure> {
        loop {
            if chunk.events().len() >= CHUNK_EVENTS || self.consumed >= CHUNK_BYTES && !chunk.is_empty() {
                return Ok(Pause::ChunkFull);
            }
            let rest = &buffer[self.consumed..];
            let Some((header, _)) = rest.split_first_chunk::<5>() else { return Ok(Pause::NeedBytes) };
            let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
            if !(4..=MAX_FRAME).contains(&length) {
                return Err(self.undecodable(&format!("a frame claims {length} bytes")));
            }
            let Some(frame) = rest.get(5..=length) else { return Ok(Pause::NeedBytes) };
            seen.frames += 1;
            match header[0] {
                b'd' => {
                    if let Some(relation) = self.copy_data(frame, buffer, chunk, seen)? {
                        if !chunk.is_empty() {
                            // What came before it goes first; the frame is met again.
                            return Ok(Pause::ChunkFull);
                        }
                        self.consumed += 1 + length;
                        return Ok(Pause::UnknownRelation(relation));
                    }
                }
                b'E' => return Err(self.server_error(frame)),
                b'c' => {
                    return Err(SourceFailure::transient(format!("{} ended the replication stream", self.address)));
                }
                b'N' | b'S' | b'C' | b'Z' => {}
                tag => return Err(self.undecodable(&format!("a frame has the unknown tag {tag:#04x}"))),
            }
            self.consumed += 1 + length;
        }
    }

    fn server_error(&self, frame: &[u8]) -> SourceFailure {
        server_error::from_frame(frame, &self.address)
    }

    fn undecodable(&self, what: &str) -> SourceFailure {
        SourceFailure::Undecodable {
            what: format!("the replication stream of {} cannot be read: {what}", self.address),
            remedy: "nothing was skipped; please report it with the server's version".to_owned(),
        }
    }

    /// One CopyData frame; a relation that is not known yet is given back.
    fn copy_data(
        &mut self,
        frame: &[u8],
        buffer: &[u8],
        chunk: &mut Chunk,
        seen: &mut Seen,
    ) -> Result<Option<Relation>, SourceFailure> {
        match frame.first() {
            Some(b'w') if frame.len() > 25 => {
                let server_end = u64::from_be_bytes(frame[9..17].try_into().unwrap_or_default());
                seen.server_end = seen.server_end.max(server_end);
                if let Some(Transaction { begin, .. }) = &self.transaction {
                    // Both times are the server's: a clock that differs from ours does not matter.
                    let sent = i64::from_be_bytes(frame[17..25].try_into().unwrap_or_default());
                    let age = pgoutput::from_server_time(sent).0.saturating_sub(begin.commit_time.0);
                    self.catching_up = age > OLD.as_micros() as i64;
                }
                let message = pgoutput::parse(&frame[25..]).map_err(|error| self.undecodable(&error.to_string()))?;
                self.message(message, buffer, chunk)
            }
            Some(b'k') if frame.len() == 18 => {
                let end = Lsn(u64::from_be_bytes(frame[1..9].try_into().unwrap_or_default()));
                let clock = i64::from_be_bytes(frame[9..17].try_into().unwrap_or_default());
                seen.server_end = seen.server_end.max(end.0);
                if frame[17] == 1 {
                    self.progress.asked.notify_one();
                }
                // Inside a transaction the position is one before it: no progress.
                if self.transaction.is_none() {
                    self.finish(end, pgoutput::from_server_time(clock), chunk);
                }
                Ok(None)
            }
            tag => Err(self.undecodable(&format!("a copy frame of {} bytes begins with {tag:?}", frame.len()))),
        }
    }

    fn finish(&self, end: Lsn, committed_at: Micros, chunk: &mut Chunk) {
        let received = self.progress.received.fetch_max(end.0, Ordering::AcqRel);
        // A keepalive may repeat an old position.
        if end.0 > received {
            chunk.end = Some(CommitEnd { position: Position::Postgres(end), committed_at });
        }
    }

    fn message(
        &mut self,
        message: Message<'_>,
        buffer: &[u8],
        chunk: &mut Chunk,
    ) -> Result<Option<Relation>, SourceFailure> {
        match message {
            Message::Begin(begin) => {
                self.transaction = Some(Transaction { begin, listed: false, eventful: false });
            }
            Message::Commit(commit) => {
                let eventful = self.transaction.take().is_some_and(|transaction| transaction.eventful);
                if eventful {
                    self.progress.eventful.fetch_max(commit.end_lsn.0, Ordering::AcqRel);
                    chunk.transactions += 1;
                }
                self.finish(commit.end_lsn, commit.commit_time, chunk);
            }
            Message::Origin | Message::Type => {}
            Message::Relation(relation) => {
                self.relations.remove(&relation.oid);
                self.gone.remove(&relation.oid);
                self.current = None;
                return Ok(Some(relation));
            }
            Message::Insert { relation, new } => {
                // A run of rows of one table costs no look-up.
                if self.current.as_ref().is_none_or(|(oid, _)| *oid != relation) {
                    self.current = Some((relation, self.table_of(relation)?.cloned()));
                }
                if let Some((_, Some(bound))) = &self.current {
                    let bound = bound.clone();
                    self.list_commit(chunk)?;
                    insert(&bound, new, buffer, chunk);
                }
            }
            Message::Update { relation } => {
                if self.table_of(relation)?.is_some() {
                    self.stats.ignore(Ignored::Update);
                }
            }
            Message::Delete { relation } => {
                if self.table_of(relation)?.is_some() {
                    self.stats.ignore(Ignored::Delete);
                }
            }
            Message::Truncate { relations } => {
                for relation in relations {
                    if self.table_of(relation)?.is_some() {
                        self.stats.ignore(Ignored::Truncate);
                        tracing::warn!("an outbox table was truncated; what was committed before is still delivered");
                    }
                }
            }
            Message::Logical(message) => {
                if let Some(index) = self.prefixes.iter().position(|prefix| prefix == message.prefix) {
                    if message.transactional {
                        self.list_commit(chunk)?;
                    } else {
                        chunk.begin_commit(Commit { id: CommitId::Postgres(message.lsn), committed_at: Micros::now() });
                    }
                    chunk.push_event(self.tables.count() + index as u32);
                    if let Err(why) = messages::bind(message.content, &self.projection, chunk) {
                        let why = format!("logical message `{}`: {why}", message.prefix);
                        chunk.mark_defective(why, Field::span(message.content, buffer));
                    }
                }
            }
        }
        Ok(None)
    }

    fn table_of(&self, relation: u32) -> Result<Option<&Arc<Bound>>, SourceFailure> {
        match self.relations.get(&relation) {
            Some(bound) => Ok(bound.as_ref()),
            None if self.gone.contains_key(&relation) => {
                let (what, remedy) = self.gone[&relation].clone();
                Err(SourceFailure::Undecodable { what, remedy })
            }
            None => Err(self.undecodable(&format!("a change of relation {relation} came before its description"))),
        }
    }

    /// Makes the transaction's commit the chunk's latest.
    fn list_commit(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        let Some(transaction) = &mut self.transaction else {
            return Err(self.undecodable("a change came outside a transaction"));
        };
        transaction.eventful = true;
        if !transaction.listed {
            transaction.listed = true;
            let begin = transaction.begin;
            if self.marking {
                chunk.transaction_ids.push(begin.xid);
            }
            chunk.begin_commit(Commit { id: CommitId::Postgres(begin.final_lsn), committed_at: begin.commit_time });
        }
        Ok(())
    }

    /// Reads and discards what the server still sends after the stream was ended, so that closing the socket does
    /// not reset the connection before the last confirmation is read.
    pub async fn drain(&mut self, deadline: Instant) {
        self.gather(false);
        let mut discarded = BytesMut::with_capacity(READ_BYTES);
        let until_closed = async {
            while let Ok(count) = self.stream.read_buf(&mut discarded).await {
                if count == 0 || discarded.windows(5).any(|bytes| bytes == b"c\0\0\0\x04") {
                    return;
                }
                discarded.clear();
                discarded.reserve(READ_BYTES);
            }
        };
        let _ = tokio::time::timeout_at(deadline, until_closed).await;
    }
}

/// Makes an event of a row.
fn insert(bound: &Bound, new: Tuple<'_>, buffer: &[u8], chunk: &mut Chunk) {
    chunk.push_event(bound.table);
    let mut wanted = bound.columns.iter().peekable();
    for (index, value) in new.values().enumerate() {
        while let Some(column) = wanted.next_if(|column| column.index == index) {
            if let Err(why) = set_field(column, value, buffer, chunk) {
                chunk.set_field(column.slot, Field::Null);
                chunk.mark_defective(format!("column `{}` of {}: {why}", column.name, bound.describe), Field::Null);
            }
        }
    }
}

/// Sets a field of the newest event: a span of the frame where the bytes can stay where they are.
fn set_field(column: &Column, value: Value<'_>, buffer: &[u8], chunk: &mut Chunk) -> Result<(), &'static str> {
    let (bytes, binary) = match value {
        Value::Null => {
            chunk.set_field(column.slot, Field::Null);
            return Ok(());
        }
        Value::Unchanged => return Err("an insert left its value out"),
        Value::Text(bytes) => (bytes, false),
        Value::Binary(bytes) => (bytes, true),
    };
    let mut borrowed = None;
    let mut bad = false;
    chunk.render_field(column.slot, |out| {
        let rendered = match binary {
            true => render_binary(column.type_oid, column.want, bytes, out),
            false => render_text(column.type_oid, column.want, bytes, out),
        };
        match rendered {
            Ok(Rendered::Borrowed(bytes)) => borrowed = Some(bytes),
            Ok(Rendered::Written) => {}
            Err(_) => bad = true,
        }
    });
    match (bad, borrowed) {
        // A timestamp that cannot be read is none: the commit time stands in.
        (true, _) if column.want == Want::Time => chunk.set_field(column.slot, Field::Null),
        (true, _) => return Err("its value has a form that the server does not send"),
        (false, Some(bytes)) => {
            chunk.set_field(column.slot, Field::span(bytes, buffer));
        }
        (false, None) => {}
    }
    Ok(())
}
