//! Retention beside a relay: the leader keeps partitions ahead and, if it was asked to, deletes what is old.
//!
//! It never ends the pipeline: trouble is shown in the status and tried again.

use std::convert::Infallible;
use std::time::Duration;

use super::day::moment;
use super::{Done, Ears, Wish, jobs};
use crate::config::{Capture, PipelineSettings, SourceSettings};
use crate::event::Micros;
use crate::source::SourceFailure;
use crate::status::{PipelineStatus, Pruned};

/// The first look comes when the relay is well under way.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST_INTERVAL: Duration = Duration::from_secs(3600);
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// After trouble, and when a pipeline was behind.
const AGAIN: Duration = Duration::from_secs(60);
/// How long a pipeline that is behind is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs beside a generation until that ends.
pub async fn run(of: &PipelineSettings, all: &[PipelineSettings], status: &PipelineStatus) -> Infallible {
    let after = of.retention.after;
    let has_partitions = !matches!(of.source, SourceSettings::Mongo(_)) && !of.source.tables().is_empty();
    if after.is_none() && !has_partitions {
        return std::future::pending().await;
    }
    let interval = after.map_or(LONGEST_INTERVAL, |age| (age / 20).clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL));
    let wish = Wish {
        age: after,
        batch: of.retention.batch,
        also: of.retention.also,
        dry_run: false,
        make: !of.source.no_create(),
        patience: PATIENCE,
        count_kept: false,
    };
    let mut told = String::new();
    let mut pause = FIRST.min(interval);
    loop {
        tokio::time::sleep(pause).await;
        let Passed { pruned, is_partitioned, again } = pass(of, all, status, &wish).await;
        tell(of, &pruned, &mut told);
        status.pruned(pruned);
        if after.is_none() && !is_partitioned && !again {
            // A table without partitions does not become one with them.
            return std::future::pending().await;
        }
        pause = if again { interval.min(AGAIN) } else { interval };
    }
}

struct Passed {
    pruned: Pruned,
    is_partitioned: bool,
    /// What was in the way may pass soon.
    again: bool,
}

/// One pass over all tables.
async fn pass(of: &PipelineSettings, all: &[PipelineSettings], status: &PipelineStatus, wish: &Wish) -> Passed {
    let mut pruned = Pruned::default();
    let (mut is_partitioned, mut again) = (false, false);
    let counted = |rows: u64| {
        status.metrics.pruned_rows.inc_by(rows);
    };
    // A poller needs no fence of its own, and a log's is told by the status.
    let here = matches!(of.capture, Capture::Log).then_some(status);
    let ears = Ears { deleted: &counted, waiting: &|_| {} };
    match jobs(of, all, here, wish, ears) {
        Err(halt) => pruned.last_error = Some(halt.to_string()),
        Ok(jobs) => {
            for job in jobs {
                match job.run().await {
                    Ok(done) => {
                        is_partitioned |= done.ahead_until.is_some();
                        again |= !done.held.is_empty();
                        add(&mut pruned, done, status);
                    }
                    Err(failure) => {
                        again |= matches!(failure, SourceFailure::Transient { .. });
                        pruned.last_error = Some(told_of(&failure));
                    }
                }
            }
        }
    }
    pruned.at = Some(moment(Micros::now().0 / 1_000_000));
    Passed { pruned, is_partitioned, again }
}

fn add(pruned: &mut Pruned, done: Done, status: &PipelineStatus) {
    let Done { table, rows, dropped, made, ahead_until, held, trouble, .. } = done;
    status.metrics.pruned_partitions.inc_by(dropped.len() as u64);
    if rows > 0 || !dropped.is_empty() || !made.is_empty() {
        tracing::info!(
            pipeline = status.name(),
            table,
            rows,
            dropped = dropped.join(", "),
            made = made.join(", "),
            "retention"
        );
    }
    pruned.rows += rows;
    pruned.partitions += dropped.len() as u64;
    pruned.partitions_until = ahead_until.or(pruned.partitions_until.take());
    if !held.is_empty() {
        pruned.held_back_by = Some(held.join("; "));
    }
    if let Some(failure) = trouble {
        pruned.last_error = Some(told_of(&failure));
    }
}

fn told_of(failure: &SourceFailure) -> String {
    match failure {
        SourceFailure::NotReady { what, remedy } => format!("{what}; remedy: {remedy}"),
        other => other.to_string(),
    }
}

/// Says what is new of trouble, once.
fn tell(of: &PipelineSettings, pruned: &Pruned, told: &mut String) {
    let trouble = pruned.last_error.as_ref().or(pruned.held_back_by.as_ref()).cloned().unwrap_or_default();
    if !trouble.is_empty() && trouble != *told {
        match pruned.last_error.is_some() {
            true => tracing::warn!(pipeline = of.name, "retention: {trouble}"),
            false => tracing::info!(pipeline = of.name, "retention waits: {trouble}"),
        }
    }
    *told = trouble;
}
