//! What stands in the way of a run, each with its remedy. `run`, `check` and `init` all judge by these.

use std::sync::Arc;

use mongodb::Client;

use super::Memory;
use super::server::{self, Server};
use super::token::{ClusterTime, StreamPosition};
use crate::checkpoint::Checkpoint;
use crate::source::SourceFailure;

pub const MAKE_REPLICA_SET: &str = "change streams need a replica set, and one member is enough: start mongod with \
                                    --replSet rs0, then run rs.initiate() once in mongosh";

fn not_ready(what: impl Into<String>, remedy: impl Into<String>) -> SourceFailure {
    SourceFailure::NotReady { what: what.into(), remedy: remedy.into() }
}

/// What a run cannot do without.
pub fn server(server: &Server) -> Vec<SourceFailure> {
    let mut wrong = Vec::new();
    if server.set.is_none() && !server.sharded {
        wrong.push(not_ready(format!("{} is not a member of a replica set", server.address), MAKE_REPLICA_SET));
    }
    if server.is_old() {
        let what = format!("the server is MongoDB {}", server.version_text());
        wrong.push(not_ready(what, "outboxd needs MongoDB 4.4 or newer: upgrade the server"));
    }
    wrong
}

/// Whether the server holds back what outboxd needs for the sake of older members.
pub fn compatibility(version: &str) -> Result<(), SourceFailure> {
    let known = version.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    match known {
        Some(known) if known < (4_u32, 4_u32) => Err(not_ready(
            format!("featureCompatibilityVersion is {version}"),
            "db.adminCommand({setFeatureCompatibilityVersion: \"4.4\"}) or newer",
        )),
        _ => Ok(()),
    }
}

/// A checkpoint as a position of this server.
pub fn position(stored: &Checkpoint, identity: &str) -> Result<StreamPosition, SourceFailure> {
    let pipeline = &stored.pipeline;
    if stored.source != "mongodb" {
        return Err(not_ready(
            format!("the checkpoint of pipeline `{pipeline}` is of a {} source, and this is MongoDB", stored.source),
            "give this pipeline another --name, or remove the checkpoint if the old source is gone for good",
        ));
    }
    if stored.server != identity {
        return Err(SourceFailure::PositionLost {
            what: format!(
                "the checkpoint of pipeline `{pipeline}` is of another server: it is of {}, and this one is {identity}",
                stored.server
            ),
            remedy: "connect to the server it is of; or give this pipeline another --name; or, if the collection \
                     outboxd_checkpoint was merely removed, find out what is missing and go on with --start"
                .to_owned(),
        });
    }
    let token = stored.position.parse();
    let token = token.map_err(|error: super::token::ParseTokenError| {
        not_ready(format!("the checkpoint of pipeline `{pipeline}`: {error}"), "correct its position")
    })?;
    Ok(StreamPosition::after(token))
}

/// The stored position is older than the one that was stored last: so is the server that holds it.
pub fn went_back(pipeline: &str, found: &StreamPosition, written: &StreamPosition) -> SourceFailure {
    SourceFailure::PositionLost {
        what: format!(
            "the position of pipeline `{pipeline}` is lost: the checkpoint went back, so the server was restored from a \
             copy\n  stored by this process: {} ({written})\n  found now:              {} ({found})",
            when(written.time),
            when(found.time)
        ),
        remedy: "find out what was committed after the copy and see that it is delivered; the next start goes on from \
                 the restored checkpoint"
            .to_owned(),
    }
}

/// Somebody removed the checkpoint of a pipeline that had one.
pub fn removed(pipeline: &str) -> SourceFailure {
    SourceFailure::PositionLost {
        what: format!(
            "the position of pipeline `{pipeline}` is lost: its checkpoint was there a moment ago, and is gone"
        ),
        remedy: "an instance that was delivering goes on by itself; else find out what was delivered last, and go on \
                 with --start"
            .to_owned(),
    }
}

/// Tells what is missing when the server no longer has what follows a position.
#[derive(Clone)]
pub struct Loss {
    pub pipeline: String,
    pub memory: Arc<Memory>,
}

impl Loss {
    pub async fn report(&self, client: &Client, position: &StreamPosition, why: &str) -> SourceFailure {
        let first = match server::oplog(client).await {
            Ok(oplog) => when(oplog.first),
            Err(failure) => format!("unknown ({failure})"),
        };
        let pipeline = &self.pipeline;
        let confirmed = self.memory.confirmed().unwrap_or_else(|| position.clone());
        // What was read and is under way is still seen through.
        let read = match confirmed == *position {
            true => String::new(),
            false => format!("\n  read, under way:   {} ({position})", when(position.time)),
        };
        SourceFailure::PositionLost {
            what: format!(
                "the position of pipeline `{pipeline}` is lost: the oplog no longer has what follows it\n  last \
                 confirmed:    {} ({confirmed}){read}\n  the oplog begins:  {first}\n  the server says:   {why}",
                when(confirmed.time)
            ),
            remedy: format!(
                "find out what was committed in between and see that it is delivered; then go on with --start now (or \
                 earliest) after db.outboxd_checkpoint.deleteOne({{_id: \"{pipeline}\"}}), or under another --name; \
                 a larger oplog (replSetResizeOplog) lets outboxd be away for longer"
            ),
        }
    }
}

/// A cluster time for people.
pub fn when(time: ClusterTime) -> String {
    let mut date = Vec::new();
    super::extended_json::write_date(i64::from(time.seconds) * 1000, &mut date);
    format!("{} ({time})", String::from_utf8_lossy(&date))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_compatibility_older_than_4_4_is_refused() {
        for old in ["3.6", "4.0", "4.2"] {
            let refused = compatibility(old).unwrap_err();
            let SourceFailure::NotReady { what, remedy } = refused else { panic!("{old}: {refused:?}") };
            assert!(what.ends_with(old) && remedy.contains("setFeatureCompatibilityVersion"), "{what}: {remedy}");
        }
        for fine in ["4.4", "5.0", "6.0", "7.0", "8.0", "10.2", "unknown", ""] {
            assert!(compatibility(fine).is_ok(), "{fine}");
        }
    }
}
