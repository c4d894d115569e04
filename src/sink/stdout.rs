//! Records as JSON lines on standard output, for pipes.
//!
//! ```text
//!   {"topic":"orders","key":"customer-17","value":{"order":4711},"headers":{"id":"…"},"timestamp":1763291754000}
//! ```
//!
//! A thread writes what has gathered, so that a slow reader never holds up the runtime, and resolves receipts when the
//! lines are written. A reader that is gone ends the pipeline: exit 5, with nothing confirmed that was not written.

use std::io::{self, Write as _};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tokio::time::Instant;

use super::json;
use super::{Enqueued, SinkFailure};
use crate::ack_window::{AckWindow, Receipt};
use crate::route::Record;

#[derive(Default)]
struct Gathered {
    lines: Vec<u8>,
    receipts: Vec<Receipt>,
    /// Lines that are being written.
    writing: bool,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    gathered: Mutex<Gathered>,
    changed: Condvar,
}

impl Shared {
    fn gathered(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct StdoutSink {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

impl StdoutSink {
    pub fn create(window: &Arc<AckWindow>) -> Result<Self, SinkFailure> {
        let shared = Arc::<Shared>::default();
        let (its, window) = (shared.clone(), window.clone());
        let writer = std::thread::Builder::new().name("stdout".to_owned()).spawn(move || write(&its, &window));
        let writer = writer.map_err(|error| SinkFailure::Transient { what: format!("no thread to write: {error}") })?;
        Ok(StdoutSink { shared, writer: Some(writer) })
    }

    pub fn enqueue(&mut self, record: &Record<'_>, receipt: Receipt) -> Enqueued {
        let mut gathered = self.shared.gathered();
        json::write_record(record, &mut gathered.lines);
        gathered.lines.push(b'\n');
        gathered.receipts.push(receipt);
        self.shared.changed.notify_one();
        Enqueued::Queued
    }

    /// Waits until all is written, until the deadline.
    pub async fn drain(&mut self, deadline: Instant) {
        while Instant::now() < deadline && !self.is_idle() {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    }

    fn is_idle(&self) -> bool {
        let gathered = self.shared.gathered();
        gathered.closed || gathered.receipts.is_empty() && !gathered.writing
    }

    /// Ends the thread. It may be stuck with a reader that reads nothing: then it is left behind.
    pub async fn abandon(mut self) {
        self.shared.gathered().closed = true;
        self.shared.changed.notify_one();
        if self.writer.as_ref().is_some_and(JoinHandle::is_finished)
            && let Some(writer) = self.writer.take()
        {
            let _ = writer.join();
        }
    }
}

fn write(shared: &Shared, window: &AckWindow) {
    let (mut lines, mut receipts) = (Vec::new(), Vec::new());
    loop {
        {
            let mut gathered = shared.gathered();
            gathered.writing = false;
            while gathered.receipts.is_empty() && !gathered.closed {
                gathered = shared.changed.wait(gathered).unwrap_or_else(PoisonError::into_inner);
            }
            if gathered.closed {
                return;
            }
            std::mem::swap(&mut gathered.lines, &mut lines);
            std::mem::swap(&mut gathered.receipts, &mut receipts);
            gathered.writing = true;
        }
        let mut out = io::stdout().lock();
        if let Err(error) = out.write_all(&lines).and_then(|()| out.flush()) {
            window.fail(SinkFailure::NotReady {
                what: format!("standard output takes no more lines: {error}"),
                remedy: "start the reader again, and outboxd with it: it goes on after the last line that was written"
                    .to_owned(),
            });
            shared.gathered().closed = true;
            return;
        }
        lines.clear();
        for receipt in receipts.drain(..) {
            window.resolve(receipt);
        }
    }
}
