//! What `init` makes. The tables' own statements are files under sql/ that run as they stand, with marked places that are
//! filled in. MongoDB's are JavaScript, where the marks are comments as well.

use std::time::Duration;

use crate::config::{Capture, DeadLetter, PipelineSettings, TableName};
use crate::event::Projection;
use crate::retention::rule;
use crate::route::polling;

/// How a database says it of a table with partitions.
pub struct Words {
    /// In the place of PRIMARY KEY behind the id.
    pub without_key: &'static str,
    /// With the timestamp where the question mark is.
    pub partition_by: &'static str,
    /// In the place of a unique key behind the sequence.
    pub plain_sequence: &'static str,
}

/// What is to be there, in a source whose settings are `S`.
pub struct Wanted<'a, S> {
    pub settings: &'a S,
    pub of: &'a PipelineSettings,
    pub projection: &'a Projection,
    /// The type of the payload column.
    pub payload: &'a str,
    /// Columns for polling, where the layout leaves them to choice.
    pub status_columns: bool,
    /// A trigger that wakes the poller.
    pub notify: bool,
    /// A table that is made has a partition for each day.
    pub by_day: bool,
    /// MongoDB deletes what was delivered longer ago than this.
    pub ttl: Option<Duration>,
}

impl<S> Wanted<'_, S> {
    /// Whether the log is read, which needs more than tables.
    pub fn is_log(&self) -> bool {
        matches!(self.of.capture, Capture::Log)
    }

    /// The layout `native`, with its columns for polling.
    pub fn is_native_status(&self) -> bool {
        let marked = self.of.marking().is_some_and(|marking| std::ptr::eq(marking.scheme, &polling::NATIVE));
        self.of.route.layout == "native" && (self.status_columns || marked || !self.is_log())
    }

    /// The column that was chosen for a role; a path into a message is none.
    pub fn column(&self, role: &str) -> Option<&str> {
        let chosen = self.of.route.columns.iter().rev().find(|(chosen, _)| chosen == role);
        chosen.map(|(_, column)| column.as_str()).filter(|column| !column.starts_with('/'))
    }

    /// What stands in a template of a table for its primary key and its partitions; `None` where it stays as written.
    pub fn partitioned(&self, mark: &str, quote: impl Fn(&str) -> String, words: &Words) -> Option<String> {
        let (id, timestamp) = (rule::id(self.of)?, rule::timestamp(self.of)?);
        match mark {
            "pk" if self.by_day => Some(words.without_key.to_owned()),
            "pk_line" if self.by_day => Some(format!(",\n    PRIMARY KEY ({}, {})", quote(&id), quote(&timestamp))),
            "partition_by" if self.by_day => Some(format!(" {}", words.partition_by.replace('?', &quote(&timestamp)))),
            "seq_key" if self.by_day => Some(words.plain_sequence.to_owned()),
            _ => None,
        }
    }

    /// The tables that dead letters go to, each once.
    pub fn letter_tables(&self) -> Vec<&TableName> {
        let mut tables: Vec<&TableName> = Vec::new();
        for publisher in &self.of.publishers {
            if let DeadLetter::Table(table) = &publisher.dead_letter
                && !tables.contains(&table)
            {
                tables.push(table);
            }
        }
        tables
    }
}

/// The template without its comments, with each `/*name*/ … /**/` replaced; what has no replacement stays as written.
pub fn fill(template: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let comment = |line: &&str| ["--", "//"].iter().any(|mark| line.trim_start().starts_with(mark));
    let statement = template.lines().filter(|line| !comment(line));
    let mut rest = &*statement.collect::<Vec<_>>().join("\n");
    let mut filled = String::new();
    while let Some((before, after)) = rest.split_once("/*") {
        filled.push_str(before);
        let (name, after) = after.split_once("*/").unwrap_or((after, ""));
        let (written, after) = after.split_once("/**/").unwrap_or((after, ""));
        filled.push_str(&value(name).unwrap_or_else(|| written.trim().to_owned()));
        rest = after;
    }
    filled.push_str(rest);
    filled
}

/// How a template defines a column, as `ADD COLUMN` takes it.
pub fn definition(template: &str, column: &str) -> Option<String> {
    let filled = fill(template, |_| None);
    let mut lines = filled.lines().map(|line| line.trim().trim_start_matches("ADD COLUMN "));
    let line = lines.find(|line| {
        let name = line.split_whitespace().next().unwrap_or_default();
        name.trim_matches(['"', '`']) == column
    });
    line.map(|line| line.trim_end_matches([',', ';']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_says_what_is_between_its_marks_unless_told_otherwise() {
        let template = "-- about\nCREATE TABLE /*table*/ outbox /**/ (/*id*/ id /**/ uuid)";
        assert_eq!(fill(template, |_| None), "CREATE TABLE outbox (id uuid)");
        let named = |name: &str| (name == "table").then(|| "\"x\"".to_owned());
        assert_eq!(fill(template, named), "CREATE TABLE \"x\" (id uuid)");
    }

    #[test]
    fn a_template_tells_how_it_defines_a_column() {
        let made = "CREATE TABLE outbox (\n    status text DEFAULT 'a, b',\n    -- When.\n    \"At\" timestamptz\n)";
        assert_eq!(definition(made, "status").as_deref(), Some("status text DEFAULT 'a, b'"));
        assert_eq!(definition(made, "At").as_deref(), Some("\"At\" timestamptz"));
        assert_eq!(definition("ALTER TABLE x\n    ADD COLUMN n int;", "n").as_deref(), Some("n int"));
        assert_eq!(definition(made, "sta"), None);
    }
}
