//! `sandboxctl`: what a user of the SDK can do, from a shell.
//!
//! May call: sandbox-sdk.
//! Never inside: anything that the SDK cannot do. Results go to stdout, all else to stderr; exit codes are `fault`'s.

mod args;
mod bench;
mod claim;
mod cp;
mod exec;
mod fault;
mod find;
mod forward;
mod git;
mod guest;
mod human;
mod json;
mod ls;
mod lsp;
mod meter;
mod node;
mod packages;
mod pool;
mod print;
mod process;
mod ready;
mod relay;
mod replace;
mod rows;
mod run;
mod session;
mod shell;
mod signals;
mod template;
mod terminal;
mod text;
mod trace;
mod watch_files;

use std::{ffi::OsString, future::Future, process::ExitCode, time::Duration};

use clap::Parser as _;
use sandbox_sdk::{Client, Token};

use crate::{
    args::{Cli, Verb},
    fault::Fault,
    print::Out,
};

/// Time of a verb that is no stream, unless `--timeout` is given.
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let raw: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&raw) {
        Ok(cli) => cli,
        Err(error) => return fault::usage(&raw, &error),
    };
    let out = Out::new(cli.json);
    let ours = cli.verb.fault_code();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Fault::io("start", error).report(out, ours),
    };
    let outcome = runtime.block_on(Box::pin(verb(cli, out)));
    // A read of stdin may still wait in its thread; it must not hold the end up.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(fault) => fault.report(out, ours),
    }
}

/// How to reach the daemon.
#[derive(Debug, Clone)]
struct Reach {
    addr: String,
    token: Option<String>,
    ca: Option<std::path::PathBuf>,
}

impl Reach {
    /// Connects; `timeout` is the time of each call.
    async fn client(&self, timeout: Option<Duration>) -> Result<Client, Fault> {
        let mut options = Client::options();
        if let Some(timeout) = timeout {
            options = options.timeout(timeout).connect_timeout(timeout);
        }
        if let Some(token) = self.token.as_ref().filter(|token| !token.is_empty()) {
            options = options.token(Token::new(token.clone())?);
        }
        if let Some(path) = &self.ca {
            let pem = tokio::fs::read(path).await;
            options = options.ca(pem.map_err(|error| Fault::io("--ca", error))?);
        }
        Ok(options.connect(&self.addr).await?)
    }
}

/// Runs a verb within its whole time. Boxed: verbs are large futures.
fn within<T>(
    limit: Option<Duration>,
    work: impl Future<Output = Result<T, Fault>>,
) -> impl Future<Output = Result<T, Fault>> {
    let work = Box::pin(work);
    async move {
        match limit {
            None => work.await,
            Some(limit) => tokio::time::timeout(limit, work)
                .await
                .unwrap_or_else(|_elapsed| Err(Fault::TimeOver("it took longer than --timeout".to_owned()))),
        }
    }
}

async fn verb(cli: Cli, out: Out) -> Result<ExitCode, Fault> {
    let reach = Reach {
        addr: cli.addr,
        token: cli.token,
        ca: cli.ca,
    };
    let done = match cli.verb {
        Verb::Exec(args) => return Box::pin(exec::exec(&reach, args, out)).await,
        Verb::Run(args) => return Box::pin(run::run(&reach, args, out)).await,
        Verb::Shell(args) => return Box::pin(shell::shell(&reach, args, out)).await,
        Verb::Attach(args) => return Box::pin(process::attach(&reach, args, out)).await,
        Verb::Session(verb) => return Box::pin(session::verb(&reach, verb, out)).await,
        Verb::Spawn(args) => Box::pin(process::spawn(&reach, args, out)).await,
        Verb::Ps(args) => process::ps(&reach, args, out).await,
        Verb::Kill(args) => process::kill(&reach, args, out).await,
        Verb::Logs(args) => process::logs(&reach, args, out).await,
        Verb::Wait(args) => process::wait(&reach, args, out).await,
        Verb::Forget(args) => process::forget(&reach, args, out).await,
        Verb::Claim(args) => claim::claim(&reach, args, out).await,
        Verb::Release(args) => rows::release(&reach, args, out).await,
        Verb::Renew(args) => rows::renew(&reach, args, out).await,
        Verb::List(args) => rows::list(&reach, args, out).await,
        Verb::Inspect(args) => rows::inspect(&reach, args, out).await,
        Verb::Watch(args) => rows::watch(&reach, args, out).await,
        Verb::Cp(args) => Box::pin(cp::cp(&reach, args, out)).await,
        Verb::Ls(args) => ls::ls(&reach, args, out).await,
        Verb::Find(args) => find::find(&reach, args, out).await,
        Verb::Replace(args) => replace::replace(&reach, args, out).await,
        Verb::WatchFiles(args) => watch_files::watch(&reach, args, out).await,
        Verb::Forward(args) => forward::forward(&reach, args, out).await,
        Verb::Git(args) => git::git(&reach, args, out).await,
        Verb::Lsp(args) => lsp::lsp(&reach, args).await,
        Verb::Pool(verb) => pool::verb(&reach, verb, out).await,
        Verb::Template(verb) => template::verb(&reach, verb, out).await,
        Verb::Node(verb) => node::verb(&reach, verb, out).await,
        Verb::WaitReady(args) => ready::wait(&reach, args, out).await,
        Verb::Trace(verb) => Box::pin(trace::verb(&reach, verb, out)).await,
        Verb::Bench(verb) => bench::verb(&reach, verb, out).await,
        Verb::Completions { shell } => packages::completions(shell),
        Verb::Man { dir } => packages::man(&dir),
    };
    done.map(|()| ExitCode::SUCCESS)
}
