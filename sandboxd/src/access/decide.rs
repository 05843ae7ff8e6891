//! Whom a credential speaks for, and what that opens.

use super::{Access, Caller, ClaimToken, Lock, Operator, PeerIds, Principal, Role, TokenHash};

impl Access {
    /// Whom the credential speaks for. `token` is the text after `Bearer ` (empty if the header is anything else); one
    /// that is present decides alone. `peer` is there on a Unix socket.
    #[must_use]
    pub fn caller(&self, token: Option<&str>, peer: Option<&PeerIds>) -> Caller {
        match (token, peer) {
            (Some(text), _) => self.bearer(text),
            (None, Some(peer)) if self.is_operator(peer) => {
                Caller::Known(Principal::Operator(Operator::Uid(peer.uid)))
            }
            (None, _) => Caller::Nobody,
        }
    }

    fn is_operator(&self, peer: &PeerIds) -> bool {
        let member = |gid| peer.gid == gid || peer.groups.contains(&gid);
        peer.uid == 0 || peer.uid == self.daemon_uid || self.operator_gid.is_some_and(member)
    }

    fn bearer(&self, text: &str) -> Caller {
        let hash = TokenHash::of(text);
        if text.starts_with(ClaimToken::PREFIX) {
            return Caller::Claim(hash);
        }
        // All of them are looked at, so that the time taken says nothing about the place of one that fits.
        let mut found = None;
        for grant in &self.grants {
            if grant.hash == hash {
                found = Some(grant);
            }
        }
        match found.map(|grant| (grant.name.clone(), &grant.role)) {
            None => Caller::Stranger,
            Some((name, Role::Operator)) => Caller::Known(Principal::Operator(Operator::Token(name))),
            Some((name, Role::Tenant(tenant))) => Caller::Known(Principal::Tenant {
                name,
                tenant: tenant.clone(),
            }),
        }
    }
}

impl Caller {
    /// The principal that this caller is to one sandbox; none if it may not touch it. `lock` is none for a sandbox that
    /// does not exist, which reads the same and takes the same path.
    #[must_use]
    pub fn opens(&self, lock: Option<&Lock>) -> Option<Principal> {
        let held = lock.and_then(|lock| lock.token);
        let kept = held.unwrap_or(TokenHash::NONE);
        let sandbox = lock.map(|lock| lock.sandbox);
        let tenant_of = lock.and_then(|lock| lock.tenant.as_ref());
        match self {
            Self::Claim(hash) => sandbox
                .filter(|_| *hash == kept && held.is_some())
                .map(|sandbox| Principal::Claimer { sandbox }),
            Self::Known(principal @ Principal::Operator(_)) => sandbox.map(|_| principal.clone()),
            Self::Known(principal @ Principal::Tenant { tenant, .. }) => tenant_of
                .filter(|owner| *owner == tenant)
                .map(|_| principal.clone()),
            Self::Known(Principal::Claimer { .. }) | Self::Nobody | Self::Stranger => None,
        }
    }
}

/// The number of a group in the text of `/etc/group`.
#[must_use]
pub fn group_id(file: &str, name: &str) -> Option<u32> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name))
            .then(|| fields.nth(1)?.parse().ok())
            .flatten()
    })
}
