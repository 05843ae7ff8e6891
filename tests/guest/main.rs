//! Real virtual machines: templates, clones, claims, deaths, restarts, identities, and guests that mean harm.
//!
//! QEMU and the images must be there; without them every test here fails and names what is missing. KVM is used
//! where it works, else software emulation. One template is booted per build of daemon and image (see [`node`]), and one
//! with programs that live on in its clones (see [`lively`]); all other sandboxes are clones of these, unless a test is
//! about the making of templates.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod boot;
mod claims;
mod clones;
mod deaths;
mod debian;
mod doors;
mod git;
mod golden;
mod guarded;
mod hostile;
mod links;
mod lively;
mod machines;
mod node;
mod restart;
mod secrets;
mod templates;
