//! A running outboxd with a pipeline of every kind, and what it tells of itself: docs/metrics.md has all of it, the older
//! text format and OpenMetrics tell the same, and `promtool` finds nothing amiss.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{Database, PATIENCE, Relay, Server, Topic, eventually, outboxd, tool};

/// `orders` has one publisher, `shop` two, `jobs` is polled, and `broken` has failed.
pub struct Fleet {
    pub relay: Relay,
    pub admin: String,
    pub database: Database,
    _folder: tempfile::TempDir,
    _topic: Topic,
}

impl Fleet {
    pub async fn start() -> Self {
        let database = Database::with_native_outbox(Server::Newest).await;
        let topic = Topic::create(1).await;
        let (url, slot) = (database.url(), database.slot());
        let made = outboxd(&["init", &url, "--capture", "poll", "--table", "jobs"]).await;
        assert_eq!(made.code, 0, "{made:?}");
        let pipeline = |name: &str, more: &str| {
            let (brokers, topic) = (&topic.brokers, &topic.name);
            format!("[pipeline.{name}]\nsource = {url:?}\nbrokers = {brokers:?}\ntopic = {topic:?}\n{more}\n")
        };
        let file = [
            pipeline("orders", &format!("slot = \"{slot}\"")),
            pipeline("shop", &format!("slot = \"{slot}_shop\"")),
            "[pipeline.shop.publisher.all]\n[pipeline.shop.publisher.partners]\nonly-type = \"order.*\"\n".to_owned(),
            pipeline("jobs", "capture = \"poll\"\ntable = \"jobs\""),
            pipeline("broken", &format!("slot = \"{slot}_broken\"\ntable = \"no_such_table\"")),
        ];
        let folder = tempfile::tempdir().expect("a folder for the file");
        let path = folder.path().join("outboxd.toml");
        std::fs::write(&path, file.concat()).expect("the file is written");
        let relay = Relay::spawn(&["run", "--config", path.to_str().expect("a path")]);
        let admin = relay.admin().await;
        let fleet = Fleet { relay, admin, database, _folder: folder, _topic: topic };
        let streaming = ["orders", "shop", "jobs"].map(|name| state(name, "streaming"));
        fleet.until_told(&streaming).await;
        fleet.until_told(&[state("broken", "failed")]).await;
        fleet
    }

    /// Adds some rows of every kind.
    pub async fn add(&self, rows: usize) {
        for table in ["outbox", "jobs"] {
            let insert = format!(
                "INSERT INTO {table} (partition_key, event_type, payload)
                 SELECT 'key', 'order.placed', jsonb_build_object('n', n) FROM generate_series(1, {rows}) n"
            );
            self.database.execute(&insert).await;
        }
    }

    /// Waits until the page has all of these lines.
    pub async fn until_told(&self, lines: &[String]) {
        eventually(PATIENCE, &format!("{lines:?} is told"), async || {
            let page = ask(&self.admin, "/metrics", "").1;
            lines.iter().all(|line| page.lines().any(|told| told == line)).then_some(())
        })
        .await;
    }
}

fn state(pipeline: &str, state: &str) -> String {
    format!("outboxd_state{{pipeline=\"{pipeline}\",state=\"{state}\"}} 1")
}

/// Headers and body of a GET that must succeed.
pub fn ask(address: &str, path: &str, accept: &str) -> (String, String) {
    answer(address, path, accept).unwrap_or_else(|what| panic!("{address}{path}: {what}"))
}

/// Headers and body of a GET, in HTTP/1.0, so that nobody answers in chunks; or what came instead.
pub fn answer(address: &str, path: &str, accept: &str) -> Result<(String, String), String> {
    let mut stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out can be set");
    let accept = if accept.is_empty() { String::new() } else { format!("Accept: {accept}\r\n") };
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n{accept}\r\n").expect("a request is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer is read");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP: {answer}"));
    match head.contains(" 200 ") {
        true => Ok((head.to_lowercase(), body.to_owned())),
        false => Err(answer),
    }
}

/// A metric as it is described: its type, and the names of its labels.
type Described = BTreeMap<String, (String, BTreeSet<String>)>;

/// What a page in the older text format tells of.
fn told(page: &str) -> Described {
    let mut found = Described::new();
    for line in page.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let earlier = found.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
            assert!(earlier.is_none(), "described twice: {line}");
        } else if !line.starts_with('#') {
            let (series, _) = line.rsplit_once(' ').unwrap_or_else(|| panic!("not a sample: {line}"));
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let name = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|part| name.strip_suffix(part).filter(|name| found.contains_key(*name)))
                .unwrap_or(name);
            let (_, names) = found.get_mut(name).unwrap_or_else(|| panic!("not described: {line}"));
            let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| label.split_once('='));
            names.extend(labels.map(|(name, _)| name.to_owned()).filter(|name| name != "le"));
        }
    }
    found
}

/// What docs/metrics.md tells of.
pub fn documented() -> Described {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md"));
    let page = page.expect("the metrics are documented");
    let mut found = Described::new();
    for line in page.lines().filter(|line| line.starts_with("| `outboxd_") || line.starts_with("| `process_")) {
        let cells: Vec<&str> = line.split(" | ").collect();
        let [name, kind, labels, meaning] = cells[..] else { panic!("not four cells: {line}") };
        assert!(meaning.len() > 5, "no meaning: {line}");
        let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
        let earlier = found.insert(quoted(name)[0].clone(), (kind.to_owned(), quoted(labels).into_iter().collect()));
        assert!(earlier.is_none(), "documented twice: {line}");
    }
    found
}

#[tokio::test]
async fn every_metric_is_documented_with_its_type_and_labels_and_no_other_is() {
    let fleet = Fleet::start().await;
    fleet.add(3).await;
    let events = |labels: &str| format!("outboxd_events_total{{{labels}}} 3");
    let labels = [
        "pipeline=\"orders\"",
        "pipeline=\"shop\",publisher=\"all\"",
        "pipeline=\"shop\",publisher=\"partners\"",
        "pipeline=\"jobs\"",
    ];
    fleet.until_told(&labels.map(events)).await;

    let (head, page) = ask(&fleet.admin, "/metrics", "");
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    assert_eq!(told(&page), documented(), "docs/metrics.md on the right");
    // Where there are several publishers each tells for itself, and the pipeline what is its own.
    for line in [
        "outboxd_connected{pipeline=\"shop\",side=\"source\"} 1",
        "outboxd_connected{pipeline=\"shop\",publisher=\"all\",side=\"sink\"} 1",
        "outboxd_state{pipeline=\"shop\",publisher=\"partners\",state=\"streaming\"} 1",
        "outboxd_state{pipeline=\"shop\",publisher=\"partners\",state=\"paused\"} 0",
        "outboxd_source_lag_seconds{pipeline=\"shop\",publisher=\"all\"} 0.0",
        "outboxd_leader{pipeline=\"broken\"} 0",
    ] {
        assert!(page.lines().any(|told| told == line), "no {line} in {page}");
    }
    assert!(!page.contains("outboxd_in_flight{pipeline=\"shop\"}"), "{page}");
    let resident = page.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
    let resident: f64 = resident.and_then(|bytes| bytes.parse().ok()).expect("a number of bytes");
    let really = fleet.relay.memory() as f64;
    assert!((resident / really - 1.0).abs() < 0.2, "{resident} bytes are told and {really} are held");

    let (head, open) = ask(&fleet.admin, "/metrics", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5");
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(open.ends_with("# EOF\n") && open.contains("# TYPE outboxd_events counter\n"), "{open}");
    let series = |page: &str| -> BTreeSet<String> {
        let samples = page.lines().filter(|line| !line.starts_with('#'));
        samples.map(|line| line.rsplit_once(' ').expect("a sample").0.to_owned()).collect()
    };
    assert_eq!(series(&open), series(&page), "both formats have the same samples");
}

#[tokio::test]
async fn promtool_finds_nothing_amiss_in_what_a_running_outboxd_tells() {
    let fleet = Fleet::start().await;
    fleet.add(3).await;
    let (_, page) = ask(&fleet.admin, "/metrics", "");
    let mut promtool = Command::new(tool("promtool"))
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool runs");
    promtool.stdin.take().expect("its input").write_all(page.as_bytes()).expect("promtool reads");
    let checked = promtool.wait_with_output().expect("promtool ends");
    let said = [checked.stdout, checked.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(checked.status.success() && said.trim().is_empty(), "{said}\n{page}");
}
