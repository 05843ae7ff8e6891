//! Tunnels between two sockets, which the kernel moves once they say much.

use std::{io, sync::atomic::Ordering};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::egress::tests::{Bench, rule, tunnel, within};

/// More than is copied before a pipe is made.
const MUCH: usize = 128 << 10;
/// More than the sockets on the way hold together.
const MORE: usize = 24 << 20;

/// A tunnel of a guest, and its origin's end.
struct Ends {
    bench: Bench,
    guest: TcpStream,
    origin: TcpStream,
    /// Bytes between guest and door: the CONNECT, and what it was answered.
    heads: (u64, u64),
}

impl Ends {
    async fn new(pipes: usize) -> Self {
        let (bench, listener) = Bench::piped(pipes).await;
        let mut guest = TcpStream::connect(bench.listen()).await.unwrap();
        let target = format!("allowed.test:{}", bench.origin.port());
        let answer = within(tunnel(&mut guest, &target)).await;
        assert_eq!(answer, "HTTP/1.1 200 Connection established");
        let origin = within(listener.accept()).await.unwrap().0;
        let heads = Self::counted(&bench);
        Self {
            bench,
            guest,
            origin,
            heads,
        }
    }

    fn counted(bench: &Bench) -> (u64, u64) {
        let armed = bench.door.armed().unwrap();
        let (sent, received) = (&armed.meters.sent, &armed.meters.received);
        (sent.load(Ordering::Relaxed), received.load(Ordering::Relaxed))
    }

    /// Bytes of the guest's that the claim is billed for: from it, and to it.
    fn billed(&self) -> (u64, u64) {
        let (sent, received) = Self::counted(&self.bench);
        (sent - self.heads.0, received - self.heads.1)
    }

    /// Pipes that nobody uses.
    fn left(&self) -> usize {
        self.bench.egress.pipes().left()
    }
}

/// Bytes that show where they were.
fn bytes(n: usize) -> Vec<u8> {
    (0..n).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

async fn say(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) {
    let mut heard = vec![0; bytes.len()];
    let (said, all) = within(async { tokio::join!(from.write_all(bytes), to.read_exact(&mut heard)) }).await;
    said.unwrap();
    all.unwrap();
    assert!(heard == bytes, "{} bytes came as others", bytes.len());
}

/// All that comes, up to the end.
async fn rest(io: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    within(io.read_to_end(&mut all)).await.map(|_n| all)
}

fn is_reset(rest: io::Result<Vec<u8>>) -> bool {
    rest.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
}

#[tokio::test]
async fn a_direction_that_says_much_gets_a_pipe_and_gives_it_back() {
    let mut ends = Ends::new(8).await;
    say(&mut ends.origin, &mut ends.guest, b"little").await;
    assert_eq!(ends.left(), 8);
    let (much, more) = (bytes(MUCH), bytes(MORE));
    say(&mut ends.origin, &mut ends.guest, &much).await;
    assert_eq!(ends.left(), 7, "the origin said much");
    say(&mut ends.guest, &mut ends.origin, &much).await;
    assert_eq!(ends.left(), 6, "both did");
    say(&mut ends.origin, &mut ends.guest, &more).await;
    say(&mut ends.guest, &mut ends.origin, &more).await;
    assert_eq!(ends.left(), 6);
    // Each end is passed on by itself, behind all that was said before it.
    ends.guest.write_all(&much).await.unwrap();
    ends.guest.shutdown().await.unwrap();
    assert!(rest(&mut ends.origin).await.unwrap() == much);
    ends.origin.write_all(&much).await.unwrap();
    ends.origin.shutdown().await.unwrap();
    assert!(rest(&mut ends.guest).await.unwrap() == much);
    let all = u64::try_from(2 * MUCH + MORE).unwrap();
    assert_eq!(ends.billed(), (all, all + 6));
    ends.bench.quiet().await;
    assert_eq!(ends.left(), 8);
}

#[tokio::test]
async fn without_a_pipe_a_tunnel_is_copied_on() {
    for pipes in [0, 1] {
        let mut ends = Ends::new(pipes).await;
        let more = bytes(MORE);
        say(&mut ends.origin, &mut ends.guest, &more).await;
        say(&mut ends.guest, &mut ends.origin, &more).await;
        assert_eq!(ends.left(), 0);
        let all = u64::try_from(MORE).unwrap();
        assert_eq!(ends.billed(), (all, all));
        ends.origin.shutdown().await.unwrap();
        assert!(rest(&mut ends.guest).await.unwrap().is_empty());
        ends.guest.shutdown().await.unwrap();
        assert!(rest(&mut ends.origin).await.unwrap().is_empty());
        ends.bench.quiet().await;
        assert_eq!(ends.left(), pipes);
    }
}

/// Whatever cuts it resets both sides, also while bytes lie in its pipe.
#[tokio::test]
async fn a_spliced_tunnel_is_cut_by_all_that_cuts_one() {
    let cuts: [fn(&Bench); 3] = [
        |bench| bench.door.disarm(),
        |bench| {
            bench.policy(vec![rule("o", "other.test", &[bench.origin.port()])]);
            bench.door.change(bench.sides());
        },
        |_bench| {},
    ];
    for (at, cut) in cuts.into_iter().enumerate() {
        let mut ends = Ends::new(8).await;
        say(&mut ends.origin, &mut ends.guest, &bytes(MUCH)).await;
        assert_eq!(ends.left(), 7, "{at}");
        // Nobody reads: the pipe holds what the guest's socket has no room for.
        let mut said = 0;
        let full = bytes(MUCH);
        while let Some(n) = futures_util::FutureExt::now_or_never(ends.origin.write(&full)) {
            said += n.unwrap();
            tokio::task::yield_now().await;
        }
        assert!(said > 0);
        cut(&ends.bench);
        if at == 2 {
            // The guest's loss is the origin's.
            rustix::net::sockopt::set_socket_linger(&ends.guest, Some(std::time::Duration::ZERO)).unwrap();
            drop(ends.guest);
        } else {
            assert!(is_reset(rest(&mut ends.guest).await), "{at}");
        }
        assert!(is_reset(rest(&mut ends.origin).await), "{at}");
        ends.bench.quiet().await;
        assert_eq!(ends.bench.egress.pipes().left(), 8, "{at}");
    }
}
