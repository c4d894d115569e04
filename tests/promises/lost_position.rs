//! When the log no longer has what was not delivered, that is told; nothing is skipped in silence.

use crate::support::{Database, PATIENCE, PrivatePostgres, Relay, Server, Topic, Writer, eventually};

/// A database of which one event was delivered and one was not, and no relay.
async fn with_an_undelivered_event(database: &Database) -> Topic {
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(database, &topic, &[]).await;
    let writer = Writer::connect(database).await;
    writer.commit(&["delivered"]).await;
    database.until_confirmed(database.wal_position().await, PATIENCE).await;
    relay.stop().await;
    writer.commit(&["undelivered"]).await;
    topic
}

/// Whoever starts now is told what is missing, as often as it is tried, and nothing is delivered.
async fn position_is_lost(database: &Database, topic: &Topic, words: &[&str]) {
    let stored = "SELECT position || ' ' || updated_at FROM outboxd_checkpoint";
    let (slots, checkpoint) = (database.slots().await, database.text(stored).await);
    for _ in 0..2 {
        let mut relay = Relay::start(database, topic, &["--snapshot", "existing"]);
        relay.exits_with(4).await;
        let log = relay.log();
        for words in ["is lost", "delivered and confirmed up to", "the gap: commits after"].iter().chain(words) {
            assert!(log.contains(words), "the report says `{words}`: {log}");
        }
    }
    assert_eq!(database.slots().await, slots, "no slot is made");
    assert_eq!(database.text(stored).await, checkpoint, "the checkpoint stays");
    let records = topic.reader().rest().await;
    assert!(records.iter().all(|record| record.key.as_deref() == Some("delivered")), "nothing is delivered");
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_slot_is_a_lost_position() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::with_outbox(server).await;
        let topic = with_an_undelivered_event(&database).await;
        database.execute(&format!("SELECT pg_drop_replication_slot('{}')", database.slot())).await;
        position_is_lost(&database, &topic, &["gone"]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_invalidated_by_max_slot_wal_keep_size_is_a_lost_position() {
    let server = PrivatePostgres::start(&["max_slot_wal_keep_size=1MB", "max_wal_size=32MB"]).await;
    let database = Database::with_outbox_at(&server.url()).await;
    let topic = with_an_undelivered_event(&database).await;
    database.execute("CREATE TABLE other (number bigint)").await;
    eventually(PATIENCE, "the server gives the slot up", async || {
        // A switch of segments writes only if something was written since the last one.
        database.execute("INSERT INTO other VALUES (1)").await;
        database.execute("SELECT pg_switch_wal()").await;
        database.execute("CHECKPOINT").await;
        let lost = "SELECT wal_status FROM pg_replication_slots WHERE wal_status = 'lost'";
        database.text(lost).await
    })
    .await;
    position_is_lost(&database, &topic, &["invalidated", "wal_removed"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn checkpoint_of_another_server_is_a_lost_position() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = with_an_undelivered_event(&database).await;
    database.execute("UPDATE outboxd_checkpoint SET system_identifier = '1234567890'").await;
    let confirmed = database.confirmed().await;
    position_is_lost(&database, &topic, &["another server", "1234567890"]).await;
    assert_eq!(database.confirmed().await, confirmed, "the slot stays where it is");
}
