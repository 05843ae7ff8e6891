//! How many frames without data a guest may send: an honest one is far below, a flood is soon above.
//!
//! `h2` bounds small and empty DATA frames, CONTINUATION and the size of header lists itself. What is left are frames
//! that cost the host work (PING, SETTINGS: each is answered) or memory (interim responses: a few bytes can unpack to
//! a header list of 16 KiB that waits for its reader).

/// Header blocks that an honest guest sends per call: the response's and its trailers.
const HEADERS_PER_REQUEST: u64 = 2;
/// Header blocks that may be owed at once: those of all calls that a link can have open.
const HEADERS_MAX: u64 = HEADERS_PER_REQUEST * sandbox_protocol::limits::LINK_STREAMS as u64;
/// Other frames that may come unprovoked, and at most be saved up.
const OTHERS_MAX: u64 = 8 * 1024;
/// Bytes that the host writes per frame that the guest may answer with. The shortest frame that wants an answer is a
/// PING of 17 bytes; 32 KiB of data want two WINDOW_UPDATEs.
const BYTES_PER_FRAME: u64 = 8;
/// Frames that become free with each ping.
const FRAMES_PER_PING: u64 = 64;
/// What a frame costs that the host must answer. The answer is written, and earns two back.
const ANSWERED: u64 = 8;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;

/// What a guest's frame means for its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Fine,
    Goodbye,
    Flood,
}

/// Finds frame heads in a stream of bytes, however it is cut, and counts.
#[derive(Debug)]
pub(super) struct Allowance {
    head: [u8; 9],
    have: usize,
    /// Bytes of the frame's payload that are still to come.
    payload: usize,
    headers: u64,
    others: u64,
    requests: u64,
    pings: u64,
    written: u64,
}

impl Allowance {
    pub(super) fn new() -> Self {
        Self {
            head: [0; 9],
            have: 0,
            payload: 0,
            headers: 0,
            others: OTHERS_MAX,
            requests: 0,
            pings: 0,
            written: 0,
        }
    }

    /// The host wrote that many bytes.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.written += bytes as u64;
        self.others = OTHERS_MAX.min(self.others + self.written / BYTES_PER_FRAME);
        self.written %= BYTES_PER_FRAME;
    }

    /// Looks at what came; `requests` and `pings` are those ever sent. Once it is not fine it stays so only for the
    /// caller who remembers.
    pub(super) fn read(&mut self, mut bytes: &[u8], requests: u64, pings: u64) -> Verdict {
        let allowed = HEADERS_PER_REQUEST * requests.saturating_sub(self.requests);
        self.headers = HEADERS_MAX.min(self.headers + allowed);
        let free = FRAMES_PER_PING * pings.saturating_sub(self.pings);
        self.others = OTHERS_MAX.min(self.others + free);
        (self.requests, self.pings) = (requests, pings);

        loop {
            let skip = self.payload.min(bytes.len());
            self.payload -= skip;
            bytes = bytes.get(skip..).unwrap_or_default();
            let room = self.head.get_mut(self.have..).unwrap_or_default();
            let n = room.len().min(bytes.len());
            if n == 0 {
                return Verdict::Fine;
            }
            room.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            bytes = bytes.get(n..).unwrap_or_default();
            self.have += n;
            if self.have < self.head.len() {
                return Verdict::Fine;
            }
            let [a, b, c, kind, flags, ..] = self.head;
            self.have = 0;
            self.payload = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            match self.frame(kind, flags) {
                Verdict::Fine => {}
                end @ (Verdict::Goodbye | Verdict::Flood) => return end,
            }
        }
    }

    fn frame(&mut self, kind: u8, flags: u8) -> Verdict {
        let (purse, price) = match kind {
            DATA => return Verdict::Fine,
            GOAWAY => return Verdict::Goodbye,
            HEADERS => (&mut self.headers, 1),
            SETTINGS | PING if flags & ACK == 0 => (&mut self.others, ANSWERED),
            _ => (&mut self.others, 1),
        };
        match purse.checked_sub(price) {
            Some(left) => {
                *purse = left;
                Verdict::Fine
            }
            None => Verdict::Flood,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let len = u32::try_from(payload).unwrap().to_be_bytes();
        let mut bytes = vec![len[1], len[2], len[3], kind, flags, 0, 0, 0, 1];
        bytes.resize(9 + payload, 0x55);
        bytes
    }

    #[test]
    fn an_idle_honest_guest_never_runs_out() {
        let mut allowance = Allowance::new();
        for pings in 1..1_000_000 {
            allowance.wrote(17);
            assert_eq!(allowance.read(&frame(PING, ACK, 8), 0, pings), Verdict::Fine);
        }
    }

    #[test]
    fn a_busy_honest_guest_never_runs_out() {
        let mut allowance = Allowance::new();
        for requests in 1..100_000 {
            // A request of 20 bytes after header compression: headers, trailers, a reset and two window updates back.
            allowance.wrote(20 + 9);
            for kind in [HEADERS, HEADERS, 3, 8, 8] {
                assert_eq!(
                    allowance.read(&frame(kind, 0, 4), requests, 0),
                    Verdict::Fine,
                    "{kind}"
                );
            }
        }
    }

    #[test]
    fn inv_16_floods_end() {
        for (kind, flags, most) in [
            (PING, 0, OTHERS_MAX),
            (SETTINGS, 0, OTHERS_MAX),
            (PING, ACK, OTHERS_MAX),
            (8, 0, OTHERS_MAX),
            (0xee, 0, OTHERS_MAX),
            (HEADERS, 4, 2),
        ] {
            let mut allowance = Allowance::new();
            let mut taken = 0;
            while allowance.read(&frame(kind, flags, 8), 1, 0) == Verdict::Fine {
                // What the host answers earns the guest less than it cost.
                allowance.wrote(if flags == 0 && [PING, SETTINGS].contains(&kind) {
                    17
                } else {
                    0
                });
                taken += 1;
                assert!(taken <= 2 * most, "kind {kind} goes on for ever");
            }
        }
        assert_eq!(
            Allowance::new().read(&frame(GOAWAY, 0, 8), 0, 0),
            Verdict::Goodbye
        );
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(payloads in proptest::collection::vec((0_u8..10, 0_usize..300), 0..40), chunk in 1_usize..50) {
            let bytes: Vec<u8> = payloads.iter().filter(|(kind, _)| *kind != GOAWAY)
                .flat_map(|(kind, len)| frame(*kind, 0, *len)).collect();
            let mut whole = Allowance::new();
            let mut cut = Allowance::new();
            prop_assert_eq!(whole.read(&bytes, 100, 0), Verdict::Fine);
            prop_assert_eq!(cut.read(&[], 100, 0), Verdict::Fine);
            for part in bytes.chunks(chunk) {
                prop_assert_eq!(cut.read(part, 100, 0), Verdict::Fine);
            }
            prop_assert_eq!((whole.headers, whole.others), (cut.headers, cut.others));
        }
    }
}
