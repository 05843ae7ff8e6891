//! What rustix cannot do: the one file of this crate that may hold unsafe code.
//!
//! May call: nothing.
//! Never inside: a decision. One operation a block, with SAFETY and why no safe way exists.
#![expect(unsafe_code, reason = "the one home of what rustix has no safe call for")]

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::process::CommandExt as _,
    },
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    io::FdFlags,
    process::{Resource, Rlimit},
};
use tokio::io::{Interest, unix::AsyncFd};

/// What a child makes of itself between fork and exec.
#[derive(Debug)]
pub struct ChildSetup {
    /// Its working directory.
    pub dir: OwnedFd,
    /// Its identity file, not open for writing: it is locked for as long as the process lives, which keeps this under its own
    /// number.
    pub lock: OwnedFd,
    /// The identity file once more, open for appending `PID STARTED\n`, and closed by exec: what the process becomes
    /// cannot take it back.
    pub identity: OwnedFd,
    /// `cgroup.procs` of a group that it shall enter; that it could not is no failure.
    pub group: Option<OwnedFd>,
    /// Descriptors that it keeps under their own numbers, beside `lock`; all others above 2 are closed.
    pub keep: Vec<OwnedFd>,
    /// Bytes beyond which it can extend no file; a write beyond fails with EFBIG and does not end it.
    pub file_limit: Option<u64>,
}

/// Makes the command set its child up so: in a session of its own, locked to its identity file, without core dumps.
/// A step that fails makes `Command::spawn` fail with its error. The parent's copies of the descriptors close with the
/// command.
pub fn set_up_child(command: &mut Command, setup: ChildSetup) {
    let set_up = move || {
        rustix::process::setsid()?;
        rustix::process::fchdir(&setup.dir)?;
        close_others_on_exec()?;
        for fd in &setup.keep {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        rustix::io::fcntl_setfd(&setup.lock, FdFlags::empty())?;
        no_more_than(Resource::Core, 0)?;
        if let Some(limit) = setup.file_limit {
            ignore_file_size_signal()?;
            no_more_than(Resource::Fsize, limit)?;
        }
        if let Some(group) = &setup.group {
            // Outside its group it runs as well; whoever made the group looks whether it came.
            rustix::io::write(group, b"0").ok();
        }
        rustix::fs::flock(&setup.lock, FlockOperation::NonBlockingLockExclusive)?;
        write_identity(&setup.identity)
    };
    // SAFETY: the closure runs in a forked child of a threaded process. It makes system calls only, on descriptors that it
    // owns and buffers on its stack; it neither allocates, locks nor panics. Only `pre_exec` runs code at that place.
    unsafe { command.pre_exec(set_up) };
}

fn no_more_than(resource: Resource, limit: u64) -> io::Result<()> {
    let limit = Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    };
    Ok(rustix::process::setrlimit(resource, limit)?)
}

/// Appends `PID STARTED\n` of the calling process, in one call. Allocates nothing.
fn write_identity(file: &OwnedFd) -> io::Result<()> {
    let stat = rustix::fs::open(
        c"/proc/self/stat",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut bytes = [0_u8; 1024];
    let n = rustix::io::read(&stat, &mut bytes)?;
    let unreadable = || io::Error::from_raw_os_error(libc::EPROTO);
    let text = bytes.get(..n).ok_or_else(unreadable)?;
    let (pid, started) = pid_and_start(text).ok_or_else(unreadable)?;
    let mut line = [0_u8; 64];
    let parts = pid.iter().chain(b" ").chain(started).chain(b"\n");
    let mut length = 0;
    for (place, byte) in line.iter_mut().zip(parts) {
        *place = *byte;
        length += 1;
    }
    rustix::io::write(file, line.get(..length).unwrap_or_default())?;
    Ok(())
}

/// Process id and start time (fields 1 and 22, the second in clock ticks since boot) of a `/proc/PID/stat`. The name
/// between them is the process's own to choose, hence the search for the last parenthesis.
#[must_use]
pub fn pid_and_start(stat: &[u8]) -> Option<(&[u8], &[u8])> {
    let pid = stat.split(|byte| *byte == b' ').next()?;
    let behind_name = stat.iter().rposition(|byte| *byte == b')')?;
    let started = stat.get(behind_name..)?.split(|byte| *byte == b' ').nth(20)?;
    let digits = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    (digits(pid) && digits(started)).then_some((pid, started))
}

/// Registers a descriptor with the runtime, to wait until it is ready. Not for regular files.
///
/// # Errors
/// The kernel's, for a descriptor that cannot be waited for.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and is the same number until it is dropped, and only the `AsyncFd` drops it. tokio's
    // safe form is deprecated, since it takes types for which that does not hold.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// Makes every descriptor above 2 close at exec, also those that a C library opened without the flag.
fn close_others_on_exec() -> io::Result<()> {
    let flags = i32::try_from(libc::CLOSE_RANGE_CLOEXEC).map_err(|_range| io::ErrorKind::InvalidInput)?;
    // SAFETY: with this flag the call only marks descriptors and touches no memory. rustix does not have it.
    told(unsafe { libc::close_range(3, libc::c_uint::MAX, flags) })
}

/// Lets a write beyond the file size limit fail instead of ending the process; outlives exec.
fn ignore_file_size_signal() -> io::Result<()> {
    // SAFETY: SIG_IGN is a valid disposition and runs no code. rustix has no safe form of it.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Supplementary groups of the process at the other end of a connected Unix socket, as of its connecting
/// (`SO_PEERGROUPS`, Linux 4.13).
///
/// # Errors
/// The kernel's.
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 32];
    loop {
        let mut bytes = socklen(&groups)?;
        // SAFETY: the kernel writes at most `bytes` bytes to the vector, which has that many. rustix 1.1 does not have
        // this option.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        // Also set when the groups do not fit: to what they need.
        let needed = usize::try_from(bytes).unwrap_or(0) / size_of::<u32>();
        if result == 0 {
            groups.truncate(needed);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || needed <= groups.len() {
            return Err(error);
        }
        groups.resize(needed, 0);
    }
}

fn socklen(groups: &[u32]) -> io::Result<libc::socklen_t> {
    libc::socklen_t::try_from(size_of_val(groups)).map_err(io::Error::other)
}

/// First descriptor that systemd passes (`sd_listen_fds(3)`).
const PASSED_FROM: RawFd = 3;

/// The `count` descriptors that systemd passed to this process, in order, closed on exec from now on. They can be taken
/// once; a second call gets none.
///
/// # Errors
/// `EBADF` if fewer are open; the others are closed then.
pub fn passed_sockets(count: u16) -> io::Result<Vec<OwnedFd>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    (PASSED_FROM..PASSED_FROM + RawFd::from(count))
        .map(|fd| {
            // SAFETY: it is not negative, and used at once, for a call that only fails if nothing is open there. There
            // is no safe way to name a descriptor by its number.
            let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC)?;
            // SAFETY: it is open, as the line above showed, and whoever started this process left it to it; the flag
            // above hands each out once. There is no safe way to own a descriptor by its number.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        })
        .collect()
}

/// Moves the calling thread, and it alone, into a network namespace of its own.
///
/// # Errors
/// The kernel's: EPERM without the right to, EINVAL where it has no namespaces.
pub fn new_network_namespace() -> io::Result<()> {
    // SAFETY: this flag changes what the thread's later sockets belong to; memory and descriptors stay as they are. rustix's
    // call is unsafe for the sake of other flags.
    Ok(unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }?)
}

/// Makes an open `/dev/net/tun` the queue of a TAP, which is made if there is none of that name in the namespace of the
/// thread that opened it. Frames come and go plain, with nothing before them. The link outlives the descriptor.
///
/// # Errors
/// The kernel's: EBUSY while another process has its queue, EPERM without the right to, EINVAL for a name that is too
/// long or that of another kind of link.
pub fn attach_tap(tun: impl AsFd, name: &str) -> io::Result<()> {
    let flags = libc::c_short::try_from(libc::IFF_TAP | libc::IFF_NO_PI).map_err(io::Error::other)?;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags },
    };
    // The last byte stays NUL.
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    let tun = tun.as_fd().as_raw_fd();
    // SAFETY: the kernel reads and writes one `ifreq`, which lives through the call. rustix has no call for it.
    if unsafe { libc::ioctl(tun, libc::TUNSETIFF, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: this request takes its argument by value and touches no memory. rustix has no call for it.
    if unsafe { libc::ioctl(tun, libc::TUNSETPERSIST, 1) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Bytes of a TCP connection, its end included, that the other side has not acknowledged.
///
/// # Errors
/// The kernel's.
pub fn unacknowledged(socket: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one `int`, which lives through the call. rustix has no call for it.
    if unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    u32::try_from(bytes).map_err(io::Error::other)
}

/// Has a bind to port 0 choose no port: connecting does, and ports are shared between destinations as without a bind
/// (`IP_BIND_ADDRESS_NO_PORT`, Linux 4.2; for IPv6 too).
///
/// # Errors
/// The kernel's.
pub fn bind_without_port(socket: impl AsFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of_val(&on)).map_err(io::Error::other)?;
    // SAFETY: the kernel reads one `int`, which lives through the call. rustix 1.1 does not have this option.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_BIND_ADDRESS_NO_PORT,
            (&raw const on).cast(),
            length,
        )
    };
    told(result)
}

/// What a call of libc came to.
fn told(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Binds a socket to one interface of its namespace: it hears what comes by it alone, and what it sends leaves by it.
///
/// # Errors
/// The kernel's: ENODEV if there is none of that name, EPERM without the right to.
pub fn bind_to_interface(socket: impl AsFd, name: &str) -> io::Result<()> {
    let length = libc::socklen_t::try_from(name.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads `length` bytes of the name, which has that many. rustix 1.1 does not have this option.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            name.as_ptr().cast(),
            length,
        )
    };
    told(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_cannot_forge_its_start_by_its_name() {
        let fields = |name: &str| format!("77 ({name}) S 1{} 4242 0 0\n", " 0".repeat(17));
        for name in [
            "cat",
            "a b",
            "x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 (y",
            ")",
        ] {
            let text = fields(name);
            assert_eq!(
                pid_and_start(text.as_bytes()),
                Some((&b"77"[..], &b"4242"[..])),
                "{text}"
            );
        }
        for bad in ["", "77 (cat", "x (cat) S 1", "77 (cat) S 1 2 3"] {
            assert_eq!(pid_and_start(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn own_groups_are_seen_through_a_socket() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut seen = peer_groups(&here).unwrap();
        let mut own: Vec<u32> = rustix::process::getgroups()
            .unwrap()
            .into_iter()
            .map(rustix::process::Gid::as_raw)
            .collect();
        seen.sort_unstable();
        own.sort_unstable();
        assert_eq!(seen, own);
    }
}
