//! Pollers that are killed, refused, slowed down and stopped.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mongodb::bson::{Bson, DateTime, doc};

use crate::support::{
    Answer, Arrived, Dice, Form, HttpServer, PATIENCE, Polled, Relay, Source, Topic, eventually, outboxd,
};

promised!(killed_pollers_lose_no_row_and_keep_the_order_of_keys to postgres, mysql, mariadb, mongodb);

/// A leader and two standbys; whoever leads is killed at random moments under load.
async fn killed_pollers_lose_no_row_and_keep_the_order_of_keys(source: Source) {
    survives_kills(source, Form::Native).await;
}

promised!(killed_pollers_of_message_groups_lose_no_row_and_keep_their_order to postgres, mysql, mongodb);

async fn killed_pollers_of_message_groups_lose_no_row_and_keep_their_order(source: Source) {
    survives_kills(source, Form::MessageGroup).await;
}

promised!(killed_pollers_without_claims_lose_no_row_and_keep_the_order_of_keys to postgres, mysql);

async fn killed_pollers_without_claims_lose_no_row_and_keep_the_order_of_keys(source: Source) {
    survives_kills(source, Form::ProduceReceive).await;
}

async fn survives_kills(source: Source, form: Form) {
    const KEYS: [&str; 5] = ["k0", "k1", "k2", "k3", "k4"];
    const ROWS: usize = 1200;
    let polled = Polled::create(source, form).await;
    let topic = Topic::create(4).await;
    // There is always something on its way when one is killed.
    for key in KEYS {
        polled.add(key, 0..ROWS / 2).await;
    }
    let flags = ["--poll-interval", "20ms", "--poll-batch", "11", "--max-in-flight", "40"];
    let mut relays: Vec<_> = (0..3).map(|_| polled.relay(&topic, &flags)).collect();
    let mut dice = Dice::seeded(0x0b0d);
    let write = async {
        for at in (ROWS / 2..ROWS).step_by(50) {
            for key in KEYS {
                polled.add(key, at..at + 50).await;
            }
        }
    };
    let kill = async {
        for _ in 0..8 {
            let leads = async |relays: &[Relay]| {
                for (at, relay) in relays.iter().enumerate() {
                    if relay.status().await["state"] == "streaming" {
                        return Some(at);
                    }
                }
                None
            };
            let leader = eventually(PATIENCE, "somebody leads", async || leads(&relays).await).await;
            // A moment of the load that nothing tells of is what is wanted here.
            tokio::time::sleep(Duration::from_millis(dice.roll(300))).await;
            let fresh = polled.relay(&topic, &flags);
            std::mem::replace(&mut relays[leader], fresh).kill();
        }
    };
    tokio::join!(write, kill);
    let arrived = Arrived::read(&mut topic.reader(), KEYS.len() * ROWS, PATIENCE).await;
    arrived.is(&KEYS.map(|key| (key, ROWS)));
    eventually(PATIENCE, "every row is marked", async || (polled.done().await == KEYS.len() * ROWS).then_some(()))
        .await;
    for relay in relays {
        relay.stop().await;
    }
}

promised!(standby_polls_within_five_seconds_of_the_leaders_kill to postgres, mysql, mariadb, mongodb);

async fn standby_polls_within_five_seconds_of_the_leaders_kill(source: Source) {
    let polled = Polled::create(source, Form::Native).await;
    let topic = Topic::create(1).await;
    let flags = ["--poll-interval", "50ms"];
    let mut leader = polled.relay(&topic, &flags);
    leader.until_state("streaming").await;
    let mut standby = polled.relay(&topic, &flags);
    standby.until_state("standing-by").await;
    polled.add("a", 0..1).await;
    let mut reader = topic.reader();
    reader.take(1).await;
    leader.kill();
    let killed = Instant::now();
    polled.add("a", 1..2).await;
    reader
        .until(PATIENCE, "the standby delivers", |records| {
            records.iter().any(|record| {
                record.value.as_deref().is_some_and(|value| value.contains(": 1") || value.contains(":1"))
            })
        })
        .await;
    let took = killed.elapsed();
    println!("taken over after {took:?}");
    assert!(took < Duration::from_secs(5), "the standby delivered after {took:?}");
    standby.stop().await;
}

promised!(refused_row_is_tried_again_and_its_key_waits_while_others_go_on to postgres, mysql, mariadb, mongodb);

async fn refused_row_is_tried_again_and_its_key_waits_while_others_go_on(source: Source) {
    let polled = Polled::create(source, Form::Native).await;
    let bad = Arc::new(AtomicBool::new(true));
    let still = bad.clone();
    let server = HttpServer::start(move |request| {
        let refuses = text(request).contains("\"n\":3") || text(request).contains("\"n\": 3");
        match refuses && text(request).contains("bad") && still.load(Ordering::Relaxed) {
            true => Answer::Status(422),
            false => Answer::Status(200),
        }
    })
    .await;
    let flags = ["--poll-interval", "50ms", "--retry-backoff", "200ms", "--max-retries", "50", "--lanes", "1"];
    let relay = polled.relay_to(&server.url(), &flags);
    polled.add("bad", 0..8).await;
    polled.add("good", 0..30).await;
    eventually(PATIENCE, "the good key is through", async || (polled.done().await == 33).then_some(())).await;
    eventually(PATIENCE, "the row is tried again and again", async || {
        let tries = match source {
            Source::MongoDb => {
                polled.count_documents(doc! { "attempts": { "$gte": 2 }, "last_error": { "$regex": "422" } }).await
            }
            _ => polled.count("attempts >= 2 AND last_error LIKE '%422%'").await,
        };
        (tries == 1).then_some(())
    })
    .await;
    assert_eq!(polled.done().await, 33, "those behind it wait");
    polled.add("good", 30..40).await;
    eventually(PATIENCE, "others go on", async || (polled.done().await == 43).then_some(())).await;
    bad.store(false, Ordering::Relaxed);
    eventually(PATIENCE, "the key goes on", async || (polled.done().await == 48).then_some(())).await;
    let mut arrived = Arrived::default();
    for request in server.taken() {
        for payload in request.json().as_array().expect("a batch is an array") {
            arrived.note(&payload.to_string());
        }
    }
    arrived.is(&[("bad", 8), ("good", 40)]);
    relay.stop().await;
}

promised!(refused_entity_is_not_overtaken_while_others_keep_the_poller_busy to postgres, mysql, mongodb);

/// Rows that have failed are another class of rows there, which must not be forgotten while there are pending ones.
async fn refused_entity_is_not_overtaken_while_others_keep_the_poller_busy(source: Source) {
    let polled = Polled::create(source, Form::Entity).await;
    let refusals = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = refusals.clone();
    let server = HttpServer::start(move |request| {
        let events = request.json();
        let culprit = |event: &serde_json::Value| event["key"] == "bad" && event["n"] == 2;
        let culprit = events.as_array().is_some_and(|events| events.iter().any(culprit));
        match culprit && counted.fetch_add(1, Ordering::Relaxed) < 6 {
            true => Answer::Status(422),
            false => Answer::Status(200),
        }
    })
    .await;
    let flags = ["--poll-interval", "50ms", "--retry-backoff", "300ms", "--poll-batch", "20", "--lanes", "1"];
    let relay = polled.relay_to(&server.url(), &[&flags[..], &["--http-batch", "5"]].concat());
    polled.add("bad", 0..6).await;
    let busy = async {
        let mut at = 0;
        while polled.done().await < at + 6 || at < 400 {
            if at < 2000 {
                polled.add("busy", at..at + 40).await;
                at += 40;
            }
        }
        at
    };
    let busy = tokio::time::timeout(PATIENCE, busy).await.expect("all is delivered");
    let mut arrived = Arrived::default();
    for request in server.taken() {
        for payload in request.json().as_array().expect("a batch is an array") {
            arrived.note(&payload.to_string());
        }
    }
    arrived.is(&[("bad", 6), ("busy", busy)]);
    assert!(refusals.load(Ordering::Relaxed) >= 3, "it was refused several times");
    relay.stop().await;
}

promised!(entities_arrive_in_the_order_of_their_versions_whatever_their_clocks_say to postgres, mysql, mariadb, mongodb);

async fn entities_arrive_in_the_order_of_their_versions_whatever_their_clocks_say(source: Source) {
    let polled = Polled::create(source, Form::Entity).await;
    let topic = Topic::create(1).await;
    polled.add("a", 0..10).await;
    // The transaction that wrote the higher version had begun earlier.
    match source {
        Source::MongoDb => {
            let collection = polled.outbox.mongodb().collection(polled.form.table());
            for n in 0..10 {
                let set = doc! { "$set": { "created_at": DateTime::from_millis(1_000_000 - n) } };
                collection.update_one(doc! { "entity_version": n as i32 }, set).await.expect("a document is set");
            }
        }
        _ => {
            let earlier = match source.is_postgres() {
                true => "created_at - entity_version * interval '1 second'",
                false => "created_at - INTERVAL entity_version SECOND",
            };
            polled.outbox.execute(&format!("UPDATE {} SET created_at = {earlier}", polled.form.table())).await;
        }
    }
    polled.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
    Arrived::read(&mut topic.reader(), 10, PATIENCE).await.is(&[("a", 10)]);
}

promised!(row_that_fails_for_good_is_parked_marked_and_flows_again_when_it_is_reset to postgres, mysql, mariadb, mongodb);

async fn row_that_fails_for_good_is_parked_marked_and_flows_again_when_it_is_reset(source: Source) {
    for form in [Form::Native, Form::MessageGroup, Form::Entity] {
        fails_for_good(source, form).await;
    }
}

promised!(row_that_fails_for_good_is_parked_in_layouts_without_a_status_too to postgres, mysql);

async fn row_that_fails_for_good_is_parked_in_layouts_without_a_status_too(source: Source) {
    fails_for_good(source, Form::ProduceReceive).await;
    if source == Source::Postgres {
        fails_for_good(source, Form::OccurredOn).await;
    }
}

async fn fails_for_good(source: Source, form: Form) {
    let polled = Polled::create(source, form).await;
    let topic = Topic::create_at(&crate::support::shared_kafka(), 1, &[("max.message.bytes", "2000")]).await;
    let dead = Topic::create(1).await;
    let letters = format!("topic:{}", dead.name);
    let flags = ["--poll-interval", "50ms", "--retry-backoff", "50ms", "--max-retries", "2", "--dead-letter", &letters];
    let large = |n: usize| format!(r#"{{"key":"a","n":{n},"filler":"{}"}}"#, "x".repeat(4000));
    let small = |n: usize| format!(r#"{{"key":"a","n":{n}}}"#);
    let rows = (0..5).map(|n| ("a".to_owned(), n, if n == 2 { large(n) } else { small(n) })).collect();
    polled.add_of(rows).await;
    let relay = polled.relay(&topic, &flags);
    let mut reader = topic.reader();
    let numbers: Vec<_> = Arrived::read(&mut reader, 4, PATIENCE).await.0.remove("a").unwrap_or_default();
    assert_eq!(numbers, [0, 1, 3, 4], "the key goes on in order");
    let letter = &dead.reader().take(1).await[0];
    assert!(letter.value.as_deref().is_some_and(|value| value.contains("filler")), "{letter:?}");
    assert!(letter.header("outboxd.reason").is_some_and(|why| why.contains("2000")), "{letter:?}");
    assert_eq!(letter.key.as_deref(), Some("a"));
    eventually(PATIENCE, "the row says that it failed", async || {
        let failed = match (source, form) {
            (Source::MongoDb, Form::Native) => {
                polled.count_documents(doc! { "status": "failed", "attempts": 3, "last_error": { "$ne": null } }).await
            }
            (Source::MongoDb, Form::MessageGroup) => {
                polled
                    .count_documents(doc! { "status": "FAILED", "retryCount": 2, "errorMessage": { "$ne": null } })
                    .await
            }
            // Every document of this layout says for itself how often it may be tried.
            (Source::MongoDb, _) => {
                polled
                    .count_documents(doc! { "status": "failed", "retry_count": 5, "last_error_at": { "$ne": null } })
                    .await
            }
            (_, Form::Native) => polled.count("status = 'failed' AND attempts = 3 AND last_error IS NOT NULL").await,
            (_, Form::MessageGroup) => {
                polled.count("status = 'FAILED' AND retry_count = 2 AND error_message IS NOT NULL").await
            }
            (_, Form::Entity) => {
                polled.count("status = 'failed' AND retry_count = 5 AND last_error_at IS NOT NULL").await
            }
            (_, Form::OccurredOn) => {
                polled.count(r#""ProcessedOnUtc" IS NULL AND "RetryCount" = 3 AND "Error" IS NOT NULL"#).await
            }
            (_, Form::ProduceReceive) => {
                polled.count("processed = 0 AND retry = 3 AND error_code = 'MSG_SIZE_TOO_LARGE'").await
            }
        };
        (failed == 1).then_some(())
    })
    .await;

    // Mended and reset by hand, it flows again.
    if source == Source::MongoDb {
        let collection = polled.outbox.mongodb().collection(form.table());
        let payload = match form {
            Form::MessageGroup => Bson::String(small(2)),
            _ => Bson::Document(doc! { "key": "a", "n": 2 }),
        };
        let reset = match form {
            Form::MessageGroup => doc! { "$set": { "status": "PENDING", "retryCount": 0, "payload": payload } },
            Form::Native => doc! { "$set": { "status": "pending", "attempts": 0, "payload": payload } },
            _ => doc! { "$set": { "retry_count": 0, "payload": payload } },
        };
        let which = if form == Form::MessageGroup {
            doc! { "status": "FAILED" }
        } else {
            doc! { "status": "failed" }
        };
        collection.update_one(which, reset).await.expect("the document is reset");
    } else {
        let (set, which) = match form {
            Form::Native => ("status = 'pending', attempts = 0, payload", "status = 'failed'"),
            Form::MessageGroup => ("status = 'PENDING', retry_count = 0, payload", "status = 'FAILED'"),
            Form::Entity => ("retry_count = 0, payload", "status = 'failed'"),
            Form::OccurredOn => (r#""RetryCount" = 0, "Content""#, r#""ProcessedOnUtc" IS NULL"#),
            Form::ProduceReceive => ("retry = 0, payload", "processed = 0"),
        };
        polled.outbox.execute(&format!("UPDATE {} SET {set} = '{}' WHERE {which}", form.table(), small(2))).await;
    }
    let again = &reader.take(1).await[0];
    assert!(again.value.as_deref().is_some_and(|value| value.contains('2') && !value.contains("filler")), "{again:?}");
    eventually(PATIENCE, "it is done", async || (polled.done().await == 5).then_some(())).await;
    relay.stop().await;
}

promised!(only_as_much_is_claimed_as_the_window_has_room_for to postgres, mysql, mongodb);

async fn only_as_much_is_claimed_as_the_window_has_room_for(source: Source) {
    let polled = Polled::create(source, Form::Native).await;
    let server = HttpServer::start(|_| Answer::Silence).await;
    polled.add("a", 0..100).await;
    let flags = ["--poll-interval", "20ms", "--max-in-flight", "10", "--http-batch", "5", "--lease", "3s"];
    let relay = polled.relay_to(&server.url(), &[&flags[..], &["--shutdown-timeout", "1s"]].concat());
    eventually(PATIENCE, "the window is full", async || (polled.of_status("processing").await == 10).then_some(()))
        .await;
    // Longer than the lease: it is renewed, so nothing is taken for abandoned, and nothing more is claimed.
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(5) {
        assert_eq!(polled.of_status("processing").await, 10);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(!relay.log().contains("lease had ended"), "{}", relay.log());
    relay.stop().await;
    assert_eq!(polled.of_status("processing").await, 0, "what was not delivered is given back");
    assert_eq!(polled.of_status("pending").await, 100);
}

promised!(rows_that_others_left_claimed_are_recovered to postgres, mysql, mariadb, mongodb);

async fn rows_that_others_left_claimed_are_recovered(source: Source) {
    let polled = Polled::create(source, Form::MessageGroup).await;
    let topic = Topic::create(1).await;
    polled.add("a", 0..3).await;
    // As a leader that died leaves them: the first two of the group.
    abandon(&polled, "< 2").await;
    let relay = polled.relay(&topic, &["--poll-interval", "50ms", "--stuck-after", "2s"]);
    let mut reader = topic.reader();
    Arrived::read(&mut reader, 3, PATIENCE).await.is(&[("a", 3)]);
    // And while it runs: what another tool has claimed and left.
    polled.add("b", 0..2).await;
    reader.take(2).await;
    eventually(PATIENCE, "both are marked", async || (polled.done().await == 5).then_some(())).await;
    match source {
        Source::MongoDb => {
            let long_ago = DateTime::from_millis(1_000);
            let set = doc! { "$set": { "status": "PROCESSING", "processedAt": long_ago } };
            let collection = polled.outbox.mongodb().collection("outbox_events");
            collection.update_many(doc! { "messageGroup": "b" }, set).await.expect("documents are set");
        }
        _ => {
            let set =
                "UPDATE outbox_events SET status = 'PROCESSING', processed_at = '2020-01-01' WHERE message_group = 'b'";
            polled.outbox.execute(set).await;
        }
    }
    let again = reader.take(2).await;
    let keys: HashSet<_> = again.iter().filter_map(|record| record.key.clone()).collect();
    assert_eq!(keys, HashSet::from(["b".to_owned()]));
    relay.stop().await;
}

async fn abandon(polled: &Polled, which: &str) {
    if polled.outbox.source == Source::MongoDb {
        let set = doc! { "$set": { "status": "PROCESSING", "processedAt": DateTime::now() } };
        let collection = polled.outbox.mongodb().collection("outbox_events");
        let ids: Vec<_> = (0..2).map(|n| doc! { "_id": { "$regex": format!("{n:08}$") } }).collect();
        collection.update_many(doc! { "$or": ids }, set).await.expect("documents are set");
        return;
    }
    let number =
        if polled.outbox.source.is_postgres() { "right(id, 8)::int" } else { "CAST(right(id, 8) AS UNSIGNED)" };
    let now = if polled.outbox.source.is_postgres() { "now()" } else { "utc_timestamp(6)" };
    let set = format!("UPDATE outbox_events SET status = 'PROCESSING', processed_at = {now} WHERE {number} {which}");
    polled.outbox.execute(&set).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trigger_wakes_the_poller_of_a_table_long_before_its_interval() {
    let polled = Polled::init(Source::Postgres, Form::Native, &["--notify"]).await;
    let topic = Topic::create(1).await;
    let mut relay = polled.relay(&topic, &["--poll-interval", "300s"]);
    relay.until_state("streaming").await;
    let mut reader = topic.reader();
    for n in 0..3 {
        polled.add("a", n..n + 1).await;
        reader.take(1).await;
    }
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn message_groups_go_to_the_paths_of_their_types_and_a_culprit_does_not_fail_its_neighbours() {
    let polled = Polled::create(Source::Postgres, Form::MessageGroup).await;
    let server = HttpServer::start(|request| match text(request).contains("culprit") {
        true => Answer::Status(400),
        false => Answer::Status(200),
    })
    .await;
    let row = |id: &str, kind: &str, group: &str, payload: &str| format!("('{id}', '{kind}', {group}, '{payload}')");
    let rows = [
        row("0000000000001", "EVENT", "'g'", r#"{"n":1}"#),
        row("0000000000002", "EVENT", "'h'", r#"{"culprit":2}"#),
        row("0000000000003", "DISPATCH_JOB", "NULL", r#"{"n":3}"#),
        row("0000000000004", "EVENT", "'i'", r#"{"n":4}"#),
    ];
    let insert = format!("INSERT INTO outbox_events (id, type, message_group, payload) VALUES {}", rows.join(", "));
    polled.outbox.execute(&insert).await;
    let flags = ["--poll-interval", "50ms", "--retry-backoff", "50ms", "--http-token", "hush", "--max-groups", "1"];
    let relay = polled.relay_to(&server.url(), &flags);
    eventually(PATIENCE, "all but the culprit are done", async || (polled.done().await == 3).then_some(())).await;
    eventually(PATIENCE, "the culprit has failed", async || {
        (polled.count("status = 'FAILED' AND retry_count = 3 AND error_message LIKE '%400%'").await == 1).then_some(())
    })
    .await;
    let taken = server.taken();
    assert!(taken.iter().any(|request| request.path == "/api/events/batch"), "{taken:?}");
    assert!(taken.iter().any(|request| request.path == "/api/dispatch/jobs/batch"), "{taken:?}");
    assert!(taken.iter().all(|request| request.header("authorization") == Some("Bearer hush")));
    relay.stop().await;
}

fn text(request: &crate::support::Request) -> String {
    String::from_utf8_lossy(&request.body).into_owned()
}

promised!(polled_row_that_fails_for_good_is_copied_to_a_dead_letter_table_and_replayed_from_there to postgres, mysql, mariadb, mongodb);

async fn polled_row_that_fails_for_good_is_copied_to_a_dead_letter_table_and_replayed_from_there(source: Source) {
    let form = if source == Source::Postgres { Form::OccurredOn } else { Form::Native };
    let polled = Polled::create(source, form).await;
    let good = Arc::new(AtomicBool::new(false));
    let answers = good.clone();
    let server =
        HttpServer::start(move |request| match text(request).contains("culprit") && !answers.load(Ordering::Relaxed) {
            true => Answer::Status(422),
            false => Answer::Status(200),
        })
        .await;
    let culprit = r#"{"key":"a","n":1,"culprit":true}"#.to_owned();
    let plain = |n: usize| ("a".to_owned(), n, format!(r#"{{"key":"a","n":{n}}}"#));
    polled.add_of(vec![plain(0), ("a".to_owned(), 1, culprit), plain(2)]).await;
    let place = if source == Source::MongoDb { "collection:letters" } else { "table:letters" };
    let flags = ["--poll-interval", "50ms", "--retry-backoff", "50ms", "--max-retries", "1", "--dead-letter", place];
    let relay = polled.relay_to(&server.url(), &flags);
    eventually(PATIENCE, "the others are delivered", async || (polled.done().await == 2).then_some(())).await;
    let url = polled.outbox.url();
    let sink = server.url();
    let dlq = async |words: &[&str]| {
        let mut arguments = vec!["dlq"];
        arguments.extend(words);
        arguments.extend([&url, "--sink", &sink]);
        arguments.extend(polled.flags());
        arguments.extend(["--dead-letter", place]);
        outboxd(&arguments).await
    };
    let listed = eventually(PATIENCE, "the letter is listed", async || {
        let listed = dlq(&["list", "--json"]).await;
        assert_eq!(listed.code, 0, "{listed:?}");
        listed.stdout.lines().next().map(str::to_owned)
    })
    .await;
    assert!(listed.contains("422"), "{listed}");
    good.store(true, Ordering::Relaxed);
    let replayed = dlq(&["replay", "--all"]).await;
    assert_eq!(replayed.code, 0, "{replayed:?}");
    assert!(server.taken().iter().any(|request| text(request).contains("culprit")), "it is delivered");
    relay.stop().await;
}
