//! Ordinary SQL over a [`Wire`]: statements in, rows of text out. What is asked for is little (variables, the
//! catalog, the checkpoint row, the table's rows once), so the text protocol does.
//!
//! ```text
//!   03 statement ─▶        ◀─ OK
//!                          ◀─ columns:lenenc, a definition each, EOF, rows, EOF
//! ```

use bytes::BytesMut;

use super::conninfo::{ConnInfo, Host};
use super::input::Input;
use super::server_error::WireError;
use super::wire::{self, Wire};
use crate::source::SourceFailure;

const COM_QUERY: u8 = 0x03;
const COM_QUIT: u8 = 0x01;
const EOF: u8 = 0xFE;
/// In text rows: the value is null.
const NULL: u8 = 0xFB;

/// Who made the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavor {
    MySql,
    MariaDb,
}

impl Flavor {
    pub fn name(self) -> &'static str {
        match self {
            Flavor::MySql => "mysql",
            Flavor::MariaDb => "mariadb",
        }
    }
}

impl std::fmt::Display for Flavor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Flavor::MySql => "MySQL",
            Flavor::MariaDb => "MariaDB",
        })
    }
}

/// One row of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row(Vec<Option<Vec<u8>>>);

impl Row {
    pub fn bytes(&self, column: usize) -> Option<&[u8]> {
        self.0.get(column).and_then(|value| value.as_deref())
    }

    pub fn text(&self, column: usize) -> Option<String> {
        self.bytes(column).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// How many columns it has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text, empty for null.
    pub fn string(&self, column: usize) -> String {
        self.text(column).unwrap_or_default()
    }

    pub fn number(&self, column: usize) -> u64 {
        self.text(column).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    pub fn is_true(&self, column: usize) -> bool {
        matches!(self.string(column).to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
    }
}

pub struct Session {
    wire: Wire,
    pub flavor: Flavor,
    /// Major, minor, patch.
    pub version: (u16, u16, u16),
    /// Rows of the last query that were not read yet.
    reading: bool,
    /// Rows that the last statement changed.
    changed: u64,
}

impl Session {
    /// Opens a session whose text is UTF-8, whose times are UTC and whose strings have no escapes of their own.
    pub async fn connect(info: &ConnInfo) -> Result<Self, SourceFailure> {
        let mut session = Session::over(wire::dial(info).await?);
        let setup = "SET NAMES utf8mb4, time_zone = '+00:00', autocommit = 1, sql_mode = 'STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES'";
        session.execute(setup).await?;
        if let Some(database) = &info.database {
            session.execute(&format!("USE {}", quote(database))).await?;
        }
        Ok(session)
    }

    /// For the connection that is to become the binlog's.
    pub async fn bare(info: &ConnInfo) -> Result<Self, SourceFailure> {
        wire::dial(info).await.map(Session::over).map_err(known_to_work)
    }

    /// One more session with a login that has worked before.
    pub async fn another(info: &ConnInfo) -> Result<Self, SourceFailure> {
        Session::connect(info).await.map_err(known_to_work)
    }

    fn over(wire: Wire) -> Self {
        let said = wire.server_version.clone();
        let flavor = if said.contains("MariaDB") { Flavor::MariaDb } else { Flavor::MySql };
        // MariaDB 10 puts 5.5.5- before its own version, for old replicas.
        let number = said.strip_prefix("5.5.5-").unwrap_or(&said);
        let mut parts = number.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
        let mut part = || parts.next().unwrap_or(0);
        Session { version: (part(), part(), part()), wire, flavor, reading: false, changed: 0 }
    }

    pub fn host(&self) -> &Host {
        &self.wire.host
    }

    pub fn describe(&self) -> String {
        self.wire.host.to_string()
    }

    pub fn is_encrypted(&self) -> bool {
        self.wire.is_encrypted()
    }

    pub fn server_version(&self) -> &str {
        &self.wire.server_version
    }

    pub fn is_mariadb(&self) -> bool {
        self.flavor == Flavor::MariaDb
    }

    pub fn into_wire(self) -> Wire {
        self.wire
    }

    /// Runs a statement whose rows, if any, do not matter.
    pub async fn execute(&mut self, sql: &str) -> Result<(), SourceFailure> {
        self.query(sql).await.map(|_| ())
    }

    pub async fn query(&mut self, sql: &str) -> Result<Vec<Row>, SourceFailure> {
        self.try_query(sql).await.map_err(|error| self.classify(error))
    }

    /// The one row of a query that always has one.
    pub async fn query_one(&mut self, sql: &str) -> Result<Row, SourceFailure> {
        let rows = self.query(sql).await?;
        let nothing = || SourceFailure::transient(format!("{}: no answer to a question", self.describe()));
        rows.into_iter().next().ok_or_else(nothing)
    }

    /// As [`query`](Self::query), with the server's own error.
    pub async fn try_query(&mut self, sql: &str) -> Result<Vec<Row>, WireError> {
        let mut rows = Vec::new();
        if self.begin(sql.as_bytes()).await? {
            while let Some(row) = self.try_next().await? {
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// How many rows the last statement changed.
    pub fn affected(&self) -> u64 {
        self.changed
    }

    /// Runs a statement that need not be text, and whose rows do not matter, with the server's own error.
    pub async fn try_execute(&mut self, statement: &[u8]) -> Result<(), WireError> {
        if self.begin(statement).await? {
            while self.try_next().await?.is_some() {}
        }
        Ok(())
    }

    /// Runs a statement that changes rows; how many it has changed.
    pub async fn try_update(&mut self, sql: &str) -> Result<u64, WireError> {
        self.changed = 0;
        self.try_execute(sql.as_bytes()).await?;
        Ok(self.changed)
    }

    /// Starts a query whose rows are taken one by one with [`next_row`](Self::next_row).
    pub async fn stream(&mut self, sql: &str) -> Result<(), SourceFailure> {
        self.begin(sql.as_bytes()).await.map(|_| ()).map_err(|error| self.classify(error))
    }

    pub async fn next_row(&mut self) -> Result<Option<Row>, SourceFailure> {
        self.try_next().await.map_err(|error| self.classify(error))
    }

    pub fn classify(&self, error: WireError) -> SourceFailure {
        error.classify(&self.describe())
    }

    /// Whether rows follow.
    async fn begin(&mut self, sql: &[u8]) -> Result<bool, WireError> {
        if self.reading {
            // A query that was given up in the middle.
            while self.try_next().await?.is_some() {}
        }
        let mut command = Vec::with_capacity(sql.len() + 1);
        command.push(COM_QUERY);
        command.extend_from_slice(sql);
        self.wire.command(&command).await?;
        let head = self.wire.read().await?;
        if let Some((0, answer)) = head.split_first() {
            self.changed = Input(answer).lenenc("the number of rows").map_err(|_| malformed())?;
            return Ok(false);
        }
        let columns = Input(&head).lenenc("the number of columns").map_err(|_| malformed())?;
        for _ in 0..columns {
            self.wire.read().await?;
        }
        if !is_eof(&self.wire.read().await?) {
            return Err(malformed());
        }
        self.reading = true;
        Ok(true)
    }

    async fn try_next(&mut self) -> Result<Option<Row>, WireError> {
        if !self.reading {
            return Ok(None);
        }
        let packet = match self.wire.read().await {
            Ok(packet) => packet,
            Err(error) => {
                self.reading = false;
                return Err(error);
            }
        };
        if is_eof(&packet) {
            self.reading = false;
            return Ok(None);
        }
        parse_row(&packet).map(Some)
    }

    /// Says goodbye, so that the server does not count an aborted client.
    pub async fn close(mut self) {
        let _ = self.wire.command(&[COM_QUIT]).await;
    }
}

/// A login that has worked and does not any more was changed meanwhile: whoever begins again reads the password anew.
fn known_to_work(failure: SourceFailure) -> SourceFailure {
    match failure {
        SourceFailure::NotReady { what, .. } => SourceFailure::Transient { what },
        other => other,
    }
}

fn is_eof(packet: &BytesMut) -> bool {
    packet.first() == Some(&EOF) && packet.len() < 9
}

fn malformed() -> WireError {
    WireError::unexpected("an answer that is none")
}

fn parse_row(packet: &[u8]) -> Result<Row, WireError> {
    let mut input = Input(packet);
    let mut values = Vec::new();
    while !input.is_empty() {
        if input.0.first() == Some(&NULL) {
            input.0 = &input.0[1..];
            values.push(None);
        } else {
            values.push(Some(input.lenenc_bytes("a value").map_err(|_| malformed())?.to_vec()));
        }
    }
    Ok(Row(values))
}

/// An identifier as SQL takes it under ANSI_QUOTES or not, whatever is in it.
pub fn quote(identifier: &str) -> String {
    format!("`{}`", identifier.replace('`', "``"))
}

/// A text as SQL takes it under any sql_mode, whatever is in it.
pub fn literal(text: &str) -> String {
    if text.is_ascii() && !text.contains(['\'', '\\', '\0']) {
        return format!("'{text}'");
    }
    let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    // Not a function: that would bring a collation of its own into comparisons.
    format!("_utf8mb4 x'{hex}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_texts_are_quoted_whatever_is_in_them() {
        assert_eq!(quote("a`b"), "`a``b`");
        assert_eq!(literal("orders"), "'orders'");
        assert_eq!(literal("o'b\\"), "_utf8mb4 x'6f27625c'");
    }

    #[test]
    fn a_row_has_texts_and_nulls() {
        let row = parse_row(b"\x02ab\xfb\x00").unwrap();
        assert_eq!((row.string(0).as_str(), row.bytes(1), row.bytes(2)), ("ab", None, Some(&b""[..])));
        assert!(parse_row(b"\x05ab").is_err());
    }
}
