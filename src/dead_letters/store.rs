//! The place of a publisher's letters, whichever it is, for who looks at it from a running outboxd: what is read stays
//! bounded, whatever the place holds.

use thiserror::Error;

use super::letter::Kept;
use super::topic::{Found, TopicLetters};
use super::{Letters, Whose};
use crate::config::{DeadLetter, PublisherSettings};
use crate::route::Headers;
use crate::sink::SinkFailure;
use crate::source::SourceFailure;

pub enum Store {
    Table(Letters),
    Topic(TopicLetters),
}

/// Trouble with the place, on its own side.
#[derive(Debug, Error)]
pub enum StoreFailure {
    #[error("no dead-letter place is set, so that there are no letters")]
    Nowhere,
    #[error(transparent)]
    Source(#[from] SourceFailure),
    #[error(transparent)]
    Sink(#[from] SinkFailure),
}

impl Store {
    pub async fn open(publisher: &PublisherSettings, whose: &Whose) -> Result<Self, StoreFailure> {
        match &publisher.dead_letter {
            DeadLetter::Table(table) => {
                let mut letters = Letters::open(&publisher.source, table).await?;
                letters.prepare(table, true).await?;
                Ok(Store::Table(letters))
            }
            DeadLetter::Topic(topic) => Ok(Store::Topic(TopicLetters::open(&publisher.kafka, topic, whose).await?)),
            DeadLetter::None => Err(StoreFailure::Nowhere),
        }
    }

    pub async fn find(&mut self, whose: &Whose, id: &str) -> Result<Option<Kept>, StoreFailure> {
        Ok(match self {
            Store::Table(letters) => letters.find(whose, id).await?,
            Store::Topic(letters) => letters.find(id).await?,
        })
    }

    /// The last letters, newest last, without their contents. Of a topic as far as they are among the last so many records
    /// of each partition.
    pub async fn newest(&mut self, whose: &Whose, limit: u32) -> Result<Vec<Kept>, StoreFailure> {
        Ok(match self {
            Store::Table(letters) => letters.list(whose, limit).await?,
            Store::Topic(letters) => newest_of(letters, limit).await?,
        })
    }

    /// Remembers that a letter was replayed, where the place can.
    pub async fn mark_replayed(&mut self, id: &str, moment: &str) -> Result<(), StoreFailure> {
        if let Store::Table(letters) = self {
            letters.mark_replayed(id, moment).await?;
        }
        Ok(())
    }
}

async fn newest_of(letters: &TopicLetters, limit: u32) -> Result<Vec<Kept>, SinkFailure> {
    let last = letters
        .spans
        .iter()
        .map(|(partition, span)| (*partition, (span.low.max(span.high.saturating_sub(i64::from(limit))), span.high)));
    let mut reading = letters.read(last.collect())?;
    let mut found: Vec<Found> = Vec::new();
    while let Some(mut one) = reading.next().await? {
        if one.ours {
            (one.kept.letter.value, one.kept.letter.headers) = (None, Headers::default());
            found.push(one);
        }
    }
    found.sort_by_key(|one| (one.millis, one.partition, one.offset));
    let first = found.len().saturating_sub(limit as usize);
    Ok(found.drain(first..).map(|one| one.kept).collect())
}
