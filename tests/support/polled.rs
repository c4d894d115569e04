//! Outboxes with status columns, which are polled or marked: one face for the layouts and the databases that have them.

use std::collections::BTreeMap;
use std::time::Duration;

use mongodb::bson::{DateTime, Document, Uuid, doc};

use super::{Outbox, PATIENCE, Relay, Source, Topic, TopicReader, eventually, outboxd};

/// A layout with status columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Native,
    MessageGroup,
    Entity,
    OccurredOn,
    ProduceReceive,
}

impl Form {
    pub fn layout(self) -> &'static str {
        match self {
            Form::Native => "native",
            Form::MessageGroup => "message-group",
            Form::Entity => "entity",
            Form::OccurredOn => "occurred-on",
            Form::ProduceReceive => "produce-receive",
        }
    }

    /// The table, apart from the one that every test's database has.
    pub fn table(self) -> &'static str {
        match self {
            Form::Native => "polled",
            Form::MessageGroup => "outbox_events",
            Form::Entity => "entities",
            Form::OccurredOn => "outbox.outbox_messages",
            Form::ProduceReceive => "produced",
        }
    }

    fn flags(self, how: How) -> Vec<&'static str> {
        let mut flags = vec!["--layout", self.layout(), "--table", self.table()];
        match how {
            How::Polled => flags.extend(["--capture", "poll"]),
            How::Marked => flags.push("--mark"),
            How::Read => {}
        }
        if self == Form::OccurredOn {
            flags.extend(["--column", "key=/key"]);
        }
        flags
    }
}

/// Who writes the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Whoever polls the table.
    Polled,
    /// Whoever delivers it from the log.
    Marked,
    /// Nobody who delivers it.
    Read,
}

/// A database with a table of a layout, made by `init`.
pub struct Polled {
    pub outbox: Outbox,
    pub form: Form,
    how: How,
}

impl Polled {
    pub async fn create(source: Source, form: Form) -> Self {
        Self::init(source, form, &[]).await
    }

    /// With more that is said to `init`.
    pub async fn init(source: Source, form: Form, more: &[&str]) -> Self {
        Self::made(Outbox::create(source).await, form, How::Polled, more).await
    }

    /// Whose rows are read from the log, and marked.
    pub async fn marked(source: Source, form: Form) -> Self {
        Self::made(Outbox::create(source).await, form, How::Marked, &[]).await
    }

    /// On a private server.
    pub async fn marked_at(source: Source, server_url: &str, form: Form) -> Self {
        Self::made(Outbox::create_at(source, server_url).await, form, How::Marked, &[]).await
    }

    /// On a private server, whose rows are read from the log and left as they are.
    pub async fn read_at(source: Source, server_url: &str, form: Form) -> Self {
        Self::made(Outbox::create_at(source, server_url).await, form, How::Read, &[]).await
    }

    /// On a private server, and polled.
    pub async fn create_at(source: Source, server_url: &str, form: Form) -> Self {
        Self::made(Outbox::create_at(source, server_url).await, form, How::Polled, &[]).await
    }

    async fn made(outbox: Outbox, form: Form, how: How, more: &[&str]) -> Self {
        let url = outbox.url();
        for expected in ["created ", "nothing to do: everything is in place"] {
            let ended = outboxd(&[&["init", &url], &form.flags(how)[..], more].concat()).await;
            assert!(ended.code == 0 && ended.stdout.contains(expected), "{ended:?}");
        }
        Polled { outbox, form, how }
    }

    /// What tells outboxd of the table.
    pub fn flags(&self) -> Vec<&'static str> {
        self.form.flags(self.how)
    }

    /// The arguments of a run into a topic.
    pub fn arguments<'a>(&'a self, url: &'a str, topic: &'a Topic, flags: &[&'a str]) -> Vec<&'a str> {
        let run = ["run", url, "--brokers", &topic.brokers, "--topic", &topic.name];
        [&run[..], &self.flags(), flags].concat()
    }

    pub fn relay(&self, topic: &Topic, flags: &[&str]) -> Relay {
        let url = self.outbox.url();
        Relay::spawn(&self.arguments(&url, topic, flags))
    }

    /// A run to some other sink.
    pub fn relay_to(&self, sink: &str, flags: &[&str]) -> Relay {
        let url = self.outbox.url();
        Relay::spawn(&[&["run", &url, "--sink", sink], &self.flags()[..], flags].concat())
    }

    /// Adds the rows `from..to` of a key in one statement: each says its key and its number.
    pub async fn add(&self, key: &str, numbers: std::ops::Range<usize>) {
        self.add_of(numbers.map(|n| (key.to_owned(), n, format!(r#"{{"key":"{key}","n":{n}}}"#))).collect()).await;
    }

    /// Adds rows of a key, a number and a payload.
    pub async fn add_of(&self, rows: Vec<(String, usize, String)>) {
        if self.outbox.source == Source::MongoDb {
            let documents: Vec<_> = rows.iter().map(|(key, n, payload)| self.document(key, *n, payload)).collect();
            let collection = self.outbox.mongodb().collection(self.form.table());
            collection.insert_many(documents).await.expect("documents are added");
            return;
        }
        let values: Vec<_> = rows.iter().map(|(key, n, payload)| self.values(key, *n, payload)).collect();
        let columns = match self.form {
            Form::Native => "partition_key, event_type, payload",
            Form::MessageGroup => "id, type, message_group, payload",
            Form::Entity => "event_type, entity_type, entity_id, entity_version, partition_key, payload",
            Form::OccurredOn => r#""Type", "Content", "OccurredOnUtc""#,
            Form::ProduceReceive => "stid, code, `rank`, payload",
        };
        let columns = if self.outbox.source.is_postgres() { columns.replace('`', "") } else { columns.to_owned() };
        let statement = format!("INSERT INTO {} ({columns}) VALUES {}", self.form.table(), values.join(", "));
        self.outbox.execute(&statement).await;
    }

    fn values(&self, key: &str, n: usize, payload: &str) -> String {
        match self.form {
            Form::Native => format!("('{key}', 'made', '{payload}')"),
            Form::MessageGroup => format!("('{}', 'EVENT', '{key}', '{payload}')", tsid(key, n)),
            Form::Entity => format!("('made', 'thing', '{key}', {n}, '{key}', '{payload}')"),
            // Rows of one statement would all have its time.
            Form::OccurredOn => format!("('made', '{payload}', now() + interval '{n} microseconds')"),
            Form::ProduceReceive => format!("('{key}', 'made', {n}, '{payload}')"),
        }
    }

    fn document(&self, key: &str, n: usize, payload: &str) -> Document {
        let payload: Document = serde_json::from_str(payload).expect("a payload is an object");
        let now = DateTime::from_millis(DateTime::now().timestamp_millis() + n as i64);
        match self.form {
            Form::Native => doc! {
                "_id": Uuid::new(), "partition_key": key, "event_type": "made", "payload": payload, "created_at": now,
                "status": "pending", "attempts": 0,
            },
            Form::MessageGroup => doc! {
                "_id": tsid(key, n), "type": "EVENT", "messageGroup": key, "payload": serde_json::to_string(&payload).expect("JSON"),
                "status": "PENDING", "retryCount": 0, "createdAt": now,
            },
            Form::Entity => doc! {
                "event_id": Uuid::new(), "event_type": "made", "entity_type": "thing", "entity_id": key,
                "entity_version": n as i32, "partition_key": key, "payload": payload, "status": "pending",
                "retry_count": 0, "max_retries": 5, "created_at": now,
            },
            Form::OccurredOn | Form::ProduceReceive => panic!("{:?} is not a layout of documents", self.form),
        }
    }

    fn done_test(&self) -> &'static str {
        match self.form {
            Form::Native | Form::Entity => "status = 'published' AND published_at IS NOT NULL AND locked_by IS NULL",
            Form::MessageGroup => "status = 'COMPLETED' AND processed_at IS NOT NULL",
            Form::OccurredOn => r#""ProcessedOnUtc" IS NOT NULL"#,
            Form::ProduceReceive => "processed = 1 AND publish = 1 AND produced_at IS NOT NULL",
        }
    }

    /// How many rows the table says were delivered.
    pub async fn done(&self) -> usize {
        if self.outbox.source == Source::MongoDb {
            let done = match self.form {
                Form::MessageGroup => doc! { "status": "COMPLETED", "processedAt": { "$ne": null } },
                _ => doc! { "status": "published", "published_at": { "$ne": null }, "locked_by": null },
            };
            return self.count_documents(done).await;
        }
        self.count(self.done_test()).await
    }

    /// Waits until the table says of so many rows that they were delivered.
    pub async fn until_done(&self, rows: usize) {
        eventually(PATIENCE, &format!("{rows} rows are marked"), async || (self.done().await == rows).then_some(()))
            .await;
    }

    /// How many rows have this status.
    pub async fn of_status(&self, status: &str) -> usize {
        match self.outbox.source {
            Source::MongoDb => self.count_documents(doc! { "status": status }).await,
            _ => self.count(&format!("status = '{status}'")).await,
        }
    }

    pub async fn count_documents(&self, filter: Document) -> usize {
        let collection = self.outbox.mongodb().collection(self.form.table());
        collection.count_documents(filter).await.expect("documents are counted") as usize
    }

    /// How many rows meet a condition of SQL.
    pub async fn count(&self, condition: &str) -> usize {
        let query = format!("SELECT count(*) FROM {} WHERE {condition}", self.form.table());
        self.outbox.text(&query).await.and_then(|text| text.parse().ok()).expect("a count")
    }
}

/// 13 characters that are in the order of the numbers of their key.
fn tsid(key: &str, n: usize) -> String {
    let mark: u32 = key.bytes().fold(7, |mark, byte| mark.wrapping_mul(31).wrapping_add(u32::from(byte)));
    format!("{:05}{n:08}", mark % 100_000)
}

/// What arrived, by key, first occurrences only.
#[derive(Debug, Default)]
pub struct Arrived(pub BTreeMap<String, Vec<u64>>);

impl Arrived {
    /// Notes a payload.
    pub fn note(&mut self, payload: &str) {
        let json: serde_json::Value =
            serde_json::from_str(payload).unwrap_or_else(|error| panic!("{payload}: {error}"));
        let key = json["key"].as_str().expect("a payload has its key").to_owned();
        let n = json["n"].as_u64().expect("a payload has its number");
        let numbers = self.0.entry(key).or_default();
        if !numbers.contains(&n) {
            numbers.push(n);
        }
    }

    /// Everything of these keys is there, each key's in order.
    pub fn is(&self, expected: &[(&str, usize)]) {
        let wanted: BTreeMap<String, Vec<u64>> =
            expected.iter().map(|(key, count)| ((*key).to_owned(), (0..*count as u64).collect())).collect();
        assert_eq!(self.0, wanted);
    }

    pub fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Reads a topic until so many different events are there.
    pub async fn read(reader: &mut TopicReader, count: usize, within: Duration) -> Self {
        let mut arrived = Arrived::default();
        let deadline = std::time::Instant::now() + within;
        while arrived.len() < count {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let Some(record) = reader.next(left).await else { panic!("{} of {count} events arrived", arrived.len()) };
            arrived.note(record.value.as_deref().expect("a value"));
        }
        arrived
    }
}
