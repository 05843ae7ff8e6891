//! Histories made on purpose: what the bench replays.

use std::path::Path;

use sandbox_protocol::id::SandboxId;

use super::{
    OpenError, SEGMENT_BYTES, State, Transition,
    open::dirs,
    record,
    replay::replay,
    segment::{FRAME, HEADER, frame, header},
};
use crate::{clock::Clock, disk};

/// Writes a log that no daemon has folded into a state directory that has none. Blocks. For benches and tests: a
/// [`Journal::open`](super::Journal::open) of that directory replays it.
///
/// # Errors
/// [`OpenError::Io`] when the files cannot be written.
pub fn write(
    state_dir: &Path,
    clock: &Clock,
    records: impl IntoIterator<Item = (Option<SandboxId>, Transition)>,
) -> Result<u64, OpenError> {
    let (dir, _store) = dirs(state_dir);
    disk::make_dir(&dir, 0o700).map_err(|source| OpenError::Io {
        what: "make",
        path: dir.clone(),
        source,
    })?;
    let limit = usize::try_from(SEGMENT_BYTES).unwrap_or(usize::MAX);
    let (mut bytes, mut number, mut seq) = (Vec::new(), 1, 0);
    let put = |bytes: &mut Vec<u8>, number| {
        let path = super::tail::path(&dir, number);
        bytes.resize(limit.max(bytes.len()), 0);
        let written = disk::write_atomic(&path, bytes, 0o600);
        bytes.clear();
        written.map_err(|source| OpenError::Io {
            what: "write",
            path,
            source,
        })
    };
    for (sandbox, transition) in records {
        seq += 1;
        let json = record::encode(clock.wall(), sandbox, &transition);
        if bytes.len() + FRAME + json.len() > limit {
            put(&mut bytes, number)?;
            number += 1;
        }
        if bytes.is_empty() {
            bytes.extend_from_slice(&header(seq));
        }
        frame(seq, &json, &mut bytes);
    }
    if bytes.len() > HEADER {
        put(&mut bytes, number)?;
    }
    Ok(seq)
}

/// Replays the segments of a state directory alone, without lock and store: the part of a start that grows with what
/// was not folded. Says how many records there were. Blocks.
///
/// # Errors
/// As [`Journal::open`](super::Journal::open).
pub fn fold_all(state_dir: &Path) -> Result<(State, u64), OpenError> {
    let (dir, _store) = dirs(state_dir);
    let found = replay(&dir, State::default(), 0)?;
    Ok((found.state, found.replayed))
}
