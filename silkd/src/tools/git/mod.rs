//! The guest's git: typed requests in, its machine formats read, its refusals told with their end.
//!
//! Git runs as the call's user with the call's environment, and with what a machine needs over it: no prompt, no editor,
//! the C locale. Credentials are the door's; there is no way to give one here. What a verb left running is ended.

mod calls;
pub mod porcelain;
mod refs;
mod verbs;
mod work;

pub use self::calls::{add, branch, checkout, clone, commit, pull, push, status};
