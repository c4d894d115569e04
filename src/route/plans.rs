//! All plans of a pipeline over one projection, so that a source decodes once whatever any of its publishers needs.

use super::Plan;
use super::selection::Selection;
use crate::config::PipelineSettings;
use crate::event::Projection;
use crate::failure::{ExitCode, Halt};

pub struct Plans {
    pub projection: Projection,
    /// One for each publisher, in order.
    pub publishers: Vec<(Plan, Option<Selection>)>,
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
        Ok(Plans { projection, publishers })
    }
}
