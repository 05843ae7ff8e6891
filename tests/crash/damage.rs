//! Journals that were cut, changed or lost while no daemon ran. Others live on; nothing is destroyed on the word of
//! something unreadable.

use std::{fs, path::PathBuf};

use harness::{Daemon, Setup, process::Process, within};
use sandbox_sdk::{
    Reason, SandboxHandle,
    v1::{Lane, PoolKey, State, TemplatesBuildRequest},
};

use crate::{
    model::{host_agrees, key},
    steps::LIMIT,
};

/// Length of a segment's header, and of what stands before a record's JSON.
const HEADER: usize = 32;
const FRAME: usize = 16;

/// The segment that a daemon wrote to last.
struct Segment {
    path: PathBuf,
    bytes: Vec<u8>,
    /// Where each record's frame begins and ends.
    frames: Vec<(usize, usize)>,
}

impl Segment {
    fn last(daemon: &Daemon) -> Self {
        let folder = fs::read_dir(daemon.dir().join("journal")).unwrap();
        let mut paths: Vec<PathBuf> = folder
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "seg"))
            .collect();
        paths.sort();
        let read = |path: PathBuf| (fs::read(&path).unwrap(), path);
        let used = paths.into_iter().rev().map(read);
        let (bytes, path) = used
            .into_iter()
            .find(|(bytes, _)| bytes.iter().take(HEADER).any(|byte| *byte != 0))
            .expect("a segment was written to");
        let (mut frames, mut at) = (Vec::new(), HEADER);
        loop {
            let len = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            if len == 0 {
                break;
            }
            let end = at + FRAME + usize::try_from(len).unwrap();
            frames.push((at, end));
            at = end;
        }
        Self { path, bytes, frames }
    }

    /// The frame of this sandbox's transition.
    fn frame(&self, sandbox: &str, transition: &str) -> (usize, usize) {
        let wanted = |(start, end): &&(usize, usize)| {
            let json = String::from_utf8_lossy(&self.bytes[start + FRAME..*end]).into_owned();
            json.contains(sandbox) && json.contains(&format!("\"{transition}\":"))
        };
        *self.frames.iter().find(wanted).expect("the record is there")
    }

    fn write(&self) {
        fs::write(&self.path, &self.bytes).unwrap();
    }
}

/// A daemon without stock, and with a template that no pool has: nothing is written to its log but what the test does.
async fn daemon() -> Daemon {
    let daemon = Setup::dev().warm(0).start().await;
    let client = daemon.client().await;
    let build = TemplatesBuildRequest {
        name: "poolless".into(),
        image: "busybox".into(),
        lane: Lane::None.into(),
        size: "small".into(),
        ..TemplatesBuildRequest::default()
    };
    let mut build = client.templates().build(build).await.unwrap();
    while let Some(event) = build.next().await {
        drop(event.unwrap());
    }
    daemon
}

/// A claim that is made on demand: its record is the last of the log.
async fn claim(daemon: &Daemon) -> SandboxHandle {
    let client = daemon.client().await;
    let key = PoolKey {
        template: "poolless".into(),
        ..key()
    };
    client.claim_key(key).await.unwrap().keep()
}

async fn works(sandbox: &SandboxHandle) {
    let said = sandbox.exec(["echo", "works"]).output().await.unwrap();
    assert_eq!(said.stdout_text().trim(), "works");
}

/// The sandbox is nobody's: its token opens nothing.
async fn is_closed(sandbox: &SandboxHandle) {
    let stranger = SandboxHandle::clone(sandbox);
    let refused = stranger.exec(["true"]).output().await.unwrap_err();
    let known = [
        Reason::SandboxNotFound,
        Reason::SandboxEnded,
        Reason::SandboxFailed,
    ];
    assert!(known.into_iter().any(|reason| refused.is(reason)), "{refused:?}");
}

async fn process(daemon: &Daemon, sandbox: &SandboxHandle) -> Process {
    let row = daemon.until_state(sandbox.id(), State::Claimed).await;
    Process::look(i32::try_from(row.pid.unwrap()).unwrap()).unwrap()
}

/// A last record that was cut, or whose end was never written: what it announced is gone, all else is there.
#[tokio::test]
async fn c12_a_torn_end_costs_the_last_record_alone() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = daemon().await;
            let kept = claim(&daemon).await;
            let mut torn = 0;
            for (cut, zeros) in [
                (Some(1), 0),
                (Some(FRAME), 0),
                (Some(FRAME + 1), 0),
                (Some(FRAME + 200), 0),
                (None, 1),
                (None, 16),
                (None, 22),
                (None, 4096),
            ] {
                let lost = claim(&daemon).await;
                daemon.kill9().await;
                let mut segment = Segment::last(&daemon);
                let (start, end) = *segment.frames.last().unwrap();
                match cut {
                    // So many bytes of the last record are left.
                    Some(left) => segment.bytes.truncate(start + left),
                    None => segment.bytes[end.saturating_sub(zeros).max(HEADER)..end].fill(0),
                }
                segment.write();
                let before = daemon.log().len();
                daemon.start_again().await;
                let said = daemon.log().split_off(before);
                torn += usize::from(said.contains("torn record"));
                works(&kept).await;
                is_closed(&lost).await;
                host_agrees(&daemon).await;
            }
            // Of a log that is zeros to its header nothing is left that could be torn.
            assert_eq!(torn, 7, "a torn end is told");
        }),
    )
    .await;
}

/// A changed byte in one record: that sandbox is given to nobody and not touched, the others live on; so it stays over
/// restarts, until an operator ends it.
#[tokio::test]
async fn c13_a_damaged_record_costs_its_sandbox_alone() {
    within(
        LIMIT,
        Box::pin(async {
            for (transition, at) in [("claimed", FRAME + 150), ("claimed", 6), ("warmed", FRAME + 90)] {
                let mut daemon = daemon().await;
                let (first, victim, last) =
                    (claim(&daemon).await, claim(&daemon).await, claim(&daemon).await);
                let alive = process(&daemon, &victim).await;
                daemon.kill9().await;
                let mut segment = Segment::last(&daemon);
                let (start, _) = segment.frame(victim.id(), transition);
                segment.bytes[start + at] ^= 0x10;
                segment.write();
                for _ in 0..2 {
                    daemon.start_again().await;
                    let row = daemon.until_state(victim.id(), State::Quarantined).await;
                    assert!(row.why.contains("damaged"), "{}", row.why);
                    works(&first).await;
                    works(&last).await;
                    is_closed(&victim).await;
                    assert!(
                        alive.lives(),
                        "nothing is destroyed on the word of something unreadable"
                    );
                    let other = claim(&daemon).await;
                    works(&other).await;
                    other.release().await.unwrap();
                    host_agrees(&daemon).await;
                    daemon.kill9().await;
                }
                daemon.start_again().await;
                let client = daemon.client().await;
                client.sandbox(victim.id(), None).release().await.unwrap();
                daemon.until_state(victim.id(), State::Gone).await;
                assert!(!alive.lives());
                host_agrees(&daemon).await;
            }
        }),
    )
    .await;
}

/// The record of its beginning is the damaged one: what lives there has no row, is left alone, and its slot is not used.
#[tokio::test]
async fn c14_a_guest_without_a_readable_beginning_is_left_alone() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = daemon().await;
            let (victim, other) = (claim(&daemon).await, claim(&daemon).await);
            let alive = process(&daemon, &victim).await;
            daemon.kill9().await;
            let mut segment = Segment::last(&daemon);
            let (start, _) = segment.frame(victim.id(), "making");
            segment.bytes[start + FRAME + 60] ^= 0x10;
            segment.write();
            assert_eq!(daemon.slot_dirs().len(), 2);
            daemon.start_again().await;
            works(&other).await;
            is_closed(&victim).await;
            let new = claim(&daemon).await;
            works(&new).await;
            assert!(alive.lives());
            assert_eq!(daemon.slot_dirs().len(), 3);
            assert!(daemon.log().contains("left alone"));
        }),
    )
    .await;
}

/// Records twice, and in another order: told, and nothing is lost.
#[tokio::test]
async fn c13_doubled_and_swapped_records_change_nothing() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = daemon().await;
            let (one, two) = (claim(&daemon).await, claim(&daemon).await);
            let released = claim(&daemon).await;
            released.release().await.unwrap();
            daemon.until_state(released.id(), State::Gone).await;
            daemon.kill9().await;
            let mut segment = Segment::last(&daemon);
            let (start, end) = segment.frame(released.id(), "claimed");
            let twice = segment.bytes[start..end].to_vec();
            let tail = segment.frames.last().unwrap().1;
            segment.bytes[tail..tail + twice.len()].copy_from_slice(&twice);
            segment.write();
            daemon.start_again().await;
            works(&one).await;
            works(&two).await;
            is_closed(&released).await;
            host_agrees(&daemon).await;

            let (three, four) = (claim(&daemon).await, claim(&daemon).await);
            daemon.kill9().await;
            let mut segment = Segment::last(&daemon);
            let (warmed, claimed) = (
                segment.frame(three.id(), "warmed"),
                segment.frame(three.id(), "claimed"),
            );
            assert_eq!(warmed.1, claimed.0, "neighbours");
            let mut swapped = segment.bytes[claimed.0..claimed.1].to_vec();
            swapped.extend_from_slice(&segment.bytes[warmed.0..warmed.1]);
            segment.bytes[warmed.0..claimed.1].copy_from_slice(&swapped);
            segment.write();
            daemon.start_again().await;
            for sandbox in [&one, &two, &three, &four] {
                works(sandbox).await;
            }
            host_agrees(&daemon).await;
        }),
    )
    .await;
}

/// A start that would be a guess is refused by name, touches nothing, and is a start again once the bytes are back.
#[tokio::test]
async fn c14_unreadable_is_never_empty() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = daemon().await;
            let first = claim(&daemon).await;
            daemon.kill9().await;
            daemon.start_again().await;
            let second = claim(&daemon).await;
            let processes = daemon.sandbox_processes();
            daemon.kill9().await;

            let (store, aside) = (daemon.dir().join("store"), daemon.home().join("store"));
            fs::rename(&store, &aside).unwrap();
            refuses(&mut daemon, "JOURNAL_DAMAGED").await;
            fs::remove_dir_all(&store).unwrap();
            fs::rename(&aside, &store).unwrap();

            let mut segment = Segment::last(&daemon);
            let whole = segment.bytes.clone();
            segment.bytes[8] += 1;
            let sum = crc32c::crc32c(&segment.bytes[..24]);
            segment.bytes[24..28].copy_from_slice(&sum.to_le_bytes());
            segment.write();
            refuses(&mut daemon, "STATE_NEWER").await;
            segment.bytes = whole;
            segment.write();

            let key = daemon.dir().join("host.key");
            let bytes = fs::read(&key).unwrap();
            fs::write(&key, b"").unwrap();
            refuses(&mut daemon, "HOST_FAULT").await;
            fs::write(&key, bytes).unwrap();

            assert_eq!(daemon.sandbox_processes(), processes);
            daemon.start_again().await;
            works(&first).await;
            works(&second).await;
            host_agrees(&daemon).await;
        }),
    )
    .await;
}

async fn refuses(daemon: &mut Daemon, reason: &str) {
    let refused = daemon.refuses_again().await;
    assert!(!refused.status.success());
    assert!(refused.stderr.contains(reason), "{reason}: {}", refused.stderr);
}
