//! `outboxd prune`: one pass of retention, told.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use clap::Args;

use super::{PipelineArgs, print};
use crate::config::{PipelineSettings, Settings, Span};
use crate::failure::{ExitCode, Failure, Halt};
use crate::retention::{self, Done, Ears, Wish};
use crate::source::SourceFailure;

pub const EXAMPLES: &str = "\
Examples:
  outboxd prune postgres://owner@db/shop --older-than 30d --dry-run
  outboxd prune postgres://owner@db/shop --older-than 30d
  outboxd prune --config /etc/outboxd.toml      what prune-after says there

A row goes when it was delivered and is older than that: a polled one when it is
marked so, one of the log when every pipeline here has confirmed what was
committed before the look. Failed rows stay (--prune-also failed). Where the table
has partitions by time, whole ones are dropped, and a week of them is kept ahead.";

#[derive(Clone, Debug, Args)]
pub struct PruneArgs {
    #[command(flatten)]
    pub pipelines: PipelineArgs,
    #[command(flatten)]
    pub prune: PruneOptions,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct PruneOptions {
    /// What counts as old, by when a row was delivered (polling) or made [default: --prune-after]
    #[arg(long, value_name = "DURATION", help_heading = "Prune")]
    pub older_than: Option<Span>,
    /// Print what would be deleted, and delete nothing
    #[arg(long, help_heading = "Prune")]
    pub dry_run: bool,
    /// How long a pipeline that is behind is waited for before its rows are left alone
    #[arg(long, value_name = "DURATION", default_value = "30s", help_heading = "Prune")]
    pub wait: Span,
}

pub async fn run(settings: Settings, options: PruneOptions) -> Result<ExitCode, Halt> {
    let all = &settings.pipelines;
    let mut wishes = Vec::new();
    for pipeline in all {
        wishes.push(wish(pipeline, options)?);
    }
    let mut worst: Option<Halt> = None;
    let mut troubled = |halt: Halt| {
        // The last one is told when the program ends.
        if let Some(before) = worst.take() {
            let _ = writeln!(std::io::stderr(), "{before}");
            worst = Some(if before.code > halt.code { before } else { halt });
        } else {
            worst = Some(halt);
        }
    };
    let waiting = |why: &str| {
        let _ = writeln!(std::io::stderr(), "waiting: {why}");
    };
    let ears = Ears { deleted: &|_| {}, waiting: &waiting };
    let mut seen: Vec<(&PipelineSettings, _)> = Vec::new();
    for (pipeline, wish) in all.iter().zip(&wishes) {
        let jobs = match retention::jobs(pipeline, all, None, wish, ears) {
            Ok(jobs) => jobs,
            Err(halt) => {
                troubled(halt);
                continue;
            }
        };
        for job in jobs {
            // Publishers with positions of their own are pipelines over the same table.
            if seen.iter().any(|earlier| retention::is_same(*earlier, (pipeline, job.table))) {
                continue;
            }
            seen.push((pipeline, job.table));
            match job.run().await {
                Ok(done) => {
                    print(written(&done, wish).as_bytes())?;
                    done.trouble.map(halt).into_iter().for_each(&mut troubled);
                }
                Err(failure) => troubled(halt(failure)),
            }
        }
    }
    worst.map_or(Ok(ExitCode::Done), Err)
}

fn wish(pipeline: &PipelineSettings, options: PruneOptions) -> Result<Wish, Halt> {
    let usage = |what: String, remedy: &str| Halt { code: ExitCode::Usage, what, remedy: remedy.to_owned() };
    let age = options.older_than.map(|Span(age)| age).or(pipeline.retention.after);
    let Some(age) = age.filter(|age| *age > Duration::ZERO) else {
        let what = format!("pipeline `{}`: nothing says how old a row must be to be deleted", pipeline.name);
        return Err(usage(what, "say --older-than, for instance 30d; or prune-after in the config file"));
    };
    if pipeline.source.tables().is_empty() {
        let what = format!("pipeline `{}` has no table: its events are messages of the log alone", pipeline.name);
        return Err(usage(what, "leave it out: there is nothing to delete"));
    }
    Ok(Wish {
        age: Some(age),
        batch: pipeline.retention.batch,
        also: pipeline.retention.also,
        dry_run: options.dry_run,
        make: true,
        patience: options.wait.0,
        count_kept: true,
    })
}

fn written(done: &Done, wish: &Wish) -> String {
    let Done { table, rows, dropped, made, ahead_until, held, kept, .. } = done;
    let (deleted, drop, make) = match wish.dry_run {
        true => ("would delete", "would drop", "would make"),
        false => ("deleted", "dropped", "made"),
    };
    let plural = |count: u64| if count == 1 { "" } else { "s" };
    let mut text = format!("{deleted} {rows} row{} of {table}\n", plural(*rows));
    let listed = |names: &[String]| format!("{} partition{}", names.len(), plural(names.len() as u64));
    if !dropped.is_empty() {
        let _ = writeln!(text, "{drop} {} of {table}: {}", listed(dropped), dropped.join(", "));
    }
    if let Some(until) = ahead_until.as_ref().filter(|_| !made.is_empty()) {
        let _ = writeln!(text, "{make} {} of {table}, up to {until}", listed(made));
    }
    for why in held {
        let _ = writeln!(text, "kept: {why}");
    }
    if *kept > 0 {
        let _ = writeln!(
            text,
            "kept: {kept} old row{} of {table} that were not delivered, or not for so long",
            plural(*kept)
        );
    }
    text
}

/// Here nobody waits for trouble to pass.
fn halt(failure: SourceFailure) -> Halt {
    match Failure::from(failure) {
        Failure::Halt(halt) => halt,
        Failure::Retry { what } | Failure::StandBy { what } | Failure::Again { what } => Halt {
            code: ExitCode::SourceNotReady,
            what,
            remedy: "run it again when the server can be reached; what was deleted is gone, the rest is as it was"
                .to_owned(),
        },
    }
}
