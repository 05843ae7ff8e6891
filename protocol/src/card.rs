//! The network card of a guest on lane guarded: addresses and ports, equal for all of them.

use std::net::Ipv4Addr;

/// The host, and its doors.
pub const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The guest.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 2);
/// Hardware address of the host.
pub const HOST_MAC: [u8; 6] = [0x02, 0x73, 0x62, 0x78, 0x00, 0x01];
/// Hardware address of the guest.
pub const GUEST_MAC: [u8; 6] = [0x02, 0x73, 0x62, 0x78, 0x00, 0x02];
/// Port of the HTTP door; a guest's programs find it at the same port of their loopback, on either lane.
pub const HTTP_PORT: u16 = 3_128;
/// Port of the SOCKS5 door, found alike.
pub const SOCKS5_PORT: u16 = 1_080;
/// Port of the DNS door.
pub const DNS_PORT: u16 = 53;
