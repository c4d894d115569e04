//! What outboxd promises whatever the database is: each promise is one body, run over every source it names.
//!
//! A test is called after its promise and its source: `killed_relay_loses_nothing…::mysql`.

/// Makes a test of each source out of a promise, an `async fn` of a [`Source`](crate::support::Source).
macro_rules! promised {
    ($promise:ident to $($source:ident),+) => {
        mod $promise {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $source() {
                    super::$promise(crate::support::Source::named(stringify!($source))).await;
                }
            )+
        }
    };
}

mod backfill;
mod broker_outage;
#[cfg(feature = "failpoints")]
mod chaos;
mod confirm;
mod entity_layout;
mod event_of_many_packets;
mod exactly_once;
mod huge_transaction;
mod idle_outbox;
mod killed_relay;
mod marking;
mod marking_trouble;
mod network;
mod polling;
mod polling_trouble;
mod position;
mod produce_receive;
mod publishers;
mod retention;
mod retention_of_partitions;
mod rollback;
mod schema_change;
mod standby;
mod stop;
mod watermark;
