//! What stands in the way of a run, each with its remedy. `run`, `check` and `init` all judge by these.

use super::gtid::GtidSet;
use super::position::{BinlogPosition, Gtids};
use super::server::{Reach, Server};
use super::session::Flavor;
use crate::checkpoint::Checkpoint;
use crate::config::TableName;
use crate::source::SourceFailure;

fn not_ready(what: impl Into<String>, remedy: impl Into<String>) -> SourceFailure {
    SourceFailure::NotReady { what: what.into(), remedy: remedy.into() }
}

/// The server's settings that a run cannot do without.
pub fn settings(server: &Server) -> Vec<SourceFailure> {
    let mut wrong = Vec::new();
    if !server.log_bin {
        wrong.push(not_ready(
            "log_bin is OFF: the server writes no binary log",
            "start the server with --log-bin (my.cnf: log_bin = binlog) and restart it",
        ));
    }
    if !server.format.is_empty() && server.format != "ROW" {
        wrong.push(not_ready(
            format!("binlog_format is {}: rows are not in the log", server.format),
            "SET GLOBAL binlog_format = 'ROW', put it into my.cnf, and let applications reconnect",
        ));
    }
    if server.server_id == 0 {
        wrong.push(not_ready("server_id is 0: the server has no replicas", "SET GLOBAL server_id = 1, and in my.cnf"));
    }
    wrong
}

pub fn missing_tables(missing: &[TableName], database: &str) -> Vec<SourceFailure> {
    let each = |table: &TableName| {
        not_ready(
            format!("there is no table {table} in the database {database}"),
            "run `outboxd init`, name the table with --table database.table, or grant SELECT on it",
        )
    };
    missing.iter().map(each).collect()
}

/// A checkpoint as a position of this server's kind.
pub fn position(stored: &Checkpoint, server: &Server) -> Result<BinlogPosition, SourceFailure> {
    let pipeline = &stored.pipeline;
    if stored.source != server.flavor.name() {
        return Err(not_ready(
            format!(
                "the checkpoint of pipeline `{pipeline}` is of a {} source, and this server is {}",
                stored.source, server.flavor
            ),
            "give this pipeline another --name, or remove the checkpoint if the old source is gone for good",
        ));
    }
    let position = match stored.position.is_empty() {
        // Nothing had been logged yet.
        true => Ok(BinlogPosition::new(empty(server), Default::default())),
        false => stored.position.parse::<BinlogPosition>(),
    };
    let mut position = position.map_err(|error| {
        not_ready(format!("the checkpoint of pipeline `{pipeline}`: {error}"), "correct its position")
    })?;
    if let Ok(file) = stored.file.parse() {
        position.file = file;
    }
    Ok(position)
}

/// The position before anything.
pub fn empty(server: &Server) -> Gtids {
    match (server.flavor, server.has_gtids()) {
        (_, false) => Gtids::Off,
        (Flavor::MySql, true) => Gtids::MySql(GtidSet::default()),
        (Flavor::MariaDb, true) => Gtids::MariaDb(Default::default()),
    }
}

/// The position before anything, of the same kind.
pub fn nothing(kind: &Gtids) -> Gtids {
    match kind {
        Gtids::Off => Gtids::Off,
        Gtids::MySql(_) => Gtids::MySql(GtidSet::default()),
        Gtids::MariaDb(_) => Gtids::MariaDb(Default::default()),
    }
}

/// What a position and a server have to do with each other.
pub enum Standing {
    /// Reading can go on.
    Fits,
    /// The server has not got there yet, though it may: a replica that lags.
    Behind { what: String },
    Lost {
        failure: SourceFailure,
        /// It is the log that is lost, of a server whose tables still have what was not delivered.
        fillable: bool,
    },
}

/// Whether the log still has what comes after the position, on this server.
pub fn standing(
    pipeline: &str,
    stored: &Checkpoint,
    position: &BinlogPosition,
    server: &Server,
    reach: &Reach,
) -> Standing {
    let lose = |why: String, fillable: bool| {
        let what = format!(
            "the position of pipeline `{pipeline}` is lost: {why}\n  last confirmed: {position} ({})\n  \
             the log begins: {} ({})\n  the log ends:   {} ({})",
            stored.file, reach.first, reach.first.file, reach.end, reach.end.file
        );
        let remedy = format!(
            "find out what was committed in between and see that it is delivered; then go on with --start now (or \
             earliest) after DELETE FROM outboxd_checkpoint WHERE pipeline = '{pipeline}', or under another --name"
        );
        Standing::Lost { failure: SourceFailure::PositionLost { what, remedy }, fillable }
    };
    let lost = |why: String| lose(why, true);
    let elsewhere = |why: String| lose(why, false);
    let same_server = stored.server == server.identity;
    // A reset server counts its files and its transactions anew, and may have counted past where it was.
    if same_server && reach.end.file.comes_before_file_of(&position.file) {
        return lost(format!("the server's log ends in {}: it was reset or restored", reach.end.file.file));
    }
    match (&position.gtids, &reach.first.gtids, &reach.end.gtids) {
        (Gtids::MySql(delivered), Gtids::MySql(purged), Gtids::MySql(executed)) => {
            let missing = position.missing_of(purged);
            if !missing.is_empty() {
                return lost(format!("the server has purged transactions that were not delivered: {missing}"));
            }
            if executed.is_superset_of(delivered) {
                return Standing::Fits;
            }
            let mut unknown = delivered.clone();
            unknown.subtract(executed);
            match (same_server, shares_source(delivered, executed)) {
                (true, _) => lost(format!(
                    "the server no longer knows {unknown}, which were delivered: it was reset or restored from a backup"
                )),
                (false, false) => elsewhere(format!("this is another server (it knows nothing of {unknown})")),
                (false, true) => Standing::Behind {
                    what: format!("this server lacks {unknown}, which were delivered from {}", stored.server),
                },
            }
        }
        (Gtids::MariaDb(delivered), Gtids::MariaDb(first), Gtids::MariaDb(end)) => {
            if !delivered.covers_all(first) {
                return lost(format!("the server has purged the log from {position} up to {first}"));
            }
            if end.covers_all(delivered) {
                return Standing::Fits;
            }
            let known = delivered.iter().any(|id| end.iter().any(|own| own.domain == id.domain));
            match (same_server, known) {
                (true, _) => lost(format!("the server stands at {end}, before it: it was reset or restored")),
                (false, false) => elsewhere("this is another server (it knows none of these domains)".to_owned()),
                (false, true) => Standing::Behind {
                    what: format!("this server stands at {end} and {position} was delivered from {}", stored.server),
                },
            }
        }
        (Gtids::Off, ..) => {
            if !same_server {
                return elsewhere(format!(
                    "it counts files of server {}, and this is server {}; only GTIDs carry over",
                    stored.server, server.identity
                ));
            }
            if !reach.files.iter().any(|(file, _)| *file == position.file.file) {
                return lost(format!("the server no longer has the file {}", position.file.file));
            }
            let beyond =
                reach.files.iter().any(|(file, size)| *file == position.file.file && *size < position.file.offset);
            if beyond {
                return lost(format!("the file {} ends before it: the log was reset", position.file.file));
            }
            Standing::Fits
        }
        _ => elsewhere(format!("it has GTIDs and the server's gtid_mode is {}", server.gtid_mode)),
    }
}

/// The stored position is older than the one that was stored last: so is the server that holds it.
pub fn went_back(pipeline: &str, found: &BinlogPosition, written: &BinlogPosition) -> SourceFailure {
    SourceFailure::PositionLost {
        what: format!(
            "the position of pipeline `{pipeline}` is lost: the checkpoint went back, so the server was restored from a \
             copy\n  stored by this process: {written}\n  found now:              {found}"
        ),
        remedy: "find out what was committed after the copy and see that it is delivered; the next start goes on from \
                 the restored checkpoint"
            .to_owned(),
    }
}

/// Whether two sets have a server in common.
fn shares_source(one: &GtidSet, other: &GtidSet) -> bool {
    let mut apart = one.clone();
    apart.subtract(other);
    // What is left of `one` is all of it when they have nothing in common.
    apart.count() != one.count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::SnapshotState;

    const A: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429562";
    const B: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429563";

    fn server(identity: &str) -> Server {
        Server {
            flavor: Flavor::MySql,
            identity: identity.to_owned(),
            server_id: 1,
            log_bin: true,
            format: "ROW".to_owned(),
            row_image: "FULL".to_owned(),
            row_metadata: "FULL".to_owned(),
            gtid_mode: "ON".to_owned(),
            checksum: true,
            expires: 0,
            read_only: false,
        }
    }

    fn judged(position: &str, from: &str, purged: &str, executed: &str) -> &'static str {
        let parse = |text: &str| BinlogPosition::new(Gtids::MySql(text.parse().unwrap()), Default::default());
        let reach =
            Reach { first: parse(purged), end: parse(executed), files: vec![("binlog.000001".to_owned(), 900)] };
        let stored = Checkpoint {
            format: 1,
            pipeline: "p".to_owned(),
            source: "mysql".to_owned(),
            server: from.to_owned(),
            position: position.to_owned(),
            file: String::new(),
            snapshot: SnapshotState::None,
        };
        match standing("p", &stored, &parse(position), &server(A), &reach) {
            Standing::Fits => "fits",
            Standing::Behind { .. } => "behind",
            Standing::Lost { .. } => "lost",
        }
    }

    #[test]
    fn a_position_fits_is_waited_for_or_is_lost() {
        let on = |set: &str| format!("{A}:{set}");
        assert_eq!(judged(&on("1-5"), A, &on("1-3"), &on("1-9")), "fits");
        assert_eq!(judged(&on("1-5"), A, &on("1-6"), &on("1-9")), "lost", "purged");
        assert_eq!(judged(&on("1-9"), A, "", &on("1-5")), "lost", "restored from a backup");
        assert_eq!(judged(&on("1-9"), B, "", &on("1-5")), "behind", "a replica that lags");
        assert_eq!(judged(&format!("{B}:1-9"), B, "", &on("1-5")), "lost", "another server");
    }

    #[test]
    fn a_file_position_holds_for_one_server_only() {
        let judged = |file: &str, from: &str| {
            let position: BinlogPosition = file.parse().unwrap();
            let end = BinlogPosition::new(Gtids::Off, "binlog.000003:500".parse().unwrap());
            let files = vec![("binlog.000002".to_owned(), 900), ("binlog.000003".to_owned(), 500)];
            let reach = Reach { first: "binlog.000002:4".parse().unwrap(), end, files };
            let stored = Checkpoint {
                format: 1,
                pipeline: "p".to_owned(),
                source: "mysql".to_owned(),
                server: from.to_owned(),
                position: file.to_owned(),
                file: file.to_owned(),
                snapshot: SnapshotState::None,
            };
            matches!(standing("p", &stored, &position, &server(A), &reach), Standing::Fits)
        };
        assert!(judged("binlog.000002:300", A));
        assert!(!judged("binlog.000002:300", B));
        assert!(!judged("binlog.000001:300", A));
        assert!(!judged("binlog.000003:501", A));
    }
}
