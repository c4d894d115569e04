//! What the documentation tells people to type works: every block marked `sh` in docs/ is run as it stands, with the test
//! servers in place of `localhost`, and every block marked `sql` on the database that the commands before it named.
//!
//! Left out is only what needs something that is not on this machine: an engine for containers, an init system, files of
//! the reader's own below /etc.

use std::path::Path;
use std::process::Stdio;

use crate::support::{
    Answer, Database, HttpServer, MongoDatabase, MySqlDatabase, MySqlFlavor, PATIENCE, Server, Topic, free_port,
    variable,
};

/// What such a block would need.
const ELSEWHERE: [&str; 10] = [
    "docker ",
    "kubectl ",
    "systemctl ",
    "journalctl ",
    "rabbitmqctl ",
    "helm ",
    "cargo ",
    "apt-get ",
    "/etc/",
    "/run/secrets",
];

/// `outboxd run` goes on in the background until the end of its block, and must end well then.
const PRELUDE: &str = r#"
set -euo pipefail
running=()
outboxd() {
    if [ "${1:-}" != run ] || [[ " $* " == *" --until-caught-up "* ]]; then
        "$OUTBOXD" "$@"
        return
    fi
    "$OUTBOXD" "$@" >/dev/null &
    running+=($!)
    local tries
    for tries in $(seq 600); do
        if "$OUTBOXD" status --json 2>/dev/null | grep -q '"state": *"streaming"'; then return 0; fi
        kill -0 "${running[-1]}" 2>/dev/null || { wait "${running[-1]}"; return; }
        sleep 0.1
    done
    echo "it does not stream after a minute" >&2
    return 1
}
finish() {
    local process
    for process in "${running[@]}"; do kill -TERM "$process"; wait "$process"; done
}
"#;

struct Block {
    line: usize,
    language: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut open = false;
    for (number, line) in page.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), open) {
            (Some(_), true) => open = false,
            (Some(language), false) => {
                open = true;
                blocks.push(Block { line: number + 1, language: language.trim().to_owned(), text: String::new() });
            }
            (None, true) => {
                if let Some(block) = blocks.last_mut() {
                    block.text += line;
                    block.text += "\n";
                }
            }
            (None, false) => {}
        }
    }
    blocks
}

/// The servers of one page, made when it first names them.
struct Stage {
    postgres: Option<Database>,
    mysql: Option<MySqlDatabase>,
    mariadb: Option<MySqlDatabase>,
    mongodb: Option<MongoDatabase>,
    web: HttpServer,
    topic: Topic,
    admin: String,
    folder: tempfile::TempDir,
    /// Where SQL goes.
    latest: Option<&'static str>,
}

impl Stage {
    async fn new() -> Self {
        Stage {
            postgres: None,
            mysql: None,
            mariadb: None,
            mongodb: None,
            web: HttpServer::start(|_| Answer::Status(200)).await,
            topic: Topic::create(1).await,
            admin: format!("127.0.0.1:{}", free_port()),
            folder: tempfile::tempdir().expect("a folder to work in"),
            latest: None,
        }
    }

    /// The commands with the addresses that they have here.
    async fn adapted(&mut self, text: &str) -> String {
        let mut adapted = text.to_owned();
        if text.contains("postgres://") {
            if self.postgres.is_none() {
                self.postgres = Some(Database::create(Server::Newest).await);
            }
            adapted = replace_url(&adapted, "postgres://", &self.postgres.as_ref().expect("it was made").url());
            self.latest = Some("postgres");
        }
        for (scheme, flavor) in [("mysql://", MySqlFlavor::MySql), ("mariadb://", MySqlFlavor::MariaDb)] {
            if text.contains(scheme) {
                let (database, name) = match flavor {
                    MySqlFlavor::MySql => (&mut self.mysql, "mysql"),
                    MySqlFlavor::MariaDb => (&mut self.mariadb, "mariadb"),
                };
                if database.is_none() {
                    *database = Some(MySqlDatabase::create(flavor).await);
                }
                adapted = replace_url(&adapted, scheme, &database.as_ref().expect("it was made").url());
                self.latest = Some(name);
            }
        }
        if text.contains("mongodb://") {
            if self.mongodb.is_none() {
                self.mongodb = Some(MongoDatabase::create().await);
            }
            adapted = replace_url(&adapted, "mongodb://", &self.mongodb.as_ref().expect("it was made").url());
            self.latest = Some("mongodb");
        }
        adapted = replace_url(&adapted, "amqp://", &variable("OUTBOXD_TEST_RABBITMQ_URL"));
        adapted = replace_url(&adapted, "https://", &self.web.url());
        adapted
            .replace("localhost:9092", &self.topic.brokers)
            .replace("orders.events", &self.topic.name)
            .replace("localhost:7420", &self.admin)
            .replace("127.0.0.1:7420", &self.admin)
    }

    async fn run(&mut self, page: &str, block: &Block) {
        let place = format!("{page}:{}", block.line);
        let commands = self.adapted(&block.text).await;
        let script = format!("{PRELUDE}\n{commands}\nfinish\n");
        let running = tokio::process::Command::new("bash")
            .args(["-c", &script])
            .env("OUTBOXD", env!("CARGO_BIN_EXE_outboxd"))
            .env("OUTBOXD_ADMIN", &self.admin)
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .output();
        let ended = tokio::time::timeout(2 * PATIENCE, running).await;
        let ended = ended.unwrap_or_else(|_| panic!("{place}: does not end")).expect("bash runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            ended.status.success(),
            "{place}: {}\n{commands}\n{}\n{}",
            ended.status,
            text(&ended.stdout),
            text(&ended.stderr)
        );
    }

    async fn run_sql(&self, block: &Block) {
        let statements = block.text.split_terminator(";\n").map(str::trim).filter(|statement| !statement.is_empty());
        for statement in statements {
            match self.latest {
                Some("postgres") => self.postgres.as_ref().expect("it was made").execute(statement).await,
                Some("mysql") => self.mysql.as_ref().expect("it was made").execute(statement).await,
                Some("mariadb") => self.mariadb.as_ref().expect("it was made").execute(statement).await,
                _ => {}
            }
        }
    }
}

/// Every address of this scheme, up to a blank or a quote.
fn replace_url(text: &str, scheme: &str, url: &str) -> String {
    let mut replaced = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(scheme) {
        let (before, address) = rest.split_at(at);
        let end = address.find([' ', '\n', '\'', '"']).unwrap_or(address.len());
        // Outside of quotes an address with a `&` would be two commands.
        let quoted = before.ends_with(['\'', '"']);
        replaced += before;
        replaced += &if quoted { url.to_owned() } else { format!("'{url}'") };
        rest = &address[end..];
    }
    replaced + rest
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_of_the_documentation_works() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let mut pages: Vec<_> = std::fs::read_dir(&docs).expect("there is a folder docs").flatten().collect();
    pages.sort_by_key(std::fs::DirEntry::file_name);
    let mut ran = 0;
    for page in pages.iter().filter(|page| page.path().extension().is_some_and(|extension| extension == "md")) {
        let name = format!("docs/{}", page.file_name().to_string_lossy());
        let text = std::fs::read_to_string(page.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut stage = None;
        for block in blocks(&text) {
            if block.language == "sh" && !ELSEWHERE.iter().any(|word| block.text.contains(word)) {
                if stage.is_none() {
                    stage = Some(Stage::new().await);
                }
                println!("{name}:{}", block.line);
                stage.as_mut().expect("it was made").run(&name, &block).await;
                ran += 1;
            }
            if let (true, Some(stage)) = (block.language == "sql" && !block.text.contains('…'), &stage) {
                stage.run_sql(&block).await;
            }
        }
    }
    assert!(ran >= 10, "only {ran} blocks were run");
}
