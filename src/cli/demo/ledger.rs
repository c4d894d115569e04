//! What was committed against what arrived: the demo's judge. It knows nothing of databases and brokers, so that its
//! eye for a loss or a swap can itself be tested.
//!
//! Each event carries its number among its key's events, given out under a row lock in the transaction that commits
//! it: for one key these numbers rise in commit order, without gaps, whatever was rolled back.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// An event as its writer knows it.
#[derive(Clone, Debug)]
pub struct Event {
    pub id: String,
    pub key: String,
    pub number: i64,
}

/// A record as the consumer got it.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub id: String,
    pub key: String,
    /// None when the value does not hold one.
    pub number: Option<i64>,
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    pub value: String,
    pub at: Instant,
}

#[derive(Default)]
pub struct Ledger {
    transactions: usize,
    committed: HashMap<String, (Event, Instant)>,
    rolled_back: HashSet<String>,
    /// First arrivals.
    arrived: HashMap<String, Instant>,
    latest_of_key: HashMap<String, i64>,
    disordered: Vec<String>,
    repeated: usize,
    outage: Option<Outage>,
}

/// From the kill until all that was committed before the restart had arrived.
#[derive(Clone, Copy)]
struct Outage {
    began: Instant,
    ended: Option<Instant>,
}

impl Ledger {
    /// A transaction was committed; `at` is when the server said so.
    pub fn committed(&mut self, events: Vec<Event>, at: Instant) {
        self.transactions += 1;
        self.committed.extend(events.into_iter().map(|event| (event.id.clone(), (event, at))));
    }

    pub fn rolled_back(&mut self, events: Vec<Event>) {
        self.rolled_back.extend(events.into_iter().map(|event| event.id));
    }

    /// Whether this is the first time.
    pub fn arrived(&mut self, arrival: &Arrival) -> bool {
        if self.arrived.contains_key(&arrival.id) {
            self.repeated += 1;
            return false;
        }
        self.arrived.insert(arrival.id.clone(), arrival.at);
        let latest = self.latest_of_key.entry(arrival.key.clone()).or_default();
        match arrival.number {
            Some(number) if number > *latest => *latest = number,
            _ => self.disordered.push(format!("{} {:?} after {latest}", arrival.key, arrival.number)),
        }
        true
    }

    pub fn outage_began(&mut self, began: Instant) {
        self.outage = Some(Outage { began, ended: None });
    }

    pub fn outage_ended(&mut self, ended: Instant) {
        if let Some(outage) = &mut self.outage {
            outage.ended = Some(ended);
        }
    }

    pub fn events_committed(&self) -> usize {
        self.committed.len()
    }

    /// Committed events that arrived, each once.
    pub fn events_arrived(&self) -> usize {
        self.committed.keys().filter(|id| self.arrived.contains_key(*id)).count()
    }

    pub fn is_in_order(&self) -> bool {
        self.disordered.is_empty()
    }

    /// Events committed before `when` that have not arrived.
    pub fn waiting_since_before(&self, when: Instant) -> usize {
        self.committed.values().filter(|(event, at)| *at <= when && !self.arrived.contains_key(&event.id)).count()
    }

    pub fn latency_of(&self, arrival: &Arrival) -> Option<Duration> {
        let (_, committed) = self.committed.get(&arrival.id)?;
        Some(arrival.at.saturating_duration_since(*committed))
    }

    /// Commit to arrival, shortest first: of what met a running relay, and of what the outage held up.
    pub fn latencies(&self) -> (Vec<Duration>, Vec<Duration>) {
        let both = self.committed.iter().filter_map(|(id, (_, committed))| Some((*committed, *self.arrived.get(id)?)));
        let (held, met): (Vec<_>, Vec<_>) = both.partition(|(committed, arrived)| {
            self.outage
                .is_some_and(|outage| *arrived >= outage.began && outage.ended.is_none_or(|ended| *committed <= ended))
        });
        let sorted = |spans: Vec<(Instant, Instant)>| {
            let spans = spans.into_iter().map(|(committed, arrived)| arrived.saturating_duration_since(committed));
            let mut spans: Vec<_> = spans.collect();
            spans.sort_unstable();
            spans
        };
        (sorted(met), sorted(held))
    }

    pub fn verdict(&self) -> Verdict {
        let lost = self.committed.values().filter(|(event, _)| !self.arrived.contains_key(&event.id));
        let lost = lost.map(|(event, _)| format!("{} {}", event.key, event.number)).collect();
        let leaked = self.rolled_back.iter().filter(|id| self.arrived.contains_key(*id)).cloned().collect();
        let known = |id: &String| self.committed.contains_key(id) || self.rolled_back.contains(id);
        let (met, held) = self.latencies();
        Verdict {
            transactions: self.transactions,
            committed: self.committed.len(),
            arrived: self.events_arrived(),
            keys: self.latest_of_key.len(),
            lost,
            disordered: self.disordered.clone(),
            repeated: self.repeated,
            rolled_back: self.rolled_back.len(),
            leaked,
            unknown: self.arrived.keys().filter(|id| !known(id)).cloned().collect(),
            median: percentile(&met, 50),
            slowest_hundredth: percentile(&met, 99),
            longest_through_outage: held.last().copied(),
        }
    }
}

/// What the demo has shown.
#[derive(Debug)]
pub struct Verdict {
    pub transactions: usize,
    pub committed: usize,
    pub arrived: usize,
    pub keys: usize,
    pub lost: Vec<String>,
    pub disordered: Vec<String>,
    pub repeated: usize,
    pub rolled_back: usize,
    /// Rolled back, and arrived all the same.
    pub leaked: Vec<String>,
    /// Arrived, and written by nobody.
    pub unknown: Vec<String>,
    pub median: Duration,
    pub slowest_hundredth: Duration,
    pub longest_through_outage: Option<Duration>,
}

impl Verdict {
    /// The promises that did not hold.
    pub fn broken(&self) -> Vec<String> {
        let kinds = [
            ("committed events never arrived", &self.lost),
            ("events arrived out of order", &self.disordered),
            ("rolled-back events arrived", &self.leaked),
            ("events arrived that nobody wrote", &self.unknown),
        ];
        let broken = kinds.into_iter().filter(|(_, which)| !which.is_empty());
        let some = |which: &Vec<String>| which.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        broken.map(|(what, which)| format!("{} {what}: {}", which.len(), some(which))).collect()
    }
}

/// The nearest-rank percentile of spans sorted from short to long; zero when there are none.
pub fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(key: &str, number: i64) -> Event {
        Event { id: format!("{key}-{number}"), key: key.to_owned(), number }
    }

    fn arrival(key: &str, number: i64, at: Instant) -> Arrival {
        Arrival {
            id: format!("{key}-{number}"),
            key: key.to_owned(),
            number: Some(number),
            topic: "orders".to_owned(),
            partition: 0,
            offset: 0,
            value: String::new(),
            at,
        }
    }

    /// A ledger with two keys' events committed, and these arrived in this order.
    fn after(arrivals: &[(&str, i64)]) -> Ledger {
        let now = Instant::now();
        let mut ledger = Ledger::default();
        ledger.committed(vec![event("ada", 1), event("ada", 2)], now);
        ledger.committed(vec![event("bob", 1)], now);
        ledger.rolled_back(vec![event("bob", 9)]);
        for (key, number) in arrivals {
            ledger.arrived(&arrival(key, *number, now));
        }
        ledger
    }

    #[test]
    fn all_that_was_committed_and_in_order_breaks_no_promise() {
        let verdict = after(&[("bob", 1), ("ada", 1), ("ada", 2)]).verdict();
        assert_eq!(verdict.broken(), Vec::<String>::new());
        assert_eq!((verdict.transactions, verdict.committed, verdict.arrived, verdict.keys), (2, 3, 3, 2));
    }

    #[test]
    fn a_planted_loss_is_found() {
        let ledger = after(&[("bob", 1), ("ada", 2)]);
        assert_eq!(ledger.verdict().broken(), ["1 committed events never arrived: ada 1"]);
        assert_eq!(ledger.waiting_since_before(Instant::now()), 1);
    }

    #[test]
    fn planted_disorder_is_found() {
        let ledger = after(&[("ada", 2), ("ada", 1), ("bob", 1)]);
        assert!(!ledger.is_in_order());
        assert_eq!(ledger.verdict().broken(), ["1 events arrived out of order: ada Some(1) after 2"]);
    }

    #[test]
    fn a_repeated_run_is_counted_and_is_no_disorder() {
        let verdict = after(&[("ada", 1), ("ada", 2), ("ada", 1), ("ada", 2), ("bob", 1)]).verdict();
        assert_eq!(verdict.broken(), Vec::<String>::new());
        assert_eq!((verdict.repeated, verdict.arrived), (2, 3));
    }

    #[test]
    fn what_was_rolled_back_or_written_by_nobody_is_found() {
        let broken = after(&[("ada", 1), ("ada", 2), ("bob", 1), ("bob", 9), ("eve", 1)]).verdict().broken();
        assert_eq!(broken, ["1 rolled-back events arrived: bob-9", "1 events arrived that nobody wrote: eve-1"]);
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let millis = |range: std::ops::RangeInclusive<u64>| range.map(Duration::from_millis).collect::<Vec<_>>();
        assert_eq!(percentile(&[], 50), Duration::ZERO);
        assert_eq!(percentile(&millis(7..=7), 99), Duration::from_millis(7));
        assert_eq!(percentile(&millis(1..=100), 50), Duration::from_millis(50));
        assert_eq!(percentile(&millis(1..=100), 99), Duration::from_millis(99));
        assert_eq!(percentile(&millis(1..=3), 50), Duration::from_millis(2));
    }

    #[test]
    fn what_the_outage_held_up_is_kept_apart() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut ledger = Ledger::default();
        for (number, committed, arrived) in [(1, 0, 5), (2, 90, 900), (3, 200, 910), (4, 1000, 1004)] {
            ledger.committed(vec![event("ada", number)], at(committed));
            ledger.arrived(&arrival("ada", number, at(arrived)));
        }
        ledger.outage_began(at(100));
        ledger.outage_ended(at(920));
        let millis = |spans: Vec<Duration>| spans.iter().map(Duration::as_millis).collect::<Vec<_>>();
        let (met, held) = ledger.latencies();
        assert_eq!((millis(met), millis(held)), (vec![4, 5], vec![710, 810]));
    }
}
