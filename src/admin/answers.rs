//! What answers and questions have in common.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;
use serde::Serialize;

use super::guard::Refusal;

/// An error as Kafka Connect has it.
#[derive(Debug, Serialize)]
pub struct ErrorBody {
    error_code: u16,
    message: String,
}

pub fn error(status: StatusCode, what: impl Into<String>) -> (StatusCode, Json<ErrorBody>) {
    (status, Json(ErrorBody { error_code: status.as_u16(), message: what.into() }))
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        error(self.status, self.what).into_response()
    }
}

/// What answers with an error give back.
pub type Answered = Result<Response, Response>;

pub fn failed(status: StatusCode, what: impl Into<String>) -> Response {
    error(status, what).into_response()
}

/// All values of a parameter of the query.
pub fn parameters<'a>(query: Option<&'a str>, name: &'a str) -> impl Iterator<Item = String> + 'a {
    let pairs = query.unwrap_or_default().split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.filter(move |(key, _)| *key == name).map(|(_, value)| {
        let spaced = value.replace('+', " ");
        percent_decode_str(&spaced).decode_utf8_lossy().into_owned()
    })
}

pub fn parameter(query: Option<&str>, name: &str) -> Option<String> {
    parameters(query, name).next()
}

/// Whether it was given and is not `false`.
pub fn switched_on(query: Option<&str>, name: &str) -> bool {
    parameter(query, name).is_some_and(|value| !value.eq_ignore_ascii_case("false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_and_may_come_again() {
        let query = Some("expand=status&expand=in%66o&a+b=c&limit");
        assert_eq!(parameters(query, "expand").collect::<Vec<_>>(), ["status", "info"]);
        assert_eq!(parameter(query, "limit").as_deref(), Some(""));
        assert_eq!(parameter(query, "other"), None);
        assert!(switched_on(Some("x=true"), "x") && switched_on(Some("x"), "x"));
        assert!(!switched_on(Some("x=False"), "x") && !switched_on(None, "x"));
    }
}
