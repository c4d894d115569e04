//! The command line: which words there are and which function answers each.
//!
//! The options of `run`, `check`, `init` and `confirm` are a layer of the configuration, so they are parsed without their
//! defaults; the help, the man page and the completions are made from the same definitions with them.

mod ask;
pub mod check;
mod choose;
pub mod completions;
pub mod confirm;
pub mod demo;
pub mod dlq;
pub mod init;
pub mod logging;
pub mod man;
pub mod order;
pub mod position;
mod progress;
pub mod prune;
pub mod run;
pub mod status;
pub mod table;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::error::{ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::config::{self, PipelineOptions, ProcessOptions, Said, Secret, Settings};
use crate::failure::{ExitCode, Halt};

/// Moves a transactional outbox to Kafka by reading the database's own log.
///
/// Every event that was committed arrives, in commit order for each key; the log's position is confirmed only when Kafka
/// has acknowledged all before it.
#[derive(Debug, Parser)]
#[command(name = "outboxd", version, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  outboxd demo                             see it work, with nothing to configure
  outboxd init postgres://app@db/shop --dry-run
  outboxd check postgres://app@db/shop --brokers k1:9092
  outboxd run postgres://app@db/shop --brokers k1:9092 --topic orders.events
  outboxd run --config /etc/outboxd.toml   one or more pipelines from a file
  outboxd status                           what it is doing
  outboxd confirm postgres://app@db/shop --brokers k1:9092
  outboxd dlq list --config /etc/outboxd.toml --name orders
  outboxd prune --config /etc/outboxd.toml --older-than 30d

Exit codes:
  0  done, or stopped                 4  the position is lost
  1  unexpected                       5  the sink is not ready
  2  bad usage or configuration       6  an event cannot be delivered
  3  the source is not ready          7  held by another instance";

const RUN_EXAMPLES: &str = "\
Examples:
  outboxd run postgres://app@db/shop --brokers k1:9092,k2:9092 --topic orders
  outboxd run 'postgres://app@db/shop?sslmode=verify-full' \\
      --brokers k1:9093 --kafka security.protocol=SASL_SSL \\
      --kafka sasl.mechanism=SCRAM-SHA-512 --kafka sasl.username=shop \\
      --kafka sasl.password=file:/run/secrets/kafka
  outboxd run env:DATABASE_URL --brokers k1:9092 --layout debezium
  outboxd run --config /etc/outboxd.toml

Each flag is also an environment variable (--max-in-flight is
OUTBOXD_MAX_IN_FLIGHT) and a key of the config file; flag beats environment
beats file beats default. A text may be kept elsewhere, as file:/path or
env:NAME; passwords are then read anew at every connect.";

const CHECK_EXAMPLES: &str = "\
Examples:
  outboxd check postgres://app@db/shop --brokers k1:9092
  outboxd check --config /etc/outboxd.toml
  outboxd check --config /etc/outboxd.toml --json | jq '.[] | select(.status != \"ok\")'

Every check is a line: ok, WARN (a run starts, and someone should know) or FAIL (a
run does not start), what it is about, what was seen, and what mends it. Exits 0
when a run would start, 3 when something is wrong with the source, 5 when with
the sink; warnings change nothing.";

const STATUS_EXAMPLES: &str = "\
Examples:
  outboxd status
  outboxd status --admin 10.0.0.7:7420 --json | jq '.pipelines[].state'

Colours are left out where the output is not a terminal, and where NO_COLOR is
set.";

const LAG_EXAMPLES: &str = "\
Examples:
  outboxd lag
  outboxd lag --json | jq '.[] | select(.lag_seconds > 60)'

BEHIND is the age of the oldest event that is read and not delivered, LAG what
the log holds after the confirmed position, RETAINED what the server keeps of
its log for the pipeline, PENDING the rows that wait in a polled table.";

const INIT_EXAMPLES: &str = "\
Examples:
  outboxd init postgres://owner@db/shop --dry-run
  outboxd init postgres://owner@db/shop --payload bytea --table sales.outbox
  outboxd init postgres://owner@db/shop --partition-by day
  outboxd init 'mongodb://db/shop?replicaSet=rs0' --capture poll --ttl 30d
  outboxd init postgres://owner@db/billing --inbox";

const DEMO_EXAMPLES: &str = "\
Examples:
  outboxd demo
  outboxd demo --source mysql --keep
  outboxd demo --source mariadb --server-program /opt/mariadb/bin/mariadbd
  outboxd demo --source mongodb

PostgreSQL is downloaded where there is none; MySQL, MariaDB or MongoDB must be
installed.
Everything runs in a temporary folder and on the loopback address.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Relay until stopped
    #[command(after_help = RUN_EXAMPLES)]
    Run(PipelineArgs),
    /// Look at source and sink and report every check: what was seen, and for what is wrong its remedy
    #[command(after_help = CHECK_EXAMPLES)]
    Check(CheckArgs),
    /// Create table, publication, slot and checkpoint table, so that nothing committed from then on is missed
    ///
    /// Running it again changes nothing. Brokers are not needed.
    #[command(after_help = INIT_EXAMPLES)]
    Init(InitArgs),
    /// Set received_at of rows whose records have come out of Kafka (layout produce-receive)
    ///
    /// A consumer of the relay's topics that writes receipts by the batch, and commits its offsets only after them.
    #[command(after_help = confirm::EXAMPLES)]
    Confirm(confirm::ConfirmArgs),
    /// Show what a running outboxd is doing
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Show how far behind each pipeline and publisher of a running outboxd is, and because of whom
    #[command(after_help = LAG_EXAMPLES)]
    Lag(LagArgs),
    /// Pause a pipeline, or one of its publishers, until it is resumed; a restart does not
    ///
    /// What comes meanwhile stays in the database's log, which grows: see --max-retained.
    Pause(OrderArgs),
    /// Resume a pipeline, or one of its publishers, where it stood
    Resume(OrderArgs),
    /// Look at where a pipeline stands in its source's log, skip ahead, or go back
    ///
    /// SOURCE and flags, or --config, are those of `run`. The pipeline itself must not run.
    Position {
        #[command(subcommand)]
        command: position::PositionCommand,
    },
    /// Look at events that could not be delivered, send them again, delete them
    ///
    /// SOURCE and flags, or --config, are those of `run`: they say where dead letters are (--dead-letter) and where they go.
    Dlq {
        #[command(subcommand)]
        command: dlq::DlqCommand,
    },
    /// Delete rows that were delivered long ago, and keep partitions ahead; never beyond what is confirmed
    ///
    /// SOURCE and flags, or --config, are those of `run`: they say which position counts. --prune-after does the same while
    /// the relay runs.
    #[command(after_help = prune::EXAMPLES)]
    Prune(prune::PruneArgs),
    /// Show the whole thing at work: database, broker, workload, crash and recovery, with nothing to configure
    #[command(after_help = DEMO_EXAMPLES)]
    Demo(DemoArgs),
    /// Print the completion script of a shell
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Print the manual page (roff), of outboxd or of one of its commands
    Man {
        #[arg(value_name = "COMMAND")]
        subcommand: Option<String>,
        /// Write all pages into this folder instead
        #[arg(long, value_name = "DIR", conflicts_with = "subcommand")]
        to: Option<PathBuf>,
    },
    /// Print docs/config.md
    #[command(hide = true)]
    ConfigReference,
}

#[derive(Clone, Debug, Args)]
pub struct PipelineArgs {
    #[command(flatten)]
    pub pipeline: PipelineOptions,
    #[command(flatten)]
    pub process: ProcessOptions,
    /// The pipeline's flags that stood on the command line.
    #[arg(skip)]
    pipeline_flags: Vec<String>,
    /// Those whose variables were set in the environment.
    #[arg(skip)]
    pipeline_variables: Vec<String>,
    /// No record is sent, so that brokers need not be named.
    #[arg(skip)]
    without_sink: bool,
}

#[derive(Clone, Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub pipelines: PipelineArgs,
    /// Print the checks as a JSON array
    #[arg(long, help_heading = "Check")]
    pub json: bool,
}

#[derive(Clone, Debug, Args)]
pub struct InitArgs {
    #[command(flatten)]
    pub pipelines: PipelineArgs,
    #[command(flatten)]
    pub init: InitOptions,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct InitOptions {
    /// Print the statements instead of executing them
    #[arg(long, help_heading = "Init")]
    pub dry_run: bool,
    /// Type of the payload column of a table that is created
    #[arg(long, value_enum, value_name = "TYPE", default_value = "jsonb", help_heading = "Init")]
    pub payload: PayloadType,
    /// Give the table of the layout `native` the columns that polling needs (implied by --capture poll)
    #[arg(long, help_heading = "Init")]
    pub status_columns: bool,
    /// Give PostgreSQL's tables a trigger that wakes the poller at every commit; such commits wait for one another
    #[arg(long, help_heading = "Init")]
    pub notify: bool,
    /// Create only what a consumer remembers events in (processed_events), in its own database, which SOURCE names here
    #[arg(long, help_heading = "Init")]
    pub inbox: bool,
    /// Partition the table that is created by its timestamp, so that old days can be dropped as a whole
    #[arg(long, value_enum, value_name = "WHAT", help_heading = "Init")]
    pub partition_by: Option<PartitionBy>,
    /// Have MongoDB itself delete documents that were delivered longer ago than this (a TTL index)
    #[arg(long, value_name = "DURATION", help_heading = "Init")]
    pub ttl: Option<config::Span>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PartitionBy {
    /// One partition a day, in UTC
    Day,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PayloadType {
    Jsonb,
    Json,
    Text,
    Bytea,
}

impl PayloadType {
    fn of_postgres(self) -> &'static str {
        match self {
            PayloadType::Jsonb => "jsonb",
            PayloadType::Json => "json",
            PayloadType::Text => "text",
            PayloadType::Bytea => "bytea",
        }
    }

    /// The nearest that MySQL has.
    fn of_mysql(self) -> &'static str {
        match self {
            PayloadType::Jsonb | PayloadType::Json => "JSON",
            PayloadType::Text => "LONGTEXT",
            PayloadType::Bytea => "LONGBLOB",
        }
    }
}

#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// Admin address of the running outboxd
    #[arg(long, env = "OUTBOXD_ADMIN", value_name = "ADDRESS", default_value = "127.0.0.1:7420")]
    pub admin: String,
    /// Print the answer as it came, in JSON
    #[arg(long)]
    pub json: bool,
    /// Print nothing but `ok`, or exit with 1 and say what is wrong: for health checks
    ///
    /// `live`: it makes progress or waits for good reason. `ready`, when nothing is named: source and sink are reachable too.
    #[arg(long, value_enum, value_name = "HEALTH", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "ready", conflicts_with = "json")]
    pub check: Option<Health>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Health {
    Live,
    Ready,
}

#[derive(Clone, Debug, Args)]
pub struct LagArgs {
    /// Admin address of the running outboxd
    #[arg(long, env = "OUTBOXD_ADMIN", value_name = "ADDRESS", default_value = "127.0.0.1:7420")]
    pub admin: String,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Debug, Args)]
pub struct OrderArgs {
    /// The pipeline, or PIPELINE/PUBLISHER
    pub name: String,
    /// Admin address of the running outboxd
    #[arg(long, env = "OUTBOXD_ADMIN", value_name = "ADDRESS", default_value = "127.0.0.1:7420")]
    pub admin: String,
    /// Admin token of the running outboxd; may be `file:/path` or `env:NAME`
    #[arg(long, env = "OUTBOXD_ADMIN_TOKEN", value_name = "TOKEN")]
    pub admin_token: Option<Secret>,
}

#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Database to show it with
    #[arg(long, value_enum, value_name = "DATABASE", default_value = "postgres")]
    pub source: DemoSource,
    /// Kafka to use instead of the embedded broker
    #[arg(long, value_name = "SERVERS")]
    pub brokers: Option<String>,
    /// Leave everything running at the end and print the addresses
    #[arg(long)]
    pub keep: bool,
    /// Folder of PostgreSQL's programs, or `download` [default: found on PATH or in the usual places, else downloaded]
    #[arg(long, value_name = "DIR")]
    pub postgres_bin: Option<PathBuf>,
    /// MySQL's, MariaDB's or MongoDB's server, as /usr/sbin/mysqld [default: found on PATH or in the usual places]
    #[arg(long, value_name = "PATH")]
    pub server_program: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DemoSource {
    Postgres,
    Mysql,
    Mariadb,
    Mongodb,
}

/// The commands whose options are a layer of the configuration.
const LAYERED: [&str; 7] = ["run", "check", "init", "confirm", "position", "dlq", "prune"];

/// All definitions, as the help shows them. Values of variables are never shown: some are passwords.
pub fn command() -> clap::Command {
    let quiet = |arg: Arg| {
        let switch = arg.is_require_equals_set();
        arg.hide_env_values(true).hide_possible_values(switch)
    };
    each_subcommand(Cli::command(), &|top, subcommand| {
        let subcommand = subcommand.mut_args(quiet);
        if top == "confirm" { confirm::shape(subcommand) } else { subcommand }
    })
}

/// Changes every subcommand, and theirs, knowing which of the top it is or belongs to.
fn each_subcommand(command: clap::Command, change: &dyn Fn(&str, clap::Command) -> clap::Command) -> clap::Command {
    command.mut_subcommands(|subcommand| {
        let top = subcommand.get_name().to_owned();
        change(&top, subcommand.mut_subcommands(|inner| change(&top, inner)))
    })
}

/// Reads a command line. Help and version come as errors, as clap has it.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut layers = layers();
    let matches = match layers.try_get_matches_from_mut(&args) {
        Ok(matches) => matches,
        // The help is that of the full definitions, with their defaults.
        Err(error) if error.kind() == ErrorKind::DisplayHelp => {
            return Err(command().try_get_matches_from(&args).err().unwrap_or(error));
        }
        Err(error) => return Err(redacted(error)),
    };
    let mut cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut layers))?;
    if let Command::Dlq { command } = &mut cli.command {
        command.complete();
    }
    let given = matches.subcommand().map(|(_, given)| given.subcommand().map_or(given, |(_, inner)| inner));
    if let (Some(layer), Some(given)) = (cli.command.layer(), given) {
        layer.complete(given).map_err(|error| error.format(&mut layers))?;
    }
    if let (Command::Confirm(args), Some(given)) = (&mut cli.command, given) {
        args.complete(given);
    }
    Ok(cli)
}

/// The error without the passwords of URLs that stood where none belongs, as in `outboxd postgres://…`.
fn redacted(mut error: clap::Error) -> clap::Error {
    let texts = error.context().filter_map(|(kind, value)| match value {
        ContextValue::String(text) if text.contains("://") => Some((kind, config::redact_url(text))),
        _ => None,
    });
    for (kind, text) in texts.collect::<Vec<_>>() {
        error.insert(kind, ContextValue::String(text));
    }
    error
}

/// The definitions without defaults where those belong to the lowest layer.
fn layers() -> clap::Command {
    let options = options_of::<PipelineOptions>().chain(options_of::<ProcessOptions>());
    let options: Vec<_> = options.chain(options_of::<config::ConfirmOptions>()).collect();
    each_subcommand(command(), &|top, subcommand| {
        let layered = LAYERED.contains(&top);
        subcommand.mut_args(config::options::environment).mut_args(|arg| {
            match layered && options.contains(arg.get_id()) {
                true => arg.default_value(Resettable::Reset),
                false => arg,
            }
        })
    })
}

fn options_of<O: Args>() -> impl Iterator<Item = clap::Id> {
    config::options::definitions::<O>().into_iter().map(|arg| arg.get_id().clone())
}

impl Command {
    fn layer(&mut self) -> Option<&mut PipelineArgs> {
        match self {
            Command::Run(args) => Some(args),
            Command::Check(args) => Some(&mut args.pipelines),
            Command::Init(args) => {
                args.pipelines.without_sink = true;
                Some(&mut args.pipelines)
            }
            Command::Confirm(args) => Some(&mut args.pipelines),
            Command::Dlq { command } => Some(command.layer()),
            Command::Prune(args) => {
                args.pipelines.without_sink = true;
                Some(&mut args.pipelines)
            }
            Command::Position { command } => Some(command.layer()),
            _ => None,
        }
    }
}

impl PipelineArgs {
    /// What clap's derive cannot say.
    fn complete(&mut self, given: &ArgMatches) -> Result<(), clap::Error> {
        let source_of = |id: &str| given.value_source(id);
        // `--create-topics postgres://…`: an optional value must not swallow SOURCE.
        // With a SOURCE beside it, it stays where it is and is refused.
        if source_of("source") != Some(ValueSource::CommandLine)
            && let Some(url) = self.pipeline.create_topics.take_if(|value| value.contains("://"))
        {
            self.pipeline.source = Some(url.into());
            self.pipeline.create_topics = Some("true".to_owned());
        }
        // Settings may hold commas, semicolons and whatever else could part them: in the environment a line break does.
        if source_of("kafka") == Some(ValueSource::EnvVariable) {
            let whole = self.pipeline.kafka.drain(..).map(|one| format!("{}={}", one.key, one.value));
            let lines = whole.collect::<Vec<_>>().join("\n");
            let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
            self.pipeline.kafka = lines.map(str::parse).collect::<Result<_, _>>().map_err(|what| {
                let message = format!("OUTBOXD_KAFKA: on each line {what}");
                clap::Error::raw(ErrorKind::ValueValidation, message)
            })?;
        }
        let definitions = config::options::definitions::<PipelineOptions>();
        let said = |by: ValueSource| {
            let of = definitions.iter().filter(|arg| source_of(arg.get_id().as_str()) == Some(by));
            of.map(|arg| arg.get_long().map_or_else(|| "SOURCE".to_owned(), |long| format!("--{long}"))).collect()
        };
        self.pipeline_flags = said(ValueSource::CommandLine);
        self.pipeline_variables = said(ValueSource::EnvVariable);
        Ok(())
    }

    fn settings(self) -> Result<Settings, Halt> {
        let PipelineArgs { pipeline, process, pipeline_flags, pipeline_variables, without_sink } = self;
        Ok(Settings::load(Said { pipeline, process, pipeline_flags, pipeline_variables, without_sink })?)
    }
}

/// Carries out a command.
pub fn execute(cli: Cli) -> Result<ExitCode, Halt> {
    match cli.command {
        Command::Run(args) => {
            let settings = args.settings()?;
            logging::start(settings.process.log_format);
            block_on(run::run(settings))
        }
        Command::Check(CheckArgs { pipelines, json }) => {
            let settings = pipelines.settings()?;
            logging::start_quietly(settings.process.log_format);
            block_on(check::run(settings, json))
        }
        Command::Init(InitArgs { pipelines, init }) => {
            let settings = pipelines.settings()?;
            logging::start_quietly(settings.process.log_format);
            block_on(init::run(settings, init))
        }
        Command::Confirm(args) => confirm::execute(args),
        Command::Status(args) => block_on(status::run(args)),
        Command::Lag(args) => block_on(status::lag(args)),
        Command::Pause(args) => block_on(order::run(args, "pause")),
        Command::Resume(args) => block_on(order::run(args, "resume")),
        Command::Position { command } => position::execute(command),
        Command::Dlq { command } => dlq::execute(command),
        Command::Prune(prune::PruneArgs { pipelines, prune }) => {
            let settings = pipelines.settings()?;
            logging::start_quietly(settings.process.log_format);
            block_on(prune::run(settings, prune))
        }
        Command::Demo(args) => {
            // The demo speaks for itself.
            if std::env::var_os("RUST_LOG").is_some() {
                logging::start(Some(config::LogFormat::Text));
            }
            block_on(demo::run(args))
        }
        Command::Completions { shell } => print(&completions::script(shell)),
        Command::Man { to: Some(folder), .. } => man::write_all(&folder),
        Command::Man { subcommand, .. } => print(&man::page(subcommand.as_deref())?),
        Command::ConfigReference => print(config::reference::markdown().as_bytes()),
    }
}

fn block_on(command: impl Future<Output = Result<ExitCode, Halt>>) -> Result<ExitCode, Halt> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| unexpected(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(command)
}

/// Writes to stdout. A reader that has seen enough, like `head`, is no failure.
fn print(bytes: &[u8]) -> Result<ExitCode, Halt> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(unexpected(format!("cannot write to stdout: {error}")))
        }
        _ => Ok(ExitCode::Done),
    }
}

fn unexpected(what: String) -> Halt {
    Halt { code: ExitCode::Unexpected, what, remedy: String::new() }
}

#[cfg(test)]
mod tests;
