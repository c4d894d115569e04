//! The last minute of a publisher, for the people who look at it: how many events were acknowledged in each second, and
//! how long they took from their commit.
//!
//! Written once per advance of a watermark, never per event. Latencies are counted in buckets of a fifth, so that a
//! percentile is right to about a tenth whatever its size, in three kilobytes a publisher.

use std::sync::LazyLock;

use tokio::time::Instant;

/// How far back it reaches.
pub const SECONDS: usize = 60;
/// Latencies are forgotten ten seconds at a time.
const SLICES: usize = 6;
const SLICE_SECONDS: u64 = (SECONDS / SLICES) as u64;
/// Four to every doubling, from a tenth of a millisecond to some fifteen minutes.
const BUCKETS: usize = 96;
const PER_DOUBLING: f64 = 4.0;
const SHORTEST: f64 = 0.0001;

/// What all publishers count their seconds from, so that theirs can be added up.
static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

fn now() -> u64 {
    BEGIN.elapsed().as_secs()
}

#[derive(Debug)]
pub struct Recent {
    counts: [u32; SECONDS],
    /// The last second that was written.
    second: u64,
    latencies: [[u32; BUCKETS]; SLICES],
    slice: u64,
    /// Nothing is known of what was before.
    since: u64,
}

impl Default for Recent {
    fn default() -> Self {
        let second = now();
        let (counts, latencies) = ([0; SECONDS], [[0; BUCKETS]; SLICES]);
        Recent { counts, second, latencies, slice: second / SLICE_SECONDS, since: second }
    }
}

impl Recent {
    /// Events were acknowledged; the last of them so long after its commit.
    pub fn acknowledged(&mut self, events: usize, latency: Option<f64>) {
        self.acknowledged_at(now(), events, latency);
    }

    fn acknowledged_at(&mut self, second: u64, events: usize, latency: Option<f64>) {
        self.move_to(second);
        let events = u32::try_from(events).unwrap_or(u32::MAX);
        let count = &mut self.counts[(second % SECONDS as u64) as usize];
        *count = count.saturating_add(events);
        if let Some(latency) = latency {
            let slice = &mut self.latencies[(self.slice % SLICES as u64) as usize];
            let bucket = &mut slice[bucket(latency)];
            *bucket = bucket.saturating_add(events);
        }
    }

    /// Forgets what lies a minute back.
    fn move_to(&mut self, second: u64) {
        let passed = second.saturating_sub(self.second).min(SECONDS as u64);
        for forgotten in second - passed..second {
            self.counts[((forgotten + 1) % SECONDS as u64) as usize] = 0;
        }
        self.second = self.second.max(second);
        let slice = second / SLICE_SECONDS;
        let passed = slice.saturating_sub(self.slice).min(SLICES as u64);
        for forgotten in slice - passed..slice {
            self.latencies[((forgotten + 1) % SLICES as u64) as usize] = [0; BUCKETS];
        }
        self.slice = self.slice.max(slice);
    }

    pub fn minute(&mut self) -> Minute {
        self.minute_at(now())
    }

    fn minute_at(&mut self, second: u64) -> Minute {
        self.move_to(second);
        let mut minute = Minute { known: (second - self.since.min(second)).min(SECONDS as u64), ..Minute::default() };
        for (at, count) in minute.counts.iter_mut().enumerate() {
            *count = self.counts[((second as usize) + 1 + at) % SECONDS];
        }
        for slice in &self.latencies {
            for (sum, count) in minute.latencies.iter_mut().zip(slice) {
                *sum = sum.saturating_add(*count);
            }
        }
        minute
    }
}

/// A copy of the last minute.
#[derive(Clone, Debug)]
pub struct Minute {
    /// Events of each second, the newest last; that one is not over yet.
    pub counts: [u32; SECONDS],
    latencies: [u32; BUCKETS],
    /// Seconds that were watched.
    known: u64,
}

impl Default for Minute {
    fn default() -> Self {
        Minute { counts: [0; SECONDS], latencies: [0; BUCKETS], known: 0 }
    }
}

impl Minute {
    /// Adds another's.
    pub fn add(&mut self, other: &Minute) {
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum = sum.saturating_add(*count);
        }
        for (sum, count) in self.latencies.iter_mut().zip(&other.latencies) {
            *sum = sum.saturating_add(*count);
        }
        self.known = self.known.max(other.known);
    }

    /// Events a second, over the last ten that are over.
    pub fn rate(&self) -> f64 {
        let seconds = self.known.clamp(1, 10) as usize;
        let over = &self.counts[SECONDS - 1 - seconds..SECONDS - 1];
        over.iter().map(|count| f64::from(*count)).sum::<f64>() / seconds as f64
    }

    /// The latency that this share of the events did not exceed, in seconds; `None` when there were none.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.latencies.iter().map(|count| u64::from(*count)).sum();
        let wanted = ((all as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (at, count) in self.latencies.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted {
                return Some(middle(at));
            }
        }
        None
    }
}

fn bucket(seconds: f64) -> usize {
    let doublings = (seconds / SHORTEST).max(1.0).log2();
    ((doublings * PER_DOUBLING) as usize).min(BUCKETS - 1)
}

/// What stands for all latencies of a bucket.
fn middle(bucket: usize) -> f64 {
    SHORTEST * ((bucket as f64 + 0.5) / PER_DOUBLING).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recent() -> Recent {
        Recent { second: 100, slice: 10, since: 100, ..Recent::default() }
    }

    #[test]
    fn seconds_are_counted_newest_last_and_forgotten_after_a_minute() {
        let mut recent = recent();
        recent.acknowledged_at(101, 5, None);
        recent.acknowledged_at(101, 2, None);
        recent.acknowledged_at(103, 1, None);
        let minute = recent.minute_at(104);
        assert_eq!(minute.counts[SECONDS - 5..], [0, 7, 0, 1, 0]);
        assert_eq!(minute.rate(), 2.0, "eight in the four seconds that were watched");
        let later = recent.minute_at(161);
        assert_eq!(later.counts.iter().sum::<u32>(), 1, "the second 101 is a minute back");
        assert_eq!(recent.minute_at(5000).counts, [0; SECONDS]);
        recent.acknowledged_at(5001, 9, None);
        assert_eq!(recent.minute_at(5001).counts[SECONDS - 2..], [0, 9]);
    }

    #[test]
    fn percentiles_are_right_to_a_tenth_and_are_forgotten_after_a_minute() {
        let mut recent = recent();
        assert_eq!(recent.minute_at(100).percentile(0.5), None);
        for millis in 1..=1000 {
            recent.acknowledged_at(101, 1, Some(f64::from(millis) / 1000.0));
        }
        let minute = recent.minute_at(102);
        for (share, expected) in [(0.5, 0.5), (0.9, 0.9), (0.99, 0.99)] {
            let found = minute.percentile(share).unwrap();
            assert!((found - expected).abs() / expected < 0.1, "{share}: {found} instead of {expected}");
        }
        assert!(recent.minute_at(158).percentile(0.5).is_some());
        assert_eq!(recent.minute_at(165).percentile(0.5), None);
        // Whatever the clocks say.
        for odd in [0.0, f64::NAN, 1e12] {
            recent.acknowledged_at(166, 1, Some(odd));
        }
        assert!(recent.minute_at(166).percentile(1.0).is_some_and(|longest| longest > 600.0));
    }

    #[test]
    fn minutes_of_several_add_up() {
        let (mut one, mut other) = (recent(), recent());
        one.acknowledged_at(101, 3, Some(0.001));
        other.acknowledged_at(101, 4, Some(1.0));
        let mut sum = one.minute_at(102);
        sum.add(&other.minute_at(102));
        assert_eq!(sum.counts[SECONDS - 2], 7);
        assert!(sum.percentile(0.1).is_some_and(|found| found < 0.002));
        assert!(sum.percentile(0.9).is_some_and(|found| found > 0.8));
    }
}
