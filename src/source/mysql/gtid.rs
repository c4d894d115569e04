//! Sets of GTIDs: where reading stands, in a form that holds on every server of a replication group.
//!
//! ```text
//!   MySQL    uuid:1-5:7:tag:1-3,uuid:…         numbers of each server, and since 8.3 of each tag of a server
//!            n:u64 ( uuid:16 [tag:varlen-string] m:u64 (first:u64 past_last:u64)* )*
//!            with tags n is 01 n:u48 01, the lowest byte first
//!   MariaDB  domain-server-sequence,…          the last of each domain, each domain being one sequence
//!            count:u28 flags:u4 ( domain:u32 server:u32 sequence:u64 )*
//! ```
//!
//! The next number of a known server extends its last interval in place: a search and no allocation.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::input::{Input, Malformed, put_varlen};
use crate::source::postgres::values::write_uuid;

#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a set of GTIDs")]
pub struct BadGtidSet(pub String);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Vec::with_capacity(36);
        write_uuid(self.0, &mut text);
        f.write_str(std::str::from_utf8(&text).unwrap_or_default())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Uuid {
    type Err = BadGtidSet;

    fn from_str(text: &str) -> Result<Self, BadGtidSet> {
        let mut digits = text.chars().filter(|&character| character != '-').map(|character| character.to_digit(16));
        let mut bytes = [0; 16];
        for byte in &mut bytes {
            match (digits.next().flatten(), digits.next().flatten()) {
                (Some(high), Some(low)) => *byte = (high << 4 | low) as u8,
                _ => return Err(BadGtidSet(text.to_owned())),
            }
        }
        match digits.next() {
            None => Ok(Uuid(bytes)),
            Some(_) => Err(BadGtidSet(text.to_owned())),
        }
    }
}

/// The tag of a GTID; most have none, which is the empty one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag<'a>(&'a str);

impl<'a> Tag<'a> {
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        const MAX_BYTES: usize = 32;
        let is_sound = bytes.len() <= MAX_BYTES
            && bytes.iter().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
            && !bytes.first().is_some_and(u8::is_ascii_digit);
        match std::str::from_utf8(bytes) {
            Ok(tag) if is_sound => Ok(Tag(tag)),
            _ => Err(Malformed::Invalid("the tag of a GTID")),
        }
    }

    pub fn as_str(&self) -> &'a str {
        self.0
    }
}

/// Numbers from `first` up to but not including `past`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Interval {
    first: u64,
    past: u64,
}

/// What one server, under one tag, has committed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    uuid: Uuid,
    tag: Box<str>,
    /// In order, apart from each other, never empty.
    intervals: Vec<Interval>,
}

/// A set of MySQL's GTIDs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GtidSet {
    /// By server and tag; none without numbers.
    sources: Vec<Source>,
}

/// Numbers are positive and below this, as the server has it.
const END_OF_NUMBERS: u64 = i64::MAX as u64;

impl GtidSet {
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// How many GTIDs are in it.
    pub fn count(&self) -> u64 {
        let size = |interval: &Interval| interval.past - interval.first;
        self.sources.iter().flat_map(|source| &source.intervals).map(size).fold(0, u64::saturating_add)
    }

    fn find(&self, uuid: Uuid, tag: &str) -> Result<usize, usize> {
        self.sources.binary_search_by(|source| source.uuid.cmp(&uuid).then_with(|| (*source.tag).cmp(tag)))
    }

    fn intervals(&self, uuid: Uuid, tag: &str) -> &[Interval] {
        self.find(uuid, tag).map_or(&[], |at| &self.sources[at].intervals)
    }

    pub fn contains(&self, uuid: Uuid, tag: Tag<'_>, gno: u64) -> bool {
        let intervals = self.intervals(uuid, tag.0);
        let after = intervals.partition_point(|interval| interval.first <= gno);
        after > 0 && gno < intervals[after - 1].past
    }

    pub fn insert(&mut self, uuid: Uuid, tag: Tag<'_>, gno: u64) {
        self.add(uuid, tag.0, Interval { first: gno, past: gno.saturating_add(1) });
    }

    fn add(&mut self, uuid: Uuid, tag: &str, new: Interval) {
        if new.first >= new.past {
            return;
        }
        let at = match self.find(uuid, tag) {
            Ok(at) => at,
            Err(at) => {
                self.sources.insert(at, Source { uuid, tag: tag.into(), intervals: Vec::new() });
                at
            }
        };
        let intervals = &mut self.sources[at].intervals;
        // Those that overlap the new one or touch it become one with it.
        let from = intervals.partition_point(|interval| interval.past < new.first);
        let to = from + intervals[from..].partition_point(|interval| interval.first <= new.past);
        if from == to {
            intervals.insert(from, new);
            return;
        }
        let (first, past) = (intervals[from].first.min(new.first), intervals[to - 1].past.max(new.past));
        intervals[from] = Interval { first, past };
        intervals.drain(from + 1..to);
    }

    pub fn union(&mut self, other: &GtidSet) {
        for source in &other.sources {
            for interval in &source.intervals {
                self.add(source.uuid, &source.tag, *interval);
            }
        }
    }

    /// Takes everything out that is in `other`.
    pub fn subtract(&mut self, other: &GtidSet) {
        for source in &mut self.sources {
            let gone = other.intervals(source.uuid, &source.tag);
            if gone.is_empty() {
                continue;
            }
            let mut left = Vec::new();
            let mut gone = gone.iter().peekable();
            for interval in &source.intervals {
                let mut first = interval.first;
                while let Some(hole) = gone.peek() {
                    if hole.first >= interval.past {
                        break;
                    }
                    if first < hole.first {
                        left.push(Interval { first, past: hole.first });
                    }
                    first = first.max(hole.past);
                    if hole.past > interval.past {
                        break;
                    }
                    gone.next();
                }
                if first < interval.past {
                    left.push(Interval { first, past: interval.past });
                }
            }
            source.intervals = left;
        }
        self.sources.retain(|source| !source.intervals.is_empty());
    }

    pub fn is_superset_of(&self, other: &GtidSet) -> bool {
        other.sources.iter().all(|source| {
            let mine = self.intervals(source.uuid, &source.tag);
            source.intervals.iter().all(|interval| {
                let after = mine.partition_point(|candidate| candidate.first <= interval.first);
                after > 0 && interval.past <= mine[after - 1].past
            })
        })
    }

    /// Appends the set as COM_BINLOG_DUMP_GTID wants it: the older form unless there are tags.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let tagged = self.sources.iter().any(|source| !source.tag.is_empty());
        let count = self.sources.len() as u64;
        let head = if tagged { 1 << 56 | count << 8 | 1 } else { count };
        out.extend_from_slice(&head.to_le_bytes());
        for source in &self.sources {
            out.extend_from_slice(&source.uuid.0);
            if tagged {
                // At most 32 bytes.
                put_varlen(source.tag.len() as u16, out);
                out.extend_from_slice(source.tag.as_bytes());
            }
            out.extend_from_slice(&(source.intervals.len() as u64).to_le_bytes());
            for interval in &source.intervals {
                out.extend_from_slice(&interval.first.to_le_bytes());
                out.extend_from_slice(&interval.past.to_le_bytes());
            }
        }
    }

    /// From [`super::event::Body::PreviousGtids`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let what = "a set of GTIDs";
        let mut input = Input(bytes);
        let head = input.u64(what)?;
        let (tagged, count) = match head >> 56 {
            0 => (false, head),
            1 => (true, head >> 8 & 0xffff_ffff_ffff),
            found => return Err(Malformed::UnknownKind { what, found: found as u32 }),
        };
        let mut set = GtidSet::default();
        for _ in 0..count {
            let uuid = Uuid(input.array(what)?);
            let tag = if tagged {
                let len = usize::try_from(input.varlen(what)?).map_err(|_| Malformed::Truncated(what))?;
                Tag::parse(input.bytes(len, what)?)?
            } else {
                Tag::default()
            };
            let intervals = input.u64(what)?;
            let mut last = 0;
            for _ in 0..intervals {
                let (first, past) = (input.u64(what)?, input.u64(what)?);
                if first <= last || past <= first || past > END_OF_NUMBERS {
                    return Err(Malformed::Invalid("an interval of GTIDs"));
                }
                last = past;
                set.add(uuid, tag.0, Interval { first, past });
            }
        }
        input.finish(what)?;
        Ok(set)
    }
}

/// As the server prints it, in one line; with `{:#}` a server a line, as in `@@gtid_executed`.
impl fmt::Display for GtidSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut previous = None;
        for source in &self.sources {
            if previous != Some(source.uuid) {
                match previous {
                    Some(_) if f.alternate() => f.write_str(",\n")?,
                    Some(_) => f.write_str(",")?,
                    None => {}
                }
                write!(f, "{}", source.uuid)?;
                previous = Some(source.uuid);
            }
            if !source.tag.is_empty() {
                write!(f, ":{}", source.tag)?;
            }
            for interval in &source.intervals {
                match interval.past - interval.first {
                    1 => write!(f, ":{}", interval.first)?,
                    _ => write!(f, ":{}-{}", interval.first, interval.past - 1)?,
                }
            }
        }
        Ok(())
    }
}

impl FromStr for GtidSet {
    type Err = BadGtidSet;

    fn from_str(text: &str) -> Result<Self, BadGtidSet> {
        let bad = || BadGtidSet(text.to_owned());
        let mut set = GtidSet::default();
        for group in text.split(',').map(str::trim).filter(|group| !group.is_empty()) {
            let mut parts = group.split(':').map(str::trim);
            let uuid: Uuid = parts.next().ok_or_else(bad)?.parse().map_err(|_| bad())?;
            let mut tag = String::new();
            for part in parts {
                if part.starts_with(|first: char| first.is_ascii_digit()) {
                    let interval = parse_interval(part).ok_or_else(bad)?;
                    set.add(uuid, &tag, interval);
                } else {
                    tag = part.to_ascii_lowercase();
                    if Tag::parse(tag.as_bytes()).is_err() {
                        return Err(bad());
                    }
                }
            }
        }
        Ok(set)
    }
}

fn parse_interval(text: &str) -> Option<Interval> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    // The server takes an interval that ends before it begins for an empty one.
    (first > 0 && last < END_OF_NUMBERS).then_some(Interval { first, past: last + 1 })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MariaId {
    pub domain: u32,
    pub server_id: u32,
    pub sequence: u64,
}

/// MariaDB's position: the last GTID of each domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MariaGtidList {
    /// By domain.
    last: Vec<MariaId>,
}

impl MariaGtidList {
    pub fn is_empty(&self) -> bool {
        self.last.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = MariaId> {
        self.last.iter().copied()
    }

    fn find(&self, domain: u32) -> Result<usize, usize> {
        self.last.binary_search_by_key(&domain, |id| id.domain)
    }

    /// Moves the domain to this GTID, whatever it was.
    pub fn update(&mut self, id: MariaId) {
        match self.find(id.domain) {
            Ok(at) => self.last[at] = id,
            Err(at) => self.last.insert(at, id),
        }
    }

    /// Whether the position is at or after this GTID. Inside a domain the sequence is one for all servers.
    pub fn covers(&self, id: MariaId) -> bool {
        self.find(id.domain).is_ok_and(|at| id.sequence <= self.last[at].sequence)
    }

    pub fn covers_all(&self, other: &MariaGtidList) -> bool {
        other.iter().all(|id| self.covers(id))
    }

    /// From [`super::event::Body::MariaGtidList`]: of several servers in a domain, the last one written was the last.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let what = "a list of GTIDs";
        let mut input = Input(bytes);
        let count = input.u32(what)? & 0x0fff_ffff;
        let mut list = MariaGtidList::default();
        for _ in 0..count {
            let id = MariaId { domain: input.u32(what)?, server_id: input.u32(what)?, sequence: input.u64(what)? };
            list.update(id);
        }
        Ok(list)
    }
}

impl fmt::Display for MariaGtidList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, id) in self.last.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}{}-{}-{}", id.domain, id.server_id, id.sequence)?;
        }
        Ok(())
    }
}

impl FromStr for MariaGtidList {
    type Err = BadGtidSet;

    fn from_str(text: &str) -> Result<Self, BadGtidSet> {
        let mut list = MariaGtidList::default();
        for id in text.split(',').map(str::trim).filter(|id| !id.is_empty()) {
            list.update(parse_maria_id(id).ok_or_else(|| BadGtidSet(text.to_owned()))?);
        }
        Ok(list)
    }
}

fn parse_maria_id(text: &str) -> Option<MariaId> {
    let mut parts = text.split('-');
    let domain = parts.next()?.parse().ok()?;
    let server_id = parts.next()?.parse().ok()?;
    let sequence = parts.next()?.parse().ok()?;
    parts.next().is_none().then_some(MariaId { domain, server_id, sequence })
}

#[cfg(test)]
#[path = "gtid_tests.rs"]
mod tests;
