//! The outbox tables: which relations of the stream they are, and where in a row the wanted columns lie.

use std::sync::Arc;

use super::judge;
use super::pgoutput::Relation;
use super::server_error::classify_sql;
use super::sql::SqlSession;
use super::values::binary_is_known;
use crate::config::TableName;
use crate::event::{Projection, Want};
use crate::source::SourceFailure;

/// A wanted column of a relation.
#[derive(Clone, Debug)]
pub struct Column {
    pub index: usize,
    pub slot: usize,
    pub want: Want,
    pub type_oid: u32,
    pub name: String,
}

/// A relation whose inserts are outbox events.
#[derive(Clone, Debug)]
pub struct Bound {
    pub table: u32,
    /// In the order of the row's columns.
    pub columns: Vec<Column>,
    pub describe: String,
}

/// A table as the catalog knows it.
#[derive(Clone, Debug)]
pub struct CatalogTable {
    pub oid: u32,
    pub schema: String,
    pub name: String,
    pub partitioned: bool,
    /// Not a view or a foreign table.
    pub is_table: bool,
    /// Neither unlogged nor temporary.
    pub logged: bool,
    /// Names and types, in order.
    pub columns: Vec<(String, u32)>,
}

impl CatalogTable {
    pub fn quoted(&self) -> String {
        format!("{}.{}", quote(&self.schema), quote(&self.name))
    }

    pub fn has(&self, column: &str) -> bool {
        self.columns.iter().any(|(name, _)| name == column)
    }
}

/// A text as SQL takes it, whatever is in it.
pub fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') { format!("E'{}'", quoted.replace('\\', "\\\\")) } else { format!("'{quoted}'") }
}

/// An identifier as SQL takes it, whatever is in it.
pub fn quote(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

pub struct Tables {
    pub catalog: Vec<CatalogTable>,
    session: Arc<SqlSession>,
}

impl Tables {
    /// Looks every named table up; those that do not exist are given back by name.
    pub async fn find(session: &Arc<SqlSession>, names: &[TableName]) -> Result<(Self, Vec<TableName>), SourceFailure> {
        let (mut catalog, mut missing) = (Vec::new(), Vec::new());
        for name in names {
            let found = session
                .query_opt(
                    "SELECT c.oid, n.nspname::text, c.relname::text, c.relkind = 'p', c.relkind IN ('r', 'p'),
                            c.relpersistence = 'p'
                     FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                     WHERE c.oid = pg_catalog.to_regclass($1)",
                    &[&name.quoted()],
                )
                .await
                .map_err(|error| classify_sql(&error, "looking up the outbox table"))?;
            let Some(row) = found else {
                missing.push(name.clone());
                continue;
            };
            let oid: u32 = row.get(0);
            let columns = session
                .query(
                    "SELECT attname::text, atttypid FROM pg_catalog.pg_attribute
                     WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                    &[&oid],
                )
                .await
                .map_err(|error| classify_sql(&error, "reading the outbox table's columns"))?;
            catalog.push(CatalogTable {
                oid,
                schema: row.get(1),
                name: row.get(2),
                partitioned: row.get(3),
                is_table: row.get(4),
                logged: row.get(5),
                columns: columns.iter().map(|column| (column.get(0), column.get(1))).collect(),
            });
        }
        Ok((Tables { catalog, session: session.clone() }, missing))
    }

    pub fn count(&self) -> u32 {
        self.catalog.len() as u32
    }

    /// Columns that the layout needs and a table has not.
    pub fn missing_columns(&self, projection: &Projection) -> Vec<(&CatalogTable, String)> {
        let tables = self.catalog.iter();
        tables
            .flat_map(|table| projection.required().map(move |name| (table, name)))
            .filter(|(table, name)| !table.has(name))
            .map(|(table, name)| (table, name.to_owned()))
            .collect()
    }

    /// Whether every wanted column has a type whose binary form is known.
    pub fn binary_is_known(&self, projection: &Projection) -> bool {
        let wanted = |name: &str| projection.columns().any(|(_, column, _)| column == name);
        self.catalog.iter().flat_map(|table| &table.columns).all(|(name, oid)| !wanted(name) || binary_is_known(*oid))
    }

    /// What a relation of the stream is to us: an outbox table, a partition of one, or nothing.
    pub async fn bind(
        &self,
        relation: &Relation,
        projection: &Projection,
        binary: bool,
    ) -> Result<Option<Bound>, SourceFailure> {
        let table = match self.named(&relation.schema, &relation.name) {
            Some(table) => Some(table),
            None => self.partition_root(relation).await?,
        };
        let Some(table) = table else { return Ok(None) };
        let describe = format!("{}.{}", relation.schema, relation.name);
        let mut columns = Vec::new();
        for (slot, name, want) in projection.columns() {
            let Some(index) = relation.columns.iter().position(|column| column.name == name) else { continue };
            let type_oid = relation.columns[index].type_oid;
            if binary && !binary_is_known(type_oid) {
                let what = format!("column `{name}` of {describe} has a type (oid {type_oid}) that is read as text");
                return Err(SourceFailure::Restart { what });
            }
            columns.push(Column { index, slot, want, type_oid, name: name.to_owned() });
        }
        let missing = projection.required().find(|name| !columns.iter().any(|column| column.name == *name));
        if let Some(name) = missing {
            return Err(judge::column_missing(&describe, name, projection));
        }
        columns.sort_by_key(|column| column.index);
        Ok(Some(Bound { table, columns, describe }))
    }

    fn named(&self, schema: &str, name: &str) -> Option<u32> {
        let index = self.catalog.iter().position(|table| table.schema == schema && table.name == name)?;
        Some(index as u32)
    }

    /// A publication without `publish_via_partition_root` names the partitions, not the table.
    async fn partition_root(&self, relation: &Relation) -> Result<Option<u32>, SourceFailure> {
        if !self.catalog.iter().any(|table| table.partitioned) {
            return Ok(None);
        }
        let ancestors = self
            .session
            .query(
                "SELECT n.nspname::text, c.relname::text
                 FROM pg_catalog.pg_class self
                 LEFT JOIN LATERAL pg_catalog.pg_partition_ancestors(self.oid) a ON true
                 JOIN pg_catalog.pg_class c ON c.oid = coalesce(a.relid, self.oid)
                 JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                 WHERE self.oid = $1",
                &[&relation.oid],
            )
            .await
            .map_err(|error| classify_sql(&error, "looking up a partition's table"))?;
        if ancestors.is_empty() {
            // The catalog is newer than the log being read: a partition dropped since cannot be told from a stranger.
            let name = format!("{}.{}", relation.schema, relation.name);
            return Err(SourceFailure::Undecodable {
                what: format!("the relation {name} is gone, so whether it was a partition of an outbox is unknown"),
                remedy: "set publish_via_partition_root on the publication, then start from a new slot".to_owned(),
            });
        }
        Ok(ancestors.iter().find_map(|row| self.named(row.get(0), row.get(1))))
    }
}
