//! Connections to real MySQL and MariaDB servers: every `ssl-mode`, every authentication plugin, and what becomes of a
//! relay whose server goes away. The servers' certificate names only `localhost`.

use std::time::Duration;

use outboxd::source::SourceFailure;
use outboxd::source::mysql::conninfo::ConnInfo;
use outboxd::source::mysql::session::Session;

use crate::support::MySqlFlavor::{MariaDb, MySql};
use crate::support::{
    MySqlFlavor, Numbers, PATIENCE, PrivateMySql, Relay, eventually, on_both, until_log, until_reading, variable,
};

fn certificate(name: &str) -> String {
    format!("{}/{name}", variable("OUTBOXD_TEST_CERTS"))
}

fn port(flavor: MySqlFlavor) -> u16 {
    let url = flavor.url();
    url.trim_end_matches('/').rsplit_once(':').expect("a port").1.parse().expect("a number")
}

/// A user with a password, `secret`, of the plugin that this server's users have.
fn user(flavor: MySqlFlavor) -> &'static str {
    match flavor {
        MySql => "plain_sha2",
        MariaDb => "plain_native",
    }
}

async fn open_at(flavor: MySqlFlavor, host: &str, login: &str, parameters: &str) -> Result<Session, SourceFailure> {
    let url = format!("mysql://{login}@{host}:{}/?{parameters}", port(flavor));
    let info = ConnInfo::parse(&url).unwrap_or_else(|error| panic!("{url}: {error}"));
    Session::connect(&info).await
}

/// Whether it is encrypted, as both sides see it.
async fn encrypted(flavor: MySqlFlavor, host: &str, parameters: &str) -> bool {
    let login = format!("{}:secret", user(flavor));
    let opened = open_at(flavor, host, &login, parameters).await;
    let mut session = opened.unwrap_or_else(|failure| panic!("{flavor:?} {parameters}: {failure}"));
    let seen = session.query_one("SHOW SESSION STATUS LIKE 'Ssl_cipher'").await.expect("a cipher");
    assert_eq!(session.is_encrypted(), !seen.string(1).is_empty());
    session.is_encrypted()
}

/// A failure that a person must mend, whose text has the words.
async fn refused(flavor: MySqlFlavor, host: &str, login: &str, parameters: &str, words: &str) {
    match open_at(flavor, host, login, parameters).await {
        Err(SourceFailure::NotReady { what, remedy }) => {
            assert!(what.contains(words) || remedy.contains(words), "{words}: {what}: {remedy}");
            assert!(!remedy.is_empty() && !what.contains("secret") && !what.contains("hunter2"), "{what}: {remedy}");
        }
        Err(failure) => panic!("{parameters}: {failure:?}"),
        Ok(_) => panic!("{parameters}: a connection was opened"),
    }
}

#[tokio::test]
async fn disabled_never_encrypts_and_the_other_modes_always_do_where_they_can() {
    on_both(async |flavor| {
        for (mode, expected) in [("disabled", false), ("preferred", true), ("required", true)] {
            for ca in [String::new(), format!("&ssl-ca={}", certificate("wrong-ca.pem"))] {
                let parameters = format!("ssl-mode={mode}{ca}");
                // As in MySQL's own clients, the authority counts from verify-ca on.
                assert_eq!(encrypted(flavor, "127.0.0.1", &parameters).await, expected, "{parameters}");
            }
        }
        assert!(encrypted(flavor, "127.0.0.1", "").await, "preferred is the default");
    })
    .await;
}

#[tokio::test]
async fn required_is_refused_by_a_server_without_tls() {
    let server = PrivateMySql::start(MariaDb, &["--skip-ssl"]).await;
    let at = |parameters: &str| ConnInfo::parse(&format!("{}?{parameters}", server.url())).expect("an address");
    for mode in ["required", "verify-ca", "verify-identity"] {
        let parameters = format!("ssl-mode={mode}&ssl-ca={}", certificate("ca.pem"));
        match Session::connect(&at(&parameters)).await {
            Err(SourceFailure::NotReady { what, .. }) => assert!(what.contains("does not support TLS"), "{what}"),
            other => panic!("{mode}: {:?}", other.err()),
        }
    }
    let session = Session::connect(&at("ssl-mode=preferred")).await.expect("a connection without TLS");
    assert!(!session.is_encrypted());
}

#[tokio::test]
async fn verify_ca_checks_the_chain_and_not_the_name() {
    on_both(async |flavor| {
        let login = format!("{}:secret", user(flavor));
        let right = format!("ssl-mode=verify-ca&ssl-ca={}", certificate("ca.pem"));
        for host in ["127.0.0.1", "localhost"] {
            assert!(encrypted(flavor, host, &right).await);
        }
        let wrong = format!("ssl-mode=verify-ca&ssl-ca={}", certificate("wrong-ca.pem"));
        refused(flavor, "127.0.0.1", &login, &wrong, "ssl-ca").await;
        refused(flavor, "127.0.0.1", &login, "ssl-mode=verify-ca&ssl-ca=/nonexistent.pem", "/nonexistent.pem").await;
    })
    .await;
}

#[tokio::test]
async fn verify_ca_without_an_authority_is_refused() {
    let url = "mysql://u@127.0.0.1/db?ssl-mode=verify-ca";
    assert!(ConnInfo::parse(url).is_err(), "nothing to verify by");
}

#[tokio::test]
async fn verify_identity_checks_the_chain_and_the_name() {
    on_both(async |flavor| {
        let login = format!("{}:secret", user(flavor));
        let right = format!("ssl-mode=verify-identity&ssl-ca={}", certificate("ca.pem"));
        assert!(encrypted(flavor, "localhost", &right).await);
        let wrong = format!("ssl-mode=verify-identity&ssl-ca={}", certificate("wrong-ca.pem"));
        refused(flavor, "localhost", &login, &wrong, "ssl-ca").await;
        refused(flavor, "localhost", &login, "ssl-mode=verify-identity", "ssl-ca").await;
    })
    .await;
}

#[tokio::test]
async fn verify_identity_refuses_a_certificate_for_another_name() {
    let (chain, key) = (certificate("localhost.pem"), certificate("localhost.key"));
    let options = [format!("--ssl-cert={chain}"), format!("--ssl-key={key}")];
    let server = PrivateMySql::start(MariaDb, &options.each_ref().map(String::as_str)).await;
    let at = |host: &str, mode: &str| {
        let ca = certificate("ca.pem");
        let url = format!("mysql://root:mysql@{host}:{}/?ssl-mode={mode}&ssl-ca={ca}", server.port());
        ConnInfo::parse(&url).expect("an address")
    };
    Session::connect(&at("localhost", "verify-identity")).await.expect("the name in the certificate").close().await;
    Session::connect(&at("127.0.0.1", "verify-ca")).await.expect("any name").close().await;
    match Session::connect(&at("127.0.0.1", "verify-identity")).await {
        Err(SourceFailure::NotReady { what, remedy }) => {
            assert!(what.contains("not valid for name") && remedy.contains("names"), "{what}: {remedy}");
        }
        other => panic!("{:?}", other.err()),
    }
}

#[tokio::test]
async fn a_client_certificate_opens_the_door_that_asks_for_one() {
    on_both(async |flavor| {
        let own = format!("ssl-cert={}&ssl-key={}", certificate("auth_cert.pem"), certificate("auth_cert.key"));
        let opened = open_at(flavor, "127.0.0.1", "cert_only", &format!("ssl-mode=required&{own}")).await;
        assert!(opened.unwrap_or_else(|failure| panic!("{failure}")).is_encrypted());
        refused(flavor, "127.0.0.1", "cert_only", "ssl-mode=required", "user and password").await;
        let missing = "ssl-mode=required&ssl-cert=/nonexistent.pem&ssl-key=/nonexistent.key";
        refused(flavor, "127.0.0.1", "cert_only", missing, "/nonexistent.pem").await;
    })
    .await;
}

#[tokio::test]
async fn a_password_is_proved_with_a_cold_cache_and_a_warm_one_with_tls_and_without() {
    // A server of its own: its cache is emptied under nobody else.
    let server = PrivateMySql::start(MySql, &[]).await;
    let mut root = crate::support::mysql_session(&server.url()).await;
    let at = |parameters: &str| {
        let url = format!("mysql://plain_sha2:secret@127.0.0.1:{}/?{parameters}", server.port());
        ConnInfo::parse(&url).expect("an address")
    };
    for mode in ["disabled", "required"] {
        root.execute("FLUSH PRIVILEGES").await.expect("a cold cache");
        for cache in ["cold", "warm"] {
            let opened = Session::connect(&at(&format!("ssl-mode={mode}"))).await;
            opened.unwrap_or_else(|failure| panic!("{mode}, {cache}: {failure}")).close().await;
        }
    }
    root.execute("FLUSH PRIVILEGES").await.expect("a cold cache");
    let keyless = at("ssl-mode=disabled&get-server-public-key=false");
    match Session::connect(&keyless).await {
        Err(SourceFailure::NotReady { what, remedy }) => {
            assert!(what.contains("no TLS") && remedy.contains("get-server-public-key=true"), "{what}: {remedy}");
        }
        other => panic!("{:?}", other.err()),
    }
    // The warm cache needs no key.
    Session::connect(&at("ssl-mode=required")).await.expect("a warm cache").close().await;
    Session::connect(&keyless).await.expect("the fast path").close().await;
}

#[tokio::test]
async fn a_wrong_password_ends_with_exit_3_and_is_shown_nowhere() {
    on_both(async |flavor| {
        let numbers = Numbers::on(flavor).await;
        for mode in ["disabled", "preferred"] {
            let url = numbers.database.url().replace("root:mysql", &format!("{}:hunter2", user(flavor)));
            let mut relay = Relay::start_at(&format!("{url}?ssl-mode={mode}"), &numbers.topic, &[]);
            relay.exits_with(3).await;
            let log = relay.log();
            assert!(log.contains("Access denied") && log.contains("check user and password"), "{log}");
            assert!(!log.contains("hunter2"), "{log}");
        }
    })
    .await;
}

#[tokio::test]
async fn an_unreachable_server_is_tried_again_and_another_host_is_taken() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let dead = Relay::start_at("mysql://u:p@127.0.0.1:1/db", &numbers.topic, &[]);
        let url = numbers.database.url().replace("@127.0.0.1", "@127.0.0.1:1,127.0.0.1");
        let mut relay = Relay::start_at(&url, &numbers.topic, &[]);
        until_reading(&mut relay).await;
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        relay.stop().await;
        let mut dead = dead;
        until_log(&mut dead, "retry_in_ms=500").await;
        assert!(dead.is_running() && dead.log().contains("127.0.0.1:1"), "{}", dead.log());
        dead.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_rotated_password_file_is_read_at_the_next_connect() {
    on_both(async |flavor| {
        let mut numbers = Numbers::on(flavor).await;
        let name = numbers.database.name().replace("promise_", "r");
        let user: String = name.chars().take(30).collect();
        let create = |password: &str| format!("ALTER USER '{user}'@'%' IDENTIFIED BY '{password}'");
        numbers.database.execute(&format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'before'")).await;
        numbers.database.execute(&format!("GRANT ALL ON *.* TO '{user}'@'%'")).await;
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "before\n").expect("a secret");
        let url = numbers.database.url().replace("root:mysql", &user);
        let url = format!("{url}?password=file:{}", file.path().display());
        let mut relay = Relay::start_at(&url, &numbers.topic, &[]);
        until_reading(&mut relay).await;
        numbers.database.execute(&create("after")).await;
        std::fs::write(file.path(), "after\n").expect("a secret");
        let connections = format!("SELECT id FROM information_schema.processlist WHERE user = '{user}'");
        for row in numbers.database.rows(&connections).await {
            let _ = numbers.database.connect().await.execute(&format!("KILL {}", row.string(0))).await;
        }
        eventually(PATIENCE, "it reads again", async || {
            (relay.log().matches("reading the log").count() >= 2).then_some(())
        })
        .await;
        numbers.add(1).await;
        numbers.arrive(&[1]).await;
        assert!(!relay.log().contains("after"), "{}", relay.log());
        relay.stop().await;
        numbers.database.execute(&format!("DROP USER '{user}'@'%'")).await;
    })
    .await;
}

#[tokio::test]
async fn a_server_that_was_restarted_is_read_on_and_nothing_is_lost() {
    on_both(async |flavor| {
        let mut server = PrivateMySql::start(flavor, &["--sync-binlog=1", "--innodb-flush-log-at-trx-commit=1"]).await;
        let mut numbers = Numbers::at(&server.url()).await;
        let relay = numbers.reading(&["--checkpoint-interval", "50ms"]).await;
        for (round, crash) in [(0, false), (10, true)] {
            for number in round..round + 5 {
                numbers.add(number).await;
            }
            match crash {
                true => server.crash().await,
                false => server.stop().await,
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
            server.resume().await;
            numbers.database.reconnect().await;
            for number in round + 5..round + 10 {
                numbers.add(number).await;
            }
            let (now, before): (Vec<u32>, Vec<u32>) = ((round..round + 10).collect(), (0..round).collect());
            numbers.arrive_at_least_once(&now, &before).await;
        }
        relay.stop().await;
    })
    .await;
}
