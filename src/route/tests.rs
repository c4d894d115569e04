use super::*;
use crate::event::{Commit, CommitId, Field, Micros};

fn plan(options: &RouteSettings) -> (Plan, Projection) {
    let mut projection = Projection::default();
    (Plan::compile(options, &mut projection).unwrap(), projection)
}

fn native() -> RouteSettings {
    RouteSettings { layout: "native".to_owned(), ..RouteSettings::default() }
}

/// A chunk with one event whose columns are given by name.
fn event(projection: &Projection, columns: &[(&str, Option<&[u8]>)]) -> Chunk {
    let mut chunk = Chunk::default();
    chunk.reset(projection.width());
    chunk.begin_commit(Commit { id: CommitId::Snapshot, committed_at: Micros(5_000_000) });
    chunk.push_event(0);
    for (slot, name, _) in projection.columns() {
        match columns.iter().find(|(column, _)| *column == name) {
            Some((_, Some(bytes))) => chunk.render_field(slot, |out| out.extend_from_slice(bytes)),
            Some((_, None)) => chunk.set_field(slot, Field::Null),
            None => {}
        }
    }
    chunk
}

type Owned = (String, Option<Vec<u8>>, Option<Vec<u8>>, Vec<(String, Option<String>)>, i64);

fn route(options: &RouteSettings, columns: &[(&str, Option<&[u8]>)]) -> Result<Owned, Unroutable> {
    let (plan, projection) = plan(options);
    let mut router = Router::new(plan);
    let chunk = event(&projection, columns);
    let record = router.route(&chunk, &chunk.events()[0])?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let headers = record.headers.iter().map(|(name, value)| (name.to_owned(), value.map(text))).collect();
    let (key, value) = (record.key.map(<[u8]>::to_vec), record.value.map(<[u8]>::to_vec));
    Ok((record.topic.to_owned(), key, value, headers, record.timestamp_millis))
}

const ROW: &[(&str, Option<&[u8]>)] = &[
    ("id", Some(b"7f")),
    ("topic", Some(b"orders")),
    ("partition_key", Some(b"customer-1")),
    ("event_type", Some(b"OrderPlaced")),
    ("payload", Some(br#"{"customer":{"id":17,"name":"A\"B"}}"#)),
    ("headers", Some(br#"{"trace":"a\u0062c","n":12,"none":null,"deep":{"x":[1]}}"#)),
];

fn with(name: &'static str, value: Option<&'static [u8]>) -> Vec<(&'static str, Option<&'static [u8]>)> {
    ROW.iter().map(|(column, old)| (*column, if *column == name { value } else { *old })).collect()
}

#[test]
fn a_native_row_becomes_a_record() {
    let (topic, key, value, headers, timestamp) = route(&native(), ROW).unwrap();
    assert_eq!(topic, "orders");
    assert_eq!(key.as_deref(), Some(&b"customer-1"[..]));
    assert_eq!(value.as_deref(), ROW[4].1);
    let expected = [
        ("id", Some("7f")),
        ("event_type", Some("OrderPlaced")),
        ("trace", Some("abc")),
        ("n", Some("12")),
        ("none", None),
        ("deep", Some(r#"{"x":[1]}"#)),
    ];
    let expected: Vec<_> = expected.iter().map(|(n, v)| ((*n).to_owned(), v.map(str::to_owned))).collect();
    assert_eq!(headers, expected);
    assert_eq!(timestamp, 5000, "without a timestamp column it is the commit time");
}

#[test]
fn a_debezium_row_goes_where_the_router_sends_it() {
    let options = RouteSettings {
        layout: "debezium".to_owned(),
        headers: vec![("eventType".to_owned(), "type".to_owned())],
        ..RouteSettings::default()
    };
    let row: &[(&str, Option<&[u8]>)] = &[
        ("id", Some(b"1")),
        ("aggregatetype", Some(b"Order")),
        ("aggregateid", None),
        ("type", Some(b"Placed")),
        ("payload", Some(b"{}")),
    ];
    let (topic, key, value, headers, _) = route(&options, row).unwrap();
    assert_eq!(topic, "outbox.event.Order");
    assert_eq!(key, None, "null keys are allowed");
    assert_eq!(value.as_deref(), Some(&b"{}"[..]));
    let expected = [("id", "1"), ("eventType", "Placed")];
    assert_eq!(headers, expected.map(|(n, v)| (n.to_owned(), Some(v.to_owned()))).to_vec());
}

#[test]
fn a_pointer_takes_its_value_from_the_payload() {
    let pointer = |pointer: &str| RouteSettings { columns: vec![("key".to_owned(), pointer.to_owned())], ..native() };
    let key = |path| route(&pointer(path), ROW).unwrap().1.map(|key| String::from_utf8(key).unwrap());
    assert_eq!(key("/customer/id").as_deref(), Some("17"));
    assert_eq!(key("/customer/name").as_deref(), Some("A\"B"));
    assert_eq!(key("/customer").as_deref(), Some(r#"{"id":17,"name":"A\"B"}"#));
    assert_eq!(key("/nowhere"), None);
    let broken = route(&pointer("/customer/id"), &with("payload", Some(b"{")));
    assert!(matches!(broken, Err(Unroutable::NotJson(..))), "{broken:?}");
}

#[test]
fn a_topic_template_takes_roles_and_columns() {
    let to = |topic: &str| {
        let options = RouteSettings { topic: Some(topic.to_owned()), ..native() };
        route(&options, ROW).map(|record| record.0)
    };
    assert_eq!(to("fixed").unwrap(), "fixed");
    assert_eq!(to("a.{event_type}.{key}").unwrap(), "a.OrderPlaced.customer-1");
    assert_eq!(to("{type}").unwrap(), "OrderPlaced");
    assert_eq!(to("c{/customer/id}").unwrap(), "c17");
}

#[test]
fn an_event_without_a_good_topic_is_unroutable() {
    let null = route(&native(), &with("topic", None));
    assert_eq!(null.unwrap_err(), Unroutable::NullTopic("topic".to_owned()));
    for topic in ["a b", "", "..", "ü"] {
        let bytes: &'static [u8] = topic.as_bytes();
        let bad = route(&native(), &with("topic", Some(bytes)));
        assert_eq!(bad.unwrap_err(), Unroutable::BadTopic(topic.to_owned()));
    }
}

#[test]
fn a_null_payload_is_a_tombstone_only_when_asked() {
    let value = |tombstone, payload| {
        let options = RouteSettings { tombstone_on_null: tombstone, ..native() };
        route(&options, &with("payload", payload)).unwrap().2
    };
    assert_eq!(value(false, None).as_deref(), Some(&b"null"[..]));
    assert_eq!(value(true, None), None);
    assert_eq!(value(true, Some(b" \n")), None);
    assert_eq!(value(false, Some(b" \n")).as_deref(), Some(&b" \n"[..]));
}

#[test]
fn headers_that_are_no_object_make_the_event_unroutable() {
    for headers in [&b"[1]"[..], b"12", b"{", br#"{"a":1} x"#] {
        let bad = route(&native(), &with("headers", Some(headers)));
        assert!(matches!(bad, Err(Unroutable::BadHeaders(_))), "{bad:?}");
    }
    assert_eq!(route(&native(), &with("headers", Some(b"null"))).unwrap().3.len(), 2);
}

#[test]
fn the_timestamp_column_beats_the_commit_time() {
    let row = [ROW, &[("created_at", Some(&[0, 0, 0, 0, 0, 15, 66, 64][..]))]].concat();
    assert_eq!(route(&native(), &row).unwrap().4, 1000);
}

#[test]
fn mistakes_in_the_plan_are_told() {
    let wrong = |options: RouteSettings| Plan::compile(&options, &mut Projection::default()).unwrap_err().to_string();
    let pair = |a: &str, b: &str| vec![(a.to_owned(), b.to_owned())];
    assert!(wrong(RouteSettings { layout: "nativ".to_owned(), ..native() }).contains("native, debezium"));
    assert!(wrong(RouteSettings { columns: pair("kye", "x"), ..native() }).contains("no role"));
    assert!(wrong(RouteSettings { columns: pair("payload", "/x"), ..native() }).contains("pointer"));
    assert!(wrong(RouteSettings { topic: Some("a{b".to_owned()), ..native() }).contains("brace"));
    assert!(wrong(RouteSettings { topic: Some("a b".to_owned()), ..native() }).contains("not a name"));
}

#[test]
fn only_what_the_plan_uses_is_projected_and_required() {
    let (plan, projection) = plan(&RouteSettings { topic: Some("t".to_owned()), ..native() });
    let columns: Vec<_> = projection.columns().map(|(_, name, _)| name).collect();
    assert!(!columns.contains(&"topic"));
    assert_eq!(projection.required().collect::<Vec<_>>(), ["payload", "partition_key", "id"]);
    assert_eq!(plan.fixed_topic(), Some("t"));
}
