//! Sends letters again, each to where it should have gone, through the publisher's own sink; and says of each only then
//! that it was delivered when its receipt has come.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::letter::{Letter, REPLAYED, rfc3339};
use crate::ack_window::{AckWindow, Bells, Limits, Receipt};
use crate::config::{PipelineSettings, PublisherSettings};
use crate::event::{CommitId, Micros};
use crate::metrics::Metrics;
use crate::route::{Headers, Record};
use crate::sink::{Enqueued, Memory, Owner, Sink, SinkFailure};
use crate::status::PublisherStatus;

/// How long a sink may be away before it is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take in all, with the tries and pauses that the user asked for.
const LONGEST: Duration = Duration::from_secs(900);
/// Learning something of the broker takes a few turns.
const TURNS: usize = 8;

/// What became of a letter.
pub enum Outcome {
    /// At this moment, as the record's header has it.
    Delivered(String),
    Refused(String),
}

pub struct Replayer<'a> {
    pipeline: &'a PipelineSettings,
    publisher: &'a PublisherSettings,
    status: Arc<PublisherStatus>,
    memory: Memory,
    /// Unless it has failed.
    open: Option<(Sink, Arc<AckWindow>)>,
}

impl<'a> Replayer<'a> {
    pub fn new(pipeline: &'a PipelineSettings, publisher: &'a PublisherSettings) -> Option<Self> {
        let statuses = Metrics::default().status(pipeline).publishers;
        let status = statuses.into_iter().find(|status| status.name() == publisher.name)?;
        Some(Replayer { pipeline, publisher, status, memory: Memory::default(), open: None })
    }

    async fn open(&mut self) -> Result<&mut (Sink, Arc<AckWindow>), SinkFailure> {
        let opened = match self.open.take() {
            Some(opened) => opened,
            None => {
                let limits = Limits { events: 1, bytes: 1 };
                let window = Arc::new(AckWindow::new(limits, Bells::default()));
                let owner = Owner { pipeline: &self.pipeline.name, status: &self.status, ledger: None, marks: None };
                let mut sink = Sink::for_replay(self.publisher, &self.memory, &window, &owner)?;
                tokio::select! {
                    ready = sink.ready(&[]) => ready?,
                    failure = window.failed() => return Err(failure),
                }
                (sink, window)
            }
        };
        Ok(self.open.insert(opened))
    }

    /// Gives the sink up; the next letter gets a new one.
    pub async fn close(&mut self) {
        if let Some((sink, _)) = self.open.take() {
            sink.abandon().await;
        }
    }

    /// Sends a letter, and waits until it is acknowledged or refused.
    pub async fn send(&mut self, letter: &Letter) -> Result<Outcome, SinkFailure> {
        let Some(topic) = &letter.topic else {
            let why = "it never became a record: correct the row and insert it anew";
            return Ok(Outcome::Refused(why.to_owned()));
        };
        let moment = rfc3339(Micros::now());
        let mut headers = Headers::default();
        for (name, value) in letter.headers.iter().filter(|(name, _)| *name != REPLAYED) {
            headers.push(name, value);
        }
        headers.push(REPLAYED, Some(moment.as_bytes()));
        let record = Record {
            topic,
            partition: None,
            key: letter.key.as_deref(),
            value: letter.value.as_deref(),
            headers: &headers,
            timestamp_millis: Micros::now().as_millis(),
            commit: CommitId::Snapshot,
            table: Some(letter.source_table.as_str()).filter(|_| self.publisher.route.tables.len() > 1),
            row: None,
        };
        let mut turns = 0;
        loop {
            let failure = match self.attempt(&record).await {
                Ok(None) => return Ok(Outcome::Delivered(moment)),
                Ok(Some(why)) => return Ok(Outcome::Refused(why)),
                Err(failure) => failure,
            };
            self.close().await;
            turns += 1;
            match failure {
                SinkFailure::Undeliverable { what, .. } => return Ok(Outcome::Refused(what)),
                SinkFailure::Restart { .. } if turns < TURNS => {}
                failure => return Err(failure),
            }
        }
    }

    /// Why it was refused, if it was.
    async fn attempt(&mut self, record: &Record<'_>) -> Result<Option<String>, SinkFailure> {
        let status = self.status.clone();
        let (sink, window) = self.open().await?;
        let receipt = window.admit(1, 0).await;
        let refused = match tokio::time::timeout(LONGEST, hand_over(sink, record, receipt)).await {
            Ok(handed) => handed?,
            Err(_) => return Err(silent(&status)),
        };
        window.seal(receipt, usize::from(refused.is_some()), None);
        if refused.is_some() {
            window.watermark().await;
            return Ok(refused);
        }
        sink.hurry();
        tokio::select! {
            _ = window.watermark() => Ok(None),
            failure = window.failed() => Err(failure),
            failure = given_up(&status) => Err(failure),
        }
    }
}

/// Why the sink does not take it, if it does not.
async fn hand_over(sink: &mut Sink, record: &Record<'_>, receipt: Receipt) -> Result<Option<String>, SinkFailure> {
    loop {
        match sink.enqueue(record, receipt)? {
            Enqueued::Queued => return Ok(None),
            Enqueued::Full => tokio::time::sleep(Duration::from_millis(2)).await,
            Enqueued::Suspect => match sink.send_alone(record, receipt).await? {
                Enqueued::Queued => return Ok(None),
                Enqueued::Refused(why) => return Ok(Some(why)),
                _ => {}
            },
            Enqueued::Unprepared => {
                if let Enqueued::Refused(why) = sink.prepare(record.topic).await? {
                    return Ok(Some(format!("topic `{}`: {why}", record.topic)));
                }
            }
            Enqueued::Refused(why) => return Ok(Some(format!("topic `{}`: {why}", record.topic))),
        }
    }
}

/// Waits until the sink has been away for too long.
async fn given_up(status: &PublisherStatus) -> SinkFailure {
    let begin = Instant::now();
    let mut away_since = None;
    while begin.elapsed() < LONGEST {
        tokio::time::sleep(Duration::from_millis(250)).await;
        match status.snapshot().sink_away {
            false => away_since = None,
            true => {
                let since = away_since.get_or_insert_with(Instant::now);
                if since.elapsed() > PATIENCE {
                    break;
                }
            }
        }
    }
    silent(status)
}

fn silent(status: &PublisherStatus) -> SinkFailure {
    let why = status.snapshot().last_error.unwrap_or_else(|| "no acknowledgement came".to_owned());
    SinkFailure::Transient { what: format!("the sink does not take it: {why}") }
}
