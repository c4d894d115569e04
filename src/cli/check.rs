//! `outboxd check`: looks at both ends of every pipeline and prints every check that it made.

use std::fmt::Write as _;

use serde::Serialize;

use super::table::{Look, Tint, cut, one_line};
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
    /// Where the pipeline has several.
    publisher: Option<&'a str>,
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
        false => written(&lines, Look::of_stdout()),
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
    let line = |side, publisher| move |finding| Line { pipeline: &pipeline.name, publisher, side, finding };
    let mut source = source::preflight(pipeline, &plans.projection).await;
    source.extend(Box::pin(retention::preflight(pipeline)).await);
    let mut lines: Vec<_> = source.into_iter().map(line(Side::Source, None)).collect();
    for (publisher, (plan, _)) in pipeline.publishers.iter().zip(&plans.publishers) {
        let mut findings = sink::preflight(publisher, plan).await;
        findings.extend(Box::pin(dead_letters::preflight(publisher)).await);
        let name = (!pipeline.is_lone()).then_some(publisher.name.as_str());
        lines.extend(findings.into_iter().map(line(Side::Sink, name)));
    }
    Ok(lines)
}

/// What stands before a finding's own words: the verdict, and a blank on each side of it.
const MARGIN: usize = 8;
/// On a terminal a longer subject is cut, so that room is left for what was seen.
const LONGEST_SUBJECT: usize = 34;
/// A narrower column than this is not worth having.
const NARROWEST: usize = 30;

/// The findings for people: one a line, what mends it below, a summary at the end.
fn written(lines: &[Line<'_>], look: Look) -> String {
    let subject = |line: &Line<'_>| match look.width {
        Some(_) => cut(&one_line(&line.finding.subject), LONGEST_SUBJECT),
        None => one_line(&line.finding.subject),
    };
    let widest = |width: &dyn Fn(&Line<'_>) -> usize| lines.iter().map(width).max().unwrap_or(0);
    let checks = widest(&|line| line.finding.check.len());
    let subjects = widest(&|line| subject(line).chars().count());
    let indent = MARGIN + checks + 2 + subjects + 2;
    let room = look.width.map(|width| width.saturating_sub(indent).max(NARROWEST));
    let mut text = String::new();
    let mut heading = None;
    for line in lines {
        if heading != Some((line.pipeline, line.publisher)) {
            heading = Some((line.pipeline, line.publisher));
            let of = line.publisher.map(|publisher| format!(", publisher {publisher}")).unwrap_or_default();
            let title = format!("pipeline {}{of}", line.pipeline);
            let _ = writeln!(text, "{}", look.paint(&one_line(&title), Tint::Heading));
        }
        let Finding { check, verdict, seen, remedy, .. } = &line.finding;
        let (word, tint) = match verdict {
            Verdict::Ok => ("ok  ", Tint::Good),
            Verdict::Warn => ("WARN", Tint::Warning),
            Verdict::Fail => ("FAIL", Tint::Bad),
        };
        let seen = folded(seen, room).join(&format!("\n{}", " ".repeat(indent)));
        let _ = writeln!(text, "  {}  {check:<checks$}  {:<subjects$}  {seen}", look.paint(word, tint), subject(line));
        if !remedy.is_empty() {
            // In one piece, so that it can be copied.
            let remedy = folded(remedy, None).join(&format!("\n{}", " ".repeat(MARGIN)));
            let _ = writeln!(text, "{}{} {remedy}", " ".repeat(MARGIN), look.paint("remedy:", tint));
        }
    }
    let count = |verdict: Verdict| lines.iter().filter(|line| line.finding.verdict == verdict).count();
    let (failures, warnings, fine) = (count(Verdict::Fail), count(Verdict::Warn), count(Verdict::Ok));
    let plural = |number: usize| if number == 1 { "" } else { "s" };
    let (outcome, tint) = match (failures, warnings) {
        (0, 0) => ("a run would start", Tint::Good),
        (0, _) => ("a run would start", Tint::Warning),
        _ => ("a run would not start", Tint::Bad),
    };
    let (s, w) = (plural(failures), plural(warnings));
    let outcome = look.paint(outcome, tint);
    let _ = writeln!(text, "{outcome}: {failures} failure{s}, {warnings} warning{w}, {fine} ok");
    text
}

/// A text's lines, no longer than there is room for, without what a terminal would obey.
fn folded(text: &str, room: Option<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    for line in text.trim().lines() {
        let depth = line.chars().take_while(|char| *char == ' ').count();
        let line = one_line(line);
        let Some(room) = room else {
            lines.push(format!("{}{line}", " ".repeat(depth)));
            continue;
        };
        let mut current = " ".repeat(depth);
        let mut begun = false;
        for word in line.split(' ') {
            if begun && current.chars().count() + 1 + word.chars().count() > room {
                lines.push(std::mem::replace(&mut current, " ".repeat(depth)));
                begun = false;
            }
            if begun {
                current.push(' ');
            }
            current.push_str(word);
            begun = true;
        }
        lines.push(current);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(check: &'static str, subject: &str, verdict: Verdict, seen: &str, remedy: &str) -> Line<'static> {
        let (subject, seen, remedy) = (subject.to_owned(), seen.to_owned(), remedy.to_owned());
        let finding = Finding { check, subject, verdict, seen, remedy };
        Line { pipeline: "orders", publisher: None, side: Side::Source, finding }
    }

    fn lines() -> Vec<Line<'static>> {
        vec![
            line("wal-level", "db:5432", Verdict::Ok, "wal_level = logical", ""),
            line("position", "slot outboxd_shop", Verdict::Fail, "is lost\n  the gap: 7 bytes", "SELECT 1;\nSELECT 2"),
        ]
    }

    #[test]
    fn every_check_is_a_line_and_its_remedy_stands_below() {
        let expected = "\
pipeline orders
  ok    wal-level  db:5432            wal_level = logical
  FAIL  position   slot outboxd_shop  is lost
                                        the gap: 7 bytes
        remedy: SELECT 1;
        SELECT 2
a run would not start: 1 failure, 0 warnings, 1 ok
";
        assert_eq!(written(&lines(), Look::default()), expected);
    }

    #[test]
    fn on_a_terminal_what_was_seen_is_folded_and_the_remedy_stays_whole() {
        let long = "word ".repeat(20);
        let told = [line("slot", "s", Verdict::Warn, &long, &long)];
        let text = written(&told, Look { colours: false, width: Some(50) });
        let folded = text.lines().filter(|line| line.starts_with(&format!("{}word", " ".repeat(17)))).count();
        assert!(folded >= 2 && text.lines().filter(|line| line.contains("slot")).all(|l| l.len() <= 50), "{text}");
        assert!(text.contains(&format!("        remedy: {}\n", long.trim())), "{text}");
    }

    #[test]
    fn scripts_get_every_field() {
        let json = serde_json::to_value(lines()).unwrap();
        let expected = serde_json::json!({
            "pipeline": "orders", "publisher": null, "side": "source", "check": "wal-level", "subject": "db:5432",
            "status": "ok", "seen": "wal_level = logical", "remedy": "",
        });
        assert_eq!(json[0], expected);
    }
}
