use std::sync::Mutex;

use bytes::BytesMut;
use http_body_util::{BodyExt as _, StreamBody};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::{mpsc, oneshot},
};
use tokio_stream::wrappers::ReceiverStream;

use sandbox_protocol::{limits, link::HelloError};

use super::{
    fake::{greet, hello, opened, read_all, read_break, reply, send_all, status, within},
    *,
};
use crate::tasks;

fn request(body: Body) -> http::Request<Body> {
    http::Request::builder()
        .method("POST")
        .uri("/sandbox.v1.Agent/Info")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .unwrap()
}

fn full(bytes: &[u8]) -> Body {
    Body::new(http_body_util::Full::new(Bytes::copy_from_slice(bytes)))
}

type Frames = mpsc::Sender<Result<http_body::Frame<Bytes>, tonic::Status>>;

fn channel() -> (Frames, Body) {
    let (to, from) = mpsc::channel(1);
    (to, Body::new(StreamBody::new(ReceiverStream::new(from))))
}

async fn collect(body: LinkBody) -> Result<(Vec<u8>, Option<http::HeaderMap>), LinkError> {
    let collected = within(body.collect()).await?;
    let trailers = collected.trailers().cloned();
    Ok((collected.to_bytes().to_vec(), trailers))
}

type Once<T> = Arc<Mutex<Option<oneshot::Sender<T>>>>;

fn one_shot<T>() -> (Once<T>, oneshot::Receiver<T>) {
    let (to, from) = oneshot::channel();
    (Arc::new(Mutex::new(Some(to))), from)
}

fn tell<T>(to: &Mutex<Option<oneshot::Sender<T>>>, value: T) {
    if let Some(to) = to.lock().unwrap().take() {
        drop(to.send(value));
    }
}

/// A guest that sends every body back, with trailers.
async fn echo(request: http::Request<h2::RecvStream>, mut respond: h2::server::SendResponse<Bytes>) {
    let mut body = request.into_body();
    let mut out = respond.send_response(reply(), false).unwrap();
    while let Some(Ok(data)) = body.data().await {
        body.flow_control().release_capacity(data.len()).unwrap();
        if send_all(&mut out, data).await.is_err() {
            return;
        }
    }
    // The host may have left.
    drop(out.send_trailers(status("0")));
}

#[tokio::test]
async fn bodies_and_trailers_pass_both_ways() {
    let (opened, _guest) = opened(Clock::host(), echo).await;
    assert_eq!((opened.proto, &opened.hello), (1, &hello()));
    let big: Vec<u8> = (0..1_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let reply = within(opened.link.call(request(full(&big)))).await.unwrap();
    let (back, trailers) = collect(reply.into_body()).await.unwrap();
    assert!(back == big);
    assert_eq!(trailers.unwrap()["grpc-status"], "0");

    let (to, body) = channel();
    let mut reply = within(opened.link.call(request(body))).await.unwrap().into_body();
    for word in ["one", "two"] {
        to.send(Ok(http_body::Frame::data(word.into()))).await.unwrap();
        let frame = within(reply.frame()).await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), word);
    }
    drop(to);
    assert!(within(reply.frame()).await.unwrap().unwrap().is_trailers());
    assert!(within(reply.frame()).await.is_none());
    assert_eq!(opened.link.0.signals.streams(), 0);
}

/// A body as HTTP/2 gives it when its end comes in a frame of its own, without data.
struct EmptyEnd(Vec<&'static [u8]>);

impl http_body::Body for EmptyEnd {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, tonic::Status>>> {
        let data = self.0.pop();
        std::task::Poll::Ready(data.map(|data| Ok(http_body::Frame::data(Bytes::from_static(data)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }
}

#[tokio::test]
async fn f02_an_end_without_data_is_passed_on() {
    let (opened, _guest) = opened(Clock::host(), echo).await;
    for frames in [
        vec![&b""[..], b"all"],
        vec![b"", b"", b"all"],
        vec![b""],
        vec![b"all"],
    ] {
        let all = if frames.contains(&&b"all"[..]) {
            &b"all"[..]
        } else {
            b""
        };
        let body = Body::new(EmptyEnd(frames));
        let reply = within(opened.link.call(request(body))).await.unwrap();
        let (back, trailers) = collect(reply.into_body()).await.unwrap();
        assert_eq!(back, all);
        assert!(trailers.is_some());
    }
}

#[tokio::test]
async fn input_flows_while_nobody_reads_the_output() {
    let (told, got) = one_shot();
    let handler = move |request: http::Request<h2::RecvStream>,
                        mut respond: h2::server::SendResponse<Bytes>| {
        let told = Arc::clone(&told);
        async move {
            let mut out = respond.send_response(reply(), false).unwrap();
            let mut body = request.into_body();
            let read = async {
                tell(&told, read_all(&mut body).await.map(|all| all.len()).ok());
            };
            let flood = send_all(&mut out, Bytes::from(vec![1; 10_000_000]));
            drop(tokio::join!(read, flood));
        }
    };
    let (opened, _guest) = opened(Clock::host(), handler).await;
    let (to, body) = channel();
    let reply = within(opened.link.call(request(body))).await.unwrap();
    for _ in 0..20 {
        to.send(Ok(http_body::Frame::data(vec![2; 16_384].into())))
            .await
            .unwrap();
    }
    drop(to);
    assert_eq!(within(got).await.unwrap(), Some(20 * 16_384));
    drop(reply);
}

#[tokio::test]
async fn leaving_resets_the_call_at_once_though_the_guest_is_silent() {
    let (told, mut resets) = mpsc::channel(8);
    let handler = move |request: http::Request<h2::RecvStream>,
                        mut respond: h2::server::SendResponse<Bytes>| {
        let told = told.clone();
        async move {
            let answers = request.uri().path().ends_with("Head");
            let mut held = None;
            if answers {
                held = Some(respond.send_response(reply(), false).unwrap());
            }
            told.send(None).await.unwrap();
            let reset = match &mut held {
                Some(out) => std::future::poll_fn(|cx| out.poll_reset(cx)).await,
                None => std::future::poll_fn(|cx| respond.poll_reset(cx)).await,
            };
            told.send(Some(reset.unwrap())).await.unwrap();
            drop(request);
        }
    };
    let (opened, _guest) = opened(Clock::host(), handler).await;
    // Before the reply's head, with a body that goes on.
    let (_to, body) = channel();
    let call = opened.link.call(request(body));
    tokio::select! {
        biased;
        _ = call => panic!("a silent guest answered"),
        seen = resets.recv() => assert_eq!(seen, Some(None)),
    }
    assert_eq!(within(resets.recv()).await, Some(Some(h2::Reason::CANCEL)));
    // After it.
    let (_to, body) = channel();
    let mut head = request(body);
    *head.uri_mut() = "/sandbox.v1.Agent/Head".parse().unwrap();
    let reply = within(opened.link.call(head)).await.unwrap();
    assert_eq!(within(resets.recv()).await, Some(None));
    drop(reply);
    assert_eq!(within(resets.recv()).await, Some(Some(h2::Reason::CANCEL)));
    assert_eq!(opened.link.0.signals.streams(), 0);
}

#[tokio::test]
async fn a_callers_failed_body_is_a_cancel_for_the_guest() {
    let (told, got) = one_shot();
    let handler = move |request: http::Request<h2::RecvStream>, respond: h2::server::SendResponse<Bytes>| {
        let told = Arc::clone(&told);
        async move {
            let mut body = request.into_body();
            let error = read_all(&mut body).await.unwrap_err();
            tell(&told, error.reason());
            drop(respond);
        }
    };
    let (opened, _guest) = opened(Clock::host(), handler).await;
    let (to, body) = channel();
    to.send(Err(tonic::Status::cancelled("left"))).await.unwrap();
    let error = within(opened.link.call(request(body))).await.unwrap_err();
    assert!(matches!(error, LinkError::CallerLeft), "{error:?}");
    assert_eq!(within(got).await.unwrap(), Some(h2::Reason::CANCEL));
}

#[tokio::test]
async fn a_reset_by_the_guest_ends_one_call_only() {
    let handler = |request: http::Request<h2::RecvStream>, mut respond: h2::server::SendResponse<Bytes>| async move {
        if request.uri().path().ends_with("Info") {
            respond.send_reset(h2::Reason::ENHANCE_YOUR_CALM);
        } else {
            echo(request, respond).await;
        }
    };
    let (opened, _guest) = opened(Clock::host(), handler).await;
    let error = within(opened.link.call(request(full(b"x")))).await.unwrap_err();
    assert!(
        matches!(error, LinkError::Reset(h2::Reason::ENHANCE_YOUR_CALM)),
        "{error:?}"
    );
    let mut other = request(full(b"y"));
    *other.uri_mut() = "/sandbox.v1.Agent/Echo".parse().unwrap();
    let reply = within(opened.link.call(other)).await.unwrap();
    assert_eq!(collect(reply.into_body()).await.unwrap().0, b"y");
}

#[tokio::test]
async fn inv_17_stalled_readers() {
    let handler = |request: http::Request<h2::RecvStream>, mut respond: h2::server::SendResponse<Bytes>| async move {
        if request.uri().path().ends_with("Flood") {
            let mut out = respond.send_response(reply(), false).unwrap();
            drop(send_all(&mut out, Bytes::from(vec![0; 2_000_000])).await);
        } else {
            echo(request, respond).await;
        }
    };
    let (opened, _guest) = opened(Clock::host(), handler).await;
    let mut unread = Vec::new();
    for _ in 0..limits::LINK_STREAMS - 1 {
        let mut flood = request(Body::empty());
        *flood.uri_mut() = "/sandbox.v1.Agent/Flood".parse().unwrap();
        unread.push(within(opened.link.call(flood)).await.unwrap());
    }
    let reply = within(opened.link.call(request(full(&[5; 300_000]))))
        .await
        .unwrap();
    assert_eq!(collect(reply.into_body()).await.unwrap().0.len(), 300_000);
    drop(unread);
}

/// As much as the guest may send of a reply that nobody reads, by call: much while few are open, and little beside many.
#[tokio::test]
async fn few_unread_replies_hold_much_and_many_hold_little() {
    use tokio::sync::watch;
    let (sent, mut told) = watch::channel(std::collections::BTreeMap::<u32, u32>::new());
    let sent = Arc::new(sent);
    let handler = move |_request: http::Request<h2::RecvStream>,
                        mut respond: h2::server::SendResponse<Bytes>| {
        let sent = Arc::clone(&sent);
        async move {
            let mut out = respond.send_response(reply(), false).unwrap();
            let id = out.stream_id().as_u32();
            loop {
                out.reserve_capacity(1 << 20);
                let Some(Ok(room)) = std::future::poll_fn(|cx| out.poll_capacity(cx)).await else {
                    return;
                };
                out.send_data(Bytes::from(vec![0; room]), false).unwrap();
                let room = u32::try_from(room).unwrap();
                sent.send_modify(|sent| *sent.entry(id).or_default() += room);
            }
        }
    };
    let (opened, _guest) = opened(Clock::host(), handler).await;
    let mut opened_so_far = 0;
    // Opens so many, and looks at the last once it is full.
    let mut calls = async |count: u32, window: u32| {
        let mut unread = Vec::new();
        for _ in 0..count {
            unread.push(within(opened.link.call(request(Body::empty()))).await.unwrap());
        }
        opened_so_far += unread.len();
        let is_full = |sent: &std::collections::BTreeMap<u32, u32>| {
            let last = sent.last_key_value().filter(|_| sent.len() == opened_so_far);
            last.is_some_and(|(_, bytes)| *bytes >= window)
        };
        let sent = within(told.wait_for(is_full)).await.unwrap();
        assert_eq!(sent.last_key_value().map(|(_, bytes)| *bytes), Some(window));
        unread
    };
    let few = calls(limits::WIDE_STREAMS, limits::WIDE_WINDOW).await;
    let rest = limits::LINK_STREAMS - limits::WIDE_STREAMS;
    let many = calls(rest, limits::STREAM_WINDOW).await;
    // Narrow until half of the few are left.
    drop(many);
    let one = calls(1, limits::STREAM_WINDOW).await;
    drop((few, one));
    drop(calls(1, limits::WIDE_WINDOW).await);
}

#[tokio::test]
async fn no_more_calls_than_a_link_carries() {
    let (opened, _guest) = opened(Clock::host(), |request, respond| async move {
        // Holds every call open.
        let _held = (request, respond);
        std::future::pending::<()>().await;
    })
    .await;
    let mut calls = Vec::new();
    for _ in 0..limits::LINK_STREAMS {
        let mut call = Box::pin(opened.link.call(request(Body::empty())));
        assert!(futures_util::poll!(&mut call).is_pending());
        calls.push(call);
    }
    let error = opened.link.call(request(Body::empty())).await.unwrap_err();
    assert!(matches!(error, LinkError::Full), "{error:?}");
    drop(calls);
    assert_eq!(opened.link.0.signals.streams(), 0);
}

#[tokio::test(start_paused = true)]
async fn pings_keep_the_news_fresh_at_the_pace_set() {
    let clock = Clock::manual(Tick::from_nanos(1_000_000_000), crate::clock::WallTime::default());
    let (opened, _guest) = opened(clock.clone(), echo).await;
    let greeted = opened.link.heard();
    assert_eq!(greeted, clock.tick());
    for _ in 0..5 {
        clock.advance(PACE_WARM);
        tokio::time::sleep(PACE_WARM + Duration::from_millis(50)).await;
        assert_eq!(opened.link.heard(), clock.tick());
    }
    opened.link.pace(PACE_CLAIMED);
    tokio::time::sleep(2 * PACE_WARM).await;
    clock.advance(PACE_WARM);
    let before = opened.link.heard();
    tokio::time::sleep(PACE_CLAIMED / 2).await;
    assert_eq!(opened.link.heard(), before, "an idle guest is left alone");
    // What no timer can take is cut to what one can.
    opened.link.pace(Duration::MAX);
    opened.link.patience(Duration::MAX);
    // A shorter pace holds from now on.
    opened.link.pace(PACE_WARM);
    tokio::time::sleep(2 * PACE_WARM).await;
    assert_eq!(opened.link.heard(), clock.tick());
}

#[tokio::test(start_paused = true)]
async fn a_mute_guest_is_lost_after_the_patience_set() {
    let (host, guest) = tokio::io::duplex(64 * 1024);
    let (io, link) = tokio::join!(greet(guest), open(host, [1; 16], Clock::host()));
    let link = link.unwrap().link;
    let start = tokio::time::Instant::now();
    // A ping is in flight, and gets the new patience too.
    tokio::time::sleep(PACE_WARM + Duration::from_millis(1)).await;
    link.patience(Duration::from_secs(5));
    // Two wait; one gives up in between.
    let mut left = Box::pin(link.lost());
    assert!(futures_util::poll!(&mut left).is_pending());
    drop(left);
    let other = link.clone();
    assert_eq!(
        tokio::join!(link.lost(), other.lost()),
        (LostWhy::Silent, LostWhy::Silent)
    );
    assert_eq!(start.elapsed().as_secs(), 6);
    let error = link.call(request(full(b"x"))).await.unwrap_err();
    assert!(matches!(error, LinkError::Lost(_)), "{error:?}");
    drop(io);
}

#[tokio::test]
async fn close_ends_calls_and_drops_the_port_and_twice_is_as_once() {
    let (opened, guest) = opened(Clock::host(), |request, respond| async move {
        let _held = (request, respond);
        std::future::pending::<()>().await;
    })
    .await;
    let link = opened.link;
    let mut call = Box::pin(link.call(request(full(b"x"))));
    assert!(futures_util::poll!(&mut call).is_pending());
    link.close();
    link.close();
    assert_eq!(within(link.lost()).await, LostWhy::Closed);
    let error = within(call).await.unwrap_err();
    assert!(matches!(error, LinkError::Lost(_)), "{error:?}");
    within(guest).await.unwrap();
}

#[tokio::test]
async fn the_last_clone_closes() {
    let (opened, guest) = opened(Clock::host(), echo).await;
    let clone = opened.link.clone();
    drop(opened.link);
    let reply = within(clone.call(request(full(b"x")))).await.unwrap();
    drop(clone);
    // A reply that is being read keeps it open.
    assert_eq!(collect(reply.into_body()).await.unwrap().0, b"x");
    within(guest).await.unwrap();
}

#[tokio::test]
async fn inv_15_old_bytes_and_old_hellos_reach_nobody() {
    let (host, mut guest) = tokio::io::duplex(1024);
    let task = tasks::spawn("fake-guest", async move {
        // Output of an old connection, and the answer to another BREAK, come first: more than the pipe holds.
        guest.write_all(&[0xff; 50_000]).await.unwrap();
        let old = sandbox_protocol::link::encode_hello([9; 16], &hello()).unwrap();
        guest.write_all(&old).await.unwrap();
        guest.write_all(&[0xff; 50_000]).await.unwrap();
        let io = greet(guest).await;
        let mut connection = h2::server::handshake(io).await.unwrap();
        while let Some(Ok((request, respond))) = connection.accept().await {
            drop(tasks::spawn("fake-call", echo(request, respond)));
        }
    });
    let opened = within(open(host, [3; 16], Clock::host())).await.unwrap();
    let reply = within(opened.link.call(request(full(b"new")))).await.unwrap();
    assert_eq!(collect(reply.into_body()).await.unwrap().0, b"new");
    opened.link.close();
    within(task).await.unwrap();
}

#[tokio::test]
async fn inv_19_old_agent() {
    let (host, mut guest) = tokio::io::duplex(64 * 1024);
    let greeting = async {
        let (nonce, _) = read_break(&mut guest).await;
        let future = LinkHello {
            proto_min: limits::PROTO_MAX + 1,
            proto_max: limits::PROTO_MAX + 3,
            ..hello()
        };
        let bytes = sandbox_protocol::link::encode_hello(nonce, &future).unwrap();
        guest.write_all(&bytes).await.unwrap();
    };
    let ((), opened) = tokio::join!(greeting, within(open(host, [1; 16], Clock::host())));
    assert!(matches!(
        opened.unwrap_err(),
        LinkError::NoCommonProto { min, .. } if min == limits::PROTO_MAX + 1
    ));
}

#[tokio::test]
async fn a_port_that_ends_or_floods_before_hello_fails_the_opening() {
    let (host, guest) = tokio::io::duplex(64 * 1024);
    drop(guest);
    let error = within(open(host, [1; 16], Clock::host())).await.unwrap_err();
    assert!(matches!(error, LinkError::Port(_)), "{error:?}");

    let (host, mut guest) = tokio::io::duplex(64 * 1024);
    let flood = async {
        let (_nonce, _) = read_break(&mut guest).await;
        // Ends when the host hangs up.
        while guest.write_all(&[0x53; 65_536]).await.is_ok() {}
    };
    let ((), opened) = within(Box::pin(async {
        tokio::join!(flood, open(host, [1; 16], Clock::host()))
    }))
    .await;
    assert!(matches!(
        opened.unwrap_err(),
        LinkError::Hello(HelloError::Flooded)
    ));
}

/// A guest that greets well and then only writes `bytes`, over and over; why the link to it is lost.
async fn lost_to(bytes: &[u8], repeat: bool) -> LostWhy {
    let (host, guest) = tokio::io::duplex(64 * 1024);
    let (io, opened) = tokio::join!(greet(guest), open(host, [1; 16], Clock::host()));
    let link = opened.unwrap().link;
    let (mut from, mut to) = tokio::io::split(io);
    let write = async { while to.write_all(bytes).await.is_ok() && repeat {} };
    let read = async {
        let mut sink = BytesMut::with_capacity(4096);
        while from.read_buf(&mut sink).await.is_ok_and(|n| n > 0) {
            sink.clear();
        }
    };
    let (why, (), ()) = within(async { tokio::join!(link.lost(), write, read) }).await;
    why
}

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![len[1], len[2], len[3], kind, flags, 0, 0, 0, stream];
    bytes.extend_from_slice(payload);
    bytes
}

#[tokio::test]
async fn inv_16_hostile_guest_stays_small() {
    let settings = frame(4, 0, 0, &[]);
    for (what, flood, whys) in [
        ("pings", frame(6, 0, 0, &[0; 8]), &[LostWhy::Flooded][..]),
        ("ping acks", frame(6, 1, 0, &[0; 8]), &[LostWhy::Flooded]),
        ("settings", settings.clone(), &[LostWhy::Flooded]),
        (
            "priorities",
            frame(2, 0, 1, &[0, 0, 0, 3, 1]),
            &[LostWhy::Flooded],
        ),
        (
            "unknown frames",
            frame(0xee, 0, 0, &[1; 100]),
            &[LostWhy::Flooded],
        ),
        ("headers unasked", frame(1, 4, 1, &[0x88]), &[LostWhy::Flooded]),
        (
            "data unasked",
            frame(0, 0, 1, &[1; 100]),
            &[LostWhy::Protocol(h2::Reason::PROTOCOL_ERROR)],
        ),
        (
            "a frame too long",
            vec![0xff; 100],
            &[LostWhy::Protocol(h2::Reason::FRAME_SIZE_ERROR), LostWhy::Flooded],
        ),
        ("goodbye", frame(7, 0, 0, &[0; 8]), &[LostWhy::Goodbye]),
    ] {
        let mut bytes = settings.clone();
        bytes.extend(flood.repeat(100));
        let why = lost_to(&bytes, true).await;
        assert!(whys.contains(&why), "{what}: {why:?}");
    }
}

#[tokio::test]
async fn inv_16_header_lists_are_bounded() {
    let handler = |request: http::Request<h2::RecvStream>, mut respond: h2::server::SendResponse<Bytes>| async move {
        let mut big = http::HeaderMap::new();
        big.insert("x-big", "v".repeat(30_000).parse().unwrap());
        if request.uri().path().ends_with("Head") {
            let mut head = reply();
            *head.headers_mut() = big;
            drop(respond.send_response(head, true));
        } else {
            let mut out = respond.send_response(reply(), false).unwrap();
            drop(out.send_trailers(big));
        }
        drop(request);
    };
    let (opened, _guest) = opened(Clock::host(), handler).await;
    let mut head = request(Body::empty());
    *head.uri_mut() = "/sandbox.v1.Agent/Head".parse().unwrap();
    let error = within(opened.link.call(head)).await.unwrap_err();
    assert!(matches!(error, LinkError::Lost(_)), "{error:?}");
    // Trailers too long lose what is too long; the call ends all the same.
    let reply = within(opened.link.call(request(Body::empty()))).await.unwrap();
    let (data, trailers) = collect(reply.into_body()).await.unwrap();
    assert!(data.is_empty() && trailers.is_none_or(|trailers| !trailers.contains_key("x-big")));
}

struct Here;

impl Answer for Here {
    fn answer(
        &self,
        request: http::Request<Body>,
    ) -> Pin<Box<dyn Future<Output = http::Response<Body>> + Send>> {
        Box::pin(async move { http::Response::new(request.into_body()) })
    }
}

#[tokio::test]
async fn in_process_links_answer_and_are_small() {
    assert!(
        size_of::<Inner>() + size_of::<Signals>() + 4 * size_of::<usize>() < 1024,
        "{} + {}",
        size_of::<Inner>(),
        size_of::<Signals>()
    );
    let link = Link::in_process(Arc::new(Here), Clock::host());
    let reply = within(link.call(request(full(b"here")))).await.unwrap();
    assert_eq!(collect(reply.into_body()).await.unwrap().0, b"here");
    assert!(link.heard() > Tick::default());
    link.close();
    assert_eq!(within(link.lost()).await, LostWhy::Closed);
    assert!(link.call(request(full(b"x"))).await.is_err());
}
