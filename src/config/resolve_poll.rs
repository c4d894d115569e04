//! What was said of polling: the layout's own words where nothing was said.

use super::options::PipelineOptions;
use super::resolve::Resolver;
use std::time::Duration;

use super::settings::{Capture, PollSettings, PositionSettings, SourceSettings};
use super::values::Span;
use crate::route::layout::Layout;
use crate::source::poll::ledger::Patience;

impl Resolver {
    pub(super) fn capture(&mut self, said: &PipelineOptions, source: Option<&SourceSettings>) -> Option<Capture> {
        match said.capture.as_deref().unwrap_or_default() {
            "log" => {
                self.only_with_poll(said);
                Some(Capture::Log)
            }
            "poll" => self.poll(said, source),
            other => {
                self.problem("capture", format!("`{other}` is not a way of capture; there are `log` and `poll`"));
                None
            }
        }
    }

    fn poll(&mut self, said: &PipelineOptions, source: Option<&SourceSettings>) -> Option<Capture> {
        let layout = Layout::named(said.layout.as_deref().unwrap_or_default())?;
        if layout.keyed_by_tags {
            return Some(self.positions(said));
        }
        let Some(scheme) = layout.polling else {
            self.problem("capture", format!("the layout `{}` is read from the log only", layout.name));
            return None;
        };
        if let Some(SourceSettings::Postgres(source)) = source
            && !source.message_prefixes.is_empty()
        {
            self.problem("message-prefix", "messages are in the log only: leave it out, or use --capture log");
        }
        let mut span = |key: &str, said: Option<Span>, own| match said {
            Some(_) => self.duration(key, said),
            None => own,
        };
        let interval = span("poll-interval", said.poll_interval, scheme.interval);
        let first_backoff = span("retry-backoff", said.retry_backoff, scheme.first_backoff);
        let lease = span("lease", said.lease.or(said.stuck_after), scheme.lease);
        let batch = said.poll_batch.unwrap_or(scheme.batch);
        if batch == 0 {
            self.problem("poll-batch", "at least one row must be claimed at once");
        }
        let most = match said.max_retries {
            // So many tries after the first one.
            Some(retries) => retries + u32::from(scheme.counts_last),
            None => scheme.most,
        };
        let patience = Patience {
            most,
            counts_last: scheme.counts_last,
            fails_at_once: scheme.fails_at_once,
            first_backoff,
            longest_backoff: scheme.longest_backoff.max(first_backoff),
        };
        let worker = self.text("worker-id", said.worker_id.clone()).unwrap_or_else(worker);
        let longest_idle = scheme.longest_idle;
        Some(Capture::Poll(PollSettings { scheme, interval, batch, patience, lease, longest_idle, worker }))
    }

    /// An event store has neither claims nor retries of its own: it is read like a log.
    fn positions(&mut self, said: &PipelineOptions) -> Capture {
        let interval = match said.poll_interval {
            Some(_) => self.duration("poll-interval", said.poll_interval),
            None => Duration::from_secs(1),
        };
        let batch = said.poll_batch.unwrap_or(5000);
        if batch == 0 {
            self.problem("poll-batch", "at least one event must be read at once");
        }
        for (key, given) in [("lease", said.lease.is_some()), ("stuck-after", said.stuck_after.is_some())] {
            if given {
                self.problem(key, "is about claimed rows, and events of an event store are not claimed");
            }
        }
        let worker = self.text("worker-id", said.worker_id.clone()).unwrap_or_else(worker);
        Capture::Positions(PositionSettings { interval, batch, longest_idle: Duration::from_secs(60), worker })
    }

    fn only_with_poll(&mut self, said: &PipelineOptions) {
        let given = [
            ("poll-interval", said.poll_interval.is_some()),
            ("poll-batch", said.poll_batch.is_some()),
            ("lease", said.lease.is_some()),
            ("stuck-after", said.stuck_after.is_some()),
            ("worker-id", said.worker_id.is_some()),
        ];
        for (key, _) in given.iter().filter(|(_, given)| *given) {
            self.problem(key, "is about polling: it needs --capture poll");
        }
    }
}

/// What this process is called in claimed rows: no other's name, also after a restart.
fn worker() -> String {
    use std::hash::{BuildHasher as _, RandomState};
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    let random = RandomState::new().hash_one(std::time::Instant::now()) as u32;
    format!("{}/{}/{random:08x}", host.as_deref().unwrap_or("unknown"), std::process::id())
}
