//! Random histories against a model that is written down differently: a table of what may follow what.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{Arc, Barrier},
};

use proptest::prelude::*;
use sandbox_protocol::id::SandboxId;

use super::{
    Log, folded, open, options,
    samples::{self, id},
    segment, write,
};
use crate::journal::{
    Journal, Options, RowState, State, SyncMode, Transition, keeper::tests::Hook, replay::replay, tail::lock,
};

fn transition(kind: u8, n: u16) -> Transition {
    match kind {
        0 => samples::making(n),
        1 => samples::warmed(),
        2 => samples::claimed(n),
        3 => samples::renewed(),
        4 => samples::ending(),
        5 => samples::failed(),
        6 => Transition::Gone,
        _ => samples::quarantined(),
    }
}

/// For each transition of `transition`: from which states (in the order of RowState) it leads to which.
const TABLE: [&[u8; 7]; 8] = [
    //MWCEFGQ
    b"-------", // making: only from nothing
    b"WWC----", // warmed
    b"CC-----", // claimed
    b"--C----", // renewed
    b"EEE---E", // ending
    b"FFFF---", // failed
    b"GGGGG-G", // gone
    b"QQQQQ--", // quarantined
];
const LETTERS: &[u8; 7] = b"MWCEFGQ";
const STATES: [RowState; 7] = [
    RowState::Making,
    RowState::Warm,
    RowState::Claimed,
    RowState::Ending,
    RowState::Failed,
    RowState::Gone,
    RowState::Quarantined,
];

#[derive(Debug, Default)]
struct Model(BTreeMap<SandboxId, u8>);

impl Model {
    fn take(&mut self, id: SandboxId, kind: u8) {
        match self.0.get_mut(&id) {
            None if kind == 0 => drop(self.0.insert(id, b'M')),
            None => {}
            Some(at) => {
                let column = LETTERS.iter().position(|letter| letter == at).unwrap();
                let next = TABLE[usize::from(kind)][column];
                if next != b'-' {
                    *at = next;
                }
            }
        }
    }

    fn check(&self, state: &State) {
        let states: BTreeMap<SandboxId, u8> = state
            .sandboxes
            .iter()
            .map(|(id, row)| {
                (
                    *id,
                    LETTERS[STATES.iter().position(|state| *state == row.state).unwrap()],
                )
            })
            .collect();
        assert_eq!(states, self.0);
    }
}

/// What happens between two starts: appends, and how it ends.
type Run = (Vec<(u8, u16)>, bool, bool);

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let appends = prop::collection::vec((0_u8..8, 0_u16..6), 0..60);
    prop::collection::vec((appends, any::<bool>(), any::<bool>()), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_lives_with_random_restarts(runs in runs()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut model = Model::default();
        let mut log = Log::new();
        for (appends, fold_first, stop) in runs {
            let options = Options { segment_bytes: 4096, ..options(dir.path()) };
            let (journal, opened) = Journal::open(options).unwrap();
            model.check(&opened.state);
            prop_assert_eq!(&opened.state, &folded(&log));
            prop_assert!(opened.damage.is_empty() && opened.torn.is_none());
            for (kind, n) in appends {
                let transition = transition(kind, n);
                drop(journal.append(Some(id(n)), &transition).unwrap());
                model.take(id(n), kind);
                log.push((Some(id(n)), transition));
            }
            runtime.block_on(async {
                if fold_first {
                    journal.folded().await.unwrap();
                }
                if stop {
                    journal.close().await.unwrap();
                }
            });
        }
        let (_journal, opened) = open(dir.path());
        model.check(&opened.state);
    }

    #[test]
    fn power_loss_takes_unsynced_sectors_only(
        synced in 1_usize..20,
        later in 1_usize..20,
        dropped in prop::collection::vec(any::<bool>(), 64),
    ) {
        let log: Log = (0..synced + later)
            .map(|n| {
                let n = u16::try_from(n).unwrap();
                (Some(id(n / 3)), transition(u8::try_from(n % 3).unwrap(), n / 3))
            })
            .collect();
        let (mut bytes, ends) = segment(1, &log);
        // Sectors behind the synced end may be old; the one it stands in was written again by each append, and a disk
        // writes a sector whole.
        let safe = ends[synced - 1];
        for (sector, dropped) in dropped.iter().enumerate() {
            let from = (sector * 512).max(safe);
            let to = ((sector + 1) * 512).min(bytes.len());
            if *dropped && from < to {
                bytes[from..to].fill(0);
            }
        }
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 1, &bytes);
        let found = replay(&dir.path().join("journal"), State::default(), 0).unwrap();
        let all = folded(&log);
        let least = folded(&log[..synced]);
        if found.damage.is_empty() {
            let whole = usize::try_from(found.last_seq).unwrap();
            prop_assert!(whole >= synced);
            prop_assert_eq!(&found.state, &folded(&log[..whole]));
        }
        for (id, row) in &least.sandboxes {
            // What was synced is there, or something later of the same sandbox.
            let read = &found.state.sandboxes[id];
            prop_assert!(read.seq >= row.seq && read.seq <= all.sandboxes[id].seq);
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            assert!(fs::copy(entry.path(), to).is_ok());
        }
    }
}

/// Power is lost after the log was cut down, and of the store only what its last barrier brought to the disk is left.
#[tokio::test]
async fn inv_08_unsynced_writes_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        segment_bytes: 4096,
        sync: SyncMode::Always,
        ..options(dir.path())
    };
    let on_disk = tempfile::tempdir().unwrap();
    let at_barrier = on_disk.path().join("store");
    let mut log = Log::new();
    for round in 0..6_u16 {
        let (journal, opened) = Journal::open(options.clone()).unwrap();
        assert_eq!(opened.state, folded(&log));
        let (store, to) = (dir.path().join("store"), at_barrier.clone());
        // The keeper waits at its first barrier until all is appended, so that its next pass folds and deletes at once.
        let gate = Arc::new(Barrier::new(2));
        let mut held = Some(gate.clone());
        let hook = Hook(Box::new(move || {
            drop(fs::remove_dir_all(&to));
            copy(&store, &to);
            if let Some(gate) = held.take() {
                gate.wait();
            }
        }));
        *lock(&journal.inner.keeper.bell.after_barrier) = Some(hook);
        for n in 0..40 {
            let sandbox = Some(id(n));
            let kind = u8::try_from(round).unwrap();
            drop(journal.append(sandbox, &transition(kind, n)).unwrap());
            log.push((sandbox, transition(kind, n)));
        }
        gate.wait();
        journal.folded().await.unwrap();
        // Past the barrier, and lost with the store's memory.
        let written = journal.append(Some(id(round)), &samples::renewed()).unwrap();
        log.push((Some(id(round)), samples::renewed()));
        drop(journal.settle(written).await.unwrap());
        drop(journal);

        let after = tempfile::tempdir().unwrap();
        copy(&at_barrier, &after.path().join("store"));
        copy(&dir.path().join("journal"), &after.path().join("journal"));
        let (again, opened) = Journal::open(Options {
            dir: after.path().to_owned(),
            ..options.clone()
        })
        .unwrap();
        assert_eq!(opened.state, folded(&log), "round {round}");
        assert_eq!(opened.damage, []);
        again.close().await.unwrap();
        let files = super::files(dir.path());
        assert!(files.len() < 6, "the log was cut down: {files:?}");
    }
}
