//! Column values: from what the server sends to what routing wants.
//!
//! In a text stream every value comes as the server prints it. In a binary one the types an outbox is made of are
//! written here exactly as the server would have printed them; a wanted column of any other type makes the stream a
//! text one (see [`binary_is_known`]).

use super::pgoutput::from_server_time;
use crate::event::{Micros, Want};

/// Type oids of the catalog that are known here; they never change.
pub mod oid {
    pub const BOOL: u32 = 16;
    pub const BYTEA: u32 = 17;
    pub const NAME: u32 = 19;
    pub const INT8: u32 = 20;
    pub const INT2: u32 = 21;
    pub const INT4: u32 = 23;
    pub const TEXT: u32 = 25;
    pub const OID: u32 = 26;
    pub const JSON: u32 = 114;
    pub const XML: u32 = 142;
    pub const BPCHAR: u32 = 1042;
    pub const VARCHAR: u32 = 1043;
    pub const TIMESTAMP: u32 = 1114;
    pub const TIMESTAMPTZ: u32 = 1184;
    pub const UUID: u32 = 2950;
    pub const JSONB: u32 = 3802;
    pub const XID8: u32 = 5069;
}

/// Whether a binary value of this type can be turned into what is wanted.
pub fn binary_is_known(type_oid: u32) -> bool {
    use oid::*;
    matches!(
        type_oid,
        BOOL | BYTEA
            | NAME
            | INT8
            | INT2
            | INT4
            | TEXT
            | OID
            | JSON
            | XML
            | BPCHAR
            | VARCHAR
            | TIMESTAMP
            | TIMESTAMPTZ
            | UUID
            | JSONB
            | XID8
    )
}

/// What to do with a value.
#[derive(Debug, PartialEq, Eq)]
pub enum Rendered<'a> {
    /// These bytes of the frame, as they are.
    Borrowed(&'a [u8]),
    /// Written to the output.
    Written,
}

/// A binary value of this type that has the wrong size or form.
#[derive(Debug, PartialEq, Eq)]
pub struct BadValue;

pub fn render_binary<'a>(
    type_oid: u32,
    want: Want,
    bytes: &'a [u8],
    out: &mut Vec<u8>,
) -> Result<Rendered<'a>, BadValue> {
    use std::io::Write as _;
    let micros = |bytes: &[u8]| bytes.try_into().map(i64::from_be_bytes).map_err(|_| BadValue);
    if want == Want::Time {
        let moment = match type_oid {
            oid::TIMESTAMP | oid::TIMESTAMPTZ => from_server_time(micros(bytes)?),
            oid::INT8 => guess_unit(micros(bytes)?),
            _ => parse_time(bytes).ok_or(BadValue)?,
        };
        out.extend_from_slice(&moment.0.to_be_bytes());
        return Ok(Rendered::Written);
    }
    // Writing to a Vec cannot fail.
    match type_oid {
        oid::UUID => write_uuid(bytes.try_into().map_err(|_| BadValue)?, out),
        oid::JSONB => match bytes.split_first() {
            Some((1, json)) => return Ok(Rendered::Borrowed(json)),
            _ => return Err(BadValue),
        },
        oid::BOOL => match bytes {
            [0] => out.push(b'f'),
            [1] => out.push(b't'),
            _ => return Err(BadValue),
        },
        oid::INT2 => {
            let _ = write!(out, "{}", i16::from_be_bytes(bytes.try_into().map_err(|_| BadValue)?));
        }
        oid::INT4 => {
            let _ = write!(out, "{}", i32::from_be_bytes(bytes.try_into().map_err(|_| BadValue)?));
        }
        oid::INT8 => {
            let _ = write!(out, "{}", micros(bytes)?);
        }
        oid::OID => {
            let _ = write!(out, "{}", u32::from_be_bytes(bytes.try_into().map_err(|_| BadValue)?));
        }
        oid::XID8 => {
            let _ = write!(out, "{}", u64::from_be_bytes(bytes.try_into().map_err(|_| BadValue)?));
        }
        oid::TIMESTAMP => write_timestamp(micros(bytes)?, "", out),
        oid::TIMESTAMPTZ => write_timestamp(micros(bytes)?, "+00", out),
        _ => return Ok(Rendered::Borrowed(bytes)),
    }
    Ok(Rendered::Written)
}

pub fn render_text<'a>(
    type_oid: u32,
    want: Want,
    bytes: &'a [u8],
    out: &mut Vec<u8>,
) -> Result<Rendered<'a>, BadValue> {
    if want == Want::Time {
        let moment = parse_time(bytes).ok_or(BadValue)?;
        out.extend_from_slice(&moment.0.to_be_bytes());
        return Ok(Rendered::Written);
    }
    if type_oid == oid::BYTEA {
        write_unhexed(bytes.strip_prefix(b"\\x").ok_or(BadValue)?, out)?;
        return Ok(Rendered::Written);
    }
    Ok(Rendered::Borrowed(bytes))
}

pub(crate) fn write_uuid(bytes: [u8; 16], out: &mut Vec<u8>) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    for (index, byte) in bytes.into_iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            out.push(b'-');
        }
        out.push(HEX[usize::from(byte >> 4)]);
        out.push(HEX[usize::from(byte & 15)]);
    }
}

fn write_unhexed(hex: &[u8], out: &mut Vec<u8>) -> Result<(), BadValue> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8).ok_or(BadValue);
    if !hex.len().is_multiple_of(2) {
        return Err(BadValue);
    }
    for pair in hex.chunks_exact(2) {
        out.push(digit(pair[0])? << 4 | digit(pair[1])?);
    }
    Ok(())
}

const DAY: i64 = 86_400_000_000;
/// Days from 0000-03-01, where the civil calendar's cycles begin, to 1970-01-01.
const UNIX_EPOCH_DAYS: i64 = 719_468;

/// A server timestamp as the server prints it in ISO style, zone UTC.
fn write_timestamp(server_micros: i64, zone: &str, out: &mut Vec<u8>) {
    use std::io::Write as _;
    match server_micros {
        i64::MAX => return out.extend_from_slice(b"infinity"),
        i64::MIN => return out.extend_from_slice(b"-infinity"),
        _ => {}
    }
    let micros = from_server_time(server_micros).0;
    let (days, time) = (micros.div_euclid(DAY), micros.rem_euclid(DAY));
    let (year, month, day) = civil(days);
    let (shown_year, era) = if year > 0 { (year, "") } else { (1 - year, " BC") };
    let seconds = time / 1_000_000;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let _ = write!(out, "{shown_year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}");
    let fraction = time % 1_000_000;
    if fraction != 0 {
        let digits = format!("{fraction:06}");
        let _ = write!(out, ".{}", digits.trim_end_matches('0'));
    }
    let _ = write!(out, "{zone}{era}");
}

/// Year, month and day of a number of days since the Unix epoch (the civil calendar repeats every 146,097 days).
pub(crate) fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + UNIX_EPOCH_DAYS;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

pub(crate) fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let shifted_month = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - UNIX_EPOCH_DAYS
}

/// A moment written as ISO 8601 (with a space or a `T`, a zone or none) or as a number since the Unix epoch.
pub(crate) fn parse_time(text: &[u8]) -> Option<Micros> {
    let text = std::str::from_utf8(text).ok()?.trim();
    if let Ok(number) = text.parse::<i64>() {
        return Some(guess_unit(number));
    }
    let (date, rest) = text.split_at_checked(10)?;
    let number = |digits: &str| digits.parse::<u32>().ok().map(i64::from);
    let mut parts = date.split('-');
    let (year, month, day) = (number(parts.next()?)?, number(parts.next()?)?, number(parts.next()?)?);
    // Ten characters have room for a year that no number of microseconds reaches.
    if parts.next().is_some() || year > 9999 || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let midnight = days_from_civil(year, month, day) * DAY;
    if rest.is_empty() {
        return Some(Micros(midnight));
    }
    let rest = rest.strip_prefix([' ', 'T', 't'])?;
    let zone_at = rest.find(['Z', 'z', '+', '-']).unwrap_or(rest.len());
    let (clock, zone) = rest.split_at(zone_at);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let mut parts = clock.split(':');
    let (hour, minute) = (number(parts.next()?)?, number(parts.next()?)?);
    let second = parts.next().map_or(Some(0), number)?;
    if parts.next().is_some() || hour > 24 || minute > 59 || second > 60 {
        return None;
    }
    let fraction = match fraction {
        "" => 0,
        digits if digits.len() <= 9 && digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("{digits:0<6}")[..6].parse::<i64>().ok()?
        }
        _ => return None,
    };
    let offset = match zone {
        "" | "Z" | "z" => 0,
        zone => {
            let sign = if zone.starts_with('-') { -1 } else { 1 };
            let digits = zone.get(1..)?.replace(':', "");
            let (hours, minutes) = digits.split_at_checked(2)?;
            let minutes = if minutes.is_empty() { 0 } else { number(minutes.get(..2)?)? };
            sign * (number(hours)? * 60 + minutes) * 60
        }
    };
    Some(Micros(midnight + ((hour * 60 + minute) * 60 + second - offset) * 1_000_000 + fraction))
}

/// A number since the Unix epoch whose unit its size tells: seconds, milli-, micro- or nanoseconds.
pub(crate) fn guess_unit(number: i64) -> Micros {
    Micros(match number.unsigned_abs() {
        0..100_000_000_000 => number * 1_000_000,
        100_000_000_000..100_000_000_000_000 => number * 1000,
        100_000_000_000_000..100_000_000_000_000_000 => number,
        _ => number / 1000,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(type_oid: u32, bytes: &[u8]) -> String {
        let mut out = Vec::new();
        match render_binary(type_oid, Want::Text, bytes, &mut out).unwrap() {
            Rendered::Borrowed(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
            Rendered::Written => String::from_utf8(out).unwrap(),
        }
    }

    #[test]
    fn binary_values_read_as_the_server_prints_them() {
        let uuid = 0x0190_5b6e_1c2d_7abc_8def_0123_4567_89ab_u128.to_be_bytes();
        assert_eq!(text(oid::UUID, &uuid), "01905b6e-1c2d-7abc-8def-0123456789ab");
        assert_eq!(text(oid::JSONB, b"\x01{\"a\": 1}"), "{\"a\": 1}");
        assert_eq!(text(oid::BOOL, &[1]), "t");
        assert_eq!(text(oid::INT2, &(-2i16).to_be_bytes()), "-2");
        assert_eq!(text(oid::INT4, &7i32.to_be_bytes()), "7");
        assert_eq!(text(oid::INT8, &i64::MIN.to_be_bytes()), i64::MIN.to_string());
        assert_eq!(text(oid::TEXT, "ü".as_bytes()), "ü");
        assert_eq!(text(oid::TIMESTAMPTZ, &0i64.to_be_bytes()), "2000-01-01 00:00:00+00");
        assert_eq!(text(oid::TIMESTAMP, &1_500_000i64.to_be_bytes()), "2000-01-01 00:00:01.5");
        assert_eq!(text(oid::TIMESTAMPTZ, &i64::MAX.to_be_bytes()), "infinity");
        // 0001-12-31 BC is the day before year 1.
        assert_eq!(
            text(oid::TIMESTAMP, &(-63_082_281_600_000_000i64 - 1).to_be_bytes()),
            "0001-12-31 23:59:59.999999 BC"
        );
    }

    #[test]
    fn values_of_the_wrong_size_are_errors() {
        for type_oid in [oid::UUID, oid::JSONB, oid::BOOL, oid::INT2, oid::INT4, oid::INT8, oid::TIMESTAMPTZ, oid::OID]
        {
            assert_eq!(render_binary(type_oid, Want::Text, &[9, 9, 9], &mut Vec::new()), Err(BadValue));
        }
        assert_eq!(render_text(oid::BYTEA, Want::Text, b"\\x0g", &mut Vec::new()), Err(BadValue));
        assert_eq!(render_text(oid::BYTEA, Want::Text, b"0a", &mut Vec::new()), Err(BadValue));
    }

    #[test]
    fn times_are_read_in_every_usual_spelling() {
        let at = |text: &str| parse_time(text.as_bytes()).map(|micros| micros.0);
        let expected = Some(1_700_000_000_123_456);
        assert_eq!(at("2023-11-14 22:13:20.123456+00"), expected);
        assert_eq!(at("2023-11-14T22:13:20.123456Z"), expected);
        assert_eq!(at("2023-11-15 03:43:20.123456789+05:30"), expected);
        assert_eq!(at("2023-11-14 22:13:20.123456"), expected);
        assert_eq!(at("1700000000"), Some(1_700_000_000_000_000));
        assert_eq!(at("1700000000123"), Some(1_700_000_000_123_000));
        assert_eq!(at("1700000000123456"), expected);
        assert_eq!(at("1700000000123456789"), expected);
        for bad in ["", "yesterday", "2023-13-01", "2023-11-14 25:00", "2023-11-14 10", "infinity", "404304-1-5 10:00"]
        {
            assert_eq!(at(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_timestamp_survives_being_written_and_read(micros in -60_000_000_000_000_000i64..200_000_000_000_000_000) {
            let mut out = Vec::new();
            write_timestamp(micros, "+00", &mut out);
            prop_assert_eq!(parse_time(&out), Some(from_server_time(micros)));
        }

        #[test]
        fn arbitrary_values_never_panic(type_oid in 0u32..5100, bytes: Vec<u8>) {
            for want in [Want::Text, Want::Time] {
                let _ = render_binary(type_oid, want, &bytes, &mut Vec::new());
                let _ = render_text(type_oid, want, &bytes, &mut Vec::new());
            }
        }
    }
}
