//! A value arrives as the server itself would print it, byte for byte, whatever its type: random rows of every type that
//! outboxes use, compared with the server's own text.

use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::support::MySqlFlavor::{MariaDb, MySql};
use crate::support::{Dice, MySqlDatabase, MySqlFlavor, PATIENCE, Relay, Topic, on_both, until_reading};

const ROWS: usize = 300;

/// A record's key, value and headers, as bytes.
struct Raw {
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(String, Option<Vec<u8>>)>,
}

/// As they are: the reader of the other promises takes them for text.
async fn records(topic: &Topic, count: usize) -> Vec<Raw> {
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", &topic.brokers)
        .set("group.id", &topic.name)
        .set("enable.auto.commit", "false")
        .create()
        .expect("a consumer is made");
    let mut all = TopicPartitionList::new();
    all.add_partition_offset(&topic.name, 0, Offset::Beginning).expect("the beginning is an offset");
    consumer.assign(&all).expect("the partition is assigned");
    let mut records = Vec::new();
    let reading = async {
        while records.len() < count {
            let Ok(message) = consumer.recv().await else { continue };
            let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
            records.push(Raw {
                key: message.key().map(<[u8]>::to_vec),
                value: message.payload().map(<[u8]>::to_vec),
                headers: headers.map(|header| (header.key.to_owned(), header.value.map(<[u8]>::to_vec))).collect(),
            });
        }
    };
    let _ = tokio::time::timeout(PATIENCE, reading).await;
    assert_eq!(records.len(), count, "not all records arrived");
    records
}

fn one_of<'a>(dice: &mut Dice, from: &[&'a str]) -> &'a str {
    from[dice.roll(from.len() as u64) as usize]
}

fn text(dice: &mut Dice) -> String {
    const PARTS: [&str; 10] =
        ["a", "Zürich", "😀", "\u{1F468}\u{200D}\u{1F469}", "é", "e\u{301}", " ", "€", "中文", "_x"];
    (0..dice.roll(6)).map(|_| one_of(dice, &PARTS)).collect()
}

fn number(dice: &mut Dice) -> String {
    const EDGES: [&str; 12] = [
        "0",
        "-1",
        "18446744073709551615",
        "-9223372036854775808",
        "1.5",
        "-0.0",
        "1e300",
        "2.5e-7",
        "123456789.125",
        "0.1",
        "100000000000000000000",
        "-32769",
    ];
    match dice.roll(2) {
        0 => one_of(dice, &EDGES).to_owned(),
        _ => (dice.roll(1 << 40) as i64 - (1 << 39)).to_string(),
    }
}

/// A JSON document of random shape.
fn document(dice: &mut Dice, depth: u64) -> String {
    match dice.roll(if depth == 0 { 5 } else { 8 }) {
        0 => "null".to_owned(),
        1 => one_of(dice, &["true", "false"]).to_owned(),
        2 | 3 => number(dice),
        4 => serde_json::to_string(&text(dice)).expect("a string"),
        5 | 6 => {
            let members: Vec<_> = (0..dice.roll(5))
                .map(|_| {
                    let name = serde_json::to_string(&text(dice)).expect("a string");
                    format!("{name}:{}", document(dice, depth - 1))
                })
                .collect();
            format!("{{{}}}", members.join(", "))
        }
        _ => {
            let elements: Vec<_> = (0..dice.roll(5)).map(|_| document(dice, depth - 1)).collect();
            format!("[{}]", elements.join(","))
        }
    }
}

fn hex(dice: &mut Dice, length: u64) -> String {
    (0..length).map(|_| format!("{:02x}", dice.roll(256))).collect()
}

fn moment(dice: &mut Dice, fraction: u32) -> String {
    let (year, month, day) = (1971 + dice.roll(66), 1 + dice.roll(12), 1 + dice.roll(28));
    let (hour, minute, second) = (dice.roll(24), dice.roll(60), dice.roll(60));
    let fraction_of = dice.roll(10_u64.pow(fraction));
    let width = fraction as usize;
    format!("'{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{fraction_of:0width$}'")
}

fn quoted(text: &str) -> String {
    // Backslashes are no escapes in these sessions.
    format!("'{}'", text.replace('\'', "''"))
}

/// Column, its type, and how a value is made, as SQL.
type Column = (&'static str, &'static str, fn(&mut Dice) -> String);

const COLUMNS: &[Column] = &[
    ("tiny", "TINYINT", |dice| (dice.roll(256) as i64 - 128).to_string()),
    ("small_u", "SMALLINT UNSIGNED", |dice| dice.roll(65_536).to_string()),
    ("medium", "MEDIUMINT", |dice| (dice.roll(1 << 24) as i64 - (1 << 23)).to_string()),
    ("whole", "INT UNSIGNED", |dice| dice.roll(1 << 32).to_string()),
    ("big", "BIGINT", |dice| one_of(dice, &["-9223372036854775808", "9223372036854775807", "0", "-1"]).to_owned()),
    ("big_u", "BIGINT UNSIGNED", |dice| one_of(dice, &["18446744073709551615", "9223372036854775808", "7"]).to_owned()),
    ("exact", "DECIMAL(30,10)", |dice| format!("-{}.{:010}", dice.roll(1 << 50), dice.roll(10_000_000_000))),
    ("money", "DECIMAL(12,2)", |dice| format!("{}.{:02}", dice.roll(1 << 30), dice.roll(100))),
    ("dbl", "DOUBLE", |dice| one_of(dice, &["0.1", "1e22", "-2.5e-7", "123456.789", "1e15", "3"]).to_owned()),
    ("at6", "DATETIME(6)", |dice| moment(dice, 6)),
    ("at0", "DATETIME", |dice| moment(dice, 1)),
    ("stamp3", "TIMESTAMP(3) NULL", |dice| moment(dice, 3)),
    ("day", "DATE", |dice| moment(dice, 1)[..11].to_owned() + "'"),
    ("span", "TIME(2)", |dice| {
        format!("'-{}:{:02}:{:02}.{:02}'", dice.roll(838), dice.roll(60), dice.roll(60), dice.roll(100))
    }),
    ("yr", "YEAR", |dice| (1901 + dice.roll(250)).to_string()),
    ("state", "ENUM('placed','paid','it''s','zürich')", |dice| (1 + dice.roll(4)).to_string()),
    ("tags", "SET('a','b','c d','é')", |dice| dice.roll(16).to_string()),
    ("fixed", "CHAR(10)", |dice| quoted(text(dice).trim_end().chars().take(10).collect::<String>().as_str())),
    ("emoji", "VARCHAR(200)", |dice| quoted(&text(dice))),
    ("latin", "VARCHAR(50) CHARACTER SET latin1", |dice| quoted(one_of(dice, &["Zürich", "€uro", "ÿ", "", "plain"]))),
    ("words", "TEXT", |dice| quoted(&text(dice).repeat(50))),
];

/// Only of one kind of server.
const MARIADB: &[Column] = &[
    ("ident", "UUID", |dice| {
        let hex = hex(dice, 16);
        // The server keeps the parts of some versions in another order, and takes only real ones.
        let (version, variant) = (one_of(dice, &["1", "4", "5", "7"]), one_of(dice, &["8", "9", "a", "b"]));
        let (third, fourth) = (&hex[13..16], &hex[17..20]);
        format!("'{}-{}-{version}{third}-{variant}{fourth}-{}'", &hex[..8], &hex[8..12], &hex[20..])
    }),
    ("address", "INET6", |dice| one_of(dice, &["'::1'", "'2001:db8::ff00:42:8329'", "'::ffff:192.0.2.1'"]).to_owned()),
    ("address4", "INET4", |dice| format!("'192.0.{}.{}'", dice.roll(256), dice.roll(256))),
];

/// What is binary: its bytes arrive as they are.
const BINARY: &[Column] = &[
    ("bits", "BIT(20)", |dice| dice.roll(1 << 20).to_string()),
    ("blob_", "BLOB", |dice| {
        format!("x'{}'", {
            let length = dice.roll(300);
            hex(dice, length)
        })
    }),
    ("varbin", "VARBINARY(40)", |dice| {
        format!("x'{}'", {
            let length = dice.roll(40);
            hex(dice, length)
        })
    }),
];

fn columns(flavor: MySqlFlavor) -> Vec<Column> {
    let own: &[Column] = if flavor == MariaDb { MARIADB } else { &[] };
    COLUMNS.iter().chain(BINARY).chain(own).copied().collect()
}

#[tokio::test]
async fn every_type_arrives_as_the_server_prints_it() {
    on_both(async |flavor| {
        let database = MySqlDatabase::create(flavor).await;
        let columns = columns(flavor);
        let declared: Vec<_> = columns.iter().map(|(name, kind, _)| format!("{name} {kind}")).collect();
        database
            .execute(&format!(
                "CREATE TABLE outbox (number INT PRIMARY KEY AUTO_INCREMENT, id BINARY(16), document JSON, {}) \
                 CHARACTER SET utf8mb4",
                declared.join(", ")
            ))
            .await;
        let topic = Topic::create(1).await;
        let headers: Vec<_> = columns.iter().map(|(name, ..)| format!("{name}={name}")).collect();
        let mut flags = vec!["--column", "payload=document", "--column", "key=emoji", "--uuid-column", "id"];
        for header in &headers {
            flags.extend(["--header", header]);
        }
        let mut relay = Relay::start_at(&database.url(), &topic, &flags);
        until_reading(&mut relay).await;

        let mut dice = Dice::seeded(if flavor == MySql { 41 } else { 42 });
        for _ in 0..ROWS / 10 {
            let mut rows = Vec::new();
            for _ in 0..10 {
                let mut values = vec![format!("x'{}'", hex(&mut dice, 16)), quoted(&document(&mut dice, 4))];
                for (_, _, make) in &columns {
                    let value = make(&mut dice);
                    values.push(if dice.roll(12) == 0 { "NULL".to_owned() } else { value });
                }
                rows.push(format!("({})", values.join(", ")));
            }
            let names: Vec<_> = columns.iter().map(|(name, ..)| *name).collect();
            let names = names.join(", ");
            database.execute(&format!("INSERT INTO outbox (id, document, {names}) VALUES {}", rows.join(", "))).await;
        }

        let as_uuid = "LOWER(CONCAT_WS('-', SUBSTR(HEX(id), 1, 8), SUBSTR(HEX(id), 9, 4), SUBSTR(HEX(id), 13, 4), \
                       SUBSTR(HEX(id), 17, 4), SUBSTR(HEX(id), 21)))";
        let selected: Vec<_> = columns.iter().map(|(name, ..)| *name).collect();
        let query = format!("SELECT {as_uuid}, document, emoji, {} FROM outbox ORDER BY number", selected.join(", "));
        let expected = database.rows(&query).await;
        let arrived = records(&topic, expected.len()).await;
        let show = |bytes: Option<&[u8]>| bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        for (row, record) in expected.iter().zip(&arrived) {
            let header = |name: &str| {
                let found = record.headers.iter().find(|(header, _)| header == name);
                found.and_then(|(_, value)| value.as_deref())
            };
            assert_eq!(show(header("id")), show(row.bytes(0)), "the id");
            assert_eq!(show(record.value.as_deref()), show(row.bytes(1)), "the document");
            assert_eq!(show(record.key.as_deref()), show(row.bytes(2)), "the key");
            for (at, (name, kind, _)) in columns.iter().enumerate() {
                let (here, there) = (header(name), row.bytes(3 + at));
                assert!(here == there, "{name} {kind}: {:?} instead of {:?}", show(here), show(there));
            }
        }
        relay.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_snapshot_prints_values_as_the_log_does() {
    on_both(async |flavor| {
        let database = MySqlDatabase::create(flavor).await;
        let columns = columns(flavor);
        let declared: Vec<_> = columns.iter().map(|(name, kind, _)| format!("{name} {kind}")).collect();
        database
            .execute(&format!(
                "CREATE TABLE outbox (id INT PRIMARY KEY AUTO_INCREMENT, document JSON, {}) CHARACTER SET utf8mb4",
                declared.join(", ")
            ))
            .await;
        let mut dice = Dice::seeded(7);
        for _ in 0..30 {
            let mut values = vec![quoted(&document(&mut dice, 3))];
            values.extend(columns.iter().map(|(_, _, make)| make(&mut dice)));
            let names: Vec<_> = columns.iter().map(|(name, ..)| *name).collect();
            let insert = format!("INSERT INTO outbox (document, {}) VALUES ({})", names.join(", "), values.join(", "));
            database.execute(&insert).await;
        }
        let headers: Vec<_> = columns.iter().map(|(name, ..)| format!("{name}={name}")).collect();
        let mut flags = vec!["--column", "payload=document", "--column", "key=emoji", "--until-caught-up"];
        for header in &headers {
            flags.extend(["--header", header]);
        }
        let (by_log, by_snapshot) = (Topic::create(1).await, Topic::create(1).await);
        let log = [&flags[..], &["--start", "earliest", "--name", "log"]].concat();
        Relay::start_at(&database.url(), &by_log, &log).exits_with(0).await;
        let snapshot = [&flags[..], &["--snapshot", "existing", "--name", "snapshot"]].concat();
        Relay::start_at(&database.url(), &by_snapshot, &snapshot).exits_with(0).await;
        for (one, other) in records(&by_log, 30).await.iter().zip(&records(&by_snapshot, 30).await) {
            assert_eq!((&one.key, &one.value), (&other.key, &other.value));
            for ((name, logged), (_, read)) in one.headers.iter().zip(&other.headers) {
                assert_eq!(logged, read, "{name}");
            }
        }
    })
    .await;
}
