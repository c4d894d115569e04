//! A bare reader of a MongoDB change stream, which discards it: all of it, or what outboxd asks for. What it reaches is the
//! limit that the server sets. And the backlog that is read, since documents are not loaded by statements.

use std::time::Instant;

use anyhow::{Context as _, bail};
use futures_util::StreamExt as _;
use mongodb::Client;
use mongodb::bson::{DateTime, Document, Timestamp, doc};
use nix::sys::resource::UsageWho;
use serde_json::{Value, json};

use crate::latency::payload;
use crate::process::{cpu_seconds, load_average, used_seconds};

/// As many events as outboxd asks for at once.
const BATCH: u32 = 5000;

#[derive(clap::Args)]
pub struct LoadOptions {
    /// Its database is where the outbox is
    source: String,
    #[arg(long)]
    rows: i64,
    #[arg(long)]
    rows_per_commit: i64,
    /// Bytes of each payload
    #[arg(long)]
    payload: usize,
    /// With the fields that polling needs
    #[arg(long)]
    pending: bool,
}

/// Fills the outbox, a transaction after the other; prints the cluster time before them.
pub async fn load(options: &LoadOptions) -> anyhow::Result<Value> {
    let client = Client::with_uri_str(&options.source).await?;
    let database = client.default_database().context("the address names no database")?;
    let outbox = database.collection::<Document>("outbox");
    let begin = database.run_command(doc! { "ping": 1 }).await?.get_timestamp("operationTime")?;
    let began = Instant::now();
    let mut session = client.start_session().await?;
    for before in (0..options.rows).step_by(options.rows_per_commit as usize) {
        let numbers = before + 1..=options.rows.min(before + options.rows_per_commit);
        let documents = numbers.map(|n| document(&(n % 10_000).to_string(), &payload(n, options.payload)));
        let mut documents = documents.collect::<anyhow::Result<Vec<_>>>()?;
        for (at, document) in documents.iter_mut().enumerate().filter(|_| options.pending) {
            // Its moment is the order of a document.
            let moment = DateTime::from_millis(before + at as i64);
            document.extend(doc! { "status": "pending", "attempts": 0, "created_at": moment });
        }
        if options.rows_per_commit == 1 || options.pending {
            outbox.insert_many(documents).await?;
            continue;
        }
        session.start_transaction().await?;
        outbox.insert_many(documents).session(&mut session).await?;
        session.commit_transaction().await?;
    }
    Ok(json!({
        "rows": options.rows,
        "seconds": began.elapsed().as_secs_f64(),
        "begin": format!("{}:{}", begin.time, begin.increment),
    }))
}

/// One outbox document; the payload is JSON.
pub fn document(key: &str, payload: &str) -> anyhow::Result<Document> {
    let payload: Document = serde_json::from_str(payload)?;
    let now = DateTime::now();
    Ok(doc! { "partition_key": key, "event_type": "OrderCreated", "payload": payload, "created_at": now })
}

#[derive(clap::Args)]
pub struct DrainOptions {
    source: String,
    /// A cluster time, `seconds:increment`
    #[arg(long)]
    from: String,
    #[arg(long)]
    rows: u64,
    /// Ask for what outboxd asks for, instead of everything
    #[arg(long)]
    project: bool,
    /// Also report the CPU time of this process, the server's say
    #[arg(long, value_name = "PID")]
    server: Option<u32>,
}

pub async fn drain(options: &DrainOptions) -> anyhow::Result<Value> {
    let (time, increment) = options.from.split_once(':').context("--from is seconds:increment")?;
    let from = Timestamp { time: time.parse()?, increment: increment.parse()? };
    let client = Client::with_uri_str(&options.source).await?;
    let database = client.default_database().context("the address names no database")?;
    let server_before = options.server.and_then(cpu_seconds);
    let began = Instant::now();
    let cpu_began = used_seconds(UsageWho::RUSAGE_SELF)?;
    let mut pipeline = vec![doc! { "$changeStream": { "startAtOperationTime": from } }];
    if options.project {
        let wanted = ["insert", "drop", "rename", "dropDatabase", "invalidate"];
        pipeline.push(doc! { "$match": { "operationType": { "$in": wanted.as_slice() } } });
        let fields = doc! {
            "operationType": 1, "clusterTime": 1, "wallTime": 1, "ns": 1, "to": 1, "splitEvent": 1, "fullDocument": 1,
        };
        pipeline.push(doc! { "$project": fields });
    }
    let command = doc! { "aggregate": "outbox", "pipeline": pipeline, "cursor": { "batchSize": BATCH } };
    let mut cursor = database.run_cursor_command(command).batch_size(BATCH).batch().await?;
    let (mut rows, mut bytes) = (0, 0);
    while rows < options.rows {
        let Some(batch) = cursor.next().await else { bail!("the stream ended after {rows} rows") };
        for event in batch?.doc_slices()? {
            bytes += event?.as_document().map_or(0, |event| event.as_bytes().len());
            rows += 1;
        }
    }
    let wall = began.elapsed().as_secs_f64();
    let cpu = used_seconds(UsageWho::RUSAGE_SELF)? - cpu_began;
    let server_cpu = options.server.and_then(cpu_seconds).zip(server_before).map(|(after, before)| after - before);
    let millions = rows as f64 / 1e6;
    Ok(json!({
        "rows": rows,
        "event_bytes": bytes as f64 / rows as f64,
        "wall_s": wall,
        "rows_s": rows as f64 / wall,
        "cpu_s_per_m": cpu / millions,
        "server_cpu_s_per_m": server_cpu.map(|cpu| cpu / millions),
        "load_average": load_average(),
    }))
}
