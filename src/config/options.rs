//! The options of a pipeline and of the process: their one definition.
//!
//! Each field is at once a flag, an environment variable (`OUTBOXD_` and the flag's name) and a key of the config file;
//! its doc comment is the help text, the man page's and the reference's. All are optional here, because the same struct
//! is a layer of what was said on the command line, in the environment and in the file, and, with the definitions'
//! `default_value`s, the layer below them all.

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use serde::Deserialize;

use super::confirm_options::ConfirmOptions;
pub(super) use super::definitions::{defaults, key, keys, renamed};
pub(crate) use super::definitions::{definitions, environment};
pub use super::process_options::ProcessOptions;
use super::secret::Secret;
use super::values::{self, Assignment, ByteSize, Span};
use crate::route::layout::LAYOUTS as LAYOUT_TABLE;

/// The layouts a row may have.
pub const LAYOUTS: [&str; LAYOUT_TABLE.len()] = {
    let mut names = [""; LAYOUT_TABLE.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = LAYOUT_TABLE[index].name;
        index += 1;
    }
    names
};

/// What happens to the rows that are in the table before the log is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Snapshot {
    /// They are left alone
    None,
    /// They are delivered first, consistently with the log
    Existing,
}

/// What is done when the log no longer has what was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLostPosition {
    /// The pipeline ends with exit 4 and a gap report
    Exit,
    /// A new position is made, and what the table has not marked is delivered from there first
    Backfill,
}

/// How MongoDB's documents are written as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExtendedJson {
    /// Numbers and dates as other tools read them
    Relaxed,
    /// Every type kept apart
    Canonical,
}

/// What a request of the HTTP sink holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HttpBody {
    /// A JSON array of the payloads
    Payloads,
    /// A JSON array of objects with topic, key, value, headers and timestamp
    Events,
    /// A payload a line (NDJSON)
    Lines,
    /// One payload as it is, with its headers as x-outboxd-…; a request for each event
    Single,
}

/// How far a publisher is apart from the others of its pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// One reading of the log feeds all.
    #[default]
    Shared,
    /// A pipeline of its own.
    OwnPosition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

/// What was said about one pipeline, in one layer.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct PipelineOptions {
    /// Where the outbox is: postgres://user@host:5432/database, or mysql://, mariadb://, mongodb:// or mongodb+srv://
    ///
    /// Several hosts (`host1,host2`) are tried in turn for fail-over. TLS is spelt as the database's own clients spell
    /// it: `?sslmode=verify-full&sslrootcert=/path` for PostgreSQL, `?ssl-mode=verify-identity&ssl-ca=/path` for MySQL,
    /// `?tls=true&tlsCAFile=/path` for MongoDB.
    /// What a PostgreSQL URL leaves out comes from PG* variables and ~/.pgpass; MySQL's password may be in MYSQL_PWD.
    #[arg(value_name = "SOURCE", env = "OUTBOXD_SOURCE")]
    pub source: Option<Secret>,

    /// How changes are found: `log` reads the database's own log, `poll` asks tables with status columns or positions
    #[arg(long, env = "OUTBOXD_CAPTURE", value_name = "HOW", default_value = "log", help_heading = "Source")]
    pub capture: Option<String>,

    /// Outbox table or collection, `table` or `schema.table`; repeatable [default: the layout's own]
    ///
    /// With MongoDB `*` means all collections of SOURCE's database, and `database.*` those of another one.
    #[arg(long, env = "OUTBOXD_TABLE", value_name = "TABLE", value_delimiter = ',', help_heading = "Source")]
    #[serde(deserialize_with = "values::one_or_many")]
    pub table: Vec<String>,

    /// PostgreSQL replication slot [default: outboxd_<database>]
    #[arg(long, env = "OUTBOXD_SLOT", value_name = "SLOT", help_heading = "Source")]
    pub slot: Option<String>,

    /// PostgreSQL publication
    #[arg(
        long,
        env = "OUTBOXD_PUBLICATION",
        value_name = "PUBLICATION",
        default_value = "outboxd",
        help_heading = "Source"
    )]
    pub publication: Option<String>,

    /// Never create slot, publication, or table or collection of checkpoints; exit 3 when one is missing
    #[arg(long, env = "OUTBOXD_NO_CREATE", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "Source")]
    pub no_create: Option<bool>,

    /// Logical messages with this prefix (pg_logical_emit_message) are outbox events too; repeatable [default: none]
    #[arg(long, env = "OUTBOXD_MESSAGE_PREFIX", value_name = "PREFIX", value_delimiter = ',', help_heading = "Source")]
    #[serde(deserialize_with = "values::one_or_many")]
    pub message_prefix: Vec<String>,

    /// What to do on the very first start with rows already in the table
    #[arg(
        long,
        env = "OUTBOXD_SNAPSHOT",
        value_enum,
        value_name = "WHAT",
        default_value = "none",
        help_heading = "Source"
    )]
    pub snapshot: Option<Snapshot>,

    /// Where the log is entered when no position is stored: now, earliest, or a position as `status` prints it
    #[arg(long, env = "OUTBOXD_START", value_name = "POSITION", default_value = "now", help_heading = "Source")]
    pub start: Option<String>,

    /// What to do when the position is lost: a slot dropped or invalidated, a binary log purged, a resume token too old
    ///
    /// `backfill` makes a new position, delivers from the table what is not marked as delivered, and goes on with the log. It
    /// needs --mark, or an application that writes the layout's status itself; without that it is exit 4 as well.
    #[arg(
        long,
        env = "OUTBOXD_ON_LOST_POSITION",
        value_enum,
        value_name = "WHAT",
        default_value = "exit",
        help_heading = "Source"
    )]
    pub on_lost_position: Option<OnLostPosition>,

    /// Id of outboxd among the replicas of a MySQL or MariaDB server [default: random]
    #[arg(long, env = "OUTBOXD_SERVER_ID", value_name = "ID", help_heading = "Source")]
    pub server_id: Option<u32>,

    /// MySQL column of 16 bytes, such as BINARY(16), that is a UUID and is written as one; repeatable [default: none]
    #[arg(long, env = "OUTBOXD_UUID_COLUMN", value_name = "COLUMN", value_delimiter = ',', help_heading = "Source")]
    #[serde(deserialize_with = "values::one_or_many")]
    pub uuid_column: Vec<String>,

    /// How MongoDB's documents are written: as relaxed or as canonical extended JSON
    #[arg(
        long,
        env = "OUTBOXD_EXTENDED_JSON",
        value_enum,
        value_name = "FORM",
        default_value = "relaxed",
        help_heading = "Source"
    )]
    pub extended_json: Option<ExtendedJson>,

    /// Which column of the table plays which role
    #[arg(long, env = "OUTBOXD_LAYOUT", value_name = "LAYOUT", value_parser = LAYOUTS, default_value = "native", help_heading = "Routing")]
    pub layout: Option<String>,

    /// Column that plays a role of the layout, e.g. `key=customer_id`, or `key=/customer/id` inside a JSON payload; repeatable
    ///
    /// Roles: id, key, topic, type, payload, headers, timestamp, version, tags, received_at, and published (null until it was
    /// delivered). In the file: `column = { key = "customer_id" }`.
    #[arg(long, env = "OUTBOXD_COLUMN", value_name = "ROLE=NAME", value_delimiter = ',', help_heading = "Routing")]
    #[serde(deserialize_with = "values::assignments")]
    pub column: Vec<Assignment>,

    /// Record header taken from a column, e.g. `eventType=type`; repeatable
    ///
    /// These come in addition to the layout's own headers. In the file: `header = { eventType = "type" }`.
    #[arg(long, env = "OUTBOXD_HEADER", value_name = "NAME=COLUMN", value_delimiter = ',', help_heading = "Routing")]
    #[serde(deserialize_with = "values::assignments")]
    pub header: Vec<Assignment>,

    /// Topic, or a template with columns or roles in braces: `outbox.event.{aggregatetype}` [default: the row's topic, else the layout's]
    #[arg(long, env = "OUTBOXD_TOPIC", value_name = "TOPIC", help_heading = "Routing")]
    pub topic: Option<String>,

    /// Deliver a null payload as a tombstone, which a compacted topic takes as a deletion
    ///
    /// Without it the value of such a record is the JSON literal `null`, so that no row deletes anything by accident.
    #[arg(long, env = "OUTBOXD_TOMBSTONE_ON_NULL", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "Routing")]
    pub tombstone_on_null: Option<bool>,

    /// Tag that an event must have to be delivered, `region=eu` or `vip`; repeatable, all are required [default: none]
    ///
    /// Tags are in the column of the role `tags` (a text array, a JSON array, or a JSON object whose members are
    /// `name=value`), or else in the column of the headers.
    #[arg(long, env = "OUTBOXD_REQUIRED_TAGS", value_name = "TAG", value_delimiter = ',', help_heading = "Selection")]
    #[serde(deserialize_with = "values::one_or_many")]
    pub required_tags: Vec<String>,

    /// Tag of which an event must have at least one to be delivered; repeatable [default: none]
    #[arg(long, env = "OUTBOXD_ANY_OF_TAGS", value_name = "TAG", value_delimiter = ',', help_heading = "Selection")]
    #[serde(deserialize_with = "values::one_or_many")]
    pub any_of_tags: Vec<String>,

    /// Pattern of an event's type, `order.*`; an event that matches none is not delivered; repeatable [default: all]
    #[arg(long, env = "OUTBOXD_ONLY_TYPE", value_name = "PATTERN", value_delimiter = ',', help_heading = "Selection")]
    #[serde(deserialize_with = "values::one_or_many")]
    pub only_type: Vec<String>,

    /// Version of an event, `2`, or `>=2`, `<3` …; an event that matches none is not delivered; repeatable [default: all]
    #[arg(
        long,
        env = "OUTBOXD_ONLY_VERSION",
        value_name = "VERSION",
        value_delimiter = ',',
        help_heading = "Selection"
    )]
    #[serde(deserialize_with = "values::one_or_many")]
    pub only_version: Vec<String>,

    /// Kafka's bootstrap servers, `host:port,host:port`; `embedded` starts a broker inside the process, for trying out
    #[arg(long, env = "OUTBOXD_BROKERS", value_name = "SERVERS", help_heading = "Kafka")]
    pub brokers: Option<String>,

    /// Create missing topics, with the broker's own defaults or these numbers [default: off]
    #[arg(long, env = "OUTBOXD_CREATE_TOPICS", value_name = "PARTITIONS[:REPLICATION]", num_args = 0..=1, default_missing_value = "true", help_heading = "Kafka")]
    #[serde(deserialize_with = "values::optional_scalar_text")]
    pub create_topics: Option<String>,

    /// Setting of librdkafka, or of the Java producer by its common name; repeatable
    ///
    /// What would break a guarantee (acks, idempotence, partitioner, time-outs) is refused with the reason. In the file
    /// a table: `kafka = { "linger.ms" = 5 }`. In the environment one setting a line.
    #[arg(
        long,
        env = "OUTBOXD_KAFKA",
        value_name = "KEY=VALUE",
        value_parser = values::unchecked_assignment,
        help_heading = "Kafka"
    )]
    #[serde(deserialize_with = "values::assignments")]
    pub kafka: Vec<Assignment>,

    /// Accept --kafka settings that break a guarantee
    #[arg(long = "unsafe", env = "OUTBOXD_UNSAFE", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "Kafka")]
    #[serde(rename = "unsafe")]
    pub unsafe_settings: Option<bool>,

    /// Where records go: `kafka`, an http(s):// or amqp(s):// URL, `stdout` (a JSON object a line), or `statistics` (counts)
    #[arg(long, env = "OUTBOXD_SINK", value_name = "SINK", default_value = "kafka", help_heading = "Delivery")]
    pub sink: Option<Secret>,

    /// Bearer token of the HTTP sink [default: none]
    #[arg(long, env = "OUTBOXD_HTTP_TOKEN", value_name = "TOKEN", help_heading = "HTTP")]
    pub http_token: Option<Secret>,

    /// Header of every request, `NAME=VALUE`; repeatable. In the file: `http-header = { X-Tenant = "a" }`
    #[arg(long, env = "OUTBOXD_HTTP_HEADER", value_name = "NAME=VALUE", value_delimiter = ',', help_heading = "HTTP")]
    #[serde(deserialize_with = "values::assignments")]
    pub http_header: Vec<Assignment>,

    /// Key with which each request's body is signed: the header x-outboxd-signature has its HMAC-SHA256 [default: none]
    #[arg(long, env = "OUTBOXD_HTTP_SIGN", value_name = "KEY", help_heading = "HTTP")]
    pub http_sign: Option<Secret>,

    /// What a request holds
    #[arg(
        long,
        env = "OUTBOXD_HTTP_BODY",
        value_enum,
        value_name = "FORM",
        default_value = "payloads",
        help_heading = "HTTP"
    )]
    pub http_body: Option<HttpBody>,

    /// Events in a request at the most
    #[arg(long, env = "OUTBOXD_HTTP_BATCH", value_name = "EVENTS", default_value = "100", help_heading = "HTTP")]
    pub http_batch: Option<usize>,

    /// How long an answer is waited for
    #[arg(long, env = "OUTBOXD_HTTP_TIMEOUT", value_name = "DURATION", default_value = "30s", help_heading = "HTTP")]
    pub http_timeout: Option<Span>,

    /// Path below the URL, a template like --topic: `/events/{event_type}` [default: the layout's, else none]
    #[arg(long, env = "OUTBOXD_HTTP_PATH", value_name = "PATH", help_heading = "HTTP")]
    pub http_path: Option<String>,

    /// Path below the URL of one type of event, `TYPE=PATH`; repeatable [default: the layout's]
    #[arg(long, env = "OUTBOXD_HTTP_ROUTE", value_name = "TYPE=PATH", value_delimiter = ',', help_heading = "HTTP")]
    #[serde(deserialize_with = "values::assignments")]
    pub http_route: Vec<Assignment>,

    /// File of certificates that are trusted instead of the system's [default: none]
    #[arg(long, env = "OUTBOXD_HTTP_CA", value_name = "FILE", help_heading = "HTTP")]
    pub http_ca: Option<PathBuf>,

    /// Exchange that records are published to; empty is the default exchange, whose routing keys are queues' names [default: the layout's: arap.events for occurred-on, else outbox]
    #[arg(long, alias = "amqp-exchange", env = "OUTBOXD_EXCHANGE", value_name = "EXCHANGE", help_heading = "RabbitMQ")]
    pub exchange: Option<String>,

    /// Routing key, a template like --topic: `orders.{event_type}` [default: the topic, or the layout's: arap.{Type} for occurred-on; where that gives nothing, the event's type]
    #[arg(
        long,
        alias = "amqp-routing-key",
        env = "OUTBOXD_ROUTING_KEY",
        value_name = "KEY",
        help_heading = "RabbitMQ"
    )]
    pub routing_key: Option<String>,

    /// Declare the exchange, as a durable one of type topic; `false` takes whatever exchange is there, and is exit 5 when none is
    #[arg(long, env = "OUTBOXD_AMQP_DECLARE", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true", value_parser = BoolishValueParser::new(), help_heading = "RabbitMQ")]
    pub amqp_declare: Option<bool>,

    /// A record that reaches no queue is refused: it is tried again, and then parked. Without this it is gone
    #[arg(long, env = "OUTBOXD_AMQP_MANDATORY", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "RabbitMQ")]
    pub amqp_mandatory: Option<bool>,

    /// Records that are published before their confirmations are waited for, in each lane
    #[arg(long, env = "OUTBOXD_AMQP_BATCH", value_name = "RECORDS", default_value = "500", help_heading = "RabbitMQ")]
    pub amqp_batch: Option<usize>,

    /// File of certificates that are trusted instead of the system's [default: none]
    #[arg(long, env = "OUTBOXD_AMQP_CA", value_name = "FILE", help_heading = "RabbitMQ")]
    pub amqp_ca: Option<PathBuf>,

    /// File of the certificate that is shown to RabbitMQ, with its chain [default: none]
    #[arg(long, env = "OUTBOXD_AMQP_CERT", value_name = "FILE", help_heading = "RabbitMQ")]
    pub amqp_cert: Option<PathBuf>,

    /// File of that certificate's key [default: none]
    #[arg(long, env = "OUTBOXD_AMQP_KEY", value_name = "FILE", help_heading = "RabbitMQ")]
    pub amqp_key: Option<PathBuf>,

    /// Batches under way at once to HTTP or RabbitMQ; events of one key are always in one lane
    #[arg(long, env = "OUTBOXD_LANES", value_name = "LANES", default_value = "10", help_heading = "Delivery")]
    pub lanes: Option<usize>,

    /// How often an event that is refused is tried again before it is parked [default: 3; polling: the layout's]
    #[arg(long, env = "OUTBOXD_MAX_RETRIES", value_name = "TIMES", help_heading = "Delivery")]
    pub max_retries: Option<u32>,

    /// Pause before an event that was refused is tried again; doubled each time, up to a minute [default: 1s]
    #[arg(long, env = "OUTBOXD_RETRY_BACKOFF", value_name = "DURATION", help_heading = "Delivery")]
    pub retry_backoff: Option<Span>,

    /// How often a table is asked for pending rows [default: the layout's]
    #[arg(long, env = "OUTBOXD_POLL_INTERVAL", value_name = "DURATION", help_heading = "Polling")]
    pub poll_interval: Option<Span>,

    /// Rows that are claimed at once [default: the layout's]
    #[arg(long, env = "OUTBOXD_POLL_BATCH", value_name = "ROWS", help_heading = "Polling")]
    pub poll_batch: Option<usize>,

    /// How long a claimed row is ours unless that is renewed [default: the layout's]
    #[arg(long, env = "OUTBOXD_LEASE", value_name = "DURATION", help_heading = "Polling")]
    pub lease: Option<Span>,

    /// How long a row may look claimed before it is taken for abandoned, in layouts without a lease [default: the layout's]
    #[arg(long, env = "OUTBOXD_STUCK_AFTER", value_name = "DURATION", help_heading = "Polling")]
    pub stuck_after: Option<Span>,

    /// Groups of a key that are delivered at once to HTTP or RabbitMQ: another name for --lanes [default: that]
    #[arg(long, env = "OUTBOXD_MAX_GROUPS", value_name = "GROUPS", help_heading = "Polling")]
    pub max_groups: Option<usize>,

    /// What this instance calls itself in claimed rows [default: host and process]
    #[arg(long, env = "OUTBOXD_WORKER_ID", value_name = "NAME", help_heading = "Polling")]
    pub worker_id: Option<String>,

    /// Write back to the table which rows were delivered from the log: status, published_at and whatever the layout has for it
    ///
    /// In batches, behind the acknowledgements; the position is confirmed behind the marks, so that no delivered row stays
    /// unmarked. It needs the layout's status columns and UPDATE on the table, or `--column published=COLUMN`.
    #[arg(long, env = "OUTBOXD_MARK", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "Delivery")]
    pub mark: Option<bool>,

    /// Promise made to consumers: `at-least-once`, or `exactly-once` for those that read Kafka with read_committed
    #[arg(
        long,
        env = "OUTBOXD_DELIVERY",
        value_name = "PROMISE",
        default_value = "at-least-once",
        help_heading = "Delivery"
    )]
    pub delivery: Option<String>,

    /// Where the confirmed position is kept: `source` is the table or collection outboxd_checkpoint; for MySQL and MongoDB also `kafka` (a compacted topic) and `file:PATH`
    #[arg(long, env = "OUTBOXD_CHECKPOINT", value_name = "WHERE", default_value = "source", help_heading = "Delivery")]
    pub checkpoint: Option<String>,

    /// How often the position is stored; a crash replays at most this much
    #[arg(
        long,
        env = "OUTBOXD_CHECKPOINT_INTERVAL",
        value_name = "DURATION",
        default_value = "1s",
        help_heading = "Delivery"
    )]
    pub checkpoint_interval: Option<Span>,

    /// Where a record goes that cannot be delivered: `table:NAME` (in the source's database), `collection:NAME` (MongoDB), `topic:NAME` (Kafka), or `none`, which ends the pipeline with exit 6
    #[arg(long, env = "OUTBOXD_DEAD_LETTER", value_name = "PLACE", default_value = "none", help_heading = "Delivery")]
    pub dead_letter: Option<String>,

    /// How many events may be sent and not yet acknowledged
    #[arg(
        long,
        env = "OUTBOXD_MAX_IN_FLIGHT",
        value_name = "EVENTS",
        default_value = "25000",
        help_heading = "Delivery"
    )]
    pub max_in_flight: Option<usize>,

    /// How many bytes may be sent and not yet acknowledged; bounds the memory used
    #[arg(
        long,
        env = "OUTBOXD_MAX_IN_FLIGHT_BYTES",
        value_name = "SIZE",
        default_value = "24MiB",
        help_heading = "Delivery"
    )]
    pub max_in_flight_bytes: Option<ByteSize>,

    /// How much log a paused or stuck publisher may keep from being recycled before its position is let go [default: off]
    ///
    /// Past it the publisher has failed, with a gap report, and the log is freed: what it missed is lost to it. Only for
    /// PostgreSQL, whose slot keeps the log; other databases recycle theirs by their own rules.
    #[arg(long, env = "OUTBOXD_MAX_RETAINED", value_name = "SIZE", help_heading = "Delivery")]
    pub max_retained: Option<ByteSize>,

    /// Delete rows that were delivered longer ago than this, while running; never beyond what is confirmed [default: off]
    ///
    /// Where the table has partitions by time, whole partitions are dropped instead. `outboxd prune` does the same once.
    #[arg(long, env = "OUTBOXD_PRUNE_AFTER", value_name = "DURATION", help_heading = "Retention")]
    pub prune_after: Option<Span>,

    /// Rows that retention deletes at once; it pauses after each batch for as long as that took
    #[arg(long, env = "OUTBOXD_PRUNE_BATCH", value_name = "ROWS", default_value = "1000", help_heading = "Retention")]
    pub prune_batch: Option<usize>,

    /// What retention deletes besides what was delivered: `failed` rows, which were given up; `unreceived` rows, whose receipt nobody confirmed (produce-receive); repeatable [default: neither]
    #[arg(long, env = "OUTBOXD_PRUNE_ALSO", value_name = "WHAT", value_delimiter = ',', help_heading = "Retention")]
    #[serde(deserialize_with = "values::one_or_many")]
    pub prune_also: Vec<String>,

    /// Pipeline's name: metrics label, checkpoint and lock key [default: the file's [pipeline.NAME], else the slot's name, else outboxd_<database>]
    #[arg(long, env = "OUTBOXD_NAME", value_name = "NAME", help_heading = "Operation")]
    pub name: Option<String>,

    /// Exit 0 once all that was committed before the start is delivered and confirmed
    #[arg(long, env = "OUTBOXD_UNTIL_CAUGHT_UP", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "Operation")]
    pub until_caught_up: Option<bool>,

    /// Exit 7 instead of waiting when another instance holds the pipeline
    #[arg(long, env = "OUTBOXD_NO_STANDBY", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "Operation")]
    pub no_standby: Option<bool>,

    /// How long a stop waits for acknowledgements; what has none by then is not confirmed and comes again
    #[arg(
        long,
        env = "OUTBOXD_SHUTDOWN_TIMEOUT",
        value_name = "DURATION",
        default_value = "20s",
        help_heading = "Operation"
    )]
    pub shutdown_timeout: Option<Span>,

    /// Reconnect to the source when it has been silent for this long although it should have spoken
    #[arg(
        long,
        env = "OUTBOXD_STALL_TIMEOUT",
        value_name = "DURATION",
        default_value = "60s",
        help_heading = "Operation"
    )]
    pub stall_timeout: Option<Span>,

    /// What `outboxd confirm` is told besides: flags of that command alone, and a table of the pipeline's in the file.
    #[arg(skip)]
    #[serde(skip)]
    pub confirm: ConfirmOptions,
}

impl PipelineOptions {
    /// The layer below all others: what the definitions say.
    pub fn defaults() -> Self {
        defaults()
    }

    /// This layer, and beneath it `lower` where this one says nothing. A list replaces the lower one; assignments are
    /// laid over the lower ones key by key.
    pub fn over(self, lower: Self) -> Self {
        let list = |upper: Vec<String>, lower: Vec<String>| if upper.is_empty() { lower } else { upper };
        PipelineOptions {
            source: self.source.or(lower.source),
            name: self.name.or(lower.name),
            capture: self.capture.or(lower.capture),
            table: list(self.table, lower.table),
            slot: self.slot.or(lower.slot),
            publication: self.publication.or(lower.publication),
            no_create: self.no_create.or(lower.no_create),
            message_prefix: list(self.message_prefix, lower.message_prefix),
            snapshot: self.snapshot.or(lower.snapshot),
            start: self.start.or(lower.start),
            on_lost_position: self.on_lost_position.or(lower.on_lost_position),
            server_id: self.server_id.or(lower.server_id),
            uuid_column: list(self.uuid_column, lower.uuid_column),
            extended_json: self.extended_json.or(lower.extended_json),
            layout: self.layout.or(lower.layout),
            column: values::assign_over(self.column, lower.column),
            header: values::assign_over(self.header, lower.header),
            topic: self.topic.or(lower.topic),
            tombstone_on_null: self.tombstone_on_null.or(lower.tombstone_on_null),
            brokers: self.brokers.or(lower.brokers),
            create_topics: self.create_topics.or(lower.create_topics),
            kafka: values::assign_over(self.kafka, lower.kafka),
            unsafe_settings: self.unsafe_settings.or(lower.unsafe_settings),
            sink: self.sink.or(lower.sink),
            http_token: self.http_token.or(lower.http_token),
            http_header: values::assign_over(self.http_header, lower.http_header),
            http_sign: self.http_sign.or(lower.http_sign),
            http_body: self.http_body.or(lower.http_body),
            http_batch: self.http_batch.or(lower.http_batch),
            http_timeout: self.http_timeout.or(lower.http_timeout),
            http_path: self.http_path.or(lower.http_path),
            http_route: values::assign_over(self.http_route, lower.http_route),
            http_ca: self.http_ca.or(lower.http_ca),
            exchange: self.exchange.or(lower.exchange),
            routing_key: self.routing_key.or(lower.routing_key),
            amqp_declare: self.amqp_declare.or(lower.amqp_declare),
            amqp_mandatory: self.amqp_mandatory.or(lower.amqp_mandatory),
            amqp_batch: self.amqp_batch.or(lower.amqp_batch),
            amqp_ca: self.amqp_ca.or(lower.amqp_ca),
            amqp_cert: self.amqp_cert.or(lower.amqp_cert),
            amqp_key: self.amqp_key.or(lower.amqp_key),
            lanes: self.lanes.or(lower.lanes),
            max_retries: self.max_retries.or(lower.max_retries),
            retry_backoff: self.retry_backoff.or(lower.retry_backoff),
            poll_interval: self.poll_interval.or(lower.poll_interval),
            poll_batch: self.poll_batch.or(lower.poll_batch),
            lease: self.lease.or(lower.lease),
            stuck_after: self.stuck_after.or(lower.stuck_after),
            max_groups: self.max_groups.or(lower.max_groups),
            worker_id: self.worker_id.or(lower.worker_id),
            mark: self.mark.or(lower.mark),
            delivery: self.delivery.or(lower.delivery),
            checkpoint: self.checkpoint.or(lower.checkpoint),
            checkpoint_interval: self.checkpoint_interval.or(lower.checkpoint_interval),
            dead_letter: self.dead_letter.or(lower.dead_letter),
            required_tags: list(self.required_tags, lower.required_tags),
            any_of_tags: list(self.any_of_tags, lower.any_of_tags),
            only_type: list(self.only_type, lower.only_type),
            only_version: list(self.only_version, lower.only_version),
            max_retained: self.max_retained.or(lower.max_retained),
            prune_after: self.prune_after.or(lower.prune_after),
            prune_batch: self.prune_batch.or(lower.prune_batch),
            prune_also: list(self.prune_also, lower.prune_also),
            max_in_flight: self.max_in_flight.or(lower.max_in_flight),
            max_in_flight_bytes: self.max_in_flight_bytes.or(lower.max_in_flight_bytes),
            until_caught_up: self.until_caught_up.or(lower.until_caught_up),
            no_standby: self.no_standby.or(lower.no_standby),
            shutdown_timeout: self.shutdown_timeout.or(lower.shutdown_timeout),
            stall_timeout: self.stall_timeout.or(lower.stall_timeout),
            confirm: self.confirm.over(lower.confirm),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_definitions() {
        let defaults = PipelineOptions::defaults();
        assert_eq!(defaults.layout.as_deref(), Some("native"));
        assert_eq!(defaults.shutdown_timeout, Some("20s".parse().unwrap()));
        assert_eq!(defaults.no_create, None);
        assert_eq!(ProcessOptions::defaults().admin.as_deref(), Some("127.0.0.1:7420"));
    }

    #[test]
    fn every_option_has_an_environment_variable_of_its_name() {
        let all = definitions::<PipelineOptions>().into_iter().chain(definitions::<ProcessOptions>());
        for arg in all {
            let expected = format!("OUTBOXD_{}", key(&arg).replace('-', "_").to_uppercase());
            assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(expected.as_str()));
            assert!(arg.get_help().is_some(), "{expected} is undocumented");
            assert!(arg.is_positional() || arg.get_help_heading().is_some(), "{expected} has no heading");
        }
    }

    #[test]
    fn every_option_has_a_key_of_its_name_in_the_file() {
        let error = toml::from_str::<PipelineOptions>("no-such-key = 1").unwrap_err();
        let mut keys = keys::<PipelineOptions>();
        keys.extend(super::keys::<ProcessOptions>());
        let process = toml::from_str::<ProcessOptions>("no-such-key = 1").unwrap_err();
        let known = format!("{} {}", error.message(), process.message());
        for key in &keys {
            assert!(known.contains(&format!("`{key}`")), "{key} is not a key of the file");
        }
        // Two for the unknown key itself, named in each message.
        assert_eq!(known.matches('`').count() / 2, keys.len() + 2, "{known}");
    }
}
