//! `outboxd dlq` beyond one table: topics that are shared, queues, rights, files with several pipelines, sinks that are away.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mongodb::bson::doc;
use serde_json::{Value, json};

use crate::promises::dead_letters::{Pipeline, any_bytes, id, in_database, insert, narrow, of, outbox, widen};
use crate::support::{
    Answer, Exchange, HttpServer, Outbox, PATIENCE, Relay, Source, Topic, eventually, outboxd, unique, variable,
};

#[tokio::test(flavor = "multi_thread")]
async fn letters_in_a_topic_are_listed_replayed_up_to_the_committed_offset_and_purged() {
    let (ours, foreign_outbox) = (outbox(Source::Postgres).await, outbox(Source::Postgres).await);
    let (topic, dead) = (narrow().await, Topic::create(1).await);
    let place = format!("topic:{}", dead.name);
    let flags = ["--topic", &topic.name, "--brokers", &topic.brokers, "--dead-letter", &place];
    let pipeline = Pipeline::new(&ours.url(), &flags);
    // Another pipeline's letters in the same topic.
    let foreign = Pipeline::new(&foreign_outbox.url(), &flags);
    let relays = [pipeline.run().await, foreign.run().await];
    let large = any_bytes();
    for id in ["a", "b", "c"] {
        insert(&ours, id, "k", &large).await;
    }
    let letters = pipeline.until_listed(3).await;
    insert(&foreign_outbox, "theirs", "k", &large).await;
    foreign.until_listed(1).await;
    assert_eq!((of(&letters, "id"), of(&letters, "event_id")), (vec!["0:0", "0:1", "0:2"], vec!["a", "b", "c"]));
    let shown = pipeline.show("0:1").await;
    assert_eq!((&shown["event_id"], &shown["value"]["base64"]), (&json!("b"), &json!(BASE64.encode(&large))));
    assert_eq!(shown["headers"], json!([["id", "b"], ["trace", "t1"]]));
    for unknown in ["0:3", "0:17", "7:0", "b"] {
        let (code, text) = pipeline.dlq(&["show", unknown]).await;
        assert!(code == 2 && text.contains("there is no dead letter"), "{unknown}: {code}: {text}");
    }

    let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert!(code == 6 && text.contains("the dead letter 0:0 was refused again"), "{code}: {text}");
    assert!(pipeline.list().await.iter().all(|letter| letter["replayed"] == false));
    widen(&topic).await;
    let mut reader = topic.reader();
    let (code, text) = pipeline.dlq(&["replay", "0:1"]).await;
    assert!(code == 0 && text.contains("the topic keeps it"), "{code}: {text}");
    assert_eq!(reader.take(1).await[0].id(), "b");
    let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert!(code == 0 && text.contains("replayed 3, refused 0"), "{code}: {text}");
    let records = reader.take(3).await;
    assert_eq!(records.iter().map(|record| record.id()).collect::<Vec<_>>(), ["a", "b", "c"]);
    assert!(records.iter().all(|record| record.header("outboxd.replayed").is_some() && record.headers.len() == 3));
    assert!(pipeline.list().await.iter().all(|letter| letter["replayed"] == true));
    let (_, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert!(text.contains("replayed 0, refused 0"), "{text}");

    // Only what lies before the first letter of another can be deleted.
    let (code, text) = pipeline.dlq(&["purge", "--all", "--yes"]).await;
    assert!(code == 0 && text.contains("deleted 3"), "{code}: {text}");
    assert!(pipeline.list().await.is_empty());
    assert_eq!(of(&foreign.list().await, "event_id"), ["theirs"]);
    for relay in relays {
        relay.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_reached_no_queue_is_replayed_to_the_queue_that_is_there_now() {
    let outbox = outbox(Source::Postgres).await;
    let exchange = Exchange::declare(&variable("OUTBOXD_TEST_RABBITMQ_URL")).await;
    let routing = ["--sink", &exchange.url, "--exchange", &exchange.name, "--routing-key", "orders.{id}"];
    let rest = ["--amqp-mandatory", "--max-retries", "0", "--dead-letter", "table:dead_letters"];
    let pipeline = Pipeline::new(&outbox.url(), &[&routing[..], &rest].concat());
    let relay = pipeline.run().await;
    insert(&outbox, "1", "k", b"\x00\xff").await;
    let letters = pipeline.until_listed(1).await;
    assert_eq!(of(&letters, "topic"), ["orders.1"]);
    let mut queue = exchange.queue("orders.*").await;
    let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert_eq!(code, 0, "{text}");
    let messages = queue.until(PATIENCE, "it arrives", |messages| !messages.is_empty()).await;
    assert_eq!((messages[0].routing_key.as_str(), &messages[0].body[..]), ("orders.1", &b"\x00\xff"[..]));
    assert_eq!(messages[0].header("id").as_deref(), Some("1"));
    assert!(messages[0].header("outboxd.replayed").is_some());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_of_the_grants_are_enough_and_a_missing_one_is_named() {
    for source in [Source::Postgres, Source::MySql, Source::MariaDb, Source::MongoDb] {
        let (outbox, topic) = (outbox(source).await, narrow().await);
        let flags = ["--topic", &topic.name, "--brokers", &topic.brokers, "--dead-letter", in_database(source)];
        let made = outboxd(&Pipeline::new(&outbox.url(), &flags).arguments(&["init"])).await;
        assert_eq!(made.code, 0, "{made:?}");
        let user = User::create(&outbox).await;
        let pipeline = Pipeline::new(&user.url, &flags);
        let mut relay = Relay::spawn(&pipeline.arguments(&["run", "--no-create"]));
        relay.exits_with(5).await;
        let log = relay.log();
        assert!(log.contains("dead_letters") && log.contains("remedy"), "{source:?}: {log}");
        user.grant(&outbox, &["SELECT", "INSERT"]).await;
        let mut relay = Relay::spawn(&pipeline.arguments(&["run", "--no-create"]));
        relay.until_state("streaming").await;
        insert(&outbox, "bad", "k", &any_bytes()).await;
        let letters = pipeline.until_listed(1).await;
        relay.stop().await;

        widen(&topic).await;
        if source != Source::MongoDb {
            // It has arrived, and could not be marked.
            let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
            assert!(code == 3 && text.contains("could not be marked"), "{source:?}: {code}: {text}");
        }
        let (code, text) = pipeline.dlq(&["purge", "--all", "--yes"]).await;
        assert!(code == 3 && text.to_lowercase().contains("grant"), "{source:?}: {code}: {text}");
        user.grant(&outbox, &["UPDATE", "DELETE"]).await;
        let (code, text) = pipeline.dlq(&["replay", id(&letters[0])]).await;
        assert_eq!(code, 0, "{source:?}: {text}");
        let (code, text) = pipeline.dlq(&["purge", "--yes"]).await;
        assert!(code == 0 && text.contains("deleted 1"), "{source:?}: {text}");
        user.drop(&outbox).await;
    }
}

/// Who may relay, and may do with dead letters what is granted.
struct User {
    name: String,
    url: String,
}

impl User {
    async fn create(outbox: &Outbox) -> Self {
        let name: String = unique("u").chars().take(30).collect();
        let of_user = |url: String| {
            let (scheme, rest) = url.split_once("://").expect("a URL");
            let (_, address) = rest.split_once('@').expect("the server wants a login");
            format!("{scheme}://{name}:secret@{address}")
        };
        let (statements, url) = match outbox.source {
            Source::MongoDb => {
                let database = outbox.mongodb();
                let of = |collection: &str, actions: &[&str]| doc! { "resource": { "db": database.name(), "collection": collection }, "actions": actions };
                let privileges =
                    [of("outbox", &["find", "changeStream"]), of("outboxd_checkpoint", &["find", "insert", "update"])];
                database.run(doc! { "createRole": &name, "privileges": &privileges[..], "roles": [] }).await;
                database.run(doc! { "createUser": &name, "pwd": "secret", "roles": [&name] }).await;
                (vec![], database.url_of(&name, "secret"))
            }
            Source::Postgres | Source::OldestPostgres => {
                let grant = format!("GRANT SELECT, INSERT, UPDATE ON outboxd_checkpoint, outboxd_publishers TO {name}");
                let create = format!("CREATE ROLE {name} LOGIN REPLICATION PASSWORD 'secret'");
                (vec![create, grant], of_user(outbox.url()))
            }
            Source::MySql | Source::MariaDb => {
                let log = if outbox.source == Source::MariaDb { ", BINLOG MONITOR" } else { "" };
                let statements = vec![
                    format!("CREATE USER {name} IDENTIFIED BY 'secret'"),
                    format!("GRANT REPLICATION SLAVE, REPLICATION CLIENT{log} ON *.* TO {name}"),
                    format!("GRANT SELECT, INSERT, UPDATE ON outboxd_checkpoint TO {name}"),
                    format!("GRANT SELECT ON outbox TO {name}"),
                ];
                (statements, of_user(outbox.url()))
            }
        };
        for statement in statements {
            outbox.execute(&statement).await;
        }
        User { name, url }
    }

    async fn grant(&self, outbox: &Outbox, rights: &[&str]) {
        let name = &self.name;
        if outbox.source != Source::MongoDb {
            return outbox.execute(&format!("GRANT {} ON dead_letters TO {name}", rights.join(", "))).await;
        }
        let database = outbox.mongodb();
        // A letter is written once by an update that inserts.
        let actions = match rights {
            ["SELECT", ..] => ["find", "insert", "update"].to_vec(),
            _ => ["remove"].to_vec(),
        };
        let privilege =
            doc! { "resource": { "db": database.name(), "collection": "dead_letters" }, "actions": actions };
        database.run(doc! { "grantPrivilegesToRole": name, "privileges": [privilege] }).await;
    }

    async fn drop(&self, outbox: &Outbox) {
        let name = &self.name;
        match outbox.source {
            // With the database.
            Source::MongoDb => {}
            Source::Postgres | Source::OldestPostgres => {
                outbox.execute(&format!("DROP OWNED BY {name}; DROP ROLE {name}")).await;
            }
            Source::MySql | Source::MariaDb => outbox.execute(&format!("DROP USER {name}")).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_that_is_away_is_exit_5_and_the_letter_stays() {
    let outbox = outbox(Source::Postgres).await;
    let server = HttpServer::start(|_| Answer::Status(422)).await;
    let sink = server.url();
    let flags = ["--sink", &sink, "--max-retries", "0", "--dead-letter", "table:dead_letters"];
    let pipeline = Pipeline::new(&outbox.url(), &flags);
    let relay = pipeline.run().await;
    insert(&outbox, "bad", "k", b"{}").await;
    pipeline.until_listed(1).await;
    relay.stop().await;
    drop(server);
    let (code, text) = pipeline.dlq(&["replay", "--all"]).await;
    assert!(code == 5 && text.contains("the sink does not take it"), "{code}: {text}");
    assert_eq!(pipeline.list().await[0]["replayed"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_file_the_pipeline_and_the_publisher_are_chosen_by_name() {
    let outbox = outbox(Source::Postgres).await;
    let server = HttpServer::start(|_| Answer::Status(422)).await;
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = format!(
        "[pipeline.shop]\nsource = {url:?}\nsink = {sink:?}\nmax-retries = 0\ndead-letter = \"table:dead_letters\"\n\
         [pipeline.shop.publisher.a]\n[pipeline.shop.publisher.b]\n\
         [pipeline.other]\nsource = {url:?}\nslot = \"unused\"\nsink = \"stdout\"\n",
        url = outbox.url(),
        sink = server.url(),
    );
    std::fs::write(file.path(), text.replace("[pipeline.other]", "[pipeline.other]\nlayout = \"native\"")).unwrap();
    let path = file.path().to_str().unwrap();
    // Only `shop` is run.
    let lone = text.split("[pipeline.other]").next().unwrap();
    let shop = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(shop.path(), lone).unwrap();
    let mut relay = Relay::spawn(&["run", "--config", shop.path().to_str().unwrap()]);
    relay.until_state("streaming").await;
    insert(&outbox, "bad", "k", b"{}").await;
    let list = async |flags: &[&str]| outboxd(&[&["dlq", "list", "--json", "--config", path], flags].concat()).await;
    for publisher in ["a", "b"] {
        let lines = eventually(PATIENCE, "each publisher has a letter", async || {
            let listed = list(&["--name", "shop", "--publisher", publisher]).await;
            assert_eq!(listed.code, 0, "{listed:?}");
            Some(listed.stdout).filter(|lines| !lines.is_empty())
        })
        .await;
        let letter: Value = serde_json::from_str(&lines).expect("one letter");
        assert_eq!((&letter["pipeline"], &letter["publisher"]), (&json!("shop"), &json!(publisher)));
    }
    relay.stop().await;
    for (flags, word) in [
        (&[][..], "shop, other"),
        (&["--name", "shop"][..], "a, b"),
        (&["--name", "shop", "--publisher", "c"][..], "a, b"),
        (&["--name", "nobody"][..], "shop, other"),
        (&["--name", "other"][..], "--dead-letter"),
    ] {
        let refused = list(flags).await;
        assert!(refused.code == 2 && refused.stderr.contains(word), "{flags:?}: {refused:?}");
    }
}
