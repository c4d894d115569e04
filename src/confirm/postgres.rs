//! Receipts in a table of PostgreSQL.

use std::sync::Arc;

use tokio_postgres::Statement;

use super::id::{Id, IdKind};
use super::receipts::{NotWritten, no_column, no_index, no_kind, no_table};
use super::settings::ConfirmSettings;
use crate::config::PostgresSettings;
use crate::source::SourceFailure;
use crate::source::postgres;
use crate::source::postgres::server_error::classify_sql;
use crate::source::postgres::sql::{self, SqlSession};
use crate::source::postgres::tables::{CatalogTable, Tables, quote};

/// Rows are locked in the order in which a scan meets them, and only an index on the id keeps the order of ids. A lock that
/// is not to be had within half a second is left to the other side: the server looks for circles after a second
/// (`deadlock_timeout`), so that it is always we who give way, and never the relay, which would deliver again.
const SESSION: &str = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET lock_timeout = '500ms'";

const BPCHAR: u32 = 1042;

/// Deadlock, lock time-out, serialisation failure.
const CONFLICTS: [&str; 3] = ["40P01", "55P03", "40001"];

pub struct PgReceipts {
    session: Arc<SqlSession>,
    update: Statement,
    kind: IdKind,
    table: String,
}

impl PgReceipts {
    pub async fn open(source: &PostgresSettings, settings: &ConfirmSettings) -> Result<Self, SourceFailure> {
        let session = Arc::new(sql::connect(&postgres::conninfo(source)?).await?);
        let failed = |error: tokio_postgres::Error| session.classify(&error);
        let standby = session.query_one("SELECT pg_catalog.pg_is_in_recovery()", &[]).await.map_err(failed)?;
        if standby.get(0) {
            let what = format!("{} is a standby: waiting for its promotion", session.description());
            return Err(SourceFailure::transient(what));
        }
        let (tables, _) = Tables::find(&session, std::slice::from_ref(&settings.table)).await?;
        let Some(table) = tables.catalog.into_iter().next() else { return Err(no_table(&settings.table)) };
        let (name, id, received_at) = (table.quoted(), &settings.id, &settings.received_at);
        if !table.has(received_at) {
            let add = format!("ALTER TABLE {name} ADD COLUMN {} timestamptz", quote(received_at));
            return Err(no_column(&name, "received_at", received_at, add));
        }
        let Some((_, type_oid)) = table.columns.iter().find(|(column, _)| column == id) else {
            return Err(no_column(&name, "id", id, format!("ALTER TABLE {name} ADD COLUMN {} bigint", quote(id))));
        };
        let kind = match *type_oid {
            21 => IdKind::signed(2),
            23 => IdKind::signed(4),
            20 => IdKind::signed(8),
            2950 => IdKind::Uuid,
            25 | BPCHAR | 1043 => IdKind::Text,
            _ => {
                let row = session.query_one("SELECT format_type($1, NULL)", &[type_oid]).await.map_err(failed)?;
                return Err(no_kind(&name, id, row.get(0)));
            }
        };
        rights(&session, &table, settings).await?;
        if !is_indexed(&session, &table, id).await? {
            no_index(&name, id);
        }
        session.batch_execute(SESSION).await.map_err(failed)?;
        let of_kind = match (kind, *type_oid) {
            (IdKind::Integer { .. }, _) => "bigint",
            (IdKind::Uuid, _) => "uuid",
            // As texts they would not be found by the index.
            (IdKind::Text, BPCHAR) => "bpchar",
            (IdKind::Text, _) => "text",
        };
        let update = format!(
            "UPDATE {name} SET {column} = statement_timestamp() WHERE {} = ANY ($1::text[]::{of_kind}[]) AND {column} IS NULL",
            quote(id),
            column = quote(received_at),
        );
        let update = session.prepare(&update).await.map_err(failed)?;
        Ok(PgReceipts { session, update, kind, table: name })
    }

    pub fn describe(&self) -> String {
        format!("{} of {}", self.table, self.session.description())
    }

    pub fn kind(&self) -> IdKind {
        self.kind
    }

    pub async fn write(&mut self, ids: &[Id]) -> Result<u64, NotWritten> {
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        self.session.execute(&self.update, &[&ids]).await.map_err(|error| {
            let failure = classify_sql(&error, &format!("writing receipts to {}", self.table));
            let code = error.code().map(|code| code.code().to_owned()).unwrap_or_default();
            match CONFLICTS.contains(&code.as_str()) {
                true => NotWritten::Conflict(failure.to_string()),
                false => NotWritten::Failed(failure),
            }
        })
    }

    pub async fn beat(&mut self) -> Result<(), SourceFailure> {
        self.session.batch_execute("SELECT 1").await.map_err(|error| self.session.classify(&error))
    }
}

/// A role may have rights to single columns.
async fn rights(session: &SqlSession, table: &CatalogTable, settings: &ConfirmSettings) -> Result<(), SourceFailure> {
    let asked = "SELECT privilege, column_name, current_user::text FROM
         (VALUES ('SELECT', $2::text), ('SELECT', $3::text), ('UPDATE', $3::text)) AS needed (privilege, column_name)
         WHERE NOT has_column_privilege($1::oid, column_name, privilege)";
    let rows = session.query(asked, &[&table.oid, &settings.id, &settings.received_at]).await;
    let rows = rows.map_err(|error| session.classify(&error))?;
    let Some(role) = rows.first().map(|row| row.get::<_, String>(2)) else { return Ok(()) };
    let lacking: Vec<_> =
        rows.iter().map(|row| format!("{} ({})", row.get::<_, &str>(0), row.get::<_, &str>(1))).collect();
    let name = table.quoted();
    Err(SourceFailure::NotReady {
        what: format!("the role {role} lacks {} on {name}", lacking.join(", ")),
        remedy: format!(
            "GRANT SELECT ({}, {received_at}), UPDATE ({received_at}) ON {name} TO {}",
            quote(&settings.id),
            quote(&role),
            received_at = quote(&settings.received_at),
        ),
    })
}

async fn is_indexed(session: &SqlSession, table: &CatalogTable, id: &str) -> Result<bool, SourceFailure> {
    let asked = "SELECT EXISTS (SELECT FROM pg_catalog.pg_index i
         JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
         WHERE i.indrelid = $1 AND i.indisvalid AND a.attname = $2)";
    let row = session.query_one(asked, &[&table.oid, &id]).await;
    row.map(|row| row.get(0)).map_err(|error| session.classify(&error))
}
