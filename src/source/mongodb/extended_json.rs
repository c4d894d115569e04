//! BSON written as MongoDB Extended JSON 2, straight from its bytes: no tree of values is built.
//!
//! *Relaxed* writes numbers as JSON numbers and dates as text, and is what other tools read best; *canonical* keeps
//! every type apart. docs/mongodb.md has the table, and the tests compare with the driver's own writer.

use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mongodb::bson::error::Error;
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{RawBsonRef, RawDocument};

use crate::config::ExtendedJson;
use crate::source::postgres::values::civil;

/// A server nests at most 100 documents.
const DEEPEST: usize = 200;

#[derive(Debug, thiserror::Error)]
pub enum Unwritable {
    #[error("it is not valid BSON: {0}")]
    Malformed(String),
    #[error("its documents are nested more than {DEEPEST} deep")]
    TooDeep,
}

impl From<Error> for Unwritable {
    fn from(error: Error) -> Self {
        Unwritable::Malformed(error.to_string())
    }
}

/// Appends the value as JSON.
pub fn write(value: RawBsonRef<'_>, form: ExtendedJson, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    Writer { form, out }.value(value, 0)
}

struct Writer<'a> {
    form: ExtendedJson,
    out: &'a mut Vec<u8>,
}

impl Writer<'_> {
    fn value(&mut self, value: RawBsonRef<'_>, depth: usize) -> Result<(), Unwritable> {
        let relaxed = self.form == ExtendedJson::Relaxed;
        match value {
            RawBsonRef::Document(document) => return self.document(document, depth),
            RawBsonRef::Array(array) => {
                let depth = deeper(depth)?;
                self.text("[");
                for (at, element) in array.into_iter().enumerate() {
                    if at > 0 {
                        self.text(",");
                    }
                    self.value(element?, depth)?;
                }
                self.text("]");
            }
            RawBsonRef::String(text) => self.string(text),
            RawBsonRef::Boolean(true) => self.text("true"),
            RawBsonRef::Boolean(false) => self.text("false"),
            RawBsonRef::Null => self.text("null"),
            RawBsonRef::Int32(number) if relaxed => self.display(number),
            RawBsonRef::Int64(number) if relaxed => self.display(number),
            RawBsonRef::Double(number) if relaxed && number.is_finite() => self.double(number),
            RawBsonRef::Int32(number) => self.quoted("$numberInt", number),
            RawBsonRef::Int64(number) => self.quoted("$numberLong", number),
            RawBsonRef::Double(number) => {
                self.text("{\"$numberDouble\":\"");
                self.double(number);
                self.text("\"}");
            }
            RawBsonRef::Decimal128(number) => self.quoted("$numberDecimal", number),
            RawBsonRef::ObjectId(id) => self.quoted("$oid", id),
            RawBsonRef::DateTime(date) => {
                self.text("{\"$date\":");
                match relaxed && is_written_out(date.timestamp_millis()) {
                    true => {
                        self.text("\"");
                        write_date(date.timestamp_millis(), self.out);
                        self.text("\"");
                    }
                    false => self.quoted("$numberLong", date.timestamp_millis()),
                }
                self.text("}");
            }
            RawBsonRef::Binary(binary) => {
                self.text("{\"$binary\":{\"base64\":\"");
                self.out.extend_from_slice(BASE64.encode(binary.bytes).as_bytes());
                let _ = write!(self.out, "\",\"subType\":\"{:02x}\"}}}}", u8::from(binary.subtype));
            }
            RawBsonRef::RegularExpression(regex) => {
                self.text("{\"$regularExpression\":{\"pattern\":");
                self.string(regex.pattern.as_str());
                self.text(",\"options\":");
                self.string(regex.options.as_str());
                self.text("}}");
            }
            RawBsonRef::Timestamp(at) => {
                let _ = write!(self.out, "{{\"$timestamp\":{{\"t\":{},\"i\":{}}}}}", at.time, at.increment);
            }
            RawBsonRef::JavaScriptCode(code) => self.wrapped("$code", code),
            RawBsonRef::Symbol(symbol) => self.wrapped("$symbol", symbol),
            RawBsonRef::JavaScriptCodeWithScope(both) => {
                self.text("{\"$code\":");
                self.string(both.code);
                self.text(",\"$scope\":");
                self.document(both.scope, deeper(depth)?)?;
                self.text("}");
            }
            RawBsonRef::DbPointer(_) => {
                // Its parts are the library's own; it writes this one type as everyone does.
                serde_json::to_writer(&mut *self.out, &value)
                    .map_err(|error| Unwritable::Malformed(error.to_string()))?;
            }
            RawBsonRef::MinKey => self.text("{\"$minKey\":1}"),
            RawBsonRef::MaxKey => self.text("{\"$maxKey\":1}"),
            RawBsonRef::Undefined => self.text("{\"$undefined\":true}"),
        }
        Ok(())
    }

    fn document(&mut self, document: &RawDocument, depth: usize) -> Result<(), Unwritable> {
        let depth = deeper(depth)?;
        self.text("{");
        for (at, element) in document.iter().enumerate() {
            let (name, value) = element?;
            if at > 0 {
                self.text(",");
            }
            self.string(name.as_str());
            self.text(":");
            self.value(value, depth)?;
        }
        self.text("}");
        Ok(())
    }

    fn text(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
    }

    fn string(&mut self, text: &str) {
        // Writing to memory does not fail.
        let _ = serde_json::to_writer(&mut *self.out, text);
    }

    fn display(&mut self, value: impl std::fmt::Display) {
        let _ = write!(self.out, "{value}");
    }

    fn double(&mut self, number: f64) {
        write_double(number, self.out);
    }

    fn quoted(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = write!(self.out, "{{\"{name}\":\"{value}\"}}");
    }

    fn wrapped(&mut self, name: &str, text: &str) {
        let _ = write!(self.out, "{{\"{name}\":");
        self.string(text);
        self.text("}");
    }
}

fn deeper(depth: usize) -> Result<usize, Unwritable> {
    if depth < DEEPEST { Ok(depth + 1) } else { Err(Unwritable::TooDeep) }
}

/// Appends a single value as people write it: an id, a key, a header. What JSON alone can express is written so.
pub fn write_plain(value: RawBsonRef<'_>, form: ExtendedJson, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    match value {
        RawBsonRef::String(text) | RawBsonRef::Symbol(text) => out.extend_from_slice(text.as_bytes()),
        RawBsonRef::ObjectId(id) => {
            let _ = write!(out, "{id}");
        }
        RawBsonRef::Int32(number) => {
            let _ = write!(out, "{number}");
        }
        RawBsonRef::Int64(number) => {
            let _ = write!(out, "{number}");
        }
        RawBsonRef::Double(number) => write_double(number, out),
        RawBsonRef::Decimal128(number) => {
            let _ = write!(out, "{number}");
        }
        RawBsonRef::DateTime(date) if is_written_out(date.timestamp_millis()) => {
            write_date(date.timestamp_millis(), out);
        }
        RawBsonRef::Binary(binary) if binary.subtype == BinarySubtype::Uuid && binary.bytes.len() == 16 => {
            write_uuid(binary.bytes, out);
        }
        RawBsonRef::Binary(binary) => out.extend_from_slice(binary.bytes),
        other => write(other, form, out)?,
    }
    Ok(())
}

fn write_double(number: f64, out: &mut Vec<u8>) {
    if number.is_finite() {
        let _ = serde_json::to_writer(out, &number);
        return;
    }
    out.extend_from_slice(match number {
        number if number.is_nan() => b"NaN",
        number if number > 0.0 => b"Infinity",
        _ => b"-Infinity",
    });
}

fn write_uuid(bytes: &[u8], out: &mut Vec<u8>) {
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            out.push(b'-');
        }
        let _ = write!(out, "{byte:02x}");
    }
}

/// From 1970 to the end of 9999 a date is written out; others are a number.
fn is_written_out(millis: i64) -> bool {
    (0..253_402_300_800_000).contains(&millis)
}

/// `2026-11-16T08:30:00Z`, with milliseconds where there are any.
pub fn write_date(millis: i64, out: &mut Vec<u8>) {
    let (days, of_day) = (millis.div_euclid(86_400_000), millis.rem_euclid(86_400_000));
    let (year, month, day) = civil(days);
    let (seconds, fraction) = (of_day / 1000, of_day % 1000);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let _ = write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}");
    if fraction > 0 {
        let _ = write!(out, ".{fraction:03}");
    }
    out.push(b'Z');
}

#[cfg(test)]
#[path = "extended_json_tests.rs"]
mod tests;
