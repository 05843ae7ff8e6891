//! Frames as a guest may make them, byte by byte, and what is read of those that come.

use std::net::Ipv4Addr;

use sandboxd::net::{GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, HOST_MAC};

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMP: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

/// An Ethernet frame from the guest to its host.
pub(crate) fn ethernet(kind: u16, payload: &[u8]) -> Vec<u8> {
    [&HOST_MAC[..], &GUEST_MAC, &kind.to_be_bytes(), payload].concat()
}

/// An IPv4 packet; `fragment` is the field of flags and offset.
pub(crate) fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(20 + payload.len()).unwrap();
    let mut header = [
        &[0x45, 0][..],
        &length.to_be_bytes(),
        &[0x12, 0x34],
        &fragment.to_be_bytes(),
        &[64, protocol, 0, 0],
        &from.octets(),
        &to.octets(),
    ]
    .concat();
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    [header, payload.to_vec()].concat()
}

/// A TCP segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) from: (Ipv4Addr, u16),
    pub(crate) to: (Ipv4Addr, u16),
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
}

impl Segment {
    /// A SYN from the guest to a port of its host.
    pub(crate) fn syn(from: u16, to: u16) -> Self {
        Self {
            from: (GUEST_ADDRESS, from),
            to: (HOST_ADDRESS, to),
            seq: 1_000,
            ack: 0,
            flags: SYN,
        }
    }

    /// Its bytes, without the IPv4 header.
    pub(crate) fn bytes(self) -> Vec<u8> {
        self.bytes_with(&[])
    }

    fn bytes_with(self, data: &[u8]) -> Vec<u8> {
        let mut bytes = [
            &self.from.1.to_be_bytes()[..],
            &self.to.1.to_be_bytes(),
            &self.seq.to_be_bytes(),
            &self.ack.to_be_bytes(),
            &[0x50, self.flags, 0xff, 0xff, 0, 0, 0, 0],
            data,
        ]
        .concat();
        let sum = transport(self.from.0, self.to.0, TCP, &bytes);
        bytes[16..18].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    /// The frame.
    pub(crate) fn frame(self) -> Vec<u8> {
        self.frame_with(&[])
    }

    /// The frame, with data.
    pub(crate) fn frame_with(self, data: &[u8]) -> Vec<u8> {
        let bytes = self.bytes_with(data);
        ethernet(0x0800, &ipv4(self.from.0, self.to.0, TCP, 0, &bytes))
    }
}

/// A UDP datagram of one byte from the guest, as a frame.
pub(crate) fn udp(to: (Ipv4Addr, u16)) -> Vec<u8> {
    let mut bytes = [
        &4_000_u16.to_be_bytes()[..],
        &to.1.to_be_bytes(),
        &[0, 9, 0, 0, 7],
    ]
    .concat();
    let sum = transport(GUEST_ADDRESS, to.0, UDP, &bytes);
    bytes[6..8].copy_from_slice(&sum.to_be_bytes());
    ethernet(0x0800, &ipv4(GUEST_ADDRESS, to.0, UDP, 0, &bytes))
}

/// An ICMP echo request from the guest.
pub(crate) fn ping(to: Ipv4Addr) -> Vec<u8> {
    let mut bytes = vec![8, 0, 0, 0, 0, 1, 0, 1];
    let sum = checksum(&bytes);
    bytes[2..4].copy_from_slice(&sum.to_be_bytes());
    ethernet(0x0800, &ipv4(GUEST_ADDRESS, to, ICMP, 0, &bytes))
}

fn transport(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, bytes: &[u8]) -> u16 {
    let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
    checksum(&[&from.octets()[..], &to.octets(), &[0, protocol], &length, bytes].concat())
}

pub(crate) fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|two| {
        let low = two.get(1).copied().unwrap_or(0);
        u32::from(u16::from_be_bytes([two[0], low]))
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

/// A TCP segment that came, if the frame holds one, and how much it carries.
pub(crate) fn segment(frame: &[u8]) -> Option<(Segment, usize)> {
    let ip = frame.get(14..)?;
    if frame[12..14] != [8, 0] || ip.get(9) != Some(&TCP) {
        return None;
    }
    let short = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
    let long = |at: usize| u32::from_be_bytes([ip[at], ip[at + 1], ip[at + 2], ip[at + 3]]);
    let address = |at: usize| Ipv4Addr::from(long(at));
    let found = Segment {
        from: (address(12), short(20)),
        to: (address(16), short(22)),
        seq: long(24),
        ack: long(28),
        flags: ip[33],
    };
    let data = usize::from(short(2)) - 20 - usize::from(ip[32] >> 4) * 4;
    Some((found, data))
}
