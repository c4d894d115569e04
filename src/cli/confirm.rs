//! `outboxd confirm`: a confirmer for every pipeline of the configuration whose rows keep receipts, until stopped.

use std::sync::Arc;

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args};
use tokio::task::JoinSet;

use super::choose;
use super::run::see_through;
use super::{PipelineArgs, block_on, logging};
use crate::admin;
use crate::config::{self, ConfirmOptions, ProcessSettings};
use crate::confirm::{self, ConfirmSettings, status::Metrics};
use crate::failure::{ExitCode, Halt};
use crate::pipeline::Stop;

pub(super) const EXAMPLES: &str = "\
Examples:
  outboxd confirm postgres://app@db/zones --brokers k1:9092
  outboxd confirm mysql://app@db/zones --brokers k1:9092 --topic zone.events \\
      --id-from json:/header/id
  outboxd confirm --config /etc/outboxd.toml --name zones

The flags of source, routing and Kafka are those of `run`, whose topics it
reads; with --config it confirms for every pipeline whose layout keeps
receipts. Start it as often as you like: instances share the partitions.";

#[derive(Debug, Args)]
pub struct ConfirmArgs {
    #[command(flatten)]
    pub(super) pipelines: PipelineArgs,
    #[command(flatten)]
    confirm: ConfirmOptions,
}

/// What only a relay needs is not shown, and a topic may be named as often as there are topics.
pub(super) fn shape(command: clap::Command) -> clap::Command {
    const OF_RELAYS: [&str; 5] = ["HTTP", "RabbitMQ", "Polling", "Selection", "Delivery"];
    const ALSO: [&str; 13] = [
        "capture",
        "slot",
        "publication",
        "no_create",
        "message_prefix",
        "snapshot",
        "start",
        "server_id",
        "extended_json",
        "header",
        "tombstone_on_null",
        "no_standby",
        "unsafe_settings",
    ];
    let help = "Topic that the relay delivers to; repeatable [default: the pipeline's, else the layout's]";
    let topics = |arg: clap::Arg| arg.action(ArgAction::Append).value_delimiter(',').help(help);
    let layout = |arg: clap::Arg| arg.default_value("produce-receive");
    command.mut_arg("topic", topics).mut_arg("layout", layout).mut_args(|arg| {
        let heading = arg.get_help_heading().unwrap_or_default();
        let hidden = OF_RELAYS.contains(&heading) || ALSO.contains(&arg.get_id().as_str());
        if hidden { arg.hide(true) } else { arg }
    })
}

impl ConfirmArgs {
    /// Puts what was said of confirming where the layers of the configuration are.
    pub(super) fn complete(&mut self, given: &ArgMatches) {
        let pipelines = &mut self.pipelines;
        pipelines.pipeline.confirm = self.confirm.clone();
        let said = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
        let flags =
            config::options::definitions::<ConfirmOptions>().into_iter().filter(|arg| said(arg.get_id().as_str()));
        pipelines.pipeline_flags.extend(flags.filter_map(|arg| arg.get_long().map(|long| format!("--{long}"))));
        let topics: Vec<String> = given.get_many("topic").into_iter().flatten().cloned().collect();
        match said("topic") {
            // What stands here means the confirmer, whatever the file says.
            true => (pipelines.pipeline.topic, pipelines.pipeline.confirm.topic) = (None, topics),
            false if !topics.is_empty() => pipelines.pipeline.topic = Some(topics.join(",")),
            false => {}
        }
        if pipelines.process.config.is_none() && pipelines.pipeline.layout.is_none() {
            pipelines.pipeline.layout = Some("produce-receive".to_owned());
        }
    }
}

pub(super) fn execute(args: ConfirmArgs) -> Result<ExitCode, Halt> {
    let config::Settings { process, pipelines } = choose::settings(&args.pipelines)?;
    logging::start(process.log_format);
    let wanted = ConfirmSettings::of_all(&pipelines)?;
    block_on(run(process, wanted))
}

async fn run(process: ProcessSettings, wanted: Vec<ConfirmSettings>) -> Result<ExitCode, Halt> {
    let metrics = Metrics::default();
    let wanted: Vec<_> = wanted.into_iter().map(|one| (Arc::new(metrics.status(&one)), Arc::new(one))).collect();
    if let Some((listener, _)) = admin::bind(&process.admin).await? {
        let statuses = wanted.iter().map(|(status, _)| status.clone()).collect();
        tokio::spawn(confirm::admin::serve(listener, metrics, statuses));
    }
    let (stopper, stop) = Stop::new();
    let mut running = JoinSet::new();
    for (status, settings) in wanted {
        let stop = stop.clone();
        running.spawn(async move { (settings.name.clone(), confirm::run(&settings, &status, &stop).await) });
    }
    see_through(running, stopper, process.fail_fast).await
}
