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

pub mod kafka;

/// What became of a record that was handed to a sink.
#[derive(Debug)]
pub enum Enqueued {
    Queued,
    /// The sink's own queue is full: try again in a moment.
    Full,
    /// The sink must first find out about the record's topic.
    Unprepared,
    /// It was in a batch that the broker refused: send it alone.
    Suspect,
    /// It can never be delivered there, and why.
    Refused(String),
}
