//! `--snapshot existing`: the rows that are in the table when the log is first entered.
//!
//! The snapshot is the one the slot's creation exported, so that every row is either in it or in the stream, never in
//! both and never in neither. After a crash in the middle that snapshot is gone: a fresh one is read instead, and what
//! was committed between the two is delivered twice.
//!
//! After a lost position it is the rows that are not marked, in the layout's order, instead of all.

use std::sync::Arc;

use tokio_postgres::SimpleQueryMessage;

use super::server_error::classify_sql;
use super::sql::SqlSession;
use super::tables::{CatalogTable, quote};
use super::values::{BadValue, Rendered, render_text};
use super::walsender::SESSION_PARAMETERS;
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Field, Micros, Projection, Want};
use crate::position::{Lsn, Position};
use crate::source::poll::View;
use crate::source::poll::postgres::tests;
use crate::source::{SourceFailure, SourceStats};

const ROWS_PER_FETCH: usize = 1000;

pub struct SnapshotReader {
    session: SqlSession,
    tables: Vec<CatalogTable>,
    /// The table being read, and whether its cursor is open.
    current: usize,
    open: bool,
    /// Where the stream goes on.
    end: Lsn,
    only: Only,
}

/// How rows that are not marked are told, and where they are counted; `None`: all are read.
pub type Only = Option<(Arc<View>, Arc<SourceStats>)>;

impl SnapshotReader {
    /// Enters the snapshot: the exported one, or a fresh one.
    pub async fn begin(
        session: SqlSession,
        exported: Option<&str>,
        tables: Vec<CatalogTable>,
        end: Lsn,
        only: Only,
    ) -> Result<Self, SourceFailure> {
        let mut statements = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY".to_owned();
        if let Some(name) = exported {
            statements.push_str(&format!("; SET TRANSACTION SNAPSHOT '{}'", name.replace('\'', "''")));
        }
        // A policy that hides rows from this role must be an error, not a gap.
        statements.push_str("; SET LOCAL row_security = off");
        // A row must print as the stream prints it, whatever the database's or the role's own settings.
        for (name, value) in SESSION_PARAMETERS {
            statements.push_str(&format!("; SET LOCAL {name} = '{value}'"));
        }
        session
            .batch_execute(&statements)
            .await
            .map_err(|error| classify_sql(&error, "entering the table's snapshot"))?;
        Ok(SnapshotReader { session, tables, current: 0, open: false, end, only })
    }

    /// Fills the chunk with rows; true with the last one, which has the position to go on from.
    pub async fn next(&mut self, chunk: &mut Chunk, projection: &Projection) -> Result<bool, SourceFailure> {
        loop {
            chunk.reset(projection.width());
            let Some(table) = self.tables.get(self.current) else {
                chunk.end = Some(CommitEnd { position: Position::Postgres(self.end), committed_at: Micros::now() });
                return Ok(true);
            };
            if !self.open {
                let declare = declare(table, projection, self.only.as_ref().map(|(view, _)| &**view));
                self.session
                    .batch_execute(&declare)
                    .await
                    .map_err(|error| classify_sql(&error, "reading the rows that are in the outbox table"))?;
                self.open = true;
            }
            let rows = self
                .session
                .simple_query(&format!("FETCH {ROWS_PER_FETCH} FROM outboxd_snapshot"))
                .await
                .map_err(|error| classify_sql(&error, "reading the rows that are in the outbox table"))?;
            chunk.begin_commit(Commit { id: CommitId::Snapshot, committed_at: Micros::now() });
            for message in &rows {
                if let SimpleQueryMessage::Row(row) = message {
                    chunk.push_event(self.current as u32);
                    let mut value = 0;
                    for (slot, name, want) in projection.columns() {
                        let Some((_, type_oid)) = table.columns.iter().find(|(column, _)| column == name) else {
                            continue;
                        };
                        if set_field(slot, *type_oid, want, row.get(value), chunk).is_err() {
                            let why = format!("column `{name}` of {}: its value has an unknown form", table.quoted());
                            chunk.mark_defective(why, Field::Null);
                        }
                        value += 1;
                    }
                }
            }
            if !chunk.events().is_empty() {
                if let Some((_, stats)) = &self.only {
                    stats.gap.read(chunk.events().len());
                }
                return Ok(false);
            }
            self.session
                .batch_execute("CLOSE outboxd_snapshot")
                .await
                .map_err(|error| classify_sql(&error, "closing the table's snapshot"))?;
            (self.open, self.current) = (false, self.current + 1);
        }
    }
}

pub(crate) fn set_field(
    slot: usize,
    type_oid: u32,
    want: Want,
    value: Option<&str>,
    chunk: &mut Chunk,
) -> Result<(), BadValue> {
    let Some(text) = value else {
        chunk.set_field(slot, Field::Null);
        return Ok(());
    };
    let mut rendered = Ok(());
    chunk.render_field(slot, |out| match render_text(type_oid, want, text.as_bytes(), out) {
        Ok(Rendered::Borrowed(bytes)) => out.extend_from_slice(bytes),
        Ok(Rendered::Written) => {}
        Err(bad) => rendered = Err(bad),
    });
    if rendered.is_err() {
        chunk.set_field(slot, Field::Null);
    }
    // A timestamp that cannot be read is none: the commit time stands in.
    if want == Want::Time { Ok(()) } else { rendered }
}

/// The cursor over a table's wanted columns: by the timestamp where the layout has one, else as the rows lie. Of rows that
/// are not marked, in the order that the layout has for them.
fn declare(table: &CatalogTable, projection: &Projection, only: Option<&View>) -> String {
    let has = |name: &str| table.columns.iter().any(|(column, _)| column == name);
    let columns: Vec<_> =
        projection.columns().filter(|(_, name, _)| has(name)).map(|(_, name, _)| quote(name)).collect();
    let time = projection.columns().find(|(_, name, want)| *want == Want::Time && has(name));
    let id = if has("id") { ", \"id\"" } else { "" };
    let own = only.and_then(|view| view.sql_order(has, quote));
    let order = match time {
        _ if own.is_some() => format!("ORDER BY {}", own.unwrap_or_default()),
        Some((_, name, _)) => format!("ORDER BY {}{id}", quote(name)),
        None if table.partitioned => String::new(),
        None => "ORDER BY ctid".to_owned(),
    };
    let unmarked = only.map(|view| {
        let again = view.scheme.failed_again.map(|again| format!(" OR ({})", tests(view, again, "t")));
        format!("t WHERE ({}){} ", tests(view, view.scheme.open, "t"), again.unwrap_or_default())
    });
    let (columns, table, unmarked) = (columns.join(", "), table.quoted(), unmarked.unwrap_or_default());
    format!("DECLARE outboxd_snapshot NO SCROLL CURSOR FOR SELECT {columns} FROM {table} {unmarked}{order}")
}

#[cfg(test)]
mod declared {
    use super::*;

    #[test]
    fn a_snapshot_reads_the_wanted_columns_in_the_order_of_their_time() {
        let mut projection = Projection::default();
        for (name, want) in [("payload", Want::Text), ("missing", Want::Text), ("created_at", Want::Time)] {
            projection.slot(name, want, false);
        }
        let columns = ["id", "payload", "created_at"]
            .map(|name| (name.to_owned(), crate::source::postgres::values::oid::TEXT))
            .to_vec();
        let table = CatalogTable {
            oid: 1,
            schema: "a\"b".to_owned(),
            name: "outbox".to_owned(),
            partitioned: false,
            is_table: true,
            logged: true,
            columns,
        };
        let declared = declare(&table, &projection, None);
        let expected = "SELECT \"payload\", \"created_at\" FROM \"a\"\"b\".\"outbox\" ORDER BY \"created_at\", \"id\"";
        assert!(declared.ends_with(expected), "{declared}");
    }
}
