//! The binary log of MySQL and MariaDB, decoded from its bytes. Nothing here does I/O.
//!
//! ```text
//!   packet or file ──event::split──▶ Event ──decode──▶ Body
//!                                                       │ Query        ─▶ query::Statement
//!                                                       │ TableMap     ─▶ table_map::TableShape
//!                                                       │ Rows         ─▶ rows::RowImages ─▶ values::render
//!                                                       │ Payload      ─▶ compressed::Inflater ─▶ event::split …
//!                                                       │ Gtid, lists  ─▶ gtid::{GtidSet, MariaGtidList}
//! ```
//!
//! The codec is our own because the position must never pass an event that was not understood: whatever is malformed
//! or unknown is an error here and a halt in the caller, no length that the server claims is trusted before the bytes
//! are there, and the bytes of a wanted column stay where they lie.

pub mod charset;
pub mod compressed;
pub mod event;
pub mod gtid;
mod input;
pub mod json;
mod numbers;
pub mod query;
pub mod rows;
pub mod table_map;
mod temporal;
pub mod transaction;
pub mod values;

pub use input::Malformed;
