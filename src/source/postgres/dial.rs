//! From an address to a server that will do. Hosts are tried in order, each host's addresses in order, each address
//! with the encryptions that `sslmode` allows:
//!
//! ```text
//! disable            plain
//! allow              plain, then TLS if the server will not have it plain
//! prefer             TLS; plain if the server has no TLS, the handshake fails, or pg_hba.conf refuses it with TLS
//! require, verify-…  TLS
//! Unix socket        plain, whatever the mode: as libpq
//! ```
//!
//! As in libpq the next host is tried when one cannot be reached or is not of the kind asked for, but not when one
//! refuses the login: the others have the same roles. Unlike in libpq a refused password is not sent again in plain.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::conninfo::{Address, ConnInfo, Host, SslMode, SslNegotiation, TargetSessionAttrs};
use super::server_error::WireError;
use super::tls;
use crate::source::SourceFailure;
use crate::source::transport::Transport;

/// What a server says of itself; PostgreSQL 14 and newer tell without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    pub in_hot_standby: bool,
    pub read_only_by_default: bool,
}

/// Asked of servers that do not tell; works on both kinds of connections.
pub(super) const STANDING_QUERY: &str =
    "SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('default_transaction_read_only')";

impl Standing {
    /// From two ParameterStatus values or a row of [`STANDING_QUERY`].
    pub(super) fn from_settings(in_hot_standby: Option<&str>, read_only: Option<&str>) -> Option<Self> {
        let is_on = |value: &str| matches!(value, "on" | "t");
        Some(Standing { in_hot_standby: is_on(in_hot_standby?), read_only_by_default: is_on(read_only?) })
    }

    fn satisfies(self, wanted: TargetSessionAttrs) -> Result<(), &'static str> {
        let read_only = self.in_hot_standby || self.read_only_by_default;
        match wanted {
            TargetSessionAttrs::ReadWrite if read_only => Err("is read-only"),
            TargetSessionAttrs::ReadOnly if !read_only => Err("is not read-only"),
            TargetSessionAttrs::Primary if self.in_hot_standby => Err("is a standby"),
            TargetSessionAttrs::Standby if !self.in_hot_standby => Err("is not a standby"),
            _ => Ok(()),
        }
    }
}

/// What happens on a transport once it is there: the two kinds of connections.
pub(super) trait Protocol {
    type Session: Send;

    /// Startup and authentication.
    fn open(
        info: &ConnInfo,
        host: &Host,
        transport: Transport,
        password: Option<String>,
    ) -> impl Future<Output = Result<Self::Session, WireError>> + Send;

    fn standing(session: &mut Self::Session) -> impl Future<Output = Result<Standing, WireError>> + Send;
}

/// Opens a session on the first server that will do.
pub(super) async fn dial<P: Protocol>(info: &ConnInfo) -> Result<P::Session, SourceFailure> {
    let passes: &[_] = match info.target {
        TargetSessionAttrs::PreferStandby => &[TargetSessionAttrs::Standby, TargetSessionAttrs::Any],
        ref wanted => std::slice::from_ref(wanted),
    };
    let mut failures = Vec::new();
    for wanted in passes {
        failures.clear();
        for host in &info.hosts {
            match Box::pin(dial_host::<P>(info, host, *wanted)).await {
                Ok(session) => return Ok(session),
                Err(Unusable { failure, login_refused: true }) => return Err(failure),
                Err(Unusable { failure, .. }) => failures.push(failure),
            }
        }
    }
    Err(summary(failures, info))
}

/// One failure for all hosts: it passes if any of them may.
fn summary(mut failures: Vec<SourceFailure>, info: &ConnInfo) -> SourceFailure {
    if failures.len() == 1
        && let Some(failure) = failures.pop()
    {
        return failure;
    }
    let what = failures.iter().map(SourceFailure::to_string).collect::<Vec<_>>().join("; ");
    let what = if what.is_empty() { format!("{}: no host", info.describe()) } else { what };
    let permanent = |failure: &SourceFailure| match failure {
        SourceFailure::NotReady { remedy, .. } => Some(remedy.clone()),
        _ => None,
    };
    match failures.iter().map(permanent).collect::<Option<Vec<_>>>().and_then(|remedies| remedies.into_iter().next()) {
        Some(remedy) => SourceFailure::NotReady { what, remedy },
        None => SourceFailure::Transient { what },
    }
}

struct Unusable {
    failure: SourceFailure,
    login_refused: bool,
}

async fn dial_host<P: Protocol>(
    info: &ConnInfo,
    host: &Host,
    wanted: TargetSessionAttrs,
) -> Result<P::Session, Unusable> {
    let description = info.describe_host(host);
    let unusable = |error: WireError| Unusable {
        login_refused: error.server().is_some_and(|error| error.code.starts_with("28")),
        failure: error.classify(&description),
    };
    let timeout = info.tcp.connect_timeout;
    let mut last = WireError::Io(io::Error::other("the name has no address"));
    for endpoint in within(timeout, endpoints(host)).await.map_err(&unusable)? {
        match dial_endpoint::<P>(info, host, &endpoint).await {
            Ok(mut session) if wanted != TargetSessionAttrs::Any => {
                let standing = within(timeout, P::standing(&mut session)).await.map_err(&unusable)?;
                match standing.satisfies(wanted) {
                    Ok(()) => return Ok(session),
                    Err(reason) => last = WireError::Io(io::Error::other(format!("the server {reason}"))),
                }
            }
            Ok(session) => return Ok(session),
            Err(error) if error.server().is_some() => return Err(unusable(error)),
            Err(error) => last = error,
        }
    }
    Err(unusable(last))
}

enum Endpoint {
    Tcp(SocketAddr),
    #[cfg(unix)]
    Unix(std::path::PathBuf),
}

async fn endpoints(host: &Host) -> Result<Vec<Endpoint>, WireError> {
    match &host.address {
        Address::Tcp { hostaddr: Some(address), .. } => Ok(vec![Endpoint::Tcp((*address, host.port).into())]),
        Address::Tcp { name, .. } => {
            let found = tokio::net::lookup_host((name.as_str(), host.port)).await?;
            Ok(found.map(Endpoint::Tcp).collect())
        }
        #[cfg(unix)]
        Address::Unix(folder) => Ok(vec![Endpoint::Unix(folder.join(format!(".s.PGSQL.{}", host.port)))]),
        #[cfg(not(unix))]
        Address::Unix(_) => Err(WireError::refused("this system has no Unix sockets", "name a host")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Encryption {
    None,
    /// If the server has it.
    Offered,
    Required,
}

/// Tries the encryptions that the mode allows.
async fn dial_endpoint<P: Protocol>(
    info: &ConnInfo,
    host: &Host,
    endpoint: &Endpoint,
) -> Result<P::Session, WireError> {
    let plan: &[_] = match (endpoint, info.tls.mode) {
        (Endpoint::Tcp(_), SslMode::Allow) => &[Encryption::None, Encryption::Required],
        (Endpoint::Tcp(_), SslMode::Prefer) => &[Encryption::Offered, Encryption::None],
        (Endpoint::Tcp(_), SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull) => &[Encryption::Required],
        _ => &[Encryption::None],
    };
    let mut first = None;
    for encryption in plan {
        // Where there is a way left, only trouble with the encryption itself leads on to it.
        let (mut handshaking, mut encrypted) = (false, false);
        let attempt = async {
            // Read for each attempt: a rotated password needs no restart.
            let password = info.read_password(host).map_err(WireError::Other)?;
            let transport = reach(info, host, endpoint, *encryption, &mut handshaking).await?;
            encrypted = transport.is_encrypted();
            P::open(info, host, transport, password).await
        };
        let error = match within(info.tcp.connect_timeout, attempt).await {
            Ok(session) => return Ok(session),
            Err(error) => error,
        };
        let other_way = match &error {
            WireError::Server(refusal) => refusal.code == "28000" && encrypted == (*encryption != Encryption::None),
            // Over TLS 1.3 a server refuses our certificate only after the handshake.
            WireError::Io(_) => *encryption == Encryption::Offered && handshaking,
            WireError::Refused { .. } => *encryption == Encryption::Offered && handshaking && !encrypted,
            WireError::Other(_) => false,
        };
        match first {
            // Both ways failed: the way that was preferred is the one to mend.
            Some(preferred) => return Err(preferred),
            None if other_way => first = Some(error),
            None => return Err(error),
        }
    }
    Err(first.unwrap_or_else(|| WireError::Io(io::Error::other("no way to connect is allowed"))))
}

async fn within<T>(
    timeout: Option<Duration>,
    work: impl Future<Output = Result<T, WireError>>,
) -> Result<T, WireError> {
    let Some(timeout) = timeout else { return work.await };
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
        let seconds = timeout.as_secs();
        Err(WireError::Io(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {seconds} s"))))
    })
}

/// Opens the transport. `handshaking` is set as soon as the server agreed to TLS.
async fn reach(
    info: &ConnInfo,
    host: &Host,
    endpoint: &Endpoint,
    encryption: Encryption,
    handshaking: &mut bool,
) -> Result<Transport, WireError> {
    let address = match endpoint {
        #[cfg(unix)]
        Endpoint::Unix(path) => return Ok(Transport::Unix(tokio::net::UnixStream::connect(path).await?)),
        Endpoint::Tcp(address) => address,
    };
    let mut stream = TcpStream::connect(address).await?;
    watch(&stream, info)?;
    if encryption == Encryption::None {
        return Ok(Transport::Tcp(stream));
    }
    if info.tls.negotiation == SslNegotiation::Postgres {
        let mut request = BytesMut::new();
        frontend::ssl_request(&mut request);
        stream.write_all(&request).await?;
        // Exactly one byte is taken from the socket: whatever someone stuffed in behind it (CVE-2021-23222) reaches
        // the TLS handshake, which fails on it, and never the protocol.
        match stream.read_u8().await? {
            b'S' => {}
            b'N' if encryption == Encryption::Offered => return Ok(Transport::Tcp(stream)),
            b'N' => {
                return Err(WireError::refused(
                    format!("the server does not support TLS, which sslmode={} requires", info.tls.mode),
                    "turn TLS on in the server (ssl = on, ssl_cert_file, ssl_key_file), or use sslmode=prefer",
                ));
            }
            // A server that cannot even start a process; nothing it says here can be trusted (CVE-2024-10977).
            b'E' => {
                return Err(WireError::Io(io::Error::other("the server answered the request for TLS with an error")));
            }
            _ => return Err(WireError::unexpected("a strange answer to the request for TLS")),
        }
    }
    *handshaking = true;
    let options = info.tls.clone();
    let config = tokio::task::spawn_blocking(move || tls::client_config(&options))
        .await
        .map_err(|error| WireError::Io(io::Error::other(error)))??;
    let direct = info.tls.negotiation == SslNegotiation::Direct;
    let name = server_name(info, host, address)?;
    let stream = match TlsConnector::from(Arc::new(config)).connect(name, stream).await {
        // How servers before 17 answer, but also one that is going down.
        Err(error) if direct && error.kind() == io::ErrorKind::UnexpectedEof => {
            let what = "the server hung up on TLS; sslnegotiation=direct needs PostgreSQL 17 or newer";
            return Err(WireError::Io(io::Error::new(error.kind(), what)));
        }
        result => result?,
    };
    if direct && stream.get_ref().1.alpn_protocol() != Some(b"postgresql") {
        return Err(WireError::refused(
            "the server did not agree to PostgreSQL's protocol over TLS",
            "sslnegotiation=direct needs PostgreSQL 17 or newer; leave it out",
        ));
    }
    Ok(Transport::Tls(Box::new(stream)))
}

fn server_name(info: &ConnInfo, host: &Host, address: &SocketAddr) -> Result<ServerName<'static>, WireError> {
    let Address::Tcp { name, .. } = &host.address else { return Ok(ServerName::from(address.ip())) };
    match ServerName::try_from(name.clone()) {
        Ok(name) => Ok(name),
        Err(_) if info.tls.mode == SslMode::VerifyFull => Err(WireError::refused(
            format!("`{name}` cannot be the name in a certificate"),
            "connect by the name in the server's certificate",
        )),
        // Where the name is not checked, it only has to be one.
        Err(_) => Ok(ServerName::from(address.ip())),
    }
}

/// A server that has gone away without a word is noticed by the system.
fn watch(stream: &TcpStream, info: &ConnInfo) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    if let Some((idle, interval, count)) = info.tcp.keepalive {
        socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(count))?;
    }
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(info.tcp.user_timeout))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_server_satisfies_what_libpq_says() {
        use TargetSessionAttrs::{Any, Primary, ReadOnly, ReadWrite, Standby};
        let of = |in_hot_standby, read_only_by_default| Standing { in_hot_standby, read_only_by_default };
        for (standing, accepted) in [
            (of(false, false), vec![Any, ReadWrite, Primary]),
            (of(false, true), vec![Any, ReadOnly, Primary]),
            (of(true, false), vec![Any, ReadOnly, Standby]),
            (of(true, true), vec![Any, ReadOnly, Standby]),
        ] {
            for wanted in [Any, ReadWrite, ReadOnly, Primary, Standby] {
                assert_eq!(standing.satisfies(wanted).is_ok(), accepted.contains(&wanted), "{standing:?} {wanted}");
            }
        }
    }

    #[test]
    fn a_standing_is_read_from_settings_and_rows() {
        let standby = Standing { in_hot_standby: true, read_only_by_default: false };
        assert_eq!(Standing::from_settings(Some("on"), Some("off")), Some(standby));
        assert_eq!(Standing::from_settings(Some("t"), Some("off")), Some(standby));
        assert_eq!(Standing::from_settings(None, Some("off")), None);
    }

    #[test]
    fn failures_of_several_hosts_pass_if_one_of_them_may() {
        let info = ConnInfo::parse_with("postgres://u@a,b/db", &|_| None).unwrap();
        let transient = || SourceFailure::transient("a: refused");
        let permanent = || SourceFailure::NotReady { what: "b: no TLS".to_owned(), remedy: "turn it on".to_owned() };
        assert!(matches!(summary(vec![transient(), permanent()], &info), SourceFailure::Transient { .. }));
        assert!(matches!(summary(vec![permanent(), permanent()], &info), SourceFailure::NotReady { .. }));
        assert_eq!(summary(vec![transient(), permanent()], &info).to_string(), "a: refused; b: no TLS");
    }
}
