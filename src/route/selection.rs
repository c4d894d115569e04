//! Which events a publisher wants: by table, by type, by version, by tags.

use std::borrow::Cow;

use super::layout::Role;
use super::{Columns, Origin, PayloadPointers, PlanError};
use crate::config::{RouteSettings, SelectionSettings};
use crate::event::{Chunk, OutboxEvent, Projection};

/// A compiled selection.
#[derive(Debug)]
pub struct Selection {
    /// By the table's number; empty for all.
    tables: Vec<bool>,
    kind: Option<(Origin, Vec<String>)>,
    version: Option<(Origin, Vec<Versions>)>,
    tags: Option<Tags>,
    payload: Option<Origin>,
}

#[derive(Debug)]
struct Tags {
    origin: Origin,
    required: Vec<String>,
    any_of: Vec<String>,
}

impl Tags {
    /// Whether a required tag cannot be in the value, by its bytes alone: with many publishers most of them want nothing
    /// of an event, and taking its tags apart for each would cost more than all the rest.
    fn are_plainly_missing(&self, value: &[u8]) -> bool {
        // Escapes may hide a tag, and an object has names and values apart.
        if value.contains(&b'\\') || (value.starts_with(b"{") && value.contains(&b':')) {
            return false;
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'=' | b'_' | b'-' | b'.');
        let missing = |tag: &String| {
            let tag = tag.as_bytes();
            // A number may be written in several ways, a name in one.
            let named = tag.first().is_some_and(u8::is_ascii_alphabetic);
            named && tag.iter().copied().all(plain) && !value.windows(tag.len()).any(|part| part == tag)
        };
        self.required.iter().any(missing)
    }
}

#[derive(Debug)]
enum Versions {
    Exactly(String),
    /// At least the first, at most the second.
    Between(i64, i64),
}

impl Versions {
    fn parse(text: &str) -> Result<Self, PlanError> {
        let number = |digits: &str| digits.trim().parse::<i64>().map_err(|_| PlanError::BadVersion(text.to_owned()));
        Ok(match text.trim() {
            "" => return Err(PlanError::BadVersion(text.to_owned())),
            other => {
                if let Some(least) = other.strip_prefix(">=") {
                    Versions::Between(number(least)?, i64::MAX)
                } else if let Some(most) = other.strip_prefix("<=") {
                    Versions::Between(i64::MIN, number(most)?)
                } else if let Some(below) = other.strip_prefix('>') {
                    Versions::Between(number(below)?.saturating_add(1), i64::MAX)
                } else if let Some(above) = other.strip_prefix('<') {
                    Versions::Between(i64::MIN, number(above)?.saturating_sub(1))
                } else {
                    Versions::Exactly(other.to_owned())
                }
            }
        })
    }

    fn contains(&self, version: &str) -> bool {
        match self {
            Versions::Exactly(wanted) => wanted == version,
            Versions::Between(least, most) => {
                version.parse::<i64>().is_ok_and(|version| (*least..=*most).contains(&version))
            }
        }
    }
}

impl Selection {
    /// `None` where everything is wanted.
    pub fn compile(
        wanted: &SelectionSettings,
        route: &RouteSettings,
        tables: &[crate::config::TableName],
        projection: &mut Projection,
    ) -> Result<Option<Selection>, PlanError> {
        if *wanted == SelectionSettings::default() {
            return Ok(None);
        }
        let columns = Columns::of(route)?;
        let mut column = |role: Role, name: &'static str| {
            columns.origin_of(projection, role).ok_or(PlanError::NoColumn(columns.layout.name, name))
        };
        let kind = match wanted.types.is_empty() {
            true => None,
            false => Some((column(Role::Type, "type")?, wanted.types.clone())),
        };
        let version = match wanted.versions.is_empty() {
            true => None,
            false => {
                let versions = wanted.versions.iter().map(|text| Versions::parse(text)).collect::<Result<_, _>>()?;
                Some((column(Role::Version, "version")?, versions))
            }
        };
        let tags = match wanted.required_tags.is_empty() && wanted.any_of_tags.is_empty() {
            true => None,
            false => Some(Tags {
                origin: column(Role::Tags, "tags")
                    .or_else(|lacking| column(Role::Headers, "headers").map_err(|_| lacking))?,
                required: wanted.required_tags.clone(),
                any_of: wanted.any_of_tags.clone(),
            }),
        };
        let picked = |table: &crate::config::TableName| wanted.tables.contains(table);
        let tables = match wanted.tables.is_empty() {
            true => Vec::new(),
            false => tables.iter().map(picked).collect(),
        };
        let payload = columns.origin_of(projection, Role::Payload);
        Ok(Some(Selection { tables, kind, version, tags, payload }))
    }

    /// Whether the event is wanted. One that cannot be decoded is, so that it is never passed over in silence.
    pub fn wants(&self, chunk: &Chunk, event: &OutboxEvent) -> bool {
        if !self.tables.is_empty() && !self.tables.get(event.table as usize).copied().unwrap_or(false) {
            return false;
        }
        if chunk.defect(event).is_some() {
            return true;
        }
        let payload = match &self.payload {
            Some(Origin::Slot(slot)) => chunk.field(event, *slot),
            _ => None,
        };
        let mut pointers = PayloadPointers { payload, parsed: None };
        let mut buffer = Vec::new();
        if let Some((origin, patterns)) = &self.kind {
            let kind = text_of(origin, chunk, event, &mut pointers, &mut buffer);
            if !kind.is_some_and(|kind| patterns.iter().any(|pattern| matches(pattern.as_bytes(), kind))) {
                return false;
            }
        }
        if let Some((origin, versions)) = &self.version {
            let version = text_of(origin, chunk, event, &mut pointers, &mut buffer);
            let version = version.and_then(|version| std::str::from_utf8(version).ok());
            if !version.is_some_and(|version| versions.iter().any(|wanted| wanted.contains(version))) {
                return false;
            }
        }
        match &self.tags {
            None => true,
            Some(tags) => {
                let found = text_of(&tags.origin, chunk, event, &mut pointers, &mut buffer);
                if found.is_some_and(|found| tags.are_plainly_missing(found)) {
                    return false;
                }
                let found = found.map(tags_in).unwrap_or_default();
                let has = |tag: &String| match tag.contains('=') {
                    true => found.iter().any(|found| found == tag),
                    // A name alone: whatever its value.
                    false => found.iter().any(|found| found == tag) || value_of(&found, tag).is_some(),
                };
                tags.required.iter().all(has) && (tags.any_of.is_empty() || tags.any_of.iter().any(has))
            }
        }
    }
}

fn text_of<'a>(
    origin: &Origin,
    chunk: &'a Chunk,
    event: &OutboxEvent,
    pointers: &mut PayloadPointers<'_>,
    buffer: &'a mut Vec<u8>,
) -> Option<&'a [u8]> {
    match origin {
        Origin::Slot(slot) => chunk.field(event, *slot),
        // A payload that is not JSON has nothing there.
        Origin::Pointer(pointer) => pointers.find(pointer, buffer).ok().flatten(),
    }
}

/// Whether the text is what the pattern says; `*` stands for any number of bytes.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let mut parts: Vec<_> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = (0..=rest.len().saturating_sub(part.len())).find(|at| rest[*at..].starts_with(part)) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The tags in a value: a JSON array of texts, a JSON object whose members are `name=value` (and `name`, when the value
/// is true), PostgreSQL's text array, or a list with commas.
pub(super) fn tags_in(value: &[u8]) -> Vec<Cow<'_, str>> {
    let Ok(text) = std::str::from_utf8(value) else { return Vec::new() };
    match serde_json::from_str::<serde_json::Value>(text) {
        Ok(serde_json::Value::Array(items)) => {
            items.into_iter().filter_map(|item| tag(&item).map(Cow::Owned)).collect()
        }
        Ok(serde_json::Value::Object(members)) => {
            let mut tags = Vec::new();
            for (name, value) in members {
                if value == serde_json::Value::Bool(true) {
                    tags.push(Cow::Owned(name.clone()));
                }
                if let Some(value) = tag(&value) {
                    tags.push(Cow::Owned(format!("{name}={value}")));
                }
            }
            tags
        }
        Ok(serde_json::Value::Null) => Vec::new(),
        Ok(other) => tag(&other).map(Cow::Owned).into_iter().collect(),
        Err(_) => match text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
            Some(items) => array_items(items),
            None => text.split(',').map(|item| Cow::Borrowed(item.trim())).collect(),
        },
    }
}

/// The value of the first tag with this name.
pub(super) fn value_of<'a>(tags: &'a [Cow<'_, str>], name: &str) -> Option<&'a str> {
    tags.iter().find_map(|tag| tag.strip_prefix(name)?.strip_prefix('='))
}

fn tag(value: &serde_json::Value) -> Option<String> {
    match value {
        serde_json::Value::Null => None,
        serde_json::Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// The items of PostgreSQL's `{a,"b c",NULL}` without its braces.
fn array_items(text: &str) -> Vec<Cow<'_, str>> {
    let mut items = Vec::new();
    let mut characters = text.chars().peekable();
    while characters.peek().is_some() {
        let quoted = characters.next_if_eq(&'"').is_some();
        let mut item = String::new();
        while let Some(character) = characters.next() {
            match character {
                '\\' => item.extend(characters.next()),
                '"' if quoted => {
                    characters.next_if_eq(&',');
                    break;
                }
                ',' if !quoted => break,
                other => item.push(other),
            }
        }
        if quoted || item != "NULL" {
            items.push(Cow::Owned(item));
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_pattern_stands_for_what_its_stars_leave_open() {
        for (pattern, text) in [
            ("*", ""),
            ("*", "a"),
            ("a", "a"),
            ("order.*", "order.created"),
            ("*.created", "order.created"),
            ("a*b*c", "aXbYbc"),
        ] {
            assert!(matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
        }
        for (pattern, text) in
            [("", "a"), ("a", "ab"), ("order.*", "orders"), ("a*a", "a"), ("a*b*c", "acb"), ("*bb", "b")]
        {
            assert!(!matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
        }
    }

    #[test]
    fn tags_are_in_arrays_objects_and_lists() {
        let tags = |text: &str| tags_in(text.as_bytes()).join(" | ");
        assert_eq!(tags(r#"["a", "k=v", 7, null]"#), "a | k=v | 7");
        assert_eq!(tags(r#"{"region": "eu", "vip": true, "n": 3, "x": null}"#), "n=3 | region=eu | vip | vip=true");
        assert_eq!(tags(r#"{a,"b c","d\"e",NULL,"NULL",k=v}"#), "a | b c | d\"e | NULL | k=v");
        assert_eq!((tags("{}").as_str(), tags("[]").as_str(), tags("null").as_str()), ("", "", ""));
        assert_eq!(tags("a, k=v"), "a | k=v");
        assert_eq!(tags("\"one\""), "one");
        assert!(tags_in(b"\xff").is_empty());
    }

    proptest! {
        /// The look at the bytes never denies a tag that is there, whatever form the tags have.
        #[test]
        fn a_tag_that_is_there_is_never_plainly_missing(
            tags in prop::collection::vec("[a-c=\"\\\\ ,7.]{1,4}", 1..4), wanted in "[a-c][a-c=7.]{0,3}", form in 0..4,
        ) {
            let value = match form {
                0 => serde_json::to_string(&tags).unwrap(),
                1 => {
                    let quote = |tag: &String| format!("\"{}\"", tag.replace('\\', "\\\\").replace('"', "\\\""));
                    format!("{{{}}}", tags.iter().map(quote).collect::<Vec<_>>().join(","))
                }
                2 => {
                    let members = tags.iter().map(|tag| (tag.clone(), serde_json::Value::Bool(true))).collect();
                    serde_json::Value::Object(members).to_string()
                }
                _ => tags.join(","),
            };
            let wants = Tags { origin: Origin::Slot(0), required: vec![wanted.clone()], any_of: Vec::new() };
            let found = tags_in(value.as_bytes());
            if found.iter().any(|tag| *tag == wanted) || value_of(&found, &wanted).is_some() {
                prop_assert!(!wants.are_plainly_missing(value.as_bytes()), "{wanted} in {value}");
            }
        }
    }

    #[test]
    fn a_version_is_a_text_or_a_range() {
        let has = |wanted: &str, version: &str| Versions::parse(wanted).unwrap().contains(version);
        assert!(
            has("2", "2")
                && has("v1", "v1")
                && has(">=2", "10")
                && has("<3", "-1")
                && has(">2", "3")
                && has("<=2", "2")
        );
        assert!(!has("2", "02") && !has(">=2", "1") && !has("<3", "3") && !has(">2", "2") && !has(">=2", "v3"));
        assert!(Versions::parse(">=x").is_err() && Versions::parse("").is_err());
    }

    proptest! {
        #[test]
        fn no_value_makes_the_tags_panic(value in prop::collection::vec(any::<u8>(), 0..60), text in "[\\[\\]{}\",\\\\a=]{0,20}") {
            tags_in(&value);
            tags_in(text.as_bytes());
        }

        /// A literal pattern is itself, whatever it is put between.
        #[test]
        fn a_pattern_finds_its_middle(before in "[ab]{0,5}", middle in "[ab]{0,5}", after in "[ab]{0,5}") {
            let text = format!("{before}{middle}{after}");
            let pattern = format!("*{middle}*");
            prop_assert!(matches(pattern.as_bytes(), text.as_bytes()));
            let pattern = format!("{before}*{after}");
            prop_assert!(matches(pattern.as_bytes(), text.as_bytes()));
        }
    }
}
