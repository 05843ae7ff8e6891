//! Links, addresses and neighbours: the few requests that a lane makes, and what it reads of a link. Pure.

use super::{
    GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, HOST_MAC,
    netlink::{Message, attributes, flag, number_at},
};

const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const SET_LINK: u16 = 19;
const NEW_ADDRESS: u16 = 20;
const NEW_NEIGHBOUR: u16 = 28;

const IPV4: u8 = 2;
const UP: u32 = 1;
const NO_ARP: u32 = 0x80;

const LINK_ADDRESS: u16 = 1;
const LINK_NAME: u16 = 3;
const LINK_GROUP: u16 = 27;
/// Length of the fixed header of a link.
const LINK: usize = 16;

/// The group of all TAPs, so that one message reaches them all.
const GROUP: u32 = 0x7362;

/// A link, as far as a lane looks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) up: bool,
}

/// Asks for all links.
pub(super) fn links_request() -> Message {
    Message::new(GET_LINK, flag::DUMP, &[0; LINK])
}

/// Reads a link.
pub(super) fn link(kind: u16, body: &[u8]) -> Option<Link> {
    if kind != NEW_LINK {
        return None;
    }
    let (index, flags) = (number_at(body, 4)?, number_at(body, 8)?);
    let (_, name) = attributes(body, LINK)
        .into_iter()
        .find(|(kind, _)| *kind == LINK_NAME)?;
    let name = name.strip_suffix(&[0]).unwrap_or(name);
    Some(Link {
        index,
        name: String::from_utf8_lossy(name).into_owned(),
        up: flags & UP != 0,
    })
}

/// What makes a TAP one of ours, whatever it was before: down, which drops what is queued; attributes; up if wanted, and
/// then its guest as a neighbour, since going down removes it.
///
/// The address has no peer and so brings no route. What a door sends leaves by the TAP that its socket is bound to, for
/// which the kernel wants none; what the kernel sends by itself (a reset from a port without a door) has nowhere to go. With
/// equal routes by every TAP it would go to another guest.
pub(super) fn lay(index: u32, up: bool) -> Vec<Message> {
    let attributes = header(index, 0, UP)
        .attribute(LINK_ADDRESS, &HOST_MAC)
        .attribute(LINK_GROUP, &GROUP.to_ne_bytes());
    let still = Message::new(SET_LINK, 0, &link_header(index, NO_ARP, NO_ARP));
    let index_bytes = index.to_ne_bytes();
    let host = [&[IPV4, 32, 0, SCOPE_LINK][..], &index_bytes].concat();
    let address = Message::new(NEW_ADDRESS, flag::CREATE | flag::REPLACE, &host)
        .attribute(2, &HOST_ADDRESS.octets())
        .attribute(1, &HOST_ADDRESS.octets());
    let mut all = vec![attributes, still, address];
    if up {
        all.push(header(index, UP, UP));
        all.push(neighbour(index));
    }
    all
}

/// The guest behind a TAP, known for ever: NOARP asks nobody.
pub(super) fn neighbour(index: u32) -> Message {
    const PERMANENT: [u8; 2] = 0x80_u16.to_ne_bytes();
    let index_bytes = index.to_ne_bytes();
    let guest = [&[IPV4, 0, 0, 0][..], &index_bytes, &PERMANENT, &[0, 0]].concat();
    Message::new(NEW_NEIGHBOUR, flag::CREATE | flag::REPLACE, &guest)
        .attribute(1, &GUEST_ADDRESS.octets())
        .attribute(2, &GUEST_MAC)
}

/// All TAPs up or down, in one message.
pub(super) fn all_links(up: bool) -> Message {
    let flags = if up { UP } else { 0 };
    Message::new(NEW_LINK, 0, &link_header(0, flags, UP)).attribute(LINK_GROUP, &GROUP.to_ne_bytes())
}

const SCOPE_LINK: u8 = 253;

fn header(index: u32, flags: u32, change: u32) -> Message {
    Message::new(SET_LINK, 0, &link_header(index, flags, change))
}

fn link_header(index: u32, flags: u32, change: u32) -> Vec<u8> {
    let numbers = [index, flags, change].map(u32::to_ne_bytes).concat();
    [&[0; 4][..], &numbers].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_read_or_left_out() {
        let mut body = [&[0; 4][..], &[7, 0, 0, 0], &[1, 0, 0, 0], &[0; 4]].concat();
        body.extend([12, 0, 3, 0]);
        body.extend(b"sbx0007\0");
        let read = link(NEW_LINK, &body).unwrap();
        assert_eq!(
            read,
            Link {
                index: 7,
                name: "sbx0007".into(),
                up: true
            }
        );
        assert_eq!(link(GET_LINK, &body), None);
        assert_eq!(link(NEW_LINK, &body[..16]), None);
        assert_eq!(link(NEW_LINK, &body[..9]), None);
    }

    #[test]
    fn a_tap_that_must_stay_down_gets_no_neighbour() {
        assert_eq!(lay(3, true).len(), lay(3, false).len() + 2);
        assert_eq!(lay(3, true).last(), Some(&neighbour(3)));
    }
}
