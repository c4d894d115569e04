//! Outboxes without a table: the JSON content of `pg_logical_emit_message(true, prefix, json)` takes a row's place,
//! its members the columns'.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::value::RawValue;

use crate::event::{Chunk, Field, Projection, Want};
use crate::source::postgres::values::{Rendered, oid, render_text};

/// Sets the newest event's fields from the message's content.
pub fn bind(content: &[u8], projection: &Projection, chunk: &mut Chunk) -> Result<(), String> {
    let members: HashMap<Cow<'_, str>, &RawValue> =
        serde_json::from_slice(content).map_err(|error| format!("its content is not a JSON object: {error}"))?;
    for (slot, name, want) in projection.columns() {
        let Some(value) = members.get(name) else { continue };
        let text = value.get();
        let value: Cow<'_, str> = match text.as_bytes()[0] {
            b'n' => {
                chunk.set_field(slot, Field::Null);
                continue;
            }
            b'"' => {
                serde_json::from_str(text).map_err(|error| format!("its `{name}` is not a JSON string: {error}"))?
            }
            _ => Cow::Borrowed(text),
        };
        let mut bad = false;
        chunk.render_field(slot, |out| match render_text(oid::TEXT, want, value.as_bytes(), out) {
            Ok(Rendered::Borrowed(bytes)) => out.extend_from_slice(bytes),
            Ok(Rendered::Written) => {}
            Err(_) => bad = true,
        });
        if bad && want == Want::Time {
            // A timestamp that cannot be read is none: the commit time stands in.
            chunk.set_field(slot, Field::Null);
        }
    }
    let missing = projection.required().find(|name| !members.contains_key(*name));
    missing.map_or(Ok(()), |name| Err(format!("its content has no `{name}`")))
}
