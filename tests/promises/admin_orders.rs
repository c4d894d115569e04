//! Orders over HTTP: who may give them, and what a restart does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::support::admin::{Answered, ask};
use crate::support::shop::{Shop, add, closed, http, outbox, taken, taking, until_publisher, until_taken};
use crate::support::{Answer, Database, Expected, HttpServer, PATIENCE, Relay, Server, Topic, Writer, eventually};

/// A dead letter of the pipeline `shop`, whose payload nobody may see.
const PLANTED: &str = "planted-payload";

async fn pipeline_with_a_letter(flags: &[&str]) -> (Relay, Database, String) {
    let database = outbox().await;
    let server = HttpServer::start(|_| Answer::Status(400)).await;
    let lines = format!("sink = {:?}\nmax-retries = 0\ndead-letter = \"table:dead_letters\"", server.url());
    let shop = Shop::new(&database, &lines);
    let mut relay = Relay::spawn(&[&["run", "--config", shop.path()], flags].concat());
    relay.until_streaming(&database).await;
    relay.until_state("streaming").await;
    let insert = format!("INSERT INTO outbox (partition_key, payload) VALUES ('k', '{{\"n\": \"{PLANTED}\"}}')");
    database.execute(&insert).await;
    let letters = async || database.text("SELECT id::text FROM dead_letters").await;
    let id = eventually(PATIENCE, "a letter is there", async || {
        let there = database.text("SELECT to_regclass('dead_letters')::text").await;
        if there.is_some() { letters().await } else { None }
    })
    .await;
    (relay, database, id)
}

/// What needs a token: each changes something, or shows a payload.
fn guarded(id: &str) -> Vec<(&'static str, String)> {
    [
        ("POST", "/pipelines/shop/pause".to_owned()),
        ("POST", "/pipelines/shop/resume".to_owned()),
        ("POST", "/pipelines/shop/restart".to_owned()),
        ("POST", "/pipelines/shop/publishers/shop/pause".to_owned()),
        ("POST", "/api/outbox/publishers/shop/pause".to_owned()),
        ("POST", "/api/outbox/publishers/shop/resume".to_owned()),
        ("PUT", "/connectors/shop/pause".to_owned()),
        ("PUT", "/connectors/shop/resume".to_owned()),
        ("POST", "/connectors/shop/restart".to_owned()),
        ("POST", "/connectors/shop/tasks/0/restart".to_owned()),
        ("GET", "/pipelines/shop/dead-letters".to_owned()),
        ("GET", format!("/pipelines/shop/dead-letters/{id}")),
        ("POST", format!("/pipelines/shop/dead-letters/{id}/replay")),
    ]
    .into()
}

fn refused(address: &str, id: &str, headers: &[(&str, &str)], code: u16) {
    for (method, path) in guarded(id) {
        let answered: Answered = ask(address, method, &path, headers);
        assert_eq!(answered.code, code, "{method} {path} with {headers:?}: {answered:?}");
        assert!(!answered.body.contains(PLANTED), "{answered:?}");
        // A browser gets nothing to show either, and no leave to ask more.
        assert_eq!(answered.header("access-control-allow-origin"), None);
        assert_eq!(answered.header("www-authenticate"), None, "no browser is to remember it");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_token_nobody_else_on_the_network_changes_anything_or_sees_a_payload() {
    let (relay, _database, id) = pipeline_with_a_letter(&["--admin", "0.0.0.0:0"]).await;
    let address = relay.admin().await.replace("0.0.0.0", "127.0.0.1");
    // Also not from this machine: whoever bound it to all addresses may have a proxy before it.
    refused(&address, &id, &[], 403);
    for open in ["/livez", "/status", "/metrics", "/connectors/shop/status", "/openapi.json"] {
        assert_eq!(ask(&address, "GET", open, &[]).code, 200, "{open}");
    }
    let state = ask(&address, "GET", "/status", &[]).json()["pipelines"][0]["state"].clone();
    assert_eq!(state, "streaming", "nothing was changed");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_loopback_no_page_of_another_place_changes_anything_or_sees_a_payload() {
    let (relay, _database, id) = pipeline_with_a_letter(&[]).await;
    let address = relay.admin().await;
    for headers in [
        [("Origin", "https://evil.example")],
        [("Origin", "null")],
        [("Sec-Fetch-Site", "cross-site")],
        [("Sec-Fetch-Site", "same-site")],
        // A name that was made to lead here.
        [("Host", "rebound.example:7420")],
    ] {
        refused(&address, &id, &headers, 403);
    }
    // A page of ours, and a tool.
    let ours = format!("http://{address}");
    let shown = ask(&address, "GET", &format!("/pipelines/shop/dead-letters/{id}"), &[("Origin", &ours)]);
    assert!(shown.code == 200 && shown.body.contains(PLANTED), "{shown:?}");
    assert_eq!(ask(&address, "POST", "/pipelines/shop/pause", &[]).code, 200);
    assert_eq!(relay.status().await["state"], "paused");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_token_only_who_has_it_changes_anything_or_sees_a_payload_and_it_may_be_changed_while_running() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("token");
    std::fs::write(&file, "first-one\n").expect("the token is written");
    let flag = format!("file:{}", file.display());
    let (relay, _database, id) = pipeline_with_a_letter(&["--admin", "0.0.0.0:0", "--admin-token", &flag]).await;
    let address = relay.admin().await.replace("0.0.0.0", "127.0.0.1");
    refused(&address, &id, &[], 401);
    refused(&address, &id, &[("Authorization", "Bearer first-on")], 401);
    refused(&address, &id, &[("Authorization", "first-one")], 401);
    refused(&address, &id, &[("Authorization", "Basic Zmlyc3Qtb25lOg==")], 401);
    // As the password of somebody; but not when a browser adds it for a page of another place.
    let basic = ("Authorization", "Basic dG9vbDpmaXJzdC1vbmU=");
    refused(&address, &id, &[basic, ("Origin", "https://evil.example")], 403);
    let letters = "/pipelines/shop/dead-letters";
    assert_eq!(ask(&address, "GET", letters, &[basic]).code, 200);
    let bearer = [("Authorization", "Bearer first-one")];
    assert!(ask(&address, "GET", &format!("{letters}/{id}"), &bearer).body.contains(PLANTED));
    assert_eq!(ask(&address, "PUT", "/connectors/shop/pause", &bearer).code, 202);
    std::fs::write(&file, "second-one\n").expect("the token is written");
    refused(&address, &id, &bearer, 401);
    assert_eq!(ask(&address, "PUT", "/connectors/shop/resume", &[("Authorization", "Bearer second-one")]).code, 202);
    for path in ["/status", "/openapi.json", "/connectors/shop/config"] {
        let shown = ask(&address, "GET", path, &[]);
        assert!(shown.code == 200 && !shown.body.contains("second-one"), "{shown:?}");
    }
    assert!(!relay.log().contains("-one\n") && !relay.log().contains("second-one"), "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_begins_anew_from_the_confirmed_position_and_loses_nothing() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(2).await;
    let mut relay = Relay::streaming(&database, &topic, &["--name", "orders"]).await;
    relay.until_state("streaming").await;
    let address = relay.admin().await;
    let writer = Writer::connect(&database).await;
    for round in 0..3 {
        let before = database.until_streaming().await;
        writer.commit(&["a", "b", "a"]).await;
        let answered = ask(&address, "POST", "/pipelines/orders/restart", &[]);
        assert_eq!((answered.code, answered.body.as_str()), (200, "done\n"), "round {round}");
        writer.commit(&["b", "a"]).await;
        let anew = async || database.walsender().await.filter(|now| *now != before);
        eventually(PATIENCE, "the log is read by a new connection", anew).await;
    }
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    assert_eq!(ask(&address, "POST", "/pipelines/nobody/restart", &[]).code, 404);
    assert_eq!(ask(&address, "POST", "/pipelines/orders/explode", &[]).code, 404);
    relay.stop().await;
}

/// Two pipelines, of which one has ended: it runs again, and what it ended with is forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_that_has_failed_runs_again_and_the_process_ends_as_if_it_had_never() {
    let (one, other) = (outbox().await, outbox().await);
    let good = Arc::new(AtomicBool::new(false));
    let answers = good.clone();
    let picky =
        HttpServer::start(move |_| Answer::Status(if answers.load(Ordering::Relaxed) { 200 } else { 400 })).await;
    let fine = taking().await;
    let of = |name: &str, database: &Database, server: &HttpServer| {
        let (source, slot, sink) = (database.url(), database.slot(), server.url());
        format!(
            "[pipeline.{name}]\nsource = {source:?}\nslot = {slot:?}\nsink = {sink:?}\nmax-retries = 0\nlanes = 1\n"
        )
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), of("one", &one, &picky) + &of("other", &other, &fine)).expect("it is written");
    let relay = Relay::spawn(&["run", "--config", file.path().to_str().expect("a path")]);
    let state = async |name: &str| {
        let page: Value = serde_json::from_str(&relay.get("/status").await).expect("/status is JSON");
        let found = page["pipelines"].as_array().expect("pipelines").iter().find(|one| one["name"] == name).cloned();
        found.expect("the pipeline is told of")["state"].as_str().expect("a state").to_owned()
    };
    let until = async |name: &str, wanted: &str| {
        let is = async || (state(name).await == wanted).then_some(());
        eventually(PATIENCE, &format!("{name} is {wanted}"), is).await;
    };
    until("one", "streaming").await;
    until("other", "streaming").await;
    add(&one, 0, 3).await;
    until("one", "failed").await;
    let address = relay.admin().await;
    let refused = ask(&address, "POST", "/pipelines/one/resume", &[]);
    assert!(refused.code == 409 && refused.body.contains("restart it"), "{refused:?}");
    // It may fail again.
    assert_eq!(ask(&address, "POST", "/pipelines/one/restart", &[]).code, 200);
    eventually(PATIENCE, "it is tried again", async || (picky.requests().len() > 1).then_some(())).await;
    until("one", "failed").await;
    good.store(true, Ordering::Relaxed);
    assert_eq!(ask(&address, "POST", "/pipelines/one/restart", &[]).code, 200);
    until_taken(&picky, 0..3).await;
    add(&other, 0, 2).await;
    until_taken(&fine, 0..2).await;
    until("one", "streaming").await;
    relay.stop().await;
    assert_eq!(taken(&fine), [0, 1], "the other one never stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_tries_a_failed_publisher_again_and_leaves_who_is_paused() {
    let database = outbox().await;
    let good = Arc::new(AtomicBool::new(false));
    let answers = good.clone();
    let picky =
        HttpServer::start(move |_| Answer::Status(if answers.load(Ordering::Relaxed) { 200 } else { 400 })).await;
    let (fine, resting) = (taking().await, taking().await);
    let lines = http("fine", &fine, "") + &http("picky", &picky, "max-retries = 0") + &http("resting", &resting, "");
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    let address = relay.admin().await;
    assert_eq!(ask(&address, "POST", "/pipelines/shop/publishers/resting/pause", &[]).code, 200);
    add(&database, 0, 5).await;
    until_publisher(&relay, "picky", "has failed", |one| one["state"] == "failed").await;
    good.store(true, Ordering::Relaxed);
    assert_eq!(ask(&address, "POST", "/pipelines/shop/publishers/picky/restart", &[]).code, 200);
    until_taken(&picky, 0..5).await;
    until_publisher(&relay, "resting", "is still paused", |one| one["state"] == "paused").await;
    assert_eq!(taken(&resting), Vec::<u64>::new());
    until_taken(&fine, 0..5).await;
    assert_eq!(taken(&fine), (0..5).collect::<Vec<_>>());
    relay.stop().await;
}

/// What `/status?history=true` tells beside the rest: the last minute, and the last errors.
#[tokio::test(flavor = "multi_thread")]
async fn the_status_tells_the_last_minute_and_the_last_errors() {
    let database = outbox().await;
    let (slow, open) = closed().await;
    let fine = taking().await;
    let shop = Shop::new(&database, &(http("fine", &fine, "") + &http("slow", &slow, "")));
    let relay = shop.run(&database).await;
    add(&database, 0, 40).await;
    until_taken(&fine, 0..40).await;
    let history = async || {
        serde_json::from_str::<Value>(&relay.get("/status?history=true").await).expect("JSON")["pipelines"][0].clone()
    };
    let away = eventually(PATIENCE, "the errors are told", async || {
        let one = history().await;
        let slow = one["publishers"][1].clone();
        (slow["errors"][0]["times"].as_u64()? >= 2 && one["sink_connected"] == false).then_some(one)
    })
    .await;
    let slow_one = &away["publishers"][1];
    assert!(slow_one["errors"][0]["what"].as_str().is_some_and(|what| what.contains("503")), "{slow_one}");
    assert!(
        slow_one["errors"][0]["at"].as_str().is_some_and(|at| at.ends_with('Z') && at.starts_with("20")),
        "{slow_one}"
    );
    assert_eq!((&slow_one["sink_connected"], &slow_one["sink"]), (&false.into(), &"http".into()));
    assert_eq!((&away["source"], &away["publishers"][0]["sink_connected"]), (&"postgresql".into(), &true.into()));
    let delivered =
        |one: &Value| one["history"].as_array().expect("sixty").iter().map(|n| n.as_u64().unwrap_or(0)).sum::<u64>();
    assert_eq!((delivered(&away["publishers"][0]), delivered(slow_one)), (40, 0));
    let latency = &away["publishers"][0]["latency"];
    let [p50, p90, p99] = ["p50", "p90", "p99"].map(|name| latency[name].as_f64().expect("a latency"));
    assert!(p50 > 0.0 && p50 <= p90 && p90 <= p99 && p99 < 120.0, "{latency}");
    assert_eq!(slow_one["latency"], Value::Null);
    open.store(true, Ordering::Relaxed);
    until_taken(&slow, 0..40).await;
    let back =
        eventually(PATIENCE, "both are told of", async || Some(history().await).filter(|one| delivered(one) == 80))
            .await;
    assert!(back["events_per_second"].as_f64().is_some_and(|rate| rate >= 0.0), "{back}");
    let plain = relay.status().await;
    assert!(
        plain["history"].is_null() && plain["errors"].is_null() && plain["latency"].is_object(),
        "only when asked: {plain}"
    );
    relay.stop().await;
}
