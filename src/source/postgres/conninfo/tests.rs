use super::*;

fn parse(url: &str) -> ConnInfo {
    parse_in(url, &[])
}

fn parse_in(url: &str, variables: &[(&str, &str)]) -> ConnInfo {
    ConnInfo::parse_with(url, &environment(variables)).unwrap()
}

fn environment<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
    |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
}

fn refusal(url: &str) -> (String, String) {
    match ConnInfo::parse_with(url, &|_| None) {
        Err(SourceFailure::Misconfigured { what, remedy }) => (what, remedy),
        other => panic!("{url}: {other:?}"),
    }
}

fn tcp(name: &str, port: u16) -> Host {
    Host { address: Address::Tcp { name: name.to_owned(), hostaddr: None }, port }
}

#[test]
fn several_hosts_keep_their_order_and_ports() {
    let info = parse("postgres://alice@h1:5433,h2,[2001:db8::1]:6000/shop");
    assert_eq!(info.hosts, [tcp("h1", 5433), tcp("h2", 5432), tcp("2001:db8::1", 6000)]);
    assert_eq!(info.describe(), "postgres://alice@h1:5433,h2:5432,[2001:db8::1]:6000/shop");
    let one_port = parse("postgres://alice@/shop?host=h1,h2&port=6000");
    assert_eq!(one_port.hosts, [tcp("h1", 6000), tcp("h2", 6000)]);
    assert_eq!(info.pinned_to(&info.hosts[1]).hosts, [tcp("h2", 5432)]);
}

#[test]
fn a_socket_folder_is_a_host() {
    for url in ["postgres://alice@/shop?host=/run/pg&port=6000", "postgres://alice@%2Frun%2Fpg:6000/shop"] {
        let info = parse(url);
        assert_eq!(info.hosts, [Host { address: Address::Unix(PathBuf::from("/run/pg")), port: 6000 }]);
        assert_eq!(info.describe(), "postgres://alice@/shop?host=/run/pg&port=6000");
    }
}

#[test]
fn hostaddr_keeps_the_name_for_the_certificate() {
    let info = parse("postgres://alice@db.example/shop?hostaddr=10.0.0.1");
    assert_eq!(
        info.hosts[0].address,
        Address::Tcp { name: "db.example".to_owned(), hostaddr: Some(IpAddr::from([10, 0, 0, 1])) }
    );
}

#[test]
fn the_address_comes_before_the_environment() {
    let variables = [
        ("PGHOST", "envhost"),
        ("PGPORT", "7000"),
        ("PGUSER", "envuser"),
        ("PGDATABASE", "envdb"),
        ("PGPASSWORD", "envsecret"),
        ("PGSSLMODE", "verify-ca"),
        ("PGAPPNAME", "envapp"),
        ("PGTARGETSESSIONATTRS", "primary"),
        ("PGCHANNELBINDING", "require"),
        ("PGCONNECT_TIMEOUT", "3"),
    ];
    let from_environment = parse_in("postgres://", &variables);
    assert_eq!(from_environment.hosts, [tcp("envhost", 7000)]);
    assert_eq!((from_environment.user(), from_environment.dbname()), ("envuser", "envdb"));
    assert_eq!(from_environment.tls.mode, SslMode::VerifyCa);
    assert_eq!(from_environment.tls.channel_binding, ChannelBinding::Require);
    assert_eq!(from_environment.target, TargetSessionAttrs::Primary);
    assert_eq!(from_environment.application_name, "envapp");
    assert_eq!(from_environment.tcp.connect_timeout, Some(Duration::from_secs(3)));
    assert_eq!(from_environment.password, Some(Secret::Plain("envsecret".to_owned())));

    let url = "postgres://alice:pw@h:1/shop?sslmode=require&application_name=app&connect_timeout=0";
    let info = parse_in(url, &variables);
    assert_eq!(info.hosts, [tcp("h", 1)]);
    assert_eq!((info.user(), info.dbname()), ("alice", "shop"));
    assert_eq!(info.tls.mode, SslMode::Require);
    assert_eq!(info.application_name, "app");
    assert_eq!(info.tcp.connect_timeout, None);
    assert_eq!(info.password, Some(Secret::Plain("pw".to_owned())));
}

#[test]
fn defaults_are_libpqs_except_that_a_silent_server_is_noticed() {
    let info = parse("postgres://alice@h");
    assert_eq!(info.dbname(), "alice");
    assert_eq!(info.tls.mode, SslMode::Prefer);
    assert_eq!(info.target, TargetSessionAttrs::Any);
    assert_eq!(info.application_name, "outboxd");
    assert_eq!(info.tcp.connect_timeout, Some(Duration::from_secs(10)));
    assert_eq!(info.tcp.keepalive, Some((Duration::from_secs(10), Duration::from_secs(5), 4)));
    assert_eq!(parse("postgres://alice@h?keepalives=0").tcp.keepalive, None);
    assert_eq!(parse("postgres://alice@h?ssl=true").tls.mode, SslMode::Require);
}

#[test]
fn no_output_shows_the_password() {
    for url in ["postgres://alice:hunter2@h/shop", "postgres://alice@h/shop?password=hunter2"] {
        let info = parse(url);
        assert_eq!(info.read_password(&info.hosts[0]).unwrap().as_deref(), Some("hunter2"));
        assert!(!format!("{info:?}").contains("hunter2"));
        assert_eq!(info.describe(), "postgres://alice@h:5432/shop");
        assert_eq!(info.with_database("other").describe(), "postgres://alice@h:5432/other");
    }
}

#[test]
fn the_password_file_is_asked_last() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".pgpass");
    std::fs::write(&path, "h:5432:shop:alice:from-file\nlocalhost:5432:shop:alice:from-socket\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let home = folder.path().to_str().unwrap();
    let password = |url: &str, variables: &[(&str, &str)]| {
        let info = parse_in(url, variables);
        info.read_password_with(&info.hosts[0], &environment(variables)).unwrap()
    };
    let variables = [("HOME", home)];
    assert_eq!(password("postgres://alice@h/shop", &variables).as_deref(), Some("from-file"));
    assert_eq!(password("postgres://alice@/shop?host=/var/run/postgresql", &variables).as_deref(), Some("from-socket"));
    assert_eq!(password("postgres://bob@h/shop", &variables), None);
    assert_eq!(
        password("postgres://alice@h/shop", &[("PGPASSFILE", path.to_str().unwrap())]).as_deref(),
        Some("from-file")
    );
    let both = [("HOME", home), ("PGPASSWORD", "env:PW"), ("PW", "from-variable")];
    assert_eq!(password("postgres://alice@h/shop", &both).as_deref(), Some("from-variable"));
}

#[test]
fn a_password_that_cannot_be_read_says_where_it_should_be() {
    let info = parse("postgres://alice:file:/nonexistent/pw@h/shop");
    let Err(SourceFailure::NotReady { what, .. }) = info.read_password(&info.hosts[0]) else {
        panic!("a missing file was accepted")
    };
    assert!(what.contains("/nonexistent/pw"), "{what}");
}

#[test]
fn an_unknown_parameter_suggests_the_nearest() {
    assert_eq!(refusal("postgres://u@h?sslmod=require").1, "did you mean `sslmode`?");
    assert_eq!(refusal("postgres://u@h?aplication_name=x").1, "did you mean `application_name`?");
    assert!(!refusal("postgres://u@h?zzzzzz=x").1.contains("did you mean"));
    assert!(refusal("postgres://u@h?sslcrl=x").0.contains("sslcrl"));
}

#[test]
fn values_that_cannot_be_are_refused() {
    for url in [
        "postgres://u@h?sslmode=on",
        "postgres://u@h?target_session_attrs=master",
        "postgres://u@h?channel_binding=yes",
        "postgres://u@h?connect_timeout=soon",
        "postgres://u@h:0",
        "postgres://u@h:70000",
        "postgres://u@h1,h2,h3?port=1,2",
        "postgres://u@h1,h2?hostaddr=10.0.0.1",
        "postgres://u@h?hostaddr=name",
        "postgres://u@h?sslmode=require&sslrootcert=system",
        "postgres://u@h?sslmode=prefer&sslnegotiation=direct",
        "postgres://u@h?client_encoding=LATIN1",
        "postgres://u@h?gssencmode=require",
    ] {
        refusal(url);
    }
}

#[test]
fn the_systems_roots_imply_verify_full() {
    assert_eq!(parse("postgres://u@h?sslrootcert=system").tls.mode, SslMode::VerifyFull);
}
