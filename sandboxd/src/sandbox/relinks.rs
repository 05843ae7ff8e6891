//! How often a guest may lose its link and come back, pure: one that plays with its link is as good as dead.

use std::time::Duration;

use crate::{clock::Tick, link::LostWhy};

/// Links that a guest may lose within [`WITHIN`]. An agent that crashed comes back once; one that does it more often
/// serves nobody, and each greeting costs the host more than the guest.
const AT_MOST: usize = 3;
const WITHIN: Duration = Duration::from_secs(60);

/// When the last links were lost, oldest first.
#[derive(Debug, Default)]
pub(super) struct Relinks([Option<Tick>; AT_MOST]);

impl Relinks {
    /// Whether a link that was lost like this, now, may be opened anew.
    pub(super) fn may(&mut self, why: LostWhy, now: Tick) -> bool {
        match why {
            LostWhy::Flooded | LostWhy::Protocol(_) => return false,
            LostWhy::Closed | LostWhy::Ended | LostWhy::Port(_) | LostWhy::Goodbye | LostWhy::Silent => {}
        }
        let [oldest, older, old] = self.0;
        let may = oldest.is_none_or(|at| now.since(at) > WITHIN);
        if may {
            self.0 = [older, old, Some(now)];
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_plays_with_its_link_is_as_good_as_dead() {
        let at = |secs: u64| Tick::from_nanos(secs * 1_000_000_000);
        let mut relinks = Relinks::default();
        for secs in [1, 2, 3] {
            assert!(relinks.may(LostWhy::Ended, at(secs)));
        }
        assert!(!relinks.may(LostWhy::Ended, at(60)));
        assert!(relinks.may(LostWhy::Silent, at(62)), "the first is forgotten");
        assert!(!relinks.may(LostWhy::Goodbye, at(62)));
        let mut fresh = Relinks::default();
        assert!(!fresh.may(LostWhy::Flooded, at(1)));
        assert!(!fresh.may(LostWhy::Protocol(h2::Reason::PROTOCOL_ERROR), at(1)));
    }
}
