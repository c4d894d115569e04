//! One relay of a pipeline at a time, by a lease: one that was frozen past its end delivers nothing any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mongodb::bson::doc;
use nix::sys::signal::Signal;
use outboxd::source::mongodb::token::{ClusterTime, ResumeToken};

use crate::support::{
    Documents, MongoDatabase, Outbox, PATIENCE, PrivateKafka, Relay, Source, Topic, eventually, numbered, until_log,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_leader_that_wakes_stands_by_and_nothing_is_lost_or_reordered() {
    let outbox = Outbox::create(Source::MongoDb).await;
    let topic = Topic::create(3).await;
    let mut leader = outbox.streaming(&topic, &[]).await;
    let enough = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (outbox.writer().await, enough.clone());
    let load = tokio::spawn(async move {
        while !stopped.load(Ordering::Relaxed) {
            writer.commit(&["a", "b", "c", "d", "e"]).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    let mut standby = outbox.relay(&topic, &[]);
    standby.until_state("standing-by").await;
    for _ in 0..2 {
        topic.reader().take(100).await;
        // It holds what it has read, and records that are on their way.
        leader.signal(Signal::SIGSTOP);
        standby.until_state("streaming").await;
        let holder = holder(&outbox).await;
        leader.signal(Signal::SIGCONT);
        leader.until_state("standing-by").await;
        assert_eq!(self::holder(&outbox).await, holder, "the new leader stays");
        assert_eq!(standby.status().await["leader"], true);
        std::mem::swap(&mut leader, &mut standby);
    }
    enough.store(true, Ordering::Relaxed);
    load.await.expect("the load was written");
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    println!("{delivered:?}");
    assert!(delivered.events > 500);
    leader.stop().await;
    standby.until_state("streaming").await;
    standby.stop().await;
}

async fn holder(outbox: &Outbox) -> String {
    let checkpoint = outbox.mongodb().checkpoint().await.expect("a checkpoint");
    let lease = checkpoint.get_document("lease").expect("a lease");
    lease.get_str("holder").expect("a holder").to_owned()
}

/// The broker cannot be reached on the leader's way to it, so that whatever it has read stays in its queue; everybody
/// else reaches it.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_leader_that_wakes_delivers_nothing_of_what_it_had_queued() {
    const QUEUED: u32 = 1000;
    let (kafka, way) = PrivateKafka::start_with_detour().await;
    let database = MongoDatabase::with_outbox().await;
    let topic = Topic::create_at(&kafka.brokers(), 1, &[]).await;
    let by_detour =
        Topic { name: topic.name.clone(), brokers: format!("127.0.0.1:{}", way.port()), partitions: topic.partitions };
    // A producer that was not given up would find the way soon after it is open again.
    let impatient = ["socket.timeout.ms=1000", "api.version.request.timeout.ms=1000", "reconnect.backoff.max.ms=500"];
    let flags: Vec<&str> = impatient.iter().flat_map(|setting| ["--kafka", setting]).collect();
    let mut leader = Relay::start_at(&database.url(), &by_detour, &flags);
    until_log(&mut leader, "reading the change stream").await;
    let mut reader = topic.reader();
    database.insert(numbered(0)).await;
    reader.arrive(&[0]).await;
    let delivered: ClusterTime = database.last_write().await.into();
    eventually(PATIENCE, "the position after the event is stored", async || {
        let stored: ResumeToken = database.checkpoint().await?.get_str("position").ok()?.parse().ok()?;
        (stored.time() > delivered).then_some(())
    })
    .await;

    way.fall_silent();
    database.insert_many((1..=QUEUED).map(numbered)).await;
    eventually(PATIENCE, "all events are queued", async || {
        (leader.status().await["in_flight"] == QUEUED).then_some(())
    })
    .await;
    let mut standby = Relay::start_at(&database.url(), &topic, &[]);
    standby.until_state("standing-by").await;
    leader.signal(Signal::SIGSTOP);
    reader.arrive(&(1..=QUEUED).collect::<Vec<_>>()).await;
    leader.signal(Signal::SIGCONT);
    until_log(&mut leader, "the pipeline's lease").await;
    way.mend();
    // Now that it reaches the broker it finds that it does not lead.
    leader.until_state("standing-by").await;
    // Several times as long as a producer that was not given up takes to find the way.
    let late = reader.next(Duration::from_secs(8)).await;
    assert!(late.is_none(), "it came from the woken one: {late:?}");
    standby.stop().await;
    leader.until_state("streaming").await;
    database.insert(numbered(QUEUED + 1)).await;
    // The new leader has delivered each once, and the woken one added nothing before it led again.
    reader.arrive(&[QUEUED + 1]).await;
    leader.stop().await;
    reader.nothing_more().await;
}

/// Nobody else was there to take the lease.
#[tokio::test]
async fn a_lone_relay_that_was_frozen_past_its_lease_goes_on() {
    let mut documents = Documents::create().await;
    let mut relay = documents.reading(&[]).await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    // The position moves while nothing happens, and is stored.
    let event: ClusterTime = documents.database.last_write().await.into();
    eventually(PATIENCE, "an idle position is stored", async || {
        let stored: ResumeToken = documents.position().await?.parse().expect("a resume token is stored");
        (stored.time() > event).then_some(())
    })
    .await;
    relay.signal(Signal::SIGSTOP);
    let over = doc! { "_id": documents.database.pipeline(), "$expr": { "$lt": ["$lease.until", "$$NOW"] } };
    let checkpoints = documents.database.collection("outboxd_checkpoint");
    eventually(PATIENCE, "the lease is over", async || {
        checkpoints.find_one(over.clone()).await.expect("the lease is read").map(drop)
    })
    .await;
    documents.add(2).await;
    relay.signal(Signal::SIGCONT);
    until_log(&mut relay, "the pipeline's lease").await;
    documents.add(3).await;
    documents.reader.arrive_at_least_once(&[2, 3], &[1]).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_stopped_leader_lets_its_lease_go_at_once() {
    let mut documents = Documents::create().await;
    documents.reading(&[]).await.stop().await;
    // Else it would be told that another instance runs.
    let relay = documents.reading(&["--no-standby"]).await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    relay.stop().await;
}
