//! With real QEMU processes and guests of a few instructions, which is enough for QMP, capture, clones, identity and end. Guests that answer are the business of tests/guest.

use std::{fs, path::Path, sync::Arc};

use super::*;
use crate::{
    clock::WallTime,
    engine::{
        Capture, CaptureError, CaptureManifest, Engine, EngineError, Found, Identity, ImageRef, Machine,
        Place, Port, PortName, Purpose, slotdir::SlotDir, spawn,
    },
    image::Image,
    names::{self, SlotNumber},
    words::{Accel, EngineKind, Lane, MemBytes, Size, Vcpus},
};

const PLACE: Place = Place {
    slot: SlotNumber(1),
    size: Size {
        vcpus: Vcpus(1),
        memory: MemBytes::from_mib(128),
    },
    lane: Lane::None,
};

fn place(slot: u16) -> Place {
    Place {
        slot: SlotNumber(slot),
        ..PLACE
    }
}

fn options(root: &Path) -> QemuOptions {
    QemuOptions {
        program: "qemu-system-x86_64".into(),
        run_root: root.to_owned(),
        state_dir: root.to_owned(),
        accel: AccelWish::Tcg,
        vm_user: "nobody".to_owned(),
        blanks: 1,
    }
}

async fn engine(root: &Path) -> QemuEngine {
    QemuEngine::open(options(root), None).await.unwrap()
}

/// Real-mode code: disable interrupts and halt, for ever.
const HALT: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];
/// Real-mode code: write `u` to the serial line, then the same.
const UP: &[u8] = &[0xba, 0xf8, 0x03, 0xb0, b'u', 0xee, 0xfa, 0xf4, 0xeb, 0xfd];
/// Real-mode code: write `oops` to the serial line, then reset the machine through its keyboard controller.
const OOPS: &[u8] = &[
    0xba, 0xf8, 0x03, 0xb0, b'o', 0xee, 0xee, 0xb0, b'p', 0xee, 0xb0, b's', 0xee, 0xb0, 0xfe, 0xe6, 0x64,
    0xf4,
];

fn image(root: &Path) -> Image {
    image_of(root, HALT)
}

/// An image whose kernel is this code, in the form of the Linux boot protocol 2.00.
fn image_of(root: &Path, code: &[u8]) -> Image {
    let dir = root.join("image");
    fs::create_dir_all(&dir).unwrap();
    let mut kernel = vec![0; 512 * 8];
    kernel[0x1f1] = 1;
    kernel[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    // A jump over the header.
    kernel[0x200..0x202].copy_from_slice(&[0xeb, 0x66]);
    kernel[0x202..0x208].copy_from_slice(b"HdrS\x00\x02");
    kernel[0x211] = 1;
    kernel[0x268..0x268 + code.len()].copy_from_slice(code);
    put(&dir.join("vmlinuz"), &kernel);
    put(&dir.join("initrd"), b"nothing");
    let digest = crate::image::Digest::of;
    let manifest = serde_json::json!({
        "format": 1, "name": "halt", "cmdline": "quiet", "proto_min": 1, "proto_max": 1,
        "kernel": {"file": "vmlinuz", "sha256": digest(&kernel)},
        "initrd": {"file": "initrd", "sha256": digest(b"nothing")},
    });
    put(&dir.join("manifest.json"), manifest.to_string().as_bytes());
    Image::open(&dir).unwrap()
}

fn put(path: &Path, bytes: &[u8]) {
    crate::disk::write_atomic(path, bytes, 0o644).unwrap();
}

/// A template of that image.
async fn capture(engine: &QemuEngine, root: &Path) -> Capture {
    let image = image_of(root, UP);
    let machine = Engine::boot(engine, &image, place(0x7fff), None, Purpose::Template)
        .await
        .unwrap();
    // Captured while its firmware still looked for a kernel, its clones looked on, found none and ended.
    let up = async {
        while machine.console().as_str() != "u" {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), up)
        .await
        .unwrap();
    let dir = root.join("template");
    fs::create_dir(&dir).unwrap();
    let captured = machine.capture(&dir).await.unwrap();
    machine.kill().await.unwrap();
    let manifest = CaptureManifest {
        format: CaptureManifest::FORMAT,
        facts: engine.facts(),
        image: ImageRef::of(&image),
        size: PLACE.size,
        lane: PLACE.lane,
        proto_min: 1,
        proto_max: 1,
        warmup: Vec::new(),
        ca: vec![],
        created_at: WallTime::from_micros(0),
        ram: captured.ram,
        state: captured.state,
    };
    Capture::seal(&dir, &manifest).unwrap()
}

fn left_in(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root.join("run")).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn lives(identity: Identity) -> bool {
    crate::engine::process::Process::find(identity)
        .unwrap()
        .is_some_and(|process| process.ended().is_none())
}

#[tokio::test]
async fn a_machine_is_booted_watched_and_killed_without_a_trace() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path()).await;
    assert!(
        engine.version().starts_with(|digit: char| digit.is_ascii_digit()),
        "{}",
        engine.version()
    );
    let machine = Engine::boot(&engine, &image(root.path()), PLACE, None, Purpose::Sandbox)
        .await
        .unwrap();
    let identity = machine.identity();
    assert!(lives(identity));
    assert!(matches!(
        machine.connect(PortName::Agent).await.unwrap(),
        Port::Stream(_)
    ));
    machine.pause().await.unwrap();
    machine.resume().await.unwrap();
    assert_eq!(
        engine.inventory().unwrap(),
        [Found {
            slot: PLACE.slot,
            identity: Some(identity),
            alive: true
        }]
    );
    let taken = Engine::boot(&engine, &image(root.path()), PLACE, None, Purpose::Sandbox).await;
    assert!(matches!(taken, Err(EngineError::SlotTaken { slot }) if slot == PLACE.slot));
    assert!(lives(identity), "the one that has the slot is left alone");
    let (one, two, report) = tokio::join!(machine.kill(), machine.kill(), machine.exited());
    one.unwrap();
    two.unwrap();
    assert_eq!(report.status, "killed by signal 9");
    assert!(!lives(identity));
    machine.kill().await.unwrap();
    assert!(matches!(
        machine.connect(PortName::Agent).await,
        Err(EngineError::Gone { .. })
    ));
    assert_eq!(left_in(root.path()), [] as [String; 0]);
    engine.stop().await;
}

#[tokio::test]
async fn inv_23_guest_outlives_kill() {
    let root = tempfile::tempdir().unwrap();
    let first = engine(root.path()).await;
    let machine = Engine::boot(&first, &image(root.path()), PLACE, None, Purpose::Sandbox)
        .await
        .unwrap();
    let identity = machine.identity();
    let pid = identity.pid.unwrap();
    // Its own session, and no pipe or terminal to us that could break under it.
    let number = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    assert_eq!(rustix::process::getsid(Some(number)).unwrap(), number);
    for fd in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let target = fs::read_link(fd.unwrap().path()).unwrap();
        let target = target.to_string_lossy();
        assert!(
            !target.starts_with("pipe:") && !target.starts_with("/dev/pts"),
            "{target}"
        );
    }
    // A killed daemon runs no code: all that it had just goes.
    first.stop().await;
    drop(machine);
    drop(first);
    assert!(lives(identity));

    let second = engine(root.path()).await;
    let other = Identity {
        started: identity.started + 1,
        ..identity
    };
    assert!(matches!(
        Engine::attach(&second, PLACE, other).await,
        Err(EngineError::Gone { .. })
    ));
    assert!(matches!(
        Engine::attach(&second, place(2), identity).await,
        Err(EngineError::Gone { .. })
    ));
    let machine = Engine::attach(&second, PLACE, identity).await.unwrap();
    assert_eq!(machine.identity(), identity);
    machine.pause().await.unwrap();
    machine.resume().await.unwrap();
    machine.kill().await.unwrap();
    assert!(!lives(identity));
    second.stop().await;
}

#[tokio::test]
async fn a_death_is_told_and_its_slot_is_reaped() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path()).await;
    let machine = Engine::boot(&engine, &image(root.path()), PLACE, None, Purpose::Sandbox)
        .await
        .unwrap();
    let identity = machine.identity();
    let process = crate::engine::process::Process::find(identity).unwrap().unwrap();
    process.signal(rustix::process::Signal::SEGV).unwrap();
    assert_eq!(machine.exited().await.status, "killed by signal 11");
    let found = engine.inventory().unwrap();
    assert_eq!((found.len(), found[0].alive), (1, false));
    drop(machine);
    engine.reap(PLACE.slot).await.unwrap();
    engine.reap(PLACE.slot).await.unwrap();
    assert_eq!(left_in(root.path()), [] as [String; 0]);
}

#[tokio::test]
async fn a_guest_that_resets_has_ended_and_its_last_words_are_told() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path()).await;
    let image = image_of(root.path(), OOPS);
    let machine = match Engine::boot(&engine, &image, PLACE, None, Purpose::Sandbox).await {
        Ok(machine) => machine,
        // So quickly that it ended while it was made.
        Err(EngineError::Died(report)) => {
            assert_eq!(report.to_string(), "exit status 0; console: oops");
            return;
        }
        Err(other) => panic!("{other:?}"),
    };
    assert_eq!(machine.exited().await.to_string(), "exit status 0; console: oops");
    assert_eq!(machine.console().as_str(), "oops");
    machine.kill().await.unwrap();
    assert_eq!(left_in(root.path()), [] as [String; 0]);
}

#[tokio::test]
async fn reap_ends_only_what_it_can_prove() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path()).await;
    let machine = Engine::boot(&engine, &image(root.path()), PLACE, None, Purpose::Sandbox)
        .await
        .unwrap();
    let identity = machine.identity();
    drop(machine);
    let lock = names::run_dir(root.path(), PLACE.slot).join("lock");
    let text = fs::read_to_string(&lock).unwrap();
    // Somebody else's number in it: this process's.
    let forged = format!("{} {}\n", std::process::id(), identity.started);
    let file = fs::File::options().write(true).open(&lock).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, forged.as_bytes(), 0).unwrap();
    file.set_len(forged.len() as u64).unwrap();
    assert!(matches!(
        engine.reap(PLACE.slot).await,
        Err(EngineError::Unproven { .. })
    ));
    assert!(lives(identity));
    std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), 0).unwrap();
    file.set_len(text.len() as u64).unwrap();
    engine.reap(PLACE.slot).await.unwrap();
    assert!(!lives(identity));
    assert_eq!(left_in(root.path()), [] as [String; 0]);
}

#[tokio::test]
async fn a_capture_is_cloned_from_blank_processes_and_without() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path()).await;
    let capture = capture(&engine, root.path()).await;
    let cold = Engine::clone_of(&engine, &capture, place(1), None).await.unwrap();
    engine.warm_up(&capture);
    engine.warm_up(&capture);
    while engine.ready_blanks(&capture) == 0 {
        tokio::task::yield_now().await;
    }
    let blank = fs::read_dir(root.path().join("run")).unwrap().count();
    let warm = Engine::clone_of(&engine, &capture, place(2), None).await.unwrap();
    assert_eq!(blank, 2);
    for machine in [&cold, &warm] {
        let ended = futures_util::FutureExt::now_or_never(machine.exited());
        assert!(ended.is_none() && lives(machine.identity()), "{ended:?}");
    }
    assert_ne!(cold.identity(), warm.identity());
    let slots: Vec<u16> = engine
        .inventory()
        .unwrap()
        .iter()
        .map(|found| found.slot.0)
        .collect();
    assert_eq!(slots, [1, 2]);
    for machine in [cold, warm] {
        assert!(matches!(
            machine.connect(PortName::Egress).await.unwrap(),
            Port::Stream(_)
        ));
        assert!(matches!(
            machine.capture(root.path()).await,
            Err(EngineError::Unsupported(_))
        ));
        machine.kill().await.unwrap();
    }
    engine.cool(&capture);
    engine.stop().await;
    assert_eq!(
        left_in(root.path()),
        [] as [String; 0],
        "blank processes end with the engine"
    );
    assert!(matches!(
        Engine::clone_of(&engine, &capture, place(3), None).await,
        Err(EngineError::Stopped)
    ));
}

#[tokio::test]
async fn blank_processes_of_a_killed_daemon_are_ended() {
    let root = tempfile::tempdir().unwrap();
    let first = engine(root.path()).await;
    let capture = capture(&first, root.path()).await;
    let path = first.host().hidden("blank");
    let blank = first
        .host()
        .blank(&path, Accel::Tcg, &capture, None)
        .await
        .unwrap();
    let housed = blank.nascent.settle(None).unwrap();
    let identity = housed.identity();
    drop(housed);
    assert!(lives(identity));
    let _second = engine(root.path()).await;
    assert!(!lives(identity));
    assert_eq!(left_in(root.path()), [] as [String; 0]);
}

#[tokio::test]
async fn what_does_not_fit_is_refused_by_name_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path()).await;
    let capture = capture(&engine, root.path()).await;
    let dir = capture.dir().to_owned();
    let refused = |outcome: Result<Box<dyn Machine>, EngineError>| match outcome {
        Err(EngineError::Capture(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let bigger = Place {
        size: Size {
            memory: MemBytes::from_mib(256),
            ..PLACE.size
        },
        ..PLACE
    };
    let text = refused(Engine::clone_of(&engine, &capture, bigger, None).await);
    assert!(text.contains("size"), "{text}");

    let mut manifest = capture.manifest().clone();
    manifest.facts.version = "6.0.0".to_owned();
    let other = root.path().join("other");
    fs::create_dir(&other).unwrap();
    for file in ["ram", "state"] {
        fs::hard_link(dir.join(file), other.join(file)).unwrap();
    }
    let old = Capture::seal(&other, &manifest).unwrap();
    let text = refused(Engine::clone_of(&engine, &old, PLACE, None).await);
    assert!(text.contains("emulator 6.0.0"), "{text}");

    // Damage: found by whoever loads it, and by nobody who has.
    Engine::clone_of(&engine, &capture, PLACE, None)
        .await
        .unwrap()
        .kill()
        .await
        .unwrap();
    for file in ["state", "ram"] {
        let bytes = fs::read(dir.join(file)).unwrap();
        let mut damaged = bytes.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        put(&dir.join(file), &damaged);
        let fresh = Capture::open(&dir).unwrap();
        let text = refused(Engine::clone_of(&engine, &fresh, PLACE, None).await);
        assert!(text.contains(&format!("damaged: {file}")), "{text}");
        put(&dir.join(file), &bytes[..bytes.len() / 2]);
        if file == "ram" {
            assert!(matches!(
                Capture::open(&dir),
                Err(CaptureError::Damaged { file: "ram", .. })
            ));
        }
        Engine::clone_of(&engine, &capture, PLACE, None)
            .await
            .unwrap()
            .kill()
            .await
            .unwrap();
        put(&dir.join(file), &bytes);
    }
    assert_eq!(left_in(root.path()), [] as [String; 0]);
}

#[tokio::test]
async fn a_program_that_is_no_qemu_is_told_with_what_it_said() {
    let root = tempfile::tempdir().unwrap();
    let script = root.path().join("qemu");
    put(&script, b"#!/bin/sh\necho 'bad \x1b[31mluck' >&2\nexit 3\n");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&script, mode).unwrap();
    let program = |program: &Path| QemuOptions {
        program: program.to_owned(),
        vm_user: String::new(),
        ..options(root.path())
    };
    match QemuEngine::open(program(&script), None).await {
        Err(EngineError::Died(report)) => {
            assert_eq!(
                report.to_string(),
                "exit status 3; console: bad \\u{1b}[31mluck\\n"
            );
        }
        other => panic!("{other:?}"),
    }
    match QemuEngine::open(program(Path::new("no-such-qemu")), None).await {
        Err(EngineError::Host { what, .. }) => assert_eq!(what, "start no-such-qemu"),
        other => panic!("{other:?}"),
    }
    assert_eq!(left_in(root.path()), [] as [String; 0]);
}

#[tokio::test]
async fn inv_24_loud_fallback() {
    let root = tempfile::tempdir().unwrap();
    let auto = QemuOptions {
        accel: AccelWish::Auto,
        ..options(root.path())
    };
    let engine = QemuEngine::open(auto, None).await.unwrap();
    assert_eq!((engine.kind(), engine.accel()), (EngineKind::Qemu, Accel::Tcg));
    assert!(
        engine.accel_why().contains("/dev/kvm") || engine.accel_why().contains("KVM"),
        "{}",
        engine.accel_why()
    );
    let stub = crate::engine::stub::StubEngine::new(crate::engine::stub::StubOptions {
        run_root: root.path().to_owned(),
        agent: crate::engine::stub::StubAgent::InProcess,
        faults: Vec::new(),
    });
    assert_eq!((stub.kind(), stub.accel()), (EngineKind::Stub, Accel::None));
    assert!(stub.accel_why().contains("isolates nothing"));
}

#[tokio::test]
async fn a_cancelled_start_leaves_no_process() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path()).await;
    let image = image(root.path());
    // Cancelled at ever later places, until one is so late that the machine is there.
    for polls in 1.. {
        let mut boot = Box::pin(Engine::boot(&engine, &image, PLACE, None, Purpose::Sandbox));
        let mut left = polls;
        let outcome = std::future::poll_fn(|context| {
            let polled = boot.as_mut().poll(context).map(Some);
            left -= 1;
            if polled.is_pending() && left == 0 {
                std::task::Poll::Ready(None)
            } else {
                polled
            }
        })
        .await;
        drop(boot);
        match outcome {
            Some(machine) => {
                machine.unwrap().kill().await.unwrap();
                break;
            }
            None => {
                // The start may still be on its blocking thread; it ends what it made when it finds nobody waiting.
                while fs::exists(names::run_dir(root.path(), PLACE.slot)).unwrap() {
                    if engine.reap(PLACE.slot).await.is_err() {
                        tokio::task::yield_now().await;
                    }
                }
            }
        }
    }
    assert_eq!(left_in(root.path()), [] as [String; 0]);
}

/// The limit under which a VMM's files stand: a write beyond fails and does not end the process.
#[tokio::test]
async fn a_flooded_console_stays_small() {
    let root = tempfile::tempdir().unwrap();
    let dir = Arc::new(SlotDir::create(&names::run_dir(root.path(), PLACE.slot)).unwrap());
    let spec = spawn::Spec {
        program: "/bin/sh".into(),
        args: vec![
            "-c".into(),
            "head -c 100000 /dev/zero >console; echo after >>console2; exit 7".into(),
        ],
        keep: Vec::new(),
        account: None,
        file_limit: Some(4096),
        inside: true,
    };
    let nascent = spawn::start(Arc::clone(&dir), spec, None).await.unwrap();
    let report = nascent.died().await;
    assert_eq!(report.status, "exit status 7");
    let length = |name: &str| fs::metadata(dir.path().join(name)).unwrap().len();
    assert_eq!((length("console"), length("console2")), (4096, 6));
    drop(nascent);
    spawn::reap(dir, None).await.unwrap();
}
