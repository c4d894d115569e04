//! Where a MongoDB pipeline stands: kept behind the acknowledgements, found again after a crash, and never passed over
//! when the server has lost what follows it.

use std::time::Duration;

use mongodb::bson::{Document, doc};
use nix::sys::signal::Signal;

use crate::support::{
    Documents, MongoDatabase, MySqlFlavor, Numbers, PATIENCE, PrivateKafka, PrivateMongo, Relay, Topic, check, ends,
    eventually, shared_kafka, until_log,
};

fn path(folder: &tempfile::TempDir) -> String {
    format!("file:{}", folder.path().join("checkpoint.json").display())
}

async fn kills_lose_nothing(place: &str) {
    let mut documents = Documents::create().await;
    let name = documents.database.name().to_owned();
    let flags = ["--checkpoint", place, "--checkpoint-interval", "20ms", "--name", &name];
    let mut expected = Vec::new();
    for round in 0..3 {
        let relay = documents.reading(&flags).await;
        for number in round * 20..round * 20 + 20 {
            expected.push(number);
            documents.add(number).await;
        }
        relay.kill();
    }
    let relay = documents.reading(&flags).await;
    documents.reader.arrive_at_least_once(&expected, &[]).await;
    relay.stop().await;
    // What is stored on the way out is where the next start goes on, and the lease is let go: nobody waits for its end.
    documents.add(1000).await;
    let relay = documents.reading(&[&flags[..], &["--no-standby"]].concat()).await;
    documents.reader.arrive_at_least_once(&[1000], &expected).await;
    relay.stop().await;
    documents.add(1001).await;
    documents.start(&[&flags[..], &["--until-caught-up"]].concat()).exits_with(0).await;
    documents.reader.arrive(&[1001]).await;
    documents.reader.nothing_more().await;
}

#[tokio::test]
async fn wherever_the_checkpoint_is_kept_a_kill_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = path(&folder);
    tokio::join!(kills_lose_nothing("source"), kills_lose_nothing("kafka"), kills_lose_nothing(&file));
}

#[tokio::test]
async fn an_idle_stream_moves_the_position_without_writes_for_its_own_sake() {
    let server = PrivateMongo::start(1, &[]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = path(&folder);
    let mut documents = Documents::at(&server.url()).await;
    let inside = documents.reading(&["--checkpoint-interval", "20ms"]).await;
    let flags = ["--name", "outside", "--checkpoint", &file, "--checkpoint-interval", "20ms"];
    let outside = documents.reading(&flags).await;
    documents.add(1).await;
    documents.reader.arrive(&[1, 1]).await;
    let stored = async || std::fs::read_to_string(folder.path().join("checkpoint.json")).expect("a checkpoint");
    let first = documents.position().await.expect("a position");
    // The lease's own writes move the server's clock, and the position with them.
    eventually(PATIENCE, "the position moves", async || {
        documents.position().await.filter(|position| *position > first).map(drop)
    })
    .await;
    let (begun, kept) = (documents.database.end_of_log().await, stored().await);
    let moved = documents.position().await.expect("a position");
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(documents.position().await.expect("a position") > moved, "the position has followed");
    assert_eq!(stored().await, kept, "the file is not written while nothing happens");
    // Two leases, renewed every second, and what else the server notes: not one write for every 20 ms.
    let log = server.client(0).database("local").collection::<Document>("oplog.rs");
    let written = log.count_documents(doc! { "ts": { "$gt": begun } }).await.expect("the log is read");
    assert!(written < 30, "{written} writes");
    inside.stop().await;
    outside.stop().await;
}

#[tokio::test]
async fn a_first_start_enters_the_stream_where_it_is_told() {
    let mut documents = Documents::create().await;
    documents.add(1).await;
    let before = documents.database.last_write().await;
    documents.add(2).await;
    let between = documents.database.last_write().await;
    documents.add(3).await;
    let token = {
        // Of the second event.
        let relay =
            documents.reading(&["--name", "t", "--start", &format!("{}:{}", before.time, before.increment)]).await;
        documents.reader.arrive(&[1, 2, 3]).await;
        relay.stop().await;
        let stored = documents.database.collection("outboxd_checkpoint").find_one(doc! { "_id": "t" }).await;
        let stored = stored.expect("the checkpoint is read").expect("a checkpoint");
        stored.get_str("position").expect("a position").to_owned()
    };
    documents.add(4).await;
    let at = format!("{}:{}", between.time, between.increment);
    for (name, start, expected) in [("a", at.as_str(), &[2, 3, 4][..]), ("b", &token, &[4]), ("c", "now", &[])] {
        let relay = documents.reading(&["--name", name, "--start", start]).await;
        documents.reader.arrive(expected).await;
        relay.stop().await;
    }
    // Where a position is stored, --start says nothing any more.
    documents.add(5).await;
    let relay = documents.reading(&["--name", "c", "--start", "now"]).await;
    documents.reader.arrive(&[5]).await;
    relay.stop().await;
    // All that the log still has of this collection.
    let relay = documents.reading(&["--name", "d", "--start", "earliest"]).await;
    documents.reader.arrive(&[1, 2, 3, 4, 5]).await;
    relay.stop().await;
    ends(documents.start(&["--name", "e", "--start", "binlog.000001:4"]), 2, &["is not a position in a change stream"])
        .await;
    documents.reader.nothing_more().await;
}

#[tokio::test]
async fn a_checkpoint_of_another_source_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = path(&folder);
    let flags = ["--checkpoint", file.as_str(), "--name", "orders"];
    let mysql = Numbers::on(MySqlFlavor::MySql).await;
    mysql.reading(&flags).await.stop().await;
    let documents = Documents::create().await;
    ends(documents.start(&flags), 3, &["`orders` is of a mysql source, and this is MongoDB", "--name"]).await;
}

#[tokio::test]
async fn a_checkpoint_of_another_server_is_a_lost_position() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = path(&folder);
    let flags = ["--checkpoint", file.as_str(), "--name", "orders"];
    // Both call their set rs0.
    let (one, other) = (Documents::create().await, PrivateMongo::start(1, &[]).await);
    let other = Documents::at(&other.url()).await;
    one.reading(&flags).await.stop().await;
    let kept = std::fs::read_to_string(folder.path().join("checkpoint.json")).expect("a checkpoint");
    ends(other.start(&flags), 4, &["`orders` is of another server", "--name"]).await;
    let after = std::fs::read_to_string(folder.path().join("checkpoint.json")).expect("a checkpoint");
    assert_eq!(after, kept, "the checkpoint stays");
    one.reading(&flags).await.stop().await;
}

#[tokio::test]
async fn forgotten_history_that_was_not_delivered_is_a_lost_position() {
    let server = PrivateMongo::start(1, PrivateMongo::FORGETFUL).await;
    let mut documents = Documents::at(&server.url()).await;
    let relay = documents.reading(&[]).await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    relay.stop().await;
    let stopped = documents.position().await;

    // While nobody reads.
    documents.add(2).await;
    server.forget_history().await;
    for _ in 0..2 {
        let words =
            ["is lost: the oplog no longer has what follows it", "last confirmed:    20", "the oplog begins:  20"];
        ends(documents.start(&[]), 4, &[&words[..], &["--start now", "replSetResizeOplog"]].concat()).await;
    }
    assert_eq!(documents.position().await, stopped, "the checkpoint stays");
    let (url, brokers) = (documents.database.url(), shared_kafka());
    let checked = check(&[&url, "--brokers", &brokers, "--topic", &documents.topic.name]).await;
    checked.fails("position", "the oplog no longer has what follows it");

    // While a relay runs and is behind.
    let mut relay = documents.reading(&["--name", "other"]).await;
    relay.signal(Signal::SIGSTOP);
    documents.add(3).await;
    server.forget_history().await;
    relay.signal(Signal::SIGCONT);
    relay.exits_with(4).await;
    assert!(relay.log().contains("the oplog no longer has what follows it"), "{}", relay.log());

    // The way that the message tells.
    let pipeline = documents.database.pipeline();
    let checkpoints = documents.database.collection("outboxd_checkpoint");
    checkpoints.delete_one(doc! { "_id": pipeline }).await.expect("the checkpoint is given up");
    let relay = documents.reading(&["--start", "now"]).await;
    documents.add(4).await;
    // The third was on its way to the frozen one already.
    documents.reader.arrive_at_least_once(&[4], &[3]).await;
    relay.stop().await;
}

#[tokio::test]
async fn what_was_read_before_history_was_forgotten_is_still_delivered() {
    let server = PrivateMongo::start(1, PrivateMongo::FORGETFUL).await;
    let kafka = PrivateKafka::start(1).await;
    let topic = Topic::create_at(&kafka.brokers(), 1, &[]).await;
    let mut documents =
        Documents { database: MongoDatabase::with_outbox_at(&server.url()).await, reader: topic.reader(), topic };
    let mut relay = documents.reading(&["--max-in-flight", "5"]).await;
    documents.add(0).await;
    documents.reader.arrive(&[0]).await;
    // A consumer may see it before the relay learns that it was taken.
    eventually(PATIENCE, "it is acknowledged", async || in_flight(&relay, 0).await).await;
    kafka.freeze(1);
    for number in 1..=5 {
        documents.add(number).await;
    }
    eventually(PATIENCE, "five events are under way", async || in_flight(&relay, 5).await).await;
    // It is read, and waits to be let in; the next one is asked for already, and nothing after it.
    documents.add(6).await;
    eventually(PATIENCE, "a sixth waits", async || in_flight(&relay, 6).await).await;
    documents.add(7).await;
    documents.add(8).await;
    documents.add(9).await;
    server.forget_history().await;
    kafka.thaw(1);
    relay.exits_with(4).await;
    documents.reader.arrive_at_least_once(&[1, 2, 3, 4, 5, 6], &[7, 8]).await;
    assert!(relay.log().contains("last confirmed:    20"), "{}", relay.log());
}

async fn in_flight(relay: &Relay, events: u64) -> Option<()> {
    (relay.status().await["in_flight"] == events).then_some(())
}

#[tokio::test]
async fn a_standby_does_not_begin_anew_when_the_checkpoint_is_removed() {
    let mut documents = Documents::create().await;
    let leader = documents.reading(&[]).await;
    let mut standby = documents.start(&[]);
    standby.until_state("standing-by").await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    documents.until_stored().await;
    leader.signal(Signal::SIGSTOP);
    documents.add(2).await;
    documents.database.collection("outboxd_checkpoint").drop().await.expect("the checkpoints are dropped");
    ends(standby, 4, &["its checkpoint was there a moment ago"]).await;
    // Whoever delivered knows where it was.
    leader.signal(Signal::SIGCONT);
    documents.reader.arrive_at_least_once(&[2], &[]).await;
    leader.stop().await;
}

#[tokio::test]
async fn a_start_before_the_beginning_of_the_log_is_refused() {
    let server = PrivateMongo::start(1, PrivateMongo::FORGETFUL).await;
    let mut documents = Documents::at(&server.url()).await;
    let time = documents.database.end_of_log().await;
    documents.add(1).await;
    server.forget_history().await;
    let start = format!("{}:{}", time.time, time.increment);
    ends(documents.start(&["--start", &start]), 4, &["--start lies before the beginning of the oplog"]).await;
    // The earliest there is can be had all the same.
    let relay = documents.reading(&["--name", "all", "--start", "earliest"]).await;
    documents.add(2).await;
    documents.reader.arrive(&[2]).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_checkpoint_that_went_back_under_a_running_relay_is_a_lost_position() {
    let documents = Documents::create().await;
    let mut relay = documents.reading(&[]).await;
    let first = documents.position().await.expect("a position");
    eventually(PATIENCE, "the position moves", async || {
        documents.position().await.filter(|position| *position > first).map(drop)
    })
    .await;
    // As a server restored from a copy does: the position is older, and the lease is another's, long over.
    relay.signal(Signal::SIGSTOP);
    let older = doc! { "$set": { "position": &first, "lease.epoch": 0_i64 } };
    let checkpoints = documents.database.collection("outboxd_checkpoint");
    checkpoints.update_one(doc! { "_id": documents.database.pipeline() }, older).await.expect("the position goes back");
    relay.signal(Signal::SIGCONT);
    relay.exits_with(4).await;
    assert!(relay.log().contains("restored from a copy"), "{}", relay.log());
}

#[tokio::test]
async fn a_checkpoint_that_is_removed_under_a_running_relay_costs_nothing() {
    let mut documents = Documents::create().await;
    let mut relay = documents.reading(&[]).await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    relay.signal(Signal::SIGSTOP);
    documents.database.collection("outboxd_checkpoint").drop().await.expect("the checkpoint is removed");
    documents.add(2).await;
    relay.signal(Signal::SIGCONT);
    documents.reader.arrive_at_least_once(&[2], &[1]).await;
    until_log(&mut relay, "the checkpoint is gone").await;
    documents.until_stored().await;
    relay.stop().await;
    documents.add(3).await;
    let relay = documents.start(&[]);
    documents.reader.arrive_at_least_once(&[3], &[1, 2]).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_changed_set_of_collections_goes_on_without_loss() {
    let mut documents = Documents::create().await;
    let sets: [&[&str]; 5] = [
        &["--table", "outbox"],
        &["--table", "outbox", "--table", "other"],
        &["--table", "other"],
        &["--table", "third", "--table", "outbox"],
        &["--table", "outbox"],
    ];
    let mut delivered = Vec::new();
    for (round, tables) in sets.iter().enumerate() {
        let first = round as u32 * 100;
        // Committed while nobody reads, and read by the next with its own set.
        for number in first..first + 10 {
            documents.add_to(tables.last().expect("a collection"), number).await;
        }
        let start = if round == 0 { &["--start", "earliest"][..] } else { &[] };
        let relay = documents.reading(&[tables, start].concat()).await;
        for number in first + 10..first + 20 {
            documents.add_to(tables[1], number).await;
        }
        let numbers: Vec<u32> = (first..first + 20).collect();
        documents.reader.arrive_at_least_once(&numbers, &delivered).await;
        delivered.extend(numbers);
        // The position must be of an event.
        match round % 2 {
            0 => relay.kill(),
            _ => relay.stop().await,
        }
    }
}

/// The first position of a changed set is a time. Until one of its own is confirmed, the old one counts for the old set.
#[tokio::test]
async fn a_changed_set_that_confirmed_nothing_leaves_the_old_position_usable() {
    let documents = Documents::create().await;
    let relay = documents.reading(&["--table", "outbox", "--table", "other"]).await;
    for number in 0..5 {
        documents.add_to("other", number).await;
    }
    let mut reader = documents.topic.reader();
    reader.arrive(&[0, 1, 2, 3, 4]).await;
    // Killed so early that the position is that of the last event.
    relay.stop().await;
    documents.add(5).await;
    // Records are kept back: nothing is confirmed, while the lease is renewed again and again.
    let slow = ["--table", "outbox", "--kafka", "linger.ms=60000"];
    let relay = documents.reading(&slow).await;
    let renewed = async || {
        let checkpoint = documents.database.checkpoint().await.expect("a checkpoint");
        *checkpoint.get_document("lease").and_then(|lease| lease.get_datetime("until")).expect("a lease")
    };
    let begun = renewed().await;
    eventually(PATIENCE, "the lease is renewed twice", async || {
        (renewed().await.timestamp_millis() > begun.timestamp_millis() + 1500).then_some(())
    })
    .await;
    relay.kill();
    let relay = documents.reading(&["--table", "outbox"]).await;
    reader.arrive_at_least_once(&[5], &[]).await;
    relay.stop().await;
}
