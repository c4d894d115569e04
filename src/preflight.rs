//! What a look at a pipeline's two ends finds: every check that was made, what was seen, and what mends it. Looking
//! changes nothing.

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
    /// On what: a server, a slot, a topic.
    pub subject: String,
    #[serde(rename = "status")]
    pub verdict: Verdict,
    pub seen: String,
    /// The statement or command that mends it; empty where nothing needs mending.
    pub remedy: String,
}

/// The findings of one side, in the order they were made.
#[derive(Debug, Default)]
pub struct Report {
    subject: String,
    findings: Vec<Finding>,
}

impl Report {
    pub fn about(subject: impl Into<String>) -> Self {
        Report { subject: subject.into(), findings: Vec::new() }
    }

    /// What follows is about this.
    pub fn on(&mut self, subject: impl Into<String>) -> &mut Self {
        self.subject = subject.into();
        self
    }

    fn add(&mut self, check: &'static str, verdict: Verdict, seen: String, remedy: String) {
        self.findings.push(Finding { check, subject: self.subject.clone(), verdict, seen, remedy });
    }

    pub fn ok(&mut self, check: &'static str, seen: impl Into<String>) {
        self.add(check, Verdict::Ok, seen.into(), String::new());
    }

    pub fn warn(&mut self, check: &'static str, seen: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, Verdict::Warn, seen.into(), remedy.into());
    }

    pub fn fail(&mut self, check: &'static str, seen: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, Verdict::Fail, seen.into(), remedy.into());
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

    /// How well a connection is protected. On this machine nobody else listens.
    pub fn tls(&mut self, protection: Protection<'_>, local: bool, remedy: &str) {
        const CHECK: &str = "tls";
        match protection {
            Protection::Verified(how) => self.ok(CHECK, format!("encrypted, and the server proves who it is ({how})")),
            Protection::Unverified(how) => match local {
                true => self.ok(CHECK, format!("encrypted ({how}), on this machine")),
                false => {
                    self.warn(CHECK, format!("encrypted, but whoever answers is taken for the server ({how})"), remedy)
                }
            },
            Protection::Plain(how) => match local {
                true => self.ok(CHECK, format!("not encrypted ({how}), on this machine")),
                false => self.warn(
                    CHECK,
                    format!("not encrypted ({how}): whoever listens in between reads events, and perhaps passwords"),
                    remedy,
                ),
            },
        }
    }

    pub fn into_findings(self) -> Vec<Finding> {
        self.findings
    }
}

/// How a connection is protected, and by which setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection<'a> {
    Verified(&'a str),
    Unverified(&'a str),
    Plain(&'a str),
}

/// Whether a host's name leads to this machine.
pub fn is_local(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host.starts_with('/')
        || host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_may_do_without_encryption() {
        let verdict = |protection, host| {
            let mut report = Report::about(host);
            report.tls(protection, is_local(host), "use TLS");
            report.into_findings()[0].verdict
        };
        assert_eq!(verdict(Protection::Plain("sslmode=disable"), "127.0.0.1"), Verdict::Ok);
        assert_eq!(verdict(Protection::Plain("sslmode=disable"), "/run/postgresql"), Verdict::Ok);
        assert_eq!(verdict(Protection::Plain("sslmode=prefer"), "db.internal"), Verdict::Warn);
        assert_eq!(verdict(Protection::Unverified("sslmode=require"), "[::1]"), Verdict::Ok);
        assert_eq!(verdict(Protection::Unverified("sslmode=require"), "db.internal"), Verdict::Warn);
        assert_eq!(verdict(Protection::Verified("sslmode=verify-full"), "db.internal"), Verdict::Ok);
    }
}
