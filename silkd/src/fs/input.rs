//! What a client streams to a call, gathered for one step.

use bytes::Bytes;
use futures_util::FutureExt as _;
use sandbox_protocol::{
    limits::CHUNK_IN,
    v1::{PushIn, WriteIn, push_in, write_in},
};
use tonic::{Status, Streaming};

use super::errno::field;
use crate::refusal::Refusal;

/// Bytes that are gathered for one step, if so many have come already.
const BATCH: usize = 128 * 1024;

/// A message that carries data, or should not have come.
pub(super) trait Data {
    /// The data; `None` in a second start; else nothing was in it.
    fn data(self) -> Option<Option<Bytes>>;
}

impl Data for WriteIn {
    fn data(self) -> Option<Option<Bytes>> {
        self.m.map(|m| match m {
            write_in::M::Data(data) => Some(data),
            write_in::M::Start(_) => None,
        })
    }
}

impl Data for PushIn {
    fn data(self) -> Option<Option<Bytes>> {
        self.m.map(|m| match m {
            push_in::M::Data(data) => Some(data),
            push_in::M::Start(_) => None,
        })
    }
}

/// What the client has sent by now; `None` when it has said all. Cancel safe.
pub(super) async fn gather<T: Data>(input: &mut Streaming<T>) -> Result<Option<Vec<Bytes>>, Status> {
    let Some(first) = input.message().await? else {
        return Ok(None);
    };
    let first = data(first)?;
    let mut bytes = first.len();
    let mut batch = vec![first];
    while bytes < BATCH {
        match input.message().now_or_never() {
            Some(message) => match message? {
                Some(message) => {
                    let more = data(message)?;
                    bytes += more.len();
                    batch.push(more);
                }
                // The end is told again.
                None => break,
            },
            None => break,
        }
    }
    Ok(Some(batch))
}

fn data(message: impl Data) -> Result<Bytes, Refusal> {
    match message.data() {
        Some(Some(data)) if data.len() <= CHUNK_IN => Ok(data),
        Some(Some(_)) => Err(field("data: at most 256 KiB in one message")),
        Some(None) => Err(field("start: a second one")),
        None => Err(field("a message without content")),
    }
}
