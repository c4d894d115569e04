//! Where the notes on a pipeline's publishers are kept: beside its position.
//!
//! ```text
//!   PostgreSQL   table outboxd_publishers
//!   MySQL        table outboxd_checkpoint, row `PIPELINE/publishers`
//!   MongoDB      collection outboxd_checkpoint, document `PIPELINE/publishers`
//!   elsewhere    topic outboxd_checkpoint, key `PIPELINE/publishers`; file PATH.publishers
//! ```

use ::mongodb::Collection;
use ::mongodb::bson::{Document, doc};

use std::sync::Arc;

use super::poll::progress::Progress;
use super::{Memory, SourceFailure, mongodb, mysql, postgres};
use crate::checkpoint::publishers::PublisherNotes;
use crate::checkpoint::{Checkpoint, FORMAT, SnapshotState, Store};
use crate::config::{CheckpointPlace, KafkaSettings, PipelineSettings, SourceSettings};

/// Creates PostgreSQL's table; run by `init`, by the first start that needs it, or by hand.
pub const CREATE: &str = include_str!("../../sql/postgres/publishers.sql");

pub struct NoteBook {
    pipeline: String,
    no_create: bool,
    place: Place,
}

enum Place {
    Postgres(Box<postgres::sql::SqlSession>),
    MySql(Box<mysql::session::Session>),
    Mongo(Collection<Document>),
    Elsewhere(Box<Store>),
    /// An event store's own table.
    Progress(Box<Progress>),
}

impl NoteBook {
    pub async fn open(settings: &PipelineSettings, memory: &Memory) -> Result<Self, SourceFailure> {
        if let (Memory::Events(memory), SourceSettings::Postgres(source)) = (memory, &settings.source) {
            let session = Arc::new(postgres::sql::connect(&postgres::conninfo(source)?).await?);
            let progress = Progress::of(settings, session, memory.remembered.clone());
            let (pipeline, place) = (settings.name.clone(), Place::Progress(Box::new(progress)));
            return Ok(NoteBook { pipeline, no_create: source.no_create, place });
        }
        let (place, no_create) = match &settings.source {
            SourceSettings::Postgres(source) => {
                let session = postgres::sql::connect(&postgres::conninfo(source)?).await?;
                (Place::Postgres(Box::new(session)), source.no_create)
            }
            SourceSettings::MySql(source) => match elsewhere(&source.checkpoint, &settings.kafka)? {
                Some(store) => (Place::Elsewhere(Box::new(store)), source.no_create),
                None => {
                    let session = mysql::session::Session::connect(&mysql::conninfo(source)?).await?;
                    (Place::MySql(Box::new(session)), source.no_create)
                }
            },
            SourceSettings::Mongo(source) => match elsewhere(&source.checkpoint, &settings.kafka)? {
                Some(store) => (Place::Elsewhere(Box::new(store)), source.no_create),
                None => {
                    let connection = mongodb::server::connect(source).await?;
                    (Place::Mongo(mongodb::lease::documents(&connection.database)), source.no_create)
                }
            },
        };
        Ok(NoteBook { pipeline: settings.name.clone(), no_create, place })
    }

    fn key(&self) -> String {
        format!("{}/publishers", self.pipeline)
    }

    /// The notes; none when nothing was ever noted.
    pub async fn load(&mut self) -> Result<Option<PublisherNotes>, SourceFailure> {
        let key = self.key();
        let json = match &mut self.place {
            Place::Postgres(session) => {
                match lacking(session).await? {
                    None => return Ok(None),
                    Some(lacking) if lacking.contains("SELECT") => {
                        tracing::warn!(
                            pipeline = self.pipeline,
                            "outboxd_publishers cannot be read, so that nobody can be paused: GRANT SELECT, INSERT, UPDATE on it"
                        );
                        return Ok(None);
                    }
                    Some(_) => {}
                }
                let select = "SELECT document::text FROM outboxd_publishers WHERE pipeline = $1";
                let row = session.query_opt(select, &[&self.pipeline]).await;
                let row =
                    row.map_err(|error| postgres::server_error::classify_sql(&error, "reading outboxd_publishers"));
                row?.map(|row| row.get::<_, String>(0))
            }
            Place::MySql(session) => mysql::checkpoint::load_note(session, &key).await?,
            Place::Mongo(collection) => {
                let found = collection.find_one(doc! { "_id": &key }).await;
                let found = found.map_err(|error| unnoted(&error))?;
                found.and_then(|found| found.get_str("document").ok().map(str::to_owned))
            }
            Place::Elsewhere(store) => store.load(&key).await?.map(|note| note.position),
            Place::Progress(progress) => return progress.begun().await.map(Some),
        };
        Ok(json.map(|json| PublisherNotes::from_json(&self.pipeline, &json)).transpose()?)
    }

    /// As [`load`](Self::load), and makes nothing that is missing.
    pub async fn peek(&mut self) -> Result<Option<PublisherNotes>, SourceFailure> {
        match &self.place {
            Place::Elsewhere(store) => {
                let note = store.peek(&self.key()).await?;
                Ok(note.map(|note| PublisherNotes::from_json(&self.pipeline, &note.position)).transpose()?)
            }
            _ => self.load().await,
        }
    }

    /// For a command that ends with it.
    pub async fn close(self) {
        if let Place::Mongo(collection) = self.place {
            mongodb::server::close(collection.client().clone()).await;
        }
    }

    /// Makes the place, where it is not there and may be made.
    pub async fn prepare(&mut self) -> Result<(), SourceFailure> {
        let Place::Postgres(session) = &mut self.place else { return Ok(()) };
        match lacking(session).await? {
            Some(lacking) if lacking.is_empty() => return Ok(()),
            Some(lacking) => {
                return Err(SourceFailure::NotReady {
                    what: format!("the role lacks {lacking} on outboxd_publishers"),
                    remedy: "GRANT SELECT, INSERT, UPDATE ON outboxd_publishers to outboxd's role".to_owned(),
                });
            }
            None => {}
        }
        if self.no_create {
            return Err(SourceFailure::NotReady {
                what: "there is no table outboxd_publishers".to_owned(),
                remedy: "run `outboxd init`, or sql/postgres/publishers.sql, and grant SELECT, INSERT, UPDATE on it"
                    .to_owned(),
            });
        }
        match session.batch_execute(CREATE).await {
            Err(error) if !postgres::server_error::made_meanwhile(&error) => {
                Err(postgres::server_error::classify_sql(&error, "creating outboxd_publishers"))
            }
            _ => Ok(()),
        }
    }

    pub async fn save(&mut self, notes: &PublisherNotes) -> Result<(), SourceFailure> {
        let (key, json) = (self.key(), notes.to_json());
        let note = |position: String| Checkpoint {
            format: FORMAT,
            pipeline: key.clone(),
            source: String::new(),
            server: String::new(),
            position,
            file: String::new(),
            snapshot: SnapshotState::None,
        };
        match &mut self.place {
            Place::Postgres(session) => {
                let upsert = "INSERT INTO outboxd_publishers (pipeline, document, updated_at)
                     VALUES ($1, $2::text::jsonb, now())
                     ON CONFLICT (pipeline) DO UPDATE SET document = excluded.document, updated_at = now()";
                let saved = session.execute(upsert, &[&self.pipeline, &json]).await;
                saved
                    .map(|_| ())
                    .map_err(|error| postgres::server_error::classify_sql(&error, "writing outboxd_publishers"))
            }
            Place::MySql(session) => mysql::checkpoint::Place::Table.save(session, &note(json)).await,
            Place::Mongo(collection) => {
                let update = doc! { "$set": { "document": &json, "format": FORMAT } };
                let saved = collection.update_one(doc! { "_id": &key }, update).upsert(true).await;
                saved.map(|_| ()).map_err(|error| unnoted(&error))
            }
            Place::Elsewhere(store) => Ok(store.save(&note(json)).await?),
            Place::Progress(progress) => progress.save(notes).await,
        }
    }
}

fn elsewhere(place: &CheckpointPlace, kafka: &KafkaSettings) -> Result<Option<Store>, SourceFailure> {
    let place = match place {
        CheckpointPlace::File(path) => CheckpointPlace::File(format!("{path}.publishers")),
        other => other.clone(),
    };
    Store::open(&place, kafka)
}

pub async fn table_exists(session: &postgres::sql::SqlSession) -> Result<bool, SourceFailure> {
    let found = session.query_one("SELECT pg_catalog.to_regclass('outboxd_publishers') IS NOT NULL", &[]).await;
    found
        .map(|row| row.get(0))
        .map_err(|error| postgres::server_error::classify_sql(&error, "looking for outboxd_publishers"))
}

/// What the role may not do with the table; `None` when there is none.
pub async fn lacking(session: &postgres::sql::SqlSession) -> Result<Option<String>, SourceFailure> {
    if !table_exists(session).await? {
        return Ok(None);
    }
    let asked = "SELECT coalesce(string_agg(privilege, ', ' ORDER BY nr), '') FROM
             (VALUES (1, 'SELECT'), (2, 'INSERT'), (3, 'UPDATE')) AS needed (nr, privilege)
         WHERE NOT has_table_privilege('outboxd_publishers', privilege)";
    let row = session.query_one(asked, &[]).await;
    let row = row.map_err(|error| postgres::server_error::classify_sql(&error, "looking at outboxd_publishers"))?;
    Ok(Some(row.get(0)))
}

fn unnoted(error: &::mongodb::error::Error) -> SourceFailure {
    let doing = mongodb::server_error::Doing::Writing(mongodb::lease::COLLECTION.to_owned());
    mongodb::server_error::classify(error, &doing)
}
