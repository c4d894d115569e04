//! `outboxd run`: every pipeline of the configuration, until stopped or ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::admin::{self, Guard, Observed, Revival, Watched};
use crate::cli::unexpected;
use crate::config::{Brokers, Settings};
use crate::failure::{ExitCode, Halt};
use crate::metrics::Metrics;
use crate::pipeline::{self, Stop};
use crate::status::State;

/// Runs until all pipelines have ended. The code is the highest of theirs.
pub async fn run(mut settings: Settings) -> Result<ExitCode, Halt> {
    // Kept until the end: the in-process broker lives as long as this.
    let _embedded = embed_broker(&mut settings)?;
    let metrics = Metrics::default();
    let watch = |pipeline| Watched { status: Arc::new(metrics.status(&pipeline)), settings: Arc::new(pipeline) };
    let watched: Vec<_> = settings.pipelines.into_iter().map(watch).collect();
    let (revive, mut revivals) = mpsc::channel(1);
    if let Some((listener, address)) = admin::bind(&settings.process.admin).await? {
        let guard = Guard { token: settings.process.admin_token.clone(), loopback: address.ip().is_loopback() };
        let observed = Observed::new(metrics, watched.clone(), guard, address, revive.clone());
        tokio::spawn(admin::serve(listener, Arc::new(observed)));
    }

    let (stopper, stop) = Stop::new();
    let mut running = JoinSet::new();
    let begin = |running: &mut JoinSet<_>, Watched { settings, status }: Watched| {
        let stop = stop.clone();
        running.spawn(async move { (settings.name.clone(), pipeline::run(&settings, &status, &stop).await) });
    };
    watched.iter().for_each(|one| begin(&mut running, one.clone()));
    // Those that have ended, and how.
    let mut ended: BTreeMap<String, Option<Halt>> = BTreeMap::new();
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    loop {
        tokio::select! {
            _ = terminate.recv() => { stopper.send_replace(true); }
            _ = interrupt.recv() => { stopper.send_replace(true); }
            Some(Revival { pipeline, reply }) = revivals.recv() => {
                let has_ended = ended.contains_key(&pipeline) && !*stopper.borrow();
                let one = watched.iter().find(|one| has_ended && one.settings.name == pipeline);
                if let Some(one) = one {
                    tracing::info!(pipeline, "runs again, as a person wants it");
                    ended.remove(&pipeline);
                    one.status.enter(State::Starting);
                    begin(&mut running, one.clone());
                }
                let _ = reply.send(one.is_some());
            }
            joined = running.join_next() => match joined {
                None => break,
                Some(Err(died)) => return Err(unexpected(format!("a pipeline died: {died}"))),
                Some(Ok((name, Ok(())))) => {
                    tracing::info!(pipeline = name, "ended");
                    ended.insert(name, None);
                }
                Some(Ok((name, Err(halt)))) => {
                    tracing::error!(pipeline = name, code = halt.code as u8, "{halt}");
                    if settings.process.fail_fast {
                        stopper.send_replace(true);
                    }
                    ended.insert(name, Some(halt));
                }
            },
        }
    }
    let worst = ended.into_values().flatten().max_by_key(|halt| halt.code);
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
