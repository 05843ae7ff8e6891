//! What a git says: no bytes upset the parser, where they are cut changes nothing, and a reply has its bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandbox_protocol::{limits::MESSAGE_IN, v1::AgentGitStatusReply};
use silkd::tools::git::porcelain::{ENTRIES, Malformed, Porcelain};

fn parse(input: &[u8], piece: usize) -> Result<AgentGitStatusReply, Malformed> {
    let mut porcelain = Porcelain::default();
    for piece in input.chunks(piece) {
        porcelain.feed(piece)?;
    }
    porcelain.finish()
}

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    let parsed = parse(bytes, usize::from(piece.max(1)));
    assert_eq!(parsed, parse(bytes, bytes.len().max(1)));
    if let Ok(reply) = parsed {
        let paths: usize = reply.entries.iter().map(|entry| entry.path.len() + entry.from.len()).sum();
        assert!(reply.entries.len() <= ENTRIES && paths < MESSAGE_IN);
    }
});
