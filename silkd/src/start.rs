//! From the process's arguments to a running agent: PID 1, or test mode.
//!
//! May call: agent, boot, control, door, events, link, places, refusal, scratch, serve, sys.
//! Never inside: what is served.

use std::{
    error::Error,
    ffi::OsString,
    fs, io,
    net::SocketAddr,
    os::unix::{fs::FileTypeExt as _, net::UnixListener},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::ExitCode,
};

use rustix::process::{Resource, Rlimit, getpid, getrlimit, setrlimit};
use sandbox_protocol::metadata::port::{AGENT, EGRESS};

use crate::{
    agent::info::VERSION,
    boot,
    control::{files::make_folders, machine::Machine},
    door::Listeners,
    events::console,
    link::Source,
    places::{Places, suffixed},
    refusal::chain,
    scratch::Scratch,
    serve::{Port, Setup, serve},
    sys,
};

/// As a guest's silkd has.
const DESCRIPTORS: u64 = 65_536;
const USAGE: &str = "usage: silkd --serve SOCKET [--doors HTTP_HOST:PORT,SOCKS5_HOST:PORT] | --version; without arguments only as PID 1 of a guest";

/// What the arguments ask for. Pure.
#[derive(Debug, PartialEq, Eq)]
enum Mode {
    Guest,
    /// The socket, and where the doors listen.
    Serve(PathBuf, Option<[SocketAddr; 2]>),
    Version,
    Usage,
}

impl Mode {
    /// The kernel hands words of its command line to PID 1, which are not for silkd: only `--serve` counts there.
    fn of(pid1: bool, args: &[OsString]) -> Self {
        match args {
            [flag, socket] if flag == "--serve" && !socket.is_empty() => Self::Serve(socket.into(), None),
            [flag, socket, second, doors]
                if flag == "--serve" && second == "--doors" && !socket.is_empty() =>
            {
                doors_of(doors).map_or(Self::Usage, |doors| Self::Serve(socket.into(), Some(doors)))
            }
            _ if pid1 => Self::Guest,
            [flag] if flag == "--version" => Self::Version,
            _ => Self::Usage,
        }
    }
}

/// Two addresses, the HTTP door's first.
fn doors_of(text: &OsString) -> Option<[SocketAddr; 2]> {
    let (http, socks5) = text.to_str()?.split_once(',')?;
    Some([http.parse().ok()?, socks5.parse().ok()?])
}

/// The whole program.
#[must_use]
pub fn main() -> ExitCode {
    sys::set_allocator();
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match Mode::of(getpid().is_init(), &args) {
        Mode::Guest => guest(),
        Mode::Serve(socket, doors) => match test_mode(&socket, doors) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                console(&chain(&*error));
                ExitCode::FAILURE
            }
        },
        Mode::Version => {
            use io::Write as _;
            // Whoever closed its output does not want to know.
            drop(io::stdout().write_all(format!("silkd {VERSION}\n").as_bytes()));
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
    let port = |(name, file)| Port {
        name,
        source: Source::Device(file),
        agent: name == AGENT,
    };
    let ports = booted.ports.into_iter().map(port).collect();
    console("ready");
    runtime()?.block_on(serve(Setup {
        places,
        machine: Machine::Guest,
        cgroup_root: booted.cgroup_root,
        pid1: true,
        ports,
        doors: Some(booted.doors),
    }))?;
    Ok(())
}

fn test_mode(socket: &Path, doors: Option<[SocketAddr; 2]>) -> Result<(), Box<dyn Error>> {
    let places = Places::beside(socket);
    let folder = suffixed(socket, ".d");
    make_folders(&places).map_err(|error| format!("{}: {error}", folder.display()))?;
    let machine = Machine::recorded(&folder.join("record"))?;
    more_descriptors()?;
    let group = Scratch::new(getpid().as_raw_nonzero().get());
    let egress = suffixed(socket, ".egress");
    let doors = doors
        .map(|[http, socks5]| Listeners::bind(http, socks5))
        .transpose()?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        // The agent's last: who finds it finds all.
        let second = Port {
            name: EGRESS,
            source: Source::Listener(listen(&egress)?),
            agent: false,
        };
        let first = Port {
            name: AGENT,
            source: Source::Listener(listen(socket)?),
            agent: true,
        };
        let ports = vec![first, second];
        // For whoever started it: from here on a connection is answered.
        console(&format!("serving {}", socket.display()));
        let served = serve(Setup {
            places,
            machine: machine.clone(),
            cgroup_root: group.as_ref().map(|group| group.path().to_owned()),
            pid1: false,
            ports,
            doors,
        });
        served.await?;
        machine.power_off()?;
        Ok(())
    });
    // Whoever looks for the agent finds it gone, not dead.
    drop([fs::remove_file(socket), fs::remove_file(&egress)]);
    outcome
}

/// A host's limits are made for other programs: every stream of a call takes descriptors.
fn more_descriptors() -> rustix::io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(DESCRIPTORS).min(DESCRIPTORS);
    // None is no limit.
    let current = limit.current.map(|current| current.max(most));
    setrlimit(Resource::Nofile, Rlimit { current, ..limit })
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
        assert_eq!(of(true, &["--serve", "a"]), Mode::Serve("a".into(), None));
        assert_eq!(of(false, &["--serve", "a"]), Mode::Serve("a".into(), None));
        let doors = ["127.0.0.1:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap()];
        assert_eq!(
            of(false, &["--serve", "a", "--doors", "127.0.0.1:1,127.0.0.1:2"]),
            Mode::Serve("a".into(), Some(doors))
        );
        assert_eq!(of(false, &["--version"]), Mode::Version);
        for bad in [
            &[][..],
            &["--serve"],
            &["--serve", ""],
            &["--serve", "a", "b"],
            &["--serve", "a", "--doors", "127.0.0.1:1"],
            &["-h"],
        ] {
            assert_eq!(of(false, bad), Mode::Usage);
        }
    }
}
