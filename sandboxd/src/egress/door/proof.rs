//! Proof that the doors of a sandbox refuse before it is anybody's: one refusal of each, as its guest has it.

use std::sync::atomic::Ordering;

use sandbox_protocol::door::DoorReason;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Accepted, socks5};
use crate::{
    egress::{Denial, Door, DoorKind},
    telemetry::GuestText,
};

/// The doors that every sandbox has, on either lane.
const BOTH: [DoorKind; 2] = [DoorKind::Http, DoorKind::Socks5];
/// Bytes in a pipe to the host's own end.
const PIPE: usize = 1024;

/// Why a door is not proved to refuse.
#[derive(Debug, thiserror::Error)]
pub enum Unproved {
    /// The guest got no answer of it.
    #[error("the {} door does not answer in the guest", door.as_str())]
    Silent {
        /// Which.
        door: DoorKind,
    },
    /// The guest got another answer.
    #[error("the {} door did not refuse in the guest, but said: {said}", door.as_str())]
    Other {
        /// Which.
        door: DoorKind,
        /// The beginning of what it said.
        said: GuestText,
    },
    /// The guest tells of a refusal that this door did not give.
    #[error("the guest's {} door is not the host's", door.as_str())]
    Foreign {
        /// Which.
        door: DoorKind,
    },
}

/// A proof under way. While it lives, one refusal of each door is what was asked for: no decision, and told to nobody.
#[derive(Debug)]
#[must_use = "what is not judged proves nothing"]
pub struct Proof {
    door: Door,
}

impl Door {
    /// Begins a proof; one at a time.
    pub fn prove(&self) -> Proof {
        let all = BOTH.map(bit).into_iter().fold(0, |all, bit| all | bit);
        self.asked_for().store(all, Ordering::Relaxed);
        Proof { door: self.clone() }
    }

    /// Whether a refusal is one that was asked for; it is no more then.
    pub(in crate::egress) fn was_asked_for(&self, kind: DoorKind) -> bool {
        self.asked_for().fetch_and(!bit(kind), Ordering::Relaxed) & bit(kind) != 0
    }
}

const fn bit(kind: DoorKind) -> u8 {
    match kind {
        DoorKind::Http => 1,
        DoorKind::Socks5 => 2,
        DoorKind::Dns => 4,
    }
}

impl Proof {
    /// By what a guest says that its doors said to it.
    ///
    /// # Errors
    /// The first that is not a refusal of this door.
    pub fn by_guest(self, http: &[u8], socks5: &[u8]) -> Result<(), Unproved> {
        for (door, said) in BOTH.into_iter().zip([http, socks5]) {
            judge(door, said)?;
            if self.door.asked_for().load(Ordering::Relaxed) & bit(door) != 0 {
                return Err(Unproved::Foreign { door });
            }
        }
        Ok(())
    }

    /// By the host's end of both, for a guest that cannot be asked. Cancel safe.
    ///
    /// # Errors
    /// The first that does not refuse.
    pub async fn by_host(self) -> Result<(), Unproved> {
        let [http, socks5] = BOTH.map(|kind| said_here(&self.door, kind));
        let (http, socks5) = tokio::join!(http, socks5);
        self.by_guest(&http, &socks5)
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        self.door.asked_for().store(0, Ordering::Relaxed);
    }
}

/// What a door says to a connection on which nothing is sent.
async fn said_here(door: &Door, kind: DoorKind) -> Vec<u8> {
    let (guest, host) = tokio::io::duplex(PIPE);
    let asking = async move {
        let mut guest = guest;
        let mut said = Vec::new();
        // A pipe within this process breaks only by its other end, which has said all then.
        if guest.shutdown().await.is_ok() {
            guest.read_to_end(&mut said).await.ok();
        }
        said
    };
    let ((), said) = tokio::join!(Accepted::new(door, kind).serve(host), asking);
    said
}

fn judge(door: DoorKind, said: &[u8]) -> Result<(), Unproved> {
    if said.is_empty() {
        return Err(Unproved::Silent { door });
    }
    let refuses = match door {
        DoorKind::Http => said.starts_with(Denial::bare(DoorReason::NotArmed).status_line().as_bytes()),
        DoorKind::Socks5 => said == socks5::NO_METHOD,
        // It answers questions alone.
        DoorKind::Dns => false,
    };
    if refuses {
        return Ok(());
    }
    Err(Unproved::Other {
        door,
        said: GuestText::head(said),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::tests::{Bench, within};

    const HTTP: &[u8] = b"HTTP/1.1 403 not_armed\r\ncontent-type: ";

    #[test]
    fn only_a_refusal_of_a_door_without_a_claim_is_one() {
        assert!(judge(DoorKind::Http, HTTP).is_ok());
        assert!(judge(DoorKind::Socks5, &[5, 0xff]).is_ok());
        for door in BOTH {
            assert!(matches!(judge(door, b""), Err(Unproved::Silent { .. })));
        }
        for (door, said) in [
            (DoorKind::Http, &b"HTTP/1.1 503 door_unreachable\r\n"[..]),
            (DoorKind::Http, b"HTTP/1.1 200 OK\r\n"),
            (DoorKind::Http, b"HTTP/1.1 403"),
            (DoorKind::Socks5, &[5, 0]),
            (DoorKind::Socks5, &[5]),
            (DoorKind::Socks5, HTTP),
            (DoorKind::Dns, HTTP),
        ] {
            let told = judge(door, said).unwrap_err();
            assert!(matches!(told, Unproved::Other { .. }), "{told}");
        }
        // A guest's words are escaped.
        let told = judge(DoorKind::Http, b"\x1b[31m").unwrap_err().to_string();
        assert!(told.ends_with("said: \\u{1b}[31m"), "{told}");
    }

    #[tokio::test]
    async fn the_hosts_end_refuses_until_it_is_armed() {
        let bench = Bench::new().await;
        within(bench.door.prove().by_host()).await.unwrap();
        // An armed door serves, and waits for a request that does not come.
        bench.arm();
        let told = within(bench.door.prove().by_host()).await.unwrap_err();
        assert!(
            matches!(told, Unproved::Silent { door: DoorKind::Http }),
            "{told}"
        );
    }

    #[tokio::test]
    async fn a_guest_that_tells_of_a_refusal_that_was_not_given_proves_nothing() {
        let bench = Bench::new().await;
        let told = bench.door.prove().by_guest(HTTP, &[5, 0xff]).unwrap_err();
        assert!(
            matches!(told, Unproved::Foreign { door: DoorKind::Http }),
            "{told}"
        );
        let proof = bench.door.prove();
        for kind in BOTH {
            within(said_here(&bench.door, kind)).await;
        }
        proof.by_guest(HTTP, &[5, 0xff]).unwrap();
    }
}
