//! A pipeline's position where the source does not keep it: a row in the source, a record of a compacted Kafka topic,
//! or a file. Written only behind the acknowledgements, so that a crash repeats and never skips.
//!
//! Whatever holds it, it is this one document, with the version of its form: a newer outboxd reads older ones, an
//! older one refuses what it does not know.

pub mod compacted;
mod file;
mod kafka;
pub mod publishers;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::{CheckpointPlace, KafkaSettings};
use crate::sink::kafka::client_config;
use crate::source::SourceFailure;

pub use file::FileStore;
pub use kafka::{KafkaStore, TOPIC};

/// The document's form.
pub const FORMAT: u32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotState {
    None,
    /// Begun and not known to be delivered: to be redone.
    Pending,
    Done,
    /// What is not marked is being delivered from the table, after a position was lost: to be gone on with.
    Backfill,
}

impl SnapshotState {
    pub fn as_str(self) -> &'static str {
        match self {
            SnapshotState::None => "none",
            SnapshotState::Pending => "pending",
            SnapshotState::Done => "done",
            SnapshotState::Backfill => "backfill",
        }
    }

    /// Whether rows of the table come before the log.
    pub fn is_under_way(self) -> bool {
        matches!(self, SnapshotState::Pending | SnapshotState::Backfill)
    }

    /// What is not known was never begun.
    pub fn parse(text: &str) -> Self {
        match text {
            "pending" => SnapshotState::Pending,
            "done" => SnapshotState::Done,
            "backfill" => SnapshotState::Backfill,
            _ => SnapshotState::None,
        }
    }
}

/// Where a pipeline stands, for a source that has to be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    pub format: u32,
    pub pipeline: String,
    /// The kind of source: `mysql`, `mariadb`, …
    pub source: String,
    /// The server that the position was read from, as it names itself.
    pub server: String,
    /// As `--start` takes it.
    pub position: String,
    /// Where in the server's own files that was, to look at; of MongoDB, which collections were watched.
    #[serde(default)]
    pub file: String,
    pub snapshot: SnapshotState,
}

#[derive(Debug, Error)]
pub enum CheckpointError {
    /// It passes: a broker that does not answer.
    #[error("{0}")]
    Transient(String),
    /// A person must look at it.
    #[error("{what}")]
    Refused { what: String, remedy: String },
}

impl Checkpoint {
    /// Refuses a form that this version does not know.
    pub fn check_format(pipeline: &str, format: u32) -> Result<(), CheckpointError> {
        if format == FORMAT {
            return Ok(());
        }
        Err(CheckpointError::Refused {
            what: format!("the checkpoint of pipeline `{pipeline}` has format {format}; this outboxd knows {FORMAT}"),
            remedy: "run the outboxd that wrote it, or a newer one".to_owned(),
        })
    }

    /// From JSON. The form is looked at first: what else a newer one has is not known here.
    fn from_json(pipeline: &str, json: &[u8], place: &str) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Form {
            format: u32,
        }
        let malformed = |error: serde_json::Error| CheckpointError::Refused {
            what: format!("the checkpoint of pipeline `{pipeline}` in {place} cannot be read: {error}"),
            remedy: "restore it from a copy, or remove it and give --start the position to go on from".to_owned(),
        };
        let Form { format } = serde_json::from_slice(json).map_err(malformed)?;
        Checkpoint::check_format(pipeline, format)?;
        serde_json::from_slice(json).map_err(malformed)
    }

    fn to_json(&self) -> Vec<u8> {
        // A document of strings and numbers has no way to fail.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }
}

/// Places outside of the source.
pub enum Store {
    File(FileStore),
    Kafka(Box<KafkaStore>),
}

impl From<CheckpointError> for SourceFailure {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Transient(what) => SourceFailure::Transient { what },
            CheckpointError::Refused { what, remedy } => SourceFailure::NotReady { what, remedy },
        }
    }
}

impl Store {
    /// The place that the user chose; `None` for the source itself.
    pub fn open(place: &CheckpointPlace, kafka: &KafkaSettings) -> Result<Option<Self>, SourceFailure> {
        match place {
            CheckpointPlace::Source => Ok(None),
            CheckpointPlace::File(path) => Ok(Some(Store::File(FileStore::new(PathBuf::from(path))))),
            CheckpointPlace::Kafka => {
                let config = client_config(kafka).map_err(|failure| SourceFailure::NotReady {
                    what: failure.to_string(),
                    remedy: "correct the Kafka options".to_owned(),
                })?;
                Ok(Some(Store::Kafka(Box::new(KafkaStore::new(config)?))))
            }
        }
    }

    pub async fn load(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        match self {
            Store::File(file) => file.load(pipeline).await,
            Store::Kafka(topic) => topic.load(pipeline).await,
        }
    }

    /// As [`load`](Self::load), and makes nothing that is missing.
    pub async fn peek(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        match self {
            Store::File(file) => file.load(pipeline).await,
            Store::Kafka(topic) => topic.peek(pipeline).await,
        }
    }

    /// Looks whether it could be written, as far as that can be told without writing.
    pub async fn check_writable(&self) -> Result<(), CheckpointError> {
        match self {
            Store::File(file) => file.check_writable().await,
            Store::Kafka(_) => Ok(()),
        }
    }

    pub async fn save(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        match self {
            Store::File(file) => file.save(checkpoint).await,
            Store::Kafka(topic) => topic.save(checkpoint).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_form_is_refused_and_named() {
        let newer = br#"{"format": 2, "something": "else"}"#;
        let refused = Checkpoint::from_json("orders", newer, "here").unwrap_err().to_string();
        assert!(refused.contains("format 2") && refused.contains("knows 1"), "{refused}");
    }

    #[test]
    fn the_first_form_is_read_for_good() {
        let first = br#"{"format": 1, "pipeline": "orders", "source": "mysql", "server": "s",
                         "position": "binlog.000001:4", "file": "binlog.000001:4", "snapshot": "done"}"#;
        let read = Checkpoint::from_json("orders", first, "here").unwrap();
        assert_eq!((read.position.as_str(), read.snapshot), ("binlog.000001:4", SnapshotState::Done));
        assert_eq!(Checkpoint::from_json("orders", &read.to_json(), "here").unwrap(), read);
    }
}
