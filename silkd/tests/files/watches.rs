//! Watch.

use std::{collections::BTreeSet, path::Path, process::Command};

use sandbox_protocol::v1::{AgentWatchRequest, WatchKind, WatchOut, watch_out};
use tonic::{Status, Streaming};

use crate::{
    common::{Guest, reason, within},
    kit::{Kit, bytes, user, why},
};

fn watch(path: &Path) -> AgentWatchRequest {
    AgentWatchRequest {
        path: bytes(path),
        recursive: true,
        ..AgentWatchRequest::default()
    }
}

/// What a watch has told, in short: `+` created, `~` modified, `-` deleted, `=` attributes, `a>b` renamed.
struct Seen(Streaming<WatchOut>);

impl Kit {
    async fn watch(&mut self, request: AgentWatchRequest) -> Result<Seen, Status> {
        let stream = within(self.host.agent.watch(request)).await?;
        Ok(Seen(stream.into_inner()))
    }
}

impl Seen {
    async fn next(&mut self) -> Option<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let message = within(self.0.message()).await.unwrap()?;
        Some(match message.m.unwrap() {
            watch_out::M::Ready(ready) => format!("ready {}", ready.directories),
            watch_out::M::Event(event) => {
                let sign = match event.kind() {
                    WatchKind::Created => '+',
                    WatchKind::Modified => '~',
                    WatchKind::Deleted => '-',
                    WatchKind::Attrib => '=',
                    WatchKind::Unspecified => '?',
                };
                format!("{sign}{}", text(&event.path))
            }
            watch_out::M::Renamed(renamed) => format!("{}>{}", text(&renamed.from), text(&renamed.to)),
            watch_out::M::Overflow(overflow) => format!("overflow {}", overflow.reason),
        })
    }

    /// Reads until this was told; gives all that came before it.
    async fn until(&mut self, last: &str) -> Vec<String> {
        let mut before = Vec::new();
        loop {
            let said = self
                .next()
                .await
                .unwrap_or_else(|| panic!("no `{last}` behind {before:?}"));
            if said == last {
                return before;
            }
            before.push(said);
        }
    }
}

#[tokio::test]
async fn watch_ready_then_first_event() {
    let mut kit = Kit::new().await;
    std::fs::create_dir(kit.path("d")).unwrap();
    for round in 0..20 {
        let mut seen = kit.watch(watch(kit.dir.path())).await.unwrap();
        assert_eq!(seen.next().await.unwrap(), "ready 2");
        // Once it says so, nothing is missed.
        std::fs::create_dir(kit.path(&format!("d/{round}"))).unwrap();
        std::fs::remove_dir(kit.path(&format!("d/{round}"))).unwrap();
        assert_eq!(seen.next().await.unwrap(), format!("+d/{round}"));
        assert_eq!(seen.until(&format!("-d/{round}")).await, [""; 0]);
    }
    assert_eq!(
        why(kit.watch(watch(&kit.path("none"))).await.map(drop)),
        "PATH_NOT_FOUND"
    );
}

#[tokio::test]
async fn every_change_has_its_event() {
    let mut kit = Kit::new().await;
    std::fs::create_dir_all(kit.path("t/left/out")).unwrap();
    std::fs::create_dir_all(kit.path("t/d/e")).unwrap();
    let request = AgentWatchRequest {
        exclude: vec!["left".into(), "**/*.o".into()],
        ..watch(&kit.path("t"))
    };
    let mut seen = kit.watch(request).await.unwrap();
    assert_eq!(seen.next().await.unwrap(), "ready 3");
    std::fs::write(kit.path("t/left/x"), "x").unwrap();
    std::fs::write(kit.path("t/x.o"), "x").unwrap();
    std::fs::write(kit.path("t/a"), "x").unwrap();
    assert_eq!(seen.next().await.unwrap(), "+a");
    assert_eq!(seen.next().await.unwrap(), "~a");
    let mut modes = std::fs::metadata(kit.path("t/a")).unwrap().permissions();
    modes.set_readonly(true);
    std::fs::set_permissions(kit.path("t/a"), modes).unwrap();
    assert_eq!(seen.next().await.unwrap(), "=a");
    // Within the tree, out of it, into it.
    std::fs::rename(kit.path("t/a"), kit.path("t/d/b")).unwrap();
    assert_eq!(seen.next().await.unwrap(), "a>d/b");
    std::fs::rename(kit.path("t/d/b"), kit.path("b")).unwrap();
    assert_eq!(seen.next().await.unwrap(), "-d/b");
    std::fs::rename(kit.path("b"), kit.path("t/b")).unwrap();
    assert_eq!(seen.next().await.unwrap(), "+b");
    // A directory that has another name tells under that.
    std::fs::rename(kit.path("t/d"), kit.path("t/n")).unwrap();
    assert_eq!(seen.next().await.unwrap(), "d>n");
    std::fs::write(kit.path("t/n/e/f"), "").unwrap();
    assert_eq!(seen.next().await.unwrap(), "+n/e/f");
    // And one that has left tells no more, but again once it is back.
    std::fs::rename(kit.path("t/n"), kit.path("n")).unwrap();
    assert_eq!(seen.next().await.unwrap(), "-n");
    std::fs::write(kit.path("n/e/g"), "").unwrap();
    std::fs::rename(kit.path("n"), kit.path("t/n")).unwrap();
    let back: BTreeSet<String> = seen.until("+n/e/g").await.into_iter().collect();
    assert!(back.contains("+n") && back.contains("+n/e"), "{back:?}");
    std::fs::write(kit.path("t/n/e/h"), "").unwrap();
    seen.until("+n/e/h").await;
}

#[tokio::test]
async fn deep_mkdir_with_files_all_seen() {
    let mut kit = Kit::new().await;
    let mut seen = kit.watch(watch(kit.dir.path())).await.unwrap();
    assert_eq!(seen.next().await.unwrap(), "ready 1");
    let mut expected = BTreeSet::new();
    let mut path = String::new();
    for level in 0..100 {
        path = format!("{path}{}{level}", if path.is_empty() { "" } else { "/" });
        std::fs::create_dir(kit.path(&path)).unwrap();
        expected.insert(format!("+{path}"));
        for file in ["a", "b"] {
            std::fs::write(kit.path(&format!("{path}/{file}")), "").unwrap();
            expected.insert(format!("+{path}/{file}"));
        }
    }
    let mut told = BTreeSet::new();
    while !expected.is_subset(&told) {
        let said = seen.next().await.unwrap();
        assert!(
            !said.starts_with("overflow"),
            "{} of {}",
            told.len(),
            expected.len()
        );
        told.insert(said);
    }
}

#[tokio::test]
async fn flood_of_50000_overflows_aloud() {
    let mut kit = Kit::new().await;
    let mut seen = kit.watch(watch(kit.dir.path())).await.unwrap();
    assert_eq!(seen.next().await.unwrap(), "ready 1");
    let before = kit.peak();
    // Nobody reads meanwhile.
    for n in 0..50_000 {
        let path = kit.path(&format!("f{}", n % 100));
        std::fs::write(&path, "x").unwrap();
        std::fs::remove_file(&path).unwrap();
    }
    let mut told = Vec::new();
    let overflow = loop {
        let said = seen.next().await.unwrap();
        if said.starts_with("overflow") {
            break said;
        }
        told.push(said);
    };
    assert!(
        ["overflow client", "overflow kernel"].contains(&overflow.as_str()),
        "{overflow}"
    );
    assert!(told.len() < 50_000, "nothing was lost: {}", told.len());
    // More may be lost before the first is told; in the end it is ready and tells what happens.
    seen.until("ready 1").await;
    std::fs::create_dir(kit.path("d")).unwrap();
    seen.until("+d").await;
    std::fs::write(kit.path("d/f"), "").unwrap();
    seen.until("+d/f").await;
    let grown = kit.peak() - before;
    assert!(grown < 8192, "{grown} KiB more");
}

#[tokio::test]
async fn the_end_of_the_root_is_the_end() {
    let mut kit = Kit::new().await;
    for how in ["removed", "moved", "file"] {
        let path = kit.path("root");
        if how == "file" {
            std::fs::write(&path, "x").unwrap();
        } else {
            std::fs::create_dir(&path).unwrap();
        }
        let mut seen = kit.watch(watch(&path)).await.unwrap();
        assert_eq!(seen.next().await.unwrap(), "ready 1", "{how}");
        match how {
            "removed" => std::fs::remove_dir(&path).unwrap(),
            "moved" => std::fs::rename(&path, kit.path("elsewhere")).unwrap(),
            _ => {
                std::fs::write(&path, "more").unwrap();
                seen.until("~").await;
                std::fs::remove_file(&path).unwrap();
            }
        }
        seen.until("-").await;
        assert_eq!(seen.next().await, None, "{how}");
    }
}

#[tokio::test]
async fn watch_limit_is_typed() {
    // A user namespace has its own count, below that of the machine.
    let mut command = Command::new("unshare");
    let script = "echo 10 > /proc/sys/user/max_inotify_watches && exec \"$0\" \"$@\"";
    command.args([
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        script,
        env!("CARGO_BIN_EXE_silkd"),
    ]);
    let guest = Guest::start_by(command, tempfile::tempdir().unwrap());
    let mut kit = Kit::of(guest, tempfile::tempdir().unwrap()).await;
    for n in 0..9 {
        std::fs::create_dir(kit.path(&n.to_string())).unwrap();
    }
    let mut seen = kit.watch(watch(kit.dir.path())).await.unwrap();
    assert_eq!(seen.next().await.unwrap(), "ready 10");
    let status = kit.watch(watch(kit.dir.path())).await.map(drop).unwrap_err();
    assert_eq!(reason(&status), "WATCH_LIMIT");
    assert!(
        status.message().contains("this one has 0"),
        "{}",
        status.message()
    );
    // One more directory than there are watches ends the one that runs, by name.
    std::fs::create_dir(kit.path("9")).unwrap();
    assert_eq!(seen.next().await.unwrap(), "+9");
    let status = within(seen.0.message()).await.unwrap_err();
    assert_eq!(reason(&status), "WATCH_LIMIT");
    assert!(
        status.message().contains("this one has 10"),
        "{}",
        status.message()
    );
    // What it had is free again.
    std::fs::remove_dir(kit.path("9")).unwrap();
    let mut seen = kit.watch(watch(kit.dir.path())).await.unwrap();
    assert_eq!(seen.next().await.unwrap(), "ready 10");
}

#[tokio::test]
async fn a_watch_sees_what_its_user_may() {
    use std::os::unix::fs::PermissionsExt as _;
    let mut kit = Kit::new().await;
    for (name, mode) in [("", 0o755), ("open", 0o755), ("shut", 0o700)] {
        std::fs::create_dir_all(kit.path(name)).unwrap();
        std::fs::set_permissions(kit.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let request = AgentWatchRequest {
        resolve: user("12345"),
        ..watch(kit.dir.path())
    };
    let mut seen = kit.watch(request).await.unwrap();
    assert_eq!(seen.next().await.unwrap(), "ready 2");
    std::fs::write(kit.path("shut/f"), "").unwrap();
    std::fs::write(kit.path("open/f"), "").unwrap();
    assert_eq!(seen.next().await.unwrap(), "+open/f");
    let denied = AgentWatchRequest {
        resolve: user("12345"),
        ..watch(&kit.path("shut"))
    };
    assert_eq!(why(kit.watch(denied).await.map(drop)), "PATH_DENIED");
}
