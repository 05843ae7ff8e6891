//! The builder of images: the same inputs give the same bytes, nothing half-made is left, and mistakes are named.
//!
//! Needs apt and the packages of `deploy/deps image`; a placeholder stands for silkd, which is not what is tested.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a check fails by panicking"
)]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

fn script(name: &str) -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name))
}

/// Runs the builder with a placeholder for silkd.
fn build(name: &str, out: &Path, silkd: &Path) -> Output {
    fs::create_dir_all(silkd).unwrap();
    fs::write(silkd.join("silkd"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(
        silkd.join("silkd"),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    fs::write(
        silkd.join("silkd.version"),
        "version=9.8.7\nproto_min=1\nproto_max=2\n",
    )
    .unwrap();
    script("image/build")
        .arg(name)
        .arg(out)
        .env("SILKD", silkd)
        .env_remove("SOURCE_DATE_EPOCH")
        .output()
        .expect("the builder runs")
}

fn built(name: &str, out: &Path, silkd: &Path) -> String {
    let output = build(name, out, silkd);
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    log
}

fn manifest(out: &Path) -> Value {
    serde_json::from_slice(&fs::read(out.join("manifest.json")).unwrap()).unwrap()
}

fn digest(path: &Path) -> String {
    Sha256::digest(fs::read(path).unwrap())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Files of a cpio archive in format newc: name, mode, owner, time stamp, content.
fn entries(mut archive: &[u8]) -> Vec<(String, u32, u32, u32, Vec<u8>)> {
    let mut entries = Vec::new();
    loop {
        let number = |at: usize| {
            let digits = std::str::from_utf8(&archive[6 + 8 * at..14 + 8 * at]).unwrap();
            u32::from_str_radix(digits, 16).unwrap()
        };
        assert_eq!(&archive[..6], b"070701");
        let (mode, owner, time) = (number(1), number(2) + number(3), number(5));
        let (size, name) = (
            usize::try_from(number(6)).unwrap(),
            usize::try_from(number(11)).unwrap(),
        );
        let pad = |n: usize| n.next_multiple_of(4);
        let path = String::from_utf8(archive[110..110 + name - 1].to_vec()).unwrap();
        let begin = pad(110 + name);
        if path == "TRAILER!!!" {
            return entries;
        }
        entries.push((path, mode, owner, time, archive[begin..begin + size].to_vec()));
        archive = &archive[pad(begin + size)..];
    }
}

#[test]
fn the_same_inputs_give_the_same_image() {
    let temp = tempfile::tempdir().unwrap();
    let (a, b, silkd) = (
        temp.path().join("one/a"),
        temp.path().join("other/b"),
        temp.path().join("silkd"),
    );
    built("busybox", &a, &silkd);
    built("busybox", &b, &silkd);
    for file in ["vmlinuz", "initrd", "manifest.json", "inputs"] {
        assert_eq!(digest(&a.join(file)), digest(&b.join(file)), "{file} differs");
    }
    // Nothing but the image, and the lock beside it.
    let left: Vec<_> = fs::read_dir(temp.path().join("one"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");

    let manifest = manifest(&a);
    assert_eq!(manifest["format"], 1);
    assert_eq!(manifest["name"], "busybox");
    assert_eq!(manifest["silkd_version"], "9.8.7");
    assert_eq!(
        (&manifest["proto_min"], &manifest["proto_max"]),
        (&Value::from(1), &Value::from(2))
    );
    assert!(manifest["rootfs"].is_null());
    assert!(
        manifest["cmdline"]
            .as_str()
            .unwrap()
            .ends_with("silkd.root=initramfs")
    );
    for part in ["kernel", "initrd"] {
        let file = a.join(manifest[part]["file"].as_str().unwrap());
        assert_eq!(manifest[part]["sha256"], digest(&file), "{part}");
    }
    check_initrd(&fs::read(a.join("initrd")).unwrap());

    // It is built again only when its inputs change, or when it is not all there.
    assert!(built("busybox", &a, &silkd).contains("up to date"));
    fs::remove_file(a.join("inputs")).unwrap();
    fs::write(a.join("initrd"), "damaged").unwrap();
    assert!(!built("busybox", &a, &silkd).contains("up to date"));
    assert_eq!(digest(&a.join("initrd")), digest(&b.join("initrd")));
}

fn check_initrd(archive: &[u8]) {
    let entries = entries(archive);
    let find = |path: &str| {
        entries
            .iter()
            .find(|entry| entry.0 == path)
            .unwrap_or_else(|| panic!("no {path}"))
    };
    assert_eq!(find("init").4, b"#!/bin/sh\n");
    assert_eq!(find("init").1 & 0o777, 0o755);
    assert_eq!(find("tmp").1 & 0o7777, 0o1777);
    for path in [
        "bin/sh",
        "usr/bin/env",
        "etc/passwd",
        "etc/group",
        "etc/hosts",
        "etc/machine-id",
        "etc/sandbox/renew.d",
    ] {
        find(path);
    }
    assert!(
        entries.iter().all(|entry| entry.0 != "sbin/init"),
        "silkd is the only init"
    );
    assert!(entries.iter().all(|entry| entry.2 == 0), "everything is root's");
    assert!(entries.windows(2).all(|two| two[0].0 < two[1].0), "sorted");
    assert!(
        entries.iter().all(|entry| entry.3 == entries[0].3),
        "one time stamp"
    );

    // Every listed module is there, uncompressed (ELF), and after what it needs.
    let list = String::from_utf8(find("etc/silkd/modules").4.clone()).unwrap();
    assert!(list.lines().count() > 0);
    for line in list.lines() {
        assert_eq!(
            &find(line.strip_prefix('/').unwrap()).4[..4],
            b"\x7fELF",
            "{line}"
        );
    }
    let place = |name: &str| list.lines().position(|line| line.ends_with(name));
    assert!(place("/failover.ko") < place("/net_failover.ko"));
    assert!(place("/net_failover.ko") < place("/virtio_net.ko"));
    assert!(place("/virtio_net.ko").is_some());
}

#[test]
fn mistakes_are_named_and_leave_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let silkd = temp.path().join("silkd");
    let unknown = build("no-such-recipe", &temp.path().join("image"), &silkd);
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no such recipe; there is: busybox debian"));

    // A folder that holds something else is not overwritten.
    let precious = temp.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("thesis"), "x").unwrap();
    assert!(!build("busybox", &precious, &silkd).status.success());
    assert!(precious.join("thesis").exists());

    // A kernel that apt does not have.
    let out = temp.path().join("images/kernel");
    let output = script("image/build")
        .arg("busybox")
        .arg(&out)
        .env("SILKD", &silkd)
        .env("IMAGE_KERNEL", "linux-image-0.0.0-no-such-cloud-amd64")
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("apt could not fetch linux-image-0.0.0-no-such")
    );
    assert!(!out.exists());
    let left: Vec<_> = fs::read_dir(temp.path().join("images"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, [".lock"]);
}

#[test]
fn deps_names_what_it_does_not_know() {
    let output = script("deps").arg("no-such-group").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no such group: no-such-group"));
}
