//! A RabbitMQ node of one's own, to stop and to break.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{PATIENCE, eventually, free_port, tail, variable};

/// Its user is `guest`, with the password `guest`. Killed, and its folder removed, when dropped.
pub struct PrivateRabbit {
    folder: tempfile::TempDir,
    port: u16,
    /// Through which it is controlled.
    node_port: u16,
    /// Where it is found under its name; no other node is.
    mapper_port: u16,
    child: Option<Child>,
}

impl PrivateRabbit {
    /// Settings are lines of rabbitmq.conf.
    pub async fn start(settings: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("outboxd-mq-").tempdir_in("/tmp").expect("a folder for the data");
        std::fs::write(folder.path().join("rabbitmq.conf"), settings.join("\n") + "\n").expect("a configuration");
        let (port, node_port, mapper_port) = (free_port(), free_port(), free_port());
        let mut node = PrivateRabbit { folder, port, node_port, mapper_port, child: None };
        node.resume().await;
        node
    }

    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Starts it again, on the same port.
    pub async fn resume(&mut self) {
        let log = File::options().create(true).append(true).open(self.log()).expect("the log can be written");
        let child = Command::new(variable("OUTBOXD_TEST_RABBITMQ_SERVER"))
            .arg(self.folder.path())
            .args([self.port, self.node_port, self.mapper_port].map(|port| port.to_string()))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log can be written"))
            .stderr(log)
            .spawn()
            .expect("RabbitMQ starts");
        self.child = Some(child);
        let (port, log) = (self.port, self.log());
        eventually(PATIENCE, "RabbitMQ answers", async || {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "RabbitMQ ended: {}", tail(&log));
            tokio::time::timeout(Duration::from_secs(5), greeting(port)).await.ok()?.ok()
        })
        .await;
    }

    /// A clean shutdown: clients are told.
    pub async fn stop(&mut self) {
        self.end(Signal::SIGTERM).await;
    }

    /// As after a crash.
    pub async fn crash(&mut self) {
        self.end(Signal::SIGKILL).await;
    }

    /// A clean shutdown, and on again.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.resume().await;
    }

    async fn end(&mut self, signal: Signal) {
        let Some(mut child) = self.child.take() else { return };
        kill(Pid::from_raw(child.id() as i32), signal).expect("RabbitMQ is there to be signalled");
        eventually(PATIENCE, "RabbitMQ is gone", async || child.try_wait().ok().flatten()).await;
    }

    /// Its process stands still; connections stay open.
    pub fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("RabbitMQ runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("RabbitMQ is there to be signalled");
    }

    /// Runs rabbitmqctl and returns what it prints.
    pub async fn control(&self, arguments: &[&str]) -> String {
        let ended = tokio::process::Command::new(variable("OUTBOXD_TEST_RABBITMQ_CONTROL"))
            .arg(self.folder.path())
            .arg("--quiet")
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .await
            .expect("rabbitmqctl runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(ended.status.success(), "rabbitmqctl {arguments:?}: {}{}", text(&ended.stdout), text(&ended.stderr));
        text(&ended.stdout)
    }

    /// As if it had no memory left: it tells its clients that they are blocked, and reads nothing more from those that
    /// publish.
    pub async fn raise_memory_alarm(&self) {
        self.control(&["set_vm_memory_high_watermark", "0"]).await;
        eventually(PATIENCE, "the alarm is raised", async || self.alarm_is_raised().await.then_some(())).await;
    }

    pub async fn clear_memory_alarm(&self) {
        self.control(&["set_vm_memory_high_watermark", "0.6"]).await;
        eventually(PATIENCE, "the alarm is cleared", async || (!self.alarm_is_raised().await).then_some(())).await;
    }

    async fn alarm_is_raised(&self) -> bool {
        self.control(&["eval", "rabbit_alarm:get_alarms()."]).await.contains("memory")
    }
}

impl Drop for PrivateRabbit {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Reads the beginning of the frame with which it answers the header of AMQP 0-9-1.
async fn greeting(port: u16) -> std::io::Result<()> {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).await?;
    connection.write_all(b"AMQP\x00\x00\x09\x01").await?;
    let mut frame = [0; 11];
    connection.read_exact(&mut frame).await.map(drop)
}
