//! Receipts: rows say that their records came out of Kafka, whatever happens to whoever writes that.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::support::{Dice, PATIENCE, PrivateServer, Relay, Source, Zones, eventually, metric};

promised!(receipts_are_written_by_the_batch_and_once to postgres, oldest_postgres, mysql, mariadb);

async fn receipts_are_written_by_the_batch_and_once(source: Source) {
    let zones = Zones::create(source, 3).await;
    for key in ["a", "b", "c", "d", "e"] {
        zones.add(key, 0..1000).await;
    }
    zones.deliver().await;
    let confirmer = zones.confirming(&[]).await;
    zones.until_received(5000).await;
    let moments = zones.moments().await;
    assert!(moments <= 15, "5000 rows took {moments} statements");
    eventually(PATIENCE, "offsets are committed", async || (zones.committed().await == 5000).then_some(())).await;
    let page = confirmer.get("/metrics").await;
    assert_eq!(metric(&page, "outboxd_confirmed_receipts_total"), 5000.0);
    assert_eq!(metric(&page, "outboxd_confirm_statements_total"), moments as f64, "{page}");
    assert_eq!(metric(&page, "outboxd_confirm_records_total"), 5000.0);
    assert_eq!(metric(&page, "outboxd_confirm_unmatched_total"), 0.0);
    eventually(PATIENCE, "nothing is left to read", async || {
        (metric(&confirmer.get("/metrics").await, "outboxd_confirm_lag_records") == 0.0).then_some(())
    })
    .await;
    confirmer.stop().await;

    // Whoever reads everything again changes nothing.
    let shape = "SELECT concat(min(received_at), ' ', max(received_at)) FROM produced";
    let before = zones.polled.outbox.text(shape).await;
    let url = zones.polled.outbox.url();
    Relay::spawn(&zones.arguments(&url, &format!("{}-again", zones.group()), &["--until-caught-up"]))
        .exits_with(0)
        .await;
    assert_eq!((zones.polled.outbox.text(shape).await, zones.moments().await), (before, moments));
}

promised!(until_caught_up_confirms_what_was_there_and_ends to postgres, mysql, mariadb);

async fn until_caught_up_confirms_what_was_there_and_ends(source: Source) {
    let zones = Zones::create(source, 3).await;
    zones.confirmer(&["--until-caught-up"]).exits_with(0).await;
    zones.add("a", 0..50).await;
    zones.deliver().await;
    zones.confirmer(&["--until-caught-up"]).exits_with(0).await;
    assert_eq!((zones.received().await, zones.committed().await), (50, 50));
    // Ends at once where nothing came.
    zones.confirmer(&["--until-caught-up"]).exits_with(0).await;
    assert_eq!(zones.committed().await, 50);
}

promised!(killed_confirmer_loses_no_receipt to postgres, mysql, mariadb);

async fn killed_confirmer_loses_no_receipt(source: Source) {
    let zones = Zones::create(source, 3).await;
    let relay = zones.polled.relay(&zones.topic, &["--poll-interval", "50ms"]);
    // A member of a name takes the place of its dead namesake at once.
    let flags = ["--kafka", "group.instance.id=zone", "--interval", "20ms", "--batch", "50"];
    let mut dice = Dice::seeded(8);
    let mut rows = 0;
    for _ in 0..8 {
        let mut confirmer = zones.confirmer(&flags);
        confirmer.until_state("streaming").await;
        let end = tokio::time::Instant::now() + Duration::from_millis(200 + dice.roll(600));
        while tokio::time::Instant::now() < end {
            zones.add("a", rows..rows + 40).await;
            rows += 40;
        }
        confirmer.kill();
    }
    let _confirmer = zones.confirmer(&flags);
    zones.until_received(rows).await;
    relay.stop().await;
}

promised!(offsets_wait_for_their_receipts to postgres, oldest_postgres, mysql, mariadb);

/// A row that somebody has locked keeps its batch from being written: neither may its offsets be committed.
async fn offsets_wait_for_their_receipts(source: Source) {
    let zones = Zones::create(source, 1).await;
    zones.add("a", 0..100).await;
    zones.produce_rows(1..101).await;
    let holder = zones.polled.outbox.writer().await;
    holder.run("BEGIN").await;
    holder.run("UPDATE produced SET retry = retry + 1 WHERE id = 70").await;
    let flags = ["--kafka", "group.instance.id=zone"];
    let confirmer = zones.confirming(&flags).await;
    eventually(PATIENCE, "the confirmer gives way, again and again", async || {
        let page = confirmer.get("/metrics").await;
        (metric(&page, "outboxd_confirm_lock_conflicts_total") >= 3.0).then_some(())
    })
    .await;
    let status = confirmer.status().await;
    assert!(status["last_error"].as_str().is_some_and(|error| error.to_lowercase().contains("lock")), "{status}");
    assert_eq!((status["in_flight"].as_u64(), zones.received().await, zones.committed().await), (Some(100), 0, 0));
    confirmer.kill();
    holder.run("ROLLBACK").await;
    let _confirmer = zones.confirmer(&flags);
    zones.until_received(100).await;
}

promised!(database_away_and_back_loses_no_receipt to postgres, mysql, mariadb);

async fn database_away_and_back_loses_no_receipt(source: Source) {
    let mut server = PrivateServer::start(source).await;
    let mut zones = Zones::create_at(source, &server.url(), 2).await;
    zones.add("a", 0..300).await;
    zones.produce_rows(1..101).await;
    let mut confirmer = zones.confirming(&[]).await;
    zones.until_received(100).await;

    server.stop().await;
    // Noticed without any record, too.
    confirmer.until_state("retrying").await;
    zones.produce_rows(101..301).await;
    eventually(PATIENCE, "it has tried for a while", async || {
        (metric(&confirmer.get("/metrics").await, "outboxd_retries_total") >= 3.0).then_some(())
    })
    .await;
    assert!(confirmer.get("/readyz").await.contains("not ready: retrying"));
    assert_eq!(zones.committed().await, 100);
    server.resume().await;
    zones.polled.outbox.reconnect().await;
    zones.until_received(300).await;
    confirmer.until_state("streaming").await;
    assert_eq!(confirmer.get("/readyz").await, "ok\n");
    confirmer.stop().await;
    assert_eq!(zones.committed().await, 300);
}

promised!(relay_and_confirmer_work_on_the_same_rows to postgres, oldest_postgres, mysql, mariadb);

/// A poller marks the rows that the confirmer is writing to, at the same moment.
async fn relay_and_confirmer_work_on_the_same_rows(source: Source) {
    let zones = Zones::create(source, 3).await;
    let relay = zones.polled.relay(&zones.topic, &["--poll-interval", "20ms", "--poll-batch", "200"]);
    let confirmer = zones.confirming(&["--interval", "10ms", "--batch", "200"]).await;
    for round in 0..60 {
        for key in ["a", "b", "c"] {
            zones.add(key, round * 50..(round + 1) * 50).await;
        }
    }
    zones.until_received(9000).await;
    eventually(PATIENCE, "all rows are marked", async || (zones.polled.done().await == 9000).then_some(())).await;
    assert_eq!(zones.topic.reader().rest().await.len(), 9000, "no row was delivered twice");
    let log = relay.log();
    assert!(!log.to_lowercase().contains("deadlock"), "{log}");
    let page = confirmer.get("/metrics").await;
    assert_eq!(metric(&page, "outboxd_confirm_lock_conflicts_total"), 0.0, "{page}");
    confirmer.stop().await;
    relay.stop().await;
}

promised!(a_log_is_relayed_and_confirmed to postgres, mysql, mariadb);

async fn a_log_is_relayed_and_confirmed(source: Source) {
    let zones = Zones::create(source, 3).await;
    let outbox = &zones.polled.outbox;
    let url = outbox.url();
    let layout = ["--layout", "produce-receive", "--table", zones.table()];
    let topic = ["--brokers", &zones.topic.brokers, "--topic", &zones.topic.name];
    let mut relay = Relay::spawn(&[&["run", &url], &topic[..], &layout].concat());
    relay.until_state("streaming").await;
    let confirmer = zones.confirming(&[]).await;
    for round in 0..20 {
        zones.add("a", round * 50..(round + 1) * 50).await;
    }
    zones.until_received(1000).await;
    assert_eq!(zones.polled.count("produced_at IS NOT NULL").await, 0, "a log needs no marks");
    confirmer.stop().await;
    relay.stop().await;
}

promised!(records_of_others_are_passed_and_counted to postgres, mysql, mariadb);

async fn records_of_others_are_passed_and_counted(source: Source) {
    let zones = Zones::create(source, 1).await;
    zones.add("a", 0..3).await;
    zones.produce_rows(1..3).await;
    zones.produce(None, "{}").await;
    for foreign in
        ["", "abc", "1.5", "99999999999999999999", "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b", "1); DROP TABLE produced"]
    {
        zones.produce(Some(foreign), "{}").await;
    }
    // One that the table might have, and has not.
    zones.produce(Some("4711"), "{}").await;
    zones.produce_rows(3..4).await;
    let confirmer = zones.confirming(&["--interval", "300ms"]).await;
    zones.until_received(3).await;
    let page = confirmer.get("/metrics").await;
    assert_eq!(metric(&page, "outboxd_confirm_foreign_records_total"), 7.0);
    assert_eq!(metric(&page, "outboxd_confirm_unmatched_total"), 1.0);
    assert_eq!(confirmer.log().matches("passed over a record").count(), 1, "the log is not flooded");
    confirmer.stop().await;
    assert_eq!(zones.committed().await, 11);
}

promised!(an_id_may_be_inside_the_value to postgres, mysql, mariadb);

async fn an_id_may_be_inside_the_value(source: Source) {
    let zones = Zones::create(source, 1).await;
    zones.add("a", 0..4).await;
    for value in [r#"{"meta":{"ids":["1"]}}"#, r#"{"meta":{"ids":[2]}}"#, "no json", r#"{"meta":{"ids":[]}}"#] {
        zones.produce(None, value).await;
    }
    let flags = ["--id-from", "json:/meta/ids/0", "--until-caught-up"];
    zones.confirmer(&flags).exits_with(0).await;
    let received = "SELECT concat(min(id), ' ', max(id), ' ', count(*)) FROM produced WHERE received_at IS NOT NULL";
    assert_eq!(zones.polled.outbox.text(received).await.as_deref(), Some("1 2 2"));
}

promised!(a_stop_writes_and_commits_what_was_gathered to postgres, mysql, mariadb);

async fn a_stop_writes_and_commits_what_was_gathered(source: Source) {
    let zones = Zones::create(source, 2).await;
    zones.add("a", 0..100).await;
    zones.produce_rows(1..101).await;
    // Nothing but the stop makes it write.
    let mut confirmer = zones.confirming(&["--interval", "1h"]).await;
    eventually(PATIENCE, "all is gathered", async || {
        (confirmer.status().await["in_flight"].as_u64() == Some(100)).then_some(())
    })
    .await;
    assert_eq!(zones.received().await, 0);
    confirmer.signal(Signal::SIGTERM);
    confirmer.exits_with(0).await;
    assert_eq!((zones.received().await, zones.moments().await, zones.committed().await), (100, 1, 100));
}

promised!(two_confirmers_share_the_partitions_and_hand_them_over to postgres, mysql);

async fn two_confirmers_share_the_partitions_and_hand_them_over(source: Source) {
    let zones = Zones::create(source, 4).await;
    zones.add("a", 0..600).await;
    let partitions = async |confirmer: &Relay| confirmer.status().await["partitions"].as_u64();
    // What the first has gathered when the second comes is written before its partitions are let go.
    let first = zones.confirming(&["--interval", "1h"]).await;
    zones.produce_rows(1..201).await;
    eventually(PATIENCE, "all is gathered", async || {
        (first.status().await["in_flight"].as_u64() == Some(200)).then_some(())
    })
    .await;
    let second = zones.confirming(&[]).await;
    eventually(PATIENCE, "each has its half", async || {
        (partitions(&first).await == Some(2) && partitions(&second).await == Some(2)).then_some(())
    })
    .await;
    assert_eq!((zones.received().await, zones.committed().await), (200, 200));
    assert_eq!(
        metric(&second.get("/metrics").await, "outboxd_confirm_records_total"),
        0.0,
        "and nothing is read twice"
    );

    first.stop().await;
    let third = zones.confirming(&[]).await;
    zones.produce_rows(201..401).await;
    zones.until_received(400).await;
    for confirmer in [&second, &third] {
        let receipts = metric(&confirmer.get("/metrics").await, "outboxd_confirmed_receipts_total");
        assert!(receipts > 0.0, "each does its part");
    }
    second.kill();
    zones.produce_rows(401..601).await;
    zones.until_received(600).await;
    third.stop().await;
}
