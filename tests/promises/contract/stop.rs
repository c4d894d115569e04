//! A relay that is told to stop sees through what it has begun.

use nix::sys::signal::Signal;

use crate::support::{Outbox, PATIENCE, Source, Topic, eventually};

promised!(a_stopped_relay_drains_and_repeats_nothing to postgres, mysql, mariadb, mongodb);

async fn a_stopped_relay_drains_and_repeats_nothing(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(3).await;
    // Records wait for a minute, so that all are in flight when the stop is asked for; they do not wait then.
    let mut relay = outbox.streaming(&topic, &["--shutdown-timeout", "20s", "--kafka", "linger.ms=60000"]).await;
    let writer = outbox.writer().await;
    for _ in 0..100 {
        writer.commit(&["a", "b", "c", "d"]).await;
    }
    eventually(PATIENCE, "all has been read and is in flight", async || {
        (relay.status().await["in_flight"] == 400).then_some(())
    })
    .await;
    let mut reader = topic.reader();
    assert_eq!(reader.rest().await.len(), 0, "nothing has been sent");
    relay.signal(Signal::SIGTERM);
    relay.exits_with(0).await;
    let mut records = reader.rest().await;
    assert_eq!(records.len(), 400, "all that was in flight was waited for");
    outbox.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
    records.extend(reader.rest().await);
    // What was acknowledged while draining was confirmed as well.
    let delivered = outbox.expected().await.check(&records);
    assert_eq!((delivered.events, delivered.duplicates), (400, 0));
}
