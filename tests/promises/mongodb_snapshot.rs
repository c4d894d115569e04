//! `--snapshot existing` over MongoDB: documents from before the first start, while others are being written.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mongodb::bson::{DateTime, Document, doc};

use crate::support::{Documents, Outbox, PATIENCE, Record, Source, Topic, eventually, numbered, outboxd, values};

#[tokio::test(flavor = "multi_thread")]
async fn existing_documents_and_concurrent_ones_all_arrive_in_order() {
    const KEYS: [&str; 4] = ["a", "b", "c", "d"];
    let outbox = Outbox::create(Source::MongoDb).await;
    let topic = Topic::create(1).await;
    let database = outbox.mongodb();
    let writer = outbox.writer().await;
    for _ in 0..50 {
        writer.commit(&KEYS).await;
    }
    // So many that the snapshot takes a while; they are of a key of their own.
    for first in (0..60_000_i64).step_by(10_000) {
        let filling = (first..first + 10_000).map(|n| doc! { "partition_key": "filling", "payload": "x", "seq": n });
        database.insert_many(filling).await;
    }
    let enough = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for _ in 0..3 {
        let (writer, enough) = (outbox.writer().await, enough.clone());
        writers.push(tokio::spawn(async move {
            while !enough.load(Ordering::Relaxed) {
                writer.commit(&KEYS).await;
            }
        }));
    }
    let mut relay = outbox.streaming(&topic, &["--snapshot", "existing", "--checkpoint-interval", "50ms"]).await;
    eventually(PATIENCE, "the snapshot is done", async || {
        let checkpoint = database.checkpoint().await?;
        checkpoint.get_str("snapshot").ok().filter(|state| *state == "done").map(drop)
    })
    .await;
    enough.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.expect("a writer wrote");
    }
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    println!("{delivered:?}");
    relay.until_state("streaming").await;
    relay.stop().await;
    // A second start reads only what is new.
    let mut reader = topic.reader();
    reader.rest().await;
    writer.commit(&["new"]).await;
    let relay = outbox.streaming(&topic, &["--snapshot", "existing"]).await;
    assert_eq!(reader.take(1).await[0].key.as_deref(), Some("new"));
    relay.stop().await;
    assert_eq!(reader.rest().await.len(), 0);
}

#[tokio::test]
async fn existing_documents_come_by_their_time() {
    let mut documents = Documents::create().await;
    for (number, second) in [(3, 30), (1, 10), (2, 20), (0, 5)] {
        let mut document = numbered(number);
        document.insert("created_at", DateTime::from_millis(second * 1000));
        documents.database.insert(document).await;
    }
    let relay = documents.reading(&["--snapshot", "existing"]).await;
    documents.reader.arrive(&[0, 1, 2, 3]).await;
    // It has no time, and would be the first if it were still among them.
    documents.add(4).await;
    documents.reader.arrive(&[4]).await;
    relay.stop().await;
}

/// A reader that walks along an index meets a later commit and not the earlier one, behind which it already is.
#[tokio::test]
async fn what_is_committed_while_existing_documents_are_read_keeps_its_order() {
    const MANY: i64 = 30_000;
    let documents = Documents::create().await;
    let index = doc! { "key": { "created_at": 1, "_id": 1 }, "name": "outboxd_order" };
    documents.database.run(doc! { "createIndexes": "outbox", "indexes": [index] }).await;
    let at = |number: u32, second: i64| {
        let mut document = numbered(number);
        document.insert("created_at", DateTime::from_millis(second * 1000));
        document
    };
    documents.database.insert_many((0..MANY).map(|second| at(0, 1000 + second))).await;
    let relay = documents.reading(&["--snapshot", "existing", "--max-in-flight", "500"]).await;
    let mut reader = documents.topic.reader();
    let mut records = reader.until(PATIENCE, "some documents arrive", |records| records.len() > 500).await;
    documents.database.insert(at(1, 1)).await;
    documents.database.insert(at(2, 1000 + MANY)).await;
    assert!(records.len() < MANY as usize, "the reading was over before");
    let mut missing = HashSet::from(["1", "2"]);
    let both = |records: &[Record]| {
        if let Some(value) = records.last().and_then(|record| record.value.as_deref()) {
            missing.remove(value);
        }
        missing.is_empty()
    };
    records.extend(reader.until(PATIENCE, "both arrive", both).await);
    records.extend(reader.rest().await);
    let values = values(&records);
    let first = |number: &str| values.iter().position(|value| value == number);
    assert!(first("1") < first("2"), "they arrived as {:?} and {:?}", first("1"), first("2"));
    relay.stop().await;
}

#[tokio::test]
async fn existing_documents_of_a_whole_database_are_read_but_for_what_outboxd_keeps_there() {
    let mut documents = Documents::create().await;
    documents.database.run(doc! { "create": "seen", "viewOn": "outbox", "pipeline": [] }).await;
    for (collection, number) in [("outbox", 1), ("a", 2), ("z", 3)] {
        documents.add_to(collection, number).await;
    }
    let relay = documents.reading(&["--table", "*", "--table", "outbox", "--snapshot", "existing"]).await;
    documents.reader.arrive(&[2, 1, 3]).await;
    documents.until_snapshot_is("done").await;
    documents.add_to("later", 4).await;
    documents.reader.arrive(&[4]).await;
    relay.stop().await;
    documents.reader.nothing_more().await;
}

#[tokio::test]
async fn what_existed_before_init_is_read_by_the_first_run() {
    let mut documents = Documents::create().await;
    documents.add(1).await;
    let url = documents.database.url();
    let ended = outboxd(&["init", &url, "--snapshot", "existing"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    documents.add(2).await;
    let relay = documents.reading(&[]).await;
    documents.reader.arrive_at_least_once(&[1, 2], &[]).await;
    documents.until_snapshot_is("done").await;
    relay.stop().await;
}

#[tokio::test]
async fn a_snapshot_that_was_killed_is_redone_and_loses_nothing_of_the_stream() {
    const MANY: usize = 30_000;
    let mut documents = Documents::create().await;
    documents.database.insert_many((0..MANY).map(|_| numbered(0))).await;
    let flags = ["--snapshot", "existing", "--max-in-flight", "500", "--checkpoint-interval", "50ms"];
    let relay = documents.reading(&flags).await;
    // A document that comes and goes: only the stream has it.
    let fleeting = async |number: u32| {
        documents.add(number).await;
        let outbox = documents.database.collection("outbox");
        outbox.delete_one(doc! { "payload": number.to_string() }).await.expect("a document is deleted");
    };
    fleeting(7).await;
    let mut reader = documents.topic.reader();
    let mut records = reader.until(PATIENCE, "some documents arrive", |records| records.len() > 500).await;
    relay.kill();
    records.extend(reader.rest().await);
    assert!(records.len() < MANY, "the snapshot was over before the kill");
    documents.until_snapshot_is("pending").await;
    fleeting(8).await;
    let relay = documents.reading(&flags).await;
    documents.until_snapshot_is("done").await;
    documents.add(9).await;
    let last = |records: &[Record]| records.last().is_some_and(|record| record.value.as_deref() == Some("9"));
    records.extend(reader.until(PATIENCE, "the last one arrives", last).await);
    let arrived: HashSet<&str> = records.iter().map(|record| record.id()).collect();
    let there = documents.database.documents("outbox").await;
    let id = |document: &Document| document.get_object_id("_id").expect("an id").to_hex();
    assert!(there.iter().all(|document| arrived.contains(id(document).as_str())), "documents are missing");
    let values = values(&records);
    assert!(values.iter().any(|value| value == "7") && values.iter().any(|value| value == "8"));
    relay.stop().await;
    documents.reader.rest().await;
}
