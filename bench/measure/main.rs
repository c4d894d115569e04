//! The measuring instruments of `bench/run`, in a program of their own so that they cost the machine little while
//! they measure: two cores are shared by database, broker, relay and this.
//!
//! ```text
//!   sql        run statements, print their rows
//!   drain      read a slot's stream and discard it: the limit that the server sets
//!   binlog     the same for a binary log, decoding every row or none
//!   documents  fill a MongoDB outbox
//!   changes    read a change stream and discard it
//!   claim      claim and mark the rows of a polled table, and deliver nothing
//!   backlog    start a relay over a backlog and time it by the topic's high watermarks
//!   latency    commit rows at a steady rate and time each until a consumer has it
//!   receive    start a sender to HTTP or RabbitMQ and time what arrives
//!   send       the bare client of either
//! ```
//!
//! Each prints one JSON object and knows nothing of targets, repetitions or servers' lives: `bench/run` does.

mod backlog;
mod binlog;
mod change_stream;
mod claim;
mod database;
mod drain;
mod latency;
mod process;
mod receive;
mod send;
mod topic;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use outboxd::source::postgres::conninfo::ConnInfo;
use outboxd::source::postgres::sql::{self, SqlSession};
use serde_json::{Value, json};

use database::Database;

#[derive(Parser)]
#[command(about = "Measuring instruments of bench/run")]
struct Arguments {
    #[command(subcommand)]
    instrument: Instrument,
}

#[derive(Subcommand)]
enum Instrument {
    /// Run statements one by one and print the rows of the last as a JSON array of arrays.
    Sql { source: String, statements: Vec<String> },
    /// Read a slot's stream and discard it.
    Drain(drain::Options),
    /// Read a binary log and discard it.
    Binlog(binlog::Options),
    /// Fill a MongoDB outbox.
    Documents(change_stream::LoadOptions),
    /// Read a change stream and discard it.
    Changes(change_stream::DrainOptions),
    /// Claim and mark the rows of a polled table.
    Claim(claim::Options),
    /// Start a relay over a backlog and time it.
    Backlog(backlog::Options),
    /// Time single rows from commit to consumer.
    Latency(latency::Options),
    /// Start a sender to HTTP or RabbitMQ and time what arrives.
    Receive(receive::Options),
    /// Send to HTTP or RabbitMQ, and nothing else.
    Send(send::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().instrument {
        Instrument::Sql { source, statements } => block_on(run_statements(&source, &statements)),
        Instrument::Drain(options) => block_on(drain::run(&options)),
        Instrument::Binlog(options) => block_on(binlog::run(&options)),
        Instrument::Documents(options) => block_on(change_stream::load(&options)),
        Instrument::Changes(options) => block_on(change_stream::drain(&options)),
        Instrument::Claim(options) => block_on(claim::run(&options)),
        Instrument::Backlog(options) => block_on(backlog::run(&options)),
        Instrument::Latency(options) => latency::run(&options),
        Instrument::Receive(options) => block_on_all(receive::run(&options)),
        Instrument::Send(options) => block_on_all(send::run(&options)),
    };
    match result {
        Ok(measured) => {
            println!("{measured}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("measure: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// With every core, as the program that it is compared with.
fn block_on_all<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}

async fn connect(source: &str) -> anyhow::Result<SqlSession> {
    let info = ConnInfo::parse(source)?;
    Ok(sql::connect(&info).await?)
}

async fn run_statements(source: &str, statements: &[String]) -> anyhow::Result<Value> {
    let mut database = Database::connect(source).await?;
    let mut rows = Vec::new();
    for statement in statements {
        rows = database.query(statement).await.with_context(|| statement.clone())?;
    }
    Ok(json!(rows))
}
