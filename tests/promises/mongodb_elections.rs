//! A replica set whose primary changes under load: nothing is lost, and nothing changes its place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mongodb::bson::doc;
use tokio::task::JoinHandle;

use crate::support::{Documents, Outbox, PATIENCE, PrivateMongo, Relay, Source, Topic, eventually, until_log};

const KEYS: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Writers that go on as soon as there is a primary.
struct Load {
    enough: Arc<AtomicBool>,
    writers: Vec<JoinHandle<()>>,
}

impl Load {
    async fn on(outbox: &Outbox) -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let mut writers = Vec::new();
        for _ in 0..2 {
            let (writer, enough) = (outbox.mongodb().writer().await, enough.clone());
            writers.push(tokio::spawn(async move {
                while !enough.load(Ordering::Relaxed) {
                    // One that failed may have been committed all the same: what counts is what the collection has.
                    let _ = writer.try_commit(&KEYS).await;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }));
        }
        Load { enough, writers }
    }

    async fn end(self) {
        self.enough.store(true, Ordering::Relaxed);
        for writer in self.writers {
            writer.await.expect("a writer wrote");
        }
    }
}

async fn written(outbox: &Outbox, more: u64) {
    let before = outbox.mongodb().count("outbox").await;
    eventually(PATIENCE, "events are written", async || {
        (outbox.mongodb().count("outbox").await >= before + more).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn primaries_that_step_down_and_die_under_load_cost_no_event_and_no_order() {
    let mut set = PrivateMongo::start(3, &[]).await;
    let outbox = Outbox::create_at(Source::MongoDb, &set.url()).await;
    let topic = Topic::create(3).await;
    let mut relay = outbox.streaming(&topic, &[]).await;
    let load = Load::on(&outbox).await;
    for _ in 0..2 {
        written(&outbox, 100).await;
        set.step_down().await;
    }
    for _ in 0..2 {
        written(&outbox, 100).await;
        let primary = set.primary().await;
        set.kill(primary).await;
        set.primary().await;
        written(&outbox, 100).await;
        set.resume(primary).await;
        set.until_settled().await;
    }
    // One that stands still keeps its connections open, and believes that it leads.
    let primary = set.primary().await;
    set.freeze(primary);
    set.primary().await;
    written(&outbox, 100).await;
    set.thaw(primary);
    set.until_settled().await;
    written(&outbox, 100).await;
    load.end().await;
    assert!(relay.is_running(), "the relay ended");
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    println!("{delivered:?}");
    assert!(delivered.events >= 700);
    relay.stop().await;
}

/// The members at which somebody waits for changes of an outbox.
async fn being_read(set: &PrivateMongo) -> Vec<usize> {
    let mut reading = Vec::new();
    for member in 0..3 {
        let cursors = doc! { "currentOp": 1, "ns": { "$regex": "outbox$" }, "command.getMore": { "$exists": true } };
        let asked = set.client(member).database("admin").run_command(cursors).await.expect("the member answers");
        if !asked.get_array("inprog").expect("a list").is_empty() {
            reading.push(member);
        }
    }
    reading
}

/// The others go on writing meanwhile: what is committed until another member is read must not be skipped.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_dies_while_it_is_read_costs_no_event() {
    let mut set = PrivateMongo::start(3, &[]).await;
    let outbox = Outbox::create_at(Source::MongoDb, &set.url()).await;
    let topic = Topic::create(3).await;
    let url = format!("{}&readPreference=secondary", outbox.url());
    let mut relay = Relay::start_at(&url, &topic, &[]);
    relay.until_state("streaming").await;
    let load = Load::on(&outbox).await;
    for _ in 0..4 {
        written(&outbox, 100).await;
        let read = eventually(PATIENCE, "a member is read", async || being_read(&set).await.pop()).await;
        set.kill(read).await;
        written(&outbox, 100).await;
        set.resume(read).await;
        set.until_settled().await;
    }
    load.end().await;
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    println!("{delivered:?}");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secondary_is_read_where_the_address_prefers_one() {
    let set = PrivateMongo::start(3, &[]).await;
    let mut documents = Documents::at(&set.url()).await;
    let url = format!("{}&readPreference=secondary", documents.database.url());
    let mut relay = Relay::start_at(&url, &documents.topic, &[]);
    until_log(&mut relay, "reading the change stream").await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    let primary = set.primary().await;
    let reading = being_read(&set).await;
    assert!(!reading.contains(&primary), "the primary {primary} is read: {reading:?}");
    // When it becomes the primary, another one is read.
    for number in 2..4 {
        set.step_down().await;
        documents.add(number).await;
        documents.reader.arrive_at_least_once(&[number], &[1, 2, 3]).await;
    }
    relay.stop().await;
    documents.add(4).await;
    let relay = Relay::start_at(&url, &documents.topic, &["--no-create", "--no-standby"]);
    documents.reader.arrive_at_least_once(&[4], &[1, 2, 3]).await;
    relay.stop().await;
}
