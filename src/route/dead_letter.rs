//! What an undeliverable event looks like in the dead-letter place: its own key, value and headers as far as they
//! could be made out, and beside them why it is there and where it came from.

use crate::dead_letters::letter;
use crate::event::{Chunk, OutboxEvent};
use crate::route::{Origin, Record, Router};

impl Router {
    /// The dead letter of an event. `extra` headers come last.
    pub fn dead_letter<'a>(
        &'a mut self,
        chunk: &'a Chunk,
        event: &OutboxEvent,
        topic: &'a str,
        extra: &[(&str, &str)],
    ) -> Record<'a> {
        // Fills headers and topic as for a delivery; what cannot be made out is left as far as it came.
        let routed = self.route(chunk, event).map(|record| record.key.map(<[u8]>::to_vec));
        // The event's own time may be what the broker refuses.
        let timestamp_millis = chunk.commit(event).committed_at.as_millis();
        if routed.is_err() {
            self.headers.clear();
            for (name, origin) in &self.plan.headers {
                if let Origin::Slot(slot) = origin
                    && let Some(value) = chunk.field(event, *slot)
                {
                    self.headers.push(name, Some(value));
                }
            }
        }
        if !self.topic.is_empty() {
            self.headers.push(letter::TOPIC, Some(self.topic.as_bytes()));
        }
        let commit = chunk.commit(event).id;
        let position = commit.to_string();
        self.headers.push(letter::POSITION, Some(position.as_bytes()));
        for (name, value) in extra {
            self.headers.push(name, Some(value.as_bytes()));
        }
        let table = self.plan.table(event);
        let payload = chunk.field(event, self.plan.payload);
        let (key, value) = match routed {
            // As it would have been delivered, so that it can be, once the cause is removed.
            Ok(key) => {
                let value = self.plan.value(payload);
                let key = key.map(|key| {
                    self.key = key;
                    self.key.as_slice()
                });
                (key, value)
            }
            Err(_) => {
                let key = match &self.plan.key {
                    Some(Origin::Slot(slot)) => chunk.field(event, *slot),
                    _ => None,
                };
                (key, chunk.defect(event).and_then(|(_, content)| content).or(payload))
            }
        };
        let (headers, row) = (&self.headers, chunk.row(event));
        Record { topic, partition: None, key, value, headers, timestamp_millis, commit, table, row }
    }

    /// The event's key as far as it is a column of its own, whatever else is wrong with the event.
    pub fn key_column<'a>(&self, chunk: &'a Chunk, event: &OutboxEvent) -> Option<&'a [u8]> {
        match &self.plan.key {
            Some(Origin::Slot(slot)) => chunk.field(event, *slot),
            _ => None,
        }
    }

    /// Names an event for people: its id, where the layout has one.
    pub fn describe(&self, chunk: &Chunk, event: &OutboxEvent) -> String {
        let id = self.plan.headers.first().and_then(|(_, origin)| match origin {
            Origin::Slot(slot) => chunk.field(event, *slot),
            Origin::Pointer(_) => None,
        });
        id.map_or_else(|| "without an id".to_owned(), |id| format!("with id {}", String::from_utf8_lossy(id)))
    }
}
