//! `outboxd run`: every pipeline of the configuration, until stopped or ended.

use std::sync::Arc;

use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::admin::{self, Guard, Observed};
use crate::cli::{logging, progress, unexpected};
use crate::config::{Brokers, Settings};
use crate::failure::{ExitCode, Halt};
use crate::metrics::Metrics;
use crate::pipeline::{self, Stop};
use crate::status::PipelineStatus;

/// Runs until all pipelines have ended. The code is the highest of theirs.
pub async fn run(mut settings: Settings) -> Result<ExitCode, Halt> {
    // Kept until the end: the in-process broker lives as long as this.
    let _embedded = embed_broker(&mut settings)?;
    let metrics = Metrics::default();
    let statuses: Vec<_> = settings.pipelines.iter().map(|pipeline| Arc::new(metrics.status(pipeline))).collect();
    if let Some((listener, address)) = admin::bind(&settings.process.admin).await? {
        let guard = Guard { token: settings.process.admin_token.clone(), loopback: address.ip().is_loopback() };
        let observed = Arc::new(Observed { metrics, pipelines: statuses.clone(), guard });
        tokio::spawn(admin::serve(listener, observed));
    }

    let shown = tokio::spawn(progress::watch(statuses.clone(), progress::Way::of(&settings)));
    let ended = relay(settings, statuses).await;
    // Before its bars are taken away it must not draw any more.
    shown.abort();
    let _ = shown.await;
    logging::clear_bars();
    ended
}

async fn relay(settings: Settings, statuses: Vec<Arc<PipelineStatus>>) -> Result<ExitCode, Halt> {
    let (stopper, stop) = Stop::new();
    let mut running = JoinSet::new();
    let all: Arc<[_]> = settings.pipelines.into();
    for (at, status) in statuses.into_iter().enumerate() {
        let (all, stop) = (all.clone(), stop.clone());
        running.spawn(async move { (all[at].name.clone(), pipeline::run(&all[at], &all, &status, &stop).await) });
    }
    see_through(running, stopper, settings.process.fail_fast).await
}

/// Waits until all have ended, by themselves or because the process was told to. The code is the highest of theirs.
pub(super) async fn see_through(
    mut running: JoinSet<(String, Result<(), Halt>)>,
    stopper: watch::Sender<bool>,
    fail_fast: bool,
) -> Result<ExitCode, Halt> {
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut worst: Option<Halt> = None;
    loop {
        tokio::select! {
            _ = terminate.recv() => stopper.send_replace(true),
            _ = interrupt.recv() => stopper.send_replace(true),
            ended = running.join_next() => match ended {
                None => break,
                Some(Err(died)) => return Err(unexpected(format!("a pipeline died: {died}"))),
                Some(Ok((name, Ok(())))) => {
                    tracing::info!(pipeline = name, "ended");
                    false
                }
                Some(Ok((name, Err(halt)))) => {
                    tracing::error!(pipeline = name, code = halt.code as u8, "{halt}");
                    if fail_fast {
                        stopper.send_replace(true);
                    }
                    if worst.as_ref().is_none_or(|worst| worst.code < halt.code) {
                        worst = Some(halt);
                    }
                    false
                }
            },
        };
    }
    worst.map_or(Ok(ExitCode::Done), Err)
}

fn no_signals(error: std::io::Error) -> Halt {
    unexpected(format!("cannot listen for signals: {error}"))
}

/// Starts the in-process broker where a pipeline asks for it, and puts its address in its place.
fn embed_broker(settings: &mut Settings) -> Result<Option<MockCluster<'static, DefaultProducerContext>>, Halt> {
    let mut asking: Vec<&mut Brokers> = Vec::new();
    for pipeline in &mut settings.pipelines {
        let publishers = pipeline.publishers.iter_mut().map(|publisher| &mut publisher.kafka.brokers);
        let all = publishers.chain(std::iter::once(&mut pipeline.kafka.brokers));
        asking.extend(all.filter(|brokers| **brokers == Brokers::Embedded));
    }
    if asking.is_empty() {
        return Ok(None);
    }
    let cluster = MockCluster::new(1).map_err(|error| unexpected(format!("no embedded broker: {error}")))?;
    let address = cluster.bootstrap_servers();
    tracing::info!(address, "started the embedded Kafka broker; what it holds ends with this process");
    for brokers in asking {
        *brokers = Brokers::Servers(address.clone());
    }
    Ok(Some(cluster))
}
