//! Dead letters: events that could not be delivered, kept until a person has dealt with them.
//!
//! ```text
//!   Publisher::park ─┐                                    ┌─▶ table, collection   (writer ─▶ postgres, mysql, mongodb)
//!   lanes ───────────┴─▶ Sink::park / Office ──Letter─────┴─▶ topic               (a Kafka producer)
//!
//!   outboxd dlq  ◀── Store: list, find, next_waiting, mark, discard ── and Replayer ──▶ the publisher's own sink
//! ```
//!
//! A letter counts as delivered only once it is written, and writing it twice makes one letter: after a crash the same
//! event comes again and finds its letter there.

pub mod letter;
pub mod mongodb;
pub mod mysql;
pub mod postgres;
pub mod replay;
pub mod store;
pub mod topic;
pub mod writer;

use std::time::Duration;

use crate::config::{PublisherSettings, SourceSettings, TableName};
use crate::preflight::{Finding, Report};
use crate::source::SourceFailure;
use letter::{Kept, Letter};

const MAKE_ROOM: &str = "mend what the message names, or use --dead-letter topic:NAME; nothing was skipped";

/// For who may not make the table.
fn by_hand(table: &dyn std::fmt::Display, script: &str) -> String {
    format!("run `outboxd init` with --dead-letter as one who may create it, or {script} for {table}")
}

/// For a table that is there and is something else.
fn another(table: &dyn std::fmt::Display, script: &str) -> String {
    format!("{table} is not a table for dead letters: name another, or make it by {script}")
}

/// Whose letters are meant: places may be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whose {
    pub pipeline: String,
    pub publisher: String,
}

/// Which letters are to be discarded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chosen {
    /// Also those that were not replayed.
    pub all: bool,
    pub older_than: Duration,
}

/// How many letters are chosen, and the last of them: what comes after it was not looked at.
#[derive(Clone, Debug, Default)]
pub struct Discarded {
    pub letters: u64,
    pub last: String,
}

/// Letters in the source's database.
pub enum Letters {
    Postgres(Box<postgres::Letters>),
    MySql(Box<mysql::Letters>),
    Mongo(Box<mongodb::Letters>),
}

/// The same call for each database.
macro_rules! each {
    ($self:ident, $letters:ident => $call:expr) => {
        match $self {
            Letters::Postgres($letters) => $call.await,
            Letters::MySql($letters) => $call.await,
            Letters::Mongo($letters) => $call.await,
        }
    };
}

impl Letters {
    /// Connects; whether the table is there is another question.
    pub async fn open(source: &SourceSettings, table: &TableName) -> Result<Self, SourceFailure> {
        Ok(match source {
            SourceSettings::Postgres(source) => {
                Letters::Postgres(Box::new(postgres::Letters::open(source, table).await?))
            }
            SourceSettings::MySql(source) => Letters::MySql(Box::new(mysql::Letters::open(source, table).await?)),
            SourceSettings::Mongo(source) => {
                Letters::Mongo(Box::new(Box::pin(mongodb::Letters::open(source, table)).await?))
            }
        })
    }

    pub async fn exists(&mut self) -> Result<bool, SourceFailure> {
        each!(self, letters => letters.exists())
    }

    /// Makes sure of the table, making it where that is allowed.
    pub async fn prepare(&mut self, table: &TableName, no_create: bool) -> Result<(), SourceFailure> {
        if !self.exists().await? {
            if no_create {
                return Err(self.missing(table));
            }
            tracing::info!(%table, "creating the place for dead letters");
            each!(self, letters => letters.create())?;
        }
        each!(self, letters => letters.probe())
    }

    fn missing(&self, table: &TableName) -> SourceFailure {
        let (what, script) = match self {
            Letters::Postgres(_) => ("table", "sql/postgres/dead-letters.sql"),
            Letters::MySql(_) => ("table", "sql/mysql/dead-letters.sql"),
            Letters::Mongo(_) => ("collection", "sql/mongodb/dead-letters.js"),
        };
        SourceFailure::NotReady {
            what: format!("there is no {what} {table} for dead letters, or outboxd may not see it"),
            remedy: format!("run `outboxd init` with --dead-letter {what}:{table}, or {script}"),
        }
    }

    /// Writes a letter, unless it is there.
    pub async fn write(&mut self, letter: &Letter) -> Result<(), SourceFailure> {
        each!(self, letters => letters.write(letter))
    }

    /// The last letters, newest last, without their contents.
    pub async fn list(&mut self, whose: &Whose, limit: u32) -> Result<Vec<Kept>, SourceFailure> {
        each!(self, letters => letters.list(whose, limit))
    }

    pub async fn find(&mut self, whose: &Whose, id: &str) -> Result<Option<Kept>, SourceFailure> {
        each!(self, letters => letters.find(whose, id))
    }

    /// The oldest letter after this one that was not replayed.
    pub async fn next_waiting(&mut self, whose: &Whose, after: Option<&str>) -> Result<Option<Kept>, SourceFailure> {
        each!(self, letters => letters.next_waiting(whose, after))
    }

    pub async fn mark_replayed(&mut self, id: &str, moment: &str) -> Result<(), SourceFailure> {
        each!(self, letters => letters.mark_replayed(id, moment))
    }

    pub async fn count(&mut self, whose: &Whose, chosen: &Chosen) -> Result<Discarded, SourceFailure> {
        each!(self, letters => letters.count(whose, chosen))
    }

    /// Deletes the chosen letters, up to this one.
    pub async fn discard(&mut self, whose: &Whose, chosen: &Chosen, upto: &str) -> Result<u64, SourceFailure> {
        each!(self, letters => letters.discard(whose, chosen, upto))
    }
}

/// Looks at the table that dead letters go to, and changes nothing.
pub async fn preflight(settings: &PublisherSettings) -> Vec<Finding> {
    const CHECK: &str = "dead-letter";
    let mut report = Report::default();
    if let crate::config::DeadLetter::Table(table) = &settings.dead_letter {
        // Who does not come in is told so among the source's findings.
        if let Ok(mut letters) = Letters::open(&settings.source, table).await {
            match letters.exists().await {
                Ok(false) if !settings.source.no_create() => {
                    report.ok(CHECK, format!("{table} will be made by the first run"));
                }
                _ => {
                    if report.told(CHECK, letters.prepare(table, true).await).is_some() {
                        report.ok(CHECK, format!("dead letters can be kept in {table}"));
                    }
                }
            }
        }
    }
    report.into_findings()
}
