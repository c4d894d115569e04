//! Catching up, shown: a bar on a terminal, elsewhere a line in the log now and then; never both.
//!
//! It is read off the pipelines' status, so the relay does no work for it. How much is left is told in what the source
//! counts: bytes of log, pending rows, or the time that delivery is behind.

use std::collections::VecDeque;
use std::io::{IsTerminal as _, stderr, stdout};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::Instant;

use super::{logging, table};
use crate::config::{LogFormat, Settings, SinkSettings};
use crate::figures;
use crate::status::{PipelineStatus, Snapshot, State};

/// From here on a pipeline is behind, …
const BEHIND_SECONDS: f64 = 3.0;
const BEHIND_BYTES: u64 = 64 << 20;
const BEHIND_ROWS: u64 = 10_000;
/// … and from here on no longer.
const NEAR_SECONDS: f64 = 1.0;
const NEAR_BYTES: u64 = 16 << 20;
const NEAR_ROWS: u64 = 1_000;

/// Rates are those of the last while.
const WHILE: Duration = Duration::from_secs(10);
/// A rate of less than this tells nothing.
const SHORTEST: Duration = Duration::from_secs(2);
/// How often the log has a line.
const LINES: Duration = Duration::from_secs(10);

/// What is left is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    Bytes,
    Rows,
    Seconds,
}

impl Measure {
    /// What this source counts.
    fn of(seen: &Snapshot) -> Self {
        match (seen.depth, seen.lag_bytes) {
            (Some(rows), _) if rows > 0 => Measure::Rows,
            (_, Some(bytes)) if bytes > 0 => Measure::Bytes,
            _ => Measure::Seconds,
        }
    }

    fn left(self, seen: &Snapshot) -> f64 {
        match self {
            Measure::Bytes => seen.lag_bytes.unwrap_or(0) as f64,
            Measure::Rows => seen.depth.unwrap_or(0) as f64,
            Measure::Seconds => seen.lag_seconds,
        }
    }

    fn show(self, left: f64) -> String {
        match self {
            Measure::Bytes => format!("{} of log to go", figures::bytes(left as u64)),
            Measure::Rows => format!("{} rows to go", figures::count(left as u64)),
            Measure::Seconds => format!("{} behind", figures::span(left)),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    events: u64,
    left: f64,
}

/// One pipeline, from when it falls behind until it has caught up.
struct Run {
    since: Instant,
    events: u64,
    measure: Measure,
    /// The most that was left.
    most: f64,
    samples: VecDeque<Sample>,
}

/// How far a pipeline that catches up has come.
#[derive(Clone, Debug, PartialEq)]
struct Progress {
    /// Between 0 and 1.
    done: f64,
    delivered: u64,
    events_per_second: f64,
    to_go: String,
    seconds_left: Option<f64>,
    behind: f64,
}

#[derive(Clone, Debug, PartialEq)]
enum Seen {
    Nothing,
    CatchingUp(Progress),
    CaughtUp { delivered: u64, seconds: f64 },
}

#[derive(Default)]
struct Watched(Option<Run>);

impl Watched {
    fn look(&mut self, now: Instant, seen: &Snapshot) -> Seen {
        if seen.state != State::Streaming {
            self.0 = None;
            return Seen::Nothing;
        }
        let (bytes, rows) = (seen.lag_bytes.unwrap_or(0), seen.depth.unwrap_or(0));
        let Some(run) = &mut self.0 else {
            if seen.lag_seconds >= BEHIND_SECONDS || bytes >= BEHIND_BYTES || rows >= BEHIND_ROWS {
                let measure = Measure::of(seen);
                let (events, most) = (seen.events, measure.left(seen));
                let mut run = Run { since: now, events, measure, most, samples: VecDeque::new() };
                let progress = run.sample(now, seen);
                self.0 = Some(run);
                return Seen::CatchingUp(progress);
            }
            return Seen::Nothing;
        };
        if seen.lag_seconds < NEAR_SECONDS && bytes < NEAR_BYTES && rows < NEAR_ROWS {
            let (delivered, seconds) = (seen.events.saturating_sub(run.events), (now - run.since).as_secs_f64());
            self.0 = None;
            return Seen::CaughtUp { delivered, seconds };
        }
        Seen::CatchingUp(run.sample(now, seen))
    }
}

impl Run {
    fn sample(&mut self, now: Instant, seen: &Snapshot) -> Progress {
        let left = self.measure.left(seen);
        self.most = self.most.max(left);
        self.samples.push_back(Sample { at: now, events: seen.events, left });
        while self.samples.get(1).is_some_and(|second| now - second.at >= WHILE) {
            self.samples.pop_front();
        }
        let first = self.samples.front().copied().unwrap_or(Sample { at: now, events: seen.events, left });
        let took = now - first.at;
        let (mut events_per_second, mut seconds_left) = (0.0, None);
        if took >= SHORTEST {
            events_per_second = seen.events.saturating_sub(first.events) as f64 / took.as_secs_f64();
            let speed = (first.left - left) / took.as_secs_f64();
            seconds_left = (speed > 0.0).then(|| left / speed);
        }
        Progress {
            done: if self.most > 0.0 { (1.0 - left / self.most).clamp(0.0, 1.0) } else { 0.0 },
            delivered: seen.events.saturating_sub(self.events),
            events_per_second,
            to_go: self.measure.show(left),
            seconds_left,
            behind: seen.lag_seconds,
        }
    }
}

impl Progress {
    fn time_left(&self) -> String {
        self.seconds_left.map_or_else(|| "unknown".to_owned(), figures::span)
    }
}

/// Where progress is shown.
pub enum Way {
    Bars(MultiProgress),
    Lines,
}

impl Way {
    /// A bar where somebody looks and nothing else is written over it.
    pub fn of(settings: &Settings) -> Self {
        let publishers = || settings.pipelines.iter().flat_map(|pipeline| &pipeline.publishers);
        let records = publishers().any(|publisher| matches!(publisher.sink, SinkSettings::Stdout));
        let for_people = settings.process.log_format != Some(LogFormat::Json) && table::can_move();
        match stderr().is_terminal() && for_people && !(records && stdout().is_terminal()) {
            true => Way::Bars(logging::bars().clone()),
            false => Way::Lines,
        }
    }
}

/// Watches until it is dropped.
pub async fn watch(pipelines: Vec<Arc<PipelineStatus>>, way: Way) {
    let period = match way {
        Way::Bars(_) => Duration::from_millis(250),
        Way::Lines => Duration::from_secs(1),
    };
    let mut shown: Vec<_> = pipelines.iter().map(|_| Shown::default()).collect();
    let mut tick = tokio::time::interval(period);
    loop {
        tick.tick().await;
        for (pipeline, shown) in pipelines.iter().zip(&mut shown) {
            let seen = shown.watched.look(Instant::now(), &pipeline.snapshot());
            match &way {
                Way::Bars(bars) => shown.bar(bars, pipeline.name(), &seen),
                Way::Lines => shown.line(pipeline.name(), &seen),
            }
            if let Seen::CaughtUp { delivered, seconds } = seen {
                let rate = (delivered as f64 / seconds.max(0.001)).round() as u64;
                let seconds = seconds.round() as u64;
                tracing::info!(pipeline = pipeline.name(), delivered, seconds, events_per_second = rate, "caught up");
            }
        }
    }
}

/// What was last shown of a pipeline.
#[derive(Default)]
struct Shown {
    watched: Watched,
    bar: Option<ProgressBar>,
    line: Option<Line>,
}

struct Line {
    at: Instant,
    delivered: u64,
}

/// A bar has so many steps.
const STEPS: u64 = 1000;

impl Shown {
    fn bar(&mut self, bars: &MultiProgress, name: &str, seen: &Seen) {
        let Seen::CatchingUp(progress) = seen else {
            if let Some(bar) = self.bar.take() {
                bar.finish_and_clear();
                bars.remove(&bar);
            }
            return;
        };
        let bar = self.bar.get_or_insert_with(|| {
            let bar = bars.add(ProgressBar::new(STEPS));
            let painted = if table::may_colour() { "{bar:24.green}" } else { "{bar:24}" };
            let template = format!("{{prefix}} {painted} {{percent:>3}}% {{wide_msg}}");
            if let Ok(style) = ProgressStyle::with_template(&template) {
                bar.set_style(style.progress_chars("━╸─"));
            }
            bar.set_prefix(table::one_line(name));
            bar
        });
        bar.set_position((progress.done * STEPS as f64) as u64);
        let rate = figures::count(progress.events_per_second.round() as u64);
        bar.set_message(format!("{rate} events/s, {}, {} left", progress.to_go, progress.time_left()));
    }

    fn line(&mut self, name: &str, seen: &Seen) {
        let Seen::CatchingUp(progress) = seen else {
            self.line = None;
            return;
        };
        let (now, delivered) = (Instant::now(), progress.delivered);
        // A sink that takes nothing is told of by whoever waits for it.
        let due = self.line.as_ref().is_none_or(|last| now - last.at >= LINES && delivered > last.delivered);
        if !due {
            return;
        }
        self.line = Some(Line { at: now, delivered });
        tracing::info!(
            pipeline = name,
            delivered,
            events_per_second = progress.events_per_second.round() as u64,
            behind = figures::span(progress.behind),
            to_go = progress.to_go,
            left = progress.time_left(),
            "catching up"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(state: State, events: u64, lag_seconds: f64, lag_bytes: Option<u64>) -> Snapshot {
        Snapshot {
            name: "p".to_owned(),
            state,
            position: None,
            last_error: None,
            in_flight: 0,
            confirmed: 0,
            lag_bytes,
            lag_seconds,
            retained_bytes: 0,
            depth: None,
            held_back_by: None,
            marking: None,
            gap: None,
            events,
            unmatched: 0,
            dead_letters: 0,
            letters_waiting: None,
            leader: true,
            source_connected: true,
            sink_connected: true,
            idle_for: Duration::ZERO,
            in_state_for: Duration::ZERO,
            pruned: None,
            publishers: Vec::new(),
        }
    }

    fn progress(seen: Seen) -> Progress {
        let Seen::CatchingUp(progress) = seen else { panic!("{seen:?}") };
        progress
    }

    #[test]
    fn a_pipeline_that_keeps_up_shows_nothing() {
        let mut watched = Watched::default();
        let now = Instant::now();
        for (events, lag) in [(0, 0.0), (10, 0.4), (20, 2.0)] {
            assert_eq!(watched.look(now, &seen(State::Streaming, events, lag, Some(100))), Seen::Nothing);
        }
    }

    #[test]
    fn rate_and_time_left_come_from_the_last_while_and_the_end_is_told() {
        let mut watched = Watched::default();
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let first = progress(watched.look(at(0), &seen(State::Streaming, 100, 60.0, Some(1000 << 20))));
        assert_eq!((first.delivered, first.events_per_second, first.seconds_left), (0, 0.0, None));
        let half = progress(watched.look(at(5), &seen(State::Streaming, 5100, 60.0, Some(500 << 20))));
        assert_eq!((half.delivered, half.events_per_second), (5000, 1000.0));
        assert_eq!((half.done, half.seconds_left), (0.5, Some(5.0)));
        assert_eq!(half.to_go, "500.0 MiB of log to go");
        // What was faster long ago says nothing of now.
        for second in 6..=20 {
            let left = (500 - 10 * (second - 5)) << 20;
            watched.look(at(second), &seen(State::Streaming, 5100, 60.0, Some(left)));
        }
        let slow = progress(watched.look(at(21), &seen(State::Streaming, 5100, 60.0, Some(340 << 20))));
        assert_eq!((slow.events_per_second, slow.seconds_left), (0.0, Some(34.0)));
        let end = watched.look(at(22), &seen(State::Streaming, 9000, 0.2, Some(1 << 20)));
        assert_eq!(end, Seen::CaughtUp { delivered: 8900, seconds: 22.0 });
        assert_eq!(watched.look(at(23), &seen(State::Streaming, 9000, 0.2, Some(1 << 20))), Seen::Nothing);
    }

    #[test]
    fn without_bytes_the_time_behind_is_what_is_left() {
        let mut watched = Watched::default();
        let begin = Instant::now();
        watched.look(begin, &seen(State::Streaming, 0, 100.0, None));
        let later = progress(watched.look(begin + Duration::from_secs(4), &seen(State::Streaming, 400, 60.0, None)));
        assert_eq!((later.to_go.as_str(), later.seconds_left), ("1 min 0 s behind", Some(6.0)));
    }

    #[test]
    fn one_that_is_interrupted_begins_anew_and_has_not_caught_up() {
        let mut watched = Watched::default();
        let now = Instant::now();
        progress(watched.look(now, &seen(State::Streaming, 0, 100.0, None)));
        assert_eq!(watched.look(now, &seen(State::Retrying, 0, 0.0, None)), Seen::Nothing);
        assert_eq!(watched.look(now, &seen(State::Streaming, 0, 0.0, None)), Seen::Nothing);
    }
}
