//! A pipeline from start to end: one generation after the other, each from the confirmed position.
//!
//! Passing trouble is retried with back-off for ever and shown in the status; only what a person must mend ends the
//! pipeline.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::ack_window::{AckWindow, Bells, Limits};
use crate::checkpoint::publishers::{PublisherNotes, Standing};
use crate::config::{Capture, OnLostPosition, PipelineSettings, PublisherSettings};
use crate::dead_letters::census;
use crate::event::Projection;
use crate::failure::{ExitCode, Failure, Halt};
use crate::marks::Marks;
use crate::milestone::Milestone;
use crate::position::Position;
use crate::publisher::{Account, Publisher};
use crate::relay::{Ended, Relay};
use crate::retention;
use crate::route::selection::Selection;
use crate::route::{Plans, Router};
use crate::sink::kafka::transactions::Reached;
use crate::sink::{Owner, Sink};
use crate::source::backfill;
use crate::source::mark::Marker;
use crate::source::notes::NoteBook;
use crate::source::{self, Opened, SourceFailure};
use crate::status::{PipelineStatus, State};
use crate::warden::{self, Ward, Warden};

/// Tells every pipeline to stop.
#[derive(Clone)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Stop(receiver))
    }

    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves when stopping was asked for, or nobody is left to ask.
    pub async fn requested(&self) {
        let _ = self.0.clone().wait_for(|stop| *stop).await;
    }
}

/// How often in a row a position may be lost while it is being read, before the server is taken at its word.
const MOST_LOSSES: u32 = 3;
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// Runs a pipeline until it is stopped, has caught up, or cannot go on.
///
/// `all` are the pipelines of the configuration, this one among them: retention asks whoever else reads a table.
pub async fn run(
    settings: &PipelineSettings,
    all: &[PipelineSettings],
    status: &PipelineStatus,
    stop: &Stop,
) -> Result<(), Halt> {
    let ended = tokio::select! {
        ended = generations(settings, all, status, stop) => ended,
        never = census::run(settings, status) => match never {},
    };
    match &ended {
        Ok(()) => status.enter(State::Stopped),
        Err(halt) => {
            status.enter(State::Failed);
            status.failed(&halt.to_string());
        }
    }
    ended
}

async fn generations(
    settings: &PipelineSettings,
    all: &[PipelineSettings],
    status: &PipelineStatus,
    stop: &Stop,
) -> Result<(), Halt> {
    let Plans { projection, publishers, mark } = Plans::compile(settings)?;
    let marks = mark.map(|slot| Arc::new(noted_rows(settings, slot)));
    let mut routes: Vec<_> = publishers.into_iter().map(|(plan, selection)| (Router::new(plan), selection)).collect();
    let memories: Vec<_> = settings.publishers.iter().map(|_| Arc::<warden::Memory>::default()).collect();
    let source_memory = source::Memory::new(settings);
    if let Some((what, _)) = backfill::foresee(settings) {
        tracing::warn!(pipeline = settings.name, "{what}");
    }
    let mut backoff = FIRST_BACKOFF;
    let (mut again, mut losses) = (0u32, 0);
    loop {
        status.enter(State::Starting);
        let events_before = status.events();
        let parts = Parts {
            settings,
            all,
            status,
            projection: &projection,
            memories: &memories,
            source_memory: &source_memory,
            marks: marks.as_ref(),
        };
        let generation = parts.generation(&mut routes, stop);
        let failure = match generation.await {
            // Whether the table can make up for it is found out when the source is opened again.
            Ok(Ended::Lost(halt)) if losses < MOST_LOSSES => {
                losses += 1;
                Failure::Again { what: halt.what }
            }
            Ok(Ended::Lost(halt)) => return Err(halt),
            Ok(Ended::Anew) => continue,
            Ok(Ended::LetGo(report)) => return Err(let_go(settings, report).await),
            Ok(Ended::Stopped | Ended::CaughtUp) => return Ok(()),
            Err(failure) => failure,
        };
        if status.events() > events_before {
            (backoff, again, losses) = (FIRST_BACKOFF, 0, 0);
        }
        let pause = match failure {
            Failure::Halt(halt) => return Err(halt),
            Failure::StandBy { what } if settings.no_standby => {
                return Err(Halt {
                    code: ExitCode::HeldElsewhere,
                    what,
                    remedy: "run without --no-standby to wait for it".to_owned(),
                });
            }
            Failure::StandBy { what } => {
                stand_by(settings, status, stop, &what).await;
                Duration::ZERO
            }
            Failure::Again { what } => {
                status.failed(&what);
                status.metrics.retries.inc();
                tracing::info!(pipeline = settings.name, "reading again from the confirmed position: {what}");
                again += 1;
                // Learning something takes a few turns; more of them is trouble like any other.
                if again <= 5 { Duration::ZERO } else { FIRST_BACKOFF * 2u32.pow((again - 5).min(5)) }
            }
            Failure::Retry { what } => {
                status.enter(State::Retrying);
                status.failed(&what);
                status.metrics.retries.inc();
                let pause = backoff;
                tracing::warn!(pipeline = settings.name, retry_in_ms = pause.as_millis() as u64, "{what}");
                if let Some(report) = kept_too_much(settings).await {
                    return Err(let_go(settings, report).await);
                }
                backoff = (backoff * 2).min(LONGEST_BACKOFF);
                pause
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.requested() => return Ok(()),
        }
    }
}

/// Where rows are noted that are to be marked. There is room for twice what may be under way, so that reading waits for the
/// marks only when they are slower than the sinks.
fn noted_rows(settings: &PipelineSettings, slot: usize) -> Marks {
    let under_way = settings.publishers.iter().map(|publisher| publisher.window.max_events).max().unwrap_or(0);
    let names = match settings.is_lone() {
        true => Vec::new(),
        false => settings.publishers.iter().map(|publisher| publisher.name.clone()).collect(),
    };
    Marks::new(slot, settings.source.tables().len(), (2 * under_way).max(10_000), names)
}

async fn stand_by(settings: &PipelineSettings, status: &PipelineStatus, stop: &Stop, what: &str) {
    if status.state() != State::StandingBy {
        tracing::info!(pipeline = settings.name, "standing by: {what}");
    }
    status.enter(State::StandingBy);
    tokio::select! {
        waited = source::stand_by(settings) => if let Err(failure) = waited {
            status.failed(&failure.to_string());
            tokio::time::sleep(FIRST_BACKOFF).await;
        },
        () = stop.requested() => {}
    }
}

/// Whether a pipeline that cannot even begin keeps more log than it may; if so, the report.
async fn kept_too_much(settings: &PipelineSettings) -> Option<String> {
    let [publisher] = &settings.publishers[..] else { return None };
    let most = publisher.max_retained?;
    // A server that is away keeps nothing that could be counted.
    let kept = source::retained(settings).await.ok().flatten().filter(|kept| *kept > most)?;
    Some(format!(
        "pipeline `{}` cannot begin and keeps {kept} bytes of log, more than --max-retained allows: its position was let go, and \
         what was committed after it is not delivered",
        settings.name
    ))
}

/// The log is more than the server should keep for a pipeline that does not move: its position is given up.
async fn let_go(settings: &PipelineSettings, report: String) -> Halt {
    let freed = match source::let_go(settings).await {
        Ok(()) => "the slot was dropped".to_owned(),
        Err(failure) => format!("the slot could not be dropped: {failure}"),
    };
    Halt {
        code: ExitCode::PositionLost,
        what: format!("{report}; {freed}"),
        remedy:
            "deliver what was missed from the table, remove the pipeline's row from outboxd_checkpoint, and start anew"
                .to_owned(),
    }
}

/// What every generation is made of.
struct Parts<'a> {
    settings: &'a PipelineSettings,
    all: &'a [PipelineSettings],
    status: &'a PipelineStatus,
    projection: &'a Projection,
    memories: &'a [Arc<warden::Memory>],
    source_memory: &'a source::Memory,
    /// Where delivered rows are noted that are to be marked.
    marks: Option<&'a Arc<Marks>>,
}

/// A publisher's sink, before it is known where it stands.
struct Prepared {
    window: Arc<AckWindow>,
    sink: Result<Sink, Failure>,
}

/// How far a publisher's records are in Kafka, for certain.
struct Entered {
    position: Position,
    within: Option<crate::milestone::Within>,
}

/// A source that is open, and what was noted of the publishers.
struct Begun {
    source: Opened,
    notes: PublisherNotes,
    notebook: Option<NoteBook>,
    marker: Option<Marker>,
}

impl Parts<'_> {
    /// One connection to the source, and one sink and one window for each publisher.
    async fn generation(&self, routes: &mut [(Router, Option<Selection>)], stop: &Stop) -> Result<Ended, Failure> {
        let bells = Bells::default();
        // First, so that producers fetch their ids while the source is being opened.
        let mut prepared: Vec<_> = (0..self.settings.publishers.len()).map(|at| self.prepare(at, &bells)).collect();
        let begun = tokio::select! {
            begun = self.begin(&mut prepared) => begun,
            () = stop.requested() => return Ok(Ended::Stopped),
        };
        let Begun { source, notes, notebook, marker } = match begun {
            Ok(begun) => begun,
            Err(failure) => {
                for sink in prepared.into_iter().filter_map(|publisher| publisher.sink.ok()) {
                    sink.abandon().await;
                }
                return Err(failure);
            }
        };
        let entered = tokio::select! {
            entered = self.enter(&mut prepared, &source.start, &source.lineage, &notes) => entered.map_err(Err),
            () = stop.requested() => Err(Ok(Ended::Stopped)),
        };
        let reached = match entered {
            Ok(reached) => reached,
            Err(ended) => {
                source.alarm.abort();
                for sink in prepared.into_iter().filter_map(|publisher| publisher.sink.ok()) {
                    sink.abandon().await;
                }
                return ended;
            }
        };
        self.status.enter(State::Streaming);
        let (settings, status) = (self.settings, self.status);
        let mut warden = Warden {
            settings,
            status,
            wards: Vec::new(),
            bells: bells.clone(),
            notes: notes.of_lineage(&source.lineage, source.begun),
            notebook,
            noted: 0,
            attempts: JoinSet::new(),
            source_memory: self.source_memory,
        };
        let mut publishers = Vec::new();
        let mut troubles = Vec::new();
        for (at, ((prepared, reached), (router, selection))) in
            prepared.into_iter().zip(reached).zip(routes).enumerate()
        {
            let (publisher, memory) = (&settings.publishers[at], &self.memories[at]);
            let note = warden.notes.publishers.get(&publisher.name).cloned().unwrap_or_default();
            let by_table = matches!(settings.capture, Capture::Positions(_));
            if by_table && note.state == Standing::Active {
                // Whoever sets it ACTIVE in the table wants it to be tried again.
                memory.forgive();
            }
            let noted = note.position.as_ref().and_then(|text| source.start.parse_alike(text));
            let of_this_life = note.state != Standing::Failed && !by_table && !source.begun;
            let remembered = memory.passed(&source.lineage).filter(|_| of_this_life);
            // Beside the records there is the truth.
            let (reached, within) = reached.map_or((None, None), |reached| (Some(reached.position), reached.within));
            let remembered = reached.or(remembered);
            let further = match (noted, remembered) {
                (Some(noted), Some(remembered)) if noted.covers(&remembered) => Some(noted),
                (noted, remembered) => remembered.or(noted),
            };
            // What the server has never had is of another history.
            let known = further.filter(|known| source.reaches.covers(known) && !source.start.covers(known));
            let shown = status.publishers[at].clone();
            // One of an event store that takes no part stays where it is, however far the others have come.
            let left_behind = by_table && note.state != Standing::Active;
            let noted_at = note.position.as_ref().and_then(|text| source.start.parse_alike(text));
            let stands = match left_behind {
                true => noted_at.or_else(|| Some(source.start.clone())),
                false => Some(known.clone().unwrap_or_else(|| source.start.clone())),
            };
            let transacts = prepared.sink.as_ref().is_ok_and(Sink::transacts);
            let milestone = stands.clone().filter(|_| transacts).map(Milestone::at);
            let account = Arc::new(Account::new(&publisher.name, prepared.window, bells.clone(), shown, stands));
            let mut out = true;
            let mut sink = None;
            match (note.state, memory.failed(), prepared.sink) {
                (Standing::Active, None, Ok(made)) => (out, sink) = (false, Some(made)),
                (Standing::Active, None, Err(failure)) => troubles.push((at, failure)),
                (standing, failed, made) => {
                    match standing {
                        Standing::Paused => account.status.enter(State::Paused),
                        Standing::Active | Standing::Failed => {
                            let noted = || Halt {
                                code: ExitCode::PositionLost,
                                what: note.reason.clone(),
                                remedy: "deliver what it missed from the table, then resume it".to_owned(),
                            };
                            let halt = failed.unwrap_or_else(|| {
                                // This process has not seen it fail.
                                account.status.metrics.failures.inc();
                                noted()
                            });
                            account.status.enter(State::Failed);
                            account.status.failed(&halt.to_string());
                            memory.fail(halt);
                        }
                    }
                    match standing {
                        Standing::Failed => account.let_go(),
                        Standing::Active | Standing::Paused => account.stop(),
                    }
                    if let Ok(made) = made {
                        made.abandon().await;
                    }
                }
            }
            warden.wards.push(Ward { settings: publisher, memory, account: account.clone(), out, warned_at: 0 });
            publishers.push(Publisher {
                settings: publisher,
                pipeline: &settings.name,
                router,
                selection: selection.as_ref(),
                sink,
                account,
                known,
                picked: Vec::new(),
                ledger: self.source_memory.ledger().map(Arc::as_ref),
                marks: self.marks.map(|marks| (&**marks, at)),
                gone: left_behind,
                milestone,
                within,
                torn: false,
            });
        }
        let taken_out = troubles.into_iter().try_for_each(|(at, failure)| warden.take_out(at, failure));
        if let Err(failure) = taken_out.and_then(|()| warden.whether_any_is_left()) {
            source.alarm.abort();
            return Err(failure);
        }
        if let Some(marks) = self.marks {
            marks.begin_anew(&bells.progress);
        }
        let relay = Relay {
            source,
            publishers,
            marking: self.marks.cloned().zip(marker),
            warden,
            progress: bells.progress,
            status,
            until_caught_up: settings.until_caught_up,
            shutdown_timeout: settings.shutdown_timeout,
        };
        let ended = tokio::select! {
            ended = relay.run(stop) => ended,
            // For as long as this instance leads.
            never = Box::pin(retention::keeper::run(settings, self.all, status)) => match never {},
        };
        match ended {
            Err(Failure::Halt(halt))
                if halt.code == ExitCode::PositionLost && settings.on_lost_position == OnLostPosition::Backfill =>
            {
                Ok(Ended::Lost(halt))
            }
            ended => ended,
        }
    }

    /// Fences off whoever delivered before, where sinks can, and finds out how far that came.
    async fn enter(
        &self,
        prepared: &mut [Prepared],
        start: &Position,
        lineage: &str,
        notes: &PublisherNotes,
    ) -> Result<Vec<Option<Entered>>, Failure> {
        let transacts = prepared.iter().any(|one| one.sink.as_ref().is_ok_and(Sink::transacts));
        if transacts && !start.names_commits() {
            return Err(Failure::Halt(Halt {
                code: ExitCode::SourceNotReady,
                what: "exactly-once needs GTIDs: without them a commit cannot be recognised when it is read again"
                    .to_owned(),
                remedy: "set gtid_mode = ON and enforce_gtid_consistency = ON, or deliver at-least-once".to_owned(),
            }));
        }
        let mut entered = Vec::new();
        for (at, one) in prepared.iter_mut().enumerate() {
            let publisher = &self.settings.publishers[at];
            let note = notes.publishers.get(&publisher.name);
            let active = note.is_none_or(|note| note.state == Standing::Active);
            let reached = match &mut one.sink {
                Ok(sink) if active && sink.transacts() => sink.enter(lineage).await,
                _ => Ok(None),
            };
            let reached = match reached.map_err(Failure::from) {
                Ok(reached) => reached,
                Err(failure) if self.settings.publishers.len() == 1 => return Err(failure),
                Err(failure) => {
                    if let Ok(sink) = std::mem::replace(&mut one.sink, Err(failure)) {
                        sink.abandon().await;
                    }
                    None
                }
            };
            entered.push(reached.and_then(|reached| self.judge(at, reached, start, lineage)).transpose()?);
        }
        Ok(entered)
    }

    /// What a position that was read back means for the source as it was opened.
    fn judge(&self, at: usize, reached: Reached, start: &Position, here: &str) -> Option<Result<Entered, Failure>> {
        let Reached { lineage, position: text, within } = reached;
        let pipeline = &self.settings.name;
        let Some(position) = start.parse_alike(&text) else {
            tracing::warn!(pipeline, position = text, "the position beside the records is of another kind of source");
            return None;
        };
        if start.covers(&position) {
            // A piece of the commit that comes next may still be there.
            return Some(Ok(Entered { position, within }));
        }
        // An event store's publishers go on where each of them is.
        let by_log = matches!(self.settings.capture, Capture::Log);
        let lone = self.settings.publishers.len() == 1;
        if by_log && lone && self.memories[at].sends_on(&text) {
            if self.source_memory.reached(&lineage, &position) {
                let what = format!("everything up to {text} is in Kafka already, and the source stands before it");
                return Some(Err(Failure::Again { what }));
            }
            tracing::warn!(pipeline, lineage, "the position beside the records is of another server's history");
            return None;
        }
        (lineage == here).then_some(Ok(Entered { position, within }))
    }

    fn prepare(&self, at: usize, bells: &Bells) -> Prepared {
        let publisher = &self.settings.publishers[at];
        let limits = Limits { events: publisher.window.max_events, bytes: publisher.window.max_bytes };
        let window = Arc::new(AckWindow::new(limits, bells.clone()));
        let owner = Owner {
            pipeline: &self.settings.name,
            status: &self.status.publishers[at],
            ledger: self.source_memory.ledger(),
            marks: self.marks.map(|marks| (marks, at)),
        };
        // With an event store, whether it may try again is told by its table.
        let by_table = matches!(self.settings.capture, Capture::Positions(_));
        let sink = match self.memories[at].failed().filter(|_| !by_table) {
            // Nobody waits for one that has ended for good.
            Some(halt) => Err(Failure::Halt(halt)),
            None => Sink::create(publisher, &self.memories[at].sink, &window, &owner).map_err(Failure::from),
        };
        Prepared { window, sink }
    }

    /// Waits for the sinks, opens the source, and reads what was noted.
    async fn begin(&self, prepared: &mut [Prepared]) -> Result<Begun, Failure> {
        let settings = self.settings;
        if let ([lone], [publisher]) = (&mut *prepared, &settings.publishers[..]) {
            let Prepared { window, sink } = lone;
            let sink = sink.as_mut().map_err(|failure| failure.clone())?;
            warden::ready(sink, publisher, window).await?;
        } else {
            let each = prepared.iter_mut().zip(&settings.publishers);
            join_all(each.map(|(one, publisher)| one.get_ready(publisher))).await;
        }
        // A lone publisher's trouble ends the opening too; that of one of several is taken up later.
        let trouble = async {
            match &*prepared {
                [lone] => Failure::from(lone.window.failed().await),
                _ => std::future::pending().await,
            }
        };
        let opening = async {
            // Before anything is made or read: what cannot be marked must not be delivered.
            let marker = match (settings.marking(), self.marks) {
                (Some(how), Some(marks)) => Some(Marker::open(settings, how, marks, &self.status.source).await?),
                _ => None,
            };
            let source = source::open(settings, self.projection, self.source_memory, &self.status.source).await?;
            Ok::<_, SourceFailure>((source, marker))
        };
        let (source, marker) = tokio::select! {
            opened = opening => opened?,
            failure = trouble => return Err(failure),
        };
        // Only now: as long as another instance leads, it may still note something.
        match self.notes().await {
            Ok((notes, notebook)) => Ok(Begun { source, notes, notebook, marker }),
            Err(failure) => {
                // Its watch would hold the source on.
                source.alarm.abort();
                Err(failure.into())
            }
        }
    }

    /// What was noted of the publishers; and where more is to be noted, when they have names.
    async fn notes(&self) -> Result<(PublisherNotes, Option<NoteBook>), SourceFailure> {
        // The source has just let us in: a password that changed a moment ago is read anew.
        let passing = |failure: SourceFailure| SourceFailure::Transient { what: failure.to_string() };
        let mut book = NoteBook::open(self.settings, self.source_memory).await.map_err(passing)?;
        let notes = book.load().await?.unwrap_or_default();
        // An event store is read from where its publishers are, so there it is always noted.
        if self.settings.is_lone() && !matches!(self.settings.capture, Capture::Positions(_)) {
            return Ok((notes, None));
        }
        book.prepare().await?;
        Ok((notes, Some(book)))
    }
}

impl Prepared {
    /// Waits for the sink, but not so long that the others suffer.
    async fn get_ready(&mut self, publisher: &PublisherSettings) {
        let Ok(sink) = &mut self.sink else { return };
        let ready = tokio::time::timeout(warden::READY_PATIENCE, warden::ready(sink, publisher, &self.window)).await;
        let window = self.window.clone();
        let late = || match window.failure() {
            Some(failure) => Err(failure.into()),
            None => Err(Failure::Retry { what: "the sink is not ready yet".to_owned() }),
        };
        if let Err(failure) = ready.unwrap_or_else(|_| late())
            && let Ok(sink) = std::mem::replace(&mut self.sink, Err(failure))
        {
            sink.abandon().await;
        }
    }
}
