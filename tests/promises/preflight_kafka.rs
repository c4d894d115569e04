//! `outboxd check` on Kafka's side.

use std::time::{Duration, Instant};

use crate::support::{Checked, Database, Server, Topic, check, shared_kafka, unique, variable};

async fn look(flags: &[&str]) -> Checked {
    let database = Database::with_outbox(Server::Newest).await;
    let url = database.url();
    let mut arguments = vec![&*url];
    arguments.extend(flags);
    check(&arguments).await
}

/// Over TLS, with a name and a password.
fn secured(user: &str, password: &str, authority: &str) -> Vec<String> {
    let ca = format!("ssl.ca.location={}/{authority}", variable("OUTBOXD_TEST_CERTS"));
    let options = ["security.protocol=SASL_SSL", "sasl.mechanism=PLAIN", "ssl.endpoint.identification.algorithm=none"];
    let login = [format!("sasl.username={user}"), format!("sasl.password={password}"), ca];
    let options = options.iter().map(|option| (*option).to_owned()).chain(login);
    let flags = options.flat_map(|option| ["--kafka".to_owned(), option]);
    ["--brokers".to_owned(), variable("OUTBOXD_TEST_KAFKA_SASL_SSL")].into_iter().chain(flags).collect()
}

async fn look_secured(user: &str, password: &str, authority: &str, topic: &str) -> Checked {
    let flags = secured(user, password, authority);
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    flags.extend(["--topic", topic]);
    look(&flags).await
}

#[tokio::test]
async fn brokers_that_do_not_answer_are_told_within_seconds() {
    let begin = Instant::now();
    let checked = look(&["--brokers", "127.0.0.1:1"]).await;
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    checked.fails_only(&["brokers"], 5);
    assert!(checked.fails("brokers", "127.0.0.1:1").remedy.contains("advertised.listeners"));
}

#[tokio::test]
async fn credentials_and_certificates_that_do_not_fit_are_told_apart() {
    let topic = Topic::create(1).await;
    look_secured("outboxd", "outboxd-secret", "ca.pem", &topic.name).await.would_start();
    let checked = look_secured("outboxd", "hunter2", "ca.pem", &topic.name).await;
    checked.fails_only(&["brokers"], 5);
    assert!(checked.fails("brokers", "refuses our credentials").remedy.contains("sasl.password"));
    assert!(!format!("{checked:?}").contains("hunter2"));
    let checked = look_secured("outboxd", "outboxd-secret", "wrong-ca.pem", &topic.name).await;
    checked.fails_only(&["brokers"], 5);
    assert!(checked.fails("brokers", "no TLS connection").remedy.contains("ssl.ca.location"));
}

#[tokio::test]
async fn a_missing_topic_fails_unless_it_may_be_created_and_is_never_created() {
    let (brokers, topic) = (shared_kafka(), unique("missing"));
    let place = format!("topic:{}", unique("missing"));
    let flags = ["--brokers", &brokers, "--topic", &topic, "--dead-letter", &place];
    let checked = look(&flags).await;
    checked.fails_only(&["topic", "dead-letter"], 5);
    let command = format!("kafka-topics.sh --bootstrap-server {brokers} --create --topic {topic}");
    assert!(checked.fails("topic", "does not exist").remedy.contains(&command));
    let may_create = [&flags[..], &["--create-topics", "3:1"]].concat();
    look(&may_create).await.is_fine("topic", "a run creates it");
    look(&flags).await.fails("topic", "does not exist");

    let too_many_replicas = [&flags[..], &["--create-topics", "3:7"]].concat();
    look(&too_many_replicas).await.fails("topic", "cannot be created");
}

#[tokio::test]
async fn a_topic_that_may_not_be_seen_fails() {
    let topic = Topic::create(1).await;
    look_secured("restricted", "restricted-secret", "ca.pem", &topic.name).await.would_start();
    let denied = tokio::process::Command::new("java")
        .args(["-cp", &format!("{}/*", variable("OUTBOXD_TEST_KAFKA_LIBS"))])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/java/DenyDescribe.java"))
        .args([&shared_kafka(), &topic.name, "User:restricted"])
        .output()
        .await
        .expect("java runs");
    assert!(denied.status.success(), "{denied:?}");
    let checked = look_secured("restricted", "restricted-secret", "ca.pem", &topic.name).await;
    checked.fails_only(&["topic"], 5);
    assert!(checked.fails("topic", "TOPIC_AUTHORIZATION_FAILED").remedy.contains("kafka-acls.sh"));
}

#[tokio::test]
async fn a_dead_letter_topic_that_takes_less_than_the_topic_is_warned_of() {
    let brokers = shared_kafka();
    let topic = Topic::create_at(&brokers, 1, &[("max.message.bytes", "2000000")]).await;
    let dead = Topic::create(1).await;
    let place = format!("topic:{}", dead.name);
    let checked = look(&["--brokers", &brokers, "--topic", &topic.name, "--dead-letter", &place]).await;
    checked.would_start();
    let found = checked.warns("dead-letter", "neither delivered nor parked");
    assert!(found.remedy.contains("max.message.bytes=2000000"), "{found:?}");
}
