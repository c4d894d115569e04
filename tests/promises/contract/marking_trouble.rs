//! What stands in the way of marks: it is told before the start with what mends it, and waited out later.

use std::time::{Duration, Instant};

use mongodb::bson::doc;

use super::marking::metric;
use crate::support::{Outbox, PATIENCE, PrivatePostgres, Relay, Source, Topic, check, eventually, outboxd, unique};

promised!(missing_columns_are_told_with_the_statement_that_adds_them to postgres, oldest_postgres, mysql, mariadb);

async fn missing_columns_are_told_with_the_statement_that_adds_them(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let (url, flags) = (outbox.url(), ["--mark", "--brokers", &topic.brokers, "--topic", &topic.name]);
    let mut relay = outbox.relay(&topic, &["--mark"]);
    relay.exits_with(3).await;
    assert!(relay.log().contains("ALTER TABLE") && relay.log().contains("published_at"), "{}", relay.log());
    let checked = check(&[&[url.as_str()], &flags[..]].concat()).await;
    checked.fails_only(&["mark"], 3);
    let found = checked.fails("mark", "status");
    for statement in found.statements() {
        outbox.execute(statement).await;
    }
    check(&[&[url.as_str()], &flags[..]].concat()).await.would_start();
    let relay = outbox.streaming(&topic, &["--mark"]).await;
    outbox.writer().await.commit(&["a"]).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
}

promised!(missing_right_is_told_with_the_statement_that_grants_it to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn missing_right_is_told_with_the_statement_that_grants_it(source: Source) {
    let outbox = Outbox::create(source).await;
    outbox.add_status().await;
    let made = outboxd(&["init", &outbox.url()]).await;
    assert_eq!(made.code, 0, "{made:?}");
    let (name, url) = reader_of(&outbox).await;
    let topic = Topic::create(1).await;
    let flags = [&url, "--mark", "--brokers", &topic.brokers, "--topic", &topic.name, "--no-create"];
    let mut relay = Relay::spawn(&[&["run"], &flags[..]].concat());
    relay.exits_with(3).await;
    let checked = check(&flags).await;
    checked.fails_only(&["mark"], 3);
    let found = checked.fails("mark", "marked");
    if source == Source::MongoDb {
        assert!(found.remedy.contains(r#"actions: ["update"]"#), "{found:?}");
        let database = outbox.mongodb();
        let privilege = doc! { "resource": { "db": database.name(), "collection": "outbox" }, "actions": ["update"] };
        database.run(doc! { "grantPrivilegesToRole": &name, "privileges": [privilege] }).await;
    } else {
        assert!(!found.statements().is_empty(), "{found:?}");
        for statement in found.statements() {
            outbox.execute(statement).await;
        }
    }
    check(&flags).await.would_start();
    let mut relay = Relay::spawn(&[&["run"], &flags[..]].concat());
    relay.until_state("streaming").await;
    outbox.writer().await.commit(&["a"]).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    match source {
        Source::MongoDb => {}
        Source::Postgres | Source::OldestPostgres => {
            outbox.execute(&format!("DROP OWNED BY {name}; DROP ROLE {name}")).await;
        }
        Source::MySql | Source::MariaDb => outbox.execute(&format!("DROP USER {name}")).await,
    }
}

/// Who may relay, and not mark.
async fn reader_of(outbox: &Outbox) -> (String, String) {
    let name: String = unique("u").chars().take(30).collect();
    let of_user = |url: String| {
        let (scheme, rest) = url.split_once("://").expect("a URL");
        let (_, address) = rest.split_once('@').expect("the server wants a login");
        format!("{scheme}://{name}:secret@{address}")
    };
    if outbox.source == Source::MongoDb {
        let database = outbox.mongodb();
        let of = |collection: &str, actions: &[&str]| doc! { "resource": { "db": database.name(), "collection": collection }, "actions": actions };
        let rights = [of("outbox", &["find", "changeStream"]), of("outboxd_checkpoint", &["find", "insert", "update"])];
        database.run(doc! { "createRole": &name, "privileges": &rights[..], "roles": [] }).await;
        database.run(doc! { "createUser": &name, "pwd": "secret", "roles": [&name] }).await;
        let url = database.url_of(&name, "secret");
        return (name, url);
    }
    let log = if outbox.source == Source::MariaDb { ", BINLOG MONITOR" } else { "" };
    let statements = match outbox.source.is_postgres() {
        true => vec![
            format!("CREATE ROLE {name} LOGIN REPLICATION PASSWORD 'secret'"),
            format!("GRANT SELECT, INSERT, UPDATE ON outboxd_checkpoint, outboxd_publishers TO {name}"),
        ],
        false => vec![
            format!("CREATE USER {name} IDENTIFIED BY 'secret'"),
            format!("GRANT REPLICATION SLAVE, REPLICATION CLIENT{log} ON *.* TO {name}"),
            format!("GRANT SELECT, INSERT, UPDATE ON outboxd_checkpoint TO {name}"),
            format!("GRANT SELECT ON outbox TO {name}"),
        ],
    };
    for statement in statements {
        outbox.execute(&statement).await;
    }
    let url = of_user(outbox.url());
    (name, url)
}

promised!(row_that_cannot_be_marked_holds_the_position_and_bounds_reading_until_it_can to postgres, mysql, mariadb);

/// Somebody holds a lock on a delivered row. It and what comes after it waits, and reading with it once the bound is
/// reached; nothing is lost when the lock goes.
async fn row_that_cannot_be_marked_holds_the_position_and_bounds_reading_until_it_can(source: Source) {
    let outbox = Outbox::create(source).await;
    outbox.add_status().await;
    let topic = Topic::create(1).await;
    let flags = ["--mark", "--checkpoint-interval", "100ms", "--max-in-flight", "1000"];
    let relay = outbox.streaming(&topic, &flags).await;
    let (writer, holder) = (outbox.writer().await, outbox.writer().await);
    writer.commit(&["a"]).await;
    outbox.until_all_marked(PATIENCE).await;
    outbox.until_confirmed(&outbox.end_of_log().await, PATIENCE).await;
    // Unacknowledged rows are in no one's way: the row is there, and locked, before it is delivered.
    relay.signal(nix::sys::signal::Signal::SIGSTOP);
    writer.commit(&["locked"]).await;
    let locked = outbox.end_of_log().await;
    holder.run("BEGIN").await;
    holder.run("UPDATE outbox SET payload = payload WHERE partition_key = 'locked'").await;
    relay.signal(nix::sys::signal::Signal::SIGCONT);
    topic.reader().take(2).await;
    let filler = source.json_object("'key', 'b', 'seq', n");
    for _ in 0..3 {
        let rows = source.numbers(10_000);
        writer.run(&format!("INSERT INTO outbox (partition_key, payload) SELECT 'b', {filler} FROM {rows}")).await;
    }
    // 10,000 is the bound for a window of this size; a chunk or two may have been read beyond it.
    eventually(PATIENCE, "reading waits for the marks", async || {
        (metric(&relay, "outboxd_unmarked_events").await >= 10_000).then_some(())
    })
    .await;
    let begin = Instant::now();
    let mut troubled = false;
    while begin.elapsed() < Duration::from_secs(14) {
        let waiting = metric(&relay, "outboxd_unmarked_events").await;
        assert!(waiting < 13_000, "{waiting} rows are kept");
        assert!(!outbox.stored().await.expect("a position").covers(&locked), "the position waits for the mark");
        troubled |= relay.get("/readyz").await.contains("not ready");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // PostgreSQL's session gives up waiting for a lock after ten seconds, and tries again; MySQL's waits on.
    assert_eq!(troubled, source == Source::Postgres, "{}", relay.status().await);
    assert_eq!(outbox.marked().await.0, 1);
    holder.run("ROLLBACK").await;
    outbox.until_all_marked(PATIENCE).await;
    eventually(PATIENCE, "it is ready again", async || relay.get("/readyz").await.starts_with("ok").then_some(()))
        .await;
    relay.stop().await;
    assert_eq!(topic.reader().rest().await.len(), 30_002, "nothing is delivered twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn marks_outlive_the_connections_that_they_are_written_over() {
    let outbox = Outbox::create(Source::Postgres).await;
    outbox.add_status().await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &["--mark"]).await;
    let writer = outbox.writer().await;
    for _ in 0..5 {
        for _ in 0..40 {
            writer.commit(&["a", "b", "c"]).await;
        }
        // Of all that outboxd has open, only the one that marks: nothing else notices.
        let ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                     WHERE datname = current_database() AND query LIKE 'UPDATE%published%' AND pid <> pg_backend_pid()";
        let ended = eventually(PATIENCE, "a connection marks rows", async || {
            outbox.text(ended).await.filter(|count| count != "0")
        });
        assert_eq!(ended.await, "1");
    }
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_all_marked(PATIENCE).await;
    assert!(metric(&relay, "outboxd_mark_failures_total").await >= 4, "{}", relay.log());
    assert_eq!(metric(&relay, "outboxd_retries_total").await, 0, "the stream went on all the while");
    relay.stop().await;
}

/// A commit that waits for a synchronous standby is in the log, and with the broker, before anybody sees its rows: an update
/// that looks for them then finds nothing.
#[tokio::test(flavor = "multi_thread")]
async fn row_that_is_delivered_before_it_is_visible_is_marked_when_it_is() {
    let server = PrivatePostgres::start(&["synchronous_commit=local", "synchronous_standby_names=nobody"]).await;
    let outbox = Outbox::create_at(Source::Postgres, &server.url()).await;
    outbox.add_status().await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &["--mark", "--checkpoint-interval", "100ms"]).await;
    let (writer, waiting) = (outbox.writer().await, outbox.writer().await);
    writer.commit(&["a"]).await;
    outbox.until_all_marked(PATIENCE).await;
    waiting.run("SET synchronous_commit = on").await;
    let commit = tokio::spawn(async move { waiting.commit(&["b"]).await });
    topic.reader().take(2).await;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        assert_eq!(outbox.marked().await, (1, 0), "nobody sees the row yet");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(metric(&relay, "outboxd_unmarked_events").await, 1);
    outbox.execute("ALTER SYSTEM SET synchronous_standby_names = ''").await;
    outbox.text("SELECT pg_reload_conf()").await;
    commit.await.expect("the commit ends");
    eventually(PATIENCE, "both rows are marked", async || (outbox.marked().await == (2, 0)).then_some(())).await;
    relay.stop().await;
}

#[tokio::test]
async fn marks_are_refused_where_there_is_nothing_to_mark_or_the_poller_does_it() {
    let url = "postgres://nobody@127.0.0.1:1/none";
    let run = |flags: &[&'static str]| [&["run", url, "--sink", "stdout", "--mark"], flags].concat();
    for (flags, words) in [
        (&["--layout", "debezium"][..], "--column published=COLUMN"),
        (&["--layout", "event-store"][..], "--column published=COLUMN"),
        (&["--capture", "poll"][..], "polling marks rows by itself"),
        (&["--capture", "poll", "--layout", "event-store"][..], "keeps positions instead"),
        (&["--message-prefix", "outbox"][..], "leave no row"),
        (&["--column", "id=/id"][..], "a column of its own"),
        (&["--layout", "debezium", "--column", "published=/at"][..], "a payload is not"),
    ] {
        let ended = outboxd(&run(flags)).await;
        assert!(ended.code == 2 && ended.stderr.contains(words), "{flags:?}: {ended:?}");
    }
}

promised!(table_of_any_layout_is_marked_in_a_column_that_was_named to postgres, mysql, mongodb);

async fn table_of_any_layout_is_marked_in_a_column_that_was_named(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let flags = ["--layout", "debezium", "--table", "events", "--mark", "--column", "published=sent_at"];
    let url = outbox.url();
    if source != Source::MongoDb {
        let moment = if source.is_postgres() { "timestamptz" } else { "DATETIME(6)" };
        outbox
            .execute(&format!(
                "CREATE TABLE events (id VARCHAR(36) PRIMARY KEY, aggregatetype VARCHAR(255), aggregateid VARCHAR(255),
                                      type VARCHAR(255), payload VARCHAR(255), sent_at {moment})"
            ))
            .await;
    }
    let mut relay = outbox.relay(&topic, &flags);
    relay.until_state("streaming").await;
    if source == Source::MongoDb {
        let events = outbox.mongodb().collection("events");
        let documents = (0..10).map(|n| doc! { "_id": n, "aggregatetype": "t", "aggregateid": "k", "payload": "p" });
        events.insert_many(documents).await.expect("documents are added");
        eventually(PATIENCE, "all are marked", async || {
            let marked = events.count_documents(doc! { "sent_at": { "$type": "date" } }).await;
            (marked.expect("documents are counted") == 10).then_some(())
        })
        .await;
    } else {
        let rows: Vec<_> = (0..10).map(|n| format!("('{n}', 't', 'k', 'made', 'p')")).collect();
        let columns = "(id, aggregatetype, aggregateid, type, payload)";
        outbox.execute(&format!("INSERT INTO events {columns} VALUES {}", rows.join(", "))).await;
        eventually(PATIENCE, "all are marked", async || {
            let marked = outbox.text("SELECT count(*) FROM events WHERE sent_at IS NOT NULL").await;
            (marked.as_deref() == Some("10")).then_some(())
        })
        .await;
    }
    relay.stop().await;
    let ended = outboxd(&[&["check", &url, "--sink", "stdout"], &flags[..]].concat()).await;
    assert_eq!(ended.code, 0, "{ended:?}");
}
