//! A daemon with virtual machines, and the template that all tests share.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    ops::{Deref, DerefMut},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use harness::{Daemon, Setup, image, process::Process, program};
use rustix::fs::{FlockOperation, flock};
use sandbox_sdk::{How, SandboxHandle, v1::State};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

/// A daemon on a state directory of its own.
#[derive(Debug)]
pub(crate) struct Node {
    // Dropped before its folder.
    daemon: Daemon,
    state: TempDir,
}

impl Deref for Node {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl DerefMut for Node {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

/// An empty state directory; its path is short, since sockets lie in it.
pub(crate) fn state_dir() -> TempDir {
    tempfile::Builder::new().prefix("sbx").tempdir().unwrap()
}

impl Node {
    /// A daemon in dev mode that finds the shared template, with its pool full.
    pub(crate) async fn warm(warm: u32) -> Self {
        Self::full("busybox", Setup::qemu(), warm).await
    }

    /// A daemon that finds the shared template of its image, with its pool full.
    pub(crate) async fn full(image: &'static str, setup: Setup, warm: u32) -> Self {
        let full = async {
            let node = Self::on(seeded_with(Plain(image)).await, setup.warm(warm)).await;
            node.until_warm(warm).await;
            node
        };
        Box::pin(full).await
    }

    /// The same in dev mode with guests of the image `debian`.
    pub(crate) async fn debian(warm: u32) -> Self {
        Self::full("debian", Setup::qemu_of("debian"), warm).await
    }

    /// A daemon on this state directory.
    pub(crate) async fn on(state: TempDir, setup: Setup) -> Self {
        let daemon = Box::pin(setup.state_dir(state.path()).start()).await;
        Self { daemon, state }
    }

    /// Claims a warm sandbox, to be released by the test or by the daemon's end.
    pub(crate) async fn claim(&self) -> SandboxHandle {
        let client = self.client().await;
        client.claim("default").warm_only().await.unwrap().keep()
    }

    /// The folder of one variant of a template.
    pub(crate) fn template(&self, name: &str) -> PathBuf {
        variant(self.state.path(), name)
    }

    /// Stops it, and proves that nothing of it is left but what the next start needs.
    pub(crate) async fn stops_clean(mut self) {
        let before = self.sandbox_processes();
        assert!(!before.is_empty(), "there was something to end");
        self.daemon.stop().await;
        for process in before {
            assert!(!process.lives(), "{process:?} outlived a clean stop");
        }
        let run = fs::read_dir(self.dir().join("run")).unwrap();
        let left: Vec<_> = run.map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "left in the run directory: {left:?}");
        assert!(!self.dir().join("api.sock").exists(), "the socket is gone");
    }

    /// The one row of this sandbox.
    pub(crate) async fn process_of(&self, sandbox: &str) -> Process {
        let rows = self.rows(&[State::Claimed, State::Warm]).await;
        let row = rows.into_iter().find(|row| row.sandbox == sandbox);
        let pid = row.and_then(|row| row.pid).expect("it has a process");
        Process::look(i32::try_from(pid).unwrap()).expect("it lives")
    }
}

/// The folder of the variant that all tests use, lane none and size small.
fn variant(state: &Path, template: &str) -> PathBuf {
    state.join("templates").join(template).join("none-small")
}

/// Runs a shell script, which must succeed, and gives what it wrote.
pub(crate) async fn sh(sandbox: &SandboxHandle, script: &str) -> String {
    let output = sandbox.exec(["sh", "-c", script]).output().await.unwrap();
    let said = output.stderr_text().into_owned();
    assert_eq!(output.status.how, How::Code(0), "{script}: {said}");
    output.stdout_text().into_owned()
}

/// A template that tests share.
pub(crate) trait Golden: Copy {
    /// The image that it is booted from.
    fn image(self) -> &'static str {
        "busybox"
    }

    /// Tells it from the others, and from what it was before it was changed.
    fn name(self) -> String;

    /// A daemon that makes it and clones it, on this state directory.
    fn setup(self, state: &Path) -> Setup;
}

/// An image as it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plain(pub(crate) &'static str);

impl Golden for Plain {
    fn image(self) -> &'static str {
        self.0
    }

    fn name(self) -> String {
        self.0.to_owned()
    }

    fn setup(self, _state: &Path) -> Setup {
        Setup::qemu_of(self.0).warm(1)
    }
}

/// A state directory with the shared template in it. Its files are links: a test that harms them uses [`own_copy`].
pub(crate) async fn seeded() -> TempDir {
    seeded_with(Plain("busybox")).await
}

/// The same with this template.
pub(crate) async fn seeded_with(template: impl Golden) -> TempDir {
    let golden = Box::pin(golden(template)).await;
    let state = state_dir();
    let to = variant(state.path(), "default");
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(&golden).unwrap() {
        let from = entry.unwrap().path();
        let to = to.join(from.file_name().unwrap());
        // Another file system takes no link.
        fs::hard_link(&from, &to)
            .or_else(|_other_disk| copy_with_holes(&from, &to))
            .unwrap();
    }
    // Where KVM is sick, to prove it takes 20 s.
    let verdict = verdict_of(&golden);
    if verdict.exists() {
        fs::copy(verdict, state.path().join(VERDICT)).unwrap();
    }
    state
}

/// What a daemon remembers of KVM, in its state directory.
const VERDICT: &str = "accel.json";

/// What the daemon that made a shared template found of KVM; nothing where there is none.
fn verdict_of(golden: &Path) -> PathBuf {
    golden.with_file_name(VERDICT)
}

/// Puts a copy in the place of a link.
pub(crate) fn own_copy(path: &Path) {
    let copy = path.with_extension("copy");
    copy_with_holes(path, &copy).unwrap();
    fs::rename(&copy, path).unwrap();
}

/// Copies a file, which is mostly zeros, without writing them.
fn copy_with_holes(from: &Path, to: &Path) -> io::Result<()> {
    let (mut from, mut to) = (File::open(from)?, File::create_new(to)?);
    let mut block = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut block)?;
        let read = &block[..length];
        if read.is_empty() {
            break;
        }
        if read.iter().all(|byte| *byte == 0) {
            to.seek(SeekFrom::Current(i64::try_from(length).unwrap()))?;
        } else {
            to.write_all(read)?;
        }
    }
    to.set_len(from.metadata()?.len())
}

/// A shared template, booted by whoever comes first and kept for this build of daemon and image.
pub(crate) async fn golden(template: impl Golden) -> PathBuf {
    // Without the image this fails and says how to get one.
    let image = image(template.image());
    // Not `guest`: cargo keeps the profile of that name there.
    let shared = image.ancestors().nth(2).unwrap().join("test-templates");
    fs::create_dir_all(&shared).unwrap();
    let lock = File::create(shared.join("lock")).unwrap();
    // Other tests are other processes, and wait here for the one that boots.
    let lock = tokio::task::spawn_blocking(move || {
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        lock
    });
    let lock = lock.await.unwrap();
    let of_template = shared.join(template.name());
    let golden = of_template.join(name_of(&image));
    if !golden.is_dir() {
        // Of earlier builds, or half made.
        match fs::remove_dir_all(&of_template) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => panic!("{error}"),
            Ok(()) | Err(_) => fs::create_dir(&of_template).unwrap(),
        }
        let state = state_dir();
        let setup = template.setup(state.path());
        let node = Node::on(state, setup).await;
        node.until_warm(1).await;
        let coming = of_template.join("coming");
        fs::create_dir(&coming).unwrap();
        for entry in fs::read_dir(node.template("default")).unwrap() {
            let from = entry.unwrap().path();
            copy_with_holes(&from, &coming.join(from.file_name().unwrap())).unwrap();
        }
        let verdict = node.state.path().join(VERDICT);
        if verdict.exists() {
            fs::copy(verdict, verdict_of(&golden)).unwrap();
        }
        fs::rename(&coming, &golden).unwrap();
    }
    drop(lock);
    golden
}

/// Tells builds of daemon and image apart. The image by its digests: its files all have the time of its kernel.
fn name_of(image: &Path) -> String {
    let daemon = fs::metadata(program("sandboxd-faults")).unwrap();
    let manifest = Sha256::digest(fs::read(image.join("manifest.json")).unwrap());
    let manifest: String = manifest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!(
        "{}-{}-{}-{manifest}",
        daemon.mtime(),
        daemon.mtime_nsec(),
        daemon.size()
    )
}
