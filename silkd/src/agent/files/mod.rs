//! Files: whose call it is, and on to `fs`.
//!
//! May call: agent, fs, gate, refusal, run.
//! Never inside: work of its own.

mod one;
mod search;
mod trees;

use std::sync::Arc;

use futures_util::{Stream, TryStreamExt as _};
use sandbox_protocol::{reason::Reason, v1::Resolve};
use tonic::{Status, codegen::BoxStream};

pub use self::{
    one::{read, stat, write},
    search::{find, replace, watch},
    trees::{list, mkdir, pull, push, remove, rename},
};
use super::Parts;
use crate::{fs::Call, gate::InputSeat, refusal::Refusal, run::ExecCtx};

/// Whom the call acts as: the request's user, else the claim's. What comes of it holds the gate open.
fn enter(
    parts: &Parts,
    ctx: ExecCtx,
    resolve: Option<&Resolve>,
    seat: Option<InputSeat>,
) -> Result<Arc<Call>, Refusal> {
    let asked = resolve
        .map(|resolve| &resolve.user)
        .filter(|user| !user.is_empty());
    let ids = parts.control.runner.ids_of(asked.unwrap_or(&ctx.claim.user))?;
    Ok(Call::new(ctx.gate, ids, seat))
}

fn no_start(of: &str) -> Refusal {
    Refusal::new(
        Reason::FieldInvalid,
        format!("the first message of a {of} is its start"),
    )
}

fn boxed<T, S>(stream: S) -> BoxStream<T>
where
    T: 'static,
    S: Stream<Item = Result<T, Refusal>> + Send + 'static,
{
    Box::pin(stream.map_err(Status::from))
}
