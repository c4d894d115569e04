//! What a pipeline stands on (collections, indexes, starting position) and the commands that make it. `init` runs
//! exactly what its `--dry-run` prints.

use std::time::Duration;

use futures_util::TryStreamExt as _;
use mongodb::Database;
use mongodb::bson::{Document, doc};

use super::change_stream::ALL;
use super::checkpoint::{self, Place};
use super::lease;
use super::server::{self, Connection, Server};
use super::server_error::{self, Doing, code};
use super::{first_position, judge, watch_of};
use crate::checkpoint::{Checkpoint, FORMAT, SnapshotState};
use crate::config::{MongoSettings, PipelineSettings, RouteSettings, Snapshot};
use crate::dead_letters::mongodb as letters;
use crate::route::layout::Layout;
use crate::route::polling::Set;
use crate::source::poll::document_name;
use crate::source::{SourceFailure, audit, schema};

pub(crate) const NATIVE: &str = include_str!("../../../sql/mongodb/native.js");
const DEBEZIUM: &str = include_str!("../../../sql/mongodb/debezium.js");
const NATIVE_STATUS: &str = include_str!("../../../sql/mongodb/native-status.js");
const ENTITY: &str = include_str!("../../../sql/mongodb/entity.js");
const MESSAGE_GROUP: &str = include_str!("../../../sql/mongodb/message-group.js");
const TTL: &str = include_str!("../../../sql/mongodb/ttl.js");
const CHECKPOINT: &str = include_str!("../../../sql/mongodb/checkpoint.js");

const TTL_INDEX: &str = "outboxd_ttl";

type Wanted<'a> = schema::Wanted<'a, MongoSettings>;

/// One command, and where it runs.
struct Step {
    thing: String,
    database: Database,
    command: Document,
}

#[derive(Default)]
struct Plan {
    /// What is neither there nor made.
    remarks: Vec<String>,
    present: Vec<String>,
    steps: Vec<Step>,
    /// The starting position of the stream, before the steps.
    position: Option<Checkpoint>,
}

/// Makes what is missing, saying one line for each thing. A second time there is nothing to do.
pub async fn init(wanted: &Wanted<'_>, say: &mut dyn FnMut(&str)) -> Result<(), SourceFailure> {
    let connection = server::connect(wanted.settings).await?;
    let plan = plan(&connection, wanted).await?;
    for remark in &plan.remarks {
        say(remark);
    }
    for thing in &plan.present {
        say(&format!("exists already: {thing}"));
    }
    for step in &plan.steps {
        run(&step.database, step.command.clone()).await?;
        say(&format!("created {}", step.thing));
    }
    if let Some(position) = &plan.position {
        store(&connection, wanted, position.clone()).await?;
        say(&format!("created starting position of pipeline {}: {}", wanted.of.name, position.position));
    }
    if plan.steps.is_empty() && plan.position.is_none() {
        say("nothing to do: everything is in place");
    }
    Ok(())
}

/// The commands that [`init`] would run, for mongosh.
pub async fn dry_run(wanted: &Wanted<'_>) -> Result<String, SourceFailure> {
    let connection = server::connect(wanted.settings).await?;
    let plan = plan(&connection, wanted).await?;
    let mut script = String::new();
    for remark in &plan.remarks {
        script.push_str(&format!("// {remark}\n"));
    }
    for thing in &plan.present {
        script.push_str(&format!("// exists already: {thing}\n"));
    }
    for step in &plan.steps {
        let json = serde_json::to_string(&step.command).unwrap_or_default();
        let database = serde_json::to_string(step.database.name()).unwrap_or_default();
        script.push_str(&format!("\n// {}\ndb.getSiblingDB({database}).runCommand({json})\n", step.thing));
    }
    match &plan.position {
        Some(position) => script.push_str(&format!("\n// starting position: {}\n", position.position)),
        None if plan.steps.is_empty() => script.push_str("// nothing to do: everything is in place\n"),
        None => {}
    }
    Ok(script)
}

async fn plan(connection: &Connection, wanted: &Wanted<'_>) -> Result<Plan, SourceFailure> {
    let settings = wanted.settings;
    let server = Server::ask(connection).await?;
    if let Some(failure) = judge::server(&server).into_iter().next().filter(|_| wanted.is_log()) {
        return Err(failure);
    }
    let watch = watch_of(settings, connection, &server);
    let mut plan = Plan::default();
    for (database, collection) in watch.scope.namespaces() {
        if collection == ALL {
            plan.remarks.push(format!("all collections of {database} are read as they come: none is made for it"));
            continue;
        }
        let database = connection.client.database(database);
        for command in commands(&template(&wanted.of.route, collection)) {
            plan.add(&database, collection, command).await?;
        }
        if wanted.is_native_status() {
            for command in commands(&filled(NATIVE_STATUS, &wanted.of.route, collection)) {
                plan.add(&database, collection, command).await?;
            }
        }
    }
    if let Some(ttl) = wanted.ttl {
        for (database, collection) in watch.scope.namespaces().iter().filter(|(_, collection)| collection != ALL) {
            let database = connection.client.database(database);
            plan.add_ttl(&database, collection, wanted, ttl).await?;
        }
        plan.remarks.push(
            "documents expire when they are marked as delivered, which --capture poll does; others are never deleted"
                .to_owned(),
        );
    }
    for command in commands(&schema::fill(CHECKPOINT, |_| None)) {
        plan.add(&connection.database, lease::COLLECTION, command).await?;
    }
    if wanted.is_log() {
        for command in commands(&schema::fill(audit::MONGODB, |_| None)) {
            plan.add(&connection.database, audit::NAME, command).await?;
        }
    }
    for table in wanted.letter_tables() {
        let database = letters::database(connection, table);
        for command in letters::create(table) {
            plan.add(&database, &table.name, command).await?;
        }
    }
    if !wanted.is_log() {
        return Ok(plan);
    }
    let document = lease::document(&connection.database, &wanted.of.name).await?.unwrap_or_default();
    let stored = Place::open(&settings.checkpoint, &wanted.of.kafka)?.load(&wanted.of.name, &document).await?;
    if let Some(stored) = stored {
        plan.present.push(format!("position of pipeline {}: {}", wanted.of.name, stored.position));
        return Ok(plan);
    }
    let start = first_position(settings, &watch).await?;
    plan.position = Some(Checkpoint {
        format: FORMAT,
        pipeline: wanted.of.name.clone(),
        source: "mongodb".to_owned(),
        // Known when the pipeline's document is there.
        server: server.name().to_owned(),
        position: start.to_string(),
        file: watch.scope.to_string(),
        snapshot: match settings.snapshot {
            // The first run reads the collection; what is committed until then it delivers twice rather than not at all.
            Snapshot::Existing => SnapshotState::Pending,
            Snapshot::None => SnapshotState::None,
        },
    });
    Ok(plan)
}

impl Plan {
    async fn add(&mut self, database: &Database, collection: &str, command: Document) -> Result<(), SourceFailure> {
        let doing = Doing::Reading(format!("{}.{collection}", database.name()));
        let refused = |error: mongodb::error::Error| server_error::classify(&error, &doing);
        let (thing, present) = match command
            .get_array("indexes")
            .ok()
            .and_then(|indexes| indexes.first()?.as_document())
        {
            Some(index) => {
                let name = index.get_str("name").unwrap_or_default();
                let collection_of = database.collection::<Document>(collection);
                // A collection that is not there has no indexes.
                let names = collection_of.list_index_names().await.unwrap_or_default();
                (format!("index {name} of {}.{collection}", database.name()), names.iter().any(|known| known == name))
            }
            None => {
                let names = database.list_collection_names().filter(doc! { "name": collection });
                (format!("collection {}.{collection}", database.name()), !names.await.map_err(refused)?.is_empty())
            }
        };
        match present {
            true => self.present.push(thing),
            false => self.steps.push(Step { thing, database: database.clone(), command }),
        }
        Ok(())
    }
}

impl Plan {
    /// The index by which documents expire; one that is there is given the age that is asked for.
    async fn add_ttl(
        &mut self,
        database: &Database,
        collection: &str,
        wanted: &Wanted<'_>,
        ttl: Duration,
    ) -> Result<(), SourceFailure> {
        let Some((done, done_at)) = done_fields(wanted.of) else { return Ok(()) };
        let quoted = |text: &str| serde_json::to_string(text).unwrap_or_default();
        let script = schema::fill(TTL, |name| match name {
            "table" => Some(quoted(collection)),
            "done" => Some(quoted(done)),
            "done_at" => Some(quoted(&done_at)),
            "seconds" => Some(ttl.as_secs().to_string()),
            _ => None,
        });
        let indexes = database.collection::<Document>(collection).list_indexes().await;
        // A collection that is not there has no indexes.
        let indexes: Vec<_> = match indexes {
            Ok(listed) => listed.try_collect().await.unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        let known = indexes.into_iter().filter_map(|index| index.options);
        let known = known.into_iter().find(|options| options.name.as_deref() == Some(TTL_INDEX));
        match known.and_then(|options| options.expire_after) {
            Some(age) if age != ttl => {
                let seconds = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
                let index = doc! { "name": TTL_INDEX, "expireAfterSeconds": seconds };
                self.steps.push(Step {
                    thing: format!("age of index {TTL_INDEX} of {}.{collection}", database.name()),
                    database: database.clone(),
                    command: doc! { "collMod": collection, "index": index },
                });
                Ok(())
            }
            _ => {
                for command in commands(&script) {
                    self.add(database, collection, command).await?;
                }
                Ok(())
            }
        }
    }
}

/// What a delivered document has in `status`, and the field that says when it was delivered.
fn done_fields(of: &PipelineSettings) -> Option<(&'static str, String)> {
    let scheme = Layout::named(&of.route.layout)?.polling?;
    let text = |(column, set): &(&str, Set)| match set {
        Set::Text(text) if *column == "status" => Some(*text),
        _ => None,
    };
    let done = scheme.done.iter().find_map(text)?;
    let (done_at, _) = scheme.done.iter().find(|(_, set)| *set == Set::Now)?;
    Some((done, document_name(&of.route, done_at)))
}

async fn run(database: &Database, command: Document) -> Result<(), SourceFailure> {
    match database.run_command(command).await {
        // Someone else made it meanwhile.
        Err(error) if server_error::code_of(&error) == Some(code::NAMESPACE_EXISTS) => Ok(()),
        ran => {
            let doing = Doing::Writing(format!("the database {}", database.name()));
            ran.map(|_| ()).map_err(|error| server_error::classify(&error, &doing))
        }
    }
}

async fn store(connection: &Connection, wanted: &Wanted<'_>, mut first: Checkpoint) -> Result<(), SourceFailure> {
    lease::make_document(&connection.database, &wanted.of.name).await?;
    let document = lease::document(&connection.database, &wanted.of.name).await?.unwrap_or_default();
    first.server = checkpoint::identity(&first.server, &document);
    match Place::open(&wanted.settings.checkpoint, &wanted.of.kafka)? {
        Place::Document => lease::store_first(&connection.database, &first).await,
        Place::Elsewhere(store) => Ok(store.save(&first).await?),
    }
}

fn template(route: &RouteSettings, collection: &str) -> String {
    let template = match route.layout.as_str() {
        "debezium" => DEBEZIUM,
        "entity" => ENTITY,
        "message-group" => MESSAGE_GROUP,
        _ => NATIVE,
    };
    filled(template, route, collection)
}

fn filled(template: &str, route: &RouteSettings, collection: &str) -> String {
    let quoted = |text: &str| serde_json::to_string(text).unwrap_or_default();
    schema::fill(template, |name| match name {
        "table" => Some(quoted(collection)),
        role => {
            let chosen = route.columns.iter().rev().find(|(chosen, _)| chosen == role);
            chosen.filter(|(_, column)| !column.starts_with('/')).map(|(_, column)| quoted(column))
        }
    })
}

/// The commands of a script: `db.runCommand( … )`, one a line, with JSON inside.
pub(crate) fn commands(script: &str) -> Vec<Document> {
    let inner = |line: &str| Some(line.trim().strip_prefix("db.runCommand(")?.strip_suffix(')')?.to_owned());
    script.lines().filter_map(inner).filter_map(|json| serde_json::from_str(&json).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_a_script_is_understood() {
        for (script, expected) in [
            (NATIVE, 2),
            (DEBEZIUM, 1),
            (ENTITY, 6),
            (MESSAGE_GROUP, 2),
            (NATIVE_STATUS, 1),
            (CHECKPOINT, 1),
            (TTL, 1),
            (audit::MONGODB, 1),
            (letters::CREATE, 3),
        ] {
            let filled = schema::fill(script, |_| None);
            assert_eq!(commands(&filled).len(), expected, "{filled}");
            assert_eq!(filled.lines().filter(|line| !line.trim().is_empty()).count(), expected, "{filled}");
        }
    }

    #[test]
    fn the_fields_of_an_index_keep_their_order() {
        let made = commands(&schema::fill(NATIVE, |_| None));
        assert!(made[1].to_string().contains(r#"{ "created_at": 1, "_id": 1 }"#), "{}", made[1]);
    }

    #[test]
    fn the_collections_name_is_put_in() {
        let route = RouteSettings { layout: "native".to_owned(), ..RouteSettings::default() };
        let made = commands(&template(&route, "a \"b\""));
        assert!(made.iter().all(|command| command.values().next().and_then(|name| name.as_str()) == Some("a \"b\"")));
    }
}
