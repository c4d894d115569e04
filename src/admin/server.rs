//! The HTTP server behind the admin address, bounded in every direction: how many connections there are, how long a
//! request may take to come, how large it may be, how long its answer may take, and how long a reader may not read.
//!
//! No route reads a body, so that whatever a client sends costs no more than the buffer of its connection.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, Uri, header};
use axum::response::IntoResponse as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::answers;

/// More than any number of dashboards needs; who comes beyond it waits.
const MOST_CONNECTIONS: usize = 128;
/// How long the head of a request may take, and how long a connection may be idle.
const HEAD_PATIENCE: Duration = Duration::from_secs(20);
/// How long an answer may take: longer than any order does.
const ANSWER_PATIENCE: Duration = Duration::from_secs(90);
/// How long a client may leave an answer unread.
const READER_PATIENCE: Duration = Duration::from_secs(30);
/// Of a request's head, near enough.
const LARGEST_HEAD: usize = 32 << 10;
/// Nobody has anything to say: clients send `{}` at most.
const LARGEST_BODY: u64 = 64 << 10;

/// Serves until dropped.
pub async fn serve(listener: TcpListener, router: Router) {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let service = TowerToHyperService::new(router);
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, say: it passes, or somebody sees it in the log.
                tracing::warn!("a connection to the admin address was not taken: {error}");
                tokio::time::sleep(Duration::from_millis(500)).await;
                continue;
            }
        };
        let service = service.clone();
        tokio::spawn(async move {
            let _place = place;
            let answer = service_fn(move |request: Request<Incoming>| answer(service.clone(), request));
            let mut connection = http1::Builder::new();
            connection.timer(TokioTimer::new()).header_read_timeout(HEAD_PATIENCE).max_buf_size(LARGEST_HEAD);
            give_up_on_silent_readers(&stream);
            // Whatever a client does wrong is its own trouble.
            let _ = connection.serve_connection(TokioIo::new(stream), answer).await;
        });
    }
}

/// A client that takes nothing must not hold its place.
fn give_up_on_silent_readers(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    let _ = socket2::SockRef::from(stream).set_tcp_user_timeout(Some(READER_PATIENCE));
    #[cfg(not(target_os = "linux"))]
    let _ = (stream, READER_PATIENCE);
}

async fn answer(
    service: TowerToHyperService<Router>,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let length =
        request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > LARGEST_BODY) {
        let what = "a request has at most 64 KiB here";
        let mut refused = answers::error(StatusCode::PAYLOAD_TOO_LARGE, what).into_response();
        refused.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
        return Ok(refused);
    }
    trim_slash(request.uri_mut());
    match tokio::time::timeout(ANSWER_PATIENCE, service.call(request)).await {
        Ok(answered) => answered,
        Err(_) => {
            let what = "no answer in time; what was asked for may still happen";
            Ok(answers::error(StatusCode::GATEWAY_TIMEOUT, what).into_response())
        }
    }
}

/// `/connectors/` is `/connectors`, as in Kafka Connect.
fn trim_slash(uri: &mut Uri) {
    let path = uri.path();
    if path.len() < 2 || !path.ends_with('/') {
        return;
    }
    let trimmed = match path.trim_end_matches('/') {
        "" => "/",
        trimmed => trimmed,
    };
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    if let Ok(shorter) = format!("{trimmed}{query}").parse() {
        *uri = shorter;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_at_the_end_is_nothing() {
        for (path, expected) in
            [("/", "/"), ("/a", "/a"), ("/a/", "/a"), ("/a//?b=/", "/a?b=/"), ("//", "/"), ("/a/b/?c", "/a/b?c")]
        {
            let mut uri: Uri = path.parse().unwrap();
            trim_slash(&mut uri);
            assert_eq!(uri.to_string(), expected);
        }
    }
}
