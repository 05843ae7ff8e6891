//! Signals to this process, for whoever passes them on.

use std::future::Future;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::fault::Fault;

/// Those that end a remote command as they would end a local one.
#[derive(Debug)]
pub(crate) struct Signals([(u8, Signal); 4]);

impl Signals {
    /// From now on they no longer end this process.
    pub(crate) fn catch() -> Result<Self, Fault> {
        let catch = |kind: SignalKind| signal(kind).map_err(|error| Fault::io("signals", error));
        Ok(Self([
            (1, catch(SignalKind::hangup())?),
            (2, catch(SignalKind::interrupt())?),
            (3, catch(SignalKind::quit())?),
            (15, catch(SignalKind::terminate())?),
        ]))
    }

    /// The next one's number. Cancel safe.
    pub(crate) fn next(&mut self) -> impl Future<Output = u8> {
        std::future::poll_fn(|cx| {
            for (number, signal) in &mut self.0 {
                if let std::task::Poll::Ready(Some(())) = signal.poll_recv(cx) {
                    return std::task::Poll::Ready(*number);
                }
            }
            std::task::Poll::Pending
        })
    }
}
