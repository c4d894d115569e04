//! Requests to an admin address, as they are on the wire.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// What came back.
#[derive(Clone, Debug)]
pub struct Answered {
    pub code: u16,
    pub head: String,
    pub body: String,
}

impl Answered {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).next()
    }
}

/// Asks with these headers, beside those that every client sends.
pub fn ask(address: &str, method: &str, path: &str, headers: &[(&str, &str)]) -> Answered {
    let mut stream = connect(address);
    let mut request = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request += &format!("Host: {address}\r\n");
    }
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{request}\r\n").as_bytes()).expect("a request is sent");
    read(&mut stream)
}

pub fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    stream.set_read_timeout(Some(Duration::from_secs(100))).expect("a time-out can be set");
    stream
}

/// The answer, up to the end of the connection.
pub fn read(stream: &mut TcpStream) -> Answered {
    let mut bytes = Vec::new();
    // Whoever is refused in the middle of a request may see a reset behind the answer.
    let ended = stream.read_to_end(&mut bytes);
    let answer = String::from_utf8(bytes).expect("the answer is text");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP: {answer:?} {ended:?}"));
    let code = head.split_whitespace().nth(1).and_then(|code| code.parse().ok());
    let code = code.unwrap_or_else(|| panic!("no status: {head}"));
    Answered { code, head: head.to_owned(), body: body.to_owned() }
}
