//! Client of sandboxd: claim a sandbox, run programs in it, give it back.
//!
//! ```no_run
//! # async fn example() -> Result<(), sandbox_sdk::Error> {
//! use sandbox_sdk::Client;
//!
//! let client = Client::connect("unix:/run/sandboxd/api.sock").await?;
//! let sandbox = client.claim("default").label("job", "42").await?;
//!
//! let output = sandbox.exec(["sh", "-c", "echo hello; uname -r"]).output().await?;
//! assert!(output.status.success());
//! print!("{}", output.stdout_text());
//!
//! sandbox.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! A [`Sandbox`] that is dropped is released in the background, unless it was [kept](Sandbox::keep). Errors carry a
//! stable [`Reason`], a remedy, and whether asking again helps. Calls are repeated by the SDK only where that cannot
//! do them twice: see [`Error::retry_after`] and [`ClaimBuilder::request_key`].
//!
//! May call: sandbox-protocol.
//! Never inside: what only the daemon may decide; sandboxctl can do nothing that a user of this library cannot.

pub mod admin;
mod claim;
mod client;
mod command;
mod dial;
mod error;
pub mod exec;
pub mod files;
pub mod git;
mod guest;
mod input;
mod key;
pub mod lsp;
pub mod port;
pub mod process;
mod retry;
mod sandbox;
pub mod session;
mod tasks;
mod token;
pub mod watch;

pub use claim::ClaimBuilder;
pub use client::{Client, Options};
pub use dial::Address;
pub use error::{Error, ErrorKind, ErrorReason, FieldError, Origin};
pub use exec::{
    Event, Exec, ExecStream, Exit, How, Output, Resizer, Run, Signaller, StdinWriter, TextDecoder,
};
pub use files::Files;
pub use git::Git;
pub use lsp::LspStream;
pub use port::{PortListener, PortStream};
pub use process::{Process, ProcessHandle, ProcessRef};
pub use sandbox::{Released, Sandbox, SandboxHandle};
pub use sandbox_protocol::{reason::Reason, v1};
pub use session::{Session, SessionHandle};
pub use token::Token;
pub use tonic::Code;
pub use watch::FileChange;
