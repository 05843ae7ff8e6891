//! Which accelerator: KVM is proved, not assumed. A host can have `/dev/kvm` and still not run a stock kernel.

use std::{
    fs::{self, File, OpenOptions},
    io::Read as _,
    path::Path,
    time::Duration,
};

use sandbox_protocol::link;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use super::host::{Host, Started};
use crate::{
    disk,
    engine::{EngineError, PortName},
    image::{Digest, Image},
    words::{Accel, MemBytes, Size, Vcpus},
};

/// For a guest under KVM to answer on its port. A working one needs 1 to 3 s.
const PROOF: Duration = Duration::from_secs(20);
/// Where verdicts are remembered, below the state directory.
const FILE: &str = "accel.json";
/// Verdicts that are remembered; the oldest goes first.
const REMEMBERED: usize = 32;
/// Largest file that is read.
const FILE_MOST: u64 = 64 * 1024;
/// What the guest of a proof gets.
const PROOF_SIZE: Size = Size {
    vcpus: Vcpus(1),
    memory: MemBytes::from_mib(256),
};

/// What the operator wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccelWish {
    /// KVM if it is proved, else TCG.
    Auto,
    /// KVM or nothing.
    Kvm,
    /// TCG, without a look at KVM.
    Tcg,
}

/// On what a verdict depends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    host_kernel: String,
    qemu: String,
    image: Digest,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Verdict {
    key: Key,
    works: bool,
    why: String,
}

/// The accelerator and why it is that, as a sentence.
pub(super) async fn decide(
    wish: AccelWish,
    host: &Host,
    qemu: &str,
    image: Option<&Image>,
    state_dir: &Path,
) -> Result<(Accel, String), EngineError> {
    match wish {
        AccelWish::Tcg => Ok((Accel::Tcg, "asked for in the configuration".to_owned())),
        AccelWish::Kvm => {
            open_kvm()
                .map_err(|error| EngineError::host("open /dev/kvm, as accel = \"kvm\" demands", error))?;
            Ok((
                Accel::Kvm,
                "asked for in the configuration; not proved".to_owned(),
            ))
        }
        AccelWish::Auto => {
            let (works, why) = judge(host, qemu, image, state_dir).await;
            Ok(if works {
                (Accel::Kvm, why)
            } else {
                tracing::warn!(
                    why,
                    "guests run under software emulation (TCG), many times slower than KVM"
                );
                (Accel::Tcg, why)
            })
        }
    }
}

async fn judge(host: &Host, qemu: &str, image: Option<&Image>, state_dir: &Path) -> (bool, String) {
    if let Err(error) = open_kvm() {
        return (false, format!("/dev/kvm cannot be opened: {error}"));
    }
    if let Some(why) = &host.no_kvm {
        return (false, why.clone());
    }
    let Some(image) = image else {
        return (false, "KVM could not be proved: no image to boot".to_owned());
    };
    let key = Key {
        host_kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        qemu: qemu.to_owned(),
        image: image.digest(),
    };
    let file = state_dir.join(FILE);
    let mut verdicts = read(&file);
    if let Some(known) = verdicts.iter().find(|verdict| verdict.key == key) {
        return (known.works, format!("{} (seen before)", known.why));
    }
    let (works, why) = match Box::pin(prove(host, image)).await {
        Proof::Runs => (true, "an image was booted under KVM and answered".to_owned()),
        Proof::Sick(why) => (
            false,
            format!("/dev/kvm is there but a guest does not run: {why}"),
        ),
        // Not the word of KVM, hence asked again at the next start.
        Proof::NotStarted(why) => return (false, format!("no guest could be started under KVM: {why}")),
    };
    verdicts.push(Verdict {
        key,
        works,
        why: why.clone(),
    });
    let from = verdicts.len().saturating_sub(REMEMBERED);
    let kept = verdicts.get(from..).unwrap_or_default();
    let written = serde_json::to_vec_pretty(kept)
        .map_err(std::io::Error::from)
        .and_then(|text| disk::write_atomic(&file, &text, 0o644));
    if let Err(error) = written {
        tracing::warn!(%error, "cannot remember whether KVM works; it is proved again at the next start");
    }
    (works, why)
}

fn open_kvm() -> std::io::Result<()> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(drop)
}

/// What was remembered; a file that is unreadable or damaged is nothing remembered, and proved anew.
fn read(file: &Path) -> Vec<Verdict> {
    let mut text = Vec::new();
    let read = File::open(file).and_then(|file| file.take(FILE_MOST).read_to_end(&mut text));
    match read {
        Ok(_) => serde_json::from_slice(&text).unwrap_or_default(),
        Err(_) => Vec::new(),
    }
}

/// What came of a guest under KVM.
enum Proof {
    Runs,
    Sick(String),
    NotStarted(String),
}

/// Boots the image under KVM and waits for its agent to say anything.
async fn prove(host: &Host, image: &Image) -> Proof {
    let path = host.hidden("proof");
    let booted = host.boot(&path, Accel::Kvm, image, PROOF_SIZE, None).await;
    let (started, _memory) = match booted {
        Ok(booted) => booted,
        Err(error) => return Proof::NotStarted(chain(&error)),
    };
    let verdict = tokio::select! {
        spoke = timeout(PROOF, speaks(&started)) => match spoke {
            Ok(Ok(())) => Proof::Runs,
            Ok(Err(error)) => Proof::Sick(format!("its port broke: {error}")),
            Err(_elapsed) => Proof::Sick(format!("no answer within {PROOF:?}")),
        },
        report = started.nascent.died() => Proof::Sick(report.to_string()),
        why = super::machine::dead(started.qmp.seen()) => Proof::Sick(why.to_owned()),
    };
    if let Err(error) = started.end().await {
        tracing::warn!(%error, "the guest of a proof is not gone yet; the next start ends it");
    }
    verdict
}

async fn speaks(started: &Started) -> std::io::Result<()> {
    let mut port = started.dir.connect(PortName::Agent.socket()).await?;
    // The nonce is not compared: any byte shows that a guest runs, and this guest serves nobody.
    let nonce = started
        .version
        .bytes()
        .chain(std::iter::repeat(1))
        .take(16)
        .collect::<Vec<_>>();
    let nonce = nonce.try_into().unwrap_or([1; 16]);
    port.write_all(&link::encode_break(nonce)).await?;
    match port.read(&mut [0; 1]).await? {
        0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The processor as a capture notes it. Under KVM a guest sees the host's: model and features must be the same where
/// it is loaded.
pub(super) fn cpu_fact(accel: Accel, cpuinfo: &str) -> String {
    let model = super::args::cpu(accel);
    match accel {
        Accel::Tcg | Accel::None => model.to_owned(),
        Accel::Kvm => {
            let field = |name: &str| {
                let line = cpuinfo
                    .lines()
                    .find(|line| line.split(':').next().map(str::trim) == Some(name));
                line.and_then(|line| line.split_once(':'))
                    .map_or("", |(_, value)| value.trim())
            };
            let features = Digest::of(field("flags").as_bytes()).to_string();
            format!("{model} ({}, features {features})", field("model name"))
        }
    }
}

/// The host's processors, for [`cpu_fact`].
pub(super) fn cpuinfo() -> String {
    fs::read_to_string("/proc/cpuinfo").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_under_kvm_notes_the_hosts_processor() {
        let host = "processor : 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse2 avx\n\nprocessor : 1\n";
        let here = cpu_fact(Accel::Kvm, host);
        assert!(here.starts_with("host (Some CPU, features "), "{here}");
        assert_ne!(here, cpu_fact(Accel::Kvm, &host.replace("avx", "avx2")));
        assert_ne!(here, cpu_fact(Accel::Kvm, &host.replace("Some", "Other")));
        assert_eq!(cpu_fact(Accel::Tcg, host), "max");
    }

    #[test]
    fn damaged_verdicts_are_no_verdicts() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        assert_eq!(read(&file), []);
        let verdict = Verdict {
            key: Key {
                host_kernel: "6.12".to_owned(),
                qemu: "7.2.22".to_owned(),
                image: Digest::of(b""),
            },
            works: false,
            why: "no answer".to_owned(),
        };
        let text = serde_json::to_vec(&[&verdict]).unwrap();
        disk::write_atomic(&file, &text, 0o600).unwrap();
        assert_eq!(read(&file), [verdict]);
        disk::write_atomic(&file, &text[1..], 0o600).unwrap();
        assert_eq!(read(&file), []);
    }
}
