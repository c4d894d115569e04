//! `--on-lost-position backfill`: what the log no longer has, from the table.
//!
//! ```text
//!   position lost ──▶ new position, stored as one with a backfill under way
//!                 ──▶ rows that are not marked, in the layout's order, through the same window to the same sinks
//!                 ──▶ the log from the new position; the checkpoint says that the backfill is done
//! ```
//!
//! It is a snapshot of the table as on a first start, of only those rows that do not say that they were delivered. The new
//! position comes first, so that whatever is committed meanwhile is in the table or in the log after it, and some of it in
//! both. A crash finds the backfill under way in the checkpoint and goes through the table again, for what is still not
//! marked.
//!
//! The table must tell what was delivered: by the marks of `--mark`, or by an application that writes them itself. Where it
//! cannot, the position stays lost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::{OnLostPosition, PipelineSettings};
use crate::preflight::Report;
use crate::source::poll::View;
use crate::source::{SourceFailure, SourceStats};

/// What became of a lost position.
#[derive(Clone, Debug)]
pub struct Gap {
    /// The report of the loss.
    pub lost: String,
    /// Where the log goes on.
    pub position: String,
    /// Rows that were read from the table.
    pub rows: u64,
    /// They are delivered, and the log is read again.
    pub done: bool,
}

/// What operators see of it.
#[derive(Debug, Default)]
pub struct GapStats {
    gap: Mutex<Option<Gap>>,
    /// Rows of all backfills of this process.
    rows: AtomicU64,
}

impl GapStats {
    fn gap(&self) -> MutexGuard<'_, Option<Gap>> {
        self.gap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn told(&self) -> Option<Gap> {
        self.gap().clone()
    }

    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Rows were read from the table.
    pub fn read(&self, rows: usize) {
        if let Some(gap) = self.gap().as_mut().filter(|gap| !gap.done) {
            gap.rows += rows as u64;
            self.rows.fetch_add(rows as u64, Ordering::Relaxed);
        }
    }

    /// All of them are delivered.
    pub fn end(&self) {
        if let Some(gap) = self.gap().as_mut().filter(|gap| !gap.done) {
            gap.done = true;
            tracing::warn!(
                rows = gap.rows,
                from = gap.position,
                "the backfill is done: what the table had not marked is delivered, and the log goes on"
            );
        }
    }
}

/// A backfill that is wanted, or under way.
#[derive(Clone, Debug)]
pub struct Fill {
    view: Arc<View>,
    /// Whether outboxd itself marks what was delivered.
    pub marks: bool,
    lost: Option<(String, String)>,
}

impl Fill {
    /// After a loss, as far as the settings allow it.
    pub fn wanted(of: &PipelineSettings, lost: SourceFailure) -> Result<Self, SourceFailure> {
        let SourceFailure::PositionLost { what, remedy } = lost else { return Err(lost) };
        if of.on_lost_position == OnLostPosition::Exit {
            return Err(SourceFailure::PositionLost { what, remedy });
        }
        let lost = (what, remedy);
        match view(of) {
            Some(view) => Ok(Fill { view, marks: of.mark, lost: Some(lost) }),
            None => {
                let (why, instead) = no_column(of);
                Err(refused(&lost, &why, &instead))
            }
        }
    }

    /// One that the checkpoint says is under way.
    pub fn under_way(of: &PipelineSettings) -> Result<Self, SourceFailure> {
        let Some(view) = view(of) else {
            let (why, instead) = no_column(of);
            return Err(SourceFailure::PositionLost {
                what: format!("a backfill of pipeline `{}` is under way and cannot go on: {why}", of.name),
                remedy: format!("run with what it was begun with: {instead}"),
            });
        };
        Ok(Fill { view, marks: of.mark, lost: None })
    }

    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Why the table cannot make up for the loss, with what would let it.
    pub fn refused(&self, why: &str, instead: &str) -> SourceFailure {
        match &self.lost {
            Some(lost) => refused(lost, why, instead),
            None => SourceFailure::NotReady {
                what: format!("a backfill is under way and cannot go on: {why}"),
                remedy: instead.to_owned(),
            },
        }
    }

    /// Refuses a table that lacks what would tell of its rows.
    pub fn needs(&self, table: &str, has: impl Fn(&str) -> bool) -> Result<(), SourceFailure> {
        let columns = self.view.scheme.unmarked.iter().chain(self.view.scheme.open);
        let mut lacking: Vec<_> =
            columns.map(|(column, _)| self.view.name(column)).filter(|column| !has(column)).collect();
        lacking.dedup();
        match lacking.is_empty() {
            true => Ok(()),
            false => Err(self.refused(
                &format!("{table} has no {}, which would say what was delivered", lacking.join(", ")),
                "add the layout's status columns (`outboxd init --mark --dry-run` prints them) and run with --mark",
            )),
        }
    }

    /// For a table of which no row says that it was delivered, though nobody but the application would have written it.
    pub fn nobody_marks(&self) -> SourceFailure {
        self.refused(
            "no row of the table says that it was delivered, so that all of them would be delivered again",
            "run with --mark, which writes it, or name the column that your application sets with --column published=COLUMN",
        )
    }

    /// Tells what is going to be done; from here on the rows that are read count.
    pub fn begin(&self, position: &str, stats: &SourceStats) {
        let mut gap = stats.gap.gap();
        let before = gap.take().filter(|gap| self.lost.is_none() && !gap.done);
        let lost = match (&self.lost, &before) {
            (Some((what, _)), _) => what.clone(),
            (None, Some(before)) => before.lost.clone(),
            (None, None) => "a backfill was under way when outboxd ended".to_owned(),
        };
        tracing::warn!(
            "{lost}\n  backfill: rows that are not marked are delivered from the table now, then the log from {position} on"
        );
        let rows = before.map_or(0, |before| before.rows);
        *gap = Some(Gap { lost, position: position.to_owned(), rows, done: false });
    }
}

fn view(of: &PipelineSettings) -> Option<Arc<View>> {
    let status = of.status.as_ref().filter(|_| !of.source.tables().is_empty())?;
    Some(Arc::new(View::of_marks(status, &of.route, of.source.kind())))
}

fn no_column(of: &PipelineSettings) -> (String, String) {
    let why = match of.source.tables().is_empty() {
        true => "logical messages leave no rows that could be delivered instead".to_owned(),
        false => format!("the layout `{}` has no column that says what was delivered", of.route.layout),
    };
    (why, "--mark --column published=COLUMN, with a column that is null until a row was delivered".to_owned())
}

fn refused((what, remedy): &(String, String), why: &str, instead: &str) -> SourceFailure {
    SourceFailure::PositionLost {
        what: format!("{what}\n  no backfill: {why}"),
        remedy: format!("{remedy}; and for the next time: {instead}"),
    }
}

/// What stands in the way of a backfill, before there is need of one.
pub fn foresee(of: &PipelineSettings) -> Option<(String, String)> {
    if of.on_lost_position == OnLostPosition::Exit {
        return None;
    }
    if view(of).is_none() {
        let (why, instead) = no_column(of);
        return Some((format!("--on-lost-position backfill cannot help: {why}"), instead));
    }
    (!of.mark).then(|| {
        let what = "--on-lost-position backfill without --mark: when the position is lost, whatever the application has not \
                    marked itself is delivered again";
        (what.to_owned(), "--mark".to_owned())
    })
}

/// A lost position, as `check` tells it.
pub fn report_loss(report: &mut Report, of: &PipelineSettings, lost: SourceFailure, fillable: bool) {
    match (lost, fillable && of.on_lost_position == OnLostPosition::Backfill && view(of).is_some()) {
        (SourceFailure::PositionLost { what, .. }, true) => {
            report.warn(
                "position",
                what,
                "nothing: a run makes a new one and delivers from the table what is not marked",
            );
        }
        (lost, _) => report.refused("position", lost),
    }
}
