//! The command line as users meet it. Variables of the environment are clap's to read, so tests that need them run
//! this test binary again, as a child with an environment of its own.

use std::process::Command as Process;

use super::*;
use crate::config::SourceSettings;

/// The test that is the child, and the variable that makes it one.
const CHILD: &str = "cli::tests::child";
const CHILD_LINE: &str = "OUTBOXD_TEST_CHILD_LINE";

fn parsed(line: &str) -> Result<Cli, clap::Error> {
    parse(line.split_whitespace().map(OsString::from))
}

#[track_caller]
fn layer(line: &str) -> PipelineArgs {
    parsed(line).unwrap().command.layer().unwrap().clone()
}

#[test]
fn the_definitions_are_sound() {
    command().debug_assert();
    layers().debug_assert();
}

#[test]
fn a_flag_not_given_says_nothing() {
    let args = layer("outboxd run postgres://h/db");
    assert_eq!(args.pipeline.layout, None);
    assert_eq!(args.process.admin, None);
    assert_eq!(args.pipeline_flags, ["SOURCE"]);
}

#[test]
fn truth_flags_take_no_value_or_one_after_an_equals_sign() {
    assert_eq!(layer("outboxd run --no-create postgres://h/db").pipeline.no_create, Some(true));
    assert_eq!(layer("outboxd run --no-create=false").pipeline.no_create, Some(false));
    assert_eq!(layer("outboxd run --unsafe").pipeline_flags, ["--unsafe"]);
}

#[test]
fn create_topics_takes_numbers_but_never_the_source() {
    let numbers = layer("outboxd run --create-topics 6:3 postgres://h/db").pipeline;
    assert_eq!(numbers.create_topics.as_deref(), Some("6:3"));
    assert!(numbers.source.is_some());
    let alone = layer("outboxd run --create-topics postgres://h/db").pipeline;
    assert_eq!((alone.create_topics.as_deref(), alone.source), (Some("true"), Some("postgres://h/db".into())));
    let two = layer("outboxd run --create-topics postgres://a:hunter2@h/x postgres://h/db --brokers k:1");
    let halt = two.settings().unwrap_err().to_string();
    assert!(halt.starts_with("--create-topics: PARTITIONS") && !halt.contains("hunter2"), "{halt}");
}

#[test]
fn usage_errors_exit_2_and_help_exits_0() {
    for line in ["outboxd", "outboxd fly", "outboxd run --no-such-flag", "outboxd run --shutdown-timeout 20"] {
        assert_eq!(parsed(line).unwrap_err().exit_code(), 2, "{line}");
    }
    for line in ["outboxd --help", "outboxd --version", "outboxd run --help", "outboxd help run"] {
        assert_eq!(parsed(line).unwrap_err().exit_code(), 0, "{line}");
    }
}

#[test]
fn usage_errors_never_show_a_password() {
    for line in [
        "outboxd postgres://a:hunter2@h/db",
        "outboxd run postgres://h/db postgres://a:hunter2@h/db",
        "outboxd status postgres://a:hunter2@h/db",
        "outboxd run --sorce=postgres://a:hunter2@h/db",
        "outboxd run --max-in-flight postgres://a:hunter2@h/db",
        "outboxd run --no-create=postgres://a:hunter2@h/db",
        "outboxd run --snapshot postgres://a:hunter2@h/db",
    ] {
        let error = parsed(line).unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }
    let halt = layer("outboxd run postgres://h/db --brokers k:1 --kafka hunter2").settings().unwrap_err();
    assert_eq!(halt.to_string(), "--kafka: KEY=VALUE is expected");
}

#[test]
fn help_shows_groups_defaults_and_examples() {
    let help = parsed("outboxd run --help").unwrap_err().to_string();
    for part in ["Source:", "Routing:", "Kafka:", "Delivery:", "Operation:", "[default: 20s]", "Examples:"] {
        assert!(help.contains(part), "{part} is not in {help}");
    }
}

#[test]
fn init_needs_no_brokers() {
    let Command::Init(args) = parsed("outboxd init postgres://h/db").unwrap().command else { panic!("not init") };
    assert!(args.pipelines.settings().is_ok());
    assert_eq!(layer("outboxd run postgres://h/db").settings().unwrap_err().code, ExitCode::Usage);
}

#[test]
fn init_has_options_of_its_own() {
    let Command::Init(args) = parsed("outboxd init postgres://h/db --dry-run --payload bytea").unwrap().command else {
        panic!("not init")
    };
    assert!(args.init.dry_run);
    assert_eq!(args.init.payload, PayloadType::Bytea);
    let Command::Init(args) = parsed("outboxd init").unwrap().command else { panic!("not init") };
    assert_eq!(args.init.payload, PayloadType::Jsonb);
}

/// In a child of the tests below: prints what a command line came to.
#[test]
fn child() {
    let Ok(line) = std::env::var(CHILD_LINE) else {
        // Not a child: there is no line to answer for.
        assert!(parsed("outboxd man").is_ok());
        return;
    };
    match parsed(&line) {
        Err(error) => println!("<<{error}>>"),
        Ok(mut cli) => match cli.command.layer().unwrap().clone().settings() {
            Err(halt) => println!("<<{halt}>>"),
            Ok(settings) => {
                let pipeline = &settings.pipelines[0];
                let SourceSettings::Postgres(source) = &pipeline.source else { panic!("not PostgreSQL") };
                let kafka = pipeline.kafka.options.iter().map(|one| one.key.as_str()).collect::<Vec<_>>();
                println!(
                    "<<slot={} publication={} layout={} kafka={kafka:?} no_create={}>>",
                    source.slot, source.publication, pipeline.route.layout, source.no_create
                );
            }
        },
    }
}

#[track_caller]
fn in_environment(variables: &[(&str, &str)], line: &str) -> String {
    let child = Process::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD, "--nocapture"])
        .env(CHILD_LINE, line)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let output = String::from_utf8(child.stdout).unwrap();
    let (_, rest) = output.split_once("<<").unwrap_or_else(|| panic!("no answer in {output}"));
    rest.rsplit_once(">>").unwrap().0.to_owned()
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("outboxd.toml");
    let file =
        "[pipeline.p]\nsource='postgres://h/db'\nbrokers='k:1'\nslot='file'\npublication='file'\nlayout='debezium'\n";
    std::fs::write(&path, file).unwrap();
    let line = format!("outboxd run --config {} --slot flag", path.display());
    let variables = [("OUTBOXD_SLOT", "environment"), ("OUTBOXD_PUBLICATION", "environment")];
    let came_to = in_environment(&variables, &line);
    assert_eq!(came_to, "slot=flag publication=environment layout=debezium kafka=[] no_create=false");
}

#[test]
fn the_environment_alone_is_enough() {
    let variables = [
        ("OUTBOXD_SOURCE", "postgres://h/db"),
        ("OUTBOXD_BROKERS", "k:1"),
        ("OUTBOXD_KAFKA", "client.id=a,b\n\n  debug=broker,topic\n"),
        ("OUTBOXD_NO_CREATE", "1"),
        ("OUTBOXD_SLOT", ""),
        ("OUTBOXD_STALL_TIMEOUT", ""),
    ];
    let came_to = in_environment(&variables, "outboxd run");
    let expected = r#"slot=outboxd_db publication=outboxd layout=native kafka=["client.id", "debug"] no_create=true"#;
    assert_eq!(came_to, expected);
}

#[test]
fn a_flag_of_an_earlier_name_is_taken_and_not_shown() {
    let args = layer("outboxd run --amqp-exchange shop --amqp-routing-key {event_type}").pipeline;
    assert_eq!((args.exchange.as_deref(), args.routing_key.as_deref()), (Some("shop"), Some("{event_type}")));
    let help = parsed("outboxd run --help").unwrap_err().to_string();
    assert!(help.contains("--exchange") && !help.contains("--amqp-exchange"), "{help}");
    // A variable of the earlier name counts where there is none of the name of now.
    let error = |variables: &[(&str, &str)]| in_environment(variables, "outboxd run postgres://h/db --brokers k:1");
    let told = "is only for RabbitMQ";
    assert!(error(&[("OUTBOXD_AMQP_EXCHANGE", "a"), ("OUTBOXD_EXCHANGE", "")]).contains(told));
    assert!(!error(&[("OUTBOXD_AMQP_EXCHANGE", ""), ("OUTBOXD_EXCHANGE", "")]).contains(told));
}

#[test]
fn help_never_shows_a_variables_value() {
    let variables = [("OUTBOXD_SOURCE", "postgres://a:hunter2@h/db"), ("OUTBOXD_KAFKA", "sasl.password=hunter2")];
    let help = in_environment(&variables, "outboxd run --help");
    assert!(help.contains("OUTBOXD_SOURCE") && !help.contains("hunter2"), "{help}");
    for settings in ["a=b\nhunter2", "hunter2\na=b"] {
        let error = in_environment(&[("OUTBOXD_KAFKA", settings)], "outboxd run");
        assert!(error.contains("OUTBOXD_KAFKA") && !error.contains("hunter2"), "{error}");
    }
}

#[test]
fn position_takes_the_options_of_run_as_a_layer() {
    for line in [
        "outboxd position show postgres://h/db --slot s",
        "outboxd position set 0/16B3748 postgres://h/db --slot s --reason why",
        "outboxd position set now --reason why --slot s postgres://h/db --yes --publisher p --dry-run",
    ] {
        let args = layer(line);
        assert_eq!(args.pipeline.source, Some("postgres://h/db".into()), "{line}");
        assert_eq!((args.pipeline.slot.as_deref(), args.pipeline.layout.as_deref()), (Some("s"), None), "{line}");
        assert!(args.without_sink && args.pipeline_flags.contains(&"--slot".to_owned()), "{line}");
    }
    for line in ["outboxd position", "outboxd position set --reason why", "outboxd position set now postgres://h/db"] {
        assert_eq!(parsed(line).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn every_command_has_help_with_examples_where_it_takes_options() {
    for command in command().get_subcommands().filter(|command| !command.is_hide_set()) {
        let inner: Vec<_> = command.get_subcommands().filter(|inner| inner.get_name() != "help").collect();
        for command in if inner.is_empty() { vec![command] } else { inner } {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            let options = command.get_arguments().filter(|argument| argument.get_long().is_some()).count();
            let examples = command.get_after_help().is_some_and(|help| help.to_string().contains("Examples:"));
            assert!(
                options < 2 || examples || ["pause", "resume"].contains(&command.get_name()),
                "{}",
                command.get_name()
            );
        }
    }
}

#[test]
fn dlq_takes_the_options_of_run_as_a_layer() {
    for line in [
        "outboxd dlq list postgres://h/db --dead-letter table:d",
        "outboxd dlq show 7 postgres://h/db --dead-letter table:d",
        "outboxd dlq replay 0:7 postgres://h/db --dead-letter table:d",
        "outboxd dlq replay --all postgres://h/db --dead-letter table:d",
        "outboxd dlq purge postgres://h/db --dead-letter table:d --older-than 30d",
    ] {
        let args = layer(line);
        assert_eq!(args.pipeline.source, Some("postgres://h/db".into()), "{line}");
        assert_eq!((args.pipeline.dead_letter.as_deref(), args.pipeline.layout), (Some("table:d"), None), "{line}");
        assert!(args.pipeline_flags.contains(&"--dead-letter".to_owned()), "{line}");
        // Brokers are only needed by who sends.
        assert_eq!(args.without_sink, !line.contains("replay"), "{line}");
    }
    for line in [
        "outboxd dlq",
        "outboxd dlq show",
        "outboxd dlq list --older-than 30d",
        "outboxd dlq purge --older-than x",
        "outboxd dlq list --limit 0",
    ] {
        assert_eq!(parsed(line).unwrap_err().exit_code(), 2, "{line}");
    }
    // A source in the place of a letter is not taken for one, and its password is not shown.
    for line in ["outboxd dlq show postgres://a:hunter2@h/db", "outboxd dlq purge postgres://a:hunter2@h/db --yes"] {
        assert_eq!(layer(line).pipeline.source, Some("postgres://a:hunter2@h/db".into()), "{line}");
        let halt = execute(parsed(&format!("{line} --dead-letter none")).unwrap()).unwrap_err().to_string();
        assert!(!halt.contains("hunter2"), "{halt}");
    }
}
