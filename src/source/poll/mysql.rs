//! Polling MySQL and MariaDB: the statements, and the session that holds the lock.
//!
//! A claim is a transaction: rows are picked in order and locked, past those that others hold, set, and committed. It
//! reads committed rows only, so that no gap is locked and nobody's insert waits.

use std::sync::Arc;
use std::time::Duration;

use super::ledger::{Batch, Claimed, Exclusion, Refused};
use super::postgres::lacks;
use super::view::{MOST_KEYS, View, by_version, code, most_characters};
use super::{Ask, Waits};
use crate::config::MySqlSettings;
use crate::event::{Chunk, Projection, Want};
use crate::route::polling::{Set, Sets, Test};
use crate::source::mysql::conninfo::ConnInfo;
use crate::source::mysql::privileges::{self, Right};
use crate::source::mysql::session::{Row, Session, literal, quote};
use crate::source::mysql::snapshot::set_field;
use crate::source::mysql::tables::{self, CatalogTable};
use crate::source::mysql::{self, checkpoint, judge, keeper, refuse};
use crate::source::{SourceFailure, SourceStats};

pub struct MyStore {
    pub session: Session,
    info: ConnInfo,
    pub view: Arc<View>,
    pub tables: Arc<Vec<CatalogTable>>,
    pub uuid_columns: Vec<String>,
    projection: Projection,
    /// Where each table was left, where a claim leaves no trace.
    cursors: Vec<Option<Vec<Vec<u8>>>>,
}

const NOW: &str = "utc_timestamp(6)";

impl MyStore {
    pub async fn open(settings: &MySqlSettings, view: View, projection: &Projection) -> Result<Self, SourceFailure> {
        let store = MyStore::find(settings, view, projection).await?;
        for table in store.tables.iter() {
            if let Some(column) = store.view.needed().iter().find(|column| !table.has(column)) {
                return Err(lacks(&table.quoted(), column));
            }
        }
        Ok(store)
    }

    /// Whatever columns the tables have.
    pub async fn find(settings: &MySqlSettings, view: View, projection: &Projection) -> Result<Self, SourceFailure> {
        let info = mysql::conninfo(settings)?;
        let database = checkpoint::database(&info)?.to_owned();
        let mut session = mysql::connect(settings, &info).await?;
        let info = ConnInfo { hosts: vec![session.host().clone()], ..info };
        prepare(&mut session).await?;
        let (catalog, missing) = tables::find(&mut session, &database, &settings.tables).await?;
        refuse(judge::missing_tables(&missing, &database))?;
        refuse(tables::missing_columns(&catalog, projection))?;
        let cursors = vec![None; catalog.len()];
        let uuid_columns = settings.uuid_columns.clone();
        let (view, tables, projection) = (Arc::new(view), Arc::new(catalog), projection.clone());
        Ok(MyStore { session, info, view, tables, uuid_columns, projection, cursors })
    }

    pub async fn another(&self) -> Result<Self, SourceFailure> {
        let mut session = Session::another(&self.info).await?;
        prepare(&mut session).await?;
        Ok(MyStore {
            session,
            info: self.info.clone(),
            view: self.view.clone(),
            tables: self.tables.clone(),
            uuid_columns: self.uuid_columns.clone(),
            projection: self.projection.clone(),
            cursors: self.cursors.clone(),
        })
    }

    pub fn describe(&self) -> String {
        self.session.describe()
    }

    pub fn tables(&self) -> usize {
        self.tables.len()
    }

    pub async fn lead(&mut self) -> Result<(), SourceFailure> {
        let tables = self.tables.clone();
        for table in tables.iter() {
            keeper::take_lock(&mut self.session, &table.schema, &format!("poll/{}", table.name)).await?;
        }
        Ok(())
    }

    pub async fn wait_for_lead(&mut self) -> Result<(), SourceFailure> {
        let tables = self.tables.clone();
        for table in tables.iter() {
            keeper::wait_for_lock(&mut self.session, &table.schema, &format!("poll/{}", table.name)).await?;
        }
        Ok(())
    }

    pub async fn lacking(&mut self) -> Result<Vec<String>, SourceFailure> {
        let (tables, mut lacking) = (self.tables.clone(), Vec::new());
        let account = privileges::account(&mut self.session).await?;
        for table in tables.iter() {
            for right in
                privileges::lacking(&mut self.session, &table.quoted(), &[Right::Select, Right::Update]).await?
            {
                lacking.push(format!("GRANT {} ON {} TO {account}", right.name(), table.quoted()));
            }
        }
        Ok(lacking)
    }

    pub async fn beat(&mut self) -> Result<(), SourceFailure> {
        self.session.execute("DO 1").await
    }

    pub async fn claim(
        &mut self,
        ask: &Ask<'_>,
        excluded: &Exclusion,
        chunk: &mut Chunk,
    ) -> Result<Vec<Claimed>, SourceFailure> {
        let tables = self.tables.clone();
        let table = &tables[ask.table as usize];
        let Some(leave_out) = self.leave_out(table, excluded) else { return Ok(Vec::new()) };
        let scheme = self.view.scheme;
        let tests = if ask.failed { scheme.failed_again.unwrap_or_default() } else { scheme.pending };
        let pending = format!("{}{leave_out}", self.tests(tests));
        let columns: Vec<_> = self.projection.columns().filter(|(_, name, _)| table.has(name)).collect();
        let statement = self.select(table, &columns, &pending, ask);
        if scheme.claims() {
            self.session.execute("START TRANSACTION").await?;
        }
        let rows = self.session.query(&statement).await?;
        let id_in = |row: &Row| value_of(table, &self.view.id, row.bytes(0).unwrap_or_default());
        let mut fresh: Vec<&Row> = Vec::new();
        let mut seen = 0;
        for row in &rows {
            if fresh.len() == ask.limit {
                break;
            }
            seen += 1;
            if scheme.claims() || !ask.ledger.is_under_way(ask.table, &id_in(row)) {
                fresh.push(row);
            }
        }
        if scheme.within.is_some() {
            let at = 3 + columns.len();
            let versions: Vec<_> = fresh
                .iter()
                .map(|row| {
                    let version = row.text(at + 1).and_then(|text| text.parse().ok()).unwrap_or(0);
                    (row.bytes(at).unwrap_or_default().to_vec(), version)
                })
                .collect();
            fresh = by_version(&versions).into_iter().map(|at| fresh[at]).collect();
        }
        let mut claimed = Vec::with_capacity(fresh.len());
        for row in fresh {
            let number = |at: usize| row.text(at).and_then(|text| text.parse().ok());
            claimed.push(Claimed { id: id_in(row), attempts: number(1).unwrap_or(0), most: number(2) });
            chunk.push_event(ask.table);
            for (at, (slot, name, want)) in columns.iter().enumerate() {
                let as_uuid = self.uuid_columns.iter().any(|column| column.eq_ignore_ascii_case(name));
                set_field(chunk, *slot, *want, row.bytes(3 + at), as_uuid);
            }
        }
        match scheme.claims() {
            true => {
                if !claimed.is_empty() {
                    let ids: Vec<&str> = claimed.iter().map(|row| &*row.id).collect();
                    let update = format!(
                        "UPDATE {} SET {} WHERE {} IN ({})",
                        table.quoted(),
                        self.sets(table, scheme.claim, &[]),
                        quote(&self.view.id),
                        ids.join(", ")
                    );
                    self.session.execute(&update).await?;
                }
                self.session.execute("COMMIT").await?;
            }
            false => {
                let more = seen >= ask.limit.max(self.view.batch) || claimed.len() == ask.limit;
                let last = rows[..seen].last().filter(|_| more);
                self.cursors[ask.table as usize] = last.map(|row: &Row| {
                    let first = 3 + columns.len();
                    (0..self.view.order.len()).map(|at| row.bytes(first + at).unwrap_or_default().to_vec()).collect()
                });
            }
        }
        Ok(claimed)
    }

    pub fn has_more(&self, table: u32) -> bool {
        self.cursors[table as usize].is_some()
    }

    pub fn begin_again(&mut self) {
        self.cursors.fill(None);
    }

    fn select(&self, table: &CatalogTable, columns: &[(usize, &str, Want)], pending: &str, ask: &Ask<'_>) -> String {
        let view = &self.view;
        let most = view.scheme.own_most.map_or("NULL".to_owned(), |column| quote(&view.name(column)));
        let mut wanted = vec![quote(&view.id), quote(&view.name(view.scheme.attempts)), most];
        wanted.extend(columns.iter().map(|(_, name, want)| match want {
            Want::Text | Want::Key => quote(name),
            Want::Time => format!("TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', {})", quote(name)),
        }));
        let order: Vec<_> = view.order.iter().map(|column| quote(column)).collect();
        let (claims, mut after) = (view.scheme.claims(), String::new());
        if let Some((group, version)) = view.scheme.within {
            wanted.extend([quote(&view.name(group)), quote(&view.name(version))]);
        }
        if !claims {
            wanted.extend(order.iter().cloned());
            if let Some(cursor) = &self.cursors[ask.table as usize] {
                let values = cursor.iter().zip(&view.order);
                let values: Vec<_> = values.map(|(value, column)| value_of(table, column, value)).collect();
                after = format!(" AND {}", beyond(&order, &values));
            }
        }
        let lock = if claims { " FOR UPDATE SKIP LOCKED" } else { "" };
        format!(
            "SELECT {} FROM {} WHERE {pending}{after} ORDER BY {} LIMIT {}{lock}",
            wanted.join(", "),
            table.quoted(),
            order.join(", "),
            // However little is wanted, what is on its way must be got past.
            if claims { ask.limit } else { ask.limit.max(view.batch) }
        )
    }

    fn leave_out(&self, table: &CatalogTable, excluded: &Exclusion) -> Option<String> {
        if excluded.keys.is_empty() {
            return Some(String::new());
        }
        let column = self.view.key.as_deref()?;
        let uuid = self.uuid_columns.iter().any(|uuid| uuid.eq_ignore_ascii_case(column));
        if excluded.keys.len() > MOST_KEYS || uuid || table.column(column).is_none() {
            return None;
        }
        let key = quote(column);
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
            // A collation may take more for equal than we do: then more waits.
            false => Some(format!("{without} AND ({key} IS NULL OR {key} NOT IN ({}))", keys.join(", "))),
        }
    }

    pub(in crate::source) fn tests(&self, of: &[(&str, Test)]) -> String {
        tests(&self.view, of)
    }

    /// Sets a row done that has failed for good, if it still has; says whether it had.
    pub async fn settle(&mut self, table: u32, id: &str) -> Result<bool, SourceFailure> {
        let tables = self.tables.clone();
        let of = &tables[table as usize];
        let as_uuid = self.uuid_columns.iter().any(|column| column.eq_ignore_ascii_case(&self.view.id));
        let hex: String = id.chars().filter(|c| *c != '-').collect();
        let id = match as_uuid && hex.len() == 32 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            true => format!("x'{hex}'").into(),
            false => value_of(of, &self.view.id, id.as_bytes()),
        };
        let statement = format!(
            "UPDATE {} SET {} WHERE {} = {id} AND {}",
            of.quoted(),
            self.sets(of, self.view.scheme.done, &[]),
            quote(&self.view.id),
            self.tests(self.view.scheme.failed),
        );
        self.session.execute(&statement).await?;
        Ok(self.session.query_one("SELECT ROW_COUNT()").await?.number(0) > 0)
    }

    /// What is set; `refused` are the rows with their reasons and pauses.
    pub(in crate::source) fn sets(&self, table: &CatalogTable, sets: Sets, refused: &[Refused<'_>]) -> String {
        let by_row = |value: &dyn Fn(&Refused<'_>) -> String| self.by_row(refused, value);
        // What marking merely clears need not be there.
        let there = sets.iter().filter(|(column, set)| *set != Set::Null || table.has(&self.view.name(column)));
        let written = there.map(|(column, set)| {
            let name = self.view.name(column);
            let kind = table.column(&name).map_or("", |column| column.column_type.as_str());
            // Longer than any message that helps; a column of text takes 65,535 bytes.
            let most = most_characters(kind).unwrap_or(10_000);
            let cut = |text: &str| literal(&text.chars().take(most).collect::<String>());
            let column = quote(&name);
            let value = match set {
                Set::Text(text) => literal(text),
                Set::Number(number) => number.to_string(),
                Set::Null => "NULL".to_owned(),
                Set::Now => NOW.to_owned(),
                Set::Worker => literal(&self.view.worker),
                Set::LeaseEnd => format!("{NOW} + INTERVAL {} SECOND", seconds(self.view.lease)),
                Set::OneMore => format!("coalesce({column}, 0) + 1"),
                Set::AllTries => {
                    let most = self.view.scheme.own_most.map(|own| quote(&self.view.name(own)));
                    let most = format!("coalesce({}, {})", most.as_deref().unwrap_or("NULL"), self.view.most);
                    format!("greatest(coalesce({column}, 0) + 1, {most})")
                }
                Set::Why => by_row(&|row| cut(row.why)),
                Set::Code => by_row(&|row| cut(code(row.why))),
                Set::NextTry => by_row(&|row| format!("{NOW} + INTERVAL {} SECOND", seconds(row.pause))),
            };
            format!("{column} = {value}")
        });
        written.collect::<Vec<_>>().join(", ")
    }

    fn by_row(&self, refused: &[Refused<'_>], value: &dyn Fn(&Refused<'_>) -> String) -> String {
        let cases: Vec<_> = refused.iter().map(|row| format!("WHEN {} THEN {}", row.id, value(row))).collect();
        format!("CASE {} {} END", quote(&self.view.id), cases.join(" "))
    }

    fn still_ours(&self) -> String {
        let claimed = self.view.scheme.claimed;
        let by_worker = self.view.scheme.claim.iter().find(|(_, set)| *set == Set::Worker);
        let by_worker = by_worker
            .map(|(column, _)| format!(" AND {} = {}", quote(&self.view.name(column)), literal(&self.view.worker)));
        match claimed.is_empty() {
            true => String::new(),
            false => format!(" AND {}{}", self.tests(claimed), by_worker.unwrap_or_default()),
        }
    }

    pub async fn mark(&mut self, batch: &Batch) -> Result<u32, SourceFailure> {
        let scheme = self.view.scheme;
        let plain: [(Sets, Vec<&str>); 2] = [(scheme.done, batch.done()), (scheme.release, batch.released())];
        let refused: [(Sets, Vec<_>); 2] = [(scheme.retry, batch.retried()), (scheme.fail, batch.failed())];
        let mut statements = 0;
        for (sets, ids) in plain {
            if !ids.is_empty() && !sets.is_empty() {
                self.set(batch.table, sets, &ids, &[]).await?;
                statements += 1;
            }
        }
        for (sets, rows) in refused {
            if !rows.is_empty() {
                let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
                self.set(batch.table, sets, &ids, &rows).await?;
                statements += 1;
            }
        }
        Ok(statements)
    }

    async fn set(
        &mut self,
        table: u32,
        sets: Sets,
        ids: &[&str],
        refused: &[Refused<'_>],
    ) -> Result<(), SourceFailure> {
        let once = match refused.is_empty() {
            true => String::new(),
            // What was written already, by a connection that died before it said so, is not counted again.
            false => {
                let attempts = quote(&self.view.name(self.view.scheme.attempts));
                format!(" AND coalesce({attempts}, 0) = {}", self.by_row(refused, &|row| row.attempts.to_string()))
            }
        };
        let statement = format!(
            "UPDATE {} SET {} WHERE {} IN ({}){once}{}",
            self.tables[table as usize].quoted(),
            self.sets(&self.tables[table as usize], sets, refused),
            quote(&self.view.id),
            ids.join(", "),
            self.still_ours(),
        );
        self.session.execute(&statement).await
    }

    pub async fn recover(&mut self, all: bool) -> Result<u64, SourceFailure> {
        let scheme = self.view.scheme;
        if !scheme.claims() {
            return Ok(0);
        }
        let tables = self.tables.clone();
        let mut recovered = 0;
        for table in tables.iter() {
            let ended = if all { String::new() } else { format!(" AND {}", self.tests(scheme.expired)) };
            let (sets, claimed) = (self.sets(table, scheme.release, &[]), self.tests(scheme.claimed));
            self.session.execute(&format!("UPDATE {} SET {sets} WHERE {claimed}{ended}", table.quoted())).await?;
            recovered += self.session.query_one("SELECT ROW_COUNT()").await?.number(0);
        }
        Ok(recovered)
    }

    pub async fn waiting(&mut self) -> Result<Vec<Waits>, SourceFailure> {
        let Some(next_try) = self.view.scheme.next_try else { return Ok(Vec::new()) };
        let next_try = quote(&self.view.name(next_try));
        let key = self.view.key.as_deref().map_or("NULL".to_owned(), quote);
        let (tables, mut waiting) = (self.tables.clone(), Vec::new());
        for (at, table) in tables.iter().enumerate() {
            let pending = self.tests(self.view.scheme.pending);
            let statement = format!(
                "SELECT {key}, max(TIMESTAMPDIFF(MICROSECOND, {NOW}, {next_try})) FROM {}
                 WHERE {pending} AND {next_try} > {NOW} GROUP BY 1",
                table.quoted()
            );
            for row in self.session.query(&statement).await? {
                let key = row.bytes(0).map(<[u8]>::to_vec);
                waiting.push((at as u32, key, Duration::from_micros(row.number(1))));
            }
        }
        Ok(waiting)
    }

    pub async fn renew(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        let ids: Vec<&str> = ids.iter().map(|id| &**id).collect();
        self.set(table, self.view.scheme.renew, &ids, &[]).await
    }

    pub async fn give_back(&mut self, table: u32, ids: &[Box<str>]) -> Result<(), SourceFailure> {
        if self.view.scheme.release.is_empty() {
            return Ok(());
        }
        let ids: Vec<&str> = ids.iter().map(|id| &**id).collect();
        self.set(table, self.view.scheme.release, &ids, &[]).await
    }

    pub async fn look(&mut self, most: u64, stats: &SourceStats) -> Result<(), SourceFailure> {
        let tables = self.tables.clone();
        let mut depth = 0;
        for table in tables.iter() {
            let pending = self.tests(self.view.scheme.pending);
            let counted = format!("SELECT 1 FROM {} WHERE {pending} LIMIT {most}", table.quoted());
            depth += self.session.query_one(&format!("SELECT count(*) FROM ({counted}) AS counted")).await?.number(0);
        }
        stats.set_depth(depth);
        Ok(())
    }
}

/// How often a row may fail.
fn most(view: &View) -> String {
    match view.scheme.own_most {
        Some(own) => format!("coalesce({}, {})", quote(&view.name(own)), view.most),
        None => view.most.to_string(),
    }
}

/// Conditions as the server takes them.
pub(in crate::source) fn tests(view: &View, tests: &[(&str, Test)]) -> String {
    let written = tests.iter().map(|(column, test)| {
        let column = quote(&view.name(column));
        match test {
            Test::Is(text) => format!("{column} = {}", literal(text)),
            Test::IsNumber(number) => format!("{column} = {number}"),
            Test::IsNull => format!("{column} IS NULL"),
            Test::NoneOf(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| literal(text)).collect();
                format!("({column} IN ({})) IS NOT TRUE", texts.join(", "))
            }
            Test::NotNumber(number) => format!("NOT ({column} <=> {number})"),
            Test::BelowMost => format!("coalesce({column}, 0) < {}", most(view)),
            Test::Exhausted => format!("coalesce({column}, 0) >= {}", most(view)),
            Test::Past => format!("({column} IS NULL OR {column} < {NOW})"),
            Test::LeasePast => {
                format!("({column} IS NULL OR {column} < {NOW} - INTERVAL {} SECOND)", seconds(view.lease))
            }
        }
    });
    written.collect::<Vec<_>>().join(" AND ")
}

async fn prepare(session: &mut Session) -> Result<(), SourceFailure> {
    session.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await
}

fn seconds(duration: Duration) -> String {
    format!("{:.3}", duration.as_secs_f64())
}

/// A column's value as SQL takes it: a number as it is, anything else as a text or as bytes.
pub fn value_of(table: &CatalogTable, column: &str, bytes: &[u8]) -> Box<str> {
    let kind = table.column(column).map_or("", |column| column.data_type.as_str());
    let numeric = ["int", "decimal", "float", "double"].iter().any(|part| kind.to_ascii_lowercase().contains(part));
    match std::str::from_utf8(bytes) {
        Ok(text) if numeric => text.into(),
        Ok(text) => literal(text).into(),
        Err(_) => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("x'{hex}'").into()
        }
    }
}

/// Beyond a row in an order, in a form of which the server can make a range.
fn beyond(columns: &[String], values: &[Box<str>]) -> String {
    match (columns, values) {
        ([column], [value, ..]) => format!("{column} > {value}"),
        ([column, columns @ ..], [value, values @ ..]) => {
            format!("({column} >= {value} AND ({column} > {value} OR {}))", beyond(columns, values))
        }
        _ => "TRUE".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_numbers_texts_or_bytes() {
        let column = |name: &str, kind: &str| tables::CatalogColumn {
            name: name.to_owned(),
            data_type: kind.to_owned(),
            column_type: kind.to_owned(),
        };
        let columns = vec![column("id", "bigint"), column("code", "varchar"), column("raw", "binary")];
        let table = CatalogTable { schema: "s".to_owned(), name: "t".to_owned(), columns };
        assert_eq!(&*value_of(&table, "id", b"42"), "42");
        assert_eq!(&*value_of(&table, "code", b"42"), "'42'");
        assert_eq!(&*value_of(&table, "raw", b"\xff\x00"), "x'ff00'");
    }

    #[test]
    fn a_page_goes_on_behind_the_last_row() {
        let columns = ["a", "b"].map(str::to_owned);
        let values = ["'x'", "7"].map(Box::from);
        assert_eq!(beyond(&columns, &values), "(a >= 'x' AND (a > 'x' OR b > 7))");
    }
}
