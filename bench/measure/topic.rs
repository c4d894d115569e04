//! The topic at the end of every measurement.

use std::time::Duration;

use anyhow::{Context as _, bail};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::{ClientConfig, FromClientConfig as _};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};

const PATIENCE: Duration = Duration::from_secs(20);

pub struct Topic {
    pub name: String,
    partitions: i32,
    pub consumer: BaseConsumer,
}

impl Topic {
    /// Makes a new topic and waits until all its partitions have a leader.
    pub async fn create(brokers: &str, name: &str, partitions: i32) -> anyhow::Result<Self> {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", brokers);
        let admin: AdminClient<DefaultClientContext> = AdminClient::from_config(&config)?;
        let new = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        for outcome in admin.create_topics(&[new], &AdminOptions::new()).await? {
            outcome.map_err(|(topic, code)| anyhow::anyhow!("creating topic `{topic}`: {code}"))?;
        }
        // With one byte as the least, the broker answers a fetch as soon as there is something; no groups, no commits.
        config.set("group.id", "bench").set("enable.auto.commit", "false").set("fetch.min.bytes", "1");
        let consumer: BaseConsumer = config.create()?;
        let topic = Topic { name: name.to_owned(), partitions, consumer };
        let deadline = std::time::Instant::now() + PATIENCE;
        while topic.records().is_err() {
            if std::time::Instant::now() > deadline {
                topic.records().context("the new topic does not become usable")?;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(topic)
    }

    /// How many records it holds: the sum of the high watermarks, asked for in one request. Nothing is ever deleted
    /// or compacted, and a producer without transactions writes no markers.
    pub fn records(&self) -> anyhow::Result<u64> {
        let ends = self.consumer.offsets_for_times(self.at(Offset::End)?, PATIENCE)?;
        let mut records = 0;
        for element in ends.elements() {
            match (element.error(), element.offset()) {
                (Ok(()), Offset::Offset(end)) => records += u64::try_from(end)?,
                (Ok(()), Offset::End) => {}
                (error, offset) => bail!("partition {}: {error:?}, {offset:?}", element.partition()),
            }
        }
        Ok(records)
    }

    /// Reads from one end of the topic on.
    pub fn assign(&self, from: Offset) -> anyhow::Result<()> {
        Ok(self.consumer.assign(&self.at(from)?)?)
    }

    fn at(&self, offset: Offset) -> anyhow::Result<TopicPartitionList> {
        let mut list = TopicPartitionList::new();
        for partition in 0..self.partitions {
            list.add_partition_offset(&self.name, partition, offset)?;
        }
        Ok(list)
    }
}
