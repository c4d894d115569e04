//! The table changes while the relay reads: columns come, go, and get other types.

use crate::support::{Database, PATIENCE, Record, Relay, Server, Topic};

/// What is done to the table, what is inserted then, and the record that must come of it.
///
/// A `#` stands for the step's number, so that every record is another.
struct Step {
    change: &'static str,
    columns: &'static str,
    values: &'static str,
    key: &'static str,
    value: &'static str,
    id: &'static str,
    event_type: Option<&'static str>,
}

const ID: &str = "11111111-2222-3333-4444-555555555555";

impl Step {
    const fn new(change: &'static str, columns: &'static str, values: &'static str) -> Self {
        Step { change, columns, values, key: "k", value: r##"{"n": #}"##, id: ID, event_type: None }
    }

    fn insert(&self, number: usize) -> String {
        format!("INSERT INTO outbox ({}) VALUES ({})", self.columns, self.values).replace('#', &number.to_string())
    }

    fn is_told_by(&self, number: usize, record: &Record) -> bool {
        let value = self.value.replace('#', &number.to_string());
        record.key.as_deref() == Some(self.key)
            && record.value.as_deref() == Some(&value)
            && record.id() == self.id
            && record.header("event_type") == self.event_type
    }
}

const PLAIN: &str = "id, partition_key, payload";
const PLAIN_VALUES: &str = "'11111111-2222-3333-4444-555555555555', 'k', '{\"n\": #}'";

/// Each is about types that have a binary form of their own, text that has not, and a return to the former.
fn steps() -> Vec<Step> {
    let plain = |change| Step::new(change, PLAIN, PLAIN_VALUES);
    vec![
        plain("SELECT 1"),
        plain("ALTER TABLE outbox ADD COLUMN note text DEFAULT 'unrelated'"),
        // Dropped columns leave a hole in the row's numbering.
        plain("ALTER TABLE outbox DROP COLUMN unrelated"),
        Step {
            event_type: Some("created"),
            ..Step::new(
                "ALTER TABLE outbox ADD COLUMN event_type varchar(20)",
                "event_type, id, partition_key, payload",
                "'created', '11111111-2222-3333-4444-555555555555', 'k', '{\"n\": #}'",
            )
        },
        plain("ALTER TABLE outbox DROP COLUMN event_type"),
        Step {
            value: "{ \"n\" :#}",
            ..Step::new(
                "ALTER TABLE outbox ALTER COLUMN payload TYPE text",
                PLAIN,
                "'11111111-2222-3333-4444-555555555555', 'k', '{ \"n\" :#}'",
            )
        },
        Step {
            id: "not a uuid",
            ..Step::new("ALTER TABLE outbox ALTER COLUMN id TYPE text", PLAIN, "'not a uuid', 'k', '{\"n\": #}'")
        },
        Step {
            value: "bytes",
            ..Step::new(
                "ALTER TABLE outbox ALTER COLUMN payload TYPE bytea USING convert_to(payload, 'UTF8')",
                PLAIN,
                "'11111111-2222-3333-4444-555555555555', 'k', '\\x6279746573'",
            )
        },
        plain("ALTER TABLE outbox ALTER COLUMN partition_key TYPE varchar(30)"),
        // Neither has a binary form that the relay knows.
        plain(
            "CREATE TYPE key AS ENUM ('k', 'other'); ALTER TABLE outbox ALTER COLUMN partition_key TYPE key USING partition_key::key",
        ),
        Step {
            id: "12345678901234567890.50",
            key: "other",
            ..Step::new(
                "ALTER TABLE outbox ALTER COLUMN id TYPE numeric(30, 2) USING 0",
                PLAIN,
                "12345678901234567890.5, 'other', '{\"n\": #}'",
            )
        },
        Step {
            id: "7",
            key: "8",
            ..Step::new(
                "ALTER TABLE outbox ALTER COLUMN id TYPE bigint USING 0, ALTER COLUMN partition_key TYPE int USING 0",
                PLAIN,
                "7, 8, '{\"n\": #}'",
            )
        },
        Step {
            id: "7",
            key: "8",
            ..Step::new(
                "ALTER TABLE outbox RENAME TO away; CREATE TABLE outbox (LIKE away); DROP TABLE away; \
                         ALTER PUBLICATION outboxd ADD TABLE outbox",
                PLAIN,
                "7, 8, '{\"n\": #}'",
            )
        },
    ]
}

async fn database() -> Database {
    let database = Database::create(Server::Newest).await;
    database.execute("CREATE TABLE outbox (unrelated int, id uuid, partition_key text, payload jsonb)").await;
    database
}

#[tokio::test(flavor = "multi_thread")]
async fn columns_added_dropped_and_retyped_while_running() {
    let database = database().await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &[]).await;
    let mut reader = topic.reader();
    for (number, step) in steps().iter().enumerate() {
        // The change and the row in one transaction.
        database.execute(&format!("{}; {}", step.change, step.insert(number))).await;
        let records = reader.take(1).await;
        assert!(step.is_told_by(number, &records[0]), "after {}: {:?}", step.change, records[0]);
    }
    assert_eq!(reader.rest().await.len(), 0);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_a_change_are_read_as_they_were() {
    let database = database().await;
    let topic = Topic::create(1).await;
    Relay::streaming(&database, &topic, &[]).await.stop().await;
    let steps = steps();
    for (number, step) in steps.iter().enumerate() {
        database.execute(step.change).await;
        database.execute(&step.insert(number)).await;
    }
    let relay = Relay::start(&database, &topic, &[]);
    let end = database.wal_position().await;
    database.until_confirmed(end, PATIENCE).await;
    // Where the stream must become a text one it is begun again, from what was confirmed: some come twice.
    let mut told = 0;
    for record in topic.reader().rest().await {
        let number = steps.iter().enumerate().position(|(number, step)| step.is_told_by(number, &record));
        let number = number.unwrap_or_else(|| panic!("no row is told by {record:?}"));
        assert!(number <= told, "{record:?} came before the row inserted after: {}", steps[told].change);
        told = told.max(number + 1);
    }
    assert_eq!(told, steps.len(), "the row inserted last is there");
    relay.stop().await;
}
