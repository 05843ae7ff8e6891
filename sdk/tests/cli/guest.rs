//! Verbs on a guest's files, tools and ports.

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::Path,
};

use sandbox_sdk::{Reason, files::pack};
use serde_json::json;
use tokio::io::AsyncReadExt as _;

use super::{block, code, command, ctl, lines, one, start, stdout};
use crate::support::{Mock, Plan, guest::Uploaded, refusal};

fn last(mock: &Mock) -> Uploaded {
    mock.seen().uploads.last().unwrap().clone()
}

fn packed(path: &Path) -> Vec<u8> {
    let mut archive = Vec::new();
    block(async { pack(path).read_to_end(&mut archive).await }).unwrap();
    archive
}

fn given(mock: &Mock, args: &[&str], input: &[u8]) -> std::process::Output {
    let mut child = start(mock, args);
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn cp_puts_files_where_docker_would() {
    let mock = Mock::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("name");
    fs::write(&file, "content").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    let file = file.to_str().unwrap();
    for (target, path) in [
        ("sb_1:/x/new", "/x/new"),
        ("sb_1:/dir", "/dir/name"),
        ("sb_1:dir/", "/dir/name"),
        ("sb_1:/missing", "/missing"),
    ] {
        let copied = one(&ctl(&mock, &["--json", "cp", "--user", "app", file, target]));
        assert_eq!(
            copied,
            json!({ "entries": 1, "bytes": 7, "skipped": 0, "changed": 0 })
        );
        let seen = last(&mock);
        let start = seen.write.unwrap();
        assert_eq!(
            (&start.path[..], &seen.content[..]),
            (path.as_bytes(), &b"content"[..])
        );
        // Without set-id bits, and announced.
        assert_eq!((start.mode, start.size), (Some(0o751), Some(7)));
        assert_eq!(start.resolve.unwrap().user, "app");
    }
    assert_eq!(mock.seen().sandbox_id.as_deref(), Some("sb_1"));
    let uploads = mock.seen().uploads.len();
    for wrong in [
        &["cp", file, "sb_1:/missing/"][..],
        &["cp", file, "sb_1:"],
        &["cp", file, "/tmp/other"],
        &["cp", "-", "-"],
        &["cp", "sb_1:/a", "sb_2:/b"],
        &["cp", dir.path().to_str().unwrap(), "sb_1:/file"],
        &["cp", "sb_1:/dir", file],
        &["cp", "sb_1:/file", "./nowhere/"],
    ] {
        assert_eq!(code(&ctl(&mock, wrong)), 2, "{wrong:?}");
    }
    assert_eq!(code(&ctl(&mock, &["cp", "./no-such-file", "sb_1:/x"])), 1);
    assert_eq!(mock.seen().uploads.len(), uploads);
}

#[test]
fn cp_takes_trees_both_ways() {
    let mock = Mock::start();
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/f"), "12345").unwrap();
    let archive = packed(&tree);
    let tree_arg = tree.to_str().unwrap();
    let content = format!("{tree_arg}/.");
    for (source, target, path) in [
        (tree_arg, "sb_1:/dir", "/dir/tree"),
        (tree_arg, "sb_1:/missing", "/missing"),
        (&content, "sb_1:/dir", "/dir"),
    ] {
        assert_eq!(stdout(&ctl(&mock, &["cp", "-a", source, target])), "");
        let seen = last(&mock);
        let start = seen.push.unwrap();
        assert_eq!((&start.dest[..], start.keep_owner), (path.as_bytes(), true));
        assert!(seen.content == archive);
    }
    mock.archive(archive.clone());
    let there = dir.path().join("there");
    fs::create_dir(&there).unwrap();
    for (source, lands) in [("sb_1:/dir/x", "there/x/sub/f"), ("sb_1:/dir/.", "there/sub/f")] {
        let output = ctl(&mock, &["cp", source, there.to_str().unwrap()]);
        assert_eq!(stdout(&output), "");
        // What was left out is told.
        assert!(String::from_utf8_lossy(&output.stderr).contains("1 left out"));
        assert_eq!(fs::read(dir.path().join(lands)).unwrap(), b"12345");
    }
    let new = dir.path().join("new");
    let copied = one(&ctl(&mock, &["--json", "cp", "sb_1:/dir", new.to_str().unwrap()]));
    assert_eq!(
        copied,
        json!({ "entries": 3, "bytes": 5, "skipped": 1, "changed": 0 })
    );
    assert_eq!(fs::read(new.join("sub/f")).unwrap(), b"12345");
    assert_eq!(
        code(&ctl(&mock, &["cp", "sb_1:/missing", new.to_str().unwrap()])),
        1
    );
}

#[test]
fn cp_and_its_pipes() {
    let mock = Mock::start();
    let dir = tempfile::tempdir().unwrap();
    mock.archive(packed(dir.path()));
    assert_eq!(ctl(&mock, &["cp", "sb_1:/dir", "-"]).stdout, packed(dir.path()));
    let output = ctl(&mock, &["cp", "sb_1:/dir/file", "-"]);
    assert_eq!(output.stdout, b"hello");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 changed"));
    // A file that was cut is a failure, whatever came before.
    let output = ctl(&mock, &["cp", "sb_1:/cut", "-"]);
    assert_eq!((code(&output), &output.stdout[..]), (1, &b"he"[..]));
    for (target, archive) in [
        ("sb_1:/dir", true),
        ("sb_1:/missing/", true),
        ("sb_1:/missing", false),
        ("sb_1:/dir/file", false),
    ] {
        assert_eq!(code(&given(&mock, &["cp", "-", target], b"\0\xff")), 0);
        let seen = last(&mock);
        assert_eq!(
            (seen.push.is_some(), seen.write.is_some()),
            (archive, !archive),
            "{target}"
        );
        assert_eq!(seen.content, b"\0\xff");
    }
}

#[test]
fn cp_saves_a_file_whole_with_its_mode() {
    let mock = Mock::start();
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join(OsStr::from_bytes(b"-\n\xff"));
    let mut copy = command(&mock.address(), &["cp", "sb_1:/file"]);
    assert!(copy.arg(&odd).status().unwrap().success());
    assert_eq!(fs::read(&odd).unwrap(), b"hello");
    assert_eq!(fs::metadata(&odd).unwrap().permissions().mode() & 0o7777, 0o640);
    let into = dir.path().to_str().unwrap();
    assert_eq!(code(&ctl(&mock, &["cp", "sb_1:/a/file", into])), 0);
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"hello");
    fs::write(dir.path().join("old"), "old").unwrap();
    let old = format!("{into}/old");
    assert_eq!(code(&ctl(&mock, &["cp", "sb_1:/cut", &old])), 1);
    assert_eq!(fs::read(&old).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn an_interrupted_cp_leaves_the_old_file() {
    let mock = Mock::start();
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    fs::write(&old, "old").unwrap();
    let mut child = start(&mock, &["cp", "sb_1:/flood", old.to_str().unwrap()]);
    while fs::read_dir(dir.path()).unwrap().count() < 2 {
        std::thread::yield_now();
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(fs::read(&old).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn ls_shows_names_that_move_no_cursor() {
    let mock = Mock::start();
    assert_eq!(
        stdout(&ctl(&mock, &["ls", "sb_1", "/dir"])),
        "a\\n\\u{1b}[2J\nl\nz\n\u{fffd}\n"
    );
    let long = stdout(&ctl(&mock, &["ls", "-l", "-a", "sb_1", "/dir"]));
    assert!(long.contains("drw-r-----   1 7:8"), "{long}");
    assert!(
        long.contains("2023-11-14T22:13:20.000Z l -> b\n") && long.contains(".hidden"),
        "{long}"
    );
    stdout(&ctl(&mock, &["ls", "-R", "sb_1", "/dir"]));
    assert!(mock.seen().asked.last().unwrap().contains("depth: 64"));
    let rows = lines(&ctl(&mock, &["--json", "ls", "sb_1", "/dir"]));
    assert_eq!(
        (&rows[0]["name"], &rows[0]["kind"]),
        (&json!("a\n\u{1b}[2J"), &json!("directory"))
    );
    assert_eq!(
        (&rows[3]["name_base64"], &rows[3]["mode"]),
        (&json!("/w=="), &json!("0640"))
    );
    assert_eq!(rows[1]["target"], "b");
    assert_eq!(stdout(&ctl(&mock, &["ls", "sb_1", "/etc/file"])), "/etc/file\n");
    assert_eq!(code(&ctl(&mock, &["ls", "sb_1", "/missing"])), 1);
}

#[test]
fn find_replace_and_watch_files() {
    let mock = Mock::start();
    let output = ctl(
        &mock,
        &[
            "find", "sb_1", "-x", "/dir", "-g", "!t", "-C", "2", "-m", "7", "-F", "-i",
        ],
    );
    assert_eq!(
        stdout(&output),
        "/dir/\u{fffd}-6-a \\u{1b}[2J b [..]\n/dir/\u{fffd}:7:a \\u{1b}[2J b [..]\n"
    );
    assert!(String::from_utf8_lossy(&output.stderr).contains("2 binary"));
    let asked = mock.seen().asked.pop().unwrap();
    for text in [
        "pattern: b\"-x\"",
        "globs: [b\"!t\"]",
        "context: 2",
        "max_matches: 7",
        "fixed: true",
    ] {
        assert!(asked.contains(text), "{asked}");
    }
    let found = lines(&ctl(&mock, &["--json", "find", "sb_1", "x"]));
    assert_eq!((&found[1]["line"], &found[1]["column"]), (&json!(7), &json!(3)));
    assert_eq!(found[2]["done"]["skipped"]["binary"], 2);
    assert_eq!(code(&ctl(&mock, &["find", "sb_1", "cut"])), 1);

    let replace = ["replace", "sb_1", "a", "-b", "/f", "/g", "-n"];
    assert_eq!(stdout(&ctl(&mock, &replace)), "/f: 2\n");
    assert!(
        mock.seen()
            .asked
            .last()
            .unwrap()
            .contains("replacement: b\"-b\", dry_run: true")
    );
    let told = lines(&ctl(&mock, &["--json", "replace", "sb_1", "a", "b", "/f", "/g"]));
    assert_eq!(told[0], json!({ "path": "/f", "replacements": 2 }));
    assert_eq!(
        (&told[1]["done"]["files"], &told[1]["done"]["dry_run"]),
        (&json!(1), &json!(false))
    );

    let watch = ["watch-files", "-r", "--exclude", "t", "sb_1", "/gone"];
    assert_eq!(
        stdout(&ctl(&mock, &watch)),
        "created a\\n\ndeleted \u{fffd}/\nrenamed a -> b\noverflow (kernel): changes were lost\n"
    );
    assert_eq!(
        lines(&ctl(&mock, &["--json", "watch-files", "sb_1", "/gone"])),
        [
            json!({ "ready": { "directories": 2 } }),
            json!({ "created": { "path": "a\n", "directory": false } }),
            json!({ "deleted": { "path_base64": "/w==", "directory": true } }),
            json!({ "renamed": { "from": "a", "to": "b", "directory": false } }),
            json!({ "overflow": { "reason": "kernel" } }),
        ]
    );
    let late = ctl(&mock, &["watch-files", "--timeout", "100ms", "sb_1", "/dir"]);
    assert_eq!(code(&late), 3);
}

#[test]
fn git_prints_as_git_does() {
    let mock = Mock::start();
    let output = ctl(
        &mock,
        &[
            "git",
            "sb_1",
            "clone",
            "https://x/y",
            "/work",
            "-b",
            "main",
            "--depth",
            "1",
        ],
    );
    assert_eq!(stdout(&output), "abc\n");
    assert_eq!(output.stderr, b"Counting: 1%\r\\u{1b}[2J\n");
    let git = |args: &[&str]| ctl(&mock, &[&["git", "sb_1", "-C", "/work"], args].concat());
    assert_eq!(stdout(&git(&["status"])), "## main\n M \u{fffd}\n");
    assert_eq!(stdout(&git(&["add", "a", "b"])), "");
    assert_eq!(
        stdout(&git(&["commit", "-m", "-x", "--author", "A B <a@b>", "-a"])),
        "def\n"
    );
    let asked = mock.seen().asked.pop().unwrap();
    assert!(
        asked.contains("message: b\"-x\", author_name: b\"A B\", author_email: b\"a@b\""),
        "{asked}"
    );
    assert_eq!(stdout(&git(&["branch"])), "* main abc [origin/main]\n");
    assert_eq!(stdout(&git(&["branch", "-d", "-f", "old"])), "");
    assert_eq!(stdout(&git(&["checkout", "-b", "new"])), "abc\n");
    assert_eq!(stdout(&git(&["checkout", "HEAD", "--", "f"])), "abc\n");
    assert_eq!(stdout(&git(&["push", "-u", "origin", "main"])), "abc\n");
    assert_eq!(stdout(&git(&["pull", "--ff-only"])), "abc\n");
    let json = one(&ctl(&mock, &["--json", "git", "sb_1", "status", "-C", "/work"]));
    assert_eq!(json["entries"][0]["path_base64"], "/w==");
    assert_eq!(
        one(&ctl(&mock, &["--json", "git", "sb_1", "pull", "-C", "/w"])),
        json!({ "head": "abc" })
    );
    assert_eq!(code(&ctl(&mock, &["git", "sb_1", "status"])), 2);
    assert_eq!(code(&git(&["commit", "-m", "x", "--author", "A"])), 2);
    mock.plan(
        "git_status",
        Plan::Fail(refusal(Reason::GitMissing, "guest", None)),
    );
    assert_eq!(code(&git(&["status"])), 1);
}

#[test]
fn forward_tells_where_it_listens_and_what_fails() {
    let mock = Mock::start();
    let mut child = start(&mock, &["--json", "forward", "sb_1", ":7", "0:9"]);
    let mut told = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || {
        let line: serde_json::Value = serde_json::from_str(&told.next().unwrap().unwrap()).unwrap();
        (line["local"].as_str().unwrap().to_owned(), line["guest"].clone())
    };
    let ((seven, guest), (nine, other)) = (next(), next());
    assert_eq!((guest, other), (json!(7), json!(9)));
    let mut socket = std::net::TcpStream::connect(seven).unwrap();
    socket.write_all(b"hello").unwrap();
    socket.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hellobye");
    let mut socket = std::net::TcpStream::connect(nine).unwrap();
    assert!(socket.read_to_end(&mut Vec::new()).is_err());
    let mut complaint = String::new();
    BufReader::new(child.stderr.take().unwrap())
        .read_line(&mut complaint)
        .unwrap();
    assert!(complaint.contains("port 9: PORT_REFUSED"), "{complaint}");
    child.kill().unwrap();
    child.wait().unwrap();
    for wrong in [
        &["forward", "sb_1"][..],
        &["forward", "sb_1", "0"],
        &["forward", "sb_1", "1:x"],
    ] {
        assert_eq!(code(&ctl(&mock, wrong)), 2, "{wrong:?}");
    }
    mock.plan(
        "agent.info",
        Plan::Fail(refusal(Reason::SandboxNotFound, "host", None)),
    );
    assert_eq!(code(&ctl(&mock, &["forward", "sb_x", ":7"])), 1);
    let text = ctl(&mock, &["forward", "--timeout", "100ms", "sb_1", ":7"]);
    assert!(text.stdout.starts_with(b"Forwarding from 127.0.0.1:"));
    assert_eq!(code(&text), 3);
}

#[test]
fn lsp_speaks_as_a_language_server_does() {
    let mock = Mock::start();
    let input = b"Content-Length: 2\r\n\r\n{}Content-Length: 4\r\n\r\nexit";
    let output = given(&mock, &["lsp", "sb_1", "rust", "--root", "/w"], input);
    assert_eq!(stdout(&output), "Content-Length: 2\r\n\r\n{}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("language server 5"));
    // The editor goes away.
    assert_eq!(code(&given(&mock, &["lsp", "sb_1", "--server", "5"], b"")), 0);
    assert_eq!(code(&given(&mock, &["lsp", "sb_1", "unknown"], b"")), 1);
    assert_eq!(code(&given(&mock, &["lsp", "sb_1", "rust"], b"nonsense\n\n")), 1);
    assert_eq!(code(&ctl(&mock, &["lsp", "sb_1"])), 2);
}
