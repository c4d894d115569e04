//! Kafka: the broker inside this process, or the user's own; and an ordinary consumer of the demo's topic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{BorrowedMessage, Headers as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};
use tokio::sync::mpsc::UnboundedSender;

use super::Happening;
use super::ledger::Arrival;
use super::scratch::token;
use crate::cli::unexpected;
use crate::failure::{ExitCode, Halt};

const PARTITIONS: i32 = 3;

pub struct Broker {
    servers: String,
    topic: String,
    /// The broker lives as long as this.
    embedded: Option<MockCluster<'static, DefaultProducerContext>>,
}

impl Broker {
    pub fn start(servers: Option<&str>) -> Result<Broker, Halt> {
        let Some(servers) = servers.filter(|servers| *servers != "embedded") else {
            let failed = |error| unexpected(format!("no embedded broker: {error}"));
            let cluster = MockCluster::new(1).map_err(failed)?;
            let topic = "orders.events".to_owned();
            cluster.create_topic(&topic, PARTITIONS, 1).map_err(failed)?;
            return Ok(Broker { servers: cluster.bootstrap_servers(), topic, embedded: Some(cluster) });
        };
        // Not the topic of somebody else, nor of another demo.
        let topic = format!("orders.events.demo-{}", token(4)?);
        Ok(Broker { servers: servers.to_owned(), topic, embedded: None })
    }

    pub fn servers(&self) -> &str {
        &self.servers
    }

    pub fn topic(&self) -> &str {
        &self.topic
    }

    pub fn is_embedded(&self) -> bool {
        self.embedded.is_some()
    }

    /// With how many partitions the relay is to create the topic, unless it is there.
    pub fn topic_to_create(&self) -> Option<i32> {
        self.embedded.is_none().then_some(PARTITIONS)
    }

    /// Removes from the user's own Kafka what was made there.
    pub async fn remove_topic(&self) {
        let admin = self.client().create::<AdminClient<DefaultClientContext>>();
        if let (Ok(admin), None) = (admin, &self.embedded) {
            let patience = AdminOptions::new().request_timeout(Some(Duration::from_secs(5)));
            let _ = admin.delete_topics(&[&self.topic], &patience).await;
        }
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.servers).set("client.id", "outboxd-demo");
        config
    }

    /// Consumes the topic from its beginning.
    pub fn consume(&self, happenings: UnboundedSender<Happening>) -> Result<Consumer, Halt> {
        let failed = |error| Halt {
            code: ExitCode::SinkNotReady,
            what: format!("cannot consume {} from {}: {error}", self.topic, self.servers),
            remedy: String::new(),
        };
        let mut config = self.client();
        config.set("group.id", "outboxd-demo").set("enable.auto.commit", "false").set("auto.offset.reset", "earliest");
        if self.embedded.is_some() {
            // The embedded broker lets a fetch that found nothing wait its full time, whatever is produced meanwhile.
            config.set("fetch.wait.max.ms", "2");
        }
        let consumer: BaseConsumer = config.create().map_err(failed)?;
        let mut all = TopicPartitionList::new();
        for partition in 0..PARTITIONS {
            all.add_partition_offset(&self.topic, partition, Offset::Beginning).map_err(failed)?;
        }
        consumer.assign(&all).map_err(failed)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let polled = consumer.poll(Duration::from_millis(50));
                let at = Instant::now();
                // Passing errors of the connection are librdkafka's to mend.
                if let Some(Ok(record)) = polled
                    && happenings.send(Happening::Arrived(arrival(&record, at))).is_err()
                {
                    break;
                }
            }
        });
        Ok(Consumer { stop, thread: Some(thread) })
    }
}

fn arrival(record: &BorrowedMessage<'_>, at: Instant) -> Arrival {
    let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
    let headers = record.headers();
    let id = headers.and_then(|headers| headers.iter().find(|header| header.key == "id")).and_then(|id| id.value);
    let value = text(record.payload());
    let payload: Option<serde_json::Value> = serde_json::from_str(&value).ok();
    Arrival {
        id: text(id),
        key: text(record.key()),
        number: payload.and_then(|payload| payload.get("number")?.as_i64()),
        topic: record.topic().to_owned(),
        partition: record.partition(),
        offset: record.offset(),
        value,
        at,
    }
}

/// The consuming thread; ends when dropped.
pub struct Consumer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
