//! The layout `produce-receive`, from `init` to the record.

use crate::support::{Outbox, Relay, Source, Topic, outboxd};

promised!(produce_receive_layout_is_made_by_init_and_delivered_by_its_key to postgres, oldest_postgres, mysql, mariadb);

async fn produce_receive_layout_is_made_by_init_and_delivered_by_its_key(source: Source) {
    let outbox = Outbox::create(source).await;
    let topic = Topic::create(1).await;
    let url = outbox.url();
    let layout = ["--layout", "produce-receive", "--table", "zones"];
    for expected in ["created ", "nothing to do: everything is in place"] {
        let ended = outboxd(&[&["init", &url], &layout[..]].concat()).await;
        assert!(ended.code == 0 && ended.stdout.contains(expected), "{ended:?}");
    }
    let insert =
        "INSERT INTO zones (stid, code, payload) VALUES ('s-1', 'A17', '{\"n\": 1}'), ('s-1', 'A18', '{\"n\": 2}')";
    outbox.execute(insert).await;
    // The topic is the layout's own unless another is named.
    let arguments = ["run", &url, "--brokers", &topic.brokers, "--topic", &topic.name, "--until-caught-up"];
    Relay::spawn(&[&arguments[..], &layout].concat()).exits_with(0).await;
    let records = topic.reader().rest().await;
    let seen: Vec<_> = records
        .iter()
        .map(|record| (record.key.as_deref(), record.header("id"), record.header("code"), record.headers.len()))
        .collect();
    assert_eq!(seen, [(Some("s-1"), Some("1"), Some("A17"), 2), (Some("s-1"), Some("2"), Some("A18"), 2)]);
}
