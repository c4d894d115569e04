use proptest::prelude::*;

use super::*;

fn event(type_code: u8, flags: u16, body: &[u8], checksum: bool) -> Vec<u8> {
    let size = HEADER_BYTES + body.len() + if checksum { CHECKSUM_BYTES } else { 0 };
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&7u32.to_le_bytes());
    bytes.push(type_code);
    bytes.extend_from_slice(&1u32.to_le_bytes());
    bytes.extend_from_slice(&(size as u32).to_le_bytes());
    bytes.extend_from_slice(&500u32.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(body);
    if checksum {
        bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
    }
    bytes
}

#[test]
fn a_damaged_event_is_noticed() {
    let sound = event(kind::XID, 0, &9u64.to_le_bytes(), true);
    assert_eq!(split(&sound, true).unwrap().decode(), Ok(Body::Xid(9)));
    for at in HEADER_BYTES..sound.len() {
        let mut damaged = sound.clone();
        damaged[at] ^= 1;
        assert!(matches!(split(&damaged, true), Err(Malformed::Checksum { .. })), "byte {at}");
    }
    assert!(matches!(split(&sound[..30], true), Err(Malformed::WrongSize { .. })));
    assert!(matches!(split(&sound[..10], true), Err(Malformed::Truncated(_))));
    assert!(matches!(split(&event(kind::STOP, 0, &[], false), true), Err(Malformed::Truncated(_))));
}

#[test]
fn an_unknown_event_is_never_passed_over_unless_marked() {
    let unknown = event(99, 0, b"rows?", false);
    assert_eq!(split(&unknown, false).unwrap().decode(), Ok(Body::Unknown { type_code: 99 }));
    let harmless = event(43, FLAG_IGNORABLE, b"", false);
    assert_eq!(split(&harmless, false).unwrap().decode(), Ok(Body::Ignorable(43)));
    let retired = event(20, 0, b"rows of MySQL 5.1.15", false);
    assert_eq!(split(&retired, false).unwrap().decode(), Ok(Body::Unknown { type_code: 20 }));
}

#[test]
fn a_rotate_without_a_place_in_a_file_is_fake() {
    let body = b"\x04\0\0\0\0\0\0\0binlog.000002";
    let decode = |flags| match split(&event(kind::ROTATE, flags, body, false), false).unwrap().decode() {
        Ok(Body::Rotate(rotate)) => (rotate.file.to_owned(), rotate.position, rotate.fake),
        other => panic!("{other:?}"),
    };
    assert_eq!(decode(0), ("binlog.000002".into(), 4, false));
    assert_eq!(decode(FLAG_ARTIFICIAL), ("binlog.000002".into(), 4, true));
}

#[test]
fn heartbeats_of_both_versions_say_where_the_log_ends() {
    let v1 = event(kind::HEARTBEAT, 0, b"log.1", false);
    let expected = Ok(Body::Heartbeat(Heartbeat { file: "log.1", position: 500 }));
    assert_eq!(split(&v1, false).unwrap().decode(), expected);
    let v2 = event(kind::HEARTBEAT_V2, 0, b"\x01\x05log.1\x02\x03\xfc\x88\x13\0", false);
    let expected = Ok(Body::Heartbeat(Heartbeat { file: "log.1", position: 5000 }));
    assert_eq!(split(&v2, false).unwrap().decode(), expected);
}

proptest! {
    #[test]
    fn arbitrary_events_never_panic(type_code: u8, flags: u16, body: Vec<u8>, checksum: bool) {
        let _ = split(&body, checksum);
        let _ = FileEvents(&body).next_event();
        let bytes = event(type_code, flags, &body, checksum);
        if let Ok(event) = split(&bytes, checksum)
            && let Ok(Body::Rows(rows)) = event.decode()
        {
            let _ = rows.write();
        }
    }

    #[test]
    fn arbitrary_transaction_headers_never_panic(
        type_code in prop::sample::select(vec![
            kind::GTID, kind::TAGGED_GTID, kind::ANONYMOUS_GTID, kind::MARIA_GTID, kind::XA_PREPARE, kind::INCIDENT,
            kind::QUERY, kind::EXECUTE_LOAD_QUERY, kind::FORMAT_DESCRIPTION, kind::HEARTBEAT_V2, kind::WRITE_ROWS_V2,
        ]),
        body in prop::collection::vec(any::<u8>(), 0..120),
    ) {
        let _ = split(&event(type_code, 0, &body, false), false).map(|event| event.decode().is_ok());
        let tagged = [b"\x02\x00\x00".as_slice(), &body].concat();
        let _ = split(&event(kind::TAGGED_GTID, 0, &tagged, false), false).map(|event| event.decode().is_ok());
    }
}
