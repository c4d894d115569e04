//! Letters in a table of MySQL or MariaDB.

use super::letter::{Kept, Letter, headers_from_json, headers_to_json};
use super::{AT_ONCE, Chosen, Discarded, Page, Whose};
use crate::config::{CheckpointPlace, MySqlSettings, TableName};
use crate::source::mysql::keeper;
use crate::source::mysql::server_error::WireError;
use crate::source::mysql::session::{Row, Session, literal, quote};
use crate::source::{SourceFailure, mysql, schema};

pub const CREATE: &str = include_str!("../../sql/mysql/dead-letters.sql");

const DUPLICATE_KEY: u16 = 1062;
const NO_SUCH_TABLE: u16 = 1146;
/// Rights on the database, the table, or a column.
const DENIED: [u16; 3] = [1044, 1142, 1143];
/// About what is in the letter: too long, of another charset, not JSON, a check of the table's.
const ABOUT_THE_LETTER: [u16; 9] = [1048, 1118, 1153, 1264, 1366, 1406, 3140, 3819, 4025];
const MOMENT: &str = "'%Y-%m-%dT%H:%i:%s.%fZ'";

pub struct Letters {
    session: Session,
    table: TableName,
    /// The longest statement that the server takes.
    longest: usize,
}

/// The statement that makes the table.
pub fn create(table: &TableName) -> String {
    schema::fill(CREATE, |name| (name == "table").then(|| quoted(table)))
}

fn quoted(table: &TableName) -> String {
    match &table.schema {
        Some(schema) => format!("{}.{}", quote(schema), quote(&table.name)),
        None => quote(&table.name),
    }
}

pub async fn exists(session: &mut Session, table: &TableName) -> Result<bool, SourceFailure> {
    let schema = table.schema.as_deref().map_or_else(|| "DATABASE()".to_owned(), literal);
    let query = format!(
        "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = {schema} AND table_name = {}",
        literal(&table.name)
    );
    Ok(session.query_one(&query).await?.number(0) > 0)
}

impl Letters {
    pub async fn open(settings: &MySqlSettings, table: &TableName) -> Result<Self, SourceFailure> {
        // Of several servers one that takes letters, wherever the checkpoint is.
        let settings = MySqlSettings { checkpoint: CheckpointPlace::Source, ..settings.clone() };
        let mut session = mysql::connect(&settings, &mysql::conninfo(&settings)?).await?;
        let longest = session.query_one("SELECT @@max_allowed_packet").await?.number(0) as usize;
        Ok(Letters { session, table: table.clone(), longest })
    }

    fn failed(&self, error: WireError, doing: &str) -> SourceFailure {
        let code = error.code().unwrap_or_default();
        let on = format!("{}: {doing} the dead-letter table {}", self.session.describe(), self.table);
        match error.classify(&on) {
            SourceFailure::NotReady { what, .. } if DENIED.contains(&code) => SourceFailure::NotReady {
                what,
                remedy: format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {} to this user", quoted(&self.table)),
            },
            SourceFailure::NotReady { what, .. } if code == NO_SUCH_TABLE => {
                SourceFailure::NotReady { what, remedy: super::by_hand(&self.table, "sql/mysql/dead-letters.sql") }
            }
            SourceFailure::Transient { what } if ABOUT_THE_LETTER.contains(&code) => {
                SourceFailure::Undecodable { what, remedy: super::MAKE_ROOM.to_owned() }
            }
            failure => failure,
        }
    }

    async fn query(&mut self, sql: &str, doing: &str) -> Result<Vec<Row>, SourceFailure> {
        let rows = self.session.try_query(sql).await;
        rows.map_err(|error| self.failed(error, doing))
    }

    pub async fn exists(&mut self) -> Result<bool, SourceFailure> {
        exists(&mut self.session, &self.table).await
    }

    pub async fn create(&mut self) -> Result<(), SourceFailure> {
        let made = self.session.try_query(&create(&self.table)).await;
        made.map(|_| ()).map_err(|error| match self.failed(error, "creating") {
            SourceFailure::NotReady { what, .. } => {
                SourceFailure::NotReady { what, remedy: super::by_hand(&self.table, "sql/mysql/dead-letters.sql") }
            }
            other => other,
        })
    }

    /// Whether the table is one for letters. That they may be written shows with the first.
    pub async fn probe(&mut self) -> Result<(), SourceFailure> {
        let columns = "SELECT id, fingerprint, pipeline, publisher, source_table, event_id, topic, `key`, value, headers, \
             position, reason, attempts, failed_at, replayed_at";
        let probe = format!("{columns} FROM {} LIMIT 0", quoted(&self.table));
        if let Err(error) = self.session.try_query(&probe).await {
            let code = error.code().unwrap_or_default();
            return Err(match self.failed(error, "looking at") {
                SourceFailure::NotReady { what, .. } if !DENIED.contains(&code) => {
                    SourceFailure::NotReady { what, remedy: super::another(&self.table, "sql/mysql/dead-letters.sql") }
                }
                failure => failure,
            });
        }
        // The server looks at rights when it prepares, and nothing is executed.
        let insert = format!("INSERT INTO {} (fingerprint) VALUES ('')", quoted(&self.table));
        self.query(&format!("SET @outboxd = {}", literal(&insert)), "looking at").await?;
        match self.session.try_query("PREPARE outboxd_letter FROM @outboxd").await {
            Err(error) if DENIED.contains(&error.code().unwrap_or_default()) => Err(self.failed(error, "writing")),
            _ => Ok(()),
        }
    }

    pub async fn write(&mut self, letter: &Letter) -> Result<(), SourceFailure> {
        let statement = insert(&self.table, letter);
        if statement.len() >= self.longest {
            return Err(SourceFailure::Undecodable {
                what: format!(
                    "a dead letter takes a statement of {} bytes, and max_allowed_packet of {} is {}",
                    statement.len(),
                    self.session.describe(),
                    self.longest
                ),
                remedy: "SET GLOBAL max_allowed_packet to more than that, and in the server's configuration".to_owned(),
            });
        }
        match self.session.try_execute(&statement).await {
            Ok(()) => Ok(()),
            Err(error) if error.code() == Some(DUPLICATE_KEY) => Ok(()),
            Err(error) => Err(self.failed(error, "writing")),
        }
    }

    /// The columns of [`kept`]; a list goes without what may be large.
    fn select(&self, whose: &Whose, whole: bool) -> String {
        let content = if whole { "value, headers" } else { "NULL, '[]'" };
        format!(
            "SELECT id, DATE_FORMAT(failed_at, {MOMENT}), DATE_FORMAT(replayed_at, {MOMENT}), pipeline, publisher, \
             source_table, event_id, topic, `key`, position, reason, attempts, {content} FROM {} WHERE {}",
            quoted(&self.table),
            of(whose)
        )
    }

    /// The last letters, newest last.
    pub async fn list(&mut self, whose: &Whose, page: &Page<'_>) -> Result<Vec<Kept>, SourceFailure> {
        let waiting = if page.waiting { " AND replayed_at IS NULL" } else { "" };
        let before = page.before.map(|id| id.parse::<u64>().unwrap_or(0));
        let before = before.map(|id| format!(" AND id < {id}")).unwrap_or_default();
        let query = format!("{}{waiting}{before} ORDER BY id DESC LIMIT {}", self.select(whose, false), page.limit);
        Ok(self.query(&query, "reading").await?.iter().rev().map(kept).collect())
    }

    pub async fn waiting(&mut self, whose: &Whose, most: u32) -> Result<u64, SourceFailure> {
        let query = format!(
            "SELECT COUNT(*) FROM (SELECT 1 FROM {} WHERE {} AND replayed_at IS NULL LIMIT {most}) AS w",
            quoted(&self.table),
            of(whose)
        );
        Ok(self.query(&query, "reading").await?.first().map_or(0, |row| row.number(0)))
    }

    pub async fn hold(&mut self, whose: &Whose) -> Result<(), SourceFailure> {
        let database = self.session.query_one("SELECT DATABASE()").await?.string(0);
        let lock = super::replay_lock(&self.table, whose);
        match keeper::take_lock(&mut self.session, &database, &lock).await {
            Err(SourceFailure::Held { .. }) => Err(super::held(whose)),
            taken => taken,
        }
    }

    pub async fn find(&mut self, whose: &Whose, id: &str) -> Result<Option<Kept>, SourceFailure> {
        let Ok(id) = id.parse::<u64>() else { return Ok(None) };
        let query = format!("{} AND id = {id}", self.select(whose, true));
        Ok(self.query(&query, "reading").await?.first().map(kept))
    }

    /// The oldest letter after this one that was not replayed.
    pub async fn next_waiting(&mut self, whose: &Whose, after: Option<&str>) -> Result<Option<Kept>, SourceFailure> {
        let after = after.and_then(|id| id.parse::<u64>().ok()).unwrap_or(0);
        let query =
            format!("{} AND replayed_at IS NULL AND id > {after} ORDER BY id LIMIT 1", self.select(whose, true));
        Ok(self.query(&query, "reading").await?.first().map(kept))
    }

    pub async fn mark_replayed(&mut self, id: &str, moment: &str) -> Result<(), SourceFailure> {
        // A literal with a zone is known only from MySQL 8.0.19 on; the session's time is UTC.
        let moment = literal(&moment.trim_end_matches('Z').replace('T', " "));
        let id = id.parse::<u64>().unwrap_or(0);
        let update = format!("UPDATE {} SET replayed_at = {moment} WHERE id = {id}", quoted(&self.table));
        self.query(&update, "writing").await.map(|_| ())
    }

    fn discardable(&self, whose: &Whose, chosen: &Chosen) -> String {
        let replayed = if chosen.all { "" } else { " AND replayed_at IS NOT NULL" };
        format!(
            "FROM {} WHERE {} AND failed_at <= UTC_TIMESTAMP(6) - INTERVAL {} SECOND{replayed}",
            quoted(&self.table),
            of(whose),
            chosen.older_than.as_secs()
        )
    }

    pub async fn count(&mut self, whose: &Whose, chosen: &Chosen) -> Result<Discarded, SourceFailure> {
        let query = format!("SELECT COUNT(*), COALESCE(MAX(id), 0) {}", self.discardable(whose, chosen));
        let rows = self.query(&query, "reading").await?;
        Ok(rows.first().map(|row| Discarded { letters: row.number(0), last: row.string(1) }).unwrap_or_default())
    }

    pub async fn discard(&mut self, whose: &Whose, chosen: &Chosen, upto: &str) -> Result<u64, SourceFailure> {
        let upto = upto.parse::<u64>().unwrap_or(0);
        let delete = format!("DELETE {} AND id <= {upto} ORDER BY id LIMIT {AT_ONCE}", self.discardable(whose, chosen));
        let mut all = 0;
        loop {
            let deleted = self.delete(&delete).await?;
            all += deleted;
            if deleted < AT_ONCE {
                return Ok(all);
            }
        }
    }

    pub async fn remove(&mut self, whose: &Whose, id: &str) -> Result<u64, SourceFailure> {
        let Ok(id) = id.parse::<u64>() else { return Ok(0) };
        let delete = format!("DELETE FROM {} WHERE {} AND id = {id}", quoted(&self.table), of(whose));
        self.delete(&delete).await
    }

    /// How many were deleted.
    async fn delete(&mut self, statement: &str) -> Result<u64, SourceFailure> {
        self.query(statement, "deleting from").await?;
        let rows = self.query("SELECT ROW_COUNT()", "deleting from").await?;
        Ok(rows.first().map_or(0, |row| row.number(0)))
    }
}

fn of(whose: &Whose) -> String {
    format!("pipeline = {} AND publisher = {}", literal(&whose.pipeline), literal(&whose.publisher))
}

/// Bytes stand in it as they are, and only quotes are doubled: in hexadecimal, large letters would need a
/// `max_allowed_packet` of twice their size.
fn insert(table: &TableName, letter: &Letter) -> Vec<u8> {
    let text = |text: Option<&str>| text.map_or_else(|| "NULL".to_owned(), literal);
    let fingerprint: String = letter.fingerprint().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut statement = format!(
        "INSERT INTO {} (fingerprint, pipeline, publisher, source_table, event_id, topic, headers, position, reason, attempts, \
         failed_at, `key`, value) VALUES (x'{fingerprint}', {}, {}, {}, {}, {}, {}, {}, {}, {}, UTC_TIMESTAMP(6), ",
        quoted(table),
        literal(&letter.pipeline),
        literal(&letter.publisher),
        literal(&letter.source_table),
        text(letter.event_id.as_deref()),
        text(letter.topic.as_deref()),
        literal(&headers_to_json(&letter.headers).to_string()),
        literal(&letter.position),
        literal(&letter.reason),
        letter.attempts,
    )
    .into_bytes();
    for (bytes, end) in [(&letter.key, &b", "[..]), (&letter.value, b")")] {
        match bytes {
            None => statement.extend_from_slice(b"NULL"),
            Some(bytes) => {
                statement.extend_from_slice(b"_binary'");
                for part in bytes.split_inclusive(|byte| *byte == b'\'') {
                    statement.extend_from_slice(part);
                    if part.ends_with(b"'") {
                        statement.push(b'\'');
                    }
                }
                statement.push(b'\'');
            }
        }
        statement.extend_from_slice(end);
    }
    statement
}

fn kept(row: &Row) -> Kept {
    let bytes = |column: usize| row.bytes(column).map(<[u8]>::to_vec);
    Kept {
        id: row.string(0),
        failed_at: row.string(1),
        replayed: row.bytes(2).is_some(),
        replayed_at: row.text(2),
        letter: Letter {
            pipeline: row.string(3),
            publisher: row.string(4),
            source_table: row.string(5),
            event_id: row.text(6),
            topic: row.text(7),
            key: bytes(8),
            position: row.string(9),
            reason: row.string(10),
            attempts: row.number(11) as u32,
            value: bytes(12),
            headers: headers_from_json(&serde_json::from_str(&row.string(13)).unwrap_or_default()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stand_in_the_statement_as_they_are_with_quotes_doubled() {
        let letter = Letter { value: Some(b"a'\0\xff\\'".to_vec()), ..Letter::default() };
        let statement = insert(&"dead".parse().unwrap(), &letter);
        assert!(statement.ends_with(b"NULL, _binary'a''\0\xff\\''')"), "{}", String::from_utf8_lossy(&statement));
    }
}
