//! `outboxd status` and `outboxd lag`: ask a running outboxd at its admin address and show the answer as a table, or with
//! `--check` tell by the exit code whether all is well, for health checks where there is neither a shell nor curl.

use serde::{Deserialize, Serialize};

use super::ask::{self, Asked};
use super::table::{self, Cell, Column, Look, Table, Tint, elastic, number, text};
use super::{Health, LagArgs, StatusArgs};
use crate::failure::{ExitCode, Halt};
use crate::figures;

pub async fn run(args: StatusArgs) -> Result<ExitCode, Halt> {
    if let Some(health) = args.check {
        return check(&args.admin, health).await;
    }
    let answer = get(&args.admin, "/status").await.map_err(|what| unanswered(&args.admin, &what))?;
    let shown = match args.json {
        true => format!("{}\n", answer.trim_end()),
        false => overview(&read(&args.admin, &answer)?, Look::of_stdout()),
    };
    super::print(shown.as_bytes())
}

/// What makes progress can still wait for a server, so that readiness is the stricter question and asks both.
async fn check(admin: &str, health: Health) -> Result<ExitCode, Halt> {
    let paths = match health {
        Health::Live => &["/livez"][..],
        Health::Ready => &["/livez", "/readyz"],
    };
    for path in paths {
        let asked = ask::ask(&Asked { address: admin, method: "GET", path, token: None }).await;
        let answer = asked.map_err(|what| unanswered(admin, &what))?;
        if answer.status != 200 {
            return Err(super::unexpected(format!(
                "http://{admin}{path} answers {}: {}",
                answer.status,
                answer.body.trim_end()
            )));
        }
    }
    super::print(b"ok\n")
}

pub async fn lag(args: LagArgs) -> Result<ExitCode, Halt> {
    let answer = get(&args.admin, "/status").await.map_err(|what| unanswered(&args.admin, &what))?;
    let answer = read(&args.admin, &answer)?;
    let shown = match args.json {
        true => {
            let lags: Vec<_> = rows(&answer).map(Lag::of).collect();
            let json = serde_json::to_string_pretty(&lags);
            json.map_err(|error| super::unexpected(error.to_string()))? + "\n"
        }
        false => lags(&answer, Look::of_stdout()),
    };
    super::print(shown.as_bytes())
}

fn read(address: &str, answer: &str) -> Result<Answer, Halt> {
    serde_json::from_str(answer).map_err(|error| unanswered(address, &format!("the answer cannot be read: {error}")))
}

fn unanswered(address: &str, what: &str) -> Halt {
    Halt {
        code: ExitCode::Unexpected,
        what: format!("no status from http://{address}/status: {what}"),
        remedy: "is outboxd running there? Its log says which admin address it took; give it by --admin".to_owned(),
    }
}

pub(super) async fn get(address: &str, path: &str) -> Result<String, String> {
    let answer = ask::ask(&Asked { address, method: "GET", path, token: None }).await?;
    match answer.status {
        200 => Ok(answer.body),
        status => Err(format!("the answer has the status {status}")),
    }
}

#[derive(Deserialize)]
struct Answer {
    pipelines: Vec<Pipeline>,
}

/// A pipeline or a publisher as /status shows it. What an older or newer outboxd leaves out is shown as a dash.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Pipeline {
    name: String,
    state: Option<String>,
    state_seconds: Option<u64>,
    position: Option<String>,
    lag_bytes: Option<u64>,
    lag_seconds: Option<f64>,
    retained_bytes: Option<u64>,
    outbox_depth: Option<u64>,
    held_back_by: Option<String>,
    holds_back: bool,
    in_flight: Option<u64>,
    events: Option<u64>,
    dead_letters: Option<u64>,
    leader: Option<bool>,
    last_error: Option<String>,
    publishers: Vec<Pipeline>,
}

/// A line of a table: a pipeline, or one of its publishers.
struct Row<'a> {
    pipeline: &'a Pipeline,
    publisher: Option<&'a Pipeline>,
}

impl<'a> Row<'a> {
    fn told(&self) -> &'a Pipeline {
        self.publisher.unwrap_or(self.pipeline)
    }

    /// As pause and resume take it.
    fn name(&self) -> String {
        match self.publisher {
            Some(publisher) => format!("{}/{}", self.pipeline.name, publisher.name),
            None => self.pipeline.name.clone(),
        }
    }

    /// Who keeps the reading waiting.
    fn held_back_by(&self) -> Option<String> {
        let told = self.told();
        if self.publisher.is_some() {
            return told.holds_back.then(|| "its own sink".to_owned());
        }
        let slow = told.publishers.iter().filter(|publisher| publisher.holds_back);
        let slow: Vec<_> = slow.map(|publisher| publisher.name.as_str()).collect();
        told.held_back_by.clone().or_else(|| (!slow.is_empty()).then(|| slow.join(", ")))
    }
}

fn rows(answer: &Answer) -> impl Iterator<Item = Row<'_>> {
    answer.pipelines.iter().flat_map(|pipeline| {
        let publishers = pipeline.publishers.iter().map(move |one| Row { pipeline, publisher: Some(one) });
        std::iter::once(Row { pipeline, publisher: None }).chain(publishers)
    })
}

const OVERVIEW: [Column; 9] = [
    text("PIPELINE"),
    text("STATE"),
    number("FOR"),
    elastic("POSITION"),
    number("BEHIND"),
    number("IN FLIGHT"),
    number("EVENTS"),
    number("DEAD LETTERS"),
    text("LEADER"),
];

/// One line for each, and what went wrong below.
fn overview(answer: &Answer, look: Look) -> String {
    let mut table = Table::new(&OVERVIEW);
    let mut errors = String::new();
    for row in rows(answer) {
        let told = row.told();
        table.add([
            row.name().into(),
            state(told),
            or_dash(told.state_seconds, |seconds| figures::span(seconds as f64)),
            or_dash(told.position.as_ref(), Clone::clone),
            behind(told),
            or_dash(told.in_flight, figures::count),
            or_dash(told.events, figures::count),
            match told.dead_letters {
                Some(letters) if letters > 0 => Cell::new(figures::count(letters), Tint::Warning),
                letters => or_dash(letters, figures::count),
            },
            or_dash(told.leader, |leader| if leader { "yes" } else { "no" }.to_owned()),
        ]);
        if let Some(error) = &told.last_error {
            let name = look.paint(&table::one_line(&row.name()), Tint::Bad);
            errors.push_str(&format!("{name}: {}\n", table::one_line(error)));
        }
    }
    let table = table.draw(look);
    if errors.is_empty() { table } else { format!("{table}\nlast errors\n{errors}") }
}

const LAGS: [Column; 8] = [
    text("PIPELINE"),
    text("STATE"),
    number("BEHIND"),
    number("LAG"),
    number("RETAINED"),
    number("PENDING"),
    number("IN FLIGHT"),
    text("HELD BACK BY"),
];

fn lags(answer: &Answer, look: Look) -> String {
    let mut table = Table::new(&LAGS);
    for row in rows(answer) {
        let told = row.told();
        table.add([
            row.name().into(),
            state(told),
            behind(told),
            or_dash(told.lag_bytes, figures::bytes),
            or_dash(told.retained_bytes, figures::bytes),
            or_dash(told.outbox_depth, |rows| format!("{} rows", figures::count(rows))),
            or_dash(told.in_flight, figures::count),
            match row.held_back_by() {
                Some(who) => Cell::new(who, Tint::Warning),
                None => "-".into(),
            },
        ]);
    }
    table.draw(look)
}

fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> Cell {
    value.map_or_else(|| "-".into(), |value| show(value).into())
}

fn state(told: &Pipeline) -> Cell {
    let Some(state) = &told.state else { return "-".into() };
    let tint = match state.as_str() {
        "streaming" => Tint::Good,
        "failed" => Tint::Bad,
        "stopped" => Tint::Faint,
        _ => Tint::Warning,
    };
    Cell::new(state, tint)
}

/// From here on somebody should know.
const LATE: f64 = 10.0;

fn behind(told: &Pipeline) -> Cell {
    match told.lag_seconds {
        Some(seconds) => Cell::new(figures::span(seconds), if seconds >= LATE { Tint::Warning } else { Tint::Plain }),
        None => "-".into(),
    }
}

/// A line of `lag --json`.
#[derive(Debug, Serialize)]
struct Lag<'a> {
    pipeline: &'a str,
    publisher: Option<&'a str>,
    state: Option<&'a str>,
    lag_seconds: Option<f64>,
    lag_bytes: Option<u64>,
    retained_bytes: Option<u64>,
    pending_rows: Option<u64>,
    in_flight: Option<u64>,
    held_back_by: Option<String>,
}

impl<'a> Lag<'a> {
    fn of(row: Row<'a>) -> Self {
        let told = row.told();
        Lag {
            pipeline: &row.pipeline.name,
            publisher: row.publisher.map(|publisher| publisher.name.as_str()),
            state: told.state.as_deref(),
            lag_seconds: told.lag_seconds,
            lag_bytes: told.lag_bytes,
            retained_bytes: told.retained_bytes,
            pending_rows: told.outbox_depth,
            in_flight: told.in_flight,
            held_back_by: row.held_back_by(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    const ANSWER: &str = r#"{"version":"1","pipelines":[
        {"name":"orders","state":"streaming","state_seconds":125,"position":"16/B374D848","lag_bytes":2048,"lag_seconds":0.25,
         "retained_bytes":16777216,"in_flight":7,"events":1234567,"dead_letters":0,"leader":true,"last_error":null},
        {"name":"a","state":"standing-by","leader":false,"last_error":"slot\nis held",
         "publishers":[{"name":"b","state":"paused","holds_back":true}]},
        {"name":"polled","state":"streaming","lag_seconds":3725.0,"outbox_depth":12000,"held_back_by":"backend 7"}]}"#;

    fn answer() -> Answer {
        serde_json::from_str(ANSWER).unwrap()
    }

    #[test]
    fn the_table_is_aligned() {
        let expected = "\
PIPELINE  STATE              FOR  POSITION        BEHIND  IN FLIGHT     EVENTS  DEAD LETTERS  LEADER
orders    streaming    2 min 5 s  16/B374D848      0.2 s          7  1,234,567             0  yes
a         standing-by          -  -                    -          -          -             -  no
a/b       paused               -  -                    -          -          -             -  -
polled    streaming            -  -            1 h 2 min          -          -             -  -

last errors
a: slot is held
";
        assert_eq!(overview(&answer(), Look::default()), expected);
    }

    #[test]
    fn lag_tells_how_far_behind_and_because_of_whom() {
        let drawn = lags(&answer(), Look::default());
        let line = |name: &str| drawn.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        assert!(line("orders").contains("2.0 KiB") && line("orders").contains("16.0 MiB"), "{drawn}");
        assert!(line("polled").contains("12,000 rows") && line("polled").ends_with("backend 7"), "{drawn}");
        assert!(line("a ").ends_with("  b") && line("a/b").ends_with("its own sink"), "{drawn}");
        let answer = answer();
        let json = serde_json::to_value(rows(&answer).map(Lag::of).collect::<Vec<_>>()).unwrap();
        assert_eq!(json[0]["lag_bytes"], 2048);
        assert_eq!((json[2]["pipeline"].as_str(), json[2]["publisher"].as_str()), (Some("a"), Some("b")));
        assert_eq!(json[3]["pending_rows"], 12_000);
    }

    #[test]
    fn states_have_colours() {
        let look = Look { colours: true, width: None };
        let drawn = overview(&answer(), look);
        assert!(drawn.contains("\x1b[32mstreaming\x1b[0m") && drawn.contains("\x1b[33mpaused\x1b[0m"), "{drawn:?}");
    }

    async fn answered(answer: &str) -> Result<String, String> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let length = stream.read(&mut request).await.unwrap();
            assert!(request[..length].starts_with(b"GET /status HTTP/1.0\r\n"));
            stream.write_all(answer.as_bytes()).await.unwrap();
        };
        tokio::join!(get(&address, "/status"), server).0
    }

    #[tokio::test]
    async fn status_asks_the_admin_address() {
        let ok = format!("HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{ANSWER}");
        assert_eq!(answered(&ok).await.unwrap(), ANSWER);
        let missing = answered("HTTP/1.1 404 Not Found\r\n\r\n").await.unwrap_err();
        assert_eq!(missing, "the answer has the status 404");
        assert_eq!(answered("SSH-2.0-OpenSSH\r\n").await.unwrap_err(), "the answer is not HTTP");
    }

    #[tokio::test]
    async fn an_outboxd_that_is_not_there_is_said_with_the_remedy() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = listener.local_addr().unwrap().to_string();
        drop(listener);
        let halt = run(StatusArgs { admin: admin.clone(), json: false, check: None }).await.unwrap_err();
        assert!(halt.to_string().contains(&admin) && halt.to_string().contains("--admin"), "{halt}");
    }
}
