//! PostgreSQL: logical replication with the `pgoutput` plugin.
//!
//! ```text
//!   walsender ──frames──▶ Reader ──chunks──▶ relay
//!       ▲                                      │
//!       └── feedback task ◀── Progress ◀── Confirmer
//!                                │
//!   ordinary connection ◀── keeper task: checkpoint row, slot's health, shutdown alarm
//! ```

mod backfill;
mod channel;
pub mod checkpoint;
pub mod conninfo;
mod dial;
mod feedback;
pub mod judge;
mod keeper;
mod messages;
pub mod pgoutput;
pub mod preflight;
mod reader;
pub mod server_error;
pub(crate) mod settled;
pub mod setup;
pub mod slot;
pub(crate) mod snapshot;
pub mod sql;
pub mod stand;
pub mod tables;
mod tls;
pub mod values;
pub mod walsender;

pub use reader::Reader;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::config::{OnLostPosition, PipelineSettings, PostgresSettings, Snapshot, Start};
use crate::event::Projection;
use crate::position::{Lsn, Position};
use crate::source::backfill::Fill;
use crate::source::{self, Opened, SourceFailure, SourceStats};
use checkpoint::{Checkpoint, SnapshotState};
use conninfo::ConnInfo;
use feedback::Progress;
use judge::{Past, refuse};
use keeper::Keeper;
use slot::SlotState;
use snapshot::SnapshotReader;
use sql::SqlSession;
use tables::{Tables, quote};
use walsender::{SystemIdentity, WalsenderConnection};

/// What outlives a connection.
#[derive(Default)]
pub struct Memory {
    /// The highest position ever confirmed by this process.
    confirmed: AtomicU64,
    /// The server that it was confirmed to.
    server: Mutex<Option<SystemIdentity>>,
    /// A wanted column has a type whose binary form is not known.
    text_only: AtomicBool,
    /// What was committed when the process started ends here.
    caught_up_at: AtomicU64,
}

impl Memory {
    fn server(&self) -> MutexGuard<'_, Option<SystemIdentity>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// On another timeline of the same server it is still to be judged whether the position was there.
    pub fn reached(&self, lineage: &str, position: Lsn) -> bool {
        let identity = lineage.split_once('/').and_then(|(system, timeline)| {
            let (system_identifier, timeline) = (system.parse().ok()?, timeline.parse().ok()?);
            Some(SystemIdentity { system_identifier, timeline, wal_position: position })
        });
        let mut server = self.server();
        let same = |now: &SystemIdentity, then: &SystemIdentity| now.system_identifier == then.system_identifier;
        match (*server, identity) {
            (Some(now), Some(then)) if same(&now, &then) => {
                *server = Some(then);
                self.confirmed.fetch_max(position.0, Ordering::AcqRel);
                true
            }
            _ => false,
        }
    }
}

pub struct Confirmer {
    progress: Arc<Progress>,
    memory: Arc<Memory>,
    feedback: JoinHandle<()>,
    finish_keeper: Option<oneshot::Sender<()>>,
}

impl Confirmer {
    pub fn confirm(&self, upto: &Position) {
        let Position::Postgres(lsn) = upto else { return };
        self.memory.confirmed.fetch_max(lsn.0, Ordering::AcqRel);
        self.progress.confirm(*lsn);
    }

    /// Tells the server the last confirmed position and ends the stream.
    pub async fn finish(mut self, reader: &mut Reader, alarm: JoinHandle<Result<(), SourceFailure>>) {
        let deadline = Instant::now() + Duration::from_secs(3);
        if let Some(finish) = self.finish_keeper.take() {
            let _ = finish.send(());
            let _ = tokio::time::timeout_at(deadline, alarm).await;
        }
        self.progress.finish.notify_one();
        let _ = tokio::time::timeout_at(deadline, &mut self.feedback).await;
        reader.drain(deadline).await;
    }
}

impl Drop for Confirmer {
    fn drop(&mut self) {
        self.feedback.abort();
    }
}

/// Opens the stream: finds tables, publication, slot and checkpoint, makes what is missing and may be made, and goes
/// on from the confirmed position. Whatever stands in the way is told with its remedy.
pub async fn open(
    settings: &PostgresSettings,
    of: &PipelineSettings,
    projection: &Projection,
    memory: &Arc<Memory>,
    stats: &Arc<SourceStats>,
) -> Result<Opened, SourceFailure> {
    let (pipeline, stall_timeout) = (of.name.as_str(), of.stall_timeout);
    let info = conninfo(settings)?;
    let session = Arc::new(sql::connect(&info).await?);
    // Both connections must be to one and the same server.
    let info = info.pinned_to(session.host());
    let mut connection = WalsenderConnection::connect(&info).await?;
    let server = connection.identify_system().await?;
    let version = connection.server_version();
    refuse(judge::version(version))?;

    let (tables, missing) = Tables::find(&session, &settings.tables).await?;
    refuse(judge::tables(&missing, &tables, projection))?;
    let has_checkpoints = checkpoint::table_exists(&session).await?;
    refuse(judge::checkpoint_table(has_checkpoints, settings))?;
    if !has_checkpoints {
        checkpoint::create_table(&session).await?;
    }
    let stored = checkpoint::load(&session, pipeline).await?;
    if of.on_lost_position == OnLostPosition::Backfill {
        checkpoint::allow_backfill(&session).await?;
    }
    let mut state = slot::state(&session, &settings.slot, version).await?;
    let loss = judge::lost(pipeline, settings, stored.as_ref(), state.as_ref(), &server);
    let lost = loss.is_some();
    let fill = match loss {
        Some(loss) => Some(backfill::agreed(&session, of, settings, &tables, loss).await?),
        None if stored.as_ref().is_some_and(|stored| stored.snapshot == SnapshotState::Backfill) => {
            Some(Fill::under_way(of)?)
        }
        None => None,
    };
    let known = *memory.server();
    if let Some(known) = known {
        let past = Past {
            confirmed: Lsn(memory.confirmed.load(Ordering::Acquire)),
            server: known,
            left_at: connection.left_timeline(known.timeline, server.timeline).await?,
        };
        let in_recovery = connection.parameter("in_hot_standby") == Some("on");
        refuse(judge::rewound(pipeline, &past, stored.as_ref(), state.as_ref(), &server, in_recovery))?;
    }
    let state_before = state.clone();
    if lost {
        state = None;
    }
    refuse(judge::slot(settings, state.as_ref(), info.dbname()))?;
    let publication = slot::publication(&session, &settings.publication, &tables.catalog).await?;
    let slot_exists = state.is_some();
    refuse(judge::publication(settings, publication.as_ref(), &tables.catalog, projection, slot_exists))?;
    if publication.is_none() {
        setup::make_publication(&session, &settings.publication, &tables.catalog).await?;
    }

    let target = current_position(&session).await?;
    let _ = memory.caught_up_at.compare_exchange(0, target.0, Ordering::AcqRel, Ordering::Acquire);

    let mut checkpoint = stored.clone().unwrap_or_else(|| Checkpoint {
        system_identifier: server.system_identifier,
        timeline: server.timeline,
        slot: settings.slot.clone(),
        position: Lsn::ZERO,
        snapshot: if settings.snapshot == Snapshot::Existing { SnapshotState::Pending } else { SnapshotState::None },
        updated_at: String::new(),
    });
    (checkpoint.timeline, checkpoint.slot) = (server.timeline, settings.slot.clone());
    if lost {
        // From here on a crash goes on with the backfill, however much of it was done.
        backfill::begin(&session, pipeline, settings, &mut checkpoint).await?;
    }
    let with_snapshot = checkpoint.snapshot.is_under_way();
    if stored.is_none() && with_snapshot {
        // Remembered before the slot exists: a crash from here on makes the snapshot be redone.
        checkpoint::store(&session, pipeline, &checkpoint).await?;
    }
    let (start, exported) = match &state {
        Some(state) => (start_position(settings, &checkpoint, state, memory)?, None),
        None => {
            let created = slot::create(&mut connection, &settings.slot, with_snapshot).await?;
            (created.consistent_point, created.snapshot)
        }
    };
    if lost {
        backfill::made(&session, settings).await?;
    }
    let snapshot = match with_snapshot {
        true => {
            let session = sql::connect(&info).await?;
            let only = fill.as_ref().map(|fill| (fill.view().clone(), stats.clone()));
            let catalog = tables.catalog.clone();
            Some(SnapshotReader::begin(session, exported.as_deref(), catalog, start, only).await?)
        }
        false => None,
    };
    checkpoint.position = start.max(checkpoint.position);
    if stored.is_none() && !with_snapshot {
        checkpoint::store(&session, pipeline, &checkpoint).await?;
    }

    let binary = !memory.text_only.load(Ordering::Acquire) && tables.binary_is_known(projection);
    let command = start_command(settings, start, binary);
    let stream = connection.start_replication(&command).await.map_err(|failure| match failure {
        // The slot's log may have gone between our look and now; the next look finds it so.
        SourceFailure::PositionLost { what, .. } if of.on_lost_position == OnLostPosition::Backfill => {
            SourceFailure::Transient { what }
        }
        SourceFailure::PositionLost { what, .. } => SourceFailure::PositionLost {
            what: slot::gap_report(pipeline, &what, stored.as_ref(), state_before.as_ref(), &server),
            remedy: judge::lost_remedy(pipeline, Some(&settings.slot)),
        },
        other => other,
    })?;
    *memory.server() = Some(server);
    if let Some(fill) = &fill {
        fill.begin(&start.to_string(), stats);
    }
    let address = info.describe();
    tracing::info!(source = address, slot = settings.slot, from = %start, binary, "reading the log");

    let progress_start = if with_snapshot { Lsn::ZERO } else { start };
    let progress = Arc::new(Progress::default());
    // Nothing is confirmed before the snapshot is delivered; the last chunk of it ends at `start`.
    progress.confirmed.store(progress_start.0, Ordering::Release);
    progress.received.store(start.0, Ordering::Release);
    let beat = feedback_beat(&session, stall_timeout).await?;
    let feedback = tokio::spawn(feedback::run(stream.writer, progress.clone(), beat));
    let (finish_keeper, finished) = oneshot::channel();
    let keeper = Keeper {
        session: session.clone(),
        pipeline: pipeline.to_owned(),
        slot: settings.slot.clone(),
        version,
        checkpoint,
        snapshot_end: with_snapshot.then_some(start),
        progress: progress.clone(),
        stats: stats.clone(),
        interval: of.checkpoint_interval,
        warned: false,
    };
    let alarm = tokio::spawn(keeper.run(finished));
    let reader = Reader::new(reader::Parts {
        stream: stream.reader,
        buffered: stream.buffered,
        projection: projection.clone(),
        tables,
        prefixes: settings.message_prefixes.clone(),
        binary,
        snapshot,
        progress: progress.clone(),
        stats: stats.clone(),
        memory: memory.clone(),
        stall_timeout,
        address,
        marking: of.mark,
    });
    let confirmer = Confirmer { progress, memory: memory.clone(), feedback, finish_keeper: Some(finish_keeper) };
    let caught_up_at = Position::Postgres(Lsn(memory.caught_up_at.load(Ordering::Acquire)).max(start));
    Ok(Opened {
        reader: source::Reader::Postgres(Box::new(reader)),
        confirmer: source::Confirmer::Postgres(confirmer),
        start: Position::Postgres(progress_start),
        caught_up_at,
        reaches: Position::Postgres(target.max(start)),
        lineage: format!("{}/{}", server.system_identifier, server.timeline),
        begun: stored.is_none() || fill.is_some(),
        table_first: with_snapshot,
        alarm,
    })
}

/// The address, with its secrets read anew.
pub fn conninfo(settings: &PostgresSettings) -> Result<ConnInfo, SourceFailure> {
    let url = settings.url.reveal().map_err(|error| SourceFailure::Misconfigured {
        what: error.to_string(),
        remedy: "make the file or variable that holds the source's address readable".to_owned(),
    })?;
    ConnInfo::parse(&url)
}

/// Waits, on an ordinary connection only, until no other client reads the slot.
pub async fn stand_by(settings: &PostgresSettings) -> Result<(), SourceFailure> {
    let session = sql::connect(&conninfo(settings)?).await?;
    loop {
        let held = session
            .query_opt(
                "SELECT active_pid IS NOT NULL FROM pg_catalog.pg_replication_slots WHERE slot_name = $1",
                &[&settings.slot],
            )
            .await
            .map_err(|error| server_error::classify_sql(&error, "watching the slot"))?;
        if !held.is_some_and(|row| row.get(0)) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

fn start_command(settings: &PostgresSettings, start: Lsn, binary: bool) -> String {
    let publication = quote(&settings.publication).replace('\'', "''");
    let mut options = vec!["proto_version '1'".to_owned(), format!("publication_names '{publication}'")];
    if binary {
        options.push("binary 'true'".to_owned());
    }
    if !settings.message_prefixes.is_empty() {
        options.push("messages 'true'".to_owned());
    }
    format!("START_REPLICATION SLOT {} LOGICAL {start} ({})", quote(&settings.slot), options.join(", "))
}

/// Often enough for the server not to time us out, and for a silent one to be noticed.
async fn feedback_beat(session: &SqlSession, stall_timeout: Duration) -> Result<Duration, SourceFailure> {
    let row = session
        .query_one("SELECT setting::bigint FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'", &[])
        .await
        .map_err(|error| server_error::classify_sql(&error, "reading wal_sender_timeout"))?;
    let millis = u64::try_from(row.get::<_, i64>(0)).unwrap_or(0);
    let patience = if millis == 0 { Duration::from_secs(60) } else { Duration::from_millis(millis) };
    Ok(Duration::from_secs(1).min(patience / 2).min(stall_timeout / 3).max(Duration::from_millis(50)))
}

async fn current_position(session: &SqlSession) -> Result<Lsn, SourceFailure> {
    let statement = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                                 ELSE pg_current_wal_insert_lsn() END::text";
    let row = session
        .query_one(statement, &[])
        .await
        .map_err(|error| server_error::classify_sql(&error, "asking for the log's end"))?;
    Ok(row.get::<_, String>(0).parse().unwrap_or_default())
}

/// What the slot keeps; nothing when there is none, or somebody else reads it.
pub async fn retained(settings: &PostgresSettings) -> Result<Option<u64>, SourceFailure> {
    let session = sql::connect(&conninfo(settings)?).await?;
    let state = slot::state(&session, &settings.slot, session.server_version()).await?;
    Ok(state.filter(|state| state.active_pid.is_none()).map(|state| state.retained_bytes()))
}

/// Drops the slot, as soon as nobody reads it.
pub async fn let_go(settings: &PostgresSettings) -> Result<(), SourceFailure> {
    let session = sql::connect(&conninfo(settings)?).await?;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let dropped = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1";
        match session.execute(dropped, &[&settings.slot]).await {
            Ok(_) => return Ok(()),
            // The walsender of the stream that has just ended.
            Err(error)
                if error.code() == Some(&tokio_postgres::error::SqlState::OBJECT_IN_USE)
                    && Instant::now() < deadline =>
            {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(server_error::classify_sql(&error, "dropping the slot")),
        }
    }
}

/// Where to go on: never before what was confirmed, which may be ahead of the slot after a crash of the server.
fn start_position(
    settings: &PostgresSettings,
    checkpoint: &Checkpoint,
    state: &SlotState,
    memory: &Memory,
) -> Result<Lsn, SourceFailure> {
    let slot = state.confirmed.unwrap_or_default();
    let known = slot.max(checkpoint.position).max(Lsn(memory.confirmed.load(Ordering::Acquire)));
    match &settings.start {
        Start::At(wanted) if checkpoint.position == Lsn::ZERO => {
            if *wanted < slot {
                return Err(SourceFailure::NotReady {
                    what: format!("--start {wanted} lies before the slot's own position {slot}"),
                    remedy: "the log before a slot's position is not kept for it: start at or after it".to_owned(),
                });
            }
            Ok(*wanted)
        }
        _ => Ok(known),
    }
}
