//! Trees through both ends of an archive, and archives of enemies.
#![expect(
    clippy::disallowed_methods,
    reason = "tests make the files that they are about"
)]

use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
};

use sandbox_protocol::reason::Reason;
use tar::{EntryType, Header};
use tokio::io::AsyncReadExt as _;

use super::{Unpack, Unpacked, pack, save, unpack};
use crate::{Error, ErrorKind};

/// One entry as a stranger may write it: nothing is checked.
fn entry(kind: EntryType, name: &[u8], link: &[u8], data: &[u8]) -> Vec<u8> {
    sized(kind, name, link, data, data.len() as u64)
}

fn sized(kind: EntryType, name: &[u8], link: &[u8], data: &[u8], size: u64) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(kind);
    header.set_mode(0o6755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_000_000);
    header.set_size(size);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn file(name: &[u8]) -> Vec<u8> {
    entry(EntryType::Regular, name, b"", b"evil")
}

fn link(name: &[u8], target: &[u8]) -> Vec<u8> {
    entry(EntryType::Symlink, name, target, b"")
}

fn hard(name: &[u8], target: &[u8]) -> Vec<u8> {
    entry(EntryType::Link, name, target, b"")
}

fn long(kind: EntryType, text: &[u8]) -> Vec<u8> {
    entry(kind, b"././@LongLink", b"", text)
}

fn pax(key: &str, value: &str) -> Vec<u8> {
    // The length counts itself.
    let rest = format!(" {key}={value}\n");
    let mut length = rest.len() + 1;
    while format!("{length}{rest}").len() != length {
        length += 1;
    }
    entry(
        EntryType::XHeader,
        b"pax",
        b"",
        format!("{length}{rest}").as_bytes(),
    )
}

async fn take(archive: Vec<u8>, into: &Path) -> Result<Unpacked, Error> {
    unpack(&archive[..], into).await
}

/// A folder with `secret` beside `in`, in which `way` leads out and `old` is there.
struct Scene(tempfile::TempDir);

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("in")).unwrap();
        fs::create_dir(dir.path().join("out")).unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        symlink("../out", dir.path().join("in/way")).unwrap();
        symlink("../secret", dir.path().join("in/leak")).unwrap();
        fs::create_dir(dir.path().join("in/dir")).unwrap();
        fs::write(dir.path().join("in/old"), "old").unwrap();
        Self(dir)
    }

    fn inside(&self) -> std::path::PathBuf {
        self.0.path().join("in")
    }

    /// Nothing outside has changed, was made, or got another name.
    fn unharmed(&self, what: &str) {
        let secret = self.0.path().join("secret");
        assert_eq!(fs::read(&secret).unwrap(), b"secret", "{what}");
        let stat = fs::metadata(&secret).unwrap();
        assert_eq!(stat.nlink(), 1, "{what}");
        assert_ne!(stat.mtime(), 1_000_000, "{what}");
        assert_eq!(stat.mode() & 0o7111, 0, "{what}");
        assert_eq!(
            fs::read_dir(self.0.path().join("out")).unwrap().count(),
            0,
            "{what}"
        );
        assert_eq!(fs::read_dir(self.0.path()).unwrap().count(), 3, "{what}");
        let stat = fs::metadata(self.inside()).unwrap();
        assert_eq!(stat.mode() & 0o7000, 0, "{what}");
    }
}

type Cases = Vec<(&'static str, Vec<u8>)>;

/// Names and links that lead out, or to `absolute`.
fn astray(absolute: &[u8]) -> Cases {
    let long_name = |text: &[u8]| [long(EntryType::GNULongName, text), file(b"short")].concat();
    vec![
        ("absolute", file(absolute)),
        (
            "absolute directory",
            entry(EntryType::Directory, absolute, b"", b""),
        ),
        ("dots", file(b"../x")),
        ("dots within", file(b"a/../../x")),
        ("dots at the end", entry(EntryType::Directory, b"a/..", b"", b"")),
        ("dots, directory", entry(EntryType::Directory, b"../d", b"", b"")),
        ("long absolute", long_name(absolute)),
        ("long dots", long_name(b"../x\0")),
        ("pax dots", [pax("path", "../x"), file(b"short")].concat()),
        ("pax nul", [pax("path", "a\0b"), file(b"short")].concat()),
        ("pax size", [pax("size", "1000000"), file(b"short")].concat()),
        ("link, then file", [link(b"l", b"../out"), file(b"l/x")].concat()),
        (
            "absolute link, then file",
            [link(b"l", &absolute[..absolute.len() - 2]), file(b"l/x")].concat(),
        ),
        ("file through a link that was there", file(b"way/x")),
        (
            "directory through it",
            entry(EntryType::Directory, b"way/d", b"", b""),
        ),
        ("link through it", link(b"way/l", b"x")),
        (
            "directory in a link's place",
            entry(EntryType::Directory, b"way/", b"", b""),
        ),
    ]
}

/// Entries that are no file, directory or link, or no entry at all.
fn strange() -> Cases {
    vec![
        ("hard link out", hard(b"h", b"../secret")),
        ("hard link, absolute", hard(b"h", b"/etc/passwd")),
        ("hard link through a link", hard(b"h", b"way/../secret")),
        ("hard link below a link", hard(b"h", b"way/x")),
        ("hard link to nothing", hard(b"h", b"")),
        ("character device", entry(EntryType::Char, b"c", b"", b"")),
        ("block device", entry(EntryType::Block, b"b", b"", b"")),
        ("pipe", entry(EntryType::Fifo, b"p", b"", b"")),
        ("sparse", entry(EntryType::GNUSparse, b"s", b"", b"")),
        ("unknown", entry(EntryType::new(b'Z'), b"z", b"", b"")),
        ("the directory itself as a file", file(b"./")),
        ("file in a directory's place", file(b"dir")),
        (
            "directory in a file's place",
            entry(EntryType::Directory, b"old", b"", b""),
        ),
        ("file below a file", file(b"old/x")),
        ("link to nothing", link(b"l", b"")),
        (
            "extension of 2 GiB",
            sized(EntryType::GNULongName, b"l", b"", b"", 1 << 31),
        ),
        ("pax of 2 GiB", sized(EntryType::XHeader, b"l", b"", b"", 1 << 31)),
        (
            "cut in a file",
            entry(EntryType::Regular, b"f", b"", &[7; 2000])[..1024].to_vec(),
        ),
        ("cut in a header", file(b"f")[..300].to_vec()),
        ("no archive", vec![b'x'; 4096]),
    ]
}

#[tokio::test]
async fn hostile_pull_archives_land_nothing_outside() {
    let outside = tempfile::tempdir().unwrap();
    let absolute = outside.path().join("x").as_os_str().as_bytes().to_vec();
    for (what, archive) in [astray(&absolute), strange()].concat() {
        let scene = Scene::new();
        let error = take(archive, &scene.inside()).await.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Local, "{what}: {error}");
        scene.unharmed(what);
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "{what}");
        // No part of a file stays.
        assert!(!scene.inside().join("f").exists(), "{what}");
    }
}

#[tokio::test]
async fn a_link_in_a_file_s_place_is_replaced_and_not_written_through() {
    let scene = Scene::new();
    let archive = [file(b"leak"), link(b"old", b"../secret"), hard(b"again", b"old")].concat();
    let done = take(archive, &scene.inside()).await.unwrap();
    assert_eq!((done.entries, done.bytes), (3, 4));
    scene.unharmed("replaced");
    let leak = scene.inside().join("leak");
    assert!(fs::symlink_metadata(&leak).unwrap().is_file());
    // Set-id bits of strangers are dropped.
    assert_eq!(fs::metadata(&leak).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::metadata(&leak).unwrap().mtime(), 1_000_000);
    // A hard link to a link is the link, and a link keeps its target as it is.
    for name in ["old", "again"] {
        let path = scene.inside().join(name);
        assert_eq!(fs::read_link(path).unwrap(), Path::new("../secret"));
    }
}

#[tokio::test]
async fn an_archive_s_end_is_not_its_reader_s() {
    let end = vec![0; 1024];
    let padded = [file(b"f"), end.clone(), vec![0; 10_240]].concat();
    let scene = Scene::new();
    assert_eq!(take(padded, &scene.inside()).await.unwrap().entries, 1);
    let endless = [file(b"g"), end].concat();
    let endless = std::io::Cursor::new(endless).chain(tokio::io::repeat(0));
    let error = unpack(endless, scene.inside()).await.unwrap_err();
    assert!(error.is(Reason::ArchiveRefused), "{error}");
    // A reader that fails is why there is no more, whatever the archive says to that.
    let broken = tokio_util::io::StreamReader::new(tokio_stream::iter([
        Ok(bytes::Bytes::from(file(b"h"))),
        Err(std::io::Error::other("the network went away")),
    ]));
    let error = unpack(broken, scene.inside()).await.unwrap_err();
    assert!(error.message().contains("went away"), "{error}");
}

#[tokio::test]
async fn a_dropped_unpacking_ends() {
    let scene = Scene::new();
    let (mut give, archive) = tokio::io::duplex(1 << 20);
    let head = sized(EntryType::Regular, b"f", b"", b"", 1 << 30);
    tokio::io::AsyncWriteExt::write_all(&mut give, &head)
        .await
        .unwrap();
    let mut unpacking = Box::pin(Unpack::new(scene.inside()).reader(archive));
    let part = scene.inside().join("f");
    while !part.exists() {
        assert!(futures_util::poll!(&mut unpacking).is_pending());
        tokio::task::yield_now().await;
    }
    drop(unpacking);
    // The thread gives up the file that it is at.
    while part.exists() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_tree_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    let odd = OsStr::from_bytes(b"-odd\n\xff\xfe name");
    let long = "n".repeat(200);
    let deep = from.join("a/b").join(&long).join(odd);
    fs::create_dir_all(&deep).unwrap();
    fs::create_dir(from.join("empty")).unwrap();
    let big: Vec<u8> = (0..1_000_000_u32).map(|n| (n >> 3).to_le_bytes()[0]).collect();
    fs::write(deep.join(odd), &big).unwrap();
    fs::write(from.join("none"), "").unwrap();
    fs::write(from.join("run"), "#!").unwrap();
    symlink("/nowhere/at/all", from.join("dangling")).unwrap();
    symlink("t".repeat(300), from.join("far")).unwrap();
    symlink(".", from.join("circle")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        from.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(&from.join("run"), 0o751);
    mode(&deep.join(odd), 0o400);
    mode(&deep, 0o555);
    mode(&from, 0o710);
    let to = dir.path().join("to");
    let source = pack(&from);
    let skipped = source.skipped();
    let done = unpack(source, &to).await.unwrap();
    assert_eq!(skipped.get(), 1);
    assert_eq!(done.bytes, 1_000_002);
    let there = to.join("a/b").join(&long).join(odd);
    assert!(fs::read(there.join(odd)).unwrap() == big);
    for (path, expected) in [
        (to.clone(), 0o710),
        (there.clone(), 0o555),
        (there.join(odd), 0o400),
        (to.join("run"), 0o751),
    ] {
        assert_eq!(
            fs::metadata(&path).unwrap().mode() & 0o7777,
            expected,
            "{}",
            path.display()
        );
    }
    let modified = |path: &Path| fs::metadata(path).unwrap().mtime();
    assert_eq!(modified(&to.join("run")), modified(&from.join("run")));
    assert_eq!(
        fs::read_link(to.join("dangling")).unwrap(),
        Path::new("/nowhere/at/all")
    );
    assert_eq!(
        fs::read_link(to.join("far")).unwrap(),
        Path::new(&"t".repeat(300))
    );
    assert_eq!(fs::read_link(to.join("circle")).unwrap(), Path::new("."));
    assert!(!to.join("pipe").exists() && to.join("empty").is_dir());
    // So that it can be removed by whoever runs this.
    mode(&deep, 0o755);
    mode(&there, 0o755);
    // The same tree is the same archive.
    let read = async |path: &Path| {
        let mut all = Vec::new();
        pack(path).read_to_end(&mut all).await.unwrap();
        all
    };
    assert!(read(&from).await == read(&from).await);
}

#[tokio::test]
async fn what_cannot_be_packed_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    for path in [file, dir.path().join("missing")] {
        let error = pack(&path).read_to_end(&mut Vec::new()).await.unwrap_err();
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
    // One that nobody reads on ends by itself.
    for n in 0..8 {
        fs::write(dir.path().join(n.to_string()), vec![0; 1 << 20]).unwrap();
    }
    let mut source = pack(dir.path());
    source.read_exact(&mut [0; 100]).await.unwrap();
    drop(source);
}

#[tokio::test]
async fn a_saved_file_is_whole_or_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, "old").unwrap();
    let broken = tokio_util::io::StreamReader::new(tokio_stream::iter([
        Ok(bytes::Bytes::from_static(b"new")),
        Err(std::io::Error::other("cut")),
    ]));
    save(broken, &path, 0o644).await.unwrap_err();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    let link = dir.path().join("l");
    symlink("f", &link).unwrap();
    assert_eq!(save(&b"new"[..], &link, 0o600).await.unwrap(), 3);
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    // A device stays one.
    assert_eq!(save(&b"x"[..], "/dev/null", 0o600).await.unwrap(), 1);
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    let error = save(&b"x"[..], dir.path(), 0o600).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Local);
}
