//! `outboxd check` and `outboxd init` as a user runs them: what they print, and how they end.

use std::process::{Output, Stdio};

/// A command that has ended.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Runs outboxd to its end.
pub async fn outboxd(arguments: &[&str]) -> Ended {
    let Output { status, stdout, stderr } = tokio::process::Command::new(env!("CARGO_BIN_EXE_outboxd"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .await
        .expect("outboxd starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("outboxd writes UTF-8");
    let code = status.code().unwrap_or_else(|| panic!("outboxd ended by {status}"));
    Ended { code, stdout: text(stdout), stderr: text(stderr) }
}

/// What `check` found.
#[derive(Debug)]
pub struct Checked {
    pub code: i32,
    findings: Vec<Found>,
}

#[derive(Debug)]
pub struct Found {
    pub check: String,
    pub subject: String,
    pub publisher: Option<String>,
    pub verdict: String,
    pub what: String,
    pub remedy: String,
}

impl Found {
    /// The statements that the remedy begins with; what follows them is for people.
    pub fn statements(&self) -> Vec<&str> {
        const SQL: [&str; 6] = ["ALTER ", "CREATE ", "GRANT ", "SELECT ", "DROP ", "DELETE "];
        let parts = self.remedy.split("; ");
        parts.take_while(|part| SQL.iter().any(|word| part.starts_with(word))).collect()
    }
}

pub async fn check(arguments: &[&str]) -> Checked {
    let mut all = vec!["check", "--json"];
    all.extend(arguments);
    let ended = outboxd(&all).await;
    let lines: Vec<serde_json::Value> =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    let found = |line: &serde_json::Value| {
        let text = |name: &str| line[name].as_str().unwrap_or_else(|| panic!("no {name} in {line}")).to_owned();
        Found {
            check: text("check"),
            subject: text("subject"),
            publisher: line["publisher"].as_str().map(str::to_owned),
            verdict: text("status"),
            what: text("seen"),
            remedy: text("remedy"),
        }
    };
    Checked { code: ended.code, findings: lines.iter().map(found).collect() }
}

impl Checked {
    /// The checks that failed, in order.
    pub fn failed(&self) -> Vec<&str> {
        self.with("fail").map(|found| found.check.as_str()).collect()
    }

    fn with(&self, verdict: &str) -> impl Iterator<Item = &Found> {
        self.findings.iter().filter(move |found| found.verdict == verdict)
    }

    /// The failure of this check that says these words.
    #[track_caller]
    pub fn fails(&self, check: &str, words: &str) -> &Found {
        self.find("fail", check, words)
    }

    #[track_caller]
    pub fn warns(&self, check: &str, words: &str) -> &Found {
        self.find("warn", check, words)
    }

    #[track_caller]
    pub fn is_fine(&self, check: &str, words: &str) -> &Found {
        self.find("ok", check, words)
    }

    #[track_caller]
    fn find(&self, verdict: &str, check: &str, words: &str) -> &Found {
        let found = self.with(verdict).find(|found| found.check == check && found.what.contains(words));
        let found = found.unwrap_or_else(|| panic!("no {verdict} of {check} with `{words}`: {self:#?}"));
        assert!(verdict == "ok" || !found.remedy.is_empty(), "without a remedy: {found:?}");
        found
    }

    #[track_caller]
    pub fn would_start(&self) {
        assert_eq!((self.failed(), self.code), (vec![], 0), "{self:#?}");
    }

    /// Exactly these checks failed, and the exit says on which side.
    #[track_caller]
    pub fn fails_only(&self, checks: &[&str], code: i32) {
        assert_eq!((self.failed(), self.code), (checks.to_vec(), code), "{self:#?}");
    }
}
