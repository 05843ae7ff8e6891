//! The guest's reader of a port: whatever comes, every byte is accounted for once, and cutting it differently changes
//! nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandbox_protocol::link::{BREAK_ZEROS, BreakReader, Nonce, Step, encode_break};

/// The stream that the input stands for: its bytes, with runs of zeros long enough to begin a BREAK, and whole BREAKs,
/// where it asks for them. A fuzzer would not find 32,768 zeros by itself.
fn stream(input: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &byte in input {
        match byte {
            0xf0 => bytes.resize(bytes.len() + BREAK_ZEROS, 0),
            0xf1 => bytes.resize(bytes.len() + BREAK_ZEROS - 1, 0),
            0xf2 => bytes.extend(encode_break([byte; 16])),
            0xf3 => bytes.extend([1; 17]),
            other => bytes.push(other),
        }
    }
    bytes
}

/// What the reader makes of it: the data of each connection, and the nonces between them.
fn read(bytes: &[u8], chunk: usize) -> (Vec<usize>, Vec<Nonce>) {
    let mut reader = BreakReader::default();
    let (mut data, mut nonces) = (vec![0], Vec::new());
    let mut taken = 0;
    for mut part in bytes.chunks(chunk) {
        while !part.is_empty() {
            let (step, n) = reader.feed(part);
            assert!(n > 0 && n <= part.len(), "took {n} of {}", part.len());
            taken += n;
            match step {
                Step::Data => *data.last_mut().expect("there is one") += n,
                Step::Nothing => {}
                Step::Break(nonce) => {
                    nonces.push(nonce);
                    data.push(0);
                }
            }
            part = &part[n..];
        }
    }
    assert_eq!(taken, bytes.len());
    (data, nonces)
}

fuzz_target!(|input: &[u8]| {
    let Some((&cut, input)) = input.split_first() else { return };
    // At most 2 MiB.
    let bytes = stream(&input[..input.len().min(64)]);
    let whole = read(&bytes, usize::MAX);
    assert_eq!(whole, read(&bytes, usize::from(cut) * 97 + 1));
});
