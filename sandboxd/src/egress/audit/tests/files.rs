use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandbox_protocol::{
    door::DoorReason,
    id::{ClaimId, SandboxId},
};
use serde_json::Value;

use super::{
    super::{
        chain::{self, seal},
        entry::{self, After, Entry, body},
        ledger::{self, Ledger},
        *,
    },
    START, clock, put, values,
};
use crate::{
    clock::WallTime,
    egress::{DoorKind, Way},
    journal::{HeadRow, Heads},
};

fn note(count: u64) -> Entry {
    let at = WallTime::from_micros(START + count);
    Entry::LaneLockLost { at, count }
}

/// Lines with these numbers, all of which the ledger takes.
fn write(ledger: &mut Ledger, numbers: std::ops::RangeInclusive<u64>) {
    let mut items: VecDeque<_> = numbers.map(|seq| (seq, note(seq))).collect();
    while !items.is_empty() {
        ledger.append(&mut items).unwrap();
    }
}

fn heads(head: Head) -> Heads {
    Heads {
        audit: Some(HeadRow {
            seq: head.seq,
            hash: head.hash.to_string(),
        }),
        usage: None,
    }
}

/// The chain `audit` of a state directory.
fn judged(dir: &Path, heads: &Heads) -> Chain {
    let mut chains = verify(dir, heads).unwrap();
    chains.retain(|chain| chain.name == AUDIT);
    chains.pop().unwrap()
}

fn wrongs(chain: &Chain) -> Vec<(&str, Option<u64>)> {
    let told = chain.findings.iter();
    told.map(|finding| (finding.fault.as_str(), finding.seq))
        .collect()
}

/// A chain of four files with fifty lines, and its head.
fn four_files(dir: &Path) -> (Vec<PathBuf>, Head) {
    let clock = clock();
    let (mut ledger, found) = Ledger::open(dir.join(AUDIT), AUDIT, None, 0, clock.clone());
    assert_eq!(found.after, After::New);
    ledger.turn_over_at(2_000);
    for seq in 1..=50 {
        write(&mut ledger, seq..=seq);
        // Names have seconds.
        clock.advance(Duration::from_secs(1));
    }
    ledger.sync().unwrap();
    let files = ledger::files(&dir.join(AUDIT), AUDIT).unwrap();
    assert!((4..=12).contains(&files.len()), "{files:?}");
    (files, ledger.synced())
}

/// Changes the lines of a file.
fn change(path: &Path, change: impl FnOnce(&mut Vec<String>)) {
    let text = fs::read_to_string(path).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    change(&mut lines);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    put(path, text.as_bytes());
}

fn number(line: &str) -> u64 {
    serde_json::from_str::<Value>(line).unwrap()["seq"]
        .as_u64()
        .unwrap()
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
fn audit_chain_and_torn_tail() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let (files, head) = four_files(dir);
    let known = heads(head);
    let sound = judged(dir, &known);
    assert_eq!(
        (sound.faults, sound.lines, sound.numbers),
        (0, 50 + files.len() as u64, (1, 50))
    );
    assert_eq!(sound.known, Some(50));

    let middle = &files[1];
    let whole: BTreeMap<&PathBuf, Vec<u8>> =
        files.iter().map(|path| (path, fs::read(path).unwrap())).collect();
    let restore = || whole.iter().for_each(|(path, bytes)| put(path, bytes));
    let third = number(fs::read_to_string(middle).unwrap().lines().nth(2).unwrap());
    let mut cases = 0;
    let mut expect = |what: &str, change_it: &dyn Fn(), expected: &[(&str, Option<u64>)]| {
        change_it();
        let chain = judged(dir, &known);
        assert_eq!(wrongs(&chain), expected, "{what}");
        assert_eq!(chain.faults, expected.len() as u64, "{what}");
        restore();
        cases += 1;
    };

    let edit = |lines: &mut Vec<String>| lines[2] = lines[2].replace("lane_lock", "lane_look");
    expect("edited", &|| change(middle, edit), &[("edited", Some(third))]);
    let remove = |lines: &mut Vec<String>| drop(lines.remove(2));
    expect(
        "removed",
        &|| change(middle, remove),
        &[("removed", Some(third + 1))],
    );
    let swap = |lines: &mut Vec<String>| lines.swap(2, 3);
    expect("swapped", &|| change(middle, swap), &[("reordered", Some(third))]);
    let twice = |lines: &mut Vec<String>| lines.insert(3, lines[2].clone());
    expect(
        "repeated",
        &|| change(middle, twice),
        &[("reordered", Some(third))],
    );
    let rubbish = |lines: &mut Vec<String>| lines.insert(3, "{}".into());
    expect("rubbish", &|| change(middle, rubbish), &[("unreadable", None)]);
    let before = number(fs::read_to_string(&files[2]).unwrap().lines().next().unwrap());
    let gone = || fs::remove_file(middle).unwrap();
    expect("a file removed", &gone, &[("removed", Some(before))]);
    let cut = |lines: &mut Vec<String>| drop(lines.pop());
    let last = files.last().unwrap();
    expect("cut tail", &|| change(last, cut), &[("cut tail", None)]);
    let gone = || fs::remove_file(last).unwrap();
    expect("the last file removed", &gone, &[("cut tail", None)]);
    // Who makes all later hashes anew is betrayed by the journal alone.
    let forge = || {
        let mut chained = Hash::default();
        for path in &files {
            let mut out = Vec::new();
            for line in fs::read_to_string(path).unwrap().lines() {
                let read = chain::read(line.as_bytes()).unwrap();
                let mut text = Vec::new();
                if read.is_numbered() {
                    body(
                        read.seq,
                        &note(read.seq + u64::from(read.seq == third)),
                        WallTime::default(),
                        &mut text,
                    );
                } else {
                    let at = WallTime::from_micros(START);
                    entry::open(
                        Head {
                            seq: read.seq,
                            hash: chained,
                        },
                        chained,
                        at,
                        &mut text,
                    );
                }
                chained = seal(chained, &text, &mut out);
            }
            put(path, &out);
        }
    };
    expect("forged", &forge, &[("rewritten", Some(50))]);
    forge();
    assert_eq!(
        judged(dir, &Heads::default()).faults,
        0,
        "without the journal nothing shows"
    );
    restore();
    assert_eq!(cases, 9);

    // Any cut of the last lines is taken up: what was torn is cut off, which the chain says.
    let bytes = fs::read(last).unwrap();
    let lines: Vec<usize> = bytes
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(at, _)| at)
        .collect();
    let from = lines[lines.len() - 3] + 1;
    for end in from..=bytes.len() {
        put(last, &bytes[..end]);
        let is_whole = bytes[..end].ends_with(b"\n");
        let chain = judged(dir, &Heads::default());
        assert_eq!((chain.faults, chain.torn > 0), (0, !is_whole), "cut at {end}");
        let (mut ledger, found) = Ledger::open(dir.join(AUDIT), AUDIT, None, 0, clock());
        assert_eq!(
            (found.after, found.torn > 0),
            (After::Cut, !is_whole),
            "cut at {end}"
        );
        let at = WallTime::from_micros(START);
        let start = Entry::Start {
            at,
            after: found.after,
            torn: found.torn,
        };
        let next = ledger.head().seq + 1;
        ledger.append(&mut VecDeque::from([(next, start)])).unwrap();
        let chain = judged(dir, &Heads::default());
        assert_eq!(
            (chain.faults, chain.torn, chain.unclean),
            (0, 0, 1),
            "cut at {end}: {chain:?}"
        );
        let noted = values(dir, AUDIT).pop().unwrap();
        let torn = (found.torn > 0).then_some(found.torn);
        assert_eq!(
            (noted["after"].as_str(), noted["torn"].as_u64()),
            (Some("cut"), torn)
        );
    }
    // A tail of zeros, as a power loss leaves it, is torn too.
    put(last, &[&bytes[..], &[0; 3_000]].concat());
    let (mut ledger, found) = Ledger::open(dir.join(AUDIT), AUDIT, None, 0, clock());
    assert_eq!((found.torn, ledger.head()), (3_000, head));
    write(&mut ledger, 51..=51);
    assert_eq!(judged(dir, &known).faults, 0);
}

/// One bit of any byte is enough, and a file cut anywhere ends in an unfinished line at most.
#[test]
fn every_byte_of_a_file_counts() {
    let home = tempfile::tempdir().unwrap();
    let (mut ledger, _) = Ledger::open(home.path().join(AUDIT), AUDIT, None, 0, clock());
    write(&mut ledger, 1..=3);
    ledger
        .append(&mut VecDeque::from([(9, Entry::Lost { from: 4 })]))
        .unwrap();
    write(&mut ledger, 10..=11);
    let path = ledger::files(&home.path().join(AUDIT), AUDIT).unwrap().remove(0);
    let bytes = fs::read(path).unwrap();
    let sound = check(&bytes).unwrap();
    assert_eq!(
        (sound.faults, sound.numbers, sound.lost),
        (0, (1, 11), 6),
        "{sound:?}"
    );
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut other = bytes.clone();
            other[at] ^= 1 << bit;
            let found = check(&other).unwrap();
            assert!(
                found.faults > 0 || at + 1 == bytes.len() && found.torn > 0,
                "{at}: {found:?}"
            );
        }
        let cut = check(&bytes[..at]).unwrap();
        let is_whole = at == 0 || bytes[at - 1] == b'\n';
        assert_eq!((cut.faults, cut.torn > 0), (0, !is_whole), "{at}: {cut:?}");
    }
}

#[test]
fn a_file_is_turned_over_by_size_and_by_day_and_never_taken_twice() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let clock = clock();
    let open = |known| Ledger::open(dir.join(AUDIT), AUDIT, known, 0, clock.clone());
    let count = || ledger::files(&dir.join(AUDIT), AUDIT).unwrap().len();
    let (mut ledger, _) = open(None);
    write(&mut ledger, 1..=3);
    clock.advance(Duration::from_secs(24 * 3600 - 1));
    write(&mut ledger, 4..=4);
    assert_eq!(count(), 1);
    clock.advance(Duration::from_secs(1));
    write(&mut ledger, 5..=5);
    assert_eq!(count(), 2, "a day");
    // The next daemon goes on with the file of the last.
    drop(ledger);
    let (mut ledger, found) = open(None);
    assert_eq!((found.after, found.torn, ledger.head().seq), (After::Cut, 0, 5));
    write(&mut ledger, 6..=6);
    assert_eq!(count(), 2);
    // A file that somebody deletes is followed by one that says what it follows.
    let files = ledger::files(&dir.join(AUDIT), AUDIT).unwrap();
    fs::remove_file(&files[1]).unwrap();
    clock.advance(Duration::from_secs(1));
    write(&mut ledger, 7..=7);
    let chain = judged(dir, &Heads::default());
    assert_eq!(wrongs(&chain), [("removed", Some(6))]);
    // Older files may go: the chain then begins later.
    fs::remove_file(&files[0]).unwrap();
    let chain = judged(dir, &heads(ledger.head()));
    assert_eq!((chain.faults, chain.numbers), (0, (7, 7)));
    // All files gone is no new beginning where the journal knows better.
    let known = ledger.head();
    drop(ledger);
    fs::remove_dir_all(dir.join(AUDIT)).unwrap();
    assert_eq!(wrongs(&judged(dir, &heads(known))), [("cut tail", None)]);
    let (mut ledger, found) = open(Some(known));
    assert_eq!((found.after, ledger.head()), (After::Cut, known));
    write(&mut ledger, 8..=8);
    assert_eq!(judged(dir, &heads(known)).faults, 0);
}

/// The longest line is read again.
#[test]
fn the_longest_fields_fit() {
    let decided = crate::egress::Decided {
        seq: 1,
        audit_seq: 1,
        at: WallTime::from_micros(START),
        sandbox: SandboxId::from_random([255; 16]),
        claim: Some(ClaimId::from_random([255; 16])),
        tenant: "t".repeat(63).into(),
        pool: Some("p".repeat(32).parse().unwrap()),
        door: DoorKind::Socks5,
        lane: crate::words::Lane::Guarded,
        target: "\\u{10ffff}".repeat(256),
        method: "\\u{10ffff}".repeat(256),
        path: "\\u{10ffff}".repeat(256),
        outcome: crate::egress::Outcome::Denied(DoorReason::BadTarget),
        side: None,
        rule: Some("\"".repeat(128)),
        message: None,
        would_deny: false,
        secret: Some("s".repeat(63)),
        way: Way::default(),
    };
    let (mut text, mut out) = (Vec::new(), Vec::new());
    body(
        1,
        &Entry::Decision(Arc::new(decided)),
        WallTime::default(),
        &mut text,
    );
    seal(Hash::default(), &text, &mut out);
    assert!(out.len() < chain::LINE / 2, "{}", out.len());
    assert_eq!(chain::read(out.strip_suffix(b"\n").unwrap()).unwrap().seq, 1);
}
