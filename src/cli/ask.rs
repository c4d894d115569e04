//! One request to a running outboxd's admin address.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(20);
/// Far above what any number of pipelines can fill: guards against an address that is something else.
const LARGEST_ANSWER: u64 = 64 << 20;

pub struct Asked<'a> {
    pub address: &'a str,
    pub method: &'a str,
    pub path: &'a str,
    pub token: Option<&'a str>,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: String,
}

/// Asks. HTTP/1.0 has the server answer without chunks and close: the body is what follows the head.
pub async fn ask(asked: &Asked<'_>) -> Result<Answer, String> {
    let late = |_| Err("no answer in time".to_owned());
    tokio::time::timeout(PATIENCE, exchange(asked)).await.unwrap_or_else(late)
}

async fn exchange(asked: &Asked<'_>) -> Result<Answer, String> {
    let address = asked.address.strip_prefix("http://").unwrap_or(asked.address).trim_end_matches('/');
    let mut stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let token = asked.token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let request = format!(
        "{} {} HTTP/1.0\r\nHost: {address}\r\nAccept: application/json\r\nContent-Length: 0\r\n{token}\r\n",
        asked.method, asked.path
    );
    stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
    let mut answer = Vec::new();
    stream.take(LARGEST_ANSWER).read_to_end(&mut answer).await.map_err(|error| error.to_string())?;
    let answer = String::from_utf8(answer).map_err(|_| "the answer is not UTF-8".to_owned())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("the answer is not HTTP")?;
    let line = head.lines().next().unwrap_or_default();
    let status = line.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    match status {
        Some(status) if line.starts_with("HTTP/1.") => Ok(Answer { status, body: body.to_owned() }),
        _ => Err(format!("the answer is `{line}`")),
    }
}
