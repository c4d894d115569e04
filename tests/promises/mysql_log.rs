//! What a binary log may hold, and how it may be kept: whatever is committed arrives, and whatever cannot be read halts.

use std::time::Duration;

use outboxd::source::mysql::conninfo::ConnInfo;
use outboxd::source::mysql::dump::{self, Entry, ReplicaId};

use crate::support::MySqlFlavor::{MariaDb, MySql};
use crate::support::{
    MySqlDatabase, MySqlFlavor, Numbers, PATIENCE, PrivateMySql, Topic, add, ends, eventually, on_both, until_log,
};

#[tokio::test]
async fn flushed_and_purged_logs_do_not_disturb_a_running_relay() {
    on_both(async |flavor| {
        let server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        let relay = numbers.reading(&["--checkpoint-interval", "100ms"]).await;
        for number in 1..=3 {
            numbers.add(number).await;
            numbers.database.execute("FLUSH BINARY LOGS").await;
        }
        numbers.arrive(&[1, 2, 3]).await;
        let file = numbers.database.rows("SHOW BINARY LOGS").await.last().expect("a log").string(0);
        numbers.database.execute(&format!("PURGE BINARY LOGS TO '{file}'")).await;
        numbers.add(4).await;
        numbers.arrive(&[4]).await;
        relay.stop().await;
        numbers.add(5).await;
        let relay = numbers.reading(&[]).await;
        numbers.arrive(&[5]).await;
        relay.stop().await;
        numbers.nothing_more().await;
    })
    .await;
}

const NO_GTIDS: [&str; 2] = ["--gtid-mode=OFF", "--enforce-gtid-consistency=OFF"];

#[tokio::test]
async fn without_gtids_the_file_and_offset_are_the_position() {
    let server = PrivateMySql::start(MySql, &NO_GTIDS).await;
    let mut numbers = Numbers::at(&server.url()).await;
    let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
    numbers.add(1).await;
    numbers.arrive(&[1]).await;
    relay.stop().await;
    let stored = numbers.database.checkpoint().await.expect("a checkpoint");
    assert!(stored.starts_with("binlog.0000"), "{stored}");

    numbers.add(2).await;
    numbers.database.execute("FLUSH BINARY LOGS").await;
    numbers.add(3).await;
    let relay = numbers.reading(&[]).await;
    numbers.arrive(&[2, 3]).await;
    relay.stop().await;

    // Killed again and again, while a writer goes on.
    let mut expected = Vec::new();
    for round in 0..4 {
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        for number in 0..30 {
            expected.push(100 + round * 30 + number);
            numbers.add(100 + round * 30 + number).await;
        }
        relay.kill();
    }
    let relay = numbers.reading(&[]).await;
    numbers.arrive_at_least_once(&expected, &[]).await;

    // A prepared transaction holds the position back, and nothing else.
    let mut xa = numbers.database.connect().await;
    let stored = numbers.database.checkpoint().await.expect("a checkpoint");
    for statement in ["XA START 'x'", &add(1000), "XA END 'x'", "XA PREPARE 'x'"] {
        xa.execute(statement).await.expect("an XA statement");
    }
    numbers.add(1001).await;
    numbers.arrive(&[1001]).await;
    relay.stop().await;
    let relay = numbers.reading(&[]).await;
    xa.execute("XA COMMIT 'x'").await.expect("the commit");
    numbers.arrive(&[1001, 1000]).await;
    relay.stop().await;
    assert_ne!(numbers.database.checkpoint().await.expect("a checkpoint"), stored);
    let relay = numbers.reading(&[]).await;
    numbers.add(1002).await;
    numbers.arrive(&[1002]).await;
    relay.stop().await;
    numbers.nothing_more().await;
}

#[tokio::test]
async fn a_log_without_checksums_is_read() {
    on_both(async |flavor| {
        let server = PrivateMySql::start(flavor, &["--binlog-checksum=NONE"]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        let relay = numbers.reading(&[]).await;
        numbers.add(1).await;
        // From here on with checksums, in a new file.
        numbers.database.execute("SET GLOBAL binlog_checksum = CRC32").await;
        numbers.add(2).await;
        numbers.arrive(&[1, 2]).await;
        relay.stop().await;
        numbers.database.execute("SET GLOBAL binlog_checksum = NONE").await;
        numbers.add(3).await;
        let relay = numbers.reading(&[]).await;
        numbers.arrive(&[3]).await;
        relay.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_chosen_server_id_that_clashes_ends_with_exit_3() {
    on_both(async |flavor| {
        let (one, mut other) = (Numbers::on(flavor).await, Numbers::on(flavor).await);
        let id = if flavor == MySql { "3000017" } else { "3000018" };
        let first = one.reading(&["--server-id", id]).await;
        let second = other.reading(&["--server-id", id]).await;
        // The server throws out whoever came first.
        ends(first, 3, &[&format!("another replica has the server id {id}"), "--server-id"]).await;
        other.add(1).await;
        other.arrive(&[1]).await;
        second.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_random_server_id_that_clashes_is_drawn_anew_and_the_stream_goes_on() {
    on_both(async |flavor| {
        // Whose only replicas are those of this test.
        let server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        let mut relay = numbers.reading(&[]).await;
        let replicas = async || {
            let statement = if flavor == MySql { "SHOW REPLICAS" } else { "SHOW SLAVE HOSTS" };
            numbers.database.rows(statement).await.iter().map(|row| row.number(0) as u32).collect::<Vec<_>>()
        };
        let alone = async || replicas().await.first().copied();
        let drawn = eventually(PATIENCE, "the relay is a replica", alone).await;
        // The server throws out whoever came first: the relay.
        let info = ConnInfo::parse(&numbers.database.url()).expect("an address");
        let from = numbers.database.checkpoint().await.expect("a checkpoint").parse().expect("a position");
        let replica = ReplicaId { server_id: drawn, chosen: true };
        let rival = Entry { info, replica, from, heartbeat: Duration::from_secs(1), follow: true };
        let rival = dump::start(&rival).await.expect("the rival reads the log");
        until_log(&mut relay, &format!("another replica has the server id {drawn}")).await;
        eventually(PATIENCE, "the relay is a replica again, beside the rival", async || {
            let replicas = replicas().await;
            (replicas.contains(&drawn) && replicas.iter().any(|id| *id != drawn)).then_some(())
        })
        .await;
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        drop(rival);
        relay.stop().await;
    })
    .await;
}

fn xa_name(numbers: &Numbers, name: &str) -> String {
    format!("'{}','{name}'", numbers.database.name())
}

/// How many numbers are missing in the untagged part of the first server's set.
fn holes(set: &str) -> u64 {
    let (_, intervals) = set.split_once(':').expect("a set of GTIDs");
    let intervals = intervals.split(',').next().unwrap_or_default();
    let (mut next, mut missing) = (1, 0);
    for interval in intervals.split(':').take_while(|part| part.starts_with(|c: char| c.is_ascii_digit())) {
        let (from, to) = interval.split_once('-').unwrap_or((interval, interval));
        let (from, to): (u64, u64) = (from.parse().expect("a number"), to.parse().expect("a number"));
        missing += from - next;
        next = to + 1;
    }
    missing
}

#[tokio::test]
async fn xa_rows_arrive_when_they_are_committed_and_stop_nothing_else() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        let (a, b, c) = (xa_name(&numbers, "a"), xa_name(&numbers, "b"), xa_name(&numbers, "c"));
        let (mut first, mut second) = (numbers.database.connect().await, numbers.database.connect().await);
        for statement in [&format!("XA START {a}"), &add(1), &format!("XA END {a}"), &format!("XA PREPARE {a}")] {
            first.execute(statement).await.expect("an XA statement");
        }
        for statement in [&format!("XA START {b}"), &add(99), &format!("XA END {b}"), &format!("XA PREPARE {b}")] {
            second.execute(statement).await.expect("an XA statement");
        }
        numbers.add(2).await;
        numbers.arrive(&[2]).await;
        second.execute(&format!("XA ROLLBACK {b}")).await.expect("a rollback");
        numbers.add(3).await;
        numbers.arrive(&[3]).await;
        if flavor == MySql {
            numbers.until_stored("only the prepared transaction is missing", |stored| holes(stored) == 1).await;
        }
        relay.stop().await;

        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        numbers.add(4).await;
        match flavor {
            MySql => numbers.arrive(&[4]).await,
            // The position waited.
            MariaDb => numbers.arrive(&[2, 3, 4]).await,
        }
        first.execute(&format!("XA COMMIT {a}")).await.expect("a commit");
        numbers.arrive(&[1]).await;
        for statement in
            [&format!("XA START {c}"), &add(5), &add(6), &format!("XA END {c}"), &format!("XA COMMIT {c} ONE PHASE")]
        {
            first.execute(statement).await.expect("an XA statement");
        }
        numbers.arrive(&[5, 6]).await;
        relay.stop().await;
        let stored = numbers.database.checkpoint().await.expect("a checkpoint");
        assert!(flavor == MariaDb || holes(&stored) == 0, "{stored}");

        let relay = numbers.reading(&[]).await;
        numbers.add(7).await;
        numbers.arrive(&[7]).await;
        relay.stop().await;
        numbers.nothing_more().await;
    })
    .await;
}

#[tokio::test]
async fn xa_rows_survive_a_kill_between_prepare_and_commit() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        let (a, b) = (xa_name(&numbers, "a"), xa_name(&numbers, "b"));
        let (mut first, mut second) = (numbers.database.connect().await, numbers.database.connect().await);
        for statement in [&format!("XA START {a}"), &add(1), &format!("XA END {a}"), &format!("XA PREPARE {a}")] {
            first.execute(statement).await.expect("an XA statement");
        }
        numbers.add(2).await;
        numbers.arrive(&[2]).await;
        relay.kill();
        // Decided while nobody reads, and another one prepared.
        first.execute(&format!("XA COMMIT {a}")).await.expect("a commit");
        for statement in [&format!("XA START {b}"), &add(3), &format!("XA END {b}"), &format!("XA PREPARE {b}")] {
            second.execute(statement).await.expect("an XA statement");
        }
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        numbers.add(4).await;
        numbers.arrive_at_least_once(&[1, 4], &[2]).await;
        relay.kill();
        let relay = numbers.reading(&[]).await;
        second.execute(&format!("XA COMMIT {b}")).await.expect("a commit");
        numbers.arrive_at_least_once(&[3], &[1, 2, 4]).await;
        relay.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_first_start_tells_of_xa_transactions_that_it_comes_too_late_for() {
    on_both(async |flavor| {
        let numbers = Numbers::on(flavor).await;
        let a = xa_name(&numbers, "a");
        let mut session = numbers.database.connect().await;
        for statement in [&format!("XA START {a}"), &add(1), &format!("XA END {a}"), &format!("XA PREPARE {a}")] {
            session.execute(statement).await.expect("an XA statement");
        }
        let relay = numbers.reading(&[]).await;
        assert!(relay.log().contains("XA transactions are prepared already"), "{}", relay.log());
        session.execute(&format!("XA ROLLBACK {a}")).await.expect("a rollback");
        relay.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_transaction_of_many_statements_arrives_whole_and_in_order() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let relay = numbers.reading(&[]).await;
        let database = &numbers.database;
        database.execute("CREATE TABLE other (id INT PRIMARY KEY) ENGINE = InnoDB").await;
        database.execute("BEGIN").await;
        database.execute(&add(1)).await;
        database.execute("INSERT INTO other VALUES (1)").await;
        database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '2'), ('k', '3')").await;
        database.execute("SAVEPOINT s").await;
        database.execute(&add(99)).await;
        database.execute("ROLLBACK TO SAVEPOINT s").await;
        database.execute("UPDATE outbox SET payload = '7' WHERE payload = 1").await;
        database.execute("DELETE FROM outbox WHERE partition_key = 'k'").await;
        database.execute(&add(4)).await;
        database.execute("COMMIT").await;
        numbers.arrive(&[1, 2, 3, 4]).await;
        relay.stop().await;
        numbers.nothing_more().await;
    })
    .await;
}

#[tokio::test]
async fn compressed_transactions_among_plain_ones_arrive_in_order() {
    on_both(async |flavor| {
        let server = match flavor {
            MySql => None,
            MariaDb => {
                Some(PrivateMySql::start(flavor, &["--log-bin-compress=ON", "--log-bin-compress-min-len=10"]).await)
            }
        };
        let mut numbers = match &server {
            Some(server) => Numbers::at(&server.url()).await,
            None => Numbers::on(flavor).await,
        };
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        let compress = |on: bool| match (flavor, on) {
            (MySql, true) => "SET SESSION binlog_transaction_compression = ON",
            (MySql, false) => "SET SESSION binlog_transaction_compression = OFF",
            (MariaDb, true) => "SET GLOBAL log_bin_compress = ON",
            (MariaDb, false) => "SET GLOBAL log_bin_compress = OFF",
        };
        let mut expected = Vec::new();
        for round in 0..20 {
            numbers.database.execute(compress(round % 2 == 0)).await;
            numbers.database.execute("BEGIN").await;
            for number in round * 10..round * 10 + 10 {
                numbers.add(number).await;
                expected.push(number);
            }
            numbers.database.execute("COMMIT").await;
        }
        numbers.arrive(&expected).await;
        // The checkpoint lies behind a compressed one.
        numbers.database.execute(compress(true)).await;
        numbers.add(1000).await;
        numbers.arrive(&[1000]).await;
        relay.stop().await;
        let relay = numbers.reading(&[]).await;
        numbers.add(1001).await;
        numbers.arrive(&[1001]).await;
        relay.stop().await;
        numbers.nothing_more().await;
    })
    .await;
}

#[tokio::test]
async fn tagged_gtids_are_positions_too() {
    let mut numbers = Numbers::on(MySql).await;
    let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
    let mut tagged = numbers.database.connect().await;
    tagged.execute("SET gtid_next = 'AUTOMATIC:orders'").await.expect("a tag");
    tagged.execute(&add(1)).await.expect("an event");
    numbers.add(2).await;
    numbers.arrive(&[1, 2]).await;
    relay.kill();
    tagged.execute(&add(3)).await.expect("an event");
    let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
    numbers.arrive_at_least_once(&[3], &[1, 2]).await;
    numbers.until_stored("the tag is stored", |stored| stored.contains(":orders:")).await;
    relay.stop().await;
    tagged.execute(&add(4)).await.expect("an event");
    let relay = numbers.reading(&[]).await;
    numbers.arrive(&[4]).await;
    relay.stop().await;
    numbers.nothing_more().await;
}

#[tokio::test]
async fn several_tables_are_read_also_of_other_databases() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let other = MySqlDatabase::with_outbox(flavor).await;
        numbers.database.execute("CREATE TABLE second LIKE outbox").await;
        numbers.database.execute("CREATE TABLE third LIKE outbox").await;
        let elsewhere = format!("{}.outbox", other.name());
        let relay = numbers.reading(&["--table", "second", "--table", "outbox", "--table", &elsewhere]).await;
        numbers.add(1).await;
        for (table, number) in [("second", 2), ("third", 99), (elsewhere.as_str(), 3)] {
            let insert = format!("INSERT INTO {table} (partition_key, payload) VALUES ('k', '{number}')");
            numbers.database.execute(&insert).await;
        }
        numbers.add(4).await;
        numbers.arrive(&[1, 2, 3, 4]).await;
        relay.stop().await;
        numbers.nothing_more().await;
    })
    .await;
}

/// Names of columns come from the catalog while the table is what it was.
async fn without_names(flavor: MySqlFlavor, metadata: &str) {
    let server = PrivateMySql::start(flavor, &[&format!("--binlog-row-metadata={metadata}")]).await;
    let mut numbers = Numbers::at(&server.url()).await;
    let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
    numbers.add(1).await;
    numbers.arrive(&[1]).await;
    numbers.database.execute("ALTER TABLE outbox ADD COLUMN extra INT").await;
    numbers.add(2).await;
    numbers.arrive(&[2]).await;
    relay.stop().await;

    let changes = [
        "ALTER TABLE outbox ADD COLUMN more INT",
        "ALTER TABLE outbox MODIFY COLUMN payload VARCHAR(2000)",
        "ALTER TABLE outbox RENAME COLUMN partition_key TO spare, RENAME COLUMN other TO partition_key",
    ];
    for change in changes {
        let mut one = Numbers::at(&server.url()).await;
        one.database.execute("ALTER TABLE outbox ADD COLUMN other VARCHAR(255) AFTER id").await;
        one.reading(&[]).await.stop().await;
        one.add(1).await;
        // The catalog knows seconds.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        one.database.execute(change).await;
        let stored = one.database.checkpoint().await;
        ends(one.start(&[]), 6, &["does not name the columns", "nothing was skipped", "binlog_row_metadata"]).await;
        assert_eq!(one.database.checkpoint().await, stored, "nothing is skipped");
        one.nothing_more().await;
    }
}

#[tokio::test]
async fn columns_that_the_log_does_not_name_come_from_the_catalog_while_it_is_the_same() {
    tokio::join!(without_names(MySql, "MINIMAL"), without_names(MariaDb, "MINIMAL"), without_names(MariaDb, "NO_LOG"));
}

#[tokio::test]
async fn a_column_that_is_not_in_the_row_image_is_refused_and_never_guessed() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        numbers.database.execute("ALTER TABLE outbox ADD COLUMN event_type VARCHAR(20) DEFAULT 'placed'").await;
        let parked = Topic::create(1).await;
        let relay = numbers.reading(&["--dead-letter", &format!("topic:{}", parked.name)]).await;
        numbers.database.execute("SET SESSION binlog_row_image = MINIMAL").await;
        numbers.add(1).await;
        let whole = "INSERT INTO outbox (id, partition_key, payload, event_type) VALUES (uuid(), 'k', '2', 'paid')";
        numbers.database.execute(whole).await;
        numbers.arrive(&[2]).await;
        let dead = parked.reader().take(1).await;
        let reason = format!("{:?}", dead[0].headers);
        assert!(reason.contains("event_type") && reason.contains("binlog_row_image"), "{reason}");
        relay.stop().await;
        let relay = numbers.reading(&["--dead-letter", "none"]).await;
        numbers.add(3).await;
        ends(relay, 6, &["event_type", "binlog_row_image = FULL"]).await;
        numbers.nothing_more().await;
    })
    .await;
}

#[tokio::test]
async fn a_statement_instead_of_rows_halts() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        numbers.database.execute("SET SESSION binlog_format = STATEMENT").await;
        let insert = "INSERT INTO outbox (id, partition_key, payload) VALUES ('a', 'k', '2')";
        numbers.database.execute(insert).await;
        ends(relay, 6, &["without its rows", "INSERT INTO outbox", "binlog_format = ROW", "nothing was skipped"]).await;
        // As often as it is tried.
        ends(numbers.start(&[]), 6, &["without its rows"]).await;
        numbers.nothing_more().await;
    })
    .await;
}
