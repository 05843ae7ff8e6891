//! The network of a guest: loopback, and the card of lane guarded, which reaches the guest's doors and nothing else.
//!
//! May call: boot, control/files.
//! Never inside: a default route; an address that differs between guests; rtnetlink messages beyond those below want a
//! library.

use std::{fs, io, os::fd::OwnedFd, path::Path};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};
use sandbox_protocol::card::{GUEST_ADDRESS, HOST_ADDRESS, HOST_MAC};

use super::put;
use crate::control::files::put_in_place;

/// Interface 1 is `lo` in every network namespace.
const LO: u32 = 1;
const IFF_UP: u32 = 1;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWNEIGH: u16 = 28;
const NLM_F_REQUEST_ACK: u16 = 1 | 4;
const NLM_F_CREATE_REPLACE: u16 = 0x400 | 0x100;
const NLMSG_ERROR: u16 = 2;
const IPV4: u8 = 2;
const SCOPE_LINK: u8 = 253;
const NUD_PERMANENT: [u8; 2] = 0x80_u16.to_ne_bytes();

/// Sets `lo` up.
///
/// # Errors
/// The kernel's.
pub(super) fn loopback_up() -> io::Result<()> {
    ask(&socket()?, &up(LO))
}

/// Sets the card up where the guest has one: its address, the host behind it as the one neighbour, for ever, and the way to
/// that host alone. Whether there is one.
///
/// # Errors
/// The kernel's, or two cards.
pub(super) fn card_up() -> io::Result<bool> {
    let Some((name, index)) = card(Path::new("/sys/class/net"))? else {
        return Ok(false);
    };
    let six = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
    if fs::exists(&six)? {
        put(&six, "1")?;
    }
    let socket = socket()?;
    for message in [up(index), address(index), neighbour(index)] {
        ask(&socket, &message)?;
    }
    Ok(true)
}

/// Has programs ask the DNS door for names.
///
/// # Errors
/// The disk's.
pub(super) fn resolve_by_door() -> io::Result<()> {
    let file = Path::new("/etc/resolv.conf");
    fs::create_dir_all("/etc")?;
    // What an image has there may lead elsewhere.
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    put_in_place(file, format!("nameserver {HOST_ADDRESS}\n").as_bytes())
}

/// Name and number of the one interface that is not `lo`.
fn card(class: &Path) -> io::Result<Option<(String, u32)>> {
    let mut found = None;
    for entry in fs::read_dir(class)? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), entry.path());
        // A file of the kernel's own beside the interfaces is no folder.
        let Ok(index) = fs::read_to_string(path.join("ifindex")) else {
            continue;
        };
        let index = index.trim().parse().map_err(io::Error::other)?;
        if index == LO {
            continue;
        }
        let name = name.into_string().map_err(|_name| io::ErrorKind::InvalidData)?;
        if found.replace((name, index)).is_some() {
            return Err(io::Error::other("there are two network cards"));
        }
    }
    Ok(found)
}

fn socket() -> io::Result<OwnedFd> {
    // 0, the protocol that a netlink socket has by default, is routing.
    let protocol = None;
    let flags = SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        flags,
        protocol,
    )?)
}

fn ask(socket: &OwnedFd, message: &[u8]) -> io::Result<()> {
    send(socket, message, SendFlags::empty())?;
    let mut answer = [0; 1024];
    let (_, n) = recv(socket, &mut answer, RecvFlags::empty())?;
    acknowledged(answer.get(..n).unwrap_or_default())
}

/// A request to be acknowledged. Its parts are whole words.
fn message(kind: u16, flags: u16, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    // Some tens of bytes.
    let length = u32::try_from(16 + body.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((flags | NLM_F_REQUEST_ACK).to_ne_bytes());
    bytes.extend(1_u32.to_ne_bytes()); // sequence
    bytes.extend(0_u32.to_ne_bytes()); // port
    bytes.extend(body);
    bytes
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    // Six bytes at most.
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// `RTM_NEWLINK` with the flag "up" set, and no other changed.
fn up(index: u32) -> Vec<u8> {
    let numbers = [index, IFF_UP, IFF_UP].map(u32::to_ne_bytes).concat();
    message(RTM_NEWLINK, 0, &[&[0; 4], &numbers])
}

/// The guest's address with the host as its peer, which makes the only route there is.
fn address(index: u32) -> Vec<u8> {
    let local = attribute(2, &GUEST_ADDRESS.octets());
    let peer = attribute(1, &HOST_ADDRESS.octets());
    let header = [IPV4, 32, 0, SCOPE_LINK];
    let parts = [&header[..], &index.to_ne_bytes(), &local, &peer];
    message(RTM_NEWADDR, NLM_F_CREATE_REPLACE, &parts)
}

/// The host, which is never asked for.
fn neighbour(index: u32) -> Vec<u8> {
    let to = attribute(1, &HOST_ADDRESS.octets());
    let by = attribute(2, &HOST_MAC);
    let parts = [
        &[IPV4, 0, 0, 0][..],
        &index.to_ne_bytes(),
        &NUD_PERMANENT,
        &[0, 0],
        &to,
        &by,
    ];
    message(RTM_NEWNEIGH, NLM_F_CREATE_REPLACE, &parts)
}

/// An acknowledgement is an error message with number 0.
fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let kind = answer
        .get(4..6)
        .and_then(|b| b.try_into().ok())
        .map(u16::from_ne_bytes);
    let number = answer
        .get(16..20)
        .and_then(|b| b.try_into().ok())
        .map(i32::from_ne_bytes);
    match (kind, number) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(errno)) => Err(io::Error::from_raw_os_error(-errno)),
        _ => Err(io::Error::other("rtnetlink gave no acknowledgement")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_as_long_as_they_say() {
        for (bytes, length) in [(up(LO), 32), (address(2), 40), (neighbour(2), 48)] {
            assert_eq!(bytes.len(), length);
            let said = u32::from_ne_bytes(bytes[..4].try_into().unwrap());
            assert_eq!(usize::try_from(said).unwrap(), length);
        }
    }

    #[test]
    fn the_card_is_the_one_interface_that_is_not_loopback() {
        let class = tempfile::tempdir().unwrap();
        let put = |name: &str, index: &str| {
            fs::create_dir(class.path().join(name)).unwrap();
            put_in_place(&class.path().join(name).join("ifindex"), index.as_bytes()).unwrap();
        };
        put("lo", "1\n");
        put_in_place(&class.path().join("bonding_masters"), b"").unwrap();
        assert_eq!(card(class.path()).unwrap(), None);
        put("eth0", "2\n");
        assert_eq!(card(class.path()).unwrap(), Some(("eth0".into(), 2)));
        put("eth1", "3\n");
        assert!(card(class.path()).is_err());
    }

    #[test]
    fn answers_are_told_apart() {
        let mut answer = vec![0; 20];
        assert!(acknowledged(&answer).is_err());
        answer[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        assert!(acknowledged(&answer).is_ok());
        answer[16..20].copy_from_slice(&(-1_i32).to_ne_bytes());
        assert_eq!(acknowledged(&answer).unwrap_err().raw_os_error(), Some(1));
        assert!(acknowledged(&[]).is_err());
    }
}
