//! The consumer's side of an outbox: an event that comes again has its effect once.
//!
//! ```text
//!   Kafka ──record──▶ Event::from_message ──▶ ┌ a transaction of the consumer's database ┐ ──commit──▶ offset
//!                                             │  Inbox::accept ──New──▶ the effect        │
//!                                             └───────── Duplicate, Stale: nothing ───────┘
//! ```
//!
//! Delivery is at least once: after a crash of the relay or of the consumer the same event comes a second time. Whether it
//! was processed can only be known safely where its effect is, so the memory of it is in the consumer's own tables
//! (`sql/postgres/processed-events.sql`, [`POSTGRES_SCHEMA`]) and is written by the transaction that has the effect: both
//! are there or neither is. Therefore [`Inbox::accept`] takes a transaction and nothing else; and therefore the offset is
//! committed after the transaction, never before.
//!
//! ```no_run
//! # use outboxd::inbox::{Accepted, Event, Inbox, tokio_postgres::Client};
//! # async fn example(client: &mut Client, message: &rdkafka::message::OwnedMessage) -> anyhow::Result<()> {
//! let inbox = Inbox::new("billing");
//! let transaction = client.transaction().await?;
//! match inbox.accept(&transaction, &Event::from_message(message)?).await? {
//!     Accepted::New => { /* what the event is for, in this transaction */ }
//!     Accepted::Duplicate | Accepted::Stale { .. } => {}
//! }
//! transaction.commit().await?;
//! // Only now: consumer.commit_message(…).
//! # Ok(())
//! # }
//! ```
//!
//! The whole of a consumer is `examples/inbox_consumer.rs`; the same in SQL for other languages and databases is in
//! docs/consumers.md.

mod kafka;
mod postgres;

pub use kafka::Unusable;
pub use postgres::{Inbox, InboxError};
/// The versions that this module speaks with.
pub use {rdkafka, tokio_postgres};

/// What makes the tables in PostgreSQL; running it again changes nothing.
pub const POSTGRES_SCHEMA: &str = include_str!("../../sql/postgres/processed-events.sql");

/// What the inbox has to know of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event<'a> {
    /// Must be unique among all events of the group. Ids that count the rows of one table are so only as long as the
    /// consumer reads one outbox; with several, give each an [`Inbox`] with a group of its own.
    pub id: &'a str,
    /// Where events carry versions, and an older one must not undo a newer one.
    pub entity: Option<Entity<'a>>,
}

/// What an event is about, and which of its versions it tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entity<'a> {
    /// Entities of several kinds may have the same id. May be empty.
    pub kind: &'a str,
    pub id: &'a str,
    pub version: i64,
}

/// What is to be done with an event.
#[must_use = "an event that is not new must not have its effect"]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accepted {
    /// It was never processed, as far as this transaction and all that were committed know: let it have its effect.
    New,
    /// It was processed: do nothing.
    Duplicate,
    /// The group has seen this version of the entity, or a later one, in another event: do nothing. Once this transaction is
    /// committed the event counts as processed.
    Stale { last_seen: i64 },
}
