//! Retention in MySQL and MariaDB.
//!
//! Rows lie in the order of their primary key, so a pass goes through the table once in that order: some thousands of
//! candidates, a fence, batches of deletes, and on behind the last of them.

use std::time::{Duration, Instant};

use super::day::Day;
use super::mysql_partitions::{self, Partitioning};
use super::rule::{Condition, Failures};
use super::{Done, Job, LATER_PATIENCE, no_column, no_moment, rest};
use crate::config::{MySqlSettings, TableName};
use crate::position::Position;
use crate::source::SourceFailure;
use crate::source::mysql::privileges::{self, Right};
use crate::source::mysql::server::Server;
use crate::source::mysql::server_error::WireError;
use crate::source::mysql::session::{Session, literal, quote};
use crate::source::mysql::tables::{self, CatalogTable};
use crate::source::mysql::{self, checkpoint, judge, refuse};
use crate::source::poll::value_of;

/// Batches that one fence is for.
const BATCHES_AT_ONCE: usize = 20;
/// How often a batch is tried that others' locks keep from being deleted.
const BATCH_TRIES: u32 = 5;
/// Old rows that stay are counted up to here.
const MOST_COUNTED: u64 = 1_000_000;

/// MySQL shows a row a moment before its transaction is in `gtid_executed`: the commits of a group are made visible one
/// after the other, and then counted together.
const GROUP_COMMIT: Duration = Duration::from_secs(1);

/// One pass over one table.
pub(super) struct Pass<'a> {
    pub job: &'a Job<'a>,
    pub session: Session,
    pub server: Server,
    pub table: CatalogTable,
    pub cutoff: String,
    /// What may go, and what must stay, as SQL says it.
    pub goes: String,
    pub stays: String,
    /// By its age alone.
    pub by_age: bool,
    /// How long a pipeline that is behind is waited for.
    patience: Duration,
}

pub(super) async fn pass(job: &Job<'_>, source: &MySqlSettings) -> Result<Done, SourceFailure> {
    let (mut session, table) = open(source, job.table).await?;
    let mut done = job.done();
    let age = job.wish.age.unwrap_or_default().as_millis();
    let asked = format!("SELECT UNIX_TIMESTAMP(), utc_timestamp(6) - INTERVAL {age} * 1000 MICROSECOND");
    let row = session.query_one(&asked).await?;
    let seconds: i64 = row.string(0).split('.').next().and_then(|text| text.parse().ok()).unwrap_or(0);
    let (today, cutoff) = (Day::of_seconds(seconds), row.string(1));
    let server = Server::ask(&mut session).await?;
    let by_time = match &job.timestamp {
        Some(timestamp) => mysql_partitions::find(&mut session, &table, timestamp, &cutoff).await?,
        None => None,
    };
    if let Some(by_time) = &by_time {
        keep_ahead(&mut session, &server, job, &table, by_time, today, &mut done).await;
    }
    if job.wish.age.is_none() {
        session.close().await;
        return Ok(done);
    }
    check_columns(&table, &job.rule)?;
    let mut pass = Pass {
        job,
        goes: written(&job.rule, &cutoff),
        stays: written(&job.rule.negated(), &cutoff),
        by_age: job.is_by_age(),
        patience: job.wish.patience,
        session,
        server,
        table,
        cutoff,
    };
    if !job.wish.dry_run {
        pass.check_rights().await?;
    }
    match &by_time {
        None => pass.rows("", &mut done).await?,
        Some(by_time) => {
            pass.partitions(by_time, &mut done).await?;
            for rest in by_time.without_bounds() {
                pass.rows(&format!(" PARTITION ({})", quote(rest)), &mut done).await?;
            }
        }
    }
    if job.wish.count_kept && !pass.by_age {
        done.kept = pass.kept().await?;
    }
    pass.session.close().await;
    Ok(done)
}

async fn open(source: &MySqlSettings, name: &TableName) -> Result<(Session, CatalogTable), SourceFailure> {
    let info = mysql::conninfo(source)?;
    let database = checkpoint::database(&info)?.to_owned();
    let mut session = mysql::connect(source, &info).await?;
    let quiet = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
    session.execute(quiet).await?;
    // Of rows, and of the table as a whole: the latter in whole seconds.
    session.execute("SET SESSION innodb_lock_wait_timeout = 2, SESSION lock_wait_timeout = 1").await?;
    let (mut catalog, missing) = tables::find(&mut session, &database, std::slice::from_ref(name)).await?;
    refuse(judge::missing_tables(&missing, &database))?;
    match catalog.pop() {
        Some(table) => Ok((session, table)),
        None => Err(SourceFailure::transient(format!("{name} is gone"))),
    }
}

/// The statement that would let rows be deleted, if they cannot be.
pub(super) async fn lacking(source: &MySqlSettings, name: &TableName) -> Result<Option<String>, SourceFailure> {
    let (mut session, table) = open(source, name).await?;
    let grant = lacking_on(&mut session, &table).await?;
    session.close().await;
    Ok(grant)
}

async fn lacking_on(session: &mut Session, table: &CatalogTable) -> Result<Option<String>, SourceFailure> {
    let name = table.quoted();
    let lacking = privileges::lacking(session, &name, &[Right::Select, Right::Delete]).await?;
    if lacking.is_empty() {
        return Ok(None);
    }
    let account = privileges::account(session).await?;
    Ok(Some(format!("GRANT {} ON {name} TO {account}", privileges::list(&lacking))))
}

async fn keep_ahead(
    session: &mut Session,
    server: &Server,
    job: &Job<'_>,
    table: &CatalogTable,
    by_time: &Partitioning,
    today: Day,
    done: &mut Done,
) {
    match mysql_partitions::keep_ahead(session, server, table, by_time, today, job).await {
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

fn check_columns(table: &CatalogTable, rule: &Condition) -> Result<(), SourceFailure> {
    for (name, moment) in rule.columns() {
        let Some(column) = table.column(name) else { return Err(no_column(&table.quoted(), name)) };
        let kind = column.data_type.to_ascii_lowercase();
        if moment && !["datetime", "timestamp", "date"].contains(&kind.as_str()) {
            return Err(no_moment(&table.quoted(), name));
        }
    }
    Ok(())
}

pub(super) fn written(condition: &Condition, cutoff: &str) -> String {
    let joined = |parts: &[Condition], word: &str, empty: &str| match parts {
        [] => empty.to_owned(),
        parts => parts.iter().map(|part| format!("({})", written(part, cutoff))).collect::<Vec<_>>().join(word),
    };
    let failures = |Failures { count, own, most }: &Failures, sign: &str| {
        let most = own.as_deref().map_or(most.to_string(), |own| format!("coalesce({}, {most})", quote(own)));
        format!("coalesce({}, 0) {sign} {most}", quote(count))
    };
    // In a form of which the server can make a range.
    let differs = |column: &str, value: &str| format!("{0} <> {value} OR {0} IS NULL", quote(column));
    match condition {
        Condition::Is(name, text) => format!("{} = {}", quote(name), literal(text)),
        Condition::IsNot(name, text) => differs(name, &literal(text)),
        Condition::Number(name, number) => format!("{} = {number}", quote(name)),
        Condition::NotNumber(name, number) => differs(name, &number.to_string()),
        Condition::Null(name) => format!("{} IS NULL", quote(name)),
        Condition::NotNull(name) => format!("{} IS NOT NULL", quote(name)),
        Condition::Before(name) => format!("{} < {}", quote(name), literal(cutoff)),
        Condition::NotBefore(name) => format!("{0} IS NULL OR {0} >= {1}", quote(name), literal(cutoff)),
        Condition::Exhausted(of) => failures(of, ">="),
        Condition::NotExhausted(of) => failures(of, "<"),
        Condition::All(parts) => joined(parts, " AND ", "TRUE"),
        Condition::Any(parts) => joined(parts, " OR ", "FALSE"),
    }
}

impl Pass<'_> {
    async fn check_rights(&mut self) -> Result<(), SourceFailure> {
        match lacking_on(&mut self.session, &self.table).await? {
            None => Ok(()),
            Some(grant) => Err(SourceFailure::NotReady {
                what: format!("{}: rows of {} may not be deleted", self.session.describe(), self.table.quoted()),
                remedy: grant,
            }),
        }
    }

    pub(super) async fn end_of_log(&mut self) -> Result<Position, SourceFailure> {
        Ok(Position::Binlog(Box::new(self.server.end(&mut self.session).await?)))
    }

    /// Whether what could be seen a moment ago was delivered; if not, who is behind.
    pub(super) async fn held_back(&mut self) -> Result<Option<String>, SourceFailure> {
        if self.job.fence.is_open() {
            return Ok(None);
        }
        tokio::time::sleep(GROUP_COMMIT).await;
        let end = self.end_of_log().await?;
        let held = self.job.fence.wait(&end, self.patience).await?;
        self.patience = self.patience.min(LATER_PATIENCE);
        Ok(held)
    }

    /// Deletes the rows of the table, or of one of its partitions, that may go.
    async fn rows(&mut self, partition: &str, done: &mut Done) -> Result<(), SourceFailure> {
        let (table, goes) = (self.table.quoted(), self.goes.clone());
        if self.job.wish.dry_run {
            let counted = format!("SELECT COUNT(*) FROM {table}{partition} WHERE {goes}");
            let rows = self.session.query_one(&counted).await?.number(0);
            if rows > 0 {
                match self.held_back().await? {
                    Some(why) => done.held.push(why),
                    None => done.rows += rows,
                }
            }
            return Ok(());
        }
        let id = quote(&self.job.id);
        let at_once = self.job.wish.batch.saturating_mul(BATCHES_AT_ONCE);
        let mut after = String::new();
        loop {
            let find =
                format!("SELECT {id} FROM {table}{partition} WHERE ({goes}){after} ORDER BY {id} LIMIT {at_once}");
            let rows = self.session.query(&find).await?;
            let ids = rows.iter().filter_map(|row| row.bytes(0));
            let ids: Vec<_> = ids.map(|bytes| value_of(&self.table, &self.job.id, bytes)).collect();
            let Some(last) = ids.last() else { return Ok(()) };
            after = format!(" AND {id} > {last}");
            if let Some(why) = self.held_back().await? {
                done.held.push(why);
                return Ok(());
            }
            for batch in ids.chunks(self.job.wish.batch) {
                let begin = Instant::now();
                // What has changed since it was found is looked at once more.
                let delete =
                    format!("DELETE FROM {table}{partition} WHERE {id} IN ({}) AND ({goes})", batch.join(", "));
                self.delete(&delete).await?;
                let deleted = self.session.query_one("SELECT ROW_COUNT()").await?.number(0);
                done.rows += deleted;
                (self.job.ears.deleted)(deleted);
                rest(begin.elapsed()).await;
            }
        }
    }

    async fn delete(&mut self, statement: &str) -> Result<(), SourceFailure> {
        for tried in 1.. {
            match self.session.try_query(statement).await {
                Ok(_) => break,
                Err(error) if tried < BATCH_TRIES && in_the_way(&error) => {
                    tokio::time::sleep(Duration::from_millis(200) * tried).await;
                }
                Err(error) => return Err(self.session.classify(error)),
            }
        }
        Ok(())
    }

    /// Old rows that were not delivered, or not for so long.
    async fn kept(&mut self) -> Result<u64, SourceFailure> {
        let Some(timestamp) = self.job.timestamp.as_ref().filter(|name| self.table.has(name)) else { return Ok(0) };
        let (old, table, stays) = (quote(timestamp), self.table.quoted(), &self.stays);
        let old = format!("{old} < {}", literal(&self.cutoff));
        let some = format!("SELECT 1 FROM {table} WHERE {old} AND ({stays}) LIMIT {MOST_COUNTED}");
        Ok(self.session.query_one(&format!("SELECT COUNT(*) FROM ({some}) AS counted")).await?.number(0))
    }
}

/// Whether only somebody else's lock was in the way.
pub(super) fn in_the_way(error: &WireError) -> bool {
    const LOCK_WAIT: u16 = 1205;
    const DEADLOCK: u16 = 1213;
    const CHANGED_SINCE: u16 = 1020;
    matches!(error.code(), Some(LOCK_WAIT | DEADLOCK | CHANGED_SINCE))
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
            written(&done, "2025-01-31 00:00:00"),
            "(`status` = 'published') AND (`published_at` < '2025-01-31 00:00:00')"
        );
        assert_eq!(
            written(&done.negated(), "c"),
            "(`status` <> 'published' OR `status` IS NULL) OR (`published_at` IS NULL OR `published_at` >= 'c')"
        );
    }
}
