//! Two instances of one pipeline: one reads, the other waits and goes on when the first one is gone.

use std::time::{Duration, Instant};

use crate::support::{Outbox, PATIENCE, Source, Topic};

promised!(standby_delivers_within_five_seconds_of_the_leaders_kill to postgres, mysql, mariadb);

async fn standby_delivers_within_five_seconds_of_the_leaders_kill(source: Source) {
    standby_delivers(source, Duration::from_secs(5)).await;
}

promised!(standby_delivers_within_eight_seconds_of_the_leaders_kill to mongodb);

/// There the leader has a lease of five seconds, instead of a connection whose end the server sees.
async fn standby_delivers_within_eight_seconds_of_the_leaders_kill(source: Source) {
    standby_delivers(source, Duration::from_secs(8)).await;
}

async fn standby_delivers(source: Source, within: Duration) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(3).await;
    let writer = outbox.writer().await;
    let leader = outbox.streaming(&topic, &[]).await;
    let mut standby = outbox.relay(&topic, &[]);
    standby.until_state("standing-by").await;
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
    println!("taken over after {took:?}");
    assert!(took < within, "the standby delivered after {took:?}");
    records.retain(|record| record.key.as_deref() == Some("after"));
    assert_eq!(records.len(), 1);
    assert_eq!(standby.status().await["leader"], true);
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    standby.stop().await;
}

promised!(second_instance_without_standby_exits_7 to postgres, mysql, mariadb, mongodb);

async fn second_instance_without_standby_exits_7(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let leader = outbox.streaming(&topic, &[]).await;
    let mut second = outbox.relay(&topic, &["--no-standby"]);
    second.exits_with(7).await;
    assert!(second.log().contains("run without --no-standby"), "{}", second.log());

    outbox.writer().await.commit(&["key"]).await;
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    leader.stop().await;
}
