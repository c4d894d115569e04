//! Events as outboxd writes them to Kafka.

use rdkafka::message::{Headers as _, Message};

use super::{Entity, Event};

/// The headers that an event's id may be in: by the layout `entity`, the event store's, and all others.
const ID: [&str; 3] = ["id", "event_id", "position"];

/// A record that is no event of an outbox, or not one of outboxd's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the record {topic}[{partition}]@{offset} {what}")]
pub struct Unusable {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    what: &'static str,
}

impl<'a> Event<'a> {
    /// The event of a record. Its id is in the header `id`, `event_id` or `position`, whichever comes first here; its entity,
    /// if it has one, in `entity_type`, `entity_id` and `entity_version`, as the layout `entity` writes them.
    ///
    /// # Errors
    /// A record without an id, or whose version is no number. Passing over it would lose it: end, or keep it elsewhere.
    pub fn from_message(message: &'a impl Message) -> Result<Self, Unusable> {
        let unusable = |what| Unusable {
            topic: message.topic().to_owned(),
            partition: message.partition(),
            offset: message.offset(),
            what,
        };
        let header = |name: &str| {
            let headers = message.headers()?;
            headers.iter().find(|header| header.key == name).and_then(|header| header.value)
        };
        let text = |bytes: &'a [u8]| std::str::from_utf8(bytes).map_err(|_| unusable("has a header that is no text"));
        let id = ID.iter().find_map(|name| header(name)).filter(|id| !id.is_empty());
        let id = text(id.ok_or_else(|| unusable("has no id: no header `id`, `event_id` or `position`"))?)?;
        let entity = match (header("entity_id"), header("entity_version")) {
            (Some(entity), Some(version)) => {
                let version =
                    text(version)?.parse().map_err(|_| unusable("has an entity_version that is no number"))?;
                Some(Entity { kind: text(header("entity_type").unwrap_or_default())?, id: text(entity)?, version })
            }
            _ => None,
        };
        Ok(Event { id, entity })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdkafka::Timestamp;
    use rdkafka::message::{Header, OwnedHeaders, OwnedMessage};

    fn message(headers: &[(&str, &str)]) -> OwnedMessage {
        let insert = |all: OwnedHeaders, (key, value): &(&str, &str)| all.insert(Header { key, value: Some(*value) });
        let headers = headers.iter().fold(OwnedHeaders::new(), insert);
        OwnedMessage::new(None, None, "orders".to_owned(), Timestamp::NotAvailable, 3, 17, Some(headers))
    }

    #[test]
    fn an_event_is_in_the_headers_as_the_layouts_write_them() {
        let native = message(&[("trace", "t"), ("id", "7")]);
        assert_eq!(Event::from_message(&native), Ok(Event { id: "7", entity: None }));
        let entity = [("event_id", "e"), ("entity_type", "user"), ("entity_id", "u1"), ("entity_version", "12")];
        let (whole, versionless) = (message(&entity), message(&entity[..3]));
        let about = Entity { kind: "user", id: "u1", version: 12 };
        assert_eq!(Event::from_message(&whole), Ok(Event { id: "e", entity: Some(about) }));
        assert_eq!(Event::from_message(&versionless), Ok(Event { id: "e", entity: None }));
        let stored = message(&[("position", "4711")]);
        assert_eq!(Event::from_message(&stored).map(|event| event.id), Ok("4711"));
    }

    #[test]
    fn a_record_that_is_no_event_is_told_with_its_place() {
        for (headers, word) in [
            (&[][..], "has no id"),
            (&[("id", "")], "has no id"),
            (&[("id", "7"), ("entity_id", "u"), ("entity_version", "two")], "no number"),
        ] {
            let told = Event::from_message(&message(headers)).unwrap_err().to_string();
            assert!(told.starts_with("the record orders[3]@17") && told.contains(word), "{told}");
        }
        let bare = OwnedMessage::new(None, None, "orders".to_owned(), Timestamp::NotAvailable, 3, 17, None);
        assert!(Event::from_message(&bare).is_err());
    }
}
