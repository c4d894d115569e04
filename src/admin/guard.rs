//! Who may change something, or look into payloads. With a token that takes the token; without one it is for this machine
//! alone, and never for a page that a browser here shows.
//!
//! Two ways lead from a stranger's page to an address that only this machine reaches: the page has the browser send the
//! request (told by `Origin` and `Sec-Fetch-Site`), or it gives a name of its own the loopback address, so that the browser
//! takes both for one place (told by `Host`). A token in `Authorization: Bearer` is proof against both, since no browser
//! adds it by itself; one given as a password (`Basic`, as Kafka Connect's tools do) is not, since browsers remember those.

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::digest::{SHA256, digest};

use crate::config::Secret;

/// Who may change something.
pub struct Guard {
    pub token: Option<Secret>,
    /// Nobody but this machine reaches the address.
    pub loopback: bool,
}

/// Why not, and the status that says so.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: StatusCode,
    pub what: &'static str,
}

fn refused(status: StatusCode, what: &'static str) -> Result<(), Refusal> {
    Err(Refusal { status, what })
}

/// How a token was given.
enum Given {
    Bearer(String),
    /// As the password of whomever.
    Basic(String),
}

impl Given {
    fn of(headers: &HeaderMap) -> Option<Self> {
        let value = text(headers, &header::AUTHORIZATION)?;
        let (scheme, credentials) = value.split_once(' ')?;
        let credentials = credentials.trim();
        if scheme.eq_ignore_ascii_case("bearer") {
            return Some(Given::Bearer(credentials.to_owned()));
        }
        let decoded = BASE64.decode(credentials).ok().filter(|_| scheme.eq_ignore_ascii_case("basic"))?;
        let (_, password) = std::str::from_utf8(&decoded).ok()?.split_once(':')?;
        Some(Given::Basic(password.to_owned()))
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

impl Guard {
    /// Whether whoever sends these headers may.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(secret) = &self.token else { return self.check_without_token(headers) };
        let Ok(token) = secret.reveal() else {
            return refused(StatusCode::INTERNAL_SERVER_ERROR, "the admin token cannot be read");
        };
        match Given::of(headers) {
            // An empty file is no token that everybody knows.
            Some(Given::Bearer(given)) if same(&given, &token) && !token.is_empty() => Ok(()),
            Some(Given::Basic(given)) if same(&given, &token) && !token.is_empty() => same_origin(headers),
            _ => refused(StatusCode::UNAUTHORIZED, "this needs `Authorization: Bearer` and the admin token"),
        }
    }

    fn check_without_token(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        if !self.loopback {
            let what = "without --admin-token this is refused on an address that others reach";
            return refused(StatusCode::FORBIDDEN, what);
        }
        same_origin(headers)?;
        let host = text(headers, &header::HOST).map(name_of).unwrap_or_default();
        let is_loopback = host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
        match is_loopback || host.eq_ignore_ascii_case("localhost") {
            true => Ok(()),
            false => refused(StatusCode::FORBIDDEN, "without --admin-token ask by the loopback address"),
        }
    }
}

/// The host without its port.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    }
}

/// Not for a page of another place.
fn same_origin(headers: &HeaderMap) -> Result<(), Refusal> {
    const ELSEWHERE: &str = "this is not for pages of other places";
    let host = text(headers, &header::HOST).unwrap_or_default();
    let from_here = |origin: &str| origin.split_once("://").is_some_and(|(_, from)| from == host);
    if headers.contains_key(header::ORIGIN) && !text(headers, &header::ORIGIN).is_some_and(from_here) {
        return refused(StatusCode::FORBIDDEN, ELSEWHERE);
    }
    match text(headers, &HeaderName::from_static("sec-fetch-site")) {
        None | Some("same-origin" | "none") => Ok(()),
        Some(_) => refused(StatusCode::FORBIDDEN, ELSEWHERE),
    }
}

/// Compares without telling by its time how much is right, or how long the right one is.
fn same(one: &str, other: &str) -> bool {
    let (one, other) = (digest(&SHA256, one.as_bytes()), digest(&SHA256, other.as_bytes()));
    one.as_ref().iter().zip(other.as_ref()).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(guard: &Guard, headers: &[(&'static str, &str)]) -> u16 {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        guard.check(&map).err().map_or(200, |refusal| refusal.status.as_u16())
    }

    #[test]
    fn without_a_token_only_this_machine_changes_anything_and_no_page_of_a_browser() {
        let guard = Guard { token: None, loopback: true };
        assert_eq!(status(&guard, &[("host", "127.0.0.1:7420")]), 200);
        assert_eq!(status(&guard, &[("host", "[::1]:7420")]), 200);
        assert_eq!(status(&guard, &[("host", "[::1]")]), 200);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("origin", "http://localhost:7420")]), 200);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("sec-fetch-site", "same-origin")]), 200);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("sec-fetch-site", "cross-site")]), 403);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("sec-fetch-site", "same-site")]), 403);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("origin", "https://evil.example")]), 403);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("origin", "http://localhost:8080")]), 403);
        assert_eq!(status(&guard, &[("host", "rebound.example:7420")]), 403);
        assert_eq!(status(&guard, &[("host", "127.0.0.1.evil.example")]), 403);
        assert_eq!(status(&guard, &[("host", "127.0.0.1:7420"), ("origin", "null")]), 403);
        assert_eq!(status(&guard, &[]), 403);
        assert_eq!(status(&Guard { token: None, loopback: false }, &[("host", "127.0.0.1:7420")]), 403);
    }

    #[test]
    fn a_token_is_needed_where_there_is_one() {
        let guard = Guard { token: Some("s3cret".into()), loopback: true };
        assert_eq!(status(&guard, &[("host", "127.0.0.1:7420")]), 401);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "Bearer s3cret")]), 200);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "bearer s3cret")]), 200);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "Bearer s3creT")]), 401);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "Bearer s3cret2")]), 401);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "Bearer ")]), 401);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "s3cret")]), 401);
        let empty = Guard { token: Some("".into()), loopback: true };
        assert_eq!(status(&empty, &[("host", "127.0.0.1:7420"), ("authorization", "Bearer ")]), 401);
    }

    #[test]
    fn a_token_may_be_a_password_but_not_one_that_a_browser_remembers() {
        let guard = Guard { token: Some("s3cret".into()), loopback: false };
        let basic = |credentials: &str| format!("Basic {}", BASE64.encode(credentials));
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", &basic("anybody:s3cret"))]), 200);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", &basic("s3cret:"))]), 401);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "Basic %%%")]), 401);
        let from_a_page =
            [("host", "db:1"), ("authorization", &basic("a:s3cret")[..]), ("origin", "https://evil.example")];
        assert_eq!(status(&guard, &from_a_page), 403);
    }
}
