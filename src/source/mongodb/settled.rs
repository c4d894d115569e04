//! Whether a pipeline has delivered all that was committed before a moment, asked from outside of it.
//!
//! A stored token stays where it is while nobody runs the pipeline, whatever else is written. So the stream behind it is
//! read, up to the moment: if no document comes, there was nothing to deliver.

use std::time::Duration;

use mongodb::bson::RawBsonRef;
use tokio::time::Instant;

use super::checkpoint::{self, Place};
use super::server::{self, Server};
use super::token::{ClusterTime, StreamPosition};
use super::{entry, judge, lease, watch_of};
use crate::config::{MongoSettings, PipelineSettings};
use crate::position::Position;
use crate::retention::fence::behind;
use crate::source::{Settled, SourceFailure, unpositioned};

/// How long the stream behind the position is read.
const PATIENCE: Duration = Duration::from_secs(15);

pub async fn settled(
    settings: &MongoSettings,
    of: &PipelineSettings,
    upto: &StreamPosition,
) -> Result<Settled, SourceFailure> {
    let pipeline = of.name.as_str();
    let connection = server::connect(settings).await?;
    let server = Server::ask(&connection).await?;
    let document = lease::document(&connection.database, pipeline).await?.unwrap_or_default();
    let stored = Place::open(&settings.checkpoint, &of.kafka)?.load(pipeline, &document).await?;
    let Some(stored) = stored else { return Err(unpositioned(pipeline)) };
    if stored.snapshot.is_under_way() {
        return Ok(Settled::snapshot_pending(pipeline));
    }
    let position = judge::position(&stored, &checkpoint::identity(server.name(), &document))?;
    if position.covers(upto) {
        return Ok(Settled::Yes);
    }
    let watch = watch_of(settings, &connection, &server);
    let no = Settled::No(behind(pipeline, &judge::when(position.time), &Position::Mongo(Box::new(upto.clone()))));
    let mut stream = match watch.open(&entry(&position, Some(&stored), &watch.scope)).await {
        Ok(stream) => stream,
        Err(SourceFailure::PositionLost { what, .. }) => {
            return Err(SourceFailure::PositionLost {
                what: format!("the position of pipeline `{pipeline}` is lost: {what}"),
                remedy: "`outboxd run` tells what is missing; nothing was deleted".to_owned(),
            });
        }
        Err(failure) => return Err(failure),
    };
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let Some(batch) = stream.next(PATIENCE).await? else { return Ok(no) };
        let documents = batch.documents().into_iter().flatten().flatten();
        let (mut events, mut inserts) = (0, 0);
        for event in documents {
            events += 1;
            let RawBsonRef::Document(event) = event else { return Ok(no) };
            let later = event.get_timestamp("clusterTime").is_ok_and(|time| ClusterTime::from(time) > upto.time);
            let is_insert = event.get_str("operationType").map_or(true, |operation| operation == "insert");
            inserts += usize::from(is_insert && !later);
        }
        if inserts > 0 {
            return Ok(no);
        }
        // With nothing at hand the server has looked at all that there is of this time.
        let Some(token) = batch.position() else { continue };
        let reached = StreamPosition { token: None, whole: events == 0, ..StreamPosition::after(token) };
        if reached.covers(upto) {
            return Ok(Settled::Yes);
        }
    }
    Ok(no)
}
