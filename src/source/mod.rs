//! Where events come from. A source is two halves, so that confirming a position and answering the server's
//! keepalives never wait for reading: a [`Reader`] that yields chunks, and a [`Confirmer`] that moves the position.

pub mod postgres;

use thiserror::Error;

use crate::event::Chunk;
use crate::position::Position;

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

#[cfg(any())]
/// The reading half. `next` fills the chunk it is given; it may be cancelled without losing what it read.
pub enum Reader {
    Postgres(Box<postgres::Reader>),
}

#[cfg(any())]
impl Reader {
    pub async fn next(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        match self {
            Reader::Postgres(reader) => reader.next(chunk).await,
        }
    }
}

#[cfg(any())]
/// The confirming half; never blocks.
pub enum Confirmer {
    Postgres(postgres::Confirmer),
}

#[cfg(any())]
impl Confirmer {
    pub fn confirm(&self, upto: &Position) {
        match self {
            Confirmer::Postgres(confirmer) => confirmer.confirm(upto),
        }
    }
}
