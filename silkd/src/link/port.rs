//! A port's descriptor, read and written without waiting.
//!
//! May call: sys.
//! Never inside: a meaning of the bytes.
//!
//! tokio takes a hang-up for final and reports it for ever. On a virtio port it is not: it means that no host is
//! connected just now. So the descriptor sits edge-triggered in an epoll instance of its own, and tokio watches that
//! instance, which never hangs up.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    task::{Context, Poll, ready},
};

use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};
use sandbox_protocol::limits::LINK_FRAME;
use tokio::{
    io::{Interest, unix::AsyncFd},
    task::coop::poll_proceed,
};

use crate::sys;

/// Bytes of one write at most: a whole frame of HTTP/2 and the small ones that wait before it, since every write on a virtio
/// port is an exit to the VMM. 128 buffers of a virtio queue then hold 2 MiB ahead of a small reply.
pub const WRITE: usize = LINK_FRAME as usize + FRAME_HEAD + SMALL;
/// Length, kind, flags and stream of a frame (RFC 9113, section 4.1).
const FRAME_HEAD: usize = 9;
/// Heads of replies, settings, windows.
const SMALL: usize = 1024;
/// A virtio port takes no more at once (`port_fops_write` of Linux).
const _: () = assert!(WRITE <= 32 * 1024);

/// A port, opened and non-blocking.
#[derive(Debug)]
pub struct Port {
    file: OwnedFd,
    edges: AsyncFd<OwnedFd>,
    readable: bool,
    writable: bool,
}

impl Port {
    /// Takes a descriptor that is non-blocking.
    ///
    /// # Errors
    /// The kernel's, when it cannot be watched.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let edges = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&edges, &file, epoll::EventData::new_u64(0), flags)?;
        Ok(Self {
            file,
            edges: sys::watch(edges, Interest::READABLE)?,
            readable: true,
            writable: true,
        })
    }

    /// Reads what there is. 0: no host is connected; on a virtio port one may come, on a socket none will.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        // A host that sends without end leaves the other tasks their turn.
        let turn = ready!(poll_proceed(cx));
        loop {
            if self.readable {
                match rustix::io::read(&self.file, &mut *into) {
                    Ok(n) => {
                        self.readable = n > 0;
                        turn.made_progress();
                        return Poll::Ready(Ok(n));
                    }
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => self.readable = false,
                    Err(errno) => return Poll::Ready(Err(errno.into())),
                }
            }
            ready!(self.poll_edges(cx))?;
        }
    }

    /// Writes at most [`WRITE`] bytes.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let from = from.get(..WRITE).unwrap_or(from);
        loop {
            if self.writable {
                match rustix::io::write(&self.file, from) {
                    Ok(n) => return Poll::Ready(Ok(n)),
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => self.writable = false,
                    Err(errno) => return Poll::Ready(Err(errno.into())),
                }
            }
            ready!(self.poll_edges(cx))?;
        }
    }

    /// Takes the edges that there were. Reader and writer of a port are polled by one task, so one waker does.
    fn poll_edges(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.edges.poll_read_ready(cx))?;
            let mut room = [MaybeUninit::uninit(); 1];
            let (seen, _) = match epoll::wait(guard.get_inner(), &mut room, Some(&Timespec::default())) {
                Ok(seen) => seen,
                Err(Errno::INTR) => continue,
                Err(errno) => return Poll::Ready(Err(errno.into())),
            };
            let Some(event) = seen.first() else {
                guard.clear_ready();
                continue;
            };
            let flags = event.flags;
            let both = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            self.readable |= flags.intersects(epoll::EventFlags::IN | both);
            self.writable |= flags.intersects(epoll::EventFlags::OUT | both);
            return Poll::Ready(Ok(()));
        }
    }
}
