//! What a pipeline stands on (table, checkpoint, starting position) and the statements that make it. `init` executes
//! exactly what its `--dry-run` prints.

use super::checkpoint::{self, Place};
use super::conninfo::ConnInfo;
use super::judge;
use super::server::Server;
use super::session::{Session, quote};
use super::tables::{self, missing_columns};
use super::{first_position, refuse};
use crate::checkpoint::{Checkpoint, FORMAT, SnapshotState};
use crate::config::{MySqlSettings, Snapshot, TableName};
use crate::dead_letters::mysql as letters;
use crate::retention::day::Day;
use crate::retention::{mysql_partitions, rule};
use crate::source::{SourceFailure, audit, schema};

pub(crate) const NATIVE: &str = include_str!("../../../sql/mysql/native.sql");
const ENTITY: &str = include_str!("../../../sql/mysql/entity.sql");
const MESSAGE_GROUP: &str = include_str!("../../../sql/mysql/message-group.sql");
const PRODUCE_RECEIVE: &str = include_str!("../../../sql/mysql/produce-receive.sql");
const NATIVE_STATUS: &str = include_str!("../../../sql/mysql/native-status.sql");
const DEBEZIUM: &str = include_str!("../../../sql/mysql/debezium.sql");

const WORDS: schema::Words = schema::Words {
    without_key: "",
    partition_by: "PARTITION BY RANGE COLUMNS (?) (PARTITION pmax VALUES LESS THAN (MAXVALUE))",
    plain_sequence: ", ADD INDEX outboxd_seq (seq)",
};

type Wanted<'a> = schema::Wanted<'a, MySqlSettings>;

/// What is there already, and the statements that make what is not.
#[derive(Default)]
struct Plan {
    present: Vec<String>,
    steps: Vec<(String, String)>,
    /// The starting position, where it is kept elsewhere.
    position: Option<Checkpoint>,
}

impl Plan {
    fn add(&mut self, present: bool, thing: String, sql: String) {
        match present {
            true => self.present.push(thing),
            false => self.steps.push((thing, sql)),
        }
    }
}

/// Makes what is missing, saying one line for each thing. A second time there is nothing to do.
pub async fn init(wanted: &Wanted<'_>, say: &mut dyn FnMut(&str)) -> Result<(), SourceFailure> {
    let info = super::conninfo(wanted.settings)?;
    let database = checkpoint::database(&info)?.to_owned();
    let mut session = super::connect(wanted.settings, &info).await?;
    let plan = plan(&mut session, wanted, &database).await?;
    for thing in &plan.present {
        say(&format!("exists already: {thing}"));
    }
    for (thing, sql) in &plan.steps {
        session.execute(sql).await?;
        say(&format!("created {thing}"));
    }
    let (catalog, _) = tables::find(&mut session, &database, &wanted.settings.tables).await?;
    refuse(missing_columns(&catalog, wanted.projection))?;
    if let Some(position) = &plan.position {
        Place::open(&wanted.settings.checkpoint, &wanted.of.kafka)?.save(&mut session, position).await?;
        say(&format!("created starting position of pipeline {}: {}", wanted.of.name, position.position));
    }
    if plan.steps.is_empty() && plan.position.is_none() {
        say("nothing to do: everything is in place");
    }
    session.close().await;
    Ok(())
}

/// The statements that [`init`] would execute, for the `mysql` client.
pub async fn dry_run(wanted: &Wanted<'_>) -> Result<String, SourceFailure> {
    let info = super::conninfo(wanted.settings)?;
    let database = checkpoint::database(&info)?.to_owned();
    let mut session = super::connect(wanted.settings, &info).await?;
    let plan = plan(&mut session, wanted, &database).await?;
    session.close().await;
    let mut script = String::new();
    for thing in &plan.present {
        script.push_str(&format!("-- exists already: {thing}\n"));
    }
    for (thing, sql) in &plan.steps {
        script.push_str(&format!("\n-- {thing}\n{};\n", sql.trim_end().trim_end_matches(';')));
    }
    if let Some(position) = &plan.position {
        script.push_str(&format!("-- starting position, outside of the source: {}\n", position.position));
    }
    if plan.steps.is_empty() && plan.position.is_none() {
        script.push_str("-- nothing to do: everything is in place\n");
    }
    Ok(script)
}

async fn plan(session: &mut Session, wanted: &Wanted<'_>, database: &str) -> Result<Plan, SourceFailure> {
    let settings = wanted.settings;
    let server = Server::ask(session).await?;
    if wanted.is_log() {
        refuse(judge::settings(&server))?;
    }
    let (catalog, missing) = tables::find(session, database, &settings.tables).await?;
    refuse(missing_columns(&catalog, wanted.projection))?;
    let mut plan = Plan::default();
    for table in &settings.tables {
        plan.add(!missing.contains(table), format!("table {table}"), create_table(wanted, table));
        if wanted.is_native_status() {
            let known = catalog.iter().any(|known| known.name == table.name && known.has("seq") && known.has("status"));
            let sql = schema::fill(NATIVE_STATUS, |name| match name {
                "table" => Some(quoted(table)),
                name => wanted.partitioned(name, quote, &WORDS),
            });
            plan.add(known, format!("status columns of table {table}"), sql);
        }
    }
    plan_partitions(&mut plan, session, &server, wanted, database).await?;
    for table in wanted.letter_tables() {
        plan.add(letters::exists(session, table).await?, format!("table {table}"), letters::create(table));
    }
    if !wanted.is_log() {
        return Ok(plan);
    }
    let place = Place::open(&settings.checkpoint, &wanted.of.kafka)?;
    let has_table = checkpoint::table_exists(session, database).await?;
    if place.is_table() {
        plan.add(has_table, "table outboxd_checkpoint".to_owned(), schema::fill(checkpoint::CREATE, |_| None));
    }
    if place.is_table() {
        let recorded = audit::mysql_table_exists(session).await?;
        plan.add(recorded, format!("table {}", audit::NAME), schema::fill(audit::MYSQL, |_| None));
    }
    let stored = match place.is_table() && !has_table {
        true => None,
        false => place.load(session, &wanted.of.name).await?,
    };
    if let Some(stored) = stored {
        plan.present.push(format!("position of pipeline {}: {}", wanted.of.name, stored.position));
        return Ok(plan);
    }
    super::warn_of_prepared(session).await;
    let reach = server.reach(session).await?;
    let info = ConnInfo { hosts: vec![session.host().clone()], ..super::conninfo(settings)? };
    let start = first_position(settings, &info, &server, &reach).await?;
    let position = Checkpoint {
        format: FORMAT,
        pipeline: wanted.of.name.clone(),
        source: server.flavor.name().to_owned(),
        server: server.identity,
        position: start.to_string(),
        file: start.file.to_string(),
        snapshot: match settings.snapshot {
            // The first run reads the table; what is committed until then it delivers twice rather than not at all.
            Snapshot::Existing => SnapshotState::Pending,
            Snapshot::None => SnapshotState::None,
        },
    };
    match place.is_table() {
        true => plan
            .steps
            .push((format!("starting position of pipeline {}", wanted.of.name), checkpoint::first_row(&position))),
        false => plan.position = Some(position),
    }
    Ok(plan)
}

fn quoted(table: &TableName) -> String {
    match &table.schema {
        Some(schema) => format!("{}.{}", quote(schema), quote(&table.name)),
        None => quote(&table.name),
    }
}

fn template(layout: &str) -> &'static str {
    match layout {
        "debezium" => DEBEZIUM,
        "entity" => ENTITY,
        "message-group" => MESSAGE_GROUP,
        "produce-receive" => PRODUCE_RECEIVE,
        _ => NATIVE,
    }
}

/// How a status column of a layout is defined.
pub(crate) fn status_column(layout: &str, column: &str) -> Option<String> {
    let own = if layout == "native" { NATIVE_STATUS } else { template(layout) };
    schema::definition(own, column)
}

fn create_table(wanted: &Wanted<'_>, table: &TableName) -> String {
    let template = template(&wanted.of.route.layout);
    schema::fill(template, |name| match name {
        "table" => Some(quoted(table)),
        "payload_type" => Some(wanted.payload.to_owned()),
        name => wanted.partitioned(name, quote, &WORDS).or_else(|| wanted.column(name).map(quote)),
    })
}

/// The days of tables that have one partition for each; and whether those that are there have them.
async fn plan_partitions(
    plan: &mut Plan,
    session: &mut Session,
    server: &Server,
    wanted: &Wanted<'_>,
    database: &str,
) -> Result<(), SourceFailure> {
    let Some(timestamp) = rule::timestamp(wanted.of).filter(|_| wanted.by_day) else { return Ok(()) };
    if wanted.is_log() && server.row_metadata != "FULL" {
        return Err(SourceFailure::NotReady {
            what:
                "the log does not name the columns of tables, so that rows could not be read after a partition was made"
                    .to_owned(),
            remedy: "SET GLOBAL binlog_row_metadata = FULL, and in my.cnf; or leave out --partition-by".to_owned(),
        });
    }
    let row = session.query_one("SELECT UNIX_TIMESTAMP(), utc_timestamp()").await?;
    let today = Day::of_seconds(i64::try_from(row.number(0)).unwrap_or(0));
    for name in &wanted.settings.tables {
        let (catalog, _) = tables::find(session, database, std::slice::from_ref(name)).await?;
        let days = match catalog.first() {
            None => mysql_partitions::missing_days(None, today),
            Some(table) => match mysql_partitions::find(session, table, &timestamp, &row.string(1)).await? {
                Some(by_time) => mysql_partitions::missing_days(Some(&by_time), today),
                None => {
                    return Err(SourceFailure::NotReady {
                        what: format!("{} is there already, and is not partitioned by {timestamp}", table.quoted()),
                        remedy: "name another with --table, leave out --partition-by, or ALTER TABLE … PARTITION BY yourself"
                            .to_owned(),
                    });
                }
            },
        };
        let until = days.last().map_or(String::new(), |day| format!(" up to {day}"));
        let sql = mysql_partitions::create_days(&quoted(name), &days);
        plan.add(days.is_empty(), format!("partitions of table {name}{until}"), sql);
    }
    Ok(())
}
