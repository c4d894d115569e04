//! What was said of rows that were delivered: how their table says so, and whether that is written.

use super::options::{OnLostPosition, PipelineOptions};
use super::resolve::Resolver;
use super::settings::{Capture, MarkSettings, PipelineSettings, SourceSettings, TableName};
use crate::route::layout::Layout;
use crate::route::polling::PUBLISHED;

impl Resolver {
    /// The columns that say of a row that it was delivered: the one that was named, else the layout's own.
    pub(super) fn status(
        &mut self,
        said: &PipelineOptions,
        source: Option<&SourceSettings>,
        capture: Option<&Capture>,
    ) -> Option<MarkSettings> {
        let chosen = |role: &str| said.column.iter().rev().find(|one| one.key == role).map(|one| one.value.as_str());
        let layout = Layout::named(said.layout.as_deref().unwrap_or_default())?;
        let scheme = match chosen("published") {
            Some(_) => Some(&PUBLISHED),
            None => layout.polling,
        };
        let most = match (said.max_retries, scheme) {
            (Some(retries), Some(scheme)) => retries + u32::from(scheme.counts_last),
            (_, scheme) => scheme.map_or(0, |scheme| scheme.most),
        };
        let status = scheme.map(|scheme| MarkSettings { scheme, most });
        if chosen("published").is_some_and(|column| column.starts_with('/')) {
            self.problem("column", "published: a column is set when a row was delivered, and a payload is not");
            return None;
        }
        let polled = matches!(capture, Some(Capture::Poll(_) | Capture::Positions(_)));
        if polled && said.on_lost_position == Some(OnLostPosition::Backfill) {
            self.problem("on-lost-position", "polling has no position that could be lost: leave it out");
        }
        if said.mark != Some(true) {
            return status.filter(|_| matches!(capture, Some(Capture::Log)));
        }
        let problem = match capture {
            Some(Capture::Log) => None,
            Some(Capture::Poll(_)) => Some("polling marks rows by itself: leave it out".to_owned()),
            Some(Capture::Positions(_)) => {
                Some("an event store that is polled keeps positions instead of marks: leave it out".to_owned())
            }
            None => return None,
        };
        let problem = problem.or_else(|| match status {
            None => Some(format!(
                "the layout `{}` has no column for it: add one that is null until a row was delivered, and name it with \
                 --column published=COLUMN",
                layout.name
            )),
            Some(_) if chosen("id").is_some_and(|id| id.starts_with('/')) => {
                Some("rows are found by their id, which must be a column of its own".to_owned())
            }
            Some(_) => None,
        });
        let tables = source.map(SourceSettings::tables);
        let problem = problem.or_else(|| match tables {
            Some([]) => Some("logical messages leave no row that could be marked: leave it out".to_owned()),
            Some(tables) if tables.iter().any(|table| table.name == "*") => {
                Some("collections must be named one by one with --table".to_owned())
            }
            _ => None,
        });
        if let Some(what) = problem {
            self.problem("mark", what);
            return None;
        }
        status
    }
}

impl PipelineSettings {
    /// A table whose rows both would mark.
    pub(super) fn marked_like(&self, other: &PipelineSettings) -> Option<&TableName> {
        let url = |of: &PipelineSettings| match &of.source {
            SourceSettings::Postgres(source) => source.url.clone(),
            SourceSettings::MySql(source) => source.url.clone(),
            SourceSettings::Mongo(source) => source.url.clone(),
        };
        let both = self.mark && other.mark && url(self) == url(other);
        self.source.tables().iter().find(|table| both && other.source.tables().contains(table))
    }
}
