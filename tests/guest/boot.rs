//! What a boot leaves to programs.

use std::collections::BTreeMap;

use sandbox_sdk::How;

use crate::node::{Node, sh};

/// Looks for each in what `/proc/mounts` says.
fn has_all_mounts(text: &str) {
    let mut mounts: BTreeMap<&str, (&str, Vec<&str>)> = BTreeMap::new();
    for line in text.lines() {
        let [_, at, kind, options, ..] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("no mount: {line}");
        };
        // A later one hides an earlier.
        mounts.insert(at, (kind, options.split(',').collect()));
    }
    for (at, kind, options) in [
        ("/proc", "proc", &["rw", "nosuid", "nodev", "noexec"][..]),
        ("/sys", "sysfs", &["rw", "nosuid", "nodev", "noexec"]),
        ("/dev", "devtmpfs", &["rw"]),
        ("/dev/pts", "devpts", &["rw", "gid=5", "mode=620", "ptmxmode=666"]),
        ("/dev/shm", "tmpfs", &["rw", "nosuid", "nodev"]),
        ("/tmp", "tmpfs", &["rw", "nosuid", "nodev"]),
        ("/run", "tmpfs", &["rw", "nosuid", "nodev", "mode=755"]),
        ("/run/silkd", "tmpfs", &["rw", "mode=700", "size=2048k"]),
        ("/run/sandbox", "tmpfs", &["rw", "mode=755", "size=2048k"]),
        (
            "/sys/fs/cgroup",
            "cgroup2",
            &["rw", "nsdelegate", "memory_recursiveprot"],
        ),
    ] {
        let (found, has) = mounts.get(at).unwrap_or_else(|| panic!("no {at}: {text}"));
        assert_eq!(*found, kind, "{at}");
        for option in options {
            assert!(has.contains(option), "{at} without {option}: {has:?}");
        }
    }
}

#[tokio::test]
async fn boot_mounts_all_and_a_pty_opens() {
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    let text = sh(&sandbox, "cat /proc/mounts").await;
    has_all_mounts(&text);
    // Each is of use, to whom it is for.
    let modes = sh(&sandbox, "stat -c %a /tmp /dev/shm /run /run/silkd /run/sandbox").await;
    assert_eq!(modes, "1777\n1777\n755\n700\n755\n");
    let anybody = sandbox
        .exec([
            "sh",
            "-c",
            "echo a > /tmp/a && echo b > /dev/shm/b && cat /tmp/a /dev/shm/b",
        ])
        .user("user");
    let anybody = anybody.output().await.unwrap();
    assert_eq!(anybody.stdout_text(), "a\nb\n", "{}", anybody.stderr_text());
    let half = "awk '$1 == \"MemTotal:\" { ram = $2 } END { print ram }' /proc/meminfo; \
        df -k /tmp | awk 'END { print $2 }'";
    let half = sh(&sandbox, half).await;
    let [ram, tmp] = half
        .lines()
        .map(|n| n.parse::<u64>().unwrap())
        .collect::<Vec<_>>()[..]
    else {
        panic!("{half}");
    };
    assert!(tmp.abs_diff(ram / 2) <= 4, "half of RAM: {tmp} KiB of {ram}");
    let contained = sh(&sandbox, "cat /proc/self/cgroup").await;
    let leaf = contained.strip_prefix("0::/").unwrap_or_default();
    assert!(leaf.starts_with("work/l"), "{contained}");

    // A terminal, of our own instance of devpts, for root and for a user.
    for user in ["root", "user"] {
        let script = "tty; stty size; test -t 0 && test -c \"$(tty)\" && stat -c '%U %G %a' \"$(tty)\"; readlink /dev/ptmx";
        let shell = sandbox.exec(["sh", "-c", script]).user(user).tty(101, 37);
        let shell = shell.output().await.unwrap();
        assert_eq!(shell.status.how, How::Code(0), "{}", shell.stdout_text());
        let said = shell.stdout_text().replace("\r\n", "\n");
        let (name, rest) = said.split_once('\n').unwrap();
        assert!(
            name.strip_prefix("/dev/pts/")
                .is_some_and(|number| number.parse::<u32>().is_ok()),
            "{said}"
        );
        assert_eq!(rest, format!("37 101\n{user} tty 620\npts/ptmx\n"));
    }
}
