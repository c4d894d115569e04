//! One of two brokers is frozen. What the other one acknowledges meanwhile must not move the slot past the first
//! commit that the frozen one owes an answer for.

use std::time::{Duration, Instant};

use crate::support::{Database, Expected, PATIENCE, PrivateKafka, Relay, Server, Topic, Writer, eventually, show_lsn};

/// Longer than the nine seconds after which the controller declares a silent broker dead: the partitions are first
/// led by a broker that does not answer, then by none.
const FROZEN_FOR: Duration = Duration::from_secs(15);

#[tokio::test(flavor = "multi_thread")]
async fn slot_never_passes_an_unacknowledged_commit() {
    let kafka = PrivateKafka::start(2).await;
    let database = Database::with_outbox(Server::Newest).await;
    // Broker 2 leads the odd partitions; it is not the controller.
    let topic = Topic::assigned(&kafka.brokers(), &[&[1], &[2], &[1], &[2]]).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let writer = Writer::connect(&database).await;
    let mut reader = topic.reader();

    let keys: Vec<String> = (0..16).map(|number| format!("key-{number}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    writer.commit(&keys).await;
    let records = reader.take(keys.len()).await;
    let led_by_the_frozen = |key: &str| {
        let record = records.iter().find(|record| record.key.as_deref() == Some(key)).expect("each key has a record");
        record.partition % 2 == 1
    };
    let (frozen, alive): (Vec<&str>, Vec<&str>) = keys.iter().partition(|key| led_by_the_frozen(key));
    assert!(!frozen.is_empty() && !alive.is_empty(), "the keys are on both brokers");
    database.until_confirmed(database.wal_position().await, PATIENCE).await;

    kafka.freeze(2);
    writer.commit(&alive).await;
    reader.take(alive.len()).await;
    // In a transaction together with others, which are acknowledged: a commit counts as a whole.
    let before = database.wal_position().await;
    writer.commit(&[alive[0], frozen[0]]).await;
    let first_unacknowledged = database.wal_position().await;
    reader.take(1).await;

    let begin = Instant::now();
    let mut acknowledged = 0;
    while begin.elapsed() < FROZEN_FOR {
        writer.commit(&alive).await;
        writer.commit(&frozen[..1]).await;
        // They are in the topic, hence acknowledged or about to be.
        acknowledged += reader.take(alive.len()).await.len();
        let confirmed = database.confirmed().await.expect("the slot has a position");
        assert!(
            confirmed < first_unacknowledged,
            "the slot was confirmed up to {} although the commit before {} is not acknowledged",
            show_lsn(confirmed),
            show_lsn(first_unacknowledged)
        );
    }
    assert!(acknowledged > 100, "only {acknowledged} later events were acknowledged");
    // What is before the first unacknowledged commit does not wait for it.
    database.until_confirmed(before, PATIENCE).await;
    assert!(relay.status().await["in_flight"].as_u64().expect("a number") > 0);

    kafka.thaw(2);
    let end = database.wal_position().await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    database.until_confirmed(end, PATIENCE).await;
    eventually(PATIENCE, "nothing is in flight", async || (relay.status().await["in_flight"] == 0).then_some(())).await;
    relay.stop().await;
}
