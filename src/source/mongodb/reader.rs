//! The reading half: a reply of the change stream becomes a chunk.
//!
//! Every event's token is resumable and nothing marks the end of a transaction, so a reply is delivered as it comes. A
//! reply without events still moves the position: the server has looked that far.
//!
//! ```text
//!   { _id: token, operationType: "insert", clusterTime, wallTime, ns: { db, coll }, fullDocument: { … } }
//!   { _id: token, operationType: "drop"|"rename"|"dropDatabase", ns, to }     said, and nothing more
//!   { _id: token, operationType: "invalidate" }                               the stream ends: a new one goes on after it
//!   { …, splitEvent: { fragment: 1, of: 2 } }                                 an event of more than 16 MB, in pieces
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mongodb::bson::error::Error;
use mongodb::bson::{RawBsonRef, RawDocument, RawDocumentBuf};

use super::change_stream::{BATCH, Batch, ChangeStream, Entry, Scope, Watch};
use super::documents::Documents;
use super::judge;
use super::lease::Validity;
use super::snapshot::SnapshotReader;
use super::token::{ClusterTime, ResumeToken, StreamPosition};
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Micros};
use crate::failpoints;
use crate::position::Position;
use crate::source::{SourceFailure, SourceStats};

/// Pauses before a stream that broke is opened again.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A stream that cannot be opened for this long is trouble to be shown, and to begin anew for.
const LONGEST_BREAK: Duration = Duration::from_secs(15);

/// A reply of this many bytes is full, however few its events: more is at hand.
const FULL_REPLY: usize = 4 << 20;

pub struct Reader {
    watch: Watch,
    /// `None` until it is entered, and while it is broken.
    stream: Option<ChangeStream>,
    pause: Duration,
    /// Since when nothing was read.
    broken_since: Option<Instant>,
    /// What was read last.
    position: StreamPosition,
    log: Log,
    snapshot: Option<SnapshotReader>,
    validity: Arc<Validity>,
    lost: judge::Loss,
    stall_timeout: Duration,
    stats: Arc<SourceStats>,
}

/// Everything a reader is made of.
pub struct Parts {
    pub watch: Watch,
    pub stream: Option<ChangeStream>,
    pub position: StreamPosition,
    pub documents: Documents,
    pub width: usize,
    pub snapshot: Option<SnapshotReader>,
    pub validity: Arc<Validity>,
    pub lost: judge::Loss,
    pub stall_timeout: Duration,
    pub stats: Arc<SourceStats>,
}

impl Reader {
    pub fn new(parts: Parts) -> Self {
        Reader {
            log: Log {
                eventful: parts.position.eventful,
                ..Log::new(parts.watch.scope.clone(), parts.documents, parts.width)
            },
            watch: parts.watch,
            stream: parts.stream,
            pause: FIRST_PAUSE,
            broken_since: None,
            position: parts.position,
            snapshot: parts.snapshot,
            validity: parts.validity,
            lost: parts.lost,
            stall_timeout: parts.stall_timeout,
            stats: parts.stats,
        }
    }

    /// Fills the chunk with what comes next. May be cancelled: it waits only before anything is decoded.
    pub async fn next(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        if let Some(snapshot) = &mut self.snapshot {
            if snapshot.next(chunk, &self.log.documents, self.log.width).await? {
                self.snapshot = None;
            }
            return self.still_ours();
        }
        loop {
            let Some(batch) = self.batch().await? else { continue };
            self.still_ours()?;
            if let Some(time) = batch.server_time() {
                self.stats.server_position.store(time.as_gauge(), Ordering::Relaxed);
            }
            let progress = self.log.read(&batch, &self.position, chunk)?;
            if let Some(position) = progress {
                chunk.end = Some(CommitEnd {
                    position: Position::Mongo(Box::new(position.clone())),
                    committed_at: self.log.last,
                });
                self.position = position;
            }
            if self.log.invalidated {
                self.log.invalidated = false;
                self.stream = None;
            }
            if !chunk.is_empty() {
                return Ok(());
            }
        }
    }

    /// Whoever slept through the lease must not deliver what it read before.
    fn still_ours(&self) -> Result<(), SourceFailure> {
        match self.validity.holds() {
            true => Ok(()),
            false => Err(SourceFailure::transient("the pipeline's lease ran out before it was renewed")),
        }
    }

    /// The next reply; `None` when there is to be another attempt.
    async fn batch(&mut self) -> Result<Option<Batch>, SourceFailure> {
        if self.stream.is_none() {
            let entry = match &self.position.token {
                Some(token) => Entry::After(token.clone()),
                None => Entry::At(self.position.time),
            };
            match self.watch.open(&entry).await {
                Ok(stream) => self.stream = Some(stream),
                Err(failure) => return self.broke(failure).await.map(|()| None),
            }
        }
        let Some(stream) = &mut self.stream else { return Ok(None) };
        match stream.next(self.stall_timeout).await {
            Ok(Some(batch)) => {
                failpoints::reach("received")?;
                (self.pause, self.broken_since) = (FIRST_PAUSE, None);
                Ok(Some(batch))
            }
            Ok(None) => {
                self.stream = None;
                Ok(None)
            }
            Err(failure) => self.broke(failure).await.map(|()| None),
        }
    }

    /// An election or a lost connection: the stream goes on from where it was read. Nothing needs to be repeated.
    async fn broke(&mut self, failure: SourceFailure) -> Result<(), SourceFailure> {
        self.stream = None;
        self.log.pieces.clear();
        match failure {
            SourceFailure::Transient { what } => {
                let since = *self.broken_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= LONGEST_BREAK {
                    return Err(SourceFailure::Transient { what });
                }
                tracing::info!(after = %self.position.time, "the change stream is opened again: {what}");
                tokio::time::sleep(self.pause).await;
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
                Ok(())
            }
            SourceFailure::PositionLost { what, .. } => {
                Err(self.lost.report(&self.watch.client, &self.position, &what).await)
            }
            failure => Err(failure),
        }
    }
}

/// Decodes replies; does no I/O.
struct Log {
    scope: Scope,
    documents: Documents,
    width: usize,
    /// Events that were made of replies, and are still to be stored as delivered.
    eventful: u64,
    /// The time of the last event.
    last: Micros,
    invalidated: bool,
    /// What has come of an event in pieces.
    pieces: Vec<RawDocumentBuf>,
}

/// The parts of one event that are looked at.
#[derive(Default)]
struct Change<'a> {
    token: Option<&'a RawDocument>,
    operation: Option<&'a str>,
    time: Option<ClusterTime>,
    wall: Option<Micros>,
    namespace: Option<&'a RawDocument>,
    to: Option<&'a RawDocument>,
    document: Option<&'a RawDocument>,
    split: Option<(i32, i32)>,
}

impl<'a> Change<'a> {
    /// Takes over what the event, or a fragment of it, has.
    fn merge(&mut self, event: &'a RawDocument) -> Result<(), Error> {
        for element in event {
            let (name, value) = element?;
            match (name.as_str(), value) {
                ("_id", RawBsonRef::Document(token)) => self.token = Some(token),
                ("operationType", RawBsonRef::String(operation)) => self.operation = Some(operation),
                ("clusterTime", RawBsonRef::Timestamp(time)) => self.time = Some(time.into()),
                ("wallTime", RawBsonRef::DateTime(wall)) => {
                    self.wall = Some(Micros(wall.timestamp_millis().saturating_mul(1000)));
                }
                ("ns", RawBsonRef::Document(namespace)) => self.namespace = Some(namespace),
                ("to", RawBsonRef::Document(namespace)) => self.to = Some(namespace),
                ("fullDocument", RawBsonRef::Document(document)) => self.document = Some(document),
                ("splitEvent", RawBsonRef::Document(split)) => {
                    self.split = Some((split.get_i32("fragment")?, split.get_i32("of")?));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn commit(&self) -> Commit {
        let time = self.time.unwrap_or_default();
        // Servers before 6.0 tell whole seconds only.
        let committed_at = self.wall.unwrap_or(Micros(i64::from(time.seconds) * 1_000_000));
        Commit { id: CommitId::Mongo(time), committed_at }
    }
}

impl Log {
    fn new(scope: Scope, documents: Documents, width: usize) -> Self {
        Log { scope, documents, width, eventful: 0, last: Micros::now(), invalidated: false, pieces: Vec::new() }
    }

    /// Fills the chunk with the reply's events. Returns how far that brings us, if it does.
    fn read(
        &mut self,
        batch: &Batch,
        from: &StreamPosition,
        chunk: &mut Chunk,
    ) -> Result<Option<StreamPosition>, SourceFailure> {
        chunk.reset(self.width);
        let unreadable = |why: String| SourceFailure::Undecodable {
            what: format!("a reply of the change stream after {from} cannot be read: {why}"),
            remedy: "nothing was skipped; please report this with the server's version".to_owned(),
        };
        let documents = batch.documents().ok_or_else(|| unreadable("it has no batch of documents".to_owned()))?;
        let (mut current, mut count, mut last_token) = (None, 0, None);
        for event in documents {
            let event = event.map_err(|error| unreadable(error.to_string()))?;
            let event = event.as_document().ok_or_else(|| unreadable("an event is not a document".to_owned()))?;
            let mut change = Change::default();
            change.merge(event).map_err(|error| unreadable(error.to_string()))?;
            (count, last_token) = (count + 1, change.token);
            match change.split {
                None => self.change(&change, &mut current, Some(&batch.bytes()[..]), chunk).map_err(unreadable)?,
                Some((fragment, of)) => {
                    self.piece(event, fragment, of, &mut current, chunk).map_err(unreadable)?;
                }
            }
        }
        chunk.catching_up = count == BATCH as usize || batch.bytes().len() >= FULL_REPLY;
        chunk.attach_raw(batch.bytes().clone());
        if !self.pieces.is_empty() {
            return Ok(None);
        }
        let token = batch.position().or_else(|| last_token.and_then(ResumeToken::from_raw));
        let Some(token) = token else { return Ok(None) };
        // With nothing at hand the server has looked at all that there is of this time.
        let position = StreamPosition { whole: count == 0, eventful: self.eventful, ..StreamPosition::after(token) };
        if count == 0 && position == *from {
            return Ok(None);
        }
        if count == 0 {
            self.last = Micros::now();
        }
        Ok(Some(position))
    }

    fn change(
        &mut self,
        change: &Change<'_>,
        current: &mut Option<ClusterTime>,
        reply: Option<&[u8]>,
        chunk: &mut Chunk,
    ) -> Result<(), String> {
        let named = |namespace: Option<&RawDocument>| {
            let part =
                |name| namespace.and_then(|namespace| namespace.get_str(name).ok()).unwrap_or_default().to_owned();
            (part("db"), part("coll"))
        };
        match change.operation {
            Some("insert") => {
                let document = change.document.ok_or("an insert comes without its document")?;
                let table = match self.scope.namespaces() {
                    [_] => 0,
                    _ => {
                        let (database, collection) = named(change.namespace);
                        let index = self.scope.index(&database, &collection);
                        index.ok_or_else(|| format!("an insert into {database}.{collection} was not asked for"))?
                    }
                };
                let commit = change.commit();
                if *current != change.time || current.is_none() {
                    *current = change.time;
                    chunk.begin_commit(commit);
                    chunk.transactions += 1;
                }
                self.last = commit.committed_at;
                self.eventful += 1;
                self.documents.add(document, table as u32, reply, chunk);
            }
            Some("invalidate") => self.invalidated = true,
            Some("drop") => {
                let (database, collection) = named(change.namespace);
                tracing::warn!(
                    "the collection {database}.{collection} was dropped: what comes into a new one of that name is delivered"
                );
            }
            Some("rename") => {
                let ((database, from), (other, to)) = (named(change.namespace), named(change.to));
                let delivered = match self.scope.index(&other, &to) {
                    Some(_) => "what comes into it is delivered as before",
                    None => "only what comes into a collection of the watched name is delivered",
                };
                tracing::warn!("the collection {database}.{from} was renamed to {other}.{to}: {delivered}");
            }
            Some("dropDatabase") => {
                tracing::warn!("the database {} was dropped", named(change.namespace).0);
            }
            Some(_) => {}
            None => return Err("an event has no operationType".to_owned()),
        }
        Ok(())
    }

    /// One fragment of an event. With the last one it is whole.
    fn piece(
        &mut self,
        event: &RawDocument,
        fragment: i32,
        of: i32,
        current: &mut Option<ClusterTime>,
        chunk: &mut Chunk,
    ) -> Result<(), String> {
        if fragment != self.pieces.len() as i32 + 1 {
            return Err(format!("fragment {fragment} of {of} came after {} others", self.pieces.len()));
        }
        self.pieces.push(event.to_owned());
        if fragment < of {
            return Ok(());
        }
        let pieces = std::mem::take(&mut self.pieces);
        let mut whole = Change::default();
        for piece in &pieces {
            whole.merge(piece).map_err(|error| error.to_string())?;
        }
        self.change(&whole, current, None, chunk)
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
