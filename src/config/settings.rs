//! What a run needs to know, typed and checked. Nothing here is optional unless its absence means something.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::confirm_options::ConfirmOptions;
use super::kafka_options::KafkaOption;
use super::options::{ExtendedJson, HttpBody, LogFormat, OnLostPosition, Snapshot};
use super::secret::Secret;
use super::source_url::SourceUrl;
use crate::position::Lsn;
use crate::route::layout::Kind;
use crate::route::polling::Polling;
use crate::sink::lanes::LaneSettings;
use crate::source::mongodb::token::StartPoint;
use crate::source::mysql::position::BinlogPosition;
use crate::source::poll::ledger::Patience;

#[derive(Clone, Debug)]
pub struct Settings {
    pub process: ProcessSettings,
    pub pipelines: Vec<PipelineSettings>,
}

#[derive(Clone, Debug)]
pub struct ProcessSettings {
    pub admin: Admin,
    pub admin_token: Option<Secret>,
    /// `None`: text on a terminal, JSON otherwise.
    pub log_format: Option<LogFormat>,
    pub fail_fast: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admin {
    Off,
    Listen {
        /// `host:port`.
        address: String,
        /// Someone asked for this address: if it is taken, no other will do.
        chosen: bool,
    },
}

#[derive(Clone, Debug)]
pub struct PipelineSettings {
    pub name: String,
    pub source: SourceSettings,
    pub capture: Capture,
    /// The layout and its columns; publishers may say more.
    pub route: RouteSettings,
    /// Of the checkpoint.
    pub kafka: KafkaSettings,
    /// At least one; without tables of their own in the file, the one that is called as the pipeline is.
    pub publishers: Vec<PublisherSettings>,
    /// How a row says that it was delivered, where the log is read and its table has columns for that.
    pub status: Option<MarkSettings>,
    /// Whether that is written.
    pub mark: bool,
    pub on_lost_position: OnLostPosition,
    pub checkpoint_interval: Duration,
    pub retention: RetentionSettings,
    pub until_caught_up: bool,
    pub no_standby: bool,
    pub shutdown_timeout: Duration,
    pub stall_timeout: Duration,
    /// For whoever confirms receipts, and judged there.
    pub confirm: ConfirmOptions,
}

impl PipelineSettings {
    /// Whether its one publisher is the pipeline itself, and has no name of its own.
    pub fn is_lone(&self) -> bool {
        self.publishers.len() == 1 && self.publishers[0].name == self.name
    }

    /// How delivered rows are marked, if they are.
    pub fn marking(&self) -> Option<&MarkSettings> {
        self.status.as_ref().filter(|_| self.mark)
    }
}

/// The columns by which a row says that it was delivered.
#[derive(Clone, Debug)]
pub struct MarkSettings {
    pub scheme: &'static Polling,
    /// How often a row may fail before nobody tries it again.
    pub most: u32,
}

/// What is deleted of a pipeline's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionSettings {
    /// `None`: nothing, unless `outboxd prune` is called.
    pub after: Option<Duration>,
    /// Rows that are deleted at once.
    pub batch: usize,
    pub also: Also,
}

/// What goes besides what was delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Also {
    pub failed: bool,
    /// Rows whose receipt nobody confirmed.
    pub unreceived: bool,
}

/// A place that takes events of the pipeline, and which ones.
#[derive(Clone, Debug)]
pub struct PublisherSettings {
    pub name: String,
    pub selection: SelectionSettings,
    pub route: RouteSettings,
    pub sink: SinkSettings,
    /// Of the sink, or of dead letters.
    pub kafka: KafkaSettings,
    pub dead_letter: DeadLetter,
    pub delivery: Delivery,
    /// The pipeline's source, for dead letters that are kept there.
    pub source: Arc<SourceSettings>,
    pub window: WindowSettings,
    /// `None`: however much log it keeps, it is kept.
    pub max_retained: Option<u64>,
}

/// What is promised to consumers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    #[default]
    AtLeastOnce,
    /// Under `read_committed`.
    ExactlyOnce,
}

/// Which events are wanted, as the user said it. What is empty chooses nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelectionSettings {
    pub required_tags: Vec<String>,
    pub any_of_tags: Vec<String>,
    pub types: Vec<String>,
    pub versions: Vec<String>,
    pub tables: Vec<TableName>,
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SourceSettings {
    Postgres(PostgresSettings),
    /// And MariaDB.
    MySql(MySqlSettings),
    Mongo(MongoSettings),
}

impl SourceSettings {
    pub fn kind(&self) -> Kind {
        match self {
            SourceSettings::Postgres(_) => Kind::Postgres,
            SourceSettings::MySql(_) => Kind::MySql,
            SourceSettings::Mongo(_) => Kind::Mongo,
        }
    }

    pub fn tables(&self) -> &[TableName] {
        match self {
            SourceSettings::Postgres(source) => &source.tables,
            SourceSettings::MySql(source) => &source.tables,
            SourceSettings::Mongo(source) => &source.tables,
        }
    }

    /// Whether nothing may be made in the database.
    pub fn no_create(&self) -> bool {
        match self {
            SourceSettings::Postgres(source) => source.no_create,
            SourceSettings::MySql(source) => source.no_create,
            SourceSettings::Mongo(source) => source.no_create,
        }
    }
}

#[derive(Clone, Debug)]
pub struct PostgresSettings {
    pub url: SourceUrl,
    pub slot: String,
    pub publication: String,
    pub no_create: bool,
    pub message_prefixes: Vec<String>,
    pub snapshot: Snapshot,
    pub start: Start<Lsn>,
    /// The layout's own unless others were named; none where only messages are read.
    pub tables: Vec<TableName>,
}

#[derive(Clone, Debug)]
pub struct MySqlSettings {
    pub url: SourceUrl,
    pub tables: Vec<TableName>,
    pub no_create: bool,
    pub snapshot: Snapshot,
    pub start: Start<BinlogPosition>,
    /// `None`: a random one.
    pub server_id: Option<u32>,
    /// Binary columns that are written as UUIDs.
    pub uuid_columns: Vec<String>,
    pub checkpoint: CheckpointPlace,
}

#[derive(Clone, Debug)]
pub struct MongoSettings {
    pub url: SourceUrl,
    /// Collections; of the URL's database unless they name one.
    pub tables: Vec<TableName>,
    pub no_create: bool,
    pub snapshot: Snapshot,
    pub start: Start<StartPoint>,
    pub extended_json: ExtendedJson,
    pub checkpoint: CheckpointPlace,
}

/// How changes are found.
#[derive(Clone, Debug)]
pub enum Capture {
    Log,
    /// Tables with status columns are asked.
    Poll(PollSettings),
    /// An event store is asked for what lies behind a position.
    Positions(PositionSettings),
}

#[derive(Clone, Debug)]
pub struct PositionSettings {
    pub interval: Duration,
    /// Events that are read at once.
    pub batch: usize,
    pub longest_idle: Duration,
    pub worker: String,
}

#[derive(Clone, Debug)]
pub struct PollSettings {
    pub scheme: &'static Polling,
    pub interval: Duration,
    /// Rows that are claimed at once.
    pub batch: usize,
    pub patience: Patience,
    /// How long a claimed row is ours unless that is renewed.
    pub lease: Duration,
    pub longest_idle: Duration,
    pub worker: String,
}

/// Where a position is kept that the source does not keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointPlace {
    Source,
    Kafka,
    /// A path.
    File(String),
}

impl CheckpointPlace {
    /// For people.
    pub fn describe(&self) -> String {
        match self {
            CheckpointPlace::Source => "outboxd_checkpoint in the source".to_owned(),
            CheckpointPlace::Kafka => "Kafka topic outboxd_checkpoint".to_owned(),
            CheckpointPlace::File(path) => format!("file {path}"),
        }
    }
}

/// Where a log is entered when no position is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start<P> {
    Now,
    Earliest,
    At(P),
}

/// How a row becomes a record, as the user said it; routing compiles it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteSettings {
    pub layout: String,
    /// Role and column.
    pub columns: Vec<(String, String)>,
    /// Header and column.
    pub headers: Vec<(String, String)>,
    /// A template; `None`: the row's topic, else the layout's.
    pub topic: Option<String>,
    pub tombstone_on_null: bool,
    pub naming: Naming,
    /// Event type and path, for HTTP.
    pub paths: Vec<(String, String)>,
    /// The tables, for topics that are called after them.
    pub tables: Vec<TableName>,
    /// The publisher's name, for topics that are called after it.
    pub publisher: String,
    /// Names of the tags that the publisher selects by, for layouts whose key is a tag's value.
    pub key_tags: Vec<String>,
}

/// What a topic may be called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Naming {
    /// As Kafka allows it; an event without a topic cannot be delivered.
    #[default]
    Kafka,
    /// Anything, or nothing.
    Free,
}

/// Where records go.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SinkSettings {
    Kafka,
    Http(Box<HttpSettings>),
    RabbitMq(Box<RabbitSettings>),
    Stdout,
    /// Records are counted and thrown away.
    Statistics,
}

#[derive(Clone, Debug)]
pub struct HttpSettings {
    pub url: Secret,
    pub token: Option<Secret>,
    pub headers: Vec<(String, Secret)>,
    /// The key of the requests' signature.
    pub signing_key: Option<Secret>,
    pub body: HttpBody,
    pub timeout: Duration,
    /// A file of certificates that are trusted instead of the system's.
    pub ca: Option<PathBuf>,
    pub lanes: LaneSettings,
}

#[derive(Clone, Debug)]
pub struct RabbitSettings {
    pub url: Secret,
    /// Empty: the default exchange.
    pub exchange: String,
    /// Whether the exchange is declared, or must be there.
    pub declare: bool,
    /// Whether a record that reaches no queue is refused.
    pub mandatory: bool,
    /// A file of certificates that are trusted instead of the system's.
    pub ca: Option<PathBuf>,
    /// Files of our own certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    pub lanes: LaneSettings,
}

#[derive(Clone, Debug)]
pub struct KafkaSettings {
    pub brokers: Brokers,
    /// Checked, under librdkafka's names; `bootstrap.servers` is not among them.
    pub options: Vec<KafkaOption>,
    /// `None`: missing topics are not created.
    pub create_topics: Option<TopicCreation>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Brokers {
    /// Nothing needs Kafka.
    None,
    /// librdkafka's in-process broker.
    Embedded,
    Servers(String),
}

/// `None` leaves the number to the broker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopicCreation {
    pub partitions: Option<i32>,
    pub replication: Option<i16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeadLetter {
    /// The pipeline ends instead.
    None,
    Topic(String),
    /// A table of the source's database, or a collection.
    Table(TableName),
}

impl DeadLetter {
    /// What it is called, for messages.
    pub fn describe(&self) -> String {
        match self {
            DeadLetter::None => "nowhere".to_owned(),
            DeadLetter::Topic(name) => format!("topic {name}"),
            DeadLetter::Table(name) => format!("table {name}"),
        }
    }
}

/// How much may be unacknowledged at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSettings {
    pub max_events: usize,
    pub max_bytes: usize,
}

/// `table` or `schema.table`; a part in double quotes may hold dots. Names are taken as they are written: whoever
/// quotes them in SQL never folds their case.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TableName {
    pub schema: Option<String>,
    pub name: String,
}

impl TableName {
    /// As SQL takes it.
    pub fn quoted(&self) -> String {
        let quote = |part: &str| format!("\"{}\"", part.replace('"', "\"\""));
        match &self.schema {
            Some(schema) => format!("{}.{}", quote(schema), quote(&self.name)),
            None => quote(&self.name),
        }
    }
}

impl FromStr for TableName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const MALFORMED: &str = "a table is `table` or `schema.table`, with a part in double quotes if it holds a dot";
        let (first, rest) = identifier(text).ok_or(MALFORMED)?;
        if rest.is_empty() {
            return Ok(TableName { schema: None, name: first });
        }
        match rest.strip_prefix('.').and_then(identifier) {
            Some((name, "")) => Ok(TableName { schema: Some(first), name }),
            _ => Err(MALFORMED),
        }
    }
}

/// The identifier at the beginning of the text, and what follows it.
fn identifier(text: &str) -> Option<(String, &str)> {
    let Some(mut rest) = text.strip_prefix('"') else {
        let end = text.find(['.', '"']).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        return (!name.is_empty()).then(|| (name.to_owned(), rest));
    };
    let mut name = String::new();
    loop {
        let (part, after) = rest.split_once('"')?;
        name.push_str(part);
        match after.strip_prefix('"') {
            Some(after_doubled) => {
                name.push('"');
                rest = after_doubled;
            }
            None => return (!name.is_empty()).then_some((name, after)),
        }
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |name: &str| match name.contains(['.', '"']) {
            true => format!("\"{}\"", name.replace('"', "\"\"")),
            false => name.to_owned(),
        };
        match &self.schema {
            Some(schema) => write!(f, "{}.{}", part(schema), part(&self.name)),
            None => f.write_str(&part(&self.name)),
        }
    }
}

impl FromStr for TopicCreation {
    type Err = &'static str;

    /// `6` or `6:3`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const MALFORMED: &str = "PARTITIONS or PARTITIONS:REPLICATION is expected, for instance 6:3";
        let (partitions, replication) = match text.split_once(':') {
            Some((partitions, replication)) => (partitions, Some(replication)),
            None => (text, None),
        };
        let partitions = partitions.parse().ok().filter(|count: &i32| *count > 0).ok_or(MALFORMED)?;
        let replication = match replication {
            Some(factor) => Some(factor.parse().ok().filter(|factor: &i16| *factor > 0).ok_or(MALFORMED)?),
            None => None,
        };
        Ok(TopicCreation { partitions: Some(partitions), replication })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tables_name_may_have_a_schema_and_quotes() {
        let table = |schema: Option<&str>, name: &str| {
            Ok(TableName { schema: schema.map(str::to_owned), name: name.to_owned() })
        };
        assert_eq!("outbox".parse(), table(None, "outbox"));
        assert_eq!("sales.Outbox".parse(), table(Some("sales"), "Outbox"));
        assert_eq!("\"a.b\".\"c\"\"d\"".parse(), table(Some("a.b"), "c\"d"));
        for text in ["", ".", "a.", ".a", "a.b.c", "\"a", "\"\"", "a\"b\""] {
            assert!(text.parse::<TableName>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn a_tables_name_is_written_as_it_can_be_read() {
        for text in ["outbox", "sales.Outbox", "\"a.b\".\"c\"\"d\""] {
            assert_eq!(text.parse::<TableName>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn topic_creation_is_partitions_and_replication() {
        assert_eq!("6".parse(), Ok(TopicCreation { partitions: Some(6), replication: None }));
        assert_eq!("6:3".parse(), Ok(TopicCreation { partitions: Some(6), replication: Some(3) }));
        for text in ["", "0", "-1", "6:", "6:0", ":3", "x"] {
            assert!(text.parse::<TopicCreation>().is_err(), "{text:?} was accepted");
        }
    }
}
