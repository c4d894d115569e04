//! A bare client of a binary log: asks for it as outboxd does and discards it. What it reaches is the limit that the
//! server sets, or, when it decodes every column of every row to text, what reading rows costs by itself.
//!
//! It reads a plain blocking socket, without the async runtime, and stores no position.

use std::collections::HashMap;
use std::io::Read as _;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::resource::UsageWho;
use outboxd::event::Want;
use outboxd::source::mysql::conninfo::ConnInfo;
use outboxd::source::mysql::dump::{self, Entry, ReplicaId};
use outboxd::source::mysql::event::{self, Body, RowsKind};
use outboxd::source::mysql::position::FilePos;
use outboxd::source::mysql::rows::{RowImages, Value};
use outboxd::source::mysql::table_map::{self, TableShape};
use outboxd::source::mysql::values::{BadValue, render};
use outboxd::source::transport::Transport;
use serde_json::json;

use crate::process::{cpu_seconds, load_average, used_seconds};

/// As much as outboxd asks for in one read.
const READ_BYTES: usize = 256 << 10;
const PACKET_HEADER: usize = 4;

#[derive(clap::Args)]
pub struct Options {
    /// Must be TCP without TLS
    source: String,
    /// Where to begin, as outboxd's --start takes it
    #[arg(long)]
    from: String,
    /// Where to end, as `binlog.000002:157`
    #[arg(long)]
    until: String,
    /// How many rows lie between, for a client that does not look
    #[arg(long)]
    rows: u64,
    /// Decode every column of every inserted row
    #[arg(long)]
    decode: bool,
    /// Also report the CPU time of this process, the server's say
    #[arg(long, value_name = "PID")]
    server: Option<u32>,
}

pub async fn run(options: &Options) -> anyhow::Result<serde_json::Value> {
    let until: FilePos = options.until.parse().map_err(|()| anyhow::anyhow!("--until {}", options.until))?;
    let info = ConnInfo::parse(&options.source)?;
    let replica = ReplicaId::random();
    let server_before = options.server.and_then(cpu_seconds);
    let began = Instant::now();
    let cpu_began = used_seconds(UsageWho::RUSAGE_SELF)?;
    let from = options.from.parse()?;
    let entry = Entry { info, replica, from, heartbeat: Duration::from_secs(10), follow: true };
    let wire = dump::start(&entry).await?;
    let (transport, buffered) = wire.into_parts();
    let Transport::Tcp(socket) = transport else { bail!("plain TCP only: add ssl-mode=disabled to the address") };
    let socket = socket.into_std()?;
    socket.set_nonblocking(false)?;
    let mut stream = Stream { socket, buffer: vec![0; READ_BYTES], held: 0..0 };
    stream.buffer[..buffered.len()].copy_from_slice(&buffered);
    stream.held = 0..buffered.len();
    let mut log = Log { until, decode: options.decode, ..Log::default() };
    stream.discard(&mut log)?;
    let wall = began.elapsed().as_secs_f64();
    let cpu = used_seconds(UsageWho::RUSAGE_SELF)? - cpu_began;
    let server_cpu = options.server.and_then(cpu_seconds).zip(server_before).map(|(after, before)| after - before);
    let rows = if options.decode { log.rows } else { options.rows };
    if rows != options.rows {
        bail!("{rows} rows were read, and {} should be there", options.rows);
    }
    let millions = rows as f64 / 1e6;
    Ok(json!({
        "rows": rows,
        "text_bytes": log.text_bytes,
        "wall_s": wall,
        "rows_s": rows as f64 / wall,
        "cpu_s_per_m": cpu / millions,
        "server_cpu_s_per_m": server_cpu.map(|cpu| cpu / millions),
        "load_average": load_average(),
    }))
}

struct Stream {
    socket: TcpStream,
    buffer: Vec<u8>,
    held: std::ops::Range<usize>,
}

impl Stream {
    fn discard(&mut self, log: &mut Log) -> anyhow::Result<()> {
        loop {
            loop {
                let held = &self.buffer[self.held.clone()];
                let Some((header, rest)) = held.split_first_chunk::<PACKET_HEADER>() else { break };
                let length = u32::from_le_bytes([header[0], header[1], header[2], 0]) as usize;
                let Some(packet) = rest.get(..length) else { break };
                self.held.start += PACKET_HEADER + length;
                if packet.first() != Some(&0) {
                    bail!("the server ended the stream: {}", String::from_utf8_lossy(packet));
                }
                if log.event(&packet[1..])? {
                    return Ok(());
                }
            }
            self.buffer.copy_within(self.held.clone(), 0);
            self.held = 0..self.held.len();
            if self.held.end == self.buffer.len() {
                self.buffer.resize(self.buffer.len() * 2, 0);
            }
            match self.socket.read(&mut self.buffer[self.held.end..])? {
                0 => bail!("the server closed the connection"),
                count => self.held.end += count,
            }
        }
    }
}

#[derive(Default)]
struct Log {
    until: FilePos,
    decode: bool,
    checksum: Option<bool>,
    file: String,
    tables: HashMap<u64, TableShape>,
    rows: u64,
    text_bytes: u64,
    text: Vec<u8>,
}

impl Log {
    /// Whether this was the last event.
    fn event(&mut self, bytes: &[u8]) -> anyhow::Result<bool> {
        let header = event::Header::parse(bytes)?;
        let looked_at =
            self.decode || matches!(header.type_code, event::kind::ROTATE | event::kind::FORMAT_DESCRIPTION);
        if looked_at {
            // The first one comes before the server has said whether events have a checksum.
            let checksum = match self.checksum {
                Some(checksum) => checksum,
                None => event::split(bytes, true).is_ok(),
            };
            let event = event::split(bytes, checksum)?;
            match event.decode()? {
                Body::FormatDescription(description) => self.checksum = Some(description.checksum),
                Body::Rotate(rotate) => rotate.file.clone_into(&mut self.file),
                Body::TableMap(body) => {
                    let shape = table_map::parse(body, false)?;
                    self.tables.insert(shape.table_id, shape);
                }
                Body::Rows(rows) if rows.kind == RowsKind::Write => self.write(&rows)?,
                _ => {}
            }
        }
        Ok(self.file == self.until.file && u64::from(header.end) >= self.until.offset)
    }

    fn write(&mut self, rows: &event::Rows<'_>) -> anyhow::Result<()> {
        let Log { tables, text, .. } = self;
        let shape = tables.get(&rows.table_id).context("rows before their table")?;
        let wanted: Vec<usize> = (0..shape.columns.len()).collect();
        let write = rows.write()?;
        let mut images = RowImages::new(&write, shape)?;
        loop {
            text.clear();
            let mut borrowed = 0;
            let visit = |at: usize, value: Value<'_>| {
                if let Value::Bytes(raw) = value
                    && let outboxd::source::mysql::values::Rendered::Borrowed(bytes) =
                        render(&shape.columns[at], Want::Text, raw, text)?
                {
                    borrowed += bytes.len();
                }
                Ok::<(), BadValue>(())
            };
            if !images.next_row(&wanted, visit)? {
                return Ok(());
            }
            self.rows += 1;
            self.text_bytes += (text.len() + borrowed) as u64;
        }
    }
}
