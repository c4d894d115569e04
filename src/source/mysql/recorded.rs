//! Logs that real servers wrote, read whole, and every value in them compared with what the server itself printed.
//!
//! A recording is a log file and a list of `table id column text`, taken from the server in a session with UTF-8 and
//! UTC: what it prints for the column, or the column's bytes where it is binary; `~` is null, and bytes that are no
//! plain text are written `\xNN`.

use std::collections::HashMap;
use std::fmt::Write as _;

use bytes::Bytes;
use proptest::prelude::*;

use super::compressed::{Inflater, expand};
use super::event::{self, Body, FileEvents, Rows, RowsKind};
use super::gtid::{GtidSet, MariaGtidList, MariaId};
use super::query::{Statement, classify};
use super::rows::{RowImages, Value};
use super::table_map::{self, TableShape};
use super::transaction::MariaXa;
use super::values::{BadValue, Declared, Rendered, render, render_declared};
use crate::event::Want;

const CAP: usize = 1 << 26;

/// A log as it is read: what happened in words, and all values of inserted rows.
#[derive(Default)]
struct Reading {
    mariadb: bool,
    checksum: bool,
    tables: HashMap<u64, TableShape>,
    gtids: GtidSet,
    maria_gtids: MariaGtidList,
    story: Vec<String>,
    values: HashMap<(String, String, String), String>,
}

fn read(file: &[u8]) -> Reading {
    let mut reading = Reading::default();
    let mut events = FileEvents::new(file).unwrap();
    while let Some(bytes) = events.next_event().unwrap() {
        reading.event(bytes, reading.checksum);
    }
    reading
}

impl Reading {
    fn event(&mut self, bytes: &[u8], checksum: bool) {
        let event = event::split(bytes, checksum).unwrap();
        match event.decode().unwrap() {
            Body::FormatDescription(format) => {
                self.mariadb = format.is_mariadb();
                self.checksum = format.checksum;
            }
            Body::Query(query) => self.statement(query.sql),
            Body::CompressedQuery(query) => {
                let mut sql = Vec::new();
                expand(query.sql, CAP, &mut sql).unwrap();
                self.story.push("compressed".into());
                self.statement(&sql);
            }
            Body::Gtid(gtid) => {
                assert!(gtid.times.immediate.is_some_and(|at| at.0 > 1_600_000_000_000_000));
                assert_eq!(gtid.times.immediate, gtid.times.original);
                self.gtids.insert(gtid.uuid, gtid.tag, gtid.gno);
                self.story.push(format!("gtid {}", gtid.tag.as_str()));
            }
            Body::Anonymous(times) => {
                assert!(times.immediate.is_some());
                self.story.push("no gtid".into());
            }
            Body::MariaGtid(gtid) => {
                let xa = match gtid.xa {
                    Some(MariaXa::Prepared(xid)) => format!(" prepares {xid}"),
                    Some(MariaXa::Completed(xid)) => format!(" completes {xid}"),
                    None => String::new(),
                };
                let (domain, server_id, sequence) = (gtid.domain, gtid.server_id, gtid.sequence);
                self.maria_gtids.update(MariaId { domain, server_id, sequence });
                let ddl = if gtid.ddl && gtid.standalone { " ddl" } else { "" };
                self.story.push(format!("gtid{ddl}{xa}"));
            }
            Body::PreviousGtids(bytes) => {
                let set = GtidSet::decode(bytes).unwrap();
                let mut out = Vec::new();
                set.encode(&mut out);
                assert_eq!(out, bytes, "the server's own encoding");
                self.gtids.union(&set);
            }
            Body::MariaGtidList(bytes) => assert!(!MariaGtidList::decode(bytes).unwrap().is_empty()),
            Body::TableMap(body) => {
                let shape = table_map::parse(body, self.mariadb).unwrap();
                let peeked = table_map::peek(body).unwrap();
                assert_eq!((peeked.table_id, peeked.table), (shape.table_id, shape.table.as_bytes()));
                self.tables.insert(shape.table_id, shape);
            }
            Body::Rows(rows) => self.rows(rows),
            Body::TransactionPayload(body) => {
                let inflater = Inflater::new().unwrap();
                let mut events = inflater.open(&Bytes::copy_from_slice(body), CAP).unwrap();
                let mut count = 0;
                while let Some(bytes) = events.next_event().unwrap() {
                    self.event(bytes, false);
                    count += 1;
                }
                assert!(count > 2);
                self.story.push("payload".into());
            }
            Body::XaPrepare(prepare) => {
                let phases = if prepare.one_phase { "one phase" } else { "two phases" };
                self.story.push(format!("prepared {} in {phases}", prepare.xid));
            }
            Body::Xid(_) => self.story.push("commit".into()),
            Body::Rotate(rotate) => assert!(!rotate.fake),
            Body::Stop | Body::Aside(_) => {}
            other => panic!("{other:?}"),
        }
    }

    fn statement(&mut self, sql: &[u8]) {
        self.story.push(match classify(sql) {
            Statement::Begin => "begin".into(),
            Statement::XaStart(xid) => format!("xa start {xid}"),
            Statement::XaEnd(xid) => format!("xa end {xid}"),
            Statement::XaCommit(xid) => format!("xa commit {xid}"),
            Statement::XaRollback(xid) => format!("xa rollback {xid}"),
            other => format!("{other:?}"),
        });
    }

    fn rows(&mut self, rows: Rows<'_>) {
        let shape = &self.tables[&rows.table_id];
        self.story.push(format!("{:?} {}", rows.kind, shape.table));
        if rows.kind != RowsKind::Write {
            return;
        }
        let mut write = rows.write().unwrap();
        let mut plain = Vec::new();
        if rows.compressed {
            expand(write.rows, CAP, &mut plain).unwrap();
            write.rows = &plain;
        }
        let wanted: Vec<_> = (0..shape.columns.len()).collect();
        let mut images = RowImages::new(&write, shape).unwrap();
        loop {
            let mut id = String::new();
            let visit = |at: usize, value: Value<'_>| {
                let column = &shape.columns[at];
                let name = column.name.clone().unwrap_or_else(|| at.to_string());
                let text = match value {
                    Value::Null => "~".to_owned(),
                    Value::Absent => "ABSENT".to_owned(),
                    Value::Bytes(raw) => {
                        let mut out = Vec::new();
                        // MariaDB's own types, by the names that the recordings give them.
                        let declared = match (shape.table.as_str(), name.as_str()) {
                            ("maria", "u" | "u4") => Some(Declared::Uuid),
                            ("maria", "i6") => Some(Declared::Inet6),
                            ("maria", "i4") => Some(Declared::Inet4),
                            _ => None,
                        };
                        match declared {
                            Some(declared) => render_declared(declared, raw, &mut out).map(|()| Rendered::Written),
                            None => render(column, Want::Text, raw, &mut out),
                        }
                        .map_or_else(
                            |problem| panic!("{}.{name}: {problem}: {}", shape.table, hex(raw)),
                            |rendered| match rendered {
                                Rendered::Borrowed(bytes) => hex(bytes),
                                Rendered::Written => hex(&out),
                            },
                        )
                    }
                };
                if at == 0 {
                    id.clone_from(&text);
                } else {
                    self.values.insert((shape.table.clone(), id.clone(), name), text);
                }
                Ok::<_, BadValue>(())
            };
            if !images.next_row(&wanted, visit).unwrap() {
                return;
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02X}");
        text
    })
}

fn unescape(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut parts = text.split("\\x");
    bytes.extend_from_slice(parts.next().unwrap().as_bytes());
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    bytes
}

/// How many values agree; panics with all that do not.
fn compare(file: &[u8], expected: &str) -> usize {
    let reading = read(file);
    let mut differing = String::new();
    let mut count = 0;
    for line in expected.lines() {
        let [table, id, column, text] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let key = (table.to_owned(), hex(id.as_bytes()), column.to_owned());
        let found = reading.values.get(&key).map_or("MISSING", String::as_str);
        let text = if text == "~" { text.to_owned() } else { hex(&unescape(text)) };
        if found != text {
            let _ = writeln!(differing, "{table} {id} {column}: server {text}, here {found}");
        }
        count += 1;
    }
    assert!(differing.is_empty(), "{differing}");
    assert_eq!(count, reading.values.len(), "values that nobody expected");
    count
}

#[test]
fn mysql_values_read_as_the_server_prints_them() {
    let file = include_bytes!("testdata/mysql-9.7-types.binlog");
    assert_eq!(compare(file, include_str!("testdata/mysql-9.7-types.expected")), 800);
}

#[test]
fn mariadb_values_read_as_the_server_prints_them() {
    let file = include_bytes!("testdata/mariadb-11.4-types.binlog");
    assert_eq!(compare(file, include_str!("testdata/mariadb-11.4-types.expected")), 941);
}

/// What was written, as (id, column, text).
fn inserted(reading: &Reading) -> Vec<(String, String, String)> {
    let text = |hex: &String| match hex.as_str() {
        "~" | "ABSENT" => hex.clone(),
        hex => String::from_utf8(unescape(&hex.as_bytes().chunks(2).fold(String::new(), |mut text, pair| {
            let _ = write!(text, "\\x{}{}", char::from(pair[0]), char::from(pair[1]));
            text
        })))
        .unwrap(),
    };
    let mut all: Vec<_> =
        reading.values.iter().map(|((_, id, column), value)| (text(id), column.clone(), text(value))).collect();
    all.sort();
    all
}

#[test]
fn a_compressed_mysql_transaction_is_read_whole() {
    let reading = read(include_bytes!("testdata/mysql-9.7-compressed.binlog"));
    assert_eq!(reading.story, ["gtid ", "begin", "Write outbox", "Write outbox", "commit", "payload"]);
    let values: Vec<_> = inserted(&reading).into_iter().map(|(id, _, payload)| (id, payload)).collect();
    let expected = [("1", "a".repeat(2000)), ("2", "b".into()), ("3", "c".repeat(3000))];
    assert_eq!(values, expected.map(|(id, payload)| (id.to_owned(), payload)));
}

#[test]
fn mysql_xa_transactions_are_matched_with_their_outcome() {
    let reading = read(include_bytes!("testdata/mysql-9.7-xa.binlog"));
    let (one, two, three) = ("X'6f6e65',X'6272',7", "X'74776f',X'',1", "X'7468726565',X'',1");
    let mut expected = Vec::new();
    for (xid, phases, outcome) in
        [(one, "two phases", Some("commit")), (two, "two phases", Some("rollback")), (three, "one phase", None)]
    {
        expected.extend(["gtid ".into(), format!("xa start {xid}"), "Write outbox".into(), format!("xa end {xid}")]);
        expected.push(format!("prepared {xid} in {phases}"));
        if let Some(outcome) = outcome {
            expected.extend(["gtid ".into(), format!("xa {outcome} {xid}")]);
        }
    }
    assert_eq!(reading.story, expected);
}

#[test]
fn tagged_gtids_are_read_and_encoded_as_the_server_does() {
    let reading = read(include_bytes!("testdata/mysql-9.7-tagged.binlog"));
    let tags: Vec<_> = reading.story.iter().filter_map(|line| line.strip_prefix("gtid ")).collect();
    assert_eq!(tags, ["orders", "", "a_rather_long_tag_of_32_letters_"]);
    let foreign = "ffeeddcc-bbaa-9988-7766-554433221100:a_rather_long_tag_of_32_letters_:1234567890124";
    assert!(reading.gtids.is_superset_of(&foreign.parse().unwrap()));
    assert_eq!(reading.gtids.to_string(), include_str!("testdata/mysql-9.7-tagged.executed").replace(['\n', ' '], ""));
}

#[test]
fn every_kind_of_change_of_mysql_is_told_apart() {
    let reading = read(include_bytes!("testdata/mysql-9.7-changes.binlog"));
    let whole = |change: &'static str| ["gtid ", "begin", change, "commit"];
    let mut expected = vec!["gtid ", "begin", "Write outbox", "Savepoint", "Update outbox", "Delete outbox", "commit"];
    // The first is a partial update of JSON.
    expected.extend(whole("Update other").into_iter().chain(whole("Write odd")));
    expected.extend(["gtid ", "Ddl"].into_iter().chain(whole("Write outbox")));
    expected.extend(["gtid ", "Ddl"].into_iter().chain(whole("Write outbox")).chain(whole("Change")));
    assert_eq!(reading.story, expected);
    // Columns that an insert does not name are not there with binlog_row_image=MINIMAL, defaults or not.
    assert_eq!(reading.values[&("outbox".into(), hex(b"7"), "extra".into())], "ABSENT");
    assert_eq!(reading.values[&("outbox".into(), hex(b"7"), "payload".into())], hex(b"m"));
    // A virtual and a stored generated column, and an invisible one; those of functional indexes are not logged.
    for (column, text) in [("a", "10"), ("b", "15"), ("c", "4000000000"), ("j", r#"{"x": [1, 2], "y": ["p"]}"#)] {
        assert_eq!(reading.values[&("odd".into(), hex(b"5"), column.into())], hex(text.as_bytes()), "{column}");
    }
    let odd = reading.tables.values().find(|shape| shape.table == "odd").unwrap();
    let visible: Vec<_> = odd.columns.iter().map(|column| column.visible).collect();
    assert_eq!(visible, [true, true, true, true, false]);
}

#[test]
fn transactions_without_a_gtid_are_known_as_such() {
    let reading = read(include_bytes!("testdata/mysql-9.7-anonymous.binlog"));
    assert_eq!(reading.story, ["no gtid", "begin", "Write outbox", "commit"]);
}

#[test]
fn mariadb_transactions_are_read() {
    let reading = read(include_bytes!("testdata/mariadb-11.4-plain.binlog"));
    let expected = [
        "gtid",
        "Write outbox",
        "Update outbox",
        "Delete outbox",
        "commit",
        "gtid ddl",
        "Ddl",
        "gtid",
        "Write outbox",
        "commit",
    ];
    assert_eq!(reading.story, expected);
    assert_eq!(reading.maria_gtids.iter().map(|id| (id.domain, id.server_id)).collect::<Vec<_>>(), [(3, 2)]);
}

#[test]
fn compressed_mariadb_events_never_vanish() {
    let reading = read(include_bytes!("testdata/mariadb-11.4-compressed.binlog"));
    let expected =
        ["gtid", "Write outbox", "Update outbox", "Delete outbox", "commit", "gtid ddl", "compressed", "Ddl"];
    assert_eq!(reading.story, expected);
    let payloads: Vec<_> = inserted(&reading).into_iter().map(|(_, _, payload)| payload).collect();
    assert_eq!(payloads, ["a".repeat(1000), "b".repeat(300)]);
}

#[test]
fn mariadb_xa_transactions_are_matched_with_their_outcome() {
    let reading = read(include_bytes!("testdata/mariadb-11.4-xa.binlog"));
    let mut expected = Vec::new();
    for (xid, outcome) in [("X'6f6e65',X'6272',7", "commit"), ("X'74776f',X'',1", "rollback")] {
        expected.extend([format!("gtid prepares {xid}"), "Write outbox".into(), format!("xa end {xid}")]);
        expected.push(format!("prepared {xid} in two phases"));
        expected.extend([format!("gtid completes {xid}"), format!("xa {outcome} {xid}")]);
    }
    expected.extend(["gtid", "Write outbox", "commit"].map(String::from));
    assert_eq!(reading.story, expected);
}

#[test]
fn a_table_whose_log_tells_nothing_of_it_is_read_by_number() {
    let reading = read(include_bytes!("testdata/mariadb-11.4-no-metadata.binlog"));
    assert_eq!(inserted(&reading), [("1".to_owned(), "1".to_owned(), "a".to_owned())]);
    assert!(reading.tables.values().all(|shape| !shape.has_names && !shape.has_signs));
}

#[test]
fn every_cut_of_a_recorded_log_is_an_error_or_an_end() {
    let file = include_bytes!("testdata/mysql-9.7-changes.binlog");
    for end in 4..file.len() {
        let mut events = FileEvents::new(&file[..end]).unwrap();
        while let Ok(Some(bytes)) = events.next_event() {
            let event = event::split(bytes, true).unwrap();
            if let Ok(Body::TableMap(body)) = event.decode() {
                for cut in 0..body.len() {
                    let _ = table_map::parse(&body[..cut], false);
                }
            }
        }
    }
}

#[test]
fn temporal_columns_of_old_read_as_the_server_prints_them() {
    let file = include_bytes!("testdata/mariadb-11.4-old-temporals.binlog");
    let rows = [
        ["1", "-838:59:59", "9999-12-31 23:59:59", "2038-01-19 03:14:07", "2024-02-29", "4294967295"],
        ["2", "12:34:56", "1000-01-01 00:00:01", "1970-01-01 00:00:01", "0001-01-01", "1"],
        ["3", "00:00:00", "0000-00-00 00:00:00", "~", "~", "2"],
    ];
    let mut expected = String::new();
    for [id, values @ ..] in rows {
        for (column, value) in ["t", "dt", "ts", "d", "n"].iter().zip(values) {
            let _ = writeln!(expected, "old\t{id}\t{column}\t{value}");
        }
    }
    assert_eq!(compare(file, &expected), 15);
}

/// MariaDB's old columns with a fraction are longer than the log says: nothing tells their size, so their rows must
/// not pass for others.
#[test]
fn old_temporal_columns_with_a_fraction_are_refused() {
    let mut events = FileEvents::new(include_bytes!("testdata/mariadb-11.4-old-fractions.binlog")).unwrap();
    let (mut shape, mut seen) = (None, None);
    while let Some(bytes) = events.next_event().unwrap() {
        match event::split(bytes, true).unwrap().decode().unwrap() {
            Body::TableMap(body) => shape = Some(table_map::parse(body, true).unwrap()),
            Body::Rows(rows) => {
                let (shape, write) = (shape.as_ref().unwrap(), rows.write().unwrap());
                let mut images = RowImages::new(&write, shape).unwrap();
                seen = Some(loop {
                    match images.next_row(&[], |_, _| Ok::<_, super::Malformed>(())) {
                        Ok(true) => {}
                        end => break end,
                    }
                });
            }
            _ => {}
        }
    }
    assert!(matches!(seen, Some(Err(_))));
}

/// Events as the server sends them to a replica that asked for checksums: one has them from the first event on.
fn sent(events: &[u8]) -> Vec<String> {
    let file = [b"\xfebin".as_slice(), events].concat();
    let mut events = FileEvents::new(&file).unwrap();
    let mut all = Vec::new();
    while let Some(bytes) = events.next_event().unwrap() {
        all.push(match event::split(bytes, true).unwrap().decode().unwrap() {
            Body::Rotate(rotate) => format!("{} {} fake: {}", rotate.file, rotate.position, rotate.fake),
            Body::FormatDescription(format) => format!("{} checksum: {}", format.server_version, format.checksum),
            Body::PreviousGtids(bytes) => format!("before: {}", !GtidSet::decode(bytes).unwrap().is_empty()),
            Body::MariaGtidList(bytes) => format!("before: {}", MariaGtidList::decode(bytes).unwrap()),
            Body::Heartbeat(heartbeat) => format!("heartbeat {} {}", heartbeat.file, heartbeat.position),
            other => format!("{other:?}"),
        });
    }
    all.dedup();
    all
}

#[test]
fn a_connection_begins_with_a_fake_rotate_and_idles_with_heartbeats() {
    let expected =
        ["binlog.000029 4 fake: true", "9.7.4-2 checksum: true", "before: true", "heartbeat binlog.000029 366"];
    assert_eq!(sent(include_bytes!("testdata/mysql-9.7-wire.events")), expected);
    assert_eq!(sent(include_bytes!("testdata/mysql-9.7-wire-heartbeat-v2.events")), expected);
    let expected = [
        "binlog.000025 315 fake: true",
        "11.4.5-MariaDB-log checksum: true",
        "before: 0-2-202,3-2-3",
        "Aside(161)",
        "heartbeat binlog.000025 395",
    ];
    assert_eq!(sent(include_bytes!("testdata/mariadb-11.4-wire.events")), expected);
}

/// Decodes what can be decoded, and renders what can be rendered.
fn survive(tables: &mut HashMap<u64, TableShape>, bytes: &[u8], mariadb: bool) {
    let (mut plain, mut out) = (Vec::new(), Vec::new());
    match event::split(bytes, false).map(|event| event.decode()) {
        Ok(Ok(Body::TableMap(body))) => {
            if let Ok(shape) = table_map::parse(body, mariadb) {
                tables.insert(shape.table_id, shape);
            }
        }
        Ok(Ok(Body::Rows(rows))) => {
            let (Some(shape), Ok(mut write)) = (tables.get(&rows.table_id), rows.write()) else { return };
            if rows.compressed && expand(write.rows, CAP, &mut plain).is_ok() {
                write.rows = &plain;
            }
            let Ok(mut images) = RowImages::new(&write, shape) else { return };
            let wanted: Vec<_> = (0..shape.columns.len()).collect();
            let mut visit = |at: usize, value: Value<'_>| {
                if let Value::Bytes(raw) = value {
                    out.clear();
                    let _ = render(&shape.columns[at], Want::Text, raw, &mut out);
                    let _ = render(&shape.columns[at], Want::Time, raw, &mut out);
                }
                Ok::<_, BadValue>(())
            };
            while let Ok(true) = images.next_row(&wanted, &mut visit) {}
        }
        Ok(Ok(Body::TransactionPayload(body))) => {
            let inflater = Inflater::new().unwrap();
            let Ok(mut events) = inflater.open(&Bytes::copy_from_slice(body), CAP) else { return };
            while let Ok(Some(bytes)) = events.next_event() {
                survive(tables, bytes, mariadb);
            }
        }
        _ => {}
    }
}

proptest! {
    #[test]
    fn a_damaged_recording_never_panics(
        which in 0usize..4,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
    ) {
        let file: &[u8] = [
            include_bytes!("testdata/mysql-9.7-types.binlog").as_slice(),
            include_bytes!("testdata/mariadb-11.4-types.binlog"),
            include_bytes!("testdata/mysql-9.7-compressed.binlog"),
            include_bytes!("testdata/mariadb-11.4-compressed.binlog"),
        ][which];
        let mut events = FileEvents::new(file).unwrap();
        let mut at = 4;
        let mut tables = HashMap::new();
        while let Some(bytes) = events.next_event().unwrap() {
            // Only bodies are damaged, and without their checksum, so that the damage is met by the decoders.
            let mut bytes = bytes[..bytes.len() - 4].to_vec();
            let size = bytes.len() as u32;
            bytes[9..13].copy_from_slice(&size.to_le_bytes());
            for (place, byte) in &damage {
                let place = place.index(file.len()).wrapping_sub(at);
                if place >= event::HEADER_BYTES && place < bytes.len() {
                    bytes[place] = *byte;
                }
            }
            survive(&mut tables, &bytes, which % 2 == 1);
            at += bytes.len() + 4;
        }
    }
}
