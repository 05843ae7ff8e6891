//! A journal whose bytes are anybody's: it is read to an end, or refused with a reason, and what is damaged is told.
#![no_main]

use std::{cell::RefCell, fs, path::Path};

use libfuzzer_sys::fuzz_target;
use sandboxd::journal::check;

thread_local! {
    static DIR: RefCell<tempfile::TempDir> = RefCell::new(tempfile::tempdir().expect("a folder can be made"));
}

/// A segment as the daemon would write it, whose records are the pieces of the input between bytes 0xff. A piece that
/// begins with 0xfe stands there as it is, without a frame: a fuzzer would not find a checksum by itself.
fn segment(input: &[u8]) -> Vec<u8> {
    let mut head = b"sbxlog\r\n".to_vec();
    head.extend(1_u32.to_le_bytes());
    head.extend([0; 4]);
    head.extend(1_u64.to_le_bytes());
    let sum = crc32c::crc32c(&head);
    head.extend(sum.to_le_bytes());
    head.resize(32, 0);
    let mut seq = 1_u64;
    for piece in input.split(|byte| *byte == 0xff) {
        if let Some(raw) = piece.strip_prefix(&[0xfe]) {
            head.extend_from_slice(raw);
            continue;
        }
        let sum = crc32c::crc32c_append(crc32c::crc32c(&seq.to_le_bytes()), piece);
        head.extend(u32::try_from(piece.len()).expect("inputs are short").to_le_bytes());
        head.extend(sum.to_le_bytes());
        head.extend(seq.to_le_bytes());
        head.extend_from_slice(piece);
        seq += 1;
    }
    head
}

fuzz_target!(|input: &[u8]| {
    DIR.with_borrow(|dir| read(dir.path(), input));
});

fn read(dir: &Path, input: &[u8]) {
    // Each input meets an empty state.
    for entry in fs::read_dir(dir).expect("it is ours").flatten() {
        let path = entry.path();
        if path.is_dir() {
            fs::remove_dir_all(path).expect("it is ours");
        } else {
            fs::remove_file(path).expect("it is ours");
        }
    }
    fs::create_dir(dir.join("journal")).expect("it was removed");
    fs::write(dir.join("journal/1.seg"), segment(input)).expect("the disk takes it");
    let Ok(report) = check(dir) else { return };
    // Nothing is invented: at most one row for each record.
    let records = input.split(|byte| *byte == 0xff).count();
    let rows: usize = report.sandboxes.values().sum();
    assert!(rows + report.pools <= records, "{rows} rows and {} pools of {records} records", report.pools);
}
