//! Terminals: a pair of master, which is ours, and terminal, which the program gets as its standard descriptors and as
//! its controlling terminal. Size, UTF-8 and owner are set before the program is born, so that its first byte sees them.
//!
//! A terminal is never hung up while its output matters: hanging up throws away what the program wrote and nobody has
//! read. Its output is over when nobody has it open any more (EIO) or, once nothing is left that could write for the
//! program, when it is empty.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use rustix::{
    fs::Uid,
    io::Errno,
    pty::OpenptFlags,
    termios::{InputModes, OptionalActions, SpecialCodeIndex, Winsize},
};
use sandbox_protocol::{
    limits::{TTY_SIDE, TTYS},
    reason::Reason,
    v1::{Size, Tty},
};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{refusal::Refusal, sys};

/// Bytes that the kernel may hold between the two ends: its buffer and the line discipline's are 12 KiB.
pub(super) const HELD: u64 = 64 * 1024;
/// What TERM says when nobody asks for something else.
const TERM: &[u8] = b"xterm-256color";

/// A terminal that is to be made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Screen {
    pub(super) size: Winsize,
    /// Whose it is; `None`: silkd's own user.
    pub(super) owner: Option<u32>,
}

/// The terminals that there are; at most [`TTYS`].
#[derive(Debug, Clone, Default)]
pub(super) struct Seats(Arc<AtomicUsize>);

/// One of them; counts until dropped.
#[derive(Debug)]
pub(super) struct Seat(Seats);

/// A terminal.
#[derive(Debug)]
pub(super) struct Pty {
    /// The master, for what the program writes.
    pub(super) output: AsyncFd<OwnedFd>,
    /// The master, for what is typed.
    pub(super) input: AsyncFd<OwnedFd>,
    /// The program's end.
    pub(super) terminal: OwnedFd,
    pub(super) seat: Seat,
}

impl Seats {
    fn take(&self) -> Result<Seat, Refusal> {
        let free = |count: usize| (count < TTYS).then_some(count + 1);
        match self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) {
            Ok(_before) => Ok(Seat(self.clone())),
            Err(_full) => {
                let message = format!("{TTYS} terminals are open");
                Err(Refusal::new(Reason::TtyLimit, message))
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The size of a terminal.
///
/// # Errors
/// `INVALID_SIZE` outside 1 to [`TTY_SIDE`].
pub(super) fn size(cols: u32, rows: u32) -> Result<Winsize, Refusal> {
    let side = |length: u32| {
        let fits = (1..=TTY_SIDE).contains(&length);
        u16::try_from(length).ok().filter(|_| fits)
    };
    let (Some(ws_col), Some(ws_row)) = (side(cols), side(rows)) else {
        let message = format!("no terminal has {cols} columns and {rows} rows: 1 to {TTY_SIDE} of each");
        return Err(Refusal::new(Reason::InvalidSize, message));
    };
    Ok(Winsize {
        ws_col,
        ws_row,
        ws_xpixel: 0,
        ws_ypixel: 0,
    })
}

/// The value of TERM.
pub(super) fn term(tty: &Tty) -> &[u8] {
    if tty.term.is_empty() { TERM } else { &tty.term }
}

fn refused(errno: Errno) -> Refusal {
    let reason = match errno {
        Errno::NOSPC => Reason::TtyLimit,
        Errno::MFILE | Errno::NFILE => Reason::FdLimit,
        Errno::NOMEM => Reason::MemoryExhausted,
        _ => Reason::AgentBug,
    };
    Refusal::new(reason, format!("a terminal cannot be made: {errno}")).with_errno(errno.raw_os_error())
}

impl Pty {
    /// Makes one.
    ///
    /// # Errors
    /// `TTY_LIMIT`, `FD_LIMIT`, `MEMORY_EXHAUSTED`.
    pub(super) fn open(seats: &Seats, screen: Screen) -> Result<Self, Refusal> {
        let seat = seats.take()?;
        // PID 1 leads a session and must not get a controlling terminal by opening one.
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags).map_err(refused)?;
        rustix::pty::unlockpt(&master).map_err(refused)?;
        // By the master and not by its name, which the guest could have put something else under.
        let terminal = rustix::pty::ioctl_tiocgptpeer(&master, flags).map_err(refused)?;
        rustix::termios::tcsetwinsize(&master, screen.size).map_err(refused)?;
        let mut modes = rustix::termios::tcgetattr(&terminal).map_err(refused)?;
        modes.input_modes |= InputModes::IUTF8;
        rustix::termios::tcsetattr(&terminal, OptionalActions::Now, &modes).map_err(refused)?;
        if let Some(uid) = screen.owner {
            rustix::fs::fchown(&terminal, Some(Uid::from_raw(uid)), None).map_err(refused)?;
        }
        rustix::io::ioctl_fionbio(&master, true).map_err(refused)?;
        let typed = rustix::io::fcntl_dupfd_cloexec(&master, 3).map_err(refused)?;
        let watch = |fd, interest| {
            sys::watch(fd, interest).map_err(|error| {
                Refusal::new(Reason::FdLimit, format!("a terminal cannot be watched: {error}"))
            })
        };
        Ok(Self {
            output: watch(master, Interest::READABLE)?,
            input: watch(typed, Interest::WRITABLE)?,
            terminal,
            seat,
        })
    }
}

/// Gives the terminal another size; the kernel tells the foreground programs (SIGWINCH).
///
/// # Errors
/// `INVALID_SIZE`.
pub(super) fn resize(master: &AsyncFd<OwnedFd>, wanted: Size) -> Result<(), Refusal> {
    let size = size(wanted.cols, wanted.rows)?;
    // A terminal takes every size; one whose program is gone needs none.
    rustix::termios::tcsetwinsize(master, size).ok();
    Ok(())
}

/// What has to be typed now to say that no more comes, in the mode that the program has put the terminal into; `None`
/// where it has switched that off.
pub(super) fn end_of_file(master: &AsyncFd<OwnedFd>) -> Option<u8> {
    let modes = rustix::termios::tcgetattr(master).ok()?;
    let code = modes.special_codes[SpecialCodeIndex::VEOF];
    (code != 0).then_some(code)
}

/// Tells a program that has just begun that nobody sits at its terminal.
pub(super) fn nobody_types(master: &AsyncFd<OwnedFd>) {
    // A fresh terminal has room for it; one whose program is gone needs none.
    rustix::io::write(master, end_of_file(master).as_slice()).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_no_terminal_has_are_refused() {
        for (cols, rows) in [(0, 1), (1, 0), (4097, 1), (1, 4097), (u32::MAX, 1), (65_537, 1)] {
            assert_eq!(size(cols, rows).unwrap_err().reason, Reason::InvalidSize);
        }
        for side in [1, 4096] {
            let size = size(side, 1).unwrap();
            assert_eq!((u32::from(size.ws_col), size.ws_row), (side, 1));
        }
    }

    #[test]
    fn seats_run_out_and_come_back() {
        let seats = Seats::default();
        let mut taken: Vec<Seat> = (0..TTYS).map(|_| seats.take().unwrap()).collect();
        assert_eq!(seats.take().unwrap_err().reason, Reason::TtyLimit);
        taken.pop();
        taken.push(seats.take().unwrap());
        assert!(seats.take().is_err());
    }
}
