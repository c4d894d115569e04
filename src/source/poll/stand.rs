//! The positions of an event store's publishers by hand: rows of `outbox_topic_progress`. Each publisher has its own, so one
//! may be moved and the others stay.

use std::sync::Arc;

use super::positions::{id_column, last_event, not_beyond, one_table};
use super::postgres::{EVENT_STORE_LOCK, try_lock};
use super::progress::Progress;
use crate::checkpoint::publishers::{PublisherNotes, Standing};
use crate::config::{PipelineSettings, PostgresSettings};
use crate::position::EventPosition;
use crate::source::SourceFailure;
use crate::source::audit::{self, Entry};
use crate::source::postgres::sql::{self, SqlSession};
use crate::source::postgres::tables::{CatalogTable, Tables, quote};
use crate::source::postgres::{self};
use crate::source::stand::{Change, Counted, PublisherStand, Stand, Target, Whose};

const KEPT_IN: &str = "table outbox_topic_progress";

fn at(notes: &PublisherNotes, publisher: &str) -> EventPosition {
    let note = notes.publishers.get(publisher).and_then(|note| note.position.as_ref());
    note.and_then(|text| text.parse().ok()).unwrap_or_default()
}

async fn table(session: &Arc<SqlSession>, source: &PostgresSettings) -> Result<CatalogTable, SourceFailure> {
    let (tables, missing) = Tables::find(session, &source.tables).await?;
    if let Some(table) = missing.first() {
        return Err(SourceFailure::NotReady {
            what: format!("the event store {table} does not exist"),
            remedy: "outboxd init --capture poll, or name another one with --table".to_owned(),
        });
    }
    one_table(tables.catalog)
}

pub async fn look(source: &PostgresSettings, of: &PipelineSettings) -> Result<Stand, SourceFailure> {
    let session = Arc::new(sql::connect(&postgres::conninfo(source)?).await?);
    let table = table(&session, source).await?;
    let last = last_event(&session, &table, &id_column(of)).await?;
    let mut shown = Stand {
        source: "postgres, an event store".to_owned(),
        address: session.description().to_owned(),
        kept_in: KEPT_IN.to_owned(),
        log_begins: Some(EventPosition::default().to_string()),
        log_ends: Some(last.unwrap_or_default().to_string()),
        ..Stand::default()
    };
    if Progress::exists(&session).await? {
        let notes = Progress::of(of, session.clone(), Arc::default()).load().await?;
        for (name, note) in &notes.publishers {
            let state = match note.state {
                Standing::Active => "active",
                Standing::Paused => "paused",
                Standing::Failed => "failed",
            };
            shown.publishers.push(PublisherStand { name: name.clone(), state, position: note.position.clone() });
        }
        let least = notes.publishers.keys().map(|name| at(&notes, name)).min();
        shown.position = least.map(|least| least.to_string());
    }
    // Only looked at: whoever polls keeps it.
    match try_lock(&session, EVENT_STORE_LOCK).await? {
        true => unlock(&session).await,
        false => shown.held_by = Some("an instance that polls the event stores of this database".to_owned()),
    }
    Ok(shown)
}

async fn unlock(session: &SqlSession) {
    let _ = session.execute("SELECT pg_catalog.pg_advisory_unlock($1)", &[&EVENT_STORE_LOCK]).await;
}

pub struct Held<'a> {
    of: &'a PipelineSettings,
    session: Arc<SqlSession>,
    table: CatalogTable,
    progress: Progress,
    notes: PublisherNotes,
    planned: Option<(PublisherNotes, EventPosition)>,
}

impl<'a> Held<'a> {
    /// Takes the lock that whoever polls event stores holds.
    pub async fn take(source: &'a PostgresSettings, of: &'a PipelineSettings) -> Result<Self, SourceFailure> {
        let session = Arc::new(sql::connect(&postgres::conninfo(source)?).await?);
        if !try_lock(&session, EVENT_STORE_LOCK).await? {
            return Err(SourceFailure::Held { what: "an instance polls the event stores of this database".to_owned() });
        }
        let table = table(&session, source).await?;
        if !Progress::exists(&session).await? {
            return Err(SourceFailure::NotReady {
                what: "there is no table outbox_topic_progress: the pipeline has never run".to_owned(),
                remedy: "outboxd init --capture poll, or a first run".to_owned(),
            });
        }
        let progress = Progress::of(of, session.clone(), Arc::default());
        progress.prepare(true).await?;
        let notes = progress.load().await?;
        Ok(Held { of, session, table, progress, notes, planned: None })
    }

    pub async fn plan(&mut self, target: &Target, whose: Whose<'_>) -> Result<Change, SourceFailure> {
        let misconfigured =
            |what: String, remedy: &str| SourceFailure::Misconfigured { what, remedy: remedy.to_owned() };
        let to: EventPosition = match target {
            Target::Now => last_event(&self.session, &self.table, &id_column(self.of)).await?.unwrap_or_default(),
            Target::Earliest => EventPosition::default(),
            Target::At(text) => text.parse().map_err(|_| {
                misconfigured(
                    format!("`{text}` is not a position in an event store; they look like 753:1042"),
                    "give TRANSACTION:POSITION as `outboxd position show` prints it, `now` or `earliest`",
                )
            })?,
        };
        not_beyond(&self.session, to, &self.of.name).await.map_err(|failure| {
            misconfigured(failure.to_string(), "give a position that this server has reached, or `now`")
        })?;
        if let Some(publisher) = whose
            && !self.of.publishers.iter().any(|one| one.name == publisher)
        {
            let what = format!("pipeline `{}` has no publisher `{publisher}`", self.of.name);
            return Err(misconfigured(what, "outboxd position show names those that it has"));
        }
        let mut changed = self.notes.clone();
        let mut stood: Vec<EventPosition> = Vec::new();
        for publisher in self.of.publishers.iter().filter(|one| whose.is_none_or(|whose| one.name == whose)) {
            stood.push(at(&self.notes, &publisher.name));
            let note = changed.publishers.entry(publisher.name.clone()).or_default();
            note.position = Some(to.to_string());
        }
        let (least, most) =
            (stood.iter().min().copied().unwrap_or_default(), stood.iter().max().copied().unwrap_or_default());
        let change = Change {
            from: Some(least.to_string()),
            to: to.to_string(),
            skips: self.count(least, to).await?,
            repeats: self.count(to, most).await?,
            remarks: vec!["events are counted before publishers select among them".to_owned()],
        };
        self.planned = Some((changed, to));
        Ok(change)
    }

    /// Events after the one position, up to the other.
    async fn count(&self, after: EventPosition, upto: EventPosition) -> Result<Counted, SourceFailure> {
        if upto <= after {
            return Ok(Counted::Nothing);
        }
        let id = quote(&id_column(self.of));
        let asked = format!(
            "SELECT count(*) FROM {} WHERE (transaction_id, {id}) > ('{}'::xid8, {}::bigint)
                                      AND (transaction_id, {id}) <= ('{}'::xid8, {}::bigint)",
            self.table.quoted(),
            after.transaction,
            after.position,
            upto.transaction,
            upto.position
        );
        let row = self.session.query_one(&asked, &[]).await.map_err(|error| self.session.classify(&error))?;
        Ok(Counted::Events(row.get::<_, i64>(0).cast_unsigned()))
    }

    pub async fn audit(&mut self, entry: &Entry) -> Result<(), SourceFailure> {
        audit::in_postgres(&self.session, entry).await
    }

    pub async fn carry_out(&mut self) -> Result<String, SourceFailure> {
        let Some((notes, to)) = self.planned.take() else {
            return Err(SourceFailure::transient("nothing was planned"));
        };
        self.progress.save(&notes).await?;
        let now = self.progress.load().await?;
        let differs = |(name, note): (&String, &crate::checkpoint::publishers::PublisherNote)| {
            now.publishers.get(name).is_none_or(|now| now.position != note.position)
        };
        if notes.publishers.iter().any(differs) {
            return Err(SourceFailure::Held { what: "somebody else has written to outbox_topic_progress".to_owned() });
        }
        Ok(to.to_string())
    }
}
