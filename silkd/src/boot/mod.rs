//! Boot: what PID 1 does before there is a runtime, step by step; a failing step names itself and the guest is
//! powered off: no shell, no retry.
//!
//! May call: boot/*, clock, control/files, door, events, places.
//! Never inside: a choice that the command line and the initrd's own files do not make.

mod cmdline;
mod modules;
mod mounts;
mod network;
mod ports;
mod protect;
mod root;
mod uevent;

use std::{
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
};

use rustix::{
    fs::{Mode, OFlags},
    system::{RebootCommand, reboot},
};
use sandbox_protocol::metadata::port::{AGENT, EGRESS};

use crate::{door::Listeners, events::console, places::Places};

/// Why the guest cannot boot.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub struct BootError {
    /// Which step, and what it was at.
    step: String,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl BootError {
    fn new(step: impl Into<String>, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            step: step.into(),
            source: source.into(),
        }
    }
}

/// What boot leaves to the agent.
#[derive(Debug)]
pub struct Booted {
    /// The cgroup below which programs are contained; none: the kernel has no cgroup2.
    pub cgroup_root: Option<PathBuf>,
    /// The doors' listeners, bound before anything else could take their ports.
    pub doors: Listeners,
    /// The ports to the host, by name.
    pub ports: Vec<(&'static str, OwnedFd)>,
}

/// Makes a guest out of a kernel and an initrd.
///
/// # Errors
/// The first step that failed; the guest is of no use then.
pub fn boot(places: &Places) -> Result<Booted, BootError> {
    mounts::early()?;
    take_console();
    let line = fs::read_to_string("/proc/cmdline").map_err(|error| BootError::new("command line", error))?;
    let options = cmdline::parse(&line).map_err(|error| BootError::new("command line", error))?;
    modules::load(&places.etc_silkd)?;
    network::loopback_up().map_err(|error| BootError::new("network: lo", error))?;
    let card = network::card_up().map_err(|error| BootError::new("network: card", error))?;
    let doors = Listeners::of_a_guest(card).map_err(|error| BootError::new("doors", error))?;
    sysctls();
    root::enter(&options)?;
    if card {
        network::resolve_by_door().map_err(|error| BootError::new("network: resolv.conf", error))?;
    }
    mounts::bind_boot_id(&places.boot_id)?;
    let cgroup_root = protect::protect();
    let ports = ports::open(&[AGENT, EGRESS], options.timeout);
    Ok(Booted {
        cgroup_root,
        doors,
        ports: ports.map_err(|error| BootError::new("ports", error))?,
    })
}

/// The kernel opens the console for PID 1 only if the initrd has a node for it; from here on there is one.
fn take_console() {
    let Ok(file) = rustix::fs::open("/dev/console", OFlags::RDWR | OFlags::NOCTTY, Mode::empty()) else {
        // A machine without a console boots as well, in silence.
        return;
    };
    // Nobody could be told if one of them failed.
    rustix::stdio::dup2_stdin(file.as_fd()).ok();
    rustix::stdio::dup2_stdout(file.as_fd()).ok();
    rustix::stdio::dup2_stderr(file.as_fd()).ok();
}

/// Kernel settings that the agent relies on; one that this kernel lacks is told and passed over.
fn sysctls() {
    for (name, value) in [
        ("fs/inotify/max_user_watches", "524288"),
        ("fs/inotify/max_queued_events", "65536"),
        ("kernel/panic", "-1"),
    ] {
        if let Err(error) = put(format!("/proc/sys/{name}"), value) {
            console(&format!("sysctl {name}: {error}"));
        }
    }
    if let Err(errno) = reboot(RebootCommand::CadOff) {
        console(&format!("ctrl-alt-del: {errno}"));
    }
}

/// Writes a kernel file: one write, no creation.
fn put(path: impl AsRef<std::path::Path>, text: &str) -> io::Result<()> {
    use io::Write as _;
    fs::OpenOptions::new()
        .write(true)
        .open(path)?
        .write_all(text.as_bytes())
}
