//! The checkpoint row: the pipeline's memory beside the slot.
//!
//! The slot decides where reading goes on. The row says whether there ever was a slot, on which server, and how far
//! it had come, so that a dropped slot or another server is noticed instead of silently starting anew.

use super::server_error::{classify_sql, made_meanwhile};
use super::sql::SqlSession;
use super::tables::{literal, quote};
pub use crate::checkpoint::SnapshotState;
use crate::position::Lsn;
use crate::source::SourceFailure;

/// Creates the table; run by `init`, by the first start, or by hand.
pub const CREATE: &str = include_str!("../../../sql/postgres/checkpoint.sql");

/// For a role that may not create it.
pub const CREATE_ELSEWHERE: &str = "run `outboxd init` once as a role that may create tables, or run \
    sql/postgres/checkpoint.sql, and grant SELECT, INSERT, UPDATE on outboxd_checkpoint to outboxd's role";

/// The row's format. A newer outboxd reads older ones; an older one refuses what it does not know.
const FORMAT: i32 = 1;

#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub system_identifier: u64,
    pub timeline: u32,
    pub slot: String,
    pub position: Lsn,
    pub snapshot: SnapshotState,
    /// When it was written, as the server prints it; empty for one not written yet.
    pub updated_at: String,
}

pub async fn table_exists(session: &SqlSession) -> Result<bool, SourceFailure> {
    let found = session.query_one("SELECT pg_catalog.to_regclass('outboxd_checkpoint') IS NOT NULL", &[]).await;
    found.map(|row| row.get(0)).map_err(|error| classify_sql(&error, "looking for the checkpoint table"))
}

pub async fn create_table(session: &SqlSession) -> Result<(), SourceFailure> {
    match session.batch_execute(CREATE).await {
        Err(error) if !made_meanwhile(&error) => Err(match classify_sql(&error, "creating outboxd_checkpoint") {
            SourceFailure::NotReady { what, .. } => {
                SourceFailure::NotReady { what, remedy: CREATE_ELSEWHERE.to_owned() }
            }
            other => other,
        }),
        _ => Ok(()),
    }
}

/// Lets the table hold a backfill, if it was made before there were any.
pub async fn allow_backfill(session: &SqlSession) -> Result<(), SourceFailure> {
    let failed = |error: tokio_postgres::Error| classify_sql(&error, "looking at outboxd_checkpoint");
    let old = session
        .query_opt(
            "SELECT conname::text FROM pg_catalog.pg_constraint
             WHERE conrelid = to_regclass('outboxd_checkpoint') AND contype = 'c'
               AND pg_get_constraintdef(oid) LIKE '%''pending''%' AND pg_get_constraintdef(oid) NOT LIKE '%''backfill''%'",
            &[],
        )
        .await
        .map_err(failed)?;
    let Some(name) = old.map(|row| row.get::<_, String>(0)) else { return Ok(()) };
    let alter = format!(
        "ALTER TABLE outboxd_checkpoint DROP CONSTRAINT {}, \
         ADD CHECK (snapshot IN ('none', 'pending', 'done', 'backfill'))",
        quote(&name)
    );
    session.batch_execute(&alter).await.map_err(|error| match classify_sql(&error, "changing outboxd_checkpoint") {
        SourceFailure::NotReady { what, .. } => SourceFailure::NotReady {
            what: format!("outboxd_checkpoint was made before there were backfills, and cannot be changed: {what}"),
            remedy: format!("{alter}; as its owner"),
        },
        other => other,
    })
}

pub async fn load(session: &SqlSession, pipeline: &str) -> Result<Option<Checkpoint>, SourceFailure> {
    let row = session
        .query_opt(
            "SELECT format, system_identifier, timeline, slot, position::text, snapshot, updated_at::text
             FROM outboxd_checkpoint WHERE pipeline = $1",
            &[&pipeline],
        )
        .await
        .map_err(|error| classify_sql(&error, "reading outboxd_checkpoint"))?;
    let Some(row) = row else { return Ok(None) };
    let format: i32 = row.get(0);
    if format != FORMAT {
        return Err(SourceFailure::NotReady {
            what: format!("the checkpoint of pipeline `{pipeline}` has format {format}; this outboxd knows {FORMAT}"),
            remedy: "run the outboxd that wrote it, or a newer one".to_owned(),
        });
    }
    let (system, timeline, position): (String, i32, String) = (row.get(1), row.get(2), row.get(4));
    let snapshot = SnapshotState::parse(&row.get::<_, String>(5));
    let malformed = |what: &str| SourceFailure::NotReady {
        what: format!("the checkpoint of pipeline `{pipeline}` has a malformed {what}"),
        remedy: "correct the row in outboxd_checkpoint".to_owned(),
    };
    Ok(Some(Checkpoint {
        system_identifier: system.parse().map_err(|_| malformed("system_identifier"))?,
        timeline: timeline as u32,
        slot: row.get(3),
        position: position.parse().map_err(|_| malformed("position"))?,
        snapshot,
        updated_at: row.get(6),
    }))
}

/// The statement that stores a first row for a slot that is there already, for `init`: what [`store`] would write.
pub fn first_row(pipeline: &str, slot: &str, snapshot: SnapshotState) -> String {
    format!(
        "INSERT INTO outboxd_checkpoint (pipeline, format, system_identifier, timeline, slot, position, snapshot)
SELECT {}, {FORMAT}, s.system_identifier::text, c.timeline_id, r.slot_name, r.confirmed_flush_lsn, '{}'
FROM pg_control_system() s, pg_control_checkpoint() c, pg_replication_slots r WHERE r.slot_name = {}
ON CONFLICT (pipeline) DO NOTHING",
        literal(pipeline),
        snapshot.as_str(),
        literal(slot)
    )
}

pub async fn store(session: &SqlSession, pipeline: &str, checkpoint: &Checkpoint) -> Result<(), SourceFailure> {
    let (system, position) = (checkpoint.system_identifier.to_string(), checkpoint.position.to_string());
    session
        .execute(
            "INSERT INTO outboxd_checkpoint
                 (pipeline, format, system_identifier, timeline, slot, position, snapshot, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6::text::pg_lsn, $7, now())
             ON CONFLICT (pipeline) DO UPDATE SET
                 format = excluded.format, system_identifier = excluded.system_identifier,
                 timeline = excluded.timeline, slot = excluded.slot, position = excluded.position,
                 snapshot = excluded.snapshot, updated_at = excluded.updated_at",
            &[
                &pipeline,
                &FORMAT,
                &system,
                &(checkpoint.timeline as i32),
                &checkpoint.slot,
                &position,
                &checkpoint.snapshot.as_str(),
            ],
        )
        .await
        .map(|_| ())
        .map_err(|error| classify_sql(&error, "writing outboxd_checkpoint"))
}
