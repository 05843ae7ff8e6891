//! From the process's arguments to a running agent: PID 1, or test mode.
//!
//! May call: boot, control, events, link, places, serve, sys.
//! Never inside: what is served.

use std::{
    error::Error,
    ffi::OsString,
    fs, io,
    os::unix::{fs::FileTypeExt as _, net::UnixListener},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::ExitCode,
};

use rustix::process::getpid;
use sandbox_protocol::metadata::port::{AGENT, EGRESS};

use crate::{
    agent::info::VERSION,
    boot,
    control::{files::make_folders, machine::Machine},
    events::console,
    link::{Source, open_ports},
    places::{Places, suffixed},
    serve::{Port, Setup, serve},
    sys,
};

const USAGE: &str = "usage: silkd --serve SOCKET | --version; without arguments only as PID 1 of a guest";

/// What the arguments ask for. Pure.
#[derive(Debug, PartialEq, Eq)]
enum Mode {
    Guest,
    Serve(PathBuf),
    Version,
    Usage,
}

impl Mode {
    /// The kernel hands words of its command line to PID 1, which are not for silkd: only `--serve` counts there.
    fn of(pid1: bool, args: &[OsString]) -> Self {
        match args {
            [flag, socket] if flag == "--serve" && !socket.is_empty() => Self::Serve(socket.into()),
            _ if pid1 => Self::Guest,
            [flag] if flag == "--version" => Self::Version,
            _ => Self::Usage,
        }
    }
}

/// The whole program.
#[must_use]
pub fn main() -> ExitCode {
    sys::set_allocator();
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match Mode::of(getpid().is_init(), &args) {
        Mode::Guest => guest(),
        Mode::Serve(socket) => match test_mode(&socket) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                console(&chain(&*error));
                ExitCode::FAILURE
            }
        },
        Mode::Version => {
            console(VERSION);
            ExitCode::SUCCESS
        }
        Mode::Usage => {
            console(USAGE);
            ExitCode::from(2)
        }
    }
}

/// PID 1: whatever happens, the end is power off. A PID 1 that ends is a kernel panic.
fn guest() -> ExitCode {
    // Unwind safe: nothing of it is looked at afterwards.
    match catch_unwind(AssertUnwindSafe(live)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => console(&format!("fatal: {}", chain(&*error))),
        Err(_told_by_the_hook) => console("fatal: a panic of the agent itself"),
    }
    rustix::fs::sync();
    if let Err(error) = Machine::Guest.power_off() {
        console(&format!("fatal: power off: {error}"));
    }
    rustix::event::pause();
    ExitCode::FAILURE
}

fn live() -> Result<(), Box<dyn Error>> {
    let places = Places::guest();
    let booted = boot::boot(&places)?;
    let ports = open_ports(&[AGENT, EGRESS]).map_err(|error| format!("ports: {error}"))?;
    if !ports.iter().any(|(name, _)| *name == AGENT) {
        return Err(format!("ports: there is no {AGENT}").into());
    }
    let port = |(name, file)| Port {
        name,
        source: Source::Device(file),
        agent: name == AGENT,
    };
    let ports = ports.into_iter().map(port).collect();
    console("ready");
    runtime()?.block_on(serve(Setup {
        places,
        machine: Machine::Guest,
        cgroup_root: booted.cgroup_root,
        pid1: true,
        ports,
    }))?;
    Ok(())
}

fn test_mode(socket: &Path) -> Result<(), Box<dyn Error>> {
    let places = Places::beside(socket);
    let folder = suffixed(socket, ".d");
    make_folders(&places).map_err(|error| format!("{}: {error}", folder.display()))?;
    let machine = Machine::recorded(&folder.join("record"))?;
    // Orphans of programs become ours, as they would be PID 1's.
    rustix::process::set_child_subreaper(Some(getpid()))?;
    let group = own_group();
    let egress = suffixed(socket, ".egress");
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let ports = vec![
            Port {
                name: AGENT,
                source: Source::Listener(listen(socket)?),
                agent: true,
            },
            Port {
                name: EGRESS,
                source: Source::Listener(listen(&egress)?),
                agent: false,
            },
        ];
        let served = serve(Setup {
            places,
            machine: machine.clone(),
            cgroup_root: group.clone(),
            pid1: false,
            ports,
        });
        served.await?;
        machine.power_off()?;
        Ok(())
    });
    // Whoever looks for the agent finds it gone, not dead.
    drop([fs::remove_file(socket), fs::remove_file(&egress)]);
    if let Some(group) = group {
        // What still runs in it keeps it.
        drop(fs::remove_dir(group));
    }
    outcome
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn listen(path: &Path) -> Result<tokio::net::UnixListener, Box<dyn Error>> {
    // One that an earlier silkd left; anything else is not ours to remove.
    if fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path).map_err(|error| format!("{}: {error}", path.display()))?;
    listener.set_nonblocking(true)?;
    Ok(tokio::net::UnixListener::from_std(listener)?)
}

/// A cgroup of test mode's own, below the one that this process is in; none where there is no cgroup2 or no right to
/// make one.
fn own_group() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let parent = group_of(&mounts, &own)?;
    let group = parent.join(format!("silkd-{}", getpid().as_raw_nonzero()));
    fs::create_dir(&group).ok()?;
    Some(group)
}

/// Where this process's cgroup2 is, by `mountinfo` and `cgroup` of `/proc/self`. Pure.
fn group_of(mounts: &str, own: &str) -> Option<PathBuf> {
    let mount = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        after.starts_with("cgroup2 ").then(|| before.split(' ').nth(4))?
    })?;
    let inner = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // A process outside of its namespace's root has no folder here.
    (!inner.starts_with("..")).then(|| Path::new(mount).join(inner))
}

/// An error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_told_apart() {
        let of = |pid1, args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            Mode::of(pid1, &args)
        };
        assert_eq!(of(true, &[]), Mode::Guest);
        assert_eq!(of(true, &["quiet", "splash"]), Mode::Guest);
        assert_eq!(of(true, &["--serve", "a"]), Mode::Serve("a".into()));
        assert_eq!(of(false, &["--serve", "a"]), Mode::Serve("a".into()));
        assert_eq!(of(false, &["--version"]), Mode::Version);
        for bad in [
            &[][..],
            &["--serve"],
            &["--serve", ""],
            &["--serve", "a", "b"],
            &["-h"],
        ] {
            assert_eq!(of(false, bad), Mode::Usage);
        }
    }

    #[test]
    fn the_unified_group_is_found_on_both_kinds_of_host() {
        let hybrid = "33 32 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      34 32 0:29 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        let own = "4:memory:/a\n0::/user.slice\n";
        let expected = PathBuf::from("/sys/fs/cgroup/unified/user.slice");
        assert_eq!(group_of(hybrid, own), Some(expected));
        let root = group_of("30 1 0:2 / /sys/fs/cgroup rw - cgroup2 none rw", "0::/");
        assert_eq!(root, Some(PathBuf::from("/sys/fs/cgroup/")));
        assert_eq!(group_of("", own), None);
        assert_eq!(group_of(hybrid, "0::/../x"), None);
    }

    #[test]
    fn causes_are_told_once_each() {
        let error = io::Error::other("inner");
        let outer = crate::serve::ServeError::Signals(error);
        assert_eq!(chain(&outer), "signals cannot be heard: inner");
    }
}
