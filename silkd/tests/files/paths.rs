//! Where a path may lead, and what it may lead to.

use std::{
    os::unix::{fs::symlink, net::UnixListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use sandbox_protocol::v1::{
    AgentListRequest, AgentMkdirRequest, AgentReadRequest, AgentRemoveRequest, AgentStatRequest, FileKind,
    Resolve, WriteStart,
};

use crate::{
    common::within,
    kit::{Kit, beneath, bytes, read, start, why},
};

#[tokio::test]
async fn fifo_device_dir_return_at_once() {
    let mut kit = Kit::new().await;
    mknodat(CWD, kit.path("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    std::fs::create_dir(kit.path("dir")).unwrap();
    let _socket = UnixListener::bind(kit.path("socket")).unwrap();
    symlink("fifo", kit.path("link")).unwrap();
    let paths = ["fifo", "dir", "socket", "link"].map(|name| kit.path(name));
    for path in paths
        .iter()
        .map(std::path::PathBuf::as_path)
        .chain(["/dev/zero".as_ref()])
    {
        assert_eq!(why(kit.read(read(path)).await), "NOT_REGULAR_FILE", "{path:?}");
        for append in [false, true] {
            let wanted = WriteStart {
                append,
                ..start(path)
            };
            assert_eq!(why(kit.write(wanted, b"x").await), "NOT_REGULAR_FILE", "{path:?}");
        }
    }
    assert_eq!(kit.names(), ["dir", "fifo", "link", "socket"]);
    let request = AgentStatRequest {
        path: bytes(&kit.path("fifo")),
        ..AgentStatRequest::default()
    };
    let stat = within(kit.host.agent.stat(request))
        .await
        .unwrap()
        .into_inner()
        .stat;
    assert_eq!(stat.unwrap().kind(), FileKind::Fifo);
}

#[tokio::test]
async fn a_last_link_is_refused_where_links_are_not_followed() {
    let mut kit = Kit::new().await;
    std::fs::create_dir(kit.path("dir")).unwrap();
    std::fs::write(kit.path("dir/f"), "x").unwrap();
    symlink("dir/f", kit.path("file")).unwrap();
    symlink("dir", kit.path("way")).unwrap();
    let resolve = Some(Resolve {
        no_follow: true,
        ..Resolve::default()
    });
    let file = AgentReadRequest {
        resolve: resolve.clone(),
        ..read(&kit.path("file"))
    };
    assert_eq!(why(kit.read(file).await), "LINK_REFUSED");
    let through = AgentReadRequest {
        resolve: resolve.clone(),
        ..read(&kit.path("way/f"))
    };
    assert_eq!(kit.read(through).await.unwrap().data, b"x");
    let written = WriteStart {
        resolve: resolve.clone(),
        ..start(&kit.path("file"))
    };
    assert_eq!(why(kit.write(written, b"y").await), "LINK_REFUSED");
    let listed = AgentListRequest {
        path: bytes(&kit.path("way")),
        resolve: resolve.clone(),
        ..AgentListRequest::default()
    };
    assert_eq!(why(within(kit.host.agent.list(listed)).await), "LINK_REFUSED");
    let looked = AgentStatRequest {
        path: bytes(&kit.path("file")),
        resolve,
        follow: true,
    };
    assert_eq!(why(within(kit.host.agent.stat(looked)).await), "LINK_REFUSED");
    assert_eq!(std::fs::read(kit.path("dir/f")).unwrap(), b"x");
}

#[tokio::test]
async fn beneath_stops_links_and_races() {
    let mut kit = Kit::new().await;
    let root = kit.path("root");
    std::fs::create_dir_all(root.join("dir")).unwrap();
    std::fs::write(root.join("dir/f"), "inside").unwrap();
    std::fs::create_dir(kit.path("outside")).unwrap();
    std::fs::write(kit.path("outside/f"), "secret").unwrap();
    symlink("../outside", root.join("up")).unwrap();
    symlink(kit.path("outside"), root.join("absolute")).unwrap();
    symlink("/proc/self/root", root.join("magic")).unwrap();
    symlink("dir/f", root.join("fine")).unwrap();
    symlink("../../outside/f", root.join("dir/out")).unwrap();

    for name in [
        "up/f",
        "absolute/f",
        "../outside/f",
        "dir/../../outside/f",
        "magic/etc/passwd",
        "dir/out",
    ] {
        let path = root.join(name);
        let wanted = AgentReadRequest {
            resolve: beneath(&root),
            ..read(&path)
        };
        assert_eq!(why(kit.read(wanted).await), "PATH_ESCAPES", "read {name}");
        let wanted = WriteStart {
            resolve: beneath(&root),
            parents: true,
            ..start(&path)
        };
        assert_eq!(why(kit.write(wanted, b"x").await), "PATH_ESCAPES", "write {name}");
    }
    let made = AgentMkdirRequest {
        path: bytes(&root.join("up/new")),
        resolve: beneath(&root),
        parents: true,
        ..AgentMkdirRequest::default()
    };
    assert_eq!(why(within(kit.host.agent.mkdir(made)).await), "PATH_ESCAPES");
    let removed = AgentRemoveRequest {
        path: bytes(&root.join("up/f")),
        resolve: beneath(&root),
        ..AgentRemoveRequest::default()
    };
    assert_eq!(why(within(kit.host.agent.remove(removed)).await), "PATH_ESCAPES");
    // Magic links lead anywhere and are no way, even where they would stay inside.
    let magic = AgentReadRequest {
        resolve: beneath("/proc/self".as_ref()),
        ..read("/proc/self/root/etc/passwd".as_ref())
    };
    assert_eq!(why(kit.read(magic).await), "LINK_REFUSED");
    let fine = AgentReadRequest {
        resolve: beneath(&root),
        ..read(&root.join("fine"))
    };
    assert_eq!(kit.read(fine).await.unwrap().data, b"inside");
    let fine = WriteStart {
        resolve: beneath(&root),
        ..start(&root.join("fine"))
    };
    kit.write(fine, b"inside").await.unwrap();
    assert_eq!(std::fs::read(kit.path("outside/f")).unwrap(), b"secret");
    assert_eq!(crate::kit::names(&kit.path("outside")), ["f"]);

    race(&mut kit).await;
}

/// A directory and a link out of the root change places all the time.
async fn race(kit: &mut Kit) {
    let root = kit.path("root");
    let (dir, up) = (root.join("dir"), root.join("up"));
    let over = Arc::new(AtomicBool::new(false));
    let stop = over.clone();
    let swapper = std::thread::spawn(move || {
        let mut swaps = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            renameat_with(CWD, &dir, CWD, &up, RenameFlags::EXCHANGE).unwrap();
            swaps += 1;
        }
        swaps
    });
    let (mut inside, mut stopped) = (0, 0);
    for n in 0.. {
        let wanted = AgentReadRequest {
            resolve: beneath(&root),
            ..read(&root.join("dir/f"))
        };
        match kit.read(wanted).await {
            Ok(whole) => {
                assert!(whole.data.starts_with(b"inside"), "{:?}", whole.data);
                inside += 1;
            }
            Err(status) => {
                assert_eq!(crate::common::reason(&status), "PATH_ESCAPES");
                stopped += 1;
            }
        }
        let wanted = WriteStart {
            resolve: beneath(&root),
            ..start(&root.join("dir/f"))
        };
        if let Err(status) = kit.write(wanted, b"inside, written").await {
            assert_eq!(crate::common::reason(&status), "PATH_ESCAPES");
        }
        // Both outcomes have been seen often enough.
        if n > 200 && inside > 10 && stopped > 10 {
            break;
        }
    }
    over.store(true, Ordering::Relaxed);
    assert!(swapper.join().unwrap() > 100);
    assert_eq!(std::fs::read(kit.path("outside/f")).unwrap(), b"secret");
    assert_eq!(crate::kit::names(&kit.path("outside")), ["f"]);
}
