//! The consumer's side, with the library and its example: an event that comes again has its effect once.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use outboxd::inbox::{Accepted, Entity, Event, Inbox, InboxError, POSTGRES_SCHEMA};
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio_postgres::{Client, IsolationLevel};

use crate::support::{Database, Dice, PATIENCE, Record, Relay, Server, Topic, eventually, outboxd, tail, unique};

#[path = "../../examples/inbox_consumer.rs"]
#[allow(dead_code)]
mod inbox_consumer;

/// What makes this program a consumer: the arguments of the example, one a line.
const ARGUMENTS: &str = "OUTBOXD_TEST_CONSUMER";

/// In a child of the tests below: the example as it stands.
#[tokio::test(flavor = "multi_thread")]
async fn child() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        // Not a child: there is nothing to consume.
        return;
    };
    let arguments: Vec<&str> = arguments.lines().collect();
    let [brokers, topic, group, database] = arguments[..] else { panic!("{arguments:?}") };
    let ended = inbox_consumer::consume(brokers, topic, group, database).await;
    panic!("the consumer ended: {ended:?}");
}

/// The example as a process; killed when dropped.
struct Consumer {
    process: Child,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl Consumer {
    fn start(topic: &Topic, group: &str, database: &Database) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the log");
        let log = folder.path().join("log");
        let file = File::create(&log).expect("a file for the log");
        let process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "promises::inbox::child", "--nocapture"])
            .env(ARGUMENTS, [&topic.brokers, &topic.name, group, &database.url()].join("\n"))
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a file for the log"))
            .stderr(file)
            .spawn()
            .expect("the consumer starts");
        Consumer { process, log, _folder: folder }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// How often it has said so of an event.
    fn said(&self, accepted: Accepted) -> usize {
        let line = format!("{accepted:?}");
        self.log().lines().filter(|said| said.ends_with(&line)).count()
    }

    /// As a crash does.
    fn kill(mut self) {
        self.process.kill().expect("the consumer is killed");
        self.process.wait().expect("the consumer is gone");
    }

    async fn until_ended(mut self) -> String {
        eventually(PATIENCE, "the consumer ends", async || self.process.try_wait().expect("it can be waited for"))
            .await;
        self.log()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            println!("the end of the consumer's log:\n{}", tail(&self.log));
        }
    }
}

/// Waits until the group has committed the end of the topic.
async fn until_consumed(topic: &Topic, group: &str) {
    let mut config = ClientConfig::new();
    let config = config.set("bootstrap.servers", &topic.brokers).set("group.id", group);
    let observer: StreamConsumer = config.create().expect("an observer is made");
    eventually(PATIENCE, "the group is at the end of the topic", async || {
        let mut asked = TopicPartitionList::new();
        for partition in 0..topic.partitions {
            asked.add_partition(&topic.name, partition);
        }
        let committed = observer.committed_offsets(asked, PATIENCE).ok()?;
        let at_end = committed.elements().iter().all(|element| {
            let Ok((_, end)) = observer.fetch_watermarks(&topic.name, element.partition(), PATIENCE) else {
                return false;
            };
            // A partition that nothing was read of has no offset.
            element.offset() == Offset::Offset(end) || end == 0
        });
        at_end.then_some(())
    })
    .await;
}

async fn balances(database: &Database) -> BTreeMap<String, i64> {
    let rows = database.sql.query("SELECT account, balance FROM balances", &[]).await.unwrap_or_default();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// A database with the tables of the inbox.
async fn consumers_database() -> Database {
    let database = Database::create(Server::Newest).await;
    database.execute(POSTGRES_SCHEMA).await;
    database
}

#[tokio::test(flavor = "multi_thread")]
async fn events_repeated_by_killed_relays_and_killed_consumers_have_their_effect_once() {
    let (outbox, consumers) = (Database::with_outbox(Server::Newest).await, Database::create(Server::Newest).await);
    let (topic, group) = (Topic::create(2).await, unique("billing"));
    let mut reader = topic.reader();
    let (mut seen, mut repeats, mut rounds) = (HashSet::new(), 0, 0);
    let mut consumer = Consumer::start(&topic, &group, &consumers);
    while repeats < 100 || rounds < 3 {
        let relay = Relay::streaming(&outbox, &topic, &[]).await;
        let rows = "INSERT INTO outbox (partition_key, payload)
             SELECT 'a-' || n % 5, jsonb_build_object('account', 'a-' || n % 5, 'amount', n, 'pad', repeat('x', 4000))
             FROM generate_series(1, 400) n";
        outbox.execute(rows).await;
        // In the middle of a commit that is then delivered again as a whole.
        let something_new = |records: &[Record]| records.iter().any(|record| !seen.contains(record.id()));
        let mut arrived = reader.until(PATIENCE, "something new arrives", something_new).await;
        relay.kill();
        consumer.kill();
        consumer = Consumer::start(&topic, &group, &consumers);
        arrived.extend(reader.rest().await);
        for record in arrived {
            repeats += usize::from(!seen.insert(record.id().to_owned()));
        }
        rounds += 1;
        assert!(rounds < 60, "{rounds} killed relays have repeated {repeats} events");
    }
    let relay = Relay::streaming(&outbox, &topic, &[]).await;
    let written = outbox.number("SELECT count(*) FROM outbox").await as usize;
    eventually(PATIENCE, "all have arrived", async || {
        for record in reader.rest().await {
            repeats += usize::from(!seen.insert(record.id().to_owned()));
        }
        (seen.len() == written).then_some(())
    })
    .await;
    relay.stop().await;
    until_consumed(&topic, &group).await;
    let expected = outbox
        .sql
        .query("SELECT payload ->> 'account', sum((payload ->> 'amount')::bigint)::bigint FROM outbox GROUP BY 1", &[])
        .await
        .expect("the events are summed up");
    let expected: BTreeMap<String, i64> = expected.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(balances(&consumers).await, expected, "after {rounds} rounds with {repeats} repeats");
    assert_eq!(consumers.number("SELECT count(*) FROM processed_events").await as usize, written);
    assert!(repeats >= 100, "{repeats} events were repeated");
    drop(consumer);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_not_above_the_last_seen_has_no_effect() {
    let (outbox, consumers) = (Database::create(Server::Newest).await, Database::create(Server::Newest).await);
    let (topic, group) = (Topic::create(1).await, unique("billing"));
    let made = outboxd(&["init", &outbox.url(), "--layout", "entity"]).await;
    assert_eq!(made.code, 0, "{made:?}");
    // The version, of which kind of entity, and what is added if it is taken.
    for (version, kind, amount) in
        [(1, "account", 1), (3, "account", 10), (2, "account", 100), (3, "account", 1000), (1, "user", 10_000)]
    {
        let insert = format!(
            "INSERT INTO outbox (event_type, entity_type, entity_id, entity_version, partition_key, payload)
             VALUES ('booked', '{kind}', '7', {version}, '7', '{{\"account\": \"a\", \"amount\": {amount}}}')"
        );
        outbox.execute(&insert).await;
    }
    let relay = Relay::start(&outbox, &topic, &["--layout", "entity"]);
    let consumer = Consumer::start(&topic, &group, &consumers);
    topic.reader().take(5).await;
    until_consumed(&topic, &group).await;
    relay.stop().await;
    assert_eq!(balances(&consumers).await, BTreeMap::from([("a".to_owned(), 10_011)]));
    assert_eq!((consumer.said(Accepted::New), consumer.said(Accepted::Stale { last_seen: 3 })), (3, 2));
    let seen =
        "SELECT string_agg(entity_type || ' ' || entity_version, ', ' ORDER BY entity_type) FROM processed_versions";
    assert_eq!(consumers.text(seen).await.as_deref(), Some("account 3, user 1"));
    assert_eq!(consumers.number("SELECT count(*) FROM processed_events").await, 5, "those that are late are known");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_whose_transaction_was_rolled_back_is_processed_again() {
    let (outbox, consumers) = (Database::with_outbox(Server::Newest).await, consumers_database().await);
    let (topic, group) = (Topic::create(1).await, unique("billing"));
    consumers.execute("CREATE TABLE balances (account text PRIMARY KEY, balance bigint CHECK (balance >= 0))").await;
    let relay = Relay::streaming(&outbox, &topic, &[]).await;
    for amount in [5, -7, 9] {
        let payload = format!(r#"{{"account": "a", "amount": {amount}}}"#);
        outbox.execute(&format!("INSERT INTO outbox (partition_key, payload) VALUES ('a', '{payload}')")).await;
    }
    for _ in 0..2 {
        let log = Consumer::start(&topic, &group, &consumers).until_ended().await;
        assert!(log.contains("balances_balance_check"), "{log}");
        assert_eq!(balances(&consumers).await, BTreeMap::from([("a".to_owned(), 5)]));
        assert_eq!(consumers.number("SELECT count(*) FROM processed_events").await, 1, "a failed event was never seen");
    }
    consumers.execute("ALTER TABLE balances DROP CONSTRAINT balances_balance_check").await;
    let consumer = Consumer::start(&topic, &group, &consumers);
    until_consumed(&topic, &group).await;
    assert_eq!(balances(&consumers).await, BTreeMap::from([("a".to_owned(), 7)]));
    assert_eq!(consumer.said(Accepted::New), 2);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_that_read_the_same_records_at_once_process_each_once() {
    let (outbox, consumers) = (Database::with_outbox(Server::Newest).await, consumers_database().await);
    consumers.execute("CREATE TABLE balances (account text PRIMARY KEY, balance bigint NOT NULL)").await;
    let topic = Topic::create(2).await;
    let relay = Relay::streaming(&outbox, &topic, &[]).await;
    let rows = "INSERT INTO outbox (partition_key, payload)
         SELECT n::text, jsonb_build_object('account', 'a-' || n % 3, 'amount', n) FROM generate_series(1, 300) n";
    outbox.execute(rows).await;
    topic.reader().take(300).await;
    relay.stop().await;
    // As after a rebalance that one of them has not noticed: each reads everything.
    let each = (0..3).map(|_| {
        let (brokers, name, url) = (topic.brokers.clone(), topic.name.clone(), consumers.url());
        tokio::spawn(async move {
            let (mut client, connection) =
                tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("a client");
            tokio::spawn(connection);
            let mut config = ClientConfig::new();
            let config = config.set("bootstrap.servers", &brokers).set("group.id", unique("zombie"));
            let consumer: StreamConsumer =
                config.set("auto.offset.reset", "earliest").set("enable.auto.commit", "false").create().unwrap();
            consumer.subscribe(&[&name]).expect("the topic is read");
            let inbox = Inbox::new("billing");
            let (mut new, mut duplicates) = (0, 0);
            while new + duplicates < 300 {
                let message =
                    tokio::time::timeout(PATIENCE, consumer.recv()).await.expect("in time").expect("a record");
                match inbox_consumer::process(&inbox, &mut client, &message).await.expect("it is processed") {
                    Accepted::New => new += 1,
                    Accepted::Duplicate => duplicates += 1,
                    Accepted::Stale { .. } => panic!("there are no versions"),
                }
            }
            new
        })
    });
    let mut new = Vec::new();
    for one in each.collect::<Vec<_>>() {
        new.push(one.await.expect("the consumer goes through"));
    }
    assert_eq!(new.iter().sum::<i32>(), 300, "{new:?}");
    assert_eq!(balances(&consumers).await.values().sum::<i64>(), 300 * 301 / 2);
}

/// Waits until so many sessions of the database wait for another.
async fn until_waiting(database: &Database) {
    eventually(PATIENCE, "the second waits for the first", async || {
        let waiting =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        (database.number(waiting).await > 0).then_some(())
    })
    .await;
}

const EVENT: Event<'static> = Event { id: "e", entity: None };

fn version<'a>(id: &'a str, version: i64) -> Event<'a> {
    Event { id, entity: Some(Entity { kind: "", id: "x", version }) }
}

/// Accepts two events in two transactions, the second while the first is open, which is then committed or not.
async fn at_once(
    database: &Database,
    level: IsolationLevel,
    [first, second]: [Event<'static>; 2],
    commits: bool,
) -> Result<Accepted, InboxError> {
    database.execute("TRUNCATE processed_events, processed_versions").await;
    let inbox = Inbox::new("billing");
    let (mut one, mut other): (Client, Client) = (database.connect().await, database.connect().await);
    let earlier = one.build_transaction().isolation_level(level).start().await.expect("a transaction");
    assert_eq!(inbox.accept(&earlier, &first).await.expect("the first is accepted"), Accepted::New);
    let later = tokio::spawn(async move {
        let later = other.build_transaction().isolation_level(level).start().await.expect("a transaction");
        let accepted = Inbox::new("billing").accept(&later, &second).await;
        if accepted.is_ok() {
            later.commit().await.expect("the second is committed");
        }
        accepted
    });
    until_waiting(database).await;
    match commits {
        true => earlier.commit().await.expect("the first is committed"),
        false => earlier.rollback().await.expect("the first is rolled back"),
    }
    tokio::time::timeout(PATIENCE, later).await.expect("the second goes on").expect("it goes through")
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_transactions_with_one_event_the_second_waits_for_the_first_at_every_isolation_level() {
    let database = consumers_database().await;
    use IsolationLevel::{ReadCommitted, RepeatableRead, Serializable};
    for level in [ReadCommitted, RepeatableRead, Serializable] {
        let rolled_back = at_once(&database, level, [EVENT, EVENT], false).await;
        assert_eq!(rolled_back.expect("it is judged"), Accepted::New, "{level:?}: the first was never there");
        let rolled_back = at_once(&database, level, [version("a", 2), version("b", 1)], false).await;
        assert_eq!(rolled_back.expect("it is judged"), Accepted::New, "{level:?}");
    }
    let committed = at_once(&database, ReadCommitted, [EVENT, EVENT], true).await;
    assert_eq!(committed.expect("it is judged"), Accepted::Duplicate);
    let committed = at_once(&database, ReadCommitted, [version("a", 2), version("b", 1)], true).await;
    assert_eq!(committed.expect("it is judged"), Accepted::Stale { last_seen: 2 });
    let committed = at_once(&database, ReadCommitted, [version("a", 2), version("b", 3)], true).await;
    assert_eq!(committed.expect("it is judged"), Accepted::New);
    for level in [RepeatableRead, Serializable] {
        for events in [[EVENT, EVENT], [version("a", 2), version("b", 1)], [version("a", 2), version("b", 3)]] {
            let refused = at_once(&database, level, events, true).await;
            assert!(matches!(refused, Err(InboxError::Again(_))), "{level:?}: {refused:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_at_once_never_process_an_event_twice_nor_a_version_after_a_later_one() {
    let database = consumers_database().await;
    database.execute("CREATE TABLE effects (seq bigserial PRIMARY KEY, entity text, version bigint)").await;
    let url = database.url();
    let consumer = |seed: u64| {
        let url = url.clone();
        tokio::spawn(async move {
            let (mut client, connection) =
                tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("a client");
            tokio::spawn(connection);
            let (inbox, mut dice) = (Inbox::new("billing"), Dice::seeded(seed));
            let mut left: Vec<(usize, i64)> =
                (0..5).flat_map(|entity| (1..=20).map(move |version| (entity, version))).collect();
            while !left.is_empty() {
                let (entity, version) = left.swap_remove(dice.roll(left.len() as u64) as usize);
                let (id, entity) = (format!("{entity}-{version}"), entity.to_string());
                let event = Event { id: &id, entity: Some(Entity { kind: "thing", id: &entity, version }) };
                let transaction = client.transaction().await.expect("a transaction");
                if inbox.accept(&transaction, &event).await.expect("it is judged") == Accepted::New {
                    let effect = "INSERT INTO effects (entity, version) VALUES ($1, $2)";
                    transaction.execute(effect, &[&entity, &version]).await.expect("the effect");
                }
                match dice.roll(4) {
                    // It has failed, and comes again.
                    0 => {
                        transaction.rollback().await.expect("it is rolled back");
                        left.push((entity.parse().unwrap(), version));
                    }
                    _ => transaction.commit().await.expect("it is committed"),
                }
            }
        })
    };
    for one in (1..=4).map(consumer).collect::<Vec<_>>() {
        one.await.expect("the consumer goes through");
    }
    let unordered = "SELECT count(*) FROM (
             SELECT version <= lag(version) OVER (PARTITION BY entity ORDER BY seq) AS wrong FROM effects
         ) AS judged WHERE wrong";
    assert_eq!(database.number(unordered).await, 0, "a version has come after a later one, or twice");
    let last = "SELECT count(*) FROM (SELECT entity FROM effects GROUP BY entity HAVING max(version) = 20) AS whole";
    assert_eq!(database.number(last).await, 5, "the last version of each entity was processed");
    assert_eq!(database.number("SELECT count(*) FROM processed_events").await, 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_and_schemas_are_apart_and_a_missing_table_is_told_with_its_remedy() {
    let database = Database::create(Server::Oldest).await;
    let mut client = database.connect().await;
    let transaction = client.transaction().await.expect("a transaction");
    let missing = Inbox::new("billing").accept(&transaction, &EVENT).await.unwrap_err();
    assert!(missing.to_string().contains("sql/postgres/processed-events.sql"), "{missing}");
    drop(transaction);
    database.execute(&format!("{POSTGRES_SCHEMA}; CREATE SCHEMA \"we\"\"ird\"; SET search_path = \"we\"\"ird\"")).await;
    database.execute(POSTGRES_SCHEMA).await;
    let weird = Inbox::new("billing").in_schema("we\"ird");
    for inbox in [Inbox::new("billing"), Inbox::new("audit"), weird] {
        for expected in [Accepted::New, Accepted::Duplicate] {
            let transaction = client.transaction().await.expect("a transaction");
            assert_eq!(inbox.accept(&transaction, &EVENT).await.expect("it is judged"), expected, "{inbox:?}");
            transaction.commit().await.expect("it is committed");
        }
    }
}
