//! Writes letters to the source's database, on a connection of its own that is made anew whenever it breaks.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::Letters;
use super::letter::Letter;
use crate::config::{SourceSettings, TableName};
use crate::sink::SinkFailure;
use crate::source::SourceFailure;
use crate::status::PublisherStatus;

/// How long an attempt may take; a connection may be dead without anybody having said so.
const PATIENCE: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

pub struct LetterWriter {
    source: Arc<SourceSettings>,
    table: TableName,
    status: Arc<PublisherStatus>,
    /// Taken out while it is used, so that one whose use was given up in the middle is not used again.
    open: Mutex<Option<Letters>>,
}

impl LetterWriter {
    pub fn new(source: &Arc<SourceSettings>, table: &TableName, status: &Arc<PublisherStatus>) -> Self {
        LetterWriter { source: source.clone(), table: table.clone(), status: status.clone(), open: Mutex::default() }
    }

    pub fn table(&self) -> &TableName {
        &self.table
    }

    async fn prepared(&self) -> Result<Letters, SourceFailure> {
        // Whether the login is right, the source tells; here it is known to have worked, or is about to be tried.
        let passing = |failure: SourceFailure| SourceFailure::Transient { what: failure.to_string() };
        let mut letters = Letters::open(&self.source, &self.table).await.map_err(passing)?;
        letters.prepare(&self.table, self.source.no_create()).await?;
        Ok(letters)
    }

    /// Makes sure of the table, so that a missing one is known before the first letter. A database that is away is not
    /// waited for: the source does that.
    pub async fn ready(&self) -> Result<(), SinkFailure> {
        match self.prepared().await {
            Ok(letters) => {
                *self.open.lock().await = Some(letters);
                Ok(())
            }
            Err(failure) => match told(failure) {
                Told::Passing(what) => {
                    tracing::warn!(table = %self.table, "the dead-letter table cannot be looked at: {what}");
                    Ok(())
                }
                Told::ForGood { what, remedy } => Err(SinkFailure::NotReady { what, remedy }),
            },
        }
    }

    /// Writes a letter, however long that takes. When it returns, the database has it.
    pub async fn write(&self, letter: &Letter) -> Result<(), SinkFailure> {
        let mut open = self.open.lock().await;
        let (mut pause, mut late) = (FIRST_PAUSE, false);
        loop {
            let attempt = async {
                let mut letters = match open.take() {
                    Some(letters) => letters,
                    None => self.prepared().await?,
                };
                letters.write(letter).await?;
                *open = Some(letters);
                Ok(())
            };
            let attempted = tokio::time::timeout(PATIENCE, attempt).await;
            let silent = |_| Err(SourceFailure::Transient { what: format!("no answer within {PATIENCE:?}") });
            match attempted.unwrap_or_else(silent).map_err(told) {
                Ok(()) => {
                    if late {
                        self.status.sink_is_back();
                    }
                    return Ok(());
                }
                Err(Told::ForGood { what, remedy }) => {
                    return Err(SinkFailure::Undeliverable {
                        what: format!(
                            "an event of the commit at {} can neither be delivered ({}) nor parked: {what}",
                            letter.position, letter.reason
                        ),
                        remedy,
                    });
                }
                Err(Told::Passing(what)) => {
                    let what = format!("a dead letter could not be written yet: {what}");
                    tracing::warn!(table = %self.table, retry_in_ms = pause.as_millis() as u64, "{what}");
                    self.status.sink_is_away(&what);
                    late = true;
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}

/// What trouble with the database means for a letter.
enum Told {
    Passing(String),
    ForGood { what: String, remedy: String },
}

fn told(failure: SourceFailure) -> Told {
    match failure {
        SourceFailure::NotReady { what, remedy }
        | SourceFailure::Misconfigured { what, remedy }
        | SourceFailure::PositionLost { what, remedy }
        | SourceFailure::Undecodable { what, remedy } => Told::ForGood { what, remedy },
        passing => Told::Passing(passing.to_string()),
    }
}
