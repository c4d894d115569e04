//! The reading half: packets of the binlog stream become chunks.
//!
//! ```text
//!   length:u24 sequence:u8  00 event          an event of 16 MiB or more goes on in the next packet
//!                           FF error
//!                           FE                the server ends the stream
//! ```
//!
//! What one read of the socket gave is decoded to its end (or until the chunk is full) before anything is yielded, and
//! wanted values stay where they lie in the buffer. Only what came in several packets or compressed is copied.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncReadExt as _;

use super::compressed::{Inflater, InnerEvents};
use super::dump::{self, Entry};
use super::event::{HEADER_BYTES, Header, kind};
use super::log::{Log, Step, Unbound};
use super::server_error::WireError;
use super::snapshot::SnapshotReader;
use super::wire::{MAX_PAYLOAD, PACKET_HEADER};
use crate::event::Chunk;
use crate::failpoints;
use crate::source::SourceFailure;
use crate::source::transport::{ReadHalf, WriteHalf};

/// A chunk is yielded when it has this many events or bytes, though more may have been read.
const CHUNK_EVENTS: usize = 1000;
const CHUNK_BYTES: usize = 256 * 1024;

/// Room for one read.
const READ_BYTES: usize = 256 * 1024;

/// A compressed transaction is held whole while its events are expanded one by one, so its size is bounded; what it
/// expands to is not.
pub const MAX_COMPRESSED: usize = 32 << 20;

/// An event larger than this is not one that the server sends: a row has at most 1 GiB.
const MAX_EVENT: usize = (1 << 30) + (64 << 20);

pub struct Reader {
    /// `None` until the snapshot is delivered: a server does not wait for hours with its log.
    stream: Option<Stream>,
    entry: Entry,
    buffer: BytesMut,
    /// Bytes of the buffer that are decoded already.
    consumed: usize,
    /// What has come of an event of several packets.
    joined: Option<Joined>,
    unpacking: Option<InnerEvents>,
    inflater: Option<Inflater>,
    /// A table's description whose columns must be found before its rows can be read.
    unbound: Option<Box<Unbound>>,
    log: Log,
    snapshot: Option<SnapshotReader>,
    stall_timeout: Duration,
    address: String,
}

struct Stream {
    reader: ReadHalf,
    /// Kept open: a closed half would end the stream.
    _writer: WriteHalf,
}

/// Everything a reader is made of.
pub struct Parts {
    pub entry: Entry,
    pub log: Log,
    pub snapshot: Option<SnapshotReader>,
    pub stall_timeout: Duration,
    pub address: String,
}

/// An event of several packets is put together as it comes: a packet of 16 MiB is not held beside it.
#[derive(Default)]
struct Joined {
    event: BytesMut,
    /// Bytes of the current packet that are still to come.
    missing: usize,
    /// Another packet follows the current one.
    goes_on: bool,
    /// Its size was looked at.
    judged: bool,
}

/// Why decoding stopped.
enum Pause {
    NeedBytes,
    ChunkFull,
    Unbound,
}

impl Reader {
    pub fn new(parts: Parts) -> Self {
        Reader {
            stream: None,
            entry: parts.entry,
            buffer: BytesMut::new(),
            consumed: 0,
            joined: None,
            unpacking: None,
            inflater: None,
            unbound: None,
            log: parts.log,
            snapshot: parts.snapshot,
            stall_timeout: parts.stall_timeout,
            address: parts.address,
        }
    }

    /// Fills the chunk with what comes next. May be cancelled: it waits only before anything is decoded.
    pub async fn next(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        if let Some(snapshot) = &mut self.snapshot {
            if snapshot.next(chunk, self.log.tables().projection()).await? {
                self.snapshot = None;
            }
            return Ok(());
        }
        loop {
            if let Some(unbound) = &self.unbound {
                let bound = self.log.tables().bind(unbound.table, unbound.shape.clone(), unbound.logged_at).await?;
                if let Some(unbound) = self.unbound.take() {
                    self.log.learn(unbound.body, bound);
                }
            }
            self.log.begin_chunk(chunk);
            let pause = self.decode(chunk)?;
            let decoded = self.buffer.split_to(self.consumed).freeze();
            self.consumed = 0;
            self.log.finish_chunk(chunk);
            if !chunk.is_empty() {
                chunk.attach_raw(decoded);
                return Ok(());
            }
            if let Pause::NeedBytes = pause {
                self.fill().await?;
            }
        }
    }

    /// Opens the log. To be called before the first [`next`](Self::next), unless a snapshot comes first.
    pub async fn enter(&mut self) -> Result<(), SourceFailure> {
        let (transport, buffered) = dump::start(&self.entry).await?.into_parts();
        let (reader, writer) = transport.into_split();
        self.buffer.extend_from_slice(&buffered);
        self.stream = Some(Stream { reader, _writer: writer });
        Ok(())
    }

    async fn fill(&mut self) -> Result<(), SourceFailure> {
        let Some(stream) = &mut self.stream else { return self.enter().await };
        self.buffer.reserve(READ_BYTES);
        let read = tokio::time::timeout(self.stall_timeout, stream.reader.read_buf(&mut self.buffer)).await;
        let address = &self.address;
        match read {
            Ok(Ok(0)) => Err(SourceFailure::transient(format!("{address} closed the binlog connection"))),
            Ok(Ok(_)) => Ok(failpoints::reach("received")?),
            Ok(Err(error)) => {
                Err(SourceFailure::transient(format!("the binlog connection to {address} broke: {error}")))
            }
            Err(_) => {
                let silent = self.stall_timeout.as_secs();
                Err(SourceFailure::transient(format!("no word from {address} for {silent} s, not even a heartbeat")))
            }
        }
    }

    fn decode(&mut self, chunk: &mut Chunk) -> Result<Pause, SourceFailure> {
        // Taken out so that packets can be borrowed while the reader changes.
        let buffer = std::mem::take(&mut self.buffer);
        let paused = self.decode_packets(&buffer, chunk);
        self.buffer = buffer;
        paused
    }

    fn decode_packets(&mut self, buffer: &[u8], chunk: &mut Chunk) -> Result<Pause, SourceFailure> {
        loop {
            if chunk.events().len() >= CHUNK_EVENTS || chunk.rendered_len() >= CHUNK_BYTES {
                return Ok(Pause::ChunkFull);
            }
            if self.consumed >= CHUNK_BYTES && !chunk.events().is_empty() {
                return Ok(Pause::ChunkFull);
            }
            if self.unbound.is_some() {
                return Ok(Pause::Unbound);
            }
            if self.unpacking.is_some() {
                self.unpack(chunk)?;
                continue;
            }
            let rest = &buffer[self.consumed..];
            if let Some(joined) = self.joined.as_mut().filter(|joined| joined.missing > 0) {
                let part = &rest[..rest.len().min(joined.missing)];
                if part.is_empty() {
                    return Ok(Pause::NeedBytes);
                }
                joined.event.extend_from_slice(part);
                joined.missing -= part.len();
                self.consumed += part.len();
                self.judge_joined()?;
                continue;
            }
            if let Some(whole) = self.joined.take_if(|joined| !joined.goes_on) {
                let event = whole.event.freeze();
                self.packet(&event, None, Some(&event), chunk)?;
                continue;
            }
            let Some((header, rest)) = rest.split_first_chunk::<PACKET_HEADER>() else { return Ok(Pause::NeedBytes) };
            let length = u32::from_le_bytes([header[0], header[1], header[2], 0]) as usize;
            let goes_on = length == MAX_PAYLOAD;
            if goes_on || self.joined.is_some() {
                let joined = self.joined.get_or_insert_default();
                (joined.missing, joined.goes_on) = (length, goes_on);
                if joined.event.len() + length > MAX_EVENT {
                    return Err(self.log.unreadable("an event is larger than any that a server writes"));
                }
                self.consumed += PACKET_HEADER;
                continue;
            }
            let Some(packet) = rest.get(..length) else { return Ok(Pause::NeedBytes) };
            self.consumed += PACKET_HEADER + length;
            self.packet(packet, Some(buffer), None, chunk)?;
        }
    }

    /// A compressed transaction that is too large is refused as soon as it says so, before it is held.
    fn judge_joined(&mut self) -> Result<(), SourceFailure> {
        let Some(joined) = self.joined.as_mut().filter(|joined| !joined.judged) else { return Ok(()) };
        // The first byte is the packet's.
        let Some(Ok(header)) = joined.event.get(1..1 + HEADER_BYTES).map(Header::parse) else { return Ok(()) };
        joined.judged = true;
        if header.type_code == kind::TRANSACTION_PAYLOAD {
            let size = header.size as usize;
            self.fits(size)?;
            if let Some(joined) = &mut self.joined {
                // Once and for all: growing would take twice as much for a while.
                joined.event.reserve(1 + size - joined.event.len().min(size));
            }
        }
        Ok(())
    }

    fn fits(&self, size: usize) -> Result<(), SourceFailure> {
        if size <= MAX_COMPRESSED {
            return Ok(());
        }
        Err(SourceFailure::Undecodable {
            what: format!(
                "a compressed transaction has {size} bytes after {}, more than the {MAX_COMPRESSED} that outboxd holds",
                self.log.reached()
            ),
            remedy: "nothing was skipped; write such transactions with binlog_transaction_compression = OFF, or in \
                     smaller pieces"
                .to_owned(),
        })
    }

    /// One whole packet: in the buffer, or joined of several.
    fn packet(
        &mut self,
        packet: &[u8],
        buffer: Option<&[u8]>,
        joined: Option<&Bytes>,
        chunk: &mut Chunk,
    ) -> Result<(), SourceFailure> {
        let event = match packet.split_first() {
            Some((0x00, event)) => event,
            Some((0xFF, _)) => return Err(self.server_error(packet)),
            Some((0xFE, _)) => {
                return Err(SourceFailure::transient(format!("{} ended the binlog stream", self.address)));
            }
            _ => return Err(self.log.unreadable("a packet is neither an event nor an error")),
        };
        match self.log.event(event, buffer, chunk)? {
            Step::Go => {}
            Step::Learn(unbound) => self.unbound = Some(unbound),
            Step::Unpack => self.open_payload(event, joined)?,
        }
        Ok(())
    }

    fn open_payload(&mut self, event: &[u8], joined: Option<&Bytes>) -> Result<(), SourceFailure> {
        self.fits(event.len())?;
        let body = self.log.body_of(event)?;
        let body = match joined {
            Some(joined) => joined.slice_ref(body),
            None => Bytes::copy_from_slice(body),
        };
        let inflater = match self.inflater.take() {
            Some(inflater) => inflater,
            None => Inflater::new().map_err(|error| SourceFailure::transient(format!("no decompressor: {error}")))?,
        };
        let opened = inflater.open(&body, MAX_EVENT);
        self.unpacking = Some(opened.map_err(|error| self.log.unreadable(&error.to_string()))?);
        Ok(())
    }

    /// One event of the compressed transaction that is open.
    fn unpack(&mut self, chunk: &mut Chunk) -> Result<(), SourceFailure> {
        let Reader { unpacking, log, .. } = self;
        let Some(inner) = unpacking else { return Ok(()) };
        let step = match inner.next_event().map_err(|error| log.unreadable(&error.to_string()))? {
            Some(event) => log.inner_event(event, chunk)?,
            None => {
                self.inflater = self.unpacking.take().map(InnerEvents::into_inflater);
                return Ok(());
            }
        };
        match step {
            Step::Go => Ok(()),
            Step::Learn(unbound) => {
                self.unbound = Some(unbound);
                Ok(())
            }
            Step::Unpack => Err(self.log.unreadable("a compressed transaction lies inside another")),
        }
    }

    fn server_error(&self, packet: &[u8]) -> SourceFailure {
        let error = WireError::from_packet(packet);
        if let WireError::Server { code, message } = &error
            && let Some(refusal) = dump::refusal(*code, message, self.entry.replica)
        {
            return refusal;
        }
        error.classify(&self.address)
    }
}
