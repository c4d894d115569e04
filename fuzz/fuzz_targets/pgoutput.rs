//! Whatever bytes a server sends as a pgoutput message, the codec answers with a message or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outboxd::source::postgres::pgoutput::{Message, parse};

fuzz_target!(|frame: &[u8]| {
    if let Ok(Message::Insert { new, .. }) = parse(frame) {
        assert_eq!(new.values().count(), new.len(), "a tuple that was accepted must give all its values");
    }
});
