//! What change streams bring: from one collection or several, in the order of commits, whatever becomes of a collection.

use mongodb::bson::doc;

use crate::support::{Documents, MongoDatabase, Relay, Topic, ends, numbered, until_log};

#[tokio::test]
async fn several_collections_of_one_database_are_one_stream() {
    let mut documents = Documents::create().await;
    let relay = documents.reading(&["--table", "outbox", "--table", "\"audit.trail\"", "--table", "later"]).await;
    for (collection, number) in [("outbox", 1), ("counters", 2), ("audit.trail", 3), ("later", 4), ("outbox", 5)] {
        documents.add_to(collection, number).await;
    }
    documents.reader.arrive(&[1, 3, 4, 5]).await;
    relay.stop().await;
    documents.reader.nothing_more().await;
}

#[tokio::test]
async fn collections_of_several_databases_are_one_stream() {
    let mut documents = Documents::create().await;
    let other = MongoDatabase::create().await;
    let both = [format!("{}.outbox", documents.database.name()), format!("{}.outbox", other.name())];
    let relay = documents.reading(&["--table", &both[0], "--table", &both[1]]).await;
    documents.add(1).await;
    other.insert(numbered(2)).await;
    documents.add_to("busy", 3).await;
    documents.add(4).await;
    documents.reader.arrive(&[1, 2, 4]).await;
    relay.stop().await;
    other.insert(numbered(5)).await;
    let relay = documents.start(&["--table", &both[0], "--table", &both[1]]);
    documents.reader.arrive(&[5]).await;
    relay.stop().await;
    documents.reader.nothing_more().await;
}

#[tokio::test]
async fn a_whole_database_is_one_stream_with_what_comes_later_and_without_what_outboxd_keeps_there() {
    let mut documents = Documents::create().await;
    let name = documents.database.name().to_owned();
    let other = MongoDatabase::create().await;
    let relay = documents.reading(&["--table", "*"]).await;
    // A second pipeline keeps its lease and position there as well.
    let elsewhere = Topic::create(1).await;
    let mut second = Relay::start_at(&documents.database.url(), &elsewhere, &["--name", "second"]);
    until_log(&mut second, "reading the change stream").await;
    second.stop().await;
    documents.database.run(doc! { "create": "seen", "viewOn": "outbox", "pipeline": [] }).await;
    documents.add_to("system.js", 8).await;
    other.insert(numbered(9)).await;
    for (collection, number) in [("outbox", 1), ("later", 2), ("counters", 3), ("audit.trail", 4)] {
        documents.add_to(collection, number).await;
    }
    documents.reader.arrive(&[1, 2, 3, 4]).await;
    relay.stop().await;
    // It goes on from where it was, also when all is said in other words or together with another database.
    let both = [format!("{name}.*"), format!("{}.*", other.name())];
    documents.add_to("last", 5).await;
    let relay = documents.reading(&["--table", &both[0]]).await;
    documents.reader.arrive(&[5]).await;
    relay.stop().await;
    let relay = documents.reading(&["--table", &both[0], "--table", &both[1]]).await;
    other.insert(numbered(6)).await;
    documents.add_to("last", 7).await;
    documents.reader.arrive_at_least_once(&[6, 7], &[5]).await;
    relay.stop().await;
    documents.reader.nothing_more().await;
}

#[tokio::test]
async fn the_servers_own_collections_are_refused() {
    let documents = Documents::create().await;
    for table in ["local.*", "admin.*", "config.outbox", "\"system.js\""] {
        ends(documents.start(&["--table", table]), 2, &["correct --table"]).await;
    }
}

#[tokio::test]
async fn collections_of_a_whole_database_come_and_go_without_a_gap() {
    let mut documents = Documents::create().await;
    let mut relay = documents.reading(&["--table", "*"]).await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    befall(&documents, "rename").await;
    until_log(&mut relay, "what comes into it is delivered as before").await;
    documents.add_to("away", 2).await;
    documents.add(3).await;
    befall(&documents, "drop").await;
    until_log(&mut relay, "outbox was dropped").await;
    documents.add(4).await;
    documents.reader.arrive(&[2, 3, 4]).await;
    assert!(!relay.log().contains("opened again"), "the stream went on: {}", relay.log());
    // With the database go lease and position: it takes the one again, and knows the other.
    befall(&documents, "dropDatabase").await;
    until_log(&mut relay, "the database").await;
    documents.add(5).await;
    documents.reader.arrive_at_least_once(&[5], &[1, 2, 3, 4]).await;
    documents.until_stored().await;
    relay.stop().await;
    befall(&documents, "drop").await;
    documents.add(6).await;
    let relay = documents.start(&["--table", "*"]);
    documents.reader.arrive_at_least_once(&[6], &[5]).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_transaction_arrives_whole_in_its_order_and_an_aborted_one_never() {
    let mut documents = Documents::create().await;
    let relay = documents.reading(&[]).await;
    let outbox = documents.database.collection("outbox");
    let mut session = documents.database.session().await;
    // More than one reply holds.
    let numbers: Vec<u32> = (0..2500).collect();
    for committed in [false, true] {
        session.start_transaction().await.expect("a transaction is begun");
        for part in numbers.chunks(500) {
            let added = outbox.insert_many(part.iter().map(|number| numbered(*number))).session(&mut session).await;
            added.expect("documents are added");
        }
        // Committed while the transaction is open, hence before it.
        documents.add(9000 + u32::from(committed)).await;
        documents.reader.arrive(&[9000 + u32::from(committed)]).await;
        match committed {
            true => session.commit_transaction().await.expect("the transaction is committed"),
            false => session.abort_transaction().await.expect("the transaction is aborted"),
        }
    }
    documents.reader.arrive(&numbers).await;
    relay.stop().await;
    documents.reader.nothing_more().await;
}

#[tokio::test]
async fn updates_and_deletes_are_no_events() {
    let mut documents = Documents::create().await;
    let relay = documents.reading(&[]).await;
    let outbox = documents.database.collection("outbox");
    documents.add(1).await;
    outbox.update_one(doc! {}, doc! { "$set": { "payload": "2" } }).await.expect("a document is changed");
    outbox.replace_one(doc! {}, numbered(3)).await.expect("a document is replaced");
    outbox.delete_one(doc! {}).await.expect("a document is deleted");
    documents.add(4).await;
    documents.reader.arrive(&[1, 4]).await;
    relay.stop().await;
    documents.reader.nothing_more().await;
}

/// What may become of a collection, and the words that tell it.
const FATES: [(&str, &str); 3] =
    [("drop", "outbox was dropped"), ("rename", "outbox was renamed to"), ("dropDatabase", "was dropped")];

async fn befall(documents: &Documents, fate: &str) {
    let name = documents.database.name();
    let (from, to) = (format!("{name}.outbox"), format!("{name}.away"));
    match fate {
        "drop" => documents.database.run(doc! { "drop": "outbox" }).await,
        "rename" => documents.database.administer(doc! { "renameCollection": from, "to": to }).await,
        _ => documents.database.run(doc! { "dropDatabase": 1 }).await,
    };
}

#[tokio::test]
async fn a_collection_that_goes_while_the_relay_runs_is_told_and_its_successor_is_read() {
    for tables in [&["--table", "outbox"][..], &["--table", "outbox", "--table", "other"]] {
        for (fate, words) in FATES {
            let mut documents = Documents::create().await;
            let mut relay = documents.reading(tables).await;
            documents.add(1).await;
            documents.reader.arrive(&[1]).await;
            befall(&documents, fate).await;
            until_log(&mut relay, words).await;
            documents.add_to("away", 2).await;
            for number in 3..6 {
                documents.add(number).await;
            }
            // With the database go lease and position: it takes the one again, and knows the other.
            documents.reader.arrive_at_least_once(&[3, 4, 5], &[1]).await;
            documents.until_stored().await;
            relay.stop().await;
            documents.add(6).await;
            let relay = documents.start(tables);
            documents.reader.arrive_at_least_once(&[6], &[1, 3, 4, 5]).await;
            relay.stop().await;
        }
    }
}

#[tokio::test]
async fn a_collection_that_goes_while_nobody_reads_is_told_and_its_successor_is_read() {
    for tables in [&["--table", "outbox"][..], &["--table", "outbox", "--table", "other"]] {
        for (fate, words) in &FATES[..2] {
            let mut documents = Documents::create().await;
            documents.reading(tables).await.stop().await;
            documents.add(1).await;
            befall(&documents, fate).await;
            documents.add(2).await;
            befall_again(&documents).await;
            documents.add(3).await;
            let mut relay = documents.start(tables);
            documents.reader.arrive(&[1, 2, 3]).await;
            until_log(&mut relay, words).await;
            // Killed there, it is not stuck there.
            relay.kill();
            documents.add(4).await;
            let relay = documents.start(tables);
            documents.reader.arrive_at_least_once(&[4], &[1, 2, 3]).await;
            relay.stop().await;
        }
    }
}

async fn befall_again(documents: &Documents) {
    documents.database.run(doc! { "drop": "outbox" }).await;
}

#[tokio::test]
async fn a_collection_that_is_not_there_yet_is_read_when_it_comes() {
    let database = MongoDatabase::create().await;
    let topic = Topic::create(1).await;
    let mut relay = Relay::start_at(&database.url(), &topic, &[]);
    until_log(&mut relay, "reading the change stream").await;
    database.insert(numbered(1)).await;
    topic.reader().arrive(&[1]).await;
    relay.stop().await;
}
