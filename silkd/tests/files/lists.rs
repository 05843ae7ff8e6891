//! List, Remove, Rename, Mkdir, Stat.

use std::{
    collections::BTreeSet,
    os::unix::{ffi::OsStrExt as _, fs::symlink},
    path::Path,
};

use sandbox_protocol::v1::{
    AgentListReply, AgentListRequest, AgentMkdirRequest, AgentRemoveReply, AgentRemoveRequest,
    AgentRenameRequest, AgentStatRequest, FileKind, RenameReplace,
};
use tonic::Status;

use crate::{
    common::{reason, within},
    kit::{Kit, bytes, why},
    writes::Mounted,
};

fn list(path: &Path, depth: u32) -> AgentListRequest {
    AgentListRequest {
        path: bytes(path),
        depth,
        ..AgentListRequest::default()
    }
}

impl Kit {
    async fn list(&mut self, request: AgentListRequest) -> Result<Vec<AgentListReply>, Status> {
        let mut stream = within(self.host.agent.list(request)).await?.into_inner();
        let mut batches = Vec::new();
        while let Some(batch) = within(stream.message()).await? {
            batches.push(batch);
        }
        Ok(batches)
    }

    async fn remove(&mut self, path: &Path, recursive: bool) -> Result<AgentRemoveReply, Status> {
        let request = AgentRemoveRequest {
            path: bytes(path),
            recursive,
            ..AgentRemoveRequest::default()
        };
        let reply = within(self.host.agent.remove(request)).await;
        reply.map(tonic::Response::into_inner)
    }

    async fn rename(&mut self, from: &str, to: &str, replace: RenameReplace) -> Result<(), Status> {
        let request = AgentRenameRequest {
            from: bytes(&self.path(from)),
            to: bytes(&self.path(to)),
            replace: replace.into(),
            ..AgentRenameRequest::default()
        };
        within(self.host.agent.rename(request)).await.map(drop)
    }

    async fn mkdir(&mut self, path: &Path, parents: bool) -> Result<bool, Status> {
        let request = AgentMkdirRequest {
            path: bytes(path),
            parents,
            ..AgentMkdirRequest::default()
        };
        let reply = within(self.host.agent.mkdir(request)).await;
        reply.map(|reply| reply.into_inner().made)
    }
}

#[tokio::test]
async fn million_entry_list_streams() {
    let mut kit = Kit::new().await;
    let dir = kit.path("many");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("first"), "").unwrap();
    // The way there once, so that what is made once is there.
    kit.list(list(&dir, 1)).await.unwrap();
    let before = kit.peak();
    let count = 1_000_000 / 16;
    for n in 1..count {
        // Names of one file are cheap to make.
        std::fs::hard_link(dir.join("first"), dir.join(n.to_string())).unwrap();
    }
    let mut stream = within(kit.host.agent.list(list(&dir, 1)))
        .await
        .unwrap()
        .into_inner();
    let (mut batches, mut seen) = (0, BTreeSet::new());
    while let Some(batch) = within(stream.message()).await.unwrap() {
        assert!(batch.entries.len() <= 1024);
        batches += 1;
        seen.extend(batch.entries.into_iter().map(|entry| entry.name));
    }
    assert_eq!(seen.len(), count);
    assert!(batches >= count / 1024);
    let grown = kit.peak() - before;
    assert!(grown < 4096, "{grown} KiB more for {count} names");
    assert_eq!(kit.remove(&dir, true).await.unwrap().removed, count as u64 + 1);
    assert!(!dir.exists());
}

#[tokio::test]
async fn a_list_has_any_name_and_says_what_it_left_out() {
    let mut kit = Kit::new().await;
    let odd = std::ffi::OsStr::from_bytes(b"\xff\n");
    std::fs::create_dir_all(kit.dir.path().join(odd).join("sub/deep")).unwrap();
    symlink("there", kit.path("link")).unwrap();
    let entries = |batches: Vec<AgentListReply>| -> BTreeSet<Vec<u8>> {
        let all = batches.into_iter().flat_map(|batch| batch.entries);
        all.map(|entry| entry.name.to_vec()).collect()
    };
    let one = kit.list(list(kit.dir.path(), 1)).await.unwrap();
    let link = one[0]
        .entries
        .iter()
        .find(|entry| &*entry.name == b"link")
        .unwrap();
    let stat = link.stat.as_ref().unwrap();
    assert_eq!((stat.kind(), &*stat.target), (FileKind::Link, &b"there"[..]));
    let names = |names: &[&[u8]]| names.iter().map(|name| name.to_vec()).collect::<BTreeSet<_>>();
    assert_eq!(entries(one), names(&[b"\xff\n", b"link"]));
    let two = kit.list(list(kit.dir.path(), 2)).await.unwrap();
    assert_eq!(entries(two), names(&[b"\xff\n", b"\xff\n/sub", b"link"]));
    let most = AgentListRequest {
        max_entries: 2,
        ..list(kit.dir.path(), 9)
    };
    let cut = kit.list(most).await.unwrap();
    assert!(cut.last().unwrap().truncated);
    assert_eq!(entries(cut).len(), 2);
    let all = AgentListRequest {
        max_entries: 4,
        ..list(kit.dir.path(), 9)
    };
    assert!(!kit.list(all).await.unwrap().last().unwrap().truncated);
    assert_eq!(why(kit.list(list(kit.dir.path(), 65)).await), "FIELD_INVALID");
    assert_eq!(why(kit.list(list(&kit.path("none"), 1)).await), "PATH_NOT_FOUND");
    std::fs::write(kit.path("file"), "").unwrap();
    assert_eq!(why(kit.list(list(&kit.path("file"), 1)).await), "NOT_A_DIRECTORY");
}

#[tokio::test]
async fn a_removal_stays_on_its_side_of_links_and_mounts() {
    let mut kit = Kit::new().await;
    for dir in ["outside", "tree/a/b", "tree/mount"] {
        std::fs::create_dir_all(kit.path(dir)).unwrap();
    }
    std::fs::write(kit.path("outside/kept"), "").unwrap();
    std::fs::write(kit.path("tree/a/f"), "").unwrap();
    symlink(kit.path("outside"), kit.path("tree/a/link")).unwrap();
    assert_eq!(
        why(kit.remove(&kit.path("tree"), false).await),
        "DIRECTORY_NOT_EMPTY"
    );
    let mounted = Mounted::tmpfs(&kit.path("tree/mount"), c"size=64k");
    std::fs::write(kit.path("tree/mount/kept"), "").unwrap();
    let status = kit.remove(&kit.path("tree"), true).await.unwrap_err();
    assert_eq!(reason(&status), "CROSS_DEVICE");
    assert!(kit.path("tree/mount/kept").exists());
    drop(mounted);
    kit.remove(&kit.path("tree"), true).await.unwrap();
    assert!(!kit.path("tree").exists() && kit.path("outside/kept").exists());
    symlink("outside", kit.path("link")).unwrap();
    assert_eq!(kit.remove(&kit.path("link"), true).await.unwrap().removed, 1);
    assert_eq!(kit.names(), ["outside"]);

    assert_eq!(why(kit.remove(&kit.path("gone"), true).await), "PATH_NOT_FOUND");
    let request = AgentRemoveRequest {
        path: bytes(&kit.path("gone")),
        missing_ok: true,
        ..AgentRemoveRequest::default()
    };
    assert_eq!(
        kit.host.agent.remove(request).await.unwrap().into_inner().removed,
        0
    );
    for bad in ["/", "/tmp/..", "/tmp/."] {
        assert_eq!(why(kit.remove(bad.as_ref(), true).await), "INVALID_PATH", "{bad}");
    }
}

#[tokio::test]
async fn a_deep_tree_is_removed() {
    let mut kit = Kit::new().await;
    let deep: std::path::PathBuf = std::iter::repeat_n("d", 500).collect();
    std::fs::create_dir_all(kit.dir.path().join(&deep)).unwrap();
    assert_eq!(kit.remove(&kit.path("d"), true).await.unwrap().removed, 500);
    assert!(kit.names().is_empty());
}

#[tokio::test]
async fn names_are_changed_as_asked_or_not_at_all() {
    let mut kit = Kit::new().await;
    std::fs::write(kit.path("a"), "a").unwrap();
    std::fs::write(kit.path("b"), "b").unwrap();
    assert_eq!(why(kit.rename("a", "b", RenameReplace::No).await), "PATH_EXISTS");
    kit.rename("a", "b", RenameReplace::Exchange).await.unwrap();
    assert_eq!(std::fs::read(kit.path("a")).unwrap(), b"b");
    kit.rename("a", "b", RenameReplace::Yes).await.unwrap();
    assert_eq!(kit.names(), ["b"]);
    assert_eq!(
        why(kit.rename("a", "b", RenameReplace::Yes).await),
        "PATH_NOT_FOUND"
    );
    assert_eq!(
        why(kit.rename("b", "c", RenameReplace::Exchange).await),
        "PATH_NOT_FOUND"
    );
    std::fs::create_dir_all(kit.path("d/e")).unwrap();
    std::fs::create_dir_all(kit.path("f")).unwrap();
    assert_eq!(
        why(kit.rename("f", "d", RenameReplace::Yes).await),
        "DIRECTORY_NOT_EMPTY"
    );
    assert_eq!(
        why(kit.rename("b", "d", RenameReplace::Yes).await),
        "NOT_REGULAR_FILE"
    );
    assert_eq!(
        why(kit.rename("d", "b", RenameReplace::Yes).await),
        "NOT_A_DIRECTORY"
    );
    assert_eq!(
        why(kit.rename("d", "d/x", RenameReplace::Yes).await),
        "INVALID_PATH"
    );
    std::fs::create_dir(kit.path("mount")).unwrap();
    let _mounted = Mounted::tmpfs(&kit.path("mount"), c"size=64k");
    assert_eq!(
        why(kit.rename("b", "mount/b", RenameReplace::Yes).await),
        "CROSS_DEVICE"
    );
}

#[tokio::test]
async fn directories_are_made_and_looked_at() {
    let mut kit = Kit::new().await;
    assert!(kit.mkdir(&kit.path("a"), false).await.unwrap());
    assert_eq!(why(kit.mkdir(&kit.path("a"), false).await), "PATH_EXISTS");
    assert!(!kit.mkdir(&kit.path("a"), true).await.unwrap());
    assert_eq!(why(kit.mkdir(&kit.path("x/y/z"), false).await), "PATH_NOT_FOUND");
    assert!(kit.mkdir(&kit.path("x/y/z/"), true).await.unwrap());
    std::fs::write(kit.path("f"), "12345").unwrap();
    assert_eq!(why(kit.mkdir(&kit.path("f"), true).await), "PATH_EXISTS");
    let exact = AgentMkdirRequest {
        path: bytes(&kit.path("m")),
        mode: Some(0o1777),
        ..AgentMkdirRequest::default()
    };
    kit.host.agent.mkdir(exact).await.unwrap();
    symlink("f", kit.path("link")).unwrap();
    let stat = |name: &str, follow| AgentStatRequest {
        path: bytes(&kit.path(name)),
        follow,
        ..AgentStatRequest::default()
    };
    let requests = [stat("m", false), stat("link", false), stat("link", true)];
    let mut seen = Vec::new();
    for request in requests {
        let reply = within(kit.host.agent.stat(request)).await.unwrap().into_inner();
        seen.push(reply.stat.unwrap());
    }
    assert_eq!((seen[0].kind(), seen[0].mode), (FileKind::Directory, 0o1777));
    assert_eq!((seen[1].kind(), &*seen[1].target), (FileKind::Link, &b"f"[..]));
    assert_eq!((seen[2].kind(), seen[2].size), (FileKind::Regular, 5));
    assert!(seen[2].mtime_ns > 1_000_000_000 && seen[2].inode > 0 && seen[2].links == 1);
}
