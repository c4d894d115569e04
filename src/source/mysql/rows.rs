//! The images of inserted rows.
//!
//! ```text
//!   columns:lenenc present:bits  ( null:bits of the present columns   value of each that is not null )*
//! ```
//!
//! A column that is not wanted is stepped over by its length. Wanted values are handed out as they lie in the event;
//! [`super::values`] makes text of them.

use super::event::WriteRows;
use super::input::{Input, Malformed};
use super::table_map::{Storage, TableShape};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Null,
    /// The row image does not have the column: `binlog_row_image` is not FULL, and the insert named no value for it.
    Absent,
    Bytes(&'a [u8]),
}

/// The rows of one event.
#[derive(Clone, Debug)]
pub struct RowImages<'a, 's> {
    shape: &'s TableShape,
    present: &'a [u8],
    present_count: usize,
    rest: Input<'a>,
}

impl<'a, 's> RowImages<'a, 's> {
    /// `rows.rows` must be expanded already where MariaDB compressed it.
    pub fn new(rows: &WriteRows<'a>, shape: &'s TableShape) -> Result<Self, Malformed> {
        if rows.columns != shape.columns.len() {
            return Err(Malformed::Invalid("rows with another number of columns than their table"));
        }
        if rows.present.len() != rows.columns.div_ceil(8) {
            return Err(Malformed::Truncated("the columns that are present"));
        }
        let present_count = (0..rows.columns).filter(|&at| bit(rows.present, at)).count();
        if present_count == 0 {
            // Such rows take no bytes, so nobody can tell how many there are.
            return Err(Malformed::Invalid("rows without columns"));
        }
        Ok(RowImages { shape, present: rows.present, present_count, rest: Input(rows.rows) })
    }

    /// Whether all rows were read.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Hands the wanted columns of the next row to `visit`, each with its place in `wanted`; `false` after the last
    /// row. `wanted` holds column numbers in ascending order.
    pub fn next_row<E: From<Malformed>>(
        &mut self,
        wanted: &[usize],
        mut visit: impl FnMut(usize, Value<'a>) -> Result<(), E>,
    ) -> Result<bool, E> {
        if self.rest.is_empty() {
            return Ok(false);
        }
        let nulls = self.rest.bytes(self.present_count.div_ceil(8), "which columns are null")?;
        let mut place = 0;
        let mut image = 0;
        for (at, column) in self.shape.columns.iter().enumerate() {
            let is_wanted = wanted.get(place) == Some(&at);
            let value = if bit(self.present, at) {
                let is_null = bit(nulls, image);
                image += 1;
                match is_null {
                    // Bytes that are out of step look like rows of nulls more often than not.
                    true if !column.nullable => {
                        return Err(Malformed::Invalid("null in a column that is NOT NULL").into());
                    }
                    true => Value::Null,
                    false => Value::Bytes(self.value(column.storage)?),
                }
            } else {
                Value::Absent
            };
            if is_wanted {
                visit(place, value)?;
                place += 1;
            }
        }
        if place < wanted.len() {
            return Err(Malformed::Invalid("wanting a column that the table does not have").into());
        }
        Ok(true)
    }

    #[inline]
    fn value(&mut self, storage: Storage) -> Result<&'a [u8], Malformed> {
        let len = match storage {
            Storage::Fixed(len) => usize::from(len),
            Storage::Counted(size) => self.rest.uint(usize::from(size), "a value's length")? as usize,
        };
        self.rest.bytes(len, "a value")
    }
}

fn bit(bits: &[u8], at: usize) -> bool {
    bits.get(at / 8).is_some_and(|byte| byte & (1 << (at % 8)) != 0)
}

#[cfg(test)]
mod tests {
    use super::super::table_map::{ColumnShape, column_type};
    use super::*;
    use proptest::prelude::*;

    fn column(kind: u8, storage: Storage) -> ColumnShape {
        ColumnShape {
            name: None,
            kind,
            meta: 0,
            storage,
            unsigned: false,
            nullable: true,
            collation: None,
            members: None,
            visible: true,
        }
    }

    fn shape(columns: Vec<ColumnShape>) -> TableShape {
        TableShape { table_id: 1, schema: "d".into(), table: "t".into(), columns, has_signs: true, has_names: false }
    }

    fn three() -> TableShape {
        shape(vec![
            column(column_type::LONG, Storage::Fixed(4)),
            column(column_type::VARCHAR, Storage::Counted(1)),
            column(column_type::BLOB, Storage::Counted(2)),
        ])
    }

    type Seen<'a> = Vec<(usize, Value<'a>)>;

    fn read<'a>(
        shape: &TableShape,
        present: &'a [u8],
        rows: &'a [u8],
        wanted: &[usize],
    ) -> Result<Vec<Seen<'a>>, Malformed> {
        let rows = WriteRows { columns: shape.columns.len(), present, rows };
        let mut images = RowImages::new(&rows, shape)?;
        let mut all = Vec::new();
        loop {
            let mut seen = Vec::new();
            let visit = |place, value| {
                seen.push((place, value));
                Ok::<_, Malformed>(())
            };
            if !images.next_row(wanted, visit)? {
                return Ok(all);
            }
            all.push(seen);
        }
    }

    #[test]
    fn wanted_columns_are_handed_out_and_others_stepped_over() {
        let rows = b"\0\x01\0\0\0\x02ab\x03\0xyz\x04\x02\0\0\0\x00";
        assert_eq!(
            read(&three(), &[7], rows, &[1, 2]),
            Ok(vec![
                vec![(0, Value::Bytes(b"ab")), (1, Value::Bytes(b"xyz"))],
                vec![(0, Value::Bytes(b"")), (1, Value::Null)],
            ])
        );
    }

    #[test]
    fn a_column_that_the_image_lacks_is_absent() {
        assert_eq!(
            read(&three(), &[0b101], b"\0\x01\0\0\0\x01\0z", &[1, 2]),
            Ok(vec![vec![(0, Value::Absent), (1, Value::Bytes(b"z"))]])
        );
    }

    #[test]
    fn null_in_a_column_that_is_not_null_is_refused() {
        let mut shape = three();
        shape.columns[1].nullable = false;
        let refused = Err(Malformed::Invalid("null in a column that is NOT NULL"));
        assert_eq!(read(&shape, &[7], b"\x02\x01\0\0\0\0\0", &[]), refused);
    }

    #[test]
    fn rows_that_do_not_fit_their_bytes_are_refused() {
        assert_eq!(read(&three(), &[7], b"\0\x01\0\0\0\x09ab", &[0]), Err(Malformed::Truncated("a value")));
        assert_eq!(read(&three(), &[7], b"\0\x01\0\0", &[0]), Err(Malformed::Truncated("a value")));
        assert_eq!(read(&three(), &[0], b"", &[0]), Err(Malformed::Invalid("rows without columns")));
        assert!(read(&three(), &[7], b"\x07", &[9]).is_err());
        let rows = WriteRows { columns: 2, present: &[3], rows: &[] };
        assert!(RowImages::new(&rows, &three()).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_rows_never_panic(
            kinds in prop::collection::vec(0u8..13, 1..40),
            present: Vec<u8>,
            rows: Vec<u8>,
        ) {
            let storage = |kind| if kind < 9 { Storage::Fixed(kind) } else { Storage::Counted(kind - 8) };
            let columns: Vec<_> = kinds.iter().map(|&kind| column(column_type::LONG, storage(kind))).collect();
            let wanted: Vec<_> = (0..columns.len()).step_by(2).collect();
            let _ = read(&shape(columns), &present, &rows, &wanted);
        }

        #[test]
        fn rows_written_are_the_rows_read(rows in prop::collection::vec(
            (any::<u32>(), prop::option::of(prop::collection::vec(any::<u8>(), 0..200)), prop::collection::vec(any::<u8>(), 0..400)),
            0..20,
        )) {
            let mut bytes = Vec::new();
            for (number, text, blob) in &rows {
                bytes.push(if text.is_none() { 2 } else { 0 });
                bytes.extend_from_slice(&number.to_le_bytes());
                if let Some(text) = text {
                    bytes.push(text.len() as u8);
                    bytes.extend_from_slice(text);
                }
                bytes.extend_from_slice(&(blob.len() as u16).to_le_bytes());
                bytes.extend_from_slice(blob);
            }
            let numbers: Vec<_> = rows.iter().map(|(number, ..)| number.to_le_bytes()).collect();
            let expected: Vec<Seen<'_>> = rows
                .iter()
                .zip(&numbers)
                .map(|((_, text, blob), number)| vec![
                    (0, Value::Bytes(number)),
                    (1, text.as_deref().map_or(Value::Null, Value::Bytes)),
                    (2, Value::Bytes(blob)),
                ])
                .collect();
            prop_assert_eq!(read(&three(), &[7], &bytes, &[0, 1, 2]), Ok(expected));
            if !bytes.is_empty() {
                prop_assert!(read(&three(), &[7], &bytes[..bytes.len() - 1], &[0]).is_err());
            }
        }
    }
}
