//! Nothing happens in the outbox while the database is busy: the stored position must follow, or it is soon one that the
//! log no longer has, or that keeps the log until it fills the disk. And nothing happens at all: then it must rest.

use std::time::Duration;

use crate::support::{Outbox, PATIENCE, PrivateServer, Source, Topic, eventually};

/// Soon, on a server whose log others fill at the same time.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(30);

/// Longer than the ten seconds (with MySQL five) between checkpoints that nothing is urgent in.
const SETTLES_WITHIN: Duration = Duration::from_secs(12);

promised!(idle_outbox_in_a_busy_database_advances to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn idle_outbox_in_a_busy_database_advances(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    // Of a neighbour's transactions no PostgreSQL tells the relay; of those in its own database only an old one does.
    let neighbour = Outbox::create(source).await;
    for busy in [&outbox, &neighbour] {
        for transactions in [1, 200] {
            for _ in 0..transactions {
                busy.be_busy().await;
            }
            let end = busy.end_of_log().await;
            outbox.until_confirmed(&end, FOLLOWS_WITHIN).await;
        }
    }
    assert_eq!(topic.reader().rest().await.len(), 0, "nothing was in the outbox");
    relay.stop().await;
}

promised!(checkpoint_is_not_rewritten_because_of_its_own_write to postgres, mysql, mariadb);

/// The checkpoint's own write is an entry of the log, after which the position has moved: no reason to write again.
async fn checkpoint_is_not_rewritten_because_of_its_own_write(source: Source) {
    // Nobody else writes to this server's log.
    let server = PrivateServer::start(source).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    let before = outbox.end_of_log().await;
    outbox.writer().await.commit(&["key"]).await;
    topic.reader().take(1).await;
    eventually(PATIENCE, "the checkpoint follows the event", async || {
        outbox.checkpoint().await.filter(|stored| !before.covers(stored))
    })
    .await;
    tokio::time::sleep(SETTLES_WITHIN).await;
    let written = outbox.checkpoint_written_at().await;
    tokio::time::sleep(2 * SETTLES_WITHIN).await;
    assert_eq!(outbox.checkpoint_written_at().await, written, "the checkpoint was rewritten although nothing happened");
    // It still follows what does happen.
    outbox.until_confirmed(&outbox.end_of_log().await, FOLLOWS_WITHIN).await;
    relay.stop().await;
}
