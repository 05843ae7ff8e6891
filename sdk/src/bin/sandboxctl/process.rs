//! `spawn`, `ps`, `kill`, `logs`, `attach`, `wait`, `forget`: processes that outlive the call that started them.

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _},
    os::unix::ffi::OsStringExt as _,
    process::ExitCode,
    time::Duration,
};

use clap::{Args, ValueEnum};
use sandbox_sdk::{
    ProcessHandle, ProcessRef,
    process::{LogEvent, LogFrom, Spawn},
    v1::signal::Scope,
};
use serde_json::{Map, Value, json};

use crate::{
    Reach,
    args::{Limit, duration},
    claim::variable,
    exec,
    fault::Fault,
    human, json,
    print::{self, Out},
    relay::{self, Left, Remote},
    signals::{self, Signals},
    terminal::{self, DETACH, Keys},
    text::harmless,
    within,
};

#[derive(Debug, Clone, Args)]
pub(crate) struct SpawnArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Name to find it by: 1 to 64 of A-Za-z0-9._-, not all digits.
    #[arg(long, value_name = "N")]
    name: Option<OsString>,
    /// Bytes of its output that are kept, 16777216 at most [default: 1048576].
    #[arg(long, value_name = "BYTES")]
    log: Option<u64>,
    /// How long exit and output are kept once it has ended, 24h at most [default: 10m].
    #[arg(long, value_name = "D", value_parser = duration)]
    retain: Option<Duration>,
    /// Keep its input open for attach; without it the process reads /dev/null.
    #[arg(long)]
    stdin: bool,
    /// Run it on a terminal, with the size of this one.
    #[arg(short = 't', long)]
    tty: bool,
    /// Request key: the same key is the same process.
    #[arg(long, value_name = "K")]
    key: Option<String>,
    /// Working directory in the sandbox.
    #[arg(long, value_name = "DIR")]
    cwd: Option<OsString>,
    /// Environment variable; may be repeated.
    #[arg(long = "env", value_name = "K=V")]
    env: Vec<OsString>,
    /// User: name or number, with `:group` if wanted.
    #[arg(long, value_name = "U")]
    user: Option<OsString>,
    /// Kill the process after this time.
    #[arg(long, value_name = "D", value_parser = duration)]
    timeout: Option<Duration>,
    /// The command and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PsArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Only processes that run.
    #[arg(long)]
    running: bool,
    #[command(flatten)]
    limit: Limit,
}

/// Some processes of a sandbox.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProcessArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Ids or names of the processes.
    #[arg(required = true, value_name = "PROC")]
    processes: Vec<String>,
    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Whom {
    /// All that it started, and itself.
    Tree,
    /// Its process group.
    Group,
    /// Itself alone.
    Leader,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct KillArgs {
    #[command(flatten)]
    which: ProcessArgs,
    /// Signal, by name or number.
    #[arg(short = 's', long, value_name = "SIG", default_value = "KILL", value_parser = signals::number)]
    signal: i32,
    /// Who gets it.
    #[arg(long, value_name = "WHO", default_value = "tree")]
    scope: Whom,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct LogsArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Id or name of the process.
    #[arg(value_name = "PROC")]
    process: String,
    /// Go on with what comes, until the process has ended.
    #[arg(short = 'f', long)]
    follow: bool,
    /// Where to begin: `oldest`, `live`, or an offset.
    #[arg(long, value_name = "AT", default_value = "oldest", value_parser = log_from)]
    from: LogFrom,
    /// Stop after so many bytes.
    #[arg(long, value_name = "N")]
    max_bytes: Option<u64>,
    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct AttachArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Id or name of the process.
    #[arg(value_name = "PROC")]
    process: String,
    /// Pass stdin and signals on [default: where stdin and stdout are a terminal].
    #[arg(short = 'i', long = "stdin")]
    stdin: bool,
    /// Only look.
    #[arg(long, conflicts_with = "stdin")]
    no_stdin: bool,
    /// Where to begin: `oldest`, `live`, or an offset.
    #[arg(long, value_name = "AT", default_value = "live", value_parser = log_from)]
    from: LogFrom,
    /// Make the process wait for this reader, so that nothing is missed.
    #[arg(long)]
    hold: bool,
    /// Keys that leave the process alone, when it has a terminal; none if empty.
    #[arg(long, value_name = "KEYS", default_value = DETACH)]
    detach_keys: Keys,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct WaitArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Id or name of the process.
    #[arg(value_name = "PROC")]
    process: String,
    /// How long to wait [default: for ever].
    #[arg(long, value_name = "D", value_parser = duration)]
    timeout: Option<Duration>,
}

fn log_from(text: &str) -> Result<LogFrom, String> {
    match text {
        "oldest" => Ok(LogFrom::Oldest),
        "live" => Ok(LogFrom::Live),
        offset => match offset.parse() {
            Ok(offset) => Ok(LogFrom::Offset(offset)),
            Err(_) => Err("expected oldest, live, or a number".to_owned()),
        },
    }
}

fn builder(spawn: Spawn, args: SpawnArgs) -> Result<Spawn, Fault> {
    let mut spawn = spawn;
    for text in args.env {
        let (key, value) = variable(text)?;
        spawn = spawn.env(key, value);
    }
    if let Some(name) = args.name {
        spawn = spawn.name(name.into_vec());
    }
    if let Some(bytes) = args.log {
        spawn = spawn.log_bytes(bytes);
    }
    if let Some(time) = args.retain {
        spawn = spawn.retain(time);
    }
    if args.stdin {
        spawn = spawn.keep_stdin();
    }
    if args.tty {
        let (cols, rows) = terminal::size();
        spawn = spawn.tty(cols, rows);
    }
    if let Some(key) = args.key {
        spawn = spawn.request_key(key);
    }
    if let Some(cwd) = args.cwd {
        spawn = spawn.cwd(cwd.into_vec());
    }
    if let Some(user) = args.user {
        spawn = spawn.user(user.into_vec());
    }
    if let Some(timeout) = args.timeout {
        spawn = spawn.timeout(timeout);
    }
    Ok(spawn)
}

pub(crate) async fn spawn(reach: &Reach, mut args: SpawnArgs, out: Out) -> Result<(), Fault> {
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(std::mem::take(&mut args.sandbox), None);
    let command = std::mem::take(&mut args.command);
    let spawn = sandbox.spawn(command.into_iter().map(OsString::into_vec));
    let process = within(Some(crate::TIMEOUT), async { Ok(builder(spawn, args)?.await?) }).await?;
    out.result(
        || json!({ "process": process.id(), "pid": process.pid() }),
        || process.id().to_string(),
    )
}

pub(crate) async fn ps(reach: &Reach, args: PsArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let rows = within(Some(limit), async {
        Ok(sandbox.processes(args.running).await?.all().await?)
    })
    .await?;
    out.result(
        || json!({ "processes": rows.iter().map(json::process).collect::<Vec<_>>() }),
        || human::processes(&rows),
    )
}

/// Does one thing to each process, all of them also where one fails.
async fn each<F: Future<Output = Result<(), Fault>>>(
    reach: &Reach,
    args: ProcessArgs,
    out: Out,
    act: impl Fn(ProcessHandle, String) -> F,
) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    within(Some(limit), async {
        let mut failed = false;
        for name in args.processes {
            match act(sandbox.process(&*name), name).await {
                Ok(()) => {}
                Err(Fault::Closed) => return Err(Fault::Closed),
                Err(fault) => {
                    failed = true;
                    // The code of it is 1 or 3 by itself; all others are tried all the same.
                    let _code = fault.report(out, None);
                }
            }
        }
        if failed { Err(Fault::Told) } else { Ok(()) }
    })
    .await
}

fn named(name: &str) -> Value {
    match ProcessRef::from(name) {
        ProcessRef::Id(id) => json!(id),
        ProcessRef::Name(_) => json!(name),
    }
}

pub(crate) async fn kill(reach: &Reach, args: KillArgs, out: Out) -> Result<(), Fault> {
    let scope = match args.scope {
        Whom::Tree => Scope::Tree,
        Whom::Group => Scope::Group,
        Whom::Leader => Scope::Leader,
    };
    let number = args.signal;
    each(reach, args.which, out, async |process, name| {
        let killed = process.signal(number, scope).await?;
        out.result(
            || {
                json!({
                    "process": named(&name),
                    "already_exited": killed.already_exited,
                    "signalled": killed.signalled,
                })
            },
            || {
                let already = if killed.already_exited { " (had ended)" } else { "" };
                format!("{}{already}", harmless(&name))
            },
        )
    })
    .await
}

pub(crate) async fn forget(reach: &Reach, args: ProcessArgs, out: Out) -> Result<(), Fault> {
    each(reach, args, out, async |process, name| {
        process.forget().await?;
        out.result(|| json!({ "process": named(&name) }), || harmless(&name))
    })
    .await
}

pub(crate) async fn logs(reach: &Reach, args: LogsArgs, out: Out) -> Result<(), Fault> {
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    within(args.limit.timeout, async {
        let mut logs = sandbox.process(&*args.process).logs().from(args.from);
        if args.follow {
            logs = logs.follow();
        }
        if let Some(bytes) = args.max_bytes {
            logs = logs.max_bytes(bytes);
        }
        let mut logs = logs.open().await?;
        let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
        while let Some(event) = logs.next().await {
            match event? {
                event if out.json => print::line(&shown(event).to_string())?,
                LogEvent::Stdout { offset: _, data } => relay::write(&mut stdout, &data)
                    .await
                    .map_err(|error| Fault::io("stdout", error))?,
                // The other output goes on when nobody reads this one.
                LogEvent::Stderr { offset: _, data } => drop(relay::write(&mut stderr, &data).await),
                LogEvent::Gap { from, to } => relay::missing(to.saturating_sub(from)),
                LogEvent::Exit(_) => {}
            }
        }
        Ok(())
    })
    .await
}

/// One line of `logs --json`.
fn shown(event: LogEvent) -> Value {
    let piece = |output: &str, offset: u64, data: Vec<u8>| {
        let mut object = Map::new();
        object.insert("output".to_owned(), json!(output));
        object.insert("offset".to_owned(), json!(offset));
        json::output(&mut object, "data", data);
        Value::Object(object)
    };
    match event {
        LogEvent::Stdout { offset, data } => piece("stdout", offset, data.into()),
        LogEvent::Stderr { offset, data } => piece("stderr", offset, data.into()),
        LogEvent::Gap { from, to } => json!({ "gap": { "from": from, "to": to } }),
        LogEvent::Exit(exit) => {
            let mut object = Map::new();
            json::exit(&mut object, exit.how, exit.timed_out);
            json!({ "exit": object })
        }
    }
}

pub(crate) async fn attach(reach: &Reach, args: AttachArgs, out: Out) -> Result<ExitCode, Fault> {
    let typed = io::stdin().is_terminal() && io::stdout().is_terminal() && !out.json;
    let input = args.stdin || (typed && !args.no_stdin);
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let mut attach = sandbox.process(&*args.process).attach().from(args.from);
    if input {
        attach = attach.input();
    }
    if args.hold {
        attach = attach.hold();
    }
    let stream = attach.open().await?;
    let tty = stream.attached().tty;
    let mut signals = Signals::catch()?;
    let remote = Remote::attach(stream);
    let done = if !input {
        Box::pin(remote.listen(&mut signals, out)).await?
    } else if tty && typed {
        let left = Box::pin(remote.interact(args.detach_keys, &mut signals, out)).await;
        if !matches!(left, Ok(Left::Ended(_))) {
            terminal::clean();
        }
        match left? {
            Left::Ended(done) => *done,
            Left::Detached => {
                print::stderr("sandboxctl: it goes on");
                return Ok(ExitCode::SUCCESS);
            }
            Left::Signal(number) => return Err(Fault::Signal(number)),
        }
    } else {
        Box::pin(remote.relay(&mut signals, out)).await?
    };
    done.print(out, Map::new())?;
    Ok(done.code())
}

pub(crate) async fn wait(reach: &Reach, args: WaitArgs, out: Out) -> Result<(), Fault> {
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let process = sandbox.process(&*args.process);
    let exit = match args.timeout {
        None => process.wait().await?,
        Some(timeout) => process
            .wait_timeout(timeout)
            .await?
            .ok_or_else(|| Fault::TimeOver("it has not ended within --timeout".to_owned()))?,
    };
    out.result(
        || {
            let mut object = Map::new();
            object.insert("process".to_owned(), named(&args.process));
            json::exit(&mut object, exit.how, exit.timed_out);
            Value::Object(object)
        },
        || exec::code(&exit).to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_begins_where_it_is_told_to() {
        assert_eq!(log_from("oldest"), Ok(LogFrom::Oldest));
        assert_eq!(log_from("live"), Ok(LogFrom::Live));
        assert_eq!(log_from("17"), Ok(LogFrom::Offset(17)));
        for bad in ["", "-1", "newest", "1k"] {
            assert!(log_from(bad).is_err(), "{bad:?}");
        }
    }
}
