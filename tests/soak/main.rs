//! `sandbox-soak`: many cycles of claim, command, release on one daemon, and then a look at what it holds.
//!
//! Two arms: the stub engine with a silkd per sandbox, and virtual machines. Each claims and releases a tenth of its cycles
//! first; what is held then, at a quiet moment, is what may be held at the end. Memory may have grown by what is kept
//! of sandboxes that are gone, and no more. Exits 1, and says what grew, where something did.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the printer of a program that is run by hand"
)]

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use harness::{Daemon, Setup};
use sandbox_sdk::Client;
use tokio::task::JoinSet;

const USAGE: &str = "usage: sandbox-soak [--cycles N] [--vm-cycles N]";
/// Claims under way at once.
const WORKERS: usize = 8;
/// Rows of sandboxes that are gone which the daemon keeps at most (journal.md), and what each may take.
const ROWS: u64 = 4096;
const ROW_BYTES: u64 = 6 * 1024;
/// What an allocator keeps for itself.
const SLACK_BYTES: u64 = 8 << 20;

/// What a daemon uses at a quiet moment, beside what `harness::Leaks` counts.
#[derive(Debug, Clone, Copy)]
struct Held {
    threads: u64,
    memory: u64,
    disk: u64,
}

impl Held {
    /// Waits until the pool is full and as many processes are left as belong to a quiet daemon, then looks.
    async fn look(daemon: &Daemon, warm: u32, processes: usize) -> Result<Self> {
        let quiet = |pool: &sandbox_sdk::v1::Pool| pool.warm == warm && pool.making == 0 && pool.claimed == 0;
        drop(daemon.until_pool("default", quiet).await);
        harness::eventually(
            "warm sandboxes are left, and what is ready for the next",
            || async {
                (daemon.sandbox_processes().len() == processes && daemon.slot_dirs().len() <= processes)
                    .then_some(())
            },
        )
        .await;
        let process = daemon.process();
        let status = fs::read_to_string(format!("/proc/{}/status", process.pid))?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            Ok(number.context("the kernel tells it")?.parse()?)
        };
        Ok(Self {
            threads: field("Threads:")?,
            memory: field("VmRSS:")? * 1024,
            disk: size(&daemon.dir())?,
        })
    }

    /// What there is more of than there was.
    fn grown(self, before: Self, cycles: u64) -> Vec<String> {
        let rows = ROWS.min(cycles) * ROW_BYTES;
        let limits = [
            // tokio ends an idle thread after a while and starts one when it is needed.
            ("threads", self.threads, before.threads + 4),
            ("bytes of memory", self.memory, before.memory + rows + SLACK_BYTES),
            // Two segments of the journal and the store: they are reused, not added to.
            ("bytes on disk", self.disk, before.disk + (64 << 20)),
        ];
        limits
            .into_iter()
            .filter(|(_, now, most)| now > most)
            .map(|(what, now, most)| format!("{now} {what}, at most {most} were to be expected"))
            .collect()
    }
}

/// Blocks on disk below a folder, in bytes.
fn size(dir: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let mut bytes = 0;
    for entry in fs::read_dir(dir)?.flatten() {
        // Files come and go while we look.
        let Ok(metadata) = entry.path().symlink_metadata() else {
            continue;
        };
        bytes += metadata.blocks() * 512;
        if metadata.is_dir() {
            bytes += size(&entry.path()).unwrap_or_default();
        }
    }
    Ok(bytes)
}

/// What tells a virtual machine from any other, a line each.
const NAMES: &str = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; \
    head -c 16 /dev/urandom | od -An -tx1";

/// Names that were seen, of any kind.
type Seen = Arc<Mutex<BTreeSet<String>>>;

fn once(seen: &Seen, name: &str) -> Result<()> {
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    ensure!(seen.insert(name.to_owned()), "{name} was seen twice");
    Ok(())
}

/// Claims, runs a command whose output is known, and releases; what names a sandbox comes only once.
async fn cycles(client: Client, worker: usize, times: u64, vms: bool, seen: Seen) -> Result<()> {
    for time in 0..times {
        let sandbox = client.claim("default").wait(Duration::from_secs(120)).await?;
        once(&seen, sandbox.id())?;
        let word = format!("{worker} {time}");
        let output = sandbox.exec(["echo", &word]).output().await?;
        ensure!(output.status.success(), "echo failed: {:?}", output.status);
        ensure!(
            output.stdout == format!("{word}\n").as_bytes(),
            "another's output"
        );
        if vms {
            let names = sandbox.exec(["sh", "-c", NAMES]).output().await?;
            let names = names.stdout_text();
            ensure!(names.lines().count() == 4, "not all names: {names}");
            names.lines().try_for_each(|name| once(&seen, name))?;
        }
        sandbox.release().await?;
    }
    Ok(())
}

async fn all(daemon: &Daemon, total: u64, vms: bool, seen: &Seen) -> Result<()> {
    let mut tasks = JoinSet::new();
    for worker in 0..WORKERS {
        let times = total.div_ceil(WORKERS as u64);
        tasks.spawn(cycles(
            daemon.client().await,
            worker,
            times,
            vms,
            Arc::clone(seen),
        ));
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

async fn soak(name: &str, setup: Setup, warm: u32, blanks: u32, total: u64) -> Result<()> {
    let vms = name == "qemu";
    let daemon = setup.warm(warm).log("warn").start().await;
    let processes = usize::try_from(warm + blanks)?;
    let seen = Arc::default();
    all(&daemon, total / 10, vms, &seen).await?;
    let before = Held::look(&daemon, warm, processes).await?;
    let counts = daemon.holds();
    println!("{name}: after {} cycles: {before:?}", total / 10);
    let from = Instant::now();
    all(&daemon, total, vms, &seen).await?;
    let after = Held::look(&daemon, warm, processes).await?;
    println!(
        "{name}: after {total} more, in {:.1} s: {after:?}",
        from.elapsed().as_secs_f64()
    );
    // What this end has closed is closed there soon after.
    daemon.holds_no_more_than(counts).await;
    let grown = after.grown(before, total);
    if !grown.is_empty() {
        bail!("{name}: {}\n{}", grown.join("; "), daemon.log());
    }
    Ok(())
}

async fn run(mut args: impl Iterator<Item = String>) -> Result<()> {
    let (mut stub, mut vms) = (10_000, 200);
    while let Some(arg) = args.next() {
        let number = args.next().context(USAGE)?.parse().context(USAGE)?;
        match arg.as_str() {
            "--cycles" => stub = number,
            "--vm-cycles" => vms = number,
            other => bail!("{other}: unknown\n{USAGE}"),
        }
    }
    ensure!(stub + vms > 0, "nothing to do\n{USAGE}");
    if stub > 0 {
        Box::pin(soak("stub", Setup::dev(), 8, 0, stub)).await?;
    }
    if vms > 0 {
        // One QEMU process stands ready for the next clone (engine.blanks).
        Box::pin(soak("qemu", Setup::qemu(), 2, 1, vms)).await?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("no runtime")
        .and_then(|runtime| runtime.block_on(Box::pin(run(std::env::args().skip(1)))));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak: {error:?}");
            ExitCode::FAILURE
        }
    }
}
