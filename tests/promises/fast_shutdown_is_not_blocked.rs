//! A fast shutdown of PostgreSQL waits until walsenders' clients have confirmed everything. With a broker that does
//! not answer a relay cannot, so it must let go.

use std::time::{Duration, Instant};

use crate::support::{
    Database, Expected, PATIENCE, PrivateKafka, PrivatePostgres, Relay, StopMode, Topic, Writer, eventually,
};

/// The promise is ten seconds. This is what hearing of the shutdown gives; whoever finds out only by his next look at the
/// slot, every [`LOOK`], needs longer if that is not due soon.
const STOPS_WITHIN: Duration = Duration::from_millis(2500);
const LOOK: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread")]
async fn fast_shutdown_with_a_frozen_broker_takes_at_most_ten_seconds_and_loses_nothing() {
    let (kafka, mut server) = tokio::join!(PrivateKafka::start(1), PrivatePostgres::start(&[]));
    let mut database = Database::with_outbox_at(&server.url()).await;
    let topic = Topic::create_at(&kafka.brokers(), 2, &[]).await;
    let mut relay = Relay::streaming(&database, &topic, &[]).await;
    let first_look = Instant::now();
    let writer = Writer::connect(&database).await;
    writer.commit(&["a", "b", "c"]).await;
    topic.reader().take(3).await;

    kafka.freeze(1);
    for _ in 0..100 {
        writer.commit(&["a", "b", "c"]).await;
    }
    eventually(PATIENCE, "events are in flight", async || {
        (relay.status().await["in_flight"].as_u64() >= Some(300)).then_some(())
    })
    .await;
    while !(400..900).contains(&(first_look.elapsed().as_millis() % LOOK.as_millis())) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let begin = Instant::now();
    server.stop(StopMode::Fast).await;
    let took = begin.elapsed();
    println!("pg_ctl stop -m fast took {took:?}");
    assert!(took < STOPS_WITHIN, "pg_ctl stop -m fast took {took:?}");
    assert!(relay.is_running(), "a restart of the database is no reason to end");

    server.resume().await;
    database.reconnect().await;
    let writer = Writer::connect(&database).await;
    writer.commit(&["a", "b", "c"]).await;
    kafka.thaw(1);
    let end = database.wal_position().await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    database.until_confirmed(end, PATIENCE).await;

    // A crash of the database as well.
    server.stop(StopMode::Immediate).await;
    server.resume().await;
    database.reconnect().await;
    Writer::connect(&database).await.commit(&["a"]).await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    relay.stop().await;
}
