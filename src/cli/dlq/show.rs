//! Letters for people, and for programs.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, stdout};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use super::{Place, Store, sink_halt, source_halt};
use crate::cli::print;
use crate::dead_letters::Page;
use crate::dead_letters::letter::Kept;
use crate::failure::{ExitCode, Halt};

/// The widest that a column of the list gets; the reason takes what there is.
const WIDEST: usize = 36;
const LONGEST_REASON: usize = 80;

pub async fn list(mut store: Store, place: &Place, page: &Page<'_>, json: bool) -> Result<ExitCode, Halt> {
    if let Some(before) = page.before {
        // A mistyped one must not look like the end of the list.
        store.find(&place.whose(), before).await?;
    }
    let letters = match store {
        Store::Table(mut letters) => letters.list(&place.whose(), page).await.map_err(source_halt)?,
        Store::Topic(letters) => letters.list(page).await.map_err(sink_halt)?,
    };
    if json {
        let lines: String = letters.iter().map(|letter| format!("{}\n", letter.to_json(false))).collect();
        return print(lines.as_bytes());
    }
    if letters.is_empty() {
        let such = match (page.waiting, page.before) {
            (false, None) => "no dead letters",
            (true, None) => "no dead letters that wait",
            (_, Some(_)) => "no dead letters before that",
        };
        return print(format!("{such} in {}\n", place.publisher().dead_letter.describe()).as_bytes());
    }
    print(table(&letters).as_bytes())
}

fn table(letters: &[Kept]) -> String {
    let mut rows = vec![["ID", "WHEN", "TOPIC", "KEY", "EVENT ID", "REPLAYED", "REASON"].map(str::to_owned)];
    for Kept { id, failed_at, replayed, letter, .. } in letters {
        // Fractions of a second say nothing here.
        let when = failed_at.split_once('.').map_or(failed_at.clone(), |(seconds, _)| format!("{seconds}Z"));
        rows.push([
            id.clone(),
            when,
            short(letter.topic.as_deref().filter(|topic| !topic.is_empty()).unwrap_or("-"), WIDEST),
            short(&letter.key.as_deref().map_or_else(|| "-".to_owned(), readable), WIDEST),
            short(letter.event_id.as_deref().unwrap_or("-"), WIDEST),
            if *replayed { "yes" } else { "no" }.to_owned(),
            short(&letter.reason, LONGEST_REASON),
        ]);
    }
    let mut widths = [0; 7];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Without what would command a terminal.
fn tame(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// One line of at most so many characters.
fn short(text: &str, most: usize) -> String {
    let line = tame(text);
    match line.chars().count() > most {
        true => line.chars().take(most - 1).chain(['…']).collect(),
        false => line,
    }
}

fn commands(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\r' | '\t')
}

fn readable(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => format!("base64:{}", BASE64.encode(bytes)),
    }
}

pub async fn show(mut store: Store, place: &Place, id: &str, json: bool) -> Result<ExitCode, Halt> {
    let kept = store.find(&place.whose(), id).await?;
    match json {
        true => print(format!("{}\n", kept.to_json(true)).as_bytes()),
        false => print(&written(&kept, stdout().is_terminal())),
    }
}

/// A payload is written as it is, unless that would command a terminal.
fn written(kept: &Kept, terminal: bool) -> Vec<u8> {
    let letter = &kept.letter;
    let replayed = match (&kept.replayed_at, kept.replayed) {
        (Some(at), _) => at,
        (None, true) => "yes",
        (None, false) => "no",
    };
    let none = || "-".to_owned();
    let mut text = String::new();
    for (name, value) in [
        ("id", kept.id.clone()),
        ("failed at", kept.failed_at.clone()),
        ("replayed", replayed.to_owned()),
        ("pipeline", letter.pipeline.clone()),
        ("publisher", letter.publisher.clone()),
        ("table", letter.source_table.clone()),
        ("event id", letter.event_id.clone().unwrap_or_else(none)),
        ("topic", letter.topic.clone().unwrap_or_else(none)),
        ("key", letter.key.as_deref().map_or_else(none, readable)),
        ("position", letter.position.clone()),
        ("attempts", letter.attempts.to_string()),
        ("reason", letter.reason.clone()),
    ] {
        let _ = writeln!(text, "{name:<10} {}", tame(&value));
    }
    text.push_str("headers\n");
    for (name, value) in letter.headers.iter() {
        let _ = writeln!(text, "  {}: {}", tame(name), tame(&value.map_or_else(none, readable)));
    }
    let mut text = text.into_bytes();
    match letter.value.as_deref() {
        None => text.extend_from_slice(b"value      -\n"),
        Some(value) => {
            let (form, shown) = match std::str::from_utf8(value) {
                Ok(text) if !(terminal && text.chars().any(commands)) => ("", value.to_vec()),
                _ => (", in base64", BASE64.encode(value).into_bytes()),
            };
            text.extend_from_slice(format!("value      {} bytes{form}\n", value.len()).as_bytes());
            text.extend_from_slice(&shown);
            text.push(b'\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letters::letter::Letter;

    #[test]
    fn a_list_is_aligned_and_short() {
        let letter = |id: &str, reason: &str| Kept {
            id: id.to_owned(),
            failed_at: "2026-11-16T18:00:00.123456Z".to_owned(),
            letter: Letter { topic: Some("orders".to_owned()), reason: reason.to_owned(), ..Letter::default() },
            ..Kept::default()
        };
        let text = table(&[letter("7", "too\nlarge"), letter("1000", &"x".repeat(500))]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[1], "7     2026-11-16T18:00:00Z  orders  -    -         no        too large");
        assert!(lines[2].ends_with('…') && lines[2].chars().count() < 150, "{text}");
    }

    #[test]
    fn a_payload_that_is_no_text_is_shown_in_base64() {
        let kept = Kept { letter: Letter { value: Some(vec![0, 255]), ..Letter::default() }, ..Kept::default() };
        let text = String::from_utf8(written(&kept, false)).unwrap();
        assert!(text.ends_with("value      2 bytes, in base64\nAP8=\n"), "{text}");
    }

    #[test]
    fn nothing_of_a_letter_commands_a_terminal() {
        let mut headers = crate::route::Headers::default();
        headers.push("h\u{1b}[2J", Some(b"v\x1b[2J"));
        let hostile = || Some(b"\x1b]0;owned\x07{}\n".to_vec());
        let letter =
            Letter { value: hostile(), key: hostile(), reason: "\u{1b}[31m".to_owned(), headers, ..Letter::default() };
        let kept = Kept { letter, ..Kept::default() };
        let shown = String::from_utf8(written(&kept, true)).unwrap();
        assert!(!shown.contains('\u{1b}') && shown.contains("in base64"), "{shown:?}");
        // For a program, the payload is what it is.
        assert!(written(&kept, false).ends_with(b"\x1b]0;owned\x07{}\n\n"));
    }
}
