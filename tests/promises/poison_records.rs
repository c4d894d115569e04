//! A record that can never be delivered is parked with its reason, in its turn, while the rest flows; without a
//! dead-letter place the pipeline ends with exit 6 and confirms nothing past it.

use crate::promises::kafka_sink::java;
use crate::support::{Database, PATIENCE, Record, Relay, Server, Topic, eventually, shared_kafka, unique, variable};

async fn database() -> Database {
    let database = Database::create(Server::Newest).await;
    let table =
        "CREATE TABLE outbox (id text PRIMARY KEY, topic text, partition_key text, payload text, headers jsonb)";
    database.execute(table).await;
    database
}

async fn insert(database: &Database, id: &str, topic: &str, key: Option<&str>, payload: &str) {
    let statement = "INSERT INTO outbox VALUES ($1, $2, $3, $4, '{\"trace\": \"t1\"}')";
    database.sql.execute(statement, &[&id, &topic, &key, &payload]).await.expect("an event is inserted");
}

/// Routes each row to the topic it names.
fn by_row(database: &Database, flags: &[&str]) -> Relay {
    let (url, brokers) = (database.url(), shared_kafka());
    let mut arguments = vec!["run", &url, "--brokers", &brokers];
    arguments.extend(flags);
    Relay::spawn(&arguments)
}

fn ids(records: &[Record]) -> Vec<&str> {
    records.iter().map(Record::id).collect()
}

fn first_occurrences(records: &[Record]) -> Vec<&str> {
    let mut seen = std::collections::HashSet::new();
    ids(records).into_iter().filter(|id| seen.insert(*id)).collect()
}

fn dead_letters_at(topic: &Topic) -> String {
    format!("topic:{}", topic.name)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_too_large_is_parked_alone_and_nothing_overtakes() {
    let database = database().await;
    let topic = Topic::create_at(&shared_kafka(), 1, &[("max.message.bytes", "20000")]).await;
    let dead = Topic::create(1).await;
    let mut relay = by_row(&database, &["--dead-letter", &dead_letters_at(&dead)]);
    relay.until_streaming(&database).await;
    let (large, small) = ("x".repeat(30_000), "y".repeat(5_000));
    database.sql.execute("BEGIN", &[]).await.unwrap();
    for number in 0..60 {
        let payload = if number % 20 == 10 { &large } else { &small };
        insert(&database, &format!("{number:02}"), &topic.name, Some("k"), payload).await;
    }
    database.sql.execute("COMMIT", &[]).await.unwrap();

    let parked = dead.reader().take(3).await;
    assert_eq!(ids(&parked), ["10", "30", "50"]);
    for record in &parked {
        assert_eq!(record.value.as_deref(), Some(large.as_str()));
        assert_eq!(record.key.as_deref(), Some("k"));
        assert_eq!(record.header("trace"), Some("t1"), "the original headers are there");
        assert!(record.header("outboxd.reason").unwrap().contains("20000"), "{record:?}");
        assert_eq!(record.header("outboxd.topic"), Some(topic.name.as_str()));
        let position = record.header("outboxd.position").unwrap();
        assert!(position.contains('/'), "{position} is not a log position");
    }
    let delivered = topic.reader().take(57).await;
    let expected: Vec<String> = (0..60).filter(|n| n % 20 != 10).map(|n| format!("{n:02}")).collect();
    assert_eq!(ids(&delivered), expected, "each once, in order");
    assert_eq!(relay.status().await["dead_letters"], 3);
    let end = database.wal_position().await;
    database.until_confirmed(end, PATIENCE).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_place_a_poison_record_is_exit_6_and_is_not_passed() {
    let database = database().await;
    let topic = Topic::create_at(&shared_kafka(), 1, &[("max.message.bytes", "20000")]).await;
    let mut relay = by_row(&database, &[]);
    relay.until_streaming(&database).await;
    insert(&database, "good", &topic.name, Some("k"), "fine").await;
    let before = database.wal_position().await;
    insert(&database, "bad", &topic.name, Some("k"), &"x".repeat(30_000)).await;
    insert(&database, "after", &topic.name, Some("k"), "fine").await;
    relay.exits_with(6).await;
    let log = relay.log();
    assert!(log.contains("with id bad") && log.contains("--dead-letter"), "{log}");
    let confirmed = database.confirmed().await.unwrap();
    assert!(confirmed <= before, "the slot passed the record that was not delivered");

    // With a place to park it, everything goes on from there.
    let dead = Topic::create(1).await;
    let mut relay = by_row(&database, &["--dead-letter", &dead_letters_at(&dead)]);
    relay.until_streaming(&database).await;
    assert_eq!(ids(&dead.reader().take(1).await), ["bad"]);
    let mut reader = topic.reader();
    let records = reader.until(PATIENCE, "the last one arrives", |all| all.iter().any(|r| r.id() == "after")).await;
    assert_eq!(records.iter().filter(|record| record.id() == "after").count(), 1);
    relay.stop().await;
}

/// Only the broker knows that a compacted topic takes no record without a key; it refuses the whole batch.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_culprit_of_a_refused_batch_is_parked() {
    let database = database().await;
    let topic = Topic::create_at(&shared_kafka(), 1, &[("cleanup.policy", "compact")]).await;
    let dead = Topic::create(1).await;
    let mut relay = by_row(&database, &["--dead-letter", &dead_letters_at(&dead)]);
    relay.until_streaming(&database).await;
    database.sql.execute("BEGIN", &[]).await.unwrap();
    for number in 0..30 {
        let key = (number != 7 && number != 21).then(|| format!("k{number:02}"));
        insert(&database, &format!("{number:02}"), &topic.name, key.as_deref(), "{}").await;
    }
    database.sql.execute("COMMIT", &[]).await.unwrap();
    let mut reader = dead.reader();
    let parked = reader.until(PATIENCE, "both are parked", |all| all.iter().any(|record| record.id() == "21")).await;
    // Finding the second one reads the commit again, and parks the first one again.
    assert_eq!(first_occurrences(&parked), ["07", "21"]);
    assert!(parked[0].header("outboxd.reason").unwrap().contains("refuses"), "{:?}", parked[0]);
    let mut reader = topic.reader();
    let records = reader.until(PATIENCE, "the last one arrives", |all| all.iter().any(|r| r.id() == "29")).await;
    let first = first_occurrences(&records);
    let expected: Vec<String> = (0..30).filter(|n| *n != 7 && *n != 21).map(|n| format!("{n:02}")).collect();
    assert_eq!(first, expected, "first occurrences in order, the culprits absent");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_with_a_missing_or_impossible_topic_is_parked_while_the_rest_flows() {
    let database = database().await;
    let (topic, dead) = (Topic::create(1).await, Topic::create(1).await);
    let mut relay = by_row(&database, &["--dead-letter", &dead_letters_at(&dead)]);
    relay.until_streaming(&database).await;
    let missing = unique("missing");
    for (id, topic) in [("1", topic.name.as_str()), ("2", &missing), ("3", "not a topic"), ("4", topic.name.as_str())] {
        insert(&database, id, topic, Some("k"), "{}").await;
    }
    let parked = dead.reader().take(2).await;
    assert_eq!(ids(&parked), ["2", "3"]);
    assert!(parked[0].header("outboxd.reason").unwrap().contains("does not exist"));
    assert!(parked[1].header("outboxd.reason").unwrap().contains("not a name"));
    assert_eq!(ids(&topic.reader().take(2).await), ["1", "4"]);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_may_not_be_written_to_is_parked_or_exit_6() {
    let database = database().await;
    let (topic, forbidden, dead) = (Topic::create(1).await, Topic::create(1).await, Topic::create(1).await);
    java("DenyWrite", &[&shared_kafka(), &forbidden.name, "User:restricted"]);
    let (url, brokers) = (database.url(), variable("OUTBOXD_TEST_KAFKA_SASL_SSL"));
    let ca = format!("ssl.ca.location={}/ca.pem", variable("OUTBOXD_TEST_CERTS"));
    let mut arguments = vec!["run", &url, "--brokers", &brokers, "--kafka", "security.protocol=SASL_SSL"];
    arguments.extend(["--kafka", "sasl.mechanism=PLAIN", "--kafka", "sasl.username=restricted"]);
    arguments.extend(["--kafka", "sasl.password=restricted-secret", "--kafka", &ca]);
    let mut relay = Relay::spawn(&arguments);
    relay.until_streaming(&database).await;
    for (id, topic) in [("1", &topic), ("2", &forbidden), ("3", &topic)] {
        insert(&database, id, &topic.name, Some("k"), "{}").await;
    }
    relay.exits_with(6).await;
    assert!(relay.log().contains("may not write"), "{}", relay.log());

    let place = dead_letters_at(&dead);
    arguments.extend(["--dead-letter", &place]);
    let mut relay = Relay::spawn(&arguments);
    relay.until_streaming(&database).await;
    assert_eq!(ids(&dead.reader().take(1).await), ["2"]);
    let mut reader = topic.reader();
    reader.until(PATIENCE, "the last one arrives", |all| all.iter().any(|record| record.id() == "3")).await;
    let end = database.wal_position().await;
    eventually(PATIENCE, "the slot passes the parked record", async || {
        database.confirmed().await.filter(|confirmed| *confirmed >= end)
    })
    .await;
    relay.stop().await;
}
