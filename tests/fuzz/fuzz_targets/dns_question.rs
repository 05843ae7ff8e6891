//! What a guest asks its DNS door: it may send anything. What is answered is one datagram that says what was asked, is no
//! longer than its client takes, and is itself no question.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxd::egress::door::dns::Question;

fuzz_target!(|packet: &[u8]| {
    let Some(question) = Question::read(packet) else { return };
    let Some(answer) = question.datagram(&question.busy()) else { return };
    assert!((12..=1_232).contains(&answer.len()));
    assert_eq!(answer.get(..2), packet.get(..2), "another question's number");
    assert!(Question::read(&answer).is_none(), "a guest's answer would be answered");
});
