//! A bare client: asks for the stream with the options that outboxd uses, looks at nothing but the frames' headers,
//! and discards. What it reaches is the limit that the server sets to any relay.
//!
//! An eager one reads whenever there is something. One with a pause sleeps once it has looked at all it has read,
//! and so lets the socket fill; the walsender, which flushes after each message to a client that keeps up, then sends
//! many at once, and both sides pay fewer system calls.
//!
//! It reads a plain blocking socket, without the async runtime, so that nothing but the reads is measured. It confirms
//! nothing: the slot stays where it is and can be drained again.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::resource::UsageWho;
use outboxd::source::postgres::conninfo::ConnInfo;
use outboxd::source::postgres::walsender::{CopyBoth, WalsenderConnection};
use outboxd::source::transport::{ReadHalf, WriteHalf};
use serde_json::{Value, json};

use crate::process::{self, Walsender, used_seconds};

/// As much as outboxd asks for in one read.
const READ_BYTES: usize = 256 << 10;

#[derive(clap::Args)]
pub struct Options {
    /// Must be TCP without TLS
    source: String,
    #[arg(long)]
    slot: String,
    #[arg(long)]
    publication: String,
    /// Ends with the transaction that holds this many inserts
    #[arg(long)]
    rows: u64,
    /// Sleep this long, in microseconds, before each read; 0 reads eagerly
    #[arg(long, default_value_t = 0)]
    pause: u64,
}

pub async fn run(options: &Options) -> anyhow::Result<Value> {
    let session = crate::connect(&options.source).await?;
    until_idle(&session, &options.slot).await?;
    let connection = WalsenderConnection::connect(&ConnInfo::parse(&options.source)?).await?;
    let command = format!(
        "START_REPLICATION SLOT \"{}\" LOGICAL 0/0 (proto_version '1', publication_names '\"{}\"', binary 'true')",
        options.slot, options.publication
    );
    let began = Instant::now();
    let cpu_began = used_seconds(UsageWho::RUSAGE_SELF)?;
    let mut stream = Stream::new(connection.start_replication(&command).await?)?;
    let mut walsender = Walsender::new(session, &options.slot);
    let counted = stream.discard(options.rows, Duration::from_micros(options.pause))?;
    let cpu = used_seconds(UsageWho::RUSAGE_SELF)? - cpu_began;
    let server_cpu = walsender.look().await?;
    let millions = counted.rows as f64 / 1e6;
    let streamed = (counted.last - counted.first).as_secs_f64();
    Ok(json!({
        "pause_us": options.pause,
        "rows": counted.rows,
        "messages": counted.messages,
        "reads": counted.reads,
        "bytes": counted.bytes,
        "first_s": (counted.first - began).as_secs_f64(),
        "wall_s": (counted.last - began).as_secs_f64(),
        "rows_s": counted.rows as f64 / streamed,
        "cpu_s_per_m": cpu / millions,
        "walsender_cpu_s_per_m": server_cpu.map(|cpu| cpu / millions),
        "load_average": process::load_average(),
    }))
}

/// The walsender of an earlier drain may need a moment to notice that it is alone.
async fn until_idle(session: &tokio_postgres::Client, slot: &str) -> anyhow::Result<()> {
    let statement = "SELECT active FROM pg_replication_slots WHERE slot_name = $1";
    for _ in 0..200 {
        if !session.query_one(statement, &[&slot]).await?.get::<_, bool>(0) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("slot {slot} is in use")
}

struct Stream {
    socket: TcpStream,
    buffer: Vec<u8>,
    /// The part of the buffer that is read and not yet looked at.
    held: std::ops::Range<usize>,
}

struct Counted {
    rows: u64,
    messages: u64,
    reads: u64,
    bytes: u64,
    first: Instant,
    last: Instant,
}

impl Stream {
    fn new(stream: CopyBoth) -> anyhow::Result<Self> {
        let (ReadHalf::Tcp(reader), WriteHalf::Tcp(writer)) = (stream.reader, stream.writer) else {
            bail!("the bare client reads plain TCP only: add sslmode=disable to the address");
        };
        let socket = reader.reunite(writer)?.into_std()?;
        socket.set_nonblocking(false)?;
        let mut buffer = vec![0; READ_BYTES.max(stream.buffered.len())];
        buffer[..stream.buffered.len()].copy_from_slice(&stream.buffered);
        Ok(Stream { socket, buffer, held: 0..stream.buffered.len() })
    }

    /// Reads until the commit after which `rows` inserts have come.
    fn discard(&mut self, rows: u64, pause: Duration) -> anyhow::Result<Counted> {
        let now = Instant::now();
        let mut counted = Counted { rows: 0, messages: 0, reads: 0, bytes: 0, first: now, last: now };
        loop {
            while let Some((tag, frame)) = next_frame(&self.buffer[self.held.clone()])? {
                self.held.start += frame.len() + 5;
                counted.messages += 1;
                match (tag, frame.first(), frame.get(25)) {
                    (b'd', Some(b'w'), Some(b'I')) => {
                        if counted.rows == 0 {
                            counted.first = Instant::now();
                        }
                        counted.rows += 1;
                    }
                    (b'd', Some(b'w'), Some(b'C')) if counted.rows >= rows => {
                        counted.last = Instant::now();
                        return Ok(counted);
                    }
                    (b'd', Some(b'w'), _) => {}
                    (b'd', Some(b'k'), _) => {
                        if frame.last() == Some(&1) {
                            self.socket.write_all(&still_here()).context("answering the server")?;
                        }
                    }
                    (b'E', ..) => bail!("the server ended the stream: {}", String::from_utf8_lossy(frame)),
                    (tag, ..) => bail!("a frame of kind {:?}", char::from(tag)),
                }
            }
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
            counted.bytes += self.fill()?;
            counted.reads += 1;
        }
    }

    fn fill(&mut self) -> anyhow::Result<u64> {
        self.buffer.copy_within(self.held.clone(), 0);
        self.held = 0..self.held.len();
        if self.held.end == self.buffer.len() {
            self.buffer.resize(self.buffer.len() * 2, 0);
        }
        let count = self.socket.read(&mut self.buffer[self.held.end..])?;
        if count == 0 {
            bail!("the server closed the connection");
        }
        self.held.end += count;
        Ok(count as u64)
    }
}

/// Tag and body of the frame at the beginning, once it is whole.
fn next_frame(bytes: &[u8]) -> anyhow::Result<Option<(u8, &[u8])>> {
    let Some((header, rest)) = bytes.split_first_chunk::<5>() else { return Ok(None) };
    let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
    let length = length.checked_sub(4).context("a frame of impossible length")?;
    Ok(rest.get(..length).map(|body| (header[0], body)))
}

/// A standby status update that confirms nothing: the position 0 leaves the slot alone.
fn still_here() -> [u8; 39] {
    let mut frame = [0; 39];
    frame[..6].copy_from_slice(b"d\0\0\0\x26r");
    frame
}
