//! Whether a pipeline has delivered all that was committed before a place in the log, asked from outside of it.
//!
//! A stored position always lacks the transaction that stored it, and others that hold nothing for the pipeline. So the log
//! behind it is read, up to the place: if no outbox row comes, there was nothing to deliver.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::checkpoint::{self, Place};
use super::conninfo::ConnInfo;
use super::dump::{Entry, ReplicaId};
use super::judge::{self, Standing};
use super::log::Log;
use super::position::BinlogPosition;
use super::reader::{self, Reader};
use super::server::Server;
use super::tables::{self, Tables};
use crate::config::{MySqlSettings, PipelineSettings};
use crate::event::{Chunk, CommitId, Projection};
use crate::position::Position;
use crate::retention::fence::behind;
use crate::source::{Settled, SourceFailure, SourceStats, unpositioned};

/// How long the log behind the position is read.
const PATIENCE: Duration = Duration::from_secs(10);

pub async fn settled(
    settings: &MySqlSettings,
    of: &PipelineSettings,
    projection: &Projection,
    upto: &BinlogPosition,
) -> Result<Settled, SourceFailure> {
    let pipeline = of.name.as_str();
    let info = super::conninfo(settings)?;
    let database = checkpoint::database(&info)?.to_owned();
    let mut session = super::connect(settings, &info).await?;
    let info = ConnInfo { hosts: vec![session.host().clone()], ..info };
    let place = Place::open(&settings.checkpoint, &of.kafka)?;
    let stored = match place.is_table() && !checkpoint::table_exists(&mut session, &database).await? {
        true => None,
        false => place.load(&mut session, pipeline).await?,
    };
    let Some(stored) = stored else { return Err(unpositioned(pipeline)) };
    if stored.snapshot.is_under_way() {
        return Ok(Settled::snapshot_pending(pipeline));
    }
    let server = Server::ask(&mut session).await?;
    let position = judge::position(&stored, &server)?;
    if position.covers(upto) {
        return Ok(Settled::Yes);
    }
    let reach = server.reach(&mut session).await?;
    match judge::standing(pipeline, &stored, &position, &server, &reach) {
        Standing::Fits => {}
        Standing::Behind { what } => return Ok(Settled::No(what)),
        Standing::Lost { failure, .. } => return Err(failure),
    }
    let (catalog, missing) = tables::find(&mut session, &database, &settings.tables).await?;
    super::refuse(judge::missing_tables(&missing, &database))?;
    let (mariadb, address) = (session.is_mariadb(), session.describe());
    session.close().await;
    let names = catalog.into_iter().map(|table| (table.schema, table.name)).collect();
    let tables = Tables::new(names, projection.clone(), settings.uuid_columns.clone(), info.clone(), mariadb);
    let log = Log::new(tables, position.clone(), mariadb, server.checksum, Arc::<SourceStats>::default());
    let heartbeat = Duration::from_secs(1);
    let entry = Entry { info, replica: ReplicaId::random(), from: position.clone(), heartbeat, follow: true };
    let mut reader = Reader::new(reader::Parts { entry, log, snapshot: None, stall_timeout: PATIENCE, address });
    let no = Settled::No(behind(pipeline, &position.to_string(), &Position::Binlog(Box::new(upto.clone()))));
    let deadline = Instant::now() + PATIENCE;
    let mut chunk = Chunk::default();
    reader.enter().await?;
    loop {
        match tokio::time::timeout_at(deadline, reader.next(&mut chunk)).await {
            // There is more of it than one would read to find out.
            Err(_) => return Ok(no),
            Ok(read) => read?,
        }
        let before = |commit: &CommitId| match commit {
            // Whether it is in a set of others cannot be told.
            CommitId::MySql { tagged: true, .. } => true,
            commit => upto.has(commit),
        };
        if chunk.events().iter().any(|event| before(&chunk.commit(event).id)) {
            return Ok(no);
        }
        if let Some(Position::Binlog(end)) = chunk.end.as_ref().map(|end| &end.position)
            && end.covers(upto)
        {
            return Ok(Settled::Yes);
        }
    }
}
