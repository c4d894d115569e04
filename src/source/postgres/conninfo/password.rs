//! Where a password comes from: the address, the environment, a file, or libpq's password file. Files and variables
//! are read anew at every connect, so that rotating a password needs no restart.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// A password, or where to find it.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Secret {
    Plain(String),
    File(PathBuf),
    Variable(String),
}

impl Secret {
    pub(super) fn parse(value: &str) -> Self {
        if let Some(path) = value.strip_prefix("file:") {
            Secret::File(PathBuf::from(path))
        } else if let Some(name) = value.strip_prefix("env:") {
            Secret::Variable(name.to_owned())
        } else {
            Secret::Plain(value.to_owned())
        }
    }

    /// The password as it is now. The error says what could not be read.
    pub(super) fn read(&self, environment: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
        match self {
            Secret::Plain(password) => Ok(password.clone()),
            Secret::File(path) => fs::read_to_string(path)
                .map(|text| text.trim_end_matches(['\r', '\n']).to_owned())
                .map_err(|error| format!("the password file {} cannot be read: {error}", path.display())),
            Secret::Variable(name) => environment(name)
                .map(|text| text.trim_end_matches(['\r', '\n']).to_owned())
                .ok_or_else(|| format!("the environment variable {name}, which is to hold the password, is not set")),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Secret::Plain(_) => f.write_str("(hidden)"),
            Secret::File(path) => write!(f, "file:{}", path.display()),
            Secret::Variable(name) => write!(f, "env:{name}"),
        }
    }
}

/// What a line of the password file is compared with.
pub(super) struct Login<'a> {
    pub host: &'a str,
    pub port: u16,
    pub database: &'a str,
    pub user: &'a str,
}

/// The password of the first matching line. A missing file is no error; one that others can read is not used.
pub(super) fn from_passfile(path: &Path, login: &Login<'_>) -> Option<String> {
    let metadata = fs::metadata(path).ok()?;
    if !metadata.is_file() {
        tracing::warn!("the password file {} is not a plain file and is not used", path.display());
        return None;
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        if metadata.permissions().mode() & 0o077 != 0 {
            tracing::warn!("the password file {} can be read by others and is not used; chmod 0600 it", path.display());
            return None;
        }
    }
    match fs::read_to_string(path) {
        Ok(text) => in_passfile(&text, login),
        Err(error) => {
            tracing::warn!("the password file {} cannot be read: {error}", path.display());
            None
        }
    }
}

/// `host:port:database:user:password`, any of the first four `*`, with `\` before a literal `:` or `\`.
fn in_passfile(text: &str, login: &Login<'_>) -> Option<String> {
    let port = login.port.to_string();
    let wanted = [login.host, &port, login.database, login.user];
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let mut rest = line;
        for value in wanted {
            let (field, after) = field(rest)?;
            // An escaped star is a literal one, so look at the raw field.
            if &rest[..rest.len() - after.len()] != "*:" && field != value {
                return None;
            }
            rest = after;
        }
        let (password, _) = field(rest).unwrap_or_else(|| (unescape(rest), ""));
        Some(password)
    })
}

/// The text up to the next bare colon, unescaped, and what follows the colon.
fn field(text: &str) -> Option<(String, &str)> {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ':' => return Some((unescape(&text[..at]), &text[at + 1..])),
            _ => {}
        }
    }
    None
}

fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => plain.extend(chars.next()),
            c => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGIN: Login<'_> = Login { host: "db.example", port: 5432, database: "shop", user: "al:ice" };

    #[test]
    fn the_first_matching_line_of_a_passfile_wins() {
        let text = "# host:port:database:user:password\n\
                    other:5432:shop:al\\:ice:wrong\n\
                    db.example:5433:shop:al\\:ice:wrong\n\
                    db.example:*:shop:al\\:ice:r\\:ig\\\\ht\n\
                    *:*:*:*:late\n";
        assert_eq!(in_passfile(text, &LOGIN).as_deref(), Some("r:ig\\ht"));
        assert_eq!(in_passfile("*:*:*:*:any", &LOGIN).as_deref(), Some("any"));
    }

    #[test]
    fn lines_that_do_not_match_give_nothing() {
        for text in ["", "db.example:5432:shop", "\\*:*:*:*:x", "db.example:5432:shop:alice:x", "#*:*:*:*:x"] {
            assert_eq!(in_passfile(text, &LOGIN), None, "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_passfile_that_others_can_read_is_not_used() {
        use std::os::unix::fs::PermissionsExt as _;
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "*:*:*:*:secret\n").unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(from_passfile(file.path(), &LOGIN).as_deref(), Some("secret"));
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(from_passfile(file.path(), &LOGIN), None);
    }

    #[test]
    fn a_secret_is_read_anew_and_without_its_newline() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let secret = Secret::parse(&format!("file:{}", file.path().display()));
        for password in ["one", "two"] {
            fs::write(file.path(), format!("{password}\n")).unwrap();
            assert_eq!(secret.read(&|_| None), Ok(password.to_owned()));
        }
        let variable = Secret::parse("env:PW");
        assert_eq!(variable.read(&|name| (name == "PW").then(|| "three".to_owned())), Ok("three".to_owned()));
        assert!(variable.read(&|_| None).unwrap_err().contains("PW"));
        assert_eq!(format!("{:?}", Secret::parse("hunter2")), "(hidden)");
    }
}
