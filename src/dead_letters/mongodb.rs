//! Letters in a collection of MongoDB.

use std::time::Duration;

use futures_util::TryStreamExt as _;
use mongodb::bson::oid::ObjectId;
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Binary, Bson, DateTime, Document, doc};
use mongodb::error::Error;
use mongodb::options::{CollectionOptions, ReadPreference, SelectionCriteria, WriteConcern};
use mongodb::{Collection, Database};

use super::letter::{Kept, Letter, headers_from_json, headers_to_json};
use super::{Chosen, Discarded, Page, Whose};
use crate::config::{MongoSettings, TableName};
use crate::source::mongodb::server::{self, Connection};
use crate::source::mongodb::server_error::{self, Doing, code};
use crate::source::mongodb::setup;
use crate::source::{SourceFailure, schema};

pub const CREATE: &str = include_str!("../../sql/mongodb/dead-letters.js");

/// How long the server may take to have a letter on most of its members.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a letter that is being sent belongs to whoever sends it: longer than that may take.
const CLAIM: Duration = Duration::from_secs(1200);
/// What MongoDB allows a document.
const LARGEST: usize = 16 << 20;

pub struct Letters {
    database: Database,
    collection: Collection<Document>,
    name: String,
    /// It is among the collections that are read as outboxes.
    is_read: bool,
}

/// The commands that make the collection.
pub fn create(table: &TableName) -> Vec<Document> {
    let quoted = serde_json::to_string(&table.name).unwrap_or_default();
    setup::commands(&schema::fill(CREATE, |name| (name == "table").then(|| quoted.clone())))
}

/// The database that it is in.
pub fn database(connection: &Connection, table: &TableName) -> Database {
    table.schema.as_deref().map_or_else(|| connection.database.clone(), |name| connection.client.database(name))
}

impl Letters {
    pub async fn open(settings: &MongoSettings, table: &TableName) -> Result<Self, SourceFailure> {
        let connection = server::connect(settings).await?;
        let database = database(&connection, table);
        let default = connection.database.name();
        let is_read = settings.tables.iter().any(|outbox| {
            let same = outbox.schema.as_deref().unwrap_or(default) == database.name();
            same && (outbox.name == "*" || outbox.name == table.name)
        });
        let mut majority = WriteConcern::majority();
        majority.w_timeout = Some(PATIENCE);
        // Whatever the URL says: a letter must outlive a fail-over, and one just written must be seen.
        let options = CollectionOptions::builder()
            .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
            .write_concern(majority)
            .build();
        let collection = database.collection_with_options(&table.name, options);
        Ok(Letters { name: format!("{}.{}", database.name(), table.name), database, collection, is_read })
    }

    fn failed(&self, error: &Error, doing: &str) -> SourceFailure {
        match server_error::classify(error, &Doing::Writing(self.name.clone())) {
            SourceFailure::NotReady { what, remedy } if server_error::code_of(error) == Some(code::UNAUTHORIZED) => {
                let what = format!("{doing} the dead-letter collection: {what}");
                let remedy = format!("grant find, insert, update and remove on {}; {remedy}", self.name);
                SourceFailure::NotReady { what, remedy }
            }
            failure => failure,
        }
    }

    pub async fn exists(&self) -> Result<bool, SourceFailure> {
        // Names alone may be asked for without a right to list.
        let asked = doc! {
            "listCollections": 1,
            "nameOnly": true,
            "authorizedCollections": true,
            "filter": { "name": self.collection.name() },
        };
        let listed =
            self.database.run_cursor_command(asked).await.map_err(|error| self.failed(&error, "looking for"))?;
        let listed: Vec<Document> = listed.try_collect().await.map_err(|error| self.failed(&error, "looking for"))?;
        Ok(!listed.is_empty())
    }

    pub async fn create(&self) -> Result<(), SourceFailure> {
        let table = TableName { schema: None, name: self.collection.name().to_owned() };
        for command in create(&table) {
            match self.database.run_command(command).await {
                Err(error) if server_error::code_of(&error) == Some(code::NAMESPACE_EXISTS) => {}
                Err(error) => {
                    return Err(match self.failed(&error, "creating") {
                        SourceFailure::NotReady { what, .. } => SourceFailure::NotReady {
                            what,
                            remedy: super::by_hand(&self.name, "sql/mongodb/dead-letters.js"),
                        },
                        failure => failure,
                    });
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }

    /// Whether letters may be read here. That they may be written shows with the first.
    pub async fn probe(&self) -> Result<(), SourceFailure> {
        if self.is_read {
            return Err(SourceFailure::NotReady {
                what: format!("the dead-letter collection {} would be read as an outbox", self.name),
                remedy: "name a collection of another database: --dead-letter collection:DATABASE.NAME".to_owned(),
            });
        }
        let found = self.collection.find_one(doc! {}).projection(doc! { "_id": 1 }).await;
        found.map(|_| ()).map_err(|error| self.failed(&error, "reading"))
    }

    pub async fn write(&self, letter: &Letter) -> Result<(), SourceFailure> {
        let Letter { pipeline, publisher, source_table, event_id, topic, key, value, position, reason, .. } = letter;
        let headers = serde_json::from_value::<Bson>(headers_to_json(&letter.headers)).unwrap_or_default();
        let fingerprint = bytes(&letter.fingerprint());
        let size = key.as_ref().map_or(0, Vec::len) + value.as_ref().map_or(0, Vec::len) + letter.headers.weight();
        if size + reason.len() + 4096 > LARGEST {
            return Err(SourceFailure::Undecodable {
                what: format!("a dead letter has {size} bytes, and a document of MongoDB 16 MiB"),
                remedy: "use --dead-letter topic:NAME with a large enough max.message.bytes, or remove the cause"
                    .to_owned(),
            });
        }
        let letter = doc! {
            "fingerprint": &fingerprint,
            "pipeline": pipeline,
            "publisher": publisher,
            "source_table": source_table,
            "event_id": event_id,
            "topic": topic,
            "key": key.as_deref().map(bytes),
            "value": value.as_deref().map(bytes),
            "headers": headers,
            "position": position,
            "reason": reason,
            "attempts": letter.attempts as i32,
            "failed_at": DateTime::now(),
            "replayed_at": Bson::Null,
        };
        let mut letter = letter;
        letter.remove("fingerprint");
        let same = doc! { "fingerprint": fingerprint };
        match self.collection.update_one(same, doc! { "$setOnInsert": letter }).upsert(true).await {
            // Written by another in the same moment.
            Err(error) if server_error::code_of(&error) == Some(code::DUPLICATE_KEY) => Ok(()),
            Err(error) if server_error::code_of(&error) == Some(code::OBJECT_TOO_LARGE) => {
                let what = format!("a dead letter is too large: {}", server_error::message(&error));
                Err(SourceFailure::Undecodable { what, remedy: super::MAKE_ROOM.to_owned() })
            }
            written => written.map(|_| ()).map_err(|error| self.failed(&error, "writing")),
        }
    }

    async fn kept(&self, filter: Document, newest: i32, limit: i64, whole: bool) -> Result<Vec<Kept>, SourceFailure> {
        let mut found = self.collection.find(filter).sort(doc! { "_id": newest }).limit(limit);
        if !whole {
            found = found.projection(doc! { "value": 0, "headers": 0 });
        }
        let failed = |error: Error| self.failed(&error, "reading");
        let documents: Vec<Document> = found.await.map_err(failed)?.try_collect().await.map_err(failed)?;
        Ok(documents.iter().map(kept).collect())
    }

    /// The last letters, newest last.
    pub async fn list(&self, whose: &Whose, page: &Page<'_>) -> Result<Vec<Kept>, SourceFailure> {
        let mut filter = of(whose);
        if page.waiting {
            filter.insert("replayed_at", Bson::Null);
        }
        if let Some(before) = page.before {
            filter.insert("_id", doc! { "$lt": ObjectId::parse_str(before).unwrap_or_default() });
        }
        let mut letters = self.kept(filter, -1, i64::from(page.limit), false).await?;
        letters.reverse();
        Ok(letters)
    }

    pub async fn waiting(&self, whose: &Whose, most: u32) -> Result<u64, SourceFailure> {
        let mut filter = of(whose);
        filter.insert("replayed_at", Bson::Null);
        let counted = self.collection.count_documents(filter).limit(u64::from(most)).await;
        counted.map_err(|error| self.failed(&error, "reading"))
    }

    pub async fn claim(&self, kept: &Kept) -> Result<bool, SourceFailure> {
        let now = DateTime::now();
        let until = DateTime::from_millis(now.timestamp_millis() + CLAIM.as_millis() as i64);
        let mut free = self.one(kept);
        // As it was read; and a claim that was left behind ends.
        let replayed = kept.replayed_at.as_deref().and_then(|at| DateTime::parse_rfc3339_str(at).ok());
        free.insert("replayed_at", replayed);
        free.insert("$or", vec![doc! { "claimed_until": Bson::Null }, doc! { "claimed_until": { "$lt": now } }]);
        let claimed = self.collection.update_one(free, doc! { "$set": { "claimed_until": until } }).await;
        Ok(claimed.map_err(|error| self.failed(&error, "writing"))?.matched_count > 0)
    }

    pub async fn release(&self, kept: &Kept) -> Result<(), SourceFailure> {
        let release = doc! { "$unset": { "claimed_until": "" } };
        let released = self.collection.update_one(self.one(kept), release).await;
        released.map(|_| ()).map_err(|error| self.failed(&error, "writing"))
    }

    fn one(&self, kept: &Kept) -> Document {
        doc! { "_id": ObjectId::parse_str(&kept.id).unwrap_or_default() }
    }

    pub async fn find(&self, whose: &Whose, id: &str) -> Result<Option<Kept>, SourceFailure> {
        let Ok(id) = ObjectId::parse_str(id) else { return Ok(None) };
        let mut filter = of(whose);
        filter.insert("_id", id);
        Ok(self.kept(filter, 1, 1, true).await?.pop())
    }

    /// The oldest letter after this one that was not replayed.
    pub async fn next_waiting(&self, whose: &Whose, after: Option<&str>) -> Result<Option<Kept>, SourceFailure> {
        let mut filter = of(whose);
        filter.insert("replayed_at", Bson::Null);
        if let Some(after) = after.and_then(|id| ObjectId::parse_str(id).ok()) {
            filter.insert("_id", doc! { "$gt": after });
        }
        Ok(self.kept(filter, 1, 1, true).await?.pop())
    }

    pub async fn mark_replayed(&self, id: &str, moment: &str) -> Result<(), SourceFailure> {
        let moment = DateTime::parse_rfc3339_str(moment).unwrap_or_else(|_| DateTime::now());
        let id = ObjectId::parse_str(id).unwrap_or_default();
        let update = doc! { "$set": { "replayed_at": moment }, "$unset": { "claimed_until": "" } };
        let marked = self.collection.update_one(doc! { "_id": id }, update).await;
        marked.map(|_| ()).map_err(|error| self.failed(&error, "writing"))
    }

    fn discardable(&self, whose: &Whose, chosen: &Chosen) -> Document {
        let mut filter = of(whose);
        let age = i64::try_from(chosen.older_than.as_millis()).unwrap_or(i64::MAX);
        let oldest = DateTime::from_millis(DateTime::now().timestamp_millis().saturating_sub(age));
        filter.insert("failed_at", doc! { "$lte": oldest });
        if !chosen.all {
            filter.insert("replayed_at", doc! { "$ne": Bson::Null });
        }
        filter
    }

    pub async fn count(&self, whose: &Whose, chosen: &Chosen) -> Result<Discarded, SourceFailure> {
        let failed = |error: Error| self.failed(&error, "reading");
        let filter = self.discardable(whose, chosen);
        let letters = self.collection.count_documents(filter.clone()).await.map_err(failed)?;
        let last = self.kept(filter, -1, 1, false).await?.pop();
        Ok(Discarded { letters, last: last.map(|last| last.id).unwrap_or_default() })
    }

    pub async fn discard(&self, whose: &Whose, chosen: &Chosen, upto: &str) -> Result<u64, SourceFailure> {
        let Ok(upto) = ObjectId::parse_str(upto) else { return Ok(0) };
        let mut filter = self.discardable(whose, chosen);
        filter.insert("_id", doc! { "$lte": upto });
        let deleted = self.collection.delete_many(filter).await;
        deleted.map(|deleted| deleted.deleted_count).map_err(|error| self.failed(&error, "deleting from"))
    }

    pub async fn remove(&self, whose: &Whose, id: &str) -> Result<u64, SourceFailure> {
        let Ok(id) = ObjectId::parse_str(id) else { return Ok(0) };
        let mut filter = of(whose);
        filter.insert("_id", id);
        let deleted = self.collection.delete_one(filter).await;
        deleted.map(|deleted| deleted.deleted_count).map_err(|error| self.failed(&error, "deleting from"))
    }
}

fn of(whose: &Whose) -> Document {
    doc! { "pipeline": &whose.pipeline, "publisher": &whose.publisher }
}

fn bytes(bytes: &[u8]) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() })
}

fn kept(document: &Document) -> Kept {
    let text = |name: &str| document.get_str(name).ok().map(str::to_owned);
    let bytes = |name: &str| document.get_binary_generic(name).ok().cloned();
    let moment = |name: &str| document.get_datetime(name).ok().and_then(|at| at.try_to_rfc3339_string().ok());
    let headers = document.get("headers").and_then(|headers| serde_json::to_value(headers).ok()).unwrap_or_default();
    Kept {
        id: document.get_object_id("_id").map(|id| id.to_hex()).unwrap_or_default(),
        failed_at: moment("failed_at").unwrap_or_default(),
        replayed: document.get_datetime("replayed_at").is_ok(),
        replayed_at: moment("replayed_at"),
        letter: Letter {
            pipeline: text("pipeline").unwrap_or_default(),
            publisher: text("publisher").unwrap_or_default(),
            source_table: text("source_table").unwrap_or_default(),
            event_id: text("event_id"),
            topic: text("topic"),
            key: bytes("key"),
            value: bytes("value"),
            headers: headers_from_json(&headers),
            position: text("position").unwrap_or_default(),
            reason: text("reason").unwrap_or_default(),
            attempts: document.get_i32("attempts").map_or(0, i32::cast_unsigned),
        },
    }
}
