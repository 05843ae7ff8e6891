//! Finds out what is so; decides nothing, changes nothing.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, MemfdFlags, access, memfd_create, statvfs},
    io::Errno,
    process::{Resource, geteuid, getrlimit},
};

use super::{Cgroup, Facts, Folder, Given, Net};
use crate::{
    config::{Config, Host},
    net,
    telemetry::chain,
};

/// Looks at the host.
#[must_use]
pub fn look(config: &Config, host: &Host, given: Given) -> Facts {
    let folder = |path: &Path| (path.to_owned(), folder(path));
    let account = |name: &Option<String>, file| {
        name.as_ref()
            .map(|name| (name.clone(), listed(name, Path::new(file))))
    };
    let tls = config.listen.tcp.as_ref().and_then(crate::config::Tcp::tls);
    let tls_files = tls.map(|tls| [&tls.cert, &tls.key]).into_iter().flatten();
    let tls_faults = tls_files.filter_map(|path| {
        let fault = fs::File::open(path).err()?;
        Some((path.clone(), fault.to_string()))
    });
    Facts {
        engine: config.engine.kind,
        given,
        kvm: fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .map(drop)
            .map_err(|fault| fault.to_string()),
        memory: host.memory,
        budget: config.node.memory,
        memfd: memfd_create("sandboxd-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map(drop)
            .map_err(text),
        cgroup: cgroup(Path::new("/proc/self")),
        state_dir: folder(&config.node.state_dir),
        run_dir: folder(&config.node.run_dir),
        socket_dir: folder(config.listen.unix.parent().unwrap_or(Path::new("/"))),
        root: geteuid().is_root(),
        vm_user: account(&config.engine.vm_user, "/etc/passwd"),
        operator_group: account(&config.access.operator_group, "/etc/group"),
        tls_faults: tls_faults.collect(),
        // The daemon raises its own soft limit to the hard one.
        fds: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
        max_sandboxes: config.node.max_sandboxes,
        net: (config.net.slots > 0).then(|| net(&config.net)),
    }
}

fn net(wanted: &crate::config::Net) -> Net {
    Net {
        namespace: wanted.namespace.clone(),
        found: net::inspect(&wanted.namespace).map_err(|fault| chain(&fault)),
        tun: fs::File::options()
            .read(true)
            .write(true)
            .open(net::TUN)
            .map(drop)
            .map_err(|fault| fault.to_string()),
    }
}

fn text(fault: Errno) -> String {
    io::Error::from(fault).to_string()
}

/// The nearest folder that is there decides whether the others can be made.
pub(super) fn folder(path: &Path) -> Folder {
    let unusable = |why: String| Folder::Unusable { why };
    match fs::metadata(path) {
        Ok(found) if !found.is_dir() => unusable("it is not a folder".to_owned()),
        Ok(_) => match (access(path, Access::WRITE_OK | Access::EXEC_OK), statvfs(path)) {
            (Ok(()), Ok(space)) => Folder::Writable {
                free: space.f_bavail.saturating_mul(space.f_frsize),
            },
            (Err(fault), _) | (_, Err(fault)) => unusable(text(fault)),
        },
        Err(fault) if fault.kind() == io::ErrorKind::NotFound => match path.parent().map(folder) {
            Some(Folder::Writable { .. } | Folder::CanBeMade) => Folder::CanBeMade,
            Some(Folder::Unusable { why }) => unusable(format!("it is not there and cannot be made: {why}")),
            None => unusable("there is no such folder".to_owned()),
        },
        Err(fault) => unusable(fault.to_string()),
    }
}

/// Whether a passwd-like file has the name. Names that only a directory service knows are not found.
pub(super) fn listed(name: &str, file: &Path) -> bool {
    let Ok(text) = fs::read_to_string(file) else {
        return false;
    };
    text.lines().any(|line| line.split(':').next() == Some(name))
}

/// The version 2 tree that a process sees, if any; `process` is its folder below /proc.
pub(super) fn cgroup(process: &Path) -> Cgroup {
    let found = || {
        let groups = fs::read_to_string(process.join("cgroup")).ok()?;
        let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
        let mounts = fs::read_to_string(process.join("mountinfo")).ok()?;
        let root = mounts.lines().find_map(cgroup2_mount)?;
        Some(root.join(group))
    };
    let Some(path) = found() else {
        return Cgroup::None;
    };
    let controllers = fs::read_to_string(path.join("cgroup.controllers")).unwrap_or_default();
    Cgroup::V2 {
        controllers: controllers.split_ascii_whitespace().map(str::to_owned).collect(),
        delegated: access(&path, Access::WRITE_OK).is_ok()
            && access(path.join("cgroup.procs"), Access::WRITE_OK).is_ok(),
        path,
    }
}

/// `36 35 98:0 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw`
fn cgroup2_mount(line: &str) -> Option<PathBuf> {
    let (mount, kind) = line.split_once(" - ")?;
    kind.starts_with("cgroup2 ")
        .then(|| mount.split(' ').nth(4).map(PathBuf::from))?
}
