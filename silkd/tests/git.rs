//! The guest's git, in test mode: every call against real repositories, and what goes wrong by name.
#![expect(clippy::disallowed_methods, reason = "tests own their files")]
#![expect(clippy::large_futures, reason = "a test holds few of them")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

// On threads of their own, so that a guest that ends is answered while the test waits for it.
mod common;

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use common::{Guest, Host, reason, within};
use sandbox_protocol::v1::{
    AgentGitAddRequest, AgentGitBranchReply, AgentGitBranchRequest, AgentGitCheckoutRequest,
    AgentGitCloneRequest, AgentGitCommitRequest, AgentGitPullRequest, AgentGitPushRequest,
    AgentGitStatusReply, AgentGitStatusRequest, EnvVar, GitBranchCreate, GitBranchDelete, GitBranchList,
    GitContext, GitOut, agent_git_branch_request::What, control_renew_request::Mode, git_out::M,
};
use tokio::{io::AsyncReadExt as _, net::TcpListener};
use tonic::{Code, Status, Streaming};

/// A guest whose gate is open, its host, and a folder for repositories, which is the user's home.
struct Place {
    home: tempfile::TempDir,
    host: Host,
    _guest: Guest,
}

async fn place() -> Place {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "git")).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let config =
        "[user]\n\tname = A\n\temail = a@example\n[init]\n\tdefaultBranch = main\n[color]\n\tui = always\n";
    std::fs::write(home.path().join(".gitconfig"), config).unwrap();
    Place {
        home,
        host,
        _guest: guest,
    }
}

impl Place {
    fn at(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn context(&self, path: &Path) -> Option<GitContext> {
        let var = |key: &'static str, value: &[u8]| EnvVar {
            key: key.into(),
            value: value.to_vec().into(),
        };
        let home = self.home.path().as_os_str().as_bytes();
        Some(GitContext {
            path: path.as_os_str().as_bytes().to_vec().into(),
            env: vec![var("HOME", home), var("GIT_CONFIG_NOSYSTEM", b"1")],
            ..GitContext::default()
        })
    }

    /// Runs git as an Exec does, for what no call makes.
    async fn git(&mut self, args: &[&str]) {
        let home = format!("HOME={}", self.home.path().display());
        let argv: Vec<&str> = ["env", home.as_str(), "git"]
            .iter()
            .chain(args)
            .copied()
            .collect();
        assert_eq!(self.host.exec(&argv).await.unwrap().code().await, 0, "{args:?}");
    }

    /// A bare repository with one commit on `main`, and a work tree cloned from it.
    async fn cloned(&mut self, name: &str) -> PathBuf {
        let origin = self.at("origin");
        if !origin.exists() {
            let seed = self.at("seed");
            self.git(&["init", "--quiet", seed.to_str().unwrap()]).await;
            std::fs::write(seed.join("first"), "1\n").unwrap();
            self.add_all(&seed).await.unwrap();
            self.commit(&seed, "first").await.unwrap();
            let (from, to) = (seed.to_str().unwrap(), origin.to_str().unwrap());
            self.git(&["clone", "--quiet", "--bare", from, to]).await;
        }
        let tree = self.at(name);
        let (said, head) = done(self.clone_to(&tree, &origin).await.unwrap()).await.unwrap();
        assert!(!said.is_empty() && head.len() == 40, "{said} {head}");
        tree
    }

    async fn clone_to(&mut self, tree: &Path, from: &Path) -> Result<Streaming<GitOut>, Status> {
        let request = AgentGitCloneRequest {
            context: self.context(tree),
            url: from.as_os_str().as_bytes().to_vec().into(),
            ..AgentGitCloneRequest::default()
        };
        Ok(within(self.host.agent.git_clone(request)).await?.into_inner())
    }

    async fn status(&mut self, tree: &Path) -> Result<AgentGitStatusReply, Status> {
        let request = AgentGitStatusRequest {
            context: self.context(tree),
            ignored: true,
        };
        Ok(within(self.host.agent.git_status(request)).await?.into_inner())
    }

    async fn add_all(&mut self, tree: &Path) -> Result<(), Status> {
        let request = AgentGitAddRequest {
            context: self.context(tree),
            all: true,
            ..AgentGitAddRequest::default()
        };
        within(self.host.agent.git_add(request)).await.map(drop)
    }

    async fn commit(&mut self, tree: &Path, message: &str) -> Result<String, Status> {
        let request = AgentGitCommitRequest {
            context: self.context(tree),
            message: message.to_owned().into(),
            ..AgentGitCommitRequest::default()
        };
        Ok(within(self.host.agent.git_commit(request))
            .await?
            .into_inner()
            .head)
    }

    async fn branch(&mut self, tree: &Path, what: What) -> Result<AgentGitBranchReply, Status> {
        let request = AgentGitBranchRequest {
            context: self.context(tree),
            what: Some(what),
        };
        Ok(within(self.host.agent.git_branch(request)).await?.into_inner())
    }

    async fn checkout(&mut self, tree: &Path, target: &str, create: bool) -> Result<String, Status> {
        let request = AgentGitCheckoutRequest {
            context: self.context(tree),
            target: target.to_owned().into(),
            create,
            ..AgentGitCheckoutRequest::default()
        };
        let reply = within(self.host.agent.git_checkout(request)).await?;
        Ok(reply.into_inner().head)
    }

    async fn restore(&mut self, tree: &Path, target: &str, path: &str) -> Result<String, Status> {
        let request = AgentGitCheckoutRequest {
            context: self.context(tree),
            target: target.to_owned().into(),
            paths: vec![path.to_owned().into()],
            ..AgentGitCheckoutRequest::default()
        };
        let reply = within(self.host.agent.git_checkout(request)).await?;
        Ok(reply.into_inner().head)
    }

    async fn pull(&mut self, tree: &Path, ff_only: bool) -> Result<(String, String), Status> {
        let request = AgentGitPullRequest {
            context: self.context(tree),
            ff_only,
            ..AgentGitPullRequest::default()
        };
        done(within(self.host.agent.git_pull(request)).await?.into_inner()).await
    }

    async fn push(&mut self, tree: &Path) -> Result<(String, String), Status> {
        let request = AgentGitPushRequest {
            context: self.context(tree),
            remote: "origin".into(),
            refspecs: vec!["HEAD".into()],
            set_upstream: true,
            ..AgentGitPushRequest::default()
        };
        done(within(self.host.agent.git_push(request)).await?.into_inner()).await
    }
}

/// What it said, and where HEAD is.
async fn done(mut stream: Streaming<GitOut>) -> Result<(String, String), Status> {
    let mut said = Vec::new();
    while let Some(out) = within(stream.message()).await? {
        match out.m.unwrap() {
            M::Progress(chunk) => said.extend_from_slice(&chunk.data),
            M::Done(done) => {
                assert!(within(stream.message()).await?.is_none());
                return Ok((String::from_utf8(said).unwrap(), done.head));
            }
        }
    }
    panic!("an end without done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn git_status_odd_names() {
    let mut place = place().await;
    let tree = place.cloned("tree").await;
    let names: [&[u8]; 4] = [b"new\nline", b"\xff\xfe", b" \"quoted\" -> x", b"-dash"];
    for name in names {
        std::fs::write(tree.join(OsStr::from_bytes(name)), "x").unwrap();
    }
    std::fs::write(tree.join(".gitignore"), "ignored\n").unwrap();
    std::fs::write(tree.join("ignored"), "x").unwrap();
    place.add_all(&tree).await.unwrap();
    place.commit(&tree, "odd").await.unwrap();
    // Renamed with a name that is no text, changed, untracked, ignored.
    std::fs::rename(
        tree.join(OsStr::from_bytes(b"\xff\xfe")),
        tree.join(OsStr::from_bytes(b"\xfd")),
    )
    .unwrap();
    std::fs::write(tree.join(OsStr::from_bytes(b"\xfe")), "new").unwrap();
    std::fs::write(tree.join("first"), "changed\n").unwrap();
    let added = AgentGitAddRequest {
        context: place.context(&tree),
        paths: vec![vec![0xff, 0xfe].into(), vec![0xfd].into()],
        all: false,
    };
    within(place.host.agent.git_add(added)).await.unwrap();
    let status = place.status(&tree).await.unwrap();
    let mut entries: Vec<_> = status
        .entries
        .iter()
        .map(|entry| {
            let letters = format!("{}{}", entry.index, entry.worktree);
            (entry.path.to_vec(), entry.from.to_vec(), letters)
        })
        .collect();
    entries.sort();
    let entry = |path: &[u8], from: &[u8], letters: &str| (path.to_vec(), from.to_vec(), letters.to_owned());
    assert_eq!(
        entries,
        [
            entry(b"first", b"", ".M"),
            entry(b"ignored", b"", "!!"),
            entry(b"\xfd", b"\xff\xfe", "R."),
            entry(b"\xfe", b"", "??"),
        ]
    );
    assert_eq!(
        (&status.branch[..], &status.upstream[..]),
        (&b"main"[..], &b"origin/main"[..])
    );
    assert_eq!((status.ahead, status.behind), (Some(1), Some(0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn git_missing_is_typed() {
    let mut place = place().await;
    let mut context = place.context(Path::new("/")).unwrap();
    context.env.push(EnvVar {
        key: "PATH".into(),
        value: "/nowhere".into(),
    });
    let request = AgentGitStatusRequest {
        context: Some(context),
        ignored: false,
    };
    let refused = within(place.host.agent.git_status(request)).await.unwrap_err();
    assert_eq!(
        (reason(&refused), refused.code()),
        ("GIT_MISSING".to_owned(), Code::FailedPrecondition)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn git_work_goes_from_one_clone_to_another() {
    let mut place = place().await;
    let (one, two) = (place.cloned("one").await, place.cloned("two").await);
    std::fs::write(one.join("more"), "more\n").unwrap();
    place.add_all(&one).await.unwrap();
    let head = place
        .commit(&one, "-m looks like an option\n\nand has a body")
        .await
        .unwrap();
    let (_said, pushed) = place.push(&one).await.unwrap();
    assert_eq!(pushed, head);
    let (said, pulled) = place.pull(&two, true).await.unwrap();
    assert_eq!(pulled, head, "{said}");
    assert_eq!(std::fs::read_to_string(two.join("more")).unwrap(), "more\n");

    // Both go on: what cannot be pushed or joined is refused with git's words, and a merge is one when asked for.
    for (tree, file) in [(&one, "x"), (&two, "y")] {
        std::fs::write(tree.join(file), "x").unwrap();
        place.add_all(tree).await.unwrap();
        place.commit(tree, file).await.unwrap();
    }
    place.push(&one).await.unwrap();
    let refused = place.push(&two).await.unwrap_err();
    assert_eq!(reason(&refused), "GIT_FAILED");
    assert!(refused.message().contains("rejected"), "{}", refused.message());
    assert_eq!(reason(&place.pull(&two, true).await.unwrap_err()), "GIT_FAILED");
    let (_said, merged) = place.pull(&two, false).await.unwrap();
    assert_eq!(place.push(&two).await.unwrap().1, merged);
    let status = place.status(&two).await.unwrap();
    assert_eq!(
        (status.head, status.ahead, status.behind),
        (merged, Some(0), Some(0))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn git_branches_are_made_listed_left_and_deleted() {
    let mut place = place().await;
    let tree = place.cloned("tree").await;
    let first = place.status(&tree).await.unwrap().head;
    let create = GitBranchCreate {
        name: "topic".into(),
        ..GitBranchCreate::default()
    };
    place.branch(&tree, What::Create(create)).await.unwrap();
    assert_eq!(place.checkout(&tree, "other", true).await.unwrap(), first);
    std::fs::write(tree.join("first"), "2\n").unwrap();
    // Changed files that git knows, by an author that no configuration names.
    let request = AgentGitCommitRequest {
        context: place.context(&tree),
        message: "second".into(),
        author_name: "B".into(),
        author_email: "b@example".into(),
        all: true,
        ..AgentGitCommitRequest::default()
    };
    let second = within(place.host.agent.git_commit(request))
        .await
        .unwrap()
        .into_inner()
        .head;
    assert_ne!(second, first);
    let list = |remotes| What::List(GitBranchList { remotes });
    let listed = place.branch(&tree, list(true)).await.unwrap();
    let seen: Vec<_> = listed
        .branches
        .iter()
        .map(|branch| {
            (
                &branch.name[..],
                &branch.head,
                branch.current,
                &branch.upstream[..],
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (&b"main"[..], &first, false, &b"origin/main"[..]),
            (b"other", &second, true, b""),
            (b"topic", &first, false, b""),
            (b"origin/main", &first, false, b""),
        ]
    );
    assert_eq!(place.branch(&tree, list(false)).await.unwrap().branches.len(), 3);
    assert_eq!(place.checkout(&tree, "main", false).await.unwrap(), first);
    assert_eq!(std::fs::read_to_string(tree.join("first")).unwrap(), "1\n");
    let head = place.restore(&tree, "other", "first").await.unwrap();
    assert_eq!(
        (head, std::fs::read_to_string(tree.join("first")).unwrap()),
        (first, "2\n".to_owned())
    );
    let delete = |force| {
        What::Delete(GitBranchDelete {
            name: "other".into(),
            force,
        })
    };
    // It is merged nowhere.
    assert_eq!(
        reason(&place.branch(&tree, delete(false)).await.unwrap_err()),
        "GIT_FAILED"
    );
    place.branch(&tree, delete(true)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn git_amends_without_a_word_and_by_another_author() {
    let mut place = place().await;
    let tree = place.cloned("tree").await;
    let second = place.status(&tree).await.unwrap().head;
    // Amended, without a word: the message stays, the author changes.
    let request = AgentGitCommitRequest {
        context: place.context(&tree),
        author_name: "C".into(),
        author_email: "c@example".into(),
        amend: true,
        ..AgentGitCommitRequest::default()
    };
    let third = within(place.host.agent.git_commit(request))
        .await
        .unwrap()
        .into_inner()
        .head;
    assert_ne!(third, second);
    let shown = [
        "git",
        "-C",
        tree.to_str().unwrap(),
        "log",
        "-1",
        "--format=%an <%ae> %s",
        "HEAD",
    ];
    let said = place.host.exec(&shown).await.unwrap().output().await;
    assert_eq!(said, ("C <c@example> first\n".to_owned(), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn git_says_what_went_wrong_with_its_own_end() {
    let mut place = place().await;
    let tree = place.cloned("tree").await;
    let refused = place.checkout(&tree, "no-such-branch", false).await.unwrap_err();
    assert_eq!(
        (reason(&refused), refused.code()),
        ("GIT_FAILED".to_owned(), Code::FailedPrecondition)
    );
    assert!(
        refused.message().contains("git exited with 128"),
        "{}",
        refused.message()
    );
    assert!(
        refused.message().contains("no-such-branch"),
        "{}",
        refused.message()
    );
    // What git says of this, it says on its stdout.
    let refused = place.commit(&tree, "nothing").await.unwrap_err();
    assert!(
        refused.message().contains("nothing to commit"),
        "{}",
        refused.message()
    );
    let refused = place.status(&place.at("nowhere")).await.unwrap_err();
    assert_eq!(reason(&refused), "CWD_NOT_FOUND");
    let refused = place
        .status(place.home.path().to_owned().as_path())
        .await
        .unwrap_err();
    assert!(
        refused.message().contains("not a git repository"),
        "{}",
        refused.message()
    );
    let missing = place.at("no-origin");
    let stream = place.clone_to(&place.at("new"), &missing).await.unwrap();
    assert_eq!(reason(&done(stream).await.unwrap_err()), "GIT_FAILED");
    // An empty work tree has no HEAD, and says so.
    let empty = place.at("empty");
    place.git(&["init", "--quiet", empty.to_str().unwrap()]).await;
    let status = place.status(&empty).await.unwrap();
    assert_eq!(
        (status.head.as_str(), &status.branch[..], status.ahead),
        ("", &b"main"[..], None)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_git_at_the_network_dies_with_its_client_and_at_its_time() {
    let mut place = place().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("git://{}/x", server.local_addr().unwrap());
    let mut context = place.context(&place.at("tree")).unwrap();
    let request = |context: &GitContext| AgentGitCloneRequest {
        context: Some(context.clone()),
        url: url.clone().into(),
        ..AgentGitCloneRequest::default()
    };
    let stream = within(place.host.agent.git_clone(request(&context)))
        .await
        .unwrap();
    let (mut connection, _from) = within(server.accept()).await.unwrap();
    drop(stream);
    // To its end: git is gone, though it waits for an answer and writes nothing.
    within(connection.read_to_end(&mut Vec::new())).await.unwrap();

    // On a busy machine a git can have its time before it has dialled: then the next one has more of it.
    let mut connection = None;
    for (name, time) in [("a", 200), ("b", 2_000), ("c", 20_000)] {
        // What one had made is left: it was ended, and not asked.
        context = place.context(&place.at(name)).unwrap();
        context.timeout_ms = time;
        let stream = within(place.host.agent.git_clone(request(&context)))
            .await
            .unwrap();
        let refused = done(stream.into_inner()).await.unwrap_err();
        assert_eq!(
            (reason(&refused), refused.code()),
            ("DEADLINE".to_owned(), Code::DeadlineExceeded)
        );
        // Whoever dialled did so before that answer, so that it waits in the queue.
        let dialled = tokio::time::timeout(Duration::from_millis(100), server.accept()).await;
        connection = dialled.ok().map(|accepted| accepted.unwrap().0);
        if connection.is_some() {
            break;
        }
    }
    let mut connection = connection.expect("no git has dialled");
    within(connection.read_to_end(&mut Vec::new())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_status_beyond_ten_thousand_says_that_it_was_cut() {
    let mut place = place().await;
    let tree = place.cloned("tree").await;
    // In the index alone, so that no disk has to make them: added, and missing in the work tree.
    let line = |n: u32| format!("100644 e69de29bb2d1d6434b8b29ae775ad8c2e48c5391\t{n}\n");
    std::fs::write(place.at("index"), (0..10_001).map(line).collect::<String>()).unwrap();
    let script = "git -C $0/tree update-index --index-info <$0/index";
    let home = place.home.path().to_str().unwrap().to_owned();
    let run = place.host.exec(&["sh", "-c", script, &home]).await.unwrap();
    assert_eq!(run.code().await, 0);
    let status = place.status(&tree).await.unwrap();
    assert_eq!((status.entries.len(), status.truncated), (10_000, true));
    place
        .git(&[
            "-C",
            tree.to_str().unwrap(),
            "update-index",
            "--force-remove",
            "0",
        ])
        .await;
    let status = place.status(&tree).await.unwrap();
    assert_eq!((status.entries.len(), status.truncated), (10_000, false));
}
