//! `--snapshot existing`: the rows that are in the table when the log is first entered.
//!
//! Every row must be in the snapshot or in the log after it, and never in neither. How that is had without stopping
//! writers depends on the server:
//!
//! ```text
//!   MySQL with GTIDs   gtid_executed first, then the snapshot: a transaction is visible before it is in that set
//!   MariaDB            the snapshot knows its own place in the log (binlog_snapshot_file, binlog_snapshot_position)
//!   without GTIDs      the tables are locked for the moment between reading the place and opening the snapshot
//! ```
//!
//! What is committed between the two moments is delivered twice. After a crash a fresh snapshot is read, and the log
//! from the same place as before.
//!
//! After a lost position it is the rows that are not marked, in the layout's order, instead of all.

use std::sync::Arc;

use super::conninfo::ConnInfo;
use super::position::{BinlogPosition, FilePos, Gtids};
use super::server::Server;
use super::session::{Flavor, Session, literal, quote};
use super::tables::CatalogTable;
use super::values::render_uuid;
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Field, Micros, Projection, Want};
use crate::position::Position;
use crate::source::poll::View;
use crate::source::poll::mysql::tests;
use crate::source::{SourceFailure, SourceStats};

const ROWS_PER_CHUNK: usize = 1000;
const BYTES_PER_CHUNK: usize = 1 << 20;

pub struct SnapshotReader {
    session: Session,
    tables: Vec<CatalogTable>,
    uuid_columns: Vec<String>,
    /// The table being read, and whether its query is running.
    current: usize,
    open: bool,
    /// Where the log goes on.
    end: BinlogPosition,
    only: Only,
}

/// How rows that are not marked are told, and where they are counted; `None`: all are read.
pub type Only = Option<(Arc<View>, Arc<SourceStats>)>;

impl SnapshotReader {
    /// Opens the snapshot. Without a position to go on from, finds the one that belongs to it.
    pub async fn begin(
        info: &ConnInfo,
        server: &Server,
        tables: Vec<CatalogTable>,
        uuid_columns: Vec<String>,
        from: Option<BinlogPosition>,
        only: Only,
    ) -> Result<Self, SourceFailure> {
        let mut session = Session::connect(info).await?;
        session.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ").await?;
        // While the broker is away nothing is read, and the server must not hang up.
        session.execute("SET SESSION net_write_timeout = 86400").await?;
        let end = match (from, server.flavor, server.has_gtids()) {
            (Some(from), ..) => {
                enter(&mut session).await?;
                from
            }
            (None, Flavor::MySql, true) => {
                let end = server.end(&mut session).await?;
                enter(&mut session).await?;
                end
            }
            (None, Flavor::MariaDb, _) => {
                enter(&mut session).await?;
                own_place(&mut session).await?
            }
            (None, Flavor::MySql, false) => {
                let mut locking = Session::connect(info).await?;
                let names: Vec<_> = tables.iter().map(|table| format!("{} READ", table.quoted())).collect();
                locking.execute(&format!("LOCK TABLES {}", names.join(", "))).await?;
                let end = server.end(&mut session).await?;
                enter(&mut session).await?;
                locking.execute("UNLOCK TABLES").await?;
                locking.close().await;
                end
            }
        };
        Ok(SnapshotReader { session, tables, uuid_columns, current: 0, open: false, end, only })
    }

    pub fn end(&self) -> &BinlogPosition {
        &self.end
    }

    /// Fills the chunk with rows; true with the last one, which has the position to go on from.
    pub async fn next(&mut self, chunk: &mut Chunk, projection: &Projection) -> Result<bool, SourceFailure> {
        loop {
            chunk.reset(projection.width());
            let Some(table) = self.tables.get(self.current) else {
                let position = Position::Binlog(Box::new(self.end.clone()));
                chunk.end = Some(CommitEnd { position, committed_at: Micros::now() });
                return Ok(true);
            };
            let columns: Vec<_> = projection.columns().filter(|(_, name, _)| table.has(name)).collect();
            if !self.open {
                let only = self.only.as_ref().map(|(view, _)| &**view);
                self.session.stream(&select(table, &columns, only)).await?;
                self.open = true;
            }
            chunk.begin_commit(Commit { id: CommitId::Snapshot, committed_at: Micros::now() });
            chunk.catching_up = true;
            while chunk.events().len() < ROWS_PER_CHUNK && chunk.rendered_len() < BYTES_PER_CHUNK {
                let Some(row) = self.session.next_row().await? else {
                    (self.open, self.current) = (false, self.current + 1);
                    break;
                };
                chunk.push_event(self.current as u32);
                for (at, (slot, name, want)) in columns.iter().enumerate() {
                    let as_uuid = self.uuid_columns.iter().any(|column| column.eq_ignore_ascii_case(name));
                    set_field(chunk, *slot, *want, row.bytes(at), as_uuid);
                }
            }
            if !chunk.events().is_empty() {
                if let Some((_, stats)) = &self.only {
                    stats.gap.read(chunk.events().len());
                }
                return Ok(false);
            }
        }
    }
}

pub(crate) fn set_field(chunk: &mut Chunk, slot: usize, want: Want, value: Option<&[u8]>, as_uuid: bool) {
    match (want, value) {
        (_, None) => chunk.set_field(slot, Field::Null),
        (Want::Text | Want::Key, Some(bytes)) => chunk.render_field(slot, |out| {
            if !as_uuid || render_uuid(bytes, out).is_err() {
                out.extend_from_slice(bytes);
            }
        }),
        (Want::Time, Some(bytes)) => match std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<i64>().ok()) {
            Some(micros) => chunk.render_field(slot, |out| out.extend_from_slice(&micros.to_be_bytes())),
            None => chunk.set_field(slot, Field::Null),
        },
    }
}

async fn enter(session: &mut Session) -> Result<(), SourceFailure> {
    session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT").await
}

/// Where in the log a MariaDB snapshot lies.
async fn own_place(session: &mut Session) -> Result<BinlogPosition, SourceFailure> {
    let rows = session.query("SHOW STATUS LIKE 'binlog_snapshot_%'").await?;
    let value = |name: &str| {
        let row = rows.iter().find(|row| row.string(0).eq_ignore_ascii_case(name));
        row.map(|row| row.string(1)).unwrap_or_default()
    };
    let file =
        FilePos { file: value("Binlog_snapshot_file"), offset: value("Binlog_snapshot_position").parse().unwrap_or(0) };
    let statement = format!("SELECT BINLOG_GTID_POS({}, {})", literal(&file.file), file.offset);
    let list = session.query_one(&statement).await?.string(0);
    let list = list.parse().map_err(|_| SourceFailure::transient(format!("no GTIDs for the snapshot at {file}")))?;
    Ok(BinlogPosition::new(Gtids::MariaDb(list), file))
}

/// The wanted columns, in the order of the layout's timestamp where it has one; a moment as its microseconds.
fn select(table: &CatalogTable, columns: &[(usize, &str, Want)], only: Option<&View>) -> String {
    let wanted = columns.iter().map(|(_, name, want)| match want {
        Want::Text | Want::Key => quote(name),
        Want::Time => format!("TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', {})", quote(name)),
    });
    let wanted: Vec<_> = wanted.collect();
    let mut order: Vec<_> =
        columns.iter().filter(|(_, _, want)| *want == Want::Time).map(|(_, name, _)| quote(name)).collect();
    if table.has("id") {
        order.push(quote("id"));
    }
    let own = only.and_then(|view| view.sql_order(|column| table.has(column), quote));
    let order = own.unwrap_or_else(|| order.join(", "));
    let order = if order.is_empty() { String::new() } else { format!(" ORDER BY {order}") };
    let unmarked = only.map(|view| {
        let again = view.scheme.failed_again.map(|again| format!(" OR ({})", tests(view, again)));
        format!(" WHERE ({}){}", tests(view, view.scheme.open), again.unwrap_or_default())
    });
    format!("SELECT {} FROM {}{}{order}", wanted.join(", "), table.quoted(), unmarked.unwrap_or_default())
}
