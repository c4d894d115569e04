//! What was read and is not written yet: ids, and how far each partition was read when they had been gathered. No I/O.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::id::Id;

/// A partition: the number of its topic, and its own.
pub type Place = (usize, i32);

#[derive(Debug, Default)]
pub struct Batch {
    ids: Vec<Id>,
    /// The offset after the last one read, by partition.
    upto: HashMap<Place, i64>,
    /// Records, with those that have no id of the table's.
    records: usize,
    /// When the first of them was read.
    since: Option<Instant>,
    /// When the last of them was made, in milliseconds since 1970.
    made_at: i64,
}

impl Batch {
    /// A record was read. One that is not of the table counts as read, and that is all.
    pub fn add(&mut self, place: Place, offset: i64, id: Option<Id>, made_at: Option<i64>, now: Instant) {
        self.ids.extend(id);
        self.records += 1;
        self.made_at = self.made_at.max(made_at.unwrap_or(0));
        self.reached(place, offset + 1, now);
    }

    /// All before this offset was read, though there may be no record right before it: a transaction's end, or a record
    /// that was compacted away.
    pub fn reached(&mut self, place: Place, next: i64, now: Instant) {
        let known = self.upto.entry(place).or_insert(next);
        *known = next.max(*known);
        self.since.get_or_insert(now);
    }

    pub fn is_empty(&self) -> bool {
        self.upto.is_empty()
    }

    pub fn records(&self) -> usize {
        self.records
    }

    pub fn made_at(&self) -> i64 {
        self.made_at
    }

    pub fn upto(&self) -> &HashMap<Place, i64> {
        &self.upto
    }

    /// How far a partition was read.
    pub fn next_of(&self, place: Place) -> Option<i64> {
        self.upto.get(&place).copied()
    }

    /// When it must be written at the latest.
    pub fn due(&self, most: usize, interval: Duration) -> Option<Instant> {
        let since = self.since?;
        Some(if self.records >= most { since } else { since + interval })
    }

    /// Each once, in the order of the index: whoever else updates these rows in that order is never waited for in a
    /// circle.
    pub fn sorted_ids(&mut self) -> &[Id] {
        self.ids.sort_unstable();
        self.ids.dedup();
        &self.ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_batch_is_due_when_it_is_full_or_its_first_record_has_waited() {
        let (mut batch, now) = (Batch::default(), Instant::now());
        assert!(batch.is_empty() && batch.due(2, SECOND).is_none());
        batch.add((0, 0), 7, Some(Id::Number(1)), None, now);
        assert_eq!(batch.due(2, SECOND), Some(now + SECOND));
        batch.add((0, 1), 3, None, None, now + SECOND / 2);
        assert_eq!(batch.due(2, SECOND), Some(now), "it is full, with a record that has no id");
        assert_eq!((batch.next_of((0, 0)), batch.next_of((0, 1)), batch.next_of((1, 0))), (Some(8), Some(4), None));
    }

    #[test]
    fn a_place_behind_the_last_record_is_reached_without_one() {
        let (mut batch, now) = (Batch::default(), Instant::now());
        batch.reached((0, 0), 12, now);
        assert_eq!((batch.records(), batch.is_empty(), batch.due(1000, SECOND)), (0, false, Some(now + SECOND)));
        assert!(batch.sorted_ids().is_empty());
        batch.reached((0, 0), 5, now);
        assert_eq!(batch.next_of((0, 0)), Some(12), "and is never gone back from");
    }

    proptest! {
        #[test]
        fn ids_come_each_once_and_in_order(numbers: Vec<i64>) {
            let mut batch = Batch::default();
            for (offset, number) in numbers.iter().enumerate() {
                batch.add((0, 0), offset as i64, Some(Id::Number((*number).into())), None, Instant::now());
            }
            let ids: Vec<_> = batch.sorted_ids().to_vec();
            prop_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
            let expected: std::collections::BTreeSet<_> = numbers.iter().map(|number| Id::Number((*number).into())).collect();
            prop_assert_eq!(ids.len(), expected.len());
        }
    }
}
