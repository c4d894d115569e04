//! `outboxd init`: makes what a pipeline stands on, once, so that nothing committed after it is missed.

use crate::support::{Database, Relay, Server, Topic, check, outboxd, shared_kafka, unique};

const BOTH: [Server; 2] = [Server::Newest, Server::Oldest];

async fn init(database: &Database, flags: &[&str]) -> String {
    let url = database.url();
    let mut arguments = vec!["init", &url];
    arguments.extend(flags);
    let ended = outboxd(&arguments).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    ended.stdout
}

/// Everything that init may make, as the server shows it.
async fn everything(database: &Database) -> String {
    let query = "SELECT concat_ws(E'\\n',
        (SELECT string_agg(concat_ws(' ', table_schema, table_name, column_name, data_type, column_default), E'\\n'
                ORDER BY table_schema, table_name, ordinal_position)
         FROM information_schema.columns WHERE table_schema NOT IN ('pg_catalog', 'information_schema')),
        (SELECT string_agg(p::text, ' ') FROM pg_publication p),
        (SELECT string_agg(t::text, ' ') FROM pg_publication_tables t),
        (SELECT string_agg(concat_ws(' ', slot_name, plugin, restart_lsn, confirmed_flush_lsn), ' ')
         FROM pg_replication_slots WHERE database = current_database()))";
    let mut all = database.text(query).await.unwrap_or_default();
    if database.number("SELECT count(*) FROM pg_class WHERE relname = 'outboxd_checkpoint'").await > 0 {
        all.push_str(
            &database.text("SELECT string_agg(c::text, ' ') FROM outboxd_checkpoint c").await.unwrap_or_default(),
        );
    }
    all
}

async fn would_start(database: &Database, flags: &[&str]) {
    let (url, brokers) = (database.url(), shared_kafka());
    let mut arguments = vec![&*url, "--brokers", &brokers, "--no-create"];
    arguments.extend(flags);
    check(&arguments).await.would_start();
}

#[tokio::test]
async fn what_is_committed_between_init_and_the_first_run_arrives() {
    for server in BOTH {
        for payload in ["jsonb", "json", "text", "bytea"] {
            let database = Database::create(server).await;
            let said = init(&database, &["--payload", payload]).await;
            assert_eq!(said.lines().filter(|line| line.starts_with("created ")).count(), 6, "{said}");
            would_start(&database, &[]).await;
            // A row that is gone again by then was committed all the same.
            database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '{\"n\":1}')").await;
            database.execute("DELETE FROM outbox").await;
            let topic = Topic::create(1).await;
            Relay::start(&database, &topic, &["--no-create", "--until-caught-up"]).exits_with(0).await;
            let records = topic.reader().take(1).await;
            let expected = if payload == "jsonb" { "{\"n\": 1}" } else { "{\"n\":1}" };
            assert_eq!(records[0].value.as_deref(), Some(expected), "{payload}");
            assert_eq!(records[0].id().len(), 36);
        }
    }
}

#[tokio::test]
async fn the_debezium_table_is_made_too() {
    for server in BOTH {
        let database = Database::create(server).await;
        init(&database, &["--layout", "debezium"]).await;
        would_start(&database, &["--layout", "debezium"]).await;
        let insert = "INSERT INTO outboxevent (aggregatetype, aggregateid, type, payload) VALUES ('o', '1', 't', '{}')";
        database.execute(insert).await;
    }
}

#[tokio::test]
async fn a_second_init_changes_nothing_and_says_so() {
    for server in BOTH {
        let database = Database::create(server).await;
        init(&database, &[]).await;
        let before = everything(&database).await;
        let said = init(&database, &[]).await;
        assert!(said.ends_with("nothing to do: everything is in place\n") && !said.contains("created"), "{said}");
        assert_eq!(everything(&database).await, before);
        assert!(init(&database, &["--dry-run"]).await.ends_with("-- nothing to do: everything is in place\n"));
    }
}

#[tokio::test]
async fn a_dry_run_changes_nothing_and_its_statements_do_what_init_does() {
    for server in BOTH {
        let (by_hand, by_init) = (Database::create(server).await, Database::create(server).await);
        let flags = ["--table", "sales.Outbox", "--column", "key=customer_id", "--payload", "text", "--slot"];
        let slots = [unique("by_hand"), unique("by_init")];
        let flags = |slot: usize| [&flags[..], &[&*slots[slot], "--name", "p"]].concat();
        let before = everything(&by_hand).await;
        let script = init(&by_hand, &[&flags(0)[..], &["--dry-run"]].concat()).await;
        assert_eq!(everything(&by_hand).await, before);
        // As psql does: each statement for itself.
        for statement in script.split(";\n") {
            by_hand.execute(statement).await;
        }
        init(&by_init, &flags(1)).await;
        let shape =
            "SELECT string_agg(concat_ws(' ', table_schema, table_name, column_name, data_type, column_default),
                     ',' ORDER BY table_name, ordinal_position)
                     FROM information_schema.columns WHERE table_schema IN ('public', 'sales')";
        assert_eq!(by_hand.text(shape).await, by_init.text(shape).await);
        let said = init(&by_hand, &flags(0)).await;
        assert!(said.ends_with("nothing to do: everything is in place\n"), "{said}");
        would_start(&by_hand, &flags(0)[..4].iter().copied().chain(flags(0)[6..].iter().copied()).collect::<Vec<_>>())
            .await;
    }
}

#[tokio::test]
async fn a_dry_run_without_a_server_prints_everything_for_the_newest_version() {
    let ended = outboxd(&["init", "postgres://u@127.0.0.1:1/shop", "--dry-run"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.stdout.starts_with("-- No server could be asked"), "{}", ended.stdout);
    for part in [
        "CREATE TABLE \"outbox\" (",
        "DEFAULT uuidv7()",
        "CREATE TABLE IF NOT EXISTS outboxd_checkpoint",
        "CREATE PUBLICATION \"outboxd\" FOR TABLE \"outbox\" WITH (publish = 'insert', publish_via_partition_root = true);",
        "SELECT pg_create_logical_replication_slot('outboxd_shop', 'pgoutput', false, false, true);",
        "INSERT INTO outboxd_checkpoint",
    ] {
        assert!(ended.stdout.contains(part), "{part}: {}", ended.stdout);
    }
}

#[tokio::test]
async fn slots_follow_a_fail_over_where_the_server_can() {
    let database = Database::create(Server::Newest).await;
    init(&database, &[]).await;
    let failover = format!("SELECT failover FROM pg_replication_slots WHERE slot_name = '{}'", database.slot());
    assert_eq!(database.text(&failover).await.as_deref(), Some("t"));
}

#[tokio::test]
async fn the_snapshot_is_left_to_the_first_run_and_loses_nothing() {
    for server in BOTH {
        let database = Database::with_outbox(server).await;
        database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '1')").await;
        init(&database, &["--snapshot", "existing"]).await;
        database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '2')").await;
        let topic = Topic::create(1).await;
        let flags = ["--snapshot", "existing", "--no-create", "--until-caught-up"];
        Relay::start(&database, &topic, &flags).exits_with(0).await;
        let mut reader = topic.reader();
        let mut values: Vec<_> = reader.rest().await.into_iter().filter_map(|record| record.value).collect();
        values.dedup();
        values.sort();
        values.dedup();
        assert_eq!(values, ["1", "2"]);
        let state = database.text("SELECT snapshot FROM outboxd_checkpoint").await;
        assert_eq!(state.as_deref(), Some("done"));
    }
}

#[tokio::test]
async fn a_lost_position_is_not_papered_over_by_init() {
    let database = Database::create(Server::Newest).await;
    init(&database, &[]).await;
    database.execute(&format!("SELECT pg_drop_replication_slot('{}')", database.slot())).await;
    let ended = outboxd(&["init", &database.url()]).await;
    assert_eq!(ended.code, 4, "{ended:?}");
    assert!(ended.stderr.contains("the gap: commits after"), "{ended:?}");
    assert_eq!(database.slots().await, 0);
}

#[tokio::test]
async fn a_table_that_would_not_do_is_not_left_behind() {
    let database = Database::create(Server::Newest).await;
    let ended = outboxd(&["init", &database.url(), "--topic", "orders.{region}"]).await;
    assert_eq!(ended.code, 3, "{ended:?}");
    assert!(ended.stderr.contains("has no column `region`"), "{ended:?}");
    assert_eq!(everything(&database).await, "");
}

#[tokio::test]
async fn a_table_is_added_to_a_publication_that_is_there() {
    let database = Database::create(Server::Newest).await;
    init(&database, &[]).await;
    let flags = ["--table", "outbox", "--table", "audit"];
    let said = init(&database, &flags).await;
    assert!(said.contains("created table audit\n"), "{said}");
    would_start(&database, &flags).await;
}

#[tokio::test]
async fn the_granted_role_relays_and_may_do_nothing_else() {
    let grants = include_str!("../../sql/postgres/grants.sql");
    for server in BOTH {
        let database = Database::create(server).await;
        init(&database, &[]).await;
        let role = unique("relay");
        database.execute(&grants.replace("outboxd_relay", &role).replace("change me", "secret")).await;
        let url = database.url();
        let (_, place) = url.split_once('@').expect("a login");
        let url = format!("postgres://{role}:secret@{place}");
        let (brokers, topic) = (shared_kafka(), Topic::create(1).await);
        check(&[&url, "--brokers", &brokers, "--topic", &topic.name, "--no-create"]).await.would_start();
        database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '1')").await;
        let flags = ["run", &url, "--brokers", &brokers, "--topic", &topic.name, "--no-create", "--until-caught-up"];
        Relay::spawn(&flags).exits_with(0).await;
        assert_eq!(topic.reader().take(1).await[0].value.as_deref(), Some("1"));
        let moved = "SELECT position > '0/0' AND updated_at IS NOT NULL FROM outboxd_checkpoint";
        assert_eq!(database.text(moved).await.as_deref(), Some("t"));
        for forbidden in ["SELECT FROM outbox", "DELETE FROM outboxd_checkpoint", "DROP PUBLICATION outboxd"] {
            let refused = format!("SET ROLE {role}; {forbidden}");
            let error = database.connect().await.batch_execute(&refused).await.expect_err(forbidden);
            assert_eq!(error.code().map(|code| code.code()), Some("42501"), "{forbidden}: {error:?}");
        }
        database.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    }
}
