//! `--mark`: rows that were delivered from the log say so in their table, behind the watermark.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mongodb::bson::doc;

use crate::support::{
    Answer, Arrived, Dice, Form, HttpServer, Outbox, PATIENCE, Polled, PrivateKafka, Relay, Source, Topic, check,
    eventually, outboxd, shared_kafka,
};

const MARK: [&str; 3] = ["--mark", "--checkpoint-interval", "100ms"];

/// A counter or gauge of /metrics.
pub async fn metric(relay: &Relay, name: &str) -> u64 {
    let page = relay.get("/metrics").await;
    let line = page.lines().find(|line| line.split('{').next() == Some(name));
    let value = line.and_then(|line| line.rsplit(' ').next()).and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("no {name}: {page}"))
}

promised!(delivered_rows_of_a_native_table_are_marked to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn delivered_rows_of_a_native_table_are_marked(source: Source) {
    are_marked(source, Form::Native).await;
}

promised!(delivered_rows_of_message_groups_are_marked to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn delivered_rows_of_message_groups_are_marked(source: Source) {
    are_marked(source, Form::MessageGroup).await;
}

promised!(delivered_entities_are_marked to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn delivered_entities_are_marked(source: Source) {
    are_marked(source, Form::Entity).await;
}

promised!(delivered_rows_of_occurred_on_are_marked to postgres, oldest_postgres);

async fn delivered_rows_of_occurred_on_are_marked(source: Source) {
    are_marked(source, Form::OccurredOn).await;
}

promised!(delivered_rows_of_produce_receive_are_marked to postgres, oldest_postgres, mysql, mariadb);

async fn delivered_rows_of_produce_receive_are_marked(source: Source) {
    are_marked(source, Form::ProduceReceive).await;
}

/// From `init` to the marks: everything is delivered once, marked in few statements, and no mark comes back as an event.
async fn are_marked(source: Source, form: Form) {
    const MANY: usize = 3000;
    let marked = Polled::marked(source, form).await;
    let topic = Topic::create(3).await;
    let url = marked.outbox.url();
    let arguments = marked.arguments(&url, &topic, &[]);
    check(&arguments[1..]).await.is_fine("mark", "can be marked");
    marked.add("a", 0..MANY).await;
    marked.add("b", 0..2).await;
    marked.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
    assert_eq!(marked.done().await, MANY + 2, "caught up means marked as well");

    let relay = marked.relay(&topic, &[]);
    marked.add("c", 0..MANY).await;
    marked.until_done(2 * MANY + 2).await;
    eventually(PATIENCE, "the marks are counted", async || {
        (metric(&relay, "outboxd_marked_rows_total").await == MANY as u64).then_some(())
    })
    .await;
    let statements = metric(&relay, "outboxd_mark_statements_total").await;
    assert!((3..=60).contains(&statements), "{statements} statements for {MANY} rows");
    let status = relay.status().await;
    assert_eq!((&status["marking"]["waiting"], &status["marking"]["last_error"]), (&0.into(), &().into()), "{status}");
    // Long enough for marks to have come back, had they.
    marked.add("d", 0..1).await;
    marked.until_done(2 * MANY + 3).await;
    relay.stop().await;
    let records = topic.reader().rest().await;
    assert_eq!(records.len(), 2 * MANY + 3, "each is delivered once, and no mark is");
    let mut arrived = Arrived::default();
    for record in &records {
        arrived.note(record.value.as_deref().expect("a value"));
    }
    assert_eq!(arrived.len(), 2 * MANY + 3);

    // What is marked already is not touched again, and a row that is gone is no trouble.
    marked.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
    assert_eq!(topic.reader().rest().await.len(), 2 * MANY + 3);
}

promised!(rows_are_marked_behind_the_watermark_and_never_before_their_acknowledgement to postgres, mysql, mariadb, mongodb);

/// One of two brokers is frozen. What it owes an answer for is not marked, nor is what comes after that, though the other
/// broker has acknowledged it: the position stays before both.
async fn rows_are_marked_behind_the_watermark_and_never_before_their_acknowledgement(source: Source) {
    let kafka = PrivateKafka::start(2).await;
    let outbox = Outbox::create(source).await;
    outbox.add_status().await;
    let topic = Topic::assigned(&kafka.brokers(), &[&[1], &[2], &[1], &[2]]).await;
    let relay = outbox.streaming(&topic, &MARK).await;
    let writer = outbox.writer().await;
    let mut reader = topic.reader();
    let keys: Vec<String> = (0..16).map(|number| format!("key-{number:02}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    writer.commit(&keys).await;
    let records = reader.take(keys.len()).await;
    let led_by_the_frozen = |key: &str| {
        let record = records.iter().find(|record| record.key.as_deref() == Some(key)).expect("each key has a record");
        record.partition % 2 == 1
    };
    let (frozen, alive): (Vec<&str>, Vec<&str>) = keys.iter().partition(|key| led_by_the_frozen(key));
    outbox.until_all_marked(PATIENCE).await;

    kafka.freeze(2);
    writer.commit(&alive).await;
    outbox.until_all_marked(PATIENCE).await;
    let (marked, _) = outbox.marked().await;
    writer.commit(&frozen[..1]).await;
    let first_unacknowledged = outbox.end_of_log().await;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(8) {
        writer.commit(&alive).await;
        reader.take(alive.len()).await;
        assert_eq!(outbox.marked().await.0, marked, "nothing after the unacknowledged commit is marked");
        let stored = outbox.stored().await.expect("a position is stored");
        assert!(!stored.covers(&first_unacknowledged), "the position stays before it");
    }
    kafka.thaw(2);
    outbox.expected().await.arrive_in(&mut topic.reader(), PATIENCE).await;
    outbox.until_all_marked(PATIENCE).await;
    let end = outbox.end_of_log().await;
    outbox.until_confirmed(&end, PATIENCE).await;
    relay.stop().await;
}

promised!(killed_relays_leave_no_delivered_row_unmarked to postgres, mysql, mariadb, mongodb);

async fn killed_relays_leave_no_delivered_row_unmarked(source: Source) {
    const KEYS: [&str; 5] = ["a", "b", "c", "d", "e"];
    let outbox = Outbox::create(source).await;
    outbox.add_status().await;
    let topic = Topic::create(4).await;
    let mut relay = outbox.streaming(&topic, &MARK).await;
    outbox.writer().await.commit(&KEYS).await;
    let enough = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for _ in 0..3 {
        let (writer, enough) = (outbox.writer().await, enough.clone());
        writers.push(tokio::spawn(async move {
            while !enough.load(Ordering::Relaxed) {
                writer.commit(&KEYS).await;
            }
        }));
    }
    let mut dice = Dice::seeded(5);
    for _ in 0..6 {
        relay.until_state("streaming").await;
        // With marks on their way: between the statement and the confirmation, or in the middle of either.
        let marked = outbox.marked().await.0;
        eventually(PATIENCE, "rows are being marked", async || (outbox.marked().await.0 > marked).then_some(())).await;
        tokio::time::sleep(Duration::from_millis(dice.roll(400))).await;
        relay.kill();
        relay = outbox.relay(&topic, &MARK);
    }
    enough.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.expect("a writer wrote");
    }
    let expected = outbox.expected().await;
    assert!(expected.count() > 500, "only {} events were written", expected.count());
    println!("{:?}", expected.arrive_in(&mut topic.reader(), PATIENCE).await);
    outbox.until_all_marked(PATIENCE).await;
    relay.stop().await;
    // What is stored lies behind the marks, so that the next start has nothing to repeat.
    let before = topic.reader().rest().await.len();
    outbox.relay(&topic, &[&MARK[..], &["--until-caught-up"]].concat()).exits_with(0).await;
    assert_eq!(topic.reader().rest().await.len(), before, "a stop has drained the marks");
}

promised!(parked_row_is_marked_as_failed_with_its_reason to postgres, mysql, mariadb, mongodb);

async fn parked_row_is_marked_as_failed_with_its_reason(source: Source) {
    for form in [Form::Native, Form::MessageGroup, Form::Entity] {
        is_marked_as_failed(source, form).await;
    }
}

promised!(parked_row_is_not_pending_in_layouts_without_a_status to postgres, mysql);

async fn parked_row_is_not_pending_in_layouts_without_a_status(source: Source) {
    is_marked_as_failed(source, Form::ProduceReceive).await;
    if source == Source::Postgres {
        is_marked_as_failed(source, Form::OccurredOn).await;
    }
}

async fn is_marked_as_failed(source: Source, form: Form) {
    let marked = Polled::marked(source, form).await;
    let topic = Topic::create_at(&shared_kafka(), 1, &[("max.message.bytes", "2000")]).await;
    let dead = Topic::create(1).await;
    let letters = format!("topic:{}", dead.name);
    let payload = |n: usize| {
        let filler = if n == 2 { "x".repeat(4000) } else { String::new() };
        format!(r#"{{"key":"a","n":{n},"filler":"{filler}"}}"#)
    };
    marked.add_of((0..5).map(|n| ("a".to_owned(), n, payload(n))).collect()).await;
    marked.relay(&topic, &["--until-caught-up", "--dead-letter", &letters]).exits_with(0).await;
    assert_eq!(dead.reader().take(1).await.len(), 1);
    assert_eq!(marked.done().await, 4, "the others are done");
    let failed = match (source, form) {
        (Source::MongoDb, Form::MessageGroup) => {
            marked.count_documents(doc! { "status": "FAILED", "errorMessage": { "$regex": "2000" } }).await
        }
        (Source::MongoDb, Form::Native) => {
            marked.count_documents(doc! { "status": "failed", "attempts": 1, "last_error": { "$regex": "2000" } }).await
        }
        // As often as it may be tried: nobody takes it for one that waits for another try.
        (Source::MongoDb, _) => {
            marked
                .count_documents(doc! { "status": "failed", "retry_count": 5, "last_error": { "$regex": "2000" } })
                .await
        }
        (_, Form::Native) => marked.count("status = 'failed' AND attempts = 1 AND last_error LIKE '%2000%'").await,
        (_, Form::MessageGroup) => marked.count("status = 'FAILED' AND error_message LIKE '%2000%'").await,
        (_, Form::Entity) => marked.count("status = 'failed' AND retry_count = 5 AND last_error LIKE '%2000%'").await,
        (_, Form::OccurredOn) => {
            marked.count(r#""ProcessedOnUtc" IS NULL AND "RetryCount" = 3 AND "Error" LIKE '%2000%'"#).await
        }
        (_, Form::ProduceReceive) => {
            marked.count("processed = 0 AND retry = 3 AND error_code = 'MSG_SIZE_TOO_LARGE'").await
        }
    };
    assert_eq!(failed, 1, "{form:?}");
}

promised!(row_that_an_http_server_refuses_is_marked_as_failed to postgres, mysql, mongodb);

/// There a record is refused long after it was handed over, with others behind it.
async fn row_that_an_http_server_refuses_is_marked_as_failed(source: Source) {
    let marked = Polled::marked(source, Form::Native).await;
    let dead = Topic::create(1).await;
    let letters = format!("topic:{}", dead.name);
    let server = HttpServer::start(|request| {
        // However the database prints it.
        let refused = String::from_utf8_lossy(&request.body).replace(' ', "").contains(r#""n":7"#);
        Answer::Status(if refused { 422 } else { 200 })
    })
    .await;
    marked.add("a", 0..7).await;
    marked.add("b", 7..8).await;
    marked.add("a", 8..20).await;
    let flags = ["--max-retries", "0", "--brokers", &dead.brokers, "--dead-letter", &letters, "--until-caught-up"];
    marked.relay_to(&server.url(), &flags).exits_with(0).await;
    assert_eq!((marked.done().await, marked.of_status("failed").await), (19, 1));
}

promised!(row_is_marked_when_every_publisher_has_it to postgres, mysql, mariadb, mongodb);

async fn row_is_marked_when_every_publisher_has_it(source: Source) {
    let outbox = Outbox::create(source).await;
    outbox.add_status().await;
    let (one, other) = (Topic::create(1).await, Topic::create(1).await);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = format!(
        "[pipeline.shop]\nsource = {:?}\nbrokers = {:?}\nmark = true\ncheckpoint-interval = \"100ms\"\n\
         [pipeline.shop.publisher.one]\ntopic = {:?}\n[pipeline.shop.publisher.other]\ntopic = {:?}\n",
        outbox.url(),
        one.brokers,
        one.name,
        other.name
    );
    std::fs::write(file.path(), text).expect("the configuration is written");
    let mut relay = Relay::spawn(&["run", "--config", file.path().to_str().expect("a path")]);
    relay.until_state("streaming").await;
    let writer = outbox.writer().await;
    writer.commit(&["a", "b"]).await;
    outbox.until_all_marked(PATIENCE).await;
    let admin = relay.admin().await;
    assert_eq!(outboxd(&["pause", "shop/other", "--admin", &admin]).await.code, 0);
    for _ in 0..50 {
        writer.commit(&["a", "b"]).await;
    }
    one.reader().take(102).await;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        assert_eq!(outbox.marked().await, (2, 100), "the other has not had them");
    }
    eventually(PATIENCE, "it is resumed", async || {
        (outboxd(&["resume", "shop/other", "--admin", &admin]).await.code == 0).then_some(())
    })
    .await;
    other.reader().take(102).await;
    outbox.until_all_marked(PATIENCE).await;
    assert_eq!(one.reader().rest().await.len(), 102, "whoever had them gets them only once");
    relay.stop().await;
}
