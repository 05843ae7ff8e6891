//! The loopback interface.
//!
//! May call: nothing.
//! Never inside: any other interface; rtnetlink messages beyond the one below want a library.

use std::io;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};

/// Interface 1 is `lo` in every network namespace.
const LO: i32 = 1;
const IFF_UP: u32 = 1;
const RTM_NEWLINK: u16 = 16;
const NLM_F_REQUEST_ACK: u16 = 1 | 4;
const NLMSG_ERROR: u16 = 2;
/// `nlmsghdr` and `ifinfomsg`.
const LENGTH: u32 = 16 + 16;

/// Sets `lo` up.
///
/// # Errors
/// The kernel's.
pub(super) fn loopback_up() -> io::Result<()> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // 0, the protocol that a netlink socket has by default, is routing.
        None,
    )?;
    send(&socket, &up_message(), SendFlags::empty())?;
    let mut answer = [0; 256];
    let (_, n) = recv(&socket, &mut answer, RecvFlags::empty())?;
    acknowledged(answer.get(..n).unwrap_or_default())
}

/// `RTM_NEWLINK` for `lo` with the flag "up" set, to be acknowledged.
fn up_message() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(32);
    bytes.extend(LENGTH.to_ne_bytes());
    bytes.extend(RTM_NEWLINK.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST_ACK.to_ne_bytes());
    bytes.extend(1_u32.to_ne_bytes()); // sequence
    bytes.extend(0_u32.to_ne_bytes()); // port
    bytes.extend([0; 4]); // family, padding, type
    bytes.extend(LO.to_ne_bytes());
    bytes.extend(IFF_UP.to_ne_bytes()); // flags
    bytes.extend(IFF_UP.to_ne_bytes()); // of which these change
    bytes
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
    fn the_message_is_as_long_as_it_says() {
        assert_eq!(up_message().len(), usize::try_from(LENGTH).unwrap());
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
