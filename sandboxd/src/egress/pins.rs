//! Addresses that a guest was told, and for which name: a client that looks a name up and dials the address is judged by
//! the name. Pure.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    time::Duration,
};

use tokio::time::Instant;

/// Of one sandbox.
const MOST: usize = 1_024;
/// How long one holds.
const HOLDS: Duration = Duration::from_secs(600);

/// What one guest was told in one claim.
#[derive(Debug, Default)]
pub(super) struct Pins {
    names: BTreeMap<IpAddr, (String, Instant)>,
    /// The same addresses, oldest first; one that was told again stands there twice.
    order: VecDeque<(Instant, IpAddr)>,
}

impl Pins {
    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.order.clear();
    }

    /// The name told last counts.
    pub(super) fn put(&mut self, name: &str, addresses: &[IpAddr], now: Instant) {
        for address in addresses {
            self.names.insert(*address, (name.to_owned(), now));
            self.order.push_back((now, *address));
            while self.order.len() > MOST {
                if let Some((at, oldest)) = self.order.pop_front()
                    && self.names.get(&oldest).is_some_and(|(_, told)| *told == at)
                {
                    self.names.remove(&oldest);
                }
            }
        }
    }

    pub(super) fn name(&self, address: IpAddr, now: Instant) -> Option<String> {
        let (name, told) = self.names.get(&address)?;
        (now.saturating_duration_since(*told) < HOLDS).then(|| name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u32) -> IpAddr {
        IpAddr::V4(n.into())
    }

    #[test]
    fn pins_are_few_and_hold_for_a_while() {
        let (mut pins, begun) = (Pins::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        for n in 0..2_000 {
            pins.put("a.test", &[address(n)], at(0));
        }
        assert_eq!((pins.names.len(), pins.order.len()), (MOST, MOST));
        assert_eq!(pins.name(address(0), at(0)), None);
        assert_eq!(pins.name(address(1_999), at(599)).as_deref(), Some("a.test"));
        assert_eq!(pins.name(address(1_999), at(600)), None);
        // The same address again and again takes no more room, and its last name counts.
        for n in 1..=2_000 {
            pins.put("b.test", &[address(7)], at(n));
        }
        assert_eq!((pins.names.len(), pins.order.len()), (1, MOST));
        assert_eq!(pins.name(address(7), at(2_000)).as_deref(), Some("b.test"));
        pins.clear();
        assert_eq!(pins.name(address(7), at(2_000)), None);
    }
}
