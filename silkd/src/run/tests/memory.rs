//! What is held for programs, and what is not.

use std::sync::Arc;

use sandbox_protocol::{limits::EXITED_KEPT, v1::ExecStart};

use super::harness::{Guest, command, detached, of};
use crate::run::{Kind, Shared, entry::Argv, job::Birth, job::Job, log::Side};

/// Adds programs that have exited, each with this output.
fn exited(shared: &Arc<Shared>, count: usize, output: &[u8]) {
    for _ in 0..count {
        let birth = Birth {
            retain: Some(600),
            ..Birth::new(Kind::Detached, Argv::pack(&["/bin/true".into()], 256), 0, true)
        };
        let job = shared
            .jobs()
            .table
            .add(None, None, |id| Job::new(shared.clone(), id, birth, None))
            .clone();
        shared.logs.open(job.id(), 0, 1024 * 1024);
        if !output.is_empty() {
            shared.logs.append(job.id(), Side::Stdout, output);
        }
        shared.retire(&job);
    }
}

/// Adds programs that have exited and said nothing.
pub(super) fn fill(shared: &Arc<Shared>, count: usize) {
    exited(shared, count, &[]);
}

#[tokio::test]
async fn entry_is_half_a_kilobyte() {
    for (output, most) in [(&[][..], 512), (&[b'x'; 250], 800)] {
        let guest = Guest::start();
        let shared = &guest.runner.shared;
        let counted = allocation_counter::measure(|| exited(shared, EXITED_KEPT, output));
        let each = counted.bytes_current / i64::try_from(EXITED_KEPT).unwrap();
        assert!(
            (100..=most).contains(&each),
            "{each} bytes with {} of output",
            output.len()
        );
        // Ten times as many take no more.
        let counted = allocation_counter::measure(|| exited(shared, 10 * EXITED_KEPT, output));
        assert!(counted.bytes_current.abs() < 64 * 1024, "{counted:?}");
        let counted = allocation_counter::measure(|| guest.runner.forget_exited());
        assert!(
            counted.bytes_current < -i64::try_from(EXITED_KEPT * 100).unwrap(),
            "{counted:?}"
        );
        guest.end().await;
    }
}

/// What runs and says nothing has three descriptors, and little memory.
#[test]
fn a_silent_program_takes_four_kilobytes() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let guest = runtime.block_on(async { Guest::start() });
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let start = |count| {
        runtime.block_on(async {
            for _ in 0..count {
                let request = detached(command(&[b"sleep", b"1000"]));
                guest.runner.spawn(guest.ctx(), request).await.unwrap();
            }
            // The janitor has taken them all.
            tokio::task::yield_now().await;
        });
    };
    // Whatever is made once.
    start(8);
    let before = descriptors();
    let counted = allocation_counter::measure(|| start(16));
    assert_eq!(descriptors(), before + 16 * 3);
    // What the spawn thread gives back is not seen here, so this is more than it takes.
    assert!(counted.bytes_current <= 16 * 4096, "{counted:?}");
    runtime.block_on(guest.end());
}

#[tokio::test]
async fn exec_cost_flat_with_full_logs() {
    let guest = Guest::start_with_logs(1024 * 1024);
    let traced = async || {
        let start = ExecStart {
            trace: true,
            ..of(command(&[b"true"]))
        };
        let mut work = guest.run_start(start).await.unwrap().exit.work.unwrap();
        // One for each output at most where its end is seen, none where the exit came first.
        assert!(work.reads <= 4, "{work:?}");
        (work.start_us, work.run_us, work.reads) = (0, 0, 0);
        work
    };
    let empty = traced().await;
    exited(&guest.runner.shared, EXITED_KEPT, &[b'x'; 4000]);
    let (used, budget) = guest.runner.log_usage();
    assert!(used >= budget, "{used} of {budget}");
    let full = traced().await;
    assert_eq!(empty, full);
    assert_eq!(full.rings_built, 0);
    guest.end().await;
}
