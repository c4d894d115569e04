//! Two instances of one pipeline: one reads, the other waits for the slot and goes on when the first one is gone.

use std::time::{Duration, Instant};

use crate::support::{Database, Expected, PATIENCE, Relay, Server, Topic, Writer, eventually};

const TAKES_OVER_WITHIN: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread")]
async fn standby_delivers_within_five_seconds_of_the_leaders_kill() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(3).await;
    let writer = Writer::connect(&database).await;
    let leader = Relay::streaming(&database, &topic, &[]).await;
    let standby = Relay::start(&database, &topic, &[]);
    eventually(PATIENCE, "the second instance stands by", async || {
        (standby.status().await["state"] == "standing-by").then_some(())
    })
    .await;
    writer.commit(&["before"]).await;
    let mut reader = topic.reader();
    assert_eq!(reader.take(1).await[0].key.as_deref(), Some("before"));
    assert_eq!(leader.status().await["leader"], true);
    assert_eq!(standby.status().await["leader"], false);

    leader.kill();
    let killed = Instant::now();
    writer.commit(&["after"]).await;
    let found = reader.until(PATIENCE, "the standby delivers", |records| {
        records.iter().any(|record| record.key.as_deref() == Some("after"))
    });
    let mut records = found.await;
    let took = killed.elapsed();
    assert!(took < TAKES_OVER_WITHIN, "the standby delivered after {took:?}");
    records.retain(|record| record.key.as_deref() == Some("after"));
    assert_eq!(records.len(), 1);
    assert_eq!(standby.status().await["leader"], true);
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    standby.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_instance_without_standby_exits_7() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let leader = Relay::streaming(&database, &topic, &[]).await;
    let mut second = Relay::start(&database, &topic, &["--no-standby"]);
    second.exits_with(7).await;
    assert!(second.log().contains("slot"), "{}", second.log());

    let writer = Writer::connect(&database).await;
    writer.commit(&["key"]).await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    leader.stop().await;
}
