//! Processes of a silkd in test mode, over its link: what is left of them in its memory, and what becomes of them when
//! the sandbox sleeps.
#![expect(clippy::panic, clippy::unwrap_used, reason = "tests say what holds")]
#![expect(clippy::large_futures, reason = "no code of a service")]
#![expect(clippy::disallowed_methods, reason = "tests own their tasks")]

mod common;
#[path = "processes/sleep.rs"]
mod sleep;

use std::collections::BTreeSet;

use common::{Guest, Host, reason, within};
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use sandbox_protocol::v1::{
    self, AgentForgetRequest, AgentPsRequest, AgentSpawnRequest, AgentWaitRequest, AttachIn, AttachStart,
    ControlEventsRequest, ExecIn, ExecOut, ExecStart, Exit, ProcessKind, ProcessRef, ProcessState, attach_in,
    attach_out, control_event::Event, control_quiesce_request::Mode as Rest, control_renew_request::Mode,
    exec_in, exec_out, exit::How, process_ref,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

fn command(argv: &[&str]) -> Option<v1::Command> {
    Some(v1::Command {
        argv: argv.iter().map(|arg| (*arg).to_owned().into()).collect(),
        ..v1::Command::default()
    })
}

fn by_id(id: u64) -> Option<ProcessRef> {
    Some(ProcessRef {
        which: Some(process_ref::Which::Id(id)),
    })
}

/// A program that is waited for, with its input.
struct Foreground {
    id: u64,
    input: mpsc::Sender<ExecIn>,
    output: tonic::Streaming<ExecOut>,
}

/// A script with input.
fn start(script: &str) -> ExecStart {
    ExecStart {
        command: command(&["sh", "-c", script]),
        stdin: true,
        ..ExecStart::default()
    }
}

/// Starts a program and reads its first line.
async fn foreground(host: &mut Host, start: ExecStart, line: &str) -> Foreground {
    let (input, messages) = mpsc::channel(4);
    let first = ExecIn {
        m: Some(exec_in::M::Start(start)),
    };
    input.send(first).await.unwrap();
    let output = within(host.agent.exec(ReceiverStream::new(messages)))
        .await
        .unwrap();
    let mut output = output.into_inner();
    let mut next = async || within(output.message()).await.unwrap().unwrap().m.unwrap();
    let exec_out::M::Started(started) = next().await else {
        panic!("not started");
    };
    let mut said = Vec::new();
    while said.len() < line.len() {
        let exec_out::M::Stdout(chunk) = next().await else {
            panic!("silent");
        };
        said.extend_from_slice(&chunk.data);
    }
    assert_eq!(said, line.as_bytes());
    Foreground {
        id: started.id,
        input,
        output,
    }
}

/// Attaches, gives it a line, and reads to its end.
async fn finish(host: &mut Host, id: u64, line: &'static str) -> (Vec<u8>, Exit) {
    let start = AttachStart {
        process: by_id(id),
        input: true,
        ..AttachStart::default()
    };
    let messages = [attach_in::M::Start(start), attach_in::M::Stdin(line.into())];
    let messages = messages.map(|m| AttachIn { m: Some(m) });
    let output = within(host.agent.attach(tokio_stream::iter(messages)))
        .await
        .unwrap();
    let mut output = output.into_inner();
    let mut said = Vec::new();
    loop {
        match within(output.message()).await.unwrap().unwrap().m.unwrap() {
            attach_out::M::Attached(_) => {}
            attach_out::M::Chunk(chunk) => said.extend_from_slice(&chunk.data),
            attach_out::M::Gap(gap) => panic!("{gap:?}"),
            attach_out::M::Exit(exit) => return (said, exit),
        }
    }
}

async fn rows(host: &mut Host) -> Vec<v1::Process> {
    let request = AgentPsRequest { running: false };
    let mut batches = within(host.agent.ps(request)).await.unwrap().into_inner();
    let mut rows = Vec::new();
    while let Some(batch) = within(batches.message()).await.unwrap() {
        rows.extend(batch.processes);
    }
    rows
}

/// Resident memory of the agent, in KiB.
fn resident(guest: &Guest) -> u64 {
    let path = format!("/proc/{}/smaps_rollup", guest.child.id());
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

async fn spawn_true(host: &mut Host, count: usize) {
    let mut last = 0;
    for _ in 0..count {
        let request = AgentSpawnRequest {
            command: command(&["true"]),
            ..AgentSpawnRequest::default()
        };
        let spawned = within(host.agent.spawn(request)).await.unwrap().into_inner();
        let wait = AgentWaitRequest {
            process: by_id(spawned.id),
            timeout_ms: 60_000,
        };
        let exit = within(host.agent.wait(wait))
            .await
            .unwrap()
            .into_inner()
            .exit
            .unwrap();
        assert_eq!(exit.how, Some(How::Code(0)));
        assert!(spawned.id > last);
        last = spawned.id;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn spawn_1000_true_rss() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    // Whatever is allocated once.
    spawn_true(&mut host, 100).await;
    let before = resident(&guest);
    spawn_true(&mut host, 1000).await;
    let after = resident(&guest);
    assert!(after <= before + 400, "{before} -> {after} KiB");
    let rows = rows(&mut host).await;
    assert_eq!(rows.len(), 1100);
    assert!(rows.iter().all(|row| row.kind() == ProcessKind::Detached));
    assert!(
        rows.iter()
            .filter(|row| row.state() == ProcessState::Exited)
            .count()
            >= 1099
    );
    let info = host.info().await;
    assert_eq!((info.processes, info.log_bytes), (0, 0));
    assert!(info.log_budget > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_foreground_program_is_there_after_a_wake() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let mut call = foreground(
        &mut host,
        start("echo ready; read x; echo got $x; exit 3"),
        "ready\n",
    )
    .await;
    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    let ended = loop {
        match within(call.output.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended well"),
            Err(status) => break status,
        }
    };
    assert_eq!(reason(&ended), "SANDBOX_HIBERNATING");
    within(host.renew(Mode::Wake, "w")).await.unwrap();
    let row = rows(&mut host).await.remove(0);
    assert_eq!((row.id, row.kind()), (call.id, ProcessKind::Detached));
    let (said, exit) = finish(&mut host, call.id, "after\n").await;
    assert_eq!((&*said, exit.how), (&b"got after\n"[..], Some(How::Code(3))));
    drop(call.input);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_link_lost_at_rest_detaches() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let call = foreground(&mut host, start("echo ready; read x; echo got $x"), "ready\n").await;
    within(host.quiesce(Rest::Checkpoint)).await.unwrap();
    // As a clone of it sees it: nobody said a word, and the next connection begins.
    host.cut().await;
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Clone, "c")).await.unwrap();
    let (said, exit) = finish(&mut host, call.id, "cloned\n").await;
    assert_eq!((&*said, exit.how), (&b"got cloned\n"[..], Some(How::Code(0))));
    // Anywhere else its program goes with its caller.
    let call = foreground(&mut host, start("echo ready; exec sleep 1000"), "ready\n").await;
    let id = call.id;
    host.cut().await;
    let mut host = Host::connect(&guest.socket()).await;
    while rows(&mut host).await.iter().any(|row| row.id == id) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_template_holds_no_exited_process() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    spawn_true(&mut host, 3).await;
    let server = AgentSpawnRequest {
        command: command(&["sleep", "1000"]),
        name: "server".into(),
        ..AgentSpawnRequest::default()
    };
    let server = within(host.agent.spawn(server)).await.unwrap().into_inner();
    within(host.quiesce(Rest::Template)).await.unwrap();
    within(host.renew(Mode::Clone, "c")).await.unwrap();
    let left = rows(&mut host).await;
    assert_eq!(left.iter().map(|row| row.id).collect::<Vec<_>>(), [server.id]);
    let forget = AgentForgetRequest {
        process: by_id(server.id),
    };
    let refused = within(host.agent.forget(forget)).await.unwrap_err();
    assert_eq!(reason(&refused), "STILL_RUNNING");
}

/// Starts a program that stays, with its input open; its start may be refused.
async fn hog(host: &mut Host) -> Result<(mpsc::Sender<ExecIn>, tonic::Streaming<ExecOut>), tonic::Status> {
    let (input, messages) = mpsc::channel(1);
    let start = ExecStart {
        command: command(&["sleep", "1000"]),
        stdin: true,
        ..ExecStart::default()
    };
    let first = ExecIn {
        m: Some(exec_in::M::Start(start)),
    };
    input.send(first).await.unwrap();
    let output = within(host.agent.exec(ReceiverStream::new(messages))).await?;
    let mut output = output.into_inner();
    let started = within(output.message()).await?.unwrap().m.unwrap();
    assert!(matches!(started, exec_out::M::Started(_)), "{started:?}");
    Ok((input, output))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn fd_hog_is_reported() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "hog")).await.unwrap();
    let mut news = within(host.control.events(ControlEventsRequest {}))
        .await
        .unwrap()
        .into_inner();
    drop(hog(&mut host).await.unwrap());
    all_gone(&mut host).await;
    let told = |info: v1::AgentInfoReply| {
        let told = info.conditions.into_iter().find(|c| c.name == "FD_PRESSURE");
        told.map(|condition| condition.count)
    };
    assert_eq!(told(within(host.info()).await), None);
    // The same limit, only nearer: up to the real one there are not processes enough.
    let most = descriptors(&guest).len() as u64 + 100;
    limit_descriptors(&guest, most);

    // Nobody looks until there is none left for another program, and then not even one to look with.
    let mut hogs = Vec::new();
    let refused = loop {
        match hog(&mut host).await {
            Ok(another) => hogs.push(another),
            Err(status) => break status,
        }
        assert!(hogs.len() < 100, "each takes some");
    };
    assert_eq!(reason(&refused), "FD_LIMIT", "{refused:?}");
    let taken = descriptors(&guest);
    let first_free = (0..).find(|number| !taken.contains(number)).unwrap();
    limit_descriptors(&guest, first_free);
    let info = within(host.info()).await;
    assert_eq!(info.processes as usize, hogs.len());
    assert_eq!(told(info), Some(1));
    loop {
        let event = within(news.message()).await.unwrap().unwrap().event;
        if let Some(Event::Condition(condition)) = event
            && condition.name == "FD_PRESSURE"
        {
            break;
        }
    }
    // It holds, and is no news; and the agent goes on answering.
    assert_eq!(reason(&hog(&mut host).await.unwrap_err()), "FD_LIMIT");
    assert_eq!(told(within(host.info()).await), Some(1));
    assert_eq!(rows(&mut host).await.len(), hogs.len());

    // What is cancelled ends, though nothing can be opened to end it, and makes room.
    drop(hogs);
    all_gone(&mut host).await;
    limit_descriptors(&guest, most);
    drop(hog(&mut host).await.unwrap());
    assert_eq!(told(within(host.info()).await), Some(1), "it is not forgotten");
}

/// Waits until no program is left.
async fn all_gone(host: &mut Host) {
    within(async { while host.info().await.processes > 0 {} }).await;
}

/// Numbers of the agent's descriptors.
fn descriptors(guest: &Guest) -> BTreeSet<u64> {
    let dir = std::fs::read_dir(format!("/proc/{}/fd", guest.child.id())).unwrap();
    let names = dir.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.map(|name| name.parse().unwrap()).collect()
}

/// From now on the agent gets no descriptor with this number or a higher one.
fn limit_descriptors(guest: &Guest, most: u64) {
    let pid = rustix::process::Pid::from_child(&guest.child);
    let limit = Rlimit {
        current: Some(most),
        ..getrlimit(Resource::Nofile)
    };
    prlimit(Some(pid), Resource::Nofile, limit).unwrap();
}
