//! The frame of a log event, and the bodies of most kinds.
//!
//! ```text
//!   timestamp:u32 type:u8 server_id:u32 size:u32 end:u32 flags:u16   body …   [crc32:u32]
//!
//!   format description  version:u16 server:50 created:u32 19 post_header_len:u8* checksum_alg:u8 crc32:u32
//!   rotate              position:u64 file
//!   query               thread:u32 seconds:u32 db_len:u8 error:u16 vars_len:u16 vars db 0 sql
//!   rows                table:u48 flags:u16 [v2: extra_len:u16 extra] columns:lenenc present … rows
//! ```
//!
//! Events borrow from the packet. The checksum covers everything before it. A kind that is unknown and not marked as
//! ignorable is [`Body::Unknown`]: the caller must halt, because it may be rows in a coat that we do not know.

use super::input::{Input, Malformed};
use super::transaction::{
    CommitTimes, Gtid, MariaGtid, XaPrepare, commit_times, gtid, maria_gtid, tagged_gtid, xa_prepare,
};

/// Bytes of an event before its body.
pub const HEADER_BYTES: usize = 19;
const CHECKSUM_BYTES: usize = 4;

/// The first bytes of a log file, before its first event.
const FILE_MAGIC: [u8; 4] = *b"\xfebin";

/// Numbers of event types, as far as they are told apart here.
pub mod kind {
    pub const QUERY: u8 = 2;
    pub const STOP: u8 = 3;
    pub const ROTATE: u8 = 4;
    pub const INTVAR: u8 = 5;
    pub const RAND: u8 = 13;
    pub const USER_VAR: u8 = 14;
    pub const FORMAT_DESCRIPTION: u8 = 15;
    pub const XID: u8 = 16;
    pub const BEGIN_LOAD_QUERY: u8 = 17;
    pub const EXECUTE_LOAD_QUERY: u8 = 18;
    pub const TABLE_MAP: u8 = 19;
    pub const WRITE_ROWS_V1: u8 = 23;
    pub const UPDATE_ROWS_V1: u8 = 24;
    pub const DELETE_ROWS_V1: u8 = 25;
    pub const INCIDENT: u8 = 26;
    pub const HEARTBEAT: u8 = 27;
    pub const IGNORABLE: u8 = 28;
    pub const ROWS_QUERY: u8 = 29;
    pub const WRITE_ROWS_V2: u8 = 30;
    pub const UPDATE_ROWS_V2: u8 = 31;
    pub const DELETE_ROWS_V2: u8 = 32;
    pub const GTID: u8 = 33;
    pub const ANONYMOUS_GTID: u8 = 34;
    pub const PREVIOUS_GTIDS: u8 = 35;
    pub const TRANSACTION_CONTEXT: u8 = 36;
    pub const VIEW_CHANGE: u8 = 37;
    pub const XA_PREPARE: u8 = 38;
    pub const PARTIAL_UPDATE_ROWS: u8 = 39;
    pub const TRANSACTION_PAYLOAD: u8 = 40;
    pub const HEARTBEAT_V2: u8 = 41;
    pub const TAGGED_GTID: u8 = 42;
    pub const MARIA_ANNOTATE_ROWS: u8 = 160;
    pub const MARIA_CHECKPOINT: u8 = 161;
    pub const MARIA_GTID: u8 = 162;
    pub const MARIA_GTID_LIST: u8 = 163;
    pub const MARIA_START_ENCRYPTION: u8 = 164;
    pub const MARIA_QUERY_COMPRESSED: u8 = 165;
    pub const MARIA_WRITE_ROWS_COMPRESSED_V1: u8 = 166;
    pub const MARIA_UPDATE_ROWS_COMPRESSED_V1: u8 = 167;
    pub const MARIA_DELETE_ROWS_COMPRESSED_V1: u8 = 168;
    pub const MARIA_WRITE_ROWS_COMPRESSED: u8 = 169;
    pub const MARIA_UPDATE_ROWS_COMPRESSED: u8 = 170;
    pub const MARIA_DELETE_ROWS_COMPRESSED: u8 = 171;
}

/// Made up by the server for this connection; not in the file.
const FLAG_ARTIFICIAL: u16 = 0x20;
/// A reader that does not know the event may skip it.
const FLAG_IGNORABLE: u16 = 0x80;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Seconds since the Unix epoch.
    pub timestamp: u32,
    pub type_code: u8,
    pub server_id: u32,
    pub size: u32,
    /// Where the event ends in its file; 0 for an event that is in none.
    pub end: u32,
    pub flags: u16,
}

impl Header {
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut input = Input(bytes);
        let what = "the event's header";
        Ok(Header {
            timestamp: input.u32(what)?,
            type_code: input.u8(what)?,
            server_id: input.u32(what)?,
            size: input.u32(what)?,
            end: input.u32(what)?,
            flags: input.u16(what)?,
        })
    }

    pub fn is_artificial(&self) -> bool {
        self.flags & FLAG_ARTIFICIAL != 0
    }

    pub fn is_ignorable(&self) -> bool {
        self.flags & FLAG_IGNORABLE != 0
    }
}

/// An event whose size and checksum are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    pub header: Header,
    /// Without header and checksum.
    pub body: &'a [u8],
}

/// Takes one whole event apart. `checksum` is what the last format description said; a format description itself
/// always has one and says so itself.
pub fn split(bytes: &[u8], checksum: bool) -> Result<Event<'_>, Malformed> {
    let header = Header::parse(bytes)?;
    if header.size as usize != bytes.len() {
        return Err(Malformed::WrongSize { said: header.size, found: bytes.len() });
    }
    let body = &bytes[HEADER_BYTES..];
    let is_description = header.type_code == kind::FORMAT_DESCRIPTION;
    if !checksum && !is_description {
        return Ok(Event { header, body });
    }
    let (body, stored) = body.split_last_chunk::<CHECKSUM_BYTES>().ok_or(Malformed::Truncated("the checksum"))?;
    if !is_description || body.last() == Some(&CHECKSUM_CRC32) {
        let (found, computed) = (u32::from_le_bytes(*stored), crc32fast::hash(&bytes[..bytes.len() - CHECKSUM_BYTES]));
        if found != computed {
            return Err(Malformed::Checksum { found, computed });
        }
    }
    Ok(Event { header, body })
}

/// The events of a log file, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct FileEvents<'a>(&'a [u8]);

impl<'a> FileEvents<'a> {
    pub fn new(file: &'a [u8]) -> Result<Self, Malformed> {
        file.strip_prefix(&FILE_MAGIC).map(FileEvents).ok_or(Malformed::Invalid("the beginning of a log file"))
    }

    /// The next event, to be split; `None` at the end.
    pub fn next_event(&mut self) -> Result<Option<&'a [u8]>, Malformed> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let size = Header::parse(self.0)?.size as usize;
        if size < HEADER_BYTES {
            return Err(Malformed::Invalid("the event's size"));
        }
        let (event, rest) = self.0.split_at_checked(size).ok_or(Malformed::Truncated("an event"))?;
        self.0 = rest;
        Ok(Some(event))
    }
}

const CHECKSUM_OFF: u8 = 0;
const CHECKSUM_CRC32: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatDescription<'a> {
    pub server_version: &'a str,
    /// Whether the events that follow end in a CRC32.
    pub checksum: bool,
    /// Bytes of the fixed part of each kind of event, the kind 1 first.
    pub post_header_lengths: &'a [u8],
}

impl FormatDescription<'_> {
    pub fn is_mariadb(&self) -> bool {
        self.server_version.contains("MariaDB")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotate<'a> {
    pub file: &'a str,
    pub position: u64,
    /// Says where reading starts; nothing was rotated.
    pub fake: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query<'a> {
    pub thread: u32,
    pub error: u16,
    pub database: &'a [u8],
    /// In the character set of its session.
    pub sql: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat<'a> {
    pub file: &'a str,
    pub position: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsKind {
    Write,
    Update,
    Delete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows<'a> {
    pub kind: RowsKind,
    pub table_id: u64,
    /// The last rows of their statement.
    pub statement_end: bool,
    /// MariaDB's compression: what [`WriteRows::rows`] holds must be passed through [`super::compressed::expand`].
    pub compressed: bool,
    /// After the post-header.
    content: &'a [u8],
}

/// The rows of an insert: which columns they have, and their images one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteRows<'a> {
    pub columns: usize,
    /// A bit for each column, the lowest first.
    pub present: &'a [u8],
    pub rows: &'a [u8],
}

impl<'a> Rows<'a> {
    /// Only for [`RowsKind::Write`]: an update has a second bitmap.
    pub fn write(&self) -> Result<WriteRows<'a>, Malformed> {
        if self.kind != RowsKind::Write {
            return Err(Malformed::Invalid("reading a change of rows as an insert"));
        }
        let mut input = Input(self.content);
        let columns = input.length("the number of columns")?;
        let present = input.bytes(columns.div_ceil(8), "the columns that are present")?;
        Ok(WriteRows { columns, present, rows: input.0 })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    FormatDescription(FormatDescription<'a>),
    Rotate(Rotate<'a>),
    Query(Query<'a>),
    /// MariaDB: as [`Body::Query`], the text being compressed; see [`super::compressed::expand`].
    CompressedQuery(Query<'a>),
    /// The end of a `LOAD DATA` that was logged as a statement.
    LoadData(Query<'a>),
    /// The end of a transaction.
    Xid(u64),
    Gtid(Gtid<'a>),
    /// A transaction follows that has no GTID.
    Anonymous(CommitTimes),
    /// For [`super::gtid::GtidSet::decode`].
    PreviousGtids(&'a [u8]),
    MariaGtid(MariaGtid),
    /// For [`super::gtid::MariaGtidList::decode`].
    MariaGtidList(&'a [u8]),
    Heartbeat(Heartbeat<'a>),
    /// For [`super::table_map`].
    TableMap(&'a [u8]),
    Rows(Rows<'a>),
    XaPrepare(XaPrepare),
    /// For [`super::compressed::Payload::parse`].
    TransactionPayload(&'a [u8]),
    /// MariaDB: the rest of the file is encrypted. A server decrypts what it sends; only a file is ever so.
    StartEncryption,
    /// The log has a hole here, as the server itself says.
    Incident {
        message: &'a [u8],
    },
    Stop,
    /// Known, and nothing to an outbox: comments, variables of statements, view changes, checkpoints.
    Aside(u8),
    /// Unknown, and marked as harmless.
    Ignorable(u8),
    /// The caller must halt.
    Unknown {
        type_code: u8,
    },
}

impl<'a> Event<'a> {
    pub fn decode(&self) -> Result<Body<'a>, Malformed> {
        let mut input = Input(self.body);
        Ok(match self.header.type_code {
            kind::FORMAT_DESCRIPTION => Body::FormatDescription(format_description(input)?),
            kind::ROTATE => Body::Rotate(Rotate {
                position: input.u64("rotate")?,
                file: file_name(input.0)?,
                fake: self.header.is_artificial() || self.header.end == 0,
            }),
            kind::QUERY => Body::Query(query(input, 0)?),
            kind::MARIA_QUERY_COMPRESSED => Body::CompressedQuery(query(input, 0)?),
            // The file's id, where its name stands in the text, and what to do with duplicates.
            kind::EXECUTE_LOAD_QUERY => Body::LoadData(query(input, 13)?),
            kind::XID => Body::Xid(input.u64("the end of a transaction")?),
            kind::GTID => Body::Gtid(gtid(input)?),
            kind::ANONYMOUS_GTID => {
                input.bytes(25, "a transaction's header")?;
                Body::Anonymous(commit_times(input)?)
            }
            kind::TAGGED_GTID => Body::Gtid(tagged_gtid(input)?),
            kind::PREVIOUS_GTIDS => Body::PreviousGtids(self.body),
            kind::MARIA_GTID => Body::MariaGtid(maria_gtid(input, self.header.server_id)?),
            kind::MARIA_GTID_LIST => Body::MariaGtidList(self.body),
            kind::HEARTBEAT => {
                Body::Heartbeat(Heartbeat { file: file_name(self.body)?, position: u64::from(self.header.end) })
            }
            kind::HEARTBEAT_V2 => Body::Heartbeat(heartbeat_v2(input)?),
            kind::TABLE_MAP => Body::TableMap(self.body),
            kind::XA_PREPARE => Body::XaPrepare(xa_prepare(input)?),
            kind::TRANSACTION_PAYLOAD => Body::TransactionPayload(self.body),
            kind::MARIA_START_ENCRYPTION => Body::StartEncryption,
            kind::INCIDENT => {
                input.u16("an incident")?;
                let len = usize::from(input.u8("an incident")?);
                Body::Incident { message: input.bytes(len, "an incident")? }
            }
            kind::STOP => Body::Stop,
            kind::INTVAR
            | kind::RAND
            | kind::USER_VAR
            | kind::BEGIN_LOAD_QUERY
            | kind::IGNORABLE
            | kind::ROWS_QUERY
            | kind::TRANSACTION_CONTEXT
            | kind::VIEW_CHANGE
            | kind::MARIA_ANNOTATE_ROWS
            | kind::MARIA_CHECKPOINT => Body::Aside(self.header.type_code),
            type_code => match rows_shape(type_code) {
                Some(shape) => Body::Rows(rows(input, shape)?),
                None if self.header.is_ignorable() => Body::Ignorable(type_code),
                None => Body::Unknown { type_code },
            },
        })
    }
}

fn file_name(bytes: &[u8]) -> Result<&str, Malformed> {
    std::str::from_utf8(bytes).map_err(|_| Malformed::Invalid("the name of a log file"))
}

/// The lengths of fixed parts that reading relies on; a server that writes others writes another format.
const POST_HEADER_LENGTHS: [(u8, u8); 7] = [
    (kind::QUERY, 13),
    (kind::ROTATE, 8),
    (kind::TABLE_MAP, 8),
    (kind::WRITE_ROWS_V1, 8),
    (kind::WRITE_ROWS_V2, 10),
    (kind::MARIA_GTID, 19),
    (kind::MARIA_WRITE_ROWS_COMPRESSED_V1, 8),
];

fn format_description(mut input: Input<'_>) -> Result<FormatDescription<'_>, Malformed> {
    let what = "the format description";
    if input.u16(what)? != 4 {
        return Err(Malformed::Invalid("a log that is not of version 4"));
    }
    let version = input.bytes(50, what)?;
    let version = version.split(|&byte| byte == 0).next().unwrap_or_default();
    let server_version = std::str::from_utf8(version).map_err(|_| Malformed::Invalid("the server's version"))?;
    input.u32(what)?;
    if usize::from(input.u8(what)?) != HEADER_BYTES {
        return Err(Malformed::Invalid("a header that is not of 19 bytes"));
    }
    let (algorithm, post_header_lengths) = input.0.split_last().ok_or(Malformed::Truncated(what))?;
    for (kind, expected) in POST_HEADER_LENGTHS {
        // 0: a kind that this server does not write.
        let found = post_header_lengths.get(usize::from(kind) - 1).copied().unwrap_or(0);
        if found != expected && found != 0 {
            return Err(Malformed::UnknownKind { what: "the fixed part of an event", found: u32::from(found) });
        }
    }
    let checksum = match *algorithm {
        CHECKSUM_OFF => false,
        CHECKSUM_CRC32 => true,
        other => return Err(Malformed::UnknownKind { what: "the checksum", found: u32::from(other) }),
    };
    Ok(FormatDescription { server_version, checksum, post_header_lengths })
}

/// `extra` bytes stand between the fixed part and the status variables.
fn query(mut input: Input<'_>, extra: usize) -> Result<Query<'_>, Malformed> {
    let what = "a statement";
    let thread = input.u32(what)?;
    input.u32(what)?;
    let database_len = usize::from(input.u8(what)?);
    let error = input.u16(what)?;
    let variables = usize::from(input.u16(what)?);
    input.bytes(extra, what)?;
    input.bytes(variables, "a statement's variables")?;
    let database = input.bytes(database_len, "a statement's database")?;
    if input.u8(what)? != 0 {
        return Err(Malformed::Invalid("the end of a statement's database"));
    }
    Ok(Query { thread, error, database, sql: input.0 })
}

fn heartbeat_v2(mut input: Input<'_>) -> Result<Heartbeat<'_>, Malformed> {
    const END: u64 = 0;
    const FILE: u64 = 1;
    const POSITION: u64 = 2;
    let what = "a heartbeat";
    let mut heartbeat = Heartbeat { file: "", position: 0 };
    while !input.is_empty() {
        let field = input.lenenc(what)?;
        if field == END {
            break;
        }
        let value = input.lenenc_bytes(what)?;
        match field {
            FILE => heartbeat.file = file_name(value)?,
            POSITION => heartbeat.position = Input(value).lenenc(what)?,
            _ => {}
        }
    }
    Ok(heartbeat)
}

#[derive(Clone, Copy)]
struct RowsShape {
    kind: RowsKind,
    /// Has a variable part in its header.
    v2: bool,
    compressed: bool,
}

fn rows_shape(type_code: u8) -> Option<RowsShape> {
    use RowsKind::{Delete, Update, Write};
    let (kind, v2, compressed) = match type_code {
        kind::WRITE_ROWS_V1 => (Write, false, false),
        kind::UPDATE_ROWS_V1 => (Update, false, false),
        kind::DELETE_ROWS_V1 => (Delete, false, false),
        kind::WRITE_ROWS_V2 => (Write, true, false),
        kind::UPDATE_ROWS_V2 | kind::PARTIAL_UPDATE_ROWS => (Update, true, false),
        kind::DELETE_ROWS_V2 => (Delete, true, false),
        kind::MARIA_WRITE_ROWS_COMPRESSED_V1 => (Write, false, true),
        kind::MARIA_UPDATE_ROWS_COMPRESSED_V1 => (Update, false, true),
        kind::MARIA_DELETE_ROWS_COMPRESSED_V1 => (Delete, false, true),
        kind::MARIA_WRITE_ROWS_COMPRESSED => (Write, true, true),
        kind::MARIA_UPDATE_ROWS_COMPRESSED => (Update, true, true),
        kind::MARIA_DELETE_ROWS_COMPRESSED => (Delete, true, true),
        _ => return None,
    };
    Some(RowsShape { kind, v2, compressed })
}

fn rows(mut input: Input<'_>, shape: RowsShape) -> Result<Rows<'_>, Malformed> {
    const STATEMENT_END: u16 = 1;
    let what = "the header of rows";
    let table_id = input.uint(6, what)?;
    let flags = input.u16(what)?;
    if shape.v2 {
        // The length counts its own two bytes.
        let extra = usize::from(input.u16(what)?).checked_sub(2).ok_or(Malformed::Invalid(what))?;
        input.bytes(extra, what)?;
    }
    Ok(Rows {
        kind: shape.kind,
        table_id,
        statement_end: flags & STATEMENT_END != 0,
        compressed: shape.compressed,
        content: input.0,
    })
}

#[cfg(test)]
#[path = "event_tests.rs"]
mod tests;
