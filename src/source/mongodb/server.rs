//! What the server says of itself.

use futures_util::TryStreamExt as _;
use mongodb::bson::{Document, doc};
use mongodb::options::ClientOptions;
use mongodb::{Client, Database};
use std::time::Duration;

use super::change_stream;
use super::server_error::{self, Doing, code};
use super::token::ClusterTime;
use crate::config::MongoSettings;
use crate::source::SourceFailure;

/// How long a server is looked for, unless SOURCE says otherwise.
const SELECTION_PATIENCE: Duration = Duration::from_secs(10);

/// How long a connection may take to end.
const CLOSING: Duration = Duration::from_secs(2);

/// A connection, and what SOURCE says about it.
#[derive(Clone)]
pub struct Connection {
    pub client: Client,
    pub options: ClientOptions,
    pub database: Database,
}

impl Connection {
    /// Ends what the driver still has under way: it would be cut off by the end of the process, and complain.
    pub async fn close(self) {
        close(self.client).await;
    }
}

pub async fn close(client: Client) {
    let _ = tokio::time::timeout(CLOSING, async { client.shutdown().await }).await;
}

/// Connects as SOURCE says, with its secrets read anew.
pub async fn connect(settings: &MongoSettings) -> Result<Connection, SourceFailure> {
    let misconfigured = |what: String| SourceFailure::Misconfigured {
        what,
        remedy: "correct SOURCE: mongodb://user@host1,host2/database?replicaSet=name".to_owned(),
    };
    let url = settings.url.reveal().map_err(|error| SourceFailure::Misconfigured {
        what: error.to_string(),
        remedy: "make the file or variable that holds the source's address readable".to_owned(),
    })?;
    super::check_url(&url)?;
    let parsed = ClientOptions::parse(url).await;
    let mut options = parsed.map_err(|error| server_error::classify(&error, &Doing::Connecting))?;
    options.app_name.get_or_insert_with(|| "outboxd".to_owned());
    options.server_selection_timeout.get_or_insert(SELECTION_PATIENCE);
    let name = options.default_database.clone();
    let name = name.ok_or_else(|| misconfigured("the source's URL names no database".to_owned()))?;
    let client = Client::with_options(options.clone()).map_err(|error| misconfigured(server_error::message(&error)))?;
    Ok(Connection { database: client.database(&name), client, options })
}

#[derive(Clone, Debug)]
pub struct Server {
    /// The replica set's name; `None` for a lone server.
    pub set: Option<String>,
    /// It is a router of a sharded cluster.
    pub sharded: bool,
    pub version: Vec<u32>,
    /// Its last operation when it was asked.
    pub now: ClusterTime,
    /// Who answered.
    pub address: String,
}

impl Server {
    pub async fn ask(connection: &Connection) -> Result<Self, SourceFailure> {
        let hello = match connection.database.run_command(doc! { "hello": 1 }).await {
            // What it was called before 4.4.2.
            Err(error) if server_error::code_of(&error) == Some(code::COMMAND_NOT_FOUND) => {
                command(&connection.database, doc! { "isMaster": 1 }).await?
            }
            said => said.map_err(|error| server_error::classify(&error, &Doing::Connecting))?,
        };
        let build = command(&connection.database, doc! { "buildInfo": 1 }).await?;
        let parts = build.get_array("versionArray").map(Vec::as_slice).unwrap_or_default();
        let version = parts.iter().filter_map(|part| part.as_i32().and_then(|part| u32::try_from(part).ok()));
        let now = hello.get_timestamp("operationTime").or_else(|_| {
            hello.get_document("lastWrite").and_then(|last| last.get_document("opTime")?.get_timestamp("ts"))
        });
        Ok(Server {
            set: hello.get_str("setName").ok().map(str::to_owned),
            sharded: hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid"),
            version: version.take(3).collect(),
            now: now.map(ClusterTime::from).unwrap_or_default(),
            address: hello.get_str("me").map_or_else(|_| hosts(&connection.options), str::to_owned),
        })
    }

    pub fn version_text(&self) -> String {
        self.version.iter().map(u32::to_string).collect::<Vec<_>>().join(".")
    }

    /// What it is called in a checkpoint.
    pub fn name(&self) -> &str {
        self.set.as_deref().unwrap_or(if self.sharded { "sharded" } else { "standalone" })
    }

    /// It can send an event of more than 16 MB in pieces.
    pub fn splits_events(&self) -> bool {
        match self.version.as_slice() {
            [6, 0, patch, ..] => *patch >= 9,
            [major, ..] => *major >= 7,
            [] => false,
        }
    }

    /// It can read a collection as it was at one time, outside of transactions.
    pub fn reads_at_a_point_in_time(&self) -> bool {
        self.version.first().is_some_and(|major| *major >= 5)
    }

    pub fn is_old(&self) -> bool {
        self.version.as_slice() < [4, 4].as_slice()
    }
}

fn hosts(options: &ClientOptions) -> String {
    options.hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

pub async fn command(database: &Database, command: Document) -> Result<Document, SourceFailure> {
    database.run_command(command).await.map_err(|error| server_error::classify(&error, &Doing::Connecting))
}

/// The collections that are read where all of a database are, as far as the user may.
pub async fn collections(database: &Database) -> Result<Vec<String>, SourceFailure> {
    let doing = Doing::Reading(format!("the collections of {}", database.name()));
    let refused = |error: mongodb::error::Error| server_error::classify(&error, &doing);
    // Names alone may be asked for without a right to list; the driver's own call asks for more when there is a filter.
    // Views and time series have no change streams.
    let asked = doc! {
        "listCollections": 1,
        "nameOnly": true,
        "authorizedCollections": true,
        "filter": { "type": "collection" },
    };
    let listed = database.run_cursor_command(asked).await.map_err(refused)?;
    let listed: Vec<Document> = listed.try_collect().await.map_err(refused)?;
    let names = listed.iter().filter_map(|collection| collection.get_str("name").ok());
    let mut names: Vec<_> = names.filter(|name| change_stream::is_everyones(name)).map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// The ends of the oplog.
#[derive(Clone, Copy, Debug)]
pub struct Oplog {
    pub first: ClusterTime,
    pub last: ClusterTime,
}

/// Where the oplog begins and ends; only for users that may read it.
pub async fn oplog(client: &Client) -> Result<Oplog, SourceFailure> {
    let oplog = client.database("local").collection::<Document>("oplog.rs");
    let mut ends = [ClusterTime::default(); 2];
    for (end, direction) in ends.iter_mut().zip([1, -1]) {
        let found = oplog.find_one(doc! {}).sort(doc! { "$natural": direction }).projection(doc! { "ts": 1 }).await;
        let doing = Doing::Reading("local.oplog.rs".to_owned());
        let found = found.map_err(|error| server_error::classify(&error, &doing))?;
        if let Some(Ok(time)) = found.as_ref().map(|entry| entry.get_timestamp("ts")) {
            *end = time.into();
        }
    }
    Ok(Oplog { first: ends[0], last: ends[1] })
}
