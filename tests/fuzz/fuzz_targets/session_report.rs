//! silkd's reader of what a session's shell reports: a guest may write anything there. However it is cut, the same is
//! understood, and a report that is there is found behind anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use silkd::run::session::{Nonsense, Reader, Report, nonce};

fn read(bytes: &[u8], cut: usize) -> Result<Option<Report>, Nonsense> {
    let mut reader = Reader::new(nonce(7));
    for part in bytes.chunks(cut) {
        if let Some(report) = reader.feed(part)? {
            return Ok(Some(report));
        }
    }
    Ok(None)
}

fuzz_target!(|input: &[u8]| {
    let Some((&[cut, kind], input)) = input.split_first_chunk() else { return };
    // Rubbish alone, or rubbish, a true nonce, and the rest as a report.
    let (rubbish, rest) = input.split_at(input.len() / 2);
    let bytes = match kind & 1 {
        0 => input.to_vec(),
        _ => [rubbish, b"\n", &nonce(7), b"\0", rest].concat(),
    };
    let whole = read(&bytes, bytes.len().max(1));
    assert_eq!(read(&bytes, usize::from(cut) + 1), whole);
    if let Ok(Some(report)) = whole {
        assert!(report.flags.len() <= 64 && report.cwd.len() <= 4095);
    }
});
