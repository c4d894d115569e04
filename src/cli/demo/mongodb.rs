//! A real MongoDB of the demo's own: a replica set of one member in the scratch folder, reachable on the loopback
//! address with a password that only the demo knows, gone with it.
//!
//! ```text
//!   mongod --keyFile ──▶ replSetInitiate ──▶ primary ──▶ createUser ──▶ outboxd init
//! ```
//!
//! Until there is a user, the server lets whoever comes from its own machine make the set and the first one.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use mongodb::bson::oid::ObjectId;
use mongodb::bson::{DateTime, Document, Timestamp, doc};
use mongodb::error::{Error, TRANSIENT_TRANSACTION_ERROR};
use mongodb::options::ReturnDocument;
use mongodb::{Client, ClientSession, Collection, Database};
use nix::sys::signal::Signal;

use super::ledger::Event;
use super::mongodb_program::Mongod;
use super::report::Stage;
use super::scratch::{Account, Scratch, Troupe, end, free_port, last_lines, log_file, tie, token};
use super::shop::Standing;
use super::workload::{Outcome, failed};
use crate::cli::{InitOptions, PayloadType, init, unexpected};
use crate::config::{PipelineOptions, Said, Settings};
use crate::failure::Halt;
use crate::source::SourceFailure;
use crate::source::mongodb::checkpoint::Place;
use crate::source::mongodb::token::{ClusterTime, ResumeToken};
use crate::source::mongodb::{lease, server, server_error};

const DATABASE: &str = "shop";
/// As the relay names a pipeline that nobody named.
const PIPELINE: &str = "outboxd_shop";
const SET: &str = "demo";
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// Before a transaction that met another one is begun again.
const GIVE_WAY: Duration = Duration::from_millis(5);

pub struct MongoDb {
    server: Child,
    version: String,
    port: u16,
    password: String,
    database: Database,
}

impl MongoDb {
    /// Starts a server, makes a set of it and runs `init`. To be called on the main thread: see [`tie`].
    pub async fn start(program: &Mongod, account: &Account, scratch: &Scratch, stage: &Stage) -> Result<MongoDb, Halt> {
        let (port, password) = (free_port()?, token(12)?);
        let database = client(&address(port, Some(&password))).await?.database(DATABASE);
        let log = scratch.path().join("server.log");
        let mut command = account.command(&program.path);
        command.args(arguments(scratch.path(), account, port)?).current_dir(scratch.path());
        let (out, err) = log_file(&log)?;
        let server = tie(&mut command, Signal::SIGKILL).stdout(out).stderr(err).spawn();
        let server = server.map_err(|error| unexpected(format!("cannot start MongoDB: {error}")))?;
        let mut mongodb = MongoDb { server, version: program.version.to_string(), port, password, database };
        let starting = format!("Starting MongoDB {}", mongodb.version);
        stage.during(&starting, mongodb.accepts(&log)).await?;
        let making = Box::pin(mongodb.make_set(&log));
        stage.during("Making a replica set of one member", making).await?;
        for collection in ["customers", "orders"] {
            let created = mongodb.database.create_collection(collection).await;
            created.map_err(|error| refused("create the collections", &error))?;
        }
        Box::pin(mongodb.init(stage)).await?;
        Ok(mongodb)
    }

    /// Waits until it takes connections.
    async fn accepts(&mut self, log: &Path) -> Result<(), Halt> {
        let deadline = Instant::now() + STARTS_WITHIN;
        while let Err(error) = tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await {
            let ended = self.server.try_wait().ok().flatten();
            if let Some(status) = ended {
                return Err(unexpected(format!("MongoDB ended at its start ({status}):{}", complaints(log))));
            }
            if Instant::now() > deadline {
                return Err(unexpected(format!("MongoDB does not come up: {error}{}", complaints(log))));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// A set of one member, and the one user.
    async fn make_set(&self, log: &Path) -> Result<(), Halt> {
        let admin = client(&address(self.port, None)).await?.database("admin");
        let run = async |command: Document| {
            let ran = admin.run_command(command).await;
            ran.map_err(|error| refused("make a replica set", &error))
        };
        // What the disk would keep over a crash is of no interest.
        let set = doc! {
            "_id": SET,
            "members": [{ "_id": 0, "host": format!("127.0.0.1:{}", self.port) }],
            "writeConcernMajorityJournalDefault": false,
        };
        run(doc! { "replSetInitiate": set }).await?;
        let deadline = Instant::now() + STARTS_WITHIN;
        while !run(doc! { "hello": 1 }).await?.get_bool("isWritablePrimary").unwrap_or(false) {
            if Instant::now() > deadline {
                return Err(unexpected(format!("the replica set has no primary:{}", complaints(log))));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        run(doc! { "createUser": "root", "pwd": &self.password, "roles": ["root"] }).await?;
        Ok(())
    }

    /// What `outboxd init` does.
    async fn init(&self, stage: &Stage) -> Result<(), Halt> {
        let pipeline = PipelineOptions { source: Some(self.secret_url().into()), ..PipelineOptions::default() };
        let settings = Settings::load(Said { pipeline, without_sink: true, ..Said::default() })?;
        let options = InitOptions {
            dry_run: false,
            payload: PayloadType::Jsonb,
            status_columns: false,
            notify: false,
            inbox: false,
            partition_by: None,
            ttl: None,
        };
        for pipeline in &settings.pipelines {
            let mut say = |line: &str| stage.line(stage.dim(format_args!("              {line}")));
            stage.line(stage.dim(format_args!("              $ outboxd init '{}'", self.url())));
            init::make(pipeline, options, &mut say).await?;
        }
        Ok(())
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    /// The address without the password.
    pub fn url(&self) -> String {
        address(self.port, Some("")).replacen(":@", "@", 1)
    }

    pub fn secret_url(&self) -> String {
        address(self.port, Some(&self.password))
    }

    /// The customers, each with no order and no event yet.
    pub async fn admit(&self, customers: &[&str]) -> Result<(), Halt> {
        let documents = customers.iter().map(|name| doc! { "_id": name, "orders": 0_i64, "events": 0_i64 });
        let admitted = self.database.collection::<Document>("customers").insert_many(documents).await;
        admitted.map(drop).map_err(|error| rejected(&error))
    }

    pub async fn till(&self) -> Result<Till, Halt> {
        let session = self.database.client().start_session().await.map_err(|error| rejected(&error))?;
        let collection = |name| self.database.collection(name);
        let (customers, orders, outbox) = (collection("customers"), collection("orders"), collection("outbox"));
        Ok(Till { session, customers, orders, outbox })
    }

    pub fn watch(&self) -> CheckpointWatch {
        CheckpointWatch(self.database.clone())
    }
}

impl Drop for MongoDb {
    fn drop(&mut self) {
        // Nobody needs the data. A program that was named may be a script that started the server; the leader is not
        // reaped yet, so that the number is still its own.
        if matches!(self.server.try_wait(), Ok(None)) {
            drop(Troupe::of(self.server.id()));
        }
        end(&mut self.server, Signal::SIGKILL, Duration::ZERO);
    }
}

/// With a password the set's; without, that of the one server, whatever its state.
fn address(port: u16, password: Option<&str>) -> String {
    match password {
        Some(password) => {
            format!("mongodb://root:{password}@127.0.0.1:{port}/{DATABASE}?replicaSet={SET}&authSource=admin")
        }
        None => format!("mongodb://127.0.0.1:{port}/?directConnection=true"),
    }
}

async fn client(address: &str) -> Result<Client, Halt> {
    Client::with_uri_str(address).await.map_err(|error| refused("connect", &error))
}

fn refused(what: &str, error: &Error) -> Halt {
    unexpected(format!("cannot {what}: {}", server_error::message(error)))
}

fn rejected(error: &Error) -> Halt {
    failed(&server_error::message(error))
}

/// Small, quick and quiet. Its socket would stand outside of the scratch folder.
fn arguments(scratch: &Path, account: &Account, port: u16) -> Result<Vec<OsString>, Halt> {
    let (data, key) = (scratch.join("data"), scratch.join("key"));
    let unwritten = |path: &PathBuf| {
        let path = path.display().to_string();
        move |error: std::io::Error| unexpected(format!("cannot write {path}: {error}"))
    };
    std::fs::create_dir(&data).map_err(unwritten(&data))?;
    // By it the members of a set know each other; with it users must log in. It may be open to nobody else.
    let mut file = File::options().create_new(true).write(true).mode(0o600).open(&key).map_err(unwritten(&key))?;
    file.write_all(token(48)?.as_bytes()).map_err(unwritten(&key))?;
    account.own(&data)?;
    account.own(&key)?;
    let mut arguments: Vec<OsString> = vec!["--dbpath".into(), data.into(), "--keyFile".into(), key.into()];
    arguments.extend(["--replSet", SET, "--bind_ip", "127.0.0.1", "--port"].map(OsString::from));
    arguments.push(port.to_string().into());
    arguments.extend(["--nounixsocket", "--quiet", "--wiredTigerCacheSizeGB", "0.25"].map(OsString::from));
    arguments.extend(["--oplogSize", "64"].map(OsString::from));
    arguments.extend(["--setParameter", "diagnosticDataCollectionEnabled=false"].map(OsString::from));
    Ok(arguments)
}

/// What went wrong, which stands in the log among much that did not.
fn complaints(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let serious = |line: &&str| line.contains(r#""s":"E""#) || line.contains(r#""s":"F""#);
    let errors: Vec<_> = text.lines().filter(serious).map(|line| format!("\n    {line}")).collect();
    if errors.is_empty() { last_lines(log) } else { errors.concat() }
}

/// Where one writer's orders are taken.
///
/// A transaction that writes what another one has written is refused at once, rather than made to wait, and begins
/// again. The customer is written first, before there is an event, and is its own from then on.
pub struct Till {
    session: ClientSession,
    customers: Collection<Document>,
    orders: Collection<Document>,
    outbox: Collection<Document>,
}

impl Till {
    pub async fn begin(&mut self) -> Result<(), Halt> {
        self.session.start_transaction().await.map_err(|error| rejected(&error))
    }

    pub async fn commit(&mut self) -> Result<(), Halt> {
        self.session.commit_transaction().await.map_err(|error| rejected(&error))
    }

    pub async fn roll_back(&mut self) -> Result<(), Halt> {
        self.session.abort_transaction().await.map_err(|error| rejected(&error))
    }

    /// The number is the customer's own: one for all would be written by every transaction.
    pub async fn order(&mut self, customer: &str, item: &str, amount: i32) -> Result<i64, Halt> {
        let number = loop {
            match self.next(customer, "orders").await {
                Ok(number) => break number?,
                Err(error) if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => {
                    self.roll_back().await?;
                    tokio::time::sleep(GIVE_WAY).await;
                    self.begin().await?;
                }
                Err(error) => return Err(rejected(&error)),
            }
        };
        let order = doc! {
            "_id": { "customer": customer, "number": number },
            "item": item,
            "amount": amount,
            "placed_at": DateTime::now(),
        };
        let inserted = self.orders.insert_one(order).session(&mut self.session).await;
        inserted.map_err(|error| rejected(&error))?;
        Ok(number)
    }

    pub async fn event(&mut self, order: &Outcome, step: &str) -> Result<Event, Halt> {
        // The customer is this transaction's until its end: the numbers rise in commit order.
        let number = self.next(order.customer, "events").await.map_err(|error| rejected(&error))??;
        let id = ObjectId::new();
        let event = doc! {
            "_id": id,
            "partition_key": order.customer,
            "event_type": step,
            "payload": { "number": number, "type": step, "order": order.order, "item": order.item },
            "created_at": DateTime::now(),
        };
        let inserted = self.outbox.insert_one(event).session(&mut self.session).await;
        inserted.map_err(|error| rejected(&error))?;
        Ok(Event { id: id.to_hex(), key: order.customer.to_owned(), number })
    }

    /// Counts one more of these of a customer.
    async fn next(&mut self, customer: &str, what: &str) -> Result<Result<i64, Halt>, Error> {
        let mut one_more = Document::new();
        one_more.insert(what, 1_i64);
        let counted = self
            .customers
            .find_one_and_update(doc! { "_id": customer }, doc! { "$inc": one_more })
            .return_document(ReturnDocument::After)
            .session(&mut self.session)
            .await?;
        let number = counted.and_then(|counted| counted.get_i64(what).ok());
        Ok(number.ok_or_else(|| failed(&format_args!("{customer} is no customer"))))
    }
}

/// Looks at the relay's checkpoint and at the log behind it.
pub struct CheckpointWatch(Database);

impl CheckpointWatch {
    pub async fn look(&self) -> Result<Standing, Halt> {
        self.try_look().await.map_err(|failure| unexpected(failure.to_string()))
    }

    async fn try_look(&self) -> Result<Standing, SourceFailure> {
        let document = lease::document(&self.0, PIPELINE).await?.unwrap_or_default();
        let stored = Place::Document.load(PIPELINE, &document).await?;
        let strange = || SourceFailure::transient("the checkpoint holds no position");
        let confirmed: ResumeToken = stored.ok_or_else(strange)?.position.parse().map_err(|_| strange())?;
        let end = server::oplog(self.0.client()).await?.last;
        let behind = self.transactions(confirmed.time()).await?;
        Ok(Standing { confirmed: confirmed.time().to_string(), end: end.to_string(), behind })
    }

    /// How many transactions of the shop the log has from this time on: a position within one has its time too. A
    /// transaction is one entry there, with its operations inside.
    async fn transactions(&self, from: ClusterTime) -> Result<u64, SourceFailure> {
        let outbox = format!("{DATABASE}.outbox");
        let since = doc! { "$gte": Timestamp::from(from) };
        let its = doc! { "ts": since, "$or": [{ "ns": &outbox, "op": "i" }, { "o.applyOps.ns": &outbox }] };
        let log = self.0.client().database("local").collection::<Document>("oplog.rs");
        let doing = server_error::Doing::Reading("local.oplog.rs".to_owned());
        log.count_documents(its).await.map_err(|error| server_error::classify(&error, &doing))
    }
}
