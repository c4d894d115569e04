//! Which row a record is of: where a record has its id, and which texts are ids of the table at all.
//!
//! A text that the id's column cannot hold would make the database refuse a whole batch, so it is told apart here.

use std::fmt;
use std::str::FromStr;

use rdkafka::message::{Headers as _, Message};
use serde_json::Value;

/// Where a record has its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdFrom {
    Header(String),
    /// A JSON pointer into the value.
    Json(String),
}

impl FromStr for IdFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("header", name)) if !name.is_empty() => Ok(IdFrom::Header(name.to_owned())),
            Some(("json", pointer)) if pointer.is_empty() || pointer.starts_with('/') => {
                Ok(IdFrom::Json(pointer.to_owned()))
            }
            _ => Err(format!("`{text}` is not a place; there are header:NAME and json:/pointer")),
        }
    }
}

impl fmt::Display for IdFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IdFrom::Header(name) => write!(f, "header:{name}"),
            IdFrom::Json(pointer) => write!(f, "json:{pointer}"),
        }
    }
}

/// What the id's column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdKind {
    Integer { least: i128, most: i128 },
    Uuid,
    Text,
}

/// An id that its column can hold. Numbers are in the order of their values, as they are in the column's index.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Id {
    Number(i128),
    Text(Box<str>),
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Id::Number(number) => number.fmt(f),
            Id::Text(text) => text.fmt(f),
        }
    }
}

impl IdKind {
    /// Integers of this many bytes.
    pub fn signed(bytes: u32) -> Self {
        let most = (1_i128 << (8 * bytes - 1)) - 1;
        IdKind::Integer { least: -most - 1, most }
    }

    pub fn unsigned(bytes: u32) -> Self {
        IdKind::Integer { least: 0, most: (1_i128 << (8 * bytes)) - 1 }
    }

    /// The id that a text is, if it is one.
    pub fn read(self, text: &str) -> Option<Id> {
        match self {
            IdKind::Integer { least, most } => {
                let number = text.parse::<i128>().ok()?;
                (least..=most).contains(&number).then_some(Id::Number(number))
            }
            IdKind::Uuid => uuid(text).map(|text| Id::Text(text.into())),
            IdKind::Text => (!text.contains('\0')).then(|| Id::Text(text.into())),
        }
    }

    fn name(self) -> &'static str {
        match self {
            IdKind::Integer { .. } => "an integer of its column's size",
            IdKind::Uuid => "a UUID",
            IdKind::Text => "a text",
        }
    }
}

/// In the form that databases print.
fn uuid(text: &str) -> Option<String> {
    let digits: String = text.chars().filter(|c| *c != '-').collect::<String>().to_ascii_lowercase();
    let whole = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let hyphens = matches!(text.len(), 32 | 36);
    (whole && hyphens).then(|| {
        let part = |from: usize, to: usize| &digits[from..to];
        [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
    })
}

/// Why a record is not of this table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foreign {
    NoId,
    NotJson,
    OtherType(String),
}

impl Foreign {
    pub fn describe(&self, from: &IdFrom, kind: IdKind) -> String {
        match (self, from) {
            (Foreign::NoId, IdFrom::Header(name)) => format!("it has no header `{name}`"),
            (Foreign::NoId, IdFrom::Json(pointer)) => format!("its value has nothing at `{pointer}`"),
            (Foreign::NotJson, _) => "its value is not JSON".to_owned(),
            (Foreign::OtherType(found), _) => format!("its id `{found}` is not {}", kind.name()),
        }
    }
}

impl IdFrom {
    /// The id of a record's row.
    pub fn find(&self, record: &impl Message, kind: IdKind) -> Result<Id, Foreign> {
        match self {
            IdFrom::Header(name) => {
                let headers = record.headers().into_iter().flat_map(|headers| headers.iter());
                let value = headers.into_iter().find(|header| header.key == name).and_then(|header| header.value);
                let value = value.ok_or(Foreign::NoId)?;
                let text = std::str::from_utf8(value).map_err(|_| other(&String::from_utf8_lossy(value)))?;
                kind.read(text).ok_or_else(|| other(text))
            }
            IdFrom::Json(pointer) => {
                let value = record.payload().ok_or(Foreign::NoId)?;
                let json: Value = serde_json::from_slice(value).map_err(|_| Foreign::NotJson)?;
                match json.pointer(pointer) {
                    None | Some(Value::Null) => Err(Foreign::NoId),
                    Some(Value::String(text)) => kind.read(text).ok_or_else(|| other(text)),
                    Some(number @ Value::Number(_)) => {
                        let text = number.to_string();
                        kind.read(&text).ok_or_else(|| other(&text))
                    }
                    Some(found) => Err(other(&found.to_string())),
                }
            }
        }
    }
}

/// As much of it as a line of the log should have.
fn other(found: &str) -> Foreign {
    Foreign::OtherType(found.chars().take(40).collect::<String>().escape_debug().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdkafka::Timestamp;
    use rdkafka::message::{Header, OwnedHeaders, OwnedMessage};

    fn record(headers: &[(&str, Option<&[u8]>)], value: Option<&str>) -> OwnedMessage {
        let mut all = OwnedHeaders::new();
        for (key, value) in headers {
            all = all.insert(Header { key, value: *value });
        }
        let value = value.map(|text| text.as_bytes().to_vec());
        OwnedMessage::new(value, None, "t".to_owned(), Timestamp::NotAvailable, 0, 0, Some(all))
    }

    #[test]
    fn an_id_is_in_a_header_or_at_a_place_of_the_value() {
        assert_eq!("header:id".parse(), Ok(IdFrom::Header("id".to_owned())));
        assert_eq!("json:/a/0".parse(), Ok(IdFrom::Json("/a/0".to_owned())));
        assert_eq!("json:".parse(), Ok(IdFrom::Json(String::new())));
        for text in ["", "id", "header:", "json:a", "key:id"] {
            assert!(text.parse::<IdFrom>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn only_what_the_column_can_hold_is_an_id() {
        let bigint = IdKind::signed(8);
        assert_eq!(bigint.read("42"), Some(Id::Number(42)));
        assert_eq!(bigint.read("-9223372036854775808"), Some(Id::Number(i64::MIN.into())));
        for text in ["9223372036854775808", "4.2", "", " 1", "x", "1e3"] {
            assert_eq!(bigint.read(text), None, "{text:?}");
        }
        assert_eq!(IdKind::unsigned(8).read("18446744073709551615"), Some(Id::Number(u64::MAX.into())));
        assert_eq!(IdKind::unsigned(4).read("-1"), None);
        let uuid = "0190A1B2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";
        assert_eq!(IdKind::Uuid.read(uuid), Some(Id::Text(uuid.to_lowercase().into())));
        assert_eq!(IdKind::Uuid.read(&uuid.replace('-', "")), IdKind::Uuid.read(uuid));
        assert_eq!(IdKind::Uuid.read("0190A1B2"), None);
        assert_eq!(IdKind::Text.read("a\0b"), None);
    }

    #[test]
    fn numbers_are_in_the_order_of_their_values() {
        let mut ids: Vec<_> = ["10", "9", "-1"].iter().filter_map(|text| IdKind::signed(8).read(text)).collect();
        ids.sort();
        assert_eq!(ids.iter().map(ToString::to_string).collect::<Vec<_>>(), ["-1", "9", "10"]);
    }

    #[test]
    fn a_record_without_a_fitting_id_is_foreign() {
        let (header, bigint) = (IdFrom::Header("id".to_owned()), IdKind::signed(8));
        let find = |headers: &[(&str, Option<&[u8]>)]| header.find(&record(headers, None), bigint);
        assert_eq!(find(&[("id", Some(b"7")), ("id", Some(b"8"))]), Ok(Id::Number(7)));
        assert_eq!(find(&[("ID", Some(b"7"))]), Err(Foreign::NoId));
        assert_eq!(find(&[("id", None)]), Err(Foreign::NoId));
        assert!(matches!(find(&[("id", Some(b"\0\0\0\0\0\0\0\x07"))]), Err(Foreign::OtherType(_))));
        let pointer = IdFrom::Json("/meta/id".to_owned());
        let find = |value: Option<&str>| pointer.find(&record(&[], value), bigint);
        assert_eq!(find(Some(r#"{"meta":{"id":7}}"#)), Ok(Id::Number(7)));
        assert_eq!(find(Some(r#"{"meta":{"id":"8"}}"#)), Ok(Id::Number(8)));
        assert_eq!(find(Some(r#"{"meta":{"id":7.5}}"#)), Err(Foreign::OtherType("7.5".to_owned())));
        assert_eq!(find(Some(r#"{"id":7}"#)), Err(Foreign::NoId));
        assert_eq!(find(None), Err(Foreign::NoId));
        assert_eq!(find(Some("no json")), Err(Foreign::NotJson));
        assert!(Foreign::NoId.describe(&pointer, bigint).contains("/meta/id"));
    }
}
