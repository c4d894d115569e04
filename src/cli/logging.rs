//! The log on stderr: lines for people on a terminal, JSON for machines, the level by RUST_LOG.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::config::LogFormat;

/// Starts logging for the process. Only the first call has an effect.
pub fn start(format: Option<LogFormat>) {
    start_at(format, LevelFilter::INFO);
}

/// For commands whose answer is what they print: only errors, unless RUST_LOG asks for more.
pub fn start_quietly(format: Option<LogFormat>) {
    start_at(format, LevelFilter::ERROR);
}

fn start_at(format: Option<LogFormat>, level: LevelFilter) {
    let terminal = stderr().is_terminal();
    let format = format.unwrap_or(if terminal { LogFormat::Text } else { LogFormat::Json });
    let mut level = EnvFilter::builder().with_default_directive(level.into()).from_env_lossy();
    // It tells again of every trouble that we tell of, and shows the whole of what RabbitMQ returns.
    let asked_for = std::env::var(EnvFilter::DEFAULT_ENV).is_ok_and(|said| said.contains("lapin"));
    if let (false, Ok(silence)) = (asked_for, "lapin=off".parse()) {
        level = level.add_directive(silence);
    }
    let log = tracing_subscriber::fmt().with_env_filter(level).with_writer(stderr);
    // A second start, as tests make, finds the first one's log in place: nothing to do about it.
    let _ = match format {
        LogFormat::Text => log.with_ansi(terminal).with_target(false).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
}
