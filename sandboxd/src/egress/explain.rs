//! What a door would answer, and why: by the functions that doors ask.

use sandbox_protocol::door::DoorReason;

use super::{Egress, Way};
use crate::policy::{Authority, Decision, Judged, Ruling, Seen, Sides, Who, decide};

/// An explanation.
#[derive(Debug)]
pub struct Explained<'a> {
    /// What each side says.
    pub decision: Decision<'a>,
    /// Why a guest is refused; none: it is not, as far as was looked.
    pub refused: Option<DoorReason>,
    /// The addresses of a name that every side allowed, if they were asked for.
    pub addresses: Vec<Judged>,
    /// Name of the secret that the request is given, or should be.
    pub secret: Option<String>,
    /// Which way it goes, if every side allows it.
    pub way: Way,
}

/// Decides and, if that is wanted and every side allows it, resolves and judges the addresses. Nothing is dialled. A
/// denied name is not resolved, nor is one that is handed on to an upstream proxy.
pub async fn explain<'a>(
    egress: &Egress,
    sides: &'a Sides,
    target: &Authority,
    seen: Seen<'_>,
    who: Who<'_>,
    resolve: bool,
) -> Explained<'a> {
    let decision = decide(sides, target, seen);
    let mut explained = Explained {
        decision,
        refused: None,
        addresses: Vec::new(),
        secret: decision
            .secret()
            .filter(|_| seen != Seen::Tunnel)
            .map(str::to_owned),
        way: Way::default(),
    };
    let denial = decision.denial().map(|verdict| verdict.ruling);
    let looked = match denial {
        Some(Ruling::Denied { reason, .. }) => Err(reason),
        Some(Ruling::Allowed(_)) | None => {
            let given = egress.secrets().give(&decision, target, seen, who.tenant);
            given.and_then(|_given| egress.way(target, who))
        }
    };
    match looked {
        Ok(way) if resolve && way.vetted => {
            explained.way = way;
            let judged = async {
                let addresses = egress.addresses(target).await?;
                egress.judged(target, &addresses, who).await
            };
            match judged.await {
                Ok(judged) => {
                    explained.refused = judged.iter().find_map(|judged| judged.refused);
                    explained.addresses = judged;
                }
                Err(reason) => explained.refused = Some(reason),
            }
        }
        Ok(way) => explained.way = way,
        Err(reason) => explained.refused = Some(reason),
    }
    explained
}
