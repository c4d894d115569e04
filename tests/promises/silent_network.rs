//! The network between relay and database falls silent: no reset, no end, just nothing. Only whoever counts the
//! seconds notices.

use std::time::{Duration, Instant};

use crate::support::{Database, Expected, PATIENCE, Proxy, Relay, Server, Topic, Writer, eventually};

const STALL_TIMEOUT: Duration = Duration::from_secs(3);

/// With what a busy machine may add.
const NOTICED_WITHIN: Duration = Duration::from_secs(6);

#[tokio::test(flavor = "multi_thread")]
async fn silent_network_is_noticed_within_the_stall_timeout_and_loses_nothing() {
    let database = Database::with_outbox(Server::Newest).await;
    // The server must notice as well, for until then it lets nobody else read the slot.
    database.execute(&format!("ALTER DATABASE {} SET wal_sender_timeout = '4s'", database.name())).await;
    let topic = Topic::create(2).await;
    let proxy = Proxy::before(&database.url()).await;
    let url = format!("{}?connect_timeout=2", proxy.url(&database.url()));
    let mut relay = Relay::start_at(&url, &topic, &["--stall-timeout", "3s"]);
    let walsender = relay.until_streaming(&database).await;
    let writer = Writer::connect(&database).await;
    writer.commit(&["a", "b"]).await;
    topic.reader().take(2).await;

    // Nothing to say is not silence: a server is asked, and answers.
    tokio::time::sleep(STALL_TIMEOUT + Duration::from_secs(1)).await;
    assert_eq!(database.walsender().await, Some(walsender), "an idle server was taken for a silent one");
    assert_eq!(relay.status().await["state"], "streaming");

    proxy.fall_silent();
    let begin = Instant::now();
    for _ in 0..20 {
        writer.commit(&["a", "b"]).await;
    }
    eventually(NOTICED_WITHIN, "the relay notices the silence", async || {
        let error = relay.status().await["last_error"].as_str().unwrap_or_default().to_owned();
        error.contains("no word from").then_some(())
    })
    .await;
    // It may have been silent for a while before, having had nothing to say.
    println!("noticed after {:?}", begin.elapsed());
    assert!(relay.log().contains("no word from"), "the log says so: {}", relay.log());
    assert_ne!(relay.status().await["state"], "streaming");
    assert!(relay.is_running(), "a silent network is no reason to end");
    assert_eq!(topic.reader().rest().await.len(), 2, "what was committed in the silence cannot have arrived");

    proxy.mend();
    let end = database.wal_position().await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    database.until_confirmed(end, PATIENCE).await;
    assert_ne!(database.walsender().await, Some(walsender), "the silent connection is not the one that is read");
    assert_eq!(relay.status().await["state"], "streaming");
    relay.stop().await;
}
