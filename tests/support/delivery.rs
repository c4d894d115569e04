//! What was committed, and whether it arrived.
//!
//! Every event takes the next number of its key from a counter in its own transaction. The counter's row is locked
//! until the commit, so numbers are in commit order for each key, and a number that was rolled back is taken by a
//! later event: what the table holds is exactly what must arrive, and in which order.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio_postgres::{Client, Statement};

use super::{Database, Record, TopicReader};

const ADD: &str = "WITH next AS (
        INSERT INTO counters (key, seq) VALUES ($1, 1)
        ON CONFLICT (key) DO UPDATE SET seq = counters.seq + 1 RETURNING seq
    )
    INSERT INTO outbox (partition_key, payload, seq)
    SELECT $1, jsonb_build_object('key', $1::text, 'seq', seq, 'pad', repeat('x', $2)), seq FROM next";

/// A connection that adds events.
pub struct Writer {
    sql: Client,
    add: Statement,
    padding: i32,
}

impl Writer {
    pub async fn connect(database: &Database) -> Self {
        Self::padded(database, 0).await
    }

    /// Whose payloads have this many bytes more than they need.
    pub async fn padded(database: &Database, padding: i32) -> Self {
        let sql = database.connect().await;
        let add = sql.prepare(ADD).await.expect("the insert is prepared");
        Writer { sql, add, padding }
    }

    /// Adds one event in the transaction that is open, if there is one. Keys must come in one order in all
    /// transactions, or writers wait for each other in a circle.
    pub async fn add(&self, key: &str) {
        self.try_add(key).await.unwrap_or_else(|error| panic!("an event is added: {error:?}"));
    }

    async fn try_add(&self, key: &str) -> Result<(), tokio_postgres::Error> {
        self.sql.execute(&self.add, &[&key, &self.padding]).await.map(drop)
    }

    pub async fn run(&self, statement: &str) {
        self.sql.batch_execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error:?}"));
    }

    /// One transaction with an event of each key.
    pub async fn commit(&self, keys: &[&str]) {
        self.try_commit(keys).await.unwrap_or_else(|error| panic!("events are committed: {error:?}"));
    }

    /// For a server that may be going away: whether the events were committed is what the table says later.
    pub async fn try_commit(&self, keys: &[&str]) -> Result<(), tokio_postgres::Error> {
        self.sql.batch_execute("BEGIN").await?;
        for key in keys {
            self.try_add(key).await?;
        }
        self.sql.batch_execute("COMMIT").await
    }
}

/// The ids that were committed, by key, in commit order.
pub struct Expected {
    by_key: HashMap<String, Vec<String>>,
    count: usize,
}

/// What was found in a topic.
#[derive(Debug)]
pub struct Delivered {
    pub events: usize,
    pub duplicates: usize,
}

impl Expected {
    pub async fn of(database: &Database) -> Self {
        let query = "SELECT partition_key, id::text FROM outbox ORDER BY partition_key, seq";
        let rows = database.sql.query(query, &[]).await.expect("the table is read");
        Self::of_rows(rows.iter().map(|row| (row.get(0), row.get(1))))
    }

    /// Of keys and ids, the ids of a key in commit order.
    pub fn of_rows(rows: impl Iterator<Item = (String, String)>) -> Self {
        let (mut by_key, mut count): (HashMap<String, Vec<String>>, usize) = (HashMap::new(), 0);
        for (key, id) in rows {
            by_key.entry(key).or_default().push(id);
            count += 1;
        }
        Expected { by_key, count }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Reads until all are there and then to the topic's end, and checks: all there, first occurrences in commit
    /// order for each key, nothing that was not committed.
    pub async fn arrive_in(&self, reader: &mut TopicReader, within: Duration) -> Delivered {
        let mut missing: HashSet<&str> = self.by_key.values().flatten().map(String::as_str).collect();
        let mut looked_at = 0;
        let all_there = |records: &[Record]| {
            for record in &records[looked_at..] {
                missing.remove(record.id());
            }
            looked_at = records.len();
            missing.is_empty()
        };
        let what = format!("{} committed events arrive", self.count);
        let mut records = reader.until(within, &what, all_there).await;
        records.extend(reader.rest().await);
        self.check(&records)
    }

    pub fn check(&self, records: &[Record]) -> Delivered {
        let committed: HashSet<&str> = self.by_key.values().flatten().map(String::as_str).collect();
        let mut seen = HashSet::new();
        let mut firsts: HashMap<&str, Vec<&str>> = HashMap::new();
        for record in records {
            assert!(committed.contains(record.id()), "an event that was not committed arrived: {record:?}");
            if seen.insert(record.id()) {
                firsts.entry(record.key.as_deref().expect("every event has a key")).or_default().push(record.id());
            }
        }
        for (key, ids) in &self.by_key {
            let arrived = firsts.remove(key.as_str()).unwrap_or_default();
            let lost = ids.iter().filter(|id| !seen.contains(id.as_str())).count();
            assert_eq!(lost, 0, "of the {} events of key {key}, {lost} were lost", ids.len());
            if let Some(place) = ids.iter().zip(&arrived).position(|(committed, arrived)| committed != arrived) {
                panic!("the events of key {key} arrived out of order, from the {}th of {} on", place + 1, ids.len());
            }
        }
        assert!(firsts.is_empty(), "events arrived under keys that have none: {:?}", firsts.keys());
        Delivered { events: self.count, duplicates: records.len() - self.count }
    }
}
