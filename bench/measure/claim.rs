//! A bare loop that claims a batch and marks it, and delivers nothing: with the statements that outboxd uses, one after the
//! other on one connection. What it reaches is what a poller can reach at the most that does one thing at a time.

use std::time::Instant;

use anyhow::{Context as _, bail};
use nix::sys::resource::UsageWho;
use outboxd::config::{Capture, PipelineOptions, Said, Secret, Settings};
use outboxd::event::Chunk;
use outboxd::route::Plans;
use outboxd::source::poll::ledger::Ledger;
use outboxd::source::poll::{Ask, Store};
use serde_json::{Value, json};

use crate::process::{cpu_seconds, load_average, used_seconds};

#[derive(clap::Args)]
pub struct Options {
    source: String,
    #[arg(long)]
    layout: String,
    #[arg(long)]
    rows: usize,
    /// Also report the CPU time of this process, the server's say
    #[arg(long, value_name = "PID")]
    server: Option<u32>,
}

pub async fn run(options: &Options) -> anyhow::Result<Value> {
    let said = PipelineOptions {
        source: Some(Secret::from(options.source.clone())),
        capture: Some("poll".to_owned()),
        layout: Some(options.layout.clone()),
        brokers: Some("embedded".to_owned()),
        ..PipelineOptions::default()
    };
    let said = Said { pipeline: said.over(PipelineOptions::defaults()), ..Said::default() };
    let settings = Settings::resolve(said, None)?;
    let pipeline = settings.pipelines.first().context("there is one pipeline")?;
    let Capture::Poll(polling) = &pipeline.capture else { bail!("the layout has no status columns") };
    let plans = Plans::compile(pipeline).map_err(|halt| anyhow::anyhow!("{halt}"))?;
    let mut store = Store::open(pipeline, polling, &plans.projection, "bench").await?;
    store.lead().await?;
    let ledger = Ledger::new(polling.patience);
    let server_before = options.server.and_then(cpu_seconds);
    let cpu_began = used_seconds(UsageWho::RUSAGE_SELF)?;
    let began = Instant::now();
    let (mut rows, mut marks, mut claims) = (0, 0, 0);
    let mut chunk = Chunk::default();
    while rows < options.rows {
        let (number, excluded) = ledger.begin_claim(0);
        chunk.reset(plans.projection.width());
        chunk.begin_commit(outboxd::event::Commit {
            id: outboxd::event::CommitId::Polled(number),
            committed_at: outboxd::event::Micros::now(),
        });
        let ask = Ask { table: 0, limit: polling.batch, failed: false, ledger: &ledger };
        let claimed = store.claim(&ask, &excluded, &mut chunk).await?;
        let count = claimed.len();
        ledger.claimed(number, 0, claimed, !polling.scheme.claims());
        if count == 0 {
            bail!("{rows} of {} rows were pending", options.rows);
        }
        (rows, claims) = (rows + count, claims + 1);
        ledger.confirm(number);
        while let Some(batch) = ledger.unmarked() {
            marks += store.mark(&batch).await?;
            ledger.marked();
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let server = options.server.and_then(cpu_seconds).zip(server_before).map(|(after, before)| after - before);
    let million = rows as f64 / 1e6;
    Ok(json!({
        "rows": rows,
        "rows_s": (rows as f64 / seconds).round(),
        "claims": claims,
        "marks": marks,
        "cpu_s_per_m": (used_seconds(UsageWho::RUSAGE_SELF)? - cpu_began) / million,
        "server_cpu_s_per_m": server.map(|server| server / million),
        "load_average": load_average(),
    }))
}
