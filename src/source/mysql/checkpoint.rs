//! Where a pipeline's position is kept: in the source's own table, unless the user chose another place.

use super::conninfo::ConnInfo;
use super::session::{Session, literal};
use crate::checkpoint::{Checkpoint, SnapshotState, Store};
use crate::config::{CheckpointPlace, KafkaSettings};
use crate::source::SourceFailure;

/// Creates the table; run by `init`, by the first start, or by hand.
pub const CREATE: &str = include_str!("../../../sql/mysql/checkpoint.sql");

/// Where the checkpoint is.
pub enum Place {
    Table,
    Elsewhere(Store),
}

impl Place {
    pub fn open(place: &CheckpointPlace, kafka: &KafkaSettings) -> Result<Self, SourceFailure> {
        Ok(match Store::open(place, kafka)? {
            None => Place::Table,
            Some(store) => Place::Elsewhere(store),
        })
    }

    pub async fn load(&self, session: &mut Session, pipeline: &str) -> Result<Option<Checkpoint>, SourceFailure> {
        match self {
            Place::Table => load(session, pipeline).await,
            Place::Elsewhere(store) => Ok(store.load(pipeline).await?),
        }
    }

    /// As [`load`](Self::load), and makes nothing that is missing.
    pub async fn peek(&self, session: &mut Session, pipeline: &str) -> Result<Option<Checkpoint>, SourceFailure> {
        match self {
            Place::Table => load(session, pipeline).await,
            Place::Elsewhere(store) => Ok(store.peek(pipeline).await?),
        }
    }

    /// Looks whether a place outside of the source could be written.
    pub async fn check_writable(&self) -> Result<(), SourceFailure> {
        match self {
            Place::Table => Ok(()),
            Place::Elsewhere(store) => Ok(store.check_writable().await?),
        }
    }

    pub async fn save(&self, session: &mut Session, checkpoint: &Checkpoint) -> Result<(), SourceFailure> {
        match self {
            Place::Table => session.execute(&upsert(checkpoint)).await,
            Place::Elsewhere(store) => Ok(store.save(checkpoint).await?),
        }
    }

    /// Whether a table has to be there.
    pub fn is_table(&self) -> bool {
        matches!(self, Place::Table)
    }
}

pub async fn table_exists(session: &mut Session, database: &str) -> Result<bool, SourceFailure> {
    let statement = format!(
        "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = {} AND table_name = 'outboxd_checkpoint'",
        literal(database)
    );
    Ok(session.query_one(&statement).await?.number(0) > 0)
}

async fn load(session: &mut Session, pipeline: &str) -> Result<Option<Checkpoint>, SourceFailure> {
    let statement = format!(
        "SELECT format, source, server, position, file, snapshot FROM outboxd_checkpoint WHERE pipeline = {}",
        literal(pipeline)
    );
    let rows = session.query(&statement).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let format = row.number(0) as u32;
    Checkpoint::check_format(pipeline, format)?;
    Ok(Some(Checkpoint {
        format,
        pipeline: pipeline.to_owned(),
        source: row.string(1),
        server: row.string(2),
        position: row.string(3),
        file: row.string(4),
        snapshot: SnapshotState::parse(&row.string(5)),
    }))
}

/// The text that [`Place::save`] put into a row of its own, if there is one.
pub async fn load_note(session: &mut Session, key: &str) -> Result<Option<String>, SourceFailure> {
    let exists = "SELECT COUNT(*) FROM information_schema.tables \
         WHERE table_schema = DATABASE() AND table_name = 'outboxd_checkpoint'";
    if session.query_one(exists).await?.number(0) == 0 {
        return Ok(None);
    }
    Ok(load(session, key).await?.map(|note| note.position))
}

fn values(checkpoint: &Checkpoint) -> String {
    format!(
        "({}, {}, {}, {}, {}, {}, {})",
        literal(&checkpoint.pipeline),
        checkpoint.format,
        literal(&checkpoint.source),
        literal(&checkpoint.server),
        literal(&checkpoint.position),
        literal(&checkpoint.file),
        literal(checkpoint.snapshot.as_str())
    )
}

const COLUMNS: &str = "(pipeline, format, source, server, position, file, snapshot)";

fn upsert(checkpoint: &Checkpoint) -> String {
    format!(
        "INSERT INTO outboxd_checkpoint {COLUMNS} VALUES {} ON DUPLICATE KEY UPDATE format = VALUES(format), \
         source = VALUES(source), server = VALUES(server), position = VALUES(position), file = VALUES(file), \
         snapshot = VALUES(snapshot)",
        values(checkpoint)
    )
}

/// The statement that stores a first row, for `init`.
pub fn first_row(checkpoint: &Checkpoint) -> String {
    format!("INSERT IGNORE INTO outboxd_checkpoint {COLUMNS} VALUES {}", values(checkpoint))
}

/// The database that holds the checkpoint and the tables without a database of their own.
pub fn database(info: &ConnInfo) -> Result<&str, SourceFailure> {
    info.database.as_deref().ok_or_else(|| SourceFailure::Misconfigured {
        what: "the source's URL names no database".to_owned(),
        remedy: "write mysql://user@host/database: it is where the outbox and the checkpoint are".to_owned(),
    })
}
