//! The poller: outbox tables with status columns, for databases whose log cannot be read.
//!
//! ```text
//!   Reader ──limit──▶ claiming ──rows──▶ Reader ──chunks──▶ relay
//!                       │ lock or lease                        │
//!                       ▼                                      │
//!                     Ledger ◀── refused rows ── publisher ◀───┤
//!                       │                                      │
//!                       ▼ confirmed                            │
//!                    marking: done, retry, fail ◀── Confirmer ◀┘
//! ```
//!
//! A batch is what one claim gave, and its number is its position: the relay's loop is the one that logs have. Claiming
//! and marking have a connection each, so that neither waits for the other; both are one task, which ends with the
//! generation. A claim that was begun is seen through, so that a reader that is cancelled strands no row.

pub mod keeper;
pub mod ledger;
mod mongodb;
mod mysql;
pub mod operators;
pub mod positions;
pub mod postgres;
pub mod progress;
mod view;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::config::{PipelineSettings, PollSettings, SourceSettings};
use crate::event::{Chunk, CommitEnd, Micros, Projection};
use crate::position::Position;
use crate::preflight::{Finding, Report};
use crate::source::mongodb::lease::Validity;
use crate::source::{self, Opened, SourceFailure, SourceStats};
use keeper::{Keeper, Request};
use ledger::{Batch, Claimed, Exclusion, Ledger};
pub use view::View;

/// What outlives a connection.
pub struct Memory {
    pub ledger: Arc<Ledger>,
    holder: String,
    /// This process has led.
    led: AtomicBool,
}

impl Memory {
    pub fn new(settings: &PollSettings) -> Self {
        Memory {
            ledger: Arc::new(Ledger::new(settings.patience)),
            holder: settings.worker.clone(),
            led: AtomicBool::new(false),
        }
    }
}

/// What a claim is to bring.
pub struct Ask<'a> {
    pub table: u32,
    pub limit: usize,
    /// Rows that have failed and may be tried again, instead of those that were never tried.
    pub failed: bool,
    pub ledger: &'a Ledger,
}

/// A table, a key, and how long the rows of that key wait.
pub type Waits = (u32, Option<Vec<u8>>, Duration);

/// A database that is polled.
pub enum Store {
    Postgres(Box<postgres::PgStore>),
    MySql(Box<mysql::MyStore>),
    Mongo(Box<mongodb::MongoStore>),
}

macro_rules! each {
    ($store:expr, $inner:ident => $call:expr) => {
        match $store {
            Store::Postgres($inner) => $call,
            Store::MySql($inner) => $call,
            Store::Mongo($inner) => $call,
        }
    };
}

impl Store {
    pub async fn open(
        of: &PipelineSettings,
        settings: &PollSettings,
        projection: &Projection,
        holder: &str,
    ) -> Result<Self, SourceFailure> {
        let view = View::of(settings, &of.route, of.source.kind());
        Ok(match &of.source {
            SourceSettings::Postgres(source) => {
                Store::Postgres(Box::new(postgres::PgStore::open(source, view, projection).await?))
            }
            SourceSettings::MySql(source) => {
                Store::MySql(Box::new(mysql::MyStore::open(source, view, projection).await?))
            }
            SourceSettings::Mongo(source) => {
                Store::Mongo(Box::new(mongodb::MongoStore::open(source, view, projection, holder).await?))
            }
        })
    }

    async fn another(&self) -> Result<Self, SourceFailure> {
        Ok(match self {
            Store::Postgres(store) => Store::Postgres(Box::new(store.another().await?)),
            Store::MySql(store) => Store::MySql(Box::new(store.another().await?)),
            Store::Mongo(store) => Store::Mongo(Box::new(store.another())),
        })
    }

    fn describe(&self) -> String {
        each!(self, store => store.describe())
    }

    fn tables(&self) -> usize {
        each!(self, store => store.tables())
    }

    /// Becomes the one that polls these tables, or says that another is.
    pub async fn lead(&mut self) -> Result<(), SourceFailure> {
        each!(self, store => store.lead().await)
    }

    async fn wait_for_lead(&mut self) -> Result<(), SourceFailure> {
        each!(self, store => store.wait_for_lead().await)
    }

    /// Makes sure that we still are.
    async fn beat(&mut self) -> Result<(), SourceFailure> {
        each!(self, store => store.beat().await)
    }

    pub async fn claim(
        &mut self,
        ask: &Ask<'_>,
        excluded: &Exclusion,
        chunk: &mut Chunk,
    ) -> Result<Vec<Claimed>, SourceFailure> {
        each!(self, store => store.claim(ask, excluded, chunk).await)
    }

    pub async fn mark(&mut self, batch: &Batch) -> Result<u32, SourceFailure> {
        each!(self, store => store.mark(batch).await)
    }

    async fn recover(&mut self, all: bool) -> Result<u64, SourceFailure> {
        each!(self, store => store.recover(all).await)
    }

    async fn waiting(&mut self) -> Result<Vec<Waits>, SourceFailure> {
        each!(self, store => store.waiting().await)
    }

    async fn renew(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        each!(self, store => store.renew(table, ids).await)
    }

    async fn give_back(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        each!(self, store => store.give_back(table, ids).await)
    }

    async fn look(&mut self, most: u64, stats: &SourceStats) -> Result<(), SourceFailure> {
        each!(self, store => store.look(most, stats).await)
    }

    /// Statements that would give the rights that are missing.
    async fn lacking(&mut self) -> Result<Vec<String>, SourceFailure> {
        match self {
            Store::Postgres(store) => store.lacking().await,
            Store::MySql(store) => store.lacking().await,
            // A role is found out with the first command that it may not run.
            Store::Mongo(_) => Ok(Vec::new()),
        }
    }

    /// Whether a table that is paged through was left in the middle.
    fn has_more(&self, table: u32) -> bool {
        match self {
            Store::Postgres(store) => store.has_more(table),
            Store::MySql(store) => store.has_more(table),
            Store::Mongo(_) => false,
        }
    }

    fn begin_again(&mut self) {
        match self {
            Store::Postgres(store) => store.begin_again(),
            Store::MySql(store) => store.begin_again(),
            Store::Mongo(_) => {}
        }
    }

    fn validity(&self) -> Option<Arc<Validity>> {
        match self {
            Store::Mongo(store) => store.validity(),
            _ => None,
        }
    }

    /// Hears of new rows, where a server tells of them.
    async fn listen(&self, ledger: &Arc<Ledger>) -> Result<(), SourceFailure> {
        match self {
            Store::Postgres(store) => store.listen(ledger.clone()).await,
            _ => Ok(()),
        }
    }

    async fn release_lead(&self) {
        if let Store::Mongo(store) = self {
            store.release_lead().await;
        }
    }
}

/// Takes the lead, writes what this process had confirmed, and gives back what the last leader left behind: nobody else
/// has it now, and rows that come after it must not overtake it.
pub async fn open(
    settings: &PollSettings,
    of: &PipelineSettings,
    projection: &Projection,
    memory: &Memory,
    stats: &Arc<SourceStats>,
) -> Result<Opened, SourceFailure> {
    let mut claims = Store::open(of, settings, projection, &memory.holder).await?;
    lead(&mut claims, memory).await?;
    let mut marks = claims.another().await?;
    let ledger = memory.ledger.clone();
    ledger.begin_anew();
    while let Some(batch) = ledger.unmarked() {
        marks.mark(&batch).await?;
        ledger.marked();
    }
    let recovered = marks.recover(true).await?;
    if recovered > 0 {
        tracing::info!(rows = recovered, "rows that an earlier leader had claimed are pending again");
    }
    for (table, key, pause) in marks.waiting().await? {
        ledger.wait_for(table, key.as_deref(), pause);
    }
    stats.has_no_bytes();
    claims.listen(&ledger).await?;
    tracing::info!(source = claims.describe(), tables = claims.tables(), "polling");
    let (requests, asked) = mpsc::channel(1);
    let (brought, claimed) = mpsc::channel(1);
    let (confirmed, watched) = watch::channel(0);
    let (finish, finished) = oneshot::channel();
    let validity = claims.validity();
    let keeper = Keeper {
        claims,
        marks,
        ledger: ledger.clone(),
        settings: settings.clone(),
        width: projection.width(),
        time_slot: time_slot(projection),
        stats: stats.clone(),
        asked,
        brought,
        confirmed: watched,
    };
    let alarm = tokio::spawn(keeper.run(finished));
    let reader = Reader {
        requests,
        claimed,
        asked: false,
        pace: Pace::new(settings),
        ledger: ledger.clone(),
        until_drained: of.until_caught_up,
        validity,
        row_bytes: FIRST_ROW_BYTES,
        batch: settings.batch,
    };
    let confirmer = Confirmer { confirmed, ledger, finish: Some(finish) };
    Ok(Opened {
        reader: source::Reader::Poll(Box::new(reader)),
        confirmer: source::Confirmer::Poll(confirmer),
        start: Position::Poll(0),
        caught_up_at: Position::Poll(DRAINED),
        reaches: Position::Poll(DRAINED),
        lineage: "poll".to_owned(),
        begun: true,
        alarm,
    })
}

/// Takes the lead. Where this process had it a moment ago, the server may not have noticed yet that its session has ended.
async fn lead(store: &mut Store, memory: &Memory) -> Result<(), SourceFailure> {
    let deadline = Instant::now() + OWN_SESSION_PATIENCE;
    loop {
        match store.lead().await {
            Err(SourceFailure::Held { .. }) if memory.led.load(Ordering::Relaxed) && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            led => {
                memory.led.store(led.is_ok(), Ordering::Relaxed);
                return led;
            }
        }
    }
}

/// Looks at everything that polling needs, and changes nothing.
pub async fn preflight(settings: &PollSettings, of: &PipelineSettings, projection: &Projection) -> Vec<Finding> {
    let mut report = Report::default();
    let store = Store::open(of, settings, projection, &settings.worker).await;
    let Some(mut store) = report.told("tables", store) else { return report.into_findings() };
    report.ok("tables", format!("{}: {} with the columns that polling needs", store.describe(), tables(of)));
    let lacking = store.lacking().await;
    match report.told("privileges", lacking) {
        Some(lacking) if lacking.is_empty() => report.ok("privileges", "rows can be read and marked"),
        Some(lacking) => report.fail("privileges", lacking.join("; "), lacking.join(";\n")),
        None => {}
    }
    match store.lead().await {
        Ok(()) => {
            report.ok("leader", "nobody else polls these tables");
            store.release_lead().await;
        }
        Err(SourceFailure::Held { what }) => report.warn("leader", what, "a run stands by until it ends"),
        Err(failure) => report.refused("leader", failure),
    }
    report.into_findings()
}

fn tables(of: &PipelineSettings) -> String {
    of.source.tables().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Waits until nobody else polls the tables.
pub async fn stand_by(settings: &PollSettings, of: &PipelineSettings) -> Result<(), SourceFailure> {
    let mut store = Store::open(of, settings, &Projection::default(), &settings.worker).await?;
    store.wait_for_lead().await
}

/// The position behind everything that was pending.
pub const DRAINED: u64 = u64::MAX;

/// How long our own last session may live on.
const OWN_SESSION_PATIENCE: Duration = Duration::from_secs(3);

/// Rows that may be delivered and not yet marked.
const MOST_UNWRITTEN: usize = 10_000;

/// What a row is taken to weigh before one was seen.
const FIRST_ROW_BYTES: usize = 16 << 10;

/// Where the projection has the moment that a row was made.
fn time_slot(projection: &Projection) -> Option<usize> {
    projection.columns().find(|(_, _, want)| *want == crate::event::Want::Time).map(|(slot, ..)| slot)
}

/// When the next poll is due.
struct Pace {
    interval: Duration,
    longest: Duration,
    /// Empty polls in a row.
    empty: u32,
    next: Instant,
}

impl Pace {
    fn new(settings: &PollSettings) -> Self {
        Pace { interval: settings.interval, longest: settings.longest_idle, empty: 0, next: Instant::now() }
    }

    /// Something was found; whether as much as was asked for.
    fn found(&mut self, full: bool) {
        self.empty = 0;
        self.next = if full { Instant::now() } else { Instant::now() + self.interval };
    }

    fn nothing(&mut self) {
        let pause = self.interval.saturating_mul(2_u32.saturating_pow(self.empty));
        self.next = Instant::now() + pause.min(self.longest.max(self.interval));
        self.empty = self.empty.saturating_add(1);
    }
}

pub struct Reader {
    requests: mpsc::Sender<Request>,
    claimed: mpsc::Receiver<keeper::Brought>,
    /// A claim was asked for and has not been taken.
    asked: bool,
    pace: Pace,
    ledger: Arc<Ledger>,
    until_drained: bool,
    validity: Option<Arc<Validity>>,
    /// What a row weighed lately.
    row_bytes: usize,
    batch: usize,
}

impl Reader {
    /// How many rows it would take at once.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// The next batch, of no more rows than there is room for. May be cancelled.
    pub async fn next(&mut self, chunk: &mut Chunk, room: Room) -> Result<(), SourceFailure> {
        loop {
            if !self.asked {
                self.ledger.until_written(MOST_UNWRITTEN.max(4 * self.batch)).await;
                self.wait().await;
                let by_bytes = room.bytes / self.row_bytes.max(1);
                let limit = room.events.min(by_bytes).max(1);
                if self.requests.send(Request { limit }).await.is_err() {
                    // The keeper tells why it ended.
                    return std::future::pending().await;
                }
                self.asked = true;
            }
            let Some(brought) = self.claimed.recv().await else { return std::future::pending().await };
            self.asked = false;
            if self.validity.as_ref().is_some_and(|validity| !validity.holds()) {
                return Err(SourceFailure::transient("the lease ran out before a claimed batch was delivered"));
            }
            let rows = brought.chunk.events().len();
            if let Some(weight) = brought.chunk.weight().checked_div(rows) {
                self.pace.found(brought.full);
                *chunk = brought.chunk;
                self.row_bytes = weight.max(1);
                return Ok(());
            }
            if brought.full {
                // A page of rows that are all on their way already.
                self.pace.found(true);
                continue;
            }
            if self.until_drained && !self.ledger.is_busy() {
                self.until_drained = false;
                chunk.reset(0);
                chunk.end = Some(CommitEnd { position: Position::Poll(DRAINED), committed_at: Micros::now() });
                return Ok(());
            }
            self.pace.nothing();
        }
    }

    /// Until the next poll is due, or something has changed.
    async fn wait(&self) {
        let draining = self.until_drained.then(|| Instant::now() + Duration::from_millis(50));
        let due = [self.ledger.next_due(), draining].into_iter().flatten().fold(self.pace.next, Instant::min);
        tokio::select! {
            () = tokio::time::sleep_until(due) => {}
            () = self.ledger.changed.notified() => {}
        }
    }
}

/// How much the windows have room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub events: usize,
    pub bytes: usize,
}

impl Room {
    /// For whoever waits elsewhere.
    pub const ENDLESS: Room = Room { events: usize::MAX, bytes: usize::MAX };
}

pub struct Confirmer {
    confirmed: watch::Sender<u64>,
    ledger: Arc<Ledger>,
    finish: Option<oneshot::Sender<()>>,
}

impl Confirmer {
    pub fn confirm(&self, upto: &Position) {
        let Position::Poll(number) = upto else { return };
        if *number == DRAINED {
            // All that was claimed before it is confirmed, and what was claimed since is not meant.
            return;
        }
        self.ledger.confirm(*number);
        self.confirmed.send_replace(*number);
    }

    /// Writes what was confirmed, gives back what was not, and lets the lead go.
    pub async fn finish(mut self, reader: Reader, alarm: JoinHandle<Result<(), SourceFailure>>) {
        drop(reader);
        if let Some(finish) = self.finish.take() {
            let _ = finish.send(());
            if let Ok(Ok(Err(failure))) = tokio::time::timeout(Duration::from_secs(5), alarm).await {
                tracing::warn!("rows may be delivered again: {failure}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_idle_poller_waits_longer_and_longer_and_comes_back_with_work() {
        let second = Duration::from_secs(1);
        let mut pace = Pace { interval: second, longest: second * 10, empty: 0, next: Instant::now() };
        let mut pauses = Vec::new();
        for _ in 0..6 {
            pace.nothing();
            pauses.push((pace.next - Instant::now()).as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 10, 10]);
        pace.found(false);
        assert_eq!(pace.next - Instant::now(), second);
        pace.nothing();
        assert_eq!(pace.next - Instant::now(), second, "it begins anew");
        pace.found(true);
        assert_eq!(pace.next, Instant::now(), "there is more");
    }
}
