//! Retention where it depends on the database: who holds it back, what it refuses, what a crash leaves.

use std::time::Duration;

use mongodb::bson::{DateTime, doc};

use crate::support::{
    Aged, Answer, Database, HttpServer, MongoDatabase, PATIENCE, PrivateMongo, Relay, Server, Source, Topic,
    eventually, mongodb_url, outboxd, unique,
};

async fn init(database: &Database, flags: &[&str]) {
    let ended = outboxd(&[&["init", &database.url()], flags].concat()).await;
    assert_eq!(ended.code, 0, "{ended:?}");
}

async fn prune(url: &str, flags: &[&str]) -> (i32, String, String) {
    let ended = outboxd(&[&["prune", url, "--older-than", "30d", "--wait", "1s"], flags].concat()).await;
    (ended.code, ended.stdout, ended.stderr)
}

const OLD: &str = "now() - interval '99 days'";

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_deleted_in_small_batches() {
    let aged = Aged::create(Source::Postgres).await;
    aged.outbox.execute("CREATE TABLE batches (size bigint)").await;
    let counting = "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO batches SELECT count(*) FROM gone; RETURN NULL; END $$;
        CREATE TRIGGER note AFTER DELETE ON aged REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION note()";
    aged.outbox.execute(counting).await;
    let many = format!(
        "INSERT INTO aged (partition_key, payload, created_at)
         SELECT 'k', '{{}}', {OLD} FROM generate_series(1, 2500)"
    );
    aged.outbox.execute(&many).await;
    aged.deliver(&Topic::create(1).await).await;
    aged.prunes(&["--prune-batch", "300"], "deleted 2500 rows").await;
    let sizes = aged.outbox.text("SELECT string_agg(size::text, ' ') FROM batches").await;
    assert_eq!(sizes.as_deref(), Some("300 300 300 300 300 300 300 300 100"));
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_store_stay_until_the_last_publisher_has_had_them() {
    let database = Database::create(Server::Newest).await;
    let store = ["--layout", "event-store", "--capture", "poll"];
    init(&database, &store).await;
    let web = HttpServer::start(|_| Answer::Status(200)).await;
    let archive = HttpServer::start(|_| Answer::Status(200)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("outboxd.toml");
    let configuration = format!(
        "[pipeline.store]\nsource = {:?}\nlayout = \"event-store\"\ncapture = \"poll\"\npoll-interval = \"50ms\"\n\
         [pipeline.store.publisher.web]\nsink = {:?}\n[pipeline.store.publisher.archive]\nsink = {:?}\n",
        database.url(),
        web.url(),
        archive.url()
    );
    std::fs::write(&file, configuration).expect("the configuration is written");
    let file = file.to_str().expect("a path");
    let add = async |count: usize| {
        let events = format!(
            "INSERT INTO events (type, tags, data, occurred_at)
             SELECT 'Placed', '{{}}', '{{}}', {OLD} FROM generate_series(1, {count})"
        );
        database.execute(&events).await;
    };
    let prunes = async |says: &str| {
        let ended = outboxd(&["prune", "--config", file, "--older-than", "30d"]).await;
        assert!(ended.code == 0 && ended.stdout.contains(says), "`{says}` is not said: {ended:?}");
    };
    add(4).await;
    prunes("has not delivered any event of events yet").await;
    let noted = async |publisher: &str, position: i64| {
        eventually(PATIENCE, &format!("{publisher} is at {position}"), async || {
            let query = format!("SELECT last_position FROM outbox_topic_progress WHERE publisher = '{publisher}'");
            (database.text(&query).await? == position.to_string()).then_some(())
        })
        .await;
    };
    let relay = Relay::spawn(&["run", "--config", file]);
    noted("web", 4).await;
    noted("archive", 4).await;
    for standing in ["PAUSED", "FAILED"] {
        let before = database.number("SELECT max(position) FROM events").await;
        database
            .execute(&format!("UPDATE outbox_topic_progress SET status = '{standing}' WHERE publisher = 'archive'"))
            .await;
        eventually(PATIENCE, "the archive stands still", async || {
            let status = relay.status().await;
            let publishers = status["publishers"].as_array()?.clone();
            publishers.iter().any(|one| one["name"] == "archive" && one["state"] != "streaming").then_some(())
        })
        .await;
        add(3).await;
        noted("web", before + 3).await;
        prunes(if standing == "PAUSED" { "deleted 4 rows of events" } else { "deleted 3 rows of events" }).await;
        assert_eq!(database.number("SELECT count(*) FROM events").await, 3, "what {standing} has not had is there");
        database.execute("UPDATE outbox_topic_progress SET status = 'ACTIVE' WHERE publisher = 'archive'").await;
        noted("archive", before + 3).await;
    }
    prunes("deleted 3 rows of events").await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_else_reads_the_table_holds_retention_back() {
    let database = Database::create(Server::Newest).await;
    let topic = Topic::create(1).await;
    let web = HttpServer::start(|_| Answer::Status(200)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let configured = |name: &str, more: &str| {
        let file = folder.path().join(name);
        let text = format!(
            "[pipeline.shop]\nsource = {:?}\nslot = {:?}\nbrokers = {:?}\ntopic = {:?}\n\
             [pipeline.shop.publisher.kafka]\n{more}",
            database.url(),
            database.slot(),
            topic.brokers,
            topic.name
        );
        std::fs::write(&file, text).expect("the configuration is written");
        file.to_str().expect("a path").to_owned()
    };
    let audit = format!("[pipeline.shop.publisher.audit]\nisolation = \"own-position\"\nsink = {:?}\n", web.url());
    let partner = format!("[pipeline.shop.publisher.partner]\nsink = {:?}\n", web.url());
    let (both, alone, paired) = (configured("both", &audit), configured("alone", ""), configured("paired", &partner));
    let ended = outboxd(&["init", "--config", &both]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let old = format!("INSERT INTO outbox (partition_key, payload, created_at) VALUES ('k', '{{\"n\":1}}', {OLD})");
    database.execute(&old).await;
    let prune = async |file: &str| {
        let ended = outboxd(&["prune", "--config", file, "--older-than", "30d", "--wait", "1s"]).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stdout
    };
    // The one has delivered it, and the other, which has a position of its own, has not.
    Relay::spawn(&["run", "--config", &alone, "--until-caught-up"]).exits_with(0).await;
    let said = prune(&both).await;
    assert!(
        said.contains("deleted 0 rows of outbox") && said.contains("kept: pipeline `shop-audit` stands at"),
        "{said}"
    );
    assert_eq!(said.matches("rows of outbox").count(), 1, "one table is looked at once: {said}");
    Relay::spawn(&["run", "--config", &both, "--until-caught-up"]).exits_with(0).await;
    assert!(prune(&both).await.contains("deleted 1 row of outbox"));

    // A publisher that is paused holds the position back, and retention with it.
    let mut relay = Relay::spawn(&["run", "--config", &paired, "--prune-after", "1s"]);
    relay.until_state("streaming").await;
    let ended = outboxd(&["pause", "shop/partner", "--admin", &relay.admin().await]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    database.execute(&old).await;
    topic.reader().take(2).await;
    eventually(PATIENCE, "retention waits", async || {
        relay.status().await["retention"]["held_back_by"].as_str().map(str::to_owned)
    })
    .await;
    assert_eq!(database.number("SELECT count(*) FROM outbox").await, 1);
    let ended = outboxd(&["resume", "shop/partner", "--admin", &relay.admin().await]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    eventually(PATIENCE, "it goes when it was delivered to both", async || {
        (database.number("SELECT count(*) FROM outbox").await == 0).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_that_a_crash_left_detached_comes_back_with_what_was_not_delivered() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::create(server).await;
        let polled = ["--capture", "poll"];
        init(&database, &[&polled[..], &["--partition-by", "day"]].concat()).await;
        let day = "CREATE TABLE outbox_p20200101 PARTITION OF outbox FOR VALUES FROM ('2020-01-01 00:00:00+00') TO ('2020-01-02 00:00:00+00')";
        database.execute(day).await;
        let add = async |status: &str, done: &str| {
            let row = format!(
                "INSERT INTO outbox (partition_key, payload, created_at, status, published_at)
                 VALUES ('k', '{{\"n\":1}}', '2020-01-01 12:00:00+00', '{status}', {done})"
            );
            database.execute(&row).await;
        };
        let detach = "ALTER TABLE outbox DETACH PARTITION outbox_p20200101;
             COMMENT ON TABLE outbox_p20200101 IS
             'outboxd retention: detached from \"public\".\"outbox\" FOR VALUES FROM (''2020-01-01 00:00:00+00'') TO (''2020-01-02 00:00:00+00'')'";
        add("published", OLD).await;
        add("pending", "NULL").await;
        let url = database.url();
        let (code, said, _) = prune(&url, &polled).await;
        assert!(code == 0 && said.contains("kept: partition outbox_p20200101 holds rows"), "{said}");
        database.execute(detach).await;
        assert_eq!(database.number("SELECT count(*) FROM outbox").await, 0);
        let (code, said, _) = prune(&url, &polled).await;
        assert!(code == 0 && !said.contains("dropped"), "{said}");
        assert_eq!(database.number("SELECT count(*) FROM outbox").await, 2, "it is attached again");

        // The same, when rows of that day have come meanwhile and it no longer fits in.
        database.execute(detach).await;
        add("pending", "NULL").await;
        let (code, said, _) = prune(&url, &polled).await;
        assert!(code == 0 && said.contains("dropped 1 partition"), "{said}");
        let pending = "SELECT count(*) FROM outbox WHERE status = 'pending'";
        assert_eq!(database.number(pending).await, 2, "both are there to be delivered");
        assert_eq!(database.number("SELECT count(*) FROM outbox").await, 2, "and nothing else");
        let topic = Topic::create(1).await;
        let run = ["run", &url, "--capture", "poll", "--brokers", &topic.brokers, "--topic", &topic.name];
        Relay::spawn(&[&run[..], &["--until-caught-up"]].concat()).exits_with(0).await;
        assert_eq!(topic.reader().rest().await.len(), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_day_that_somebody_dropped_are_still_delivered_from_the_log() {
    for server in [Server::Newest, Server::Oldest] {
        let database = Database::create(server).await;
        init(&database, &["--partition-by", "day"]).await;
        database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '1')").await;
        let day = database.text("SELECT tableoid::regclass::text FROM outbox").await.expect("a partition");
        database.execute(&format!("DROP TABLE {day}")).await;
        database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '2')").await;
        let topic = Topic::create(1).await;
        Relay::start(&database, &topic, &["--until-caught-up"]).exits_with(0).await;
        let values: Vec<_> = topic.reader().take(2).await.into_iter().filter_map(|record| record.value).collect();
        assert_eq!(values, ["1", "2"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_store_may_have_days_too() {
    let database = Database::create(Server::Oldest).await;
    let store = ["--layout", "event-store", "--capture", "poll"];
    init(&database, &[&store[..], &["--partition-by", "day"]].concat()).await;
    let day = "CREATE TABLE old_day PARTITION OF events FOR VALUES FROM ('2020-01-01 00:00:00+00') TO ('2020-01-02 00:00:00+00')";
    database.execute(day).await;
    let add =
        "INSERT INTO events (type, tags, data, occurred_at) VALUES ('t', '{order=1}', '{}', '2020-01-01 12:00:00+00')";
    database.execute(add).await;
    let (topic, url) = (Topic::create(1).await, database.url());
    let of = [&store[..], &["--name", "store", "--topic", &topic.name, "--required-tags", "order"]].concat();
    let deliver = async || {
        let run = [&["run", &url, "--brokers", &topic.brokers, "--until-caught-up"], &of[..]].concat();
        Relay::spawn(&run).exits_with(0).await;
    };
    deliver().await;
    database.execute(add).await;
    let (code, said, _) = prune(&url, &of).await;
    assert!(code == 0 && said.contains("kept: partition old_day"), "the second is not delivered yet: {said}");
    deliver().await;
    let (code, said, _) = prune(&url, &of).await;
    assert!(code == 0 && said.contains("dropped 1 partition of events: old_day"), "{said}");
    assert_eq!(topic.reader().rest().await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_may_not_make_partitions_says_so_when_they_run_out() {
    let grants = include_str!("../../sql/postgres/grants.sql");
    let database = Database::create(Server::Newest).await;
    init(&database, &["--partition-by", "day"]).await;
    let role = unique("relay");
    database.execute(&grants.replace("outboxd_relay", &role).replace("change me", "secret")).await;
    let url = database.url();
    let (_, place) = url.split_once('@').expect("a login");
    let url = format!("postgres://{role}:secret@{place}");
    let topic = Topic::create(1).await;
    let run = ["run", &url, "--brokers", &topic.brokers, "--topic", &topic.name];
    let until = async |relay: &Relay| {
        eventually(PATIENCE, "the status tells of retention", async || {
            let retention = relay.status().await["retention"].clone();
            retention["partitions_until"].is_string().then_some(retention)
        })
        .await
    };
    let relay = Relay::spawn(&run);
    assert!(until(&relay).await["held_back_by"].is_null(), "there are enough for a while");
    relay.stop().await;
    for ahead in 1..=7 {
        let name = format!("SELECT to_char((now() + interval '{ahead} days') AT TIME ZONE 'UTC', 'YYYYMMDD')");
        let name = database.text(&name).await.expect("a day");
        database.execute(&format!("DROP TABLE outbox_p{name}")).await;
    }
    let relay = Relay::spawn(&run);
    let told = until(&relay).await;
    assert!(told["held_back_by"].as_str().is_some_and(|why| why.contains("as the table's owner")), "{told}");
    relay.stop().await;
    // A member of the owner's role makes them, as the owner's.
    let before = database.text("SELECT tableowner FROM pg_tables WHERE tablename = 'outbox'").await.expect("an owner");
    let owner = unique("owner");
    database
        .execute(&format!(
            "CREATE ROLE {owner}; GRANT {owner} TO {role}; GRANT CREATE, USAGE ON SCHEMA public TO {owner};
             ALTER TABLE outbox OWNER TO {owner}; ALTER TABLE outbox_default OWNER TO {owner}"
        ))
        .await;
    let relay = Relay::spawn(&run);
    let mine = format!("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'outbox_p%' AND tableowner = '{owner}'");
    eventually(PATIENCE, "the partitions are made", async || (database.number(&mine).await == 7).then_some(())).await;
    relay.stop().await;
    database
        .execute(&format!(
            "REASSIGN OWNED BY {owner} TO {before}; DROP OWNED BY {owner}; DROP OWNED BY {role};
             DROP ROLE {role}; DROP ROLE {owner}"
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writers_are_not_blocked_while_a_day_is_dropped() {
    let aged = Aged::init(Source::Postgres, &["--partition-by", "day"]).await;
    aged.outbox
        .execute("CREATE TABLE aged_p20200101 PARTITION OF aged FOR VALUES FROM ('2020-01-01 00:00:00+00') TO ('2020-01-02 00:00:00+00')")
        .await;
    let topic = Topic::create(1).await;
    let relay = aged.relay(&topic, &[]);
    // A transaction that stays open has the table in use, so that it cannot be changed.
    let busy = aged.outbox.writer().await;
    busy.run("BEGIN").await;
    busy.run(&aged.insert(0..1, 0)).await;
    let mut pruning = aged.pruning(&[]);
    let mut longest = Duration::ZERO;
    for n in 1..60 {
        let begin = std::time::Instant::now();
        aged.add(n..n + 1, 0).await;
        longest = longest.max(begin.elapsed());
        if n == 40 {
            busy.run("COMMIT").await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(longest < Duration::from_secs(2), "a writer has waited for {longest:?}");
    pruning.exits_with(0).await;
    aged.prunes(&[], "deleted 0 rows").await;
    let left = "SELECT count(*) FROM pg_class WHERE relname = 'aged_p20200101'";
    assert_eq!(aged.number(left).await, 0);
    assert_eq!(topic.reader().take(60).await.len(), 60);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_with_its_exit_code() {
    let database = Database::create(Server::Newest).await;
    let url = database.url();
    let usage = async |arguments: &[&str], says: &str| {
        let ended = outboxd(arguments).await;
        assert!(ended.code == 2 && ended.stderr.contains(says), "{arguments:?}: {ended:?}");
    };
    let mongodb = mongodb_url().replacen("/?", "/shop?", 1);
    usage(&["prune", &url, "--older-than", "30"], "a duration is a whole number and a unit").await;
    usage(&["prune", &url], "say --older-than").await;
    usage(&["prune", &url, "--older-than", "0d"], "say --older-than").await;
    usage(&["prune", &url, "--older-than", "30d", "--layout", "debezium"], "--column timestamp=COLUMN").await;
    usage(&["prune", &url, "--older-than", "30d", "--prune-also", "all"], "`failed` and `unreceived`").await;
    usage(&["prune", &mongodb, "--older-than", "30d", "--table", "*"], "collections by name").await;
    usage(&["run", &url, "--sink", "stdout", "--layout", "debezium", "--prune-after", "1d"], "prune-after").await;
    usage(&["run", &url, "--sink", "stdout", "--prune-after", "0s"], "longer than nothing").await;
    usage(&["init", &mongodb, "--partition-by", "day"], "no partitions").await;
    usage(&["init", &url, "--partition-by", "week"], "possible values: day").await;
    usage(&["init", &url, "--layout", "debezium", "--partition-by", "day"], "no timestamp to partition by").await;
    usage(&["init", &url, "--layout", "produce-receive", "--partition-by", "day"], "no timestamp").await;
    usage(&["init", &url, "--ttl", "30d"], "index of MongoDB").await;
    usage(&["init", &mongodb, "--ttl", "30d"], "not delivered yet").await;
    usage(&["init", &mongodb, "--ttl", "30d", "--layout", "debezium"], "not delivered yet").await;

    // What it would make is told without a server, too.
    let ended = outboxd(&["init", "postgres://u@127.0.0.1:1/shop", "--partition-by", "day", "--dry-run"]).await;
    for part in [
        "PRIMARY KEY (\"id\", \"created_at\")",
        "PARTITION BY RANGE (\"created_at\")",
        "\"outbox_default\" PARTITION OF",
        "ATTACH PARTITION",
    ] {
        assert!(ended.code == 0 && ended.stdout.contains(part), "{part}: {ended:?}");
    }

    // A table that is there cannot be made into another.
    init(&database, &[]).await;
    let ended = outboxd(&["init", &url, "--partition-by", "day"]).await;
    assert!(ended.code == 3 && ended.stderr.contains("is not partitioned by"), "{ended:?}");
    // Nobody knows what was delivered.
    let (code, _, told) = prune(&url, &["--name", "stranger"]).await;
    assert!(code == 0 && told.is_empty(), "with nothing to delete nobody is asked: {told}");
    database.execute(&format!("INSERT INTO outbox (payload, created_at) VALUES ('1', {OLD})")).await;
    let (code, _, told) = prune(&url, &["--name", "stranger"]).await;
    assert!(code == 3 && told.contains("has no position"), "{told}");
    // A column of another kind.
    database.execute("ALTER TABLE outbox ADD at_millis bigint DEFAULT 1").await;
    let (code, _, told) = prune(&url, &["--column", "timestamp=at_millis"]).await;
    assert!(code == 3 && told.contains("is no timestamp"), "{told}");
    // A lost position.
    database.execute(&format!("SELECT pg_drop_replication_slot('{}')", database.slot())).await;
    let (code, _, told) = prune(&url, &[]).await;
    assert!(code == 4 && told.contains("is gone"), "{told}");
    assert_eq!(database.number("SELECT count(*) FROM outbox").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_told_with_the_statement_that_grants_it() {
    let grants = include_str!("../../sql/postgres/grants.sql");
    let database = Database::create(Server::Newest).await;
    init(&database, &[]).await;
    let role = unique("relay");
    database.execute(&grants.replace("outboxd_relay", &role).replace("change me", "secret")).await;
    let url = database.url();
    let (_, place) = url.split_once('@').expect("a login");
    let url = format!("postgres://{role}:secret@{place}");
    let row = format!("INSERT INTO outbox (partition_key, payload, created_at) VALUES ('k', '1', {OLD})");
    database.execute(&row).await;
    let topic = Topic::create(1).await;
    Relay::spawn(&[
        "run",
        &url,
        "--brokers",
        &topic.brokers,
        "--topic",
        &topic.name,
        "--no-create",
        "--until-caught-up",
    ])
    .exits_with(0)
    .await;
    let grant = format!("GRANT SELECT, DELETE ON \"public\".\"outbox\" TO \"{role}\"");
    let (code, _, told) = prune(&url, &[]).await;
    assert!(code == 3 && told.contains(&grant), "{told}");
    let check = ["check", &url, "--brokers", &topic.brokers, "--topic", &topic.name, "--no-create"];
    let ended = outboxd(&[&check[..], &["--prune-after", "30d"]].concat()).await;
    assert!(ended.code == 3 && ended.stdout.contains(&grant), "{ended:?}");
    database.execute(&grant).await;
    let (code, said, told) = prune(&url, &[]).await;
    assert!(code == 0 && said.contains("deleted 1 row of outbox"), "{said} {told}");
    database.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;

    // MongoDB's role of sql/mongodb/role.js, with and without what it says of retention.
    let documents = MongoDatabase::with_outbox_at(&mongodb_url()).await;
    let ended = outboxd(&["init", &documents.url()]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let relay = doc! { "createRole": "relay", "roles": [], "privileges": [
        { "resource": { "db": documents.name(), "collection": "outbox" }, "actions": ["find", "changeStream"] },
        { "resource": { "db": documents.name(), "collection": "outboxd_checkpoint" }, "actions": ["find", "insert", "update"] },
    ] };
    documents.run(relay).await;
    let url = documents.create_user("relay", vec!["relay".into()]).await;
    let old = DateTime::from_millis(DateTime::now().timestamp_millis() - 99 * 86_400_000);
    documents.insert(doc! { "partition_key": "k", "payload": "1", "created_at": old }).await;
    let topic = Topic::create(1).await;
    Relay::start_at(&documents.url(), &topic, &["--until-caught-up"]).exits_with(0).await;
    let (code, _, told) = prune(&url, &[]).await;
    assert!(code == 3 && told.contains("grant the user find and remove"), "{told}");
    let granted = doc! { "grantPrivilegesToRole": "relay", "privileges": [
        { "resource": { "db": documents.name(), "collection": "outbox" }, "actions": ["find", "remove"] },
    ] };
    documents.run(granted).await;
    let (code, said, told) = prune(&url, &[]).await;
    assert!(code == 0 && said.contains("deleted 1 row of outbox"), "{said} {told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn documents_expire_only_when_they_were_delivered() {
    let server = PrivateMongo::start(1, &["--setParameter", "ttlMonitorSleepSecs=1"]).await;
    let database = MongoDatabase::create_at(&server.url()).await;
    let url = database.url();
    let init = async |flags: &[&str]| {
        let ended = outboxd(&[&["init", &url, "--capture", "poll"], flags].concat()).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stdout
    };
    assert!(init(&["--ttl", "30d"]).await.contains("created index outboxd_ttl"));
    assert!(init(&["--ttl", "30d"]).await.contains("exists already: index outboxd_ttl"));
    let old = DateTime::from_millis(DateTime::now().timestamp_millis() - 99 * 86_400_000);
    for status in ["pending", "processing", "failed", "published"] {
        // However old, and whatever a claim has left behind.
        let document = doc! { "partition_key": "k", "payload": { "n": 1 }, "created_at": old, "status": status,
        "published_at": old, "topic": "none" };
        database.insert(document).await;
    }
    eventually(PATIENCE, "what was delivered expires", async || (database.count("outbox").await == 3).then_some(()))
        .await;
    assert_eq!(database.collection("outbox").count_documents(doc! { "status": "published" }).await.ok(), Some(0));

    // Another age takes the place of the first.
    assert!(init(&["--ttl", "1s"]).await.contains("created age of index outboxd_ttl"));
    let topic = Topic::create(1).await;
    let fresh =
        doc! { "partition_key": "k", "payload": { "n": 2 }, "created_at": DateTime::now(), "status": "pending" };
    database.collection("outbox").delete_many(doc! {}).await.expect("the others are deleted");
    database.insert(fresh).await;
    Relay::start_at(&url, &topic, &["--capture", "poll", "--until-caught-up"]).exits_with(0).await;
    eventually(PATIENCE, "it expires after it was delivered", async || {
        (database.count("outbox").await == 0).then_some(())
    })
    .await;
    assert_eq!(topic.reader().rest().await.len(), 1);
}
