//! An event store, polled by position: read like a log, in the order (transaction, position), and only below the horizon.
//!
//! The horizon is the oldest transaction that is still running: whatever it will commit lies at or above it, so what is
//! read below it is complete and in order. Position alone would lose rows, since a transaction may take a lower one and
//! commit later.
//!
//! ```text
//!   events below the horizon ──▶ Reader ──chunks──▶ relay ──▶ publishers
//!   outbox_topic_progress  ◀── notes on each publisher ◀──────┘
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use tokio::sync::{Mutex, Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_postgres::SimpleQueryMessage;

use super::postgres::{EVENT_STORE_LOCK, channel, try_lock};
use super::progress::{Progress, Remembered};
use crate::config::{PipelineSettings, PositionSettings, PostgresSettings};
use crate::event::{Chunk, Commit, CommitEnd, CommitId, Field, Micros, Projection, Want};
use crate::position::{EventPosition, Position};
use crate::preflight::{Finding, Report};
use crate::source::postgres::server_error::classify_sql;
use crate::source::postgres::snapshot::set_field;
use crate::source::postgres::sql::{self, SqlSession};
use crate::source::postgres::tables::{CatalogTable, Tables, quote};
use crate::source::postgres::{self, judge};
use crate::source::{self, Opened, SourceFailure, SourceStats};

/// All positions of an event store are of one history.
pub const LINEAGE: &str = "events";

/// How often the progress table is looked at for changes of others.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is said that we lead, and looked for who holds the horizon back.
const BEAT: Duration = Duration::from_secs(5);
/// How much is read at once, near enough, and what an event is taken to weigh before one was seen.
const READ_BYTES: usize = 8 << 20;
const FIRST_ROW_BYTES: usize = 8 << 10;
/// How often events are looked for that only the horizon holds back.
const HORIZON_LOOKS: Duration = Duration::from_millis(50);
/// Empty polls before the pauses grow.
const EMPTY_POLLS: u32 = 3;

/// What outlives a connection.
#[derive(Default)]
pub struct Memory {
    pub remembered: Arc<Remembered>,
    /// What was committed when the process started: its last event.
    caught_up_at: std::sync::OnceLock<EventPosition>,
}

/// The lock that says who polls event stores of a database; all pipelines of a process share it.
struct Lead {
    session: Arc<SqlSession>,
}

static LEADS: LazyLock<Mutex<HashMap<String, Weak<Lead>>>> = LazyLock::new(Mutex::default);

impl Lead {
    async fn take(info: &postgres::conninfo::ConnInfo) -> Result<Arc<Lead>, SourceFailure> {
        let mut leads = LEADS.lock().await;
        let place = info.describe();
        if let Some(lead) = leads.get(&place).and_then(Weak::upgrade)
            && !lead.session.is_closed()
        {
            return Ok(lead);
        }
        let session = Arc::new(sql::connect(info).await?);
        if !try_lock(&session, EVENT_STORE_LOCK).await? {
            return Err(SourceFailure::Held {
                what: "another instance polls the event stores of this database".to_owned(),
            });
        }
        let lead = Arc::new(Lead { session });
        leads.insert(place, Arc::downgrade(&lead));
        Ok(lead)
    }
}

pub async fn open(
    settings: &PositionSettings,
    of: &PipelineSettings,
    source: &PostgresSettings,
    projection: &Projection,
    memory: &Arc<Memory>,
    stats: &Arc<SourceStats>,
) -> Result<Opened, SourceFailure> {
    let info = postgres::conninfo(source)?;
    let lead = Lead::take(&info).await?;
    let session = Arc::new(sql::connect(&info).await?);
    let (tables, missing) = Tables::find(&session, &source.tables).await?;
    judge::refuse(judge::tables(&missing, &tables, projection))?;
    let table = one_table(tables.catalog)?;
    let progress = Progress::of(of, session.clone(), memory.remembered.clone());
    progress.prepare(source.no_create).await?;
    let start = progress.begin().await?;
    not_beyond(&session, start, &of.name).await?;
    let id = id_column(of);
    let last = last_event(&session, &table, &id).await?;
    let caught_up_at = *memory.caught_up_at.get_or_init(|| last.unwrap_or(start));
    stats.has_no_bytes();
    let woken = Arc::<Notify>::default();
    let wake = woken.clone();
    session.on_notification(move || wake.notify_one());
    listen(&session, &table).await?;
    tracing::info!(source = session.description(), after = %start, "polling by position");
    let (finish, finished) = oneshot::channel();
    let horizon = Arc::<AtomicU64>::default();
    let keeper = Keeper {
        lead,
        session: session.clone(),
        table: table.clone(),
        progress,
        stats: stats.clone(),
        read: horizon.clone(),
    };
    let alarm = tokio::spawn(keeper.run(finished));
    let reader = Reader {
        session,
        table,
        projection: projection.clone(),
        after: start,
        interval: settings.interval,
        longest: settings.longest_idle.max(settings.interval),
        batch: settings.batch,
        id: quote(&id),
        row_bytes: FIRST_ROW_BYTES,
        empty: 0,
        next: Instant::now(),
        woken,
        stats: stats.clone(),
        read: horizon,
    };
    Ok(Opened {
        reader: source::Reader::Events(Box::new(reader)),
        confirmer: source::Confirmer::Events(Confirmer { finish: Some(finish) }),
        start: Position::Event(start),
        caught_up_at: Position::Event(caught_up_at.max(start)),
        reaches: Position::Event(EventPosition { transaction: u64::MAX, position: i64::MAX }),
        lineage: LINEAGE.to_owned(),
        begun: false,
        alarm,
    })
}

/// Looks at everything that polling needs, and changes nothing.
pub async fn preflight(source: &PostgresSettings, projection: &Projection) -> Vec<Finding> {
    let mut report = Report::default();
    let found = async {
        let session = Arc::new(sql::connect(&postgres::conninfo(source)?).await?);
        let (tables, missing) = Tables::find(&session, &source.tables).await?;
        judge::refuse(judge::tables(&missing, &tables, projection))?;
        Ok((session, one_table(tables.catalog)?))
    };
    let Some((session, table)) = report.told("tables", found.await) else { return report.into_findings() };
    report.ok("tables", format!("{}: {} is an event store", session.description(), table.quoted()));
    match report.told("progress", Progress::exists(&session).await) {
        Some(true) => report.ok("progress", "outbox_topic_progress is there"),
        Some(false) if source.no_create => {
            let remedy = "run `outboxd init --capture poll`, or sql/postgres/progress.sql";
            report.fail("progress", "there is no table outbox_topic_progress", remedy);
        }
        Some(false) => report.ok("progress", "outbox_topic_progress is made at the first start"),
        None => {}
    }
    match report.told("leader", try_lock(&session, EVENT_STORE_LOCK).await) {
        Some(true) => report.ok("leader", "nobody else polls the event stores of this database"),
        Some(false) => report.warn("leader", "another instance leads", "a run stands by until it ends"),
        None => {}
    }
    report.into_findings()
}

/// Waits until nobody else polls event stores of the database.
pub async fn stand_by(source: &PostgresSettings) -> Result<(), SourceFailure> {
    let session = sql::connect(&postgres::conninfo(source)?).await?;
    while !try_lock(&session, EVENT_STORE_LOCK).await? {
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    Ok(())
}

fn one_table(mut catalog: Vec<CatalogTable>) -> Result<CatalogTable, SourceFailure> {
    let (table, more) = (catalog.pop(), !catalog.is_empty());
    match table {
        Some(table) if !more && table.has("transaction_id") => Ok(table),
        Some(table) if !more => Err(super::postgres::lacks(&table.quoted(), "transaction_id")),
        _ => Err(SourceFailure::Misconfigured {
            what: "an event store is one table when it is polled".to_owned(),
            remedy: "give each its own pipeline".to_owned(),
        }),
    }
}

/// What the layout's position is called here.
pub(super) fn id_column(of: &PipelineSettings) -> String {
    let chosen = of.route.columns.iter().rev().find(|(role, _)| role == "id").map(|(_, column)| column.clone());
    chosen.unwrap_or_else(|| "position".to_owned())
}

/// Transactions are numbered by the server: a position that it has not reached is of another one, and what is committed here
/// would pass for delivered.
async fn not_beyond(session: &SqlSession, start: EventPosition, pipeline: &str) -> Result<(), SourceFailure> {
    let asked = "SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text";
    let row = session.query_one(asked, &[]).await.map_err(|error| session.classify(&error))?;
    let next: u64 = row.get::<_, &str>(0).parse().unwrap_or(u64::MAX);
    if start.transaction < next {
        return Ok(());
    }
    Err(SourceFailure::PositionLost {
        what: format!(
            "pipeline `{pipeline}` stands at transaction {} in outbox_topic_progress, and this server has only come to {next}: \
             the tables were moved here from another server",
            start.transaction
        ),
        remedy:
            "set last_transaction_id and last_position of its rows to those of the last event that was delivered, as \
                 they are in the table here; events that were copied have the numbers of the server they came from"
                .to_owned(),
    })
}

async fn last_event(
    session: &SqlSession,
    table: &CatalogTable,
    id: &str,
) -> Result<Option<EventPosition>, SourceFailure> {
    let id = quote(id);
    let statement = format!(
        "SELECT transaction_id::text, {id}::bigint FROM {} ORDER BY transaction_id DESC, {id} DESC LIMIT 1",
        table.quoted()
    );
    let row = session.query_opt(&statement, &[]).await.map_err(|error| classify_sql(&error, "looking for events"))?;
    Ok(row.map(|row| EventPosition { transaction: row.get::<_, &str>(0).parse().unwrap_or(0), position: row.get(1) }))
}

async fn listen(session: &SqlSession, table: &CatalogTable) -> Result<(), SourceFailure> {
    let listen = format!("LISTEN {}", quote(&channel(&table.schema, &table.name)));
    session.batch_execute(&listen).await.map_err(|error| session.classify(&error))
}

pub struct Reader {
    session: Arc<SqlSession>,
    table: CatalogTable,
    projection: Projection,
    after: EventPosition,
    interval: Duration,
    longest: Duration,
    batch: usize,
    /// The column of the position, quoted.
    id: String,
    /// What an event weighed lately.
    row_bytes: usize,
    /// Empty polls in a row.
    empty: u32,
    next: Instant,
    woken: Arc<Notify>,
    stats: Arc<SourceStats>,
    /// The transaction of the last event that was read, for the keeper.
    read: Arc<AtomicU64>,
}

impl Reader {
    /// The next events. May be cancelled: nothing is claimed by reading.
    pub async fn next(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(self.next) => {}
                () = self.woken.notified() => {}
            }
            let limit = (READ_BYTES / self.row_bytes).clamp(1, self.batch);
            let messages = self.session.simple_query(&self.statement(limit)).await;
            let messages = messages.map_err(|error| classify_sql(&error, "reading the event store"))?;
            self.stats.polled();
            chunk.reset(self.projection.width());
            let has = |name: &str| self.table.columns.iter().find(|(column, _)| column == name);
            let columns: Vec<_> = self
                .projection
                .columns()
                .filter_map(|(slot, name, want)| has(name).map(|(_, oid)| (slot, name, want, *oid)))
                .collect();
            let time = columns.iter().find(|column| column.2 == Want::Time).map(|column| column.0);
            let mut last = self.after;
            let mut transactions = 0;
            for message in &messages {
                let SimpleQueryMessage::Row(row) = message else { continue };
                let number = |at: usize| row.get(at).unwrap_or_default();
                let event = EventPosition {
                    transaction: number(0).parse().unwrap_or(0),
                    position: number(1).parse().unwrap_or(0),
                };
                transactions += u32::from(event.transaction != last.transaction);
                last = event;
                chunk.begin_commit(Commit { id: CommitId::Event(event), committed_at: Micros::now() });
                chunk.push_event(0);
                for (at, (slot, name, want, type_oid)) in columns.iter().enumerate() {
                    if set_field(*slot, *type_oid, *want, row.get(2 + at), chunk).is_err() {
                        let why = format!("column `{name}` of {}: its value has an unknown form", self.table.quoted());
                        chunk.mark_defective(why, Field::Null);
                    }
                }
                let newest = chunk.events().last();
                let made = newest.and_then(|newest| chunk.field(newest, time?)).and_then(|bytes| bytes.try_into().ok());
                if let Some(made) = made {
                    chunk.set_commit_time(Micros(i64::from_be_bytes(made)));
                }
            }
            let count = chunk.events().len();
            if count == 0 && self.is_held_back().await? {
                // There is something: the horizon passes it in a moment.
                self.next = Instant::now() + self.interval.min(HORIZON_LOOKS);
                continue;
            }
            if count == 0 {
                self.empty = self.empty.saturating_add(1);
                let doublings = self.empty.saturating_sub(EMPTY_POLLS);
                let pause = self.interval.saturating_mul(2_u32.saturating_pow(doublings));
                self.next = Instant::now() + pause.min(self.longest);
                continue;
            }
            self.empty = 0;
            self.row_bytes = (chunk.weight() / count).max(64);
            let full = count >= limit;
            self.next = if full { Instant::now() } else { Instant::now() + self.interval };
            self.after = last;
            self.read.store(last.transaction, Ordering::Relaxed);
            chunk.transactions = transactions;
            chunk.catching_up = full;
            let committed_at = chunk.events().last().map_or(Micros(0), |event| chunk.commit(event).committed_at);
            chunk.end = Some(CommitEnd { position: Position::Event(last), committed_at });
            return Ok(());
        }
    }

    /// Whether events lie behind the last one that was read, above the horizon.
    async fn is_held_back(&self) -> Result<bool, SourceFailure> {
        let asked = format!(
            "SELECT EXISTS (SELECT FROM {} WHERE (transaction_id, {}) > ('{}'::xid8, {}::bigint))",
            self.table.quoted(),
            self.id,
            self.after.transaction,
            self.after.position
        );
        let row = self.session.query_one(&asked, &[]).await.map_err(|error| self.session.classify(&error))?;
        Ok(row.get(0))
    }

    fn statement(&self, limit: usize) -> String {
        let id = &self.id;
        let has = |name: &str| self.table.has(name);
        let wanted: Vec<_> = self
            .projection
            .columns()
            .filter(|(_, name, _)| has(name))
            .map(|(_, name, _)| format!(", {}", quote(name)))
            .collect();
        format!(
            "SELECT transaction_id, {id}{} FROM {}
             WHERE (transaction_id, {id}) > ('{}'::xid8, {}::bigint)
               AND transaction_id < pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())
             ORDER BY transaction_id, {id} LIMIT {}",
            wanted.concat(),
            self.table.quoted(),
            self.after.transaction,
            self.after.position,
            limit
        )
    }
}

pub struct Confirmer {
    finish: Option<oneshot::Sender<()>>,
}

impl Confirmer {
    pub async fn finish(mut self, alarm: JoinHandle<Result<(), SourceFailure>>) {
        if let Some(finish) = self.finish.take() {
            let _ = finish.send(());
            let _ = tokio::time::timeout(Duration::from_secs(3), alarm).await;
        }
    }
}

/// Watches the lock's session, the progress table, and the horizon.
struct Keeper {
    lead: Arc<Lead>,
    session: Arc<SqlSession>,
    table: CatalogTable,
    progress: Progress,
    stats: Arc<SourceStats>,
    read: Arc<AtomicU64>,
}

impl Keeper {
    /// Ends without an error when somebody has written to the progress table: the pipeline begins anew by what it says.
    async fn run(self, mut finish: oneshot::Receiver<()>) -> Result<(), SourceFailure> {
        let (mut look, mut beat) = (tokio::time::interval(LOOK), tokio::time::interval(BEAT));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        look.tick().await;
        loop {
            tokio::select! {
                failure = self.lead.session.closed() => return Err(failure),
                failure = self.session.closed() => return Err(failure),
                _ = &mut finish => return Ok(()),
                _ = look.tick() => if self.progress.was_changed().await? {
                    tracing::info!("outbox_topic_progress was changed by somebody else: beginning anew by what it says");
                    return Ok(());
                },
                _ = beat.tick() => {
                    self.progress.beat().await?;
                    self.horizon().await?;
                }
            }
        }
    }

    /// Who keeps events from being read, if any are waiting.
    async fn horizon(&self) -> Result<(), SourceFailure> {
        let asked = format!(
            "SELECT a.pid, coalesce(a.usename, ''), coalesce(a.application_name, ''),
                    extract(epoch FROM now() - a.xact_start)::bigint, coalesce(a.state, '')
             FROM pg_catalog.pg_stat_activity a
             WHERE a.backend_xid IS NOT NULL
               AND EXISTS (SELECT FROM {} WHERE transaction_id >= pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())
                           AND transaction_id > '{}'::xid8)
             ORDER BY pg_catalog.age(a.backend_xid) DESC LIMIT 1",
            self.table.quoted(),
            self.read.load(Ordering::Relaxed),
        );
        let row = self.session.query_opt(&asked, &[]).await.map_err(|error| self.session.classify(&error))?;
        self.stats.set_held_back_by(row.map(|row| {
            let (pid, user, application): (i32, String, String) = (row.get(0), row.get(1), row.get(2));
            let (seconds, state): (Option<i64>, String) = (row.get(3), row.get(4));
            let since = seconds.unwrap_or(0);
            format!("backend {pid} ({user}, {application}, {state}), whose transaction has run for {since} s")
        }));
        Ok(())
    }
}
