//! The daemon dies while it takes up what an earlier one left, and what it must not do meanwhile.

use harness::{Daemon, HANG, Setup, program, within};
use rustix::process::Signal;
use sandbox_sdk::{Reason, v1::State};

use crate::{
    model::{
        Kind::{Env, Plain},
        Model,
        Step::{Apply, Claim, Release, Renew, Stocked},
        host_agrees,
    },
    steps::{LIMIT, live_on},
};

/// Claims, stock and what ends are all there in the end, however often the start dies, and wherever.
#[tokio::test]
async fn c10_killed_again_and_again_in_recovery() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = Setup::dev().warm(2).start().await;
            daemon.until_warm(2).await;
            let mut model = Model::default();
            let steps = [
                Claim("a", Plain),
                Claim("b", Env),
                Claim("c", Plain),
                Renew("a"),
                Apply("p"),
                Stocked("p"),
                Release("c"),
            ];
            model.run(&daemon, &steps).await;
            daemon.kill9().await;
            for point in [
                "recover.boot_recorded=kill@1",
                "recover.greeted=kill@1",
                "recover.greeted=kill@2",
                "recover.greeted=kill@3",
                "recover.warm_put_back=kill@1",
                "recover.warm_put_back=kill@2",
            ] {
                dies(&mut daemon, point).await;
            }
            live_on(&mut daemon, &mut model).await;

            // What was recorded since is folded into the store by the next start.
            for point in ["journal.fold=kill@1", "journal.before_delete=kill@1"] {
                model.round();
                model.run(&daemon, &[Claim("d", Plain)]).await;
                daemon.kill9().await;
                dies(&mut daemon, point).await;
                live_on(&mut daemon, &mut model).await;
            }
        }),
    )
    .await;
}

async fn dies(daemon: &mut Daemon, point: &str) {
    daemon.change(|setup| setup.failpoints(point));
    let status = daemon.start_to_die().await;
    assert!(!status.success(), "{point}: {status}");
}

/// C11: the stock that was there is there: the same sandboxes, not new ones.
#[tokio::test]
async fn c11_warm_stock_is_the_same_after_a_kill() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = Setup::dev().warm(3).start().await;
            daemon.until_warm(3).await;
            let ids = |rows: Vec<sandbox_sdk::v1::Sandbox>| -> Vec<(String, Option<u32>)> {
                rows.into_iter().map(|row| (row.sandbox, row.pid)).collect()
            };
            let before = ids(daemon.rows(&[State::Warm]).await);
            assert_eq!(before.len(), 3);
            daemon.kill9().await;
            daemon.start_again().await;
            daemon.until_warm(3).await;
            assert_eq!(ids(daemon.rows(&[State::Warm]).await), before);

            // One of them dies while nobody looks.
            let lost = before[1].clone();
            daemon.kill9().await;
            let process = daemon.sandbox_processes();
            let process = process
                .into_iter()
                .find(|process| u32::try_from(process.pid).ok() == lost.1);
            let process = process.unwrap();
            process.signal(Signal::KILL);
            process.gone().await;
            daemon.start_again().await;
            daemon.until_warm(3).await;
            let after = ids(daemon.rows(&[State::Warm]).await);
            assert!(!after.contains(&lost));
            assert_eq!(after.iter().filter(|row| before.contains(row)).count(), 2);
            host_agrees(&daemon).await;
        }),
    )
    .await;
}

/// C5: what died meanwhile is told as failed, with its reason, until it is released; the others live.
#[tokio::test]
async fn c05_a_claim_that_died_without_a_daemon_is_told() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = Setup::dev().warm(1).start().await;
            daemon.until_warm(1).await;
            let client = daemon.client().await;
            let dead = client.claim("default").await.unwrap().keep();
            let lives = client.claim("default").await.unwrap().keep();
            let pid = dead_pid(&daemon, dead.id()).await;
            daemon.kill9().await;
            pid.signal(Signal::KILL);
            pid.gone().await;
            daemon.start_again().await;

            let row = daemon.until_state(dead.id(), State::Failed).await;
            assert!(row.why.starts_with("lost_on_restart"), "{}", row.why);
            let refused = dead.exec(["true"]).output().await.unwrap_err();
            assert!(refused.is(Reason::SandboxFailed), "{refused:?}");
            assert!(lives.exec(["true"]).output().await.unwrap().status.success());
            // Told once more after another start, and no longer once it was released.
            daemon.kill9().await;
            daemon.start_again().await;
            daemon.until_state(dead.id(), State::Failed).await;
            dead.release().await.unwrap();
            daemon.until_state(dead.id(), State::Gone).await;
            daemon.until_warm(1).await;
            host_agrees(&daemon).await;
        }),
    )
    .await;
}

async fn dead_pid(daemon: &Daemon, sandbox: &str) -> harness::process::Process {
    let row = daemon.until_state(sandbox, State::Claimed).await;
    let pid = i32::try_from(row.pid.unwrap()).unwrap();
    harness::process::Process::look(pid).unwrap()
}

/// A claimed guest that does not answer holds up neither the others nor the start for long, keeps its slot, and ends
/// without its help.
#[tokio::test]
async fn h05_a_mute_guest_holds_nobody_up() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = Setup::dev().warm(1).start().await;
            daemon.until_warm(1).await;
            let client = daemon.client().await;
            let mute = client.claim("default").await.unwrap().keep();
            let lives = client.claim("default").await.unwrap().keep();
            daemon.until_warm(1).await;
            let process = dead_pid(&daemon, mute.id()).await;
            daemon.kill9().await;
            process.signal(Signal::STOP);
            daemon.start_again().await;
            assert!(lives.exec(["true"]).output().await.unwrap().status.success());
            assert_eq!(mute.get().await.unwrap().state(), State::Claimed);
            mute.release().await.unwrap();
            daemon.until_state(mute.id(), State::Gone).await;
            process.gone().await;
            daemon.until_warm(1).await;
            host_agrees(&daemon).await;
        }),
    )
    .await;
}

/// H4: a second daemon on the same folder is refused, and the first does not notice.
#[tokio::test]
async fn inv_22_a_second_daemon_touches_nothing() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = Setup::dev().warm(2).start().await;
            daemon.until_warm(2).await;
            let mut model = Model::default();
            model.run(&daemon, &[Claim("a", Plain), Claim("b", Env)]).await;
            daemon.until_warm(2).await;
            // By hand: one of the harness would clear the folder up when it is dropped.
            let second = tokio::process::Command::new(program("sandboxd-faults"))
                .args(["serve", "--dev", "--engine", "stub", "--state-dir"])
                .arg(daemon.dir())
                .arg("--stub-silkd")
                .arg(program("silkd-under-test"))
                .kill_on_drop(true)
                .output();
            let refused = within(HANG, second).await.unwrap();
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(
                !refused.status.success() && said.contains("STATE_LOCKED"),
                "{said}"
            );
            model.holds(&daemon).await;
            daemon.kill9().await;
            live_on(&mut daemon, &mut model).await;
        }),
    )
    .await;
}
