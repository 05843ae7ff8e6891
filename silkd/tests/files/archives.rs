//! Push and Pull.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use sandbox_protocol::v1::{
    AgentPullRequest, AgentPushReply, FileStat, PullEnd, PushIn, PushMode, PushStart, pull_out, push_in,
};
use tar::{Builder, EntryType, Header};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::{
    common::within,
    kit::{Kit, beneath, bytes, names, noise, user, why},
};

fn to(dest: &Path, mode: PushMode) -> PushStart {
    PushStart {
        dest: bytes(dest),
        mode: mode.into(),
        ..PushStart::default()
    }
}

impl Kit {
    async fn push(&mut self, start: PushStart, archive: &[u8]) -> Result<AgentPushReply, Status> {
        let (input, rest) = mpsc::channel(2);
        let chunks: Vec<Bytes> = archive.chunks(50_000).map(Bytes::copy_from_slice).collect();
        let feed = tokio::spawn(async move {
            let start = push_in::M::Start(start);
            for m in std::iter::once(start).chain(chunks.into_iter().map(push_in::M::Data)) {
                if input.send(PushIn { m: Some(m) }).await.is_err() {
                    break;
                }
            }
        });
        let reply = within(self.host.agent.push(ReceiverStream::new(rest))).await;
        feed.await.unwrap();
        reply.map(tonic::Response::into_inner)
    }

    async fn pull(&mut self, request: AgentPullRequest) -> Result<Pulled, Status> {
        let mut stream = within(self.host.agent.pull(request)).await?.into_inner();
        let mut pulled = Pulled::default();
        while let Some(message) = within(stream.message()).await? {
            match message.m.unwrap() {
                pull_out::M::Head(head) => pulled.head = Some(head),
                pull_out::M::Data(data) => pulled.archive.extend_from_slice(&data),
                pull_out::M::End(end) => pulled.end = Some(end),
            }
        }
        assert!(pulled.end.is_some(), "no end");
        Ok(pulled)
    }
}

#[derive(Default)]
struct Pulled {
    head: Option<FileStat>,
    archive: Vec<u8>,
    end: Option<PullEnd>,
}

impl Pulled {
    /// Entries by name: kind, and content or target.
    fn entries(&self) -> BTreeMap<Vec<u8>, (EntryType, Vec<u8>)> {
        let mut archive = tar::Archive::new(&*self.archive);
        let mut entries = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            if let Some(link) = entry.link_name_bytes() {
                content = link.into_owned();
            }
            let kind = entry.header().entry_type();
            entries.insert(entry.path_bytes().into_owned(), (kind, content));
        }
        entries
    }
}

fn pull(path: &Path) -> AgentPullRequest {
    AgentPullRequest {
        path: bytes(path),
        ..AgentPullRequest::default()
    }
}

/// An archive by hand: whatever a name may be.
#[derive(Default)]
struct Made(Vec<u8>);

/// As much of the text as there is room for.
fn put(field: &mut [u8], text: &[u8]) {
    for (to, from) in field.iter_mut().zip(text) {
        *to = *from;
    }
}

impl Made {
    fn add(mut self, kind: EntryType, name: &[u8], link: &[u8], data: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        put(&mut header.as_old_mut().name, name);
        put(&mut header.as_old_mut().linkname, link);
        header.set_entry_type(kind);
        header.set_mode(0o640);
        header.set_uid(777);
        header.set_gid(888);
        header.set_mtime(1_000_000);
        header.set_size(data.len() as u64);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &[u8], data: &[u8]) -> Self {
        self.add(EntryType::Regular, name, b"", data)
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

/// Archives that want out, or in twice.
fn escapes(outside: &Path) -> Vec<(&'static str, Made)> {
    let outside = outside.as_os_str().as_bytes();
    let link = |target: &[u8]| Made::default().add(EntryType::Symlink, b"a", target, b"");
    vec![
        ("link then file", link(b"../outside").file(b"a/f", b"x")),
        ("absolute link then file", link(outside).file(b"a/f", b"x")),
        (
            "link then directory",
            link(b"../outside").add(EntryType::Directory, b"a/", b"", b""),
        ),
        (
            "link then directory below",
            link(b"../outside").add(EntryType::Directory, b"a/b/", b"", b""),
        ),
        (
            "link then link",
            link(b"../outside").add(EntryType::Symlink, b"a/g", b"f", b""),
        ),
        (
            "link then hard link",
            link(b"../outside").add(EntryType::Link, b"b", b"a/f", b""),
        ),
        (
            "link then file of its name",
            link(b"../outside/f").file(b"a", b"x"),
        ),
        (
            "link within then file",
            Made::default()
                .add(EntryType::Directory, b"d/", b"", b"")
                .add(EntryType::Symlink, b"a", b"d", b"")
                .file(b"a/f", b"x"),
        ),
        ("absolute", Made::default().file(b"/tmp/x", b"x")),
        ("up", Made::default().file(b"b/../../outside/g", b"x")),
        (
            "hard link out",
            Made::default().add(EntryType::Link, b"b", b"../outside/f", b""),
        ),
        (
            "absolute hard link",
            Made::default().add(EntryType::Link, b"b", b"/etc/passwd", b""),
        ),
        (
            "hard link to nothing",
            Made::default().add(EntryType::Link, b"b", b"c", b""),
        ),
        ("device", Made::default().add(EntryType::Char, b"b", b"", b"")),
        (
            "block device",
            Made::default().add(EntryType::Block, b"b", b"", b""),
        ),
        ("fifo", Made::default().add(EntryType::Fifo, b"b", b"", b"")),
        (
            "unknown",
            Made::default().add(EntryType::new(b'M'), b"b", b"", b""),
        ),
        ("twice", Made::default().file(b"b", b"1").file(b"b", b"2")),
        (
            "file as a directory",
            Made::default().file(b"b", b"1").file(b"b/c", b"2"),
        ),
    ]
}

/// The same with a link that is not at the top.
fn escapes_below(outside: &Path) -> Vec<(&'static str, Made)> {
    let outside = outside.as_os_str().as_bytes();
    // Inside a directory that an earlier entry made.
    let below = |target: &[u8]| {
        let dir = Made::default().add(EntryType::Directory, b"d/", b"", b"");
        dir.add(EntryType::Symlink, b"d/a", target, b"")
    };
    vec![
        (
            "link below then file",
            below(b"../../outside").file(b"d/a/f", b"x"),
        ),
        (
            "absolute link below then file",
            below(outside).file(b"d/a/f", b"x"),
        ),
        (
            "link below then directory and file",
            below(b"../../outside").file(b"d/a/made/f", b"x"),
        ),
        (
            "link below then hard link",
            below(b"../../outside").add(EntryType::Link, b"d/b", b"d/a/f", b""),
        ),
        (
            "link in a directory that nobody named then file",
            Made::default()
                .add(EntryType::Symlink, b"d/e/a", b"../../../outside", b"")
                .file(b"d/e/a/f", b"x"),
        ),
    ]
}

#[tokio::test]
async fn tar_escapes_refused() {
    let mut kit = Kit::new().await;
    std::fs::create_dir(kit.path("outside")).unwrap();
    std::fs::write(kit.path("outside/f"), "kept").unwrap();
    std::fs::create_dir(kit.path("dest")).unwrap();
    let outside = kit.path("outside");
    for (what, archive) in escapes(&outside).into_iter().chain(escapes_below(&outside)) {
        let archive = Made::default()
            .file(b"first", b"1")
            .0
            .into_iter()
            .chain(archive.end())
            .collect::<Vec<_>>();
        for mode in [PushMode::Merge, PushMode::Replace] {
            let outcome = kit.push(to(&kit.path("dest"), mode), &archive).await;
            assert_eq!(why(outcome), "ARCHIVE_REFUSED", "{what}");
            assert_eq!(kit.names(), ["dest", "outside"], "{what}");
            assert!(names(&kit.path("dest")).is_empty(), "{what}");
        }
    }
    // Cut anywhere, or no archive at all.
    let whole = Made::default().file(b"a", &noise(2000)).end();
    for cut in [1, 511, 512, 700, 2511, 2560] {
        let outcome = kit
            .push(to(&kit.path("dest"), PushMode::Merge), &whole[..cut])
            .await;
        assert_eq!(why(outcome), "ARCHIVE_REFUSED", "{cut}");
    }
    let outcome = kit
        .push(to(&kit.path("dest"), PushMode::Merge), &noise(3000))
        .await;
    assert_eq!(why(outcome), "ARCHIVE_REFUSED");
    assert_eq!(names(&kit.path("outside")), ["f"]);
    assert_eq!(std::fs::read(kit.path("outside/f")).unwrap(), b"kept");
    assert_eq!(kit.names(), ["dest", "outside"]);
    assert!(names(&kit.path("dest")).is_empty());
}

#[tokio::test]
async fn push_failure_merges_nothing() {
    let mut kit = Kit::new().await;
    let dest = kit.path("dest");
    std::fs::create_dir_all(dest.join("d/e999")).unwrap();
    std::fs::write(dest.join("d/e0"), "old").unwrap();
    let mut made = Made::default();
    for n in 0..1000 {
        made = made.file(format!("d/e{n}").as_bytes(), b"new");
    }
    let archive = made.end();
    // The last of them would have to replace a directory.
    let outcome = kit.push(to(&dest, PushMode::Merge), &archive).await;
    assert_eq!(why(outcome), "NOT_REGULAR_FILE");
    assert_eq!(names(&dest.join("d")), ["e0", "e999"]);
    assert_eq!(std::fs::read(dest.join("d/e0")).unwrap(), b"old");
    assert_eq!(kit.names(), ["dest"]);
    // A link where a directory is to be is in the way too: nothing lands behind it.
    std::fs::remove_dir(dest.join("d/e999")).unwrap();
    std::fs::rename(dest.join("d"), kit.path("elsewhere")).unwrap();
    symlink(kit.path("elsewhere"), dest.join("d")).unwrap();
    let outcome = kit.push(to(&dest, PushMode::Merge), &archive).await;
    assert_eq!(why(outcome), "NOT_A_DIRECTORY");
    assert_eq!(names(&kit.path("elsewhere")), ["e0"]);
    std::fs::remove_file(dest.join("d")).unwrap();
    std::fs::rename(kit.path("elsewhere"), dest.join("d")).unwrap();
    // And without anything in the way all of it lands.
    let reply = kit.push(to(&dest, PushMode::Merge), &archive).await.unwrap();
    assert_eq!((reply.entries, reply.bytes), (1000, 3000));
    assert_eq!(names(&dest.join("d")).len(), 1000);
    assert_eq!(std::fs::read(dest.join("d/e0")).unwrap(), b"new");
    assert_eq!(kit.names(), ["dest"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replace_is_one_swap() {
    let mut kit = Kit::new().await;
    let dest = kit.path("dest");
    std::fs::create_dir(&dest).unwrap();
    std::fs::set_permissions(&dest, std::fs::Permissions::from_mode(0o751)).unwrap();
    for name in ["a", "b", "gone"] {
        std::fs::write(dest.join(name), "0").unwrap();
    }
    let over = Arc::new(AtomicBool::new(false));
    let (stop, at) = (over.clone(), dest.clone());
    // A reader that looks through one descriptor sees one of the two, and never anything between.
    let reader = std::thread::spawn(move || {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        let mut looks = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            let dir = rustix::fs::open(&at, flags, Mode::empty()).unwrap();
            let look = |name: &str| {
                let file = rustix::fs::openat(&dir, name, rustix::fs::OFlags::RDONLY, Mode::empty()).ok()?;
                let mut text = String::new();
                std::fs::File::from(file).read_to_string(&mut text).unwrap();
                Some(text)
            };
            if let (Some(a), Some(b)) = (look("a"), look("b")) {
                assert_eq!(a, b);
                looks += 1;
            }
        }
        looks
    });
    for round in 1..30 {
        let text = round.to_string();
        let made = Made::default()
            .file(b"a", text.as_bytes())
            .file(b"b", text.as_bytes());
        kit.push(to(&dest, PushMode::Replace), &made.end()).await.unwrap();
        assert_eq!(names(&dest), ["a", "b"]);
        assert_eq!(kit.names(), ["dest"]);
    }
    over.store(true, Ordering::Relaxed);
    assert!(reader.join().unwrap() > 30);
    assert_eq!(std::fs::metadata(&dest).unwrap().mode() & 0o7777, 0o751);
}

/// Longest extension header that is read.
const EXTENSION: usize = 1024 * 1024;

/// Extension headers of this length that say little: a comment, or a name and zeros behind it.
fn extensions(length: usize) -> [(EntryType, Vec<u8>); 4] {
    let mut record = format!("{length} comment=").into_bytes();
    record.resize(length - 1, b'x');
    record.push(b'\n');
    let mut name = b"a".to_vec();
    name.resize(length, 0);
    [
        (EntryType::XHeader, record.clone()),
        (EntryType::XGlobalHeader, record),
        (EntryType::GNULongName, name.clone()),
        (EntryType::GNULongLink, name),
    ]
}

#[tokio::test]
async fn huge_tar_header_refused() {
    let mut kit = Kit::new().await;
    let dest = kit.path("dest");
    kit.push(
        to(&dest, PushMode::Merge),
        &Made::default().file(b"a", &noise(1 << 20)).end(),
    )
    .await
    .unwrap();
    let before = kit.peak();
    for kind in [
        EntryType::XHeader,
        EntryType::XGlobalHeader,
        EntryType::GNULongName,
        EntryType::GNULongLink,
    ] {
        // It says that it is huge, and goes on coming.
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(1 << 30);
        header.set_cksum();
        let mut archive = header.as_bytes().to_vec();
        archive.resize(8 << 20, b'x');
        let outcome = kit.push(to(&dest, PushMode::Merge), &archive).await;
        assert_eq!(why(outcome), "ARCHIVE_REFUSED", "{kind:?}");
    }
    // One byte above the bound, and nothing else is wrong with it: but for the bound each of these would be read. At
    // the bound they are.
    for (kind, extension) in extensions(EXTENSION) {
        let archive = Made::default().add(kind, b"long", b"", &extension);
        let outcome = kit
            .push(to(&dest, PushMode::Merge), &archive.file(b"a", b"x").end())
            .await;
        assert!(outcome.is_ok(), "{kind:?}: {outcome:?}");
    }
    for (kind, extension) in extensions(EXTENSION + 1) {
        let archive = Made::default().add(kind, b"long", b"", &extension);
        let outcome = kit
            .push(to(&dest, PushMode::Merge), &archive.file(b"a", b"x").end())
            .await;
        assert_eq!(why(outcome), "ARCHIVE_REFUSED", "{kind:?}");
    }
    // Short of the bound the records are passed over, however many.
    let mut made = Made::default();
    for _ in 0..40 {
        let mut record = b"1000000 comment=".to_vec();
        record.resize(999_999, b'x');
        record.push(b'\n');
        made = made.add(EntryType::XHeader, b"pax", b"", &record);
    }
    kit.push(to(&dest, PushMode::Merge), &made.file(b"b", b"x").end())
        .await
        .unwrap();
    let grown = kit.peak() - before;
    assert!(grown < 4096, "{grown} KiB more");
    assert_eq!(names(&dest), ["a", "b"]);
    assert_eq!(kit.names(), ["dest"]);
}

#[tokio::test]
async fn pull_of_changing_file_is_valid_tar() {
    let mut kit = Kit::new().await;
    let tree = kit.path("tree");
    std::fs::create_dir(&tree).unwrap();
    for name in ["a", "b", "c"] {
        std::fs::write(tree.join(name), noise(4 << 20)).unwrap();
    }
    let mut stream = within(kit.host.agent.pull(pull(&tree)))
        .await
        .unwrap()
        .into_inner();
    let mut archive = Vec::new();
    // Once the first of them is under way: it is cut short, the others are cut or grow.
    while archive.len() < 10_000 {
        if let pull_out::M::Data(data) = within(stream.message()).await.unwrap().unwrap().m.unwrap() {
            archive.extend_from_slice(&data);
        }
    }
    // Behind the directory's own header.
    let first = archive[512..].split(|byte| *byte == 0).next().unwrap();
    let first = String::from_utf8(first.to_vec()).unwrap();
    std::fs::File::options()
        .write(true)
        .open(tree.join(&first))
        .unwrap()
        .set_len(2 << 20)
        .unwrap();
    // This one has been opened by nobody yet, and comes as it is.
    let other = ["a", "b", "c"]
        .into_iter()
        .find(|name| format!("./{name}") != first)
        .unwrap();
    std::fs::File::options()
        .append(true)
        .open(tree.join(other))
        .unwrap()
        .write_all(b"more")
        .unwrap();
    let mut end = None;
    while let Some(message) = within(stream.message()).await.unwrap() {
        match message.m.unwrap() {
            pull_out::M::Data(data) => archive.extend_from_slice(&data),
            pull_out::M::End(last) => end = Some(last),
            pull_out::M::Head(_) => panic!("a second head"),
        }
    }
    let end = end.unwrap();
    assert_eq!((end.entries, end.shrunk, end.grown, end.skipped), (4, 1, 0, 0));
    assert_eq!(end.bytes, 3 * (4 << 20) + 4);
    let pulled = Pulled {
        archive,
        ..Pulled::default()
    };
    let entries = pulled.entries();
    let cut = &entries[first.as_bytes()].1;
    assert_eq!(cut.len(), 4 << 20);
    assert_eq!(cut[..2 << 20], noise(4 << 20)[..2 << 20]);
    assert!(cut[2 << 20..].iter().all(|byte| *byte == 0));
    assert_eq!(listed_by_tar(&pulled.archive).lines().count(), 4);
}

#[tokio::test]
async fn pull_of_a_growing_file_is_cut_and_told() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    std::fs::write(&path, noise(4 << 20)).unwrap();
    let mut stream = within(kit.host.agent.pull(pull(&path)))
        .await
        .unwrap()
        .into_inner();
    let mut archive = Vec::new();
    while archive.is_empty() {
        if let pull_out::M::Data(data) = within(stream.message()).await.unwrap().unwrap().m.unwrap() {
            archive.extend_from_slice(&data);
        }
    }
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(b"more", 4 << 20)
        .unwrap();
    let mut end = None;
    while let Some(message) = within(stream.message()).await.unwrap() {
        match message.m.unwrap() {
            pull_out::M::Data(data) => archive.extend_from_slice(&data),
            pull_out::M::End(last) => end = Some(last),
            pull_out::M::Head(_) => panic!("a second head"),
        }
    }
    assert_eq!(end.unwrap().grown, 1);
    let pulled = Pulled {
        archive,
        ..Pulled::default()
    };
    let entries = pulled.entries();
    assert_eq!(entries.len(), 1);
    assert!(entries[&b"f"[..]].1 == noise(4 << 20));
}

/// What the program `tar` says to an archive; it must not complain.
fn listed_by_tar(archive: &[u8]) -> String {
    let mut tar = Command::new("tar")
        .args(["-t", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = tar.stdin.take().unwrap();
    let archive = archive.to_vec();
    let feed = std::thread::spawn(move || input.write_all(&archive).unwrap());
    let output = tar.wait_with_output().unwrap();
    feed.join().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && complaint.is_empty(), "{complaint}");
    String::from_utf8(output.stdout).unwrap()
}

/// A tree with something of everything.
fn make_tree(tree: &Path, long: &str) {
    std::fs::create_dir_all(tree.join(long).join(long)).unwrap();
    std::fs::write(tree.join(long).join("f"), noise(100_000)).unwrap();
    std::fs::write(tree.join(std::ffi::OsStr::from_bytes(b"\xff\n")), "odd").unwrap();
    symlink(format!("{long}/{long}"), tree.join("link")).unwrap();
    symlink("nowhere", tree.join("broken")).unwrap();
    std::fs::create_dir(tree.join("shut")).unwrap();
    std::fs::write(tree.join("shut/in"), "in").unwrap();
    std::fs::set_permissions(tree.join("shut"), std::fs::Permissions::from_mode(0o555)).unwrap();
    std::fs::set_permissions(tree.join(long).join("f"), std::fs::Permissions::from_mode(0o4751)).unwrap();
    std::fs::write(tree.join("left.o"), "").unwrap();
    mknodat(CWD, tree.join("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
}

#[tokio::test]
async fn trees_go_out_and_come_in_again() {
    let mut kit = Kit::new().await;
    let tree = kit.path("tree");
    let long = "n".repeat(200);
    make_tree(&tree, &long);
    let request = AgentPullRequest {
        exclude: vec!["*.o".into()],
        ..pull(&tree)
    };
    let pulled = kit.pull(request.clone()).await.unwrap();
    assert_eq!(
        pulled.head.as_ref().unwrap().kind(),
        sandbox_protocol::v1::FileKind::Directory
    );
    assert_eq!(pulled.end.unwrap().skipped, 1);
    listed_by_tar(&pulled.archive);
    let entries = pulled.entries();
    assert_eq!(entries.len(), 9);
    assert_eq!(entries[&b"./\xff\n"[..]].1, b"odd");
    assert_eq!(
        entries[&b"./broken"[..]],
        (EntryType::Symlink, b"nowhere".to_vec())
    );

    // In again, as it was, by anybody; without set-id bits.
    std::fs::create_dir(kit.path("home")).unwrap();
    std::os::unix::fs::chown(kit.path("home"), Some(12_345), Some(12_345)).unwrap();
    std::fs::set_permissions(kit.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for (dest, mode) in [
        ("new", PushMode::Merge),
        ("new", PushMode::Replace),
        ("", PushMode::Merge),
    ] {
        let dest = kit.path("home").join(dest);
        let start = PushStart {
            resolve: user("12345"),
            ..to(&dest, mode)
        };
        kit.push(start, &pulled.archive).await.unwrap();
        let file = dest.join(&long).join("f");
        assert_eq!(std::fs::read(&file).unwrap(), noise(100_000));
        let meta = std::fs::metadata(&file).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o7777), (12_345, 0o751));
        assert_eq!(
            meta.mtime(),
            std::fs::metadata(tree.join(&long).join("f")).unwrap().mtime()
        );
        assert_eq!(
            std::fs::metadata(dest.join("shut")).unwrap().mode() & 0o7777,
            0o555
        );
        assert_eq!(
            std::fs::read_link(dest.join("link")).unwrap(),
            Path::new(&format!("{long}/{long}"))
        );
        assert!(dest.join("shut/in").exists() && !dest.join("fifo").exists());
    }
    let litter = names(&kit.path("home"))
        .into_iter()
        .filter(|name| name.starts_with(".silkd"));
    assert_eq!(litter.count(), 0);

    circles_end(&mut kit, request).await;
}

/// What links lead to, in their place.
async fn circles_end(kit: &mut Kit, request: AgentPullRequest) {
    let tree = kit.path("tree");
    symlink(".", tree.join("circle")).unwrap();
    let followed = kit
        .pull(AgentPullRequest {
            follow: true,
            ..request
        })
        .await
        .unwrap();
    let entries = followed.entries();
    assert_eq!(entries.get(&b"./link/"[..]).unwrap().0, EntryType::Directory);
    assert!(!entries.contains_key(&b"./circle/"[..]) && !entries.contains_key(&b"./broken"[..]));
    assert_eq!(followed.end.unwrap().skipped, 3);
    assert_eq!(why(kit.pull(pull(&kit.path("none"))).await), "PATH_NOT_FOUND");
    assert_eq!(why(kit.pull(pull(&tree.join("fifo"))).await), "NOT_REGULAR_FILE");
}

#[tokio::test]
async fn owners_and_set_id_bits_come_along_for_root_alone() {
    let mut kit = Kit::new().await;
    let made = || {
        Made::default()
            .file(b"top/f", b"x")
            .add(EntryType::Link, b"top/g", b"top/f", b"")
            .end()
    };
    let start = PushStart {
        keep_owner: true,
        strip: 1,
        ..to(&kit.path("dest"), PushMode::Merge)
    };
    kit.push(start.clone(), &made()).await.unwrap();
    let meta = std::fs::metadata(kit.path("dest/f")).unwrap();
    assert_eq!(
        (meta.uid(), meta.gid(), meta.mode() & 0o7777, meta.nlink()),
        (777, 888, 0o640, 2)
    );
    assert_eq!(meta.mtime(), 1_000_000);
    let denied = PushStart {
        resolve: user("12345"),
        ..start
    };
    assert_eq!(why(kit.push(denied, &made()).await), "PATH_DENIED");
    let out = PushStart {
        resolve: beneath(&kit.path("dest")),
        ..to(&kit.path("other"), PushMode::Merge)
    };
    assert_eq!(why(kit.push(out, &made()).await), "PATH_ESCAPES");
}

#[tokio::test]
async fn archives_of_other_programs_are_read() {
    let mut kit = Kit::new().await;
    let tree = kit.path("tree");
    std::fs::create_dir(&tree).unwrap();
    let long = "n".repeat(180);
    std::fs::write(tree.join(&long), "long").unwrap();
    let sparse = std::fs::File::create(tree.join("sparse")).unwrap();
    sparse.set_len(10 << 20).unwrap();
    for at in [0, 3 << 20, 9 << 20] {
        sparse.write_all_at(b"here", at).unwrap();
    }
    // Sparse files of ten parts need more than one header.
    let many = std::fs::File::create(tree.join("many")).unwrap();
    for part in 0..10 {
        many.write_all_at(&noise(4096), part << 16).unwrap();
    }
    let mut archives = Vec::new();
    for format in ["gnu", "ustar", "pax"] {
        let mut tar = Command::new("tar");
        tar.args(["-c", "-f", "-", "--format", format, "-C"]).arg(&tree);
        if format == "gnu" {
            tar.arg("-S");
        }
        let names: &[&str] = if format == "ustar" {
            &["sparse", "many"]
        } else {
            &["."]
        };
        archives.push((format, tar.args(names).output().unwrap().stdout));
    }
    let mut ours = Builder::new(Vec::new());
    ours.append_dir_all(".", &tree).unwrap();
    archives.push(("crate", ours.into_inner().unwrap()));
    for (format, archive) in archives {
        let dest = kit.path(format);
        kit.push(to(&dest, PushMode::Merge), &archive).await.unwrap();
        for name in names(&dest) {
            let same = std::fs::read(dest.join(&name)).unwrap() == std::fs::read(tree.join(&name)).unwrap();
            assert!(same, "{format} {name}");
        }
        assert!(names(&dest).len() >= 2, "{format}");
        assert_eq!(dest.join(&long).exists(), format != "ustar");
    }
    assert!(std::fs::metadata(kit.path("gnu/sparse")).unwrap().blocks() < 1000);
}
