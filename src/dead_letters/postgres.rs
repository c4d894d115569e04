//! Letters in a table of PostgreSQL.

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::letter::{Kept, Letter, headers_from_json, headers_to_json};
use super::{AT_ONCE, Chosen, Discarded, Page, Whose};
use crate::config::{PostgresSettings, TableName};
use crate::source::poll::postgres::{lock_key, try_lock};
use crate::source::postgres::{self, server_error::classify_sql, sql::SqlSession};
use crate::source::{SourceFailure, schema};

pub const CREATE: &str = include_str!("../../sql/postgres/dead-letters.sql");

const MOMENT: &str = r#"'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'"#;

pub struct Letters {
    session: SqlSession,
    table: TableName,
}

/// The statement that makes the table.
pub fn create(table: &TableName) -> String {
    schema::fill(CREATE, |name| (name == "table").then(|| table.quoted()))
}

pub async fn exists(session: &SqlSession, table: &TableName) -> Result<bool, SourceFailure> {
    let found = session.query_one("SELECT pg_catalog.to_regclass($1) IS NOT NULL", &[&table.quoted()]).await;
    found.map(|row| row.get(0)).map_err(|error| classify_sql(&error, &format!("looking for the table {table}")))
}

impl Letters {
    pub async fn open(settings: &PostgresSettings, table: &TableName) -> Result<Self, SourceFailure> {
        let session = postgres::sql::connect(&postgres::conninfo(settings)?).await?;
        Ok(Letters { session, table: table.clone() })
    }

    fn failed(&self, doing: &str) -> impl Fn(tokio_postgres::Error) -> SourceFailure + use<> {
        let on = format!("{doing} the dead-letter table {}", self.table);
        let missing = super::by_hand(&self.table, "sql/postgres/dead-letters.sql");
        let grant = format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {} to this role", self.table.quoted());
        move |error| {
            let code = error.code().map(|code| code.code().to_owned()).unwrap_or_default();
            match (code.get(..2), classify_sql(&error, &on)) {
                (_, SourceFailure::NotReady { what, .. }) if code == "42501" => {
                    SourceFailure::NotReady { what, remedy: grant.clone() }
                }
                (_, SourceFailure::NotReady { what, .. }) if code == "42P01" => {
                    SourceFailure::NotReady { what, remedy: missing.clone() }
                }
                // What is in the letter, or a limit of the server's.
                (Some("22" | "23" | "54"), SourceFailure::Transient { what }) => {
                    SourceFailure::Undecodable { what, remedy: super::MAKE_ROOM.to_owned() }
                }
                (_, failure) => failure,
            }
        }
    }

    pub async fn exists(&self) -> Result<bool, SourceFailure> {
        exists(&self.session, &self.table).await
    }

    pub async fn create(&self) -> Result<(), SourceFailure> {
        let made = self.session.batch_execute(&create(&self.table)).await;
        made.map_err(|error| match self.failed("creating")(error) {
            SourceFailure::NotReady { what, .. } => {
                SourceFailure::NotReady { what, remedy: super::by_hand(&self.table, "sql/postgres/dead-letters.sql") }
            }
            // Someone else made it in the same moment, or so it will turn out.
            SourceFailure::Undecodable { what, .. } => SourceFailure::Transient { what },
            other => other,
        })
    }

    /// Whether the table is one for letters, and they may be written.
    pub async fn probe(&self) -> Result<(), SourceFailure> {
        let table = self.table.quoted();
        let asked = "SELECT coalesce(string_agg(privilege, ', ' ORDER BY privilege DESC), '') FROM
             (VALUES ('SELECT'), ('INSERT')) AS needed (privilege) WHERE NOT has_table_privilege($1, privilege)";
        let lacking: String = self.session.query_one(asked, &[&table]).await.map_err(self.failed("looking at"))?.get(0);
        if !lacking.is_empty() {
            return Err(SourceFailure::NotReady {
                what: format!("the role lacks {lacking} on the dead-letter table {}", self.table),
                remedy: format!("GRANT SELECT, INSERT ON {table} to outboxd's role: sql/postgres/grants.sql"),
            });
        }
        let columns = "SELECT id, fingerprint, pipeline, publisher, source_table, event_id, topic, key, value, headers, \
             position, reason, attempts, failed_at, replayed_at";
        let probed = self.session.batch_execute(&format!("{columns} FROM {table} LIMIT 0")).await;
        probed.map_err(|error| match self.failed("looking at")(error) {
            SourceFailure::NotReady { what, .. } => {
                SourceFailure::NotReady { what, remedy: super::another(&self.table, "sql/postgres/dead-letters.sql") }
            }
            other => other,
        })
    }

    pub async fn write(&self, letter: &Letter) -> Result<(), SourceFailure> {
        let insert = format!(
            "INSERT INTO {} (fingerprint, pipeline, publisher, source_table, event_id, topic, key, value, headers, position, \
             reason, attempts) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9::text::json, $10, $11, $12)
             ON CONFLICT (fingerprint) DO NOTHING",
            self.table.quoted()
        );
        let Letter { pipeline, publisher, source_table, event_id, topic, key, value, position, reason, .. } = letter;
        let (fingerprint, headers) = (letter.fingerprint(), headers_to_json(&letter.headers).to_string());
        let (fingerprint, attempts) = (&fingerprint[..], letter.attempts as i32);
        let parameters: [&(dyn ToSql + Sync); 12] = [
            &fingerprint,
            pipeline,
            publisher,
            source_table,
            event_id,
            topic,
            key,
            value,
            &headers,
            position,
            reason,
            &attempts,
        ];
        self.session.execute(&insert, &parameters).await.map(|_| ()).map_err(self.failed("writing"))
    }

    /// The columns of [`kept`]; a list goes without what may be large.
    fn select(&self, whole: bool) -> String {
        let content = if whole { "value, headers::text" } else { "NULL::bytea, '[]'" };
        format!(
            "SELECT id, to_char(failed_at AT TIME ZONE 'UTC', {MOMENT}), to_char(replayed_at AT TIME ZONE 'UTC', {MOMENT}), \
             pipeline, publisher, source_table, event_id, topic, key, position, reason, attempts, {content} FROM {} \
             WHERE pipeline = $1 AND publisher = $2",
            self.table.quoted()
        )
    }

    /// The last letters, newest last.
    pub async fn list(&self, whose: &Whose, page: &Page<'_>) -> Result<Vec<Kept>, SourceFailure> {
        let waiting = if page.waiting { " AND replayed_at IS NULL" } else { "" };
        let query = format!("{}{waiting} AND id < $4 ORDER BY id DESC LIMIT $3", self.select(false));
        let before = page.before.map_or(Some(i64::MAX), |id| id.parse().ok()).unwrap_or(i64::MIN);
        let parameters: [&(dyn ToSql + Sync); 4] = [&whose.pipeline, &whose.publisher, &i64::from(page.limit), &before];
        let rows = self.session.query(&query, &parameters).await;
        Ok(rows.map_err(self.failed("reading"))?.iter().rev().map(kept).collect())
    }

    pub async fn waiting(&self, whose: &Whose, most: u32) -> Result<u64, SourceFailure> {
        let query = format!(
            "SELECT count(*) FROM (SELECT FROM {} WHERE pipeline = $1 AND publisher = $2 AND replayed_at IS NULL LIMIT $3) AS w",
            self.table.quoted()
        );
        let row = self.session.query_one(&query, &[&whose.pipeline, &whose.publisher, &i64::from(most)]).await;
        Ok(row.map_err(self.failed("reading"))?.get::<_, i64>(0).cast_unsigned())
    }

    pub async fn hold(&self, whose: &Whose) -> Result<(), SourceFailure> {
        let key = lock_key(&super::replay_lock(&self.table, whose));
        try_lock(&self.session, key).await?.then_some(()).ok_or_else(|| super::held(whose))
    }

    pub async fn find(&self, whose: &Whose, id: &str) -> Result<Option<Kept>, SourceFailure> {
        let Ok(id) = id.parse::<i64>() else { return Ok(None) };
        let query = format!("{} AND id = $3", self.select(true));
        let row = self.session.query_opt(&query, &[&whose.pipeline, &whose.publisher, &id]).await;
        Ok(row.map_err(self.failed("reading"))?.as_ref().map(kept))
    }

    /// The oldest letter after this one that was not replayed.
    pub async fn next_waiting(&self, whose: &Whose, after: Option<&str>) -> Result<Option<Kept>, SourceFailure> {
        let after = after.and_then(|id| id.parse::<i64>().ok()).unwrap_or(i64::MIN);
        let query = format!("{} AND replayed_at IS NULL AND id > $3 ORDER BY id LIMIT 1", self.select(true));
        let row = self.session.query_opt(&query, &[&whose.pipeline, &whose.publisher, &after]).await;
        Ok(row.map_err(self.failed("reading"))?.as_ref().map(kept))
    }

    pub async fn mark_replayed(&self, id: &str, moment: &str) -> Result<(), SourceFailure> {
        let update = format!("UPDATE {} SET replayed_at = $1::text::timestamptz WHERE id = $2", self.table.quoted());
        let id = id.parse::<i64>().unwrap_or(-1);
        self.session.execute(&update, &[&moment, &id]).await.map(|_| ()).map_err(self.failed("writing"))
    }

    /// `$1` to `$4` of the statements about letters to discard.
    fn discardable(&self, chosen: &Chosen) -> String {
        let replayed = if chosen.all { "" } else { " AND replayed_at IS NOT NULL" };
        format!(
            "FROM {} WHERE pipeline = $1 AND publisher = $2 AND failed_at <= now() - $3::float8 * interval '1 second' \
             AND id <= $4{replayed}",
            self.table.quoted()
        )
    }

    pub async fn count(&self, whose: &Whose, chosen: &Chosen) -> Result<Discarded, SourceFailure> {
        let query = format!("SELECT count(*), coalesce(max(id), 0) {}", self.discardable(chosen));
        let age = chosen.older_than.as_secs_f64();
        let row = self.session.query_one(&query, &[&whose.pipeline, &whose.publisher, &age, &i64::MAX]).await;
        let row = row.map_err(self.failed("reading"))?;
        Ok(Discarded { letters: row.get::<_, i64>(0).cast_unsigned(), last: row.get::<_, i64>(1).to_string() })
    }

    pub async fn discard(&self, whose: &Whose, chosen: &Chosen, upto: &str) -> Result<u64, SourceFailure> {
        let delete = format!(
            "DELETE FROM {} WHERE id IN (SELECT id {} ORDER BY id LIMIT {AT_ONCE})",
            self.table.quoted(),
            self.discardable(chosen)
        );
        let (age, upto) = (chosen.older_than.as_secs_f64(), upto.parse::<i64>().unwrap_or(0));
        let mut all = 0;
        loop {
            let deleted = self.session.execute(&delete, &[&whose.pipeline, &whose.publisher, &age, &upto]).await;
            let deleted = deleted.map_err(self.failed("deleting from"))?;
            all += deleted;
            if deleted < AT_ONCE {
                return Ok(all);
            }
        }
    }

    pub async fn remove(&self, whose: &Whose, id: &str) -> Result<u64, SourceFailure> {
        let Ok(id) = id.parse::<i64>() else { return Ok(0) };
        let delete = format!("DELETE FROM {} WHERE pipeline = $1 AND publisher = $2 AND id = $3", self.table.quoted());
        let deleted = self.session.execute(&delete, &[&whose.pipeline, &whose.publisher, &id]).await;
        deleted.map_err(self.failed("deleting from"))
    }
}

fn kept(row: &Row) -> Kept {
    let headers: String = row.get(13);
    Kept {
        id: row.get::<_, i64>(0).to_string(),
        failed_at: row.get(1),
        replayed: row.get::<_, Option<&str>>(2).is_some(),
        replayed_at: row.get(2),
        letter: Letter {
            pipeline: row.get(3),
            publisher: row.get(4),
            source_table: row.get(5),
            event_id: row.get(6),
            topic: row.get(7),
            key: row.get(8),
            position: row.get(9),
            reason: row.get(10),
            attempts: row.get::<_, i32>(11).cast_unsigned(),
            value: row.get(12),
            headers: headers_from_json(&serde_json::from_str(&headers).unwrap_or_default()),
        },
    }
}
