//! No image of this process's memory on a disk: it holds secrets, tokens and keys.

use std::{fs::File, io, io::Write as _};

use rustix::process::{Resource, Rlimit, setrlimit};

/// Leaves core dumps without memory, and where the kernel writes them itself, undone. A program that the kernel pipes them
/// to is given them whatever the limit says, and then has no memory in them. The process stays dumpable: `/proc` belongs
/// to whoever runs it, and `sandboxd doctor` and an operator's tools read it. What is started from here inherits both.
pub(super) fn without_memory() -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    File::options()
        .write(true)
        .open("/proc/self/coredump_filter")?
        .write_all(b"0")
}
