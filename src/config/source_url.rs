//! The address of a source, as far as every source's is alike: scheme, user, database and parameters. What else it
//! says is the source's own business.

use std::fmt;

use percent_encoding::percent_decode_str;

use super::problem::ConfigError;
use super::secret::Secret;

/// A source's URL. Only [`SourceUrl::reveal`] shows its password.
#[derive(Clone, PartialEq, Eq)]
pub struct SourceUrl(Secret);

impl SourceUrl {
    pub fn new(url: Secret) -> Self {
        SourceUrl(url)
    }

    /// The URL with its password as it is now: to be called at each connect.
    pub fn reveal(&self) -> Result<String, ConfigError> {
        self.0.reveal()
    }
}

impl fmt::Display for SourceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.reveal() {
            Ok(url) => f.write_str(&redact_url(&url)),
            Err(_) => self.0.fmt(f),
        }
    }
}

impl fmt::Debug for SourceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SourceUrl({self})")
    }
}

/// The URL without its passwords. A password written without percent-encoding may hold any character, so all up to
/// the last `@` is taken for it: rather too little is shown than too much.
pub fn redact_url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return "***".to_owned() };
    let rest = match rest.rsplit_once('@') {
        Some((user_info, place)) => match user_info.split_once(':') {
            Some((user, _)) => format!("{user}:***@{place}"),
            None => rest.to_owned(),
        },
        None => rest.to_owned(),
    };
    let Some((place, query)) = rest.split_once('?') else { return format!("{scheme}://{rest}") };
    let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((name, _)) if name.to_ascii_lowercase().contains("password") => format!("{name}=***"),
        _ => parameter.to_owned(),
    });
    format!("{scheme}://{place}?{}", parameters.collect::<Vec<_>>().join("&"))
}

/// What all sources' URLs have in common, percent-decoded.
#[derive(Default)]
pub(super) struct UrlParts {
    pub scheme: String,
    pub user: Option<String>,
    pub database: Option<String>,
    parameters: Vec<(String, String)>,
}

impl UrlParts {
    /// `None` when the text has no `scheme://`.
    pub fn parse(url: &str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let user = authority.rsplit_once('@').map(|(user_info, _)| user_info.split(':').next().unwrap_or_default());
        let parameters = query.split('&').filter_map(|parameter| parameter.split_once('='));
        Some(UrlParts {
            scheme: scheme.to_ascii_lowercase(),
            user: user.filter(|user| !user.is_empty()).map(decoded),
            database: Some(path).filter(|path| !path.is_empty()).map(decoded),
            parameters: parameters.map(|(name, value)| (name.to_owned(), decoded(value))).collect(),
        })
    }

    pub fn parameter(&self, name: &str) -> Option<&str> {
        let found = self.parameters.iter().rev().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_urls_password_is_never_shown() {
        for (url, shown) in [
            ("postgres://app:hunter2@db:5432/shop", "postgres://app:***@db:5432/shop"),
            ("postgres://app:hu@n/te?r2@db/shop", "postgres://app:***@db/shop"),
            ("postgres://app@db/shop?password=hunter2&a=b", "postgres://app@db/shop?password=***&a=b"),
            ("postgres://db/shop?sslpassword=hunter2", "postgres://db/shop?sslpassword=***"),
            ("postgres://:hunter2@db/shop", "postgres://:***@db/shop"),
            ("postgres://app@a,b:6432/shop", "postgres://app@a,b:6432/shop"),
            ("app:hunter2@db", "***"),
        ] {
            assert_eq!(redact_url(url), shown);
            let url = SourceUrl::new(Secret::literal(url));
            assert_eq!(format!("{url}|{url:?}"), format!("{shown}|SourceUrl({shown})"));
        }
    }

    #[test]
    fn a_urls_parts_are_decoded() {
        let parts = UrlParts::parse("Postgres://us%65r:p@a:1,b:2/my%20db?dbname=x&sslmode=require").unwrap();
        assert_eq!((parts.scheme.as_str(), parts.user.as_deref()), ("postgres", Some("user")));
        assert_eq!(parts.database.as_deref(), Some("my db"));
        assert_eq!((parts.parameter("dbname"), parts.parameter("port")), (Some("x"), None));
        assert!(UrlParts::parse("dbname=shop").is_none());
    }
}
