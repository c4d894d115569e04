//! What a server says of itself: who it is, how it logs, and how far its log goes in both directions.

use super::gtid::{GtidSet, MariaGtidList};
use super::position::{BinlogPosition, FilePos, Gtids};
use super::session::{Flavor, Session, literal};
use crate::source::SourceFailure;

#[derive(Clone, Debug)]
pub struct Server {
    pub flavor: Flavor,
    /// `server_uuid`, or MariaDB's server id.
    pub identity: String,
    pub server_id: u64,
    pub log_bin: bool,
    pub format: String,
    pub row_image: String,
    /// FULL, MINIMAL or NO_LOG; empty where the server does not have the setting.
    pub row_metadata: String,
    pub gtid_mode: String,
    /// Whether events end in a checksum.
    pub checksum: bool,
    /// Seconds that log files are kept; 0 is for ever.
    pub expires: u64,
    pub read_only: bool,
}

/// How far the log goes.
#[derive(Clone, Debug)]
pub struct Reach {
    /// Where it can still be entered; what lies before is gone.
    pub first: BinlogPosition,
    /// What is committed now.
    pub end: BinlogPosition,
    /// The log's files and their sizes, oldest first.
    pub files: Vec<(String, u64)>,
}

impl Reach {
    /// Bytes of log from here to the end.
    pub fn bytes_after(&self, position: &FilePos) -> u64 {
        let from = self.files.iter().position(|(file, _)| *file == position.file);
        let Some(from) = from else { return self.files.iter().map(|(_, size)| size).sum() };
        let sum: u64 = self.files[from..].iter().map(|(_, size)| size).sum();
        sum.saturating_sub(position.offset)
    }
}

impl Server {
    pub async fn ask(session: &mut Session) -> Result<Self, SourceFailure> {
        let mut variable = async |name: &str| variable(session, name).await;
        let server_id = variable("server_id").await?;
        let server_uuid = variable("server_uuid").await?;
        let log_bin = variable("log_bin").await?;
        let format = variable("binlog_format").await?;
        let row_image = variable("binlog_row_image").await?;
        let row_metadata = variable("binlog_row_metadata").await?;
        let gtid_mode = variable("gtid_mode").await?;
        let checksum = variable("binlog_checksum").await?;
        let seconds = variable("binlog_expire_logs_seconds").await?;
        let days = variable("expire_logs_days").await?;
        let read_only = is_read_only(session).await?;
        let flavor = session.flavor;
        let days: f64 = days.parse().unwrap_or(0.0);
        Ok(Server {
            flavor,
            identity: if server_uuid.is_empty() { format!("server-id-{server_id}") } else { server_uuid },
            server_id: server_id.parse().unwrap_or(0),
            log_bin: log_bin.eq_ignore_ascii_case("ON"),
            format: format.to_ascii_uppercase(),
            row_image: row_image.to_ascii_uppercase(),
            row_metadata: row_metadata.to_ascii_uppercase(),
            gtid_mode: gtid_mode.to_ascii_uppercase(),
            checksum: checksum.eq_ignore_ascii_case("CRC32"),
            expires: seconds.parse().ok().filter(|seconds| *seconds > 0).unwrap_or((days * 86_400.0) as u64),
            read_only,
        })
    }

    /// MariaDB always counts GTIDs; MySQL when it is told to.
    pub fn has_gtids(&self) -> bool {
        self.flavor == Flavor::MariaDb || self.gtid_mode == "ON"
    }

    /// Where the log begins and ends.
    pub async fn reach(&self, session: &mut Session) -> Result<Reach, SourceFailure> {
        let files = session.query("SHOW BINARY LOGS").await?;
        let files: Vec<_> = files.iter().map(|row| (row.string(0), row.number(1))).collect();
        let Some((oldest, _)) = files.first().cloned() else {
            return Err(SourceFailure::NotReady {
                what: format!("{} has no binary log", session.describe()),
                remedy: "start the server with --log-bin".to_owned(),
            });
        };
        let end = self.end(session).await?;
        let beginning = FilePos { file: oldest.clone(), offset: super::dump::FIRST_OFFSET };
        let gtids = match (self.flavor, self.has_gtids()) {
            (_, false) => Gtids::Off,
            (Flavor::MySql, true) => {
                let purged = session.query_one("SELECT @@GLOBAL.gtid_purged").await?;
                Gtids::MySql(parse_set(&purged.string(0), session)?)
            }
            (Flavor::MariaDb, true) => {
                let list = session.query_one(&format!("SELECT BINLOG_GTID_POS({}, 4)", literal(&oldest))).await?;
                Gtids::MariaDb(parse_list(&list.string(0), session)?)
            }
        };
        Ok(Reach { first: BinlogPosition::new(gtids, beginning), end, files })
    }

    /// What is committed now.
    pub async fn end(&self, session: &mut Session) -> Result<BinlogPosition, SourceFailure> {
        // The statement was renamed in MySQL 8.2, and the old name is gone from 8.4.
        let renamed = self.flavor == Flavor::MySql && session.version >= (8, 2, 0);
        let statement = if renamed { "SHOW BINARY LOG STATUS" } else { "SHOW MASTER STATUS" };
        // Read before the set: what is in the set lies before this offset or after it, never beyond the log.
        let status = session.query(statement).await?;
        let Some(status) = status.first() else {
            return Err(SourceFailure::NotReady {
                what: format!("{} has no binary log", session.describe()),
                remedy: "start the server with --log-bin".to_owned(),
            });
        };
        let file = FilePos { file: status.string(0), offset: status.number(1) };
        let gtids = match (self.flavor, self.has_gtids()) {
            (_, false) => Gtids::Off,
            (Flavor::MySql, true) => {
                let executed = session.query_one("SELECT @@GLOBAL.gtid_executed").await?;
                Gtids::MySql(parse_set(&executed.string(0), session)?)
            }
            (Flavor::MariaDb, true) => {
                let list = session.query_one("SELECT @@GLOBAL.gtid_binlog_pos").await?;
                Gtids::MariaDb(parse_list(&list.string(0), session)?)
            }
        };
        Ok(BinlogPosition::new(gtids, file))
    }
}

/// A global setting; empty where the server does not have it.
async fn variable(session: &mut Session, name: &str) -> Result<String, SourceFailure> {
    let statement = format!("SHOW GLOBAL VARIABLES WHERE variable_name = {}", literal(name));
    let rows = session.query(&statement).await?;
    Ok(rows.first().map(|row| row.string(1)).unwrap_or_default())
}

/// Whether the server refuses to be written to, as a replica does.
pub async fn is_read_only(session: &mut Session) -> Result<bool, SourceFailure> {
    let read_only = variable(session, "read_only").await?;
    Ok(!matches!(read_only.to_ascii_uppercase().as_str(), "OFF" | "0" | ""))
}

fn parse_set(text: &str, session: &Session) -> Result<GtidSet, SourceFailure> {
    text.parse().map_err(|_| strange(text, session))
}

fn parse_list(text: &str, session: &Session) -> Result<MariaGtidList, SourceFailure> {
    text.parse().map_err(|_| strange(text, session))
}

fn strange(text: &str, session: &Session) -> SourceFailure {
    SourceFailure::transient(format!("{} has GTIDs that make no sense: {text}", session.describe()))
}
