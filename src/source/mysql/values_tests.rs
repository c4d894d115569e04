use proptest::prelude::*;

use super::super::table_map::Storage;
use super::*;

fn column(kind: u8, meta: u16) -> ColumnShape {
    ColumnShape {
        name: None,
        kind,
        meta,
        storage: Storage::Fixed(0),
        unsigned: false,
        nullable: true,
        collation: Some(255),
        members: None,
        visible: true,
    }
}

fn show(column: &ColumnShape, raw: &[u8]) -> Result<String, BadValue> {
    let mut out = Vec::new();
    Ok(match render(column, Want::Text, raw, &mut out)? {
        Rendered::Borrowed(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Rendered::Written => String::from_utf8_lossy(&out).into_owned(),
    })
}

#[test]
fn integers_know_their_sign() {
    let unsigned = |kind| ColumnShape { unsigned: true, ..column(kind, 0) };
    assert_eq!(show(&column(TINY, 0), &[0xff]).as_deref(), Ok("-1"));
    assert_eq!(show(&unsigned(TINY), &[0xff]).as_deref(), Ok("255"));
    assert_eq!(show(&column(INT24, 0), &[0, 0, 0x80]).as_deref(), Ok("-8388608"));
    assert_eq!(show(&unsigned(LONGLONG), &[0xff; 8]).as_deref(), Ok("18446744073709551615"));
    assert_eq!(show(&column(LONGLONG, 0), &i64::MIN.to_le_bytes()).as_deref(), Ok("-9223372036854775808"));
}

#[test]
fn members_are_named_or_asked_for() {
    let colour = ColumnShape { members: Some(vec!["red".into(), "green".into()]), ..column(ENUM, 0) };
    assert_eq!(show(&colour, &[2]).as_deref(), Ok("green"));
    assert_eq!(show(&colour, &[0]).as_deref(), Ok(""));
    assert_eq!(show(&colour, &[3]), Err(BadValue::WrongForm));
    assert_eq!(show(&ColumnShape { kind: SET, ..colour.clone() }, &[3]).as_deref(), Ok("red,green"));
    assert_eq!(show(&ColumnShape { kind: SET, ..colour }, &[4]), Err(BadValue::WrongForm));
    assert_eq!(show(&column(ENUM, 0), &[1]), Err(BadValue::MembersUnknown));
}

#[test]
fn strings_stay_where_they_lie_when_they_can() {
    let mut out = Vec::new();
    assert_eq!(render(&column(VARCHAR, 9), Want::Text, b"abc", &mut out), Ok(Rendered::Borrowed(b"abc")));
    let binary = ColumnShape { collation: Some(63), ..column(STRING, 4) };
    assert_eq!(render(&binary, Want::Text, b"ab\0\0", &mut out), Ok(Rendered::Borrowed(b"ab\0\0")));
    assert_eq!(render(&binary, Want::Text, b"ab", &mut out), Ok(Rendered::Written));
    assert_eq!(out, b"ab\0\0");
    let unknown = ColumnShape { collation: Some(4), ..column(VARCHAR, 9) };
    assert_eq!(render(&unknown, Want::Text, b"ab", &mut out), Err(BadValue::UnknownCharset(4)));
    assert_eq!(out, b"ab\0\0");
}

#[test]
fn moments_are_microseconds_since_the_epoch() {
    let micros = |column: &ColumnShape, raw: &[u8]| {
        let mut out = Vec::new();
        render(column, Want::Time, raw, &mut out)?;
        Ok::<_, BadValue>(i64::from_be_bytes(out.try_into().unwrap()))
    };
    assert_eq!(micros(&column(TIMESTAMP2, 6), &[0, 0, 0, 1, 0, 0, 5]), Ok(1_000_005));
    assert_eq!(micros(&column(DATE, 0), &((1970u32 << 9 | 1 << 5 | 2).to_le_bytes()[..3])), Ok(86_400_000_000));
    assert_eq!(micros(&column(DATE, 0), &[0; 3]), Err(BadValue::NoMoment));
    assert_eq!(micros(&column(LONGLONG, 0), &1_700_000_000_123i64.to_le_bytes()), Ok(1_700_000_000_123_000));
    assert_eq!(micros(&column(VARCHAR, 40), b"1970-01-01T00:00:01Z"), Ok(1_000_000));
    assert_eq!(micros(&column(VARCHAR, 40), b"soon"), Err(BadValue::NoMoment));
}

#[test]
fn binary_strings_read_as_their_declared_type() {
    let show = |name: &str, raw: &[u8]| {
        let mut out = Vec::new();
        render_declared(Declared::by_name(name).unwrap(), raw, &mut out).map(|()| String::from_utf8(out).unwrap())
    };
    assert_eq!(show("UUID", &[0x12, 0x34]).as_deref(), Ok("12340000-0000-0000-0000-000000000000"));
    assert_eq!(show("inet4", &[10, 0, 0]).as_deref(), Ok("10.0.0.0"));
    assert_eq!(show("inet6", &[0x20, 1, 0x0d, 0xb8]).as_deref(), Ok("2001:db8::"));
    assert_eq!(show("inet4", &[1; 5]), Err(BadValue::WrongForm));
    assert_eq!(Declared::by_name("text"), None);
}

proptest! {
    #[test]
    fn arbitrary_values_never_panic(kind: u8, meta: u16, unsigned: bool, collation in 0u16..300, raw: Vec<u8>) {
        let members = Some(vec!["a".to_owned(), "b".to_owned()]);
        let column = ColumnShape { unsigned, collation: Some(collation), members, ..column(kind, meta) };
        for want in [Want::Text, Want::Time] {
            let mut out = b"before".to_vec();
            if render(&column, want, &raw, &mut out).is_err() {
                prop_assert_eq!(&out, b"before");
            }
        }
        let _ = render_uuid(&raw, &mut Vec::new());
    }

    #[test]
    fn arbitrary_temporal_bytes_never_panic(kind in prop::sample::select(vec![
        TIMESTAMP, DATE, TIME, DATETIME, YEAR, NEWDATE, TIMESTAMP2, DATETIME2, TIME2,
    ]), meta in 0u16..7, raw in prop::collection::vec(any::<u8>(), 0..9)) {
        let _ = render(&column(kind, meta), Want::Text, &raw, &mut Vec::new());
        let _ = render(&column(kind, meta), Want::Time, &raw, &mut Vec::new());
    }
}
