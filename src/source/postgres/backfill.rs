//! The beginning of a backfill: a slot that is gone, or of no use any more, makes room for a new one.

use super::checkpoint::{self, Checkpoint, SnapshotState};
use super::judge::Loss;
use super::server_error::classify_sql;
use super::slot;
use super::sql::SqlSession;
use super::tables::Tables;
use crate::config::{PipelineSettings, PostgresSettings};
use crate::source::SourceFailure;
use crate::source::backfill::Fill;
use crate::source::poll::postgres::{lock_key, tests, try_lock};

/// Whether the tables can make up for the loss.
pub async fn agreed(
    session: &SqlSession,
    of: &PipelineSettings,
    settings: &PostgresSettings,
    tables: &Tables,
    loss: Loss,
) -> Result<Fill, SourceFailure> {
    if !loss.fillable {
        return Err(loss.failure);
    }
    let fill = Fill::wanted(of, loss.failure)?;
    if settings.no_create {
        return Err(fill.refused("--no-create forbids making a new slot", "run without --no-create"));
    }
    for table in &tables.catalog {
        fill.needs(&table.quoted(), |column| table.has(column))?;
    }
    if !fill.marks {
        let unmarked = tests(fill.view(), fill.view().scheme.unmarked, "t");
        let (mut rows, mut marked) = (false, false);
        for table in &tables.catalog {
            let name = table.quoted();
            let asked = format!(
                "SELECT EXISTS (SELECT FROM {name} t), EXISTS (SELECT FROM {name} t WHERE ({unmarked}) IS NOT TRUE)"
            );
            let row = session.query_one(&asked, &[]).await;
            let row =
                row.map_err(|error| classify_sql(&error, "looking for rows that say that they were delivered"))?;
            (rows, marked) = (rows | row.get::<_, bool>(0), marked | row.get::<_, bool>(1));
        }
        if rows && !marked {
            return Err(fill.nobody_marks());
        }
    }
    Ok(fill)
}

/// Notes that a backfill is under way, and drops what is left of the slot. Only one instance does it.
pub async fn begin(
    session: &SqlSession,
    pipeline: &str,
    settings: &PostgresSettings,
    checkpoint: &mut Checkpoint,
) -> Result<(), SourceFailure> {
    let slot = &settings.slot;
    if !try_lock(session, lock_key(&format!("backfill {slot}"))).await? {
        return Err(SourceFailure::Held { what: format!("another instance makes slot `{slot}` anew") });
    }
    let state = slot::state(session, slot, session.server_version()).await?;
    if state.as_ref().is_some_and(|state| state.lost().is_none()) {
        return Err(SourceFailure::transient(format!("another instance has made slot `{slot}` anew")));
    }
    checkpoint.snapshot = SnapshotState::Backfill;
    checkpoint::store(session, pipeline, checkpoint).await?;
    if state.is_some() {
        let dropped = session.execute("SELECT pg_drop_replication_slot($1)", &[slot]).await;
        dropped.map_err(|error| classify_sql(&error, "dropping the lost slot"))?;
    }
    Ok(())
}

/// The new slot is there.
pub async fn made(session: &SqlSession, settings: &PostgresSettings) -> Result<(), SourceFailure> {
    let key = lock_key(&format!("backfill {}", settings.slot));
    let unlocked = session.execute("SELECT pg_catalog.pg_advisory_unlock($1)", &[&key]).await;
    unlocked.map(|_| ()).map_err(|error| session.classify(&error))
}
