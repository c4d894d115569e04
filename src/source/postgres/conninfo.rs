//! How to reach a PostgreSQL server, said the way libpq's own clients say it: a URL, completed from the PG* variables
//! and the password file. What works with `psql "$URL"` works here; what libpq takes and outboxd does not do is an
//! error, never ignored, wherever ignoring it would weaken the connection.

mod password;
mod url;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use self::password::{Login, Secret, from_passfile};
use crate::source::SourceFailure;

/// libpq's keywords that are honoured, with the variable that gives their default.
const KEYWORDS: &[(&str, &str)] = &[
    ("application_name", "PGAPPNAME"),
    ("channel_binding", "PGCHANNELBINDING"),
    ("client_encoding", ""),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("dbname", "PGDATABASE"),
    ("fallback_application_name", ""),
    ("gssencmode", ""),
    ("host", "PGHOST"),
    ("hostaddr", "PGHOSTADDR"),
    ("keepalives", ""),
    ("keepalives_count", ""),
    ("keepalives_idle", ""),
    ("keepalives_interval", ""),
    ("load_balance_hosts", ""),
    ("options", "PGOPTIONS"),
    ("passfile", "PGPASSFILE"),
    ("password", "PGPASSWORD"),
    ("port", "PGPORT"),
    ("sslcert", "PGSSLCERT"),
    ("sslcompression", ""),
    ("sslkey", "PGSSLKEY"),
    ("sslmode", "PGSSLMODE"),
    ("sslnegotiation", "PGSSLNEGOTIATION"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("sslsni", "PGSSLSNI"),
    ("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION"),
    ("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("tcp_user_timeout", ""),
    ("user", "PGUSER"),
];

/// Keywords of libpq that name something outboxd does not do, and what to do instead.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("gssdelegation", "GSSAPI is not supported; use a password or a client certificate"),
    ("gsslib", "GSSAPI is not supported; use a password or a client certificate"),
    ("krbsrvname", "GSSAPI is not supported; use a password or a client certificate"),
    ("oauth_client_id", "OAuth is not supported; use a password or a client certificate"),
    ("oauth_issuer", "OAuth is not supported; use a password or a client certificate"),
    ("replication", "leave it out: outboxd opens its replication connections itself"),
    ("require_auth", "leave it out; channel_binding=require makes sure of SCRAM"),
    ("requirepeer", "leave it out; it is not supported"),
    ("service", "write the service's settings into the address"),
    ("servicefile", "write the service's settings into the address"),
    ("sslcertmode", "leave it out; the certificate is sent when sslcert is set"),
    ("sslcrl", "revocation lists are not supported; leave it out"),
    ("sslcrldir", "revocation lists are not supported; leave it out"),
    ("sslpassword", "decrypt the key with `openssl pkey` and name the result in sslkey"),
];

/// A server that may be tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub(super) address: Address,
    pub(super) port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// A name or a literal address; `hostaddr` saves the look-up and leaves the name for the certificate.
    Tcp { name: String, hostaddr: Option<IpAddr> },
    /// The folder of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Address::Tcp { name, .. } if name.contains(':') => write!(f, "[{name}]:{}", self.port),
            Address::Tcp { name, .. } => write!(f, "{name}:{}", self.port),
            Address::Unix(folder) => write!(f, "{}:{}", folder.display(), self.port),
        }
    }
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($variant),+ }

        impl $name {
            const ALL: &'static [(&'static str, Self)] = &[$(($text, Self::$variant)),+];
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text),+ })
            }
        }
    };
}

choice! {
    /// How much the connection is protected.
    SslMode {
        Disable = "disable", Allow = "allow", Prefer = "prefer", Require = "require",
        VerifyCa = "verify-ca", VerifyFull = "verify-full",
    }
}
choice! {
    /// Which of several servers will do.
    TargetSessionAttrs {
        Any = "any", ReadWrite = "read-write", ReadOnly = "read-only", Primary = "primary", Standby = "standby",
        PreferStandby = "prefer-standby",
    }
}
choice! {
    /// Whether SCRAM must be bound to the server's certificate.
    ChannelBinding { Disable = "disable", Prefer = "prefer", Require = "require" }
}
choice! {
    /// Whether TLS is asked for in PostgreSQL's protocol or begun at once (servers from 17).
    SslNegotiation { Postgres = "postgres", Direct = "direct" }
}
choice! {
    /// rustls does not go below 1.2; a lower minimum is met by it.
    TlsVersion { V1 = "TLSv1", V1_1 = "TLSv1.1", V1_2 = "TLSv1.2", V1_3 = "TLSv1.3" }
}

/// The certificates that vouch for the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RootCert {
    /// Not said: `~/.postgresql/root.crt` if there is one.
    Default(Option<PathBuf>),
    File(PathBuf),
    System,
}

#[derive(Clone, Debug)]
pub(super) struct TlsOptions {
    pub mode: SslMode,
    pub negotiation: SslNegotiation,
    pub root: RootCert,
    /// The certificate and its key; named by the user, or the files libpq looks for.
    pub certificate: Option<(PathBuf, PathBuf)>,
    pub sni: bool,
    pub min_version: TlsVersion,
    pub max_version: TlsVersion,
    pub channel_binding: ChannelBinding,
}

#[derive(Clone, Debug)]
pub(super) struct TcpOptions {
    /// Idle time, interval and count; none turns keepalives off.
    pub keepalive: Option<(Duration, Duration, u32)>,
    pub user_timeout: Duration,
    /// For each address, from the TCP handshake to the end of authentication; none waits for ever.
    pub connect_timeout: Option<Duration>,
}

/// Everything needed to open a connection. Neither `Debug` nor [`describe`](Self::describe) shows a password.
#[derive(Clone, Debug)]
pub struct ConnInfo {
    pub(super) hosts: Vec<Host>,
    user: String,
    dbname: String,
    password: Option<Secret>,
    passfile: Option<PathBuf>,
    pub(super) target: TargetSessionAttrs,
    pub(super) tls: TlsOptions,
    pub(super) tcp: TcpOptions,
    pub(super) application_name: String,
    pub(super) options: Option<String>,
}

impl ConnInfo {
    /// Reads a `postgres://` URL, completed from this process's environment.
    pub fn parse(url: &str) -> Result<Self, SourceFailure> {
        Self::parse_with(url, &|name| std::env::var(name).ok())
    }

    /// As [`parse`](Self::parse), with another environment.
    pub fn parse_with(url: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, SourceFailure> {
        let settings = Settings::collect(url, environment)?;
        let home = environment("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let user = match settings.text("user") {
            Some(user) => user.to_owned(),
            None => process_user()
                .ok_or_else(|| misconfigured("the address names no user", "write postgres://USER@host/database"))?,
        };
        let application_name =
            settings.text("application_name").or(settings.text("fallback_application_name")).unwrap_or("outboxd");
        if let Some(encoding) = settings.text("client_encoding")
            && !["utf8", "utf-8", "unicode", "auto"].contains(&encoding.to_ascii_lowercase().as_str())
        {
            return Err(misconfigured("client_encoding can only be UTF8", "leave client_encoding out"));
        }
        if settings.text("gssencmode") == Some("require") {
            return Err(misconfigured("gssencmode=require is not supported", "use sslmode=verify-full"));
        }
        if settings.text("load_balance_hosts").is_some_and(|value| value != "disable") {
            return Err(misconfigured("only load_balance_hosts=disable is supported", "leave it out"));
        }
        Ok(ConnInfo {
            hosts: settings.hosts()?,
            dbname: settings.text("dbname").unwrap_or(&user).to_owned(),
            user,
            password: settings.text("password").map(Secret::parse),
            passfile: settings
                .text("passfile")
                .map(PathBuf::from)
                .or_else(|| home.as_ref().map(|home| home.join(".pgpass"))),
            target: settings.choice("target_session_attrs", TargetSessionAttrs::ALL, TargetSessionAttrs::Any)?,
            tls: settings.tls(home.as_deref())?,
            tcp: settings.tcp()?,
            application_name: application_name.to_owned(),
            options: settings.text("options").map(str::to_owned),
        })
    }

    pub fn user(&self) -> &str {
        &self.user
    }

    pub fn dbname(&self) -> &str {
        &self.dbname
    }

    /// The address without its secrets, for messages.
    pub fn describe(&self) -> String {
        match self.hosts.as_slice() {
            [host] => self.describe_host(host),
            hosts => {
                let hosts: Vec<_> = hosts.iter().map(Host::to_string).collect();
                format!("postgres://{}@{}/{}", self.user, hosts.join(","), self.dbname)
            }
        }
    }

    pub(super) fn describe_host(&self, host: &Host) -> String {
        match &host.address {
            Address::Tcp { .. } => format!("postgres://{}@{host}/{}", self.user, self.dbname),
            Address::Unix(folder) => {
                format!("postgres://{}@/{}?host={}&port={}", self.user, self.dbname, folder.display(), host.port)
            }
        }
    }

    /// The same servers and login, another database.
    #[must_use]
    pub fn with_database(&self, name: &str) -> Self {
        ConnInfo { dbname: name.to_owned(), ..self.clone() }
    }

    /// The same login on one of the servers only, so that a second connection goes where the first one went.
    #[must_use]
    pub fn pinned_to(&self, host: &Host) -> Self {
        ConnInfo { hosts: vec![host.clone()], ..self.clone() }
    }

    /// The password to use now, if there is one.
    pub(super) fn read_password(&self, host: &Host) -> Result<Option<String>, SourceFailure> {
        self.read_password_with(host, &|name| std::env::var(name).ok())
    }

    fn read_password_with(
        &self,
        host: &Host,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<String>, SourceFailure> {
        if let Some(secret) = &self.password {
            return secret.read(environment).map(Some).map_err(|what| SourceFailure::NotReady {
                what: format!("{}: {what}", self.describe_host(host)),
                remedy: "make the password readable where the address says it is".to_owned(),
            });
        }
        let Some(path) = &self.passfile else { return Ok(None) };
        let name = match &host.address {
            // libpq looks sockets in the usual folder up as localhost.
            Address::Unix(folder) if SOCKET_FOLDERS.iter().any(|usual| folder == Path::new(usual)) => "localhost",
            Address::Unix(folder) => folder.to_str().unwrap_or_default(),
            Address::Tcp { name, .. } => name,
        };
        let login = Login { host: name, port: host.port, database: &self.dbname, user: &self.user };
        Ok(from_passfile(path, &login))
    }
}

const SOCKET_FOLDERS: [&str; 3] = ["/var/run/postgresql", "/run/postgresql", "/tmp"];

fn process_user() -> Option<String> {
    #[cfg(unix)]
    {
        nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.name)
    }
    #[cfg(not(unix))]
    {
        std::env::var("USERNAME").ok()
    }
}

fn misconfigured(what: impl Into<String>, remedy: impl Into<String>) -> SourceFailure {
    SourceFailure::Misconfigured { what: what.into(), remedy: remedy.into() }
}

/// The values of the keywords: the URL's, else the environment's. An empty value counts as none.
struct Settings(BTreeMap<&'static str, String>);

impl Settings {
    fn collect(url: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, SourceFailure> {
        let written = url::keywords(url).map_err(|what| {
            misconfigured(what, "write the address as postgres://user:password@host:port/database?sslmode=verify-full")
        })?;
        let mut values = BTreeMap::new();
        for (key, value) in written {
            // JDBC's spelling, which libpq takes in URLs.
            let (key, value) = if key == "ssl" && value == "true" {
                ("sslmode".to_owned(), "require".to_owned())
            } else {
                (key, value)
            };
            let Some((known, _)) = KEYWORDS.iter().find(|(known, _)| *known == key) else {
                return Err(unknown(&key));
            };
            values.insert(*known, value);
        }
        for (key, variable) in KEYWORDS.iter().filter(|(_, variable)| !variable.is_empty()) {
            if values.get(key).is_none_or(String::is_empty)
                && let Some(value) = environment(variable)
            {
                values.insert(key, value);
            }
        }
        values.retain(|_, value| !value.is_empty());
        Ok(Settings(values))
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn choice<T: Copy>(&self, key: &str, all: &[(&str, T)], default: T) -> Result<T, SourceFailure> {
        let Some(text) = self.text(key) else { return Ok(default) };
        all.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
            misconfigured(format!("`{text}` is not a value of {key}"), format!("use one of {}", names.join(", ")))
        })
    }

    fn number<T: FromStr>(&self, key: &str, default: T) -> Result<T, SourceFailure> {
        let Some(text) = self.text(key) else { return Ok(default) };
        text.trim()
            .parse()
            .map_err(|_| misconfigured(format!("{key} is not a number it can be"), format!("correct {key}")))
    }

    fn hosts(&self) -> Result<Vec<Host>, SourceFailure> {
        let list = |key| self.text(key).map(|text| text.split(',').collect::<Vec<_>>()).unwrap_or_default();
        let (names, addresses, ports) = (list("host"), list("hostaddr"), list("port"));
        let count = names.len().max(addresses.len()).max(1);
        if ![0, count].contains(&names.len()) || ![0, count].contains(&addresses.len()) {
            return Err(misconfigured(
                "host and hostaddr name different numbers of servers",
                "give each host one hostaddr",
            ));
        }
        if ports.len() > 1 && ports.len() != count {
            return Err(misconfigured(
                "there are more or fewer ports than hosts",
                "give one port, or one for each host",
            ));
        }
        (0..count)
            .map(|at| {
                let port = match ports.get(at).or(ports.first().filter(|_| ports.len() == 1)) {
                    None | Some(&"") => 5432,
                    Some(text) => text.trim().parse().ok().filter(|port| *port != 0).ok_or_else(|| {
                        misconfigured("a port is not a number from 1 to 65535", "correct the port in the address")
                    })?,
                };
                let name = names.get(at).copied().unwrap_or_default();
                let hostaddr = match addresses.get(at).copied().unwrap_or_default() {
                    "" => None,
                    text => Some(
                        text.parse::<IpAddr>()
                            .map_err(|_| misconfigured("hostaddr is not an IP address", "write host=NAME instead"))?,
                    ),
                };
                let address = match (name, hostaddr) {
                    ("", None) => default_address(port),
                    ("", Some(address)) => Address::Tcp { name: address.to_string(), hostaddr },
                    (name, _) if name.starts_with('/') => Address::Unix(PathBuf::from(name)),
                    (name, hostaddr) => Address::Tcp { name: name.to_owned(), hostaddr },
                };
                Ok(Host { address, port })
            })
            .collect()
    }

    fn tls(&self, home: Option<&Path>) -> Result<TlsOptions, SourceFailure> {
        let usual = |name: &str| home.map(|home| home.join(".postgresql").join(name));
        let root = match self.text("sslrootcert") {
            None => RootCert::Default(usual("root.crt")),
            Some("system") => RootCert::System,
            Some(path) => RootCert::File(PathBuf::from(path)),
        };
        let default = if root == RootCert::System { SslMode::VerifyFull } else { SslMode::Prefer };
        let mode = self.choice("sslmode", SslMode::ALL, default)?;
        if root == RootCert::System && mode != SslMode::VerifyFull {
            return Err(misconfigured(
                format!(
                    "sslmode={mode} is too weak for sslrootcert=system: anyone has a certificate of a public authority"
                ),
                "use sslmode=verify-full",
            ));
        }
        let negotiation = self.choice("sslnegotiation", SslNegotiation::ALL, SslNegotiation::Postgres)?;
        if negotiation == SslNegotiation::Direct && matches!(mode, SslMode::Disable | SslMode::Allow | SslMode::Prefer)
        {
            return Err(misconfigured(
                format!("sslmode={mode} is too weak for sslnegotiation=direct"),
                "use sslmode=require or stronger",
            ));
        }
        let certificate = match (self.text("sslcert"), self.text("sslkey")) {
            (Some(certificate), Some(key)) => Some((PathBuf::from(certificate), PathBuf::from(key))),
            (Some(certificate), None) => usual("postgresql.key").map(|key| (PathBuf::from(certificate), key)),
            (None, key) => usual("postgresql.crt")
                .filter(|path| path.exists())
                .and_then(|path| Some((path, key.map(PathBuf::from).or_else(|| usual("postgresql.key"))?))),
        };
        if certificate.is_none() && self.text("sslcert").is_some() {
            return Err(misconfigured("sslcert is set and sslkey is not", "name the certificate's key in sslkey"));
        }
        Ok(TlsOptions {
            mode,
            negotiation,
            root,
            certificate,
            sni: self.number("sslsni", 1u8)? != 0,
            min_version: self.choice("ssl_min_protocol_version", TlsVersion::ALL, TlsVersion::V1_2)?,
            max_version: self.choice("ssl_max_protocol_version", TlsVersion::ALL, TlsVersion::V1_3)?,
            channel_binding: self.choice("channel_binding", ChannelBinding::ALL, ChannelBinding::Prefer)?,
        })
    }

    /// A silent server is noticed within about half a minute: systems' own defaults take hours.
    fn tcp(&self) -> Result<TcpOptions, SourceFailure> {
        // 0 stands for the system's default in libpq; here for ours.
        let seconds = |key, default| {
            self.number(key, default).map(|value: u64| Duration::from_secs(if value == 0 { default } else { value }))
        };
        let (idle, interval) = (seconds("keepalives_idle", 10)?, seconds("keepalives_interval", 5)?);
        let count = self.number("keepalives_count", 4u32)?.max(1);
        let timeout = self.number("connect_timeout", 10i64)?;
        let user_timeout = match self.number("tcp_user_timeout", 30_000u64)? {
            0 => 30_000,
            milliseconds => milliseconds,
        };
        Ok(TcpOptions {
            keepalive: (self.number("keepalives", 1u8)? != 0).then_some((idle, interval, count)),
            user_timeout: Duration::from_millis(user_timeout),
            connect_timeout: u64::try_from(timeout).ok().filter(|&seconds| seconds > 0).map(Duration::from_secs),
        })
    }
}

fn default_address(port: u16) -> Address {
    SOCKET_FOLDERS
        .iter()
        .map(PathBuf::from)
        .find(|folder| cfg!(unix) && folder.join(format!(".s.PGSQL.{port}")).exists())
        .map_or_else(|| Address::Tcp { name: "localhost".to_owned(), hostaddr: None }, Address::Unix)
}

fn unknown(key: &str) -> SourceFailure {
    if let Some((_, instead)) = UNSUPPORTED.iter().find(|(name, _)| *name == key) {
        return misconfigured(format!("the address has `{key}`, which outboxd does not support"), *instead);
    }
    let nearest = KEYWORDS
        .iter()
        .map(|(known, _)| (strsim::damerau_levenshtein(known, &key.to_ascii_lowercase()), *known))
        .min()
        .filter(|(distance, known)| *distance <= 3.min(known.len() / 2));
    let remedy = match nearest {
        Some((_, known)) => format!("did you mean `{known}`?"),
        None => "use the parameters of libpq's connection strings".to_owned(),
    };
    misconfigured(format!("the address has an unknown parameter `{key}`"), remedy)
}

#[cfg(test)]
mod tests;
