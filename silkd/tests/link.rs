//! The link, in test mode: readiness, reconnects, and what of an old connection never reaches a new one.
#![expect(clippy::large_futures, reason = "a test holds few of them")]

// On threads of their own, so that a guest that ends is answered while the test waits for it.
mod common;

use common::{Guest, Host, fresh_nonce, read_hello, reason, within};
use sandbox_protocol::{
    limits::{PROTO_MAX, PROTO_MIN},
    link::encode_break,
    v1::{
        AgentState, ControlEventsRequest, control_quiesce_request::Mode as Rest, control_renew_request::Mode,
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hello_arrives_without_polling() {
    let guest = Guest::start();
    let mut stream = UnixStream::connect(guest.socket()).await.unwrap();
    let nonce = fresh_nonce();
    stream.write_all(&encode_break(nonce)).await.unwrap();
    let (hello, _) = read_hello(&mut stream, nonce).await;
    assert_eq!((hello.proto_min, hello.proto_max), (PROTO_MIN, PROTO_MAX));
    assert_eq!(hello.state, i32::from(AgentState::Fresh));
    assert_eq!(hello.version, env!("CARGO_PKG_VERSION"));
    // Before anybody said BREAK nothing is answered: the bytes of a former host are nobody's.
    let mut mute = UnixStream::connect(guest.socket()).await.unwrap();
    mute.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let nonce = fresh_nonce();
    mute.write_all(&encode_break(nonce)).await.unwrap();
    let mut first = [0; 8];
    within(mute.read_exact(&mut first)).await.unwrap();
    assert_eq!(&first, b"SILKHELO");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn link_survives_20_fast_reopens() {
    let guest = Guest::start();
    for round in 0..20 {
        let mut host = within(Host::connect(&guest.socket())).await;
        assert_eq!(within(host.info()).await.generation, 0, "round {round}");
    }
    // And 20 that the guest cannot see, as most are on a virtio port: nothing is closed, the bytes run on.
    let port = std::os::unix::net::UnixStream::connect(guest.socket()).unwrap();
    port.set_nonblocking(true).unwrap();
    for round in 0..20 {
        let stream = UnixStream::from_std(port.try_clone().unwrap()).unwrap();
        let mut host = within(Host::over(stream, fresh_nonce())).await;
        assert_eq!(within(host.info()).await.generation, 0, "round {round}");
        host.cut().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stale_bytes_never_reach_a_new_connection() {
    let guest = Guest::start();
    let mut stream = UnixStream::connect(guest.socket()).await.unwrap();
    for round in 0_u8..20 {
        // A connection that is cut in the middle of a frame, with answers that nobody read.
        let nonce = fresh_nonce();
        stream.write_all(&encode_break(nonce)).await.unwrap();
        read_hello(&mut stream, nonce).await;
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .unwrap();
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap(); // SETTINGS
        for ping in 0..50 {
            let frame = [0, 0, 8, 6, 0, 0, 0, 0, 0, round, ping, 0, 0, 0, 0, 0, 0];
            stream.write_all(&frame).await.unwrap();
        }
        stream
            .write_all(&[0, 0x3f, 0xff, 0, 0, 0, 0, 0, 1])
            .await
            .unwrap(); // the head of a long DATA
        stream
            .write_all(&vec![0; usize::from(round) * 700])
            .await
            .unwrap();
    }
    // The next one is clean: the first thing behind HELLO is the server's SETTINGS, and calls work.
    let nonce = fresh_nonce();
    stream.write_all(&encode_break(nonce)).await.unwrap();
    let (hello, mut behind) = read_hello(&mut stream, nonce).await;
    while behind.len() < 9 {
        behind.push(within(stream.read_u8()).await.unwrap());
    }
    assert_eq!((behind[3], behind[4]), (4, 0), "{behind:?}");
    let mut host = Host::past_hello(stream, hello, behind).await;
    assert_eq!(within(host.info()).await.state, i32::from(AgentState::Fresh));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn inv_15_clone_of_busy_template() {
    let guest = Guest::start();
    let port = std::os::unix::net::UnixStream::connect(guest.socket()).unwrap();
    port.set_nonblocking(true).unwrap();
    let open = || UnixStream::from_std(port.try_clone().unwrap()).unwrap();
    let mut host = within(Host::over(open(), fresh_nonce())).await;
    within(host.renew(Mode::Boot, "template")).await.unwrap();
    // With a program open there is no capture.
    let busy = within(host.exec(&["cat", "/dev/zero"])).await.unwrap();
    let refused = within(host.quiesce(Rest::Template)).await.unwrap_err();
    assert_eq!(reason(&refused), "QUIESCE_BUSY");
    drop(busy);
    while within(host.quiesce(Rest::Template)).await.is_err() {}
    // The connection itself is still there, with a stream of it, when the clone begins: only the bytes go on.
    let news = within(host.control.events(ControlEventsRequest {}))
        .await
        .unwrap();
    host.cut().await;
    drop(news);
    let mut clone = within(Host::over(open(), fresh_nonce())).await;
    assert_eq!(clone.hello.state, i32::from(AgentState::Quiesced));
    assert_eq!(clone.hello.generation, 1);
    within(clone.renew(Mode::Clone, "clone")).await.unwrap();
    let info = within(clone.info()).await;
    assert_eq!((info.processes, info.generation), (0, 2));
    let said = within(clone.exec(&["echo", "clean"])).await.unwrap();
    assert_eq!(said.output().await, ("clean\n".to_owned(), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_new_connection_replaces_the_old_and_the_old_one_sees_its_end() {
    let guest = Guest::start();
    let old = Host::connect(&guest.socket()).await;
    let mut new = within(Host::connect(&guest.socket())).await;
    within(old.ended).await.unwrap();
    within(new.info()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rubbish_instead_of_http_ends_that_connection_only() {
    let guest = Guest::start();
    let mut stream = UnixStream::connect(guest.socket()).await.unwrap();
    let nonce = fresh_nonce();
    stream.write_all(&encode_break(nonce)).await.unwrap();
    read_hello(&mut stream, nonce).await;
    stream.write_all(&[0xff; 100_000]).await.unwrap();
    // On the same port: the next BREAK is answered.
    let mut host = within(Host::over(stream, fresh_nonce())).await;
    within(host.info()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_not_served_is_unimplemented() {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    for path in [
        "/sandbox.v1.Agent/NoSuch",
        "/sandbox.v1.Claims/Claim",
        "/",
        "/sandbox.v1.Agent",
    ] {
        let status = within(host.call(path)).await;
        assert_eq!(status.code(), Code::Unimplemented, "{path}");
    }
    within(host.info()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_second_port_greets_speaks_first_and_begins_anew() {
    let guest = Guest::start();
    let mut stream = UnixStream::connect(guest.dir.path().join("s.egress"))
        .await
        .unwrap();
    for _ in 0..3 {
        let nonce = fresh_nonce();
        stream.write_all(&encode_break(nonce)).await.unwrap();
        let (hello, behind) = read_hello(&mut stream, nonce).await;
        assert_eq!(hello.proto_max, PROTO_MAX);
        // Here the guest is the client: it begins, with the preface of HTTP/2.
        let begun = &behind[..behind.len().min(16)];
        assert!(
            b"PRI * HTTP/2.0\r\n".starts_with(begun),
            "{}",
            behind.escape_ascii()
        );
        stream.write_all(&[b'x'; 200_000]).await.unwrap();
    }
}
