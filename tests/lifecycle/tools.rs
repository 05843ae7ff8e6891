//! The guest's git and language servers through the daemon, by the SDK and by `sandboxctl`.

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt as _, path::Path};

use harness::{Ctl, Daemon, HANG, Setup, refused, within};
use sandbox_sdk::{How, Reason, Sandbox};

async fn claimed(daemon: &Daemon) -> Sandbox {
    daemon.client().await.claim("default").await.unwrap()
}

fn ctl(daemon: &Daemon, sandbox: &Sandbox) -> Ctl {
    daemon.ctl().token(sandbox.token().unwrap().expose())
}

#[tokio::test]
async fn git_works_as_at_home() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let ctl = ctl(&daemon, &sandbox);
    let dir = tempfile::tempdir().unwrap();
    let origin = dir.path().join("origin");
    let path = origin.to_str().unwrap();
    let init = sandbox.exec(["git", "init", "-q", "-b", "main", path]).output();
    assert!(init.await.unwrap().status.success());
    let odd = OsStr::from_bytes(b"-n\n\xff");
    fs::write(origin.join(odd), "1").unwrap();
    let who = ["GIT_COMMITTER_NAME=A", "GIT_COMMITTER_EMAIL=a@example.com"];
    let git = async |args: &[&str]| {
        let start = ["git", sandbox.id(), "-C", path, "--env", who[0], "--env", who[1]];
        ctl.json([&start, args].concat()).await
    };
    let status = git(&["status"]).await;
    assert_eq!(
        (&status["branch"], &status["entries"][0]["worktree"]),
        (&"main".into(), &"?".into())
    );
    assert_eq!(status["entries"][0]["path_base64"], "LW4K/w==");
    git(&["add", "-A"]).await;
    let commit = git(&["commit", "-m", "-first\nline", "--author", "B <b@example.com>"]).await;
    let head = commit["head"].as_str().unwrap().to_owned();
    assert_eq!(head.len(), 40);
    git(&["branch", "topic"]).await;
    let branches = git(&["branch"]).await;
    assert_eq!(branches["branches"].as_array().unwrap().len(), 2);
    // A clone tells how it goes, and its end.
    let clone = dir.path().join("clone");
    let ran = ctl
        .run(["git", sandbox.id(), "clone", path, clone.to_str().unwrap()])
        .await;
    assert_eq!(
        (ran.code, ran.text().trim()),
        (0, head.as_str()),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("Cloning into"), "{}", ran.stderr);
    assert_eq!(fs::read(clone.join(odd)).unwrap(), b"1");
    let cloned = sandbox.git(&clone);
    assert_eq!(cloned.checkout("new").create().run().await.unwrap(), head);
    let status = cloned.status().await.unwrap();
    assert_eq!((&status.branch[..], status.entries.len()), (&b"new"[..], 0));
    cloned.push().remote("origin").refspec("new").run().await.unwrap();
    assert_eq!(git(&["branch"]).await["branches"].as_array().unwrap().len(), 3);
    refused(cloned.checkout("nowhere").run().await, Reason::GitFailed);
    refused(
        sandbox.git(dir.path().join("none")).status().await,
        Reason::CwdNotFound,
    );
}

/// The folder that stands for `/etc/silkd` of the only guest.
fn etc(daemon: &Daemon, sandbox_dirs: &Path) -> std::path::PathBuf {
    let slot = daemon.slot_dirs().pop().expect("a guest has a slot");
    sandbox_dirs.join("run").join(slot).join("agent.sock.d/etc/silkd")
}

#[tokio::test]
async fn a_language_server_of_the_image_speaks_through_the_daemon() {
    let daemon = Setup::stub()
        .config("pool.default.warm_max = 1")
        .warm(0)
        .start()
        .await;
    let sandbox = claimed(&daemon).await;
    let languages = etc(&daemon, &daemon.dir()).join("lsp.d");
    fs::create_dir_all(&languages).unwrap();
    fs::write(languages.join("echo"), "cat\n").unwrap();
    let mut stream = sandbox.lsp("echo").root("/").open().await.unwrap();
    for message in [b"{}".to_vec(), vec![b'x'; 1_000_000]] {
        stream.send(message.clone()).await.unwrap();
        let back = within(HANG, stream.next()).await.unwrap().unwrap();
        assert!(back == message);
    }
    let server = stream.server();
    refused(sandbox.lsp_server(server).open().await.map(drop), Reason::LspBusy);
    drop(stream);
    // It has outlived its client, whose leaving the guest may see a moment later.
    let again = harness::eventually("the server is free", || async {
        match sandbox.lsp_server(server).open().await {
            Ok(stream) => Some(stream),
            Err(error) => {
                assert!(error.is(Reason::LspBusy), "{error}");
                None
            }
        }
    })
    .await;
    assert_eq!((again.server(), again.resumed()), (server, false));
    drop(again);
    let exit = sandbox.lsp_stop(server).await.unwrap().unwrap();
    assert_eq!(exit.how, How::Signal(15));
    refused(sandbox.lsp("../echo").open().await.map(drop), Reason::LspUnknown);
    // And as an editor has it.
    let ctl = ctl(&daemon, &sandbox);
    let input = b"Content-Length: 2\r\n\r\n{}";
    let ran = within(HANG, ctl.run_with(["lsp", sandbox.id(), "echo"], input)).await;
    assert_eq!((ran.code, &ran.stdout[..]), (0, &input[..]), "{}", ran.stderr);
}
