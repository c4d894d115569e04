//! One face for the databases that outboxd reads from, so that a promise is written once and proved over each.

use std::time::Duration;

use mongodb::bson::doc;
use outboxd::source::mongodb::token::{ClusterTime, ResumeToken};
use outboxd::source::mysql::position::BinlogPosition;
use outboxd::source::mysql::server;
use outboxd::source::mysql::session::Session;
use tokio::sync::Mutex;

use super::{
    Database, Expected, MongoDatabase, MongoWriter, MySqlDatabase, MySqlFlavor, PATIENCE, PrivateMongo, PrivateMySql,
    PrivatePostgres, Relay, Server, StopMode, Topic, Writer, eventually, parse_lsn, show_lsn,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Postgres,
    OldestPostgres,
    MySql,
    MariaDb,
    MongoDb,
}

impl Source {
    /// As tests are called.
    pub fn named(name: &str) -> Self {
        match name {
            "postgres" => Source::Postgres,
            "oldest_postgres" => Source::OldestPostgres,
            "mysql" => Source::MySql,
            "mariadb" => Source::MariaDb,
            "mongodb" => Source::MongoDb,
            _ => panic!("no source is called {name}"),
        }
    }

    pub fn flavor(self) -> MySqlFlavor {
        match self {
            Source::MySql => MySqlFlavor::MySql,
            Source::MariaDb => MySqlFlavor::MariaDb,
            Source::Postgres | Source::OldestPostgres | Source::MongoDb => {
                panic!("{self:?} is neither MySQL nor MariaDB")
            }
        }
    }

    pub fn is_postgres(self) -> bool {
        matches!(self, Source::Postgres | Source::OldestPostgres)
    }

    /// An expression that makes an object of names and values, which follow each other.
    pub fn json_object(self, members: &str) -> String {
        let function = if self.is_postgres() { "jsonb_build_object" } else { "JSON_OBJECT" };
        format!("{function}({members})")
    }

    /// A table of one column `n` to select from: the numbers from 0, at most a million, in no order.
    pub fn numbers(self, count: usize) -> String {
        if self.is_postgres() {
            return format!("generate_series(0, {count} - 1) AS numbers(n)");
        }
        let (thousands, ones) = (count.div_ceil(1000), count.min(1000));
        format!(
            "(WITH RECURSIVE
                  thousands AS (SELECT 0 AS t UNION ALL SELECT t + 1 FROM thousands WHERE t + 1 < {thousands}),
                  ones AS (SELECT 0 AS o UNION ALL SELECT o + 1 FROM ones WHERE o + 1 < {ones})
              SELECT t * 1000 + o AS n FROM thousands CROSS JOIN ones WHERE t * 1000 + o < {count}) AS numbers"
        )
    }
}

/// A server of one's own.
pub enum PrivateServer {
    Postgres(PrivatePostgres),
    MySql(PrivateMySql),
    MongoDb(PrivateMongo),
}

impl PrivateServer {
    pub async fn start(source: Source) -> Self {
        match source {
            Source::Postgres => PrivateServer::Postgres(PrivatePostgres::start(&[]).await),
            Source::OldestPostgres => panic!("only the newest PostgreSQL has private servers"),
            Source::MySql | Source::MariaDb => PrivateServer::MySql(PrivateMySql::start(source.flavor(), &[]).await),
            Source::MongoDb => PrivateServer::MongoDb(PrivateMongo::start(1, &[]).await),
        }
    }

    /// A clean shutdown.
    pub async fn stop(&mut self) {
        match self {
            PrivateServer::Postgres(server) => server.stop(StopMode::Fast).await,
            PrivateServer::MySql(server) => server.stop().await,
            PrivateServer::MongoDb(_) => panic!("a replica set is stopped member by member"),
        }
    }

    /// Starts it again, at the same address.
    pub async fn resume(&mut self) {
        match self {
            PrivateServer::Postgres(server) => server.resume().await,
            PrivateServer::MySql(server) => server.resume().await,
            PrivateServer::MongoDb(_) => panic!("a replica set is started member by member"),
        }
    }

    /// One whose log can be lost.
    pub async fn forgetful(source: Source) -> Self {
        match source {
            Source::MongoDb => PrivateServer::MongoDb(PrivateMongo::start(1, PrivateMongo::FORGETFUL).await),
            _ => Self::start(source).await,
        }
    }

    /// Makes the log forget what no relay has confirmed.
    pub async fn lose(&self, outbox: &Outbox) {
        match (self, &outbox.database) {
            (_, Kind::Postgres(database)) => {
                let slot = database.slot();
                eventually(PATIENCE, "the slot is dropped", async || {
                    let ended = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active_pid IS NOT NULL";
                    database.text(ended).await;
                    let dropped = format!("SELECT pg_drop_replication_slot('{slot}')");
                    database.sql.batch_execute(&dropped).await.ok()
                })
                .await;
            }
            (_, Kind::MySql(database)) => database.purge_all_but_the_last().await,
            (PrivateServer::MongoDb(server), _) => server.forget_history().await,
            _ => panic!("the outbox is not on this server"),
        }
    }

    pub fn url(&self) -> String {
        match self {
            PrivateServer::Postgres(server) => server.url(),
            PrivateServer::MySql(server) => server.url(),
            PrivateServer::MongoDb(server) => server.url(),
        }
    }
}

/// A place in a database's log.
#[derive(Clone, Debug)]
pub enum LogPosition {
    Lsn(u64),
    Binlog(BinlogPosition),
    Cluster(ClusterTime),
}

impl LogPosition {
    /// Whether whoever stands here has passed the other position.
    pub fn covers(&self, other: &LogPosition) -> bool {
        match (self, other) {
            (LogPosition::Lsn(here), LogPosition::Lsn(there)) => here >= there,
            (LogPosition::Binlog(here), LogPosition::Binlog(there)) => here.covers(there),
            (LogPosition::Cluster(here), LogPosition::Cluster(there)) => here >= there,
            _ => panic!("{self} and {other} are of different logs"),
        }
    }
}

impl std::fmt::Display for LogPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LogPosition::Lsn(lsn) => f.write_str(&show_lsn(*lsn)),
            LogPosition::Binlog(position) => position.fmt(f),
            LogPosition::Cluster(time) => time.fmt(f),
        }
    }
}

/// A database of its own.
pub struct Outbox {
    pub source: Source,
    database: Kind,
}

enum Kind {
    Postgres(Database),
    MySql(MySqlDatabase),
    MongoDb(MongoDatabase),
}

impl Outbox {
    /// With a table of the native layout, the counters of [`OutboxWriter`], and `busy`, whose rows are no events.
    pub async fn create(source: Source) -> Self {
        let database = match source {
            Source::Postgres => Kind::Postgres(Database::with_outbox(Server::Newest).await),
            Source::OldestPostgres => Kind::Postgres(Database::with_outbox(Server::Oldest).await),
            Source::MySql | Source::MariaDb => Kind::MySql(MySqlDatabase::with_outbox(source.flavor()).await),
            Source::MongoDb => Kind::MongoDb(MongoDatabase::with_outbox().await),
        };
        Self::with_busy(source, database).await
    }

    /// On a private server.
    pub async fn create_at(source: Source, server_url: &str) -> Self {
        let database = match source {
            Source::Postgres | Source::OldestPostgres => Kind::Postgres(Database::with_outbox_at(server_url).await),
            Source::MySql | Source::MariaDb => Kind::MySql(MySqlDatabase::with_outbox_at(server_url).await),
            Source::MongoDb => Kind::MongoDb(MongoDatabase::with_outbox_at(server_url).await),
        };
        Self::with_busy(source, database).await
    }

    /// With an outbox of just these columns.
    pub async fn of_columns(source: Source, columns: &str) -> Self {
        let outbox = Self::create(source).await;
        outbox.make_table(columns).await;
        outbox
    }

    /// Makes the outbox anew, of just these columns.
    pub async fn make_table(&self, columns: &str) {
        self.execute("DROP TABLE outbox").await;
        self.execute(&format!("CREATE TABLE outbox ({columns})")).await;
    }

    /// Gives the outbox what marking needs, and nothing that polling needs besides.
    pub async fn add_status(&self) {
        let moment = if self.source.is_postgres() { "timestamptz" } else { "DATETIME(6)" };
        let columns = [
            "status VARCHAR(20) NOT NULL DEFAULT 'pending'",
            "attempts INT NOT NULL DEFAULT 0",
            "last_error TEXT",
            &format!("published_at {moment}"),
        ];
        if self.source != Source::MongoDb {
            let added: Vec<_> = columns.iter().map(|column| format!("ADD COLUMN {column}")).collect();
            self.execute(&format!("ALTER TABLE outbox {}", added.join(", "))).await;
        }
    }

    /// How many rows of the outbox say that they were delivered, and how many do not.
    pub async fn marked(&self) -> (usize, usize) {
        if let Kind::MongoDb(database) = &self.database {
            let count = async |filter| {
                let counted = database.collection("outbox").count_documents(filter).await;
                counted.expect("documents are counted") as usize
            };
            let marked = count(doc! { "status": "published", "published_at": { "$type": "date" } }).await;
            return (marked, count(doc! {}).await - marked);
        }
        let marked = "status = 'published' AND published_at IS NOT NULL";
        let query = format!("SELECT concat(sum(CASE WHEN {marked} THEN 1 ELSE 0 END), ' ', count(*)) FROM outbox");
        let counted = self.text(&query).await.expect("a count");
        let (marked, all) = counted.split_once(' ').expect("two numbers");
        let number = |text: &str| text.parse::<usize>().unwrap_or(0);
        (number(marked), number(all) - number(marked))
    }

    /// Waits until every row of the outbox says that it was delivered.
    pub async fn until_all_marked(&self, within: Duration) {
        eventually(within, "every row is marked", async || {
            let (marked, unmarked) = self.marked().await;
            (marked > 0 && unmarked == 0).then_some(())
        })
        .await;
    }

    async fn with_busy(source: Source, database: Kind) -> Self {
        let outbox = Outbox { source, database };
        match &outbox.database {
            Kind::MongoDb(database) => drop(database.run(doc! { "create": "busy" }).await),
            _ => outbox.execute("CREATE TABLE busy (number BIGINT)").await,
        }
        outbox
    }

    pub fn url(&self) -> String {
        match &self.database {
            Kind::Postgres(database) => database.url(),
            Kind::MySql(database) => database.url(),
            Kind::MongoDb(database) => database.url(),
        }
    }

    /// Opens the test's own connection again, after the server was away.
    pub async fn reconnect(&mut self) {
        match &mut self.database {
            Kind::Postgres(database) => database.reconnect().await,
            Kind::MySql(database) => database.reconnect().await,
            Kind::MongoDb(_) => panic!("MongoDB's driver reconnects by itself"),
        }
    }

    /// The slot that a relay makes unless told another name.
    pub fn slot(&self) -> String {
        match &self.database {
            Kind::Postgres(database) => database.slot(),
            _ => panic!("{:?} has no slots", self.source),
        }
    }

    /// The documents' database.
    pub fn mongodb(&self) -> &MongoDatabase {
        match &self.database {
            Kind::MongoDb(database) => database,
            _ => panic!("{:?} has no documents", self.source),
        }
    }

    /// Runs one statement of SQL.
    pub async fn execute(&self, statement: &str) {
        match &self.database {
            Kind::Postgres(database) => database.execute(statement).await,
            Kind::MySql(database) => database.execute(statement).await,
            Kind::MongoDb(_) => panic!("MongoDB does not understand {statement}"),
        }
    }

    /// Runs statements: in one transaction, if the database lets tables be changed in one.
    pub async fn execute_together(&self, statements: &[String]) {
        match &self.database {
            Kind::Postgres(database) => database.execute(&statements.join("; ")).await,
            Kind::MySql(database) => {
                for statement in statements {
                    database.execute(statement).await;
                }
            }
            Kind::MongoDb(_) => panic!("MongoDB does not understand {statements:?}"),
        }
    }

    /// Has the server drop a reader that is silent for five seconds, where it listens for that. To be called before one
    /// begins.
    pub async fn drop_silent_readers(&self) {
        if let Kind::Postgres(database) = &self.database {
            database.execute(&format!("ALTER DATABASE {} SET wal_sender_timeout = '5s'", database.name())).await;
        }
    }

    /// The first column of the first row, as text.
    pub async fn text(&self, query: &str) -> Option<String> {
        match &self.database {
            Kind::Postgres(database) => database.text(query).await,
            Kind::MySql(database) => database.text(query).await,
            Kind::MongoDb(_) => panic!("MongoDB does not understand {query}"),
        }
    }

    /// Commits something that is no event.
    pub async fn be_busy(&self) {
        match &self.database {
            Kind::MongoDb(database) => {
                database.collection("busy").insert_one(doc! { "number": 1 }).await.expect("a document is added");
            }
            _ => self.execute("INSERT INTO busy VALUES (1)").await,
        }
    }

    pub async fn writer(&self) -> OutboxWriter {
        match &self.database {
            Kind::Postgres(database) => OutboxWriter::Postgres(Writer::connect(database).await),
            Kind::MySql(database) => {
                let mut session = database.connect().await;
                // No locks on gaps, in which writers would wait for each other in a circle.
                let isolation = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
                session.execute(isolation).await.expect("the isolation level is set");
                OutboxWriter::MySql(Box::new(Mutex::new(session)))
            }
            Kind::MongoDb(database) => OutboxWriter::MongoDb(Box::new(database.writer().await)),
        }
    }

    /// The end of the log as it is now; with MongoDB, whose relay writes every second, of what others have written.
    pub async fn end_of_log(&self) -> LogPosition {
        match &self.database {
            Kind::Postgres(database) => LogPosition::Lsn(database.wal_position().await),
            Kind::MySql(database) => {
                let mut session = database.connect().await;
                let server = server::Server::ask(&mut session).await.expect("the server tells of itself");
                LogPosition::Binlog(server.end(&mut session).await.expect("the log has an end"))
            }
            Kind::MongoDb(database) => LogPosition::Cluster(database.last_write().await.into()),
        }
    }

    /// The position that a relay which starts now goes on from.
    pub async fn stored(&self) -> Option<LogPosition> {
        match &self.database {
            Kind::Postgres(database) => database.confirmed().await.map(LogPosition::Lsn),
            Kind::MySql(database) => {
                let text = database.checkpoint().await?;
                Some(LogPosition::Binlog(text.parse().unwrap_or_else(|error| panic!("{error}"))))
            }
            Kind::MongoDb(database) => {
                let document = database.checkpoint().await?;
                let token: ResumeToken = document.get_str("position").ok()?.parse().expect("a resume token is stored");
                Some(LogPosition::Cluster(token.time()))
            }
        }
    }

    /// The position in the checkpoint's row; with PostgreSQL it is not the one to go on from, which is the slot's.
    pub async fn checkpoint(&self) -> Option<LogPosition> {
        let text = self.text("SELECT position FROM outboxd_checkpoint").await?;
        Some(match self.source.is_postgres() {
            true => LogPosition::Lsn(parse_lsn(&text)),
            false => LogPosition::Binlog(text.parse().unwrap_or_else(|error| panic!("{error}"))),
        })
    }

    /// When the checkpoint's row was written.
    pub async fn checkpoint_written_at(&self) -> String {
        self.text("SELECT updated_at FROM outboxd_checkpoint").await.expect("there is a checkpoint")
    }

    pub async fn until_stored(&self, position: &LogPosition, within: Duration) {
        let what = format!("the stored position covers {position}");
        eventually(within, &what, async || self.stored().await.filter(|stored| stored.covers(position))).await;
    }

    /// Waits until all that is in the log up to here is delivered and its position stored.
    pub async fn until_confirmed(&self, position: &LogPosition, within: Duration) {
        if let LogPosition::Binlog(_) = position {
            // The end of the log may be the checkpoint's own write, after which it is not written again unless something
            // else happens.
            self.be_busy().await;
        }
        self.until_stored(position, within).await;
    }

    /// What was committed, by key, in commit order.
    pub async fn expected(&self) -> Expected {
        match &self.database {
            Kind::Postgres(database) => Expected::of(database).await,
            Kind::MySql(database) => {
                let query = "SELECT partition_key, id FROM outbox ORDER BY partition_key, seq";
                let rows = database.rows(query).await;
                Expected::of_rows(rows.iter().map(|row| (row.string(0), row.string(1))))
            }
            Kind::MongoDb(database) => database.expected().await,
        }
    }

    pub fn relay(&self, topic: &Topic, flags: &[&str]) -> Relay {
        Relay::start_at(&self.url(), topic, flags)
    }

    /// Like [`relay`](Self::relay), and waits until it reads the log: what is committed from then on must be delivered.
    pub async fn streaming(&self, topic: &Topic, flags: &[&str]) -> Relay {
        let mut relay = self.relay(topic, flags);
        relay.until_state("streaming").await;
        relay
    }
}

/// A connection that adds events; see [`Writer`].
pub enum OutboxWriter {
    Postgres(Writer),
    MySql(Box<Mutex<Session>>),
    MongoDb(Box<MongoWriter>),
}

impl OutboxWriter {
    /// Runs one statement of SQL.
    pub async fn run(&self, statement: &str) {
        match self {
            OutboxWriter::MongoDb(_) => panic!("MongoDB does not understand {statement}"),
            OutboxWriter::Postgres(writer) => writer.run(statement).await,
            OutboxWriter::MySql(session) => {
                let ran = session.lock().await.execute(statement).await;
                ran.unwrap_or_else(|error| panic!("{statement}: {error}"));
            }
        }
    }

    /// Adds one event in the transaction that is open. Keys must come in one order in all transactions.
    pub async fn add(&self, key: &str) {
        match self {
            OutboxWriter::Postgres(writer) => writer.add(key).await,
            OutboxWriter::MySql(_) => {
                let count = format!(
                    "INSERT INTO counters (name, seq) VALUES ('{key}', 1) ON DUPLICATE KEY UPDATE seq = seq + 1"
                );
                self.run(&count).await;
                let add = format!(
                    "INSERT INTO outbox (partition_key, payload, seq)
                     SELECT name, JSON_OBJECT('key', name, 'seq', seq), seq FROM counters WHERE name = '{key}'"
                );
                self.run(&add).await;
            }
            OutboxWriter::MongoDb(writer) => writer.add(key).await,
        }
    }

    /// One transaction with an event of each key.
    pub async fn commit(&self, keys: &[&str]) {
        if let OutboxWriter::MongoDb(writer) = self {
            return writer.commit(keys).await;
        }
        self.run("BEGIN").await;
        for key in keys {
            self.add(key).await;
        }
        self.run("COMMIT").await;
    }
}

impl Relay {
    pub async fn until_state(&mut self, state: &str) {
        eventually(PATIENCE, &format!("the relay is {state}"), async || {
            assert!(self.is_running(), "the relay ended before it was {state}");
            (self.status().await["state"] == state).then_some(())
        })
        .await;
    }
}
