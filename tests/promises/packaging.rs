//! What is in packaging/ and beside it, as far as it can be tried without Docker and Kubernetes: the configurations relay
//! between real servers, the playground's shop writes what they read, and the image has what the program needs.
//! (`tests/packaging` tries the service file, the manifests and the Debian package.)

use std::path::{Path, PathBuf};
use std::process::Command;

use mongodb::bson::doc;

use super::process::run;
use crate::support::{
    Database, Expected, MongoDatabase, MySqlDatabase, MySqlFlavor, PATIENCE, Relay, Server, Topic, Writer, eventually,
    outboxd, shared_kafka, variable,
};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A configuration with some of its words exchanged, each of which it must have.
fn exchanged(config: &str, words: &[(&str, &str)]) -> String {
    words.iter().fold(config.to_owned(), |config, (theirs, ours)| {
        assert!(config.contains(theirs), "no `{theirs}` in {config}");
        config.replace(theirs, ours)
    })
}

/// Relays a few events with a configuration for TLS, and passwords from files, that was written for other servers.
async fn relays_securely(config: &str, words: &[(&str, &str)]) {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let secrets = tempfile::tempdir().expect("a folder for secrets");
    for (name, secret) in [
        ("orders-db", "postgres"),
        ("postgres-password", "postgres"),
        ("kafka", "outboxd-secret"),
        ("kafka-password", "outboxd-secret"),
        ("admin-token", "a token"),
    ] {
        std::fs::write(secrets.path().join(name), secret).expect("a secret is written");
    }
    let authority = format!("{}/ca.pem", variable("OUTBOXD_TEST_CERTS"));
    for name in ["postgres-ca.pem", "kafka-ca.pem"] {
        std::fs::copy(&authority, secrets.path().join(name)).expect("a certificate is copied");
    }
    let url = database.url();
    let (_, port_and_name) = url.rsplit_once(':').expect("a port");
    // Its certificate is for this name, and `verify-full` looks.
    let place = format!("postgres://postgres@localhost:{port_and_name}");
    let config = exchanged(config, words);
    let config = exchanged(
        &config,
        &[
            ("SOURCE", &place),
            ("BROKERS", &variable("OUTBOXD_TEST_KAFKA_SASL_SSL")),
            ("orders.events", &topic.name),
            ("/etc/outboxd/secrets", &secrets.path().display().to_string()),
            ("AUTHORITY", &authority),
        ],
    );
    let file = secrets.path().join("outboxd.toml");
    std::fs::write(&file, config).expect("the configuration is written");
    let file = file.to_str().expect("a path");
    for command in ["init", "check"] {
        let ended = outboxd(&[command, "--config", file]).await;
        assert_eq!(ended.code, 0, "{command}: {ended:?}");
    }
    let mut relay = Relay::spawn(&["run", "--config", file, "--admin", "127.0.0.1:0"]);
    relay.until_state("streaming").await;
    Writer::connect(&database).await.commit(&["a", "b", "a"]).await;
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    assert!(relay.is_running());
    relay.stop().await;
}

#[tokio::test]
async fn the_configuration_in_the_kubernetes_manifests_relays_with_tls_and_secrets_from_files() {
    let manifest = read("packaging/kubernetes/config.yaml");
    let (_, block) = manifest.split_once("outboxd.toml: |\n").expect("the file in the ConfigMap");
    let config: String = block.lines().map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or(line))).collect();
    relays_securely(
        &format!("{config}# AUTHORITY\n"),
        &[("postgres://outboxd@postgres.default.svc/shop", "SOURCE"), ("kafka.default.svc:9093", "BROKERS")],
    )
    .await;
}

#[tokio::test]
async fn the_example_configuration_of_the_debian_package_relays_with_tls_and_secrets_from_files() {
    let config = read("packaging/outboxd.toml");
    // Those servers' certificates are signed by nobody that the system knows.
    let config = format!("{config}\"ssl.ca.location\" = \"AUTHORITY\"\n");
    relays_securely(
        &config,
        &[
            ("postgres://outboxd@db.example.com/shop", "SOURCE"),
            ("kafka-1.example.com:9093,kafka-2.example.com:9093", "BROKERS"),
            ("/etc/ssl/certs/ca-certificates.crt", "AUTHORITY"),
        ],
    )
    .await;
}

/// The statements of a file, without comments.
fn statements(sql: &str) -> Vec<String> {
    let lines: String = sql.lines().filter(|line| !line.starts_with("--")).map(|line| format!("{line}\n")).collect();
    lines.split(';').map(str::trim).filter(|one| !one.is_empty()).map(str::to_owned).collect()
}

#[tokio::test]
async fn the_playground_relays_what_its_shops_write() {
    let postgres = Database::create(Server::Newest).await;
    let mysql = MySqlDatabase::create(MySqlFlavor::MySql).await;
    let mongodb = MongoDatabase::create().await;
    let topics = [Topic::create(1).await, Topic::create(1).await, Topic::create(1).await];
    let slot = format!("topic = {:?}\nslot = {:?}", topics[0].name, postgres.slot());
    let checkpoint = |name: &str| format!("[pipeline.{name}_{}]", topics[0].name);
    let config = exchanged(
        &read("packaging/playground/outboxd.toml"),
        &[
            ("postgres://postgres:playground@postgres/shop", &postgres.url()),
            ("mysql://root:playground@mysql/shop", &mysql.url()),
            ("mongodb://mongodb/shop?replicaSet=rs0", &mongodb.url()),
            ("kafka:9092", &shared_kafka()),
            ("topic = \"shop.postgres\"", &slot),
            ("shop.mysql", &topics[1].name),
            ("shop.mongodb", &topics[2].name),
            // The shared servers have pipelines of these names already, from other tests' databases.
            ("[pipeline.mysql]", &checkpoint("mysql")),
        ],
    );
    let folder = tempfile::tempdir().expect("a folder for the file");
    let file = folder.path().join("outboxd.toml");
    std::fs::write(&file, config).expect("the configuration is written");
    let file = file.to_str().expect("a path");
    let made = outboxd(&["init", "--config", file]).await;
    assert_eq!(made.code, 0, "{made:?}");
    let relay = Relay::spawn(&["run", "--config", file]);
    let ready = async || (relay.get("/readyz").await == "ok\n").then_some(());
    eventually(PATIENCE, "all are ready", ready).await;

    let shop = read("packaging/playground/postgres.sql");
    let (shop, watch) = shop.split_once("\\watch").expect("psql repeats the last statement");
    assert_eq!(watch.trim(), "0.2");
    for statement in statements(shop) {
        postgres.execute(&statement).await;
    }
    for statement in statements(&read("packaging/playground/mysql.sql")) {
        mysql.execute(&statement).await;
    }
    // There is no mongosh here: as its script does.
    assert!(read("packaging/playground/mongodb.js").contains("shop.outbox.insertOne"));
    let event =
        doc! { "partition_key": "customer-7", "event_type": "OrderPlaced", "payload": { "customer": 7, "total": 1.5 } };
    mongodb.run(doc! { "insert": "outbox", "documents": [event] }).await;
    for topic in &topics {
        let records = topic.reader().take(1).await;
        let (key, value) = (records[0].key.as_deref(), records[0].value.as_deref());
        assert!(key.is_some_and(|key| key.starts_with("customer-")), "{records:?}");
        let value: serde_json::Value = serde_json::from_str(value.expect("a value")).expect("JSON");
        assert!(value["customer"].is_i64() && value["total"].is_number(), "{value}");
        assert_eq!(records[0].header("event_type"), Some("OrderPlaced"));
    }
    relay.stop().await;
}

/// The words of an instruction of the Dockerfile, which is a JSON list.
fn instruction(name: &str) -> Vec<String> {
    let dockerfile = read("Dockerfile");
    let line = dockerfile.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
    let (_, list) = line.split_once('[').unwrap_or_else(|| panic!("no list, so a shell would be needed: {line}"));
    serde_json::from_str(&format!("[{list}")).expect("a list")
}

#[tokio::test]
async fn the_health_check_of_the_image_tells_health_by_its_exit_code() {
    let check = instruction("HEALTHCHECK");
    assert_eq!(check[0], "/usr/bin/outboxd");
    assert_eq!(instruction("ENTRYPOINT"), ["/usr/bin/outboxd"]);
    let arguments: Vec<&str> = check[1..].iter().map(String::as_str).collect();
    // Both know the address from the image's environment, where it is that of every interface.
    let port = crate::support::free_port();
    let admin = format!("0.0.0.0:{port}");
    assert!(read("Dockerfile").contains("OUTBOXD_ADMIN=0.0.0.0:7420"));
    let (code, _, error) = run(&arguments, &[("OUTBOXD_ADMIN", &admin)]).await;
    assert!(code == 1 && error.contains(&admin), "nobody is there: {code} {error}");

    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let relay = Relay::streaming(&database, &topic, &["--admin", &admin]).await;
    let healthy = async || (run(&arguments, &[("OUTBOXD_ADMIN", &admin)]).await.0 == 0).then_some(());
    eventually(PATIENCE, "it is healthy", healthy).await;
    relay.stop().await;
}

/// What gcr.io/distroless/cc-debian12 has.
const LIBRARIES: [&str; 7] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libcrypto.so.3",
    "libgcc_s.so.1",
    "libm.so.6",
    "libssl.so.3",
    "libstdc++.so.6",
];

#[test]
fn the_image_has_the_libraries_that_the_program_needs() {
    assert!(read("Dockerfile").contains("\nFROM gcr.io/distroless/cc-debian12:nonroot\n"));
    let ended =
        Command::new("readelf").args(["--dynamic", env!("CARGO_BIN_EXE_outboxd")]).output().expect("readelf runs");
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    let needed: Vec<&str> =
        said.lines().filter_map(|line| line.split_once("Shared library: [")?.1.strip_suffix(']')).collect();
    assert!(needed.contains(&"libc.so.6"), "{said}");
    for library in needed {
        assert!(LIBRARIES.contains(&library) || library.starts_with("ld-linux"), "the image has no {library}");
    }
}

#[test]
fn the_image_is_built_from_all_that_the_program_is_made_of() {
    let ignored = read(".dockerignore");
    let mut lines = ignored.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    assert_eq!(lines.next(), Some("*"), "all is left out but what follows");
    let kept: Vec<&str> = lines.map(|line| line.strip_prefix('!').expect("something that is kept")).collect();
    let context = tempfile::tempdir().expect("a folder");
    for path in &kept {
        let to = context.path().join(path);
        std::fs::create_dir_all(to.parent().expect("a folder")).expect("a folder is made");
        let copied = Command::new("cp").arg("--recursive").arg(repository(path)).arg(&to).status().expect("cp runs");
        assert!(copied.success(), "{path} is kept and does not exist");
    }
    // Cargo looks for every target that the manifest names.
    let looked = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--locked", "--format-version=1"])
        .current_dir(context.path())
        .output()
        .expect("cargo runs");
    assert!(looked.status.success(), "{}", String::from_utf8_lossy(&looked.stderr));
    // And the compiler for every file that is a part of the program.
    let found = Command::new("grep")
        .args(["--recursive", "--only-matching", "--extended-regexp", r#"include_(str|bytes)!\("[^"]+"\)"#, "src"])
        .current_dir(context.path())
        .output()
        .expect("grep runs");
    let found = String::from_utf8(found.stdout).expect("paths");
    assert!(found.lines().count() > 10, "{found}");
    for line in found.lines() {
        let (source, include) = line.split_once(':').expect("a file and a match");
        let included = include.split('"').nth(1).expect("a path");
        let path = context.path().join(source).parent().expect("a folder").join(included);
        assert!(path.is_file(), "{source} includes {included}, which is left out of the image's build");
    }
}
