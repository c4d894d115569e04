//! Requests that change something: pausing and resuming. With a token they need it; without one they are taken from this
//! machine alone, and never from a page that a browser here shows.

use std::sync::Arc;

use axum::extract::{Path, State as Shared};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::Observed;
use crate::config::Secret;
use crate::status::Order;

/// Who may change something.
pub struct Guard {
    pub token: Option<Secret>,
    /// Nobody but this machine reaches the address.
    pub loopback: bool,
}

impl Guard {
    fn check(&self, headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
        let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let host = text(header::HOST).unwrap_or_default();
        if let Some(secret) = &self.token {
            let unreadable = |_| (StatusCode::INTERNAL_SERVER_ERROR, "the admin token cannot be read".to_owned());
            let token = secret.reveal().map_err(unreadable)?;
            let given = text(header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
            return match given {
                Some(given) if same(given.as_bytes(), token.as_bytes()) => Ok(()),
                _ => {
                    Err((StatusCode::UNAUTHORIZED, "this needs `Authorization: Bearer` and the admin token".to_owned()))
                }
            };
        }
        if !self.loopback {
            let what = "without --admin-token this is refused on an address that others reach";
            return Err((StatusCode::FORBIDDEN, what.to_owned()));
        }
        // A page elsewhere that has a browser ask here; also under a name that it made lead here.
        if text(header::ORIGIN).is_some_and(|origin| origin.split_once("://").is_none_or(|(_, from)| from != host)) {
            return Err((StatusCode::FORBIDDEN, "this is not for pages of other places".to_owned()));
        }
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name).trim_matches(['[', ']']);
        let local = name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
        match local {
            true => Ok(()),
            false => Err((StatusCode::FORBIDDEN, "without --admin-token ask by the loopback address".to_owned())),
        }
    }
}

/// Compares without telling by its time how much is right.
fn same(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

pub async fn pipeline(
    Shared(observed): Shared<Arc<Observed>>,
    Path((name, verb)): Path<(String, String)>,
    headers: HeaderMap,
) -> Response {
    carry_out(&observed, &name, None, &verb, &headers).await
}

pub async fn publisher(
    Shared(observed): Shared<Arc<Observed>>,
    Path((name, publisher, verb)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Response {
    carry_out(&observed, &name, Some(publisher), &verb, &headers).await
}

async fn carry_out(
    observed: &Observed,
    name: &str,
    publisher: Option<String>,
    verb: &str,
    headers: &HeaderMap,
) -> Response {
    if let Err((status, what)) = observed.guard.check(headers) {
        return (status, what + "\n").into_response();
    }
    let order = match verb {
        "pause" => Order::Pause(publisher.clone()),
        "resume" => Order::Resume(publisher.clone()),
        _ => return (StatusCode::NOT_FOUND, "there are pause and resume\n").into_response(),
    };
    let Some(pipeline) = observed.pipelines.iter().find(|pipeline| pipeline.name() == name) else {
        return (StatusCode::NOT_FOUND, format!("there is no pipeline `{name}`\n")).into_response();
    };
    let known = |publisher: &String| pipeline.publishers.iter().any(|one| one.name() == publisher);
    if let Some(publisher) = publisher.filter(|publisher| !known(publisher)) {
        let what = format!("pipeline `{name}` has no publisher `{publisher}`\n");
        return (StatusCode::NOT_FOUND, what).into_response();
    }
    match pipeline.order(order).await {
        Ok(()) => (StatusCode::OK, "done\n").into_response(),
        Err(what) => (StatusCode::CONFLICT, what + "\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(guard: &Guard, headers: &[(&'static str, &str)]) -> u16 {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        guard.check(&map).err().map_or(200, |(status, _)| status.as_u16())
    }

    #[test]
    fn without_a_token_only_this_machine_changes_anything_and_no_page_of_a_browser() {
        let guard = Guard { token: None, loopback: true };
        assert_eq!(status(&guard, &[("host", "127.0.0.1:7420")]), 200);
        assert_eq!(status(&guard, &[("host", "[::1]:7420")]), 200);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("origin", "http://localhost:7420")]), 200);
        assert_eq!(status(&guard, &[("host", "localhost:7420"), ("origin", "https://evil.example")]), 403);
        assert_eq!(status(&guard, &[("host", "rebound.example:7420")]), 403);
        assert_eq!(status(&guard, &[("host", "127.0.0.1:7420"), ("origin", "null")]), 403);
        assert_eq!(status(&Guard { token: None, loopback: false }, &[("host", "127.0.0.1:7420")]), 403);
    }

    #[test]
    fn a_token_is_needed_where_there_is_one() {
        let guard = Guard { token: Some("s3cret".into()), loopback: true };
        assert_eq!(status(&guard, &[("host", "127.0.0.1:7420")]), 401);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "Bearer s3cret")]), 200);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "Bearer s3creT")]), 401);
        assert_eq!(status(&guard, &[("host", "db:1"), ("authorization", "s3cret")]), 401);
    }
}
