//! As whom a VMM runs. It needs no right on any path: memory, image, sockets and console come to it as descriptors.

use std::{fs, os::unix::fs::MetadataExt as _};

use crate::{engine::spawn::Account, words::Accel};

/// The account for VMMs, or why it is the daemon's own.
pub(super) fn account(user: &str, accel: Accel) -> Result<Account, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("the daemon is not root".to_owned());
    }
    let passwd = fs::read_to_string("/etc/passwd").map_err(|error| format!("/etc/passwd: {error}"))?;
    let account = find(&passwd, user).ok_or_else(|| format!("there is no user `{user}`"))?;
    let kvm = fs::metadata("/dev/kvm").map(|device| (device.mode(), device.gid()));
    Ok(match (accel, kvm) {
        // Closed to others: the VMM gets the group that may use it, and no other.
        (Accel::Kvm, Ok((mode, gid))) if mode & 0o006 != 0o006 => Account { gid, ..account },
        (Accel::Kvm | Accel::Tcg | Accel::None, _) => account,
    })
}

fn find(passwd: &str, user: &str) -> Option<Account> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(user) {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(Account { uid, gid })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nsandboxd-vm:x:991:990::/:/sbin/nologin\nbroken:x:y\n";
        assert_eq!(find(passwd, "sandboxd-vm"), Some(Account { uid: 991, gid: 990 }));
        for missing in ["sandboxd", "broken", "", "x"] {
            assert_eq!(find(passwd, missing), None, "{missing:?}");
        }
    }
}
