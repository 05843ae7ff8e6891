//! Lane guarded, the host's side, with real packets: namespaces, TAPs and tables of the tests' own, which need root, `nft`
//! and `ip`. A guest is what holds the other end of its TAP.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a check fails by panicking"
)]
#![expect(clippy::too_many_lines, reason = "a table of cases is read whole")]

mod bench;
mod claims;
mod clients;
mod commands;
mod frames;
mod guest;
mod heal;
mod lane;
mod own;
mod slots;
mod source;
mod tuples;
mod wake;
mod wire;
