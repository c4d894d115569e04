//! Layouts that are PostgreSQL's alone, from `init` to the record.

use crate::support::{Answer, Database, HttpServer, PATIENCE, Relay, Server, Topic, eventually, outboxd};

async fn init(database: &Database, layout: &str) {
    for expected in ["created ", "nothing to do: everything is in place"] {
        let ended = outboxd(&["init", &database.url(), "--layout", layout]).await;
        assert!(ended.code == 0 && ended.stdout.contains(expected), "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn occurred_on_is_delivered_to_a_topic_of_its_type_with_a_key_out_of_its_content() {
    let database = Database::create(Server::Newest).await;
    init(&database, "occurred-on").await;
    let topic = Topic::create(1).await;
    let insert = format!(
        "INSERT INTO outbox.outbox_messages (\"Type\", \"Content\") VALUES ('{}', '{{\"customer\": {{\"id\": 17}}}}')",
        topic.name
    );
    database.execute(&insert).await;
    let url = database.url();
    let layout = ["--layout", "occurred-on", "--topic", "{type}", "--column", "key=/customer/id"];
    let arguments = ["run", &url, "--brokers", &topic.brokers, "--until-caught-up"];
    Relay::spawn(&[&arguments[..], &layout].concat()).exits_with(0).await;
    let records = topic.reader().rest().await;
    assert_eq!(records.len(), 1, "{records:?}");
    let id = database.text("SELECT \"Id\"::text FROM outbox.outbox_messages").await;
    assert_eq!((records[0].header("id"), records[0].header("type")), (id.as_deref(), Some(topic.name.as_str())));
    assert_eq!(records[0].key.as_deref(), Some("17"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_store_feeds_topics_by_tags_with_the_selecting_tags_value_as_the_key() {
    let database = Database::create(Server::Newest).await;
    init(&database, "event-store").await;
    let orders = Topic::create(1).await;
    let web = HttpServer::start(|_| Answer::Status(200)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("outboxd.toml");
    let text = format!(
        "[pipeline.store]\nsource = {:?}\nslot = {:?}\nlayout = \"event-store\"\nbrokers = {:?}\nuntil-caught-up = true\n\
         [pipeline.store.publisher.{}]\nrequired-tags = [\"order_id\", \"region=eu\"]\n\
         [pipeline.store.publisher.web]\nsink = {:?}\nany-of-tags = [\"vip\", \"user_id\"]\nhttp-body = \"events\"\n",
        database.url(),
        database.slot(),
        orders.brokers,
        orders.name,
        web.url()
    );
    std::fs::write(&file, text).expect("the configuration is written");
    database
        .execute(
            r#"INSERT INTO events (type, tags, data) VALUES
                 ('OrderPlaced', '{order_id=4711,region=eu,user_id=7}', '{"n": 1}'),
                 ('OrderPlaced', '{order_id=4712,region=us}', '{"n": 2}'),
                 ('UserCreated', '{user_id=8}', '{"n": 3}')"#,
        )
        .await;
    Relay::spawn(&["run", "--config", file.to_str().expect("a path")]).exits_with(0).await;
    let records = orders.reader().rest().await;
    assert_eq!(records.len(), 1, "{records:?}");
    let record = &records[0];
    assert_eq!(record.key.as_deref(), Some("4711"), "the value of the first required tag");
    for (header, value) in
        [("position", "1"), ("type", "OrderPlaced"), ("order_id", "4711"), ("region", "eu"), ("user_id", "7")]
    {
        assert_eq!(record.header(header), Some(value), "{record:?}");
    }
    let requests = eventually(PATIENCE, "both users are told", async || {
        let events: Vec<_> =
            web.requests().iter().flat_map(|request| request.json().as_array().cloned().unwrap_or_default()).collect();
        (events.len() == 2).then_some(events)
    })
    .await;
    let mut keys: Vec<_> = requests.iter().map(|event| event["key"].as_str().unwrap_or_default().to_owned()).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["7", "8"], "the value of the tag that matched");
}

#[tokio::test]
async fn a_layout_of_another_database_is_exit_2() {
    for url in ["mysql://u@127.0.0.1:1/shop", "mongodb://127.0.0.1:1/shop?replicaSet=r"] {
        let ended = outboxd(&["run", url, "--brokers", "127.0.0.1:1", "--layout", "event-store"]).await;
        assert!(
            ended.code == 2 && ended.stderr.contains("is a layout of PostgreSQL"),
            "{}: {}",
            ended.code,
            ended.stderr
        );
    }
}
