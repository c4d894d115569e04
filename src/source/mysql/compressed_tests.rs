use std::io::Write as _;

use proptest::prelude::*;

use super::*;

/// An event of this size, filled with its number.
fn event(size: usize, fill: u8) -> Vec<u8> {
    let mut bytes = vec![fill; size];
    bytes[9..13].copy_from_slice(&(size as u32).to_le_bytes());
    bytes
}

fn payload(plain: &[u8], compressed: &[u8], algorithm: u8) -> Vec<u8> {
    let mut body = vec![2, if algorithm == 255 { 3 } else { 1 }];
    if algorithm == 255 {
        body.extend_from_slice(&[0xfc, 255, 0]);
    } else {
        body.push(algorithm);
    }
    for (field, number) in [(1u8, compressed.len()), (3, plain.len())] {
        body.extend_from_slice(&[field, 9, 0xfe]);
        body.extend_from_slice(&(number as u64).to_le_bytes());
    }
    body.push(0);
    body.extend_from_slice(compressed);
    body
}

fn inner(body: &[u8], cap: usize) -> Result<Vec<Vec<u8>>, ExpandError> {
    let mut inflater = Inflater::new().unwrap();
    let mut all = Vec::new();
    // Twice, to see that the second transaction knows nothing of the first.
    for _ in 0..2 {
        all.clear();
        let mut events = inflater.open(&Bytes::copy_from_slice(body), cap)?;
        while let Some(event) = events.next_event()? {
            all.push(event.to_vec());
        }
        inflater = events.into_inflater();
    }
    Ok(all)
}

#[test]
fn every_event_of_a_compressed_transaction_comes_out() {
    let events = vec![event(19, 1), event(100, 2), event(300_000, 3), event(20, 4)];
    let plain = events.concat();
    let compressed = zstd::bulk::compress(&plain, 3).unwrap();
    assert_eq!(inner(&payload(&plain, &compressed, 0), 1 << 20).unwrap(), events);
    assert_eq!(inner(&payload(&plain, &plain, 255), 1 << 20).unwrap(), events);
    let halves = [zstd::bulk::compress(&plain[..60], 3).unwrap(), zstd::bulk::compress(&plain[60..], 3).unwrap()];
    assert_eq!(inner(&payload(&plain, &halves.concat(), 0), 1 << 20).unwrap(), events);
}

#[test]
fn what_is_cut_off_or_too_large_is_refused() {
    let plain = [event(19, 1), event(5000, 2)].concat();
    let compressed = zstd::bulk::compress(&plain, 3).unwrap();
    let whole = payload(&plain, &compressed, 0);
    assert!(matches!(inner(&whole, 4999), Err(ExpandError::TooLarge { size: 5000, cap: 4999 })));
    assert!(inner(&whole[..whole.len() - 1], 1 << 20).is_err());
    assert!(inner(&payload(&plain, &compressed[..compressed.len() - 1], 0), 1 << 20).is_err());
    assert!(inner(&payload(&plain, &[], 0), 1 << 20).is_err());
    assert!(inner(&payload(&[], &zstd::bulk::compress(&[], 3).unwrap(), 0), 1 << 20).is_err());
    assert!(inner(&payload(&plain, &plain[..5000], 255), 1 << 20).is_err());
    assert!(inner(&payload(&plain[..5000], &zstd::bulk::compress(&plain[..5000], 3).unwrap(), 0), 1 << 20).is_err());
    assert!(matches!(
        inner(&payload(&plain[..100], &compressed, 0), 1 << 20),
        Err(ExpandError::PlainSize { said: 100, found: 5019 })
    ));
    assert!(inner(&payload(&plain, &compressed, 9), 1 << 20).is_err());
    assert!(matches!(inner(&payload(&plain, b"not zstd at all", 0), 1 << 20), Err(ExpandError::Zstd(_))));
}

fn zlib(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn mariadb_bytes_expand_to_exactly_what_they_say() {
    let plain = vec![7; 70_000];
    let head = |size: u32| [[0x83].as_slice(), &size.to_be_bytes()[1..], &zlib(&plain)].concat();
    let mut out = b"left from before".to_vec();
    expand(&head(70_000), 1 << 20, &mut out).unwrap();
    assert_eq!(out, plain);
    assert!(expand(&head(69_999), 1 << 20, &mut out).is_err());
    assert!(expand(&head(70_001), 1 << 20, &mut out).is_err());
    assert!(matches!(expand(&head(70_000), 1000, &mut out), Err(ExpandError::TooLarge { .. })));
    let whole = head(70_000);
    assert!(expand(&whole[..whole.len() - 5], 1 << 20, &mut out).is_err());
    assert!(expand(&[], 1000, &mut out).is_err());
    assert!(expand(&[0x03, 0, 0, 1, 0], 1000, &mut out).is_err());
    assert!(expand(&[0x93, 0, 0, 1, 0], 1000, &mut out).is_err());
}

proptest! {
    #[test]
    fn arbitrary_payloads_never_panic(bytes: Vec<u8>, plain: Vec<u8>) {
        let _ = inner(&bytes, 4096);
        let _ = inner(&payload(&plain, &plain, 255), 4096);
        let _ = inner(&payload(&plain, &zstd::bulk::compress(&plain, 1).unwrap(), 0), 4096);
        let _ = expand(&bytes, 4096, &mut Vec::new());
        let _ = expand_column(&bytes, &mut Vec::new());
        let _ = expand_column(&[[0x81, 200].as_slice(), &bytes].concat(), &mut Vec::new());
    }
}
