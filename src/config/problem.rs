//! What is wrong with a configuration: always a list, so that a user mends everything in one go.

use std::fmt;

use thiserror::Error;

use crate::failure::{ExitCode, Halt};

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// `orders.toml:3:7`, `--slot`, `pipeline orders: slot`, `environment variable PGPASSWORD`.
    pub place: String,
    pub what: String,
}

impl Problem {
    pub fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Problem { place: place.into(), what: what.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// A configuration that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{}", listed(.problems))]
pub struct ConfigError {
    pub problems: Vec<Problem>,
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        ConfigError { problems: vec![problem] }
    }
}

impl From<ConfigError> for Halt {
    fn from(error: ConfigError) -> Self {
        Halt { code: ExitCode::Usage, what: error.to_string(), remedy: String::new() }
    }
}

fn listed(problems: &[Problem]) -> String {
    match problems {
        [only] => only.to_string(),
        several => several.iter().fold(format!("the configuration has {} problems", several.len()), |list, problem| {
            format!("{list}\n  {problem}")
        }),
    }
}

/// The candidate a mistyped word most likely means.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(word, candidate), candidate))
        .filter(|(similarity, _)| *similarity > 0.7)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}
