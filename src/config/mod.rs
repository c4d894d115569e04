//! What the user asked for, from words to settings.
//!
//! ```text
//!   flags ─▶ environment ─▶ file ─▶ defaults        each a layer of the same options, the first that says something wins
//!        options.rs        file.rs    options.rs
//!                    └────────┬────────┘
//!                  resolve.rs ─▶ settings.rs        typed and validated: every problem at once
//! ```
//!
//! An option is defined once, in `options.rs`: its flag, environment variable, key in the file, default, help text and
//! line in docs/config.md all come from there.

mod confirm_options;
mod definitions;
mod file;
mod kafka_options;
pub(crate) mod options;
mod places;
mod problem;
mod process_options;
pub mod reference;
mod resolve;
mod resolve_mark;
mod resolve_poll;
mod resolve_publisher;
mod resolve_retention;
mod resolve_sink;
mod resolve_source;
mod secret;
mod settings;
mod source_url;
mod values;

pub use confirm_options::ConfirmOptions;
pub use file::{FileOptions, PipelineTable, PublisherTable, parse};
pub use kafka_options::{KafkaOption, OptionValue};
pub use options::{
    ExtendedJson, HttpBody, Isolation, LogFormat, OnLostPosition, PipelineOptions, ProcessOptions, Snapshot,
};
pub use problem::{ConfigError, Problem};
pub use resolve::Said;
pub use secret::Secret;
pub use settings::{
    Admin, Also, Brokers, Capture, CheckpointPlace, DeadLetter, Delivery, HttpSettings, KafkaSettings, MarkSettings,
    MongoSettings, MySqlSettings, Naming, PipelineSettings, PollSettings, PositionSettings, PostgresSettings,
    ProcessSettings, PublisherSettings, RabbitSettings, RetentionSettings, RouteSettings, SelectionSettings, Settings,
    SinkSettings, SourceSettings, Start, TableName, TopicCreation, WindowSettings,
};
pub use source_url::{SourceUrl, redact_url};
pub use values::{Assignment, ByteSize, Span};
