//! Nothing happens in the outbox while the database is busy: the stored position must follow, or it is soon one that the
//! log no longer has. And nothing happens at all: then it must rest. (PostgreSQL, whose slot follows for reasons of its
//! own, is in `../idle_outbox_in_a_busy_database_advances.rs`.)

use std::time::Duration;

use crate::support::{Outbox, PATIENCE, PrivateMySql, Source, Topic};

const FOLLOWS_WITHIN: Duration = Duration::from_secs(10);

promised!(idle_outbox_in_a_busy_database_advances to mysql, mariadb);

async fn idle_outbox_in_a_busy_database_advances(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
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

promised!(checkpoint_is_not_rewritten_because_of_its_own_write to mysql, mariadb);

/// The checkpoint's own write is an entry of the log, after which the position has moved: no reason to write again.
async fn checkpoint_is_not_rewritten_because_of_its_own_write(source: Source) {
    // Nobody else writes to this server's log.
    let server = PrivateMySql::start(source.flavor(), &[]).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    let before = outbox.end_of_log().await;
    outbox.writer().await.commit(&["key"]).await;
    topic.reader().take(1).await;
    // Longer than the five seconds between checkpoints that nothing is urgent in.
    tokio::time::sleep(Duration::from_secs(7)).await;
    outbox.until_stored(&before, PATIENCE).await;
    let (stored, written) = (outbox.stored().await.expect("a position is stored"), outbox.stored_at().await);
    assert!(!before.covers(&stored), "the position has followed the event");
    tokio::time::sleep(Duration::from_secs(12)).await;
    assert_eq!(outbox.stored_at().await, written, "the checkpoint was rewritten although nothing happened");
    // It still follows what does happen.
    outbox.until_confirmed(&outbox.end_of_log().await, FOLLOWS_WITHIN).await;
    relay.stop().await;
}
