//! The server program of MySQL or MariaDB: named, on PATH, or in the usual places.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::installed::{self, Version};
use super::scratch::Account;
use crate::failure::{ExitCode, Halt};
use crate::source::mysql::session::Flavor;

/// What servers are called; MariaDB's by either name.
const NAMES: [&str; 2] = ["mariadbd", "mysqld"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerProgram {
    pub path: PathBuf,
    pub flavor: Flavor,
    version: Version,
}

impl ServerProgram {
    pub fn version(&self) -> String {
        self.version.to_string()
    }

    pub fn find(flavor: Flavor, named: Option<&Path>, account: &Account) -> Result<ServerProgram, Halt> {
        if let Some(path) = named {
            return inspect(path, flavor, account).map_err(|why| Halt {
                code: ExitCode::Usage,
                what: format!("--server-program {}: {why}", path.display()),
                remedy: format!("name {flavor}'s server, {} or newer, or leave it out", oldest(flavor)),
            });
        }
        find_in(&installed::folders(flavor.name()), flavor, account).ok_or_else(|| Halt {
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

/// The first that will do. A `mysqld` may be MariaDB's: which one it is it says itself.
fn find_in(folders: &[PathBuf], flavor: Flavor, account: &Account) -> Option<ServerProgram> {
    installed::programs(folders, &NAMES).find_map(|place| inspect(&place, flavor, account).ok())
}

/// Whether the program will do.
fn inspect(program: &Path, flavor: Flavor, account: &Account) -> Result<ServerProgram, String> {
    let (path, (found, version)) = installed::ask(program, account, version)?;
    if found != flavor {
        return Err(format!("it is {found}, which --source {} is for", found.name()));
    }
    let new_enough = match flavor {
        Flavor::MySql => version >= Version(8, 0, 13),
        Flavor::MariaDb => version >= Version(10, 5, 0),
    };
    match new_enough {
        true => Ok(ServerProgram { path, flavor, version }),
        false => Err(format!("it is {flavor} {version}, which is too old")),
    }
}

/// From `mysqld  Ver 8.4.3 for Linux on x86_64 (…)` or `mariadbd  Ver 11.4.5-MariaDB for …`.
fn version(answer: &str) -> Option<(Flavor, Version)> {
    let (_, after) = answer.split_once("Ver ")?;
    let flavor = if answer.contains("MariaDB") { Flavor::MariaDb } else { Flavor::MySql };
    Some((flavor, Version::beginning(after)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_servers_tell_them() {
        for (answer, expected) in [
            ("/usr/sbin/mysqld  Ver 9.7.4-2 for Linux on x86_64 ((Debian))", Some((Flavor::MySql, Version(9, 7, 4)))),
            ("mysqld  Ver 8.0.36-28 for Linux (Percona Server (GPL))", Some((Flavor::MySql, Version(8, 0, 36)))),
            (
                "mysqld  Ver 11.4.5-MariaDB for linux-systemd (MariaDB Server)",
                Some((Flavor::MariaDb, Version(11, 4, 5))),
            ),
            ("bash: no such thing", None),
        ] {
            assert_eq!(version(answer), expected, "{answer}");
        }
    }

    /// A folder with a server that tells this version.
    fn install(parent: &Path, folder: &str, program: &str, version: &str) -> PathBuf {
        installed::tests::install(parent, folder, program, &format!("{program} Ver {version} for Linux"))
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
