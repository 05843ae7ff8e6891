//! What rustix cannot do: the one file of this crate that may hold unsafe code.
//!
//! May call: nothing.
//! Never inside: a decision. One operation a block, with SAFETY and why no safe way exists.
#![expect(unsafe_code, reason = "the one home of what rustix has no safe call for")]

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
};

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
            rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC)?;
            // SAFETY: it is open, as the line above showed, and whoever started this process left it to it; the flag
            // above hands each out once. There is no safe way to own a descriptor by its number.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
