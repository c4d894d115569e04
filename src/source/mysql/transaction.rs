//! The events that open a transaction, and the one that prepares it.
//!
//! ```text
//!   gtid         flags:u8 uuid:16 gno:i64 [2 last_committed:i64 sequence:i64 [immediate:u56 [original:u56] …]]
//!   tagged gtid  varlen: format size last_field (field value)*
//!   maria gtid   sequence:u64 domain:u32 flags:u8 [commit_id:u64] [format:u32 lens:u8,u8 xid] …
//!   xa prepare   one_phase:u8 format:i32 global_len:u32 branch_len:u32 xid
//! ```

use super::gtid::{Tag, Uuid};
use super::input::{Input, Malformed};
use super::query::Xid;
use crate::event::Micros;

/// When a transaction was committed; servers before MySQL 8.0.1 do not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitTimes {
    /// On the server that this log belongs to.
    pub immediate: Option<Micros>,
    /// On the server that ran it first.
    pub original: Option<Micros>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gtid<'a> {
    pub uuid: Uuid,
    pub tag: Tag<'a>,
    pub gno: u64,
    pub times: CommitTimes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MariaGtid {
    pub domain: u32,
    pub server_id: u32,
    pub sequence: u64,
    /// One event without a commit follows, such as DDL.
    pub standalone: bool,
    pub ddl: bool,
    pub commit_id: Option<u64>,
    pub xa: Option<MariaXa>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MariaXa {
    /// The rows that follow are prepared, and may still be rolled back.
    Prepared(Xid),
    /// What follows commits or rolls back what was prepared.
    Completed(Xid),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XaPrepare {
    /// `XA COMMIT … ONE PHASE`: this is a commit.
    pub one_phase: bool,
    pub xid: Xid,
}

pub(super) fn gtid(mut input: Input<'_>) -> Result<Gtid<'_>, Malformed> {
    let what = "a GTID";
    input.u8(what)?;
    let uuid = Uuid(input.array(what)?);
    let gno = positive(input.u64(what)? as i64)?;
    Ok(Gtid { uuid, tag: Tag::default(), gno, times: commit_times(input)? })
}

fn positive(gno: i64) -> Result<u64, Malformed> {
    match u64::try_from(gno) {
        Ok(gno) if gno > 0 && gno < i64::MAX as u64 => Ok(gno),
        _ => Err(Malformed::Invalid("the number of a GTID")),
    }
}

/// Older servers end the event before any of this.
pub(super) fn commit_times(mut input: Input<'_>) -> Result<CommitTimes, Malformed> {
    const LOGICAL_CLOCK: u8 = 2;
    const TWO_TIMES: u64 = 1 << 55;
    let what = "a transaction's commit time";
    if input.is_empty() || input.u8(what)? != LOGICAL_CLOCK {
        return Ok(CommitTimes::default());
    }
    input.bytes(16, what)?;
    if input.0.len() < 7 {
        return Ok(CommitTimes::default());
    }
    let immediate = input.uint(7, what)?;
    let original = if immediate & TWO_TIMES != 0 { input.uint(7, what)? } else { immediate };
    Ok(CommitTimes { immediate: commit_time(immediate & !TWO_TIMES), original: commit_time(original) })
}

fn commit_time(micros: u64) -> Option<Micros> {
    i64::try_from(micros).ok().filter(|&micros| micros > 0).map(Micros)
}

/// Fields that may be missing or added later, each after its number; see `mysql::serialization`.
pub(super) fn tagged_gtid(mut input: Input<'_>) -> Result<Gtid<'_>, Malformed> {
    const FORMAT: u64 = 1;
    const LAST_KNOWN_FIELD: u64 = 11;
    let what = "a tagged GTID";
    if input.varlen(what)? != FORMAT {
        return Err(Malformed::Invalid("the format of a tagged GTID"));
    }
    input.varlen(what)?;
    if input.varlen(what)? > LAST_KNOWN_FIELD {
        return Err(Malformed::Invalid("a field of a tagged GTID that must not be ignored"));
    }
    let (mut uuid, mut gno, mut tag, mut immediate, mut original) = (None, None, None, None, None);
    while !input.is_empty() {
        match input.varlen(what)? {
            1 => {
                let mut bytes = [0; 16];
                for byte in &mut bytes {
                    *byte = u8::try_from(input.varlen(what)?).map_err(|_| Malformed::Invalid(what))?;
                }
                uuid = Some(Uuid(bytes));
            }
            2 => gno = Some(positive(input.signed_varlen(what)?)?),
            3 => {
                let len = usize::try_from(input.varlen(what)?).map_err(|_| Malformed::Truncated(what))?;
                tag = Some(Tag::parse(input.bytes(len, what)?)?);
            }
            6 => immediate = commit_time(input.varlen(what)?),
            7 => original = commit_time(input.varlen(what)?),
            // Flags, logical clock, length, server versions, ticket: all of one integer.
            0 | 4 | 5 | 8..=LAST_KNOWN_FIELD => {
                input.varlen(what)?;
            }
            // Fields come in the order of their numbers, and those after the known ones may be ignored.
            _ => break,
        }
    }
    match (uuid, gno) {
        (Some(uuid), Some(gno)) => Ok(Gtid {
            uuid,
            tag: tag.unwrap_or_default(),
            gno,
            times: CommitTimes { immediate, original: original.or(immediate) },
        }),
        _ => Err(Malformed::Truncated(what)),
    }
}

pub(super) fn maria_gtid(mut input: Input<'_>, server_id: u32) -> Result<MariaGtid, Malformed> {
    const STANDALONE: u8 = 1;
    const COMMIT_ID: u8 = 2;
    const DDL: u8 = 32;
    const PREPARED_XA: u8 = 64;
    const COMPLETED_XA: u8 = 128;
    let what = "a GTID";
    let (sequence, domain, flags) = (input.u64(what)?, input.u32(what)?, input.u8(what)?);
    let commit_id = if flags & COMMIT_ID != 0 { Some(input.u64(what)?) } else { None };
    let xa = if flags & (PREPARED_XA | COMPLETED_XA) != 0 {
        let format = input.u32(what)? as i32;
        let (global, branch) = (usize::from(input.u8(what)?), usize::from(input.u8(what)?));
        let xid =
            Xid { format, global: input.bytes(global, what)?.to_vec(), branch: input.bytes(branch, what)?.to_vec() };
        Some(if flags & PREPARED_XA != 0 { MariaXa::Prepared(xid) } else { MariaXa::Completed(xid) })
    } else {
        None
    };
    let (standalone, ddl) = (flags & STANDALONE != 0, flags & DDL != 0);
    Ok(MariaGtid { domain, server_id, sequence, standalone, ddl, commit_id, xa })
}

pub(super) fn xa_prepare(mut input: Input<'_>) -> Result<XaPrepare, Malformed> {
    let what = "a prepared transaction";
    let one_phase = input.u8(what)? != 0;
    let format = input.u32(what)? as i32;
    let (global, branch) = (input.u32(what)? as usize, input.u32(what)? as usize);
    let xid = Xid { format, global: input.bytes(global, what)?.to_vec(), branch: input.bytes(branch, what)?.to_vec() };
    Ok(XaPrepare { one_phase, xid })
}
