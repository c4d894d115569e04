//! `outboxd init --inbox`: the tables of a consumer, which are in the consumer's own database. Nothing of a pipeline is made.

use super::halt;
use crate::config::{PipelineSettings, SourceSettings, TableName};
use crate::dead_letters;
use crate::failure::Halt;
use crate::source::mongodb::server_error::{self as mongodb_error, Doing, code};
use crate::source::postgres::server_error::classify_sql;
use crate::source::{SourceFailure, mongodb, mysql, postgres, schema};

const POSTGRES: &str = include_str!("../../../sql/postgres/processed-events.sql");
const MYSQL: &str = include_str!("../../../sql/mysql/processed-events.sql");
const MONGODB: &str = include_str!("../../../sql/mongodb/processed-events.js");
const TABLES: [&str; 2] = ["processed_events", "processed_versions"];

/// Makes the tables, saying a line for each, or says the statements.
pub async fn make(pipeline: &PipelineSettings, dry_run: bool, say: &mut dyn FnMut(&str)) -> Result<(), Halt> {
    let script = match &pipeline.source {
        SourceSettings::Postgres(_) => POSTGRES,
        SourceSettings::MySql(_) => MYSQL,
        SourceSettings::Mongo(_) => MONGODB,
    };
    let script = schema::fill(script, |_| None);
    if dry_run {
        say(script.trim());
        return Ok(());
    }
    let present = Box::pin(run(&pipeline.source, &script)).await.map_err(halt)?;
    let thing = if matches!(pipeline.source, SourceSettings::Mongo(_)) { "collection" } else { "table" };
    for table in TABLES {
        let had = if present.contains(&table) { "exists already:" } else { "created" };
        say(&format!("{had} {thing} {table}"));
    }
    if present.len() == TABLES.len() {
        say("nothing to do: everything is in place");
    }
    Ok(())
}

/// Runs the script, which changes nothing that is there; returns which tables were.
async fn run(source: &SourceSettings, script: &str) -> Result<Vec<&'static str>, SourceFailure> {
    let mut present = Vec::new();
    let name = |table: &str| TableName { schema: None, name: table.to_owned() };
    match source {
        SourceSettings::Postgres(settings) => {
            let session = postgres::sql::connect(&postgres::conninfo(settings)?).await?;
            for table in TABLES {
                if dead_letters::postgres::exists(&session, &name(table)).await? {
                    present.push(table);
                }
            }
            let ran = session.batch_execute(script).await;
            ran.map_err(|error| classify_sql(&error, "creating the tables of the inbox"))?;
        }
        SourceSettings::MySql(settings) => {
            let mut session = mysql::connect(settings, &mysql::conninfo(settings)?).await?;
            for table in TABLES {
                if dead_letters::mysql::exists(&mut session, &name(table)).await? {
                    present.push(table);
                }
            }
            for statement in script.split_inclusive(";\n").filter(|statement| !statement.trim().is_empty()) {
                session.execute(statement).await?;
            }
            session.close().await;
        }
        SourceSettings::Mongo(settings) => {
            let database = mongodb::server::connect(settings).await?.database;
            let known = mongodb::server::collections(&database).await?;
            present.extend(TABLES.into_iter().filter(|table| known.iter().any(|known| known == table)));
            for command in mongodb::setup::commands(script) {
                let doing = Doing::Writing(format!("the database {}", database.name()));
                match database.run_command(command).await {
                    Err(error) if mongodb_error::code_of(&error) == Some(code::NAMESPACE_EXISTS) => {}
                    ran => drop(ran.map_err(|error| mongodb_error::classify(&error, &doing))?),
                }
            }
        }
    }
    Ok(present)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_for_mongodb_is_a_command() {
        let filled = schema::fill(MONGODB, |_| None);
        assert_eq!(mongodb::setup::commands(&filled).len(), 5);
        assert_eq!(filled.lines().filter(|line| !line.trim().is_empty()).count(), 5, "{filled}");
    }
}
