//! What operators ask of an event store's progress table and write into it, from whichever instance they ask: the one that
//! leads obeys the table.

use tokio_postgres::Row;

use super::positions::id_column;
use super::progress::Progress;
use crate::config::{PipelineSettings, SourceSettings};
use crate::source::SourceFailure;
use crate::source::postgres::sql::{self, SqlSession};
use crate::source::postgres::tables::quote;
use crate::source::postgres::{self, server_error::classify_sql};

/// A row of the table, and how many positions lie behind it.
#[derive(Clone, Debug)]
pub struct ProgressRow {
    pub topic: String,
    pub publisher: String,
    pub status: String,
    pub last_position: i64,
    pub last_transaction_id: String,
    pub error_count: i32,
    pub last_error: Option<String>,
    pub last_published_at: Option<String>,
    pub leader_instance: Option<String>,
    pub leader_heartbeat: Option<String>,
    pub lag: i64,
}

const MOMENT: &str = r#"'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'"#;

async fn open(settings: &PipelineSettings) -> Result<SqlSession, SourceFailure> {
    let SourceSettings::Postgres(source) = &settings.source else {
        return Err(SourceFailure::transient("only PostgreSQL has event stores that are polled"));
    };
    sql::connect(&postgres::conninfo(source)?).await
}

/// The pipeline's publishers and their topics, for the statements below.
fn pairs(settings: &PipelineSettings) -> (Vec<String>, Vec<String>) {
    settings.publishers.iter().map(|publisher| (publisher.name.clone(), super::progress::topic_of(publisher))).unzip()
}

fn trouble(error: &tokio_postgres::Error) -> SourceFailure {
    classify_sql(error, "reading or writing outbox_topic_progress")
}

/// How far each publisher of the pipeline has come; none before the first start.
pub async fn rows(settings: &PipelineSettings) -> Result<Vec<ProgressRow>, SourceFailure> {
    let session = open(settings).await?;
    if !Progress::exists(&session).await? {
        return Ok(Vec::new());
    }
    let SourceSettings::Postgres(source) = &settings.source else { return Ok(Vec::new()) };
    let Some(table) = source.tables.first() else { return Ok(Vec::new()) };
    let select = format!(
        "SELECT p.topic, p.publisher, p.status, p.last_position, p.last_transaction_id::text, p.error_count, p.last_error,
                to_char(p.last_published_at AT TIME ZONE 'UTC', {MOMENT}), p.leader_instance,
                to_char(p.leader_heartbeat AT TIME ZONE 'UTC', {MOMENT}),
                greatest(0, coalesce((SELECT max({})::bigint FROM {}), 0) - p.last_position)
         FROM outbox_topic_progress p
         JOIN unnest($1::text[], $2::text[]) AS own (publisher, topic) USING (publisher, topic)
         ORDER BY p.publisher",
        quote(&id_column(settings)),
        table.quoted(),
    );
    let (publishers, topics) = pairs(settings);
    let rows = session.query(&select, &[&publishers, &topics]).await.map_err(|error| trouble(&error))?;
    Ok(rows.iter().map(row).collect())
}

fn row(row: &Row) -> ProgressRow {
    ProgressRow {
        topic: row.get(0),
        publisher: row.get(1),
        status: row.get(2),
        last_position: row.get(3),
        last_transaction_id: row.get(4),
        error_count: row.get(5),
        last_error: row.get(6),
        last_published_at: row.get(7),
        leader_instance: row.get(8),
        leader_heartbeat: row.get(9),
        lag: row.get(10),
    }
}

/// Sets a publisher `PAUSED` or `ACTIVE`; false when the table has no row of it.
pub async fn set_status(settings: &PipelineSettings, publisher: &str, status: &str) -> Result<bool, SourceFailure> {
    let session = open(settings).await?;
    if !Progress::exists(&session).await? {
        return Ok(false);
    }
    let (publishers, topics) = pairs(settings);
    let update = "UPDATE outbox_topic_progress p
                  SET status = $3, error_count = CASE $3 WHEN 'ACTIVE' THEN 0 ELSE p.error_count END
                  FROM unnest($1::text[], $2::text[]) AS own (publisher, topic)
                  WHERE p.publisher = own.publisher AND p.topic = own.topic AND p.publisher = $4";
    let updated = session.execute(update, &[&publishers, &topics, &status, &publisher]).await;
    updated.map(|rows| rows > 0).map_err(|error| trouble(&error))
}

/// Lets those be tried again that stand there as failed: all of the pipeline's, or one.
pub async fn forgive(settings: &PipelineSettings, publisher: Option<&str>) -> Result<(), SourceFailure> {
    let failed = rows(settings).await?.into_iter().filter(|row| row.status == "FAILED");
    for row in failed.filter(|row| publisher.is_none_or(|publisher| row.publisher == publisher)) {
        set_status(settings, &row.publisher, "ACTIVE").await?;
    }
    Ok(())
}
