//! The HTTP sink against a server that takes events, and one that fails in every way a server can.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{
    Answer, Database, HttpServer, PATIENCE, Relay, Request, Server, Topic, check, eventually, http2_server, outboxd,
    variable,
};

/// Rows `from..to` of `keys` keys, committed together; the payload is `{"n": …, "k": …}`.
async fn add(database: &Database, from: usize, to: usize, keys: usize) {
    let insert = format!(
        "INSERT INTO outbox (partition_key, event_type, payload)
         SELECT 'key-' || n % {keys}, 'Counted', jsonb_build_object('n', n, 'k', n % {keys})
         FROM generate_series({from}, {to} - 1) n"
    );
    database.execute(&insert).await;
}

async fn relay(database: &Database, server: &HttpServer, flags: &[&str]) -> Relay {
    let (url, sink) = (database.url(), server.url());
    let mut arguments = vec!["run", &url, "--sink", &sink];
    arguments.extend(flags);
    let mut relay = Relay::spawn(&arguments);
    relay.until_streaming(database).await;
    relay
}

/// The numbers of a request's payloads.
fn numbers(request: &Request) -> Vec<u64> {
    let payloads = request.json();
    payloads.as_array().expect("an array").iter().map(|payload| payload["n"].as_u64().expect("a number")).collect()
}

fn taken(server: &HttpServer) -> Vec<u64> {
    server.taken().iter().flat_map(numbers).collect()
}

async fn until_taken(server: &HttpServer, count: usize) {
    let what = format!("{count} events are taken");
    eventually(PATIENCE, &what, async || {
        let mut distinct = taken(server);
        distinct.sort_unstable();
        distinct.dedup();
        (distinct.len() >= count).then_some(())
    })
    .await;
}

/// First occurrences of each key are in order.
fn assert_in_order(numbers: &[u64], keys: u64) {
    let mut next: HashMap<u64, u64> = HashMap::new();
    for n in numbers {
        let expected = next.entry(n % keys).or_insert(n % keys);
        if n >= expected {
            assert_eq!(n, expected, "of key {}", n % keys);
            *expected += keys;
        }
    }
}

#[tokio::test]
async fn check_tells_what_a_place_says_before_the_first_event() {
    let database = Database::with_outbox(Server::Newest).await;
    let source = database.url();
    let cases = [
        (200, "ok", "answers (200"),
        (405, "ok", "answers (405"),
        (401, "fail", "does not take our credentials"),
        (403, "warn", "perhaps"),
        (503, "warn", "not well"),
        (308, "warn", "has moved"),
    ];
    for (status, verdict, words) in cases {
        let server = HttpServer::start(move |_| Answer::Status(status)).await;
        let checked = check(&[&source, "--sink", &server.url(), "--http-path", "/in"]).await;
        match verdict {
            "ok" => checked.is_fine("sink", words),
            "warn" => checked.warns("sink", words),
            _ => checked.fails("sink", words),
        };
        assert_eq!(checked.code, if verdict == "fail" { 5 } else { 0 }, "{checked:?}");
        checked.is_fine("tls", "not encrypted (http), on this machine");
    }
    let checked = check(&[&source, "--sink", "http://127.0.0.1:1"]).await;
    checked.fails_only(&["sink"], 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_arrive_in_batches_with_token_headers_signature_and_idempotency_key() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let server = HttpServer::start(|_| Answer::Status(202)).await;
    let flags = ["--http-token", "s3cret", "--http-header", "X-Tenant=blue", "--http-sign", "signing key"];
    let relay =
        relay(&database, &server, &[&flags[..], &["--http-path", "/in/{event_type}", "--lanes", "1"]].concat()).await;
    add(&database, 0, 250, 7).await;
    until_taken(&server, 250).await;
    relay.stop().await;

    let requests = server.requests();
    assert_eq!(taken(&server), (0..250).collect::<Vec<_>>(), "once each, in order");
    assert!(requests.iter().all(|request| numbers(request).len() <= 100));
    assert!(requests.iter().any(|request| numbers(request).len() == 100), "batches fill up");
    let first = &requests[0];
    assert_eq!(first.path, "/in/Counted");
    assert_eq!(first.header("authorization"), Some("Bearer s3cret"));
    assert_eq!(first.header("x-tenant"), Some("blue"));
    assert_eq!(first.header("content-type"), Some("application/json"));
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, b"signing key");
    let signature: String =
        ring::hmac::sign(&key, &first.body).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(first.header("x-outboxd-signature"), Some(format!("sha256={signature}").as_str()));
    let mut keys: Vec<_> = requests.iter().map(|request| request.header("idempotency-key").expect("a key")).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), requests.len(), "each batch has a key of its own");
    assert!(requests.iter().all(|request| request.connection == first.connection), "one connection is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_arrays_events_lines_or_single_payloads() {
    for (form, content_type) in
        [("events", "application/json"), ("lines", "application/x-ndjson"), ("single", "application/json")]
    {
        let database = Database::with_native_outbox(Server::Newest).await;
        let server = HttpServer::start(|_| Answer::Status(200)).await;
        let relay = relay(&database, &server, &["--http-body", form, "--lanes", "1"]).await;
        add(&database, 0, 3, 1).await;
        let rows = |request: &Request| match form {
            "events" => request.json().as_array().map_or(0, Vec::len),
            "lines" => String::from_utf8_lossy(&request.body).lines().count(),
            _ => 1,
        };
        let requests = server.until("three events", |requests| requests.iter().map(rows).sum::<usize>() == 3).await;
        relay.stop().await;
        let first = &requests[0];
        assert_eq!(first.header("content-type"), Some(content_type), "{form}");
        match form {
            "events" => {
                let event = &first.json()[0];
                assert_eq!((&event["key"], &event["value"]), (&json!("key-0"), &json!({"n": 0, "k": 0})));
                assert_eq!(event["headers"]["event_type"], "Counted");
            }
            "lines" => {
                let text = String::from_utf8_lossy(&first.body).into_owned();
                let line: serde_json::Value = serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
                assert_eq!(line, json!({"n": 0, "k": 0}));
            }
            _ => {
                assert_eq!(requests.len(), 3, "a request for each event");
                assert_eq!(first.json(), json!({"n": 0, "k": 0}));
                assert_eq!(first.header("x-outboxd-event_type"), Some("Counted"));
                let id = first.header("x-outboxd-id").expect("the id is a header");
                assert_eq!(first.header("idempotency-key"), Some(id));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lanes_send_at_once_and_keep_the_order_of_each_key() {
    let database = Database::with_native_outbox(Server::Newest).await;
    // Late answers, so that requests overlap; some fail for a moment.
    let count = Arc::new(AtomicUsize::new(0));
    let server = HttpServer::start(move |_| match count.fetch_add(1, Ordering::Relaxed) % 5 {
        3 => Answer::With(503, "Retry-After", "0".to_owned()),
        4 => Answer::Close,
        _ => Answer::Status(200),
    })
    .await;
    let relay = relay(&database, &server, &["--http-batch", "5", "--lanes", "4"]).await;
    add(&database, 0, 600, 13).await;
    until_taken(&server, 600).await;
    relay.stop().await;
    assert_in_order(&taken(&server), 13);
    let connections: std::collections::HashSet<_> =
        server.requests().iter().map(|request| request.connection).collect();
    assert!(connections.len() >= 4, "four lanes have a connection each: {connections:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_waits_holds_back_its_own_lane_and_no_other() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let open = Arc::new(AtomicBool::new(false));
    let says = open.clone();
    let server = HttpServer::start(move |request| {
        let waits = numbers(request).iter().any(|n| n % 13 == 0) && !says.load(Ordering::Relaxed);
        Answer::Status(if waits { 503 } else { 200 })
    })
    .await;
    let relay = relay(&database, &server, &["--http-batch", "5", "--lanes", "4"]).await;
    add(&database, 0, 260, 13).await;
    eventually(PATIENCE, "all of some keys is taken", async || {
        let taken = taken(&server);
        let whole = (1..13).filter(|key| taken.iter().filter(|n| *n % 13 == *key).count() == 20).count();
        (whole >= 3).then_some(())
    })
    .await;
    assert!(taken(&server).len() < 260);
    open.store(true, Ordering::Relaxed);
    until_taken(&server, 260).await;
    relay.stop().await;
    assert_in_order(&taken(&server), 13);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_culprit_of_a_refused_batch_is_parked_after_its_retries() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let dead = Topic::create(1).await;
    let server = HttpServer::start(|request| match numbers(request).contains(&42) {
        true => Answer::Status(422),
        false => Answer::Status(200),
    })
    .await;
    let place = format!("topic:{}", dead.name);
    let flags = ["--brokers", &dead.brokers, "--dead-letter", &place, "--lanes", "1"];
    let relay =
        relay(&database, &server, &[&flags[..], &["--max-retries", "2", "--retry-backoff", "50ms"]].concat()).await;
    add(&database, 0, 100, 5).await;
    let letters = dead.reader().take(1).await;
    until_taken(&server, 99).await;
    add(&database, 100, 101, 5).await;
    until_taken(&server, 100).await;
    assert_eq!(relay.status().await["dead_letters"], 1);
    relay.stop().await;

    let expected: Vec<u64> = (0..101).filter(|n| *n != 42).collect();
    assert_eq!(taken(&server), expected, "the others once each, in order");
    let alone = server.requests().iter().filter(|request| numbers(request) == [42]).count();
    assert_eq!(alone, 3, "once, and two retries");
    let letter = &letters[0];
    assert_eq!(letter.key.as_deref(), Some("key-2"));
    assert!(letter.header("outboxd.reason").is_some_and(|why| why.contains("422")), "{letter:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_place_a_refused_event_is_exit_6_and_is_not_passed() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let mended = Arc::new(AtomicBool::new(false));
    let says = mended.clone();
    let server =
        HttpServer::start(move |request| match numbers(request).contains(&7) && !says.load(Ordering::Relaxed) {
            true => Answer::Status(400),
            false => Answer::Status(200),
        })
        .await;
    let flags = ["--max-retries", "0", "--lanes", "1"];
    let mut failing = relay(&database, &server, &flags).await;
    add(&database, 0, 20, 1).await;
    failing.exits_with(6).await;
    assert!(failing.log().contains("400"), "{}", failing.log());

    mended.store(true, Ordering::Relaxed);
    let relay = relay(&database, &server, &flags).await;
    until_taken(&server, 20).await;
    relay.stop().await;
    assert_in_order(&taken(&server), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_after_is_obeyed_and_never_counts_as_an_attempt() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let count = Arc::new(AtomicUsize::new(0));
    let server = HttpServer::start(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        0 => Answer::With(429, "Retry-After", "2".to_owned()),
        1 => Answer::With(503, "Retry-After", "1".to_owned()),
        2 => Answer::Status(503),
        _ => Answer::Status(200),
    })
    .await;
    // One attempt that counted would end the pipeline.
    let relay = relay(&database, &server, &["--max-retries", "0"]).await;
    add(&database, 0, 1, 1).await;
    until_taken(&server, 1).await;
    relay.stop().await;
    let at: Vec<Instant> = server.requests().iter().map(|request| request.at).collect();
    assert!(at[1] - at[0] >= Duration::from_secs(2), "{:?}", at[1] - at[0]);
    assert!(at[2] - at[1] >= Duration::from_secs(1), "{:?}", at[2] - at[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hangs_closes_or_answers_in_halves_loses_nothing() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let count = Arc::new(AtomicUsize::new(0));
    let server = HttpServer::start(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        1 => Answer::Silence,
        2 => Answer::Close,
        3 => Answer::Half,
        _ => Answer::Status(200),
    })
    .await;
    let relay = relay(&database, &server, &["--http-timeout", "1s", "--max-retries", "0", "--lanes", "1"]).await;
    add(&database, 0, 5, 1).await;
    until_taken(&server, 5).await;
    add(&database, 5, 10, 1).await;
    until_taken(&server, 10).await;
    relay.stop().await;
    assert_in_order(&taken(&server), 1);
    let requests = server.requests();
    let keys: Vec<_> = requests[1..5].iter().map(|request| request.header("idempotency-key")).collect();
    assert!(keys.iter().all(|key| *key == keys[0]), "the same batch has the same key: {keys:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_is_waited_for_and_holds_the_position() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let (url, sink) = (database.url(), format!("http://{address}"));
    let mut waiting = Relay::spawn(&["run", &url, "--sink", &sink]);
    waiting.until_streaming(&database).await;
    let before = database.wal_position().await;
    add(&database, 0, 10, 1).await;
    eventually(PATIENCE, "the relay tells of it", async || waiting.log().contains("to be sent again").then_some(()))
        .await;
    assert!(database.confirmed().await.is_some_and(|confirmed| confirmed <= before + 1_000_000));
    waiting.kill();

    let server = HttpServer::start(|_| Answer::Status(200)).await;
    let relay = relay(&database, &server, &[]).await;
    until_taken(&server, 10).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_exit_5_and_is_shown_nowhere() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let server = HttpServer::start(|request| match request.header("authorization") {
        Some("Bearer right") => Answer::Status(200),
        _ => Answer::Status(401),
    })
    .await;
    let mut refused = relay(&database, &server, &["--http-token", "wr0ng-t0ken"]).await;
    add(&database, 0, 1, 1).await;
    refused.exits_with(5).await;
    assert!(refused.log().contains("--http-token") && !refused.log().contains("wr0ng-t0ken"), "{}", refused.log());

    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("token");
    std::fs::write(&file, "right\n").expect("the token is written");
    let relay = relay(&database, &server, &["--http-token", &format!("file:{}", file.display())]).await;
    until_taken(&server, 1).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_is_verified_by_the_authority_that_was_named() {
    let certificates = variable("OUTBOXD_TEST_CERTS");
    let database = Database::with_native_outbox(Server::Newest).await;
    let server = HttpServer::start_tls(crate::support::tls_acceptor(&certificates), |_| Answer::Status(200)).await;
    let trusting = format!("{certificates}/ca.pem");
    // Without it nobody vouches for the server: nothing is sent.
    let distrusting = relay(&database, &server, &[]).await;
    add(&database, 0, 3, 1).await;
    eventually(PATIENCE, "the certificate is refused", async || {
        distrusting.log().to_lowercase().contains("certificate").then_some(())
    })
    .await;
    distrusting.kill();
    assert_eq!(server.requests().len(), 0);
    let relay = relay(&database, &server, &["--http-ca", &trusting]).await;
    until_taken(&server, 3).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_2_is_spoken_where_the_server_does_with_all_lanes_in_one_connection() {
    let certificates = variable("OUTBOXD_TEST_CERTS");
    let database = Database::with_native_outbox(Server::Newest).await;
    let (sink, mut requests) = http2_server(&certificates).await;
    let (url, authority) = (database.url(), format!("{certificates}/ca.pem"));
    let flags = ["--http-ca", &authority, "--http-path", "/in", "--http-batch", "10"];
    let mut relay = Relay::spawn(&[&["run", &url, "--sink", &sink][..], &flags].concat());
    relay.until_streaming(&database).await;
    let mut seen = Vec::new();
    // The first one makes the connection that the others share.
    add(&database, 0, 1, 20).await;
    while seen.len() < 200 {
        let next = tokio::time::timeout(PATIENCE, requests.recv()).await.expect("in time");
        let (connection, path, body) = next.expect("the server is there");
        assert_eq!((connection, path.as_str()), (0, "/in"));
        if seen.is_empty() {
            add(&database, 1, 200, 20).await;
        }
        let payloads: Vec<serde_json::Value> = serde_json::from_slice(&body).expect("an array");
        seen.extend(payloads.iter().map(|payload| payload["n"].as_u64().expect("a number")));
    }
    relay.stop().await;
    assert_in_order(&seen, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_layout_message_group_has_a_path_for_each_type_and_a_lane_for_each_group() {
    let database = Database::create(Server::Newest).await;
    let url = database.url();
    let made = outboxd(&["init", &url, "--layout", "message-group"]).await;
    assert_eq!(made.code, 0, "{}", made.stderr);
    let server = HttpServer::start(|_| Answer::Status(200)).await;
    let relay = relay(&database, &server, &["--layout", "message-group", "--lanes", "3"]).await;
    for (table, kind) in [("outbox_events", "EVENT"), ("outbox_dispatch_jobs", "DISPATCH_JOB")] {
        let insert = format!(
            "INSERT INTO {table} (id, type, message_group, payload)
             SELECT lpad(n::text, 13, '0'), '{kind}', nullif('group-' || n % 4, 'group-3'),
                    jsonb_build_object('n', n, 'kind', '{kind}')
             FROM generate_series(0, 39) n"
        );
        database.execute(&insert).await;
    }
    let events = |requests: &[Request], path: &str| {
        requests.iter().filter(|request| request.path == path).flat_map(numbers).collect::<Vec<_>>()
    };
    let paths = ["/api/events/batch", "/api/dispatch/jobs/batch"];
    let all = |requests: &[Request]| paths.iter().map(|path| events(requests, path).len()).sum::<usize>() == 80;
    let requests = server.until("both tables are delivered", all).await;
    relay.stop().await;
    for (path, kind) in paths.into_iter().zip(["EVENT", "DISPATCH_JOB"]) {
        assert_in_order(&events(&requests, path), 4);
        let of_path = requests.iter().filter(|request| request.path == path);
        let mut kinds = of_path.flat_map(|request| request.json().as_array().cloned().unwrap_or_default());
        assert!(kinds.all(|payload| payload["kind"] == kind), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_cannot_choose_a_path_outside_of_the_sinks_url() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let dead = Topic::create(1).await;
    let server = HttpServer::start(|_| Answer::Status(200)).await;
    let place = format!("topic:{}", dead.name);
    let flags = ["--brokers", &dead.brokers, "--dead-letter", &place, "--max-retries", "0"];
    let relay = relay(&database, &server, &[&flags[..], &["--http-path", "/in/{event_type}"]].concat()).await;
    let insert = "INSERT INTO outbox (partition_key, event_type, payload) VALUES
        ('a', '../../admin', '{\"n\": 0}'), ('a', 'fine', '{\"n\": 1}')";
    database.execute(insert).await;
    let letters = dead.reader().take(1).await;
    until_taken(&server, 1).await;
    relay.stop().await;
    assert!(letters[0].header("outboxd.reason").is_some_and(|why| why.contains("leads out")), "{letters:?}");
    assert_eq!(server.requests().iter().map(|request| request.path.as_str()).collect::<Vec<_>>(), ["/in/fine"]);
}
