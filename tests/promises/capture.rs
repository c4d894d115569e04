//! Which changes of the log are events: inserts into the outbox tables and logical messages, and nothing else.

use crate::support::{Database, PATIENCE, Record, Relay, Server, Topic, eventually};

fn values(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.value.as_deref().unwrap_or("(none)")).collect()
}

/// A counter of /metrics.
async fn ignored(relay: &Relay, op: &str) -> u64 {
    let page = relay.get("/metrics").await;
    let label = format!("op=\"{op}\"");
    let line = page.lines().find(|line| line.starts_with("outboxd_ignored_changes_total{") && line.contains(&label));
    line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).unwrap_or_else(|| panic!("no {op} in {page}"))
}

async fn until_ignored(relay: &Relay, op: &str, count: u64) {
    let what = format!("{count} changes by {op} are counted as ignored");
    eventually(PATIENCE, &what, async || (ignored(relay, op).await >= count).then_some(())).await;
    assert_eq!(ignored(relay, op).await, count, "{op}");
}

/// What is in the topic once this last event has arrived.
async fn all_until(topic: &Topic, last: &str) -> Vec<Record> {
    let there = |records: &[Record]| records.iter().any(|record| record.value.as_deref() == Some(last));
    topic.reader().until(PATIENCE, &format!("event {last}"), there).await
}

#[tokio::test]
async fn only_inserts_are_events() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::with_outbox(server).await;
        let topic = Topic::create(1).await;
        database
            .execute(
                "ALTER TABLE outbox REPLICA IDENTITY FULL; CREATE PUBLICATION everything FOR TABLE outbox, counters",
            )
            .await;
        let relay = Relay::streaming(&database, &topic, &["--publication", "everything"]).await;
        database
            .execute(
                "INSERT INTO outbox (partition_key, payload) VALUES ('a', '1'), ('a', '2');
                 INSERT INTO counters VALUES ('stranger', 1); UPDATE counters SET seq = 2; DELETE FROM counters;
                 UPDATE outbox SET payload = '99';
                 DELETE FROM outbox WHERE payload = '99'",
            )
            .await;
        // An insert that is deleted in its own transaction is how an outbox is kept empty.
        database
            .execute(
                "BEGIN; INSERT INTO outbox (partition_key, payload) VALUES ('a', '3');
                 DELETE FROM outbox; COMMIT",
            )
            .await;
        database
            .execute("INSERT INTO outbox (partition_key, payload) VALUES ('a', '4'); TRUNCATE outbox, counters")
            .await;
        database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('a', '5')").await;
        let records = all_until(&topic, "5").await;
        assert_eq!(values(&records), ["1", "2", "3", "4", "5"], "{server:?}");
        until_ignored(&relay, "update", 2).await;
        until_ignored(&relay, "delete", 3).await;
        until_ignored(&relay, "truncate", 1).await;
        assert!(relay.log().contains("was truncated"), "a truncated outbox is worth a warning");
        relay.stop().await;
    }
}

#[tokio::test]
async fn rolled_back_and_partly_rolled_back_rows_never_appear() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    database
        .execute(
            "BEGIN; INSERT INTO outbox (payload) VALUES ('1'); ROLLBACK;
             BEGIN; INSERT INTO outbox (payload) VALUES ('2'); SAVEPOINT s; INSERT INTO outbox (payload) VALUES ('3');
             ROLLBACK TO s; INSERT INTO outbox (payload) VALUES ('4'); COMMIT",
        )
        .await;
    assert_eq!(values(&all_until(&topic, "4").await), ["2", "4"]);
    relay.stop().await;
}

const PARTITIONED: &str = "
    CREATE TABLE outbox (id bigserial, partition_key text, payload jsonb, day date NOT NULL) PARTITION BY RANGE (day);
    CREATE TABLE outbox_old PARTITION OF outbox FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
    CREATE SCHEMA parts;
    CREATE TABLE parts.outbox_sub PARTITION OF outbox FOR VALUES FROM ('2026-02-01') TO ('2026-04-01')
        PARTITION BY RANGE (day);
    CREATE TABLE parts.leaf PARTITION OF parts.outbox_sub FOR VALUES FROM ('2026-02-01') TO ('2026-03-01');
    CREATE TABLE stranger (id int, payload jsonb) PARTITION BY RANGE (id);
    CREATE TABLE stranger_1 PARTITION OF stranger FOR VALUES FROM (1) TO (10)";

async fn a_partitioned_outbox_is_one_outbox(server: Server, publication: Option<&str>) {
    let database = Database::create(server).await;
    database.execute(PARTITIONED).await;
    let mut flags = Vec::new();
    if let Some(statement) = publication {
        database.execute(statement).await;
        flags.extend(["--publication", "mine"]);
    }
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &flags).await;
    database
        .execute(
            "INSERT INTO outbox (partition_key, payload, day) VALUES ('a', '1', '2026-01-05'), ('a', '2', '2026-02-05');
             INSERT INTO stranger VALUES (1, '77')",
        )
        .await;
    // Columns of an attached table may lie elsewhere.
    database
        .execute(
            "CREATE TABLE later (payload jsonb, gone int, day date NOT NULL, id bigint NOT NULL, partition_key text);
             ALTER TABLE later DROP gone;
             ALTER TABLE outbox ATTACH PARTITION later FOR VALUES FROM ('2026-04-01') TO ('2026-05-01')",
        )
        .await;
    database.execute("INSERT INTO outbox (partition_key, payload, day) VALUES ('b', '3', '2026-04-05')").await;
    database.execute("INSERT INTO outbox (partition_key, payload, day) VALUES ('a', '4', '2026-01-06')").await;
    let records = all_until(&topic, "4").await;
    assert_eq!(values(&records), ["1", "2", "3", "4"]);
    assert_eq!((records[2].key.as_deref(), records[2].id()), (Some("b"), "3"));
    relay.stop().await;

    let relay = Relay::streaming(&database, &topic, &flags).await;
    database.execute("INSERT INTO outbox (partition_key, payload, day) VALUES ('a', '5', '2026-04-06')").await;
    assert_eq!(values(&all_until(&topic, "5").await), ["1", "2", "3", "4", "5"]);
    relay.stop().await;
}

#[tokio::test]
async fn a_partitioned_outbox_with_our_publication_is_one_outbox() {
    a_partitioned_outbox_is_one_outbox(Server::Newest, None).await;
    a_partitioned_outbox_is_one_outbox(Server::Oldest, None).await;
}

#[tokio::test]
async fn a_partitioned_outbox_with_a_publication_of_leaves_is_one_outbox() {
    let statement = "CREATE PUBLICATION mine FOR TABLE outbox, stranger";
    a_partitioned_outbox_is_one_outbox(Server::Newest, Some(statement)).await;
    a_partitioned_outbox_is_one_outbox(Server::Oldest, Some(statement)).await;
}

#[tokio::test]
async fn a_publication_of_all_tables_is_as_good() {
    a_partitioned_outbox_is_one_outbox(Server::Newest, Some("CREATE PUBLICATION mine FOR ALL TABLES")).await;
    a_partitioned_outbox_is_one_outbox(Server::Oldest, Some("CREATE PUBLICATION mine FOR ALL TABLES")).await;
}

#[tokio::test]
async fn several_tables_keep_the_order_of_their_common_transactions() {
    let database = Database::with_outbox(Server::Newest).await;
    // The same columns in another order and of other types.
    database
        .execute(
            "CREATE SCHEMA sales;
             CREATE TABLE sales.outbox (payload text, partition_key varchar(9), note int, id int PRIMARY KEY)",
        )
        .await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--table", "public.outbox,sales.outbox"]).await;
    database
        .execute(
            "BEGIN; INSERT INTO outbox (partition_key, payload) VALUES ('a', '1');
             INSERT INTO sales.outbox VALUES ('2', 'a', 0, 10); INSERT INTO outbox (partition_key, payload) VALUES ('a', '3');
             COMMIT; INSERT INTO sales.outbox VALUES ('4', 'b', 0, 11)",
        )
        .await;
    let records = all_until(&topic, "4").await;
    assert_eq!(values(&records), ["1", "2", "3", "4"]);
    assert_eq!((records[1].id(), records[3].key.as_deref()), ("10", Some("b")));
    relay.stop().await;
}

#[tokio::test]
async fn names_of_any_kind_are_taken_as_they_are() {
    let database = Database::create(Server::Newest).await;
    database
        .execute(
            r#"CREATE SCHEMA "Sales.EU";
               CREATE TABLE "Sales.EU"."Outbox ""Events""" ("Id" int PRIMARY KEY, "Group Key" text, "select" jsonb);
               CREATE TABLE "Sales.EU"."outbox ""events""" ("Id" int PRIMARY KEY, "Group Key" text, "select" jsonb)"#,
        )
        .await;
    let topic = Topic::create(1).await;
    let table = r#""Sales.EU"."Outbox ""Events""""#;
    let columns = ["--column", "id=Id", "--column", "key=Group Key", "--column", "payload=select"];
    let mut flags = vec!["--table", table, "--publication", "My \"Publication\"", "--snapshot", "existing"];
    flags.extend(columns);
    database.execute(&format!("INSERT INTO {table} VALUES (1, 'k', '1')")).await;
    let relay = Relay::streaming(&database, &topic, &flags).await;
    database
        .execute(&format!(
            r#"INSERT INTO "Sales.EU"."outbox ""events""" VALUES (7, 'k', '7'); INSERT INTO {table} VALUES (2, 'k', '2')"#
        ))
        .await;
    let records = all_until(&topic, "2").await;
    assert_eq!(values(&records), ["1", "2"]);
    assert_eq!((records[1].id(), records[1].key.as_deref()), ("2", Some("k")));
    relay.stop().await;
}

const ORDERS: [&str; 2] = ["--message-prefix", "orders"];

#[tokio::test]
async fn logical_messages_are_an_outbox_without_a_table() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::create(server).await;
        let topic = Topic::create(1).await;
        let relay = Relay::streaming(&database, &topic, &["--message-prefix", "orders,payments"]).await;
        let emit = |transactional: bool, prefix: &str, payload: u32| {
            let content = format!(r#"{{"id": {payload}, "partition_key": "k", "payload": {{"n":{payload}}}}}"#);
            format!("SELECT pg_logical_emit_message({transactional}, '{prefix}', '{content}');")
        };
        let begin_and = |statements: &[String], end: &str| format!("BEGIN; {} {end};", statements.concat());
        database.execute(&begin_and(&[emit(true, "orders", 1), emit(true, "payments", 2)], "COMMIT")).await;
        database.execute(&begin_and(&[emit(true, "orders", 3)], "ROLLBACK")).await;
        database.execute(&emit(true, "other", 4)).await;
        database.execute(&emit(true, "orders2", 5)).await;
        // One outside of transactions is there at once, whatever becomes of the transaction it was made in.
        database.execute(&begin_and(&[emit(false, "orders", 6)], "ROLLBACK")).await;
        database.execute(&emit(true, "orders", 7)).await;
        let records = all_until(&topic, r#"{"n":7}"#).await;
        assert_eq!(values(&records), [r#"{"n":1}"#, r#"{"n":2}"#, r#"{"n":6}"#, r#"{"n":7}"#]);
        assert_eq!((records[1].id(), records[1].key.as_deref()), ("2", Some("k")));
        let position = database.wal_position().await;
        database.execute(&emit(true, "other", 8)).await;
        database.until_confirmed(position, PATIENCE).await;
        relay.stop().await;
    }
}

#[tokio::test]
async fn a_message_that_is_no_json_becomes_a_dead_letter() {
    let database = Database::create(Server::Newest).await;
    let (topic, letters) = (Topic::create(1).await, Topic::create(1).await);
    let dead_letter = format!("topic:{}", letters.name);
    let relay = Relay::streaming(&database, &topic, &[&ORDERS[..], &["--dead-letter", &dead_letter]].concat()).await;
    database
        .execute(
            r#"SELECT pg_logical_emit_message(true, 'orders', 'not JSON ü');
               SELECT pg_logical_emit_message(true, 'orders', '{"id": 1, "payload": "no key"}');
               SELECT pg_logical_emit_message(true, 'orders', '{"id": 2, "partition_key": "k", "payload": "ok"}')"#,
        )
        .await;
    assert_eq!(values(&all_until(&topic, "ok").await), ["ok"]);
    let parked = letters.reader().take(2).await;
    assert_eq!(parked[0].value.as_deref(), Some("not JSON ü"), "the content is kept as it was");
    let reason = |record: &Record| record.header("outboxd.reason").expect("a dead letter says why").to_owned();
    assert!(reason(&parked[0]).contains("not a JSON object"), "{parked:?}");
    assert!(reason(&parked[1]).contains("partition_key"), "{parked:?}");
    assert!(parked[0].header("outboxd.position").is_some_and(|position| position.contains('/')), "{parked:?}");
    eventually(PATIENCE, "two dead letters are counted", async || {
        relay
            .get("/metrics")
            .await
            .lines()
            .any(|line| line.starts_with("outboxd_dead_letters_total{") && line.ends_with(" 2"))
            .then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test]
async fn a_message_that_is_no_json_ends_the_relay_without_a_place_for_it() {
    let database = Database::create(Server::Newest).await;
    let topic = Topic::create(1).await;
    let mut relay = Relay::streaming(&database, &topic, &ORDERS).await;
    database
        .execute(
            r#"SELECT pg_logical_emit_message(true, 'orders', '{"id": 1, "partition_key": "k", "payload": "1"}');
               SELECT pg_logical_emit_message(true, 'orders', 'not JSON');
               SELECT pg_logical_emit_message(true, 'orders', '{"id": 3, "partition_key": "k", "payload": "3"}')"#,
        )
        .await;
    relay.exits_with(6).await;
    assert!(relay.log().contains("--dead-letter"), "the remedy is told");
    // Nothing of that transaction was confirmed: with a place for it, the rest flows.
    let dead_letters = Topic::create(1).await;
    let place = format!("topic:{}", dead_letters.name);
    let relay = Relay::streaming(&database, &topic, &[&ORDERS[..], &["--dead-letter", &place]].concat()).await;
    all_until(&topic, "3").await;
    assert_eq!(values(&dead_letters.reader().take(1).await), ["not JSON"]);
    relay.stop().await;
}
