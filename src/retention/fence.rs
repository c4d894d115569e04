//! Whether everything up to a place in the log was delivered, by every pipeline that reads the table from its log.
//!
//! ```text
//!   candidates ──▶ P, the end of the log ──▶ every pipeline has passed P ──▶ the candidates are deleted
//! ```
//!
//! Whatever could be seen when the candidates were read was committed before P. So a row that is committed later, however
//! old its timestamp is, is not among them, and all that are among them were delivered. A pipeline that this process leads
//! is asked in memory; of others the stored position counts, with a look at the log behind it, since it may hold nothing
//! more for them.

use std::time::Duration;

use tokio::time::Instant;

use crate::config::PipelineSettings;
use crate::event::Projection;
use crate::position::Position;
use crate::source::{self, Settled, SourceFailure};
use crate::status::PipelineStatus;

/// How often a pipeline that this process leads is asked, and others.
const LOOK_HERE: Duration = Duration::from_millis(50);
const LOOK_ELSEWHERE: Duration = Duration::from_secs(1);

/// One pipeline that reads the table from its log.
pub struct Reader<'a> {
    pub pipeline: &'a PipelineSettings,
    pub projection: Projection,
    /// Where it is told how far this process has brought it, if it leads.
    pub here: Option<&'a PipelineStatus>,
}

/// All of them.
pub struct Fence<'a> {
    readers: Vec<Reader<'a>>,
    /// Hears of who is waited for.
    waiting: &'a (dyn Fn(&str) + Sync),
}

impl<'a> Fence<'a> {
    pub fn new(readers: Vec<Reader<'a>>, waiting: &'a (dyn Fn(&str) + Sync)) -> Self {
        Fence { readers, waiting }
    }

    /// Whether nobody reads the table from its log.
    pub fn is_open(&self) -> bool {
        self.readers.is_empty()
    }

    /// Waits until all have passed the position, or says who has not.
    pub async fn wait(&self, upto: &Position, patience: Duration) -> Result<Option<String>, SourceFailure> {
        self.wait_for(upto, patience, false).await
    }

    /// Waits until all would go on behind the position also after a crash.
    pub async fn wait_stored(&self, upto: &Position, patience: Duration) -> Result<Option<String>, SourceFailure> {
        self.wait_for(upto, patience, true).await
    }

    async fn wait_for(
        &self,
        upto: &Position,
        patience: Duration,
        stored: bool,
    ) -> Result<Option<String>, SourceFailure> {
        let deadline = Instant::now() + patience;
        for reader in &self.readers {
            let mut told = false;
            loop {
                let Some(why) = reader.held_back(upto, stored).await? else { break };
                if Instant::now() >= deadline {
                    return Ok(Some(why));
                }
                if !std::mem::replace(&mut told, true) {
                    (self.waiting)(&why);
                }
                tokio::time::sleep(if reader.here.is_some() { LOOK_HERE } else { LOOK_ELSEWHERE }).await;
            }
        }
        Ok(None)
    }
}

impl Reader<'_> {
    async fn held_back(&self, upto: &Position, stored: bool) -> Result<Option<String>, SourceFailure> {
        if let Some(status) = self.here.filter(|_| !stored) {
            let stands = status.position();
            if stands.as_ref().is_some_and(|stands| stands.covers(upto)) {
                return Ok(None);
            }
            let stands = stands.map_or_else(|| "the beginning".to_owned(), |stands| stands.to_string());
            return Ok(Some(behind(&self.pipeline.name, &stands, upto)));
        }
        match Box::pin(source::settled(self.pipeline, &self.projection, upto)).await? {
            Settled::Yes => Ok(None),
            Settled::No(why) => Ok(Some(why)),
        }
    }
}

/// What is said of a pipeline that has not come so far.
pub fn behind(pipeline: &str, stands: &str, upto: &Position) -> String {
    format!("pipeline `{pipeline}` stands at {stands} and has not delivered everything up to {upto}")
}
