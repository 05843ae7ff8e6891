//! Rows, pools, templates and the node: one small handle each.
//!
//! May call: client, retry, error.
//! Never inside: shapes of our own: what the daemon says is given as it came (`v1`).

mod egress;
mod rows;
mod stock;

pub use egress::{Egress, EgressWatch};
pub use rows::{Claims, ClaimsWatch, SandboxFilter};
pub use stock::{Node, Pools, PoolsWatch, TemplateBuild, Templates};

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use tokio_stream::Stream;
use tonic::Streaming;

use crate::error::Error;

/// Reads a stream of the daemon's; dropping it ends the call.
#[derive(Debug)]
pub(crate) struct Events<T>(Streaming<T>);

impl<T> Stream for Events<T> {
    type Item = Result<T, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.0)
            .poll_next(cx)
            .map(|event| event.map(|event| event.map_err(Error::from_status)))
    }
}
