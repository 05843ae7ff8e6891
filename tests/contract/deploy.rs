//! The files of `deploy`: scripts and units that hold together, with the daemon's defaults and with each other.

use std::{collections::BTreeMap, path::Path, process::Command};

use sandboxd::{
    config::{Config, Host},
    words::MemBytes,
};

use crate::{
    none,
    tree::{self, File},
};

/// A unit: each `Section.Key` with its values, in order.
type Unit = BTreeMap<String, Vec<String>>;

/// Parses a unit; complains of what systemd would ignore or refuse.
fn unit(file: &File) -> (Unit, Vec<String>) {
    let (mut unit, mut complaints, mut section) = (Unit::new(), Vec::new(), String::new());
    for (number, line) in file.text.lines().enumerate() {
        let place = format!("{}:{}", file.path, number + 1);
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            if !["Unit", "Install", "Service", "Socket", "Slice"].contains(&name) {
                complaints.push(format!("{place}: no such section: {name}"));
            }
            name.clone_into(&mut section);
            continue;
        }
        match line.split_once('=') {
            Some((key, value)) if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
                if section.is_empty() {
                    complaints.push(format!("{place}: before any section"));
                }
                if value.is_empty() {
                    complaints.push(format!("{place}: {key} has no value"));
                }
                unit.entry(format!("{section}.{key}"))
                    .or_default()
                    .push(value.to_owned());
            }
            _ => complaints.push(format!("{place}: neither a section nor KEY=VALUE: {line}")),
        }
    }
    (unit, complaints)
}

/// What the service unit must say, and what it must not.
fn service(file: &File) -> Vec<String> {
    let (unit, mut complaints) = unit(file);
    let musts = [
        ("Service.Type", "notify", "readiness is told, not guessed"),
        ("Service.NotifyAccess", "main", "no guest speaks for the daemon"),
        (
            "Service.KillMode",
            "process",
            "virtual machines outlive the daemon",
        ),
        (
            "Service.RuntimeDirectoryPreserve",
            "yes",
            "guests' sockets outlive the daemon",
        ),
        ("Service.StateDirectory", "sandboxd", "the journal has a home"),
        ("Service.Restart", "always", "claims wait for the next daemon"),
        ("Service.Slice", "sandbox.slice", "the slice is shipped"),
    ];
    for (key, value, why) in musts {
        if unit.get(key).and_then(|values| values.last()).map(String::as_str) != Some(value) {
            complaints.push(format!("{}: {key} is not {value}: {why}", file.path));
        }
    }
    for (key, why) in [
        ("Service.MemoryDenyWriteExecute", "stops software emulation"),
        ("Service.PrivateDevices", "hides /dev/kvm"),
        ("Service.PrivateNetwork", "cuts the doors off"),
    ] {
        if unit.contains_key(key) {
            complaints.push(format!("{}: {key} {why}", file.path));
        }
    }
    for key in [
        "Service.WatchdogSec",
        "Service.Delegate",
        "Service.CapabilityBoundingSet",
    ] {
        if !unit.contains_key(key) {
            complaints.push(format!("{}: no {key}", file.path));
        }
    }
    let checks = unit
        .get("Service.ExecStartPre")
        .is_some_and(|all| all.iter().any(|one| one.contains(" check-config ")));
    if !checks {
        complaints.push(format!(
            "{}: the configuration is not checked before the start",
            file.path
        ));
    }
    complaints
}

/// A script: strict, and bash can read it.
fn script(file: &File) -> Vec<String> {
    let mut complaints = Vec::new();
    // A recipe is read by the builder, which is strict already.
    let sourced = file.path.starts_with("deploy/image/recipes/");
    if !sourced && !file.text.starts_with("#!") {
        complaints.push(format!("{}: does not say what runs it", file.path));
    }
    if !sourced
        && !["set -euo pipefail", "set -eu"]
            .iter()
            .any(|set| file.text.lines().any(|line| line == *set))
    {
        complaints.push(format!("{}: goes on after an error", file.path));
    }
    let read = Command::new("bash")
        .args(["-n", "-c", &file.text])
        .output()
        .expect("bash runs");
    if !read.status.success() {
        complaints.push(format!(
            "{}: {}",
            file.path,
            String::from_utf8_lossy(&read.stderr)
        ));
    }
    complaints
}

fn scripts() -> Vec<&'static File> {
    let names = [
        "deploy/deps",
        "deploy/demo",
        "deploy/install",
        "deploy/image/build",
        "deploy/image/agent",
        ".ci/run",
    ];
    let recipes = tree::files()
        .iter()
        .filter(|file| file.path.starts_with("deploy/image/recipes/"));
    names.iter().map(|name| tree::file(name)).chain(recipes).collect()
}

#[test]
fn scripts_are_strict_and_read() {
    none(scripts().into_iter().flat_map(script));
}

#[test]
fn scripts_can_be_run() {
    use std::os::unix::fs::PermissionsExt as _;
    for file in scripts().into_iter().filter(|file| file.text.starts_with("#!")) {
        let mode = std::fs::metadata(tree::root().join(&file.path))
            .expect("it is there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o111, 0o111, "{} cannot be run", file.path);
    }
}

#[test]
fn units_are_well_formed() {
    let units: Vec<&File> = tree::files()
        .iter()
        .filter(|file| {
            file.path.starts_with("deploy/systemd/")
                && [".service", ".socket", ".slice"]
                    .iter()
                    .any(|end| file.path.ends_with(end))
        })
        .collect();
    assert_eq!(units.len(), 3);
    none(units.into_iter().flat_map(|file| unit(file).1));
    none(service(tree::file("deploy/systemd/sandboxd.service")));
}

#[test]
fn units_agree_with_the_configuration() {
    let (socket, _) = unit(tree::file("deploy/systemd/sandboxd.socket"));
    let config = &tree::file("deploy/sandboxd.toml").text;
    let says = |key: &str, value: &str| {
        let line = format!("{key} = \"{value}\"");
        assert!(
            config.lines().any(|found| found.starts_with(&line)),
            "sandboxd.toml has no `{line}`"
        );
    };
    says("unix", &socket["Socket.ListenStream"][0]);
    says("operator_group", &socket["Socket.SocketGroup"][0]);
    assert_eq!(socket["Socket.SocketMode"][0], "0660");
    let users = &tree::file("deploy/systemd/sandboxd.sysusers").text;
    says("vm_user", "sandboxd-vm");
    assert!(users.lines().any(|line| line.starts_with("u sandboxd-vm ")));
    assert!(users.lines().any(|line| line.starts_with("g sandboxd ")));
    let folders = &tree::file("deploy/systemd/sandboxd.tmpfiles").text;
    for key in ["state_dir", "run_dir"] {
        let line = config
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{key} = \"")));
        let folder = line
            .and_then(|line| line.split('"').next())
            .expect("the configuration names it");
        assert!(
            folders
                .lines()
                .any(|line| line.starts_with(&format!("d {folder} "))),
            "nobody makes {folder}"
        );
    }
}

/// What is wrong with the shipped configuration: the daemon refuses it, or a value in it is not the default.
fn config(text: &str) -> Vec<String> {
    let host = Host {
        name: "node".to_owned(),
        memory: MemBytes(64 << 30),
        cores: 8,
    };
    let path = Path::new("sandboxd.toml");
    let read = |text: &str| Config::parse(text, path, &host).map_err(|mistakes| mistakes.to_string());
    match (read(text), read("[pool.default]")) {
        (Ok(shipped), Ok(defaults)) if shipped == defaults => Vec::new(),
        (Ok(shipped), Ok(defaults)) => {
            let (shipped, defaults) = (format!("{shipped:#?}"), format!("{defaults:#?}"));
            let differ = shipped.lines().zip(defaults.lines()).filter(|(a, b)| a != b);
            differ
                .map(|(a, b)| format!("{} is shipped, the default is {}", a.trim(), b.trim()))
                .collect()
        }
        (shipped, defaults) => shipped.err().into_iter().chain(defaults.err()).collect(),
    }
}

#[test]
fn the_shipped_configuration_shows_the_defaults() {
    let text = &tree::file("deploy/sandboxd.toml").text;
    none(config(text));
    let broken = text.replace("warm = 4 ", "warm = 5 ");
    assert_ne!(&broken, text);
    assert!(!config(&broken).is_empty(), "another default is told");
    assert!(
        !config(&format!("{text}\n[nonsense]\n")).is_empty(),
        "an unknown key is told"
    );
}

#[test]
fn make_has_every_target_and_ci_runs_them() {
    let make = &tree::file("Makefile").text;
    for target in [
        "deps",
        "build",
        "image",
        "demo",
        "lint",
        "test",
        "test-quick",
        "bench",
        "soak",
        "fuzz",
        "install",
    ] {
        assert!(
            make.lines().any(|line| line
                .strip_prefix(target)
                .is_some_and(|rest| rest.starts_with(':'))),
            "make has no target {target}"
        );
    }
    assert!(tree::file(".ci/run").text.contains("make lint test"));
}

#[test]
fn broken_deploy_files_are_told() {
    let file = File::new(
        "x.service",
        "Type=notify\n[Nonsense]\nA=\nwhat\n[Service]\nPrivateDevices=yes\nKillMode=mixed\n",
    );
    let (_, told) = unit(&file);
    assert_eq!(told.len(), 4, "{told:?}");
    let told = service(&file);
    for expected in [
        "KillMode is not process",
        "PrivateDevices hides",
        "no Service.WatchdogSec",
        "not checked",
    ] {
        assert!(
            told.iter().any(|complaint| complaint.contains(expected)),
            "{expected}: {told:?}"
        );
    }
    let told = script(&File::new("deploy/x", "if true; then\n"));
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(script(&File::new("deploy/x", "#!/bin/sh\nset -eu\ntrue\n")).is_empty());
}
