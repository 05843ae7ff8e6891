//! What stands before hyper, and the SOCKS5 reader: a guest may say anything; what passes is a beginning of what was said,
//! and how it is cut changes nothing.
#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use sandboxd::{
    egress::door::{
        guard::{Guard, Next},
        socks5,
    },
    policy::Authority,
};

fn fed(bytes: &[u8], piece: usize) -> (Vec<u8>, Next) {
    let (mut guard, mut input, mut out) = (Guard::new(), BytesMut::new(), BytesMut::new());
    let mut next = Next::More;
    for part in bytes.chunks(piece) {
        input.extend_from_slice(part);
        next = guard.feed(&mut input, &mut out);
        if next != Next::More {
            break;
        }
    }
    (out.to_vec(), next)
}

fuzz_target!(|input: &[u8]| {
    let Some((cut, bytes)) = input.split_first() else { return };
    let whole = fed(bytes, bytes.len().max(1));
    assert!(bytes.starts_with(&whole.0));
    assert_eq!(fed(bytes, usize::from(*cut) + 1), whole);

    if let Ok(Some((_, length))) = socks5::greeting(bytes) {
        assert!(length <= bytes.len());
    }
    if let Ok(Some((_, length))) = socks5::request(bytes) {
        assert!(length <= bytes.len());
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(target) = Authority::parse(text, Some(80))
    {
        assert_eq!(Authority::parse(&target.to_string(), None), Ok(target));
    }
});
