//! All plans of a pipeline over one projection, so that a source decodes once whatever any of its publishers needs.

use super::Plan;
use super::layout::{Layout, Role};
use super::selection::Selection;
use crate::config::{PipelineSettings, SourceSettings};
use crate::event::{Projection, Want};
use crate::failure::{ExitCode, Halt};

pub struct Plans {
    pub projection: Projection,
    /// One for each publisher, in order.
    pub publishers: Vec<(Plan, Option<Selection>)>,
    /// Where a row's id is, if delivered rows are marked.
    pub mark: Option<usize>,
}

impl Plans {
    pub fn compile(settings: &PipelineSettings) -> Result<Self, Halt> {
        let mut projection = Projection::default();
        let mut publishers = Vec::new();
        for publisher in &settings.publishers {
            let plan = Plan::compile(&publisher.route, &mut projection);
            let tables = settings.source.tables();
            let both = plan.and_then(|plan| {
                let selection = Selection::compile(&publisher.selection, &publisher.route, tables, &mut projection)?;
                Ok((plan, selection))
            });
            publishers.push(both.map_err(|error| {
                let whose = match settings.is_lone() {
                    true => String::new(),
                    false => format!(", publisher `{}`", publisher.name),
                };
                Halt {
                    code: ExitCode::Usage,
                    what: format!("pipeline `{}`{whose}: {error}", settings.name),
                    remedy: String::new(),
                }
            })?);
        }
        let mark = settings.marking().and_then(|_| id_slot(settings, &mut projection));
        Ok(Plans { projection, publishers, mark })
    }
}

/// The place of what finds a row again.
fn id_slot(settings: &PipelineSettings, projection: &mut Projection) -> Option<usize> {
    if let SourceSettings::Mongo(_) = settings.source {
        return Some(projection.slot("_id", Want::Key, false));
    }
    let chosen = settings.route.columns.iter().rev().find(|(role, _)| role == "id").map(|(_, column)| column.as_str());
    let own = || Layout::named(&settings.route.layout)?.column(Role::Id).map(|(column, _)| column);
    chosen.or_else(own).map(|column| projection.slot(column, Want::Text, true))
}
