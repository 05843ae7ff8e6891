//! News for the host and lines for the console: the one place that prints.
//!
//! May call: nothing.
//! Never inside: a wait on a reader. A host that reads too slowly is told how much it missed.
//! Cancel safety: a stream of news may be dropped at any time.

use std::io::Write as _;

use futures_util::{Stream, StreamExt as _, stream};
use sandbox_protocol::v1::{Condition, ControlEvent, control_event::Event};
use tokio::sync::{broadcast, watch};
use tokio_stream::wrappers::{BroadcastStream, errors::BroadcastStreamRecvError};

/// Longest log line, in bytes; the rest is cut.
const LINE: usize = 1024;
/// News kept for a slow host: with lines of 1 KiB at most, 128 KiB.
const KEPT: usize = 128;

/// The handle.
#[derive(Debug, Clone)]
pub struct Events {
    news: broadcast::Sender<Event>,
    over: watch::Sender<bool>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            news: broadcast::Sender::new(KEPT),
            over: watch::Sender::new(false),
        }
    }
}

impl Events {
    /// Says something on the console and to the host. The text is silkd's own: what comes from a guest is escaped
    /// before (`refusal::Escaped`).
    pub fn log(&self, text: &str) {
        console(text);
        let line = text.as_bytes();
        let line = line.get(..LINE).unwrap_or(line).to_vec();
        self.send(Event::LogLine(line.into()));
    }

    /// Tells the host of a change of a condition.
    pub fn condition(&self, condition: Condition) {
        self.send(Event::Condition(condition));
    }

    fn send(&self, event: Event) {
        // An error means that nobody listens, which is right: a host that comes later asks for what holds.
        drop(self.news.send(event));
    }

    /// News from now on, until [`close`](Self::close).
    pub fn subscribe(&self) -> impl Stream<Item = ControlEvent> + Send + use<> {
        let mut over = self.over.subscribe();
        let over = async move {
            // An error means that every handle is gone: over as well.
            over.wait_for(|over| *over).await.ok();
        };
        BroadcastStream::new(self.news.subscribe())
            .map(|news| ControlEvent {
                event: Some(match news {
                    Ok(event) => event,
                    Err(BroadcastStreamRecvError::Lagged(count)) => Event::Dropped(count),
                }),
            })
            .take_until(Box::pin(over))
    }

    /// Ends every subscription, so that a stop need not wait for one.
    pub fn close(&self) {
        self.over.send_replace(true);
    }
}

/// `first`, then `rest`.
pub fn after<S>(first: Vec<ControlEvent>, rest: S) -> impl Stream<Item = ControlEvent> + Send + use<S>
where
    S: Stream<Item = ControlEvent> + Send,
{
    stream::iter(first).chain(rest)
}

/// Writes a line to the console, for the time before there is a host.
pub fn console(text: &str) {
    let line = format!("silkd: {text}\n");
    // A console that takes nothing is no reason to end.
    drop(std::io::stderr().write_all(line.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_reader_is_told_what_it_missed_and_close_ends_it() {
        let events = Events::default();
        let reader = events.subscribe();
        for _ in 0..KEPT + 5 {
            events.condition(Condition::default());
        }
        events.close();
        // What is over is over: the news that are left are not waited for either.
        let (late, mut live) = (events.subscribe(), Box::pin(reader));
        assert_eq!(late.count().await, 0);
        assert!(live.next().await.is_none());

        let events = Events::default();
        let mut reader = Box::pin(events.subscribe());
        for _ in 0..KEPT + 5 {
            events.condition(Condition::default());
        }
        assert_eq!(reader.next().await.unwrap().event, Some(Event::Dropped(5)));
        assert_eq!(
            reader.next().await.unwrap().event,
            Some(Event::Condition(Condition::default()))
        );
    }
}
