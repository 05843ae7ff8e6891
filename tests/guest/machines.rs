//! Machines without a daemon over them: what only the host's own end of a port, a processor that is stopped, or a
//! kernel's command line can show.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use futures_util::{FutureExt as _, future};
use harness::{HANG, image, within};
use sandbox_protocol::id::SandboxId;
use sandboxd::{
    agent::{self, Ended, Quiesce, RenewMode, RenewSpec},
    clock::Clock,
    engine::{
        Capture, CaptureManifest, Engine as _, ImageRef, Machine, Place, Port, PortName, Purpose,
        qemu::{AccelWish, QemuEngine, QemuOptions},
    },
    image::Image,
    link::{self, Link, LinkError, Opened},
    names::{self, SlotNumber},
    random,
    words::Accel,
};
use tempfile::TempDir;
use tokio::net::UnixStream;

use crate::node::{Plain, golden, state_dir};

/// An engine of the test's own, on a folder of its own, with the accelerator that the shared template has.
struct Bench {
    engine: QemuEngine,
    golden: Capture,
    root: TempDir,
}

impl Bench {
    async fn open() -> Self {
        let golden = Capture::open(&Box::pin(golden(Plain("busybox"))).await).unwrap();
        let root = state_dir();
        let options = QemuOptions {
            program: "qemu-system-x86_64".into(),
            run_root: root.path().to_owned(),
            state_dir: root.path().to_owned(),
            accel: match golden.manifest().facts.accel {
                Accel::Kvm => AccelWish::Kvm,
                Accel::Tcg | Accel::None => AccelWish::Tcg,
            },
            vm_user: "nobody".to_owned(),
            blanks: 0,
        };
        let engine = Box::pin(QemuEngine::open(options, None)).await.unwrap();
        Self { engine, golden, root }
    }

    fn place(&self, slot: u16) -> Place {
        Place {
            slot: SlotNumber(slot),
            size: self.golden.manifest().size,
            lane: self.golden.manifest().lane,
        }
    }

    fn dir(&self, name: &str) -> PathBuf {
        let dir = self.root.path().join(name);
        fs::create_dir(&dir).unwrap();
        dir
    }

    /// Ends what it made, and proves that nothing is left.
    async fn close(self, machines: Vec<Box<dyn Machine>>) {
        for machine in machines {
            machine.kill().await.unwrap();
        }
        self.engine.stop().await;
        assert_eq!(self.engine.inventory().unwrap(), []);
    }
}

async fn port(machine: &dyn Machine) -> UnixStream {
    match machine.connect(PortName::Agent).await.unwrap() {
        Port::Stream(stream) => stream,
        Port::InProcess => panic!("a machine has ports"),
    }
}

/// BREAK once, then HELLO is waited for.
async fn greet(port: UnixStream) -> Result<Opened, LinkError> {
    link::open(port, random::bytes(), Clock::host()).await
}

async fn renew(link: &Link, mode: RenewMode) -> u64 {
    let sandbox = SandboxId::from_random(random::bytes());
    let spec = RenewSpec {
        mode,
        renew_id: sandbox.to_string(),
        seed: random::bytes(),
        sandbox,
        ask_doors: false,
        hostname: "guest".to_owned(),
    };
    let renewed = within(HANG, agent::renew(link, spec, &Clock::host())).await;
    renewed.unwrap().generation
}

/// Runs a shell script, which must succeed, and gives what it wrote.
async fn sh(link: &Link, script: &str) -> String {
    let argv = ["sh", "-c", script].map(|word| Bytes::copy_from_slice(word.as_bytes()));
    let ran = agent::exec_once(link, &argv, HANG).await.unwrap();
    assert_eq!(ran.ended, Ended::Code(0), "{script}: {}", ran.said());
    String::from_utf8(ran.output).unwrap()
}

/// The image with another command line.
fn with_options(to: &Path, more: &str) -> Image {
    for entry in fs::read_dir(image("busybox")).unwrap() {
        let from = entry.unwrap().path();
        fs::copy(&from, to.join(from.file_name().unwrap())).unwrap();
    }
    let path = to.join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let line = format!("{} {more}", manifest["cmdline"].as_str().unwrap());
    manifest["cmdline"] = line.into();
    fs::write(&path, manifest.to_string()).unwrap();
    Image::open(to).unwrap()
}

#[tokio::test]
async fn unknown_option_powers_off() {
    let bench = Bench::open().await;
    let mistaken = with_options(&bench.dir("image"), "silkd.rooot=initramfs");
    let booting = bench
        .engine
        .boot(&mistaken, bench.place(1), None, Purpose::Sandbox);
    let machine = within(HANG, booting).await.unwrap();
    let report = within(HANG, machine.exited()).await;
    // A machine that is off: not one that panicked, was reset, or stands still.
    assert_eq!(report.status, "exit status 0");
    let said = report.console.as_str();
    assert!(
        said.contains("silkd: fatal: command line: unknown option \"silkd.rooot\""),
        "{said}"
    );
    assert!(!said.contains("panic"), "{said}");
    bench.close(vec![machine]).await;
}

/// Sockets of hosts that its process has taken up on the agent's port, by their numbers.
fn hosts(machine: &dyn Machine) -> BTreeSet<String> {
    let pid = machine.identity().pid.unwrap();
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let taken = sockets.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(5);
        let (state, inode, path) = (fields.next()?, fields.next()?, fields.next()?);
        // Connected, and not the one that listens.
        (state == "03" && path.ends_with("/agent.sock")).then(|| format!("socket:[{inode}]"))
    });
    let taken: BTreeSet<String> = taken.collect();
    let held = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    // One may be closed meanwhile.
    let held = held.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    held.filter_map(|link| taken.get(link.to_str()?).cloned())
        .collect()
}

#[tokio::test]
async fn link_reopened_while_paused_works() {
    let bench = Bench::open().await;
    let cloning = bench.engine.clone_of(&bench.golden, bench.place(1), None);
    let machine = within(HANG, cloning).await.unwrap();
    let first = within(HANG, greet(port(&*machine).await)).await.unwrap();
    let generation = renew(&first.link, RenewMode::Clone).await;
    let boot = "cat /proc/sys/kernel/random/boot_id";
    let before = sh(&first.link, boot).await;

    machine.pause().await.unwrap();
    let connected = hosts(&*machine);
    assert_eq!(connected.len(), 1, "this is how a host is seen");
    let lost = first.link.lost();
    drop(first);
    within(HANG, lost).await;
    // Another host comes, and says BREAK, while the guest cannot see that the first is gone. Nor will it: the emulator
    // tells a guest of a change when it runs, and by then there is a host again.
    let mut next = Box::pin(greet(port(&*machine).await));
    assert!((&mut next).now_or_never().is_none(), "nobody answers");
    harness::eventually("the emulator has taken up the new host", || async {
        let now = hosts(&*machine);
        (!now.is_empty() && now.is_disjoint(&connected)).then_some(())
    })
    .await;
    machine.resume().await.unwrap();

    let next = within(HANG, next).await.unwrap();
    assert_eq!(next.hello.generation, generation, "the same guest");
    let info = within(HANG, agent::info(&next.link, &Clock::host()))
        .await
        .unwrap();
    assert_eq!((info.generation, info.processes), (generation, 0));
    assert_eq!(sh(&next.link, boot).await, before);
    drop(next);
    bench.close(vec![machine]).await;
}

/// A template whose host never left: its link is open, with a call on it, from before the capture to the machine's end.
async fn capture_while_connected(bench: &Bench) -> Capture {
    let image = Image::open(&image("busybox")).unwrap();
    let booting = bench.engine.boot(&image, bench.place(0), None, Purpose::Template);
    let machine = within(HANG, booting).await.unwrap();
    let host = within(HANG, greet(port(&*machine).await)).await.unwrap();
    renew(&host.link, RenewMode::Boot).await;
    let news = within(HANG, agent::events(&host.link)).await.unwrap();
    let resting = agent::quiesce(&host.link, Quiesce::Template, HANG);
    within(HANG, resting).await.unwrap();
    let dir = bench.dir("template");
    let captured = within(HANG, machine.capture(&dir)).await.unwrap();
    assert!(
        host.link.lost().now_or_never().is_none(),
        "connected all the while"
    );
    drop(news);
    let manifest = CaptureManifest {
        image: ImageRef::of(&image),
        ram: captured.ram,
        state: captured.state,
        ..bench.golden.manifest().clone()
    };
    machine.kill().await.unwrap();
    Capture::seal(&dir, &manifest).unwrap()
}

/// A clone and the host's end of its port, which is there before the guest runs on if it is to be early.
async fn connected_clone(
    bench: &Bench,
    capture: &Capture,
    slot: u16,
    early: bool,
) -> (Box<dyn Machine>, UnixStream) {
    let cloning = bench.engine.clone_of(capture, bench.place(slot), None);
    if !early {
        let machine = cloning.await.unwrap();
        let port = port(&*machine).await;
        return (machine, port);
    }
    let socket = names::run_dir(bench.root.path(), SlotNumber(slot)).join("agent.sock");
    let connecting = async {
        loop {
            match UnixStream::connect(&socket).await {
                Ok(port) => return port,
                // Its process is not made yet.
                Err(_early) => tokio::task::yield_now().await,
            }
        }
    };
    let (machine, port) = future::join(cloning, connecting).await;
    (machine.unwrap(), port)
}

#[tokio::test]
async fn clone_of_a_connected_template_works() {
    const CLONES: u16 = 8;
    let bench = Bench::open().await;
    let capture = Box::pin(capture_while_connected(&bench)).await;
    let mut clones = Vec::new();
    for slot in 1..=CLONES {
        let clone = connected_clone(&bench, &capture, slot, slot % 2 == 0);
        clones.push(within(HANG, clone).await);
    }
    let (machines, ports): (Vec<_>, Vec<_>) = clones.into_iter().unzip();
    // All of them live when they are asked.
    let answers = ports.into_iter().map(async |port| {
        let opened = within(HANG, greet(port)).await.unwrap();
        assert_eq!(opened.hello.generation, 1, "as it was captured");
        assert_eq!(renew(&opened.link, RenewMode::Clone).await, 2);
        let info = agent::info(&opened.link, &Clock::host()).await.unwrap();
        assert_eq!(info.processes, 0);
        sh(&opened.link, "echo clone; cat /run/sandbox/id").await
    });
    let mut said = future::join_all(answers).await;
    assert!(said.iter().all(|said| said.starts_with("clone\nsb_")), "{said:?}");
    said.sort();
    said.dedup();
    assert_eq!(said.len(), usize::from(CLONES), "each is its own: {said:?}");
    bench.close(machines).await;
}
