//! `session open|run|list|close`: shells that keep their state between commands.

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Subcommand};
use sandbox_sdk::{
    SessionHandle,
    session::{SessionEvent, SessionExit, SessionStream},
};
use serde_json::{Map, Value, json};
use tokio::io::AsyncReadExt as _;

use crate::{
    Reach,
    args::{Limit, duration},
    claim::variable,
    exec,
    fault::Fault,
    human, json,
    print::{self, Out},
    relay::{self, Kept},
    signals::Signals,
    text::{harmless, lossy},
    within,
};

/// Longest text of a command, in bytes.
const TEXT: u64 = 1024 * 1024;

#[derive(Debug, Subcommand)]
pub(crate) enum SessionVerb {
    /// Open a session and print its id.
    #[command(after_help = "Example:\n  s=$(sandboxctl session open sb_... --cwd /work)")]
    Open(OpenArgs),
    /// Run a command in a session; its output, its exit code.
    #[command(
        after_help = "Examples:\n  sandboxctl session run sb_... $s 'cd /tmp; x=1'\n  \
                      sandboxctl session run sb_... $s 'echo $PWD $x'\n  \
                      sandboxctl session run -i sb_... $s <script.sh"
    )]
    Run(RunArgs),
    /// List the sessions of a sandbox.
    List(ListArgs),
    /// End sessions and all that they started.
    Close(CloseArgs),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct OpenArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Id of the session: 1 to 64 of A-Za-z0-9._- [default: one is made].
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Working directory at the start.
    #[arg(long, value_name = "DIR")]
    cwd: Option<OsString>,
    /// Environment variable; may be repeated.
    #[arg(long = "env", value_name = "K=V")]
    env: Vec<OsString>,
    /// User: name or number, with `:group` if wanted.
    #[arg(long, value_name = "U")]
    user: Option<OsString>,
    /// End it after so long without a command; 0s: never [default: 30m].
    #[arg(long, value_name = "D", value_parser = duration)]
    idle: Option<Duration>,
    /// Request key: the same key is the same session.
    #[arg(long, value_name = "K")]
    key: Option<String>,
    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RunArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Id of the session.
    session: String,
    /// Cancel the command after this time and exit with 124; the session stays.
    #[arg(long, value_name = "D", value_parser = duration)]
    timeout: Option<Duration>,
    /// Read the text from stdin, 1 MiB at most.
    #[arg(short = 'i', long = "stdin", conflicts_with = "text")]
    stdin: bool,
    /// The text, as typed to a shell; words are joined by spaces.
    #[arg(
        required_unless_present = "stdin",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    text: Vec<OsString>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ListArgs {
    /// Id of the sandbox.
    sandbox: String,
    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct CloseArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Ids of the sessions.
    #[arg(required = true, value_name = "SESSION")]
    sessions: Vec<String>,
    #[command(flatten)]
    limit: Limit,
}

pub(crate) async fn verb(reach: &Reach, verb: SessionVerb, out: Out) -> Result<ExitCode, Fault> {
    let done = match verb {
        SessionVerb::Run(args) => return Box::pin(run(reach, args, out)).await,
        SessionVerb::Open(args) => open(reach, args, out).await,
        SessionVerb::List(args) => list(reach, args, out).await,
        SessionVerb::Close(args) => close(reach, args, out).await,
    };
    done.map(|()| ExitCode::SUCCESS)
}

async fn open(reach: &Reach, args: OpenArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let mut open = client.sandbox(args.sandbox, None).session();
    for text in args.env {
        let (key, value) = variable(text)?;
        open = open.env(key, value);
    }
    if let Some(id) = args.id {
        open = open.id(id);
    }
    if let Some(cwd) = args.cwd {
        open = open.cwd(cwd.into_vec());
    }
    if let Some(user) = args.user {
        open = open.user(user.into_vec());
    }
    if let Some(idle) = args.idle {
        open = open.idle(Some(idle).filter(|idle| !idle.is_zero()));
    }
    if let Some(key) = args.key {
        open = open.request_key(key);
    }
    let session = within(Some(limit), async { Ok(open.await?) }).await?;
    let process = match session.process().which() {
        sandbox_sdk::ProcessRef::Id(id) => Some(*id),
        sandbox_sdk::ProcessRef::Name(_) => None,
    };
    out.result(
        || json!({ "session": session.id(), "process": process, "pid": session.pid() }),
        || harmless(session.id()),
    )
}

async fn run(reach: &Reach, args: RunArgs, out: Out) -> Result<ExitCode, Fault> {
    let text = if args.stdin {
        let mut text = Vec::new();
        // One more than is allowed, so that the guest refuses what is too long.
        let mut input = tokio::io::stdin().take(TEXT + 1);
        let read = input.read_to_end(&mut text).await;
        read.map_err(|error| Fault::io("stdin", error))?;
        text
    } else {
        let words: Vec<&[u8]> = args.text.iter().map(|word| word.as_bytes()).collect();
        words.join(&b' ')
    };
    let client = reach.client(None).await?;
    let session = client.sandbox(args.sandbox, None).session_by_id(args.session);
    let mut command = session.run(text);
    if let Some(timeout) = args.timeout {
        command = command.timeout(timeout);
    }
    let stream = command.stream().await?;
    let mut signals = Signals::catch()?;
    let signaller = stream.signaller();
    let mut output = Box::pin(output(stream, out));
    let done = loop {
        tokio::select! {
            done = &mut output => break done?,
            number = signals.next() => signaller.signal(number.into()).await,
        }
    };
    done.print(&session, out)?;
    Ok(if done.exit.timed_out {
        exec::TIMED_OUT.into()
    } else {
        exec::how(done.exit.how).into()
    })
}

/// A command that has ended, and what was said if that was kept.
struct Done {
    exit: SessionExit,
    kept: [Kept; 4],
}

/// Keys of what is kept.
const KEPT: [&str; 4] = ["stdout", "stderr", "late_stdout", "late_stderr"];

impl Done {
    fn print(&self, session: &SessionHandle, out: Out) -> Result<(), Fault> {
        let exit = &self.exit;
        if !out.json {
            if exit.session_ended {
                print::stderr(&format!(
                    "sandboxctl: session {} has ended",
                    harmless(session.id())
                ));
            }
            return Ok(());
        }
        let mut object = Map::new();
        json::exit(&mut object, exit.how, exit.timed_out);
        object.insert("cancelled".to_owned(), json!(exit.cancelled));
        object.insert("session_ended".to_owned(), json!(exit.session_ended));
        object.insert("cwd".to_owned(), json!(lossy(&exit.cwd)));
        object.insert(
            "truncated".to_owned(),
            json!(self.kept.iter().any(|kept| kept.cut)),
        );
        for (name, kept) in KEPT.iter().zip(&self.kept) {
            json::output(&mut object, name, kept.bytes.clone());
        }
        print::line(&Value::Object(object).to_string())
    }
}

async fn output(mut stream: SessionStream, out: Out) -> Result<Done, Fault> {
    let mut kept: [Kept; 4] = Default::default();
    let (mut to_stdout, mut to_stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some(event) = stream.next().await {
        let (data, at) = match event? {
            SessionEvent::Started { number: _ } => continue,
            SessionEvent::Stdout(data) => (data, 0),
            SessionEvent::Stderr(data) => (data, 1),
            SessionEvent::LateStdout(data) => (data, 2),
            SessionEvent::LateStderr(data) => (data, 3),
            SessionEvent::Exit(exit) => return Ok(Done { exit: *exit, kept }),
        };
        match (out.json, at) {
            (true, at) => kept.iter_mut().skip(at).take(1).for_each(|kept| kept.push(&data)),
            (false, 0 | 2) => relay::write(&mut to_stdout, &data)
                .await
                .map_err(|error| Fault::io("stdout", error))?,
            // A command goes on when nobody reads its complaints.
            (false, _) => drop(relay::write(&mut to_stderr, &data).await),
        }
    }
    Err(relay::no_exit())
}

async fn list(reach: &Reach, args: ListArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let rows = within(Some(limit), async { Ok(sandbox.sessions().await?) }).await?;
    out.result(
        || json!({ "sessions": rows.iter().map(json::session).collect::<Vec<_>>() }),
        || human::sessions(&rows),
    )
}

async fn close(reach: &Reach, args: CloseArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    within(Some(limit), async {
        let mut failed = false;
        for id in args.sessions {
            match sandbox.session_by_id(&*id).close().await {
                Ok(()) => out.result(|| json!({ "session": id }), || harmless(&id))?,
                Err(error) => {
                    failed = true;
                    // The code of it is 1 or 3 by itself; all others are tried all the same.
                    let _code = Fault::from(error).report(out, None);
                }
            }
        }
        if failed { Err(Fault::Told) } else { Ok(()) }
    })
    .await
}
