use bytes::Bytes;
use mongodb::bson::{Bson, DateTime, Document, Timestamp, doc};

use super::*;
use crate::config::ExtendedJson;
use crate::event::{Projection, Want};

fn log() -> Log {
    let mut projection = Projection::default();
    projection.slot("_id", Want::Text, true);
    projection.slot("payload", Want::Text, true);
    projection.slot("created_at", Want::Time, false);
    let scope = Scope::new(vec![("shop".to_owned(), "outbox".to_owned())]);
    Log::new(scope, Documents::new(&projection, ExtendedJson::Relaxed), projection.width())
}

fn token(seconds: u32, number: u32) -> String {
    format!("82{seconds:08X}000000012B022C0100296E5A1004{number:04X}")
}

fn insert(seconds: u32, number: u32, document: Document) -> Document {
    doc! {
        "_id": { "_data": token(seconds, number) }, "operationType": "insert",
        "clusterTime": Timestamp { time: seconds, increment: 1 }, "wallTime": DateTime::from_millis(i64::from(seconds) * 1000 + 5),
        "ns": { "db": "shop", "coll": "outbox" }, "fullDocument": document,
    }
}

fn reply(events: Vec<Document>, position: &str) -> Batch {
    let events: Vec<Bson> = events.into_iter().map(Bson::Document).collect();
    let cursor =
        doc! { "nextBatch": events, "postBatchResumeToken": { "_data": position }, "id": 1_i64, "ns": "shop.outbox" };
    Batch::new(Bytes::from(doc! { "cursor": cursor, "ok": 1.0 }.to_vec().unwrap()))
}

fn fields(chunk: &Chunk, at: usize) -> Vec<Option<&[u8]>> {
    (0..3).map(|slot| chunk.field(&chunk.events()[at], slot)).collect()
}

#[test]
fn a_reply_is_one_chunk_and_events_of_one_time_are_one_commit() {
    let (mut log, mut chunk) = (log(), Chunk::default());
    let events = vec![
        insert(100, 1, doc! { "_id": 1, "payload": { "a": 1 }, "created_at": DateTime::from_millis(7), "other": 1 }),
        insert(100, 2, doc! { "_id": 2, "payload": "{\"b\": 2}" }),
        insert(101, 1, doc! { "_id": 3, "payload": Bson::Null }),
    ];
    let end = log.read(&reply(events, &token(101, 1)), &StreamPosition::nothing(), &mut chunk).unwrap().unwrap();
    assert_eq!((chunk.events().len(), chunk.transactions), (3, 2));
    assert_eq!(fields(&chunk, 0), [Some(&b"1"[..]), Some(br#"{"a":1}"#), Some(&7000_i64.to_be_bytes())]);
    assert_eq!(fields(&chunk, 1), [Some(&b"2"[..]), Some(br#"{"b": 2}"#), None], "a text is not touched");
    assert_eq!(fields(&chunk, 2), [Some(&b"3"[..]), None, None]);
    assert_eq!(chunk.commit(&chunk.events()[2]).committed_at, Micros(101_005_000));
    assert_eq!((end.to_string(), end.whole, end.eventful), (token(101, 1), false, 3));
    assert!(!chunk.catching_up, "a reply that is not full is the end of what there is");
}

#[test]
fn a_reply_without_events_moves_the_position_once() {
    let (mut log, mut chunk) = (log(), Chunk::default());
    let at = log.read(&reply(vec![], &token(102, 0)), &StreamPosition::nothing(), &mut chunk).unwrap().unwrap();
    assert!(at.whole && chunk.events().is_empty());
    assert_eq!(log.read(&reply(vec![], &token(102, 0)), &at, &mut chunk).unwrap(), None);
}

#[test]
fn an_event_in_pieces_is_delivered_when_it_is_whole_and_not_passed_before() {
    let (mut log, mut chunk) = (log(), Chunk::default());
    let from = StreamPosition::nothing();
    let mut first = insert(100, 1, doc! {});
    first.remove("fullDocument");
    first.insert("splitEvent", doc! { "fragment": 1, "of": 2 });
    let second = doc! {
        "_id": { "_data": token(100, 2) }, "splitEvent": { "fragment": 2, "of": 2 },
        "fullDocument": { "_id": "x", "payload": "large" },
    };
    assert_eq!(log.read(&reply(vec![first], &token(100, 1)), &from, &mut chunk).unwrap(), None, "half an event");
    assert!(chunk.events().is_empty());
    let end = log.read(&reply(vec![second.clone()], &token(100, 2)), &from, &mut chunk).unwrap().unwrap();
    assert_eq!(fields(&chunk, 0), [Some(&b"x"[..]), Some(b"large"), None]);
    assert_eq!(end.to_string(), token(100, 2));
    let alone = log.read(&reply(vec![second], &token(100, 2)), &from, &mut chunk);
    assert!(alone.is_err(), "a piece without the one before it");
}

#[test]
fn an_invalidated_stream_is_noticed_and_its_token_is_the_position() {
    let (mut log, mut chunk) = (log(), Chunk::default());
    let gone = doc! { "_id": { "_data": token(100, 1) }, "operationType": "invalidate" };
    let end = log.read(&reply(vec![gone], &token(100, 1)), &StreamPosition::nothing(), &mut chunk).unwrap().unwrap();
    assert!(log.invalidated && chunk.events().is_empty());
    assert_eq!(end.to_string(), token(100, 1));
}

#[test]
fn a_document_that_cannot_be_read_is_an_event_all_the_same() {
    let (mut log, mut chunk) = (log(), Chunk::default());
    let mut deep = doc! {};
    for _ in 0..300 {
        deep = doc! { "a": deep };
    }
    let events = vec![insert(100, 1, doc! { "_id": 1, "payload": deep })];
    log.read(&reply(events, &token(100, 1)), &StreamPosition::nothing(), &mut chunk).unwrap().unwrap();
    let (why, content) = chunk.defect(&chunk.events()[0]).unwrap();
    assert!(why.contains("nested") && content.is_some_and(|bytes| bytes.len() > 300), "{why}");
}

#[test]
fn an_insert_without_its_document_halts() {
    let (mut log, mut chunk) = (log(), Chunk::default());
    let mut event = insert(100, 1, doc! {});
    event.remove("fullDocument");
    let read = log.read(&reply(vec![event], &token(100, 1)), &StreamPosition::nothing(), &mut chunk);
    assert!(matches!(read, Err(SourceFailure::Undecodable { .. })), "{read:?}");
}
