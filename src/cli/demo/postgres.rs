//! A real PostgreSQL of the demo's own: made in the scratch folder, reachable on the loopback address with a password
//! that only the demo knows, gone with it.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::programs::Programs;
use super::report::Stage;
use super::scratch::{Account, Scratch, end, free_port, last_lines, tie, token};
use crate::cli::unexpected;
use crate::failure::Halt;
use crate::source::postgres::conninfo::ConnInfo;
use crate::source::postgres::setup;
use crate::source::postgres::sql::{self, SqlSession};

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
        let mut postgres = Postgres { server, port, password };
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

    pub async fn connect(&self) -> Result<SqlSession, Halt> {
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

    pub fn slot() -> String {
        format!("outboxd_{DATABASE}")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Immediate shutdown: nobody needs the data.
        end(&mut self.server, Signal::SIGQUIT, Duration::from_secs(5));
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

/// A new log, for both outputs of a process.
pub fn log_file(path: &Path) -> Result<(File, File), Halt> {
    let both = File::options().create(true).append(true).open(path).and_then(|log| Ok((log.try_clone()?, log)));
    both.map_err(|error| unexpected(format!("cannot write {}: {error}", path.display())))
}
