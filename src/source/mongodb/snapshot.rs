//! `--snapshot existing`: the documents that are in the collections when the stream is first entered.
//!
//! The stream's position is taken first, and the documents are read as they are at that cluster time or later, so every
//! document is in the snapshot or in the stream after it. What is committed between the two is delivered twice. After a
//! crash a fresh snapshot is read, and the stream from the same place as before.
//!
//! After a lost position it is the documents that are not marked, in the layout's order, instead of all.
//!
//! All are read as they were at one time: of two commits during the reading the later one must not be met alone. A
//! server keeps a time for five minutes only, so they are sorted without an index, for which it reads all of them first.

use std::sync::Arc;

use futures_util::StreamExt as _;
use mongodb::Client;
use mongodb::bson::{Document, RawDocument, Timestamp, doc};
use mongodb::options::SelectionCriteria;
use mongodb::raw_batch_cursor::RawBatchCursor;

use super::backfill;
use super::change_stream::{ALL, Batch, Scope};
use super::documents::Documents;
use super::server;
use super::server_error::{self, Doing};
use super::token::{ClusterTime, StreamPosition};
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Micros, Projection, Want};
use crate::position::Position;
use crate::source::poll::View;
use crate::source::poll::view::by_version;
use crate::source::{SourceFailure, SourceStats};

const BATCH: u32 = 1000;

/// What is read, and where the stream goes on after it.
pub struct Wanted {
    pub client: Client,
    pub scope: Scope,
    pub criteria: Option<SelectionCriteria>,
    /// Servers before 5.0 cannot; there, what is committed during the reading may be met out of order.
    pub point_in_time: bool,
    /// The layout's timestamp, which orders the documents.
    pub order: Option<String>,
    /// How documents that are not marked are told, and where they are counted; `None`: all are read.
    pub only: Option<(Arc<View>, Arc<SourceStats>)>,
    /// Everything up to this time is in the snapshot.
    pub from: ClusterTime,
    /// Where the stream goes on.
    pub end: StreamPosition,
}

pub struct SnapshotReader {
    wanted: Wanted,
    /// What is there to be read, once that was looked up.
    namespaces: Option<Vec<(String, String)>>,
    /// The collection being read, and its cursor.
    current: usize,
    cursor: Option<RawBatchCursor>,
    /// The moment that the first collection was read at, and so all are.
    at: Option<Timestamp>,
}

/// The field by which documents are put in order.
pub fn order_of(projection: &Projection) -> Option<String> {
    projection.columns().find(|(_, _, want)| *want == Want::Time).map(|(_, name, _)| name.to_owned())
}

impl SnapshotReader {
    pub fn new(wanted: Wanted) -> Self {
        SnapshotReader { wanted, namespaces: None, current: 0, cursor: None, at: None }
    }

    /// Fills the chunk with documents; true with the last one, which has the position to go on from.
    pub async fn next(
        &mut self,
        chunk: &mut Chunk,
        documents: &Documents,
        width: usize,
    ) -> Result<bool, SourceFailure> {
        let namespaces = match &self.namespaces {
            Some(known) => known,
            None => self.namespaces.insert(namespaces(&self.wanted.client, &self.wanted.scope).await?),
        };
        loop {
            chunk.reset(width);
            let Some((database, collection)) = namespaces.get(self.current) else {
                let position = StreamPosition { eventful: 1, ..self.wanted.end.clone() };
                let position = Position::Mongo(Box::new(position));
                chunk.end = Some(CommitEnd { position, committed_at: Micros::now() });
                return Ok(true);
            };
            let doing = Doing::Reading(format!("{database}.{collection}"));
            if self.cursor.is_none() {
                self.cursor = Some(self.wanted.find(database, collection, self.at).await?);
            }
            let Some(cursor) = &mut self.cursor else { continue };
            let batch = match cursor.next().await {
                None => {
                    (self.cursor, self.current) = (None, self.current + 1);
                    continue;
                }
                Some(batch) => batch.map_err(|error| server_error::classify(&error, &doing))?,
            };
            let batch = Batch::from(batch);
            self.at = self.at.or_else(|| batch.snapshot_time());
            let reply = batch.bytes();
            let Some(found) = batch.documents() else { continue };
            chunk.begin_commit(Commit { id: CommitId::Snapshot, committed_at: Micros::now() });
            chunk.catching_up = true;
            let mut read: Vec<&RawDocument> = Vec::new();
            for document in found {
                let unreadable = |why: String| SourceFailure::Undecodable {
                    what: format!("a document of {database}.{collection} cannot be read: {why}"),
                    remedy: "nothing was skipped; please report this with the server's version".to_owned(),
                };
                let document = document.map_err(|error| unreadable(error.to_string()))?;
                let document = document.as_document().ok_or_else(|| unreadable("it is no document".to_owned()))?;
                read.push(document);
            }
            if let Some((view, stats)) = &self.wanted.only {
                let versions: Vec<_> = read.iter().filter_map(|document| backfill::version(view, document)).collect();
                if versions.len() == read.len() {
                    read = by_version(&versions).into_iter().map(|at| read[at]).collect();
                }
                stats.gap.read(read.len());
            }
            for document in read {
                documents.add(document, self.current as u32, Some(reply), chunk);
            }
            chunk.attach_raw(reply.clone());
            if !chunk.events().is_empty() {
                return Ok(false);
            }
        }
    }
}

/// The collections to read, with those that are there in place of all. Whatever comes later is in the stream.
pub async fn namespaces(client: &Client, scope: &Scope) -> Result<Vec<(String, String)>, SourceFailure> {
    let mut found: Vec<(String, String)> = Vec::new();
    for (database, collection) in scope.namespaces() {
        let names = match collection.as_str() {
            ALL => server::collections(&client.database(database)).await?,
            name => vec![name.to_owned()],
        };
        for name in names {
            let namespace = (database.clone(), name);
            if !found.contains(&namespace) {
                found.push(namespace);
            }
        }
    }
    Ok(found)
}

impl Wanted {
    async fn find(
        &self,
        database: &str,
        collection: &str,
        at: Option<Timestamp>,
    ) -> Result<RawBatchCursor, SourceFailure> {
        let mut sort = Document::new();
        if let Some(field) = &self.order {
            sort.insert(field, 1);
        }
        sort.insert("_id", 1);
        let only = self.only.as_ref().map(|(view, _)| &**view);
        let sort = only.and_then(backfill::order).unwrap_or(sort);
        let filter = only.map(backfill::filter).unwrap_or_default();
        let concern = match (self.point_in_time, at) {
            (true, Some(at)) => doc! { "level": "snapshot", "atClusterTime": at },
            (true, None) => doc! { "level": "snapshot", "afterClusterTime": Timestamp::from(self.from) },
            (false, _) => doc! { "level": "majority", "afterClusterTime": Timestamp::from(self.from) },
        };
        let command = doc! {
            "find": collection,
            "filter": filter,
            "sort": sort,
            "hint": { "$natural": 1 },
            "batchSize": BATCH,
            "allowDiskUse": true,
            // While the broker is away nothing is asked for, and the server must not forget.
            "noCursorTimeout": true,
            "readConcern": concern,
        };
        let database_of = self.client.database(database);
        let mut asked = database_of.run_cursor_command(command).batch_size(BATCH);
        if let Some(criteria) = &self.criteria {
            asked = asked.selection_criteria(criteria.clone());
        }
        let doing = Doing::Reading(format!("{database}.{collection}"));
        asked.batch().await.map_err(|error| server_error::classify(&error, &doing))
    }
}
