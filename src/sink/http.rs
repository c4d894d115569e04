//! The HTTP sink: batches of records as requests, one under way in each lane.
//!
//! What the answer means:
//!
//! ```text
//!   2xx                    delivered
//!   429, 503               later, as Retry-After says
//!   401, 403               not ours to deliver to: exit 5, unless it has answered before (then its secrets are read anew)
//!   any other              refused: tried by halves, then alone, then parked
//!   none, or half of one   later; whether it arrived is unknown, so it may arrive twice, under the same idempotency key
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Certificate, Client, StatusCode, Url};
use ring::{digest, hmac};

use super::SinkFailure;
use super::json::{self, Parts};
use super::lanes::{Courier, Parcel, Refusal};
use crate::config::{HttpBody, HttpSettings, Secret};
use crate::dead_letters::letter::REPLAYED;
use crate::preflight::{Finding, Protection, Report, is_local};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Whatever the place says, we look again by then.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(600);
/// How much of an answer is looked at.
const ANSWER_BYTES: usize = 300;

const SIGNATURE: &str = "x-outboxd-signature";
const IDEMPOTENCY_KEY: &str = "idempotency-key";
const REPLAYED_AT: &str = "x-outboxd-replayed";

pub struct HttpCourier {
    client: Client,
    base: Url,
    headers: HeaderMap,
    body: HttpBody,
    signing: Option<hmac::Key>,
    /// Whether it has ever taken something: after that, trouble with credentials is taken to pass.
    answered: Arc<HttpMemory>,
}

/// Whether the place has ever taken something.
pub type HttpMemory = AtomicBool;

fn not_ready(what: impl Into<String>, remedy: impl Into<String>) -> SinkFailure {
    SinkFailure::NotReady { what: what.into(), remedy: remedy.into() }
}

fn reveal(secret: &Secret) -> Result<String, SinkFailure> {
    secret
        .reveal()
        .map_err(|error| not_ready(error.to_string(), "make the file or variable it names readable for outboxd"))
}

impl HttpCourier {
    /// With its secrets as they are now.
    pub fn new(settings: &HttpSettings, answered: &Arc<HttpMemory>) -> Result<Self, SinkFailure> {
        let base = reveal(&settings.url)?;
        let base =
            Url::parse(&base).map_err(|error| not_ready(format!("the sink's URL: {error}"), "correct --sink"))?;
        let mut builder = Client::builder()
            .user_agent(concat!("outboxd/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(settings.timeout)
            .pool_max_idle_per_host(settings.lanes.lanes)
            .tcp_keepalive(Duration::from_secs(30))
            // A moved place is a mistake to be told, not to be followed with our token.
            .redirect(reqwest::redirect::Policy::none());
        if let Some(path) = &settings.ca {
            let wrong = |error: &dyn std::fmt::Display| {
                not_ready(format!("the certificate authority {}: {error}", path.display()), "correct --http-ca")
            };
            let pem = std::fs::read(path).map_err(|error| wrong(&error))?;
            let roots = Certificate::from_pem_bundle(&pem).map_err(|error| wrong(&error))?;
            builder = builder.tls_certs_only(roots);
        }
        let client =
            builder.build().map_err(|error| not_ready(format!("no HTTP client: {error}"), "correct --sink"))?;
        let signing = match &settings.signing_key {
            Some(key) => Some(hmac::Key::new(hmac::HMAC_SHA256, reveal(key)?.as_bytes())),
            None => None,
        };
        Ok(HttpCourier {
            client,
            base,
            headers: headers(settings)?,
            body: settings.body,
            signing,
            answered: answered.clone(),
        })
    }

    /// A request's address: the base, with the record's path.
    fn address(&self, path: &str) -> Url {
        let mut url = self.base.clone();
        if !path.is_empty() {
            url.set_path(&format!("{}/{}", self.base.path().trim_end_matches('/'), path.trim_start_matches('/')));
        }
        url
    }

    /// Why a batch's path must not be used.
    fn stray(batch: &[Parcel]) -> Option<String> {
        let path = &*batch.first()?.topic;
        leads_astray(path).then(|| format!("its path `{path}` leads out of the sink's URL"))
    }

    fn body(&self, batch: &[Parcel]) -> Vec<u8> {
        let mut body = Vec::new();
        let (open, between, close) = match self.body {
            HttpBody::Payloads | HttpBody::Events => ("[", ",", "]"),
            HttpBody::Lines => ("", "\n", "\n"),
            HttpBody::Single => {
                let value = batch.first().and_then(|parcel| parcel.value.as_deref());
                return value.unwrap_or_default().to_vec();
            }
        };
        body.extend_from_slice(open.as_bytes());
        for (at, parcel) in batch.iter().enumerate() {
            if at > 0 {
                body.extend_from_slice(between.as_bytes());
            }
            match self.body {
                HttpBody::Events => json::write_parts(
                    &Parts {
                        topic: &parcel.topic,
                        key: parcel.key.as_deref(),
                        value: parcel.value.as_deref(),
                        headers: &parcel.headers,
                        timestamp_millis: parcel.timestamp_millis,
                    },
                    &mut body,
                ),
                _ => json::write_value(parcel.value.as_deref(), &mut body),
            }
        }
        body.extend_from_slice(close.as_bytes());
        body
    }

    fn content_type(&self, batch: &[Parcel]) -> &'static str {
        match self.body {
            HttpBody::Payloads | HttpBody::Events => "application/json",
            HttpBody::Lines => "application/x-ndjson",
            HttpBody::Single => {
                let value = batch.first().and_then(|parcel| parcel.value.as_deref()).unwrap_or_default();
                let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(value).is_ok();
                if is_json { "application/json" } else { "application/octet-stream" }
            }
        }
    }

    async fn request(&self, batch: &[Parcel]) -> Result<reqwest::Response, reqwest::Error> {
        let body = self.body(batch);
        let path = batch.first().map_or("", |parcel| &*parcel.topic);
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type(batch)));
        if let Ok(key) = HeaderValue::try_from(idempotency_key(batch)) {
            headers.insert(IDEMPOTENCY_KEY, key);
        }
        // A dead letter that is sent again comes alone. Of most forms its own headers are no part.
        if let [parcel] = batch
            && let Some((_, Some(moment))) = parcel.headers.iter().find(|(name, _)| *name == REPLAYED)
            && let Ok(moment) = HeaderValue::from_bytes(moment)
        {
            headers.insert(REPLAYED_AT, moment);
        }
        if let (HttpBody::Single, Some(parcel)) = (self.body, batch.first()) {
            for (name, value) in parcel.headers.iter().filter(|(name, _)| *name != REPLAYED) {
                let name = HeaderName::try_from(format!("x-outboxd-{name}"));
                let value = value.and_then(|value| HeaderValue::from_bytes(value).ok());
                if let (Ok(name), Some(value)) = (name, value) {
                    headers.insert(name, value);
                }
            }
        }
        // What the user says goes before what we say, and our signature before what a row says.
        headers.remove(SIGNATURE);
        for (name, value) in &self.headers {
            headers.insert(name, value.clone());
        }
        if let Some(key) = &self.signing {
            let signature = format!("sha256={}", hex(hmac::sign(key, &body).as_ref()));
            if let Ok(signature) = HeaderValue::try_from(signature) {
                headers.insert(SIGNATURE, signature);
            }
        }
        let request = self.client.post(self.address(path)).headers(headers);
        request.body(body).send().await
    }
}

impl Courier for HttpCourier {
    fn together(&self, one: &Parcel, next: &Parcel) -> bool {
        self.body != HttpBody::Single && one.topic == next.topic
    }

    async fn send(&self, batch: &[Parcel]) -> Result<(), Refusal> {
        let later = |why: String, after| Err(Refusal::Later { why, after });
        if let Some(why) = Self::stray(batch) {
            return Err(Refusal::Refused { why });
        }
        let mut response = match self.request(batch).await {
            Ok(response) => response,
            Err(error) if error.is_builder() => return Err(Refusal::Refused { why: told(&error) }),
            Err(error) => return later(told(&error), None),
        };
        let status = response.status();
        if status.is_success() {
            // All of the answer, so that the connection can be used again; half of one is none.
            loop {
                match response.chunk().await {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(error) => return later(told(&error), None),
                }
            }
            self.answered.store(true, Ordering::Release);
            return Ok(());
        }
        let place = self.address(batch.first().map_or("", |parcel| &*parcel.topic));
        let (host, path) = (place.host_str().unwrap_or_default().to_owned(), place.path().to_owned());
        let wait = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()).and_then(retry_after);
        let mut said = Vec::new();
        while let (true, Ok(Some(part))) = (said.len() < ANSWER_BYTES, response.chunk().await) {
            said.extend_from_slice(&part);
        }
        let said: String = String::from_utf8_lossy(&said)
            .chars()
            .take(ANSWER_BYTES)
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let why = format!("{host}{path} answered {status} {said}").trim_end().to_owned();
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => later(why, wait),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(Refusal::Halt(match self.answered.load(Ordering::Acquire) {
                    // A new generation reads its secrets anew, so a rotated token heals; a wrong one does not.
                    true => SinkFailure::Transient { what: why },
                    false => not_ready(why, "check --http-token and --http-header"),
                }))
            }
            _ => Err(Refusal::Refused { why }),
        }
    }
}

/// Whether a path of the rows' making climbs: an event must not choose another API than the one that was meant.
fn leads_astray(path: &str) -> bool {
    // A URL is read as if tabs and line breaks were not there.
    path.contains(char::is_control)
        || path.split(['/', '\\']).any(|segment| {
            let dots = segment.to_ascii_lowercase().replace("%2e", ".");
            dots == "." || dots == ".."
        })
}

/// What is the same in every request.
fn headers(settings: &HttpSettings) -> Result<HeaderMap, SinkFailure> {
    let mut headers = HeaderMap::new();
    let secret = |text: String, of: &str| {
        let value = HeaderValue::try_from(text);
        let mut value = value.map_err(|_| not_ready(format!("{of} cannot be a header's value"), "correct it"))?;
        value.set_sensitive(true);
        Ok::<_, SinkFailure>(value)
    };
    if let Some(token) = &settings.token {
        headers.insert(AUTHORIZATION, secret(format!("Bearer {}", reveal(token)?), "--http-token")?);
    }
    for (name, value) in &settings.headers {
        let wrong = |_| not_ready(format!("`{name}` is not a header's name"), "correct --http-header");
        headers.insert(HeaderName::try_from(name.as_str()).map_err(wrong)?, secret(reveal(value)?, name)?);
    }
    Ok(headers)
}

/// The same for the same records, whenever they are sent: by their ids, or else by their content.
fn idempotency_key(batch: &[Parcel]) -> String {
    let id = |parcel: &Parcel| {
        let found = parcel.headers.iter().find(|(name, _)| *name == "id" || *name == "event_id");
        found.and_then(|(_, value)| value.map(<[u8]>::to_vec))
    };
    // Two tables may give out the same ids.
    let table = |parcel: &Parcel| parcel.table.as_deref().map(|table| format!("{table}/")).unwrap_or_default();
    if let [parcel] = batch
        && let Some(id) = id(parcel).and_then(|id| String::from_utf8(id).ok())
        && HeaderValue::try_from(id.as_str()).is_ok()
    {
        return table(parcel) + &id;
    }
    let mut context = digest::Context::new(&digest::SHA256);
    for parcel in batch {
        context.update(table(parcel).as_bytes());
        let part = id(parcel).or_else(|| parcel.value.as_deref().map(<[u8]>::to_vec)).unwrap_or_default();
        context.update(&(part.len() as u64).to_be_bytes());
        context.update(&part);
    }
    hex(&context.finish().as_ref()[..16])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Seconds, or a date.
fn retry_after(text: &str) -> Option<Duration> {
    let wait = match text.trim().parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(text.trim()).ok()?.duration_since(SystemTime::now()).unwrap_or_default(),
    };
    Some(wait.min(LONGEST_RETRY_AFTER))
}

/// The error with its causes, and without the URL, which may hold a password.
fn told(error: &reqwest::Error) -> String {
    let mut text = match error.url() {
        Some(url) => format!("{}: ", url.host_str().unwrap_or_default()),
        None => String::new(),
    };
    if error.is_timeout() {
        text.push_str("no answer in time");
        return text;
    }
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(error);
    let mut last = None;
    while let Some(inner) = cause {
        last = Some(inner.to_string());
        cause = inner.source();
    }
    text.push_str(&last.unwrap_or_else(|| "the request failed".to_owned()));
    text
}

/// Looks whether somebody answers there, without sending a record. `path` is that of every record, where they have the same.
pub async fn preflight(settings: &HttpSettings, path: Option<&str>) -> Vec<Finding> {
    let mut report = Report::about("SINK");
    let courier = match HttpCourier::new(settings, &Arc::default()) {
        Ok(courier) => courier,
        Err(failure) => {
            match failure {
                SinkFailure::NotReady { what, remedy } => report.fail("sink", what, remedy),
                failure => report.fail("sink", failure.to_string(), "correct --sink"),
            }
            return report.into_findings();
        }
    };
    let host = courier.base.host_str().unwrap_or_default();
    let port = courier.base.port_or_known_default().unwrap_or_default();
    report.on(format!("{host}:{port}"));
    let asked = courier.client.head(courier.address(path.unwrap_or_default())).headers(courier.headers.clone());
    let response = match asked.send().await {
        Ok(response) => response,
        Err(error) => {
            report.fail("sink", told(&error), "make sure that the server runs and that --sink leads to it");
            return report.into_findings();
        }
    };
    let seen = match (courier.base.scheme(), &settings.ca) {
        ("https", None) => Protection::Verified("https"),
        ("https", Some(_)) => Protection::Verified("https, --http-ca"),
        _ => Protection::Plain("http"),
    };
    answer(&mut report, response.status(), path.is_some());
    report.tls(seen, is_local(host), "set --sink to an https:// URL, with --http-ca for an authority of your own");
    report.into_findings()
}

/// What a place that was asked about says, where no record was sent. `exactly` means that it was asked where records go.
fn answer(report: &mut Report, status: StatusCode, exactly: bool) {
    const CREDENTIALS: &str = "set --http-token, or --http-header, to what it takes";
    match status {
        StatusCode::UNAUTHORIZED if exactly => {
            report.fail("sink", format!("answers {status}: it does not take our credentials"), CREDENTIALS);
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => report.warn(
            "sink",
            format!("answers {status} to a question without an event: perhaps it does not take our credentials"),
            CREDENTIALS,
        ),
        status if status.is_redirection() => report.warn(
            "sink",
            format!("answers {status}: it has moved, and outboxd takes no event where it was not told to"),
            "set --sink to the address it has moved to",
        ),
        status if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => report.warn(
            "sink",
            format!("answers {status}: it is there, and not well"),
            "look at its log; a run tries again until it is well",
        ),
        status => report.ok("sink", format!("answers ({status}); whether it takes events is known with the first")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::Verdict;

    #[test]
    fn a_path_that_climbs_is_known() {
        for path in ["..", "/in/../admin", "in/%2e%2E/admin", "a\\..\\b", "./a", "/in/.%2e", "/in/.\t./admin", "a\nb"] {
            assert!(leads_astray(path), "{path}");
        }
        for path in ["", "/in/order.created", "/in/..a", "/a/b..", "/%2f"] {
            assert!(!leads_astray(path), "{path}");
        }
    }

    #[test]
    fn what_a_place_says_before_the_first_event_is_judged() {
        let verdict = |status: u16, exactly: bool| {
            let mut report = Report::about("h:443");
            answer(&mut report, StatusCode::from_u16(status).unwrap(), exactly);
            report.into_findings()[0].verdict
        };
        for fine in [200, 204, 400, 404, 405, 501] {
            assert_eq!(verdict(fine, true), Verdict::Ok, "{fine}: it need not know the question");
        }
        assert_eq!((verdict(401, true), verdict(401, false)), (Verdict::Fail, Verdict::Warn));
        for odd in [301, 308, 403, 500, 503] {
            assert_eq!(verdict(odd, true), Verdict::Warn, "{odd}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        assert_eq!(retry_after("7"), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("86400"), Some(LONGEST_RETRY_AFTER));
        let soon = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(30));
        let wait = retry_after(&soon).unwrap();
        assert!((25..=31).contains(&wait.as_secs()), "{wait:?}");
        assert_eq!(retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO), "it is over");
        assert_eq!(retry_after("soon"), None);
    }
}
