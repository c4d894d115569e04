//! A small shop: writers that place orders in real transactions, each with its events in the outbox. Some think better
//! of it, of the whole transaction or of a part since a savepoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;
use tokio_postgres::{Statement, Transaction};

use super::Happening;
use super::ledger::Event;
use super::postgres::Postgres;
use crate::cli::unexpected;
use crate::failure::Halt;
use crate::source::postgres::sql::SqlSession;

const WRITERS: usize = 4;
const PAUSE: Duration = Duration::from_millis(25);
const CUSTOMERS: [&str; 8] = ["ada", "bela", "chen", "dora", "emil", "fatou", "goran", "hana"];
const ITEMS: [&str; 5] = ["teapot", "lamp", "bicycle", "kite", "typewriter"];
const STEPS: [&str; 3] = ["order.placed", "order.paid", "order.shipped"];

/// One in this many transactions is rolled back, and one has a part rolled back.
const ROLLED_BACK: u64 = 25;
const PARTLY_ROLLED_BACK: u64 = 20;

const INSERT_ORDER: &str = "INSERT INTO orders (customer, item, amount) VALUES ($1, $2, $3) RETURNING id";

/// The customer's row is locked until the transaction's end: the numbers rise in commit order.
const INSERT_EVENT: &str = "
    WITH next AS (UPDATE customers SET events = events + 1 WHERE name = $1 RETURNING events)
    INSERT INTO outbox (partition_key, event_type, payload)
    SELECT $1::text, $2::text, jsonb_build_object('number', events, 'type', $2::text, 'order', $3::bigint, 'item', $4::text)
    FROM next RETURNING id::text, (payload->>'number')::bigint";

/// What a transaction came to.
pub struct Outcome {
    pub order: i64,
    pub customer: &'static str,
    pub item: &'static str,
    pub committed: Vec<Event>,
    pub rolled_back: Vec<Event>,
    /// When the server had answered COMMIT or ROLLBACK.
    pub at: Instant,
}

/// The writers at work; cut short when dropped.
pub struct Workload {
    stop: Arc<AtomicBool>,
    writers: JoinSet<Result<(), Halt>>,
}

impl Workload {
    pub async fn start(postgres: &Postgres, happenings: &UnboundedSender<Happening>) -> Result<Workload, Halt> {
        let session = postgres.connect().await?;
        let names = CUSTOMERS.as_slice();
        let inserted = session.execute("INSERT INTO customers SELECT unnest($1::text[])", &[&names]).await;
        inserted.map_err(|error| failed(&error))?;
        let stop = Arc::new(AtomicBool::new(false));
        let turns = Arc::new(AtomicU64::new(0));
        let mut writers = JoinSet::new();
        for _ in 0..WRITERS {
            let session = postgres.connect().await?;
            let writer = Writer::prepare(session, turns.clone()).await.map_err(|error| failed(&error))?;
            writers.spawn(writer.write(stop.clone(), happenings.clone()));
        }
        Ok(Workload { stop, writers })
    }

    /// Lets every writer finish its transaction.
    pub async fn finish(&mut self) -> Result<(), Halt> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.writers.join_next().await {
            ended.map_err(|died| unexpected(format!("a writer died: {died}")))??;
        }
        Ok(())
    }
}

fn failed(error: &tokio_postgres::Error) -> Halt {
    let server = error.as_db_error().map_or_else(|| error.to_string(), ToString::to_string);
    unexpected(format!("the workload failed: {server}"))
}

struct Writer {
    session: SqlSession,
    insert_order: Statement,
    insert_event: Statement,
    turns: Arc<AtomicU64>,
}

impl Writer {
    async fn prepare(session: SqlSession, turns: Arc<AtomicU64>) -> Result<Writer, tokio_postgres::Error> {
        let insert_order = session.prepare(INSERT_ORDER).await?;
        let insert_event = session.prepare(INSERT_EVENT).await?;
        Ok(Writer { session, insert_order, insert_event, turns })
    }

    async fn write(mut self, stop: Arc<AtomicBool>, happenings: UnboundedSender<Happening>) -> Result<(), Halt> {
        while !stop.load(Ordering::Relaxed) {
            let turn = self.turns.fetch_add(1, Ordering::Relaxed) + 1;
            let outcome = self.order(turn).await.map_err(|error| failed(&error))?;
            if happenings.send(Happening::Written(outcome)).is_err() {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn order(&mut self, turn: u64) -> Result<Outcome, tokio_postgres::Error> {
        let chance = scattered(turn);
        let customer = CUSTOMERS[(chance % CUSTOMERS.len() as u64) as usize];
        let item = ITEMS[(chance / 8 % ITEMS.len() as u64) as usize];
        let steps = (chance / 64 % STEPS.len() as u64) as usize + 1;
        let amount = (chance / 256 % 200) as i32 + 1;
        let (insert_order, insert_event) = (&self.insert_order, &self.insert_event);
        let mut transaction = self.session.client_mut().transaction().await?;
        let order: i64 = transaction.query_one(insert_order, &[&customer, &item, &amount]).await?.get(0);
        let mut outcome =
            Outcome { order, customer, item, committed: Vec::new(), rolled_back: Vec::new(), at: Instant::now() };
        for step in &STEPS[..steps] {
            outcome.committed.push(event(&transaction, insert_event, &outcome, step).await?);
        }
        if turn.is_multiple_of(PARTLY_ROLLED_BACK) {
            let part = transaction.savepoint("second_thoughts").await?;
            outcome.rolled_back.push(event(&part, insert_event, &outcome, "order.gift-wrapped").await?);
            part.rollback().await?;
        }
        if turn.is_multiple_of(ROLLED_BACK) {
            transaction.rollback().await?;
            let never = std::mem::take(&mut outcome.committed);
            outcome.rolled_back.extend(never);
        } else {
            transaction.commit().await?;
        }
        outcome.at = Instant::now();
        Ok(outcome)
    }
}

async fn event(
    transaction: &Transaction<'_>,
    insert: &Statement,
    order: &Outcome,
    step: &str,
) -> Result<Event, tokio_postgres::Error> {
    let row = transaction.query_one(insert, &[&order.customer, &step, &order.order, &order.item]).await?;
    Ok(Event { id: row.get(0), key: order.customer.to_owned(), number: row.get(1) })
}

/// The same for the same turn, without a pattern that shows (SplitMix64).
fn scattered(turn: u64) -> u64 {
    let mut mixed = turn.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ (mixed >> 31)) >> 1
}
