//! Whatever clients do to the admin address, it stays bounded, and the pipeline does not notice.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support::admin::{ask, connect, read};
use crate::support::{Database, Expected, MIB, PATIENCE, Relay, Server, Topic, Writer};

fn open_files(relay: &Relay) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", relay.pid())).map_or(0, Iterator::count)
}

/// Reads until the other side closes; how long that took.
fn until_closed(mut stream: TcpStream) -> Duration {
    let begin = Instant::now();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    begin.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn large_slow_and_many_requests_are_bounded_and_disturb_nobody() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let writer = Writer::connect(&database).await;
    let address = relay.admin().await;
    assert_eq!(ask(&address, "GET", "/livez", &[]).code, 200);

    // A body larger than anybody needs is refused by what it says of itself, before it comes.
    let refused = ask(&address, "POST", "/pipelines/orders/pause", &[("Content-Length", "1000000000")]);
    assert_eq!((refused.code, refused.json()["error_code"].as_u64()), (413, Some(413)));
    // One that does not say how large it is, is not read.
    let mut endless = connect(&address);
    let head = "POST /connectors/nobody/restart HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    endless.write_all(head.as_bytes()).expect("a head is sent");
    endless.write_all(b"10000\r\n").expect("a piece is begun");
    let mut sent = 0;
    while sent < 64 * MIB && endless.write_all(&[b'x'; 65536]).is_ok() {
        sent += 65536;
    }
    assert!(sent < 64 * MIB, "somebody reads {sent} bytes of a body that nobody needs");
    // A head larger than anybody needs.
    let mut large = connect(&address);
    let _ = large.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: ");
    let mut written = 0;
    while written < 4 * MIB && large.write_all(&[b'x'; 4096]).is_ok() {
        written += 4096;
    }
    assert!(written < 4 * MIB, "somebody reads a head of {written} bytes");

    // Heads that never end, and connections that never begin, lose their place; others get it.
    let before = open_files(&relay);
    let mut slow: Vec<TcpStream> = Vec::new();
    for number in 0..400 {
        let mut stream = connect(&address);
        if number % 2 == 0 {
            stream.write_all(b"GET /livez HTTP/1.1\r\nHost:").expect("half a head is sent");
        }
        slow.push(stream);
    }
    writer.commit(&["a", "b", "a"]).await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    let most = open_files(&relay);
    assert!(most <= before + 150, "{most} files are open, {before} before 400 connections came");
    let closing = slow.pop().expect("a connection");
    // Their turn comes when those before them have lost theirs.
    let answered = tokio::task::spawn_blocking({
        let address = address.clone();
        move || (ask(&address, "GET", "/livez", &[]).code, until_closed(closing))
    });
    let (code, closed_after) = answered.await.expect("it is answered");
    assert!(code == 200 && closed_after < Duration::from_secs(95), "{code} {closed_after:?}");
    drop(slow);
    assert!(relay.peak_memory() < 120 * MIB, "{} bytes were held", relay.peak_memory());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_loses_its_place() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let address = relay.admin().await;
    let before = open_files(&relay);
    // Far more answers than the buffers of two sockets hold.
    let stream = connect(&address);
    let writing = stream.try_clone().expect("a second handle");
    let writer = std::thread::spawn(move || {
        let mut writing = writing;
        let request = "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100);
        while writing.write_all(request.as_bytes()).is_ok() {}
    });
    let gone = tokio::task::spawn_blocking(move || writer.join());
    let gone = tokio::time::timeout(PATIENCE, gone).await;
    assert!(gone.is_ok(), "the connection of a client that reads nothing is kept");
    drop(stream);
    crate::support::eventually(PATIENCE, "its file is closed", async || {
        (open_files(&relay) <= before + 1).then_some(())
    })
    .await;
    assert!(relay.peak_memory() < 120 * MIB, "{} bytes were held", relay.peak_memory());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_not_kept_not_framed_and_not_guessed_at() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--name", "orders"]).await;
    let address = relay.admin().await;
    let html = [("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
    for (path, headers) in [("/", &html[..]), ("/", &[]), ("/page.js", &[]), ("/status", &[]), ("/nowhere", &[])] {
        let answered = ask(&address, "GET", path, headers);
        for (name, value) in [
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("x-frame-options", "DENY"),
        ] {
            assert_eq!(answered.header(name), Some(value), "{path}: {}", answered.head);
        }
    }
    let page = ask(&address, "GET", "/", &html);
    let policy = page.header("content-security-policy").expect("a policy");
    for rule in
        ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"]
    {
        assert!(policy.contains(rule), "{policy}");
    }
    assert!(!policy.contains("unsafe") && page.body.contains("<title>outboxd</title>"), "{policy}");
    // Who does not ask for HTML is one of Connect's.
    for accept in [&[][..], &[("Accept", "*/*")], &[("Accept", "application/json")]] {
        assert_eq!(ask(&address, "GET", "/", accept).json()["version"], env!("CARGO_PKG_VERSION"));
    }
    let unknown = ask(&address, "GET", "/nowhere", &[]);
    assert_eq!((unknown.code, unknown.json()["error_code"].as_u64()), (404, Some(404)));
    assert_eq!(ask(&address, "DELETE", "/status", &[]).code, 405);
    assert_eq!(ask(&address, "GET", "/connectors/orders/", &[]).json()["name"], "orders", "with a slash too");
    let mut old = connect(&address);
    old.write_all(b"GET /livez HTTP/1.0\r\n\r\n").expect("a request is sent");
    assert_eq!(read(&mut old).code, 200);
    relay.stop().await;
}
