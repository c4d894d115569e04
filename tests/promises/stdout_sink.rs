//! Records as JSON lines on standard output, and counts instead of records.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::{Database, PATIENCE, Server, eventually};

async fn add(database: &Database, from: usize, to: usize) {
    let insert = format!(
        "INSERT INTO outbox (topic, partition_key, event_type, payload, headers)
         SELECT 'orders', 'key', 'Counted', jsonb_build_object('n', n), jsonb_build_object('trace', 'a b')
         FROM generate_series({from}, {to} - 1) n"
    );
    database.execute(&insert).await;
}

fn run(database: &Database, sink: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outboxd"));
    command.args(["run", &database.url(), "--sink", sink, "--admin", "off", "--log-format", "text"]).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Makes slot and publication, so that what is added from now on is delivered.
async fn init(database: &Database) {
    let made = Command::new(env!("CARGO_BIN_EXE_outboxd")).args(["init", &database.url()]).output();
    assert!(made.expect("outboxd runs").status.success());
}

fn numbers(lines: impl Iterator<Item = String>) -> Vec<u64> {
    let number = |line: String| {
        let record: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        record["value"]["n"].as_u64().expect("a number")
    };
    lines.map(number).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_is_one_json_object_a_line_and_needs_no_broker() {
    let database = Database::with_native_outbox(Server::Newest).await;
    init(&database).await;
    add(&database, 0, 300).await;
    let output = run(&database, "stdout", &["--until-caught-up"]).output().expect("outboxd runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    let first: Value = serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
    assert_eq!((&first["topic"], &first["key"]), (&json!("orders"), &json!("key")));
    assert_eq!(first["value"], json!({"n": 0}));
    assert_eq!((&first["headers"]["event_type"], &first["headers"]["trace"]), (&json!("Counted"), &json!("a b")));
    assert!(first["timestamp"].as_i64().is_some_and(|millis| millis > 1_600_000_000_000));
    assert_eq!(numbers(text.lines().map(str::to_owned)), (0..300).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_pipe_is_exit_5_and_nothing_is_confirmed_that_was_not_written() {
    let database = Database::with_native_outbox(Server::Newest).await;
    init(&database).await;
    // More than a pipe holds.
    add(&database, 0, 20_000).await;
    let mut relay = run(&database, "stdout", &["--max-in-flight", "1000"]).spawn().expect("outboxd starts");
    let mut reader = BufReader::new(relay.stdout.take().expect("its output"));
    let mut read = Vec::new();
    for _ in 0..1500 {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a line is read");
        read.push(line);
    }
    drop(reader);
    let status = eventually(PATIENCE, "the relay ends", async || relay.try_wait().expect("it can be waited for")).await;
    assert_eq!(status.code(), Some(5));

    let rest = run(&database, "stdout", &["--until-caught-up"]).output().expect("outboxd runs");
    assert!(rest.status.success(), "{}", String::from_utf8_lossy(&rest.stderr));
    let rest = numbers(String::from_utf8(rest.stdout).expect("text").lines().map(str::to_owned));
    let read = numbers(read.into_iter());
    assert_eq!(rest.last(), Some(&19_999));
    // What lay in the pipe when its reader left was written, and is the reader's to lose; no more than that is missing.
    let missing = rest[0].saturating_sub(read.len() as u64);
    assert!(missing < 2000, "{missing} records were confirmed and are in neither output");
    assert!(rest.windows(2).all(|pair| pair[1] == pair[0] + 1), "the rest is whole and in order");
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_count_by_topic_and_type_and_deliver_nothing() {
    let database = Database::with_native_outbox(Server::Newest).await;
    init(&database).await;
    add(&database, 0, 123).await;
    let output = run(&database, "statistics", &["--until-caught-up"]).output().expect("outboxd runs");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && output.stdout.is_empty(), "{log}");
    let line = log.lines().find(|line| line.contains("counted")).unwrap_or_else(|| panic!("{log}"));
    for part in ["orders", "Counted", "records=123"] {
        assert!(line.contains(part), "{line}");
    }
}
