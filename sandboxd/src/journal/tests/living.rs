//! A journal at work.

use std::{collections::BTreeSet, fs, sync::Arc, time::Duration};

use super::{
    Log, files, folded, open, options,
    samples::{self, id},
};
use crate::{
    clock::{Clock, Tick, WallTime},
    journal::{
        AppendError, GONE_KEPT, GONE_MAX, Health, Journal, OpenError, Options, Record, RowState, State,
        SyncMode, Transition, Unknown, fold, history,
    },
    tasks,
    work::{Kind, traced},
};

fn life(n: u16) -> Log {
    let sb = Some(id(n));
    vec![
        (sb, samples::making(n)),
        (sb, samples::warmed()),
        (sb, samples::claimed(n)),
    ]
}

fn append(journal: &Journal, log: &Log) {
    for (sandbox, transition) in log {
        drop(journal.append(*sandbox, transition).unwrap());
    }
}

#[tokio::test]
async fn what_was_appended_is_there_after_a_kill_and_after_a_stop() {
    let dir = tempfile::tempdir().unwrap();
    let mut log: Log = vec![(None, samples::boot()), (None, samples::pool_applied(3))];
    let (journal, opened) = open(dir.path());
    assert_eq!((opened.state.sandboxes.len(), opened.replayed), (0, 0));
    append(&journal, &log);
    for n in 0..200 {
        let more = life(n);
        append(&journal, &more);
        log.extend(more);
        if n == 60 {
            journal.folded().await.unwrap();
        }
    }
    drop(journal);
    let (journal, opened) = open(dir.path());
    assert_eq!(opened.state, folded(&log));
    assert!(opened.replayed > 0, "not all of it was folded");
    journal.close().await.unwrap();
    let (journal, opened) = open(dir.path());
    assert_eq!((opened.state, opened.replayed), (folded(&log), 0));
    assert_eq!((opened.damage, opened.torn), (vec![], None));
    journal.close().await.unwrap();
    assert!(
        files(dir.path()).len() <= 2,
        "folded segments are gone: {:?}",
        files(dir.path())
    );
}

#[tokio::test]
async fn two_daemons_on_one_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _opened) = open(dir.path());
    let refused = Journal::open(options(dir.path())).unwrap_err();
    let me = Some(std::process::id());
    assert!(
        matches!(refused, OpenError::Locked { pid, .. } if pid == me),
        "{refused}"
    );
    let clone = journal.clone();
    journal.close().await.unwrap();
    assert_eq!(
        clone.append(None, &samples::boot()).unwrap_err(),
        AppendError::Failed
    );
    let (next, _opened) = open(dir.path());
    next.close().await.unwrap();
    clone.close().await.unwrap();
}

#[tokio::test]
async fn inv_05_a_claim_costs_the_same_beside_5000() {
    let counts = |live: u16| async move {
        let dir = tempfile::tempdir().unwrap();
        let (journal, _opened) = Journal::open(Options {
            segment_bytes: 16 << 20,
            ..options(dir.path())
        })
        .unwrap();
        for n in 0..live {
            append(&journal, &life(n));
        }
        let (synced, counts) = traced(async {
            let written = journal.append(Some(id(0)), &samples::claimed(9)).unwrap();
            journal.synced(written).await
        })
        .await;
        drop(synced.unwrap());
        [
            Kind::JournalRecords,
            Kind::JournalBytes,
            Kind::Writes,
            Kind::Syncs,
        ]
        .map(|kind| counts.get(kind))
    };
    let one = counts(1).await;
    assert_eq!((one[0], one[2], one[3]), (1, 1, 1));
    assert!((300..700).contains(&one[1]), "{} bytes", one[1]);
    assert_eq!(counts(5000).await, one);
}

#[tokio::test]
async fn an_unsynced_claim_makes_no_sync() {
    let dir = tempfile::tempdir().unwrap();
    for (sync, syncs) in [(SyncMode::Auto, 0), (SyncMode::Always, 1)] {
        let (journal, _opened) = Journal::open(Options {
            sync,
            ..options(dir.path())
        })
        .unwrap();
        let (settled, counts) = traced(async {
            let written = journal.append(None, &samples::boot()).unwrap();
            journal.settle(written).await
        })
        .await;
        drop(settled.unwrap());
        assert_eq!((counts.get(Kind::Writes), counts.get(Kind::Syncs)), (1, syncs));
        journal.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_at_once_have_one_order() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _opened) = open(dir.path());
    let journal = Arc::new(journal);
    let threads: Vec<_> = (0..8_u16)
        .map(|n| {
            let journal = journal.clone();
            tasks::blocking("append", move || -> Vec<u64> {
                (0..100)
                    .map(|m| {
                        journal
                            .append(Some(id(n * 100 + m)), &samples::making(m))
                            .unwrap()
                            .seq()
                    })
                    .collect()
            })
        })
        .collect();
    let mut seqs = BTreeSet::new();
    for thread in threads {
        let mine = thread.await.unwrap();
        assert!(mine.is_sorted());
        seqs.extend(mine);
    }
    assert_eq!(seqs, (1..=800).collect());
    let written = journal.append(None, &samples::boot()).unwrap();
    let waits: Vec<_> = (0..20)
        .map(|_| {
            let journal = journal.clone();
            tasks::spawn("sync", async move {
                let written = journal.append(None, &samples::boot()).unwrap();
                journal.synced(written).await.unwrap().seq()
            })
        })
        .collect();
    assert_eq!(journal.synced(written).await.unwrap().seq(), 801);
    for wait in waits {
        assert!(wait.await.unwrap() > 801);
    }
    drop(journal);
    let (journal, opened) = open(dir.path());
    assert_eq!((opened.state.sandboxes.len(), opened.damage), (800, vec![]));
    journal.close().await.unwrap();
}

#[tokio::test]
async fn inv_06_poison_refuses_changes_ends_work() {
    for what in ["write", "sync"] {
        let dir = tempfile::tempdir().unwrap();
        let (journal, _opened) = open(dir.path());
        append(&journal, &life(1));
        let kept = journal.append(None, &samples::boot()).unwrap();
        drop(journal.synced(kept).await.unwrap());
        let health = journal.health();
        assert_eq!(*health.borrow(), Health::Ok);
        // A file that takes no write, and one that takes it and cannot be synced.
        let spoilt = match what {
            "write" => fs::File::open(dir.path().join("lock")).unwrap(),
            _ => fs::File::options().write(true).open("/dev/null").unwrap(),
        };
        journal.inner.tail.replace_file(spoilt);
        let first = journal.append(Some(id(1)), &samples::renewed());
        match first {
            Ok(written) => assert_eq!(
                journal.synced(written).await.unwrap_err(),
                AppendError::Failed,
                "{what}"
            ),
            Err(error) => assert_eq!((error, what), (AppendError::Failed, "write")),
        }
        assert_eq!(*health.borrow(), Health::Failed);
        // Final: a good file does not bring it back, and endings hear it too and go on without their record.
        for transition in [samples::renewed(), samples::ending(), Transition::Gone] {
            assert_eq!(
                journal.append(Some(id(1)), &transition).unwrap_err(),
                AppendError::Failed
            );
        }
        assert_eq!(journal.close().await.is_err(), what == "sync");
        let (journal, opened) = open(dir.path());
        let row = &opened.state.sandboxes[&id(1)];
        assert_eq!(
            (row.state, row.claim.as_ref().unwrap().lease_secs),
            (RowState::Claimed, 60)
        );
        append(&journal, &vec![(Some(id(1)), samples::renewed())]);
        journal.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_record_that_is_too_long_harms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _opened) = open(dir.path());
    let why = "x".repeat(70_000);
    let refused = journal
        .append(Some(id(1)), &Transition::Ending { why })
        .unwrap_err();
    assert!(matches!(refused, AppendError::TooLong { bytes } if bytes > 70_000));
    append(&journal, &life(1));
    journal.close().await.unwrap();
}

#[tokio::test]
async fn the_gone_are_forgotten_after_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::manual(Tick::from_nanos(1), WallTime::from_micros(1));
    let options = Options {
        clock: clock.clone(),
        ..options(dir.path())
    };
    let (journal, _opened) = Journal::open(options.clone()).unwrap();
    for n in 0..3 {
        append(&journal, &life(n));
        append(&journal, &vec![(Some(id(n)), Transition::Gone)]);
    }
    journal.close().await.unwrap();
    clock.advance(GONE_KEPT);
    let (journal, opened) = Journal::open(options.clone()).unwrap();
    assert_eq!(opened.state.sandboxes.len(), 3);
    append(&journal, &life(9));
    clock.advance(Duration::from_secs(1));
    append(&journal, &vec![(Some(id(9)), Transition::Gone)]);
    journal.close().await.unwrap();
    let report = crate::journal::check(dir.path()).unwrap();
    assert_eq!(
        report.sandboxes.values().sum::<usize>(),
        1,
        "the store forgot them too"
    );
    let (journal, opened) = Journal::open(options).unwrap();
    assert_eq!(opened.state.sandboxes.keys().collect::<Vec<_>>(), [&id(9)]);
    journal.close().await.unwrap();
}

#[test]
fn the_newest_of_the_gone_are_kept() {
    let many = u16::try_from(GONE_MAX).unwrap() + 10;
    let mut state = State::default();
    let mut seq = 0;
    let mut take = |n: u16, transition: Transition| {
        seq += 1;
        let at = WallTime::from_micros(u64::from(n));
        let sandbox = Some(id(n));
        fold(
            &mut state,
            &Record {
                seq,
                at,
                sandbox,
                transition,
                unknown: Unknown::new(),
            },
        );
    };
    take(0, samples::making(0));
    for n in 1..=many {
        take(n, samples::making(n));
        take(n, Transition::Gone);
    }
    state.prune(WallTime::from_micros(u64::from(many)));
    assert_eq!(state.sandboxes.len(), GONE_MAX + 1);
    assert!(state.sandboxes.contains_key(&id(0)) && state.sandboxes.contains_key(&id(many)));
    assert!(!state.sandboxes.contains_key(&id(10)) && state.sandboxes.contains_key(&id(11)));
}

#[tokio::test]
async fn a_long_history_replays_to_its_living() {
    let dir = tempfile::tempdir().unwrap();
    let clock = super::clock();
    let lives = (0..1000_u16).flat_map(|n| {
        let mut life = life(n);
        if n % 50 != 0 {
            life.push((Some(id(n)), samples::ending()));
            life.push((Some(id(n)), Transition::Gone));
        }
        life
    });
    let records = history::write(dir.path(), &clock, lives).unwrap();
    let (state, replayed) = history::fold_all(dir.path()).unwrap();
    assert_eq!((replayed, state.sandboxes.len()), (records, 1000));
    let (journal, opened) = Journal::open(Options {
        segment_bytes: 16 << 20,
        ..options(dir.path())
    })
    .unwrap();
    assert_eq!(opened.replayed, records);
    let living = opened
        .state
        .sandboxes
        .values()
        .filter(|row| row.state == RowState::Claimed)
        .count();
    assert_eq!((living, opened.state.sandboxes.len()), (20, 1000));
    journal.close().await.unwrap();
}

/// Folding is nobody's answer: where processors are few, claims go first.
#[tokio::test]
async fn the_keeper_steps_back_for_those_who_serve() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _opened) = open(dir.path());
    append(&journal, &life(1));
    journal.folded().await.unwrap();
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let keepers = tasks.filter_map(|task| {
        let stat = fs::read_to_string(task.unwrap().path().join("stat")).ok()?;
        let (name, rest) = stat.rsplit_once(") ")?;
        // Behind the name: state, then numbers; nice is the 19th field of all.
        name.ends_with("(journal-keeper")
            .then(|| rest.split(' ').nth(16).unwrap().to_owned())
    });
    assert_eq!(keepers.collect::<Vec<_>>(), ["10"]);
}
