//! What the demo says. Lines go to stdout as things happen; on a terminal one more line, at the bottom, is kept current,
//! and elsewhere the same is said every few seconds. Who has stopped reading, like `head`, disturbs nothing.

use std::cell::Cell;
use std::fmt::Display;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Without a terminal, the state is said this often.
const RESTATE: Duration = Duration::from_secs(2);

pub struct Stage {
    bottom: Option<ProgressBar>,
    colour: bool,
    stated: Cell<Option<Instant>>,
}

impl Stage {
    pub fn new() -> Self {
        let terminal = stdout().is_terminal();
        let colour = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let bottom = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Stage { bottom, colour, stated: Cell::new(None) }
    }

    pub fn line(&self, text: impl Display) {
        match &self.bottom {
            Some(bar) => bar.suspend(|| write_line(&text)),
            None => write_line(&text),
        }
    }

    /// A new scene.
    pub fn heading(&self, text: impl Display) {
        self.line(format_args!("\n{}", self.bold(text)));
    }

    /// The state of things, which replaces what was last said of it.
    pub fn state(&self, text: &str) {
        match &self.bottom {
            Some(bar) => bar.set_message(text.to_owned()),
            None if self.stated.get().is_none_or(|last| last.elapsed() >= RESTATE) => {
                self.stated.set(Some(Instant::now()));
                write_line(&format_args!("  · {text}"));
            }
            None => {}
        }
    }

    /// Says what is being waited for, and that it still is.
    pub async fn during<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let every = Duration::from_secs(if self.bottom.is_some() { 1 } else { 5 });
        let mut beat = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
        match &self.bottom {
            Some(bar) => bar.set_message(format!("{what} …")),
            None => write_line(&format_args!("  {what} …")),
        }
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = beat.tick() => {
                    let still = format!("{what} … {} s", began.elapsed().as_secs());
                    match &self.bottom {
                        Some(bar) => bar.set_message(still),
                        None => write_line(&format_args!("  {still}")),
                    }
                }
            }
        }
    }

    /// Takes the bottom line away; what follows is the last word.
    pub fn close(&self) {
        if let Some(bar) = &self.bottom {
            bar.finish_and_clear();
        }
    }

    pub fn bold(&self, text: impl Display) -> String {
        self.coloured("1", text)
    }

    pub fn dim(&self, text: impl Display) -> String {
        self.coloured("2", text)
    }

    pub fn good(&self, text: impl Display) -> String {
        self.coloured("32", text)
    }

    pub fn bad(&self, text: impl Display) -> String {
        self.coloured("1;31", text)
    }

    fn coloured(&self, code: &str, text: impl Display) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.close();
    }
}

fn write_line(text: &dyn Display) {
    let mut stdout = stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// `4.2 ms`, `3.1 s`.
pub fn span(span: Duration) -> String {
    let millis = span.as_secs_f64() * 1000.0;
    match millis {
        ..10.0 => format!("{millis:.1} ms"),
        ..1000.0 => format!("{millis:.0} ms"),
        _ => format!("{:.1} s", millis / 1000.0),
    }
}

/// `1 event`, `2 events`.
pub fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}
