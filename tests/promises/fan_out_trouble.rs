//! Publishers that fail, hang, or are told something at a bad moment: what they do to each other then, which is nothing.

use std::sync::atomic::Ordering;

use serde_json::Value;

use crate::support::shop::{
    Shop, add, closed, http, order, outbox, outbox_at, publisher, taken, taking, until_publisher, until_taken,
    write_log,
};
use crate::support::{
    Answer, HttpServer, MIB, PATIENCE, PrivatePostgres, Relay, Request, StopMode, eventually, outboxd,
};

async fn states<const N: usize>(relay: &Relay, names: [&str; N]) -> [Value; N] {
    let mut states = [const { Value::Null }; N];
    for (state, name) in states.iter_mut().zip(names) {
        *state = publisher(relay, name).await["state"].clone();
    }
    states
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_is_paused_while_existing_rows_are_delivered_keeps_only_what_the_server_keeps_for_it() {
    // A server of its own: nobody else's log counts.
    let server = PrivatePostgres::start(&[]).await;
    let database = outbox_at(&server.url()).await;
    let ((slow, open), resting) = (closed().await, taking().await);
    let lines = "snapshot = \"existing\"\n".to_owned()
        + &http("slow", &slow, "max-in-flight = 10")
        + &http("resting", &resting, "max-retained = \"8MiB\"");
    // There is no position before the existing rows are delivered, and the log is longer than the limit.
    write_log(&database, 10).await;
    add(&database, 0, 5000).await;
    assert!(database.wal_position().await > 8 * MIB);
    let shop = Shop::new(&database, &lines);
    let mut relay = shop.run(&database).await;
    until_publisher(&relay, "slow", "holds the others back", |one| one["holds_back"] == true).await;
    order(&relay, "pause", "shop/resting").await;
    let begun = relay.status().await["retained_bytes"].as_u64().expect("a number");
    assert!(begun < 4 * MIB, "{begun}");
    // The server is looked at again and again meanwhile.
    for mebibyte in 1..=2 {
        write_log(&database, 1).await;
        let seen = async || (relay.status().await["retained_bytes"].as_u64()? >= begun + mebibyte * MIB).then_some(());
        eventually(PATIENCE, "it is seen how much log is kept", seen).await;
    }
    assert_eq!(publisher(&relay, "resting").await["state"], "paused");
    open.store(true, Ordering::Relaxed);
    until_taken(&slow, 0..5000).await;
    order(&relay, "resume", "shop/resting").await;
    until_taken(&resting, 0..5000).await;
    relay.until_state("streaming").await;
    assert!(!relay.log().contains("was let go"), "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_had_failed_before_a_restart_counts_as_failed_from_the_start() {
    let database = outbox().await;
    let (fine, resting) = (taking().await, taking().await);
    let lines = http("fine", &fine, "") + &http("resting", &resting, "max-retained = \"4MiB\"");
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    let failures = async |relay: &Relay| {
        let metrics = relay.get("/metrics").await;
        let line = metrics.lines().find_map(|line| {
            line.strip_prefix("outboxd_failures_total{pipeline=\"shop\",publisher=\"resting\"} ").map(str::to_owned)
        });
        line.unwrap_or_else(|| panic!("{metrics}"))
    };
    assert_eq!(failures(&relay).await, "0");
    order(&relay, "pause", "shop/resting").await;
    add(&database, 0, 5).await;
    until_taken(&fine, 0..5).await;
    write_log(&database, 8).await;
    until_publisher(&relay, "resting", "has failed", |one| one["state"] == "failed").await;
    assert_eq!(failures(&relay).await, "1");
    relay.kill();

    let relay = shop.run(&database).await;
    let failed = publisher(&relay, "resting").await;
    assert_eq!(failed["state"], "failed");
    assert!(failed["last_error"].as_str().is_some_and(|report| report.contains("was let go")), "{failed}");
    assert_eq!(failures(&relay).await, "1");
    // Beginning anew for another's sake is not another failure.
    order(&relay, "pause", "shop/fine").await;
    order(&relay, "resume", "shop/fine").await;
    until_publisher(&relay, "fine", "takes part again", |one| one["state"] == "streaming").await;
    assert_eq!(states(&relay, ["fine", "resting"]).await, ["streaming", "failed"]);
    assert_eq!(failures(&relay).await, "1");
    relay.stop().await;

    Relay::spawn(&["run", "--config", shop.path(), "--until-caught-up"]).exits_with(4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_nobody_took_in_time_is_not_carried_out_later() {
    let database = outbox().await;
    let (one, other) = (taking().await, taking().await);
    let shop = Shop::new(&database, &(http("one", &one, "") + &http("other", &other, "")));
    let relay = shop.run(&database).await;
    let admin = relay.admin().await;
    let lock = database.connect().await;
    lock.batch_execute("BEGIN; LOCK TABLE outboxd_publishers IN ACCESS EXCLUSIVE MODE").await.expect("it is locked");
    let arguments = ["pause", "shop/one", "--admin", &admin];
    let pausing_one = outboxd(&arguments);
    let pausing_other = async {
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outboxd_publishers'::regclass";
        eventually(PATIENCE, "the first order waits", async || (database.number(waiting).await > 0).then_some(()))
            .await;
        outboxd(&["pause", "shop/other", "--admin", &admin]).await
    };
    // The first cannot be noted, and the second waits for the first.
    let (_, late) = tokio::join!(pausing_one, pausing_other);
    assert!(late.code == 1 && late.stderr.contains("no answer in time"), "{late:?}");
    lock.batch_execute("COMMIT").await.expect("it is unlocked");
    // Orders are obeyed in turn: when this one is done, that one was looked at.
    eventually(PATIENCE, "the first is paused", async || (outboxd(&arguments).await.code == 0).then_some(())).await;
    assert_eq!(states(&relay, ["one", "other"]).await, ["paused", "streaming"]);
    add(&database, 0, 5).await;
    until_taken(&other, 0..5).await;
    relay.stop().await;
    assert_eq!(taken(&one), Vec::<u64>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_while_the_source_is_away_is_refused_and_changes_nothing() {
    let mut server = PrivatePostgres::start(&[]).await;
    let mut database = outbox_at(&server.url()).await;
    let (one, other) = (taking().await, taking().await);
    let shop = Shop::new(&database, &(http("one", &one, "") + &http("other", &other, "")));
    let mut relay = shop.run(&database).await;
    add(&database, 0, 5).await;
    until_taken(&one, 0..5).await;
    server.stop(StopMode::Immediate).await;
    relay.until_state("retrying").await;
    let refused = outboxd(&["pause", "shop/one", "--admin", &relay.admin().await]).await;
    assert!(refused.code == 1 && refused.stderr.contains("try again when it streams"), "{refused:?}");
    server.resume().await;
    database.reconnect().await;
    relay.until_state("streaming").await;
    add(&database, 5, 10).await;
    until_taken(&one, 5..10).await;
    until_taken(&other, 0..10).await;
    assert_eq!(states(&relay, ["one", "other"]).await, ["streaming", "streaming"]);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_paused_is_known_by_name_whoever_else_comes_or_goes() {
    let database = outbox().await;
    let [first, middle, last] = [taking().await, taking().await, taking().await];
    let pair = http("middle", &middle, "") + &http("other", &last, "");
    let relay = Shop::new(&database, &pair).run(&database).await;
    order(&relay, "pause", "shop/middle").await;
    relay.stop().await;
    // In every order there is, it has another place now.
    let more = http("last", &last, "") + &http("alone", &first, "") + &http("middle", &middle, "");
    let relay = Shop::new(&database, &more).run(&database).await;
    assert_eq!(states(&relay, ["alone", "last", "middle"]).await, ["streaming", "streaming", "paused"]);
    add(&database, 0, 5).await;
    until_taken(&first, 0..5).await;
    until_taken(&last, 0..5).await;
    assert_eq!(taken(&middle), Vec::<u64>::new());
    order(&relay, "resume", "shop/middle").await;
    until_taken(&middle, 0..5).await;
    relay.stop().await;
}

/// A publisher that refuses everything, and ends with code 6.
async fn refusing() -> (HttpServer, String) {
    let server = HttpServer::start(|_| Answer::Status(400)).await;
    let lines = http("refused", &server, "max-retries = 0");
    (server, lines)
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_the_sink_of_a_publisher_that_hangs_when_the_last_one_has_failed() {
    let database = outbox().await;
    let (_refusing, refused) = refusing().await;
    let hanging = HttpServer::start(|_| Answer::Silence).await;
    // Only an end without waiting comes in time.
    let lines = "shutdown-timeout = \"1h\"\n".to_owned()
        + &refused
        + &http("hanging", &hanging, "http-timeout = \"1h\"\nmax-retained = \"4MiB\"");
    let shop = Shop::new(&database, &lines);
    let mut relay = shop.run(&database).await;
    add(&database, 0, 5).await;
    hanging.until("it hangs", |requests| !requests.is_empty()).await;
    until_publisher(&relay, "refused", "has failed", |one| one["state"] == "failed").await;
    order(&relay, "pause", "shop/hanging").await;
    write_log(&database, 8).await;
    relay.exits_with(6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_event_ends_a_pipeline_without_waiting_for_what_can_no_longer_be_delivered() {
    let database = outbox().await;
    let picky = HttpServer::start(|request| match request.json().to_string().contains("\"n\":50}") {
        true => Answer::Status(400),
        false => Answer::Status(200),
    })
    .await;
    let lines =
        format!("sink = {:?}\nlanes = 4\nhttp-batch = 10\nmax-retries = 0\nshutdown-timeout = \"1h\"", picky.url());
    let shop = Shop::new(&database, &lines);
    let mut relay = shop.run(&database).await;
    add(&database, 0, 1000).await;
    relay.exits_with(6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_by_a_publisher_of_before_once_it_has_begun_anew() {
    let database = outbox().await;
    let ((slow, open), fine) = (closed().await, taking().await);
    let shop = Shop::new(&database, &(http("slow", &slow, "http-batch = 10") + &http("fine", &fine, "")));
    let mut relay = shop.run(&database).await;
    add(&database, 0, 100).await;
    until_taken(&fine, 0..100).await;
    slow.until("it is tried", |requests| !requests.is_empty()).await;
    order(&relay, "pause", "shop/slow").await;
    order(&relay, "resume", "shop/slow").await;
    // Its one lane keeps its connection, so a new one is that of the new lane.
    let of_new = |requests: &[Request]| requests.iter().filter(|one| one.connection > 0).count();
    let requests = slow.until("the new one tries for seconds", |requests| of_new(requests) >= 6).await;
    let begun = requests.iter().position(|one| one.connection > 0).expect("one of the new lane");
    assert!(requests[begun..].iter().all(|one| one.connection == 1), "the old lane goes on");
    open.store(true, Ordering::Relaxed);
    until_taken(&slow, 0..100).await;
    add(&database, 100, 110).await;
    until_taken(&slow, 100..110).await;
    relay.until_state("streaming").await;
    relay.stop().await;
    assert_eq!(taken(&slow), (0..110).collect::<Vec<_>>(), "once each, in order");
    assert_eq!(taken(&fine), (0..110).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_resumed_need_not_wait_for_the_sink_of_another_that_hangs() {
    let database = outbox().await;
    let (hanging, resting) = (HttpServer::start(|_| Answer::Silence).await, taking().await);
    let lines = "shutdown-timeout = \"1h\"\n".to_owned()
        + &http("hanging", &hanging, "http-timeout = \"1h\"")
        + &http("resting", &resting, "");
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    order(&relay, "pause", "shop/resting").await;
    add(&database, 0, 5).await;
    hanging.until("it hangs", |requests| !requests.is_empty()).await;
    order(&relay, "resume", "shop/resting").await;
    until_taken(&resting, 0..5).await;
    relay.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_holds_the_others_back_can_be_paused_and_they_go_on() {
    let database = outbox().await;
    let ((slow, open), fine) = (closed().await, taking().await);
    let shop = Shop::new(&database, &(http("slow", &slow, "max-in-flight = 10") + &http("fine", &fine, "")));
    let relay = shop.run(&database).await;
    for from in 0..10 {
        add(&database, from * 10, from * 10 + 10).await;
    }
    until_publisher(&relay, "slow", "holds the others back", |one| one["holds_back"] == true).await;
    order(&relay, "pause", "shop/slow").await;
    until_taken(&fine, 0..100).await;
    assert_eq!(publisher(&relay, "slow").await["holds_back"], false);
    open.store(true, Ordering::Relaxed);
    order(&relay, "resume", "shop/slow").await;
    until_taken(&slow, 0..100).await;
    relay.stop().await;
    assert_eq!(taken(&fine), (0..100).collect::<Vec<_>>(), "once each");
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_are_paused_everything_is_caught_up_with() {
    let database = outbox().await;
    let (one, other) = (taking().await, taking().await);
    let shop = Shop::new(&database, &(http("one", &one, "") + &http("other", &other, "")));
    let relay = shop.run(&database).await;
    order(&relay, "pause", "shop").await;
    relay.stop().await;
    add(&database, 0, 5).await;
    Relay::spawn(&["run", "--config", shop.path(), "--until-caught-up"]).exits_with(0).await;
    assert_eq!((taken(&one), taken(&other)), (Vec::new(), Vec::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_lost_repeats_nothing_to_who_had_it_while_another_stays_behind() {
    let database = outbox().await;
    let (fine, resting) = (taking().await, taking().await);
    // How far each has come is known by this process alone.
    let lines = "checkpoint-interval = \"1h\"\n".to_owned() + &http("fine", &fine, "") + &http("resting", &resting, "");
    let shop = Shop::new(&database, &lines);
    let relay = shop.run(&database).await;
    order(&relay, "pause", "shop/resting").await;
    add(&database, 0, 50).await;
    until_publisher(&relay, "fine", "has them", |one| one["events"] == 50).await;
    let walsender = database.walsender().await.expect("somebody reads");
    database.execute(&format!("SELECT pg_terminate_backend({walsender})")).await;
    eventually(PATIENCE, "it is read anew", async || database.walsender().await.filter(|anew| *anew != walsender))
        .await;
    add(&database, 50, 60).await;
    until_taken(&fine, 50..60).await;
    assert_eq!(taken(&fine), (0..60).collect::<Vec<_>>(), "once each");
    let admin = relay.admin().await;
    eventually(PATIENCE, "it is resumed", async || {
        (outboxd(&["resume", "shop/resting", "--admin", &admin]).await.code == 0).then_some(())
    })
    .await;
    until_taken(&resting, 0..60).await;
    relay.stop().await;
}
