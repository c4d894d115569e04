//! Servers that are installed on the machine: where they are looked for, and how one is asked what it is. None is
//! fetched: there is no archive of MySQL, MariaDB or MongoDB that is small and runs everywhere.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::scratch::Account;

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

/// Those of PATH, then the usual ones of this database.
pub fn folders(database: &str) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = VERSIONED.iter().flat_map(|parent| {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        let its = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(database));
        its.map(|entry| entry.path().join("bin"))
    });
    std::env::split_paths(&path).chain(USUAL.iter().map(PathBuf::from)).chain(versions).collect()
}

/// The files of these names.
pub fn programs<'a>(folders: &'a [PathBuf], names: &'a [&str]) -> impl Iterator<Item = PathBuf> + 'a {
    let places = folders.iter().flat_map(move |folder| names.iter().map(move |name| folder.join(name)));
    places.filter(|place| place.is_file())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// Of a text that begins with it, as `8.0.36-28 for Linux`.
    pub fn beginning(text: &str) -> Option<Version> {
        let number = text.split_whitespace().next()?;
        let mut parts = number.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
        Some(Version(parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0)))
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Its path, and the version that `read` finds in its answer. The user who is to run it asks.
pub fn ask<V>(program: &Path, account: &Account, read: impl Fn(&str) -> Option<V>) -> Result<(PathBuf, V), String> {
    if !program.is_file() {
        return Err("there is no such program".to_owned());
    }
    // Of its own absolute path: the command is run elsewhere.
    let path = std::path::absolute(program).map_err(|error| error.to_string())?;
    let who = account.other().unwrap_or("this user");
    let answer = account.command(&path).arg("--version").stderr(Stdio::null()).output();
    let answer = answer.map_err(|error| format!("it does not run as {who}: {error}"))?;
    let version = read(&String::from_utf8_lossy(&answer.stdout));
    Ok((path, version.ok_or_else(|| format!("it does not tell its version to {who}"))?))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A folder that the database's user can enter, with a server that answers so.
    pub fn install(parent: &Path, folder: &str, program: &str, answer: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(parent, open.clone()).unwrap();
        let folder = parent.join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        let program = folder.join(program);
        std::fs::write(&program, format!("#!/bin/sh\necho '{answer}'\n")).unwrap();
        std::fs::set_permissions(&program, open).unwrap();
        folder
    }
}
