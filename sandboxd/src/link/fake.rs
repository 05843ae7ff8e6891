//! A guest for tests: the far end of a port, honest or not.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::{HeaderMap, Request, Response};
use sandbox_protocol::{
    limits,
    link::{BreakReader, Nonce, Step, encode_hello},
    v1::LinkHello,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    task::JoinHandle,
};

use super::{LinkError, Opened, Prefixed, open};
use crate::{clock::Clock, tasks};

/// A hang, not a speed: no test waits this long unless something is stuck.
pub(crate) const HANG: Duration = Duration::from_secs(40);

/// Fails a test that hangs.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(HANG, future).await.expect("nothing hangs")
}

/// What this build's silkd says of itself.
pub(crate) fn hello() -> LinkHello {
    LinkHello {
        proto_min: limits::PROTO_MIN,
        proto_max: limits::PROTO_MAX,
        version: "fake".into(),
        state: 2,
        generation: 1,
    }
}

/// Reads up to a BREAK, and what came behind it.
pub(crate) async fn read_break(io: &mut DuplexStream) -> (Nonce, Bytes) {
    let mut reader = BreakReader::default();
    let mut chunk = vec![0; 4096];
    loop {
        let n = io.read(&mut chunk).await.expect("the host writes");
        assert!(n > 0, "the host left before its BREAK");
        let mut at = 0;
        while at < n {
            let (step, used) = reader.feed(&chunk[at..n]);
            at += used;
            if let Step::Break(nonce) = step {
                return (nonce, Bytes::copy_from_slice(&chunk[at..n]));
            }
        }
    }
}

/// Answers a BREAK; gives the port as HTTP/2 is to read it.
pub(crate) async fn greet(io: DuplexStream) -> Prefixed<DuplexStream> {
    greet_as(io, &hello()).await
}

async fn greet_as(mut io: DuplexStream, hello: &LinkHello) -> Prefixed<DuplexStream> {
    let (nonce, behind) = read_break(&mut io).await;
    let hello = encode_hello(nonce, hello).expect("a short HELLO");
    io.write_all(&hello).await.expect("the host reads");
    Prefixed::new(behind, io)
}

/// Opens a link to a guest that answers each call by `handler`, in a task of its own.
pub(crate) async fn opened<H, F>(clock: Clock, handler: H) -> (Opened, JoinHandle<()>)
where
    H: Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (opened, task) = Box::pin(opened_as(hello(), clock, handler)).await;
    (opened.expect("a link"), task)
}

/// The same for a guest that says this of itself.
pub(crate) async fn opened_as<H, F>(
    hello: LinkHello,
    clock: Clock,
    handler: H,
) -> (Result<Opened, LinkError>, JoinHandle<()>)
where
    H: Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (host, guest) = tokio::io::duplex(64 * 1024);
    let task = tasks::spawn("fake-guest", async move {
        let io = greet_as(guest, &hello).await;
        let mut builder = h2::server::Builder::new();
        builder
            .initial_window_size(limits::STREAM_WINDOW)
            .initial_connection_window_size(limits::GUEST_CONNECTION_WINDOW)
            .max_concurrent_streams(limits::LINK_STREAMS);
        let Ok(mut connection) = builder.handshake::<_, Bytes>(io).await else {
            return;
        };
        let mut calls = tokio::task::JoinSet::new();
        while let Some(Ok((request, respond))) = connection.accept().await {
            calls.spawn(handler(request, respond));
        }
    });
    (within(open(host, [7; 16], clock)).await, task)
}

/// The usual head of a gRPC reply.
pub(crate) fn reply() -> Response<()> {
    Response::builder()
        .header("content-type", "application/grpc")
        .body(())
        .expect("a head")
}

/// Trailers with this status.
pub(crate) fn status(code: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", code.parse().expect("a value"));
    trailers
}

/// Reads a body to its end, giving room as it goes.
pub(crate) async fn read_all(body: &mut RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut all = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        all.extend_from_slice(&data);
    }
    Ok(all)
}

/// Sends all of it, as the reader takes it.
pub(crate) async fn send_all(stream: &mut h2::SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len().min(16 * 1024));
        let Some(room) = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await else {
            return Err(h2::Reason::CANCEL.into());
        };
        let room = room?.min(data.len());
        stream.send_data(data.split_to(room), false)?;
    }
    Ok(())
}
