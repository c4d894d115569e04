//! Counts instead of delivering: for smoke tests of everything before the sink.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ack_window::{AckWindow, Receipt};
use crate::route::Record;

/// Headers that say what kind of event it is, in the layouts.
const TYPES: [&str; 3] = ["event_type", "type", "code"];

pub struct StatisticsSink {
    window: Arc<AckWindow>,
    /// Records and bytes by topic and type.
    counts: BTreeMap<(String, String), (u64, u64)>,
}

impl StatisticsSink {
    pub fn create(window: &Arc<AckWindow>) -> Self {
        StatisticsSink { window: window.clone(), counts: BTreeMap::new() }
    }

    pub fn enqueue(&mut self, record: &Record<'_>, receipt: Receipt) {
        let kind = record.headers.iter().find(|(name, _)| TYPES.contains(name)).and_then(|(_, value)| value);
        let kind = kind.map(|kind| String::from_utf8_lossy(kind).into_owned()).unwrap_or_default();
        let (records, bytes) = self.counts.entry((record.topic.to_owned(), kind)).or_default();
        *records += 1;
        *bytes += record.value.map_or(0, |value| value.len() as u64);
        self.window.resolve(receipt);
    }
}

/// What was counted is told when the generation ends.
impl Drop for StatisticsSink {
    fn drop(&mut self) {
        for ((topic, kind), (records, bytes)) in &self.counts {
            tracing::info!(topic, r#type = kind, records, bytes, "counted");
        }
    }
}
