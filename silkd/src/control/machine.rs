//! The machine: what a renewal changes outside of files. In test mode it is answered and recorded, never done.
//!
//! May call: clock, control/files, sys.
//! Never inside: a decision.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::{
    system::{RebootCommand, reboot, sethostname},
    time::{ClockId, Timespec, clock_settime},
};

use crate::{clock, sys};

/// Bytes of the host's entropy in a renewal.
pub const SEED: usize = 32;

/// Where the kernel is told from which ports connections leave.
const PORTS: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// The machine, or the record of what would have been done to it.
#[derive(Debug, Clone)]
pub enum Machine {
    /// silkd is PID 1 of it.
    Guest,
    /// Test mode.
    Recorded(Arc<Record>),
}

/// What would have been done, a line each, and the clock as it would be.
#[derive(Debug)]
pub struct Record {
    file: File,
    /// Nanoseconds that the guest's clock is ahead of the machine's.
    ahead: Mutex<i128>,
}

impl Machine {
    /// A record in this file; an old one is gone on from.
    ///
    /// # Errors
    /// The kernel's.
    pub fn recorded(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Self::Recorded(Arc::new(Record {
            file,
            ahead: Mutex::new(0),
        })))
    }

    /// Credits the host's entropy to the kernel and has it reseed. Without this two clones draw equal bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn reseed(&self, seed: &[u8; SEED]) -> io::Result<()> {
        match self {
            Self::Guest => {
                let random = OpenOptions::new().write(true).open("/dev/urandom")?;
                sys::add_entropy(&random, seed)?;
                sys::reseed(&random)
            }
            Self::Recorded(record) => record.line(&format!("entropy {} bytes", seed.len())),
        }
    }

    /// Steps the wall clock.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_clock(&self, at: Timespec) -> io::Result<()> {
        match self {
            Self::Guest => Ok(clock_settime(ClockId::Realtime, at)?),
            Self::Recorded(record) => {
                let ahead = clock::nanos(at) - clock::nanos(clock::wall());
                *record.ahead.lock().unwrap_or_else(PoisonError::into_inner) = ahead;
                record.line(&format!("clock {}.{:09}", at.tv_sec, at.tv_nsec))
            }
        }
    }

    /// The wall clock, as the guest sees it.
    #[must_use]
    pub fn now(&self) -> Timespec {
        match self {
            Self::Guest => clock::wall(),
            Self::Recorded(record) => {
                let ahead = *record.ahead.lock().unwrap_or_else(PoisonError::into_inner);
                clock::from_nanos(clock::nanos(clock::wall()) + ahead)
            }
        }
    }

    /// Sets the kernel's host name.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_hostname(&self, name: &str) -> io::Result<()> {
        match self {
            Self::Guest => Ok(sethostname(name.as_bytes())?),
            Self::Recorded(record) => record.line(&format!("hostname {name}")),
        }
    }

    /// From which ports the kernel lets connections leave.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_ports(&self, (first, last): (u16, u16)) -> io::Result<()> {
        match self {
            Self::Guest => {
                let mut file = OpenOptions::new().write(true).open(PORTS)?;
                file.write_all(format!("{first} {last}").as_bytes())
            }
            Self::Recorded(record) => record.line(&format!("ports {first} {last}")),
        }
    }

    /// Writes out what file systems hold; blocks.
    ///
    /// # Errors
    /// Of the record.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::Guest => {
                rustix::fs::sync();
                Ok(())
            }
            Self::Recorded(record) => record.line("sync"),
        }
    }

    /// Ends the machine; in test mode only the record says so. On a machine it does not return.
    ///
    /// # Errors
    /// The kernel's.
    pub fn power_off(&self) -> io::Result<()> {
        match self {
            Self::Guest => Ok(reboot(RebootCommand::PowerOff)?),
            Self::Recorded(record) => record.line("power off"),
        }
    }
}

impl Record {
    fn line(&self, text: &str) -> io::Result<()> {
        (&self.file).write_all(format!("{text}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_clock_runs_on_from_where_it_was_set() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let machine = Machine::recorded(&path).unwrap();
        let before = clock::nanos(clock::wall());
        machine
            .set_clock(Timespec {
                tv_sec: 1_000,
                tv_nsec: 5,
            })
            .unwrap();
        machine.set_hostname("a").unwrap();
        machine.power_off().unwrap();
        let shown = clock::nanos(machine.now());
        let passed = clock::nanos(clock::wall()) - before;
        assert!((1_000_000_000_005..=1_000_000_000_005 + passed).contains(&shown));
        let record = std::fs::read_to_string(path).unwrap();
        assert_eq!(record, "clock 1000.000000005\nhostname a\npower off\n");
    }
}
