//! Where in a change stream a pipeline stands.
//!
//! The server gives every event, and every batch, a resume token: text that sorts in the order of the stream. It
//! begins with the cluster time of its operation:
//!
//! ```text
//!   82 5F0A1B2C 00000003 2B02…        hexadecimal: a timestamp follows, its seconds, its increment, the rest
//! ```
//!
//! A token is resumable wherever it came from, so each is a position. What it cannot tell is whether more events of
//! the same cluster time follow (those of one transaction share it); that is known when the server had nothing more.

use std::fmt;
use std::str::FromStr;

use mongodb::bson::{Document, RawDocument, Timestamp, doc};
use thiserror::Error;

/// A moment of the cluster's own clock, written `1763291754:3`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClusterTime {
    pub seconds: u32,
    pub increment: u32,
}

impl ClusterTime {
    pub fn as_gauge(self) -> u64 {
        u64::from(self.seconds) << 32 | u64::from(self.increment)
    }
}

impl From<Timestamp> for ClusterTime {
    fn from(timestamp: Timestamp) -> Self {
        ClusterTime { seconds: timestamp.time, increment: timestamp.increment }
    }
}

impl From<ClusterTime> for Timestamp {
    fn from(time: ClusterTime) -> Self {
        Timestamp { time: time.seconds, increment: time.increment }
    }
}

impl fmt::Display for ClusterTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.seconds, self.increment)
    }
}

/// The text of a resume token's `_data`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResumeToken(Box<str>);

impl ResumeToken {
    /// The token of an event or a batch; `None` when it is not of the form that servers since 4.2 write.
    pub fn from_raw(token: &RawDocument) -> Option<Self> {
        token.get_str("_data").ok()?.parse().ok()
    }

    pub fn to_document(&self) -> Document {
        doc! { "_data": &*self.0 }
    }

    /// When the operation was, that it stands for.
    pub fn time(&self) -> ClusterTime {
        let half = |range| self.0.get(range).and_then(|digits| u32::from_str_radix(digits, 16).ok()).unwrap_or(0);
        ClusterTime { seconds: half(2..10), increment: half(10..18) }
    }
}

impl fmt::Display for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "`{0}` is not a position in a change stream; there are resume tokens (825F0A…) and cluster times (1763291754:3)"
)]
pub struct ParseTokenError(String);

impl FromStr for ResumeToken {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hexadecimal = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        // A longer one than any server makes is not kept.
        match text.starts_with("82") && (18..=1 << 16).contains(&text.len()) && hexadecimal {
            true => Ok(ResumeToken(text.to_ascii_uppercase().into())),
            false => Err(ParseTokenError(text.chars().take(80).collect())),
        }
    }
}

/// What `--start` may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartPoint {
    After(ResumeToken),
    /// The first operation of this time, or after it.
    At(ClusterTime),
}

impl FromStr for StartPoint {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((seconds, increment)) = text.split_once(':')
            && let (Ok(seconds), Ok(increment)) = (seconds.parse(), increment.parse())
        {
            return Ok(StartPoint::At(ClusterTime { seconds, increment }));
        }
        text.parse().map(StartPoint::After)
    }
}

impl fmt::Display for StartPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartPoint::After(token) => token.fmt(f),
            StartPoint::At(time) => time.fmt(f),
        }
    }
}

#[derive(Clone, Debug)]
pub struct StreamPosition {
    /// `None` names a moment, to be compared with only.
    pub token: Option<ResumeToken>,
    pub time: ClusterTime,
    /// Nothing more of this cluster time follows.
    pub whole: bool,
    /// Events read since this process began; not part of the position.
    pub eventful: u64,
}

impl StreamPosition {
    pub fn after(token: ResumeToken) -> Self {
        StreamPosition { time: token.time(), token: Some(token), whole: false, eventful: 0 }
    }

    /// The end of all that was committed at this time or before.
    pub fn end_of(time: ClusterTime) -> Self {
        StreamPosition { token: None, time, whole: true, eventful: 0 }
    }

    /// Before anything.
    pub fn nothing() -> Self {
        StreamPosition { token: None, time: ClusterTime::default(), whole: false, eventful: 0 }
    }

    /// Whether everything up to the other position was delivered by whoever stands here.
    pub fn covers(&self, other: &Self) -> bool {
        match (&self.token, &other.token) {
            // A token that was stored and read again no longer knows whether it was whole.
            (Some(here), Some(there)) if !other.whole || here == there => there <= here,
            _ => (self.time, self.whole) >= (other.time, other.whole),
        }
    }
}

impl PartialEq for StreamPosition {
    fn eq(&self, other: &Self) -> bool {
        (&self.token, self.time, self.whole) == (&other.token, other.time, other.whole)
    }
}

impl Eq for StreamPosition {}

/// As `--start` takes it.
impl fmt::Display for StreamPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.token {
            Some(token) => token.fmt(f),
            None => self.time.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EARLIER: &str = "8263B3F6A4000000022B022C0100296E5A1004";
    const LATER: &str = "8263B3F6A4000000022B022C0100296E5A1005";

    fn position(text: &str) -> StreamPosition {
        StreamPosition::after(text.parse().unwrap())
    }

    #[test]
    fn a_token_tells_its_cluster_time() {
        let token: ResumeToken = EARLIER.parse().unwrap();
        assert_eq!(token.time(), ClusterTime { seconds: 0x63B3_F6A4, increment: 2 });
        assert_eq!(token.to_string(), EARLIER);
    }

    #[test]
    fn what_is_no_position_is_refused() {
        for text in ["", "82", "16/B374D848", "binlog.000001:4", "0-1-2", "8263b3f6a400000002zz", "now"] {
            assert!(text.parse::<StartPoint>().is_err(), "{text} was accepted");
        }
        assert_eq!("5:7".parse(), Ok(StartPoint::At(ClusterTime { seconds: 5, increment: 7 })));
    }

    #[test]
    fn a_position_covers_what_sorts_before_it() {
        assert!(position(LATER).covers(&position(EARLIER)) && !position(EARLIER).covers(&position(LATER)));
        assert!(position(EARLIER).covers(&position(EARLIER)));
    }

    #[test]
    fn a_position_covers_itself_after_it_was_stored() {
        let idle = StreamPosition { whole: true, ..position(EARLIER) };
        assert!(position(EARLIER).covers(&idle));
        assert!(!position("8263B3F6A4000000012B0229296E04").covers(&idle));
    }

    #[test]
    fn a_moment_is_over_only_when_nothing_more_of_it_follows() {
        let moment = StreamPosition::end_of(position(EARLIER).time);
        assert!(!position(LATER).covers(&moment), "other events of the same transaction may follow");
        assert!(StreamPosition { whole: true, ..position(EARLIER) }.covers(&moment));
        assert!(position("8263B3F6A4000000032B0229296E04").covers(&moment), "a later time");
    }
}
