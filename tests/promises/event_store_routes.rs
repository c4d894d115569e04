//! The operators' routes of an event store: publishers by name, on whichever instance they are asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::support::admin::{Answered, ask};
use crate::support::{Answer, Database, HttpServer, PATIENCE, Relay, Server, Topic, eventually, outboxd};

async fn store() -> Database {
    let database = Database::create(Server::Newest).await;
    let init = outboxd(&["init", &database.url(), "--layout", "event-store", "--capture", "poll"]).await;
    assert_eq!(init.code, 0, "{init:?}");
    database
}

fn configuration(database: &Database, topic: &Topic, web: &HttpServer) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = format!(
        "[pipeline.store]\nsource = {:?}\nlayout = \"event-store\"\ncapture = \"poll\"\nbrokers = {:?}\npoll-interval = \"50ms\"\n\
         max-retries = 0\n\
         [pipeline.store.publisher.kafka]\ntopic = {:?}\nrequired-tags = [\"order\"]\n\
         [pipeline.store.publisher.web]\nsink = {:?}\nrequired-tags = [\"order\"]\nhttp-body = \"events\"\n",
        database.url(),
        topic.brokers,
        topic.name,
        web.url()
    );
    std::fs::write(file.path(), text).expect("the configuration is written");
    file
}

fn run(file: &tempfile::NamedTempFile) -> Relay {
    Relay::spawn(&["run", "--config", file.path().to_str().expect("a path")])
}

async fn append(database: &Database, n: usize) {
    let insert = format!("INSERT INTO events (type, tags, data) VALUES ('Placed', '{{order={n}}}', '{{\"n\": {n}}}')");
    database.execute(&insert).await;
}

fn events(web: &HttpServer) -> usize {
    web.taken().iter().map(|request| request.json().as_array().map_or(0, Vec::len)).sum()
}

async fn status_in_table(database: &Database) -> String {
    let status = database.text("SELECT status FROM outbox_topic_progress WHERE publisher = 'web'").await;
    status.unwrap_or_default()
}

fn publishers(address: &str, path: &str) -> Answered {
    ask(address, "GET", &format!("/api/outbox/publishers{path}"), &[])
}

/// What is told of the publisher `web`, once that is so.
async fn until(address: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    eventually(PATIENCE, what, async || {
        Some(publishers(address, "/web"))
            .filter(|answered| answered.code == 200)
            .map(|one| one.json())
            .filter(|one| is(one))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_pause_resume_and_watch_a_publisher_by_its_name() {
    let database = store().await;
    let topic = Topic::create(1).await;
    let web = HttpServer::start(|_| Answer::Status(200)).await;
    let file = configuration(&database, &topic, &web);
    let mut relay = run(&file);
    relay.until_state("streaming").await;
    let address = relay.admin().await;
    append(&database, 1).await;
    let mut reader = topic.reader();
    reader.take(1).await;
    let one = until(&address, "it is noted how far it came", |one| one["lastPosition"] == 1).await;
    assert_eq!(
        (&one["publisherName"], &one["pipeline"], &one["status"]),
        (&json!("web"), &json!("store"), &json!("ACTIVE"))
    );
    assert_eq!((&one["state"], &one["errorCount"], &one["lastError"]), (&json!("streaming"), &json!(0), &Value::Null));
    assert!(
        one["lastPublishedAt"].is_string() && one["leaderInstance"].is_string() && one["leaderHeartbeat"].is_string(),
        "{one}"
    );

    let paused = ask(&address, "POST", "/api/outbox/publishers/web/pause", &[]);
    assert_eq!((paused.code, paused.json()), (200, json!({ "publisherName": "web", "status": "PAUSED" })));
    assert_eq!(status_in_table(&database).await, "PAUSED");
    for n in 2..5 {
        append(&database, n).await;
    }
    reader.take(3).await;
    let caught_up = async || (publishers(&address, "/lag").json() == json!({ "kafka": 0, "web": 3 })).then_some(());
    eventually(PATIENCE, "the lag is told by name", caught_up).await;
    assert_eq!(events(&web), 1, "a paused one gets nothing, and the other goes on");
    let all = publishers(&address, "").json();
    let told: Vec<_> = all
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| (one["publisherName"].clone(), one["status"].clone()))
        .collect();
    assert_eq!(told, [(json!("kafka"), json!("ACTIVE")), (json!("web"), json!("PAUSED"))]);

    assert_eq!(
        ask(&address, "POST", "/api/outbox/publishers/store%2Fweb/resume", &[]).code,
        200,
        "with its pipeline's name"
    );
    eventually(PATIENCE, "it gets what it missed", async || (events(&web) == 4).then_some(())).await;
    until(&address, "it is not behind", |one| one["lag"] == 0 && one["status"] == "ACTIVE").await;

    for (method, path) in [("GET", "/nobody"), ("POST", "/nobody/pause"), ("POST", "/nobody/resume")] {
        let missing = ask(&address, method, &format!("/api/outbox/publishers{path}"), &[]);
        assert_eq!((missing.code, missing.json()["error_code"].as_u64()), (404, Some(404)), "{path}");
    }
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_has_failed_goes_on_when_it_is_resumed_or_restarted() {
    let database = store().await;
    let topic = Topic::create(1).await;
    let good = Arc::new(AtomicBool::new(false));
    let answers = good.clone();
    let web = HttpServer::start(move |_| Answer::Status(if answers.load(Ordering::Relaxed) { 200 } else { 422 })).await;
    let file = configuration(&database, &topic, &web);
    let relay = run(&file);
    let address = relay.admin().await;
    for (round, path) in
        ["/api/outbox/publishers/web/resume", "/pipelines/store/publishers/web/restart"].iter().enumerate()
    {
        good.store(false, Ordering::Relaxed);
        append(&database, round).await;
        let failed = until(&address, "it has failed", |one| one["status"] == "FAILED").await;
        assert!(failed["lastError"].as_str().is_some_and(|error| error.contains("422")), "{failed}");
        assert_eq!(failed["errorCount"], 1);
        good.store(true, Ordering::Relaxed);
        assert_eq!(ask(&address, "POST", path, &[]).code, 200, "{path}");
        eventually(PATIENCE, "it gets what it missed", async || (events(&web) == round + 1).then_some(())).await;
        until(&address, "it is well", |one| one["status"] == "ACTIVE" && one["state"] == "streaming").await;
    }
    relay.stop().await;
}
