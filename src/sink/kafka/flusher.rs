//! Sends what is queued at once when the source has nothing more at hand.
//!
//! librdkafka waits `linger.ms` for a batch to fill, and cannot be told otherwise while it runs. In a backlog that
//! wait is worth its while (a batch costs the same whether it holds ten records or a thousand); for a single commit
//! it would be most of the latency. Flushing makes the producer's threads ignore the wait for as long as it lasts,
//! so a thread of its own flushes whenever it is asked to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::{JoinHandle, Thread};

use rdkafka::bindings::rd_kafka_flush;
use rdkafka::producer::{Producer, ThreadedProducer};

use super::context::ReceiptContext;
use crate::sink::SinkFailure;

const IDLE: u8 = 0;
const WANTED: u8 = 1;
const ENDED: u8 = 2;

/// A flush ends when all is acknowledged; one that a broker keeps waiting is begun again at the next wish.
const LONGEST_FLUSH_MS: i32 = 100;

pub struct Flusher {
    wish: Arc<AtomicU8>,
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

impl Flusher {
    pub fn start(producer: Arc<ThreadedProducer<ReceiptContext>>) -> Result<Self, SinkFailure> {
        let wish = Arc::new(AtomicU8::new(IDLE));
        let flushing = {
            let wish = wish.clone();
            move || {
                loop {
                    match wish.swap(IDLE, Ordering::AcqRel) {
                        IDLE => std::thread::park(),
                        WANTED => {
                            let client = producer.client().native_ptr();
                            // SAFETY: the client lives as long as `producer`, and this call is thread-safe. Its
                            // time-out is no error here. (`Producer::flush` would end before a thread has woken.)
                            unsafe { rd_kafka_flush(client, LONGEST_FLUSH_MS) };
                        }
                        _ => return,
                    }
                }
            }
        };
        let spawned = std::thread::Builder::new().name("kafka flusher".to_owned()).spawn(flushing);
        let handle =
            spawned.map_err(|error| SinkFailure::Transient { what: format!("no thread for Kafka: {error}") })?;
        Ok(Flusher { wish, thread: handle.thread().clone(), handle: Some(handle) })
    }

    pub fn flush(&self) {
        // A wish that is still open covers this one.
        if self.wish.swap(WANTED, Ordering::AcqRel) != WANTED {
            self.thread.unpark();
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.wish.store(ENDED, Ordering::Release);
        self.thread.unpark();
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}
