//! Tables with a partition for each day: old days are dropped and not deleted from, and new ones are there before they come.

use crate::support::shop::taken;
use crate::support::{Aged, Answer, Form, HttpServer, PATIENCE, Polled, Source, Topic, eventually, outboxd};

const BY_DAY: &[&str] = &["--partition-by", "day"];

/// How many partitions hold rows.
async fn filled(aged: &Aged) -> u64 {
    match aged.outbox.source.is_postgres() {
        true => aged.number("SELECT count(DISTINCT tableoid) FROM aged").await,
        false => {
            let names = "SELECT GROUP_CONCAT(partition_name) FROM information_schema.partitions
                         WHERE table_schema = DATABASE() AND table_name = 'aged'";
            let names = aged.outbox.text(names).await.expect("there are partitions");
            let mut filled = 0;
            for name in names.split(',') {
                filled += aged.number(&format!("SELECT EXISTS (SELECT 1 FROM aged PARTITION ({name}))")).await;
            }
            filled
        }
    }
}

/// Partitions whose name ends so.
async fn partitions(aged: &Aged, like: &str) -> u64 {
    match aged.outbox.source.is_postgres() {
        true => {
            let query = "SELECT count(*) FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
                         WHERE inhparent = 'aged'::regclass AND relname LIKE";
            aged.number(&format!("{query} '{like}'")).await
        }
        false => {
            let query = "SELECT COUNT(*) FROM information_schema.partitions
                         WHERE table_schema = DATABASE() AND table_name = 'aged' AND partition_name LIKE";
            aged.number(&format!("{query} '{like}'")).await
        }
    }
}

/// The day of `days` ago, as partitions are called.
async fn day(aged: &Aged, days: i64) -> String {
    let moment = aged.moment(days);
    let query = match aged.outbox.source.is_postgres() {
        true => format!("SELECT to_char(({moment}) AT TIME ZONE 'UTC', 'YYYYMMDD')"),
        false => format!("SELECT DATE_FORMAT({moment}, '%Y%m%d')"),
    };
    aged.outbox.text(&query).await.expect("a day")
}

/// Makes the partition of a day that is over, as it would be there if the table were as old.
async fn make_day(aged: &Aged, days: i64) -> String {
    let (name, moment) = (day(aged, days).await, aged.moment(days));
    if aged.outbox.source.is_postgres() {
        let bounds = format!(
            "SELECT format('FROM (%L) TO (%L)', d || ' 00:00:00+00', d + 1 || ' 00:00:00+00')
             FROM (SELECT (({moment}) AT TIME ZONE 'UTC')::date AS d) AS day"
        );
        let bounds = aged.outbox.text(&bounds).await.expect("bounds");
        aged.outbox.execute(&format!("CREATE TABLE aged_p{name} PARTITION OF aged FOR VALUES {bounds}")).await;
        return format!("aged_p{name}");
    }
    let first = "SELECT partition_name, partition_description FROM information_schema.partitions
                 WHERE table_schema = DATABASE() AND table_name = 'aged' ORDER BY partition_ordinal_position LIMIT 1";
    let first_name = aged.outbox.text(first).await.expect("a partition");
    let bound = aged.outbox.text(&first.replacen("partition_name, ", "", 1)).await.expect("a bound");
    let end = format!("SELECT DATE({moment}) + INTERVAL 1 DAY");
    let end = aged.outbox.text(&end).await.expect("a date");
    let split = format!(
        "ALTER TABLE aged REORGANIZE PARTITION {first_name} INTO (
             PARTITION p{name} VALUES LESS THAN ('{end}'), PARTITION {first_name} VALUES LESS THAN ({bound}))"
    );
    aged.outbox.execute(&split).await;
    format!("p{name}")
}

promised!(partitioned_outbox_arrives_from_the_log_and_loses_whole_days to postgres, oldest_postgres, mysql, mariadb);

async fn partitioned_outbox_arrives_from_the_log_and_loses_whole_days(source: Source) {
    let aged = Aged::init(source, BY_DAY).await;
    let topic = Topic::create(1).await;
    let straddling = make_day(&aged, 30).await;
    let (old, older) = (make_day(&aged, 40).await, make_day(&aged, 50).await);
    aged.add(0..10, 50).await;
    aged.add(10..20, 40).await;
    aged.add(20..30, 30).await;
    aged.add(30..40, 0).await;
    assert_eq!(filled(&aged).await, 4);

    // Not delivered, hence not dropped, however old.
    let said = aged.prune(&["--wait", "1s"]).await.stdout;
    assert!(said.contains("deleted 0 rows") && !said.contains("dropped") && said.contains("kept: pipeline"), "{said}");
    assert_eq!(aged.count().await, 40);

    let mut relay = aged.relay(&topic, &[]);
    relay.until_state("streaming").await;
    let records = topic.reader().take(40).await;
    assert!(records.iter().enumerate().all(|(n, record)| {
        record
            .value
            .as_deref()
            .is_some_and(|value| serde_json::from_str::<serde_json::Value>(value).expect("JSON")["n"] == n)
    }));
    aged.prunes(&["--dry-run"], "would drop 2 partitions of aged").await;
    let said = aged.prune(&[]).await.stdout;
    assert!(said.contains("deleted 0 rows of aged"), "a day is dropped, not deleted from: {said}");
    assert!(said.contains(&format!("dropped 2 partitions of aged: {older}, {old}")), "{said}");
    assert_eq!((partitions(&aged, &older).await, partitions(&aged, &old).await), (0, 0));
    assert_eq!(partitions(&aged, &straddling).await, 1, "a day that is not over stays whole");
    assert_eq!(aged.count().await, 20);

    // The relay has not been disturbed.
    aged.add(40..45, 0).await;
    assert_eq!(topic.reader().take(45).await.len(), 45);
    assert!(relay.is_running());
    relay.stop().await;
}

promised!(days_are_dropped_while_the_relay_runs to postgres, mysql, mariadb);

async fn days_are_dropped_while_the_relay_runs(source: Source) {
    let aged = Aged::init(source, BY_DAY).await;
    let topic = Topic::create(1).await;
    let old = make_day(&aged, 40).await;
    aged.add(0..10, 40).await;
    let mut relay = aged.relay(&topic, &["--prune-after", "30d"]);
    eventually(PATIENCE, "the old day is dropped", async || {
        assert!(relay.is_running());
        (partitions(&aged, &old).await == 0).then_some(())
    })
    .await;
    assert_eq!(topic.reader().take(10).await.len(), 10, "not before it was delivered");
    eventually(PATIENCE, "the status tells of it", async || {
        let retention = relay.status().await["retention"].clone();
        (retention["partitions"] == 1 && retention["partitions_until"].is_string()).then_some(())
    })
    .await;
    relay.stop().await;
}

promised!(days_are_there_before_they_come_and_no_insert_ever_fails to postgres, oldest_postgres, mysql, mariadb);

async fn days_are_there_before_they_come_and_no_insert_ever_fails(source: Source) {
    let aged = Aged::init(source, BY_DAY).await;
    // A week of midnights, and more.
    for ahead in 0..=7 {
        aged.add(0..1, -ahead).await;
    }
    assert_eq!(filled(&aged).await, 8, "each day has a partition of its own");
    aged.add(0..1, -20).await;
    aged.add(0..1, -40).await;
    let last = day(&aged, -7).await;
    assert_eq!(partitions(&aged, &format!("%p{last}")).await, 1);

    // Nobody has made partitions for days: rows are taken all the same, and the days to come are made.
    aged.outbox.execute("DELETE FROM aged").await;
    for ahead in 0..=7 {
        let name = day(&aged, -ahead).await;
        match source.is_postgres() {
            true => aged.outbox.execute(&format!("DROP TABLE aged_p{name}")).await,
            false => aged.outbox.execute(&format!("ALTER TABLE aged DROP PARTITION p{name}")).await,
        }
    }
    aged.add(0..3, 0).await;
    aged.prunes(&["--wait", "1s"], &format!("partitions of aged, up to {}", dashed(&last))).await;
    assert_eq!(partitions(&aged, &format!("%p{last}")).await, 1);
    aged.prunes(&["--wait", "1s"], "deleted 0 rows").await;
    assert_eq!(aged.count().await, 3);
    aged.add(0..1, -3).await;

    // A relay does the same without being told to.
    match source.is_postgres() {
        true => aged.outbox.execute(&format!("DROP TABLE aged_p{last}")).await,
        false => aged.outbox.execute(&format!("ALTER TABLE aged DROP PARTITION p{last}")).await,
    }
    // Not Kafka, which takes no record of a day to come.
    let sink = HttpServer::start(|_| Answer::Status(200)).await;
    let relay = aged.relay_to(&sink, &[]);
    eventually(PATIENCE, "the last day is there again", async || {
        (partitions(&aged, &format!("%p{last}")).await == 1).then_some(())
    })
    .await;
    // Whatever became of the partitions that the rows were in.
    sink.until("all that was committed is delivered", |_| taken(&sink).len() == 14).await;
    relay.stop().await;
}

fn dashed(day: &str) -> String {
    format!("{}-{}-{}", &day[..4], &day[4..6], &day[6..])
}

promised!(a_polled_day_is_dropped_only_when_all_in_it_was_delivered to postgres, oldest_postgres, mysql, mariadb);

async fn a_polled_day_is_dropped_only_when_all_in_it_was_delivered(source: Source) {
    for form in [Form::Native, Form::MessageGroup, Form::Entity, Form::OccurredOn] {
        if form == Form::OccurredOn && !source.is_postgres() {
            continue;
        }
        let polled = Polled::init(source, form, BY_DAY).await;
        let topic = Topic::create(1).await;
        let (table, outbox) = (form.table(), &polled.outbox);
        let (made_at, done_at) = match form {
            Form::OccurredOn => (r#""OccurredOnUtc""#, r#""ProcessedOnUtc""#),
            Form::MessageGroup => ("created_at", "processed_at"),
            _ => ("created_at", "published_at"),
        };
        let (then, long_ago) = match source.is_postgres() {
            true => ("'2020-01-01 12:00:00+00'", "now() - interval '99 days'"),
            false => ("'2020-01-01 12:00:00'", "utc_timestamp(6) - INTERVAL 99 DAY"),
        };
        if source.is_postgres() {
            let day = format!(
                "CREATE TABLE old_day PARTITION OF {table}
                 FOR VALUES FROM ('2020-01-01 00:00:00+00') TO ('2020-01-02 00:00:00+00')"
            );
            outbox.execute(&day).await;
        } else {
            let first = format!(
                "SELECT CONCAT(partition_name, ' VALUES LESS THAN (', partition_description, ')')
                 FROM information_schema.partitions WHERE table_schema = DATABASE() AND table_name = '{table}'
                 ORDER BY partition_ordinal_position LIMIT 1"
            );
            let first = outbox.text(&first).await.expect("a partition");
            let name = first.split(' ').next().expect("a name");
            let day = format!(
                "ALTER TABLE {table} REORGANIZE PARTITION {name} INTO (
                     PARTITION old_day VALUES LESS THAN ('2020-01-02'), PARTITION {first})"
            );
            outbox.execute(&day).await;
        }
        polled.add("a", 0..10).await;
        let url = outbox.url();
        let prune = async || {
            let arguments = [&["prune", &url, "--older-than", "30d"], &polled.flags()[..]].concat();
            let ended = outboxd(&arguments).await;
            assert_eq!(ended.code, 0, "{form:?}: {ended:?}");
            ended.stdout
        };
        // Rows come into the old day, and one of them is not delivered.
        outbox.execute(&format!("UPDATE {table} SET {made_at} = {then}")).await;
        polled.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
        assert_eq!(polled.done().await, 10, "{form:?}");
        let said = prune().await;
        assert!(said.contains("kept: partition old_day holds rows"), "they were delivered just now: {form:?}: {said}");
        outbox.execute(&format!("UPDATE {table} SET {done_at} = {long_ago}")).await;
        polled.add("b", 0..1).await;
        let late = format!("UPDATE {table} SET {made_at} = {then} WHERE {done_at} IS NULL");
        outbox.execute(&late).await;
        let said = prune().await;
        assert!(said.contains("kept: partition old_day holds rows") && !said.contains("dropped"), "{form:?}: {said}");
        assert_eq!(polled.count("1 = 1").await, 11);

        polled.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
        outbox.execute(&format!("UPDATE {table} SET {done_at} = {long_ago}")).await;
        let said = prune().await;
        assert!(said.contains("deleted 0 rows") && said.contains("dropped 1 partition"), "{form:?}: {said}");
        assert_eq!(polled.count("1 = 1").await, 0);
        polled.add("c", 0..3).await;
        polled.relay(&topic, &["--until-caught-up"]).exits_with(0).await;
        assert_eq!(topic.reader().rest().await.len(), 14, "{form:?}");
    }
}
