//! What the facts mean, pure.

use super::{Cgroup, Check, Facts, Folder, Net, Verdict};
use crate::{
    net::Found,
    words::{Accel, EngineKind, MemBytes},
};

/// Descriptors that one sandbox of QEMU needs: QMP, pidfd, lock, two ports, and one to spare.
const FDS_PER_SANDBOX: u64 = 6;
/// Descriptors of the daemon itself, and of its clients.
const FDS_BASE: u64 = 512;
/// Below this much room a state directory will soon refuse records.
const STATE_FREE: u64 = 1 << 30;
/// What the host itself should keep of its memory.
const MEMORY_LEFT: u64 = 512 << 20;
/// Controllers that bound what a VM takes.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// Every check that applies to this host, in one order.
#[must_use]
pub fn judge(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    match facts.engine {
        EngineKind::Qemu => {
            checks.push(qemu(facts));
            checks.push(kvm(facts));
            checks.push(memory(facts));
            checks.push(memfd(facts));
            checks.extend(facts.given.images.iter().map(image));
            checks.push(vm_user(facts));
        }
        EngineKind::Stub => checks.push(warn(
            "engine",
            "the stub engine isolates nothing".to_owned(),
            "engine.kind = \"qemu\" for anything but tests",
        )),
    }
    checks.push(cgroup(facts));
    checks.push(folder("state_dir", &facts.state_dir, Some(STATE_FREE)));
    checks.push(folder("run_dir", &facts.run_dir, None));
    checks.push(folder("socket_dir", &facts.socket_dir, None));
    checks.extend(operator_group(facts));
    checks.extend(facts.tls_faults.iter().map(|(path, why)| {
        let found = format!("{}: {why}", path.display());
        fail("tls", found, "correct listen.tls, or the file's permissions")
    }));
    checks.push(descriptors(facts));
    if let Some(wanted) = &facts.net {
        checks.push(network(wanted));
        checks.push(tun(wanted));
    }
    checks
}

fn ok(name: &'static str, found: impl Into<String>) -> Check {
    Check {
        name,
        verdict: Verdict::Ok,
        found: found.into(),
        remedy: String::new(),
    }
}

fn warn(name: &'static str, found: String, remedy: impl Into<String>) -> Check {
    Check {
        name,
        verdict: Verdict::Warn,
        found,
        remedy: remedy.into(),
    }
}

fn fail(name: &'static str, found: String, remedy: impl Into<String>) -> Check {
    Check {
        verdict: Verdict::Fail,
        ..warn(name, found, remedy)
    }
}

fn qemu(facts: &Facts) -> Check {
    match &facts.given.qemu {
        Some(Ok(version)) => ok("qemu", version),
        Some(Err(why)) => fail(
            "qemu",
            why.clone(),
            "install qemu-system-x86, or set engine.qemu to its path",
        ),
        None => warn(
            "qemu",
            "not tried".to_owned(),
            "run `sandboxd doctor` on the host",
        ),
    }
}

fn kvm(facts: &Facts) -> Check {
    let slow = "guests run emulated, many times slower; use a host with virtualisation enabled";
    match (&facts.given.accel, &facts.kvm) {
        (Some((Accel::Kvm, why)), _) => ok("kvm", why),
        (Some((Accel::Tcg | Accel::None, why)), _) => warn("kvm", why.clone(), slow),
        (None, Ok(())) => ok("kvm", "/dev/kvm opens; proved by a guest when the daemon starts"),
        (None, Err(why)) => warn(
            "kvm",
            format!("/dev/kvm: {why}"),
            format!("load kvm_intel or kvm_amd, add the user to group kvm; else {slow}"),
        ),
    }
}

fn memory(facts: &Facts) -> Check {
    let found = format!(
        "{} MiB for guests, of {} MiB",
        facts.budget.mib(),
        facts.memory.mib()
    );
    if facts.budget > facts.memory {
        fail("memory", found, "lower node.memory: the host has less")
    } else if facts.budget.0.saturating_add(MEMORY_LEFT) > facts.memory.0 {
        let least = MemBytes(MEMORY_LEFT).mib();
        warn(
            "memory",
            found,
            format!("lower node.memory: leave the host {least} MiB"),
        )
    } else {
        ok("memory", found)
    }
}

fn memfd(facts: &Facts) -> Check {
    match &facts.memfd {
        Ok(()) => ok("memfd", "sealed memory files can be made"),
        Err(why) => fail(
            "memfd",
            why.clone(),
            "allow memfd_create (a kernel of 3.17 or later, no seccomp filter against it)",
        ),
    }
}

fn image((name, found): &(String, Result<String, String>)) -> Check {
    match found {
        Ok(digest) => ok("image", format!("{name}: {digest}")),
        Err(why) => fail(
            "image",
            format!("{name}: {why}"),
            "`make image`, then put it below state_dir/images or name its path",
        ),
    }
}

fn vm_user(facts: &Facts) -> Check {
    let own = |why: String, remedy: &str| {
        warn(
            "vm_user",
            format!("VMs run as the daemon's own user: {why}"),
            remedy,
        )
    };
    match (&facts.vm_user, facts.root) {
        (Some((name, true)), true) => ok("vm_user", name),
        (Some((name, false)), true) => own(
            format!("there is no user {name}"),
            "install the sysusers file, or set engine.vm_user",
        ),
        (None, true) => own("engine.vm_user is empty".to_owned(), "set engine.vm_user"),
        (Some(_) | None, false) => own(
            "the daemon is not root".to_owned(),
            "run it as root to give VMs a user of their own",
        ),
    }
}

fn cgroup(facts: &Facts) -> Check {
    let lost = "VMs run without limits of their own and end one by one";
    match &facts.cgroup {
        Cgroup::None => warn(
            "cgroup",
            format!("no version 2 tree: {lost}"),
            "boot with systemd.unified_cgroup_hierarchy=1",
        ),
        Cgroup::V2 {
            path,
            delegated: false,
            ..
        } => warn(
            "cgroup",
            format!("{} is not ours to divide: {lost}", path.display()),
            "run the daemon by its unit (Delegate=yes)",
        ),
        Cgroup::V2 {
            path, controllers, ..
        } => {
            let missing: Vec<_> = CONTROLLERS
                .into_iter()
                .filter(|wanted| !controllers.iter().any(|there| there == wanted))
                .collect();
            if missing.is_empty() {
                return ok("cgroup", format!("{}", path.display()));
            }
            warn(
                "cgroup",
                format!("{} has no {}", path.display(), missing.join(", ")),
                "enable these controllers for it, so that VMs can be bounded",
            )
        }
    }
}

fn folder(name: &'static str, (path, found): &(std::path::PathBuf, Folder), least: Option<u64>) -> Check {
    let path = path.display();
    match (found, least) {
        (Folder::Unusable { why }, _) => fail(
            name,
            format!("{path}: {why}"),
            "make it, owned by the daemon's user",
        ),
        (Folder::CanBeMade, _) => ok(name, format!("{path}: will be made")),
        (Folder::Writable { free }, Some(least)) if *free < least => warn(
            name,
            format!("{path}: {} MiB free", free >> 20),
            format!("make room: at least {} MiB", least >> 20),
        ),
        (Folder::Writable { free }, _) => ok(name, format!("{path}: {} MiB free", free >> 20)),
    }
}

fn operator_group(facts: &Facts) -> Option<Check> {
    let (name, there) = facts.operator_group.as_ref()?;
    Some(if *there {
        ok("operator_group", name)
    } else {
        warn(
            "operator_group",
            format!("there is no group {name}: only root and the daemon's user are operators"),
            "install the sysusers file, or set access.operator_group",
        )
    })
}

fn network(wanted: &Net) -> Check {
    let namespace = &wanted.namespace;
    match &wanted.found {
        Ok(Found::Absent) => ok("net", format!("namespace {namespace}: will be made")),
        Ok(Found::There { foreign, .. }) if !foreign.is_empty() => fail(
            "net",
            format!("namespace {namespace} is not ours alone: {}", foreign.join(", ")),
            "take those links out of it, or choose another net.namespace",
        ),
        Ok(Found::There { table: false, .. }) => warn(
            "net",
            format!("namespace {namespace} has no packet filter"),
            "`sandboxd net prepare`; a daemon that starts does it too",
        ),
        Ok(Found::There {
            table: true, taps, ..
        }) => ok(
            "net",
            format!("namespace {namespace}: packet filter in force, {taps} network cards"),
        ),
        Err(why) => fail(
            "net",
            format!("namespace {namespace}: {why}"),
            "run it as root, on a kernel with CONFIG_NET_NS, CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET",
        ),
    }
}

fn tun(wanted: &Net) -> Check {
    match &wanted.tun {
        Ok(()) => ok("tun", "/dev/net/tun opens"),
        Err(why) => fail(
            "tun",
            format!("/dev/net/tun: {why}"),
            "run it as root, on a kernel with CONFIG_TUN (`modprobe tun`)",
        ),
    }
}

fn descriptors(facts: &Facts) -> Check {
    let room = facts.fds.saturating_sub(FDS_BASE) / FDS_PER_SANDBOX;
    if room >= u64::from(facts.max_sandboxes) {
        return ok("descriptors", format!("{} at most", facts.fds));
    }
    let wanted = FDS_BASE + FDS_PER_SANDBOX * u64::from(facts.max_sandboxes);
    warn(
        "descriptors",
        format!(
            "{} at most, enough for some {room} of {} sandboxes",
            facts.fds, facts.max_sandboxes
        ),
        format!("raise the limit (LimitNOFILE={wanted}), or lower node.max_sandboxes"),
    )
}
