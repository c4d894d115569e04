//! All routes, in one place. Each is remembered as it is added, so that a test can hold them against `/openapi.json`.

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::extract::{Path, State as Shared};
use axum::handler::Handler;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodFilter, on};

use super::orders::Verb;
use super::{Observed, answers, connect, event_store, letters, orders, page};

/// The description of the routes, with the version of the program.
static OPENAPI: LazyLock<String> =
    LazyLock::new(|| include_str!("openapi.json").replace("\"0.0.0\"", concat!("\"", env!("CARGO_PKG_VERSION"), "\"")));

/// What a browser is to know of every answer.
const PRECAUTIONS: [(HeaderName, HeaderValue); 4] = [
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
];

#[derive(Default)]
struct Routes {
    router: Router<Arc<Observed>>,
    /// Method and path of each.
    known: Vec<(&'static str, &'static str)>,
}

impl Routes {
    fn add<H, T>(mut self, (word, method): (&'static str, MethodFilter), path: &'static str, handler: H) -> Self
    where
        H: Handler<T, Arc<Observed>>,
        T: 'static,
    {
        self.router = self.router.route(path, on(method, handler));
        self.known.push((word, path));
        self
    }

    fn get<H: Handler<T, Arc<Observed>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(("get", MethodFilter::GET), path, handler)
    }

    fn put<H: Handler<T, Arc<Observed>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(("put", MethodFilter::PUT), path, handler)
    }

    fn post<H: Handler<T, Arc<Observed>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(("post", MethodFilter::POST), path, handler)
    }
}

fn routes() -> Routes {
    Routes::default()
        .get("/", page::root)
        .get("/page.css", page::style)
        .get("/page.js", page::script)
        .get("/icon.svg", page::icon)
        .get("/openapi.json", openapi)
        .get("/livez", super::livez)
        .get("/readyz", super::readyz)
        .get("/metrics", super::metrics)
        .get("/status", super::status)
        .post("/pipelines/{name}/pause", pipeline(Verb::Pause))
        .post("/pipelines/{name}/resume", pipeline(Verb::Resume))
        .post("/pipelines/{name}/restart", pipeline(Verb::Restart))
        .post("/pipelines/{name}/publishers/{publisher}/pause", publisher(Verb::Pause))
        .post("/pipelines/{name}/publishers/{publisher}/resume", publisher(Verb::Resume))
        .post("/pipelines/{name}/publishers/{publisher}/restart", publisher(Verb::Restart))
        .get("/pipelines/{name}/dead-letters", letters::list)
        .get("/pipelines/{name}/dead-letters/{id}", letters::show)
        .post("/pipelines/{name}/dead-letters/{id}/replay", letters::replay)
        .get("/api/outbox/publishers", event_store::list)
        .get("/api/outbox/publishers/lag", event_store::lag)
        .get("/api/outbox/publishers/{name}", event_store::show)
        .post("/api/outbox/publishers/{name}/pause", event_store::pause)
        .post("/api/outbox/publishers/{name}/resume", event_store::resume)
        .get("/connectors", connect::list)
        .get("/connectors/{name}", connect::info)
        .get("/connectors/{name}/status", connect::status)
        .get("/connectors/{name}/config", connect::config)
        .get("/connectors/{name}/topics", connect::topics)
        .get("/connectors/{name}/tasks", connect::tasks)
        .get("/connectors/{name}/tasks/{task}/status", connect::task_status)
        .put("/connectors/{name}/pause", connect::pause)
        .put("/connectors/{name}/resume", connect::resume)
        .post("/connectors/{name}/restart", connect::restart)
        .post("/connectors/{name}/tasks/{task}/restart", connect::restart_task)
        .get("/connector-plugins", connect::plugins)
}

type Observing = Shared<Arc<Observed>>;
type Pending = std::pin::Pin<Box<dyn Future<Output = Response> + Send>>;

fn pipeline(verb: Verb) -> impl Fn(Observing, Path<String>, HeaderMap) -> Pending + Clone {
    move |observed, path, headers| Box::pin(orders::pipeline(verb, observed, path, headers))
}

fn publisher(verb: Verb) -> impl Fn(Observing, Path<(String, String)>, HeaderMap) -> Pending + Clone {
    move |observed, path, headers| Box::pin(orders::publisher(verb, observed, path, headers))
}

pub fn router(observed: Arc<Observed>) -> Router {
    let unknown = async || answers::error(StatusCode::NOT_FOUND, "HTTP 404 Not Found");
    let unfit = async || answers::error(StatusCode::METHOD_NOT_ALLOWED, "HTTP 405 Method Not Allowed");
    let router = routes().router.fallback(unknown).method_not_allowed_fallback(unfit);
    router.layer(map_response(with_precautions)).with_state(observed)
}

async fn with_precautions(mut response: Response) -> Response {
    response.headers_mut().extend(PRECAUTIONS);
    response
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI.as_str()).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_route_is_described_and_every_description_is_of_a_route() {
        let described: serde_json::Value = serde_json::from_str(&OPENAPI).expect("it is JSON");
        assert_eq!(described["info"]["version"], env!("CARGO_PKG_VERSION"));
        let mut operations = BTreeSet::new();
        for (path, methods) in described["paths"].as_object().expect("paths") {
            for method in methods.as_object().expect("methods").keys().filter(|key| *key != "parameters") {
                operations.insert(format!("{method} {path}"));
            }
        }
        let known = routes().known;
        let routes: BTreeSet<_> = known.iter().map(|(method, path)| format!("{method} {path}")).collect();
        assert_eq!(known.len(), routes.len(), "a route was added twice");
        assert_eq!(routes, operations);
    }
}
