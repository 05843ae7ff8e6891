//! What doors decided, and what moved through them.

use std::{fmt, time::Duration};

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use sandbox_protocol::door::DoorReason;

use super::{Book, Histogram, Labels, Series, names::Metric};
use crate::words::Lane;

/// Of the doors; a handle. A series appears with its first value.
#[derive(Clone)]
pub struct DoorMetrics {
    decisions: Series<4, Counter>,
    connections: Series<2, Counter>,
    open: Series<2, Gauge>,
    bytes: Series<2, Counter>,
    dials: Series<1, Histogram>,
}

/// Bytes of one lane; kept by whoever counts them.
#[derive(Debug, Clone)]
pub struct DoorBytes {
    sent: Counter,
    received: Counter,
}

impl DoorBytes {
    /// From a guest.
    pub fn sent(&self, bytes: u64) {
        self.sent.inc_by(bytes);
    }

    /// To a guest.
    pub fn received(&self, bytes: u64) {
        self.received.inc_by(bytes);
    }
}

impl DoorMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            decisions: book.register(Metric::DoorDecisions),
            connections: book.register(Metric::DoorConnections),
            open: book.register(Metric::DoorOpen),
            bytes: book.register(Metric::DoorBytes),
            dials: book.register(Metric::DoorDialSeconds),
        }
    }

    /// A door decided: `http`, `socks5` or `dns`; `reason`: why it refused, if it did.
    pub fn decided(&self, door: &'static str, lane: Lane, reason: Option<DoorReason>, would_deny: bool) {
        let verdict = match (reason, would_deny) {
            (Some(_), _) => "deny",
            (None, true) => "would_deny",
            (None, false) => "allow",
        };
        let labels = [
            ("door", door.to_owned()),
            ("lane", lane.to_string()),
            ("verdict", verdict.to_owned()),
            ("reason", reason.map_or("", DoorReason::as_str).to_owned()),
        ];
        self.decisions.get_or_create(&labels).inc();
    }

    /// A connection came.
    pub fn opened(&self, door: &'static str, lane: Lane) {
        let labels = by_door(door, lane);
        self.connections.get_or_create(&labels).inc();
        self.open.get_or_create(&labels).inc();
    }

    /// It went.
    pub fn closed(&self, door: &'static str, lane: Lane) {
        self.open.get_or_create(&by_door(door, lane)).dec();
    }

    /// The handle for bytes of a lane.
    #[must_use]
    pub fn bytes(&self, lane: Lane) -> DoorBytes {
        let series = |direction: &str| {
            let labels = [("lane", lane.to_string()), ("direction", direction.to_owned())];
            self.bytes.get_or_create_owned(&labels)
        };
        DoorBytes {
            sent: series("sent"),
            received: series("received"),
        }
    }

    /// A dial is over.
    pub fn dialled(&self, is_connected: bool, time: Duration) {
        let outcome = if is_connected { "ok" } else { "failed" };
        let labels = [("outcome", outcome.to_owned())];
        self.dials.get_or_create(&labels).observe(time);
    }
}

fn by_door(door: &'static str, lane: Lane) -> Labels<2> {
    [("door", door.to_owned()), ("lane", lane.to_string())]
}

impl fmt::Debug for DoorMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DoorMetrics").finish_non_exhaustive()
    }
}
