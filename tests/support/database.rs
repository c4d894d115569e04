//! A database of its own on one of the shared servers, or on a private one.

use std::time::Duration;

use tokio_postgres::{Client, NoTls};

use super::{eventually, unique, variable};

#[derive(Clone, Copy, Debug)]
pub enum Server {
    Newest,
    Oldest,
}

impl Server {
    pub fn url(self) -> String {
        match self {
            Server::Newest => variable("OUTBOXD_TEST_POSTGRES_URL"),
            Server::Oldest => variable("OUTBOXD_TEST_POSTGRES_OLD_URL"),
        }
    }
}

/// Dropped together with its slots.
pub struct Database {
    name: String,
    server_url: String,
    /// A connection for the test itself.
    pub sql: Client,
}

impl Database {
    pub async fn create(server: Server) -> Self {
        Self::create_at(&server.url()).await
    }

    /// `server_url` names any database of the server.
    pub async fn create_at(server_url: &str) -> Self {
        let name = unique("promise");
        connect(server_url)
            .await
            .batch_execute(&format!("CREATE DATABASE {name}"))
            .await
            .expect("a database is created");
        let sql = connect(&in_database(server_url, &name)).await;
        Database { name, server_url: server_url.to_owned(), sql }
    }

    /// With a table of the native layout, and the counters that [`super::Writer`] takes the order of commits from.
    pub async fn with_outbox(server: Server) -> Self {
        Self::with_outbox_at(&server.url()).await
    }

    pub async fn with_outbox_at(server_url: &str) -> Self {
        let database = Self::create_at(server_url).await;
        database
            .execute(
                "CREATE TABLE outbox (
                     id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
                     partition_key text,
                     payload jsonb,
                     seq bigint
                 );
                 CREATE TABLE counters (key text PRIMARY KEY, seq bigint NOT NULL) WITH (fillfactor = 20)",
            )
            .await;
        database
    }

    /// With the columns that a table of the layout `native` may have.
    pub async fn with_native_outbox(server: Server) -> Self {
        let database = Self::with_outbox(server).await;
        database.execute("ALTER TABLE outbox ADD event_type text, ADD topic text, ADD headers jsonb").await;
        database
    }

    pub fn url(&self) -> String {
        in_database(&self.server_url, &self.name)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The slot that a relay makes unless told another name.
    pub fn slot(&self) -> String {
        format!("outboxd_{}", self.name)
    }

    pub async fn connect(&self) -> Client {
        connect(&self.url()).await
    }

    /// Opens the test's own connection again, after the server was away.
    pub async fn reconnect(&mut self) {
        self.sql = connect(&self.url()).await;
    }

    /// Runs statements, in one transaction unless they say otherwise.
    pub async fn execute(&self, statements: &str) {
        self.sql.batch_execute(statements).await.unwrap_or_else(|error| panic!("{statements}: {error:?}"));
    }

    /// The first column of the first row, as text.
    pub async fn text(&self, query: &str) -> Option<String> {
        let messages = self.sql.simple_query(query).await.unwrap_or_else(|error| panic!("{query}: {error:?}"));
        messages.into_iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => Some(row.get(0).map(str::to_owned)),
            _ => None,
        })?
    }

    pub async fn number(&self, query: &str) -> i64 {
        let text = self.text(query).await.unwrap_or_else(|| panic!("{query}: no row"));
        text.parse().unwrap_or_else(|_| panic!("{query}: {text} is not a number"))
    }

    pub async fn lsn(&self, query: &str) -> Option<u64> {
        self.text(query).await.map(|text| parse_lsn(&text))
    }

    /// The end of the log as it is now.
    pub async fn wal_position(&self) -> u64 {
        self.lsn("SELECT pg_current_wal_insert_lsn()").await.expect("the log has an end")
    }

    /// What the server knows to be delivered.
    pub async fn confirmed(&self) -> Option<u64> {
        let slot = self.slot();
        self.lsn(&format!("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'")).await
    }

    pub async fn slots(&self) -> i64 {
        self.number("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()").await
    }

    /// The process that reads for the relay.
    pub async fn walsender(&self) -> Option<i64> {
        let slot = self.slot();
        let pid = self.text(&format!("SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'")).await?;
        Some(pid.parse().expect("a process id"))
    }

    pub async fn until_confirmed(&self, position: u64, within: Duration) {
        let what = format!("the slot of {} is confirmed up to {}", self.name, show_lsn(position));
        eventually(within, &what, async || self.confirmed().await.filter(|confirmed| *confirmed >= position)).await;
    }

    /// Waits until the relay reads from the slot; what is committed before may be missed on a first start.
    pub async fn until_streaming(&self) -> i64 {
        eventually(super::PATIENCE, "a relay reads from the slot", async || {
            let slot = self.slot();
            let streaming = format!(
                "SELECT s.active_pid FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid
                 WHERE s.slot_name = '{slot}' AND r.state IN ('catchup', 'streaming')"
            );
            self.text(&streaming).await.map(|pid| pid.parse().expect("a process id"))
        })
        .await
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (url, name) = (self.server_url.clone(), self.name.clone());
        // A private server may be gone already; on a shared one nothing may be left.
        let dropping = async move {
            let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
            tokio::spawn(connection);
            let slots = "FROM pg_replication_slots WHERE database = $1";
            for _ in 0..50 {
                let held = format!("SELECT pg_terminate_backend(active_pid) {slots} AND active_pid IS NOT NULL");
                client.execute(&held, &[&name]).await?;
                let dropped =
                    client.execute(&format!("SELECT pg_drop_replication_slot(slot_name) {slots}"), &[&name]).await;
                if dropped.is_ok() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            client.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await
        };
        let _ = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            if let Ok(runtime) = runtime {
                let _ = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), dropping).await });
            }
        })
        .join();
    }
}

pub async fn connect(url: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.unwrap_or_else(|error| panic!("{url}: {error:?}"));
    tokio::spawn(connection);
    client
}

fn in_database(server_url: &str, name: &str) -> String {
    let (server, _) = server_url.rsplit_once('/').expect("the address names a database");
    format!("{server}/{name}")
}

pub fn parse_lsn(text: &str) -> u64 {
    let (high, low) = text.split_once('/').unwrap_or_else(|| panic!("{text} is not a position"));
    let part = |hex: &str| u64::from_str_radix(hex, 16).unwrap_or_else(|_| panic!("{text} is not a position"));
    part(high) << 32 | part(low)
}

pub fn show_lsn(position: u64) -> String {
    format!("{:X}/{:X}", position >> 32, position & 0xffff_ffff)
}
