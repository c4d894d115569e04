//! Whatever bytes stand for a column's value, rendering gives text or refuses it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outboxd::event::Want;
use outboxd::source::postgres::values::{render_binary, render_text};

fuzz_target!(|input: (u32, bool, bool, &[u8])| {
    let (type_oid, binary, time, bytes) = input;
    let want = if time { Want::Time } else { Want::Text };
    // Small numbers, so that the known types are met often.
    let type_oid = type_oid % 5100;
    let mut out = Vec::new();
    let _ = match binary {
        true => render_binary(type_oid, want, bytes, &mut out).is_ok(),
        false => render_text(type_oid, want, bytes, &mut out).is_ok(),
    };
});
