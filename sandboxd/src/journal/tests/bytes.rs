//! What the bytes of a log may turn into.

use std::path::Path;

use super::{
    Log, clock, files, folded, open, options,
    samples::{self, id},
    segment, write,
};
use crate::journal::{
    Filter, Journal, Line, OpenError, RowState, SandboxRow, State, Transition, cat, check,
    record::encode,
    replay::{Replay, replay},
    segment::{HEADER, frame, header},
};

/// Three sandboxes in different places, and a pool.
fn log() -> Log {
    vec![
        (None, samples::boot()),
        (Some(id(1)), samples::making(1)),
        (None, samples::pool_applied(2)),
        (Some(id(2)), samples::making(2)),
        (Some(id(1)), samples::warmed()),
        (Some(id(2)), samples::warmed()),
        (Some(id(3)), samples::making(3)),
        (Some(id(1)), samples::claimed(1)),
        (Some(id(3)), samples::warmed()),
        (Some(id(3)), samples::claimed(3)),
        (Some(id(1)), samples::renewed()),
        (Some(id(3)), samples::ending()),
        (Some(id(2)), samples::claimed(2)),
    ]
}

fn read(dir: &Path, bytes: &[u8]) -> Replay {
    write(dir, 1, bytes);
    replay(&dir.join("journal"), State::default(), 0).unwrap()
}

#[test]
fn inv_07_every_cut() {
    let dir = tempfile::tempdir().unwrap();
    let log = log();
    let (bytes, ends) = segment(1, &log);
    let states: Vec<State> = (0..=log.len()).map(|whole| folded(&log[..whole])).collect();
    // Every byte of header and first record, of the last three, and of what is behind; else around the borders.
    let (early, late) = (ends[0], ends[ends.len() - 4]);
    let near = |cut: usize| ends.iter().any(|end| end.abs_diff(cut) < 3);
    for cut in (0..ends[ends.len() - 1] + 4).filter(|cut| *cut < early || *cut > late || near(*cut)) {
        let whole = ends.iter().filter(|end| **end <= cut).count();
        let expected = &states[whole];
        let clean = cut == 0 || cut == HEADER || ends.contains(&cut) || cut > ends[ends.len() - 1];
        let mut zeroed = bytes.clone();
        zeroed[cut..].fill(0);
        for (how, bytes) in [("cut", &bytes[..cut]), ("zeroed", &zeroed[..])] {
            let found = read(dir.path(), bytes);
            assert_eq!(&found.state, expected, "{how} at {cut}");
            assert_eq!(found.damage, [], "{how} at {cut}");
            assert!(found.suspects.is_empty(), "{how} at {cut}");
            // The header's last bytes are zeros, so a cut in them is none.
            let header = cut > 0 && cut < HEADER;
            if clean || !header {
                assert_eq!(found.torn.is_none(), clean, "{how} at {cut}");
            }
            assert_eq!(found.last_seq, u64::try_from(whole).unwrap());
        }
    }
}

#[test]
fn a_flipped_byte_costs_its_sandbox_only() {
    let dir = tempfile::tempdir().unwrap();
    let log = log();
    let (bytes, ends) = segment(1, &log);
    let whole = folded(&log);
    for place in HEADER..ends[ends.len() - 1] {
        let hit = ends.iter().filter(|end| **end <= place).count();
        let (sandbox, transition) = &log[hit];
        let from = if hit == 0 { HEADER } else { ends[hit - 1] };
        {
            let flip = [0x01, 0x80, 0xff][place % 3];
            let mut bytes = bytes.clone();
            bytes[place] ^= flip;
            let found = read(dir.path(), &bytes);
            let told = &found.damage[0];
            assert!(
                told.lost && told.offset == u64::try_from(from).unwrap(),
                "{place}: {told:?}"
            );
            assert_eq!(found.torn, None, "{place}");
            assert_eq!(found.last_seq, u64::try_from(log.len()).unwrap(), "{place}");
            let suspects: Vec<_> = found.suspects.iter().map(|(id, _why)| *id).collect();
            let begins = matches!(transition, Transition::Making { .. });
            if let Some(victim) = sandbox.filter(|_id| !begins) {
                assert_eq!(suspects, [victim], "{place} {flip:x}: {transition:?}");
            }
            for (id, row) in &whole.sandboxes {
                if Some(*id) == *sandbox {
                    continue;
                }
                // A boot that is lost is missing in the rows after it, and nothing else.
                let read = SandboxRow {
                    boot_id: row.boot_id.clone(),
                    ..found.state.sandboxes[id].clone()
                };
                assert_eq!(&read, row, "{place}");
                // Only what nobody was given may be held back on suspicion.
                assert!(!suspects.contains(id) || row.claim.is_none(), "{place}");
            }
        }
    }
}

#[test]
fn a_damaged_record_that_names_nobody_holds_back_what_looks_unclaimed() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = log();
    log.push((Some(id(4)), samples::making(4)));
    log.truncate(12);
    let (mut bytes, ends) = segment(1, &log);
    let (from, to) = (ends[9], ends[10]);
    bytes[from..to].fill(0x55);
    let found = read(dir.path(), &bytes);
    let suspects: Vec<_> = found.suspects.iter().map(|(id, _why)| *id).collect();
    // 1 and 3 are claimed in good records; 2 is warm, and the lost record may have been its claim.
    assert_eq!(suspects, [id(2)]);
    assert_eq!(found.damage.len(), 1);
    assert_eq!(found.damage[0].sandbox, None);
}

#[test]
fn zeros_at_the_end_are_a_torn_tail() {
    let dir = tempfile::tempdir().unwrap();
    let log = log();
    let (bytes, ends) = segment(1, &log);
    let end = ends[ends.len() - 1];
    for zeros in [22, 4096.min(end)] {
        let mut bytes = bytes.clone();
        bytes[end - zeros..].fill(0);
        let whole = ends.iter().filter(|at| **at <= end - zeros).count();
        let found = read(dir.path(), &bytes);
        assert_eq!((found.state, found.damage), (folded(&log[..whole]), vec![]));
    }
    for bytes in [&b""[..], b"null", &[0; 3], &[0; 5000], b"\n"] {
        let found = read(dir.path(), bytes);
        assert_eq!(
            (found.state, found.damage),
            (State::default(), vec![]),
            "{bytes:?}"
        );
    }
}

#[test]
fn rubbish_is_not_taken_for_empty() {
    let dir = tempfile::tempdir().unwrap();
    let found = read(dir.path(), &[0xa5; 9000]);
    assert!(found.damage[0].lost);
    let (mut bytes, _ends) = segment(1, &log());
    bytes[HEADER..].fill(0x5a);
    assert!(read(dir.path(), &bytes).damage.iter().any(|damage| damage.lost));
}

#[test]
fn doubled_and_swapped_records_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let log = log();
    let (bytes, ends) = segment(1, &log);
    let record = |n: usize| bytes[ends[n - 1]..ends[n]].to_vec();
    let around = |from: usize, middle: Vec<u8>, to: usize| {
        [&bytes[..ends[from - 1]], &middle, &bytes[ends[to]..]].concat()
    };
    for n in 1..log.len() {
        let found = read(dir.path(), &around(n, [record(n), record(n)].concat(), n));
        assert_eq!(found.state, folded(&log), "{n} doubled");
        assert!(
            found.damage.len() == 1 && !found.damage[0].lost,
            "{:?}",
            found.damage
        );
    }
    for n in 1..log.len() - 1 {
        let found = read(dir.path(), &around(n, [record(n + 1), record(n)].concat(), n + 1));
        assert_eq!(found.state, folded(&log), "{n} swapped");
        assert!(
            found.damage.len() == 1 && !found.damage[0].lost,
            "{:?}",
            found.damage
        );
        assert!(found.suspects.is_empty());
    }
}

#[test]
fn a_record_that_is_cut_out_is_missed() {
    let dir = tempfile::tempdir().unwrap();
    let log = log();
    let (bytes, ends) = segment(1, &log);
    for n in 1..log.len() - 1 {
        let found = read(dir.path(), &[&bytes[..ends[n - 1]], &bytes[ends[n]..]].concat());
        assert!(
            found.damage.len() == 1 && found.damage[0].lost,
            "{n}: {:?}",
            found.damage
        );
    }
}

#[test]
fn a_log_without_its_beginning_is_no_start() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 3, &segment(40, &log()).0);
    let refused = Journal::open(options(dir.path())).unwrap_err();
    assert!(matches!(refused, OpenError::Damaged { .. }), "{refused}");
    assert_eq!(files(dir.path())[0], "000000000003.seg", "the bytes are kept");
}

#[tokio::test]
async fn damage_is_set_aside_and_told_until_an_operator_removes_it() {
    let dir = tempfile::tempdir().unwrap();
    let log = log();
    let (mut bytes, ends) = segment(1, &log);
    bytes[ends[6] + 40] ^= 0xff;
    write(dir.path(), 1, &bytes);
    let (journal, opened) = open(dir.path());
    assert_eq!((opened.damage.len(), opened.damage[0].sandbox), (1, Some(id(1))));
    assert_eq!(opened.state.sandboxes[&id(1)].state, RowState::Quarantined);
    assert_eq!(opened.state.sandboxes[&id(3)].state, RowState::Ending);
    journal.folded().await.unwrap();
    for _start in 0..2 {
        journal.close().await.unwrap();
        let (again, opened) = open(dir.path());
        assert!(opened.damage.iter().any(|damage| damage.lost), "still told");
        assert_eq!(opened.state.sandboxes[&id(1)].state, RowState::Quarantined);
        assert_eq!(opened.replayed, 0);
        again.close().await.unwrap();
    }
    std::fs::remove_file(dir.path().join("journal/000000000001.damaged")).unwrap();
    let (journal, opened) = open(dir.path());
    assert_eq!(opened.damage, []);
    assert_eq!(opened.state.sandboxes[&id(1)].state, RowState::Quarantined);
    journal.close().await.unwrap();
}

#[tokio::test]
async fn the_number_of_a_lost_last_record_is_used_up() {
    let dir = tempfile::tempdir().unwrap();
    let (mut bytes, ends) = segment(
        1,
        &vec![(None, samples::boot()), (None, samples::pool_applied(2))],
    );
    bytes[ends[0] + 30] ^= 0xff;
    write(dir.path(), 1, &bytes);
    let (journal, opened) = open(dir.path());
    assert!(opened.damage.len() == 1 && opened.damage[0].lost);
    journal.folded().await.unwrap();
    assert_eq!(journal.append(None, &samples::boot()).unwrap().seq(), 3);
    drop(journal);
    std::fs::remove_file(dir.path().join("journal/000000000001.damaged")).unwrap();
    let (journal, opened) = open(dir.path());
    assert_eq!((opened.damage, opened.replayed), (vec![], 1));
    journal.close().await.unwrap();
}

#[tokio::test]
async fn a_newer_version_stops_the_start() {
    let newer = |bytes: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 1, bytes);
        let refused = Journal::open(options(dir.path())).unwrap_err();
        assert!(matches!(refused, OpenError::Newer { .. }), "{refused}");
    };
    let mut bytes = header(1).to_vec();
    frame(1, br#"{"at":1,"do":{"hibernated":{"file":"x"}}}"#, &mut bytes);
    newer(&bytes);
    let mut bytes = header(1).to_vec();
    bytes[8] = 2;
    let sum = crc32c::crc32c(&bytes[..24]).to_le_bytes();
    bytes[24..28].copy_from_slice(&sum);
    newer(&bytes);

    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).0.close().await.unwrap();
    let db = sled_of_a_newer_version(&dir.path().join("store"));
    db.unwrap();
    let refused = Journal::open(options(dir.path())).unwrap_err();
    assert!(matches!(refused, OpenError::Newer { .. }), "{refused}");
}

fn sled_of_a_newer_version(dir: &Path) -> Result<(), crate::journal::store::StoreError> {
    let store = crate::journal::store::Store::open(dir)?;
    store.set_version(2);
    store.close()
}

#[tokio::test]
async fn fields_of_a_newer_version_outlive_the_fold() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = header(1).to_vec();
    for (seq, (sandbox, transition)) in (1..).zip(&log()) {
        let json = String::from_utf8(encode(clock().wall(), *sandbox, transition)).unwrap();
        let json = json
            .replace("\"slot\":", "\"cell\":7,\"slot\":")
            .replace("\"owner\":", "\"team\":\"t\",\"owner\":");
        frame(seq, json.as_bytes(), &mut bytes);
    }
    write(dir.path(), 1, &bytes);
    let (journal, opened) = open(dir.path());
    journal.folded().await.unwrap();
    journal.close().await.unwrap();
    let (journal, again) = open(dir.path());
    assert_eq!((opened.state.clone(), again.replayed), (again.state, 0));
    let row = &opened.state.sandboxes[&id(1)];
    assert_eq!(row.unknown["cell"], 7);
    assert_eq!(row.claim.as_ref().unwrap().unknown["team"], "t");
    journal.close().await.unwrap();
}

#[tokio::test]
async fn cat_reads_beside_a_daemon_and_check_waits_for_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _opened) = open(dir.path());
    for (sandbox, transition) in log() {
        drop(journal.append(sandbox, &transition).unwrap());
    }
    let lines = |sandbox| -> Vec<String> {
        let lines = cat(dir.path(), Filter { sandbox }).unwrap();
        lines.map(|line| line.unwrap().to_string()).collect()
    };
    let all = lines(None);
    assert_eq!(all.len(), log().len());
    assert!(
        all.iter()
            .all(|line| line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()))
    );
    let claim: serde_json::Value = serde_json::from_str(&all[7]).unwrap();
    assert_eq!(
        (&claim["seq"], &claim["do"]["claimed"]["labels"]["job"]),
        (&8.into(), &"\u{202e}x\n".into())
    );
    assert_eq!(lines(Some(id(2))).len(), 3);
    assert!(matches!(check(dir.path()).unwrap_err(), OpenError::Locked { .. }));
    journal.close().await.unwrap();

    let (mut bytes, ends) = segment(14, &log());
    bytes[ends[1] + 60] ^= 1;
    write(dir.path(), 900, &bytes);
    let report = check(dir.path()).unwrap();
    assert_eq!((report.segments, report.last_seq, report.pools), (1, 26, 1));
    assert_eq!(report.sandboxes.values().sum::<usize>(), 3);
    assert_eq!(report.damage.len(), 1);
    let torn = cat(dir.path(), Filter::default())
        .unwrap()
        .filter(|line| matches!(line, Ok(Line::Damaged { .. })));
    assert_eq!(torn.count(), 1);
}
