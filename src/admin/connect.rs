//! Kafka Connect's REST interface, as far as it watches and holds: a pipeline is a connector, its publishers are its tasks.
//! So tools that were made for Connect see outboxd, pause it and restart it. What a pipeline is made of comes from flags
//! and a file, and nobody changes that here.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, RawQuery, State as Shared};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use serde_json::json;

use super::answers::{Answered, failed, parameters, switched_on};
use super::orders::Verb;
use super::{Observed, Watched};
use crate::config::{Brokers, Capture, PipelineSettings, PublisherSettings, SinkSettings, SourceSettings, SourceUrl};
use crate::status::{PublisherSnapshot, Snapshot, State};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// What Connect says where nobody has told it either.
const COMMIT: &str = match option_env!("OUTBOXD_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

#[derive(Serialize)]
struct TaskId {
    connector: String,
    task: usize,
}

#[derive(Serialize)]
struct Info {
    name: String,
    config: BTreeMap<String, String>,
    tasks: Vec<TaskId>,
    #[serde(rename = "type")]
    kind: &'static str,
}

#[derive(Serialize)]
struct ConnectorState {
    state: &'static str,
    worker_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
    version: &'static str,
}

#[derive(Serialize)]
struct TaskState {
    id: usize,
    state: &'static str,
    worker_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
    version: &'static str,
}

#[derive(Serialize)]
struct Status {
    name: String,
    connector: ConnectorState,
    tasks: Vec<TaskState>,
    #[serde(rename = "type")]
    kind: &'static str,
}

/// Connect's word for it. Passing trouble is no failure: nobody needs to do anything about it.
fn word(state: State) -> &'static str {
    match state {
        State::Streaming => "RUNNING",
        State::Paused => "PAUSED",
        State::Failed => "FAILED",
        State::Retrying => "RESTARTING",
        // Another instance has it, or nobody yet.
        State::Starting | State::StandingBy => "UNASSIGNED",
        State::Stopped => "STOPPED",
    }
}

/// What `GET /` tells those who ask for JSON.
pub fn cluster(observed: &Observed) -> Response {
    let clusters = observed.watched.iter().flat_map(|watched| &watched.status.publishers);
    let id = clusters.filter_map(|publisher| publisher.kafka_cluster()).next();
    Json(json!({ "version": VERSION, "commit": COMMIT, "kafka_cluster_id": id })).into_response()
}

pub async fn plugins() -> Response {
    let class = |class: &str| json!({ "class": class, "type": "source", "version": VERSION });
    Json([class(POSTGRES), class(MYSQL), class(MONGODB)]).into_response()
}

const POSTGRES: &str = "outboxd.PostgresOutbox";
const MYSQL: &str = "outboxd.MySqlOutbox";
const MONGODB: &str = "outboxd.MongoDbOutbox";

pub async fn list(Shared(observed): Shared<Arc<Observed>>, RawQuery(query): RawQuery) -> Answered {
    let expand: Vec<String> = parameters(query.as_deref(), "expand").collect();
    if expand.is_empty() {
        let names: Vec<_> = observed.watched.iter().map(|watched| &watched.settings.name).collect();
        return Ok(Json(names).into_response());
    }
    let mut connectors = BTreeMap::new();
    for watched in &observed.watched {
        let mut parts = serde_json::Map::new();
        for part in &expand {
            let value = match part.as_str() {
                "status" => json!(status_of(&observed, watched)),
                "info" => json!(info_of(watched)),
                // As Connect does.
                _ => continue,
            };
            parts.insert(part.clone(), value);
        }
        connectors.insert(watched.settings.name.clone(), parts);
    }
    Ok(Json(connectors).into_response())
}

fn find<'a>(observed: &'a Observed, name: &str) -> Result<&'a Watched, Response> {
    observed.find(name).ok_or_else(|| failed(StatusCode::NOT_FOUND, format!("Connector {name} not found")))
}

/// The task of this number, and the publisher that it is.
fn find_task<'a>(
    observed: &'a Observed,
    (name, task): &(String, String),
) -> Result<(&'a Watched, usize, &'a PublisherSettings), Response> {
    let watched = find(observed, name)?;
    let missing = || failed(StatusCode::NOT_FOUND, format!("Task {name}-{task} not found"));
    let task = task.parse::<usize>().map_err(|_| missing())?;
    let publisher = watched.settings.publishers.get(task).ok_or_else(missing)?;
    Ok((watched, task, publisher))
}

pub async fn info(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>) -> Answered {
    Ok(Json(info_of(find(&observed, &name)?)).into_response())
}

fn info_of(watched: &Watched) -> Info {
    let settings = &watched.settings;
    let tasks = 0..settings.publishers.len();
    Info {
        name: settings.name.clone(),
        config: config_of(settings),
        tasks: tasks.map(|task| TaskId { connector: settings.name.clone(), task }).collect(),
        kind: "source",
    }
}

pub async fn config(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>) -> Answered {
    Ok(Json(config_of(&find(&observed, &name)?.settings)).into_response())
}

pub async fn status(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>) -> Answered {
    Ok(Json(status_of(&observed, find(&observed, &name)?)).into_response())
}

fn status_of(observed: &Observed, watched: &Watched) -> Status {
    let snapshot: Snapshot = watched.status.snapshot();
    let connector = ConnectorState {
        state: word(snapshot.state),
        worker_id: observed.worker.clone(),
        trace: snapshot.last_error,
        version: VERSION,
    };
    let tasks = watched.status.publishers.iter().enumerate();
    Status {
        name: snapshot.name,
        connector,
        tasks: tasks.map(|(task, publisher)| task_state(observed, task, publisher.snapshot())).collect(),
        kind: "source",
    }
}

fn task_state(observed: &Observed, id: usize, one: PublisherSnapshot) -> TaskState {
    let worker_id = observed.worker.clone();
    TaskState { id, state: word(one.state), worker_id, trace: one.last_error, version: VERSION }
}

pub async fn tasks(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>) -> Answered {
    let settings = &find(&observed, &name)?.settings;
    let task = |(task, publisher): (usize, &PublisherSettings)| {
        let mut config = publisher_config(publisher);
        config.insert("publisher".to_owned(), publisher.name.clone());
        json!({ "id": TaskId { connector: name.clone(), task }, "config": config })
    };
    Ok(Json(settings.publishers.iter().enumerate().map(task).collect::<Vec<_>>()).into_response())
}

pub async fn task_status(Shared(observed): Shared<Arc<Observed>>, Path(which): Path<(String, String)>) -> Answered {
    let (watched, task, _) = find_task(&observed, &which)?;
    let state = task_state(&observed, task, watched.status.publishers[task].snapshot());
    Ok(Json(state).into_response())
}

/// Topics whose names are known beforehand.
pub async fn topics(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>) -> Answered {
    let settings = &find(&observed, &name)?.settings;
    let of = |publisher: &PublisherSettings| publisher.route.topic.clone().filter(|topic| !topic.contains('{'));
    let kafka = settings.publishers.iter().filter(|one| matches!(one.sink, SinkSettings::Kafka));
    let mut topics: Vec<_> = kafka.filter_map(of).collect();
    topics.sort();
    topics.dedup();
    Ok(Json(json!({ &name: { "topics": topics } })).into_response())
}

pub async fn pause(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>, headers: HeaderMap) -> Answered {
    order(&observed, &name, None, Verb::Pause, &headers).await?;
    Ok(StatusCode::ACCEPTED.into_response())
}

pub async fn resume(Shared(observed): Shared<Arc<Observed>>, Path(name): Path<String>, headers: HeaderMap) -> Answered {
    order(&observed, &name, None, Verb::Resume, &headers).await?;
    Ok(StatusCode::ACCEPTED.into_response())
}

/// With `includeTasks` or `onlyFailed` the answer has a body, as Connect's has.
pub async fn restart(
    Shared(observed): Shared<Arc<Observed>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Answered {
    let [with_tasks, only_failed] = ["includeTasks", "onlyFailed"].map(|name| switched_on(query.as_deref(), name));
    observed.guard.check(&headers).map_err(|refusal| refusal.into_response())?;
    let watched = find(&observed, &name)?;
    let snapshot = watched.status.snapshot();
    let has_failed = snapshot.state == State::Failed;
    if !only_failed || has_failed {
        order(&observed, &name, None, Verb::Restart, &headers).await?;
    } else if with_tasks {
        for publisher in snapshot.publishers.iter().filter(|one| one.state == State::Failed) {
            order(&observed, &name, Some(&publisher.name), Verb::Restart, &headers).await?;
        }
    }
    match with_tasks || only_failed {
        false => Ok(StatusCode::NO_CONTENT.into_response()),
        true => Ok((StatusCode::ACCEPTED, Json(status_of(&observed, watched))).into_response()),
    }
}

pub async fn restart_task(
    Shared(observed): Shared<Arc<Observed>>,
    Path(which): Path<(String, String)>,
    headers: HeaderMap,
) -> Answered {
    observed.guard.check(&headers).map_err(|refusal| refusal.into_response())?;
    let (watched, _, publisher) = find_task(&observed, &which)?;
    order(&observed, &watched.settings.name, Some(&publisher.name), Verb::Restart, &headers).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn order(
    observed: &Observed,
    name: &str,
    publisher: Option<&str>,
    verb: Verb,
    headers: &HeaderMap,
) -> Result<(), Response> {
    observed.guard.check(headers).map_err(|refusal| refusal.into_response())?;
    find(observed, name)?;
    let ordered = observed.order(name, publisher, verb).await;
    ordered.map_err(|disobeyed| failed(disobeyed.status(), disobeyed.what()))
}

/// What a pipeline is made of, as far as it is no secret.
fn config_of(settings: &PipelineSettings) -> BTreeMap<String, String> {
    let (class, url) = match &settings.source {
        SourceSettings::Postgres(source) => (POSTGRES, &source.url),
        SourceSettings::MySql(source) => (MYSQL, &source.url),
        SourceSettings::Mongo(source) => (MONGODB, &source.url),
    };
    let tables: Vec<_> = settings.source.tables().iter().map(ToString::to_string).collect();
    let capture = match settings.capture {
        Capture::Log => "log",
        Capture::Poll(_) | Capture::Positions(_) => "poll",
    };
    let mut config: BTreeMap<String, String> = [
        ("name", settings.name.clone()),
        ("connector.class", class.to_owned()),
        ("tasks.max", settings.publishers.len().to_string()),
        ("source", source_place(url)),
        ("table", tables.join(",")),
        ("layout", settings.route.layout.clone()),
        ("capture", capture.to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    if let SourceSettings::Postgres(source) = &settings.source {
        config.insert("slot".to_owned(), source.slot.clone());
        config.insert("publication".to_owned(), source.publication.clone());
    }
    if settings.is_lone() {
        config.extend(publisher_config(&settings.publishers[0]));
    } else {
        let names: Vec<_> = settings.publishers.iter().map(|one| one.name.as_str()).collect();
        config.insert("publishers".to_owned(), names.join(","));
    }
    config
}

fn publisher_config(publisher: &PublisherSettings) -> BTreeMap<String, String> {
    let sink = match &publisher.sink {
        SinkSettings::Kafka => "kafka".to_owned(),
        SinkSettings::Http(http) => http.url.reveal().map_or_else(|_| "http".to_owned(), |url| place(&url, false)),
        SinkSettings::RabbitMq(rabbit) => {
            rabbit.url.reveal().map_or_else(|_| "amqp".to_owned(), |url| place(&url, true))
        }
        SinkSettings::Stdout => "stdout".to_owned(),
        SinkSettings::Statistics => "statistics".to_owned(),
    };
    let window = publisher.window;
    let mut config: BTreeMap<String, String> = [
        ("sink", sink),
        ("dead-letter", publisher.dead_letter.describe()),
        ("max-in-flight", window.max_events.to_string()),
        ("max-in-flight-bytes", window.max_bytes.to_string()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    if let Brokers::Servers(servers) = &publisher.kafka.brokers {
        config.insert("brokers".to_owned(), servers.clone());
    }
    if let Some(topic) = &publisher.route.topic {
        config.insert("topic".to_owned(), topic.clone());
    }
    config
}

fn source_place(url: &SourceUrl) -> String {
    url.reveal().map_or_else(|_| url.to_string(), |url| place(&url, true))
}

/// Where an address leads, without who goes there: users, passwords and parameters are left out, and the path too where it
/// may be what only the initiated know.
fn place(url: &str, with_path: bool) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return "***".to_owned() };
    // A password that is not encoded may have any character in it.
    let rest = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    match rest.split_once('/') {
        Some((host, _)) if !with_path => format!("{scheme}://{host}"),
        _ => format!("{scheme}://{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_whatever_may_be_secret() {
        for (url, expected) in [
            ("postgres://app:s3cret@db:5432/shop?password=s3cret&sslmode=require", "postgres://db:5432/shop"),
            ("mongodb://app:s3/cr@t@a,b/shop?authMechanismProperties=AWS_SESSION_TOKEN:s3cret", "mongodb://a,b/shop"),
            ("postgres:///shop?host=/run&password=s3cret", "postgres:///shop"),
            ("s3cret", "***"),
        ] {
            assert_eq!(place(url, true), expected);
        }
        assert_eq!(place("https://hooks.example/services/s3cret", false), "https://hooks.example");
        assert_eq!(place("https://user:s3cret@hooks.example", false), "https://hooks.example");
    }
}
