//! A connection in replication mode, which tokio-postgres does not have.
//!
//! ```text
//! outboxd                                     PostgreSQL
//!   StartupMessage replication=database  ──▶
//!                                        ◀──  R  Authentication…          password, SASL, or straight to
//!   p  PasswordMessage, SASL…            ──▶
//!                                        ◀──  R  AuthenticationOk
//!                                        ◀──  S  ParameterStatus*         server_version, in_hot_standby, …
//!                                        ◀──  K  BackendKeyData
//!                                        ◀──  Z  ReadyForQuery
//!   Q  IDENTIFY_SYSTEM                   ──▶
//!                                        ◀──  T  D  C  Z                  a result set like any other
//!   Q  START_REPLICATION SLOT …          ──▶
//!                                        ◀──  W  CopyBothResponse         from here on both sides send
//!   d  standby status update            ◀─▶  d  XLogData, keepalive      CopyData, at any time
//! ```
//!
//! Each frame is a tag, a length that counts itself, and a body. `postgres-protocol` knows all of them but `W`, which
//! is why tags are looked at before frames are parsed. Who asks for the stream gets the two halves of the socket and
//! whatever was read beyond `W`; this module knows nothing of what flows then.

use std::collections::HashMap;
use std::io;

use bytes::BytesMut;
use fallible_iterator::FallibleIterator as _;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{self, ScramSha256};
use postgres_protocol::message::backend::{AuthenticationSaslBody, DataRowBody, Header, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::channel::end_point_hash_of;
use super::conninfo::{ChannelBinding, ConnInfo, Host};
use super::dial::{Protocol, STANDING_QUERY, Standing, dial};
use super::server_error::{ServerError, WireError, authentication_failed, no_channel_binding, password_missing};
use crate::position::Lsn;
use crate::source::SourceFailure;
use crate::source::transport::{ReadHalf, Transport, WriteHalf};

/// Makes the text of every value the same on every server, whatever its configuration and the role's settings.
pub(super) const SESSION_PARAMETERS: [(&str, &str); 6] = [
    ("client_encoding", "UTF8"),
    ("DateStyle", "ISO"),
    ("IntervalStyle", "postgres"),
    ("TimeZone", "UTC"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
];

/// Nothing that is said before the stream is longer; whoever claims more does not speak PostgreSQL.
const LONGEST_FRAME: i32 = 16 << 20;
const COPY_BOTH_RESPONSE: u8 = b'W';

/// A connection in replication mode, before it streams.
pub struct WalsenderConnection {
    wire: Wire,
    host: Host,
    description: String,
    parameters: HashMap<String, String>,
    version: u32,
}

/// Which server this is, and where its log stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemIdentity {
    pub system_identifier: u64,
    pub timeline: u32,
    pub wal_position: Lsn,
}

/// A running stream. Frames begin in `buffered` and go on in `reader`.
pub struct CopyBoth {
    pub reader: ReadHalf,
    pub writer: WriteHalf,
    pub buffered: BytesMut,
    /// The server's address without secrets, for messages.
    pub description: String,
}

impl WalsenderConnection {
    pub async fn connect(info: &ConnInfo) -> Result<Self, SourceFailure> {
        dial::<Replication>(info).await
    }

    /// The server's version as its `server_version_num` has it: 180001.
    pub fn server_version(&self) -> u32 {
        self.version
    }

    /// The server that was chosen, for [`ConnInfo::pinned_to`].
    pub fn host(&self) -> &Host {
        &self.host
    }

    pub fn is_encrypted(&self) -> bool {
        self.wire.transport.is_encrypted()
    }

    /// A setting that the server reports, such as `in_hot_standby`.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }

    pub async fn identify_system(&mut self) -> Result<SystemIdentity, SourceFailure> {
        let rows = self.simple_query("IDENTIFY_SYSTEM").await?;
        let cell = |at: usize| rows.first().and_then(|row| row.get(at)).and_then(Option::as_deref);
        let identity = || {
            Some(SystemIdentity {
                system_identifier: cell(0)?.parse().ok()?,
                timeline: cell(1)?.parse().ok()?,
                wal_position: cell(2)?.parse().ok()?,
            })
        };
        identity().ok_or_else(|| {
            WireError::unexpected("an answer to IDENTIFY_SYSTEM that cannot be read").classify(&self.description)
        })
    }

    /// Where the history of the timeline `timeline` left its ancestor `ancestor`; none when it is not an ancestor.
    pub async fn left_timeline(&mut self, ancestor: u32, timeline: u32) -> Result<Option<Lsn>, SourceFailure> {
        // The first timeline has no ancestor, and no history to ask for.
        if ancestor >= timeline {
            return Ok(None);
        }
        let rows = self.simple_query(&format!("TIMELINE_HISTORY {timeline}")).await?;
        let history = rows.first().and_then(|row| row.get(1)).and_then(Option::as_deref);
        Ok(history.and_then(|history| switch_point(history, ancestor)))
    }

    /// Runs SQL or a replication command; the rows of the last result set, as text.
    pub async fn simple_query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, SourceFailure> {
        self.wire.simple_query(sql).await.map_err(|error| error.classify(&self.description))
    }

    /// Sends START_REPLICATION and lets go of the socket.
    pub async fn start_replication(self, command: &str) -> Result<CopyBoth, SourceFailure> {
        let description = self.description.clone();
        self.try_start_replication(command).await.map_err(|error| error.classify(&description))
    }

    /// As [`start_replication`](Self::start_replication), with the error before it is sorted: a slot that is missing
    /// or invalidated means different things to different callers.
    pub async fn try_start_replication(mut self, command: &str) -> Result<CopyBoth, WireError> {
        frontend::query(command, &mut self.wire.output)?;
        self.wire.flush().await?;
        loop {
            let header = self.wire.header().await?;
            if header.tag() == COPY_BOTH_RESPONSE {
                break;
            }
            match self.wire.message().await? {
                Message::NoticeResponse(_) | Message::ParameterStatus(_) => {}
                Message::ErrorResponse(body) => {
                    return Err(WireError::Server(Box::new(ServerError::from_fields(body.fields())?)));
                }
                _ => return Err(WireError::unexpected("something else than CopyBothResponse")),
            }
        }
        self.wire.skip_frame().await?;
        let Wire { transport, input, .. } = self.wire;
        let (reader, writer) = transport.into_split();
        Ok(CopyBoth { reader, writer, buffered: input, description: self.description })
    }
}

/// A history file has a line for each ancestor: its number, where it was left, and why, with tabs between.
fn switch_point(history: &str, ancestor: u32) -> Option<Lsn> {
    history.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let timeline: u32 = words.next()?.parse().ok()?;
        let left_at = words.next()?.parse().ok()?;
        (timeline == ancestor).then_some(left_at)
    })
}

/// `18.1 (Debian 18.1-1)`, `15beta2`, `9.6.24` → 180001, 150000, 90624.
pub(super) fn parse_server_version(text: &str) -> Option<u32> {
    let mut numbers = text
        .split([' ', '-'])
        .next()?
        .split('.')
        .map(|part| part.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default().parse::<u32>().ok());
    let major = numbers.next()??;
    let mut next = || numbers.next().flatten().unwrap_or(0).min(9999);
    if major > 1000 {
        None
    } else if major >= 10 {
        Some(major * 10_000 + next())
    } else {
        Some(major * 10_000 + next().min(99) * 100 + next().min(99))
    }
}

/// The protocol of [`dial`] for replication connections.
struct Replication;

impl Protocol for Replication {
    type Session = WalsenderConnection;

    async fn open(
        info: &ConnInfo,
        host: &Host,
        transport: Transport,
        password: Option<String>,
    ) -> Result<WalsenderConnection, WireError> {
        let mut wire = Wire { transport, input: BytesMut::with_capacity(8 << 10), output: BytesMut::new() };
        let mut startup = vec![
            ("user", info.user()),
            ("database", info.dbname()),
            ("replication", "database"),
            ("application_name", info.application_name.as_str()),
        ];
        // The server applies `options` before the parameters that come by name, wherever they stand.
        startup.extend(info.options.as_deref().map(|options| ("options", options)));
        startup.extend(SESSION_PARAMETERS);
        frontend::startup_message(startup, &mut wire.output)?;
        wire.flush().await?;
        wire.authenticate(info, password.as_deref()).await?;

        let mut parameters = HashMap::new();
        loop {
            match wire.message().await? {
                Message::ParameterStatus(body) => {
                    parameters.insert(body.name()?.to_owned(), body.value()?.to_owned());
                }
                Message::BackendKeyData(_) | Message::NoticeResponse(_) => {}
                Message::ReadyForQuery(_) => break,
                Message::ErrorResponse(body) => {
                    return Err(WireError::Server(Box::new(ServerError::from_fields(body.fields())?)));
                }
                _ => return Err(WireError::unexpected("a strange message during startup")),
            }
        }
        let version = parameters
            .get("server_version")
            .and_then(|text| parse_server_version(text))
            .ok_or_else(|| WireError::unexpected("no version"))?;
        Ok(WalsenderConnection { wire, host: host.clone(), description: info.describe_host(host), parameters, version })
    }

    async fn standing(session: &mut WalsenderConnection) -> Result<Standing, WireError> {
        let told = Standing::from_settings(
            session.parameter("in_hot_standby"),
            session.parameter("default_transaction_read_only"),
        );
        if let Some(standing) = told {
            return Ok(standing);
        }
        let rows = session.wire.simple_query(STANDING_QUERY).await?;
        let cell = |at: usize| rows.first().and_then(|row| row.get(at)).and_then(Option::as_deref);
        Standing::from_settings(cell(0), cell(1)).ok_or_else(|| WireError::unexpected("no row"))
    }
}

/// Frames over a transport.
struct Wire {
    transport: Transport,
    input: BytesMut,
    output: BytesMut,
}

impl Wire {
    async fn flush(&mut self) -> io::Result<()> {
        self.transport.write_all(&self.output).await?;
        self.output.clear();
        self.transport.flush().await
    }

    /// Reads until the next frame's tag and length are there.
    async fn header(&mut self) -> Result<Header, WireError> {
        loop {
            let header =
                Header::parse(&self.input).map_err(|_| WireError::unexpected("a frame of impossible length"))?;
            match header {
                Some(header) if header.len() > LONGEST_FRAME => {
                    return Err(WireError::unexpected("a frame of impossible length"));
                }
                Some(header) => return Ok(header),
                None => self.fill().await?,
            }
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        match self.transport.read_buf(&mut self.input).await? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")),
            _ => Ok(()),
        }
    }

    async fn message(&mut self) -> Result<Message, WireError> {
        loop {
            self.header().await?;
            let parsed = Message::parse(&mut self.input)
                .map_err(|error| WireError::unexpected(&format!("a message that cannot be read ({error})")))?;
            match parsed {
                Some(message) => return Ok(message),
                None => self.fill().await?,
            }
        }
    }

    async fn skip_frame(&mut self) -> Result<(), WireError> {
        // The length does not count the tag, and is known not to be negative.
        let whole = usize::try_from(self.header().await?.len()).unwrap_or_default() + 1;
        while self.input.len() < whole {
            self.fill().await?;
        }
        let _ = self.input.split_to(whole);
        Ok(())
    }

    async fn simple_query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, WireError> {
        frontend::query(sql, &mut self.output)?;
        self.flush().await?;
        let (mut rows, mut refusal) = (Vec::new(), None);
        loop {
            match self.message().await? {
                Message::RowDescription(_) => rows.clear(),
                Message::DataRow(body) => rows.push(texts(&body)?),
                Message::ErrorResponse(body) => refusal = Some(ServerError::from_fields(body.fields())?),
                Message::CommandComplete(_)
                | Message::EmptyQueryResponse
                | Message::NoticeResponse(_)
                | Message::ParameterStatus(_) => {}
                Message::ReadyForQuery(_) => {
                    return refusal.map_or(Ok(rows), |error| Err(WireError::Server(Box::new(error))));
                }
                // A connection that is going down says so and never becomes ready again; reading on finds the end.
                _ => return Err(WireError::unexpected("a strange answer to a query")),
            }
            if let Some(error) = refusal.take_if(|error| error.severity == "FATAL") {
                return Err(WireError::Server(Box::new(error)));
            }
        }
    }

    async fn authenticate(&mut self, info: &ConnInfo, password: Option<&str>) -> Result<(), WireError> {
        let unbound = || match info.tls.channel_binding {
            ChannelBinding::Require => Err(no_channel_binding()),
            _ => Ok(()),
        };
        match self.authentication_request().await? {
            Message::AuthenticationOk => return unbound(),
            Message::AuthenticationCleartextPassword => {
                unbound()?;
                let password = password.ok_or_else(password_missing)?;
                frontend::password_message(password.as_bytes(), &mut self.output)?;
            }
            Message::AuthenticationMd5Password(body) => {
                unbound()?;
                let password = password.ok_or_else(password_missing)?;
                let hash = md5_hash(info.user().as_bytes(), password.as_bytes(), body.salt());
                frontend::password_message(hash.as_bytes(), &mut self.output)?;
            }
            Message::AuthenticationSasl(body) => {
                let password = password.ok_or_else(password_missing)?;
                self.authenticate_sasl(&body, info, password).await?;
            }
            _ => {
                return Err(WireError::refused(
                    "the server asks for an authentication that outboxd does not have (GSSAPI, SSPI, …)",
                    "let the role in with scram-sha-256 or cert in pg_hba.conf",
                ));
            }
        }
        self.flush().await?;
        match self.authentication_request().await? {
            Message::AuthenticationOk => Ok(()),
            _ => Err(WireError::unexpected("a strange message during authentication")),
        }
    }

    /// The proof goes both ways: who does not know the password cannot pass for the server either.
    async fn authenticate_sasl(
        &mut self,
        offer: &AuthenticationSaslBody,
        info: &ConnInfo,
        password: &str,
    ) -> Result<(), WireError> {
        let offered: Vec<_> = offer.mechanisms().map(|name| Ok(name.to_owned())).collect()?;
        let offers = |name: &str| offered.iter().any(|offered| offered == name);
        let bindable =
            end_point_hash_of(&self.transport).filter(|_| info.tls.channel_binding != ChannelBinding::Disable);
        let (mechanism, binding) = match bindable {
            Some(hash) if offers(sasl::SCRAM_SHA_256_PLUS) => {
                (sasl::SCRAM_SHA_256_PLUS, sasl::ChannelBinding::tls_server_end_point(hash))
            }
            _ if info.tls.channel_binding == ChannelBinding::Require => return Err(no_channel_binding()),
            _ if !offers(sasl::SCRAM_SHA_256) => {
                return Err(WireError::refused(
                    format!("the server offers only {}, none of which outboxd has", offered.join(", ")),
                    "let the role in with scram-sha-256 or cert in pg_hba.conf",
                ));
            }
            // "I could, you do not seem to": a server that could knows then that someone took its offer away.
            Some(_) => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested()),
            None => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported()),
        };
        let failed = |error: io::Error| authentication_failed(&error.to_string());
        let mut scram = ScramSha256::new(password.as_bytes(), binding);
        frontend::sasl_initial_response(mechanism, scram.message(), &mut self.output)?;
        self.flush().await?;
        match self.authentication_request().await? {
            Message::AuthenticationSaslContinue(body) => scram.update(body.data()).map_err(failed)?,
            _ => return Err(WireError::unexpected("a strange message during authentication")),
        }
        frontend::sasl_response(scram.message(), &mut self.output)?;
        self.flush().await?;
        match self.authentication_request().await? {
            Message::AuthenticationSaslFinal(body) => scram.finish(body.data()).map_err(failed),
            _ => Err(WireError::unexpected("a strange message during authentication")),
        }
    }

    /// The next message of the authentication.
    async fn authentication_request(&mut self) -> Result<Message, WireError> {
        loop {
            match self.message().await? {
                Message::NoticeResponse(_) => {}
                Message::ErrorResponse(body) => {
                    return Err(WireError::Server(Box::new(ServerError::from_fields(body.fields())?)));
                }
                message => return Ok(message),
            }
        }
    }
}

fn texts(row: &DataRowBody) -> io::Result<Vec<Option<String>>> {
    row.ranges()
        .map(|range| {
            Ok(range.map(|range| String::from_utf8_lossy(row.buffer().get(range).unwrap_or_default()).into_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_servers_and_vendors_write_them() {
        for (text, version) in [
            ("18.1 (Debian 18.1-1.pgdg13+1)", 180_001),
            ("14.20", 140_020),
            ("15beta2", 150_000),
            ("17devel", 170_000),
            ("16.3-EDB", 160_003),
            ("9.6.24", 90_624),
            ("10", 100_000),
        ] {
            assert_eq!(parse_server_version(text), Some(version), "{text}");
        }
        for text in ["", "devel", "99999999"] {
            assert_eq!(parse_server_version(text), None, "{text}");
        }
    }

    #[test]
    fn a_history_tells_where_each_ancestor_was_left() {
        let history = "1\t0/3000148\tno recovery target specified\n\n2\t1/A0\tbefore 2026-01-01 00:00:00+00\n";
        assert_eq!(switch_point(history, 1), Some(Lsn(0x300_0148)));
        assert_eq!(switch_point(history, 2), Some(Lsn(0x1_0000_00A0)));
        assert_eq!(switch_point(history, 3), None);
        assert_eq!(switch_point("# nothing", 1), None);
    }
}
