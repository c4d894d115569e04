//! The layout `event-store`, polled by position.

use std::time::{Duration, Instant};

use crate::support::{Answer, Database, HttpServer, PATIENCE, Relay, Server, Topic, eventually, outboxd};

/// A database with the tables of an event store.
async fn store(more: &[&str]) -> Database {
    let database = Database::create(Server::Newest).await;
    let url = database.url();
    for expected in ["created ", "nothing to do: everything is in place"] {
        let init = ["init", &url, "--layout", "event-store", "--capture", "poll"];
        let ended = outboxd(&[&init[..], more].concat()).await;
        assert!(ended.code == 0 && ended.stdout.contains(expected), "{ended:?}");
        assert!(!ended.stdout.contains("slot"), "polling needs no slot: {ended:?}");
    }
    database
}

fn arguments<'a>(url: &'a str, topic: &'a Topic, flags: &[&'a str]) -> Vec<&'a str> {
    let run = ["run", url, "--layout", "event-store", "--capture", "poll", "--brokers", &topic.brokers];
    [&run[..], &["--topic", &topic.name, "--name", "store", "--required-tags", "order"], flags].concat()
}

fn insert(order: usize, n: usize) -> String {
    format!("INSERT INTO events (type, tags, data) VALUES ('Placed', '{{order={order}}}', '{{\"n\": {n}}}')")
}

async fn progress(database: &Database, publisher: &str, column: &str) -> String {
    let query = format!("SELECT {column}::text FROM outbox_topic_progress WHERE publisher = '{publisher}'");
    database.text(&query).await.unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lower_position_that_commits_later_is_delivered_and_in_the_order_of_its_transaction() {
    let database = store(&[]).await;
    let topic = Topic::create(1).await;
    // The first transaction takes position 1 and commits last.
    let slow = database.connect().await;
    slow.batch_execute(&format!("BEGIN; {}", insert(1, 1))).await.expect("a transaction is begun");
    database.execute(&insert(1, 2)).await;
    let url = database.url();
    let relay = Relay::spawn(&arguments(&url, &topic, &["--poll-interval", "50ms"]));
    eventually(PATIENCE, "the status says who holds the horizon back", async || {
        let status = relay.status().await;
        status["held_back_by"].as_str().filter(|who| who.contains("transaction has run for")).map(str::to_owned)
    })
    .await;
    let mut reader = topic.reader();
    assert!(reader.next(Duration::from_millis(500)).await.is_none(), "nothing above the horizon is read");
    slow.batch_execute("COMMIT").await.expect("the transaction is committed");
    let records = reader.take(2).await;
    let numbers: Vec<_> = records.iter().map(|record| record.value.clone().unwrap_or_default()).collect();
    assert_eq!(numbers, [r#"{"n": 1}"#, r#"{"n": 2}"#], "none is skipped");
    relay.stop().await;
    assert_eq!(progress(&database, "store", "last_position").await, "2");
    assert_eq!(progress(&database, "store", "topic").await, topic.name);

    // Nothing comes again.
    database.execute(&insert(1, 3)).await;
    Relay::spawn(&arguments(&url, &topic, &["--until-caught-up"])).exits_with(0).await;
    assert_eq!(topic.reader().rest().await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn random_transactions_that_overlap_are_all_delivered() {
    let database = store(&[]).await;
    let topic = Topic::create(3).await;
    let url = database.url();
    let relay = Relay::spawn(&arguments(&url, &topic, &["--poll-interval", "20ms"]));
    let writer = |w: usize| {
        let database = &database;
        async move {
            let client = database.connect().await;
            for n in 0..40 {
                let pause = (w * 7 + n * 3) % 11;
                let both =
                    format!("BEGIN; {}; SELECT pg_sleep({pause} / 1000.0); {}; COMMIT", insert(w, n), insert(w, n));
                client.batch_execute(&both).await.expect("a transaction is committed");
            }
        }
    };
    futures_util::future::join_all((0..6).map(writer)).await;
    let records = topic.reader().take(480).await;
    let mut positions: Vec<u64> = records
        .iter()
        .map(|record| record.header("position").and_then(|text| text.parse().ok()).expect("a position"))
        .collect();
    positions.sort_unstable();
    positions.dedup();
    assert_eq!(positions.len(), 480, "every event once");
    relay.stop().await;
}

/// Two publishers: one to Kafka, one to a server that answers as it is told.
fn configuration(database: &Database, topic: &Topic, web: &HttpServer) -> String {
    format!(
        "[pipeline.store]\nsource = {:?}\nlayout = \"event-store\"\ncapture = \"poll\"\nbrokers = {:?}\npoll-interval = \"50ms\"\n\
         max-retries = 0\n\
         [pipeline.store.publisher.kafka]\ntopic = {:?}\nrequired-tags = [\"order\"]\n\
         [pipeline.store.publisher.web]\nsink = {:?}\nrequired-tags = [\"order\"]\nhttp-body = \"events\"\n",
        database.url(),
        topic.brokers,
        topic.name,
        web.url()
    )
}

fn events(web: &HttpServer) -> usize {
    web.requests().iter().map(|request| request.json().as_array().map_or(0, Vec::len)).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_pause_resume_and_rewind_a_publisher_by_sql() {
    let database = store(&[]).await;
    let topic = Topic::create(1).await;
    let web = HttpServer::start(|_| Answer::Status(200)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("outboxd.toml");
    std::fs::write(&file, configuration(&database, &topic, &web)).expect("the configuration is written");
    let relay = Relay::spawn(&["run", "--config", file.to_str().expect("a path")]);
    database.execute(&insert(1, 1)).await;
    let mut reader = topic.reader();
    reader.take(1).await;
    eventually(PATIENCE, "the web server has it", async || (events(&web) == 1).then_some(())).await;
    eventually(PATIENCE, "it is noted", async || {
        (progress(&database, "web", "last_position").await == "1").then_some(())
    })
    .await;

    database.execute("UPDATE outbox_topic_progress SET status = 'PAUSED' WHERE publisher = 'web'").await;
    eventually(PATIENCE, "the publisher is paused", async || {
        let status = relay.status().await;
        let of = status["publishers"].as_array().and_then(|all| all.iter().find(|one| one["name"] == "web").cloned());
        (of.is_some_and(|of| of["state"] == "paused")).then_some(())
    })
    .await;
    database.execute(&insert(1, 2)).await;
    reader.take(1).await;
    assert_eq!(events(&web), 1, "a paused one gets nothing, and the other goes on");

    database.execute("UPDATE outbox_topic_progress SET status = 'ACTIVE' WHERE publisher = 'web'").await;
    eventually(PATIENCE, "it gets what it missed", async || (events(&web) == 2).then_some(())).await;
    eventually(PATIENCE, "it is noted", async || {
        (progress(&database, "web", "last_position").await == "2").then_some(())
    })
    .await;

    let rewind =
        "UPDATE outbox_topic_progress SET last_position = 0, last_transaction_id = '0' WHERE publisher = 'web'";
    database.execute(rewind).await;
    eventually(PATIENCE, "it gets everything again", async || (events(&web) == 4).then_some(())).await;
    database.execute(&insert(1, 3)).await;
    assert_eq!(reader.take(1).await[0].value.as_deref(), Some(r#"{"n": 3}"#), "the other got nothing twice");
    assert_ne!(progress(&database, "kafka", "leader_instance").await, "");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_was_paused_far_behind_misses_nothing_when_it_is_resumed() {
    let database = store(&[]).await;
    let topic = Topic::create(1).await;
    let web = HttpServer::start(|_| Answer::Status(200)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("outboxd.toml");
    std::fs::write(&file, configuration(&database, &topic, &web)).expect("the configuration is written");
    let run = ["run", "--config", file.to_str().expect("a path")];
    // Paused before it had anything, while the other goes on through a restart.
    database
        .execute("INSERT INTO outbox_topic_progress (topic, publisher, status) VALUES ('web', 'web', 'PAUSED')")
        .await;
    let mut reader = topic.reader();
    for n in 0..2 {
        let relay = Relay::spawn(&run);
        database.execute(&insert(1, 2 * n)).await;
        database.execute(&insert(1, 2 * n + 1)).await;
        reader.take(2).await;
        relay.stop().await;
    }
    assert_eq!(progress(&database, "web", "last_position").await, "0", "a paused one stays where it is");
    let relay = Relay::spawn(&run);
    database.execute(&insert(1, 4)).await;
    reader.take(1).await;
    database.execute("UPDATE outbox_topic_progress SET status = 'ACTIVE' WHERE publisher = 'web'").await;
    eventually(PATIENCE, "it gets everything", async || (events(&web) == 5).then_some(())).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_store_that_was_moved_from_another_server_is_a_lost_position() {
    let database = store(&[]).await;
    let topic = Topic::create(1).await;
    let ahead = format!(
        "INSERT INTO outbox_topic_progress (topic, publisher, last_transaction_id, last_position)
         VALUES ('{}', 'store', '900000000000', 5)",
        topic.name
    );
    database.execute(&ahead).await;
    let url = database.url();
    let mut relay = Relay::spawn(&arguments(&url, &topic, &[]));
    relay.exits_with(4).await;
    assert!(relay.log().contains("moved here from another server"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_has_failed_says_so_in_the_table_and_goes_on_when_it_is_set_active() {
    let database = store(&[]).await;
    let topic = Topic::create(1).await;
    let good = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let answers = good.clone();
    let web = HttpServer::start(move |_| match answers.load(std::sync::atomic::Ordering::Relaxed) {
        true => Answer::Status(200),
        false => Answer::Status(422),
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("outboxd.toml");
    std::fs::write(&file, configuration(&database, &topic, &web)).expect("the configuration is written");
    let relay = Relay::spawn(&["run", "--config", file.to_str().expect("a path")]);
    database.execute(&insert(1, 1)).await;
    let mut reader = topic.reader();
    reader.take(1).await;
    eventually(PATIENCE, "the failure is in the table", async || {
        (progress(&database, "web", "status").await == "FAILED").then_some(())
    })
    .await;
    assert!(progress(&database, "web", "last_error").await.contains("422"));
    assert_eq!(progress(&database, "web", "error_count").await, "1");
    database.execute(&insert(1, 2)).await;
    assert_eq!(reader.take(1).await.len(), 1, "the other goes on");

    good.store(true, std::sync::atomic::Ordering::Relaxed);
    let before = events(&web);
    database.execute("UPDATE outbox_topic_progress SET status = 'ACTIVE' WHERE publisher = 'web'").await;
    eventually(PATIENCE, "it gets both", async || (events(&web) >= before + 2).then_some(())).await;
    eventually(PATIENCE, "it is noted", async || {
        (progress(&database, "web", "last_position").await == "2").then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_the_event_store_over_within_five_seconds_of_a_kill() {
    let database = store(&[]).await;
    let topic = Topic::create(1).await;
    let url = database.url();
    let run = arguments(&url, &topic, &["--poll-interval", "50ms"]);
    let mut leader = Relay::spawn(&run);
    leader.until_state("streaming").await;
    let mut standby = Relay::spawn(&run);
    standby.until_state("standing-by").await;
    database.execute(&insert(1, 1)).await;
    let mut reader = topic.reader();
    reader.take(1).await;
    leader.kill();
    let killed = Instant::now();
    database.execute(&insert(1, 2)).await;
    reader
        .until(PATIENCE, "the standby delivers", |records| {
            records.iter().any(|record| record.value.as_deref() == Some(r#"{"n": 2}"#))
        })
        .await;
    let took = killed.elapsed();
    println!("taken over after {took:?}");
    assert!(took < Duration::from_secs(5), "the standby delivered after {took:?}");
    standby.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trigger_wakes_the_poller_long_before_its_interval() {
    let database = store(&["--notify"]).await;
    let topic = Topic::create(1).await;
    let url = database.url();
    let mut relay = Relay::spawn(&arguments(&url, &topic, &["--poll-interval", "120s"]));
    relay.until_state("streaming").await;
    let mut reader = topic.reader();
    for n in 0..3 {
        // The horizon passes the commit a moment after it; the next one wakes it in any case.
        database.execute(&insert(1, n)).await;
    }
    reader.take(3).await;
    relay.stop().await;
}
