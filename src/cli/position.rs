//! `outboxd position`: looks at where a pipeline stands, and sets it ahead or back. A change is shown, agreed to, and
//! recorded before it is made.

use std::fmt::Write as _;
use std::io::{BufRead as _, IsTerminal as _, Write as _, stderr, stdin};

use clap::{Args, Subcommand};

use super::table::{Look, Tint, one_line};
use super::{PipelineArgs, block_on, choose, logging, print, unexpected};
use crate::config::{LogFormat, PipelineSettings};
use crate::failure::{ExitCode, Failure, Halt};
use crate::figures;
use crate::route::Plans;
use crate::source::SourceFailure;
use crate::source::audit::{self, Entry};
use crate::source::stand::{self, Change, Counted, Held, Stand, Target};

const SHOW_EXAMPLES: &str = "\
Examples:
  outboxd position show postgres://app@db/shop
  outboxd position show --config /etc/outboxd.toml --name orders --json";

const SET_EXAMPLES: &str = "\
Examples:
  outboxd position set 16/B374D848 postgres://app@db/shop --reason 'poison batch, INC-42'
  outboxd position set now --config /etc/outboxd.toml --name orders --reason 'new topic'
  outboxd position set 3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23 mysql://app@db/shop \\
      --reason 'consumer lost its data' --yes
  outboxd position set 1763291754:1 'mongodb://app@db/shop' --reason 'again from 11:15'

POSITION is one as `position show` prints it, or `now` (the end of the log) or
`earliest` (where it can still be entered). What lies between is never delivered
when it is set ahead, and is delivered once more when it is set back; a slot of
PostgreSQL cannot be set back. Whoever runs the pipeline must be stopped first
(exit 7). A record is left in outboxd_audit before anything is changed.";

#[derive(Debug, Subcommand)]
pub enum PositionCommand {
    /// Show where a pipeline stands, where that is kept, and what the log still has
    #[command(after_help = SHOW_EXAMPLES)]
    Show(ShowArgs),
    /// Set a pipeline's position ahead or back, after asking, with a record of who, when and why
    #[command(after_help = SET_EXAMPLES)]
    Set(SetArgs),
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    #[command(flatten)]
    pipelines: PipelineArgs,
    /// Print a JSON array
    #[arg(long, help_heading = "Position")]
    json: bool,
}

#[derive(Debug, Args)]
pub struct SetArgs {
    /// Where it is to stand: a position as `show` prints it, `now` or `earliest`
    position: String,
    #[command(flatten)]
    pipelines: PipelineArgs,
    /// Why, for the record
    #[arg(long, value_name = "TEXT", required = true, help_heading = "Position")]
    reason: String,
    /// Only this publisher, where the pipeline has several
    #[arg(long, value_name = "NAME", help_heading = "Position")]
    publisher: Option<String>,
    /// Show what would be skipped or repeated, and change nothing
    #[arg(long, help_heading = "Position")]
    dry_run: bool,
    /// Do not ask
    #[arg(long, help_heading = "Position")]
    yes: bool,
}

impl PositionCommand {
    pub(super) fn layer(&mut self) -> &mut PipelineArgs {
        let pipelines = match self {
            PositionCommand::Show(args) => &mut args.pipelines,
            PositionCommand::Set(args) => &mut args.pipelines,
        };
        pipelines.without_sink = true;
        pipelines
    }
}

pub(super) fn execute(command: PositionCommand) -> Result<ExitCode, Halt> {
    match command {
        PositionCommand::Show(args) => {
            let settings = choose::settings(&args.pipelines)?;
            logging::start_quietly(settings.process.log_format);
            block_on(async { Box::pin(show(&settings.pipelines, args.json)).await })
        }
        PositionCommand::Set(args) => {
            let settings = choose::settings(&args.pipelines)?;
            let pipeline = choose::one(settings.pipelines)?;
            block_on(async { Box::pin(set(&pipeline, &args, settings.process.log_format)).await })
        }
    }
}

async fn show(pipelines: &[PipelineSettings], json: bool) -> Result<ExitCode, Halt> {
    let mut stands = Vec::new();
    for pipeline in pipelines {
        stands.push(stand::look(pipeline).await.map_err(halt)?);
    }
    let text = match json {
        true => serde_json::to_string_pretty(&stands).map_err(|error| unexpected(error.to_string()))? + "\n",
        false => stands.iter().map(|stand| shown(stand, Look::of_stdout())).collect::<Vec<_>>().join("\n"),
    };
    print(text.as_bytes())
}

/// A line for each thing that is known.
fn shown(stand: &Stand, look: Look) -> String {
    let dash = || "-".to_owned();
    let mut lines = vec![
        ("pipeline", stand.pipeline.clone()),
        ("source", format!("{} at {}", stand.source, stand.address)),
        ("position", stand.position.clone().unwrap_or_else(|| "none yet: it has never run".to_owned())),
        ("kept in", stand.kept_in.clone()),
        ("log begins", stand.log_begins.clone().unwrap_or_else(dash)),
        ("log ends", stand.log_ends.clone().unwrap_or_else(dash)),
    ];
    if let Some(reach) = &stand.log_reach {
        lines.push(("log reaches", reach.clone()));
    }
    if let Some(bytes) = stand.behind_bytes {
        lines.push(("behind", figures::bytes(bytes)));
    }
    lines.push(("held by", stand.held_by.clone().unwrap_or_else(|| "nobody".to_owned())));
    for publisher in &stand.publishers {
        let position = publisher.position.as_deref().unwrap_or("where the pipeline stands");
        lines.push(("publisher", format!("{}, {}: {position}", publisher.name, publisher.state)));
    }
    for remark in &stand.remarks {
        lines.push(("note", remark.clone()));
    }
    listed(&lines, look)
}

fn listed(lines: &[(&str, String)], look: Look) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in lines {
        let _ = writeln!(text, "{}  {}", look.paint(&format!("{name:<width$}"), Tint::Heading), one_line(value));
    }
    text
}

async fn set(pipeline: &PipelineSettings, args: &SetArgs, log: Option<LogFormat>) -> Result<ExitCode, Halt> {
    let reason = one_line(&args.reason);
    if reason.is_empty() {
        return Err(usage("--reason: says nothing", "say why, for those who will wonder"));
    }
    if !args.yes && !args.dry_run && !stdin().is_terminal() {
        return Err(usage("there is no terminal to ask on whether the position may be set", "say --yes"));
    }
    let plans = Plans::compile(pipeline)?;
    let mut held = Held::take(pipeline, &plans.projection).await.map_err(halt)?;
    let outcome = change(pipeline, args, &reason, log, &mut held).await;
    held.release().await;
    outcome
}

async fn change(
    pipeline: &PipelineSettings,
    args: &SetArgs,
    reason: &str,
    log: Option<LogFormat>,
    held: &mut Held<'_>,
) -> Result<ExitCode, Halt> {
    let publisher = args.publisher.as_deref();
    let planned = held.plan(&Target::parse(&args.position), publisher).await.map_err(halt)?;
    let whose = match publisher {
        Some(publisher) => format!("publisher {publisher} of pipeline {}", pipeline.name),
        None => format!("pipeline {}", pipeline.name),
    };
    if args.dry_run {
        return print(summary(&whose, &planned, reason, Look::of_stdout()).as_bytes());
    }
    eprint!("{}", summary(&whose, &planned, reason, Look::default()));
    if planned.from.as_ref() == Some(&planned.to) {
        return print(format!("{whose} stands there already: nothing was changed\n").as_bytes());
    }
    if !args.yes {
        let question = format!("Set the position of {whose}? [y/N] ");
        let agreed = tokio::select! {
            agreed = tokio::task::spawn_blocking(move || agreed(&question)) => agreed.unwrap_or(false),
            failure = held.keep() => return Err(halt(failure)),
        };
        if !agreed {
            return print(b"nothing was changed\n");
        }
    }
    let entry = Entry {
        pipeline: pipeline.name.clone(),
        publisher: publisher.map(str::to_owned),
        action: "position set",
        position_from: planned.from.clone(),
        position_to: planned.to.clone(),
        reason: reason.to_owned(),
        os_user: audit::os_user(),
    };
    held.audit(&entry).await.map_err(halt)?;
    let stands = match held.carry_out().await {
        Ok(stands) => stands,
        Err(failure) => {
            // Also in the record, if that is still to be reached.
            let _ = held.audit(&entry.undone(&failure)).await;
            return Err(halt(failure));
        }
    };
    // Only now: what else is logged while looking around is nobody's business.
    logging::start(log);
    tracing::warn!(
        pipeline = pipeline.name,
        publisher,
        from = planned.from,
        to = stands,
        skips = %planned.skips,
        repeats = %planned.repeats,
        reason,
        by = entry.os_user,
        "the position was set by hand"
    );
    print(format!("{whose} stands at {stands} now; recorded in {}\n", audit::NAME).as_bytes())
}

/// What the change means, before it is made.
fn summary(whose: &str, change: &Change, reason: &str, look: Look) -> String {
    let meaning = |counted: &Counted, of: &str| match counted {
        Counted::Nothing | Counted::Events(0) => counted.to_string(),
        counted => format!("{counted}, which {of}"),
    };
    let mut lines = vec![
        ("set", whose.to_owned()),
        ("from", change.from.clone().unwrap_or_else(|| "nowhere".to_owned())),
        ("to", change.to.clone()),
        ("skips", meaning(&change.skips, "will never be delivered")),
        ("repeats", meaning(&change.repeats, "will be delivered once more")),
        ("reason", reason.to_owned()),
    ];
    for remark in &change.remarks {
        lines.push(("note", remark.clone()));
    }
    listed(&lines, look)
}

fn agreed(question: &str) -> bool {
    let mut ask = stderr().lock();
    let _ = write!(ask, "{question}");
    let _ = ask.flush();
    let mut answer = String::new();
    let _ = stdin().lock().read_line(&mut answer);
    matches!(answer.trim(), "y" | "Y" | "yes")
}

fn usage(what: &str, remedy: &str) -> Halt {
    Halt { code: ExitCode::Usage, what: what.to_owned(), remedy: remedy.to_owned() }
}

/// Here nobody waits for trouble to pass, nor for another instance.
fn halt(failure: SourceFailure) -> Halt {
    match Failure::from(failure) {
        Failure::Halt(halt) => halt,
        Failure::StandBy { what } => Halt {
            code: ExitCode::HeldElsewhere,
            what,
            remedy: "stop it first: it would not notice the change, and store its own position over it".to_owned(),
        },
        Failure::Retry { what } | Failure::Again { what } => Halt {
            code: ExitCode::SourceNotReady,
            what,
            remedy: "run it again when the server can be reached".to_owned(),
        },
    }
}
