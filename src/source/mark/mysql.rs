//! Marking rows of MySQL and MariaDB.
//!
//! A commit is in the log, and with the broker, before its rows are committed in the storage engine. They are locked until
//! then, and a statement that looks for each by its unique id waits for them; one that scans under READ COMMITTED passes over
//! them. So the statement is held to the index, and where there is none, to an isolation that passes over nothing.

use std::time::Duration;

use super::lacking;
use crate::config::{CheckpointPlace, MySqlSettings};
use crate::event::Projection;
use crate::route::polling::Test;
use crate::source::SourceFailure;
use crate::source::mysql::privileges;
use crate::source::mysql::server;
use crate::source::mysql::server_error::WireError;
use crate::source::mysql::session::{Session, literal, quote};
use crate::source::mysql::setup::status_column;
use crate::source::mysql::tables::CatalogTable;
use crate::source::poll::View;
use crate::source::poll::ledger::Refused;
use crate::source::poll::mysql::{MyStore, value_of};

pub struct MyMarks {
    store: MyStore,
    /// The unique index on the id of each table.
    indexes: Vec<Option<String>>,
}

impl MyMarks {
    pub async fn find(settings: &MySqlSettings, view: View) -> Result<Self, SourceFailure> {
        // Of several servers it is the one that can be written to, wherever the checkpoint is.
        let settings = MySqlSettings { checkpoint: CheckpointPlace::Source, ..settings.clone() };
        let mut store = MyStore::find(&settings, view, &Projection::default()).await?;
        let (tables, mut indexes) = (store.tables.clone(), Vec::new());
        for table in tables.iter() {
            indexes.push(unique_index(&mut store.session, table, &store.view.id).await?);
        }
        if indexes.iter().any(Option::is_none) {
            store.session.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ").await?;
        }
        Ok(MyMarks { store, indexes })
    }

    /// Everything that stands in the way.
    pub async fn wrong(&mut self, layout: &str) -> Result<Vec<SourceFailure>, SourceFailure> {
        let mut wrong = Vec::new();
        if server::is_read_only(&mut self.store.session).await? {
            wrong.push(SourceFailure::NotReady {
                what: format!("{} is read-only, so that rows cannot be marked", self.store.describe()),
                remedy: "connect to the primary, or run without --mark".to_owned(),
            });
        }
        let account = privileges::account(&mut self.store.session).await?;
        let tables = self.store.tables.clone();
        for table in tables.iter() {
            let needed = self.store.view.needed();
            let missing: Vec<_> = needed.iter().map(String::as_str).filter(|column| !table.has(column)).collect();
            let defined = |column: &str| {
                status_column(layout, column).unwrap_or_else(|| format!("{} DATETIME(6)", quote(column)))
            };
            let also = "; rows that were delivered before are then to be marked by hand, where that matters";
            let name = table.quoted();
            let lacking = lacking(&name, layout, &missing, defined, also);
            if lacking.is_some() {
                wrong.extend(lacking);
                continue;
            }
            // The server is asked about the very statements, which are prepared and never executed.
            let none = Refused { id: "NULL", attempts: 0, why: "", pause: Duration::ZERO };
            for statement in [self.done_statement(table, &["NULL"]), self.parked_statement(table, &[none])] {
                self.store.session.execute(&format!("SET @outboxd = {}", literal(&statement))).await?;
                match self.store.session.try_query("PREPARE outboxd_mark FROM @outboxd").await {
                    Ok(_) => {}
                    Err(WireError::Server { code: 1044 | 1142 | 1143, message }) => {
                        wrong.push(SourceFailure::NotReady {
                            what: format!("rows of {name} cannot be marked: {message}"),
                            remedy: format!("GRANT SELECT, UPDATE ON {name} TO {account}; as an administrator"),
                        });
                        break;
                    }
                    Err(error) => return Err(self.store.session.classify(error)),
                }
            }
        }
        Ok(wrong)
    }

    /// What holds of rows that are not marked, so written that no index of it is taken: rows are found by their ids.
    fn tests(&self, tests: &[(&str, Test)]) -> String {
        let written = tests.iter().map(|one| match one {
            (column, Test::IsNull) => format!("IF({} IS NULL, 1, 0) = 1", quote(&self.store.view.name(column))),
            other => self.store.tests(&[*other]),
        });
        written.collect::<Vec<_>>().join(" AND ")
    }

    fn done_statement(&self, table: &CatalogTable, ids: &[impl AsRef<str>]) -> String {
        let scheme = self.store.view.scheme;
        self.statement(table, &self.store.sets(table, scheme.done, &[]), ids, &self.tests(scheme.unmarked))
    }

    fn parked_statement(&self, table: &CatalogTable, rows: &[Refused<'_>]) -> String {
        let scheme = self.store.view.scheme;
        let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
        self.statement(table, &self.store.sets(table, scheme.parked, rows), &ids, &self.tests(scheme.open))
    }

    fn statement(&self, table: &CatalogTable, sets: &str, ids: &[impl AsRef<str>], tests: &str) -> String {
        let ids: Vec<_> = ids.iter().map(AsRef::as_ref).collect();
        let (id, name) = (quote(&self.store.view.id), table.quoted());
        let at = self.store.tables.iter().position(|known| known.quoted() == name);
        let index = at.and_then(|at| self.indexes[at].as_deref());
        let forced = index.map(|index| format!(" FORCE INDEX ({})", quote(index))).unwrap_or_default();
        format!("UPDATE {name}{forced} SET {sets} WHERE {id} IN ({}) AND {tests}", ids.join(", "))
    }

    /// An id as SQL takes it.
    fn id(&self, table: &CatalogTable, id: &[u8]) -> Box<str> {
        let name = &self.store.view.id;
        let binary = table.column(name).filter(|column| column.data_type.eq_ignore_ascii_case("binary"));
        let Some(column) = binary else { return value_of(table, name, id) };
        let as_uuid = self.store.uuid_columns.iter().any(|uuid| uuid.eq_ignore_ascii_case(name));
        match uuid_digits(id).filter(|_| as_uuid) {
            Some(hex) => format!("x'{hex}'").into(),
            None => binary_literal(id, &column.column_type).into(),
        }
    }

    pub async fn mark(&mut self, table: u32, ids: &[&[u8]]) -> Result<u64, SourceFailure> {
        let tables = self.store.tables.clone();
        let of = &tables[table as usize];
        let ids: Vec<_> = ids.iter().map(|id| self.id(of, id)).collect();
        self.store.session.execute(&self.done_statement(of, &ids)).await?;
        Ok(self.store.session.affected())
    }

    pub async fn mark_parked(&mut self, table: u32, rows: &[(&[u8], &str)]) -> Result<u64, SourceFailure> {
        let tables = self.store.tables.clone();
        let of = &tables[table as usize];
        let ids: Vec<_> = rows.iter().map(|(id, _)| self.id(of, id)).collect();
        let pause = Duration::ZERO;
        let rows: Vec<_> = ids.iter().zip(rows).map(|(id, (_, why))| Refused { id, attempts: 0, why, pause }).collect();
        self.store.session.execute(&self.parked_statement(of, &rows)).await?;
        Ok(self.store.session.affected())
    }
}

/// The index that has the column alone, and each value once.
async fn unique_index(
    session: &mut Session,
    table: &CatalogTable,
    column: &str,
) -> Result<Option<String>, SourceFailure> {
    let asked = format!(
        "SELECT index_name FROM information_schema.statistics WHERE table_schema = {} AND table_name = {} AND non_unique = 0
         GROUP BY index_name HAVING count(*) = 1 AND max(column_name) = {} ORDER BY index_name = 'PRIMARY' DESC LIMIT 1",
        literal(&table.schema),
        literal(&table.name),
        literal(column)
    );
    Ok(session.query(&asked).await?.first().map(|row| row.string(0)))
}

/// The digits of a UUID that was written as one.
fn uuid_digits(text: &[u8]) -> Option<String> {
    let digits: String = std::str::from_utf8(text).ok()?.chars().filter(|digit| *digit != '-').collect();
    (digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())).then_some(digits)
}

/// Bytes of a column of fixed length, whose zeros at the end the log leaves out.
fn binary_literal(bytes: &[u8], column_type: &str) -> String {
    let length = column_type.split_once('(').and_then(|(_, rest)| rest.split_once(')'));
    let length = length.and_then(|(length, _)| length.parse().ok()).unwrap_or(0);
    let padded = bytes.iter().copied().chain(std::iter::repeat(0)).take(bytes.len().max(length));
    let hex: String = padded.map(|byte| format!("{byte:02x}")).collect();
    format!("x'{hex}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_ids_are_found_whatever_the_log_makes_of_them() {
        let uuid = b"3e11fa47-71ca-11e1-9e33-c80aa9429562";
        assert_eq!(uuid_digits(uuid).as_deref(), Some("3e11fa4771ca11e19e33c80aa9429562"));
        assert_eq!(uuid_digits(b"3e11fa47"), None);
        assert_eq!(binary_literal(b"\x01\x02", "binary(4)"), "x'01020000'");
        assert_eq!(binary_literal(b"\x01\x02", "varbinary(4)".trim_start_matches("varbinary(4)")), "x'0102'");
    }
}
