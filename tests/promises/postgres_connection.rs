//! Connections to real PostgreSQL servers: every `sslmode`, every authentication method, through both kinds of
//! connections. The servers are those of `tests/services`; their certificate names only `localhost`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use outboxd::source::SourceFailure;
use outboxd::source::postgres::conninfo::ConnInfo;
use outboxd::source::postgres::server_error::{WireError, is_slot_missing};
use outboxd::source::postgres::sql::{self, SqlSession};
use outboxd::source::postgres::walsender::{CopyBoth, WalsenderConnection};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const NEWEST: &str = "OUTBOXD_TEST_POSTGRES_URL";
const OLDEST: &str = "OUTBOXD_TEST_POSTGRES_OLD_URL";

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; eval \"$(tests/services env)\" first"))
}

fn port(server: &str) -> u16 {
    let url = variable(server);
    let (_, after) = url.rsplit_once('@').expect("the address has credentials");
    let (host, _) = after.split_once('/').expect("the address has a database");
    host.rsplit_once(':').map_or(5432, |(_, port)| port.parse().expect("the address has a port"))
}

fn certificate(name: &str) -> String {
    format!("{}/{name}", variable("OUTBOXD_TEST_CERTS"))
}

/// An address on the server, untouched by the environment of whoever runs the tests.
fn at(server: &str, login: &str, parameters: &str) -> ConnInfo {
    at_host(server, login, "127.0.0.1", parameters)
}

fn at_host(server: &str, login: &str, host: &str, parameters: &str) -> ConnInfo {
    parse(&format!("postgres://{login}@{host}:{}/postgres?{parameters}", port(server)))
}

fn parse(url: &str) -> ConnInfo {
    ConnInfo::parse_with(url, &|_| None).unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// Opens both kinds of connections, and uses them.
async fn open(info: &ConnInfo) -> (WalsenderConnection, SqlSession) {
    let mut walsender = WalsenderConnection::connect(info).await.unwrap_or_else(|error| panic!("replication: {error}"));
    walsender.identify_system().await.expect("a replication connection identifies the system");
    let session = sql::connect(info).await.unwrap_or_else(|error| panic!("sql: {error}"));
    session.client().simple_query("SELECT 1").await.expect("an ordinary connection runs SQL");
    assert_eq!(walsender.is_encrypted(), session.is_encrypted());
    assert_eq!(walsender.server_version(), session.server_version());
    (walsender, session)
}

async fn is_encrypted(info: &ConnInfo) -> bool {
    let (_, session) = open(info).await;
    let row = session.client().query_one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await;
    let seen_by_server: bool = row.expect("pg_stat_ssl can be read").get(0);
    assert_eq!(session.is_encrypted(), seen_by_server);
    seen_by_server
}

/// Both kinds of connections fail; the two failures.
async fn failures(info: &ConnInfo) -> [SourceFailure; 2] {
    let replication = WalsenderConnection::connect(info).await.err().expect("a replication connection was opened");
    let ordinary = sql::connect(info).await.err().expect("an ordinary connection was opened");
    [replication, ordinary]
}

async fn assert_not_ready(info: &ConnInfo, words: &str) {
    for failure in failures(info).await {
        match &failure {
            SourceFailure::NotReady { what, remedy } => {
                assert!(what.contains(words) || remedy.contains(words), "{words}: {failure:?}");
            }
            _ => panic!("{failure:?}"),
        }
    }
}

async fn assert_transient(info: &ConnInfo, words: &str) {
    for failure in failures(info).await {
        assert!(matches!(&failure, SourceFailure::Transient { what } if what.contains(words)), "{failure:?}");
    }
}

fn unique(name: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{name}_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

#[tokio::test]
async fn every_authentication_method_opens_both_connections() {
    for server in [NEWEST, OLDEST] {
        for role in ["auth_trust", "auth_cleartext", "auth_md5", "auth_scram"] {
            for (mode, encrypted) in [("disable", false), ("require", true)] {
                let info = at(server, &format!("{role}:secret"), &format!("sslmode={mode}"));
                assert_eq!(is_encrypted(&info).await, encrypted, "{role} {mode}");
            }
        }
    }
}

#[tokio::test]
async fn a_client_certificate_opens_both_connections() {
    let parameters =
        format!("sslmode=require&sslcert={}&sslkey={}", certificate("auth_cert.pem"), certificate("auth_cert.key"));
    for server in [NEWEST, OLDEST] {
        assert!(is_encrypted(&at(server, "auth_cert", &parameters)).await);
        assert_not_ready(&at(server, "auth_cert", "sslmode=require"), "certificate").await;
    }
}

#[tokio::test]
async fn a_client_certificate_that_cannot_be_read_is_named() {
    let parameters = "sslmode=require&sslcert=/nonexistent.pem&sslkey=/nonexistent.key";
    assert_not_ready(&at(NEWEST, "auth_cert", parameters), "/nonexistent.pem").await;
}

#[tokio::test]
async fn a_wrong_password_is_permanent_and_never_shown() {
    for server in [NEWEST, OLDEST] {
        for role in ["auth_cleartext", "auth_md5", "auth_scram"] {
            for mode in ["disable", "prefer", "require"] {
                let info = at(server, &format!("{role}:hunter2"), &format!("sslmode={mode}"));
                assert_not_ready(&info, "password").await;
                for failure in failures(&info).await {
                    assert!(!format!("{failure:?}").contains("hunter2"), "{failure:?}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_missing_password_says_where_to_put_it() {
    for role in ["auth_cleartext", "auth_md5", "auth_scram"] {
        assert_not_ready(&at(NEWEST, role, ""), "PGPASSWORD").await;
    }
}

#[tokio::test]
async fn a_rotated_password_file_is_read_at_the_next_connect() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let info = at(NEWEST, &format!("auth_scram:file:{}", file.path().display()), "");
    std::fs::write(file.path(), "before\n").unwrap();
    assert_not_ready(&info, "password").await;
    std::fs::write(file.path(), "secret\n").unwrap();
    open(&info).await;
}

#[tokio::test]
async fn disable_never_encrypts_and_prefer_does_where_it_can() {
    for server in [NEWEST, OLDEST] {
        for (mode, encrypted) in [("disable", false), ("allow", false), ("prefer", true), ("require", true)] {
            let info = at(server, "auth_scram:secret", &format!("sslmode={mode}"));
            assert_eq!(is_encrypted(&info).await, encrypted, "{mode}");
        }
    }
}

#[tokio::test]
async fn allow_encrypts_when_the_server_insists() {
    assert!(is_encrypted(&at(NEWEST, "tls_only:secret", "sslmode=allow")).await);
}

#[tokio::test]
async fn disable_is_refused_by_a_server_that_insists_on_tls() {
    assert_not_ready(&at(NEWEST, "tls_only:secret", "sslmode=disable"), "pg_hba.conf").await;
}

#[tokio::test]
async fn prefer_goes_on_in_plain_when_the_handshake_fails() {
    let parameters = format!("sslmode=prefer&sslrootcert={}", certificate("wrong-ca.pem"));
    assert!(!is_encrypted(&at(NEWEST, "auth_scram:secret", &parameters)).await);
    assert_not_ready(&at(NEWEST, "tls_only:secret", &parameters), "sslrootcert").await;
}

#[tokio::test]
async fn require_takes_any_certificate() {
    assert!(is_encrypted(&at(NEWEST, "tls_only:secret", "sslmode=require")).await);
    let missing = "sslmode=require&sslrootcert=/nonexistent.pem";
    assert!(is_encrypted(&at(NEWEST, "tls_only:secret", missing)).await);
}

#[tokio::test]
async fn require_with_a_root_certificate_checks_the_chain() {
    let right = format!("sslmode=require&sslrootcert={}", certificate("ca.pem"));
    assert!(is_encrypted(&at(NEWEST, "tls_only:secret", &right)).await);
    let wrong = format!("sslmode=require&sslrootcert={}", certificate("wrong-ca.pem"));
    assert_not_ready(&at(NEWEST, "tls_only:secret", &wrong), "sslrootcert").await;
}

#[tokio::test]
async fn verify_ca_checks_the_chain_and_not_the_name() {
    for server in [NEWEST, OLDEST] {
        let right = format!("sslmode=verify-ca&sslrootcert={}", certificate("ca.pem"));
        assert!(is_encrypted(&at_host(server, "auth_scram:secret", "localhost", &right)).await);
        let wrong = format!("sslmode=verify-ca&sslrootcert={}", certificate("wrong-ca.pem"));
        assert_not_ready(&at(server, "auth_scram:secret", &wrong), "sslrootcert").await;
    }
    let other_name = format!("sslmode=verify-ca&sslrootcert={}", certificate("ca.pem"));
    assert!(is_encrypted(&at(NEWEST, "auth_scram:secret", &other_name)).await);
}

#[tokio::test]
async fn verify_ca_needs_a_root_certificate() {
    for parameters in ["sslmode=verify-ca", "sslmode=verify-ca&sslrootcert=/nonexistent.pem"] {
        assert_not_ready(&at(NEWEST, "auth_scram:secret", parameters), "root certificates").await;
    }
}

#[tokio::test]
async fn verify_full_accepts_the_certificate_of_the_name() {
    let parameters = format!("sslmode=verify-full&sslrootcert={}", certificate("ca.pem"));
    for server in [NEWEST, OLDEST] {
        assert!(is_encrypted(&at_host(server, "auth_scram:secret", "localhost", &parameters)).await);
    }
}

#[tokio::test]
async fn verify_full_refuses_a_certificate_for_another_name() {
    let parameters = format!("sslmode=verify-full&sslrootcert={}", certificate("ca.pem"));
    assert_not_ready(&at(NEWEST, "auth_scram:secret", &parameters), "subjectAltName").await;
}

#[tokio::test]
async fn verify_full_refuses_a_certificate_of_another_authority() {
    let wrong = format!("sslmode=verify-full&sslrootcert={}", certificate("wrong-ca.pem"));
    for parameters in [wrong.as_str(), "sslmode=verify-full&sslrootcert=system"] {
        assert_not_ready(&at_host(NEWEST, "auth_scram:secret", "localhost", parameters), "sslrootcert").await;
    }
}

#[tokio::test]
async fn hostaddr_is_where_to_connect_and_host_what_the_certificate_must_say() {
    let parameters = format!("sslmode=verify-full&hostaddr=127.0.0.1&sslrootcert={}", certificate("ca.pem"));
    assert!(is_encrypted(&at_host(NEWEST, "auth_scram:secret", "localhost", &parameters)).await);
    assert_not_ready(&at_host(NEWEST, "auth_scram:secret", "db.example", &parameters), "subjectAltName").await;
}

#[tokio::test]
async fn either_version_of_tls_will_do() {
    for version in ["TLSv1.2", "TLSv1.3"] {
        let parameters = format!(
            "sslmode=require&channel_binding=require&ssl_min_protocol_version={version}&ssl_max_protocol_version={version}"
        );
        let (_, session) = open(&at(NEWEST, "auth_scram:secret", &parameters)).await;
        let row = session.client().query_one("SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await;
        assert_eq!(row.unwrap().get::<_, &str>(0), version);
    }
}

#[tokio::test]
async fn tls_can_begin_without_being_asked_for() {
    assert!(is_encrypted(&at(NEWEST, "auth_scram:secret", "sslmode=require&sslnegotiation=direct")).await);
    assert_transient(&at(OLDEST, "auth_scram:secret", "sslmode=require&sslnegotiation=direct"), "17 or newer").await;
}

#[tokio::test]
async fn channel_binding_is_used_when_required() {
    for server in [NEWEST, OLDEST] {
        for mode in ["prefer", "require"] {
            let info = at(server, "auth_scram:secret", &format!("sslmode={mode}&channel_binding=require"));
            assert!(is_encrypted(&info).await);
        }
        open(&at(server, "auth_scram:secret", "sslmode=require&channel_binding=disable")).await;
    }
}

#[tokio::test]
async fn channel_binding_is_not_done_without_when_required() {
    for (role, mode) in [
        ("auth_scram", "disable"),
        ("auth_md5", "require"),
        ("auth_cleartext", "require"),
        ("auth_trust", "require"),
        ("auth_trust", "prefer"),
    ] {
        let info = at(NEWEST, &format!("{role}:secret"), &format!("sslmode={mode}&channel_binding=require"));
        assert_not_ready(&info, "channel binding").await;
    }
}

/// Someone in between, who shows a certificate of their own and passes everything on: their port.
async fn someone_in_between(name: &str) -> u16 {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = vec![CertificateDer::from_pem_file(certificate(&format!("{name}.pem"))).expect("a certificate")];
    let key = PrivateKeyDer::from_pem_file(certificate(&format!("{name}.key"))).expect("a key");
    let shown = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .expect("a certificate that fits its key");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certificate("ca.pem")).expect("a certificate")).expect("a root");
    let onwards = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let (acceptor, connector) = (TlsAcceptor::from(Arc::new(shown)), TlsConnector::from(Arc::new(onwards)));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let here = listener.local_addr().expect("the listener has an address").port();
    let server = port(NEWEST);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let (acceptor, connector) = (acceptor.clone(), connector.clone());
            tokio::spawn(async move {
                let mut request = [0; 8];
                client.read_exact(&mut request).await?;
                client.write_all(b"S").await?;
                let mut client = acceptor.accept(client).await?;
                let mut upstream = TcpStream::connect(("127.0.0.1", server)).await?;
                upstream.write_all(&request).await?;
                upstream.read_u8().await?;
                let name = ServerName::try_from("localhost").map_err(std::io::Error::other)?;
                let mut upstream = connector.connect(name, upstream).await?;
                tokio::io::copy_bidirectional(&mut client, &mut upstream).await
            });
        }
    });
    here
}

#[tokio::test]
async fn channel_binding_finds_out_someone_in_between() {
    let port = someone_in_between("server").await;
    let info = |parameters: &str| {
        parse(&format!("postgres://auth_scram:secret@127.0.0.1:{port}/postgres?sslmode=require&{parameters}"))
    };
    open(&info("channel_binding=disable")).await;
    for binding in ["prefer", "require"] {
        assert_not_ready(&info(&format!("channel_binding={binding}")), "reads along").await;
    }
}

#[tokio::test]
async fn a_self_signed_certificate_is_its_own_root() {
    let port = someone_in_between("wrong-ca").await;
    let info = |mode: &str, root: &str| {
        let root = certificate(root);
        parse(&format!(
            "postgres://auth_scram:secret@localhost:{port}/postgres?channel_binding=disable&sslmode={mode}&sslrootcert={root}"
        ))
    };
    open(&info("verify-ca", "wrong-ca.pem")).await;
    assert_not_ready(&info("verify-full", "wrong-ca.pem"), "subjectAltName").await;
    assert_not_ready(&info("verify-ca", "ca.pem"), "sslrootcert").await;
}

/// A server that answers every request for TLS in the same way, and then whatever comes with silence.
async fn answering(answer: &'static [u8]) -> ConnInfo {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("the listener has an address").port();
    tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 8];
            if stream.read_exact(&mut request).await.is_ok() {
                stream.write_all(answer).await.ok();
            }
            kept.push(stream);
        }
    });
    parse(&format!("postgres://u:secret@127.0.0.1:{port}/db?connect_timeout=1&sslmode=require"))
}

#[tokio::test]
async fn a_server_without_tls_is_refused_where_tls_is_required() {
    assert_not_ready(&answering(b"N").await, "does not support TLS").await;
}

#[tokio::test]
async fn bytes_stuffed_in_before_the_handshake_never_reach_the_protocol() {
    // AuthenticationOk and ReadyForQuery, as an attacker would have them read once the connection is encrypted.
    assert_not_ready(&answering(b"SR\0\0\0\x08\0\0\0\0Z\0\0\0\x05I").await, "TLS").await;
}

#[tokio::test]
async fn what_is_not_postgresql_is_called_so() {
    assert_not_ready(&answering(b"HTTP/1.1 400 Bad Request\r\n").await, "directly").await;
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up() {
    let begin = Instant::now();
    assert_transient(&answering(b"").await, "no answer within 1 s").await;
    assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn a_host_that_cannot_be_reached_is_passing_trouble() {
    assert_transient(&parse("postgres://u@127.0.0.1:1/db"), "refused").await;
    assert_transient(&parse("postgres://u@host.invalid/db?connect_timeout=5"), "host.invalid").await;
    assert_transient(&parse("postgres://u@/db?host=/nonexistent"), "/nonexistent").await;
}

#[tokio::test]
async fn the_next_host_is_tried_when_one_is_down() {
    let info = parse(&format!("postgres://auth_scram:secret@127.0.0.1:1,127.0.0.1:{}/postgres", port(NEWEST)));
    let (walsender, session) = open(&info).await;
    assert_eq!(walsender.host(), session.host());
    assert_eq!(walsender.host().to_string(), format!("127.0.0.1:{}", port(NEWEST)));
    open(&info.pinned_to(walsender.host())).await;
}

#[tokio::test]
async fn the_next_host_is_not_tried_when_the_login_is_refused() {
    let hosts = format!("127.0.0.1:{},127.0.0.1:1", port(NEWEST));
    assert_not_ready(&parse(&format!("postgres://auth_scram:wrong@{hosts}/postgres")), "28P01").await;
}

#[tokio::test]
async fn the_kind_of_server_asked_for_is_found_or_waited_for() {
    for server in [NEWEST, OLDEST] {
        for wanted in ["any", "read-write", "primary", "prefer-standby"] {
            open(&at(server, "auth_scram:secret", &format!("target_session_attrs={wanted}"))).await;
        }
        assert_transient(&at(server, "auth_scram:secret", "target_session_attrs=standby"), "is not a standby").await;
        assert_transient(&at(server, "auth_scram:secret", "target_session_attrs=read-only"), "not read-only").await;
    }
}

#[tokio::test]
async fn a_server_that_is_read_only_by_default_is_known_as_such() {
    let role = unique("read_only");
    let admin = sql::connect(&parse(&variable(NEWEST))).await.unwrap();
    admin
        .client()
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret';
             ALTER ROLE {role} SET default_transaction_read_only = on"
        ))
        .await
        .unwrap();
    let login = format!("{role}:secret");
    open(&at(NEWEST, &login, "target_session_attrs=read-only")).await;
    assert_transient(&at(NEWEST, &login, "target_session_attrs=read-write"), "is read-only").await;
    admin.client().batch_execute(&format!("DROP ROLE {role}")).await.unwrap();
}

#[tokio::test]
async fn a_unix_socket_opens_both_connections_whatever_the_sslmode() {
    let (folder, port) = (variable("OUTBOXD_TEST_POSTGRES_SOCKET"), port(NEWEST));
    for mode in ["disable", "prefer", "verify-full"] {
        let url = format!("postgres://auth_scram:secret@/postgres?host={folder}&port={port}&sslmode={mode}");
        assert!(!is_encrypted(&parse(&url)).await);
    }
}

#[tokio::test]
async fn an_unknown_database_is_permanent() {
    let info = at(NEWEST, "auth_scram:secret", "").with_database("no_such_database");
    assert_not_ready(&info, "no_such_database").await;
}

#[tokio::test]
async fn a_role_without_replication_is_told_how_to_get_it() {
    for server in [NEWEST, OLDEST] {
        let role = unique("plain");
        let admin = sql::connect(&parse(&variable(server))).await.unwrap();
        admin.client().batch_execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'")).await.unwrap();
        let info = at(server, &format!("{role}:secret"), "");
        sql::connect(&info).await.unwrap();
        let failure = WalsenderConnection::connect(&info).await.err().expect("replication without the attribute");
        let SourceFailure::NotReady { remedy, .. } = &failure else { panic!("{failure:?}") };
        assert!(remedy.contains(&format!("ALTER ROLE {role} REPLICATION")), "{remedy}");
        admin.client().batch_execute(&format!("DROP ROLE {role}")).await.unwrap();
    }
}

#[tokio::test]
async fn text_is_the_same_whatever_the_role_prefers() {
    let options = "options=-c%20DateStyle%3DGerman%20-c%20TimeZone%3DAsia/Tokyo%20-c%20wal_sender_timeout%3D42s";
    let (mut walsender, session) = open(&at(NEWEST, "auth_scram:secret", options)).await;
    for (setting, value) in [
        ("DateStyle", "ISO, DMY"),
        ("IntervalStyle", "postgres"),
        ("TimeZone", "UTC"),
        ("extra_float_digits", "3"),
        ("bytea_output", "hex"),
        ("client_encoding", "UTF8"),
        ("application_name", "outboxd"),
        ("wal_sender_timeout", "42s"),
    ] {
        let rows = walsender.simple_query(&format!("SHOW {setting}")).await.unwrap();
        assert_eq!(rows, [[Some(value.to_owned())]], "{setting}");
        let row = session.client().query_one("SELECT current_setting($1)", &[&setting]).await.unwrap();
        assert_eq!(row.get::<_, &str>(0), value, "{setting}");
    }
    for (setting, value) in [("lock_timeout", "10s"), ("idle_session_timeout", "0")] {
        let row = session.client().query_one("SELECT current_setting($1)", &[&setting]).await.unwrap();
        assert_eq!(row.get::<_, &str>(0), value, "{setting}");
    }
}

#[tokio::test]
async fn a_replication_connection_runs_queries_and_survives_their_errors() {
    let (mut walsender, session) = open(&at(NEWEST, "auth_scram:secret", "")).await;
    let rows = walsender.simple_query("SELECT 1; SELECT 'a', NULL UNION ALL SELECT 'b', 'c'").await.unwrap();
    assert_eq!(rows, [[Some("a".to_owned()), None], [Some("b".to_owned()), Some("c".to_owned())]]);
    let failure = walsender.simple_query("SELECT * FROM no_such_table").await.unwrap_err();
    assert!(matches!(failure, SourceFailure::NotReady { .. }), "{failure:?}");
    let identity = walsender.identify_system().await.unwrap();
    let row = session.client().query_one("SELECT system_identifier::text FROM pg_control_system()", &[]).await.unwrap();
    assert_eq!(identity.system_identifier.to_string(), row.get::<_, &str>(0));
    assert_eq!(identity.timeline, 1);
    assert!(identity.wal_position.0 > 0);
}

/// The next CopyData's content.
async fn copy_data(stream: &mut CopyBoth) -> Vec<u8> {
    loop {
        if let [tag, a, b, c, d, rest @ ..] = &stream.buffered[..] {
            let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize - 4;
            if rest.len() >= length {
                assert_eq!(*tag, b'd');
                return stream.buffered.split_to(length + 5)[5..].to_vec();
            }
        }
        let read = tokio::time::timeout(Duration::from_secs(20), stream.reader.read_buf(&mut stream.buffered)).await;
        assert_ne!(read.expect("the stream is silent").expect("the stream can be read"), 0, "the stream ended");
    }
}

#[tokio::test]
async fn a_stream_flows_both_ways_over_each_transport() {
    let socket = format!("host={}&port={}", variable("OUTBOXD_TEST_POSTGRES_SOCKET"), port(NEWEST));
    for info in [
        at(NEWEST, "auth_scram:secret", "sslmode=disable"),
        at(NEWEST, "auth_scram:secret", "sslmode=require"),
        at(OLDEST, "auth_scram:secret", "sslmode=require"),
        parse(&format!("postgres://auth_scram:secret@/postgres?{socket}")),
    ] {
        let mut walsender = WalsenderConnection::connect(&info).await.unwrap();
        let slot = unique("stream");
        walsender.simple_query(&format!("CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput")).await.unwrap();
        let command =
            format!("START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names 'none')");
        let mut stream = walsender.start_replication(&command).await.unwrap();
        // A status update that asks for an answer is answered with a keepalive.
        for _ in 0..2 {
            let mut update = vec![b'd', 0, 0, 0, 38, b'r'];
            update.extend([0; 32]);
            update.push(1);
            stream.writer.write_all(&update).await.unwrap();
            stream.writer.flush().await.unwrap();
            while copy_data(&mut stream).await[0] != b'k' {}
        }
    }
}

#[tokio::test]
async fn a_missing_slot_is_told_apart() {
    for server in [NEWEST, OLDEST] {
        let walsender = WalsenderConnection::connect(&at(server, "auth_scram:secret", "")).await.unwrap();
        let command = "START_REPLICATION SLOT no_such_slot LOGICAL 0/0 (proto_version '1', publication_names 'p')";
        let error: WireError = walsender.try_start_replication(command).await.err().expect("a stream without a slot");
        assert!(is_slot_missing(error.server().unwrap()), "{error:?}");
    }
}

#[tokio::test]
async fn a_slot_in_use_is_held() {
    let info = at(NEWEST, "auth_scram:secret", "");
    let mut holder = WalsenderConnection::connect(&info).await.unwrap();
    let slot = unique("held");
    holder.simple_query(&format!("CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput")).await.unwrap();
    let other = WalsenderConnection::connect(&info).await.unwrap();
    let command = format!("START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names 'p')");
    let failure = other.start_replication(&command).await.err().expect("two streams on one slot");
    assert!(matches!(failure, SourceFailure::Held { .. }), "{failure:?}");
}

#[tokio::test]
async fn the_end_of_an_ordinary_connection_is_noticed_at_once() {
    let session = sql::connect(&at(NEWEST, "auth_scram:secret", "")).await.unwrap();
    let admin = sql::connect(&parse(&variable(NEWEST))).await.unwrap();
    let pid: i32 = session.client().query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let open = tokio::time::timeout(Duration::from_millis(200), session.closed()).await;
    assert!(open.is_err(), "{open:?}");
    admin.client().execute("SELECT pg_terminate_backend($1)", &[&pid]).await.unwrap();
    for _ in 0..2 {
        let failure = tokio::time::timeout(Duration::from_secs(5), session.closed()).await.unwrap();
        assert!(matches!(&failure, SourceFailure::Transient { what } if what.contains("57P01")), "{failure:?}");
    }
}
