//! The layout `entity`, from `init` to the record.

use mongodb::bson::{Uuid, doc};

use crate::support::{Outbox, Relay, Source, Topic, outboxd};

const ID: &str = "0191a3f0-7a1e-7c3c-8f4e-2b5d6c7e8f90";

promised!(entity_layout_is_made_by_init_and_delivered_with_its_five_headers to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn entity_layout_is_made_by_init_and_delivered_with_its_five_headers(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let url = outbox.url();
    let layout = ["--layout", "entity", "--table", "entities"];
    for expected in ["created ", "nothing to do: everything is in place"] {
        let ended = outboxd(&[&["init", &url], &layout[..]].concat()).await;
        assert!(ended.code == 0 && ended.stdout.contains(expected), "{ended:?}");
    }
    let name = &topic.name;
    match source {
        Source::MongoDb => {
            let document = doc! {
                "event_id": Uuid::parse_str(ID).expect("a UUID"), "event_type": "user.created",
                "entity_type": "user", "entity_id": "u-17", "entity_version": 3, "topic": name, "partition_key": "u-17",
                "payload": { "name": "Ada", "n": 1 }, "status": "pending",
            };
            outbox.mongodb().collection("entities").insert_one(document).await.expect("a document is added");
        }
        _ => {
            let insert = format!(
                "INSERT INTO entities
                     (event_id, event_type, entity_type, entity_id, entity_version, topic, partition_key, payload)
                 VALUES ('{ID}', 'user.created', 'user', 'u-17', 3, '{name}', 'u-17', '{{\"name\": \"Ada\", \"n\": 1}}')"
            );
            outbox.execute(&insert).await;
        }
    }
    // The topic is the row's own.
    let arguments = ["run", &url, "--brokers", &topic.brokers, "--until-caught-up"];
    Relay::spawn(&[&arguments[..], &layout].concat()).exits_with(0).await;
    let records = topic.reader().rest().await;
    assert_eq!(records.len(), 1, "{records:?}");
    let record = &records[0];
    let headers = [
        ("event_id", ID),
        ("event_type", "user.created"),
        ("entity_type", "user"),
        ("entity_id", "u-17"),
        ("entity_version", "3"),
    ];
    for (header, value) in headers {
        assert_eq!(record.header(header), Some(value), "{record:?}");
    }
    assert_eq!(record.headers.len(), headers.len(), "{record:?}");
    assert_eq!(record.key.as_deref(), Some("u-17"));
    let payload: serde_json::Value = serde_json::from_str(record.value.as_deref().expect("a value")).expect("JSON");
    assert_eq!(payload, serde_json::json!({ "name": "Ada", "n": 1 }));
}
