//! The daemon dies at each step of each transition of a sandbox, a pool and the journal.

use std::{os::unix::fs::MetadataExt as _, path::Path};

use harness::{Daemon, Setup, process::sandboxes, within};

use crate::model::{
    Kind::{Env, Plain, Short},
    Model, Step,
    Step::{Apply, Claim, Delete, Release, Renew, Stocked},
};

/// Of a whole test: far more than it needs.
pub(crate) const LIMIT: std::time::Duration = std::time::Duration::from_secs(240);

/// Dies of each failpoint in turn while it does the steps, on one state directory; after each death the next daemon is
/// compared with the model.
async fn die_of(points: &[(&str, &[Step])]) {
    within(LIMIT, Box::pin(die_of_each(points))).await;
}

async fn die_of_each(points: &[(&str, &[Step])]) {
    let mut daemon = Setup::dev().warm(2).start().await;
    daemon.until_warm(2).await;
    let mut model = Model::default();
    for (point, steps) in points {
        daemon.kill9().await;
        daemon.change(|setup| setup.failpoints(point));
        daemon.start_again().await;
        daemon.until_warm(2).await;
        model.round();
        eprintln!("dies of {point}");
        model.run_to_death(&mut daemon, steps).await;
        live_on(&mut daemon, &mut model).await;
    }
    leaves_nothing(daemon).await;
}

/// A clean stop in dev mode ends everything: processes, folders, control groups.
async fn leaves_nothing(mut daemon: Daemon) {
    // A group is named after an inode, which is another's as soon as ours is gone; its own number comes once.
    let number = |group: &Path| std::fs::metadata(group).map(|group| group.ino()).ok();
    let groups: Vec<_> = sandboxes(&daemon.dir())
        .into_iter()
        .filter_map(|(_process, group)| group)
        .filter_map(|group| Some((number(&group)?, group)))
        .collect();
    daemon.stop().await;
    assert_eq!(daemon.slot_dirs(), Vec::<String>::new());
    assert_eq!(daemon.sandbox_processes(), []);
    for (own, group) in groups {
        assert_ne!(number(&group), Some(own), "{} is left", group.display());
    }
}

/// Starts it without failpoints, compares, and ends what the round left.
pub(crate) async fn live_on(daemon: &mut Daemon, model: &mut Model) {
    daemon.change(|setup| setup.failpoints(""));
    daemon.start_again().await;
    model.holds(daemon).await;
    model.settle(daemon).await;
}

#[tokio::test]
async fn inv_02_killed_at_every_step_of_a_claim() {
    const PLAIN: &[Step] = &[Claim("a", Plain), Claim("b", Plain)];
    const ENV: &[Step] = &[Claim("a", Env)];
    die_of(&[
        ("claim.taken=kill@1", PLAIN),
        ("claim.recorded=kill@1", PLAIN),
        ("claim.recorded=kill@2", PLAIN),
        ("claim.before_reply=kill@1", PLAIN),
        ("claim.recorded=kill@1", ENV),
        ("claim.told_guest=kill@1", ENV),
    ])
    .await;
}

#[tokio::test]
async fn inv_02_killed_at_every_step_of_an_end() {
    const RELEASE: &[Step] = &[Claim("a", Plain), Claim("b", Plain), Release("a")];
    const RENEW: &[Step] = &[Claim("a", Plain), Renew("a")];
    const LAPSE: &[Step] = &[Claim("a", Short)];
    die_of(&[
        ("sandbox.end_recorded=kill@1", RELEASE),
        ("sandbox.before_kill=kill@1", RELEASE),
        ("sandbox.after_kill=kill@1", RELEASE),
        ("sandbox.gone=kill@1", RELEASE),
        ("sandbox.renewed=kill@1", RENEW),
        ("sandbox.lease_due=kill@1", LAPSE),
        ("sandbox.end_recorded=kill@1", LAPSE),
    ])
    .await;
}

/// A claim takes one from the stock, and refill makes another: it dies in that.
#[tokio::test]
async fn inv_04_kill_in_refill_leaks_nothing() {
    const STEPS: &[Step] = &[Claim("a", Plain)];
    die_of(&[
        ("sandbox.making_recorded=kill@1", STEPS),
        ("sandbox.started=kill@1", STEPS),
        ("sandbox.linked=kill@1", STEPS),
        ("sandbox.renewed_guest=kill@1", STEPS),
        ("sandbox.warmed=kill@1", STEPS),
    ])
    .await;
}

#[tokio::test]
async fn c15_killed_at_every_step_of_a_pool() {
    const APPLY: &[Step] = &[Apply("p")];
    const DELETE: &[Step] = &[Apply("p"), Stocked("p"), Delete("p")];
    die_of(&[
        ("pool.applied=kill@1", APPLY),
        ("pool.deleted=kill@1", DELETE),
        ("pool.stock_ended=kill@1", DELETE),
    ])
    .await;
}

const ALL: &[Step] = &[
    Claim("a", Plain),
    Release("a"),
    Claim("b", Env),
    Renew("b"),
    Apply("p"),
    Stocked("p"),
    Delete("p"),
    Claim("c", Plain),
];

/// Whatever the record, it dies right before it is written. The first one is the start's own.
#[tokio::test]
async fn inv_02_killed_before_each_record() {
    die_of(&[
        ("journal.before_append=kill@2", ALL),
        ("journal.before_append=kill@3", ALL),
        ("journal.before_append=kill@4", ALL),
        ("journal.before_append=kill@6", ALL),
        ("journal.before_append=kill@8", ALL),
        ("journal.before_append=kill@10", ALL),
    ])
    .await;
}

/// Whatever the record, it dies right after it is written.
#[tokio::test]
async fn inv_02_killed_after_each_record() {
    die_of(&[
        ("journal.after_append=kill@2", ALL),
        ("journal.after_append=kill@3", ALL),
        ("journal.after_append=kill@5", ALL),
        ("journal.after_append=kill@7", ALL),
        ("journal.after_append=kill@9", ALL),
        ("journal.after_append=kill@11", ALL),
    ])
    .await;
}
