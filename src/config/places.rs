//! Where something was said, so that a mistake is pointed at: a flag, a variable, or a line and column of the file.

use std::collections::BTreeMap;

/// Where in a file the keys of one table stand.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The table itself.
    pub(super) table: String,
    /// Each key's value; keys of tables within it are joined by dots.
    pub(super) keys: BTreeMap<String, String>,
}

impl Places {
    pub(super) fn of(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }
}

/// What was said of a pipeline on the command line and in the environment, by the names of flags.
#[derive(Clone, Debug, Default)]
pub(super) struct Said {
    pub flags: Vec<String>,
    pub variables: Vec<String>,
    /// With several pipelines in a file the environment only fills in what the tables leave out.
    pub fills_in: bool,
}

impl Said {
    /// The flag or the variable that has the last word on a key, beside a file that may have said something.
    pub fn of(&self, key: &str, in_file: bool) -> Option<String> {
        let flag = if key == "source" { "SOURCE".to_owned() } else { format!("--{key}") };
        if in_file && self.fills_in {
            return None;
        }
        if self.flags.contains(&flag) {
            return Some(flag);
        }
        let variable = || format!("environment variable OUTBOXD_{}", key.replace('-', "_").to_ascii_uppercase());
        self.variables.contains(&flag).then(variable)
    }
}
