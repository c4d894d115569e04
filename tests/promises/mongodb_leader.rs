//! One relay of a pipeline at a time, by a lease: one that was frozen past its end delivers nothing any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mongodb::bson::doc;
use nix::sys::signal::Signal;
use outboxd::source::mongodb::token::{ClusterTime, ResumeToken};

use crate::support::{Documents, Outbox, PATIENCE, Source, Topic, eventually, until_log};

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
