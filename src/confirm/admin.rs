//! A confirmer's admin address: health, metrics and status in the form that a relay's have, so that the same probes,
//! dashboards and `outboxd status` serve both. There is nothing to order here: a confirmer is stopped, or started.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State as Shared;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Serialize;
use tokio::net::TcpListener;

use super::status::{Metrics, Snapshot, Status};
use crate::status::State;

/// Records whose receipts could not be written for this long.
const NO_PROGRESS: Duration = Duration::from_secs(300);

struct Observed {
    metrics: Metrics,
    confirmers: Vec<Arc<Status>>,
}

/// Serves until dropped.
pub async fn serve(listener: TcpListener, metrics: Metrics, confirmers: Vec<Arc<Status>>) {
    let routes = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(page_of_metrics))
        .route("/status", get(status))
        .with_state(Arc::new(Observed { metrics, confirmers }));
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!("the admin address is no longer served: {error}");
    }
}

async fn livez(Shared(observed): Shared<Arc<Observed>>) -> Response {
    let stuck = |one: &Snapshot| one.state == State::Streaming && one.in_flight > 0 && one.idle_for > NO_PROGRESS;
    judge(&observed, stuck, "no progress")
}

/// Whether database and broker are reachable; one without partitions is ready to take some.
async fn readyz(Shared(observed): Shared<Arc<Observed>>) -> Response {
    let unready = |one: &Snapshot| !one.source_connected || !one.kafka_connected;
    judge(&observed, unready, "not ready")
}

fn judge(observed: &Observed, bad: impl Fn(&Snapshot) -> bool, word: &str) -> Response {
    let mut lines = String::new();
    for one in observed.confirmers.iter().map(|status| status.snapshot()).filter(|one| bad(one)) {
        let why = one.last_error.unwrap_or_default();
        lines.push_str(&format!("{}: {word}: {} {why}\n", one.name, one.state.as_str()));
    }
    match lines.is_empty() {
        true => (StatusCode::OK, "ok\n").into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, lines).into_response(),
    }
}

async fn page_of_metrics(Shared(observed): Shared<Arc<Observed>>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match observed.metrics.encode(&observed.confirmers) {
        Ok(page) => ([(header::CONTENT_TYPE, OPEN_METRICS)], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[derive(Serialize)]
struct StatusPage {
    version: &'static str,
    pipelines: Vec<ConfirmerPage>,
}

#[derive(Serialize)]
struct ConfirmerPage {
    name: String,
    state: &'static str,
    state_seconds: u64,
    group: String,
    topics: Vec<String>,
    /// Of the group's, those that this instance reads.
    partitions: usize,
    lag_records: u64,
    lag_seconds: f64,
    in_flight: usize,
    records: u64,
    receipts: u64,
    statements: u64,
    /// Ids of which no row was without a receipt.
    unmatched: u64,
    /// Records without an id that the table could have.
    foreign: u64,
    last_error: Option<String>,
}

impl From<Snapshot> for ConfirmerPage {
    fn from(one: Snapshot) -> Self {
        ConfirmerPage {
            name: one.name,
            state: one.state.as_str(),
            state_seconds: one.in_state_for.as_secs(),
            group: one.group,
            topics: one.topics,
            partitions: one.partitions,
            lag_records: one.lag_records,
            lag_seconds: one.lag_seconds,
            in_flight: one.in_flight,
            records: one.records,
            receipts: one.receipts,
            statements: one.statements,
            unmatched: one.unmatched,
            foreign: one.foreign,
            last_error: one.last_error,
        }
    }
}

async fn status(Shared(observed): Shared<Arc<Observed>>) -> axum::Json<StatusPage> {
    let pipelines = observed.confirmers.iter().map(|status| status.snapshot().into()).collect();
    axum::Json(StatusPage { version: env!("CARGO_PKG_VERSION"), pipelines })
}
