//! What the audit's files show.

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

use super::{
    Book,
    names::{Label as _, LedgerFile, Metric},
    series::every,
};

const FILES: usize = LedgerFile::ALL.len();

/// Of the audit; a handle.
#[derive(Debug, Clone)]
pub struct AuditMetrics {
    lines: [Counter; FILES],
    lost: [Counter; FILES],
    failing: [Gauge; FILES],
}

impl AuditMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            lines: every(&book.register(Metric::AuditLines), "file", LedgerFile::ALL),
            lost: every(&book.register(Metric::AuditLost), "file", LedgerFile::ALL),
            failing: every(&book.register(Metric::AuditFailing), "file", LedgerFile::ALL),
        }
    }

    /// Lines were written.
    pub fn written(&self, file: LedgerFile, lines: usize) {
        if let Some(counter) = self.lines.get(file.index()) {
            counter.inc_by(u64::try_from(lines).unwrap_or(0));
        }
    }

    /// Lines were lost.
    pub fn lost(&self, file: LedgerFile, lines: u64) {
        if let Some(counter) = self.lost.get(file.index()) {
            counter.inc_by(lines);
        }
    }

    /// A file cannot be written, or can be again.
    pub fn failing(&self, file: LedgerFile, is_failing: bool) {
        if let Some(gauge) = self.failing.get(file.index()) {
            gauge.set(i64::from(is_failing));
        }
    }

    /// Lines written and lost.
    #[cfg(test)]
    #[must_use]
    pub fn counts(&self, file: LedgerFile) -> (u64, u64) {
        let at = file.index();
        (self.lines[at].get(), self.lost[at].get())
    }
}
