//! What a look at a pipeline's two ends finds: every problem at once, each with what mends it. Looking changes nothing.

use serde::Serialize;

use crate::source::SourceFailure;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// A run starts, and someone should know this before it hurts.
    Warn,
    /// A run does not start.
    Fail,
}

#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// A stable word for scripts: `wal-level`, `slot`, `topic`, …
    pub check: &'static str,
    pub verdict: Verdict,
    /// What was found, and on what.
    pub what: String,
    /// The statement or command that mends it; empty where nothing needs mending.
    pub remedy: String,
}

/// The findings of one side, in the order they were made.
#[derive(Debug, Default)]
pub struct Report(Vec<Finding>);

impl Report {
    pub fn ok(&mut self, check: &'static str, what: impl Into<String>) {
        self.0.push(Finding { check, verdict: Verdict::Ok, what: what.into(), remedy: String::new() });
    }

    pub fn warn(&mut self, check: &'static str, what: impl Into<String>, remedy: impl Into<String>) {
        self.0.push(Finding { check, verdict: Verdict::Warn, what: what.into(), remedy: remedy.into() });
    }

    pub fn fail(&mut self, check: &'static str, what: impl Into<String>, remedy: impl Into<String>) {
        self.0.push(Finding { check, verdict: Verdict::Fail, what: what.into(), remedy: remedy.into() });
    }

    /// Keeps a failure as a finding; what was asked for, if there was none.
    pub fn told<T>(&mut self, check: &'static str, result: Result<T, SourceFailure>) -> Option<T> {
        result.map_err(|failure| self.refused(check, failure)).ok()
    }

    pub fn refused(&mut self, check: &'static str, failure: SourceFailure) {
        match failure {
            SourceFailure::NotReady { what, remedy }
            | SourceFailure::Misconfigured { what, remedy }
            | SourceFailure::PositionLost { what, remedy }
            | SourceFailure::Undecodable { what, remedy } => self.fail(check, what, remedy),
            SourceFailure::Transient { what } | SourceFailure::Held { what } | SourceFailure::Restart { what } => self
                .fail(
                    check,
                    what,
                    "make sure that the server runs and that host and port in SOURCE lead to it from here",
                ),
        }
    }

    pub fn into_findings(self) -> Vec<Finding> {
        self.0
    }
}
