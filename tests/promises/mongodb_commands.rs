//! `init`, `check` and `status` for MongoDB: what they make, what they find, and what they say to do about it.

use mongodb::bson::{Bson, Document, doc};

use crate::support::{
    Checked, Documents, MongoDatabase, PATIENCE, PrivateMongo, Relay, Topic, check, ends, eventually, numbered,
    outboxd, shared_kafka, until_log,
};

async fn init(url: &str, flags: &[&str]) -> String {
    let ended = outboxd(&[&["init", url], flags].concat()).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    ended.stdout
}

async fn look(url: &str, topic: &Topic, flags: &[&str]) -> Checked {
    let brokers = shared_kafka();
    check(&[&[url, "--brokers", &brokers, "--topic", &topic.name], flags].concat()).await
}

async fn collections(database: &MongoDatabase) -> Vec<String> {
    let mut names = database.handle().list_collection_names().await.expect("the collections are listed");
    names.sort();
    names
}

async fn indexes(database: &MongoDatabase, collection: &str) -> Vec<String> {
    let mut names = database.collection(collection).list_index_names().await.expect("the indexes are listed");
    names.sort();
    names
}

/// The commands of a script for mongosh, with JSON inside, run in this database.
async fn run_script(database: &MongoDatabase, script: &str) {
    let bare: Vec<&str> = script.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    for part in bare.join("\n").split("runCommand(").skip(1) {
        // What `init` would put in, as it stands.
        let json = part.replace("/*table*/", "").replace("/*timestamp*/", "").replace("/**/", "");
        let first = serde_json::Deserializer::from_str(&json).into_iter::<Document>().next();
        let command = first.and_then(Result::ok).unwrap_or_else(|| panic!("no command: {json}"));
        database.run(command).await;
    }
}

fn script(name: &str) -> String {
    let path = format!("{}/sql/mongodb/{name}.js", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("a script")
}

#[tokio::test]
async fn init_makes_what_is_missing_once_and_nothing_after_it_is_missed() {
    let database = MongoDatabase::create().await;
    let url = database.url();
    let said = init(&url, &[]).await;
    for thing in ["collection", "index outboxd_order", "starting position"] {
        assert!(said.contains(&format!("created {thing}")), "{thing}: {said}");
    }
    assert_eq!(collections(&database).await, ["outbox", "outboxd_audit", "outboxd_checkpoint"]);
    assert_eq!(indexes(&database, "outbox").await, ["_id_", "outboxd_order"]);
    let stored = database.checkpoint().await;
    let again = init(&url, &[]).await;
    assert!(again.ends_with("nothing to do: everything is in place\n") && !again.contains("created"), "{again}");
    assert_eq!(database.checkpoint().await, stored);
    // Committed before anything ran.
    database.insert(numbered(1)).await;
    let topic = Topic::create(1).await;
    Relay::start_at(&url, &topic, &["--no-create", "--until-caught-up"]).exits_with(0).await;
    topic.reader().arrive(&[1]).await;
}

#[tokio::test]
async fn init_stores_the_starting_position_wherever_the_checkpoint_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = format!("file:{}", folder.path().join("checkpoint.json").display());
    for place in ["kafka", &file] {
        let documents = Documents::create().await;
        let (url, brokers, name) = (documents.database.url(), shared_kafka(), documents.database.name().to_owned());
        let flags = ["--checkpoint", place, "--name", &name];
        init(&url, &[&flags[..], &["--brokers", &brokers]].concat()).await;
        documents.add(1).await;
        documents.start(&[&flags[..], &["--until-caught-up"]].concat()).exits_with(0).await;
        documents.topic.reader().arrive(&[1]).await;
    }
}

#[tokio::test]
async fn a_dry_run_changes_nothing_and_its_commands_do_what_init_does() {
    let (by_hand, by_init) = (MongoDatabase::create().await, MongoDatabase::create().await);
    let flags = ["--table", "Orders", "--table", "outbox", "--column", "timestamp=at", "--name", "it's"];
    let printed = init(&by_hand.url(), &[&flags[..], &["--dry-run"]].concat()).await;
    assert_eq!(collections(&by_hand).await, [""; 0], "nothing is made");
    run_script(&by_hand, &printed).await;
    init(&by_init.url(), &flags).await;
    assert_eq!(collections(&by_hand).await, collections(&by_init).await);
    for collection in ["Orders", "outbox"] {
        let keys = async |database: &MongoDatabase| {
            let listed = database.run(doc! { "listIndexes": collection }).await;
            let found = listed.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
            found.expect("indexes are listed").clone()
        };
        assert_eq!(keys(&by_hand).await, keys(&by_init).await);
        assert!(
            keys(&by_init).await.iter().any(|index| index.to_string().contains("\"at\": 1")),
            "the field is renamed"
        );
    }
    // All but the position was there.
    let said = init(&by_hand.url(), &flags).await;
    assert_eq!(said.matches("created ").count(), 1, "{said}");
    assert!(said.contains("created starting position"), "{said}");
}

#[tokio::test]
async fn the_scripts_in_the_repository_run_as_they_stand() {
    let database = MongoDatabase::create().await;
    for name in ["native", "debezium", "checkpoint", "audit"] {
        run_script(&database, &script(name)).await;
    }
    assert_eq!(collections(&database).await, ["outbox", "outboxd_audit", "outboxd_checkpoint", "outboxevent"]);
    let entities = MongoDatabase::create().await;
    run_script(&entities, &script("entity")).await;
    let expected = ["_id_", "outboxd_entity", "outboxd_event", "outboxd_lock", "outboxd_pending", "outboxd_published"];
    assert_eq!(indexes(&entities, "outbox").await, expected);
}

#[tokio::test]
async fn the_least_privileged_user_of_the_role_relays_and_checks() {
    let mut documents = Documents::create().await;
    documents.add(1).await;
    init(&documents.database.url(), &["--snapshot", "existing"]).await;
    let role = script("role").replace("\"shop\"", &format!("{:?}", documents.database.name()));
    run_script(&documents.database, &role.replace("change me", "secret")).await;
    let url = documents.database.url_of("outboxd", "secret");
    let checked = look(&url, &documents.topic, &[]).await;
    checked.would_start();
    checked.warns("oplog", "may not look how far the oplog reaches back");
    let mut relay = Relay::start_at(&url, &documents.topic, &["--no-create", "--checkpoint-interval", "50ms"]);
    until_log(&mut relay, "reading the change stream").await;
    documents.add(2).await;
    documents.reader.arrive_at_least_once(&[1, 2], &[]).await;
    documents.until_snapshot_is("done").await;
    relay.stop().await;
    // And where nothing was made before.
    let flags = ["--name", "other"];
    let mut relay = Relay::start_at(&url, &documents.topic, &flags);
    until_log(&mut relay, "reading the change stream").await;
    documents.add(3).await;
    documents.reader.arrive_at_least_once(&[3], &[1, 2]).await;
    relay.stop().await;
    look(&url, &documents.topic, &flags).await.is_fine("position", "");
}

#[tokio::test]
async fn a_whole_database_needs_its_rights_and_no_collection_made() {
    let database = MongoDatabase::create().await;
    let (topic, all) = (Topic::create(1).await, ["--table", "*"]);
    let remark = format!("all collections of {} are read as they come", database.name());
    let printed = init(&database.url(), &[&all[..], &["--dry-run"]].concat()).await;
    assert!(printed.contains(&format!("// {remark}")), "{printed}");
    look(&database.url(), &topic, &all).await.warns("collection", "where there is none yet");
    let said = init(&database.url(), &[&all[..], &["--snapshot", "existing"]].concat()).await;
    assert!(said.contains(&remark) && said.contains("created starting position"), "{said}");
    assert_eq!(collections(&database).await, ["outboxd_audit", "outboxd_checkpoint"]);
    for (number, collection) in ["b", "a"].into_iter().enumerate() {
        let added = database.collection(collection).insert_one(numbered(number as u32)).await;
        added.expect("a document is added");
    }
    let role = script("role").replace("\"shop\"", &format!("{:?}", database.name())).replace("change me", "secret");
    run_script(&database, &role).await;
    let url = database.url_of("outboxd", "secret");
    let checked = look(&url, &topic, &all).await;
    let found = checked.fails("change-stream", "not authorized");
    assert!(found.remedy.contains("all on their database") && found.remedy.contains("role.js"), "{found:?}");
    let whole = doc! { "resource": { "db": database.name(), "collection": "" }, "actions": ["find", "changeStream"] };
    database.run(doc! { "grantPrivilegesToRole": "outboxd", "privileges": [whole] }).await;
    let checked = look(&url, &topic, &all).await;
    checked.would_start();
    checked.is_fine("collection", "now a, b");
    checked.is_fine("change-stream", &format!("{}.* can be watched", database.name()));
    let mut relay = Relay::start_at(&url, &topic, &[&all[..], &["--no-create"]].concat());
    until_log(&mut relay, "reading the change stream").await;
    topic.reader().arrive_at_least_once(&[0, 1], &[]).await;
    relay.stop().await;
}

#[tokio::test]
async fn all_tables_at_once_are_refused_of_other_databases() {
    for url in ["postgres://app@127.0.0.1/shop", "mysql://app@127.0.0.1/shop", "mariadb://app@127.0.0.1/shop"] {
        for table in ["*", "shop.*"] {
            let ended = outboxd(&["run", url, "--brokers", "127.0.0.1:1", "--table", table]).await;
            assert_eq!(ended.code, 2, "{ended:?}");
            let words = format!("`{table}`: all tables at once are only for MongoDB's collections");
            assert!(ended.stderr.contains(&words), "{ended:?}");
        }
    }
}

#[tokio::test]
async fn each_privilege_that_lacks_is_told_with_its_remedy() {
    let documents = Documents::create().await;
    init(&documents.database.url(), &[]).await;
    let all = [
        ("outbox", "find", "change-stream"),
        ("outbox", "changeStream", "change-stream"),
        ("outboxd_checkpoint", "find", "privileges"),
        ("outboxd_checkpoint", "insert", "privileges"),
        ("outboxd_checkpoint", "update", "privileges"),
    ];
    for (number, (collection, lacking, told)) in all.iter().enumerate() {
        let granted = all.iter().filter(|(of, action, _)| (of, action) != (collection, lacking));
        let privileges: Vec<Document> = granted
            .map(|(of, action, _)| {
                doc! { "resource": { "db": documents.database.name(), "collection": of }, "actions": [action] }
            })
            .collect();
        let name = format!("u{number}");
        documents.database.run(doc! { "createRole": &name, "privileges": privileges, "roles": [] }).await;
        let url = documents.database.create_user(&name, vec![Bson::from(name.as_str())]).await;
        let checked = look(&url, &documents.topic, &[]).await;
        assert_eq!(checked.code, 3, "without {lacking} on {collection}: {checked:#?}");
        let found = checked.fails(told, if *told == "privileges" { lacking } else { "not authorized" });
        assert!(found.remedy.contains("role.js") && found.remedy.contains(lacking), "{found:?}");
        let database = documents.database.name();
        assert!(found.remedy.contains(database), "{found:?}");
        let words = ["grant the user", lacking, "sql/mongodb/role.js"];
        // To write an update that changes nothing, inserting is not asked for.
        if *lacking != "insert" {
            ends(Relay::start_at(&url, &documents.topic, &[]), 3, &words).await;
        }
    }
}

#[tokio::test]
async fn a_server_that_is_no_replica_set_is_refused() {
    let server = PrivateMongo::lone().await;
    let documents = Documents::at(&server.url()).await;
    let url = documents.database.url();
    let checked = look(&url, &documents.topic, &[]).await;
    let found = checked.fails("replica-set", "is not a member of a replica set");
    assert!(found.remedy.contains("--replSet") && found.remedy.contains("rs.initiate()"), "{found:?}");
    checked.warns("privileges", "nobody is logged in");
    assert_eq!(checked.code, 3);
    ends(documents.start(&[]), 3, &["is not a member of a replica set", "rs.initiate()"]).await;
    let ended = outboxd(&["init", &url]).await;
    assert!(ended.code == 3 && ended.stderr.contains("rs.initiate()"), "{ended:?}");
}

#[tokio::test]
async fn check_tells_what_there_is_and_changes_nothing() {
    let database = MongoDatabase::create().await;
    let topic = Topic::create(1).await;
    let url = database.url();
    let checked = look(&url, &topic, &[]).await;
    checked.would_start();
    checked.is_fine("replica-set", "rs0");
    checked.is_fine("change-stream", "can be watched");
    checked.warns("collection", "there is no collection");
    checked.is_fine("position", "none yet");
    assert_eq!(collections(&database).await, [""; 0], "nothing is made");
    look(&url, &topic, &["--no-create"]).await.fails_only(&["checkpoint"], 3);
    ends(Relay::start_at(&url, &topic, &["--no-create"]), 3, &["has no document of pipeline", "outboxd init"]).await;
    init(&url, &[]).await;
    let mut relay = Relay::start_at(&url, &topic, &["--no-create"]);
    relay.until_state("streaming").await;
    let checked = look(&url, &topic, &["--no-create"]).await;
    checked.would_start();
    checked.is_fine("leader", "an instance runs this pipeline now");
    relay.stop().await;
}

#[tokio::test]
async fn check_warns_of_an_oplog_that_is_full_and_short_until_the_remedy_was_run() {
    let server = PrivateMongo::start(1, PrivateMongo::FORGETFUL).await;
    let documents = Documents::at(&server.url()).await;
    server.forget_history().await;
    let checked = look(&documents.database.url(), &documents.topic, &[]).await;
    checked.would_start();
    let found = checked.warns("oplog", "reaches back only 0 h");
    let remedy = "db.adminCommand({replSetResizeOplog: 1, size: 51200, minRetentionHours: 72})";
    assert!(found.remedy.starts_with(remedy), "{found:?}");
    // A number, for mongosh knows no others.
    let resize = doc! { "replSetResizeOplog": 1, "size": 51200.0, "minRetentionHours": 72.0 };
    documents.database.administer(resize).await;
    look(&documents.database.url(), &documents.topic, &[]).await.is_fine("oplog", "reaches back 0 h, 0 % full");
}

#[tokio::test]
async fn check_tells_the_feature_compatibility_version() {
    let server = PrivateMongo::start(1, &[]).await;
    let documents = Documents::at(&server.url()).await;
    for version in ["6.0", "5.0"] {
        documents.database.administer(doc! { "setFeatureCompatibilityVersion": version }).await;
        let checked = look(&documents.database.url(), &documents.topic, &[]).await;
        checked.would_start();
        checked.is_fine("compatibility", &format!("featureCompatibilityVersion is {version}"));
    }
    let mut documents = documents;
    let relay = documents.reading(&[]).await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    relay.stop().await;
}

#[tokio::test]
async fn status_shows_the_position_and_how_far_behind_it_is() {
    let mut documents = Documents::create().await;
    let relay = documents.reading(&["--checkpoint-interval", "50ms"]).await;
    documents.add(1).await;
    documents.reader.arrive(&[1]).await;
    let shown = eventually(PATIENCE, "the status has the event", async || {
        let status = relay.status().await;
        (status["events"] == 1 && status["position"].as_str()?.starts_with("82")).then_some(status)
    })
    .await;
    assert!(shown.to_string().contains("lag_seconds"), "{shown}");
    let admin = relay.admin().await;
    let ended = outboxd(&["status", "--admin", &admin]).await;
    assert!(ended.code == 0 && ended.stdout.contains("streaming"), "{ended:?}");
    // Bytes say nothing here, and are not told.
    assert!(shown["lag_bytes"].is_null(), "{shown}");
    relay.stop().await;
}
