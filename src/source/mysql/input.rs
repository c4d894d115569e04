//! What is left of an event, read from the front: little-endian integers and the two kinds of integers of varying
//! length that the log uses.
//!
//! ```text
//!   lenenc   < 0xfb: itself    0xfc u16    0xfd u24    0xfe u64      lengths and counts everywhere
//!   varlen   n trailing ones in the first byte: n more bytes follow  GTIDs with tags (MySQL 8.3 and later)
//! ```

use thiserror::Error;

/// An event that is not what the server writes. Never skipped.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Malformed {
    #[error("the bytes end in the middle of {0}")]
    Truncated(&'static str),
    #[error("{0} bytes are left over after {1}")]
    LeftOver(usize, &'static str),
    #[error("{0} has no meaning here")]
    Invalid(&'static str),
    #[error("the header says {said} bytes and there are {found}")]
    WrongSize { said: u32, found: usize },
    #[error("the checksum is {found:08x} and should be {computed:08x}: the event was damaged on its way or on disk")]
    Checksum { found: u32, computed: u32 },
    #[error("{what} has the unknown kind {found}")]
    UnknownKind { what: &'static str, found: u32 },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn bytes(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(Malformed::Truncated(what))?;
        self.0 = rest;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Truncated(what))?;
        self.0 = rest;
        Ok(*head)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, Malformed> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    pub fn u16(&mut self, what: &'static str) -> Result<u16, Malformed> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, Malformed> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, Malformed> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// An integer of up to eight bytes.
    pub fn uint(&mut self, len: usize, what: &'static str) -> Result<u64, Malformed> {
        Ok(little_endian(self.bytes(len, what)?))
    }

    pub fn lenenc(&mut self, what: &'static str) -> Result<u64, Malformed> {
        match self.u8(what)? {
            small @ 0..=0xfa => Ok(u64::from(small)),
            0xfc => self.uint(2, what),
            0xfd => self.uint(3, what),
            0xfe => self.u64(what),
            _ => Err(Malformed::Invalid(what)),
        }
    }

    /// A length or a count; what does not fit into memory is not there either.
    pub fn length(&mut self, what: &'static str) -> Result<usize, Malformed> {
        usize::try_from(self.lenenc(what)?).map_err(|_| Malformed::Truncated(what))
    }

    pub fn lenenc_bytes(&mut self, what: &'static str) -> Result<&'a [u8], Malformed> {
        let len = self.length(what)?;
        self.bytes(len, what)
    }

    pub fn varlen(&mut self, what: &'static str) -> Result<u64, Malformed> {
        let first = self.u8(what)?;
        let more = first.trailing_ones() as usize;
        let high = self.uint(more, what)?;
        Ok(match more {
            0..=6 => u64::from(first >> (more + 1)) | high << (7 - more),
            // The first byte holds nothing but the length.
            _ => high,
        })
    }

    pub fn signed_varlen(&mut self, what: &'static str) -> Result<i64, Malformed> {
        let zigzag = self.varlen(what)?;
        Ok((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))
    }

    pub fn finish(&self, what: &'static str) -> Result<(), Malformed> {
        match self.0.len() {
            0 => Ok(()),
            left => Err(Malformed::LeftOver(left, what)),
        }
    }
}

/// At most eight bytes as a number, the lowest first.
pub(super) fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// At most eight bytes as a number, the highest first.
pub(super) fn big_endian(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Writes an integer the way [`Input::varlen`] reads it; only lengths below 2^14 are ever written.
pub(super) fn put_varlen(number: u16, out: &mut Vec<u8>) {
    match number {
        0..0x80 => out.push((number << 1) as u8),
        _ => out.extend_from_slice(&(number << 2 | 1).to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_varying_length_are_read() {
        assert_eq!(Input(&[0b1111_1011, 0b1111_1111, 0b0000_0111]).varlen("n"), Ok(65535));
        assert_eq!(Input(&[0b1110_1011, 0b1111_1111, 0b0000_1111]).signed_varlen("n"), Ok(-65535));
        assert_eq!(Input(&[0b1111_0011, 0b1111_1111, 0b0000_1111]).signed_varlen("n"), Ok(65535));
        assert_eq!(Input(&[0xff; 9]).varlen("n"), Ok(u64::MAX));
        assert_eq!(Input(&[0x7f, 1, 0, 0, 0, 0, 0, 0]).varlen("n"), Ok(1));
        assert_eq!(Input(&[0xff; 8]).varlen("n"), Err(Malformed::Truncated("n")));
        assert_eq!(Input(&[0xfc, 1, 2]).lenenc("n"), Ok(0x0201));
        assert_eq!(Input(&[0xfb]).lenenc("n"), Err(Malformed::Invalid("n")));
        for number in [0, 1, 31, 127, 128, 300, 16_000] {
            let mut out = Vec::new();
            put_varlen(number, &mut out);
            assert_eq!(Input(&out).varlen("n"), Ok(u64::from(number)));
        }
    }
}
