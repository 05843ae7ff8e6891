//! Language servers: one message of their protocol per frame, whoever comes and goes.
//!
//! A server belongs to nobody: its task reads and writes its pipes, one client at a time reads from what is held and
//! gives it whole messages. So a client that leaves in the middle of a message leaves neither half of one in the server's
//! input, nor the rest of one for the next client. Without a client what the server says is held up to 1 MiB, then it
//! blocks; when nobody comes back in time, it ends.

pub mod header;
mod held;
mod input;
mod language;
mod server;
mod stream;
mod table;

use sandbox_protocol::reason::Reason;

pub use self::{stream::LspStream, table::Lsp};
use crate::refusal::Refusal;

fn invalid(message: &str) -> Refusal {
    Refusal::new(Reason::FieldInvalid, message)
}
