//! What rustix cannot do: the one file of this crate that may hold unsafe code.
//!
//! May call: nothing.
//! Never inside: a decision. One operation a block, with SAFETY and why no safe way exists.
#![expect(unsafe_code, reason = "system calls that have no safe wrapper")]

use std::{
    ffi::c_int,
    fs::File,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use tokio::io::{Interest, unix::AsyncFd};

/// `RNDADDENTROPY` of `linux/random.h`.
const ADD_ENTROPY: libc::Ioctl = 0x4008_5203;
/// `RNDRESEEDCRNG` of `linux/random.h`.
const RESEED: libc::Ioctl = 0x5207;

#[repr(C)]
struct Pool {
    entropy_bits: c_int,
    bytes: c_int,
    seed: [u8; 32],
}

/// Credits 256 bits of entropy to the kernel; `random` is `/dev/urandom` or `/dev/random`.
///
/// # Errors
/// The kernel's; `EPERM` without the right to.
pub fn add_entropy(random: &File, seed: &[u8; 32]) -> io::Result<()> {
    let pool = Pool {
        entropy_bits: 256,
        bytes: 32,
        seed: *seed,
    };
    // SAFETY: the kernel reads a rand_pool_info with 32 bytes behind it, which is what `Pool` is. No safe wrapper.
    match unsafe { libc::ioctl(random.as_raw_fd(), ADD_ENTROPY, &raw const pool) } {
        0 => Ok(()),
        _failed => Err(io::Error::last_os_error()),
    }
}

/// Makes the kernel's generator draw a new key from its entropy at once.
///
/// # Errors
/// The kernel's; `EPERM` without the right to.
pub fn reseed(random: &File) -> io::Result<()> {
    // SAFETY: takes no argument. No safe wrapper.
    match unsafe { libc::ioctl(random.as_raw_fd(), RESEED) } {
        0 => Ok(()),
        _failed => Err(io::Error::last_os_error()),
    }
}

/// Gives free memory back to the kernel.
pub fn trim() {
    // SAFETY: the allocator's own call, safe from any thread. No safe wrapper.
    unsafe { libc::malloc_trim(0) };
}

/// One arena and fixed thresholds: the adaptive ones keep holes. Once, at the start, before other threads.
pub fn set_allocator() {
    let settings = [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, 128 * 1024),
        (libc::M_TRIM_THRESHOLD, 256 * 1024),
    ];
    for (name, value) in settings {
        // SAFETY: a setting of the allocator. No safe wrapper.
        unsafe { libc::mallopt(name, value) };
    }
}

/// A descriptor that tells the runtime when it is ready; it does not block, or is only asked and never read.
///
/// # Errors
/// The kernel's: it cannot be watched.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is one open descriptor for as long as it lives, and the `AsyncFd` owns it. tokio's safe
    // constructor is deprecated, since it takes types that promise less.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(Into::into)
}
