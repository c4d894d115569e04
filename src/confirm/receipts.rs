//! The table whose rows keep receipts, in one of the databases.

use super::id::{Id, IdKind};
use super::mysql::MyReceipts;
use super::postgres::PgReceipts;
use super::settings::ConfirmSettings;
use crate::config::{SourceSettings, TableName};
use crate::source::SourceFailure;

/// Why receipts were not written.
#[derive(Debug)]
pub enum NotWritten {
    /// Somebody else has rows of the batch locked, or waited for ours: nothing was written, and trying again helps.
    Conflict(String),
    Failed(SourceFailure),
}

pub enum Receipts {
    Postgres(Box<PgReceipts>),
    MySql(Box<MyReceipts>),
}

impl Receipts {
    /// Connects, and makes sure of everything that writing needs.
    pub async fn open(settings: &ConfirmSettings) -> Result<Self, SourceFailure> {
        match &settings.source {
            SourceSettings::Postgres(source) => {
                Ok(Receipts::Postgres(Box::new(PgReceipts::open(source, settings).await?)))
            }
            SourceSettings::MySql(source) => Ok(Receipts::MySql(Box::new(MyReceipts::open(source, settings).await?))),
            SourceSettings::Mongo(_) => Err(SourceFailure::Misconfigured {
                what: "receipts are not confirmed in MongoDB".to_owned(),
                remedy: "name a PostgreSQL, MySQL or MariaDB database".to_owned(),
            }),
        }
    }

    pub fn describe(&self) -> String {
        match self {
            Receipts::Postgres(receipts) => receipts.describe(),
            Receipts::MySql(receipts) => receipts.describe(),
        }
    }

    /// What ids of the table look like.
    pub fn kind(&self) -> IdKind {
        match self {
            Receipts::Postgres(receipts) => receipts.kind(),
            Receipts::MySql(receipts) => receipts.kind(),
        }
    }

    /// Says in one statement that these rows' records were received, unless that was said before; how many it was said of.
    pub async fn write(&mut self, ids: &[Id]) -> Result<u64, NotWritten> {
        match self {
            Receipts::Postgres(receipts) => receipts.write(ids).await,
            Receipts::MySql(receipts) => receipts.write(ids).await,
        }
    }

    /// Asks whether the server is still there.
    pub async fn beat(&mut self) -> Result<(), SourceFailure> {
        match self {
            Receipts::Postgres(receipts) => receipts.beat().await,
            Receipts::MySql(receipts) => receipts.beat().await,
        }
    }
}

pub(super) fn no_table(table: &TableName) -> SourceFailure {
    SourceFailure::NotReady {
        what: format!("the outbox table {table} does not exist"),
        remedy: "create it with `outboxd init --layout produce-receive`, or name another one with --table".to_owned(),
    }
}

pub(super) fn no_column(table: &str, role: &str, column: &str, statement: String) -> SourceFailure {
    SourceFailure::NotReady {
        what: format!("the outbox table {table} has no column `{column}`, which confirming receipts needs"),
        remedy: format!("{statement}; or name a column it has with --column {role}=NAME"),
    }
}

pub(super) fn no_kind(table: &str, column: &str, found: &str) -> SourceFailure {
    SourceFailure::NotReady {
        what: format!(
            "the id `{column}` of {table} has the type {found}, of which records say nothing that could be compared"
        ),
        remedy: "name an id of integers, UUIDs or texts with --column id=NAME".to_owned(),
    }
}

pub(super) fn no_index(table: &str, column: &str) {
    tracing::warn!(table, column, "no index begins with the id: every batch reads the whole table");
}
