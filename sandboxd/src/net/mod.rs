//! The network of lane guarded, the host's side of it: one network namespace with a static packet filter, TAPs made
//! ahead, and the sockets that doors listen on.
//!
//! May call: disk, words, clock, names, sys, tasks, telemetry, work.
//! Never inside: a rule, route or set element that belongs to one sandbox; a link that is deleted; a program that is run.
//! Invariant 10: a TAP of ours reaches only its doors, from birth, daemon dead or alive.
//! A TAP is locked before it exists: none is made until the table stands, and while it does not stand all are down. Which
//! TAP a byte came by says whose it is, and nothing else does: all guests have the same addresses.
//! Cancel safety: an order that was given is carried out though nobody waits for it; what it made then drains.

mod error;
mod filter;
mod heal;
mod lane;
mod links;
mod netlink;
mod place;
mod route;
mod ruleset;
mod slot;
mod taken;

use std::path::PathBuf;

pub use sandbox_protocol::card::{
    DNS_PORT, GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, HOST_MAC, HTTP_PORT, SOCKS5_PORT,
};

use self::ruleset::Transport;
pub use self::{
    error::NetError,
    lane::{Lane, Options, Status},
    place::{Found, Prepared, TUN, inspect, pin, prepare, purge},
    slot::{SlotCounts, State},
    taken::{Doors, Draining, Taken, card},
};
use crate::names::SlotNumber;

/// Beginning of our interfaces' names; the table matches by it.
pub const PREFIX: &str = "sbx";
/// All that the table lets through.
const DOOR_PORTS: [(Transport, u16); 4] = [
    (Transport::Tcp, HTTP_PORT),
    (Transport::Tcp, SOCKS5_PORT),
    (Transport::Tcp, DNS_PORT),
    (Transport::Udp, DNS_PORT),
];

/// Where namespaces are pinned, as `ip netns` has it.
const PINS: &str = "/run/netns";
/// Where daemons lock them.
const LOCKS: &str = "/run/sandboxd-net";

fn lock_file(namespace: &crate::words::Name) -> PathBuf {
    PathBuf::from(LOCKS).join(format!("{namespace}.lock"))
}

/// The TAP of a slot.
#[must_use]
pub fn tap_name(slot: SlotNumber) -> String {
    format!("{PREFIX}{slot}")
}

/// The slot of a TAP; none for a name that is not exactly ours.
fn tap_slot(name: &str) -> Option<SlotNumber> {
    name.strip_prefix(PREFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tap_has_one_name() {
        assert_eq!(tap_name(SlotNumber(0xab)), "sbx00ab");
        assert_eq!(tap_slot("sbx00ab"), Some(SlotNumber(0xab)));
        for other in ["sbx", "sbxab", "sbx00AB", "eth0", "sbx00abc"] {
            assert_eq!(tap_slot(other), None, "{other}");
        }
    }
}
