//! Where events come from. A source is two halves, so that confirming a position and answering the server's
//! keepalives never wait for reading: a [`Reader`] that yields chunks, and a [`Confirmer`] that moves the position.

pub mod audit;
pub mod backfill;
pub mod mark;
pub mod mongodb;
pub mod mysql;
pub mod notes;
pub mod poll;
pub mod postgres;
pub mod schema;
pub mod stand;
pub mod tls;
pub mod transport;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;
use tokio::task::JoinHandle;

use crate::config::{Capture, PipelineSettings, SourceSettings};
use crate::event::{Chunk, Projection};
use crate::failpoints::Injected;
use crate::position::Position;
use crate::preflight::{Finding, Verdict};
use poll::Room;
use poll::ledger::Ledger;

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

impl From<Injected> for SourceFailure {
    fn from(injected: Injected) -> Self {
        SourceFailure::transient(injected.to_string())
    }
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
    /// Rows that are pending, where a table is polled; plus one.
    depth: AtomicU64,
    polls: AtomicU64,
    /// Who keeps committed rows from being read.
    held_back_by: Mutex<Option<String>>,
    ignored: [AtomicU64; 3],
    pub marking: mark::MarkStats,
    /// What became of a position that was lost.
    pub gap: backfill::GapStats,
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

    pub fn set_depth(&self, rows: u64) {
        self.depth.store(rows.saturating_add(1), Ordering::Relaxed);
    }

    /// Rows that are pending, as far as they were counted; `None` where no table is polled.
    pub fn depth(&self) -> Option<u64> {
        self.depth.load(Ordering::Relaxed).checked_sub(1)
    }

    pub fn set_held_back_by(&self, who: Option<String>) {
        *self.held_back_by.lock().unwrap_or_else(PoisonError::into_inner) = who;
    }

    /// Who keeps committed rows from being read, if anybody does.
    pub fn held_back_by(&self) -> Option<String> {
        self.held_back_by.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn polled(&self) {
        self.polls.fetch_add(1, Ordering::Relaxed);
    }

    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
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
    /// No position was stored, or the one that was is lost, so that none that was noted is of this life.
    pub begun: bool,
    /// Rows of the table come before the log.
    pub table_first: bool,
    /// Ends when the source must be let go at once, though reading may still look fine.
    pub alarm: JoinHandle<Result<(), SourceFailure>>,
}

/// What a source remembers between connections.
pub enum Memory {
    Postgres(Arc<postgres::Memory>),
    MySql(Arc<mysql::Memory>),
    Mongo(Arc<mongodb::Memory>),
    Poll(Arc<poll::Memory>),
    Events(Arc<poll::positions::Memory>),
}

impl Memory {
    pub fn new(settings: &PipelineSettings) -> Self {
        match (&settings.capture, &settings.source) {
            (Capture::Poll(polling), _) => Memory::Poll(Arc::new(poll::Memory::new(polling))),
            (Capture::Positions(_), _) => Memory::Events(Arc::default()),
            (Capture::Log, SourceSettings::Postgres(_)) => Memory::Postgres(Arc::default()),
            (Capture::Log, SourceSettings::MySql(_)) => Memory::MySql(Arc::default()),
            (Capture::Log, SourceSettings::Mongo(_)) => Memory::Mongo(Arc::default()),
        }
    }

    /// Where it is noted what becomes of rows that are refused; `None` where a log is read.
    pub fn ledger(&self) -> Option<&Arc<Ledger>> {
        match self {
            Memory::Poll(memory) => Some(&memory.ledger),
            _ => None,
        }
    }
}

impl Memory {
    /// Remembers a position that was reached before this process, beyond what the source was told. It is where the source is
    /// opened next, unless it turns out that the server never had it. Nothing is remembered of another server's history.
    pub fn reached(&self, lineage: &str, position: &Position) -> bool {
        match (self, position) {
            (Memory::Postgres(memory), Position::Postgres(lsn)) => memory.reached(lineage, *lsn),
            (Memory::MySql(memory), Position::Binlog(position)) => memory.reached(position),
            (Memory::Mongo(memory), Position::Mongo(position)) => memory.reached(position),
            _ => false,
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
    if let (Capture::Poll(polling), Memory::Poll(memory)) = (&settings.capture, memory) {
        return Box::pin(poll::open(polling, settings, projection, memory, stats)).await;
    }
    if let (Capture::Positions(capture), SourceSettings::Postgres(source), Memory::Events(memory)) =
        (&settings.capture, &settings.source, memory)
    {
        return Box::pin(poll::positions::open(capture, settings, source, projection, memory, stats)).await;
    }
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
    let mut findings = capture_preflight(settings, projection).await;
    if let Some((what, remedy)) = backfill::foresee(settings) {
        findings.push(Finding {
            check: "backfill",
            subject: format!("pipeline {}", settings.name),
            verdict: Verdict::Warn,
            seen: what,
            remedy,
        });
    }
    if let Some(how) = settings.marking() {
        let more = Box::pin(mark::preflight(settings, how, &findings)).await;
        findings.extend(more);
    }
    findings
}

async fn capture_preflight(settings: &PipelineSettings, projection: &Projection) -> Vec<Finding> {
    if let Capture::Poll(polling) = &settings.capture {
        return Box::pin(poll::preflight(polling, settings, projection)).await;
    }
    if let (Capture::Positions(_), SourceSettings::Postgres(source)) = (&settings.capture, &settings.source) {
        return poll::positions::preflight(source, projection).await;
    }
    match &settings.source {
        SourceSettings::Postgres(source) => postgres::preflight::preflight(source, settings, projection).await,
        SourceSettings::MySql(source) => mysql::preflight::preflight(source, settings, projection).await,
        SourceSettings::Mongo(source) => Box::pin(mongodb::preflight::preflight(source, settings)).await,
    }
}

/// Waits until nobody else holds the pipeline.
pub async fn stand_by(settings: &PipelineSettings) -> Result<(), SourceFailure> {
    if let Capture::Poll(polling) = &settings.capture {
        return Box::pin(poll::stand_by(polling, settings)).await;
    }
    if let (Capture::Positions(_), SourceSettings::Postgres(source)) = (&settings.capture, &settings.source) {
        return poll::positions::stand_by(source).await;
    }
    match &settings.source {
        SourceSettings::Postgres(source) => postgres::stand_by(source).await,
        SourceSettings::MySql(source) => mysql::stand_by(source, &settings.name).await,
        SourceSettings::Mongo(source) => Box::pin(mongodb::stand_by(source, &settings.name)).await,
    }
}

/// Bytes of log that the server keeps for the pipeline, where it keeps any, asked anew.
pub async fn retained(settings: &PipelineSettings) -> Result<Option<u64>, SourceFailure> {
    match (&settings.capture, &settings.source) {
        (Capture::Log, SourceSettings::Postgres(source)) => postgres::retained(source).await,
        _ => Ok(None),
    }
}

/// Lets a position go that nobody will go on from, so that the server may recycle its log.
pub async fn let_go(settings: &PipelineSettings) -> Result<(), SourceFailure> {
    match (&settings.capture, &settings.source) {
        (Capture::Log, SourceSettings::Postgres(source)) => postgres::let_go(source).await,
        // The logs of others are recycled by their own rules.
        _ => Ok(()),
    }
}

/// Whether all that was committed before a place in the log was delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    Yes,
    /// And why not.
    No(String),
}

impl Settled {
    fn snapshot_pending(pipeline: &str) -> Self {
        Settled::No(format!(
            "pipeline `{pipeline}` has yet to deliver rows that are in the table, before it goes on with the log"
        ))
    }
}

/// A pipeline that never ran says nothing of what was delivered.
fn unpositioned(pipeline: &str) -> SourceFailure {
    SourceFailure::NotReady {
        what: format!("pipeline `{pipeline}` has no position: nothing says which rows were delivered"),
        remedy:
            "run `outboxd init` or start the pipeline first; give --name, --slot and --checkpoint as `run` has them"
                .to_owned(),
    }
}

/// Asks, from outside of a pipeline that reads a log, whether it has delivered everything up to a place.
pub async fn settled(
    settings: &PipelineSettings,
    projection: &Projection,
    upto: &Position,
) -> Result<Settled, SourceFailure> {
    match (&settings.source, upto) {
        (SourceSettings::Postgres(source), Position::Postgres(upto)) => {
            postgres::settled::settled(source, &settings.name, *upto).await
        }
        (SourceSettings::MySql(source), Position::Binlog(upto)) => {
            mysql::settled::settled(source, settings, projection, upto).await
        }
        (SourceSettings::Mongo(source), Position::Mongo(upto)) => {
            mongodb::settled::settled(source, settings, upto).await
        }
        _ => Ok(Settled::No("the position is not of this source".to_owned())),
    }
}

/// The reading half. `next` fills the chunk it is given; it may be cancelled without losing what it read.
pub enum Reader {
    Postgres(Box<postgres::Reader>),
    MySql(Box<mysql::Reader>),
    Mongo(Box<mongodb::Reader>),
    Poll(Box<poll::Reader>),
    Events(Box<poll::positions::Reader>),
}

impl Reader {
    /// How many rows it takes at once, where it takes only as much as there is room for. Logs give what they have, and the window waits.
    pub fn claims(&self) -> Option<usize> {
        match self {
            Reader::Poll(reader) => Some(reader.batch()),
            _ => None,
        }
    }

    pub async fn next(&mut self, chunk: &mut Chunk, room: Room) -> Result<(), SourceFailure> {
        match self {
            Reader::Poll(reader) => reader.next(chunk, room).await,
            Reader::Events(reader) => reader.next(chunk).await,
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
    Poll(poll::Confirmer),
    Events(poll::positions::Confirmer),
}

impl Confirmer {
    pub fn confirm(&self, upto: &Position) {
        match self {
            Confirmer::Postgres(confirmer) => confirmer.confirm(upto),
            Confirmer::MySql(confirmer) => confirmer.confirm(upto),
            Confirmer::Mongo(confirmer) => confirmer.confirm(upto),
            Confirmer::Poll(confirmer) => confirmer.confirm(upto),
            // How far each publisher has come is noted by the warden; the least of it need not be kept.
            Confirmer::Events(_) => {}
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
            (Confirmer::Poll(confirmer), Reader::Poll(reader)) => confirmer.finish(*reader, alarm).await,
            (Confirmer::Events(confirmer), _) => confirmer.finish(alarm).await,
            (Confirmer::Postgres(_) | Confirmer::Poll(_), _) => {}
        }
    }
}
