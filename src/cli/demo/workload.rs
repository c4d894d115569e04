//! A small shop: writers that place orders in real transactions, each with its events in the outbox. Some think better
//! of it, of the whole transaction or, where there are savepoints, of a part.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;

use super::Happening;
use super::ledger::Event;
use super::shop::{Shop, Till};
use crate::cli::unexpected;
use crate::failure::Halt;

const WRITERS: usize = 4;
const PAUSE: Duration = Duration::from_millis(25);
const CUSTOMERS: [&str; 8] = ["ada", "bela", "chen", "dora", "emil", "fatou", "goran", "hana"];
const ITEMS: [&str; 5] = ["teapot", "lamp", "bicycle", "kite", "typewriter"];
const STEPS: [&str; 3] = ["order.placed", "order.paid", "order.shipped"];

/// One in this many transactions is rolled back, and one has a part rolled back.
const ROLLED_BACK: u64 = 25;
const PARTLY_ROLLED_BACK: u64 = 20;

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
    pub async fn start(shop: &Shop, happenings: &UnboundedSender<Happening>) -> Result<Workload, Halt> {
        shop.admit(&CUSTOMERS).await?;
        let stop = Arc::new(AtomicBool::new(false));
        let turns = Arc::new(AtomicU64::new(0));
        let mut writers = JoinSet::new();
        for _ in 0..WRITERS {
            let writer = Writer { till: shop.till().await?, turns: turns.clone() };
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

pub fn failed(what: &dyn std::fmt::Display) -> Halt {
    unexpected(format!("the workload failed: {what}"))
}

struct Writer {
    till: Till,
    turns: Arc<AtomicU64>,
}

impl Writer {
    async fn write(mut self, stop: Arc<AtomicBool>, happenings: UnboundedSender<Happening>) -> Result<(), Halt> {
        while !stop.load(Ordering::Relaxed) {
            let turn = self.turns.fetch_add(1, Ordering::Relaxed) + 1;
            let outcome = self.order(turn).await?;
            if happenings.send(Happening::Written(outcome)).is_err() {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn order(&mut self, turn: u64) -> Result<Outcome, Halt> {
        let chance = scattered(turn);
        let customer = CUSTOMERS[(chance % CUSTOMERS.len() as u64) as usize];
        let item = ITEMS[(chance / 8 % ITEMS.len() as u64) as usize];
        let steps = (chance / 64 % STEPS.len() as u64) as usize + 1;
        let amount = (chance / 256 % 200) as i32 + 1;
        let till = &mut self.till;
        till.begin().await?;
        let order = till.order(customer, item, amount).await?;
        let mut outcome =
            Outcome { order, customer, item, committed: Vec::new(), rolled_back: Vec::new(), at: Instant::now() };
        for step in &STEPS[..steps] {
            outcome.committed.push(till.event(&outcome, step).await?);
        }
        if turn.is_multiple_of(PARTLY_ROLLED_BACK) {
            outcome.rolled_back.extend(till.think_better_of(&outcome, "order.gift-wrapped").await?);
        }
        if turn.is_multiple_of(ROLLED_BACK) {
            till.roll_back().await?;
            let never = std::mem::take(&mut outcome.committed);
            outcome.rolled_back.extend(never);
        } else {
            till.commit().await?;
        }
        outcome.at = Instant::now();
        Ok(outcome)
    }
}

/// The same for the same turn, without a pattern that shows (SplitMix64).
fn scattered(turn: u64) -> u64 {
    let mut mixed = turn.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ (mixed >> 31)) >> 1
}
