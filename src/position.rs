//! Where in a database's log a pipeline stands: typed per source, ordered where the source orders it, and
//! written and parsed in this one place.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::event::CommitId;
use crate::source::mongodb::token::{ResumeToken, StreamPosition};
use crate::source::mysql::position::{BinlogPosition, Gtids};

/// A PostgreSQL log sequence number, written `16/B374D848` as the server writes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// No position: what the server sends and takes for "from the slot's own position".
    pub const ZERO: Lsn = Lsn(0);

    /// How many bytes of log lie between `earlier` and this position; 0 when `earlier` is not earlier.
    pub fn bytes_since(self, earlier: Lsn) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

/// A text that is not a position of the kind expected.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("`{0}` is not a log position; PostgreSQL's look like 16/B374D848")]
pub struct ParsePositionError(String);

impl FromStr for Lsn {
    type Err = ParsePositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParsePositionError(text.to_owned());
        let (high, low) = text.split_once('/').ok_or_else(malformed)?;
        let half = |digits: &str| {
            // `from_str_radix` takes a sign, the server never writes one.
            if digits.is_empty() || digits.starts_with('+') {
                return Err(malformed());
            }
            u32::from_str_radix(digits, 16).map_err(|_| malformed())
        };
        Ok(Lsn((u64::from(half(high)?) << 32) | u64::from(half(low)?)))
    }
}

/// A position that can be confirmed to a source and resumed from: always a commit boundary.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Position {
    /// The end of a commit record, or a keepalive's position outside a transaction.
    Postgres(Lsn),
    /// The end of a transaction in a binary log.
    Binlog(Box<BinlogPosition>),
    /// A place in a change stream.
    Mongo(Box<StreamPosition>),
    /// A claim of the poller, by its number in this process.
    Poll(u64),
    /// An event of an event store.
    Event(EventPosition),
}

/// Where an event lies in an event store: a transaction may take a lower position than another and commit later, so
/// transactions come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventPosition {
    pub transaction: u64,
    pub position: i64,
}

impl fmt::Display for EventPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.transaction, self.position)
    }
}

impl FromStr for EventPosition {
    type Err = ParsePositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.split_once(':').and_then(|(transaction, position)| {
            Some(EventPosition { transaction: transaction.parse().ok()?, position: position.parse().ok()? })
        });
        parsed.ok_or_else(|| ParsePositionError(text.to_owned()))
    }
}

impl Position {
    /// Whether a pipeline that stands here has already delivered the commit that ends at `commit`.
    pub fn covers(&self, commit: &Position) -> bool {
        match (self, commit) {
            (Position::Postgres(here), Position::Postgres(there)) => there <= here,
            (Position::Binlog(here), Position::Binlog(there)) => here.covers(there),
            (Position::Mongo(here), Position::Mongo(there)) => here.covers(there),
            (Position::Poll(here), Position::Poll(there)) => there <= here,
            (Position::Event(here), Position::Event(there)) => there <= here,
            _ => false,
        }
    }

    /// Whether a pipeline that stands here has already delivered the commit. Of a cluster time that several events of
    /// MongoDB share it may say no where it could say yes.
    pub fn has(&self, commit: &CommitId) -> bool {
        match (self, commit) {
            // A commit's id is where its record begins, a position where it ends.
            (Position::Postgres(here), CommitId::Postgres(begin)) => begin < here,
            (Position::Binlog(here), commit) => here.has(commit),
            (Position::Event(here), CommitId::Event(event)) => event <= here,
            (Position::Mongo(here), CommitId::Mongo(time)) => *time < here.time || (*time == here.time && here.whole),
            _ => false,
        }
    }

    /// Whether commits have names that are the same whenever they are read.
    pub fn names_commits(&self) -> bool {
        match self {
            Position::Binlog(position) => !matches!(position.gtids, Gtids::Off),
            Position::Poll(_) => false,
            Position::Postgres(_) | Position::Mongo(_) | Position::Event(_) => true,
        }
    }

    /// Reads a position of the same kind as this one.
    pub fn parse_alike(&self, text: &str) -> Option<Position> {
        Some(match self {
            Position::Postgres(_) => Position::Postgres(text.parse().ok()?),
            Position::Binlog(_) => Position::Binlog(Box::new(text.parse().ok()?)),
            Position::Mongo(_) => {
                let token: ResumeToken = text.parse().ok()?;
                Position::Mongo(Box::new(StreamPosition::after(token)))
            }
            // Numbers of an earlier process say nothing here.
            Position::Poll(_) => return None,
            Position::Event(_) => Position::Event(text.parse().ok()?),
        })
    }

    /// The position as an integer, for the metric; sources without a natural one give 0.
    pub fn as_gauge(&self) -> u64 {
        match self {
            Position::Postgres(lsn) => lsn.0,
            Position::Binlog(position) => position.as_gauge(),
            Position::Mongo(position) => position.time.as_gauge(),
            Position::Poll(number) => *number,
            Position::Event(event) => event.position.unsigned_abs(),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Position::Postgres(lsn) => lsn.fmt(f),
            Position::Binlog(position) => position.fmt(f),
            Position::Mongo(position) => position.fmt(f),
            Position::Poll(number) => write!(f, "batch {number}"),
            Position::Event(event) => event.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_lsn_survives_being_written_and_read(raw: u64) {
            prop_assert_eq!(Lsn(raw).to_string().parse(), Ok(Lsn(raw)));
        }
    }

    #[test]
    fn an_lsn_is_written_as_the_server_writes_it() {
        assert_eq!(Lsn(0x16_B374_D848).to_string(), "16/B374D848");
    }

    #[test]
    fn malformed_lsns_are_refused() {
        for text in ["", "/", "16", "16/", "/B3", "16/XYZ", "16/100000000", "+1/0", "-1/0"] {
            assert!(text.parse::<Lsn>().is_err(), "{text:?} was accepted");
        }
    }
}
