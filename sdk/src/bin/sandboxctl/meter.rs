//! How far a copy is, on a terminal.

use std::{
    io::{self, IsTerminal as _},
    pin::Pin,
    task::{Context, Poll, ready},
};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::io::{AsyncRead, ReadBuf};

use crate::print::Out;

/// A bar on stderr; nothing where that is no terminal.
#[derive(Debug)]
pub(crate) struct Meter(ProgressBar);

impl Meter {
    /// `total`: bytes that will come, where that is known.
    pub(crate) fn start(out: Out, quiet: bool, total: Option<u64>) -> Self {
        if quiet || out.json || !io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let (bar, template) = match total {
            Some(total) => (
                ProgressBar::new(total),
                "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            ),
            None => (
                ProgressBar::new_spinner(),
                "{spinner} {bytes} {bytes_per_sec} {elapsed}",
            ),
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// Counts what is read.
    pub(crate) fn over<R>(&self, reader: R) -> Metered<R> {
        Metered {
            reader,
            bar: self.0.clone(),
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A reader that is counted.
#[derive(Debug)]
pub(crate) struct Metered<R> {
    reader: R,
    bar: ProgressBar,
}

impl<R: AsyncRead + Unpin> AsyncRead for Metered<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.reader).poll_read(cx, into))?;
        let count = into.filled().len().saturating_sub(before);
        self.bar.inc(u64::try_from(count).unwrap_or(u64::MAX));
        Poll::Ready(Ok(()))
    }
}
