//! `outboxd dlq`: looks at dead letters, sends them again, deletes them, in whichever place they are.

pub(super) mod choose;
mod discard;
mod resend;
mod show;

use clap::{Args, Subcommand};

use super::{PipelineArgs, block_on, logging};
use crate::config::{DeadLetter, Span};
use crate::dead_letters::letter::Kept;
use crate::dead_letters::topic::TopicLetters;
use crate::dead_letters::{Letters, Whose};
use crate::failure::{ExitCode, Failure, Halt};
use crate::sink::SinkFailure;
use crate::source::SourceFailure;
use choose::Place;

const EXAMPLES: &str = "\
Examples:
  outboxd dlq list postgres://app@db/shop --dead-letter table:dead_letters
  outboxd dlq list --config /etc/outboxd.toml --name orders --json
  outboxd dlq show 17 --config /etc/outboxd.toml --name orders";

const REPLAY_EXAMPLES: &str = "\
Examples:
  outboxd dlq replay 17 --config /etc/outboxd.toml --name orders
  outboxd dlq replay --all --config /etc/outboxd.toml --name shop --publisher partners

Exits 6 when a letter is refused again; it stays where it is, with the others that
were not sent. A letter is marked only after it was acknowledged: whoever is
interrupted in between sends it again.";

const PURGE_EXAMPLES: &str = "\
Examples:
  outboxd dlq purge --older-than 30d --yes --config /etc/outboxd.toml --name orders
  outboxd dlq purge --all --config /etc/outboxd.toml --name orders";

#[derive(Debug, Subcommand)]
pub enum DlqCommand {
    /// List the letters, newest last
    #[command(after_help = EXAMPLES)]
    List(ListArgs),
    /// Show one letter with its headers and its payload
    #[command(after_help = EXAMPLES)]
    Show(ShowArgs),
    /// Send a letter, or all that were not sent again yet, to where it should have gone
    #[command(after_help = REPLAY_EXAMPLES)]
    Replay(ReplayArgs),
    /// Delete letters that were replayed
    ///
    /// In a topic, records can only be deleted from the beginning: those before the first that was not replayed, or that is
    /// another pipeline's.
    #[command(after_help = PURGE_EXAMPLES)]
    Purge(PurgeArgs),
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    whose: WhoseArgs,
    /// Print a JSON object a line
    #[arg(long, help_heading = "Dead letters")]
    json: bool,
    /// How many of the newest to print
    #[arg(long, value_name = "NUMBER", default_value = "100", help_heading = "Dead letters")]
    limit: u32,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The letter, as `list` names it
    id: String,
    #[command(flatten)]
    whose: WhoseArgs,
    /// Print a JSON object
    #[arg(long, help_heading = "Dead letters")]
    json: bool,
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The letter, as `list` names it
    id: Option<String>,
    #[command(flatten)]
    whose: WhoseArgs,
    /// All letters that were not replayed yet, oldest first
    #[arg(long, help_heading = "Dead letters")]
    all: bool,
}

#[derive(Debug, Args)]
pub struct PurgeArgs {
    #[command(flatten)]
    whose: WhoseArgs,
    /// Also letters that were not replayed
    #[arg(long, help_heading = "Dead letters")]
    all: bool,
    /// Only letters that are older than this
    #[arg(long, value_name = "DURATION", help_heading = "Dead letters")]
    older_than: Option<Span>,
    /// Do not ask
    #[arg(long, help_heading = "Dead letters")]
    yes: bool,
}

#[derive(Clone, Debug, Args)]
pub struct WhoseArgs {
    #[command(flatten)]
    pipelines: PipelineArgs,
    /// The publisher whose letters are meant, where the pipeline has several
    #[arg(long, value_name = "NAME", help_heading = "Dead letters")]
    publisher: Option<String>,
}

impl DlqCommand {
    fn whose(&mut self) -> &mut WhoseArgs {
        match self {
            DlqCommand::List(args) => &mut args.whose,
            DlqCommand::Show(args) => &mut args.whose,
            DlqCommand::Replay(args) => &mut args.whose,
            DlqCommand::Purge(args) => &mut args.whose,
        }
    }

    /// `replay --all SOURCE`: what stands alone there is no letter's id.
    pub(super) fn complete(&mut self) {
        let is_source = |text: &String| text.contains("://") || text.starts_with("env:") || text.starts_with("file:");
        if let DlqCommand::Replay(args) = self
            && let Some(source) = args.id.take_if(|id| is_source(id))
        {
            args.whose.pipelines.pipeline.source = Some(source.into());
        }
    }

    pub(super) fn layer(&mut self) -> &mut PipelineArgs {
        let sends = matches!(self, DlqCommand::Replay(_));
        let pipelines = &mut self.whose().pipelines;
        pipelines.without_sink = !sends;
        pipelines
    }
}

pub(super) fn execute(mut command: DlqCommand) -> Result<ExitCode, Halt> {
    if let DlqCommand::Replay(ReplayArgs { id, all, .. }) = &command
        && id.is_some() == *all
    {
        return Err(usage("what is to be replayed?", "name one letter, or say --all"));
    }
    let place = Place::choose(command.whose().clone())?;
    logging::start_quietly(place.log_format);
    block_on(async {
        // The futures of three databases are large.
        Box::pin(async {
            let store = Store::open(&place).await?;
            match command {
                DlqCommand::List(args) => show::list(store, &place, args.limit, args.json).await,
                DlqCommand::Show(args) => show::show(store, &place, &args.id, args.json).await,
                DlqCommand::Replay(args) => resend::run(store, &place, args.id.as_deref()).await,
                DlqCommand::Purge(args) => {
                    let older_than = args.older_than.map(|Span(age)| age).unwrap_or_default();
                    discard::run(store, &place, args.all, older_than, args.yes).await
                }
            }
        })
        .await
    })
}

/// Where the letters are.
enum Store {
    Table(Letters),
    Topic(TopicLetters),
}

impl Store {
    async fn open(place: &Place) -> Result<Self, Halt> {
        let publisher = place.publisher();
        match &publisher.dead_letter {
            DeadLetter::Table(table) => {
                let mut letters = Letters::open(&publisher.source, table).await.map_err(source_halt)?;
                letters.prepare(table, true).await.map_err(source_halt)?;
                Ok(Store::Table(letters))
            }
            DeadLetter::Topic(topic) => {
                let letters = TopicLetters::open(&publisher.kafka, topic, &place.whose()).await;
                Ok(Store::Topic(letters.map_err(sink_halt)?))
            }
            DeadLetter::None => Err(usage(
                "no dead-letter place is set, so that there are no letters",
                "say --dead-letter as `run` has it: table:NAME, collection:NAME or topic:NAME",
            )),
        }
    }

    async fn find(&mut self, whose: &Whose, id: &str) -> Result<Kept, Halt> {
        let found = match self {
            Store::Table(letters) => letters.find(whose, id).await.map_err(source_halt)?,
            Store::Topic(letters) => letters.find(id).await.map_err(sink_halt)?,
        };
        let Whose { pipeline, .. } = whose;
        found.ok_or_else(|| {
            usage(format!("there is no dead letter `{id}` of pipeline {pipeline}"), "`outboxd dlq list` names them")
        })
    }
}

fn usage(what: impl Into<String>, remedy: &str) -> Halt {
    Halt { code: ExitCode::Usage, what: what.into(), remedy: remedy.to_owned() }
}

/// Here nobody waits for trouble to pass.
fn source_halt(failure: SourceFailure) -> Halt {
    passing_is(ExitCode::SourceNotReady, failure.into(), "run it again when the server can be reached")
}

fn sink_halt(failure: SinkFailure) -> Halt {
    passing_is(ExitCode::SinkNotReady, failure.into(), "run it again when the sink can be reached")
}

fn passing_is(code: ExitCode, failure: Failure, remedy: &str) -> Halt {
    match failure {
        Failure::Halt(halt) => halt,
        Failure::Retry { what } | Failure::StandBy { what } | Failure::Again { what } => {
            Halt { code, what, remedy: remedy.to_owned() }
        }
    }
}
