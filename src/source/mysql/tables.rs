//! The outbox tables: which table maps are about them, and where in a row the wanted columns lie.

use super::conninfo::ConnInfo;
use super::rows::Value;
use super::session::{Session, literal, quote};
use super::table_map::{ColumnShape, TableShape, column_type};
use super::values::{self, Declared, Rendered};
use crate::config::TableName;
use crate::event::{Chunk, Field, Micros, Projection, Want};
use crate::source::SourceFailure;

/// A table as the catalog knows it.
#[derive(Clone, Debug)]
pub struct CatalogTable {
    pub schema: String,
    pub name: String,
    /// In order.
    pub columns: Vec<CatalogColumn>,
}

#[derive(Clone, Debug)]
pub struct CatalogColumn {
    pub name: String,
    /// `varchar`, `bigint`, `uuid`, …
    pub data_type: String,
    /// `varchar(36)`, `bigint unsigned`, `enum('a','b')`, …
    pub column_type: String,
}

impl CatalogTable {
    pub fn quoted(&self) -> String {
        format!("{}.{}", quote(&self.schema), quote(&self.name))
    }

    pub fn has(&self, column: &str) -> bool {
        self.column(column).is_some()
    }

    /// Names of columns are compared as the server compares them: without regard to case.
    pub fn column(&self, name: &str) -> Option<&CatalogColumn> {
        self.columns.iter().find(|column| column.name.eq_ignore_ascii_case(name))
    }
}

/// Looks every named table up; those that do not exist are given back by name.
pub async fn find(
    session: &mut Session,
    database: &str,
    names: &[TableName],
) -> Result<(Vec<CatalogTable>, Vec<TableName>), SourceFailure> {
    let (mut catalog, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        let schema = name.schema.as_deref().unwrap_or(database);
        match describe(session, schema, &name.name).await? {
            Some(table) => catalog.push(table),
            None => missing.push(name.clone()),
        }
    }
    Ok((catalog, missing))
}

async fn describe(session: &mut Session, schema: &str, name: &str) -> Result<Option<CatalogTable>, SourceFailure> {
    let statement = format!(
        "SELECT table_schema, table_name, column_name, data_type, column_type FROM information_schema.columns
         WHERE table_schema = {} AND table_name = {} ORDER BY ordinal_position",
        literal(schema),
        literal(name)
    );
    let rows = session.query(&statement).await?;
    let Some(first) = rows.first() else { return Ok(None) };
    let (schema, name) = (first.string(0), first.string(1));
    let column = |row: &super::session::Row| CatalogColumn {
        name: row.string(2),
        data_type: row.string(3),
        column_type: row.string(4),
    };
    Ok(Some(CatalogTable { schema, name, columns: rows.iter().map(column).collect() }))
}

/// Columns that the layout needs and a table has not.
pub fn missing_columns(catalog: &[CatalogTable], projection: &Projection) -> Vec<SourceFailure> {
    let mut wrong = Vec::new();
    for table in catalog {
        for name in projection.required().filter(|name| !table.has(name)) {
            wrong.push(SourceFailure::NotReady {
                what: format!("table {} has no column `{name}`", table.quoted()),
                remedy: format!("add the column, or name another with --column ROLE=COLUMN (wanted: {name})"),
            });
        }
    }
    wrong
}

/// How a wanted column's value is made.
#[derive(Clone, Copy, Debug)]
enum Form {
    AsLogged,
    /// A type that the log shows as a binary string.
    Declared(Declared),
}

#[derive(Clone, Debug)]
struct Wanted {
    slot: usize,
    want: Want,
    form: Form,
    column: ColumnShape,
    name: String,
}

/// A table whose inserts are outbox events, as the log describes it just now.
#[derive(Clone, Debug)]
pub struct Bound {
    pub table: u32,
    pub shape: TableShape,
    /// Column numbers in ascending order, one for each entry of `wanted`.
    pub indices: Vec<usize>,
    wanted: Vec<Wanted>,
    pub describe: String,
}

/// Which tables are outbox tables, and what is wanted of them.
pub struct Tables {
    /// In the order of the settings, with their databases.
    names: Vec<(String, String)>,
    projection: Projection,
    /// Binary columns to be written as UUIDs.
    uuid_columns: Vec<String>,
    info: ConnInfo,
    mariadb: bool,
}

impl Tables {
    pub fn new(
        names: Vec<(String, String)>,
        projection: Projection,
        uuid_columns: Vec<String>,
        info: ConnInfo,
        mariadb: bool,
    ) -> Self {
        Tables { names, projection, uuid_columns, info, mariadb }
    }

    pub fn projection(&self) -> &Projection {
        &self.projection
    }

    /// The table's number, if it is one of ours.
    pub fn number(&self, schema: &[u8], table: &[u8]) -> Option<u32> {
        let found = self.names.iter().position(|(ours, name)| ours.as_bytes() == schema && name.as_bytes() == table);
        found.map(|at| at as u32)
    }

    /// Whether a statement that mentions this name may be about one of ours.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|(_, name)| name.as_str())
    }

    /// Each table of ours, as its database and its name.
    pub fn qualified_names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.names.iter().map(|(database, name)| (database.as_str(), name.as_str()))
    }

    /// Finds the wanted columns in a table's description. Names that the log does not tell come from the catalog,
    /// which is of now and not of then: it must agree with the log in the number and the types of columns, and the
    /// table must not have been changed since.
    pub async fn bind(&self, table: u32, mut shape: TableShape, logged_at: Micros) -> Result<Bound, SourceFailure> {
        let describe = format!("{}.{}", shape.schema, shape.table);
        let mut catalog = None;
        if !shape.has_names || self.mariadb {
            let mut session = Session::another(&self.info).await?;
            catalog = self::describe(&mut session, &shape.schema, &shape.table).await?;
            if !shape.has_names {
                let altered = altered_since(&mut session, &shape, logged_at).await?;
                name_columns(&mut shape, catalog.as_ref(), altered.as_deref())?;
            }
            session.close().await;
        }
        if let Some(column) = misread(&shape, catalog.as_ref()) {
            return Err(SourceFailure::Undecodable {
                what: format!(
                    "{describe} has the column `{column}` in MariaDB's old form with a fraction, which the log does not describe"
                ),
                remedy: "nothing was skipped; ALTER TABLE … FORCE with mysql56_temporal_format = ON rewrites the table"
                    .to_owned(),
            });
        }
        let mut wanted = Vec::new();
        for (slot, name, want) in self.projection.columns() {
            let matches =
                |column: &ColumnShape| column.name.as_deref().is_some_and(|own| own.eq_ignore_ascii_case(name));
            let Some(index) = shape.columns.iter().position(matches) else { continue };
            let declared = catalog.as_ref().and_then(|table| table.column(name));
            let declared = declared.and_then(|column| Declared::by_name(&column.data_type));
            let on_request = self.uuid_columns.iter().any(|chosen| chosen.eq_ignore_ascii_case(name));
            let form = match declared {
                Some(declared) => Form::Declared(declared),
                None if on_request => Form::Declared(Declared::Uuid),
                None => Form::AsLogged,
            };
            let column = shape.columns[index].clone();
            wanted.push((index, Wanted { slot, want, form, column, name: name.to_owned() }));
        }
        let lacking = self.projection.required().find(|name| !wanted.iter().any(|(_, wanted)| wanted.name == **name));
        if let Some(name) = lacking {
            return Err(SourceFailure::Undecodable {
                what: format!("rows of {describe} were logged without the column `{name}`, which the layout needs"),
                remedy: "nothing was skipped; name the right column with --column ROLE=COLUMN".to_owned(),
            });
        }
        wanted.sort_by_key(|(index, _)| *index);
        let (indices, wanted) = wanted.into_iter().unzip();
        Ok(Bound { table, shape, indices, wanted, describe })
    }
}

/// A column whose values are longer than the log says: MariaDB's old temporals with digits of a fraction.
fn misread<'a>(shape: &TableShape, catalog: Option<&'a CatalogTable>) -> Option<&'a str> {
    let columns = &catalog?.columns;
    let both = shape.columns.iter().zip(columns).filter(|_| shape.columns.len() == columns.len());
    both.into_iter()
        .find(|(logged, known)| logged.is_old_temporal() && known.column_type.contains('('))
        .map(|(_, known)| known.name.as_str())
}

/// When the table was last made anew, if that was after the rows were logged.
async fn altered_since(
    session: &mut Session,
    shape: &TableShape,
    logged_at: Micros,
) -> Result<Option<String>, SourceFailure> {
    let statement = format!(
        "SELECT create_time, TIMESTAMPDIFF(SECOND, '1970-01-01', create_time) FROM information_schema.tables
         WHERE table_schema = {} AND table_name = {}",
        literal(&shape.schema),
        literal(&shape.table)
    );
    let rows = session.query(&statement).await?;
    let altered = rows.first().filter(|row| row.number(1) as i64 > logged_at.0 / 1_000_000);
    Ok(altered.map(|row| row.string(0)))
}

/// Gives the columns the catalog's names, if it can be trusted.
fn name_columns(
    shape: &mut TableShape,
    catalog: Option<&CatalogTable>,
    altered: Option<&str>,
) -> Result<(), SourceFailure> {
    let table = format!("{}.{}", shape.schema, shape.table);
    let refuse = |why: String| SourceFailure::Undecodable {
        what: format!("the log does not name the columns of {table}, and {why}"),
        remedy: "nothing was skipped; SET GLOBAL binlog_row_metadata = FULL puts the names into the log from then on. \
                 Rows from before it can be read only while the table is what it was then"
            .to_owned(),
    };
    let Some(catalog) = catalog else { return Err(refuse("the table is gone".to_owned())) };
    if let Some(when) = altered {
        return Err(refuse(format!("the table was changed after these rows, at {when} UTC")));
    }
    if catalog.columns.len() != shape.columns.len() {
        let (then, now) = (shape.columns.len(), catalog.columns.len());
        return Err(refuse(format!("the table has {now} columns now and had {then} when these rows were written")));
    }
    for (column, known) in shape.columns.iter_mut().zip(&catalog.columns) {
        if !could_be(column.kind, &known.data_type) {
            let (name, now) = (&known.name, &known.data_type);
            return Err(refuse(format!("the column `{name}` is {now} now and was of another type")));
        }
        column.name = Some(known.name.clone());
        column.unsigned = known.column_type.contains("unsigned");
        if column.members.is_none() {
            column.members = members(&known.column_type);
        }
    }
    Ok(())
}

/// Whether a column of this declared type is logged as this kind.
fn could_be(kind: u8, data_type: &str) -> bool {
    use column_type::*;
    match data_type.to_ascii_lowercase().as_str() {
        "tinyint" | "bool" | "boolean" => kind == TINY,
        "smallint" => kind == SHORT,
        "mediumint" => kind == INT24,
        "int" | "integer" => kind == LONG,
        "bigint" => kind == LONGLONG,
        "float" => kind == FLOAT,
        "double" | "real" => kind == DOUBLE,
        "decimal" | "numeric" => kind == NEWDECIMAL,
        "date" => matches!(kind, DATE | NEWDATE),
        "time" => matches!(kind, TIME | TIME2),
        "datetime" => matches!(kind, DATETIME | DATETIME2),
        "timestamp" => matches!(kind, TIMESTAMP | TIMESTAMP2),
        "year" => kind == YEAR,
        "bit" => kind == BIT,
        "json" => matches!(kind, JSON | BLOB | LONG_BLOB),
        "enum" => kind == ENUM,
        "set" => kind == SET,
        "char" | "binary" | "uuid" | "inet6" | "inet4" => matches!(kind, STRING | VAR_STRING),
        "varchar" | "varbinary" => matches!(kind, VARCHAR | VAR_STRING | VARCHAR_COMPRESSED),
        "tinyblob" | "tinytext" | "blob" | "text" | "mediumblob" | "mediumtext" | "longblob" | "longtext" => {
            matches!(kind, TINY_BLOB | BLOB | MEDIUM_BLOB | LONG_BLOB | BLOB_COMPRESSED)
        }
        _ => true,
    }
}

/// The members of `enum('a','b''c')`.
fn members(column_type: &str) -> Option<Vec<String>> {
    let inside = column_type.strip_prefix("enum(").or_else(|| column_type.strip_prefix("set("))?.strip_suffix(')')?;
    let mut members = Vec::new();
    let mut rest = inside;
    while let Some(quoted) = rest.trim_start_matches(',').strip_prefix('\'') {
        let mut member = String::new();
        rest = quoted;
        loop {
            let (part, after) = rest.split_once('\'')?;
            member.push_str(part);
            match after.strip_prefix('\'') {
                Some(after_doubled) => {
                    member.push('\'');
                    rest = after_doubled;
                }
                None => {
                    rest = after;
                    break;
                }
            }
        }
        members.push(member);
    }
    Some(members)
}

impl Bound {
    /// Sets a field of the newest event. `buffer` is what the chunk's raw fields point into, if the row lies there.
    pub fn set_field(&self, place: usize, value: Value<'_>, buffer: Option<&[u8]>, chunk: &mut Chunk) {
        let Some(wanted) = self.wanted.get(place) else { return };
        let raw = match value {
            Value::Bytes(raw) => raw,
            Value::Null => return chunk.set_field(wanted.slot, Field::Null),
            Value::Absent => {
                // It took its default, which the log does not tell. For a time the commit's stands in.
                chunk.set_field(wanted.slot, Field::Null);
                if wanted.want == Want::Text {
                    let (name, table) = (&wanted.name, &self.describe);
                    let why = format!("{table} was logged without `{name}`: SET GLOBAL binlog_row_image = FULL");
                    chunk.mark_defective(why, Field::Null);
                }
                return;
            }
        };
        let mut borrowed = None;
        let mut bad = None;
        chunk.render_field(wanted.slot, |out| {
            let rendered = match wanted.form {
                Form::Declared(declared) if wanted.want == Want::Text => {
                    values::render_declared(declared, raw, out).map(|()| Rendered::Written)
                }
                _ => values::render(&wanted.column, wanted.want, raw, out),
            };
            match rendered {
                Ok(Rendered::Borrowed(bytes)) if buffer.is_some() => borrowed = Some(bytes),
                Ok(Rendered::Borrowed(bytes)) => out.extend_from_slice(bytes),
                Ok(Rendered::Written) => {}
                Err(error) => bad = Some(error),
            }
        });
        match (bad, borrowed, buffer) {
            // A time that cannot be read is none: the commit time stands in.
            (Some(_), ..) if wanted.want == Want::Time => chunk.set_field(wanted.slot, Field::Null),
            (Some(why), ..) => {
                chunk.set_field(wanted.slot, Field::Null);
                chunk.mark_defective(format!("column `{}` of {}: {why}", wanted.name, self.describe), Field::Null);
            }
            (None, Some(bytes), Some(buffer)) => chunk.set_field(wanted.slot, Field::span(bytes, buffer)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_members_of_an_enum_are_read_from_its_type() {
        let read = |text: &str| members(text).map(|members| members.join("|"));
        assert_eq!(read("enum('a','b''c','')").as_deref(), Some("a|b'c|"));
        assert_eq!(read("set('x')").as_deref(), Some("x"));
        assert_eq!(read("varchar(3)"), None);
    }

    #[test]
    fn a_column_that_changed_its_type_is_noticed() {
        assert!(could_be(column_type::VARCHAR, "varchar"));
        assert!(!could_be(column_type::VARCHAR, "int"));
        assert!(!could_be(column_type::LONG, "bigint"));
    }
}
