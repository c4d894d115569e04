//! The table changes while the relay reads: columns come, go, move, and get other types. (PostgreSQL, whose types are
//! others, is in `../schema_change.rs`.)

use crate::support::{Outbox, PATIENCE, Record, Source, Topic};

/// What is done to the table, what is inserted then, and the record that must come of it.
///
/// A `#` stands for the step's number, so that every record is another.
struct Step {
    changes: &'static [&'static str],
    columns: &'static str,
    values: &'static str,
    id: &'static str,
    key: &'static str,
    value: &'static str,
    event_type: Option<&'static str>,
}

const PLAIN: Step = Step {
    changes: &[],
    columns: "id, partition_key, payload",
    values: r##"'first', 'k', '{"n": #}'"##,
    id: "first",
    key: "k",
    value: r##"{"n": #}"##,
    event_type: None,
};

const TABLE: &str = "unrelated INT, id CHAR(36), partition_key VARCHAR(40), payload JSON";

fn steps() -> Vec<Step> {
    vec![
        PLAIN,
        Step { changes: &["ALTER TABLE outbox ADD COLUMN note VARCHAR(20) DEFAULT 'unrelated'"], ..PLAIN },
        Step { changes: &["ALTER TABLE outbox DROP COLUMN unrelated"], ..PLAIN },
        Step {
            changes: &["ALTER TABLE outbox ADD COLUMN event_type VARCHAR(20) FIRST"],
            columns: "event_type, id, partition_key, payload",
            values: r##"'created', 'first', 'k', '{"n": #}'"##,
            event_type: Some("created"),
            ..PLAIN
        },
        Step { changes: &["ALTER TABLE outbox MODIFY payload JSON FIRST"], ..PLAIN },
        // Of one type, and changed places.
        Step {
            changes: &[
                "ALTER TABLE outbox MODIFY event_type VARCHAR(40) AFTER payload",
                "ALTER TABLE outbox MODIFY partition_key VARCHAR(40) AFTER payload",
            ],
            columns: "partition_key, event_type, id, payload",
            values: r##"'k', 'moved', 'first', '{"n": #}'"##,
            event_type: Some("moved"),
            ..PLAIN
        },
        Step { changes: &["ALTER TABLE outbox DROP COLUMN event_type"], ..PLAIN },
        Step { changes: &["ALTER TABLE outbox MODIFY partition_key TEXT"], ..PLAIN },
        Step {
            changes: &["ALTER TABLE outbox MODIFY partition_key VARCHAR(40) CHARACTER SET latin1"],
            values: r##"'first', 'größe', '{"n": #}'"##,
            key: "größe",
            ..PLAIN
        },
        Step {
            changes: &["ALTER TABLE outbox MODIFY payload LONGTEXT"],
            values: "'first', 'k', '{ \"n\" :#}'",
            value: "{ \"n\" :#}",
            ..PLAIN
        },
        Step {
            changes: &["ALTER TABLE outbox MODIFY payload LONGBLOB"],
            values: "'first', 'k', 'bytes #'",
            value: "bytes #",
            ..PLAIN
        },
        Step {
            changes: &["DELETE FROM outbox", "ALTER TABLE outbox MODIFY id INT"],
            values: r##"-7, 'k', '{"n": #}'"##,
            id: "-7",
            ..PLAIN
        },
        Step {
            changes: &["ALTER TABLE outbox MODIFY id BIGINT"],
            values: r##"9007199254740993, 'k', '{"n": #}'"##,
            id: "9007199254740993",
            ..PLAIN
        },
        Step {
            changes: &["DELETE FROM outbox", "ALTER TABLE outbox MODIFY id BIGINT UNSIGNED, MODIFY partition_key INT"],
            values: r##"18446744073709551615, 8, '{"n": #}'"##,
            id: "18446744073709551615",
            key: "8",
            ..PLAIN
        },
        Step {
            // What is inserted while it has another name is not of the outbox.
            changes: &[
                "RENAME TABLE outbox TO away",
                "INSERT INTO away (id, partition_key, payload) VALUES (1, 1, 'away')",
                "RENAME TABLE away TO outbox",
            ],
            values: r##"9, 9, '{"n": #}'"##,
            id: "9",
            key: "9",
            ..PLAIN
        },
        Step {
            changes: &["DROP TABLE outbox", "CREATE TABLE outbox (payload JSON, partition_key CHAR(9), id CHAR(36))"],
            ..PLAIN
        },
    ]
}

impl Step {
    async fn change(&self, outbox: &Outbox) {
        for change in self.changes {
            outbox.execute(change).await;
        }
    }

    async fn insert(&self, number: usize, outbox: &Outbox) {
        let insert = format!("INSERT INTO outbox ({}) VALUES ({})", self.columns, self.values);
        outbox.execute(&insert.replace('#', &number.to_string())).await;
    }

    fn is_told_by(&self, number: usize, record: &Record) -> bool {
        record.key.as_deref() == Some(self.key)
            && record.value.as_deref() == Some(&self.value.replace('#', &number.to_string()))
            && record.id() == self.id
            && record.header("event_type") == self.event_type
    }
}

promised!(columns_added_dropped_moved_and_retyped_while_running to mysql, mariadb);

async fn columns_added_dropped_moved_and_retyped_while_running(source: Source) {
    let outbox = Outbox::of_columns(source, TABLE).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    let mut reader = topic.reader();
    for (number, step) in steps().iter().enumerate() {
        step.change(&outbox).await;
        step.insert(number, &outbox).await;
        let records = reader.take(1).await;
        assert!(step.is_told_by(number, &records[0]), "after {:?}: {:?}", step.changes, records[0]);
    }
    assert_eq!(reader.rest().await.len(), 0);
    relay.stop().await;
}

promised!(rows_from_before_a_change_are_read_as_they_were to mysql, mariadb);

async fn rows_from_before_a_change_are_read_as_they_were(source: Source) {
    let outbox = Outbox::of_columns(source, TABLE).await;
    let topic = Topic::create(1).await;
    outbox.streaming(&topic, &[]).await.stop().await;
    let steps = steps();
    for (number, step) in steps.iter().enumerate() {
        step.change(&outbox).await;
        step.insert(number, &outbox).await;
    }
    let end = outbox.end_of_log().await;
    let relay = outbox.relay(&topic, &[]);
    outbox.until_confirmed(&end, PATIENCE).await;
    let records = topic.reader().rest().await;
    assert_eq!(records.len(), steps.len(), "{records:#?}");
    for (number, (step, record)) in steps.iter().zip(&records).enumerate() {
        assert!(step.is_told_by(number, record), "inserted after {:?}: {record:?}", step.changes);
    }
    relay.stop().await;
}
