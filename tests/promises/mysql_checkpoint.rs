//! Where a MySQL or MariaDB pipeline stands: kept behind the acknowledgements, found again after a crash and on another
//! server, and never passed over when the log has lost it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::MySqlFlavor::{MariaDb, MySql};
use crate::support::{
    MySqlFlavor, Numbers, PATIENCE, PrivateMySql, Relay, a_moment, add, ends, eventually, mysql_session, on_both,
    until_log, until_reading, values,
};

const OFTEN: [&str; 2] = ["--checkpoint-interval", "50ms"];

fn path(folder: &tempfile::TempDir) -> String {
    format!("file:{}", folder.path().join("checkpoint.json").display())
}

#[tokio::test]
async fn wherever_the_checkpoint_is_kept_a_kill_loses_nothing() {
    on_both(async |flavor| {
        let folder = tempfile::tempdir().expect("a folder");
        let file = path(&folder);
        for place in ["source", "kafka", &file] {
            let mut numbers = Numbers::on(flavor).await;
            let name = numbers.database.name().to_owned();
            let flags = ["--checkpoint", place, "--checkpoint-interval", "20ms", "--name", &name];
            let mut expected = Vec::new();
            for round in 0..3 {
                let relay = numbers.reading(&flags).await;
                for number in round * 20..round * 20 + 20 {
                    expected.push(number);
                    numbers.add(number).await;
                }
                relay.kill();
            }
            let relay = numbers.reading(&flags).await;
            numbers.arrive_at_least_once(&expected, &[]).await;
            relay.stop().await;
            // What is stored on the way out is where the next start goes on.
            numbers.add(1000).await;
            let relay = numbers.reading(&flags).await;
            numbers.arrive_at_least_once(&[1000], &expected).await;
            relay.stop().await;
            let _ = std::fs::remove_file(folder.path().join("checkpoint.json"));
        }
    })
    .await;
}

#[tokio::test]
async fn the_checkpoint_is_at_most_its_interval_old_and_written_on_the_way_out() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let relay = numbers.reading(&["--checkpoint-interval", "300ms"]).await;
        let first = numbers.database.checkpoint().await.expect("the starting position is stored");
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        let begin = Instant::now();
        let second = numbers.until_stored_after(&first).await;
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        relay.stop().await;

        let relay = numbers.reading(&["--checkpoint-interval", "1h"]).await;
        numbers.add(2).await;
        numbers.arrive(&[2]).await;
        a_moment().await;
        relay.stop().await;
        assert_ne!(numbers.database.checkpoint().await.as_ref(), Some(&second));
        let relay = numbers.reading(&[]).await;
        numbers.add(3).await;
        numbers.arrive(&[3]).await;
        relay.stop().await;
        numbers.nothing_more().await;
    })
    .await;
}

#[tokio::test]
async fn a_checkpoint_is_never_the_reason_for_the_next() {
    on_both(async |flavor| {
        let server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        let relay = numbers.reading(&OFTEN).await;
        let first = numbers.database.checkpoint().await.expect("a checkpoint");
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        let stored = numbers.until_stored_after(&first).await;
        // Longer than transactions of others wait for.
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert_eq!(numbers.database.checkpoint().await, Some(stored));
        relay.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_checkpoint_of_another_source_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = path(&folder);
    let (one, other) = (Numbers::on(MySql).await, Numbers::on(MariaDb).await);
    let flags = ["--checkpoint", file.as_str(), "--name", "orders"];
    one.reading(&flags).await.stop().await;
    ends(other.start(&flags), 3, &["`orders` is of a mysql source, and this server is MariaDB", "--name"]).await;
    ends(one.start(&["--checkpoint", &file, "--name", "x"]), 3, &["holds the checkpoint of pipeline `orders`"]).await;

    let document = std::fs::read_to_string(folder.path().join("checkpoint.json")).expect("a checkpoint");
    let newer = document.replace("\"format\": 1", "\"format\": 7");
    std::fs::write(folder.path().join("checkpoint.json"), newer).expect("a file");
    ends(one.start(&flags), 3, &["has format 7"]).await;
    std::fs::write(folder.path().join("checkpoint.json"), "{").expect("a file");
    ends(one.start(&flags), 3, &["cannot be read", "checkpoint.json"]).await;
}

#[tokio::test]
async fn a_checkpoint_of_another_server_is_a_lost_position() {
    on_both(async |flavor| {
        let numbers = Numbers::on(flavor).await;
        numbers.reading(&[]).await.stop().await;
        let foreign = match flavor {
            MySql => "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5",
            MariaDb => "77-9-5",
        };
        let change = format!("UPDATE outboxd_checkpoint SET server = 'elsewhere', position = '{foreign}'");
        numbers.database.execute(&change).await;
        ends(numbers.start(&[]), 4, &["is lost", "this is another server"]).await;
        assert_eq!(numbers.database.checkpoint().await.as_deref(), Some(foreign), "the checkpoint stays");
    })
    .await;
}

const DUMPS: &str = "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'";

/// A server keeps the files that a replica reads, and is slow to see that one is gone.
async fn end_dumps(numbers: &Numbers) {
    eventually(PATIENCE, "no replica reads", async || {
        let dumps = numbers.database.rows(DUMPS).await;
        for row in &dumps {
            let _ = numbers.database.connect().await.execute(&format!("KILL {}", row.string(0))).await;
        }
        dumps.is_empty().then_some(())
    })
    .await;
}

async fn purge_all_but_the_last(numbers: &Numbers) {
    end_dumps(numbers).await;
    numbers.database.execute("FLUSH BINARY LOGS").await;
    let file = numbers.database.rows("SHOW BINARY LOGS").await.last().expect("a log").string(0);
    eventually(PATIENCE, "the log is purged", async || {
        numbers.database.execute(&format!("PURGE BINARY LOGS TO '{file}'")).await;
        (numbers.database.rows("SHOW BINARY LOGS").await.len() == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn purged_transactions_that_were_not_delivered_are_a_lost_position() {
    on_both(async |flavor| {
        let server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        if flavor == MariaDb {
            // Else it purges nothing while no replica is connected.
            numbers.database.execute("SET GLOBAL slave_connections_needed_for_purge = 0").await;
        }
        let relay = numbers.reading(&OFTEN).await;
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        relay.stop().await;

        // While nobody reads.
        numbers.add(2).await;
        let gap = numbers.end_of_log().await;
        purge_all_but_the_last(&numbers).await;
        let (stored, number) = (numbers.database.checkpoint().await, gap.rsplit(['-', ':']).next().expect("a number"));
        for _ in 0..2 {
            let missing = format!("{number}\n  last confirmed");
            ends(numbers.start(&[]), 4, &["is lost", "purged", &missing, "the log begins", "--start now"]).await;
        }
        assert_eq!(numbers.database.checkpoint().await, stored, "the checkpoint stays");

        // Before the beginning of the log.
        let early = match flavor {
            MySql => gap.rsplit_once('-').map(|(server, _)| format!("{server}-2")).expect("a range"),
            MariaDb => gap.rsplit_once('-').map(|(server, _)| format!("{server}-2")).expect("a position"),
        };
        ends(numbers.start(&["--name", "new", "--start", &early]), 4, &["lies before the beginning of the log"]).await;

        // While a relay runs and is behind.
        let mut relay = numbers.reading(&["--name", "other"]).await;
        relay.signal(Signal::SIGSTOP);
        end_dumps(&numbers).await;
        numbers.add(3).await;
        purge_all_but_the_last(&numbers).await;
        relay.signal(Signal::SIGCONT);
        relay.exits_with(4).await;
        assert!(relay.log().contains("purged"), "{}", relay.log());

        // A log that was begun anew.
        let relay = numbers.reading(&["--name", "third"]).await;
        relay.stop().await;
        numbers.database.execute(if flavor == MySql { "RESET BINARY LOGS AND GTIDS" } else { "RESET MASTER" }).await;
        numbers.add(4).await;
        ends(numbers.start(&["--name", "third"]), 4, &["is lost", "reset or restored"]).await;
        numbers.nothing_more().await;
    })
    .await;
}

#[tokio::test]
async fn a_file_that_is_gone_is_a_lost_position() {
    let server = PrivateMySql::start(MySql, &["--gtid-mode=OFF", "--enforce-gtid-consistency=OFF"]).await;
    let mut numbers = Numbers::at(&server.url()).await;
    numbers.reading(&[]).await.stop().await;
    numbers.add(1).await;
    purge_all_but_the_last(&numbers).await;
    ends(numbers.start(&[]), 4, &["is lost", "no longer has the file binlog.000001"]).await;

    // Begun anew, so that the file has its name again, and ends before the position.
    numbers.reading(&["--name", "again"]).await.stop().await;
    numbers.database.execute("RESET BINARY LOGS AND GTIDS").await;
    ends(numbers.start(&["--name", "again"]), 4, &["is lost"]).await;

    // By file and offset.
    let status = numbers.database.rows("SHOW BINARY LOG STATUS").await;
    let here = format!("{}:{}", status[0].string(0), status[0].string(1));
    numbers.add(2).await;
    let relay = numbers.reading(&["--name", "at", "--start", &here]).await;
    numbers.arrive(&[2]).await;
    relay.stop().await;
    numbers.nothing_more().await;

    // Existing rows, with a table lock instead of GTIDs.
    existing_rows_and_concurrent_ones(Numbers::at(&server.url()).await).await;
}

#[tokio::test]
async fn a_server_restored_from_an_older_copy_is_a_lost_position() {
    on_both(async |flavor| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut server = PrivateMySql::start(flavor, &[]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        let file = path(&folder);
        let mut inside = numbers.reading(&[&OFTEN[..], &["--name", "inside"]].concat()).await;
        let mut outside = numbers.reading(&[&OFTEN[..], &["--name", "outside", "--checkpoint", &file]].concat()).await;
        numbers.add(1).await;
        numbers.arrive(&[1, 1]).await;
        server.stop().await;
        server.keep_copy();
        server.resume().await;
        numbers.database.reconnect().await;
        numbers.add(2).await;
        numbers.arrive(&[2, 2]).await;
        let stored = |name: &str| format!("SELECT position FROM outboxd_checkpoint WHERE pipeline = '{name}'");
        let end = numbers.end_of_log().await;
        eventually(PATIENCE, "both positions are stored", async || {
            let document = std::fs::read_to_string(folder.path().join("checkpoint.json")).ok()?;
            let own = numbers.database.text(&stored("inside")).await?;
            (document.contains(&end) || document.contains(&own)).then_some(())
        })
        .await;
        a_moment().await;
        // They must not see the copy before it has gone on from where it was.
        inside.signal(Signal::SIGSTOP);
        outside.signal(Signal::SIGSTOP);
        server.crash().await;
        server.go_back();
        server.resume().await;
        numbers.database.reconnect().await;
        for number in 10..20 {
            numbers.add(number).await;
        }
        inside.signal(Signal::SIGCONT);
        inside.exits_with(4).await;
        assert!(inside.log().contains("restored from a copy"), "{}", inside.log());
        // With a position that the copy does not even reach.
        server.crash().await;
        server.go_back();
        server.resume().await;
        outside.signal(Signal::SIGCONT);
        outside.exits_with(4).await;
        assert!(outside.log().contains("is lost"), "{}", outside.log());
        let outside =
            Relay::start_at(&numbers.database.url(), &numbers.topic, &["--name", "outside", "--checkpoint", &file]);
        ends(outside, 4, &["is lost", "reset or restored"]).await;
    })
    .await;
}

/// A primary and a replica that follows it by GTID.
async fn with_a_replica(flavor: MySqlFlavor) -> (PrivateMySql, PrivateMySql) {
    let updates = "--log-slave-updates=ON";
    let primary = PrivateMySql::start(flavor, &["--server-id=11", updates]).await;
    let replica = PrivateMySql::start(flavor, &["--server-id=12", "--read-only=ON", updates]).await;
    let mut session = mysql_session(&replica.url()).await;
    let port = primary.port();
    let statements = match flavor {
        MySql => [
            "SET GLOBAL super_read_only = ON".to_owned(),
            format!(
                "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = {port}, SOURCE_USER = 'root', \
                 SOURCE_PASSWORD = 'mysql', SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1"
            ),
            "START REPLICA".to_owned(),
        ],
        MariaDb => [
            "SET GLOBAL gtid_slave_pos = ''".to_owned(),
            format!(
                "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {port}, MASTER_USER = 'root', \
                 MASTER_PASSWORD = 'mysql', MASTER_SSL = 0, MASTER_USE_GTID = slave_pos"
            ),
            "START SLAVE".to_owned(),
        ],
    };
    for statement in statements {
        session.execute(&statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }
    (primary, replica)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_replica_goes_on_where_the_primary_stopped() {
    on_both(async |flavor| {
        let (mut primary, replica) = with_a_replica(flavor).await;
        let mut numbers = Numbers::at(&primary.url()).await;
        let name = numbers.database.name().to_owned();
        // The replica first: it is passed over until it can be written.
        let scheme = numbers.database.url().split_once("://").expect("a scheme").0.to_owned();
        let both = format!("{scheme}://root:mysql@127.0.0.1:{},127.0.0.1:{}/{name}", replica.port(), primary.port());
        let mut relay = Relay::start_at(&both, &numbers.topic, &OFTEN);
        until_reading(&mut relay).await;
        for number in 1..=20 {
            numbers.add(number).await;
        }
        let end = numbers.end_of_log().await;
        let mut promoted = mysql_session(&replica.url()).await;
        eventually(PATIENCE, "the replica has everything", async || {
            let have = format!("SELECT COUNT(*) FROM {name}.outbox");
            let rows = promoted.query(&have).await.ok()?;
            (rows.first()?.number(0) == 20).then_some(())
        })
        .await;
        primary.crash().await;
        until_log(&mut relay, "read-only: waiting for its promotion").await;
        let promotion: &[&str] = match flavor {
            MySql => {
                &["STOP REPLICA", "RESET REPLICA ALL", "SET GLOBAL super_read_only = OFF", "SET GLOBAL read_only = OFF"]
            }
            MariaDb => &["STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = OFF"],
        };
        for statement in promotion {
            promoted.execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"));
        }
        promoted.execute(&format!("USE {name}")).await.expect("the database");
        for number in 21..=30 {
            promoted.execute(&add(number)).await.expect("an event");
        }
        let expected: Vec<u32> = (1..=30).collect();
        numbers.arrive_at_least_once(&expected, &[]).await;
        // Killed there, it goes on there.
        relay.kill();
        promoted.execute(&add(31)).await.expect("an event");
        let relay = Relay::start_at(&both, &numbers.topic, &OFTEN);
        numbers.arrive_at_least_once(&[31], &expected).await;
        relay.stop().await;
        let stored = promoted.query("SELECT position FROM outboxd_checkpoint").await.expect("a row")[0].string(0);
        assert!(flavor == MariaDb || stored.contains(','), "the set has both servers: {stored}, after {end}");
    })
    .await;
}

async fn ids(numbers: &Numbers) -> HashSet<String> {
    numbers.database.rows("SELECT id FROM outbox").await.iter().map(|row| row.string(0)).collect()
}

async fn until_snapshot_is(numbers: &Numbers, state: &str) {
    let query = "SELECT snapshot FROM outboxd_checkpoint";
    eventually(PATIENCE, &format!("the snapshot is {state}"), async || {
        numbers.database.text(query).await.filter(|stored| stored == state)
    })
    .await;
}

async fn existing_rows_and_concurrent_ones(mut numbers: Numbers) {
    for number in 0..200 {
        numbers.add(number).await;
    }
    let enough = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for _ in 0..3 {
        let (mut session, enough) = (numbers.database.connect().await, enough.clone());
        writers.push(tokio::spawn(async move {
            while !enough.load(Ordering::Relaxed) {
                session.execute(&add(1000)).await.expect("an event");
            }
        }));
    }
    let relay = numbers.reading(&["--snapshot", "existing", "--checkpoint-interval", "50ms"]).await;
    until_snapshot_is(&numbers, "done").await;
    enough.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.expect("a writer ends");
    }
    let committed = ids(&numbers).await;
    let mut missing = committed.clone();
    let all = |records: &[crate::support::Record]| {
        for record in records {
            missing.remove(record.id());
        }
        missing.is_empty()
    };
    let records = numbers.reader.until(PATIENCE, "all rows arrive", all).await;
    assert!(records.iter().all(|record| committed.contains(record.id())), "nothing else arrives");
    relay.stop().await;
    numbers.reader.rest().await;
    // A second start reads only what is new.
    let relay = numbers.reading(&["--snapshot", "existing"]).await;
    numbers.add(5000).await;
    numbers.arrive(&[5000]).await;
    relay.stop().await;
    numbers.nothing_more().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn existing_rows_and_concurrent_ones_all_arrive() {
    on_both(async |flavor| existing_rows_and_concurrent_ones(Numbers::on(flavor).await).await).await;
}

#[tokio::test]
async fn a_snapshot_that_was_killed_is_redone_and_loses_nothing_of_the_log() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        numbers.add(0).await;
        for _ in 0..15 {
            numbers.database.execute("INSERT INTO outbox (partition_key, payload) SELECT 'k', '0' FROM outbox").await;
        }
        let flags = ["--snapshot", "existing", "--max-in-flight", "500", "--checkpoint-interval", "50ms"];
        let relay = numbers.reading(&flags).await;
        // A row that comes and goes: only the log has it.
        numbers.add(7).await;
        numbers.database.execute("DELETE FROM outbox WHERE payload = '7'").await;
        let mut records = numbers.reader.until(PATIENCE, "some rows arrive", |records| records.len() > 500).await;
        relay.kill();
        records.extend(numbers.reader.rest().await);
        assert!(records.len() < 1 << 15, "the snapshot was over before the kill");
        until_snapshot_is(&numbers, "pending").await;
        numbers.add(8).await;
        numbers.database.execute("DELETE FROM outbox WHERE payload = '8'").await;
        let relay = numbers.reading(&flags).await;
        until_snapshot_is(&numbers, "done").await;
        numbers.add(9).await;
        let last = |records: &[crate::support::Record]| {
            records.last().is_some_and(|record| record.value.as_deref() == Some("9"))
        };
        records.extend(numbers.reader.until(PATIENCE, "the last one arrives", last).await);
        let arrived: HashSet<&str> = records.iter().map(|record| record.id()).collect();
        assert!(ids(&numbers).await.iter().all(|id| arrived.contains(id.as_str())), "rows are missing");
        let fleeting = values(&records);
        assert!(fleeting.iter().any(|value| value == "7") && fleeting.iter().any(|value| value == "8"));
        relay.stop().await;
    })
    .await;
}
