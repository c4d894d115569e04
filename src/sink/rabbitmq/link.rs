//! The one connection to RabbitMQ: made when it is needed, and made anew when it is lost, with the URL and the
//! certificates as they are then. Batches borrow its channels.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::options::{ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::tcp::RustlsConnector;
use lapin::types::FieldTable;
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, Channel, Connection, ConnectionProperties, Error, ErrorKind, Event, ExchangeKind};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, Socket, TcpKeepalive};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::{RabbitMemory, short};
use crate::config::RabbitSettings;
use crate::sink::SinkFailure;
use crate::sink::lanes::Refusal;

/// For the whole of it: TCP, TLS, login and the exchange.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Seconds, unless the URL or the server names fewer: after twice that, a silent peer is a lost one.
const HEARTBEAT: u16 = 20;
const KEEPALIVE: Duration = Duration::from_secs(30);

pub(super) fn not_ready(what: impl Into<String>, remedy: impl Into<String>) -> SinkFailure {
    SinkFailure::NotReady { what: what.into(), remedy: remedy.into() }
}

/// RabbitMQ's own code, if it was RabbitMQ that ended something.
pub(super) fn code(error: &Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// The error as an operator reads it.
pub(super) fn told(error: &Error) -> String {
    match error.kind() {
        ErrorKind::ProtocolError(error) => format!("RabbitMQ says {}", error.get_message()),
        ErrorKind::IOError(error) => format!("the connection to RabbitMQ failed: {error}"),
        _ => format!("the connection to RabbitMQ is lost: {error}"),
    }
}

/// Where RabbitMQ is, and how to get in.
pub(super) struct Target {
    pub uri: AMQPUri,
    pub tls: Option<Arc<ClientConfig>>,
}

impl Target {
    /// As URL and files are now.
    pub fn of(settings: &RabbitSettings) -> Result<Self, SinkFailure> {
        let secret = settings.url.reveal();
        let secret = secret
            .map_err(|error| not_ready(error.to_string(), "make the file or variable it names readable for outboxd"))?;
        // Neither error is shown: it may hold the URL.
        let wrong = || not_ready("the sink's URL cannot be read", "write it as amqp://user:password@host:5672/vhost");
        let url = reqwest::Url::parse(&secret).map_err(|_| wrong())?;
        let mut uri: AMQPUri = secret.parse().map_err(|_| wrong())?;
        // lapin takes an IPv6 address for no host.
        let host = url.host_str().ok_or_else(wrong)?;
        uri.authority.host = host.trim_matches(['[', ']']).to_owned();
        // `amqp://host/` would be the vhost without a name, which nobody has.
        if uri.vhost.is_empty() {
            uri.vhost = "/".to_owned();
        }
        uri.query.heartbeat.get_or_insert(HEARTBEAT);
        let tls = match uri.scheme {
            AMQPScheme::AMQP => None,
            AMQPScheme::AMQPS => Some(Arc::new(tls(settings)?)),
        };
        Ok(Target { uri, tls })
    }

    /// For messages; without the password.
    pub fn address(&self) -> String {
        format!("{}:{}", self.uri.authority.host, self.uri.authority.port)
    }

    /// Connects and logs in. The socket is left in `socket`, for whoever loses patience.
    pub async fn connect(&self, socket: Arc<OnceLock<Socket>>) -> Result<Connection, Error> {
        let options = ConnectionProperties::default()
            .with_connection_name("outboxd".into())
            .with_client_property("product".into(), "outboxd".into())
            .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into());
        let tls = self.tls.clone();
        Connection::connector(
            self.uri.clone(),
            lapin::runtime::default_runtime()?,
            async move |uri, runtime| {
                let (host, port) = (uri.authority.host.as_str(), uri.authority.port);
                let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port)).await?.collect();
                let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
                if let AsyncTcpStream::Plain(plain) = &stream {
                    let plain = SockRef::from(plain.get_ref());
                    plain.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))?;
                    let _ = socket.set(plain.try_clone()?);
                }
                match &tls {
                    None => Ok(stream),
                    Some(tls) => Ok(stream.into_rustls(&RustlsConnector::from(tls.clone()), host).await?),
                }
            },
            options,
        )
        .await
    }

    /// What a connection that did not come about means. `worked`: it did before.
    pub fn refusal(&self, error: &Error, worked: bool) -> Refusal {
        let address = self.address();
        let why = format!("{address}: {}", told(error));
        let remedy = match error.kind() {
            _ if worked => return Refusal::Later { why, after: None },
            ErrorKind::ProtocolError(error) if matches!(error.get_id(), 403 | 530) => {
                "check user, password and vhost in --sink, and that the user has permissions on the vhost".to_owned()
            }
            ErrorKind::AuthProviderError(_) => "check user and password in --sink".to_owned(),
            ErrorKind::IOError(error) if distrusted(error) => {
                "name the file of the authority's certificate in --amqp-ca, and the host as the certificate has it in --sink"
                    .to_owned()
            }
            _ => return Refusal::Later { why, after: None },
        };
        Refusal::Halt(not_ready(why, remedy))
    }
}

/// Whether TLS failed on a certificate: no second try makes that one better.
fn distrusted(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

fn tls(settings: &RabbitSettings) -> Result<ClientConfig, SinkFailure> {
    let mut roots = RootCertStore::empty();
    match &settings.ca {
        Some(path) => {
            let wrong = |why: &dyn std::fmt::Display| {
                not_ready(format!("the certificate authority {}: {why}", path.display()), "correct --amqp-ca")
            };
            let given = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
            if let (0, _) = roots.add_parsable_certificates(given.map_err(|error| wrong(&error))?) {
                return Err(wrong(&"it holds no certificate"));
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            if let (0, _) = roots.add_parsable_certificates(found.certs) {
                let remedy = "install the package ca-certificates, or name the authority's certificate in --amqp-ca";
                return Err(not_ready("this system has no root certificates", remedy));
            }
        }
    }
    let unusable =
        |error: &dyn std::fmt::Display| not_ready(format!("TLS: {error}"), "correct --amqp-cert and --amqp-key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(&error))?
        .with_root_certificates(roots);
    let Some((certificate, key)) = &settings.identity else {
        return Ok(builder.with_no_client_auth());
    };
    let unreadable = |path: &std::path::Path, error: &dyn std::fmt::Display| {
        not_ready(format!("{}: {error}", path.display()), "correct --amqp-cert and --amqp-key")
    };
    let chain = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = chain.map_err(|error| unreadable(certificate, &error))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, &error))?;
    builder.with_client_auth_cert(chain, key).map_err(|error| unusable(&error))
}

/// Opens the connection when somebody needs it.
pub struct Link {
    settings: RabbitSettings,
    delivered: Arc<RabbitMemory>,
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    line: Option<Arc<Line>>,
    failed: Option<(Instant, String)>,
}

impl Link {
    pub fn new(settings: &RabbitSettings, delivered: &Arc<RabbitMemory>) -> Self {
        Link { settings: settings.clone(), delivered: delivered.clone(), state: tokio::sync::Mutex::default() }
    }

    /// The open connection. While one lane opens it, the others wait; what that one learns is told to all.
    pub async fn line(&self) -> Result<Arc<Line>, Refusal> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(line) = state.line.as_ref().filter(|line| line.connection.status().connected()) {
            return Ok(line.clone());
        }
        if let Some((_, why)) = state.failed.as_ref().filter(|(at, _)| *at >= asked) {
            return Err(Refusal::Later { why: why.clone(), after: None });
        }
        let again = state.line.take().is_some() || state.failed.is_some();
        match self.open().await {
            Ok(line) => {
                if again {
                    tracing::info!(address = line.address, "connected to RabbitMQ again");
                }
                let line = Arc::new(line);
                *state = State { line: Some(line.clone()), failed: None };
                Ok(line)
            }
            Err(refusal) => {
                if let Refusal::Later { why, .. } = &refusal {
                    state.failed = Some((Instant::now(), why.clone()));
                }
                Err(refusal)
            }
        }
    }

    async fn open(&self) -> Result<Line, Refusal> {
        let worked = self.delivered.load(Ordering::Acquire);
        let target = match Target::of(&self.settings) {
            Ok(target) => target,
            Err(failure) if worked => return Err(Refusal::Later { why: failure.to_string(), after: None }),
            Err(failure) => return Err(Refusal::Halt(failure)),
        };
        let socket = Arc::new(OnceLock::new());
        let opening = async {
            let connection = target.connect(socket.clone()).await.map_err(|error| target.refusal(&error, worked))?;
            let line = Line::new(connection, target.address());
            declare(&line.connection, &self.settings)
                .await
                .map_err(|error| undeclared(&error, &self.settings, worked))?;
            Ok(line)
        };
        match tokio::time::timeout(OPEN_TIMEOUT, opening).await {
            Ok(opened) => opened,
            Err(_) => {
                // Its thread would wait for an answer as long as there is a socket.
                if let Some(socket) = socket.get() {
                    let _ = socket.shutdown(Shutdown::Both);
                }
                let why = format!("{}: RabbitMQ did not answer within {} s", target.address(), OPEN_TIMEOUT.as_secs());
                Err(Refusal::Later { why, after: None })
            }
        }
    }
}

/// Makes sure of the exchange.
async fn declare(connection: &Connection, settings: &RabbitSettings) -> Result<(), Error> {
    // The default exchange is always there, and nobody may declare it.
    if settings.exchange.is_empty() {
        return Ok(());
    }
    let channel = connection.create_channel().await?;
    declare_on(&channel, settings, !settings.declare).await
}

pub(super) async fn declare_on(channel: &Channel, settings: &RabbitSettings, passive: bool) -> Result<(), Error> {
    let options = ExchangeDeclareOptions { passive, durable: true, ..ExchangeDeclareOptions::default() };
    channel.exchange_declare(short(&settings.exchange), ExchangeKind::Topic, options, FieldTable::default()).await
}

/// What an exchange that is not as it should be means.
fn undeclared(error: &Error, settings: &RabbitSettings, worked: bool) -> Refusal {
    let why = told(error);
    match exchange_remedy(error, settings) {
        Some(_) if worked && code(error) == Some(403) => Refusal::Later { why, after: None },
        Some(remedy) => Refusal::Halt(not_ready(why, remedy)),
        None => Refusal::Later { why, after: None },
    }
}

/// What mends it, if only a person can.
pub(super) fn exchange_remedy(error: &Error, settings: &RabbitSettings) -> Option<String> {
    let exchange = &settings.exchange;
    match code(error)? {
        404 => {
            Some(format!("declare the exchange `{exchange}` and bind queues to it, or leave out --amqp-declare=false"))
        }
        406 => Some(format!(
            "the exchange `{exchange}` is there, but is no durable topic exchange: name another in --exchange, or take it \
             as it is with --amqp-declare=false"
        )),
        403 => Some(format!(
            "grant the user configure permission on the exchange `{exchange}` (rabbitmqctl set_permissions), or declare it \
             yourself and set --amqp-declare=false"
        )),
        _ => None,
    }
}

/// An open connection with its channels. Closed when dropped.
pub struct Line {
    pub(super) connection: Connection,
    address: String,
    /// Channels in confirm mode that no batch is under way on.
    idle: Mutex<Vec<Channel>>,
    watch: AbortHandle,
}

impl Line {
    fn new(connection: Connection, address: String) -> Self {
        let mut events = connection.events_listener();
        let watched = address.clone();
        let watch = tokio::spawn(async move {
            while let Some(event) = events.next().await {
                match event {
                    Event::ConnectionBlocked(why) => {
                        tracing::warn!(address = watched, "RabbitMQ has blocked the connection: {why}");
                    }
                    Event::ConnectionUnblocked => tracing::info!(address = watched, "RabbitMQ takes messages again"),
                    _ => {}
                }
            }
        });
        Line { connection, address, idle: Mutex::default(), watch: watch.abort_handle() }
    }

    pub(super) fn frame_max(&self) -> usize {
        self.connection.configuration().frame_max() as usize
    }

    /// A channel for one batch.
    pub(super) async fn channel(&self) -> Result<Channel, Error> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(channel) if channel.status().connected() => return Ok(channel),
                Some(_) => {}
                None => break,
            }
        }
        let channel = self.connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    }

    /// Takes back a channel whose messages are all confirmed.
    pub(super) fn give_back(&self, channel: Channel) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(channel);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::lanes::LaneSettings;

    fn target(url: &str) -> Result<Target, SinkFailure> {
        let lanes = LaneSettings { lanes: 1, batch: 1, retries: 0, backoff: Duration::ZERO };
        Target::of(&RabbitSettings {
            url: url.into(),
            exchange: String::new(),
            declare: true,
            mandatory: false,
            ca: None,
            identity: None,
            lanes,
        })
    }

    #[test]
    fn a_url_names_host_port_vhost_and_heartbeat() {
        for (url, address, vhost, heartbeat) in [
            ("amqp://u:p@mq", "mq:5672", "/", HEARTBEAT),
            ("amqp://u:p@mq/", "mq:5672", "/", HEARTBEAT),
            ("amqp://u:p@mq:1/a%2fb", "mq:1", "a/b", HEARTBEAT),
            ("amqp://u:p@[::1]:2/x?heartbeat=5", "::1:2", "x", 5),
            ("amqp://u:p@127.0.0.1/%2f?heartbeat=0", "127.0.0.1:5672", "/", 0),
        ] {
            let target = target(url).unwrap();
            assert_eq!((target.address().as_str(), target.uri.vhost.as_str()), (address, vhost), "{url}");
            assert_eq!(target.uri.query.heartbeat, Some(heartbeat), "{url}");
        }
    }

    #[test]
    fn a_url_that_cannot_be_read_is_not_shown() {
        for url in ["amqp://u:hunter2@", "hunter2", "amqp://u:hunter2@mq?heartbeat=often", "redis://u:hunter2@mq"] {
            let failure = target(url).err().unwrap();
            assert!(!format!("{failure:?}").contains("hunter2"), "{failure:?}");
        }
    }
}
