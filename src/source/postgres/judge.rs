//! What a run refuses, judged from what the server told. Starting a stream, `check` and `init` all ask here, so that
//! they can never disagree, nor say it in different words. No I/O.

use super::checkpoint::{self, Checkpoint, SnapshotState};
use super::server_error::WAL_LEVEL_REMEDY;
use super::slot::{self, PublicationState, SlotState};
use super::tables::{CatalogTable, Tables, literal, quote};
use super::walsender::SystemIdentity;
use crate::config::{PostgresSettings, TableName};
use crate::event::{Projection, Want};
use crate::position::Lsn;
use crate::source::SourceFailure;

/// pgoutput sends binary rows and logical messages from this version on.
const OLDEST_VERSION: u32 = 140_000;

/// For whoever cannot go on past the first problem.
pub fn refuse(failures: impl IntoIterator<Item = SourceFailure>) -> Result<(), SourceFailure> {
    failures.into_iter().next().map_or(Ok(()), Err)
}

fn not_ready(what: String, remedy: impl Into<String>) -> SourceFailure {
    SourceFailure::NotReady { what, remedy: remedy.into() }
}

pub fn version(version: u32) -> Option<SourceFailure> {
    (version < OLDEST_VERSION).then(|| {
        let (major, oldest) = (version / 10_000, OLDEST_VERSION / 10_000);
        not_ready(
            format!("the server is PostgreSQL {major}; outboxd reads the log of {oldest} and newer"),
            format!("upgrade the server to PostgreSQL {oldest} or newer"),
        )
    })
}

pub fn wal_level(level: &str) -> Option<SourceFailure> {
    (level != "logical").then(|| {
        not_ready(format!("wal_level is {level}: the log does not hold what logical decoding needs"), WAL_LEVEL_REMEDY)
    })
}

/// Tables and columns that are not there.
pub fn tables(missing: &[TableName], tables: &Tables, projection: &Projection) -> Vec<SourceFailure> {
    let absent = missing.iter().map(|table| {
        not_ready(
            format!("the outbox table {table} does not exist"),
            "create it with `outboxd init`, or name another one with --table",
        )
    });
    let unfit = tables.catalog.iter().filter_map(|table| {
        let name = table.quoted();
        match (table.is_table, table.logged) {
            (false, _) => Some(not_ready(
                format!("{name} is not a table, so its rows are in no log"),
                "name the table itself with --table",
            )),
            (_, false) => Some(not_ready(
                format!("the outbox table {name} is unlogged or temporary, so its rows are in no log"),
                format!("ALTER TABLE {name} SET LOGGED"),
            )),
            _ => None,
        }
    });
    let columns = tables.missing_columns(projection);
    let lacking = columns.iter().map(|(table, column)| column_missing(&table.quoted(), column, projection));
    absent.chain(unfit).chain(lacking).collect()
}

/// A column that the layout needs and the table, or the relation in the stream, has not.
pub fn column_missing(table: &str, column: &str, projection: &Projection) -> SourceFailure {
    let time = projection.columns().any(|(_, name, want)| name == column && want == Want::Time);
    let kind = if time { "timestamptz" } else { "text" };
    not_ready(
        format!("the outbox table {table} has no column `{column}`, which the layout needs"),
        format!(
            "ALTER TABLE {table} ADD COLUMN {} {kind}; or name a column it has with --column ROLE=NAME",
            quote(column)
        ),
    )
}

pub fn checkpoint_table(exists: bool, settings: &PostgresSettings) -> Option<SourceFailure> {
    (!exists && settings.no_create).then(|| {
        not_ready(
            "the table outboxd_checkpoint does not exist and --no-create forbids making it".to_owned(),
            checkpoint::CREATE.trim(),
        )
    })
}

/// A position that is lost.
#[derive(Debug)]
pub struct Loss {
    pub failure: SourceFailure,
    /// It is the slot that is lost, of a server that is the same as before: its tables still have what was not delivered.
    pub fillable: bool,
}

/// A lost position is told, never papered over by a new slot.
pub fn lost(
    pipeline: &str,
    settings: &PostgresSettings,
    stored: Option<&Checkpoint>,
    state: Option<&SlotState>,
    server: &SystemIdentity,
) -> Option<Loss> {
    let mut why = state.and_then(|state| state.lost().map(|why| format!("slot `{}`: {why}", settings.slot)));
    let mut fillable = stored.is_some_and(|stored| stored.snapshot != SnapshotState::Pending);
    if let Some(stored) = stored.filter(|stored| !stored.snapshot.is_under_way()) {
        if state.is_none() {
            why = Some(format!("slot `{}` is gone, and the checkpoint says that there was one", settings.slot));
        }
        if stored.timeline > server.timeline {
            let (was, is) = (stored.timeline, server.timeline);
            fillable = false;
            why = Some(format!("the server's timeline went back from {was} to {is}"));
        }
    }
    if let Some(stored) = stored.filter(|stored| stored.system_identifier != server.system_identifier) {
        let (was, is) = (stored.system_identifier, server.system_identifier);
        fillable = false;
        why = Some(format!("this is another server: its system identifier is {is}, the checkpoint's is {was}"));
    }
    why.map(|why| Loss {
        failure: SourceFailure::PositionLost {
            what: slot::gap_report(pipeline, &why, stored, state, server),
            remedy: lost_remedy(pipeline, state.map(|_| settings.slot.as_str())),
        },
        fillable,
    })
}

/// What this process confirmed, and to which server.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    pub confirmed: Lsn,
    pub server: SystemIdentity,
    /// Where the history of the server that answers now left the timeline of that one.
    pub left_at: Option<Lsn>,
}

/// A server that lacks what was confirmed: another one, a backup that was restored, a standby that was promoted before
/// it had everything. Going on from the confirmed position would skip whatever it commits before it gets there.
pub fn rewound(
    pipeline: &str,
    past: &Past,
    stored: Option<&Checkpoint>,
    state: Option<&SlotState>,
    server: &SystemIdentity,
    in_recovery: bool,
) -> Option<SourceFailure> {
    let Past { confirmed, server: known, left_at } = past;
    let (was, is) = (known.timeline, server.timeline);
    let why = if known.system_identifier != server.system_identifier {
        let (was, is) = (known.system_identifier, server.system_identifier);
        format!("this is another server: its system identifier is {is}, and {confirmed} was confirmed to {was}")
    } else if was != is {
        match left_at {
            Some(left_at) if left_at >= confirmed => return None,
            Some(left_at) => format!(
                "timeline {is} of the server left timeline {was} at {left_at}, and {confirmed} was confirmed on that one"
            ),
            None => format!(
                "{confirmed} was confirmed on timeline {was}, of which the server's timeline {is} does not come"
            ),
        }
    } else if server.wal_position < *confirmed && !in_recovery {
        let end = server.wal_position;
        format!("the server's log ends at {end}, and {confirmed} was confirmed: it is an older copy of what it was")
    } else {
        return None;
    };
    let on = match state {
        Some(_) => "from its slot's own position: nothing that this server committed is skipped then",
        None => "with --snapshot existing to deliver what is in its table",
    };
    Some(SourceFailure::PositionLost {
        what: slot::gap_report(pipeline, &why, stored, state, server),
        remedy: format!(
            "events up to {confirmed} were delivered that this server may not know: compare it with what consumers have; \
             if it is the right server, start again to go on {on}"
        ),
    })
}

/// What a person does about a gap. Nothing here is done for them: each step gives something up.
pub fn lost_remedy(pipeline: &str, slot: Option<&str>) -> String {
    let drop = slot.map_or_else(String::new, |slot| format!("SELECT pg_drop_replication_slot({}); ", literal(slot)));
    format!(
        "deliver the rows of the gap from the table by other means (or decide that none matter), then {drop}DELETE FROM \
         outboxd_checkpoint WHERE pipeline = {}; and start again, with --snapshot existing to deliver what is in the \
         table",
        literal(pipeline)
    )
}

/// A slot that is not ours to read, or that is missing and not to be made.
pub fn slot(settings: &PostgresSettings, state: Option<&SlotState>, database: &str) -> Option<SourceFailure> {
    let name = &settings.slot;
    let Some(state) = state else {
        return settings.no_create.then(|| {
            not_ready(format!("slot `{name}` does not exist, and --no-create forbids making it"), "outboxd init")
        });
    };
    let what = match (state.plugin.as_deref(), state.database.as_deref()) {
        (None, _) => format!("slot `{name}` is a physical one"),
        (Some(plugin), _) if plugin != "pgoutput" => format!("slot `{name}` is of the plugin {plugin}, not pgoutput"),
        (_, Some(other)) if other != database => format!("slot `{name}` belongs to the database {other}"),
        _ => return None,
    };
    let remedy = format!(
        "name another slot with --slot; or, if nobody needs this one: SELECT pg_drop_replication_slot({})",
        literal(name)
    );
    Some(not_ready(what, remedy))
}

/// A publication that would withhold events. One that is missing and may be made is fine.
pub fn publication(
    settings: &PostgresSettings,
    found: Option<&PublicationState>,
    tables: &[CatalogTable],
    projection: &Projection,
    slot_exists: bool,
) -> Vec<SourceFailure> {
    let name = &settings.publication;
    let quoted = quote(name);
    let create = slot::create_publication(name, tables.iter().map(CatalogTable::quoted));
    let Some(found) = found else {
        return match (slot_exists, settings.no_create) {
            // Decoding a change that is older than the publication fails, or since PostgreSQL 18 yields nothing.
            (true, _) => vec![not_ready(
                format!(
                    "the publication `{name}` does not exist, and slot `{}` is older than a new one would be",
                    settings.slot
                ),
                format!(
                    "{create}; SELECT pg_replication_slot_advance({}, pg_current_wal_lsn()); what was committed before \
                     and not delivered is skipped by that: deliver it by other means",
                    literal(&settings.slot)
                ),
            )],
            (false, true) => vec![not_ready(
                format!("the publication `{name}` does not exist, and --no-create forbids making it"),
                create,
            )],
            (false, false) => Vec::new(),
        };
    };
    let mut failures = Vec::new();
    if !found.inserts {
        failures.push(not_ready(
            format!("the publication `{name}` publishes no inserts"),
            format!("ALTER PUBLICATION {quoted} SET (publish = 'insert')"),
        ));
    }
    for table in tables {
        let published = found.published(table);
        let outbox = table.quoted();
        if published.is_empty() {
            failures.push(not_ready(
                format!("the publication `{name}` lacks the outbox table {outbox}"),
                format!("ALTER PUBLICATION {quoted} ADD TABLE {outbox}"),
            ));
        }
        let again =
            format!("ALTER PUBLICATION {quoted} DROP TABLE {outbox}; ALTER PUBLICATION {quoted} ADD TABLE {outbox}");
        if let Some(filter) = published.iter().find_map(|table| table.row_filter.as_deref()) {
            failures.push(not_ready(
                format!("the publication `{name}` withholds rows of {outbox}: it has the row filter {filter}"),
                again.clone(),
            ));
        }
        let withheld = |column: &&str| published.iter().any(|table| !table.has(column)) && table.has(column);
        let withheld: Vec<_> = projection.required().filter(withheld).collect();
        if !withheld.is_empty() {
            let withheld = withheld.join(", ");
            failures.push(not_ready(
                format!("the publication `{name}` withholds columns of {outbox} that the layout needs: {withheld}"),
                format!("{again}; generated columns need PostgreSQL 18 and publish_generated_columns = stored"),
            ));
        }
    }
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_before_14_are_refused() {
        assert!(version(130_012).is_some_and(|failure| failure.to_string().contains("PostgreSQL 13")));
        assert!(version(140_000).is_none());
    }

    #[test]
    fn a_server_without_what_was_confirmed_is_told_from_one_that_has_it() {
        let known = SystemIdentity { system_identifier: 7, timeline: 2, wal_position: Lsn(100) };
        let judged = |left_at: Option<u64>, server: SystemIdentity, in_recovery: bool| {
            let past = Past { confirmed: Lsn(0x90), server: known, left_at: left_at.map(Lsn) };
            rewound("p", &past, None, None, &server, in_recovery).map(|failure| failure.to_string())
        };
        let at = |timeline: u32, position: u64| SystemIdentity { timeline, wal_position: Lsn(position), ..known };
        assert_eq!(judged(None, at(2, 0x90), false), None, "the same server");
        assert_eq!(judged(Some(0x90), at(3, 0x91), false), None, "promoted with everything");
        assert_eq!(judged(None, at(2, 0x50), true), None, "a standby that replays what it had");
        for (left_at, server, words) in [
            (None, SystemIdentity { system_identifier: 8, ..known }, "another server"),
            (None, at(2, 0x8f), "log ends at 0/8F, and 0/90 was confirmed"),
            (Some(0x8f), at(3, 0x1000), "timeline 3 of the server left timeline 2 at 0/8F"),
            (None, at(3, 0x1000), "does not come"),
            (None, at(1, 0x1000), "does not come"),
        ] {
            let told = judged(left_at, server, false);
            assert!(told.as_ref().is_some_and(|told| told.contains(words)), "{words}: {told:?}");
        }
    }
}
