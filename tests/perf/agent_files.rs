//! A file of 256 MiB, pushed and pulled: over silkd's link alone and through daemon and SDK, beside plain copies over a Unix
//! socket: out of the same file for pull, into a new one for push.
#![expect(clippy::large_futures, reason = "no code of a service")]

use std::{
    io::{Read as _, Write as _},
    os::unix::{ffi::OsStrExt as _, net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::StreamExt as _;
use sandbox_protocol::{
    limits::CHUNK_IN,
    v1::{AgentReadRequest, WriteIn, WriteStart, read_out, write_in},
};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use crate::{
    Bench,
    agent::guests_of,
    arm::{median, millis, timed},
    daemon::{Daemon, Guests, Setup, with},
    guest::{Guest, memory_kib},
    host,
    stock::Stock,
};

/// Bytes of the file.
const FILE: u64 = 256 << 20;
/// What a plain copy moves at once.
const PIECE: usize = 256 << 10;
/// Rounds of A B B A.
const ROUNDS: usize = 3;

/// The file that is pushed and pulled, on the file system of the temporary directory.
struct Place {
    _dir: tempfile::TempDir,
    path: PathBuf,
    content: Bytes,
    digest: Vec<u8>,
}

impl Place {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let block = (0..CHUNK_IN)
            .map(|n| u8::try_from(n % 251).unwrap_or(0))
            .collect::<Vec<_>>();
        let content = Bytes::from(block.repeat(usize::try_from(FILE)? / CHUNK_IN));
        Ok(Self {
            path: dir.path().join("file"),
            _dir: dir,
            digest: Sha256::digest(&content).to_vec(),
            content,
        })
    }

    /// What lies there is what was sent.
    fn check(&self) -> Result<()> {
        let there = std::fs::read(&self.path)?;
        ensure!(
            Sha256::digest(&there).as_slice() == self.digest,
            "other bytes lie there"
        );
        Ok(())
    }

    /// What came is what was sent; looked at when no clock runs.
    fn check_all(&self, pieces: &[Bytes]) -> Result<()> {
        let mut sha = Sha256::new();
        pieces.iter().for_each(|piece| sha.update(piece));
        ensure!(sha.finalize().as_slice() == self.digest, "other bytes came");
        Ok(())
    }
}

/// What becomes of bytes that came. With a clock running they are counted and let go, as the plain copy does.
#[derive(Debug)]
enum Came {
    Counted(u64),
    Kept(Vec<Bytes>),
}

impl Came {
    fn take(&mut self, piece: Bytes) -> Result<()> {
        match self {
            Self::Counted(bytes) => *bytes += u64::try_from(piece.len())?,
            Self::Kept(pieces) => pieces.push(piece),
        }
        Ok(())
    }

    fn check(self, place: &Place) -> Result<()> {
        match self {
            Self::Counted(bytes) => ensure!(bytes == FILE, "{bytes} bytes came"),
            Self::Kept(pieces) => place.check_all(&pieces)?,
        }
        Ok(())
    }
}

/// Times of each way, in ms, and how many cores were busy meanwhile, whoever kept them so.
#[derive(Default)]
struct Ways {
    copy: Vec<f64>,
    copy_in: Vec<f64>,
    push: Vec<f64>,
    push_cores: Vec<f64>,
    pull: Vec<f64>,
    pull_cores: Vec<f64>,
}

impl Ways {
    fn pushed(&mut self, (ms, cores): (f64, f64)) {
        self.push.push(ms);
        self.push_cores.push(cores);
    }

    fn pulled(&mut self, (ms, cores): (f64, f64)) {
        self.pull.push(ms);
        self.pull_cores.push(cores);
    }

    fn json(self, peaks: impl IntoIterator<Item = (&'static str, u64)>) -> Result<Value> {
        let mut row = Map::new();
        let mib = f64::from(u32::try_from(FILE >> 20)?);
        for (name, all) in [
            ("copy", self.copy),
            ("copy_in", self.copy_in),
            ("write", self.push),
            ("read", self.pull),
        ] {
            let ms = median(all).context("nothing was measured")?;
            row.insert(format!("{name}_ms"), ms.into());
            row.insert(format!("{name}_mib_per_s"), (mib / ms * 1_000.0).round().into());
        }
        for (name, all) in [
            ("write_cores_busy", self.push_cores),
            ("read_cores_busy", self.pull_cores),
        ] {
            let cores = median(all).context("nothing was measured")?;
            row.insert(name.to_owned(), ((cores * 100.0).round() / 100.0).into());
        }
        row.insert("mib".to_owned(), (FILE >> 20).into());
        row.extend(peaks.into_iter().map(|(name, kib)| (name.to_owned(), kib.into())));
        Ok(row.into())
    }
}

/// How long something took, in ms, and how many cores were busy meanwhile.
async fn busy(what: impl Future<Output = Result<Duration>>) -> Result<(f64, f64)> {
    let before = host::busy()?;
    let took = what.await?;
    let busy = host::busy()?.saturating_sub(before);
    Ok((millis(took), busy.as_secs_f64() / took.as_secs_f64()))
}

/// The file, read and written through a Unix socket by two threads that do nothing else.
async fn copy(path: &Path) -> Result<Duration> {
    let path = path.to_owned();
    between(
        move |mut to| {
            let mut file = std::fs::File::open(path)?;
            let mut piece = vec![0; PIECE];
            loop {
                let n = file.read(&mut piece)?;
                if n == 0 {
                    return Ok(());
                }
                to.write_all(piece.get(..n).unwrap_or_default())?;
            }
        },
        |_piece| Ok(()),
        || Ok(()),
    )
    .await
}

/// The content, written through a Unix socket and into a new file that takes the file's place.
async fn copy_in(place: &Place) -> Result<Duration> {
    let content = place.content.clone();
    let path = place.path.clone();
    let beside = path.with_extension("beside");
    let mut file = std::fs::File::create(&beside)?;
    between(
        move |mut to| content.chunks(PIECE).try_for_each(|piece| to.write_all(piece)),
        move |piece| file.write_all(piece),
        move || std::fs::rename(beside, path),
    )
    .await
}

/// What one thread sends, and what another does with each piece and at the end.
async fn between(
    send: impl FnOnce(UnixStream) -> std::io::Result<()> + Send + 'static,
    mut take: impl FnMut(&[u8]) -> std::io::Result<()> + Send + 'static,
    end: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> Result<Duration> {
    let copied = tokio::task::spawn_blocking(move || {
        let (mut from, to) = UnixStream::pair()?;
        let began = std::time::Instant::now();
        let sender = std::thread::spawn(move || send(to));
        let mut piece = vec![0; PIECE];
        let mut bytes = 0;
        loop {
            let n = from.read(&mut piece)?;
            if n == 0 {
                break;
            }
            take(piece.get(..n).unwrap_or_default())?;
            bytes += u64::try_from(n)?;
        }
        end()?;
        let took = began.elapsed();
        sender
            .join()
            .map_err(|_panicked| anyhow::anyhow!("the sender panicked"))??;
        ensure!(bytes == FILE, "{bytes} bytes came");
        Ok(took)
    });
    copied.await?
}

/// Over silkd's link, without a daemon between.
pub(crate) async fn alone(guest: &mut Guest) -> Result<Value> {
    let place = Place::new()?;
    let mut ways = Ways::default();
    push(guest, &place).await?;
    pull(guest, &place, Came::Kept(Vec::new())).await?;
    for _ in 0..ROUNDS {
        ways.pushed(busy(push(guest, &place)).await?);
        place.check()?;
        ways.copy_in.push(millis(copy_in(&place).await?));
        ways.copy.push(millis(copy(&place.path).await?));
        ways.pulled(busy(pull(guest, &place, Came::Counted(0))).await?);
        ways.pulled(busy(pull(guest, &place, Came::Counted(0))).await?);
        ways.copy.push(millis(copy(&place.path).await?));
        ways.copy_in.push(millis(copy_in(&place).await?));
        ways.pushed(busy(push(guest, &place)).await?);
    }
    let peak = memory_kib(guest.pid()?, "status", "VmHWM:")?;
    ways.json([("silkd_peak_rss_kib", peak)])
}

async fn push(guest: &mut Guest, place: &Place) -> Result<Duration> {
    let start = write_in::M::Start(WriteStart {
        path: place.path.as_os_str().as_bytes().to_vec().into(),
        size: Some(FILE),
        ..WriteStart::default()
    });
    let content = place.content.clone();
    let pieces = (0..content.len())
        .step_by(CHUNK_IN)
        .map(move |at| write_in::M::Data(content.slice(at..(at + CHUNK_IN).min(content.len()))));
    let messages = futures_util::stream::iter([start].into_iter().chain(pieces));
    let messages = messages.map(|m| WriteIn { m: Some(m) });
    let (took, reply) = timed(guest.agent.write(messages)).await;
    ensure!(reply?.into_inner().bytes == FILE, "a short write");
    Ok(took)
}

async fn pull(guest: &mut Guest, place: &Place, mut came: Came) -> Result<Duration> {
    let request = AgentReadRequest {
        path: place.path.as_os_str().as_bytes().to_vec().into(),
        ..AgentReadRequest::default()
    };
    let began = Instant::now();
    let mut output = guest.agent.read(request).await?.into_inner();
    while let Some(message) = output.message().await? {
        if let Some(read_out::M::Data(data)) = message.m {
            came.take(data)?;
        }
    }
    let took = began.elapsed();
    came.check(place)?;
    Ok(took)
}

/// Through daemon and SDK.
pub(crate) async fn through(bench: &Bench) -> Result<Value> {
    let setup = Setup {
        guests: Guests::Silkd,
        sync_always: false,
        doors: None,
    };
    with(bench, setup, async |daemon: &mut Daemon| {
        let stock = Stock::open(daemon.client().await?, 1).await?;
        let (_took, sandbox) = stock.claim().await;
        let sandbox = sandbox?;
        let files = sandbox.files();
        let place = Place::new()?;
        let mut ways = Ways::default();
        for round in 0..=ROUNDS {
            for half in 0..2 {
                let write = files.write(&place.path).size(FILE).bytes(place.content.clone());
                let writing = async {
                    let (took, written) = timed(write).await;
                    written?;
                    Ok(took)
                };
                ways.pushed(busy(writing).await?);
                place.check()?;
                if half == 0 {
                    ways.copy_in.push(millis(copy_in(&place).await?));
                    ways.copy.push(millis(copy(&place.path).await?));
                }
                // The first is looked at, and not measured.
                let mut came = match (round, half) {
                    (0, 0) => Came::Kept(Vec::new()),
                    _ => Came::Counted(0),
                };
                let reading = async {
                    let began = Instant::now();
                    let mut reader = files.read(&place.path).stream().await?;
                    while let Some(piece) = reader.next().await {
                        came.take(piece?)?;
                    }
                    Ok(began.elapsed())
                };
                ways.pulled(busy(reading).await?);
                came.check(&place)?;
                if half == 1 {
                    ways.copy.push(millis(copy(&place.path).await?));
                    ways.copy_in.push(millis(copy_in(&place).await?));
                }
            }
            if round == 0 {
                ways = Ways::default();
            }
        }
        let silkd = guests_of(daemon.pid()?)?
            .into_iter()
            .map(|pid| memory_kib(pid, "status", "VmHWM:"));
        let silkd = silkd.collect::<Result<Vec<u64>>>()?.into_iter().max();
        let sandboxd = memory_kib(daemon.pid()?, "status", "VmHWM:")?;
        sandbox.release().await?;
        let silkd = silkd.context("no silkd below the daemon")?;
        ways.json([("silkd_peak_rss_kib", silkd), ("sandboxd_peak_rss_kib", sandboxd)])
    })
    .await
}
