//! The options of `outboxd confirm`, defined as those of a pipeline are. In the file they are a table of the pipeline's,
//! `[pipeline.NAME.confirm]`, so that a relay and its confirmer can share one file.

use clap::Args;
use serde::Deserialize;

use super::options;
use super::values::{self, Span};

/// What was said about confirming receipts, in one layer.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConfirmOptions {
    /// Consumer group, whose instances share the partitions [default: outboxd-confirm-<pipeline's name>]
    #[arg(long, env = "OUTBOXD_GROUP", value_name = "GROUP", help_heading = "Confirmation")]
    pub group: Option<String>,

    /// Records whose receipts are written in one statement, at the most
    #[arg(long, env = "OUTBOXD_BATCH", value_name = "RECORDS", default_value = "1000", help_heading = "Confirmation")]
    pub batch: Option<usize>,

    /// How long a record waits for others before its receipt is written
    #[arg(
        long,
        env = "OUTBOXD_INTERVAL",
        value_name = "DURATION",
        default_value = "100ms",
        help_heading = "Confirmation"
    )]
    pub interval: Option<Span>,

    /// Where a record has the id of its row: `header:NAME`, or `json:/pointer` into its value
    #[arg(
        long,
        env = "OUTBOXD_ID_FROM",
        value_name = "WHERE",
        default_value = "header:id",
        help_heading = "Confirmation"
    )]
    pub id_from: Option<String>,

    /// Only in the file, where the pipeline's own `topic` is the relay's: on the command line it is --topic.
    #[arg(skip)]
    #[serde(deserialize_with = "values::one_or_many")]
    pub topic: Vec<String>,
}

impl ConfirmOptions {
    pub fn defaults() -> Self {
        options::defaults()
    }

    /// This layer, and beneath it `lower` where this one says nothing.
    pub fn over(self, lower: Self) -> Self {
        ConfirmOptions {
            group: self.group.or(lower.group),
            batch: self.batch.or(lower.batch),
            interval: self.interval.or(lower.interval),
            id_from: self.id_from.or(lower.id_from),
            topic: if self.topic.is_empty() { lower.topic } else { self.topic },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_definitions() {
        let defaults = ConfirmOptions::defaults();
        assert_eq!((defaults.batch, defaults.interval), (Some(1000), Some("100ms".parse().unwrap())));
        assert_eq!(defaults.id_from.as_deref(), Some("header:id"));
    }

    #[test]
    fn every_option_has_an_environment_variable_and_a_key_of_its_name() {
        let error = toml::from_str::<ConfirmOptions>("no-such-key = 1").unwrap_err();
        for arg in options::definitions::<ConfirmOptions>() {
            let key = options::key(&arg);
            let variable = format!("OUTBOXD_{}", key.replace('-', "_").to_uppercase());
            assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(variable.as_str()));
            assert!(error.message().contains(&format!("`{key}`")), "{key} is not a key of the file");
        }
    }
}
