//! Dates and times.
//!
//! ```text
//!   DATE        u24 le:  year:15 month:4 day:5
//!   DATETIME2   u40 be + 2^39:  year*13+month:17 day:5 hour:5 minute:6 second:6   then the fraction
//!   TIME2       u24 be + 2^23:  unused:1 hour:10 minute:6 second:6                then the fraction
//!   TIMESTAMP2  u32 be:  seconds since the Unix epoch                             then the fraction
//!   fraction    0 to 3 bytes be: hundredths, ten-thousandths or millionths
//!   packed      i64 in JSON: as DATETIME2 or TIME2, above 24 bits of millionths
//!   of old      DATETIME u64 YYYYMMDDhhmmss   TIME i24 hhmmss   TIMESTAMP u32, all le
//! ```
//!
//! A negative TIME2 is the negative of the whole number, fraction and all. The server stores dates that no calendar
//! has (a zero year, month or day): they print as they are, and are no moment.

use std::io::Write as _;

use super::input::{big_endian, little_endian};
use crate::event::Micros;
use crate::source::postgres::values::{civil, days_from_civil};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Date {
    pub year: u32,
    pub month: u32,
    pub day: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    pub negative: bool,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
    pub micros: u32,
}

const MICROS_PER_SECOND: i64 = 1_000_000;
const SECONDS_PER_DAY: i64 = 86_400;

impl Date {
    pub fn from_date(raw: &[u8]) -> Option<Self> {
        let packed = little_endian(raw.first_chunk::<3>().filter(|_| raw.len() == 3)?) as u32;
        Some(Date { year: packed >> 9, month: packed >> 5 & 15, day: packed & 31 })
    }

    fn from_bits(bits: u64) -> Option<Self> {
        let months = bits >> 5;
        let date = Date { year: (months / 13) as u32, month: (months % 13) as u32, day: (bits & 31) as u32 };
        (date.year <= 9999).then_some(date)
    }

    pub fn write(&self, out: &mut Vec<u8>) {
        // Writing to a Vec cannot fail.
        let _ = write!(out, "{:04}-{:02}-{:02}", self.year, self.month, self.day);
    }
}

impl Clock {
    fn from_bits(bits: u64, micros: u64) -> Option<Self> {
        let clock = Clock {
            negative: false,
            hour: (bits >> 12) as u32,
            minute: (bits >> 6 & 63) as u32,
            second: (bits & 63) as u32,
            micros: micros as u32,
        };
        (clock.minute < 60 && clock.second < 60 && micros < 1_000_000).then_some(clock)
    }

    /// With so many digits of the fraction.
    pub fn write(&self, digits: usize, out: &mut Vec<u8>) {
        let sign = if self.negative { "-" } else { "" };
        let _ = write!(out, "{sign}{:02}:{:02}:{:02}", self.hour, self.minute, self.second);
        if digits > 0 {
            let text = [
                self.micros / 100_000,
                self.micros / 10_000,
                self.micros / 1000,
                self.micros / 100,
                self.micros / 10,
                self.micros,
            ]
            .map(|number| b'0' + (number % 10) as u8);
            out.push(b'.');
            out.extend_from_slice(&text[..digits.min(6)]);
        }
    }
}

/// Millionths from a fraction of so many bytes.
fn fraction(number: u64, bytes: usize) -> u64 {
    match bytes {
        0 => 0,
        1 => number * 10_000,
        2 => number * 100,
        _ => number,
    }
}

/// `None` if the bytes are no such value, as for all of these.
pub fn datetime2(raw: &[u8]) -> Option<(Date, Clock)> {
    let (whole, rest) = raw.split_first_chunk::<5>()?;
    let bits = big_endian(whole).checked_sub(1 << 39)?;
    split_datetime(bits, fraction(big_endian(rest), rest.len()))
}

fn split_datetime(bits: u64, micros: u64) -> Option<(Date, Clock)> {
    let clock = Clock::from_bits(bits & 0x1_ffff, micros)?;
    Some((Date::from_bits(bits >> 17)?, clock)).filter(|_| clock.hour < 24)
}

pub fn time2(raw: &[u8]) -> Option<Clock> {
    let bytes = raw.len().checked_sub(3).filter(|&bytes| bytes <= 3)?;
    let number = big_endian(raw) as i64 - (0x80_0000 << (8 * bytes));
    let size = number.unsigned_abs();
    let (bits, part) = (size >> (8 * bytes), size & ((1 << (8 * bytes)) - 1));
    Some(Clock { negative: number < 0, ..Clock::from_bits(bits, fraction(part, bytes))? })
}

pub fn timestamp2(raw: &[u8]) -> Option<(u32, u32)> {
    let (seconds, rest) = raw.split_first_chunk::<4>()?;
    let micros = fraction(big_endian(rest), rest.len());
    (micros < 1_000_000).then_some((u32::from_be_bytes(*seconds), micros as u32))
}

pub fn old_datetime(raw: &[u8]) -> Option<(Date, Clock)> {
    let number = u64::from_le_bytes(raw.try_into().ok()?);
    let (date, clock) = (number / 1_000_000, (number % 1_000_000) as u32);
    let date = Date {
        year: u32::try_from(date / 10_000).ok().filter(|&year| year <= 9999)?,
        month: (date / 100 % 100) as u32,
        day: (date % 100) as u32,
    };
    Some((date, Clock { hour: clock / 10_000, minute: clock / 100 % 100, second: clock % 100, ..Clock::default() }))
}

pub fn old_time(raw: &[u8]) -> Option<Clock> {
    let number = little_endian(raw.first_chunk::<3>().filter(|_| raw.len() == 3)?) as u32;
    let number = ((number << 8) as i32) >> 8;
    let size = number.unsigned_abs();
    Some(Clock { negative: number < 0, hour: size / 10_000, minute: size / 100 % 100, second: size % 100, micros: 0 })
}

/// DATE, DATETIME and TIMESTAMP in JSON.
pub fn packed_datetime(packed: i64) -> Option<(Date, Clock)> {
    let packed = u64::try_from(packed).ok()?;
    split_datetime(packed >> 24, packed & 0xff_ffff)
}

/// TIME in JSON.
pub fn packed_time(packed: i64) -> Option<Clock> {
    let size = packed.unsigned_abs();
    Some(Clock { negative: packed < 0, ..Clock::from_bits(size >> 24 & 0x3f_ffff, size & 0xff_ffff)? })
}

/// A timestamp's date and time in UTC; 0 is the zero date.
pub fn utc(seconds: u32, micros: u32) -> (Date, Clock) {
    if seconds == 0 && micros == 0 {
        return Default::default();
    }
    let (days, rest) = (i64::from(seconds) / SECONDS_PER_DAY, seconds % SECONDS_PER_DAY as u32);
    let (year, month, day) = civil(days);
    (
        Date { year: year as u32, month: month as u32, day: day as u32 },
        Clock { negative: false, hour: rest / 3600, minute: rest / 60 % 60, second: rest % 60, micros },
    )
}

/// The moment, the date and time being UTC; `None` for a date that is not in the calendar.
pub fn moment(date: Date, clock: Clock) -> Option<Micros> {
    if !(1..=12).contains(&date.month) || !(1..=31).contains(&date.day) {
        return None;
    }
    let days = days_from_civil(i64::from(date.year), i64::from(date.month), i64::from(date.day));
    let seconds = i64::from(clock.hour) * 3600 + i64::from(clock.minute) * 60 + i64::from(clock.second);
    Some(Micros((days * SECONDS_PER_DAY + seconds) * MICROS_PER_SECOND + i64::from(clock.micros)))
}
