//! Record → message: routing key, properties and headers.

use lapin::BasicProperties;
use lapin::message::BasicReturnMessage;
use lapin::types::{AMQPValue, ByteArray, FieldTable, LongString, ShortString};

use crate::sink::lanes::Parcel;

/// Longest short string of AMQP, which routing keys, ids, types and names of headers are.
const SHORT: usize = 255;
/// What a frame of a message's properties has beside headers and short strings: frame, class, size, flags and the rest.
const FRAME_OVERHEAD: usize = 64;
const PERSISTENT: u8 = 2;
/// The header that has the record's key.
const KEY: &str = "outboxd.key";

pub struct Message<'a> {
    pub routing_key: &'a str,
    pub body: &'a [u8],
    pub properties: BasicProperties,
}

impl<'a> Message<'a> {
    /// Says why not, if AMQP has no room for it. A frame that is too large would end the connection, and every lane's
    /// batch with it.
    pub fn of(parcel: &'a Parcel, frame_max: usize) -> Result<Self, String> {
        let routing_key = routing_key(parcel);
        if routing_key.len() > SHORT {
            return Err(format!("its routing key has {} bytes, and AMQP allows {SHORT}", routing_key.len()));
        }
        let mut headers = FieldTable::default();
        let mut size = FRAME_OVERHEAD + 3 * SHORT;
        let mut add = |name: &str, value: Option<&[u8]>| {
            size += name.len() + value.map_or(0, <[u8]>::len) + 6;
            let long = |_| format!("the name of its header `{name}` has {} bytes, and AMQP allows {SHORT}", name.len());
            headers.insert(ShortString::try_new(name).map_err(long)?, field(value));
            Ok::<_, String>(())
        };
        for (name, value) in parcel.headers.iter() {
            add(name, value)?;
        }
        if let Some(key) = &parcel.key {
            add(KEY, Some(key))?;
        }
        if size > frame_max {
            return Err(format!("its headers have about {size} bytes, and a frame of RabbitMQ has {frame_max}"));
        }
        let body = parcel.value.as_deref().unwrap_or_default();
        let mut properties = BasicProperties::default()
            .with_delivery_mode(PERSISTENT)
            .with_app_id("outboxd".into())
            .with_content_type(content_type(body).into())
            .with_headers(headers);
        if let Some(id) = property(parcel, &["id", "event_id"]) {
            properties = properties.with_message_id(id);
        }
        if let Some(kind) = property(parcel, &["event_type", "type"]) {
            properties = properties.with_type(kind);
        }
        if let Ok(millis) = u64::try_from(parcel.timestamp_millis) {
            properties = properties.with_timestamp(millis / 1000);
        }
        Ok(Message { routing_key, body, properties })
    }

    fn is(&self, returned: &BasicReturnMessage) -> bool {
        self.routing_key == returned.routing_key.as_str()
            && self.properties.message_id() == returned.properties.message_id()
            && self.body == returned.data
    }
}

/// The topic that routing gave it, or else the event's type.
pub fn routing_key(parcel: &Parcel) -> &str {
    if !parcel.topic.is_empty() {
        return &parcel.topic;
    }
    text(parcel, &["event_type", "type"]).unwrap_or_default()
}

/// Which of the messages were returned. Messages that cannot be told apart have the same fate; all have it, if one came
/// back that is none of them.
pub fn found(messages: &[Message<'_>], returned: &[BasicReturnMessage]) -> Vec<usize> {
    if !returned.iter().all(|returned| messages.iter().any(|message| message.is(returned))) {
        return (0..messages.len()).collect();
    }
    let was_returned = |message: &Message<'_>| returned.iter().any(|returned| message.is(returned));
    let places = messages.iter().enumerate().filter(|(_, message)| was_returned(message));
    places.map(|(at, _)| at).collect()
}

/// The first of these headers that is a text.
fn text<'a>(parcel: &'a Parcel, names: &[&str]) -> Option<&'a str> {
    let value = parcel.headers.iter().find(|(name, value)| names.contains(name) && value.is_some())?.1?;
    std::str::from_utf8(value).ok()
}

/// As a property; what is too long for one is still a header.
fn property(parcel: &Parcel, names: &[&str]) -> Option<ShortString> {
    ShortString::try_new(text(parcel, names)?).ok()
}

fn field(value: Option<&[u8]>) -> AMQPValue {
    match value.map(|bytes| (bytes, std::str::from_utf8(bytes))) {
        None => AMQPValue::Void,
        Some((_, Ok(text))) => AMQPValue::LongString(LongString::from(text)),
        Some((bytes, Err(_))) => AMQPValue::ByteArray(ByteArray::from(bytes)),
    }
}

/// By its two ends: whoever reads the message reads the middle.
fn content_type(body: &[u8]) -> &'static str {
    let body = body.trim_ascii();
    let is_json = match (body.first(), body.last()) {
        (Some(b'{'), Some(b'}')) | (Some(b'['), Some(b']')) => true,
        (Some(b'"'), Some(b'"')) => body.len() > 1,
        // A number or a word, which are short.
        (Some(b'-' | b'0'..=b'9' | b't' | b'f' | b'n'), _) if body.len() <= 64 => {
            serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok()
        }
        _ => false,
    };
    if is_json { "application/json" } else { "application/octet-stream" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ack_window::Receipt;
    use crate::event::CommitId;
    use crate::position::Lsn;
    use crate::route::Headers;

    fn parcel(topic: &str, headers: &[(&str, Option<&[u8]>)]) -> Parcel {
        let mut kept = Headers::default();
        for (name, value) in headers {
            kept.push(name, *value);
        }
        Parcel {
            receipt: Receipt(0),
            topic: topic.into(),
            key: Some(b"key".as_slice().into()),
            value: Some(b"{}".as_slice().into()),
            headers: kept,
            timestamp_millis: 1_700_000_000_999,
            commit: CommitId::Postgres(Lsn(1)),
            table: None,
            row: None,
        }
    }

    #[test]
    fn a_record_becomes_a_persistent_message_with_its_id_type_time_key_and_headers() {
        let parcel = parcel(
            "orders",
            &[("id", Some(b"7")), ("event_type", Some(b"Made")), ("raw", Some(&[0xff])), ("none", None)],
        );
        let message = Message::of(&parcel, 131_072).unwrap();
        let properties = &message.properties;
        assert_eq!((message.routing_key, message.body), ("orders", b"{}".as_slice()));
        assert_eq!(properties.delivery_mode(), &Some(2));
        assert_eq!(properties.message_id().as_ref().map(ShortString::as_str), Some("7"));
        assert_eq!(properties.kind().as_ref().map(ShortString::as_str), Some("Made"));
        assert_eq!(properties.timestamp(), &Some(1_700_000_000));
        let headers = properties.headers().as_ref().unwrap().inner();
        assert_eq!(headers[KEY], AMQPValue::LongString("key".into()));
        assert_eq!(headers["raw"], AMQPValue::ByteArray(vec![0xff].into()));
        assert_eq!(headers["none"], AMQPValue::Void);
    }

    #[test]
    fn without_a_topic_the_type_is_the_routing_key() {
        let untyped = parcel("", &[("id", Some(b"7"))]);
        assert_eq!(Message::of(&untyped, 131_072).unwrap().routing_key, "");
        let typed = parcel("", &[("id", Some(b"7")), ("type", Some(b"Made"))]);
        assert_eq!(Message::of(&typed, 131_072).unwrap().routing_key, "Made");
    }

    #[test]
    fn what_amqp_has_no_room_for_is_refused_before_it_is_sent() {
        let long = "x".repeat(256);
        for (parcel, word) in [
            (parcel(&long, &[]), "routing key"),
            (parcel("t", &[(&long, Some(b"1"))]), "name of its header"),
            (parcel("t", &[("big", Some(&[b'x'; 5000]))]), "a frame of RabbitMQ"),
        ] {
            let why = Message::of(&parcel, 4096).err().unwrap();
            assert!(why.contains(word), "{why}");
        }
        // Only the header keeps an id that is no property.
        let parcel = parcel("t", &[("id", Some(long.as_bytes()))]);
        assert_eq!(Message::of(&parcel, 4096).unwrap().properties.message_id(), &None);
    }

    #[test]
    fn json_is_told_by_its_ends() {
        for body in ["{}", " [1] ", "\"a\"", "12", "-1.5", "true", "null"] {
            assert_eq!(content_type(body.as_bytes()), "application/json", "{body}");
        }
        for body in ["", "\"", "text", "12a", "<a/>", "nothing"] {
            assert_eq!(content_type(body.as_bytes()), "application/octet-stream", "{body}");
        }
    }
}
