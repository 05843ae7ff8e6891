//! One connection of a program, and its way to the host.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream, client::SendRequest};
use http::{Method, Request, StatusCode, Uri, Version};
use rustix::rand::{GetRandomFlags, getrandom};
use sandbox_protocol::{door::DoorReason, metadata::door::DENY_REASON};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{
        TcpListener, TcpSocket, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    time::{sleep, timeout},
};

use super::{Doors, places::Place};
use crate::tasks::Group;

/// Bytes read of a program at once.
const PIECE: usize = 16 * 1024;
/// What a program may still send after it was told that there is no way.
const FAREWELL: Duration = Duration::from_secs(5);
/// For a door to answer a dial. A daemon that is started again needs a second of it.
const REACH: Duration = Duration::from_secs(10);
/// Ports of chance that are tried.
const CHANCES: usize = 8;
/// Until connections are accepted again, when descriptors have run out.
const PAUSE: Duration = Duration::from_millis(50);

/// Which door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Http,
    Socks5,
}

/// By what a door is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    /// The connection to the host, while there is one.
    Link,
    /// The guest's card.
    Card(SocketAddr),
}

/// The way to the host, as it is when a program connects.
enum Way {
    Link(SendRequest<Bytes>),
    Card(SocketAddr),
}

/// Accepts for ever. Nobody is turned away unanswered: where all places are taken, the next one waits for one, and the
/// kernel's backlog holds those behind it.
pub(super) async fn accept(listener: &TcpListener, (kind, to): (Kind, To), doors: &Doors, relays: &Group) {
    loop {
        match listener.accept().await {
            Ok((program, _)) => {
                let place = doors.place().await;
                let way = match to {
                    To::Link => doors.way().map(Way::Link),
                    To::Card(door) => Some(Way::Card(door)),
                };
                relays.spawn(async move {
                    relay(program, kind, way, &place).await;
                    drop(place);
                });
            }
            // A program that left before it was looked at, or no descriptor.
            Err(_) => sleep(PAUSE).await,
        }
    }
}

fn reset(program: &TcpStream) {
    // A connection that is gone needs none.
    program.set_zero_linger().ok();
}

async fn relay(mut program: TcpStream, kind: Kind, way: Option<Way>, place: &Place) {
    let opened = match way {
        _ if !place.has_stream() => Err(DoorReason::TooManyConnections),
        Some(Way::Card(door)) => return by_card(program, kind, door, place).await,
        Some(Way::Link(way)) => open(way, kind).await.ok_or(DoorReason::DoorUnreachable),
        None => Err(DoorReason::DoorUnreachable),
    };
    match opened {
        Ok((send, recv)) => {
            program.set_nodelay(true).ok();
            let (from, to) = program.split();
            let both = async { tokio::try_join!(up(from, send), down(recv, to)) };
            if both.await.is_err() {
                reset(&program);
            }
        }
        Err(reason) => refuse(program, kind, reason, place).await,
    }
}

/// Splices a program to a door that is reached by the card: an end is passed on as an end, and a loss as a loss.
async fn by_card(mut program: TcpStream, kind: Kind, door: SocketAddr, place: &Place) {
    let Ok(Ok(mut host)) = timeout(REACH, connect(door)).await else {
        return refuse(program, kind, DoorReason::DoorUnreachable, place).await;
    };
    for side in [&program, &host] {
        side.set_nodelay(true).ok();
    }
    if copy_bidirectional(&mut program, &mut host).await.is_err() {
        reset(&program);
        reset(&host);
    }
}

/// Connects to a door from a port of chance. Every clone of a template would have the kernel choose the same ports in the
/// same order, and all of them have one address: the host would look through all such connections for each packet.
async fn connect(door: SocketAddr) -> io::Result<TcpStream> {
    for _ in 0..CHANCES {
        let socket = TcpSocket::new_v4()?;
        match socket.bind((Ipv4Addr::UNSPECIFIED, port()?).into()) {
            Ok(()) => return socket.connect(door).await,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    TcpStream::connect(door).await
}

/// One of the ports that no service is expected at. The kernel draws it: its randomness is a clone's own.
fn port() -> io::Result<u16> {
    let mut drawn = [0; 2];
    // The kernel never gives less of so little.
    getrandom(&mut drawn[..], GetRandomFlags::empty())?;
    Ok(u16::from_ne_bytes(drawn) | 0x8000)
}

/// Opens a stream to a door.
async fn open(way: SendRequest<Bytes>, kind: Kind) -> Option<(SendStream<Bytes>, RecvStream)> {
    let mut way = way.ready().await.ok()?;
    let request = Request::builder()
        .version(Version::HTTP_2)
        .method(Method::CONNECT)
        .uri(Uri::from_static(kind.authority()))
        .body(())
        .ok()?;
    let (response, send) = way.send_request(request, false).ok()?;
    let response = response.await.ok()?;
    (response.status() == StatusCode::OK).then(|| (send, response.into_body()))
}

fn lost(error: h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, error)
}

/// Resets its stream unless the program's end was passed on.
struct Sending {
    stream: SendStream<Bytes>,
    has_ended: bool,
}

impl Drop for Sending {
    fn drop(&mut self) {
        if !self.has_ended {
            self.stream.send_reset(Reason::CANCEL);
        }
    }
}

/// From the program to the host.
async fn up(mut from: ReadHalf<'_>, stream: SendStream<Bytes>) -> io::Result<()> {
    let mut sending = Sending {
        stream,
        has_ended: false,
    };
    let mut buffer = vec![0; PIECE];
    loop {
        let n = tokio::select! {
            n = from.read(&mut buffer) => n?,
            reason = std::future::poll_fn(|cx| sending.stream.poll_reset(cx)) => {
                // The host wants no more, and may still have something to say.
                match reason.map_err(lost)? {
                    Reason::NO_ERROR => return Ok(()),
                    reason => return Err(lost(reason.into())),
                }
            }
        };
        let mut rest = Bytes::copy_from_slice(buffer.get(..n).unwrap_or_default());
        if rest.is_empty() {
            sending.has_ended = true;
            return sending.stream.send_data(rest, true).map_err(lost);
        }
        while !rest.is_empty() {
            sending.stream.reserve_capacity(rest.len());
            let room = std::future::poll_fn(|cx| sending.stream.poll_capacity(cx)).await;
            let room = room
                .ok_or(io::ErrorKind::ConnectionReset)?
                .map_err(lost)?
                .min(rest.len());
            sending
                .stream
                .send_data(rest.split_to(room), false)
                .map_err(lost)?;
        }
    }
}

/// From the host to the program.
async fn down(mut recv: RecvStream, mut to: WriteHalf<'_>) -> io::Result<()> {
    while let Some(chunk) = recv.data().await {
        let mut chunk = chunk.map_err(lost)?;
        let n = chunk.len();
        to.write_all_buf(&mut chunk).await?;
        recv.flow_control().release_capacity(n).map_err(lost)?;
    }
    to.shutdown().await
}

/// Tells a program that there is no way.
async fn refuse(mut program: TcpStream, kind: Kind, reason: DoorReason, place: &Place) {
    let farewell = async {
        tell(&mut program, kind, reason).await?;
        program.shutdown().await?;
        let mut rest = [0; 1024];
        // What it still sends is taken, so that it can send to its end before it looks at the answer. Where others wait for
        // the place it is only what has come: the answer is with the program by then, loopback being no way to speak of.
        tokio::select! {
            biased;
            end = async { while program.read(&mut rest).await? > 0 {} Ok::<_, io::Error>(()) } => end,
            () = place.wanted() => Ok(()),
        }
    };
    // Whoever does not end in time, or is gone, is cut.
    let told = timeout(FAREWELL, farewell).await;
    if !matches!(told, Ok(Ok(()))) {
        reset(&program);
    }
}

async fn tell(program: &mut TcpStream, kind: Kind, reason: DoorReason) -> io::Result<()> {
    match kind {
        Kind::Http => program.write_all(http_refusal(reason).as_bytes()).await,
        Kind::Socks5 => {
            // Its greeting and its request are read, so that the answer stands where it is looked for.
            let mut head = [0; 2];
            program.read_exact(&mut head).await?;
            let [_, methods] = head;
            let mut rest = vec![0; usize::from(methods)];
            program.read_exact(&mut rest).await?;
            program.write_all(&[5, 0]).await?;
            let mut request = [0; 4];
            program.read_exact(&mut request).await?;
            program
                .write_all(&[5, reason.socks(), 0, 1, 0, 0, 0, 0, 0, 0])
                .await
        }
    }
}

fn http_refusal(reason: DoorReason) -> String {
    let body = format!(
        "{{\"error\":{{\"reason\":\"{}\",\"remedy\":\"{}\",\"retry\":{}}}}}\n",
        reason.as_str(),
        reason.remedy(),
        reason.retry()
    );
    format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\n{DENY_REASON}: {}\r\nretry-after: 1\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{body}",
        reason.http(),
        reason.as_str(),
        reason.as_str(),
        body.len()
    )
}
