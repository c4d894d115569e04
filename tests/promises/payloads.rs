//! What a row becomes: value, key, headers, topic and timestamp, in a binary stream and in a text one, on the oldest
//! and the newest server.

use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::Message as _;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::support::{Database, PATIENCE, Record, Relay, Server, Topic, shared_kafka, unique};

/// Values as they are: the reader of the other promises takes them for text.
async fn values_of(topic: &Topic, count: usize) -> Vec<Option<Vec<u8>>> {
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", &topic.brokers)
        .set("group.id", &topic.name)
        .set("enable.auto.commit", "false")
        .set("fetch.message.max.bytes", "4000000")
        .create()
        .expect("a consumer is made");
    let mut all = TopicPartitionList::new();
    all.add_partition_offset(&topic.name, 0, Offset::Beginning).expect("the beginning is an offset");
    consumer.assign(&all).expect("the partition is assigned");
    let mut values = Vec::new();
    let reading = async {
        while values.len() < count {
            if let Ok(message) = consumer.recv().await {
                values.push(message.payload().map(<[u8]>::to_vec));
            }
        }
    };
    let _ = tokio::time::timeout(PATIENCE, reading).await;
    assert_eq!(values.len(), count, "not all values arrived");
    values
}

/// A topic that the relay makes.
fn topic_to_be(name: &str) -> Topic {
    Topic { name: name.to_owned(), brokers: shared_kafka(), partitions: 1 }
}

/// A relay whose topics come from the rows.
fn routing(database: &Database, flags: &[&str]) -> Relay {
    let (url, brokers) = (database.url(), shared_kafka());
    let mut arguments = vec!["run", &url, "--brokers", &brokers, "--create-topics", "1"];
    arguments.extend(flags);
    Relay::spawn(&arguments)
}

fn header_names(record: &Record) -> Vec<&str> {
    record.headers.iter().map(|(name, _)| name.as_str()).collect()
}

const PAYLOADS: &[(&str, &[&str])] = &[
    (
        "jsonb",
        &[
            r#"'{"b":1,"a":[1,2.50,"ü€😀é",null,true],"a":{"deep":{}}}'"#,
            "'null'",
            r#"'"a string"'"#,
            "'{}'",
            "(SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 27000) i)",
        ],
    ),
    ("json", &[r#"E'{ "b" : 1,\n\t"a":2.50, "a":"\\u00e9é😀" }  '"#, "'[]'", "'  null '"]),
    (
        "text",
        &[
            "'plain, not JSON'",
            "''",
            r#"E' line\nbreak \\ "quotes" ü€😀 '"#,
            "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 31250) i)",
        ],
    ),
    (
        "bytea",
        &[
            r"'\x000102feff5c785c'",
            "''",
            "(SELECT string_agg(decode(lpad(to_hex(i), 2, '0'), 'hex'), '') FROM generate_series(0, 255) i)",
            "(SELECT string_agg(decode(md5(i::text), 'hex'), '') FROM generate_series(1, 62500) i)",
        ],
    ),
];

/// `key_type` decides the stream: numbers of arbitrary size are read as text.
async fn payloads_arrive_as_they_are(server: Server, key_type: &str, stream: &str) {
    let database = Database::create(server).await;
    let topic = Topic::create_at(&shared_kafka(), 1, &[("max.message.bytes", "2000000")]).await;
    // What a database prints values like by default must not matter.
    let name = database.name();
    database
        .execute(&format!(
            "ALTER DATABASE {name} SET bytea_output = 'escape'; ALTER DATABASE {name} SET DateStyle = 'German';
             ALTER DATABASE {name} SET TimeZone = 'Asia/Kolkata'"
        ))
        .await;
    let mut tables = Vec::new();
    for (payload, _) in PAYLOADS {
        let table = format!("outbox_{payload}");
        database
            .execute(&format!(
                "CREATE TABLE {table} (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), partition_key {key_type},
                                       payload {payload}, created_at timestamptz DEFAULT now())"
            ))
            .await;
        tables.extend(["--table".to_owned(), table]);
    }
    let flags: Vec<&str> = tables.iter().map(String::as_str).collect();
    let relay = Relay::streaming(&database, &topic, &flags).await;
    assert!(relay.log().contains(stream), "not the stream that is tested: {}", relay.log());

    let mut expected = Vec::new();
    for (payload, values) in PAYLOADS {
        // What the client sent, or for jsonb what the server prints, in bytes.
        let bytes = if *payload == "bytea" { "payload" } else { "convert_to(payload::text, 'UTF8')" };
        for value in *values {
            let insert =
                format!("INSERT INTO outbox_{payload} (partition_key, payload) VALUES (7, {value}) RETURNING {bytes}");
            let row = database.sql.query_one(&insert, &[]).await.unwrap_or_else(|error| panic!("{value}: {error:?}"));
            expected.push((format!("{payload} {value}"), row.get::<_, Vec<u8>>(0)));
        }
    }
    let arrived = values_of(&topic, expected.len()).await;
    for ((what, expected), arrived) in expected.iter().zip(&arrived) {
        let arrived = arrived.as_ref().unwrap_or_else(|| panic!("{what}: arrived without a value"));
        assert!(arrived == expected, "{what}: {} bytes arrived for {}", arrived.len(), expected.len());
    }
    let keys = topic.reader().take(expected.len()).await;
    assert!(keys.iter().all(|record| record.key.as_deref() == Some("7")), "{:?}", keys[0]);
    relay.stop().await;
}

#[tokio::test]
async fn payloads_of_a_binary_stream_arrive_byte_for_byte() {
    payloads_arrive_as_they_are(Server::Newest, "bigint", "binary=true").await;
}

#[tokio::test]
async fn payloads_of_a_binary_stream_of_the_oldest_server_arrive_byte_for_byte() {
    payloads_arrive_as_they_are(Server::Oldest, "bigint", "binary=true").await;
}

#[tokio::test]
async fn payloads_of_a_text_stream_arrive_byte_for_byte() {
    payloads_arrive_as_they_are(Server::Newest, "numeric", "binary=false").await;
}

#[tokio::test]
async fn payloads_of_a_text_stream_of_the_oldest_server_arrive_byte_for_byte() {
    payloads_arrive_as_they_are(Server::Oldest, "numeric", "binary=false").await;
}

/// A type made by the user has an oid that no client knows.
#[tokio::test]
async fn columns_of_types_made_by_the_user_are_read_as_the_server_prints_them() {
    let database = Database::create(Server::Newest).await;
    database
        .execute(
            "CREATE TYPE region AS ENUM ('north', 'south'); CREATE DOMAIN body AS text CHECK (value <> 'x');
             CREATE TABLE outbox (id bigserial PRIMARY KEY, partition_key region, payload body, price numeric(12, 4))",
        )
        .await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--header", "price=price"]).await;
    database.execute("INSERT INTO outbox (partition_key, payload, price) VALUES ('south', 'ü', 12.5)").await;
    let records = topic.reader().take(1).await;
    assert_eq!((records[0].key.as_deref(), records[0].value.as_deref()), (Some("south"), Some("ü")));
    assert_eq!((records[0].id(), records[0].header("price")), ("1", Some("12.5000")));
    relay.stop().await;
}

#[tokio::test]
async fn a_null_payload_is_a_tombstone_only_when_asked() {
    let insert = "INSERT INTO outbox (partition_key, payload) VALUES ('k', NULL);
                  INSERT INTO outbox (partition_key, payload) VALUES (NULL, '{}')";
    for (flags, expected) in [(&[][..], Some(b"null".to_vec())), (&["--tombstone-on-null"][..], None)] {
        let database = Database::with_outbox(Server::Newest).await;
        let topic = Topic::create(1).await;
        let relay = Relay::streaming(&database, &topic, flags).await;
        database.execute(insert).await;
        assert_eq!(values_of(&topic, 2).await, [expected, Some(b"{}".to_vec())]);
        let keys: Vec<_> = topic.reader().take(2).await.into_iter().map(|record| record.key).collect();
        assert_eq!(keys, [Some("k".to_owned()), None], "a null key is a record without a key");
        relay.stop().await;
    }
}

const NATIVE: &str = "CREATE TABLE outbox (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), topic text, partition_key text, event_type text, payload jsonb,
    headers jsonb, created_at timestamptz DEFAULT now(), tenant text)";

#[tokio::test]
async fn the_native_layout_makes_headers_of_id_type_and_members() {
    let database = Database::create(Server::Newest).await;
    database.execute(NATIVE).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--header", "x-tenant=tenant"]).await;
    database
        .execute(
            r#"INSERT INTO outbox (id, event_type, payload, headers, tenant) VALUES
               ('018f3c1e-0000-7000-8000-00000000abcd', 'order.placed', '1',
                '{"trace": "aü\"b", "n": 5.0, "o": {"a": [1]}, "yes": true, "nothing": null}', 'acme'),
               ('018f3c1e-0000-7000-8000-00000000abce', NULL, '2', NULL, NULL),
               ('018f3c1e-0000-7000-8000-00000000abcf', NULL, '3', 'null', NULL)"#,
        )
        .await;
    let records = topic.reader().take(3).await;
    assert_eq!(records[0].id(), "018f3c1e-0000-7000-8000-00000000abcd");
    let expected = [
        ("event_type", "order.placed"),
        ("x-tenant", "acme"),
        ("trace", "aü\"b"),
        ("n", "5.0"),
        ("o", r#"{"a": [1]}"#),
        ("yes", "true"),
        ("nothing", ""),
    ];
    for (name, value) in expected {
        assert_eq!(records[0].header(name), Some(value), "{:?}", records[0].headers);
    }
    assert_eq!(records[0].headers.len(), 1 + expected.len(), "{:?}", records[0].headers);
    assert_eq!((header_names(&records[1]), header_names(&records[2])), (vec!["id"], vec!["id"]));
    relay.stop().await;
}

#[tokio::test]
async fn the_record_timestamp_is_the_rows_own() {
    // A numeric key makes the second stream a text one.
    for (server, key) in [(Server::Newest, "text"), (Server::Newest, "numeric"), (Server::Oldest, "text")] {
        let database = Database::create(server).await;
        database.execute(&format!("{NATIVE}; ALTER TABLE outbox DROP partition_key, ADD partition_key {key}")).await;
        let topic = Topic::create(1).await;
        let relay = Relay::streaming(&database, &topic, &[]).await;
        database
            .execute(
                "SET TimeZone = 'America/New_York';
                 INSERT INTO outbox (payload, created_at) VALUES ('1', '2024-03-05 06:07:08.9105+00');
                 INSERT INTO outbox (payload, created_at) VALUES ('2', '2024-03-05 01:02:03')",
            )
            .await;
        let times: Vec<_> = topic.reader().take(2).await.iter().map(|record| record.timestamp).collect();
        assert_eq!(times, [1_709_618_828_910, 1_709_618_523_000], "{server:?} {key}");
        relay.stop().await;
    }
}

#[tokio::test]
async fn without_a_timestamp_the_record_has_the_time_of_the_commit() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    database.execute("BEGIN; INSERT INTO outbox (payload) VALUES ('1')").await;
    let before = database.number(clock).await;
    database.execute("COMMIT").await;
    let after = database.number(clock).await;
    let records = topic.reader().take(1).await;
    assert!((before - 1..=after + 1).contains(&records[0].timestamp), "{before} {} {after}", records[0].timestamp);
    relay.stop().await;
}

/// A broker refuses records from the far future: the event is put aside with its own moment left out, and what
/// follows flows.
#[tokio::test]
async fn an_event_with_an_impossible_time_does_not_stop_the_rest() {
    let database = Database::create(Server::Newest).await;
    database.execute(NATIVE).await;
    let (topic, letters) = (Topic::create(1).await, Topic::create(1).await);
    let relay = Relay::streaming(&database, &topic, &["--dead-letter", &format!("topic:{}", letters.name)]).await;
    database
        .execute(
            "INSERT INTO outbox (partition_key, payload, created_at) VALUES
             ('a', '1', now()), ('a', '2', now() + interval '10 days'), ('a', '3', 'infinity'), ('a', '4', now()),
             ('a', '5', '1955-11-05 06:00:00+00'), ('a', '6', '-infinity'), ('a', '7', now())",
        )
        .await;
    let mut values = Vec::new();
    let (mut delivered, mut parked) = (topic.reader(), letters.reader());
    let all = |values: &[String]| {
        let mut known: Vec<_> = values.to_vec();
        known.sort();
        known.dedup();
        known.len() == 7
    };
    let begin = std::time::Instant::now();
    while !all(&values) && begin.elapsed() < PATIENCE {
        for reader in [&mut delivered, &mut parked] {
            let record = reader.next(std::time::Duration::from_millis(200)).await;
            values.extend(record.and_then(|record| record.value));
        }
    }
    assert!(all(&values), "only {values:?} arrived: {}", relay.log());
    relay.stop().await;
}

#[tokio::test]
async fn topic_and_key_come_from_where_the_user_says() {
    let database = Database::create(Server::Newest).await;
    database.execute(NATIVE).await;
    let base = unique("promise");
    let template = format!("{base}.{{tenant}}.{{event_type}}");
    let mut relay = routing(&database, &["--topic", &template, "--column", "key=/customer/id"]);
    relay.until_streaming(&database).await;
    database
        .execute(
            r#"INSERT INTO outbox (partition_key, tenant, event_type, payload) VALUES
               ('no', 'acme', 'placed', '{"customer": {"id": "c-1"}}'),
               ('no', 'acme', 'paid', '{"customer": {"id": 42}}'),
               ('no', 'acme', 'paid', '{"customer": null}')"#,
        )
        .await;
    let placed = topic_to_be(&format!("{base}.acme.placed")).reader().take(1).await;
    assert_eq!(placed[0].key.as_deref(), Some("c-1"));
    let paid = topic_to_be(&format!("{base}.acme.paid")).reader().take(2).await;
    assert_eq!((paid[0].key.as_deref(), paid[1].key.as_deref()), (Some("42"), None));
    relay.stop().await;
}

#[tokio::test]
async fn without_a_topic_option_the_row_names_its_topic() {
    let database = Database::create(Server::Newest).await;
    database.execute(NATIVE).await;
    let base = unique("promise");
    let letters = Topic::create(1).await;
    let mut relay = routing(&database, &["--dead-letter", &format!("topic:{}", letters.name)]);
    relay.until_streaming(&database).await;
    database
        .execute(&format!(
            "INSERT INTO outbox (topic, partition_key, payload) VALUES
             ('{base}_a', 'k', '1'), (NULL, 'k', '2'), ('not a topic', 'k', '3'), ('{base}_b', 'k', '4')"
        ))
        .await;
    for (topic, value) in [("a", "1"), ("b", "4")] {
        let records = topic_to_be(&format!("{base}_{topic}")).reader().take(1).await;
        assert_eq!(records[0].value.as_deref(), Some(value));
    }
    let parked = letters.reader().take(2).await;
    assert_eq!((parked[0].value.as_deref(), parked[1].value.as_deref()), (Some("2"), Some("3")));
    assert!(parked[0].header("outboxd.reason").is_some_and(|why| why.contains("null")), "{parked:?}");
    assert!(parked[1].header("outboxd.reason").is_some_and(|why| why.contains("not a topic")), "{parked:?}");
    relay.stop().await;
}

#[tokio::test]
async fn the_debezium_layout_routes_as_the_outbox_event_router_does() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::create(server).await;
        database
            .execute(
                "CREATE TABLE outboxevent (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL,
                     aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)",
            )
            .await;
        let aggregate = unique("Order");
        let mut relay = routing(&database, &["--layout", "debezium"]);
        relay.until_streaming(&database).await;
        database
            .execute(&format!(
                r#"INSERT INTO outboxevent VALUES ('406c07f3-26f0-4eea-a50c-109940064b8f', '{aggregate}', '1',
                   'OrderCreated', '{{"id":1,"lines":[]}}')"#
            ))
            .await;
        let records = topic_to_be(&format!("outbox.event.{aggregate}")).reader().take(1).await;
        assert_eq!(
            (records[0].key.as_deref(), records[0].value.as_deref()),
            (Some("1"), Some(r#"{"id": 1, "lines": []}"#))
        );
        let id = ("id".to_owned(), "406c07f3-26f0-4eea-a50c-109940064b8f".to_owned());
        assert_eq!(records[0].headers, [id], "id is the only header");
        relay.stop().await;
    }
}
