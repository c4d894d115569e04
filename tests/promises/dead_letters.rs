//! What cannot be delivered is kept in a table, a collection or a topic, once, and `outboxd dlq` brings it back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Binary, doc};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use serde_json::{Value, json};

use crate::support::{
    Answer, Database, HttpServer, Outbox, PATIENCE, Relay, Request, Server, Source, Topic, eventually, outboxd,
    shared_kafka,
};

/// For each database.
macro_rules! in_each_database {
    ($($promise:ident),+ $(,)?) => {
        $(mod $promise {
            use super::*;
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() { Box::pin(super::$promise(Source::Postgres)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mysql() { Box::pin(super::$promise(Source::MySql)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mariadb() { Box::pin(super::$promise(Source::MariaDb)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mongodb() { Box::pin(super::$promise(Source::MongoDb)).await }
        })+
    };
}

in_each_database!(
    an_event_too_large_is_kept_byte_for_byte_and_replayed_when_there_is_room,
    what_a_server_refuses_is_kept_and_replayed_when_it_is_not_refused_any_more,
    a_relay_killed_between_letter_and_confirmation_makes_no_second_letter,
    a_missing_place_is_told_with_its_remedy_when_nothing_may_be_made,
);

/// Events with an id, a key, a header and a payload of any bytes.
pub async fn outbox(source: Source) -> Outbox {
    let columns = "id varchar(64) PRIMARY KEY, partition_key varchar(64)";
    match source {
        Source::MongoDb => Outbox::create(source).await,
        Source::Postgres | Source::OldestPostgres => {
            Outbox::of_columns(source, &format!("{columns}, payload bytea, headers jsonb")).await
        }
        Source::MySql | Source::MariaDb => {
            Outbox::of_columns(source, &format!("{columns}, payload LONGBLOB, headers JSON")).await
        }
    }
}

pub async fn insert(outbox: &Outbox, id: &str, key: &str, payload: &[u8]) {
    if outbox.source == Source::MongoDb {
        let payload = Binary { subtype: BinarySubtype::Generic, bytes: payload.to_vec() };
        let event = doc! { "_id": id, "partition_key": key, "payload": payload, "headers": { "trace": "t1" } };
        return outbox.mongodb().insert(event).await;
    }
    let hex: String = payload.iter().map(|byte| format!("{byte:02x}")).collect();
    let payload = if outbox.source.is_postgres() { format!("decode('{hex}', 'hex')") } else { format!("x'{hex}'") };
    let insert = format!("INSERT INTO outbox VALUES ('{id}', '{key}', {payload}, '{{\"trace\": \"t1\"}}')");
    outbox.execute(&insert).await;
}

/// Dead letters in the source's own database.
pub fn in_database(source: Source) -> &'static str {
    if source == Source::MongoDb { "collection:dead_letters" } else { "table:dead_letters" }
}

/// The flags of a pipeline, for `run` and for `dlq`.
pub struct Pipeline {
    flags: Vec<String>,
}

impl Pipeline {
    pub fn new(url: &str, flags: &[&str]) -> Self {
        Pipeline { flags: std::iter::once(url).chain(flags.iter().copied()).map(str::to_owned).collect() }
    }

    pub fn arguments<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        words.iter().copied().chain(self.flags.iter().map(String::as_str)).collect()
    }

    pub async fn run(&self) -> Relay {
        let mut relay = Relay::spawn(&self.arguments(&["run"]));
        relay.until_state("streaming").await;
        relay
    }

    /// What the command printed, and its code.
    pub async fn dlq(&self, words: &[&str]) -> (i32, String) {
        let ended = outboxd(&self.arguments(&[&["dlq"], words].concat())).await;
        (ended.code, format!("{}{}", ended.stdout, ended.stderr))
    }

    pub async fn list(&self) -> Vec<Value> {
        let ended = outboxd(&self.arguments(&["dlq", "list", "--json"])).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stdout.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
    }

    pub async fn until_listed(&self, count: usize) -> Vec<Value> {
        eventually(PATIENCE, &format!("{count} letters are listed"), async || {
            Some(self.list().await).filter(|letters| letters.len() >= count)
        })
        .await
    }

    pub async fn show(&self, id: &str) -> Value {
        let ended = outboxd(&self.arguments(&["dlq", "show", id, "--json"])).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        serde_json::from_str(&ended.stdout).expect("a letter is JSON")
    }
}

pub fn id(letter: &Value) -> &str {
    letter["id"].as_str().expect("a letter has an id")
}

pub fn of<'a>(letters: &'a [Value], member: &str) -> Vec<&'a str> {
    letters.iter().map(|letter| letter[member].as_str().unwrap_or("-")).collect()
}

/// A topic whose records have at most 20,000 bytes.
pub async fn narrow() -> Topic {
    Topic::create_at(&shared_kafka(), 1, &[("max.message.bytes", "20000")]).await
}

pub async fn widen(topic: &Topic) {
    let admin: AdminClient<DefaultClientContext> =
        ClientConfig::new().set("bootstrap.servers", &topic.brokers).create().expect("an admin client is made");
    let wide = AlterConfig::new(ResourceSpecifier::Topic(&topic.name)).set("max.message.bytes", "1000000");
    let options = AdminOptions::new().request_timeout(Some(PATIENCE));
    let altered = admin.alter_configs([&wide], &options).await.expect("the broker answers");
    altered.into_iter().for_each(|one| drop(one.expect("the topic is altered")));
}

/// 30,000 bytes, among them what text and SQL would stumble over.
pub fn any_bytes() -> Vec<u8> {
    (0..30_000_u32).map(|n| (n * 7 + n / 256) as u8).collect()
}

async fn an_event_too_large_is_kept_byte_for_byte_and_replayed_when_there_is_room(source: Source) {
    let (outbox, topic) = (outbox(source).await, narrow().await);
    let place = ["--topic", &topic.name, "--brokers", &topic.brokers, "--dead-letter", in_database(source)];
    let pipeline = Pipeline::new(&outbox.url(), &place);
    let relay = pipeline.run().await;
    let large = any_bytes();
    for (id, payload) in [("good", &b"fine"[..]), ("bad", &large), ("after", b"fine")] {
        insert(&outbox, id, "k", payload).await;
    }
    let mut reader = topic.reader();
    assert_eq!(reader.take(2).await.iter().map(|record| record.id()).collect::<Vec<_>>(), ["good", "after"]);
    let letters = pipeline.until_listed(1).await;
    let [letter] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!(relay.status().await["dead_letters"], 1);
    assert_eq!((&letter["event_id"], &letter["key"]), (&json!("bad"), &json!("k")));
    assert_eq!((&letter["topic"], &letter["source_table"]), (&json!(topic.name), &json!("outbox")));
    assert_eq!((&letter["replayed"], &letter["attempts"]), (&json!(false), &json!(1)));
    assert!(letter["reason"].as_str().is_some_and(|reason| reason.contains("20000")), "{letter}");
    assert_eq!(letter["pipeline"], letter["publisher"], "a lone publisher is its pipeline");

    let shown = pipeline.show(id(letter)).await;
    assert_eq!(shown["value"]["base64"], BASE64.encode(&large), "any bytes survive");
    assert_eq!(shown["headers"], json!([["id", "bad"], ["trace", "t1"]]));
    let (code, text) = pipeline.dlq(&["list"]).await;
    assert!(code == 0 && text.starts_with("ID ") && text.contains("bad"), "{text}");
    let (code, text) = pipeline.dlq(&["show", id(letter)]).await;
    assert!(code == 0 && text.contains("30000 bytes, in base64"), "{text}");

    // As long as there is no room, it stays.
    let (code, text) = pipeline.dlq(&["replay", id(letter)]).await;
    assert!(code == 6 && text.contains("20000"), "{code}: {text}");
    assert_eq!(pipeline.list().await[0]["replayed"], false);
    widen(&topic).await;
    let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert!(code == 0 && text.contains("replayed 1, refused 0"), "{code}: {text}");
    let record = reader.take(1).await.remove(0);
    assert_eq!((record.id(), record.key.as_deref(), record.header("trace")), ("bad", Some("k"), Some("t1")));
    assert_eq!(record.value, Some(String::from_utf8_lossy(&large).into_owned()));
    let moment = record.header("outboxd.replayed").expect("it says that it was replayed");
    assert!(moment.len() == 27 && moment.ends_with('Z'), "{moment} is no moment");
    assert_eq!(record.headers.len(), 3, "nothing of the letter is left: {record:?}");
    let replayed = pipeline.list().await;
    assert_eq!(replayed[0]["replayed"], true);
    assert_eq!(replayed[0]["replayed_at"].as_str().map(|at| &at[..19]), Some(&moment[..19]));
    let (_, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert!(text.contains("replayed 0, refused 0"), "{text}");

    let (code, text) = pipeline.dlq(&["purge"]).await;
    assert!(code == 2 && text.contains("--yes"), "{code}: {text}");
    let (_, text) = pipeline.dlq(&["purge", "--yes", "--older-than", "30d"]).await;
    assert!(text.contains("nothing to delete"), "{text}");
    let (code, text) = pipeline.dlq(&["purge", "--yes"]).await;
    assert!(code == 0 && text.contains("deleted 1"), "{code}: {text}");
    assert!(pipeline.list().await.is_empty());
    let (code, text) = pipeline.dlq(&["show", id(letter)]).await;
    assert!(code == 2 && text.contains("there is no dead letter"), "{code}: {text}");
    relay.stop().await;
}

/// The events of a request of the form `events`.
fn events(request: &Request) -> Vec<Value> {
    request.json().as_array().expect("an array").clone()
}

fn has(request: &Request, id: &str) -> bool {
    events(request).iter().any(|event| event["headers"]["id"] == id)
}

async fn what_a_server_refuses_is_kept_and_replayed_when_it_is_not_refused_any_more(source: Source) {
    let outbox = outbox(source).await;
    let mended = Arc::new(AtomicBool::new(false));
    let server = HttpServer::start({
        let mended = mended.clone();
        move |request| match has(request, "bad") && !mended.load(Ordering::Relaxed) {
            true => Answer::Status(422),
            false => Answer::Status(200),
        }
    })
    .await;
    let sink = server.url();
    let place = ["--sink", &sink, "--http-body", "events", "--http-path", "/in", "--dead-letter", in_database(source)];
    let tries = ["--max-retries", "1", "--retry-backoff", "50ms"];
    let pipeline = Pipeline::new(&outbox.url(), &[&place[..], &tries].concat());
    let relay = pipeline.run().await;
    for id in ["good", "bad", "after"] {
        insert(&outbox, id, "k", format!("{{\"id\": \"{id}\"}}").as_bytes()).await;
    }
    let letters = pipeline.until_listed(1).await;
    server.until("the others arrive", |requests| requests.iter().any(|request| has(request, "after"))).await;
    assert_eq!((of(&letters, "event_id"), of(&letters, "topic")), (vec!["bad"], vec!["/in"]));
    assert!(of(&letters, "reason")[0].contains("422"), "{letters:?}");
    assert_eq!((&letters[0]["attempts"], relay.status().await["dead_letters"].clone()), (&json!(2), json!(1)));
    let end = outbox.end_of_log().await;
    insert(&outbox, "last", "k", b"{}").await;
    outbox.until_confirmed(&end, PATIENCE).await;
    relay.stop().await;

    let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert!(code == 6 && text.contains("422"), "{code}: {text}");
    assert_eq!(pipeline.list().await[0]["replayed"], false);
    mended.store(true, Ordering::Relaxed);
    let (code, text) = pipeline.dlq(&["replay", id(&letters[0])]).await;
    assert!(code == 0 && text.contains("to /in"), "{code}: {text}");
    let taken = server.taken();
    let request = taken.iter().find(|request| has(request, "bad")).expect("it was taken");
    let event = &events(request)[0];
    assert_eq!((request.path.as_str(), &event["value"]), ("/in", &json!({"id": "bad"})));
    assert_eq!((&event["key"], &event["headers"]["trace"]), (&json!("k"), &json!("t1")));
    assert!(event["headers"]["outboxd.replayed"].is_string() && event["headers"]["outboxd.reason"].is_null());
    assert_eq!(request.header("x-outboxd-replayed"), event["headers"]["outboxd.replayed"].as_str());
    assert!(taken.iter().all(|other| other.header("x-outboxd-replayed").is_none() || has(other, "bad")));
    assert_eq!(pipeline.list().await[0]["replayed"], true);
    let (code, _) = pipeline.dlq(&["purge", "--all", "--yes"]).await;
    assert_eq!((code, pipeline.list().await.len()), (0, 0));
}

async fn a_relay_killed_between_letter_and_confirmation_makes_no_second_letter(source: Source) {
    let outbox = outbox(source).await;
    let answers = Arc::new(AtomicBool::new(false));
    let server = HttpServer::start({
        let answers = answers.clone();
        move |request| match (has(request, "bad"), has(request, "slow")) {
            (true, _) => Answer::Status(422),
            // What comes before is not acknowledged, so that nothing can be confirmed.
            (_, true) if !answers.load(Ordering::Relaxed) => Answer::Silence,
            _ => Answer::Status(200),
        }
    })
    .await;
    let sink = server.url();
    let place = ["--sink", &sink, "--http-body", "events", "--max-retries", "0", "--dead-letter", in_database(source)];
    let pipeline = Pipeline::new(&outbox.url(), &place);
    let relay = pipeline.run().await;
    // Two keys that are in two lanes.
    insert(&outbox, "slow", "k0", b"{}").await;
    insert(&outbox, "bad", "another", b"{}").await;
    pipeline.until_listed(1).await;
    relay.kill();
    let refused = || server.requests().iter().filter(|request| has(request, "bad")).count();
    let before = refused();
    answers.store(true, Ordering::Relaxed);
    let relay = pipeline.run().await;
    let end = outbox.end_of_log().await;
    insert(&outbox, "last", "k0", b"{}").await;
    server.until("the last arrives", |requests| requests.iter().any(|request| has(request, "last"))).await;
    eventually(PATIENCE, "it is refused again", async || (refused() > before).then_some(())).await;
    outbox.until_confirmed(&end, PATIENCE).await;
    assert_eq!(relay.status().await["dead_letters"], 1, "this relay has written it, too");
    relay.stop().await;
    assert_eq!(of(&pipeline.list().await, "event_id"), ["bad"]);
}

async fn a_missing_place_is_told_with_its_remedy_when_nothing_may_be_made(source: Source) {
    let (outbox, topic) = (outbox(source).await, Topic::create(1).await);
    let place = ["--topic", &topic.name, "--brokers", &topic.brokers, "--dead-letter", in_database(source)];
    let pipeline = Pipeline::new(&outbox.url(), &place);
    let mut relay = Relay::spawn(&pipeline.arguments(&["run", "--no-create"]));
    relay.exits_with(5).await;
    assert!(relay.log().contains("dead_letters") && relay.log().contains("outboxd init"), "{}", relay.log());
    let (code, text) = pipeline.dlq(&["list"]).await;
    assert!(code == 3 && text.contains("outboxd init"), "{code}: {text}");
    let checked = outboxd(&pipeline.arguments(&["check", "--no-create"])).await;
    assert!(checked.stdout.contains("there is no") && checked.stdout.contains("FAIL  dead-letter"), "{checked:?}");

    // The dry run prints what `init` makes, and makes nothing.
    let dry = outboxd(&pipeline.arguments(&["init", "--dry-run"])).await;
    assert!(dry.code == 0 && dry.stdout.contains("fingerprint"), "{dry:?}");
    let made = outboxd(&pipeline.arguments(&["init"])).await;
    assert!(made.code == 0 && made.stdout.contains("dead_letters"), "{made:?}");
    let again = outboxd(&pipeline.arguments(&["init"])).await;
    assert!(again.stdout.contains("nothing to do"), "{again:?}");
    let mut relay = Relay::spawn(&pipeline.arguments(&["run", "--no-create"]));
    relay.until_state("streaming").await;
    assert!(pipeline.list().await.is_empty());
    let checked = outboxd(&pipeline.arguments(&["check", "--no-create"])).await;
    assert!(checked.stdout.contains("dead letters can be kept in dead_letters"), "{}", checked.stdout);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_waits_for_its_table_and_nothing_is_confirmed_before_it_is_written() {
    let database = Database::create(Server::Newest).await;
    database.execute("CREATE TABLE outbox (id text PRIMARY KEY, topic text, partition_key text, payload text)").await;
    let topic = Topic::create(1).await;
    let flags = ["--brokers", &topic.brokers, "--dead-letter", "table:dead_letters"];
    let pipeline = Pipeline::new(&database.url(), &flags);
    let relay = pipeline.run().await;
    let holder = database.connect().await;
    holder.batch_execute("BEGIN; LOCK TABLE dead_letters IN ACCESS EXCLUSIVE MODE").await.expect("the table is locked");
    database.execute("INSERT INTO outbox VALUES ('bad', 'not a topic', 'k', 'x')").await;
    let end = database.wal_position().await;
    eventually(PATIENCE, "the trouble is in the log", async || {
        relay.log().contains("a dead letter could not be written yet").then_some(())
    })
    .await;
    assert!(database.confirmed().await.unwrap() < end, "confirmed without its letter");
    assert_eq!(relay.status().await["dead_letters"], 0);
    holder.batch_execute("ROLLBACK").await.expect("the lock is let go");
    let letters = pipeline.until_listed(1).await;
    assert!(letters[0]["reason"].as_str().unwrap().contains("is not a name Kafka takes"), "{letters:?}");
    database.until_confirmed(end, PATIENCE).await;
    relay.stop().await;
}
