//! Where a pipeline's position is kept: in its document of the source's own collection, unless the user chose another
//! place. Its lease is there in any case.

use std::sync::Arc;

use mongodb::bson::{Bson, Document};

use super::lease;
use crate::checkpoint::{Checkpoint, FORMAT, SnapshotState, Store};
use crate::config::{CheckpointPlace, KafkaSettings};
use crate::source::SourceFailure;

pub enum Place {
    /// With the lease.
    Document,
    Elsewhere(Arc<Store>),
}

impl Place {
    pub fn open(place: &CheckpointPlace, kafka: &KafkaSettings) -> Result<Self, SourceFailure> {
        Ok(match Store::open(place, kafka)? {
            None => Place::Document,
            Some(store) => Place::Elsewhere(Arc::new(store)),
        })
    }

    /// The checkpoint; `document` is the pipeline's.
    pub async fn load(&self, pipeline: &str, document: &Document) -> Result<Option<Checkpoint>, SourceFailure> {
        match self {
            Place::Document => from_document(pipeline, document),
            Place::Elsewhere(store) => Ok(store.load(pipeline).await?),
        }
    }
}

impl Place {
    /// As [`load`](Self::load), and makes nothing that is missing.
    pub async fn peek(&self, pipeline: &str, document: &Document) -> Result<Option<Checkpoint>, SourceFailure> {
        match self {
            Place::Document => from_document(pipeline, document),
            Place::Elsewhere(store) => Ok(store.peek(pipeline).await?),
        }
    }

    /// Looks whether a place outside of the source could be written.
    pub async fn check_writable(&self) -> Result<(), SourceFailure> {
        match self {
            Place::Document => Ok(()),
            Place::Elsewhere(store) => Ok(store.check_writable().await?),
        }
    }
}

fn from_document(pipeline: &str, document: &Document) -> Result<Option<Checkpoint>, SourceFailure> {
    let Ok(position) = document.get_str("position") else { return Ok(None) };
    let text = |name: &str| document.get_str(name).unwrap_or_default().to_owned();
    let format = match document.get("format").and_then(number) {
        Some(format) => u32::try_from(format).unwrap_or(u32::MAX),
        None => FORMAT,
    };
    Checkpoint::check_format(pipeline, format)?;
    Ok(Some(Checkpoint {
        format,
        pipeline: pipeline.to_owned(),
        source: text("source"),
        server: text("server"),
        position: position.to_owned(),
        file: text("watched"),
        snapshot: SnapshotState::parse(&text("snapshot")),
    }))
}

fn number(value: &Bson) -> Option<i64> {
    value.as_i64().or_else(|| value.as_i32().map(i64::from)).or_else(|| value.as_f64().map(|number| number as i64))
}

/// What the server is called in a checkpoint: its set, and the mark that the pipeline's document bears there.
pub fn identity(set: &str, document: &Document) -> String {
    format!("{set}/{}", document.get_str("incarnation").unwrap_or("?"))
}

/// The place, for people.
pub fn described(database: &str) -> String {
    format!("{database}.{}", lease::COLLECTION)
}
