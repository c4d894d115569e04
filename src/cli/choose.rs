//! Which pipelines of the configuration are meant.

use super::PipelineArgs;
use crate::config::{PipelineSettings, Settings};
use crate::failure::{ExitCode, Halt};

fn usage(what: impl Into<String>, remedy: &str) -> Halt {
    Halt { code: ExitCode::Usage, what: what.into(), remedy: remedy.to_owned() }
}

/// Beside a config file --name chooses a pipeline of it; where none is called so it means what it means for `run`.
pub fn settings(pipelines: &PipelineArgs) -> Result<Settings, Halt> {
    if let (Some(name), Some(_)) = (&pipelines.pipeline.name, &pipelines.process.config) {
        let mut nameless = pipelines.clone();
        nameless.pipeline.name = None;
        nameless.pipeline_flags.retain(|flag| flag != "--name");
        if let Ok(mut settings) = nameless.settings() {
            let several = settings.pipelines.len() > 1;
            let known = settings.pipelines.iter().map(|pipeline| pipeline.name.clone()).collect::<Vec<_>>().join(", ");
            settings.pipelines.retain(|pipeline| pipeline.name == *name);
            if !settings.pipelines.is_empty() {
                return Ok(settings);
            }
            if several {
                return Err(usage(format!("the file has no pipeline `{name}`"), &format!("there are {known}")));
            }
        }
    }
    pipelines.clone().settings()
}

/// The only one there is.
pub fn one(mut pipelines: Vec<PipelineSettings>) -> Result<PipelineSettings, Halt> {
    if pipelines.len() > 1 {
        let known = pipelines.iter().map(|pipeline| pipeline.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(usage("the file has several pipelines", &format!("say --name; there are {known}")));
    }
    pipelines.pop().ok_or_else(|| usage("the file has no pipeline", "add one"))
}
