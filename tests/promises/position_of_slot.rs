//! `outboxd position` where it is PostgreSQL's own: slots, publishers that stand apart, and event stores.

use crate::support::shop::{self, Shop, add, closed, http, order, taken, taking, until_publisher, until_taken};
use crate::support::{Database, Relay, Server, Terminal, Topic, eventually, outboxd, show_lsn, unique};

/// A pipeline whose slot stands before one event.
async fn waiting() -> (Database, Topic) {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '1')").await;
    (database, topic)
}

async fn set(database: &Database, position: &str) -> (i32, String) {
    let ended = outboxd(&["position", "set", position, &database.url(), "--reason", "why", "--yes"]).await;
    (ended.code, format!("{}{}", ended.stdout, ended.stderr))
}

#[tokio::test]
async fn a_slot_cannot_go_back_and_it_is_said_what_can_be_done_instead() {
    let (database, topic) = waiting().await;
    let before = database.confirmed().await.expect("a slot");
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    let now = database.confirmed().await.expect("a slot");
    let (code, told) = set(&database, &show_lsn(before)).await;
    assert!(code == 4 && told.contains("cannot go back") && told.contains("--snapshot existing"), "{code}: {told}");
    assert!(!told.contains("pg_copy_logical_replication_slot"), "there is none to copy: {told}");
    assert_eq!(database.confirmed().await, Some(now));
    let recorded = "SELECT count(*) FROM pg_class WHERE relname = 'outboxd_audit'";
    assert_eq!(database.number(recorded).await, 0, "nothing was done, and nothing recorded");

    // Another slot that stands further back may be copied, as the remedy says.
    let (database, topic) = waiting().await;
    let older = unique("older");
    database.execute(&format!("SELECT pg_create_logical_replication_slot('{older}', 'pgoutput')")).await;
    let stands = format!("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{older}'");
    let back = database.lsn(&stands).await.expect("a position");
    database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '2')").await;
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    let mut reader = topic.reader();
    assert_eq!(reader.rest().await.len(), 2);
    let (code, told) = set(&database, &show_lsn(back)).await;
    assert!(code == 4 && told.contains("pg_copy_logical_replication_slot"), "{code}: {told}");
    let (_, steps) = told.split_once("a copy of it: ").expect("steps");
    let (steps, _) = steps.split_once("; and then").expect("steps");
    for statement in steps.split("; ") {
        database.execute(statement).await;
    }
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    let again: Vec<_> = reader.rest().await.into_iter().map(|record| record.value.unwrap_or_default()).collect();
    assert_eq!(again, ["2"], "what came after the other slot's position");
}

#[tokio::test]
async fn a_person_is_asked_and_may_say_no() {
    let (database, topic) = waiting().await;
    let url = database.url();
    let before = database.confirmed().await;
    let arguments = ["position", "set", "now", &url, "--reason", "why"];
    for (answer, changed) in [("n\n", false), ("\n", false), ("y\n", true)] {
        let mut terminal = Terminal::run(&arguments);
        let screen = terminal.until("[y/N] ").await;
        assert!(screen.contains("1 event, which will never be delivered"), "{screen}");
        terminal.press(answer);
        let (code, screen) = terminal.ends().await;
        assert_eq!(code, 0, "{screen}");
        assert_eq!(screen.contains("nothing was changed"), !changed, "{screen}");
        assert_eq!(database.confirmed().await > before, changed, "{screen}");
        let tables = database.number("SELECT count(*) FROM pg_class WHERE relname = 'outboxd_audit'").await;
        assert_eq!(tables, i64::from(changed), "what was not agreed to leaves no record: {screen}");
    }
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    assert_eq!(topic.reader().rest().await.len(), 0, "the event was skipped");
}

#[tokio::test]
async fn what_cannot_be_recorded_is_not_done() {
    let (database, _topic) = waiting().await;
    assert_eq!(outboxd(&["init", &database.url()]).await.code, 0);
    let role = unique("role");
    let grants = format!(
        "CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret';
         GRANT SELECT, INSERT, UPDATE ON outboxd_checkpoint, outboxd_publishers TO {role}"
    );
    database.execute(&grants).await;
    let url = database.url();
    let (_, server) = url.split_once('@').expect("a login");
    let url = format!("postgres://{role}:secret@{server}");
    let before = database.confirmed().await;
    let arguments = ["position", "set", "now", &url, "--reason", "why", "--yes"];
    let ended = outboxd(&arguments).await;
    assert!(ended.code == 3 && ended.stderr.contains("GRANT INSERT"), "{ended:?}");
    assert!(ended.stderr.contains("nothing was changed"), "{ended:?}");
    assert_eq!(database.confirmed().await, before);
    database.execute(&format!("GRANT INSERT ON outboxd_audit TO {role}")).await;
    let ended = outboxd(&arguments).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(database.confirmed().await > before);
    let who = database.text("SELECT database_user FROM outboxd_audit").await;
    assert_eq!(who.as_deref(), Some(role.as_str()));
    database.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn a_lost_slot_is_given_up_by_setting_the_position_to_now() {
    let (database, topic) = waiting().await;
    database.execute(&format!("SELECT pg_drop_replication_slot('{}')", database.slot())).await;
    Relay::start(&database, &topic, &[]).exits_with(4).await;
    let (code, told) = set(&database, "0/1").await;
    assert!(code == 4 && told.contains("position set now"), "{code}: {told}");
    let (code, told) = set(&database, "now").await;
    assert!(code == 0 && told.contains("is gone"), "{code}: {told}");
    database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '2')").await;
    Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
    let values: Vec<_> =
        topic.reader().rest().await.into_iter().map(|record| record.value.unwrap_or_default()).collect();
    assert_eq!(values, ["2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_publisher_is_set_ahead_or_back_and_the_others_notice_nothing() {
    let database = shop::outbox().await;
    let (fast, (slow, open)) = (taking().await, closed().await);
    let shop = Shop::new(&database, &(http("fast", &fast, "") + &http("slow", &slow, "")));
    let relay = shop.run(&database).await;
    add(&database, 0, 3).await;
    until_taken(&fast, 0..3).await;
    let after_three = until_publisher(&relay, "fast", "has come", |one| one["position"].is_string()).await;
    let after_three = after_three["position"].as_str().expect("a position").to_owned();
    add(&database, 3, 6).await;
    until_taken(&fast, 0..6).await;
    order(&relay, "pause", "shop/slow").await;
    relay.stop().await;

    let set = async |position: &str, publisher: &str| {
        let arguments = ["position", "set", position, "--config", shop.path(), "--publisher", publisher];
        let ended = outboxd(&[&arguments[..], &["--reason", "why", "--yes"]].concat()).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stderr
    };
    // The slow one keeps the log, so the fast one can go back in it.
    let told = set(&after_three, "fast").await;
    assert!(told.contains("3 events, which will be delivered once more"), "{told}");
    let relay = shop.run(&database).await;
    eventually(crate::support::PATIENCE, "three come again", async || (taken(&fast).len() == 9).then_some(())).await;
    assert_eq!(taken(&fast)[6..], [3, 4, 5]);
    relay.stop().await;

    let told = set("now", "slow").await;
    assert!(told.contains("6 events, which will never be delivered"), "{told}");
    open.store(true, std::sync::atomic::Ordering::Relaxed);
    let relay = shop.run(&database).await;
    order(&relay, "resume", "shop/slow").await;
    add(&database, 6, 7).await;
    until_taken(&slow, 6..7).await;
    until_taken(&fast, 6..7).await;
    assert_eq!(taken(&slow), [6]);
    relay.stop().await;
    assert_eq!(taken(&fast).len(), 10, "nothing else came again");
    let publishers = database.text("SELECT string_agg(publisher, ' ' ORDER BY id) FROM outboxd_audit").await;
    assert_eq!(publishers.as_deref(), Some("fast slow"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_store_is_set_ahead_and_back() {
    let database = Database::create(Server::Newest).await;
    let (url, topic) = (database.url(), Topic::create(1).await);
    let layout = ["--layout", "event-store", "--capture", "poll", "--name", "store"];
    assert_eq!(outboxd(&[&["init", &url][..], &layout].concat()).await.code, 0);
    let run = ["run", &url, "--brokers", &topic.brokers, "--topic", &topic.name, "--until-caught-up"];
    let run = [&run[..], &layout, &["--required-tags", "order"]].concat();
    let add = async |n: usize| {
        let insert = "INSERT INTO events (type, tags, data) VALUES ('Placed', '{order=1}', ";
        database.execute(&format!("{insert}'{n}')")).await;
    };
    let set = async |position: &str| {
        let arguments = ["position", "set", position, &url, "--brokers", &topic.brokers, "--topic", &topic.name];
        let ended = outboxd(&[&arguments[..], &layout, &["--reason", "why", "--yes"]].concat()).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stderr
    };
    let mut reader = topic.reader();
    let mut arrived = async || {
        Relay::spawn(&run).exits_with(0).await;
        reader.rest().await.into_iter().map(|record| record.value.unwrap_or_default()).collect::<Vec<_>>()
    };
    add(1).await;
    add(2).await;
    assert_eq!(arrived().await, ["1", "2"]);
    add(3).await;
    let told = set("now").await;
    assert!(told.contains("1 event, which will never be delivered"), "{told}");
    add(4).await;
    assert_eq!(arrived().await, ["4"]);
    let second = "SELECT transaction_id || ':' || position FROM events WHERE data = '2'";
    let second = database.text(second).await.expect("a position");
    let told = set(&second).await;
    assert!(told.contains("2 events, which will be delivered once more"), "{told}");
    assert_eq!(arrived().await, ["3", "4"]);
    assert_eq!(database.number("SELECT count(*) FROM outboxd_audit").await, 2);
}

#[tokio::test]
async fn a_polled_table_has_no_position_and_says_what_to_do() {
    let database = Database::create(Server::Newest).await;
    let url = database.url();
    assert_eq!(outboxd(&["init", &url, "--capture", "poll"]).await.code, 0);
    let ended = outboxd(&["position", "show", &url, "--capture", "poll"]).await;
    assert!(ended.code == 2 && ended.stderr.contains("status"), "{ended:?}");
}
