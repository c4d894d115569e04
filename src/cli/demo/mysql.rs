//! A real MySQL or MariaDB of the demo's own: made in the scratch folder, reachable on the loopback address with a
//! password that only the demo knows, gone with it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::ledger::Event;
use super::mysql_program::ServerProgram;
use super::report::Stage;
use super::scratch::{Account, Scratch, Troupe, end, free_port, last_lines, log_file, tie, token};
use super::shop::Standing;
use super::workload::{Outcome, failed};
use crate::cli::unexpected;
use crate::failure::Halt;
use crate::source::SourceFailure;
use crate::source::mysql::checkpoint::Place;
use crate::source::mysql::conninfo::ConnInfo;
use crate::source::mysql::position::{BinlogPosition, FilePos};
use crate::source::mysql::server::Server;
use crate::source::mysql::session::{Flavor, Session, literal};
use crate::source::mysql::setup;

const DATABASE: &str = "shop";
/// As the relay names a pipeline that nobody named.
const PIPELINE: &str = "outboxd_shop";
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// The shop's tables, beside which the outbox stands. The counter of a customer's events is what their order is later
/// judged by.
const TABLES: [&str; 3] = [
    "CREATE TABLE customers (name VARCHAR(64) PRIMARY KEY, events BIGINT NOT NULL DEFAULT 0)",
    "CREATE TABLE orders (
        id        BIGINT AUTO_INCREMENT PRIMARY KEY,
        customer  VARCHAR(64) NOT NULL,
        item      VARCHAR(255) NOT NULL,
        amount    INTEGER NOT NULL,
        placed_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
        FOREIGN KEY (customer) REFERENCES customers (name)
    )",
    setup::NATIVE,
];

pub struct MySql {
    server: Child,
    flavor: Flavor,
    version: String,
    port: u16,
    password: String,
}

impl MySql {
    /// Makes a data folder and starts a server on it. To be called on the main thread: see [`tie`].
    pub async fn start(
        program: &ServerProgram,
        account: &Account,
        scratch: &Scratch,
        stage: &Stage,
    ) -> Result<MySql, Halt> {
        let flavor = program.flavor;
        let files = Files::of(scratch.path());
        let (port, password) = (free_port()?, token(12)?);
        let base = program.base(account);
        write(&files.settings, &settings(flavor, &files, base.as_deref(), port), account)?;
        let making = make_data(program, account, &files, base.as_deref());
        stage.during("Making a data folder in a temporary folder", making).await?;

        write(&files.users, &users(&password), account)?;
        let mut command = account.command(&program.path);
        command.arg(argument("--defaults-file=", &files.settings)).arg(argument("--init-file=", &files.users));
        let (out, err) = log_file(&files.log)?;
        command.current_dir(scratch.path()).stdout(out).stderr(err);
        let server = tie(&mut command, Signal::SIGKILL).spawn();
        let server = server.map_err(|error| unexpected(format!("cannot start {flavor}: {error}")))?;
        let mut mysql = MySql { server, flavor, version: program.version(), port, password };
        let starting = format!("Starting {flavor} {}", mysql.version);
        let mut session = stage.during(&starting, mysql.accepts(&files.log)).await?;
        let _ = std::fs::remove_file(&files.users);
        for table in TABLES {
            let created = session.execute(table).await;
            created.map_err(|failure| unexpected(format!("cannot create the tables: {failure}")))?;
        }
        session.close().await;
        Ok(mysql)
    }

    /// Waits until it takes connections.
    async fn accepts(&mut self, log: &Path) -> Result<Session, Halt> {
        let deadline = Instant::now() + STARTS_WITHIN;
        loop {
            let failure = match self.connect().await {
                Ok(session) => return Ok(session),
                Err(failure) => failure,
            };
            let ended = self.server.try_wait().ok().flatten();
            if let Some(status) = ended {
                return Err(unexpected(format!("{} ended at its start ({status}):{}", self.flavor, last_lines(log))));
            }
            if Instant::now() > deadline {
                return Err(unexpected(format!("{} does not come up: {failure}{}", self.flavor, last_lines(log))));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn connect(&self) -> Result<Session, SourceFailure> {
        // With user and password named, the environment has nothing to add.
        let url = format!("mysql://root:{}@127.0.0.1:{}/{DATABASE}", self.password, self.port);
        Session::connect(&ConnInfo::parse(&url)?).await
    }

    pub fn flavor(&self) -> Flavor {
        self.flavor
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    /// The address without the password.
    pub fn url(&self) -> String {
        format!("{}://root@127.0.0.1:{}/{DATABASE}", self.flavor.name(), self.port)
    }

    pub fn password(&self) -> &str {
        &self.password
    }

    /// The server's own client, and how it is told where to go.
    pub fn client(&self) -> (&'static str, String) {
        let (client, port) = (self.flavor.name(), self.port);
        // By the name localhost, or none, the clients would take a socket, whatever the port.
        (client, format!("{client} --host=127.0.0.1 --port={port} --user=root {DATABASE}"))
    }

    /// The customers, each with no event yet.
    pub async fn admit(&self, customers: &[&str]) -> Result<(), Halt> {
        let names: Vec<_> = customers.iter().map(|name| format!("({})", literal(name))).collect();
        let statement = format!("INSERT INTO customers (name) VALUES {}", names.join(", "));
        let mut session = self.connect().await.map_err(|failure| failed(&failure))?;
        session.execute(&statement).await.map_err(|failure| failed(&failure))?;
        session.close().await;
        Ok(())
    }

    pub async fn till(&self) -> Result<Till, Halt> {
        Ok(Till(self.connect().await.map_err(|failure| failed(&failure))?))
    }

    pub async fn watch(&self) -> Result<CheckpointWatch, Halt> {
        let lost = |failure: SourceFailure| unexpected(failure.to_string());
        let mut session = self.connect().await.map_err(lost)?;
        let server = Server::ask(&mut session).await.map_err(lost)?;
        Ok(CheckpointWatch { session, server })
    }
}

impl Drop for MySql {
    fn drop(&mut self) {
        // Nobody needs the data. A program that was named may be a script that started the server; the leader is not
        // reaped yet, so that the number is still its own.
        if matches!(self.server.try_wait(), Ok(None)) {
            drop(Troupe::of(self.server.id()));
        }
        end(&mut self.server, Signal::SIGKILL, Duration::ZERO);
    }
}

/// Where one writer's orders are taken.
pub struct Till(Session);

impl Till {
    pub async fn execute(&mut self, statement: &str) -> Result<(), Halt> {
        self.0.execute(statement).await.map_err(|failure| failed(&failure))
    }

    pub async fn order(&mut self, customer: &str, item: &str, amount: i32) -> Result<i64, Halt> {
        let (customer, item) = (literal(customer), literal(item));
        // The foreign key would lock the customer's row in share mode, as it does for others at the same time, and
        // none of them could then count an event.
        self.execute(&format!("SELECT events FROM customers WHERE name = {customer} FOR UPDATE")).await?;
        let inserted = format!("INSERT INTO orders (customer, item, amount) VALUES ({customer}, {item}, {amount})");
        self.execute(&inserted).await?;
        let row = self.0.query_one("SELECT LAST_INSERT_ID()").await.map_err(|failure| failed(&failure))?;
        Ok(row.number(0).cast_signed())
    }

    pub async fn event(&mut self, order: &Outcome, step: &str) -> Result<Event, Halt> {
        let (customer, step, item) = (literal(order.customer), literal(step), literal(order.item));
        // The customer's row is locked until the transaction's end: the numbers rise in commit order.
        self.execute(&format!("UPDATE customers SET events = events + 1 WHERE name = {customer}")).await?;
        let next = format!("SELECT UUID(), events FROM customers WHERE name = {customer}");
        let next = self.0.query_one(&next).await.map_err(|failure| failed(&failure))?;
        let (id, number) = (next.string(0), next.number(1));
        let payload =
            format!("JSON_OBJECT('number', {number}, 'type', {step}, 'order', {}, 'item', {item})", order.order);
        let inserted = format!(
            "INSERT INTO outbox (id, partition_key, event_type, payload) VALUES ({}, {customer}, {step}, {payload})",
            literal(&id)
        );
        self.execute(&inserted).await?;
        Ok(Event { id, key: order.customer.to_owned(), number: number.cast_signed() })
    }
}

/// Looks at the relay's checkpoint and at the log behind it.
pub struct CheckpointWatch {
    session: Session,
    server: Server,
}

impl CheckpointWatch {
    pub async fn look(&mut self) -> Result<Standing, Halt> {
        self.try_look().await.map_err(|failure| unexpected(failure.to_string()))
    }

    /// Of the GTIDs only the numbers are shown: there is one server, which counts from 1.
    async fn try_look(&mut self) -> Result<Standing, SourceFailure> {
        let reach = self.server.reach(&mut self.session).await?;
        let stored = Place::Table.load(&mut self.session, PIPELINE).await?;
        let strange = || SourceFailure::transient("the checkpoint holds no position");
        let stored = stored.ok_or_else(strange)?;
        let confirmed: BinlogPosition = stored.position.parse().map_err(|_| strange())?;
        let file: FilePos = stored.file.parse().map_err(|_| strange())?;
        let mut behind = 0;
        for (name, _) in reach.files.iter().skip_while(|(name, _)| *name != file.file) {
            let from = if *name == file.file { format!(" FROM {}", file.offset) } else { String::new() };
            let events = format!("SHOW BINLOG EVENTS IN {}{from}", literal(name));
            let events = self.session.query(&events).await?;
            behind += transactions(events.iter().map(|event| (event.string(2), event.string(5))));
        }
        let confirmed = format!("GTID {}", confirmed.as_gauge());
        Ok(Standing { confirmed, end: reach.end.as_gauge().to_string(), behind })
    }
}

/// How many transactions a log has, given its events' types and what the server says of each. Those that store the
/// checkpoint are not counted: there is always one after the confirmed position, the one that stored it.
fn transactions(events: impl Iterator<Item = (String, String)>) -> u64 {
    let mut count = 0_u64;
    for (kind, what) in events {
        match kind.as_str() {
            "Gtid" | "Gtid_tagged" => count += 1,
            "Table_map" if what.ends_with(".outboxd_checkpoint)") => count = count.saturating_sub(1),
            _ => {}
        }
    }
    count
}

struct Files {
    scratch: PathBuf,
    data: PathBuf,
    settings: PathBuf,
    users: PathBuf,
    log: PathBuf,
}

impl Files {
    fn of(scratch: &Path) -> Files {
        Files {
            scratch: scratch.to_owned(),
            data: scratch.join("data"),
            settings: scratch.join("server.cnf"),
            users: scratch.join("users.sql"),
            log: scratch.join("server.log"),
        }
    }
}

fn argument(name: &str, value: &Path) -> std::ffi::OsString {
    let mut argument = std::ffi::OsString::from(name);
    argument.push(value);
    argument
}

fn write(path: &Path, text: &str, account: &Account) -> Result<(), Halt> {
    std::fs::write(path, text).map_err(|error| unexpected(format!("cannot write {}: {error}", path.display())))?;
    account.own(path)
}

/// Small, quick, in rows with the names of their columns; what the disk would keep over a crash is of no interest.
/// The socket is named as seen from the data folder: a path of more than some hundred bytes would be none.
fn settings(flavor: Flavor, files: &Files, base: Option<&Path>, port: u16) -> String {
    let (data, scratch) = (files.data.display(), files.scratch.display());
    let mut settings = format!(
        "[mysqld]\ndatadir = \"{data}\"\ntmpdir = \"{scratch}\"\nsocket = socket\npid-file = pid\n\
         bind-address = 127.0.0.1\nport = {port}\nskip-name-resolve\nmax-connections = 30\nserver-id = 1\n\
         log-bin = binlog\nbinlog-row-metadata = FULL\nsync-binlog = 0\ninnodb-flush-log-at-trx-commit = 0\n\
         innodb-doublewrite = OFF\ninnodb-buffer-pool-size = 32M\nperformance-schema = OFF\n"
    );
    if let Some(base) = base {
        let _ = writeln!(settings, "basedir = \"{}\"", base.display());
    }
    let own: &[&str] = match flavor {
        // The row format is the default, and naming it is deprecated. Its X protocol would take a port of its own,
        // and the folder for files that packages set is there only after an installation.
        Flavor::MySql => &[
            "gtid-mode = ON",
            "enforce-gtid-consistency = ON",
            "loose-mysqlx = OFF",
            "secure-file-priv = NULL",
            "loose-innodb-redo-log-capacity = 32M",
        ],
        // It would make a certificate at each start, which takes its time.
        Flavor::MariaDb => &["binlog-format = ROW", "gtid-strict-mode = ON", "innodb-log-file-size = 32M", "skip-ssl"],
    };
    for line in own {
        let _ = writeln!(settings, "{line}");
    }
    settings
}

/// One statement a line, as the server wants it. Not logged: the log begins with the shop.
fn users(password: &str) -> String {
    format!(
        "SET SESSION sql_log_bin = 0;\n\
         DROP USER IF EXISTS 'root'@'127.0.0.1', 'root'@'::1', ''@'localhost';\n\
         ALTER USER 'root'@'localhost' IDENTIFIED BY '{password}';\n\
         CREATE USER 'root'@'127.0.0.1' IDENTIFIED BY '{password}';\n\
         GRANT ALL ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;\n\
         CREATE DATABASE {DATABASE};\n"
    )
}

async fn make_data(program: &ServerProgram, account: &Account, files: &Files, base: Option<&Path>) -> Result<(), Halt> {
    let flavor = program.flavor;
    let failed = |what: &dyn std::fmt::Display| unexpected(format!("{flavor} makes no data folder: {what}"));
    let mut command = match flavor {
        Flavor::MySql => {
            let mut command = account.command(&program.path);
            command.arg(argument("--defaults-file=", &files.settings)).arg("--initialize-insecure");
            command
        }
        Flavor::MariaDb => install_db(program, account, &files.data, base).ok_or_else(|| Halt {
            remedy: "install the whole server, of which it is a part".to_owned(),
            ..failed(&format_args!("there is no mariadb-install-db that belongs to {}", program.path.display()))
        })?,
    };
    let (out, err) = log_file(&files.log)?;
    tie(&mut command, Signal::SIGKILL).env("TMPDIR", &files.scratch).stdout(out).stderr(err);
    let mut made = tokio::process::Command::from(command).spawn().map_err(|error| failed(&error))?;
    // MariaDB's is a script, which starts a server.
    let mut troupe = made.id().map(Troupe::of);
    let status = made.wait().await.map_err(|error| failed(&error))?;
    if let Some(troupe) = &mut troupe {
        troupe.is_gone();
    }
    match status.success() {
        true => Ok(()),
        false => Err(failed(&format_args!("{status}{}", complaints(&files.log)))),
    }
}

/// What went wrong, which MariaDB's script buries in advice.
fn complaints(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let errors: Vec<_> =
        text.lines().filter(|line| line.contains("[ERROR]")).map(|line| format!("\n    {line}")).collect();
    if errors.is_empty() { last_lines(log) } else { errors.concat() }
}

/// The script that MariaDB brings for it.
fn install_db(program: &ServerProgram, account: &Account, data: &Path, base: Option<&Path>) -> Option<Command> {
    let base = base?;
    let script = program.companion(&["mariadb-install-db", "mysql_install_db"], base)?;
    let mut command = account.command(script);
    command.arg("--no-defaults").arg(argument("--basedir=", base)).arg(argument("--datadir=", data)).args([
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        "--skip-name-resolve",
        "--innodb-log-file-size=32M",
        "--innodb-doublewrite=OFF",
    ]);
    Some(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_that_store_the_checkpoint_are_not_counted() {
        let count = |events: &[(&str, &str)]| {
            transactions(events.iter().map(|(kind, what)| ((*kind).to_owned(), (*what).to_owned())))
        };
        let order = [
            ("Gtid", "SET @@SESSION.GTID_NEXT= '…:7'"),
            ("Query", "BEGIN"),
            ("Table_map", "table_id: 109 (shop.orders)"),
            ("Table_map", "table_id: 110 (shop.outbox)"),
            ("Xid", "COMMIT /* xid=11 */"),
        ];
        let checkpoint = [
            ("Gtid", "BEGIN GTID 0-1-8"),
            ("Table_map", "table_id: 111 (shop.outboxd_checkpoint)"),
            ("Xid", "COMMIT /* xid=12 */"),
        ];
        let beginning = [("Format_desc", ""), ("Gtid_list", "[]")];
        assert_eq!(count(&checkpoint), 0);
        assert_eq!(count(&[&beginning[..], &order, &checkpoint, &order].concat()), 2);
    }
}
