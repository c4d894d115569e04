//! Writing back to the table what was delivered from the log.
//!
//! ```text
//!   watermark ──▶ Marks ──due──▶ Marker ──one statement for up to a thousand rows──▶ table
//!                   │                                                                  │
//!                   └────── its end is confirmed ◀──────────────── written ◀───────────┘
//! ```
//!
//! It is part of the way back: a position is confirmed only when the rows before it are marked, so that after a crash what was
//! delivered and not marked is delivered again and marked. A statement touches only rows that are not marked, so that doing
//! it twice is doing it once, and a row that is gone is no trouble. What it writes is in the log again, as an update, which
//! is no event.
//!
//! The marker is a task with a connection of its own. While the database refuses it tries again, for ever; what is due
//! meanwhile is kept, up to a bound at which reading waits.

mod mongodb;
mod mysql;
mod postgres;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::config::{MarkSettings, PipelineSettings, SourceSettings};
use crate::marks::{MOST_AT_ONCE, MarkedRow, Marks, Noted};
use crate::preflight::{Finding, Report, Verdict};
use crate::source::poll::View;
use crate::source::{SourceFailure, SourceStats};

/// A statement that takes longer is given up, with its connection, and tried again.
const PATIENCE: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What operators see of marking.
#[derive(Debug, Default)]
pub struct MarkStats {
    on: AtomicBool,
    rows: AtomicU64,
    statements: AtomicU64,
    failures: AtomicU64,
    waiting: AtomicU64,
    trouble: Mutex<Option<String>>,
}

/// A copy of that.
#[derive(Clone, Debug)]
pub struct Marking {
    /// Rows that were marked.
    pub rows: u64,
    pub statements: u64,
    pub failures: u64,
    /// Rows that are delivered and not yet marked.
    pub waiting: u64,
    /// Why they cannot be.
    pub trouble: Option<String>,
}

impl MarkStats {
    pub fn set_waiting(&self, rows: usize) {
        self.waiting.store(rows as u64, Ordering::Relaxed);
    }

    fn wrote(&self, written: Written) {
        self.rows.fetch_add(written.rows, Ordering::Relaxed);
        self.statements.fetch_add(written.statements, Ordering::Relaxed);
        self.set_trouble(None);
    }

    fn failed(&self, what: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.set_trouble(Some(what.to_owned()));
    }

    fn set_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// `None` where nothing is marked.
    pub fn told(&self) -> Option<Marking> {
        self.on.load(Ordering::Relaxed).then(|| Marking {
            rows: self.rows.load(Ordering::Relaxed),
            statements: self.statements.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            trouble: self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        })
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
struct Written {
    /// Rows that were not marked before.
    rows: u64,
    statements: u64,
}

/// A connection that marks rows.
enum Writer {
    Postgres(postgres::PgMarks),
    MySql(mysql::MyMarks),
    Mongo(mongodb::MongoMarks),
}

impl Writer {
    /// Connects; whatever stands in the way of marking is given back with it.
    async fn find(of: &PipelineSettings, how: &MarkSettings) -> Result<(Self, Vec<SourceFailure>), SourceFailure> {
        let view = View::of_marks(how, &of.route, of.source.kind());
        let layout = of.route.layout.as_str();
        Ok(match &of.source {
            SourceSettings::Postgres(source) => {
                let mut marks = postgres::PgMarks::find(source, view).await?;
                let wrong = marks.wrong(layout).await?;
                (Writer::Postgres(marks), wrong)
            }
            SourceSettings::MySql(source) => {
                let mut marks = mysql::MyMarks::find(source, view).await?;
                let wrong = marks.wrong(layout).await?;
                (Writer::MySql(marks), wrong)
            }
            SourceSettings::Mongo(source) => {
                let marks = mongodb::MongoMarks::find(source, view).await?;
                let wrong = marks.wrong().await?;
                (Writer::Mongo(marks), wrong)
            }
        })
    }

    async fn open(of: &PipelineSettings, how: &MarkSettings) -> Result<Self, SourceFailure> {
        let (writer, wrong) = Writer::find(of, how).await?;
        wrong.into_iter().next().map_or(Ok(writer), Err)
    }

    async fn mark(&mut self, table: u32, ids: &[&[u8]]) -> Result<u64, SourceFailure> {
        match self {
            Writer::Postgres(marks) => marks.mark(table, ids).await,
            Writer::MySql(marks) => marks.mark(table, ids).await,
            Writer::Mongo(marks) => marks.mark(table, ids).await,
        }
    }

    async fn mark_parked(&mut self, table: u32, rows: &[(&[u8], &str)]) -> Result<u64, SourceFailure> {
        match self {
            Writer::Postgres(marks) => marks.mark_parked(table, rows).await,
            Writer::MySql(marks) => marks.mark_parked(table, rows).await,
            Writer::Mongo(marks) => marks.mark_parked(table, rows).await,
        }
    }

    /// Marks the rows of these chunks, by table.
    async fn write(&mut self, chunks: &[Arc<Noted>]) -> Result<Written, SourceFailure> {
        if let Writer::Postgres(marks) = self {
            let transactions: Vec<_> = chunks.iter().flat_map(|noted| noted.transactions()).copied().collect();
            marks.until_visible(&transactions).await?;
        }
        let mut rows: Vec<MarkedRow<'_>> = chunks.iter().flat_map(|noted| noted.rows()).collect();
        rows.sort_by_key(|row| row.table);
        let mut written = Written::default();
        for of_table in rows.chunk_by(|one, next| one.table == next.table) {
            let table = of_table[0].table;
            let done: Vec<_> = of_table.iter().filter(|row| row.parked.is_none()).map(|row| row.id).collect();
            let parked: Vec<_> = of_table.iter().filter_map(|row| Some((row.id, row.parked?))).collect();
            for some in done.chunks(MOST_AT_ONCE) {
                written.rows += self.mark(table, some).await?;
                written.statements += 1;
            }
            for some in parked.chunks(MOST_AT_ONCE) {
                written.rows += self.mark_parked(table, some).await?;
                written.statements += 1;
            }
        }
        Ok(written)
    }
}

/// Marks what is due, as long as the generation lasts.
pub struct Marker {
    writer: Option<Writer>,
    of: PipelineSettings,
    how: MarkSettings,
    marks: Arc<Marks>,
    stats: Arc<SourceStats>,
}

impl Marker {
    /// Connects, and makes sure that rows can be marked.
    pub async fn open(
        of: &PipelineSettings,
        how: &MarkSettings,
        marks: &Arc<Marks>,
        stats: &Arc<SourceStats>,
    ) -> Result<Self, SourceFailure> {
        stats.marking.on.store(true, Ordering::Relaxed);
        let writer = Some(Box::pin(Writer::open(of, how)).await?);
        stats.marking.set_trouble(None);
        let (of, how, marks, stats) = (of.clone(), how.clone(), marks.clone(), stats.clone());
        Ok(Marker { writer, of, how, marks, stats })
    }

    /// Runs until something is in the way that does not pass by itself.
    pub async fn run(mut self) -> SourceFailure {
        loop {
            let due = self.marks.next().await;
            let mut pause = FIRST_PAUSE;
            loop {
                let late = || Err(SourceFailure::transient("the server does not answer"));
                let tried = tokio::time::timeout(PATIENCE, self.write(&due)).await.unwrap_or_else(|_| late());
                let what = match tried {
                    Ok(written) => {
                        self.stats.marking.wrote(written);
                        break;
                    }
                    Err(SourceFailure::Transient { what }) => what,
                    Err(failure) => {
                        self.stats.marking.failed(&failure.to_string());
                        // Whether it is for a person to mend is found out when the source is opened again.
                        return SourceFailure::transient(format!("delivered rows cannot be marked: {failure}"));
                    }
                };
                self.stats.marking.failed(&what);
                tracing::warn!(
                    pipeline = self.of.name,
                    retry_in_ms = pause.as_millis() as u64,
                    "delivered rows could not be marked yet: {what}"
                );
                self.writer = None;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            self.marks.written(due.len());
            self.stats.marking.set_waiting(self.marks.due());
        }
    }

    async fn write(&mut self, due: &[Arc<Noted>]) -> Result<Written, SourceFailure> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => none.insert(Box::pin(Writer::open(&self.of, &self.how)).await?),
        };
        writer.write(due).await
    }
}

/// Looks whether delivered rows can be marked, and changes nothing.
pub async fn preflight(of: &PipelineSettings, how: &MarkSettings, source: &[Finding]) -> Vec<Finding> {
    const CHECK: &str = "mark";
    let mut report = Report::default();
    // Without these there is nothing more to be found out, and they are told already.
    let first = ["connection", "server", "table"];
    if source.iter().any(|finding| finding.verdict == Verdict::Fail && first.contains(&finding.check)) {
        return report.into_findings();
    }
    if let Some((_, wrong)) = report.told(CHECK, Box::pin(Writer::find(of, how)).await) {
        if wrong.is_empty() {
            let tables: Vec<_> = of.source.tables().iter().map(ToString::to_string).collect();
            report.ok(CHECK, format!("delivered rows of {} can be marked", tables.join(", ")));
        }
        for failure in wrong {
            report.refused(CHECK, failure);
        }
    }
    report.into_findings()
}

/// The columns that a table lacks, and the statement that adds them.
fn lacking(
    table: &str,
    layout: &str,
    missing: &[&str],
    defined: impl Fn(&str) -> String,
    also: &str,
) -> Option<SourceFailure> {
    if missing.is_empty() {
        return None;
    }
    let added: Vec<_> = missing.iter().map(|column| format!("ADD COLUMN {}", defined(column))).collect();
    let names = missing.join(", ");
    Some(SourceFailure::NotReady {
        what: format!("{table} lacks {names}, which --mark writes in the layout `{layout}`"),
        remedy: format!("ALTER TABLE {table} {}{also}", added.join(", ")),
    })
}
