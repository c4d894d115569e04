//! The dashboard and the alert rules in docs/, tried with a real Prometheus: no expression names what is not there, every
//! panel has something to show, every rule fires when it must and is quiet when it must.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use super::metrics::{Fleet, answer, ask, documented};
use crate::support::{PATIENCE, eventually, free_port, tail, tool};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn dashboard() -> Value {
    let text = std::fs::read_to_string(repository("docs/grafana-dashboard.json")).expect("there is a dashboard");
    serde_json::from_str(&text).expect("the dashboard is JSON")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or_else(|| panic!("not a list: {value}"), Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("not a text: {value}"))
}

/// Every panel that shows something, with its expressions.
fn panels(dashboard: &Value) -> Vec<(String, Vec<String>)> {
    let panels = list(&dashboard["panels"]).iter().filter(|panel| panel["type"] != "row");
    panels
        .map(|panel| {
            let expressions = list(&panel["targets"]).iter().map(|target| text(&target["expr"]).to_owned());
            (text(&panel["title"]).to_owned(), expressions.collect())
        })
        .collect()
}

/// The names of metrics in an expression.
fn named(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let ours = words.filter(|word| word.starts_with("outboxd_") || word.starts_with("process_"));
    ours.map(|word| word.strip_suffix("_bucket").unwrap_or(word).to_owned()).collect()
}

fn assert_documented(where_: &str, expression: &str) {
    let documented = documented();
    let names = named(expression);
    assert!(!names.is_empty() || expression.contains("up{"), "{where_}: no metric in {expression}");
    for name in names {
        assert!(documented.contains_key(&name), "{where_} names `{name}`, which outboxd does not tell: {expression}");
    }
}

#[test]
fn the_dashboard_is_whole_and_names_only_metrics_that_there_are() {
    let dashboard = dashboard();
    let variables = list(&dashboard["templating"]["list"]);
    assert_eq!((&variables[0]["name"], &variables[0]["type"]), (&"datasource".into(), &"datasource".into()));
    for variable in &variables[1..] {
        assert_eq!(variable["datasource"]["uid"], "${datasource}", "{variable}");
        assert_documented("a variable", text(&variable["query"]["query"]));
    }
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for panel in list(&dashboard["panels"]) {
        let title = text(&panel["title"]);
        assert!(ids.insert(panel["id"].as_u64()), "{title}: the id is another panel's");
        let at = |name: &str| panel["gridPos"][name].as_u64().unwrap_or_else(|| panic!("{title}: no {name}"));
        assert!(at("x") + at("w") <= 24, "{title} is wider than the page");
        for x in at("x")..at("x") + at("w") {
            for y in at("y")..at("y") + at("h") {
                assert!(taken.insert((x, y)), "{title} lies over another panel");
            }
        }
        if panel["type"] == "row" {
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        for target in list(&panel["targets"]) {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            assert_documented(title, text(&target["expr"]));
        }
    }
    let shown: BTreeSet<String> =
        panels(&dashboard).iter().flat_map(|(_, expressions)| expressions.iter().flat_map(|one| named(one))).collect();
    let left_out: BTreeSet<String> = documented().into_keys().filter(|name| !shown.contains(name)).collect();
    // What a curve would say little of.
    let meant =
        ["outboxd_confirmed_position", "process_max_fds", "process_start_time_seconds", "process_virtual_memory_bytes"];
    assert_eq!(left_out, meant.map(str::to_owned).into(), "metrics that no panel shows");
}

fn promtool(arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = Command::new(tool("promtool"))
        .args(arguments)
        .current_dir(repository(""))
        .stdin(Stdio::null())
        .output()
        .expect("promtool runs");
    let said = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(status.success(), "promtool {arguments:?}: {said}");
    said
}

#[test]
fn alert_rules_are_valid_and_each_fires_and_is_quiet_in_a_unit_test() {
    let said = promtool(&["check", "rules", "--lint=all", "--lint-fatal", "docs/prometheus-alerts.yml"]);
    let rules = std::fs::read_to_string(repository("docs/prometheus-alerts.yml")).expect("there are rules");
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(said.contains(&format!("{} rules found", alerts.len())), "{said}");
    for annotation in ["summary", "description", "action"] {
        let count = rules.lines().filter(|line| line.trim().starts_with(&format!("{annotation}: "))).count();
        assert_eq!(count, alerts.len(), "a rule has no {annotation}");
    }
    let said = promtool(&["test", "rules", "tests/monitoring/alerts.yml"]);
    assert!(said.contains("SUCCESS"), "{said}");

    let tests = std::fs::read_to_string(repository("tests/monitoring/alerts.yml")).expect("there are tests");
    for alert in alerts {
        let fires = tests.lines().filter(|line| line.trim() == format!("- alertname: {alert}")).count();
        let quiet = tests.lines().filter(|line| line.contains(&format!("{{ alertname: {alert}, "))).count();
        assert!(fires >= 1, "no test has {alert} fire");
        assert!(quiet >= 1, "no test has {alert} be quiet");
    }
}

/// A Prometheus of one's own that scrapes an outboxd and loads the rules. Killed when dropped.
struct Prometheus {
    child: Child,
    address: String,
    folder: tempfile::TempDir,
}

impl Prometheus {
    async fn scraping(target: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the data");
        let rules = repository("docs/prometheus-alerts.yml");
        let config = format!(
            "global: {{ scrape_interval: 500ms, evaluation_interval: 500ms }}\n\
             rule_files: [{:?}]\n\
             scrape_configs:\n  - job_name: outboxd\n    static_configs: [{{ targets: [{target:?}] }}]\n",
            rules.display()
        );
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, config).expect("the configuration is written");
        let address = format!("127.0.0.1:{}", free_port());
        let log = std::fs::File::create(folder.path().join("log")).expect("a file for the log");
        let child = Command::new(tool("prometheus"))
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus runs");
        let mut server = Prometheus { child, address, folder };
        eventually(PATIENCE, "Prometheus is ready", async || {
            let ended = server.child.try_wait().expect("it can be waited for");
            assert!(ended.is_none(), "Prometheus ended");
            answer(&server.address, "/-/ready", "").ok()?;
            list(&server.query("up")).iter().any(|series| series["value"][1] == "1").then_some(())
        })
        .await;
        server
    }

    fn api(&self, path: &str) -> Value {
        let (_, body) = ask(&self.address, path, "");
        let answer: Value = serde_json::from_str(&body).expect("Prometheus answers in JSON");
        assert_eq!(answer["status"], "success", "{answer}");
        answer["data"].clone()
    }

    /// The series that an expression has now.
    fn query(&self, expression: &str) -> Value {
        let query = utf8_percent_encode(expression, NON_ALPHANUMERIC);
        self.api(&format!("/api/v1/query?query={query}"))["result"].clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("the end of Prometheus' log:\n{}", tail(&self.folder.path().join("log")));
        }
    }
}

#[tokio::test]
async fn every_panel_shows_something_of_a_running_outboxd_and_its_failed_pipeline_is_an_alert() {
    let fleet = Fleet::start().await;
    let prometheus = Prometheus::scraping(&fleet.admin).await;
    fleet.add(50).await;
    // As Grafana puts them in.
    let filled = |expression: &str| {
        let filled = expression.replace("$__rate_interval", "30s").replace("$job", ".*").replace("$pipeline", ".*");
        assert!(!filled.contains('$'), "an unknown variable in {expression}");
        filled
    };
    for (title, expressions) in panels(&dashboard()) {
        for expression in expressions {
            let what = format!("{title} shows something: {expression}");
            let shown = async || (!list(&prometheus.query(&filled(&expression))).is_empty()).then_some(());
            eventually(PATIENCE, &what, shown).await;
        }
    }
    let number = |expression: &str| {
        let series = prometheus.query(&filled(expression));
        text(&series[0]["value"][1]).parse::<f64>().unwrap_or_else(|_| panic!("{expression}: {series}"))
    };
    eventually(PATIENCE, "all was delivered", async || (number("sum(outboxd_events_total)") == 200.0).then_some(()))
        .await;
    assert_eq!(number("sum(outboxd_state{state=\"failed\"})"), 1.0);

    let states = eventually(PATIENCE, "the failed pipeline is an alert", async || {
        let groups = prometheus.api("/api/v1/rules");
        let rules = list(&groups["groups"]).iter().flat_map(|group| list(&group["rules"]));
        let states: BTreeMap<String, String> = rules
            .map(|rule| {
                assert!(rule["health"] != "err", "{rule}");
                (text(&rule["name"]).to_owned(), text(&rule["state"]).to_owned())
            })
            .collect();
        (states["OutboxdFailed"] == "firing").then_some(states)
    })
    .await;
    let firing: Vec<&str> =
        states.iter().filter(|(_, state)| *state == "firing").map(|(name, _)| name.as_str()).collect();
    assert_eq!(firing, ["OutboxdFailed"], "{states:?}");
    let alerts = prometheus.api("/api/v1/alerts");
    let failed = list(&alerts["alerts"]).iter().find(|alert| alert["labels"]["alertname"] == "OutboxdFailed");
    let failed = failed.unwrap_or_else(|| panic!("not told: {alerts}"));
    assert_eq!(failed["labels"]["pipeline"], "broken", "{failed}");
    assert_eq!(failed["annotations"]["summary"], "outboxd: pipeline broken has ended for good");
}
