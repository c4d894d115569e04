//! Values that must not be shown, and values kept elsewhere.
//!
//! A value is a literal, `file:/path` or `env:NAME`. A reference is followed anew at each use, so that a rotated
//! password is picked up at the next connect without a restart.

use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;

use super::problem::{ConfigError, Problem};

/// A value that may be secret: neither Debug nor Display shows it, only where it is kept.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub struct Secret(Kept);

#[derive(Clone, PartialEq, Eq)]
enum Kept {
    Here(String),
    File(PathBuf),
    Env(String),
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        if let Some(path) = text.strip_prefix("file:") {
            // `file:///run/secrets/x` is how a URL would say it.
            let path = path.strip_prefix("//").filter(|rest| rest.starts_with('/')).unwrap_or(path);
            Secret(Kept::File(path.into()))
        } else if let Some(name) = text.strip_prefix("env:") {
            Secret(Kept::Env(name.to_owned()))
        } else {
            Secret(Kept::Here(text))
        }
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl Secret {
    /// A value that is what it is, even if it begins like a reference.
    pub fn literal(text: impl Into<String>) -> Self {
        Secret(Kept::Here(text.into()))
    }

    /// The value as it is now. A file's last line break is not part of it.
    pub fn reveal(&self) -> Result<String, ConfigError> {
        match &self.0 {
            Kept::Here(text) => Ok(text.clone()),
            Kept::File(path) => match std::fs::read_to_string(path) {
                Ok(text) => Ok(text.trim_end_matches(['\r', '\n']).to_owned()),
                Err(error) => Err(Problem::new(self.to_string(), format!("cannot be read: {error}")).into()),
            },
            Kept::Env(name) => match std::env::var_os(name).map(|value| value.into_string()) {
                Some(Ok(text)) => Ok(text),
                Some(Err(_)) => Err(Problem::new(self.to_string(), "is not UTF-8").into()),
                None => Err(Problem::new(self.to_string(), "is not set in the environment").into()),
            },
        }
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kept::Here(_) => f.write_str("***"),
            Kept::File(path) => write!(f, "file:{}", path.display()),
            Kept::Env(name) => write!(f, "env:{name}"),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_literal_secret_is_never_shown() {
        let secret = Secret::from("hunter2");
        assert_eq!(format!("{secret} {secret:?}"), "*** Secret(***)");
        assert_eq!(secret.reveal().unwrap(), "hunter2");
    }

    #[test]
    fn a_secret_file_is_read_anew_at_each_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        let secret = Secret::from(format!("file:{}", path.display()));
        assert!(secret.reveal().unwrap_err().to_string().contains("cannot be read"));
        std::fs::write(&path, "old\n").unwrap();
        assert_eq!(secret.reveal().unwrap(), "old");
        std::fs::write(&path, "new\r\n").unwrap();
        assert_eq!(secret.reveal().unwrap(), "new");
        assert!(!format!("{secret:?}").contains("new"));
    }

    #[test]
    fn a_file_url_names_the_same_file() {
        assert_eq!(Secret::from("file:///run/secrets/x"), Secret::from("file:/run/secrets/x"));
    }

    #[test]
    fn a_missing_environment_variable_is_named() {
        let error = Secret::from("env:OUTBOXD_TEST_NOT_SET").reveal().unwrap_err();
        assert_eq!(error.to_string(), "env:OUTBOXD_TEST_NOT_SET: is not set in the environment");
        assert_eq!(Secret::from("env:PATH").reveal().unwrap(), std::env::var("PATH").unwrap());
    }
}
