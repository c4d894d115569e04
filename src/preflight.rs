//! What a look at a pipeline's two ends finds: every problem at once, each with what mends it. Looking changes nothing.

use serde::Serialize;

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

    pub fn into_findings(self) -> Vec<Finding> {
        self.0
    }
}
