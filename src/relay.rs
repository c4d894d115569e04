//! The loop: source → window → route → sink → watermark → confirm.
//!
//! ```text
//!   pump    reader.next ─▶ window.admit ─▶ router.route ─▶ sink.enqueue ─▶ window.seal
//!   follow  window.watermark ─▶ confirmer.confirm
//! ```
//!
//! One generation: it runs until it is told to stop, until it has caught up, or until something fails. Whatever
//! fails, the confirmed position is where the next generation goes on, so nothing here has to be undone.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::ack_window::{AckWindow, Receipt};
use crate::config::DeadLetter;
use crate::event::{Chunk, OutboxEvent};
use crate::failure::{ExitCode, Failure, Halt};
use crate::pipeline::{PipelineStatus, Stop};
use crate::position::Position;
use crate::route::Router;
use crate::sink::{Enqueued, Sink};
use crate::source::{Confirmer, Opened, Reader};

/// Why a generation ended without failing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Stopped,
    CaughtUp,
}

/// One generation's parts.
pub struct Relay<'a> {
    pub source: Opened,
    pub sink: Sink,
    pub window: Arc<AckWindow>,
    pub router: &'a mut Router,
    pub dead_letter: &'a DeadLetter,
    pub status: &'a PipelineStatus,
    pub until_caught_up: bool,
    pub shutdown_timeout: Duration,
}

impl Relay<'_> {
    pub async fn run(self, stop: &Stop) -> Result<Ended, Failure> {
        let Relay { source, mut sink, window, router, dead_letter, status, until_caught_up, shutdown_timeout } = self;
        let Opened { mut reader, confirmer, start, caught_up_at, mut alarm } = source;
        let target = until_caught_up.then_some(&caught_up_at);
        let ended = {
            let mut pump = Pump { router, sink: &mut sink, window: &window, dead_letter, status };
            tokio::select! {
                failure = pump.run(&mut reader) => Err(failure),
                () = follow(&window, &confirmer, start, target, status) => Ok(Ended::CaughtUp),
                failure = window.failed() => Err(failure.into()),
                raised = &mut alarm => Err(alarm_failure(raised)),
                () = stop.requested() => Ok(Ended::Stopped),
            }
        };
        // An event that cannot be delivered ends the pipeline, and so does a log that no longer has what follows; but what
        // was read before is still seen through.
        let orderly = match &ended {
            Ok(_) => true,
            Err(Failure::Halt(halt)) => matches!(halt.code, ExitCode::Undeliverable | ExitCode::PositionLost),
            Err(_) => false,
        };
        if orderly && !matches!(ended, Ok(Ended::CaughtUp)) {
            drain(&window, &confirmer, &mut sink, status, shutdown_timeout).await;
        } else {
            // What was acknowledged meanwhile need not be repeated.
            advance(&window, &confirmer, status);
        }
        if !orderly {
            // Unasked, the server must not wait for our goodbye: it may be shutting down.
            alarm.abort();
            sink.abandon().await;
            return ended;
        }
        // Before another instance is let in: what is still queued must not come after what it delivers.
        sink.abandon().await;
        advance(&window, &confirmer, status);
        if !alarm.is_finished() {
            confirmer.finish(reader, alarm).await;
        }
        ended
    }
}

fn alarm_failure(raised: Result<Result<(), crate::source::SourceFailure>, tokio::task::JoinError>) -> Failure {
    match raised {
        Ok(Err(failure)) => failure.into(),
        Ok(Ok(())) => Failure::Retry { what: "the source's watch ended".to_owned() },
        Err(died) => Failure::Retry { what: format!("the source's watch died: {died}") },
    }
}

/// Confirms what has finished; ends when the target is reached.
async fn follow(
    window: &AckWindow,
    confirmer: &Confirmer,
    start: Position,
    target: Option<&Position>,
    status: &PipelineStatus,
) {
    let reached = |position: &Position| target.is_some_and(|target| position.covers(target));
    status.confirmed(&start);
    if reached(&start) {
        return;
    }
    loop {
        let advanced = window.watermark().await;
        status.advanced(&advanced);
        if let Some(end) = advanced.end {
            confirmer.confirm(&end.position);
            if reached(&end.position) {
                return;
            }
        }
    }
}

fn advance(window: &AckWindow, confirmer: &Confirmer, status: &PipelineStatus) {
    if let Some(advanced) = window.advance() {
        status.advanced(&advanced);
        if let Some(end) = advanced.end {
            confirmer.confirm(&end.position);
        }
    }
}

/// Waits for what is in flight until the deadline; what is unacknowledged then is not confirmed and comes again.
async fn drain(window: &AckWindow, confirmer: &Confirmer, sink: &mut Sink, status: &PipelineStatus, timeout: Duration) {
    sink.drain(Instant::now() + timeout).await;
    advance(window, confirmer, status);
    if window.in_flight() > 0 {
        let left = window.in_flight();
        tracing::warn!(events = left, "not acknowledged before the shutdown deadline: they will be delivered again");
    }
}

struct Pump<'a> {
    router: &'a mut Router,
    sink: &'a mut Sink,
    window: &'a AckWindow,
    dead_letter: &'a DeadLetter,
    status: &'a PipelineStatus,
}

impl Pump<'_> {
    /// Reads and enqueues until something fails.
    async fn run(&mut self, reader: &mut Reader) -> Failure {
        let mut chunk = Chunk::default();
        loop {
            if let Err(failure) = self.step(reader, &mut chunk).await {
                return failure;
            }
        }
    }

    async fn step(&mut self, reader: &mut Reader, chunk: &mut Chunk) -> Result<(), Failure> {
        reader.next(chunk).await?;
        self.status.read(chunk);
        let receipt = self.window.admit(chunk.events().len(), chunk.weight()).await;
        for event in chunk.events() {
            // The usual way costs neither a future nor an await.
            let queued = match self.router.route(chunk, event) {
                Ok(record) => matches!(self.sink.enqueue(&record, receipt)?, Enqueued::Queued),
                Err(_) => false,
            };
            if !queued {
                self.deliver(chunk, event, receipt).await?;
            }
        }
        self.window.seal(receipt, 0, chunk.end.take());
        if !chunk.catching_up && !chunk.events().is_empty() {
            self.sink.hurry();
        }
        Ok(())
    }

    /// Enqueues one event that could not simply be enqueued, or parks it.
    async fn deliver(&mut self, chunk: &Chunk, event: &OutboxEvent, receipt: Receipt) -> Result<(), Failure> {
        loop {
            let refused = match self.router.route(chunk, event) {
                Err(unroutable) => unroutable.to_string(),
                Ok(record) => match self.sink.enqueue(&record, receipt)? {
                    Enqueued::Queued => return Ok(()),
                    Enqueued::Full => {
                        tokio::time::sleep(Duration::from_millis(2)).await;
                        continue;
                    }
                    Enqueued::Suspect => match self.sink.send_alone(&record, receipt).await? {
                        Enqueued::Queued => return Ok(()),
                        Enqueued::Refused(why) => why,
                        _ => continue,
                    },
                    Enqueued::Unprepared => match self.sink.prepare(record.topic).await? {
                        Enqueued::Refused(why) => format!("topic `{}`: {why}", record.topic),
                        _ => continue,
                    },
                    Enqueued::Refused(why) => format!("topic `{}`: {why}", record.topic),
                },
            };
            return self.park(chunk, event, receipt, &refused).await;
        }
    }

    /// Puts an undeliverable event into the dead-letter place, in its turn, or halts.
    async fn park(&mut self, chunk: &Chunk, event: &OutboxEvent, receipt: Receipt, why: &str) -> Result<(), Failure> {
        let commit = chunk.commit(event).id;
        let halt = |what: String, remedy: &str| {
            Failure::Halt(Halt { code: ExitCode::Undeliverable, what, remedy: remedy.to_owned() })
        };
        let DeadLetter::Topic(topic) = self.dead_letter else {
            let id = self.router.describe(chunk, event);
            return Err(halt(
                format!("the event {id} of the commit at {commit} cannot be delivered: {why}"),
                "remove the cause (create the topic, raise max.message.bytes …), or set --dead-letter topic:NAME",
            ));
        };
        let letter_headers = [("outboxd.reason", why), ("outboxd.pipeline", self.status.name())];
        loop {
            let record = self.router.dead_letter(chunk, event, topic, &letter_headers);
            match self.sink.park(&record, receipt).await? {
                Enqueued::Queued => break,
                Enqueued::Full => tokio::time::sleep(Duration::from_millis(2)).await,
                Enqueued::Suspect => {
                    if matches!(self.sink.send_alone(&record, receipt).await?, Enqueued::Queued) {
                        break;
                    }
                }
                Enqueued::Unprepared => {
                    if let Enqueued::Refused(second) = self.sink.prepare(topic).await? {
                        let what = format!("an event of the commit at {commit} cannot be delivered ({why}) nor parked");
                        return Err(halt(format!("{what}: {second}"), "make the dead-letter topic writable"));
                    }
                }
                Enqueued::Refused(second) => {
                    let what = format!("an event of the commit at {commit} cannot be delivered ({why}) nor parked");
                    return Err(halt(format!("{what}: {second}"), "raise the dead-letter topic's max.message.bytes"));
                }
            }
        }
        self.status.parked();
        tracing::warn!(commit = %commit, topic, "an event was put into the dead-letter topic: {why}");
        Ok(())
    }
}
