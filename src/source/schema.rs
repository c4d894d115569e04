//! The tables' own statements: files under sql/ that run as they stand, with marked places that `init` fills in.
//! MongoDB's are JavaScript, where the marks are comments as well.

/// The template without its comments, with each `/*name*/ … /**/` replaced; what has no replacement stays as written.
pub fn fill(template: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let comment = |line: &&str| ["--", "//"].iter().any(|mark| line.trim_start().starts_with(mark));
    let statement = template.lines().filter(|line| !comment(line));
    let mut rest = &*statement.collect::<Vec<_>>().join("\n");
    let mut filled = String::new();
    while let Some((before, after)) = rest.split_once("/*") {
        filled.push_str(before);
        let (name, after) = after.split_once("*/").unwrap_or((after, ""));
        let (written, after) = after.split_once("/**/").unwrap_or((after, ""));
        filled.push_str(&value(name).unwrap_or_else(|| written.trim().to_owned()));
        rest = after;
    }
    filled.push_str(rest);
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_says_what_is_between_its_marks_unless_told_otherwise() {
        let template = "-- about\nCREATE TABLE /*table*/ outbox /**/ (/*id*/ id /**/ uuid)";
        assert_eq!(fill(template, |_| None), "CREATE TABLE outbox (id uuid)");
        let named = |name: &str| (name == "table").then(|| "\"x\"".to_owned());
        assert_eq!(fill(template, named), "CREATE TABLE \"x\" (id uuid)");
    }
}
