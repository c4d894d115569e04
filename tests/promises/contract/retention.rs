//! Retention deletes what was delivered long ago, and never what was not, however old it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mongodb::bson::{DateTime, Document, doc};

use crate::support::shop::taken;
use crate::support::{Aged, Answer, Form, HttpServer, PATIENCE, Polled, Source, Topic, eventually};

/// A server that takes events up to a number, and asks for patience with all others.
async fn taking_up_to(number: u64) -> (HttpServer, Arc<AtomicU64>) {
    let upto = Arc::new(AtomicU64::new(number));
    let says = upto.clone();
    let server = HttpServer::start(move |request| {
        let numbers = request.json();
        let all = numbers
            .as_array()
            .is_some_and(|all| all.iter().all(|one| one["n"].as_u64() <= Some(says.load(Ordering::Relaxed))));
        Answer::Status(if all { 200 } else { 503 })
    })
    .await;
    (server, upto)
}

promised!(an_undelivered_row_is_never_pruned_however_old to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn an_undelivered_row_is_never_pruned_however_old(source: Source) {
    let aged = Aged::create(source).await;
    // Nobody has delivered anything yet, and nobody runs.
    aged.add(0..5, 400).await;
    let ended = aged.prune(&["--wait", "1s"]).await;
    assert!(ended.code == 0 && ended.stdout.contains("deleted 0 rows of aged"), "{ended:?}");
    assert!(ended.stdout.contains("has not delivered everything up to"), "{ended:?}");
    assert_eq!(aged.count().await, 5);

    // A relay runs, and its sink takes nothing.
    let (sink, upto) = taking_up_to(4).await;
    let mut relay = aged.relay_to(&sink, &[]);
    relay.until_state("streaming").await;
    sink.until("five events are taken", |_| taken(&sink).len() == 5).await;
    aged.add(5..8, 400).await;
    sink.until("the sixth is tried", |requests| requests.iter().any(|one| one.json()[0]["n"] == 5)).await;
    aged.prunes(&["--wait", "2s"], "deleted 0 rows of aged").await;
    assert_eq!(aged.count().await, 8);
    aged.prunes(&["--wait", "1s", "--dry-run"], "would delete 0 rows of aged").await;

    // When it takes them they may go; what is young stays.
    upto.store(u64::MAX, Ordering::Relaxed);
    aged.add(8..10, 1).await;
    sink.until("all are taken", |_| taken(&sink).len() == 10).await;
    aged.prunes(&["--dry-run"], "would delete 8 rows of aged").await;
    assert_eq!(aged.count().await, 10);
    aged.prunes(&["--prune-batch", "3"], "deleted 8 rows of aged").await;
    assert_eq!(aged.count().await, 2);
    aged.prunes(&[], "deleted 0 rows of aged").await;

    // Deletions are no events, and disturb nobody.
    aged.add(10..12, 0).await;
    sink.until("two more are taken", |_| taken(&sink).len() >= 12).await;
    assert_eq!(taken(&sink), (0..12).collect::<Vec<u64>>());
    relay.stop().await;
}

promised!(rows_are_pruned_while_the_relay_runs_and_not_before_they_are_delivered to postgres, mysql, mariadb, mongodb);

async fn rows_are_pruned_while_the_relay_runs_and_not_before_they_are_delivered(source: Source) {
    let aged = Aged::create(source).await;
    let (sink, upto) = taking_up_to(9).await;
    aged.add(0..10, 20).await;
    // Passes are seldom when the age is long; the first comes soon.
    let mut relay = aged.relay_to(&sink, &["--prune-after", "10d", "--prune-batch", "4"]);
    aged.until_count(0).await;
    let page = relay.get("/metrics").await;
    let pipeline = relay.status().await["name"].as_str().expect("a name").to_owned();
    let counted = format!("outboxd_pruned_rows_total{{pipeline=\"{pipeline}\"}} 10");
    assert!(page.contains(&counted), "{counted}: {page}");
    eventually(PATIENCE, "the status tells of the pass", async || {
        (relay.status().await["retention"]["rows"] == 10).then_some(())
    })
    .await;
    relay.stop().await;

    // One that cannot be delivered keeps what lies behind it, too.
    aged.add(10..12, 20).await;
    relay = aged.relay_to(&sink, &["--prune-after", "1s"]);
    eventually(PATIENCE, "retention says for whom it waits", async || {
        let status = relay.status().await;
        let why = status["retention"]["held_back_by"].as_str()?;
        why.contains("has not delivered everything").then_some(())
    })
    .await;
    assert_eq!(aged.count().await, 2);
    upto.store(u64::MAX, Ordering::Relaxed);
    aged.until_count(0).await;
    assert_eq!(taken(&sink), (0..12).collect::<Vec<u64>>());
    relay.stop().await;
}

promised!(a_late_commit_with_an_old_timestamp_is_not_pruned_before_it_is_delivered to postgres, mysql, mariadb, mongodb);

async fn a_late_commit_with_an_old_timestamp_is_not_pruned_before_it_is_delivered(source: Source) {
    let aged = Aged::create(source).await;
    let (sink, upto) = taking_up_to(0).await;
    let mut relay = aged.relay_to(&sink, &[]);
    relay.until_state("streaming").await;
    aged.add(0..1, 400).await;
    sink.until("the first is taken", |_| taken(&sink) == [0]).await;
    // A transaction is under way with a row that is as old, and a young one waits for the sink.
    let late = match source {
        Source::MongoDb => None,
        _ => {
            let late = aged.outbox.writer().await;
            late.run("BEGIN").await;
            late.run(&aged.insert(2..3, 400)).await;
            Some(late)
        }
    };
    aged.add(1..2, 0).await;
    let mut pruning = aged.pruning(&["--wait", "120s"]);
    eventually(PATIENCE, "prune waits for the young one", async || pruning.log().contains("waiting: ").then_some(()))
        .await;
    // Now it is committed: too late to be among what prune has found.
    match late {
        Some(late) => late.run("COMMIT").await,
        None => aged.add(2..3, 400).await,
    }
    upto.store(1, Ordering::Relaxed);
    pruning.exits_with(0).await;
    assert_eq!(taken(&sink), [0, 1]);
    assert_eq!(aged.count().await, 2, "the first has gone; the late one and the young one are there");
    aged.prunes(&["--wait", "1s"], "deleted 0 rows of aged").await;
    upto.store(u64::MAX, Ordering::Relaxed);
    sink.until("the late one is taken", |_| taken(&sink) == [0, 1, 2]).await;
    aged.prunes(&[], "deleted 1 row of aged").await;
    assert_eq!(aged.count().await, 1);
    relay.stop().await;
}

promised!(a_polled_row_goes_only_when_it_is_marked_as_delivered to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn a_polled_row_goes_only_when_it_is_marked_as_delivered(source: Source) {
    for form in [Form::Native, Form::MessageGroup, Form::Entity] {
        of_form(source, form).await;
    }
    if source != Source::MongoDb {
        of_form(source, Form::ProduceReceive).await;
    }
    if source.is_postgres() {
        of_form(source, Form::OccurredOn).await;
    }
}

/// Columns of a layout, as SQL and as documents have them.
fn columns(form: Form) -> (&'static str, &'static str, &'static str) {
    match form {
        Form::Native | Form::Entity => ("published_at", "created_at", "status = 'failed'"),
        Form::MessageGroup => ("processed_at", "created_at", "status = 'FAILED'"),
        Form::OccurredOn => (r#""ProcessedOnUtc""#, r#""OccurredOnUtc""#, r#""RetryCount" = 3"#),
        Form::ProduceReceive => ("produced_at", "", ""),
    }
}

async fn of_form(source: Source, form: Form) {
    let polled = Polled::create(source, form).await;
    let topic = Topic::create(1).await;
    polled.add("a", 0..30).await;
    polled.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
    assert_eq!(polled.done().await, 30);
    polled.add("b", 0..7).await;
    let url = polled.outbox.url();
    let prune = async |more: &[&str]| {
        let arguments = [&["prune", &url, "--older-than", "30d"], &polled.flags()[..], more].concat();
        let ended = crate::support::outboxd(&arguments).await;
        assert_eq!(ended.code, 0, "{form:?}: {ended:?}");
        ended.stdout
    };
    let left = async || match source {
        Source::MongoDb => polled.count_documents(doc! {}).await,
        _ => polled.count("1 = 1").await,
    };
    // Everything was made long ago; what was delivered was delivered a moment ago.
    let (done_at, made_at, failed) = columns(form);
    let long_ago =
        if source.is_postgres() { "now() - interval '99 days'" } else { "utc_timestamp(6) - INTERVAL 99 DAY" };
    let table = form.table();
    let documents = source == Source::MongoDb;
    let then = DateTime::from_millis(DateTime::now().timestamp_millis() - 99 * 86_400_000);
    let camel = |name: &str| match (form, name) {
        (Form::MessageGroup, "processed_at") => "processedAt".to_owned(),
        (Form::MessageGroup, "created_at") => "createdAt".to_owned(),
        (_, name) => name.to_owned(),
    };
    let set = async |column: &str, condition: &str, filter: Document| {
        if documents {
            let update = doc! { "$set": { camel(column): then } };
            let collection = polled.outbox.mongodb().collection(table);
            collection.update_many(filter, update).await.expect("documents are changed");
        } else {
            polled.outbox.execute(&format!("UPDATE {table} SET {column} = {long_ago} WHERE {condition}")).await;
        }
    };
    if !made_at.is_empty() {
        set(made_at, "1 = 1", doc! {}).await;
    }
    let said = prune(&[]).await;
    assert!(said.contains("deleted 0 rows"), "{form:?}: {said}");
    assert!(made_at.is_empty() || said.contains("kept: 37 old rows"), "{form:?}: {said}");
    assert_eq!(left().await, 37);

    // Those that were delivered long ago go, in small batches.
    set(done_at, &format!("{done_at} IS NOT NULL"), doc! { camel(done_at): { "$type": "date" } }).await;
    if form == Form::ProduceReceive {
        let said = prune(&[]).await;
        assert!(said.contains("deleted 0 rows"), "without a receipt they stay: {said}");
        set("received_at", "processed = 1 AND MOD(id, 2) = 0", doc! {}).await;
        assert!(prune(&[]).await.contains("deleted 15 rows"));
        assert!(prune(&["--prune-also", "unreceived"]).await.contains("deleted 15 rows"));
    } else {
        assert!(prune(&["--dry-run"]).await.contains("would delete 30 rows"));
        assert!(prune(&["--prune-batch", "7"]).await.contains("deleted 30 rows"));
    }
    assert_eq!(left().await, 7, "what is pending stays");
    if made_at.is_empty() {
        return;
    }

    // What was given up stays as well, unless it is said.
    if documents {
        let mut failed = doc! { "status": if form == Form::MessageGroup { "FAILED" } else { "failed" } };
        if form == Form::Entity {
            failed.insert("retry_count", 5);
        }
        let collection = polled.outbox.mongodb().collection(table);
        collection.update_many(doc! {}, doc! { "$set": failed }).await.expect("documents are changed");
    } else {
        let exhausted = if form == Form::Entity { ", retry_count = 5" } else { "" };
        polled.outbox.execute(&format!("UPDATE {table} SET {failed}{exhausted}")).await;
    }
    assert!(prune(&[]).await.contains("deleted 0 rows"));
    assert!(prune(&["--prune-also", "failed"]).await.contains("deleted 7 rows"));
    assert_eq!(left().await, 0);
}
