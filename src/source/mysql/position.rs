//! Where in a binary log a pipeline stands.
//!
//! With GTIDs the set of what was delivered is the position, and any server that has the rest can go on from it; the
//! file and offset beside it only say how far behind the server's end that is. Without GTIDs they are the position,
//! and it holds for one server alone.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use super::gtid::{GtidSet, MariaGtidList, Tag};
use crate::event::CommitId;

/// A place in a log file: `binlog.000002:157`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilePos {
    pub file: String,
    pub offset: u64,
}

impl FilePos {
    /// The number that the server counts its files by.
    pub fn number(&self) -> u64 {
        self.file.rsplit_once('.').and_then(|(_, digits)| digits.parse().ok()).unwrap_or(0)
    }

    /// Whether this file was written before the other's; names of two series cannot be compared.
    pub fn comes_before_file_of(&self, other: &FilePos) -> bool {
        let series = |position: &FilePos| position.file.rsplit_once('.').map(|(name, _)| name.to_owned());
        series(self) == series(other) && self.number() < other.number()
    }

    fn is_at_or_after(&self, other: &FilePos) -> bool {
        match self.number().cmp(&other.number()) {
            Ordering::Equal => self.offset >= other.offset,
            order => order == Ordering::Greater,
        }
    }
}

impl fmt::Display for FilePos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.offset)
    }
}

impl FromStr for FilePos {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (file, offset) = text.rsplit_once(':').ok_or(())?;
        let digits = file.rsplit_once('.').map(|(_, digits)| digits).ok_or(())?;
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(());
        }
        Ok(FilePos { file: file.to_owned(), offset: offset.parse().map_err(|_| ())? })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gtids {
    /// The server counts no GTIDs.
    Off,
    MySql(GtidSet),
    MariaDb(MariaGtidList),
}

/// What was read since this process began; not part of the position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Transactions with outbox rows.
    pub eventful: u64,
    /// Other transactions than checkpoints: progress too, but no reason to hurry.
    pub others: u64,
}

#[derive(Clone, Debug)]
pub struct BinlogPosition {
    pub gtids: Gtids,
    pub file: FilePos,
    pub seen: Seen,
}

impl PartialEq for BinlogPosition {
    fn eq(&self, other: &Self) -> bool {
        match (&self.gtids, &other.gtids) {
            (Gtids::Off, Gtids::Off) => self.file == other.file,
            (one, another) => one == another,
        }
    }
}

impl Eq for BinlogPosition {}

impl BinlogPosition {
    pub fn new(gtids: Gtids, file: FilePos) -> Self {
        BinlogPosition { gtids, file, seen: Seen::default() }
    }

    /// Whether everything up to the other position was delivered by whoever stands here.
    pub fn covers(&self, other: &Self) -> bool {
        match (&self.gtids, &other.gtids) {
            (Gtids::MySql(here), Gtids::MySql(there)) => here.is_superset_of(there),
            (Gtids::MariaDb(here), Gtids::MariaDb(there)) => here.covers_all(there),
            (Gtids::Off, Gtids::Off) => self.file.is_at_or_after(&other.file),
            _ => false,
        }
    }

    /// Whether the commit was delivered by whoever stands here; no where that cannot be told.
    pub fn has(&self, commit: &CommitId) -> bool {
        match (&self.gtids, commit) {
            (Gtids::MySql(here), CommitId::MySql { uuid, number, tagged: false }) => {
                here.contains(*uuid, Tag::default(), *number)
            }
            (Gtids::MariaDb(here), CommitId::MariaDb(id)) => here.covers(*id),
            (Gtids::Off, CommitId::Binlog { file, offset }) => {
                (*file, *offset) < (self.file.number(), self.file.offset)
            }
            _ => false,
        }
    }

    /// A number that grows with the position.
    pub fn as_gauge(&self) -> u64 {
        match &self.gtids {
            Gtids::MySql(set) => set.count(),
            Gtids::MariaDb(list) => list.iter().fold(0, |sum, id| sum.saturating_add(id.sequence)),
            Gtids::Off => (self.file.number() << 32) | (self.file.offset & 0xFFFF_FFFF),
        }
    }

    /// What is left of the other set, for gap reports.
    pub fn missing_of(&self, other: &GtidSet) -> GtidSet {
        let mut missing = other.clone();
        if let Gtids::MySql(here) = &self.gtids {
            missing.subtract(here);
        }
        missing
    }
}

/// As `--start` takes it.
impl fmt::Display for BinlogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gtids {
            Gtids::MySql(set) => set.fmt(f),
            Gtids::MariaDb(list) => list.fmt(f),
            Gtids::Off => self.file.fmt(f),
        }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "`{0}` is not a position in a binary log; there are binlog.000002:157, \
     3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23 (MySQL) and 0-1-23 (MariaDB)"
)]
pub struct ParseBinlogPositionError(String);

impl FromStr for BinlogPosition {
    type Err = ParseBinlogPositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let gtids = if let Ok(file) = text.parse::<FilePos>() {
            return Ok(BinlogPosition::new(Gtids::Off, file));
        } else if let Ok(list) = text.parse::<MariaGtidList>() {
            Gtids::MariaDb(list)
        } else if let Ok(set) = text.parse::<GtidSet>() {
            Gtids::MySql(set)
        } else {
            return Err(ParseBinlogPositionError(text.to_owned()));
        };
        Ok(BinlogPosition::new(gtids, FilePos::default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(text: &str) -> BinlogPosition {
        text.parse().unwrap()
    }

    #[test]
    fn each_kind_of_position_is_written_as_it_is_read() {
        for text in ["binlog.000002:157", "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23", "0-1-23,7-2-9"] {
            assert_eq!(position(text).to_string(), text);
        }
        for text in ["x", "binlog:4", "binlog.x:4", "binlog.1:x", "0-1", "16/B374D848"] {
            assert!(text.parse::<BinlogPosition>().is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn files_of_one_series_are_in_order() {
        let file = |text: &str| text.parse::<FilePos>().unwrap();
        assert!(file("binlog.000002:4").comes_before_file_of(&file("binlog.000010:4")));
        assert!(!file("binlog.000010:4").comes_before_file_of(&file("binlog.000010:900")));
        assert!(!file("other.000002:4").comes_before_file_of(&file("binlog.000010:4")));
    }

    #[test]
    fn a_position_covers_what_lies_before_it_and_nothing_of_another_kind() {
        let set = "3e11fa47-71ca-11e1-9e33-c80aa9429562:";
        for (here, there, covered) in [
            (format!("{set}1-9"), format!("{set}1-5"), true),
            (format!("{set}1-5"), format!("{set}1-9"), false),
            (format!("{set}1-5:7-9"), format!("{set}6"), false),
            ("0-1-9".to_owned(), "0-2-9".to_owned(), true),
            ("0-1-9".to_owned(), "1-1-1".to_owned(), false),
            ("binlog.000010:4".to_owned(), "binlog.000009:900".to_owned(), true),
            ("binlog.999999:4".to_owned(), "binlog.1000000:4".to_owned(), false),
            ("binlog.000010:4".to_owned(), "0-1-9".to_owned(), false),
        ] {
            assert_eq!(position(&here).covers(&position(&there)), covered, "{here} covers {there}");
        }
    }
}
