//! Files as somebody else.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};

use sandbox_protocol::v1::{
    AgentListRequest, AgentMkdirRequest, AgentReadRequest, AgentRemoveRequest, WriteStart,
};

use crate::{
    common::within,
    kit::{Kit, bytes, read, start, user, why},
};

#[tokio::test]
async fn file_owner_follows_user() {
    let mut kit = Kit::new().await;
    let root = kit.dir.path().to_owned();
    let set = |name: &str, mode| {
        std::fs::set_permissions(root.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set("", 0o755);
    std::fs::create_dir(kit.path("theirs")).unwrap();
    set("theirs", 0o755);
    std::fs::create_dir(kit.path("ours")).unwrap();
    chown(kit.path("ours"), Some(12_345), Some(54_321)).unwrap();
    std::fs::write(kit.path("theirs/secret"), "x").unwrap();
    set("theirs/secret", 0o600);
    let as_user = || user("12345:54321");

    let mine = WriteStart {
        resolve: as_user(),
        parents: true,
        ..start(&kit.path("ours/a/b"))
    };
    kit.write(mine, b"mine").await.unwrap();
    for name in ["ours/a", "ours/a/b"] {
        let meta = std::fs::metadata(kit.path(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (12_345, 54_321), "{name}");
    }
    let made = AgentMkdirRequest {
        path: bytes(&kit.path("ours/d")),
        resolve: as_user(),
        mode: Some(0o700),
        ..AgentMkdirRequest::default()
    };
    within(kit.host.agent.mkdir(made)).await.unwrap();
    assert_eq!(std::fs::metadata(kit.path("ours/d")).unwrap().uid(), 12_345);

    let denied = AgentReadRequest {
        resolve: as_user(),
        ..read(&kit.path("theirs/secret"))
    };
    assert_eq!(why(kit.read(denied).await), "PATH_DENIED");
    for path in ["theirs/new", "theirs/secret"] {
        let denied = WriteStart {
            resolve: as_user(),
            ..start(&kit.path(path))
        };
        assert_eq!(why(kit.write(denied, b"x").await), "PATH_DENIED", "{path}");
    }
    let denied = AgentRemoveRequest {
        path: bytes(&kit.path("theirs/secret")),
        resolve: as_user(),
        ..AgentRemoveRequest::default()
    };
    assert_eq!(why(within(kit.host.agent.remove(denied)).await), "PATH_DENIED");
    set("theirs", 0o700);
    let denied = AgentListRequest {
        path: bytes(&kit.path("theirs")),
        resolve: as_user(),
        ..AgentListRequest::default()
    };
    assert_eq!(why(within(kit.host.agent.list(denied)).await), "PATH_DENIED");
    let unknown = AgentReadRequest {
        resolve: user("no-such-user"),
        ..read(&kit.path("theirs/secret"))
    };
    assert_eq!(why(kit.read(unknown).await), "USER_NOT_FOUND");
    // Whoever comes next on the same thread is nobody but itself.
    for _ in 0..16 {
        let whole = kit.read(read(&kit.path("theirs/secret"))).await.unwrap();
        assert_eq!(whole.data, b"x");
    }
}

#[tokio::test]
async fn who_may_write_to_anothers_file_gains_nothing_by_it() {
    let mut kit = Kit::new().await;
    let root = kit.dir.path().to_owned();
    let open = |name: &str, mode| {
        std::fs::set_permissions(root.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open("", 0o777);
    std::fs::write(kit.path("f"), "old").unwrap();
    open("f", 0o4777);
    let written = WriteStart {
        resolve: user("12345"),
        ..start(&kit.path("f"))
    };
    kit.write(written.clone(), b"new").await.unwrap();
    let meta = std::fs::metadata(kit.path("f")).unwrap();
    assert_eq!(
        (meta.uid(), meta.mode() & 0o7777),
        (0, 0o777),
        "its owner keeps it, without set-id bits"
    );
    let moded = WriteStart {
        mode: Some(0o4755),
        ..written
    };
    assert_eq!(why(kit.write(moded, b"evil").await), "PATH_DENIED");
    assert_eq!(std::fs::read(kit.path("f")).unwrap(), b"new");
    assert_eq!(kit.names(), ["f"]);
}
