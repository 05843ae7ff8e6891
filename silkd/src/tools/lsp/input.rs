//! What a client sends: frames put together to whole messages, each handed to the server at once or not at all.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use sandbox_protocol::{
    limits::{CHUNK_IN, LSP_MESSAGE},
    reason::Reason,
    v1::{LspFrame, LspIn, lsp_in::M},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::Status;

use super::{header, invalid};
use crate::refusal::Refusal;

/// Bytes of long messages that all clients of a guest may have on their way. What a message has below [`OWN`] is every
/// client's own.
pub(super) const BUDGET: usize = 16 * 1024 * 1024;
/// See [`BUDGET`].
const OWN: usize = CHUNK_IN;

/// A whole message, its head in front.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) frames: std::vec::IntoIter<Bytes>,
    /// Given back when it is written, or dropped.
    _room: Option<OwnedSemaphorePermit>,
}

/// A message that is not whole yet.
#[derive(Debug)]
struct Begun {
    budget: Arc<Semaphore>,
    frames: Vec<Bytes>,
    length: usize,
    room: Option<OwnedSemaphorePermit>,
}

impl Begun {
    fn new(budget: Arc<Semaphore>) -> Self {
        Self {
            budget,
            // The place of the head.
            frames: vec![Bytes::new()],
            length: 0,
            room: None,
        }
    }

    /// Takes a frame; gives the message when that was its last.
    fn add(&mut self, frame: LspFrame) -> Result<Option<Message>, Refusal> {
        let LspFrame { data, more } = frame;
        if data.len() > CHUNK_IN {
            return Err(invalid(&format!(
                "a frame of {} bytes: {CHUNK_IN} are allowed",
                data.len()
            )));
        }
        if more && data.is_empty() {
            return Err(invalid("a frame without content is no part of a message"));
        }
        let length = self.length.saturating_add(data.len());
        if length > LSP_MESSAGE {
            return Err(invalid(&format!("a message beyond {LSP_MESSAGE} bytes")));
        }
        let above = length.saturating_sub(OWN.max(self.length));
        if let Ok(above @ 1..) = u32::try_from(above) {
            let room = Arc::clone(&self.budget)
                .try_acquire_many_owned(above)
                .map_err(|_none| {
                    let message = format!("messages of {BUDGET} bytes are on their way to language servers");
                    Refusal::new(Reason::MemoryExhausted, message)
                })?;
            match &mut self.room {
                Some(before) => before.merge(room),
                None => self.room = Some(room),
            }
        }
        self.length = length;
        self.frames.push(data);
        if more {
            return Ok(None);
        }
        let mut whole = std::mem::replace(self, Self::new(Arc::clone(&self.budget)));
        if let Some(head) = whole.frames.first_mut() {
            *head = header::head(whole.length);
        }
        Ok(Some(Message {
            frames: whole.frames.into_iter(),
            _room: whole.room,
        }))
    }
}

/// Passes on what the client sends, until it sends no more. To be dropped when it leaves.
pub(super) async fn pump<S>(
    mut input: S,
    messages: mpsc::Sender<Message>,
    budget: Arc<Semaphore>,
) -> Result<(), Refusal>
where
    S: Stream<Item = Result<LspIn, Status>> + Unpin,
{
    let mut begun = Begun::new(budget);
    while let Some(sent) = input.next().await {
        let sent = sent.map_err(|status| invalid(&format!("the client broke off: {}", status.message())))?;
        match sent.m {
            Some(M::Frame(frame)) => {
                if let Some(message) = begun.add(frame)? {
                    // A server that is gone takes none; its exit is on its way.
                    messages.send(message).await.ok();
                }
            }
            Some(M::Start(_)) => return Err(invalid("a second start in one call")),
            None => return Err(invalid("a message without content")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(length: usize, more: bool) -> LspFrame {
        LspFrame {
            data: vec![b'x'; length].into(),
            more,
        }
    }

    fn text(message: Message) -> Vec<u8> {
        message.frames.flatten().collect()
    }

    #[test]
    fn frames_become_messages_with_their_head() {
        let mut begun = Begun::new(Arc::new(Semaphore::new(BUDGET)));
        assert_eq!(
            text(begun.add(frame(2, false)).unwrap().unwrap()),
            b"Content-Length: 2\r\n\r\nxx"
        );
        assert!(begun.add(frame(2, true)).unwrap().is_none());
        assert_eq!(
            text(begun.add(frame(1, false)).unwrap().unwrap()),
            b"Content-Length: 3\r\n\r\nxxx"
        );
        assert_eq!(
            text(begun.add(frame(0, false)).unwrap().unwrap()),
            b"Content-Length: 0\r\n\r\n"
        );
    }

    #[test]
    fn what_is_on_its_way_is_bounded_and_comes_back() {
        let budget = Arc::new(Semaphore::new(CHUNK_IN + 1));
        let (mut one, mut two) = (Begun::new(budget.clone()), Begun::new(budget.clone()));
        // The first is everybody's own, the second is not.
        assert!(one.add(frame(CHUNK_IN, true)).unwrap().is_none());
        assert_eq!(budget.available_permits(), CHUNK_IN + 1);
        assert!(one.add(frame(CHUNK_IN, true)).unwrap().is_none());
        assert!(two.add(frame(CHUNK_IN - 1, true)).unwrap().is_none());
        assert!(two.add(frame(2, true)).unwrap().is_none());
        assert_eq!(budget.available_permits(), 0);
        assert_eq!(
            two.add(frame(1, true)).unwrap_err().reason,
            Reason::MemoryExhausted
        );
        let message = one.add(frame(0, false)).unwrap().unwrap();
        assert_eq!(budget.available_permits(), 0);
        drop(message);
        assert_eq!(budget.available_permits(), CHUNK_IN);
        drop(two);
        assert_eq!(budget.available_permits(), CHUNK_IN + 1);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let mut begun = Begun::new(Arc::new(Semaphore::new(BUDGET)));
        for bad in [frame(CHUNK_IN + 1, false), frame(0, true)] {
            assert_eq!(begun.add(bad).unwrap_err().reason, Reason::FieldInvalid);
        }
        for _ in 0..LSP_MESSAGE / CHUNK_IN {
            assert!(begun.add(frame(CHUNK_IN, true)).unwrap().is_none());
        }
        assert_eq!(
            begun.add(frame(1, false)).unwrap_err().reason,
            Reason::FieldInvalid
        );
    }
}
