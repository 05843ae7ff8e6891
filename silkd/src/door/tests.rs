use std::{
    future::Future,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use h2::server;
use http::Response;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    net::TcpStream,
};

use super::*;

async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(30), future)
        .await
        .expect("nothing hangs")
}

struct Bench {
    doors: Doors,
    probe: Probe,
    http: SocketAddr,
    socks5: SocketAddr,
    listening: tokio::task::JoinHandle<()>,
}

fn bench() -> Bench {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listeners = Listeners::bind(any, any).unwrap();
    let (http, socks5) = (listeners.http.1, listeners.socks5.1);
    let doors = Doors::default();
    let probe = listeners.probe(doors.clone());
    let listening = crate::tasks::spawn(doors.clone().listen(listeners).unwrap());
    Bench {
        doors,
        probe,
        http,
        socks5,
        listening,
    }
}

impl Bench {
    /// A host's end, and the task that serves the guest's.
    async fn host(
        &self,
    ) -> (
        server::Connection<DuplexStream, Bytes>,
        tokio::task::JoinHandle<()>,
    ) {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let doors = self.doors.clone();
        let serving = crate::tasks::spawn(async move { Box::pin(doors.serve(theirs)).await });
        let connection = within(Box::pin(server::handshake(ours))).await.unwrap();
        while self.doors.way().is_none() {
            tokio::task::yield_now().await;
        }
        (connection, serving)
    }
}

async fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    within(stream.read_to_end(&mut all)).await.unwrap();
    all
}

#[tokio::test]
async fn door_link_down_is_typed() {
    let bench = bench();
    for _ in 0..2 {
        let mut program = TcpStream::connect(bench.http).await.unwrap();
        program
            .write_all(b"GET http://a/ HTTP/1.1\r\n\r\n")
            .await
            .unwrap();
        let answer = String::from_utf8(read_all(&mut program).await).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 503 door_unreachable\r\n"),
            "{answer}"
        );
        assert!(
            answer.contains("sandbox-deny-reason: door_unreachable\r\n"),
            "{answer}"
        );

        let mut program = TcpStream::connect(bench.socks5).await.unwrap();
        program.write_all(&[5, 1, 0]).await.unwrap();
        program
            .write_all(&[5, 1, 0, 1, 127, 0, 0, 1, 0, 80])
            .await
            .unwrap();
        program.shutdown().await.unwrap();
        assert_eq!(read_all(&mut program).await, [5, 0, 5, 1, 0, 1, 0, 0, 0, 0, 0, 0]);

        // A link that comes and goes leaves the same answer behind.
        let (connection, serving) = Box::pin(bench.host()).await;
        drop(connection);
        within(serving).await.unwrap();
    }
    bench.listening.abort();
}

#[tokio::test]
async fn ends_and_resets_pass_both_ways() {
    let bench = bench();
    let (mut connection, _serving) = Box::pin(bench.host()).await;
    let serving = crate::tasks::spawn(async move {
        let mut seen = Vec::new();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            seen.push(request.uri().to_string());
            if seen.len() == 3 {
                respond.send_reset(h2::Reason::CANCEL);
                continue;
            }
            let mut send = respond.send_response(Response::new(()), false).unwrap();
            let mut body = request.into_body();
            // Flow control and frames are driven by accepting; the relays here are small enough for one turn.
            drop(crate::tasks::spawn(async move {
                let mut all = Vec::new();
                while let Some(Ok(chunk)) = body.data().await {
                    body.flow_control().release_capacity(chunk.len()).unwrap();
                    all.extend_from_slice(&chunk);
                }
                send.send_data(all.into(), true).unwrap();
            }));
        }
        seen
    });
    // The program ends first, and is answered after that.
    for address in [bench.http, bench.socks5] {
        let mut program = TcpStream::connect(address).await.unwrap();
        program.write_all(b"hello").await.unwrap();
        program.shutdown().await.unwrap();
        assert_eq!(read_all(&mut program).await, b"hello");
    }
    // A reset before the answer is a refusal.
    let mut program = TcpStream::connect(bench.http).await.unwrap();
    let answer = read_all(&mut program).await;
    assert!(answer.starts_with(b"HTTP/1.1 503 door_unreachable\r\n"));
    // The program is reset: its stream is, too, and another goes on.
    let program = TcpStream::connect(bench.http).await.unwrap();
    program.set_zero_linger().unwrap();
    drop(program);
    let mut program = TcpStream::connect(bench.http).await.unwrap();
    program.write_all(b"again").await.unwrap();
    program.shutdown().await.unwrap();
    assert_eq!(read_all(&mut program).await, b"again");
    bench.listening.abort();
    drop(bench.listening.await);
    drop(bench.doors);
    serving.abort();
}

#[test]
fn programs_are_told_where_their_doors_are() {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listeners = Listeners::bind(any, any).unwrap();
    let env = listeners.env();
    let value = |key: &str| {
        let var = env.iter().find(|var| var.key == key.as_bytes());
        String::from_utf8(var.unwrap_or_else(|| panic!("{key}")).value.to_vec()).unwrap()
    };
    for key in ["http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
        assert_eq!(value(key), format!("http://{}", listeners.http.1));
    }
    assert_eq!(value("SANDBOX_SOCKS5"), listeners.socks5.1.to_string());
    assert_eq!(value("NO_PROXY"), "localhost,127.0.0.1,::1");
    assert_eq!(value("NODE_USE_ENV_PROXY"), "1");
}

/// All guests have one address: what tells their connections apart at the host is the port.
#[tokio::test]
async fn relays_by_card_leave_from_ports_of_chance() {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let door = tokio::net::TcpListener::bind(any).await.unwrap();
    let at = door.local_addr().unwrap();
    let listeners = Listeners {
        by_card: Some([at, at]),
        ..Listeners::bind(any, any).unwrap()
    };
    let http = listeners.http.1;
    let listening = crate::tasks::spawn(Doors::default().listen(listeners).unwrap());
    let mut ports = Vec::new();
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push((
            TcpStream::connect(http).await.unwrap(),
            within(door.accept()).await.unwrap(),
        ));
        ports.push(open.last().unwrap().1.1.port());
    }
    // The kernel's own choices to one address lie close together.
    ports.sort_unstable();
    assert!(ports[7] - ports[0] > 1_000, "{ports:?}");
    assert!(ports[0] >= 0x8000, "{ports:?}");
    listening.abort();
}

/// Far more programs than there are places, none of which leaves before all are told: each is told, and none is reset.
#[tokio::test]
async fn every_program_is_told_however_many_dial() {
    const PROGRAMS: usize = 200;
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listeners = Listeners::bind(any, any).unwrap();
    let at = [listeners.http.1, listeners.socks5.1];
    let doors = Doors(Arc::new(Inner {
        places: Places::of(8, 2),
        ..Inner::default()
    }));
    let bench = Bench {
        doors: doors.clone(),
        probe: listeners.probe(doors.clone()),
        http: at[0],
        socks5: at[1],
        listening: crate::tasks::spawn(doors.listen(listeners).unwrap()),
    };
    // Two have the streams, and keep them.
    let (mut connection, _serving) = Box::pin(bench.host()).await;
    let serving = crate::tasks::spawn(async move {
        let mut held = Vec::new();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let send = respond.send_response(Response::new(()), false).unwrap();
            held.push((request, send));
            assert!(held.len() <= 2, "no more than have a stream");
        }
    });
    let mut open = Vec::new();
    for _ in 0..2 {
        open.push(TcpStream::connect(bench.http).await.unwrap());
    }
    while bench.doors.0.places.streams_left() > 0 {
        tokio::task::yield_now().await;
    }
    for n in 0..PROGRAMS {
        let mut program = within(TcpStream::connect(at[n % 2])).await.unwrap();
        if n % 2 == 0 {
            program.write_all(b"CONNECT a:1 HTTP/1.1\r\n\r\n").await.unwrap();
            let mut said = vec![0; 35];
            within(program.read_exact(&mut said)).await.unwrap();
            assert_eq!(said, b"HTTP/1.1 503 too_many_connections\r\n");
        } else {
            program.write_all(&[5, 1, 0, 5, 1, 0, 3]).await.unwrap();
            let mut said = [0; 12];
            within(program.read_exact(&mut said)).await.unwrap();
            assert_eq!(said, [5, 0, 5, 1, 0, 1, 0, 0, 0, 0, 0, 0]);
        }
        // Held open, as by a program that looks at its answer later.
        open.push(program);
    }
    drop(open);
    bench.listening.abort();
    serving.abort();
}

/// On lane guarded the doors are reached by the card; no stream is opened, and ends pass both ways.
#[tokio::test]
async fn a_card_is_spliced_and_a_door_that_is_not_there_is_told() {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let door = tokio::net::TcpListener::bind(any).await.unwrap();
    // Bound, so that nobody else is there, and not listening.
    let nobody = tokio::net::TcpSocket::new_v4().unwrap();
    nobody.bind(any).unwrap();
    let gone = nobody.local_addr().unwrap();
    let listeners = Listeners {
        by_card: Some([door.local_addr().unwrap(), gone]),
        ..Listeners::bind(any, any).unwrap()
    };
    let (http, socks5) = (listeners.http.1, listeners.socks5.1);
    let listening = crate::tasks::spawn(Doors::default().listen(listeners).unwrap());
    let mut program = TcpStream::connect(http).await.unwrap();
    program.write_all(b"asked").await.unwrap();
    program.shutdown().await.unwrap();
    let (mut host, _) = within(door.accept()).await.unwrap();
    let mut heard = Vec::new();
    within(host.read_to_end(&mut heard)).await.unwrap();
    assert_eq!(heard, b"asked");
    host.write_all(b"answered").await.unwrap();
    drop(host);
    heard.clear();
    within(program.read_to_end(&mut heard)).await.unwrap();
    assert_eq!(heard, b"answered");
    // A loss is a loss.
    let mut program = TcpStream::connect(http).await.unwrap();
    program.write_all(b"?").await.unwrap();
    let (mut host, _) = within(door.accept()).await.unwrap();
    within(host.read_exact(&mut [0; 1])).await.unwrap();
    host.set_zero_linger().unwrap();
    drop(host);
    let lost = within(program.read(&mut [0; 1]))
        .await
        .map_err(|error| error.kind());
    assert_eq!(lost, Err(io::ErrorKind::ConnectionReset));
    let mut program = TcpStream::connect(socks5).await.unwrap();
    program.write_all(&[5, 1, 0, 5, 1, 0, 3]).await.unwrap();
    program.shutdown().await.unwrap();
    heard.clear();
    within(program.read_to_end(&mut heard)).await.unwrap();
    assert_eq!(heard, [5, 0, 5, 1, 0, 1, 0, 0, 0, 0, 0, 0]);
    listening.abort();
}

/// A door that says something to whoever comes, and takes no request.
async fn door_that_says(words: &'static [u8]) -> SocketAddr {
    let door = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let at = door.local_addr().unwrap();
    drop(crate::tasks::spawn(async move {
        while let Ok((mut guest, _)) = door.accept().await {
            guest.write_all(words).await.unwrap();
            guest.shutdown().await.unwrap();
            assert_eq!(guest.read(&mut [0; 1]).await.unwrap(), 0, "nothing is asked for");
        }
    }));
    at
}

fn said(http: &[u8], socks5: &[u8]) -> Said {
    Said {
        http: http.into(),
        socks5: socks5.into(),
    }
}

#[tokio::test]
async fn a_probe_tells_what_both_doors_say_by_the_card() {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let long = door_that_says(&[b'x'; 3_000]).await;
    let refuses = door_that_says(&[5, 0xff]).await;
    let listeners = Listeners {
        by_card: Some([long, refuses]),
        ..Listeners::bind(any, any).unwrap()
    };
    let doors = Doors::default();
    let probe = listeners.probe(doors.clone());
    let listening = crate::tasks::spawn(doors.listen(listeners).unwrap());
    // The beginning of each is told.
    assert_eq!(within(Box::pin(probe.ask())).await, said(&[b'x'; 64], &[5, 0xff]));
    listening.abort();
}

/// A guest's side may not be up yet when the host's is: the probe waits for it, and takes no answer of silkd's own.
#[tokio::test]
async fn a_probe_waits_for_the_way_to_the_host() {
    let bench = bench();
    let probe = bench.probe.clone();
    let asking = crate::tasks::spawn(async move { probe.ask().await });
    // Time enough for an answer of silkd's own, which takes nothing but turns.
    for _ in 0..10_000 {
        tokio::task::yield_now().await;
    }
    assert!(!asking.is_finished(), "it waits");
    let (mut connection, _serving) = Box::pin(bench.host()).await;
    let serving = crate::tasks::spawn(async move {
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let words = match request.uri().to_string().as_str() {
                door::HTTP => &b"HTTP/1.1 403 not_armed\r\n"[..],
                _ => &[5, 0xff],
            };
            let mut send = respond.send_response(Response::new(()), false).unwrap();
            send.send_data(Bytes::from_static(words), true).unwrap();
            // A body that is dropped before its end resets the stream.
            let mut body = request.into_body();
            drop(crate::tasks::spawn(async move {
                while let Some(Ok(_)) = body.data().await {}
            }));
        }
    });
    let answer = said(b"HTTP/1.1 403 not_armed\r\n", &[5, 0xff]);
    assert_eq!(within(asking).await.unwrap(), answer);
    bench.listening.abort();
    serving.abort();
}

#[tokio::test(start_paused = true)]
async fn a_probe_of_doors_that_do_not_answer_ends() {
    // Without a way to the host.
    let bench = bench();
    let begun = tokio::time::Instant::now();
    assert_eq!(bench.probe.ask().await, said(b"", b""));
    bench.listening.abort();
    // By a card behind which a door takes the connection and says nothing, and one is not there.
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let silent = tokio::net::TcpListener::bind(any).await.unwrap();
    let listeners = Listeners {
        by_card: Some([silent.local_addr().unwrap(); 2]),
        ..Listeners::bind(any, any).unwrap()
    };
    let doors = Doors::default();
    let probe = listeners.probe(doors.clone());
    let listening = crate::tasks::spawn(doors.listen(listeners).unwrap());
    assert_eq!(probe.ask().await, said(b"", b""));
    // Twice as long as one may take.
    assert!(
        begun.elapsed() <= Duration::from_secs(11),
        "{:?}",
        begun.elapsed()
    );
    listening.abort();
    drop(silent);
}
