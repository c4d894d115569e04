//! A pipeline from a MySQL or MariaDB database to a topic of its own, whose events are numbers.

use std::time::Duration;

use super::{MySqlDatabase, MySqlFlavor, PATIENCE, Record, Relay, Topic, TopicReader, eventually};

/// Proves a promise on each kind of server, at the same time.
pub async fn on_both(promise: impl AsyncFn(MySqlFlavor)) {
    tokio::join!(promise(MySqlFlavor::MySql), promise(MySqlFlavor::MariaDb));
}

pub struct Numbers {
    pub database: MySqlDatabase,
    pub topic: Topic,
    pub reader: TopicReader,
}

impl Numbers {
    pub async fn on(flavor: MySqlFlavor) -> Self {
        Self::at(&flavor.url()).await
    }

    pub async fn at(server_url: &str) -> Self {
        let database = MySqlDatabase::with_outbox_at(server_url).await;
        let topic = Topic::create(1).await;
        Numbers { reader: topic.reader(), database, topic }
    }

    pub fn start(&self, flags: &[&str]) -> Relay {
        Relay::start_at(&self.database.url(), &self.topic, flags)
    }

    /// A relay that reads the log: what is committed from now on must arrive.
    pub async fn reading(&self, flags: &[&str]) -> Relay {
        let mut relay = self.start(flags);
        until_reading(&mut relay).await;
        relay
    }

    /// Commits one event.
    pub async fn add(&self, number: u32) {
        self.database.execute(&add(number)).await;
    }

    /// The GTIDs of all that is committed.
    pub async fn end_of_log(&self) -> String {
        let query = match self.database.flavor() {
            MySqlFlavor::MySql => "SELECT REPLACE(@@GLOBAL.gtid_executed, '\n', '')",
            MySqlFlavor::MariaDb => "SELECT @@GLOBAL.gtid_binlog_pos",
        };
        self.database.text(query).await.expect("a position")
    }

    /// These numbers come next, in this order, and nothing between them.
    pub async fn arrive(&mut self, numbers: &[u32]) {
        self.reader.arrive(numbers).await;
    }

    /// All of these come, some maybe more than once, and nothing else but what may come again.
    pub async fn arrive_at_least_once(&mut self, numbers: &[u32], again: &[u32]) {
        self.reader.arrive_at_least_once(numbers, again).await;
    }

    /// Nothing is in the topic that was not read.
    pub async fn nothing_more(&mut self) {
        self.reader.nothing_more().await;
    }

    /// Waits until the stored position is as it should be.
    pub async fn until_stored(&self, what: &str, mut is: impl FnMut(&str) -> bool) -> String {
        eventually(PATIENCE, what, async || self.database.checkpoint().await.filter(|stored| is(stored))).await
    }

    /// Waits until the stored position is another one.
    pub async fn until_stored_after(&self, before: &str) -> String {
        self.until_stored("the checkpoint moves", |stored| stored != before).await
    }
}

/// Of events whose payloads are numbers.
impl TopicReader {
    /// These numbers come next, in this order, and nothing between them.
    pub async fn arrive(&mut self, numbers: &[u32]) {
        let records = self.take(numbers.len()).await;
        assert_eq!(values(&records), texts(numbers));
    }

    /// All of these come, some maybe more than once, and nothing else but what may come again.
    pub async fn arrive_at_least_once(&mut self, numbers: &[u32], again: &[u32]) {
        let (wanted, again) = (texts(numbers), texts(again));
        let all = |records: &[Record]| wanted.iter().all(|number| values(records).contains(number));
        let mut records = self.until(PATIENCE, &format!("{wanted:?} arrive"), all).await;
        records.extend(self.rest().await);
        let known = |value: &String| wanted.contains(value) || again.contains(value);
        let strange: Vec<_> = values(&records).into_iter().filter(|value| !known(value)).collect();
        assert!(strange.is_empty(), "{strange:?} arrived too");
    }

    /// Nothing is in the topic that was not read.
    pub async fn nothing_more(&mut self) {
        let rest = values(&self.rest().await);
        assert!(rest.is_empty(), "{rest:?} arrived too");
    }
}

/// The statement that adds an event.
pub fn add(number: u32) -> String {
    format!("INSERT INTO outbox (partition_key, payload) VALUES ('k', '{number}')")
}

pub fn values(records: &[Record]) -> Vec<String> {
    records.iter().map(|record| record.value.clone().unwrap_or_default()).collect()
}

pub fn texts(numbers: &[u32]) -> Vec<String> {
    numbers.iter().map(u32::to_string).collect()
}

pub async fn until_reading(relay: &mut Relay) {
    until_log(relay, "reading the log").await;
}

/// Waits until the relay's log has the words.
pub async fn until_log(relay: &mut Relay, words: &str) {
    eventually(PATIENCE, &format!("the relay says `{words}`"), async || {
        let said = relay.log().contains(words);
        assert!(said || relay.is_running(), "the relay ended without saying `{words}`");
        said.then_some(())
    })
    .await;
}

/// The relay ends with this code, having said all of the words.
pub async fn ends(mut relay: Relay, code: i32, words: &[&str]) {
    let status = relay.exit(PATIENCE).await;
    let log = relay.log();
    assert_eq!(status.code(), Some(code), "{log}");
    for words in words {
        assert!(log.contains(words), "the relay says `{words}`: {log}");
    }
}

/// Long enough for something that must not happen to have happened.
pub async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(700)).await;
}
