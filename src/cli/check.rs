//! `outboxd check`: looks at both ends of every pipeline and prints what it finds.

use std::fmt::Write as _;

use serde::Serialize;

use super::{print, unexpected};
use crate::config::{PipelineSettings, Settings};
use crate::failure::{ExitCode, Halt};
use crate::preflight::{Finding, Verdict};
use crate::route::Plans;
use crate::{dead_letters, retention, sink, source};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Side {
    Source,
    Sink,
}

#[derive(Serialize)]
struct Line<'a> {
    pipeline: &'a str,
    side: Side,
    #[serde(flatten)]
    finding: Finding,
}

pub async fn run(settings: Settings, json: bool) -> Result<ExitCode, Halt> {
    let mut lines = Vec::new();
    for pipeline in &settings.pipelines {
        lines.extend(look(pipeline).await?);
    }
    let text = match json {
        true => serde_json::to_string_pretty(&lines).map_err(|error| unexpected(error.to_string()))? + "\n",
        false => written(&lines),
    };
    print(text.as_bytes())?;
    let failed = |side: Side| lines.iter().any(|line| line.side == side && line.finding.verdict == Verdict::Fail);
    Ok(match (failed(Side::Source), failed(Side::Sink)) {
        (true, _) => ExitCode::SourceNotReady,
        (false, true) => ExitCode::SinkNotReady,
        (false, false) => ExitCode::Done,
    })
}

async fn look(pipeline: &PipelineSettings) -> Result<Vec<Line<'_>>, Halt> {
    let plans = Plans::compile(pipeline)?;
    let mut source = source::preflight(pipeline, &plans.projection).await;
    source.extend(Box::pin(retention::preflight(pipeline)).await);
    let mut sink = Vec::new();
    for (publisher, (plan, _)) in pipeline.publishers.iter().zip(&plans.publishers) {
        let mut findings = sink::preflight(publisher, plan).await;
        findings.extend(Box::pin(dead_letters::preflight(publisher)).await);
        sink.extend(findings.into_iter().map(|mut finding| {
            if !pipeline.is_lone() {
                finding.what = format!("{}: {}", publisher.name, finding.what);
            }
            finding
        }));
    }
    let line = |side| move |finding| Line { pipeline: &pipeline.name, side, finding };
    Ok(source.into_iter().map(line(Side::Source)).chain(sink.into_iter().map(line(Side::Sink))).collect())
}

/// The findings for people: one a line, what mends it below, a summary at the end.
fn written(lines: &[Line<'_>]) -> String {
    let mut text = String::new();
    let mut heading = "";
    for Line { pipeline, finding, .. } in lines {
        if heading != *pipeline {
            let _ = writeln!(text, "pipeline {pipeline}");
            heading = pipeline;
        }
        let Finding { check, verdict, what, remedy } = finding;
        let verdict = match verdict {
            Verdict::Ok => "ok",
            Verdict::Warn => "WARN",
            Verdict::Fail => "FAIL",
        };
        let indented = |text: &str| text.trim().replace('\n', "\n        ");
        let _ = writeln!(text, "  {verdict:<5} {check}: {}", indented(what));
        if !remedy.is_empty() {
            let _ = writeln!(text, "        remedy: {}", indented(remedy));
        }
    }
    let count = |verdict: Verdict| lines.iter().filter(|line| line.finding.verdict == verdict).count();
    let (failures, warnings) = (count(Verdict::Fail), count(Verdict::Warn));
    let plural = |number: usize| if number == 1 { "" } else { "s" };
    let outcome = if failures == 0 { "a run would start" } else { "a run would not start" };
    let (s, w) = (plural(failures), plural(warnings));
    let _ = writeln!(text, "{outcome}: {failures} failure{s}, {warnings} warning{w}");
    text
}
