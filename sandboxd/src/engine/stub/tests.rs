//! With a stand-in for silkd that makes its sockets and nothing else (a QEMU without a machine does); the real one is the
//! business of tests/lifecycle.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{io::AsyncReadExt as _, time::timeout};

use super::*;
use crate::{
    clock::WallTime,
    engine::{
        Capture, CaptureManifest, Engine, EngineError, Found, ImageRef, Machine, Place, Port, PortName,
        Purpose,
    },
    image::Image,
    names::SlotNumber,
    words::{EngineKind, Lane, MemBytes, Size, Vcpus},
};

/// Bound for what would hang if it were broken.
const HANG: Duration = Duration::from_secs(40);

fn place(slot: u16) -> Place {
    Place {
        slot: SlotNumber(slot),
        size: Size {
            vcpus: Vcpus(1),
            memory: MemBytes::from_mib(256),
        },
        lane: Lane::None,
    }
}

/// The stand-in, with a line of shell before it.
fn silkd(root: &Path, before: &str) -> PathBuf {
    let path = root.join("silkd");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --serve ] || exit 9\n{before}\nexec qemu-system-x86_64 -M none -nodefaults -display none \\\n\
         -chardev socket,id=a,path=$2,server=on,wait=off -chardev socket,id=e,path=$2.egress,server=on,wait=off\n"
    );
    crate::disk::write_atomic(&path, script.as_bytes(), 0o755).unwrap();
    path
}

fn engine(root: &Path, agent: StubAgent, faults: &str) -> StubEngine {
    StubEngine::new(StubOptions {
        run_root: root.to_owned(),
        agent,
        faults: StubFault::parse_all(faults).unwrap(),
    })
}

async fn boot(engine: &StubEngine, slot: u16) -> Result<Box<dyn Machine>, EngineError> {
    Engine::boot(engine, &Image::absent(), place(slot), None, Purpose::Sandbox).await
}

fn is_stream(port: &Result<Port, EngineError>) -> bool {
    matches!(port, Ok(Port::Stream(_)))
}

#[tokio::test]
async fn a_served_machine_outlives_its_engine_and_is_killed_once() {
    let root = tempfile::tempdir().unwrap();
    let agent = StubAgent::Process(silkd(root.path(), ""));
    let first = engine(root.path(), agent.clone(), "");
    let machine = boot(&first, 3).await.unwrap();
    let identity = machine.identity();
    assert!(is_stream(&machine.connect(PortName::Agent).await));
    assert!(is_stream(&machine.connect(PortName::Egress).await));
    assert!(is_stream(&machine.connect(PortName::Agent).await));
    assert!(matches!(
        boot(&first, 3).await,
        Err(EngineError::SlotTaken { .. })
    ));
    first.stop().await;
    drop((machine, first));

    let second = engine(root.path(), agent, "");
    let found = second.inventory().unwrap();
    assert_eq!(
        found,
        [Found {
            slot: SlotNumber(3),
            identity: Some(identity),
            alive: true
        }]
    );
    let machine = Engine::attach(&second, place(3), identity).await.unwrap();
    assert!(is_stream(&machine.connect(PortName::Agent).await));
    let (report, one, two) = tokio::join!(machine.exited(), machine.kill(), machine.kill());
    one.unwrap();
    two.unwrap();
    assert!(!report.status.is_empty());
    assert_eq!(second.inventory().unwrap(), []);
    assert!(matches!(
        Engine::attach(&second, place(3), identity).await,
        Err(EngineError::Gone { .. })
    ));
    second.reap(SlotNumber(3)).await.unwrap();
}

/// The emulator serves one connection and queues few: the next one waits for room, and fails nobody.
#[tokio::test]
async fn a_port_that_is_full_is_waited_for() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path(), StubAgent::Process(silkd(root.path(), "")), "");
    let machine = boot(&engine, 1).await.unwrap();
    let mut held = vec![machine.connect(PortName::Agent).await];
    let mut waiting = loop {
        let mut next = machine.connect(PortName::Agent);
        match timeout(Duration::from_millis(100), &mut next).await {
            Ok(connected) => held.push(connected),
            Err(_full) => break next,
        }
        assert!(held.iter().all(is_stream) && held.len() < 64, "{held:?}");
    };
    drop(held);
    let connected = timeout(HANG, &mut waiting).await.unwrap();
    assert!(is_stream(&connected), "{connected:?}");
    drop((waiting, connected));
    machine.kill().await.unwrap();
}

#[tokio::test]
async fn a_program_that_ends_before_it_serves_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let agent = StubAgent::Process(silkd(root.path(), "echo no luck >&2; exit 4"));
    let engine = engine(root.path(), agent, "");
    match boot(&engine, 1).await {
        Err(EngineError::Died(report)) => {
            assert_eq!(report.to_string(), "exit status 4; console: no luck\\n");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(engine.inventory().unwrap(), []);
}

/// What a guest's programs leave behind ends with it, where the host has control groups.
#[tokio::test]
async fn descendants_end_with_their_machine() {
    let root = tempfile::tempdir().unwrap();
    let pid = root.path().join("pid");
    let before = format!("setsid sleep 1000 & echo $! >{}", pid.display());
    let engine = engine(root.path(), StubAgent::Process(silkd(root.path(), &before)), "");
    let machine = boot(&engine, 1).await.unwrap();
    let sleeper: i32 = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    machine.kill().await.unwrap();
    let sleeper = rustix::process::Pid::from_raw(sleeper).unwrap();
    let lives = rustix::process::test_kill_process(sleeper).is_ok();
    if crate::engine::cgroup::Cgroups::find().is_ok() {
        // A zombie of another parent's is dead, too.
        let state =
            fs::read_to_string(format!("/proc/{}/stat", sleeper.as_raw_nonzero())).unwrap_or_default();
        assert!(!lives || state.contains(") Z "), "{state}");
    } else {
        assert!(lives, "only a control group finds what has left its session");
        rustix::process::kill_process(sleeper, rustix::process::Signal::KILL).unwrap();
    }
}

#[tokio::test]
async fn in_process_machines_cost_no_descriptor_and_no_directory() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path(), StubAgent::InProcess, "");
    let mut machines = Vec::new();
    let (all, counts) = crate::work::traced(async {
        for slot in 0..10_000 {
            machines.push(boot(&engine, slot).await?);
        }
        Ok::<_, EngineError>(machines)
    })
    .await;
    let machines = all.unwrap();
    assert_eq!(counts.get(crate::work::Kind::TasksSpawned), 0);
    assert!(!root.path().join("run").exists());
    let machine = &machines[7];
    assert_eq!(machine.identity().pid, None);
    assert!(matches!(
        machine.connect(PortName::Agent).await,
        Ok(Port::InProcess)
    ));
    assert!(machine.exited().now_or_never().is_none());
    let (report, killed) = tokio::join!(machine.exited(), machine.kill());
    killed.unwrap();
    assert_eq!(report.status, "killed");
    machine.kill().await.unwrap();
    assert!(matches!(
        machine.connect(PortName::Agent).await,
        Err(EngineError::Gone { .. })
    ));
    assert!(machines[8].exited().now_or_never().is_none());
    let identity = machine.identity();
    assert!(matches!(
        Engine::attach(&engine, place(7), identity).await,
        Err(EngineError::Gone { .. })
    ));
}

#[tokio::test]
async fn the_script_fails_hangs_kills_and_mutes() {
    let root = tempfile::tempdir().unwrap();
    let agent = StubAgent::Process(silkd(root.path(), ""));
    for agent in [StubAgent::InProcess, agent] {
        let engine = engine(root.path(), agent, "fail boot 1,hang boot 2,die 1,mute 2");
        assert!(matches!(boot(&engine, 1).await, Err(EngineError::Scripted(_))));
        assert!(boot(&engine, 1).now_or_never().is_none());

        let dead = boot(&engine, 1).await.unwrap();
        timeout(HANG, dead.exited()).await.unwrap();
        assert!(matches!(
            dead.connect(PortName::Agent).await,
            Err(EngineError::Gone { .. })
        ));
        dead.kill().await.unwrap();

        let mute = boot(&engine, 2).await.unwrap();
        let Ok(Port::Stream(mut port)) = mute.connect(PortName::Agent).await else {
            panic!("a mute port is a stream");
        };
        assert!(port.read_u8().now_or_never().is_none());
        mute.kill().await.unwrap();
        assert_eq!(engine.inventory().unwrap(), []);
    }
}

#[tokio::test]
async fn a_template_of_the_stub_is_a_manifest() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(root.path(), StubAgent::InProcess, "fail clone 2");
    let machine = boot(&engine, 1).await.unwrap();
    machine.pause().await.unwrap();
    let captured = machine.capture(root.path()).await.unwrap();
    let mut manifest = CaptureManifest {
        format: CaptureManifest::FORMAT,
        facts: engine.facts(),
        image: ImageRef::of(&Image::absent()),
        size: place(1).size,
        lane: Lane::None,
        proto_min: 1,
        proto_max: 1,
        warmup: vec!["true".to_owned()],
        ca: vec![],
        created_at: WallTime::from_micros(1),
        ram: captured.ram,
        state: captured.state,
    };
    let capture = Capture::seal(root.path(), &manifest).unwrap();
    assert_eq!(Capture::open(root.path()).unwrap().manifest(), capture.manifest());
    engine.warm_up(&capture);
    Engine::clone_of(&engine, &capture, place(2), None).await.unwrap();
    assert!(matches!(
        Engine::clone_of(&engine, &capture, place(2), None).await,
        Err(EngineError::Scripted(_))
    ));
    manifest.facts.engine = EngineKind::Qemu;
    let foreign = Capture::seal(root.path(), &manifest).unwrap();
    assert_ne!(foreign.digest(), capture.digest());
    assert!(matches!(
        Engine::clone_of(&engine, &foreign, place(2), None).await,
        Err(EngineError::Capture(_))
    ));
    let missing = Capture::open(&root.path().join("nowhere"));
    assert!(matches!(
        missing,
        Err(crate::engine::CaptureError::Missing { .. })
    ));
}
