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
use crate::config::{Capture, PipelineSettings, PublisherSettings};
use crate::event::Projection;
use crate::failure::{ExitCode, Failure, Halt};
use crate::publisher::{Account, Publisher};
use crate::relay::{Ended, Relay};
use crate::route::selection::Selection;
use crate::route::{Plans, Router};
use crate::sink::{Owner, Sink};
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

    /// Resolves when stopping was asked for, or nobody is left to ask.
    pub async fn requested(&self) {
        let _ = self.0.clone().wait_for(|stop| *stop).await;
    }
}

const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// Runs a pipeline until it is stopped, has caught up, or cannot go on.
pub async fn run(settings: &PipelineSettings, status: &PipelineStatus, stop: &Stop) -> Result<(), Halt> {
    let ended = generations(settings, status, stop).await;
    match &ended {
        Ok(()) => status.enter(State::Stopped),
        Err(halt) => {
            status.enter(State::Failed);
            status.failed(&halt.to_string());
        }
    }
    ended
}

async fn generations(settings: &PipelineSettings, status: &PipelineStatus, stop: &Stop) -> Result<(), Halt> {
    let Plans { projection, publishers } = Plans::compile(settings)?;
    let mut routes: Vec<_> = publishers.into_iter().map(|(plan, selection)| (Router::new(plan), selection)).collect();
    let memories: Vec<_> = settings.publishers.iter().map(|_| Arc::<warden::Memory>::default()).collect();
    let source_memory = source::Memory::new(settings);
    let mut backoff = FIRST_BACKOFF;
    let mut again = 0u32;
    loop {
        status.enter(State::Starting);
        let events_before = status.events();
        let parts =
            Parts { settings, status, projection: &projection, memories: &memories, source_memory: &source_memory };
        let generation = parts.generation(&mut routes, stop);
        let failure = match generation.await {
            Ok(Ended::Anew) => continue,
            Ok(Ended::LetGo(report)) => return Err(let_go(settings, report).await),
            Ok(Ended::Stopped | Ended::CaughtUp) => return Ok(()),
            Err(failure) => failure,
        };
        if status.events() > events_before {
            (backoff, again) = (FIRST_BACKOFF, 0);
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
            () = status.told_again() => {}
            () = stop.requested() => return Ok(()),
        }
    }
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
    status: &'a PipelineStatus,
    projection: &'a Projection,
    memories: &'a [Arc<warden::Memory>],
    source_memory: &'a source::Memory,
}

/// A publisher's sink, before it is known where it stands.
struct Prepared {
    window: Arc<AckWindow>,
    sink: Result<Sink, Failure>,
}

/// A source that is open, and what was noted of the publishers.
struct Begun {
    source: Opened,
    notes: PublisherNotes,
    notebook: Option<NoteBook>,
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
            () = self.status.told_again() => {
                abandon(prepared).await;
                return Ok(Ended::Anew);
            }
        };
        let Begun { source, notes, notebook } = match begun {
            Ok(begun) => begun,
            Err(failure) => {
                abandon(prepared).await;
                return Err(failure);
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
        for (at, (prepared, (router, selection))) in prepared.into_iter().zip(routes).enumerate() {
            let (publisher, memory) = (&settings.publishers[at], &self.memories[at]);
            let note = warden.notes.publishers.get(&publisher.name).cloned().unwrap_or_default();
            let by_table = matches!(settings.capture, Capture::Positions(_));
            if by_table && note.state == Standing::Active {
                // Whoever sets it ACTIVE in the table wants it to be tried again.
                memory.forgive();
            }
            let noted = note.position.as_ref().and_then(|text| source.start.parse_alike(text));
            let remembered = memory.passed(&source.lineage).filter(|_| note.state != Standing::Failed && !by_table);
            let further = match (noted, remembered) {
                (Some(noted), Some(remembered)) if noted.covers(&remembered) => Some(noted),
                (noted, remembered) => remembered.or(noted),
            };
            // What the server has never had is of another history.
            let known = further.filter(|known| source.reaches.covers(known) && !source.start.covers(known));
            let shown = status.publishers[at].clone();
            if let Some(id) = memory.sink.kafka_cluster() {
                shown.writes_to_cluster(&id);
            }
            // One of an event store that takes no part stays where it is, however far the others have come.
            let left_behind = by_table && note.state != Standing::Active;
            let noted_at = note.position.as_ref().and_then(|text| source.start.parse_alike(text));
            let stands = match left_behind {
                true => noted_at.or_else(|| Some(source.start.clone())),
                false => Some(known.clone().unwrap_or_else(|| source.start.clone())),
            };
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
                gone: left_behind,
            });
        }
        let taken_out = troubles.into_iter().try_for_each(|(at, failure)| warden.take_out(at, failure));
        if let Err(failure) = taken_out.and_then(|()| warden.whether_any_is_left()) {
            source.alarm.abort();
            return Err(failure);
        }
        let relay = Relay {
            source,
            publishers,
            warden,
            progress: bells.progress,
            status,
            until_caught_up: settings.until_caught_up,
            shutdown_timeout: settings.shutdown_timeout,
        };
        relay.run(stop).await
    }

    fn prepare(&self, at: usize, bells: &Bells) -> Prepared {
        let publisher = &self.settings.publishers[at];
        let limits = Limits { events: publisher.window.max_events, bytes: publisher.window.max_bytes };
        let window = Arc::new(AckWindow::new(limits, bells.clone()));
        let owner = Owner {
            pipeline: &self.settings.name,
            status: &self.status.publishers[at],
            ledger: self.source_memory.ledger(),
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
        let source = tokio::select! {
            source = source::open(settings, self.projection, self.source_memory, &self.status.source) => source?,
            failure = trouble => return Err(failure),
        };
        // Only now: as long as another instance leads, it may still note something.
        match self.notes().await {
            Ok((notes, notebook)) => Ok(Begun { source, notes, notebook }),
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

async fn abandon(prepared: Vec<Prepared>) {
    for sink in prepared.into_iter().filter_map(|publisher| publisher.sink.ok()) {
        sink.abandon().await;
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
