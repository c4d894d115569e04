//! MySQL's binary JSON, printed as the server prints it.
//!
//! ```text
//!   document  type:u8 value
//!   object    count size (key_offset key_len:u16)* (type:u8 offset-or-value)* keys values
//!   array     count size                           (type:u8 offset-or-value)*      values
//!             count, size and offsets are u16 in a small one, u32 in a large one; offsets count from `count`
//!   string    len:varint bytes          varint: seven bits a byte, the lowest first
//!   opaque    column_type:u8 len:varint bytes
//! ```
//!
//! Values that fit stand in place of their offset. An offset may point anywhere, and a made-up document may use the
//! same bytes over and over: as no byte of a real one serves twice, the bytes that are used are counted, and work and
//! output stay in proportion to the document.

use std::io::Write as _;

use super::input::{Input, Malformed};
use super::numbers;
use super::table_map::column_type;
use super::temporal;

/// The server takes no document that is deeper.
const MAX_DEPTH: usize = 100;

mod node {
    pub const SMALL_OBJECT: u8 = 0;
    pub const LARGE_OBJECT: u8 = 1;
    pub const SMALL_ARRAY: u8 = 2;
    pub const LARGE_ARRAY: u8 = 3;
    pub const LITERAL: u8 = 4;
    pub const INT16: u8 = 5;
    pub const UINT16: u8 = 6;
    pub const INT32: u8 = 7;
    pub const UINT32: u8 = 8;
    pub const INT64: u8 = 9;
    pub const UINT64: u8 = 10;
    pub const DOUBLE: u8 = 11;
    pub const STRING: u8 = 12;
    pub const OPAQUE: u8 = 15;
}

/// Appends the document's text.
pub fn render(document: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
    // What INSERT IGNORE stores for a missing value; the server reads it as null.
    let Some((&kind, value)) = document.split_first() else {
        out.extend_from_slice(b"null");
        return Ok(());
    };
    Printer { out, left: document.len() }.value(kind, value, 0)
}

struct Printer<'o> {
    out: &'o mut Vec<u8>,
    /// Bytes of the document that were not used yet.
    left: usize,
}

/// An object or array.
#[derive(Clone, Copy)]
struct Container<'a> {
    /// From `count` on.
    bytes: &'a [u8],
    is_object: bool,
    large: bool,
    count: usize,
}

impl<'a> Container<'a> {
    fn open(bytes: &'a [u8], is_object: bool, large: bool) -> Result<Self, Malformed> {
        let what = "a JSON object or array";
        let mut input = Input(bytes);
        let width = if large { 4 } else { 2 };
        let (count, size) = (input.uint(width, what)? as usize, input.uint(width, what)? as usize);
        let bytes = bytes.get(..size).ok_or(Malformed::Truncated(what))?;
        let container = Container { bytes, is_object, large, count };
        // Every member has its entries, so a count beyond them is not believed.
        container.values_at().filter(|&end| end <= size).ok_or(Malformed::Truncated(what))?;
        Ok(container)
    }

    fn width(&self) -> usize {
        if self.large { 4 } else { 2 }
    }

    fn key_bytes(&self) -> usize {
        if self.is_object { self.width() + 2 } else { 0 }
    }

    fn value_bytes(&self) -> usize {
        1 + self.width()
    }

    /// Where the values begin: after all entries.
    fn values_at(&self) -> Option<usize> {
        self.count.checked_mul(self.key_bytes() + self.value_bytes())?.checked_add(2 * self.width())
    }

    fn key(&self, at: usize) -> Result<&'a [u8], Malformed> {
        let what = "a JSON key";
        let entry = 2 * self.width() + at * self.key_bytes();
        let mut input = Input(self.bytes.get(entry..).ok_or(Malformed::Truncated(what))?);
        let offset = input.uint(self.width(), what)? as usize;
        let len = usize::from(input.u16(what)?);
        self.bytes.get(offset..).and_then(|rest| rest.get(..len)).ok_or(Malformed::Truncated(what))
    }

    /// The member's type and its bytes, which may go on after its end.
    fn value(&self, at: usize) -> Result<(u8, &'a [u8]), Malformed> {
        let what = "a JSON value";
        let entry = 2 * self.width() + self.count * self.key_bytes() + at * self.value_bytes();
        let mut input = Input(self.bytes.get(entry..).ok_or(Malformed::Truncated(what))?);
        let kind = input.u8(what)?;
        let inlined = match kind {
            node::LITERAL | node::INT16 | node::UINT16 => true,
            node::INT32 | node::UINT32 => self.large,
            _ => false,
        };
        if inlined {
            return Ok((kind, input.0));
        }
        let offset = input.uint(self.width(), what)? as usize;
        self.bytes.get(offset..).map(|value| (kind, value)).ok_or(Malformed::Truncated(what))
    }
}

impl Printer<'_> {
    fn spend(&mut self, bytes: usize) -> Result<(), Malformed> {
        self.left = self.left.checked_sub(bytes).ok_or(Malformed::Invalid("a JSON document that uses bytes twice"))?;
        Ok(())
    }

    fn container(&mut self, container: &Container<'_>, depth: usize) -> Result<(), Malformed> {
        let (open, close) = if container.is_object { (b'{', b'}') } else { (b'[', b']') };
        self.spend(2 * container.width())?;
        self.out.push(open);
        for at in 0..container.count {
            if at > 0 {
                self.out.extend_from_slice(b", ");
            }
            self.spend(container.key_bytes() + container.value_bytes())?;
            if container.is_object {
                self.string(container.key(at)?)?;
                self.out.extend_from_slice(b": ");
            }
            let (kind, value) = container.value(at)?;
            self.value(kind, value, depth)?;
        }
        self.out.push(close);
        Ok(())
    }

    /// `depth`: how many containers it is in.
    fn value(&mut self, kind: u8, bytes: &[u8], depth: usize) -> Result<(), Malformed> {
        let what = "a JSON value";
        let mut input = Input(bytes);
        match kind {
            node::SMALL_OBJECT | node::LARGE_OBJECT | node::SMALL_ARRAY | node::LARGE_ARRAY => {
                let (is_object, large) = (kind <= node::LARGE_OBJECT, kind & 1 == 1);
                if depth == MAX_DEPTH {
                    return Err(Malformed::Invalid("a JSON document of more than 100 levels"));
                }
                self.container(&Container::open(bytes, is_object, large)?, depth + 1)?;
            }
            node::LITERAL => self.out.extend_from_slice(match input.u8(what)? {
                0 => b"null",
                1 => b"true",
                2 => b"false",
                other => return Err(Malformed::UnknownKind { what: "a JSON literal", found: u32::from(other) }),
            }),
            node::INT16 => self.number(input.u16(what)? as i16),
            node::UINT16 => self.number(input.u16(what)?),
            node::INT32 => self.number(input.u32(what)? as i32),
            node::UINT32 => self.number(input.u32(what)?),
            node::INT64 => self.number(input.u64(what)? as i64),
            node::UINT64 => self.number(input.u64(what)?),
            node::DOUBLE => self.double(f64::from_bits(input.u64(what)?))?,
            node::STRING => {
                let text = counted(&mut input)?;
                self.string(text)?;
            }
            node::OPAQUE => {
                let column_type = input.u8(what)?;
                let value = counted(&mut input)?;
                self.spend(value.len())?;
                self.opaque(column_type, value)?;
            }
            other => return Err(Malformed::UnknownKind { what, found: u32::from(other) }),
        }
        Ok(())
    }

    fn number(&mut self, number: impl std::fmt::Display) {
        // Writing to a Vec cannot fail.
        let _ = write!(self.out, "{number}");
    }

    fn double(&mut self, number: f64) -> Result<(), Malformed> {
        let start = self.out.len();
        numbers::write_double(number, self.out).ok_or(Malformed::Invalid("a JSON number"))?;
        // What could be taken for an integer gets a fraction.
        if self.out[start..].iter().all(|byte| byte.is_ascii_digit() || *byte == b'-') {
            self.out.extend_from_slice(b".0");
        }
        Ok(())
    }

    fn string(&mut self, text: &[u8]) -> Result<(), Malformed> {
        self.spend(text.len())?;
        self.out.push(b'"');
        let mut plain = 0;
        for (at, &byte) in text.iter().enumerate() {
            let escape: &[u8] = match byte {
                b'"' => b"\\\"",
                b'\\' => b"\\\\",
                b'\n' => b"\\n",
                b'\r' => b"\\r",
                b'\t' => b"\\t",
                0x08 => b"\\b",
                0x0c => b"\\f",
                0..0x20 => b"",
                _ => continue,
            };
            self.out.extend_from_slice(&text[plain..at]);
            self.out.extend_from_slice(escape);
            if escape.is_empty() {
                let _ = write!(self.out, "\\u{byte:04x}");
            }
            plain = at + 1;
        }
        self.out.extend_from_slice(&text[plain..]);
        self.out.push(b'"');
        Ok(())
    }

    /// Values of column types that JSON does not have.
    fn opaque(&mut self, kind: u8, value: &[u8]) -> Result<(), Malformed> {
        use column_type::{DATE, DATETIME, NEWDECIMAL, TIME, TIMESTAMP};
        let bad = Malformed::Invalid("a value of a column's type in JSON");
        let packed = || value.try_into().map(i64::from_le_bytes).map_err(|_| bad);
        match kind {
            NEWDECIMAL => match value {
                [precision, scale, digits @ ..] => {
                    numbers::write_decimal(*precision, *scale, digits, self.out).ok_or(bad)?;
                }
                _ => return Err(bad),
            },
            DATE | DATETIME | TIMESTAMP => {
                let (date, clock) = temporal::packed_datetime(packed()?).ok_or(bad)?;
                self.out.push(b'"');
                date.write(self.out);
                if kind != DATE {
                    self.out.push(b' ');
                    clock.write(6, self.out);
                }
                self.out.push(b'"');
            }
            TIME => {
                let clock = temporal::packed_time(packed()?).ok_or(bad)?;
                self.out.push(b'"');
                clock.write(6, self.out);
                self.out.push(b'"');
            }
            _ => {
                let _ = write!(self.out, "\"base64:type{kind}:");
                base64(value, self.out);
                self.out.push(b'"');
            }
        }
        Ok(())
    }
}

/// The bytes after a length of at most five bytes.
fn counted<'a>(input: &mut Input<'a>) -> Result<&'a [u8], Malformed> {
    let what = "the length of a JSON value";
    let mut len = 0u64;
    for shift in (0..35).step_by(7) {
        let byte = input.u8(what)?;
        len |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            let len = usize::try_from(len).map_err(|_| Malformed::Truncated(what))?;
            return input.bytes(len, "a JSON value");
        }
    }
    Err(Malformed::Invalid(what))
}

/// As the server writes it into JSON: a line break, which JSON escapes, after every 76 characters.
fn base64(bytes: &[u8], out: &mut Vec<u8>) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const GROUPS_PER_LINE: usize = 76 / 4;
    for (at, group) in bytes.chunks(3).enumerate() {
        if at > 0 && at % GROUPS_PER_LINE == 0 {
            out.extend_from_slice(b"\\n");
        }
        let mut padded = [0; 3];
        padded[..group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes([0, padded[0], padded[1], padded[2]]);
        for place in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * place) & 63) as usize];
            out.push(if place <= group.len() { digit } else { b'=' });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(document: &[u8]) -> Result<String, Malformed> {
        let mut out = Vec::new();
        render(document, &mut out).map(|()| String::from_utf8(out).unwrap())
    }

    #[test]
    fn documents_made_by_hand_are_printed() {
        assert_eq!(text(b"").as_deref(), Ok("null"));
        assert_eq!(text(b"\x04\x01").as_deref(), Ok("true"));
        assert_eq!(text(b"\x05\xff\xff").as_deref(), Ok("-1"));
        assert_eq!(text(b"\x0c\x03a\"b").as_deref(), Ok(r#""a\"b""#));
        // {"a": [1, null]}
        let document = b"\x00\x01\x00\x16\x00\x0b\x00\x01\x00\x02\x0c\x00a\x02\x00\x0a\x00\x05\x01\x00\x04\x00\x00";
        assert_eq!(text(document).as_deref(), Ok(r#"{"a": [1, null]}"#));
    }

    #[test]
    fn a_document_that_uses_its_bytes_twice_is_refused() {
        // An array whose ten members are all the same string.
        let mut document = b"\x02\x0a\x00\x3b\x00".to_vec();
        for _ in 0..10 {
            document.extend_from_slice(b"\x0c\x22\x00");
        }
        document.extend_from_slice(b"\x18");
        document.extend_from_slice(&[b'x'; 24]);
        assert_eq!(text(&document), Err(Malformed::Invalid("a JSON document that uses bytes twice")));
        // An array that holds itself.
        assert!(text(b"\x02\x01\x00\x07\x00\x02\x00\x00").is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_documents_never_panic(kind in 0u8..17, bytes: Vec<u8>) {
            let document = [[kind].as_slice(), &bytes].concat();
            let mut out = Vec::new();
            let _ = render(&document, &mut out);
            prop_assert!(out.len() <= document.len() * 8 + 400);
        }
    }
}
