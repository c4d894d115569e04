use mongodb::bson::oid::ObjectId;
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Binary, Bson, DateTime, JavaScriptCodeWithScope, Regex, Timestamp, doc, rawdoc};
use proptest::prelude::*;

use super::*;

fn written(value: impl Into<Bson>, form: ExtendedJson) -> String {
    let document = doc! { "v": value.into() }.to_vec().unwrap();
    let raw = RawDocument::from_bytes(&document).unwrap();
    let mut out = Vec::new();
    write(raw.get("v").unwrap().unwrap(), form, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn plain(value: impl Into<Bson>) -> Vec<u8> {
    let document = doc! { "v": value.into() }.to_vec().unwrap();
    let raw = RawDocument::from_bytes(&document).unwrap();
    let mut out = Vec::new();
    write_plain(raw.get("v").unwrap().unwrap(), ExtendedJson::Relaxed, &mut out).unwrap();
    out
}

fn binary(subtype: BinarySubtype, bytes: &[u8]) -> Bson {
    Bson::Binary(Binary { subtype, bytes: bytes.to_vec() })
}

/// The table of docs/mongodb.md.
fn every_type() -> Vec<(&'static str, Bson, &'static str, &'static str)> {
    let id = ObjectId::parse_str("6553b0c2a1b2c3d4e5f60718").unwrap();
    vec![
        ("string", "a \"b\"\n€".into(), r#""a \"b\"\n€""#, r#""a \"b\"\n€""#),
        ("bool", true.into(), "true", "true"),
        ("null", Bson::Null, "null", "null"),
        ("int32", 42_i32.into(), "42", r#"{"$numberInt":"42"}"#),
        ("int64", 9_007_199_254_740_993_i64.into(), "9007199254740993", r#"{"$numberLong":"9007199254740993"}"#),
        ("double", 1.5.into(), "1.5", r#"{"$numberDouble":"1.5"}"#),
        ("whole double", 3.0.into(), "3.0", r#"{"$numberDouble":"3.0"}"#),
        ("negative zero", (-0.0).into(), "-0.0", r#"{"$numberDouble":"-0.0"}"#),
        ("not a number", f64::NAN.into(), r#"{"$numberDouble":"NaN"}"#, r#"{"$numberDouble":"NaN"}"#),
        ("infinity", f64::NEG_INFINITY.into(), r#"{"$numberDouble":"-Infinity"}"#, r#"{"$numberDouble":"-Infinity"}"#),
        (
            "decimal128",
            Bson::Decimal128("12345.6700".parse().unwrap()),
            r#"{"$numberDecimal":"12345.6700"}"#,
            r#"{"$numberDecimal":"12345.6700"}"#,
        ),
        ("objectId", id.into(), r#"{"$oid":"6553b0c2a1b2c3d4e5f60718"}"#, r#"{"$oid":"6553b0c2a1b2c3d4e5f60718"}"#),
        (
            "date",
            DateTime::from_millis(1_700_000_000_123).into(),
            r#"{"$date":"2023-11-14T22:13:20.123Z"}"#,
            r#"{"$date":{"$numberLong":"1700000000123"}}"#,
        ),
        (
            "date of whole seconds",
            DateTime::from_millis(1_700_000_000_000).into(),
            r#"{"$date":"2023-11-14T22:13:20Z"}"#,
            r#"{"$date":{"$numberLong":"1700000000000"}}"#,
        ),
        (
            "date before 1970",
            DateTime::from_millis(-1).into(),
            r#"{"$date":{"$numberLong":"-1"}}"#,
            r#"{"$date":{"$numberLong":"-1"}}"#,
        ),
        (
            "binary",
            binary(BinarySubtype::Generic, b"\x00\x01\xfe"),
            r#"{"$binary":{"base64":"AAH+","subType":"00"}}"#,
            r#"{"$binary":{"base64":"AAH+","subType":"00"}}"#,
        ),
        (
            "uuid",
            binary(BinarySubtype::Uuid, &[0x11; 16]),
            r#"{"$binary":{"base64":"EREREREREREREREREREREQ==","subType":"04"}}"#,
            r#"{"$binary":{"base64":"EREREREREREREREREREREQ==","subType":"04"}}"#,
        ),
        (
            "regex",
            Bson::RegularExpression(Regex { pattern: "^a\"b".try_into().unwrap(), options: "im".try_into().unwrap() }),
            r#"{"$regularExpression":{"pattern":"^a\"b","options":"im"}}"#,
            r#"{"$regularExpression":{"pattern":"^a\"b","options":"im"}}"#,
        ),
        (
            "timestamp",
            Timestamp { time: 7, increment: 3 }.into(),
            r#"{"$timestamp":{"t":7,"i":3}}"#,
            r#"{"$timestamp":{"t":7,"i":3}}"#,
        ),
        ("javascript", Bson::JavaScriptCode("f()".into()), r#"{"$code":"f()"}"#, r#"{"$code":"f()"}"#),
        (
            "javascript with scope",
            Bson::JavaScriptCodeWithScope(JavaScriptCodeWithScope { code: "f()".into(), scope: doc! { "x": 1 } }),
            r#"{"$code":"f()","$scope":{"x":1}}"#,
            r#"{"$code":"f()","$scope":{"x":{"$numberInt":"1"}}}"#,
        ),
        ("symbol", Bson::Symbol("s".into()), r#"{"$symbol":"s"}"#, r#"{"$symbol":"s"}"#),
        ("min key", Bson::MinKey, r#"{"$minKey":1}"#, r#"{"$minKey":1}"#),
        ("max key", Bson::MaxKey, r#"{"$maxKey":1}"#, r#"{"$maxKey":1}"#),
        ("undefined", Bson::Undefined, r#"{"$undefined":true}"#, r#"{"$undefined":true}"#),
        (
            "document and array",
            doc! { "a": [1, { "b": [] }], "c": {} }.into(),
            r#"{"a":[1,{"b":[]}],"c":{}}"#,
            r#"{"a":[{"$numberInt":"1"},{"b":[]}],"c":{}}"#,
        ),
    ]
}

#[test]
fn every_type_is_written_as_the_table_says() {
    for (name, value, relaxed, canonical) in every_type() {
        assert_eq!(written(value.clone(), ExtendedJson::Relaxed), relaxed, "{name}, relaxed");
        assert_eq!(written(value, ExtendedJson::Canonical), canonical, "{name}, canonical");
    }
}

#[test]
fn what_is_written_is_read_again_as_the_same() {
    for (name, value, ..) in every_type() {
        let json: serde_json::Value = serde_json::from_str(&written(value.clone(), ExtendedJson::Canonical)).unwrap();
        let back = Bson::try_from(json.clone()).unwrap_or_else(|error| panic!("{name}: {error} in {json}"));
        match (&back, &value) {
            (Bson::Double(back), Bson::Double(value)) if value.is_nan() => assert!(back.is_nan()),
            _ => assert_eq!(back, value, "{name}"),
        }
    }
}

#[test]
fn a_single_value_is_written_as_people_write_it() {
    let id = ObjectId::parse_str("6553b0c2a1b2c3d4e5f60718").unwrap();
    assert_eq!(plain(id), b"6553b0c2a1b2c3d4e5f60718");
    assert_eq!(plain("k\"1"), b"k\"1");
    assert_eq!(plain(7_i32), b"7");
    assert_eq!(plain(7_i64), b"7");
    assert_eq!(plain(7.5), b"7.5");
    assert_eq!(plain(true), b"true");
    assert_eq!(plain(DateTime::from_millis(1_700_000_000_123)), b"2023-11-14T22:13:20.123Z");
    assert_eq!(plain(Bson::Decimal128("1.50".parse().unwrap())), b"1.50");
    assert_eq!(plain(binary(BinarySubtype::Uuid, &[0x11; 16])), b"11111111-1111-1111-1111-111111111111");
    assert_eq!(plain(binary(BinarySubtype::Generic, b"\x00\xff")), b"\x00\xff");
    assert_eq!(plain(doc! { "a": 1 }), br#"{"a":1}"#);
}

#[test]
fn documents_nested_too_deep_are_refused_and_do_not_overflow() {
    let mut nested = rawdoc! {};
    for _ in 0..5_000 {
        nested = rawdoc! { "a": nested };
    }
    let mut out = Vec::new();
    let refused = write(RawBsonRef::Document(&nested), ExtendedJson::Relaxed, &mut out);
    assert!(matches!(refused, Err(Unwritable::TooDeep)));
}

fn any_bson() -> impl Strategy<Value = Bson> {
    let leaf = prop_oneof![
        any::<String>().prop_map(Bson::String),
        any::<bool>().prop_map(Bson::Boolean),
        any::<i32>().prop_map(Bson::Int32),
        any::<i64>().prop_map(Bson::Int64),
        any::<f64>().prop_filter("comparable", |number| !number.is_nan()).prop_map(Bson::Double),
        any::<i64>().prop_map(|millis| Bson::DateTime(DateTime::from_millis(millis))),
        (0_i64..253_402_300_800_000).prop_map(|millis| Bson::DateTime(DateTime::from_millis(millis))),
        any::<[u8; 12]>().prop_map(|bytes| Bson::ObjectId(ObjectId::from_bytes(bytes))),
        any::<(u32, u32)>().prop_map(|(time, increment)| Bson::Timestamp(Timestamp { time, increment })),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(|bytes| binary(BinarySubtype::Generic, &bytes)),
        Just(Bson::Null),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Bson::Array),
            proptest::collection::btree_map("[a-zA-Z€ ]{1,8}", inner, 0..6)
                .prop_map(|members| Bson::Document(members.into_iter().collect())),
        ]
    })
}

proptest! {
    /// The driver reads what was written, and finds what there was.
    #[test]
    fn any_document_survives_being_written_and_read(value in any_bson()) {
        for form in [ExtendedJson::Relaxed, ExtendedJson::Canonical] {
            let text = written(value.clone(), form);
            let json: serde_json::Value = serde_json::from_str(&text).unwrap();
            let back = Bson::try_from(json).unwrap();
            match form {
                ExtendedJson::Canonical => prop_assert_eq!(&back, &value),
                // Relaxed does not tell an int32 from an int64.
                ExtendedJson::Relaxed => prop_assert_eq!(written(back, ExtendedJson::Relaxed), text),
            }
        }
    }
}
