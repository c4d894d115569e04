//! Only what was committed is an event, and all that was inserted and committed is one.

use mongodb::bson::doc;

use crate::support::{MongoDatabase, Outbox, PATIENCE, Source, Topic};

promised!(rolled_back_rows_never_appear to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn rolled_back_rows_never_appear(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    match source {
        Source::MongoDb => write_documents(outbox.mongodb()).await,
        _ => write_rows(&outbox).await,
    }
    let mut reader = topic.reader();
    let last = id(8);
    let mut records = reader
        .until(PATIENCE, "the last one arrives", |records| records.iter().any(|record| record.id() == last))
        .await;
    records.extend(reader.rest().await);
    let numbers: Vec<u32> = records.iter().map(|record| record.id()[24..].parse().expect("a number")).collect();
    assert_eq!(numbers, [2, 5, 6, 7, 8]);
    relay.stop().await;
}

fn id(number: u32) -> String {
    format!("00000000-0000-0000-0000-{number:012}")
}

async fn write_rows(outbox: &Outbox) {
    let insert = |number: u32| {
        let id = id(number);
        format!("INSERT INTO outbox (id, partition_key, payload, seq) VALUES ('{id}', 'key', 'true', {number})")
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
}

async fn write_documents(database: &MongoDatabase) {
    let outbox = database.collection("outbox");
    let document = |number: u32| doc! { "_id": id(number), "partition_key": "key", "payload": true };
    let mut session = database.session().await;
    for (numbers, committed) in [(&[1][..], false), (&[2, 5, 6], true), (&[3, 4], false), (&[7], true)] {
        session.start_transaction().await.expect("a transaction is begun");
        for number in numbers {
            outbox.insert_one(document(*number)).session(&mut session).await.expect("a document is added");
        }
        if numbers == [7] {
            // Deleted in its own transaction, as outboxes that keep nothing do: it is an event all the same.
            outbox.delete_one(doc! { "_id": id(7) }).session(&mut session).await.expect("a document is deleted");
        }
        match committed {
            true => session.commit_transaction().await.expect("the transaction is committed"),
            false => session.abort_transaction().await.expect("the transaction is aborted"),
        }
    }
    database.insert(document(8)).await;
}
