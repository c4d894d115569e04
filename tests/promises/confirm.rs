//! `outboxd confirm`: what it needs, what it says when that is missing, and how it bears trouble.

use std::time::{Duration, Instant};

use crate::support::{
    Database, MySqlFlavor, PATIENCE, PrivateKafka, Proxy, Relay, Server, Source, Topic, Zones, eventually, metric,
    mysql_session, outboxd, shared_kafka, unique, variable,
};

/// The statement that mends it.
fn remedy(said: &str) -> &str {
    let (_, remedy) = said.rsplit_once("remedy: ").unwrap_or_else(|| panic!("no remedy: {said}"));
    remedy.split(';').next().unwrap_or(remedy).trim()
}

/// What it says when it cannot begin.
async fn refused(arguments: &[&str], code: i32) -> String {
    let ended = outboxd(&[arguments, &["--admin", "off", "--log-format", "text"]].concat()).await;
    assert_eq!(ended.code, code, "{ended:?}");
    ended.stderr
}

#[tokio::test]
async fn what_cannot_be_confirmed_is_exit_2() {
    for (arguments, words) in [
        (&["postgres://h/db", "--layout", "native"][..], "`native` keeps no receipts"),
        (&["mongodb://h/db", "--layout", "native", "--column", "received_at=x"], "not in MongoDB"),
        (&["mongodb://h/db"], "`produce-receive` is a layout of PostgreSQL"),
        (&["postgres://h/db", "--id-from", "key"], "header:NAME"),
        (&["postgres://h/db", "--batch", "0"], "between 1 and"),
        (&["postgres://h/db", "--topic", "zone.{code}"], "`zone.{code}` is not a topic"),
        (&["postgres://h/db", "--table", "a,b"], "which of 2 tables"),
        (&["postgres://h/db", "--kafka", "auto.offset.reset=latest"], "--reset-offsets"),
        (&["postgres://h/db", "--kafka", "enable.auto.commit=true"], "only after their receipts"),
    ] {
        let said = refused(&[&["confirm", "--brokers", "k:9092"], arguments].concat(), 2).await;
        assert!(said.contains(words), "{words}: {said}");
    }
    let said = refused(&["confirm", "postgres://h/db"], 2).await;
    assert!(said.contains("--brokers"), "{said}");
    let said = refused(&["confirm", "postgres://h/db", "--brokers", "embedded"], 2).await;
    assert!(said.contains("embedded"), "{said}");
}

#[tokio::test]
async fn a_table_that_is_not_ready_is_exit_3_with_what_mends_it() {
    for source in [Source::Postgres, Source::MySql, Source::MariaDb] {
        let zones = Zones::create(source, 1).await;
        let (outbox, url, brokers) = (&zones.polled.outbox, zones.polled.outbox.url(), shared_kafka());
        let confirm = |table: &'static str| {
            vec!["confirm", &*url, "--brokers", &brokers, "--topic", &zones.topic.name, "--table", table]
        };
        let said = refused(&confirm("nowhere"), 3).await;
        assert!(said.contains("nowhere") && said.contains("outboxd init"), "{said}");

        outbox.execute("CREATE TABLE bare (id BIGINT PRIMARY KEY, stid VARCHAR(20))").await;
        let said = refused(&confirm("bare"), 3).await;
        let statement = remedy(&said);
        assert!(statement.starts_with("ALTER TABLE"), "{said}");
        outbox.execute(statement).await;
        let mut mended = confirm("bare");
        mended.push("--until-caught-up");
        Relay::spawn(&mended).exits_with(0).await;

        outbox.execute("CREATE TABLE odd (id DOUBLE PRECISION, received_at TIMESTAMP NULL)").await;
        let said = refused(&confirm("odd"), 3).await;
        assert!(said.contains("has the type double"), "{said}");
    }
}

#[tokio::test]
async fn rights_to_two_columns_are_enough_and_fewer_are_exit_3() {
    let zones = Zones::create(Source::Postgres, 1).await;
    zones.add("a", 0..10).await;
    zones.produce_rows(1..11).await;
    let (url, role) = (zones.polled.outbox.url(), unique("reader"));
    zones
        .polled
        .outbox
        .execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'pw'; GRANT SELECT ON produced TO {role}"))
        .await;
    let as_role = url.replacen("postgres:postgres@", &format!("{role}:pw@"), 1);
    let group = zones.group();
    let said = refused(&zones.arguments(&as_role, &group, &[]), 3).await;
    assert!(said.contains("lacks UPDATE (received_at)"), "{said}");
    zones.polled.outbox.execute(&format!("REVOKE ALL ON produced FROM {role}")).await;
    let said = refused(&zones.arguments(&as_role, &group, &[]), 3).await;
    zones.polled.outbox.execute(remedy(&said)).await;
    zones.confirmer_at(&as_role, &["--until-caught-up"]).exits_with(0).await;
    assert_eq!(zones.received().await, 10);
    zones.polled.outbox.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn rights_to_two_columns_are_enough_for_mysql_and_mariadb_too() {
    for (source, flavor) in [(Source::MySql, MySqlFlavor::MySql), (Source::MariaDb, MySqlFlavor::MariaDb)] {
        let zones = Zones::create(source, 1).await;
        zones.add("a", 0..10).await;
        zones.produce_rows(1..11).await;
        let (url, user) = (zones.polled.outbox.url(), format!("r{}", unique("").trim_start_matches('_')));
        let user = &user[..user.len().min(32)];
        let mut admin = mysql_session(&flavor.url()).await;
        admin.execute(&format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'pw'")).await.expect("a user is made");
        zones.polled.outbox.execute(&format!("GRANT SELECT ON produced TO '{user}'@'%'")).await;
        let as_user = url.replacen("root:mysql@", &format!("{user}:pw@"), 1);
        let group = zones.group();
        let said = refused(&zones.arguments(&as_user, &group, &[]), 3).await;
        assert!(said.contains("UPDATE"), "{said}");
        zones.polled.outbox.execute(&format!("REVOKE SELECT ON produced FROM '{user}'@'%'")).await;
        // Of a table of which it may know nothing the server says that there is none.
        zones.polled.outbox.execute(&format!("GRANT SELECT (id, received_at) ON produced TO '{user}'@'%'")).await;
        let said = refused(&zones.arguments(&as_user, &group, &[]), 3).await;
        zones.polled.outbox.execute(remedy(&said)).await;
        zones.confirmer_at(&as_user, &["--until-caught-up"]).exits_with(0).await;
        assert_eq!(zones.received().await, 10);
        admin.execute(&format!("DROP USER '{user}'@'%'")).await.expect("the user is dropped");
    }
}

/// Over TLS, as a user who is allowed what ACLs say.
fn restricted() -> Vec<String> {
    let ca = format!("ssl.ca.location={}/ca.pem", variable("OUTBOXD_TEST_CERTS"));
    let options = ["security.protocol=SASL_SSL", "sasl.mechanism=PLAIN", "ssl.endpoint.identification.algorithm=none"];
    let login = ["sasl.username=restricted".to_owned(), "sasl.password=restricted-secret".to_owned(), ca];
    let options = options.iter().map(|option| (*option).to_owned()).chain(login);
    let flags = options.flat_map(|option| ["--kafka".to_owned(), option]);
    ["--brokers".to_owned(), variable("OUTBOXD_TEST_KAFKA_SASL_SSL")].into_iter().chain(flags).collect()
}

async fn deny(program: &str, topic: &Topic) {
    let denied = tokio::process::Command::new("java")
        .args(["-cp", &format!("{}/*", variable("OUTBOXD_TEST_KAFKA_LIBS"))])
        .arg(format!("{}/tests/java/{program}.java", env!("CARGO_MANIFEST_DIR")))
        .args([&shared_kafka(), &topic.name, "User:restricted"])
        .output()
        .await
        .expect("java runs");
    assert!(denied.status.success(), "{denied:?}");
}

#[tokio::test]
async fn a_topic_that_is_missing_or_forbidden_is_exit_5() {
    let zones = Zones::create(Source::Postgres, 1).await;
    let (url, missing, brokers) = (zones.polled.outbox.url(), unique("missing"), shared_kafka());
    let table = ["--table", zones.table()];
    let confirm = |more: &[&str]| {
        [&["confirm", &url], &table[..], more].concat().iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()
    };
    let words = |line: &[String]| -> Vec<String> { line.to_vec() };
    let missing = words(&confirm(&["--brokers", &brokers, "--topic", &missing]));
    let said = refused(&missing.iter().map(String::as_str).collect::<Vec<_>>(), 5).await;
    assert!(said.contains("does not exist") && said.contains("kafka-topics.sh"), "{said}");

    let flags = restricted();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    // Once hidden, once to be seen and not to be read.
    for program in ["DenyDescribe", "DenyWrite"] {
        let topic = Topic::create(1).await;
        let line = confirm(&[&flags[..], &["--topic", &topic.name]].concat());
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        Relay::spawn(&[&line[..], &["--until-caught-up"]].concat()).exits_with(0).await;
        deny(program, &topic).await;
        let said = refused(&line, 5).await;
        assert!(said.contains("kafka-acls.sh") && said.contains("--consumer"), "{said}");
    }
    let line = confirm(&[&flags[..], &["--topic", &zones.topic.name]].concat());
    let line: Vec<String> = line.iter().map(|word| word.replace("restricted-secret", "hunter2")).collect();
    let said = refused(&line.iter().map(String::as_str).collect::<Vec<_>>(), 5).await;
    assert!(said.contains("refuses our credentials") && !said.contains("hunter2"), "{said}");
}

#[tokio::test]
async fn a_topic_that_the_relay_is_to_create_is_waited_for() {
    let zones = Zones::create(Source::Postgres, 1).await;
    zones.add("a", 0..10).await;
    let (url, brokers, topic) = (zones.polled.outbox.url(), shared_kafka(), unique("later"));
    let to = ["--brokers", &brokers, "--topic", &topic, "--create-topics", "1:1"];
    let mut confirmer = Relay::spawn(&[&["confirm", &url, "--table", zones.table()], &to[..]].concat());
    confirmer.until_state("retrying").await;
    Relay::spawn(&[&["run", &url, "--until-caught-up"], &zones.polled.flags()[..], &to].concat()).exits_with(0).await;
    zones.until_received(10).await;
}

#[tokio::test]
async fn broker_away_and_back_shows_and_loses_no_receipt() {
    let mut kafka = PrivateKafka::start(1).await;
    let polled = crate::support::Polled::create(Source::Postgres, crate::support::Form::ProduceReceive).await;
    let zones = Zones { polled, topic: Topic::create_at(&kafka.brokers(), 2, &[]).await };
    zones.add("a", 0..200).await;
    zones.produce_rows(1..101).await;
    let mut confirmer = zones.confirming(&[]).await;
    zones.until_received(100).await;
    kafka.kill(1);
    eventually(PATIENCE, "the broker's absence shows", async || {
        confirmer.get("/readyz").await.contains("not ready").then_some(())
    })
    .await;
    assert_eq!(metric(&confirmer.get("/metrics").await, "outboxd_failures_total"), 0.0);
    kafka.restart(1).await;
    zones.produce_rows(101..201).await;
    zones.until_received(200).await;
    assert!(confirmer.is_running());
    eventually(PATIENCE, "it is ready again", async || (confirmer.get("/readyz").await == "ok\n").then_some(())).await;
    // A broker that is away does not hold up a stop.
    kafka.kill(1);
    let began = Instant::now();
    confirmer.signal(nix::sys::signal::Signal::SIGTERM);
    confirmer.exits_with(0).await;
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_silent_network_is_noticed_within_the_stall_timeout() {
    let zones = Zones::create(Source::Postgres, 1).await;
    zones.add("a", 0..200).await;
    zones.produce_rows(1..101).await;
    let url = zones.polled.outbox.url();
    let proxy = Proxy::before(&url).await;
    let mut confirmer = zones.confirmer_at(&proxy.url(&url), &["--stall-timeout", "2s"]);
    zones.until_received(100).await;
    proxy.fall_silent();
    zones.produce_rows(101..201).await;
    confirmer.until_state("retrying").await;
    proxy.mend();
    zones.until_received(200).await;
    confirmer.stop().await;
}

#[tokio::test]
async fn a_confirmer_gives_way_to_whoever_would_wait_for_it_in_a_circle() {
    for source in [Source::Postgres, Source::OldestPostgres] {
        let zones = Zones::create(source, 1).await;
        zones.add("a", 0..1000).await;
        let other = zones.polled.outbox.writer().await;
        other.run("BEGIN").await;
        other.run("UPDATE produced SET retry = 1 WHERE id = 500").await;
        zones.produce_rows(1..1001).await;
        let confirmer = zones.confirming(&[]).await;
        // It holds the first rows when it comes to that one, and this wants the first: the server would end one of both.
        let waiting =
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
        eventually(PATIENCE, "the confirmer waits for a row", async || {
            zones.polled.outbox.text(waiting).await.filter(|count| count != "0")
        })
        .await;
        other.run("UPDATE produced SET retry = 1 WHERE id = 1").await;
        other.run("COMMIT").await;
        zones.until_received(1000).await;
        assert!(metric(&confirmer.get("/metrics").await, "outboxd_confirm_lock_conflicts_total") > 0.0);
        confirmer.stop().await;
    }
}

#[tokio::test]
async fn ids_may_be_uuids_and_texts_of_tables_of_ones_own() {
    let database = Database::create(Server::Newest).await;
    let uuid = "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";
    let url = database.url();
    for (kind, id) in [("uuid", uuid), ("text", "it's \\ ünusual"), ("char(8)", "padded"), ("integer", "-7")] {
        let topic = Topic::create(1).await;
        database.execute("DROP TABLE IF EXISTS orders").await;
        database
            .execute(&format!("CREATE TABLE orders (order_id {kind} PRIMARY KEY, seen timestamptz, payload jsonb)"))
            .await;
        let literal = id.replace('\'', "''");
        database.execute(&format!("INSERT INTO orders VALUES ('{literal}')")).await;
        let zones = Topic { name: topic.name.clone(), brokers: topic.brokers.clone(), partitions: 1 };
        produce(&zones, id).await;
        let columns =
            ["--column", "id=order_id", "--column", "received_at=seen", "--layout", "native", "--table", "orders"];
        let line = ["confirm", &url, "--brokers", &topic.brokers, "--topic", &topic.name, "--until-caught-up"];
        Relay::spawn(&[&line[..], &columns].concat()).exits_with(0).await;
        assert_eq!(database.number("SELECT count(*) FROM orders WHERE seen IS NOT NULL").await, 1, "{kind}");
    }
}

#[tokio::test]
async fn ids_of_mysql_may_be_binary_uuids_and_texts() {
    for source in [Source::MySql, Source::MariaDb] {
        let zones = Zones::create(source, 1).await;
        let (outbox, url) = (&zones.polled.outbox, zones.polled.outbox.url());
        let uuid = "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";
        let hex = format!("x'{}'", uuid.replace('-', ""));
        for (kind, literal, id) in [("BINARY(16)", &*hex, uuid), ("VARCHAR(40)", "'it''s ünusual'", "it's ünusual")] {
            let topic = Topic::create(1).await;
            outbox.execute("DROP TABLE IF EXISTS orders").await;
            outbox
                .execute(&format!(
                    "CREATE TABLE orders (order_id {kind} PRIMARY KEY, seen DATETIME(6)) CHARACTER SET utf8mb4"
                ))
                .await;
            outbox.execute(&format!("INSERT INTO orders (order_id) VALUES ({literal})")).await;
            produce(&topic, id).await;
            let columns = ["--column", "id=order_id", "--column", "received_at=seen", "--table", "orders"];
            let line = ["confirm", &url, "--brokers", &topic.brokers, "--topic", &topic.name, "--until-caught-up"];
            let uuids = ["--uuid-column", "order_id"];
            let uuids = if kind.starts_with("BINARY") { &uuids[..] } else { &[] };
            Relay::spawn(&[&line[..], &columns, uuids].concat()).exits_with(0).await;
            let seen = outbox.text("SELECT count(*) FROM orders WHERE seen IS NOT NULL").await;
            assert_eq!(seen.as_deref(), Some("1"), "{kind}");
        }
    }
}

async fn produce(topic: &Topic, id: &str) {
    use rdkafka::message::{Header, OwnedHeaders};
    use rdkafka::producer::{FutureProducer, FutureRecord};
    let producer: FutureProducer =
        rdkafka::ClientConfig::new().set("bootstrap.servers", &topic.brokers).create().expect("a producer is made");
    let headers = OwnedHeaders::new().insert(Header { key: "id", value: Some(id) });
    let record = FutureRecord::<str, str>::to(&topic.name).payload("{}").headers(headers);
    producer.send(record, PATIENCE).await.unwrap_or_else(|(error, _)| panic!("a record is refused: {error}"));
}

#[tokio::test]
async fn a_file_serves_relay_and_confirmer() {
    let zones = Zones::create(Source::Postgres, 1).await;
    zones.add("a", 0..20).await;
    let other = Topic::create(1).await;
    let folder = tempfile::tempdir().expect("a folder for the file");
    let file = folder.path().join("outboxd.toml");
    let text = format!(
        "[pipeline.zones]\nsource = '{url}'\nlayout = 'produce-receive'\ncapture = 'poll'\ntable = 'produced'\n\
         brokers = '{brokers}'\ntopic = '{topic}'\n\
         [pipeline.zones.confirm]\ngroup = '{group}'\ninterval = '10ms'\ntopic = ['{topic}', '{other}']\n\
         [pipeline.orders]\nsource = '{url}'\nbrokers = '{brokers}'\ntopic = '{topic}'\ntable = 'outbox'\n",
        url = zones.polled.outbox.url(),
        brokers = zones.topic.brokers,
        topic = zones.topic.name,
        group = zones.group(),
        other = other.name,
    );
    std::fs::write(&file, text).expect("the file is written");
    let file = file.display().to_string();
    let mut confirmer = Relay::spawn(&["confirm", "--config", &file]);
    confirmer.until_state("streaming").await;
    let page = confirmer.get("/status").await;
    assert!(page.contains("\"zones\"") && !page.contains("\"orders\""), "{page}");
    zones.deliver().await;
    zones.until_received(20).await;
    // The second topic is read as well.
    zones.add("b", 0..1).await;
    produce(&other, "21").await;
    zones.until_received(21).await;
    let status = outboxd(&["status", "--admin", &confirmer.admin().await]).await;
    assert!(status.code == 0 && status.stdout.contains("zones") && status.stdout.contains("streaming"), "{status:?}");
    assert!(outboxd(&["confirm", "--config", &file, "--name", "orders"]).await.stderr.contains("keeps no receipts"));
    confirmer.stop().await;
}
