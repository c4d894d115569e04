//! `outboxd` with any command line and environment, where what it prints is what is looked at.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::{PATIENCE, eventually};

/// Killed when dropped.
pub struct Process {
    child: Child,
    folder: tempfile::TempDir,
}

impl Process {
    pub fn spawn(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the output");
        let file = |name: &str| File::create(folder.path().join(name)).expect("a file for the output");
        let child = Command::new(env!("CARGO_BIN_EXE_outboxd"))
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .expect("outboxd starts");
        Process { child, folder }
    }

    fn printed(&self, name: &str) -> String {
        let bytes = std::fs::read(self.folder.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn stdout(&self) -> String {
        self.printed("stdout")
    }

    pub fn stderr(&self) -> String {
        self.printed("stderr")
    }

    /// Everything it ever said.
    pub fn output(&self) -> String {
        self.stdout() + &self.stderr()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the process can be waited for").is_none()
    }

    /// Waits until it ends; its code.
    pub async fn exit(&mut self) -> i32 {
        let ended = async || self.child.try_wait().expect("the process can be waited for");
        let status = eventually(PATIENCE, "the process ends", ended).await;
        status.code().unwrap_or_else(|| panic!("the process was ended by a signal: {status}"))
    }

    pub async fn exits_with(&mut self, code: i32) {
        let exited = self.exit().await;
        assert_eq!(exited, code, "{}", self.output());
    }

    pub async fn until_printed(&mut self, what: &str) {
        eventually(PATIENCE, &format!("`{what}` is printed"), async || {
            if self.output().contains(what) {
                return Some(());
            }
            assert!(self.is_running(), "ended before it printed `{what}`: {}", self.output());
            None
        })
        .await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let output = self.output();
            let lines: Vec<&str> = output.lines().collect();
            println!("the end of its output:\n{}", lines[lines.len().saturating_sub(60)..].join("\n"));
        }
    }
}

/// Runs a command that ends by itself.
pub async fn run(arguments: &[&str], environment: &[(&str, &str)]) -> (i32, String, String) {
    let mut process = Process::spawn(arguments, environment);
    let code = process.exit().await;
    (code, process.stdout(), process.stderr())
}

/// Status code, headers and body of a GET.
pub fn get(address: &str, path: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out can be set");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").expect("a request is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer is read");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP: {answer}"));
    let code = head.split_whitespace().nth(1).and_then(|code| code.parse().ok());
    (code.unwrap_or_else(|| panic!("no status: {head}")), head.to_owned(), body.to_owned())
}
