//! A queue of RabbitMQ, and reading it whole.

use std::time::{Duration, Instant};

use lapin::options::{
    BasicGetOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};

use super::unique;

/// A durable topic exchange; or another, or none, as one likes.
pub struct Exchange {
    pub url: String,
    pub name: String,
}

impl Exchange {
    pub async fn declare(url: &str) -> Self {
        Self::declare_as(url, ExchangeKind::Topic).await
    }

    pub async fn declare_as(url: &str, kind: ExchangeKind) -> Self {
        let exchange = Self::missing(url);
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let (_connection, channel) = channel(url).await;
        let declared = channel.exchange_declare(exchange.name.as_str().into(), kind, options, FieldTable::default());
        declared.await.expect("an exchange is declared");
        exchange
    }

    /// A name that no exchange has.
    pub fn missing(url: &str) -> Self {
        Exchange { url: url.to_owned(), name: unique("promise") }
    }

    pub async fn delete(&self) {
        let (_connection, channel) = channel(&self.url).await;
        let deleted = channel.exchange_delete(self.name.as_str().into(), ExchangeDeleteOptions::default());
        deleted.await.expect("the exchange is deleted");
    }

    /// A durable queue that gets what the pattern matches.
    pub async fn queue(&self, pattern: &str) -> Queue {
        self.queue_with(pattern, &[]).await
    }

    pub async fn queue_with(&self, pattern: &str, arguments: &[(&str, AMQPValue)]) -> Queue {
        let queue = Queue { url: self.url.clone(), name: unique("promise"), read: Vec::new() };
        let mut table = FieldTable::default();
        for (name, value) in arguments {
            table.insert((*name).into(), value.clone());
        }
        let (_connection, channel) = channel(&self.url).await;
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.name.as_str().into(), options, table).await.expect("a queue is declared");
        let (name, exchange) = (queue.name.as_str().into(), self.name.as_str().into());
        let bound =
            channel.queue_bind(name, exchange, pattern.into(), QueueBindOptions::default(), FieldTable::default());
        bound.await.expect("the queue is bound");
        queue
    }
}

#[derive(Clone, Debug)]
pub struct Message {
    pub routing_key: String,
    pub body: Vec<u8>,
    pub properties: BasicProperties,
}

impl Message {
    pub fn header(&self, name: &str) -> Option<String> {
        match self.properties.headers().as_ref()?.inner().get(name)? {
            AMQPValue::LongString(text) => Some(text.to_string()),
            other => Some(format!("{other:?}")),
        }
    }

    /// The member `n` of its payload.
    pub fn number(&self) -> u64 {
        let payload: serde_json::Value = serde_json::from_slice(&self.body).expect("the payload is JSON");
        payload["n"].as_u64().expect("the payload has a number")
    }
}

pub struct Queue {
    url: String,
    pub name: String,
    read: Vec<Message>,
}

impl Queue {
    /// All that was read, and what is there now.
    pub async fn messages(&mut self) -> &[Message] {
        let (_connection, channel) = channel(&self.url).await;
        let options = BasicGetOptions { no_ack: true };
        while let Some(got) = channel.basic_get(self.name.as_str().into(), options).await.expect("the queue is read") {
            let delivery = got.delivery;
            self.read.push(Message {
                routing_key: delivery.routing_key.to_string(),
                body: delivery.data,
                properties: delivery.properties,
            });
        }
        &self.read
    }

    /// Reads until the condition holds.
    pub async fn until(&mut self, within: Duration, what: &str, holds: impl Fn(&[Message]) -> bool) -> &[Message] {
        let begin = Instant::now();
        while !holds(self.messages().await) {
            assert!(begin.elapsed() < within, "not within {within:?}, with {} messages: {what}", self.read.len());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        &self.read
    }
}

/// Closed when the connection is dropped.
async fn channel(url: &str) -> (Connection, Channel) {
    let connection = Connection::connect(url, ConnectionProperties::default()).await;
    let connection = connection.unwrap_or_else(|error| panic!("RabbitMQ lets the test in: {error}"));
    let channel = connection.create_channel().await.expect("a channel is opened");
    (connection, channel)
}
