//! Control, in test mode: gate, renewal, quiesce, claim, clock, events and the end.
#![expect(clippy::disallowed_methods, reason = "tests own their tasks and files")]
#![expect(clippy::large_futures, reason = "a test holds few of them")]

// On threads of their own, so that a guest that ends is answered while the test waits for it.
mod common;

use std::os::unix::process::ExitStatusExt as _;

use bytes::Bytes;
use common::{Guest, Host, PATIENCE, Running, reason, refusing, renewal, within};
use futures_util::StreamExt as _;
use sandbox_protocol::v1::{
    AgentState, ControlAdoptRequest, ControlClockRequest, ControlEventsRequest, ControlPowerOffRequest,
    ControlRenewRequest, ControlResumeRequest, ControlSetClaimRequest, DoorsSaid, EnvVar,
    control_event::Event, control_quiesce_request::Mode as Rest, control_renew_request::Mode,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn gate_shut_until_renewed() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    let refused = host.exec(&["true"]).await.err().unwrap();
    assert_eq!(reason(&refused), "NOT_READY");
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    assert_eq!(host.info().await.state, i32::from(AgentState::Ready));
    assert_eq!(host.exec(&["true"]).await.unwrap().code().await, 0);

    within(host.quiesce(Rest::Template)).await.unwrap();
    // A clone's host meets it so, and can run nothing until its own renewal is through.
    let mut host = within(Host::connect(&guest.socket())).await;
    assert_eq!(host.hello.state, i32::from(AgentState::Quiesced));
    let refused = host.exec(&["true"]).await.err().unwrap();
    assert_eq!(reason(&refused), "NOT_READY");
    within(host.renew(Mode::Clone, "b")).await.unwrap();
    assert_eq!(host.exec(&["true"]).await.unwrap().code().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn inv_14_clones_differ() {
    let mut seen = std::collections::HashSet::new();
    let mut ports = std::collections::HashSet::new();
    for id in ["a", "b", "c"] {
        let guest = Guest::start();
        let mut host = Host::connect(&guest.socket()).await;
        within(host.renew(Mode::Clone, id)).await.unwrap();
        for file in [
            "etc/machine-id",
            "run/silkd/boot_id",
            "run/sandbox/id",
            "etc/hosts",
        ] {
            assert!(seen.insert(guest.read(file)), "{file} twice");
        }
        // What would have changed this machine is told, and was not done.
        let record = guest.read("record");
        let lines: Vec<_> = record.lines().collect();
        assert_eq!(lines[0], "entropy 32 bytes");
        assert!(lines[1].starts_with("clock "));
        assert_eq!(lines[2], format!("hostname host-{id}"));
        assert!(lines[3].starts_with("ports "), "{record}");
        ports.insert(lines[3].to_owned());
    }
    // Two may have drawn the same of some 28,000.
    assert!(ports.len() > 1, "{ports:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn renew_twice_same_id_is_one() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    let first = within(host.renew(Mode::Clone, "a")).await.unwrap();
    let id = guest.read("etc/machine-id");
    let again = within(host.renew(Mode::Clone, "a")).await.unwrap();
    assert_eq!((first.generation, again.generation), (1, 1));
    assert_eq!(guest.read("etc/machine-id"), id);
    // Another one on a guest in use is refused: its programs would see two lives.
    let refused = within(host.renew(Mode::Clone, "b")).await.unwrap_err();
    assert_eq!(reason(&refused), "NOT_READY");
    within(host.quiesce(Rest::Template)).await.unwrap();
    let second = within(host.renew(Mode::Clone, "b")).await.unwrap();
    assert_eq!(second.generation, 2);
    assert_ne!(guest.read("etc/machine-id"), id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_renewal_tells_what_the_doors_say_if_it_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let mut with_doors = std::process::Command::new("sh");
    let script = "exec \"$0\" \"$@\" --doors 127.0.0.1:0,127.0.0.1:0";
    with_doors.args(["-c", script, env!("CARGO_BIN_EXE_silkd")]);
    let guest = Guest::start_by(with_doors, dir);
    let mut host = Host::connect(&guest.socket()).await;
    let unasked = within(host.renew(Mode::Clone, "a")).await.unwrap();
    assert_eq!(unasked.doors, None);
    let doors = tokio::spawn(refusing(guest.dir.path().join("s.egress")));
    within(host.quiesce(Rest::Template)).await.unwrap();
    let ask = |id| ControlRenewRequest {
        ask_doors: true,
        ..renewal(Mode::Clone, id)
    };
    let renewed = within(host.control.renew(ask("b"))).await.unwrap().into_inner();
    let refused = DoorsSaid {
        http: "HTTP/1.1 403 not_armed\r\n\r\n".into(),
        socks5: Bytes::from_static(&[5, 0xff]),
    };
    assert_eq!(renewed.doors, Some(refused.clone()));
    // The same order has the same answer, though the doors are gone.
    doors.abort();
    let again = within(host.control.renew(ask("b"))).await.unwrap().into_inner();
    assert_eq!((again.generation, again.doors), (2, Some(refused)));

    // A guest without doors has nothing to tell.
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    let renewed = within(host.control.renew(ask("c"))).await.unwrap().into_inner();
    assert_eq!(renewed.doors, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_wake_keeps_identity_and_claim() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    let refused = within(host.renew(Mode::Wake, "w")).await.unwrap_err();
    assert_eq!(reason(&refused), "NOT_READY");
    within(host.renew(Mode::Clone, "a")).await.unwrap();
    let claim = ControlSetClaimRequest {
        env: vec![EnvVar {
            key: "CLAIMED".into(),
            value: "yes".into(),
        }],
        default_user: "".into(),
    };
    within(host.control.set_claim(claim.clone())).await.unwrap();
    // The same again is the same; another is refused.
    within(host.control.set_claim(claim.clone())).await.unwrap();
    let refused = within(host.control.set_claim(ControlSetClaimRequest::default()))
        .await
        .unwrap_err();
    assert_eq!(reason(&refused), "FIELD_INVALID");
    let said = |running: Running| async move { running.output().await.0 };
    let show = ["sh", "-c", "echo ${CLAIMED-no}"];
    assert_eq!(said(host.exec(&show).await.unwrap()).await, "yes\n");

    let id = guest.read("etc/machine-id");
    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    let woken = within(host.renew(Mode::Wake, "w")).await.unwrap();
    assert_eq!(woken.generation, 2);
    assert_eq!(guest.read("etc/machine-id"), id);
    assert_eq!(said(host.exec(&show).await.unwrap()).await, "yes\n");

    within(host.quiesce(Rest::Template)).await.unwrap();
    within(host.renew(Mode::Clone, "c")).await.unwrap();
    assert_eq!(said(host.exec(&show).await.unwrap()).await, "no\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn template_quiesce_refuses_open_exec() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let open = host.exec(&["sleep", "1000"]).await.unwrap();
    let refused = within(host.quiesce(Rest::Template)).await.unwrap_err();
    assert_eq!(reason(&refused), "QUIESCE_BUSY");
    assert!(refused.message().contains("sleep"), "{refused}");
    // As before: the gate is open, the program runs.
    assert_eq!(host.info().await.state, i32::from(AgentState::Ready));
    assert_eq!(host.info().await.processes, 1);
    assert_eq!(host.exec(&["true"]).await.unwrap().code().await, 0);
    drop(open);
    // Its end is seen by a later attempt, however soon that comes.
    let mut tries = 0;
    while let Err(status) = within(host.quiesce(Rest::Template)).await {
        assert_eq!(reason(&status), "QUIESCE_BUSY");
        tries += 1;
        assert!(tries < 10_000);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hibernation_ends_streams_with_its_reason() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let open = host.exec(&["sleep", "1000"]).await.unwrap();
    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    assert_eq!(reason(&open.failure().await), "SANDBOX_HIBERNATING");
    within(host.renew(Mode::Wake, "w")).await.unwrap();
    assert_eq!(host.exec(&["true"]).await.unwrap().code().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_checkpoints_source_goes_on_after_resume() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let mut open = host.exec(&["cat"]).await.unwrap();
    within(host.quiesce(Rest::Checkpoint)).await.unwrap();
    // Twice is once.
    within(host.quiesce(Rest::Checkpoint)).await.unwrap();
    within(host.control.resume(ControlResumeRequest {}))
        .await
        .unwrap();
    within(host.control.resume(ControlResumeRequest {}))
        .await
        .unwrap();
    open.write(b"through the rest").await;
    open.close();
    assert_eq!(open.output().await.0, "through the rest");
    assert_eq!(host.info().await.generation, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn generation_file_wakes_a_watcher() {
    use rustix::fs::inotify;
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let held = std::fs::File::open(guest.file("run/sandbox/generation.bin")).unwrap();
    let word = || {
        let mut word = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&held, &mut word, 0).unwrap();
        u64::from_le_bytes(word)
    };
    assert_eq!(
        (word(), guest.read("run/sandbox/generation")),
        (1, "1\n".to_owned())
    );
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    let path = guest.file("run/sandbox/generation");
    inotify::add_watch(&watch, &path, inotify::WatchFlags::MODIFY).unwrap();
    let woken = tokio::task::spawn_blocking(move || {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
        inotify::Reader::new(&watch, &mut buffer)
            .next()
            .map(|event| event.events())
    });
    within(host.quiesce(Rest::Template)).await.unwrap();
    within(host.renew(Mode::Clone, "b")).await.unwrap();
    assert_eq!(within(woken).await.unwrap().unwrap(), inotify::ReadFlags::MODIFY);
    assert_eq!(
        (word(), guest.read("run/sandbox/generation")),
        (2, "2\n".to_owned())
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hook_failure_fails_the_clone() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    guest.hook(
        "10-good",
        "#!/bin/sh\necho \"$SANDBOX_ID $SANDBOX_GENERATION $SANDBOX_RENEWAL\" >\"$0.said\"\n",
    );
    guest.hook("20-bad", "#!/bin/sh\necho no key for you\nexit 3\n");
    let failed = within(host.renew(Mode::Clone, "a")).await.unwrap_err();
    assert_eq!(reason(&failed), "RENEW_FAILED");
    for part in ["20-bad", "exit code 3", "no key for you"] {
        assert!(failed.message().contains(part), "{failed}");
    }
    assert_eq!(guest.read("etc/sandbox/renew.d/10-good.said"), "sb_a 1 clone\n");
    // Nothing of it is usable.
    let refused = host.exec(&["true"]).await.err().unwrap();
    assert_eq!(reason(&refused), "NOT_READY");
    assert_eq!(host.info().await.state, i32::from(AgentState::Fresh));
    // A repetition does it again; that it failed is not kept as an answer.
    guest.hook("20-bad", "#!/bin/sh\n");
    within(host.renew(Mode::Clone, "a")).await.unwrap();
    assert_eq!(guest.read("etc/sandbox/renew.d/10-good.said"), "sb_a 2 clone\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_renewal_outlives_the_connection_that_asked_for_it() {
    let guest = Guest::start();
    let fifo = guest.dir.path().join("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    guest.hook(
        "10-wait",
        &format!("#!/bin/sh\necho begun >{0}\nread x <{0}\n", fifo.display()),
    );
    let mut host = Host::connect(&guest.socket()).await;
    let order = tokio::spawn(async move { host.renew(Mode::Clone, "a").await });
    let path = fifo.clone();
    let begun = tokio::task::spawn_blocking(move || std::fs::read_to_string(path));
    assert_eq!(within(begun).await.unwrap().unwrap(), "begun\n");
    order.abort();
    let mut host = within(Host::connect(&guest.socket())).await;
    assert_eq!(host.hello.state, i32::from(AgentState::Renewing));
    let adopted = within(host.control.adopt(ControlAdoptRequest {}))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (adopted.state, adopted.generation),
        (i32::from(AgentState::Renewing), 1)
    );
    assert_eq!(adopted.sandbox_id, "sb_a");
    let go = tokio::task::spawn_blocking(move || std::fs::write(fifo, "go\n"));
    within(go).await.unwrap().unwrap();
    assert_eq!(within(host.renew(Mode::Clone, "a")).await.unwrap().generation, 1);
    assert_eq!(host.info().await.state, i32::from(AgentState::Ready));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_clock_is_stepped_when_it_is_off() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    let mut order = renewal(Mode::Boot, "a");
    let past = prost_types::Timestamp {
        seconds: 1_000_000_000,
        nanos: 0,
    };
    order.host_time = Some(past);
    let renewed = within(host.control.renew(order)).await.unwrap().into_inner();
    let shown = renewed.guest_time.unwrap().seconds;
    let bound = i64::try_from(PATIENCE.as_secs()).unwrap();
    assert!((past.seconds..past.seconds + bound).contains(&shown));
    let to = ControlClockRequest {
        host_time: renewal(Mode::Boot, "x").host_time,
    };
    assert!(within(host.control.clock(to)).await.unwrap().into_inner().stepped);
    let now = ControlClockRequest {
        host_time: host.info().await.guest_time,
    };
    // Only a machine that stood still for so long steps again.
    let again = within(host.control.clock(now)).await.unwrap().into_inner();
    assert!(again.guest_time.unwrap().seconds >= to_seconds(&to));
}

fn to_seconds(request: &ControlClockRequest) -> i64 {
    request.host_time.map_or(0, |at| at.seconds)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn events_tell_log_lines_and_end_with_the_agent() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    let mut events = within(host.control.events(ControlEventsRequest {}))
        .await
        .unwrap()
        .into_inner();
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    loop {
        let event = within(events.next()).await.unwrap().unwrap().event.unwrap();
        if let Event::LogLine(line) = event {
            assert_eq!(&line[..], b"renewed (boot), generation 1");
            break;
        }
    }
    guest.signal(rustix::process::Signal::TERM);
    while let Some(event) = within(events.next()).await {
        drop(event.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sigterm_ends_programs_and_leaves_no_socket() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let open = host.exec(&["sleep", "1000"]).await.unwrap();
    guest.signal(rustix::process::Signal::TERM);
    let (status, said, dir) = tokio::task::spawn_blocking(|| guest.join()).await.unwrap();
    assert_eq!((status.code(), status.signal()), (Some(0), None), "{said}");
    assert!(said.contains("stopping: SIGTERM"), "{said}");
    drop(open);
    assert!(!dir.path().join("s").exists());
    assert!(!dir.path().join("s.egress").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn power_off_is_answered_then_done() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.control.power_off(ControlPowerOffRequest {}))
        .await
        .unwrap();
    within(host.ended).await.unwrap();
    let (status, said, dir) = tokio::task::spawn_blocking(|| guest.join()).await.unwrap();
    assert_eq!(status.code(), Some(0), "{said}");
    let record = std::fs::read_to_string(dir.path().join("s.d/record")).unwrap();
    assert_eq!(record, "power off\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn bad_orders_are_refused_and_change_nothing() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    let mut order = renewal(Mode::Boot, "a");
    order.seed = vec![1; 5].into();
    let refused = within(host.control.renew(order)).await.unwrap_err();
    assert_eq!(reason(&refused), "FIELD_INVALID");
    let refused = within(host.quiesce(Rest::Template)).await.unwrap_err();
    assert_eq!(reason(&refused), "NOT_READY");
    let refused = within(host.control.resume(ControlResumeRequest {}))
        .await
        .unwrap_err();
    assert_eq!(reason(&refused), "NOT_READY");
    let refused = within(host.control.set_claim(ControlSetClaimRequest::default()))
        .await
        .unwrap_err();
    assert_eq!(reason(&refused), "NOT_READY");
    assert_eq!(host.info().await.state, i32::from(AgentState::Fresh));
    assert!(!guest.file("record").exists() || guest.read("record").is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_lost_link_ends_its_programs() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let open = host.exec(&["sleep", "1000"]).await.unwrap();
    assert_eq!(host.info().await.processes, 1);
    // Without a word on the old connection: the new one's BREAK ends it.
    let mut new = within(Host::connect(&guest.socket())).await;
    within(async { while new.info().await.processes > 0 {} }).await;
    drop(open);
}
