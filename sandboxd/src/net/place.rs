//! The namespace: made, entered, settled, pinned where `ip netns` finds it, held by one daemon, and dropped.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock, fstatfs},
    mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use super::{LOCKS, NetError, PINS, filter::Filter, links::Links, lock_file, tap_slot};
use crate::{disk, sys, tasks, words::Name};

/// What kind of file a namespace is (`NSFS_MAGIC`).
const NAMESPACE: u64 = 0x6e73_6673;
/// The file that makes TAPs.
pub const TUN: &str = "/dev/net/tun";

/// Settings of the namespace, below `/proc/sys/net`. `default` is what TAPs are born with.
const SETTINGS: &[(&str, &str)] = &[
    // Equal addresses on every link would fail the check that a source is reached by the link that it came by.
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/forwarding", "0"),
    ("ipv4/conf/default/forwarding", "0"),
    ("ipv4/conf/all/accept_redirects", "0"),
    ("ipv4/conf/default/accept_redirects", "0"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    // The next guest of a slot may use its predecessor's ports at once.
    ("ipv4/tcp_max_tw_buckets", "0"),
    // The DNS door's port, for a daemon that was left no capability for it.
    ("ipv4/ip_unprivileged_port_start", "0"),
    // Nothing is put together from fragments, so no guest can fill the memory for it.
    ("ipv4/ipfrag_low_thresh", "0"),
    ("ipv4/ipfrag_high_thresh", "0"),
];
/// Those of IPv6, which the kernel need not have.
const SETTINGS_V6: &[(&str, &str)] = &[
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
];

/// What [`prepare`] found and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prepared {
    /// The namespace was not there before.
    pub made: bool,
    /// A running daemon has it and keeps it in order; nothing was touched.
    pub held: bool,
    /// TAPs of earlier days in it.
    pub taps: usize,
}

/// What [`inspect`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No such namespace.
    Absent,
    /// It is there.
    There {
        /// Our table stands in it.
        table: bool,
        /// Our TAPs in it.
        taps: usize,
        /// Links that are up and not ours.
        foreign: Vec<String>,
    },
}

/// Where a namespace is pinned.
#[must_use]
pub fn pin(namespace: &Name) -> PathBuf {
    Path::new(PINS).join(namespace.as_str())
}

/// Makes what is missing of namespace, settings and table.
///
/// # Errors
/// Not root, a kernel without namespaces, packet filter or TAPs, a namespace that leads somewhere.
pub fn prepare(namespace: &Name) -> Result<Prepared, NetError> {
    on_a_thread(namespace, |namespace| {
        let held = match Hold::take(namespace) {
            Ok(hold) => Some(hold),
            Err(NetError::Held { .. }) => None,
            Err(error) => return Err(error),
        };
        let made = enter_or_make(namespace)?;
        let mut links = Links::open()?;
        if held.is_some() {
            settle()?;
            no_foreign(namespace, &mut links)?;
            Filter::open()?.replace()?;
        }
        Ok(Prepared {
            made,
            held: held.is_none(),
            taps: ours(&mut links)?,
        })
    })
}

/// Drops the namespace with all that is in it. Whether there was one.
///
/// # Errors
/// Not root, or a daemon has it.
pub fn purge(namespace: &Name) -> Result<bool, NetError> {
    let path = pin(namespace);
    if !path.exists() {
        return Ok(false);
    }
    let _hold = Hold::take(namespace)?;
    let failed = |what, source: io::Error| NetError::io(what, Some(path.clone()), source);
    if is_namespace(&path) {
        unmount(&path, UnmountFlags::DETACH).map_err(|errno| failed("unpin", errno.into()))?;
    }
    // The lock file stays: whoever waits with it open must not hold another than the next that comes.
    fs::remove_file(&path).map_err(|error| failed("remove", error))?;
    Ok(true)
}

/// Looks into the namespace, and changes nothing. Where it is not there, one that nobody sees is made, locked and dropped:
/// whether that can be is known then.
///
/// # Errors
/// Not root, a kernel without namespaces or packet filter.
pub fn inspect(namespace: &Name) -> Result<Found, NetError> {
    on_a_thread(namespace, |namespace| {
        if !is_namespace(&pin(namespace)) {
            make()?;
            Filter::open()?.replace()?;
            return Ok(Found::Absent);
        }
        enter(namespace)?;
        let mut links = Links::open()?;
        Ok(Found::There {
            table: Filter::open()?.stands()?,
            taps: ours(&mut links)?,
            foreign: foreign(&mut links)?,
        })
    })
}

/// Runs on a thread of its own: a thread that was moved into another namespace is not used for anything else.
fn on_a_thread<T: Send + 'static>(
    namespace: &Name,
    work: impl FnOnce(&Name) -> Result<T, NetError> + Send + 'static,
) -> Result<T, NetError> {
    let namespace = namespace.clone();
    let thread = tasks::thread("net", move || work(&namespace))
        .map_err(|error| NetError::io("start a thread", None, error))?;
    thread.join().unwrap_or(Err(NetError::Ended))
}

/// Moves this thread into the namespace, made and pinned if it is not there. Whether it was made.
pub(super) fn enter_or_make(namespace: &Name) -> Result<bool, NetError> {
    if is_namespace(&pin(namespace)) {
        enter(namespace)?;
        return Ok(false);
    }
    let path = pin(namespace);
    let failed = |what, source: io::Error| NetError::io(what, Some(path.clone()), source);
    share_pins()?;
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&path)
        .map_err(|error| failed("make", error))?;
    make()?;
    mount_bind("/proc/thread-self/ns/net", &path).map_err(|errno| failed("pin", errno.into()))?;
    Ok(true)
}

/// Moves this thread into a namespace of its own, which ends with it unless it is pinned.
fn make() -> Result<(), NetError> {
    let failed = |error| NetError::lacking("make a network namespace", "CONFIG_NET_NS", None, error);
    sys::new_network_namespace().map_err(failed)
}

fn enter(namespace: &Name) -> Result<(), NetError> {
    let path = pin(namespace);
    let failed = |source: io::Error| NetError::io("enter", Some(path.clone()), source);
    let file = File::open(&path).map_err(failed)?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|errno| failed(errno.into()))
}

fn is_namespace(path: &Path) -> bool {
    let kind = |file: File| fstatfs(&file).map(|found| found.f_type.cast_unsigned() == NAMESPACE);
    File::open(path).is_ok_and(|file| kind(file).unwrap_or(false))
}

/// The folder of pins, shared as `ip netns` does it: what is pinned there is seen from every mount namespace.
fn share_pins() -> Result<(), NetError> {
    let failed = |what, source: io::Error| NetError::io(what, Some(PINS.into()), source);
    disk::make_dir(Path::new(PINS), 0o755).map_err(|error| failed("make", error))?;
    // Two that make it a mount at once would stack them. Closing the folder lets go.
    let folder = File::open(PINS).map_err(|error| failed("open", error))?;
    flock(&folder, FlockOperation::LockExclusive).map_err(|errno| failed("lock", errno.into()))?;
    let share = || mount_change(PINS, MountPropagationFlags::SHARED | MountPropagationFlags::REC);
    // It is no mount yet.
    if share().is_err() {
        mount_bind_recursive(PINS, PINS).map_err(|errno| failed("mount", errno.into()))?;
        share().map_err(|errno| failed("share", errno.into()))?;
    }
    Ok(())
}

/// Writes the settings of the namespace that this thread is in.
pub(super) fn settle() -> Result<(), NetError> {
    let six = fs::exists("/proc/sys/net/ipv6/conf").unwrap_or(true);
    let all = SETTINGS.iter().chain(SETTINGS_V6.iter().filter(|_| six));
    for (name, value) in all {
        let path = Path::new("/proc/sys/net").join(name);
        set(&path, value).map_err(|error| NetError::io("set", Some(path), error))?;
    }
    Ok(())
}

fn set(path: &Path, value: &str) -> io::Result<()> {
    use io::Write as _;
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// Refuses a namespace with links that are up and not ours.
pub(super) fn no_foreign(namespace: &Name, links: &mut Links) -> Result<(), NetError> {
    let foreign = foreign(links)?;
    if foreign.is_empty() {
        return Ok(());
    }
    Err(NetError::Foreign {
        namespace: namespace.clone(),
        links: foreign,
    })
}

fn foreign(links: &mut Links) -> Result<Vec<String>, NetError> {
    let all = links.list()?.into_iter();
    Ok(all
        .filter(|link| link.up && tap_slot(&link.name).is_none())
        .map(|link| link.name)
        .collect())
}

fn ours(links: &mut Links) -> Result<usize, NetError> {
    let all = links.list()?;
    Ok(all.iter().filter(|link| tap_slot(&link.name).is_some()).count())
}

/// The namespace is this process's until the value is dropped, or the process ends however it ends.
#[derive(Debug)]
pub(super) struct Hold {
    _file: File,
}

impl Hold {
    pub(super) fn take(namespace: &Name) -> Result<Self, NetError> {
        let path = lock_file(namespace);
        let failed = |what, source: io::Error| NetError::io(what, Some(path.clone()), source);
        // A hardened daemon cannot make it; `net prepare` did then, and it can be locked without writing.
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                disk::make_dir(Path::new(LOCKS), 0o700).map_err(|error| failed("make", error))?;
                OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .mode(0o600)
                    .open(&path)
            }
            opened => opened,
        };
        let file = file.map_err(|error| failed("open", error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _file: file }),
            Err(rustix::io::Errno::AGAIN) => Err(NetError::Held {
                namespace: namespace.clone(),
            }),
            Err(errno) => Err(failed("lock", errno.into())),
        }
    }
}
