//! Tests of the audit: its files, and what doors write into them.

mod doors;
mod files;
mod keep;

use std::{fs, path::Path};

use serde_json::Value;

use super::*;
use crate::{
    clock::{Clock, Tick, WallTime},
    journal::Heads,
    telemetry::metrics::Metrics,
};

pub(super) const START: u64 = 1_700_000_000_000_000;

pub(super) fn clock() -> Clock {
    Clock::manual(Tick::from_nanos(0), WallTime::from_micros(START))
}

pub(super) fn options(dir: &Path, queue: usize) -> Options {
    Options {
        state_dir: dir.to_owned(),
        queue,
        spare: 0,
        heads: Heads::default(),
        journal: None,
        metrics: Metrics::new().audit,
        clock: Clock::host(),
    }
}

pub(super) fn values(dir: &Path, name: &str) -> Vec<Value> {
    let files = ledger::files(&dir.join(name), name).unwrap();
    let text = files.iter().map(|path| fs::read_to_string(path).unwrap());
    let lines = text.collect::<String>();
    // The last may be on its way.
    let whole = lines.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

pub(super) fn of_kind<'v>(values: &'v [Value], kind: &str) -> Vec<&'v Value> {
    values.iter().filter(|value| value["kind"] == kind).collect()
}

#[expect(clippy::disallowed_methods, reason = "a test damages files as nobody should")]
pub(super) fn put(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
}
