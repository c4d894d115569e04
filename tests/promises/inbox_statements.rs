//! The statements of docs/consumers.md, run as a consumer in any language runs them, on each database.

use std::path::Path;

use mongodb::ClientSession;
use mongodb::bson::{Bson, Document, doc};
use mongodb::error::TRANSIENT_TRANSACTION_ERROR;
use outboxd::source::mysql::session::Session;
use tokio_postgres::{Client, NoTls};

use crate::support::{Database, Dice, Outbox, Server, Source, mongodb_client, mysql_session, outboxd};

/// For each database.
macro_rules! in_each_database {
    ($($promise:ident),+ $(,)?) => {
        $(mod $promise {
            use super::*;
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() { Box::pin(super::$promise(Source::Postgres)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn oldest_postgres() { Box::pin(super::$promise(Source::OldestPostgres)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mysql() { Box::pin(super::$promise(Source::MySql)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mariadb() { Box::pin(super::$promise(Source::MariaDb)).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn mongodb() { Box::pin(super::$promise(Source::MongoDb)).await }
        })+
    };
}

in_each_database!(
    the_statements_of_the_guide_tell_new_events_from_repeated_and_late_ones,
    consumers_at_once_that_run_the_statements_of_the_guide_process_each_event_once_and_no_version_late,
);

/// The statements that stand in a section of docs/consumers.md.
fn statements(heading: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/consumers.md");
    let guide = std::fs::read_to_string(path).expect("there is a guide for consumers");
    let (mut inside, mut within) = (false, false);
    let mut blocks: Vec<String> = Vec::new();
    for line in guide.lines() {
        if within {
            match line {
                "```" => within = false,
                _ => blocks.last_mut().expect("a block was begun").extend([line, "\n"]),
            }
        } else if line.starts_with('#') {
            // Deeper headings are part of the section.
            inside = line == heading || inside && line.starts_with("####");
        } else if inside && ["```sql", "```js"].contains(&line) {
            within = true;
            blocks.push(String::new());
        }
    }
    blocks
}

/// What one database's section has.
struct Guide {
    event: String,
    version: Vec<String>,
    prune: String,
}

impl Guide {
    fn of(source: Source) -> Self {
        let (heading, versions) = match source {
            Source::Postgres | Source::OldestPostgres => ("### PostgreSQL", 1),
            Source::MySql | Source::MariaDb => ("### MySQL and MariaDB", 2),
            Source::MongoDb => ("### MongoDB", 1),
        };
        let mut blocks = statements(heading).into_iter();
        let mut next = || blocks.next().unwrap_or_else(|| panic!("a statement is missing under {heading}"));
        Guide { event: next(), version: (0..versions).map(|_| next()).collect(), prune: next() }
    }
}

#[derive(Clone, Debug)]
struct Event {
    group: &'static str,
    id: String,
    /// Type, id, version.
    entity: Option<(&'static str, String, i64)>,
}

impl Event {
    fn plain(id: &str) -> Self {
        Event { group: "billing", id: id.to_owned(), entity: None }
    }

    fn of(id: &str, version: i64) -> Self {
        Event { entity: Some(("thing", "x".to_owned(), version)), ..Event::plain(id) }
    }

    /// The statement with this event in the place of its parameters.
    fn fill(&self, statement: &str) -> String {
        let json = statement.trim_start().starts_with("db.");
        let text = |value: Option<&str>| match (value, json) {
            (None, true) => "null".to_owned(),
            (None, false) => "NULL".to_owned(),
            (Some(value), true) => format!("\"{value}\""),
            (Some(value), false) => format!("'{value}'"),
        };
        let entity = self.entity.as_ref();
        let version = entity.map(|(.., version)| version.to_string());
        let values = [
            (":consumer_group", text(Some(self.group))),
            (":event_id", text(Some(&self.id))),
            (":entity_type", text(entity.map(|(kind, ..)| *kind))),
            (":entity_id", text(entity.map(|(_, id, _)| id.as_str()))),
            (":entity_version", version.unwrap_or_else(|| text(None))),
            (":now", r#"{ "$date": { "$numberLong": "1767323045000" } }"#.to_owned()),
        ];
        values.iter().fold(statement.to_owned(), |filled, (name, value)| match json {
            true => filled.replace(&format!("\"{name}\""), value),
            false => filled.replace(name, value),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judged {
    New,
    Duplicate,
    Late,
    /// The transaction has lost against another and is rolled back.
    Again,
}

/// A consumer's connection.
enum Connection {
    Postgres(Client),
    MySql(Box<Session>),
    MongoDb(Box<(ClientSession, mongodb::Database)>),
}

fn command(text: &str) -> Document {
    let json = text.trim().strip_prefix("db.runCommand(").and_then(|rest| rest.strip_suffix(')'));
    serde_json::from_str(json.unwrap_or_else(|| panic!("{text} is no command"))).expect("a command is JSON")
}

const DUPLICATE_KEY: u16 = 1062;
const DEADLOCK: u16 = 1213;

impl Connection {
    async fn open(source: Source, url: &str) -> Self {
        match source {
            Source::Postgres | Source::OldestPostgres => {
                let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("a client");
                tokio::spawn(connection);
                Connection::Postgres(client)
            }
            Source::MySql | Source::MariaDb => Connection::MySql(Box::new(mysql_session(url).await)),
            Source::MongoDb => {
                let client = mongodb_client(url).await;
                let database = client.default_database().expect("the URL names a database");
                let session = client.start_session().await.expect("a session");
                Connection::MongoDb(Box::new((session, database)))
            }
        }
    }

    /// Begins a transaction, and judges the event as the guide says; when it is new, lets it have its effect.
    async fn judge(&mut self, guide: &Guide, event: &Event) -> Judged {
        self.transaction("BEGIN").await;
        let judged = self.judged(guide, event).await;
        if judged == Judged::Again {
            self.transaction("ROLLBACK").await;
        }
        judged
    }

    async fn process(&mut self, guide: &Guide, event: &Event) -> Judged {
        loop {
            match self.judge(guide, event).await {
                Judged::Again => {}
                judged => {
                    if self.transaction("COMMIT").await {
                        return judged;
                    }
                }
            }
        }
    }

    /// Whether it went through.
    async fn transaction(&mut self, word: &str) -> bool {
        match self {
            Connection::Postgres(client) => client.batch_execute(word).await.expect("it goes through"),
            Connection::MySql(session) => session.execute(word).await.expect("it goes through"),
            Connection::MongoDb(both) => {
                let session = &mut both.0;
                match word {
                    "BEGIN" => session.start_transaction().await.expect("a transaction is begun"),
                    "COMMIT" => match session.commit_transaction().await {
                        Err(error) if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => return false,
                        ended => ended.expect("it is committed"),
                    },
                    _ => drop(session.abort_transaction().await),
                }
            }
        }
        true
    }

    async fn judged(&mut self, guide: &Guide, event: &Event) -> Judged {
        let version = event.entity.as_ref().map(|(.., version)| *version);
        match self {
            Connection::Postgres(client) => {
                let rows = client.execute(&event.fill(&guide.event), &[]).await.expect("the event is remembered");
                if rows == 0 {
                    return Judged::Duplicate;
                }
                if version.is_some()
                    && client.execute(&event.fill(&guide.version[0]), &[]).await.expect("the version is remembered")
                        == 0
                {
                    return Judged::Late;
                }
                let effect = "INSERT INTO effects (event_id, version) VALUES ($1, $2)";
                client.execute(effect, &[&event.id, &version]).await.expect("the effect");
            }
            Connection::MySql(session) => {
                match session.try_query(&event.fill(&guide.event)).await {
                    Ok(_) => {}
                    Err(error) if error.code() == Some(DUPLICATE_KEY) => return Judged::Duplicate,
                    Err(error) if error.code() == Some(DEADLOCK) => return Judged::Again,
                    Err(error) => panic!("the event is not remembered: {error:?}"),
                }
                if version.is_some() {
                    match session.try_query(&event.fill(&guide.version[0])).await {
                        Ok(_) => {}
                        Err(error) if error.code() == Some(DEADLOCK) => return Judged::Again,
                        Err(error) => panic!("the version is not remembered: {error:?}"),
                    }
                    let told = session.query_one(&event.fill(&guide.version[1])).await.expect("the version is there");
                    if told.number(0) == 0 {
                        return Judged::Late;
                    }
                }
                let version = version.map_or_else(|| "NULL".to_owned(), |version| version.to_string());
                let effect = format!("INSERT INTO effects (event_id, version) VALUES ('{}', {version})", event.id);
                session.execute(&effect).await.expect("the effect");
            }
            Connection::MongoDb(both) => {
                let (session, database) = &mut **both;
                let mut commands = vec![command(&event.fill(&guide.event))];
                if version.is_some() {
                    commands.push(command(&event.fill(&guide.version[0])));
                }
                let effect = doc! { "event_id": &event.id, "version": version };
                commands.push(doc! {
                    "update": "effects",
                    "updates": [{ "q": { "_id": 1 }, "u": { "$push": { "all": effect } }, "upsert": true }],
                });
                for (at, command) in commands.into_iter().enumerate() {
                    let answer = match database.run_command(command).session(&mut *session).await {
                        Err(error) if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => return Judged::Again,
                        answer => answer.expect("the server answers"),
                    };
                    if at == 0 && !answer.contains_key("upserted") {
                        return Judged::Duplicate;
                    }
                    let last = answer.get_document("value").ok().and_then(|value| value.get("entity_version"));
                    let last = last.and_then(|last| last.as_i64().or(last.as_i32().map(i64::from)));
                    if last >= version && last.is_some() {
                        return Judged::Late;
                    }
                }
            }
        }
        Judged::New
    }

    /// The events that have had their effect, in order, with their versions.
    async fn effects(&mut self) -> Vec<(String, Option<i64>)> {
        let query = "SELECT event_id, version FROM effects ORDER BY seq";
        match self {
            Connection::Postgres(client) => {
                let rows = client.query(query, &[]).await.expect("the effects");
                rows.iter().map(|row| (row.get(0), row.get(1))).collect()
            }
            Connection::MySql(session) => {
                let rows = session.query(query).await.expect("the effects");
                rows.iter().map(|row| (row.string(0), row.text(1).and_then(|number| number.parse().ok()))).collect()
            }
            Connection::MongoDb(both) => {
                let effects = both.1.collection::<Document>("effects").find_one(doc! {}).await.expect("the effects");
                let all = effects.and_then(|effects| effects.get_array("all").ok().cloned()).unwrap_or_default();
                let one = |effect: Bson| {
                    let effect = effect.as_document().cloned().expect("an effect is a document");
                    (effect.get_str("event_id").expect("an id").to_owned(), effect.get_i64("version").ok())
                };
                all.into_iter().map(one).collect()
            }
        }
    }
}

/// A consumer's database, with its tables made by `outboxd init --inbox`.
async fn consumers_database(source: Source) -> Outbox {
    let database = Outbox::create(source).await;
    let url = database.url();
    let dry = outboxd(&["init", "--inbox", "--dry-run", &url]).await;
    assert!(dry.code == 0 && dry.stdout.contains("processed_versions"), "{dry:?}");
    for expected in ["created", "nothing to do: everything is in place"] {
        let made = outboxd(&["init", "--inbox", &url]).await;
        assert!(made.code == 0 && made.stdout.contains(expected), "{made:?}");
    }
    match source {
        Source::MongoDb => drop(database.mongodb().run(doc! { "create": "effects" }).await),
        _ => {
            let number = if source.is_postgres() { "bigserial" } else { "BIGINT AUTO_INCREMENT" };
            let columns = format!("seq {number} PRIMARY KEY, event_id VARCHAR(64), version BIGINT");
            database.execute(&format!("CREATE TABLE effects ({columns})")).await;
        }
    }
    database
}

async fn the_statements_of_the_guide_tell_new_events_from_repeated_and_late_ones(source: Source) {
    let (database, guide) = (consumers_database(source).await, Guide::of(source));
    let mut consumer = Connection::open(source, &database.url()).await;
    let audit = Event { group: "audit", ..Event::plain("1") };
    let other_kind = Event { entity: Some(("person", "x".to_owned(), 1)), ..Event::plain("7") };
    for (event, expected) in [
        (Event::plain("1"), Judged::New),
        (Event::plain("1"), Judged::Duplicate),
        (audit, Judged::New),
        (Event::of("2", 1), Judged::New),
        (Event::of("3", 3), Judged::New),
        (Event::of("4", 2), Judged::Late),
        (Event::of("5", 3), Judged::Late),
        (Event::of("4", 2), Judged::Duplicate),
        (Event::of("3", 3), Judged::Duplicate),
        (Event::of("6", 4), Judged::New),
        (other_kind, Judged::New),
    ] {
        assert_eq!(consumer.process(&guide, &event).await, expected, "{event:?}");
    }
    // A transaction that is rolled back has seen nothing.
    for event in [Event::plain("8"), Event::of("9", 5)] {
        assert_eq!(consumer.judge(&guide, &event).await, Judged::New);
        consumer.transaction("ROLLBACK").await;
        assert_eq!(consumer.process(&guide, &event).await, Judged::New);
        assert_eq!(consumer.process(&guide, &event).await, Judged::Duplicate);
    }
    let effects: Vec<_> = consumer.effects().await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(effects, ["1", "1", "2", "3", "6", "7", "8", "9"]);

    prune(&database, &guide).await;
    // What was pruned is not known any more, but a version that is late is.
    assert_eq!(consumer.process(&guide, &Event::of("10", 4)).await, Judged::Late);
    assert_eq!(consumer.process(&guide, &Event::plain("8")).await, Judged::Duplicate);
}

/// Prunes as the guide says, and looks at what is left.
async fn prune(database: &Outbox, guide: &Guide) {
    if database.source == Source::MongoDb {
        let database = database.mongodb();
        database.run(command(&guide.prune)).await;
        let indexes = database.run(doc! { "listIndexes": "processed_events" }).await;
        assert!(indexes.to_string().contains("\"expireAfterSeconds\": 2592000"), "{indexes}");
        return;
    }
    let old = if database.source.is_postgres() { "interval '31 days'" } else { "INTERVAL 31 DAY" };
    let age = format!("UPDATE processed_events SET processed_at = processed_at - {old} WHERE event_id <> '8'");
    database.execute(&age).await;
    database.execute(&guide.prune).await;
    let left = database.text("SELECT event_id FROM processed_events").await;
    let count = database.text("SELECT COUNT(*) FROM processed_events").await;
    assert_eq!((left.as_deref(), count.as_deref()), (Some("8"), Some("1")));
}

async fn consumers_at_once_that_run_the_statements_of_the_guide_process_each_event_once_and_no_version_late(
    source: Source,
) {
    let database = consumers_database(source).await;
    let url = database.url();
    let consumer = |seed: u64| {
        let url = url.clone();
        tokio::spawn(async move {
            let guide = Guide::of(source);
            let (mut consumer, mut dice) = (Connection::open(source, &url).await, Dice::seeded(seed));
            let versions = (1..=15).map(|version| Event::of(&format!("v{version}"), version));
            let mut left: Vec<Event> = (0..30).map(|n| Event::plain(&format!("p{n}"))).chain(versions).collect();
            while !left.is_empty() {
                let event = left.swap_remove(dice.roll(left.len() as u64) as usize);
                consumer.process(&guide, &event).await;
            }
        })
    };
    for one in (1..=4).map(consumer).collect::<Vec<_>>() {
        one.await.expect("the consumer goes through");
    }
    let effects = Connection::open(source, &url).await.effects().await;
    let mut plain: Vec<_> = effects.iter().filter(|(_, version)| version.is_none()).map(|(id, _)| id).collect();
    plain.sort();
    let count = plain.len();
    plain.dedup();
    assert_eq!((count, plain.len()), (30, 30), "each plain event has its effect once: {effects:?}");
    let versions: Vec<_> = effects.iter().filter_map(|(_, version)| *version).collect();
    assert!(versions.is_sorted_by(|one, next| one < next), "{versions:?}");
    assert_eq!(versions.last(), Some(&15));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_before_and_the_layout_occurred_on_are_as_the_guide_says() {
    // A table that another tool has filled.
    let fill = statements("## The tables").concat();
    for source in [Source::Postgres, Source::MySql, Source::MariaDb] {
        let database = consumers_database(source).await;
        database
            .execute(
                "INSERT INTO processed_events (consumer_group, event_id, entity_type, entity_id, entity_version)
                 VALUES ('billing', 'a', NULL, NULL, NULL), ('billing', 'b', NULL, 'x', 1), ('billing', 'c', NULL, 'x', 2)",
            )
            .await;
        database.execute(&fill).await;
        let seen = database.text("SELECT entity_version FROM processed_versions WHERE entity_id = 'x'").await;
        assert_eq!(seen.as_deref(), Some("2"), "{source:?}");
    }

    let database = Database::create(Server::Newest).await;
    let script = include_str!("../../sql/postgres/processed-events-occurred-on.sql");
    database.execute(&format!("CREATE SCHEMA outbox; {script}")).await;
    database.execute(script).await;
    let insert = statements("### PostgreSQL").pop().expect("the layout has a statement");
    let event = Event::plain("0198c5a2-0000-7000-8000-000000000001");
    for expected in [1, 0] {
        let rows = database.sql.execute(&event.fill(&insert), &[]).await.expect("the event is remembered");
        assert_eq!(rows, expected);
    }
}
