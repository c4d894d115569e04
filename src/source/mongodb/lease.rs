//! Who runs a pipeline: a lease in the pipeline's document of `outboxd_checkpoint`.
//!
//! ```text
//!   { _id: pipeline, incarnation, lease: { holder, epoch, until }, position, … }
//! ```
//!
//! Time is the primary's alone (`$$NOW`), so the clocks of instances need not agree; a new primary whose clock is behind
//! makes a lease longer by that much. Each new holder raises the epoch, and whatever a
//! holder writes names its epoch: one that slept through its lease writes nothing any more. The holder itself counts
//! the lease from before it asked for it, so it knows that it has lost it no later than the server does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mongodb::bson::{Document, Uuid, doc};
use mongodb::options::{CollectionOptions, ReadPreference, ReturnDocument, SelectionCriteria, WriteConcern};
use mongodb::{Collection, Database};

use super::server_error::{self, Doing, code};
use crate::checkpoint::Checkpoint;
use crate::source::SourceFailure;

/// The collection of leases and checkpoints.
pub const COLLECTION: &str = "outboxd_checkpoint";

/// How long a lease holds: a standby takes over this long after the leader's last word.
pub const TERM: Duration = Duration::from_secs(5);
/// The same of whoever polls: nothing but the lease is opened then, and a standby is to deliver within five seconds.
pub const POLLING_TERM: Duration = Duration::from_millis(3500);
/// How often it is renewed.
pub const RENEWAL: Duration = Duration::from_secs(1);
/// The holder lets go this much before the server would.
const MARGIN: Duration = Duration::from_millis(500);

/// Until when the lease is known to hold.
#[derive(Debug)]
pub struct Validity {
    since: Instant,
    /// Milliseconds after `since`.
    until: AtomicU64,
}

impl Validity {
    fn new() -> Self {
        Validity { since: Instant::now(), until: AtomicU64::new(0) }
    }

    fn extend(&self, asked: Instant, term: Duration) {
        let until = (asked + term - MARGIN).saturating_duration_since(self.since).as_millis() as u64;
        self.until.store(until, Ordering::Release);
    }

    pub fn holds(&self) -> bool {
        Instant::now() < self.deadline()
    }

    pub fn deadline(&self) -> Instant {
        self.since + Duration::from_millis(self.until.load(Ordering::Acquire))
    }
}

/// What a write under the lease came to.
pub enum Renewed {
    Held,
    /// Another instance has it, or the document is gone.
    Lost,
}

pub struct Lease {
    documents: Collection<Document>,
    pipeline: String,
    holder: String,
    epoch: i64,
    term: Duration,
    pub validity: Arc<Validity>,
}

pub enum Taking {
    Taken(Taken),
    /// Another instance has it; and whether the pipeline has a position.
    Held {
        holder: String,
        positioned: bool,
    },
}

/// The pipeline's document, as it was when the lease was taken.
pub struct Taken {
    pub lease: Lease,
    pub document: Document,
}

pub fn documents(database: &Database) -> Collection<Document> {
    // Whatever the URL's read preference is: a lease that was taken a moment ago must be seen.
    let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
    let options = CollectionOptions::builder().selection_criteria(primary).build();
    database.collection_with_options(COLLECTION, options)
}

fn majority() -> WriteConcern {
    let mut concern = WriteConcern::majority();
    concern.w_timeout = Some(TERM);
    concern
}

fn doing(database: &Database) -> Doing {
    Doing::Writing(format!("{}.{COLLECTION}", database.name()))
}

/// Takes the pipeline's lease, or says who has it.
pub async fn take(
    database: &Database,
    pipeline: &str,
    holder: &str,
    no_create: bool,
    term: Duration,
) -> Result<Taking, SourceFailure> {
    let failed = |error: mongodb::error::Error| server_error::classify(&error, &doing(database));
    let documents = documents(database);
    if no_create && documents.find_one(doc! { "_id": pipeline }).await.map_err(failed)?.is_none() {
        return Err(SourceFailure::NotReady {
            what: format!("{}.{COLLECTION} has no document of pipeline `{pipeline}`", database.name()),
            remedy: "run `outboxd init` once, or leave out --no-create".to_owned(),
        });
    }
    make(&documents, pipeline).await.map_err(failed)?;
    let validity = Arc::new(Validity::new());
    let asked = Instant::now();
    let free = doc! { "_id": pipeline, "$or": [
        { "lease.until": { "$exists": false } },
        { "lease.holder": holder },
        { "$expr": { "$lt": ["$lease.until", "$$NOW"] } },
    ] };
    let taken = documents
        .find_one_and_update(
            free,
            vec![doc! { "$set": { "lease": {
                "holder": { "$literal": holder },
                "epoch": { "$add": [{ "$ifNull": ["$lease.epoch", 0_i64] }, 1_i64] },
                "until": { "$add": ["$$NOW", term.as_millis() as i64] },
            } } }],
        )
        .return_document(ReturnDocument::After)
        .write_concern(majority())
        .await
        .map_err(failed)?;
    let Some(document) = taken else {
        let other = documents.find_one(doc! { "_id": pipeline }).await.map_err(failed)?.unwrap_or_default();
        return Ok(Taking::Held { holder: holder_of(&other), positioned: other.contains_key("position") });
    };
    validity.extend(asked, term);
    let epoch = document.get_document("lease").ok().and_then(|lease| lease.get_i64("epoch").ok());
    let epoch = epoch.ok_or_else(|| SourceFailure::NotReady {
        what: format!(
            "the lease of pipeline `{pipeline}` in {}.{COLLECTION} has no number as its epoch",
            database.name()
        ),
        remedy: format!("db.{COLLECTION}.updateOne({{_id: \"{pipeline}\"}}, {{$unset: {{lease: 1}}}})"),
    })?;
    let lease = Lease { documents, pipeline: pipeline.to_owned(), holder: holder.to_owned(), epoch, term, validity };
    Ok(Taking::Taken(Taken { lease, document }))
}

async fn make(documents: &Collection<Document>, pipeline: &str) -> mongodb::error::Result<()> {
    let random = Uuid::new().to_string();
    let made = documents
        .update_one(doc! { "_id": pipeline }, doc! { "$setOnInsert": { "incarnation": random } })
        .upsert(true)
        .write_concern(majority())
        .await;
    match made {
        // Two made it at once.
        Err(error) if server_error::code_of(&error) == Some(code::DUPLICATE_KEY) => Ok(()),
        made => made.map(|_| ()),
    }
}

pub fn held(pipeline: &str, holder: &str) -> SourceFailure {
    SourceFailure::Held { what: format!("another instance runs pipeline `{pipeline}` ({holder})") }
}

pub fn holder_of(document: &Document) -> String {
    let holder = document.get_document("lease").and_then(|lease| lease.get_str("holder"));
    holder.unwrap_or("unknown").to_owned()
}

/// The holder, while its lease holds.
pub async fn holder(database: &Database, pipeline: &str) -> Result<Option<String>, SourceFailure> {
    let current = doc! { "_id": pipeline, "$expr": { "$gte": ["$lease.until", "$$NOW"] } };
    let found = documents(database).find_one(current).await;
    let found = found.map_err(|error| {
        server_error::classify(&error, &Doing::Reading(format!("{}.{COLLECTION}", database.name())))
    })?;
    Ok(found.as_ref().map(holder_of))
}

/// The pipeline's document.
pub async fn document(database: &Database, pipeline: &str) -> Result<Option<Document>, SourceFailure> {
    let found = documents(database).find_one(doc! { "_id": pipeline }).await;
    found.map_err(|error| server_error::classify(&error, &Doing::Reading(format!("{}.{COLLECTION}", database.name()))))
}

/// Makes the pipeline's document, if there is none.
pub async fn make_document(database: &Database, pipeline: &str) -> Result<(), SourceFailure> {
    make(&documents(database), pipeline).await.map_err(|error| server_error::classify(&error, &doing(database)))
}

/// Stores a pipeline's first checkpoint, unless it has one.
pub async fn store_first(database: &Database, checkpoint: &Checkpoint) -> Result<(), SourceFailure> {
    let unset = doc! { "_id": &checkpoint.pipeline, "position": { "$exists": false } };
    let collection = documents(database);
    let stored = collection.update_one(unset, vec![doc! { "$set": fields(checkpoint) }]).write_concern(majority());
    stored.await.map_err(|error| server_error::classify(&error, &doing(database))).map(|_| ())
}

/// What is set of a document; texts must not be taken for expressions.
fn fields(checkpoint: &Checkpoint) -> Document {
    doc! {
        "format": checkpoint.format,
        "source": { "$literal": &checkpoint.source },
        "server": { "$literal": &checkpoint.server },
        "position": { "$literal": &checkpoint.position },
        "watched": { "$literal": &checkpoint.file },
        "snapshot": { "$literal": checkpoint.snapshot.as_str() },
        "updated_at": "$$NOW",
    }
}

impl Lease {
    fn namespace(&self) -> String {
        format!("{}.{COLLECTION}", self.documents.namespace().db)
    }

    /// Renews the lease, and stores the checkpoint in the same write.
    pub async fn renew(&self, checkpoint: Option<&Checkpoint>) -> Result<Renewed, SourceFailure> {
        let asked = Instant::now();
        let mut set = checkpoint.map(fields).unwrap_or_default();
        set.insert("lease.until", doc! { "$add": ["$$NOW", self.term.as_millis() as i64] });
        let renewed = self.write(set).await?;
        if let Renewed::Held = renewed {
            self.validity.extend(asked, self.term);
        }
        Ok(renewed)
    }

    /// Lets the lease go, so that nobody waits for its end.
    pub async fn release(&self) -> Result<Renewed, SourceFailure> {
        self.write(doc! { "lease.until": "$$NOW" }).await
    }

    async fn write(&self, set: Document) -> Result<Renewed, SourceFailure> {
        let own = doc! { "_id": &self.pipeline, "lease.holder": &self.holder, "lease.epoch": self.epoch };
        let written = self.documents.update_one(own, vec![doc! { "$set": set }]).write_concern(majority()).await;
        let written = written.map_err(|error| server_error::classify(&error, &Doing::Writing(self.namespace())))?;
        Ok(if written.matched_count == 1 { Renewed::Held } else { Renewed::Lost })
    }

    /// Renews until that is no longer possible, for a task that has something else to wait for.
    pub async fn keep(&self) -> SourceFailure {
        loop {
            tokio::time::sleep(RENEWAL).await;
            match self.renew(None).await {
                Ok(Renewed::Held) => {}
                Ok(Renewed::Lost) => return self.lost(),
                Err(failure) if !self.validity.holds() => return failure,
                Err(_) => {}
            }
        }
    }

    pub fn lost(&self) -> SourceFailure {
        SourceFailure::Held {
            what: format!("the lease of pipeline `{}` was lost: another instance may have taken over", self.pipeline),
        }
    }
}
