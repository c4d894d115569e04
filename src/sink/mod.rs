//! Where records go. A sink takes records in order, never drops a receipt, and resolves each one in the ack window
//! when the broker has answered.

use thiserror::Error;

/// Trouble on the broker's side that is not about one record.
#[derive(Clone, Debug, Error)]
pub enum SinkFailure {
    /// Broker down, time-out: it passes.
    #[error("{what}")]
    Transient { what: String },
    /// The producer must be made anew and the source read again from the confirmed position.
    #[error("{what}")]
    Restart { what: String },
    /// Authentication, authorisation, a missing topic at start.
    #[error("{what}")]
    NotReady { what: String, remedy: String },
    /// A record that can neither be delivered nor parked.
    #[error("{what}")]
    Undeliverable { what: String, remedy: String },
}
