//! What people see: tables and a bar on a terminal, and nothing of the kind where nobody looks.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::shop::{self, add};
use crate::support::{Answer, Database, HttpServer, PATIENCE, Relay, Server, Terminal, Topic, eventually, outboxd};

const ESCAPE: char = '\x1b';

#[tokio::test]
async fn status_and_lag_are_tables_with_colours_on_a_terminal_only() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--name", "orders"]).await;
    database.execute("INSERT INTO outbox (partition_key, payload) VALUES ('k', '1')").await;
    eventually(PATIENCE, "the event is counted", async || (relay.status().await["events"] == 1).then_some(())).await;
    let admin = relay.admin().await;
    for (command, heading) in [("status", "POSITION"), ("lag", "RETAINED")] {
        let arguments = [command, "--admin", &admin];
        let piped = outboxd(&arguments).await;
        let lines: Vec<&str> = piped.stdout.lines().collect();
        assert!(piped.code == 0 && lines.len() == 2 && lines[0].contains(heading), "{piped:?}");
        assert_eq!(lines[0].find("STATE"), lines[1].find("streaming"), "the columns line up: {piped:?}");
        assert!(lines[1].starts_with("orders "), "{piped:?}");
        assert!(!piped.stdout.contains(ESCAPE), "{piped:?}");

        let (code, screen) = Terminal::run(&arguments).ends().await;
        assert!(code == 0 && screen.contains("\x1b[32mstreaming\x1b[0m"), "{screen:?}");
        let (_, screen) = Terminal::run_with(&arguments, &[("NO_COLOR", "1")]).ends().await;
        assert!(screen.contains("streaming") && !screen.contains(ESCAPE), "{screen:?}");
        let (_, screen) = Terminal::run_with(&arguments, &[("TERM", "dumb")]).ends().await;
        assert!(screen.contains("streaming") && !screen.contains(ESCAPE), "{screen:?}");
    }
    let json = outboxd(&["lag", "--json", "--admin", &admin]).await;
    let lags: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!((lags[0]["pipeline"].as_str(), lags[0]["state"].as_str()), (Some("orders"), Some("streaming")));
    assert!(lags[0]["lag_bytes"].is_number() && lags[0]["lag_seconds"].is_number(), "{lags}");
    let json = outboxd(&["status", "--json", "--admin", &admin]).await;
    let status: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(status["pipelines"][0]["events"], 1);
    relay.stop().await;
}

#[tokio::test]
async fn check_is_a_table_with_colours_on_a_terminal() {
    let database = Database::create(Server::Newest).await;
    let arguments = ["check", &database.url(), "--sink", "stdout"];
    let (code, screen) = Terminal::run(&arguments).ends().await;
    assert_eq!(code, 3, "{screen}");
    assert!(screen.contains("\x1b[32mok  \x1b[0m") && screen.contains("\x1b[1;31mFAIL\x1b[0m"), "{screen:?}");
    // What was seen is folded at the edge; a remedy stays in one piece, to be copied.
    let shown = screen.replace("\x1b[1;31m", "").replace("\x1b[32m", "").replace("\x1b[33m", "").replace("\x1b[1m", "");
    let shown = shown.replace("\x1b[0m", "");
    let foldable = |line: &&str| line.trim().contains(' ') && !line.contains("remedy:");
    let too_long = |line: &&str| line.trim_end().chars().count() > 100;
    let long: Vec<_> = shown.lines().filter(foldable).filter(too_long).collect();
    assert!(long.is_empty(), "{long:#?}");
}

/// An HTTP server that takes a moment for each batch of a hundred, so that a backlog takes a while.
async fn slow() -> HttpServer {
    HttpServer::start(|_| {
        std::thread::sleep(Duration::from_millis(60));
        Answer::Status(200)
    })
    .await
}

/// A database whose slot stands before so many rows, and a slow place for them.
async fn backlog(rows: usize) -> (Database, HttpServer) {
    let database = shop::outbox().await;
    assert_eq!(outboxd(&["init", &database.url()]).await.code, 0);
    fill(&database, rows).await;
    (database, slow().await)
}

/// Many transactions, so that there is progress to be seen.
async fn fill(database: &Database, rows: usize) {
    for begin in (0..rows).step_by(100) {
        add(database, begin, begin + 100).await;
    }
}

fn run<'a>(url: &'a str, sink: &'a str) -> Vec<&'a str> {
    let run = ["run", url, "--sink", sink, "--lanes", "1", "--http-batch", "100", "--until-caught-up"];
    [&run[..], &["--admin", "127.0.0.1:0", "--name", "orders"]].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn catching_up_on_a_terminal_is_a_bar_that_goes_away() {
    let (database, server) = backlog(12_000).await;
    let (url, sink) = (database.url(), server.url());
    let terminal = Terminal::run(&run(&url, &sink));
    let screen = terminal.until("events/s, ").await;
    assert!(screen.contains("orders ") && screen.contains("% "), "{screen:?}");
    terminal.until("of log to go, ").await;
    let (code, screen) = terminal.ends().await;
    assert_eq!(code, 0, "{screen:?}");
    assert!(screen.contains(" s left"), "a rate and the time left are known after a while: {screen:?}");
    assert!(!screen.contains("catching up"), "a bar, and no lines as well: {screen:?}");
    // Every draw begins at the line's start and clears it: what is left at the end is the log alone.
    let left = screen.rsplit("\x1b[2K").next().unwrap_or_default();
    assert!(!left.contains("events/s, "), "the bar is gone: {left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn catching_up_elsewhere_is_a_line_now_and_then_and_no_garbage() {
    let (database, server) = backlog(30_000).await;
    let (url, sink) = (database.url(), server.url());
    for format in ["text", "json"] {
        if format == "json" {
            fill(&database, 30_000).await;
        }
        let arguments = [&run(&url, &sink)[..], &["--log-format", format]].concat();
        let ended = outboxd(&arguments).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        let log = format!("{}{}", ended.stdout, ended.stderr);
        assert!(!log.contains(ESCAPE) && !log.contains('\r') && !log.contains('━'), "{log:?}");
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("catching up")).collect();
        assert!(lines.len() >= 2 && lines.len() <= 12, "now and then: {log}");
        let last = lines.last().expect("a line");
        for word in ["delivered", "events_per_second", "to_go", "left", "behind"] {
            assert!(last.contains(word), "{word} is not in {last}");
        }
        if format == "json" {
            let line: Value = serde_json::from_str(last).expect("a line of JSON");
            assert!(line["delivered"].as_u64() > Some(0) && line["events_per_second"].as_u64() > Some(0), "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn log_lines_and_the_bar_do_not_run_into_each_other() {
    let (database, server) = backlog(12_000).await;
    let (url, sink) = (database.url(), server.url());
    let terminal = Terminal::run_with(&run(&url, &sink), &[("RUST_LOG", "debug,h2=off"), ("NO_COLOR", "1")]);
    terminal.until("events/s, ").await;
    terminal.signal(Signal::SIGTERM);
    let (code, screen) = terminal.ends().await;
    assert_eq!(code, 0, "{screen:?}");
    // A line of the log begins where the bar was cleared, never behind it.
    for line in screen.split('\n').filter(|line| line.contains(" INFO ") || line.contains("DEBUG ")) {
        let shown = line.rsplit("\x1b[2K").next().unwrap_or(line);
        assert!(!shown.contains("events/s, "), "{line:?}");
    }
}
