//! Connections to a real MongoDB: logins, TLS, and what becomes of a wrong one.

use crate::support::{Documents, Relay, check, mongodb_url, shared_kafka, until_log, variable};

fn certificate(name: &str) -> String {
    format!("{}/{name}", variable("OUTBOXD_TEST_CERTS"))
}

async fn relays(documents: &mut Documents, url: &str, number: u32) {
    let mut relay = Relay::start_at(url, &documents.topic, &[]);
    until_log(&mut relay, "reading the change stream").await;
    documents.add(number).await;
    documents.reader.arrive(&[number]).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_password_is_proved_by_either_mechanism() {
    let mut documents = Documents::create().await;
    for (number, mechanism) in ["SCRAM-SHA-1", "SCRAM-SHA-256"].into_iter().enumerate() {
        let url = format!("{}&authMechanism={mechanism}", documents.database.url());
        relays(&mut documents, &url, number as u32).await;
    }
}

#[tokio::test]
async fn a_wrong_password_ends_with_exit_3_and_is_shown_nowhere() {
    let documents = Documents::create().await;
    let url = documents.database.url().replace("root:mongodb@", "root:hunter2@");
    let mut relay = Relay::start_at(&url, &documents.topic, &[]);
    relay.exits_with(3).await;
    let log = relay.log();
    assert!(log.contains("Authentication failed") && log.contains("user, password and authSource"), "{log}");
    assert!(!log.contains("hunter2"), "{log}");
    let brokers = shared_kafka();
    let checked = check(&[&url, "--brokers", &brokers, "--topic", &documents.topic.name]).await;
    checked.fails("connection", "Authentication failed");
    assert!(checked.code == 3 && !format!("{checked:?}").contains("hunter2"), "{checked:?}");
}

#[tokio::test]
async fn tls_with_an_authority_and_a_client_certificate_logs_in() {
    let mut documents = Documents::create().await;
    let ca = certificate("ca.pem");
    let with_password = format!("{}&tls=true&tlsCAFile={ca}", documents.database.url());
    relays(&mut documents, &with_password, 1).await;

    let own = certificate("auth_cert-and-key.pem");
    let (_, rest) =
        mongodb_url().split_once('@').map(|(user, rest)| (user.to_owned(), rest.to_owned())).expect("a login");
    let nobody = format!("mongodb://{}", rest.replace("&authSource=admin", ""));
    let x509 = format!("{nobody}&authMechanism=MONGODB-X509&tls=true&tlsCAFile={ca}&tlsCertificateKeyFile={own}");
    let url = documents.database.of(&x509);
    relays(&mut documents, &url, 2).await;
    // Without the certificate it is nobody.
    let without = documents.database.of(&format!("{nobody}&tls=true&tlsCAFile={ca}"));
    let mut relay = Relay::start_at(&without, &documents.topic, &[]);
    relay.exits_with(3).await;
}

#[tokio::test]
async fn a_server_of_an_unknown_authority_is_refused() {
    let documents = Documents::create().await;
    let wrong = certificate("wrong-ca.pem");
    let url = format!("{}&tls=true&tlsCAFile={wrong}&serverSelectionTimeoutMS=3000", documents.database.url());
    let brokers = shared_kafka();
    let checked = check(&[&url, "--brokers", &brokers, "--topic", &documents.topic.name]).await;
    checked.fails("connection", "certificate");
    assert_eq!(checked.code, 3);
    let missing = format!("{}&tls=true&tlsCAFile=/nonexistent.pem", documents.database.url());
    let mut relay = Relay::start_at(&missing, &documents.topic, &[]);
    let status = relay.exit(crate::support::PATIENCE).await;
    assert!(matches!(status.code(), Some(2 | 3)) && relay.log().contains("/nonexistent.pem"), "{}", relay.log());
}
