//! The agent as the tests start it.

use std::process::ExitCode;

fn main() -> ExitCode {
    silkd::main()
}
