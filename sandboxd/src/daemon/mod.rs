//! The process: the command line, the order in which rooms start and stop, what is printed, what systemd is told.
//!
//! May call: everything.
//! Never inside: logic that a test would want.
//! Cancel safety: a daemon that is killed anywhere here is taken up by the next.

pub mod args;
mod behind;
mod ca;
mod commands;
mod engines;
mod host;
mod lane;
mod listen;
pub mod notify;
pub mod print;
mod run;
mod settings;
mod start;

use std::{io::IsTerminal as _, process::ExitCode, sync::Arc};

use clap::Parser as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use self::{
    args::{Args, Command, Environment, Serve},
    print::{Printer, Refusal, StartReason},
    run::Serving,
    settings::{dev_config, file_config},
};
use crate::{
    config::LogFormat,
    telemetry::log::{LogOptions, Logging, log_panics},
};

/// Exit code of a refusal or failure.
const FAILED: u8 = 1;

/// `sandboxd`: reads command line and environment, and does what they say.
#[must_use]
pub fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version come this way too, and go to stdout; whoever read it may be gone.
            drop(error.print());
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(FAILED));
        }
    };
    let printer = Printer::new(args.json);
    let environment = Environment::look();
    match args.command {
        Command::Serve(serve) => run_daemon(serve, &environment, printer),
        Command::CheckConfig { file } => commands::check_config(&file, printer),
        Command::Doctor { config } => commands::doctor(config, printer),
        Command::Journal(journal) => commands::journal(journal, printer),
        Command::Net(net) => commands::net(&net, printer),
        Command::Ca(command) => ca::ca(command, printer),
        Command::Token(token) => commands::token(token, printer),
    }
}

/// A sandbox holds some six descriptors, and shells hand out 1,024: all that the hard limit allows are taken. What is
/// started from here limits itself; nobody here calls `select`.
fn all_descriptors() -> rustix::io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit })
}

fn run_daemon(serve: Serve, environment: &Environment, printer: Printer) -> ExitCode {
    let (dev, keep) = (serve.dev, serve.options.keep);
    let read = if dev {
        dev_config(serve, environment, printer)
    } else {
        file_config(&serve.config, printer)
    };
    let Ok((config, file)) = read else {
        return ExitCode::from(FAILED);
    };
    let json = match config.log.format {
        LogFormat::Auto => !std::io::stderr().is_terminal() && !dev,
        LogFormat::Json => true,
        LogFormat::Text => false,
    };
    let options = LogOptions {
        filter: &config.log.filter,
        overriding: environment.log.as_deref(),
        json,
        colours: !json && std::io::stderr().is_terminal(),
    };
    let logging = match Logging::start(options) {
        Ok(logging) => Arc::new(logging),
        Err(error) => {
            printer.refusal(&Refusal::new(StartReason::ConfigInvalid, file, &error));
            return ExitCode::from(FAILED);
        }
    };
    log_panics();
    if let Err(errno) = all_descriptors() {
        tracing::warn!(%errno, "the soft limit of descriptors stays as it was: few sandboxes will fit");
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("sandboxd")
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            printer.refusal(&Refusal::new(StartReason::HostFault, None, &error));
            return ExitCode::from(FAILED);
        }
    };
    let serving = Serving {
        config,
        file,
        end_at_stop: dev && !keep,
        dev,
    };
    let served = runtime.block_on(Box::pin(run::serve(
        serving,
        environment,
        Arc::downgrade(&logging),
        printer,
    )));
    // What was left to the next start is not waited for.
    runtime.shutdown_background();
    if let Some(logging) = Arc::into_inner(logging) {
        logging.stop();
    }
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(refusal) => {
            printer.refusal(&refusal);
            ExitCode::from(FAILED)
        }
    }
}
