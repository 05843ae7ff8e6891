//! What a language server says: no bytes upset the reader, and where they are cut changes nothing.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use sandbox_protocol::limits::LSP_MESSAGE;
use silkd::tools::lsp::header::{Malformed, Reader};

/// The messages in `input` cut to pieces of this size, and the one that has begun.
fn read(input: &[u8], piece: usize) -> Result<Vec<Vec<u8>>, Malformed> {
    let (mut reader, mut messages) = (Reader::default(), vec![Vec::new()]);
    for piece in input.chunks(piece) {
        let mut piece = Bytes::copy_from_slice(piece);
        while let Some(part) = reader.next(&mut piece)? {
            let message = messages.last_mut().unwrap();
            message.extend_from_slice(&part.data);
            assert!(message.len() <= LSP_MESSAGE);
            assert_eq!(part.more, reader.within());
            if !part.more {
                messages.push(Vec::new());
            }
        }
        assert!(piece.is_empty());
    }
    Ok(messages)
}

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    assert_eq!(read(bytes, usize::from(piece.max(1))), read(bytes, bytes.len().max(1)));
});
