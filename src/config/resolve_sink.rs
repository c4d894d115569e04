//! What was said of the sink.

use std::path::PathBuf;

use super::options::HttpBody;
use super::resolve::Resolver;
use super::secret::Secret;
use super::settings::{HttpSettings, Naming, RouteSettings, SinkSettings};
use super::values::{Assignment, Span};
use crate::route::layout::Layout;
use crate::sink::lanes::LaneSettings;

/// The options that are about sinks other than Kafka.
pub(super) struct SinkOptions {
    pub sink: Option<Secret>,
    pub token: Option<Secret>,
    pub headers: Vec<Assignment>,
    pub sign: Option<Secret>,
    pub body: Option<HttpBody>,
    pub batch: Option<usize>,
    pub timeout: Option<Span>,
    pub path: Option<String>,
    pub routes: Vec<Assignment>,
    pub ca: Option<PathBuf>,
    pub lanes: Option<usize>,
    pub retries: Option<u32>,
    pub backoff: Option<Span>,
}

impl Resolver {
    /// The sink, and what it means for routing.
    pub(super) fn sink(&mut self, options: SinkOptions, route: &mut RouteSettings) -> Option<SinkSettings> {
        let said = options.sink.clone().unwrap_or_else(|| "kafka".into());
        let text = match said.reveal() {
            Ok(text) => text,
            Err(error) => {
                self.problem("sink", error.to_string());
                return None;
            }
        };
        let is_http = text.starts_with("http://") || text.starts_with("https://");
        self.only_with_http(is_http, &options);
        match text.as_str() {
            "kafka" => return Some(SinkSettings::Kafka),
            "stdout" | "statistics" => {
                route.naming = Naming::Free;
                return Some(if text == "stdout" { SinkSettings::Stdout } else { SinkSettings::Statistics });
            }
            _ if is_http => {}
            _ if text.starts_with("amqp") => {
                self.problem("sink", "the RabbitMQ sink is not available yet");
                return None;
            }
            other => {
                let shown = if other.contains("://") { "this" } else { other };
                self.problem(
                    "sink",
                    format!("`{shown}` is not a sink; there are kafka, http(s)://…, stdout and statistics"),
                );
                return None;
            }
        }
        if reqwest::Url::parse(&text).is_err() {
            self.problem("sink", "is not a URL; it looks like https://events.internal/api");
        }
        route.naming = Naming::Free;
        let chosen = self.text("http-path", options.path);
        let layout = Layout::named(&route.layout);
        route.paths = options.routes.into_iter().map(|Assignment { key, value }| (key, value)).collect();
        if route.paths.is_empty() && chosen.is_none() {
            let own = layout.map_or(&[][..], |layout| layout.paths);
            route.paths = own.iter().map(|(kind, path)| ((*kind).to_owned(), (*path).to_owned())).collect();
        }
        route.topic = Some(chosen.unwrap_or_default());
        let timeout = self.duration("http-timeout", options.timeout);
        let positive = |number: Option<usize>| number.filter(|number| *number > 0);
        let (Some(lanes), Some(batch)) = (positive(options.lanes), positive(options.batch)) else {
            self.problem("lanes", "and http-batch must be at least 1");
            return None;
        };
        let secret = |Assignment { key, value }: Assignment| (key, Secret::from(value));
        Some(SinkSettings::Http(Box::new(HttpSettings {
            url: said,
            token: options.token,
            headers: options.headers.into_iter().map(secret).collect(),
            signing_key: options.sign,
            body: options.body.unwrap_or(HttpBody::Payloads),
            timeout,
            ca: options.ca,
            lanes: LaneSettings {
                lanes,
                batch,
                retries: options.retries.unwrap_or_default(),
                backoff: self.duration("retry-backoff", options.backoff),
            },
        })))
    }

    fn only_with_http(&mut self, is_http: bool, options: &SinkOptions) {
        let said = [
            ("http-token", options.token.is_some()),
            ("http-header", !options.headers.is_empty()),
            ("http-sign", options.sign.is_some()),
            ("http-path", options.path.is_some()),
            ("http-route", !options.routes.is_empty()),
            ("http-ca", options.ca.is_some()),
        ];
        for (key, _) in said.into_iter().filter(|(_, said)| *said && !is_http) {
            self.problem(key, "is only for an HTTP sink: leave it out, or set `sink` to its URL");
        }
    }
}
