//! `outboxd run` as a real process.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Database, PATIENCE, Topic, eventually};

/// Killed when dropped; its log is shown when the test fails.
pub struct Relay {
    child: Child,
    exited: Option<ExitStatus>,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl Relay {
    /// Relays the database's outbox to the topic.
    pub fn start(database: &Database, topic: &Topic, flags: &[&str]) -> Self {
        Self::start_at(&database.url(), topic, flags)
    }

    /// Relays the outbox of the database that is found at this address.
    pub fn start_at(url: &str, topic: &Topic, flags: &[&str]) -> Self {
        let mut arguments = vec!["run", url, "--brokers", &topic.brokers, "--topic", &topic.name];
        arguments.extend(flags);
        Self::spawn(&arguments)
    }

    /// Like [`Relay::start`], and waits until it reads the log: what is committed from then on must be delivered.
    pub async fn streaming(database: &Database, topic: &Topic, flags: &[&str]) -> Self {
        let mut relay = Self::start(database, topic, flags);
        relay.until_streaming(database).await;
        relay
    }

    pub async fn until_streaming(&mut self, database: &Database) -> i64 {
        tokio::select! {
            walsender = database.until_streaming() => walsender,
            status = self.exit(PATIENCE) => panic!("the relay ended before it read anything: {status}"),
        }
    }

    /// Any command line; the admin address is a free port unless one is named.
    pub fn spawn(arguments: &[&str]) -> Self {
        Self::spawn_with(&[], arguments)
    }

    /// With these variables in its environment.
    pub fn spawn_with(environment: &[(&str, &str)], arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the log");
        let log = folder.path().join("stderr");
        let stderr = File::create(&log).expect("a file for the log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboxd"));
        command.envs(environment.iter().copied()).args(arguments).args(["--log-format", "text"]);
        if !arguments.contains(&"--admin") {
            command.args(["--admin", "127.0.0.1:0"]);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().expect("outboxd starts");
        Relay { child, exited: None, log, _folder: folder }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).expect("the relay is there to be signalled");
    }

    /// Ends it as a crash does.
    pub fn kill(mut self) {
        self.child.kill().expect("the relay is killed");
        self.exited = self.child.wait().ok();
    }

    pub fn is_running(&mut self) -> bool {
        self.poll_exit().is_none()
    }

    fn poll_exit(&mut self) -> Option<ExitStatus> {
        if self.exited.is_none() {
            self.exited = self.child.try_wait().expect("the relay can be waited for");
        }
        self.exited
    }

    /// Waits until it ends by itself.
    pub async fn exit(&mut self, within: Duration) -> ExitStatus {
        eventually(within, "the relay ends", async || self.poll_exit()).await
    }

    /// Waits until it ends by itself, with this code.
    pub async fn exits_with(&mut self, code: i32) {
        let status = self.exit(PATIENCE).await;
        assert_eq!(status.code(), Some(code), "the relay ended with {status}");
    }

    /// Asks it to stop, and waits.
    pub async fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        self.exits_with(0).await;
    }

    /// The most memory it ever held, in bytes, as the kernel keeps it: no sample can show more.
    pub fn peak_memory(&self) -> u64 {
        self.memory_field("VmHWM:")
    }

    /// The memory it holds now, in bytes.
    pub fn memory(&self) -> u64 {
        self.memory_field("VmRSS:")
    }

    fn memory_field(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_else(|| panic!("{path}: no {field}"));
        let kib: u64 = line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number of KiB");
        kib * 1024
    }

    /// Where it answers, as its log says.
    pub async fn admin(&self) -> String {
        eventually(PATIENCE, "the log tells the admin address", async || {
            let log = self.log();
            let line = log.lines().find(|line| line.contains("health, metrics and status"))?;
            let (_, address) = line.split_once("address=")?;
            Some(address.split_whitespace().next()?.to_owned())
        })
        .await
    }

    /// The body of the answer.
    pub async fn get(&self, path: &str) -> String {
        let address = self.admin().await;
        let mut stream = TcpStream::connect(&address).unwrap_or_else(|error| panic!("{address}: {error}"));
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out can be set");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")
            .expect("a request is sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer is read");
        answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default()
    }

    /// The only pipeline's part of /status.
    pub async fn status(&self) -> serde_json::Value {
        let page: serde_json::Value = serde_json::from_str(&self.get("/status").await).expect("/status is JSON");
        page["pipelines"][0].clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if self.exited.is_none() {
            let _ = self.child.kill();
            let begin = Instant::now();
            while matches!(self.child.try_wait(), Ok(None)) && begin.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        if std::thread::panicking() {
            println!("the end of the log of relay {}:\n{}", self.pid(), super::tail(&self.log));
        }
    }
}
