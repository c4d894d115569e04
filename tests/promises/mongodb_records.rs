//! How a document becomes a record: payloads of every type, ids of every type, and fields that come and go.

use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Binary, Bson, DateTime, Decimal128, Document, Timestamp, Uuid, doc, oid::ObjectId};

use crate::support::{Documents, MongoDatabase, Relay, Topic, outboxd, values};

fn binary(bytes: &[u8]) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() })
}

#[tokio::test]
async fn payloads_are_json_or_what_they_are() {
    let documents = Documents::create().await;
    let id = ObjectId::parse_str("66a5f0c2d1e2f3a4b5c6d7e8").expect("an id");
    let date = DateTime::from_millis(1_700_000_000_123);
    let cases: [(Bson, &str, &str); 9] = [
        (
            doc! { "n": 1, "long": 5_000_000_000_i64, "half": 0.5, "none": Bson::Null, "a\"b": [true, "ü"] }.into(),
            r#"{"n":1,"long":5000000000,"half":0.5,"none":null,"a\"b":[true,"ü"]}"#,
            r#"{"n":{"$numberInt":"1"},"long":{"$numberLong":"5000000000"},"half":{"$numberDouble":"0.5"},"none":null,"a\"b":[true,"ü"]}"#,
        ),
        (
            doc! { "id": id, "at": date }.into(),
            r#"{"id":{"$oid":"66a5f0c2d1e2f3a4b5c6d7e8"},"at":{"$date":"2023-11-14T22:13:20.123Z"}}"#,
            r#"{"id":{"$oid":"66a5f0c2d1e2f3a4b5c6d7e8"},"at":{"$date":{"$numberLong":"1700000000123"}}}"#,
        ),
        (Bson::Array(vec![1.into(), "two".into()]), r#"[1,"two"]"#, r#"[{"$numberInt":"1"},"two"]"#),
        // Untouched, whatever it looks like.
        ("{ \"n\" :1}".into(), "{ \"n\" :1}", "{ \"n\" :1}"),
        ("not JSON \u{1F600}\n".into(), "not JSON \u{1F600}\n", "not JSON \u{1F600}\n"),
        ("".into(), "", ""),
        (binary(b"bytes \x01\x02"), "bytes \u{1}\u{2}", "bytes \u{1}\u{2}"),
        (true.into(), "true", "true"),
        (doc! {}.into(), "{}", "{}"),
    ];
    let relaxed = documents.reading(&[]).await;
    let canonical_topic = Topic::create(1).await;
    let flags = ["--extended-json", "canonical", "--name", "canonical"];
    let mut canonical = Relay::start_at(&documents.database.url(), &canonical_topic, &flags);
    canonical.until_state("streaming").await;
    for (payload, ..) in &cases {
        documents.database.insert(doc! { "partition_key": "k", "payload": payload.clone() }).await;
    }
    let written = values(&documents.topic.reader().take(cases.len()).await);
    assert_eq!(written, cases.iter().map(|(_, relaxed, _)| (*relaxed).to_owned()).collect::<Vec<_>>());
    let written = values(&canonical_topic.reader().take(cases.len()).await);
    assert_eq!(written, cases.iter().map(|(.., canonical)| (*canonical).to_owned()).collect::<Vec<_>>());
    relaxed.stop().await;
    canonical.stop().await;
}

#[tokio::test]
async fn ids_of_every_type_become_the_header() {
    let documents = Documents::create().await;
    let relay = documents.reading(&[]).await;
    let uuid = Uuid::parse_str("0191a3f0-7a1e-7c3c-8f4e-2b5d6c7e8f90").expect("a UUID");
    let decimal: Decimal128 = "12.50".parse().expect("a number");
    let ids: [(Bson, &str); 11] = [
        (ObjectId::parse_str("66a5f0c2d1e2f3a4b5c6d7e8").expect("an id").into(), "66a5f0c2d1e2f3a4b5c6d7e8"),
        ("text".into(), "text"),
        (7.into(), "7"),
        (9_007_199_254_740_993_i64.into(), "9007199254740993"),
        (uuid.into(), "0191a3f0-7a1e-7c3c-8f4e-2b5d6c7e8f90"),
        (binary(b"raw"), "raw"),
        (doc! { "a": 1, "b": "x" }.into(), r#"{"a":1,"b":"x"}"#),
        (DateTime::from_millis(0).into(), "1970-01-01T00:00:00Z"),
        (decimal.into(), "12.50"),
        (true.into(), "true"),
        (0.5.into(), "0.5"),
    ];
    for (id, _) in &ids {
        documents.database.insert(doc! { "_id": id.clone(), "partition_key": "k", "payload": "p" }).await;
    }
    let records = documents.topic.reader().take(ids.len()).await;
    let found: Vec<_> = records.iter().map(|record| record.id().to_owned()).collect();
    assert_eq!(found, ids.iter().map(|(_, text)| (*text).to_owned()).collect::<Vec<_>>());
    relay.stop().await;
}

/// Documents have no schema: each is taken as it is.
#[tokio::test]
async fn fields_that_come_go_and_change_their_type_are_taken_as_they_are() {
    let documents = Documents::create().await;
    let relay = documents.reading(&[]).await;
    type Step = (Document, Option<&'static str>, Option<&'static str>, Option<&'static str>);
    let steps: [Step; 8] = [
        (doc! { "partition_key": "k", "payload": "p" }, Some("k"), Some("p"), None),
        (doc! { "partition_key": "k", "payload": "p", "event_type": "t" }, Some("k"), Some("p"), Some("t")),
        (doc! { "event_type": 5, "payload": { "n": 1 }, "partition_key": 8 }, Some("8"), Some(r#"{"n":1}"#), Some("5")),
        (doc! { "payload": "p", "partition_key": Bson::Null, "extra": { "deep": [1] } }, None, Some("p"), None),
        (doc! { "payload": 3, "partition_key": { "a": 1 } }, Some(r#"{"a":1}"#), Some("3"), None),
        (doc! { "payload": "p", "created_at": "no date" }, None, Some("p"), None),
        (doc! { "payload": "p", "created_at": Timestamp { time: 1_700_000_000, increment: 1 } }, None, Some("p"), None),
        (doc! { "partition_key": "k", "payload": "p", "headers": { "a": "b" } }, Some("k"), Some("p"), None),
    ];
    for (document, ..) in &steps {
        documents.database.insert(document.clone()).await;
    }
    let records = documents.topic.reader().take(steps.len()).await;
    for ((document, key, value, event_type), record) in steps.iter().zip(&records) {
        let found = (record.key.as_deref(), record.value.as_deref(), record.header("event_type"));
        assert_eq!(found, (*key, *value, *event_type), "of {document}");
    }
    assert_eq!(records[6].timestamp, 1_700_000_000_000);
    assert_eq!(records[7].header("a"), Some("b"));
    relay.stop().await;
}

#[tokio::test]
async fn the_native_and_the_debezium_layout_are_made_by_init_and_delivered() {
    for layout in ["native", "debezium"] {
        let database = MongoDatabase::create().await;
        let url = database.url();
        let ended = outboxd(&["init", &url, "--layout", layout]).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        let topic = Topic::create(1).await;
        let at = DateTime::from_millis(1_700_000_000_123);
        let (collection, document) = match layout {
            "native" => (
                "outbox",
                doc! { "_id": "e-1", "topic": &topic.name, "partition_key": "17", "event_type": "made",
                "payload": { "n": 1 }, "headers": { "trace": "abc" }, "created_at": at },
            ),
            _ => (
                "outboxevent",
                doc! { "_id": "e-1", "aggregatetype": "order", "aggregateid": "17", "type": "made", "payload": { "n": 1 } },
            ),
        };
        database.collection(collection).insert_one(document).await.expect("a document is added");
        let mut arguments = vec!["run", &url, "--brokers", &topic.brokers, "--layout", layout, "--until-caught-up"];
        if layout == "debezium" {
            // Else it were outbox.event.order.
            arguments.extend(["--topic", &topic.name]);
        }
        Relay::spawn(&arguments).exits_with(0).await;
        let records = topic.reader().rest().await;
        assert_eq!(records.len(), 1, "{layout}: {records:?}");
        let record = &records[0];
        assert_eq!((record.id(), record.key.as_deref()), ("e-1", Some("17")), "{layout}");
        assert_eq!(record.value.as_deref(), Some(r#"{"n":1}"#), "{layout}");
        if layout == "native" {
            assert_eq!((record.header("event_type"), record.header("trace")), (Some("made"), Some("abc")));
            assert_eq!(record.timestamp, at.timestamp_millis());
        }
    }
}
