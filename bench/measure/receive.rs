//! Takes what a relay, or a bare client, sends to a sink that is not Kafka, and times it from the first event to the last.
//!
//! The word `SINK` in the command stands for the address of this instrument's server.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use futures_util::StreamExt as _;
use lapin::options::{BasicConsumeOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties, ExchangeKind};
use nix::sys::resource::UsageWho;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::backlog::{Numbered, Running};
use crate::process::{load_average, peak_mib, used_seconds};

#[derive(clap::Args)]
pub struct Options {
    /// A RabbitMQ server to receive from; else an HTTP server is started
    #[arg(long)]
    rabbitmq: Option<String>,
    #[arg(long)]
    rows: u64,
    /// How long the HTTP server takes for a request, in milliseconds
    #[arg(long, default_value_t = 0)]
    service: u64,
    /// Rows of a payload have this key, modulo which they must be in order
    #[arg(long, default_value_t = 10_000)]
    keys: i64,
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    #[arg(long, default_value = "/dev/null")]
    log: std::path::PathBuf,
    #[arg(last = true)]
    command: Vec<String>,
}

/// What has arrived.
struct Taken {
    events: AtomicU64,
    order: Mutex<Order>,
    keys: i64,
    service: Duration,
}

#[derive(Default)]
struct Order {
    first: Option<Instant>,
    last: Option<Instant>,
    at_first: u64,
    /// The latest row of each key.
    latest: HashMap<i64, i64>,
    repeated: u64,
}

impl Taken {
    fn take(&self, numbers: &[i64]) {
        let now = Instant::now();
        let mut order = self.order.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if order.first.is_none() {
            (order.first, order.at_first) = (Some(now), numbers.len() as u64);
        }
        order.last = Some(now);
        let mut new = 0;
        for n in numbers {
            // A row may come again, and then all that follow it; it never comes before one that is older.
            let latest = order.latest.entry(n % self.keys).or_default();
            if *n <= *latest {
                order.repeated += 1;
            } else {
                *latest = *n;
                new += 1;
            }
        }
        self.events.fetch_add(new, Ordering::Release);
    }
}

async fn taken_by_http(State(taken): State<Arc<Taken>>, body: Bytes) -> &'static str {
    let rows: Vec<Numbered> = serde_json::from_slice(&body).unwrap_or_default();
    if !taken.service.is_zero() {
        tokio::time::sleep(taken.service).await;
    }
    taken.take(&rows.iter().map(|row| row.n).collect::<Vec<_>>());
    "{}"
}

pub async fn run(options: &Options) -> anyhow::Result<Value> {
    let taken = Arc::new(Taken {
        events: AtomicU64::new(0),
        order: Mutex::default(),
        keys: options.keys,
        service: Duration::from_millis(options.service),
    });
    let address = match &options.rabbitmq {
        Some(url) => {
            consume(url, taken.clone()).await?;
            url.clone()
        }
        None => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let address = listener.local_addr()?;
            let routes = Router::new().fallback(taken_by_http).with_state(taken.clone());
            tokio::spawn(async move { axum::serve(listener, routes).await });
            format!("http://{address}/")
        }
    };
    let command: Vec<_> =
        options.command.iter().map(|word| if word == "SINK" { address.clone() } else { word.clone() }).collect();
    let own_before = used_seconds(UsageWho::RUSAGE_SELF)?;
    let began = Instant::now();
    let mut running = Running::start(&command, &options.log)?;
    let mut peak = None;
    loop {
        peak = peak_mib(running.pid()).or(peak);
        let events = taken.events.load(Ordering::Acquire);
        if events >= options.rows {
            break;
        }
        if running.ended()?.is_some_and(|status| !status.success())
            || began.elapsed() > Duration::from_secs(options.timeout)
        {
            bail!("{events} of {} events after {:?}", options.rows, began.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let status = tokio::task::block_in_place(|| running.wait())?;
    let order = taken.order.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (first, last) = order.first.zip(order.last).context("nothing arrived")?;
    let millions = options.rows as f64 / 1e6;
    Ok(json!({
        "rows": options.rows,
        "missing": options.rows.saturating_sub(taken.events.load(Ordering::Acquire)),
        "repeated": order.repeated,
        "first_s": (first - began).as_secs_f64(),
        "rows_s": (options.rows - order.at_first) as f64 / (last - first).as_secs_f64().max(1e-9),
        "cpu_s_per_m": used_seconds(UsageWho::RUSAGE_CHILDREN)? / millions,
        "receiver_cpu_s_per_m": (used_seconds(UsageWho::RUSAGE_SELF)? - own_before) / millions,
        "peak_rss_mib": peak,
        "exit": status.to_string(),
        "load_average": load_average(),
    }))
}

/// Consumes from a queue of its own, as any consumer would.
async fn consume(url: &str, taken: Arc<Taken>) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let (none, durable) = (FieldTable::default(), ExchangeDeclareOptions { durable: true, ..Default::default() });
    channel.exchange_declare("outbox".into(), ExchangeKind::Topic, durable, none.clone()).await?;
    let exclusive = QueueDeclareOptions { exclusive: true, ..Default::default() };
    let queue = channel.queue_declare("".into(), exclusive, none.clone()).await?;
    channel
        .queue_bind(queue.name().clone(), "outbox".into(), "#".into(), QueueBindOptions::default(), none.clone())
        .await?;
    let unacknowledged = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let mut messages = channel.basic_consume(queue.name().clone(), "bench".into(), unacknowledged, none).await?;
    tokio::spawn(async move {
        // Open as long as somebody consumes.
        let _connection = connection;
        while let Some(Ok(message)) = messages.next().await {
            if let Ok(Numbered { n }) = serde_json::from_slice(&message.data) {
                taken.take(&[n]);
            }
        }
    });
    Ok(())
}
