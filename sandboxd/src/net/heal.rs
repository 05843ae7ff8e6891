//! Whether the table is ours, decided from the kernel's news. Pure.
//!
//! Every commit in the namespace has a number, and ours name the number that they stand on, so which numbers are ours is
//! known exactly: any other is tampering.

/// What is known of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Watch {
    /// The generation of our last commit.
    own: u32,
    locked: bool,
}

/// What the kernel told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// A commit, or the answer to our asking.
    Generation(u32),
    /// News were lost.
    Lost,
}

impl Watch {
    /// A table that was just put there.
    pub(super) const fn new(own: u32) -> Self {
        Self { own, locked: true }
    }

    /// Whether the table stands, as far as is known.
    pub(super) const fn locked(self) -> bool {
        self.locked
    }

    /// Whether the table must be put back. Numbers up to ours are old news: our commit replaced whatever they did.
    pub(super) const fn tampered(self, news: News) -> bool {
        match news {
            News::Generation(seen) => seen.wrapping_sub(self.own).cast_signed() > 0,
            News::Lost => true,
        }
    }

    /// The table was put back. Whether links must be raised again.
    pub(super) const fn healed(&mut self, own: u32) -> bool {
        self.own = own;
        let was_lost = !self.locked;
        self.locked = true;
        was_lost
    }

    /// It could not be put back: all links go down, and stay down until it is. (Also told when raising them failed.)
    pub(super) const fn failed(&mut self) {
        self.locked = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_later_generations_are_tampering() {
        let watch = Watch::new(7);
        for (seen, tampered) in [(6, false), (7, false), (8, true), (u32::MAX, false)] {
            assert_eq!(watch.tampered(News::Generation(seen)), tampered, "{seen}");
        }
        assert!(watch.tampered(News::Lost));
        // Numbers wrap.
        assert!(Watch::new(u32::MAX).tampered(News::Generation(0)));
        assert!(!Watch::new(0).tampered(News::Generation(u32::MAX)));
    }

    #[test]
    fn links_come_back_with_the_table_and_not_before() {
        let mut watch = Watch::new(1);
        assert!(!watch.healed(3));
        for _ in 0..2 {
            watch.failed();
            assert!(!watch.locked());
        }
        assert!(watch.healed(9));
        assert!(watch.locked() && !watch.tampered(News::Generation(9)));
        assert!(!watch.healed(10));
    }
}
