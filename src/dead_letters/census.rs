//! How many letters wait for a person, counted where they are: what this process has written says nothing of letters of
//! before its start, nor of those that were replayed or purged since.
//!
//! Counted every minute, and soon after this process has written one, on a connection of the moment: nothing is held
//! open for a number that people look at now and then.

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use super::topic::TopicLetters;
use super::{Letters, Whose};
use crate::config::{DeadLetter, PipelineSettings, PublisherSettings};
use crate::failure::Failure;
use crate::status::{PipelineStatus, PublisherStatus, State};

const LOOK: Duration = Duration::from_secs(1);
const EVERY: Duration = Duration::from_secs(60);
/// However many letters are written, there is no count more often than this.
const PAUSE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);
/// Counting ends here.
const MOST: u32 = 100_000;

/// Counts as long as the pipeline runs.
pub async fn run(settings: &PipelineSettings, status: &PipelineStatus) -> Infallible {
    let kept = |(publisher, _): &(&PublisherSettings, _)| publisher.dead_letter != DeadLetter::None;
    let pairs = settings.publishers.iter().zip(&status.publishers).filter(kept);
    let mut places: Vec<_> =
        pairs.map(|(publisher, status)| Place { publisher, status, counted: None, written: 0 }).collect();
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        // Only the one that leads, so that letters are not counted once for each instance.
        let leads = matches!(status.state(), State::Streaming | State::Paused | State::Retrying);
        for place in &mut places {
            match leads {
                true => place.look(&settings.name).await,
                false => place.forget(),
            }
        }
    }
}

struct Place<'a> {
    publisher: &'a PublisherSettings,
    status: &'a PublisherStatus,
    counted: Option<Instant>,
    /// Letters that this process had written then.
    written: u64,
}

impl Place<'_> {
    async fn look(&mut self, pipeline: &str) {
        let written = self.status.metrics.dead_letters.get();
        let after = if written == self.written { EVERY } else { PAUSE };
        if self.counted.is_some_and(|at| at.elapsed() < after) {
            return;
        }
        let whose = Whose { pipeline: pipeline.to_owned(), publisher: self.publisher.name.clone() };
        (self.counted, self.written) = (Some(Instant::now()), written);
        let counting = Box::pin(count(self.publisher, &whose));
        match tokio::time::timeout(PATIENCE, counting).await {
            Ok(Ok(letters)) => self.status.letters_wait(Some(letters)),
            // The number of before stands. What is the matter with the place shows when a letter is written.
            Ok(Err(failure)) => tracing::debug!(pipeline, "dead letters were not counted: {failure:?}"),
            Err(_) => tracing::debug!(pipeline, "dead letters were not counted in time"),
        }
    }

    fn forget(&mut self) {
        self.counted = None;
        self.status.letters_wait(None);
    }
}

async fn count(publisher: &PublisherSettings, whose: &Whose) -> Result<u64, Failure> {
    Ok(match &publisher.dead_letter {
        DeadLetter::None => 0,
        DeadLetter::Table(table) => Letters::open(&publisher.source, table).await?.waiting(whose, MOST).await?,
        DeadLetter::Topic(topic) => TopicLetters::open(&publisher.kafka, topic, whose).await?.waiting(),
    })
}
