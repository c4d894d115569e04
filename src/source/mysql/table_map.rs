//! The table map: what the columns of the rows that follow are.
//!
//! ```text
//!   table:u48 flags:u16 len:u8 schema 0 len:u8 table 0 columns:lenenc type:u8*
//!   metadata_len:lenenc metadata  nullable:bits  ( field:u8 len:lenenc value )*
//!
//!   metadata  by type: none | u8 | u16 of either order
//!   fields    1 unsigned:bits            of the numeric columns, the highest bit first
//!             2 collation (column collation)*   3 collation*    of the character columns, all lenenc
//!             4 names   5 members of sets   6 members of enums
//!            10, 11 as 2 and 3 for enums and sets           12 visible:bits
//! ```
//!
//! The fields are there as far as `binlog_row_metadata` says: MySQL writes signs and collations even with MINIMAL,
//! MariaDB writes nothing with NO_LOG, its default. What is missing can be set later from the catalog.

use super::charset::{self, Charset};
use super::input::{Input, Malformed};

/// Numbers of column types.
pub mod column_type {
    pub const TINY: u8 = 1;
    pub const SHORT: u8 = 2;
    pub const LONG: u8 = 3;
    pub const FLOAT: u8 = 4;
    pub const DOUBLE: u8 = 5;
    pub const NULL: u8 = 6;
    pub const TIMESTAMP: u8 = 7;
    pub const LONGLONG: u8 = 8;
    pub const INT24: u8 = 9;
    pub const DATE: u8 = 10;
    pub const TIME: u8 = 11;
    pub const DATETIME: u8 = 12;
    pub const YEAR: u8 = 13;
    pub const NEWDATE: u8 = 14;
    pub const VARCHAR: u8 = 15;
    pub const BIT: u8 = 16;
    pub const TIMESTAMP2: u8 = 17;
    pub const DATETIME2: u8 = 18;
    pub const TIME2: u8 = 19;
    pub const TYPED_ARRAY: u8 = 20;
    /// MariaDB's `COMPRESSED` columns.
    pub const BLOB_COMPRESSED: u8 = 140;
    pub const VARCHAR_COMPRESSED: u8 = 141;
    pub const VECTOR: u8 = 242;
    pub const JSON: u8 = 245;
    pub const NEWDECIMAL: u8 = 246;
    pub const ENUM: u8 = 247;
    pub const SET: u8 = 248;
    pub const TINY_BLOB: u8 = 249;
    pub const MEDIUM_BLOB: u8 = 250;
    pub const LONG_BLOB: u8 = 251;
    pub const BLOB: u8 = 252;
    pub const VAR_STRING: u8 = 253;
    pub const STRING: u8 = 254;
    pub const GEOMETRY: u8 = 255;
}
use column_type::*;

/// How many bytes a value takes in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    Fixed(u8),
    /// A length of this many bytes stands before the value.
    Counted(u8),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnShape {
    pub name: Option<String>,
    /// One of [`column_type`]; enums and sets as such, though the log calls them strings.
    pub kind: u8,
    /// Digits of a fraction, (precision, scale) of a decimal, bits of a BIT, or the most bytes of a string.
    pub meta: u16,
    pub storage: Storage,
    pub unsigned: bool,
    pub nullable: bool,
    /// `None` where the log does not say; 63 is binary.
    pub collation: Option<u16>,
    /// Of an enum or set, in UTF-8; `None` where the log does not say.
    pub members: Option<Vec<String>>,
    pub visible: bool,
}

/// A table as its map describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableShape {
    pub table_id: u64,
    pub schema: String,
    pub table: String,
    pub columns: Vec<ColumnShape>,
    /// Whether the log said which columns are unsigned; else the catalog must, and in which character sets the text is.
    pub has_signs: bool,
    pub has_names: bool,
}

/// Whose table a map is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peeked<'a> {
    pub table_id: u64,
    pub schema: &'a [u8],
    pub table: &'a [u8],
}

/// Reads no further than the name, so that other tables cost nothing.
pub fn peek(body: &[u8]) -> Result<Peeked<'_>, Malformed> {
    let mut input = Input(body);
    name(&mut input)
}

fn name<'a>(input: &mut Input<'a>) -> Result<Peeked<'a>, Malformed> {
    let what = "a table's name";
    let table_id = input.uint(6, what)?;
    input.u16(what)?;
    let mut part = || {
        let len = usize::from(input.u8(what)?);
        let name = input.bytes(len, what)?;
        if input.u8(what)? != 0 {
            return Err(Malformed::Invalid("the end of a table's name"));
        }
        Ok(name)
    };
    Ok(Peeked { table_id, schema: part()?, table: part()? })
}

/// `mariadb`: who wrote the log; the two do not count the same columns as numeric.
pub fn parse(body: &[u8], mariadb: bool) -> Result<TableShape, Malformed> {
    let mut input = Input(body);
    let Peeked { table_id, schema, table } = name(&mut input)?;
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| Malformed::Invalid("a table's name"));
    let count = input.length("the number of columns")?;
    let types = input.bytes(count, "the types of columns")?;
    let mut metadata = Input(input.lenenc_bytes("the metadata of columns")?);
    let mut columns = types.iter().map(|&kind| column(kind, &mut metadata)).collect::<Result<Vec<_>, _>>()?;
    metadata.finish("the metadata of columns")?;
    let nullable = input.bytes(count.div_ceil(8), "which columns may be null")?;
    for (at, column) in columns.iter_mut().enumerate() {
        column.nullable = nullable[at / 8] & (1 << (at % 8)) != 0;
    }
    let mut shape = TableShape {
        table_id,
        schema: text(schema)?,
        table: text(table)?,
        columns,
        has_signs: false,
        has_names: false,
    };
    let mut members = Members::default();
    while !input.is_empty() {
        let field = input.u8("the metadata of a table")?;
        let value = Input(input.lenenc_bytes("the metadata of a table")?);
        shape.read_field(field, value, mariadb, &mut members)?;
    }
    shape.name_members(&members);
    Ok(shape)
}

/// A column without what only the optional fields tell.
fn column(kind: u8, metadata: &mut Input<'_>) -> Result<ColumnShape, Malformed> {
    let what = "the metadata of a column";
    let fraction = |bytes: u8, digits: u16| match digits {
        0..=6 => Ok(Storage::Fixed(bytes + (digits as u8).div_ceil(2))),
        _ => Err(Malformed::Invalid("the digits of a fraction")),
    };
    let mut kind = kind;
    let (meta, storage) = match kind {
        TINY | YEAR => (0, Storage::Fixed(1)),
        SHORT => (0, Storage::Fixed(2)),
        INT24 | DATE | NEWDATE | TIME => (0, Storage::Fixed(3)),
        LONG | TIMESTAMP => (0, Storage::Fixed(4)),
        LONGLONG | DATETIME => (0, Storage::Fixed(8)),
        NULL => (0, Storage::Fixed(0)),
        FLOAT | DOUBLE => {
            let (size, expected) = (metadata.u8(what)?, if kind == FLOAT { 4 } else { 8 });
            if size != expected {
                return Err(Malformed::Invalid("the size of a float"));
            }
            (0, Storage::Fixed(size))
        }
        TIMESTAMP2 | DATETIME2 | TIME2 => {
            let digits = u16::from(metadata.u8(what)?);
            let whole = match kind {
                TIMESTAMP2 => 4,
                DATETIME2 => 5,
                _ => 3,
            };
            (digits, fraction(whole, digits)?)
        }
        NEWDECIMAL => {
            let (precision, scale) = (metadata.u8(what)?, metadata.u8(what)?);
            let size = super::numbers::decimal_size(precision, scale).ok_or(Malformed::Invalid("a decimal's scale"))?;
            (u16::from(precision) << 8 | u16::from(scale), Storage::Fixed(size))
        }
        BIT => {
            let (bits, bytes) = (u16::from(metadata.u8(what)?), u16::from(metadata.u8(what)?));
            let bits = bytes * 8 + bits;
            if bits > 64 {
                return Err(Malformed::Invalid("the number of bits"));
            }
            (bits, Storage::Fixed(bits.div_ceil(8) as u8))
        }
        VARCHAR | VAR_STRING | VARCHAR_COMPRESSED => {
            let max = metadata.u16(what)?;
            (max, Storage::Counted(if max > 255 { 2 } else { 1 }))
        }
        TINY_BLOB | BLOB | MEDIUM_BLOB | LONG_BLOB | BLOB_COMPRESSED | JSON | GEOMETRY | VECTOR => {
            let size = metadata.u8(what)?;
            if !(1..=4).contains(&size) {
                return Err(Malformed::Invalid("the size of a blob's length"));
            }
            (0, Storage::Counted(size))
        }
        STRING | ENUM | SET => {
            let (real, low) = (metadata.u8(what)?, metadata.u8(what)?);
            match real {
                ENUM if matches!(low, 1 | 2) => {
                    kind = ENUM;
                    (0, Storage::Fixed(low))
                }
                SET if (1..=8).contains(&low) => {
                    kind = SET;
                    (0, Storage::Fixed(low))
                }
                ENUM | SET => return Err(Malformed::Invalid("the size of an enum or set")),
                // Two bits of the length hide, inverted, in the type.
                _ if real | 0x30 == STRING => {
                    let max = u16::from(low) | u16::from((real & 0x30) ^ 0x30) << 4;
                    (max, Storage::Counted(if max > 255 { 2 } else { 1 }))
                }
                _ => return Err(Malformed::UnknownKind { what: "a string", found: u32::from(real) }),
            }
        }
        _ => return Err(Malformed::UnknownKind { what: "a column", found: u32::from(kind) }),
    };
    Ok(ColumnShape {
        name: None,
        kind,
        meta,
        storage,
        unsigned: false,
        nullable: true,
        collation: None,
        members: None,
        visible: true,
    })
}

/// Members of enums and sets wait here until it is known which characters their bytes are.
#[derive(Default)]
struct Members<'a> {
    of: Vec<(usize, Vec<&'a [u8]>)>,
}

impl TableShape {
    fn read_field<'a>(
        &mut self,
        field: u8,
        mut value: Input<'a>,
        mariadb: bool,
        members: &mut Members<'a>,
    ) -> Result<(), Malformed> {
        const SIGNS: u8 = 1;
        const DEFAULT_COLLATION: u8 = 2;
        const COLLATIONS: u8 = 3;
        const NAMES: u8 = 4;
        const SET_MEMBERS: u8 = 5;
        const ENUM_MEMBERS: u8 = 6;
        const MEMBERS_DEFAULT_COLLATION: u8 = 10;
        const MEMBERS_COLLATIONS: u8 = 11;
        const VISIBILITY: u8 = 12;
        match field {
            SIGNS => {
                let numeric = self.columns.iter_mut().filter(|column| column.is_numeric(mariadb));
                for (at, column) in numeric.enumerate() {
                    column.unsigned = high_bit(value.0, at)?;
                }
                self.has_signs = true;
            }
            DEFAULT_COLLATION => self.read_default_collation(value, |column| column.is_character(mariadb))?,
            COLLATIONS => self.read_collations(value, |column| column.is_character(mariadb))?,
            MEMBERS_DEFAULT_COLLATION => self.read_default_collation(value, ColumnShape::has_members)?,
            MEMBERS_COLLATIONS => self.read_collations(value, ColumnShape::has_members)?,
            NAMES => {
                for column in &mut self.columns {
                    let name = value.lenenc_bytes("a column's name")?;
                    let name = String::from_utf8(name.to_vec()).map_err(|_| Malformed::Invalid("a column's name"))?;
                    column.name = Some(name);
                }
                value.finish("the names of columns")?;
                self.has_names = true;
            }
            SET_MEMBERS | ENUM_MEMBERS => {
                let kind = if field == SET_MEMBERS { SET } else { ENUM };
                let what = "the members of an enum or set";
                for (at, _) in self.columns.iter().enumerate().filter(|(_, column)| column.kind == kind) {
                    let count = value.length(what)?;
                    // Each takes a byte at least: never reserve more than the event can hold.
                    let mut names = Vec::with_capacity(count.min(value.0.len()));
                    for _ in 0..count {
                        names.push(value.lenenc_bytes(what)?);
                    }
                    members.of.push((at, names));
                }
                value.finish(what)?;
            }
            VISIBILITY => {
                for (at, column) in self.columns.iter_mut().enumerate() {
                    column.visible = high_bit(value.0, at)?;
                }
            }
            // Geometry types, keys, dimensions, and what later servers add: nothing that reading rows needs.
            _ => {}
        }
        Ok(())
    }

    fn read_default_collation(
        &mut self,
        mut value: Input<'_>,
        of: impl Fn(&ColumnShape) -> bool,
    ) -> Result<(), Malformed> {
        let what = "the default collation";
        let default = collation(&mut value)?;
        let mut columns: Vec<_> = self.columns.iter_mut().filter(|column| of(column)).collect();
        for column in &mut columns {
            column.collation = Some(default);
        }
        while !value.is_empty() {
            let at = value.length(what)?;
            let differing = collation(&mut value)?;
            columns.get_mut(at).ok_or(Malformed::Invalid(what))?.collation = Some(differing);
        }
        Ok(())
    }

    fn read_collations(&mut self, mut value: Input<'_>, of: impl Fn(&ColumnShape) -> bool) -> Result<(), Malformed> {
        for column in self.columns.iter_mut().filter(|column| of(column)) {
            column.collation = Some(collation(&mut value)?);
        }
        value.finish("the collations of columns")
    }

    /// Members in a character set that is unknown here stay unknown, and rendering says so.
    fn name_members(&mut self, members: &Members<'_>) {
        for (at, names) in &members.of {
            let column = &mut self.columns[*at];
            let charset = match column.collation {
                Some(collation) => charset::of_collation(collation),
                None => Some(Charset::Utf8),
            };
            column.members = charset.and_then(|charset| {
                let text = |name: &&[u8]| {
                    let mut out = Vec::new();
                    charset::to_utf8(charset, name, &mut out).ok()?;
                    String::from_utf8(out).ok()
                };
                names.iter().map(text).collect()
            });
        }
    }
}

impl ColumnShape {
    /// MariaDB's temporal columns from before 10.1, or made with `mysql56_temporal_format=OFF`. With digits of a fraction
    /// they are longer than without, and the log does not say so: the catalog must tell that they have none
    /// (`datetime_precision` 0) before their rows are trusted.
    pub fn is_old_temporal(&self) -> bool {
        matches!(self.kind, TIME | DATETIME | TIMESTAMP)
    }

    /// Whether the log has a sign for it. MariaDB's YEAR is a number that is always unsigned.
    fn is_numeric(&self, mariadb: bool) -> bool {
        match self.kind {
            TINY | SHORT | INT24 | LONG | LONGLONG | NEWDECIMAL | FLOAT | DOUBLE => true,
            YEAR => mariadb,
            _ => false,
        }
    }

    /// Whether the log has a collation for it. MariaDB's geometry is a kind of blob.
    fn is_character(&self, mariadb: bool) -> bool {
        match self.kind {
            STRING | VAR_STRING | VARCHAR | VARCHAR_COMPRESSED => true,
            TINY_BLOB | BLOB | MEDIUM_BLOB | LONG_BLOB | BLOB_COMPRESSED => true,
            GEOMETRY => mariadb,
            _ => false,
        }
    }

    fn has_members(&self) -> bool {
        matches!(self.kind, ENUM | SET)
    }
}

fn collation(value: &mut Input<'_>) -> Result<u16, Malformed> {
    let what = "a collation";
    u16::try_from(value.lenenc(what)?).map_err(|_| Malformed::Invalid(what))
}

fn high_bit(bits: &[u8], at: usize) -> Result<bool, Malformed> {
    let byte = bits.get(at / 8).ok_or(Malformed::Truncated("a bit for each column"))?;
    Ok(byte & (0x80 >> (at % 8)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_peek_reads_the_name_alone() {
        let body = b"\x01\x02\0\0\0\0\x01\0\x02db\0\x01t\0";
        assert_eq!(peek(body), Ok(Peeked { table_id: 0x0201, schema: b"db", table: b"t" }));
        assert_eq!(parse(body, false), Err(Malformed::Truncated("the number of columns")));
        assert_eq!(peek(&body[..13]), Err(Malformed::Truncated("a table's name")));
    }

    proptest! {
        #[test]
        fn arbitrary_table_maps_never_panic(bytes: Vec<u8>, mariadb: bool) {
            let _ = peek(&bytes);
            let _ = parse(&bytes, mariadb);
            let _ = parse(&[b"\x01\0\0\0\0\0\x01\0\x01d\0\x01t\0".as_slice(), &bytes].concat(), mariadb);
        }
    }
}
