//! Starts a relay over a backlog and times it by the topic's high watermarks, as anyone who waits for the records
//! would see it. Afterwards the topic is read: every row must be there, and the first occurrences of each key in order.
//!
//! The relay may be any program that writes the rows' payloads to the topic; it must not fork, for its own
//! process id is what is measured.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::resource::UsageWho;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdkafka::{Message as _, Offset};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::process::{Walsender, cpu_seconds, load_average, peak_mib, used_seconds};
use crate::topic::Topic;

/// How exactly the first record's time is known.
const FIRST_LOOKS: Duration = Duration::from_millis(5);
/// How exactly the last one's; rarer, to leave the broker alone.
const LATER_LOOKS: Duration = Duration::from_millis(25);
const EXIT_PATIENCE: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub relay: Relay,
    #[arg(long)]
    rows: u64,
    /// Give up after this many seconds
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    /// The relay ends by itself when all is delivered; otherwise it is sent SIGTERM
    #[arg(long)]
    ends: bool,
    /// Also report the CPU time of this process, the broker's say
    #[arg(long, value_name = "PID")]
    broker: Option<u32>,
    /// And of this one, the database's
    #[arg(long, value_name = "PID")]
    server: Option<u32>,
}

/// Where a relay reads and writes, and what starts it.
#[derive(clap::Args)]
pub struct Relay {
    /// The database, for looking at the walsender
    #[arg(long)]
    pub source: String,
    #[arg(long)]
    pub slot: Option<String>,
    #[arg(long)]
    pub brokers: String,
    /// Made anew; must not exist
    #[arg(long)]
    pub topic: String,
    #[arg(long, default_value_t = 6)]
    pub partitions: i32,
    /// The relay's output goes here
    #[arg(long, default_value = "/dev/null")]
    log: PathBuf,
    #[arg(last = true)]
    pub command: Vec<String>,
}

impl Relay {
    pub fn start(&self) -> anyhow::Result<Running> {
        Running::start(&self.command, &self.log)
    }
}

/// A relay that does not outlive its measurement.
pub struct Running(Child);

impl Running {
    pub fn start(command: &[String], log: &Path) -> anyhow::Result<Self> {
        let (program, arguments) = command.split_first().context("no command to start")?;
        let log = File::create(log).with_context(|| log.display().to_string())?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Running(command.spawn().with_context(|| program.clone())?))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    pub fn terminate(&self) -> anyhow::Result<()> {
        Ok(kill(Pid::from_raw(i32::try_from(self.pid())?), Signal::SIGTERM)?)
    }

    pub fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + EXIT_PATIENCE;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("the relay does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub async fn run(options: &Options) -> anyhow::Result<Value> {
    let relay = &options.relay;
    let topic = Topic::create(&relay.brokers, &relay.topic, relay.partitions).await?;
    let mut walsender = match &relay.slot {
        Some(slot) => Some(Walsender::new(crate::connect(&relay.source).await?, slot)),
        None => None,
    };
    let broker_before = options.broker.and_then(cpu_seconds);
    let server_before = options.server.and_then(cpu_seconds);
    let began = Instant::now();
    let mut running = relay.start()?;
    let (mut peak, mut server_cpu) = (None, None);
    // When the first record was seen, and how many with it.
    let mut first: Option<(Instant, u64)> = None;
    let last = loop {
        let records = topic.records()?;
        let now = Instant::now();
        if records > 0 && first.is_none() {
            first = Some((now, records));
        }
        peak = peak_mib(running.pid()).or(peak);
        if let Some(walsender) = &mut walsender {
            server_cpu = walsender.look().await?;
        }
        if records >= options.rows {
            break now;
        }
        if let Some(status) = running.ended()? {
            // What it delivered just before it ended may not have been seen.
            if topic.records()? >= options.rows {
                break now;
            }
            bail!("the relay ended ({status}) after {records} of {} records", options.rows);
        }
        if began.elapsed() > Duration::from_secs(options.timeout) {
            bail!("{records} of {} records after {} s", options.rows, options.timeout);
        }
        tokio::time::sleep(if first.is_some() { LATER_LOOKS } else { FIRST_LOOKS }).await;
    };
    let broker_after = options.broker.and_then(cpu_seconds);
    let server_after = options.server.and_then(cpu_seconds);
    if !options.ends {
        running.terminate()?;
    }
    let status = running.wait()?;
    let exit_s = began.elapsed().as_secs_f64();
    let cpu = used_seconds(UsageWho::RUSAGE_CHILDREN)?;
    let load_average = load_average();
    let (first, at_first) = first.unwrap_or((last, 0));
    let found = read_back(&topic, options.rows)?;
    let millions = options.rows as f64 / 1e6;
    let broker_cpu = broker_after.zip(broker_before).map(|(after, before)| (after - before) / millions);
    let whole_server = server_after.zip(server_before).map(|(after, before)| (after - before) / millions);
    Ok(json!({
        "rows": options.rows,
        "missing": found.missing,
        "duplicates": found.duplicates,
        "disordered": found.disordered,
        "first_s": (first - began).as_secs_f64(),
        "wall_s": (last - began).as_secs_f64(),
        "exit_s": exit_s,
        "exit": status.to_string(),
        "rows_s": (options.rows - at_first.min(options.rows)) as f64 / (last - first).as_secs_f64().max(1e-9),
        "wall_rows_s": options.rows as f64 / (last - began).as_secs_f64(),
        "cpu_s_per_m": cpu / millions,
        "walsender_cpu_s_per_m": server_cpu.map(|cpu| cpu / millions),
        "broker_cpu_s_per_m": broker_cpu,
        "server_cpu_s_per_m": whole_server,
        "peak_rss_mib": peak,
        "load_average": load_average,
    }))
}

/// The part of a payload that tells which row it was; rows are numbered from 1 in commit order.
#[derive(Deserialize)]
pub struct Numbered {
    pub n: i64,
}

struct Found {
    missing: u64,
    duplicates: u64,
    /// First occurrences that came after a later row of the same key.
    disordered: u64,
}

fn read_back(topic: &Topic, rows: u64) -> anyhow::Result<Found> {
    let there = topic.records()?;
    topic.assign(Offset::Beginning)?;
    let mut seen = vec![false; usize::try_from(rows)? + 1];
    let mut latest: HashMap<Vec<u8>, i64> = HashMap::new();
    let mut found = Found { missing: rows, duplicates: 0, disordered: 0 };
    for read in 0..there {
        let message = topic
            .consumer
            .poll(Duration::from_secs(20))
            .with_context(|| format!("only {read} of {there} records can be read back"))??;
        let Numbered { n } = serde_json::from_slice(message.payload().unwrap_or_default())?;
        let place = usize::try_from(n).ok().and_then(|n| seen.get_mut(n)).context("a record that was never loaded")?;
        if std::mem::replace(place, true) {
            found.duplicates += 1;
            continue;
        }
        found.missing -= 1;
        match latest.get_mut(message.key().unwrap_or_default()) {
            Some(latest) if *latest > n => found.disordered += 1,
            Some(latest) => *latest = n,
            None => {
                latest.insert(message.key().unwrap_or_default().to_owned(), n);
            }
        }
    }
    Ok(found)
}
