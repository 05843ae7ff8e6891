//! Find and Replace.

use std::{
    io::Write as _,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
};

use rustix::fs::{IFlags, OFlags, ioctl_getflags, ioctl_setflags};
use sandbox_protocol::v1::{
    AgentFindRequest, AgentReplaceRequest, ControlResumeRequest, FindDone, FindLine, ReplaceDone,
    ReplaceFile, control_quiesce_request::Mode as Rest, find_out, replace_out,
};
use tonic::Status;

use crate::{
    common::{reason, within},
    kit::{Kit, bytes, names, user, why},
};

fn find(path: &Path, pattern: &str) -> AgentFindRequest {
    AgentFindRequest {
        path: bytes(path),
        pattern: pattern.to_owned().into(),
        ..AgentFindRequest::default()
    }
}

fn replace(paths: &[&Path], pattern: &str, replacement: &str) -> AgentReplaceRequest {
    AgentReplaceRequest {
        paths: paths.iter().map(|path| bytes(path)).collect(),
        pattern: pattern.to_owned().into(),
        replacement: replacement.to_owned().into(),
        ..AgentReplaceRequest::default()
    }
}

impl Kit {
    async fn find(&mut self, request: AgentFindRequest) -> Result<(Vec<FindLine>, FindDone), Status> {
        let mut stream = within(self.host.agent.find(request)).await?.into_inner();
        let (mut lines, mut done) = (Vec::new(), None);
        while let Some(message) = within(stream.message()).await? {
            match message.m.unwrap() {
                find_out::M::Line(line) => lines.push(line),
                find_out::M::Done(last) => done = Some(last),
            }
        }
        Ok((lines, done.unwrap()))
    }

    async fn replace(
        &mut self,
        request: AgentReplaceRequest,
    ) -> Result<(Vec<ReplaceFile>, ReplaceDone), Status> {
        let mut stream = within(self.host.agent.replace(request)).await?.into_inner();
        let (mut files, mut done) = (Vec::new(), None);
        while let Some(message) = within(stream.message()).await? {
            match message.m.unwrap() {
                replace_out::M::File(file) => files.push(file),
                replace_out::M::Done(last) => done = Some(last),
            }
        }
        Ok((files, done.unwrap()))
    }

    /// Bytes that silkd has read, from files and from its host.
    fn bytes_read(&self) -> u64 {
        let io = std::fs::read_to_string(format!("/proc/{}/io", self.guest.child.id())).unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("rchar: "));
        line.unwrap().parse().unwrap()
    }

    /// Waits until every call has ended, steps included: only then a template can be made. Ends none of them itself.
    async fn until_nobody_is_at_it(&mut self) {
        within(async {
            while let Err(busy) = self.host.quiesce(Rest::Template).await {
                assert_eq!(reason(&busy), "QUIESCE_BUSY");
            }
        })
        .await;
        within(self.host.control.resume(ControlResumeRequest {}))
            .await
            .unwrap();
    }

    fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

#[tokio::test]
async fn find_reports_what_it_skipped() {
    let mut kit = Kit::new().await;
    kit.put("t/plain", "one\nneedle here\nthree\n");
    kit.put("t/binary", b"first\n\0\nneedle\n");
    kit.put("t/long", ["x".repeat(3 << 20), "needle".into()].concat());
    kit.put("t/locked", "needle");
    kit.put("t/shut/in", "needle");
    for name in ["t/locked", "t/shut"] {
        std::fs::set_permissions(kit.path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    std::fs::set_permissions(kit.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    symlink("plain", kit.path("t/link")).unwrap();
    let request = AgentFindRequest {
        resolve: user("12345"),
        ..find(&kit.path("t"), "needle")
    };
    let (lines, done) = kit.find(request).await.unwrap();
    assert_eq!(lines.len(), 1);
    let path = kit.path("t/plain");
    assert_eq!(&*lines[0].path, path.as_os_str().as_bytes());
    assert_eq!((lines[0].line, lines[0].column, lines[0].offset), (2, 1, 4));
    assert_eq!(&*lines[0].text, b"needle here");
    let skipped = done.skipped.unwrap();
    assert_eq!(
        (skipped.binary, skipped.line_too_long, skipped.unreadable),
        (1, 1, 2)
    );
    assert_eq!((done.searched, done.matches, done.truncated), (3, 1, false));
    for (request, reason) in [
        (find(&kit.path("t"), "("), "INVALID_PATTERN"),
        (find(&kit.path("t"), "a\\nb"), "INVALID_PATTERN"),
        (find(&kit.path("none"), "a"), "PATH_NOT_FOUND"),
    ] {
        assert_eq!(why(kit.find(request).await), reason);
    }
    let context = AgentFindRequest {
        context: 11,
        ..find(&kit.path("t"), "a")
    };
    assert_eq!(why(kit.find(context).await), "FIELD_INVALID");
}

#[tokio::test]
async fn every_match_is_told_once_with_its_surroundings() {
    let mut kit = Kit::new().await;
    // Enough for many batches, at any distance from each other.
    let hit = |n: usize| n.is_multiple_of(7) || n.is_multiple_of(11) || n % 1000 < 3;
    let mut text = String::new();
    for n in 0..20_000 {
        text.push_str(&format!("{n} {}\n", if hit(n) { "needle" } else { "straw" }));
    }
    kit.put("f", &text);
    let index = |n: u64| usize::try_from(n).unwrap();
    for context in [0_u32, 1, 5] {
        let request = AgentFindRequest {
            context,
            ..find(&kit.path("f"), "needle$")
        };
        let (lines, done) = kit.find(request).await.unwrap();
        let c = context as usize;
        let near = |n: usize| (n.saturating_sub(c)..=n + c).any(|m| m < 20_000 && hit(m));
        let expected: Vec<usize> = (0..20_000).filter(|n| near(*n)).collect();
        let told: Vec<usize> = lines.iter().map(|line| index(line.line) - 1).collect();
        assert_eq!(told, expected, "context {context}");
        for line in &lines {
            let n = index(line.line) - 1;
            assert_eq!(line.context, !hit(n));
            let at = &text.as_bytes()[index(line.offset)..][..line.text.len()];
            assert_eq!(at, &*line.text);
            assert!(at.starts_with(format!("{n} ").as_bytes()));
            assert_eq!(line.column != 0, hit(n));
        }
        assert_eq!(done.matches, (0..20_000).filter(|n| hit(*n)).count() as u64);
    }
    let most = AgentFindRequest {
        max_matches: 10,
        ..find(&kit.path("f"), "NEEDLE")
    };
    let most = AgentFindRequest {
        ignore_case: true,
        ..most
    };
    let (lines, done) = kit.find(most).await.unwrap();
    assert_eq!((lines.len(), done.matches, done.truncated), (10, 10, true));
    kit.put("long", "x".repeat(5000) + "needle");
    let (lines, _) = kit.find(find(&kit.path("long"), "needle")).await.unwrap();
    assert_eq!(
        (lines[0].text.len(), lines[0].cut, lines[0].column),
        (4096, true, 5001)
    );
}

#[tokio::test]
async fn globs_hidden_files_and_gitignore_choose() {
    let mut kit = Kit::new().await;
    for name in [
        "a.rs",
        "b.txt",
        ".hidden",
        "target/c.rs",
        "sub/d.rs",
        "sub/e.log",
        "sub/kept.log",
        "sub/deep/f.log",
    ] {
        kit.put(&format!("t/{name}"), "needle");
    }
    kit.put("t/.gitignore", "target/\n*.log\n[bad\n");
    kit.put("t/sub/.gitignore", "!kept.log\nd.rs\n");
    let root = kit.path("t");
    let mut chosen = async |change: fn(&mut AgentFindRequest)| {
        let mut request = find(&root, "needle");
        change(&mut request);
        let (lines, _) = kit.find(request).await.unwrap();
        let prefix = root.as_os_str().len() + 1;
        let mut names: Vec<String> = lines
            .iter()
            .map(|line| String::from_utf8(line.path[prefix..].to_vec()).unwrap())
            .collect();
        names.sort();
        names.join(" ")
    };
    assert_eq!(
        chosen(|_| {}).await,
        "a.rs b.txt sub/d.rs sub/deep/f.log sub/e.log sub/kept.log target/c.rs"
    );
    assert_eq!(
        chosen(|r| r.globs = vec!["*.rs".into()]).await,
        "a.rs sub/d.rs target/c.rs"
    );
    assert_eq!(
        chosen(|r| r.globs = vec!["*.rs".into(), "!target".into()]).await,
        "a.rs sub/d.rs"
    );
    assert_eq!(
        chosen(|r| r.respect_gitignore = true).await,
        "a.rs b.txt sub/kept.log"
    );
    assert!(chosen(|r| r.hidden = true).await.starts_with(".hidden a.rs"));
}

#[tokio::test]
async fn find_in_4_gib_file() {
    let mut kit = Kit::new().await;
    let size = (4_u64 << 30) / 16;
    let path = kit.path("f");
    let file = std::fs::File::create(&path).unwrap();
    let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
    let block = "a line of straw, and no end to it\n".repeat(4096);
    let mut written = 0;
    while written < size {
        out.write_all(block.as_bytes()).unwrap();
        written += block.len() as u64;
    }
    out.write_all(b"the needle").unwrap();
    drop(out);
    kit.put("small", "needle");
    kit.find(find(&kit.path("small"), "n[e]edle")).await.unwrap();
    let before = kit.peak();
    let (lines, done) = kit.find(find(&path, "n[e]edle")).await.unwrap();
    assert_eq!(lines.len(), 1);
    assert_eq!((lines[0].offset, lines[0].column), (written, 5));
    assert_eq!(lines[0].line, written / 34 + 1);
    assert_eq!((done.searched, done.matches), (1, 1));
    let grown = kit.peak() - before;
    assert!(grown < 4096, "{grown} KiB more for {size} bytes");
}

/// Matches no row of `a`, and takes long to say so.
const COSTLY: &str = "(a?){40}(a{1,30}){1,30}[b-y]";

#[tokio::test]
async fn cancel_stops_the_walk() {
    let mut kit = Kit::new().await;
    // A terabyte of straw, as the same file many times: whoever went through it would not be done within the hour.
    kit.put("t/first", "needle\n");
    kit.put("straw", "a line of straw\n".repeat(1 << 22));
    for n in 0..16_000 {
        std::fs::hard_link(kit.path("straw"), kit.path(&format!("t/{n}"))).unwrap();
    }
    let request = find(&kit.path("t"), "n[e]edle");
    let stream = within(kit.host.agent.find(request)).await.unwrap();
    // Somebody is at it, and nobody waits any more.
    drop(stream);
    kit.until_nobody_is_at_it().await;

    // One file alone, huge, in which every line costs much: what is read of it is counted. To its end it is seconds.
    kit.put("huge", ["a".repeat(63), "\n".into()].concat().repeat(1 << 20));
    let size = std::fs::metadata(kit.path("huge")).unwrap().len();
    let before = kit.bytes_read();
    let request = find(&kit.path("huge"), COSTLY);
    let mut agent = kit.host.agent.clone();
    let call = tokio::spawn(async move { agent.find(request).await });
    within(async {
        while kit.bytes_read() < before + 256 * 1024 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled(), "it was not at its end");
    kit.until_nobody_is_at_it().await;
    let read = kit.bytes_read() - before;
    assert!(read < size / 2, "{read} of {size} bytes were read");
}

#[tokio::test]
async fn replace_all_or_nothing() {
    let mut kit = Kit::new().await;
    let contents = |kit: &Kit| -> Vec<String> {
        (0..5)
            .map(|n| std::fs::read_to_string(kit.path(&format!("t/{n}"))).unwrap())
            .collect()
    };
    for n in 0..5 {
        kit.put(&format!("t/{n}"), format!("old {n}\nkept\nold and old\n"));
        std::os::unix::fs::chown(kit.path(&format!("t/{n}")), Some(12_345), Some(12_345)).unwrap();
    }
    std::os::unix::fs::chown(kit.path("t"), Some(12_345), Some(12_345)).unwrap();
    std::fs::set_permissions(kit.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let before = contents(&kit);
    let listing = names(&kit.path("t"));
    let root = kit.path("t");
    // One that the user may not write to is found before anything happens.
    std::os::unix::fs::chown(kit.path("t/2"), Some(0), Some(0)).unwrap();
    let denied = AgentReplaceRequest {
        resolve: user("12345"),
        ..replace(&[&root], "old", "new")
    };
    assert_eq!(why(kit.replace(denied.clone()).await), "PATH_DENIED");
    assert_eq!((contents(&kit), names(&root)), (before.clone(), listing.clone()));
    // One that nobody may rename is found when some have changed: they change back.
    let file = rustix::fs::open(kit.path("t/2"), OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    let flags = ioctl_getflags(&file).unwrap();
    ioctl_setflags(&file, flags | IFlags::IMMUTABLE).unwrap();
    let outcome = kit.replace(replace(&[&root], "old", "new")).await;
    ioctl_setflags(&file, flags).unwrap();
    assert_eq!(why(outcome), "PATH_DENIED");
    assert_eq!((contents(&kit), names(&root)), (before.clone(), listing.clone()));

    let dry = AgentReplaceRequest {
        dry_run: true,
        ..replace(&[&root], "old", "new")
    };
    let (files, done) = kit.replace(dry).await.unwrap();
    assert_eq!((files.len(), done.files, done.replacements), (5, 5, 15));
    assert_eq!((contents(&kit), names(&root)), (before, listing.clone()));

    let (mut files, done) = kit
        .replace(replace(&[&root], "old( and)?", "new$1"))
        .await
        .unwrap();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert_eq!(&*files[3].path, kit.path("t/3").as_os_str().as_bytes());
    assert_eq!((done.files, done.replacements), (5, 15));
    assert_eq!(contents(&kit)[4], "new 4\nkept\nnew and new\n");
    assert_eq!(names(&root), listing);
    assert_eq!(std::fs::metadata(kit.path("t/4")).unwrap().uid(), 12_345);
}

#[tokio::test]
async fn replacements_are_exact() {
    let mut kit = Kit::new().await;
    symlink("f", kit.path("link")).unwrap();
    for (content, pattern, fixed, replacement, expected) in [
        (&b"a.b a.b"[..], "a.b", true, "$0", &b"$0 $0"[..]),
        (
            b"a.b axb\r\n\xff a.b",
            "a(.)b",
            false,
            "<$1>",
            b"<.> <x>\r\n\xff <.>",
        ),
        (b"\n\nx\n\n", "x", false, "", b"\n\n\n\n"),
        (b"no end", "^no end$", false, "an end", b"an end"),
    ] {
        kit.put("f", content);
        let request = AgentReplaceRequest {
            fixed,
            ..replace(&[&kit.path("link")], pattern, replacement)
        };
        let (files, _) = kit.replace(request).await.unwrap();
        assert_eq!(std::fs::read(kit.path("f")).unwrap(), expected);
        assert_eq!(&*files[0].path, kit.path("link").as_os_str().as_bytes());
        assert!(kit.path("link").is_symlink());
    }
    // The same file by two names changes once.
    kit.put("f", "a");
    std::fs::hard_link(kit.path("f"), kit.path("g")).unwrap();
    let (files, _) = kit
        .replace(replace(&[&kit.path("f"), &kit.path("g")], "a", "aa"))
        .await
        .unwrap();
    assert_eq!((files.len(), std::fs::read(kit.path("f")).unwrap().len()), (1, 2));
    kit.put("f", b"old\n\0");
    let (files, done) = kit
        .replace(replace(&[&kit.path("f")], "old", "new"))
        .await
        .unwrap();
    assert_eq!((files.len(), done.skipped.unwrap().binary), (0, 1));
    let lines = replace(&[&kit.path("f")], "a", "b\nc");
    assert_eq!(why(kit.replace(lines).await), "FIELD_INVALID");
    let spans = replace(&[&kit.path("f")], "a\\sb", "c");
    assert!(
        kit.replace(spans).await.is_ok(),
        "a class that holds more than a line's end is fine"
    );
    let spans = replace(&[&kit.path("f")], "a\\nb", "c");
    assert_eq!(why(kit.replace(spans).await), "INVALID_PATTERN");
    assert_eq!(kit.names(), ["f", "g", "link"]);
}
