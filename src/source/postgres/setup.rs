//! What a pipeline stands on (table, publication, slot, checkpoint) and the statements that make it. `init` executes
//! exactly what its `--dry-run` prints.
//!
//! The order matters: the publication must be older than the slot, since a change cannot be decoded with a publication
//! that did not exist then; the checkpoint row comes last and says where the slot begins.

use std::sync::Arc;

use super::checkpoint::{self, SnapshotState};
use super::judge::{self, refuse};
use super::server_error::{classify_sql, made_meanwhile};
use super::slot;
use super::sql::{self, SqlSession};
use super::tables::{CatalogTable, Tables, literal, quote};
use super::walsender::SystemIdentity;
use crate::config::{Capture, PostgresSettings, Snapshot, TableName};
use crate::dead_letters::postgres as letters;
use crate::event::Micros;
use crate::retention::day::Day;
use crate::retention::{DAYS_AHEAD, postgres_partitions, rule};
use crate::source::notes;
use crate::source::poll::progress::{self, Progress};
use crate::source::{SourceFailure, audit, poll, schema};

/// The outbox table of the layout `native`, as it stands.
pub(crate) const NATIVE: &str = include_str!("../../../sql/postgres/native.sql");
const ENTITY: &str = include_str!("../../../sql/postgres/entity.sql");
const MESSAGE_GROUP: &str = include_str!("../../../sql/postgres/message-group.sql");
const EVENT_STORE: &str = include_str!("../../../sql/postgres/event-store.sql");
const OCCURRED_ON: &str = include_str!("../../../sql/postgres/occurred-on.sql");
const PRODUCE_RECEIVE: &str = include_str!("../../../sql/postgres/produce-receive.sql");
const NATIVE_STATUS: &str = include_str!("../../../sql/postgres/native-status.sql");
const NOTIFY: &str = include_str!("../../../sql/postgres/notify.sql");
const DEBEZIUM: &str = include_str!("../../../sql/postgres/debezium.sql");

const WORDS: schema::Words =
    schema::Words { without_key: "NOT NULL", partition_by: "PARTITION BY RANGE (?)", plain_sequence: "" };

const NOTES: &str = "table outboxd_publishers";
const AUDIT: &str = "table outboxd_audit";
const PROGRESS: &str = "table outbox_topic_progress";

/// The version whose statements are printed when no server can be asked.
const NEWEST_VERSION: u32 = 180_000;

type Wanted<'a> = schema::Wanted<'a, PostgresSettings>;

/// One thing and the statement that makes it.
struct Step {
    thing: String,
    sql: String,
    /// A slot cannot be made in a transaction that has written.
    transactional: bool,
}

impl Step {
    fn new(thing: String, sql: String) -> Self {
        Step { thing, sql, transactional: true }
    }

    fn alone(thing: String, sql: String) -> Self {
        Step { thing, sql, transactional: false }
    }
}

/// What is there already, and the steps to what is not.
#[derive(Default)]
struct Plan {
    present: Vec<String>,
    steps: Vec<Step>,
}

impl Plan {
    fn add(&mut self, present: bool, step: Step) {
        if present {
            self.present.push(step.thing);
        } else {
            self.steps.push(step);
        }
    }
}

/// Makes what is missing, saying one line for each thing. A second time there is nothing to do.
pub async fn init(wanted: &Wanted<'_>, say: &mut dyn FnMut(&str)) -> Result<(), SourceFailure> {
    let session = Arc::new(sql::connect(&super::conninfo(wanted.settings)?).await?);
    if wanted.is_log() {
        let level: String = session
            .query_one("SELECT pg_catalog.current_setting('wal_level')", &[])
            .await
            .map_err(|error| session.classify(&error))?
            .get(0);
        refuse(judge::wal_level(&level))?;
    }
    let plan = plan(&session, wanted).await?;
    for thing in &plan.present {
        say(&format!("exists already: {thing}"));
    }
    let (transactional, alone): (Vec<_>, Vec<_>) = plan.steps.iter().partition(|step| step.transactional);
    if !transactional.is_empty() {
        execute(&session, "a transaction", "BEGIN").await?;
        for step in &transactional {
            execute(&session, &step.thing, &step.sql).await?;
        }
        // A table that was made must have the columns that --column and --topic ask for; else nothing is left behind.
        let (tables, missing) = Tables::find(&session, &wanted.settings.tables).await?;
        refuse(judge::tables(&missing, &tables, wanted.projection))?;
        execute(&session, "the transaction", "COMMIT").await?;
        for step in &transactional {
            say(&format!("created {}", step.thing));
        }
    }
    for step in alone {
        // Making a slot waits for the transactions that are running, which is not a lock held too long.
        tracing::info!("creating {}; a slot waits for running transactions to end", step.thing);
        execute(&session, &step.thing, &format!("SET lock_timeout = 0; {}", step.sql)).await?;
        say(&format!("created {}", step.thing));
    }
    if plan.steps.is_empty() {
        say("nothing to do: everything is in place");
    }
    Ok(())
}

/// The statements that [`init`] would execute, for psql. Without a server to ask: all of them, for the newest version.
pub async fn dry_run(wanted: &Wanted<'_>) -> Result<String, SourceFailure> {
    let mut script = String::new();
    let plan = match sql::connect(&super::conninfo(wanted.settings)?).await {
        Ok(session) => plan(&Arc::new(session), wanted).await?,
        Err(failure) => {
            script.push_str(&format!("-- No server could be asked what is there already: {}\n", one_line(&failure)));
            from_nothing(wanted)
        }
    };
    for thing in &plan.present {
        script.push_str(&format!("-- exists already: {}\n", one_line(thing)));
    }
    for Step { thing, sql, .. } in &plan.steps {
        script.push_str(&format!("\n-- {}\n{};\n", one_line(thing), sql.trim_end().trim_end_matches(';')));
    }
    if plan.steps.is_empty() {
        script.push_str("-- nothing to do: everything is in place\n");
    }
    Ok(script)
}

/// For a comment, which ends with its line.
fn one_line(text: impl ToString) -> String {
    text.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

async fn execute(session: &SqlSession, thing: &str, statements: &str) -> Result<(), SourceFailure> {
    let on = format!("{}: creating {thing}", session.description());
    session.batch_execute(statements).await.map_err(|error| classify_sql(&error, &on))
}

/// Looks at what is there. What is there and wrong is refused, as a run would refuse it.
async fn plan(session: &Arc<SqlSession>, wanted: &Wanted<'_>) -> Result<Plan, SourceFailure> {
    // --no-create is said to runs; this is the command that creates.
    let settings = &PostgresSettings { no_create: false, ..wanted.settings.clone() };
    let version = session.server_version();
    refuse(judge::version(version))?;
    let (tables, missing) = Tables::find(session, &settings.tables).await?;
    refuse(judge::tables(&[], &tables, wanted.projection))?;
    let mut plan = Plan::default();
    for schema in missing.iter().filter_map(|table| table.schema.as_deref()) {
        let exists: bool = session
            .query_one("SELECT pg_catalog.to_regnamespace($1) IS NOT NULL", &[&quote(schema)])
            .await
            .map_err(|error| session.classify(&error))?
            .get(0);
        if !exists {
            plan.steps.push(create_schema(schema));
        }
    }
    for table in &settings.tables {
        plan.add(!missing.contains(table), create_table(wanted, table, version));
    }
    plan_polling(&mut plan, session, wanted, &tables).await?;
    plan_partitions(&mut plan, session, wanted, &tables).await?;
    for table in wanted.letter_tables() {
        plan.add(letters::exists(session, table).await?, create_letters(table));
    }
    if matches!(wanted.of.capture, Capture::Positions(_)) {
        plan.add(Progress::exists(session).await?, Step::new(PROGRESS.to_owned(), progress::CREATE.to_owned()));
        plan.add(audit::table_exists(session).await?, Step::new(AUDIT.to_owned(), audit::POSTGRES.to_owned()));
        return Ok(plan);
    }
    if !wanted.is_log() {
        plan.add(notes::table_exists(session).await?, Step::new(NOTES.to_owned(), notes::CREATE.to_owned()));
        return Ok(plan);
    }
    let has_checkpoints = checkpoint::table_exists(session).await?;
    let stored = if has_checkpoints { checkpoint::load(session, &wanted.of.name).await? } else { None };
    let state = slot::state(session, &settings.slot, version).await?;
    let server = identity(session).await?;
    let loss = judge::lost(&wanted.of.name, settings, stored.as_ref(), state.as_ref(), &server);
    refuse(loss.map(|loss| loss.failure))?;
    let database: String = session
        .query_one("SELECT pg_catalog.current_database()::text", &[])
        .await
        .map_err(|error| session.classify(&error))?
        .get(0);
    refuse(judge::slot(settings, state.as_ref(), &database))?;
    let publication = slot::publication(session, &settings.publication, &tables.catalog).await?;
    let found = publication.as_ref();
    refuse(judge::publication(settings, found, &tables.catalog, wanted.projection, state.is_some()))?;

    plan.add(has_checkpoints, Step::new("table outboxd_checkpoint".to_owned(), checkpoint::CREATE.to_owned()));
    plan.add(notes::table_exists(session).await?, Step::new(NOTES.to_owned(), notes::CREATE.to_owned()));
    plan.add(audit::table_exists(session).await?, Step::new(AUDIT.to_owned(), audit::POSTGRES.to_owned()));
    plan.add(found.is_some(), create_publication(wanted));
    if publication.is_some_and(|publication| !publication.all_tables) {
        // The tables that were missing a moment ago cannot be in it.
        for table in &missing {
            let (name, table) = (quote(&settings.publication), table.quoted());
            let sql = format!("ALTER PUBLICATION {name} ADD TABLE {table}");
            plan.steps.push(Step::new(format!("place of {table} in publication {name}"), sql));
        }
    }
    plan.add(state.is_some(), create_slot(wanted, version));
    plan.add(stored.is_some(), store_row(wanted));
    Ok(plan)
}

/// Every step, when nothing is known.
fn from_nothing(wanted: &Wanted<'_>) -> Plan {
    let mut steps = Vec::new();
    for table in &wanted.settings.tables {
        steps.extend(table.schema.as_deref().filter(|schema| *schema != "public").map(create_schema));
        steps.push(create_table(wanted, table, NEWEST_VERSION));
        steps.extend(wanted.is_native_status().then(|| add_status(table)));
        steps.extend(wanted.by_day.then(|| add_days(table, &a_week(today_here()), true)));
        steps.extend(wanted.notify.then(|| add_trigger(table, table.schema.as_deref().unwrap_or("public"))));
    }
    steps.extend(wanted.letter_tables().into_iter().map(create_letters));
    if matches!(wanted.of.capture, Capture::Positions(_)) {
        steps.push(Step::new(PROGRESS.to_owned(), progress::CREATE.to_owned()));
        steps.push(Step::new(AUDIT.to_owned(), audit::POSTGRES.to_owned()));
        return Plan { present: Vec::new(), steps };
    }
    if !wanted.is_log() {
        steps.push(Step::new(NOTES.to_owned(), notes::CREATE.to_owned()));
        return Plan { present: Vec::new(), steps };
    }
    steps.push(Step::new("table outboxd_checkpoint".to_owned(), checkpoint::CREATE.to_owned()));
    steps.push(Step::new(NOTES.to_owned(), notes::CREATE.to_owned()));
    steps.push(Step::new(AUDIT.to_owned(), audit::POSTGRES.to_owned()));
    steps.push(create_publication(wanted));
    steps.push(create_slot(wanted, NEWEST_VERSION));
    steps.push(store_row(wanted));
    Plan { present: Vec::new(), steps }
}

fn create_schema(schema: &str) -> Step {
    Step::new(format!("schema {schema}"), format!("CREATE SCHEMA IF NOT EXISTS {}", quote(schema)))
}

fn template(layout: &str) -> &'static str {
    match layout {
        "debezium" => DEBEZIUM,
        "entity" => ENTITY,
        "message-group" => MESSAGE_GROUP,
        "event-store" => EVENT_STORE,
        "occurred-on" => OCCURRED_ON,
        "produce-receive" => PRODUCE_RECEIVE,
        _ => NATIVE,
    }
}

/// How a status column of a layout is defined.
pub(crate) fn status_column(layout: &str, column: &str) -> Option<String> {
    let own = if layout == "native" { NATIVE_STATUS } else { template(layout) };
    schema::definition(own, column)
}

fn create_table(wanted: &Wanted<'_>, table: &TableName, version: u32) -> Step {
    let template = template(&wanted.of.route.layout);
    let sql = schema::fill(template, |name| match name {
        "table" => Some(table.quoted()),
        "payload_type" => Some(wanted.payload.to_owned()),
        "id_default" if version >= 180_000 => Some("uuidv7()".to_owned()),
        name => wanted.partitioned(name, quote, &WORDS).or_else(|| wanted.column(name).map(quote)),
    });
    Step::new(format!("table {table}"), sql)
}

fn create_letters(table: &TableName) -> Step {
    Step::new(format!("table {table}"), letters::create(table))
}

/// The columns of `native` for polling, and the trigger; whether each table has them.
async fn plan_polling(
    plan: &mut Plan,
    session: &SqlSession,
    wanted: &Wanted<'_>,
    tables: &Tables,
) -> Result<(), SourceFailure> {
    for name in &wanted.settings.tables {
        let known = tables
            .catalog
            .iter()
            .find(|table| table.name == name.name && name.schema.as_ref().is_none_or(|schema| *schema == table.schema));
        if wanted.is_native_status() {
            plan.add(known.is_some_and(|table| table.has("seq") && table.has("status")), add_status(name));
        }
        if wanted.notify {
            let asked =
                "SELECT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = $1 AND tgname = 'outboxd_notify'),
                                coalesce(current_schema()::text, 'public')";
            let oid = known.map_or(0, |table| table.oid);
            let row = session.query_one(asked, &[&oid]).await.map_err(|error| session.classify(&error))?;
            let own: String = row.get(1);
            let schema = known.map(|table| &table.schema).or(name.schema.as_ref()).unwrap_or(&own);
            plan.add(row.get(0), add_trigger(name, schema));
        }
    }
    Ok(())
}

/// The days of tables that have one partition for each; and whether those that are there have them.
async fn plan_partitions(
    plan: &mut Plan,
    session: &SqlSession,
    wanted: &Wanted<'_>,
    tables: &Tables,
) -> Result<(), SourceFailure> {
    let Some(timestamp) = rule::timestamp(wanted.of).filter(|_| wanted.by_day) else { return Ok(()) };
    let asked = "SELECT extract(epoch FROM now())::bigint, now()::text";
    let row = session.query_one(asked, &[]).await.map_err(|error| session.classify(&error))?;
    let (today, now) = (Day::of_seconds(row.get(0)), row.get::<_, String>(1));
    for name in &wanted.settings.tables {
        let known = tables
            .catalog
            .iter()
            .find(|table| table.name == name.name && name.schema.as_ref().is_none_or(|schema| *schema == table.schema));
        let Some(table) = known else {
            plan.steps.push(add_days(name, &a_week(today), true));
            continue;
        };
        let Some(by_time) = postgres_partitions::find(session, table, &timestamp, &now).await? else {
            return Err(SourceFailure::NotReady {
                what: format!("{} is there already, and is not partitioned by {}", table.quoted(), quote(&timestamp)),
                remedy: "a table cannot be made into a partitioned one: name another with --table, or leave out --partition-by"
                    .to_owned(),
            });
        };
        let missing = postgres_partitions::missing_days(&by_time, today);
        plan.add(missing.is_empty(), add_days(name, &missing, false));
    }
    Ok(())
}

fn a_week(today: Day) -> Vec<Day> {
    (0..=DAYS_AHEAD).map(|ahead| today.plus(ahead)).collect()
}

/// By the clock of this machine, when no server can be asked.
fn today_here() -> Day {
    Day::of_seconds(Micros::now().0 / 1_000_000)
}

fn add_days(table: &TableName, days: &[Day], with_default: bool) -> Step {
    let schema = table.schema.as_deref();
    let mut statements: Vec<_> =
        with_default.then(|| postgres_partitions::create_default(schema, &table.name)).into_iter().collect();
    statements.extend(days.iter().map(|day| postgres_partitions::create_day(schema, &table.name, *day)));
    let until = days.last().map_or(String::new(), |day| format!(" up to {day}"));
    Step::new(format!("partitions of table {table}{until}"), statements.join("\n"))
}

fn add_status(table: &TableName) -> Step {
    let sql = schema::fill(NATIVE_STATUS, |name| (name == "table").then(|| table.quoted()));
    Step::new(format!("status columns of table {table}"), sql)
}

fn add_trigger(table: &TableName, schema: &str) -> Step {
    let channel = poll::postgres::channel(schema, &table.name);
    let sql = schema::fill(NOTIFY, |name| match name {
        "table" => Some(table.quoted()),
        "channel" => Some(literal(&channel)),
        _ => None,
    });
    Step::new(format!("trigger outboxd_notify of table {table}"), sql)
}

fn create_publication(wanted: &Wanted<'_>) -> Step {
    let name = &wanted.settings.publication;
    let tables = wanted.settings.tables.iter().map(TableName::quoted);
    Step::new(format!("publication {name}"), slot::create_publication(name, tables))
}

fn create_slot(wanted: &Wanted<'_>, version: u32) -> Step {
    let slot = &wanted.settings.slot;
    Step::alone(format!("slot {slot}"), create_slot_statement(slot, version))
}

pub(super) fn create_slot_statement(slot: &str, version: u32) -> String {
    // Neither temporary nor for two-phase commits; where the server can, it follows a fail-over.
    let options = if version >= 170_000 { ", false, false, true" } else { "" };
    format!("SELECT pg_create_logical_replication_slot({}, 'pgoutput'{options})", literal(slot))
}

fn store_row(wanted: &Wanted<'_>) -> Step {
    let state = match wanted.settings.snapshot {
        // The first run reads the table; what is committed until then it delivers twice rather than not at all.
        Snapshot::Existing => SnapshotState::Pending,
        Snapshot::None => SnapshotState::None,
    };
    let sql = checkpoint::first_row(&wanted.of.name, &wanted.settings.slot, state);
    Step::alone(format!("starting position of pipeline {}", wanted.of.name), sql)
}

/// Makes the publication at a first start.
pub(super) async fn make_publication(
    session: &SqlSession,
    name: &str,
    tables: &[CatalogTable],
) -> Result<(), SourceFailure> {
    tracing::info!(publication = name, "creating the publication");
    let create = slot::create_publication(name, tables.iter().map(CatalogTable::quoted));
    session.batch_execute(&create).await.map_err(|error| match classify_sql(&error, "creating the publication") {
        // Whether it has our tables is looked at anew.
        _ if made_meanwhile(&error) => {
            SourceFailure::Restart { what: format!("the publication {name} was made by another pipeline just now") }
        }
        SourceFailure::NotReady { what, .. } => SourceFailure::NotReady { what, remedy: publication_by_owner(&create) },
        other => other,
    })
}

/// For a role that may not make the publication itself.
pub(super) fn publication_by_owner(create: &str) -> String {
    format!("{create}; as the owner of the outbox table with CREATE on the database, or `outboxd init` as that role")
}

/// What a replication connection tells by IDENTIFY_SYSTEM, asked over an ordinary one.
pub(super) async fn identity(session: &SqlSession) -> Result<SystemIdentity, SourceFailure> {
    let statement = "SELECT s.system_identifier, c.timeline_id,
                            CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END::text
                     FROM pg_catalog.pg_control_system() s, pg_catalog.pg_control_checkpoint() c";
    let row = session.query_one(statement, &[]).await.map_err(|error| session.classify(&error))?;
    Ok(SystemIdentity {
        system_identifier: row.get::<_, i64>(0).cast_unsigned(),
        timeline: row.get::<_, i32>(1).cast_unsigned(),
        wal_position: row.get::<_, String>(2).parse().unwrap_or_default(),
    })
}
