//! Whatever bytes stand for a document, it is written as JSON that can be read, of a size in proportion, or not at all.
#![no_main]

use bson::{RawBsonRef, RawDocument};
use libfuzzer_sys::fuzz_target;
use outboxd::config::ExtendedJson;
use outboxd::source::mongodb::extended_json::{write, write_plain};
use outboxd::source::mongodb::token::ResumeToken;

const FORMS: [ExtendedJson; 2] = [ExtendedJson::Relaxed, ExtendedJson::Canonical];

fuzz_target!(|bytes: &[u8]| {
    // Framed, so that the elements are met more often than the check of the length.
    let mut framed = ((bytes.len() + 5) as u32).to_le_bytes().to_vec();
    framed.extend_from_slice(bytes);
    framed.push(0);
    for bytes in [bytes, &framed] {
        let Ok(document) = RawDocument::from_bytes(bytes) else { continue };
        let written = FORMS.map(|form| {
            let mut out = Vec::new();
            let written = write(RawBsonRef::Document(document), form, &mut out).is_ok();
            // A byte may be a control character, or an element of its own.
            assert!(out.len() <= bytes.len() * 40 + 40, "{} bytes of {}", out.len(), bytes.len());
            written.then_some(out)
        });
        assert_eq!(written[0].is_some(), written[1].is_some(), "one form can be written, the other not");
        for json in written.iter().flatten() {
            read(json);
        }
        for element in document.iter_elements().map_while(Result::ok) {
            if let Ok(value) = element.value() {
                let _ = write_plain(value, FORMS[0], &mut Vec::new());
            }
        }
        if let Some(token) = ResumeToken::from_raw(document) {
            assert_eq!(token.to_string().parse(), Ok(token));
        }
    }
});

fn read(json: &[u8]) {
    if let Err(error) = serde_json::from_slice::<serde_json::Value>(json) {
        // This reader gives up earlier than the writer.
        let deep = error.to_string().starts_with("recursion limit exceeded");
        assert!(deep, "{error}: {}", String::from_utf8_lossy(json));
    }
}
