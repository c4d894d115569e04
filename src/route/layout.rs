//! Outbox layouts as data: which column plays which role, and how a row becomes a record.

use super::polling::{self, Polling};

/// What a column is to a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    Id,
    Key,
    Topic,
    Type,
    Payload,
    /// A JSON object whose members become headers.
    Headers,
    Timestamp,
    Version,
    /// The partition to write to, instead of the one the key hashes to.
    Partition,
    /// What events are selected by.
    Tags,
    /// When a consumer had the record. No part of it: whoever confirms receipts writes it.
    ReceivedAt,
    /// When it was delivered; null before.
    Published,
}

impl Role {
    pub const ALL: [(&'static str, Role); 12] = [
        ("id", Role::Id),
        ("key", Role::Key),
        ("topic", Role::Topic),
        ("type", Role::Type),
        ("payload", Role::Payload),
        ("headers", Role::Headers),
        ("timestamp", Role::Timestamp),
        ("version", Role::Version),
        ("partition", Role::Partition),
        ("tags", Role::Tags),
        ("received_at", Role::ReceivedAt),
        ("published", Role::Published),
    ];

    pub fn named(name: &str) -> Option<Role> {
        Role::ALL.iter().find(|(known, _)| *known == name).map(|(_, role)| *role)
    }
}

/// Whether a table may do without the column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Required,
    Optional,
}

/// A kind of database; MariaDB is MySQL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Postgres,
    MySql,
    Mongo,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Postgres => "PostgreSQL",
            Kind::MySql => "MySQL and MariaDB",
            Kind::Mongo => "MongoDB",
        }
    }
}

const EVERYWHERE: &[Kind] = &[Kind::Postgres, Kind::MySql, Kind::Mongo];

/// One outbox table layout.
#[derive(Debug)]
pub struct Layout {
    pub name: &'static str,
    pub databases: &'static [Kind],
    /// The tables it reads unless others are named.
    pub tables: &'static [&'static str],
    pub columns: &'static [(Role, &'static str, Need)],
    /// Template of the topic; roles and columns in braces.
    pub topic: &'static str,
    /// Headers of every record, from roles; a null value or an absent column gives none.
    pub headers: &'static [(&'static str, Role)],
    /// Headers from columns that play no other role.
    pub column_headers: &'static [&'static str],
    /// Event types, and the path that an HTTP sink sends them to.
    pub paths: &'static [(&'static str, &'static str)],
    /// Where RabbitMQ has its records.
    pub queue: &'static Queue,
    /// The tags become headers, and the value of the one that a publisher selects by becomes the key.
    pub keyed_by_tags: bool,
    /// How its tables are polled by their status.
    pub polling: Option<&'static Polling>,
}

/// A layout's exchange in RabbitMQ, and its routing keys.
#[derive(Debug)]
pub struct Queue {
    pub exchange: &'static str,
    /// A template; else the topic is the key.
    pub routing_key: Option<&'static str>,
}

pub const ANY_QUEUE: Queue = Queue { exchange: "outbox", routing_key: None };

use Need::{Optional, Required};

pub const LAYOUTS: &[Layout] = &[
    Layout {
        name: "native",
        databases: EVERYWHERE,
        tables: &["outbox"],
        columns: &[
            (Role::Id, "id", Required),
            (Role::Key, "partition_key", Required),
            (Role::Payload, "payload", Required),
            (Role::Topic, "topic", Optional),
            (Role::Type, "event_type", Optional),
            (Role::Headers, "headers", Optional),
            (Role::Timestamp, "created_at", Optional),
        ],
        topic: "{topic}",
        headers: &[("id", Role::Id), ("event_type", Role::Type)],
        column_headers: &[],
        paths: &[],
        queue: &ANY_QUEUE,
        keyed_by_tags: false,
        polling: Some(&polling::NATIVE),
    },
    Layout {
        name: "debezium",
        databases: EVERYWHERE,
        tables: &["outboxevent"],
        columns: &[
            (Role::Id, "id", Required),
            (Role::Key, "aggregateid", Required),
            (Role::Topic, "aggregatetype", Required),
            (Role::Type, "type", Optional),
            (Role::Payload, "payload", Required),
        ],
        topic: "outbox.event.{topic}",
        headers: &[("id", Role::Id)],
        column_headers: &[],
        paths: &[],
        queue: &ANY_QUEUE,
        keyed_by_tags: false,
        polling: None,
    },
    Layout {
        name: "entity",
        databases: EVERYWHERE,
        tables: &["outbox"],
        columns: &[
            (Role::Id, "event_id", Required),
            (Role::Key, "partition_key", Required),
            (Role::Payload, "payload", Required),
            (Role::Topic, "topic", Optional),
            (Role::Type, "event_type", Optional),
            (Role::Version, "entity_version", Optional),
            (Role::Timestamp, "created_at", Optional),
        ],
        topic: "{topic}",
        headers: &[("event_id", Role::Id), ("event_type", Role::Type), ("entity_version", Role::Version)],
        column_headers: &["entity_type", "entity_id"],
        paths: &[],
        queue: &ANY_QUEUE,
        keyed_by_tags: false,
        polling: Some(&polling::ENTITY),
    },
    Layout {
        name: "message-group",
        databases: EVERYWHERE,
        tables: &["outbox_events", "outbox_dispatch_jobs"],
        columns: &[
            (Role::Id, "id", Required),
            (Role::Key, "message_group", Optional),
            (Role::Type, "type", Required),
            (Role::Payload, "payload", Required),
            (Role::Timestamp, "created_at", Optional),
        ],
        topic: "{table}",
        headers: &[("id", Role::Id), ("type", Role::Type)],
        column_headers: &[],
        paths: &[("EVENT", "/api/events/batch"), ("DISPATCH_JOB", "/api/dispatch/jobs/batch")],
        queue: &ANY_QUEUE,
        keyed_by_tags: false,
        polling: Some(&polling::MESSAGE_GROUP),
    },
    Layout {
        name: "event-store",
        databases: &[Kind::Postgres],
        tables: &["events"],
        columns: &[
            (Role::Id, "position", Required),
            (Role::Type, "type", Required),
            (Role::Tags, "tags", Required),
            (Role::Payload, "data", Required),
            (Role::Timestamp, "occurred_at", Optional),
        ],
        // A publisher's name, unless it has a topic.
        topic: "{publisher}",
        headers: &[("position", Role::Id), ("type", Role::Type)],
        column_headers: &[],
        paths: &[],
        queue: &ANY_QUEUE,
        keyed_by_tags: true,
        polling: None,
    },
    Layout {
        name: "occurred-on",
        databases: &[Kind::Postgres],
        tables: &["outbox.outbox_messages"],
        columns: &[
            (Role::Id, "Id", Required),
            (Role::Type, "Type", Required),
            (Role::Payload, "Content", Required),
            (Role::Timestamp, "OccurredOnUtc", Optional),
        ],
        topic: "outbox.{type}",
        headers: &[("id", Role::Id), ("type", Role::Type)],
        column_headers: &[],
        paths: &[],
        queue: &Queue { exchange: "arap.events", routing_key: Some("arap.{type}") },
        keyed_by_tags: false,
        polling: Some(&polling::OCCURRED_ON),
    },
    Layout {
        name: "produce-receive",
        databases: &[Kind::Postgres, Kind::MySql],
        tables: &["outbox"],
        columns: &[
            (Role::Id, "id", Required),
            (Role::Key, "stid", Required),
            (Role::Type, "code", Required),
            (Role::Payload, "payload", Required),
            (Role::ReceivedAt, "received_at", Optional),
        ],
        topic: "outbox-events",
        headers: &[("id", Role::Id), ("code", Role::Type)],
        column_headers: &[],
        paths: &[],
        queue: &ANY_QUEUE,
        keyed_by_tags: false,
        polling: Some(&polling::PRODUCE_RECEIVE),
    },
];

impl Layout {
    pub fn named(name: &str) -> Option<&'static Layout> {
        LAYOUTS.iter().find(|layout| layout.name == name)
    }

    pub fn column(&self, role: Role) -> Option<(&'static str, Need)> {
        self.columns.iter().find(|(known, ..)| *known == role).map(|(_, column, need)| (*column, *need))
    }
}
