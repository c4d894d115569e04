//! Tools that were made for Kafka Connect watch outboxd, pause it and restart it: here two clients from a package registry,
//! kafka-connect-py and kafka-connect-api.

use serde_json::{Value, json};

use crate::support::shop::{Shop, add, http, outbox, publisher, taken, taking, until_publisher, until_taken};
use crate::support::{
    Answer, Database, Expected, HttpServer, PATIENCE, Relay, Server, Topic, Writer, eventually, script,
};

const CLIENTS: [&str; 2] = ["kafka-connect-py==1.0.0", "kafka-connect-api==0.5.10"];

async fn client(relay: &Relay, arguments: &[&str]) -> Value {
    let url = format!("http://{}", relay.admin().await);
    script(&CLIENTS, "connect.py", &[&[&url[..]], arguments].concat(), "").await
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_kafka_connect_see_a_pipeline_as_a_connector() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--name", "orders"]).await;
    let admin = relay.admin().await;
    let seen = client(&relay, &["watch", "orders"]).await;
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!((&seen["cluster"]["version"], &seen["version"]), (&json!(version), &json!(version)));
    let cluster = seen["kafka_cluster"].as_str().expect("the id of the Kafka cluster");
    assert!(cluster.len() > 10 && seen["cluster"]["kafka_cluster_id"] == cluster, "{seen}");
    assert_eq!((&seen["connectors"], &seen["running"]), (&json!(["orders"]), &json!(["orders"])));
    assert_eq!(seen["expanded_status"]["orders"]["status"], seen["status"]);
    assert_eq!(seen["expanded_info"]["orders"]["info"], seen["info"]);
    let state = json!({ "state": "RUNNING", "worker_id": admin, "version": version });
    let task = json!({ "id": 0, "state": "RUNNING", "worker_id": admin, "version": version });
    assert_eq!(seen["status"], json!({ "name": "orders", "connector": state, "tasks": [task], "type": "source" }));
    assert_eq!((&seen["task_status"], &seen["state"]), (&task, &json!("RUNNING")));
    assert_eq!((&seen["exists"], &seen["tasks_running"]), (&json!(true), &json!([true])));
    let info = &seen["info"];
    assert_eq!((&info["name"], &info["type"], &info["config"]), (&json!("orders"), &json!("source"), &seen["config"]));
    assert_eq!(info["tasks"], json!([{ "connector": "orders", "task": 0 }]));
    let config = &seen["config"];
    assert_eq!((&config["connector.class"], &config["topic"]), (&json!("outboxd.PostgresOutbox"), &json!(topic.name)));
    assert_eq!(
        (&config["slot"], &config["layout"], &config["sink"]),
        (&json!(database.slot()), &json!("native"), &json!("kafka"))
    );
    assert!(
        config["source"].as_str().is_some_and(|url| url.starts_with("postgres://127.0.0.1") && !url.contains('@')),
        "{config}"
    );
    assert_eq!(seen["class"], config["connector.class"]);
    assert_eq!(seen["tasks"][0]["id"], json!({ "connector": "orders", "task": 0 }));
    assert_eq!(seen["topics"], json!({ "orders": { "topics": [topic.name] } }));
    let classes: Vec<_> = seen["plugins"].as_array().expect("plugins").iter().map(|one| &one["class"]).collect();
    assert!(classes.contains(&&config["connector.class"]) && classes.len() == 3, "{seen}");

    let refused = client(&relay, &["refused", "nobody"]).await;
    for call in ["get", "status", "pause"] {
        let expected = json!({ "status": 404, "body": { "error_code": 404, "message": "Connector nobody not found" } });
        assert_eq!(refused[call], expected, "{call}");
    }
    // What a pipeline is made of is nobody's to change here.
    for call in ["create", "delete"] {
        assert_eq!(
            (&refused[call]["status"], &refused[call]["body"]["error_code"]),
            (&json!(405), &json!(405)),
            "{call}"
        );
    }
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_kafka_connect_pause_resume_and_restart_a_pipeline() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let mut relay = Relay::streaming(&database, &topic, &["--name", "orders", "--admin-token", "s3cret"]).await;
    relay.until_state("streaming").await;
    let writer = Writer::connect(&database).await;
    let with_token = async |arguments: &[&str]| client(&relay, &[&["--auth", "tool:s3cret"], arguments].concat()).await;
    let refused = client(&relay, &["refused", "orders"]).await;
    assert_eq!((&refused["get"]["status"], &refused["pause"]["status"]), (&Value::Null, &json!(401)), "{refused}");
    assert_eq!(refused["pause"]["body"]["error_code"], 401);

    with_token(&["pause", "orders"]).await;
    assert_eq!(relay.status().await["state"], "paused");
    assert_eq!(with_token(&["watch", "orders"]).await["status"]["connector"]["state"], "PAUSED");
    writer.commit(&["a", "b"]).await;
    let mut reader = topic.reader();
    assert_eq!(reader.rest().await.len(), 0, "a paused connector delivers nothing");
    with_token(&["restart", "orders"]).await;
    let paused = async || (relay.status().await["state"] == "paused").then_some(());
    eventually(PATIENCE, "a restart leaves it paused", paused).await;
    with_token(&["resume", "orders"]).await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;

    // Pause, restart of every task, resume, one after the other without waiting.
    let before = database.walsender().await;
    with_token(&["cycle", "orders"]).await;
    let began_anew = async || database.walsender().await.filter(|now| Some(*now) != before);
    eventually(PATIENCE, "the log is read by a new connection", began_anew).await;
    let streams = async || (relay.status().await["state"] == "streaming").then_some(());
    eventually(PATIENCE, "it streams", streams).await;
    with_token(&["restart", "orders"]).await;
    writer.commit(&["a"]).await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_kafka_connect_restart_the_task_that_has_failed_and_no_other() {
    let database = outbox().await;
    let good = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let answers = good.clone();
    let picky = HttpServer::start(move |_| match answers.load(std::sync::atomic::Ordering::Relaxed) {
        true => Answer::Status(200),
        false => Answer::Status(400),
    })
    .await;
    let fine = taking().await;
    let shop = Shop::new(&database, &(http("fine", &fine, "") + &http("picky", &picky, "max-retries = 0")));
    let relay = shop.run(&database).await;
    add(&database, 0, 5).await;
    until_taken(&fine, 0..5).await;
    until_publisher(&relay, "picky", "has failed", |one| one["state"] == "failed").await;
    let seen = client(&relay, &["watch", "shop"]).await;
    let tasks = seen["status"]["tasks"].as_array().expect("tasks");
    let states: Vec<_> = tasks.iter().map(|task| task["state"].as_str().expect("a state")).collect();
    assert_eq!((seen["status"]["connector"]["state"].as_str(), states), (Some("RUNNING"), vec!["RUNNING", "FAILED"]));
    assert!(tasks[1]["trace"].as_str().is_some_and(|trace| trace.contains("400")), "{seen}");
    assert_eq!(seen["tasks_running"], json!([true, false]));

    good.store(true, std::sync::atomic::Ordering::Relaxed);
    let answered = client(&relay, &["restart-failed", "shop"]).await;
    assert_eq!(answered["name"], "shop", "with its tasks the answer is the status: {answered}");
    until_taken(&picky, 0..5).await;
    until_publisher(&relay, "picky", "takes part", |one| one["state"] == "streaming").await;
    client(&relay, &["restart-task", "shop", "0"]).await;
    add(&database, 5, 10).await;
    until_taken(&picky, 0..10).await;
    until_taken(&fine, 0..10).await;
    assert_eq!(publisher(&relay, "fine").await["last_error"], Value::Null);
    relay.stop().await;
    assert_eq!(taken(&fine), (0..10).collect::<Vec<_>>(), "nothing twice: what was confirmed is not repeated");
}
