//! What a door would answer, and why: by the functions that doors ask.

use sandbox_protocol::door::DoorReason;

use super::Egress;
use crate::policy::{Authority, Decision, Host, Judged, Ruling, Seen, Sides, Who, decide};

/// An explanation.
#[derive(Debug)]
pub struct Explained<'a> {
    /// What each side says.
    pub decision: Decision<'a>,
    /// Why a guest is refused; none: it is not, as far as was looked.
    pub refused: Option<DoorReason>,
    /// The addresses of a name that every side allowed, if they were asked for.
    pub addresses: Vec<Judged>,
}

/// Decides and, if that is wanted and every side allows it, resolves and judges the addresses. Nothing is dialled. A
/// denied name is not resolved.
pub async fn explain<'a>(
    egress: &Egress,
    sides: &'a Sides,
    target: &Authority,
    seen: Seen<'_>,
    who: Option<Who<'_>>,
) -> Explained<'a> {
    let decision = decide(sides, target, seen);
    let denial = decision.denial().map(|verdict| verdict.ruling);
    let mut refused = match denial {
        Some(Ruling::Denied { reason, .. }) => Some(reason),
        Some(Ruling::Allowed(_)) | None => None,
    };
    let mut addresses = Vec::new();
    if let (None, Some(who)) = (refused, who) {
        match judged(egress, target, who).await {
            Ok(judged) => {
                refused = judged.iter().find_map(|judged| judged.refused);
                addresses = judged;
            }
            Err(reason) => refused = Some(reason),
        }
    }
    Explained {
        decision,
        refused,
        addresses,
    }
}

async fn judged(egress: &Egress, target: &Authority, who: Who<'_>) -> Result<Vec<Judged>, DoorReason> {
    let addresses = match target.host() {
        Host::Address(address) => vec![*address],
        Host::Name(name) => egress.0.resolver.load_full().resolve(name).await?,
    };
    let interfaces = egress
        .0
        .interfaces
        .now()
        .map_err(|_unreadable| DoorReason::OwnAddress)?;
    let vetting = egress.0.vetting.load();
    let judge = |address: &std::net::IpAddr| vetting.judge(&interfaces, *address, target.port(), who);
    Ok(addresses.iter().map(judge).collect())
}
