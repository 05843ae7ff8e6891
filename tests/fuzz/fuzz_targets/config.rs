//! A configuration that is anything: it is taken or refused, every mistake has a place in it, and telling them works.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sandboxd::{
    config::{Config, Host},
    words::MemBytes,
};

fuzz_target!(|text: &str| {
    let host = Host {
        name: "node".to_owned(),
        memory: MemBytes(64 << 30),
        cores: 8,
    };
    let Err(mistakes) = Config::parse(text, Path::new("sandboxd.toml"), &host) else {
        return;
    };
    assert!(!mistakes.all().is_empty());
    let lines = text.lines().count().max(1);
    for mistake in mistakes.all() {
        let (line, column) = mistakes.place(mistake);
        assert!((1..=lines + 1).contains(&line) && column >= 1, "{line}:{column} of {lines} lines");
    }
    assert!(!mistakes.to_string().is_empty());
    assert!(mistakes.to_json().is_object());
});
