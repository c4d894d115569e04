//! Only what was committed is an event, and all that was inserted and committed is one.

use crate::support::{Outbox, PATIENCE, Source, Topic};

promised!(rolled_back_rows_never_appear to postgres, oldest_postgres, mysql, mariadb);

async fn rolled_back_rows_never_appear(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    let insert = |id: u32| {
        format!(
            "INSERT INTO outbox (id, partition_key, payload, seq)
             VALUES ('00000000-0000-0000-0000-{id:012}', 'key', 'true', {id})"
        )
    };
    let run = |statement: &str| statement.to_owned();
    let statements = [
        run("BEGIN"),
        insert(1),
        run("ROLLBACK"),
        run("BEGIN"),
        insert(2),
        run("SAVEPOINT outer_part"),
        insert(3),
        run("SAVEPOINT inner_part"),
        insert(4),
        run("RELEASE SAVEPOINT inner_part"),
        run("ROLLBACK TO SAVEPOINT outer_part"),
        insert(5),
        run("SAVEPOINT kept_part"),
        insert(6),
        run("RELEASE SAVEPOINT kept_part"),
        run("COMMIT"),
        run("BEGIN"),
        insert(7),
        // Deleted in its own transaction, as outboxes that keep nothing do: it is an event all the same.
        run("DELETE FROM outbox WHERE seq = 7"),
        run("COMMIT"),
        insert(8),
    ];
    for statement in &statements {
        outbox.execute(statement).await;
    }
    let mut reader = topic.reader();
    let last = "00000000-0000-0000-0000-000000000008";
    let mut records = reader
        .until(PATIENCE, "the last one arrives", |records| records.iter().any(|record| record.id() == last))
        .await;
    records.extend(reader.rest().await);
    let numbers: Vec<u32> = records.iter().map(|record| record.id()[24..].parse().expect("a number")).collect();
    assert_eq!(numbers, [2, 5, 6, 7, 8]);
    relay.stop().await;
}
