//! What the process itself takes of the machine, under the names that all clients of Prometheus use. Read when it is
//! scraped; what a system does not tell is left out.

use std::time::SystemTime;

#[cfg(unix)]
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
#[cfg(unix)]
use nix::sys::time::TimeValLike as _;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

#[derive(Debug)]
pub struct ProcessMetrics {
    /// Seconds since the epoch.
    started: f64,
}

impl ProcessMetrics {
    pub fn since_now() -> Self {
        let started = SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |age| age.as_secs_f64());
        ProcessMetrics { started }
    }
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut tell = |name: &str, help: &str, unit: Option<Unit>, metric: &dyn EncodeMetric| {
            let encoder = encoder.encode_descriptor(name, help, unit.as_ref(), metric.metric_type())?;
            metric.encode(encoder)
        };
        let start = ConstGauge::new(self.started);
        tell("process_start_time", "When the process started, since the epoch", Some(Unit::Seconds), &start)?;
        #[cfg(unix)]
        if let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) {
            let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
            let cpu = ConstCounter::new(micros as f64 / 1e6);
            tell(
                "process_cpu",
                "Time on processors, of the program and of the system for it",
                Some(Unit::Seconds),
                &cpu,
            )?;
        }
        #[cfg(unix)]
        if let Ok((most, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let most = ConstGauge::new(most as f64);
            tell("process_max_fds", "File descriptors that may be open", None, &most)?;
        }
        if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
            // One of them is for looking.
            let open = ConstGauge::new(open.count().saturating_sub(1) as f64);
            tell("process_open_fds", "File descriptors that are open", None, &open)?;
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        for (field, name, help) in [
            ("VmRSS:", "process_resident_memory", "Memory that is held"),
            ("VmSize:", "process_virtual_memory", "Addresses that are taken"),
        ] {
            if let Some(bytes) = bytes_of(&status, field) {
                tell(name, help, Some(Unit::Bytes), &ConstGauge::new(bytes))?;
            }
        }
        Ok(())
    }
}

/// A field of `/proc/self/status`, which is in kibibytes.
fn bytes_of(status: &str, field: &str) -> Option<f64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: f64 = rest.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024.0)
}
