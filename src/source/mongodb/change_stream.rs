//! The change stream: which operations are asked for, and the batches that come.
//!
//! ```text
//!   aggregate { $changeStream, $match, $project [, $changeStreamSplitLargeEvent] }
//!       reply  cursor { firstBatch|nextBatch [ event … ], postBatchResumeToken }, operationTime
//!   getMore, waiting a second for news
//! ```
//!
//! The cursor is asked for through a plain command, so that a reply is had whole, as the bytes that came. While one
//! reply is worked on the server makes the next.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use mongodb::bson::{Bson, Document, RawArray, RawDocument, Timestamp, doc};
use mongodb::options::SelectionCriteria;
use mongodb::raw_batch_cursor::{RawBatch, RawBatchCursor};
use mongodb::{Client, Database};
use tokio::task::JoinHandle;

use super::lease;
use super::server_error::{self, Doing};
use super::token::{ClusterTime, ResumeToken};
use crate::source::{SourceFailure, audit};

/// How many events one reply has at most. The server also ends it at 16 MB. Three replies are in memory at a time: one that
/// is worked on, one that has come, and one that is coming.
pub const BATCH: u32 = 2500;

/// How long the server waits for news before it answers that there are none.
const AWAIT: Duration = Duration::from_secs(1);

/// A collection's name that stands for all of its database.
pub const ALL: &str = "*";

/// What outboxd keeps in the source's database.
const OWN: [&str; 2] = [lease::COLLECTION, audit::NAME];

/// Whether a collection belongs to all of its database: what outboxd keeps there is no outbox, and the server shows the
/// changes of its own collections to nobody.
pub fn is_everyones(collection: &str) -> bool {
    !OWN.contains(&collection) && !collection.starts_with("system.")
}

/// What is watched: one collection, several of one database or all of it, or several databases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Database and collection.
    namespaces: Vec<(String, String)>,
}

impl Scope {
    pub fn new(named: Vec<(String, String)>) -> Self {
        let mut namespaces = Vec::new();
        for namespace in named {
            if !namespaces.contains(&namespace) {
                namespaces.push(namespace);
            }
        }
        Scope { namespaces }
    }

    /// As they were named, with [`ALL`] among the collections.
    pub fn namespaces(&self) -> &[(String, String)] {
        &self.namespaces
    }

    /// Which of the namespaces this is in.
    pub fn index(&self, database: &str, collection: &str) -> Option<usize> {
        let covers = |name: &str| name == collection || name == ALL && is_everyones(collection);
        self.namespaces.iter().position(|(db, name)| db == database && covers(name))
    }

    fn one_database(&self) -> Option<&str> {
        let (first, _) = self.namespaces.first()?;
        self.namespaces.iter().all(|(database, _)| database == first).then_some(first)
    }

    /// The database to send the command to, and what it watches there.
    fn target(&self) -> (&str, Bson, Document) {
        match (self.namespaces.as_slice(), self.one_database()) {
            ([(database, collection)], _) if collection != ALL => (database, collection.as_str().into(), doc! {}),
            (_, Some(database)) => (database, 1.into(), doc! {}),
            _ => ("admin", 1.into(), doc! { "allChangesForCluster": true }),
        }
    }

    /// Only what is about the outboxes.
    fn filter(&self) -> Document {
        let wanted = doc! { "$in": ["insert", "drop", "rename", "dropDatabase", "invalidate"] };
        // The server's own collections are in no stream, and need not be left out.
        let all = doc! { "$nin": OWN.to_vec() };
        match self.namespaces.as_slice() {
            [(_, collection)] if collection == ALL => return doc! { "operationType": wanted, "ns.coll": all },
            [_] => return doc! { "operationType": wanted },
            _ => {}
        }
        let named = self.namespaces.iter().map(|(db, coll)| match coll.as_str() {
            ALL => doc! { "ns.db": db, "ns.coll": all.clone() },
            coll => doc! { "ns.db": db, "ns.coll": coll },
        });
        let mut any: Vec<Document> = named.collect();
        any.push(doc! { "operationType": { "$in": ["dropDatabase", "invalidate"] } });
        doc! { "operationType": wanted, "$or": any }
    }
}

/// `shop.outbox`, or several of them; the same for the same, in whatever order they were named.
impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut sorted: Vec<_> = self.namespaces.iter().collect();
        sorted.sort();
        for (at, (database, collection)) in sorted.into_iter().enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            write!(f, "{comma}{database}.{collection}")?;
        }
        Ok(())
    }
}

/// Where a stream is entered.
#[derive(Clone, Debug)]
pub enum Entry {
    Now,
    After(ResumeToken),
    At(ClusterTime),
}

/// Opens streams.
#[derive(Clone)]
pub struct Watch {
    pub client: Client,
    pub scope: Scope,
    /// The URL's read preference.
    pub criteria: Option<SelectionCriteria>,
    /// The server can cut events of more than 16 MB into fragments.
    pub splits: bool,
}

impl Watch {
    fn pipeline(&self, entry: &Entry) -> Vec<Document> {
        let (_, _, mut stream) = self.scope.target();
        match entry {
            Entry::Now => {}
            // It takes what `resumeAfter` takes, and the token of an invalidated stream too.
            Entry::After(token) => {
                stream.insert("startAfter", token.to_document());
            }
            Entry::At(time) => {
                stream.insert("startAtOperationTime", Timestamp::from(*time));
            }
        }
        // The document is taken whole: picking its fields costs the server more than sending them.
        let wanted = doc! {
            "operationType": 1, "clusterTime": 1, "wallTime": 1, "ns": 1, "to": 1, "splitEvent": 1, "fullDocument": 1,
        };
        let mut stages =
            vec![doc! { "$changeStream": stream }, doc! { "$match": self.scope.filter() }, doc! { "$project": wanted }];
        if self.splits {
            stages.push(doc! { "$changeStreamSplitLargeEvent": {} });
        }
        stages
    }

    async fn cursor(&self, entry: &Entry, first: u32) -> Result<RawBatchCursor, SourceFailure> {
        let (database, collection, _) = self.scope.target();
        let database: Database = self.client.database(database);
        let command = doc! {
            "aggregate": collection,
            "pipeline": self.pipeline(entry),
            "cursor": { "batchSize": first },
            "readConcern": { "level": "majority" },
        };
        let mut asked = database.run_cursor_command(command).batch_size(BATCH).max_time(AWAIT);
        if let Some(criteria) = &self.criteria {
            asked = asked.selection_criteria(criteria.clone());
        }
        let doing = Doing::Watching(self.scope.to_string());
        asked.batch().await.map_err(|error| server_error::classify(&error, &doing))
    }

    /// Opens the stream and reads on at once.
    pub async fn open(&self, entry: &Entry) -> Result<ChangeStream, SourceFailure> {
        // The first reply comes without waiting, so whatever is wrong is known then.
        let cursor = self.cursor(entry, BATCH).await?;
        Ok(ChangeStream { asked: Some(ask(cursor)), doing: Doing::Watching(self.scope.to_string()) })
    }

    /// The position at which a stream that is entered there would begin.
    pub async fn position(&self, entry: &Entry) -> Result<ResumeToken, SourceFailure> {
        if !matches!(entry, Entry::Now) {
            // Asked for no event, the server does not look whether it still has what follows.
            drop(self.cursor(entry, 1).await?);
        }
        let cursor = self.cursor(entry, 0).await?;
        let mut stream = ChangeStream { asked: Some(ask(cursor)), doing: Doing::Watching(self.scope.to_string()) };
        let first = stream.next(AWAIT * 30).await?;
        first.and_then(|batch| batch.position()).ok_or_else(|| SourceFailure::NotReady {
            what: "the server gives no resume token with its replies".to_owned(),
            remedy: "outboxd needs MongoDB 4.4 or newer".to_owned(),
        })
    }
}

type Asked = JoinHandle<(RawBatchCursor, Option<Result<RawBatch, mongodb::error::Error>>)>;

fn ask(mut cursor: RawBatchCursor) -> Asked {
    tokio::spawn(async move {
        let batch = cursor.next().await;
        (cursor, batch)
    })
}

/// A stream that is being read.
pub struct ChangeStream {
    /// The reply that is being waited for; none once the stream has ended.
    asked: Option<Asked>,
    doing: Doing,
}

impl ChangeStream {
    /// The next reply; `None` when the server has ended the stream. May be cancelled without losing a reply.
    pub async fn next(&mut self, patience: Duration) -> Result<Option<Batch>, SourceFailure> {
        let Some(asked) = &mut self.asked else { return Ok(None) };
        let Ok(answered) = tokio::time::timeout(patience, &mut *asked).await else {
            let silent = patience.as_secs();
            return Err(SourceFailure::transient(format!(
                "no word from the server for {silent} s, not even of no news"
            )));
        };
        self.asked = None;
        let (cursor, batch) =
            answered.map_err(|died| SourceFailure::transient(format!("reading the change stream died: {died}")))?;
        match batch {
            None => Ok(None),
            Some(Err(error)) => Err(server_error::classify(&error, &self.doing)),
            Some(Ok(batch)) => {
                self.asked = Some(ask(cursor));
                Ok(Some(Batch::from(batch)))
            }
        }
    }
}

impl Drop for ChangeStream {
    fn drop(&mut self) {
        if let Some(asked) = &self.asked {
            asked.abort();
        }
    }
}

struct Reply(RawBatch);

impl AsRef<[u8]> for Reply {
    fn as_ref(&self) -> &[u8] {
        self.0.as_raw_document().as_bytes()
    }
}

/// One reply of the server.
pub struct Batch(Bytes);

/// Without a copy.
impl From<RawBatch> for Batch {
    fn from(batch: RawBatch) -> Self {
        Batch(Bytes::from_owner(Reply(batch)))
    }
}

impl Batch {
    pub fn new(reply: Bytes) -> Self {
        Batch(reply)
    }

    /// The bytes that events point into.
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }

    fn reply(&self) -> Option<&RawDocument> {
        RawDocument::from_bytes(&self.0[..]).ok()
    }

    pub fn documents(&self) -> Option<&RawArray> {
        let cursor = self.reply()?.get_document("cursor").ok()?;
        cursor.get_array("nextBatch").or_else(|_| cursor.get_array("firstBatch")).ok()
    }

    /// Where the stream stands after this reply.
    pub fn position(&self) -> Option<ResumeToken> {
        let cursor = self.reply()?.get_document("cursor").ok()?;
        ResumeToken::from_raw(cursor.get_document("postBatchResumeToken").ok()?)
    }

    /// The moment that a snapshot is read at.
    pub fn snapshot_time(&self) -> Option<Timestamp> {
        self.reply()?.get_document("cursor").ok()?.get_timestamp("atClusterTime").ok()
    }

    /// The server's clock when it answered.
    pub fn server_time(&self) -> Option<ClusterTime> {
        self.reply()?.get_timestamp("operationTime").ok().map(ClusterTime::from)
    }
}
