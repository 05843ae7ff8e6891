//! `git status --porcelain=v2 --branch -z`, as it comes. Pure: bytes in, a reply out.

use bytes::Bytes;
use sandbox_protocol::{
    limits::MESSAGE_IN,
    v1::{AgentGitStatusReply, GitEntry},
};

/// Entries of a reply.
pub const ENTRIES: usize = 10_000;
/// Bytes of a reply's entries, so that it stays a message that everybody takes.
const BYTES: usize = MESSAGE_IN / 2;
/// What an entry takes beside its paths: letters, lengths and tags.
const ENTRY: usize = 32;
/// Longest record: a path and some fields.
const RECORD: usize = 16 * 1024;

/// What git said is not what it says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Longer than any path makes it.
    #[error("a record beyond {RECORD} bytes")]
    TooLong,
    /// Not of the format.
    #[error("a record that is none: `{}`", .0.escape_ascii())]
    Record(Vec<u8>),
    /// It ended within a record.
    #[error("the output ends within a record")]
    Unfinished,
}

/// Whether more is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Go on.
    More,
    /// The reply is as long as it may be.
    Enough,
}

/// Reads records of any cut.
#[derive(Debug, Default)]
pub struct Porcelain {
    record: Vec<u8>,
    /// A renamed or copied entry, whose source is the next record.
    renamed: Option<GitEntry>,
    bytes: usize,
    reply: AgentGitStatusReply,
}

impl Porcelain {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// [`Malformed`]; nothing more can be read then.
    pub fn feed(&mut self, input: &[u8]) -> Result<Want, Malformed> {
        let mut pieces = input.split_inclusive(|byte| *byte == 0);
        for piece in &mut pieces {
            if self.reply.truncated {
                return Ok(Want::Enough);
            }
            let whole = piece.strip_suffix(&[0]);
            let part = whole.unwrap_or(piece);
            if self.record.len().saturating_add(part.len()) > RECORD {
                return Err(Malformed::TooLong);
            }
            self.record.extend_from_slice(part);
            if whole.is_some() {
                let record = std::mem::take(&mut self.record);
                self.take(&record)?;
            }
        }
        Ok(if self.reply.truncated {
            Want::Enough
        } else {
            Want::More
        })
    }

    /// All was fed, or enough.
    ///
    /// # Errors
    /// [`Malformed::Unfinished`].
    pub fn finish(self) -> Result<AgentGitStatusReply, Malformed> {
        let whole = self.record.is_empty() && self.renamed.is_none();
        if whole || self.reply.truncated {
            Ok(self.reply)
        } else {
            Err(Malformed::Unfinished)
        }
    }

    fn take(&mut self, record: &[u8]) -> Result<(), Malformed> {
        if let Some(mut entry) = self.renamed.take() {
            entry.from = Bytes::copy_from_slice(record);
            self.push(entry);
            return Ok(());
        }
        let malformed = || Malformed::Record(record.get(..64).unwrap_or(record).to_vec());
        let (kind, rest) = record.split_at_checked(2).ok_or_else(malformed)?;
        match kind {
            b"# " => self.header(rest).ok_or_else(malformed),
            // Letters, submodule, three modes, two names of content; then the path.
            b"1 " => self.changed(rest, 6, false).ok_or_else(malformed),
            b"2 " => {
                self.renamed = Some(entry(rest, 7, false).ok_or_else(malformed)?);
                Ok(())
            }
            b"u " => self.changed(rest, 8, true).ok_or_else(malformed),
            b"? " | b"! " => {
                let letter = if kind == b"? " { "?" } else { "!" };
                self.push(GitEntry {
                    path: Bytes::copy_from_slice(rest),
                    index: letter.to_owned(),
                    worktree: letter.to_owned(),
                    ..GitEntry::default()
                });
                Ok(())
            }
            _ => Err(malformed()),
        }
    }

    fn changed(&mut self, rest: &[u8], fields: usize, unmerged: bool) -> Option<()> {
        self.push(entry(rest, fields, unmerged)?);
        Some(())
    }

    fn push(&mut self, entry: GitEntry) {
        let size = entry
            .path
            .len()
            .saturating_add(entry.from.len())
            .saturating_add(ENTRY);
        let bytes = self.bytes.saturating_add(size);
        if self.reply.entries.len() >= ENTRIES || bytes > BYTES {
            self.reply.truncated = true;
            return;
        }
        self.bytes = bytes;
        self.reply.entries.push(entry);
    }

    /// A line about the branch. One of a kind that is not known, as a later git may have it, is passed over.
    fn header(&mut self, line: &[u8]) -> Option<()> {
        let space = line.iter().position(|byte| *byte == b' ')?;
        let (key, value) = line.split_at_checked(space)?;
        let value = value.get(1..)?;
        match key {
            b"branch.oid" if value != b"(initial)" => {
                self.reply.head = std::str::from_utf8(value).ok()?.to_owned();
            }
            b"branch.head" if value != b"(detached)" => self.reply.branch = Bytes::copy_from_slice(value),
            b"branch.upstream" => self.reply.upstream = Bytes::copy_from_slice(value),
            b"branch.ab" => {
                let (ahead, behind) = std::str::from_utf8(value).ok()?.split_once(' ')?;
                self.reply.ahead = Some(ahead.strip_prefix('+')?.parse().ok()?);
                self.reply.behind = Some(behind.strip_prefix('-')?.parse().ok()?);
            }
            _ => {}
        }
        Some(())
    }
}

/// An entry whose path comes after so many fields behind its letters.
fn entry(rest: &[u8], fields: usize, unmerged: bool) -> Option<GitEntry> {
    let mut parts = rest.splitn(fields + 2, |byte| *byte == b' ');
    let letters = parts.next()?;
    let &[index, worktree] = letters else { return None };
    let letter = |byte: u8| byte.is_ascii_graphic().then(|| char::from(byte).to_string());
    let path = parts.nth(fields)?;
    Some(GitEntry {
        path: Bytes::copy_from_slice(path),
        from: Bytes::new(),
        index: letter(index)?,
        worktree: letter(worktree)?,
        unmerged,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const H: &str = "0123456789012345678901234567890123456789";

    fn parse(input: &[u8], cut: usize) -> Result<AgentGitStatusReply, Malformed> {
        let mut porcelain = Porcelain::default();
        for piece in input.chunks(cut.max(1)) {
            porcelain.feed(piece)?;
        }
        porcelain.finish()
    }

    #[test]
    fn every_kind_of_record_is_read_at_every_cut() {
        let mut text = format!(
            "# branch.oid {H}\0# branch.head main\0# branch.upstream origin/main\0# branch.ab +1 -2\0# stash 3\0\
             1 M. N... 100644 100644 100644 {H} {H} a b\nc\0\
             2 R. N... 100644 100644 100644 {H} {H} R100 new name\0old name\0\
             u UU N... 100644 100644 100644 100644 {H} {H} {H} both\0"
        )
        .into_bytes();
        text.extend_from_slice(b"? \xff odd\0! ignored/\0");
        let reply = parse(&text, text.len()).unwrap();
        assert_eq!((&reply.branch[..], reply.head.as_str()), (&b"main"[..], H));
        assert_eq!(
            (&reply.upstream[..], reply.ahead, reply.behind),
            (&b"origin/main"[..], Some(1), Some(2))
        );
        let seen: Vec<_> = reply
            .entries
            .iter()
            .map(|e| {
                (
                    &e.path[..],
                    &e.from[..],
                    e.index.as_str(),
                    e.worktree.as_str(),
                    e.unmerged,
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                (&b"a b\nc"[..], &b""[..], "M", ".", false),
                (b"new name", b"old name", "R", ".", false),
                (b"both", b"", "U", "U", true),
                (b"\xff odd", b"", "?", "?", false),
                (b"ignored/", b"", "!", "!", false),
            ]
        );
        for cut in 1..text.len() {
            assert_eq!(parse(&text, cut).unwrap(), reply, "{cut}");
        }
        let fresh = parse(b"# branch.oid (initial)\0# branch.head (detached)\0", 9).unwrap();
        assert_eq!(fresh, AgentGitStatusReply::default());
    }

    #[test]
    fn what_is_no_record_is_refused() {
        for bad in [
            &b"x\0"[..],
            b"3 M. \0",
            b"1 M. N... 100644\0",
            b"1 M N... 1 2 3 4 5 path\0",
            b"# branch.ab 1 2\0",
            b"\0",
            b"fatal: oops\0",
        ] {
            assert!(matches!(parse(bad, 3), Err(Malformed::Record(_))), "{bad:?}");
        }
        assert_eq!(parse(b"? half", 3), Err(Malformed::Unfinished));
        let renamed = format!("2 R. N... 1 2 3 {H} {H} R100 new\0");
        assert_eq!(parse(renamed.as_bytes(), 7), Err(Malformed::Unfinished));
        assert_eq!(parse(&vec![b'?'; RECORD + 1], 4096), Err(Malformed::TooLong));
    }

    #[test]
    fn a_reply_has_its_bounds_and_says_so() {
        let many: Vec<u8> = b"? a\0".repeat(ENTRIES + 1);
        let mut porcelain = Porcelain::default();
        assert_eq!(porcelain.feed(&many).unwrap(), Want::Enough);
        let reply = porcelain.finish().unwrap();
        assert_eq!((reply.entries.len(), reply.truncated), (ENTRIES, true));
        let whole = parse(&b"? a\0".repeat(ENTRIES), 5).unwrap();
        assert_eq!((whole.entries.len(), whole.truncated), (ENTRIES, false));

        let long = [b"? ", &vec![b'x'; 4000][..], b"\0"].concat().repeat(1000);
        let reply = parse(&long, 65536).unwrap();
        assert!(reply.truncated);
        assert!(prost::Message::encoded_len(&reply) < MESSAGE_IN);
    }

    proptest! {
        #[test]
        fn no_bytes_upset_it_and_cuts_change_nothing(input in proptest::collection::vec(prop_oneof![Just(0_u8), Just(b' '), Just(b'1'), Just(b'2'), any::<u8>()], 0..300), cut in 1..50_usize) {
            prop_assert_eq!(parse(&input, cut), parse(&input, 1000));
        }
    }
}
