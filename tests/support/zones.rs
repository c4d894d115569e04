//! An outbox that keeps receipts: a table of the layout `produce-receive`, its topic, and confirmers beside the relay.

use std::ops::Range;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::{Form, PATIENCE, Polled, Relay, Source, Topic, eventually};

const FORM: Form = Form::ProduceReceive;

pub struct Zones {
    pub polled: Polled,
    pub topic: Topic,
}

impl Zones {
    pub async fn create(source: Source, partitions: i32) -> Self {
        let polled = Polled::create(source, FORM).await;
        Zones { polled, topic: Topic::create(partitions).await }
    }

    /// On a private database server.
    pub async fn create_at(source: Source, server_url: &str, partitions: i32) -> Self {
        let polled = Polled::create_at(source, server_url, FORM).await;
        Zones { polled, topic: Topic::create(partitions).await }
    }

    pub fn table(&self) -> &'static str {
        FORM.table()
    }

    /// The group that confirmers are in.
    pub fn group(&self) -> String {
        format!("{}-receipts", self.topic.name)
    }

    /// The arguments of a confirmer of the table that is found at this address.
    pub fn arguments<'a>(&'a self, url: &'a str, group: &'a str, flags: &[&'a str]) -> Vec<&'a str> {
        let confirm = ["confirm", url, "--brokers", &self.topic.brokers, "--topic", &self.topic.name, "--group", group];
        [&confirm[..], &["--table", FORM.table()], flags].concat()
    }

    pub fn confirmer(&self, flags: &[&str]) -> Relay {
        self.confirmer_at(&self.polled.outbox.url(), flags)
    }

    pub fn confirmer_at(&self, url: &str, flags: &[&str]) -> Relay {
        Relay::spawn(&self.arguments(url, &self.group(), flags))
    }

    /// Like [`Self::confirmer`], and waits until it reads some partitions.
    pub async fn confirming(&self, flags: &[&str]) -> Relay {
        let mut confirmer = self.confirmer(flags);
        confirmer.until_state("streaming").await;
        confirmer
    }

    /// Adds rows; their ids are numbers from 1 on, in the order in which they are added.
    pub async fn add(&self, key: &str, numbers: Range<usize>) {
        self.polled.add(key, numbers).await;
    }

    /// Has all rows delivered by a relay that ends with that.
    pub async fn deliver(&self) {
        self.polled.relay(&self.topic, &["--until-caught-up"]).exits_with(0).await;
    }

    /// Produces a record as anybody may.
    pub async fn produce(&self, id: Option<&str>, value: &str) {
        self.produce_all([(id.map(str::to_owned), value.to_owned())]).await;
    }

    /// Produces the records of these rows, as a relay would.
    pub async fn produce_rows(&self, ids: Range<usize>) {
        self.produce_all(ids.map(|id| (Some(id.to_string()), "{}".to_owned()))).await;
    }

    async fn produce_all(&self, records: impl IntoIterator<Item = (Option<String>, String)>) {
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.topic.brokers)
            .set("linger.ms", "5")
            .create()
            .expect("a producer is made");
        let mut sending = Vec::new();
        for (id, value) in records {
            let mut headers = OwnedHeaders::new();
            if let Some(id) = &id {
                headers = headers.insert(Header { key: "id", value: Some(id) });
            }
            let record = FutureRecord::<str, str>::to(&self.topic.name).payload(&value).headers(headers);
            sending.push(producer.send_result(record).unwrap_or_else(|(error, _)| panic!("{error}")));
        }
        for sent in sending {
            sent.await.expect("the producer lives").unwrap_or_else(|(error, _)| panic!("a record is refused: {error}"));
        }
    }

    /// How many rows have their receipt.
    pub async fn received(&self) -> usize {
        self.polled.count("received_at IS NOT NULL").await
    }

    pub async fn until_received(&self, count: usize) {
        eventually(PATIENCE, &format!("{count} rows have their receipt"), async || {
            (self.received().await >= count).then_some(())
        })
        .await;
        assert_eq!(self.received().await, count);
    }

    /// How many statements wrote receipts: each leaves its own moment.
    pub async fn moments(&self) -> usize {
        let query = format!("SELECT count(DISTINCT received_at) FROM {}", FORM.table());
        self.polled.outbox.text(&query).await.and_then(|text| text.parse().ok()).expect("a count")
    }

    /// Offsets that the group has committed, of all partitions together.
    pub async fn committed(&self) -> i64 {
        let (brokers, group, topic) = (self.topic.brokers.clone(), self.group(), self.topic.name.clone());
        let partitions = self.topic.partitions;
        let asked = tokio::task::spawn_blocking(move || {
            let probe: BaseConsumer = ClientConfig::new()
                .set("bootstrap.servers", brokers)
                .set("group.id", group)
                .create()
                .expect("a client is made");
            let mut list = TopicPartitionList::new();
            list.add_partition_range(&topic, 0, partitions - 1);
            let committed = probe.committed_offsets(list, Duration::from_secs(20)).expect("offsets are told");
            let offset = |element: &rdkafka::topic_partition_list::TopicPartitionListElem<'_>| match element.offset() {
                Offset::Offset(offset) => offset,
                _ => 0,
            };
            committed.elements().iter().map(offset).sum()
        });
        asked.await.expect("the question is asked")
    }
}

/// A figure of a page of metrics, whatever its labels.
pub fn metric(page: &str, name: &str) -> f64 {
    let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    let line = line.unwrap_or_else(|| panic!("no {name} in {page}"));
    line.rsplit_once(' ').and_then(|(_, figure)| figure.parse().ok()).unwrap_or_else(|| panic!("no figure: {line}"))
}
