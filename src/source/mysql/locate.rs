//! A file and an offset as GTIDs, for a log that is entered at the one and gone on with by the others.
//!
//! ```text
//!   FORMAT  PREVIOUS_GTIDS or GTID_LIST   GTID …  GTID …  │  GTID …
//!           what lies before the file     + those here  offset
//! ```
//!
//! The file is read through the dump itself, from its head to the first transaction after the offset. A place inside a
//! transaction is refused: by GTID it would be passed over as a whole or delivered as a whole, and neither was asked
//! for. So is one that a transaction without a GTID follows, which a server that is asked by GTID may leave out.

use std::time::Duration;

use super::conninfo::ConnInfo;
use super::dump::{self, Entry, FIRST_OFFSET, ReplicaId};
use super::event::{self, Body, Header, kind};
use super::gtid::{GtidSet, MariaGtidList, MariaId};
use super::input::Malformed;
use super::judge;
use super::position::{BinlogPosition, FilePos, Gtids};
use super::server::{Reach, Server};
use super::server_error::WireError;
use crate::source::SourceFailure;

/// A server that reads its own file is silent no longer than this.
const PATIENCE: Duration = Duration::from_secs(60);

/// The GTIDs of all that lies before the place.
pub async fn gtids_at(
    info: &ConnInfo,
    server: &Server,
    reach: &Reach,
    place: &FilePos,
) -> Result<BinlogPosition, SourceFailure> {
    match reach.files.iter().find(|(file, _)| *file == place.file) {
        Some((_, size)) if place.offset <= *size => {}
        Some((_, size)) => return Err(refused(place, format!("lies beyond the end of the file, {size}"))),
        None => {
            return Err(SourceFailure::PositionLost {
                what: format!(
                    "the position {place}: the server does not have this file; its log begins in {}",
                    reach.first.file.file
                ),
                remedy: "start at `earliest`, or at a position that the log still has".to_owned(),
            });
        }
    }
    let head = FilePos { file: place.file.clone(), offset: FIRST_OFFSET };
    let entry = Entry {
        info: info.clone(),
        replica: ReplicaId::random(),
        from: BinlogPosition::new(Gtids::Off, head),
        heartbeat: PATIENCE / 3,
        follow: false,
    };
    tracing::info!(%place, "looking up the GTIDs of all that lies before it");
    let mut wire = dump::start(&entry).await?;
    let mut scan = Scan::new(place, judge::empty(server), server.checksum);
    loop {
        let packet = tokio::time::timeout(PATIENCE, wire.read()).await.unwrap_or_else(|_| {
            Err(WireError::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "the log does not come")))
        });
        let packet = packet.map_err(|error| failure(error, &entry, place))?;
        match packet.split_first() {
            Some((0x00, event)) => {
                if scan.event(event)? {
                    return scan.finish();
                }
            }
            Some((0xFE, _)) => return scan.finish(),
            _ => return Err(WireError::unexpected("neither an event nor the log's end").classify(&info.describe())),
        }
    }
}

fn refused(place: &FilePos, why: String) -> SourceFailure {
    SourceFailure::Misconfigured {
        what: format!("the position {place} {why}"),
        remedy: "give a position between two transactions (mysqlbinlog shows them), GTIDs, `now` or `earliest`"
            .to_owned(),
    }
}

fn failure(error: WireError, entry: &Entry, place: &FilePos) -> SourceFailure {
    let WireError::Server { code, message } = &error else {
        return error.classify(&entry.info.describe());
    };
    // Where GTIDs are on, a server does not even show what was logged before they were.
    if message.to_ascii_lowercase().contains("anonymous") {
        return SourceFailure::Misconfigured {
            what: format!("from {place} on the log cannot be read by GTID: {message}"),
            remedy:
                "start behind what has none, at GTIDs or at `now`; --snapshot existing delivers what the table holds"
                    .to_owned(),
        };
    }
    dump::refusal(*code, message, entry.replica).unwrap_or_else(|| error.classify(&entry.info.describe()))
}

struct Scan<'a> {
    place: &'a FilePos,
    gtids: Gtids,
    checksum: bool,
    /// How far reading has come in the place's file; `None` in the files after it.
    here: Option<u64>,
    /// The list at the head of the file was read.
    headed: bool,
    /// Where the last transaction before the place begins.
    last: Option<u64>,
}

impl<'a> Scan<'a> {
    fn new(place: &'a FilePos, nothing: Gtids, checksum: bool) -> Self {
        Scan { place, gtids: nothing, checksum, here: Some(FIRST_OFFSET), headed: false, last: None }
    }

    /// Takes the next event in; true when nothing more needs to be read.
    fn event(&mut self, bytes: &[u8]) -> Result<bool, SourceFailure> {
        let event = event::split(bytes, self.checksum).map_err(|error| self.malformed(&error))?;
        // Where it begins, if it is an event of the place's file.
        let begin = self.advance(&event.header);
        let before = begin.is_some_and(|begin| begin < self.place.offset);
        let body = event.decode().map_err(|error| self.malformed(&error))?;
        if before && self.here.is_some_and(|end| end > self.place.offset) {
            if matches!(body, Body::Gtid(_) | Body::MariaGtid(_)) {
                self.last = begin;
            }
            return Err(self.inside());
        }
        match body {
            Body::FormatDescription(description) => self.checksum = description.checksum,
            Body::Rotate(rotate) if rotate.file != self.place.file => self.here = None,
            Body::PreviousGtids(set) if !self.headed => {
                let set = GtidSet::decode(set).map_err(|error| self.malformed(&error))?;
                self.head(Gtids::MySql(set))?;
            }
            Body::MariaGtidList(list) if !self.headed => {
                let list = MariaGtidList::decode(list).map_err(|error| self.malformed(&error))?;
                self.head(Gtids::MariaDb(list))?;
            }
            Body::Gtid(_) | Body::MariaGtid(_) if !before => return Ok(true),
            Body::Gtid(gtid) => {
                self.last = begin;
                if let Gtids::MySql(set) = &mut self.gtids {
                    set.insert(gtid.uuid, gtid.tag, gtid.gno);
                }
            }
            Body::MariaGtid(gtid) => {
                self.last = begin;
                if let Gtids::MariaDb(list) = &mut self.gtids {
                    list.update(MariaId { domain: gtid.domain, server_id: gtid.server_id, sequence: gtid.sequence });
                }
            }
            // Between transactions.
            Body::Rotate(_) | Body::PreviousGtids(_) | Body::MariaGtidList(_) | Body::Heartbeat(_) | Body::Stop => {}
            Body::Aside(kind::MARIA_CHECKPOINT) | Body::Ignorable(_) => {}
            _ if before => {}
            _ => return Err(self.inside()),
        }
        Ok(false)
    }

    /// Moves on behind an event of the place's file, and says where it begins. It is exact for the first and the last of
    /// a transaction: between them there may be some that a server does not send, comments on rows for one.
    fn advance(&mut self, header: &Header) -> Option<u64> {
        let made_up = header.is_artificial() || header.type_code == kind::ROTATE && header.end == 0;
        let here = self.here.as_mut().filter(|_| !made_up)?;
        let size = u64::from(header.size);
        *here += size;
        // MariaDB 11.4 says it of a transaction's first and last event only. There are 32 bits for it, and a file with a
        // huge transaction may be longer.
        if header.end != 0 {
            *here = *here >> 32 << 32 | u64::from(header.end);
        }
        Some(here.saturating_sub(size))
    }

    fn head(&mut self, gtids: Gtids) -> Result<(), SourceFailure> {
        if std::mem::discriminant(&gtids) != std::mem::discriminant(&self.gtids) {
            return Err(refused(self.place, "is in a file with GTIDs of another kind than the server's".to_owned()));
        }
        self.gtids = gtids;
        self.headed = true;
        Ok(())
    }

    fn finish(self) -> Result<BinlogPosition, SourceFailure> {
        if !self.headed {
            return Err(refused(self.place, "is in a file that does not say which GTIDs lie before it".to_owned()));
        }
        match self.here {
            Some(here) if here < self.place.offset => {
                Err(refused(self.place, format!("lies beyond the end of the log, {here}")))
            }
            _ => Ok(BinlogPosition::new(self.gtids, self.place.clone())),
        }
    }

    fn inside(&self) -> SourceFailure {
        let why = match self.last {
            Some(last) => format!("lies inside the transaction that begins at {last}"),
            None => "lies inside an event, or before a transaction without a GTID".to_owned(),
        };
        refused(self.place, why)
    }

    fn malformed(&self, error: &Malformed) -> SourceFailure {
        SourceFailure::Undecodable {
            what: format!("the binary log cannot be read before {}: {error}", self.place),
            remedy: "nothing was skipped; start at a GTID position, `now` or `earliest`".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::mysql::event::FileEvents;

    /// What is found out about a place in a recorded file.
    fn found(file: &[u8], nothing: Gtids, offset: u64) -> Result<String, String> {
        let place = FilePos { file: "binlog.000002".to_owned(), offset };
        let mut scan = Scan::new(&place, nothing, true);
        let mut events = FileEvents::new(file).unwrap();
        while let Some(event) = events.next_event().unwrap() {
            if scan.event(event).map_err(|failure| failure.to_string())? {
                break;
            }
        }
        scan.finish().map(|position| position.to_string()).map_err(|failure| failure.to_string())
    }

    /// Where the events of a kind begin.
    fn begins(file: &[u8], wanted: u8) -> Vec<u64> {
        let (mut events, mut at, mut begins) = (FileEvents::new(file).unwrap(), FIRST_OFFSET, Vec::new());
        while let Some(event) = events.next_event().unwrap() {
            if Header::parse(event).unwrap().type_code == wanted {
                begins.push(at);
            }
            at += event.len() as u64;
        }
        begins
    }

    #[test]
    fn a_place_between_transactions_is_what_lies_before_it_and_one_inside_is_refused() {
        let file = include_bytes!("testdata/mariadb-11.4-plain.binlog");
        let nothing = || Gtids::MariaDb(Default::default());
        let gtids = begins(file, kind::MARIA_GTID);
        let found: Vec<_> = gtids.iter().map(|begin| found(file, nothing(), *begin).unwrap()).collect();
        assert!(found.len() > 1 && found.windows(2).all(|pair| pair[0] != pair[1]), "{found:?}");
        let inside = self::found(file, nothing(), begins(file, kind::XID)[0]).unwrap_err();
        assert!(inside.contains("lies inside the transaction that begins at"), "{inside}");
    }

    #[test]
    fn a_place_that_a_transaction_without_a_gtid_follows_is_refused() {
        let file = include_bytes!("testdata/mysql-9.7-anonymous.binlog");
        let first = begins(file, kind::ANONYMOUS_GTID)[0];
        let refused = found(file, Gtids::MySql(GtidSet::default()), first).unwrap_err();
        assert!(refused.contains("before a transaction without a GTID"), "{refused}");
    }
}
