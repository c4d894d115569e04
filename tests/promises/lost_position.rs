//! When the log no longer has what was not delivered, that is told; nothing is skipped in silence.

use nix::sys::signal::Signal;

use crate::support::{
    Database, PATIENCE, PrivatePostgres, Record, Relay, Server, StopMode, Topic, Writer, eventually, parse_lsn,
    show_lsn,
};

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

/// The server is replaced, under a running relay, by a copy of it from before the last confirmation. What the copy commits
/// lies before the confirmed position: whoever went on from there would skip it.
async fn server_goes_back(new_timeline: bool, words: &[&str]) {
    let mut server = PrivatePostgres::start(&[]).await;
    let mut database = Database::with_outbox_at(&server.url()).await;
    let topic = Topic::create(1).await;
    let mut relay = Relay::streaming(&database, &topic, &[]).await;
    Writer::connect(&database).await.commit(&["both"]).await;
    topic.reader().take(1).await;
    server.stop(StopMode::Fast).await;
    server.keep_copy();
    server.resume().await;
    database.reconnect().await;
    // Further than a start writes by itself.
    database.execute("SELECT pg_switch_wal()").await;
    Writer::connect(&database).await.commit(&["original"]).await;
    topic.reader().take(2).await;
    database.until_confirmed(database.wal_position().await, PATIENCE).await;
    let confirmed = database.confirmed().await.expect("there is a slot");

    // It must not look before the copy has written.
    relay.signal(Signal::SIGSTOP);
    server.stop(StopMode::Immediate).await;
    server.go_back(new_timeline);
    server.resume().await;
    database.reconnect().await;
    eventually(PATIENCE, "the copy can be written to", async || {
        (database.text("SELECT pg_is_in_recovery()").await.as_deref() == Some("f")).then_some(())
    })
    .await;
    Writer::connect(&database).await.commit(&["copy"]).await;
    assert!(database.wal_position().await < confirmed, "the copy is behind");
    if new_timeline {
        // The end of the log alone says nothing any more.
        database.execute("SELECT pg_switch_wal()").await;
        Writer::connect(&database).await.commit(&["copy"]).await;
        database.execute("SELECT pg_switch_wal()").await;
        Writer::connect(&database).await.commit(&["copy"]).await;
        assert!(database.wal_position().await > confirmed, "the copy is ahead");
    }
    let slot = database.confirmed().await.expect("the copy has the slot");
    assert!(slot < confirmed);
    relay.signal(Signal::SIGCONT);
    relay.exits_with(4).await;
    let log = relay.log();
    let places = ["is lost", "nothing was skipped or confirmed", "the gap: commits after", &show_lsn(slot)];
    for words in places.iter().chain(words) {
        assert!(log.contains(words), "the report says `{words}`: {log}");
    }
    let told = log.split_once(" was confirmed").and_then(|(before, _)| before.rsplit_once(' ')).map(|(_, lsn)| lsn);
    assert!(told.map(parse_lsn) >= Some(confirmed), "the report says what was confirmed: {log}");
    assert_eq!(database.confirmed().await, Some(slot), "the slot stays where it is");
    let keys = |records: &[Record]| {
        records.iter().map(|record| record.key.clone().expect("every event has a key")).collect::<Vec<_>>()
    };
    assert_eq!(keys(&topic.reader().rest().await), ["both", "original"], "nothing is delivered");

    // Whoever accepts the server goes on from its slot, and has all that it committed.
    let committed = database.number("SELECT count(*) FROM outbox WHERE partition_key = 'copy'").await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let delivered = |records: &[Record]| keys(records).iter().filter(|key| *key == "copy").count() as i64 == committed;
    topic.reader().until(PATIENCE, "what the copy committed arrives", delivered).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn older_copy_of_the_server_is_a_lost_position() {
    server_goes_back(false, &["log ends at", "older copy"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn timeline_that_lacks_what_was_confirmed_is_a_lost_position() {
    server_goes_back(true, &["timeline 2 of the server left timeline 1 at"]).await;
}
