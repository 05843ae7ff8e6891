//! Secrets of the configuration: where they may come from, and what else of the daemon could give them away.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    sync::{Arc, Mutex},
};

use harness::{Daemon, HANG, Setup, World, refused, within};
use sandbox_sdk::{
    Reason,
    v1::{EgressExplainRequest, egress_watch_reply::Event},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

type Heads = Arc<Mutex<Vec<u8>>>;

/// Answers each connection's one request, and keeps its head.
async fn keeps(mut stream: TcpStream, heads: Heads) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    heads.lock().unwrap().extend(head);
    drop(
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes")
            .await,
    );
}

async fn world(heads: &Heads) -> World {
    let heads = Arc::clone(heads);
    World::with_origin(move |stream| keeps(stream, Arc::clone(&heads))).await
}

/// Configuration: requests to `allowed.test` are given the secret `s`, which is in this file.
fn config(world: &World, file: &Path) -> String {
    let rules = format!(
        "[{{ id = \"t\", host = [\"allowed.test\"], ports = [{}], secret = \"s\", cleartext_secret = true }}]",
        world.port()
    );
    format!(
        "{}[egress.secret.s]\nheader = \"authorization\"\nprefix = \"Bearer \"\nvalue = {{ file = {file:?} }}\n\
         hosts = [\"allowed.test\"]\n",
        world.config_with(&rules)
    )
}

fn write(file: &Path, value: &str, mode: u32) {
    // One that is a link, or a pipe, is replaced and not written to.
    fs::remove_file(file).ok();
    fs::write(file, value).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
}

/// What a guest is answered.
async fn get(sandbox: &sandbox_sdk::Sandbox, world: &World) -> String {
    let proxy = sandbox.exec(["printenv", "http_proxy"]).output().await.unwrap();
    let proxy = proxy
        .stdout_text()
        .trim()
        .trim_start_matches("http://")
        .to_owned();
    within(HANG, async {
        let mut stream = TcpStream::connect(proxy).await.unwrap();
        let request = format!(
            "GET http://allowed.test:{}/ HTTP/1.1\r\nhost: x\r\nauthorization: mine\r\n\r\n",
            world.port()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    })
    .await
}

#[tokio::test]
async fn secret_sources_are_strict() {
    let heads = Heads::default();
    let world = world(&heads).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let taken = || String::from_utf8(std::mem::take(&mut *heads.lock().unwrap())).unwrap();
    write(&file, "hush-one\n", 0o644);
    let daemon = Setup::stub().warm(1).config(&config(&world, &file)).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();

    // At the start a fault denies what needs the secret, and a reload with a fault changes nothing.
    let answer = get(&sandbox, &world).await;
    assert!(
        answer.starts_with("HTTP/1.1 503 secret_unavailable\r\n"),
        "{answer}"
    );
    assert_eq!(taken(), "", "no placeholder goes out");
    assert!(daemon.log().contains("mode 0644"), "{}", daemon.log());
    let error = refused(client.node().reload().await, Reason::ReloadRefused);
    assert!(error.to_string().contains("egress.secret.s"), "{error}");

    write(&file, "hush-two\n", 0o600);
    assert_eq!(client.node().reload().await.unwrap().changed, ["egress.secret.s"]);
    assert!(get(&sandbox, &world).await.starts_with("HTTP/1.1 200 OK\r\n"));
    let head = taken();
    assert!(
        head.contains("authorization: Bearer hush-two\r\n") && !head.contains("mine"),
        "{head}"
    );
    assert_eq!(client.node().reload().await.unwrap().changed, [] as [String; 0]);

    // What was read stays in force while what lies there is no secret's place.
    let elsewhere = folder.path().join("elsewhere");
    write(&elsewhere, "hush-three", 0o600);
    let spoil: [(&str, &dyn Fn()); 5] = [
        ("mode", &|| write(&file, "hush-three", 0o640)),
        ("link", &|| {
            fs::remove_file(&file).unwrap();
            symlink(&elsewhere, &file).unwrap();
        }),
        ("pipe", &|| {
            fs::remove_file(&file).unwrap();
            let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from(0o600));
            rustix::fs::mknodat(rustix::fs::CWD, &file, fifo, mode, 0).unwrap();
        }),
        ("empty", &|| write(&file, "", 0o600)),
        ("gone", &|| fs::remove_file(&file).unwrap()),
    ];
    for (what, spoil) in spoil {
        spoil();
        let error = within(HANG, client.node().reload()).await;
        let error = refused(error, Reason::ReloadRefused).to_string();
        assert!(
            error.contains(&*file.to_string_lossy()) || error.contains("header text"),
            "{what}: {error}"
        );
        assert!(
            get(&sandbox, &world).await.starts_with("HTTP/1.1 200 OK\r\n"),
            "{what}"
        );
        assert!(taken().contains("Bearer hush-two\r\n"), "{what}");
    }
    write(&file, "hush-four", 0o400);
    client.node().reload().await.unwrap();
    assert!(get(&sandbox, &world).await.starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(taken().contains("Bearer hush-four\r\n"));
    assert!(!daemon.log().contains("hush"), "{}", daemon.log());
}

#[tokio::test]
async fn secrets_are_told_by_their_names() {
    let heads = Heads::default();
    let world = world(&heads).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    write(&file, "hush", 0o600);
    let daemon = Setup::stub().warm(1).config(&config(&world, &file)).start().await;
    let client = daemon.client().await;
    let mut tail = client.egress().watch("", None).await.unwrap();
    let sandbox = client.claim("default").await.unwrap();
    assert!(get(&sandbox, &world).await.starts_with("HTTP/1.1 200 OK\r\n"));
    let Some(Event::Decision(decision)) = within(HANG, tail.next()).await.unwrap().unwrap().event else {
        panic!("a decision");
    };
    assert_eq!((decision.secret.as_str(), decision.vetted), ("s", true));
    let url = format!("http://allowed.test:{}/", world.port());
    let question = EgressExplainRequest {
        sandbox: sandbox.id().to_string(),
        target: url.clone(),
        resolve: true,
        ..EgressExplainRequest::default()
    };
    let told = client.egress().explain(question).await.unwrap();
    assert_eq!((told.allowed, &*told.secret, told.vetted), (true, "s", true));
    let told = daemon
        .ctl()
        .json(["egress", "explain", "--sandbox", sandbox.id(), &url])
        .await;
    assert_eq!((&told["secret"], &told["upstream"]), (&"s".into(), &"".into()));
}

/// What the kernel says of a process.
fn of(process: harness::process::Process, what: &str) -> String {
    let bytes = fs::read(format!("/proc/{}/{what}", process.pid)).unwrap();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn memory_and_environment_stay_with_the_daemon() {
    let wrapper = ["env", "THE_SECRET=hush"];
    let daemon: Daemon = Setup::stub().warm(1).wrapped(&wrapper).start().await;
    let client = daemon.client().await;
    let _claimed = client.claim("default").await.unwrap();
    let own = daemon.process();
    assert!(of(own, "environ").contains("THE_SECRET=hush"), "it was given one");
    let started = daemon.sandbox_processes();
    assert!(!started.is_empty());
    for process in started.iter().chain([&own]) {
        let limits = of(*process, "limits");
        let cores = limits
            .lines()
            .find(|line| line.starts_with("Max core file size"))
            .unwrap();
        let words: Vec<&str> = cores.split_whitespace().collect();
        assert_eq!(words[4..6], ["0", "0"], "{cores}");
        // Nor where the kernel pipes them to a program.
        assert_eq!(of(*process, "coredump_filter").trim(), "00000000");
    }
    for process in started {
        let environment = of(process, "environ");
        let names: Vec<&str> = environment
            .split('\0')
            .filter_map(|variable| variable.split_once('='))
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["PATH"], "{environment}");
    }
}
