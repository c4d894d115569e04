//! The broker's side: where keys land, how it is reached, and what becomes of a producer that can go on no more.

use std::process::Command;
use std::time::Duration;

use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use crate::support::{Database, Expected, PATIENCE, Relay, Server, Topic, Writer, shared_kafka, unique, variable};

/// Runs a program of tests/java with Kafka's own client on its class path.
pub fn java(program: &str, arguments: &[&str]) -> String {
    let libraries = format!("{}/*", variable("OUTBOXD_TEST_KAFKA_LIBS"));
    let source = format!("{}/tests/java/{program}.java", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("java")
        .args(["-Dfile.encoding=UTF-8", "-Dsun.jnu.encoding=UTF-8", "-cp", &libraries, &source])
        .args(arguments)
        .env("LC_ALL", "C.UTF-8")
        .output()
        .expect("java runs");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it prints text")
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_land_where_the_java_client_puts_them() {
    const PARTITIONS: i32 = 7;
    let long = "x".repeat(1000);
    let mut keys: Vec<String> = (0..40).map(|number| format!("customer-{number}")).collect();
    keys.extend(["a", "ab", "abc", "abcd", "ключ", "鍵", "🔑", "0", "-1", " ", "\"quoted\"", &long].map(str::to_owned));
    let mut arguments = vec!["7"];
    arguments.extend(keys.iter().map(String::as_str));
    let expected: Vec<i32> = java("PartitionOf", &arguments).lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(expected.len(), keys.len());

    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(PARTITIONS).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    for key in &keys {
        database.sql.execute("INSERT INTO outbox (partition_key, payload) VALUES ($1, '{}')", &[key]).await.unwrap();
    }
    let records = topic.reader().take(keys.len()).await;
    for (key, expected) in keys.iter().zip(expected) {
        let record = records.iter().find(|record| record.key.as_ref() == Some(key)).expect("every key arrived");
        assert_eq!(record.partition, expected, "key {key:?}");
    }
    relay.stop().await;
}

fn sasl(mechanism: &str, password: &str, ca: &str) -> Vec<String> {
    let ca = format!("ssl.ca.location={}/{ca}", variable("OUTBOXD_TEST_CERTS"));
    let options = [
        "security.protocol=SASL_SSL".to_owned(),
        format!("sasl.mechanism={mechanism}"),
        "sasl.username=outboxd".to_owned(),
        format!("sasl.password={password}"),
        ca,
    ];
    options.into_iter().flat_map(|option| ["--kafka".to_owned(), option]).collect()
}

/// A relay to the shared topic through the listener that wants TLS and a password.
fn through_sasl(database: &Database, topic: &Topic, options: &[String]) -> Relay {
    let (url, brokers) = (database.url(), variable("OUTBOXD_TEST_KAFKA_SASL_SSL"));
    let mut arguments = vec!["run", &url, "--brokers", &brokers, "--topic", &topic.name];
    arguments.extend(options.iter().map(String::as_str));
    Relay::spawn(&arguments)
}

#[tokio::test(flavor = "multi_thread")]
async fn delivers_over_tls_with_every_sasl_mechanism() {
    for mechanism in ["PLAIN", "SCRAM-SHA-512"] {
        let database = Database::with_outbox(Server::Newest).await;
        let topic = Topic::create(2).await;
        let mut relay = through_sasl(&database, &topic, &sasl(mechanism, "outboxd-secret", "ca.pem"));
        relay.until_streaming(&database).await;
        Writer::connect(&database).await.commit(&["a", "b", "c"]).await;
        Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
        relay.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_password_or_certificate_is_exit_5_and_never_shows_the_password() {
    for (password, ca, expected) in
        [("wrong-and-secret", "ca.pem", "credentials"), ("outboxd-secret", "wrong-ca.pem", "TLS")]
    {
        let database = Database::with_outbox(Server::Newest).await;
        let topic = Topic::create(1).await;
        let mut relay = through_sasl(&database, &topic, &sasl("SCRAM-SHA-512", password, ca));
        relay.exits_with(5).await;
        let log = relay.log();
        assert!(log.contains(expected) && log.contains("remedy"), "{log}");
        assert!(!log.contains(password), "the password is in the log: {log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_topic_at_start_is_exit_5_and_can_be_created() {
    let database = Database::with_outbox(Server::Newest).await;
    let missing = Topic { name: unique("missing"), brokers: shared_kafka(), partitions: 3 };
    let mut relay = Relay::start(&database, &missing, &[]);
    relay.exits_with(5).await;
    assert!(relay.log().contains(&missing.name), "{}", relay.log());
    assert_eq!(database.slots().await, 0, "nothing is made in the database before the sink is ready");

    let relay = Relay::streaming(&database, &missing, &["--create-topics", "3:1"]).await;
    Writer::connect(&database).await.commit(&["a", "b"]).await;
    Expected::of(&database).await.arrive_in(&mut missing.reader(), PATIENCE).await;
    relay.stop().await;
}

/// The one fault that a real broker does not produce on demand: it loses track of an idempotent producer.
#[tokio::test(flavor = "multi_thread")]
async fn a_fatal_producer_error_makes_a_new_producer_and_loses_nothing() {
    let cluster = MockCluster::new(1).expect("an in-process broker");
    let topic = Topic { name: unique("fatal"), brokers: cluster.bootstrap_servers(), partitions: 2 };
    cluster.create_topic(&topic.name, 2, 1).expect("a topic");
    let database = Database::with_outbox(Server::Newest).await;
    // A real broker that misses a sequence number refuses all that follow it; this one would take them.
    let one_at_a_time = ["--kafka", "max.in.flight.requests.per.connection=1"];
    let relay = Relay::streaming(&database, &topic, &one_at_a_time).await;
    let writer = Writer::connect(&database).await;
    for _ in 0..20 {
        writer.commit(&["a", "b"]).await;
    }
    let mut reader = topic.reader();
    reader.take(40).await;
    use RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER as OUT_OF_ORDER;
    cluster.request_errors(RDKafkaApiKey::Produce, &[OUT_OF_ORDER; 2]);
    for _ in 0..20 {
        writer.commit(&["a", "b"]).await;
    }
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    assert!(relay.log().contains("fatal") || relay.log().contains("refused"), "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_break_a_guarantee_are_refused_with_the_reason() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    for setting in ["acks=1", "enable.idempotence=false", "partitioner=random", "message.timeout.ms=1000"] {
        let mut relay = Relay::start(&database, &topic, &["--kafka", setting]);
        relay.exits_with(2).await;
        let key = setting.split('=').next().unwrap();
        assert!(relay.log().contains(key) && relay.log().contains("--unsafe"), "{}", relay.log());
    }
    assert_eq!(database.slots().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_at_start_is_waited_for() {
    let database = Database::with_outbox(Server::Newest).await;
    let nowhere = Topic { name: "any".to_owned(), brokers: "127.0.0.1:1".to_owned(), partitions: 1 };
    let mut relay = Relay::start(&database, &nowhere, &[]);
    let said = crate::support::eventually(PATIENCE, "the outage shows in the status", async || {
        let status = relay.status().await;
        status["last_error"].as_str().map(str::to_owned)
    });
    assert!(said.await.contains("no Kafka broker"), "{}", relay.log());
    assert!(relay.is_running());
    tokio::time::timeout(Duration::from_secs(60), relay.stop()).await.expect("it can still be stopped");
}
