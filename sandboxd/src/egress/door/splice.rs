//! Bytes of a tunnel that the kernel moves from socket to socket, through a pipe, and that never come into this process.
//!
//! The beginning of a direction is copied: most tunnels say little, and a pipe is two descriptors and a call to make. From
//! then on the direction has a pipe, if this node has one to spare; else it is copied on.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    net::{SendFlags, Shutdown},
    pipe::{PipeFlags, SpliceFlags, pipe_with, splice},
    process::{Resource, getrlimit},
};
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};

use super::tunnel::BUFFER;

/// Pipes of all tunnels of this node, two descriptors each. A tunnel has two at most, one for each direction, and one where
/// one side alone says much.
const PIPES: u64 = 4_096;
/// Of the descriptors that the process may have, one in so many pipes: they take an eighth.
const SHARE: u64 = 16;
/// Bytes of a direction that are copied before it asks for a pipe, and before it asks again where there was none.
const COPIED: usize = 64 * 1024;
/// Bytes moved at once, so that one tunnel does not hold up the others of its thread. A pipe keeps the size that the kernel
/// gives it, 16 pieces of at most a page, or of what its network card put together.
const PIECE: usize = 256 * 1024;

/// Pipes that may still be made; a handle.
#[derive(Debug, Clone)]
pub(in crate::egress) struct Pipes(Arc<Semaphore>);

impl Pipes {
    /// As many at once as this process has descriptors for.
    pub(in crate::egress) fn of_this_process() -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self::new(usize::try_from(PIPES.min(descriptors / SHARE)).unwrap_or(0))
    }

    /// So many at once.
    pub(in crate::egress) fn new(most: usize) -> Self {
        Self(Arc::new(Semaphore::new(most)))
    }

    /// A pipe, unless too many are in use or the kernel has none.
    fn make(&self) -> Option<Pipe> {
        let place = Arc::clone(&self.0).try_acquire_owned().ok()?;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        Some(Pipe {
            read,
            write,
            _place: place,
        })
    }

    #[cfg(test)]
    pub(in crate::egress) fn left(&self) -> usize {
        self.0.available_permits()
    }
}

/// A pipe, and its place among those of this node.
#[derive(Debug)]
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    _place: OwnedSemaphorePermit,
}

/// One direction of a tunnel between two sockets.
pub(super) struct Way<'a, R, W> {
    pub(super) from: &'a TcpStream,
    pub(super) to: &'a TcpStream,
    /// Told of bytes that were read, and of bytes that were written.
    pub(super) has_read: R,
    pub(super) has_written: W,
    /// Counts up with whatever moves.
    pub(super) moved: &'a AtomicU64,
}

impl<R: Fn(usize), W: Fn(usize)> Way<'_, R, W> {
    /// Moves all that comes, behind what was `early`, and says that this was all. Cancel safe: what was read and not written
    /// is lost with it.
    pub(super) async fn pump(&self, early: &[u8], pipes: &Pipes) -> io::Result<()> {
        self.write(early).await?;
        if let Some(pipe) = self.copy(pipes).await? {
            self.splice(&pipe).await?;
        }
        // Whoever is gone needs no end, and is told apart by what it says next.
        match rustix::net::shutdown(self.to, Shutdown::Write) {
            Err(rustix::io::Errno::NOTCONN) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Copies until there is a pipe, which it gives, or nothing more comes.
    async fn copy(&self, pipes: &Pipes) -> io::Result<Option<Pipe>> {
        let mut buffer = vec![0; BUFFER];
        let mut copied = 0;
        loop {
            let read = || Ok(rustix::io::read(self.from, &mut *buffer)?);
            let n = self.from.async_io(Interest::READABLE, read).await?;
            if n == 0 {
                return Ok(None);
            }
            (self.has_read)(n);
            self.write(buffer.get(..n).unwrap_or_default()).await?;
            copied += n;
            if copied >= COPIED {
                copied = 0;
                if let Some(pipe) = pipes.make() {
                    return Ok(Some(pipe));
                }
            }
        }
    }

    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let write = || Ok(rustix::net::send(self.to, bytes, SendFlags::NOSIGNAL)?);
            let n = self.to.async_io(Interest::WRITABLE, write).await?;
            self.wrote(n);
            bytes = bytes.get(n..).unwrap_or_default();
        }
        Ok(())
    }

    fn wrote(&self, n: usize) {
        (self.has_written)(n);
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Moves all that comes through an empty pipe. It is filled only when it is empty, so that a call that would wait waits
    /// for a socket.
    async fn splice(&self, pipe: &Pipe) -> io::Result<()> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        loop {
            let fill = || Ok(splice(self.from, None, &pipe.write, None, PIECE, flags)?);
            let mut held = self.from.async_io(Interest::READABLE, fill).await?;
            if held == 0 {
                return Ok(());
            }
            (self.has_read)(held);
            while held > 0 {
                let empty = || Ok(splice(&pipe.read, None, self.to, None, held, flags)?);
                let n = self.to.async_io(Interest::WRITABLE, empty).await?;
                self.wrote(n);
                held = held.saturating_sub(n);
            }
        }
    }
}
