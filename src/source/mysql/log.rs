//! What the events of a binary log mean: transactions, and in them the rows of outbox tables.
//!
//! ```text
//!   GTID  BEGIN  ( TABLE_MAP  ROWS… )*  XID                    a transaction
//!   GTID  statement                                            DDL, a transaction by itself
//!   GTID  XA START  ( … )*  XA END  XA_PREPARE                 rows that may still be rolled back
//!   GTID  XA COMMIT | XA ROLLBACK                              what becomes of them
//! ```
//!
//! Nothing is skipped that was not understood: an unknown event, a statement that changed an outbox table without
//! logging its rows, a rollback inside the log after rows, all halt before the position passes them.
//!
//! Rows of a prepared XA transaction are held until it is committed. With MySQL's GTIDs its number is left out of the
//! position meanwhile, so that one forgotten XA transaction stops nothing else: after a restart the server sends just
//! that one again. A position of another kind cannot leave something out, so there it waits for the decision.

use std::collections::HashMap;
use std::sync::Arc;

use super::compressed;
use super::event::{self, Body, Event, Query, Rows, RowsKind};
use super::gtid::{MariaId, Uuid};
use super::input::Malformed;
use super::position::{BinlogPosition, FilePos, Gtids};
use super::query::{self, Statement, Xid};
use super::rows::RowImages;
use super::table_map::{self, TableShape};
use super::tables::{Bound, Tables};
use super::transaction::MariaXa;
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Micros};
use crate::position::Position;
use crate::source::{Ignored, SourceFailure, SourceStats};

/// What MariaDB's compressed rows may take when they are expanded.
const MAX_EXPANDED: usize = 64 << 20;

/// What prepared XA transactions may hold of outbox rows, all together.
const MAX_PREPARED: usize = 16 << 20;

/// A commit this old does not mind fuller batches on the sink's side. MariaDB's log knows seconds only.
const OLD_MICROS: i64 = 250_000;
const OLD_SECONDS_MICROS: i64 = 2_000_000;

/// The table that outboxd itself writes to.
const CHECKPOINT_TABLE: &[u8] = b"outboxd_checkpoint";

/// A table's description, kept as it came so that a repeated one costs a comparison.
struct Map {
    body: Vec<u8>,
    /// `None`: not an outbox table.
    bound: Option<Arc<Bound>>,
}

#[derive(Clone, Debug)]
enum Id {
    None,
    MySql { uuid: Uuid, tag: String, number: u64 },
    MariaDb(MariaId),
}

struct Transaction {
    id: Id,
    committed_at: Micros,
    /// It ends with a commit, not with its first statement.
    begun: bool,
    /// Whether the current chunk knows its commit.
    listed: bool,
    eventful: bool,
    /// It has touched the checkpoint, and whether something else.
    checkpoint: bool,
    other: bool,
    xa: Option<Xid>,
    held: Vec<(Arc<Bound>, Vec<u8>)>,
}

/// Rows of an XA transaction that waits for its decision.
struct Prepared {
    id: Id,
    rows: Vec<(Arc<Bound>, Vec<u8>)>,
    bytes: usize,
}

/// What the caller must do before the next event.
pub enum Step {
    Go,
    /// An outbox table is described anew.
    Learn(Box<Unbound>),
    /// A compressed transaction begins.
    Unpack,
}

/// A description whose columns are not found yet.
pub struct Unbound {
    pub table: u32,
    pub shape: TableShape,
    pub body: Vec<u8>,
    pub logged_at: Micros,
}

pub struct Log {
    tables: Tables,
    maps: HashMap<u64, Map>,
    mariadb: bool,
    checksum: bool,
    /// As far as reading has come.
    file: FilePos,
    /// The end of the last transaction.
    position: BinlogPosition,
    ended: Option<Micros>,
    transaction: Option<Transaction>,
    prepared: HashMap<Xid, Prepared>,
    expanded: Vec<u8>,
    catching_up: bool,
    stats: Arc<SourceStats>,
}

fn undecodable(what: String, remedy: &str) -> SourceFailure {
    SourceFailure::Undecodable { what, remedy: format!("nothing was skipped; {remedy}") }
}

impl Log {
    /// `checksum`: whether the server's events end in one, also the first, which comes before it says so.
    pub fn new(tables: Tables, from: BinlogPosition, mariadb: bool, checksum: bool, stats: Arc<SourceStats>) -> Self {
        Log {
            tables,
            maps: HashMap::new(),
            mariadb,
            checksum,
            file: from.file.clone(),
            position: from,
            ended: None,
            transaction: None,
            prepared: HashMap::new(),
            expanded: Vec::new(),
            catching_up: false,
            stats,
        }
    }

    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Prepares a chunk for events.
    pub fn begin_chunk(&mut self, chunk: &mut Chunk) {
        chunk.reset(self.tables.projection().width());
        if let Some(transaction) = &mut self.transaction {
            transaction.listed = false;
        }
    }

    /// Gives the chunk the end of the last transaction that is whole in it.
    pub fn finish_chunk(&mut self, chunk: &mut Chunk) {
        chunk.catching_up = self.catching_up;
        // A position that cannot leave a prepared transaction out must not pass it.
        let waits = !self.prepared.is_empty() && !matches!(self.position.gtids, Gtids::MySql(_));
        if let Some(committed_at) = self.ended.filter(|_| !waits) {
            let position = Position::Binlog(Box::new(self.position.clone()));
            chunk.end = Some(CommitEnd { position, committed_at });
            self.ended = None;
        }
    }

    /// Takes in a description whose columns were found.
    pub fn learn(&mut self, body: Vec<u8>, bound: Bound) {
        self.maps.insert(bound.shape.table_id, Map { body, bound: Some(Arc::new(bound)) });
    }

    /// An event as it came. `buffer` is what the chunk's raw fields point into, if the event lies there.
    pub fn event(&mut self, bytes: &[u8], buffer: Option<&[u8]>, chunk: &mut Chunk) -> Result<Step, SourceFailure> {
        let event = event::split(bytes, self.checksum).map_err(|error| self.malformed(&error))?;
        if event.header.end != 0 {
            let by_size = self.file.offset + u64::from(event.header.size);
            // The header has 32 bits, and a file with a huge transaction may be longer.
            let agrees = by_size as u32 == event.header.end;
            self.file.offset = if agrees { by_size } else { u64::from(event.header.end) };
        }
        self.take(event, buffer, chunk)
    }

    /// An event of a compressed transaction, which has neither checksum nor place of its own.
    pub fn inner_event(&mut self, bytes: &[u8], chunk: &mut Chunk) -> Result<Step, SourceFailure> {
        let event = event::split(bytes, false).map_err(|error| self.malformed(&error))?;
        self.take(event, None, chunk)
    }

    /// An event without its header and checksum.
    pub fn body_of<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], SourceFailure> {
        event::split(bytes, self.checksum).map(|event| event.body).map_err(|error| self.malformed(&error))
    }

    fn take(&mut self, event: Event<'_>, buffer: Option<&[u8]>, chunk: &mut Chunk) -> Result<Step, SourceFailure> {
        let logged_at = Micros(i64::from(event.header.timestamp) * 1_000_000);
        match event.decode().map_err(|error| self.malformed(&error))? {
            Body::FormatDescription(description) => {
                self.checksum = description.checksum;
                // Table ids are counted anew by a server that was restarted.
                self.maps.clear();
            }
            Body::Rotate(rotate) => {
                let moved = self.file.file != rotate.file;
                if moved {
                    rotate.file.clone_into(&mut self.file.file);
                }
                self.file.offset = rotate.position;
                if moved && !rotate.fake && self.transaction.is_none() {
                    // The old file may be purged now: the stored position must not stay in it, though nothing else
                    // but our own checkpoint was written since.
                    self.position.seen.others += 1;
                    self.end_here(logged_at);
                }
            }
            Body::Gtid(gtid) => {
                let id = Id::MySql { uuid: gtid.uuid, tag: gtid.tag.as_str().to_owned(), number: gtid.gno };
                self.begin(id, gtid.times.immediate.unwrap_or(logged_at), false)?;
            }
            Body::Anonymous(times) => self.begin(Id::None, times.immediate.unwrap_or(logged_at), false)?,
            Body::MariaGtid(gtid) => {
                let id = MariaId { domain: gtid.domain, server_id: gtid.server_id, sequence: gtid.sequence };
                self.begin(Id::MariaDb(id), logged_at, !gtid.standalone)?;
                if let (Some(MariaXa::Prepared(xid)), Some(transaction)) = (gtid.xa, &mut self.transaction) {
                    transaction.xa = Some(xid);
                }
            }
            Body::Query(query) => self.statement(&query, query.sql, logged_at, chunk)?,
            Body::CompressedQuery(query) => {
                let mut sql = std::mem::take(&mut self.expanded);
                let expanded = compressed::expand(query.sql, MAX_EXPANDED, &mut sql);
                expanded.map_err(|error| self.unreadable(&error.to_string()))?;
                self.statement(&query, &sql, logged_at, chunk)?;
                self.expanded = sql;
            }
            Body::LoadData(query) => self.changed_without_rows(&query, query.sql)?,
            Body::Xid(_) => self.commit_whole(chunk)?,
            Body::TableMap(body) => return self.table_map(body, logged_at),
            Body::Rows(rows) => self.rows(&rows, buffer, chunk)?,
            Body::XaPrepare(prepare) => match prepare.one_phase {
                true => self.commit_prepared_here(chunk)?,
                false => self.prepare(prepare.xid, chunk)?,
            },
            Body::TransactionPayload(_) => return Ok(Step::Unpack),
            Body::Incident { message } => {
                let message = String::from_utf8_lossy(message);
                return Err(undecodable(
                    format!("the log has a hole at {}, as the server itself says: {message}", self.file),
                    "make a new snapshot: what the hole held cannot be read",
                ));
            }
            Body::Unknown { type_code } => {
                return Err(self.unreadable(&format!("it has an event of the unknown type {type_code}")));
            }
            Body::StartEncryption => return Err(self.unreadable("it is encrypted")),
            Body::PreviousGtids(_) | Body::MariaGtidList(_) | Body::Heartbeat(_) => {}
            Body::Stop | Body::Aside(_) | Body::Ignorable(_) => {}
        }
        Ok(Step::Go)
    }

    fn begin(&mut self, id: Id, committed_at: Micros, begun: bool) -> Result<(), SourceFailure> {
        if self.transaction.as_ref().is_some_and(|open| open.eventful || !open.held.is_empty()) {
            return Err(self.unreadable("a transaction begins before the one with outbox rows has ended"));
        }
        let old = if self.mariadb { OLD_SECONDS_MICROS } else { OLD_MICROS };
        self.catching_up = Micros::now().0.saturating_sub(committed_at.0) > old;
        self.transaction = Some(Transaction {
            id,
            committed_at,
            begun,
            listed: false,
            eventful: false,
            checkpoint: false,
            other: false,
            xa: None,
            held: Vec::new(),
        });
        Ok(())
    }

    fn statement(
        &mut self,
        query: &Query<'_>,
        sql: &[u8],
        logged_at: Micros,
        chunk: &mut Chunk,
    ) -> Result<(), SourceFailure> {
        let statement = query::classify(sql);
        if self.transaction.is_none() {
            // A log without GTIDs.
            self.begin(Id::None, logged_at, false)?;
        }
        let eventful = self.transaction.as_ref().is_some_and(|open| open.eventful || !open.held.is_empty());
        match statement {
            Statement::Begin => self.set_begun(None),
            Statement::XaStart(xid) => self.set_begun(Some(xid)),
            Statement::Commit => self.commit_whole(chunk)?,
            Statement::Rollback | Statement::RollbackToSavepoint if eventful => {
                return Err(self.unreadable("a rollback follows outbox rows, which the log should not hold then"));
            }
            Statement::Rollback => self.commit(chunk),
            Statement::XaEnd(_) | Statement::Savepoint | Statement::RollbackToSavepoint => {}
            // The prepare's own event follows.
            Statement::XaPrepare(_) => {}
            Statement::XaCommit(xid) => self.decide(&xid, true, chunk)?,
            Statement::XaRollback(xid) => self.decide(&xid, false, chunk)?,
            Statement::XaUnreadable => return Err(self.unreadable("the name of an XA transaction makes no sense")),
            Statement::Change => {
                self.changed_without_rows(query, sql)?;
                self.end_single(chunk);
            }
            Statement::Ddl => {
                self.ddl(query, sql);
                self.end_single(chunk);
            }
            Statement::Other => self.end_single(chunk),
        }
        Ok(())
    }

    fn set_begun(&mut self, xid: Option<Xid>) {
        if let Some(transaction) = &mut self.transaction {
            transaction.begun = true;
            transaction.xa = transaction.xa.take().or(xid);
        }
    }

    /// A statement that is a transaction by itself.
    fn end_single(&mut self, chunk: &mut Chunk) {
        if self.transaction.as_ref().is_some_and(|open| !open.begun) {
            self.commit(chunk);
        }
    }

    fn ddl(&mut self, _query: &Query<'_>, sql: &[u8]) {
        if let Some(transaction) = &mut self.transaction {
            transaction.other = true;
        }
        if self.tables.names().any(|name| query::mentions(sql, name)) {
            // The next rows come with a description of their own.
            self.maps.retain(|_, map| map.bound.is_none());
            if sql.trim_ascii_start().get(..8).is_some_and(|word| word.eq_ignore_ascii_case(b"TRUNCATE")) {
                self.stats.ignore(Ignored::Truncate);
                tracing::warn!("an outbox table was truncated; what was committed before is still delivered");
            }
        }
    }

    fn changed_without_rows(&self, query: &Query<'_>, sql: &[u8]) -> Result<(), SourceFailure> {
        // A name stands for a table of the session's own database unless it says which.
        let here =
            |database: &str| query.database.eq_ignore_ascii_case(database.as_bytes()) || query::mentions(sql, database);
        let mut names = self.tables.qualified_names();
        match names.find(|(database, name)| query::mentions(sql, name) && here(database)) {
            None => Ok(()),
            Some((_, name)) => {
                let text: String = String::from_utf8_lossy(sql).chars().take(60).collect();
                Err(undecodable(
                    format!("at {} a statement was logged that changed `{name}` without its rows: {text} …", self.file),
                    "SET GLOBAL binlog_format = ROW on the server; then look up what this statement did, and go on \
                     after it with --start",
                ))
            }
        }
    }

    fn table_map(&mut self, body: &[u8], logged_at: Micros) -> Result<Step, SourceFailure> {
        let peeked = table_map::peek(body).map_err(|error| self.malformed(&error))?;
        if let Some(transaction) = &mut self.transaction {
            let own = peeked.table == CHECKPOINT_TABLE;
            transaction.checkpoint |= own;
            transaction.other |= !own;
        }
        let known = self.maps.get(&peeked.table_id);
        let Some(table) = self.tables.number(peeked.schema, peeked.table) else {
            if known.is_none_or(|map| map.bound.is_some()) {
                self.maps.insert(peeked.table_id, Map { body: Vec::new(), bound: None });
            }
            return Ok(Step::Go);
        };
        if known.is_some_and(|map| map.body == body) {
            return Ok(Step::Go);
        }
        let shape = table_map::parse(body, self.mariadb).map_err(|error| self.malformed(&error))?;
        Ok(Step::Learn(Box::new(Unbound { table, shape, body: body.to_vec(), logged_at })))
    }

    fn rows(&mut self, rows: &Rows<'_>, buffer: Option<&[u8]>, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        let bound = match self.maps.get(&rows.table_id) {
            Some(Map { bound: Some(bound), .. }) => bound.clone(),
            Some(Map { bound: None, .. }) => return Ok(()),
            None => return Err(self.unreadable("rows came before the description of their table")),
        };
        match rows.kind {
            RowsKind::Write => {}
            RowsKind::Update => {
                self.stats.ignore(Ignored::Update);
                return Ok(());
            }
            RowsKind::Delete => {
                self.stats.ignore(Ignored::Delete);
                return Ok(());
            }
        }
        let Some(transaction) = &self.transaction else {
            return Err(self.unreadable("rows came outside a transaction"));
        };
        let in_xa = transaction.xa.is_some();
        let images = rows.write().map_err(|error| self.malformed(&error))?;
        if in_xa {
            // Kept with what is needed to read them: which columns, and the images themselves.
            let plain = match rows.compressed {
                true => self.expand(images.rows)?,
                false => images.rows.to_vec(),
            };
            let mut kept = Vec::with_capacity(4 + images.present.len() + plain.len());
            kept.extend((images.present.len() as u32).to_le_bytes());
            kept.extend(images.present);
            kept.extend(plain);
            return self.hold(bound, kept);
        }
        if rows.compressed {
            let plain = self.expand(images.rows)?;
            let images = event::WriteRows { rows: &plain, ..images };
            self.push_rows(&bound, &images, None, chunk)?;
            self.expanded = plain;
            return Ok(());
        }
        self.push_rows(&bound, &images, buffer, chunk)
    }

    fn expand(&mut self, bytes: &[u8]) -> Result<Vec<u8>, SourceFailure> {
        let mut plain = std::mem::take(&mut self.expanded);
        match compressed::expand(bytes, MAX_EXPANDED, &mut plain) {
            Ok(()) => Ok(plain),
            Err(error) => Err(self.unreadable(&error.to_string())),
        }
    }

    /// Makes events of rows.
    fn push_rows(
        &mut self,
        bound: &Bound,
        rows: &event::WriteRows<'_>,
        buffer: Option<&[u8]>,
        chunk: &mut Chunk,
    ) -> Result<(), SourceFailure> {
        self.list_commit(chunk);
        let mut images = RowImages::new(rows, &bound.shape).map_err(|error| self.malformed(&error))?;
        loop {
            if images.is_empty() {
                return Ok(());
            }
            chunk.push_event(bound.table);
            let read = images.next_row(&bound.indices, |place, value| {
                bound.set_field(place, value, buffer, chunk);
                Ok::<(), Malformed>(())
            });
            read.map_err(|error| self.malformed(&error))?;
        }
    }

    /// Makes the transaction's commit the chunk's latest.
    fn list_commit(&mut self, chunk: &mut Chunk) {
        let Some(transaction) = &mut self.transaction else { return };
        transaction.eventful = true;
        if !transaction.listed {
            transaction.listed = true;
            let id = match transaction.id {
                Id::MySql { uuid, number, ref tag } => CommitId::MySql { uuid, number, tagged: !tag.is_empty() },
                Id::MariaDb(id) => CommitId::MariaDb(id),
                Id::None => CommitId::Binlog { file: self.file.number(), offset: self.file.offset },
            };
            chunk.begin_commit(Commit { id, committed_at: transaction.committed_at });
        }
    }

    /// An ordinary commit. Held rows wait for the decision on an XA transaction, which this is not.
    fn commit_whole(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        if self.transaction.as_ref().is_some_and(|open| !open.held.is_empty()) {
            return Err(self.unreadable("an XA transaction ends without being prepared"));
        }
        self.commit(chunk);
        Ok(())
    }

    fn commit(&mut self, chunk: &mut Chunk) {
        let Some(transaction) = self.transaction.take() else { return };
        self.add(&transaction.id);
        if transaction.eventful {
            self.position.seen.eventful += 1;
            chunk.transactions += 1;
        } else if transaction.other || !transaction.checkpoint {
            self.position.seen.others += 1;
        }
        self.end_here(transaction.committed_at);
    }

    fn end_here(&mut self, committed_at: Micros) {
        if self.position.file.file != self.file.file {
            self.position.file.file.clone_from(&self.file.file);
        }
        self.position.file.offset = self.file.offset;
        self.ended = Some(committed_at);
    }

    /// Adds a transaction to the position.
    fn add(&mut self, id: &Id) {
        match (&mut self.position.gtids, id) {
            (Gtids::MySql(set), Id::MySql { uuid, tag, number }) => {
                // The tag was read by the same rules.
                set.insert(*uuid, super::gtid::Tag::parse(tag.as_bytes()).unwrap_or_default(), *number);
            }
            (Gtids::MariaDb(list), Id::MariaDb(id)) => list.update(*id),
            _ => {}
        }
    }

    /// Keeps rows of an XA transaction until it is decided.
    fn hold(&mut self, bound: Arc<Bound>, rows: Vec<u8>) -> Result<(), SourceFailure> {
        let held: usize = self.prepared.values().map(|prepared| prepared.bytes).sum();
        let Some(transaction) = &mut self.transaction else { return Ok(()) };
        let here: usize = transaction.held.iter().map(|(_, rows)| rows.len()).sum();
        if held + here + rows.len() > MAX_PREPARED {
            return Err(undecodable(
                format!("prepared XA transactions hold more than {MAX_PREPARED} bytes of outbox rows"),
                "commit or roll back what XA RECOVER lists, and keep XA transactions small",
            ));
        }
        transaction.held.push((bound, rows));
        Ok(())
    }

    fn prepare(&mut self, xid: Xid, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        let Some(transaction) = &mut self.transaction else {
            return Err(self.unreadable("an XA transaction is prepared that did not begin"));
        };
        if transaction.held.is_empty() {
            // Nothing of ours: it may be committed or not.
            self.commit(chunk);
            return Ok(());
        }
        let rows = std::mem::take(&mut transaction.held);
        let bytes = rows.iter().map(|(_, rows)| rows.len()).sum();
        tracing::info!(%xid, "outbox rows of a prepared XA transaction wait for its commit");
        if let Some(transaction) = self.transaction.take() {
            self.prepared.insert(xid, Prepared { id: transaction.id, rows, bytes });
        }
        Ok(())
    }

    /// `XA COMMIT … ONE PHASE`: the rows were held for nothing.
    fn commit_prepared_here(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        let held = self.transaction.as_mut().map(|open| std::mem::take(&mut open.held)).unwrap_or_default();
        self.deliver_held(&held, chunk)?;
        self.commit(chunk);
        Ok(())
    }

    fn decide(&mut self, xid: &Xid, committed: bool, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        match self.prepared.remove(xid) {
            Some(prepared) => {
                if committed {
                    self.deliver_held(&prepared.rows, chunk)?;
                }
                // A list has no holes to fill: there the position has waited.
                if matches!(self.position.gtids, Gtids::MySql(_)) {
                    self.add(&prepared.id);
                }
            }
            None if committed => {
                tracing::debug!(%xid, "an XA transaction without outbox rows, or prepared before the start, is committed");
            }
            None => {}
        }
        self.commit(chunk);
        Ok(())
    }

    fn deliver_held(&mut self, held: &[(Arc<Bound>, Vec<u8>)], chunk: &mut Chunk) -> Result<(), SourceFailure> {
        for (bound, kept) in held {
            let Some((len, rest)) = kept.split_first_chunk::<4>() else { continue };
            let (present, rows) = rest.split_at(u32::from_le_bytes(*len) as usize);
            let rows = event::WriteRows { columns: bound.shape.columns.len(), present, rows };
            self.push_rows(bound, &rows, None, chunk)?;
        }
        Ok(())
    }

    fn malformed(&self, error: &Malformed) -> SourceFailure {
        self.unreadable(&error.to_string())
    }

    pub fn unreadable(&self, why: &str) -> SourceFailure {
        undecodable(
            format!("the binary log cannot be read at {}: {why}", self.file),
            "please report it with the server's version; mysqlbinlog shows what is there",
        )
    }

    /// What the position cannot pass: the end of what was read.
    pub fn reached(&self) -> &FilePos {
        &self.file
    }
}
