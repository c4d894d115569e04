//! Ordinary SQL beside the stream: slots, publications, checkpoints, the preflight. tokio-postgres speaks it over the
//! transport that [`dial`] opened, so that address, TLS and password mean the same for both kinds of connections.

use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::watch;
use tokio_postgres::config::{
    ChannelBinding as DriverBinding, SslMode as DriverMode, SslNegotiation as DriverNegotiation,
};
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, SimpleQueryMessage};

use super::channel::Encrypted;
use super::conninfo::{ChannelBinding, ConnInfo, Host};
use super::dial::{Protocol, STANDING_QUERY, Standing, dial};
use super::server_error::{WireError, classify_sql};
use super::walsender::{SESSION_PARAMETERS, parse_server_version};
use crate::source::SourceFailure;
use crate::source::transport::Transport;

/// An ordinary connection. Ends when dropped.
pub struct SqlSession {
    client: Client,
    host: Host,
    description: String,
    version: u32,
    encrypted: bool,
    standing: Option<Standing>,
    /// Set once, when the connection has ended.
    end: watch::Receiver<Option<Arc<End>>>,
    /// What is done when a channel that is listened to was notified.
    heard: Arc<OnceLock<Hearer>>,
}

type Hearer = Box<dyn Fn() + Send + Sync>;

/// How a connection ended: with an error, or closed in order.
struct End(Option<tokio_postgres::Error>);

/// Opens an ordinary connection to the first server that will do.
pub async fn connect(info: &ConnInfo) -> Result<SqlSession, SourceFailure> {
    let session = dial::<Sql>(info).await?;
    let mut settings = String::from("SET lock_timeout = '10s'; ");
    for (name, value) in SESSION_PARAMETERS {
        settings.push_str(&format!("SET {name} = '{value}'; "));
    }
    // Known from PostgreSQL 14 on; a session that waits for the next commit is not a forgotten one.
    settings.push_str(
        "SELECT pg_catalog.set_config(name, '0', false) FROM pg_catalog.pg_settings WHERE name = 'idle_session_timeout'",
    );
    let prepared = tokio::time::timeout(Duration::from_secs(10), session.client.batch_execute(&settings)).await;
    match prepared {
        Ok(Ok(())) => Ok(session),
        Ok(Err(error)) => Err(classify_sql(&error, &session.description)),
        Err(_) => Err(SourceFailure::transient(format!("{}: no answer within 10 s", session.description))),
    }
}

/// A session is used as the client it holds.
impl std::ops::Deref for SqlSession {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl SqlSession {
    pub fn client(&self) -> &Client {
        &self.client
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
        self.encrypted
    }

    /// The server's address without secrets, for messages.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Says what is done at every notification of the channels that this session listens to.
    pub fn on_notification(&self, act: impl Fn() + Send + Sync + 'static) {
        let _ = self.heard.set(Box::new(act));
    }

    /// Sorts an error of this session's client.
    pub fn classify(&self, error: &tokio_postgres::Error) -> SourceFailure {
        classify_sql(error, &self.description)
    }

    pub fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Waits until the connection has ended. A server that is shut down says so here (57P01) before anything else
    /// notices.
    pub async fn closed(&self) -> SourceFailure {
        let mut end = self.end.clone();
        // The sender goes away only after it has sent, or with the runtime.
        let ended = end.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        match ended.as_deref() {
            Some(End(Some(error))) => self.classify(error),
            _ => SourceFailure::transient(format!("{}: the server closed the connection", self.description)),
        }
    }
}

/// The protocol of [`dial`] for ordinary connections.
struct Sql;

impl Protocol for Sql {
    type Session = SqlSession;

    async fn open(
        info: &ConnInfo,
        host: &Host,
        transport: Transport,
        password: Option<String>,
    ) -> Result<SqlSession, WireError> {
        let encrypted = transport.is_encrypted();
        let mut config = Config::new();
        config.user(info.user()).dbname(info.dbname()).application_name(&info.application_name);
        config.channel_binding(match info.tls.channel_binding {
            ChannelBinding::Disable => DriverBinding::Disable,
            ChannelBinding::Prefer => DriverBinding::Prefer,
            ChannelBinding::Require => DriverBinding::Require,
        });
        if let Some(password) = password {
            config.password(password);
        }
        if let Some(options) = &info.options {
            config.options(options);
        }
        // Direct negotiation means that the driver goes straight to the handshake, which has been made.
        let (client, connection) = if encrypted {
            config.ssl_mode(DriverMode::Require).ssl_negotiation(DriverNegotiation::Direct);
            let (client, connection) =
                config.connect_raw(transport, Encrypted).await.map_err(|error| WireError::from(&error))?;
            (client, Running::Encrypted(Box::new(connection)))
        } else {
            config.ssl_mode(DriverMode::Disable);
            let (client, connection) =
                config.connect_raw(transport, NoTls).await.map_err(|error| WireError::from(&error))?;
            (client, Running::Plain(Box::new(connection)))
        };
        let parameter = |name: &str| match &connection {
            Running::Encrypted(connection) => connection.parameter(name),
            Running::Plain(connection) => connection.parameter(name),
        };
        let version = parameter("server_version")
            .and_then(parse_server_version)
            .ok_or_else(|| WireError::unexpected("no version"))?;
        let standing = Standing::from_settings(parameter("in_hot_standby"), parameter("default_transaction_read_only"));
        let (ended, end) = watch::channel(None);
        let heard = Arc::<OnceLock<Hearer>>::default();
        let hearer = heard.clone();
        tokio::spawn(async move {
            let mut connection = connection;
            let messages = std::future::poll_fn(|context| {
                loop {
                    let message = match &mut connection {
                        Running::Encrypted(connection) => connection.poll_message(context),
                        Running::Plain(connection) => connection.poll_message(context),
                    };
                    match message {
                        Poll::Ready(Some(Ok(message))) => {
                            if let (AsyncMessage::Notification(_), Some(act)) = (message, hearer.get()) {
                                act();
                            }
                        }
                        Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(error)),
                        Poll::Ready(None) => return Poll::Ready(None),
                        Poll::Pending => return Poll::Pending,
                    }
                }
            });
            ended.send_replace(Some(Arc::new(End(messages.await))));
        });
        let description = info.describe_host(host);
        Ok(SqlSession { client, host: host.clone(), description, version, encrypted, standing, end, heard })
    }

    async fn standing(session: &mut SqlSession) -> Result<Standing, WireError> {
        if let Some(standing) = session.standing {
            return Ok(standing);
        }
        let answer = session.client.simple_query(STANDING_QUERY).await.map_err(|error| WireError::from(&error))?;
        answer
            .iter()
            .find_map(|message| match message {
                SimpleQueryMessage::Row(row) => Standing::from_settings(row.get(0), row.get(1)),
                _ => None,
            })
            .ok_or_else(|| WireError::unexpected("no row"))
    }
}

enum Running {
    Plain(Box<tokio_postgres::Connection<Transport, tokio_postgres::tls::NoTlsStream>>),
    Encrypted(Box<tokio_postgres::Connection<Transport, Transport>>),
}
