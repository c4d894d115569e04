//! How a row moves from pending to done, as data: what the poller asks for, and what it sets.
//!
//! ```text
//!             claim                    done
//!   pending ─────────▶ (claimed) ──────────────▶ done
//!      ▲                  │  │      fail
//!      └── release, retry ┘  └─────────────────▶ failed, or a dead letter
//! ```
//!
//! Each database writes these in its own words. A layout without columns for a claim is only looked through: there the
//! leader's memory says which rows are on their way.

use std::time::Duration;

/// What must hold of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    Is(&'static str),
    IsNumber(i64),
    IsNull,
    /// Anything else, nothing at all included.
    NoneOf(&'static [&'static str]),
    NotNumber(i64),
    /// Fewer failures than a row may have.
    BelowMost,
    /// As many failures as a row may have.
    Exhausted,
    /// A moment that has passed.
    Past,
    /// A moment that lies longer ago than a lease.
    LeasePast,
}

/// What a column is set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Set {
    Text(&'static str),
    Number(i64),
    Null,
    Now,
    /// Who we are.
    Worker,
    LeaseEnd,
    OneMore,
    /// As many tries as a row may have, or one more than it had: there is no further one.
    AllTries,
    /// Why it was refused.
    Why,
    /// The refusal in a word, as Kafka calls it.
    Code,
    /// When it is tried again.
    NextTry,
}

pub type Tests = &'static [(&'static str, Test)];
pub type Sets = &'static [(&'static str, Set)];

/// How a layout is polled.
#[derive(Debug)]
pub struct Polling {
    pub interval: Duration,
    pub batch: usize,
    /// How often a row may fail before it has failed for good.
    pub most: u32,
    /// Whether the last failure is counted as well.
    pub counts_last: bool,
    /// Whether a row that can never be delivered is told by its status, however seldom it was tried.
    pub fails_at_once: bool,
    /// Where a row says for itself how often.
    pub own_most: Option<&'static str>,
    pub lease: Duration,
    pub first_backoff: Duration,
    pub longest_backoff: Duration,
    /// How long a poller that finds nothing waits at the most.
    pub longest_idle: Duration,
    /// The order of rows; the id comes after these.
    pub order: &'static [&'static str],
    /// A column and the one by which rows with the same value of it are ordered, whatever else orders them.
    pub within: Option<(&'static str, &'static str)>,
    /// As documents have it.
    pub document_order: &'static [&'static str],
    pub attempts: &'static str,
    pub pending: Tests,
    /// Where a pending row says until when it waits. A leader remembers that itself, and reads it when it begins: a row
    /// behind must not pass while the one before it waits.
    pub next_try: Option<&'static str>,
    /// Rows that have failed and may be tried again, where their status says so.
    pub failed_again: Option<Tests>,
    /// Rows that somebody has claimed; empty where a claim leaves no trace.
    pub claimed: Tests,
    /// What holds besides of those whose lease has ended.
    pub expired: Tests,
    pub claim: Sets,
    pub renew: Sets,
    pub done: Sets,
    pub release: Sets,
    pub retry: Sets,
    pub fail: Sets,
    /// Rows that have failed for good.
    pub failed: Tests,
    /// Rows that do not say that they were delivered, whoever wrote that.
    pub unmarked: Tests,
    /// Those of them that have not failed for good either.
    pub open: Tests,
    /// What is set in a row that was read from the log and is in the dead-letter place now.
    pub parked: Sets,
}

impl Polling {
    /// Whether the table itself knows what is on its way.
    pub fn claims(&self) -> bool {
        !self.claim.is_empty()
    }

    /// The columns that marking cannot do without. What it merely clears need not be there.
    pub fn marks(&self) -> Vec<&'static str> {
        let tested = self.unmarked.iter().chain(self.open).map(|(column, _)| *column);
        let set = self.done.iter().chain(self.parked).filter(|(_, set)| *set != Set::Null).map(|(column, _)| *column);
        let mut columns: Vec<_> = tested.chain(set).chain(self.own_most).collect();
        columns.sort_unstable();
        columns.dedup();
        columns
    }

    /// Every column it reads or sets.
    pub fn columns(&self) -> Vec<&'static str> {
        let tests = [self.pending, self.claimed, self.expired, self.failed_again.unwrap_or_default(), self.failed];
        let sets = [self.claim, self.renew, self.done, self.release, self.retry, self.fail];
        let mut columns = vec![self.attempts];
        columns.extend(self.own_most);
        columns.extend(self.next_try);
        columns.extend(tests.iter().flat_map(|tests| tests.iter().map(|(column, _)| *column)));
        columns.extend(sets.iter().flat_map(|sets| sets.iter().map(|(column, _)| *column)));
        columns.sort_unstable();
        columns.dedup();
        columns
    }
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

pub static NATIVE: Polling = Polling {
    interval: SECOND,
    batch: 500,
    most: 5,
    counts_last: true,
    fails_at_once: true,
    own_most: None,
    lease: MINUTE,
    first_backoff: SECOND,
    longest_backoff: MINUTE,
    longest_idle: SECOND,
    order: &["seq"],
    within: None,
    document_order: &["created_at"],
    attempts: "attempts",
    pending: &[("status", Test::Is("pending"))],
    next_try: Some("next_attempt_at"),
    failed_again: None,
    claimed: &[("status", Test::Is("processing"))],
    expired: &[("locked_until", Test::Past)],
    claim: &[("status", Set::Text("processing")), ("locked_by", Set::Worker), ("locked_until", Set::LeaseEnd)],
    renew: &[("locked_until", Set::LeaseEnd)],
    done: &[
        ("status", Set::Text("published")),
        ("published_at", Set::Now),
        ("locked_by", Set::Null),
        ("locked_until", Set::Null),
    ],
    release: &[("status", Set::Text("pending")), ("locked_by", Set::Null), ("locked_until", Set::Null)],
    retry: &[
        ("status", Set::Text("pending")),
        ("attempts", Set::OneMore),
        ("next_attempt_at", Set::NextTry),
        ("last_error", Set::Why),
        ("locked_by", Set::Null),
        ("locked_until", Set::Null),
    ],
    fail: FAILED_NATIVE,
    failed: &[("status", Test::Is("failed"))],
    unmarked: &[("status", Test::NoneOf(&["published"]))],
    open: &[("status", Test::NoneOf(&["published", "failed"]))],
    parked: FAILED_NATIVE,
};

const FAILED_NATIVE: Sets = &[
    ("status", Set::Text("failed")),
    ("attempts", Set::OneMore),
    ("last_error", Set::Why),
    ("locked_by", Set::Null),
    ("locked_until", Set::Null),
];

pub static MESSAGE_GROUP: Polling = Polling {
    interval: SECOND,
    batch: 500,
    most: 3,
    counts_last: false,
    fails_at_once: true,
    own_most: None,
    lease: Duration::from_secs(300),
    first_backoff: SECOND,
    longest_backoff: MINUTE,
    longest_idle: SECOND,
    order: &["message_group", "created_at"],
    within: None,
    document_order: &["messageGroup", "createdAt"],
    attempts: "retry_count",
    pending: &[("status", Test::Is("PENDING"))],
    next_try: None,
    failed_again: None,
    claimed: &[("status", Test::Is("PROCESSING"))],
    expired: &[("processed_at", Test::LeasePast)],
    claim: &[("status", Set::Text("PROCESSING")), ("processed_at", Set::Now)],
    renew: &[("processed_at", Set::Now)],
    done: &[("status", Set::Text("COMPLETED")), ("processed_at", Set::Now)],
    release: &[("status", Set::Text("PENDING"))],
    retry: &[("status", Set::Text("PENDING")), ("retry_count", Set::OneMore), ("error_message", Set::Why)],
    fail: FAILED_GROUP,
    failed: &[("status", Test::Is("FAILED"))],
    unmarked: &[("status", Test::NoneOf(&["COMPLETED"]))],
    open: &[("status", Test::NoneOf(&["COMPLETED", "FAILED"]))],
    parked: FAILED_GROUP,
};

const FAILED_GROUP: Sets = &[("status", Set::Text("FAILED")), ("error_message", Set::Why)];

pub static ENTITY: Polling = Polling {
    interval: SECOND,
    batch: 500,
    most: 5,
    counts_last: true,
    fails_at_once: false,
    own_most: Some("max_retries"),
    lease: MINUTE,
    first_backoff: SECOND,
    longest_backoff: MINUTE,
    longest_idle: Duration::from_secs(10),
    order: &["created_at", "entity_version"],
    within: Some(("entity_id", "entity_version")),
    document_order: &["created_at", "entity_version"],
    attempts: "retry_count",
    pending: &[("status", Test::Is("pending"))],
    next_try: None,
    failed_again: Some(&[("status", Test::Is("failed")), ("retry_count", Test::BelowMost)]),
    claimed: &[("status", Test::Is("processing"))],
    expired: &[("locked_until", Test::Past)],
    claim: &[
        ("status", Set::Text("processing")),
        ("processing_started_at", Set::Now),
        ("locked_by", Set::Worker),
        ("locked_until", Set::LeaseEnd),
    ],
    renew: &[("locked_until", Set::LeaseEnd)],
    done: &[
        ("status", Set::Text("published")),
        ("published_at", Set::Now),
        ("locked_by", Set::Null),
        ("locked_until", Set::Null),
    ],
    release: &[("status", Set::Text("pending")), ("locked_by", Set::Null), ("locked_until", Set::Null)],
    retry: FAILED_ENTITY,
    fail: FAILED_ENTITY,
    failed: &[("status", Test::Is("failed")), ("retry_count", Test::Exhausted)],
    unmarked: &[("status", Test::NoneOf(&["published"]))],
    open: &[("status", Test::NoneOf(&["published", "failed"]))],
    parked: &[
        ("status", Set::Text("failed")),
        ("retry_count", Set::AllTries),
        ("last_error", Set::Why),
        ("last_error_at", Set::Now),
        ("locked_by", Set::Null),
        ("locked_until", Set::Null),
    ],
};

/// Whether it is tried again is told by the count.
const FAILED_ENTITY: Sets = &[
    ("status", Set::Text("failed")),
    ("retry_count", Set::OneMore),
    ("last_error", Set::Why),
    ("last_error_at", Set::Now),
    ("locked_by", Set::Null),
    ("locked_until", Set::Null),
];

pub static OCCURRED_ON: Polling = Polling {
    interval: SECOND,
    batch: 100,
    most: 3,
    counts_last: true,
    fails_at_once: false,
    own_most: None,
    lease: MINUTE,
    first_backoff: SECOND,
    longest_backoff: MINUTE,
    longest_idle: SECOND,
    order: &["OccurredOnUtc"],
    within: None,
    document_order: &[],
    attempts: "RetryCount",
    pending: &[("ProcessedOnUtc", Test::IsNull), ("RetryCount", Test::BelowMost)],
    next_try: None,
    failed_again: None,
    claimed: &[],
    expired: &[],
    claim: &[],
    renew: &[],
    done: &[("ProcessedOnUtc", Set::Now)],
    release: &[],
    retry: FAILED_MESSAGE,
    fail: FAILED_MESSAGE,
    failed: &[("ProcessedOnUtc", Test::IsNull), ("RetryCount", Test::Exhausted)],
    unmarked: &[("ProcessedOnUtc", Test::IsNull)],
    open: &[("ProcessedOnUtc", Test::IsNull), ("RetryCount", Test::BelowMost)],
    parked: &[("RetryCount", Set::AllTries), ("Error", Set::Why)],
};

const FAILED_MESSAGE: Sets = &[("RetryCount", Set::OneMore), ("Error", Set::Why)];

pub static PRODUCE_RECEIVE: Polling = Polling {
    interval: SECOND,
    batch: 500,
    most: 3,
    counts_last: true,
    fails_at_once: false,
    own_most: None,
    lease: MINUTE,
    first_backoff: SECOND,
    longest_backoff: MINUTE,
    longest_idle: SECOND,
    order: &["stid", "rank"],
    within: None,
    document_order: &[],
    attempts: "retry",
    pending: &[("processed", Test::IsNumber(0)), ("retry", Test::BelowMost)],
    next_try: None,
    failed_again: None,
    claimed: &[],
    expired: &[],
    claim: &[],
    renew: &[],
    done: &[("processed", Set::Number(1)), ("publish", Set::Number(1)), ("produced_at", Set::Now)],
    release: &[],
    retry: NOT_PRODUCED,
    fail: NOT_PRODUCED,
    failed: &[("processed", Test::IsNumber(0)), ("retry", Test::Exhausted)],
    unmarked: &[("processed", Test::NotNumber(1))],
    open: &[("processed", Test::NotNumber(1)), ("retry", Test::BelowMost)],
    parked: &[("retry", Set::AllTries), ("error_code", Set::Code)],
};

const NOT_PRODUCED: Sets = &[("retry", Set::OneMore), ("error_code", Set::Code)];

/// One column, of the role `published`, that is null until a row was delivered. It is never polled: it says nothing of rows
/// that are on their way. A row in the dead-letter place is done with as well, and there is no other word for it.
pub static PUBLISHED: Polling = Polling {
    interval: SECOND,
    batch: 0,
    most: 0,
    counts_last: false,
    fails_at_once: false,
    own_most: None,
    lease: MINUTE,
    first_backoff: SECOND,
    longest_backoff: MINUTE,
    longest_idle: SECOND,
    order: &[],
    within: None,
    document_order: &[],
    attempts: "",
    pending: NOT_PUBLISHED,
    next_try: None,
    failed_again: None,
    claimed: &[],
    expired: &[],
    claim: &[],
    renew: &[],
    done: NOW_PUBLISHED,
    release: &[],
    retry: &[],
    fail: &[],
    failed: &[],
    unmarked: NOT_PUBLISHED,
    open: NOT_PUBLISHED,
    parked: NOW_PUBLISHED,
};

/// What the column of the role is called here.
pub const PUBLISHED_COLUMN: &str = "published";
const NOT_PUBLISHED: Tests = &[(PUBLISHED_COLUMN, Test::IsNull)];
const NOW_PUBLISHED: Sets = &[(PUBLISHED_COLUMN, Set::Now)];
