//! What the server compressed: whole transactions (MySQL), and single statements, rows and columns (MariaDB).
//!
//! ```text
//!   MySQL    ( field:lenenc len:lenenc value:lenenc )* 0  payload     1 payload size  2 algorithm  3 plain size
//!            payload = the transaction's events but the first, without checksums; zstd, or as they are
//!   MariaDB  0x80|algorithm<<4|n:u8  plain_size:n bytes be  zlib
//!   column   algorithm<<4|bare<<3|n:u8  plain_size:n bytes be  zlib or bare deflate;  or 0 and the plain bytes;  or nothing
//! ```
//!
//! A transaction may be of any size: its events are expanded one after the other into a buffer that is used again.
//! Sizes are the server's claim and are checked against what comes out.

use bytes::{Buf as _, Bytes};
use flate2::{Decompress, FlushDecompress, Status};
use thiserror::Error;
use zstd::stream::raw::{Decoder, InBuffer, Operation as _, OutBuffer};

use super::event::{HEADER_BYTES, Header};
use super::input::{Input, Malformed, big_endian};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Zstd,
}

/// A compressed transaction, not yet expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload<'a> {
    pub compression: Compression,
    pub plain_size: Option<u64>,
    pub bytes: &'a [u8],
}

impl<'a> Payload<'a> {
    pub fn parse(body: &'a [u8]) -> Result<Self, Malformed> {
        const END: u64 = 0;
        const PAYLOAD_SIZE: u64 = 1;
        const ALGORITHM: u64 = 2;
        const PLAIN_SIZE: u64 = 3;
        let what = "the header of a compressed transaction";
        let mut input = Input(body);
        let (mut size, mut compression, mut plain_size) = (None, None, None);
        loop {
            let field = input.lenenc(what)?;
            if field == END {
                break;
            }
            let mut value = Input(input.lenenc_bytes(what)?);
            match field {
                PAYLOAD_SIZE => size = Some(value.lenenc(what)?),
                ALGORITHM => {
                    compression = Some(match value.lenenc(what)? {
                        0 => Compression::Zstd,
                        255 => Compression::None,
                        found => {
                            let found = u32::try_from(found).unwrap_or(u32::MAX);
                            return Err(Malformed::UnknownKind { what: "a transaction's compression", found });
                        }
                    });
                }
                PLAIN_SIZE => plain_size = Some(value.lenenc(what)?),
                _ => {}
            }
        }
        let (size, compression) = size.zip(compression).ok_or(Malformed::Truncated(what))?;
        let bytes = usize::try_from(size).ok().and_then(|size| input.0.get(..size));
        let bytes = bytes.ok_or(Malformed::Truncated("a compressed transaction"))?;
        if bytes.len() != input.0.len() {
            return Err(Malformed::LeftOver(input.0.len() - bytes.len(), "a compressed transaction"));
        }
        if bytes.is_empty() {
            return Err(Malformed::Truncated("a compressed transaction"));
        }
        Ok(Payload { compression, plain_size, bytes })
    }
}

#[derive(Debug, Error)]
pub enum ExpandError {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("the transaction cannot be decompressed: {0}")]
    Zstd(std::io::Error),
    #[error("an event inside a compressed transaction has {size} bytes, more than the {cap} that are allowed")]
    TooLarge { size: usize, cap: usize },
    #[error("the compressed transaction holds {found} bytes and says that it holds {said}")]
    PlainSize { said: u64, found: u64 },
}

/// Bytes that are decompressed at a time; a larger event makes the buffer grow for its transaction.
const STRIDE: usize = 64 * 1024;

/// The memory for expanding transactions, one after the other.
pub struct Inflater {
    zstd: Decoder<'static>,
    buffer: Vec<u8>,
}

impl Inflater {
    pub fn new() -> std::io::Result<Self> {
        Ok(Inflater { zstd: Decoder::new()?, buffer: Vec::new() })
    }

    /// The events of a compressed transaction, given the body of its event. One that is larger than `cap` is an error;
    /// how many there are does not matter.
    pub fn open(mut self, body: &Bytes, cap: usize) -> Result<InnerEvents, ExpandError> {
        let Payload { compression, plain_size, bytes } = Payload::parse(body)?;
        self.zstd.reinit().map_err(ExpandError::Zstd)?;
        self.buffer.truncate(STRIDE);
        self.buffer.shrink_to(STRIDE);
        self.buffer.resize(STRIDE, 0);
        let at_frame_end = compression == Compression::None;
        let rest = body.slice_ref(bytes);
        Ok(InnerEvents { inflater: self, compression, plain_size, rest, start: 0, end: 0, total: 0, cap, at_frame_end })
    }
}

/// The events of a compressed transaction; see [`Inflater::open`].
pub struct InnerEvents {
    inflater: Inflater,
    compression: Compression,
    plain_size: Option<u64>,
    /// Not yet decompressed.
    rest: Bytes,
    /// Decompressed and not yet handed out.
    start: usize,
    end: usize,
    total: u64,
    cap: usize,
    at_frame_end: bool,
}

impl InnerEvents {
    /// Gives the memory back for the next transaction.
    pub fn into_inflater(self) -> Inflater {
        self.inflater
    }

    /// The next event, to be split without a checksum; `None` after the last.
    pub fn next_event(&mut self) -> Result<Option<&[u8]>, ExpandError> {
        if !self.gather(HEADER_BYTES)? {
            return match self.end - self.start {
                0 => self.finish().map(|()| None),
                _ => Err(Malformed::Truncated("an event of a compressed transaction").into()),
            };
        }
        let size = Header::parse(&self.inflater.buffer[self.start..self.end])?.size as usize;
        if size < HEADER_BYTES {
            return Err(Malformed::Invalid("the event's size").into());
        }
        if size > self.cap {
            return Err(ExpandError::TooLarge { size, cap: self.cap });
        }
        if !self.gather(size)? {
            return Err(Malformed::Truncated("an event of a compressed transaction").into());
        }
        let event = self.start..self.start + size;
        self.start = event.end;
        Ok(Some(&self.inflater.buffer[event]))
    }

    fn finish(&self) -> Result<(), ExpandError> {
        if !self.at_frame_end || self.total == 0 {
            return Err(Malformed::Truncated("a compressed transaction").into());
        }
        match self.plain_size {
            Some(said) if said != self.total => Err(ExpandError::PlainSize { said, found: self.total }),
            _ => Ok(()),
        }
    }

    /// Makes at least so many bytes ready; `false` if there are no more.
    fn gather(&mut self, wanted: usize) -> Result<bool, ExpandError> {
        if self.end - self.start >= wanted {
            return Ok(true);
        }
        self.inflater.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        while self.end < wanted {
            if self.end == self.inflater.buffer.len() {
                // Grows with what really comes, not with what a header says.
                let grown = (2 * self.end).min(wanted.max(STRIDE));
                self.inflater.buffer.resize(grown, 0);
            }
            if !self.expand()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Decompresses into the free part of the buffer; `false` if nothing is left.
    fn expand(&mut self) -> Result<bool, ExpandError> {
        let free = &mut self.inflater.buffer[self.end..];
        let written = match self.compression {
            Compression::None => {
                let taken = self.rest.split_to(free.len().min(self.rest.len()));
                free[..taken.len()].copy_from_slice(&taken);
                taken.len()
            }
            Compression::Zstd => loop {
                if self.rest.is_empty() && self.at_frame_end {
                    break 0;
                }
                let mut input = InBuffer::around(&self.rest);
                let mut output = OutBuffer::around(&mut *free);
                let hint = self.inflater.zstd.run(&mut input, &mut output).map_err(ExpandError::Zstd)?;
                let (read, written) = (input.pos, output.pos());
                self.rest.advance(read);
                self.at_frame_end = hint == 0;
                if written > 0 {
                    break written;
                }
                if read == 0 && !self.at_frame_end {
                    return Err(Malformed::Truncated("a compressed transaction").into());
                }
            },
        };
        self.end += written;
        self.total += written as u64;
        Ok(written > 0)
    }
}

/// MariaDB: the text of a compressed statement, or the rows of a compressed event. `out` is emptied first.
pub fn expand(bytes: &[u8], cap: usize, out: &mut Vec<u8>) -> Result<(), ExpandError> {
    let what = "compressed bytes";
    let mut input = Input(bytes);
    let head = input.u8(what)?;
    if head & 0x80 == 0 {
        return Err(Malformed::Invalid("the header of compressed bytes").into());
    }
    let algorithm = head >> 4 & 7;
    if algorithm != 0 {
        return Err(Malformed::UnknownKind { what: "the compression", found: u32::from(algorithm) }.into());
    }
    let digits = match head & 7 {
        digits @ 1..=4 => usize::from(digits),
        _ => return Err(Malformed::Invalid("the header of compressed bytes").into()),
    };
    let size = big_endian(input.bytes(digits, what)?) as usize;
    if size > cap {
        return Err(ExpandError::TooLarge { size, cap });
    }
    out.clear();
    inflate(input.0, size, true, out)?;
    Ok(())
}

/// MariaDB: a column that is declared COMPRESSED; appended to `out`.
pub(super) fn expand_column(raw: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
    const ZLIB: u8 = 8;
    let Some((&head, rest)) = raw.split_first() else { return Ok(()) };
    if head == 0 {
        out.extend_from_slice(rest);
        return Ok(());
    }
    let digits = usize::from(head & 7);
    if head >> 4 != ZLIB || !(1..=4).contains(&digits) {
        return Err(Malformed::UnknownKind { what: "the compression of a column", found: u32::from(head) });
    }
    let mut input = Input(rest);
    let size = big_endian(input.bytes(digits, "a compressed column")?) as usize;
    inflate(input.0, size, head & 8 == 0, out)
}

/// Appends exactly `size` bytes, or fails.
fn inflate(bytes: &[u8], size: usize, has_header: bool, out: &mut Vec<u8>) -> Result<(), Malformed> {
    let truncated = Malformed::Truncated("compressed bytes");
    let mut decompress = Decompress::new(has_header);
    let goal = out.len().checked_add(size).ok_or(truncated)?;
    loop {
        // Grows with what really comes: a size is only a claim, and deflate gains a factor of a thousand at most. One
        // byte more than the goal tells whether more would come.
        if out.len() == out.capacity() {
            out.reserve((goal + 1 - out.len()).min(STRIDE.max(out.len())));
        }
        let (read, before) = (decompress.total_in() as usize, out.len());
        let input = bytes.get(read..).unwrap_or_default();
        let status = decompress
            .decompress_vec(input, out, FlushDecompress::None)
            .map_err(|_| Malformed::Invalid("compressed bytes"))?;
        if out.len() > goal {
            return Err(Malformed::LeftOver(out.len() - goal, "compressed bytes"));
        }
        let progress = out.len() > before || decompress.total_in() as usize > read;
        match status {
            Status::StreamEnd if out.len() == goal => return Ok(()),
            Status::StreamEnd => return Err(truncated),
            _ if progress || out.len() == out.capacity() => {}
            _ => return Err(truncated),
        }
    }
}

#[cfg(test)]
#[path = "compressed_tests.rs"]
mod tests;
