//! The relay as users run it: `outboxd run` in a process of its own, so that killing it is a real kill.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::broker::Broker;
use super::scratch::{Scratch, end, free_port, last_lines, log_file, tie, without_settings};
use super::shop::Shop;
use crate::cli::{status, unexpected};
use crate::failure::Halt;

const READY_WITHIN: Duration = Duration::from_secs(30);

pub struct RelayProcess {
    arguments: Vec<String>,
    /// What is not for the process list, and the variable that it is looked for in.
    secret: (&'static str, String),
    folder: PathBuf,
    log: PathBuf,
    admin: String,
    running: Option<Child>,
}

impl RelayProcess {
    pub fn new(shop: &Shop, broker: &Broker, scratch: &Scratch) -> Result<RelayProcess, Halt> {
        let admin = format!("127.0.0.1:{}", free_port()?);
        let mut arguments = ["run", &shop.source(), "--brokers", broker.servers(), "--topic", broker.topic()]
            .map(str::to_owned)
            .to_vec();
        arguments.extend(["--admin", &admin, "--log-format", "text"].map(str::to_owned));
        if let Some(partitions) = broker.topic_to_create() {
            arguments.extend(["--create-topics".to_owned(), partitions.to_string()]);
        }
        Ok(RelayProcess {
            arguments,
            secret: shop.secret(),
            folder: scratch.path().to_owned(),
            log: scratch.path().join("relay.log"),
            admin,
            running: None,
        })
    }

    /// How a user would write it.
    pub fn command_line(&self) -> String {
        format!("outboxd {}", self.arguments.join(" "))
    }

    pub fn admin(&self) -> &str {
        &self.admin
    }

    pub fn pid(&self) -> u32 {
        self.running.as_ref().map_or(0, Child::id)
    }

    /// Starts it. To be called on the main thread: see [`tie`].
    pub fn start(&mut self) -> Result<(), Halt> {
        let failed = |error: std::io::Error| unexpected(format!("cannot start the relay: {error}"));
        let (out, err) = log_file(&self.log)?;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        without_settings(&mut command).env(self.secret.0, &self.secret.1);
        command.args(&self.arguments).current_dir(&self.folder).stdin(Stdio::null()).stdout(out).stderr(err);
        self.running = Some(tie(&mut command, Signal::SIGKILL).spawn().map_err(failed)?);
        Ok(())
    }

    /// Waits until it reads the log.
    pub async fn ready(&mut self) -> Result<(), Halt> {
        let deadline = Instant::now() + READY_WITHIN;
        while status::get(&self.admin, "/readyz").await.is_err() {
            self.assert_running()?;
            if Instant::now() > deadline {
                return Err(unexpected(format!("the relay does not get ready; its log:{}", last_lines(&self.log))));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// A relay that ended by itself ends the demo.
    pub fn assert_running(&mut self) -> Result<(), Halt> {
        match self.running.as_mut().map(Child::try_wait) {
            Some(Ok(Some(status))) => {
                Err(unexpected(format!("the relay ended ({status}); its log:{}", last_lines(&self.log))))
            }
            _ => Ok(()),
        }
    }

    /// SIGKILL: no farewell, nothing confirmed, nothing flushed.
    pub fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            end(&mut running, Signal::SIGKILL, Duration::ZERO);
        }
    }

    pub fn log(&self) -> &Path {
        &self.log
    }
}

impl Drop for RelayProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
