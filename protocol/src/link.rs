//! The framing of a guest port below HTTP/2: BREAK and HELLO, as sans-I/O readers and writers.
//!
//! A virtio-serial port shows no connection boundary: most reopenings on the host's side are invisible to the
//! guest, a clone does not see that its template's connection is gone, and bytes of an old and a new connection run
//! together. So the boundary travels in-band, and readiness is learned from it without polling:
//!
//! - **BREAK**, host to guest, first thing on every connection: [`BREAK_ZEROS`] zero bytes, `0x01`, a random
//!   [`Nonce`]. HTTP/2 frames on a link are at most 16 KiB long, so no legal stream holds such a run of zeros.
//! - **HELLO**, guest to host, the answer: [`HELLO_MAGIC`], the nonce echoed, a big-endian `u16` length, a
//!   [`LinkHello`]. The host discards what comes before magic *and* its own nonce. Data that holds either can fake
//!   neither.
//!
//! May call: nothing.
//! Never inside: tokio, a log line.
//! Invariant 15: no restored guest inherits a connection or its bytes. Invariant 16: all that a guest says is bounded
//! before it is stored. Invariant 19: an old silkd never gets what it would drop in silence.

use prost::Message as _;

use crate::{
    limits::{PROTO_MAX, PROTO_MIN},
    v1::LinkHello,
};

/// Zero bytes that begin a BREAK.
pub const BREAK_ZEROS: usize = 32_768;
/// What begins a HELLO.
pub const HELLO_MAGIC: [u8; 8] = *b"SILKHELO";
/// Longest encoded [`LinkHello`].
pub const HELLO_MAX: usize = 1024;
/// Bytes that the host discards before a HELLO, at most; then the link has failed.
pub const HELLO_DISCARD: usize = 4 * 1024 * 1024;

/// Random bytes that tie a HELLO to its BREAK.
pub type Nonce = [u8; 16];

const BREAK_MARK: u8 = 0x01;
const HELLO_HEAD: usize = HELLO_MAGIC.len() + size_of::<Nonce>();

/// The bytes of a BREAK.
#[must_use]
pub fn encode_break(nonce: Nonce) -> Vec<u8> {
    let mut bytes = vec![0; BREAK_ZEROS];
    bytes.push(BREAK_MARK);
    bytes.extend_from_slice(&nonce);
    bytes
}

/// The bytes of a HELLO.
///
/// # Errors
/// [`HelloError::TooLong`] if the message is longer than [`HELLO_MAX`].
pub fn encode_hello(nonce: Nonce, hello: &LinkHello) -> Result<Vec<u8>, HelloError> {
    let body = hello.encode_to_vec();
    let length = u16::try_from(body.len())
        .ok()
        .filter(|&n| usize::from(n) <= HELLO_MAX);
    let length = length.ok_or(HelloError::TooLong)?;
    let mut bytes = Vec::with_capacity(HELLO_HEAD + 2 + body.len());
    bytes.extend_from_slice(&HELLO_MAGIC);
    bytes.extend_from_slice(&nonce);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// What the next bytes of a port are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// They belong to the connection in force.
    Data,
    /// They are part of a BREAK; nobody's.
    Nothing,
    /// A BREAK ended with them: end the connection in force, drop its unsent output, answer HELLO, start afresh.
    Break(Nonce),
}

/// The guest's reader: finds BREAKs in what the port brings, however it is cut.
#[derive(Debug)]
pub struct BreakReader(Reading);

#[derive(Debug)]
enum Reading {
    /// That many zeros were the last bytes.
    Stream {
        zeros: usize,
    },
    Nonce {
        bytes: Nonce,
        have: usize,
    },
}

impl Default for BreakReader {
    fn default() -> Self {
        Self(Reading::Stream { zeros: 0 })
    }
}

impl BreakReader {
    /// Looks at `input` and says what its first `n` bytes are; call again with the rest. `n` is 0 only for an empty
    /// input.
    ///
    /// Zeros that turn out to begin a BREAK may have been given out as data before; the connection that got them
    /// ends with that BREAK.
    pub fn feed(&mut self, input: &[u8]) -> (Step, usize) {
        match &mut self.0 {
            Reading::Nonce { bytes, have } => {
                let room = bytes.get_mut(*have..).unwrap_or_default();
                let n = room.len().min(input.len());
                room.iter_mut().zip(input).for_each(|(to, from)| *to = *from);
                *have += n;
                if *have < bytes.len() {
                    return (Step::Nothing, n);
                }
                let nonce = *bytes;
                self.0 = Reading::Stream { zeros: 0 };
                (Step::Break(nonce), n)
            }
            Reading::Stream { zeros } => {
                if *zeros >= BREAK_ZEROS && input.first() == Some(&BREAK_MARK) {
                    self.0 = Reading::Nonce {
                        bytes: Nonce::default(),
                        have: 0,
                    };
                    return (Step::Nothing, 1);
                }
                let n = before_mark(zeros, input);
                (Step::Data, n)
            }
        }
    }
}

/// How many bytes of `input` come before the mark of a BREAK, or all; `zeros` is kept up to date for them.
fn before_mark(zeros: &mut usize, input: &[u8]) -> usize {
    let mut at = 0;
    while let Some(rest) = input.get(at..).filter(|rest| !rest.is_empty()) {
        let missing = BREAK_ZEROS.saturating_sub(*zeros);
        match missing.checked_sub(1).map(|last| rest.get(last)) {
            // No run can be complete before the end: only its last zeros matter.
            Some(None) => {
                let tail = rest.iter().rev().take_while(|byte| **byte == 0).count();
                *zeros = if tail == rest.len() { *zeros + tail } else { tail };
                return input.len();
            }
            // The byte that would complete the run is none of it: nothing up to there can be one.
            Some(Some(byte)) if *byte != 0 => {
                *zeros = 0;
                at += missing;
                continue;
            }
            Some(Some(_)) | None => {}
        }
        let run = rest.iter().take_while(|byte| **byte == 0).count();
        *zeros = zeros.saturating_add(run);
        at += run;
        match input.get(at) {
            Some(&BREAK_MARK) if *zeros >= BREAK_ZEROS => return at,
            Some(_) => {
                *zeros = 0;
                at += 1;
            }
            None => {}
        }
    }
    input.len()
}

/// Why a guest's HELLO was not one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// Nothing but other bytes, [`HELLO_DISCARD`] of them.
    #[error("no HELLO within {HELLO_DISCARD} bytes")]
    Flooded,
    /// The length field says more than [`HELLO_MAX`].
    #[error("HELLO is longer than {HELLO_MAX} bytes")]
    TooLong,
    /// The message does not decode.
    #[error("HELLO does not decode")]
    Undecodable,
}

/// The host's reader: discards what an old connection left and finds the HELLO that answers its BREAK.
#[derive(Debug)]
pub struct HelloReader {
    head: [u8; HELLO_HEAD],
    held: Vec<u8>,
    found: bool,
    discarded: usize,
}

impl HelloReader {
    /// A reader for the answer to the BREAK with this nonce.
    #[must_use]
    pub fn new(nonce: Nonce) -> Self {
        let mut head = [0; HELLO_HEAD];
        head.iter_mut()
            .zip(HELLO_MAGIC.iter().chain(&nonce))
            .for_each(|(to, from)| *to = *from);
        Self {
            head,
            held: Vec::new(),
            found: false,
            discarded: 0,
        }
    }

    /// Takes bytes from the port; gives the HELLO once it is whole, with the bytes that came behind it.
    ///
    /// # Errors
    /// See [`HelloError`]; the link has failed then. At most the length of `input` and 2 KiB are held.
    pub fn feed(&mut self, input: &[u8]) -> Result<Option<(LinkHello, Vec<u8>)>, HelloError> {
        self.held.extend_from_slice(input);
        if !self.found {
            let place = self
                .held
                .windows(HELLO_HEAD)
                .position(|window| *window == self.head);
            // Without the head, only what may be its beginning is kept.
            let drop = place.map_or(self.held.len().saturating_sub(HELLO_HEAD - 1), |at| {
                at + HELLO_HEAD
            });
            self.held.drain(..drop);
            self.found = place.is_some();
            self.discarded += drop;
            if self.discarded > HELLO_DISCARD {
                return Err(HelloError::Flooded);
            }
        }
        let Some((length, rest)) = self.held.split_first_chunk::<2>().filter(|_| self.found) else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes(*length));
        if length > HELLO_MAX {
            return Err(HelloError::TooLong);
        }
        let Some((body, behind)) = rest.split_at_checked(length) else {
            return Ok(None);
        };
        let hello = LinkHello::decode(body).map_err(|_decode| HelloError::Undecodable)?;
        Ok(Some((hello, behind.to_vec())))
    }
}

/// The highest proto that this build and a guest have in common; none: the guest's silkd is too old or too new.
#[must_use]
pub fn negotiate(hello: &LinkHello) -> Option<u32> {
    let low = hello.proto_min.max(PROTO_MIN);
    let high = hello.proto_max.min(PROTO_MAX);
    (low <= high).then_some(high)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every byte of the port, cut by `cuts`, as the reader tells it: data of each connection, and the nonces.
    fn read(reader: &mut BreakReader, bytes: &[u8], chunk: usize) -> (Vec<Vec<u8>>, Vec<Nonce>) {
        let (mut streams, mut nonces) = (vec![vec![]], vec![]);
        for mut part in bytes.chunks(chunk) {
            while !part.is_empty() {
                let (step, n) = reader.feed(part);
                assert!(n > 0);
                match step {
                    Step::Data => streams.last_mut().unwrap().extend_from_slice(&part[..n]),
                    Step::Nothing => {}
                    Step::Break(nonce) => {
                        nonces.push(nonce);
                        streams.push(vec![]);
                    }
                }
                part = &part[n..];
            }
        }
        (streams, nonces)
    }

    #[test]
    fn break_is_found_however_it_is_cut() {
        let mut bytes = b"old".to_vec();
        bytes.extend(encode_break([7; 16]));
        bytes.extend(b"new");
        for chunk in [1, 2, 3, 16, 17, 1000, 32_767, 32_768, 32_769, 65_536, 1 << 20] {
            let (streams, nonces) = read(&mut BreakReader::default(), &bytes, chunk);
            assert_eq!(nonces, [[7; 16]], "cut by {chunk}");
            assert!(streams[0].starts_with(b"old"));
            assert_eq!(streams[1], b"new");
        }
    }

    #[test]
    fn a_run_too_short_or_with_another_mark_is_data() {
        let mut short = vec![0; BREAK_ZEROS - 1];
        short.push(BREAK_MARK);
        short.extend([9; 16]);
        let mut other = vec![0; BREAK_ZEROS];
        other.push(2);
        other.extend([9; 16]);
        for bytes in [short, other] {
            for chunk in [1, 100, 40_000] {
                let (streams, nonces) = read(&mut BreakReader::default(), &bytes, chunk);
                assert!(nonces.is_empty());
                assert_eq!(streams[0], bytes);
            }
        }
    }

    #[test]
    fn a_break_inside_a_break_counts_once_it_is_whole() {
        let mut bytes = encode_break([1; 16]);
        bytes.truncate(BREAK_ZEROS / 2);
        bytes.extend(encode_break([2; 16]));
        let (_, nonces) = read(&mut BreakReader::default(), &bytes, 4096);
        assert_eq!(nonces, [[2; 16]]);
    }

    #[test]
    fn hello_is_found_behind_rubbish_and_only_with_its_nonce() {
        let hello = LinkHello {
            proto_min: 1,
            proto_max: 3,
            version: "x".into(),
            state: 1,
            generation: 9,
        };
        let mut bytes = encode_hello([1; 16], &hello).unwrap();
        bytes.extend(encode_hello([2; 16], &hello).unwrap());
        bytes.extend(b"behind");
        for chunk in [1, 5, 24, 1000] {
            let mut reader = HelloReader::new([2; 16]);
            let mut behind = None;
            for part in bytes.chunks(chunk) {
                match &mut behind {
                    None => {
                        behind = reader.feed(part).unwrap().map(|(got, rest)| {
                            assert_eq!(got, hello);
                            rest
                        });
                    }
                    Some(rest) => rest.extend_from_slice(part),
                }
            }
            assert_eq!(behind.as_deref(), Some(&b"behind"[..]), "cut by {chunk}");
        }
    }

    #[test]
    fn inv_16_hostile_hello_stays_small() {
        let mut reader = HelloReader::new([3; 16]);
        let mut fed = 0;
        let error = loop {
            fed += 65_536;
            match reader.feed(&[0x53; 65_536]) {
                Ok(found) => assert!(found.is_none()),
                Err(error) => break error,
            }
            assert!(reader.held.len() < HELLO_HEAD);
        };
        assert_eq!(error, HelloError::Flooded);
        assert!(fed <= HELLO_DISCARD + 2 * 65_536);

        let mut long = HELLO_MAGIC.to_vec();
        long.extend([3; 16]);
        long.extend(u16::MAX.to_be_bytes());
        assert_eq!(HelloReader::new([3; 16]).feed(&long), Err(HelloError::TooLong));
        let mut rubbish = HELLO_MAGIC.to_vec();
        rubbish.extend([3; 16]);
        rubbish.extend([0, 2, 0xff, 0xff]);
        assert_eq!(
            HelloReader::new([3; 16]).feed(&rubbish),
            Err(HelloError::Undecodable)
        );
    }

    #[test]
    fn protos_without_overlap_are_refused() {
        let hello = |proto_min, proto_max| LinkHello {
            proto_min,
            proto_max,
            ..LinkHello::default()
        };
        assert_eq!(negotiate(&hello(PROTO_MIN, PROTO_MAX)), Some(PROTO_MAX));
        assert_eq!(negotiate(&hello(PROTO_MAX, PROTO_MAX + 5)), Some(PROTO_MAX));
        assert_eq!(negotiate(&hello(PROTO_MAX + 1, PROTO_MAX + 5)), None);
        assert_eq!(negotiate(&hello(0, 0)), None);
    }

    proptest! {
        #[test]
        fn a_break_between_any_two_streams(
            old in proptest::collection::vec(0_u8..3, 0..300),
            new in proptest::collection::vec(0_u8..3, 0..300),
            nonce: Nonce,
            chunk in 1_usize..70_000,
        ) {
            let mut bytes = old.clone();
            bytes.extend(encode_break(nonce));
            bytes.extend(&new);
            let (streams, nonces) = read(&mut BreakReader::default(), &bytes, chunk);
            prop_assert_eq!(nonces, vec![nonce]);
            prop_assert_eq!(&streams[1], &new);
            prop_assert!(streams[0].starts_with(&old));
        }

        #[test]
        fn legal_data_is_never_touched(data in proptest::collection::vec(any::<u8>(), 0..5000), chunk in 1_usize..600) {
            let (streams, nonces) = read(&mut BreakReader::default(), &data, chunk);
            prop_assert!(nonces.is_empty());
            prop_assert_eq!(&streams[0], &data);
        }
    }
}
