//! A pipeline from a MongoDB database to a topic of its own, whose events are numbers.

use mongodb::bson::{Document, doc};

use super::{MongoDatabase, PATIENCE, Relay, Topic, TopicReader, eventually, mongodb_url, until_log};

pub struct Documents {
    pub database: MongoDatabase,
    pub topic: Topic,
    pub reader: TopicReader,
}

impl Documents {
    /// On the shared server.
    pub async fn create() -> Self {
        Self::at(&mongodb_url()).await
    }

    pub async fn at(server_url: &str) -> Self {
        let database = MongoDatabase::with_outbox_at(server_url).await;
        let topic = Topic::create(1).await;
        Documents { reader: topic.reader(), database, topic }
    }

    pub fn start(&self, flags: &[&str]) -> Relay {
        Relay::start_at(&self.database.url(), &self.topic, flags)
    }

    /// A relay that reads the stream: what is committed from now on must arrive.
    pub async fn reading(&self, flags: &[&str]) -> Relay {
        let mut relay = self.start(flags);
        until_log(&mut relay, "reading the change stream").await;
        relay
    }

    /// Commits one event.
    pub async fn add(&self, number: u32) {
        self.add_to("outbox", number).await;
    }

    /// Commits one event in this collection.
    pub async fn add_to(&self, collection: &str, number: u32) {
        let added = self.database.collection(collection).insert_one(numbered(number)).await;
        added.expect("a document is added");
    }

    /// The stored position; that of the pipeline's usual name.
    pub async fn position(&self) -> Option<String> {
        let checkpoint = self.database.checkpoint().await?;
        checkpoint.get_str("position").ok().map(str::to_owned)
    }

    /// Waits until there is a stored position.
    pub async fn until_stored(&self) {
        eventually(PATIENCE, "a position is stored", async || self.position().await).await;
    }

    /// Waits until the snapshot is in this state.
    pub async fn until_snapshot_is(&self, state: &str) {
        eventually(PATIENCE, &format!("the snapshot is {state}"), async || {
            let checkpoint = self.database.checkpoint().await?;
            checkpoint.get_str("snapshot").ok().filter(|stored| *stored == state).map(drop)
        })
        .await;
    }
}

/// A document whose payload is the number, as text.
pub fn numbered(number: u32) -> Document {
    doc! { "partition_key": "k", "payload": number.to_string() }
}
