//! One source, many publishers: each gets what it selects, in order, and none is the other's trouble.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::support::shop::{
    Shop, add, closed, http, order, outbox, publisher, taken, taking, until_publisher, until_taken, write_log,
};
use crate::support::{Answer, Database, HttpServer, PATIENCE, Relay, Topic, eventually, outboxd, show_lsn, until_log};

/// Waits until it is noted that the publisher stands at this position or beyond.
async fn until_noted(database: &Database, publisher: &str, position: u64) {
    let query = format!(
        "SELECT ((document->'publishers'->'{publisher}'->>'position')::pg_lsn >= '{}')::text FROM outboxd_publishers",
        show_lsn(position)
    );
    eventually(PATIENCE, "the publisher's position is noted", async || {
        let exists = database.text("SELECT to_regclass('outboxd_publishers')::text").await;
        let noted = match exists {
            Some(_) => database.text(&query).await,
            None => None,
        };
        (noted.as_deref() == Some("true")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_publisher_gets_what_it_selects_by_tags_type_version_and_table() {
    let database = outbox().await;
    let topic = Topic::create(1).await;
    let [tagged, any, typed, versioned, audit] =
        [taking().await, taking().await, taking().await, taking().await, taking().await];
    let lines = [
        "table = [\"outbox\", \"audit\"]\ncolumn = { tags = \"labels\", version = \"version\" }\n".to_owned(),
        format!(
            "brokers = {:?}\n[pipeline.shop.publisher.all]\ntopic = {:?}\ntable = \"outbox\"\n",
            topic.brokers, topic.name
        ),
        http("tagged", &tagged, "required-tags = [\"public\", \"region=eu\"]"),
        http("any", &any, "any-of-tags = [\"vip\", \"region=us\"]"),
        http("typed", &typed, "only-type = [\"order.*\", \"*.paid\"]\ntable = \"outbox\""),
        http("versioned", &versioned, "only-version = \">=2\""),
        http("audit", &audit, "table = \"audit\"\nhttp-body = \"events\""),
    ]
    .concat();
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    database
        .execute(
            r#"INSERT INTO outbox (partition_key, event_type, payload, labels, version) VALUES
                 ('a', 'order.placed', '{"n": 1}', '{public,region=eu,"x y"}', 1),
                 ('a', 'invoice.paid', '{"n": 2}', '{public,region=us}', 2),
                 ('a', 'user.created', '{"n": 3}', '{vip}', 3),
                 ('a', 'user.deleted', '{"n": 4}', NULL, NULL);
               INSERT INTO audit (partition_key, event_type, payload, version) VALUES ('a', 'order.placed', '{"n": 5}', 1)"#,
        )
        .await;
    let records = topic.reader().take(4).await;
    until_taken(&tagged, [1]).await;
    until_taken(&any, [2, 3]).await;
    until_taken(&typed, [1, 2]).await;
    until_taken(&versioned, [2, 3]).await;
    let requests = audit.until("the audit row", |requests| !requests.is_empty()).await;
    let versions: Vec<_> = records.iter().map(|record| record.header("version")).collect();
    assert_eq!(versions, [Some("1"), Some("2"), Some("3"), None], "the version is a header");
    assert_eq!(requests[0].json()[0]["headers"]["version"], "1");
    let end = database.wal_position().await;
    database.until_confirmed(end, PATIENCE).await;
    assert_eq!(taken(&tagged), [1]);
    assert_eq!(taken(&any), [2, 3]);
    assert_eq!(taken(&typed), [1, 2]);
    assert_eq!(taken(&versioned), [2, 3]);
    assert_eq!(
        (publisher(&relay, "all").await["events"].clone(), relay.status().await["unmatched"].clone()),
        (4.into(), 0.into())
    );
    let metrics = relay.get("/metrics").await;
    assert!(metrics.contains("outboxd_events_total{pipeline=\"shop\",publisher=\"any\"} 2"), "{metrics}");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tags_may_be_a_json_object_or_the_headers_and_what_nobody_wants_is_counted() {
    let database = outbox().await;
    let server = taking().await;
    let shop = Shop::new(&database, &http("eu", &server, "required-tags = \"region=eu\""));
    let relay = shop.run(&database).await;
    database
        .execute(
            r#"INSERT INTO outbox (partition_key, payload, headers) VALUES
                 ('a', '{"n": 1}', '{"region": "eu", "other": 1}'), ('a', '{"n": 2}', '{"region": "us"}'), ('a', '{"n": 3}', NULL)"#,
        )
        .await;
    until_taken(&server, [1]).await;
    let unmatched = async || (relay.status().await["unmatched"] == 2).then_some(());
    eventually(PATIENCE, "two are counted that nobody wants", unmatched).await;
    assert_eq!(taken(&server), [1]);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_publisher_stays_paused_over_a_restart_holds_nobody_back_and_a_restart_repeats_nothing_to_the_others()
{
    let database = outbox().await;
    let (busy, resting) = (taking().await, taking().await);
    let shop = Shop::new(&database, &(http("busy", &busy, "") + &http("resting", &resting, "max-in-flight = 10")));
    let relay = shop.run(&database).await;
    add(&database, 0, 10).await;
    until_taken(&resting, 0..10).await;
    order(&relay, "pause", "shop/resting").await;
    let paused_at = database.wal_position().await;
    // Far more than the window of the one that rests.
    add(&database, 10, 2000).await;
    until_taken(&busy, 0..2000).await;
    let passed = database.wal_position().await;
    until_noted(&database, "busy", paused_at + 1).await;
    assert_eq!(
        (taken(&resting), publisher(&relay, "resting").await["state"].clone()),
        ((0..10).collect(), "paused".into())
    );
    assert!(database.confirmed().await.is_some_and(|confirmed| confirmed < passed), "its log is kept");
    // As after a crash.
    relay.kill();

    let relay = shop.run(&database).await;
    add(&database, 2000, 2010).await;
    until_taken(&busy, 0..2010).await;
    assert_eq!(publisher(&relay, "resting").await["state"], "paused");
    assert_eq!(taken(&resting), (0..10).collect::<Vec<_>>());
    order(&relay, "resume", "shop/resting").await;
    until_taken(&resting, 0..2010).await;
    let end = database.wal_position().await;
    database.until_confirmed(end, PATIENCE).await;
    relay.stop().await;
    assert_eq!(taken(&resting), (0..2010).collect::<Vec<_>>(), "once each, in order");
    let mut repeated = taken(&busy);
    assert!(repeated.len() <= 2010 + 100, "{} of 2010 were repeated", repeated.len() - 2010);
    repeated.sort_unstable();
    repeated.dedup();
    assert_eq!(repeated.len(), 2010);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_failure_of_one_publisher_never_reaches_another_and_each_has_its_own_dead_letters() {
    let database = outbox().await;
    let dead = Topic::create(1).await;
    let picky = HttpServer::start(|request| match request.json().to_string().contains("\"n\":7}") {
        true => Answer::Status(400),
        false => Answer::Status(200),
    })
    .await;
    let (parking, halting, fine) = (&picky, &picky, taking().await);
    let lines = [
        http(
            "parking",
            parking,
            &format!(
                "http-path = \"/a\"\nmax-retries = 0\nbrokers = {:?}\ndead-letter = \"topic:{}\"",
                dead.brokers, dead.name
            ),
        ),
        http("halting", halting, "http-path = \"/b\"\nmax-retries = 1"),
        http("fine", &fine, ""),
    ]
    .concat();
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    add(&database, 0, 50).await;
    until_taken(&fine, 0..50).await;
    let failed = until_publisher(&relay, "halting", "has failed", |one| one["state"] == "failed").await;
    assert!(failed["last_error"].as_str().is_some_and(|error| error.contains("400")), "{failed}");
    let letters = dead.reader().take(1).await;
    assert_eq!(letters[0].value.as_deref(), Some("{\"n\": 7}"));
    assert_eq!(letters[0].header("outboxd.pipeline"), Some("shop"));
    add(&database, 50, 60).await;
    until_taken(&fine, 50..60).await;
    let to = |path: &str| picky.taken().iter().filter(|request| request.path == path).count();
    assert!(to("/a") > 0);
    let parked = until_publisher(&relay, "parking", "goes on", |one| one["events"] == 60).await;
    assert_eq!((parked["state"].clone(), parked["dead_letters"].clone()), ("streaming".into(), 1.into()));
    assert_eq!(relay.status().await["state"], "streaming");
    assert_eq!(taken(&fine), (0..60).collect::<Vec<_>>(), "once each: nobody's trouble made it begin again");
    // What it did not get is still there for it.
    let end = database.wal_position().await;
    assert!(database.confirmed().await.is_some_and(|confirmed| confirmed < end));
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_whose_broker_is_away_is_tried_on_its_own_and_gets_everything_when_it_is_back() {
    let database = outbox().await;
    let fine = taking().await;
    let mut kafka = crate::support::PrivateKafka::start(1).await;
    let topic = Topic::create_at(&kafka.brokers(), 1, &[]).await;
    kafka.kill(1);
    let lines = format!(
        "{}[pipeline.shop.publisher.kafka]\nbrokers = {:?}\ntopic = {:?}\n",
        http("fine", &fine, ""),
        topic.brokers,
        topic.name
    );
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    add(&database, 0, 100).await;
    until_taken(&fine, 0..100).await;
    until_publisher(&relay, "kafka", "is tried again", |one| one["state"] == "retrying").await;
    kafka.restart(1).await;
    let records = topic.reader().take(100).await;
    assert_eq!(records.len(), 100);
    until_publisher(&relay, "kafka", "takes part", |one| one["state"] == "streaming").await;
    add(&database, 100, 110).await;
    until_taken(&fine, 100..110).await;
    relay.stop().await;
    assert_eq!(taken(&fine), (0..110).collect::<Vec<_>>(), "once each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_publisher_holds_the_others_back_at_last_and_status_says_which() {
    let database = outbox().await;
    let open = Arc::new(AtomicBool::new(false));
    let says = open.clone();
    let slow = HttpServer::start(move |_| match says.load(Ordering::Relaxed) {
        true => Answer::Status(200),
        false => Answer::With(503, "Retry-After", "1".to_owned()),
    })
    .await;
    let fine = taking().await;
    let shop = Shop::new(&database, &(http("slow", &slow, "max-in-flight = 50") + &http("fine", &fine, "")));
    let relay = shop.run(&database).await;
    for from in 0..10 {
        add(&database, from * 20, from * 20 + 20).await;
    }
    let slow_one = until_publisher(&relay, "slow", "holds the others back", |one| one["holds_back"] == true).await;
    assert_eq!(publisher(&relay, "fine").await["holds_back"], false, "{slow_one}");
    assert!(taken(&fine).len() < 200, "the reading waits");
    open.store(true, Ordering::Relaxed);
    until_taken(&slow, 0..200).await;
    until_taken(&fine, 0..200).await;
    relay.stop().await;
    assert_eq!(taken(&slow), (0..200).collect::<Vec<_>>());
    assert_eq!(taken(&fine), (0..200).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn past_max_retained_a_paused_publisher_has_failed_and_its_log_is_let_go_with_a_gap_report() {
    let database = outbox().await;
    let (fine, resting) = (taking().await, taking().await);
    let lines = http("fine", &fine, "") + &http("resting", &resting, "max-retained = \"8MiB\"");
    let shop = Shop::new(&database, &lines);
    let mut relay = shop.run(&database).await;
    add(&database, 0, 5).await;
    until_taken(&resting, 0..5).await;
    order(&relay, "pause", "shop/resting").await;
    add(&database, 5, 10).await;
    until_taken(&fine, 5..10).await;
    let end = database.wal_position().await;
    assert!(database.confirmed().await.is_some_and(|confirmed| confirmed < end), "the server keeps it all");
    write_log(&database, 12).await;
    let failed = until_publisher(&relay, "resting", "has failed", |one| one["state"] == "failed").await;
    let report = failed["last_error"].as_str().expect("a gap report").to_owned();
    assert!(report.contains("max-retained") && report.contains("was let go"), "{report}");
    until_log(&mut relay, "was let go").await;
    let end = database.wal_position().await;
    database.until_confirmed(end, PATIENCE).await;
    // A restart does not forget it.
    relay.stop().await;
    let relay = shop.run(&database).await;
    assert_eq!(publisher(&relay, "resting").await["state"], "failed");
    add(&database, 10, 15).await;
    until_taken(&fine, 10..15).await;
    let end = database.wal_position().await;
    database.until_confirmed(end, PATIENCE).await;
    order(&relay, "resume", "shop/resting").await;
    until_publisher(&relay, "resting", "goes on", |one| one["state"] == "streaming").await;
    add(&database, 15, 20).await;
    until_taken(&resting, 15..20).await;
    relay.stop().await;
    assert_eq!(taken(&resting), [0, 1, 2, 3, 4, 15, 16, 17, 18, 19], "what it missed is missed, as was reported");
    assert_eq!(taken(&fine), (0..20).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_max_retained_a_paused_pipeline_keeps_its_log_and_says_how_much() {
    let database = outbox().await;
    let server = taking().await;
    let shop = Shop::new(&database, &format!("sink = {:?}", server.url()));
    let mut relay = shop.run(&database).await;
    order(&relay, "pause", "shop").await;
    add(&database, 0, 5).await;
    write_log(&database, 80).await;
    until_log(&mut relay, "keeps the server from recycling its log").await;
    assert_eq!(relay.status().await["state"], "paused");
    relay.kill();
    let mut relay = shop.spawn();
    relay.until_state("paused").await;
    assert_eq!(relay.get("/readyz").await, "ok\n");
    assert_eq!(taken(&server), Vec::<u64>::new());
    order(&relay, "resume", "shop").await;
    until_taken(&server, 0..5).await;
    relay.until_state("streaming").await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_pipeline_past_max_retained_ends_with_4_and_a_gap_report_and_frees_the_log() {
    let database = outbox().await;
    let server = taking().await;
    let shop = Shop::new(&database, &format!("sink = {:?}\nmax-retained = \"4MiB\"", server.url()));
    let mut relay = shop.run(&database).await;
    order(&relay, "pause", "shop").await;
    add(&database, 0, 5).await;
    write_log(&database, 8).await;
    relay.exits_with(4).await;
    assert!(relay.log().contains("was let go") && relay.log().contains("the slot was dropped"), "{}", relay.log());
    assert_eq!(database.slots().await, 0);
    // Nothing is begun anew in silence.
    let mut again = shop.spawn();
    again.exits_with(4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_whose_broker_is_away_from_the_start_keeps_no_more_than_max_retained() {
    let database = outbox().await;
    let lines = "brokers = \"127.0.0.1:1\"\ntopic = \"orders\"\nmax-retained = \"4MiB\"";
    let shop = Shop::new(&database, lines);
    let made = outboxd(&["init", "--config", shop.path()]).await;
    assert_eq!(made.code, 0, "{}", made.stderr);
    assert_eq!(database.slots().await, 1);
    let mut relay = shop.spawn();
    // Others that use the same server write log too.
    write_log(&database, 8).await;
    relay.exits_with(4).await;
    assert!(relay.log().contains("max-retained"), "{}", relay.log());
    assert_eq!(database.slots().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_with_its_own_position_has_a_slot_of_its_own_and_depends_on_nobody() {
    let database = outbox().await;
    let (shared, own) = (taking().await, taking().await);
    let lines = http("shared", &shared, "") + &http("own", &own, "isolation = \"own-position\"");
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    let slots = "SELECT string_agg(slot_name, ' ' ORDER BY slot_name) FROM pg_replication_slots
                 WHERE database = current_database() AND active";
    let expected = format!("{0} {0}_own", database.slot());
    eventually(PATIENCE, "both slots are read", async || {
        (database.text(slots).await.as_deref() == Some(&expected)).then_some(())
    })
    .await;
    order(&relay, "pause", "shop").await;
    add(&database, 0, 20).await;
    until_taken(&own, 0..20).await;
    assert_eq!(taken(&shared), Vec::<u64>::new());
    order(&relay, "pause", "shop-own").await;
    order(&relay, "resume", "shop").await;
    until_taken(&shared, 0..20).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_may_not_cannot_pause_and_who_is_not_there_is_said() {
    let database = outbox().await;
    let server = taking().await;
    let shop = Shop::new(&database, &format!("sink = {:?}", server.url()));
    let mut relay = Relay::spawn(&["run", "--config", shop.path(), "--admin-token", "s3cret"]);
    relay.until_streaming(&database).await;
    relay.until_state("streaming").await;
    let admin = relay.admin().await;
    for (arguments, said) in [
        (vec!["pause", "shop"], "admin token"),
        (vec!["pause", "shop", "--admin-token", "wrong"], "admin token"),
        (vec!["pause", "nobody", "--admin-token", "s3cret"], "no pipeline `nobody`"),
        (vec!["pause", "shop/nobody", "--admin-token", "s3cret"], "no publisher `nobody`"),
    ] {
        let ended = outboxd(&[&arguments[..], &["--admin", &admin]].concat()).await;
        assert!(ended.code == 1 && ended.stderr.contains(said), "{arguments:?}: {}", ended.stderr);
    }
    assert_eq!(relay.status().await["state"], "streaming");
    let paused = outboxd(&["pause", "shop", "--admin-token", "s3cret", "--admin", &admin]).await;
    assert_eq!(paused.code, 0, "{}", paused.stderr);
    assert_eq!(relay.status().await["state"], "paused");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_tells_what_publishers_need_and_init_makes_it() {
    let database = outbox().await;
    let server = taking().await;
    let lines = "no-create = true\n".to_owned() + &http("one", &server, "") + &http("other", &server, "");
    let shop = Shop::new(&database, &lines);
    let checked = outboxd(&["check", "--config", shop.path()]).await;
    assert!(checked.code == 3 && checked.stdout.contains("outboxd_publishers does not exist"), "{}", checked.stdout);
    let mut refused = shop.spawn();
    refused.exits_with(3).await;
    let made = outboxd(&["init", "--config", shop.path()]).await;
    assert_eq!(made.code, 0, "{}", made.stderr);
    let checked = outboxd(&["check", "--config", shop.path()]).await;
    assert!(checked.code == 0 && checked.stdout.contains("outboxd_publishers can be read"), "{}", checked.stdout);
    assert!(
        checked.stdout.contains("pipeline shop, publisher other\n"),
        "each publisher's sink is looked at: {}",
        checked.stdout
    );
    shop.run(&database).await.stop().await;
}

#[tokio::test]
async fn a_wrong_publisher_is_exit_2_with_its_name() {
    let database = outbox().await;
    let lines = "[pipeline.shop.publisher.a]\nsink = \"http://127.0.0.1:1\"\nonly-version = \">=x\"\n";
    let ended = outboxd(&["run", "--config", Shop::new(&database, lines).path(), "--admin", "off"]).await;
    assert!(ended.code == 2 && ended.stderr.contains("publisher `a`"), "{}: {}", ended.code, ended.stderr);
    let lines = "[pipeline.shop.publisher.a]\nsink = \"http://127.0.0.1:1\"\nslot = \"mine\"\ntabel = \"x\"\n";
    let ended = outboxd(&["run", "--config", Shop::new(&database, lines).path(), "--admin", "off"]).await;
    assert!(ended.code == 2 && ended.stderr.contains("did you mean `table`"), "{}: {}", ended.code, ended.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_failed_publisher_is_kept_when_another_is_let_go() {
    let database = outbox().await;
    let (refusing, resting) = (HttpServer::start(|_| Answer::Status(400)).await, taking().await);
    let lines = http("refused", &refusing, "max-retries = 0") + &http("resting", &resting, "max-retained = \"4MiB\"");
    let shop = Shop::new(&database, &lines);
    let mut relay = shop.run(&database).await;
    order(&relay, "pause", "shop/resting").await;
    add(&database, 0, 5).await;
    until_publisher(&relay, "refused", "has failed", |one| one["state"] == "failed").await;
    write_log(&database, 8).await;
    // Nobody is left; the highest code is that of the event that cannot be delivered.
    relay.exits_with(6).await;
    assert!(relay.log().contains("was let go"), "{}", relay.log());
    assert_eq!(database.slots().await, 1, "what was refused is still there to be delivered");
}

#[tokio::test(flavor = "multi_thread")]
async fn until_caught_up_leaves_out_who_is_paused_and_ends_with_the_code_of_who_has_failed() {
    let database = outbox().await;
    let (refusing, resting, fine) = (HttpServer::start(|_| Answer::Status(400)).await, taking().await, taking().await);
    let both = http("fine", &fine, "") + &http("resting", &resting, "");
    let shop = Shop::new(&database, &both);
    let relay = shop.run(&database).await;
    order(&relay, "pause", "shop/resting").await;
    relay.stop().await;
    add(&database, 0, 5).await;
    let mut ambiguous = Relay::spawn(&["run", "--config", shop.path(), "--sink", "stdout"]);
    ambiguous.exits_with(2).await;
    Relay::spawn(&["run", "--config", shop.path(), "--until-caught-up"]).exits_with(0).await;
    assert_eq!((taken(&fine), taken(&resting)), ((0..5).collect(), Vec::new()));
    let shop = Shop::new(
        &database,
        &format!("until-caught-up = true\n{both}{}", http("refused", &refusing, "max-retries = 0")),
    );
    add(&database, 5, 6).await;
    shop.spawn().exits_with(6).await;
    assert_eq!(taken(&fine), (0..6).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_the_broker_of_its_dead_letters_can_be_paused_and_the_others_go_on() {
    let database = outbox().await;
    let (stuck, fine) = (taking().await, taking().await);
    let mut kafka = crate::support::PrivateKafka::start(1).await;
    let dead = Topic::create_at(&kafka.brokers(), 1, &[]).await;
    let parking = format!(
        "brokers = {:?}\ndead-letter = \"topic:{}\"\nhttp-route = {{ \"order.placed\" = \"/orders\" }}",
        dead.brokers, dead.name
    );
    let shop = Shop::new(&database, &(http("stuck", &stuck, &parking) + &http("fine", &fine, "")));
    let relay = shop.run(&database).await;
    kafka.kill(1);
    database
        .execute("INSERT INTO outbox (partition_key, event_type, payload) VALUES ('a', 'unknown', '{\"n\": 100}')")
        .await;
    add(&database, 0, 5).await;
    until_publisher(&relay, "stuck", "holds the others back", |one| one["holds_back"] == true).await;
    order(&relay, "pause", "shop/stuck").await;
    until_taken(&fine, 0..5).await;
    kafka.restart(1).await;
    order(&relay, "resume", "shop/stuck").await;
    until_taken(&stuck, 0..5).await;
    assert_eq!(dead.reader().take(1).await[0].value.as_deref(), Some("{\"n\": 100}"));
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_the_server_ends_keep_nobody_paused() {
    let database = outbox().await;
    let (one, other) = (taking().await, taking().await);
    let shop = Shop::new(&database, &(http("one", &one, "") + &http("other", &other, "")));
    let mut relay = shop.run(&database).await;
    order(&relay, "pause", "shop").await;
    add(&database, 0, 5).await;
    let ended = database
        .number(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
             WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
        )
        .await;
    assert!(ended >= 2, "{ended} sessions");
    let admin = relay.admin().await;
    eventually(PATIENCE, "it is resumed", async || {
        (outboxd(&["resume", "shop", "--admin", &admin]).await.code == 0).then_some(())
    })
    .await;
    until_taken(&one, 0..5).await;
    until_taken(&other, 0..5).await;
    relay.until_state("streaming").await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_that_is_away_is_told_in_status_and_readyz() {
    let database = outbox().await;
    let (server, open) = closed().await;
    let shop = Shop::new(&database, &format!("sink = {:?}", server.url()));
    let relay = shop.run(&database).await;
    add(&database, 0, 5).await;
    let told = async || (relay.status().await["last_error"].as_str()?.contains("503")).then_some(());
    eventually(PATIENCE, "the trouble is told", told).await;
    assert!(relay.get("/readyz").await.contains("503"));
    open.store(true, Ordering::Relaxed);
    until_taken(&server, 0..5).await;
    let well = async || (relay.get("/readyz").await == "ok\n").then_some(());
    eventually(PATIENCE, "it is well again", well).await;
    assert_eq!(relay.status().await["last_error"], Value::Null);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_two_tables_with_the_same_ids_have_idempotency_keys_of_their_own() {
    let database = outbox().await;
    let tables = ["orders", "invoices", "archive.invoices"];
    database.execute("CREATE SCHEMA archive").await;
    for table in tables {
        let create = format!("CREATE TABLE {table} (id bigint PRIMARY KEY, partition_key text, payload jsonb)");
        database.execute(&create).await;
    }
    let ((single, open_single), (pairs, open_pairs)) = (closed().await, closed().await);
    let lines = "table = [\"orders\", \"invoices\", \"archive.invoices\"]\n".to_owned()
        + &http("single", &single, "http-body = \"single\"")
        + &http("pairs", &pairs, "http-batch = 2");
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    let insert = async |table: &str, from: usize, to: usize| {
        let insert = format!(
            "INSERT INTO {table} SELECT n, 'a', jsonb_build_object('n', n) FROM generate_series({from}, {to} - 1) n"
        );
        database.execute(&insert).await;
    };
    // While the first one is refused the others gather, so that it is known which of them go together.
    insert("orders", 0, 1).await;
    single.until("the first row", |requests| !requests.is_empty()).await;
    pairs.until("the first row", |requests| !requests.is_empty()).await;
    for table in tables {
        insert(table, 1, 3).await;
    }
    until_publisher(&relay, "pairs", "has all of them", |one| one["in_flight"] == 7).await;
    for open in [open_single, open_pairs] {
        open.store(true, Ordering::Relaxed);
    }
    let keys = async |server: &HttpServer, requests: usize| {
        let enough = move |server: &HttpServer| server.taken().len() == requests;
        eventually(PATIENCE, "all are taken", async || enough(server).then_some(())).await;
        let taken = server.taken();
        taken.iter().map(|request| request.header("idempotency-key").expect("a key").to_owned()).collect::<Vec<_>>()
    };
    let distinct = |keys: &[String]| keys.iter().collect::<HashSet<_>>().len();
    let alone = keys(&single, 7).await;
    assert_eq!((&alone[0], distinct(&alone)), (&"orders/0".to_owned(), 7), "{alone:?}");
    let together = keys(&pairs, 4).await;
    assert_eq!(taken(&pairs), [0, 1, 2, 1, 2, 1, 2], "two rows of a table go together");
    assert_eq!(distinct(&together), 4, "{together:?}");
    relay.stop().await;
}
