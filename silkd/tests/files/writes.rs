//! Write and Read: whole or not at all, at every size.

use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};

use bytes::Bytes;
use rustix::fs::inotify;
use sandbox_protocol::v1::{AgentReadRequest, WriteIf, WriteIn, WriteStart, write_in};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    common::{reason, within},
    kit::{Kit, noise, read, refused, start, why},
};

#[tokio::test]
async fn sizes_round_trip() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    let kib = 1024;
    for size in [
        0,
        1,
        4095,
        4096,
        18 * kib,
        64 * kib - 1,
        64 * kib,
        64 * kib + 1,
        1024 * kib,
        100 * 1024 * kib / 16,
    ] {
        let data = noise(size);
        let announced = WriteStart {
            size: Some(size as u64),
            ..start(&path)
        };
        let reply = kit.write(announced, &data).await.unwrap();
        assert_eq!(reply.bytes, size as u64);
        assert_eq!(reply.stat.unwrap().size, size as u64);
        assert_eq!(std::fs::read(&path).unwrap(), data, "written {size}");
        let whole = kit.read(read(&path)).await.unwrap();
        assert_eq!(whole.head.unwrap().size, size as u64);
        assert!(whole.data == data, "read {size}");
        let end = whole.end.unwrap();
        assert_eq!((end.bytes, end.changed), (size as u64, false));
    }
    assert_eq!(kit.names(), ["f"]);
}

#[tokio::test]
async fn parts_are_read_by_offset_and_length() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    let data = noise(200_000);
    std::fs::write(&path, &data).unwrap();
    for (offset, length, expected) in [
        (0, Some(0), 0..0),
        (5, Some(7), 5..12),
        (65_535, Some(65_537), 65_535..131_072),
        (199_999, None, 199_999..200_000),
        (199_999, Some(u64::MAX), 199_999..200_000),
        (200_000, None, 0..0),
        (1 << 60, Some(1), 0..0),
    ] {
        let request = AgentReadRequest {
            offset,
            length,
            ..read(&path)
        };
        let whole = kit.read(request).await.unwrap();
        assert_eq!(whole.data, &data[expected], "{offset} {length:?}");
    }
    // Files of the kernel have no length, and are read to their end.
    let whole = kit.read(read("/proc/self/status".as_ref())).await.unwrap();
    assert_eq!(whole.head.unwrap().size, 0);
    assert!(whole.data.starts_with(b"Name:\tsilkd"));
}

#[tokio::test]
async fn a_file_that_changes_while_it_is_read_is_told() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    std::fs::write(&path, noise(8 << 20)).unwrap();
    let mut stream = within(kit.host.agent.read(read(&path)))
        .await
        .unwrap()
        .into_inner();
    within(stream.message()).await.unwrap().unwrap();
    // It cannot have been read to its end: nobody has taken more than the windows hold.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"x", 8 << 20).unwrap();
    let mut last = None;
    while let Some(message) = within(stream.message()).await.unwrap() {
        last = message.m;
    }
    let Some(sandbox_protocol::v1::read_out::M::End(end)) = last else {
        panic!("no end: {last:?}");
    };
    assert!(end.changed);
}

#[tokio::test]
async fn cancelled_write_leaves_nothing() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    std::fs::write(&path, "old").unwrap();
    let events = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
    let both = inotify::WatchFlags::CREATE | inotify::WatchFlags::DELETE;
    inotify::add_watch(&events, kit.dir.path(), both).unwrap();
    let events = silkd::sys::watch(events, Interest::READABLE).unwrap();

    let put = kit.begin(start(&path)).await;
    assert!(put.send(Bytes::from(noise(100_000))).await);
    next(&events, inotify::ReadFlags::CREATE).await;
    put.cancel().await;
    next(&events, inotify::ReadFlags::DELETE).await;
    assert_eq!(kit.names(), ["f"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"old");

    // A stream that ends too early, or brings too much, or brings rubbish.
    for (size, data) in [(4, &b"abc"[..]), (2, b"abc"), (0, b"a")] {
        let announced = WriteStart {
            size: Some(size),
            ..start(&path)
        };
        assert_eq!(why(kit.write(announced, data).await), "SIZE_MISMATCH");
    }
    let put = kit.begin(start(&path)).await;
    assert!(put.send(vec![1; 256 * 1024 + 1].into()).await);
    assert_eq!(why(put.end().await), "FIELD_INVALID");
    let no_start = WriteIn {
        m: Some(write_in::M::Data("x".into())),
    };
    let outcome = within(kit.host.agent.write(tokio_stream::once(no_start))).await;
    assert_eq!(reason(&outcome.unwrap_err()), "FIELD_INVALID");
    // A refusal does not wait for the clearing up behind it.
    while kit.names() != ["f"] {
        next(&events, inotify::ReadFlags::DELETE).await;
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
}

/// Waits until the directory tells this of a file beside the target.
async fn next(events: &AsyncFd<std::os::fd::OwnedFd>, wanted: inotify::ReadFlags) {
    loop {
        let mut ready = within(events.readable()).await.unwrap();
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(events.get_ref(), &mut buffer);
        match reader.next() {
            Ok(event) if event.events().contains(wanted) => {
                let name = event.file_name().unwrap().to_str().unwrap();
                assert!(name.starts_with(".silkd-write-"), "{name}");
                return;
            }
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(errno) => panic!("{errno}"),
        }
    }
}

#[tokio::test]
async fn write_8_gib_sparse_flat() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    let size = (8_u64 << 30) / 16;
    // The way there and back once, so that what is made once is there.
    kit.write(start(&path), &noise(4 << 20)).await.unwrap();
    kit.read(read(&path)).await.unwrap();
    let before = kit.peak();

    let announced = WriteStart {
        size: Some(size),
        ..start(&path)
    };
    let put = kit.begin(announced).await;
    let zeros = Bytes::from(vec![0; 256 * 1024]);
    for _ in 0..size / (256 * 1024) - 1 {
        assert!(put.send(zeros.clone()).await);
    }
    assert!(put.send(noise(256 * 1024).into()).await);
    let stat = put.end().await.unwrap().stat.unwrap();
    assert_eq!(stat.size, size);
    assert!(stat.allocated < 1 << 20, "zeros take room: {}", stat.allocated);

    let mut stream = within(kit.host.agent.read(read(&path)))
        .await
        .unwrap()
        .into_inner();
    let (mut count, mut tail) = (0, Vec::new());
    while let Some(message) = within(stream.message()).await.unwrap() {
        if let Some(sandbox_protocol::v1::read_out::M::Data(data)) = message.m {
            count += data.len() as u64;
            tail = data.to_vec();
        }
    }
    assert_eq!(count, size);
    assert_eq!(tail, noise(256 * 1024)[192 * 1024..]);
    let grown = kit.peak() - before;
    assert!(grown < 4096, "{grown} KiB more for {size} bytes");
}

#[tokio::test]
async fn missing_parent_is_typed_or_made() {
    let mut kit = Kit::new().await;
    let path = kit.path("a/b/c");
    assert_eq!(why(kit.write(start(&path), b"x").await), "PATH_NOT_FOUND");
    assert!(kit.names().is_empty());
    let made = WriteStart {
        parents: true,
        ..start(&path)
    };
    kit.write(made.clone(), b"x").await.unwrap();
    kit.write(made, b"y").await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"y");
    let mode = std::fs::metadata(kit.path("a/b")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);
    // A file on the way is no directory.
    let through = WriteStart {
        parents: true,
        ..start(&kit.path("a/b/c/d/e"))
    };
    assert_eq!(why(kit.write(through, b"x").await), "NOT_A_DIRECTORY");
    let directory = WriteStart {
        parents: true,
        ..start(&kit.path("new/"))
    };
    assert_eq!(why(kit.write(directory, b"x").await), "NOT_REGULAR_FILE");
    assert_eq!(kit.names(), ["a"]);
}

#[tokio::test]
async fn durable_tells_the_truth() {
    // Of the two file systems that any machine has, one is memory.
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut kit = Kit::within_dir(shm).await;
    for append in [false, true] {
        let wanted = WriteStart {
            durable: true,
            append,
            ..start(&kit.path("f"))
        };
        assert!(!kit.write(wanted, b"x").await.unwrap().durable);
    }
    let mut kit = Kit::new().await;
    let disk = rustix::fs::statfs(kit.dir.path()).unwrap().f_type;
    let memory = [0x0102_1994, 0x794c_7630].contains(&disk);
    for append in [false, true] {
        let wanted = WriteStart {
            durable: true,
            append,
            ..start(&kit.path("f"))
        };
        assert_eq!(kit.write(wanted, b"x").await.unwrap().durable, !memory);
    }
    assert!(!kit.write(start(&kit.path("f")), b"x").await.unwrap().durable);
}

#[tokio::test]
async fn modes_and_owners_are_kept_or_given() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    kit.write(start(&path), b"x").await.unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&path), 0o644);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o751)).unwrap();
    std::os::unix::fs::chown(&path, Some(1234), Some(4321)).unwrap();
    kit.write(start(&path), b"y").await.unwrap();
    let meta = std::fs::metadata(&path).unwrap();
    assert_eq!((meta.uid(), meta.gid(), mode(&path)), (1234, 4321, 0o751));
    let given = WriteStart {
        mode: Some(0o600),
        ..start(&path)
    };
    kit.write(given, b"z").await.unwrap();
    assert_eq!(mode(&path), 0o600);
    let given = WriteStart {
        mode: Some(0o1_0000),
        ..start(&path)
    };
    assert_eq!(why(kit.write(given, b"z").await), "FIELD_INVALID");
}

#[tokio::test]
async fn a_write_goes_where_a_link_leads() {
    let mut kit = Kit::new().await;
    std::fs::create_dir(kit.path("real")).unwrap();
    std::fs::write(kit.path("real/f"), "old").unwrap();
    symlink("real/f", kit.path("one")).unwrap();
    symlink(kit.path("one"), kit.path("two")).unwrap();
    kit.write(start(&kit.path("two")), b"new").await.unwrap();
    assert_eq!(std::fs::read(kit.path("real/f")).unwrap(), b"new");
    assert!(kit.path("two").is_symlink() && kit.path("one").is_symlink());
    assert_eq!(crate::kit::names(&kit.path("real")), ["f"]);
    symlink("nowhere", kit.path("broken")).unwrap();
    assert_eq!(
        why(kit.write(start(&kit.path("broken")), b"x").await),
        "PATH_NOT_FOUND"
    );
    symlink("circle", kit.path("circle")).unwrap();
    assert_eq!(
        why(kit.write(start(&kit.path("circle")), b"x").await),
        "LINK_REFUSED"
    );
}

#[tokio::test]
async fn conditions_and_appends() {
    let mut kit = Kit::new().await;
    let path = kit.path("f");
    let absent = WriteStart {
        r#if: WriteIf::Absent.into(),
        ..start(&path)
    };
    let reply = kit.write(absent.clone(), b"one").await.unwrap();
    assert_eq!(why(kit.write(absent.clone(), b"two").await), "PATH_EXISTS");
    // Whoever came second by the time that all is there has lost as well.
    let late = WriteStart {
        r#if: WriteIf::Absent.into(),
        ..start(&kit.path("g"))
    };
    let put = kit.begin(late).await;
    assert!(put.send("mine".into()).await);
    std::fs::write(kit.path("g"), "theirs").unwrap();
    assert_eq!(why(put.end().await), "PATH_EXISTS");
    assert_eq!(std::fs::read(kit.path("g")).unwrap(), b"theirs");

    let same = |mtime_ns| WriteStart {
        r#if: WriteIf::SameMtime.into(),
        mtime_ns,
        ..start(&path)
    };
    let mtime = reply.stat.unwrap().mtime_ns;
    assert_eq!(why(kit.write(same(mtime + 1), b"two").await), "MTIME_CHANGED");
    let put = kit.begin(same(mtime)).await;
    assert!(put.send("two".into()).await);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(why(put.end().await), "MTIME_CHANGED");
    kit.write(same(0), b"two").await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"two");

    let more = WriteStart {
        append: true,
        ..start(&path)
    };
    kit.write(more, b" three").await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"two three");
    let fresh = WriteStart {
        append: true,
        ..start(&kit.path("h"))
    };
    kit.write(fresh, b"h").await.unwrap();
    assert_eq!(std::fs::read(kit.path("h")).unwrap(), b"h");
    assert_eq!(kit.names(), ["f", "g", "h"]);
}

#[tokio::test]
async fn a_full_disk_and_a_read_only_one_are_told_and_leave_the_old() {
    let mut kit = Kit::new().await;
    let mount = kit.path("small");
    std::fs::create_dir(&mount).unwrap();
    let _mounted = Mounted::tmpfs(&mount, c"size=256k");
    let path = mount.join("f");
    kit.write(start(&path), b"old").await.unwrap();
    let status = kit.write(start(&path), &noise(1 << 20)).await.unwrap_err();
    assert_eq!(reason(&status), "NO_SPACE");
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(crate::kit::names(&mount), ["f"]);
    use rustix::mount::{MountFlags, mount_remount};
    mount_remount(&mount, MountFlags::RDONLY, c"size=256k").unwrap();
    let outcome = refused(kit.write(start(&path), b"new").await);
    assert_eq!(outcome, ("PATH_DENIED".into(), tonic::Code::PermissionDenied));
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
}

/// A mount for the time of a test.
pub(crate) struct Mounted(std::path::PathBuf);

impl Mounted {
    pub(crate) fn tmpfs(at: &std::path::Path, options: &std::ffi::CStr) -> Self {
        use rustix::mount::{MountFlags, mount};
        mount("tmpfs", at, "tmpfs", MountFlags::empty(), Some(options)).unwrap();
        Self(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}
