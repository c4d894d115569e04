//! MongoDB: change streams of the outbox collections.
//!
//! ```text
//!   server ──replies──▶ ChangeStream ──batches──▶ Reader ──chunks──▶ relay
//!                                                                     │
//!   outboxd_checkpoint ◀── keeper task ◀── watch ◀── Confirmer ◀──────┘
//!     lease and position
//! ```
//!
//! The server keeps no position for a reader, so outboxd keeps it itself, behind the acknowledgements, beside the lease
//! that says who runs the pipeline.

mod backfill;
pub(crate) mod change_stream;
pub(crate) mod checkpoint;
pub(crate) mod documents;
pub mod extended_json;
pub(crate) mod judge;
mod keeper;
pub(crate) mod lease;
pub mod preflight;
mod reader;
pub(crate) mod server;
pub(crate) mod server_error;
pub(crate) mod settled;
pub mod setup;
mod snapshot;
pub mod stand;
pub mod token;

pub use reader::Reader;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mongodb::bson::Document;
use mongodb::options::ConnectionString;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::checkpoint::{Checkpoint, FORMAT, SnapshotState};
use crate::config::{MongoSettings, PipelineSettings, Snapshot, Start};
use crate::event::Projection;
use crate::position::Position;
use crate::source::backfill::Fill;
use crate::source::{self, Opened, SourceFailure, SourceStats};
use change_stream::{ChangeStream, Entry, Scope, Watch};
use checkpoint::Place;
use documents::Documents;
use keeper::Keeper;
use lease::{Lease, Renewed, Taking};
use server::{Connection, Server};
use snapshot::SnapshotReader;
use token::{ResumeToken, StartPoint, StreamPosition};

/// What outlives a connection.
pub struct Memory {
    /// What this process calls itself in a lease.
    holder: String,
    remembered: Mutex<Remembered>,
}

#[derive(Default)]
struct Remembered {
    /// The last position confirmed by this process, newer than the stored one.
    confirmed: Option<StreamPosition>,
    /// The last position stored by this process.
    stored: Option<StreamPosition>,
    /// What was committed when the process started ends here.
    caught_up_at: Option<StreamPosition>,
    /// The pipeline had a position when this process last looked.
    positioned: bool,
}

impl Default for Memory {
    fn default() -> Self {
        let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let random = RandomState::new().hash_one(std::time::Instant::now());
        let holder = format!("{}/{}/{random:016x}", host.as_deref().unwrap_or("unknown"), std::process::id());
        Memory { holder, remembered: Mutex::default() }
    }
}

impl Memory {
    /// Remembers what was delivered beyond what is stored.
    pub fn reached(&self, position: &StreamPosition) -> bool {
        self.remembered().confirmed = Some(position.clone());
        true
    }

    fn confirmed(&self) -> Option<StreamPosition> {
        self.remembered().confirmed.clone()
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Confirmer {
    confirmed: watch::Sender<StreamPosition>,
    memory: Arc<Memory>,
    finish_keeper: Option<oneshot::Sender<()>>,
}

impl Confirmer {
    pub fn confirm(&self, upto: &Position) {
        let Position::Mongo(position) = upto else { return };
        self.memory.remembered().confirmed = Some((**position).clone());
        self.confirmed.send_replace((**position).clone());
    }

    /// Stores the last confirmed position and lets the lease go.
    pub async fn finish(mut self, alarm: JoinHandle<Result<(), SourceFailure>>) {
        if let Some(finish) = self.finish_keeper.take() {
            let _ = finish.send(());
            let _ = tokio::time::timeout(Duration::from_secs(3), alarm).await;
        }
    }
}

/// Whether the URL can be understood, without connecting.
pub fn check_url(url: &str) -> Result<(), SourceFailure> {
    // The driver would take a part of the password for a host or an option, and show it.
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let (authority, more) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    if more.contains('@') || authority.matches('@').count() > 1 {
        return Err(SourceFailure::Misconfigured {
            what: "the user or the password has characters that must be percent-encoded".to_owned(),
            remedy: "write @ as %40, / as %2F, ? as %3F, : as %3A and % as %25 in them".to_owned(),
        });
    }
    ConnectionString::parse(url).map(|_| ()).map_err(|error| SourceFailure::Misconfigured {
        what: server_error::message(&error),
        remedy: "it looks like mongodb://user@host1,host2/database?replicaSet=name".to_owned(),
    })
}

/// What is watched, with the URL's database where a collection names none.
pub(crate) fn scope(settings: &MongoSettings, connection: &Connection) -> Scope {
    let database = connection.database.name();
    let namespace = |table: &crate::config::TableName| {
        (table.schema.clone().unwrap_or_else(|| database.to_owned()), table.name.clone())
    };
    Scope::new(settings.tables.iter().map(namespace).collect())
}

fn watch_of(settings: &MongoSettings, connection: &Connection, server: &Server) -> Watch {
    Watch {
        client: connection.client.clone(),
        scope: scope(settings, connection),
        criteria: connection.options.selection_criteria.clone(),
        splits: server.splits_events(),
    }
}

/// Opens the stream: takes the lease, finds the checkpoint, makes what is missing and may be made, and goes on from the
/// confirmed position. Whatever stands in the way is told with its remedy.
pub async fn open(
    settings: &MongoSettings,
    of: &PipelineSettings,
    projection: &Projection,
    memory: &Arc<Memory>,
    stats: &Arc<SourceStats>,
) -> Result<Opened, SourceFailure> {
    let pipeline = of.name.as_str();
    let connection = server::connect(settings).await?;
    let server = Server::ask(&connection).await?;
    if let Some(failure) = judge::server(&server).into_iter().next() {
        return Err(failure);
    }
    stats.has_no_bytes();
    memory.remembered().caught_up_at.get_or_insert_with(|| StreamPosition::end_of(server.now));
    let documents = Documents::new(projection, settings.extended_json);
    let watch = watch_of(settings, &connection, &server);
    let place = Place::open(&settings.checkpoint, &of.kafka)?;
    let taken =
        match lease::take(&connection.database, pipeline, &memory.holder, settings.no_create, lease::TERM).await? {
            Taking::Taken(taken) => taken,
            Taking::Held { holder, positioned } => {
                memory.remembered().positioned |= positioned;
                return Err(lease::held(pipeline, &holder));
            }
        };
    let lineage = checkpoint::identity(server.name(), &taken.document);
    let found = Found { identity: lineage.clone(), document: &taken.document };
    // Finding the place in a long oplog may take longer than the lease.
    let entered = tokio::select! {
        entered = enter(settings, of, &watch, &place, &taken.lease, found, memory) => entered?,
        failure = taken.lease.keep() => return Err(failure),
    };
    let Entered { checkpoint, start, position, stream, pending, fill } = entered;
    if let Some(fill) = &fill {
        fill.begin(&judge::when(start.time), stats);
    }

    let snapshot = pending.then(|| {
        SnapshotReader::new(snapshot::Wanted {
            client: connection.client.clone(),
            scope: watch.scope.clone(),
            criteria: watch.criteria.clone(),
            point_in_time: server.reads_at_a_point_in_time(),
            order: snapshot::order_of(projection),
            only: fill.as_ref().map(|fill| (fill.view().clone(), stats.clone())),
            from: start.time,
            end: start.clone(),
        })
    });
    // Nothing is confirmed before the snapshot is delivered.
    let reported = if pending { StreamPosition::nothing() } else { position.clone() };
    let (confirmed, watched) = watch::channel(reported.clone());
    let (finish_keeper, finished) = oneshot::channel();
    let validity = taken.lease.validity.clone();
    let keeper = Keeper {
        lease: taken.lease,
        place,
        checkpoint,
        confirmed: watched,
        snapshot_end: pending.then(|| start.clone()),
        interval: of.checkpoint_interval,
        stored: StreamPosition { eventful: 0, ..start.clone() },
        stored_at: Instant::now(),
        memory: memory.clone(),
        stats: stats.clone(),
    };
    tracing::info!(
        source = server.address,
        collections = %watch.scope,
        after = %judge::when(start.time),
        server = server.version_text(),
        "reading the change stream"
    );
    let reader = Reader::new(reader::Parts {
        watch,
        // While a snapshot is read nobody asks for more, and the server forgets a cursor after ten minutes.
        stream: (!pending).then_some(stream),
        position,
        documents,
        width: projection.width(),
        snapshot,
        validity,
        lost: judge::Loss { pipeline: pipeline.to_owned(), memory: memory.clone() },
        stall_timeout: of.stall_timeout,
        stats: stats.clone(),
    });
    let caught_up_at = memory.remembered().caught_up_at.clone().unwrap_or(start);
    let alarm = tokio::spawn(keeper.run(finished));
    Ok(Opened {
        reader: source::Reader::Mongo(Box::new(reader)),
        confirmer: source::Confirmer::Mongo(Confirmer {
            confirmed,
            memory: memory.clone(),
            finish_keeper: Some(finish_keeper),
        }),
        start: Position::Mongo(Box::new(reported)),
        caught_up_at: Position::Mongo(Box::new(caught_up_at)),
        reaches: Position::Mongo(Box::new(StreamPosition::end_of(server.now))),
        lineage,
        // Another document has another mark, and with it another lineage.
        begun: fill.is_some(),
        table_first: pending,
        alarm,
    })
}

/// The pipeline's document, and what the server is called by it.
struct Found<'a> {
    identity: String,
    document: &'a Document,
}

/// A stream that is open at the pipeline's position.
struct Entered {
    checkpoint: Checkpoint,
    start: StreamPosition,
    /// As it may be stored.
    position: StreamPosition,
    stream: ChangeStream,
    /// Existing documents come first.
    pending: bool,
    /// Of them only those that are not marked.
    fill: Option<Fill>,
}

/// Finds where the pipeline stands, opens the stream there, and stores the position of a first start.
async fn enter(
    settings: &MongoSettings,
    of: &PipelineSettings,
    watch: &Watch,
    place: &Place,
    lease: &Lease,
    found: Found<'_>,
    memory: &Arc<Memory>,
) -> Result<Entered, SourceFailure> {
    let pipeline = of.name.as_str();
    let stored = place.load(pipeline, found.document).await?;
    memory.remembered().positioned |= stored.is_some();
    let known = match &stored {
        Some(stored) => Some(known_position(stored, &found.identity, place, memory)?),
        None => remembered_position(pipeline, memory)?,
    };
    let mut fill = match &stored {
        Some(stored) if stored.snapshot == SnapshotState::Backfill => Some(Fill::under_way(of)?),
        _ => None,
    };
    let mut pending = match &stored {
        Some(stored) => stored.snapshot.is_under_way(),
        None => known.is_none() && settings.snapshot == Snapshot::Existing,
    };
    if stored.as_ref().is_some_and(|stored| stored.snapshot == SnapshotState::None)
        && settings.snapshot == Snapshot::Existing
    {
        tracing::warn!(pipeline, "--snapshot existing has no effect: the pipeline has a position already");
    }
    let mut start = match known {
        Some(known) => known,
        None => StreamPosition::after(first_position(settings, watch).await?),
    };
    if !pending {
        memory.remembered().confirmed.get_or_insert_with(|| start.clone());
    }
    let mut entry = entry(&start, stored.as_ref(), &watch.scope);
    // Opened before anything is stored or delivered, so that a lost position is known at once.
    let (stream, lost) = match watch.open(&entry).await {
        Ok(stream) => (stream, false),
        Err(SourceFailure::PositionLost { what, .. }) => {
            let lost = judge::Loss { pipeline: pipeline.to_owned(), memory: memory.clone() };
            let lost = lost.report(&watch.client, &start, &what).await;
            fill = Some(backfill::agreed(of, watch, lost).await?);
            start = StreamPosition::after(watch.position(&Entry::Now).await?);
            // Whatever was remembered is of an oplog that is gone.
            *memory.remembered() =
                Remembered { caught_up_at: Some(start.clone()), positioned: true, ..Default::default() };
            (pending, entry) = (true, start.token.clone().map_or(Entry::At(start.time), Entry::After));
            (watch.open(&entry).await?, true)
        }
        Err(failure) => return Err(failure),
    };
    let checkpoint = Checkpoint {
        format: FORMAT,
        pipeline: pipeline.to_owned(),
        source: "mongodb".to_owned(),
        server: found.identity,
        position: start.to_string(),
        file: watch.scope.to_string(),
        snapshot: match (&stored, pending) {
            (_, true) if fill.is_some() => SnapshotState::Backfill,
            (_, true) => SnapshotState::Pending,
            (Some(stored), false) => stored.snapshot,
            (None, false) => SnapshotState::None,
        },
    };
    if stored.is_none() || lost {
        // Before anything is read: a crash from here on goes on from the same place, and redoes the snapshot.
        let renewed = match place {
            Place::Document => lease.renew(Some(&checkpoint)).await?,
            Place::Elsewhere(store) => {
                store.save(&checkpoint).await?;
                Renewed::Held
            }
        };
        if let Renewed::Lost = renewed {
            return Err(lease.lost());
        }
    }
    // Where a time is entered, the token is not of this stream: it must not be stored as if it were.
    let position = match entry {
        Entry::At(_) => StreamPosition { token: None, ..start.clone() },
        _ => start.clone(),
    };
    Ok(Entered { checkpoint, start, position, stream, pending, fill })
}

/// Where to go on: from the stored position, or from a newer one that this process confirmed after it was stored.
fn known_position(
    stored: &Checkpoint,
    identity: &str,
    place: &Place,
    memory: &Memory,
) -> Result<StreamPosition, SourceFailure> {
    let found = judge::position(stored, identity)?;
    let remembered = memory.remembered();
    if let Some(written) = remembered.stored.as_ref().filter(|written| !found.covers(written))
        // Elsewhere a leader that slept may have stored an older one.
        && matches!(place, Place::Document)
    {
        // What was committed since would pass for delivered.
        return Err(judge::went_back(&stored.pipeline, &found, written));
    }
    Ok(match &remembered.confirmed {
        // It is still to be stored, as if something had just been delivered.
        Some(newer) if newer.token.is_some() && newer.covers(&found) => StreamPosition { eventful: 1, ..newer.clone() },
        _ => found,
    })
}

/// Where this process was, when somebody has removed the checkpoint under it: to begin anew would lose what came since.
fn remembered_position(pipeline: &str, memory: &Memory) -> Result<Option<StreamPosition>, SourceFailure> {
    let remembered = memory.remembered();
    match remembered.confirmed.clone().filter(|confirmed| confirmed.token.is_some()) {
        Some(confirmed) => {
            tracing::warn!(
                pipeline,
                after = %judge::when(confirmed.time),
                "the checkpoint is gone: going on from what this process confirmed last"
            );
            Ok(Some(confirmed))
        }
        // A standby does not know where the leader was.
        None if remembered.positioned => Err(judge::removed(pipeline)),
        None => Ok(None),
    }
}

/// How the stream is entered at a known position. A token of an event is found again only where the same is watched;
/// after a change of the collections its time is entered, and what was at that very time may come again.
fn entry(start: &StreamPosition, stored: Option<&Checkpoint>, scope: &Scope) -> Entry {
    let same = stored.is_none_or(|stored| stored.file == scope.to_string());
    match &start.token {
        Some(token) if same => Entry::After(token.clone()),
        _ => Entry::At(start.time),
    }
}

/// Where the stream is entered for the first time.
async fn first_position(settings: &MongoSettings, watch: &Watch) -> Result<ResumeToken, SourceFailure> {
    let mut tries = 0;
    loop {
        let entry = match &settings.start {
            Start::Now => Entry::Now,
            Start::At(StartPoint::After(token)) => Entry::After(token.clone()),
            Start::At(StartPoint::At(time)) => Entry::At(*time),
            Start::Earliest => Entry::At(server::oplog(&watch.client).await?.first),
        };
        match watch.position(&entry).await {
            // The oplog was cut off between the two looks.
            Err(SourceFailure::PositionLost { .. }) if settings.start == Start::Earliest && tries < 5 => tries += 1,
            Err(SourceFailure::PositionLost { what, .. }) => {
                return Err(SourceFailure::PositionLost {
                    what: format!("--start lies before the beginning of the oplog: {what}"),
                    remedy: "start at `earliest`, or at a position that the oplog still has".to_owned(),
                });
            }
            found => return found,
        }
    }
}

/// Waits until nobody else holds the pipeline.
pub async fn stand_by(settings: &MongoSettings, pipeline: &str) -> Result<(), SourceFailure> {
    let connection = server::connect(settings).await?;
    while lease::holder(&connection.database, pipeline).await?.is_some() {
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_wrong_does_not_show_its_password() {
        for url in [
            "mongodb://app:hun?ter2@db/shop",
            "mongodb://app:hu@n/te?r2@db/shop",
            "mongodb://app:hu/nter2@db/shop",
            "mongodb://app:hu@nter2@db/shop",
        ] {
            let refused = check_url(url).unwrap_err();
            let SourceFailure::Misconfigured { what, remedy } = refused else { panic!("{url}: {refused:?}") };
            assert!(!what.contains("hu") && !what.contains("r2") && remedy.contains("%40"), "{url}: {what}");
        }
        for url in ["mongodb://app:hun%3Fter2@a,b:1/shop?replicaSet=rs0", "mongodb+srv://app@db.internal/shop"] {
            assert!(check_url(url).is_ok(), "{url}");
        }
    }
}
