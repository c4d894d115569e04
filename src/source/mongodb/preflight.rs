//! `check` on the side of MongoDB: everything that stands in the way of a run, and what would hurt it later. Nothing is
//! created or changed. What a run itself would refuse is judged by the same functions ([`judge`]).

use std::sync::Arc;

use mongodb::bson::{Bson, Document, doc};
use mongodb::options::Tls;

use super::change_stream::{ALL, Entry, Scope, Watch};
use super::checkpoint::{self, Place};
use super::judge;
use super::lease;
use super::server::{self, Connection, Server};
use super::watch_of;
use crate::config::{CheckpointPlace, MongoSettings, PipelineSettings};
use crate::preflight::{Finding, Protection, Report, is_local};
use crate::source::{SourceFailure, backfill};

/// An oplog that reaches back less than this is lost over a bad night.
const SHORT_WINDOW_HOURS: u32 = 24;

/// Looks at everything that a run needs of the server.
pub async fn preflight(settings: &MongoSettings, of: &PipelineSettings) -> Vec<Finding> {
    let mut report = Report::about("SOURCE");
    if let Some(connection) = report.told("connection", server::connect(settings).await) {
        // What ends the look early has been reported.
        let _ = look(&mut report, &connection, settings, of).await;
        connection.close().await;
    }
    report.into_findings()
}

async fn look(
    report: &mut Report,
    connection: &Connection,
    settings: &MongoSettings,
    of: &PipelineSettings,
) -> Option<()> {
    let server = report.told("connection", Server::ask(connection).await)?;
    report.on(&server.address).ok("connection", format!("MongoDB {} answers", server.version_text()));
    protection(report, connection, &server);
    let wrong = judge::server(&server);
    match (&server.set, server.sharded) {
        (Some(set), _) if wrong.is_empty() => report.ok("replica-set", format!("a member of {set}")),
        (None, true) => report.warn(
            "replica-set",
            "this is a sharded cluster: it should work, and was never tried",
            "try it under load before you rely on it",
        ),
        _ => {}
    }
    let unusable = !wrong.is_empty();
    for failure in wrong {
        report.refused("replica-set", failure);
    }
    compatibility(report, connection).await;
    let watch = watch_of(settings, connection, &server);
    collections(report, connection, &watch.scope).await;
    report.on(checkpoint::described(connection.database.name()));
    checkpoint_rights(report, connection, settings).await;
    if unusable {
        return None;
    }
    // Whether the stream can be opened is best told by opening it.
    report.on(watch.scope.to_string());
    let opened = watch.position(&Entry::Now).await;
    if report.told("change-stream", opened).is_some() {
        report.ok("change-stream", format!("{} can be watched", watch.scope));
    }
    report.on(&server.address);
    window(report, connection).await;
    report.on(settings.checkpoint.describe());
    position(report, connection, &server, &watch, settings, of).await
}

fn protection(report: &mut Report, connection: &Connection, server: &Server) {
    let host = server.address.rsplit_once(':').map_or(server.address.as_str(), |(host, _)| host);
    let seen = match &connection.options.tls {
        Some(Tls::Enabled(tls)) if tls.allow_invalid_certificates == Some(true) => {
            Protection::Unverified("tlsAllowInvalidCertificates=true")
        }
        Some(Tls::Enabled(_)) => Protection::Verified("tls=true"),
        Some(Tls::Disabled) | None => Protection::Plain("tls=false"),
    };
    report.tls(seen, is_local(host), "add tls=true and tlsCAFile=/path/to/ca.pem to SOURCE");
}

async fn compatibility(report: &mut Report, connection: &Connection) {
    let asked = doc! { "getParameter": 1, "featureCompatibilityVersion": 1 };
    // Whoever relays need not know it, and mongos does not.
    let Ok(answer) = connection.client.database("admin").run_command(asked).await else { return };
    let version = answer.get_document("featureCompatibilityVersion").and_then(|version| version.get_str("version"));
    let version = version.unwrap_or("unknown");
    match judge::compatibility(version) {
        Err(failure) => report.refused("compatibility", failure),
        Ok(()) => report.ok("compatibility", format!("featureCompatibilityVersion is {version}")),
    }
}

async fn collections(report: &mut Report, connection: &Connection, scope: &Scope) {
    for (database, collection) in scope.namespaces() {
        report.on(format!("{database}.{collection}"));
        let within = connection.client.database(database);
        if collection == ALL {
            match server::collections(&within).await {
                Ok(names) if names.is_empty() => report.warn(
                    "collection",
                    format!("all of {database}, where there is none yet; what comes is watched all the same"),
                    "nothing, if it is not a mistake in --table",
                ),
                Ok(names) => report.ok("collection", format!("all of {database}, now {}", names.join(", "))),
                Err(_) => report.ok("collection", format!("all of {database}; this user may not look which there are")),
            }
            continue;
        }
        match within.list_collection_names().filter(doc! { "name": collection }).await {
            Ok(names) if names.is_empty() => report.warn(
                "collection",
                format!("there is no collection {database}.{collection} yet; it is watched all the same"),
                "outboxd init, if it is not a mistake in --table",
            ),
            Ok(_) => report.ok("collection", format!("{database}.{collection}")),
            // Whoever may not list may still watch.
            Err(_) => {
                report.ok("collection", format!("{database}.{collection}; this user may not look whether it exists"));
            }
        }
    }
}

/// What the user may do with the collection of leases and checkpoints.
async fn checkpoint_rights(report: &mut Report, connection: &Connection, settings: &MongoSettings) -> Option<()> {
    let asked = doc! { "connectionStatus": 1, "showPrivileges": true };
    let status = report.told("privileges", server::command(&connection.database, asked).await)?;
    let Ok(auth) = status.get_document("authInfo") else { return None };
    let users = auth.get_array("authenticatedUsers").map_or(0, Vec::len);
    if users == 0 {
        report.warn(
            "privileges",
            "nobody is logged in: the server lets everyone do everything",
            "turn authorization on",
        );
        return None;
    }
    let privileges = auth.get_array("authenticatedUserPrivileges").map(Vec::as_slice).unwrap_or_default();
    let database = connection.database.name();
    let place = checkpoint::described(database);
    let lacking: Vec<_> = ["find", "insert", "update"]
        .into_iter()
        .filter(|action| !allowed(privileges, database, lease::COLLECTION, action))
        .collect();
    match lacking.is_empty() {
        true => report.ok("privileges", format!("the user may keep its lease in {place}")),
        false => {
            let actions = lacking.iter().map(|action| format!("\"{action}\"")).collect::<Vec<_>>().join(", ");
            let why = match settings.checkpoint {
                CheckpointPlace::Source => "where lease and checkpoint are kept",
                _ => "where the lease is kept, wherever the checkpoint is",
            };
            report.fail(
                "privileges",
                format!("the user lacks {} on {place}, {why}", lacking.join(", ")),
                format!(
                    "db.grantPrivilegesToRole(\"outboxd\", [{{resource: {{db: \"{database}\", collection: \
                     \"{}\"}}, actions: [{actions}]}}]) (see sql/mongodb/role.js)",
                    lease::COLLECTION
                ),
            );
        }
    }
    Some(())
}

pub(in crate::source) fn allowed(privileges: &[Bson], database: &str, collection: &str, action: &str) -> bool {
    privileges.iter().filter_map(Bson::as_document).any(|privilege| {
        let resource = privilege.get_document("resource").ok();
        let matches = |name: &str, wanted: &str| {
            resource
                .and_then(|resource| resource.get_str(name).ok())
                .is_some_and(|found| found.is_empty() || found == wanted)
        };
        let any = resource.is_some_and(|resource| resource.get_bool("anyResource").unwrap_or(false));
        let has = privilege.get_array("actions").is_ok_and(|actions| {
            actions
                .iter()
                .any(|granted| matches!(granted.as_str(), Some(name) if name == action || name == "anyAction"))
        });
        has && (any || matches("db", database) && matches("collection", collection))
    })
}

async fn window(report: &mut Report, connection: &Connection) {
    let Ok(oplog) = server::oplog(&connection.client).await else {
        return report.warn(
            "oplog",
            "this user may not look how far the oplog reaches back",
            "db.grantRolesToRole(\"outboxd\", [{role: \"read\", db: \"local\"}]), or ask rs.printReplicationInfo()",
        );
    };
    let hours = oplog.last.seconds.saturating_sub(oplog.first.seconds) / 3600;
    let stats = connection.client.database("local").run_command(doc! { "collStats": "oplog.rs" }).await;
    let full = stats.as_ref().map_or(1.0, fill);
    match (hours, full) {
        // A young oplog that has room reaches back as far as there is anything.
        (hours, full) if hours >= SHORT_WINDOW_HOURS || full < 0.8 => {
            report.ok("oplog", format!("reaches back {hours} h, {:.0} % full", full * 100.0));
        }
        _ => report.warn(
            "oplog",
            format!("the oplog reaches back only {hours} h: if outboxd is away for longer, its position is lost"),
            "db.adminCommand({replSetResizeOplog: 1, size: 51200, minRetentionHours: 72}) on each member",
        ),
    }
}

fn fill(stats: &Document) -> f64 {
    let number = |name: &str| {
        let value = stats.get(name);
        value.and_then(|value| value.as_f64().or(value.as_i64().map(|n| n as f64)).or(value.as_i32().map(f64::from)))
    };
    match (number("size"), number("maxSize")) {
        (Some(size), Some(most)) if most > 0.0 => size / most,
        _ => 1.0,
    }
}

async fn position(
    report: &mut Report,
    connection: &Connection,
    server: &Server,
    watch: &Watch,
    settings: &MongoSettings,
    of: &PipelineSettings,
) -> Option<()> {
    let pipeline = of.name.as_str();
    let place = report.told("checkpoint", Place::open(&settings.checkpoint, &of.kafka))?;
    let document = report.told("checkpoint", lease::document(&connection.database, pipeline).await)?;
    let document = match document {
        Some(document) => document,
        None if settings.no_create => {
            let missing =
                format!("{} has no document of this pipeline", checkpoint::described(connection.database.name()));
            report.fail("checkpoint", missing, "outboxd init");
            return None;
        }
        None => Document::new(),
    };
    report.told("checkpoint", place.check_writable().await)?;
    let stored = report.told("checkpoint", place.peek(pipeline, &document).await)?;
    report.ok("checkpoint", if stored.is_some() { "has the pipeline's position" } else { "can be read" });
    report.on(format!("pipeline {pipeline}"));
    let Some(stored) = stored else {
        report.ok("position", format!("none yet: pipeline `{pipeline}` has never run"));
        return None;
    };
    let identity = checkpoint::identity(server.name(), &document);
    let at = report.told("position", judge::position(&stored, &identity))?;
    let entry = super::entry(&at, Some(&stored), &watch.scope);
    match watch.position(&entry).await {
        Ok(_) => report.ok("position", judge::when(at.time)),
        Err(SourceFailure::PositionLost { what, .. }) => {
            let lost = judge::Loss { pipeline: pipeline.to_owned(), memory: Arc::default() };
            let lost = lost.report(&connection.client, &at, &what).await;
            backfill::report_loss(report, of, lost, true);
        }
        Err(failure) => report.refused("position", failure),
    }
    match lease::holder(&connection.database, pipeline).await {
        Ok(Some(holder)) => {
            report.ok("leader", format!("an instance runs this pipeline now ({holder}); another one stands by"));
        }
        Ok(None) => report.ok("leader", "no instance runs this pipeline now"),
        Err(_) => {}
    }
    Some(())
}
