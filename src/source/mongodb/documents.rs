//! Outbox documents as fields of a chunk: the wanted fields of a document, found while walking over its bytes once.
//!
//! Texts and binaries stay where they lie in the server's reply; everything else is written anew.

use mongodb::bson::raw::cstr;
use mongodb::bson::spec::{BinarySubtype, ElementType};
use mongodb::bson::{RawBsonRef, RawDocument, RawDocumentBuf};

use super::extended_json::{self, Unwritable};
use crate::config::ExtendedJson;
use crate::event::{Chunk, Field, Projection, Want};

/// Which fields are wanted, and how they are written.
pub struct Documents {
    columns: Vec<(String, usize, Want)>,
    form: ExtendedJson,
}

impl Documents {
    pub fn new(projection: &Projection, form: ExtendedJson) -> Self {
        let columns = projection.columns().map(|(slot, name, want)| (name.to_owned(), slot, want)).collect();
        Documents { columns, form }
    }

    /// Makes an event of the document, which lies in `reply` or else is copied. One that cannot be read becomes a
    /// defective event.
    pub fn add(&self, document: &RawDocument, table: u32, reply: Option<&[u8]>, chunk: &mut Chunk) {
        chunk.push_event(table);
        if let Err(why) = self.set_fields(document, reply, chunk) {
            let content = reply.map_or(Field::Null, |reply| Field::span(document.as_bytes(), reply));
            chunk.mark_defective(why.to_string(), content);
        }
    }

    fn set_fields(&self, document: &RawDocument, reply: Option<&[u8]>, chunk: &mut Chunk) -> Result<(), Unwritable> {
        for element in document.iter_elements() {
            let element = element?;
            let name = element.key().as_str();
            for (column, slot, want) in &self.columns {
                if column == name {
                    self.set_field(element.element_type(), element.value()?, *slot, *want, reply, chunk)?;
                }
            }
        }
        Ok(())
    }

    fn set_field(
        &self,
        kind: ElementType,
        value: RawBsonRef<'_>,
        slot: usize,
        want: Want,
        reply: Option<&[u8]>,
        chunk: &mut Chunk,
    ) -> Result<(), Unwritable> {
        if kind == ElementType::Null || kind == ElementType::Undefined {
            chunk.set_field(slot, Field::Null);
            return Ok(());
        }
        match (want, value) {
            (Want::Text, RawBsonRef::String(text)) => set_bytes(text.as_bytes(), slot, reply, chunk),
            (Want::Text, RawBsonRef::Binary(binary)) if binary.subtype != BinarySubtype::Uuid => {
                set_bytes(binary.bytes, slot, reply, chunk);
            }
            (Want::Text, value) => {
                let mut written = Ok(());
                chunk.render_field(slot, |out| written = extended_json::write_plain(value, self.form, out));
                written?;
            }
            (Want::Key, value) => {
                let mut id = RawDocumentBuf::new();
                id.append(cstr!(""), value);
                chunk.render_field(slot, |out| out.extend_from_slice(id.as_bytes()));
            }
            (Want::Time, value) => {
                let micros = match value {
                    RawBsonRef::DateTime(date) => Some(date.timestamp_millis().saturating_mul(1000)),
                    RawBsonRef::Timestamp(at) => Some(i64::from(at.time) * 1_000_000),
                    // The commit's own time is taken instead.
                    _ => None,
                };
                match micros {
                    Some(micros) => chunk.render_field(slot, |out| out.extend_from_slice(&micros.to_be_bytes())),
                    None => chunk.set_field(slot, Field::Null),
                }
            }
        }
        Ok(())
    }
}

fn set_bytes(bytes: &[u8], slot: usize, reply: Option<&[u8]>, chunk: &mut Chunk) {
    match reply {
        Some(reply) => chunk.set_field(slot, Field::span(bytes, reply)),
        None => chunk.render_field(slot, |out| out.extend_from_slice(bytes)),
    }
}
