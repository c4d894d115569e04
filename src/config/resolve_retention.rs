//! What was said of retention.

use super::options::PipelineOptions;
use super::problem::Problem;
use super::resolve::Resolver;
use super::settings::{Also, PipelineSettings, RetentionSettings};
use crate::retention::rule;

impl Resolver {
    pub(super) fn retention(&mut self, said: &PipelineOptions) -> RetentionSettings {
        let after = said.prune_after.map(|_| self.duration("prune-after", said.prune_after));
        let batch = said.prune_batch.unwrap_or(0);
        if batch == 0 {
            self.problem("prune-batch", "at least one row must be deleted at once");
        }
        let mut also = Also::default();
        for word in &said.prune_also {
            match word.as_str() {
                "failed" => also.failed = true,
                "unreceived" => also.unreceived = true,
                other => {
                    self.problem("prune-also", format!("`{other}` is unknown; there are `failed` and `unreceived`"));
                }
            }
        }
        RetentionSettings { after, batch, also }
    }
}

/// Pipelines that are to delete rows, and whose rows cannot be judged.
pub(super) fn refusals(pipelines: &[PipelineSettings]) -> Vec<Problem> {
    let asked = pipelines.iter().filter(|pipeline| pipeline.retention.after.is_some());
    let refused = |pipeline: &PipelineSettings| {
        let why = rule::refusal(pipeline)?;
        Some(Problem::new(format!("pipeline {}: prune-after", pipeline.name), why))
    };
    asked.filter_map(refused).collect()
}
