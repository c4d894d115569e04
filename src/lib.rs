//! outboxd moves a transactional outbox to a broker by reading the database's own log.
//!
//! One loop, one direction, one way back for acknowledgements:
//!
//! ```text
//!  log frame ──decode──▶ Chunk of commits ──admit──▶ AckWindow ──route──▶ Record ──enqueue──▶ Sink
//!      ▲                                              │  ▲                                 │
//!      │                                              │  └───────── resolve(receipt) ◀─────┘  any order, any thread
//!      └────── confirm(position) ◀──── watermark ─────┘            only the highest contiguous finished commit
//! ```
//!
//! [`source`] yields [`event::Chunk`]s, [`ack_window`] bounds and orders what is in flight, [`route`] turns an
//! event into a record, [`sink`] delivers it, and [`relay`] is the only place that sees all of them. A [`publisher`] is one
//! way from a chunk to one sink; a pipeline may have many, and the lowest of their watermarks is confirmed. The
//! [`warden`] beside the loop sees to their troubles, to what people order, and to the notes. A position is
//! confirmed to the database only when every record of its commit, and of every commit before it, has been
//! acknowledged. Whatever goes wrong ends the *generation* (one connection to the source, one producer, one
//! window); [`pipeline`] starts the next one from the confirmed position.

pub mod ack_window;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod dead_letters;
pub mod event;
pub mod failure;
pub mod metrics;
pub mod pipeline;
pub mod position;
pub mod preflight;
pub mod publisher;
pub mod recent;
pub mod relay;
pub mod route;
pub mod sink;
pub mod source;
pub mod status;
pub mod warden;

pub mod admin;
