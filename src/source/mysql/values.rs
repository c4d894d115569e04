//! Column values: from what lies in a row image to what routing wants.
//!
//! Text is what the server gives for `SELECT column`, in UTF-8 (the same as `CAST(column AS CHAR)`, except that MySQL
//! casts very small floats into a narrower form than it prints); a TIMESTAMP is in UTC, whatever zone a session has. Binary strings, BIT and geometry are their bytes. Character columns in UTF-8 and blobs stay
//! where they lie.
//!
//! Two things the log does not hold: a FLOAT or DOUBLE that was declared with digits, as in `DOUBLE(10,2)`, prints
//! without its trailing zeros; and MariaDB's UUID, INET6 and INET4 are plain binary strings, to be asked for by
//! [`render_declared`].

use std::io::Write as _;

use thiserror::Error;

use super::charset::{self, Charset};
use super::compressed;
use super::input::{Malformed, little_endian};
use super::json;
use super::numbers;
use super::table_map::{ColumnShape, column_type::*};
use super::temporal::{self, Clock, Date};
use crate::event::{Micros, Want};
use crate::source::postgres::values::{guess_unit, parse_time, write_uuid};

/// What to do with a value.
#[derive(Debug, PartialEq, Eq)]
pub enum Rendered<'a> {
    /// These bytes of the event, as they are.
    Borrowed(&'a [u8]),
    /// Written to the output.
    Written,
}

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum BadValue {
    #[error("the bytes are no value of the column's type")]
    WrongForm,
    #[error("the column's collation {0} is of a character set that is not supported")]
    UnknownCharset(u16),
    #[error("the text is not valid in the column's character set")]
    NotText,
    #[error(
        "the log does not name the members of the enum or set: SET GLOBAL binlog_row_metadata = FULL on the server"
    )]
    MembersUnknown,
    #[error("the value is no moment in time")]
    NoMoment,
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// A value that is not null. What is written is appended to `out`; after an error nothing is.
pub fn render<'a>(
    column: &ColumnShape,
    want: Want,
    raw: &'a [u8],
    out: &mut Vec<u8>,
) -> Result<Rendered<'a>, BadValue> {
    let start = out.len();
    let result = match want {
        Want::Text | Want::Key => text(column, raw, out),
        Want::Time => time(column, raw, out),
    };
    if result.is_err() {
        out.truncate(start);
    }
    result
}

/// A binary string of 16 bytes as the text of a UUID, in the order in which they stand.
pub fn render_uuid(raw: &[u8], out: &mut Vec<u8>) -> Result<(), BadValue> {
    write_uuid(padded::<16>(raw)?, out);
    Ok(())
}

/// Types that the log shows as binary strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declared {
    Uuid,
    Inet6,
    Inet4,
}

impl Declared {
    /// By the name in `information_schema.columns.data_type`.
    pub fn by_name(name: &str) -> Option<Self> {
        [("uuid", Declared::Uuid), ("inet6", Declared::Inet6), ("inet4", Declared::Inet4)]
            .into_iter()
            .find(|(known, _)| name.eq_ignore_ascii_case(known))
            .map(|(_, declared)| declared)
    }
}

/// A value of a type that the log does not tell. MariaDB keeps a UUID with its parts swapped on disk and puts it in
/// order for the log, so that BINARY(16) and UUID replicate into each other.
pub fn render_declared(declared: Declared, raw: &[u8], out: &mut Vec<u8>) -> Result<(), BadValue> {
    // Writing to a Vec cannot fail.
    match declared {
        Declared::Uuid => render_uuid(raw, out)?,
        Declared::Inet4 => {
            let [a, b, c, d] = padded::<4>(raw)?;
            let _ = write!(out, "{a}.{b}.{c}.{d}");
        }
        Declared::Inet6 => write_inet6(padded::<16>(raw)?, out),
    }
    Ok(())
}

/// As MariaDB has it, which is not quite what is usual: a single zero is left out too, and the deprecated
/// IPv4-compatible addresses are dotted.
fn write_inet6(bytes: [u8; 16], out: &mut Vec<u8>) {
    let address = std::net::Ipv6Addr::from(bytes);
    let [.., w, x, y, z] = bytes;
    let segments = address.segments();
    match segments {
        [0, 0, 0, 0, 0, 0, high, _] if high != 0 => {
            let _ = write!(out, "::{w}.{x}.{y}.{z}");
        }
        [0, 0, 0, 0, 0, 0xffff, ..] => {
            let _ = write!(out, "::ffff:{w}.{x}.{y}.{z}");
        }
        _ => {
            let zeros = |from: usize| segments[from..].iter().take_while(|segment| **segment == 0).count();
            // The first of the longest runs.
            let gap = (0..8).rev().max_by_key(|&from| zeros(from)).unwrap_or(0);
            let after = gap + zeros(gap);
            for (at, segment) in segments.iter().enumerate() {
                if at == gap && after > gap {
                    out.extend_from_slice(b"::");
                }
                if (gap..after).contains(&at) {
                    continue;
                }
                if at > 0 && (at != after || after == gap) {
                    out.push(b':');
                }
                let _ = write!(out, "{segment:x}");
            }
        }
    }
}

/// The log leaves the trailing zeros of BINARY(n) out.
fn padded<const N: usize>(raw: &[u8]) -> Result<[u8; N], BadValue> {
    let mut whole = [0; N];
    whole.get_mut(..raw.len()).ok_or(BadValue::WrongForm)?.copy_from_slice(raw);
    Ok(whole)
}

fn text<'a>(column: &ColumnShape, raw: &'a [u8], out: &mut Vec<u8>) -> Result<Rendered<'a>, BadValue> {
    let wrong = BadValue::WrongForm;
    let digits = usize::from(column.meta);
    // Writing to a Vec cannot fail.
    match column.kind {
        TINY | SHORT | INT24 | LONG | LONGLONG => match integer(column, raw).ok_or(wrong)? {
            Integer::Signed(number) => {
                let _ = write!(out, "{number}");
            }
            Integer::Unsigned(number) => {
                let _ = write!(out, "{number}");
            }
        },
        FLOAT => numbers::write_float(f32::from_le_bytes(raw.try_into().map_err(|_| wrong)?), out).ok_or(wrong)?,
        DOUBLE => numbers::write_double(f64::from_le_bytes(raw.try_into().map_err(|_| wrong)?), out).ok_or(wrong)?,
        NEWDECIMAL => {
            let [precision, scale] = column.meta.to_be_bytes();
            numbers::write_decimal(precision, scale, raw, out).ok_or(wrong)?;
        }
        YEAR => match raw {
            [0] => out.extend_from_slice(b"0000"),
            [year] => {
                let _ = write!(out, "{}", 1900 + u32::from(*year));
            }
            _ => return Err(wrong),
        },
        DATE | NEWDATE => Date::from_date(raw).ok_or(wrong)?.write(out),
        TIME => temporal::old_time(raw).ok_or(wrong)?.write(0, out),
        TIME2 => temporal::time2(raw).ok_or(wrong)?.write(digits, out),
        DATETIME | DATETIME2 | TIMESTAMP | TIMESTAMP2 => {
            let (date, clock) = date_and_time(column, raw).ok_or(wrong)?;
            date.write(out);
            out.push(b' ');
            clock.write(digits, out);
        }
        JSON => json::render(raw, out)?,
        ENUM => {
            let members = column.members.as_ref().ok_or(BadValue::MembersUnknown)?;
            let number = little_endian(raw) as usize;
            // 0 is what the server stores for a value that is no member, and prints as nothing.
            if let Some(at) = number.checked_sub(1) {
                out.extend_from_slice(members.get(at).ok_or(wrong)?.as_bytes());
            }
        }
        SET => write_set(column, little_endian(raw), out)?,
        BIT | GEOMETRY | VECTOR => return Ok(Rendered::Borrowed(raw)),
        VARCHAR_COMPRESSED | BLOB_COMPRESSED => {
            let mut plain = Vec::new();
            compressed::expand_column(raw, &mut plain)?;
            write_characters(column, &plain, out)?;
        }
        VARCHAR | VAR_STRING | STRING | TINY_BLOB | BLOB | MEDIUM_BLOB | LONG_BLOB => {
            return match charset_of(column)? {
                Charset::Binary if column.kind == STRING && raw.len() < digits => {
                    out.extend_from_slice(raw);
                    out.resize(out.len() + digits - raw.len(), 0);
                    Ok(Rendered::Written)
                }
                Charset::Binary | Charset::Utf8 => Ok(Rendered::Borrowed(raw)),
                _ => write_characters(column, raw, out).map(|()| Rendered::Written),
            };
        }
        _ => return Err(wrong),
    }
    Ok(Rendered::Written)
}

/// A column of which nothing is known is taken as it is; the catalog should have told.
fn charset_of(column: &ColumnShape) -> Result<Charset, BadValue> {
    match column.collation {
        Some(collation) => charset::of_collation(collation).ok_or(BadValue::UnknownCharset(collation)),
        None => Ok(Charset::Utf8),
    }
}

fn write_characters(column: &ColumnShape, raw: &[u8], out: &mut Vec<u8>) -> Result<(), BadValue> {
    charset::to_utf8(charset_of(column)?, raw, out).map_err(|_| BadValue::NotText)
}

fn write_set(column: &ColumnShape, bits: u64, out: &mut Vec<u8>) -> Result<(), BadValue> {
    let members = column.members.as_ref().ok_or(BadValue::MembersUnknown)?;
    if members.len() < 64 && bits >> members.len() != 0 {
        return Err(BadValue::WrongForm);
    }
    let mut first = true;
    for (_, member) in members.iter().enumerate().take(64).filter(|(at, _)| bits >> at & 1 == 1) {
        if !first {
            out.push(b',');
        }
        first = false;
        out.extend_from_slice(member.as_bytes());
    }
    Ok(())
}

enum Integer {
    Signed(i64),
    Unsigned(u64),
}

fn integer(column: &ColumnShape, raw: &[u8]) -> Option<Integer> {
    let bits = 8 * u32::try_from(raw.len()).ok().filter(|len| (1..=8).contains(len))?;
    let number = little_endian(raw);
    Some(match column.unsigned {
        true => Integer::Unsigned(number),
        false => Integer::Signed(((number << (64 - bits)) as i64) >> (64 - bits)),
    })
}

fn date_and_time(column: &ColumnShape, raw: &[u8]) -> Option<(Date, Clock)> {
    match column.kind {
        DATETIME => temporal::old_datetime(raw),
        DATETIME2 => temporal::datetime2(raw),
        TIMESTAMP => Some(temporal::utc(u32::from_le_bytes(raw.try_into().ok()?), 0)),
        TIMESTAMP2 => temporal::timestamp2(raw).map(|(seconds, micros)| temporal::utc(seconds, micros)),
        _ => None,
    }
}

/// A moment: of the temporal types, of numbers since the Unix epoch, and of text that says one.
fn time<'a>(column: &ColumnShape, raw: &'a [u8], out: &mut Vec<u8>) -> Result<Rendered<'a>, BadValue> {
    let moment = match column.kind {
        DATE | NEWDATE => {
            let date = Date::from_date(raw).ok_or(BadValue::WrongForm)?;
            temporal::moment(date, Clock::default())
        }
        DATETIME | DATETIME2 | TIMESTAMP | TIMESTAMP2 => {
            let (date, clock) = date_and_time(column, raw).ok_or(BadValue::WrongForm)?;
            temporal::moment(date, clock)
        }
        LONG | LONGLONG => match integer(column, raw).ok_or(BadValue::WrongForm)? {
            Integer::Signed(number) => Some(guess_unit(number)),
            Integer::Unsigned(number) => i64::try_from(number).ok().map(guess_unit),
        },
        _ => {
            let start = out.len();
            let rendered = text(column, raw, out)?;
            let moment = parse_time(match rendered {
                Rendered::Borrowed(bytes) => bytes,
                Rendered::Written => &out[start..],
            });
            out.truncate(start);
            moment
        }
    };
    let Micros(micros) = moment.ok_or(BadValue::NoMoment)?;
    out.extend_from_slice(&micros.to_be_bytes());
    Ok(Rendered::Written)
}

#[cfg(test)]
#[path = "values_tests.rs"]
mod tests;
