//! What the layers of options become.

use super::super::resolve_source::{LONGEST_NAME, database, default_name};
use super::super::settings::{
    CheckpointPlace, DeadLetter, Naming, PostgresSettings, SelectionSettings, SinkSettings, Start,
};
use super::super::source_url::UrlParts;
use std::time::Duration;

use super::*;

fn said(edit: impl FnOnce(&mut PipelineOptions)) -> Said {
    let mut pipeline = PipelineOptions {
        source: Some("postgres://app:hunter2@db/Shop-1".into()),
        brokers: Some("kafka:9092".to_owned()),
        ..Default::default()
    };
    edit(&mut pipeline);
    Said { pipeline, ..Default::default() }
}

#[track_caller]
fn resolved(said: Said) -> PipelineSettings {
    Settings::resolve(said, None).unwrap().pipelines.remove(0)
}

#[track_caller]
fn postgres(pipeline: &PipelineSettings) -> &PostgresSettings {
    let SourceSettings::Postgres(postgres) = &pipeline.source else { panic!("{:?}", pipeline.source) };
    postgres
}

#[track_caller]
fn problem(edit: impl FnOnce(&mut PipelineOptions)) -> String {
    let error = Settings::resolve(said(edit), None).unwrap_err();
    assert_eq!(error.problems.len(), 1, "{error}");
    error.to_string()
}

fn from_file(said: Said, text: &str) -> Result<Settings, ConfigError> {
    Settings::resolve(said, Some(file::parse("f.toml", text).unwrap()))
}

#[test]
fn source_and_brokers_are_enough() {
    let settings = Settings::resolve(said(|_| {}), None).unwrap();
    let chosen = false;
    assert_eq!(settings.process.admin, Admin::Listen { address: "127.0.0.1:7420".to_owned(), chosen });
    let pipeline = &settings.pipelines[0];
    let source = postgres(pipeline);
    assert_eq!((pipeline.name.as_str(), source.slot.as_str()), ("outboxd_shop_1", "outboxd_shop_1"));
    assert_eq!((source.publication.as_str(), source.start.clone(), source.no_create), ("outboxd", Start::Now, false));
    assert_eq!(source.snapshot, Snapshot::None);
    assert_eq!(pipeline.route.layout, "native");
    assert_eq!(pipeline.kafka.brokers, Brokers::Servers("kafka:9092".to_owned()));
    assert_eq!(pipeline.kafka.create_topics, None);
    assert_eq!(pipeline.publishers[0].dead_letter, DeadLetter::None);
    assert_eq!(pipeline.shutdown_timeout, Duration::from_secs(20));
    assert_eq!(pipeline.checkpoint_interval, Duration::from_secs(1));
    let window = pipeline.publishers[0].window;
    assert!(window.max_events > 0 && window.max_bytes > 0);
    assert!(pipeline.is_lone() && pipeline.publishers[0].max_retained.is_none());
}

#[test]
fn settings_never_show_a_password() {
    let settings = Settings::resolve(
        Said {
            process: ProcessOptions { admin_token: Some("hunter2".into()), ..Default::default() },
            ..said(|options| options.kafka = vec!["sasl.password=hunter2".parse().unwrap()])
        },
        None,
    );
    let shown = format!("{:?}", settings.unwrap());
    assert!(shown.contains("app:***@db") && !shown.contains("hunter2"), "{shown}");
}

#[test]
fn every_problem_is_reported_at_once() {
    let bad = Said {
        process: ProcessOptions { admin: Some("7420".to_owned()), ..Default::default() },
        ..said(|options| {
            options.source = None;
            options.brokers = None;
            options.capture = Some("guess".to_owned());
            options.delivery = Some("twice".to_owned());
            options.max_in_flight = Some(0);
            options.kafka = vec!["acks=1".parse().unwrap()];
        })
    };
    let found = Settings::resolve(bad, None).unwrap_err().to_string();
    for part in ["7 problems", "--admin:", "SOURCE:", "--brokers:", "--capture: `guess` is not a way"] {
        assert!(found.contains(part), "{part} is not in {found}");
    }
    for part in ["--delivery: `twice` is not a promise", "--max-in-flight:", "--kafka: request."] {
        assert!(found.contains(part), "{part} is not in {found}");
    }
}

#[test]
fn a_mongodb_pipeline_is_named_after_its_database_and_takes_the_documents_id() {
    for url in ["mongodb://app@db/My-Shop?replicaSet=rs0", "mongodb+srv://app@db.internal/My-Shop"] {
        let pipeline = resolved(said(|options| {
            options.source = Some(url.into());
            options.start = Some("1763291754:3".to_owned());
            options.checkpoint = Some("kafka".to_owned());
        }));
        assert_eq!(pipeline.name, "outboxd_my_shop");
        let SourceSettings::Mongo(source) = &pipeline.source else { panic!("{:?}", pipeline.source) };
        assert_eq!(source.checkpoint, CheckpointPlace::Kafka);
        assert_eq!(source.start, Start::At("1763291754:3".parse().unwrap()));
        assert_eq!(pipeline.route.columns, [("id".to_owned(), "_id".to_owned())]);
    }
    assert!(problem(|options| options.source = Some("mongodb://app@db".into())).contains("names no database"));
}

#[test]
fn what_is_no_source_is_told_without_its_password() {
    assert!(problem(|options| options.source = Some("redis://db/a".into())).contains("is not a source"));
    let not_a_url = problem(|options| options.source = Some("app:hunter2@db".into()));
    assert!(not_a_url.contains("is not a URL") && !not_a_url.contains("hunter2"), "{not_a_url}");
}

#[test]
fn a_mysql_pipeline_is_named_after_its_database_and_may_keep_its_position_elsewhere() {
    for url in ["mysql://app@db/My-Shop", "mariadb://app@db/My-Shop"] {
        let pipeline = resolved(said(|options| {
            options.source = Some(url.into());
            options.checkpoint = Some("file:/var/lib/outboxd/shop.json".to_owned());
            options.start = Some("binlog.000002:157".to_owned());
            options.server_id = Some(77);
        }));
        assert_eq!(pipeline.name, "outboxd_my_shop");
        let SourceSettings::MySql(source) = &pipeline.source else { panic!("{:?}", pipeline.source) };
        assert_eq!(source.checkpoint, CheckpointPlace::File("/var/lib/outboxd/shop.json".to_owned()));
        assert_eq!(source.start, Start::At("binlog.000002:157".parse().unwrap()));
        assert_eq!((source.server_id, source.tables[0].name.as_str()), (Some(77), "outbox"));
    }
}

#[test]
fn what_another_database_has_is_refused() {
    let mysql = |edit: fn(&mut PipelineOptions)| {
        problem(|options| {
            options.source = Some("mysql://app@db/shop".into());
            edit(options);
        })
    };
    assert!(mysql(|options| options.slot = Some("s".to_owned())).contains("--slot: is only for PostgreSQL"));
    assert!(mysql(|options| options.start = Some("16/B374D848".to_owned())).contains("not a position in a binary log"));
    assert!(mysql(|options| options.checkpoint = Some("x".to_owned())).contains("is not a place"));
    assert!(mysql(|options| options.source = Some("mysql://app@db".into())).contains("names no database"));
    assert!(problem(|options| options.server_id = Some(7)).contains("--server-id: is only for MySQL"));
    assert!(problem(|options| options.checkpoint = Some("kafka".to_owned())).contains("there is only `source`"));
}

#[test]
fn words_that_are_none_say_so() {
    let set = |key: &str, value: &str| {
        let value = Some(value.to_owned());
        problem(|options| match key {
            "sink" => options.sink = value.map(Secret::from),
            "dead-letter" => options.dead_letter = value,
            _ => options.delivery = value,
        })
    };
    assert!(set("delivery", "once").contains("is not a promise"));
    assert!(set("sink", "kafak").contains("is not a sink"));
    let without_brokers = problem(|options| (options.sink, options.brokers) = (Some("kafak".into()), None));
    assert!(without_brokers.contains("is not a sink"), "what it needs is not known: {without_brokers}");
    assert!(set("dead-letter", "topic:").contains("is not a place"));
}

#[test]
fn dead_letters_have_a_table_a_collection_or_a_topic_that_is_no_outbox() {
    let place = |source: &'static str, place: &'static str| {
        resolved(said(|options| {
            options.source = Some(source.into());
            options.dead_letter = Some(place.to_owned());
        }))
        .publishers[0]
            .dead_letter
            .clone()
    };
    let table = |text: &str| DeadLetter::Table(text.parse().unwrap());
    assert_eq!(place("postgres://db/shop", "table:ops.dead"), table("ops.dead"));
    assert_eq!(place("mysql://db/shop", "table:dead"), table("dead"));
    assert_eq!(place("mongodb://db/shop", "collection:dead"), table("dead"));
    assert_eq!(place("mongodb://db/shop", "table:dead"), table("dead"));
    assert_eq!(place("postgres://db/shop", "topic:dead"), DeadLetter::Topic("dead".to_owned()));

    let refused = |place: &'static str| problem(|options| options.dead_letter = Some(place.to_owned()));
    assert!(refused("collection:dead").contains("a collection is for MongoDB"));
    assert!(refused("table:").contains("a table is"));
    assert!(refused("table:outbox").contains("is the outbox itself"));
    assert!(refused("table:public.outbox").contains("is the outbox itself"));
    let everything = problem(|options| {
        options.source = Some("mongodb://db/shop".into());
        options.table = vec!["*".to_owned()];
        options.dead_letter = Some("collection:dead".to_owned());
    });
    assert!(everything.contains("would be read as an outbox"), "{everything}");
}

#[test]
fn rabbitmq_has_an_exchange_and_its_routing_key_is_the_topic_unless_one_is_said() {
    let with = |edit: fn(&mut PipelineOptions)| {
        let pipeline = resolved(said(|options| {
            options.sink = Some("amqp://app:hunter2@mq/shop".into());
            options.brokers = None;
            edit(options);
        }));
        assert!(!format!("{pipeline:?}").contains("hunter2"));
        let publisher = pipeline.publishers[0].clone();
        let SinkSettings::RabbitMq(rabbit) = publisher.sink else { panic!("{:?}", publisher.sink) };
        (rabbit, publisher.route)
    };
    let (rabbit, route) = with(|_| {});
    assert_eq!((rabbit.exchange.as_str(), rabbit.declare, rabbit.mandatory), ("outbox", true, false));
    assert_eq!((rabbit.lanes.lanes, rabbit.lanes.batch), (10, 500));
    assert_eq!((route.topic, route.naming), (None, Naming::Free));
    let (rabbit, route) = with(|options| {
        options.exchange = Some(String::new());
        options.routing_key = Some("arap.{Type}".to_owned());
        options.topic = Some("other".to_owned());
        options.amqp_declare = Some(false);
    });
    assert_eq!((rabbit.exchange.as_str(), rabbit.declare), ("", false), "the default exchange has no name");
    assert_eq!(route.topic.as_deref(), Some("arap.{Type}"));

    // A layout may have its own; what was said goes before it.
    let (rabbit, route) = with(|options| options.layout = Some("occurred-on".to_owned()));
    assert_eq!((rabbit.exchange.as_str(), route.topic.as_deref()), ("arap.events", Some("arap.{type}")));
    let (rabbit, route) = with(|options| {
        options.layout = Some("occurred-on".to_owned());
        options.exchange = Some("shop".to_owned());
        options.topic = Some("shop.{Type}".to_owned());
    });
    assert_eq!((rabbit.exchange.as_str(), route.topic.as_deref()), ("shop", Some("shop.{Type}")));
}

#[test]
fn what_is_only_for_rabbitmq_is_refused_elsewhere() {
    assert!(problem(|options| options.amqp_mandatory = Some(true)).contains("is only for RabbitMQ"));
    assert!(problem(|options| options.exchange = Some("shop".to_owned())).contains("--exchange: is only for RabbitMQ"));
    let plain = |edit: fn(&mut PipelineOptions)| {
        problem(|options| {
            options.sink = Some("amqp://app@mq".into());
            edit(options);
        })
    };
    assert!(plain(|options| options.amqp_ca = Some("ca.pem".into())).contains("amqps://"));
    assert!(plain(|options| options.http_ca = Some("ca.pem".into())).contains("is only for an HTTP sink"));
    assert!(plain(|options| options.amqp_batch = Some(0)).contains("amqp-batch must be at least 1"));
    assert!(plain(|options| options.sink = Some("amqp://".into())).contains("is not a URL"));
    let alone = plain(|options| {
        options.sink = Some("amqps://app@mq".into());
        options.amqp_cert = Some("cert.pem".into());
    });
    assert!(alone.contains("--amqp-key: is missing"), "{alone}");
}

#[test]
fn the_database_is_found_as_libpq_finds_it() {
    let found = |url: &str, variables: &[(&str, &str)]| {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        database(&UrlParts::parse(url).unwrap(), variable)
    };
    assert_eq!(found("postgres://u@h/shop", &[("PGDATABASE", "x")]), "shop");
    assert_eq!(found("postgres://u@h/shop?dbname=y", &[]), "y");
    assert_eq!(found("postgres://u@h", &[("PGDATABASE", "x")]), "x");
    assert_eq!(found("postgres://u@h", &[("PGUSER", "x")]), "u");
    assert_eq!(found("postgres://", &[("PGUSER", "x")]), "x");
    assert_eq!(found("postgres://", &[]), "postgres");
}

#[test]
fn a_default_slot_is_always_one_the_server_accepts() {
    assert_eq!(default_name("My.Shop-ü"), "outboxd_my_shop__");
    assert_eq!(default_name(&"a".repeat(100)).len(), LONGEST_NAME);
    assert!(problem(|options| options.slot = Some("My-Slot".to_owned())).contains("cannot name a slot"));
}

#[test]
fn start_is_now_earliest_or_a_position() {
    let start = |text: &str| {
        let pipeline = resolved(said(|options| options.start = Some(text.to_owned())));
        postgres(&pipeline).start.clone()
    };
    assert_eq!(start("now"), Start::Now);
    assert_eq!(start("earliest"), Start::Earliest);
    assert_eq!(start("16/B374D848"), Start::At("16/B374D848".parse().unwrap()));
}

#[test]
fn topics_are_created_when_asked() {
    let creation =
        |text: &str| resolved(said(|options| options.create_topics = Some(text.to_owned()))).kafka.create_topics;
    assert_eq!(creation("true"), Some(TopicCreation::default()));
    assert_eq!(creation("false"), None);
    assert_eq!(creation("6:3"), Some(TopicCreation { partitions: Some(6), replication: Some(3) }));
    problem(|options| options.create_topics = Some("many".to_owned()));
}

#[test]
fn brokers_may_be_embedded_or_given_as_bootstrap_servers() {
    let embedded = resolved(said(|options| options.brokers = Some("embedded".to_owned())));
    assert_eq!(embedded.kafka.brokers, Brokers::Embedded);
    let java = resolved(said(|options| {
        options.brokers = None;
        options.kafka = vec!["bootstrap.servers=a:1,b:2".parse().unwrap()];
    }));
    assert_eq!(java.kafka.brokers, Brokers::Servers("a:1,b:2".to_owned()));
    assert!(java.kafka.options.is_empty());
    problem(|options| options.kafka = vec!["bootstrap.servers=other:1".parse().unwrap()]);
    for brokers in [":9092", "a,,b", "host:port"] {
        problem(|options| options.brokers = Some(brokers.to_owned()));
    }
    resolved(said(|options| options.brokers = Some("[::1]:9092, SASL_SSL://a:1".to_owned())));
}

#[test]
fn a_free_text_may_be_kept_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("topic");
    std::fs::write(&path, "orders\n").unwrap();
    let reference = format!("file:{}", path.display());
    assert_eq!(resolved(said(|options| options.topic = Some(reference))).route.topic.as_deref(), Some("orders"));
    let missing = problem(|options| options.topic = Some("env:OUTBOXD_TEST_NOT_SET".to_owned()));
    assert_eq!(missing, "--topic: env:OUTBOXD_TEST_NOT_SET: is not set in the environment");
}

#[test]
fn what_was_said_beats_the_one_pipeline_of_the_file() {
    let text = "[pipeline.orders]\nsource='postgres://h/file'\nbrokers='k:1'\nslot='from_file'\nkafka.linger.ms=1\nkafka.client.id='f'";
    let settings = from_file(
        Said {
            pipeline: PipelineOptions {
                slot: Some("from_flag".to_owned()),
                kafka: vec!["linger.ms=7".parse().unwrap()],
                ..Default::default()
            },
            pipeline_flags: vec!["--slot".to_owned()],
            ..Default::default()
        },
        text,
    );
    let pipeline = settings.unwrap().pipelines.remove(0);
    assert_eq!((pipeline.name.as_str(), postgres(&pipeline).slot.as_str()), ("orders", "from_flag"));
    let mut kafka: Vec<_> =
        pipeline.kafka.options.iter().map(|one| format!("{}={}", one.key, one.value.reveal().unwrap())).collect();
    kafka.sort();
    assert_eq!(kafka, ["client.id=f", "queue.buffering.max.ms=7"]);
}

const TWO: &str =
    "admin = 'off'\n[pipeline.a]\nsource='postgres://h/a'\n[pipeline.b]\nsource='postgres://h/b'\nbrokers='own:1'";

#[test]
fn with_several_pipelines_the_environment_fills_in_what_the_tables_leave_out() {
    let shared = PipelineOptions { brokers: Some("shared:1".to_owned()), ..Default::default() };
    let settings = from_file(Said { pipeline: shared, ..Default::default() }, TWO).unwrap();
    let brokers: Vec<_> = settings.pipelines.iter().map(|pipeline| pipeline.kafka.brokers.clone()).collect();
    assert_eq!(brokers, [Brokers::Servers("shared:1".to_owned()), Brokers::Servers("own:1".to_owned())]);
    assert_eq!(settings.process.admin, Admin::Off);
}

#[test]
fn with_several_pipelines_a_pipelines_flag_is_a_usage_error() {
    let said = Said {
        pipeline: PipelineOptions { brokers: Some("shared:1".to_owned()), ..Default::default() },
        pipeline_flags: vec!["--brokers".to_owned()],
        ..Default::default()
    };
    let error = from_file(said, TWO).unwrap_err();
    assert!(error.to_string().starts_with("--brokers: with several pipelines"), "{error}");
}

#[test]
fn pipelines_may_not_be_taken_for_each_other() {
    let text =
        "[pipeline.a]\nsource='postgres://h/a'\nbrokers='k:1'\n[pipeline.b]\nsource='postgres://h/a'\nbrokers='k:1'";
    assert!(from_file(Said::default(), text).unwrap_err().to_string().contains("give each its own `slot`"));
    let text = format!("{text}\nname='a'");
    assert!(from_file(Said::default(), &text).unwrap_err().to_string().contains("two pipelines have this name"));
}

#[test]
fn a_publisher_takes_from_the_pipeline_what_its_table_leaves_out() {
    let text = r#"
        [pipeline.shop]
        source = "postgres://app@db/shop"
        table = ["outbox", "audit"]
        brokers = "k:9092"
        topic = "events"
        max-retained = "1GiB"
        [pipeline.shop.publisher.all]
        [pipeline.shop.publisher.partners]
        sink = "http://partners"
        topic = "unused"
        only-type = "order.*"
        dead-letter = "topic:dead"
        [pipeline.shop.publisher.own]
        isolation = "own-position"
        table = "audit"
        topic = "audit"
    "#;
    let settings = from_file(Said::default(), text).unwrap();
    let [shop, own] = &settings.pipelines[..] else { panic!("{:?}", settings.pipelines) };
    let [all, partners] = &shop.publishers[..] else { panic!("{:?}", shop.publishers) };
    assert_eq!(
        (all.name.as_str(), all.route.topic.as_deref(), all.max_retained),
        ("all", Some("events"), Some(1 << 30))
    );
    assert_eq!(all.selection, SelectionSettings::default());
    assert!(
        matches!(partners.sink, SinkSettings::Http(_)) && partners.dead_letter == DeadLetter::Topic("dead".to_owned())
    );
    assert_eq!(partners.selection.types, ["order.*"]);
    assert_eq!((own.name.as_str(), postgres(own).slot.as_str()), ("shop-own", "outboxd_shop_own"));
    assert_eq!((postgres(shop).slot.as_str(), own.is_lone(), shop.is_lone()), ("outboxd_shop", true, false));
    let [archive] = &own.publishers[..] else { panic!("{:?}", own.publishers) };
    assert_eq!(archive.selection.tables.iter().map(ToString::to_string).collect::<Vec<_>>(), ["audit"]);
    assert_eq!(archive.route.topic.as_deref(), Some("audit"));
}

/// What is wrong with a pipeline of these lines, which begin in the file's fourth.
fn told(lines: &str) -> Vec<String> {
    let text = format!("[pipeline.shop]\nsource = 'postgres://h/db'\nbrokers = 'k:1'\n{lines}\n");
    let error = from_file(Said::default(), &text).unwrap_err();
    error.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn every_kind_of_mistake_in_a_file_is_pointed_at_with_line_and_column() {
    for (lines, place, words) in [
        ("layout = 'natve'", "4:10", "shop: layout: `natve` is not a layout"),
        ("slot = 'My-Slot'", "4:8", "shop: slot: `My-Slot` cannot name a slot"),
        ("start = 'yesterday'", "4:9", "shop: start: `yesterday` is not a log position"),
        ("sink = 'kafak'", "4:8", "shop: sink: `kafak` is not a sink"),
        ("capture = 'guess'", "4:11", "shop: capture: `guess` is not a way"),
        ("delivery = 'twice'", "4:12", "shop: delivery: `twice` is not a promise"),
        ("checkpoint = 'moon'", "4:14", "shop: checkpoint: with PostgreSQL"),
        ("dead-letter = 'bin'", "4:15", "shop: dead-letter: `bin` is not a place"),
        ("table = ['a', 'b.']", "4:9", "shop: table: `b.`"),
        ("create-topics = 'many'", "4:17", "shop: create-topics: "),
        ("max-in-flight = 0", "4:17", "shop: max-in-flight: at least one event"),
        ("stall-timeout = '0s'", "4:17", "shop: stall-timeout: must be longer"),
        ("server-id = 7", "4:13", "shop: server-id: is only for MySQL"),
        ("http-token = 'x'", "4:14", "shop: http-token: is only for an HTTP sink"),
        ("topic = 'a{b'", "4:9", "shop: topic: topic template: `a{b` has an opening brace"),
        ("topic = 'a b'", "4:9", "shop: topic: the topic `a b` is not a name"),
        ("column = { kye = 'x' }", "4:18", "shop: column: `kye` is no role"),
        ("column = { version = 'v' }\nonly-version = '>=new'", "5:16", "shop: only-version: `>=new` is not a version"),
        ("only-version = '2'", "4:16", "shop: only-version: the layout `native` has no `version`"),
        ("topic = 'env:OUTBOXD_TEST_NOT_SET'", "4:9", "shop: topic: env:OUTBOXD_TEST_NOT_SET: is not set"),
        ("topic = 'file:/no/such/file'", "4:9", "shop: topic: file:/no/such/file: cannot be read"),
        ("kafka.acks = 1", "4:14", "shop: kafka: request.required.acks"),
        ("[pipeline.shop.kafka]\n'linger.ms' = 5\nacks = '1'", "6:8", "shop: kafka: request.required.acks"),
        (
            "kafka.sasl.password = 'env:OUTBOXD_TEST_NOT_SET'",
            "4:23",
            "shop: kafka: sasl.password: env:OUTBOXD_TEST_NOT_SET",
        ),
        ("[pipeline.shop.publisher.a]\ntopic = 'a{b'", "5:9", "shop, publisher a: topic: topic template"),
        ("[pipeline.shop.publisher.a]\nslot = 'x'", "5:8", "shop, publisher a: slot: is for a publisher with"),
    ] {
        let told = told(lines);
        let expected = format!("f.toml:{place}: pipeline {words}");
        assert!(told.len() == 1 && told[0].starts_with(&expected), "{lines}: {expected} is not {told:#?}");
    }
    assert!(told("column = { kye = 'x' }")[0].ends_with("did you mean `key`?"));
}

#[test]
fn what_is_missing_is_pointed_at_where_its_table_begins() {
    let error = from_file(Said::default(), "admin = 'off'\n\n  [pipeline.shop]\nbrokers = 'k:1'\n").unwrap_err();
    assert!(error.to_string().starts_with("f.toml:3:13: pipeline shop: source: is missing"), "{error}");
}

#[test]
fn two_pipelines_of_one_name_are_pointed_at() {
    let twice = "[pipeline.a]\nsource = 'postgres://h/a'\nbrokers = 'k:1'\n[pipeline.b]\nsource = 'postgres://h/b'\n\
                 brokers = 'k:1'\nname = 'a'\n";
    let error = from_file(Said::default(), twice).unwrap_err();
    assert!(error.to_string().starts_with("f.toml:7:8: pipeline a: two pipelines have this name"), "{error}");
    for (text, place) in [
        ("[pipeline.a]\nslot = 'x'\n[pipeline.a]\nslot = 'y'\n", "f.toml:3:11"),
        ("[pipeline.a]\nslot = 'x'\nslot = 'y'\n", "f.toml:3:1"),
    ] {
        let error = file::parse("f.toml", text).unwrap_err();
        assert_eq!((error.problems[0].place.as_str(), error.problems[0].what.as_str()), (place, "duplicate key"));
    }
}

#[test]
fn what_the_process_is_told_is_pointed_at_too() {
    let process = "admin = '7420'\nadmin-token = 'env:OUTBOXD_TEST_NOT_SET'\n[pipeline.a]\nsource = 'postgres://h/a'\n\
                   brokers = 'k:1'\n";
    let error = from_file(Said::default(), process).unwrap_err();
    let told: Vec<_> = error.problems.iter().map(ToString::to_string).collect();
    assert!(told[0].starts_with("f.toml:1:9: admin: `7420` is neither"), "{told:?}");
    assert!(told[1].starts_with("f.toml:2:15: admin-token: env:OUTBOXD_TEST_NOT_SET: is not set"), "{told:?}");
}

#[test]
fn a_flag_or_a_variable_that_has_the_last_word_is_pointed_at_instead_of_the_file() {
    let file = "[pipeline.a]\nsource = 'postgres://h/a'\nbrokers = 'k:1'\nslot = 'fine'\n";
    let bad = |flags: &[&str], variables: &[&str]| Said {
        pipeline: PipelineOptions { slot: Some("My-Slot".to_owned()), ..Default::default() },
        pipeline_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        pipeline_variables: variables.iter().map(|flag| (*flag).to_owned()).collect(),
        ..Default::default()
    };
    let flag = from_file(bad(&["--slot"], &[]), file).unwrap_err().to_string();
    assert!(flag.starts_with("--slot: `My-Slot`"), "{flag}");
    let variable = from_file(bad(&[], &["--slot"]), file).unwrap_err().to_string();
    assert!(variable.starts_with("environment variable OUTBOXD_SLOT: `My-Slot`"), "{variable}");
    // With several pipelines a table's own word is the last.
    let two = format!("{file}[pipeline.b]\nsource = 'postgres://h/b'\nbrokers = 'k:1'\n");
    let variable = from_file(bad(&[], &["--slot"]), &two).unwrap_err();
    assert_eq!(variable.problems.len(), 1, "{variable}");
    assert!(variable.to_string().starts_with("environment variable OUTBOXD_SLOT"), "{variable}");
}

#[test]
fn a_publishers_mistake_is_told_with_its_name() {
    let text = r#"
        [pipeline.shop]
        source = "mysql://app@db/shop"
        [pipeline.shop.publisher.a]
        brokers = "k:9092"
        table = "elsewhere"
        max-retained = "1GiB"
        [pipeline.shop.publisher.b]
        slot = "mine"
    "#;
    let problems = from_file(Said::default(), text).unwrap_err();
    let told: Vec<_> = problems.problems.iter().map(|problem| problem.place.as_str()).collect();
    assert_eq!(
        told,
        [
            "f.toml:7:24: pipeline shop, publisher a: max-retained",
            "f.toml:6:17: pipeline shop, publisher a: table",
            "f.toml:9:16: pipeline shop, publisher b: slot",
            "f.toml:8:34: pipeline shop, publisher b: brokers",
        ],
        "{problems}"
    );
}

#[test]
fn exactly_once_is_refused_where_it_cannot_be_kept() {
    let refused = |change: fn(&mut PipelineOptions)| {
        problem(|options| {
            options.delivery = Some("exactly-once".to_owned());
            change(options);
        })
    };
    let status = refused(|options| options.capture = Some("poll".to_owned()));
    assert!(status.contains("cannot be committed as one"), "{status}");
    let snapshot = refused(|options| options.snapshot = Some(Snapshot::Existing));
    assert!(snapshot.contains("begins anew after a crash"), "{snapshot}");
    let web = refused(|options| {
        (options.brokers, options.sink) = (None, Some("https://events.internal/".into()));
    });
    assert!(web.contains("is for Kafka"), "{web}");
    let embedded = refused(|options| options.brokers = Some("embedded".to_owned()));
    assert!(embedded.contains("keeps no transactions"), "{embedded}");
}
