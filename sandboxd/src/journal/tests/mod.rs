//! Tests of the whole room.

mod bytes;
mod disks;
mod living;
mod model;
pub(super) mod samples;

use std::{fs, path::Path};

use sandbox_protocol::id::SandboxId;

use super::{
    Journal, Opened, Options, State, SyncMode, Transition, fold,
    record::{decode, encode},
    segment::{frame, header},
};
use crate::clock::{Clock, Tick, WallTime};

pub(super) type Log = Vec<(Option<SandboxId>, Transition)>;

pub(super) fn clock() -> Clock {
    Clock::manual(Tick::from_nanos(1), WallTime::from_micros(1_000_000))
}

pub(super) fn options(dir: &Path) -> Options {
    Options {
        dir: dir.to_owned(),
        sync: SyncMode::Auto,
        segment_bytes: 64 * 1024,
        clock: clock(),
    }
}

pub(super) fn open(dir: &Path) -> (Journal, Opened) {
    Journal::open(options(dir)).unwrap()
}

/// A segment of these records, numbered from `first`, and where each ends; zeros behind.
pub(super) fn segment(first: u64, log: &Log) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = header(first).to_vec();
    let mut ends = Vec::new();
    for (seq, (sandbox, transition)) in (first..).zip(log) {
        frame(seq, &encode(clock().wall(), *sandbox, transition), &mut bytes);
        ends.push(bytes.len());
    }
    bytes.resize(bytes.len() + 256, 0);
    (bytes, ends)
}

pub(super) fn write(dir: &Path, number: u64, bytes: &[u8]) {
    fs::create_dir_all(dir.join("journal")).unwrap();
    let path = super::tail::path(&dir.join("journal"), number);
    // A new file each time: some file systems bring one that was truncated to the disk at once.
    drop(fs::remove_file(&path));
    let mut file = fs::File::create_new(path).unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
}

/// What these records, numbered from 1, fold to.
pub(super) fn folded<'a>(log: impl IntoIterator<Item = &'a (Option<SandboxId>, Transition)>) -> State {
    let mut state = State::default();
    for (seq, (sandbox, transition)) in (1..).zip(log) {
        fold(
            &mut state,
            &decode(seq, &encode(clock().wall(), *sandbox, transition)).unwrap(),
        );
    }
    state
}

/// Names of the files of the log.
pub(super) fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir.join("journal"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
