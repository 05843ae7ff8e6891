//! Who is who: tokens, the host key, and what turns a credential into a principal. Pure, but for the key's file.
//!
//! Two steps. [`Access::caller`] says whom a credential speaks for, without knowing any sandbox. [`Caller::opens`] then
//! says whether that caller may touch one sandbox, by one path for a sandbox that exists and for one that does not.
//!
//! May call: disk, words.
//! Never inside: a request; what a principal may do beyond one sandbox (`api` has the table).
//! Comparisons of secrets take the same time whatever they hold.
//! Cancel safety: nothing here awaits.

mod decide;
mod error;
mod key;
mod token;

use sandbox_protocol::id::SandboxId;

pub use self::{
    decide::group_id,
    error::AccessError,
    key::HostKey,
    token::{AccessToken, ClaimToken, TokenHash},
};
use crate::words::Name;

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

#[cfg(test)]
mod tests;
