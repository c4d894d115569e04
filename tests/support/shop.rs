//! A pipeline `shop` with several publishers, most of them HTTP servers that tests have answer as they like. Every event
//! has a number, so that what a publisher got is a list of numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use super::{Answer, Database, HttpServer, PATIENCE, Relay, Request, Server, eventually, outboxd};

/// A table with everything that events are selected by.
pub async fn outbox() -> Database {
    outbox_at(&Server::Newest.url()).await
}

pub async fn outbox_at(server_url: &str) -> Database {
    let database = Database::with_outbox_at(server_url).await;
    database
        .execute(
            "ALTER TABLE outbox ADD event_type text, ADD topic text, ADD headers jsonb, ADD labels text[], ADD version int;
             CREATE TABLE audit (LIKE outbox INCLUDING ALL)",
        )
        .await;
    database
}

/// Rows `from..to`, alternating between two keys, of the type `order.placed`.
pub async fn add(database: &Database, from: usize, to: usize) {
    let insert = format!(
        "INSERT INTO outbox (partition_key, event_type, payload)
         SELECT 'key-' || n % 2, 'order.placed', jsonb_build_object('n', n) FROM generate_series({from}, {to} - 1) n"
    );
    database.execute(&insert).await;
}

pub struct Shop {
    file: tempfile::NamedTempFile,
}

impl Shop {
    /// A pipeline `shop` with these further lines of configuration.
    pub fn new(database: &Database, lines: &str) -> Self {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = format!("[pipeline.shop]\nsource = {:?}\nslot = {:?}\n{lines}\n", database.url(), database.slot());
        std::fs::write(file.path(), text).expect("the configuration is written");
        Shop { file }
    }

    pub fn path(&self) -> &str {
        self.file.path().to_str().expect("a path")
    }

    pub fn spawn(&self) -> Relay {
        Relay::spawn(&["run", "--config", self.path()])
    }

    pub async fn run(&self, database: &Database) -> Relay {
        let mut relay = self.spawn();
        relay.until_streaming(database).await;
        relay.until_state("streaming").await;
        relay
    }
}

pub fn http(name: &str, server: &HttpServer, more: &str) -> String {
    format!(
        "[pipeline.shop.publisher.{name}]\nsink = {:?}\nlanes = 1\nretry-backoff = \"50ms\"\n{more}\n",
        server.url()
    )
}

pub async fn taking() -> HttpServer {
    HttpServer::start(|_| Answer::Status(200)).await
}

/// A server that asks for patience until it is opened.
pub async fn closed() -> (HttpServer, Arc<AtomicBool>) {
    let open = Arc::new(AtomicBool::new(false));
    let says = open.clone();
    let server = HttpServer::start(move |_| Answer::Status(if says.load(Ordering::Relaxed) { 200 } else { 503 })).await;
    (server, open)
}

/// The numbers in the requests that were answered well.
pub fn taken(server: &HttpServer) -> Vec<u64> {
    let numbers = |request: &Request| {
        let payloads = request.json();
        payloads
            .as_array()
            .expect("an array")
            .iter()
            .map(|one| one["n"].as_u64().expect("a number"))
            .collect::<Vec<_>>()
    };
    server.taken().iter().flat_map(numbers).collect()
}

pub async fn until_taken(server: &HttpServer, wanted: impl IntoIterator<Item = u64>) {
    let wanted: Vec<u64> = wanted.into_iter().collect();
    eventually(PATIENCE, &format!("{} events are taken", wanted.len()), async || {
        let taken = taken(server);
        wanted.iter().all(|n| taken.contains(n)).then_some(())
    })
    .await;
}

pub async fn publisher(relay: &Relay, name: &str) -> Value {
    let status = relay.status().await;
    let publishers = status["publishers"].as_array().expect("publishers").clone();
    publishers.into_iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no {name} in {status}"))
}

pub async fn until_publisher(relay: &Relay, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    eventually(PATIENCE, &format!("{name} {what}"), async || Some(publisher(relay, name).await).filter(|one| is(one)))
        .await
}

pub async fn order(relay: &Relay, verb: &str, name: &str) {
    let ended = outboxd(&[verb, name, "--admin", &relay.admin().await]).await;
    assert_eq!(ended.code, 0, "{verb} {name}: {}", ended.stderr);
}

/// Log that is no outbox event.
pub async fn write_log(database: &Database, mebibytes: usize) {
    let noise = format!(
        "SELECT pg_logical_emit_message(true, 'noise', repeat('x', 1048576)) FROM generate_series(1, {mebibytes})"
    );
    database.execute(&noise).await;
}
