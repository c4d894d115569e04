//! The server program of MySQL or MariaDB: named, on PATH, or in the usual places. Neither is fetched: there is no
//! archive of either that is small and runs everywhere.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::scratch::Account;
use crate::failure::{ExitCode, Halt};
use crate::source::mysql::session::Flavor;

/// Folders that packages put servers into and that need not be on PATH.
const USUAL: [&str; 9] = [
    "/usr/sbin",
    "/usr/libexec",
    "/usr/bin",
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/local/libexec",
    "/usr/local/mysql/bin",
    "/usr/local/mariadb/bin",
    "/opt/homebrew/bin",
];

/// Folders whose subfolders that begin like the database are versions, each with a `bin`.
const VERSIONED: [&str; 4] = ["/opt/homebrew/opt", "/usr/local/opt", "/usr/local", "/opt"];

/// What servers are called; MariaDB's by either name.
const NAMES: [&str; 2] = ["mariadbd", "mysqld"];

type Version = (u32, u32, u32);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerProgram {
    pub path: PathBuf,
    pub flavor: Flavor,
    version: Version,
}

impl ServerProgram {
    pub fn version(&self) -> String {
        format!("{}.{}.{}", self.version.0, self.version.1, self.version.2)
    }

    pub fn find(flavor: Flavor, named: Option<&Path>, account: &Account) -> Result<ServerProgram, Halt> {
        if let Some(path) = named {
            return inspect(path, flavor, account).map_err(|why| Halt {
                code: ExitCode::Usage,
                what: format!("--server-program {}: {why}", path.display()),
                remedy: format!("name {flavor}'s server, {} or newer, or leave it out", oldest(flavor)),
            });
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders: Vec<_> = std::env::split_paths(&path).chain(usual(flavor)).collect();
        find_in(&folders, flavor, account).ok_or_else(|| Halt {
            code: ExitCode::Unexpected,
            what: format!(
                "there is no {flavor} {} or newer on this machine, neither on PATH nor in the usual places",
                oldest(flavor)
            ),
            remedy: format!("{}, or name its server with --server-program", how_to_install(flavor)),
        })
    }

    /// A program that came with the server: beside it, or under its base folder.
    pub fn companion(&self, names: &[&str], base: &Path) -> Option<PathBuf> {
        let beside = self.path.parent().map(Path::to_owned);
        let folders = beside.into_iter().chain(["bin", "scripts", "sbin"].map(|folder| base.join(folder)));
        let mut places = folders.flat_map(|folder| names.iter().map(move |name| folder.join(name)));
        places.find(|place| place.is_file())
    }

    /// The folder that it was installed into: as it says itself, unless it was moved since, as what was unpacked from
    /// an archive is.
    pub fn base(&self, account: &Account) -> Option<PathBuf> {
        let answer = account.command(&self.path).args(["--verbose", "--help"]).stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8_lossy(&answer.stdout);
        let said = text.lines().find_map(|line| line.strip_prefix("basedir").filter(|rest| rest.starts_with(' ')));
        let above = self.path.parent().and_then(Path::parent);
        let holds_server = |base: &PathBuf| {
            let places = ["bin", "sbin", "libexec"].map(|folder| base.join(folder));
            base.is_absolute() && places.iter().any(|place| NAMES.iter().any(|name| place.join(name).is_file()))
        };
        let bases = [said.map(|said| PathBuf::from(said.trim())), above.map(Path::to_owned)];
        bases.into_iter().flatten().find(holds_server)
    }
}

/// The oldest whose log holds the names of columns.
fn oldest(flavor: Flavor) -> &'static str {
    match flavor {
        Flavor::MySql => "8.0",
        Flavor::MariaDb => "10.5",
    }
}

fn how_to_install(flavor: Flavor) -> &'static str {
    match flavor {
        Flavor::MySql => {
            "install it (Ubuntu: apt-get install mysql-server-core-8.0, macOS: brew install mysql, else from \
             https://dev.mysql.com/downloads)"
        }
        Flavor::MariaDb => "install it (Debian, Ubuntu: apt-get install mariadb-server, macOS: brew install mariadb)",
    }
}

fn usual(flavor: Flavor) -> impl Iterator<Item = PathBuf> {
    let versions = VERSIONED.iter().flat_map(move |parent| {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        let its = entries.filter(move |entry| entry.file_name().to_string_lossy().starts_with(flavor.name()));
        its.map(|entry| entry.path().join("bin"))
    });
    USUAL.iter().map(PathBuf::from).chain(versions)
}

/// The first that will do. A `mysqld` may be MariaDB's: which one it is it says itself.
fn find_in(folders: &[PathBuf], flavor: Flavor, account: &Account) -> Option<ServerProgram> {
    let places = folders.iter().flat_map(|folder| NAMES.iter().map(move |name| folder.join(name)));
    places.filter(|place| place.is_file()).find_map(|place| inspect(&place, flavor, account).ok())
}

/// Whether the program will do: the user who is to run it runs it to ask for its version.
fn inspect(program: &Path, flavor: Flavor, account: &Account) -> Result<ServerProgram, String> {
    if !program.is_file() {
        return Err("there is no such program".to_owned());
    }
    // Of its own absolute path: the command is run elsewhere.
    let path = std::path::absolute(program).map_err(|error| error.to_string())?;
    let who = account.other().unwrap_or("this user");
    let answer = account.command(&path).arg("--version").stderr(Stdio::null()).output();
    let answer = answer.map_err(|error| format!("it does not run as {who}: {error}"))?;
    let text = String::from_utf8_lossy(&answer.stdout);
    let (found, version) = version(&text).ok_or_else(|| format!("it does not tell its version to {who}"))?;
    if found != flavor {
        return Err(format!("it is {found}, which --source {} is for", found.name()));
    }
    let new_enough = match flavor {
        Flavor::MySql => version >= (8, 0, 13),
        Flavor::MariaDb => version >= (10, 5, 0),
    };
    match new_enough {
        true => Ok(ServerProgram { path, flavor, version }),
        false => Err(format!("it is {flavor} {}.{}.{}, which is too old", version.0, version.1, version.2)),
    }
}

/// From `mysqld  Ver 8.4.3 for Linux on x86_64 (…)` or `mariadbd  Ver 11.4.5-MariaDB for …`.
fn version(answer: &str) -> Option<(Flavor, Version)> {
    let (_, after) = answer.split_once("Ver ")?;
    let number = after.split_whitespace().next()?;
    let mut parts = number.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
    let version = (parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0));
    let flavor = if answer.contains("MariaDB") { Flavor::MariaDb } else { Flavor::MySql };
    Some((flavor, version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_servers_tell_them() {
        for (answer, expected) in [
            ("/usr/sbin/mysqld  Ver 9.7.4-2 for Linux on x86_64 ((Debian))", Some((Flavor::MySql, (9, 7, 4)))),
            ("mysqld  Ver 8.0.36-28 for Linux (Percona Server (GPL))", Some((Flavor::MySql, (8, 0, 36)))),
            ("mysqld  Ver 11.4.5-MariaDB for linux-systemd (MariaDB Server)", Some((Flavor::MariaDb, (11, 4, 5)))),
            ("bash: no such thing", None),
        ] {
            assert_eq!(version(answer), expected, "{answer}");
        }
    }

    /// A folder that the database's user can enter, with a server that tells this version.
    fn install(parent: &Path, folder: &str, program: &str, version: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(parent, open.clone()).unwrap();
        let folder = parent.join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        let program = folder.join(program);
        std::fs::write(&program, format!("#!/bin/sh\necho '{} Ver {version} for Linux'\n", program.display())).unwrap();
        std::fs::set_permissions(&program, open).unwrap();
        folder
    }

    #[test]
    fn a_server_of_the_other_kind_or_too_old_is_passed_over() {
        let place = tempfile::tempdir().unwrap();
        let account = Account::choose().unwrap();
        let folders = [
            install(place.path(), "a", "mysqld", "5.7.44"),
            install(place.path(), "b", "mysqld", "10.11.6-MariaDB"),
            install(place.path(), "c", "mysqld", "8.4.3"),
        ];
        let find =
            |flavor, folders| find_in(folders, flavor, &account).map(|found| (found.path.clone(), found.version()));
        assert_eq!(find(Flavor::MySql, &folders), Some((folders[2].join("mysqld"), "8.4.3".to_owned())));
        assert_eq!(find(Flavor::MariaDb, &folders), Some((folders[1].join("mysqld"), "10.11.6".to_owned())));
        assert_eq!(find(Flavor::MySql, &folders[..2]), None);
    }

    #[test]
    fn a_server_that_was_moved_is_found_to_stand_in_its_folder() {
        let place = tempfile::tempdir().unwrap();
        let account = Account::choose().unwrap();
        let folder = install(place.path(), "bin", "mariadbd", "11.4.5-MariaDB");
        let script = install(place.path(), "scripts", "mariadb-install-db", "").join("mariadb-install-db");
        let program = inspect(&folder.join("mariadbd"), Flavor::MariaDb, &account).unwrap();
        let base = program.base(&account).unwrap();
        assert_eq!(base, place.path());
        assert_eq!(program.companion(&["mysql_install_db", "mariadb-install-db"], &base), Some(script));
    }

    #[test]
    fn a_named_server_that_will_not_do_is_refused_with_the_reason() {
        let place = tempfile::tempdir().unwrap();
        let account = Account::choose().unwrap();
        let old = install(place.path(), "a", "mysqld", "5.7.44").join("mysqld");
        let maria = install(place.path(), "b", "mysqld", "11.4.5-MariaDB").join("mysqld");
        let refusal = |program: &Path| inspect(program, Flavor::MySql, &account).unwrap_err();
        assert_eq!(refusal(&place.path().join("mysqld")), "there is no such program");
        assert_eq!(refusal(&old), "it is MySQL 5.7.44, which is too old");
        assert_eq!(refusal(&maria), "it is MariaDB, which --source mariadb is for");
    }
}
