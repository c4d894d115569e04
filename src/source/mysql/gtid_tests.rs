use proptest::prelude::*;

use super::*;

const A: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429562";
const B: &str = "4e11fa47-71ca-11e1-9e33-c80aa9429562";

fn set(text: &str) -> GtidSet {
    text.parse().unwrap()
}

#[test]
fn sets_read_as_the_server_prints_them() {
    for text in ["".to_owned(), format!("{A}:1"), format!("{A}:1-5:7:9-10,{B}:2"), format!("{A}:1-3:one:1-2:two:5")] {
        assert_eq!(set(&text).to_string(), text);
    }
    assert_eq!(set(&format!("{B}:3, {}:5:1-3:4\n", A.to_uppercase())).to_string(), format!("{A}:1-5,{B}:3"));
    assert_eq!(format!("{:#}", set(&format!("{A}:1,{B}:3"))), format!("{A}:1,\n{B}:3"));
    assert_eq!(set(&format!("{A}:TAG:1")).to_string(), format!("{A}:tag:1"));
    for bad in
        ["x", "3e11fa47:1", &format!("{A}:0"), &format!("{A}:1-x"), &format!("{A}:a-b:1"), &format!("{A}:1 {B}:1")]
    {
        assert!(bad.parse::<GtidSet>().is_err(), "{bad}");
    }
}

#[test]
fn the_next_number_extends_the_last_interval() {
    let (mut executed, uuid) = (GtidSet::default(), A.parse().unwrap());
    for gno in [1, 2, 3, 7, 6, 4, 5, 5] {
        executed.insert(uuid, Tag::default(), gno);
    }
    assert_eq!(executed.to_string(), format!("{A}:1-7"));
    assert_eq!(executed.count(), 7);
    assert!(executed.contains(uuid, Tag::default(), 7));
    assert!(!executed.contains(uuid, Tag::default(), 8));
    assert!(!executed.contains(uuid, Tag::parse(b"x").unwrap(), 7));
    let capacity = executed.sources[0].intervals.capacity();
    for gno in 8..1000 {
        executed.insert(uuid, Tag::default(), gno);
    }
    assert_eq!(executed.sources[0].intervals.capacity(), capacity);
}

#[test]
fn sets_are_encoded_as_the_server_does() {
    let mut out = Vec::new();
    set(&format!("{A}:1-5")).encode(&mut out);
    let uuid: Uuid = A.parse().unwrap();
    let mut expected = b"\x01\0\0\0\0\0\0\0".to_vec();
    expected.extend_from_slice(&uuid.0);
    expected.extend_from_slice(b"\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0");
    assert_eq!(out, expected);
    out.clear();
    set(&format!("{A}:ab:1")).encode(&mut out);
    let mut expected = b"\x01\x01\0\0\0\0\0\x01".to_vec();
    expected.extend_from_slice(&uuid.0);
    expected.extend_from_slice(b"\x04ab\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0");
    assert_eq!(out, expected);
}

#[test]
fn a_mariadb_position_holds_the_last_of_each_domain() {
    let mut list: MariaGtidList = "1-2-9, 0-1-5".parse().unwrap();
    assert_eq!(list.to_string(), "0-1-5,1-2-9");
    let id = |domain, server_id, sequence| MariaId { domain, server_id, sequence };
    assert!(list.covers(id(0, 7, 5)) && !list.covers(id(0, 1, 6)) && !list.covers(id(2, 1, 1)));
    list.update(id(0, 7, 6));
    list.update(id(3, 1, 1));
    assert_eq!(list.to_string(), "0-7-6,1-2-9,3-1-1");
    assert!(list.covers_all(&"0-1-5,3-1-1".parse().unwrap()));
    assert!(!list.covers_all(&"4-1-1".parse().unwrap()));
    assert_eq!("".parse(), Ok(MariaGtidList::default()));
    for bad in ["1", "1-2", "1-2-3-4", "a-b-c", "-1-2-3"] {
        assert!(bad.parse::<MariaGtidList>().is_err(), "{bad}");
    }
}

fn any_set() -> impl Strategy<Value = GtidSet> {
    let gtid = (0u8..3, prop::sample::select(vec!["", "a", "b_2"]), 1u64..40, 0u64..6);
    prop::collection::vec(gtid, 0..30).prop_map(|gtids| {
        let mut set = GtidSet::default();
        for (server, tag, first, more) in gtids {
            for gno in first..=first + more {
                set.insert(Uuid([server; 16]), Tag::parse(tag.as_bytes()).unwrap(), gno);
            }
        }
        set
    })
}

fn members(set: &GtidSet) -> std::collections::BTreeSet<(Uuid, String, u64)> {
    set.sources
        .iter()
        .flat_map(|source| {
            let numbers = source.intervals.iter().flat_map(|interval| interval.first..interval.past);
            numbers.map(|gno| (source.uuid, source.tag.to_string(), gno))
        })
        .collect()
}

proptest! {
    #[test]
    fn a_set_survives_its_text_and_its_bytes(set in any_set()) {
        prop_assert_eq!(set.to_string().parse(), Ok(set.clone()));
        prop_assert_eq!(format!("{set:#}").parse(), Ok(set.clone()));
        let mut out = Vec::new();
        set.encode(&mut out);
        prop_assert_eq!(GtidSet::decode(&out), Ok(set));
    }

    #[test]
    fn sets_behave_as_sets(a in any_set(), b in any_set()) {
        let (in_a, in_b) = (members(&a), members(&b));
        let (mut both, mut rest) = (a.clone(), a.clone());
        both.union(&b);
        rest.subtract(&b);
        prop_assert_eq!(members(&both), in_a.union(&in_b).cloned().collect());
        prop_assert_eq!(members(&rest), in_a.difference(&in_b).cloned().collect());
        prop_assert_eq!(a.is_superset_of(&b), in_a.is_superset(&in_b));
        prop_assert!(both.is_superset_of(&a) && both.is_superset_of(&b));
        prop_assert_eq!(a.count(), in_a.len() as u64);
        for (uuid, tag, gno) in in_b {
            let tag = Tag::parse(tag.as_bytes()).unwrap();
            prop_assert!(b.contains(uuid, tag, gno));
            prop_assert_eq!(rest.contains(uuid, tag, gno), false);
        }
    }

    #[test]
    fn arbitrary_sets_never_panic(bytes: Vec<u8>, text: String) {
        let _ = GtidSet::decode(&bytes);
        let _ = MariaGtidList::decode(&bytes);
        let _ = text.parse::<GtidSet>();
        let _ = text.parse::<MariaGtidList>();
        let _ = format!("{A}:{text}").parse::<GtidSet>();
    }
}
