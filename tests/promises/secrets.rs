//! Passwords: rotated without a restart, refused for good when wrong, and never shown.

use super::process::{Process, get};
use crate::support::{
    Database, Expected, PATIENCE, Relay, Server, Topic, Writer, eventually, shared_kafka, unique, variable,
};

/// A role of its own, dropped in the end.
struct Role {
    name: String,
}

impl Role {
    async fn create(database: &Database, password: &str) -> Self {
        let name = unique("role");
        database.execute(&format!("CREATE ROLE {name} SUPERUSER LOGIN PASSWORD '{password}'")).await;
        Role { name }
    }

    /// The database's address with this role, and a password or where it is.
    fn url(&self, database: &Database, password: &str) -> String {
        let url = database.url();
        let (_, rest) = url.split_once('@').expect("the address has a user");
        format!("postgres://{}@{rest}?password={password}", self.name)
    }

    async fn drop(self, database: &Database) {
        let name = &self.name;
        database.execute(&format!("REASSIGN OWNED BY {name} TO CURRENT_USER; DROP ROLE {name}")).await;
    }
}

#[tokio::test]
async fn a_rotated_password_is_picked_up_without_a_restart() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let folder = tempfile::tempdir().expect("a folder for the password");
    let file = folder.path().join("password");
    std::fs::write(&file, "first-one\n").expect("the password is written");
    let role = Role::create(&database, "first-one").await;
    let url = role.url(&database, &format!("file:{}", file.display()));
    let mut relay = Relay::spawn(&["run", &url, "--brokers", &shared_kafka(), "--topic", &topic.name]);
    let old_walsender = relay.until_streaming(&database).await;
    let writer = Writer::connect(&database).await;
    writer.commit(&["a"]).await;

    let name = &role.name;
    database.execute(&format!("ALTER ROLE {name} PASSWORD 'second-one'")).await;
    std::fs::write(&file, "second-one\n").expect("the password is written");
    let ended = format!("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{name}'");
    assert!(database.number(&ended).await >= 2, "both connections are ended");
    writer.commit(&["a", "b"]).await;
    let new_walsender = eventually(PATIENCE, "the relay reads again", async || {
        database.walsender().await.filter(|pid| *pid != old_walsender)
    })
    .await;
    assert_ne!(new_walsender, old_walsender);
    Expected::of(&database).await.arrive_in(&mut topic.reader(), PATIENCE).await;
    let (_, _, ready) = eventually(PATIENCE, "the relay is ready again", async || {
        Some(get(&relay.admin().await, "/readyz")).filter(|(code, ..)| *code == 200)
    })
    .await;
    assert_eq!(ready, "ok\n");
    relay.stop().await;
    role.drop(&database).await;
}

#[tokio::test]
async fn a_wrong_password_is_for_a_person_to_mend() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let role = Role::create(&database, "right").await;
    let url = role.url(&database, "wrong-planted");
    let mut relay = Relay::spawn(&["run", &url, "--brokers", &topic.brokers, "--topic", &topic.name]);
    relay.exits_with(3).await;
    let log = relay.log();
    assert!(log.contains(&role.name) && log.contains("password") && !log.contains("wrong-planted"), "{log}");
    role.drop(&database).await;
}

const PLANTED: [&str; 2] = ["planted-in-the-url", "admin-secret"];

/// Ends well, or badly in each way that has a secret at hand; whatever is printed, and whatever the admin address
/// tells, no password is in it.
#[tokio::test]
async fn passwords_are_never_shown() {
    let database = Database::with_outbox(Server::Newest).await;
    let topic = Topic::create(1).await;
    let role = Role::create(&database, PLANTED[0]).await;
    let url = role.url(&database, PLANTED[0]);
    let other_spelling = url.replace('@', &format!(":{}@", PLANTED[0])).replace("?password=planted-in-the-url", "");
    let brokers = variable("OUTBOXD_TEST_KAFKA_SASL_SSL");
    let ca = format!("{}/ca.pem", variable("OUTBOXD_TEST_CERTS"));
    let safely = [
        "security.protocol=SASL_SSL".to_owned(),
        "sasl.mechanism=PLAIN".to_owned(),
        format!("ssl.ca.location={ca}"),
        "debug=security,broker,protocol,conf".to_owned(),
    ];
    let login = |user: &str| vec![format!("sasl.username={user}"), format!("sasl.password={}", PLANTED[1])];
    let jaas = vec![format!(
        "sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
         username=\"admin\" password=\"{}\";",
        PLANTED[1]
    )];
    let with = |source: &str, login: Vec<String>, more: &[&str]| -> Vec<String> {
        let base = ["run", source, "--brokers", &brokers, "--topic", &topic.name, "--admin", "127.0.0.1:0"];
        let kafka = safely.iter().cloned().chain(login).flat_map(|setting| ["--kafka".to_owned(), setting]);
        base.iter().chain(more).map(|word| (*word).to_owned()).chain(kafka).collect()
    };
    let gone = format!("postgres://u:{}@127.0.0.1:{}/db", PLANTED[0], crate::support::free_port());
    let nobody = other_spelling.replace(&role.name, "nobody_of_that_name");
    let caught_up = ["--until-caught-up"];
    let runs = [
        (with(&url, login("admin"), &caught_up), Some(0)),
        (with(&other_spelling, jaas, &caught_up), Some(0)),
        (with(&nobody, login("admin"), &[]), Some(3)),
        (with(&url, login("nobody"), &[]), Some(5)),
        (with(&url, login("admin"), &["--kafka", "acks=0"]), Some(2)),
        (with(&url, login("admin"), &["--kafka", "sasl.password=another"]), Some(2)),
        (with(&format!("{url}&sslmode=perhaps"), login("admin"), &[]), Some(2)),
        (with(&other_spelling.replace("postgres://", "postgres:/"), login("admin"), &[]), Some(2)),
        (with(&gone, login("admin"), &[]), None),
    ];
    for (arguments, code) in &runs {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut process = Process::spawn(&words, &[("RUST_LOG", "trace"), ("OUTBOXD_LOG_FORMAT", "text")]);
        match code {
            Some(code) => process.exits_with(*code).await,
            None => {
                process.until_printed("retry_in_ms").await;
            }
        }
        let output = process.output();
        let address = output.split("address=").nth(1).and_then(|rest| rest.split_whitespace().next());
        let pages = match address.filter(|_| process.is_running()) {
            Some(address) => ["/status", "/metrics", "/readyz"].map(|path| get(address, path).2).concat(),
            None => String::new(),
        };
        for secret in PLANTED {
            let shown = output.lines().chain(pages.lines()).find(|line| line.contains(secret));
            assert!(shown.is_none(), "a password is shown by {words:?}: {shown:?}");
        }
        assert!(output.len() > 20, "{words:?} said nothing");
    }
    role.drop(&database).await;
}
