//! A PostgreSQL server of one's own, to stop and to break.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::unistd::{Gid, Uid, User, chown};

use super::{PATIENCE, eventually, free_port, tail, variable};

#[derive(Clone, Copy, Debug)]
pub enum StopMode {
    Fast,
    /// As after a crash.
    Immediate,
}

/// The newest version. Killed, and its folder removed, when dropped.
pub struct PrivatePostgres {
    folder: tempfile::TempDir,
    port: u16,
    settings: Vec<String>,
    child: Option<Child>,
}

impl PrivatePostgres {
    /// Settings are `name=value`, beside those that any source needs.
    pub async fn start(settings: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("outboxd-pg-").tempdir_in("/tmp").expect("a folder for the data");
        give(folder.path());
        let mut server = PrivatePostgres {
            folder,
            port: free_port(),
            settings: settings.iter().map(|setting| (*setting).to_owned()).collect(),
            child: None,
        };
        let made = server
            .program("initdb")
            .args(["--username=postgres", "--auth=trust", "--no-locale", "--encoding=UTF8", "--no-sync"])
            .stdout(Stdio::null())
            .status()
            .expect("initdb runs");
        assert!(made.success(), "initdb: {}", tail(&server.log()));
        server.configure();
        server.resume().await;
        server
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// One of PostgreSQL's programs on our data, as a user that may run it.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(Path::new(&variable("OUTBOXD_TEST_PG_BIN")).join(name));
        let log = File::options().create(true).append(true).open(self.log()).expect("the log can be written");
        command.arg("-D").arg(self.data()).stdin(Stdio::null()).stderr(log).current_dir(self.folder.path());
        if let Some((uid, gid)) = unprivileged() {
            command.uid(uid.as_raw()).gid(gid.as_raw());
        }
        command
    }

    /// In the file and not on the command line, so that ALTER SYSTEM has the last word.
    fn configure(&self) {
        let fixed = [
            format!("port={}", self.port),
            format!("unix_socket_directories='{}'", self.folder.path().display()),
            "listen_addresses='127.0.0.1'".to_owned(),
            "wal_level=logical".to_owned(),
            "fsync=off".to_owned(),
            "shared_buffers=64MB".to_owned(),
        ];
        let lines: Vec<_> = fixed.iter().chain(&self.settings).map(|setting| setting.replacen('=', " = ", 1)).collect();
        let mut file = File::options().append(true).open(self.data().join("postgresql.conf")).expect("a configuration");
        file.write_all(lines.join("\n").as_bytes()).expect("the configuration can be written");
    }

    /// Starts it again, on the same port.
    pub async fn resume(&mut self) {
        let mut command = self.program("postgres");
        self.child = Some(command.stdout(Stdio::null()).spawn().expect("postgres starts"));
        let url = self.url();
        let log = self.log();
        eventually(PATIENCE, "PostgreSQL answers", async || {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "PostgreSQL ended: {}", tail(&log));
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.ok()?;
            tokio::spawn(connection);
            client.batch_execute("SELECT 1").await.ok()
        })
        .await;
    }

    /// Keeps a copy of the stopped server's data, for [`Self::go_back`].
    pub fn keep_copy(&self) {
        self.copy(&self.data(), &self.earlier());
    }

    /// Puts the kept copy in the place of the stopped server's data. On a new timeline when it is recovered from, as a
    /// backup is; else it goes on as if nothing had been written since.
    pub fn go_back(&self, new_timeline: bool) {
        std::fs::remove_dir_all(self.data()).expect("the data can be removed");
        self.copy(&self.earlier(), &self.data());
        if new_timeline {
            let setting = "\nrestore_command = 'false'\n";
            let configuration = self.data().join("postgresql.conf");
            let mut file = File::options().append(true).open(configuration).expect("a configuration");
            file.write_all(setting.as_bytes()).expect("the configuration can be written");
            let signal = self.data().join("recovery.signal");
            File::create(&signal).expect("the signal can be given");
            give(&signal);
        }
    }

    fn earlier(&self) -> PathBuf {
        self.folder.path().join("earlier")
    }

    fn copy(&self, from: &Path, to: &Path) {
        assert!(self.child.is_none(), "only a stopped server's data are of one piece");
        let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("cp runs");
        assert!(copied.success(), "cp -a {} {}", from.display(), to.display());
    }

    /// `pg_ctl stop`, which gives up after a minute.
    pub async fn stop(&mut self, mode: StopMode) {
        let mode = match mode {
            StopMode::Fast => "fast",
            StopMode::Immediate => "immediate",
        };
        let mut command = self.program("pg_ctl");
        command.args(["stop", "-m", mode, "-t", "60"]).stdout(Stdio::null());
        let stopped = tokio::process::Command::from(command).status().await.expect("pg_ctl runs");
        assert!(stopped.success(), "pg_ctl stop -m {mode}: {}", tail(&self.log()));
        if let Some(mut child) = self.child.take() {
            eventually(Duration::from_secs(30), "PostgreSQL is gone", async || child.try_wait().ok().flatten()).await;
        }
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // SIGQUIT also ends the server's children, which SIGKILL would leave behind.
            let pid = nix::unistd::Pid::from_raw(child.id() as i32);
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGQUIT);
            let _ = child.wait();
        }
        if std::thread::panicking() {
            println!("the end of the private PostgreSQL's log:\n{}", tail(&self.log()));
        }
    }
}

/// PostgreSQL refuses to run as root.
fn unprivileged() -> Option<(Uid, Gid)> {
    if !Uid::effective().is_root() {
        return None;
    }
    let name = variable("OUTBOXD_TEST_PG_USER");
    let user = User::from_name(&name).ok().flatten().unwrap_or_else(|| panic!("there is no user {name}"));
    Some((user.uid, user.gid))
}

fn give(folder: &Path) {
    if let Some((uid, gid)) = unprivileged() {
        chown(folder, Some(uid), Some(gid)).expect("the folder can be given away");
    }
}
