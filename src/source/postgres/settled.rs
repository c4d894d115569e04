//! Whether a pipeline has delivered all that was committed before a place in the log, asked from outside of it.

use super::checkpoint;
use super::server_error::classify_sql;
use super::slot;
use super::tables::quote;
use super::{conninfo, judge, setup, sql};
use crate::config::PostgresSettings;
use crate::position::{Lsn, Position};
use crate::retention::fence::behind;
use crate::source::{Settled, SourceFailure, unpositioned};

/// How many changes are looked at behind the confirmed position, whole transactions of them.
const MOST_CHANGES: i32 = 10_000;

pub async fn settled(settings: &PostgresSettings, pipeline: &str, upto: Lsn) -> Result<Settled, SourceFailure> {
    let session = sql::connect(&conninfo(settings)?).await?;
    let version = session.server_version();
    let stored = match checkpoint::table_exists(&session).await? {
        true => checkpoint::load(&session, pipeline).await?,
        false => None,
    };
    let state = slot::state(&session, &settings.slot, version).await?;
    let server = setup::identity(&session).await?;
    let lost = judge::lost(pipeline, settings, stored.as_ref(), state.as_ref(), &server);
    judge::refuse(lost.map(|loss| loss.failure))?;
    let (Some(stored), Some(state)) = (stored, state) else { return Err(unpositioned(pipeline)) };
    if stored.snapshot.is_under_way() {
        return Ok(Settled::snapshot_pending(pipeline));
    }
    let confirmed = state.confirmed.unwrap_or_default().max(stored.position);
    if confirmed >= upto {
        return Ok(Settled::Yes);
    }
    let no = Settled::No(behind(pipeline, &confirmed.to_string(), &Position::Postgres(upto)));
    if state.active_pid.is_some() {
        // Whoever reads it confirms it, also where there is nothing to deliver.
        return Ok(no);
    }
    // Nobody reads it: what lies behind may be nothing for it.
    let peek = "SELECT count(*) FILTER (WHERE get_byte(data, 0) = ascii('I')), count(*)
                FROM pg_catalog.pg_logical_slot_peek_binary_changes(
                    $1, $2::text::pg_lsn, $3, 'proto_version', '1', 'publication_names', $4)";
    let (name, publication) = (settings.slot.as_str(), quote(&settings.publication));
    match session.query_one(peek, &[&name, &upto.to_string(), &MOST_CHANGES, &publication]).await {
        Ok(row) => {
            let (inserts, changes): (i64, i64) = (row.get(0), row.get(1));
            let looked_through = changes < i64::from(MOST_CHANGES);
            Ok(if inserts == 0 && looked_through { Settled::Yes } else { no })
        }
        Err(error) => match classify_sql(&error, "looking at the log behind the confirmed position") {
            // Somebody has begun to read it.
            SourceFailure::Held { .. } => Ok(no),
            failure => Err(failure),
        },
    }
}
