//! Tables that are polled, in every layout that has status columns.

use crate::support::{Arrived, Form, PATIENCE, Polled, Source, Topic, outboxd};

promised!(native_table_is_polled_from_init_to_done to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn native_table_is_polled_from_init_to_done(source: Source) {
    is_polled_from_init_to_done(source, Form::Native).await;
}

promised!(message_groups_are_polled_from_init_to_done to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn message_groups_are_polled_from_init_to_done(source: Source) {
    is_polled_from_init_to_done(source, Form::MessageGroup).await;
}

promised!(entities_are_polled_from_init_to_done to postgres, oldest_postgres, mysql, mariadb, mongodb);

async fn entities_are_polled_from_init_to_done(source: Source) {
    is_polled_from_init_to_done(source, Form::Entity).await;
}

promised!(occurred_on_is_polled_from_init_to_done to postgres, oldest_postgres);

async fn occurred_on_is_polled_from_init_to_done(source: Source) {
    is_polled_from_init_to_done(source, Form::OccurredOn).await;
}

promised!(produce_receive_is_polled_from_init_to_done to postgres, oldest_postgres, mysql, mariadb);

async fn produce_receive_is_polled_from_init_to_done(source: Source) {
    is_polled_from_init_to_done(source, Form::ProduceReceive).await;
}

async fn is_polled_from_init_to_done(source: Source, form: Form) {
    let polled = Polled::create(source, form).await;
    let topic = Topic::create(3).await;
    polled.add("a", 0..700).await;
    polled.add("b", 0..2).await;
    let url = polled.outbox.url();
    let mut check = polled.arguments(&url, &topic, &[]);
    check[0] = "check";
    let checked = outboxd(&check).await;
    assert!(checked.code == 0 && checked.stdout.contains("polling needs"), "{checked:?}");
    polled.relay(&topic, &["--until-caught-up", "--poll-batch", "100"]).exits_with(0).await;
    assert_eq!(polled.done().await, 702, "every row is marked");
    let records = topic.reader().rest().await;
    assert_eq!(records.len(), 702, "each is delivered once");
    let mut arrived = Arrived::default();
    for record in &records {
        arrived.note(record.value.as_deref().expect("a value"));
    }
    arrived.is(&[("a", 700), ("b", 2)]);
    for record in &records {
        let payload: serde_json::Value =
            serde_json::from_str(record.value.as_deref().unwrap_or_default()).expect("JSON");
        assert_eq!(record.key.as_deref(), payload["key"].as_str(), "the record's key");
    }

    // A relay that runs finds what comes later.
    let relay = polled.relay(&topic, &["--poll-interval", "100ms"]);
    polled.add("c", 0..5).await;
    let mut reader = topic.reader();
    Arrived::read(&mut reader, 707, PATIENCE).await.is(&[("a", 700), ("b", 2), ("c", 5)]);
    relay.stop().await;
    assert_eq!(polled.done().await, 707);
}
