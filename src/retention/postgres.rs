//! Retention in PostgreSQL.
//!
//! The candidates of a pass are found by one query, whatever its plan, and kept by the server in a cursor that outlives
//! its transaction: nothing is read twice, no snapshot is held while they are deleted, and one fence serves them all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::SimpleQueryMessage;
use tokio_postgres::error::SqlState;

use super::day::Day;
use super::postgres_partitions::{self, Partitioning};
use super::rule::{Condition, Failures};
use super::{Done, Job, no_column, no_moment, rest};
use crate::config::{PostgresSettings, TableName};
use crate::position::{Lsn, Position};
use crate::source::SourceFailure;
use crate::source::poll::progress;
use crate::source::postgres::server_error::classify_sql;
use crate::source::postgres::sql::{self, SqlSession};
use crate::source::postgres::tables::{CatalogTable, Tables, literal, quote};
use crate::source::postgres::{self, judge};

/// How often a batch is tried that others' locks keep from being deleted.
const BATCH_TRIES: u32 = 5;
/// Old rows that stay are counted up to here.
const MOST_COUNTED: u64 = 1_000_000;

/// One pass over one table.
pub(super) struct Pass<'a> {
    pub job: &'a Job<'a>,
    pub session: Arc<SqlSession>,
    pub table: CatalogTable,
    /// The moment before which things are old, as the server writes it.
    pub cutoff: String,
    /// What may go, and what must stay, as SQL says it of `t`.
    pub goes: String,
    pub stays: String,
    /// By its age alone.
    pub by_age: bool,
}

pub(super) async fn pass(job: &Job<'_>, source: &PostgresSettings) -> Result<Done, SourceFailure> {
    let session = Arc::new(sql::connect(&postgres::conninfo(source)?).await?);
    let failed = |error: tokio_postgres::Error| session.classify(&error);
    session.batch_execute("SET lock_timeout = '2s'").await.map_err(failed)?;
    let table = find(&session, job.table).await?;
    let mut done = job.done();
    let age = job.wish.age.unwrap_or_default().as_millis();
    let asked = format!(
        "SELECT extract(epoch FROM now())::bigint, (now() - {age} * interval '1 millisecond')::timestamptz::text"
    );
    let row = session.query_one(&asked, &[]).await.map_err(failed)?;
    let (today, cutoff) = (Day::of_seconds(row.get(0)), row.get::<_, String>(1));
    let by_time = match &job.timestamp {
        Some(timestamp) => postgres_partitions::find(&session, &table, timestamp, &cutoff).await?,
        None => None,
    };
    if let Some(by_time) = &by_time {
        keep_ahead(&session, job, &table, by_time, today, &mut done).await;
    }
    if job.wish.age.is_none() {
        return Ok(done);
    }
    let Some(limit) = position_limit(job, &session, &mut done).await? else { return Ok(done) };
    let stays_limit = if limit.is_empty() { String::new() } else { format!(" OR NOT ({limit})") };
    let goes_limit = if limit.is_empty() { String::new() } else { format!(" AND {limit}") };
    check_columns(&session, &table, &job.rule).await?;
    let pass = Pass {
        job,
        goes: format!("({}){goes_limit}", written(&job.rule, &cutoff)),
        stays: format!("({}){stays_limit}", written(&job.rule.negated(), &cutoff)),
        by_age: limit.is_empty() && job.is_by_age(),
        cutoff,
        session,
        table,
    };
    if !job.wish.dry_run {
        pass.check_rights().await?;
    }
    match &by_time {
        None => pass.rows(&pass.table.quoted(), pass.table.partitioned, &mut done).await?,
        Some(by_time) => {
            pass.partitions(by_time, &mut done).await?;
            for rest in by_time.without_bounds() {
                pass.rows(rest, false, &mut done).await?;
            }
        }
    }
    if job.wish.count_kept && !pass.by_age {
        done.kept = pass.kept().await?;
    }
    Ok(done)
}

async fn find(session: &Arc<SqlSession>, name: &TableName) -> Result<CatalogTable, SourceFailure> {
    let (tables, missing) = Tables::find(session, std::slice::from_ref(name)).await?;
    judge::refuse(judge::tables(&missing, &tables, &Default::default()))?;
    let table = tables.catalog.into_iter().next();
    table.ok_or_else(|| SourceFailure::transient(format!("{name} is gone")))
}

/// The statement that would let rows be deleted, if they cannot be.
pub(super) async fn lacking(source: &PostgresSettings, name: &TableName) -> Result<Option<String>, SourceFailure> {
    let session = Arc::new(sql::connect(&postgres::conninfo(source)?).await?);
    let table = find(&session, name).await?;
    lacking_on(&session, table.oid, &table.quoted()).await
}

async fn lacking_on(session: &SqlSession, oid: u32, name: &str) -> Result<Option<String>, SourceFailure> {
    let asked = "SELECT has_table_privilege($1::oid, 'SELECT') AND has_table_privilege($1::oid, 'DELETE'),
                        current_user::text";
    let row = session.query_one(asked, &[&oid]).await.map_err(|error| session.classify(&error))?;
    let role: String = row.get(1);
    Ok((!row.get::<_, bool>(0)).then(|| format!("GRANT SELECT, DELETE ON {name} TO {}", quote(&role))))
}

async fn keep_ahead(
    session: &Arc<SqlSession>,
    job: &Job<'_>,
    table: &CatalogTable,
    by_time: &Partitioning,
    today: Day,
    done: &mut Done,
) {
    match postgres_partitions::keep_ahead(session, table, by_time, today, job.wish).await {
        Ok(ahead) => {
            done.made = ahead.made;
            done.ahead_until = ahead.until.map(|day| day.to_string());
            done.held.extend(ahead.remarks);
        }
        Err(failure) => {
            done.ahead_until = by_time.last_day().map(|day| day.to_string());
            done.trouble = Some(failure);
        }
    }
}

/// How far every publisher of an event store has come, as a condition; empty where the table is none, `None` when nothing
/// was delivered yet.
async fn position_limit(job: &Job<'_>, session: &SqlSession, done: &mut Done) -> Result<Option<String>, SourceFailure> {
    let Some(strangers) = &job.strangers else { return Ok(Some(String::new())) };
    let (least, who) = progress::least(session, &progress::pairs(job.of), strangers).await?;
    if least.transaction == 0 {
        let who = format!("publisher {who} has not delivered any event of {} yet", job.table);
        done.held.push(format!("{who} (--name and --topic, or --config, are to be as `run` has them)"));
        return Ok(None);
    }
    let position = quote(&job.id);
    Ok(Some(format!("(t.transaction_id, t.{position}) <= ('{}'::xid8, {}::bigint)", least.transaction, least.position)))
}

async fn check_columns(session: &SqlSession, table: &CatalogTable, rule: &Condition) -> Result<(), SourceFailure> {
    let columns = rule.columns();
    if let Some((column, _)) = columns.iter().find(|(column, _)| !table.has(column)) {
        return Err(no_column(&table.quoted(), column));
    }
    let moments: Vec<_> = columns.iter().filter(|(_, moment)| *moment).map(|(column, _)| *column).collect();
    let asked = "SELECT a.attname::text FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
                 WHERE a.attrelid = $1 AND a.attname = ANY ($2::text[]) AND t.typcategory <> 'D' LIMIT 1";
    let odd = session.query_opt(asked, &[&table.oid, &moments]).await.map_err(|error| session.classify(&error))?;
    match odd {
        Some(row) => Err(no_moment(&table.quoted(), row.get(0))),
        None => Ok(()),
    }
}

/// A condition of a row `t`.
fn written(condition: &Condition, cutoff: &str) -> String {
    let column = |name: &str| format!("t.{}", quote(name));
    let cutoff_literal = || format!("{}::timestamptz", literal(cutoff));
    let joined = |parts: &[Condition], word: &str, empty: &str| match parts {
        [] => empty.to_owned(),
        parts => parts.iter().map(|part| format!("({})", written(part, cutoff))).collect::<Vec<_>>().join(word),
    };
    let failures = |Failures { count, own, most }: &Failures, sign: &str| {
        let most = own.as_deref().map_or(most.to_string(), |own| format!("coalesce({}, {most})", column(own)));
        format!("coalesce({}, 0) {sign} {most}", column(count))
    };
    match condition {
        Condition::Is(name, text) => format!("{} = {}", column(name), literal(text)),
        Condition::IsNot(name, text) => format!("{} IS DISTINCT FROM {}", column(name), literal(text)),
        Condition::Number(name, number) => format!("{} = {number}", column(name)),
        Condition::NotNumber(name, number) => format!("{} IS DISTINCT FROM {number}", column(name)),
        Condition::Null(name) => format!("{} IS NULL", column(name)),
        Condition::NotNull(name) => format!("{} IS NOT NULL", column(name)),
        Condition::Before(name) => format!("{} < {}", column(name), cutoff_literal()),
        Condition::NotBefore(name) => format!("{0} IS NULL OR {0} >= {1}", column(name), cutoff_literal()),
        Condition::Exhausted(of) => failures(of, ">="),
        Condition::NotExhausted(of) => failures(of, "<"),
        Condition::All(parts) => joined(parts, " AND ", "TRUE"),
        Condition::Any(parts) => joined(parts, " OR ", "FALSE"),
    }
}

impl Pass<'_> {
    pub(super) fn failed(&self, doing: &str) -> impl Fn(tokio_postgres::Error) -> SourceFailure + use<> {
        let on = format!("{}: {doing}", self.session.description());
        move |error| classify_sql(&error, &on)
    }

    async fn check_rights(&self) -> Result<(), SourceFailure> {
        match lacking_on(&self.session, self.table.oid, &self.table.quoted()).await? {
            None => Ok(()),
            Some(grant) => Err(SourceFailure::NotReady {
                what: format!("{}: rows of {} may not be deleted", self.session.description(), self.table.quoted()),
                remedy: grant,
            }),
        }
    }

    /// The end of the log, beyond all that is committed now. A commit of its own makes sure that the log gets past it,
    /// however idle the database is, and that what others have committed without waiting for the disk is there as well.
    pub(super) async fn end_of_log(&self) -> Result<Position, SourceFailure> {
        let failed = self.failed("asking for the end of the log");
        let asked = "SELECT pg_catalog.pg_logical_emit_message(true, 'outboxd retention', '')::text";
        let row = self.session.query_one(asked, &[]).await.map_err(failed)?;
        let end: Lsn = row.get::<_, String>(0).parse().unwrap_or(Lsn(u64::MAX));
        Ok(Position::Postgres(end))
    }

    /// Whether what can be seen now was delivered; if not, who is behind.
    pub(super) async fn held_back(&self) -> Result<Option<String>, SourceFailure> {
        if self.job.fence.is_open() {
            return Ok(None);
        }
        let end = self.end_of_log().await?;
        self.job.fence.wait(&end, self.job.wish.patience).await
    }

    /// The same, by what is stored: a relay that begins again must not meet rows of a table that is gone.
    pub(super) async fn held_back_stored(&self) -> Result<Option<String>, SourceFailure> {
        if self.job.fence.is_open() {
            return Ok(None);
        }
        let end = self.end_of_log().await?;
        self.job.fence.wait_stored(&end, self.job.wish.patience).await
    }

    /// Deletes the rows of a relation that may go.
    async fn rows(&self, relation: &str, with_partitions: bool, done: &mut Done) -> Result<(), SourceFailure> {
        let only = if with_partitions { "" } else { "ONLY " };
        let from = format!("{only}{relation} t WHERE {}", self.goes);
        let failed = self.failed(&format!("looking for old rows of {relation}"));
        let id = format!("t.{}", quote(&self.job.id));
        let find =
            format!("BEGIN; DECLARE outboxd_old NO SCROLL CURSOR WITH HOLD FOR SELECT {id}::text FROM {from}; COMMIT");
        self.session.batch_execute(&find).await.map_err(&failed)?;
        // A fence is worth its wait, and its write, only for something.
        let fetch = format!("FETCH {} FROM outboxd_old", self.job.wish.batch);
        let mut ids = self.fetch(&fetch).await?;
        if !ids.is_empty()
            && let Some(why) = self.held_back().await?
        {
            done.held.push(why);
            ids.clear();
        }
        if self.job.wish.dry_run {
            while !ids.is_empty() {
                done.rows += ids.len() as u64;
                ids = self.fetch(&fetch).await?;
            }
        }
        let delete = self.delete_statement(only, relation).await?;
        while !ids.is_empty() {
            let begin = Instant::now();
            let deleted = self.delete(&delete, relation, &ids).await?;
            done.rows += deleted;
            (self.job.ears.deleted)(deleted);
            rest(begin.elapsed()).await;
            ids = self.fetch(&fetch).await?;
        }
        self.session.batch_execute("CLOSE outboxd_old").await.map_err(&failed)
    }

    async fn fetch(&self, fetch: &str) -> Result<Vec<String>, SourceFailure> {
        let messages = self.session.simple_query(fetch).await.map_err(self.failed("looking for old rows"))?;
        let id = |message: &SimpleQueryMessage| match message {
            SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        };
        Ok(messages.iter().filter_map(id).collect())
    }

    async fn delete_statement(&self, only: &str, relation: &str) -> Result<String, SourceFailure> {
        let asked = "SELECT format_type(atttypid, atttypmod) FROM pg_catalog.pg_attribute
                     WHERE attrelid = $1 AND attname = $2 AND NOT attisdropped";
        let failed = self.failed("looking at the table's id");
        let kind = self.session.query_opt(asked, &[&self.table.oid, &self.job.id]).await.map_err(failed)?;
        let Some(kind) = kind.map(|row| row.get::<_, String>(0)) else {
            return Err(no_column(&self.table.quoted(), &self.job.id));
        };
        let (id, goes) = (quote(&self.job.id), &self.goes);
        // What has changed since it was found is looked at once more.
        Ok(format!("DELETE FROM {only}{relation} t WHERE t.{id} = ANY ($1::text[]::{kind}[]) AND {goes}"))
    }

    async fn delete(&self, statement: &str, relation: &str, ids: &[String]) -> Result<u64, SourceFailure> {
        for tried in 1.. {
            match self.session.execute(statement, &[&ids]).await {
                Ok(deleted) => return Ok(deleted),
                Err(error) if tried < BATCH_TRIES && in_the_way(&error) => {
                    tokio::time::sleep(Duration::from_millis(200) * tried).await;
                }
                Err(error) => return Err(self.failed(&format!("deleting old rows of {relation}"))(error)),
            }
        }
        Ok(0)
    }

    /// Old rows that were not delivered, or not for so long.
    async fn kept(&self) -> Result<u64, SourceFailure> {
        let Some(timestamp) = self.job.timestamp.as_ref().filter(|name| self.table.has(name)) else { return Ok(0) };
        let old = format!("t.{} < {}::timestamptz", quote(timestamp), literal(&self.cutoff));
        let (from, stays) = (self.table.quoted(), &self.stays);
        let counted = format!(
            "SELECT count(*) FROM (SELECT 1 FROM {from} t WHERE {old} AND ({stays}) LIMIT {MOST_COUNTED}) AS counted"
        );
        let row = self.session.query_one(&counted, &[]).await.map_err(self.failed("counting the rows that stay"))?;
        Ok(row.get::<_, i64>(0).cast_unsigned())
    }
}

/// Whether only somebody else's lock was in the way.
pub(super) fn in_the_way(error: &tokio_postgres::Error) -> bool {
    let codes = [SqlState::T_R_DEADLOCK_DETECTED, SqlState::LOCK_NOT_AVAILABLE, SqlState::T_R_SERIALIZATION_FAILURE];
    error.code().is_some_and(|code| codes.contains(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_and_its_opposite_leave_no_row_undecided() {
        let done = Condition::All(vec![
            Condition::Is("status".to_owned(), "published"),
            Condition::Before("published_at".to_owned()),
        ]);
        assert_eq!(
            written(&done, "2025-01-31 00:00:00+00"),
            "(t.\"status\" = 'published') AND (t.\"published_at\" < '2025-01-31 00:00:00+00'::timestamptz)"
        );
        assert_eq!(
            written(&done.negated(), "c"),
            "(t.\"status\" IS DISTINCT FROM 'published') OR (t.\"published_at\" IS NULL OR t.\"published_at\" >= 'c'::timestamptz)"
        );
        assert_eq!(written(&Condition::All(Vec::new()), "c"), "TRUE");
    }
}
