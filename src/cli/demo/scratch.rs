//! What must not outlive the demo: its temporary folder and its processes.
//!
//! Every ordinary way out drops them. For the extraordinary one, SIGKILL, the kernel tells the child processes that
//! their parent died, and a shell that waits for the end of a pipe from the demo sweeps the folder.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Gid, Pid, Uid, User, chown, geteuid};

use crate::cli::unexpected;
use crate::failure::Halt;

/// Who runs the database, which refuses to be run by root: another user then, else whoever runs the demo.
pub struct Account(Option<User>);

/// Users that have no rights anybody would miss, the one that is nearly everywhere first.
const UNPRIVILEGED: [&str; 6] = ["nobody", "postgres", "mysql", "daemon", "www-data", "games"];

impl Account {
    pub fn choose() -> Result<Account, Halt> {
        if !geteuid().is_root() {
            return Ok(Account(None));
        }
        let known = UNPRIVILEGED.iter().filter_map(|name| User::from_name(name).ok().flatten());
        let mut others = known.filter(|user| !user.uid.is_root()).map(|user| Account(Some(user)));
        let usable = |account: &Account| account.command("true").status().is_ok_and(|status| status.success());
        others.find(usable).ok_or_else(|| Halt {
            remedy: "run the demo as an ordinary user".to_owned(),
            ..unexpected("a database does not run as root, and no unprivileged user can be used here".to_owned())
        })
    }

    /// The other user's name, when there is one.
    pub fn other(&self) -> Option<&str> {
        self.0.as_ref().map(|user| user.name.as_str())
    }

    fn ids(&self) -> Option<(Uid, Gid)> {
        self.0.as_ref().map(|user| (user.uid, user.gid))
    }

    /// A command to be run by this user, untouched by the settings of whoever runs the demo.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        without_settings(&mut command).env("LC_ALL", "C").stdin(Stdio::null()).current_dir("/");
        if let Some((uid, gid)) = self.ids() {
            command.uid(uid.as_raw()).gid(gid.as_raw()).env("HOME", "/");
        }
        command
    }

    pub fn own(&self, path: &Path) -> Result<(), Halt> {
        let Some((uid, gid)) = self.ids() else { return Ok(()) };
        let given = chown(path, Some(uid), Some(gid));
        given.map_err(|error| unexpected(format!("cannot give {} to the database's user: {error}", path.display())))
    }

    /// Whether this user can get into the folder, as far as the modes tell.
    fn reaches(&self, folder: &Path) -> bool {
        let open = |folder: &Path| folder.metadata().is_ok_and(|found| found.permissions().mode() & 0o001 != 0);
        self.0.is_none() || folder.ancestors().all(open)
    }
}

/// How the names begin that the databases' programs and outboxd itself read from the environment.
const SETTINGS: [&str; 4] = ["PG", "MYSQL_", "MARIADB_", "OUTBOXD_"];

/// Removes them.
pub fn without_settings(command: &mut Command) -> &mut Command {
    let settings = std::env::vars_os().map(|(name, _)| name);
    let ours = settings.filter(|name| SETTINGS.iter().any(|own| name.to_string_lossy().starts_with(own)));
    for name in ours {
        command.env_remove(name);
    }
    command
}

/// The temporary folder.
pub struct Scratch {
    folder: PathBuf,
    sweeper: Option<Child>,
}

/// Waits for the end of its input, then for the database to be down, and removes the folder.
const SWEEP: &str = r#"read line; for try in 1 2 3 4 5 6 7 8 9 10; do sleep 1; rm -rf -- "$0" && exit; done"#;

impl Scratch {
    pub fn create(account: &Account) -> Result<Scratch, Halt> {
        let places = [std::env::temp_dir(), "/tmp".into(), "/var/tmp".into()];
        let place = places.iter().find(|place| place.is_dir() && account.reaches(place));
        let place = place.ok_or_else(|| Halt {
            remedy: "set TMPDIR to a folder that every user can enter".to_owned(),
            ..unexpected("there is no temporary folder that the database's user can enter".to_owned())
        })?;
        let folder = place.join(format!("outboxd-demo-{}", token(4)?));
        let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|error| unexpected(format!("cannot make the folder {}: {error}", folder.display())))?;
        let mut scratch = Scratch { folder, sweeper: None };
        account.own(&scratch.folder)?;
        let sweeper = Command::new("sh")
            .args(["-c", SWEEP])
            .arg(&scratch.folder)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        // Only a demo that is killed misses it.
        scratch.sweeper = sweeper.ok();
        Ok(scratch)
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A process that is just dying may still put a file into it.
        for _ in 0..20 {
            let removed = std::fs::remove_dir_all(&self.folder);
            if removed.is_ok() || !self.folder.exists() {
                if let Some(sweeper) = &mut self.sweeper {
                    end(sweeper, Signal::SIGKILL, Duration::ZERO);
                }
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Ties a process to this one: it dies with it, and Ctrl-C on the terminal does not reach it, so that the demo decides
/// when it ends. To be spawned on the main thread: the kernel goes by the end of the thread that spawned it.
pub fn tie(command: &mut Command, farewell: Signal) -> &mut Command {
    command.process_group(0);
    #[cfg(target_os = "linux")]
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and allocates nothing.
    unsafe {
        command.pre_exec(move || nix::sys::prctl::set_pdeathsig(farewell).map_err(Into::into));
    }
    #[cfg(not(target_os = "linux"))]
    let _ = farewell;
    command
}

/// Ends a process by the signal, or by SIGKILL when it takes longer than `patience`, and waits for its end.
pub fn end(child: &mut Child, signal: Signal, patience: Duration) {
    let deadline = Instant::now() + patience;
    // The process is not reaped yet, so that the number is still its own.
    if matches!(child.try_wait(), Ok(None)) {
        let _ = kill(Pid::from_raw(child.id().cast_signed()), signal);
        while Instant::now() < deadline && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = child.kill();
    }
    let _ = child.wait();
}

/// A [tied](tie) process that starts others: when this is dropped, all of them end.
pub struct Troupe(Option<Pid>);

impl Troupe {
    pub fn of(leader: u32) -> Troupe {
        Troupe(Some(Pid::from_raw(leader.cast_signed())))
    }

    /// The leader was waited for: its number may soon be another's.
    pub fn is_gone(&mut self) {
        self.0 = None;
    }
}

impl Drop for Troupe {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            let _ = killpg(leader, Signal::SIGKILL);
        }
    }
}

/// A new log, for both outputs of a process.
pub fn log_file(path: &Path) -> Result<(File, File), Halt> {
    let both = File::options().create(true).append(true).open(path).and_then(|log| Ok((log.try_clone()?, log)));
    both.map_err(|error| unexpected(format!("cannot write {}: {error}", path.display())))
}

/// Random bytes in hexadecimal: a password, or a name that nobody else has.
pub fn token(bytes: usize) -> Result<String, Halt> {
    use ring::rand::SecureRandom as _;
    let mut random = vec![0; bytes];
    let filled = ring::rand::SystemRandom::new().fill(&mut random);
    filled.map_err(|_| unexpected("the system gives no random numbers".to_owned()))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A port that is free now.
pub fn free_port() -> Result<u16, Halt> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
    let address = listener.and_then(|listener| listener.local_addr());
    Ok(address.map_err(|error| unexpected(format!("no free port on the loopback address: {error}")))?.port())
}

/// The end of a log, for a message.
pub fn last_lines(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    let last = lines.iter().skip(lines.len().saturating_sub(15));
    last.map(|line| format!("\n    {line}")).collect()
}
