//! The log on stderr: lines for people on a terminal, JSON for machines, the level by RUST_LOG. Where bars are drawn they
//! give way to each line.

use std::io::{self, IsTerminal, Write, stderr};
use std::sync::OnceLock;

use indicatif::MultiProgress;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

use super::table;
use crate::config::LogFormat;

static BARS: OnceLock<MultiProgress> = OnceLock::new();

/// The bars on stderr.
pub fn bars() -> &'static MultiProgress {
    BARS.get_or_init(MultiProgress::new)
}

/// Takes the bars away, for whoever writes to stderr himself.
pub fn clear_bars() {
    if let Some(bars) = BARS.get() {
        let _ = bars.clear();
    }
}

/// Writes to stderr, above the bars.
struct AboveBars;

impl Write for AboveBars {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match BARS.get() {
            Some(bars) => bars.suspend(|| stderr().write(line)),
            None => stderr().write(line),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        stderr().flush()
    }
}

impl MakeWriter<'_> for AboveBars {
    type Writer = AboveBars;

    fn make_writer(&self) -> AboveBars {
        AboveBars
    }
}

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
    let log = tracing_subscriber::fmt().with_env_filter(level).with_writer(AboveBars);
    // A second start, as tests make, finds the first one's log in place: nothing to do about it.
    let _ = match format {
        LogFormat::Text => log.with_ansi(terminal && table::may_colour()).with_target(false).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
}
