//! One of two brokers is frozen. What the other one acknowledges meanwhile must not move the stored position past the
//! first commit that the frozen one owes an answer for.

use std::time::{Duration, Instant};

use crate::support::{Outbox, PATIENCE, PrivateKafka, Source, Topic, eventually};

/// Longer than the nine seconds after which the controller declares a silent broker dead: the partitions are first
/// led by a broker that does not answer, then by none.
const FROZEN_FOR: Duration = Duration::from_secs(15);

promised!(position_never_passes_an_unacknowledged_commit to postgres, mysql, mariadb, mongodb);

async fn position_never_passes_an_unacknowledged_commit(source: Source) {
    let kafka = PrivateKafka::start(2).await;
    let outbox = Outbox::create(source).await;
    // Broker 2 leads the odd partitions; it is not the controller.
    let topic = Topic::assigned(&kafka.brokers(), &[&[1], &[2], &[1], &[2]]).await;
    let relay = outbox.streaming(&topic, &[]).await;
    let writer = outbox.writer().await;
    let mut reader = topic.reader();

    let keys: Vec<String> = (0..16).map(|number| format!("key-{number:02}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    writer.commit(&keys).await;
    let records = reader.take(keys.len()).await;
    let led_by_the_frozen = |key: &str| {
        let record = records.iter().find(|record| record.key.as_deref() == Some(key)).expect("each key has a record");
        record.partition % 2 == 1
    };
    let (frozen, alive): (Vec<&str>, Vec<&str>) = keys.iter().partition(|key| led_by_the_frozen(key));
    assert!(!frozen.is_empty() && !alive.is_empty(), "the keys are on both brokers");
    outbox.until_confirmed(&outbox.end_of_log().await, PATIENCE).await;

    kafka.freeze(2);
    writer.commit(&alive).await;
    reader.take(alive.len()).await;
    let before = outbox.end_of_log().await;
    outbox.be_busy().await;
    // In a transaction together with others, which are acknowledged: a commit counts as a whole.
    writer.commit(&[alive[0], frozen[0]]).await;
    let first_unacknowledged = outbox.end_of_log().await;
    reader.take(1).await;

    let begin = Instant::now();
    let mut acknowledged = 0;
    while begin.elapsed() < FROZEN_FOR {
        writer.commit(&alive).await;
        writer.commit(&frozen[..1]).await;
        // They are in the topic, hence acknowledged or about to be.
        acknowledged += reader.take(alive.len()).await.len();
        let stored = outbox.stored().await.expect("a position is stored");
        assert!(
            !stored.covers(&first_unacknowledged),
            "the stored position is {stored} although the commit before {first_unacknowledged} is not acknowledged"
        );
    }
    assert!(acknowledged > 100, "only {acknowledged} later events were acknowledged");
    // What is before the first unacknowledged commit does not wait for it.
    outbox.until_stored(&before, PATIENCE).await;
    assert!(relay.status().await["in_flight"].as_u64().expect("a number") > 0);

    kafka.thaw(2);
    let end = outbox.end_of_log().await;
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_confirmed(&end, PATIENCE).await;
    eventually(PATIENCE, "nothing is in flight", async || (relay.status().await["in_flight"] == 0).then_some(())).await;
    relay.stop().await;
}
