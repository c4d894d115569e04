//! Which rows of a table may go, whatever the database: what every pipeline that reads it says of a row.
//!
//! A poller's row may go when it is marked as delivered and that is long ago; a row that is read from the log, or by its
//! position, when it is old (and, as its fence or its publishers' progress says, delivered). Where several pipelines read a
//! table, all of them must agree. What is undecided, a null for one, is kept: a condition is negated here, by its parts,
//! and never by the database.

use crate::config::{Also, Capture, PipelineSettings, PollSettings, SourceSettings};
use crate::route::layout::{Layout, Role};
use crate::route::polling::{Set, Test};
use crate::source::poll::View;

/// Layouts whose rows are done only when somebody has confirmed that they were received, and the column that says so.
const RECEIVED: &[(&str, &str)] = &[("produce-receive", "received_at")];

/// Something that holds of a row, or does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Is(String, &'static str),
    IsNot(String, &'static str),
    Number(String, i64),
    NotNumber(String, i64),
    Null(String),
    NotNull(String),
    /// The column is a moment before the cutoff.
    Before(String),
    /// It is none, or a later one.
    NotBefore(String),
    /// The row has failed as often as it may.
    Exhausted(Failures),
    NotExhausted(Failures),
    All(Vec<Condition>),
    Any(Vec<Condition>),
}

/// How often a row has failed, and how often it may: by its own column, where it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failures {
    pub count: String,
    pub own: Option<String>,
    pub most: u32,
}

use Condition::{All, Any, Before, Exhausted, Is, IsNot, NotBefore, NotExhausted, NotNull, NotNumber, Null, Number};

impl Condition {
    /// What holds of exactly the other rows.
    pub fn negated(&self) -> Condition {
        match self {
            Is(column, text) => IsNot(column.clone(), text),
            IsNot(column, text) => Is(column.clone(), text),
            Number(column, number) => NotNumber(column.clone(), *number),
            NotNumber(column, number) => Number(column.clone(), *number),
            Null(column) => NotNull(column.clone()),
            NotNull(column) => Null(column.clone()),
            Before(column) => NotBefore(column.clone()),
            NotBefore(column) => Before(column.clone()),
            Exhausted(failures) => NotExhausted(failures.clone()),
            NotExhausted(failures) => Exhausted(failures.clone()),
            All(parts) => Any(parts.iter().map(Condition::negated).collect()),
            Any(parts) => All(parts.iter().map(Condition::negated).collect()),
        }
    }

    /// The same, of whatever age. Only for a condition that is not negated.
    pub fn ageless(&self) -> Condition {
        match self {
            Before(column) => NotNull(column.clone()),
            All(parts) => All(parts.iter().map(Condition::ageless).collect()),
            Any(parts) => Any(parts.iter().map(Condition::ageless).collect()),
            other => other.clone(),
        }
    }

    /// Whether it asks for nothing but that this column is old.
    pub fn is_age_of(&self, column: &str) -> bool {
        match self {
            Before(of) => of == column,
            All(parts) => parts.iter().all(|part| part.is_age_of(column)),
            _ => false,
        }
    }

    /// The columns that it looks at, and whether each is a moment.
    pub fn columns(&self) -> Vec<(&str, bool)> {
        match self {
            Is(column, _) | IsNot(column, _) | Number(column, _) | NotNumber(column, _) => vec![(column, false)],
            Null(column) | NotNull(column) => vec![(column, false)],
            Before(column) | NotBefore(column) => vec![(column, true)],
            Exhausted(Failures { count, own, .. }) | NotExhausted(Failures { count, own, .. }) => {
                std::iter::once(count).chain(own).map(|column| (column.as_str(), false)).collect()
            }
            All(parts) | Any(parts) => parts.iter().flat_map(Condition::columns).collect(),
        }
    }
}

/// The column that says when a row was made; a path into a message is none.
pub fn timestamp(of: &PipelineSettings) -> Option<String> {
    column(of, Role::Timestamp, "timestamp")
}

/// The column that tells rows apart.
pub fn id(of: &PipelineSettings) -> Option<String> {
    match of.source {
        SourceSettings::Mongo(_) => Some("_id".to_owned()),
        _ => column(of, Role::Id, "id"),
    }
}

fn column(of: &PipelineSettings, role: Role, name: &str) -> Option<String> {
    let chosen = of.route.columns.iter().rev().find(|(chosen, _)| chosen == name).map(|(_, column)| column.clone());
    let own = || Layout::named(&of.route.layout)?.column(role).map(|(column, _)| column.to_owned());
    chosen.or_else(own).filter(|column| !column.starts_with('/'))
}

/// Why the rows of a pipeline cannot be judged, if they cannot.
pub fn refusal(of: &PipelineSettings) -> Option<String> {
    let everything = |table: &crate::config::TableName| table.name == "*";
    if of.source.tables().iter().any(everything) {
        return Some("retention needs its collections by name: give each with --table".to_owned());
    }
    says(of, &of.retention.also).err()
}

/// The rows that all of these pipelines would let go.
pub fn of(readers: &[&PipelineSettings], also: &Also) -> Result<Condition, String> {
    Ok(All(readers.iter().map(|reader| says(reader, also)).collect::<Result<_, _>>()?))
}

/// What one pipeline says.
fn says(of: &PipelineSettings, also: &Also) -> Result<Condition, String> {
    let layout = of.route.layout.as_str();
    let made_at = || {
        timestamp(of).ok_or_else(|| {
            format!("the layout `{layout}` has no column that says how old a row is: name one with --column timestamp=COLUMN")
        })
    };
    let mut all = match &of.capture {
        Capture::Log | Capture::Positions(_) => vec![Before(made_at()?)],
        Capture::Poll(settings) => {
            let view = View::of(settings, &of.route, of.source.kind());
            let mut any = vec![delivered(&view)];
            if also.failed {
                any.push(All(vec![given_up(&view, settings), Before(made_at()?)]));
            }
            vec![Any(any)]
        }
    };
    if let Some((_, column)) = RECEIVED.iter().find(|(of, _)| *of == layout && !also.unreceived) {
        all.push(Before((*column).to_owned()));
    }
    Ok(All(all))
}

/// A row that is as the poller leaves it when it was acknowledged, and has been for so long.
fn delivered(view: &View) -> Condition {
    let part = |(column, set): &(&'static str, Set)| {
        let column = view.name(column);
        match set {
            Set::Text(text) => Some(Is(column, text)),
            Set::Number(number) => Some(Number(column, *number)),
            Set::Now => Some(Before(column)),
            // Whose it was while it was on its way.
            _ => None,
        }
    };
    All(view.scheme.done.iter().filter_map(part).collect())
}

/// A row that is no longer tried.
fn given_up(view: &View, settings: &PollSettings) -> Condition {
    let scheme = view.scheme;
    let failures = || {
        Exhausted(Failures {
            count: view.name(scheme.attempts),
            own: scheme.own_most.map(|own| view.name(own)),
            most: settings.patience.most,
        })
    };
    let status = scheme.fail.iter().find_map(|(column, set)| match set {
        Set::Text(text) => Some(Is(view.name(column), text)),
        _ => None,
    });
    match status {
        // Some are tried again in spite of it, as long as their count is low.
        Some(failed) if scheme.failed_again.is_some() => All(vec![failed, failures()]),
        Some(failed) => failed,
        None => {
            let still = |(column, test): &(&'static str, Test)| match test {
                Test::Is(text) => Some(Is(view.name(column), text)),
                Test::IsNumber(number) => Some(Number(view.name(column), *number)),
                Test::IsNull => Some(Null(view.name(column))),
                _ => None,
            };
            let mut all: Vec<_> = scheme.pending.iter().filter_map(still).collect();
            all.push(failures());
            All(all)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{PipelineOptions, Said, Settings};

    fn pipeline(layout: &str, capture: &str) -> PipelineSettings {
        let pipeline = PipelineOptions {
            source: Some("postgres://h/db".into()),
            layout: Some(layout.to_owned()),
            capture: Some(capture.to_owned()),
            ..PipelineOptions::default()
        };
        let said = Said { pipeline, without_sink: true, ..Said::default() };
        Settings::resolve(said, None).unwrap().pipelines.remove(0)
    }

    fn rule(layout: &str, capture: &str, also: Also) -> Result<Condition, String> {
        of(&[&pipeline(layout, capture)], &also)
    }

    fn column(name: &str) -> String {
        name.to_owned()
    }

    #[test]
    fn a_polled_row_goes_when_it_is_marked_as_delivered_for_so_long() {
        let native = rule("native", "poll", Also::default()).unwrap();
        let done = All(vec![Is(column("status"), "published"), Before(column("published_at"))]);
        assert_eq!(native, All(vec![All(vec![Any(vec![done])])]));
        let occurred = rule("occurred-on", "poll", Also { failed: true, ..Also::default() }).unwrap();
        let failures = Failures { count: column("RetryCount"), own: None, most: 3 };
        let failed =
            All(vec![All(vec![Null(column("ProcessedOnUtc")), Exhausted(failures)]), Before(column("OccurredOnUtc"))]);
        assert_eq!(occurred, All(vec![All(vec![Any(vec![All(vec![Before(column("ProcessedOnUtc"))]), failed])])]));
    }

    #[test]
    fn a_row_whose_receipt_is_missing_stays_unless_it_is_said() {
        let received = Before(column("received_at"));
        let kept = rule("produce-receive", "poll", Also::default()).unwrap();
        let gone = rule("produce-receive", "poll", Also { unreceived: true, ..Also::default() }).unwrap();
        let has = |condition: &Condition| matches!(condition, All(one) if matches!(&one[0], All(parts) if parts.contains(&received)));
        assert!(has(&kept) && !has(&gone), "{kept:?} {gone:?}");
    }

    #[test]
    fn from_the_log_a_row_goes_by_its_age_and_a_layout_without_one_is_refused() {
        let native = rule("native", "log", Also::default()).unwrap();
        assert_eq!(native, All(vec![All(vec![Before(column("created_at"))])]));
        assert!(native.is_age_of("created_at") && !native.is_age_of("published_at"));
        // Of these the only test is a moment as well, and not the one that partitions are by.
        assert!(!rule("occurred-on", "poll", Also::default()).unwrap().is_age_of("OccurredOnUtc"));
        assert_eq!(native.ageless().negated(), Any(vec![Any(vec![Null(column("created_at"))])]));
        assert!(rule("debezium", "log", Also::default()).unwrap_err().contains("--column timestamp=COLUMN"));
        assert!(rule("produce-receive", "poll", Also { failed: true, ..Also::default() }).is_err());
    }

    #[test]
    fn every_row_is_either_let_go_or_kept() {
        let condition = rule("native", "poll", Also::default()).unwrap();
        assert_eq!(condition.negated().negated(), condition);
        let kept = Any(vec![IsNot(column("status"), "published"), NotBefore(column("published_at"))]);
        assert_eq!(condition.negated(), Any(vec![Any(vec![All(vec![kept])])]));
    }
}
