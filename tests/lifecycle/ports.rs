//! Ports of a guest through the daemon. Guests of the stub engine share our loopback, so that a test is both the program
//! in the guest and its client.

use harness::{Daemon, HANG, Leaks, Setup, process::Process, refused, within};
use sandbox_sdk::{Reason, Sandbox};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};

async fn claimed(daemon: &Daemon) -> Sandbox {
    daemon.client().await.claim("default").await.unwrap()
}

async fn program() -> (TcpListener, u16) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Gives back what comes, and ends when that does, for each of so many connections.
async fn echo(listener: TcpListener, connections: usize) {
    let mut serving = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let (mut socket, _) = listener.accept().await.unwrap();
        serving.spawn(async move {
            let (mut from, mut to) = socket.split();
            tokio::io::copy(&mut from, &mut to).await.unwrap();
            to.shutdown().await.unwrap();
        });
    }
    serving.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f09_each_direction_of_a_forwarded_port_ends_by_itself() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let (listener, port) = program().await;
    // The client ends first: the program sees that, and answers afterwards.
    let mut client = sandbox.forward(port).connect().await.unwrap();
    let (mut program, _) = listener.accept().await.unwrap();
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut text = String::new();
    within(HANG, program.read_to_string(&mut text)).await.unwrap();
    assert_eq!(text, "question");
    program.write_all(&[7; 1_000_000]).await.unwrap();
    drop(program);
    let mut answer = Vec::new();
    within(HANG, client.read_to_end(&mut answer)).await.unwrap();
    assert_eq!(answer, [7; 1_000_000]);
    // The program ends first; what the client says after that arrives whole, though it goes away at once.
    let mut client = sandbox.forward(port).connect().await.unwrap();
    let (mut program, _) = listener.accept().await.unwrap();
    program.shutdown().await.unwrap();
    assert_eq!(within(HANG, client.read(&mut [0])).await.unwrap(), 0);
    let reading = tokio::spawn(async move {
        let mut all = Vec::new();
        program.read_to_end(&mut all).await.map(|_| all)
    });
    within(HANG, async {
        client.write_all(&[8; 1_000_000]).await?;
        client.shutdown().await
    })
    .await
    .unwrap();
    drop(client);
    assert_eq!(within(HANG, reading).await.unwrap().unwrap(), [8; 1_000_000]);
}

#[tokio::test]
async fn f09_refused_and_reset_are_told_apart_from_an_end() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let (listener, port) = program().await;
    let mut client = sandbox.forward(port).connect().await.unwrap();
    let (program, _) = listener.accept().await.unwrap();
    rustix::net::sockopt::set_socket_linger(&program, Some(std::time::Duration::ZERO)).unwrap();
    drop(program);
    let error = within(HANG, client.read_to_end(&mut Vec::new()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let error: sandbox_sdk::Error = error.downcast().unwrap();
    assert!(error.is(Reason::PortReset));
    // And the other way round: a client that goes away without an end is none.
    let client = sandbox.forward(port).connect().await.unwrap();
    let (mut program, _) = listener.accept().await.unwrap();
    drop(client);
    let error = within(HANG, program.read_to_end(&mut Vec::new()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    drop(listener);
    refused(
        sandbox.forward(port).connect().await.map(drop),
        Reason::PortRefused,
    );
}

/// What the daemon and the guest's agent hold.
fn held(daemon: &Daemon) -> (Leaks, usize) {
    let agents = daemon.sandbox_processes();
    (daemon.holds(), agents.into_iter().map(Process::descriptors).sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_forwarded_connections_leave_no_descriptor() {
    let daemon = Setup::stub().warm(1).start().await;
    daemon.until_warm(1).await;
    let sandbox = claimed(&daemon).await;
    daemon.until_warm(1).await;
    let (listener, port) = program().await;
    let forward = sandbox.forward(port).listen(("127.0.0.1", 0)).await.unwrap();
    let local = forward.local_addr();
    let connect = async |n: usize| {
        let mut socket = TcpStream::connect(local).await.unwrap();
        let sent = vec![n.to_le_bytes()[0]; n * 7];
        let (mut from, mut to) = socket.split();
        let mut back = Vec::new();
        let (wrote, read) = tokio::join!(
            async {
                to.write_all(&sent).await?;
                to.shutdown().await
            },
            from.read_to_end(&mut back)
        );
        wrote.unwrap();
        read.unwrap();
        assert!(back == sent);
    };
    let serving = tokio::spawn(echo(listener, 1_001));
    within(HANG, connect(1)).await;
    let before = held(&daemon);
    let own = Process::look(i32::try_from(std::process::id()).unwrap()).unwrap();
    let ours = own.descriptors();
    for round in 0..25 {
        let clients = (0..40).map(|n| connect(round * 40 + n));
        within(HANG, futures_util::future::join_all(clients)).await;
    }
    within(HANG, serving).await.unwrap();
    daemon.holds_no_more_than(before.0).await;
    harness::eventually("the agent and this process hold no more than before", || async {
        let now = (held(&daemon).1, own.descriptors());
        // The program's own listener is gone.
        (now.0 <= before.1 && now.1 <= ours).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forward_listens_for_curl_and_everybody() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let (listener, port) = program().await;
    let serving = tokio::spawn(echo(listener, 3));
    let ctl = daemon.ctl().token(sandbox.token().unwrap().expose());
    let mut child = ctl
        .command(["forward", sandbox.id(), &format!("0:{port}")])
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut told = BufReader::new(child.stdout.take().unwrap());
    within(HANG, told.read_line(&mut line)).await.unwrap();
    let address = line.strip_prefix("Forwarding from ").unwrap();
    let (address, guest) = address.trim().split_once(" -> ").unwrap();
    assert_eq!(guest, port.to_string());
    for n in 0..3 {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(&[n; 100_000]).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut back = Vec::new();
        within(HANG, socket.read_to_end(&mut back)).await.unwrap();
        assert_eq!(back, [n; 100_000]);
    }
    within(HANG, serving).await.unwrap();
    // Its program is gone now: the next one is reset, and told.
    let mut socket = TcpStream::connect(address).await.unwrap();
    within(HANG, socket.read_to_end(&mut Vec::new()))
        .await
        .unwrap_err();
    let mut complaint = String::new();
    let mut complaints = BufReader::new(child.stderr.take().unwrap());
    within(HANG, complaints.read_line(&mut complaint)).await.unwrap();
    assert!(complaint.contains("PORT_REFUSED"), "{complaint}");
    child.kill().await.unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}
