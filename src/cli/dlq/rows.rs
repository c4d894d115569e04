//! The rows of a polled table, which say for themselves what became of them: one that had failed for good, and whose letter
//! was replayed, is done.

use crate::config::{Capture, PipelineSettings, PollSettings};
use crate::dead_letters::letter::Letter;
use crate::event::Projection;
use crate::source::SourceFailure;
use crate::source::poll::Store;

pub struct Rows<'a> {
    pipeline: &'a PipelineSettings,
    /// Unless nothing is polled, or it was tried in vain.
    polled: Option<&'a PollSettings>,
    store: Option<Store>,
}

impl<'a> Rows<'a> {
    pub fn of(pipeline: &'a PipelineSettings) -> Self {
        let polled = match &pipeline.capture {
            Capture::Poll(settings) => Some(settings),
            Capture::Log | Capture::Positions(_) => None,
        };
        Rows { pipeline, polled, store: None }
    }

    /// Sets the letter's row done, if it is still failed. The event was delivered: what cannot be written is only said.
    pub async fn settle(&mut self, letter: &Letter) {
        let Some(settings) = self.polled else { return };
        if let Err(failure) = self.try_settle(settings, letter).await {
            eprintln!("it was delivered, but its row could not be marked: {failure}");
            // Nor would the others.
            self.polled = None;
        }
    }

    async fn try_settle(&mut self, settings: &PollSettings, letter: &Letter) -> Result<(), SourceFailure> {
        let tables = self.pipeline.source.tables();
        let named = |(_, table): &(usize, &crate::config::TableName)| table.to_string() == letter.source_table;
        // A topic does not keep the table's name.
        let table = match tables {
            [_] => Some(0),
            several => several.iter().enumerate().find(named).map(|(at, _)| at),
        };
        let (Some(table), Some(id)) = (table, &letter.event_id) else { return Ok(()) };
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open(self.pipeline, settings, &Projection::default(), &settings.worker).await?,
        };
        let settled = self.store.insert(store).settle(table as u32, id).await;
        settled.map(|_| ())
    }
}
