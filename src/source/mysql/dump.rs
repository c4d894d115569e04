//! Asking a server for its log: the variables a replica sets, its registration, and the dump command.
//!
//! ```text
//!   15 server_id:u32 host user password (u8 length each) port:u16 rank:u32 source_id:u32     register
//!   12 offset:u32 flags:u16 server_id:u32 file                                               dump by file
//!   1E flags:u16 server_id:u32 name_len:u32 name offset:u64 len:u32 set                      dump by GTID (MySQL)
//! ```
//!
//! MariaDB takes its GTIDs in a variable and is then asked by file, with an empty name. To the server outboxd is one
//! more replica: it needs an id that no other replica has, else the two throw each other out.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use super::conninfo::ConnInfo;
use super::position::{BinlogPosition, Gtids};
use super::server_error::WireError;
use super::session::{Flavor, Session, literal};
use super::wire::Wire;
use crate::source::SourceFailure;

const COM_REGISTER_SLAVE: u8 = 0x15;
const COM_BINLOG_DUMP: u8 = 0x12;
const COM_BINLOG_DUMP_GTID: u8 = 0x1E;
const THROUGH_GTID: u16 = 0x04;
const NON_BLOCKING: u16 = 0x01;

/// Where events begin in a file.
pub const FIRST_OFFSET: u64 = 4;

/// Who we are among the server's replicas.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaId {
    pub server_id: u32,
    /// Chosen by the user: if it clashes, another one will not do.
    pub chosen: bool,
}

impl ReplicaId {
    /// Another one every time, so that whoever lost its place to a replica of the same id comes back beside it. Out of
    /// the upper half: people number their servers from below.
    pub fn random() -> Self {
        // Every state hashes in its own way.
        let random = RandomState::new().hash_one(()) as u32;
        ReplicaId { server_id: random | 0x8000_0000, chosen: false }
    }
}

/// Everything that opening the log takes.
#[derive(Clone, Debug)]
pub struct Entry {
    pub info: ConnInfo,
    pub replica: ReplicaId,
    pub from: BinlogPosition,
    pub heartbeat: Duration,
    /// Whether the server waits for more at the end of its log; else it says that it is the end. Only by file.
    pub follow: bool,
}

/// Opens a connection that the server's log comes over from now on.
pub async fn start(entry: &Entry) -> Result<Wire, SourceFailure> {
    let Entry { info, replica, from, heartbeat, follow } = entry;
    let mut session = Session::bare(info).await?;
    for statement in variables(&session, *replica, from, *heartbeat) {
        session.execute(&statement).await?;
    }
    let describe = session.describe();
    let mut wire = session.into_wire();
    let begun = async {
        wire.command(&registration(*replica)).await?;
        wire.read().await?;
        wire.command(&dump(*replica, from, *follow)?).await
    };
    begun.await.map_err(|error: WireError| error.classify(&describe))?;
    Ok(wire)
}

fn variables(session: &Session, replica: ReplicaId, from: &BinlogPosition, heartbeat: Duration) -> Vec<String> {
    let nanos = heartbeat.as_nanos();
    let mut statements = vec![
        // Whoever does not say that it can check events is sent none with a checksum, or an error.
        "SET @master_binlog_checksum = @@global.binlog_checksum, @source_binlog_checksum = @@global.binlog_checksum"
            .to_owned(),
        format!("SET @master_heartbeat_period = {nanos}, @source_heartbeat_period = {nanos}"),
        // While the broker is away nothing is read; after a minute of that the server would hang up.
        "SET SESSION net_write_timeout = 86400".to_owned(),
    ];
    match session.flavor {
        // The server throws out the older of two replicas with one uuid; ours follows from the id.
        Flavor::MySql => {
            let uuid = format!("6f757462-6f78-6400-8000-0000{:08x}", replica.server_id);
            statements.push(format!("SET @slave_uuid = '{uuid}', @replica_uuid = '{uuid}'"));
        }
        // 4: GTIDs are understood, so they are sent.
        Flavor::MariaDb => statements.push("SET @mariadb_slave_capability = 4".to_owned()),
    }
    if let Gtids::MariaDb(list) = &from.gtids {
        statements.push(format!("SET @slave_connect_state = {}", literal(&list.to_string())));
        statements.push("SET @slave_gtid_strict_mode = 0, @slave_gtid_ignore_duplicates = 0".to_owned());
    }
    statements
}

fn registration(replica: ReplicaId) -> Vec<u8> {
    let mut command = vec![COM_REGISTER_SLAVE];
    command.extend(replica.server_id.to_le_bytes());
    for text in ["outboxd", "", ""] {
        command.push(text.len() as u8);
        command.extend(text.as_bytes());
    }
    command.extend(0u16.to_le_bytes());
    command.extend(0u32.to_le_bytes());
    command.extend(0u32.to_le_bytes());
    command
}

fn dump(replica: ReplicaId, from: &BinlogPosition, follow: bool) -> Result<Vec<u8>, WireError> {
    if let Gtids::MySql(set) = &from.gtids {
        let mut encoded = Vec::new();
        set.encode(&mut encoded);
        let mut command = vec![COM_BINLOG_DUMP_GTID];
        command.extend(THROUGH_GTID.to_le_bytes());
        command.extend(replica.server_id.to_le_bytes());
        command.extend(0u32.to_le_bytes());
        command.extend(FIRST_OFFSET.to_le_bytes());
        command.extend((encoded.len() as u32).to_le_bytes());
        command.extend(encoded);
        return Ok(command);
    }
    let (file, offset) = match &from.gtids {
        Gtids::Off => (from.file.file.as_str(), from.file.offset),
        _ => ("", FIRST_OFFSET),
    };
    let offset = u32::try_from(offset).map_err(|_| {
        WireError::refused(
            format!("the position {} lies beyond 4 GiB, where the protocol cannot begin", from.file),
            "turn GTIDs on, or keep transactions smaller",
        )
    })?;
    let mut command = vec![COM_BINLOG_DUMP];
    command.extend(offset.to_le_bytes());
    command.extend(if follow { 0 } else { NON_BLOCKING }.to_le_bytes());
    command.extend(replica.server_id.to_le_bytes());
    command.extend(file.as_bytes());
    Ok(command)
}

/// Says what an error of a running dump means; `None` when it is an ordinary one.
pub fn refusal(code: u16, message: &str, replica: ReplicaId) -> Option<SourceFailure> {
    // All of a dump's own troubles have one code, ER_MASTER_FATAL_ERROR_READING_BINLOG; MariaDB has a few more.
    const FATAL: u16 = 1236;
    const SAME_ID: u16 = 4052;
    const POSITION_UNKNOWN: [u16; 3] = [1945, 1947, 1955];
    if code != FATAL && code != SAME_ID && !POSITION_UNKNOWN.contains(&code) {
        return None;
    }
    let told = message.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| told.contains(word));
    if code == SAME_ID || says(&["same server_uuid", "same server_id", "same server id"]) {
        let what = format!("another replica has the server id {}: {message}", replica.server_id);
        return Some(match replica.chosen {
            true => SourceFailure::NotReady {
                what,
                remedy: "give outboxd an id of its own with --server-id, or leave it out for a random one".to_owned(),
            },
            false => SourceFailure::Transient { what },
        });
    }
    let lost = POSITION_UNKNOWN.contains(&code)
        || says(&[
            "purged",
            "could not find first log file",
            "could not find gtid state",
            "requested by slave is not in the master's binlog",
            "more gtids than",
            "impossible position",
            "could not open log file",
            "client requested master to start replication from",
            "client requested source to start replication from",
        ]);
    Some(match lost {
        true => SourceFailure::PositionLost {
            what: format!("the server no longer has the log that comes next: {message}"),
            remedy: "find out what was committed in between and see that it is delivered; then go on with --start now \
                     (or earliest) under another --name"
                .to_owned(),
        },
        // A damaged log, a packet too large: retrying does not help, and skipping is out of the question.
        false if says(&["corrupt", "max_allowed_packet", "bogus data", "checksum"]) => SourceFailure::Undecodable {
            what: format!("the server cannot read its own log: {message}"),
            remedy: "nothing was skipped; repair the server, or raise its max_allowed_packet".to_owned(),
        },
        false => SourceFailure::transient(message.to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_names_file_and_offset_or_the_gtids() {
        let replica = ReplicaId { server_id: 0x0102_0304, chosen: true };
        let by_file = dump(replica, &"binlog.000007:260".parse().unwrap(), true).unwrap();
        assert_eq!(by_file, b"\x12\x04\x01\0\0\0\0\x04\x03\x02\x01binlog.000007");
        let to_its_end = dump(replica, &"binlog.000007:260".parse().unwrap(), false).unwrap();
        assert_eq!(to_its_end, b"\x12\x04\x01\0\0\x01\0\x04\x03\x02\x01binlog.000007");
        let by_list = dump(replica, &"0-1-9".parse().unwrap(), true).unwrap();
        assert_eq!(by_list, b"\x12\x04\0\0\0\0\0\x04\x03\x02\x01");
        let by_set = dump(replica, &"3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23".parse().unwrap(), true).unwrap();
        assert_eq!(by_set[..7], [0x1E, 4, 0, 4, 3, 2, 1]);
        assert!(dump(replica, &"binlog.000007:4294967296".parse().unwrap(), true).is_err());
    }

    #[test]
    fn a_random_id_is_drawn_anew_every_time_out_of_the_upper_half() {
        let mut ids: Vec<u32> = (0..100).map(|_| ReplicaId::random().server_id).collect();
        assert!(ids.iter().all(|id| *id >= 0x8000_0000));
        ids.sort_unstable();
        ids.dedup();
        // Of so many even two are hardly ever the same.
        assert!(ids.len() >= 99, "{ids:?}");
    }

    #[test]
    fn a_dumps_errors_are_told_apart() {
        let of = |message: &str, chosen| refusal(1236, message, ReplicaId { server_id: 9, chosen });
        let clash = "A replica with the same server_uuid/server_id as this replica has connected to the source";
        assert!(matches!(of(clash, true), Some(SourceFailure::NotReady { .. })));
        assert!(matches!(of(clash, false), Some(SourceFailure::Transient { .. })));
        let mariadb = refusal(4052, "A slave with the same server_uuid/server_id is already connected", {
            ReplicaId { server_id: 9, chosen: true }
        });
        assert!(matches!(mariadb, Some(SourceFailure::NotReady { .. })));
        let purged = "Cannot replicate because the source purged required binary logs.";
        assert!(matches!(of(purged, false), Some(SourceFailure::PositionLost { .. })));
        let damaged = "binlog truncated in the middle of event; consider out of disk space; corrupt";
        assert!(matches!(of(damaged, false), Some(SourceFailure::Undecodable { .. })));
        assert!(refusal(1040, purged, ReplicaId { server_id: 9, chosen: false }).is_none());
    }
}
