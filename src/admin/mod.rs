//! What operators, orchestrators and their tools ask over HTTP: is it alive, is it ready, what is it doing; and what they
//! tell it to do. docs/admin.md describes the routes, `/openapi.json` too.
//!
//! ```text
//!   server   connections, bounded ─▶ routes ─▶ health, metrics, status     anybody who reaches the address
//!                                         ├─▶ connect, event_store, page
//!                                         └─▶ orders, letters               who may: guard
//! ```

mod answers;
mod connect;
mod event_store;
mod guard;
mod letters;
mod orders;
mod page;
mod routes;
mod server;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{RawQuery, State as Shared};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore, SemaphorePermit, mpsc};

use crate::config::{Admin, DeadLetter, PipelineSettings, PublisherSettings, SinkSettings};
use crate::dead_letters::letter::rfc3339;
use crate::failure::{ExitCode, Halt};
use crate::metrics::Metrics;
use crate::recent::Minute;
use crate::route::layout::Kind;
use crate::status::{PastError, PipelineStatus, PublisherSnapshot, Snapshot, State};
pub use guard::Guard;
pub use orders::Revival;

/// A streaming pipeline with events in flight that saw none of them acknowledged for this long makes no progress.
const NO_PROGRESS: Duration = Duration::from_secs(300);

/// Requests that open a connection of their own, to a database or a broker; others wait.
const FEW: usize = 4;

/// A pipeline: what it is made of, and what it does.
#[derive(Clone)]
pub struct Watched {
    pub settings: Arc<PipelineSettings>,
    pub status: Arc<PipelineStatus>,
}

/// What the routes read.
pub struct Observed {
    metrics: Metrics,
    pipelines: Vec<Arc<PipelineStatus>>,
    watched: Vec<Watched>,
    guard: Guard,
    /// This instance, as Kafka Connect's tools name workers.
    worker: String,
    /// Pipelines that have ended and are to run again.
    revivals: mpsc::Sender<Revival>,
    desk: Semaphore,
    /// Held while a letter is sent again.
    replaying: Arc<Mutex<()>>,
}

impl Observed {
    pub fn new(
        metrics: Metrics,
        watched: Vec<Watched>,
        guard: Guard,
        address: SocketAddr,
        revivals: mpsc::Sender<Revival>,
    ) -> Self {
        let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let worker = match host.filter(|_| address.ip().is_unspecified()) {
            Some(host) => format!("{host}:{}", address.port()),
            None => address.to_string(),
        };
        let pipelines = watched.iter().map(|one| one.status.clone()).collect();
        let (desk, replaying) = (Semaphore::new(FEW), Arc::default());
        Observed { metrics, pipelines, watched, guard, worker, revivals, desk, replaying }
    }

    fn find(&self, name: &str) -> Option<&Watched> {
        self.watched.iter().find(|watched| watched.settings.name == name)
    }

    /// Waits for a turn to open a connection. The semaphore is never closed.
    async fn few_at_once(&self) -> Option<SemaphorePermit<'_>> {
        self.desk.acquire().await.ok()
    }
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
    server::serve(listener, routes::router(observed)).await;
}

/// Whether the process makes progress or legitimately waits.
async fn livez(Shared(observed): Shared<Arc<Observed>>) -> Response {
    let stuck = |one: &Snapshot| one.state == State::Streaming && one.in_flight > 0 && one.idle_for > NO_PROGRESS;
    judge(&observed, stuck, "no progress")
}

/// Whether source and sink are reachable; a standby is ready to take over.
async fn readyz(Shared(observed): Shared<Arc<Observed>>) -> Response {
    let unready = |one: &Snapshot| match one.state {
        State::Streaming => !one.sink_connected,
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

async fn metrics(Shared(observed): Shared<Arc<Observed>>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match observed.metrics.encode(&observed.pipelines) {
        Ok(page) => ([(header::CONTENT_TYPE, OPEN_METRICS)], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[derive(Serialize)]
struct StatusPage {
    version: &'static str,
    instance: String,
    /// Whether changes need a token.
    token: bool,
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
    in_flight: usize,
    events: u64,
    unmatched: u64,
    dead_letters: u64,
    leader: bool,
    last_error: Option<String>,
    source: &'static str,
    source_connected: bool,
    sink_connected: bool,
    /// Since something was acknowledged, or there was nothing to.
    idle_seconds: u64,
    #[serde(flatten)]
    last_minute: MinutePage,
    /// Of its only publisher.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    goes: Option<GoesPage>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    publishers: Vec<PublisherPage>,
}

#[derive(Serialize)]
struct PublisherPage {
    name: String,
    state: &'static str,
    state_seconds: u64,
    position: Option<String>,
    lag_seconds: f64,
    in_flight: usize,
    /// The reading of the log waits for this one.
    holds_back: bool,
    events: u64,
    dead_letters: u64,
    last_error: Option<String>,
    sink_connected: bool,
    idle_seconds: u64,
    #[serde(flatten)]
    last_minute: MinutePage,
    #[serde(flatten)]
    goes: GoesPage,
}

/// Where a publisher's events go, and those that cannot.
#[derive(Serialize)]
struct GoesPage {
    sink: &'static str,
    /// `None` where an event that cannot be delivered ends it.
    dead_letter: Option<String>,
}

impl GoesPage {
    fn of(settings: &PublisherSettings) -> Self {
        let sink = match settings.sink {
            SinkSettings::Kafka => "kafka",
            SinkSettings::Http(_) => "http",
            SinkSettings::RabbitMq(_) => "rabbitmq",
            SinkSettings::Stdout => "stdout",
            SinkSettings::Statistics => "statistics",
        };
        let place = Some(&settings.dead_letter).filter(|place| **place != DeadLetter::None);
        GoesPage { sink, dead_letter: place.map(DeadLetter::describe) }
    }
}

/// The last minute in figures.
#[derive(Serialize)]
struct MinutePage {
    events_per_second: f64,
    /// From the commit to the acknowledgement, in seconds; `None` when nothing was acknowledged.
    latency: Option<LatencyPage>,
    /// Events of each second, the newest last.
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<Vec<u32>>,
    /// The newest last.
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<Vec<ErrorPage>>,
}

#[derive(Serialize)]
struct LatencyPage {
    p50: f64,
    p90: f64,
    p99: f64,
}

#[derive(Serialize)]
struct ErrorPage {
    at: String,
    what: String,
    times: u32,
}

impl MinutePage {
    fn of(minute: &Minute, errors: Vec<PastError>, history: bool) -> Self {
        let latency = || {
            let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| minute.percentile(share));
            Some(LatencyPage { p50: p50?, p90: p90?, p99: p99? })
        };
        let error = |error: PastError| ErrorPage { at: rfc3339(error.at), what: error.what, times: error.times };
        MinutePage {
            events_per_second: minute.rate(),
            latency: latency(),
            history: history.then(|| minute.counts.to_vec()),
            errors: history.then(|| errors.into_iter().map(error).collect()),
        }
    }
}

impl PublisherPage {
    fn of(one: PublisherSnapshot, settings: &PublisherSettings, history: bool) -> Self {
        let takes_part = matches!(one.state, State::Streaming | State::Paused);
        PublisherPage {
            name: one.name,
            state: one.state.as_str(),
            state_seconds: one.in_state_for.as_secs(),
            position: one.position,
            lag_seconds: one.lag_seconds,
            in_flight: one.in_flight,
            holds_back: one.holds_back,
            events: one.events,
            dead_letters: one.dead_letters,
            last_error: one.last_error,
            sink_connected: takes_part && !one.sink_away,
            idle_seconds: if one.in_flight > 0 { one.idle_for.as_secs() } else { 0 },
            last_minute: MinutePage::of(&one.minute, one.errors, history),
            goes: GoesPage::of(settings),
        }
    }
}

/// With `?history=true` also each of the last sixty seconds, and the last errors.
async fn status(Shared(observed): Shared<Arc<Observed>>, RawQuery(query): RawQuery) -> axum::Json<StatusPage> {
    let history = answers::switched_on(query.as_deref(), "history");
    let page = |watched: &Watched| {
        let (one, settings) = (watched.status.snapshot(), &watched.settings);
        let publishers = one.publishers.into_iter().zip(&settings.publishers);
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
            in_flight: one.in_flight,
            events: one.events,
            unmatched: one.unmatched,
            dead_letters: one.dead_letters,
            leader: one.leader,
            last_error: one.last_error,
            source: match settings.source.kind() {
                Kind::Postgres => "postgresql",
                Kind::MySql => "mysql",
                Kind::Mongo => "mongodb",
            },
            source_connected: one.source_connected,
            sink_connected: one.sink_connected,
            idle_seconds: if one.in_flight > 0 { one.idle_for.as_secs() } else { 0 },
            last_minute: MinutePage::of(&one.minute, one.errors, history),
            goes: settings.is_lone().then(|| GoesPage::of(&settings.publishers[0])),
            publishers: publishers.map(|(one, settings)| PublisherPage::of(one, settings, history)).collect(),
        }
    };
    let pipelines = observed.watched.iter().map(page).collect();
    let token = observed.guard.token.is_some();
    let instance = observed.worker.clone();
    axum::Json(StatusPage { version: env!("CARGO_PKG_VERSION"), instance, token, pipelines })
}
