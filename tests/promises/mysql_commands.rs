//! `init`, `check` and `status` for MySQL and MariaDB: what they make, what they find, and what they say to do about it.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::support::MySqlFlavor::{MariaDb, MySql};
use crate::support::{
    Checked, MySqlDatabase, MySqlFlavor, Numbers, PATIENCE, PrivateMySql, Relay, Topic, check, eventually, on_both,
    outboxd, shared_kafka, unique, until_reading, values, variable,
};

async fn init(database: &MySqlDatabase, flags: &[&str]) -> String {
    let url = database.url();
    let ended = outboxd(&[&["init", &url], flags].concat()).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    ended.stdout
}

async fn look(url: &str, flags: &[&str]) -> Checked {
    let brokers = shared_kafka();
    check(&[&[url, "--brokers", &brokers], flags].concat()).await
}

/// What the server's own client makes of a script.
fn client(flavor: MySqlFlavor, database: &MySqlDatabase, script: &str) {
    let program = match flavor {
        MySql => "OUTBOXD_TEST_MYSQL_CLIENT",
        MariaDb => "OUTBOXD_TEST_MARIADB_CLIENT",
    };
    let url = database.url();
    let port = url.rsplit_once(':').expect("a port").1.split('/').next().expect("a port").to_owned();
    let mut child = Command::new(variable(program))
        .args(["--host=127.0.0.1", "--user=root", "--password=mysql", &format!("--port={port}"), database.name()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the client starts");
    child.stdin.take().expect("its input").write_all(script.as_bytes()).expect("the script is taken");
    let output = child.wait_with_output().expect("the client ends");
    assert!(output.status.success(), "{script}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn init_makes_what_is_missing_once_and_nothing_after_it_is_missed() {
    on_both(async |flavor| {
        for (payload, sent) in [("json", r#"{"n": 1}"#), ("text", r#"{"n":1}"#), ("bytea", r#"{"n":1}"#)] {
            let database = MySqlDatabase::create(flavor).await;
            let said = init(&database, &["--payload", payload]).await;
            for thing in ["table outbox", "table outboxd_checkpoint", "starting position"] {
                assert!(said.contains(&format!("created {thing}")), "{thing}: {said}");
            }
            let stored = database.checkpoint().await;
            let again = init(&database, &["--payload", payload]).await;
            assert!(
                again.ends_with("nothing to do: everything is in place\n") && !again.contains("created"),
                "{again}"
            );
            assert_eq!(database.checkpoint().await, stored);
            // Committed before anything ran.
            database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '{\"n\":1}')").await;
            let topic = Topic::create(1).await;
            Relay::start_at(&database.url(), &topic, &["--no-create", "--until-caught-up"]).exits_with(0).await;
            let records = topic.reader().take(1).await;
            let expected = if flavor == MySql { sent } else { r#"{"n":1}"# };
            assert_eq!(values(&records), [expected], "{payload}");
            assert_eq!(records[0].id().len(), 36);
        }
        let database = MySqlDatabase::create(flavor).await;
        init(&database, &["--layout", "debezium"]).await;
        look(&database.url(), &["--layout", "debezium", "--topic", "t"]).await;
        let insert = "INSERT INTO outboxevent (aggregatetype, aggregateid, type, payload) VALUES ('o', '1', 't', '{}')";
        database.execute(insert).await;
    })
    .await;
}

#[tokio::test]
async fn a_dry_run_changes_nothing_and_the_client_does_with_it_what_init_does() {
    on_both(async |flavor| {
        let (by_hand, by_init) = (MySqlDatabase::create(flavor).await, MySqlDatabase::create(flavor).await);
        let flags = ["--table", "Orders", "--column", "key=customer_id", "--payload", "text", "--name", "it's"];
        let tables = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE()";
        let script = init(&by_hand, &[&flags[..], &["--dry-run"]].concat()).await;
        assert_eq!(by_hand.number(tables).await, 0, "nothing is made");
        client(flavor, &by_hand, &script);
        init(&by_init, &flags).await;
        let shape = "SELECT GROUP_CONCAT(CONCAT_WS(' ', table_name, column_name, column_type, column_default)
                     ORDER BY table_name, ordinal_position) FROM information_schema.columns
                     WHERE table_schema = DATABASE()";
        assert_eq!(by_hand.text(shape).await, by_init.text(shape).await);
        let said = init(&by_hand, &flags).await;
        assert!(said.ends_with("nothing to do: everything is in place\n"), "{said}");
    })
    .await;
}

#[tokio::test]
async fn the_scripts_in_the_repository_run_as_they_stand() {
    on_both(async |flavor| {
        let database = MySqlDatabase::create(flavor).await;
        for script in ["native", "debezium", "checkpoint"] {
            let path = format!("{}/sql/mysql/{script}.sql", env!("CARGO_MANIFEST_DIR"));
            client(flavor, &database, &std::fs::read_to_string(path).expect("a script"));
        }
        assert_eq!(database.number("SELECT COUNT(*) FROM outboxd_checkpoint").await, 0);
    })
    .await;
}

#[tokio::test]
async fn the_least_privileged_user_of_the_grants_relays_and_checks() {
    on_both(async |flavor| {
        let numbers = Numbers::on(flavor).await;
        init(&numbers.database, &[]).await;
        let user: String = unique("u").chars().take(30).collect();
        let path = format!("{}/sql/mysql/grants.sql", env!("CARGO_MANIFEST_DIR"));
        let mut script = std::fs::read_to_string(path).expect("a script");
        if flavor == MariaDb {
            script = script.replace("-- GRANT BINLOG MONITOR", "GRANT BINLOG MONITOR");
        }
        let script = script
            .replace("'outboxd'@", &format!("'{user}'@"))
            .replace("shop.", &format!("{}.", numbers.database.name()));
        client(flavor, &numbers.database, &script);
        let url = numbers.database.url().replace("root:mysql", &format!("{user}:change%20me"));
        look(&url, &["--topic", &numbers.topic.name]).await.would_start();
        look(&url, &["--topic", &numbers.topic.name, "--snapshot", "existing"]).await.would_start();
        let mut relay = Relay::start_at(&url, &numbers.topic, &["--checkpoint-interval", "50ms"]);
        until_reading(&mut relay).await;
        let before = numbers.database.checkpoint().await.expect("a checkpoint");
        let mut numbers = numbers;
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        numbers.until_stored_after(&before).await;
        relay.stop().await;
        numbers.database.execute(&format!("DROP USER '{user}'@'%'")).await;
    })
    .await;
}

/// A user of the server that the database is on, without any right.
async fn stranger(database: &MySqlDatabase) -> (String, String) {
    let user: String = unique("u").chars().take(30).collect();
    database.execute(&format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'x'")).await;
    let url = database.url().replace("root:mysql", &format!("{user}:x"));
    (user, url)
}

#[tokio::test]
async fn a_user_without_rights_is_told_which_and_ends_with_exit_3() {
    on_both(async |flavor| {
        let numbers = Numbers::on(flavor).await;
        let (user, url) = stranger(&numbers.database).await;
        let topic = numbers.topic.name.as_str();
        let checked = look(&url, &["--topic", topic]).await;
        assert_eq!(checked.code, 3);
        let mut relay = Relay::start_at(&url, &numbers.topic, &[]);
        relay.exits_with(3).await;
        assert!(relay.log().contains("grants.sql"), "{}", relay.log());

        // What is told at once is all that it takes.
        let database = numbers.database.name();
        for (words, grant) in [
            (
                "REPLICATION SLAVE and REPLICATION CLIENT",
                "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.*".to_owned(),
            ),
            ("SELECT on", format!("GRANT SELECT ON `{database}`.`outbox`")),
            (
                "CREATE, SELECT, INSERT, UPDATE on",
                format!("GRANT CREATE, SELECT, INSERT, UPDATE ON `{database}`.`outboxd_checkpoint`"),
            ),
        ] {
            let found = checked.fails("privileges", &format!("the user lacks {words}"));
            assert_eq!(found.statements(), [format!("{grant} TO `{user}`@`%`")]);
            numbers.database.execute(found.statements()[0]).await;
        }
        look(&url, &["--topic", topic]).await.would_start();
        let mut relay = Relay::start_at(&url, &numbers.topic, &[]);
        until_reading(&mut relay).await;
        relay.stop().await;
        numbers.database.execute(&format!("DROP USER '{user}'@'%'")).await;
    })
    .await;
}

#[tokio::test]
async fn every_right_that_is_lacking_is_told_with_the_grant_that_gives_it() {
    on_both(async |flavor| {
        let numbers = Numbers::on(flavor).await;
        let (database, topic) = (numbers.database.name(), numbers.topic.name.as_str());
        let (user, url) = stranger(&numbers.database).await;
        let account = format!("`{user}`@`%`");
        let run = async |statement: &str| numbers.database.execute(statement).await;
        let (outbox, checkpoint) = (format!("`{database}`.`outbox`"), format!("`{database}`.`outboxd_checkpoint`"));
        run(&format!("GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {account}")).await;
        run(&format!("GRANT SELECT, DELETE ON {outbox} TO {account}")).await;
        run(&format!("GRANT CREATE, SELECT, INSERT, UPDATE ON {checkpoint} TO {account}")).await;
        let one_lacks = async |right: &str, table: &str, granted: &str| {
            run(&format!("REVOKE {right} ON {table} FROM {account}")).await;
            let checked = look(&url, &["--topic", topic]).await;
            checked.fails_only(&["privileges"], 3);
            let found = checked.fails("privileges", &format!("the user lacks {right} on {table}"));
            assert_eq!(found.statements(), [format!("GRANT {granted} ON {table} TO {account}")]);
            run(found.statements()[0]).await;
            look(&url, &["--topic", topic]).await.would_start();
        };
        look(&url, &["--topic", topic]).await.is_fine("checkpoint", "will be made by the first run");
        one_lacks("CREATE", &checkpoint, "CREATE").await;
        for right in ["SELECT", "INSERT", "UPDATE"] {
            // Nothing else can be granted on a table that is not there yet.
            one_lacks(right, &checkpoint, &format!("CREATE, {right}")).await;
        }
        init(&numbers.database, &[]).await;
        run(&format!("REVOKE CREATE ON {checkpoint} FROM {account}")).await;
        look(&url, &["--topic", topic]).await.would_start();
        for (right, table) in
            [("SELECT", &outbox), ("SELECT", &checkpoint), ("INSERT", &checkpoint), ("UPDATE", &checkpoint)]
        {
            one_lacks(right, table, right).await;
        }
        assert_eq!(numbers.database.number("SELECT COUNT(*) FROM outboxd_checkpoint").await, 1, "nothing was written");

        // Where the checkpoint is kept elsewhere nothing is asked of its table.
        run(&format!("REVOKE SELECT, INSERT, UPDATE ON {checkpoint} FROM {account}")).await;
        let checked = look(&url, &["--topic", topic]).await;
        checked.fails_only(&["privileges"], 3);
        checked.fails("privileges", "the user lacks CREATE, SELECT, INSERT, UPDATE on");
        look(&url, &["--topic", topic, "--checkpoint", "kafka"]).await.would_start();
        // Rights of a role are rights.
        let role: String = unique("r").chars().take(30).collect();
        run(&format!("CREATE ROLE {role}")).await;
        run(&format!("GRANT SELECT, INSERT, UPDATE ON {checkpoint} TO {role}")).await;
        run(&format!("GRANT {role} TO {account}")).await;
        run(&match flavor {
            MySql => format!("SET DEFAULT ROLE {role} TO {account}"),
            MariaDb => format!("SET DEFAULT ROLE {role} FOR {account}"),
        })
        .await;
        look(&url, &["--topic", topic]).await.would_start();
        run(&format!("DROP ROLE {role}")).await;
        run(&format!("DROP USER {account}")).await;
    })
    .await;
}

#[tokio::test]
async fn check_finds_what_is_wrong_with_the_server() {
    on_both(async |flavor| {
        let gtids: &[&str] = if flavor == MySql { &["--gtid-mode=OFF", "--enforce-gtid-consistency=OFF"] } else { &[] };
        let server = PrivateMySql::start(flavor, gtids).await;
        let numbers = Numbers::at(&server.url()).await;
        let (url, topic) = (numbers.database.url(), numbers.topic.name.clone());
        let flags = ["--topic", topic.as_str()];
        let checked = look(&url, &flags).await;
        checked.would_start();
        if flavor == MySql {
            checked.warns("gtid", "gtid_mode is OFF");
        }
        let run = async |statement: &str| numbers.database.execute(statement).await;
        run("SET GLOBAL binlog_row_metadata = MINIMAL").await;
        run("SET GLOBAL binlog_row_image = MINIMAL").await;
        run("SET GLOBAL binlog_expire_logs_seconds = 3600").await;
        let checked = look(&url, &flags).await;
        checked.would_start();
        checked.warns("metadata", "binlog_row_metadata is MINIMAL");
        checked.warns("row-image", "binlog_row_image is MINIMAL");
        checked.warns("retention", "after 1 h");
        run("SET GLOBAL binlog_format = STATEMENT").await;
        look(&url, &flags).await.fails("binlog", "binlog_format is STATEMENT");
        let mut relay = numbers.start(&[]);
        relay.exits_with(3).await;
        assert!(relay.log().contains("binlog_format = 'ROW'"), "{}", relay.log());
        run("SET GLOBAL binlog_format = ROW").await;
        run("SET GLOBAL read_only = ON").await;
        look(&url, &flags).await.fails_only(&["read-only"], 3);
        look(&url, &[&flags[..], &["--checkpoint", "kafka"]].concat()).await.would_start();
        run("SET GLOBAL read_only = OFF").await;
        let own = if flavor == MySql { "1" } else { "2" };
        look(&url, &[&flags[..], &["--server-id", own]].concat()).await.fails_only(&["server-id"], 3);

        let checked = look(&url, &[&flags[..], &["--table", "nowhere", "--column", "payload=body"]].concat()).await;
        checked.fails("table", "there is no table nowhere");
        let checked = look(&url, &[&flags[..], &["--column", "payload=body"]].concat()).await;
        checked.fails("table", "has no column `body`");
        look(&url, &[&flags[..], &["--no-create"]].concat()).await.fails_only(&["checkpoint"], 3);

        init(&numbers.database, &[]).await;
        look(&url, &flags).await.is_fine("position", "");
        run(if flavor == MySql { "RESET BINARY LOGS AND GTIDS" } else { "RESET MASTER" }).await;
        look(&url, &flags).await.fails_only(&["position"], 3);
    })
    .await;
}

#[tokio::test]
async fn a_server_without_a_binary_log_is_refused() {
    on_both(async |flavor| {
        let option: &[&str] = match flavor {
            MySql => &["--skip-log-bin", "--gtid-mode=OFF", "--enforce-gtid-consistency=OFF"],
            MariaDb => &["--skip-log-bin"],
        };
        let server = PrivateMySql::start(flavor, option).await;
        let numbers = Numbers::at(&server.url()).await;
        let checked = look(&numbers.database.url(), &["--topic", &numbers.topic.name]).await;
        assert!(checked.fails("binlog", "log_bin is OFF").remedy.contains("--log-bin"));
        let mut relay = numbers.start(&[]);
        relay.exits_with(3).await;
        assert!(relay.log().contains("log_bin is OFF"), "{}", relay.log());
    })
    .await;
}

#[tokio::test]
async fn status_shows_the_position_and_how_far_behind_it_is() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        let first = numbers.database.checkpoint().await.expect("a checkpoint");
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        let stored = numbers.until_stored_after(&first).await;
        let server = stored.split([':', '-']).next().expect("a server").to_owned();
        let shown = eventually(PATIENCE, "the status has a position", async || {
            let status = relay.status().await;
            let text = status.to_string();
            text.contains(&server).then_some(status)
        })
        .await;
        assert!(shown.to_string().contains("lag"), "{shown}");
        let admin = relay.admin().await;
        let ended = outboxd(&["status", "--admin", &admin]).await;
        assert!(ended.code == 0 && ended.stdout.contains(&server), "{ended:?}");
        relay.stop().await;
    })
    .await;
}
