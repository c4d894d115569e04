//! Topic templates: `orders.events`, `outbox.event.{aggregatetype}`; a doubled brace is a brace.

use thiserror::Error;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum TemplateError {
    #[error("`{0}` has an opening brace without its closing one")]
    Unclosed(String),
    #[error("`{0}` has a closing brace without its opening one")]
    Unopened(String),
    #[error("`{0}` has empty braces: name a role or a column in them")]
    Nameless(String),
    #[error("a topic template cannot be empty")]
    Empty,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Text(String),
    Name(String),
}

/// The template's parts in order.
pub fn parse(template: &str) -> Result<Vec<Part>, TemplateError> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut chars = template.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '{' if chars.next_if_eq(&'{').is_some() => text.push('{'),
            '}' if chars.next_if_eq(&'}').is_some() => text.push('}'),
            '{' => {
                let mut name = String::new();
                loop {
                    match chars.next() {
                        Some('}') => break,
                        Some(char) => name.push(char),
                        None => return Err(TemplateError::Unclosed(template.to_owned())),
                    }
                }
                if name.trim().is_empty() {
                    return Err(TemplateError::Nameless(template.to_owned()));
                }
                if !text.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut text)));
                }
                parts.push(Part::Name(name.trim().to_owned()));
            }
            '}' => return Err(TemplateError::Unopened(template.to_owned())),
            char => text.push(char),
        }
    }
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
    if parts.is_empty() { Err(TemplateError::Empty) } else { Ok(parts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_in_braces_and_doubled_braces_are_text() {
        let text = |text: &str| Part::Text(text.to_owned());
        let name = |name: &str| Part::Name(name.to_owned());
        assert_eq!(parse("orders"), Ok(vec![text("orders")]));
        assert_eq!(parse("a.{b}.{c}"), Ok(vec![text("a."), name("b"), text("."), name("c")]));
        assert_eq!(parse("{{x}}{y}"), Ok(vec![text("{x}"), name("y")]));
    }

    #[test]
    fn malformed_templates_are_refused() {
        for template in ["", "{", "a{b", "}", "{}", "{ }"] {
            assert!(parse(template).is_err(), "{template:?} was accepted");
        }
    }
}
