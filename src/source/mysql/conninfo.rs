//! Where a MySQL or MariaDB server is and how to get in, from its URL, with the names its own clients have.
//!
//! ```text
//!   mysql://user:password@host:3306,other:3307/database?ssl-mode=verify-identity&ssl-ca=/ca.pem
//! ```
//!
//! The database is where tables without one of their own are looked for. Several hosts are tried in order, at every
//! connect from the first: with GTIDs any of them goes on where another stopped.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::config::Secret;
use crate::source::SourceFailure;

const DEFAULT_PORT: u16 = 3306;
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    Disabled,
    /// If the server has it; whoever answers.
    Preferred,
    Required,
    VerifyCa,
    VerifyIdentity,
}

impl fmt::Display for SslMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SslMode::Disabled => "disabled",
            SslMode::Preferred => "preferred",
            SslMode::Required => "required",
            SslMode::VerifyCa => "verify-ca",
            SslMode::VerifyIdentity => "verify-identity",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsOptions {
    pub mode: SslMode,
    pub ca: Option<PathBuf>,
    /// Certificate and key.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    pub port: u16,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.contains(':') {
            true => write!(f, "[{}]:{}", self.name, self.port),
            false => write!(f, "{}:{}", self.name, self.port),
        }
    }
}

#[derive(Clone, PartialEq, Eq)]
pub struct ConnInfo {
    pub hosts: Vec<Host>,
    pub user: String,
    pub password: Option<String>,
    pub database: Option<String>,
    pub tls: TlsOptions,
    /// Whether to ask a server without TLS for its RSA key, to send a password that its cache does not know.
    pub get_server_public_key: bool,
    pub connect_timeout: Duration,
}

// The password stays out of whatever is printed.
impl fmt::Debug for ConnInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnInfo({}@{})", self.user, self.describe())
    }
}

fn wrong(what: impl Into<String>, remedy: impl Into<String>) -> SourceFailure {
    SourceFailure::Misconfigured { what: what.into(), remedy: remedy.into() }
}

impl ConnInfo {
    pub fn parse(url: &str) -> Result<Self, SourceFailure> {
        Self::parse_with(url, &|name| std::env::var(name).ok())
    }

    fn parse_with(url: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, SourceFailure> {
        const FORM: &str = "write mysql://user@host:3306/database?ssl-mode=verify-identity&ssl-ca=/path";
        let (_, rest) = url.split_once("://").ok_or_else(|| wrong("the source is not a URL", FORM))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (login, hosts),
            None => ("", authority),
        };
        let (user, password) = match login.split_once(':') {
            Some((user, password)) => (user, Some(decoded(password)?)),
            None => (login, None),
        };
        let user = match user {
            "" => variable("USER").unwrap_or_else(|| "root".to_owned()),
            user => decoded(user)?,
        };
        let hosts = hosts.split(',').map(parse_host).collect::<Result<Vec<_>, _>>()?;
        let mut info = ConnInfo {
            hosts,
            user,
            password: password.or_else(|| variable("MYSQL_PWD")),
            database: Some(decoded(path)?).filter(|path| !path.is_empty()),
            tls: TlsOptions { mode: SslMode::Preferred, ca: None, certificate: None },
            get_server_public_key: true,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
        };
        info.parameters(query)?;
        // Read at each connect, so that a rotated password needs no restart.
        if let Some(password) = info.password.take() {
            let revealed = Secret::from(password).reveal();
            info.password = Some(revealed.map_err(|error| {
                wrong(format!("the source's password: {error}"), "make the file or variable that holds it readable")
            })?);
        }
        Ok(info)
    }

    fn parameters(&mut self, query: &str) -> Result<(), SourceFailure> {
        let (mut certificate, mut key, mut chosen) = (None, None, None);
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let value = decoded(value)?;
            // Both spellings are in use: ssl-mode on the command line, ssl_mode in files.
            match name.to_ascii_lowercase().replace('_', "-").as_str() {
                "ssl-mode" => chosen = Some(ssl_mode(&value)?),
                "ssl-ca" => self.tls.ca = Some(value.into()),
                "ssl-cert" => certificate = Some(PathBuf::from(value)),
                "ssl-key" => key = Some(PathBuf::from(value)),
                "get-server-public-key" => self.get_server_public_key = flag(name, &value)?,
                "connect-timeout" => {
                    let seconds = value.parse().ok().filter(|seconds: &u64| *seconds > 0);
                    let seconds =
                        seconds.ok_or_else(|| wrong(format!("{name}={value} is not a number of seconds"), "use 10"))?;
                    self.connect_timeout = Duration::from_secs(seconds);
                }
                "password" => self.password = Some(value),
                _ => {
                    return Err(wrong(
                        format!("the source's URL has the unknown parameter {name}"),
                        "there are ssl-mode, ssl-ca, ssl-cert, ssl-key, get-server-public-key and connect-timeout",
                    ));
                }
            }
        }
        self.tls.certificate = match (certificate, key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            _ => return Err(wrong("ssl-cert and ssl-key go together", "name both or neither")),
        };
        self.tls.mode = match chosen {
            Some(mode) => mode,
            // Whoever names an authority wants it asked, as in MySQL's own clients before ssl-mode.
            None if self.tls.ca.is_some() => SslMode::VerifyCa,
            None => SslMode::Preferred,
        };
        if self.tls.mode == SslMode::VerifyCa && self.tls.ca.is_none() {
            return Err(wrong(
                "ssl-mode=verify-ca needs an authority to trust",
                "name its certificate in ssl-ca, or use verify-identity with the system's authorities",
            ));
        }
        Ok(())
    }

    /// The servers, for messages.
    pub fn describe(&self) -> String {
        self.hosts.iter().map(Host::to_string).collect::<Vec<_>>().join(",")
    }
}

fn parse_host(text: &str) -> Result<Host, SourceFailure> {
    let malformed = || wrong(format!("`{text}` is not a host or host:port"), "write for instance db.example.com:3306");
    let (name, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, "")) => (address, None),
        Some((address, port)) => (address, Some(port.strip_prefix(':').ok_or_else(malformed)?)),
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        },
    };
    let name = if name.is_empty() { "localhost".to_owned() } else { decoded(name)? };
    let port = match port {
        Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(malformed)?,
        None => DEFAULT_PORT,
    };
    Ok(Host { name, port })
}

fn ssl_mode(value: &str) -> Result<SslMode, SourceFailure> {
    match value.to_ascii_lowercase().replace('_', "-").as_str() {
        "disabled" => Ok(SslMode::Disabled),
        "preferred" => Ok(SslMode::Preferred),
        "required" => Ok(SslMode::Required),
        "verify-ca" => Ok(SslMode::VerifyCa),
        "verify-identity" => Ok(SslMode::VerifyIdentity),
        _ => Err(wrong(
            format!("`{value}` is not an ssl-mode"),
            "there are disabled, preferred, required, verify-ca and verify-identity",
        )),
    }
}

fn flag(name: &str, value: &str) -> Result<bool, SourceFailure> {
    match value.to_ascii_lowercase().as_str() {
        "" | "1" | "true" | "on" => Ok(true),
        "0" | "false" | "off" => Ok(false),
        _ => Err(wrong(format!("{name}={value} is neither true nor false"), "use true or false")),
    }
}

fn decoded(text: &str) -> Result<String, SourceFailure> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(Into::into).map_err(|_| wrong("the source's URL is not UTF-8", "percent-encode what is not ASCII"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<ConnInfo, String> {
        ConnInfo::parse_with(url, &|name| (name == "MYSQL_PWD").then(|| "from-env".to_owned()))
            .map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_url_names_hosts_login_database_and_encryption() {
        let info = parse(
            "mysql://app:p%40ss@a:3307,[::1]:3308,b/my%20db?ssl-mode=VERIFY_IDENTITY&ssl-ca=/ca.pem&ssl-cert=/c&ssl-key=/k",
        )
        .unwrap();
        let hosts = [("a", 3307), ("::1", 3308), ("b", 3306)];
        assert_eq!(info.hosts, hosts.map(|(name, port)| Host { name: name.to_owned(), port }));
        assert_eq!((info.user.as_str(), info.password.as_deref()), ("app", Some("p@ss")));
        assert_eq!(info.database.as_deref(), Some("my db"));
        let certificate = Some(("/c".into(), "/k".into()));
        assert_eq!(info.tls, TlsOptions { mode: SslMode::VerifyIdentity, ca: Some("/ca.pem".into()), certificate });
        assert_eq!(info.describe(), "a:3307,[::1]:3308,b:3306");
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        let info = parse("mariadb://app@db").unwrap();
        assert_eq!((info.hosts[0].port, info.database, info.tls.mode), (3306, None, SslMode::Preferred));
        assert_eq!(info.password.as_deref(), Some("from-env"));
        assert_eq!(parse("mysql://app@db?ssl-ca=/ca.pem").unwrap().tls.mode, SslMode::VerifyCa);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for url in [
            "mysql:app@db",
            "mysql://app@db:x/",
            "mysql://app@db:0/",
            "mysql://app@db?ssl-mode=maybe",
            "mysql://app@db?sslmode=required",
            "mysql://app@db?ssl-cert=/c",
            "mysql://app@db?ssl-mode=verify-ca",
            "mysql://app@db?connect-timeout=soon",
            "mysql://app@%ff",
        ] {
            assert!(parse(url).is_err(), "{url} was accepted");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        assert!(!format!("{:?}", parse("mysql://app:hunter2@db").unwrap()).contains("hunter2"));
    }
}
