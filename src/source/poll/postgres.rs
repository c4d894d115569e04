//! Polling PostgreSQL: the statements, and the session that holds the lock.
//!
//! A claim is one statement: rows are picked in order, past those that others hold, set, and returned. A layout without
//! columns for a claim is paged through in its order.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow, Statement};

use super::keeper::SILENT_LEADER;
use super::ledger::{Batch, Claimed, Exclusion, Ledger, Refused};
use super::view::{MOST_KEYS, View, by_version, code, most_characters};
use super::{Ask, Waits};
use crate::config::PostgresSettings;
use crate::event::{Chunk, Field, Projection};
use crate::route::polling::{Set, Sets, Test};
use crate::source::postgres::conninfo::ConnInfo;
use crate::source::postgres::server_error::classify_sql;
use crate::source::postgres::snapshot::set_field;
use crate::source::postgres::sql::{self, SqlSession};
use crate::source::postgres::tables::{CatalogTable, Tables, literal, quote};
use crate::source::postgres::{self, judge};
use crate::source::{SourceFailure, SourceStats};

/// The lock of the event store's original, so that both can share a database.
pub const EVENT_STORE_LOCK: i64 = 4_856_221_667_890_123_456;

pub struct PgStore {
    pub session: Arc<SqlSession>,
    info: ConnInfo,
    pub view: Arc<View>,
    pub tables: Arc<Vec<Table>>,
    projection: Projection,
    /// Where each table was left, where a claim leaves no trace.
    cursors: Vec<Option<Vec<String>>>,
    /// Statements that the server has planned.
    prepared: HashMap<String, Statement>,
    /// Rows of a page.
    page: usize,
}

pub struct Table {
    pub catalog: CatalogTable,
    /// The type of each column that is compared, as SQL writes it.
    types: Vec<(String, String)>,
}

impl Table {
    pub fn type_of(&self, column: &str) -> &str {
        self.types.iter().find(|(name, _)| name == column).map_or("text", |(_, kind)| kind)
    }
}

impl PgStore {
    pub async fn open(settings: &PostgresSettings, view: View, projection: &Projection) -> Result<Self, SourceFailure> {
        let store = PgStore::find(settings, view, projection).await?;
        for Table { catalog, .. } in store.tables.iter() {
            if let Some(column) = store.view.needed().iter().find(|column| !catalog.has(column)) {
                return Err(lacks(&catalog.quoted(), column));
            }
        }
        Ok(store)
    }

    /// Whatever columns the tables have.
    pub async fn find(settings: &PostgresSettings, view: View, projection: &Projection) -> Result<Self, SourceFailure> {
        let info = postgres::conninfo(settings)?;
        let session = Arc::new(sql::connect(&info).await?);
        let info = info.pinned_to(session.host());
        let (tables, missing) = Tables::find(&session, &settings.tables).await?;
        judge::refuse(judge::tables(&missing, &tables, projection))?;
        let mut described = Vec::new();
        for catalog in tables.catalog {
            let statement = "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_catalog.pg_attribute
                             WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped";
            let types = session.query(statement, &[&catalog.oid]).await.map_err(|error| session.classify(&error))?;
            let types = types.iter().map(|row| (row.get(0), row.get(1))).collect();
            described.push(Table { catalog, types });
        }
        let cursors = vec![None; described.len()];
        let (view, tables) = (Arc::new(view), Arc::new(described));
        let projection = projection.clone();
        let page = view.batch;
        Ok(PgStore { session, info, view, tables, projection, cursors, prepared: HashMap::new(), page })
    }

    /// One more session, for what goes on beside the claims.
    pub async fn another(&self) -> Result<Self, SourceFailure> {
        let session = Arc::new(sql::connect(&self.info).await?);
        Ok(PgStore {
            session,
            info: self.info.clone(),
            view: self.view.clone(),
            tables: self.tables.clone(),
            projection: self.projection.clone(),
            cursors: self.cursors.clone(),
            prepared: HashMap::new(),
            page: self.page,
        })
    }

    pub fn describe(&self) -> String {
        self.session.description().to_owned()
    }

    pub fn tables(&self) -> usize {
        self.tables.len()
    }

    /// The locks of the tables, which the session holds as long as it lives.
    pub async fn lead(&self) -> Result<(), SourceFailure> {
        for table in self.tables.iter() {
            let name = table.catalog.quoted();
            if !try_lock(&self.session, lock_key(&name)).await? {
                return Err(SourceFailure::Held { what: format!("another instance polls {name}") });
            }
        }
        let_go_when_silent(&self.session).await
    }

    /// Waits until nobody polls these tables.
    pub async fn wait_for_lead(&self) -> Result<(), SourceFailure> {
        loop {
            let led = self.lead().await;
            self.unlock().await?;
            match led {
                Err(SourceFailure::Held { .. }) => tokio::time::sleep(Duration::from_millis(300)).await,
                led => return led,
            }
        }
    }

    async fn unlock(&self) -> Result<(), SourceFailure> {
        let unlocked = self.session.batch_execute("SELECT pg_catalog.pg_advisory_unlock_all()").await;
        unlocked.map_err(|error| self.session.classify(&error))
    }

    pub async fn lacking(&self) -> Result<Vec<String>, SourceFailure> {
        let mut lacking = Vec::new();
        for table in self.tables.iter() {
            let asked = "SELECT privilege, current_user::text FROM unnest(ARRAY['SELECT', 'UPDATE']) AS privilege
                         WHERE NOT has_table_privilege($1::oid, privilege)";
            let rows = self.session.query(asked, &[&table.catalog.oid]).await;
            for row in rows.map_err(|error| self.session.classify(&error))? {
                let (privilege, role): (String, String) = (row.get(0), row.get(1));
                lacking.push(format!("GRANT {privilege} ON {} TO {}", table.catalog.quoted(), quote(&role)));
            }
        }
        Ok(lacking)
    }

    pub async fn beat(&self) -> Result<(), SourceFailure> {
        self.session.batch_execute("SELECT 1").await.map_err(|error| self.session.classify(&error))
    }

    pub async fn claim(
        &mut self,
        ask: &Ask<'_>,
        excluded: &Exclusion,
        chunk: &mut Chunk,
    ) -> Result<Vec<Claimed>, SourceFailure> {
        let table = &self.tables[ask.table as usize];
        let Some(leave_out) = self.leave_out(table, excluded) else { return Ok(Vec::new()) };
        let tests =
            if ask.failed { self.view.scheme.failed_again.unwrap_or_default() } else { self.view.scheme.pending };
        let pending = format!("{}{leave_out}", self.tests(tests, "t"));
        let statement = match self.view.scheme.claims() {
            true => self.claim_statement(table, &pending, ask.limit),
            false => self.page_statement(table, &pending, ask),
        };
        let messages = self.session.simple_query(&statement).await;
        let messages =
            messages.map_err(|error| classify_sql(&error, &format!("polling {}", table.catalog.quoted())))?;
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let claims = self.view.scheme.claims();
        let mut fresh: Vec<&SimpleQueryRow> = Vec::new();
        let (mut seen, mut last) = (0, None);
        for row in rows {
            if fresh.len() == ask.limit {
                break;
            }
            (seen, last) = (seen + 1, Some(row));
            if claims || !ask.ledger.is_under_way(ask.table, row.get(0).unwrap_or_default()) {
                fresh.push(row);
            }
        }
        let behind = 3 + self.wanted(table).len();
        if self.view.scheme.within.is_some() {
            let version = |row: &SimpleQueryRow| row.get(behind + 1).and_then(|text| text.parse().ok()).unwrap_or(0);
            let group = |row: &SimpleQueryRow| row.get(behind).unwrap_or_default().as_bytes().to_vec();
            let versions: Vec<_> = fresh.iter().map(|row| (group(row), version(row))).collect();
            fresh = by_version(&versions).into_iter().map(|at| fresh[at]).collect();
        }
        let mut claimed = Vec::with_capacity(fresh.len());
        for row in fresh {
            let number = |at: usize| row.get(at).and_then(|text| text.parse().ok());
            let id = row.get(0).unwrap_or_default().into();
            claimed.push(Claimed { id, attempts: number(1).unwrap_or(0), most: number(2) });
            add(table, &self.projection, row, ask.table, chunk);
        }
        if !claims {
            let full = seen >= ask.limit.max(self.page);
            let cut_short = claimed.len() == ask.limit;
            let cursor = last.filter(|_| full || cut_short).map(|row| {
                (0..self.view.order.len()).map(|at| row.get(behind + at).unwrap_or_default().to_owned()).collect()
            });
            self.cursors[ask.table as usize] = cursor;
        }
        Ok(claimed)
    }

    /// Whether a table was left in the middle.
    pub fn has_more(&self, table: u32) -> bool {
        self.cursors[table as usize].is_some()
    }

    pub fn begin_again(&mut self) {
        self.cursors.fill(None);
    }

    /// The wanted columns that the table has.
    fn wanted(&self, table: &Table) -> Vec<String> {
        let has = |name: &str| table.catalog.has(name);
        self.projection.columns().filter(|(_, name, _)| has(name)).map(|(_, name, _)| quote(name)).collect()
    }

    fn most_of(&self) -> String {
        self.view.scheme.own_most.map_or("NULL".to_owned(), |column| format!("t.{}", quote(&self.view.name(column))))
    }

    fn claim_statement(&self, table: &Table, pending: &str, limit: usize) -> String {
        let (name, id) = (table.catalog.quoted(), quote(&self.view.id));
        let order = self.order("t");
        let wanted: Vec<_> =
            self.wanted(table).iter().enumerate().map(|(at, column)| format!("t.{column} AS c{at}")).collect();
        let sorted: Vec<_> =
            self.view.order.iter().enumerate().map(|(at, column)| format!("t.{} AS o{at}", quote(column))).collect();
        let returned = [
            vec![
                format!("t.{id} AS id"),
                format!("t.{} AS attempts", quote(&self.view.name(self.view.scheme.attempts))),
            ],
            vec![format!("{} AS most", self.most_of())],
            wanted.clone(),
            sorted,
        ]
        .concat()
        .join(", ");
        let columns: Vec<_> = (0..wanted.len()).map(|at| format!(", c{at}")).collect();
        let by: Vec<_> = (0..self.view.order.len()).map(|at| format!("o{at}")).collect();
        let (returned_too, also) = match self.view.scheme.within {
            Some((group, version)) => {
                let column = |name: &str| format!("t.{}", quote(&self.view.name(name)));
                (format!(", {} AS g, {} AS v", column(group), column(version)), ", g, v")
            }
            None => (String::new(), ""),
        };
        format!(
            "WITH picked AS (SELECT t.{id} FROM {name} t WHERE {pending} ORDER BY {order} LIMIT {limit} FOR UPDATE SKIP LOCKED),
             taken AS (UPDATE {name} t SET {} FROM picked WHERE t.{id} = picked.{id} RETURNING {returned}{returned_too})
             SELECT id, attempts, most{}{also} FROM taken ORDER BY {}",
            self.sets(table, self.view.scheme.claim),
            columns.concat(),
            by.join(", "),
        )
    }

    fn page_statement(&self, table: &Table, pending: &str, ask: &Ask<'_>) -> String {
        let name = table.catalog.quoted();
        let after = match &self.cursors[ask.table as usize] {
            None => String::new(),
            Some(cursor) => {
                let columns: Vec<_> = self.view.order.iter().map(|column| format!("t.{}", quote(column))).collect();
                let values = cursor.iter().zip(&self.view.order);
                let values: Vec<_> =
                    values.map(|(value, column)| format!("{}::{}", literal(value), table.type_of(column))).collect();
                format!(" AND ({}) > ({})", columns.join(", "), values.join(", "))
            }
        };
        let wanted: Vec<_> = self.wanted(table).iter().map(|column| format!(", t.{column}")).collect();
        let order: Vec<_> = self.view.order.iter().map(|column| format!(", t.{}", quote(column))).collect();
        format!(
            "SELECT t.{}, t.{}, {}{}{} FROM {name} t WHERE {pending}{after} ORDER BY {} LIMIT {}",
            quote(&self.view.id),
            quote(&self.view.name(self.view.scheme.attempts)),
            self.most_of(),
            wanted.concat(),
            order.concat(),
            self.order("t"),
            // However little is wanted, what is on its way must be got past.
            ask.limit.max(self.page),
        )
    }

    fn order(&self, table: &str) -> String {
        self.view.order.iter().map(|column| format!("{table}.{}", quote(column))).collect::<Vec<_>>().join(", ")
    }

    /// The condition that leaves groups out which wait; `None` when nothing is left.
    fn leave_out(&self, table: &Table, excluded: &Exclusion) -> Option<String> {
        if excluded.keys.is_empty() {
            return Some(String::new());
        }
        let column = self.view.key.as_deref()?;
        let key = format!("t.{}", quote(column));
        // Of these the text is not what a record's key is.
        let kind = table.type_of(column);
        let differs = matches!(kind, "bytea" | "boolean" | "character") || kind.starts_with("character(");
        if excluded.keys.len() > MOST_KEYS || differs {
            return None;
        }
        let mut keys = Vec::new();
        let mut without = String::new();
        for excluded in &excluded.keys {
            match excluded {
                None => without = format!(" AND {key} IS NOT NULL"),
                Some(bytes) => keys.push(literal(std::str::from_utf8(bytes).ok()?)),
            }
        }
        match keys.is_empty() {
            true => Some(without),
            false => Some(format!(
                "{without} AND ({key} IS NULL OR {key}::text <> ALL (ARRAY[{}]::text[]))",
                keys.join(", ")
            )),
        }
    }

    pub(in crate::source) fn tests(&self, of: &[(&str, Test)], table: &str) -> String {
        tests(&self.view, of, table)
    }

    /// Sets a row done that has failed for good, if it still has; says whether it had.
    pub async fn settle(&self, table: u32, id: &str) -> Result<bool, SourceFailure> {
        let of = &self.tables[table as usize];
        let statement = format!(
            "UPDATE {} t SET {} WHERE t.{} = {}::{} AND {}",
            of.catalog.quoted(),
            self.sets(of, self.view.scheme.done),
            quote(&self.view.id),
            literal(id),
            of.type_of(&self.view.id),
            self.tests(self.view.scheme.failed, "t"),
        );
        let settled = self.session.execute(&statement, &[]).await;
        settled.map(|rows| rows > 0).map_err(|error| classify_sql(&error, &format!("marking {}", of.catalog.quoted())))
    }

    /// What is set; `v` has the reason and the pause of a row that was refused.
    pub(in crate::source) fn sets(&self, table: &Table, sets: Sets) -> String {
        // What marking merely clears need not be there.
        let there = sets.iter().filter(|(column, set)| *set != Set::Null || table.catalog.has(&self.view.name(column)));
        let written = there.map(|(column, set)| {
            let name = self.view.name(column);
            let cut = |text: &str| match most_characters(table.type_of(&name)) {
                Some(most) => format!("left({text}, {most})"),
                None => text.to_owned(),
            };
            let column = quote(&name);
            let value = match set {
                Set::Text(text) => literal(text),
                Set::Number(number) => number.to_string(),
                Set::Null => "NULL".to_owned(),
                Set::Now => "clock_timestamp()".to_owned(),
                Set::Worker => literal(&self.view.worker),
                Set::LeaseEnd => format!("clock_timestamp() + {}", lease(&self.view)),
                Set::OneMore => format!("coalesce(t.{column}, 0) + 1"),
                Set::AllTries => {
                    let most = self.view.scheme.own_most.map(|own| format!("t.{}", quote(&self.view.name(own))));
                    let most = format!("coalesce({}, {})", most.as_deref().unwrap_or("NULL"), self.view.most);
                    format!("greatest(coalesce(t.{column}, 0) + 1, {most})")
                }
                Set::Why => cut("v.why"),
                Set::Code => cut("v.code"),
                Set::NextTry => "clock_timestamp() + v.pause * interval '1 millisecond'".to_owned(),
            };
            format!("{column} = {value}")
        });
        written.collect::<Vec<_>>().join(", ")
    }

    /// Only what is still ours: somebody may have taken it over while we slept.
    fn still_ours(&self) -> String {
        let claimed = self.view.scheme.claimed;
        let by_worker = self.view.scheme.claim.iter().find(|(_, set)| *set == Set::Worker);
        let by_worker = by_worker
            .map(|(column, _)| format!(" AND t.{} = {}", quote(&self.view.name(column)), literal(&self.view.worker)));
        // Written so that no index on the status is taken for it: rows are found by their ids.
        let tests = claimed.iter().map(|(column, test)| match test {
            Test::Is(text) => format!(" AND t.{}::text || '' = {}", quote(&self.view.name(column)), literal(text)),
            _ => String::new(),
        });
        tests.collect::<String>() + &by_worker.unwrap_or_default()
    }

    /// Writes what became of a batch; returns the number of statements.
    pub async fn mark(&mut self, batch: &Batch) -> Result<u32, SourceFailure> {
        let mut statements = 0;
        let done = batch.done();
        if !done.is_empty() {
            self.set(batch.table, self.view.scheme.done, &done).await?;
            statements += 1;
        }
        let released = batch.released();
        if !released.is_empty() && !self.view.scheme.release.is_empty() {
            self.set(batch.table, self.view.scheme.release, &released).await?;
            statements += 1;
        }
        for (sets, rows) in [(self.view.scheme.retry, batch.retried()), (self.view.scheme.fail, batch.failed())] {
            if !rows.is_empty() {
                self.refused(batch.table, sets, &rows).await?;
                statements += 1;
            }
        }
        Ok(statements)
    }

    async fn set(&mut self, table: u32, sets: Sets, ids: &[&str]) -> Result<(), SourceFailure> {
        let of = &self.tables[table as usize];
        let statement = format!(
            "UPDATE {} t SET {} WHERE t.{} = ANY ($1::text[]::{}[]){}",
            of.catalog.quoted(),
            self.sets(of, sets),
            quote(&self.view.id),
            of.type_of(&self.view.id),
            self.still_ours(),
        );
        self.run(table, &statement, &[&ids]).await.map(|_| ())
    }

    async fn refused(&mut self, table: u32, sets: Sets, rows: &[Refused<'_>]) -> Result<(), SourceFailure> {
        let of = &self.tables[table as usize];
        let statement = format!(
            "UPDATE {} t SET {}
             FROM unnest($1::text[], $2::text[], $3::text[], $4::float8[], $5::bigint[]) AS v(id, why, code, pause, attempts)
             WHERE t.{} = v.id::{} AND coalesce(t.{}, 0) = v.attempts{}",
            of.catalog.quoted(),
            self.sets(of, sets),
            quote(&self.view.id),
            of.type_of(&self.view.id),
            quote(&self.view.name(self.view.scheme.attempts)),
            self.still_ours(),
        );
        let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
        let whys: Vec<_> = rows.iter().map(|row| row.why).collect();
        let codes: Vec<_> = rows.iter().map(|row| code(row.why)).collect();
        let pauses: Vec<_> = rows.iter().map(|row| row.pause.as_millis() as f64).collect();
        let attempts: Vec<_> = rows.iter().map(|row| i64::from(row.attempts)).collect();
        self.run(table, &statement, &[&ids, &whys, &codes, &pauses, &attempts]).await.map(|_| ())
    }

    /// Runs a statement that is planned once; says how many rows it touched.
    pub(in crate::source) async fn run(
        &mut self,
        table: u32,
        statement: &str,
        values: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<u64, SourceFailure> {
        let on = format!("marking rows of {}", self.tables[table as usize].catalog.quoted());
        let failed = |error: tokio_postgres::Error| classify_sql(&error, &on);
        if !self.prepared.contains_key(statement) {
            let prepared = self.session.prepare(statement).await.map_err(failed)?;
            self.prepared.insert(statement.to_owned(), prepared);
        }
        let Some(prepared) = self.prepared.get(statement) else { return Ok(0) };
        self.session.execute(prepared, values).await.map_err(failed)
    }

    /// Gives back what somebody has claimed: all of it, or what the lease has ended for.
    pub async fn recover(&mut self, all: bool) -> Result<u64, SourceFailure> {
        let scheme = self.view.scheme;
        if !scheme.claims() {
            return Ok(0);
        }
        let mut recovered = 0;
        for table in self.tables.iter() {
            let ended = if all { String::new() } else { format!(" AND {}", self.tests(scheme.expired, "t")) };
            let (name, sets) = (table.catalog.quoted(), self.sets(table, scheme.release));
            let statement = format!("UPDATE {name} t SET {sets} WHERE {}{ended}", self.tests(scheme.claimed, "t"));
            let given_back = self.session.execute(&statement, &[]).await;
            recovered += given_back.map_err(|error| classify_sql(&error, &format!("giving back rows of {name}")))?;
        }
        Ok(recovered)
    }

    /// Groups whose rows wait, and how long.
    pub async fn waiting(&mut self) -> Result<Vec<Waits>, SourceFailure> {
        let Some(next_try) = self.view.scheme.next_try else { return Ok(Vec::new()) };
        let next_try = format!("t.{}", quote(&self.view.name(next_try)));
        let key = self.view.key.as_deref().map_or("NULL".to_owned(), |key| format!("t.{}", quote(key)));
        let mut waiting = Vec::new();
        for (at, table) in self.tables.iter().enumerate() {
            let statement = format!(
                "SELECT {key}::text, max(extract(epoch FROM {next_try} - clock_timestamp()))::float8 FROM {} t
                 WHERE {} AND {next_try} > clock_timestamp() GROUP BY 1",
                table.catalog.quoted(),
                self.tests(self.view.scheme.pending, "t"),
            );
            let rows = self.session.query(&statement, &[]).await.map_err(|error| self.session.classify(&error))?;
            for row in rows {
                let (key, seconds): (Option<String>, f64) = (row.get(0), row.get(1));
                waiting.push((at as u32, key.map(String::into_bytes), Duration::from_secs_f64(seconds.max(0.0))));
            }
        }
        Ok(waiting)
    }

    pub async fn renew(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        let ids: Vec<&str> = ids.iter().map(|id| &**id).collect();
        self.set(table, self.view.scheme.renew, &ids).await
    }

    pub async fn give_back(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        if self.view.scheme.release.is_empty() {
            return Ok(());
        }
        let ids: Vec<&str> = ids.iter().map(|id| &**id).collect();
        self.set(table, self.view.scheme.release, &ids).await
    }

    /// Counts what is pending, as far as it is worth counting.
    pub async fn look(&mut self, most: u64, stats: &SourceStats) -> Result<(), SourceFailure> {
        let mut depth = 0;
        for table in self.tables.iter() {
            let (name, pending) = (table.catalog.quoted(), self.tests(self.view.scheme.pending, "t"));
            let statement =
                format!("SELECT count(*) FROM (SELECT 1 FROM {name} t WHERE {pending} LIMIT {most}) AS counted");
            let row = self.session.query_one(&statement, &[]).await.map_err(|error| self.session.classify(&error))?;
            depth += row.get::<_, i64>(0).cast_unsigned();
        }
        stats.set_depth(depth);
        Ok(())
    }

    /// Hears of new rows, where the tables have the trigger.
    pub async fn listen(&self, ledger: Arc<Ledger>) -> Result<(), SourceFailure> {
        self.session.on_notification(move || ledger.changed.notify_one());
        for table in self.tables.iter() {
            let channel = quote(&channel(&table.catalog.schema, &table.catalog.name));
            let listening = self.session.batch_execute(&format!("LISTEN {channel}")).await;
            listening.map_err(|error| self.session.classify(&error))?;
        }
        Ok(())
    }
}

fn lease(view: &View) -> String {
    format!("interval '{} milliseconds'", view.lease.as_millis())
}

/// How often a row may fail.
fn most(view: &View, table: &str) -> String {
    match view.scheme.own_most {
        Some(own) => format!("coalesce({table}.{}, {})", quote(&view.name(own)), view.most),
        None => view.most.to_string(),
    }
}

/// Conditions as SQL writes them.
pub(in crate::source) fn tests(view: &View, tests: &[(&str, Test)], table: &str) -> String {
    let written = tests.iter().map(|(column, test)| {
        let column = format!("{table}.{}", quote(&view.name(column)));
        match test {
            Test::Is(text) => format!("{column} = {}", literal(text)),
            Test::IsNumber(number) => format!("{column} = {number}"),
            Test::IsNull => format!("{column} IS NULL"),
            Test::NoneOf(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| literal(text)).collect();
                format!("({column} IN ({})) IS NOT TRUE", texts.join(", "))
            }
            Test::NotNumber(number) => format!("{column} IS DISTINCT FROM {number}"),
            Test::BelowMost => format!("coalesce({column}, 0) < {}", most(view, table)),
            Test::Exhausted => format!("coalesce({column}, 0) >= {}", most(view, table)),
            Test::Past => format!("({column} IS NULL OR {column} < clock_timestamp())"),
            Test::LeasePast => {
                format!("({column} IS NULL OR {column} < clock_timestamp() - {})", lease(view))
            }
        }
    });
    written.collect::<Vec<_>>().join(" AND ")
}

/// The channel that the trigger of a table notifies: at most 63 bytes.
pub fn channel(schema: &str, table: &str) -> String {
    let name = format!("outboxd_{schema}_{table}");
    match name.len() <= 63 {
        true => name,
        false => format!("outboxd_{:016x}", lock_key(&name)),
    }
}

pub async fn try_lock(session: &SqlSession, key: i64) -> Result<bool, SourceFailure> {
    let row = session.query_one("SELECT pg_catalog.pg_try_advisory_lock($1)", &[&key]).await;
    row.map(|row| row.get(0)).map_err(|error| session.classify(&error))
}

/// Has the server let a leader go that is cut off: by itself it would wait for hours for a connection of which nobody told
/// it that it is gone.
pub async fn let_go_when_silent(session: &SqlSession) -> Result<(), SourceFailure> {
    let silent = format!("SET idle_session_timeout = '{}s'", SILENT_LEADER.as_secs());
    session.batch_execute(&silent).await.map_err(|error| session.classify(&error))
}

/// Which lock stands for a name.
pub fn lock_key(name: &str) -> i64 {
    let digest = ring::digest::digest(&ring::digest::SHA256, format!("outboxd poll {name}").as_bytes());
    let mut key = [0; 8];
    key.copy_from_slice(&digest.as_ref()[..8]);
    i64::from_be_bytes(key)
}

pub fn lacks(table: &str, column: &str) -> SourceFailure {
    SourceFailure::NotReady {
        what: format!("{table} has no `{column}`, which polling needs"),
        remedy: "add the layout's status columns (`outboxd init --capture poll --dry-run` prints them), or use --capture log"
            .to_owned(),
    }
}

fn add(table: &Table, projection: &Projection, row: &SimpleQueryRow, of: u32, chunk: &mut Chunk) {
    chunk.push_event(of);
    let mut at = 3;
    for (slot, name, want) in projection.columns() {
        let Some((_, type_oid)) = table.catalog.columns.iter().find(|(column, _)| column == name) else { continue };
        if set_field(slot, *type_oid, want, row.get(at), chunk).is_err() {
            let why = format!("column `{name}` of {}: its value has an unknown form", table.catalog.quoted());
            chunk.mark_defective(why, Field::Null);
        }
        at += 1;
    }
}
