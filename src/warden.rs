//! What a generation needs beside its data: trouble of single publishers, orders of people, notes on how far each has
//! come, and an eye on the log that those keep which do not move.
//!
//! Trouble of one publisher never ends the others: it is taken out, tried again on its own, and takes part again in a
//! new generation once it is ready. A lone publisher is its pipeline: its trouble is the generation's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::ack_window::{AckWindow, Bells, Limits};
use crate::checkpoint::publishers::{PublisherNote, PublisherNotes, Standing};
use crate::config::{Capture, DeadLetter, PipelineSettings, PublisherSettings, SourceSettings};
use crate::failure::{Failure, Halt};
use crate::position::Position;
use crate::publisher::Account;
use crate::relay::Ended;
use crate::sink::{self, Owner, Sink};
use crate::source::notes::NoteBook;
use crate::source::{self, SourceFailure};
use crate::status::{Order, PipelineStatus, PublisherStatus, State};

/// How often the log that is kept is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Unacknowledged for this long, a publisher is stuck.
const STUCK: Duration = Duration::from_secs(60);
/// From here on, and at every doubling, it is said how much log a publisher keeps.
const FIRST_WARNING: u64 = 64 << 20;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long a publisher has to get ready, so that the others need not wait for it.
pub const READY_PATIENCE: Duration = Duration::from_secs(10);

/// What outlives a generation of a publisher.
#[derive(Default)]
pub struct Memory {
    pub sink: sink::Memory,
    inner: Mutex<Remembered>,
}

#[derive(Default)]
struct Remembered {
    /// The pause before the last attempt.
    pause: Duration,
    /// Why it has ended for good.
    failed: Option<Halt>,
    /// A history, and how far it had come in it.
    passed: Option<(String, Position)>,
}

impl Memory {
    fn inner(&self) -> MutexGuard<'_, Remembered> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why it has ended for good, if it has.
    pub fn failed(&self) -> Option<Halt> {
        self.inner().failed.clone()
    }

    pub fn fail(&self, halt: Halt) {
        self.inner().failed = Some(halt);
    }

    /// Forgets why it had ended.
    pub fn forgive(&self) {
        self.inner().failed = None;
    }

    /// How far it had come when its last generation ended, in the history that this is of.
    pub fn passed(&self, lineage: &str) -> Option<Position> {
        self.inner().passed.clone().filter(|(of, _)| of == lineage).map(|(_, position)| position)
    }

    fn next_pause(&self) -> Duration {
        let mut inner = self.inner();
        inner.pause = (inner.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        inner.pause
    }
}

/// One publisher, as the warden sees it.
pub struct Ward<'a> {
    pub settings: &'a PublisherSettings,
    pub memory: &'a Arc<Memory>,
    pub account: Arc<Account>,
    /// Its trouble is known.
    pub out: bool,
    pub warned_at: u64,
}

pub struct Warden<'a> {
    pub settings: &'a PipelineSettings,
    pub status: &'a PipelineStatus,
    pub wards: Vec<Ward<'a>>,
    pub bells: Bells,
    pub notes: PublisherNotes,
    /// Open where notes are kept all the time.
    pub notebook: Option<NoteBook>,
    /// Events that were acknowledged when the last notes were written.
    pub noted: usize,
    pub attempts: JoinSet<(usize, Result<(), Failure>)>,
    pub source_memory: &'a source::Memory,
}

impl Warden<'_> {
    /// Runs until the generation has to end.
    pub async fn run(&mut self) -> Result<Ended, Failure> {
        self.show_state();
        let mut write = tokio::time::interval(self.settings.checkpoint_interval);
        let mut look = tokio::time::interval(LOOK);
        write.set_missed_tick_behavior(MissedTickBehavior::Delay);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.troubles()?;
            tokio::select! {
                () = self.bells.trouble.notified() => {}
                Some(attempt) = self.attempts.join_next(), if !self.attempts.is_empty() => {
                    if let Ok((at, outcome)) = attempt && self.attempted(at, outcome)? {
                        return Ok(Ended::Anew);
                    }
                }
                (order, reply) = self.status.next_order() => {
                    if let Some(ended) = self.obey(order, reply).await {
                        return Ok(ended);
                    }
                }
                _ = write.tick(), if self.notebook.is_some() => self.note().await,
                _ = look.tick() => if let Some(ended) = self.look().await? {
                    return Ok(ended);
                },
            }
        }
    }

    /// Remembers how far each has come, for the next generation of this process.
    pub fn remember(&self) {
        for ward in &self.wards {
            let passed = ward.account.passed().position().cloned();
            ward.memory.inner().passed = passed.map(|position| (self.notes.lineage.clone(), position));
        }
    }

    /// Writes the notes once more.
    pub async fn finish(&mut self) {
        if self.notebook.is_some() {
            self.note().await;
        }
    }

    fn is_lone(&self) -> bool {
        self.wards.len() == 1
    }

    /// Takes publishers out whose trouble is new.
    fn troubles(&mut self) -> Result<(), Failure> {
        for at in 0..self.wards.len() {
            if self.wards[at].out {
                continue;
            }
            if let Some(failure) = self.wards[at].account.take_failure() {
                if self.is_lone() {
                    return Err(failure);
                }
                self.take_out(at, failure)?;
            }
        }
        Ok(())
    }

    /// Takes a publisher out of the generation; an error when that was the last.
    pub fn take_out(&mut self, at: usize, failure: Failure) -> Result<(), Failure> {
        let ward = &mut self.wards[at];
        ward.out = true;
        ward.account.stop();
        if ward.account.passed().events > 0 {
            ward.memory.inner().pause = Duration::ZERO;
        }
        let status = &ward.account.status;
        let (pipeline, publisher) = (&self.settings.name, &ward.account.name);
        match failure {
            Failure::Halt(halt) => {
                status.enter(State::Failed);
                status.failed(&halt.to_string());
                status.metrics.failures.inc();
                tracing::error!(pipeline, publisher, code = halt.code as u8, "this publisher has ended: {halt}");
                if matches!(self.settings.capture, Capture::Positions(_)) {
                    // There it stands in the table until somebody sets it ACTIVE again.
                    let position = ward.account.passed().position().map(ToString::to_string);
                    let note = PublisherNote { state: Standing::Failed, position, reason: halt.to_string() };
                    self.notes.publishers.insert(publisher.clone(), note);
                    self.noted = usize::MAX;
                }
                ward.memory.fail(halt);
                self.whether_any_is_left()?;
            }
            Failure::Retry { what } | Failure::Again { what } | Failure::StandBy { what } => {
                let pause = ward.memory.next_pause();
                status.enter(State::Retrying);
                status.failed(&what);
                status.metrics.retries.inc();
                tracing::warn!(pipeline, publisher, retry_in_ms = pause.as_millis() as u64, "{what}");
                let attempt = Attempt {
                    pipeline: self.settings.name.clone(),
                    settings: ward.settings.clone(),
                    memory: ward.memory.clone(),
                    status: status.clone(),
                };
                self.attempts.spawn(async move { (at, attempt.make(pause).await) });
            }
        }
        Ok(())
    }

    /// The worst of what publishers have ended with for good.
    pub fn any_failed(&self) -> Option<Halt> {
        let failed: Vec<_> = self.wards.iter().filter_map(|ward| ward.memory.failed()).collect();
        worst(&failed).cloned()
    }

    /// An error when every publisher has ended for good, with the highest code.
    pub fn whether_any_is_left(&self) -> Result<(), Failure> {
        let failed: Vec<_> = self.wards.iter().filter_map(|ward| ward.memory.failed()).collect();
        match worst(&failed) {
            Some(halt) if failed.len() == self.wards.len() => Err(Failure::Halt(halt.clone())),
            _ => Ok(()),
        }
    }

    /// Whether the publisher can take part again.
    fn attempted(&mut self, at: usize, outcome: Result<(), Failure>) -> Result<bool, Failure> {
        // It may have been paused or let go meanwhile.
        if self.wards[at].account.status.state() != State::Retrying {
            return Ok(false);
        }
        match outcome {
            Ok(()) => {
                tracing::info!(
                    pipeline = self.settings.name,
                    publisher = self.wards[at].account.name,
                    "takes part again"
                );
                Ok(true)
            }
            Err(failure) => self.take_out(at, failure).map(|()| false),
        }
    }

    async fn obey(&mut self, order: Order, reply: oneshot::Sender<Result<(), String>>) -> Option<Ended> {
        let (pause, restart, name) = match &order {
            Order::Pause(name) => (true, false, name.as_deref()),
            Order::Resume(name) => (false, false, name.as_deref()),
            Order::Restart(name) => (false, true, name.as_deref()),
        };
        let meant: Vec<usize> =
            (0..self.wards.len()).filter(|at| name.is_none_or(|name| self.wards[*at].account.name == name)).collect();
        if meant.is_empty() {
            let _ = reply.send(Err(format!("there is no publisher `{}`", name.unwrap_or_default())));
            return None;
        }
        let before = self.notes.clone();
        let mut changed = false;
        let by_table = matches!(self.settings.capture, Capture::Positions(_));
        for at in &meant {
            let ward = &self.wards[*at];
            let note = self.notes.publishers.entry(ward.account.name.clone()).or_default();
            let wanted = if pause { Standing::Paused } else { Standing::Active };
            changed |= !pause && !restart && ward.memory.failed().is_some();
            // A restart leaves who is paused so, and passes over no gap: for that there is resuming.
            if restart && !(by_table && note.state == Standing::Failed) {
                continue;
            }
            // One whose position was let go stays so until it is resumed.
            if note.state == wanted || (pause && note.state == Standing::Failed) {
                continue;
            }
            changed = true;
            if note.state == Standing::Failed && by_table {
                note.reason.clear();
            } else if note.state == Standing::Failed {
                let from = note.position.take().unwrap_or_default();
                let publisher = &ward.account.name;
                tracing::warn!(
                    publisher,
                    from,
                    "resumed where the others stand: nothing between is delivered to this publisher"
                );
                note.reason.clear();
            }
            note.state = wanted;
        }
        if !changed {
            if restart {
                self.forgive(&meant, by_table);
            }
            let _ = reply.send(Ok(()));
            return restart.then_some(Ended::Anew);
        }
        self.take_stock();
        if let Err(failure) = self.write().await {
            self.notes = before;
            let _ = reply.send(Err(format!("it could not be noted, so nothing was changed: {failure}")));
            return None;
        }
        if !pause {
            self.forgive(&meant, by_table || !restart);
        }
        if pause {
            for at in meant {
                let ward = &mut self.wards[at];
                if ward.account.is_let_go() {
                    continue;
                }
                ward.out = true;
                ward.account.stop();
                ward.account.status.enter(State::Paused);
                tracing::info!(pipeline = self.settings.name, publisher = ward.account.name, "paused");
            }
            self.show_state();
        }
        let _ = reply.send(Ok(()));
        (!pause).then_some(Ended::Anew)
    }

    /// Lets them be tried again, those too whose position was let go if these are meant.
    fn forgive(&self, meant: &[usize], let_go_too: bool) {
        let ended = |ward: &&Ward<'_>| let_go_too || !ward.account.is_let_go();
        meant.iter().map(|at| &self.wards[*at]).filter(ended).for_each(|ward| ward.memory.forgive());
    }

    /// A pipeline whose publishers are all paused is paused.
    fn show_state(&self) {
        let all = self.wards.iter().all(|ward| ward.account.status.state() == State::Paused);
        self.status.enter_alone(if all { State::Paused } else { State::Streaming });
    }

    /// Notes how far each has come, if it has.
    async fn note(&mut self) {
        let events = self.wards.iter().map(|ward| ward.account.passed().events).sum();
        if events == self.noted {
            return;
        }
        self.take_stock();
        match self.write().await {
            Ok(()) => self.noted = events,
            Err(failure) => {
                tracing::warn!(
                    pipeline = self.settings.name,
                    "how far each publisher has come was not noted: {failure}"
                );
            }
        }
    }

    fn take_stock(&mut self) {
        for ward in &self.wards {
            let note = self.notes.publishers.entry(ward.account.name.clone()).or_default();
            if note.state != Standing::Failed
                && let Some(position) = ward.account.passed().position()
            {
                note.position = Some(position.to_string());
            }
        }
    }

    async fn write(&mut self) -> Result<(), SourceFailure> {
        if let Some(book) = &mut self.notebook
            && book.save(&self.notes).await.is_ok()
        {
            return Ok(());
        }
        // There is none yet, or its connection is gone.
        let mut book = NoteBook::open(self.settings, self.source_memory).await?;
        book.prepare().await?;
        book.save(&self.notes).await?;
        if self.notebook.is_some() {
            self.notebook = Some(book);
        }
        Ok(())
    }

    /// Looks how much log those keep that do not move.
    async fn look(&mut self) -> Result<Option<Ended>, Failure> {
        let server = self.status.source.server_position.load(Ordering::Relaxed);
        for at in 0..self.wards.len() {
            let ward = &mut self.wards[at];
            let shown = ward.account.status.snapshot();
            let stuck = shown.in_flight > 0 && shown.idle_for > STUCK;
            if !(ward.account.is_stopped() || stuck) || ward.account.is_let_go() {
                ward.warned_at = 0;
                continue;
            }
            // While existing rows are delivered there is no position yet, and the server knows better what it keeps.
            let lsn = ward.account.passed().position().map_or(0, Position::as_gauge);
            let retained = self.status.source.retained_bytes.load(Ordering::Relaxed);
            let kept = self.status.source.lag_bytes(server.saturating_sub(lsn)).unwrap_or(0).min(retained);
            let state = if stuck { "stuck" } else { shown.state.as_str() };
            if kept >= FIRST_WARNING.max(ward.warned_at * 2) {
                ward.warned_at = kept;
                tracing::warn!(
                    pipeline = self.settings.name,
                    publisher = ward.account.name,
                    bytes = kept,
                    "this publisher is {state}; {}",
                    match self.settings.source {
                        SourceSettings::Postgres(_) => "it keeps the server from recycling its log",
                        _ => "the server recycles its log by its own rules, and what is recycled is lost to it",
                    }
                );
            }
            if ward.settings.max_retained.is_some_and(|most| kept > most)
                && let Some(ended) = self.let_go(at, kept, state).await?
            {
                return Ok(Some(ended));
            }
        }
        Ok(None)
    }

    /// Gives a publisher's position up, so that the server's disk does not fill.
    async fn let_go(&mut self, at: usize, kept: u64, state: &str) -> Result<Option<Ended>, Failure> {
        let ward = &mut self.wards[at];
        let from = ward.account.passed().position().map(ToString::to_string).unwrap_or_default();
        let report = format!(
            "publisher `{}` was {state} and kept {kept} bytes of log, more than --max-retained allows: its position {from} \
             was let go, and what was committed after it is not delivered to it",
            ward.account.name
        );
        let remedy = "deliver what it missed from the table, then resume it: it goes on where the others stand";
        let halt =
            Halt { code: crate::failure::ExitCode::PositionLost, what: report.clone(), remedy: remedy.to_owned() };
        let name = ward.account.name.clone();
        if self.is_lone() {
            return Ok(Some(Ended::LetGo(report)));
        }
        let note = PublisherNote { state: Standing::Failed, position: Some(from), reason: report.clone() };
        let before = self.notes.publishers.insert(name.clone(), note);
        if let Err(failure) = self.write().await {
            // A gap that is not noted would be silent after a restart. The next look tries again.
            self.notes.publishers.insert(name, before.unwrap_or_default());
            tracing::warn!(pipeline = self.settings.name, "a position is to be let go and cannot be noted: {failure}");
            return Ok(None);
        }
        let ward = &mut self.wards[at];
        ward.out = true;
        ward.account.let_go();
        ward.account.status.enter(State::Failed);
        ward.account.status.failed(&halt.to_string());
        ward.account.status.metrics.failures.inc();
        tracing::error!(pipeline = self.settings.name, publisher = ward.account.name, "{halt}");
        ward.memory.fail(halt);
        if self.wards.iter().all(|ward| ward.account.is_let_go()) {
            return Ok(Some(Ended::LetGo(report)));
        }
        self.whether_any_is_left().map(|()| None)
    }
}

fn worst(halts: &[Halt]) -> Option<&Halt> {
    halts.iter().max_by_key(|halt| halt.code)
}

/// An attempt to reach a publisher's sink again.
struct Attempt {
    pipeline: String,
    settings: PublisherSettings,
    memory: Arc<Memory>,
    status: Arc<PublisherStatus>,
}

impl Attempt {
    /// Waits, and finds out whether the sink is ready.
    async fn make(self, pause: Duration) -> Result<(), Failure> {
        tokio::time::sleep(pause).await;
        let window = Arc::new(AckWindow::new(Limits { events: 1, bytes: 1 }, Bells::default()));
        let owner = Owner { pipeline: &self.pipeline, status: &self.status, ledger: None };
        let mut sink = Sink::create(&self.settings, &self.memory.sink, &window, &owner)?;
        let ready = ready(&mut sink, &self.settings, &window).await;
        sink.abandon().await;
        ready
    }
}

/// Waits for the sink, and for the topics that are known beforehand.
pub async fn ready(sink: &mut Sink, settings: &PublisherSettings, window: &AckWindow) -> Result<(), Failure> {
    let mut topics: Vec<&str> = Vec::new();
    if let Some(topic) = settings.route.topic.as_deref().filter(|topic| !topic.contains('{')) {
        topics.push(topic);
    }
    if let DeadLetter::Topic(topic) = &settings.dead_letter {
        topics.push(topic);
    }
    tokio::select! {
        ready = sink.ready(&topics) => ready.map_err(Failure::from),
        failure = window.failed() => Err(failure.into()),
    }
}
