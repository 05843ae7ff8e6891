//! The host's reader of a HELLO: a guest may say anything; it is refused or taken, and what is held stays small.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandbox_protocol::{
    link::{HELLO_MAGIC, HELLO_MAX, HelloReader, encode_hello, negotiate},
    v1::LinkHello,
};

const NONCE: [u8; 16] = [7; 16];

fuzz_target!(|input: &[u8]| {
    let Some((&[cut, kind], input)) = input.split_first_chunk() else { return };
    // Rubbish, then what the input says: a length and a body behind a true head, or the input alone.
    let mut bytes = Vec::new();
    if kind & 1 == 1 {
        bytes.extend_from_slice(&input[..input.len() / 2]);
        bytes.extend_from_slice(&HELLO_MAGIC);
        bytes.extend_from_slice(&NONCE);
        if kind & 2 == 2 {
            let body = &input[input.len() / 2..];
            bytes.extend(u16::try_from(body.len()).unwrap_or(u16::MAX).to_be_bytes());
        }
    }
    bytes.extend_from_slice(&input[input.len() / 2..]);

    let mut reader = HelloReader::new(NONCE);
    for part in bytes.chunks(usize::from(cut) + 1) {
        match reader.feed(part) {
            Ok(None) => {}
            Ok(Some((hello, _behind))) => {
                drop(negotiate(&hello));
                check_round_trip(&hello);
                return;
            }
            Err(_refused) => return,
        }
    }
});

/// What was understood is said and understood again.
fn check_round_trip(hello: &LinkHello) {
    // Unknown fields are dropped, so it can only have become shorter.
    let bytes = encode_hello(NONCE, hello).expect("it was at most as long");
    assert!(bytes.len() <= HELLO_MAX + 26);
    let (again, behind) = HelloReader::new(NONCE).feed(&bytes).expect("it is one").expect("it is whole");
    assert_eq!((&again, behind.len()), (hello, 0));
}
