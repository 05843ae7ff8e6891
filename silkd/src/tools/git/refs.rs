//! The list of branches, as `git for-each-ref` has it. Pure.

use bytes::Bytes;
use sandbox_protocol::{
    limits::MESSAGE_IN,
    v1::{AgentGitBranchReply, GitBranchEntry},
};

use super::porcelain::Want;

/// Branches of a reply.
const BRANCHES: usize = 10_000;
/// Bytes of a reply's branches, so that it stays a message that everybody takes.
const BYTES: usize = MESSAGE_IN / 2;
/// Longest line; a name has the length of a path.
const LINE: usize = 16 * 1024;

/// Reads lines of any cut.
#[derive(Debug, Default)]
pub(super) struct Refs {
    line: Vec<u8>,
    bytes: usize,
    /// A line was none.
    broken: bool,
    reply: AgentGitBranchReply,
}

impl Refs {
    /// Takes the next bytes.
    pub(super) fn feed(&mut self, input: &[u8]) -> Want {
        for piece in input.split_inclusive(|byte| *byte == b'\n') {
            if self.broken || self.reply.truncated {
                return Want::Enough;
            }
            let whole = piece.strip_suffix(b"\n");
            self.line.extend_from_slice(whole.unwrap_or(piece));
            if self.line.len() > LINE {
                self.broken = true;
            } else if whole.is_some() {
                let line = std::mem::take(&mut self.line);
                self.broken = self.take(&line).is_none();
            }
        }
        Want::More
    }

    /// All was fed, or enough; `None` for what cannot be read.
    pub(super) fn finish(self) -> Option<AgentGitBranchReply> {
        let whole = self.line.is_empty() || self.reply.truncated;
        (whole && !self.broken).then_some(self.reply)
    }

    fn take(&mut self, line: &[u8]) -> Option<()> {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let &[name, head, current, upstream, symbolic] = fields.as_slice() else {
            return None;
        };
        // `origin/HEAD` and its like are other names of branches.
        if !symbolic.is_empty() {
            return Some(());
        }
        self.bytes = self.bytes.saturating_add(line.len()).saturating_add(32);
        if self.reply.branches.len() >= BRANCHES || self.bytes > BYTES {
            self.reply.truncated = true;
            return Some(());
        }
        self.reply.branches.push(GitBranchEntry {
            name: Bytes::copy_from_slice(name),
            head: std::str::from_utf8(head).ok()?.to_owned(),
            current: current == b"*",
            upstream: Bytes::copy_from_slice(upstream),
        });
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(input: &[u8], cut: usize) -> Option<AgentGitBranchReply> {
        let mut refs = Refs::default();
        for piece in input.chunks(cut) {
            refs.feed(piece);
        }
        refs.finish()
    }

    #[test]
    fn lines_are_read_at_every_cut() {
        let text = b"main\x0012ab\0*\0origin/main\0\nx\xff\x0034\0 \0\0\norigin/HEAD\x0034\0 \0\0refs/remotes/origin/main\n";
        let reply = parse(text, text.len()).unwrap();
        let seen: Vec<_> = reply
            .branches
            .iter()
            .map(|b| (&b.name[..], b.head.as_str(), b.current, &b.upstream[..]))
            .collect();
        assert_eq!(
            seen,
            [
                (&b"main"[..], "12ab", true, &b"origin/main"[..]),
                (b"x\xff", "34", false, b"")
            ]
        );
        for cut in 1..text.len() {
            assert_eq!(parse(text, cut).unwrap(), reply);
        }
        assert_eq!(parse(b"", 1).unwrap(), AgentGitBranchReply::default());
    }

    #[test]
    fn what_is_no_list_is_refused_and_what_is_too_long_is_cut_aloud() {
        assert_eq!(parse(b"fatal: no\n", 3), None);
        assert_eq!(parse(b"main\x0012\0*\0\0", 3), None);
        assert_eq!(parse(&[b'x'; LINE + 1], 1000), None);
        let reply = parse(&b"a\x0012\0 \0\0\n".repeat(BRANCHES + 1), 4096).unwrap();
        assert_eq!((reply.branches.len(), reply.truncated), (BRANCHES, true));
    }
}
