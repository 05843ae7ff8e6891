//! The daemon; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandboxd::main()
}
