//! Whatever bytes stand for a JSON document in the binary log, its text is of a size in proportion, or there is none.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outboxd::source::mysql::json::render;

fuzz_target!(|document: &[u8]| {
    let mut out = Vec::new();
    let _ = render(document, &mut out);
    assert!(out.len() <= document.len() * 8 + 400, "a byte of the document may be used once");
});
