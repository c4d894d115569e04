//! The inbox in PostgreSQL: one statement for an event that is new or was processed, two for one that is late.
//!
//! Two transactions with the same event at once: the second one's insert waits for the first. If that commits, the second
//! inserts nothing; if it rolls back, the second goes on as if it were alone. Two events of one entity at once: the second
//! waits for the entity's row, and judges its version by what is committed then. That holds at every isolation level: where
//! a snapshot is kept for the whole transaction, PostgreSQL refuses to write what others have changed since (40001) instead
//! of judging by the snapshot.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error, Transaction};

use super::{Accepted, Event};

/// The memory of one group of consumers.
#[derive(Clone, Debug)]
pub struct Inbox {
    group: String,
    accept: String,
    last_seen: String,
}

/// Why it could not be told whether an event is new. The transaction cannot be used any more: roll it back.
#[derive(Debug, thiserror::Error)]
pub enum InboxError {
    #[error("the tables of the inbox are missing, or have other columns: run sql/postgres/processed-events.sql ({0})")]
    NoTables(#[source] Error),
    /// Deadlocks, and conflicts of repeatable read and serializable.
    #[error("another transaction was in the way: process the event again ({0})")]
    Again(#[source] Error),
    #[error("the inbox cannot be asked: {0}")]
    Database(#[source] Error),
}

impl From<Error> for InboxError {
    fn from(error: Error) -> Self {
        match error.code() {
            Some(&SqlState::UNDEFINED_TABLE | &SqlState::UNDEFINED_COLUMN) => InboxError::NoTables(error),
            Some(&SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED) => InboxError::Again(error),
            _ => InboxError::Database(error),
        }
    }
}

impl Inbox {
    /// The memory of a group of consumers: all that do the same with an event, usually a consumer group of Kafka. The
    /// tables are found by the connection's search path.
    pub fn new(group: impl Into<String>) -> Self {
        Self::at(group.into(), "")
    }

    /// The same with the tables of a schema.
    #[must_use]
    pub fn in_schema(self, schema: &str) -> Self {
        Self::at(self.group, &format!("\"{}\".", schema.replace('"', "\"\"")))
    }

    fn at(group: String, schema: &str) -> Self {
        // The version is looked at only of an event that is new, and the row of a version that is too low is locked as well:
        // what `last_seen` reads cannot change any more.
        let accept = format!(
            "WITH event AS (
                 INSERT INTO {schema}processed_events (consumer_group, event_id, entity_type, entity_id, entity_version)
                 VALUES ($1, $2, $3, $4, $5)
                 ON CONFLICT (consumer_group, event_id) DO NOTHING
                 RETURNING 1
             ), version AS (
                 INSERT INTO {schema}processed_versions AS seen
                     (consumer_group, entity_type, entity_id, entity_version, event_id)
                 SELECT $1, $3, $4, $5, $2 FROM event WHERE $4 IS NOT NULL
                 ON CONFLICT (consumer_group, entity_type, entity_id) DO UPDATE
                 SET entity_version = excluded.entity_version, event_id = excluded.event_id, seen_at = excluded.seen_at
                 WHERE seen.entity_version < excluded.entity_version
                 RETURNING 1
             )
             SELECT EXISTS (SELECT FROM event), EXISTS (SELECT FROM version)"
        );
        let last_seen = format!(
            "SELECT entity_version FROM {schema}processed_versions
             WHERE consumer_group = $1 AND entity_type = $2 AND entity_id = $3"
        );
        Inbox { group, accept, last_seen }
    }

    /// Whether the event is to have its effect, and the memory of it. Both are the transaction's: when it is rolled back,
    /// the event was never seen.
    ///
    /// Several events may be accepted in one transaction; consumers that do so in different orders may end in a deadlock,
    /// which PostgreSQL tells one of them: [`InboxError::Again`].
    pub async fn accept(&self, transaction: &Transaction<'_>, event: &Event<'_>) -> Result<Accepted, InboxError> {
        let (kind, entity) = (event.entity.map(|entity| entity.kind), event.entity.map(|entity| entity.id));
        let version = event.entity.map(|entity| entity.version);
        // With the types said, the statement is neither prepared nor named: one way there and back, also through a pooler.
        let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
            (&self.group, Type::TEXT),
            (&event.id, Type::TEXT),
            (&kind, Type::TEXT),
            (&entity, Type::TEXT),
            (&version, Type::INT8),
        ];
        let told = transaction.query_typed(&self.accept, &parameters).await?;
        let (is_new, is_later) = told.first().map_or((false, false), |row| (row.get(0), row.get(1)));
        if !is_new {
            return Ok(Accepted::Duplicate);
        }
        let Some(entity) = event.entity.filter(|_| !is_later) else { return Ok(Accepted::New) };
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&self.group, Type::TEXT), (&entity.kind, Type::TEXT), (&entity.id, Type::TEXT)];
        let seen = transaction.query_typed(&self.last_seen, &parameters).await?;
        Ok(Accepted::Stale { last_seen: seen.first().map_or(entity.version, |row| row.get(0)) })
    }
}
