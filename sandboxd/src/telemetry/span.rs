//! Every span there is. A span lives on one task: hand it to `Instrument`, never hold it entered across an await.

use std::fmt::Display;

use tracing::{Span, debug_span, info_span};

/// A call of the API.
pub fn rpc(method: &str, request: &impl Display) -> Span {
    debug_span!("rpc", method, request = %request)
}

/// The transaction of one claim; `pool` is empty where no pool serves it.
pub fn claim(pool: &str) -> Span {
    debug_span!("claim", pool)
}

/// One clone on its way into the stock.
pub fn refill(pool: &str) -> Span {
    info_span!("refill", pool)
}

/// The life of one sandbox: its actor. It has no parent, since a sandbox outlives the refill or claim that made it.
pub fn sandbox(id: &impl Display) -> Span {
    info_span!(parent: None, "sandbox", id = %id)
}

/// The end of one sandbox.
pub fn end(id: &impl Display, why: &impl Display) -> Span {
    info_span!("end", id = %id, why = %why)
}

/// The start: rows and what the host shows.
pub fn recover() -> Span {
    info_span!("recover")
}

/// The stop.
pub fn drain() -> Span {
    info_span!("drain")
}
