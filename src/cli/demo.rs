//! `outboxd demo`: a real database, a broker, a workload, the relay, and its death and return, with nothing to
//! configure.
//!
//! ```text
//!  writers ──COMMIT──▶  database  ──log──▶ outboxd run ──▶ Kafka ──▶ consumer
//!     │                (a process)        (a process,              (a thread)
//!     │                                    killed once)               │
//!     └───────── what was committed ──▶ ledger ◀── what arrived ──────┘
//! ```
//!
//! Everything that was started belongs to a value that ends it when dropped, so that every way out, also a signal,
//! leaves nothing behind.

mod broker;
mod installed;
mod ledger;
mod mongodb;
mod mongodb_program;
mod mysql;
mod mysql_program;
mod performance;
mod postgres;
mod programs;
mod relay_process;
mod report;
mod scratch;
mod shop;
mod workload;

use std::time::Instant;

use tokio::signal::unix::{SignalKind, signal};

use self::broker::Broker;
use self::ledger::{Arrival, Verdict};
use self::performance::Performance;
use self::relay_process::RelayProcess;
use self::report::{Stage, count, span};
use self::scratch::{Account, Scratch};
use self::shop::{Shop, Standing};
use self::workload::Outcome;
use super::{DemoArgs, unexpected};
use crate::failure::{ExitCode, Halt};

/// What the demo is told of while it runs.
enum Happening {
    /// A transaction has ended.
    Written(Outcome),
    /// A record was consumed.
    Arrived(Arrival),
}

pub async fn run(args: DemoArgs) -> Result<ExitCode, Halt> {
    let stage = Stage::new();
    let stopped = stopped()?;
    let broker = Broker::start(args.brokers.as_deref())?;
    // When a signal comes first the rest is dropped, and with it all that was started.
    let shown = tokio::select! {
        shown = Box::pin(show(&args, &broker, &stage)) => shown,
        () = stopped => {
            stage.close();
            stage.line("\nStopped; nothing is left running.");
            Ok(ExitCode::Done)
        }
    };
    broker.remove_topic().await;
    shown
}

/// Resolves when somebody wants the demo to end.
fn stopped() -> Result<impl Future<Output = ()>, Halt> {
    let listen = |kind| signal(kind).map_err(|error| unexpected(format!("cannot listen for signals: {error}")));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hang_up = listen(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    })
}

async fn show(args: &DemoArgs, broker: &Broker, stage: &Stage) -> Result<ExitCode, Halt> {
    let began = Instant::now();
    let database = shop::name(args.source);
    stage.line(stage.bold(format_args!("outboxd demo: orders from {database}'s log to Kafka, through a crash")));
    stage.heading("Starting");
    let account = Account::choose()?;
    let scratch = Scratch::create(&account)?;
    let shop = Shop::open(args, &account, &scratch, stage).await?;
    let owner = account.other().map_or_else(String::new, |user| format!(", run as {user}"));
    stage.line(format_args!("  {database:<10}  {} at {}{owner}", shop.version(), shop.url()));
    let whose = if broker.is_embedded() { "embedded in this process, " } else { "" };
    stage.line(format_args!("  Kafka       {whose}{}, topic {}", broker.servers(), broker.topic()));
    let mut relay = RelayProcess::new(&shop, broker, &scratch)?;
    relay.start()?;
    stage.during(&format!("Starting the relay, which {}", shop.relay_begins_with()), relay.ready()).await?;
    stage.line(format_args!("  Relay       process {}, http://{}/status", relay.pid(), relay.admin()));
    stage.line(stage.dim(format_args!("              $ {}", relay.command_line())));

    let mut performance = Performance::begin(&shop, broker, relay, stage).await?;
    let standing = performance.play().await?;
    let verdict = performance.verdict();
    sum_up(&verdict, &shop, &standing, began, stage);
    let mut broken = verdict.broken();
    if !standing.is_caught_up() {
        broken.push(format!("the confirmed position stays {} the log's end", shop.behind(&standing)));
    }
    if !broken.is_empty() {
        return Err(Halt {
            code: ExitCode::Unexpected,
            what: format!("a promise did not hold: {}; the relay's log:{}", broken.join("; "), performance.relay_log()),
            remedy: String::new(),
        });
    }
    if args.keep {
        keep(&mut performance, &shop, broker, stage).await?;
    }
    Ok(ExitCode::Done)
}

fn sum_up(verdict: &Verdict, shop: &Shop, standing: &Standing, began: Instant, stage: &Stage) {
    stage.close();
    let mark = |bad: usize, text: String| if bad == 0 { stage.good(text) } else { stage.bad(text) };
    stage.heading("Summary");
    let say = |what: &str, text: String| stage.line(format_args!("  {what:<13} {text}"));
    let transactions = count(verdict.transactions, "transaction");
    say("committed", format!("{} in {transactions}", count(verdict.committed, "event")));
    let lost = mark(verdict.lost.len(), format!("lost {}", verdict.lost.len()));
    say("arrived", format!("{}, {lost}", count(verdict.arrived, "event")));
    let disordered = mark(verdict.disordered.len(), format!("out of order {}", verdict.disordered.len()));
    say("order", format!("{disordered}, each of {} by itself", count(verdict.keys, "key")));
    let why = "at-least-once: what was sent but not yet confirmed at the kill comes again";
    say("duplicates", format!("{} {}", verdict.repeated, stage.dim(format_args!("({why})"))));
    let leaked = mark(verdict.leaked.len(), format!("arrived {}", verdict.leaked.len()));
    say("rolled back", format!("{}, {leaked}", count(verdict.rolled_back, "event")));
    let (median, slowest) = (span(verdict.median), span(verdict.slowest_hundredth));
    let through = verdict
        .longest_through_outage
        .map_or_else(String::new, |longest| stage.dim(format_args!(" (through the outage at most {})", span(longest))));
    say("latency", format!("p50 {median}, p99 {slowest} from commit to consumer{through}"));
    let behind = mark(usize::from(!standing.is_caught_up()), shop.behind(standing));
    let aside = shop.not_counted().map_or_else(String::new, |aside| stage.dim(format_args!(" ({aside})")));
    say(shop.mark(), format!("confirmed {}, log ends at {}, {behind}{aside}", standing.confirmed, standing.end));
    say("took", format!("{} s", began.elapsed().as_secs()));
}

/// Until Ctrl-C.
async fn keep(performance: &mut Performance<'_>, shop: &Shop, broker: &Broker, stage: &Stage) -> Result<(), Halt> {
    stage.heading("Everything stays up until Ctrl-C");
    let (client, command) = shop.client();
    stage.line(format_args!("  {client:<7} {command}"));
    stage.line(format_args!("  Kafka   {}, topic {}", broker.servers(), broker.topic()));
    stage.line(format_args!("  admin   http://{}/status and /metrics", performance.admin()));
    stage.line(format_args!("  Try     {}", shop.to_try()));
    stage.line("  and see it arrive here:\n");
    performance.watch().await
}
