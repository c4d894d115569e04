//! The messages of the `pgoutput` plugin, protocol version 1.
//!
//! The server sends committed transactions only, one after the other, in commit order:
//!
//! ```text
//!   B final_lsn:u64 commit_time:i64 xid:u32
//!     O commit_lsn:u64 name:cstr                      the change came from elsewhere
//!     Y oid:u32 schema:cstr name:cstr                 a type that is not built in
//!     R oid:u32 schema:cstr name:cstr identity:u8 n:u16 (flags:u8 name:cstr type:u32 modifier:i32)*
//!     I oid:u32 'N' tuple
//!     U oid:u32 ['K'|'O' tuple] 'N' tuple
//!     D oid:u32 'K'|'O' tuple
//!     T n:u32 options:u8 oid:u32*
//!     M flags:u8 lsn:u64 prefix:cstr len:u32 content  also outside a transaction (flags 0)
//!   C flags:u8 commit_lsn:u64 end_lsn:u64 commit_time:i64
//!
//!   tuple = n:u16 ( 'n' | 'u' | 't' len:u32 bytes | 'b' len:u32 bytes )*
//! ```
//!
//! Messages borrow from the frame. Whatever is malformed is an error, never a panic and never skipped.

use thiserror::Error;

use crate::event::Micros;
use crate::position::Lsn;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum DecodeError {
    #[error("the message ends in the middle of {0}")]
    Truncated(&'static str),
    #[error("{0} is not UTF-8")]
    NotUtf8(&'static str),
    #[error("unknown message tag {0:#04x}")]
    UnknownMessage(u8),
    #[error("unexpected byte {found:#04x} for {what}")]
    Unexpected { what: &'static str, found: u8 },
    #[error("{0} bytes are left over after the message")]
    LeftOver(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begin {
    pub final_lsn: Lsn,
    pub commit_time: Micros,
    pub xid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitMessage {
    pub commit_lsn: Lsn,
    pub end_lsn: Lsn,
    pub commit_time: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    pub type_oid: u32,
    pub type_modifier: i32,
    pub is_key: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    pub oid: u32,
    pub schema: String,
    pub name: String,
    pub columns: Vec<Column>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogicalMessage<'a> {
    pub transactional: bool,
    pub lsn: Lsn,
    pub prefix: &'a str,
    pub content: &'a [u8],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    Begin(Begin),
    Commit(CommitMessage),
    Origin,
    Type,
    Relation(Relation),
    Insert { relation: u32, new: Tuple<'a> },
    Update { relation: u32 },
    Delete { relation: u32 },
    Truncate { relations: Vec<u32> },
    Logical(LogicalMessage<'a>),
}

/// One value of a tuple as it lies in the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Null,
    /// An unchanged TOAST value; never in an insert.
    Unchanged,
    Text(&'a [u8]),
    Binary(&'a [u8]),
}

/// A tuple whose bounds were checked; iterating it cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple<'a> {
    columns: u16,
    body: &'a [u8],
}

impl<'a> Tuple<'a> {
    pub fn len(&self) -> usize {
        usize::from(self.columns)
    }

    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    pub fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut input = Input(self.body);
        (0..self.columns).map_while(move |_| input.value().ok())
    }
}

/// Microseconds between the Unix epoch and PostgreSQL's, 2000-01-01.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

/// A server timestamp as Unix microseconds.
pub fn from_server_time(micros: i64) -> Micros {
    Micros(micros.saturating_add(POSTGRES_EPOCH))
}

/// The current time as the server counts it.
pub fn server_time_now() -> i64 {
    Micros::now().0 - POSTGRES_EPOCH
}

pub fn parse(frame: &[u8]) -> Result<Message<'_>, DecodeError> {
    let mut input = Input(frame);
    let message = match input.u8("the message tag")? {
        b'B' => Message::Begin(Begin {
            final_lsn: input.lsn("begin")?,
            commit_time: input.time("begin")?,
            xid: input.u32("begin")?,
        }),
        b'C' => {
            input.u8("commit")?;
            Message::Commit(CommitMessage {
                commit_lsn: input.lsn("commit")?,
                end_lsn: input.lsn("commit")?,
                commit_time: input.time("commit")?,
            })
        }
        b'O' => {
            input.lsn("origin")?;
            input.text("the origin's name")?;
            Message::Origin
        }
        b'Y' => {
            input.u32("type")?;
            input.text("the type's schema")?;
            input.text("the type's name")?;
            Message::Type
        }
        b'R' => Message::Relation(input.relation()?),
        b'I' => {
            let relation = input.u32("insert")?;
            input.expect(b'N', "the new tuple")?;
            Message::Insert { relation, new: input.tuple()? }
        }
        b'U' => {
            let relation = input.u32("update")?;
            let mut tag = input.u8("update")?;
            if matches!(tag, b'K' | b'O') {
                input.tuple()?;
                tag = input.u8("update")?;
            }
            if tag != b'N' {
                return Err(DecodeError::Unexpected { what: "the new tuple", found: tag });
            }
            input.tuple()?;
            Message::Update { relation }
        }
        b'D' => {
            let relation = input.u32("delete")?;
            let tag = input.u8("delete")?;
            if !matches!(tag, b'K' | b'O') {
                return Err(DecodeError::Unexpected { what: "the old tuple", found: tag });
            }
            input.tuple()?;
            Message::Delete { relation }
        }
        b'T' => {
            let count = input.u32("truncate")? as usize;
            input.u8("truncate")?;
            // The count is the server's claim: never reserve more than the frame can hold.
            let mut relations = Vec::with_capacity(count.min(input.0.len() / 4));
            for _ in 0..count {
                relations.push(input.u32("truncate")?);
            }
            Message::Truncate { relations }
        }
        b'M' => {
            let transactional = input.u8("message")? & 1 == 1;
            let lsn = input.lsn("message")?;
            let prefix = input.text("the message's prefix")?;
            let len = input.u32("message")? as usize;
            let content = input.bytes(len, "the message's content")?;
            Message::Logical(LogicalMessage { transactional, lsn, prefix, content })
        }
        tag => return Err(DecodeError::UnknownMessage(tag)),
    };
    match input.0.len() {
        0 => Ok(message),
        left => Err(DecodeError::LeftOver(left)),
    }
}

/// What is left of a frame.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn bytes(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(DecodeError::Truncated(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(DecodeError::Truncated(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    fn u16(&mut self, what: &'static str) -> Result<u16, DecodeError> {
        self.array(what).map(u16::from_be_bytes)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        self.array(what).map(u32::from_be_bytes)
    }

    fn lsn(&mut self, what: &'static str) -> Result<Lsn, DecodeError> {
        self.array(what).map(u64::from_be_bytes).map(Lsn)
    }

    fn time(&mut self, what: &'static str) -> Result<Micros, DecodeError> {
        self.array(what).map(i64::from_be_bytes).map(from_server_time)
    }

    fn expect(&mut self, byte: u8, what: &'static str) -> Result<(), DecodeError> {
        match self.u8(what)? {
            found if found == byte => Ok(()),
            found => Err(DecodeError::Unexpected { what, found }),
        }
    }

    fn text(&mut self, what: &'static str) -> Result<&'a str, DecodeError> {
        let len = self.0.iter().position(|byte| *byte == 0).ok_or(DecodeError::Truncated(what))?;
        let text = std::str::from_utf8(&self.0[..len]).map_err(|_| DecodeError::NotUtf8(what))?;
        self.0 = &self.0[len + 1..];
        Ok(text)
    }

    fn relation(&mut self) -> Result<Relation, DecodeError> {
        let oid = self.u32("relation")?;
        let schema = match self.text("the relation's schema")? {
            // The protocol sends nothing for the system's own schema.
            "" => "pg_catalog",
            schema => schema,
        };
        let name = self.text("the relation's name")?;
        self.u8("the replica identity")?;
        let count = self.u16("the relation's columns")?;
        let mut columns = Vec::with_capacity(usize::from(count).min(self.0.len() / 10));
        for _ in 0..count {
            columns.push(Column {
                is_key: self.u8("a column's flags")? & 1 == 1,
                name: self.text("a column's name")?.to_owned(),
                type_oid: self.u32("a column's type")?,
                type_modifier: self.u32("a column's type modifier")? as i32,
            });
        }
        Ok(Relation { oid, schema: schema.to_owned(), name: name.to_owned(), columns })
    }

    fn tuple(&mut self) -> Result<Tuple<'a>, DecodeError> {
        let columns = self.u16("a tuple")?;
        let body = self.0;
        for _ in 0..columns {
            self.value()?;
        }
        Ok(Tuple { columns, body: &body[..body.len() - self.0.len()] })
    }

    fn value(&mut self) -> Result<Value<'a>, DecodeError> {
        let tag = self.u8("a value")?;
        let mut sized = |what| {
            let len = self.u32(what)? as usize;
            self.bytes(len, what)
        };
        match tag {
            b'n' => Ok(Value::Null),
            b'u' => Ok(Value::Unchanged),
            b't' => Ok(Value::Text(sized("a text value")?)),
            b'b' => Ok(Value::Binary(sized("a binary value")?)),
            found => Err(DecodeError::Unexpected { what: "the kind of a value", found }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn insert(relation: u32, values: &[Value<'_>]) -> Vec<u8> {
        let mut frame = vec![b'I'];
        frame.extend(relation.to_be_bytes());
        frame.push(b'N');
        frame.extend((values.len() as u16).to_be_bytes());
        for value in values {
            match value {
                Value::Null => frame.push(b'n'),
                Value::Unchanged => frame.push(b'u'),
                Value::Text(bytes) | Value::Binary(bytes) => {
                    frame.push(if matches!(value, Value::Text(_)) { b't' } else { b'b' });
                    frame.extend((bytes.len() as u32).to_be_bytes());
                    frame.extend(*bytes);
                }
            }
        }
        frame
    }

    #[test]
    fn an_insert_gives_its_values_in_order() {
        let values = [Value::Text(b"a"), Value::Null, Value::Binary(&[0, 1, 2]), Value::Text(b"")];
        let frame = insert(42, &values);
        let Ok(Message::Insert { relation: 42, new }) = parse(&frame) else { panic!("{:?}", parse(&frame)) };
        assert_eq!(new.len(), 4);
        assert_eq!(new.values().collect::<Vec<_>>(), values);
    }

    #[test]
    fn every_cut_of_a_message_is_an_error() {
        let mut relation = vec![b'R'];
        relation.extend(7u32.to_be_bytes());
        relation.extend(b"public\0outbox\0d");
        relation.extend(1u16.to_be_bytes());
        relation.push(1);
        relation.extend(b"id\0");
        relation.extend(2950u32.to_be_bytes());
        relation.extend((-1i32).to_be_bytes());
        let mut message = vec![b'M', 1];
        message.extend(9u64.to_be_bytes());
        message.extend(b"outbox\0");
        message.extend(2u32.to_be_bytes());
        message.extend(b"{}");
        for frame in [relation, message, insert(1, &[Value::Text(b"abc"), Value::Null])] {
            assert!(parse(&frame).is_ok());
            for cut in 0..frame.len() {
                assert!(parse(&frame[..cut]).is_err(), "accepted {:?}", &frame[..cut]);
            }
            let mut longer = frame.clone();
            longer.push(0);
            assert_eq!(parse(&longer), Err(DecodeError::LeftOver(1)));
        }
    }

    #[test]
    fn server_times_count_from_2000() {
        assert_eq!(from_server_time(0), Micros(946_684_800_000_000));
        assert_eq!(from_server_time(i64::MAX), Micros(i64::MAX));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(tag in prop::sample::select(b"BCOYRIUDTM".to_vec()), body: Vec<u8>) {
            let mut frame = vec![tag];
            frame.extend(body);
            if let Ok(Message::Insert { new, .. }) = parse(&frame) {
                prop_assert_eq!(new.values().count(), new.len());
            }
        }
    }
}
