//! Nothing happens in the outbox while the database is busy: the slot must follow, or the log fills the disk.

use std::time::Duration;

use crate::support::{Database, PATIENCE, PrivatePostgres, Relay, Server, Topic, Writer, eventually};

const FOLLOWS_WITHIN: Duration = Duration::from_secs(10);

async fn slot_follows_within_ten_seconds(server: Server) {
    let database = Database::with_outbox(server).await;
    database.execute("CREATE TABLE busy (number bigint)").await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    // Of a neighbour's transactions no server tells the relay; of those in its own database only an old one does.
    let neighbour = Database::create(server).await;
    neighbour.execute("CREATE TABLE busy (number bigint)").await;
    for busy in [&database, &neighbour] {
        for transactions in [1, 200] {
            for _ in 0..transactions {
                busy.execute("INSERT INTO busy SELECT generate_series(0, 99)").await;
            }
            let position = busy.wal_position().await;
            database.until_confirmed(position, FOLLOWS_WITHIN).await;
        }
    }
    assert_eq!(topic.reader().rest().await.len(), 0, "nothing was in the outbox");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_outbox_in_a_busy_database_advances_on_the_newest_server() {
    slot_follows_within_ten_seconds(Server::Newest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_outbox_in_a_busy_database_advances_on_the_oldest_server() {
    slot_follows_within_ten_seconds(Server::Oldest).await;
}

/// The checkpoint's own write is an entry of the log, after which the position has moved: no reason to write again.
#[tokio::test(flavor = "multi_thread")]
async fn checkpoint_is_not_rewritten_because_of_its_own_write() {
    // Nobody else writes to this server's log.
    let server = PrivatePostgres::start(&[]).await;
    let database = Database::with_outbox_at(&server.url()).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    Writer::connect(&database).await.commit(&["key"]).await;
    let position = database.wal_position().await;
    let row = async || database.text("SELECT position || ' at ' || updated_at FROM outboxd_checkpoint").await;
    eventually(PATIENCE, "the checkpoint follows the event", async || {
        let stored = database.lsn("SELECT position FROM outboxd_checkpoint").await?;
        (stored >= position).then_some(())
    })
    .await;
    let written = row().await;
    // The row is written every ten seconds at most.
    tokio::time::sleep(Duration::from_secs(22)).await;
    assert_eq!(row().await, written, "the checkpoint was rewritten although nothing happened");
    database.until_confirmed(database.wal_position().await, FOLLOWS_WITHIN).await;
    relay.stop().await;
}
