//! What the promises are proved with: databases and topics of their own on the shared servers, private servers to
//! break, the relay as a real process, and the check of what arrived against what was committed.
//!
//! A server that is missing makes a test fail, never pass. Waiting is always for a condition, with a deadline that a
//! busy machine keeps.

pub mod admin;
mod binlog;
mod browser;
mod command;
mod database;
mod delivery;
mod documents;
mod http;
mod kafka;
mod mongodb;
mod mysql;
mod outbox;
mod polled;
mod postgres;
mod proxy;
mod queue;
mod rabbitmq;
mod relay;
mod replica_set;
pub mod shop;
mod tools;
mod topic;

pub use self::mongodb::{MongoDatabase, MongoWriter, mongodb_client, mongodb_url};
pub use binlog::{Numbers, a_moment, add, ends, on_both, texts, until_log, until_reading, values};
pub use browser::Browser;
pub use command::{Checked, Found, check, outboxd};
pub use database::{Database, Server, parse_lsn, show_lsn};
pub use delivery::{Delivered, Expected, Writer};
pub use documents::{Documents, numbered};
pub use http::{Answer, HttpServer, Request, http2_server, tls_acceptor};
pub use kafka::PrivateKafka;
pub use mysql::{MySqlDatabase, MySqlFlavor, PrivateMySql, mysql_session};
pub use outbox::{LogPosition, Outbox, OutboxWriter, PrivateServer, Source};
pub use polled::{Arrived, Form, Polled};
pub use postgres::{PrivatePostgres, StopMode};
pub use proxy::Proxy;
pub use queue::{Exchange, Message, Queue};
pub use rabbitmq::PrivateRabbit;
pub use relay::Relay;
pub use replica_set::PrivateMongo;
pub use tools::script;
pub use topic::{Record, Topic, TopicReader, shared_kafka};

use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;

/// Long enough for anything that is going to happen on a machine that builds at the same time.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; eval \"$(tests/services env)\" first"))
}

/// A name that no other test, and no earlier run, has.
pub fn unique(prefix: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let since_epoch = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("the clock is past 1970");
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}_{:x}_{}_{count}", since_epoch.as_millis() & 0xffff_ffff, std::process::id())
}

/// Asks again and again until the answer is `Some`, and fails when that takes longer than `within`.
pub async fn eventually<T>(within: Duration, what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(begin.elapsed() < within, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A port of the loopback address below the range that outgoing connections take theirs from, so that a server which
/// is restarted finds it free.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let offset = std::process::id().wrapping_mul(61);
    for _ in 0..5000 {
        let port = 20_000 + (offset.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between 20000 and 32000 on 127.0.0.1");
}

/// The end of a log, for the message of a failure.
pub fn tail(log: &Path) -> String {
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

/// Chance that comes out the same every time.
pub struct Dice(u64);

impl Dice {
    pub fn seeded(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`.
    pub fn roll(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}
