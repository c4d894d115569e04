//! Whatever bytes a server sends as an event of the binary log, as a table map or as rows, the codec answers with what
//! they mean or with an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outboxd::event::Want;
use outboxd::source::mysql::compressed::{Inflater, expand};
use outboxd::source::mysql::event::{Body, HEADER_BYTES, WriteRows, split};
use outboxd::source::mysql::gtid::{GtidSet, MariaGtidList};
use outboxd::source::mysql::query::{classify, mentions};
use outboxd::source::mysql::rows::{RowImages, Value};
use outboxd::source::mysql::table_map::{self, TableShape};
use outboxd::source::mysql::values::{BadValue, render};

const CAP: usize = 1 << 20;

fuzz_target!(|input: (u8, bool, &[u8], &[u8], &[u8])| {
    let (type_code, mariadb, body, map, rows) = input;
    let _ = split(body, true);
    // Framed, so that the decoders are met more often than the checks of the frame.
    let mut framed = vec![0; HEADER_BYTES];
    framed[4] = type_code;
    framed[9..13].copy_from_slice(&((HEADER_BYTES + body.len()) as u32).to_le_bytes());
    framed.extend_from_slice(body);
    if let Ok(event) = split(&framed, false)
        && let Ok(body) = event.decode()
    {
        follow(body);
    }
    let named = [b"\x01\0\0\0\0\0\x01\0\x01d\0\x01t\0".as_slice(), map].concat();
    let _ = table_map::parse(map, mariadb);
    if let Ok(shape) = table_map::parse(&named, mariadb) {
        read(&shape, rows);
    }
});

fn follow(body: Body<'_>) {
    let mut out = Vec::new();
    match body {
        Body::Query(query) | Body::LoadData(query) => {
            let _ = (classify(query.sql), mentions(query.sql, "outbox"));
        }
        Body::CompressedQuery(query) => {
            let _ = expand(query.sql, CAP, &mut out);
        }
        Body::PreviousGtids(bytes) => {
            if let Ok(set) = GtidSet::decode(bytes) {
                assert_eq!(set.to_string().parse(), Ok(set));
            }
        }
        Body::MariaGtidList(bytes) => {
            if let Ok(list) = MariaGtidList::decode(bytes) {
                assert_eq!(list.to_string().parse(), Ok(list));
            }
        }
        Body::Rows(rows) => {
            if let Ok(write) = rows.write() {
                let _ = expand(write.rows, CAP, &mut out);
            }
        }
        Body::TransactionPayload(bytes) => {
            let Ok(inflater) = Inflater::new() else { return };
            let Ok(mut events) = inflater.open(&bytes::Bytes::copy_from_slice(bytes), CAP) else { return };
            while let Ok(Some(event)) = events.next_event() {
                let _ = split(event, false);
            }
        }
        _ => {}
    }
}

/// All columns are there; the rest is the rows'.
fn read(shape: &TableShape, rows: &[u8]) {
    let present = vec![0xff; shape.columns.len().div_ceil(8)];
    let write = WriteRows { columns: shape.columns.len(), present: &present, rows };
    let wanted: Vec<_> = (0..shape.columns.len()).collect();
    let Ok(mut images) = RowImages::new(&write, shape) else { return };
    let mut out = Vec::new();
    let mut visit = |place: usize, value: Value<'_>| {
        if let Value::Bytes(raw) = value {
            out.clear();
            let _ = render(&shape.columns[place], Want::Text, raw, &mut out);
            let _ = render(&shape.columns[place], Want::Time, raw, &mut out);
        }
        Ok::<_, BadValue>(())
    };
    while let Ok(true) = images.next_row(&wanted, &mut visit) {}
}
