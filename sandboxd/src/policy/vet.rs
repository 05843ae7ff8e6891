//! Which addresses may be dialled. Every answer of a name is vetted, and one bad answer refuses the name: else the outcome
//! would hang on an order, and an attack would hide behind it.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use ipnet::{IpNet, Ipv6Net};
use sandbox_protocol::door::DoorReason;

use crate::words::Name;

/// Where clouds answer who a machine is, and with which credentials.
const METADATA_V4: [[u8; 4]; 6] = [
    [169, 254, 169, 254],
    [169, 254, 169, 253],
    [169, 254, 170, 2],
    [169, 254, 170, 23],
    [168, 63, 129, 16],
    [100, 100, 100, 200],
];
const METADATA_V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
];

/// IPv4 that is not the public internet.
const SPECIAL_V4: [([u8; 4], u8); 18] = [
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    ([192, 0, 0, 0], 24),
    ([192, 0, 2, 0], 24),
    ([192, 31, 196, 0], 24),
    ([192, 52, 193, 0], 24),
    ([192, 88, 99, 0], 24),
    ([192, 168, 0, 0], 16),
    ([192, 175, 48, 0], 24),
    ([198, 18, 0, 0], 15),
    ([198, 51, 100, 0], 24),
    ([203, 0, 113, 0], 24),
    ([224, 0, 0, 0], 4),
    ([240, 0, 0, 0], 4),
];

/// Of 2000::/3, what is not the public internet; all outside of it is not either.
const SPECIAL_V6: [([u16; 3], u8); 5] = [
    ([0x2001, 0, 0], 23),
    ([0x2001, 0xdb8, 0], 32),
    ([0x2002, 0, 0], 16),
    ([0x2620, 0x4f, 0x8000], 48),
    ([0x3fff, 0, 0], 20),
];
const PUBLIC_V6: ([u16; 3], u8) = ([0x2000, 0, 0], 3);
/// Addresses that carry an IPv4 address in their last 32 bits, by which they are judged.
const NAT64: ([u16; 3], u8) = ([0x64, 0xff9b, 0], 96);
/// The doors' own link (lane guarded).
const DOORS: ([u8; 4], u8) = ([169, 254, 1, 0], 24);

/// Addresses that the operator opened, though they are not public.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Internal {
    /// Which.
    pub net: IpNet,
    /// On which ports; never none.
    pub ports: BTreeSet<u16>,
    /// For which pools.
    pub pools: Opening,
    /// For which tenants.
    pub tenants: Opening,
}

/// For whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opening {
    /// Everybody.
    All,
    /// These.
    Named(BTreeSet<Name>),
}

impl Opening {
    /// Whether this one is meant.
    #[must_use]
    pub fn holds(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.iter().any(|known| known.as_str() == name),
        }
    }
}

/// Who dials; empty: no pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who<'a> {
    /// The pool that served the claim.
    pub pool: &'a str,
    /// The claim's owner.
    pub tenant: &'a str,
}

/// What the operator said about addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vetting {
    /// Public addresses that lead back to this host.
    pub own: Vec<IpNet>,
    /// Ports of the daemon itself, on whatever local address.
    pub own_ports: BTreeSet<u16>,
    /// Prefixes of 96 bits behind which IPv4 lies.
    pub nat64: Vec<Ipv6Net>,
    /// What is opened.
    pub internal: Vec<Internal>,
}

/// An address that may be dialled. Only [`Vetting::vet`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vetted(SocketAddr);

impl Vetted {
    /// The address.
    #[must_use]
    pub const fn address(self) -> SocketAddr {
        self.0
    }
}

/// What became of one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// The address.
    pub address: IpAddr,
    /// Why it is refused; none: it is not.
    pub refused: Option<DoorReason>,
    /// The range that decided, where one did.
    pub range: Option<String>,
}

impl Vetting {
    /// All addresses of a name, if every one of them may be dialled. `interfaces`: the host's own addresses, now.
    ///
    /// # Errors
    /// The first that may not.
    pub fn vet(
        &self,
        interfaces: &[IpAddr],
        addresses: &[IpAddr],
        port: u16,
        who: Who<'_>,
    ) -> Result<Vec<Vetted>, Judged> {
        let mut vetted = Vec::with_capacity(addresses.len());
        for address in addresses {
            let judged = self.judge(interfaces, *address, port, who);
            if judged.refused.is_some() {
                return Err(judged);
            }
            vetted.push(Vetted(SocketAddr::new(judged.address, port)));
        }
        Ok(vetted)
    }

    /// Judges one address; the first that hits decides: own, metadata, opened, special, else public.
    #[must_use]
    pub fn judge(&self, interfaces: &[IpAddr], address: IpAddr, port: u16, who: Who<'_>) -> Judged {
        let address = address.to_canonical();
        // What it leads to, where it is IPv4 in another dress.
        let meant = self.meant(address);
        let judged = |refused, range| Judged {
            address,
            refused,
            range,
        };
        for form in [address, meant] {
            if let Some(range) = self.own(interfaces, form, port) {
                return judged(Some(DoorReason::OwnAddress), Some(range));
            }
        }
        let opened = self.internal.iter().find(|open| {
            let exact = open.net.prefix_len() == open.net.max_prefix_len();
            (exact || !is_metadata(meant))
                && open.net.contains(&meant)
                && open.ports.contains(&port)
                && open.pools.holds(who.pool)
                && open.tenants.holds(who.tenant)
        });
        if let Some(open) = opened {
            return judged(None, Some(open.net.to_string()));
        }
        if is_metadata(meant) {
            return judged(Some(DoorReason::SpecialAddress), Some(meant.to_string()));
        }
        let range = special(meant);
        judged(range.is_some().then_some(DoorReason::SpecialAddress), range)
    }

    fn own(&self, interfaces: &[IpAddr], address: IpAddr, port: u16) -> Option<String> {
        if interfaces.contains(&address) {
            return Some(address.to_string());
        }
        if let Some(net) = self.own.iter().find(|net| net.contains(&address)) {
            return Some(net.to_string());
        }
        if let IpAddr::V4(v4) = address
            && within_v4(v4, DOORS)
        {
            return Some(text_v4(DOORS));
        }
        // A listener on the wildcard answers on all of them.
        let is_ours = address.is_loopback() && self.own_ports.contains(&port);
        is_ours.then(|| SocketAddr::new(address, port).to_string())
    }

    /// The address that it leads to, where it is IPv4 in another dress.
    #[must_use]
    pub fn meant(&self, address: IpAddr) -> IpAddr {
        match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(v6) => {
                let carries = within_v6(v6, NAT64) || self.nat64.iter().any(|net| net.contains(&v6));
                let [.., a, b, c, d] = v6.octets();
                if carries {
                    Ipv4Addr::new(a, b, c, d).into()
                } else {
                    address
                }
            }
        }
    }
}

fn is_metadata(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => METADATA_V4.contains(&v4.octets()),
        IpAddr::V6(v6) => METADATA_V6.contains(&v6),
    }
}

/// The range that makes an address special.
fn special(address: IpAddr) -> Option<String> {
    match address {
        IpAddr::V4(v4) => SPECIAL_V4
            .iter()
            .find(|range| within_v4(v4, **range))
            .map(|range| text_v4(*range)),
        IpAddr::V6(v6) => {
            if !within_v6(v6, PUBLIC_V6) {
                return Some("not in 2000::/3".to_owned());
            }
            if let Some(range) = SPECIAL_V6.iter().find(|range| within_v6(v6, **range)) {
                return Some(text_v6(*range));
            }
            // ISATAP: the interface id says which IPv4 address is behind it.
            let [_, _, _, _, high, low, ..] = v6.segments();
            (high & !0x0200 == 0 && low == 0x5efe).then(|| "ISATAP".to_owned())
        }
    }
}

fn within_v4(address: Ipv4Addr, (net, bits): ([u8; 4], u8)) -> bool {
    let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
    (address.to_bits() ^ Ipv4Addr::from(net).to_bits()) & mask == 0
}

fn within_v6(address: Ipv6Addr, (net, bits): ([u16; 3], u8)) -> bool {
    let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
    (address.to_bits() ^ wide(net).to_bits()) & mask == 0
}

const fn wide([a, b, c]: [u16; 3]) -> Ipv6Addr {
    Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0)
}

fn text_v4((net, bits): ([u8; 4], u8)) -> String {
    format!("{}/{bits}", Ipv4Addr::from(net))
}

fn text_v6((net, bits): ([u16; 3], u8)) -> String {
    format!("{}/{bits}", wide(net))
}
