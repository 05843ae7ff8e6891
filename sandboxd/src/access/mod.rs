//! Who is who: tokens, the host key, and what turns a credential into a principal. Pure, but for the key's file.
//!
//! Two steps. [`Access::caller`] says whom a credential speaks for, without knowing any sandbox. [`Caller::opens`] then
//! says whether that caller may touch one sandbox, by one path for a sandbox that exists and for one that does not.
//!
//! May call: disk, words.
//! Never inside: a request; what a principal may do beyond one sandbox (`api` has the table).
//! Comparisons of secrets take the same time whatever they hold.

mod key;
mod token;

use sandbox_protocol::id::SandboxId;

pub use self::{
    key::HostKey,
    token::{AccessToken, ClaimToken, TokenHash},
};
use crate::words::Name;

/// What this room could not do.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The host key cannot be read.
    #[error("the host key cannot be read from {path}")]
    KeyUnread {
        /// Its file.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The host key cannot be made.
    #[error("the host key cannot be written to {path}")]
    KeyUnwritten {
        /// Its file.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file does not hold 32 bytes.
    #[error("{path} is no host key; with another one, tokens of living claims stop working")]
    KeyDamaged {
        /// Its file.
        path: std::path::PathBuf,
    },
    /// Others than the owner may read the file.
    #[error("{path} may be read by others (mode {mode:o}); set it to 600")]
    KeyExposed {
        /// Its file.
        path: std::path::PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// Somebody whose say-so is proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Principal {
    /// May do everything.
    Operator(Operator),
    /// May claim, and has its own sandboxes.
    Tenant {
        /// Name of the token.
        name: Name,
        /// Whose sandboxes it makes.
        tenant: Name,
    },
    /// Holds the token of one claim.
    Claimer {
        /// The sandbox it opens.
        sandbox: SandboxId,
    },
}

/// By what an operator is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operator {
    /// By the kernel's word on a Unix socket.
    Uid(u32),
    /// By an access token of that name.
    Token(Name),
}

/// What an access token of the configuration may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// Everything.
    Operator,
    /// Claim, for this tenant.
    Tenant(Name),
}

/// An access token as the configuration has it.
#[derive(Debug, Clone)]
pub struct Grant {
    /// Its name.
    pub name: Name,
    /// SHA-256 of its text.
    pub hash: TokenHash,
    /// What it may do.
    pub role: Role,
}

/// What the kernel says of the process at the other end of a Unix socket, as of its connecting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerIds {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Whom the credential of one call speaks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// There was none.
    Nobody,
    /// There was a token that opens nothing.
    Stranger,
    /// An operator or a tenant.
    Known(Principal),
    /// Whoever holds the claim token with this hash; it opens the sandbox that has it, if any.
    Claim(TokenHash),
}

/// The credentials that open this daemon.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Access tokens of the configuration.
    pub grants: Vec<Grant>,
    /// The operators' group, if the host has it.
    pub operator_gid: Option<u32>,
    /// The daemon's own user.
    pub daemon_uid: u32,
}

/// What a sandbox's record says about who may touch it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lock {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Hash of its claim's token; none while it is warm.
    pub token: Option<TokenHash>,
    /// The tenant that claimed it.
    pub tenant: Option<Name>,
}

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

#[cfg(test)]
mod tests;
