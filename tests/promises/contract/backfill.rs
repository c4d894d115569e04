//! `--on-lost-position backfill`: when the log has lost what was not delivered, the table makes up for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mongodb::bson::{DateTime, doc};
use nix::sys::signal::Signal;

use crate::support::{
    Answer, Arrived, Form, HttpServer, Outbox, PATIENCE, Polled, PrivatePostgres, PrivateServer, Relay, Source, Topic,
    check, ends, eventually, outboxd,
};

const BACKFILL: [&str; 5] = ["--mark", "--on-lost-position", "backfill", "--checkpoint-interval", "100ms"];

/// A server whose log can be lost.
async fn forgetful(source: Source) -> PrivateServer {
    PrivateServer::forgetful(source).await
}

/// Everything that a key's events were, in order, and how often each arrived.
async fn arrived(topic: &Topic) -> HashMap<String, usize> {
    let mut times = HashMap::new();
    for record in topic.reader().rest().await {
        *times.entry(record.header("id").expect("an id").to_owned()).or_default() += 1;
    }
    times
}

async fn until_filled(relay: &mut Relay) -> serde_json::Value {
    eventually(PATIENCE, "the backfill is done", async || {
        assert!(relay.is_running(), "the relay ended");
        let status = relay.status().await;
        (status["gap"]["state"] == "done").then(|| status["gap"].clone())
    })
    .await
}

promised!(lost_position_is_made_up_for_from_the_table to postgres, mysql, mariadb, mongodb);

async fn lost_position_is_made_up_for_from_the_table(source: Source) {
    let server = forgetful(source).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    outbox.add_status().await;
    let topic = Topic::create(3).await;
    let relay = outbox.streaming(&topic, &BACKFILL).await;
    let writer = outbox.writer().await;
    for _ in 0..50 {
        writer.commit(&["a", "b", "c"]).await;
    }
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    let before = arrived(&topic).await;
    assert_eq!(before.len(), 150);

    for _ in 0..700 {
        writer.commit(&["a", "b", "c"]).await;
    }
    server.lose(&outbox).await;
    let url = outbox.url();
    let checked = check(&[&[&url, "--brokers", &topic.brokers, "--topic", &topic.name], &BACKFILL[..]].concat()).await;
    checked.warns("position", "is lost");
    // Writers go on while it is made up for.
    let enough = Arc::new(AtomicBool::new(false));
    let writing = tokio::spawn({
        let enough = enough.clone();
        async move {
            while !enough.load(Ordering::Relaxed) {
                writer.commit(&["a", "b", "c"]).await;
            }
            writer
        }
    });
    let mut relay = outbox.relay(&topic, &BACKFILL);
    let gap = until_filled(&mut relay).await;
    enough.store(true, Ordering::Relaxed);
    let writer = writing.await.expect("the writer ends");
    writer.commit(&["a"]).await;
    let delivered = outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    println!("{delivered:?} {gap}");
    outbox.until_all_marked(PATIENCE).await;
    assert!(gap["rows"].as_u64().is_some_and(|rows| rows >= 2100), "{gap}");
    assert!(gap["lost"].as_str().is_some_and(|lost| lost.contains("is lost")), "{gap}");
    assert!(gap["position"].as_str().is_some_and(|position| !position.is_empty()), "{gap}");
    for words in ["is lost", "rows that are not marked are delivered from the table", "the backfill is done"] {
        assert!(relay.log().contains(words), "the log says `{words}`: {}", relay.log());
    }
    relay.stop().await;
    let after = arrived(&topic).await;
    assert!(before.keys().all(|id| after[id] == 1), "what was marked is not delivered again");

    // From here on it is a position like any other.
    outbox.relay(&topic, &[&BACKFILL[..], &["--until-caught-up"]].concat()).exits_with(0).await;
    assert_eq!(arrived(&topic).await, after);
    let mut relay = outbox.streaming(&topic, &BACKFILL).await;
    assert_eq!(relay.status().await["gap"], serde_json::Value::Null);
    writer.commit(&["a"]).await;
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;

    // Under a running relay, too.
    outbox.until_all_marked(PATIENCE).await;
    relay.signal(Signal::SIGSTOP);
    for _ in 0..20 {
        writer.commit(&["a", "b"]).await;
    }
    server.lose(&outbox).await;
    writer.commit(&["a", "b"]).await;
    relay.signal(Signal::SIGCONT);
    until_filled(&mut relay).await;
    writer.commit(&["c"]).await;
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
}

promised!(backfill_that_was_killed_goes_on_until_everything_is_delivered to postgres, mysql, mariadb, mongodb);

async fn backfill_that_was_killed_goes_on_until_everything_is_delivered(source: Source) {
    let server = forgetful(source).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    outbox.add_status().await;
    // Slow enough for a backfill to be met in the middle.
    let sink = HttpServer::start(|_| {
        std::thread::sleep(Duration::from_millis(2));
        Answer::Status(200)
    })
    .await;
    let (url, address) = (outbox.url(), sink.url());
    let run = ["run", &url, "--sink", &address, "--http-batch", "10", "--lanes", "2"];
    let start = |flags: &[&str]| Relay::spawn(&[&run[..], flags].concat());
    let mut relay = start(&BACKFILL);
    relay.until_state("streaming").await;
    let writer = outbox.writer().await;
    let keys: Vec<String> = (0..30).map(|number| format!("key-{number:02}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    writer.commit(&keys).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    for _ in 0..150 {
        writer.commit(&keys).await;
    }
    server.lose(&outbox).await;
    for round in 0..3 {
        // It goes on whoever starts next, also without being told to.
        let flags: &[&str] = if round == 1 { &["--mark", "--checkpoint-interval", "100ms"] } else { &BACKFILL };
        let marked = outbox.marked().await.0;
        let mut relay = start(flags);
        eventually(PATIENCE, "rows of the table are marked", async || {
            assert!(relay.is_running(), "the relay ended: {}", relay.log());
            (outbox.marked().await.0 > marked).then_some(())
        })
        .await;
        let gap = relay.status().await["gap"].clone();
        assert_eq!(gap["state"], "backfill", "killed in the middle: {gap}");
        relay.kill();
        writer.commit(&keys).await;
    }
    let mut relay = start(&BACKFILL);
    let gap = until_filled(&mut relay).await;
    assert!(gap["lost"].as_str().is_some_and(|lost| lost.contains("was under way")), "{gap}");
    writer.commit(&keys).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    let mut numbers: HashMap<String, Vec<u64>> = HashMap::new();
    for request in sink.requests() {
        for event in request.json().as_array().expect("an array of payloads") {
            let key = event["key"].as_str().expect("a key").to_owned();
            let (of_key, number) = (numbers.entry(key).or_default(), event["seq"].as_u64().expect("a number"));
            if !of_key.contains(&number) {
                of_key.push(number);
            }
        }
    }
    for key in keys {
        assert_eq!(numbers[key], (1..=155).collect::<Vec<_>>(), "all of {key}, in order");
    }
}

promised!(without_a_status_a_lost_position_stays_lost to postgres, mysql, mariadb, mongodb);

async fn without_a_status_a_lost_position_stays_lost(source: Source) {
    let server = forgetful(source).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    let writer = outbox.writer().await;
    writer.commit(&["a"]).await;
    topic.reader().take(1).await;
    outbox.until_confirmed(&outbox.end_of_log().await, PATIENCE).await;
    relay.stop().await;
    writer.commit(&["a"]).await;
    server.lose(&outbox).await;
    let flags = ["--on-lost-position", "backfill"];
    let words = match source {
        // A document that lacks the field might have got it.
        Source::MongoDb => "no row of the table says that it was delivered",
        _ => "has no status, which would say what was delivered",
    };
    for _ in 0..2 {
        ends(outbox.relay(&topic, &flags), 4, &["is lost", "no backfill", words, "--mark"]).await;
    }
    let named = [&flags[..], &["--layout", "debezium"]].concat();
    let url = outbox.url();
    let checked = outboxd(&[&["check", &url, "--sink", "stdout"], &named[..]].concat()).await;
    assert!(checked.stdout.contains("--column published=COLUMN"), "{checked:?}");
    if source != Source::MongoDb {
        // Columns that nobody has ever written say nothing.
        outbox.add_status().await;
        ends(outbox.relay(&topic, &flags), 4, &["is lost", "no row of the table says that it was delivered"]).await;
    }
    assert_eq!(topic.reader().rest().await.len(), 1, "nothing is delivered");
}

promised!(status_that_the_application_writes_makes_up_for_a_lost_position to postgres, mysql, mongodb);

async fn status_that_the_application_writes_makes_up_for_a_lost_position(source: Source) {
    let server = forgetful(source).await;
    let outbox = Polled::read_at(source, &server.url(), Form::MessageGroup).await;
    let topic = Topic::create(1).await;
    let flags = ["--on-lost-position", "backfill"];
    let mut relay = outbox.relay(&topic, &flags);
    relay.until_state("streaming").await;
    outbox.add("a", 0..3).await;
    Arrived::read(&mut topic.reader(), 3, PATIENCE).await;
    relay.stop().await;
    let completed = |n: usize| format!("{n}");
    if source == Source::MongoDb {
        let set = doc! { "$set": { "status": "COMPLETED", "processedAt": DateTime::now() } };
        let done = outbox.outbox.mongodb().collection(Form::MessageGroup.table()).update_many(doc! {}, set).await;
        done.expect("the application marks what it has seen");
    } else {
        outbox.outbox.execute("UPDATE outbox_events SET status = 'COMPLETED'").await;
    }
    outbox.add("a", 3..6).await;
    server.lose(&outbox.outbox).await;
    let mut relay = outbox.relay(&topic, &flags);
    until_filled(&mut relay).await;
    assert!(relay.log().contains("without --mark"), "it is told what that means: {}", relay.log());
    outbox.add("a", 6..7).await;
    let mut numbers = Vec::new();
    let mut reader = topic.reader();
    while numbers.len() < 7 {
        let record = reader.next(PATIENCE).await.unwrap_or_else(|| panic!("only {numbers:?} arrived"));
        let payload: serde_json::Value = serde_json::from_str(record.value.as_deref().expect("a value")).expect("JSON");
        numbers.push(payload["n"].to_string());
    }
    assert_eq!(numbers, (0..7).map(completed).collect::<Vec<_>>(), "each once");
    relay.stop().await;
}

promised!(entities_of_a_backfill_arrive_in_the_order_of_their_versions to postgres, mysql, mongodb);

async fn entities_of_a_backfill_arrive_in_the_order_of_their_versions(source: Source) {
    let server = forgetful(source).await;
    let outbox = Polled::marked_at(source, &server.url(), Form::Entity).await;
    let topic = Topic::create(1).await;
    outbox.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
    outbox.add("a", 0..6).await;
    outbox.add("b", 0..3).await;
    // Clocks that differ: the later versions seem to be the older ones.
    if source == Source::MongoDb {
        let collection = outbox.outbox.mongodb().collection(Form::Entity.table());
        for n in 0..6 {
            let at = DateTime::from_millis(1_700_000_000_000 - i64::from(n) * 1000);
            let set = doc! { "$set": { "created_at": at } };
            collection.update_one(doc! { "entity_id": "a", "entity_version": n }, set).await.expect("it is set");
        }
    } else {
        let ago = match source.is_postgres() {
            true => "created_at - entity_version * interval '1 hour'",
            false => "created_at - INTERVAL entity_version HOUR",
        };
        outbox.outbox.execute(&format!("UPDATE entities SET created_at = {ago} WHERE entity_id = 'a'")).await;
    }
    server.lose(&outbox.outbox).await;
    let mut relay = outbox.relay(&topic, &["--on-lost-position", "backfill"]);
    until_filled(&mut relay).await;
    Arrived::read(&mut topic.reader(), 9, PATIENCE).await.is(&[("a", 6), ("b", 3)]);
    outbox.until_done(9).await;
    relay.stop().await;
}

promised!(of_two_instances_one_makes_up_for_the_loss_and_the_other_takes_over to postgres, mysql, mongodb);

async fn of_two_instances_one_makes_up_for_the_loss_and_the_other_takes_over(source: Source) {
    let server = forgetful(source).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    outbox.add_status().await;
    let topic = Topic::create(2).await;
    let relay = outbox.streaming(&topic, &BACKFILL).await;
    let writer = outbox.writer().await;
    writer.commit(&["a", "b"]).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    for _ in 0..200 {
        writer.commit(&["a", "b"]).await;
    }
    server.lose(&outbox).await;
    let mut relays = [outbox.relay(&topic, &BACKFILL), outbox.relay(&topic, &BACKFILL)];
    let leader = eventually(PATIENCE, "one of them has made up for it, and the other stands by", async || {
        let mut states = Vec::new();
        for relay in &mut relays {
            assert!(relay.is_running(), "{}", relay.log());
            let status = relay.status().await;
            let filled = status["gap"]["state"] == "done";
            states.push((status["state"].as_str().unwrap_or_default().to_owned(), filled));
        }
        let standing_by = states.iter().position(|(state, _)| state == "standing-by")?;
        let leader = 1 - standing_by;
        (states[leader] == ("streaming".to_owned(), true)).then_some(leader)
    })
    .await;
    let [first, second] = relays;
    let (leader, mut other) = if leader == 0 { (first, second) } else { (second, first) };
    leader.kill();
    writer.commit(&["a", "b"]).await;
    other.until_state("streaming").await;
    writer.commit(&["a", "b"]).await;
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_all_marked(PATIENCE).await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_that_the_server_gave_up_is_made_anew_also_with_a_checkpoint_of_an_older_outboxd() {
    let server = PrivatePostgres::start(&["max_slot_wal_keep_size=1MB", "max_wal_size=32MB"]).await;
    let outbox = Outbox::create_at(Source::Postgres, &server.url()).await;
    outbox.add_status().await;
    // As it was made before there were backfills.
    outbox
        .execute(
            "CREATE TABLE outboxd_checkpoint (
                 pipeline text PRIMARY KEY, format integer NOT NULL, system_identifier text NOT NULL,
                 timeline integer NOT NULL, slot text NOT NULL, position pg_lsn NOT NULL,
                 snapshot text NOT NULL DEFAULT 'none' CHECK (snapshot IN ('none', 'pending', 'done')),
                 updated_at timestamptz NOT NULL DEFAULT now())",
        )
        .await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &["--mark"]).await;
    let writer = outbox.writer().await;
    writer.commit(&["a", "b"]).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    writer.commit(&["a", "b"]).await;
    let lost = "SELECT slot_name FROM pg_replication_slots WHERE wal_status = 'lost'";
    eventually(PATIENCE, "the server gives the slot up", async || {
        outbox.be_busy().await;
        outbox.text("SELECT pg_switch_wal()").await;
        outbox.execute("CHECKPOINT").await;
        outbox.text(lost).await
    })
    .await;
    ends(outbox.relay(&topic, &["--mark"]), 4, &["is lost", "invalidated"]).await;
    let no_create = [&BACKFILL[..], &["--no-create"]].concat();
    ends(outbox.relay(&topic, &no_create), 4, &["no backfill: --no-create forbids making a new slot"]).await;
    outbox.relay(&topic, &[&BACKFILL[..], &["--until-caught-up"]].concat()).exits_with(0).await;
    assert_eq!(outbox.text(lost).await, None, "a slot that can be read");
    assert_eq!(outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await.duplicates, 0);
    assert_eq!(outbox.marked().await, (4, 0));
}

promised!(log_that_was_begun_anew_is_made_up_for to mysql, mariadb);

/// Its numbers are counted anew: what was remembered of them must not make anything pass for delivered.
async fn log_that_was_begun_anew_is_made_up_for(source: Source) {
    let server = forgetful(source).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    outbox.add_status().await;
    let topic = Topic::create(1).await;
    let writer = outbox.writer().await;
    let mut relay = outbox.streaming(&topic, &BACKFILL).await;
    let reset = if source == Source::MySql { "RESET BINARY LOGS AND GTIDS" } else { "RESET MASTER" };
    for round in 0..2 {
        writer.commit(&["a", "b"]).await;
        outbox.until_all_marked(PATIENCE).await;
        match round {
            0 => {
                relay.stop().await;
                outbox.execute(reset).await;
                writer.commit(&["a", "b"]).await;
                outbox.relay(&topic, &[&BACKFILL[..], &["--until-caught-up"]].concat()).exits_with(0).await;
                assert_eq!(outbox.marked().await, (4, 0));
                relay = outbox.streaming(&topic, &BACKFILL).await;
            }
            _ => {
                // Far enough for the new log not to have counted past it.
                for _ in 0..60 {
                    outbox.be_busy().await;
                }
                outbox.until_confirmed(&outbox.end_of_log().await, PATIENCE).await;
                relay.signal(Signal::SIGSTOP);
                server.lose(&outbox).await;
                outbox.execute(reset).await;
                for _ in 0..5 {
                    writer.commit(&["a", "b"]).await;
                }
                relay.signal(Signal::SIGCONT);
                until_filled(&mut relay).await;
            }
        }
    }
    writer.commit(&["a", "b"]).await;
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_publisher_gets_what_a_lost_log_had() {
    let server = forgetful(Source::Postgres).await;
    let outbox = Outbox::create_at(Source::Postgres, &server.url()).await;
    outbox.add_status().await;
    let (one, other) = (Topic::create(1).await, Topic::create(1).await);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = format!(
        "[pipeline.shop]\nsource = {:?}\nbrokers = {:?}\nmark = true\non-lost-position = \"backfill\"\n\
         slot = \"{}\"\ncheckpoint-interval = \"100ms\"\n\
         [pipeline.shop.publisher.one]\ntopic = {:?}\n[pipeline.shop.publisher.other]\ntopic = {:?}\n",
        outbox.url(),
        one.brokers,
        outbox.slot(),
        one.name,
        other.name
    );
    std::fs::write(file.path(), text).expect("the configuration is written");
    let run = ["run", "--config", file.path().to_str().expect("a path")];
    let mut relay = Relay::spawn(&run);
    relay.until_state("streaming").await;
    let writer = outbox.writer().await;
    writer.commit(&["a", "b"]).await;
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    for _ in 0..100 {
        writer.commit(&["a", "b"]).await;
    }
    server.lose(&outbox).await;
    let mut relay = Relay::spawn(&run);
    until_filled(&mut relay).await;
    writer.commit(&["a", "b"]).await;
    let expected = outbox.expected().await;
    for topic in [&one, &other] {
        assert_eq!(expected.arrive_in(&mut topic.reader(), PATIENCE).await.events, 204);
    }
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
}

#[tokio::test]
async fn backfill_is_refused_where_there_is_no_position_to_lose() {
    let run = ["run", "postgres://nobody@127.0.0.1:1/none", "--sink", "stdout", "--on-lost-position", "backfill"];
    let ended = outboxd(&[&run[..], &["--capture", "poll"]].concat()).await;
    assert!(ended.code == 2 && ended.stderr.contains("no position that could be lost"), "{ended:?}");
}
