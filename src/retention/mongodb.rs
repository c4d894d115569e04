//! Retention in MongoDB: documents are found by what they say of themselves, and deleted by their ids.

use std::time::{Duration, Instant};

use ::mongodb::Collection;
use ::mongodb::bson::{Bson, DateTime, Document, doc};
use ::mongodb::options::{CollectionOptions, ReadConcern, ReadPreference, SelectionCriteria, WriteConcern};
use futures_util::TryStreamExt as _;

use super::rule::{Condition, Failures};
use super::{Done, Job, LATER_PATIENCE, rest};
use crate::config::MongoSettings;
use crate::position::Position;
use crate::source::SourceFailure;
use crate::source::mongodb::server::{self, Connection, Server};
use crate::source::mongodb::server_error::{self, Doing};
use crate::source::mongodb::token::StreamPosition;

/// Batches that one fence is for.
const BATCHES_AT_ONCE: usize = 20;
/// Old documents that stay are counted up to here.
const MOST_COUNTED: u64 = 1_000_000;

pub(super) async fn pass(job: &Job<'_>, source: &MongoSettings) -> Result<Done, SourceFailure> {
    let mut done = job.done();
    let Some(age) = job.wish.age else { return Ok(done) };
    let connection = server::connect(source).await?;
    let database = job.table.schema.as_deref().unwrap_or(connection.database.name());
    // What is read here must stay read, whichever member leads next.
    let options = CollectionOptions::builder()
        .read_concern(ReadConcern::majority())
        .write_concern(WriteConcern::majority())
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .build();
    let collection: Collection<Document> =
        connection.client.database(database).collection_with_options(&job.table.name, options);
    let hello = server::command(&connection.database, doc! { "hello": 1 }).await?;
    let now = hello.get_datetime("localTime").map_or_else(|_| DateTime::now(), |now| *now);
    let age = i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
    let cutoff = DateTime::from_millis(now.timestamp_millis().saturating_sub(age));
    let goes = filter(&job.rule, cutoff);
    if job.wish.dry_run {
        let found = count(&collection, goes.clone(), None).await?;
        if found > 0 {
            match held_back(job, &connection, job.wish.patience).await? {
                Some(why) => done.held.push(why),
                None => done.rows = found,
            }
        }
    } else {
        rows(job, &connection, &collection, &goes, &mut done).await?;
    }
    let counts = job.wish.count_kept && !job.is_by_age();
    if let Some(timestamp) = job.timestamp.as_ref().filter(|_| counts) {
        let stays = filter(&job.rule.negated(), cutoff);
        let old = doc! { "$and": [{ timestamp: { "$lt": cutoff } }, stays] };
        done.kept = count(&collection, old, Some(MOST_COUNTED)).await?;
    }
    Ok(done)
}

/// Whether what could be seen a moment ago was delivered; if not, who is behind.
async fn held_back(
    job: &Job<'_>,
    connection: &Connection,
    patience: Duration,
) -> Result<Option<String>, SourceFailure> {
    if job.fence.is_open() {
        return Ok(None);
    }
    let end = StreamPosition::end_of(Server::ask(connection).await?.now);
    job.fence.wait(&Position::Mongo(Box::new(end)), patience).await
}

async fn rows(
    job: &Job<'_>,
    connection: &Connection,
    collection: &Collection<Document>,
    goes: &Document,
    done: &mut Done,
) -> Result<(), SourceFailure> {
    let reading = Doing::Reading(collection.namespace().to_string());
    let deleting = Doing::Deleting(collection.namespace().to_string());
    let at_once = job.wish.batch.saturating_mul(BATCHES_AT_ONCE);
    let mut patience = job.wish.patience;
    loop {
        let found = collection.find(goes.clone()).projection(doc! { "_id": 1 }).limit(at_once as i64);
        let found = found.await.map_err(|error| server_error::classify(&error, &reading))?;
        let found: Vec<Document> =
            found.try_collect().await.map_err(|error| server_error::classify(&error, &reading))?;
        let ids: Vec<Bson> = found.into_iter().filter_map(|mut document| document.remove("_id")).collect();
        if ids.is_empty() {
            return Ok(());
        }
        if let Some(why) = held_back(job, connection, patience).await? {
            done.held.push(why);
            return Ok(());
        }
        patience = patience.min(LATER_PATIENCE);
        let mut round = 0;
        for batch in ids.chunks(job.wish.batch) {
            let begin = Instant::now();
            // What has changed since it was found is looked at once more.
            let these = doc! { "$and": [{ "_id": { "$in": batch } }, goes.clone()] };
            let deleted = collection.delete_many(these).await;
            let deleted = deleted.map_err(|error| server_error::classify(&error, &deleting))?.deleted_count;
            round += deleted;
            (job.ears.deleted)(deleted);
            rest(begin.elapsed()).await;
        }
        done.rows += round;
        if round == 0 {
            // Others were faster, or they have changed: the next pass looks again.
            return Ok(());
        }
    }
}

async fn count(collection: &Collection<Document>, filter: Document, most: Option<u64>) -> Result<u64, SourceFailure> {
    let doing = Doing::Reading(collection.namespace().to_string());
    let mut counting = collection.count_documents(filter);
    if let Some(most) = most {
        counting = counting.limit(most);
    }
    counting.await.map_err(|error| server_error::classify(&error, &doing))
}

fn filter(condition: &Condition, cutoff: DateTime) -> Document {
    let parts = |parts: &[Condition]| parts.iter().map(|part| filter(part, cutoff)).collect::<Vec<_>>();
    let failures = |Failures { count, own, most }: &Failures, sign: &str| {
        let most = own
            .as_ref()
            .map_or_else(|| Bson::from(*most), |own| Bson::from(doc! { "$ifNull": [format!("${own}"), *most] }));
        doc! { "$expr": { sign: [{ "$ifNull": [format!("${count}"), 0] }, most] } }
    };
    match condition {
        Condition::Is(field, text) => doc! { field: *text },
        Condition::IsNot(field, text) => doc! { field: { "$ne": *text } },
        Condition::Number(field, number) => doc! { field: *number },
        Condition::NotNumber(field, number) => doc! { field: { "$ne": *number } },
        Condition::Null(field) => doc! { field: Bson::Null },
        Condition::NotNull(field) => doc! { field: { "$ne": Bson::Null } },
        // Of another type than a date it is not before any.
        Condition::Before(field) => doc! { field: { "$lt": cutoff } },
        Condition::NotBefore(field) => doc! { field: { "$not": { "$lt": cutoff } } },
        Condition::Exhausted(of) => failures(of, "$gte"),
        Condition::NotExhausted(of) => failures(of, "$lt"),
        Condition::All(all) if all.is_empty() => Document::new(),
        Condition::Any(any) if any.is_empty() => doc! { "$expr": false },
        Condition::All(all) => doc! { "$and": parts(all) },
        Condition::Any(any) => doc! { "$or": parts(any) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_and_its_opposite_are_filters() {
        let done = Condition::All(vec![
            Condition::Is("status".to_owned(), "published"),
            Condition::Before("published_at".to_owned()),
        ]);
        let at = DateTime::from_millis(0);
        assert_eq!(filter(&done, at), doc! { "$and": [{ "status": "published" }, { "published_at": { "$lt": at } }] });
        assert_eq!(
            filter(&done.negated(), at),
            doc! { "$or": [{ "status": { "$ne": "published" } }, { "published_at": { "$not": { "$lt": at } } }] }
        );
    }
}
