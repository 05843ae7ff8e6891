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
    match accel {
        Accel::Tcg | Accel::None => Ok(account),
        Accel::Kvm => {
            let device = fs::metadata("/dev/kvm").map_err(|error| format!("/dev/kvm: {error}"))?;
            with_kvm(account, device.mode(), device.gid()).ok_or_else(|| {
                format!(
                    "user `{user}` cannot open /dev/kvm (mode {:o})",
                    device.mode() & 0o777
                )
            })
        }
    }
}

/// The account with which a VMM can open `/dev/kvm`: where that is closed to others, it gets the device's group as its
/// only one, unless that is root's.
fn with_kvm(account: Account, mode: u32, gid: u32) -> Option<Account> {
    if mode & 0o006 == 0o006 {
        Some(account)
    } else if mode & 0o060 == 0o060 && gid != 0 {
        Some(Account { gid, ..account })
    } else {
        None
    }
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
    fn a_vmm_gets_the_group_of_kvm_and_never_that_of_root() {
        let account = Account { uid: 991, gid: 990 };
        assert_eq!(with_kvm(account, 0o666, 0), Some(account));
        assert_eq!(
            with_kvm(account, 0o660, 105),
            Some(Account { gid: 105, ..account })
        );
        assert_eq!(with_kvm(account, 0o660, 0), None);
        assert_eq!(with_kvm(account, 0o600, 105), None);
    }

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nsandboxd-vm:x:991:990::/:/sbin/nologin\nbroken:x:y\n";
        assert_eq!(find(passwd, "sandboxd-vm"), Some(Account { uid: 991, gid: 990 }));
        for missing in ["sandboxd", "broken", "", "x"] {
            assert_eq!(find(passwd, missing), None, "{missing:?}");
        }
    }
}
