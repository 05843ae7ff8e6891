//! A file of 256 MiB, pushed and pulled: over silkd's link alone and through daemon and SDK, beside a plain copy of the
//! same file over a Unix socket.
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

    /// What came is what was sent; looked at when no clock runs.
    fn check(&self, pieces: &[Bytes]) -> Result<()> {
        let mut sha = Sha256::new();
        pieces.iter().for_each(|piece| sha.update(piece));
        ensure!(sha.finalize().as_slice() == self.digest, "other bytes came");
        Ok(())
    }
}

/// Times of each way, in ms.
#[derive(Default)]
struct Ways {
    copy: Vec<f64>,
    push: Vec<f64>,
    pull: Vec<f64>,
}

impl Ways {
    fn json(self, peaks: impl IntoIterator<Item = (&'static str, u64)>) -> Result<Value> {
        let mut row = Map::new();
        let mib = f64::from(u32::try_from(FILE >> 20)?);
        for (name, all) in [("copy", self.copy), ("write", self.push), ("read", self.pull)] {
            let ms = median(all).context("nothing was measured")?;
            row.insert(format!("{name}_ms"), ms.into());
            row.insert(format!("{name}_mib_per_s"), (mib / ms * 1_000.0).round().into());
        }
        row.insert("mib".to_owned(), (FILE >> 20).into());
        row.extend(peaks.into_iter().map(|(name, kib)| (name.to_owned(), kib.into())));
        Ok(row.into())
    }
}

/// The file, read and written through a Unix socket by two threads that do nothing else.
async fn copy(path: &Path) -> Result<Duration> {
    let path = path.to_owned();
    let copied = tokio::task::spawn_blocking(move || {
        let (mut from, mut to) = UnixStream::pair()?;
        let began = std::time::Instant::now();
        let reader = std::thread::spawn(move || {
            let mut file = std::fs::File::open(path)?;
            let mut piece = vec![0; PIECE];
            loop {
                let n = file.read(&mut piece)?;
                if n == 0 {
                    return std::io::Result::Ok(());
                }
                to.write_all(piece.get(..n).unwrap_or_default())?;
            }
        });
        let mut piece = vec![0; PIECE];
        let mut bytes = 0;
        loop {
            let n = from.read(&mut piece)?;
            if n == 0 {
                break;
            }
            bytes += u64::try_from(n)?;
        }
        let took = began.elapsed();
        reader
            .join()
            .map_err(|_panicked| anyhow::anyhow!("the reader panicked"))??;
        ensure!(bytes == FILE, "{bytes} bytes came");
        Ok(took)
    });
    copied.await?
}

/// Over silkd's link, without a daemon between.
pub(crate) async fn alone(guest: &mut Guest) -> Result<Value> {
    let place = Place::new()?;
    let mut ways = Ways::default();
    for _ in 0..ROUNDS {
        ways.push.push(millis(push(guest, &place).await?));
        ways.copy.push(millis(copy(&place.path).await?));
        ways.pull.push(millis(pull(guest, &place).await?));
        ways.pull.push(millis(pull(guest, &place).await?));
        ways.copy.push(millis(copy(&place.path).await?));
        ways.push.push(millis(push(guest, &place).await?));
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

async fn pull(guest: &mut Guest, place: &Place) -> Result<Duration> {
    let request = AgentReadRequest {
        path: place.path.as_os_str().as_bytes().to_vec().into(),
        ..AgentReadRequest::default()
    };
    let began = Instant::now();
    let mut output = guest.agent.read(request).await?.into_inner();
    let mut pieces = Vec::new();
    while let Some(message) = output.message().await? {
        if let Some(read_out::M::Data(data)) = message.m {
            pieces.push(data);
        }
    }
    let took = began.elapsed();
    place.check(&pieces)?;
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
        for _ in 0..ROUNDS {
            for half in 0..2 {
                let write = files.write(&place.path).size(FILE).bytes(place.content.clone());
                let (took, written) = timed(write).await;
                written?;
                ways.push.push(millis(took));
                if half == 0 {
                    ways.copy.push(millis(copy(&place.path).await?));
                }
                let began = Instant::now();
                let mut reader = files.read(&place.path).stream().await?;
                let mut pieces = Vec::new();
                while let Some(piece) = reader.next().await {
                    pieces.push(piece?);
                }
                ways.pull.push(millis(began.elapsed()));
                place.check(&pieces)?;
                if half == 1 {
                    ways.copy.push(millis(copy(&place.path).await?));
                }
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
