//! What operators see: health, metrics and status over HTTP, the log, and the codes of a bad configuration.

use std::collections::HashMap;
use std::net::TcpListener;

use serde_json::Value;

use super::process::{Process, get, run};
use crate::support::{
    Database, Expected, PATIENCE, PrivateKafka, Relay, Server, Topic, Writer, eventually, shared_kafka,
};

/// Every sample of a page, by its name and labels.
fn samples(page: &str) -> HashMap<(String, Vec<(String, String)>), f64> {
    let mut found = HashMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("not a sample: {line}"));
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("not a number: {line}"));
        let (name, labels) = match series.split_once('{') {
            None => (series, ""),
            Some((name, labels)) => (name, labels.strip_suffix('}').unwrap_or_else(|| panic!("unclosed: {line}"))),
        };
        let mut labels: Vec<_> = labels
            .split(',')
            .filter(|label| !label.is_empty())
            .map(|label| {
                let (name, value) = label.split_once('=').unwrap_or_else(|| panic!("not a label: {line}"));
                (name.to_owned(), value.trim_matches('"').to_owned())
            })
            .collect();
        labels.sort();
        let earlier = found.insert((name.to_owned(), labels), value);
        assert!(earlier.is_none(), "twice: {line}");
    }
    found
}

/// The pages of a relay that has delivered three events and confirmed them.
#[tokio::test]
async fn health_metrics_and_status_tell_what_the_relay_does() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--name", "orders"]).await;
    let writer = Writer::connect(&database).await;
    writer.commit(&["a", "b"]).await;
    writer.commit(&["a"]).await;
    let position = database.wal_position().await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    writer.run("SELECT pg_logical_emit_message(true, 'nobody', '')").await;
    database.until_confirmed(position, PATIENCE).await;
    let admin = relay.admin().await;
    let (code, head, page) = get(&admin, "/metrics");
    assert_eq!(code, 200);
    // As OpenMetrics only to whoever asks for that, which metrics.rs tries.
    assert!(head.to_lowercase().contains("content-type: text/plain; version=0.0.4"), "{head}");
    let found = samples(&page);
    let sample = |name: &str, more: &[(&str, &str)]| {
        let wanted = [("pipeline", "orders")].iter().chain(more).copied();
        let mut wanted: Vec<_> = wanted.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        wanted.sort();
        let value = found.get(&(name.to_owned(), wanted));
        *value.unwrap_or_else(|| panic!("no {name} with {more:?} in {page}"))
    };
    assert_eq!(sample("outboxd_events_total", &[]), 3.0);
    assert_eq!(sample("outboxd_transactions_total", &[]), 2.0);
    assert!(sample("outboxd_bytes_total", &[]) > 0.0);
    assert!(sample("outboxd_delivery_seconds_count", &[]) >= 1.0);
    assert!(sample("outboxd_delivery_seconds_sum", &[]) < 120.0);
    assert!(sample("outboxd_delivery_seconds_bucket", &[("le", "+Inf")]) >= 1.0);
    assert!(sample("outboxd_source_lag_bytes", &[]) >= 0.0);
    assert_eq!(sample("outboxd_source_lag_seconds", &[]), 0.0);
    assert_eq!(sample("outboxd_in_flight", &[]), 0.0);
    assert!(sample("outboxd_confirmed_position", &[]) >= position as f64);
    for counter in ["outboxd_retries_total", "outboxd_failures_total", "outboxd_dead_letters_total"] {
        assert_eq!(sample(counter, &[]), 0.0, "{counter}");
    }
    for op in ["update", "delete", "truncate"] {
        assert_eq!(sample("outboxd_ignored_changes_total", &[("op", op)]), 0.0);
    }
    for side in ["source", "sink"] {
        assert_eq!(sample("outboxd_connected", &[("side", side)]), 1.0);
    }
    assert_eq!(sample("outboxd_leader", &[]), 1.0);
    assert!(sample("outboxd_slot_retained_bytes", &[]) >= 0.0);
    assert!(found.keys().any(|(name, _)| name == "outboxd_build_info"), "{page}");

    assert_eq!((get(&admin, "/livez").0, get(&admin, "/readyz").0), (200, 200));
    let (code, head, body) = get(&admin, "/status");
    assert!(code == 200 && head.to_lowercase().contains("content-type: application/json"), "{head}");
    let page: Value = serde_json::from_str(&body).expect("/status is JSON");
    let one = &page["pipelines"][0];
    assert_eq!((&one["name"], &one["state"], &one["leader"]), (&"orders".into(), &"streaming".into(), &true.into()));
    assert!(one["position"].as_str().is_some_and(|position| position.contains('/')), "{one}");
    assert_eq!((&one["in_flight"], &one["events"], &one["last_error"]), (&0.into(), &3.into(), &Value::Null));
    assert!(one["lag_bytes"].is_u64() && one["lag_seconds"].is_f64(), "{one}");

    let (code, table, _) = run(&["status", "--admin", &admin], &[]).await;
    assert!(code == 0 && table.starts_with("PIPELINE"), "{table}");
    assert!(table.lines().any(|line| line.starts_with("orders") && line.contains("streaming")), "{table}");
    let (code, json, _) = run(&["status", "--json"], &[("OUTBOXD_ADMIN", &admin)]).await;
    let json: Value = serde_json::from_str(&json).expect("--json prints JSON");
    assert_eq!((code, &json["pipelines"][0]["name"]), (0, &"orders".into()));
    relay.stop().await;
    for check in [&[][..], &["--check"], &["--check=live"]] {
        let arguments = [&["status", "--admin", &admin], check].concat();
        let (code, said, error) = run(&arguments, &[]).await;
        assert!(code == 1 && said.is_empty() && error.contains(&admin), "{said}{error}");
    }
}

/// `outboxd status --check`, as a container's health check runs it.
async fn checked(admin: &str, check: &str) -> (i32, String) {
    let (code, said, error) = run(&["status", check], &[("OUTBOXD_ADMIN", admin)]).await;
    (code, said + &error)
}

#[tokio::test]
async fn a_broker_that_is_away_is_told_in_status_readyz_and_metrics_though_nothing_is_sent() {
    let mut kafka = PrivateKafka::start(1).await;
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create_at(&kafka.brokers(), 1, &[]).await;
    let relay = Relay::streaming(&database, &topic, &["--name", "orders"]).await;
    let admin = relay.admin().await;
    let sink = |connected: u8| format!("outboxd_connected{{pipeline=\"orders\",side=\"sink\"}} {connected}");
    let ready = async || (get(&admin, "/readyz").0 == 200).then_some(());
    eventually(PATIENCE, "it is ready", ready).await;
    assert_eq!(checked(&admin, "--check").await, (0, "ok\n".to_owned()));

    kafka.kill(1);
    let why = eventually(PATIENCE, "the broker is missed", async || {
        let (code, _, why) = get(&admin, "/readyz");
        (code == 503).then_some(why)
    })
    .await;
    assert!(why.contains("no Kafka broker is connected"), "{why}");
    assert!(get(&admin, "/metrics").2.contains(&sink(0)));
    assert_eq!(relay.status().await["state"], "streaming", "the log is still read");
    let (code, said) = checked(&admin, "--check").await;
    assert!(code == 1 && said.contains("/readyz answers 503") && said.contains("no Kafka broker"), "{code} {said}");
    assert_eq!(checked(&admin, "--check=live").await, (0, "ok\n".to_owned()), "it waits for good reason");

    kafka.restart(1).await;
    eventually(PATIENCE, "the broker is found again", ready).await;
    assert!(get(&admin, "/metrics").2.contains(&sink(1)));
    assert_eq!(relay.status().await["last_error"], Value::Null);
    assert_eq!(checked(&admin, "--check").await.0, 0);
    relay.stop().await;
}

#[tokio::test]
async fn a_taken_default_address_gives_way_and_a_taken_chosen_one_is_an_error() {
    // Whoever has the port, it is taken.
    let _default = TcpListener::bind("127.0.0.1:7420");
    let database = Database::with_outbox(Server::Newest).await;
    let (url, brokers) = (database.url(), shared_kafka());
    let arguments = ["run", &url, "--brokers", &brokers, "--topic", "no-such-topic", "--log-format", "text"];
    let mut process = Process::spawn(&arguments, &[]);
    process.until_printed("health, metrics and status").await;
    let said = process.stderr();
    assert!(said.contains("the default admin address 127.0.0.1:7420 is taken"), "{said}");
    let address = said.split("address=").nth(1).and_then(|rest| rest.split_whitespace().next()).expect("an address");
    assert!(!address.ends_with(":7420") && address.starts_with("127.0.0.1:"), "{address}");
    process.exits_with(5).await;

    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let taken = taken.local_addr().map(|address| (taken, address.to_string())).expect("it has an address");
    let chosen = [&arguments[..], &["--admin", &taken.1]].concat();
    let (code, _, error) = run(&chosen, &[]).await;
    assert!(code == 2 && error.contains(&taken.1), "{code}: {error}");
}

#[tokio::test]
async fn a_database_out_of_reach_is_retried_for_ever_and_shown() {
    let topic = Topic::create(1).await;
    // Bound and never accepting would hang; free and closed refuses.
    let port = crate::support::free_port();
    let url = format!("postgres://u@127.0.0.1:{port}/shop");
    let mut relay = Relay::spawn(&["run", &url, "--brokers", &topic.brokers, "--topic", &topic.name]);
    let admin = relay.admin().await;
    eventually(PATIENCE, "several attempts were made", async || {
        let page = get(&admin, "/metrics").2;
        let line = page.lines().find(|line| line.starts_with("outboxd_retries_total{"))?.to_owned();
        (line.rsplit_once(' ')?.1.parse::<u64>().ok()? >= 3).then_some(())
    })
    .await;
    assert!(relay.is_running());
    let what = eventually(PATIENCE, "/readyz says why", async || {
        let (code, _, body) = get(&admin, "/readyz");
        assert_eq!(code, 503);
        body.contains(&port.to_string()).then_some(body)
    })
    .await;
    assert!(what.starts_with("outboxd_shop: not ready"), "{what}");
    assert_eq!(get(&admin, "/livez").0, 200, "waiting for a server is legitimate");
    let page = get(&admin, "/metrics").2;
    assert!(page.contains("outboxd_connected{pipeline=\"outboxd_shop\",side=\"source\"} 0"), "{page}");
    relay.stop().await;
}

#[tokio::test]
async fn the_log_is_text_for_people_and_json_for_machines() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let (url, brokers) = (database.url(), shared_kafka());
    let arguments = ["run", &url, "--brokers", &brokers, "--topic", &topic.name, "--admin", "127.0.0.1:0"];
    let caught_up = [&arguments[..], &["--until-caught-up"]].concat();
    // A file is no terminal, so JSON is the default there.
    for (format, is_json) in [("", true), ("json", true), ("text", false)] {
        let (code, stdout, log) = run(&caught_up, &[("OUTBOXD_LOG_FORMAT", format)]).await;
        assert_eq!((code, stdout.as_str()), (0, ""), "{log}");
        let lines: Vec<&str> = log.lines().collect();
        assert!(lines.iter().any(|line| line.contains("reading the log")), "{log}");
        assert!(!log.contains('\u{1b}'), "colours are for terminals: {log}");
        for line in lines {
            let parsed: Result<Value, _> = serde_json::from_str(line);
            assert_eq!(parsed.is_ok(), is_json, "{line}");
            if let Ok(object) = parsed {
                for field in ["timestamp", "level", "message"] {
                    assert!(object[field].is_string(), "no {field} in {line}");
                }
            }
        }
    }
    let (_, _, quiet) = run(&caught_up, &[("RUST_LOG", "error")]).await;
    assert_eq!(quiet, "", "the level is RUST_LOG's");
}

#[tokio::test]
async fn a_bad_configuration_exits_with_2_and_says_where() {
    let folder = tempfile::tempdir().expect("a folder for the file");
    let path = folder.path().join("outboxd.toml");
    let file = path.display().to_string();
    let with_file = async |text: &str| {
        std::fs::write(&path, text).expect("the file is written");
        run(&["run", "--config", &file], &[]).await
    };
    let good = "[pipeline.a]\nsource = 'postgres://h/db'\nbrokers = 'k:9092'\n";
    let (code, _, error) = with_file(&format!("{good}brokrs = 'x'\nmax-in-flight = 'many'\n")).await;
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("outboxd.toml:4:1") && error.contains("did you mean `brokers`?"), "{error}");
    assert!(error.contains("outboxd.toml:5:17"), "every problem at once: {error}");
    let (code, _, error) = with_file("").await;
    assert!(code == 2 && error.contains("[pipeline.NAME]"), "{error}");
    let (code, _, error) =
        with_file(&format!("{good}\n[pipeline.b]\nsource = 'postgres://h/db'\nbrokers = 'k'\n")).await;
    assert!(code == 2 && error.contains("slot"), "two readers of one slot: {error}");
    for arguments in [
        &["run", "--config", "/no/such/file.toml"][..],
        &["run"],
        &["run", "postgres://h/db"],
        &["run", "oracle://h/db", "--brokers", "k:1"],
        &["run", "mysql://h", "--brokers", "k:1"],
        &["run", "postgres://h/db", "--brokers", "k:1", "--kafka", "acks=1"],
        &["run", "postgres://h/db", "--brokers", "k:1", "--topic", "{unclosed"],
        &["run", "postgres://h/db", "--brokers", "k:1", "--topic", "not a topic"],
        &["run", "postgres://h/db", "--brokers", "k:1", "--column", "colour=red"],
        &["run", "postgres://h/db", "--brokers", "k:1", "--layout", "natve"],
        &["run", "postgres://h/db", "--brokers", "k:1", "--delivery", "exactly-once"],
        &["run", "postgres://h/db?sslmode=sometimes", "--brokers", "k:1"],
        &["run", "postgres://h/db", "--brokers", "k:1", "--admin", "nowhere"],
        &["run", "file:/no/such/secret", "--brokers", "k:1"],
        &["no-such-command"],
    ] {
        let (code, _, error) = run(arguments, &[]).await;
        assert_eq!(code, 2, "{arguments:?}: {error}");
        assert!(!error.is_empty(), "{arguments:?} says nothing");
    }
}
