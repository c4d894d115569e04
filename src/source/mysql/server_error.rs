//! What a server's refusals mean: which pass by themselves, which a person must mend, and how.

use std::io;

use thiserror::Error;

use crate::source::SourceFailure;
use crate::source::tls::TlsTrouble;

#[derive(Debug, Error)]
pub enum WireError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{message} (error {code})")]
    Server { code: u16, message: String },
    #[error("{what}")]
    Refused { what: String, remedy: String },
}

impl From<TlsTrouble> for WireError {
    fn from(TlsTrouble { what, remedy }: TlsTrouble) -> Self {
        WireError::Refused { what, remedy }
    }
}

impl WireError {
    pub fn refused(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        WireError::Refused { what: what.into(), remedy: remedy.into() }
    }

    pub fn unexpected(what: &str) -> Self {
        WireError::refused(
            format!("the server sent {what}, which MySQL and MariaDB do not do here"),
            "connect to the server directly, not through a proxy that speaks something else",
        )
    }

    /// A failed handshake: the certificate is a matter of settings, a broken connection is not.
    pub fn handshake(error: io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(reason) => WireError::refused(
                format!("no TLS connection: {reason}"),
                "check ssl-ca, the names in the server's certificate, and ssl-cert with ssl-key if it asks for one",
            ),
            None => WireError::Io(error),
        }
    }

    /// `FF code:u16 ['#' state:5] message`.
    pub fn from_packet(packet: &[u8]) -> Self {
        let Some((code, rest)) = packet.get(1..).and_then(|body| body.split_first_chunk::<2>()) else {
            return WireError::unexpected("an error without a code");
        };
        let message = match rest {
            [b'#', state @ ..] if state.len() >= 5 => &state[5..],
            rest => rest,
        };
        WireError::Server { code: u16::from_le_bytes(*code), message: String::from_utf8_lossy(message).into_owned() }
    }

    pub fn code(&self) -> Option<u16> {
        match self {
            WireError::Server { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the login itself was refused, so that other hosts need not be asked.
    pub fn is_login_refused(&self) -> bool {
        matches!(self.code(), Some(1045 | 1698 | 1251 | 3118 | 1862 | 4151))
    }

    /// Sorts the trouble by what can be done about it. `what` names what was being done, on what.
    pub fn classify(self, what: &str) -> SourceFailure {
        match self {
            WireError::Io(error) => SourceFailure::transient(format!("{what}: {error}")),
            WireError::Refused { what: why, remedy } => {
                SourceFailure::NotReady { what: format!("{what}: {why}"), remedy }
            }
            WireError::Server { code, message } => {
                let text = format!("{what}: {message} (error {code})");
                match remedy(code) {
                    Some(remedy) => SourceFailure::NotReady { what: text, remedy: remedy.to_owned() },
                    None => SourceFailure::transient(text),
                }
            }
        }
    }
}

/// What to do about an error that does not pass by itself. Unknown errors are retried: a restart, a fail-over or a full
/// disk has many codes.
fn remedy(code: u16) -> Option<&'static str> {
    Some(match code {
        1045 | 1698 | 4151 => "check user and password in the source's URL, and from which hosts the user may log in",
        1130 => "allow outboxd's host: CREATE USER 'outboxd'@'HOST' …",
        1129 => "the server blocked this host after errors: FLUSH HOSTS (TRUNCATE performance_schema.host_cache)",
        1251 | 3159 => "use ssl-mode=required or better: the server refuses logins without TLS",
        3118 => "unlock the account: ALTER USER … ACCOUNT UNLOCK",
        1862 | 1820 => "the password has expired: set a new one",
        1044 => "grant the privileges of sql/mysql/grants.sql on the database of the outbox",
        1142 | 1143 => "grant the privileges of sql/mysql/grants.sql",
        1227 | 3955 => "grant REPLICATION SLAVE and REPLICATION CLIENT: sql/mysql/grants.sql",
        1049 => "name an existing database in the source's URL",
        1146 => "create the table: outboxd init",
        1054 => "the table lacks the column: name the right one with --column",
        1290 | 1792 | 1836 => "the server is read-only: connect to the primary, or use --checkpoint kafka or file:PATH",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_packet_is_read_with_and_without_its_state() {
        for packet in [&b"\xff\x15\x04#28000Access denied"[..], b"\xff\x15\x04Access denied"] {
            let WireError::Server { code, message } = WireError::from_packet(packet) else { panic!("{packet:?}") };
            assert_eq!((code, message.as_str()), (1045, "Access denied"));
        }
        assert!(WireError::from_packet(b"\xff\x15").code().is_none());
    }

    #[test]
    fn a_wrong_password_is_for_a_person_and_a_full_server_passes() {
        let error = |code| WireError::Server { code, message: "no".to_owned() }.classify("db:3306");
        assert!(matches!(error(1045), SourceFailure::NotReady { .. }));
        assert!(matches!(error(1040), SourceFailure::Transient { .. }));
        assert_eq!(error(1040).to_string(), "db:3306: no (error 1040)");
    }
}
