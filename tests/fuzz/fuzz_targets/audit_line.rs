//! Files of the audit whose bytes are anybody's: they are followed to their end, and each line that is there was counted or
//! is a finding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxd::egress::audit::check;

fuzz_target!(|input: &[u8]| {
    let chain = check(input).expect("bytes in memory can be read");
    let told = u64::try_from(chain.findings.len()).expect("a length fits");
    assert!(told <= chain.faults, "{chain:?}");
    let (first, last) = chain.numbers;
    assert!(first <= last || last == 0, "{chain:?}");
    let lines = input.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count();
    assert!(chain.lines <= u64::try_from(lines).expect("a length fits"), "{chain:?}");
    for finding in &chain.findings {
        assert!(!finding.fault.to_string().is_empty());
    }
});
