//! What there is to know of a host.

use std::path::PathBuf;

use crate::{
    net::Found,
    words::{Accel, EngineKind, MemBytes, Name},
};

/// What other rooms found out by use.
#[derive(Debug, Clone, Default)]
pub struct Given {
    /// QEMU's version, or why it does not start. `None`: the stub engine needs none.
    pub qemu: Option<Result<String, String>>,
    /// The accelerator and how it was chosen. `None`: not tried yet.
    pub accel: Option<(Accel, String)>,
    /// Each image that a template names, and its digest or what is wrong with it.
    pub images: Vec<(String, Result<String, String>)>,
}

/// What is so on this host; [`look`](super::look()) finds it out, [`judge`](super::judge()) says what it means.
#[derive(Debug, Clone)]
pub struct Facts {
    /// `engine.kind`.
    pub engine: EngineKind,
    /// What other rooms found.
    pub given: Given,
    /// Whether `/dev/kvm` opens, or why not.
    pub kvm: Result<(), String>,
    /// The host's memory.
    pub memory: MemBytes,
    /// `node.memory`.
    pub budget: MemBytes,
    /// Whether a sealed memory file can be made, or why not.
    pub memfd: Result<(), String>,
    /// Control groups.
    pub cgroup: Cgroup,
    /// `node.state_dir`.
    pub state_dir: (PathBuf, Folder),
    /// `node.run_dir`.
    pub run_dir: (PathBuf, Folder),
    /// Folder of `listen.unix`.
    pub socket_dir: (PathBuf, Folder),
    /// Whether we are root.
    pub root: bool,
    /// `engine.vm_user`, and whether the host has it.
    pub vm_user: Option<(String, bool)>,
    /// `access.operator_group`, and whether the host has it.
    pub operator_group: Option<(String, bool)>,
    /// Files of `listen.tls` that cannot be read, with why.
    pub tls_faults: Vec<(PathBuf, String)>,
    /// Most descriptors that this process may have open.
    pub fds: u64,
    /// `node.max_sandboxes`.
    pub max_sandboxes: u16,
    /// Lane guarded. `None`: it is off.
    pub net: Option<Net>,
}

/// What lane guarded needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Net {
    /// `net.namespace`.
    pub namespace: Name,
    /// What is there; in place of a namespace that is not, one that was made and dropped has shown that it can be. Or why
    /// not.
    pub found: Result<Found, String>,
    /// Whether TAPs can be made, or why not.
    pub tun: Result<(), String>,
}

/// What can be said of a folder without changing it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Folder {
    /// It is there, and this much is free.
    Writable {
        /// Bytes free.
        free: u64,
    },
    /// It is not there, but can be made.
    CanBeMade,
    /// It cannot be used.
    Unusable {
        /// Why.
        why: String,
    },
}

/// What control groups there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cgroup {
    /// A version 2 tree.
    V2 {
        /// Our group in it.
        path: PathBuf,
        /// Controllers that it offers.
        controllers: Vec<String>,
        /// Whether we may make groups below ours.
        delegated: bool,
    },
    /// None of version 2.
    None,
}
