//! What was said of the sink.

use std::path::PathBuf;

use super::options::HttpBody;
use super::resolve::Resolver;
use super::secret::Secret;
use super::settings::{HttpSettings, Naming, RabbitSettings, RouteSettings, SinkSettings};
use super::values::{Assignment, Span};
use crate::route::layout::Layout;
use crate::sink::lanes::LaneSettings;

/// The options that are about sinks other than Kafka.
pub(super) struct SinkOptions {
    pub sink: Option<Secret>,
    pub http: HttpOptions,
    pub rabbit: RabbitOptions,
    pub lanes: Option<usize>,
    pub retries: Option<u32>,
    pub backoff: Option<Span>,
}

pub(super) struct HttpOptions {
    pub token: Option<Secret>,
    pub headers: Vec<Assignment>,
    pub sign: Option<Secret>,
    pub body: Option<HttpBody>,
    pub batch: Option<usize>,
    pub timeout: Option<Span>,
    pub path: Option<String>,
    pub routes: Vec<Assignment>,
    pub ca: Option<PathBuf>,
}

pub(super) struct RabbitOptions {
    pub exchange: Option<String>,
    pub routing_key: Option<String>,
    pub declare: Option<bool>,
    pub mandatory: Option<bool>,
    pub batch: Option<usize>,
    pub ca: Option<PathBuf>,
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// Sinks with a URL, by its scheme.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Http,
    Amqp { tls: bool },
}

impl Scheme {
    fn of(url: &str) -> Option<Self> {
        match url.split_once("://")?.0 {
            "http" | "https" => Some(Scheme::Http),
            "amqp" => Some(Scheme::Amqp { tls: false }),
            "amqps" => Some(Scheme::Amqp { tls: true }),
            _ => None,
        }
    }
}

/// How often an event that is refused is tried again, and the first pause, unless something else was said.
const RETRIES: u32 = 3;
const BACKOFF: std::time::Duration = std::time::Duration::from_secs(1);

impl Resolver {
    /// The sink, and what it means for routing.
    pub(super) fn sink(&mut self, options: SinkOptions, route: &mut RouteSettings) -> Option<SinkSettings> {
        let said = options.sink.unwrap_or_else(|| "kafka".into());
        let text = match said.reveal() {
            Ok(text) => text,
            Err(error) => {
                self.problem("sink", error.to_string());
                return None;
            }
        };
        let scheme = Scheme::of(&text);
        // A publisher may have these from its pipeline, where they are meant for others.
        if self.publisher.is_none() {
            self.only_with_http(scheme == Some(Scheme::Http), &options.http);
            self.only_with_amqp(scheme, &options.rabbit);
        }
        let lanes = (options.lanes, options.retries, options.backoff);
        match (text.as_str(), scheme) {
            ("kafka", _) => Some(SinkSettings::Kafka),
            ("stdout" | "statistics", _) => {
                route.naming = Naming::Free;
                Some(if text == "stdout" { SinkSettings::Stdout } else { SinkSettings::Statistics })
            }
            (_, Some(Scheme::Http)) => self.http(said, &text, options.http, lanes, route),
            (_, Some(Scheme::Amqp { .. })) => self.rabbit(said, &text, options.rabbit, lanes, route),
            (other, None) => {
                let shown = if other.contains("://") { "this" } else { other };
                let known = "kafka, http(s)://…, amqp(s)://…, stdout and statistics";
                self.problem("sink", format!("`{shown}` is not a sink; there are {known}"));
                None
            }
        }
    }

    fn http(
        &mut self,
        url: Secret,
        text: &str,
        options: HttpOptions,
        lanes: (Option<usize>, Option<u32>, Option<Span>),
        route: &mut RouteSettings,
    ) -> Option<SinkSettings> {
        if reqwest::Url::parse(text).is_err() {
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
        let secret = |Assignment { key, value }: Assignment| (key, Secret::from(value));
        Some(SinkSettings::Http(Box::new(HttpSettings {
            url,
            token: options.token,
            headers: options.headers.into_iter().map(secret).collect(),
            signing_key: options.sign,
            body: options.body.unwrap_or(HttpBody::Payloads),
            timeout,
            ca: options.ca,
            lanes: self.lanes(("http-batch", options.batch), lanes)?,
        })))
    }

    fn rabbit(
        &mut self,
        url: Secret,
        text: &str,
        options: RabbitOptions,
        lanes: (Option<usize>, Option<u32>, Option<Span>),
        route: &mut RouteSettings,
    ) -> Option<SinkSettings> {
        if !reqwest::Url::parse(text).is_ok_and(|url| url.has_host()) {
            self.problem("sink", "is not a URL; it looks like amqp://user:password@host:5672/vhost");
        }
        route.naming = Naming::Free;
        if let Some(template) = self.text("amqp-routing-key", options.routing_key) {
            route.topic = Some(template);
        }
        // Nothing is a name here: that of the default exchange.
        let exchange = match Secret::from(options.exchange.unwrap_or_default()).reveal() {
            Ok(name) if name.len() <= 255 => name,
            Ok(_) => {
                self.problem("amqp-exchange", "is longer than the 255 bytes that a name may have");
                return None;
            }
            Err(error) => {
                self.problem("amqp-exchange", error.to_string());
                return None;
            }
        };
        let identity = match (options.certificate, options.key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (certificate, _) => {
                let missing = if certificate.is_some() { "amqp-key" } else { "amqp-cert" };
                self.problem(missing, "is missing: certificate and key go together");
                None
            }
        };
        Some(SinkSettings::RabbitMq(Box::new(RabbitSettings {
            url,
            exchange,
            declare: options.declare.unwrap_or(true),
            mandatory: options.mandatory.unwrap_or(false),
            ca: options.ca,
            identity,
            lanes: self.lanes(("amqp-batch", options.batch), lanes)?,
        })))
    }

    fn lanes(
        &mut self,
        (key, batch): (&str, Option<usize>),
        (lanes, retries, backoff): (Option<usize>, Option<u32>, Option<Span>),
    ) -> Option<LaneSettings> {
        let backoff = self.duration("retry-backoff", backoff.or(Some(Span(BACKOFF))));
        let positive = |number: Option<usize>| number.filter(|number| *number > 0);
        let (Some(lanes), Some(batch)) = (positive(lanes), positive(batch)) else {
            self.problem("lanes", format!("and {key} must be at least 1"));
            return None;
        };
        Some(LaneSettings { lanes, batch, retries: retries.unwrap_or(RETRIES), backoff })
    }

    fn only_with_http(&mut self, is_http: bool, options: &HttpOptions) {
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

    fn only_with_amqp(&mut self, scheme: Option<Scheme>, options: &RabbitOptions) {
        let is_amqp = matches!(scheme, Some(Scheme::Amqp { .. }));
        let said =
            [("amqp-routing-key", options.routing_key.is_some()), ("amqp-mandatory", options.mandatory.is_some())];
        for (key, _) in said.into_iter().filter(|(_, said)| *said && !is_amqp) {
            self.problem(key, "is only for RabbitMQ: leave it out, or set `sink` to its amqp:// URL");
        }
        let said = [
            ("amqp-ca", options.ca.is_some()),
            ("amqp-cert", options.certificate.is_some()),
            ("amqp-key", options.key.is_some()),
        ];
        for (key, _) in said.into_iter().filter(|(_, said)| *said && scheme != Some(Scheme::Amqp { tls: true })) {
            self.problem(key, "is only for RabbitMQ over TLS: leave it out, or set `sink` to an amqps:// URL");
        }
    }
}
