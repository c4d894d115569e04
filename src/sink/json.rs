//! Records as JSON, for sinks that are read by people and by programs without Kafka.

use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::IgnoredAny;

use crate::route::{Headers, Record};

/// Appends bytes as a JSON value: JSON as it is, other text as a string, what is not text in base64.
pub fn write_value(bytes: Option<&[u8]>, out: &mut Vec<u8>) {
    match bytes {
        None => out.extend_from_slice(b"null"),
        Some(bytes) => match serde_json::from_slice::<IgnoredAny>(bytes) {
            // A line break inside would end the line.
            Ok(_) if !bytes.contains(&b'\n') => out.extend_from_slice(bytes),
            Ok(_) => out.extend(bytes.iter().map(|byte| if *byte == b'\n' || *byte == b'\r' { b' ' } else { *byte })),
            Err(_) => write_text(bytes, out),
        },
    }
}

/// Appends bytes as a JSON string; what is not text in base64.
pub fn write_text(bytes: &[u8], out: &mut Vec<u8>) {
    // Writing to memory does not fail.
    let _ = match std::str::from_utf8(bytes) {
        Ok(text) => serde_json::to_writer(&mut *out, text),
        Err(_) => serde_json::to_writer(&mut *out, &BASE64.encode(bytes)),
    };
}

/// Appends headers as a JSON object.
pub fn write_headers(headers: &Headers, out: &mut Vec<u8>) {
    out.push(b'{');
    for (at, (name, value)) in headers.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write_text(name.as_bytes(), out);
        out.push(b':');
        match value {
            Some(value) => write_text(value, out),
            None => out.extend_from_slice(b"null"),
        }
    }
    out.push(b'}');
}

/// The parts of a record, whoever owns them.
pub struct Parts<'a> {
    pub topic: &'a str,
    pub key: Option<&'a [u8]>,
    pub value: Option<&'a [u8]>,
    pub headers: &'a Headers,
    pub timestamp_millis: i64,
}

/// Appends a record as a JSON object without line breaks.
pub fn write_record(record: &Record<'_>, out: &mut Vec<u8>) {
    let Record { topic, key, value, headers, timestamp_millis, .. } = *record;
    write_parts(&Parts { topic, key, value, headers, timestamp_millis }, out);
}

pub fn write_parts(parts: &Parts<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"topic\":");
    write_text(parts.topic.as_bytes(), out);
    out.extend_from_slice(b",\"key\":");
    match parts.key {
        Some(key) => write_text(key, out),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"value\":");
    write_value(parts.value, out);
    out.extend_from_slice(b",\"headers\":");
    write_headers(parts.headers, out);
    let _ = write!(out, ",\"timestamp\":{}}}", parts.timestamp_millis);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(bytes: &[u8]) -> String {
        let mut out = Vec::new();
        write_value(Some(bytes), &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_stays_json_and_text_becomes_a_string() {
        assert_eq!(value(br#"{"a": 1}"#), r#"{"a": 1}"#);
        assert_eq!(value(b"{\n  \"a\": 1\r\n}"), "{   \"a\": 1  }", "on one line");
        assert_eq!(value(b"plain \"text\""), r#""plain \"text\"""#);
        assert_eq!(value(b"\x00\xff"), r#""AP8=""#);
        assert_eq!(value(b""), r#""""#);
    }

    #[test]
    fn a_record_is_one_line_that_can_be_read_back() {
        let mut headers = Headers::default();
        headers.push("id", Some(b"7"));
        headers.push("none", None);
        let mut out = Vec::new();
        let (key, value) = (Some(&b"k\n"[..]), Some(&b"{\"a\":\n1}"[..]));
        write_parts(&Parts { topic: "t", key, value, headers: &headers, timestamp_millis: 5 }, &mut out);
        assert!(!out.contains(&b'\n'));
        let read: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let expected = serde_json::json!({
            "topic": "t", "key": "k\n", "value": {"a": 1}, "headers": {"id": "7", "none": null}, "timestamp": 5
        });
        assert_eq!(read, expected);
    }
}
