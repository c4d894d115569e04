//! `outboxd status`: asks a running outboxd at its admin address and shows the answer as a table, or with `--check` tells
//! by its exit code whether all is well, for health checks where there is neither a shell nor curl.

use serde::Deserialize;

use super::ask::{self, Asked};
use super::{Health, StatusArgs};
use crate::failure::{ExitCode, Halt};

pub async fn run(args: StatusArgs) -> Result<ExitCode, Halt> {
    if let Some(health) = args.check {
        return check(&args.admin, health).await;
    }
    let answer = get(&args.admin, "/status").await.map_err(|what| unanswered(&args.admin, &what))?;
    let shown = if args.json {
        format!("{}\n", answer.trim_end())
    } else {
        table(&answer).map_err(|error| unanswered(&args.admin, &format!("the answer cannot be read: {error}")))?
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

/// A pipeline as /status shows it. What an older or newer outboxd leaves out is shown as a dash.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Pipeline {
    name: String,
    state: Option<String>,
    position: Option<String>,
    lag_bytes: Option<u64>,
    lag_seconds: Option<f64>,
    in_flight: Option<u64>,
    leader: Option<bool>,
    last_error: Option<String>,
    publishers: Vec<Pipeline>,
}

const HEADINGS: [&str; 8] = ["PIPELINE", "STATE", "POSITION", "LAG", "BEHIND", "IN FLIGHT", "LEADER", "LAST ERROR"];

fn table(answer: &str) -> Result<String, serde_json::Error> {
    let answer: Answer = serde_json::from_str(answer)?;
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    for mut pipeline in answer.pipelines {
        let publishers = std::mem::take(&mut pipeline.publishers);
        let name = pipeline.name.clone();
        rows.push(row(pipeline));
        for publisher in publishers {
            // As pause and resume take it.
            rows.push(row(Pipeline { name: format!("{name}/{}", publisher.name), ..publisher }));
        }
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    });
    Ok(lines.collect())
}

fn row(pipeline: Pipeline) -> [String; HEADINGS.len()] {
    let dash = || "-".to_owned();
    [
        pipeline.name,
        pipeline.state.unwrap_or_else(dash),
        pipeline.position.unwrap_or_else(dash),
        pipeline.lag_bytes.map_or_else(dash, bytes),
        pipeline.lag_seconds.map_or_else(dash, |seconds| format!("{seconds:.1} s")),
        pipeline.in_flight.map_or_else(dash, |events| events.to_string()),
        pipeline.leader.map_or_else(dash, |leader| if leader { "yes" } else { "no" }.to_owned()),
        // One line each, whatever the error.
        pipeline.last_error.map_or_else(dash, |error| error.split_whitespace().collect::<Vec<_>>().join(" ")),
    ]
}

fn bytes(count: u64) -> String {
    let (unit, size) = match count {
        0..1024 => return format!("{count} B"),
        1024..1_048_576 => ("KiB", 1_u64 << 10),
        1_048_576..1_073_741_824 => ("MiB", 1 << 20),
        _ => ("GiB", 1 << 30),
    };
    format!("{:.1} {unit}", count as f64 / size as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    const ANSWER: &str = r#"{"version":"1","pipelines":[
        {"name":"orders","state":"streaming","position":"16/B374D848","lag_bytes":2048,"lag_seconds":0.25,"in_flight":7,"leader":true,"last_error":null},
        {"name":"a","state":"standby","leader":false,"last_error":"slot\nis held","publishers":[{"name":"b","state":"paused"}]}]}"#;

    #[test]
    fn the_table_is_aligned() {
        let expected = "\
PIPELINE  STATE      POSITION     LAG      BEHIND  IN FLIGHT  LEADER  LAST ERROR
orders    streaming  16/B374D848  2.0 KiB  0.2 s   7          yes     -
a         standby    -            -        -       -          no      slot is held
a/b       paused     -            -        -       -          -       -
";
        assert_eq!(table(ANSWER).unwrap(), expected);
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
