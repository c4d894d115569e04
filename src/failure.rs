//! The one policy table: what each kind of trouble means for a pipeline, and with which code the process ends.

use std::fmt;

use crate::failpoints::Injected;
use crate::sink::SinkFailure;
use crate::source::SourceFailure;

/// The process's exit codes, a contract with scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum ExitCode {
    Done = 0,
    Unexpected = 1,
    Usage = 2,
    SourceNotReady = 3,
    PositionLost = 4,
    SinkNotReady = 5,
    Undeliverable = 6,
    HeldElsewhere = 7,
}

/// Why a pipeline ends for good, and what a person can do about it.
#[derive(Clone, Debug)]
pub struct Halt {
    pub code: ExitCode,
    pub what: String,
    pub remedy: String,
}

impl fmt::Display for Halt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.remedy.is_empty() {
            write!(f, "\n  remedy: {}", self.remedy)?;
        }
        Ok(())
    }
}

impl std::error::Error for Halt {}

/// What a pipeline does about trouble. Single records that cannot be delivered are handled where they are routed.
#[derive(Clone, Debug)]
pub enum Failure {
    /// Passing trouble: try again with back-off, for ever.
    Retry { what: String },
    /// Another instance holds the pipeline: stand by, without back-off.
    StandBy { what: String },
    /// Begin again at once from the confirmed position, with what was learnt (a smaller batch, a text stream).
    Again { what: String },
    /// Nothing but a person can help.
    Halt(Halt),
}

impl From<Injected> for Failure {
    fn from(injected: Injected) -> Self {
        Failure::Retry { what: injected.to_string() }
    }
}

impl From<SourceFailure> for Failure {
    fn from(failure: SourceFailure) -> Self {
        let halt = |code, what: String, remedy: String| Failure::Halt(Halt { code, what, remedy });
        match failure {
            SourceFailure::Transient { .. } => Failure::Retry { what: failure.to_string() },
            SourceFailure::Held { .. } => Failure::StandBy { what: failure.to_string() },
            SourceFailure::Restart { what } => Failure::Again { what },
            SourceFailure::Misconfigured { what, remedy } => halt(ExitCode::Usage, what, remedy),
            SourceFailure::NotReady { what, remedy } => halt(ExitCode::SourceNotReady, what, remedy),
            SourceFailure::PositionLost { what, remedy } => halt(ExitCode::PositionLost, what, remedy),
            SourceFailure::Undecodable { what, remedy } => halt(ExitCode::Undeliverable, what, remedy),
        }
    }
}

impl From<SinkFailure> for Failure {
    fn from(failure: SinkFailure) -> Self {
        match failure {
            SinkFailure::Transient { .. } => Failure::Retry { what: failure.to_string() },
            SinkFailure::Restart { what } => Failure::Again { what },
            SinkFailure::NotReady { what, remedy } => {
                Failure::Halt(Halt { code: ExitCode::SinkNotReady, what, remedy })
            }
            SinkFailure::Undeliverable { what, remedy } => {
                Failure::Halt(Halt { code: ExitCode::Undeliverable, what, remedy })
            }
        }
    }
}
