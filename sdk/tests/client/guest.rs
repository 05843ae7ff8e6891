//! Files, search, watch, git, ports and language servers of a guest that answers by script.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use sandbox_sdk::{
    ErrorKind, FileChange, How, Reason, SandboxHandle,
    files::{FindEvent, pack},
    git::GitEvent,
    v1::{self, FileKind, WatchKind},
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{SOON, client, within};
use crate::support::{Mock, Plan, guest::Uploaded, refusal};

async fn sandbox(mock: &Mock) -> SandboxHandle {
    client(mock).await.sandbox("sb_1", None)
}

fn last(mock: &Mock) -> Uploaded {
    mock.seen().uploads.last().unwrap().clone()
}

/// A reader of so many bytes that fails then. What the guest makes of that is tested with a real one: tonic's server takes a
/// request that was cancelled for one that came to its end.
fn failing(bytes: usize) -> impl tokio::io::AsyncRead + Send + 'static {
    tokio_util::io::StreamReader::new(tokio_stream::iter([
        Ok(Bytes::from(vec![b'x'; bytes])),
        Err(std::io::Error::other("the disk is gone")),
    ]))
}

#[tokio::test]
async fn a_write_carries_its_options_and_all_of_its_content() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files().beneath("/w").user("app:app");
    let odd = OsStr::from_bytes(b"/w/-\n\xff");
    let written = files
        .write(odd)
        .mode(0o600)
        .parents()
        .if_absent()
        .durable()
        .bytes("hello")
        .await
        .unwrap();
    assert_eq!((written.bytes, written.durable), (5, true));
    let seen = last(&mock);
    let start = seen.write.unwrap();
    assert_eq!(start.path, &b"/w/-\n\xff"[..]);
    assert_eq!(
        (start.mode, start.size, start.parents, start.durable, start.append),
        (Some(0o600), Some(5), true, true, false)
    );
    assert_eq!(start.r#if(), v1::WriteIf::Absent);
    let resolve = start.resolve.unwrap();
    assert_eq!(
        (&resolve.beneath[..], &resolve.user[..]),
        (&b"/w"[..], &b"app:app"[..])
    );

    let since = std::time::UNIX_EPOCH - std::time::Duration::from_nanos(7);
    files
        .write("/f")
        .append()
        .if_unchanged_since_time(since)
        .bytes("")
        .await
        .unwrap();
    let start = last(&mock).write.unwrap();
    assert_eq!((start.mtime_ns, start.append, start.size), (-7, true, Some(0)));
    assert_eq!(start.r#if(), v1::WriteIf::SameMtime);

    // A stream of unknown length, in pieces that fit.
    let content: Vec<u8> = (0..3_000_001_u32).map(|n| (n / 7).to_le_bytes()[0]).collect();
    let reader = std::io::Cursor::new(content.clone());
    let written = files.write("/f").reader(reader).await.unwrap();
    assert_eq!(written.bytes, 3_000_001);
    let seen = last(&mock);
    assert!(seen.content == content);
    assert_eq!(seen.write.unwrap().size, None);
    assert!(seen.piece <= 256 * 1024, "{}", seen.piece);
}

#[tokio::test]
async fn a_reader_that_fails_is_no_end_of_the_content() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files();
    for bytes in [1, 1_000_000] {
        let error = within(files.write("/f").reader(failing(bytes)))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Local);
        assert!(error.message().contains("the disk is gone"), "{error}");
    }
    let error = within(files.push("/d").tar(failing(1_000))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Local);
    let dir = tempfile::tempdir().unwrap();
    let error = within(files.push_dir(dir.path().join("missing"), "/d"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Local);
}

#[tokio::test]
async fn bytes_go_again_on_the_host_s_word_and_a_reader_does_not() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files();
    let starting = || Plan::Fail(refusal(Reason::Starting, "host", SOON));
    mock.plan("write", starting());
    files.write("/f").bytes("again").await.unwrap();
    assert_eq!(
        (last(&mock).content, mock.seen().calls["write"]),
        (b"again".to_vec(), 2)
    );
    mock.plan("write", starting());
    let error = files.write("/f").reader(&b"once"[..]).await.unwrap_err();
    assert!(error.is(Reason::Starting));
    assert_eq!(mock.seen().calls["write"], 3);
    // Neither on a guest's word.
    mock.plan("write", Plan::Fail(refusal(Reason::NotReady, "guest", SOON)));
    files.write("/f").bytes("x").await.unwrap_err();
    assert_eq!(mock.seen().calls["write"], 4);
}

#[tokio::test]
async fn a_refusal_ends_an_upload_that_has_no_end() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files();
    mock.plan("write", Plan::Fail(refusal(Reason::PathExists, "guest", None)));
    let write = files.write("/f").if_absent().reader(tokio::io::repeat(b'x'));
    assert!(within(write).await.unwrap_err().is(Reason::PathExists));
}

#[tokio::test]
async fn e07_content_without_its_end_is_an_error() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files();
    assert_eq!(files.read("/f").bytes().await.unwrap(), b"hello");
    for path in ["/cut", "/lost", "/headless", "/afterwards"] {
        let error = files.read(path).bytes().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unfinished, "{path}");
        // And so for those who read it as a stream.
        let Ok(mut reader) = files.read(path).stream().await else {
            assert_eq!(path, "/headless");
            continue;
        };
        let error = reader.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{path}");
        let ours: sandbox_sdk::Error = error.downcast().unwrap();
        assert_eq!(ours.kind(), ErrorKind::Unfinished);
    }
    assert!(
        files
            .read("/broken")
            .bytes()
            .await
            .unwrap_err()
            .is(Reason::AgentLost)
    );
    let error = files.read("/missing").stream().await.unwrap_err();
    assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::NotFound);

    let mut reader = files.read("/f").offset(3).length(9).stream().await.unwrap();
    assert_eq!(reader.stat().size, 5);
    let mut text = String::new();
    reader.read_to_string(&mut text).await.unwrap();
    assert_eq!((text.as_str(), reader.changed()), ("hello", true));
    assert!(
        mock.seen()
            .asked
            .last()
            .unwrap()
            .contains("offset: 3, length: Some(9)")
    );
}

#[tokio::test]
async fn e10_a_flood_waits_for_its_reader_and_fills_no_memory() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let error = sandbox
        .files()
        .read("/flood")
        .limit(1_000_000)
        .bytes()
        .await
        .unwrap_err();
    assert!(error.is(Reason::FieldInvalid), "{error}");
    let mut reader = sandbox.files().read("/flood").stream().await.unwrap();
    reader.read_exact(&mut [0; 10]).await.unwrap();
    // Unread, it stalls only itself.
    assert_eq!(sandbox.files().read("/f").bytes().await.unwrap(), b"hello");
    let mut piece = vec![0; 1 << 20];
    for _ in 0..8 {
        reader.read_exact(&mut piece).await.unwrap();
    }
    assert!(piece.iter().all(|byte| *byte == b'x'));
}

#[tokio::test]
async fn looking_making_removing_and_renaming() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files().no_follow();
    assert_eq!(files.stat("/dir").await.unwrap().kind(), FileKind::Directory);
    assert!(
        files
            .stat_target("/missing")
            .await
            .unwrap_err()
            .is(Reason::PathNotFound)
    );
    let mut entries = files.list("/dir").depth(2).max_entries(9).stream().await.unwrap();
    let mut names = Vec::new();
    while let Some(entry) = entries.next().await {
        names.push(entry.unwrap().name);
    }
    assert_eq!(names, [&b"z"[..], b"a\n\x1b[2J", b"\xff", b"l", b".hidden"]);
    assert!(entries.truncated() && entries.unreadable() == 0);
    assert!(files.mkdir("/d").parents().mode(0o700).await.unwrap());
    assert_eq!(files.remove("/d").recursive().missing_ok().await.unwrap(), 4);
    files.rename("/a", "/b").exchange().await.unwrap();
    files.rename("/a", "/b").keep_existing().await.unwrap();
    let asked = mock.seen().asked;
    for (at, text) in [
        (0, "no_follow: true"),
        (1, "follow: true"),
        (2, "depth: 2, max_entries: 9"),
        (3, "parents: true, mode: Some(448)"),
        (4, "recursive: true, missing_ok: true"),
        (5, "replace: Exchange"),
        (6, "replace: No"),
    ] {
        assert!(asked[at].contains(text), "{}", asked[at]);
    }
}

#[tokio::test]
async fn trees_go_and_come() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files();
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    std::fs::create_dir_all(from.join("a")).unwrap();
    std::fs::write(from.join("a/f"), vec![b'x'; 700_000]).unwrap();
    let pushed = files
        .push("/dest")
        .replace()
        .strip(1)
        .keep_owner()
        .dir(&from)
        .await
        .unwrap();
    assert_eq!((pushed.entries, pushed.skipped), (3, 0));
    let seen = last(&mock);
    let start = seen.push.unwrap();
    assert_eq!(
        (start.mode(), start.strip, start.keep_owner),
        (v1::PushMode::Replace, 1, true)
    );
    assert!(seen.piece <= 256 * 1024);
    let mut archive = Vec::new();
    pack(&from).read_to_end(&mut archive).await.unwrap();
    assert!(seen.content == archive);

    mock.archive(archive);
    let to = dir.path().join("to");
    let pulled = files.pull("/dir").exclude("*.o").follow().dir(&to).await.unwrap();
    assert_eq!(
        (pulled.unpacked.entries, pulled.unpacked.bytes, pulled.end.skipped),
        (3, 700_000, 1)
    );
    assert_eq!(std::fs::metadata(to.join("a/f")).unwrap().len(), 700_000);
    assert!(
        mock.seen()
            .asked
            .last()
            .unwrap()
            .contains("exclude: [b\"*.o\"], follow: true")
    );
    // One of an enemy.
    let mut enemy = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    enemy
        .append_link(&mut header, "way", dir.path().join("out"))
        .unwrap();
    header.set_entry_type(tar::EntryType::Regular);
    enemy.append_data(&mut header, "way/f", &b""[..]).unwrap();
    mock.archive(enemy.into_inner().unwrap());
    std::fs::create_dir(dir.path().join("out")).unwrap();
    let error = files.pull_dir("/dir", &to).await.unwrap_err();
    assert!(error.is(Reason::ArchiveRefused), "{error}");
    assert_eq!(std::fs::read_dir(dir.path().join("out")).unwrap().count(), 0);
    let error = files.pull_dir("/file", &to).await.unwrap_err();
    assert!(error.is(Reason::NotADirectory));
    let error = files
        .pull_dir("/missing", dir.path().join("none"))
        .await
        .unwrap_err();
    assert!(error.is(Reason::PathNotFound));
    assert!(!dir.path().join("none").exists());
}

#[tokio::test]
async fn searching_and_replacing() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files();
    let find = files
        .find("/dir", "x")
        .fixed()
        .ignore_case()
        .glob("*.rs")
        .hidden();
    let mut finding = find
        .respect_gitignore()
        .context(1)
        .max_matches(5)
        .stream()
        .await
        .unwrap();
    let mut lines = Vec::new();
    let done = loop {
        match finding.next().await.unwrap().unwrap() {
            FindEvent::Line(line) => lines.push((line.line, line.context)),
            FindEvent::Done(done) => break done,
        }
    };
    assert_eq!(lines, [(6, true), (7, false)]);
    assert_eq!((done.matches, done.skipped.unwrap().binary), (1, 2));
    assert!(finding.next().await.is_none());
    let asked = mock.seen().asked.pop().unwrap();
    for text in [
        "fixed: true",
        "ignore_case: true",
        "globs: [b\"*.rs\"]",
        "context: 1",
        "max_matches: 5",
    ] {
        assert!(asked.contains(text), "{asked}");
    }
    let mut finding = files.find("/dir", "cut").stream().await.unwrap();
    let error = loop {
        if let Err(error) = finding.next().await.unwrap() {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unfinished);
    let replaced = files
        .replace("a", "b")
        .path("/f")
        .path("/g")
        .dry_run()
        .run()
        .await
        .unwrap();
    assert_eq!((replaced.files.len(), replaced.done.replacements), (1, 2));
    assert!(mock.seen().asked.last().unwrap().contains("dry_run: true"));
}

#[tokio::test]
async fn a_watch_tells_all_and_ends_with_its_reader() {
    let mock = Mock::start();
    let files = sandbox(&mock).await.files();
    let mut watch = files
        .watch("/dir")
        .recursive()
        .exclude("t")
        .stream()
        .await
        .unwrap();
    let mut changes = Vec::new();
    for _ in 0..5 {
        changes.push(watch.next().await.unwrap().unwrap());
    }
    let changed = |kind, path: &'static [u8], directory| FileChange::Changed {
        kind,
        path: path.into(),
        directory,
    };
    assert_eq!(
        changes,
        [
            FileChange::Ready { directories: 2 },
            changed(WatchKind::Created, b"a\n", false),
            changed(WatchKind::Deleted, b"\xff", true),
            FileChange::Renamed {
                from: "a".into(),
                to: "b".into(),
                directory: false
            },
            FileChange::Overflow {
                reason: "kernel".into()
            },
        ]
    );
    assert_eq!(mock.seen().cancelled, 0);
    drop(watch);
    mock.until(|seen| seen.cancelled == 1).await;
    // The path itself was deleted.
    let watch = files.watch("/gone").stream().await.unwrap();
    assert_eq!(watch.count().await, 5);
}

#[tokio::test]
async fn git_is_typed_and_without_its_end_an_error() {
    let mock = Mock::start();
    let git = sandbox(&mock).await.git("/work").user("app").env("A", "b");
    let git = git.timeout(std::time::Duration::from_secs(90));
    let mut cloning = git
        .clone_from("https://x/y")
        .branch("b")
        .depth(1)
        .stream()
        .await
        .unwrap();
    assert!(matches!(
        cloning.next().await.unwrap().unwrap(),
        GitEvent::Progress(_)
    ));
    let done = GitEvent::Done { head: "abc".into() };
    assert_eq!(cloning.next().await.unwrap().unwrap(), done);
    assert!(cloning.next().await.is_none());
    let asked = mock.seen().asked.pop().unwrap();
    for text in [
        "path: b\"/work\"",
        "user: b\"app\"",
        "timeout_ms: 90000",
        "depth: 1",
    ] {
        assert!(asked.contains(text), "{asked}");
    }
    let error = git.clone_from("cut").run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unfinished);

    assert_eq!(git.status().await.unwrap().entries[0].path, &b"\xff"[..]);
    git.add(["a", "-b"]).await.unwrap();
    git.add_all().await.unwrap();
    let commit = git
        .commit("says\nthis")
        .author("A", "a@b")
        .all()
        .allow_empty()
        .amend();
    assert_eq!(commit.run().await.unwrap(), "def");
    assert_eq!(git.branches(true).await.unwrap().branches[0].name, "main");
    git.branch_create("b", Some("HEAD~1".as_ref()), true)
        .await
        .unwrap();
    git.branch_delete("b", false).await.unwrap();
    assert_eq!(
        git.checkout("b").create().force().path("f").run().await.unwrap(),
        "abc"
    );
    assert_eq!(git.push().remote("o").refspec("a:b").run().await.unwrap(), "abc");
    assert_eq!(git.pull().ff_only().run().await.unwrap(), "abc");
    mock.plan("git_add", Plan::Fail(refusal(Reason::GitMissing, "guest", None)));
    assert!(git.add_all().await.unwrap_err().is(Reason::GitMissing));
    let wrong = git.timeout(std::time::Duration::ZERO);
    assert_eq!(wrong.status().await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn each_direction_of_a_port_ends_by_itself() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let mut port = sandbox.forward(7).connect().await.unwrap();
    port.write_all(b"hello").await.unwrap();
    let mut text = [0; 5];
    port.read_exact(&mut text).await.unwrap();
    assert_eq!(&text, b"hello");
    port.shutdown().await.unwrap();
    // The other direction still has something to say.
    let mut rest = Vec::new();
    within(port.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, b"bye");
    assert!(port.write_all(b"x").await.is_err());

    let error = sandbox.forward(9).connect().await.unwrap_err();
    assert!(error.is(Reason::PortRefused));
    for (port, kind) in [
        (2, std::io::ErrorKind::ConnectionReset),
        (3, std::io::ErrorKind::UnexpectedEof),
    ] {
        let mut port = sandbox.forward(port).connect().await.unwrap();
        port.write_all(b"x").await.unwrap();
        let error = within(port.read_to_end(&mut Vec::new())).await.unwrap_err();
        assert_eq!(error.kind(), kind);
        // What is written to it from now on is told to be in vain.
        within(async { while port.write_all(b"x").await.is_ok() {} }).await;
    }
    let before = mock.seen().cancelled;
    let (reader, mut writer) = sandbox.forward(7).connect().await.unwrap().into_split();
    writer.write_all(b"x").await.unwrap();
    drop(reader);
    mock.until(|seen| seen.cancelled > before).await;
}

#[tokio::test]
async fn what_was_written_arrives_though_its_writer_goes_away() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let sent = vec![b'x'; 3_000_000];
    let mut port = sandbox.forward(8).connect().await.unwrap();
    let mut text = String::new();
    within(port.read_to_string(&mut text)).await.unwrap();
    assert_eq!(text, "hello");
    within(async {
        port.write_all(&sent).await?;
        port.shutdown().await
    })
    .await
    .unwrap();
    drop(port);
    assert_eq!(mock.seen().forwarded, 3_000_000);
    // And by a listener, whose client's end comes last.
    let listener = sandbox.forward(8).listen(("127.0.0.1", 0)).await.unwrap();
    let mut socket = tokio::net::TcpStream::connect(listener.local_addr())
        .await
        .unwrap();
    within(socket.read_to_string(&mut text)).await.unwrap();
    socket.write_all(&sent).await.unwrap();
    drop(socket);
    mock.until(|seen| seen.forwarded == 6_000_000).await;
    assert_eq!(mock.seen().cancelled, 0);
}

#[tokio::test]
async fn a_listener_serves_many_and_ends_when_dropped() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let listener = sandbox.forward(7).listen(("127.0.0.1", 0)).await.unwrap();
    let local = listener.local_addr();
    let clients = (0..40_usize).map(|n| async move {
        let mut socket = tokio::net::TcpStream::connect(local).await.unwrap();
        let sent = vec![u8::try_from(n).unwrap(); 100_000 + n];
        let (mut from, mut to) = socket.split();
        let mut back = Vec::new();
        let (wrote, read) = tokio::join!(
            async {
                to.write_all(&sent).await?;
                to.shutdown().await
            },
            from.read_to_end(&mut back)
        );
        wrote.unwrap();
        read.unwrap();
        assert!(back.starts_with(&sent) && back.ends_with(b"bye"));
    });
    within(futures_util::future::join_all(clients)).await;
    let mut held = tokio::net::TcpStream::connect(local).await.unwrap();
    held.write_all(b"x").await.unwrap();
    held.read_exact(&mut [0]).await.unwrap();
    let before = mock.seen().cancelled;
    drop(listener);
    mock.until(|seen| seen.cancelled > before).await;
    assert!(matches!(within(held.read(&mut [0])).await, Ok(0) | Err(_)));
    assert!(tokio::net::TcpStream::connect(local).await.is_err());
}

#[tokio::test]
async fn a_connection_that_breaks_there_is_reset_here() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    for (port, reason) in [(2, Reason::PortReset), (9, Reason::PortRefused)] {
        let mut listener = sandbox.forward(port).listen(("127.0.0.1", 0)).await.unwrap();
        let mut socket = tokio::net::TcpStream::connect(listener.local_addr())
            .await
            .unwrap();
        // The second may be reset before this.
        socket.write_all(b"x").await.ok();
        let error = within(listener.next_failure()).await;
        assert!(error.is(reason), "{error}");
        let ended = within(socket.read_to_end(&mut Vec::new())).await;
        assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn whole_messages_of_a_language_server() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let lsp = sandbox
        .lsp("rust")
        .root("/w")
        .env("A", "b")
        .linger(std::time::Duration::from_secs(9));
    let mut stream = lsp.open().await.unwrap();
    assert_eq!((stream.server(), stream.pid(), stream.resumed()), (5, 6, false));
    let start = mock.seen().lsp.pop().unwrap();
    assert_eq!((&start.root[..], start.linger_secs), (&b"/w"[..], Some(9)));
    // Larger than what waits for the connection, empty, and small ones.
    let large = Bytes::from(vec![b'x'; 3_000_000]);
    for message in [large.clone(), Bytes::new(), Bytes::from_static(b"{}")] {
        let (mut to, mut from) = (&mut stream).split();
        let (sent, back) = within(async { tokio::join!(to.send(message.clone()), from.next()) }).await;
        sent.unwrap();
        assert!(back.unwrap().unwrap() == message);
    }
    let error = stream.send(vec![0; 8 * 1024 * 1024 + 1]).await.unwrap_err();
    assert!(error.is(Reason::FieldInvalid));
    stream.send("exit").await.unwrap();
    assert!(within(stream.next()).await.is_none());
    assert_eq!(stream.exit().unwrap().how, How::Code(3));
    within(async { while stream.send("x").await.is_ok() {} }).await;

    let error = sandbox.lsp("unknown").open().await.unwrap_err();
    assert!(error.is(Reason::LspUnknown));
    let again = sandbox.lsp_server(5).open().await.unwrap();
    assert!(again.resumed());
    assert_eq!(sandbox.lsp_stop(5).await.unwrap().unwrap().how, How::Signal(15));
}
