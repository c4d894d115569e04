//! Event → record: topic, key, value, headers, partition and timestamp, as the layout and the user's overrides say.
//!
//! A [`Plan`] is compiled once; it lists the columns it needs as a [`Projection`], so that sources decode nothing
//! else, and routing an event is a walk over slots without a look-up by name.

mod dead_letter;
pub mod layout;
mod plans;
pub mod polling;
pub mod selection;
pub mod template;

use thiserror::Error;

use crate::config::{Naming, RouteSettings, TableName};
use crate::event::{Chunk, CommitId, OutboxEvent, Projection, Want};
use layout::{Layout, Need, Role};
pub use plans::Plans;
use template::Part;

/// Longest name a Kafka topic can have.
const MAX_TOPIC: usize = 249;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    #[error("there is no layout `{0}`; there are: {known}", known = known_layouts())]
    UnknownLayout(String),
    #[error("`{0}` is no role of a column; there are: {known}", known = known_roles())]
    UnknownRole(String),
    #[error("the payload itself cannot be a pointer into the payload")]
    PayloadPointer,
    #[error("topic template: {0}")]
    Template(#[from] template::TemplateError),
    #[error("the layout `{0}` has no `{1}`; name its column: --column {1}=COLUMN")]
    NoColumn(&'static str, &'static str),
    #[error("`{0}` is not a version; it looks like 2 or >=2")]
    BadVersion(String),
    #[error("the topic `{0}` is not a name Kafka takes: 1 to 249 letters, digits, dots, dashes and underscores")]
    TopicName(String),
}

fn known_layouts() -> String {
    layout::LAYOUTS.iter().map(|layout| layout.name).collect::<Vec<_>>().join(", ")
}

fn known_roles() -> String {
    Role::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// Where a value comes from.
#[derive(Clone, Debug)]
enum Origin {
    Slot(usize),
    /// A JSON pointer into the payload.
    Pointer(String),
}

#[derive(Debug)]
enum TopicPart {
    Text(String),
    /// The table's name, with dashes.
    Table,
    Value {
        name: String,
        origin: Origin,
    },
}

/// Which column plays which role: the user's choice, else the layout's.
struct Columns<'a> {
    layout: &'static Layout,
    options: &'a RouteSettings,
}

impl<'a> Columns<'a> {
    fn of(options: &'a RouteSettings) -> Result<Self, PlanError> {
        let layout = Layout::named(&options.layout).ok_or_else(|| PlanError::UnknownLayout(options.layout.clone()))?;
        for (role, _) in &options.columns {
            Role::named(role).ok_or_else(|| PlanError::UnknownRole(role.clone()))?;
        }
        Ok(Columns { layout, options })
    }

    fn of_role(&self, role: Role) -> Option<(&'a str, Need)> {
        let chosen = self.options.columns.iter().rev().find(|(name, _)| Role::named(name) == Some(role));
        match chosen {
            Some((_, column)) => Some((column.as_str(), Need::Required)),
            None => self.layout.column(role),
        }
    }

    fn origin(projection: &mut Projection, column: &str, need: Need) -> Origin {
        match column.starts_with('/') {
            true => Origin::Pointer(column.to_owned()),
            false => Origin::Slot(projection.slot(column, Want::Text, need == Need::Required)),
        }
    }

    fn origin_of(&self, projection: &mut Projection, role: Role) -> Option<Origin> {
        self.of_role(role).map(|(column, need)| Self::origin(projection, column, need))
    }
}

/// A table, by the names it goes by.
#[derive(Debug)]
struct Table {
    /// With its schema, if one was named.
    name: String,
    /// Without, and as topics are written.
    dashed: String,
}

impl From<&TableName> for Table {
    fn from(table: &TableName) -> Self {
        Table { name: table.to_string(), dashed: table.name.replace('_', "-") }
    }
}

/// A compiled routing plan.
#[derive(Debug)]
pub struct Plan {
    topic: Vec<TopicPart>,
    key: Option<Origin>,
    payload: usize,
    timestamp: Option<usize>,
    partition: Option<Origin>,
    headers: Vec<(String, Origin)>,
    spread: Option<Origin>,
    tombstone: bool,
    naming: Naming,
    /// Where the type is, and the path of each.
    paths: Option<(Origin, Vec<(String, String)>)>,
    tables: Vec<Table>,
    /// Where the tags are that become headers, and whose value becomes the key.
    tags: Option<(Origin, Vec<String>)>,
}

impl Plan {
    /// Compiles what the user said; the columns it needs are added to the projection.
    pub fn compile(options: &RouteSettings, projection: &mut Projection) -> Result<Plan, PlanError> {
        let columns = Columns::of(options)?;
        let layout = columns.layout;
        let origin = Columns::origin;
        let origin_of = |projection: &mut Projection, role: Role| columns.origin_of(projection, role);
        let column_of = |role: Role| columns.of_role(role);

        let payload = match origin_of(projection, Role::Payload) {
            Some(Origin::Slot(slot)) => slot,
            _ => return Err(PlanError::PayloadPointer),
        };
        let key = origin_of(projection, Role::Key);
        let partition = origin_of(projection, Role::Partition);
        let spread = origin_of(projection, Role::Headers);
        let mut headers = Vec::new();
        for (name, role) in layout.headers {
            if let Some(origin) = origin_of(projection, *role) {
                headers.push(((*name).to_owned(), origin));
            }
        }
        for name in layout.column_headers {
            headers.push(((*name).to_owned(), origin(projection, name, Need::Optional)));
        }
        if let Some(origin) =
            origin_of(projection, Role::Version).filter(|_| !layout.headers.iter().any(|h| h.1 == Role::Version))
        {
            headers.push(("version".to_owned(), origin));
        }

        let written = match (options.topic.as_deref().unwrap_or(layout.topic), options.naming) {
            ("", Naming::Free) => Vec::new(),
            (template, _) => template::parse(template)?,
        };
        let mut topic = Vec::new();
        for part in written {
            topic.push(match part {
                Part::Text(text) => TopicPart::Text(text),
                Part::Name(name) if name == "table" => TopicPart::Table,
                Part::Name(name) if name == "publisher" => TopicPart::Text(options.publisher.clone()),
                Part::Name(name) => {
                    let by_role = Role::named(&name).and_then(|role| origin_of(projection, role));
                    let origin = by_role.unwrap_or_else(|| origin(projection, &name, Need::Required));
                    TopicPart::Value { name, origin }
                }
            });
        }
        if let ([TopicPart::Text(name)], Naming::Kafka) = (topic.as_slice(), options.naming) {
            check_topic(name).map_err(|_| PlanError::TopicName(name.clone()))?;
        }
        for (name, column) in &options.headers {
            headers.push((name.clone(), origin(projection, column, Need::Required)));
        }
        let paths = match options.paths.is_empty() {
            true => None,
            false => {
                let kind = origin_of(projection, Role::Type);
                Some((kind.ok_or(PlanError::NoColumn(layout.name, "type"))?, options.paths.clone()))
            }
        };
        let tags = match layout.keyed_by_tags {
            true => origin_of(projection, Role::Tags).map(|origin| (origin, options.key_tags.clone())),
            false => None,
        };
        let timestamp = column_of(Role::Timestamp)
            .map(|(column, need)| projection.slot(column, Want::Time, need == Need::Required));
        Ok(Plan {
            topic,
            key,
            payload,
            timestamp,
            partition,
            headers,
            spread,
            tombstone: options.tombstone_on_null,
            naming: options.naming,
            paths,
            tables: options.tables.iter().map(Table::from).collect(),
            tags,
        })
    }

    /// The topic, when it is the same for every event.
    pub fn fixed_topic(&self) -> Option<&str> {
        match self.topic.as_slice() {
            [TopicPart::Text(name)] => Some(name),
            _ => None,
        }
    }
}

impl Plan {
    /// The record's value; `None` is a tombstone.
    fn value<'a>(&self, payload: Option<&'a [u8]>) -> Option<&'a [u8]> {
        let blank = || payload.is_none_or(|bytes| bytes.trim_ascii().is_empty());
        if self.tombstone && blank() { None } else { Some(payload.unwrap_or(b"null")) }
    }

    /// The table that it came from, where there are several.
    fn table(&self, event: &OutboxEvent) -> Option<&str> {
        self.tables.get(event.table as usize).filter(|_| self.tables.len() > 1).map(|table| table.name.as_str())
    }
}

/// A name that Kafka will not take.
pub(crate) fn check_topic(topic: &str) -> Result<(), ()> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let good =
        !topic.is_empty() && topic.len() <= MAX_TOPIC && topic != "." && topic != ".." && topic.bytes().all(legal);
    if good { Ok(()) } else { Err(()) }
}

/// Why one event cannot become a record.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Unroutable {
    #[error("it cannot be decoded: {0}")]
    Undecodable(String),
    #[error("its topic is null: `{0}` has no value")]
    NullTopic(String),
    #[error("its topic `{0}` is not a name Kafka takes")]
    BadTopic(String),
    #[error("there is no path for its type `{0}`")]
    NoPath(String),
    #[error("its `{0}` is not UTF-8")]
    NotUtf8(&'static str),
    #[error("its headers are not a JSON object: {0}")]
    BadHeaders(String),
    #[error("its payload is not JSON, so `{0}` points nowhere: {1}")]
    NotJson(String, String),
    #[error("its partition `{0}` is not a number from 0 to 2147483647")]
    BadPartition(String),
}

/// A record's headers, in one buffer.
#[derive(Clone, Debug, Default)]
pub struct Headers {
    bytes: Vec<u8>,
    /// Ends of the name and of the value; `None` is a null value.
    ends: Vec<(u32, Option<u32>)>,
}

impl Headers {
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of all names and values.
    pub fn weight(&self) -> usize {
        self.bytes.len()
    }

    pub fn push(&mut self, name: &str, value: Option<&[u8]>) {
        self.bytes.extend_from_slice(name.as_bytes());
        let name_end = self.bytes.len() as u32;
        let value_end = value.map(|value| {
            self.bytes.extend_from_slice(value);
            self.bytes.len() as u32
        });
        self.ends.push((name_end, value_end));
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        let mut start = 0;
        self.ends.iter().map(move |(name_end, value_end)| {
            let name = &self.bytes[start..*name_end as usize];
            let value = value_end.map(|end| &self.bytes[*name_end as usize..end as usize]);
            start = value_end.unwrap_or(*name_end) as usize;
            // Names are pushed as `&str`.
            (std::str::from_utf8(name).unwrap_or_default(), value)
        })
    }
}

/// What goes to the sink; borrowed, valid until the next event is routed.
#[derive(Debug)]
pub struct Record<'a> {
    pub topic: &'a str,
    pub partition: Option<i32>,
    pub key: Option<&'a [u8]>,
    /// `None` is a tombstone.
    pub value: Option<&'a [u8]>,
    pub headers: &'a Headers,
    pub timestamp_millis: i64,
    /// Where it came from, for messages and dead letters.
    pub commit: CommitId,
    /// The table it came from, with its schema if one was named, where there are several.
    pub table: Option<&'a str>,
    /// What the poller calls its row.
    pub row: Option<u64>,
}

/// Applies a plan; keeps the buffers that records borrow.
pub struct Router {
    plan: Plan,
    topic: String,
    headers: Headers,
    key: Vec<u8>,
}

impl Router {
    pub fn new(plan: Plan) -> Self {
        Router { plan, topic: String::new(), headers: Headers::default(), key: Vec::new() }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn route<'a>(&'a mut self, chunk: &'a Chunk, event: &OutboxEvent) -> Result<Record<'a>, Unroutable> {
        let plan = &self.plan;
        self.topic.clear();
        self.headers.clear();
        if let Some((why, _)) = chunk.defect(event) {
            return Err(Unroutable::Undecodable(why.to_owned()));
        }
        let payload = chunk.field(event, plan.payload);
        let mut pointers = PayloadPointers { payload, parsed: None };

        for part in &plan.topic {
            match part {
                TopicPart::Text(text) => self.topic.push_str(text),
                TopicPart::Table => {
                    self.topic.push_str(plan.tables.get(event.table as usize).map_or("", |table| &table.dashed));
                }
                TopicPart::Value { name, origin } => {
                    let value = match origin {
                        Origin::Slot(slot) => chunk.field(event, *slot),
                        Origin::Pointer(pointer) => pointers.find(pointer, &mut self.key)?,
                    };
                    let value = match (value, plan.naming) {
                        (None, Naming::Free) => continue,
                        (value, _) => value.ok_or_else(|| Unroutable::NullTopic(name.clone()))?,
                    };
                    self.topic.push_str(std::str::from_utf8(value).map_err(|_| Unroutable::NotUtf8("topic"))?);
                }
            }
        }
        if plan.naming == Naming::Kafka {
            check_topic(&self.topic).map_err(|()| Unroutable::BadTopic(self.topic.clone()))?;
        }
        if let Some((origin, paths)) = &plan.paths {
            let kind = match origin {
                Origin::Slot(slot) => chunk.field(event, *slot),
                Origin::Pointer(pointer) => pointers.find(pointer, &mut self.key)?,
            };
            let path = paths.iter().find(|(of, _)| kind == Some(of.as_bytes())).map(|(_, path)| path);
            let unknown = || Unroutable::NoPath(String::from_utf8_lossy(kind.unwrap_or_default()).into_owned());
            self.topic.push_str(path.ok_or_else(unknown)?);
        }

        for (name, origin) in &plan.headers {
            let value = match origin {
                Origin::Slot(slot) => chunk.field(event, *slot),
                Origin::Pointer(pointer) => pointers.find(pointer, &mut self.key)?,
            };
            if let Some(value) = value {
                self.headers.push(name, Some(value));
            }
        }
        match &plan.spread {
            Some(Origin::Slot(slot)) => {
                if let Some(json) = chunk.field(event, *slot) {
                    spread_headers(json, &mut self.headers)?;
                }
            }
            Some(Origin::Pointer(pointer)) => {
                if let Some(json) = pointers.find(pointer, &mut self.key)? {
                    spread_headers(json, &mut self.headers)?;
                }
            }
            None => {}
        }

        let partition = match &plan.partition {
            Some(Origin::Slot(slot)) => chunk.field(event, *slot).map(parse_partition).transpose()?,
            Some(Origin::Pointer(pointer)) => {
                pointers.find(pointer, &mut self.key)?.map(parse_partition).transpose()?
            }
            None => None,
        };
        let timestamp_millis = plan
            .timestamp
            .and_then(|slot| chunk.field(event, slot))
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(chunk.commit(event).committed_at, |bytes| crate::event::Micros(i64::from_be_bytes(bytes)))
            .as_millis();
        // Last, because the key may lie in the buffer that pointers write to.
        let key = match (&plan.key, &plan.tags) {
            (Some(Origin::Slot(slot)), _) => chunk.field(event, *slot),
            (Some(Origin::Pointer(pointer)), _) => pointers.find(pointer, &mut self.key)?,
            (None, Some((origin, names))) => {
                let tags = match origin {
                    Origin::Slot(slot) => chunk.field(event, *slot),
                    Origin::Pointer(pointer) => pointers.find(pointer, &mut self.key)?,
                };
                let tags = tags.map(selection::tags_in).unwrap_or_default();
                for tag in &tags {
                    match tag.split_once('=') {
                        Some((name, value)) => self.headers.push(name, Some(value.as_bytes())),
                        None => self.headers.push(tag, None),
                    }
                }
                let value = names.iter().find_map(|name| selection::value_of(&tags, name).map(str::to_owned));
                value.map(|value| {
                    self.key = value.into_bytes();
                    self.key.as_slice()
                })
            }
            (None, None) => None,
        };
        let commit = chunk.commit(event).id;
        let (value, table) = (plan.value(payload), plan.table(event));
        Ok(Record {
            topic: &self.topic,
            partition,
            key,
            value,
            headers: &self.headers,
            timestamp_millis,
            commit,
            table,
            row: chunk.row(event),
        })
    }
}

fn parse_partition(text: &[u8]) -> Result<i32, Unroutable> {
    let parsed = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).filter(|number| *number >= 0);
    parsed.ok_or_else(|| Unroutable::BadPartition(String::from_utf8_lossy(text).into_owned()))
}

/// The payload as JSON, parsed when the first pointer asks for it.
struct PayloadPointers<'a> {
    payload: Option<&'a [u8]>,
    parsed: Option<serde_json::Value>,
}

impl PayloadPointers<'_> {
    /// A string's text, or any other value as JSON; `None` when it is null or not there.
    fn find<'b>(&mut self, pointer: &str, buffer: &'b mut Vec<u8>) -> Result<Option<&'b [u8]>, Unroutable> {
        if self.parsed.is_none() {
            let Some(payload) = self.payload else { return Ok(None) };
            let parsed = serde_json::from_slice(payload)
                .map_err(|error| Unroutable::NotJson(pointer.to_owned(), error.to_string()))?;
            self.parsed = Some(parsed);
        }
        buffer.clear();
        match self.parsed.as_ref().and_then(|json| json.pointer(pointer)) {
            None | Some(serde_json::Value::Null) => return Ok(None),
            Some(serde_json::Value::String(text)) => buffer.extend_from_slice(text.as_bytes()),
            Some(other) => buffer.extend_from_slice(other.to_string().as_bytes()),
        }
        Ok(Some(buffer))
    }
}

/// Each member of a JSON object becomes a header: a string as its text, null as a null, the rest as JSON.
fn spread_headers(json: &[u8], headers: &mut Headers) -> Result<(), Unroutable> {
    struct Spread<'h>(&'h mut Headers);

    impl<'de> serde::de::Visitor<'de> for Spread<'_> {
        type Value = ();

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a JSON object")
        }

        /// The JSON value null: no headers.
        fn visit_unit<E>(self) -> Result<(), E> {
            Ok(())
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
            use std::borrow::Cow;
            while let Some((name, value)) = members.next_entry::<Cow<'de, str>, &'de serde_json::value::RawValue>()? {
                let text = value.get();
                if text == "null" {
                    self.0.push(&name, None);
                } else if text.starts_with('"') {
                    let text: Cow<'_, str> = serde_json::from_str(text).map_err(serde::de::Error::custom)?;
                    self.0.push(&name, Some(text.as_bytes()));
                } else {
                    self.0.push(&name, Some(text.as_bytes()));
                }
            }
            Ok(())
        }
    }

    let bad = |error: serde_json::Error| Unroutable::BadHeaders(error.to_string());
    let mut input = serde_json::Deserializer::from_slice(json);
    serde::Deserializer::deserialize_any(&mut input, Spread(headers)).map_err(bad)?;
    input.end().map_err(bad)
}

#[cfg(test)]
mod tests;
