//! What was said of the source, by the kind of database that its URL names.

use super::options::{ExtendedJson, Snapshot};
use super::resolve::Resolver;
use super::secret::Secret;
use super::settings::{
    CheckpointPlace, MongoSettings, MySqlSettings, PostgresSettings, SourceSettings, Start, TableName,
};
use super::source_url::{SourceUrl, UrlParts};
use crate::route::layout::Layout;
use crate::source::{SourceFailure, mongodb, mysql, postgres};

/// PostgreSQL cuts names off at 63 bytes.
pub(super) const LONGEST_NAME: usize = 63;

/// The options that are about the source.
pub(super) struct SourceOptions<'a> {
    pub slot: Option<String>,
    pub publication: Option<String>,
    pub no_create: bool,
    pub message_prefixes: Vec<String>,
    pub snapshot: Snapshot,
    pub start: Option<String>,
    pub tables: Vec<String>,
    pub layout: &'a str,
    pub server_id: Option<u32>,
    pub uuid_columns: Vec<String>,
    pub extended_json: ExtendedJson,
    pub checkpoint: Option<String>,
}

/// A source, and the name that a pipeline takes from it.
type Named = (SourceSettings, String);

impl Resolver {
    pub(super) fn source(&mut self, said: Option<Secret>, options: SourceOptions<'_>) -> Option<Named> {
        let Some(secret) = said else {
            self.problem("source", "is missing: where the outbox is, for instance postgres://user@host/database");
            return None;
        };
        let url = match secret.reveal() {
            Ok(url) => url,
            Err(error) => {
                self.problem("source", error.to_string());
                return None;
            }
        };
        let Some(parts) = UrlParts::parse(&url) else {
            self.problem("source", "is not a URL; it looks like postgres://user@host/database");
            return None;
        };
        match parts.scheme.as_str() {
            "postgres" | "postgresql" => {
                // Here rather than at the first connect, which may be long after Kafka's.
                self.parsed(postgres::conninfo::ConnInfo::parse(&url))?;
                self.postgres(SourceUrl::new(secret), &parts, options)
            }
            "mysql" | "mariadb" => {
                self.parsed(mysql::conninfo::ConnInfo::parse(&url))?;
                self.mysql(SourceUrl::new(secret), &parts, options)
            }
            "mongodb" | "mongodb+srv" => {
                self.parsed(mongodb::check_url(&url))?;
                self.mongodb(SourceUrl::new(secret), &parts, options)
            }
            other => {
                let what =
                    format!("{other}:// is not a source; there are postgres://, mysql://, mariadb:// and mongodb://");
                self.problem("source", what);
                None
            }
        }
    }

    fn parsed<T>(&mut self, parsed: Result<T, SourceFailure>) -> Option<()> {
        if let Err(SourceFailure::Misconfigured { what, remedy }) = parsed {
            self.problem("source", format!("{what}; {remedy}"));
            return None;
        }
        Some(())
    }

    fn postgres(&mut self, url: SourceUrl, parts: &UrlParts, options: SourceOptions<'_>) -> Option<Named> {
        self.no_wildcards(&options.tables);
        let tables = self.own_tables(&options);
        let slot = self.text("slot", options.slot);
        let publication = self.text("publication", options.publication).unwrap_or_default();
        self.check_length("publication", &publication);
        self.only_for("server-id", options.server_id.is_some(), "MySQL and MariaDB");
        self.only_for("uuid-column", !options.uuid_columns.is_empty(), "MySQL and MariaDB");
        match options.checkpoint.as_deref() {
            Some("source") | None => {}
            Some(_) => self.problem("checkpoint", "with PostgreSQL the slot is the position; there is only `source`"),
        }
        let start = self.start(options.start, str::parse);
        let variable = |name: &str| std::env::var(name).ok();
        let slot = slot.unwrap_or_else(|| default_name(&database(parts, variable)));
        self.check_slot(&slot);
        let settings = PostgresSettings {
            url,
            slot: slot.clone(),
            publication,
            no_create: options.no_create,
            message_prefixes: options.message_prefixes,
            snapshot: options.snapshot,
            start: start?,
            tables,
        };
        Some((SourceSettings::Postgres(settings), slot))
    }

    fn mysql(&mut self, url: SourceUrl, parts: &UrlParts, options: SourceOptions<'_>) -> Option<Named> {
        self.no_wildcards(&options.tables);
        let tables = self.own_tables(&options);
        self.only_for("slot", options.slot.is_some(), "PostgreSQL");
        self.only_for("message-prefix", !options.message_prefixes.is_empty(), "PostgreSQL");
        let Some(database) = parts.database.clone() else {
            self.problem("source", "names no database; it looks like mysql://user@host/database");
            return None;
        };
        if options.server_id == Some(0) {
            self.problem("server-id", "must be at least 1: to the server 0 is no replica");
        }
        let checkpoint = self.checkpoint(options.checkpoint.as_deref());
        let start = self.start(options.start, str::parse);
        let settings = MySqlSettings {
            url,
            tables,
            no_create: options.no_create,
            snapshot: options.snapshot,
            start: start?,
            server_id: options.server_id,
            uuid_columns: options.uuid_columns,
            checkpoint: checkpoint?,
        };
        Some((SourceSettings::MySql(settings), default_name(&database)))
    }

    fn mongodb(
        &mut self,
        url: SourceUrl,
        parts: &UrlParts,
        options: SourceOptions<'_>,
    ) -> Option<(SourceSettings, String)> {
        let tables = self.own_tables(&options);
        self.only_for("slot", options.slot.is_some(), "PostgreSQL");
        self.only_for("message-prefix", !options.message_prefixes.is_empty(), "PostgreSQL");
        self.only_for("server-id", options.server_id.is_some(), "MySQL and MariaDB");
        self.only_for("uuid-column", !options.uuid_columns.is_empty(), "MySQL and MariaDB");
        let Some(database) = parts.database.clone() else {
            self.problem("source", "names no database; it looks like mongodb://user@host/database?replicaSet=name");
            return None;
        };
        let checkpoint = self.checkpoint(options.checkpoint.as_deref());
        let start = self.start(options.start, str::parse);
        let settings = MongoSettings {
            url,
            tables,
            no_create: options.no_create,
            snapshot: options.snapshot,
            start: start?,
            extended_json: options.extended_json,
            checkpoint: checkpoint?,
        };
        Some((SourceSettings::Mongo(settings), default_name(&database)))
    }

    /// Not a text like the others: its `file:` is a place, not the place of the text.
    fn checkpoint(&mut self, said: Option<&str>) -> Option<CheckpointPlace> {
        match said {
            Some("source") | None => Some(CheckpointPlace::Source),
            Some("kafka") => Some(CheckpointPlace::Kafka),
            Some(place) => match place.strip_prefix("file:").filter(|path| !path.is_empty()) {
                Some(path) => Some(CheckpointPlace::File(path.to_owned())),
                None => {
                    let what = format!("`{place}` is not a place; there are source, kafka and file:PATH");
                    self.problem("checkpoint", what);
                    None
                }
            },
        }
    }

    fn only_for(&mut self, key: &str, said: bool, whose: &str) {
        if said {
            self.problem(key, format!("is only for {whose}: leave it out"));
        }
    }

    fn no_wildcards(&mut self, tables: &[String]) {
        for text in tables.iter().filter(|text| *text == "*" || text.ends_with(".*")) {
            let what = format!("`{text}`: all tables at once are only for MongoDB's collections: name each table");
            self.problem("table", what);
        }
    }

    pub(super) fn check_slot(&mut self, slot: &str) {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if !slot.bytes().all(allowed) || slot.len() > LONGEST_NAME {
            let what = format!(
                "`{slot}` cannot name a slot: PostgreSQL allows at most {LONGEST_NAME} lower-case letters, digits and _"
            );
            self.problem("slot", what);
        }
    }

    fn check_length(&mut self, key: &str, name: &str) {
        if name.len() > LONGEST_NAME {
            self.problem(key, format!("`{name}` is too long: PostgreSQL's names have at most {LONGEST_NAME} bytes"));
        }
    }

    /// The tables that were named, else the layout's own; none where only messages are read.
    fn own_tables(&mut self, options: &SourceOptions<'_>) -> Vec<TableName> {
        let tables = self.tables(&options.tables);
        if !tables.is_empty() || !options.message_prefixes.is_empty() {
            return tables;
        }
        let own = Layout::named(options.layout).map_or(&[][..], |layout| layout.tables);
        own.iter().filter_map(|name| name.parse().ok()).collect()
    }

    pub(super) fn tables(&mut self, said: &[String]) -> Vec<TableName> {
        let mut tables: Vec<TableName> = Vec::new();
        for text in said {
            match text.parse() {
                Ok(table) if tables.contains(&table) => {}
                Ok(table) => tables.push(table),
                Err(what) => self.problem("table", format!("`{text}`: {what}")),
            }
        }
        tables
    }

    fn start<P, E: std::fmt::Display>(
        &mut self,
        said: Option<String>,
        parse: impl Fn(&str) -> Result<P, E>,
    ) -> Option<Start<P>> {
        match self.text("start", said)?.as_str() {
            "now" => Some(Start::Now),
            "earliest" => Some(Start::Earliest),
            position => match parse(position) {
                Ok(position) => Some(Start::At(position)),
                Err(error) => {
                    self.problem("start", format!("{error}; `now` and `earliest` are allowed too"));
                    None
                }
            },
        }
    }
}

/// The database a URL leads to, as libpq finds it.
pub(super) fn database(parts: &UrlParts, variable: impl Fn(&str) -> Option<String>) -> String {
    let said = |name: &str| variable(name).filter(|value| !value.is_empty());
    parts
        .parameter("dbname")
        .map(str::to_owned)
        .or_else(|| parts.database.clone())
        .or_else(|| said("PGDATABASE"))
        .or_else(|| parts.parameter("user").map(str::to_owned))
        .or_else(|| parts.user.clone())
        .or_else(|| said("PGUSER"))
        .or_else(|| said("USER"))
        .unwrap_or_else(|| "postgres".to_owned())
}

pub(super) fn default_name(database: &str) -> String {
    let allowed = |character: char| if character.is_ascii_alphanumeric() { character } else { '_' };
    let mut slot: String = database.to_ascii_lowercase().chars().map(allowed).collect();
    slot.insert_str(0, "outboxd_");
    slot.truncate(LONGEST_NAME);
    slot
}
