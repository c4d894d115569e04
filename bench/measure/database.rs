//! The database that rows are written to, whichever it is.

use anyhow::{Context as _, bail};
use mongodb::bson::Document;
use outboxd::source::mysql;
use outboxd::source::postgres::sql::SqlSession;
use tokio_postgres::{SimpleQueryMessage, Statement};

pub enum Database {
    Postgres { session: SqlSession, insert: Option<Statement> },
    MySql(mysql::session::Session),
    Mongo(mongodb::Collection<Document>),
}

const INSERT: &str =
    "INSERT INTO outbox (partition_key, event_type, payload) VALUES ($1, 'OrderCreated', $2::text::jsonb)";

impl Database {
    pub async fn connect(source: &str) -> anyhow::Result<Self> {
        match source.split_once("://") {
            Some(("mysql" | "mariadb", _)) => {
                let info = mysql::conninfo::ConnInfo::parse(source)?;
                Ok(Database::MySql(mysql::session::Session::connect(&info).await?))
            }
            Some(("mongodb", _)) => {
                let client = mongodb::Client::with_uri_str(source).await?;
                let database = client.default_database().context("the address names no database")?;
                Ok(Database::Mongo(database.collection("outbox")))
            }
            Some(_) => Ok(Database::Postgres { session: crate::connect(source).await?, insert: None }),
            None => bail!("{source} is not a URL"),
        }
    }

    /// The rows of a statement, as text.
    pub async fn query(&mut self, statement: &str) -> anyhow::Result<Vec<Vec<Option<String>>>> {
        let mut rows = Vec::new();
        match self {
            Database::Postgres { session, .. } => {
                for message in session.simple_query(statement).await? {
                    if let SimpleQueryMessage::Row(row) = message {
                        rows.push((0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect());
                    }
                }
            }
            Database::MySql(session) => {
                for row in session.query(statement).await? {
                    rows.push((0..row.len()).map(|column| row.text(column)).collect());
                }
            }
            Database::Mongo(_) => bail!("MongoDB takes no statements"),
        }
        Ok(rows)
    }

    /// Inserts one outbox row, in a transaction of its own. The payload is JSON without quotes or backslashes inside.
    pub async fn insert(&mut self, key: &str, payload: &str) -> anyhow::Result<()> {
        match self {
            Database::Postgres { session, insert } => {
                if insert.is_none() {
                    *insert = Some(session.prepare(INSERT).await?);
                }
                if let Some(insert) = insert {
                    session.execute(insert, &[&key, &payload]).await?;
                }
            }
            Database::MySql(session) => {
                let statement = format!(
                    "INSERT INTO outbox (partition_key, event_type, payload) VALUES ('{key}', 'OrderCreated', '{payload}')"
                );
                session.execute(&statement).await?;
            }
            Database::Mongo(outbox) => {
                outbox.insert_one(crate::change_stream::document(key, payload)?).await?;
            }
        }
        Ok(())
    }
}
