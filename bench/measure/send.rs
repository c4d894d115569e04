//! The bare client of a sink: the same bodies, by the same library, in the same batches and lanes, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct Options {
    /// An http:// or amqp:// address
    sink: String,
    #[arg(long)]
    rows: u64,
    #[arg(long)]
    payload: usize,
    #[arg(long)]
    batch: u64,
    #[arg(long)]
    lanes: u64,
}

/// A payload of the bench's outbox.
fn payload(n: u64, bytes: usize) -> String {
    let note = bytes.saturating_sub(18 + n.to_string().len());
    let digits: String = (0..note).map(|at| char::from(b"0123456789abcdef"[(n as usize * 31 + at * 7) % 16])).collect();
    format!("{{\"n\": {n}, \"note\": \"{digits}\"}}")
}

pub async fn run(options: &Options) -> anyhow::Result<Value> {
    let sent = Arc::new(AtomicU64::new(0));
    match options.sink.starts_with("amqp") {
        true => publish(options, &sent).await?,
        false => post(options, &sent).await?,
    }
    Ok(json!({ "sent": sent.load(Ordering::Relaxed) }))
}

/// The rows of a lane, batch by batch; made beforehand, as a relay has them in its log.
fn batches(options: &Options, lane: u64) -> Vec<Vec<String>> {
    let rows: Vec<u64> = (1..=options.rows).filter(|n| n % options.lanes == lane).collect();
    let made = |rows: &[u64]| rows.iter().map(|n| payload(*n, options.payload)).collect();
    rows.chunks(options.batch as usize).map(made).collect()
}

async fn post(options: &Options, sent: &Arc<AtomicU64>) -> anyhow::Result<()> {
    let client = reqwest::Client::builder().pool_max_idle_per_host(options.lanes as usize).build()?;
    let mut lanes = tokio::task::JoinSet::new();
    for lane in 0..options.lanes {
        let (client, url, batches, sent) = (client.clone(), options.sink.clone(), batches(options, lane), sent.clone());
        lanes.spawn(async move {
            for batch in batches {
                let body = format!("[{}]", batch.join(","));
                let request = client.post(&url).header("content-type", "application/json").body(body);
                let answer = request.send().await?;
                ensure!(answer.status().is_success(), "{}", answer.status());
                answer.bytes().await?;
                sent.fetch_add(batch.len() as u64, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    while let Some(lane) = lanes.join_next().await {
        lane??;
    }
    Ok(())
}

async fn publish(options: &Options, sent: &Arc<AtomicU64>) -> anyhow::Result<()> {
    let connection = Connection::connect(&options.sink, ConnectionProperties::default()).await?;
    let mut lanes = tokio::task::JoinSet::new();
    for lane in 0..options.lanes {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let (batches, sent) = (batches(options, lane), sent.clone());
        lanes.spawn(async move {
            let properties =
                BasicProperties::default().with_delivery_mode(2).with_content_type("application/json".into());
            for batch in batches {
                let mut confirms = Vec::with_capacity(batch.len());
                for body in &batch {
                    let published = channel.basic_publish(
                        "outbox".into(),
                        "bench".into(),
                        BasicPublishOptions::default(),
                        body.as_bytes(),
                        properties.clone(),
                    );
                    confirms.push(published.await?);
                }
                for confirm in confirms {
                    ensure!(confirm.await?.is_ack(), "a message was not confirmed");
                }
                sent.fetch_add(batch.len() as u64, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    while let Some(lane) = lanes.join_next().await {
        lane.context("a lane died")??;
    }
    Ok(())
}
