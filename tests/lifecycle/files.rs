//! Files of a guest through the daemon: by the SDK, and by `sandboxctl cp`. Guests of the stub engine share our file
//! system, so that a test can look at both ends.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
};

use harness::{Ctl, Daemon, HANG, Setup, eventually, process::Process, refused, within};
use sandbox_sdk::{ErrorKind, Reason, Sandbox, v1::FileKind};
use tokio::io::AsyncReadExt as _;

async fn claimed(daemon: &Daemon) -> Sandbox {
    daemon.client().await.claim("default").await.unwrap()
}

fn ctl(daemon: &Daemon, sandbox: &Sandbox) -> Ctl {
    daemon.ctl().token(sandbox.token().unwrap().expose())
}

/// Bytes in an order that no chunk's size divides.
fn content(length: u32) -> Vec<u8> {
    let mix = |n: u32| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0];
    (0..length).map(mix).collect()
}

/// `SANDBOX:PATH`.
fn there(sandbox: &Sandbox, path: &Path) -> OsString {
    let mut text = OsString::from(sandbox.id());
    text.push(":");
    text.push(path);
    text
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Names that break whoever takes names for text.
const ODD: [&[u8]; 5] = [b"new\nline", b"\xff\xfe", b"-rf", b" ", b"'$(id)\"\x1b[2J"];

#[tokio::test(flavor = "multi_thread")]
async fn f01_files_of_any_size_and_name_come_back_through_the_daemon() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let files = sandbox.files();
    let dir = tempfile::tempdir().unwrap();
    for length in [0, 1, 4_096, 65_535, 65_536, 65_537, 262_145, 3_000_001] {
        let path = dir
            .path()
            .join(OsStr::from_bytes(ODD[length as usize % ODD.len()]));
        let sent = content(length);
        let written = files.write(&path).mode(0o600).bytes(sent.clone()).await.unwrap();
        assert_eq!(written.bytes, u64::from(length));
        assert!(fs::read(&path).unwrap() == sent);
        let streamed = files
            .write(&path)
            .reader(std::io::Cursor::new(sent.clone()))
            .await;
        assert_eq!(streamed.unwrap().stat.mode & 0o7777, 0o600);
        assert!(files.read(&path).bytes().await.unwrap() == sent);
        let mut part = Vec::new();
        let reader = files.read(&path).offset(1).length(70_000).stream().await;
        reader.unwrap().read_to_end(&mut part).await.unwrap();
        assert!(part == sent.get(1..).unwrap_or_default()[..part.len()]);
        assert_eq!(part.len(), (length.saturating_sub(1) as usize).min(70_000));
    }
    let path = dir.path().join("f");
    let stat = files.write(&path).if_absent().bytes("1").await.unwrap().stat;
    refused(
        files.write(&path).if_absent().bytes("2").await,
        Reason::PathExists,
    );
    let since = stat.mtime_ns;
    refused(
        files.write(&path).if_unchanged_since(since - 1).bytes("2").await,
        Reason::MtimeChanged,
    );
    files
        .write(&path)
        .if_unchanged_since(since)
        .append()
        .bytes("2")
        .await
        .unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"12");
    refused(
        files.write(&path).size(5).reader(&b"four"[..]).await,
        Reason::SizeMismatch,
    );
    refused(files.read(dir.path()).stream().await, Reason::NotRegularFile);
    refused(
        files.read(dir.path().join("none")).bytes().await,
        Reason::PathNotFound,
    );
    refused(
        files.clone().beneath("/etc").read("/etc/../root").bytes().await,
        Reason::PathEscapes,
    );
    assert!(!files.read("/proc/self/status").bytes().await.unwrap().is_empty());
}

#[tokio::test]
async fn directories_are_made_listed_renamed_and_removed() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let files = sandbox.files();
    let dir = tempfile::tempdir().unwrap();
    let top = dir.path().join("top");
    assert!(files.mkdir(top.join("a/b")).parents().mode(0o750).await.unwrap());
    assert!(!files.mkdir(&top).parents().await.unwrap());
    for name in ODD {
        fs::write(top.join(OsStr::from_bytes(name)), name).unwrap();
    }
    symlink("a", top.join("link")).unwrap();
    let mut entries = files.list(&top).depth(2).stream().await.unwrap();
    let mut names = Vec::new();
    while let Some(entry) = entries.next().await {
        names.push(entry.unwrap().name.to_vec());
    }
    names.sort();
    let mut expected: Vec<Vec<u8>> = ODD.iter().map(|name| name.to_vec()).collect();
    expected.extend([b"a".to_vec(), b"a/b".to_vec(), b"link".to_vec()]);
    expected.sort();
    assert_eq!(names, expected);
    assert_eq!(files.stat(top.join("link")).await.unwrap().kind(), FileKind::Link);
    assert_eq!(
        files.stat_target(top.join("link")).await.unwrap().kind(),
        FileKind::Directory
    );
    files.rename(top.join("a"), top.join("c")).await.unwrap();
    let taken = files
        .rename(top.join("c"), top.join("link"))
        .keep_existing()
        .await;
    refused(taken, Reason::PathExists);
    refused(files.remove(&top).await, Reason::DirectoryNotEmpty);
    assert_eq!(files.remove(&top).recursive().await.unwrap(), 9);
    refused(files.remove(&top).await, Reason::PathNotFound);
    assert_eq!(files.remove(&top).missing_ok().await.unwrap(), 0);
}

/// The old file, and nothing else in its directory.
async fn only_the_old(dir: &Path) {
    eventually("nothing is left of the upload", || async {
        let names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        (names == ["f"] && fs::read(dir.join("f")).unwrap() == b"old").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f02_an_upload_that_breaks_off_leaves_the_old_file() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let files = sandbox.files();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, "old").unwrap();
    // The content cannot be read to its end.
    let failing = Failing(tokio::io::repeat(1), 150_000);
    let error = files.write(&path).reader(failing).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Local);
    only_the_old(dir.path()).await;
    // Whoever sends it goes away, once something of it lies beside the target.
    let part = || async { (fs::read_dir(dir.path()).unwrap().count() == 2).then_some(()) };
    tokio::select! {
        written = files.write(&path).reader(tokio::io::repeat(1)) => panic!("{written:?}"),
        () = eventually("the upload is under way", part) => {}
    }
    only_the_old(dir.path()).await;
    let mut child = ctl(&daemon, &sandbox)
        .command([OsStr::new("cp"), "/dev/zero".as_ref(), &there(&sandbox, &path)])
        .spawn()
        .unwrap();
    eventually("the copy is under way", part).await;
    child.kill().await.unwrap();
    only_the_old(dir.path()).await;
    assert_eq!(files.read(&path).bytes().await.unwrap(), b"old");
}

/// A reader that fails after so many bytes.
struct Failing<R>(R, usize);

impl<R: tokio::io::AsyncRead + Unpin> tokio::io::AsyncRead for Failing<R> {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        into: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        if self.1 == 0 {
            return std::task::Poll::Ready(Err(std::io::Error::other("the disk is gone")));
        }
        let before = into.filled().len();
        std::task::ready!(std::pin::Pin::new(&mut self.0).poll_read(cx, into))?;
        self.1 = self.1.saturating_sub(into.filled().len() - before);
        std::task::Poll::Ready(Ok(()))
    }
}

/// KiB of memory that a process has.
fn resident(process: Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn cp_of_64_mib_is_the_same_at_the_other_end_and_costs_no_memory() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let ctl = ctl(&daemon, &sandbox);
    let dir = tempfile::tempdir().unwrap();
    let (here, beyond, back) = (
        dir.path().join("here"),
        dir.path().join("beyond"),
        dir.path().join("back"),
    );
    let sent = content(64 * 1024 * 1024);
    fs::write(&here, &sent).unwrap();
    mode(&here, 0o751);
    let guest = daemon.sandbox_processes()[0];
    let before = (resident(daemon.process()), resident(guest));
    let copied = ctl
        .json([OsStr::new("cp"), here.as_os_str(), &there(&sandbox, &beyond)])
        .await;
    assert_eq!(copied["bytes"], 64 * 1024 * 1024);
    assert!(fs::read(&beyond).unwrap() == sent);
    let ran = ctl
        .run([OsStr::new("cp"), &there(&sandbox, &beyond), back.as_os_str()])
        .await;
    assert_eq!((ran.code, ran.text().as_str()), (0, ""), "{}", ran.stderr);
    assert!(fs::read(&back).unwrap() == sent);
    for path in [&beyond, &back] {
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, 0o751);
    }
    let grown = (
        resident(daemon.process()).saturating_sub(before.0),
        resident(guest).saturating_sub(before.1),
    );
    assert!(
        grown.0 < 24 * 1024 && grown.1 < 24 * 1024,
        "grown by {grown:?} KiB"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn cp_of_trees_keeps_names_modes_and_links() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let ctl = ctl(&daemon, &sandbox);
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    let long = "d".repeat(150);
    fs::create_dir_all(tree.join(&long).join(&long)).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    for name in ODD {
        let path = tree.join(&long).join(&long).join(OsStr::from_bytes(name));
        fs::write(&path, content(100_000)).unwrap();
        mode(&path, 0o640);
    }
    fs::write(tree.join("run"), "#!/bin/sh\n").unwrap();
    mode(&tree.join("run"), 0o755);
    mode(&tree.join("empty"), 0o700);
    symlink("run", tree.join("link")).unwrap();
    symlink("/nowhere/at/all", tree.join("dangling")).unwrap();
    let run = async |source: OsString, target: OsString| {
        let ran = ctl.run([OsString::from("cp"), source, target]).await;
        assert_eq!((ran.code, ran.text().as_str()), (0, ""), "{}", ran.stderr);
    };
    let beyond = dir.path().join("beyond");
    run(tree.clone().into(), there(&sandbox, &beyond)).await;
    same(&tree, &beyond);
    // Into a directory that is there, as docker does.
    let into = dir.path().join("into");
    fs::create_dir(&into).unwrap();
    run(there(&sandbox, &beyond), into.clone().into()).await;
    same(&tree, &into.join("beyond"));
    let mut inside = there(&sandbox, &beyond);
    inside.push("/.");
    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    run(inside, other.clone().into()).await;
    same(&tree, &other);
    // Odd names by themselves.
    for name in ODD {
        let odd = OsStr::from_bytes(name);
        let file = beyond.join(&long).join(&long).join(odd);
        let here = dir.path().join("odd").join(odd);
        fs::create_dir_all(here.parent().unwrap()).unwrap();
        run(there(&sandbox, &file), here.clone().into()).await;
        assert!(fs::read(&here).unwrap() == content(100_000));
        run(here.into(), there(&sandbox, &dir.path().join("odd2"))).await;
    }
    // Through pipes: an archive for a directory, the content for a file.
    let archive = ctl
        .run([OsStr::new("cp"), &there(&sandbox, &beyond), "-".as_ref()])
        .await;
    assert_eq!(archive.code, 0, "{}", archive.stderr);
    let mut piped = there(&sandbox, &dir.path().join("piped"));
    piped.push("/");
    let ran = ctl
        .run_with([OsStr::new("cp"), "-".as_ref(), &piped], &archive.stdout)
        .await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    same(&tree, &dir.path().join("piped"));
    let file = ctl
        .run([
            OsStr::new("cp"),
            &there(&sandbox, &tree.join("run")),
            "-".as_ref(),
        ])
        .await;
    assert_eq!((file.code, &file.stdout[..]), (0, &b"#!/bin/sh\n"[..]));
    let missing = ctl
        .error([
            OsStr::new("cp"),
            &there(&sandbox, &dir.path().join("no")),
            "x".as_ref(),
        ])
        .await;
    assert_eq!(missing["reason"], "PATH_NOT_FOUND");
}

/// Both trees hold the same, with the same modes.
fn same(one: &Path, other: &Path) {
    let (a, b) = (
        fs::symlink_metadata(one).unwrap(),
        fs::symlink_metadata(other).unwrap(),
    );
    let what = other.display();
    assert_eq!((a.file_type(), a.mode()), (b.file_type(), b.mode()), "{what}");
    if a.is_symlink() {
        assert_eq!(
            fs::read_link(one).unwrap(),
            fs::read_link(other).unwrap(),
            "{what}"
        );
    } else if a.is_dir() {
        let names = |path: &Path| {
            let mut names: Vec<_> = fs::read_dir(path)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect();
            names.sort();
            names
        };
        assert_eq!(names(one), names(other), "{what}");
        for name in names(one) {
            same(&one.join(&name), &other.join(&name));
        }
    } else {
        assert!(fs::read(one).unwrap() == fs::read(other).unwrap(), "{what}");
    }
}

#[tokio::test]
async fn ls_tells_what_is_there() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let ctl = ctl(&daemon, &sandbox);
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("b")).unwrap();
    fs::write(dir.path().join("b/c"), "123").unwrap();
    fs::write(dir.path().join(".h"), "").unwrap();
    symlink("b", dir.path().join("a")).unwrap();
    let path = dir.path().to_str().unwrap();
    let ran = within(HANG, ctl.run(["ls", sandbox.id(), path])).await;
    assert_eq!(ran.text(), "a\nb\n", "{}", ran.stderr);
    let ran = ctl.run(["ls", "-l", "-R", "-a", sandbox.id(), path]).await;
    let text = ran.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(
        lines[1].starts_with("lrwxrwxrwx") && lines[1].ends_with(" a -> b"),
        "{text}"
    );
    assert!(
        lines[3].starts_with("-rw") && lines[3].ends_with(" b/c"),
        "{text}"
    );
    let through = format!("{path}/a");
    assert_eq!(ctl.run(["ls", sandbox.id(), &through]).await.text(), "c\n");
    let row = ctl.json(["ls", sandbox.id(), &through]).await;
    assert_eq!((&row["name"], &row["size"]), (&"c".into(), &3.into()));
}
