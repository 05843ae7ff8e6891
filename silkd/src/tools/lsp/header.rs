//! The length headers of the language server protocol: bytes of a server in, parts of its messages out. Pure.

use bytes::Bytes;
use sandbox_protocol::limits::{CHUNK_OUT, LSP_MESSAGE};

/// Longest head of a message; `Content-Length` and `Content-Type` take less than 100.
const HEAD: usize = 4 * 1024;

/// What the server said is not the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A line that is no header.
    #[error("a line that is no header")]
    Line,
    /// A head without end.
    #[error("a head beyond {HEAD} bytes")]
    LongHead,
    /// None, two, or no number.
    #[error("a head without one Content-Length")]
    NoLength,
    /// Beyond [`LSP_MESSAGE`].
    #[error("a message of {0} bytes: {LSP_MESSAGE} are allowed")]
    TooLarge(u64),
}

/// A part of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its bytes, [`CHUNK_OUT`] at most; empty for a message without content.
    pub data: Bytes,
    /// The message goes on.
    pub more: bool,
}

/// Where the reader stands.
#[derive(Debug, Default)]
pub struct Reader {
    /// The line that has begun.
    line: Vec<u8>,
    /// Bytes of the head so far.
    head: usize,
    /// Of the head so far.
    length: Option<usize>,
    /// Of the content, still to come; `None` within a head.
    left: Option<usize>,
}

impl Reader {
    /// The next part that is in `input`, which it is taken from; `None`: `input` is used up.
    ///
    /// # Errors
    /// [`Malformed`]; nothing more can be read then.
    pub fn next(&mut self, input: &mut Bytes) -> Result<Option<Part>, Malformed> {
        if self.left.is_none() {
            self.left = self.head(input)?;
        }
        let Some(left) = self.left else { return Ok(None) };
        if input.is_empty() && left > 0 {
            return Ok(None);
        }
        let data = input.split_to(left.min(input.len()).min(CHUNK_OUT));
        let left = left - data.len();
        self.left = (left > 0).then_some(left);
        Ok(Some(Part { data, more: left > 0 }))
    }

    /// Whether a message has begun and not ended.
    #[must_use]
    pub fn within(&self) -> bool {
        self.left.is_some() || self.head > 0
    }

    /// Reads lines; gives the length once the head is whole.
    fn head(&mut self, input: &mut Bytes) -> Result<Option<usize>, Malformed> {
        while !input.is_empty() {
            let at = input.iter().position(|byte| *byte == b'\n');
            let piece = input.split_to(at.map_or(input.len(), |at| at + 1));
            self.head = self.head.saturating_add(piece.len());
            if self.head > HEAD {
                return Err(Malformed::LongHead);
            }
            self.line.extend_from_slice(&piece);
            if at.is_none() {
                break;
            }
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r\n").ok_or(Malformed::Line)?;
            if line.is_empty() {
                self.head = 0;
                return self.length.take().ok_or(Malformed::NoLength).map(Some);
            }
            self.field(line)?;
        }
        Ok(None)
    }

    /// One header; of those that are not known, the form counts.
    fn field(&mut self, line: &[u8]) -> Result<(), Malformed> {
        let colon = line.iter().position(|byte| *byte == b':');
        let (name, value) = colon
            .and_then(|at| line.split_at_checked(at))
            .ok_or(Malformed::Line)?;
        let token = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
        if name.is_empty() || !name.iter().all(token) {
            return Err(Malformed::Line);
        }
        if !name.eq_ignore_ascii_case(b"content-length") {
            return Ok(());
        }
        let digits = value.get(1..).unwrap_or_default().trim_ascii();
        let number = digits.iter().all(u8::is_ascii_digit).then_some(digits);
        let length: Option<u64> = number
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|text| text.parse().ok());
        let length = length.filter(|_| self.length.is_none());
        let length = length.ok_or(Malformed::NoLength)?;
        let whole = usize::try_from(length)
            .ok()
            .filter(|length| *length <= LSP_MESSAGE);
        self.length = Some(whole.ok_or(Malformed::TooLarge(length))?);
        Ok(())
    }
}

/// The head of a message of so many bytes.
#[must_use]
pub fn head(length: usize) -> Bytes {
    format!("Content-Length: {length}\r\n\r\n").into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The messages in `input`, whole, however it is cut.
    fn read(input: &[u8], cut: usize) -> Result<Vec<Vec<u8>>, Malformed> {
        let (mut reader, mut messages, mut begun) = (Reader::default(), Vec::new(), Vec::new());
        for piece in input.chunks(cut.max(1)) {
            let mut piece = Bytes::copy_from_slice(piece);
            while let Some(part) = reader.next(&mut piece)? {
                begun.extend_from_slice(&part.data);
                assert!(part.data.len() <= CHUNK_OUT);
                assert_eq!(part.more, reader.within());
                if !part.more {
                    messages.push(std::mem::take(&mut begun));
                }
            }
            assert!(piece.is_empty());
        }
        Ok(messages)
    }

    #[test]
    fn heads_are_read_as_servers_write_them() {
        let text = b"Content-Length: 2\r\n\r\n{}content-type: x; y=z\r\nCONTENT-LENGTH:0\r\n\r\nContent-Length:  3 \r\n\r\n\r\n\0";
        for cut in 1..text.len() {
            assert_eq!(read(text, cut).unwrap(), [&b"{}"[..], b"", b"\r\n\0"], "{cut}");
        }
    }

    #[test]
    fn what_is_no_head_is_refused_as_soon_as_it_is_a_line() {
        for (bad, error) in [
            (&b"Listening on stdio\n"[..], Malformed::Line),
            (b"a b: c\r\n", Malformed::Line),
            (b": c\r\n", Malformed::Line),
            (b"Content-Length: 2\n\n{}", Malformed::Line),
            (b"Content-Type: x\r\n\r\n", Malformed::NoLength),
            (b"Content-Length: -2\r\n", Malformed::NoLength),
            (b"Content-Length: +2\r\n", Malformed::NoLength),
            (b"Content-Length:\r\n", Malformed::NoLength),
            (b"Content-Length: 1\r\nContent-Length: 1\r\n", Malformed::NoLength),
            (b"Content-Length: 99999999999999999999\r\n", Malformed::NoLength),
            (b"Content-Length: 8388609\r\n", Malformed::TooLarge(8_388_609)),
        ] {
            assert_eq!(read(bad, 4), Err(error), "{bad:?}");
        }
        assert_eq!(read(&[b'x'; HEAD + 1], 100), Err(Malformed::LongHead));
        assert_eq!(read(&b"a: b\r\n".repeat(HEAD), 100), Err(Malformed::LongHead));
    }

    #[test]
    fn the_largest_message_passes_in_parts() {
        let mut text = head(LSP_MESSAGE).to_vec();
        text.resize(text.len() + LSP_MESSAGE, b'x');
        assert_eq!(read(&text, usize::MAX).unwrap()[0].len(), LSP_MESSAGE);
    }

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in(messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..6), cut in 1..50_usize) {
            let text: Vec<u8> = messages.iter().flat_map(|m| [&head(m.len())[..], m].concat()).collect();
            prop_assert_eq!(read(&text, cut).unwrap(), messages);
        }

        #[test]
        fn no_bytes_upset_it_and_cuts_change_nothing(input in proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b':'), any::<u8>()], 0..200), cut in 1..50_usize) {
            prop_assert_eq!(read(&input, cut), read(&input, 1000));
        }
    }
}
