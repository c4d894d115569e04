//! Marking rows of PostgreSQL.
//!
//! A commit is in the log, and with the broker, before other sessions see its rows: the server shows them only when the
//! session that commits gets to it, or when a synchronous standby has answered. An update that came first would find
//! nothing, so the transactions are waited for.

use std::time::Duration;

use tokio_postgres::types::ToSql;

use super::lacking;
use crate::config::PostgresSettings;
use crate::event::Projection;
use crate::route::polling::{Set, Test};
use crate::source::SourceFailure;
use crate::source::poll::View;
use crate::source::poll::postgres::{PgStore, Table};
use crate::source::poll::view::code;
use crate::source::postgres::setup::status_column;
use crate::source::postgres::tables::quote;

pub struct PgMarks {
    store: PgStore,
}

impl PgMarks {
    pub async fn find(settings: &PostgresSettings, view: View) -> Result<Self, SourceFailure> {
        let store = PgStore::find(settings, view, &Projection::default()).await?;
        // A policy that hides rows from this role must be an error: a row that is not seen is not marked.
        let off = store.session.batch_execute("SET row_security = off").await;
        off.map_err(|error| store.session.classify(&error))?;
        Ok(PgMarks { store })
    }

    /// Everything that stands in the way.
    pub async fn wrong(&mut self, layout: &str) -> Result<Vec<SourceFailure>, SourceFailure> {
        let (tables, mut wrong) = (self.store.tables.clone(), Vec::new());
        for (at, table) in tables.iter().enumerate() {
            let needed = self.store.view.needed();
            let missing: Vec<_> =
                needed.iter().map(String::as_str).filter(|column| !table.catalog.has(column)).collect();
            let defined = |column: &str| {
                status_column(layout, column).unwrap_or_else(|| format!("{} timestamptz", quote(column)))
            };
            let also = "; rows that were delivered before are then to be marked by hand, where that matters";
            let before = wrong.len();
            wrong.extend(lacking(&table.catalog.quoted(), layout, &missing, defined, also));
            wrong.extend(self.denied(table).await?);
            if wrong.len() > before {
                continue;
            }
            // What else the server has against it, it says to the very statements, given no row.
            for tried in [self.mark(at as u32, &[]).await, self.mark_parked(at as u32, &[]).await] {
                match tried {
                    Ok(_) => {}
                    // The object is not in a state for it; whatever else passes is no reason to refuse.
                    Err(SourceFailure::Transient { what }) if what.ends_with("(55000)") => {
                        wrong.push(SourceFailure::NotReady {
                            what: format!("rows of {} cannot be marked: {what}", table.catalog.quoted()),
                            remedy:
                                "remove the cause that the server names; a table whose updates are published needs a \
                                 primary key or another REPLICA IDENTITY"
                                    .to_owned(),
                        })
                    }
                    Err(failure @ SourceFailure::Transient { .. }) => return Err(failure),
                    Err(failure) => wrong.push(failure),
                }
            }
        }
        Ok(wrong)
    }

    /// Waits until other sessions see what these transactions made.
    pub async fn until_visible(&self, transactions: &[u32]) -> Result<(), SourceFailure> {
        let transactions: Vec<i64> = transactions.iter().map(|id| i64::from(*id)).collect();
        if transactions.is_empty() {
            return Ok(());
        }
        // Ids in the log have 32 bits: the other half is that of the newest one, or its neighbour.
        let asked = "WITH s AS MATERIALIZED (SELECT pg_catalog.pg_current_snapshot() AS now,
                             pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS top)
             SELECT count(*) FROM s, unnest($1::bigint[]) AS x(low),
                  LATERAL (SELECT (top & -4294967296) | low AS near) AS a,
                  LATERAL (SELECT CASE WHEN near - top > 2147483648 THEN near - 4294967296
                                       WHEN top - near > 2147483648 THEN near + 4294967296 ELSE near END AS id) AS b
             WHERE NOT pg_catalog.pg_visible_in_snapshot(greatest(id, 0)::text::xid8, now)";
        let session = &self.store.session;
        let mut pause = Duration::from_millis(2);
        loop {
            let row = session.query_one(asked, &[&transactions]).await.map_err(|error| session.classify(&error))?;
            if row.get::<_, i64>(0) == 0 {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// The rights that the role lacks, if it does.
    async fn denied(&self, table: &Table) -> Result<Option<SourceFailure>, SourceFailure> {
        let (view, has) = (&self.store.view, |name: &String| table.catalog.has(name));
        let scheme = view.scheme;
        let sets = || scheme.done.iter().chain(scheme.parked);
        let set: Vec<_> = sets().map(|(column, _)| view.name(column)).filter(has).collect();
        let counted = sets().filter(|(_, set)| matches!(set, Set::OneMore | Set::AllTries)).map(|(column, _)| *column);
        let tested = scheme.unmarked.iter().chain(scheme.open).map(|(column, _)| *column);
        let read = tested.chain(counted).chain(scheme.own_most).map(|column| view.name(column)).filter(has);
        let read: Vec<_> = read.chain([view.id.clone()]).collect();
        let asked = "SELECT coalesce((SELECT string_agg(DISTINCT quote_ident(name), ', ') FROM unnest($2::text[]) AS name
                                      WHERE NOT has_column_privilege($1::oid, name, 'SELECT')), ''),
                            coalesce((SELECT string_agg(DISTINCT quote_ident(name), ', ') FROM unnest($3::text[]) AS name
                                      WHERE NOT has_column_privilege($1::oid, name, 'UPDATE')), ''),
                            quote_ident(current_user), row_security_active($1::oid)";
        let session = &self.store.session;
        let row = session.query_one(asked, &[&table.catalog.oid, &read, &set]).await;
        let row = row.map_err(|error| session.classify(&error))?;
        let (select, update, role, hidden): (String, String, String, bool) =
            (row.get(0), row.get(1), row.get(2), row.get(3));
        let name = table.catalog.quoted();
        let rights = [("SELECT", &select), ("UPDATE", &update)];
        let lacking: Vec<_> =
            rights.iter().filter(|(_, on)| !on.is_empty()).map(|(right, on)| format!("{right} ({on})")).collect();
        let (what, remedy) = match (lacking.is_empty(), hidden) {
            (false, _) => {
                let lacking = lacking.join(", ");
                let what = format!("{role} lacks {lacking} on {name}, so that rows cannot be marked");
                (what, format!("GRANT {lacking} ON {name} TO {role}"))
            }
            (true, true) => (
                format!("row security hides rows of {name} from {role}, so that they cannot be marked"),
                format!("ALTER ROLE {role} BYPASSRLS"),
            ),
            (true, false) => return Ok(None),
        };
        Ok(Some(SourceFailure::NotReady { what, remedy }))
    }

    /// What holds of rows that are not marked, so written that no index of it is taken: rows are found by their ids.
    fn tests(&self, tests: &[(&str, Test)]) -> String {
        let written = tests.iter().map(|one| match one {
            (column, Test::IsNull) => format!("num_nulls(t.{}) = 1", quote(&self.store.view.name(column))),
            other => self.store.tests(&[*other], "t"),
        });
        written.collect::<Vec<_>>().join(" AND ")
    }

    pub async fn mark(&mut self, table: u32, ids: &[&[u8]]) -> Result<u64, SourceFailure> {
        let (tables, scheme) = (self.store.tables.clone(), self.store.view.scheme);
        let of = &tables[table as usize];
        let ids = Ids::of(of, &self.store.view.id, ids);
        let statement = format!(
            "UPDATE {} t SET {} WHERE t.{} = ANY ({}) AND {}",
            of.catalog.quoted(),
            self.store.sets(of, scheme.done),
            quote(&self.store.view.id),
            ids.written,
            self.tests(scheme.unmarked),
        );
        self.store.run(table, &statement, &[ids.value()]).await
    }

    pub async fn mark_parked(&mut self, table: u32, rows: &[(&[u8], &str)]) -> Result<u64, SourceFailure> {
        let (tables, scheme) = (self.store.tables.clone(), self.store.view.scheme);
        let of = &tables[table as usize];
        let ids: Vec<_> = rows.iter().map(|(id, _)| *id).collect();
        let ids = Ids::of(of, &self.store.view.id, &ids);
        let statement = format!(
            "UPDATE {} t SET {} FROM unnest({}, $2::text[], $3::text[]) AS v(id, why, code) WHERE t.{} = v.id AND {}",
            of.catalog.quoted(),
            self.store.sets(of, scheme.parked),
            ids.written,
            quote(&self.store.view.id),
            self.tests(scheme.open),
        );
        // A text of the server has no zeros.
        let whys: Vec<_> = rows.iter().map(|(_, why)| why.replace('\0', "")).collect();
        let codes: Vec<_> = whys.iter().map(|why| code(why)).collect();
        self.store.run(table, &statement, &[ids.value(), &whys, &codes]).await
    }
}

/// Ids as a statement takes them: bytes as they are, anything else as a text that the server reads.
struct Ids<'a> {
    written: String,
    bytes: Option<Vec<&'a [u8]>>,
    texts: Vec<std::borrow::Cow<'a, str>>,
}

impl<'a> Ids<'a> {
    fn of(table: &Table, column: &str, ids: &[&'a [u8]]) -> Self {
        match table.type_of(column) {
            "bytea" => Ids { written: "$1::bytea[]".to_owned(), bytes: Some(ids.to_vec()), texts: Vec::new() },
            kind => Ids {
                written: format!("$1::text[]::{kind}[]"),
                bytes: None,
                texts: ids.iter().map(|id| String::from_utf8_lossy(id)).collect(),
            },
        }
    }

    fn value(&self) -> &(dyn ToSql + Sync) {
        match &self.bytes {
            Some(bytes) => bytes,
            None => &self.texts,
        }
    }
}
