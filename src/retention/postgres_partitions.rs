//! Partitions of a PostgreSQL table by time: old days dropped, a week of days kept ahead.
//!
//! To drop a day, its table is first detached: that takes the lock on the whole table for a moment only, and from then on
//! nothing can be added to it. So it can be looked at in peace whether all that is in it may go; if not, it is attached
//! again. What a crash leaves detached bears a mark, and the next pass goes on with it.
//!
//! ```text
//!   old, and nothing in it that must stay ──▶ detached, marked ──▶ delivered up to here ──▶ dropped
//!                                                     └────────── not quite ──▶ attached again
//! ```

use tokio_postgres::error::SqlState;

use super::day::{Day, SECONDS};
use super::postgres::{Pass, in_the_way};
use super::{DAYS_AHEAD, Done, LOCK_PATIENCE, LOCK_TRIES, Wish, pause_before_lock};
use crate::source::postgres::server_error::classify_sql;
use crate::source::postgres::sql::SqlSession;
use crate::source::postgres::tables::{CatalogTable, literal, quote};
use crate::source::{SourceFailure, schema};

/// One day's table; run here, by `init`, or by hand.
const CREATE_DAY: &str = include_str!("../../sql/postgres/partition.sql");
const CREATE_DEFAULT: &str = include_str!("../../sql/postgres/partition-default.sql");

/// PostgreSQL cuts names off at 63 bytes.
const LONGEST_NAME: usize = 63;

/// What a table bears that was detached and is not yet dropped.
const MARK: &str = "outboxd retention: detached from ";

/// A table that is partitioned by its timestamp.
pub struct Partitioning {
    parts: Vec<Part>,
    /// It was made by `init --partition-by day`.
    ours: bool,
}

struct Part {
    quoted: String,
    name: String,
    is_default: bool,
    /// Seconds since 1970, where it has bounds.
    bounds: Option<(i64, i64)>,
    /// All that it can hold is old.
    old: bool,
    /// `FOR VALUES FROM … TO …`.
    values: String,
}

impl Part {
    fn day(&self) -> Option<Day> {
        let (from, to) = self.bounds?;
        (from % SECONDS == 0 && to - from == SECONDS).then(|| Day::of_seconds(from))
    }
}

impl Partitioning {
    /// The last day that has a partition of its own, or within a longer one.
    pub fn last_day(&self) -> Option<Day> {
        self.parts.iter().filter_map(|part| part.bounds).map(|(_, to)| Day::of_seconds(to - 1)).max()
    }

    /// The partitions whose rows are deleted one by one.
    pub fn without_bounds(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter(|part| part.bounds.is_none()).map(|part| part.quoted.as_str())
    }
}

/// The table's partitions, if they are of its timestamp.
pub async fn find(
    session: &SqlSession,
    table: &CatalogTable,
    timestamp: &str,
    cutoff: &str,
) -> Result<Option<Partitioning>, SourceFailure> {
    let failed = |error: tokio_postgres::Error| classify_sql(&error, "looking at the table's partitions");
    let by = "SELECT p.partstrat = 'r' AND p.partnatts = 1 AND a.attname = $2
              FROM pg_catalog.pg_partitioned_table p
              JOIN pg_catalog.pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
              WHERE p.partrelid = $1";
    let by_time = session.query_opt(by, &[&table.oid, &timestamp]).await.map_err(failed)?;
    if !by_time.is_some_and(|row| row.get(0)) {
        return Ok(None);
    }
    let list = "SELECT n.nspname::text, c.relname::text, b.bound, (b.ends)[1] IS NOT NULL,
                       extract(epoch FROM (b.ends)[1]::timestamptz)::bigint,
                       extract(epoch FROM (b.ends)[2]::timestamptz)::bigint,
                       coalesce((b.ends)[2]::timestamptz <= $2::text::timestamptz, false)
                FROM pg_catalog.pg_inherits i
                JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
                JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                CROSS JOIN LATERAL (
                    SELECT bound, regexp_match(bound, '^FOR VALUES FROM \\(''([^'']+)''\\) TO \\(''([^'']+)''\\)$') AS ends
                    FROM pg_catalog.pg_get_expr(c.relpartbound, c.oid) AS bound
                ) b
                WHERE i.inhparent = $1 AND NOT i.inhdetachpending ORDER BY 5 NULLS LAST";
    let rows = session.query(list, &[&table.oid, &cutoff]).await.map_err(failed)?;
    let part = |row: &tokio_postgres::Row| {
        let (schema, name): (String, String) = (row.get(0), row.get(1));
        let bounded: bool = row.get(3);
        Part {
            quoted: format!("{}.{}", quote(&schema), quote(&name)),
            is_default: row.get::<_, &str>(2) == "DEFAULT",
            bounds: bounded.then(|| (row.get(4), row.get(5))),
            old: row.get(6),
            values: row.get(2),
            name,
        }
    };
    let parts: Vec<_> = rows.iter().map(part).collect();
    let ours = parts.iter().any(|part| match part.day() {
        Some(day) => part.name == name_of(&table.name, day),
        None => part.is_default && part.name == default_of(&table.name),
    });
    Ok(Some(Partitioning { parts, ours }))
}

fn cut(table: &str, suffix: &str) -> String {
    let mut end = table.len().min(LONGEST_NAME - suffix.len());
    while !table.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{suffix}", &table[..end])
}

fn name_of(table: &str, day: Day) -> String {
    cut(table, &format!("_p{}", day.compact()))
}

fn default_of(table: &str) -> String {
    cut(table, "_default")
}

/// A name in the schema of the table.
fn beside(schema: Option<&str>, name: &str) -> String {
    schema.map_or_else(|| quote(name), |schema| format!("{}.{}", quote(schema), quote(name)))
}

/// The statements that make a day's partition.
pub fn create_day(schema: Option<&str>, table: &str, day: Day) -> String {
    schema::fill(CREATE_DAY, |name| match name {
        "table" => Some(beside(schema, table)),
        "partition" => Some(beside(schema, &name_of(table, day))),
        "from" => Some(format!("'{day} 00:00:00+00'")),
        "to" => Some(format!("'{} 00:00:00+00'", day.plus(1))),
        _ => None,
    })
}

/// The statement that makes the partition for everything else.
pub fn create_default(schema: Option<&str>, table: &str) -> String {
    schema::fill(CREATE_DEFAULT, |name| match name {
        "table" => Some(beside(schema, table)),
        "partition" => Some(beside(schema, &default_of(table))),
        _ => None,
    })
}

/// What came of keeping days ahead.
#[derive(Default)]
pub struct Ahead {
    pub made: Vec<String>,
    pub until: Option<Day>,
    pub remarks: Vec<String>,
}

/// The days from today on that have no partition yet.
pub fn missing_days(by_time: &Partitioning, today: Day) -> Vec<Day> {
    let covered = |day: Day| {
        let of_day =
            |part: &Part| part.bounds.is_some_and(|(from, to)| from <= day.begin() && day.plus(1).begin() <= to);
        by_time.parts.iter().any(of_day)
    };
    (0..=DAYS_AHEAD).map(|ahead| today.plus(ahead)).filter(|day| !covered(*day)).collect()
}

/// Makes the days that are missing, in a table that `init` made so.
pub async fn keep_ahead(
    session: &SqlSession,
    table: &CatalogTable,
    by_time: &Partitioning,
    today: Day,
    wish: &Wish,
) -> Result<Ahead, SourceFailure> {
    let mut ahead = Ahead { until: by_time.last_day(), ..Ahead::default() };
    let missing = missing_days(by_time, today);
    if !by_time.ours || missing.is_empty() {
        return Ok(ahead);
    }
    let asked =
        "SELECT pg_has_role(relowner, 'USAGE'), relowner::regrole::text FROM pg_catalog.pg_class WHERE oid = $1";
    let row = session.query_one(asked, &[&table.oid]).await.map_err(|error| session.classify(&error))?;
    let (is_owner, owner): (bool, String) = (row.get(0), row.get(1));
    if !wish.make || !is_owner {
        if ahead.until.is_none_or(|until| until < today.plus(2)) {
            let until = ahead.until.map_or_else(|| "none".to_owned(), |until| until.to_string());
            ahead.remarks.push(format!(
                "the partitions of {} end with {until} and may not be made here: run `outboxd prune` as the table's owner",
                table.quoted()
            ));
        }
        return Ok(ahead);
    }
    for day in missing {
        let name = name_of(&table.name, day);
        if wish.dry_run || make_day(session, table, &owner, day).await?.noted(&name, day, &mut ahead.remarks) {
            ahead.until = ahead.until.max(Some(day));
            ahead.made.push(name);
        }
    }
    Ok(ahead)
}

enum Made {
    Yes,
    /// The default partition holds rows of that day, or a table has its name.
    Taken,
    /// Somebody's lock was in the way.
    Later,
}

impl Made {
    fn noted(self, name: &str, day: Day, remarks: &mut Vec<String>) -> bool {
        match self {
            Made::Yes => return true,
            Made::Taken => {
                remarks.push(format!("no partition {name}: rows of {day} are in the default partition, and stay"));
            }
            Made::Later => remarks.push(format!("no partition {name} yet: a lock is in the way")),
        }
        false
    }
}

async fn make_day(session: &SqlSession, table: &CatalogTable, owner: &str, day: Day) -> Result<Made, SourceFailure> {
    // As the table's owner, whose it is to be too.
    let create = format!("SET LOCAL ROLE {owner}; {}", create_day(Some(&table.schema), &table.name, day));
    let doing = format!("{}: making a partition of {}", session.description(), table.quoted());
    for tried in 1..=LOCK_TRIES {
        // The default partition is looked through, and is locked meanwhile.
        match alone(session, &format!("SET LOCAL statement_timeout = '5s'; {create}")).await {
            Ok(()) => return Ok(Made::Yes),
            Err(error) if error.code() == Some(&SqlState::CHECK_VIOLATION) => return Ok(Made::Taken),
            Err(error) if error.code() == Some(&SqlState::DUPLICATE_TABLE) => return Ok(Made::Taken),
            Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => return Ok(Made::Later),
            Err(error) if in_the_way(&error) => pause_before_lock(tried).await,
            Err(error) => return Err(owners(classify_sql(&error, &doing), table)),
        }
    }
    Ok(Made::Later)
}

/// One transaction that waits for no lock long; rolled back when it fails.
async fn alone(session: &SqlSession, statements: &str) -> Result<(), tokio_postgres::Error> {
    let patience = LOCK_PATIENCE.as_millis();
    let ran = session.batch_execute(&format!("BEGIN; SET LOCAL lock_timeout = {patience}; {statements}; COMMIT")).await;
    if ran.is_err() {
        let _ = session.batch_execute("ROLLBACK").await;
    }
    ran
}

/// A right that nobody can be granted.
fn owners(failure: SourceFailure, table: &CatalogTable) -> SourceFailure {
    match failure {
        SourceFailure::NotReady { what, .. } => SourceFailure::NotReady {
            what,
            remedy: format!(
                "only the owner of {} may make and drop its partitions: run `outboxd prune` as that role, or GRANT it to \
                 this one, with CREATE on the schema",
                table.quoted()
            ),
        },
        other => other,
    }
}

/// A table that is detached, and what it takes to attach it again.
struct Detached {
    quoted: String,
    name: String,
    values: String,
}

impl Pass<'_> {
    /// Drops the days that may go.
    pub(super) async fn partitions(&self, by_time: &Partitioning, done: &mut Done) -> Result<(), SourceFailure> {
        for left in self.left_detached().await? {
            self.decide(left, done).await?;
        }
        for part in by_time.parts.iter().filter(|part| part.old) {
            if self.has_what_stays(&part.quoted).await? {
                done.held.push(kept(&part.name));
                continue;
            }
            if let Some(why) = self.held_back().await? {
                // Whoever is behind with this one is behind with all that are younger.
                done.held.push(why);
                return Ok(());
            }
            if self.job.wish.dry_run {
                done.dropped.push(part.name.clone());
                continue;
            }
            match self.detach(part).await? {
                Some(detached) => self.decide(detached, done).await?,
                None => done.held.push(format!("partition {} could not be detached yet: the table is busy", part.name)),
            }
        }
        Ok(())
    }

    async fn has_what_stays(&self, part: &str) -> Result<bool, SourceFailure> {
        if self.by_age {
            return Ok(false);
        }
        let asked = format!("SELECT EXISTS (SELECT FROM {part} t WHERE {})", self.stays);
        let failed = self.failed(&format!("looking at {part}"));
        self.session.query_one(&asked, &[]).await.map(|row| row.get(0)).map_err(failed)
    }

    fn mark(&self) -> String {
        format!("{MARK}{} ", self.table.quoted())
    }

    /// What an earlier pass has detached and not dropped.
    async fn left_detached(&self) -> Result<Vec<Detached>, SourceFailure> {
        let asked = "SELECT n.nspname::text, c.relname::text, d.description
                     FROM pg_catalog.pg_description d JOIN pg_catalog.pg_class c ON c.oid = d.objoid
                     JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                     WHERE d.classoid = 'pg_catalog.pg_class'::regclass AND d.objsubid = 0 AND NOT c.relispartition
                           AND c.relkind IN ('r', 'p') AND starts_with(d.description, $1)";
        let (mark, failed) = (self.mark(), self.failed("looking for detached partitions"));
        let rows = self.session.query(asked, &[&mark]).await.map_err(failed)?;
        let detached = |row: &tokio_postgres::Row| {
            let (schema, name, description): (String, String, String) = (row.get(0), row.get(1), row.get(2));
            let values = description.strip_prefix(&mark).unwrap_or_default().to_owned();
            Detached { quoted: format!("{}.{}", quote(&schema), quote(&name)), name, values }
        };
        Ok(rows.iter().map(detached).collect())
    }

    /// Takes a partition out of the table, as soon as nobody writes to it for a moment; `None` when that does not come.
    async fn detach(&self, part: &Part) -> Result<Option<Detached>, SourceFailure> {
        let (table, quoted) = (self.table.quoted(), &part.quoted);
        let mark = literal(&format!("{}{}", self.mark(), part.values));
        let detach = format!("ALTER TABLE {table} DETACH PARTITION {quoted}; COMMENT ON TABLE {quoted} IS {mark}");
        for tried in 1..=LOCK_TRIES {
            match alone(&self.session, &detach).await {
                Ok(()) => {
                    let (quoted, name, values) = (quoted.clone(), part.name.clone(), part.values.clone());
                    return Ok(Some(Detached { quoted, name, values }));
                }
                Err(error) if in_the_way(&error) => pause_before_lock(tried).await,
                Err(error) => {
                    return Err(owners(self.failed(&format!("detaching {quoted}"))(error), &self.table));
                }
            }
        }
        Ok(None)
    }

    /// Drops a table that is detached, or attaches it again.
    async fn decide(&self, detached: Detached, done: &mut Done) -> Result<(), SourceFailure> {
        let Detached { quoted, name, values } = detached;
        if self.job.wish.dry_run {
            done.dropped.push(name);
            return Ok(());
        }
        let why = match self.has_what_stays(&quoted).await? {
            true => Some(kept(&name)),
            false => self.held_back_stored().await?,
        };
        let Some(why) = why else {
            let drop = self.session.batch_execute(&format!("DROP TABLE {quoted}")).await;
            drop.map_err(self.failed(&format!("dropping {quoted}")))?;
            done.dropped.push(name);
            return Ok(());
        };
        done.held.push(why);
        let table = self.table.quoted();
        let attach =
            format!("ALTER TABLE {table} ATTACH PARTITION {quoted} {values}; COMMENT ON TABLE {quoted} IS NULL");
        for tried in 1..=LOCK_TRIES {
            match alone(&self.session, &attach).await {
                Ok(()) => break,
                Err(error) if in_the_way(&error) => pause_before_lock(tried).await,
                // Rows of that time have come into the default partition meanwhile, and it no longer fits in.
                Err(error) if error.code() == Some(&SqlState::CHECK_VIOLATION) => {
                    return self.bring_back(&quoted, &name, done).await;
                }
                Err(error) => return Err(self.failed(&format!("attaching {quoted} again"))(error)),
            }
        }
        Ok(())
    }
}

impl Pass<'_> {
    /// Puts what must stay of a detached table among the rows of the default partition, and drops the rest. A table that is
    /// read from the log alone needs none of it back: there it stays detached until everything was delivered.
    async fn bring_back(&self, quoted: &str, name: &str, done: &mut Done) -> Result<(), SourceFailure> {
        if self.by_age || self.held_back().await?.is_some() {
            done.held.push(format!("{name} stays detached until what is in it was delivered"));
            return Ok(());
        }
        let (table, stays) = (self.table.quoted(), &self.stays);
        let columns: Vec<_> = self.table.columns.iter().map(|(column, _)| quote(column)).collect();
        let columns = columns.join(", ");
        let moved = format!(
            "INSERT INTO {table} ({columns}) SELECT {columns} FROM {quoted} t WHERE {stays}; DROP TABLE {quoted}"
        );
        alone(&self.session, &moved).await.map_err(self.failed(&format!("bringing rows of {quoted} back")))?;
        done.dropped.push(name.to_owned());
        Ok(())
    }
}

fn kept(name: &str) -> String {
    format!("partition {name} holds rows that were not delivered, or not for so long")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_is_called_after_its_table_and_its_day() {
        let day = Day::of_seconds(1_738_281_600);
        assert_eq!(name_of("outbox", day), "outbox_p20250131");
        let long = "ä".repeat(40);
        let name = name_of(&long, day);
        assert!(name.len() <= LONGEST_NAME && name.ends_with("_p20250131"), "{name}");
    }

    #[test]
    fn the_days_that_are_missing_are_those_without_a_partition() {
        let part = |from: Day, days: i64| Part {
            quoted: String::new(),
            name: String::new(),
            is_default: false,
            bounds: Some((from.begin(), from.plus(days).begin())),
            old: false,
            values: String::new(),
        };
        let today = Day(20_000);
        let by_time = Partitioning { parts: vec![part(today, 1), part(today.plus(2), 3)], ours: true };
        let missing: Vec<_> = missing_days(&by_time, today).iter().map(|day| day.0 - today.0).collect();
        assert_eq!(missing, [1, 5, 6, 7]);
        assert_eq!(by_time.last_day(), Some(today.plus(4)));
    }
}
