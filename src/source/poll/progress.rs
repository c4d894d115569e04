//! The table `outbox_topic_progress`: how far each publisher of an event store has come, and what operators want of it.
//!
//! It takes the place of the notes that other pipelines keep on their publishers. Operators write to it as well, so what
//! was written or read last is remembered, and a difference is theirs.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio_postgres::types::ToSql;

use crate::checkpoint::publishers::{PublisherNote, PublisherNotes, Standing};
use crate::config::{Capture, PipelineSettings, PublisherSettings, SinkSettings};
use crate::position::EventPosition;
use crate::source::SourceFailure;
use crate::source::postgres::server_error::classify_sql;
use crate::source::postgres::sql::SqlSession;

/// Creates the table; run by `init`, by the first start, or by hand.
pub const CREATE: &str = include_str!("../../../sql/postgres/progress.sql");

/// What is known of each publisher: whether it runs, and how far it came.
pub type Known = BTreeMap<String, (Standing, EventPosition)>;

/// What was last read or written, by this process.
#[derive(Default)]
pub struct Remembered {
    known: Mutex<Known>,
    /// What a generation began with, until it has taken it.
    begun: Mutex<Option<PublisherNotes>>,
}

/// The rows of one pipeline's publishers.
#[derive(Clone)]
pub struct Progress {
    session: Arc<SqlSession>,
    /// Publishers, and the topics they are for.
    pairs: Arc<Vec<(String, String)>>,
    worker: String,
    remembered: Arc<Remembered>,
}

fn trouble(error: &tokio_postgres::Error) -> SourceFailure {
    classify_sql(error, "reading or writing outbox_topic_progress")
}

/// The topic of a publisher's row.
pub fn topic_of(publisher: &PublisherSettings) -> String {
    // Elsewhere than in Kafka a topic is a path or a routing key, made of an event's fields.
    let topic = match publisher.sink {
        SinkSettings::Kafka => publisher.route.topic.as_ref(),
        _ => None,
    };
    topic.unwrap_or(&publisher.name).clone()
}

impl Progress {
    pub fn of(settings: &PipelineSettings, session: Arc<SqlSession>, remembered: Arc<Remembered>) -> Self {
        let pair = |publisher: &PublisherSettings| (publisher.name.clone(), topic_of(publisher));
        let worker = match &settings.capture {
            Capture::Positions(capture) => capture.worker.clone(),
            _ => String::new(),
        };
        let pairs = Arc::new(settings.publishers.iter().map(pair).collect());
        Progress { session, pairs, worker, remembered }
    }

    pub async fn exists(session: &SqlSession) -> Result<bool, SourceFailure> {
        let asked = "SELECT pg_catalog.to_regclass('outbox_topic_progress') IS NOT NULL";
        session.query_one(asked, &[]).await.map(|row| row.get(0)).map_err(|error| trouble(&error))
    }

    /// Makes the table, where it is not there and may be made, and a row for each publisher that has none.
    pub async fn prepare(&self, no_create: bool) -> Result<(), SourceFailure> {
        if !Self::exists(&self.session).await? {
            if no_create {
                return Err(SourceFailure::NotReady {
                    what: "there is no table outbox_topic_progress".to_owned(),
                    remedy: "run `outboxd init`, or sql/postgres/progress.sql, and grant SELECT, INSERT, UPDATE on it"
                        .to_owned(),
                });
            }
            self.session.batch_execute(CREATE).await.map_err(|error| trouble(&error))?;
        }
        let (publishers, topics) = self.columns();
        let insert = "INSERT INTO outbox_topic_progress (topic, publisher)
                      SELECT * FROM unnest($1::text[], $2::text[]) ON CONFLICT DO NOTHING";
        self.session.execute(insert, &[&topics, &publishers]).await.map(|_| ()).map_err(|error| trouble(&error))
    }

    fn columns(&self) -> (Vec<&str>, Vec<&str>) {
        self.pairs.iter().map(|(publisher, topic)| (publisher.as_str(), topic.as_str())).unzip()
    }

    async fn read(&self) -> Result<(Known, BTreeMap<String, String>), SourceFailure> {
        let (publishers, topics) = self.columns();
        let select =
            "SELECT p.publisher, p.status, p.last_transaction_id::text, p.last_position, coalesce(p.last_error, '')
                      FROM outbox_topic_progress p
                      JOIN unnest($1::text[], $2::text[]) AS own (topic, publisher) USING (topic, publisher)";
        let rows = self.session.query(select, &[&topics, &publishers]).await.map_err(|error| trouble(&error))?;
        let (mut known, mut reasons) = (Known::new(), BTreeMap::new());
        for row in rows {
            let publisher: String = row.get(0);
            let standing = match row.get::<_, &str>(1) {
                "PAUSED" => Standing::Paused,
                "FAILED" => Standing::Failed,
                _ => Standing::Active,
            };
            let transaction = row.get::<_, &str>(2).parse().unwrap_or(0);
            known.insert(publisher.clone(), (standing, EventPosition { transaction, position: row.get(3) }));
            reasons.insert(publisher, row.get(4));
        }
        Ok((known, reasons))
    }

    /// What the table says, as notes.
    pub async fn load(&self) -> Result<PublisherNotes, SourceFailure> {
        let (known, mut reasons) = self.read().await?;
        let mut notes = PublisherNotes { lineage: super::positions::LINEAGE.to_owned(), ..PublisherNotes::default() };
        for (publisher, (state, position)) in &known {
            let reason = reasons.remove(publisher).filter(|_| *state == Standing::Failed).unwrap_or_default();
            let note = PublisherNote { state: *state, position: Some(position.to_string()), reason };
            notes.publishers.insert(publisher.clone(), note);
        }
        *self.remembered.known.lock().await = known;
        Ok(notes)
    }

    /// Where reading begins: the least that a publisher has come which takes part. What was read for that is what the
    /// generation goes by, so that a change in between is noticed as one.
    pub async fn begin(&self) -> Result<EventPosition, SourceFailure> {
        let notes = self.load().await?;
        let known = self.remembered.known.lock().await;
        let active = known.values().filter(|(standing, _)| *standing == Standing::Active).map(|(_, at)| *at).min();
        let all = known.values().map(|(_, at)| *at).min();
        *self.remembered.begun.lock().await = Some(notes);
        Ok(active.or(all).unwrap_or_default())
    }

    /// What the generation began with.
    pub async fn begun(&self) -> Result<PublisherNotes, SourceFailure> {
        match self.remembered.begun.lock().await.take() {
            Some(notes) => Ok(notes),
            None => self.load().await,
        }
    }

    /// Whether somebody else has changed a status or gone to another position.
    pub async fn was_changed(&self) -> Result<bool, SourceFailure> {
        // Held meanwhile, so that what we write ourselves is not taken for a change of others.
        let before = self.remembered.known.lock().await;
        let (now, _) = self.read().await?;
        Ok(now.iter().any(|(publisher, found)| before.get(publisher).is_some_and(|known| known != found)))
    }

    pub async fn save(&self, notes: &PublisherNotes) -> Result<(), SourceFailure> {
        let mut before = self.remembered.known.lock().await;
        let mut known = Known::new();
        let (mut had_transactions, mut had_positions) = (vec![], vec![]);
        let (mut states, mut transactions, mut positions, mut reasons) = (vec![], vec![], vec![], vec![]);
        for (publisher, _) in self.pairs.iter() {
            let note = notes.publishers.get(publisher).cloned().unwrap_or_default();
            let (was, had) = before.get(publisher).copied().unwrap_or_default();
            let at = note.position.and_then(|text| text.parse().ok()).unwrap_or(had);
            known.insert(publisher.clone(), (note.state, at));
            had_transactions.push(had.transaction.to_string());
            had_positions.push(had.position);
            // A status is written when it is ours to change.
            states.push((was != note.state).then_some(match note.state {
                Standing::Active => "ACTIVE",
                Standing::Paused => "PAUSED",
                Standing::Failed => "FAILED",
            }));
            transactions.push(at.transaction.to_string());
            positions.push(at.position);
            reasons.push(note.reason);
        }
        let (publishers, topics) = self.columns();
        let update = "UPDATE outbox_topic_progress p SET
                 last_published_at = CASE WHEN v.position <> p.last_position THEN now() ELSE p.last_published_at END,
                 last_position = v.position, last_transaction_id = v.transaction::xid8,
                 status = coalesce(v.state, p.status),
                 error_count = CASE v.state WHEN 'FAILED' THEN p.error_count + 1 WHEN 'ACTIVE' THEN 0 ELSE p.error_count END,
                 last_error = CASE WHEN v.state = 'FAILED' THEN v.reason ELSE p.last_error END,
                 leader_instance = $7, leader_heartbeat = now()
             FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $8::text[], $9::bigint[])
                  AS v (topic, publisher, state, transaction, position, reason, had_transaction, had_position)
             WHERE p.topic = v.topic AND p.publisher = v.publisher
               -- What an operator has written is not written over; it is noticed a moment later.
               AND p.last_transaction_id = v.had_transaction::xid8 AND p.last_position = v.had_position
             RETURNING p.publisher";
        let values: [&(dyn ToSql + Sync); 9] = [
            &topics,
            &publishers,
            &states,
            &transactions,
            &positions,
            &reasons,
            &self.worker,
            &had_transactions,
            &had_positions,
        ];
        let written = self.session.query(update, &values).await.map_err(|error| trouble(&error))?;
        for row in written {
            let publisher: String = row.get(0);
            if let Some(now) = known.remove(&publisher) {
                before.insert(publisher, now);
            }
        }
        Ok(())
    }

    /// Says that we still lead.
    pub async fn beat(&self) -> Result<(), SourceFailure> {
        let (publishers, topics) = self.columns();
        let update = "UPDATE outbox_topic_progress p SET leader_instance = $3, leader_heartbeat = now()
                      FROM unnest($1::text[], $2::text[]) AS v (topic, publisher)
                      WHERE p.topic = v.topic AND p.publisher = v.publisher";
        let beat = self.session.execute(update, &[&topics, &publishers, &self.worker]).await;
        beat.map(|_| ()).map_err(|error| trouble(&error))
    }
}
