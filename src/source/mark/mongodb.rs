//! Marking documents of MongoDB.

use std::time::Duration;

use ::mongodb::bson::{Bson, RawBson, RawDocument, doc};

use crate::config::MongoSettings;
use crate::event::Projection;
use crate::route::polling::Tests;
use crate::source::SourceFailure;
use crate::source::mongodb::preflight::allowed;
use crate::source::mongodb::server;
use crate::source::mongodb::server_error::{self, Doing};
use crate::source::poll::View;
use crate::source::poll::ledger::Refused;
use crate::source::poll::mongodb::{MongoStore, by_id, written};

pub struct MongoMarks {
    store: MongoStore,
}

impl MongoMarks {
    pub async fn find(settings: &MongoSettings, view: View) -> Result<Self, SourceFailure> {
        Ok(MongoMarks { store: MongoStore::open(settings, view, &Projection::default(), "").await? })
    }

    /// Everything that stands in the way. A document that lacks a field gets it.
    pub async fn wrong(&self) -> Result<Vec<SourceFailure>, SourceFailure> {
        let asked = doc! { "connectionStatus": 1, "showPrivileges": true };
        let status = server::command(&self.store.connection.database, asked).await?;
        let Ok(auth) = status.get_document("authInfo") else { return Ok(Vec::new()) };
        if auth.get_array("authenticatedUsers").map_or(0, Vec::len) == 0 {
            // The server lets everyone do everything.
            return Ok(Vec::new());
        }
        let privileges = auth.get_array("authenticatedUserPrivileges").map(Vec::as_slice).unwrap_or_default();
        let mut wrong = Vec::new();
        for collection in &self.store.collections {
            let namespace = collection.namespace();
            let (database, name) = (&namespace.db, &namespace.coll);
            let lacking: Vec<_> =
                ["find", "update"].into_iter().filter(|action| !allowed(privileges, database, name, action)).collect();
            if !lacking.is_empty() {
                let actions: Vec<_> = lacking.iter().map(|action| format!("\"{action}\"")).collect();
                wrong.push(SourceFailure::NotReady {
                    what: format!("the user lacks {} on {namespace}, so that documents cannot be marked", lacking.join(", ")),
                    remedy: format!(
                        "db.grantPrivilegesToRole(\"outboxd\", [{{resource: {{db: \"{database}\", collection: \"{name}\"}}, \
                         actions: [{}]}}]) (see sql/mongodb/role.js)",
                        actions.join(", ")
                    ),
                });
            }
        }
        Ok(wrong)
    }

    pub async fn mark(&mut self, table: u32, ids: &[&[u8]]) -> Result<u64, SourceFailure> {
        let scheme = self.store.view.scheme;
        let ids = ids.iter().filter_map(|id| read(id)).collect();
        self.set(table, ids, scheme.unmarked, doc! { "$set": self.store.sets(scheme.done, &[]) }).await
    }

    pub async fn mark_parked(&mut self, table: u32, rows: &[(&[u8], &str)]) -> Result<u64, SourceFailure> {
        let scheme = self.store.view.scheme;
        let read: Vec<_> = rows.iter().filter_map(|(id, why)| Some((read(id)?, *why))).collect();
        let texts: Vec<_> = read.iter().map(|(id, why)| (written(id), *why)).collect();
        let pause = Duration::ZERO;
        let refused: Vec<_> = texts.iter().map(|(id, why)| Refused { id, attempts: 0, why, pause }).collect();
        let set = doc! { "$set": self.store.sets(scheme.parked, &refused) };
        self.set(table, read.into_iter().map(|(id, _)| id).collect(), scheme.open, set).await
    }

    async fn set(
        &self,
        table: u32,
        ids: Vec<Bson>,
        tests: Tests,
        set: ::mongodb::bson::Document,
    ) -> Result<u64, SourceFailure> {
        let collection = &self.store.collections[table as usize];
        let mut filter = self.store.tests(tests);
        filter.insert("_id", doc! { "$in": ids });
        let set = collection.update_many(filter, vec![set]).hint(by_id()).await;
        let doing = || Doing::Writing(collection.namespace().to_string());
        set.map(|set| set.modified_count).map_err(|error| server_error::classify(&error, &doing()))
    }
}

/// An id as it was noted: alone in a document.
fn read(noted: &[u8]) -> Option<Bson> {
    let id: RawBson = RawDocument::from_bytes(noted).ok()?.get("").ok()??.into();
    Bson::try_from(id).ok()
}
