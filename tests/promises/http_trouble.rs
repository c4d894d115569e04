//! The HTTP sink and a server that takes no connection, no token, or no rest.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::support::shop::{taken, until_taken};
use crate::support::{Answer, Database, HttpServer, Relay, Server, until_log};

async fn add(database: &Database, n: usize) {
    database
        .execute(&format!("INSERT INTO outbox (partition_key, payload) VALUES ('a', jsonb_build_object('n', {n}))"))
        .await;
}

async fn relay(database: &Database, sink: &str, flags: &[&str]) -> Relay {
    let url = database.url();
    let mut relay = Relay::spawn(&[&["run", &url, "--sink", sink, "--max-retries", "0"], flags].concat());
    relay.until_streaming(database).await;
    relay
}

/// A listener whose queue is full, with those who wait in it: the kernel does not even answer who knocks now.
async fn deaf_listener() -> (TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port is free");
    let listener = socket.listen(1).expect("it listens");
    let address = listener.local_addr().expect("it has an address");
    let mut waiting = Vec::new();
    while let Ok(connected) = tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(address)).await {
        waiting.push(connected.expect("the queue is not full yet"));
    }
    (listener, waiting)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_nobody_answers_is_given_up_after_ten_seconds_and_tried_again_until_one_does() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let (listener, _waiting) = deaf_listener().await;
    let sink = format!("http://{}", listener.local_addr().expect("it has an address"));
    // Only the time-out of the connection can end what is awaited below.
    let mut relay = relay(&database, &sink, &["--http-timeout", "1h"]).await;
    let begin = Instant::now();
    add(&database, 0).await;
    until_log(&mut relay, "to be sent again").await;
    assert!(begin.elapsed() >= Duration::from_secs(9), "given up after {:?}", begin.elapsed());
    assert!(relay.log().contains("no answer in time"), "{}", relay.log());
    let server = HttpServer::start_on(listener, |_| Answer::Status(200));
    until_taken(&server, [0]).await;
    relay.stop().await;
    assert_eq!(taken(&server), [0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_was_changed_is_read_anew_and_delivery_goes_on_without_a_restart() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let secrets = Arc::new(Mutex::new(("Bearer first", "blue")));
    let valid = secrets.clone();
    let server = HttpServer::start(move |request| {
        let (token, tenant) = *valid.lock().expect("nobody panicked");
        Answer::Status(match request.header("authorization") == Some(token) {
            true if request.header("x-tenant") == Some(tenant) => 200,
            true => 403,
            false => 401,
        })
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).to_str().expect("a path").to_owned();
    let (token, tenant) = (file("token"), file("tenant"));
    let write = |path: &str, text: &str| std::fs::write(path, text).expect("the secret is written");
    write(&token, "first\n");
    write(&tenant, "blue\n");
    let (token_flag, tenant_flag) = (format!("file:{token}"), format!("X-Tenant=file:{tenant}"));
    let flags = ["--lanes", "1", "--http-token", &token_flag, "--http-header", &tenant_flag];
    let mut relay = relay(&database, &server.url(), &flags).await;
    add(&database, 0).await;
    until_taken(&server, [0]).await;

    *secrets.lock().expect("nobody panicked") = ("Bearer second", "blue");
    add(&database, 1).await;
    until_log(&mut relay, "answered 401").await;
    write(&token, "second\n");
    until_taken(&server, [1]).await;

    *secrets.lock().expect("nobody panicked") = ("Bearer second", "green");
    add(&database, 2).await;
    until_log(&mut relay, "answered 403").await;
    write(&tenant, "green\n");
    until_taken(&server, [2]).await;
    relay.stop().await;
    assert_eq!(taken(&server), [0, 1, 2], "once each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_says_retry_at_once_is_not_asked_without_rest() {
    let database = Database::with_native_outbox(Server::Newest).await;
    for now in ["0", "Wed, 21 Oct 2015 07:28:00 GMT"] {
        let server = HttpServer::start(move |_| Answer::With(503, "Retry-After", now.to_owned())).await;
        let relay = relay(&database, &server.url(), &["--lanes", "1"]).await;
        add(&database, 0).await;
        let requests = server.until("six attempts", |requests| requests.len() >= 6).await;
        let span = requests[5].at - requests[0].at;
        // 100 ms, and twice as long each time.
        assert!(span >= Duration::from_secs(3), "six attempts in {span:?} with Retry-After: {now}");
        relay.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_refused_and_never_followed() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let elsewhere = HttpServer::start(|_| Answer::Status(200)).await;
    let there = elsewhere.url();
    let server = HttpServer::start(move |_| Answer::With(307, "Location", there.clone())).await;
    let mut relay = relay(&database, &server.url(), &["--http-token", "s3cret"]).await;
    add(&database, 0).await;
    relay.exits_with(6).await;
    assert!(relay.log().contains("answered 307"), "{}", relay.log());
    assert_eq!(elsewhere.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_forges_neither_the_signature_nor_what_the_user_says() {
    let database = Database::with_native_outbox(Server::Newest).await;
    let server = HttpServer::start(|_| Answer::Status(200)).await;
    let flags = ["--http-body", "single", "--http-header", "X-Outboxd-Tenant=blue"];
    let relay = relay(&database, &server.url(), &flags).await;
    let headers = r#"{"signature": "sha256=forged", "tenant": "red", "other": "yes"}"#;
    database
        .execute(&format!("INSERT INTO outbox (partition_key, payload, headers) VALUES ('a', '1', '{headers}')"))
        .await;
    let requests = server.until("the event", |requests| !requests.is_empty()).await;
    relay.stop().await;
    let header = |name: &str| requests[0].header(&format!("x-outboxd-{name}"));
    assert_eq!((header("signature"), header("tenant"), header("other")), (None, Some("blue"), Some("yes")));
}
