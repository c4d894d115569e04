//! Where events come from. A source is two halves, so that confirming a position and answering the server's
//! keepalives never wait for reading: a [`Reader`] that yields chunks, and a [`Confirmer`] that moves the position.

pub mod mongodb;
pub mod mysql;
pub mod notes;
pub mod postgres;
pub mod schema;
pub mod tls;
pub mod transport;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use thiserror::Error;
use tokio::task::JoinHandle;

use crate::config::{PipelineSettings, SourceSettings};
use crate::event::{Chunk, Projection};
use crate::position::Position;
use crate::preflight::Finding;

/// Trouble on the database's side, sorted by what can be done about it.
#[derive(Debug, Error)]
pub enum SourceFailure {
    /// Connection refused or reset, time-out, fail-over: it passes.
    #[error("{what}")]
    Transient { what: String },
    /// Another instance holds the pipeline.
    #[error("{what}")]
    Held { what: String },
    /// The stream must be opened anew, with something learnt.
    #[error("{what}")]
    Restart { what: String },
    /// The address or an option is wrong.
    #[error("{what}")]
    Misconfigured { what: String, remedy: String },
    /// Privileges, settings, missing objects, authentication.
    #[error("{what}")]
    NotReady { what: String, remedy: String },
    /// The log no longer has what was not delivered yet. `what` is the gap report.
    #[error("{what}")]
    PositionLost { what: String, remedy: String },
    /// Bytes that this program cannot read. Never skipped.
    #[error("{what}")]
    Undecodable { what: String, remedy: String },
}

impl SourceFailure {
    pub fn transient(what: impl Into<String>) -> Self {
        SourceFailure::Transient { what: what.into() }
    }
}

/// What a source counts and measures; read by metrics and status.
#[derive(Debug, Default)]
pub struct SourceStats {
    /// The end of the server's log, as far as we were told.
    pub server_position: AtomicU64,
    /// Bytes of log that the server keeps for us.
    pub retained_bytes: AtomicU64,
    /// Bytes of log between the confirmed position and the end, where positions cannot be subtracted; plus one.
    told_lag: AtomicU64,
    /// The source's log is not counted in bytes.
    no_bytes: AtomicBool,
    ignored: [AtomicU64; 3],
}

/// Changes of outbox tables that are not events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ignored {
    Update,
    Delete,
    Truncate,
}

impl Ignored {
    pub const ALL: [(Ignored, &'static str); 3] =
        [(Ignored::Update, "update"), (Ignored::Delete, "delete"), (Ignored::Truncate, "truncate")];
}

impl SourceStats {
    pub fn set_lag_bytes(&self, bytes: u64) {
        self.told_lag.store(bytes.saturating_add(1), Ordering::Relaxed);
    }

    pub fn has_no_bytes(&self) {
        self.no_bytes.store(true, Ordering::Relaxed);
    }

    /// What the source told of its lag, else the difference of positions; `None` where bytes say nothing.
    pub fn lag_bytes(&self, difference: u64) -> Option<u64> {
        if self.no_bytes.load(Ordering::Relaxed) {
            return None;
        }
        Some(match self.told_lag.load(Ordering::Relaxed) {
            0 => difference,
            told => told - 1,
        })
    }

    pub fn ignore(&self, change: Ignored) {
        self.ignored[change as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn ignored(&self, change: Ignored) -> u64 {
        self.ignored[change as usize].load(Ordering::Relaxed)
    }
}

/// A source that is being read.
pub struct Opened {
    pub reader: Reader,
    pub confirmer: Confirmer,
    /// Where reading goes on.
    pub start: Position,
    /// Everything committed before the process started ends at or before this position.
    pub caught_up_at: Position,
    /// The end of the server's log a moment ago: a position beyond it was never here.
    pub reaches: Position,
    /// The history that positions are of: one noted in another says nothing here.
    pub lineage: String,
    /// No position was stored, so that none that was noted is of this life.
    pub begun: bool,
    /// Ends when the source must be let go at once, though reading may still look fine.
    pub alarm: JoinHandle<Result<(), SourceFailure>>,
}

/// What a source remembers between connections.
pub enum Memory {
    Postgres(Arc<postgres::Memory>),
    MySql(Arc<mysql::Memory>),
    Mongo(Arc<mongodb::Memory>),
}

impl Memory {
    pub fn new(settings: &SourceSettings) -> Self {
        match settings {
            SourceSettings::Postgres(_) => Memory::Postgres(Arc::default()),
            SourceSettings::MySql(_) => Memory::MySql(Arc::default()),
            SourceSettings::Mongo(_) => Memory::Mongo(Arc::default()),
        }
    }
}

/// Opens the source at the confirmed position.
pub async fn open(
    settings: &PipelineSettings,
    projection: &Projection,
    memory: &Memory,
    stats: &Arc<SourceStats>,
) -> Result<Opened, SourceFailure> {
    match (&settings.source, memory) {
        (SourceSettings::Postgres(source), Memory::Postgres(memory)) => {
            postgres::open(source, settings, projection, memory, stats).await
        }
        (SourceSettings::MySql(source), Memory::MySql(memory)) => {
            Box::pin(mysql::open(source, settings, projection, memory, stats)).await
        }
        (SourceSettings::Mongo(source), Memory::Mongo(memory)) => {
            Box::pin(mongodb::open(source, settings, projection, memory, stats)).await
        }
        _ => Err(SourceFailure::transient("the source's memory is of another source")),
    }
}

/// Looks at everything that a run needs of the source, and changes nothing.
pub async fn preflight(settings: &PipelineSettings, projection: &Projection) -> Vec<Finding> {
    match &settings.source {
        SourceSettings::Postgres(source) => postgres::preflight::preflight(source, settings, projection).await,
        SourceSettings::MySql(source) => {
            mysql::preflight::preflight(source, &settings.name, projection, &settings.kafka).await
        }
        SourceSettings::Mongo(source) => {
            Box::pin(mongodb::preflight::preflight(source, &settings.name, &settings.kafka)).await
        }
    }
}

/// Waits until nobody else holds the pipeline.
pub async fn stand_by(settings: &PipelineSettings) -> Result<(), SourceFailure> {
    match &settings.source {
        SourceSettings::Postgres(source) => postgres::stand_by(source).await,
        SourceSettings::MySql(source) => mysql::stand_by(source, &settings.name).await,
        SourceSettings::Mongo(source) => Box::pin(mongodb::stand_by(source, &settings.name)).await,
    }
}

/// Bytes of log that the server keeps for the pipeline, where it keeps any, asked anew.
pub async fn retained(settings: &PipelineSettings) -> Result<Option<u64>, SourceFailure> {
    match &settings.source {
        SourceSettings::Postgres(source) => postgres::retained(source).await,
        SourceSettings::MySql(_) | SourceSettings::Mongo(_) => Ok(None),
    }
}

/// Lets a position go that nobody will go on from, so that the server may recycle its log.
pub async fn let_go(settings: &PipelineSettings) -> Result<(), SourceFailure> {
    match &settings.source {
        SourceSettings::Postgres(source) => postgres::let_go(source).await,
        // Their logs are recycled by their own rules.
        SourceSettings::MySql(_) | SourceSettings::Mongo(_) => Ok(()),
    }
}

/// The reading half. `next` fills the chunk it is given; it may be cancelled without losing what it read.
pub enum Reader {
    Postgres(Box<postgres::Reader>),
    MySql(Box<mysql::Reader>),
    Mongo(Box<mongodb::Reader>),
}

impl Reader {
    pub async fn next(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        match self {
            Reader::Postgres(reader) => reader.next(chunk).await,
            Reader::MySql(reader) => reader.next(chunk).await,
            Reader::Mongo(reader) => reader.next(chunk).await,
        }
    }
}

/// The confirming half; never blocks.
pub enum Confirmer {
    Postgres(postgres::Confirmer),
    MySql(mysql::Confirmer),
    Mongo(mongodb::Confirmer),
}

impl Confirmer {
    pub fn confirm(&self, upto: &Position) {
        match self {
            Confirmer::Postgres(confirmer) => confirmer.confirm(upto),
            Confirmer::MySql(confirmer) => confirmer.confirm(upto),
            Confirmer::Mongo(confirmer) => confirmer.confirm(upto),
        }
    }

    /// Tells the source the last confirmed position and lets it go.
    pub async fn finish(self, reader: Reader, alarm: JoinHandle<Result<(), SourceFailure>>) {
        match (self, reader) {
            (Confirmer::Postgres(confirmer), Reader::Postgres(mut reader)) => {
                confirmer.finish(&mut reader, alarm).await;
            }
            (Confirmer::MySql(confirmer), _) => confirmer.finish(alarm).await,
            (Confirmer::Mongo(confirmer), _) => confirmer.finish(alarm).await,
            (Confirmer::Postgres(_), _) => {}
        }
    }
}
