//! Kernel uevents: a wait for a device that is no timer loop.
//!
//! May call: clock.
//! Never inside: what is waited for.

use std::{io, os::fd::OwnedFd, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SocketFlags, SocketType, bind,
        netlink::{self, SocketAddrNetlink},
        recv, socket_with,
    },
};

use crate::clock;

/// Subscribed from its making on, so that nothing is missed between a look and a wait.
#[derive(Debug)]
pub(super) struct Uevents(OwnedFd);

impl Uevents {
    /// Subscribes.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            flags,
            Some(netlink::KOBJECT_UEVENT),
        )?;
        bind(&socket, &SocketAddrNetlink::new(0, 1))?;
        Ok(Self(socket))
    }

    /// Looks again after every event until there is something, or the time is over (`None`).
    ///
    /// # Errors
    /// Those of the look and the kernel's.
    pub(super) fn wait_for<T>(
        &self,
        limit: Duration,
        mut look: impl FnMut() -> io::Result<Option<T>>,
    ) -> io::Result<Option<T>> {
        let end = clock::since_boot() + limit;
        loop {
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            let left = end.saturating_sub(clock::since_boot());
            let time = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&time)) {
                Ok(0) => return Ok(None),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            self.drain()?;
        }
    }

    /// What an event says is not believed, only that there was one; lost ones (ENOBUFS) mean the same.
    fn drain(&self) -> io::Result<()> {
        let mut event = [0; 4096];
        loop {
            match recv(&self.0, &mut event, RecvFlags::empty()) {
                Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_finds_needs_no_event_and_a_limit_ends_the_wait() {
        let uevents = Uevents::new().unwrap();
        let found = uevents.wait_for(Duration::from_secs(60), || Ok(Some(7))).unwrap();
        assert_eq!(found, Some(7));
        let none = uevents.wait_for(Duration::ZERO, || Ok(None::<u8>)).unwrap();
        assert_eq!(none, None);
    }
}
