//! Our ends of a tool's pipes; none of them blocks.

use std::{io, os::fd::OwnedFd};

use bytes::Bytes;
use rustix::{buffer::spare_capacity, io::Errno};
use tokio::io::unix::AsyncFd;

/// The next bytes, `room` at most; none at the end. Cancel safe.
pub(super) async fn read(pipe: &AsyncFd<OwnedFd>, room: usize) -> io::Result<Bytes> {
    loop {
        let mut ready = pipe.readable().await?;
        let mut bytes = Vec::with_capacity(room);
        match rustix::io::read(pipe, spare_capacity(&mut bytes)) {
            Ok(_n) => return Ok(fitting(bytes)),
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What is in the pipe now, `room` at most, without waiting for more.
pub(super) fn left(pipe: &AsyncFd<OwnedFd>, room: usize) -> Bytes {
    let there = rustix::io::ioctl_fionread(pipe).unwrap_or(0);
    let mut bytes = Vec::with_capacity(usize::try_from(there).unwrap_or(room).min(room));
    if bytes.capacity() > 0 {
        // Nothing there, or nobody: as good as nothing.
        rustix::io::read(pipe, spare_capacity(&mut bytes)).ok();
    }
    fitting(bytes)
}

/// Writes some of it; gives how many bytes. Cancel safe.
pub(super) async fn write(pipe: &AsyncFd<OwnedFd>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        let mut ready = pipe.writable().await?;
        match rustix::io::write(pipe, bytes) {
            Ok(n) => return Ok(n),
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Without the room that was not used: whoever keeps some bytes keeps no more than those.
fn fitting(mut bytes: Vec<u8>) -> Bytes {
    bytes.shrink_to_fit();
    bytes.into()
}
