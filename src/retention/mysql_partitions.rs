//! Partitions of a MySQL or MariaDB table by time: old days dropped, a week of days kept ahead.
//!
//! A partition cannot be taken out and looked at later, so the table is locked while it is made sure that nothing came into
//! the day since it was looked at, and the day is dropped under the same lock. What is asked under it is little: rows that
//! were not delivered are found by their index, and a log's readers are at its end or nearly so.

use std::time::Duration;

use tokio::time::Instant;

use super::day::Day;
use super::mysql::{Pass, in_the_way, written};
use super::{DAYS_AHEAD, Done, Job, LOCK_TRIES, pause_before_lock};
use crate::source::mysql::privileges;
use crate::source::mysql::server::Server;
use crate::source::mysql::server_error::WireError;
use crate::source::mysql::session::{Session, literal, quote};
use crate::source::mysql::tables::CatalogTable;
use crate::source::{SourceFailure, schema};

/// Days that are cut off from `pmax`; run here, by `init`, or by hand.
const CREATE_DAYS: &str = include_str!("../../sql/mysql/partition.sql");

/// What takes everything that belongs to no day yet.
pub const LAST: &str = "pmax";

/// More rows than this are not moved out of `pmax`: writers would wait for too long.
const MOST_MOVED: u64 = 10_000;

/// How long writers may wait for the log's readers.
const UNDER_LOCK: Duration = Duration::from_secs(2);
/// And how often.
const MOST_HELD: u32 = 2;

/// A table that is partitioned by its timestamp.
pub struct Partitioning {
    parts: Vec<Part>,
    /// It was made by `init --partition-by day`.
    ours: bool,
}

struct Part {
    name: String,
    /// Seconds since 1970 at which it ends; none is never.
    to: Option<i64>,
    /// All that it should hold is old.
    old: bool,
}

impl Partitioning {
    pub fn last_day(&self) -> Option<Day> {
        self.parts.iter().filter_map(|part| part.to).map(|to| Day::of_seconds(to - 1)).max()
    }

    /// The partitions whose rows are deleted one by one.
    pub fn without_bounds(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter(|part| part.to.is_none()).map(|part| part.name.as_str())
    }
}

/// The table's partitions, if they are of its timestamp.
pub async fn find(
    session: &mut Session,
    table: &CatalogTable,
    timestamp: &str,
    cutoff: &str,
) -> Result<Option<Partitioning>, SourceFailure> {
    let asked = format!(
        "SELECT partition_name, partition_method, partition_expression, partition_description
         FROM information_schema.partitions WHERE table_schema = {} AND table_name = {} AND partition_name IS NOT NULL
         ORDER BY partition_ordinal_position",
        literal(&table.schema),
        literal(&table.name)
    );
    let mut parts = Vec::new();
    for row in session.query(&asked).await? {
        let expression = row.string(2).replace('`', "").to_ascii_lowercase();
        let column = timestamp.to_ascii_lowercase();
        let described = row.string(3);
        // How its bound is a moment, in the words of the server.
        let bound = match row.string(1).as_str() {
            "RANGE COLUMNS" if expression == column => described.clone(),
            "RANGE" if expression == format!("to_days({column})") => format!("FROM_DAYS({described})"),
            "RANGE" if expression == format!("unix_timestamp({column})") => format!("FROM_UNIXTIME({described})"),
            _ => return Ok(None),
        };
        let (mut to, mut old) = (None, false);
        if described != "MAXVALUE" {
            let asked = format!(
                "SELECT TIMESTAMPDIFF(SECOND, '1970-01-01', CAST({bound} AS DATETIME)), CAST({bound} AS DATETIME) <= {}",
                literal(cutoff)
            );
            let row = session.query_one(&asked).await?;
            (to, old) = (row.text(0).and_then(|text| text.parse().ok()), row.is_true(1));
        }
        parts.push(Part { name: row.string(0), to, old });
    }
    if parts.is_empty() {
        return Ok(None);
    }
    let ours = parts.iter().any(|part| part.name == LAST && part.to.is_none());
    Ok(Some(Partitioning { parts, ours }))
}

/// The statement that cuts days off from `pmax`. The first of them takes all that is older as well.
pub fn create_days(table: &str, days: &[Day]) -> String {
    let day = |day: &Day| format!("PARTITION p{} VALUES LESS THAN ('{} 00:00:00')", day.compact(), day.plus(1));
    let days = days.iter().map(day).collect::<Vec<_>>().join(",\n    ");
    schema::fill(CREATE_DAYS, |name| match name {
        "table" => Some(table.to_owned()),
        "days" => Some(days.clone()),
        _ => None,
    })
}

/// The days from today on that have no partition yet.
pub fn missing_days(by_time: Option<&Partitioning>, today: Day) -> Vec<Day> {
    let first = by_time.and_then(Partitioning::last_day).map_or(today, |last| last.plus(1).max(today));
    (first.0..=today.plus(DAYS_AHEAD).0).map(Day).collect()
}

#[derive(Default)]
pub struct Ahead {
    pub made: Vec<String>,
    pub until: Option<Day>,
    pub remarks: Vec<String>,
}

/// Makes the days that are missing, in a table that `init` made so.
pub async fn keep_ahead(
    session: &mut Session,
    server: &Server,
    table: &CatalogTable,
    by_time: &Partitioning,
    today: Day,
    job: &Job<'_>,
) -> Result<Ahead, SourceFailure> {
    let (wish, name) = (job.wish, table.quoted());
    let mut ahead = Ahead { until: by_time.last_day(), ..Ahead::default() };
    let missing = missing_days(Some(by_time), today);
    if !by_time.ours || missing.is_empty() {
        return Ok(ahead);
    }
    let statement = create_days(&name, &missing);
    if !wish.make {
        if ahead.until.is_none_or(|until| until < today.plus(2)) {
            ahead.remarks.push(format!("{name} lacks partitions, and they may not be made here: run `outboxd prune`"));
        }
        return Ok(ahead);
    }
    if let Some(why) = cannot_be_told(server, job) {
        ahead.remarks.push(why);
        return Ok(ahead);
    }
    let waiting =
        format!("SELECT COUNT(*) FROM (SELECT 1 FROM {name} PARTITION ({LAST}) LIMIT {MOST_MOVED}) AS counted");
    if session.query_one(&waiting).await?.number(0) >= MOST_MOVED {
        let statement = statement.split_whitespace().collect::<Vec<_>>().join(" ");
        ahead.remarks.push(format!(
            "the partition {LAST} of {name} holds too many rows to be cut up while others write; in a quiet hour: {statement}"
        ));
        return Ok(ahead);
    }
    if !wish.dry_run {
        for tried in 1.. {
            match session.try_query(&statement).await {
                Ok(_) => break,
                Err(error) if in_the_way(&error) && tried < LOCK_TRIES => pause_before_lock(tried).await,
                Err(error) if in_the_way(&error) => {
                    ahead.remarks.push(format!("no partitions of {name} were made yet: the table is busy"));
                    return Ok(ahead);
                }
                // Somebody else may see to it, and has time.
                Err(error) if is_denied(&error) && ahead.until.is_some_and(|until| until >= today.plus(2)) => {
                    return Ok(ahead);
                }
                Err(error) => return Err(rights(session, error)),
            }
        }
    }
    ahead.until = missing.last().copied();
    ahead.made = missing.iter().map(|day| format!("p{}", day.compact())).collect();
    Ok(ahead)
}

/// Why the log's readers would not understand the table any more after its partitions were changed, if they would not.
pub fn cannot_be_told(server: &Server, job: &Job<'_>) -> Option<String> {
    (!job.fence.is_open() && server.row_metadata != "FULL").then(|| {
        "partitions are neither made nor dropped: the log does not name the table's columns, so that older rows in it could \
         not be read after the table was changed; SET GLOBAL binlog_row_metadata = FULL"
            .to_owned()
    })
}

fn is_denied(error: &WireError) -> bool {
    matches!(error.code(), Some(privileges::NO_RIGHT_TO_DATABASE | 1142 | 1143))
}

/// The server's own message names the right that is missing.
fn rights(session: &Session, error: WireError) -> SourceFailure {
    match session.classify(error) {
        SourceFailure::NotReady { what, .. } => SourceFailure::NotReady {
            what,
            remedy: "GRANT ALTER, CREATE, INSERT, DROP on the table and LOCK TABLES on its database: see sql/mysql/grants.sql"
                .to_owned(),
        },
        other => other,
    }
}

enum Outcome {
    Dropped,
    /// Something in it must stay.
    Stays,
    /// Somebody is behind.
    Held(String),
    /// Somebody's lock was in the way.
    Busy,
}

impl Pass<'_> {
    /// Drops the days that may go.
    pub(super) async fn partitions(&mut self, by_time: &Partitioning, done: &mut Done) -> Result<(), SourceFailure> {
        let old: Vec<_> = by_time.parts.iter().filter(|part| part.old).collect();
        if let Some(why) = cannot_be_told(&self.server, self.job).filter(|_| !old.is_empty()) {
            done.held.push(why);
            return Ok(());
        }
        for part in old {
            if self.has_what_stays(part).await? {
                done.held.push(kept(&part.name));
                continue;
            }
            if let Some(why) = self.held_back().await? {
                done.held.push(why);
                return Ok(());
            }
            if self.job.wish.dry_run {
                done.dropped.push(part.name.clone());
                continue;
            }
            match self.retire(part).await? {
                Outcome::Dropped => done.dropped.push(part.name.clone()),
                Outcome::Stays => done.held.push(kept(&part.name)),
                Outcome::Held(why) => done.held.push(why),
                Outcome::Busy => {
                    done.held.push(format!("partition {} could not be dropped yet: the table is busy", part.name));
                }
            }
        }
        Ok(())
    }

    fn of(&self, part: &Part) -> String {
        format!("{} PARTITION ({})", self.table.quoted(), quote(&part.name))
    }

    async fn has_what_stays(&mut self, part: &Part) -> Result<bool, SourceFailure> {
        let stays = match (&self.job.timestamp, self.by_age) {
            // Whatever is in it is old, but for what has no age: that comes into the first.
            (Some(timestamp), true) => format!("{} IS NULL", quote(timestamp)),
            _ => self.stays.clone(),
        };
        let asked = format!("SELECT 1 FROM {} WHERE {stays} LIMIT 1", self.of(part));
        Ok(!self.session.query(&asked).await?.is_empty())
    }

    async fn retire(&mut self, part: &Part) -> Result<Outcome, SourceFailure> {
        let mut held = 0;
        for tried in 1..=LOCK_TRIES {
            match self.try_retire(part).await? {
                Outcome::Busy => {}
                // Writers have waited for nothing: that is not to go on for long.
                Outcome::Held(_) if held < MOST_HELD => held += 1,
                outcome => return Ok(outcome),
            }
            pause_before_lock(tried).await;
        }
        Ok(Outcome::Busy)
    }

    /// Locks the table, makes sure, and drops the partition.
    async fn try_retire(&mut self, part: &Part) -> Result<Outcome, SourceFailure> {
        let table = self.table.quoted();
        match self.session.try_query(&format!("LOCK TABLES {table} WRITE")).await {
            Ok(_) => {}
            Err(error) if in_the_way(&error) => return Ok(Outcome::Busy),
            Err(error) => return Err(rights(&self.session, error)),
        }
        let outcome = self.locked(part).await;
        self.session.execute("UNLOCK TABLES").await?;
        outcome
    }

    async fn locked(&mut self, part: &Part) -> Result<Outcome, SourceFailure> {
        // All that a person or a program has marked since was marked as delivered: of age nothing needs to be asked again.
        let stays = written(&self.job.rule.ageless().negated(), &self.cutoff);
        if !self.by_age {
            let asked = format!("SELECT 1 FROM {} WHERE {stays} LIMIT 1", self.of(part));
            if !self.session.query(&asked).await?.is_empty() {
                return Ok(Outcome::Stays);
            }
        }
        if !self.job.fence.is_open() {
            let (end, deadline) = (self.end_of_log().await?, Instant::now() + UNDER_LOCK);
            let waited = tokio::time::timeout_at(deadline, self.job.fence.wait(&end, UNDER_LOCK)).await;
            if let Some(why) = waited.unwrap_or_else(|_| Ok(Some("a pipeline does not answer in time".to_owned())))? {
                return Ok(Outcome::Held(why));
            }
        }
        let drop = format!("ALTER TABLE {} DROP PARTITION {}", self.table.quoted(), quote(&part.name));
        match self.session.try_query(&drop).await {
            Ok(_) => Ok(Outcome::Dropped),
            Err(error) if in_the_way(&error) => Ok(Outcome::Busy),
            Err(error) => Err(rights(&self.session, error)),
        }
    }
}

fn kept(name: &str) -> String {
    format!("partition {name} holds rows that were not delivered, or not for so long")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_go_on_behind_the_last_one_or_from_today() {
        let today = Day(20_000);
        let ending = |last: Day| Partitioning {
            parts: vec![Part { name: "p".to_owned(), to: Some(last.plus(1).begin()), old: false }],
            ours: true,
        };
        let missing = |by_time: Option<&Partitioning>| {
            let days = missing_days(by_time, today);
            (days.first().map(|day| day.0 - today.0), days.len())
        };
        assert_eq!(missing(None), (Some(0), 8));
        assert_eq!(missing(Some(&ending(today.plus(-10)))), (Some(0), 8));
        assert_eq!(missing(Some(&ending(today.plus(5)))), (Some(6), 2));
        assert_eq!(missing(Some(&ending(today.plus(7)))), (None, 0));
    }

    #[test]
    fn a_day_ends_where_the_next_begins() {
        let sql = create_days("`outbox`", &[Day::of_seconds(1_738_281_600)]);
        assert!(sql.contains("PARTITION p20250131 VALUES LESS THAN ('2025-02-01 00:00:00')"), "{sql}");
        assert!(sql.contains("PARTITION pmax VALUES LESS THAN (MAXVALUE)"), "{sql}");
    }
}
