//! What a server's refusal means. Every error of the wire, from either kind of connection, is sorted here and nowhere
//! else: passing trouble is retried, what only a person can change comes with the statement that changes it.
//!
//! Servers translate their messages (`lc_messages`), so decisions rest on the SQLSTATE, and on the name of the server
//! function that raised the error where one code has several causes. Text is looked at last.

use std::error::Error as _;
use std::{fmt, io};

use fallible_iterator::FallibleIterator as _;
use postgres_protocol::message::backend::ErrorFields;
use rustls::AlertDescription as Alert;

use crate::source::SourceFailure;
use crate::source::tls::TlsTrouble;

/// An ErrorResponse. Displays as one line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerError {
    pub code: String,
    pub severity: String,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
    /// The server function that raised it: untranslated, unlike the message.
    pub routine: Option<String>,
}

impl ServerError {
    pub fn from_fields(mut fields: ErrorFields<'_>) -> io::Result<Self> {
        let mut error = ServerError::default();
        while let Some(field) = fields.next()? {
            // Before authentication the text may be in any encoding.
            let value = String::from_utf8_lossy(field.value_bytes()).into_owned();
            match field.type_() {
                b'C' => error.code = value,
                b'S' if error.severity.is_empty() => error.severity = value,
                b'V' => error.severity = value,
                b'M' => error.message = value,
                b'D' => error.detail = Some(value),
                b'H' => error.hint = Some(value),
                b'R' => error.routine = Some(value),
                _ => {}
            }
        }
        Ok(error)
    }

    fn raised_in(&self, routine: &str) -> bool {
        self.routine.as_deref() == Some(routine)
    }

    fn mentions(&self, text: &str) -> bool {
        self.message.contains(text) || self.detail.as_deref().is_some_and(|detail| detail.contains(text))
    }
}

impl From<&tokio_postgres::error::DbError> for ServerError {
    fn from(error: &tokio_postgres::error::DbError) -> Self {
        ServerError {
            code: error.code().code().to_owned(),
            severity: error.severity().to_owned(),
            message: error.message().to_owned(),
            detail: error.detail().map(str::to_owned),
            hint: error.hint().map(str::to_owned),
            routine: error.routine().map(str::to_owned),
        }
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.message.clone();
        for more in [&self.detail, &self.hint].into_iter().flatten() {
            line.push_str("; ");
            line.push_str(more);
        }
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        write!(f, "{line} ({})", self.code)
    }
}

pub const WAL_LEVEL_REMEDY: &str = "ALTER SYSTEM SET wal_level = logical; then restart the server; on Amazon RDS set \
    rds.logical_replication to 1 in the parameter group and reboot";

pub fn replication_remedy(role: &str) -> String {
    format!("ALTER ROLE {role} REPLICATION; on Amazon RDS: GRANT rds_replication TO {role}")
}

/// Whether the slot that was to be read does not exist.
pub fn is_slot_missing(error: &ServerError) -> bool {
    error.code == "42704"
        && (error.routine.as_deref().is_some_and(|routine| routine.starts_with("ReplicationSlot"))
            || error.message.contains("replication slot"))
}

/// Whether the slot exists and its log is gone: `max_slot_wal_keep_size`, an idle time-out, a conflict on a standby.
pub fn is_slot_invalidated(error: &ServerError) -> bool {
    error.code == "55000"
        && (error.mentions("can no longer")
            || error.mentions("invalidated")
            || error.raised_in("RaiseSlotInvalidationError")
            || error.raised_in("ReplicationSlotAcquire"))
}

/// Sorts a server's refusal. `info_description` says on what; one made by `ConnInfo::describe` also names the role.
pub fn classify(error: &ServerError, info_description: &str) -> SourceFailure {
    let what = format!("{info_description}: {error}");
    let not_ready = |remedy: String| SourceFailure::NotReady { what: what.clone(), remedy };
    let role = role_in(info_description);
    let class = error.code.get(..2).unwrap_or_default();
    match error.code.as_str() {
        // PgBouncer before 1.24 and other poolers know no replication, nor the parameters a stream is opened with.
        "08P01" if error.mentions("startup parameter") || error.mentions("replication") || error.mentions("pooler") => {
            not_ready("this is a connection pooler; connect to the PostgreSQL server itself".to_owned())
        }
        "08P01" if error.mentions("no such database") => not_ready(
            "correct the database's name, and connect to the PostgreSQL server itself, not to a pooler".to_owned(),
        ),
        "28P01" => not_ready(format!("correct the password of {role}, or set it: ALTER ROLE {role} PASSWORD '…'")),
        "28000" if error.mentions("channel binding") => not_ready(
            "something between here and the server decrypts the connection and reads along: connect to the server \
             itself; only if it is a proxy of yours, use channel_binding=disable"
                .to_owned(),
        ),
        _ if class == "28" => not_ready(format!(
            "make sure that {role} exists and may log in, and that pg_hba.conf on the server lets it in, for example: \
             `hostssl all {role} samenet scram-sha-256` (a replication connection to a database is matched by \
             the database's name, not by `replication`), then SELECT pg_reload_conf()"
        )),
        "3D000" => not_ready("correct the database's name in the address, or create the database".to_owned()),
        "42501"
            if error.raised_in("InitPostgres") || error.mentions("REPLICATION") || error.mentions("replication") =>
        {
            not_ready(replication_remedy(role))
        }
        "42501" => not_ready(format!("grant {role} the privilege, or use a role that has it")),
        "55006" => SourceFailure::Held { what },
        "55000" if is_slot_invalidated(error) => SourceFailure::PositionLost {
            what,
            remedy: "drop the slot and begin again; raise max_slot_wal_keep_size so that it does not happen again"
                .to_owned(),
        },
        "55000" if error.mentions("wal_level") => not_ready(WAL_LEVEL_REMEDY.to_owned()),
        "42704" if is_slot_missing(error) => not_ready("create the slot with `outboxd init`".to_owned()),
        _ if class == "42" => not_ready("run `outboxd check` to see what the database lacks".to_owned()),
        _ => SourceFailure::Transient { what },
    }
}

/// Sorts the body of an ErrorResponse met in the middle of a stream: fields of one byte and a text, ended by a zero.
pub fn from_frame(body: &[u8], info_description: &str) -> SourceFailure {
    let mut error = ServerError {
        code: "XX000".to_owned(),
        severity: "ERROR".to_owned(),
        message: "an error without a message".to_owned(),
        detail: None,
        hint: None,
        routine: None,
    };
    let mut rest = body;
    while let Some((kind, after)) = rest.split_first().filter(|(kind, _)| **kind != 0) {
        let len = after.iter().position(|byte| *byte == 0).unwrap_or(after.len());
        let text = String::from_utf8_lossy(&after[..len]).into_owned();
        match kind {
            b'C' => error.code = text,
            b'S' => error.severity = text,
            b'M' => error.message = text,
            b'D' => error.detail = Some(text),
            b'H' => error.hint = Some(text),
            b'R' => error.routine = Some(text),
            _ => {}
        }
        rest = after.get(len + 1..).unwrap_or_default();
    }
    classify(&error, info_description)
}

/// Sorts an error of an ordinary connection; `what` says what was being done.
pub fn classify_sql(error: &tokio_postgres::Error, what: &str) -> SourceFailure {
    WireError::from(error).classify(what)
}

/// Whether somebody else made what was about to be made: another pipeline of the same database that starts too. Of two
/// `CREATE TABLE IF NOT EXISTS` at the same time one may meet the other's row in the catalogue.
pub fn made_meanwhile(error: &tokio_postgres::Error) -> bool {
    use tokio_postgres::error::SqlState;
    let code = error.code();
    [SqlState::DUPLICATE_OBJECT, SqlState::DUPLICATE_TABLE, SqlState::UNIQUE_VIOLATION]
        .iter()
        .any(|one| code == Some(one))
}

/// The role in `postgres://role@…`.
fn role_in(description: &str) -> &str {
    description
        .split_once("postgres://")
        .and_then(|(_, rest)| rest.split_once('@'))
        .map_or("the role", |(role, _)| role)
}

/// Why a connection could not be opened or broke, before it is sorted.
#[derive(Debug)]
pub enum WireError {
    Server(Box<ServerError>),
    Io(io::Error),
    /// Something that trying again will not change.
    Refused {
        what: String,
        remedy: String,
    },
    /// Already sorted.
    Other(SourceFailure),
}

impl From<TlsTrouble> for WireError {
    fn from(TlsTrouble { what, remedy }: TlsTrouble) -> Self {
        WireError::Refused { what, remedy }
    }
}

impl WireError {
    pub(super) fn refused(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        WireError::Refused { what: what.into(), remedy: remedy.into() }
    }

    pub(super) fn unexpected(what: &str) -> Self {
        WireError::refused(
            format!("the server sent {what}, which PostgreSQL does not do here"),
            "connect to a PostgreSQL server directly, not through a pooler or a proxy that speaks something else",
        )
    }

    /// The server's own words, for callers that tell slots' troubles apart.
    pub fn server(&self) -> Option<&ServerError> {
        match self {
            WireError::Server(error) => Some(error),
            _ => None,
        }
    }

    pub fn classify(self, description: &str) -> SourceFailure {
        match self {
            WireError::Server(error) => classify(&error, description),
            WireError::Io(error) => classify_io(&error, description),
            WireError::Refused { what, remedy } => {
                SourceFailure::NotReady { what: format!("{description}: {what}"), remedy }
            }
            WireError::Other(failure) => failure,
        }
    }
}

impl From<io::Error> for WireError {
    fn from(error: io::Error) -> Self {
        WireError::Io(error)
    }
}

/// tokio-postgres keeps its kinds of errors to itself; the texts tell them apart, and the tests against real servers
/// hold them to it.
impl From<&tokio_postgres::Error> for WireError {
    fn from(error: &tokio_postgres::Error) -> Self {
        if let Some(refusal) = error.as_db_error() {
            return WireError::Server(Box::new(ServerError::from(refusal)));
        }
        let cause = error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"));
        match error.to_string().as_str() {
            "authentication error" if cause.contains("channel binding") => no_channel_binding(),
            "invalid configuration" if cause.contains("password missing") => password_missing(),
            "authentication error" => authentication_failed(&cause),
            text if text.starts_with("error serializing") || text.starts_with("error deserializing") => {
                WireError::refused(cause, "run `outboxd check`; a column may have another type than expected")
            }
            _ => match error.source().and_then(|cause| cause.downcast_ref::<io::Error>()) {
                Some(io) if tls_error(io).is_some() => classify_tls(io),
                Some(io) => WireError::Io(io::Error::new(io.kind(), io.to_string())),
                None => WireError::Io(io::Error::other(cause)),
            },
        }
    }
}

pub(super) fn no_channel_binding() -> WireError {
    WireError::refused(
        "channel_binding=require, and the server did not use channel binding",
        "use sslmode=require or stronger, and scram-sha-256 both in pg_hba.conf and for the role's password; else \
         channel_binding=prefer",
    )
}

pub(super) fn password_missing() -> WireError {
    WireError::refused(
        "the server asks for a password and there is none",
        "put it into the address (also as file:/path or env:NAME), into PGPASSWORD, or into ~/.pgpass",
    )
}

pub(super) fn authentication_failed(what: &str) -> WireError {
    WireError::refused(
        format!("authentication failed: {what}"),
        "connect to the server directly; something between may be reading along",
    )
}

fn classify_io(error: &io::Error, description: &str) -> SourceFailure {
    if tls_error(error).is_some()
        && let WireError::Refused { what, remedy } = classify_tls(error)
    {
        return SourceFailure::NotReady { what: format!("{description}: {what}"), remedy };
    }
    SourceFailure::Transient { what: format!("{description}: {error}") }
}

fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

/// A certificate that is refused, by either side, stays refused until a person does something.
fn classify_tls(error: &io::Error) -> WireError {
    let refused = |remedy| WireError::refused(format!("TLS: {error}"), remedy);
    match tls_error(error) {
        Some(rustls::Error::InvalidCertificate(
            rustls::CertificateError::NotValidForName | rustls::CertificateError::NotValidForNameContext { .. },
        )) => refused("connect by a name in the certificate's subjectAltName, or use sslmode=verify-ca"),
        Some(rustls::Error::InvalidCertificate(rustls::CertificateError::Other(_))) => refused(
            "give the server an ordinary X.509 version 3 certificate with a subjectAltName, signed by the authority in \
             sslrootcert",
        ),
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => refused(
            "name in sslrootcert the authority that signed the server's certificate, and make sure that neither has \
             expired",
        ),
        Some(rustls::Error::AlertReceived(
            Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::CertificateRequired
            | Alert::AccessDenied,
        )) => refused("name in sslcert and sslkey a client certificate that the server's ssl_ca_file vouches for"),
        Some(
            rustls::Error::PeerIncompatible(_)
            | rustls::Error::InvalidMessage(_)
            | rustls::Error::AlertReceived(
                Alert::HandshakeFailure
                | Alert::ProtocolVersion
                | Alert::InsufficientSecurity
                | Alert::NoApplicationProtocol,
            ),
        ) => refused(
            "let the server offer TLS 1.2 or 1.3 with usual ciphers; for sslnegotiation=direct it must be \
                      PostgreSQL 17 or newer",
        ),
        _ => WireError::Io(io::Error::new(error.kind(), error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: &str = "postgres://alice@h:5432/shop";

    fn error(code: &str, message: &str) -> ServerError {
        ServerError { code: code.to_owned(), message: message.to_owned(), ..ServerError::default() }
    }

    fn remedy(code: &str, message: &str) -> String {
        match classify(&error(code, message), HERE) {
            SourceFailure::NotReady { remedy, .. } => remedy,
            other => panic!("{code} {message}: {other:?}"),
        }
    }

    #[test]
    fn passing_trouble_is_retried() {
        for code in
            ["53300", "53200", "57P01", "57P02", "57P03", "08006", "08P01", "40001", "55P03", "25006", "XX000", ""]
        {
            let failure = classify(&error(code, "it hurts"), HERE);
            assert!(matches!(failure, SourceFailure::Transient { .. }), "{code}: {failure:?}");
        }
        for kind in [io::ErrorKind::ConnectionRefused, io::ErrorKind::ConnectionReset, io::ErrorKind::TimedOut] {
            let failure = WireError::Io(io::Error::from(kind)).classify(HERE);
            assert!(matches!(failure, SourceFailure::Transient { .. }), "{failure:?}");
        }
    }

    #[test]
    fn what_a_person_must_change_names_the_change() {
        assert!(remedy("28P01", "password authentication failed").contains("ALTER ROLE alice PASSWORD"));
        assert!(remedy("28000", "no pg_hba.conf entry").contains("pg_hba.conf"));
        assert!(remedy("3D000", "database \"shop\" does not exist").contains("database"));
        let replication = remedy("42501", "must be superuser or replication role to start walsender");
        assert!(replication.contains("ALTER ROLE alice REPLICATION"), "{replication}");
        assert!(replication.contains("rds_replication"));
        assert!(!remedy("42501", "permission denied for table outbox").contains("REPLICATION"));
        assert!(remedy("55000", "logical decoding requires \"wal_level\" >= \"logical\"").contains("wal_level"));
        assert!(remedy("42P01", "relation \"outbox\" does not exist").contains("outboxd check"));
    }

    #[test]
    fn a_pooler_is_called_one() {
        for message in ["unsupported startup parameter: replication", "unsupported startup parameter: bytea_output"] {
            assert!(remedy("08P01", message).contains("pooler"), "{message}");
        }
    }

    #[test]
    fn troubles_of_slots_are_told_apart() {
        let missing = error("42704", "replication slot \"s\" does not exist");
        assert!(is_slot_missing(&missing) && !is_slot_invalidated(&missing));
        assert!(!is_slot_missing(&error("42704", "publication \"p\" does not exist")));
        let translated = ServerError {
            routine: Some("ReplicationSlotAcquire".to_owned()),
            ..error("42704", "Replikations-Slot »s« existiert nicht")
        };
        assert!(is_slot_missing(&translated));
        for message in
            ["can no longer get changes from replication slot \"s\"", "can no longer access replication slot \"s\""]
        {
            let gone = error("55000", message);
            assert!(is_slot_invalidated(&gone));
            assert!(matches!(classify(&gone, HERE), SourceFailure::PositionLost { .. }));
        }
        let active = classify(&error("55006", "replication slot \"s\" is active for PID 7"), HERE);
        assert!(matches!(active, SourceFailure::Held { .. }));
    }

    #[test]
    fn an_error_is_one_line() {
        let error = ServerError {
            detail: Some("Only roles\n  with it.".to_owned()),
            hint: Some("Ask.".to_owned()),
            ..error("42501", "denied")
        };
        assert_eq!(error.to_string(), "denied; Only roles with it.; Ask. (42501)");
    }

    #[test]
    fn a_certificate_that_is_refused_is_not_retried() {
        for refusal in [
            rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer),
            rustls::Error::InvalidCertificate(rustls::CertificateError::NotValidForName),
            rustls::Error::AlertReceived(Alert::CertificateRequired),
        ] {
            let failure = WireError::Io(io::Error::new(io::ErrorKind::InvalidData, refusal)).classify(HERE);
            assert!(matches!(failure, SourceFailure::NotReady { .. }), "{failure:?}");
        }
        let closed = rustls::Error::AlertReceived(Alert::InternalError);
        let failure = WireError::Io(io::Error::new(io::ErrorKind::InvalidData, closed)).classify(HERE);
        assert!(matches!(failure, SourceFailure::Transient { .. }), "{failure:?}");
    }
}
