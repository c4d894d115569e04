//! A database of its own on the shared MongoDB server, or on a private one.

use std::time::{Duration, Instant};

use futures_util::TryStreamExt as _;
use mongodb::bson::{Bson, Document, Timestamp, doc};
use mongodb::error::{Error, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT};
use mongodb::options::{ClientOptions, ReturnDocument};
use mongodb::{Client, ClientSession, Collection};
use tokio::sync::Mutex;

use super::{Expected, PATIENCE, unique, variable};

/// The shared server, without a database.
pub fn mongodb_url() -> String {
    variable("OUTBOXD_TEST_MONGODB_URL")
}

pub async fn mongodb_client(url: &str) -> Client {
    Client::with_uri_str(url).await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// Dropped at the end.
pub struct MongoDatabase {
    name: String,
    server_url: String,
    client: Client,
}

impl MongoDatabase {
    /// Of a name that nobody else has; it comes to be with its first collection.
    pub async fn create() -> Self {
        Self::create_at(&mongodb_url()).await
    }

    /// `server_url` names no database and has options: `mongodb://…/?…`.
    pub async fn create_at(server_url: &str) -> Self {
        let client = mongodb_client(server_url).await;
        MongoDatabase { name: unique("promise"), server_url: server_url.to_owned(), client }
    }

    /// With an outbox of the native layout, and the counters that writers take the order of commits from.
    pub async fn with_outbox() -> Self {
        Self::with_outbox_at(&mongodb_url()).await
    }

    pub async fn with_outbox_at(server_url: &str) -> Self {
        let database = Self::create_at(server_url).await;
        for collection in ["outbox", "counters"] {
            database.run(doc! { "create": collection }).await;
        }
        database
    }

    pub fn url(&self) -> String {
        self.of(&self.server_url)
    }

    /// This database by another way to its server, such as another user's.
    pub fn of(&self, server_url: &str) -> String {
        assert!(server_url.contains("/?"), "{server_url} names no database and has options");
        server_url.replacen("/?", &format!("/{}?", self.name), 1)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name that a pipeline takes unless it is given another.
    pub fn pipeline(&self) -> String {
        format!("outboxd_{}", self.name)
    }

    pub fn handle(&self) -> mongodb::Database {
        self.client.database(&self.name)
    }

    pub fn collection(&self, name: &str) -> Collection<Document> {
        self.handle().collection(name)
    }

    /// Runs one command.
    pub async fn run(&self, command: Document) -> Document {
        let ran = self.handle().run_command(command.clone()).await;
        ran.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Runs one command in the database `admin`.
    pub async fn administer(&self, command: Document) -> Document {
        let ran = self.client.database("admin").run_command(command.clone()).await;
        ran.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Makes a user with these roles, who logs in with the password `secret`, and returns the address of this database
    /// as theirs. The user goes with the database.
    pub async fn create_user(&self, user: &str, roles: Vec<Bson>) -> String {
        self.run(doc! { "createUser": user, "pwd": "secret", "roles": roles }).await;
        self.url_of(user, "secret")
    }

    /// The address of this database as that of one of its users.
    pub fn url_of(&self, user: &str, password: &str) -> String {
        let (_, rest) = self.server_url.split_once('@').expect("the server wants a login");
        let address = rest.replace("authSource=admin", &format!("authSource={}", self.name));
        self.of(&format!("mongodb://{user}:{password}@{address}"))
    }

    /// Adds a document to the outbox.
    pub async fn insert(&self, document: Document) {
        self.collection("outbox").insert_one(document).await.expect("a document is added");
    }

    /// Adds documents to the outbox, each committed by itself, in this order.
    pub async fn insert_many(&self, documents: impl IntoIterator<Item = Document>) {
        self.collection("outbox").insert_many(documents).await.expect("documents are added");
    }

    /// Adds documents to the outbox in one transaction.
    pub async fn insert_together(&self, documents: impl IntoIterator<Item = Document>) {
        let documents: Vec<_> = documents.into_iter().collect();
        let mut session = self.session().await;
        session.start_transaction().await.expect("a transaction is begun");
        self.collection("outbox").insert_many(documents).session(&mut session).await.expect("documents are added");
        session.commit_transaction().await.expect("the transaction is committed");
    }

    pub async fn session(&self) -> ClientSession {
        self.client.start_session().await.expect("a session is begun")
    }

    pub async fn writer(&self) -> MongoWriter {
        MongoWriter { session: Mutex::new(self.session().await), database: self.handle() }
    }

    /// All of a collection, by id.
    pub async fn documents(&self, collection: &str) -> Vec<Document> {
        self.sorted(collection, doc! { "_id": 1 }).await
    }

    async fn sorted(&self, collection: &str, order: Document) -> Vec<Document> {
        let found = self.collection(collection).find(doc! {}).sort(order).await;
        let read = found.expect("the collection is read").try_collect().await;
        read.expect("the collection is read")
    }

    pub async fn count(&self, collection: &str) -> u64 {
        self.collection(collection).count_documents(doc! {}).await.expect("the documents are counted")
    }

    /// What people did to positions: action, where from, where to, why, who.
    pub async fn audit(&self) -> Vec<[String; 5]> {
        use futures_util::TryStreamExt as _;
        let found = self.collection("outboxd_audit").find(doc! {}).sort(doc! { "at": 1 }).await;
        let found: Vec<Document> = found.expect("the records").try_collect().await.expect("the records");
        let text = |record: &Document, name: &str| record.get_str(name).unwrap_or_default().to_owned();
        let who = |record: &Document| format!("{} {}", text(record, "database_user"), text(record, "os_user"));
        let fields = |record: &Document| {
            let plain = |name: &str| text(record, name);
            [plain("action"), plain("position_from"), plain("position_to"), plain("reason"), who(record)]
        };
        found.iter().map(fields).collect()
    }

    /// The pipeline's document, with its stored position.
    pub async fn checkpoint(&self) -> Option<Document> {
        let found = self.collection("outboxd_checkpoint").find_one(doc! { "_id": self.pipeline() }).await;
        found.expect("the checkpoint is read")
    }

    /// The time of the last write to the server's log.
    pub async fn end_of_log(&self) -> Timestamp {
        let hello = self.run(doc! { "hello": 1 }).await;
        let last = hello.get_document("lastWrite").and_then(|last| last.get_document("opTime"));
        last.and_then(|last| last.get_timestamp("ts")).expect("the log has an end")
    }

    /// The time of the last write to this database that is not the relay's own.
    pub async fn last_write(&self) -> Timestamp {
        let own = doc! { "$regex": format!("^{}[.](?!outboxd_checkpoint)", self.name) };
        let written = doc! { "$or": [{ "ns": own.clone() }, { "o.applyOps.ns": own }] };
        let log: Collection<Document> = self.client.database("local").collection("oplog.rs");
        let found = log.find_one(written).sort(doc! { "$natural": -1 }).await.expect("the log is read");
        found.and_then(|entry| entry.get_timestamp("ts").ok()).expect("something was written")
    }

    /// What was committed by [`MongoWriter`]s, by key, in commit order.
    pub async fn expected(&self) -> Expected {
        let documents = self.sorted("outbox", doc! { "partition_key": 1, "seq": 1 }).await;
        let text = |document: &Document, name: &str| match document.get(name) {
            Some(Bson::String(text)) => text.clone(),
            Some(Bson::ObjectId(id)) => id.to_hex(),
            other => panic!("{name} is {other:?}"),
        };
        Expected::of_rows(documents.iter().map(|document| (text(document, "partition_key"), text(document, "_id"))))
    }
}

impl Drop for MongoDatabase {
    fn drop(&mut self) {
        let (url, name) = (self.server_url.clone(), self.name.clone());
        // A private server may be gone already.
        let dropping = async move {
            if let Ok(mut options) = ClientOptions::parse(&url).await {
                options.server_selection_timeout = Some(Duration::from_secs(5));
                if let Ok(client) = Client::with_options(options) {
                    let database = client.database(&name);
                    let _ = database.run_command(doc! { "dropAllUsersFromDatabase": 1 }).await;
                    let _ = database.run_command(doc! { "dropAllRolesFromDatabase": 1 }).await;
                    let _ = database.drop().await;
                }
            }
        };
        let _ = std::thread::spawn(move || {
            if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
                let _ = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), dropping).await });
            }
        })
        .join();
    }
}

/// A session that adds events.
///
/// As with the other databases, an event takes the next number of its key from a counter in its own transaction. Two
/// transactions that want the same counter do not wait for each other here: the later one fails, and is made again.
pub struct MongoWriter {
    session: Mutex<ClientSession>,
    database: mongodb::Database,
}

impl MongoWriter {
    pub async fn begin(&self) {
        self.try_begin().await.expect("a transaction is begun");
    }

    /// Adds one event in the transaction that is open.
    pub async fn add(&self, key: &str) {
        self.try_add(key).await.unwrap_or_else(|error| panic!("an event is added: {error}"));
    }

    /// Commits the transaction that is open.
    pub async fn end(&self) {
        self.try_end().await.expect("the transaction is committed");
    }

    pub async fn abort(&self) {
        self.session.lock().await.abort_transaction().await.expect("the transaction is aborted");
    }

    /// One transaction with an event of each key, made again as long as another one is in its way or there is no
    /// primary.
    pub async fn commit(&self, keys: &[&str]) {
        let begin = Instant::now();
        while let Err(error) = self.try_commit(keys).await {
            let passing = error.contains_label(TRANSIENT_TRANSACTION_ERROR) && begin.elapsed() < PATIENCE;
            assert!(passing, "events are committed: {error}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// One transaction with an event of each key that comes to nothing, either way: it is aborted here, or already was
    /// because another one was in its way.
    pub async fn roll_back(&self, keys: &[&str]) {
        self.begin().await;
        for key in keys {
            if let Err(error) = self.try_add(key).await {
                assert!(error.contains_label(TRANSIENT_TRANSACTION_ERROR), "an event is added: {error}");
                break;
            }
        }
        let _ = self.session.lock().await.abort_transaction().await;
    }

    /// For a server that may be going away: whether the events were committed is what the collection says later.
    pub async fn try_commit(&self, keys: &[&str]) -> Result<(), Error> {
        let done = async {
            self.try_begin().await?;
            for key in keys {
                self.try_add(key).await?;
            }
            self.try_end().await
        };
        let done = done.await;
        if done.is_err() {
            let _ = self.session.lock().await.abort_transaction().await;
        }
        done
    }

    async fn try_begin(&self) -> Result<(), Error> {
        self.session.lock().await.start_transaction().await
    }

    async fn try_add(&self, key: &str) -> Result<(), Error> {
        let mut session = self.session.lock().await;
        let counted = self
            .database
            .collection::<Document>("counters")
            .find_one_and_update(doc! { "_id": key }, doc! { "$inc": { "seq": 1_i64 } })
            .upsert(true)
            .return_document(ReturnDocument::After)
            .session(&mut *session)
            .await?;
        let seq = counted.and_then(|counter| counter.get_i64("seq").ok()).expect("the counter has a number");
        let event = doc! { "partition_key": key, "payload": { "key": key, "seq": seq }, "seq": seq };
        self.database.collection("outbox").insert_one(event).session(&mut *session).await.map(drop)
    }

    async fn try_end(&self) -> Result<(), Error> {
        let (mut session, begin) = (self.session.lock().await, Instant::now());
        loop {
            match session.commit_transaction().await {
                Err(error) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) && begin.elapsed() < PATIENCE => {
                }
                done => return done,
            }
        }
    }
}
