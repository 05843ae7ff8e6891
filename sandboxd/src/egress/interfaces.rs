//! The host's own addresses, held as they were read and read anew whenever the kernel has news of them.
//!
//! The kernel queues its news before an address can be reached, so whoever looks for news before a dial sees one that was
//! added a moment ago. (IPv4 with the change itself; IPv6 behind it, and ahead of the route to it.) Nothing runs in
//! between, and what fails leaves nothing held.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netlink::SocketAddrNetlink, recv,
        send, socket_with,
    },
};

use crate::work;

const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
/// Groups of news: addresses of IPv4 and of IPv6.
const CHANGES: u32 = 0x10 | 0x100;
const NLM_F_REQUEST_DUMP: u16 = 1 | 0x300;
const NLMSG_DONE: u16 = 3;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Header of a message, header of an address in it, header of an attribute.
const HEADER: usize = 16;
const ADDRESS: usize = 8;
const ATTRIBUTE: usize = 4;
/// One answer of a dump has at most 32 KiB.
const ANSWER: usize = 32 * 1024;

/// The addresses of every interface.
#[derive(Debug, Default)]
pub(super) struct Interfaces(Mutex<Option<Known>>);

#[derive(Debug)]
struct Known {
    /// Where the kernel tells of changes since.
    news: OwnedFd,
    addresses: Arc<[IpAddr]>,
}

impl Interfaces {
    /// The addresses now. The kernel answers at once; nothing is waited for.
    ///
    /// # Errors
    /// The kernel's. Without these addresses nothing may be dialled.
    pub(super) fn now(&self) -> io::Result<Arc<[IpAddr]>> {
        // Every change of it is whole.
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = held.take_if(|known| !known.holds()) {
            tracing::debug!(
                before = known.addresses.len(),
                "the host's own addresses have changed"
            );
        }
        let known = match held.take() {
            Some(known) => known,
            None => Known::read()?,
        };
        let addresses = Arc::clone(&known.addresses);
        *held = Some(known);
        Ok(addresses)
    }
}

impl Known {
    fn read() -> io::Result<Self> {
        let news = route(SocketFlags::NONBLOCK)?;
        work::count(work::Kind::Binds, 1);
        bind(&news, &SocketAddrNetlink::new(0, CHANGES))?;
        // Whatever changes from here on is news.
        Ok(Self {
            news,
            addresses: addresses()?.into(),
        })
    }

    /// Whether there is no news. News that was lost, or cannot be read, is news.
    fn holds(&self) -> bool {
        let mut nothing = [0; 1];
        matches!(recv(&self.news, &mut nothing, RecvFlags::PEEK), Err(Errno::AGAIN))
    }
}

fn route(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    // 0, the protocol that a netlink socket has by default, is routing.
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?)
}

fn addresses() -> io::Result<Vec<IpAddr>> {
    let socket = route(SocketFlags::empty())?;
    work::count(work::Kind::NetlinkMessages, 1);
    send(&socket, &question(), SendFlags::empty())?;
    let mut found = Vec::new();
    let mut answer = vec![0; ANSWER];
    loop {
        let (_, n) = recv(&socket, &mut answer, RecvFlags::empty())?;
        match take(answer.get(..n).unwrap_or_default(), &mut found) {
            Taken::More => {}
            Taken::Done => return Ok(found),
            Taken::Error => return Err(io::Error::other("rtnetlink gave no addresses")),
        }
    }
}

/// `RTM_GETADDR` for all families, as a dump.
fn question() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + ADDRESS);
    bytes.extend(24_u32.to_ne_bytes());
    bytes.extend(RTM_GETADDR.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    bytes.extend([0; 8]); // sequence, port
    bytes.extend([0; ADDRESS]);
    bytes
}

#[derive(Debug, PartialEq, Eq)]
enum Taken {
    More,
    Done,
    Error,
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    let two = bytes.get(at..at + 2)?.try_into().ok()?;
    Some(u16::from_ne_bytes(two))
}

/// Reads the messages of one answer.
fn take(mut bytes: &[u8], found: &mut Vec<IpAddr>) -> Taken {
    while let Some(length) = bytes.get(..4).and_then(|four| four.try_into().ok()) {
        let length = usize::try_from(u32::from_ne_bytes(length)).unwrap_or(0);
        let (Some(message), Some(kind)) = (bytes.get(..length), number(bytes, 4)) else {
            return Taken::Error;
        };
        match kind {
            NLMSG_DONE => return Taken::Done,
            RTM_NEWADDR => attributes(message.get(HEADER + ADDRESS..).unwrap_or_default(), found),
            _ => return Taken::Error,
        }
        let next = length.next_multiple_of(4);
        if length < HEADER {
            return Taken::Error;
        }
        bytes = bytes.get(next..).unwrap_or_default();
    }
    Taken::More
}

fn attributes(mut bytes: &[u8], found: &mut Vec<IpAddr>) {
    while let (Some(length), Some(kind)) = (number(bytes, 0), number(bytes, 2)) {
        let length = usize::from(length);
        let Some(value) = bytes.get(ATTRIBUTE..length) else {
            return;
        };
        let address = match (<[u8; 4]>::try_from(value), <[u8; 16]>::try_from(value)) {
            (Ok(v4), _) => Some(IpAddr::from(Ipv4Addr::from(v4))),
            (_, Ok(v6)) => Some(IpAddr::from(Ipv6Addr::from(v6))),
            (Err(_), Err(_)) => None,
        };
        // On a point-to-point link the first is the peer's, which is not ours, and is no harm to refuse.
        if let (IFA_ADDRESS | IFA_LOCAL, Some(address)) = (kind, address)
            && !found.contains(&address)
        {
            found.push(address);
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn loopback_is_among_them_and_they_are_read_once() {
        let interfaces = Interfaces::default();
        let messages = async || {
            let (found, counts) = work::traced(async { interfaces.now().unwrap() }).await;
            assert!(found.contains(&IpAddr::from([127, 0, 0, 1])), "{found:?}");
            assert!(!found.contains(&IpAddr::from([127, 0, 0, 2])), "{found:?}");
            counts.get(work::Kind::NetlinkMessages)
        };
        assert_eq!((messages().await, messages().await), (1, 0));
    }

    #[test]
    fn what_cannot_be_read_is_not_held() {
        let interfaces = Interfaces::default();
        interfaces.now().unwrap();
        // A socket that gives no news, and cannot say that there is none.
        let (broken, _other) = io::pipe().unwrap();
        let mut held = interfaces.0.lock().unwrap();
        held.as_mut().unwrap().news = broken.into();
        held.as_mut().unwrap().addresses = Arc::default();
        drop(held);
        assert!(!interfaces.now().unwrap().is_empty(), "they were read anew");
    }

    #[test]
    fn an_answer_that_is_none_is_told() {
        let mut found = Vec::new();
        assert_eq!(take(&[], &mut found), Taken::More);
        let mut message = vec![20, 0, 0, 0, 3, 0];
        message.resize(20, 0);
        assert_eq!(take(&message, &mut found), Taken::Done);
        message[4] = 2;
        assert_eq!(take(&message, &mut found), Taken::Error);
        assert_eq!(take(&[200, 0, 0, 0, 20, 0], &mut found), Taken::Error);
        assert_eq!(take(&[0, 0, 0, 0, 20, 0], &mut found), Taken::Error);
        assert!(found.is_empty());
    }
}
