//! What operators and orchestrators ask over HTTP: is it alive, is it ready, what is it doing.

mod orders;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use tokio::net::TcpListener;

use crate::config::Admin;
use crate::failure::{ExitCode, Halt};
use crate::metrics::{Exposition, Metrics};
use crate::source::backfill::Gap;
use crate::source::mark::Marking;
use crate::status::{PipelineStatus, Pruned, PublisherSnapshot, Snapshot, State};
pub use orders::Guard;

/// A streaming pipeline with events in flight that saw none of them acknowledged for this long makes no progress.
const NO_PROGRESS: Duration = Duration::from_secs(300);

/// What the routes read.
pub struct Observed {
    pub metrics: Metrics,
    pub pipelines: Vec<Arc<PipelineStatus>>,
    pub guard: Guard,
}

/// Binds the admin address. A taken default gives way to a free port; a taken chosen one is an error.
pub async fn bind(admin: &Admin) -> Result<Option<(TcpListener, SocketAddr)>, Halt> {
    let Admin::Listen { address, chosen } = admin else { return Ok(None) };
    let unusable = |error: std::io::Error| Halt {
        code: ExitCode::Usage,
        what: format!("cannot listen on the admin address {address}: {error}"),
        remedy: "name a free one with --admin, or switch it off with --admin off".to_owned(),
    };
    let listener = match TcpListener::bind(address.as_str()).await {
        Err(error) if !chosen && error.kind() == std::io::ErrorKind::AddrInUse => {
            tracing::warn!("the default admin address {address} is taken: using a free port");
            TcpListener::bind("127.0.0.1:0").await
        }
        bound => bound,
    };
    let listener = listener.map_err(unusable)?;
    let address = listener.local_addr().map_err(unusable)?;
    tracing::info!(%address, "health, metrics and status");
    Ok(Some((listener, address)))
}

/// Serves until dropped.
pub async fn serve(listener: TcpListener, observed: Arc<Observed>) {
    let routes = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .route("/pipelines/{name}/{verb}", post(orders::pipeline))
        .route("/pipelines/{name}/publishers/{publisher}/{verb}", post(orders::publisher))
        .with_state(observed);
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!("the admin address is no longer served: {error}");
    }
}

/// Whether the process makes progress or legitimately waits.
async fn livez(Shared(observed): Shared<Arc<Observed>>) -> Response {
    let stuck = |one: &Snapshot| one.state == State::Streaming && one.in_flight > 0 && one.idle_for > NO_PROGRESS;
    judge(&observed, stuck, "no progress")
}

/// Whether source and sink are reachable; a standby is ready to take over.
async fn readyz(Shared(observed): Shared<Arc<Observed>>) -> Response {
    let unready = |one: &Snapshot| match one.state {
        State::Streaming => {
            !one.sink_connected || one.marking.as_ref().is_some_and(|marking| marking.trouble.is_some())
        }
        State::Paused | State::StandingBy => false,
        _ => true,
    };
    judge(&observed, unready, "not ready")
}

fn judge(observed: &Observed, bad: impl Fn(&Snapshot) -> bool, word: &str) -> Response {
    let mut lines = String::new();
    for pipeline in &observed.pipelines {
        let one = pipeline.snapshot();
        if bad(&one) {
            let why = one.last_error.unwrap_or_default();
            lines.push_str(&format!("{}: {word}: {} {why}\n", one.name, one.state.as_str()));
        }
    }
    match lines.is_empty() {
        true => (StatusCode::OK, "ok\n").into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, lines).into_response(),
    }
}

async fn metrics(Shared(observed): Shared<Arc<Observed>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|types| types.to_str().ok());
    let how = Exposition::accepted(accept);
    match observed.metrics.encode(&observed.pipelines, how) {
        Ok(page) => ([(header::CONTENT_TYPE, how.content_type())], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[derive(Serialize)]
struct StatusPage {
    version: &'static str,
    pipelines: Vec<PipelinePage>,
}

#[derive(Serialize)]
struct PipelinePage {
    name: String,
    state: &'static str,
    state_seconds: u64,
    position: Option<String>,
    lag_bytes: Option<u64>,
    lag_seconds: f64,
    retained_bytes: u64,
    /// Rows that are pending, where a table is polled.
    #[serde(skip_serializing_if = "Option::is_none")]
    outbox_depth: Option<u64>,
    /// Who keeps committed rows from being read.
    #[serde(skip_serializing_if = "Option::is_none")]
    held_back_by: Option<String>,
    /// Where delivered rows are marked.
    #[serde(skip_serializing_if = "Option::is_none")]
    marking: Option<MarkingPage>,
    /// A position that was lost, and what was done about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    gap: Option<GapPage>,
    in_flight: usize,
    events: u64,
    unmatched: u64,
    dead_letters: u64,
    /// Those that were not replayed, where there is a place for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    dead_letters_waiting: Option<u64>,
    leader: bool,
    last_error: Option<String>,
    /// What the last pass of retention did.
    #[serde(skip_serializing_if = "Option::is_none")]
    retention: Option<RetentionPage>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    publishers: Vec<PublisherPage>,
}

#[derive(Serialize)]
struct RetentionPage {
    last_pass: Option<String>,
    rows: u64,
    partitions: u64,
    /// The last day that has a partition.
    #[serde(skip_serializing_if = "Option::is_none")]
    partitions_until: Option<String>,
    /// Why something old was left.
    held_back_by: Option<String>,
    last_error: Option<String>,
}

impl From<Pruned> for RetentionPage {
    fn from(pruned: Pruned) -> Self {
        let Pruned { at, rows, partitions, partitions_until, held_back_by, last_error } = pruned;
        RetentionPage { last_pass: at, rows, partitions, partitions_until, held_back_by, last_error }
    }
}

#[derive(Serialize)]
struct MarkingPage {
    rows: u64,
    statements: u64,
    /// Delivered, and not yet marked.
    waiting: u64,
    last_error: Option<String>,
}

impl From<Marking> for MarkingPage {
    fn from(one: Marking) -> Self {
        MarkingPage { rows: one.rows, statements: one.statements, waiting: one.waiting, last_error: one.trouble }
    }
}

#[derive(Serialize)]
struct GapPage {
    lost: String,
    /// Where the log goes on.
    position: String,
    /// Delivered from the table.
    rows: u64,
    state: &'static str,
}

impl From<Gap> for GapPage {
    fn from(one: Gap) -> Self {
        let state = if one.done { "done" } else { "backfill" };
        GapPage { lost: one.lost, position: one.position, rows: one.rows, state }
    }
}

#[derive(Serialize)]
struct PublisherPage {
    name: String,
    state: &'static str,
    position: Option<String>,
    lag_seconds: f64,
    in_flight: usize,
    /// The reading of the log waits for this one.
    holds_back: bool,
    events: u64,
    dead_letters: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dead_letters_waiting: Option<u64>,
    last_error: Option<String>,
}

impl From<PublisherSnapshot> for PublisherPage {
    fn from(one: PublisherSnapshot) -> Self {
        PublisherPage {
            name: one.name,
            state: one.state.as_str(),
            position: one.position,
            lag_seconds: one.lag_seconds,
            in_flight: one.in_flight,
            holds_back: one.holds_back,
            events: one.events,
            dead_letters: one.dead_letters,
            dead_letters_waiting: one.letters_waiting,
            last_error: one.last_error,
        }
    }
}

async fn status(Shared(observed): Shared<Arc<Observed>>) -> axum::Json<StatusPage> {
    let page = |pipeline: &Arc<PipelineStatus>| {
        let one = pipeline.snapshot();
        PipelinePage {
            name: one.name,
            state: one.state.as_str(),
            state_seconds: one.in_state_for.as_secs(),
            position: one.position,
            lag_bytes: one.lag_bytes,
            lag_seconds: one.lag_seconds,
            retained_bytes: one.retained_bytes,
            outbox_depth: one.depth,
            held_back_by: one.held_back_by,
            marking: one.marking.map(MarkingPage::from),
            gap: one.gap.map(GapPage::from),
            in_flight: one.in_flight,
            events: one.events,
            unmatched: one.unmatched,
            dead_letters: one.dead_letters,
            dead_letters_waiting: one.letters_waiting,
            leader: one.leader,
            last_error: one.last_error,
            retention: one.pruned.map(RetentionPage::from),
            publishers: one.publishers.into_iter().map(PublisherPage::from).collect(),
        }
    };
    let pipelines = observed.pipelines.iter().map(page).collect();
    axum::Json(StatusPage { version: env!("CARGO_PKG_VERSION"), pipelines })
}
