//! The options of the process, defined as those of a pipeline are.

use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;
use serde::Deserialize;

use super::options::{self, LogFormat};
use super::secret::Secret;

/// What was said about the process, in one layer.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ProcessOptions {
    /// TOML file with one or more pipelines
    #[arg(long, env = "OUTBOXD_CONFIG", value_name = "FILE", help_heading = "Operation")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Address of the page, health, metrics and orders, or `off`
    ///
    /// When the default is taken a free port is used and said; a taken address that was asked for is exit 2.
    #[arg(
        long,
        env = "OUTBOXD_ADMIN",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:7420",
        help_heading = "Operation"
    )]
    pub admin: Option<String>,

    /// Token for admin requests that change something or show payloads; without one they are refused unless the address is loopback
    #[arg(long, env = "OUTBOXD_ADMIN_TOKEN", value_name = "TOKEN", help_heading = "Operation")]
    pub admin_token: Option<Secret>,

    /// How the log on stderr is written; its level is RUST_LOG's [default: text on a terminal, json otherwise]
    #[arg(long, env = "OUTBOXD_LOG_FORMAT", value_enum, value_name = "FORMAT", help_heading = "Operation")]
    pub log_format: Option<LogFormat>,

    /// End the process as soon as one pipeline ends for good, instead of when all have
    #[arg(long, env = "OUTBOXD_FAIL_FAST", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), help_heading = "Operation")]
    pub fail_fast: Option<bool>,
}

impl ProcessOptions {
    pub fn defaults() -> Self {
        options::defaults()
    }

    pub fn over(self, lower: Self) -> Self {
        ProcessOptions {
            config: self.config.or(lower.config),
            admin: self.admin.or(lower.admin),
            admin_token: self.admin_token.or(lower.admin_token),
            log_format: self.log_format.or(lower.log_format),
            fail_fast: self.fail_fast.or(lower.fail_fast),
        }
    }
}
