//! The page for people: one document, one style sheet, one script, all in the binary. It asks nobody but the address that it
//! comes from, and may load nothing else.

use std::sync::Arc;

use axum::extract::State as Shared;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};

use super::{Observed, connect};

/// Nothing but our own files, no script in the document, no text that becomes markup, and no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// The page for whoever names HTML among what is accepted, as browsers do; for all others what Kafka Connect tells there.
pub async fn root(Shared(observed): Shared<Arc<Observed>>, headers: HeaderMap) -> Response {
    let named = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut types =
        named.flat_map(|value| value.split(',')).map(|one| one.split(';').next().unwrap_or_default().trim());
    let mut response = match types.any(|one| matches!(one, "text/html" | "application/xhtml+xml" | "text/*")) {
        true => file("text/html; charset=utf-8", include_str!("page/index.html")),
        false => connect::cluster(&observed),
    };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    response
}

pub async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("page/page.css"))
}

pub async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/page.js"))
}

pub async fn icon() -> Response {
    file("image/svg+xml", include_str!("page/icon.svg"))
}

fn file(kind: &'static str, content: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind), (header::CONTENT_SECURITY_POLICY, POLICY)], content).into_response()
}
