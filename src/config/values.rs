//! The small value languages of the options: durations, sizes in bytes and assignments.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

/// A length of time: `500ms`, `20s`, `5m`, `2h`, `30d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || "a duration is a whole number and a unit: 500ms, 20s, 5m, 2h, 30d".to_owned();
        let (number, unit) = split_unit(text).ok_or_else(malformed)?;
        let millis_per_unit = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(malformed()),
        };
        let millis = number.checked_mul(millis_per_unit).ok_or("this duration is too long")?;
        Ok(Span(Duration::from_millis(millis)))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A number of bytes: `65536`, `512KiB`, `64MiB`, `1GiB`, or with powers of ten `64MB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub usize);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || "a size is a whole number and a unit: 65536, 512KiB, 64MiB, 1GiB, 64MB".to_owned();
        let (number, unit) = split_unit(text).ok_or_else(malformed)?;
        let bytes_per_unit: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            _ => return Err(malformed()),
        };
        let bytes = number.checked_mul(bytes_per_unit).and_then(|bytes| usize::try_from(bytes).ok());
        bytes.map(ByteSize).ok_or_else(|| "this size is too large".to_owned())
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        scalar_text(deserializer)?.parse().map_err(de::Error::custom)
    }
}

fn split_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    Some((number.parse().ok()?, unit.trim_start()))
}

/// `KEY=VALUE`. In the file a table of such. Its value may be secret, so Debug keeps it back.
#[derive(Clone, PartialEq, Eq)]
pub struct Assignment {
    pub key: String,
    pub value: String,
}

impl FromStr for Assignment {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((key, value)) if !key.trim().is_empty() => {
                Ok(Assignment { key: key.trim().to_owned(), value: value.trim().to_owned() })
            }
            _ => Err("a pair joined by `=` is expected"),
        }
    }
}

/// Takes a text without `=` for a value without a key, to be refused later: clap's own message would quote it, and it
/// may be a password.
pub(super) fn unchecked_assignment(text: &str) -> Result<Assignment, Infallible> {
    Ok(text.parse().unwrap_or_else(|_| Assignment { key: String::new(), value: text.to_owned() }))
}

impl fmt::Debug for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=…", self.key)
    }
}

/// Lays assignments over others: what has the same key is replaced.
pub(super) fn assign_over(upper: Vec<Assignment>, mut lower: Vec<Assignment>) -> Vec<Assignment> {
    lower.retain(|below| upper.iter().all(|above| above.key != below.key));
    lower.extend(upper);
    lower
}

/// A table of assignments. TOML reads the bare key `linger.ms` as a table in a table, so nested tables are joined by
/// dots again.
pub(super) fn assignments<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Assignment>, D::Error> {
    Ok(flatten("", deserializer.deserialize_map(TreeVisitor)?))
}

enum Tree {
    Leaf(String),
    Branch(Vec<(String, Tree)>),
}

fn flatten(prefix: &str, tree: Tree) -> Vec<Assignment> {
    match tree {
        Tree::Leaf(value) => vec![Assignment { key: prefix.to_owned(), value }],
        Tree::Branch(members) => members
            .into_iter()
            .flat_map(|(key, member)| {
                let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
                flatten(&key, member)
            })
            .collect(),
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of names and values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
        let mut members = Vec::new();
        while let Some((key, Node(member))) = map.next_entry::<String, Node>()? {
            members.push((key, member));
        }
        Ok(Tree::Branch(members))
    }
}

struct Node(Tree);

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NodeVisitor;
        impl<'de> Visitor<'de> for NodeVisitor {
            type Value = Node;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a number or a truth value")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Node, A::Error> {
                TreeVisitor.visit_map(map).map(Node)
            }

            fn visit_str<E>(self, text: &str) -> Result<Node, E> {
                Ok(Node(Tree::Leaf(text.to_owned())))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Node, E> {
                Ok(Node(Tree::Leaf(number.to_string())))
            }

            fn visit_bool<E>(self, truth: bool) -> Result<Node, E> {
                Ok(Node(Tree::Leaf(truth.to_string())))
            }
        }
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// A text, or a number or truth value as text: `create-topics = true`, `= 6` and `= "6:3"` are all meant.
pub(super) fn scalar_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    match Node::deserialize(deserializer)?.0 {
        Tree::Leaf(text) => Ok(text),
        Tree::Branch(_) => Err(de::Error::custom("a text, a number or a truth value is expected, not a table")),
    }
}

pub(super) fn optional_scalar_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    scalar_text(deserializer).map(Some)
}

/// One text or a list of them.
pub(super) fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    struct Texts;
    impl<'de> Visitor<'de> for Texts {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text or a list of texts")
        }

        fn visit_str<E>(self, text: &str) -> Result<Vec<String>, E> {
            Ok(vec![text.to_owned()])
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<Vec<String>, A::Error> {
            let mut texts = Vec::new();
            while let Some(text) = items.next_element()? {
                texts.push(text);
            }
            Ok(texts)
        }
    }
    deserializer.deserialize_any(Texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        let millis = |text: &str| text.parse::<Span>().map(|span| span.0.as_millis());
        assert_eq!(millis("500ms"), Ok(500));
        assert_eq!(millis("20s"), Ok(20_000));
        assert_eq!(millis("5m"), Ok(300_000));
        assert_eq!(millis("2h"), Ok(7_200_000));
        assert_eq!(millis("30d"), Ok(2_592_000_000));
        for text in ["", "20", "s", "-1s", "1.5s", "20x", "99999999999999999999s", "18446744073709551615d"] {
            assert!(millis(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn sizes_may_have_a_unit() {
        let bytes = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        assert_eq!(bytes("65536"), Ok(65536));
        assert_eq!(bytes("64MiB"), Ok(64 << 20));
        assert_eq!(bytes("64 mib"), Ok(64 << 20));
        assert_eq!(bytes("1GB"), Ok(1_000_000_000));
        for text in ["", "MiB", "-1", "1.5MiB", "64M", "18446744073709551615GiB"] {
            assert!(bytes(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn an_assignment_keeps_its_value_out_of_debug() {
        let assignment: Assignment = "sasl.password=a=b".parse().unwrap();
        assert_eq!((assignment.key.as_str(), assignment.value.as_str()), ("sasl.password", "a=b"));
        assert_eq!(format!("{assignment:?}"), "sasl.password=…");
        assert!("=x".parse::<Assignment>().is_err());
        assert!("x".parse::<Assignment>().is_err());
    }
}
