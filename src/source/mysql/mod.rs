//! MySQL and MariaDB: the binary log, read as a replica reads it.
//!
//! ```text
//!   server ──packets──▶ Reader ──events──▶ Log ──chunks──▶ relay
//!                                                             │
//!   ordinary connection ◀── keeper task ◀── watch ◀── Confirmer
//!     lock, checkpoint, the log's reach
//! ```
//!
//! The server keeps no position for a replica, so outboxd keeps it itself (`checkpoint`), behind the acknowledgements.
//! The codec decodes bytes and does no I/O:
//!
//! ```text
//!   packet ──event::split──▶ Event ──decode──▶ Body
//!                                               │ Query        ─▶ query::Statement
//!                                               │ TableMap     ─▶ table_map::TableShape
//!                                               │ Rows         ─▶ rows::RowImages ─▶ values::render
//!                                               │ Payload      ─▶ compressed::Inflater ─▶ event::split …
//!                                               │ Gtid, lists  ─▶ gtid::{GtidSet, MariaGtidList}
//! ```
//!
//! It is our own because the position must never pass an event that was not understood: whatever is malformed or
//! unknown is an error there and a halt here, no length that the server claims is trusted before the bytes are there,
//! and the bytes of a wanted column stay where they lie.

mod backfill;
pub mod charset;
mod charset_patches;
pub(crate) mod checkpoint;
pub mod compressed;
pub mod conninfo;
pub mod dump;
pub mod event;
pub mod gtid;
mod input;
pub mod json;
pub(crate) mod judge;
pub(crate) mod keeper;
mod locate;
mod log;
mod numbers;
pub mod position;
pub mod preflight;
pub(crate) mod privileges;
pub mod query;
mod reader;
pub mod rows;
pub mod server;
pub mod server_error;
pub mod session;
pub(crate) mod settled;
pub mod setup;
pub(crate) mod snapshot;
pub mod stand;
pub mod table_map;
pub(crate) mod tables;
mod temporal;
pub mod transaction;
pub mod values;
pub mod wire;

pub use input::Malformed;
pub use reader::Reader;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::checkpoint::{Checkpoint, FORMAT, SnapshotState};
use crate::config::{CheckpointPlace, MySqlSettings, PipelineSettings, Snapshot, Start};
use crate::event::Projection;
use crate::position::Position;
use crate::source::backfill::Fill;
use crate::source::{self, Opened, SourceFailure, SourceStats};
use checkpoint::Place;
use conninfo::ConnInfo;
use dump::{Entry, ReplicaId};
use judge::Standing;
use keeper::Keeper;
use log::Log;
use position::{BinlogPosition, Gtids};
use server::Server;
use session::{Flavor, Session};
use snapshot::SnapshotReader;
use tables::Tables;

/// A replica that lags behind what was delivered is waited for this long before the position counts as lost.
const LAG_PATIENCE: Duration = Duration::from_secs(60);

/// What outlives a connection.
#[derive(Default)]
pub struct Memory(Mutex<Remembered>);

#[derive(Default)]
struct Remembered {
    /// The last position confirmed by this process, newer than the stored one.
    confirmed: Option<BinlogPosition>,
    /// The last position stored by this process.
    stored: Option<BinlogPosition>,
    /// What was committed when the process started ends here.
    caught_up_at: Option<BinlogPosition>,
    /// Since when the server lacks what was delivered.
    behind_since: Option<Instant>,
}

impl Memory {
    /// Remembers what was delivered beyond what is stored.
    pub fn reached(&self, position: &BinlogPosition) -> bool {
        self.remembered().confirmed = Some(position.clone());
        true
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Confirmer {
    confirmed: watch::Sender<BinlogPosition>,
    memory: Arc<Memory>,
    finish_keeper: Option<oneshot::Sender<()>>,
}

impl Confirmer {
    pub fn confirm(&self, upto: &Position) {
        let Position::Binlog(position) = upto else { return };
        self.memory.remembered().confirmed = Some((**position).clone());
        self.confirmed.send_replace((**position).clone());
    }

    /// Stores the last confirmed position and lets the lock go.
    pub async fn finish(mut self, alarm: JoinHandle<Result<(), SourceFailure>>) {
        if let Some(finish) = self.finish_keeper.take() {
            let _ = finish.send(());
            let _ = tokio::time::timeout(Duration::from_secs(3), alarm).await;
        }
    }
}

/// Opens the stream: takes the lock, finds tables and checkpoint, makes what is missing and may be made, and goes on
/// from the confirmed position. Whatever stands in the way is told with its remedy.
pub async fn open(
    settings: &MySqlSettings,
    of: &PipelineSettings,
    projection: &Projection,
    memory: &Arc<Memory>,
    stats: &Arc<SourceStats>,
) -> Result<Opened, SourceFailure> {
    let info = conninfo(settings)?;
    let database = checkpoint::database(&info)?.to_owned();
    let pipeline = of.name.as_str();
    let mut session = connect(settings, &info).await?;
    // All connections must be to one and the same server.
    let info = ConnInfo { hosts: vec![session.host().clone()], ..info };
    let server = Server::ask(&mut session).await?;
    refuse(judge::settings(&server))?;
    keeper::take_lock(&mut session, &database, pipeline).await?;

    let (catalog, missing) = tables::find(&mut session, &database, &settings.tables).await?;
    refuse(judge::missing_tables(&missing, &database))?;
    refuse(tables::missing_columns(&catalog, projection))?;
    let place = Place::open(&settings.checkpoint, &of.kafka)?;
    if place.is_table() && !checkpoint::table_exists(&mut session, &database).await? {
        make_checkpoint_table(&mut session, settings).await?;
    }
    let stored = place.load(&mut session, pipeline).await?;
    let reach = server.reach(&mut session).await?;
    memory.remembered().caught_up_at.get_or_insert_with(|| reach.end.clone());

    let reaches = reach.end.clone();
    let (known, loss) = match &stored {
        Some(stored) => match known_position(pipeline, stored, &server, &reach, memory)? {
            Known::At(known) => (Some(known), None),
            Known::Lost(failure) => (None, Some(failure)),
        },
        None => (None, None),
    };
    let lost = loss.is_some();
    let fill = match loss {
        Some(failure) => Some(backfill::agreed(&mut session, of, &catalog, failure).await?),
        None if stored.as_ref().is_some_and(|stored| stored.snapshot == SnapshotState::Backfill) => {
            Some(Fill::under_way(of)?)
        }
        None => None,
    };
    if lost {
        // Whatever was remembered is of a log that is gone.
        let caught_up_at = Some(reach.end.clone());
        *memory.remembered() = Remembered { caught_up_at, ..Remembered::default() };
    }
    let pending = match &stored {
        Some(stored) => fill.is_some() || stored.snapshot == SnapshotState::Pending,
        None => settings.snapshot == Snapshot::Existing,
    };
    let snapshot = match pending {
        true => {
            let uuids = settings.uuid_columns.clone();
            let only = fill.as_ref().map(|fill| (fill.view().clone(), stats.clone()));
            Some(SnapshotReader::begin(&info, &server, catalog.clone(), uuids, known.clone(), only).await?)
        }
        false => None,
    };
    let start = match (&known, &snapshot) {
        (Some(known), _) => known.clone(),
        (None, Some(snapshot)) => snapshot.end().clone(),
        (None, None) => first_position(settings, &info, &server, &reach).await?,
    };
    let checkpoint = Checkpoint {
        format: FORMAT,
        pipeline: pipeline.to_owned(),
        source: server.flavor.name().to_owned(),
        server: server.identity.clone(),
        position: start.to_string(),
        file: start.file.to_string(),
        snapshot: match (&stored, pending) {
            (_, true) if fill.is_some() => SnapshotState::Backfill,
            (_, true) => SnapshotState::Pending,
            (Some(stored), false) => stored.snapshot,
            (None, false) => SnapshotState::None,
        },
    };
    let lineage = match &start.gtids {
        Gtids::Off => server.identity.clone(),
        // They mean the same on every server.
        Gtids::MySql(_) | Gtids::MariaDb(_) => "gtid".to_owned(),
    };
    let begun = stored.is_none() || fill.is_some();
    if stored.is_none() || lost {
        warn_of_prepared(&mut session).await;
        // Before anything is read: a crash from here on goes on from the same place, and redoes the snapshot.
        place.save(&mut session, &checkpoint).await?;
    }
    if let Some(fill) = &fill {
        fill.begin(&checkpoint.position, stats);
    }

    let replica = match settings.server_id {
        Some(server_id) => ReplicaId { server_id, chosen: true },
        None => ReplicaId::random(),
    };
    let heartbeat = (of.stall_timeout / 3).clamp(Duration::from_millis(100), Duration::from_secs(10));
    let entry = Entry { info: info.clone(), replica, from: start.clone(), heartbeat, follow: true };
    let address = session.describe();
    let told = (address.clone(), server.flavor);
    let names = catalog.iter().map(|table| (table.schema.clone(), table.name.clone())).collect();
    let mariadb = session.is_mariadb();
    let tables = Tables::new(names, projection.clone(), settings.uuid_columns.clone(), info, mariadb);
    let log = Log::new(tables, start.clone(), mariadb, server.checksum, stats.clone());
    let reported = match snapshot {
        // Nothing is confirmed before the snapshot is delivered.
        Some(_) => BinlogPosition::new(judge::nothing(&start.gtids), Default::default()),
        None => start.clone(),
    };
    let (confirmed, watched) = watch::channel(reported.clone());
    let (finish_keeper, finished) = oneshot::channel();
    let snapshot_end = snapshot.is_some().then(|| start.clone());
    let keeper = Keeper {
        session,
        server,
        place,
        checkpoint,
        confirmed: watched,
        snapshot_end,
        stats: stats.clone(),
        interval: of.checkpoint_interval,
        // What this process confirmed since is still to be stored.
        stored: BinlogPosition { seen: Default::default(), ..start.clone() },
        stored_at: Instant::now(),
        memory: memory.clone(),
        warned: false,
    };
    let with_snapshot = snapshot.is_some();
    let mut reader = Reader::new(reader::Parts { entry, log, snapshot, stall_timeout: of.stall_timeout, address });
    if !with_snapshot {
        reader.enter().await?;
    }
    tracing::info!(source = told.0, from = %start, file = %start.file, server = %told.1, "reading the log");
    let caught_up_at = memory.remembered().caught_up_at.clone().unwrap_or_else(|| start.clone());
    let alarm = tokio::spawn(keeper.run(finished));
    Ok(Opened {
        reader: source::Reader::MySql(Box::new(reader)),
        confirmer: source::Confirmer::MySql(Confirmer {
            confirmed,
            memory: memory.clone(),
            finish_keeper: Some(finish_keeper),
        }),
        start: Position::Binlog(Box::new(reported)),
        caught_up_at: Position::Binlog(Box::new(caught_up_at)),
        reaches: Position::Binlog(Box::new(reaches)),
        lineage,
        begun,
        table_first: with_snapshot,
        alarm,
    })
}

/// What was prepared before the log is entered lies before the place where it is entered, also if it is committed later.
async fn warn_of_prepared(session: &mut Session) {
    // On MySQL one may need a right of its own to ask.
    if let Ok(prepared) = session.query("XA RECOVER").await
        && !prepared.is_empty()
    {
        tracing::warn!(
            transactions = prepared.len(),
            "XA transactions are prepared already: outbox rows that they hold are not delivered when they are committed, \
             unless --start lies before them"
        );
    }
}

/// The first of the problems, as a run tells them; `check` shows them all.
pub(crate) fn refuse(mut problems: Vec<SourceFailure>) -> Result<(), SourceFailure> {
    match problems.is_empty() {
        true => Ok(()),
        false => Err(problems.remove(0)),
    }
}

async fn make_checkpoint_table(session: &mut Session, settings: &MySqlSettings) -> Result<(), SourceFailure> {
    const ELSEWHERE: &str = "run `outboxd init` once as a user that may create tables, or sql/mysql/checkpoint.sql, and \
                             grant SELECT, INSERT, UPDATE on outboxd_checkpoint; or use --checkpoint kafka or file:PATH";
    if settings.no_create {
        return Err(SourceFailure::NotReady {
            what: "there is no table outboxd_checkpoint, and --no-create forbids making it".to_owned(),
            remedy: ELSEWHERE.to_owned(),
        });
    }
    session.execute(checkpoint::CREATE).await.map_err(|failure| match failure {
        SourceFailure::NotReady { what, .. } => SourceFailure::NotReady { what, remedy: ELSEWHERE.to_owned() },
        other => other,
    })
}

/// Where to go on: from the stored position, or from a newer one that this process confirmed after it was stored.
fn known_position(
    pipeline: &str,
    stored: &Checkpoint,
    server: &Server,
    reach: &server::Reach,
    memory: &Memory,
) -> Result<Known, SourceFailure> {
    let found = judge::position(stored, server)?;
    let mut remembered = memory.remembered();
    if let Some(written) = remembered.stored.as_ref().filter(|written| !found.covers(written))
        && stored.server == server.identity
    {
        // What was committed since under the same numbers would pass for delivered.
        return Err(judge::went_back(pipeline, &found, written));
    }
    // What was confirmed since the checkpoint may not have reached the server that took over (the checkpoint's own
    // transaction is always the last to be read): then the checkpoint is where to go on, and a little comes twice.
    // MariaDB's numbers go on in a domain whoever writes, so there they cannot tell.
    let knows = |newer: &BinlogPosition| {
        stored.server == server.identity || server.flavor == Flavor::MySql && reach.end.covers(newer)
    };
    let position = match &remembered.confirmed {
        Some(newer) if newer.covers(&found) && knows(newer) => newer.clone(),
        _ => found,
    };
    match judge::standing(pipeline, stored, &position, server, reach) {
        Standing::Fits => remembered.behind_since = None,
        Standing::Lost { failure, fillable: true } => return Ok(Known::Lost(failure)),
        Standing::Lost { failure, .. } => return Err(failure),
        Standing::Behind { what } => {
            let since = *remembered.behind_since.get_or_insert_with(Instant::now);
            if since.elapsed() < LAG_PATIENCE {
                return Err(SourceFailure::transient(format!("{what}: waiting for it to catch up")));
            }
            return Err(SourceFailure::PositionLost {
                what: format!(
                    "the position of pipeline `{pipeline}` is lost: {what}, and did not get them in a minute"
                ),
                remedy: "connect to a server that has them, or decide that they are gone and go on with a new --name \
                         and --start"
                    .to_owned(),
            });
        }
    }
    Ok(Known::At(position))
}

/// Where to go on, if there is such a place.
enum Known {
    At(BinlogPosition),
    /// The log no longer has it; the tables may make up for it.
    Lost(SourceFailure),
}

/// A session with the server to read from. Where several are named and the checkpoint is kept in the source, it is the
/// first that can be written: after a fail-over the old primary may be back as a replica.
pub(crate) async fn connect(settings: &MySqlSettings, info: &ConnInfo) -> Result<Session, SourceFailure> {
    if info.hosts.len() == 1 || settings.checkpoint != CheckpointPlace::Source {
        return Session::connect(info).await;
    }
    let mut failures = Vec::new();
    for host in &info.hosts {
        let alone = ConnInfo { hosts: vec![host.clone()], ..info.clone() };
        let tried = async {
            let mut session = Session::connect(&alone).await?;
            Ok((server::is_read_only(&mut session).await?, session))
        };
        match tried.await {
            Ok((false, session)) => return Ok(session),
            Ok((true, session)) => {
                session.close().await;
                failures.push(SourceFailure::transient(format!("{host} is read-only: waiting for its promotion")));
            }
            Err(failure @ SourceFailure::Transient { .. }) => failures.push(failure),
            Err(failure) => return Err(failure),
        }
    }
    Err(wire::summary(failures))
}

/// Where a log is entered for the first time.
async fn first_position(
    settings: &MySqlSettings,
    info: &ConnInfo,
    server: &Server,
    reach: &server::Reach,
) -> Result<BinlogPosition, SourceFailure> {
    let wanted = match &settings.start {
        Start::Now => return Ok(reach.end.clone()),
        Start::Earliest => {
            if server.flavor == Flavor::MySql && server.has_gtids() {
                // Asked by GTID, the server passes over what was logged before it counted them.
                locate::gtids_at(info, server, reach, &reach.first.file).await?;
            }
            return Ok(reach.first.clone());
        }
        Start::At(wanted) if wanted.gtids == Gtids::Off && server.has_gtids() => {
            locate::gtids_at(info, server, reach, &wanted.file).await?
        }
        Start::At(wanted) => wanted.clone(),
    };
    let same_kind = std::mem::discriminant(&wanted.gtids) == std::mem::discriminant(&reach.end.gtids);
    match same_kind {
        // A set without what was purged would ask for it.
        true if wanted.covers(&reach.first) => Ok(wanted),
        true => Err(SourceFailure::PositionLost {
            what: format!("--start {wanted} lies before the beginning of the log, {}", reach.first),
            remedy: "start at `earliest`, or at a position that the log still has".to_owned(),
        }),
        false => Err(SourceFailure::Misconfigured {
            what: format!("--start {wanted} is not a position of this server; it stands at {}", reach.end),
            remedy: "give a position of the same kind, or `now` or `earliest`".to_owned(),
        }),
    }
}

/// The address, with its secrets read anew.
pub fn conninfo(settings: &MySqlSettings) -> Result<ConnInfo, SourceFailure> {
    let url = settings.url.reveal().map_err(|error| SourceFailure::Misconfigured {
        what: error.to_string(),
        remedy: "make the file or variable that holds the source's address readable".to_owned(),
    })?;
    ConnInfo::parse(&url)
}

/// Waits until nobody else holds the pipeline.
pub async fn stand_by(settings: &MySqlSettings, pipeline: &str) -> Result<(), SourceFailure> {
    let info = conninfo(settings)?;
    let mut session = connect(settings, &info).await?;
    keeper::wait_for_lock(&mut session, checkpoint::database(&info)?, pipeline).await?;
    session.close().await;
    Ok(())
}

#[cfg(test)]
mod recorded;
