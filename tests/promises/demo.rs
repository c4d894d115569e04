//! `outboxd demo` keeps its own promises: it shows a crash that loses nothing, and leaves nothing behind, whichever way
//! it ends.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Where a demo is told to put its files, and what it says.
struct Show {
    place: tempfile::TempDir,
    demo: Child,
    said: String,
}

impl Show {
    fn begin() -> Show {
        Show::begin_with(&[])
    }

    /// With the servers that the tests run on: whether the machine has others is not asked.
    fn begin_on(source: &str) -> Show {
        let program = match source {
            "mysql" => "OUTBOXD_TEST_MYSQLD",
            "mariadb" => "OUTBOXD_TEST_MARIADBD",
            _ => "OUTBOXD_TEST_MONGOD",
        };
        let program = std::env::var(program).unwrap_or_else(|_| panic!("{program} is not set: use tests/run"));
        Show::begin_with(&["--source", source, "--server-program", &program])
    }

    fn begin_with(arguments: &[&str]) -> Show {
        let place = tempfile::Builder::new().prefix("outboxd-show-").tempdir().expect("a temporary folder");
        // The database's user, who is another one when root runs this, must get in.
        std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).expect("its mode is set");
        let demo = Command::new(env!("CARGO_BIN_EXE_outboxd"))
            .arg("demo")
            .args(arguments)
            .env("TMPDIR", place.path())
            // Settings of whoever runs the tests are not the demo's.
            .env("OUTBOXD_BROKERS", "127.0.0.1:1")
            .env("PGHOST", "127.0.0.2")
            .env("MYSQL_PWD", "another's")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the demo starts");
        Show { place, demo, said: String::new() }
    }

    /// Reads what it says until a line holds the words, or its end.
    fn listen(&mut self, until: Option<&str>) {
        let stdout = self.demo.stdout.as_mut().expect("its output is piped");
        // One byte at a time, so that nothing is read that the next listener would miss.
        let mut lines = BufReader::with_capacity(1, stdout).lines();
        for line in &mut lines {
            let line = line.expect("its output is text");
            let found = until.is_some_and(|words| line.contains(words));
            self.said.push_str(&line);
            self.said.push('\n');
            if found {
                return;
            }
        }
        assert!(until.is_none(), "it ended without saying {until:?}:\n{}", self.said);
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.demo.id().cast_signed()), signal).expect("the demo can be signalled");
    }

    /// Nothing may be left a moment after its end.
    fn assert_nothing_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(15);
        loop {
            let files = std::fs::read_dir(self.place.path()).expect("the folder is there").count();
            let processes = processes_of(self.place.path());
            if files == 0 && processes.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {files} files, processes {processes:?}\n{}", self.said);
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Show {
    fn drop(&mut self) {
        let _ = self.demo.kill();
        let _ = self.demo.wait();
    }
}

/// Processes that name the folder, or work in it.
fn processes_of(folder: &Path) -> Vec<String> {
    let folder = folder.to_string_lossy();
    let entries = std::fs::read_dir("/proc").expect("there is /proc").flatten();
    let numbered = entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
    numbered
        .filter_map(|entry| {
            let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let arguments = String::from_utf8_lossy(&arguments).replace('\0', " ");
            let works_in = std::fs::read_link(entry.path().join("cwd")).unwrap_or_default();
            let its = arguments.contains(&*folder) || works_in.to_string_lossy().contains(&*folder);
            its.then(|| format!("{} {arguments}", entry.file_name().to_string_lossy()))
        })
        .collect()
}

#[test]
fn demo_kills_the_relay_loses_nothing_and_leaves_nothing_behind() {
    loses_nothing_and_leaves_nothing_behind(Show::begin(), &[PARTLY, "0 bytes behind"]);
}

#[test]
fn demo_on_mysql_kills_the_relay_loses_nothing_and_leaves_nothing_behind() {
    loses_nothing_and_leaves_nothing_behind(Show::begin_on("mysql"), &[PARTLY, "0 transactions behind"]);
}

#[test]
fn demo_on_mariadb_kills_the_relay_loses_nothing_and_leaves_nothing_behind() {
    loses_nothing_and_leaves_nothing_behind(Show::begin_on("mariadb"), &[PARTLY, "0 transactions behind"]);
}

#[test]
fn demo_on_mongodb_kills_the_relay_loses_nothing_and_leaves_nothing_behind() {
    // It has no savepoints.
    loses_nothing_and_leaves_nothing_behind(Show::begin_on("mongodb"), &["0 transactions behind"]);
}

/// Said when a part of a transaction was rolled back.
const PARTLY: &str = "ROLLBACK TO SAVEPOINT  order";

fn loses_nothing_and_leaves_nothing_behind(mut show: Show, of_its_own: &[&str]) {
    let began = Instant::now();
    show.listen(None);
    let status = show.demo.wait().expect("the demo ends");
    assert!(status.success(), "{status}\n{}", show.said);
    assert!(began.elapsed() < Duration::from_secs(120), "it took {:?}", began.elapsed());
    let expected = [
        "is killed: kill -9",
        "the relay is started again",
        "ROLLBACK  order",
        "lost 0",
        "out of order 0",
        "arrived 0",
    ];
    for words in expected.iter().chain(of_its_own) {
        assert!(show.said.contains(words), "it does not say `{words}`:\n{}", show.said);
    }
    assert!(!show.said.contains('\x1b'), "no colours without a terminal");
    show.assert_nothing_left();
}

#[test]
fn demo_interrupted_leaves_nothing_behind() {
    let mut show = Show::begin();
    show.listen(Some("COMMIT   order"));
    assert!(!processes_of(show.place.path()).is_empty(), "the database runs in the folder");
    show.send(Signal::SIGINT);
    show.listen(None);
    let status = show.demo.wait().expect("the demo ends");
    assert!(status.success() && show.said.contains("Stopped"), "{status}\n{}", show.said);
    show.assert_nothing_left();
}

#[test]
fn demo_interrupted_while_it_starts_leaves_nothing_behind() {
    let mut show = Show::begin();
    show.listen(Some("Making a database cluster"));
    show.send(Signal::SIGTERM);
    show.listen(None);
    assert!(show.demo.wait().expect("the demo ends").success(), "{}", show.said);
    show.assert_nothing_left();
}

#[test]
fn demo_killed_leaves_nothing_behind() {
    let mut show = Show::begin();
    show.listen(Some("COMMIT   order"));
    show.send(Signal::SIGKILL);
    show.demo.wait().expect("the demo ends");
    show.assert_nothing_left();
}

#[test]
fn demo_on_mysql_interrupted_or_killed_leaves_nothing_behind() {
    // MariaDB's data are made by a script, which starts a server: the end of the one must be that of the other.
    for (source, moment, signal) in [
        ("mysql", "Making a data folder", Signal::SIGTERM),
        ("mariadb", "Making a data folder", Signal::SIGTERM),
        ("mysql", "COMMIT   order", Signal::SIGKILL),
        ("mariadb", "COMMIT   order", Signal::SIGINT),
    ] {
        interrupted_leaves_nothing_behind(Show::begin_on(source), moment, signal);
    }
}

#[test]
fn demo_on_mongodb_interrupted_or_killed_leaves_nothing_behind() {
    for (moment, signal) in [
        ("Starting MongoDB", Signal::SIGTERM),
        ("Making a replica set", Signal::SIGKILL),
        ("COMMIT   order", Signal::SIGKILL),
        ("COMMIT   order", Signal::SIGINT),
    ] {
        interrupted_leaves_nothing_behind(Show::begin_on("mongodb"), moment, signal);
    }
}

fn interrupted_leaves_nothing_behind(mut show: Show, moment: &str, signal: Signal) {
    show.listen(Some(moment));
    show.send(signal);
    show.listen(None);
    let status = show.demo.wait().expect("the demo ends");
    assert_eq!(status.success(), signal != Signal::SIGKILL, "{status}\n{}", show.said);
    show.assert_nothing_left();
}

#[test]
fn demo_without_a_server_says_what_to_install() {
    for (source, words) in [("mysql", "no MySQL 8.0"), ("mongodb", "no MongoDB 4.4")] {
        let mut demo = Command::new(env!("CARGO_BIN_EXE_outboxd"));
        let demo =
            demo.args(["demo", "--source", source]).env("PATH", "/usr/bin:/bin").output().expect("the demo runs");
        let said = String::from_utf8_lossy(&demo.stderr);
        // A machine that has one in a usual place shows it.
        if demo.status.success() {
            continue;
        }
        assert_eq!(demo.status.code(), Some(1), "{said}");
        assert!(said.contains(words) && said.contains("install it"), "{source}: {said}");
    }
}

#[test]
fn demo_refuses_a_server_that_will_not_do() {
    let nothing = tempfile::tempdir().expect("a temporary folder");
    let missing = nothing.path().join("mysqld").display().to_string();
    for (arguments, code, words) in [
        (vec!["--source", "mysql", "--server-program", &missing], 2, "there is no such program"),
        (vec!["--source", "mariadb", "--server-program", "/bin/true"], 2, "does not tell its version"),
        (vec!["--source", "mongodb", "--server-program", "/bin/true"], 2, "does not tell its version"),
        (vec!["--source", "mysql", "--postgres-bin", "/nowhere"], 2, "--server-program"),
        (vec!["--source", "mongodb", "--postgres-bin", "/nowhere"], 2, "--server-program"),
        (vec!["--server-program", &missing], 2, "--postgres-bin"),
    ] {
        let demo = Command::new(env!("CARGO_BIN_EXE_outboxd")).arg("demo").args(&arguments).output();
        let demo = demo.expect("the demo runs");
        let said = String::from_utf8_lossy(&demo.stderr);
        assert_eq!(demo.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?} says {said}");
    }
}
