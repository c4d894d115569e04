//! The play itself: the workload runs, the relay dies and returns, and the audience sees a sample of what happens, with
//! the totals and the confirmed position kept current below it.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Happening;
use super::broker::{Broker, Consumer};
use super::ledger::{Arrival, Ledger, Verdict, percentile};
use super::relay_process::RelayProcess;
use super::report::{Stage, count, span};
use super::scratch::last_lines;
use super::shop::{Shop, Standing, Watch};
use super::workload::{Outcome, Workload};
use crate::failure::Halt;

const BEFORE_THE_KILL: Duration = Duration::from_secs(6);
const WITHOUT_RELAY: Duration = Duration::from_secs(3);
const AFTER_THE_RETURN: Duration = Duration::from_secs(5);
/// How long what was promised may take before it counts as broken.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a repetition may come after the last first arrival.
const AFTERMATH: Duration = Duration::from_millis(500);

const GLANCE: Duration = Duration::from_millis(250);
/// The first transactions are shown, then one in a while.
const SHOWN_AT_FIRST: usize = 4;
const SHOWN_EVERY: Duration = Duration::from_millis(1500);
const LONGEST_VALUE: usize = 90;

pub struct Performance<'a> {
    stage: &'a Stage,
    ledger: Ledger,
    happenings: UnboundedReceiver<Happening>,
    sender: UnboundedSender<Happening>,
    relay: RelayProcess,
    shop: &'a Shop,
    watch: Watch,
    standing: Standing,
    _consumer: Consumer,
    /// Events whose transaction was shown and whose arrival is to be.
    awaited: HashSet<String>,
    /// Arrived before their writer told of the commit.
    early: HashMap<String, Arrival>,
    /// Arrivals are shown although nobody's commit was.
    show_all: bool,
    shown: usize,
    last_shown: Instant,
    rollbacks_shown: [bool; 2],
}

impl<'a> Performance<'a> {
    pub async fn begin(
        shop: &'a Shop,
        broker: &Broker,
        relay: RelayProcess,
        stage: &'a Stage,
    ) -> Result<Performance<'a>, Halt> {
        let (sender, happenings) = unbounded_channel();
        Ok(Performance {
            stage,
            ledger: Ledger::default(),
            happenings,
            relay,
            shop,
            watch: shop.watch().await?,
            standing: Standing::default(),
            _consumer: broker.consume(sender.clone())?,
            sender,
            awaited: HashSet::new(),
            early: HashMap::new(),
            show_all: false,
            shown: 0,
            last_shown: Instant::now(),
            rollbacks_shown: [false; 2],
        })
    }

    /// All scenes; where the confirmed position stands at the end.
    pub async fn play(&mut self) -> Result<Standing, Halt> {
        let (stage, shop) = (self.stage, self.shop);
        stage.heading("Orders are written, events arrive");
        let mut workload = Workload::start(shop, &self.sender).await?;
        self.play_for(BEFORE_THE_KILL).await?;

        stage.heading(format_args!("The relay (process {}) is killed: kill -9; the shop goes on", self.relay.pid()));
        self.relay.kill();
        self.ledger.outage_began(Instant::now());
        self.play_for(WITHOUT_RELAY).await?;

        let returned = Instant::now();
        let waiting = self.ledger.waiting_since_before(returned);
        let missed = count(waiting, "committed event");
        stage.heading(format_args!("{missed} wait in {}'s log: the relay is started again", shop.name()));
        self.relay.start()?;
        if let Some(what) = shop.waited_for() {
            stage.line(stage.dim(format_args!("  it waits for {what}")));
        }
        let caught_up = self.play_until(|play| play.ledger.waiting_since_before(returned) == 0).await?;
        let now = Instant::now();
        self.ledger.outage_ended(now);
        if caught_up {
            let took = span(now.duration_since(returned));
            let what = format!("all {missed} arrived within {took} of the start of process {}", self.relay.pid());
            stage.line(format_args!("  {}", stage.good(what)));
        }
        self.play_for(AFTER_THE_RETURN).await?;

        workload.finish().await?;
        let mark = shop.mark();
        stage.heading(format_args!(
            "The shop closes; the last events arrive, the {mark} is confirmed to the end of the log"
        ));
        self.play_until(|play| play.ledger.waiting_since_before(Instant::now()) == 0).await?;
        self.play_for(AFTERMATH).await?;
        self.play_until(|play| play.standing.is_caught_up()).await?;
        Ok(self.standing.clone())
    }

    /// Shows whatever arrives, for ever.
    pub async fn watch(&mut self) -> Result<(), Halt> {
        self.show_all = true;
        loop {
            self.play_for(Duration::from_secs(3600)).await?;
        }
    }

    pub fn verdict(&self) -> Verdict {
        self.ledger.verdict()
    }

    pub fn relay_log(&self) -> String {
        last_lines(self.relay.log())
    }

    pub fn admin(&self) -> &str {
        self.relay.admin()
    }

    async fn play_for(&mut self, time: Duration) -> Result<(), Halt> {
        self.play_while(time, |_| false).await.map(drop)
    }

    /// Whether it came to be, before patience ended.
    async fn play_until(&mut self, done: impl Fn(&Self) -> bool) -> Result<bool, Halt> {
        self.play_while(PATIENCE, done).await
    }

    async fn play_while(&mut self, time: Duration, done: impl Fn(&Self) -> bool) -> Result<bool, Halt> {
        let deadline = tokio::time::Instant::now() + time;
        let mut glance = tokio::time::interval(GLANCE);
        glance.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(happening) = self.happenings.recv() => self.tell(happening),
                _ = glance.tick() => {
                    self.relay.assert_running()?;
                    self.standing = self.watch.look().await?;
                    if !self.show_all {
                        self.stage.state(&self.state());
                    }
                }
                () = tokio::time::sleep_until(deadline) => return Ok(done(self)),
            }
            if done(self) {
                return Ok(true);
            }
        }
    }

    fn state(&self) -> String {
        let (committed, arrived) = (self.ledger.events_committed(), self.ledger.events_arrived());
        let (met, _) = self.ledger.latencies();
        let (median, slowest) = (span(percentile(&met, 50)), span(percentile(&met, 99)));
        let Standing { confirmed, end, .. } = &self.standing;
        let (mark, behind) = (self.shop.mark(), self.shop.behind(&self.standing));
        let order = if self.ledger.is_in_order() { "" } else { " · OUT OF ORDER" };
        format!(
            "inserted {committed} · arrived {arrived} · waiting {} · p50 {median} p99 {slowest} · \
             {mark} {confirmed} of {end}, {behind}{order}",
            committed - arrived
        )
    }

    fn tell(&mut self, happening: Happening) {
        match happening {
            Happening::Written(outcome) => {
                self.tell_written(&outcome);
                let Outcome { committed, rolled_back, at, .. } = outcome;
                self.ledger.rolled_back(rolled_back);
                let early: Vec<_> = committed.iter().filter_map(|event| self.early.remove(&event.id)).collect();
                if !committed.is_empty() {
                    self.ledger.committed(committed, at);
                }
                for arrival in early.iter().filter(|arrival| self.awaited.contains(&arrival.id)) {
                    self.tell_arrived(arrival);
                }
            }
            Happening::Arrived(arrival) => {
                if !self.ledger.arrived(&arrival) {
                    return;
                }
                if self.awaited.remove(&arrival.id) || self.show_all {
                    self.tell_arrived(&arrival);
                } else if self.ledger.latency_of(&arrival).is_none() {
                    self.early.insert(arrival.id.clone(), arrival);
                }
            }
        }
    }

    fn tell_written(&mut self, outcome: &Outcome) {
        let Outcome { order, customer, item, committed, rolled_back, .. } = outcome;
        let stage = self.stage;
        if !rolled_back.is_empty() {
            let partly = !committed.is_empty();
            if !std::mem::replace(&mut self.rollbacks_shown[usize::from(partly)], true) {
                let what = if partly { "ROLLBACK TO SAVEPOINT" } else { "ROLLBACK" };
                let events = count(rolled_back.len(), "event");
                stage.line(format_args!("  {what}  order {order} of {customer}: {events} that must never arrive"));
            }
        }
        let due = self.shown < SHOWN_AT_FIRST || self.last_shown.elapsed() >= SHOWN_EVERY;
        if committed.is_empty() || !due {
            return;
        }
        (self.shown, self.last_shown) = (self.shown + 1, Instant::now());
        self.awaited.extend(committed.iter().map(|event| event.id.clone()));
        let events = count(committed.len(), "event");
        stage.line(format_args!("  COMMIT   order {order}, a {item} for {}: {events}", stage.bold(customer)));
    }

    fn tell_arrived(&self, arrival: &Arrival) {
        let Arrival { topic, partition, offset, key, value, .. } = arrival;
        let latency =
            self.ledger.latency_of(arrival).map_or_else(String::new, |latency| format!(" +{}", span(latency)));
        let value = match value.char_indices().nth(LONGEST_VALUE) {
            Some((end, _)) => format!("{}…", &value[..end]),
            None => value.clone(),
        };
        let stage = self.stage;
        let place = stage.dim(format_args!("{topic}[{partition}]@{offset}"));
        stage.line(format_args!("    arrived{latency:>9}  {place} key {} value {value}", stage.bold(key)));
    }
}
