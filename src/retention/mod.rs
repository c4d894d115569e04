//! Retention: what was delivered long ago is deleted, and nothing else.
//!
//! ```text
//!   which rows    rule.rs    polled: marked as delivered; from the log: old; of an event store: behind every publisher
//!   when          fence.rs   from the log: not before every pipeline has passed the end that the log had
//!   how           postgres.rs, mysql.rs, mongodb.rs      by id, in small batches with pauses between them
//!                 postgres_partitions.rs, mysql_partitions.rs   whole days at once, and a week of them kept ahead
//!   who           keeper.rs: the leader, beside its relay; cli/prune.rs: whoever calls it
//! ```
//!
//! Nothing here is needed to deliver: whatever goes wrong is told and tried again, and never ends a pipeline.

pub mod day;
pub mod fence;
pub mod keeper;
mod mongodb;
mod mysql;
pub(crate) mod mysql_partitions;
mod postgres;
pub(crate) mod postgres_partitions;
pub mod rule;

use std::time::Duration;

use crate::config::{Also, Capture, PipelineSettings, SourceSettings, TableName};
use crate::failure::{ExitCode, Halt};
use crate::preflight::{Finding, Report};
use crate::route::Plans;
use crate::source::SourceFailure;
use crate::status::PipelineStatus;
use fence::Fence;
use rule::Condition;

/// Days that have their partitions before they come.
pub const DAYS_AHEAD: i64 = 7;

/// How long a lock on the whole table is waited for: as long as that, others wait behind us.
pub const LOCK_PATIENCE: Duration = Duration::from_millis(500);
/// How often it is tried before the next pass.
pub const LOCK_TRIES: u32 = 20;

/// How long a pipeline is waited for that was not behind a moment ago.
const LATER_PATIENCE: Duration = Duration::from_secs(5);

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wish {
    /// `None`: only partitions are kept ahead.
    pub age: Option<Duration>,
    pub batch: usize,
    pub also: Also,
    /// Nothing is changed; it is told what would be.
    pub dry_run: bool,
    /// Partitions may be made.
    pub make: bool,
    /// How long pipelines that are behind are waited for.
    pub patience: Duration,
    /// Old rows that stay are counted.
    pub count_kept: bool,
}

/// One table, and what every pipeline that reads it says of its rows.
pub struct Job<'a> {
    pub table: &'a TableName,
    /// One of the pipelines.
    pub of: &'a PipelineSettings,
    pub id: String,
    pub timestamp: Option<String>,
    /// What may go, its log's fence apart.
    pub rule: Condition,
    pub fence: Fence<'a>,
    /// Where an event store is polled, the (topic, publisher) pairs that are of other stores.
    pub strangers: Option<Vec<(String, String)>>,
    pub wish: &'a Wish,
    pub ears: Ears<'a>,
}

/// Who hears of what goes on in a pass.
#[derive(Clone, Copy)]
pub struct Ears<'a> {
    /// So many rows were deleted.
    pub deleted: &'a (dyn Fn(u64) + Sync),
    /// Somebody is waited for.
    pub waiting: &'a (dyn Fn(&str) + Sync),
}

/// What came of a pass over one table.
#[derive(Debug, Default)]
pub struct Done {
    pub table: String,
    pub rows: u64,
    /// Partitions that were dropped.
    pub dropped: Vec<String>,
    pub made: Vec<String>,
    /// The last day that has a partition, where the table has such.
    pub ahead_until: Option<String>,
    /// Why something old was left.
    pub held: Vec<String>,
    /// Old rows that were not delivered, where they were counted.
    pub kept: u64,
    /// What could not be done, though the rest could.
    pub trouble: Option<SourceFailure>,
}

impl Job<'_> {
    /// Does it.
    pub async fn run(&self) -> Result<Done, SourceFailure> {
        match &self.of.source {
            SourceSettings::Postgres(source) => Box::pin(postgres::pass(self, source)).await,
            SourceSettings::MySql(source) => Box::pin(mysql::pass(self, source)).await,
            SourceSettings::Mongo(source) => Box::pin(mongodb::pass(self, source)).await,
        }
    }

    /// Whether rows go by their timestamp alone, which is what partitions are by.
    fn is_by_age(&self) -> bool {
        self.timestamp.as_deref().is_some_and(|timestamp| self.rule.is_age_of(timestamp))
    }

    fn done(&self) -> Done {
        Done { table: self.table.to_string(), ..Done::default() }
    }
}

/// The jobs of one pipeline's tables. `all` are the pipelines of the configuration, this one among them; `here` is its
/// status, where this process leads it.
pub fn jobs<'a>(
    of: &'a PipelineSettings,
    all: &'a [PipelineSettings],
    here: Option<&'a PipelineStatus>,
    wish: &'a Wish,
    ears: Ears<'a>,
) -> Result<Vec<Job<'a>>, Halt> {
    let usage = |what: String| Halt {
        code: ExitCode::Usage,
        what: format!("pipeline `{}`: {what}", of.name),
        remedy: String::new(),
    };
    if let Some(refusal) = rule::refusal(of).filter(|_| wish.age.is_some()) {
        return Err(usage(refusal));
    }
    let mut jobs = Vec::new();
    for table in of.source.tables() {
        let readers: Vec<_> = all.iter().filter(|other| reads(other, of, table)).collect();
        let mut of_log = Vec::new();
        for reader in readers.iter().filter(|reader| matches!(reader.capture, Capture::Log)) {
            let projection = Plans::compile(reader)?.projection;
            let here = here.filter(|_| reader.name == of.name);
            of_log.push(fence::Reader { pipeline: reader, projection, here });
        }
        let rule = match wish.age {
            Some(_) => rule::of(&readers, &wish.also).map_err(usage)?,
            None => Condition::Any(Vec::new()),
        };
        let by_position = readers.iter().any(|reader| matches!(reader.capture, Capture::Positions(_)));
        let strangers = by_position.then(|| {
            let others = all.iter().filter(|other| {
                matches!(other.capture, Capture::Positions(_)) && same_place(other, of) && !reads(other, of, table)
            });
            others.flat_map(crate::source::poll::progress::pairs).collect()
        });
        jobs.push(Job {
            table,
            of,
            id: rule::id(of).unwrap_or_default(),
            timestamp: rule::timestamp(of),
            rule,
            fence: Fence::new(of_log, ears.waiting),
            strangers,
            wish,
            ears,
        });
    }
    Ok(jobs)
}

fn same_place(one: &PipelineSettings, other: &PipelineSettings) -> bool {
    match (&one.source, &other.source) {
        (SourceSettings::Postgres(one), SourceSettings::Postgres(other)) => one.url == other.url,
        (SourceSettings::MySql(one), SourceSettings::MySql(other)) => one.url == other.url,
        (SourceSettings::Mongo(one), SourceSettings::Mongo(other)) => one.url == other.url,
        _ => false,
    }
}

/// Whether a pipeline reads this table of another's source.
fn reads(one: &PipelineSettings, of: &PipelineSettings, table: &TableName) -> bool {
    // A name without a schema may mean either.
    let may_be = |schema: &Option<String>| schema.is_none() || table.schema.is_none() || *schema == table.schema;
    let is = |other: &TableName| (other.name == table.name || other.name == "*") && may_be(&other.schema);
    same_place(one, of) && one.source.tables().iter().any(is)
}

/// Whether two tables of two pipelines are the same one.
pub fn is_same(one: (&PipelineSettings, &TableName), other: (&PipelineSettings, &TableName)) -> bool {
    same_place(one.0, other.0) && one.1 == other.1
}

/// Looks at what retention needs, and changes nothing.
pub async fn preflight(of: &PipelineSettings) -> Vec<Finding> {
    let mut report = Report::default();
    if of.retention.after.is_none() {
        return report.into_findings();
    }
    for table in of.source.tables() {
        let lacking = match &of.source {
            SourceSettings::Postgres(source) => postgres::lacking(source, table).await,
            SourceSettings::MySql(source) => mysql::lacking(source, table).await,
            // A role is found out with the first command that it may not run.
            SourceSettings::Mongo(_) => continue,
        };
        match report.told("retention", lacking) {
            Some(Some(grant)) => {
                report.fail("retention", format!("rows of {table} cannot be deleted, as --prune-after asks"), grant);
            }
            Some(None) => report.ok("retention", format!("rows of {table} can be deleted")),
            None => {}
        }
    }
    report.into_findings()
}

/// Rests after a batch for as long as it took, so that no more than half of the time is retention's.
async fn rest(took: Duration) {
    tokio::time::sleep(took.clamp(Duration::from_millis(5), Duration::from_secs(2))).await;
}

/// The pause before a lock is tried again: longer each time, so that writers have their time between.
async fn pause_before_lock(tried: u32) {
    tokio::time::sleep(Duration::from_millis(200) * tried.min(10)).await;
}

fn no_column(table: &str, column: &str) -> SourceFailure {
    SourceFailure::NotReady {
        what: format!("{table} has no column `{column}`, by which retention would judge its rows"),
        remedy: "name the column that says how old a row is: --column timestamp=COLUMN".to_owned(),
    }
}

fn no_moment(table: &str, column: &str) -> SourceFailure {
    SourceFailure::NotReady {
        what: format!("the column `{column}` of {table} is no timestamp, so that it does not say how old a row is"),
        remedy: "name a column with a timestamp or a date: --column timestamp=COLUMN".to_owned(),
    }
}
