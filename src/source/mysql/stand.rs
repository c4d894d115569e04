//! The position in a binary log by hand. The server keeps none for us, so it can be anywhere that the log still has: ahead,
//! back, or, with GTIDs, a set that leaves out what others have.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::checkpoint::{self, Place};
use super::conninfo::ConnInfo;
use super::dump::{Entry as DumpEntry, ReplicaId};
use super::judge::{self, Standing};
use super::log::Log;
use super::position::{BinlogPosition, Gtids};
use super::reader::{self, Reader};
use super::server::{Reach, Server};
use super::session::{Session, literal};
use super::tables::{self, Tables};
use super::{keeper, locate};
use crate::checkpoint::publishers::PublisherNotes;
use crate::checkpoint::{Checkpoint, SnapshotState};
use crate::config::{CheckpointPlace, MySqlSettings, PipelineSettings};
use crate::event::{Chunk, Projection};
use crate::position::Position;
use crate::source::audit::{self, Entry};
use crate::source::stand::{self, Arranging, COUNTING, Change, Counted, MOST_COUNTED, Stand, Target, Whose};
use crate::source::{SourceFailure, SourceStats};

/// How long a place in the log is tried.
const PROBING: Duration = Duration::from_secs(3);

fn kept_in(settings: &MySqlSettings, database: &str) -> String {
    match &settings.checkpoint {
        CheckpointPlace::Source => format!("table {database}.outboxd_checkpoint"),
        elsewhere => elsewhere.describe(),
    }
}

/// The stored checkpoint; making nothing.
async fn stored(
    session: &mut Session,
    place: &Place,
    database: &str,
    pipeline: &str,
) -> Result<Option<Checkpoint>, SourceFailure> {
    if place.is_table() && !checkpoint::table_exists(session, database).await? {
        return Ok(None);
    }
    place.peek(session, pipeline).await
}

pub async fn look(settings: &MySqlSettings, of: &PipelineSettings) -> Result<Stand, SourceFailure> {
    let info = super::conninfo(settings)?;
    let database = checkpoint::database(&info)?.to_owned();
    let mut session = super::connect(settings, &info).await?;
    let server = Server::ask(&mut session).await?;
    let reach = server.reach(&mut session).await?;
    let place = Place::open(&settings.checkpoint, &of.kafka)?;
    let stored = stored(&mut session, &place, &database, &of.name).await?;
    let position = stored.as_ref().map(|stored| judge::position(stored, &server)).transpose()?;
    let mut remarks = Vec::new();
    if let (Some(stored), Some(position)) = (&stored, &position) {
        match judge::standing(&of.name, stored, position, &server, &reach) {
            Standing::Fits => {}
            Standing::Behind { what } => remarks.push(what),
            Standing::Lost { failure, .. } => remarks.push(failure.to_string()),
        }
        if stored.snapshot == SnapshotState::Pending {
            remarks.push("the rows that were in the table are delivered first, all of them".to_owned());
        }
    }
    let lock = literal(&keeper::lock_name(&database, &of.name));
    let holder = session.query_one(&format!("SELECT IS_USED_LOCK({lock})")).await?.text(0);
    let shown = Stand {
        source: server.flavor.name().to_owned(),
        address: session.describe(),
        position: position.as_ref().map(ToString::to_string),
        kept_in: kept_in(settings, &database),
        log_begins: Some(reach.first.to_string()),
        log_ends: Some(reach.end.to_string()),
        log_reach: Some(format!("{} to {}", reach.first.file, reach.end.file)),
        behind_bytes: position.as_ref().map(|position| reach.bytes_after(&position.file)),
        held_by: holder.map(|holder| format!("connection {holder} of the server")),
        remarks,
        ..Stand::default()
    };
    session.close().await;
    Ok(shown)
}

pub struct Held<'a> {
    settings: &'a MySqlSettings,
    of: &'a PipelineSettings,
    projection: &'a Projection,
    info: ConnInfo,
    session: Session,
    server: Server,
    place: Place,
    stored: Checkpoint,
    from: BinlogPosition,
    planned: Option<Planned>,
}

struct Planned {
    /// `None`: publishers alone.
    source: Option<BinlogPosition>,
    to: String,
    notes: Option<PublisherNotes>,
}

impl<'a> Held<'a> {
    /// Takes the pipeline's lock, as a run would.
    pub async fn take(
        settings: &'a MySqlSettings,
        of: &'a PipelineSettings,
        projection: &'a Projection,
    ) -> Result<Self, SourceFailure> {
        let info = super::conninfo(settings)?;
        let database = checkpoint::database(&info)?.to_owned();
        let mut session = super::connect(settings, &info).await?;
        let info = ConnInfo { hosts: vec![session.host().clone()], ..info };
        let server = Server::ask(&mut session).await?;
        keeper::take_lock(&mut session, &database, &of.name).await?;
        let place = Place::open(&settings.checkpoint, &of.kafka)?;
        let stored = stored(&mut session, &place, &database, &of.name).await?;
        let stored = stored.ok_or_else(|| SourceFailure::NotReady {
            what: format!("pipeline `{}` has no position yet", of.name),
            remedy: "outboxd init, or a first run; --start says where it begins".to_owned(),
        })?;
        let from = judge::position(&stored, &server)?;
        Ok(Held { settings, of, projection, info, session, server, place, stored, from, planned: None })
    }

    pub async fn plan(&mut self, target: &Target, whose: Whose<'_>) -> Result<Change, SourceFailure> {
        let reach = self.server.reach(&mut self.session).await?;
        let to = self.position(target, &reach).await?;
        if to.gtids == Gtids::Off && to != reach.end {
            self.probe(&to).await?;
        }
        let notes = stand::notes(self.of).await?;
        let (from, wanted) = (position(&self.from), position(&to));
        // As the next run will call it.
        let lineage = match &to.gtids {
            Gtids::Off => self.server.identity.clone(),
            Gtids::MySql(_) | Gtids::MariaDb(_) => "gtid".to_owned(),
        };
        let arranging = Arranging { settings: self.of, notes, lineage: &lineage, from: Some(&from), to: &wanted };
        let arranged = arranging.arrange(whose)?;
        let stood = match arranged.from {
            Some(Position::Binlog(stood)) => *stood,
            _ => self.from.clone(),
        };
        let mut remarks = Vec::new();
        let skips = match stood.covers(&to) {
            true => Counted::Nothing,
            false => self.count(&stood, &to, &reach).await?,
        };
        let repeats = match to.covers(&stood) {
            true => Counted::Nothing,
            false => self.count(&to, &stood, &reach).await?,
        };
        if skips != Counted::Nothing && repeats != Counted::Nothing {
            remarks.push("the new position lacks some of what the old one has: give the whole set of GTIDs".to_owned());
        }
        if self.stored.snapshot == SnapshotState::Pending {
            remarks.push("the rows that were in the table are still delivered first, all of them".to_owned());
        }
        let change = Change { from: Some(stood.to_string()), to: to.to_string(), skips, repeats, remarks };
        let source = arranged.source.is_some().then(|| to.clone());
        self.planned = Some(Planned { source, to: to.to_string(), notes: arranged.notes });
        Ok(change)
    }

    /// The position that is meant, as one that this server's log has.
    async fn position(&self, target: &Target, reach: &Reach) -> Result<BinlogPosition, SourceFailure> {
        let misconfigured = |what: String| SourceFailure::Misconfigured {
            what,
            remedy: "give one as `outboxd position show` prints it, `now` or `earliest`".to_owned(),
        };
        let wanted: BinlogPosition = match target {
            Target::Now => return Ok(reach.end.clone()),
            Target::Earliest => return Ok(reach.first.clone()),
            Target::At(text) => text
                .parse()
                .map_err(|error: super::position::ParseBinlogPositionError| misconfigured(error.to_string()))?,
        };
        let to = match wanted.gtids == Gtids::Off && self.server.has_gtids() {
            true => locate::gtids_at(&self.info, &self.server, reach, &wanted.file).await?,
            false => wanted,
        };
        if std::mem::discriminant(&to.gtids) != std::mem::discriminant(&reach.end.gtids) {
            let end = &reach.end;
            return Err(misconfigured(format!("{to} is not a position of this server; its log ends at {end}")));
        }
        let has_file = |position: &BinlogPosition| reach.files.iter().any(|(file, _)| *file == position.file.file);
        if !to.covers(&reach.first) || to.gtids == Gtids::Off && !has_file(&to) {
            return Err(SourceFailure::PositionLost {
                what: format!(
                    "the log no longer has what follows {to}: it begins at {} ({})",
                    reach.first, reach.first.file
                ),
                remedy: "give a position that the log still has, or `earliest`; what lies before must be delivered from the \
                         table"
                    .to_owned(),
            });
        }
        if !reach.end.covers(&to) {
            return Err(misconfigured(format!(
                "{to} lies beyond what this server has committed, {} ({})",
                reach.end, reach.end.file
            )));
        }
        Ok(to)
    }

    /// Events that follow the one position and that the other has. The log itself is read, and as far as both go.
    async fn count(
        &mut self,
        after: &BinlogPosition,
        upto: &BinlogPosition,
        reach: &Reach,
    ) -> Result<Counted, SourceFailure> {
        if !after.covers(&reach.first) {
            return Ok(Counted::Unknown("the log no longer has them".to_owned()));
        }
        let mut reader = self.reader(after).await?;
        let (upto, deadline) = (position(upto), Instant::now() + COUNTING);
        let (mut chunk, mut events) = (Chunk::default(), 0);
        loop {
            match tokio::time::timeout_at(deadline, reader.next(&mut chunk)).await {
                Err(_) => return Ok(Counted::AtLeast(events)),
                Ok(Err(failure @ SourceFailure::PositionLost { .. })) => return Err(failure),
                Ok(Err(failure)) => return Ok(Counted::Unknown(failure.to_string())),
                Ok(Ok(())) => {}
            }
            let had = |event: &&crate::event::OutboxEvent| upto.has(&chunk.commit(event).id);
            events += chunk.events().iter().filter(had).count() as u64;
            if chunk.end.as_ref().is_some_and(|end| end.position.covers(&upto)) {
                return Ok(Counted::Events(events));
            }
            if events >= MOST_COUNTED {
                return Ok(Counted::AtLeast(events));
            }
        }
    }

    /// Makes sure that a file and an offset lie between two transactions, where no GTID tells: what is read from there makes
    /// sense.
    async fn probe(&mut self, to: &BinlogPosition) -> Result<(), SourceFailure> {
        let mut reader = self.reader(to).await?;
        match tokio::time::timeout(PROBING, reader.next(&mut Chunk::default())).await {
            // At the end of the log nothing comes.
            Err(_) | Ok(Ok(())) => Ok(()),
            Ok(Err(failure)) => Err(SourceFailure::Misconfigured {
                what: format!("the log cannot be read from {to} on: {failure}"),
                remedy: "give a position between two transactions (mysqlbinlog shows them), `now` or `earliest`"
                    .to_owned(),
            }),
        }
    }

    /// Reads the log from here, for a look.
    async fn reader(&mut self, after: &BinlogPosition) -> Result<Reader, SourceFailure> {
        let database = checkpoint::database(&self.info)?.to_owned();
        let (catalog, _) = tables::find(&mut self.session, &database, &self.settings.tables).await?;
        let names = catalog.iter().map(|table| (table.schema.clone(), table.name.clone())).collect();
        let mariadb = self.session.is_mariadb();
        let (projection, uuids) = (self.projection.clone(), self.settings.uuid_columns.clone());
        let tables = Tables::new(names, projection, uuids, self.info.clone(), mariadb);
        let log = Log::new(tables, after.clone(), mariadb, self.server.checksum, Arc::<SourceStats>::default());
        let entry = DumpEntry {
            info: self.info.clone(),
            replica: ReplicaId::random(),
            from: after.clone(),
            heartbeat: Duration::from_secs(1),
            follow: true,
        };
        let address = self.session.describe();
        Ok(Reader::new(reader::Parts { entry, log, snapshot: None, stall_timeout: COUNTING, address }))
    }

    pub async fn audit(&mut self, entry: &Entry) -> Result<(), SourceFailure> {
        match audit::in_mysql(&mut self.session, entry).await {
            // Whoever may not write there keeps the checkpoint elsewhere.
            Err(refused) => match audit::elsewhere(&self.settings.checkpoint, &self.of.kafka, entry).await? {
                true => Ok(()),
                false => Err(refused),
            },
            recorded => recorded,
        }
    }

    pub async fn carry_out(&mut self) -> Result<String, SourceFailure> {
        let Some(Planned { source, to, notes }) = self.planned.take() else {
            return Err(SourceFailure::transient("nothing was planned"));
        };
        // The lock is this session's: it must be the same one still.
        let database = checkpoint::database(&self.info)?.to_owned();
        let name = literal(&keeper::lock_name(&database, &self.of.name));
        let own = self.session.query_one(&format!("SELECT IS_USED_LOCK({name}) = CONNECTION_ID()")).await?;
        if own.number(0) != 1 {
            return Err(SourceFailure::Held { what: "another instance has taken the pipeline meanwhile".to_owned() });
        }
        stand::note(self.of, notes.as_ref()).await?;
        if let Some(source) = source {
            let changed = Checkpoint {
                server: self.server.identity.clone(),
                position: source.to_string(),
                file: source.file.to_string(),
                ..self.stored.clone()
            };
            self.place.save(&mut self.session, &changed).await?;
        }
        Ok(to)
    }

    pub async fn release(self) {
        self.session.close().await;
    }
}

fn position(at: &BinlogPosition) -> Position {
    Position::Binlog(Box::new(at.clone()))
}
