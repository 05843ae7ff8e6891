//! The configuration: a TOML file read strictly, every mistake told at once, and what may change without a restart.
//!
//! May call: policy, words.
//! Never inside: a key's default or its name anywhere else; the environment.
//! Cancel safety: nothing here waits.

mod check;
mod dev;
#[cfg(test)]
mod egress_tests;
mod mistake;
mod pool;
mod reload;
#[cfg(test)]
mod tests;
mod types;
mod values;
mod walk;

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

pub use self::{
    dev::{DevError, DevOptions},
    mistake::{Mistake, Mistakes},
    pool::{PoolFault, PoolFields},
    reload::{Diff, diff, in_force},
    types::{
        AccelWish, Access, Config, Egress, EgressTls, Engine, ImageName, Journal, Listen, Log, LogFormat,
        Net, Node, PoolConfig, Role, Stub, StubAgent, Sync, Tcp, Template, Tenant, TenantPools, Tls, Token,
    },
};
use crate::words::MemBytes;

/// Where the configuration lies unless said otherwise.
pub const DEFAULT_FILE: &str = "/etc/sandboxd/sandboxd.toml";
/// Largest file that is read: a thousand times a large one.
const FILE_MAX: u64 = 1 << 20;

/// What defaults depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The host's name.
    pub name: String,
    /// Its memory.
    pub memory: MemBytes,
    /// Its processors.
    pub cores: u16,
}

impl Host {
    /// This host, as the kernel tells it.
    #[must_use]
    pub fn look() -> Self {
        let system = rustix::system::sysinfo();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            memory: MemBytes(system.totalram.saturating_mul(u64::from(system.mem_unit))),
            cores: u16::try_from(cores).unwrap_or(u16::MAX),
        }
    }
}

/// Why there is no configuration. Reason: `CONFIG_INVALID`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is too long to be one.
    #[error("{} is longer than 1 MiB", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The file is wrong; the mistakes say where.
    #[error("{0}")]
    Wrong(Mistakes),
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It cannot be read, or holds mistakes: all of them are told.
    pub fn read(path: &Path, host: &Host) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Read {
            path: path.to_owned(),
            source,
        };
        let mut text = String::new();
        let mut file = File::open(path).map_err(failed)?.take(FILE_MAX + 1);
        file.read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > FILE_MAX {
            return Err(ConfigError::TooLong {
                path: path.to_owned(),
            });
        }
        Self::parse(&text, path, host).map_err(ConfigError::Wrong)
    }

    /// What an empty file says.
    ///
    /// # Panics
    /// Never: that the defaults are sound is tested.
    #[must_use]
    pub fn defaults(host: &Host) -> Self {
        Self::parse("", Path::new(DEFAULT_FILE), host).expect("the defaults are sound")
    }

    /// Checks the text of a file; `path` only stands in what is told.
    ///
    /// # Errors
    /// Every mistake of it.
    pub fn parse(text: &str, path: &Path, host: &Host) -> Result<Self, Mistakes> {
        check::check(text, host).map_err(|all| Mistakes::new(path, text, all))
    }
}
