//! A real PostgreSQL of the demo's own: made in the scratch folder, reachable on the loopback address with a password
//! that only the demo knows, gone with it.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio_postgres::Statement;

use super::ledger::Event;
use super::programs::Programs;
use super::report::Stage;
use super::scratch::{Account, Scratch, end, free_port, last_lines, log_file, tie, token};
use super::shop::Standing;
use super::workload::{Outcome, failed};
use crate::cli::unexpected;
use crate::failure::Halt;
use crate::position::Lsn;
use crate::source::postgres::conninfo::ConnInfo;
use crate::source::postgres::sql::{self, SqlSession};
use crate::source::postgres::{setup, slot};

const DATABASE: &str = "shop";
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// The longest path of a Unix socket, less the file's own name.
const LONGEST_SOCKET_FOLDER: usize = 80;

/// The shop's tables, beside which the outbox stands. The counter of a customer's events is what their order is later
/// judged by.
const TABLES: &str = "
    CREATE TABLE customers (name text PRIMARY KEY, events bigint NOT NULL DEFAULT 0);
    CREATE TABLE orders (
        id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        customer  text NOT NULL REFERENCES customers,
        item      text NOT NULL,
        amount    integer NOT NULL,
        placed_at timestamptz NOT NULL DEFAULT now()
    );";

pub struct Postgres {
    server: Child,
    port: u16,
    password: String,
    version: String,
}

impl Postgres {
    /// Makes a database cluster and starts it. To be called on the main thread: see [`tie`].
    pub async fn start(
        programs: &Programs,
        account: &Account,
        scratch: &Scratch,
        stage: &Stage,
    ) -> Result<Postgres, Halt> {
        let password = token(12)?;
        let data = scratch.path().join("data");
        let log = scratch.path().join("postgres.log");
        let making = initdb(programs, account, scratch.path(), &data, &password);
        stage.during("Making a database cluster in a temporary folder", making).await?;

        let port = free_port()?;
        let mut command = account.command(programs.folder.join("postgres"));
        command.arg("-D").arg(&data).current_dir(scratch.path());
        for setting in settings(port, scratch.path()) {
            command.args(["-c", &setting]);
        }
        let (out, err) = log_file(&log)?;
        let server = tie(&mut command, Signal::SIGQUIT).stdout(out).stderr(err).spawn();
        let server = server.map_err(|error| unexpected(format!("cannot start PostgreSQL: {error}")))?;
        let mut postgres = Postgres { server, port, password, version: programs.version() };
        stage.during(&format!("Starting PostgreSQL {}", programs.version()), postgres.accepts(&log)).await?;
        let session = postgres.connect_to("postgres").await?;
        let created = session.batch_execute(&format!("CREATE DATABASE {DATABASE}")).await;
        created.map_err(|error| unexpected(format!("cannot create the database: {error}")))?;
        let session = postgres.connect().await?;
        let created = session.batch_execute(&format!("{TABLES}\n{}", setup::NATIVE)).await;
        created.map_err(|error| unexpected(format!("cannot create the tables: {error}")))?;
        Ok(postgres)
    }

    /// Waits until it takes connections.
    async fn accepts(&mut self, log: &Path) -> Result<(), Halt> {
        let deadline = Instant::now() + STARTS_WITHIN;
        loop {
            let failure = match self.connect_to("postgres").await {
                Ok(_) => return Ok(()),
                Err(failure) => failure,
            };
            let ended = self.server.try_wait().ok().flatten();
            if let Some(status) = ended {
                return Err(unexpected(format!("PostgreSQL ended at its start ({status}):{}", last_lines(log))));
            }
            if Instant::now() > deadline {
                return Err(unexpected(format!("PostgreSQL does not come up: {failure}{}", last_lines(log))));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The customers, each with no event yet.
    pub async fn admit(&self, customers: &[&str]) -> Result<(), Halt> {
        let session = self.connect().await?;
        let inserted = session.execute("INSERT INTO customers SELECT unnest($1::text[])", &[&customers]).await;
        inserted.map(drop).map_err(|error| refused(&error))
    }

    pub async fn till(&self) -> Result<Till, Halt> {
        let session = self.connect().await?;
        let insert_order = session.prepare(INSERT_ORDER).await.map_err(|error| refused(&error))?;
        let insert_event = session.prepare(INSERT_EVENT).await.map_err(|error| refused(&error))?;
        Ok(Till { session, insert_order, insert_event })
    }

    pub async fn watch(&self) -> Result<SlotWatch, Halt> {
        Ok(SlotWatch(self.connect().await?))
    }

    async fn connect(&self) -> Result<SqlSession, Halt> {
        self.connect_to(DATABASE).await
    }

    async fn connect_to(&self, database: &str) -> Result<SqlSession, Halt> {
        let url = format!("postgres://postgres:{}@127.0.0.1:{}/{database}?sslmode=disable", self.password, self.port);
        // Untouched by PG* variables, which are meant for other servers.
        let session = match ConnInfo::parse_with(&url, &|_| None) {
            Ok(info) => sql::connect(&info).await,
            Err(failure) => Err(failure),
        };
        session.map_err(|failure| unexpected(failure.to_string()))
    }

    /// The address without the password.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{DATABASE}", self.port)
    }

    pub fn password(&self) -> &str {
        &self.password
    }

    pub fn version(&self) -> &str {
        &self.version
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Immediate shutdown: nobody needs the data.
        end(&mut self.server, Signal::SIGQUIT, Duration::from_secs(5));
    }
}

fn refused(error: &tokio_postgres::Error) -> Halt {
    failed(&error.as_db_error().map_or_else(|| error.to_string(), ToString::to_string))
}

/// Where one writer's orders are taken.
pub struct Till {
    session: SqlSession,
    insert_order: Statement,
    insert_event: Statement,
}

const INSERT_ORDER: &str = "INSERT INTO orders (customer, item, amount) VALUES ($1, $2, $3) RETURNING id";

/// The customer's row is locked until the transaction's end: the numbers rise in commit order.
const INSERT_EVENT: &str = "
    WITH next AS (UPDATE customers SET events = events + 1 WHERE name = $1 RETURNING events)
    INSERT INTO outbox (partition_key, event_type, payload)
    SELECT $1::text, $2::text, jsonb_build_object('number', events, 'type', $2::text, 'order', $3::bigint, 'item', $4::text)
    FROM next RETURNING id::text, (payload->>'number')::bigint";

impl Till {
    pub async fn execute(&self, statement: &str) -> Result<(), Halt> {
        self.session.batch_execute(statement).await.map_err(|error| refused(&error))
    }

    pub async fn order(&self, customer: &str, item: &str, amount: i32) -> Result<i64, Halt> {
        let row = self.session.query_one(&self.insert_order, &[&customer, &item, &amount]).await;
        Ok(row.map_err(|error| refused(&error))?.get(0))
    }

    pub async fn event(&self, order: &Outcome, step: &str) -> Result<Event, Halt> {
        let row =
            self.session.query_one(&self.insert_event, &[&order.customer, &step, &order.order, &order.item]).await;
        let row = row.map_err(|error| refused(&error))?;
        Ok(Event { id: row.get(0), key: order.customer.to_owned(), number: row.get(1) })
    }
}

/// Looks at the relay's slot.
pub struct SlotWatch(SqlSession);

impl SlotWatch {
    pub async fn look(&self) -> Result<Standing, Halt> {
        let slot = format!("outboxd_{DATABASE}");
        let state = slot::state(&self.0, &slot, self.0.server_version()).await;
        let state = state.map_err(|failure| unexpected(failure.to_string()))?;
        let state = state.ok_or_else(|| unexpected(format!("the slot {slot} is gone")))?;
        let confirmed = state.confirmed.filter(|confirmed| *confirmed != Lsn::ZERO);
        Ok(Standing {
            confirmed: confirmed.map_or_else(String::new, |confirmed| confirmed.to_string()),
            end: state.current.to_string(),
            behind: state.current.bytes_since(confirmed.unwrap_or_default()),
        })
    }
}

async fn initdb(
    programs: &Programs,
    account: &Account,
    scratch: &Path,
    data: &Path,
    password: &str,
) -> Result<(), Halt> {
    let password_file = scratch.join("password");
    let failed = |what: &dyn std::fmt::Display| unexpected(format!("initdb failed: {what}"));
    std::fs::write(&password_file, password).map_err(|error| failed(&error))?;
    account.own(&password_file)?;
    let mut command = account.command(programs.folder.join("initdb"));
    command.current_dir(scratch).arg("--pgdata").arg(data).arg("--pwfile").arg(&password_file).args([
        "--username=postgres",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        "--no-locale",
        "--no-sync",
    ]);
    tie(&mut command, Signal::SIGKILL).stdout(Stdio::null());
    let made = tokio::process::Command::from(command).kill_on_drop(true).stderr(Stdio::piped()).output().await;
    let made = made.map_err(|error| failed(&error))?;
    let _ = std::fs::remove_file(&password_file);
    match made.status.success() {
        true => Ok(()),
        false => Err(failed(&String::from_utf8_lossy(&made.stderr).trim())),
    }
}

/// Small, quick, logical; what the disk would keep over a crash is of no interest.
fn settings(port: u16, scratch: &Path) -> Vec<String> {
    let fits = scratch.as_os_str().as_bytes().len() <= LONGEST_SOCKET_FOLDER;
    let sockets = if fits { scratch.to_owned() } else { PathBuf::new() };
    vec![
        "wal_level=logical".to_owned(),
        "listen_addresses=127.0.0.1".to_owned(),
        format!("port={port}"),
        format!("unix_socket_directories={}", sockets.display()),
        "fsync=off".to_owned(),
        "full_page_writes=off".to_owned(),
        "shared_buffers=32MB".to_owned(),
        "max_connections=30".to_owned(),
    ]
}
