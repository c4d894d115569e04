//! What the kernel says of other processes on this machine.

use std::fs;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use outboxd::source::postgres::sql::SqlSession;

/// `USER_HZ`, which is 100 on every architecture that Linux's /proc reports ticks on.
const TICKS_A_SECOND: f64 = 100.0;

/// User and system seconds of a process and its threads so far.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS_A_SECOND)
}

/// The largest resident set that a running process has had.
pub fn peak_mib(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_ascii_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
}

/// User and system seconds of this process, or of its children that have ended.
pub fn used_seconds(who: UsageWho) -> anyhow::Result<f64> {
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    let usage = getrusage(who)?;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_ascii_whitespace().next()?.parse().ok()
}

/// The walsender that serves a slot. It starts with the stream and ends with it, so the last look counts.
pub struct Walsender {
    session: SqlSession,
    slot: String,
    pid: Option<u32>,
    cpu_seconds: Option<f64>,
}

impl Walsender {
    pub fn new(session: SqlSession, slot: &str) -> Self {
        Walsender { session, slot: slot.to_owned(), pid: None, cpu_seconds: None }
    }

    /// Looks again, and gives the CPU seconds of the latest look that found it.
    pub async fn look(&mut self) -> anyhow::Result<Option<f64>> {
        if self.pid.is_none() {
            let statement = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1";
            let row = self.session.query_opt(statement, &[&self.slot]).await?;
            let pid = row.and_then(|row| row.get::<_, Option<i32>>(0));
            self.pid = pid.and_then(|pid| u32::try_from(pid).ok());
        }
        self.cpu_seconds = self.pid.and_then(cpu_seconds).or(self.cpu_seconds);
        Ok(self.cpu_seconds)
    }
}
