//! Port forwards, in test mode: each direction ends alone, an abort is never an end, and nothing is left.
#![expect(clippy::disallowed_methods, reason = "tests own their tasks and time")]
#![expect(clippy::large_futures, reason = "a test holds few of them")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

// On threads of their own, so that a guest that ends is answered while the test waits for it.
mod common;

use std::{io, net::Ipv4Addr, time::Instant};

use bytes::Bytes;
use common::{Guest, Host, Prefixed, fresh_nonce, read_hello, reason, within};
use prost::Message as _;
use sandbox_protocol::{
    limits::{CHUNK_IN, FORWARDS},
    link::encode_break,
    v1::{
        ControlResumeRequest, PortForwardEof, PortForwardIn, PortForwardOpen, PortForwardOut,
        control_quiesce_request::Mode as Rest, control_renew_request::Mode, port_forward_in,
        port_forward_open::Address, port_forward_out,
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UnixStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// A guest whose gate is open, and its host.
async fn ready() -> (Guest, Host) {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "ports")).await.unwrap();
    (guest, host)
}

/// A program that listens.
async fn program() -> (TcpListener, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

async fn accept(listener: &TcpListener) -> TcpStream {
    within(listener.accept()).await.unwrap().0
}

/// Sockets that silkd has open.
fn sockets(guest: &Guest) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", guest.child.id())).unwrap();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    links
        .filter(|link| link.to_string_lossy().starts_with("socket:"))
        .count()
}

/// A client's end of a forward.
struct Forwarded {
    input: Option<mpsc::Sender<PortForwardIn>>,
    output: Streaming<PortForwardOut>,
}

fn message(m: port_forward_in::M) -> PortForwardIn {
    PortForwardIn { m: Some(m) }
}

fn open_of(port: u32, address: Address) -> PortForwardIn {
    let address = address.into();
    message(port_forward_in::M::Open(PortForwardOpen { port, address }))
}

async fn call(host: &mut Host, first: PortForwardIn) -> Result<Forwarded, Status> {
    let (input, rest) = mpsc::channel(4);
    input.send(first).await.unwrap();
    let output = within(host.agent.port_forward(ReceiverStream::new(rest))).await?;
    Ok(Forwarded {
        input: Some(input),
        output: output.into_inner(),
    })
}

/// One that is accepted.
async fn forward(host: &mut Host, port: u16) -> Forwarded {
    let mut forward = call(host, open_of(port.into(), Address::Unspecified))
        .await
        .unwrap();
    match forward.next().await.unwrap() {
        Some(port_forward_out::M::Ready(_)) => forward,
        other => panic!("{other:?}"),
    }
}

impl Forwarded {
    async fn next(&mut self) -> Result<Option<port_forward_out::M>, Status> {
        Ok(within(self.output.message()).await?.map(|out| out.m.unwrap()))
    }

    async fn send(&self, data: impl Into<Bytes>) {
        let data = message(port_forward_in::M::Data(data.into()));
        within(self.input.as_ref().unwrap().send(data)).await.unwrap();
    }

    /// No more input: by the message, or by ending the request.
    async fn end(&mut self, said: bool) {
        let input = self.input.take().unwrap();
        if said {
            let eof = message(port_forward_in::M::Eof(PortForwardEof {}));
            within(input.send(eof)).await.unwrap();
        }
    }

    /// What comes up to the program's end.
    async fn until_eof(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            match self.next().await.unwrap() {
                Some(port_forward_out::M::Data(data)) => all.extend_from_slice(&data),
                Some(port_forward_out::M::Eof(_)) => return all,
                other => panic!("{other:?}"),
            }
        }
    }

    /// So many bytes.
    async fn exactly(&mut self, count: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < count {
            match self.next().await.unwrap() {
                Some(port_forward_out::M::Data(data)) => all.extend_from_slice(&data),
                other => panic!("{other:?}"),
            }
        }
        all
    }

    /// What comes before it breaks, and how it breaks.
    async fn failure(&mut self) -> (Vec<u8>, Status) {
        let mut all = Vec::new();
        loop {
            match self.next().await {
                Ok(Some(port_forward_out::M::Data(data))) => all.extend_from_slice(&data),
                Ok(other) => panic!("{other:?}"),
                Err(status) => return (all, status),
            }
        }
    }

    async fn over(&mut self) {
        assert_eq!(self.next().await.unwrap(), None);
    }
}

/// Reads to the end; a reset is an error.
async fn read_all(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    within(stream.read_to_end(&mut all)).await?;
    Ok(all)
}

async fn is_reset(mut stream: TcpStream) {
    let error = read_all(&mut stream).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn half_close_both_ways() {
    let (guest, mut host) = ready().await;
    let (listener, port) = program().await;
    let before = sockets(&guest);
    for round in 0..1000 {
        // The client ends first, and still gets its answer.
        let mut client = forward(&mut host, port).await;
        let mut program = accept(&listener).await;
        client.send("ping").await;
        client.end(round % 2 == 0).await;
        assert_eq!(read_all(&mut program).await.unwrap(), b"ping");
        program.write_all(b"pong").await.unwrap();
        drop(program);
        assert_eq!(client.until_eof().await, b"pong");
        client.over().await;

        // The program ends first, and still gets what comes.
        let mut client = forward(&mut host, port).await;
        let mut program = accept(&listener).await;
        program.write_all(b"hello").await.unwrap();
        program.shutdown().await.unwrap();
        assert_eq!(client.until_eof().await, b"hello");
        client.send("late").await;
        client.end(round % 2 == 1).await;
        assert_eq!(read_all(&mut program).await.unwrap(), b"late");
        client.over().await;
    }
    assert_eq!(sockets(&guest), before, "forwards left something behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn refused_is_refused() {
    let (guest, mut host) = ready().await;
    let before = sockets(&guest);
    for address in [Address::V4, Address::V6] {
        let (listener, port) = program().await;
        drop(listener);
        // No `ready`, not even a reply: the call itself is refused.
        let refused = call(&mut host, open_of(port.into(), address))
            .await
            .err()
            .unwrap();
        assert_eq!(
            (reason(&refused), refused.code()),
            ("PORT_REFUSED".to_owned(), Code::Unavailable)
        );
    }
    assert_eq!(sockets(&guest), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reset_is_not_eof() {
    let (_guest, mut host) = ready().await;
    let (listener, port) = program().await;
    for ended in [false, true] {
        // By the program; what it had said before still arrives.
        let mut client = forward(&mut host, port).await;
        let mut program = accept(&listener).await;
        if ended {
            client.end(true).await;
            assert!(read_all(&mut program).await.unwrap().is_empty());
        }
        program.write_all(b"some").await.unwrap();
        assert_eq!(client.exactly(4).await, b"some");
        program.set_zero_linger().unwrap();
        drop(program);
        let (rest, status) = client.failure().await;
        assert_eq!(
            (rest.len(), reason(&status), status.code()),
            (0, "PORT_RESET".to_owned(), Code::Aborted)
        );
    }
    // By a program that had ended its own half: nobody reads there any more, and it is told all the same.
    let mut client = forward(&mut host, port).await;
    let mut program = accept(&listener).await;
    program.shutdown().await.unwrap();
    assert!(client.until_eof().await.is_empty());
    program.set_zero_linger().unwrap();
    drop(program);
    assert_eq!(reason(&client.failure().await.1), "PORT_RESET");

    // By a client's broken message, and by a host that is gone.
    let client = forward(&mut host, port).await;
    let program = accept(&listener).await;
    client.send(vec![0; CHUNK_IN + 1]).await;
    is_reset(program).await;
    let client = forward(&mut host, port).await;
    let program = accept(&listener).await;
    host.cut().await;
    is_reset(program).await;
    drop(client);
}

/// HTTP/2 as it is on the wire: a cancelled stream is no end of its request, as tonic would have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_cancelled_call_resets_and_does_not_end() {
    let (guest, host) = ready().await;
    drop(host);
    let (listener, port) = program().await;
    for code in [
        h2::Reason::CANCEL,
        h2::Reason::NO_ERROR,
        h2::Reason::INTERNAL_ERROR,
    ] {
        let nonce = fresh_nonce();
        let mut stream = UnixStream::connect(guest.socket()).await.unwrap();
        stream.write_all(&encode_break(nonce)).await.unwrap();
        let (_hello, first) = read_hello(&mut stream, nonce).await;
        let stream = Prefixed { first, stream };
        let (mut send, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(connection);
        let request = http::Request::post("http://guest/sandbox.v1.Agent/PortForward")
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        let (response, mut body) = send.send_request(request, false).unwrap();
        let first = open_of(port.into(), Address::V4).encode_to_vec();
        let mut framed = vec![0];
        framed.extend_from_slice(&u32::try_from(first.len()).unwrap().to_be_bytes());
        framed.extend_from_slice(&first);
        body.send_data(framed.into(), false).unwrap();
        let mut response = within(response).await.unwrap().into_body();
        within(response.data()).await.unwrap().unwrap();
        let program = accept(&listener).await;
        body.send_reset(code);
        is_reset(program).await;
        drop((send, body, response));
        connection.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn thousand_connects_p99() {
    let (guest, mut host) = ready().await;
    let (listener, port) = program().await;
    let echo = tokio::spawn(async move {
        loop {
            let (mut stream, _from) = listener.accept().await.unwrap();
            let mut byte = [0; 1];
            stream.read_exact(&mut byte).await.unwrap();
            stream.write_all(&byte).await.unwrap();
            // To the client's end, so that its own comes second.
            stream.read_to_end(&mut Vec::new()).await.unwrap();
        }
    });
    let before = sockets(&guest);
    let mut times = Vec::new();
    for _ in 0..1000 {
        let begun = Instant::now();
        let mut client = forward(&mut host, port).await;
        client.send("x").await;
        assert_eq!(client.exactly(1).await, b"x");
        times.push(begun.elapsed());
        client.end(true).await;
        assert!(client.until_eof().await.is_empty());
        client.over().await;
    }
    assert_eq!(sockets(&guest), before);
    times.sort();
    // The ratio is a row of the bench: a test asserts no time.
    println!(
        "connect and one byte there and back: p50 {:?}, p99 {:?}",
        times[500], times[990]
    );
    echo.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn websocket_echo_through_forward() {
    // The example of RFC 6455, section 1.3.
    const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
    const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
    let (_guest, mut host) = ready().await;
    let (listener, port) = program().await;
    let mut client = forward(&mut host, port).await;
    let mut program = accept(&listener).await;
    program.set_nodelay(true).unwrap();
    let request = format!("GET / HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Key: {KEY}\r\n\r\n");
    client.send(request.clone()).await;
    let mut head = vec![0; request.len()];
    within(program.read_exact(&mut head)).await.unwrap();
    assert_eq!(head, request.as_bytes());
    let answer = format!("HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: {ACCEPT}\r\n\r\n");
    program.write_all(answer.as_bytes()).await.unwrap();
    assert_eq!(client.exactly(answer.len()).await, answer.as_bytes());
    for round in 0..100_u8 {
        // The program speaks first, then echoes: frames of one byte, the client's masked.
        within(program.write_all(&[0x82, 1, round])).await.unwrap();
        assert_eq!(client.exactly(3).await, [0x82, 1, round]);
        client.send(vec![0x82, 0x81, 1, 2, 3, 4, round ^ 1]).await;
        let mut frame = [0; 7];
        within(program.read_exact(&mut frame)).await.unwrap();
        within(program.write_all(&[0x82, 1, frame[6] ^ frame[2]]))
            .await
            .unwrap();
        assert_eq!(client.exactly(3).await, [0x82, 1, round]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn forward_ends_at_hibernate() {
    let (guest, mut host) = ready().await;
    let (listener, port) = program().await;
    let before = sockets(&guest);
    let mut client = forward(&mut host, port).await;
    let program = accept(&listener).await;
    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    assert_eq!(reason(&client.failure().await.1), "SANDBOX_HIBERNATING");
    is_reset(program).await;
    assert_eq!(sockets(&guest), before);
    within(host.control.resume(ControlResumeRequest {}))
        .await
        .unwrap();
    // What comes after is a connection of its own.
    let mut client = forward(&mut host, port).await;
    let mut program = accept(&listener).await;
    client.send("new").await;
    client.end(true).await;
    assert_eq!(read_all(&mut program).await.unwrap(), b"new");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn nobody_reads_and_the_other_direction_goes_on() {
    const BYTES: usize = 8 * 1024 * 1024;
    let (_guest, mut host) = ready().await;
    let (listener, port) = program().await;
    // A program that never reads: its client's input is stuck on the way, for good.
    let mut client = forward(&mut host, port).await;
    let mut program = accept(&listener).await;
    let input = client.input.clone().unwrap();
    let stuck = tokio::spawn(async move {
        let chunk = message(port_forward_in::M::Data(vec![1; 64 * 1024].into()));
        while input.send(chunk.clone()).await.is_ok() {}
    });
    let writer = tokio::spawn(async move {
        program.write_all(&vec![7; BYTES]).await.unwrap();
        program
    });
    let got = client.exactly(BYTES).await;
    assert!(got.len() == BYTES && got.iter().all(|byte| *byte == 7));
    assert!(!stuck.is_finished());
    drop(within(writer).await.unwrap());

    // A client that never reads: what it sends still arrives.
    let client = forward(&mut host, port).await;
    let program = accept(&listener).await;
    let (mut reader, mut writer) = program.into_split();
    let chatty = tokio::spawn(async move { while writer.write_all(&[0; 64 * 1024]).await.is_ok() {} });
    let mut got = vec![0; BYTES];
    let read = reader.read_exact(&mut got);
    let send = async {
        for _ in 0..BYTES / CHUNK_IN {
            client.send(vec![9; CHUNK_IN]).await;
        }
    };
    let (read, ()) = within(async { tokio::join!(read, send) }).await;
    read.unwrap();
    assert!(got.iter().all(|byte| *byte == 9) && !chatty.is_finished());
    stuck.abort();
    chatty.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn there_are_so_many_and_one_that_ends_makes_room() {
    let (_guest, mut host) = ready().await;
    let (listener, port) = program().await;
    let mut held = Vec::new();
    for _ in 0..FORWARDS {
        let client = forward(&mut host, port).await;
        held.push((client, accept(&listener).await));
    }
    let full = call(&mut host, open_of(port.into(), Address::V4))
        .await
        .err()
        .unwrap();
    assert_eq!(reason(&full), "STREAM_LIMIT");
    let (mut client, program) = held.pop().unwrap();
    client.end(true).await;
    drop(program);
    assert!(client.until_eof().await.is_empty());
    client.over().await;
    forward(&mut host, port).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_no_forward_is_refused_by_name() {
    let (_guest, mut host) = ready().await;
    let (_listener, port) = program().await;
    for first in [
        message(port_forward_in::M::Data("early".into())),
        message(port_forward_in::M::Eof(PortForwardEof {})),
        PortForwardIn { m: None },
        open_of(0, Address::V4),
        open_of(65536, Address::V4),
    ] {
        let refused = call(&mut host, first).await.err().unwrap();
        assert_eq!(reason(&refused), "FIELD_INVALID");
    }
    for second in [open_of(port.into(), Address::V4), PortForwardIn { m: None }] {
        let mut client = forward(&mut host, port).await;
        client.input.as_ref().unwrap().send(second).await.unwrap();
        assert_eq!(reason(&client.failure().await.1), "FIELD_INVALID");
    }
}
