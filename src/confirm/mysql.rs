//! Receipts in a table of MySQL or MariaDB.
//!
//! Rows are found by their id and by nothing else: the server would rather look for rows without a receipt, and meet those
//! that applications are just adding, each locked until its commit. So the index is named in the statement.

use super::id::{Id, IdKind};
use super::receipts::{NotWritten, no_column, no_index, no_kind, no_table};
use super::settings::ConfirmSettings;
use crate::config::{CheckpointPlace, MySqlSettings};
use crate::source::SourceFailure;
use crate::source::mysql::privileges;
use crate::source::mysql::server_error::WireError;
use crate::source::mysql::session::{Session, literal, quote};
use crate::source::mysql::tables::{self, CatalogColumn, CatalogTable};
use crate::source::mysql::{self, checkpoint, server};

/// Deadlock, lock time-out, a row that has changed since it was looked at.
const CONFLICTS: [u16; 3] = [1213, 1205, 1020];
const DENIED: [u16; 3] = [privileges::NO_RIGHT_TO_DATABASE, 1142, 1143];

pub struct MyReceipts {
    session: Session,
    table: String,
    /// The statement up to the ids.
    update: String,
    received_at: String,
    form: Form,
}

/// How ids are written in a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Plain(IdKind),
    /// A UUID in a binary column.
    BinaryUuid,
}

impl MyReceipts {
    pub async fn open(source: &MySqlSettings, settings: &ConfirmSettings) -> Result<Self, SourceFailure> {
        // Of several servers one that can be written, wherever the relay's checkpoint is.
        let source = MySqlSettings { checkpoint: CheckpointPlace::Source, ..source.clone() };
        let info = mysql::conninfo(&source)?;
        let database = checkpoint::database(&info)?.to_owned();
        let mut session = mysql::connect(&source, &info).await?;
        if server::is_read_only(&mut session).await? {
            let what = format!("{} is read-only: waiting for its promotion", session.describe());
            return Err(SourceFailure::transient(what));
        }
        let (catalog, _) = tables::find(&mut session, &database, std::slice::from_ref(&settings.table)).await?;
        let Some(table) = catalog.into_iter().next() else { return Err(no_table(&settings.table)) };
        let (name, id, received_at) = (table.quoted(), quote(&settings.id), quote(&settings.received_at));
        if !table.has(&settings.received_at) {
            let add = format!("ALTER TABLE {name} ADD COLUMN {received_at} DATETIME(6)");
            return Err(no_column(&name, "received_at", &settings.received_at, add));
        }
        let Some(column) = table.column(&settings.id) else {
            let add = format!("ALTER TABLE {name} ADD COLUMN {id} BIGINT");
            return Err(no_column(&name, "id", &settings.id, add));
        };
        let as_uuid = source.uuid_columns.iter().any(|uuid| uuid.eq_ignore_ascii_case(&settings.id));
        let Some(form) = form(column, as_uuid) else {
            return Err(no_kind(&name, &settings.id, &column.column_type));
        };
        // No gap is locked, so that nobody's insert waits; and a lock is waited for as shortly as the server knows how.
        session.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
        session.execute("SET SESSION innodb_lock_wait_timeout = 1").await?;
        let index = index(&mut session, &table, &settings.id).await?;
        if index.is_none() {
            no_index(&name, &settings.id);
        }
        let hint = index.map(|index| format!(" FORCE INDEX ({})", quote(&index))).unwrap_or_default();
        let update = format!("UPDATE {name}{hint} SET {received_at} = utc_timestamp(6) WHERE {id} IN (");
        let mut receipts = MyReceipts { session, table: name, update, received_at, form };
        receipts.rights(&id).await?;
        Ok(receipts)
    }

    pub fn describe(&self) -> String {
        format!("{} of {}", self.table, self.session.describe())
    }

    pub fn kind(&self) -> IdKind {
        match self.form {
            Form::Plain(kind) => kind,
            Form::BinaryUuid => IdKind::Uuid,
        }
    }

    fn statement(&self, ids: &[Id]) -> String {
        let mut statement = String::with_capacity(self.update.len() + ids.len() * 24 + 64);
        statement.push_str(&self.update);
        for (at, id) in ids.iter().enumerate() {
            if at > 0 {
                statement.push(',');
            }
            match (id, self.form) {
                (Id::Text(text), Form::BinaryUuid) => statement.push_str(&format!("x'{}'", text.replace('-', ""))),
                (Id::Text(text), Form::Plain(_)) => statement.push_str(&literal(text)),
                (Id::Number(number), _) => statement.push_str(&number.to_string()),
            }
        }
        statement.push_str(&format!(") AND {} IS NULL", self.received_at));
        statement
    }

    pub async fn write(&mut self, ids: &[Id]) -> Result<u64, NotWritten> {
        let statement = self.statement(ids);
        let written = self.session.try_update(&statement).await;
        written.map_err(|error| {
            let code = error.code().unwrap_or_default();
            let failure = error.classify(&format!("{}: writing receipts to {}", self.session.describe(), self.table));
            match CONFLICTS.contains(&code) {
                true => NotWritten::Conflict(failure.to_string()),
                false => NotWritten::Failed(failure),
            }
        })
    }

    pub async fn beat(&mut self) -> Result<(), SourceFailure> {
        self.session.execute("DO 1").await
    }

    /// The server looks at rights when it prepares, and nothing is executed.
    async fn rights(&mut self, id: &str) -> Result<(), SourceFailure> {
        let none = match self.kind() {
            IdKind::Integer { .. } => Id::Number(0),
            IdKind::Uuid => Id::Text("00000000-0000-0000-0000-000000000000".into()),
            IdKind::Text => Id::Text("".into()),
        };
        let statement = self.statement(&[none]);
        self.session.execute(&format!("SET @outboxd = {}", literal(&statement))).await?;
        match self.session.try_query("PREPARE outboxd_receipts FROM @outboxd").await {
            Ok(_) => self.session.execute("DEALLOCATE PREPARE outboxd_receipts").await,
            Err(WireError::Server { code, message }) if DENIED.contains(&code) => {
                let account = privileges::account(&mut self.session).await?;
                let (table, received_at) = (&self.table, &self.received_at);
                Err(SourceFailure::NotReady {
                    what: format!("{}: {message} (error {code})", self.session.describe()),
                    remedy: format!(
                        "GRANT SELECT ({id}, {received_at}), UPDATE ({received_at}) ON {table} TO {account}"
                    ),
                })
            }
            Err(error) => Err(self.session.classify(error)),
        }
    }
}

/// What the id's column holds; `None` where it cannot be compared with a text.
fn form(column: &CatalogColumn, as_uuid: bool) -> Option<Form> {
    let unsigned = column.column_type.to_ascii_lowercase().contains("unsigned");
    let integer = |bytes| Form::Plain(if unsigned { IdKind::unsigned(bytes) } else { IdKind::signed(bytes) });
    Some(match column.data_type.to_ascii_lowercase().as_str() {
        "tinyint" => integer(1),
        "smallint" => integer(2),
        "mediumint" => integer(3),
        "int" => integer(4),
        "bigint" => integer(8),
        "uuid" => Form::Plain(IdKind::Uuid),
        "binary" | "varbinary" if as_uuid => Form::BinaryUuid,
        "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext" => Form::Plain(IdKind::Text),
        _ => return None,
    })
}

/// The index that begins with the id; the primary key where it does.
async fn index(session: &mut Session, table: &CatalogTable, id: &str) -> Result<Option<String>, SourceFailure> {
    let asked = format!(
        "SELECT index_name FROM information_schema.statistics
         WHERE table_schema = {} AND table_name = {} AND column_name = {} AND seq_in_index = 1
         ORDER BY index_name = 'PRIMARY' DESC, non_unique LIMIT 1",
        literal(&table.schema),
        literal(&table.name),
        literal(id)
    );
    Ok(session.query(&asked).await?.first().map(|row| row.string(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(data_type: &str, column_type: &str) -> CatalogColumn {
        CatalogColumn { name: "id".to_owned(), data_type: data_type.to_owned(), column_type: column_type.to_owned() }
    }

    #[test]
    fn a_columns_type_says_what_its_ids_are() {
        assert_eq!(form(&column("bigint", "bigint"), false), Some(Form::Plain(IdKind::signed(8))));
        assert_eq!(form(&column("bigint", "bigint(20) unsigned"), false), Some(Form::Plain(IdKind::unsigned(8))));
        assert_eq!(form(&column("uuid", "uuid"), false), Some(Form::Plain(IdKind::Uuid)));
        assert_eq!(form(&column("char", "char(36)"), false), Some(Form::Plain(IdKind::Text)));
        assert_eq!(form(&column("binary", "binary(16)"), true), Some(Form::BinaryUuid));
        assert_eq!(form(&column("binary", "binary(16)"), false), None);
        assert_eq!(form(&column("double", "double"), false), None);
    }
}
