//! Steps of the data's path at which tests make outboxd die, dawdle or fail. Without the feature `failpoints`, which no
//! release has, there is nothing here.
//!
//! ```text
//!   received ─▶ decoded ─▶ admitted ─▶ enqueued ─▶ acknowledged ─▶ committing ─▶ committed     (the last two: exactly-once)
//!                                                       └─▶ confirming ─▶ confirmed,  storing ─▶ stored
//! ```
//!
//! `FAILPOINTS="enqueued=20*off->return(kill)"` kills the process when it comes there for the 21st time; `sleep(500)`
//! delays it, `return(error)` is trouble that passes.

/// Every step, in the order of the path.
pub const STEPS: [&str; 11] = [
    "received",
    "decoded",
    "admitted",
    "enqueued",
    "acknowledged",
    "committing",
    "committed",
    "confirming",
    "confirmed",
    "storing",
    "stored",
];

/// Trouble that a test has asked for.
#[derive(Debug)]
pub struct Injected(pub &'static str);

impl std::fmt::Display for Injected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a test made this fail: {}", self.0)
    }
}

/// Reads what was asked for from the environment; to be kept as long as it counts.
#[cfg(feature = "failpoints")]
pub fn begin() -> impl Drop {
    struct Scenario(Option<fail::FailScenario<'static>>);
    impl Drop for Scenario {
        fn drop(&mut self) {
            if let Some(scenario) = self.0.take() {
                scenario.teardown();
            }
        }
    }
    Scenario(Some(fail::FailScenario::setup()))
}

/// The path has come to this step.
#[cfg(feature = "failpoints")]
pub fn reach(step: &'static str) -> Result<(), Injected> {
    debug_assert!(STEPS.contains(&step), "{step} is not among the steps");
    fail::fail_point!(step, |action: Option<String>| match action.as_deref() {
        Some("kill") => {
            // As `kill -9` does: nothing is flushed, nothing is let go.
            let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGKILL);
            Ok(())
        }
        _ => Err(Injected(step)),
    });
    Ok(())
}

#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn reach(_: &'static str) -> Result<(), Injected> {
    Ok(())
}
