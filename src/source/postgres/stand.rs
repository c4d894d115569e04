//! A slot's position by hand. A slot is moved ahead by the server itself (`pg_replication_slot_advance`), and never back:
//! what lies before its position is neither kept nor sent. What can go back is the checkpoint's row, where it is ahead of
//! the slot after a crash of the server, and a publisher that is ahead of the others.

use std::sync::Arc;

use super::checkpoint::{self, Checkpoint};
use super::server_error::classify_sql;
use super::slot::{self, SlotState};
use super::sql::{self, SqlSession};
use super::tables::{Tables, literal};
use super::walsender::SystemIdentity;
use super::{judge, setup};
use crate::checkpoint::publishers::PublisherNotes;
use crate::config::{PipelineSettings, PostgresSettings};
use crate::position::{Lsn, Position};
use crate::source::SourceFailure;
use crate::source::audit::{self, Entry};
use crate::source::stand::{self, Arranging, COUNTING, Change, Counted, MOST_COUNTED, Stand, Target, Whose};

/// What the server says of slot and row.
struct Found {
    server: SystemIdentity,
    stored: Option<Checkpoint>,
    state: Option<SlotState>,
    /// Why the position is lost, if it is.
    lost: Option<SourceFailure>,
}

impl Found {
    async fn ask(session: &SqlSession, settings: &PostgresSettings, pipeline: &str) -> Result<Self, SourceFailure> {
        let server = setup::identity(session).await?;
        let stored = match checkpoint::table_exists(session).await? {
            true => checkpoint::load(session, pipeline).await?,
            false => None,
        };
        let state = slot::state(session, &settings.slot, session.server_version()).await?;
        let lost = judge::lost(pipeline, settings, stored.as_ref(), state.as_ref(), &server).map(|loss| loss.failure);
        Ok(Found { server, stored, state, lost })
    }

    /// What the slot itself knows to be delivered.
    fn slot_position(&self) -> Option<Lsn> {
        self.state.as_ref().and_then(|state| state.confirmed)
    }

    /// Where a run goes on; where the position is lost, what is known of it.
    fn position(&self) -> Option<Lsn> {
        let stored = self.stored.as_ref().map(|stored| stored.position).filter(|position| *position > Lsn::ZERO);
        self.slot_position().max(stored)
    }

    fn lineage(&self) -> String {
        format!("{}/{}", self.server.system_identifier, self.server.timeline)
    }
}

fn kept_in(settings: &PostgresSettings) -> String {
    format!("slot {} and table outboxd_checkpoint", settings.slot)
}

pub async fn look(settings: &PostgresSettings, of: &PipelineSettings) -> Result<Stand, SourceFailure> {
    let info = super::conninfo(settings)?;
    let session = sql::connect(&info).await?;
    let found = Found::ask(&session, settings, &of.name).await?;
    let mut remarks = Vec::new();
    if let Some(lost) = &found.lost {
        remarks.push(lost.to_string());
    }
    if found.stored.as_ref().is_some_and(|stored| stored.snapshot == checkpoint::SnapshotState::Pending) {
        remarks.push("the rows that were in the table are delivered first, all of them".to_owned());
    }
    let holder = match found.state.as_ref().and_then(|state| state.active_pid) {
        Some(pid) => Some(reader(&session, pid).await?),
        None => None,
    };
    let position = found.position();
    let end = found.server.wal_position;
    Ok(Stand {
        source: "postgres".to_owned(),
        address: session.description().to_owned(),
        position: position.map(|position| position.to_string()),
        kept_in: kept_in(settings),
        log_begins: found.slot_position().map(|position| position.to_string()),
        log_ends: Some(end.to_string()),
        behind_bytes: position.map(|position| end.bytes_since(position)),
        held_by: holder,
        remarks,
        ..Stand::default()
    })
}

/// Who reads the slot.
async fn reader(session: &SqlSession, pid: i32) -> Result<String, SourceFailure> {
    let asked = "SELECT coalesce(application_name, ''), coalesce(host(client_addr), 'this host')
                 FROM pg_catalog.pg_stat_activity WHERE pid = $1";
    let row = session.query_opt(asked, &[&pid]).await.map_err(|error| session.classify(&error))?;
    Ok(match row {
        Some(row) => format!("process {pid} ({}, from {})", row.get::<_, String>(0), row.get::<_, String>(1)),
        None => format!("process {pid}"),
    })
}

pub struct Held<'a> {
    settings: &'a PostgresSettings,
    of: &'a PipelineSettings,
    session: Arc<SqlSession>,
    found: Found,
    planned: Option<Planned>,
}

struct Planned {
    step: Step,
    notes: Option<PublisherNotes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Publishers alone.
    Notes(Lsn),
    Move(Lsn),
    /// The slot is gone for good: a new one begins at the end of the log.
    Anew,
}

impl<'a> Held<'a> {
    /// A slot cannot be held by SQL: whether it is read is looked at now, and again when it is moved.
    pub async fn take(settings: &'a PostgresSettings, of: &'a PipelineSettings) -> Result<Self, SourceFailure> {
        let session = Arc::new(sql::connect(&super::conninfo(settings)?).await?);
        let found = Found::ask(&session, settings, &of.name).await?;
        free(&session, settings, &found).await?;
        Ok(Held { settings, of, session, found, planned: None })
    }

    pub async fn plan(&mut self, target: &Target, whose: Whose<'_>) -> Result<Change, SourceFailure> {
        let found = &self.found;
        let Some(from) = found.position() else {
            return Err(SourceFailure::NotReady {
                what: format!(
                    "pipeline `{}` has no position yet: it has neither a slot nor a checkpoint",
                    self.of.name
                ),
                remedy: "outboxd init, or a first run".to_owned(),
            });
        };
        if found.lost.is_some() {
            return self.anew(target, whose, from);
        }
        let database = super::conninfo(self.settings)?.dbname().to_owned();
        judge::refuse(judge::slot(self.settings, found.state.as_ref(), &database))?;
        let slot = found.slot_position().unwrap_or(from);
        let end = flushed(&self.session).await?;
        let to = match target {
            Target::Now => end,
            Target::Earliest => slot,
            Target::At(text) => text.parse::<Lsn>().map_err(|error| SourceFailure::Misconfigured {
                what: error.to_string(),
                remedy: "give one as `outboxd position show` prints it, `now` or `earliest`".to_owned(),
            })?,
        };
        if to > end {
            return Err(SourceFailure::Misconfigured {
                what: format!("{to} lies beyond the end of the log, {end}"),
                remedy: "give a position up to there, or `now`".to_owned(),
            });
        }
        if to < slot {
            return Err(self.cannot_go_back(slot, to).await?);
        }
        let notes = stand::notes(self.of).await?;
        let (source, wanted) = (Position::Postgres(from), Position::Postgres(to));
        let lineage = found.lineage();
        let arranging = Arranging { settings: self.of, notes, lineage: &lineage, from: Some(&source), to: &wanted };
        let arranged = arranging.arrange(whose)?;
        let stood = match &arranged.from {
            Some(Position::Postgres(stood)) => *stood,
            _ => from,
        };
        let (ahead, back) = (to > stood, to < stood);
        let count = async |wanted: bool, after: Lsn, upto: Lsn| match wanted {
            true => self.count(after, upto).await,
            false => Counted::Nothing,
        };
        let change = Change {
            from: Some(stood.to_string()),
            to: to.to_string(),
            skips: count(ahead, stood, to).await,
            repeats: count(back, to, stood).await,
            remarks: Vec::new(),
        };
        let step = if arranged.source.is_some() { Step::Move(to) } else { Step::Notes(to) };
        self.planned = Some(Planned { step, notes: arranged.notes });
        Ok(change)
    }

    /// What the slot was to read is lost: only giving it up is left.
    fn anew(&mut self, target: &Target, whose: Whose<'_>, from: Lsn) -> Result<Change, SourceFailure> {
        let lost = self.found.lost.as_ref().map(ToString::to_string).unwrap_or_default();
        if *target != Target::Now || whose.is_some() {
            return Err(SourceFailure::PositionLost {
                what: lost,
                remedy:
                    "deliver the rows of the gap from the table by other means, then give it up with `outboxd position \
                         set now --reason …`: a new slot begins at the end of the log"
                        .to_owned(),
            });
        }
        self.planned = Some(Planned { step: Step::Anew, notes: None });
        Ok(Change {
            from: Some(from.to_string()),
            to: "now".to_owned(),
            skips: Counted::Unknown("the log no longer has them".to_owned()),
            repeats: Counted::Nothing,
            remarks: vec![lost, format!("slot {} is made anew at the end of the log", self.settings.slot)],
        })
    }

    /// Says what else there is, with the slots that stand further back.
    async fn cannot_go_back(&self, slot: Lsn, to: Lsn) -> Result<SourceFailure, SourceFailure> {
        let asked = "SELECT slot_name::text, confirmed_flush_lsn::text FROM pg_catalog.pg_replication_slots
                     WHERE database = current_database() AND plugin = 'pgoutput' AND slot_name <> $1
                       AND confirmed_flush_lsn <= $2::text::pg_lsn AND wal_status IS DISTINCT FROM 'lost' AND NOT temporary
                     ORDER BY confirmed_flush_lsn DESC LIMIT 1";
        let older = self.session.query_opt(asked, &[&self.settings.slot, &to.to_string()]).await;
        let older = older.map_err(|error| self.session.classify(&error))?;
        let own = literal(&self.settings.slot);
        let copied = older.map(|row| {
            let (name, at): (String, String) = (row.get(0), row.get(1));
            format!(
                "; or, since slot `{name}` stands at {at}, make this one a copy of it: SELECT pg_drop_replication_slot({own}); \
                 SELECT pg_copy_logical_replication_slot({}, {own}); UPDATE outboxd_checkpoint SET position = '{at}' WHERE \
                 pipeline = {}; and then set the position",
                literal(&name),
                literal(&self.of.name)
            )
        });
        Ok(SourceFailure::PositionLost {
            what: format!(
                "slot `{}` stands at {slot} and cannot go back to {to}: PostgreSQL keeps for a slot only the log that follows \
                 its position",
                self.settings.slot
            ),
            remedy: format!(
                "deliver again from the table what is still in it: insert those rows once more, or run a second pipeline with \
                 another --name and --slot and --snapshot existing, which delivers all of them{}",
                copied.unwrap_or_default()
            ),
        })
    }

    /// Counts events between two positions in the slot's own log, without moving it.
    async fn count(&self, after: Lsn, upto: Lsn) -> Counted {
        let counted = async {
            let until = self.peek(upto).await?;
            // The slot may stand before the place to count from.
            let before = match Some(after) > self.found.slot_position() {
                true => self.peek(after).await?,
                false => (0, false),
            };
            Ok::<_, SourceFailure>((until.0.saturating_sub(before.0), until.1))
        };
        match counted.await {
            Ok((events, true)) => Counted::AtLeast(events),
            Ok((events, false)) => Counted::Events(events),
            Err(failure) => Counted::Unknown(failure.to_string()),
        }
    }

    /// Events of the slot's log up to a position, and whether there were more than are counted.
    async fn peek(&self, upto: Lsn) -> Result<(u64, bool), SourceFailure> {
        let failed = |error: tokio_postgres::Error| match error.code() {
            Some(&tokio_postgres::error::SqlState::QUERY_CANCELED) => {
                SourceFailure::transient(format!("not within {} s", COUNTING.as_secs()))
            }
            _ => classify_sql(&error, "counting the slot's changes"),
        };
        let (tables, _) = Tables::find(&self.session, &self.settings.tables).await?;
        let oids: Vec<i64> = tables.catalog.iter().map(|table| i64::from(table.oid)).collect();
        let prefixes: Vec<Vec<u8>> =
            self.settings.message_prefixes.iter().map(|prefix| [prefix.as_bytes(), b"\0"].concat()).collect();
        let messages = if prefixes.is_empty() { "" } else { ", 'messages', 'true'" };
        // An insert is `I` and its relation's oid, a message `M`, flags, its position and its prefix.
        let statement = format!(
            "WITH leaves AS (SELECT $1::bigint[] || array_agg(p.relid::oid::bigint) AS oids
                             FROM unnest($1::bigint[]) AS t (oid), pg_catalog.pg_partition_tree(t.oid::oid) p),
                  changes AS (SELECT data FROM pg_catalog.pg_logical_slot_peek_binary_changes($2, $3::text::pg_lsn, $4,
                      'proto_version', '1', 'publication_names', $5{messages}))
             SELECT count(*) FILTER (WHERE get_byte(data, 0) = 73
                        AND ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint = ANY (leaves.oids))
                  + count(*) FILTER (WHERE get_byte(data, 0) = 77
                        AND EXISTS (SELECT FROM unnest($6::bytea[]) AS m (prefix)
                                    WHERE substr(data, 11, length(m.prefix)) = m.prefix)),
                    count(*)
             FROM changes, leaves"
        );
        let limit = format!("SET statement_timeout = '{}s'", COUNTING.as_secs());
        self.session.batch_execute(&limit).await.map_err(failed)?;
        let publication = super::tables::quote(&self.settings.publication);
        let most = i32::try_from(MOST_COUNTED).unwrap_or(i32::MAX);
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
            [&oids, &self.settings.slot, &upto.to_string(), &most, &publication, &prefixes];
        let counted = self.session.query_one(&statement, &values).await;
        self.session.batch_execute("SET statement_timeout = 0").await.map_err(failed)?;
        let row = counted.map_err(failed)?;
        let (events, all): (i64, i64) = (row.get(0), row.get(1));
        Ok((events.cast_unsigned(), all.cast_unsigned() >= MOST_COUNTED))
    }

    pub async fn audit(&mut self, entry: &Entry) -> Result<(), SourceFailure> {
        audit::in_postgres(&self.session, entry).await
    }

    pub async fn carry_out(&mut self) -> Result<String, SourceFailure> {
        let Some(Planned { step, notes }) = self.planned.take() else {
            return Err(SourceFailure::transient("nothing was planned"));
        };
        // Whoever ran meanwhile has moved it.
        let now = Found::ask(&self.session, self.settings, &self.of.name).await?;
        free(&self.session, self.settings, &now).await?;
        if now.position() != self.found.position() {
            return Err(SourceFailure::Held {
                what: format!("an instance has run pipeline `{}` meanwhile: nothing was changed", self.of.name),
            });
        }
        stand::note(self.of, notes.as_ref()).await?;
        match step {
            Step::Notes(to) => return Ok(to.to_string()),
            Step::Move(to) => self.advance(to).await?,
            Step::Anew => self.make_anew().await?,
        }
        let moved = Found::ask(&self.session, self.settings, &self.of.name).await?;
        Ok(moved.position().map(|position| position.to_string()).unwrap_or_default())
    }

    async fn advance(&self, to: Lsn) -> Result<(), SourceFailure> {
        let name = &self.settings.slot;
        let mut reached = to;
        if self.found.slot_position().is_some_and(|slot| to > slot) {
            let advance = "SELECT end_lsn::text FROM pg_catalog.pg_replication_slot_advance($1, $2::text::pg_lsn)";
            let row = self.session.query_one(advance, &[name, &to.to_string()]).await.map_err(|error| {
                match error.code() {
                    Some(&tokio_postgres::error::SqlState::OBJECT_IN_USE) => SourceFailure::Held {
                        what: format!("slot `{name}` is being read by an instance that has just started"),
                    },
                    _ => classify_sql(&error, "advancing the slot"),
                }
            })?;
            // The end of the record that the position lies in.
            reached = row.get::<_, String>(0).parse().unwrap_or(to);
        }
        self.store(reached).await
    }

    async fn make_anew(&self) -> Result<(), SourceFailure> {
        let name = literal(&self.settings.slot);
        let run = async |statement: &str, doing: &str| {
            self.session.batch_execute(statement).await.map_err(|error| classify_sql(&error, doing))
        };
        let (tables, missing) = Tables::find(&self.session, &self.settings.tables).await?;
        let publication = slot::publication(&self.session, &self.settings.publication, &tables.catalog).await?;
        if publication.is_none() || !missing.is_empty() {
            return Err(SourceFailure::NotReady {
                what: "the publication or a table is missing, and must be older than a slot".to_owned(),
                remedy: "outboxd init, then once more".to_owned(),
            });
        }
        if self.found.state.is_some() {
            run(&format!("SELECT pg_drop_replication_slot({name})"), "dropping the slot").await?;
        }
        let create = setup::create_slot_statement(&self.settings.slot, self.session.server_version());
        // It waits for the transactions that are running.
        run(&format!("SET lock_timeout = 0; {create}"), "creating the slot").await?;
        let state = slot::state(&self.session, &self.settings.slot, self.session.server_version()).await?;
        let begins = state.and_then(|state| state.confirmed);
        self.store(begins.unwrap_or(self.found.server.wal_position)).await
    }

    async fn store(&self, position: Lsn) -> Result<(), SourceFailure> {
        let SystemIdentity { system_identifier, timeline, .. } = self.found.server;
        let snapshot = match (&self.found.stored, &self.found.lost) {
            (Some(stored), None) => stored.snapshot,
            _ => checkpoint::SnapshotState::None,
        };
        let slot = self.settings.slot.clone();
        let row = Checkpoint { system_identifier, timeline, slot, position, snapshot, updated_at: String::new() };
        if !checkpoint::table_exists(&self.session).await? {
            checkpoint::create_table(&self.session).await?;
        }
        checkpoint::store(&self.session, &self.of.name, &row).await
    }
}

/// Whether nobody reads the slot.
async fn free(session: &SqlSession, settings: &PostgresSettings, found: &Found) -> Result<(), SourceFailure> {
    let Some(pid) = found.state.as_ref().and_then(|state| state.active_pid) else { return Ok(()) };
    let who = reader(session, pid).await?;
    Err(SourceFailure::Held { what: format!("slot `{}` is being read by {who}", settings.slot) })
}

/// The end of the log that is safely on disk: a slot is not moved beyond it.
async fn flushed(session: &SqlSession) -> Result<Lsn, SourceFailure> {
    let row = session
        .query_one("SELECT pg_catalog.pg_current_wal_flush_lsn()::text", &[])
        .await
        .map_err(|error| session.classify(&error))?;
    Ok(row.get::<_, String>(0).parse().unwrap_or_default())
}
