//! Whom a request speaks for.

use std::{net::SocketAddr, sync::Arc};

use arc_swap::ArcSwap;
use http::{Extensions, HeaderMap, header::AUTHORIZATION};
use sandbox_protocol::{
    id::RequestId,
    metadata::{BEARER, SANDBOX_TRACE},
    reason::Reason,
};

use super::Refusal;
use crate::access::{Access, Caller, Operator, PeerIds, Principal};

/// The credentials in force; a reload swaps them.
pub type AccessNow = Arc<ArcSwap<Access>>;

/// Who connected, in the extensions of each request.
#[derive(Debug, Clone)]
pub enum Peer {
    /// By a Unix socket: the kernel's word.
    Unix(Arc<PeerIds>),
    /// By TCP.
    Tcp(SocketAddr),
}

/// What each service needs to know of a request besides its message.
#[derive(Debug, Clone)]
pub struct Ctx {
    /// Its id.
    pub id: RequestId,
    /// Whom it speaks for.
    pub caller: Caller,
    /// Whether exact counts are asked for.
    pub trace: bool,
}

impl Ctx {
    /// Looks at a request of a service.
    #[must_use]
    pub fn of<T>(request: &tonic::Request<T>, access: &Access) -> Self {
        Self::new(request.metadata().as_ref(), request.extensions(), access)
    }

    pub(super) fn new(headers: &HeaderMap, extensions: &Extensions, access: &Access) -> Self {
        let peer = match extensions.get::<Peer>() {
            Some(Peer::Unix(ids)) => Some(ids.as_ref()),
            Some(Peer::Tcp(_)) | None => None,
        };
        Self {
            // Only a request that no listener brought has none, in a test.
            id: extensions
                .get::<RequestId>()
                .copied()
                .unwrap_or(RequestId::from_random([0; 16])),
            caller: access.caller(bearer(headers), peer),
            trace: headers
                .get(SANDBOX_TRACE)
                .is_some_and(|value| value.as_bytes() == b"1"),
        }
    }

    /// The principal of a call that names no sandbox.
    ///
    /// # Errors
    /// `TOKEN_REQUIRED` without a credential, `TOKEN_INVALID` with one that is none here.
    pub fn principal(&self) -> Result<Principal, Refusal> {
        match &self.caller {
            Caller::Known(principal) => Ok(principal.clone()),
            Caller::Nobody => Err(Refusal::new(
                Reason::TokenRequired,
                "this call needs a token, or an operator's user on the Unix socket",
            )),
            Caller::Stranger => Err(Refusal::new(Reason::TokenInvalid, "nobody has this token")),
            Caller::Claim(_) => Err(Refusal::new(
                Reason::NotAllowed,
                "a claim's token opens its own sandbox only",
            )),
        }
    }

    /// The operator of a call that only operators may make.
    ///
    /// # Errors
    /// Those of [`principal`](Self::principal), and `NOT_ALLOWED`.
    pub fn operator(&self) -> Result<Operator, Refusal> {
        match self.principal()? {
            Principal::Operator(operator) => Ok(operator),
            Principal::Tenant { .. } | Principal::Claimer { .. } => {
                Err(Refusal::new(Reason::NotAllowed, "only operators may do this"))
            }
        }
    }
}

/// The token, if the header is there; empty if it holds anything but one bearer token, which opens nothing.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next()?;
    let text = value.to_str().unwrap_or_default();
    let alone = values.next().is_none();
    Some(text.strip_prefix(BEARER).filter(|_| alone).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(AUTHORIZATION, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_header_that_is_there_decides_alone() {
        assert_eq!(bearer(&headers(&[])), None);
        assert_eq!(bearer(&headers(&["Bearer sbt_x"])), Some("sbt_x"));
        for wrong in [
            &["Basic sbt_x"][..],
            &["bearer sbt_x"],
            &[""],
            &["Bearer sbt_x", "Bearer sbt_x"],
        ] {
            assert_eq!(bearer(&headers(wrong)), Some(""), "{wrong:?}");
        }
    }

    #[test]
    fn who_is_refused_how() {
        let ctx = |caller| Ctx {
            id: RequestId::from_random([0; 16]),
            caller,
            trace: false,
        };
        let reason = |caller| ctx(caller).operator().unwrap_err().reason();
        assert_eq!(reason(Caller::Nobody), Reason::TokenRequired);
        assert_eq!(reason(Caller::Stranger), Reason::TokenInvalid);
        assert_eq!(
            reason(Caller::Claim(crate::access::TokenHash::NONE)),
            Reason::NotAllowed
        );
        let tenant = Principal::Tenant {
            name: "a".parse().unwrap(),
            tenant: "b".parse().unwrap(),
        };
        assert_eq!(reason(Caller::Known(tenant.clone())), Reason::NotAllowed);
        assert_eq!(ctx(Caller::Known(tenant.clone())).principal(), Ok(tenant));
    }

    #[test]
    fn a_unix_peer_counts_only_without_a_token() {
        let root = Peer::Unix(Arc::new(PeerIds {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        }));
        let mut extensions = Extensions::new();
        extensions.insert(root);
        let access = Access::default();
        let caller = |headers| Ctx::new(&headers, &extensions, &access).caller;
        assert_eq!(
            caller(headers(&[])),
            Caller::Known(Principal::Operator(Operator::Uid(0)))
        );
        assert_eq!(caller(headers(&["Bearer x"])), Caller::Stranger);
    }
}
