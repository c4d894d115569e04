//! Stopping, ending and catching up: what `outboxd run` does when it is told to end, or may.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;

use super::process::get;
use crate::support::{
    Database, Expected, PATIENCE, PrivateKafka, Relay, Server, Topic, Writer, eventually, outboxd, shared_kafka,
};

#[tokio::test]
async fn a_stop_keeps_its_deadline_when_the_broker_is_frozen() {
    let kafka = PrivateKafka::start(1).await;
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create_at(&kafka.brokers(), 2, &[]).await;
    let mut relay = Relay::streaming(&database, &topic, &["--shutdown-timeout", "3s"]).await;
    let writer = Writer::connect(&database).await;
    writer.commit(&["a", "b"]).await;
    let mut reader = topic.reader();
    let mut records = reader.take(2).await;
    let delivered = database.wal_position().await;
    writer.run("SELECT pg_logical_emit_message(true, 'nobody', '')").await;
    database.until_confirmed(delivered, PATIENCE).await;

    kafka.freeze(1);
    for _ in 0..20 {
        writer.commit(&["a", "b", "c"]).await;
    }
    eventually(PATIENCE, "events are in flight", async || {
        (relay.status().await["in_flight"].as_u64()? >= 60).then_some(())
    })
    .await;
    let begin = Instant::now();
    relay.signal(Signal::SIGTERM);
    relay.exits_with(0).await;
    let took = begin.elapsed();
    assert!(took >= Duration::from_secs(2), "it did not wait for acknowledgements: {took:?}");
    assert!(took < Duration::from_secs(15), "the stop took {took:?}");
    assert!(relay.log().contains("they will be delivered again"), "what is left over is told");

    kafka.thaw(1);
    let relay = Relay::start(&database, &topic, &[]);
    let expected = Expected::of(&database).await;
    // Those two are confirmed; the rest was not, and comes.
    let all = |later: &[crate::support::Record]| {
        let ids: std::collections::HashSet<_> = later.iter().map(crate::support::Record::id).collect();
        ids.len() >= expected.count() - 2
    };
    records.extend(reader.until(PATIENCE, "all events arrive", all).await);
    expected.check(&records);
    relay.stop().await;
}

/// A file with a pipeline that works and one whose table is missing.
fn two_pipelines(database: &Database, topic: &Topic, process: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder for the file");
    let path = folder.path().join("outboxd.toml");
    let (url, brokers, topic) = (database.url(), shared_kafka(), &topic.name);
    let pipeline = |name: &str, more: &str| {
        format!("[pipeline.{name}]\nsource = '{url}'\nbrokers = '{brokers}'\ntopic = '{topic}'\n{more}\n")
    };
    let file =
        [process.to_owned(), pipeline("good", ""), pipeline("bad", "slot = 'outboxd_bad'\ntable = 'no_such_table'")];
    std::fs::write(&path, file.join("\n")).expect("the file is written");
    (folder, path.display().to_string())
}

fn pipeline<'a>(page: &'a Value, name: &str) -> &'a Value {
    let found = page["pipelines"].as_array().and_then(|all| all.iter().find(|one| one["name"] == name));
    found.unwrap_or_else(|| panic!("no {name} in {page}"))
}

#[tokio::test]
async fn when_one_pipeline_ends_for_good_the_others_go_on() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let (_folder, file) = two_pipelines(&database, &topic, "");
    let mut relay = Relay::spawn(&["run", "--config", &file]);
    relay.until_streaming(&database).await;
    let admin = relay.admin().await;
    let page = eventually(PATIENCE, "the bad pipeline has failed", async || {
        let page: Value = serde_json::from_str(&get(&admin, "/status").2).expect("/status is JSON");
        (pipeline(&page, "bad")["state"] == "failed" && pipeline(&page, "good")["state"] == "streaming").then_some(page)
    })
    .await;
    let error = pipeline(&page, "bad")["last_error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("no_such_table") && error.contains("remedy"), "{error}");
    assert_eq!(pipeline(&page, "bad")["leader"], false);
    let (code, _, why) = get(&admin, "/readyz");
    assert!(
        code == 503 && why.contains("bad") && why.contains("no_such_table") && !why.contains("good"),
        "{code} {why}"
    );
    assert_eq!(get(&admin, "/livez").0, 200, "a pipeline that has ended is not stuck");
    let metrics = get(&admin, "/metrics").2;
    assert!(metrics.contains("outboxd_failures_total{pipeline=\"bad\"} 1"), "{metrics}");
    assert!(metrics.contains("outboxd_failures_total{pipeline=\"good\"} 0"), "{metrics}");

    let writer = Writer::connect(&database).await;
    writer.commit(&["a"]).await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    assert!(relay.is_running());
    relay.signal(Signal::SIGTERM);
    relay.exits_with(3).await;
}

#[tokio::test]
async fn pipelines_of_one_database_that_start_together_make_what_they_share_once() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let pipeline = |n: usize| {
        let (url, slot, brokers, topic) = (database.url(), database.slot(), &topic.brokers, &topic.name);
        let publishers = format!("[pipeline.p{n}.publisher.one]\n[pipeline.p{n}.publisher.other]\n");
        format!(
            "[pipeline.p{n}]\nsource = '{url}'\nslot = '{slot}_{n}'\nbrokers = '{brokers}'\ntopic = '{topic}'\n{publishers}"
        )
    };
    let folder = tempfile::tempdir().expect("a folder for the file");
    let path = folder.path().join("outboxd.toml");
    std::fs::write(&path, (1..=6).map(pipeline).collect::<String>()).expect("the file is written");
    // Publication, checkpoints and the publishers' notes are missing, and all six want them.
    let relay = Relay::spawn(&["run", "--config", &path.display().to_string()]);
    let admin = relay.admin().await;
    eventually(PATIENCE, "all of them stream", async || {
        let page: Value = serde_json::from_str(&get(&admin, "/status").2).expect("/status is JSON");
        let pipelines = page["pipelines"].as_array().expect("pipelines");
        let failed = pipelines.iter().find(|one| one["state"] == "failed");
        assert!(failed.is_none(), "{failed:?}");
        (pipelines.len() == 6 && pipelines.iter().all(|one| one["state"] == "streaming")).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test]
async fn with_fail_fast_one_pipelines_end_is_the_end() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let (_folder, file) = two_pipelines(&database, &topic, "fail-fast = true");
    let mut relay = Relay::spawn(&["run", "--config", &file]);
    relay.exits_with(3).await;
    assert!(relay.log().contains("no_such_table"));
}

#[tokio::test]
async fn until_caught_up_ends_when_all_is_delivered_and_confirmed() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::with_outbox(server).await;
        let topic = Topic::create(2).await;
        let caught_up = async || {
            let mut relay = Relay::start(&database, &topic, &["--until-caught-up"]);
            let begin = Instant::now();
            relay.exits_with(0).await;
            begin.elapsed()
        };
        caught_up().await;
        let writer = Writer::connect(&database).await;
        for _ in 0..100 {
            writer.commit(&["a", "b", "c"]).await;
        }
        // In an open transaction, and so not committed before the start.
        let other = Writer::connect(&database).await;
        other.run("BEGIN").await;
        other.add("open").await;
        let position = database.wal_position().await;
        let took = caught_up().await;
        assert!(took < Duration::from_secs(30), "{server:?}: an open transaction was waited for: {took:?}");
        other.run("ROLLBACK").await;
        let confirmed = database.confirmed().await.expect("the slot is there");
        assert!(confirmed >= position, "{server:?}: {confirmed} is before {position}");
        let mut reader = topic.reader();
        let records = reader.rest().await;
        let delivered = Expected::of(&database).await.check(&records);
        assert_eq!((delivered.events, delivered.duplicates), (300, 0));

        for _ in 0..3 {
            let took = caught_up().await;
            assert!(took < Duration::from_secs(30), "{server:?}: nothing to do took {took:?}");
        }
        assert_eq!(reader.rest().await.len(), 0, "nothing comes twice");
    }
}

#[tokio::test]
async fn until_caught_up_includes_the_snapshot() {
    let database = Database::with_outbox(Server::Newest).await;
    let writer = Writer::connect(&database).await;
    for _ in 0..50 {
        writer.commit(&["a", "b"]).await;
    }
    let topic = Topic::create(1).await;
    let flags = ["--until-caught-up", "--snapshot", "existing"];
    let mut reader = topic.reader();
    Relay::start(&database, &topic, &flags).exits_with(0).await;
    let records = reader.rest().await;
    let delivered = Expected::of(&database).await.check(&records);
    assert_eq!((delivered.events, delivered.duplicates), (100, 0));
    Relay::start(&database, &topic, &flags).exits_with(0).await;
    assert_eq!(reader.rest().await.len(), 0, "the snapshot is delivered once");
}

#[tokio::test]
async fn every_mistake_of_a_config_file_is_pointed_at_and_exits_2() {
    let folder = tempfile::tempdir().expect("a folder for the file");
    let path = folder.path().join("outboxd.toml");
    let file = path.display().to_string();
    let told = async |text: &str| {
        std::fs::write(&path, text).expect("the file is written");
        let ended = outboxd(&["run", "--config", &file]).await;
        assert_eq!(ended.code, 2, "{ended:?}");
        ended.stderr
    };
    // What cannot even be read, …
    let read = told("[pipeline.a]\nsource = 'postgres://h/a'\nbrokrs = 'k:1'\nno-create = 3\n").await;
    assert!(read.contains(&format!("{file}:3:1: unknown key `brokrs`; did you mean `brokers`?")), "{read}");
    assert!(read.contains(&format!("{file}:4:13: no-create: ")), "{read}");
    // … and what makes no sense.
    let judged =
        told("[pipeline.a]\nsource = 'env:OUTBOXD_TEST_NOT_SET'\nbrokers = 'k:1'\ntopic = 'a{b'\nslot = 'A'\n").await;
    assert!(
        judged.contains(&format!("{file}:2:10: pipeline a: source: env:OUTBOXD_TEST_NOT_SET: is not set")),
        "{judged}"
    );
    let judged = told("[pipeline.a]\nsource = 'postgres://h/a'\nbrokers = 'k:1'\ntopic = 'a{b'\nslot = 'A'\n").await;
    assert!(judged.contains(&format!("{file}:4:9: pipeline a: topic: ")), "{judged}");
    assert!(judged.contains(&format!("{file}:5:8: pipeline a: slot: ")), "{judged}");
}
