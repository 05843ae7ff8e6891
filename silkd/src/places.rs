//! Where silkd's own files are: `/run/silkd` and the like in a guest, folders of `<socket>.d` in test mode.
//!
//! May call: nothing.
//! Never inside: reading or writing them.

use std::path::{Path, PathBuf};

/// The folders and files that silkd uses outside of its link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// silkd's own, 0700: `/run/silkd`.
    pub run_silkd: PathBuf,
    /// What programs may watch, 0755: `/run/sandbox`.
    pub run_sandbox: PathBuf,
    /// The image's settings for silkd: `/etc/silkd`.
    pub etc_silkd: PathBuf,
    /// The image's hooks: `/etc/sandbox`.
    pub etc_sandbox: PathBuf,
    /// `/etc/hosts`.
    pub hosts: PathBuf,
    /// `/etc/machine-id`.
    pub machine_id: PathBuf,
    /// The file that is bound over the kernel's boot id.
    pub boot_id: PathBuf,
}

impl Places {
    /// Those of a guest.
    #[must_use]
    pub fn guest() -> Self {
        Self::under(Path::new("/"))
    }

    /// Those of test mode, below `<socket>.d`.
    #[must_use]
    pub fn beside(socket: &Path) -> Self {
        Self::under(&suffixed(socket, ".d"))
    }

    fn under(root: &Path) -> Self {
        Self {
            run_silkd: root.join("run/silkd"),
            run_sandbox: root.join("run/sandbox"),
            etc_silkd: root.join("etc/silkd"),
            etc_sandbox: root.join("etc/sandbox"),
            hosts: root.join("etc/hosts"),
            machine_id: root.join("etc/machine-id"),
            boot_id: root.join("run/silkd/boot_id"),
        }
    }

    /// The generation as text.
    #[must_use]
    pub fn generation(&self) -> PathBuf {
        self.run_sandbox.join("generation")
    }

    /// The generation as a little-endian `u64`, to be mapped.
    #[must_use]
    pub fn generation_bin(&self) -> PathBuf {
        self.run_sandbox.join("generation.bin")
    }

    /// The sandbox's id.
    #[must_use]
    pub fn id(&self) -> PathBuf {
        self.run_sandbox.join("id")
    }

    /// Hooks of a renewal.
    #[must_use]
    pub fn hooks(&self) -> PathBuf {
        self.etc_sandbox.join("renew.d")
    }
}

/// The path with something behind its name.
#[must_use]
pub fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
