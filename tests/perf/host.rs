//! What the figures were measured on.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tokio::{process::Command, time::Instant};

use crate::arm::Arm;

/// The machine.
pub(crate) async fn describe(out: &Path) -> Result<Value> {
    let uname = rustix::system::uname();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let cpu = std::fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let qemu = Command::new("qemu-system-x86_64").arg("--version").output().await;
    let qemu = qemu
        .ok()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let memory = rustix::system::sysinfo();
    Ok(json!({
        "cores": std::thread::available_parallelism()?.get(),
        "cpu": cpu.map(|(_, model)| model),
        "memory_mib": (u64::from(memory.mem_unit) * memory.totalram) >> 20,
        "kernel": format!("{} {}", text(uname.sysname()), text(uname.release())),
        "qemu": qemu.as_deref().and_then(|text| text.lines().next()),
        "state_on": filesystem(out)?,
    }))
}

/// The load averages.
pub(crate) fn load() -> Option<String> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    Some(load.split_whitespace().take(3).collect::<Vec<_>>().join(" "))
}

/// Processor time that all programs of the host have used, in steps of 10 ms.
pub(crate) fn busy() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "));
    let ticks = line.context("a strange /proc/stat")?.split_whitespace();
    let ticks = ticks.map(str::parse::<u64>).collect::<Result<Vec<_>, _>>()?;
    // user, nice, system, idle, iowait, irq, softirq; guests' time is in user's.
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks.as_slice() else {
        anyhow::bail!("a short /proc/stat");
    };
    let sum = user + nice + system + irq + softirq;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_nanos(
        sum.saturating_mul(1_000_000_000 / per_second),
    ))
}

/// The file system that holds the state: on one in memory a sync costs nothing.
fn filesystem(dir: &Path) -> Result<String> {
    let dir = dir.canonicalize()?;
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let holder = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (at, kind) = (words.next()?, words.next()?);
            dir.starts_with(at).then_some((at.len(), kind))
        })
        .max_by_key(|(depth, _)| *depth);
    Ok(holder.map_or("unknown", |(_, kind)| kind).to_owned())
}

/// What one sync of one record costs on the disk of the state, with nobody else on it.
pub(crate) async fn fdatasync(out: &Path) -> Result<Value> {
    let out = out.to_owned();
    tokio::task::spawn_blocking(move || {
        let dir = tempfile::Builder::new().prefix("sync-").tempdir_in(out)?;
        let file = File::create(dir.path().join("file"))?;
        file.write_all_at(&[0; 1 << 20], 0)?;
        file.sync_all()?;
        let mut arm = Arm::new()?;
        for n in 0..1_000_u64 {
            let began = Instant::now();
            file.write_all_at(&[1; 512], n * 512)?;
            file.sync_data()?;
            arm.add(began.elapsed());
        }
        Ok(arm.json())
    })
    .await?
}
