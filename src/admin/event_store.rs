//! The routes by which the operators of event stores know their publishers, by name alone. Whoever stands in a progress
//! table is told and changed there when this instance does not lead: the one that does obeys the table.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State as Shared};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;

use super::answers::{Answered, failed};
use super::orders::{Disobeyed, Verb};
use super::{Observed, Watched};
use crate::config::Capture;
use crate::source::SourceFailure;
use crate::source::poll::operators::{self, ProgressRow};
use crate::status::{PublisherSnapshot, State};

/// How long the database may take to answer.
const TABLE_PATIENCE: Duration = Duration::from_secs(15);

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PublisherPage {
    publisher_name: String,
    pipeline: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<String>,
    /// `ACTIVE`, `PAUSED` or `FAILED`.
    status: String,
    /// What it does at this moment in this instance.
    state: &'static str,
    /// A number in an event store, else as the source writes it.
    last_position: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_transaction_id: Option<String>,
    last_published_at: Option<String>,
    error_count: u64,
    last_error: Option<String>,
    leader_instance: Option<String>,
    leader_heartbeat: Option<String>,
    lag: u64,
    lag_seconds: f64,
    in_flight: usize,
}

/// A publisher, and the pipeline that it is of.
type Found<'a> = (&'a Watched, PublisherSnapshot);

/// All publishers of this name, or of `PIPELINE/PUBLISHER`.
fn find<'a>(observed: &'a Observed, name: Option<&str>) -> Vec<Found<'a>> {
    let is = |watched: &Watched, publisher: &str| {
        name.is_none_or(|name| {
            publisher == name || name.split_once('/') == Some((watched.settings.name.as_str(), publisher))
        })
    };
    let of = |watched: &'a Watched| {
        let publishers = watched.status.publishers.iter().filter(|one| is(watched, one.name()));
        publishers.map(|one| (watched, one.snapshot())).collect::<Vec<_>>()
    };
    observed.watched.iter().flat_map(of).collect()
}

fn is_in_table(watched: &Watched) -> bool {
    matches!(watched.settings.capture, Capture::Positions(_))
}

/// The rows of those pipelines that have some, by pipeline and publisher.
async fn rows(found: &[Found<'_>]) -> Result<BTreeMap<(String, String), ProgressRow>, Response> {
    let mut known = BTreeMap::new();
    let mut asked: Vec<&str> = Vec::new();
    for (watched, _) in found.iter().filter(|(watched, _)| is_in_table(watched)) {
        let pipeline = watched.settings.name.as_str();
        if asked.contains(&pipeline) {
            continue;
        }
        asked.push(pipeline);
        for row in in_time(operators::rows(&watched.settings)).await? {
            known.insert((pipeline.to_owned(), row.publisher.clone()), row);
        }
    }
    Ok(known)
}

async fn in_time<T>(asked: impl Future<Output = Result<T, SourceFailure>>) -> Result<T, Response> {
    match tokio::time::timeout(TABLE_PATIENCE, Box::pin(asked)).await {
        Ok(answered) => answered.map_err(|failure| failed(StatusCode::SERVICE_UNAVAILABLE, failure.to_string())),
        Err(_) => Err(failed(StatusCode::GATEWAY_TIMEOUT, "the database does not answer")),
    }
}

fn page((watched, one): &Found<'_>, row: Option<&ProgressRow>) -> PublisherPage {
    let status = match one.state {
        State::Paused => "PAUSED",
        State::Failed => "FAILED",
        _ => "ACTIVE",
    };
    PublisherPage {
        publisher_name: one.name.clone(),
        pipeline: watched.settings.name.clone(),
        topic: row.map(|row| row.topic.clone()),
        status: row.map_or_else(|| status.to_owned(), |row| row.status.clone()),
        state: one.state.as_str(),
        last_position: match row {
            Some(row) => row.last_position.into(),
            None => one.position.clone().into(),
        },
        last_transaction_id: row.map(|row| row.last_transaction_id.clone()),
        last_published_at: row.and_then(|row| row.last_published_at.clone()),
        error_count: row
            .map_or_else(|| u64::from(one.state == State::Failed), |row| u64::from(row.error_count.unsigned_abs())),
        last_error: one.last_error.clone().or_else(|| row.and_then(|row| row.last_error.clone())),
        leader_instance: row.and_then(|row| row.leader_instance.clone()),
        leader_heartbeat: row.and_then(|row| row.leader_heartbeat.clone()),
        lag: row.map_or(one.in_flight as u64, |row| row.lag.unsigned_abs()),
        lag_seconds: one.lag_seconds,
        in_flight: one.in_flight,
    }
}

async fn pages(observed: &Observed, name: Option<&str>) -> Result<Vec<PublisherPage>, Response> {
    let found = find(observed, name);
    let _few = observed.few_at_once().await;
    let rows = rows(&found).await?;
    let row = |watched: &Watched, name: &str| rows.get(&(watched.settings.name.clone(), name.to_owned()));
    Ok(found.iter().map(|one| page(one, row(one.0, &one.1.name))).collect())
}

fn unknown(name: &str) -> Response {
    failed(StatusCode::NOT_FOUND, format!("there is no publisher `{name}`"))
}

pub async fn list(Shared(observed): Shared<Arc<Observed>>) -> Answered {
    Ok(Json(pages(&observed, None).await?).into_response())
}

/// The publisher; of several of the name the one that is furthest behind.
pub async fn show(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>) -> Answered {
    let pages = pages(&observed, Some(&name)).await?;
    let last = pages.into_iter().max_by_key(|page| page.lag);
    last.map(|page| Json(page).into_response()).ok_or_else(|| unknown(&name))
}

/// How many positions each publisher is behind, or where there are none, how many events it has in flight.
pub async fn lag(Shared(observed): Shared<Arc<Observed>>) -> Answered {
    let mut lags: BTreeMap<String, u64> = BTreeMap::new();
    for page in pages(&observed, None).await? {
        let lag = lags.entry(page.publisher_name).or_default();
        *lag = page.lag.max(*lag);
    }
    Ok(Json(lags).into_response())
}

pub async fn pause(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>, headers: HeaderMap) -> Answered {
    order(&observed, &name, Verb::Pause, &headers).await
}

pub async fn resume(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>, headers: HeaderMap) -> Answered {
    order(&observed, &name, Verb::Resume, &headers).await
}

async fn order(observed: &Observed, name: &str, verb: Verb, headers: &HeaderMap) -> Answered {
    observed.guard.check(headers).map_err(|refusal| refusal.into_response())?;
    let found = find(observed, Some(name));
    if found.is_empty() {
        return Err(unknown(name));
    }
    let status = if verb == Verb::Pause { "PAUSED" } else { "ACTIVE" };
    for (watched, one) in &found {
        let ordered = observed.order(&watched.settings.name, Some(&one.name), verb).await;
        let Err(disobeyed) = ordered else { continue };
        if matches!(disobeyed, Disobeyed::Unknown(_)) || !is_in_table(watched) {
            return Err(failed(disobeyed.status(), disobeyed.what()));
        }
        // Another instance leads, or none does yet.
        let _few = observed.few_at_once().await;
        if !in_time(operators::set_status(&watched.settings, &one.name, status)).await? {
            return Err(failed(StatusCode::CONFLICT, disobeyed.what()));
        }
        if verb == Verb::Resume && watched.status.state() == State::Failed {
            let revived = observed.order(&watched.settings.name, None, Verb::Restart).await;
            revived.map_err(|disobeyed| failed(disobeyed.status(), disobeyed.what()))?;
        }
    }
    Ok(Json(serde_json::json!({ "publisherName": name, "status": status })).into_response())
}
