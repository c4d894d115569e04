//! What the server and the driver say when something fails, sorted by what can be done about it.

use mongodb::error::{Error, ErrorKind, WriteFailure};

use crate::source::SourceFailure;

/// The codes that mean something here; their names are the server's.
pub mod code {
    pub const UNAUTHORIZED: i32 = 13;
    pub const AUTHENTICATION_FAILED: i32 = 18;
    pub const NAMESPACE_EXISTS: i32 = 48;
    pub const COMMAND_NOT_FOUND: i32 = 59;
    pub const INVALID_NAMESPACE: i32 = 73;
    pub const SNAPSHOT_TOO_OLD: i32 = 239;
    pub const INVALID_RESUME_TOKEN: i32 = 260;
    pub const CHANGE_STREAM_FATAL: i32 = 280;
    pub const CHANGE_STREAM_HISTORY_LOST: i32 = 286;
    pub const OBJECT_TOO_LARGE: i32 = 10334;
    pub const DUPLICATE_KEY: i32 = 11000;
    pub const NOT_A_REPLICA_SET: i32 = 40573;
}

/// The driver marks what a new attempt may mend.
const PASSING: [&str; 3] = ["ResumableChangeStreamError", "RetryableWriteError", "TransientTransactionError"];

/// What was being done, for the message and for what would allow it.
#[derive(Clone, Debug)]
pub enum Doing {
    Connecting,
    /// The namespaces.
    Watching(String),
    Reading(String),
    Writing(String),
    Deleting(String),
}

impl Doing {
    fn what(&self) -> String {
        match self {
            Doing::Connecting => "connecting to the server".to_owned(),
            Doing::Watching(scope) => format!("watching {scope}"),
            Doing::Reading(collection) => format!("reading {collection}"),
            Doing::Writing(collection) => format!("writing {collection}"),
            Doing::Deleting(collection) => format!("deleting from {collection}"),
        }
    }

    fn permission(&self) -> String {
        let granted = match self {
            Doing::Connecting => return "correct user, password and authSource in SOURCE".to_owned(),
            Doing::Watching(scope) => {
                format!(
                    "find and changeStream on {scope} (of several or all on their database, of several databases on all)"
                )
            }
            Doing::Reading(collection) => format!("find on {collection}"),
            Doing::Writing(collection) => format!("find, insert and update on {collection}"),
            Doing::Deleting(collection) => format!("find and remove on {collection}"),
        };
        format!("grant the user {granted}: see sql/mongodb/role.js")
    }
}

/// The server's code, if it was the server who refused.
pub fn code_of(error: &Error) -> Option<i32> {
    match &*error.kind {
        ErrorKind::Command(command) => Some(command.code),
        ErrorKind::Write(WriteFailure::WriteError(write)) => Some(write.code),
        ErrorKind::Write(WriteFailure::WriteConcernError(concern)) => Some(concern.code),
        _ => None,
    }
}

/// What the error says, without the driver's inner state.
pub fn message(error: &Error) -> String {
    match &*error.kind {
        ErrorKind::Command(command) => format!("{} ({} {})", command.message, command.code_name, command.code),
        ErrorKind::Authentication { message, .. } => match &error_source(error) {
            Some(why) => format!("{message}: {why}"),
            None => message.clone(),
        },
        ErrorKind::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

fn error_source(error: &Error) -> Option<String> {
    let source = std::error::Error::source(error)?.downcast_ref::<Error>()?;
    Some(message(source))
}

pub fn classify(error: &Error, doing: &Doing) -> SourceFailure {
    let what = format!("{}: {}", doing.what(), message(error));
    let not_ready = |remedy: String| SourceFailure::NotReady { what: what.clone(), remedy };
    if PASSING.iter().any(|label| error.contains_label(label)) {
        return SourceFailure::Transient { what };
    }
    match &*error.kind {
        ErrorKind::Authentication { .. } => not_ready(Doing::Connecting.permission()),
        ErrorKind::InvalidArgument { .. } | ErrorKind::InvalidTlsConfig { .. } => {
            SourceFailure::Misconfigured { what, remedy: "correct SOURCE".to_owned() }
        }
        ErrorKind::IncompatibleServer { .. } | ErrorKind::SessionsNotSupported => {
            not_ready("outboxd needs a replica set of MongoDB 4.4 or newer".to_owned())
        }
        ErrorKind::Command(command) => match command.code {
            code::UNAUTHORIZED => not_ready(doing.permission()),
            code::AUTHENTICATION_FAILED => not_ready(Doing::Connecting.permission()),
            code::NOT_A_REPLICA_SET => not_ready(super::judge::MAKE_REPLICA_SET.to_owned()),
            code::INVALID_NAMESPACE => SourceFailure::Misconfigured {
                what,
                remedy: "correct --table: the server's own databases and collections cannot be watched".to_owned(),
            },
            code::INVALID_RESUME_TOKEN => not_ready("correct the position of the checkpoint, or --start".to_owned()),
            // Told with the gap by whoever knows the position.
            code::CHANGE_STREAM_HISTORY_LOST | code::CHANGE_STREAM_FATAL => {
                SourceFailure::PositionLost { what, remedy: String::new() }
            }
            code::SNAPSHOT_TOO_OLD => not_ready(
                "reading what exists takes longer than the server keeps its past: \
                 db.adminCommand({setParameter: 1, minSnapshotHistoryWindowInSeconds: 3600})"
                    .to_owned(),
            ),
            code::OBJECT_TOO_LARGE => SourceFailure::Undecodable {
                what: format!("an event is too large for the server to send: {what}"),
                remedy: "nothing was skipped; MongoDB 6.0.9 and 7.0 can send such events in pieces: upgrade, or keep \
                         documents of the outbox below 16 MB"
                    .to_owned(),
            },
            _ => SourceFailure::Transient { what },
        },
        _ => SourceFailure::Transient { what },
    }
}
