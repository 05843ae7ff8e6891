//! What a server said and nobody has taken yet. Pure.

use std::collections::VecDeque;

use sandbox_protocol::limits::CHUNK_OUT;

use super::header::Part;

/// Bytes that are held for a client that may come back; then the server blocks.
const AWAY: usize = 1024 * 1024;
/// And for one that is there.
const THERE: usize = CHUNK_OUT;
/// What a part costs beside its bytes.
const PART: usize = 64;

/// Parts of messages, and whether somebody takes them.
#[derive(Debug, Default)]
pub(super) struct Held {
    parts: VecDeque<Part>,
    bytes: usize,
    attached: bool,
    /// The client has got a part of a message, and not its last.
    within: bool,
    /// The rest of a message, whose beginning went to a client that left, is nobody's.
    skipping: bool,
}

impl Held {
    /// False: somebody is there already.
    pub(super) const fn attach(&mut self) -> bool {
        !std::mem::replace(&mut self.attached, true)
    }

    /// The client leaves. What it had got in part is not held for the next.
    pub(super) fn detach(&mut self) {
        self.attached = false;
        self.skipping = std::mem::take(&mut self.within);
        while self.skipping
            && let Some(part) = self.pop()
        {
            self.skipping = part.more;
        }
    }

    pub(super) const fn attached(&self) -> bool {
        self.attached
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Whether more is to be read.
    pub(super) const fn has_room(&self) -> bool {
        self.bytes < if self.attached { THERE } else { AWAY }
    }

    /// The server said more.
    pub(super) fn push(&mut self, part: Part) {
        if self.skipping {
            self.skipping = part.more;
            return;
        }
        self.bytes += part.data.len() + PART;
        self.parts.push_back(part);
    }

    /// What the client gets next.
    pub(super) fn take(&mut self) -> Option<Part> {
        let part = self.pop()?;
        self.within = part.more;
        Some(part)
    }

    fn pop(&mut self) -> Option<Part> {
        let part = self.parts.pop_front()?;
        self.bytes -= part.data.len() + PART;
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(text: &str, more: bool) -> Part {
        Part {
            data: text.to_owned().into(),
            more,
        }
    }

    fn all(held: &mut Held) -> Vec<String> {
        std::iter::from_fn(|| held.take())
            .map(|part| String::from_utf8(part.data.to_vec()).unwrap())
            .collect()
    }

    #[test]
    fn a_mebibyte_is_held_for_nobody_and_little_for_somebody() {
        let mut held = Held::default();
        let chunk = "x".repeat(CHUNK_OUT);
        let mut count = 0;
        while held.has_room() {
            held.push(part(&chunk, false));
            count += 1;
        }
        assert_eq!(count, AWAY / CHUNK_OUT);
        assert!(held.attach() && !held.has_room());
        while held.take().is_some() {}
        assert!(held.has_room());
        held.push(part(&chunk, false));
        assert!(!held.has_room());
        held.detach();
        assert!(held.has_room());
        // Messages without content take room too.
        let mut held = Held::default();
        let mut count = 0;
        while held.has_room() {
            held.push(part("", false));
            count += 1;
        }
        assert_eq!(count, AWAY / PART);
    }

    #[test]
    fn the_rest_of_a_message_goes_with_the_client_that_had_its_beginning() {
        for held_rest in [true, false] {
            let mut held = Held::default();
            assert!(held.attach());
            assert!(!held.attach());
            held.push(part("whole", false));
            held.push(part("begun", true));
            if held_rest {
                held.push(part("rest", true));
                held.push(part("end", false));
            }
            assert_eq!(held.take().unwrap().data, "whole");
            assert_eq!(held.take().unwrap().data, "begun");
            held.detach();
            if !held_rest {
                held.push(part("rest", true));
                held.push(part("end", false));
            }
            held.push(part("next", false));
            assert!(held.attach());
            assert_eq!(all(&mut held), ["next"]);
            assert_eq!(held.bytes, 0);
        }
        // What nobody had a part of stays.
        let mut held = Held::default();
        held.attach();
        held.push(part("a", true));
        held.detach();
        held.push(part("b", false));
        held.attach();
        assert_eq!(all(&mut held), ["a", "b"]);
    }
}
