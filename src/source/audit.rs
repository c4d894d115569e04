//! The record of what people did to a position: written before it is done, in the source's own database, where those look
//! who look after the pipeline.
//!
//! ```text
//!   PostgreSQL, MySQL   table outboxd_audit
//!   MongoDB             collection outboxd_audit
//!   a source that cannot be written to, with its checkpoint elsewhere:
//!       file PATH.audit, an object a line · topic outboxd_checkpoint, key `PIPELINE/audit/MOMENT`
//! ```
//!
//! What cannot be recorded is not done.

use std::fs::OpenOptions;
use std::io::Write as _;

use ::mongodb::Database;
use ::mongodb::bson::{DateTime, Document, doc};
use nix::unistd::{User, geteuid, gethostname};
use serde::Serialize;

use super::mysql::session::{Session, literal};
use super::postgres::server_error::classify_sql;
use super::postgres::sql::SqlSession;
use super::{SourceFailure, mongodb};
use crate::checkpoint::{Checkpoint, FORMAT, SnapshotState, Store};
use crate::config::{CheckpointPlace, KafkaSettings};
use crate::event::Micros;

pub const POSTGRES: &str = include_str!("../../sql/postgres/audit.sql");
pub const MYSQL: &str = include_str!("../../sql/mysql/audit.sql");
pub const MONGODB: &str = include_str!("../../sql/mongodb/audit.js");

/// What the table or collection is called.
pub const NAME: &str = "outboxd_audit";

/// One thing that a person does.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    pub pipeline: String,
    /// `None` where all of its publishers are meant.
    pub publisher: Option<String>,
    pub action: &'static str,
    pub position_from: Option<String>,
    pub position_to: String,
    pub reason: String,
    pub os_user: String,
}

impl Entry {
    /// The same, which did not come about.
    pub fn undone(&self, why: &dyn std::fmt::Display) -> Self {
        Entry { action: "position not set", reason: format!("not carried out: {why}"), ..self.clone() }
    }
}

/// Who runs this process, and where.
pub fn os_user() -> String {
    let uid = geteuid();
    let name = User::from_uid(uid).ok().flatten().map_or_else(|| uid.to_string(), |user| user.name);
    let host = gethostname().ok().and_then(|host| host.into_string().ok()).unwrap_or_else(|| "unknown".to_owned());
    match std::env::var("SUDO_USER") {
        Ok(behind) if !behind.is_empty() && behind != name => format!("{name}@{host} (sudo by {behind})"),
        _ => format!("{name}@{host}"),
    }
}

fn unrecorded(failure: SourceFailure, remedy: &str) -> SourceFailure {
    match failure {
        SourceFailure::NotReady { what, .. } => SourceFailure::NotReady {
            what: format!("the change cannot be recorded in {NAME}, so nothing was changed: {what}"),
            remedy: remedy.to_owned(),
        },
        other => other,
    }
}

pub async fn table_exists(session: &SqlSession) -> Result<bool, SourceFailure> {
    let found = session.query_one("SELECT pg_catalog.to_regclass('outboxd_audit') IS NOT NULL", &[]).await;
    found.map(|row| row.get(0)).map_err(|error| classify_sql(&error, "looking for outboxd_audit"))
}

pub async fn in_postgres(session: &SqlSession, entry: &Entry) -> Result<(), SourceFailure> {
    const REMEDY: &str = "run `outboxd init` as a role that may create tables, or sql/postgres/audit.sql, and GRANT INSERT \
                          ON outboxd_audit to this role";
    let failed = |error: tokio_postgres::Error| unrecorded(classify_sql(&error, "writing outboxd_audit"), REMEDY);
    if !table_exists(session).await? {
        session.batch_execute(POSTGRES).await.map_err(failed)?;
    }
    let insert = "INSERT INTO outboxd_audit (pipeline, publisher, action, position_from, position_to, reason, os_user)
                  VALUES ($1, $2, $3, $4, $5, $6, $7)";
    let Entry { pipeline, publisher, action, position_from, position_to, reason, os_user } = entry;
    let written =
        session.execute(insert, &[pipeline, publisher, action, position_from, position_to, reason, os_user]).await;
    written.map(|_| ()).map_err(failed)
}

pub async fn mysql_table_exists(session: &mut Session) -> Result<bool, SourceFailure> {
    let exists = "SELECT COUNT(*) FROM information_schema.tables \
                  WHERE table_schema = DATABASE() AND table_name = 'outboxd_audit'";
    Ok(session.query_one(exists).await?.number(0) > 0)
}

pub async fn in_mysql(session: &mut Session, entry: &Entry) -> Result<(), SourceFailure> {
    const REMEDY: &str = "run sql/mysql/audit.sql, or `outboxd init`, as a user that may create tables, and GRANT INSERT ON \
                          outboxd_audit to this user";
    let refused = |failure| unrecorded(failure, REMEDY);
    // A table that the user has no right to does not exist for it either, and making it is then refused.
    if !mysql_table_exists(session).await.map_err(refused)? {
        session.execute(MYSQL).await.map_err(refused)?;
    }
    let text = |text: &Option<String>| text.as_deref().map_or_else(|| "NULL".to_owned(), literal);
    let insert = format!(
        "INSERT INTO outboxd_audit (pipeline, publisher, action, position_from, position_to, reason, database_user, os_user) \
         VALUES ({}, {}, {}, {}, {}, {}, CURRENT_USER(), {})",
        literal(&entry.pipeline),
        text(&entry.publisher),
        literal(entry.action),
        text(&entry.position_from),
        literal(&entry.position_to),
        literal(&entry.reason),
        literal(&entry.os_user)
    );
    session.execute(&insert).await.map_err(refused)
}

pub async fn in_mongodb(database: &Database, entry: &Entry) -> Result<(), SourceFailure> {
    const REMEDY: &str = "grant the user insert on outboxd_audit (sql/mongodb/role.js)";
    let status = mongodb::server::command(database, doc! { "connectionStatus": 1 }).await?;
    let user = status.get_document("authInfo").and_then(|auth| auth.get_array("authenticatedUsers")).ok();
    let user = user.and_then(|users| users.first()?.as_document()?.get_str("user").ok()).unwrap_or_default();
    let record = doc! {
        "at": DateTime::now(),
        "pipeline": &entry.pipeline,
        "publisher": entry.publisher.as_deref(),
        "action": entry.action,
        "position_from": entry.position_from.as_deref(),
        "position_to": &entry.position_to,
        "reason": &entry.reason,
        "database_user": user,
        "os_user": &entry.os_user,
    };
    let written = database.collection::<Document>(NAME).insert_one(record).await;
    let doing = mongodb::server_error::Doing::Writing(format!("{}.{NAME}", database.name()));
    written.map(|_| ()).map_err(|error| unrecorded(mongodb::server_error::classify(&error, &doing), REMEDY))
}

/// Beside a checkpoint that is kept outside of the source; false where there is none.
pub async fn elsewhere(place: &CheckpointPlace, kafka: &KafkaSettings, entry: &Entry) -> Result<bool, SourceFailure> {
    let at = Micros::now().0;
    let json = serde_json::json!({ "at_micros": at, "entry": entry }).to_string();
    match place {
        CheckpointPlace::Source => Ok(false),
        CheckpointPlace::File(path) => {
            let path = format!("{path}.audit");
            let written = OpenOptions::new().create(true).append(true).open(&path).and_then(|mut file| {
                file.write_all(format!("{json}\n").as_bytes())?;
                file.sync_all()
            });
            written.map(|()| true).map_err(|error| SourceFailure::NotReady {
                what: format!("the change cannot be recorded in {path}, so nothing was changed: {error}"),
                remedy: "make the checkpoint's folder writable".to_owned(),
            })
        }
        CheckpointPlace::Kafka => {
            let Some(store) = Store::open(place, kafka)? else { return Ok(false) };
            let record = Checkpoint {
                format: FORMAT,
                pipeline: format!("{}/audit/{at}", entry.pipeline),
                source: String::new(),
                server: String::new(),
                position: json,
                file: String::new(),
                snapshot: SnapshotState::None,
            };
            store.save(&record).await?;
            Ok(true)
        }
    }
}
