//! A dead letter: the record that could not be delivered, and beside it why it is there and where it came from.
//!
//! On its way it is a record whose last headers are marks of ours. In a topic it stays so; in a table each mark is a
//! column, and the headers are the record's own.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::digest::{Context, SHA256};
use serde_json::{Value, json};

use crate::event::Micros;
use crate::route::Headers;
use crate::source::postgres::values::civil;

/// Why it is there.
pub const REASON: &str = "outboxd.reason";
/// Where it should have gone.
pub const TOPIC: &str = "outboxd.topic";
/// The commit it was part of.
pub const POSITION: &str = "outboxd.position";
pub const PIPELINE: &str = "outboxd.pipeline";
pub const PUBLISHER: &str = "outboxd.publisher";
/// On a record that was a dead letter: when it was sent again.
pub const REPLAYED: &str = "outboxd.replayed";

/// A position that many commits have: rows that were in the table before the log was entered.
const SNAPSHOT: &str = "snapshot";

#[derive(Clone, Debug, Default)]
pub struct Letter {
    pub pipeline: String,
    pub publisher: String,
    /// Empty where it is not known: for a message that is in no table, and where several tables are not told apart.
    pub source_table: String,
    pub event_id: Option<String>,
    /// `None` when it never became a record.
    pub topic: Option<String>,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    /// The record's own.
    pub headers: Headers,
    pub position: String,
    pub reason: String,
    pub attempts: u32,
}

impl Letter {
    /// Takes our marks out of a record's headers; the rest of the record is for the caller to fill in.
    pub fn from_marked(marked: &Headers) -> Self {
        let mut letter = Letter { attempts: 1, ..Letter::default() };
        for (name, value) in marked.iter() {
            let text = || value.map(|value| plain(&String::from_utf8_lossy(value))).unwrap_or_default();
            match name {
                REASON => letter.reason = text(),
                TOPIC => letter.topic = Some(text()),
                POSITION => letter.position = text(),
                PIPELINE => letter.pipeline = text(),
                PUBLISHER => letter.publisher = text(),
                _ => letter.headers.push(name, value),
            }
        }
        letter.event_id = letter.id().map(|id| match std::str::from_utf8(id) {
            Ok(text) if !text.contains('\0') => text.to_owned(),
            _ => format!("base64:{}", BASE64.encode(id)),
        });
        letter
    }

    /// The event's id. The layout that has none has the event's place among all instead.
    fn id(&self) -> Option<&[u8]> {
        ["id", "event_id", "position"].iter().find_map(|name| self.header(name))
    }

    fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|(known, _)| *known == name).and_then(|(_, value)| value)
    }

    /// The same for the same event of the same commit, and for no other. Where table, id and commit do not tell events
    /// apart, what is in them does.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut digest = Context::new(&SHA256);
        let mut add = |part: Option<&[u8]>| {
            let length = part.map_or(u64::MAX, |part| part.len() as u64);
            digest.update(&length.to_be_bytes());
            digest.update(part.unwrap_or_default());
        };
        for part in [&self.pipeline, &self.publisher, &self.source_table, &self.position] {
            add(Some(part.as_bytes()));
        }
        let id = self.header("id").or_else(|| self.header("event_id"));
        add(id);
        if id.is_none() || self.source_table.is_empty() || self.position == SNAPSHOT {
            add(self.topic.as_deref().map(str::as_bytes));
            add(self.key.as_deref());
            add(self.value.as_deref());
            for (name, value) in self.headers.iter() {
                add(Some(name.as_bytes()));
                add(value);
            }
        }
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(digest.finish().as_ref());
        fingerprint
    }
}

/// A letter as it is kept.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    pub id: String,
    pub failed_at: String,
    pub replayed: bool,
    /// Where the place remembers when.
    pub replayed_at: Option<String>,
    pub letter: Letter,
}

impl Kept {
    /// As JSON: with everything, or what a list has.
    pub fn to_json(&self, whole: bool) -> Value {
        let Letter { pipeline, publisher, source_table, event_id, topic, key, value, headers, .. } = &self.letter;
        let mut object = json!({
            "id": self.id,
            "failed_at": self.failed_at,
            "pipeline": pipeline,
            "publisher": publisher,
            "source_table": source_table,
            "event_id": event_id,
            "topic": topic,
            "key": bytes_to_json(key.as_deref()),
            "position": self.letter.position,
            "reason": self.letter.reason,
            "attempts": self.letter.attempts,
            "replayed": self.replayed,
            "replayed_at": self.replayed_at,
        });
        if whole {
            object["headers"] = headers_to_json(headers);
            object["value"] = bytes_to_json(value.as_deref());
        }
        object
    }
}

/// Text as a string, what is none as `{"base64": …}`.
fn bytes_to_json(bytes: Option<&[u8]>) -> Value {
    match bytes.map(|bytes| (bytes, std::str::from_utf8(bytes))) {
        None => Value::Null,
        // A NUL is text that not every database takes.
        Some((_, Ok(text))) if !text.contains('\0') => Value::from(text),
        Some((bytes, _)) => json!({ "base64": BASE64.encode(bytes) }),
    }
}

/// `[[name, value], …]`.
pub fn headers_to_json(headers: &Headers) -> Value {
    headers.iter().map(|(name, value)| json!([name, bytes_to_json(value)])).collect()
}

/// What [`headers_to_json`] wrote; what it cannot have written is left out.
pub fn headers_from_json(array: &Value) -> Headers {
    let mut headers = Headers::default();
    for pair in array.as_array().map(Vec::as_slice).unwrap_or_default() {
        let Some(name) = pair[0].as_str() else { continue };
        match &pair[1] {
            Value::String(text) => headers.push(name, Some(text.as_bytes())),
            Value::Object(marked) => {
                let encoded = marked.get("base64").and_then(Value::as_str).unwrap_or_default();
                headers.push(name, Some(&BASE64.decode(encoded).unwrap_or_default()));
            }
            _ => headers.push(name, None),
        }
    }
    headers
}

/// Without what PostgreSQL's text cannot hold.
fn plain(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// The moment as RFC 3339 has it, in UTC.
pub fn rfc3339(moment: Micros) -> String {
    let (seconds, micros) = (moment.0.div_euclid(1_000_000), moment.0.rem_euclid(1_000_000));
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(own: &[(&str, Option<&[u8]>)]) -> Letter {
        let mut headers = Headers::default();
        for (name, value) in own {
            headers.push(name, *value);
        }
        for (name, value) in [(TOPIC, "orders"), (POSITION, "0/1"), (REASON, "no"), (PIPELINE, "p"), (PUBLISHER, "p")] {
            headers.push(name, Some(value.as_bytes()));
        }
        Letter { source_table: "outbox".to_owned(), ..Letter::from_marked(&headers) }
    }

    #[test]
    fn a_letter_has_the_records_own_headers_and_our_marks_apart() {
        let letter = marked(&[("id", Some(b"7")), ("trace", None)]);
        assert_eq!(letter.headers.iter().collect::<Vec<_>>(), [("id", Some(&b"7"[..])), ("trace", None)]);
        assert_eq!((letter.event_id.as_deref(), letter.topic.as_deref()), (Some("7"), Some("orders")));
        assert_eq!((letter.reason.as_str(), letter.position.as_str()), ("no", "0/1"));
    }

    #[test]
    fn a_fingerprint_tells_events_apart_and_not_their_repeats() {
        let with = |id: &'static str, value: &str| Letter {
            value: Some(value.into()),
            reason: format!("because of {value}"),
            ..marked(&[("id", Some(id.as_bytes()))])
        };
        assert_eq!(with("1", "a").fingerprint(), with("1", "b").fingerprint());
        assert_ne!(with("1", "a").fingerprint(), with("2", "a").fingerprint());
        let elsewhere = Letter { position: "0/2".to_owned(), ..with("1", "a") };
        assert_ne!(with("1", "a").fingerprint(), elsewhere.fingerprint());
        let table = |name: &str, value: &str| Letter { source_table: name.to_owned(), ..with("1", value) };
        assert_ne!(table("outbox", "a").fingerprint(), table("audit", "a").fingerprint());
        // Without an id, a table or a commit of its own, what is in them counts.
        assert_ne!(table("", "a").fingerprint(), table("", "b").fingerprint());
        let nameless = |value: &str| Letter { value: Some(value.into()), ..marked(&[]) };
        assert_ne!(nameless("a").fingerprint(), nameless("b").fingerprint());
        assert_eq!(nameless("a").fingerprint(), nameless("a").fingerprint());
        let early = |value: &str| Letter { position: SNAPSHOT.to_owned(), ..with("1", value) };
        assert_ne!(early("a").fingerprint(), early("b").fingerprint());
    }

    #[test]
    fn headers_come_back_as_they_were() {
        let mut headers = Headers::default();
        headers.push("text", Some("grüße".as_bytes()));
        headers.push("none", None);
        headers.push("bytes", Some(&[0, 255, 1]));
        headers.push("nul", Some(b"a\0b"));
        headers.push("", Some(b""));
        let json = headers_to_json(&headers);
        assert_eq!(json[2], json!(["bytes", { "base64": "AP8B" }]));
        let back = headers_from_json(&json);
        assert_eq!(back.iter().collect::<Vec<_>>(), headers.iter().collect::<Vec<_>>());
    }

    #[test]
    fn a_moment_is_written_as_rfc_3339() {
        assert_eq!(rfc3339(Micros(0)), "1970-01-01T00:00:00.000000Z");
        assert_eq!(rfc3339(Micros(1_709_210_096_123_456)), "2024-02-29T12:34:56.123456Z");
    }
}
