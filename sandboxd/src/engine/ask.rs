//! Asks an emulator for its version, for the doctor, who starts no machine.

use std::{path::Path, process::Command};

use crate::telemetry::GuestText;

/// The first line of `PROGRAM --version`. Blocks until the program has ended.
///
/// # Errors
/// Why there is none, in words for the doctor's list.
#[expect(
    clippy::disallowed_methods,
    reason = "the program answers and ends; no machine is started"
)]
pub fn version_of(program: &Path) -> Result<String, String> {
    // Nothing of the daemon's environment, which may hold secrets, but where programs are.
    let mut command = Command::new(program);
    command
        .arg("--version")
        .env_clear()
        .env("PATH", super::spawn::PATH);
    let asked = command.output();
    let output = asked.map_err(|error| format!("{}: {error}", program.display()))?;
    if !output.status.success() {
        return Err(format!(
            "{}: {}",
            program.display(),
            GuestText::tail(&output.stderr)
        ));
    }
    let first = output
        .stdout
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    Ok(GuestText::head(first).to_string())
}
