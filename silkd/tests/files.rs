//! Files, in test mode: the whole way over the wire.
#![expect(clippy::large_futures, reason = "a test holds few of them")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![expect(
    clippy::disallowed_methods,
    reason = "tests own their tasks, and put files where silkd finds them"
)]

#[path = "files/archives.rs"]
mod archives;
mod common;
#[path = "files/kit.rs"]
mod kit;
#[path = "files/lists.rs"]
mod lists;
#[path = "files/paths.rs"]
mod paths;
#[path = "files/searches.rs"]
mod searches;
#[path = "files/users.rs"]
mod users;
#[path = "files/watches.rs"]
mod watches;
#[path = "files/writes.rs"]
mod writes;
