//! A guest of a daemon's sandbox: a namespace whose card is spliced to the sandbox's TAP, as a VMM would.

use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd as _, OwnedFd},
    thread::JoinHandle,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use sandboxd::net::{GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, HOST_MAC, HTTP_PORT};

use crate::bench::Space;

/// How long a dial that nobody answers is given: a door answers in less than a millisecond.
const SILENCE: Duration = Duration::from_secs(1);
/// Against a hang.
const LIMIT: Duration = Duration::from_secs(30);

/// The queue of the TAP that a process holds, in another hand, and the TAP's name.
pub(crate) fn tap_of(pid: u32) -> (File, String) {
    let pid = i32::try_from(pid).unwrap();
    let tap = fs::read_dir(format!("/proc/{pid}/fdinfo"))
        .unwrap()
        .find_map(|entry| {
            let entry = entry.unwrap();
            let info = fs::read_to_string(entry.path()).ok()?;
            let name = info
                .lines()
                .find_map(|line| line.strip_prefix("iff:\t"))?
                .to_owned();
            let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
            Some((number, name))
        });
    let (number, name) = tap.expect("it holds a TAP");
    let process = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let queue = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).unwrap();
    (queue.into(), name)
}

/// The guest. Dropping it lets go of the TAP.
pub(crate) struct Guest {
    pub(crate) space: Space,
    pub(crate) tap: String,
    stop: OwnedFd,
    pump: Option<JoinHandle<()>>,
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

impl Guest {
    /// Of the sandbox that this process runs.
    pub(crate) fn of(pid: u32) -> Self {
        let (queue, tap) = tap_of(pid);
        Self::behind(queue, tap)
    }

    /// The one that has this TAP, by its queue.
    pub(crate) fn behind(queue: File, tap: String) -> Self {
        let space = Space::new();
        space.set("ipv6/conf/all/disable_ipv6", "1");
        space.set("ipv6/conf/default/disable_ipv6", "1");
        let card = space.run(|| {
            let card = OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/net/tun")
                .unwrap();
            sandboxd::sys::attach_tap(&card, "eth0").unwrap();
            card
        });
        for line in [
            format!("ip link set eth0 address {} up", mac(GUEST_MAC)),
            format!("ip addr add {GUEST_ADDRESS}/32 peer {HOST_ADDRESS} dev eth0"),
            format!(
                "ip neigh replace {HOST_ADDRESS} lladdr {} nud permanent dev eth0",
                mac(HOST_MAC)
            ),
        ] {
            space.command(&line);
        }
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let stopped = stop.try_clone().unwrap();
        Self {
            space,
            tap,
            stop,
            pump: Some(std::thread::spawn(move || pump(queue, card, &stopped))),
        }
    }

    /// What the HTTP door says to these bytes, up to its end; none: it cannot be reached.
    pub(crate) fn said(&self, bytes: String) -> Option<String> {
        self.said_by(HOST_ADDRESS, bytes)
    }

    /// A proxy within the guest that passes everything on to the HTTP door, from the same port of loopback. It ends with
    /// the test.
    pub(crate) fn proxy(&self) -> Ipv4Addr {
        self.space.command("ip link set lo up");
        let listener = self
            .space
            .run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, HTTP_PORT)).unwrap());
        // Each connection belongs to the namespace of the thread that opened it.
        self.space.beside(move || {
            for program in listener.incoming() {
                let program = program.unwrap();
                let door = TcpStream::connect((HOST_ADDRESS, HTTP_PORT)).unwrap();
                let (from, to) = (program.try_clone().unwrap(), door.try_clone().unwrap());
                std::thread::spawn(move || pass(from, to));
                std::thread::spawn(move || pass(door, program));
            }
        });
        Ipv4Addr::LOCALHOST
    }

    /// A connection to the HTTP door that has said this and been answered.
    pub(crate) fn open(&self, bytes: String) -> TcpStream {
        self.space.run(move || {
            let mut stream = TcpStream::connect((HOST_ADDRESS, HTTP_PORT)).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream.write_all(bytes.as_bytes()).unwrap();
            assert!(stream.read(&mut [0; 64]).unwrap() > 0);
            stream
        })
    }

    /// What is said at the port of the HTTP door of another address.
    pub(crate) fn said_by(&self, door: Ipv4Addr, bytes: String) -> Option<String> {
        self.space.run(move || {
            let door = SocketAddr::from((door, HTTP_PORT));
            let mut stream = TcpStream::connect_timeout(&door, LIMIT).ok()?;
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut all = String::new();
            let talk = stream
                .write_all(bytes.as_bytes())
                .and_then(|()| stream.shutdown(Shutdown::Write))
                .and_then(|()| stream.read_to_string(&mut all));
            match talk {
                Ok(_) => Some(all),
                // It was cut.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
                Err(error) => panic!("{error}"),
            }
        })
    }

    /// Whether it gets a connection to this port of its host.
    pub(crate) fn reaches(&self, port: u16) -> bool {
        self.space.run(move || {
            let at = SocketAddr::from((HOST_ADDRESS, port));
            TcpStream::connect_timeout(&at, SILENCE).is_ok()
        })
    }

    /// The first line of what it says to a GET.
    pub(crate) fn get(&self, url: &str) -> Option<String> {
        let said = self.said(format!("GET {url} HTTP/1.1\r\nhost: x\r\n\r\n"))?;
        Some(said.lines().next().unwrap_or_default().to_owned())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).unwrap();
        if let Some(pump) = self.pump.take() {
            // One that panicked leaves the test without answers, which fails it.
            drop(pump.join());
        }
    }
}

/// Copies one direction to its end; a loss is told by an end.
fn pass(mut from: TcpStream, mut to: TcpStream) {
    drop(std::io::copy(&mut from, &mut to));
    drop(to.shutdown(Shutdown::Write));
}

/// Copies frames both ways until it is stopped.
fn pump(mut tap: File, mut card: File, stop: &OwnedFd) {
    let mut frame = vec![0; 4_096];
    loop {
        let ready = {
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&tap, PollFlags::IN),
                PollFd::from_borrowed_fd(card.as_fd(), PollFlags::IN),
            ];
            poll(&mut fds, None).unwrap();
            fds.map(|fd| fd.revents().contains(PollFlags::IN))
        };
        if ready[0] {
            return;
        }
        forward(ready[1], &mut frame, &mut tap, &mut card);
        forward(ready[2], &mut frame, &mut card, &mut tap);
    }
}

fn forward(is_ready: bool, frame: &mut [u8], from: &mut File, to: &mut File) {
    if is_ready && let Ok(length) = from.read(frame) {
        // A link that is down takes none, and so does a real card.
        drop(to.write(&frame[..length]));
    }
}
