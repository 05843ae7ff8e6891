//! What doors decided.

use std::fmt;

use prometheus_client::metrics::counter::Counter;
use sandbox_protocol::door::DoorReason;

use super::{Book, Series, names::Metric};

/// Of the doors; a handle. A series appears with its first decision.
#[derive(Clone)]
pub struct DoorMetrics(Series<3, Counter>);

impl DoorMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self(book.register(Metric::DoorDecisions))
    }

    /// A door decided: `http`, `socks5` or `dns`; `reason`: why it refused, if it did.
    pub fn decided(&self, door: &'static str, reason: Option<DoorReason>, would_deny: bool) {
        let verdict = match (reason, would_deny) {
            (Some(_), _) => "deny",
            (None, true) => "would_deny",
            (None, false) => "allow",
        };
        let labels = [
            ("door", door.to_owned()),
            ("verdict", verdict.to_owned()),
            ("reason", reason.map_or("", DoorReason::as_str).to_owned()),
        ];
        self.0.get_or_create(&labels).inc();
    }
}

impl fmt::Debug for DoorMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DoorMetrics").finish_non_exhaustive()
    }
}
