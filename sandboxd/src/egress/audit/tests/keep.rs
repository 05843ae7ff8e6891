//! Files that outlive what is kept, and the chain without them.

use std::{path::Path, time::Duration};

use super::{
    super::{
        super::audit::{Audit, Chain, Options, QUEUE, verify},
        AUDIT, ledger,
    },
    clock,
    doors::until,
    of_kind, options, values,
};
use crate::{
    clock::Clock,
    journal::Heads,
    policy::{Keep, Retention},
};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn retention(days: u32) -> Retention {
    let audit = Keep {
        time: DAY * days,
        size: u64::MAX,
    };
    Retention {
        audit,
        usage: Keep::ALL,
    }
}

fn open(dir: &Path, clock: &Clock) -> Audit {
    let options = Options {
        clock: clock.clone(),
        ..options(dir, QUEUE)
    };
    Audit::open(options).unwrap()
}

/// The first, whose file is begun.
async fn begun(dir: &Path, clock: &Clock) -> Audit {
    let audit = open(dir, clock);
    until(|| !of_kind(&values(dir, AUDIT), "start").is_empty()).await;
    audit
}

fn files(dir: &Path) -> usize {
    ledger::files(&dir.join(AUDIT), AUDIT).unwrap().len()
}

fn audit_of(dir: &Path) -> Chain {
    verify(dir, &Heads::default()).unwrap().remove(0)
}

/// A day with a line, in a file of its own.
async fn day(audit: &Audit, dir: &Path, clock: &Clock, count: u64) {
    clock.advance(DAY);
    audit.lane_lock_lost(count);
    until(|| {
        let lines = values(dir, AUDIT);
        of_kind(&lines, "lane_lock_lost")
            .last()
            .is_some_and(|line| line["count"] == count)
    })
    .await;
}

#[tokio::test]
async fn files_that_outlive_what_is_kept_go_and_the_chain_says_so_first() {
    let home = tempfile::tempdir().unwrap();
    let (dir, clock) = (home.path(), clock());
    let audit = begun(dir, &clock).await;
    for count in 1..=5 {
        day(&audit, dir, &clock, count).await;
    }
    // Until something else is said, all is kept.
    assert_eq!(files(dir), 6);
    assert!(of_kind(&values(dir, AUDIT), "deleted").is_empty());
    audit.keep(retention(3));
    day(&audit, dir, &clock, 6).await;
    until(|| !of_kind(&values(dir, AUDIT), "deleted").is_empty()).await;
    // A second later the disk has that line, and the files go.
    assert_eq!(files(dir), 7);
    clock.advance(Duration::from_secs(1));
    audit.lane_lock_lost(7);
    until(|| files(dir) == 4).await;
    let lines = values(dir, AUDIT);
    let deleted = of_kind(&lines, "deleted");
    assert_eq!(deleted.len(), 1, "{deleted:?}");
    let told = ["from", "to", "count"].map(|key| deleted[0][key].as_u64().unwrap());
    let first = lines[0]["seq"].as_u64().unwrap() + 1;
    assert_eq!(told, [1, first - 1, 3]);
    // What is left is sound, and says where it begins and why.
    let chain = audit_of(dir);
    assert_eq!(
        (chain.faults, chain.numbers.0, chain.deleted),
        (0, first, first - 1)
    );
    // The next daemon goes on with it.
    audit.stop().await;
    let audit = open(dir, &clock);
    audit.keep(retention(3));
    day(&audit, dir, &clock, 8).await;
    audit.stop().await;
    let chain = audit_of(dir);
    assert!(chain.numbers.0 >= first);
    assert_eq!((chain.faults, chain.deleted), (0, chain.numbers.0 - 1));
}

/// What the daemon deleted is one thing; what somebody else took away is another.
#[tokio::test]
async fn a_beginning_that_no_line_tells_of_shows() {
    let home = tempfile::tempdir().unwrap();
    let (dir, clock) = (home.path(), clock());
    let audit = begun(dir, &clock).await;
    for count in 1..=3 {
        day(&audit, dir, &clock, count).await;
    }
    audit.stop().await;
    let gone = ledger::files(&dir.join(AUDIT), AUDIT).unwrap().remove(0);
    std::fs::remove_file(gone).unwrap();
    let chain = audit_of(dir);
    assert_eq!((chain.faults, chain.deleted), (0, 0));
    assert!(chain.numbers.0 > chain.deleted + 1);
}
