use std::{os::unix::fs::PermissionsExt as _, path::Path};

use super::*;
use crate::{
    config::{Config, Host},
    net::Found,
    words::{Accel, EngineKind, MemBytes},
};

fn sound() -> Facts {
    Facts {
        engine: EngineKind::Qemu,
        given: Given {
            qemu: Some(Ok("7.2.0".to_owned())),
            accel: Some((Accel::Kvm, "a guest booted under it".to_owned())),
            images: vec![("busybox".to_owned(), Ok("sha256:00".to_owned()))],
        },
        kvm: Ok(()),
        memory: MemBytes::from_mib(16_000),
        budget: MemBytes::from_mib(12_000),
        memfd: Ok(()),
        cgroup: Cgroup::V2 {
            path: "/sys/fs/cgroup/x".into(),
            controllers: ["cpu", "memory", "pids"].map(str::to_owned).to_vec(),
            delegated: true,
        },
        state_dir: ("/s".into(), Folder::Writable { free: 1 << 40 }),
        run_dir: ("/r".into(), Folder::CanBeMade),
        socket_dir: ("/r".into(), Folder::CanBeMade),
        root: true,
        vm_user: Some(("vm".to_owned(), true)),
        operator_group: Some(("ops".to_owned(), true)),
        tls_faults: Vec::new(),
        fds: 1 << 20,
        max_sandboxes: 4_096,
        net: Some(Net {
            namespace: "sandboxd".parse().unwrap(),
            found: Ok(in_force()),
            tun: Ok(()),
        }),
    }
}

fn in_force() -> Found {
    Found::There {
        table: true,
        taps: 3,
        foreign: Vec::new(),
    }
}

/// What lane guarded finds.
fn finds(f: &mut Facts, found: Result<Found, String>) {
    f.net.as_mut().unwrap().found = found;
}

/// What is not well.
fn told(change: impl FnOnce(&mut Facts)) -> Vec<(&'static str, Verdict)> {
    let mut facts = sound();
    change(&mut facts);
    let checks = judge(&facts);
    for check in &checks {
        assert_eq!(check.verdict == Verdict::Ok, check.remedy.is_empty(), "{check:?}");
        assert!(!check.found.is_empty());
    }
    checks
        .iter()
        .filter(|check| check.verdict != Verdict::Ok)
        .map(|check| (check.name, check.verdict))
        .collect()
}

#[test]
fn a_sound_host_passes() {
    assert_eq!(told(|_| {}), []);
}

#[test]
fn each_fault_is_told_by_its_own_check() {
    use Verdict::{Fail, Warn};
    assert_eq!(
        told(|f| f.given.qemu = Some(Err("no such program".to_owned()))),
        [("qemu", Fail)]
    );
    assert_eq!(
        told(|f| f.given.accel = Some((Accel::Tcg, "kvm failed".to_owned()))),
        [("kvm", Warn)]
    );
    assert_eq!(
        told(|f| {
            f.given.accel = None;
            f.kvm = Err("permission denied".to_owned());
        }),
        [("kvm", Warn)]
    );
    assert_eq!(
        told(|f| f.budget = MemBytes::from_mib(15_900)),
        [("memory", Warn)]
    );
    assert_eq!(
        told(|f| f.budget = MemBytes::from_mib(17_000)),
        [("memory", Fail)]
    );
    assert_eq!(told(|f| f.memfd = Err("denied".to_owned())), [("memfd", Fail)]);
    assert_eq!(
        told(|f| f.given.images.push(("x".to_owned(), Err("gone".to_owned())))),
        [("image", Fail)]
    );
    assert_eq!(told(|f| f.root = false), [("vm_user", Warn)]);
    assert_eq!(
        told(|f| f.vm_user = Some(("vm".to_owned(), false))),
        [("vm_user", Warn)]
    );
    assert_eq!(told(|f| f.cgroup = Cgroup::None), [("cgroup", Warn)]);
    assert_eq!(
        told(|f| f.state_dir.1 = Folder::Writable { free: 5 }),
        [("state_dir", Warn)]
    );
    assert_eq!(
        told(|f| f.run_dir.1 = Folder::Unusable { why: "no".to_owned() }),
        [("run_dir", Fail)]
    );
    assert_eq!(
        told(|f| f.operator_group = Some(("ops".to_owned(), false))),
        [("operator_group", Warn)]
    );
    assert_eq!(
        told(|f| f.tls_faults.push(("/k".into(), "gone".to_owned()))),
        [("tls", Fail)]
    );
    assert_eq!(told(|f| f.fds = 1_024), [("descriptors", Warn)]);
    assert_eq!(told(|f| f.engine = EngineKind::Stub), [("engine", Warn)]);
}

#[test]
fn the_network_counts_only_where_the_lane_is_on() {
    use Verdict::{Fail, Warn};
    assert_eq!(told(|f| f.net = None), []);
    assert_eq!(told(|f| finds(f, Ok(Found::Absent))), []);
    assert_eq!(
        told(|f| finds(f, Err("not permitted".to_owned()))),
        [("net", Fail)]
    );
    let found = |table, foreign: &[&str]| {
        Ok(Found::There {
            table,
            taps: 0,
            foreign: foreign.iter().map(|name| (*name).to_owned()).collect(),
        })
    };
    assert_eq!(told(|f| finds(f, found(false, &[]))), [("net", Warn)]);
    assert_eq!(told(|f| finds(f, found(true, &["eth0"]))), [("net", Fail)]);
    assert_eq!(
        told(|f| f.net.as_mut().unwrap().tun = Err("gone".to_owned())),
        [("tun", Fail)]
    );
}

#[test]
fn a_real_host_is_looked_at_without_changing_it() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::look();
    let state_dir = dir.path().join("not/yet/there");
    let options = crate::config::DevOptions {
        state_dir: state_dir.clone(),
        engine: EngineKind::Qemu,
        warm: None,
        image: None,
        stub: crate::config::Stub::default(),
    };
    let config = Config::dev(options, &host).unwrap();
    let facts = look(&config, &host, Given::default());
    assert_eq!(facts.state_dir.1, Folder::CanBeMade);
    assert!(!dir.path().join("not").exists());
    assert!(facts.fds > 0 && facts.memfd.is_ok());
    let checks = judge(&facts);
    let proto = checks[0].to_proto();
    assert_eq!(
        (proto.name.as_str(), proto.verdict()),
        ("qemu", v1::Verdict::Warn)
    );
}

#[test]
fn folders_and_accounts_are_read_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(look::folder(dir.path()), Folder::Writable { free } if free > 0));
    let file = dir.path().join("passwd");
    crate::disk::write_atomic(&file, b"root:x:0:0\nvm:x:5:5\n", 0o600).unwrap();
    assert!(matches!(look::folder(&file), Folder::Unusable { .. }));
    assert!(matches!(
        look::folder(&file.join("below")),
        Folder::Unusable { .. }
    ));
    assert!(look::listed("vm", &file) && !look::listed("v", &file));
    assert!(!look::listed("vm", Path::new("/nowhere/passwd")));
    // Root may write anywhere, so this half needs another user.
    if !rustix::process::geteuid().is_root() {
        let shut = dir.path().join("shut");
        std::fs::create_dir(&shut).unwrap();
        std::fs::set_permissions(&shut, std::fs::Permissions::from_mode(0o500)).unwrap();
        assert!(matches!(look::folder(&shut), Folder::Unusable { .. }));
    }
}

#[test]
fn the_cgroup_tree_is_found_by_its_mount() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    let group = tree.join("a/b");
    std::fs::create_dir_all(&group).unwrap();
    let write = |path: &Path, text: &str| crate::disk::write_atomic(path, text.as_bytes(), 0o600).unwrap();
    write(&group.join("cgroup.controllers"), "cpu io memory\n");
    write(&group.join("cgroup.procs"), "");
    let process = dir.path().join("self");
    std::fs::create_dir(&process).unwrap();
    assert_eq!(look::cgroup(&process), Cgroup::None);
    write(&process.join("cgroup"), "4:memory:/x\n0::/a/b\n");
    let mount = format!(
        "25 1 0:1 / /sys rw - sysfs sysfs rw\n36 25 0:9 / {} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n",
        tree.display()
    );
    write(&process.join("mountinfo"), &mount);
    let expected = Cgroup::V2 {
        path: group,
        controllers: ["cpu", "io", "memory"].map(str::to_owned).to_vec(),
        delegated: true,
    };
    assert_eq!(look::cgroup(&process), expected);
}
