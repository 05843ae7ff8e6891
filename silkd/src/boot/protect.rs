//! Protection of the agent against accidents and load of its guest.
//!
//! May call: boot, events.
//! Never inside: a promise against root in the guest, which may stop silkd as it likes.
//! A limit that this kernel lacks is told on the console and passed over: a guest without it still works.

use std::{
    io,
    path::{Path, PathBuf},
};

use rustix::process::{Resource, Rlimit, setpriority_process, setrlimit};

use super::{
    mounts::{CGROUP, make_dir},
    put,
};
use crate::events::console;

const MIB: u64 = 1024 * 1024;

/// Sets nice, the OOM score, descriptors and the groups `agent` and `work`. Gives the folder below which programs are
/// contained, if there is one.
pub(super) fn protect() -> Option<PathBuf> {
    let nofile = Rlimit {
        current: Some(65_536),
        // What a program may raise its own to.
        maximum: Some(524_288),
    };
    told(
        "nofile",
        setrlimit(Resource::Nofile, nofile).map_err(io::Error::from),
    );
    told("nice", setpriority_process(None, -10).map_err(io::Error::from));
    told("oom_score_adj", put("/proc/self/oom_score_adj", "-1000"));
    let root = Path::new(CGROUP);
    if !root.join("cgroup.procs").exists() {
        console("no cgroup2: programs are not contained");
        return None;
    }
    told("cgroups", groups(root));
    Some(root.to_owned())
}

fn told(what: &str, outcome: io::Result<()>) {
    if let Err(error) = outcome {
        console(&format!("protection: {what}: {error}"));
    }
}

fn groups(root: &Path) -> io::Result<()> {
    for controller in ["cpu", "memory", "pids"] {
        told(
            controller,
            put(root.join("cgroup.subtree_control"), &format!("+{controller}")),
        );
    }
    let (agent, work) = (root.join("agent"), root.join("work"));
    make_dir(&agent)?;
    make_dir(&work)?;
    put(agent.join("cgroup.procs"), "0")?;
    let ram = ram();
    let limits = Limits::of(ram, threads_max());
    for (file, value) in [
        (agent.join("memory.min"), limits.agent_min.to_string()),
        (agent.join("cpu.weight"), "10000".to_owned()),
        (work.join("cpu.weight"), "100".to_owned()),
        (work.join("memory.max"), limits.work_max.to_string()),
        (work.join("pids.max"), limits.work_pids.to_string()),
        // Each tree of programs gets a share of its own, however many tasks it has.
        (work.join("cgroup.subtree_control"), "+cpu".to_owned()),
    ] {
        told(&file.display().to_string(), put(&file, &value));
    }
    Ok(())
}

fn ram() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}

fn threads_max() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/kernel/threads-max").unwrap_or_default();
    // A quarter of what even the smallest guest has, should the kernel not say.
    text.trim().parse().unwrap_or(512)
}

#[derive(Debug, PartialEq, Eq)]
struct Limits {
    agent_min: u64,
    work_max: u64,
    work_pids: u64,
}

impl Limits {
    /// The agent keeps 32 MiB (an eighth of RAM below 256 MiB) and what its logs may take (64 MiB, or a sixteenth of
    /// RAM); programs get the rest, and four fifths of the threads. Pure.
    fn of(ram: u64, threads: u64) -> Self {
        let agent_min = if ram < 256 * MIB { ram / 8 } else { 32 * MIB };
        let logs = (ram / 16).min(64 * MIB);
        Self {
            agent_min,
            work_max: ram.saturating_sub(agent_min + logs),
            work_pids: (threads / 5 * 4).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_agent_keeps_grows_with_ram_up_to_a_point() {
        let small = Limits::of(128 * MIB, 1000);
        assert_eq!(small.agent_min, 16 * MIB);
        assert_eq!(small.work_max, (128 - 16 - 8) * MIB);
        assert_eq!(small.work_pids, 800);
        let large = Limits::of(4096 * MIB, 30_000);
        assert_eq!(large.agent_min, 32 * MIB);
        assert_eq!(large.work_max, (4096 - 32 - 64) * MIB);
        assert_eq!(Limits::of(0, 0).work_pids, 1);
    }
}
