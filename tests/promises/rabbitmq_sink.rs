//! The RabbitMQ sink against a server that works: what arrives there, what is refused, and who is let in.

use std::collections::HashMap;

use lapin::ExchangeKind;

use crate::support::{
    Database, Exchange, MIB, Message, PATIENCE, PrivateRabbit, Queue, Relay, Server, Topic, check, eventually, outboxd,
    unique, variable,
};

/// With the whole table of the native layout.
pub async fn database() -> Database {
    let database = Database::create(Server::Newest).await;
    database
        .execute(
            "CREATE TABLE outbox (
                 id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
                 topic text,
                 partition_key text,
                 event_type text,
                 payload jsonb,
                 headers jsonb,
                 created_at timestamptz DEFAULT now()
             )",
        )
        .await;
    database
}

/// Rows `from..to` of `keys` keys, committed together; the payload is `{"n": …, "pad": …}`.
pub async fn add(database: &Database, from: usize, to: usize, keys: usize, padding: usize) {
    let insert = format!(
        "INSERT INTO outbox (partition_key, event_type, payload)
         SELECT 'key-' || n % {keys}, 'Counted', jsonb_build_object('n', n, 'pad', repeat('x', {padding}))
         FROM generate_series({from}, {to} - 1) n"
    );
    database.execute(&insert).await;
}

pub async fn relay(database: &Database, exchange: &Exchange, flags: &[&str]) -> Relay {
    let mut relay = starting(database, &exchange.url, &[&["--exchange", &exchange.name], flags].concat());
    relay.until_streaming(database).await;
    relay
}

fn starting(database: &Database, sink: &str, flags: &[&str]) -> Relay {
    let url = database.url();
    Relay::spawn(&[&["run", &url, "--sink", sink], flags].concat())
}

pub fn shared() -> String {
    variable("OUTBOXD_TEST_RABBITMQ_URL")
}

/// First occurrences of each key are in order.
pub fn assert_in_order(messages: &[Message], keys: u64) {
    let mut next: HashMap<u64, u64> = HashMap::new();
    for n in messages.iter().map(Message::number) {
        let expected = next.entry(n % keys).or_insert(n % keys);
        if n >= *expected {
            assert_eq!(n, *expected, "of key {}", n % keys);
            *expected += keys;
        }
    }
}

pub fn distinct(messages: &[Message]) -> usize {
    messages.iter().map(Message::number).collect::<std::collections::HashSet<_>>().len()
}

async fn until_there(queue: &mut Queue, count: usize) -> Vec<Message> {
    queue.until(PATIENCE, "all arrive", |messages| distinct(messages) >= count).await.to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn records_arrive_persistent_with_routing_key_headers_and_message_id() {
    let database = database().await;
    let exchange = Exchange::declare(&shared()).await;
    let mut queue = exchange.queue("#").await;
    let relay = relay(&database, &exchange, &[]).await;
    database
        .execute(
            r#"INSERT INTO outbox (id, topic, partition_key, event_type, payload, headers, created_at) VALUES
               ('00000000-0000-4000-8000-000000000001', 'orders.made', 'a', 'OrderMade', '{"n": 1}',
                '{"trace": "t-1", "none": null, "depth": 3}', '2026-01-02 03:04:05.678Z'),
               ('00000000-0000-4000-8000-000000000002', NULL, NULL, 'OrderPaid', '{"n": 2}', NULL, now())"#,
        )
        .await;
    let messages = until_there(&mut queue, 2).await;
    relay.stop().await;

    let first = messages.iter().find(|message| message.number() == 1).expect("the first is there");
    assert_eq!(first.routing_key, "orders.made");
    assert_eq!(first.body, br#"{"n": 1}"#);
    let properties = &first.properties;
    assert_eq!(properties.delivery_mode(), &Some(2), "persistent");
    assert_eq!(properties.message_id().as_ref().map(|id| id.as_str()), Some("00000000-0000-4000-8000-000000000001"));
    assert_eq!(properties.kind().as_ref().map(|kind| kind.as_str()), Some("OrderMade"));
    assert_eq!(properties.content_type().as_ref().map(|kind| kind.as_str()), Some("application/json"));
    assert_eq!(properties.app_id().as_ref().map(|id| id.as_str()), Some("outboxd"));
    assert_eq!(properties.timestamp(), &Some(1_767_323_045));
    assert_eq!(first.header("id").as_deref(), Some("00000000-0000-4000-8000-000000000001"));
    assert_eq!(first.header("event_type").as_deref(), Some("OrderMade"));
    assert_eq!(first.header("trace").as_deref(), Some("t-1"));
    assert_eq!(first.header("depth").as_deref(), Some("3"));
    assert_eq!(first.header("none").as_deref(), Some("Void"));
    assert_eq!(first.header("outboxd.key").as_deref(), Some("a"));
    let second = messages.iter().find(|message| message.number() == 2).expect("the second is there");
    assert_eq!(second.routing_key, "OrderPaid", "without a topic, the type");
    assert_eq!(second.header("outboxd.key"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_layout_occurred_on_has_an_exchange_and_routing_keys_of_its_own() {
    let database = Database::create(Server::Newest).await;
    let (url, kind) = (database.url(), unique("OrderPlaced"));
    let flags = ["--layout", "occurred-on"];
    let made = outboxd(&[&["init", &url], &flags[..]].concat()).await;
    assert_eq!(made.code, 0, "{made:?}");
    // Others may publish to it as well.
    let exchange = Exchange { url: shared(), name: "arap.events".to_owned() };
    let mut relay = starting(&database, &exchange.url, &flags);
    relay.until_streaming(&database).await;
    let mut queue = exchange.queue(&format!("arap.{kind}")).await;
    let insert = format!(
        "INSERT INTO outbox.outbox_messages (\"Type\", \"Content\") VALUES ('{kind}', '{{\"n\": 7}}')
         RETURNING \"Id\"::text"
    );
    let id = database.text(&insert).await;
    let messages = until_there(&mut queue, 1).await;
    assert_eq!((messages[0].routing_key.as_str(), messages[0].number()), (format!("arap.{kind}").as_str(), 7));
    assert_eq!(messages[0].properties.message_id().as_ref().map(|id| id.to_string()), id);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exchange_is_declared_and_the_template_makes_the_routing_key() {
    let database = database().await;
    let exchange = Exchange::missing(&shared());
    let relay = relay(&database, &exchange, &["--routing-key", "arap.{event_type}"]).await;
    let mut queue = exchange.queue("arap.*").await;
    add(&database, 0, 1, 1, 0).await;
    let messages = until_there(&mut queue, 1).await;
    assert_eq!(messages[0].routing_key, "arap.Counted");
    relay.stop().await;

    // The default exchange leads to the queue of the routing key's name.
    let flags = ["--exchange", "", "--routing-key", &queue.name.clone(), "--amqp-mandatory"];
    let mut relay = starting(&database, &exchange.url, &flags);
    relay.until_streaming(&database).await;
    add(&database, 1, 2, 1, 0).await;
    until_there(&mut queue, 2).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_arrive_once_and_in_order_of_each_key_over_all_lanes() {
    let database = database().await;
    let exchange = Exchange::declare(&shared()).await;
    let mut queue = exchange.queue("#").await;
    let relay = relay(&database, &exchange, &["--amqp-batch", "50"]).await;
    for part in 0..10 {
        add(&database, part * 500, part * 500 + 500, 37, 0).await;
    }
    let messages = until_there(&mut queue, 5000).await;
    let position = database.wal_position().await;
    database.until_confirmed(position, PATIENCE).await;
    relay.stop().await;
    assert_eq!(messages.len(), 5000, "once each");
    assert_in_order(&messages, 37);
}

#[tokio::test(flavor = "multi_thread")]
async fn just_what_reaches_no_queue_is_parked_when_it_is_mandatory() {
    let database = database().await;
    let exchange = Exchange::declare(&shared()).await;
    let mut queue = exchange.queue("good.*").await;
    let dead = Topic::create(1).await;
    let place = format!("topic:{}", dead.name);
    let parking =
        ["--brokers", &dead.brokers, "--dead-letter", &place, "--max-retries", "1", "--retry-backoff", "50ms"];
    let relay = relay(&database, &exchange, &[&["--amqp-mandatory", "--lanes", "2"], &parking[..]].concat()).await;
    database
        .execute(
            "INSERT INTO outbox (partition_key, topic, payload)
             SELECT 'key-' || n % 5, CASE WHEN n IN (42, 43, 142) THEN 'bad.x' ELSE 'good.x' END, jsonb_build_object('n', n)
             FROM generate_series(0, 299) n",
        )
        .await;
    let letters = dead.reader().take(3).await;
    let messages = until_there(&mut queue, 297).await;
    add(&database, 300, 301, 5, 0).await;
    eventually(PATIENCE, "the last one, of the type Counted, is parked too", async || {
        (relay.status().await["dead_letters"] == 4).then_some(())
    })
    .await;
    relay.stop().await;

    assert_eq!(messages.len(), 297, "the others once each");
    let mut by_key: HashMap<u64, Vec<u64>> = HashMap::new();
    for n in messages.iter().map(Message::number) {
        by_key.entry(n % 5).or_default().push(n);
    }
    assert!(by_key.values().all(|numbers| numbers.is_sorted()), "{by_key:?}");
    for letter in &letters {
        assert_eq!(letter.header("outboxd.topic"), Some("bad.x"));
        let why = letter.header("outboxd.reason").expect("a reason");
        assert!(why.contains("NO_ROUTE") && why.contains("bad.x"), "{why}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_returned_record_is_exit_6_without_a_dead_letter_place_and_comes_again() {
    let database = database().await;
    let exchange = Exchange::declare(&shared()).await;
    let flags = ["--amqp-mandatory", "--max-retries", "0"];
    let mut failing = relay(&database, &exchange, &flags).await;
    add(&database, 0, 20, 3, 0).await;
    failing.exits_with(6).await;
    assert!(failing.log().contains("no queue is bound"), "{}", failing.log());

    let mut queue = exchange.queue("#").await;
    let relay = relay(&database, &exchange, &flags).await;
    let messages = until_there(&mut queue, 20).await;
    relay.stop().await;
    assert_in_order(&messages, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_rabbitmq_finds_too_large_is_parked_alone() {
    let server = PrivateRabbit::start(&["max_message_size = 100000"]).await;
    let database = database().await;
    let exchange = Exchange::declare(&server.url()).await;
    let mut queue = exchange.queue("#").await;
    let dead = Topic::create(1).await;
    let place = format!("topic:{}", dead.name);
    let parking =
        ["--brokers", &dead.brokers, "--dead-letter", &place, "--max-retries", "1", "--retry-backoff", "50ms"];
    let relay = relay(&database, &exchange, &parking).await;
    database
        .execute(
            "INSERT INTO outbox (partition_key, event_type, payload, headers)
             SELECT 'key-' || n % 3, 'Counted',
                    jsonb_build_object('n', n, 'pad', repeat('x', CASE n WHEN 17 THEN 200000 ELSE 10 END)),
                    CASE n WHEN 23 THEN jsonb_build_object('big', repeat('y', 200000)) END
             FROM generate_series(0, 49) n",
        )
        .await;
    let letters = dead.reader().take(2).await;
    let messages = until_there(&mut queue, 48).await;
    assert!(!messages.iter().any(|message| [17, 23].contains(&message.number())));
    let reasons: Vec<_> = letters.iter().filter_map(|letter| letter.header("outboxd.reason")).collect();
    assert!(reasons.iter().any(|why| why.contains("larger than")), "{reasons:?}");
    assert!(reasons.iter().any(|why| why.contains("a frame of RabbitMQ")), "{reasons:?}");
    add(&database, 50, 60, 3, 0).await;
    until_there(&mut queue, 58).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_routing_key_that_the_user_may_not_write_is_parked_and_stops_nobody_else() {
    let server = PrivateRabbit::start(&[]).await;
    let database = database().await;
    let mut exchange = Exchange::declare(&server.url()).await;
    let mut queue = exchange.queue("#").await;
    server.control(&["add_user", "writer", "s3cret"]).await;
    server.control(&["set_permissions", "writer", ".*", ".*", ".*"]).await;
    server.control(&["set_topic_permissions", "writer", &exchange.name, "^ours", "^$"]).await;
    exchange.url = exchange.url.replace("guest:guest", "writer:s3cret");
    let dead = Topic::create(1).await;
    let place = format!("topic:{}", dead.name);
    let parking = ["--brokers", &dead.brokers, "--dead-letter", &place, "--max-retries", "0"];
    let relay = relay(&database, &exchange, &parking).await;
    database
        .execute(
            "INSERT INTO outbox (partition_key, topic, payload)
             SELECT 'key-' || n % 3, CASE n WHEN 5 THEN 'theirs' ELSE 'ours' END, jsonb_build_object('n', n)
             FROM generate_series(0, 29) n",
        )
        .await;
    let letters = dead.reader().take(1).await;
    assert!(letters[0].header("outboxd.reason").is_some_and(|why| why.contains("theirs")), "{letters:?}");
    until_there(&mut queue, 29).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchange_that_is_missing_or_of_another_type_is_exit_5() {
    let database = database().await;
    let missing = Exchange::missing(&shared());
    let flags = ["--exchange", &missing.name, "--amqp-declare=false"];
    let mut refused = starting(&database, &missing.url, &flags);
    refused.exits_with(5).await;
    assert!(refused.log().contains("NOT_FOUND") && refused.log().contains(&missing.name), "{}", refused.log());

    let fanout = Exchange::declare_as(&shared(), ExchangeKind::Fanout).await;
    let mut refused = starting(&database, &fanout.url, &["--exchange", &fanout.name]);
    refused.exits_with(5).await;
    assert!(refused.log().contains("PRECONDITION_FAILED"), "{}", refused.log());
    assert!(refused.log().contains("--amqp-declare=false"), "{}", refused.log());

    // As it is, it is taken when asked for, until it is deleted.
    let mut queue = fanout.queue("").await;
    let mut relay = relay(&database, &fanout, &["--amqp-declare=false"]).await;
    add(&database, 0, 3, 1, 0).await;
    until_there(&mut queue, 3).await;
    fanout.delete().await;
    add(&database, 3, 4, 1, 0).await;
    relay.exits_with(5).await;
    assert!(relay.log().contains("its bindings with it"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_or_vhost_is_exit_5_and_the_password_is_shown_nowhere() {
    let database = database().await;
    for (sink, says) in [
        (shared().replace("guest:guest", "guest:wr0ng-passw0rd"), "ACCESS_REFUSED"),
        (shared().replace("guest:guest", "n0body:wr0ng-passw0rd"), "ACCESS_REFUSED"),
        (shared().replace("%2f", "no-such-vhost"), "NOT_ALLOWED"),
    ] {
        let mut refused = starting(&database, &sink, &[]);
        refused.exits_with(5).await;
        let log = refused.log();
        assert!(log.contains(says) && log.contains("--sink"), "{log}");
        assert!(!log.contains("wr0ng-passw0rd") && !log.contains("guest:"), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_is_verified_by_the_authority_that_was_named() {
    let certificates = variable("OUTBOXD_TEST_CERTS");
    let database = database().await;
    let exchange = Exchange::declare(&shared()).await;
    let mut queue = exchange.queue("#").await;
    let encrypted = Exchange { url: variable("OUTBOXD_TEST_RABBITMQ_TLS_URL"), name: exchange.name.clone() };
    for authority in ["wrong-ca.pem", "server.key"] {
        let file = format!("{certificates}/{authority}");
        let mut refused = starting(&database, &encrypted.url, &["--amqp-ca", &file]);
        refused.exits_with(5).await;
        assert!(refused.log().contains("--amqp-ca"), "{}", refused.log());
    }
    let authority = format!("{certificates}/ca.pem");
    let relay = relay(&database, &encrypted, &["--amqp-ca", &authority]).await;
    add(&database, 0, 3, 1, 0).await;
    until_there(&mut queue, 3).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_our_own_is_shown_to_a_server_that_asks_for_it() {
    let certificates = variable("OUTBOXD_TEST_CERTS");
    let port = crate::support::free_port();
    let settings = [
        format!("listeners.ssl.default = 127.0.0.1:{port}"),
        format!("ssl_options.cacertfile = {certificates}/ca.pem"),
        format!("ssl_options.certfile = {certificates}/server-and-key.pem"),
        format!("ssl_options.keyfile = {certificates}/server-and-key.pem"),
        "ssl_options.verify = verify_peer".to_owned(),
        "ssl_options.fail_if_no_peer_cert = true".to_owned(),
    ];
    let server = PrivateRabbit::start(&settings.each_ref().map(String::as_str)).await;
    let database = database().await;
    let exchange = Exchange::declare(&server.url()).await;
    let mut queue = exchange.queue("#").await;
    let url = format!("amqps://guest:guest@127.0.0.1:{port}");
    let encrypted = Exchange { url, name: exchange.name.clone() };
    let [authority, certificate, key] =
        ["ca.pem", "auth_cert.pem", "auth_cert.key"].map(|file| format!("{certificates}/{file}"));
    let anonymous = starting(&database, &encrypted.url, &["--amqp-ca", &authority]);
    eventually(PATIENCE, "it is not let in without", async || {
        anonymous.log().contains("the connection to RabbitMQ").then_some(())
    })
    .await;
    anonymous.kill();
    let flags = ["--amqp-ca", &authority, "--amqp-cert", &certificate, "--amqp-key", &key];
    let relay = relay(&database, &encrypted, &flags).await;
    add(&database, 0, 3, 1, 0).await;
    until_there(&mut queue, 3).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_tells_of_server_exchange_and_permissions_and_declares_nothing() {
    let server = PrivateRabbit::start(&[]).await;
    let database = database().await;
    let (source, sink) = (database.url(), server.url());
    let looked = async |sink: &str, flags: &[&str]| check(&[&[&source, "--sink", sink], flags].concat()).await;

    let missing = Exchange::missing(&sink);
    let found = looked(&sink, &["--exchange", &missing.name]).await;
    found.would_start();
    found.is_fine("sink", "RabbitMQ 4.");
    found.is_fine("exchange", "a run declares it");
    found.warns("bindings", "no queue is bound");
    let found = looked(&sink, &["--exchange", &missing.name, "--amqp-declare=false"]).await;
    found.fails_only(&["exchange"], 5);

    let exchange = Exchange::declare(&sink).await;
    let found = looked(&sink, &["--exchange", &exchange.name]).await;
    found.would_start();
    found.is_fine("exchange", "durable topic exchange");
    found.is_fine("permission", "may be written to");
    let fanout = Exchange::declare_as(&sink, ExchangeKind::Fanout).await;
    looked(&sink, &["--exchange", &fanout.name]).await.fails_only(&["exchange"], 5);

    server.control(&["add_user", "reader", "s3cret"]).await;
    server.control(&["set_permissions", "reader", "^$", "^$", ".*"]).await;
    let reader = sink.replace("guest:guest", "reader:s3cret");
    let found = looked(&reader, &["--exchange", &exchange.name, "--amqp-declare=false"]).await;
    found.fails_only(&["permission"], 5);
    let mut refused = starting(&database, &reader, &["--exchange", &exchange.name, "--amqp-declare=false"]);
    refused.until_streaming(&database).await;
    add(&database, 0, 1, 1, 0).await;
    refused.exits_with(5).await;
    assert!(refused.log().contains("write permission"), "{}", refused.log());

    let wrong = sink.replace("guest:guest", "guest:wr0ng");
    let found = looked(&wrong, &[]).await;
    found.fails_only(&["sink"], 5);
    assert!(!format!("{found:?}").contains("wr0ng"));
    let nobody = format!("amqp://guest:guest@127.0.0.1:{}", crate::support::free_port());
    looked(&nobody, &[]).await.fails_only(&["sink"], 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_stays_bounded_while_large_messages_flow() {
    let database = database().await;
    let exchange = Exchange::declare(&shared()).await;
    let limit = lapin::types::AMQPValue::LongInt(10);
    let _queue = exchange.queue_with("#", &[("x-max-length", limit)]).await;
    let relay = relay(&database, &exchange, &["--max-in-flight-bytes", "8MiB"]).await;
    for part in 0..20 {
        add(&database, part * 100, part * 100 + 100, 50, 50_000).await;
    }
    let position = database.wal_position().await;
    database.until_confirmed(position, PATIENCE).await;
    let peak = relay.peak_memory();
    relay.stop().await;
    assert!(peak < 200 * MIB, "{} MiB", peak / MIB);
}
