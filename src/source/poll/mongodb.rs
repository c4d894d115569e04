//! Polling MongoDB. A claim is two commands whatever its size: the documents that are pending are found in order, and
//! those that are still pending are set, with a mark of this claim. Where others took some of them meanwhile, the mark
//! tells which are ours.

use std::sync::Arc;
use std::time::Duration;

use ::mongodb::Collection;
use ::mongodb::bson::oid::ObjectId;
use ::mongodb::bson::{Bson, Document, RawBson, RawBsonRef, RawDocumentBuf, Uuid, doc};
use ::mongodb::options::{Hint, ReadConcern, ReadPreference, SelectionCriteria, WriteConcern};

use super::ledger::{Batch, Claimed, Exclusion, Refused};
use super::view::{MOST_KEYS, View, by_version, code};
use super::{Ask, Waits};
use crate::config::MongoSettings;
use crate::event::{Chunk, Projection};
use crate::route::polling::{Set, Sets, Test};
use crate::source::mongodb::documents::Documents;
use crate::source::mongodb::lease::{self, Lease, POLLING_TERM, RENEWAL, Renewed, Taking, Validity};
use crate::source::mongodb::server::{self, Connection};
use crate::source::mongodb::server_error::{self, Doing};
use crate::source::mongodb::{self, change_stream};
use crate::source::{SourceFailure, SourceStats};

/// The mark of a claim, beside the layout's own fields.
const CLAIM: &str = "outboxd_claim";

#[derive(Clone)]
pub struct MongoStore {
    pub connection: Connection,
    pub view: Arc<View>,
    pub collections: Vec<Collection<RawDocumentBuf>>,
    documents: Arc<Documents>,
    lease: Option<Arc<Lease>>,
    holder: String,
    no_create: bool,
    /// Keys were seen that are not texts, so that they cannot be left out by a record's key.
    odd_keys: bool,
}

impl MongoStore {
    pub async fn open(
        settings: &MongoSettings,
        view: View,
        projection: &Projection,
        holder: &str,
    ) -> Result<Self, SourceFailure> {
        let connection = server::connect(settings).await?;
        let scope = mongodb::scope(settings, &connection);
        let mut collections = Vec::new();
        for (database, collection) in scope.namespaces() {
            if collection == change_stream::ALL {
                return Err(SourceFailure::Misconfigured {
                    what: "polling needs its collections by name".to_owned(),
                    remedy: "name each with --table, or use --capture log".to_owned(),
                });
            }
            let options = ::mongodb::options::CollectionOptions::builder()
                .read_concern(ReadConcern::majority())
                .write_concern(majority())
                .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
                .build();
            let collection = connection.client.database(database).collection_with_options(collection, options);
            collections.push(collection);
        }
        Ok(MongoStore {
            connection,
            view: Arc::new(view),
            collections,
            documents: Arc::new(Documents::new(projection, settings.extended_json)),
            lease: None,
            holder: holder.to_owned(),
            no_create: settings.no_create,
            odd_keys: false,
        })
    }

    pub fn another(&self) -> Self {
        self.clone()
    }

    pub fn describe(&self) -> String {
        let hosts: Vec<_> = self.connection.options.hosts.iter().map(ToString::to_string).collect();
        hosts.join(",")
    }

    pub fn tables(&self) -> usize {
        self.collections.len()
    }

    /// What the lease is called: whoever polls the same collections has the same.
    fn name(&self) -> String {
        let names: Vec<_> = self.collections.iter().map(|collection| collection.namespace().to_string()).collect();
        format!("poll/{}", names.join(","))
    }

    pub async fn lead(&mut self) -> Result<(), SourceFailure> {
        match lease::take(&self.connection.database, &self.name(), &self.holder, self.no_create, POLLING_TERM).await? {
            Taking::Taken(taken) => {
                self.lease = Some(Arc::new(taken.lease));
                Ok(())
            }
            Taking::Held { holder, .. } => Err(lease::held(&self.name(), &holder)),
        }
    }

    pub async fn wait_for_lead(&mut self) -> Result<(), SourceFailure> {
        while lease::holder(&self.connection.database, &self.name()).await?.is_some() {
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
        Ok(())
    }

    pub fn validity(&self) -> Option<Arc<Validity>> {
        self.lease.as_ref().map(|lease| lease.validity.clone())
    }

    /// Renews the lease. An election takes a moment; the lease's end is the deadline.
    pub async fn beat(&self) -> Result<(), SourceFailure> {
        let Some(lease) = &self.lease else { return Ok(()) };
        match tokio::time::timeout(RENEWAL * 2, lease.renew(None)).await {
            Ok(Ok(Renewed::Held)) => Ok(()),
            Ok(Ok(Renewed::Lost)) => Err(lease.lost()),
            Ok(Err(failure)) if !lease.validity.holds() => Err(failure),
            Ok(Err(_)) => Ok(()),
            Err(_) if lease.validity.holds() => Ok(()),
            Err(_) => Err(SourceFailure::transient("the pipeline's lease could not be renewed in time")),
        }
    }

    pub async fn release_lead(&self) {
        if let Some(lease) = &self.lease {
            let _ = tokio::time::timeout(Duration::from_secs(3), lease.release()).await;
        }
    }

    pub async fn claim(
        &mut self,
        ask: &Ask<'_>,
        excluded: &Exclusion,
        chunk: &mut Chunk,
    ) -> Result<Vec<Claimed>, SourceFailure> {
        let collection = self.collections[ask.table as usize].clone();
        let Some(mut filter) = self.leave_out(excluded) else { return Ok(Vec::new()) };
        let scheme = self.view.scheme;
        let tests = if ask.failed { scheme.failed_again.unwrap_or_default() } else { scheme.pending };
        filter.extend(self.tests(tests));
        let mut sort = Document::new();
        for field in &self.view.order {
            sort.insert(field, 1);
        }
        let reading = |error: ::mongodb::error::Error| {
            server_error::classify(&error, &Doing::Reading(collection.namespace().to_string()))
        };
        let writing = |error: ::mongodb::error::Error| {
            server_error::classify(&error, &Doing::Writing(collection.namespace().to_string()))
        };
        let limit = ask.limit as i64;
        let found = collection.find(filter.clone()).sort(sort.clone()).limit(limit).batch_size(ask.limit as u32);
        let mut found = drain(found.await.map_err(reading)?).await.map_err(reading)?;
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<Bson> = found.iter().filter_map(id_of).collect();
        let mark = Uuid::new().to_string();
        let mut set = self.sets(scheme.claim, &[]);
        set.insert(CLAIM, &mark);
        let mut still = self.tests(tests);
        still.insert("_id", doc! { "$in": &ids });
        if let Some(lease) = self.lease.as_ref().filter(|lease| !lease.validity.holds()) {
            // Whoever slept here must not take what another leader has.
            return Err(lease.lost());
        }
        let claimed = collection.update_many(still, vec![doc! { "$set": set }]).hint(by_id()).await.map_err(writing)?;
        if claimed.matched_count != found.len() as u64 {
            // Others were faster with some of them.
            let ours = collection.find(doc! { "_id": { "$in": ids }, CLAIM: &mark }).sort(sort).hint(by_id());
            found = drain(ours.await.map_err(reading)?).await.map_err(reading)?;
        }
        if let Some((group, version)) = scheme.within {
            let versions: Vec<_> = found
                .iter()
                .map(|document| {
                    let group = document.get(self.view.name(group)).ok().flatten();
                    let version = match document.get(self.view.name(version)) {
                        Ok(Some(RawBsonRef::Int32(number))) => i64::from(number),
                        Ok(Some(RawBsonRef::Int64(number))) => number,
                        Ok(Some(RawBsonRef::Double(number))) => number as i64,
                        _ => 0,
                    };
                    (format!("{group:?}").into_bytes(), version)
                })
                .collect();
            let mut unsorted: Vec<_> = found.into_iter().map(Some).collect();
            found = by_version(&versions).into_iter().filter_map(|at| unsorted[at].take()).collect();
        }
        if let Some(key) = self.view.key.as_deref() {
            let odd = |document: &RawDocumentBuf| {
                !matches!(document.get(key), Ok(None | Some(RawBsonRef::String(_) | RawBsonRef::Null)))
            };
            self.odd_keys |= found.iter().any(odd);
        }
        let mut rows = Vec::with_capacity(found.len());
        for document in &found {
            let number = |field: &str| match document.get(field) {
                Ok(Some(RawBsonRef::Int32(number))) => u32::try_from(number).ok(),
                Ok(Some(RawBsonRef::Int64(number))) => u32::try_from(number).ok(),
                Ok(Some(RawBsonRef::Double(number))) => Some(number as u32),
                _ => None,
            };
            let id = id_of(document).map(|id| written(&id)).unwrap_or_default();
            rows.push(Claimed {
                id: id.into(),
                attempts: number(&self.view.name(scheme.attempts)).unwrap_or(0),
                most: scheme.own_most.and_then(|field| number(&self.view.name(field))),
            });
            self.documents.add(document, ask.table, None, chunk);
        }
        Ok(rows)
    }

    fn leave_out(&self, excluded: &Exclusion) -> Option<Document> {
        if excluded.keys.is_empty() {
            return Some(Document::new());
        }
        let key = self.view.key.as_deref()?;
        if excluded.keys.len() > MOST_KEYS || self.odd_keys {
            return None;
        }
        let mut keys = Vec::new();
        for excluded in &excluded.keys {
            keys.push(match excluded {
                None => Bson::Null,
                Some(bytes) => Bson::String(std::str::from_utf8(bytes).ok()?.to_owned()),
            });
        }
        Some(doc! { key: { "$nin": keys } })
    }

    pub(in crate::source) fn tests(&self, of: &[(&str, Test)]) -> Document {
        tests(&self.view, of)
    }

    /// What is set, as an aggregation writes it; `refused` are the documents with their reasons and pauses.
    pub(in crate::source) fn sets(&self, sets: Sets, refused: &[Refused<'_>]) -> Document {
        let by_document = |values: Vec<Bson>| {
            let ids: Vec<_> = refused.iter().map(|row| read(row.id)).collect();
            doc! { "$arrayElemAt": [{ "$literal": values }, { "$indexOfArray": [{ "$literal": ids }, "$_id"] }] }
        };
        let mut set = Document::new();
        for (column, value) in sets {
            let field = self.view.name(column);
            let value: Bson = match value {
                Set::Text(text) => doc! { "$literal": *text }.into(),
                Set::Number(number) => Bson::Int64(*number),
                Set::Null => Bson::Null,
                Set::Now => "$$NOW".into(),
                Set::Worker => doc! { "$literal": &self.view.worker }.into(),
                Set::LeaseEnd => doc! { "$add": ["$$NOW", self.view.lease.as_millis() as i64] }.into(),
                Set::OneMore => doc! { "$add": [{ "$ifNull": [format!("${field}"), 0] }, 1] }.into(),
                Set::AllTries => {
                    let most = Bson::from(self.view.most);
                    let most = match self.view.scheme.own_most {
                        Some(own) => doc! { "$ifNull": [format!("${}", self.view.name(own)), most] }.into(),
                        None => most,
                    };
                    doc! { "$max": [{ "$add": [{ "$ifNull": [format!("${field}"), 0] }, 1] }, most] }.into()
                }
                Set::Why => by_document(refused.iter().map(|row| row.why.into()).collect()).into(),
                Set::Code => by_document(refused.iter().map(|row| code(row.why).into()).collect()).into(),
                Set::NextTry => {
                    let pauses = refused.iter().map(|row| Bson::Int64(row.pause.as_millis() as i64)).collect();
                    doc! { "$add": ["$$NOW", by_document(pauses)] }.into()
                }
            };
            set.insert(field, value);
        }
        set
    }

    pub async fn mark(&mut self, batch: &Batch) -> Result<u32, SourceFailure> {
        if let Some(lease) = self.lease.as_ref().filter(|lease| !lease.validity.holds()) {
            return Err(lease.lost());
        }
        let scheme = self.view.scheme;
        let ids = |ids: Vec<&str>| ids.into_iter().map(read).collect::<Vec<_>>();
        let mut statements = 0;
        for (sets, ids) in [(scheme.done, ids(batch.done())), (scheme.release, ids(batch.released()))] {
            if !ids.is_empty() {
                self.set(batch.table, sets, ids, &[]).await?;
                statements += 1;
            }
        }
        for (sets, rows) in [(scheme.retry, batch.retried()), (scheme.fail, batch.failed())] {
            if !rows.is_empty() {
                self.set(batch.table, sets, rows.iter().map(|row| read(row.id)).collect(), &rows).await?;
                statements += 1;
            }
        }
        Ok(statements)
    }

    async fn set(&self, table: u32, sets: Sets, ids: Vec<Bson>, refused: &[Refused<'_>]) -> Result<(), SourceFailure> {
        let collection = &self.collections[table as usize];
        let mut filter = self.tests(self.view.scheme.claimed);
        filter.insert("_id", doc! { "$in": ids });
        if let Some((column, _)) = self.view.scheme.claim.iter().find(|(_, set)| *set == Set::Worker) {
            filter.insert(self.view.name(column), &self.view.worker);
        }
        let update = vec![doc! { "$set": self.sets(sets, refused) }];
        let set = collection.update_many(filter, update).hint(by_id()).await;
        set.map(|_| ())
            .map_err(|error| server_error::classify(&error, &Doing::Writing(collection.namespace().to_string())))
    }

    /// Sets a document done that has failed for good, if it still has; says whether it had.
    pub async fn settle(&self, table: u32, id: &str) -> Result<bool, SourceFailure> {
        let collection = &self.collections[table as usize];
        // A header has the text of an id, whatever the id's type is.
        let mut ids = vec![Bson::from(id)];
        ids.extend(ObjectId::parse_str(id).map(Bson::from));
        ids.extend(Uuid::parse_str(id).map(Bson::from));
        ids.extend(id.parse::<i64>().map(Bson::from));
        let mut filter = self.tests(self.view.scheme.failed);
        let field = if self.view.id.is_empty() { "_id" } else { &self.view.id };
        filter.insert(field, doc! { "$in": ids });
        let update = vec![doc! { "$set": self.sets(self.view.scheme.done, &[]) }];
        let settled = collection.update_one(filter, update).await;
        settled
            .map(|settled| settled.matched_count > 0)
            .map_err(|error| server_error::classify(&error, &Doing::Writing(collection.namespace().to_string())))
    }

    pub async fn recover(&mut self, all: bool) -> Result<u64, SourceFailure> {
        let scheme = self.view.scheme;
        let mut recovered = 0;
        for collection in &self.collections {
            let mut filter = self.tests(scheme.claimed);
            if !all {
                filter.extend(self.tests(scheme.expired));
            }
            let set = collection.update_many(filter, vec![doc! { "$set": self.sets(scheme.release, &[]) }]).await;
            let set = set
                .map_err(|error| server_error::classify(&error, &Doing::Writing(collection.namespace().to_string())))?;
            recovered += set.modified_count;
        }
        Ok(recovered)
    }

    pub async fn waiting(&mut self) -> Result<Vec<Waits>, SourceFailure> {
        let (Some(next_try), Some(key)) = (self.view.scheme.next_try, self.view.key.as_deref()) else {
            return Ok(Vec::new());
        };
        let next_try = self.view.name(next_try);
        let mut waiting = Vec::new();
        for (at, collection) in self.collections.iter().enumerate() {
            let mut filter = self.tests(self.view.scheme.pending);
            filter.insert("$expr", doc! { "$gt": [format!("${next_try}"), "$$NOW"] });
            let reading = |error: ::mongodb::error::Error| {
                server_error::classify(&error, &Doing::Reading(collection.namespace().to_string()))
            };
            let found = collection.find(filter).projection(doc! { key: 1, &next_try: 1 }).await.map_err(reading)?;
            for document in drain(found).await.map_err(reading)? {
                let of = document.get_str(key).ok().map(|key| key.as_bytes().to_vec());
                let until = document.get_datetime(&next_try).map_or(0, |date| date.timestamp_millis());
                let pause = until.saturating_sub(::mongodb::bson::DateTime::now().timestamp_millis()).max(0);
                waiting.push((at as u32, of, Duration::from_millis(pause.unsigned_abs())));
            }
        }
        Ok(waiting)
    }

    pub async fn renew(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        self.set(table, self.view.scheme.renew, ids.iter().map(|id| read(id)).collect(), &[]).await
    }

    pub async fn give_back(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        self.set(table, self.view.scheme.release, ids.iter().map(|id| read(id)).collect(), &[]).await
    }

    pub async fn look(&mut self, most: u64, stats: &SourceStats) -> Result<(), SourceFailure> {
        let mut depth = 0;
        for collection in &self.collections {
            let pending = collection.count_documents(self.tests(self.view.scheme.pending)).limit(most).await;
            depth += pending
                .map_err(|error| server_error::classify(&error, &Doing::Reading(collection.namespace().to_string())))?;
        }
        stats.set_depth(depth);
        Ok(())
    }
}

/// Conditions as the server takes them.
pub(in crate::source) fn tests(view: &View, tests: &[(&str, Test)]) -> Document {
    let mut filter = Document::new();
    let mut also = Vec::new();
    for (column, test) in tests {
        let field = view.name(column);
        match test {
            Test::Is(text) => {
                filter.insert(field, *text);
            }
            Test::IsNumber(number) => {
                filter.insert(field, *number);
            }
            Test::IsNull => {
                filter.insert(field, Bson::Null);
            }
            Test::NoneOf(texts) => {
                filter.insert(field, doc! { "$nin": texts.to_vec() });
            }
            Test::NotNumber(number) => {
                filter.insert(field, doc! { "$ne": *number });
            }
            Test::BelowMost | Test::Exhausted => {
                let most = match view.scheme.own_most {
                    Some(own) => doc! { "$ifNull": [format!("${}", view.name(own)), view.most] }.into(),
                    None => Bson::from(view.most),
                };
                let is = if *test == Test::Exhausted { "$gte" } else { "$lt" };
                also.push(doc! { is: [{ "$ifNull": [format!("${field}"), 0] }, most] });
            }
            Test::Past => also.push(doc! { "$lt": [{ "$ifNull": [format!("${field}"), Bson::Null] }, "$$NOW"] }),
            Test::LeasePast => also.push(doc! { "$lt": [
                { "$ifNull": [format!("${field}"), Bson::Null] },
                { "$subtract": ["$$NOW", view.lease.as_millis() as i64] },
            ] }),
        }
    }
    if !also.is_empty() {
        filter.insert("$expr", doc! { "$and": also });
    }
    filter
}

/// Documents are found by their ids: an index of the status would do for the first of them, and is then gone through to its
/// end.
pub(in crate::source) fn by_id() -> Hint {
    Hint::Keys(doc! { "_id": 1 })
}

fn majority() -> WriteConcern {
    WriteConcern::majority()
}

async fn drain(mut cursor: ::mongodb::Cursor<RawDocumentBuf>) -> ::mongodb::error::Result<Vec<RawDocumentBuf>> {
    let mut documents = Vec::new();
    while cursor.advance().await? {
        documents.push(cursor.current().to_owned());
    }
    Ok(documents)
}

fn id_of(document: &RawDocumentBuf) -> Option<Bson> {
    let id: RawBson = document.get("_id").ok()??.into();
    Bson::try_from(id).ok()
}

/// An id as a text that can be read again, whatever its type.
pub(in crate::source) fn written(id: &Bson) -> String {
    match id {
        Bson::String(text) => format!("s{text}"),
        Bson::ObjectId(id) => format!("o{id}"),
        other => {
            let bytes =
                RawDocumentBuf::try_from(&doc! { "": other }).map(RawDocumentBuf::into_bytes).unwrap_or_default();
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("b{hex}")
        }
    }
}

pub(in crate::source) fn read(text: &str) -> Bson {
    let binary = |hex: &str| {
        let bytes = (0..hex.len() / 2).map(|at| u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok());
        let document = RawDocumentBuf::from_bytes(bytes.collect::<Option<Vec<u8>>>()?).ok()?;
        let id: RawBson = document.get("").ok()??.into();
        Bson::try_from(id).ok()
    };
    let read = match text.split_at_checked(1) {
        Some(("s", text)) => Some(Bson::String(text.to_owned())),
        Some(("o", hex)) => ObjectId::parse_str(hex).ok().map(Bson::ObjectId),
        Some(("b", hex)) => binary(hex),
        _ => None,
    };
    read.unwrap_or(Bson::Null)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_any_type_survives_being_written_and_read() {
        let uuid = Bson::from(Uuid::new());
        for id in [Bson::ObjectId(ObjectId::new()), "x".into(), Bson::Int64(7), Bson::Int32(7), uuid] {
            assert_eq!(read(&written(&id)), id);
        }
    }
}
