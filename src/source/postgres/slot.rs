//! The SQL side of a slot: its state, its publication, its creation, and what it means when it is lost.

use super::checkpoint::Checkpoint;
use super::server_error::classify_sql;
use super::sql::SqlSession;
use super::tables::{CatalogTable, quote};
use super::walsender::{SystemIdentity, WalsenderConnection};
use crate::position::Lsn;
use crate::source::SourceFailure;

/// A slot as `pg_replication_slots` shows it.
#[derive(Clone, Debug)]
pub struct SlotState {
    pub plugin: Option<String>,
    pub database: Option<String>,
    pub active_pid: Option<i32>,
    pub confirmed: Option<Lsn>,
    pub restart: Option<Lsn>,
    pub wal_status: Option<String>,
    /// Bytes of log that can still be written before the slot is in danger; none when there is no limit.
    pub safe_wal_size: Option<i64>,
    /// Why the server gave the slot up (PostgreSQL 17+; 16 says only that it conflicts).
    pub invalidation: Option<String>,
    pub current: Lsn,
}

/// A slot with less room than this before `max_slot_wal_keep_size` takes it away is worth a warning.
const NARROW: i64 = 256 << 20;

impl SlotState {
    /// The bytes that can still be written, when they are few.
    pub fn narrow(&self) -> Option<i64> {
        self.safe_wal_size.filter(|room| *room < NARROW)
    }

    pub fn retained_bytes(&self) -> u64 {
        self.restart.map_or(0, |restart| self.current.bytes_since(restart))
    }

    /// Why the log this slot needs is gone, if it is.
    pub fn lost(&self) -> Option<String> {
        if let Some(reason) = &self.invalidation {
            return Some(format!("the server invalidated it ({reason})"));
        }
        let lost = self.wal_status.as_deref() == Some("lost");
        lost.then(|| "the log it needs was removed (wal_status lost): max_slot_wal_keep_size was exceeded".to_owned())
    }
}

pub async fn state(session: &SqlSession, slot: &str, version: u32) -> Result<Option<SlotState>, SourceFailure> {
    let invalidation = match version {
        170_000.. => "invalidation_reason",
        160_000.. => "CASE WHEN conflicting THEN 'conflicts with recovery' END",
        _ => "NULL::text",
    };
    let statement = format!(
        "SELECT plugin::text, database::text, active_pid, confirmed_flush_lsn::text, restart_lsn::text, wal_status,
                safe_wal_size, {invalidation},
                CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END::text
         FROM pg_catalog.pg_replication_slots WHERE slot_name = $1"
    );
    let row = session
        .query_opt(&statement, &[&slot])
        .await
        .map_err(|error| classify_sql(&error, "reading pg_replication_slots"))?;
    let lsn = |text: Option<String>| text.and_then(|text| text.parse().ok());
    Ok(row.map(|row| SlotState {
        plugin: row.get(0),
        database: row.get(1),
        active_pid: row.get(2),
        confirmed: lsn(row.get(3)),
        restart: lsn(row.get(4)),
        wal_status: row.get(5),
        safe_wal_size: row.get(6),
        invalidation: row.get(7),
        current: lsn(row.get(8)).unwrap_or_default(),
    }))
}

/// What was created, and the snapshot of the tables at that moment, which lives until the connection's next command.
pub struct CreatedSlot {
    pub consistent_point: Lsn,
    pub snapshot: Option<String>,
}

/// The replication command that creates the slot. Where the server can, the slot follows a fail-over.
pub fn create_command(slot: &str, version: u32, export_snapshot: bool) -> String {
    let slot = quote(slot);
    if version < 150_000 {
        let export = if export_snapshot { "EXPORT_SNAPSHOT" } else { "NOEXPORT_SNAPSHOT" };
        return format!("CREATE_REPLICATION_SLOT {slot} LOGICAL pgoutput {export}");
    }
    let export = if export_snapshot { "export" } else { "nothing" };
    let failover = if version >= 170_000 { ", FAILOVER true" } else { "" };
    format!("CREATE_REPLICATION_SLOT {slot} LOGICAL pgoutput (SNAPSHOT '{export}'{failover})")
}

pub async fn create(
    connection: &mut WalsenderConnection,
    slot: &str,
    export_snapshot: bool,
) -> Result<CreatedSlot, SourceFailure> {
    tracing::info!(slot, "creating the replication slot; the server waits for running transactions to end");
    let command = create_command(slot, connection.server_version(), export_snapshot);
    let rows = connection.simple_query(&command).await?;
    let field = |index: usize| rows.first().and_then(|row| row.get(index)).cloned().flatten();
    let consistent_point = field(1).and_then(|text| text.parse().ok());
    let consistent_point = consistent_point
        .ok_or_else(|| SourceFailure::transient(format!("the server did not say where slot {slot} begins")))?;
    Ok(CreatedSlot { consistent_point, snapshot: field(2).filter(|_| export_snapshot) })
}

/// A publication, and what of the outbox tables it publishes.
#[derive(Clone, Debug)]
pub struct PublicationState {
    pub inserts: bool,
    pub via_root: bool,
    pub all_tables: bool,
    tables: Vec<PublishedTable>,
    /// The partitions that hold the rows of each partitioned outbox table, by its oid.
    leaves: Vec<(u32, Vec<(String, String)>)>,
}

#[derive(Clone, Debug)]
pub struct PublishedTable {
    schema: String,
    name: String,
    /// Before PostgreSQL 15 all of them.
    columns: Option<Vec<String>>,
    pub row_filter: Option<String>,
}

impl PublishedTable {
    pub fn has(&self, column: &str) -> bool {
        self.columns.as_ref().is_none_or(|columns| columns.iter().any(|name| name == column))
    }
}

impl PublicationState {
    /// As what inserts into the table are published: itself, or all its partitions when it has some. Empty when they
    /// are not.
    pub fn published(&self, table: &CatalogTable) -> Vec<&PublishedTable> {
        let find = |schema: &str, name: &str| self.tables.iter().find(|one| one.schema == schema && one.name == name);
        if let Some(itself) = find(&table.schema, &table.name) {
            return vec![itself];
        }
        let leaves = self.leaves.iter().find(|(oid, _)| *oid == table.oid).map_or(&[][..], |(_, leaves)| leaves);
        leaves.iter().map(|(schema, name)| find(schema, name)).collect::<Option<_>>().unwrap_or_default()
    }
}

pub async fn publication(
    session: &SqlSession,
    name: &str,
    outboxes: &[CatalogTable],
) -> Result<Option<PublicationState>, SourceFailure> {
    let failed = |error: tokio_postgres::Error| classify_sql(&error, "reading the publication");
    let found = session
        .query_opt(
            "SELECT pubinsert, pubviaroot, puballtables FROM pg_catalog.pg_publication WHERE pubname = $1",
            &[&name],
        )
        .await
        .map_err(failed)?;
    let Some(row) = found else { return Ok(None) };
    let details = match session.server_version() {
        150_000.. => "attnames::text[], rowfilter",
        _ => "NULL::text[], NULL::text",
    };
    let statement = format!(
        "SELECT schemaname::text, tablename::text, {details} FROM pg_catalog.pg_publication_tables WHERE pubname = $1"
    );
    let tables = session.query(&statement, &[&name]).await.map_err(failed)?;
    let mut partitions = Vec::new();
    for table in outboxes.iter().filter(|table| table.partitioned) {
        partitions.push((table.oid, leaves(session, table).await?));
    }
    let published = |row: &tokio_postgres::Row| PublishedTable {
        schema: row.get(0),
        name: row.get(1),
        columns: row.get(2),
        row_filter: row.get(3),
    };
    Ok(Some(PublicationState {
        inserts: row.get(0),
        via_root: row.get(1),
        all_tables: row.get(2),
        tables: tables.iter().map(published).collect(),
        leaves: partitions,
    }))
}

/// The partitions of a partitioned table that hold rows.
async fn leaves(session: &SqlSession, table: &CatalogTable) -> Result<Vec<(String, String)>, SourceFailure> {
    let rows = session
        .query(
            "SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_partition_tree($1::oid) p
             JOIN pg_catalog.pg_class c ON c.oid = p.relid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
             WHERE p.isleaf AND c.oid <> $1::oid",
            &[&table.oid],
        )
        .await
        .map_err(|error| classify_sql(&error, "reading the outbox table's partitions"))?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// The statement that makes the publication: inserts only, partitions under their table's name.
pub fn create_publication(name: &str, tables: impl IntoIterator<Item = String>) -> String {
    let listed = tables.into_iter().collect::<Vec<_>>().join(", ");
    let tables = if listed.is_empty() { String::new() } else { format!(" FOR TABLE {listed}") };
    let options = "publish = 'insert', publish_via_partition_root = true";
    format!("CREATE PUBLICATION {}{tables} WITH ({options})", quote(name))
}

/// What a person must know when the log no longer has what was not delivered.
pub fn gap_report(
    pipeline: &str,
    why: &str,
    checkpoint: Option<&Checkpoint>,
    slot: Option<&SlotState>,
    server: &SystemIdentity,
) -> String {
    use std::fmt::Write as _;
    let mut report = format!("the position of pipeline `{pipeline}` is lost: {why}");
    if let Some(checkpoint) = checkpoint {
        let _ = write!(
            report,
            "\n  delivered and confirmed up to: {} (or later), slot {}, server {} timeline {}, recorded {}",
            checkpoint.position,
            checkpoint.slot,
            checkpoint.system_identifier,
            checkpoint.timeline,
            checkpoint.updated_at
        );
    }
    let oldest = slot.and_then(|slot| slot.restart);
    let _ = write!(
        report,
        "\n  server now: {} timeline {} at {}",
        server.system_identifier, server.timeline, server.wal_position
    );
    if let Some(slot) = slot {
        let confirmed = slot.confirmed.map_or_else(|| "unknown".to_owned(), |lsn| lsn.to_string());
        let restart = oldest.map_or_else(|| "none".to_owned(), |lsn| lsn.to_string());
        let status = slot.wal_status.as_deref().unwrap_or("unknown");
        let _ = write!(report, "\n  slot now: confirmed {confirmed}, oldest log kept {restart}, wal_status {status}");
    }
    let from = slot.and_then(|slot| slot.confirmed).max(checkpoint.map(|checkpoint| checkpoint.position));
    if let Some(from) = from {
        let to = server.wal_position;
        let _ = write!(report, "\n  the gap: commits after {from} up to {to} ({} bytes of log)", to.bytes_since(from));
    }
    report.push_str("\n  nothing was skipped or confirmed");
    report
}
