//! The daemon as the tests start it: with its failpoints.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandboxd::main()
}
