//! The guest's own tools, started by argv and spoken to by their machine formats: git, and language servers.
//!
//! What a tool says is untrusted like any program's output: it is bounded before it is kept, and parsed without I/O.
//!
//! May call: gate, refusal, run, tasks.
//! Never inside: a shell, a credential, a meaning of what a language server says.
//! Cancel safety: a git that is dropped ends with all that it started. A language server outlives its client by its
//! linger, and ends with the last handle of [`lsp::Lsp`].

pub mod git;
pub mod lsp;
mod pipe;
