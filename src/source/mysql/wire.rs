//! A connection to a MySQL or MariaDB server: packets, TLS and authentication.
//!
//! ```text
//!   packet   length:u24 sequence:u8 payload        a payload of 16 MiB − 1 goes on in the next packet
//!
//!   server ── greeting ─────────────▶ client
//!          ◀─ TLS request, handshake ─
//!          ◀─ login ──────────────────
//!          ── OK, error, another plugin, more data ─▶
//! ```
//!
//! The binlog and ordinary SQL run over this one type, so both are opened and encrypted alike; and the binlog's packets
//! are read where they lie in the socket's buffer, which no client library lets one do. Packets and the plugins'
//! arithmetic come from `mysql_common`.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use mysql_common::constants::CapabilityFlags;
use mysql_common::crypto;
use mysql_common::io::ParseBuf;
use mysql_common::packets::{AuthPlugin, HandshakePacket, HandshakeResponse, SslRequest};
use mysql_common::proto::{MyDeserialize as _, MySerialize as _};
use mysql_common::scramble::{scramble_native, scramble_sha256};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::conninfo::{ConnInfo, Host, SslMode, TlsOptions};
use super::server_error::WireError;
use crate::source::SourceFailure;
use crate::source::tls::{Trust, Verifier, file_roots, identity, system_roots};
use crate::source::transport::Transport;

/// A payload this long goes on in the next packet.
pub const MAX_PAYLOAD: usize = 0xFF_FFFF;
pub const PACKET_HEADER: usize = 4;

/// What a server may send during the login or as one row or error, so that a hostile one cannot fill the memory.
const MAX_MESSAGE: usize = (1 << 30) + (1 << 20);
const MAX_LOGIN_MESSAGE: usize = 64 * 1024;

const COLLATION: u8 = 45; // utf8mb4_general_ci, which every server knows

pub struct Wire {
    transport: Transport,
    buffer: BytesMut,
    sequence: u8,
    /// The host that answered.
    pub host: Host,
    pub server_version: String,
    pub connection_id: u32,
}

/// Opens a connection to the first host that takes the login.
pub async fn dial(info: &ConnInfo) -> Result<Wire, SourceFailure> {
    let mut failures = Vec::new();
    for host in &info.hosts {
        match dial_host(info, host).await {
            Ok(wire) => return Ok(wire),
            // The others have the same users: a password is not tried around.
            Err(error) if error.is_login_refused() => return Err(error.classify(&host.to_string())),
            Err(error) => failures.push(error.classify(&host.to_string())),
        }
    }
    Err(summary(failures))
}

/// One failure for all hosts: it passes if any of them may.
pub fn summary(mut failures: Vec<SourceFailure>) -> SourceFailure {
    if let (1, Some(_)) = (failures.len(), failures.last()) {
        return failures.remove(0);
    }
    let what = failures.iter().map(SourceFailure::to_string).collect::<Vec<_>>().join("; ");
    match failures.iter().find(|failure| !matches!(failure, SourceFailure::Transient { .. })) {
        Some(SourceFailure::NotReady { remedy, .. })
            if !failures.iter().any(|failure| matches!(failure, SourceFailure::Transient { .. })) =>
        {
            SourceFailure::NotReady { what, remedy: remedy.clone() }
        }
        _ => SourceFailure::Transient { what },
    }
}

async fn dial_host(info: &ConnInfo, host: &Host) -> Result<Wire, WireError> {
    let attempt = async {
        let mut last = WireError::Io(io::Error::other("the name has no address"));
        for address in tokio::net::lookup_host((host.name.as_str(), host.port)).await? {
            match TcpStream::connect(address).await {
                Ok(stream) => return Wire::open(info, host, address, stream).await,
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    };
    tokio::time::timeout(info.connect_timeout, attempt).await.unwrap_or_else(|_| {
        let seconds = info.connect_timeout.as_secs();
        Err(WireError::Io(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {seconds} s"))))
    })
}

impl Wire {
    async fn open(info: &ConnInfo, host: &Host, address: SocketAddr, stream: TcpStream) -> Result<Self, WireError> {
        watch(&stream)?;
        let mut wire = Wire {
            transport: Transport::Tcp(stream),
            buffer: BytesMut::with_capacity(16 * 1024),
            sequence: 0,
            host: host.clone(),
            server_version: String::new(),
            connection_id: 0,
        };
        let greeting = wire.read_login().await?;
        let greeting = HandshakePacket::deserialize((), &mut ParseBuf(&greeting))
            .map_err(|_| WireError::unexpected("a greeting that is none"))?;
        wire.server_version = greeting.server_version_str().into_owned();
        wire.connection_id = greeting.connection_id();
        let has_tls = greeting.capabilities().contains(CapabilityFlags::CLIENT_SSL);
        let mut capabilities = CapabilityFlags::CLIENT_LONG_PASSWORD
            | CapabilityFlags::CLIENT_LONG_FLAG
            | CapabilityFlags::CLIENT_PROTOCOL_41
            | CapabilityFlags::CLIENT_TRANSACTIONS
            | CapabilityFlags::CLIENT_SECURE_CONNECTION
            | CapabilityFlags::CLIENT_PLUGIN_AUTH
            | CapabilityFlags::CLIENT_PLUGIN_AUTH_LENENC_CLIENT_DATA
            | CapabilityFlags::CLIENT_CONNECT_ATTRS;
        capabilities &= greeting.capabilities();
        match (info.tls.mode, has_tls) {
            (SslMode::Disabled, _) | (SslMode::Preferred, false) => {}
            (mode, false) => {
                return Err(WireError::refused(
                    format!("the server does not support TLS, which ssl-mode={mode} requires"),
                    "give the server a certificate (ssl_cert, ssl_key), or use ssl-mode=preferred",
                ));
            }
            (_, true) => {
                capabilities |= CapabilityFlags::CLIENT_SSL;
                wire = wire.encrypt(info, address, capabilities).await?;
            }
        }
        wire.log_in(info, &greeting, capabilities).await?;
        wire.sequence = 0;
        Ok(wire)
    }

    async fn encrypt(
        mut self,
        info: &ConnInfo,
        address: SocketAddr,
        capabilities: CapabilityFlags,
    ) -> Result<Self, WireError> {
        if !self.buffer.is_empty() {
            // Whatever someone stuffed in behind the greeting must not be taken for what the server says later.
            return Err(WireError::unexpected("more than its greeting"));
        }
        let request = SslRequest::new(capabilities, MAX_PAYLOAD as u32, COLLATION);
        let mut payload = Vec::new();
        request.serialize(&mut payload);
        self.write(&payload).await?;
        let options = info.tls.clone();
        let config = tokio::task::spawn_blocking(move || client_config(&options))
            .await
            .map_err(|error| WireError::Io(io::Error::other(error)))??;
        let name = match ServerName::try_from(self.host.name.clone()) {
            Ok(name) => name,
            Err(_) if info.tls.mode == SslMode::VerifyIdentity => {
                return Err(WireError::refused(
                    format!("`{}` cannot be the name in a certificate", self.host.name),
                    "connect by the name in the server's certificate",
                ));
            }
            Err(_) => ServerName::from(address.ip()),
        };
        let Transport::Tcp(stream) = self.transport else { return Err(WireError::unexpected("TLS twice")) };
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(WireError::handshake)?;
        Ok(Wire { transport: Transport::Tls(Box::new(stream)), ..self })
    }

    async fn log_in(
        &mut self,
        info: &ConnInfo,
        greeting: &HandshakePacket<'_>,
        capabilities: CapabilityFlags,
    ) -> Result<(), WireError> {
        let mut nonce = nonce(&greeting.nonce());
        let mut plugin = greeting.auth_plugin_name_ref().unwrap_or(b"mysql_native_password").to_vec();
        if plugin == b"mysql_clear_password" || !KNOWN_PLUGINS.contains(&plugin.as_slice()) {
            // A server's default need not be the user's plugin; it says which one that is.
            plugin = b"mysql_native_password".to_vec();
        }
        let first = self.proof(info, &plugin, &nonce)?;
        let attributes = HashMap::from([
            ("_client_name".to_owned(), "outboxd".to_owned()),
            ("program_name".to_owned(), "outboxd".to_owned()),
            ("_client_version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("_pid".to_owned(), std::process::id().to_string()),
        ]);
        let response = HandshakeResponse::new(
            Some(first.as_slice()),
            (8, 0, 0),
            Some(info.user.as_bytes()),
            // The database is chosen by a statement, whose error says more.
            None::<&[u8]>,
            Some(AuthPlugin::from_bytes(&plugin)),
            capabilities,
            Some(attributes),
            MAX_PAYLOAD as u32,
        );
        let mut payload = Vec::new();
        response.serialize(&mut payload);
        self.write(&payload).await?;
        loop {
            let answer = self.read_login().await?;
            match answer.split_first() {
                Some((0x00, _)) => return Ok(()),
                Some((0xFE, request)) => {
                    let end = request.iter().position(|byte| *byte == 0);
                    let end =
                        end.ok_or_else(|| WireError::unexpected("a request for another plugin without a name"))?;
                    plugin = request[..end].to_vec();
                    nonce = self::nonce(&request[end + 1..]);
                    let proof = self.proof(info, &plugin, &nonce)?;
                    self.write(&proof).await?;
                }
                Some((0x01, [3])) => {}
                Some((0x01, [4])) => self.whole_password(info, &nonce).await?,
                _ => return Err(WireError::unexpected("a strange answer to the login")),
            }
        }
    }

    /// The proof of the password that the plugin asks for.
    fn proof(&self, info: &ConnInfo, plugin: &[u8], nonce: &[u8]) -> Result<Vec<u8>, WireError> {
        let password = info.password.as_deref().unwrap_or_default().as_bytes();
        let proof = match plugin {
            b"mysql_native_password" => scramble_native(nonce, password).map(Vec::from),
            b"caching_sha2_password" => scramble_sha256(nonce, password).map(Vec::from),
            b"mysql_clear_password" if self.transport.is_encrypted() => Some([password, b"\0"].concat()),
            b"mysql_clear_password" => {
                return Err(WireError::refused(
                    "the server asks for the password in the clear, on a connection without TLS",
                    "use ssl-mode=verify-identity, or give the user another authentication plugin",
                ));
            }
            other => {
                return Err(WireError::refused(
                    format!(
                        "the user {} is authenticated by {}, which outboxd does not know",
                        info.user,
                        String::from_utf8_lossy(other)
                    ),
                    "give outboxd a user with caching_sha2_password (MySQL) or mysql_native_password (MariaDB)",
                ));
            }
        };
        Ok(proof.unwrap_or_default())
    }

    /// The server's cache does not know the password yet: it gets the whole of it, never in the clear.
    async fn whole_password(&mut self, info: &ConnInfo, nonce: &[u8]) -> Result<(), WireError> {
        let mut password = info.password.as_deref().unwrap_or_default().as_bytes().to_vec();
        password.push(0);
        if self.transport.is_encrypted() {
            return self.write(&password).await;
        }
        if !info.get_server_public_key {
            return Err(WireError::refused(
                "the server wants the whole password, and there is no TLS to send it over",
                "use ssl-mode=required or better, or get-server-public-key=true",
            ));
        }
        self.write(&[2]).await?;
        let answer = self.read_login().await?;
        let Some((0x01, key)) = answer.split_first() else { return Err(WireError::unexpected("no public key")) };
        for (at, byte) in password.iter_mut().enumerate() {
            *byte ^= nonce.get(at % nonce.len().max(1)).copied().unwrap_or_default();
        }
        // The library panics on what is not a key.
        let encrypted = catch_unwind(|| crypto::encrypt(&password, key))
            .map_err(|_| WireError::unexpected("a public key that is none"))?;
        self.write(&encrypted).await
    }

    async fn read_login(&mut self) -> Result<BytesMut, WireError> {
        self.read_up_to(MAX_LOGIN_MESSAGE).await
    }

    /// The next message, which may be of several packets. An error packet is the server's error.
    pub async fn read(&mut self) -> Result<BytesMut, WireError> {
        self.read_up_to(MAX_MESSAGE).await
    }

    async fn read_up_to(&mut self, limit: usize) -> Result<BytesMut, WireError> {
        let mut message = BytesMut::new();
        loop {
            while self.buffer.len() < PACKET_HEADER {
                self.fill().await?;
            }
            let length = self.buffer.get_uint_le(3) as usize;
            self.sequence = self.buffer.get_u8().wrapping_add(1);
            if message.len() + length > limit {
                return Err(WireError::unexpected("a message that is too long"));
            }
            while self.buffer.len() < length {
                self.fill().await?;
            }
            let part = self.buffer.split_to(length);
            if message.is_empty() {
                message = part;
            } else {
                message.unsplit(part);
            }
            if length < MAX_PAYLOAD {
                break;
            }
        }
        match message.first() {
            Some(0xFF) => Err(WireError::from_packet(&message)),
            _ => Ok(message),
        }
    }

    async fn fill(&mut self) -> Result<(), WireError> {
        self.buffer.reserve(16 * 1024);
        match self.transport.read_buf(&mut self.buffer).await? {
            0 => Err(WireError::Io(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"))),
            _ => Ok(()),
        }
    }

    /// Sends a payload as packets.
    pub async fn write(&mut self, mut payload: &[u8]) -> Result<(), WireError> {
        loop {
            let part = payload.len().min(MAX_PAYLOAD);
            let mut packet = Vec::with_capacity(PACKET_HEADER + part);
            packet.extend_from_slice(&(part as u32).to_le_bytes()[..3]);
            packet.push(self.sequence);
            self.sequence = self.sequence.wrapping_add(1);
            packet.extend_from_slice(&payload[..part]);
            self.transport.write_all(&packet).await?;
            payload = &payload[part..];
            if part < MAX_PAYLOAD {
                break;
            }
        }
        Ok(self.transport.flush().await?)
    }

    /// Begins a command: its packets are counted from zero.
    pub async fn command(&mut self, payload: &[u8]) -> Result<(), WireError> {
        self.sequence = 0;
        self.write(payload).await
    }

    pub fn is_encrypted(&self) -> bool {
        self.transport.is_encrypted()
    }

    /// The transport and what was read of it already.
    pub fn into_parts(self) -> (Transport, BytesMut) {
        (self.transport, self.buffer)
    }
}

const KNOWN_PLUGINS: [&[u8]; 3] = [b"caching_sha2_password", b"mysql_native_password", b"mysql_clear_password"];

/// The 20 bytes that a proof is made with; servers send a NUL behind them.
fn nonce(sent: &[u8]) -> Vec<u8> {
    sent[..sent.len().min(20)].to_vec()
}

/// The configuration for one connection attempt; its files are read anew each time.
fn client_config(options: &TlsOptions) -> Result<ClientConfig, WireError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let trust = match (options.mode, &options.ca) {
        (SslMode::VerifyIdentity, Some(path)) => Trust::ChainAndName(file_roots(path, "ssl-ca")?),
        (SslMode::VerifyIdentity, None) => Trust::ChainAndName(system_roots("ssl-ca")?),
        (SslMode::VerifyCa, Some(path)) => Trust::Chain(file_roots(path, "ssl-ca")?),
        _ => Trust::Anything { bound: false },
    };
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| WireError::refused(format!("TLS: {error}"), "report it"))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier { trust, provider }));
    match &options.certificate {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => {
            let (chain, private) = identity(certificate, key, ("ssl-cert", "ssl-key"))?;
            builder.with_client_auth_cert(chain, private).map_err(|error| {
                WireError::refused(
                    format!("the certificate {} and its key cannot be used: {error}", certificate.display()),
                    "name in ssl-key the key of the certificate in ssl-cert",
                )
            })
        }
    }
}

/// A server that has gone away without a word is noticed by the system.
fn watch(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(20)).with_interval(Duration::from_secs(5));
    socket.set_tcp_keepalive(&keepalive.with_retries(4))?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(Duration::from_secs(40)))?;
    Ok(())
}
