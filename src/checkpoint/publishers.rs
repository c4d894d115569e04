//! Where each publisher of a pipeline stands, beside the pipeline's own position.
//!
//! The source is confirmed at the minimum over the publishers; these notes say how far each of them is beyond it, so
//! that a restart repeats to each only what that one may have missed, and which of them are paused or given up. An old
//! note costs repetitions, never an event: what it says was acknowledged.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Checkpoint, CheckpointError};

const FORMAT: u32 = 1;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    #[default]
    Active,
    /// By a person, until a person resumes it.
    Paused,
    /// It kept too much log: its position was let go.
    Failed,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublisherNote {
    pub state: Standing,
    /// Everything up to here was acknowledged; as `status` prints it.
    #[serde(default)]
    pub position: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublisherNotes {
    pub format: u32,
    /// The history that the positions are of.
    #[serde(default)]
    pub lineage: String,
    pub publishers: BTreeMap<String, PublisherNote>,
}

impl Default for PublisherNotes {
    fn default() -> Self {
        PublisherNotes { format: FORMAT, lineage: String::new(), publishers: BTreeMap::new() }
    }
}

impl PublisherNotes {
    pub fn from_json(pipeline: &str, json: &str) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Form {
            format: u32,
        }
        let malformed = |error: serde_json::Error| {
            CheckpointError::Refused {
            what: format!("the notes on the publishers of pipeline `{pipeline}` cannot be read: {error}"),
            remedy: "remove them from outboxd_publishers (MySQL, MongoDB: outboxd_checkpoint): some events are then repeated"
                .to_owned(),
        }
        };
        let Form { format } = serde_json::from_str(json).map_err(malformed)?;
        Checkpoint::check_format(pipeline, format)?;
        serde_json::from_str(json).map_err(malformed)
    }

    /// Forgets positions that are of another history; who is paused stays so.
    pub fn of_lineage(mut self, lineage: &str, begun: bool) -> Self {
        if begun || self.lineage != lineage {
            for note in self.publishers.values_mut().filter(|note| note.state != Standing::Failed) {
                note.position = None;
            }
        }
        lineage.clone_into(&mut self.lineage);
        self
    }

    pub fn to_json(&self) -> String {
        // Strings and numbers have no way to fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_form_is_read_for_good_and_a_newer_one_is_refused() {
        let first = r#"{"format":1,"publishers":{"audit":{"state":"paused","position":"0/16B3748"},
                        "kafka":{"state":"failed","position":null,"reason":"it kept 2 GiB"}}}"#;
        let read = PublisherNotes::from_json("shop", first).unwrap();
        assert_eq!(read.publishers["audit"].state, Standing::Paused);
        assert_eq!(read.publishers["kafka"].reason, "it kept 2 GiB");
        assert_eq!(PublisherNotes::from_json("shop", &read.to_json()).unwrap(), read);
        let newer = PublisherNotes::from_json("shop", r#"{"format":9,"else":1}"#).unwrap_err().to_string();
        assert!(newer.contains("format 9"), "{newer}");
    }
}
