//! Outboxes whose rows are old: a table `aged` of the layout `native`, made by `init`, whose rows say when they were made.

use std::ops::Range;

use mongodb::bson::{DateTime, doc};

use super::command::Ended;
use super::{HttpServer, Outbox, PATIENCE, Relay, Source, Topic, eventually, outboxd};

const DAY_MILLIS: i64 = 86_400_000;

pub struct Aged {
    pub outbox: Outbox,
    flags: Vec<String>,
}

impl Aged {
    /// Read from the log.
    pub async fn create(source: Source) -> Self {
        Self::init(source, &[]).await
    }

    /// With more that is said to `init`.
    pub async fn init(source: Source, more: &[&str]) -> Self {
        let outbox = Outbox::create(source).await;
        let aged = Aged { outbox, flags: ["--table", "aged"].map(str::to_owned).to_vec() };
        for expected in ["created ", "nothing to do: everything is in place"] {
            let ended = aged.run_init(more).await;
            assert!(ended.code == 0 && ended.stdout.contains(expected), "{ended:?}");
        }
        aged
    }

    pub async fn run_init(&self, more: &[&str]) -> Ended {
        outboxd(&[&["init", &self.outbox.url(), "--table", "aged"], more].concat()).await
    }

    fn arguments<'a>(&'a self, command: &'a str, url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let flags = self.flags.iter().map(String::as_str);
        [command, url].into_iter().chain(flags).chain(more.iter().copied()).collect()
    }

    /// One row for each number, made so many days ago, in one statement.
    pub async fn add(&self, numbers: Range<usize>, days: i64) {
        if self.outbox.source == Source::MongoDb {
            let made = DateTime::from_millis(DateTime::now().timestamp_millis() - days * DAY_MILLIS);
            let documents =
                numbers.map(|n| doc! { "partition_key": "k", "payload": { "n": n as i64 }, "created_at": made });
            let added = self.outbox.mongodb().collection("aged").insert_many(documents).await;
            added.expect("documents are added");
            return;
        }
        self.outbox.execute(&self.insert(numbers, days)).await;
    }

    /// The statement of [`add`](Self::add).
    pub fn insert(&self, numbers: Range<usize>, days: i64) -> String {
        let row = |n: usize| format!("('k', '{{\"n\":{n}}}', {})", self.moment(days));
        let rows: Vec<_> = numbers.map(row).collect();
        format!("INSERT INTO aged (partition_key, payload, created_at) VALUES {}", rows.join(", "))
    }

    /// So many days ago.
    pub fn moment(&self, days: i64) -> String {
        match self.outbox.source.is_postgres() {
            true => format!("now() - interval '{days} days'"),
            false => format!("utc_timestamp(6) - INTERVAL {days} DAY"),
        }
    }

    pub async fn count(&self) -> u64 {
        match self.outbox.source {
            Source::MongoDb => self.outbox.mongodb().count("aged").await,
            _ => self.number("SELECT COUNT(*) FROM aged").await,
        }
    }

    pub async fn number(&self, query: &str) -> u64 {
        let text = self.outbox.text(query).await.unwrap_or_else(|| panic!("{query}: no row"));
        text.parse().unwrap_or_else(|_| panic!("{query}: {text} is not a number"))
    }

    pub async fn until_count(&self, count: u64) {
        eventually(PATIENCE, &format!("{count} rows are left"), async || (self.count().await == count).then_some(()))
            .await;
    }

    pub async fn prune(&self, more: &[&str]) -> Ended {
        let url = self.outbox.url();
        outboxd(&self.arguments("prune", &url, &[&["--older-than", "30d"], more].concat())).await
    }

    /// A pass that ends well, and says this.
    pub async fn prunes(&self, more: &[&str], says: &str) {
        let ended = self.prune(more).await;
        assert!(ended.code == 0 && ended.stdout.contains(says), "`{says}` is not said: {ended:?}");
    }

    /// The same beside the test; its log is what it says on stderr.
    pub fn pruning(&self, more: &[&str]) -> Relay {
        let url = self.outbox.url();
        Relay::spawn(&self.arguments("prune", &url, &[&["--older-than", "30d"], more].concat()))
    }

    pub fn relay_to(&self, sink: &HttpServer, more: &[&str]) -> Relay {
        let (url, sink) = (self.outbox.url(), sink.url());
        let to = ["--sink", &sink, "--lanes", "1", "--http-batch", "1", "--retry-backoff", "50ms"];
        Relay::spawn(&self.arguments("run", &url, &[&to[..], more].concat()))
    }

    pub fn relay(&self, topic: &Topic, more: &[&str]) -> Relay {
        let url = self.outbox.url();
        let to = ["--brokers", &topic.brokers, "--topic", &topic.name];
        Relay::spawn(&self.arguments("run", &url, &[&to[..], more].concat()))
    }

    /// Delivers all that is committed.
    pub async fn deliver(&self, topic: &Topic) {
        self.relay(topic, &["--until-caught-up"]).exits_with(0).await;
    }
}
