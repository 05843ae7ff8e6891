//! `shell`: a program on this terminal.

use std::{ffi::OsString, process::ExitCode};

use clap::Args;

use crate::{
    Reach,
    args::How,
    exec,
    fault::Fault,
    print::Out,
    terminal::{self, DETACH, Keys},
};

/// What a shell is, where none is named: the user's, with all that a login sets.
const SHELL: [&str; 3] = ["/bin/sh", "-c", "exec \"${SHELL:-/bin/sh}\" -l"];

#[derive(Debug, Clone, Args)]
pub(crate) struct ShellArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Working directory in the sandbox.
    #[arg(long, value_name = "DIR")]
    cwd: Option<OsString>,
    /// Environment variable; may be repeated.
    #[arg(long = "env", value_name = "K=V")]
    env: Vec<OsString>,
    /// User: name or number, with `:group` if wanted.
    #[arg(long, value_name = "U")]
    user: Option<OsString>,
    /// Value of TERM [default: that of this terminal].
    #[arg(long, value_name = "T", env = "TERM", hide_env = true)]
    term: Option<OsString>,
    /// Keys that leave the program running; none if empty.
    #[arg(long, value_name = "KEYS", default_value = DETACH)]
    detach_keys: Keys,
    /// The command and its arguments [default: the user's shell].
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub(crate) async fn shell(reach: &Reach, args: ShellArgs, out: Out) -> Result<ExitCode, Fault> {
    terminal::check("shell", true, out)?;
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let how = How {
        stdin: true,
        tty: true,
        term: args.term,
        cwd: args.cwd,
        env: args.env,
        user: args.user,
        timeout: None,
        trace: false,
    };
    let command = if args.command.is_empty() {
        SHELL.map(OsString::from).to_vec()
    } else {
        args.command
    };
    let command = exec::builder(&sandbox, how, command)?;
    let keys = Some(args.detach_keys).filter(|keys| !keys.is_empty());
    exec::interact(&sandbox, command, keys, out).await
}
