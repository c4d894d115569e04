//! Whatever stands in a configuration file, reading it gives options or a list of problems.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = outboxd::config::parse("fuzz.toml", text);
});
