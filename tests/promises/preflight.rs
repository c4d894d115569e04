//! `outboxd check` on PostgreSQL's side: each thing is broken for real, found, and mended by the statement it names.

use std::time::{Duration, Instant};

use outboxd::source::postgres::conninfo::ConnInfo;
use outboxd::source::postgres::walsender::WalsenderConnection;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{
    Database, Found, PrivatePostgres, Relay, Server, StopMode, Topic, check, outboxd, shared_kafka, unique,
};

/// Carries out what the remedy says.
async fn mend(database: &Database, found: &Found) {
    let statements = found.statements();
    assert!(!statements.is_empty(), "no statement in {found:?}");
    for statement in statements {
        database.execute(statement).await;
    }
}

async fn look(database: &Database, flags: &[&str]) -> crate::support::Checked {
    look_at(&database.url(), flags).await
}

async fn look_at(url: &str, flags: &[&str]) -> crate::support::Checked {
    let brokers = shared_kafka();
    let mut arguments = vec![url, "--brokers", &brokers];
    arguments.extend(flags);
    check(&arguments).await
}

/// The address with another login.
fn as_role(database: &Database, login: &str) -> String {
    let url = database.url();
    let (_, server) = url.split_once('@').expect("the address has a login");
    format!("postgres://{login}@{server}")
}

#[tokio::test]
async fn a_sound_setup_passes_and_is_left_as_it_was() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::with_outbox(server).await;
        let checked = look(&database, &["--snapshot", "existing"]).await;
        checked.would_start();
        checked.is_fine("slot", "a run creates it");
        checked.is_fine("publication", "a run creates it");
        checked.is_fine("checkpoint", "a run creates it");
        let made = "SELECT (SELECT count(*) FROM pg_replication_slots WHERE database = current_database())
                         + (SELECT count(*) FROM pg_publication)
                         + (SELECT count(*) FROM pg_class WHERE relname = 'outboxd_checkpoint')";
        assert_eq!(database.number(made).await, 0, "check made something");
    }
}

#[tokio::test]
async fn every_check_is_told_with_what_it_is_about_and_what_was_seen() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(3).await;
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    let checked = look(&database, &["--topic", &topic.name]).await;
    checked.would_start();
    let address = database.url().split_once('@').map(|(_, rest)| rest.to_owned()).expect("an address");
    let (host, _) = address.split_once('/').expect("a database");
    let (slot, topic_name) = (format!("slot {}", database.slot()), format!("topic {}", topic.name));
    let pipeline = format!("pipeline {}", database.slot());
    for (check, words, subject) in [
        ("connection", "PostgreSQL 18", ""),
        ("tls", "on this machine", host),
        ("standby", "primary", host),
        ("wal-level", "wal_level = logical", host),
        ("replication", "may open a replication connection", "role postgres"),
        ("max-wal-senders", "are in use", host),
        ("max-replication-slots", "are in use", host),
        ("slot", "exists, read by nobody, confirmed up to", &slot),
        ("checkpoint", "can be read and written", "table outboxd_checkpoint"),
        ("position", "a run goes on from", &pipeline),
        ("table", "has what the layout needs: ", "\"public\".\"outbox\""),
        ("publication", "has all that is needed", "publication outboxd"),
        ("brokers", "Kafka answers: one broker", &shared_kafka()),
        ("tls", "not encrypted (security.protocol=plaintext), on this machine", &shared_kafka()),
        ("topic", "3 partitions, 1 replica, min.insync.replicas 1, max.message.bytes 1048588", &topic_name),
        ("durability", "the cluster's only broker", &topic_name),
        ("dead-letter", "ends the pipeline with exit 6", "dead letters"),
    ] {
        let found = checked.is_fine(check, words);
        assert!(found.subject.contains(subject) && found.publisher.is_none(), "{found:?}");
    }
}

#[tokio::test]
async fn people_read_the_findings_with_remedies_and_a_summary() {
    let database = Database::create(Server::Newest).await;
    let ended = outboxd(&["check", &database.url(), "--brokers", &shared_kafka()]).await;
    assert_eq!(ended.code, 3, "{ended:?}");
    let text = &ended.stdout;
    assert!(text.starts_with(&format!("pipeline {}\n  ok    connection ", database.slot())), "{text}");
    assert!(text.contains("  the outbox table outbox does not exist\n        remedy: create it"), "{text}");
    assert!(text.contains("a run would not start: 1 failure, 1 warning, "), "{text}");
    // The columns line up, and nothing is coloured where nobody looks.
    let column = |check: &str, words: &str| {
        let line = text.lines().find(|line| line.split_whitespace().nth(1) == Some(check));
        line.and_then(|line| line.find(words)).unwrap_or_else(|| panic!("no {check} with {words}: {text}"))
    };
    assert_eq!(column("wal-level", "wal_level = logical"), column("table", "the outbox table"), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
}

#[tokio::test]
async fn every_wrong_server_setting_is_told_at_once_and_mended_by_its_remedy() {
    let settings = ["wal_level=replica", "max_replication_slots=1", "max_wal_senders=1", "max_slot_wal_keep_size=10GB"];
    let mut server = PrivatePostgres::start(&settings).await;
    let mut database = Database::with_outbox_at(&server.url()).await;
    database.execute("SELECT pg_create_physical_replication_slot('taken')").await;
    let info = ConnInfo::parse_with(&database.url(), &|_| None).expect("the address is one");
    let held = WalsenderConnection::connect(&info).await.expect("the only walsender is free");

    let checked = look(&database, &[]).await;
    checked.fails_only(&["max-wal-senders", "wal-level", "max-replication-slots"], 3);
    for (name, words) in [("wal-level", "replica"), ("max-replication-slots", "is 1"), ("max-wal-senders", "is 1")] {
        mend(&database, checked.fails(name, words)).await;
    }
    drop(held);
    server.stop(StopMode::Fast).await;
    server.resume().await;
    database.reconnect().await;
    let checked = look(&database, &[]).await;
    checked.would_start();
    checked.is_fine("wal-retention", "10240 MB");
}

#[tokio::test]
async fn a_slot_near_its_limit_is_warned_of_and_a_lost_one_fails() {
    let server = PrivatePostgres::start(&["max_slot_wal_keep_size=64MB", "max_wal_size=32MB"]).await;
    let database = Database::create_at(&server.url()).await;
    assert_eq!(outboxd(&["init", &database.url()]).await.code, 0);
    let checked = look(&database, &[]).await;
    checked.would_start();
    mend(&database, checked.warns("wal-retention", "close to max_slot_wal_keep_size (64 MB)")).await;
    let checked = look(&database, &[]).await;
    checked.is_fine("wal-retention", "51200 MB");

    database.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'").await;
    database.execute("SELECT pg_reload_conf()").await;
    for _ in 0..6 {
        database.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 9000000))").await;
        database.execute("SELECT pg_switch_wal()").await;
        database.execute("CHECKPOINT").await;
    }
    let checked = look(&database, &[]).await;
    checked.fails_only(&["position"], 3);
    let lost = checked.fails("position", "is lost: slot");
    assert!(lost.what.contains("the gap: commits after"), "{lost:?}");
    assert!(lost.remedy.contains(&format!("pg_drop_replication_slot('{}')", database.slot())), "{lost:?}");
}

#[tokio::test]
async fn a_role_is_told_every_right_it_lacks() {
    let database = Database::with_outbox(Server::Newest).await;
    let role = unique("role");
    database.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'")).await;
    let url = as_role(&database, &format!("{role}:secret"));
    let checked = look_at(&url, &["--snapshot", "existing"]).await;
    let names = ["replication", "checkpoint", "publication", "snapshot"];
    checked.fails_only(&names, 3);
    let what = [&*role, "may not create tables", "does not own \"public\".\"outbox\"", "may not read"];
    for (name, words) in names.into_iter().zip(what) {
        mend(&database, checked.fails(name, words)).await;
    }
    look_at(&url, &["--snapshot", "existing"]).await.would_start();

    database.execute("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY").await;
    let checked = look_at(&url, &["--snapshot", "existing"]).await;
    mend(&database, checked.fails("snapshot", "row security hides rows")).await;
    look_at(&url, &["--snapshot", "existing"]).await.would_start();

    assert_eq!(outboxd(&["init", &database.url()]).await.code, 0);
    let checked = look_at(&url, &[]).await;
    checked.fails_only(&["checkpoint"], 3);
    mend(&database, checked.fails("checkpoint", "lacks SELECT, INSERT, UPDATE on outboxd_checkpoint")).await;
    look_at(&url, &[]).await.would_start();
    database.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn a_missing_table_is_made_by_init() {
    let database = Database::create(Server::Newest).await;
    let checked = look(&database, &["--table", "sales.outbox"]).await;
    checked.fails_only(&["table"], 3);
    assert!(checked.fails("table", "sales.outbox does not exist").remedy.contains("outboxd init"));
    assert_eq!(outboxd(&["init", &database.url(), "--table", "sales.outbox"]).await.code, 0);
    look(&database, &["--table", "sales.outbox"]).await.would_start();
}

#[tokio::test]
async fn every_missing_column_is_told_and_added_by_its_remedy() {
    let database = Database::create(Server::Newest).await;
    database.execute("CREATE TABLE outbox (id uuid PRIMARY KEY)").await;
    let flags = ["--column", "timestamp=at", "--topic", "orders.{kind}", "--create-topics"];
    let checked = look(&database, &flags).await;
    checked.fails_only(&["table"; 4], 3);
    for column in ["payload", "partition_key", "kind", "at"] {
        mend(&database, checked.fails("table", &format!("has no column `{column}`"))).await;
    }
    look(&database, &flags).await.would_start();
    let kind = "SELECT data_type FROM information_schema.columns WHERE column_name = 'at'";
    assert_eq!(database.text(kind).await.as_deref(), Some("timestamp with time zone"));
}

#[tokio::test]
async fn a_table_whose_rows_are_in_no_log_fails() {
    let database = Database::with_outbox(Server::Newest).await;
    database.execute("ALTER TABLE outbox SET UNLOGGED; CREATE VIEW seen AS SELECT * FROM outbox").await;
    let checked = look(&database, &["--table", "outbox", "--table", "seen"]).await;
    checked.fails("table", "is not a table");
    mend(&database, checked.fails("table", "unlogged")).await;
    look(&database, &[]).await.would_start();
}

#[tokio::test]
async fn a_publication_that_withholds_events_is_mended_by_its_remedy() {
    let broken = [
        ("FOR TABLE outbox WITH (publish = 'update')", "publishes no inserts"),
        ("", "lacks the outbox table \"public\".\"outbox\""),
        ("FOR TABLE outbox WHERE (partition_key = 'a')", "has the row filter (partition_key = 'a'::text)"),
        (
            "FOR TABLE outbox (id, partition_key)",
            "withholds columns of \"public\".\"outbox\" that the layout needs: payload",
        ),
    ];
    let database = Database::with_outbox(Server::Newest).await;
    for (definition, words) in broken {
        database.execute(&format!("CREATE PUBLICATION outboxd {definition}")).await;
        let checked = look(&database, &[]).await;
        checked.fails_only(&["publication"], 3);
        mend(&database, checked.fails("publication", words)).await;
        look(&database, &[]).await.would_start();
        database.execute("DROP PUBLICATION outboxd").await;
    }
    // What check refuses a run refuses in the same words.
    database.execute("CREATE PUBLICATION outboxd FOR TABLE outbox WHERE (partition_key = 'a')").await;
    let topic = Topic::create(1).await;
    let mut relay = Relay::start(&database, &topic, &[]);
    relay.exits_with(3).await;
    assert!(relay.log().contains("has the row filter"), "{}", relay.log());
}

#[tokio::test]
async fn a_publication_of_partitions_instead_of_their_table_is_warned_of() {
    let database = Database::create(Server::Newest).await;
    database
        .execute(
            "CREATE TABLE outbox (id uuid, partition_key text, payload jsonb) PARTITION BY HASH (id);
             CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 1, REMAINDER 0);
             CREATE PUBLICATION outboxd FOR TABLE outbox",
        )
        .await;
    let checked = look(&database, &[]).await;
    checked.would_start();
    mend(&database, checked.warns("publication", "names the partitions of \"public\".\"outbox\"")).await;
    look(&database, &[]).await.is_fine("publication", "has all that is needed");

    // A run judges partitions as check does.
    database.execute("ALTER PUBLICATION outboxd SET (publish_via_partition_root = false)").await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    database.execute("INSERT INTO outbox VALUES (gen_random_uuid(), 'k', '1')").await;
    assert_eq!(topic.reader().take(1).await[0].value.as_deref(), Some("1"));
    relay.stop().await;
}

#[tokio::test]
async fn a_publication_younger_than_its_slot_is_mended_by_its_remedy() {
    let database = Database::create(Server::Newest).await;
    let url = database.url();
    assert_eq!(outboxd(&["init", &url]).await.code, 0);
    database.execute("DROP PUBLICATION outboxd; INSERT INTO outbox (partition_key, payload) VALUES ('k', '1')").await;
    let checked = look(&database, &[]).await;
    checked.fails_only(&["publication"], 3);
    mend(&database, checked.fails("publication", "is older than a new one would be")).await;
    look(&database, &[]).await.would_start();
    database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '2')").await;
    let topic = Topic::create(1).await;
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    let values: Vec<_> = topic.reader().take(1).await.into_iter().map(|record| record.value).collect();
    assert_eq!(values, [Some("2".to_owned())]);
}

#[tokio::test]
async fn no_create_makes_whatever_is_missing_a_failure_and_init_mends_it() {
    let database = Database::with_outbox(Server::Newest).await;
    let checked = look(&database, &["--no-create"]).await;
    checked.fails_only(&["slot", "checkpoint", "publication"], 3);
    let topic = Topic::create(1).await;
    Relay::start(&database, &topic, &["--no-create"]).exits_with(3).await;
    assert_eq!(database.slots().await, 0);
    assert_eq!(outboxd(&["init", &database.url()]).await.code, 0);
    look(&database, &["--no-create"]).await.would_start();
}

#[tokio::test]
async fn a_slot_of_someone_else_fails() {
    let database = Database::with_outbox(Server::Newest).await;
    let other = Database::with_outbox(Server::Newest).await;
    let slot = database.slot();
    let made = [
        (format!("SELECT pg_create_physical_replication_slot('{slot}')"), "is a physical one", &database),
        (format!("SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')"), "test_decoding", &database),
        (format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"), "belongs to the database", &other),
    ];
    for (create, words, place) in made {
        place.execute("CREATE PUBLICATION outboxd FOR TABLE outbox").await;
        database.execute("DROP PUBLICATION IF EXISTS outboxd; CREATE PUBLICATION outboxd FOR TABLE outbox").await;
        place.execute(&create).await;
        let checked = look(&database, &[]).await;
        checked.fails_only(&["slot"], 3);
        let found = checked.fails("slot", words);
        let (_, drop) = found.remedy.split_once(": ").expect("a statement after the other way");
        place.execute(drop).await;
        place.execute("DROP PUBLICATION outboxd").await;
    }
    look(&database, &[]).await.would_start();
}

#[tokio::test]
async fn a_slot_that_is_being_read_is_a_warning_or_a_failure_without_standby() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let checked = look(&database, &[]).await;
    checked.would_start();
    checked.warns("slot", "a run stands by until that ends");
    look(&database, &["--no-standby"]).await.fails_only(&["slot"], 3);
    relay.stop().await;
    look(&database, &["--no-standby"]).await.would_start();
}

#[tokio::test]
async fn a_lost_position_fails_until_a_person_gives_it_up() {
    let database = Database::create(Server::Newest).await;
    let url = database.url();
    assert_eq!(outboxd(&["init", &url]).await.code, 0);
    let real = database.text("SELECT system_identifier FROM outboxd_checkpoint").await.expect("a row");
    database.execute("UPDATE outboxd_checkpoint SET system_identifier = '1'").await;
    look(&database, &[]).await.fails("position", "this is another server");
    database.execute(&format!("UPDATE outboxd_checkpoint SET system_identifier = '{real}', timeline = 9")).await;
    look(&database, &[]).await.fails("position", "timeline went back from 9 to 1");
    database.execute("UPDATE outboxd_checkpoint SET timeline = 1").await;
    look(&database, &[]).await.would_start();

    database.execute(&format!("SELECT pg_drop_replication_slot('{}')", database.slot())).await;
    let checked = look(&database, &[]).await;
    checked.fails_only(&["position"], 3);
    let lost = checked.fails("position", "is gone, and the checkpoint says that there was one");
    let (_, rest) = lost.remedy.split_once("then ").expect("steps");
    let (delete, _) = rest.split_once(';').expect("a statement");
    database.execute(delete).await;
    look(&database, &[]).await.would_start();
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_or_refuses_us_is_told_with_the_sinks_trouble() {
    let database = Database::create(Server::Newest).await;
    let checked = look_at("postgres://u@127.0.0.1:1/db", &["--topic", "no-such-topic"]).await;
    checked.fails_only(&["connection", "topic"], 3);
    assert!(checked.fails("connection", "127.0.0.1:1").remedy.contains("host and port"));
    let checked = look_at(&as_role(&database, "auth_scram:hunter2"), &[]).await;
    checked.fails_only(&["connection"], 3);
    let found = checked.fails("connection", "password authentication failed");
    assert!(found.remedy.contains("ALTER ROLE auth_scram PASSWORD") && !format!("{checked:?}").contains("hunter2"));
}

#[tokio::test]
async fn a_pooler_is_recognised() {
    let database = Database::with_outbox(Server::Newest).await;
    let url = database.url();
    let (_, server) = url.split_once('@').expect("a login");
    let (server, name) = server.split_once('/').expect("a database");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(pool(listener, server.to_owned()));
    let through = format!("postgres://postgres:postgres@{address}/{name}?sslmode=disable");
    let checked = look_at(&through, &[]).await;
    checked.fails_only(&["replication"], 3);
    let found = checked.fails("replication", "unsupported startup parameter");
    assert!(found.remedy.contains("connection pooler; connect to the PostgreSQL server itself"), "{found:?}");
}

/// Passes ordinary connections on and refuses replication ones, in PgBouncer's words.
async fn pool(listener: TcpListener, server: String) {
    while let Ok((mut client, _)) = listener.accept().await {
        let server = server.clone();
        tokio::spawn(async move {
            let mut startup = vec![0; 4];
            client.read_exact(&mut startup).await.ok()?;
            let length = u32::from_be_bytes(startup.clone().try_into().ok()?) as usize;
            startup.resize(length, 0);
            client.read_exact(&mut startup[4..]).await.ok()?;
            if startup.windows(12).any(|word| word == b"replication\0") {
                let fields = b"SFATAL\0C08P01\0Munsupported startup parameter: replication\0\0";
                client.write_u8(b'E').await.ok()?;
                client.write_i32(4 + fields.len() as i32).await.ok()?;
                client.write_all(fields).await.ok()?;
                return Some(());
            }
            let mut upstream = TcpStream::connect(&server).await.ok()?;
            upstream.write_all(&startup).await.ok()?;
            tokio::io::copy_bidirectional(&mut client, &mut upstream).await.ok()?;
            Some(())
        });
    }
}

#[tokio::test]
async fn everything_wrong_on_both_sides_is_told_at_once_and_quickly() {
    let database = Database::create(Server::Newest).await;
    database.execute("CREATE TABLE outbox (id uuid); CREATE PUBLICATION outboxd WITH (publish = 'delete')").await;
    database.execute(&format!("SELECT pg_create_physical_replication_slot('{}')", database.slot())).await;
    let begin = Instant::now();
    let checked = look(&database, &["--topic", "no-such-topic", "--dead-letter", "topic:no-such-place"]).await;
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    let expected = ["slot", "table", "table", "publication", "publication", "topic", "dead-letter"];
    checked.fails_only(&expected, 3);
    database.execute(&format!("SELECT pg_drop_replication_slot('{}')", database.slot())).await;
}
