//! MongoDB's server program: named, on PATH, or in the usual places.

use std::path::{Path, PathBuf};

use super::installed::{self, Version};
use super::scratch::Account;
use crate::failure::{ExitCode, Halt};

/// The oldest whose change streams tell a position without events.
const OLDEST: Version = Version(4, 4, 0);

const HOW_TO_INSTALL: &str = "install it (macOS: brew tap mongodb/brew and brew install mongodb-community, else from \
                              https://www.mongodb.com/try/download/community)";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mongod {
    pub path: PathBuf,
    pub version: Version,
}

impl Mongod {
    pub fn find(named: Option<&Path>, account: &Account) -> Result<Mongod, Halt> {
        let oldest = format!("{}.{}", OLDEST.0, OLDEST.1);
        if let Some(path) = named {
            return inspect(path, account).map_err(|why| Halt {
                code: ExitCode::Usage,
                what: format!("--server-program {}: {why}", path.display()),
                remedy: format!("name MongoDB's server, mongod {oldest} or newer, or leave it out"),
            });
        }
        find_in(&installed::folders("mongodb"), account).ok_or_else(|| Halt {
            code: ExitCode::Unexpected,
            what: format!(
                "there is no MongoDB {oldest} or newer on this machine, neither on PATH nor in the usual places"
            ),
            remedy: format!("{HOW_TO_INSTALL}, or name its server with --server-program"),
        })
    }
}

/// The first that will do.
fn find_in(folders: &[PathBuf], account: &Account) -> Option<Mongod> {
    installed::programs(folders, &["mongod"]).find_map(|place| inspect(&place, account).ok())
}

fn inspect(program: &Path, account: &Account) -> Result<Mongod, String> {
    let (path, version) = installed::ask(program, account, version)?;
    match version >= OLDEST {
        true => Ok(Mongod { path, version }),
        false => Err(format!("it is MongoDB {version}, which is too old")),
    }
}

/// From `db version v6.0.5`, with more on the lines that follow.
fn version(answer: &str) -> Option<Version> {
    let (_, after) = answer.split_once("db version v")?;
    Version::beginning(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_servers_tell_them() {
        for (answer, expected) in [
            ("db version v6.0.5\nBuild Info: {\n    \"version\": \"6.0.5\"", Some(Version(6, 0, 5))),
            ("db version v7.0.14-8\nBuild Info: {", Some(Version(7, 0, 14))),
            ("mongos version v6.0.5", None),
            ("mysqld  Ver 8.4.3 for Linux", None),
        ] {
            assert_eq!(version(answer), expected, "{answer}");
        }
    }

    #[test]
    fn a_server_that_is_too_old_is_passed_over_and_refused_when_named() {
        let place = tempfile::tempdir().unwrap();
        let account = Account::choose().unwrap();
        let install = |folder, version| {
            installed::tests::install(place.path(), folder, "mongod", &format!("db version v{version}"))
        };
        let folders = [install("a", "4.2.24"), install("b", "6.0.5")];
        let found = find_in(&folders, &account).unwrap();
        assert_eq!(found, Mongod { path: folders[1].join("mongod"), version: Version(6, 0, 5) });
        assert_eq!(find_in(&folders[..1], &account), None);
        let refused = inspect(&folders[0].join("mongod"), &account).unwrap_err();
        assert_eq!(refused, "it is MongoDB 4.2.24, which is too old");
    }
}
